"""The `Meeting` of rank 0, reached from other processes: those that ``torchrun`` or Accelerate has started.

Rank 0 serves it on a port of its own. A caller proves that it knows the key of the run, which travels through torch's
process group, before anything is unpickled. A call is a connection: a rank calls a few times an epoch.
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
    """Has the methods of `Meeting`, and calls those of rank 0's."""

    address: tuple[str, int]
    key: bytes

    def begin(self, rank: int, ask: Ask, place: PassPlace | None) -> PassPlace:
        """Return the place of a pass, when all ranks ask for the same."""
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
        """Count episodes as bad that were left out before this start."""
        self._call("note_bad", dict(episodes))

    def tell(self, rank: int, stats: LoaderStats) -> None:
        """Note the figures of a rank."""
        # The figures are for people: where rank 0 has ended first, nobody reads them.
        with suppress(RaypipeError):
            self._call("tell", rank, stats)

    def figures(self) -> dict[int, LoaderStats]:
        """Return the figures that each rank has told last."""
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
    """Serve a meeting from this process for as long as what is returned lives; copies of it go to the other ranks.

    Args:
        host: the name of this machine, as the others reach it.
    """
    key = os.urandom(32)
    # A machine may know its own name by an address that others do not: with others it listens on all of its own.
    listener = Listener((LOOPBACK if host == LOOPBACK else "0.0.0.0", 0), backlog=512)
    port = listener.address[1]
    remote, is_over = RemoteMeeting((host, port), key), threading.Event()
    threading.Thread(target=_serve, args=(listener, meeting, key, is_over), name="raypipe-meeting", daemon=True).start()
    weakref.finalize(remote, _stop, is_over, port).atexit = False
    return remote


def _stop(is_over: threading.Event, port: int) -> None:
    is_over.set()
    # Whoever accepts callers wakes up with the next one.
    with suppress(OSError):
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()


def _serve(listener: Listener, meeting: Meeting, key: bytes, is_over: threading.Event) -> None:
    with listener:
        while not is_over.is_set():
            try:
                caller = listener.accept()
            except OSError:
                # No descriptor is free, perhaps.
                is_over.wait(0.1)
                continue
            # In a thread of its own: one that says nothing holds up nobody.
            threading.Thread(target=_answer, args=(caller, meeting, key), daemon=True).start()


def _answer(caller: "Connection[Any, Any]", meeting: Meeting, key: bytes) -> None:
    # One that goes away or does not know the key is no caller.
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
    """Let small messages go without waiting for the answer to the one before: 40 ms a call else."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
