"""Copies of remote files on this node: the cache that keeps them, and what to do about a damaged one.

A disk may garble a copy after it came whole. So bad data in a copy are no proof: unless the copy has the sum that the
storage tells, what the node keeps of the file is fetched once more, and only if that is the same, the file is bad.
"""

import os
import threading
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from raypipe.errors import ConfigError, DownloadError, is_data_fault
from raypipe.storage.node_cache import Fetch, FileCache
from raypipe.storage.retry import is_transient
from raypipe.storage.spec import FOLDER_BOUND, CacheSpec

LOOK_AT_DISK: Final = "look at the disk (dmesg), the mount, and how many files may be open (ulimit -n)"

_PIECE_BYTES: Final = 1 << 20

_MOST_NOTED: Final = 256
"""Files whose parts this process remembers: more than are open at once."""

Copied = TypeVar("Copied")

_lock, _renewing = threading.Lock(), threading.Lock()
_caches: dict[tuple[str, int, bool], FileCache] = {}


def open_cache(spec: CacheSpec) -> FileCache:
    """Return the cache of this process; its files are shared with all processes of the node."""
    folder, max_bytes, is_default = os.path.expanduser(spec.folder), spec.sure_bytes, spec.max_bytes == FOLDER_BOUND
    key = (folder, max_bytes, is_default)
    with _lock:
        if key not in _caches:
            _caches[key] = FileCache(folder, max_bytes, is_default=is_default)
        return _caches[key]


def read_twice(read: Callable[[], Copied], copies: "Callable[[], Copies | None]", close: Callable[[], None]) -> Copied:
    """Return what `read` returns; after bad data, fetch the node's copies again and return the second result.

    A file that is still bad then is bad where it comes from, and not fetched again for that by this process. Where
    there is no room to fetch it once more, nobody knows, and it is taken for bad.

    Args:
        copies: returns what the node keeps of the file; None if it keeps nothing.
        close: closes what is open of the file.
    """
    begun = _count_of[""]
    try:
        return read()
    except Exception as error:
        kept = copies() if _is_bad_data(error) else None
        if kept is None or kept.file in _sure:
            raise
        # First: what is open holds the old copy, and the new one would need room beside it.
        close()
        _clear_frames(error)
        if not _renew(kept, begun):
            raise
    try:
        return read()
    except Exception as error:
        if _is_bad_data(error):
            _sure.add(kept.file)
        raise


def _clear_frames(error: BaseException | None) -> None:
    """Let go what readers that failed had open: their frames, and so the error, refer to it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_bad_data(error: Exception) -> bool:
    return is_data_fault(error) and not isinstance(error, DownloadError | ConfigError) and not is_transient(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What a node keeps of a file: the whole file, or parts of it."""

    cache: FileCache
    file: str
    """Path and version of the file."""
    wanted: Sequence[tuple[str, Fetch, int]]
    """What `FileCache.hold` takes for each."""
    is_sound: Callable[[], bool]
    """Whether they are known to be what the storage has: then only reading them again can help."""


def _renew(kept: Copies, begun: int) -> bool:
    """Fetch copies once more, unless another thread has since `begun`; return whether reading them again may help."""
    with _renewing:
        if _count_of[kept.file] > begun:
            return True
        is_other = [False] if kept.is_sound() else [kept.cache.renew(*one) for one in kept.wanted]
        is_renewed = bool(is_other) and None not in is_other
        if is_renewed:
            _count_of[""] += 1
            _count_of[kept.file] = _count_of[""]
    if True in is_other:
        warnings.warn(
            f"what this node keeps of {kept.file} in {kept.cache.folder!r} was damaged, and is fetched again. Look at "
            f"the disk (dmesg) if that happens often.",
            stacklevel=2,
        )
    return is_renewed


_count_of: "Counter[str]" = Counter()
"""The number of the last renewal of each file's copies, counted over all files; the key "" has the total."""

_sure: set[str] = set()
"""Files that are bad at their source, by path and version."""

_parts: "OrderedDict[tuple[str, str], set[tuple[int, int]]]" = OrderedDict()
"""The parts that this process has used of its last `_MOST_NOTED` files, by root and name."""


def note_part(uri: str, name: str, part: tuple[int, int]) -> None:
    """Remember that this process uses a part of a file."""
    with _lock:
        _parts.setdefault((uri, name), set()).add(part)
        _parts.move_to_end((uri, name))
        if len(_parts) > _MOST_NOTED:
            _parts.popitem(last=False)


def list_parts(uri: str, name: str) -> list[tuple[int, int]]:
    """Return the parts of a file that this process has used."""
    with _lock:
        return sorted(_parts.get((uri, name), ()))


def check_file(path: str, start: int = 0, stop: int | None = None) -> None:
    """Raise if this machine cannot read the bytes of a local file, whatever their content; see `check_readable`.

    Raises:
        DownloadError: the disk fails, or too many files are open.
    """
    if not os.path.isfile(path):
        return
    try:
        with open(path, "rb", buffering=0) as stream:
            stream.seek(start)
            while (stop is None or stream.tell() < stop) and stream.read(_PIECE_BYTES):
                pass
    except OSError as error:
        raise unreadable_file(path, error) from error


def unreadable_file(path: str, error: OSError, remedy: str = LOOK_AT_DISK) -> DownloadError:
    """Return the error for a file that this machine could not read, whatever its content."""
    return DownloadError(
        f"this machine cannot read {path!r}: {error.strerror or error}. That says nothing of what the file holds: "
        f"{remedy}."
    )
