"""Retries of reads that fail for a while: a time-out, a reset connection, busy storage."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from raypipe.errors import DownloadError, RaypipeError
from raypipe.storage.hub.client import PassingError
from raypipe.storage.request_budget import parse_wait_s, say_wait

RETRY_WAITS_S: Final = (0.5, 2.0, 8.0)
"""Waits before each retry; each is varied by half, so that many readers do not come back at once."""

_MOST_ASKED_S: Final = 120.0
"""Do not retry storage that asks for a longer wait: better to end a run than to let it stall."""

_MOST_TRIED_S: Final = 120.0
"""Do not retry storage that has failed for this long: the libraries below retry for minutes by themselves."""

Result = TypeVar("Result")


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
            say_wait(pause_s, f"storage asks for that ({type(error).__name__}: {' '.join(str(error).split())})")
            sleep(pause_s)
    return read()


def is_transient(error: BaseException) -> bool:
    """Return whether an error or its cause is a fault of storage that may pass."""
    for cause in _causes(error):
        if isinstance(cause, TimeoutError | ConnectionError | DownloadError):
            return True
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | PermissionError):
            # pyarrow raises a plain OSError for a damaged file; only an error with an errno comes from the system.
            return cause.errno is not None
    return False


def _asked_wait_s(error: BaseException) -> float:
    for cause in _causes(error):
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


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
