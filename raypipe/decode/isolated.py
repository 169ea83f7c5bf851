"""Decoding in a subprocess, for a video that may crash its process.

Decides what it means if the subprocess dies or does not finish: bad data. Does not decide which videos come here.

::

    python -m raypipe.decode.isolated     requests on standard input, answers on standard output, until the input ends

Importing torch takes a process seconds, so the subprocess stays for a minute for the next request. It decodes one
request at a time, so the caller knows on which request it died. It writes nothing to the journal.
"""

import atexit
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.decode.journal import journal_scope, marked, process_journal, video_key
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import DecodeError, RaypipeError, without_episode
from raypipe.format import DatasetMeta

TIMEOUT_S: Final = 600.0
"""A span takes seconds. Waiting for the network does not count: it has its own time-outs."""

IDLE_S: Final = 60.0
"""How long the subprocess, with 300 MB, waits for the next request."""

Answer = NDArray[Any] | Exception | int
"""Pixels, the error of the subprocess, or the exit code with which it died."""

_NOT_STARTED: Final = 0
_DEATHS: Final = (EOFError, OSError, pickle.UnpicklingError)
"""Errors from reading from or writing to a dead process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedRequest:
    """Frames of one camera of one episode."""

    meta: DatasetMeta
    spec: DecodeSpec
    row: int
    """Of the episode table."""
    camera: str
    frames: NDArray[np.int64]
    """Ascending positions in the episode."""
    timeout_s: float = TIMEOUT_S


def decode_isolated(request: IsolatedRequest) -> torch.Tensor:
    """Return what `FrameDecoder.read_video` does, decoded in a subprocess.

    Raises:
        DecodeError: the subprocess died, or did not finish in time.
        RaypipeError, OSError: what the subprocess raised.
    """
    answer = _process_child().ask(request)
    if isinstance(answer, int):
        _note_death(request)
        raise _bad_data(request, answer)
    if isinstance(answer, Exception):
        raise answer
    return torch.from_numpy(answer).to(request.spec.device)


class _Child:
    """The subprocess that decodes for this process: starts when needed, serves one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: IsolatedRequest) -> Answer:
        """Return the answer to a request; if the current subprocess dies, a fresh one answers."""
        content = pickle.dumps(request)
        with self._lock:
            answer: Answer = _NOT_STARTED if self._process is None else self._exchange(self._process, content)
            if isinstance(answer, int):
                # A used subprocess may die of earlier work, or of idleness: only the death of a fresh one is proof.
                answer = self._exchange(_start(), content)
            return answer

    def close(self) -> None:
        """End the subprocess, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _exchange(self, process: "subprocess.Popen[bytes]", content: bytes) -> Answer:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = None
        try:
            process.stdin.write(content)
            process.stdin.flush()
            answer: Answer = pickle.load(process.stdout)
        except _DEATHS:
            return _end(process)
        except BaseException:
            # Interrupted: the next request would receive this answer.
            _end(process)
            raise
        self._process = process
        return answer


_children: dict[int, _Child] = {}
"""By process id: after a fork, the child finds its parent's entry here and must not use it."""


def _process_child() -> _Child:
    process = os.getpid()
    if process not in _children:
        _children.setdefault(process, _Child())
    return _children[process]


@atexit.register
def _end_child() -> None:
    if os.getpid() in _children:
        _process_child().close()


def _start() -> "subprocess.Popen[bytes]":
    # The subprocess must find the same modules, in a script's folder or a runtime environment.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) or os.getcwd() for folder in sys.path)}
    command = [sys.executable, "-P", "-m", "raypipe.decode.isolated"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    process.communicate()
    return process.returncode


def _note_death(request: IsolatedRequest) -> None:
    """Tell all processes of this machine, in every scope, so that none of them dies of it again."""
    meta = request.meta
    with journal_scope(""):
        name, episode = meta.video_file(request.row, request.camera), int(meta.episodes.episode_index[request.row])
        process_journal().note_deaths(video_key(meta.storage, name, episode, request.camera))


def _bad_data(request: IsolatedRequest, exit_code: int) -> DecodeError:
    meta = request.meta
    episode = int(meta.episodes.episode_index[request.row])
    path = meta.storage.locate(meta.video_file(request.row, request.camera))
    return DecodeError(
        f"decoding episode {episode} of {meta.root!r}, camera {request.camera!r}, ends the process that does it: "
        f"several died over {path!r}, and a subprocess that did nothing else {_fate(exit_code, request.timeout_s)}. "
        f"Fetch the file again, or re-encode it. {without_episode(episode, meta.root)}"
    )


def _fate(exit_code: int, timeout_s: float) -> str:
    if exit_code == -signal.SIGALRM:
        return f"was not done after {timeout_s:g} s"
    if exit_code == -signal.SIGKILL:
        return "died of SIGKILL, which a machine that runs out of memory sends too"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}, for a reason that its output tells"
    names = {number.value: number.name for number in signal.Signals}
    return f"died of {names.get(-exit_code, f'signal {-exit_code}')}"


class _Alarm:
    """Ends this process after it has decoded for `left_s`; the mark of a subprocess."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    def set(self) -> None:
        # 0 would turn the timer off.
        signal.setitimer(signal.ITIMER_REAL, max(self._left_s, 1e-6))

    def lift(self) -> None:
        self._left_s = signal.setitimer(signal.ITIMER_REAL, 0.0)[0]


def main() -> None:
    """Answer requests until standard input ends; runs in the subprocess."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # The output of libraries must not mix with the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # The parent receives Ctrl-C too, and closes the input when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # An alarm also ends a process inside a codec, and one whose parent is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    # Now, since importing torch may take longer than decoding.
    importlib.import_module("raypipe.decode.frames")
    while True:
        signal.setitimer(signal.ITIMER_REAL, IDLE_S)
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        with marked(_Alarm(request.timeout_s)):
            answer = _answer(request)
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


def _answer(request: IsolatedRequest) -> NDArray[Any] | Exception:
    from raypipe.decode.frames import FrameDecoder

    try:
        frames = FrameDecoder(request.meta, request.spec).read_video(request.row, request.camera, request.frames)
    except (RaypipeError, OSError) as error:
        return error
    array: NDArray[Any] = frames.cpu().numpy()
    return array


if __name__ == "__main__":
    main()
