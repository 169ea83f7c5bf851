"""Where a node keeps remote files, how many bytes of them, and which it fetches whole."""

from dataclasses import dataclass, replace
from typing import Final, Literal

from raypipe.errors import ConfigError
from raypipe.text import parse_bytes

DEFAULT_FOLDER: Final = "~/.cache/raypipe/files"

FOLDER_BOUND: Final = "folder"

DEFAULT_BYTES: Final = 64 << 30
"""The bound of a folder for which no job has given one."""

PART_BYTES: Final = 32 << 20
"""Files up to this size are fetched whole even if the dataset does not fit: an episode's video is no larger."""

LOOK_BYTES: Final = 8 << 20
"""Files up to this size are fetched whole even for a look at a footer or index: a request costs as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Where every node keeps remote files, and how many bytes of them."""

    folder: str = DEFAULT_FOLDER
    """On a local disk of the node. All processes and jobs of a user may share it."""

    max_bytes: int | Literal["folder"] = FOLDER_BOUND
    """For whole and half-fetched files together: a number, or text such as ``"200GB"``. The cache removes the least
    recently used of the files not in use. ``"folder"`` is 64 GiB, or the larger bound last given for the folder: a
    caller without a bound, such as `open_dataset`, does not remove what a job with a larger cache has kept."""

    whole_bytes: int = 1 << 30
    """Files up to this size are fetched whole: one request, and every later epoch reads them from disk. For larger
    files only the parts in use are fetched. LeRobot closes a file of videos at 200 or 500 MB."""

    prefetch: bool = True
    """Whether a rank fetches what it needs next ahead of time."""

    def __post_init__(self) -> None:
        if not self.folder or "://" in self.folder:
            raise ConfigError(f"the folder of a cache is {self.folder!r}; give a folder on a local disk")
        if self.max_bytes != FOLDER_BOUND:
            most = parse_bytes(self.max_bytes, "max_bytes of a cache", named_value=FOLDER_BOUND)
            object.__setattr__(self, "max_bytes", most)
        object.__setattr__(self, "whole_bytes", parse_bytes(self.whole_bytes, "whole_bytes of a cache", least=0))

    @property
    def sure_bytes(self) -> int:
        """The bytes that the cache may hold on any node, whatever other jobs gave for its folder there."""
        return DEFAULT_BYTES if self.max_bytes == FOLDER_BOUND else self.max_bytes

    def for_a_look(self) -> "CacheSpec":
        """Return this cache for readers of a few bytes of many files: it does not fetch large files whole."""
        return replace(self, whole_bytes=min(self.whole_bytes, LOOK_BYTES))

    def is_fetched_whole(self, size_bytes: int, run_bytes: int) -> bool:
        """Return whether a file is fetched whole, given its size and that of all files that the run reads.

        If those do not fit in the cache, only small files are fetched whole: a whole file for each span would fetch the
        dataset many times over.
        """
        if size_bytes > min(self.whole_bytes, self.sure_bytes):
            return False
        return run_bytes <= self.sure_bytes or size_bytes <= PART_BYTES
