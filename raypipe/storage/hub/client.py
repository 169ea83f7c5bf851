"""Requests to the Hub: keeps the budget, waits as the Hub asks, and retries failures that may pass.

It uses huggingface_hub's session, so proxies, certificates and tokens are as users have set them, but neither `HfApi`
nor `hf_hub_download`. In 2.4, with any client factory, these

- turn time-outs off for listings and revisions, and bound neither the size of an answer nor the number of pages;
- send the token to whatever host the next page is said to be at;
- sleep as long as a server asks, beyond any ``stop``, in one thread while the others go on, and do not read dates;
- compare no hashes, do not retry a 503 for a file, ask twice for each file, and remove a partial file.
"""

import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from raypipe.errors import ConfigError, DownloadError, RaypipeError, causes, suggest
from raypipe.storage.request_budget import Pace, TooSlowError, count_requests, current_gate, parse_wait_s, say_wait
from raypipe.text import BODY_CODES, MOST_JSON_BYTES, join_within, parse_json

TRIES_OF_NO_HOST: Final = 2
"""When the host name is unknown, as without a network: a mistyped path must fail soon."""

TRIES: Final = 6
"""Attempts in a row without progress before an error."""

FIRST_WAIT_S: Final = 0.5
"""Doubled after every attempt without progress, and varied by half either way: about 15 s in all."""

MOST_WAIT_S: Final = 600.0
"""The longest wait that a server may ask for: twice the 300 s over which the Hub counts requests."""

LEFT_ALONE_S: Final = 60.0
"""How long not to ask for a file again after a longer wait was asked for: another thread would get the same answer."""

PROGRESS_BYTES: Final = 1 << 20
"""An attempt that has brought this much does not count as failed."""

RANGE_REFUSED: Final = 416

_MOST_PAGES: Final = 1000
"""Pages of a listing: a million files, ten times as many as the Hub recommends for a repo."""

_PASSING_STATUS: Final = frozenset({408, RANGE_REFUSED, 429, 500, 502, 503, 504})
_RATE_LIMIT: Final = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})\b")
"""Matches the header ``RateLimit: "api";r=0;t=55``: no requests left, for 55 s."""

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRequest:
    """What a request is about, for messages."""

    repo_id: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        about = f"dataset {self.repo_id!r}"
        about += f" at revision {self.revision!r}" if self.revision else ""
        return f"{self.file!r} of {about}" if self.file else about


