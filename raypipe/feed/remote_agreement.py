"""Reach the `Meeting` of rank 0 from the other processes that ``torchrun`` or Accelerate started.

Rank 0 serves it on its own port. A caller first proves that it knows the run's key, which travels through torch's
process group; only then does rank 0 unpickle anything. Every call opens a connection: a rank makes few calls an epoch.
"""

import os
import socket
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, Final

from raypipe.errors import RaypipeError
from raypipe.feed.agreement import Ask, Meeting, PassPlace
from raypipe.feed.bad_data import BadSpan
from raypipe.feed.metrics import LoaderStats

LOOPBACK: Final = "127.0.0.1"
_CALLS: Final = frozenset({"begin", "go_on", "missing_ranks", "report_bad", "note_bad", "tell", "figures"})


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RemoteMeeting:
    """Forwards the methods of `Meeting` to rank 0."""

    address: tuple[str, int]
    key: bytes

    def begin(self, rank: int, ask: Ask, place: PassPlace | None) -> PassPlace:
        """Return the place of a pass, if all ranks make the same request."""
        answer: PassPlace = self._call("begin", rank, ask, place)
        return answer

    def go_on(self, rank: int, place: PassPlace) -> None:
        """Note that a rank begins a pass."""
        self._call("go_on", rank, place)

    def missing_ranks(self) -> list[int]:
        """Return the ranks that others wait for."""
        answer: list[int] = self._call("missing_ranks")
        return answer

    def report_bad(self, span: BadSpan) -> None:
        """Note a span that a rank leaves out."""
        self._call("report_bad", span)

    def note_bad(self, episodes: Mapping[tuple[int, int], str]) -> None:
        """Count episodes that an earlier start left out as bad."""
        self._call("note_bad", dict(episodes))

    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Store the figures of a rank."""
        # Ignore it if rank 0 has ended first: the figures are only for people to read.
        with suppress(RaypipeError):
            self._call("tell", rank, stats)

    def figures(self) -> dict[int, LoaderStats]:
        """Return the latest figures of each rank."""
        # As in `tell`.
        with suppress(RaypipeError):
            answer: dict[int, LoaderStats] = self._call("figures")
            return answer
        return {}

    def _call(self, name: str, *args: Any) -> Any:
        try:
            with Client(self.address) as connection:
                _send_at_once(connection)
                answer_challenge(connection, self.key)
                deliver_challenge(connection, self.key)
                connection.send((name, args))
                answer = connection.recv()
        except (OSError, EOFError, AuthenticationError) as error:
            raise RaypipeError(
                f"rank 0, where the ranks of this run meet ({self.address[0]}:{self.address[1]}), does not answer: "
                f"{type(error).__name__} {error}. If its process has ended, start the ranks again from the last state; "
                f"else this machine must be able to reach that port."
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve_meeting(meeting: Meeting, host: str) -> RemoteMeeting:
    """Return a proxy for a meeting that this process serves as long as the proxy lives. Send copies to other ranks.

    Args:
        host: the name under which the other processes reach this machine.
    """
    key = os.urandom(32)
    # A machine may resolve its own name to an address that others cannot reach, so with others listen on all addresses.
    listener = Listener((LOOPBACK if host == LOOPBACK else "0.0.0.0", 0), backlog=512)
    port = listener.address[1]
    remote, is_over = RemoteMeeting((host, port), key), threading.Event()
    threading.Thread(target=_serve, args=(listener, meeting, key, is_over), name="raypipe-meeting", daemon=True).start()
    weakref.finalize(remote, _stop, is_over, port).atexit = False
    return remote


def _stop(is_over: threading.Event, port: int) -> None:
    is_over.set()
    # Connect once, to wake the thread that waits in `accept`.
    with suppress(OSError):
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()


def _serve(listener: Listener, meeting: Meeting, key: bytes, is_over: threading.Event) -> None:
    with listener:
        while not is_over.is_set():
            try:
                caller = listener.accept()
            except OSError:
                # Perhaps no file descriptor is free.
                is_over.wait(0.1)
                continue
            # A thread per caller, so that a silent one does not block the others.
            threading.Thread(target=_answer, args=(caller, meeting, key), daemon=True).start()


def _answer(caller: "Connection[Any, Any]", meeting: Meeting, key: bytes) -> None:
    # Ignore callers that disconnect or do not know the key.
    with caller, suppress(OSError, EOFError, AuthenticationError):
        deliver_challenge(caller, key)
        answer_challenge(caller, key)
        name, args = caller.recv()
        try:
            answer = getattr(meeting, name)(*args) if name in _CALLS else RaypipeError(f"no call {name!r}")
        except RaypipeError as error:
            answer = error
        except Exception as error:
            answer = RaypipeError(f"where the ranks meet: {type(error).__name__}: {error}")
        caller.send(answer)


def _send_at_once(connection: "Connection[Any, Any]") -> None:
    """Send small messages at once; otherwise TCP waits for the previous answer, 40 ms a call."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
