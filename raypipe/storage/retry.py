"""Reads that are tried again: after a fault of storage that may pass, and after bad data in a copy on this node.

A disk may garble a copy after it came whole. So bad data in a copy are no proof: unless the copy has the sum that the
storage tells, what the node keeps of the file is fetched once more, and only if that is the same, the file is bad.
"""

import random
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from raypipe.errors import ConfigError, DownloadError, RaypipeError, causes, is_data_fault
from raypipe.storage.hub.client import PassingError
from raypipe.storage.node_cache import Fetch, FileCache, Result
from raypipe.storage.request_budget import parse_wait_s, say_wait

RETRY_WAITS_S: Final = (0.5, 2.0, 8.0)
"""Waits before each retry; each is varied by half, so that many readers do not come back at once."""

_MOST_ASKED_S: Final = 120.0
"""Do not retry storage that asks for a longer wait: better to end a run than to let it stall."""

_MOST_TRIED_S: Final = 120.0
"""Do not retry storage that has failed for this long: the libraries below retry for minutes by themselves."""

_renewing = threading.Lock()

_count_of: Counter[str] = Counter()
"""The number of the last renewal of each file's copies, counted over all files; the key "" has the total."""

_sure: set[str] = set()
"""Files that are bad at their source, by path and version."""


def retry_transient(read: Callable[[], Result], sleep: Callable[[float], None] = time.sleep) -> Result:
    """Return what `read` returns; retry after a wait while it fails in a way that may pass.

    Wait at least as long as the storage asks (``Retry-After``).
    """
    last = time.monotonic() + _MOST_TRIED_S
    for wait_s in RETRY_WAITS_S:
        try:
            return read()
        except (RaypipeError, OSError) as error:
            asked_s = _asked_wait_s(error)
            if not is_transient(error) or asked_s > _MOST_ASKED_S or time.monotonic() > last:
                raise
            pause_s = max(wait_s * (0.5 + random.random()), asked_s)
            if asked_s:
                say_wait(pause_s, f"storage asks for that ({type(error).__name__}: {' '.join(str(error).split())})")
            sleep(pause_s)
    return read()


def is_transient(error: BaseException) -> bool:
    """Return whether an error or its cause is a fault of storage that may pass."""
    for cause in causes(error, also_context=False):
        if isinstance(cause, TimeoutError | ConnectionError | DownloadError):
            return True
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | PermissionError):
            # pyarrow raises a plain OSError for a damaged file; only an error with an errno comes from the system.
            return cause.errno is not None
    return False


def _asked_wait_s(error: BaseException) -> float:
    for cause in causes(error, also_context=False):
        if isinstance(cause, PassingError):
            return cause.wait_s
        headers: Any = getattr(cause, "headers", None)
        if headers is None:
            # botocore keeps the response in the error.
            told = getattr(cause, "response", None)
            headers = told.get("ResponseMetadata", {}).get("HTTPHeaders") if isinstance(told, dict) else None
        if headers:
            given = str(headers.get("Retry-After") or headers.get("retry-after") or "")
            if given:
                return parse_wait_s(given)
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What a node keeps of a file: the whole file, or parts of it."""

    cache: FileCache
    file: str
    """Path and version of the file."""
    wanted: Sequence[tuple[str, Fetch, int | None]]
    """What `FileCache.hold` takes for each."""
    is_sound: Callable[[], bool]
    """Whether they are known to be what the storage has: then only reading them again can help."""


def read_twice(read: Callable[[], Result], copies: Callable[[], Copies | None], close: Callable[[], None]) -> Result:
    """Return what `read` returns; after bad data, fetch the node's copies again and return the second result.

    A file that is still bad then is bad where it comes from, and not fetched again for that by this process. Where
    there is no room to fetch it once more, nobody knows, and it is taken for bad. `copies` returns None if the node
    keeps nothing of the file, and `close` closes what is open of it.
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


def _clear_frames(error: BaseException) -> None:
    """Let go what readers that failed had open: their frames, and so the error, refer to it."""
    for cause in causes(error, also_context=True):
        traceback.clear_frames(cause.__traceback__)


def _is_bad_data(error: Exception) -> bool:
    return is_data_fault(error) and not isinstance(error, DownloadError | ConfigError) and not is_transient(error)


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