class PassingError(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, reason: str, *, wait_s: float = 0.0, status: int = 0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        """How long the Hub asks us to wait."""
        self.status = status
        """The status of the answer; 0 if there was no answer."""
        self.has_progress = False


class _HubRefusedError(Exception):
    """The Hub refused, and a retry would not help."""


_REFUSALS: Final[dict[str, tuple[type[RaypipeError], str]]] = {
    "EntryNotFound": (DownloadError, "{hub} has no file {ask}. Look at the repo, or choose another revision."),
    "RepoNotFound": (
        ConfigError,
        "no dataset {ask.repo_id!r} is found at {hub}, and no such folder here. If it is private, log in "
        "(`hf auth login`) or set HF_TOKEN.",
    ),
    "GatedRepo": (
        ConfigError,
        "dataset {ask.repo_id!r} is gated: ask for access at {hub}/datasets/{ask.repo_id}, then log in "
        "(`hf auth login`) or set HF_TOKEN",
    ),
    "BadToken": (
        ConfigError,
        "{hub} does not accept your token, asked for {ask}. Log in again (`hf auth login`), or set HF_TOKEN.",
    ),
    "other": (DownloadError, "cannot fetch {ask}: {hub} refuses it ({kind}). Check HF_ENDPOINT and HF_TOKEN."),
}
"""By the Hub's code. A missing revision is apart."""


class Client:
    """Sends requests to the Hub. Thread-safe: if the Hub asks one thread to wait, the gate lets none through."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Requests sent so far, redirects included."""
        self._lock = threading.Lock()
        self._said_until = 0.0
        """The end of the last wait that was announced: all threads wait for it, and only one warns."""
        self._left_alone: dict[HubRequest, tuple[float, PassingError]] = {}
        """The time until which not to send a request, and the Hub's last answer to it."""
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End all attempts of other threads, including those that wait."""
        self._stopped.set()

    def check_running(self) -> None:
        """Raise if `stop` was called."""
        if self._stopped.is_set():
            raise DownloadError("stopped, since another file failed")

    def read_json(self, path: str, ask: HubRequest) -> Any:
        """Return what the Hub answers at ``/api/datasets/{path}``."""
        return self._read_page(f"{endpoint()}/api/datasets/{path}", ask)[0]

    def read_pages(self, path: str, ask: HubRequest) -> Iterator[Any]:
        """Yield the items of all pages of a listing."""
        url, seen = f"{endpoint()}/api/datasets/{path}", set[str]()
        while url:
            if url in seen or len(seen) >= _MOST_PAGES:
                told = "comes back to a page that it had" if url in seen else f"has more than {_MOST_PAGES} pages"
                raise DownloadError(f"the listing of {ask} at {endpoint()} {told}. Check HF_ENDPOINT, or the repo.")
            seen.add(url)
            page, url = self._read_page(url, ask)
            if not isinstance(page, list):
                raise odd_answer(ask, f"a page of the listing is {type(page).__name__} and no list")
            yield from page

    def attempt(self, ask: HubRequest, run: Callable[[], Reply]) -> Reply:
        """Return what `run` returns; retry while it raises a `PassingError`, and explain a refusal."""
        failed = 0
        while True:
            self._wait_turn()
            until_s, answer = self._left_alone.get(ask, (0.0, None))
            if answer is not None and time.monotonic() < until_s:
                raise _give_up(ask, answer, failed) from answer
            try:
                return run()
            except _HubRefusedError as refusal:
                raise self._explain(str(refusal), ask) from refusal.__cause__
            except PassingError as fault:
                failed = 0 if fault.has_progress else failed + 1
                if fault.wait_s > MOST_WAIT_S:
                    self._left_alone[ask] = time.monotonic() + LEFT_ALONE_S, fault
                if failed >= (TRIES_OF_NO_HOST if _has_no_host(fault) else TRIES) or fault.wait_s > MOST_WAIT_S:
                    raise _give_up(ask, fault, failed) from fault
                self._back_off(fault, failed)

    @contextmanager
    def open(self, url: str, headers: dict[str, str]) -> Iterator[Any]:
        """Send one GET and yield its response, body unread; raise a `PassingError` if the network or the Hub fails."""
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, get_session

        # A compressed body cannot be continued in the middle, and its length is not that of the file.
        sent = {**build_hf_headers(library_name="raypipe"), "Accept-Encoding": "identity", **headers}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self._count(1)
        try:
            with get_session().stream("GET", url, headers=sent, timeout=timeout, follow_redirects=True) as response:
                self._count(len(response.history))
                _check_status(response)
                if (packed := response.headers.get("Content-Encoding", "")).lower() not in BODY_CODES:
                    raise _HubRefusedError(f"it sends a body as {packed!r}, for which nobody asked")
                yield response
        except Exception as error:
            fault = _network_fault(error)
            if fault is None:
                raise
            raise fault from error

    def pieces(self, response: Any) -> Iterator[bytes]:
        """Yield the body of a response as it arrives, until `stop`; raise if it arrives too slowly."""
        for piece in Pace().follow(response.iter_bytes()):
            self.check_running()
            yield piece

    def _read_page(self, url: str, ask: HubRequest) -> tuple[Any, str]:
        """Return the value of an answer, and the address of the next page; empty on the last one."""

        def read() -> tuple[Any, str]:
            with self.open(url, {}) as response:
                try:
                    content = join_within(self.pieces(response), MOST_JSON_BYTES)
                except ValueError as error:
                    raise DownloadError(
                        f"the answer of {endpoint()} for {ask} has {error}. Check HF_ENDPOINT."
                    ) from error
                try:
                    return parse_json(content), _at_endpoint(response.links.get("next", {}).get("url", ""))
                except ValueError as error:
                    raise PassingError(f"the answer is no JSON, so {endpoint()} may be no Hub") from error

        return self.attempt(ask, read)

    def _count(self, num_requests: int) -> None:
        with self._lock:
            self.num_requests += num_requests
        count_requests(num_requests)

    def _wait_turn(self) -> None:
        """Wait until the gate lets a request through; it must be sent at once."""
        self.check_running()
        turn = current_gate().take()
        while turn.wait_s > 0:
            self._say(turn.wait_s, "the budget of requests to the Hub is spent, or the Hub has asked for a pause")
            self._sleep(turn.wait_s)
            turn = current_gate().take(turn)

    def _back_off(self, fault: PassingError, failed: int) -> None:
        own_s = FIRST_WAIT_S * 2 ** max(failed - 1, 0)
        if fault.wait_s:
            current_gate().pause(fault.wait_s)
            self._say(fault.wait_s, f"{fault}, and it asks for that; Ctrl-C ends it, and what is complete is kept")
        # Random, so that processes that failed together do not retry together.
        self._sleep(fault.wait_s + own_s * (0.5 + random.random()))

    def _say(self, wait_s: float, why: str) -> None:
        with self._lock:
            until_s = time.monotonic() + wait_s
            is_new = until_s > self._said_until + 1
            self._said_until = max(self._said_until, until_s)
        if is_new:
            say_wait(wait_s, why)

    def _sleep(self, wait_s: float) -> None:
        self._stopped.wait(wait_s)
        self.check_running()

    def _explain(self, kind: str, ask: HubRequest) -> RaypipeError:
        """Return the error for a refusal; for a missing revision, look up the known ones."""
        if kind == "RevisionNotFound":
            refs = None
            with suppress(RaypipeError):
                refs = self.read_json(f"{ask.repo_id}/refs", HubRequest(repo_id=ask.repo_id))
            known = ref_names(refs, "tags") + ref_names(refs, "branches")
            return ConfigError(
                f"there is no revision {ask.revision!r} of dataset {ask.repo_id!r}{suggest(ask.revision, known)}"
            )
        error, told = _REFUSALS.get(kind, _REFUSALS["other"])
        return error(told.format(ask=ask, hub=endpoint(), kind=kind))


def _give_up(ask: HubRequest, fault: PassingError, failed: int) -> DownloadError:
    told = f"; it asks to wait for {fault.wait_s:.0f} s" if fault.wait_s > MOST_WAIT_S else ""
    return DownloadError(
        f"cannot fetch {ask} from {endpoint()}, after {failed} attempts: {fault}{told}. Try again later: what is "
        f"complete is kept."
    )


def odd_answer(ask: HubRequest, what: str) -> DownloadError:
    """Return the error for an answer that makes no sense."""
    return DownloadError(f"the answer of {endpoint()} for {ask} makes no sense: {what}. Check HF_ENDPOINT.")


def ref_names(refs: Any, kind: str) -> list[str]:
    """Return the names of the tags or branches in an answer; malformed entries are left out."""
    found = refs.get(kind) if isinstance(refs, dict) else None
    known = found if isinstance(found, list) else []
    return [str(one["name"]) for one in known if isinstance(one, dict) and "name" in one]


def is_offline() -> bool:
    """Return whether the user has forbidden requests (``HF_HUB_OFFLINE``)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def endpoint() -> str:
    """Return the address of the Hub (``HF_ENDPOINT``)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _at_endpoint(url: str) -> str:
    """Return an address from the Hub, moved to our endpoint, so that the token goes nowhere else."""
    if not url or url.startswith(f"{endpoint()}/"):
        return url
    parts = urlsplit(url)
    return f"{endpoint()}{parts.path}?{parts.query}"


def _check_status(response: Any) -> None:
    """Raise unless the status means success."""
    status = int(response.status_code)
    if status < 400:
        return
    if status in _PASSING_STATUS:
        raise PassingError(f"the Hub answers {status}", wait_s=_asked_wait_s(response.headers), status=status)
    message = response.headers.get("X-Error-Message", "")
    if message == "Invalid credentials in Authorization header":
        raise _HubRefusedError("BadToken")
    code = response.headers.get("X-Error-Code", "")
    # Without a token the Hub does not distinguish a private repo from a missing one.
    raise _HubRefusedError(code or ("RepoNotFound" if status == 401 else f"status {status} {message}".strip()))


def _asked_wait_s(headers: Any) -> float:
    """Return how many seconds the Hub asks us to wait; 0 if it does not say."""
    given = headers.get("Retry-After", "")
    if given.strip():
        return parse_wait_s(given)
    limit = _RATE_LIMIT.search(headers.get("RateLimit", ""))
    return float(limit[1]) if limit else 0.0


def _network_fault(error: Exception) -> Exception | None:
    """Return a `PassingError` or a refusal for an error of a request; None for any other error."""
    # By name: huggingface_hub uses httpx in 1.x and httpx2 in 2.x.
    names = {one.__name__ for one in type(error).__mro__}
    told = f"{type(error).__name__}: {str(error) or 'no answer'}"
    if isinstance(error, TooSlowError) or "TransportError" in names:
        return PassingError(told)
    # A redirect loop or an invalid redirect, or a body that cannot be unpacked.
    return _HubRefusedError(told) if names & {"RequestError", "InvalidURL"} else None


def _has_no_host(fault: BaseException) -> bool:
    """Return whether the Hub's host name cannot be resolved here."""
    found = (cause for cause in causes(fault, also_context=True) if isinstance(cause, socket.gaierror))
    return any(cause.errno == socket.EAI_NONAME for cause in found)
