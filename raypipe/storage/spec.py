"""Where a node keeps files of remote storage, how many bytes of them, and which of them whole."""

from dataclasses import dataclass, replace
from typing import Final

from raypipe.errors import ConfigError

DEFAULT_FOLDER: Final = "~/.cache/raypipe/files"

PART_BYTES: Final = 32 << 20
"""A file up to this size is fetched whole also where the dataset does not fit: an episode's video is not larger."""

LOOK_BYTES: Final = 8 << 20
"""A file up to this size is fetched whole also for a look at its footer or index: a request costs as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Where every node keeps files of remote storage, and how many bytes of them."""

    folder: str = DEFAULT_FOLDER
    """On a local disk of the node. All processes and jobs of a user may share it."""

    max_bytes: int = 64 << 30
    """Of whole and half-fetched files together. The least recently used that nobody uses make room."""

    whole_bytes: int = 1 << 30
    """Files up to this size are fetched whole: one request, and every later epoch reads them from disk. Of larger ones
    only the parts in use are fetched. LeRobot closes a file of videos at 200 or 500 MB."""

    prefetch: bool = True
    """Whether a rank fetches what it needs next ahead of time."""

    def __post_init__(self) -> None:
        if not self.folder or "://" in self.folder:
            raise ConfigError(f"the folder of a cache is {self.folder!r}; give a folder on a local disk")
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes of a cache must be at least 1, got {self.max_bytes}")
        if self.whole_bytes < 0:
            raise ConfigError(f"whole_bytes of a cache must be at least 0, got {self.whole_bytes}")

    def for_a_look(self) -> "CacheSpec":
        """Return this cache for readers of a few bytes of many files: they do not have a large file fetched whole."""
        return replace(self, whole_bytes=min(self.whole_bytes, LOOK_BYTES))

    def is_fetched_whole(self, size_bytes: int, dataset_bytes: int) -> bool:
        """Return whether a file is fetched whole, by its size and that of all files of its dataset.

        A dataset that does not fit would be fetched many times over, were a whole file fetched for each of its spans:
        then only small files are.
        """
        if size_bytes > min(self.whole_bytes, self.max_bytes):
            return False
        return dataset_bytes <= self.max_bytes or size_bytes <= PART_BYTES
