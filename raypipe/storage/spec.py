"""Where a node keeps files of remote storage, how many bytes of them, and which of them whole."""

from dataclasses import dataclass, replace
from typing import Final, Literal

from raypipe.errors import ConfigError

DEFAULT_FOLDER: Final = "~/.cache/raypipe/files"

FOLDER_BOUND: Final = "folder"

DEFAULT_BYTES: Final = 64 << 30
"""Of a folder for which nobody has given a bound."""

PART_BYTES: Final = 32 << 20
"""A file up to this size is fetched whole also where the dataset does not fit: an episode's video is not larger."""

LOOK_BYTES: Final = 8 << 20
"""A file up to this size is fetched whole also for a look at its footer or index: a request costs as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Where every node keeps files of remote storage, and how many bytes of them."""

    folder: str = DEFAULT_FOLDER
    """On a local disk of the node. All processes and jobs of a user may share it."""

    max_bytes: int | Literal["folder"] = FOLDER_BOUND
    """Of whole and half-fetched files together. The least recently used that nobody uses make room. ``"folder"`` is 64
    GiB, or the larger bound that was last given for the folder: so who says nothing, as `open_dataset`, does not remove
    what a job with a larger cache has kept."""

    whole_bytes: int = 1 << 30
    """Files up to this size are fetched whole: one request, and every later epoch reads them from disk. Of larger ones
    only the parts in use are fetched. LeRobot closes a file of videos at 200 or 500 MB."""

    prefetch: bool = True
    """Whether a rank fetches what it needs next ahead of time."""

    def __post_init__(self) -> None:
        if not self.folder or "://" in self.folder:
            raise ConfigError(f"the folder of a cache is {self.folder!r}; give a folder on a local disk")
        if self.max_bytes != FOLDER_BOUND:
            self._store_bytes("max_bytes", 1, f", or {FOLDER_BOUND!r}")
        self._store_bytes("whole_bytes", 0)

    def _store_bytes(self, name: str, least: int, other: str = "") -> None:
        """Store a number of bytes as an int, since people write 200e9 too."""
        value = getattr(self, name)
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not is_whole or value < least:
            raise ConfigError(
                f"{name} of a cache must be a whole number of bytes, at least {least}{other}; got {value!r}"
            )
        object.__setattr__(self, name, int(value))

    @property
    def sure_bytes(self) -> int:
        """The bytes that the cache may hold on any node, whatever was given for its folder there."""
        return DEFAULT_BYTES if self.max_bytes == FOLDER_BOUND else self.max_bytes

    def for_a_look(self) -> "CacheSpec":
        """Return this cache for readers of a few bytes of many files: they do not have a large file fetched whole."""
        return replace(self, whole_bytes=min(self.whole_bytes, LOOK_BYTES))

    def is_fetched_whole(self, size_bytes: int, run_bytes: int) -> bool:
        """Return whether a file is fetched whole, by its size and that of all files that a run reads through the cache.

        Datasets that do not fit would be fetched many times over, were a whole file fetched for each of their spans:
        then only small files are.
        """
        if size_bytes > min(self.whole_bytes, self.sure_bytes):
            return False
        return run_bytes <= self.sure_bytes or size_bytes <= PART_BYTES
