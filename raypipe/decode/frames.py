"""Frames of an episode by number: from its video, from images stored in its rows, or by a subprocess.

A subprocess decodes a video over which processes have died. If it dies too, or does not finish, the video is bad data.
Importing torch takes a process seconds, so the subprocess stays for a minute for the next request. It decodes one
request at a time, so the caller knows on which request it died. It writes nothing to the journal.
"""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.decode.clips import FramePool, Pixels
from raypipe.decode.journal import Alarm, death_scope, journal_scope, marked, process_journal, unmarked, video_key
from raypipe.decode.kept import KeepFolder, KeptDataset, KeptVideo
from raypipe.decode.pixels import decode_image, resize_frames
from raypipe.decode.spec import ORIGINAL_SIZE, DecodeSpec, size_of
from raypipe.decode.videos import VideoPool, blaming, decoder_version
from raypipe.errors import DecodeError, DownloadError, RaypipeError, note_episode, without_episode
from raypipe.format import DatasetMeta, episode_first_frame, forget_indexes, read_ranged_index
from raypipe.storage import is_transient, retry_transient

_LOOK_UP_S: Final = 1.0
_MOST_LOOKED_UP: Final = 4096

_MAX_DEATHS: Final = 2
"""After so many deaths over an episode, a subprocess decodes it. A single process may have died for another reason."""

_TIMEOUT_S: Final = 600.0
"""A span takes seconds. Waiting for the network does not count: it has its own time-outs."""

_IDLE_S: Final = 60.0
"""How long the subprocess, with 300 MB, waits for the next request."""

_SERVE: Final = """
import os, signal
# The parent receives Ctrl-C too, and closes the input when it ends.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# The output of libraries must not mix with the answers.
answers = os.dup(1)
os.dup2(2, 1)
from raypipe.decode.frames import answer_requests
answer_requests(answers)
"""
"""What the subprocess runs: requests on standard input, answers on standard output, until the input ends."""


@dataclass(slots=True)
class DecodeCounts:
    """What a decoder has decoded since the start."""

    frames: int = 0
    kept_frames: int = 0
    """Frames read from those kept on the node, not decoded."""
    seconds: float = 0.0
    """Summed over threads."""


class FrameDecoder:
    """Decodes frames of episodes of one dataset; threads may share it."""

    def __init__(
        self, meta: DatasetMeta, spec: DecodeSpec, videos: VideoPool | None = None, folder: KeepFolder | None = None
    ) -> None:
        """Prepare; opens nothing yet. Decoders of a mixture share `videos`; `folder` keeps decoded frames."""
        self._meta = meta
        self._spec = spec
        self._videos = videos or VideoPool(spec.open_videos)
        self._lock = threading.Lock()
        self._counts = DecodeCounts()
        self._isolated: set[int] = set()
        self._looked_up: dict[tuple[str, int, str], tuple[float, int, int]] = {}
        has_depth = any(meta.features[name].depth_codes is not None for name in meta.cameras)
        version = decoder_version(spec.device, has_depth=has_depth) if folder is not None else ""
        self._kept = KeptDataset(folder, meta, spec, version) if folder is not None else None

    @property
    def keeps_frames(self) -> bool:
        """Whether decoded frames are kept on this node."""
        return self._kept is not None

    def counts(self) -> DecodeCounts:
        """Return the counts so far, over all threads."""
        with self._lock:
            return replace(self._counts)

    def decode_video(
        self, row: int, camera: str, frames: NDArray[np.int64], *, span: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Return what `read_clip` does, as one tensor ``(n, height, width, channels)``."""
        return torch.from_numpy(np.stack(self.read_clip(row, camera, frames, span=span)))

    def read_clip(
        self,
        row: int,
        camera: str,
        frames: NDArray[np.int64],
        pool: FramePool | None = None,
        *,
        span: tuple[int, int] | None = None,
        stored: Sequence[Any] | None = None,
    ) -> list[Pixels]:
        """Return frames of the episode in row `row` of the episode table, in memory of `pool` if there is one.

        Args:
            frames: ascending positions in the episode.
            span: positions that the caller will need soon; those of a remote file are fetched together.
            stored: what the rows hold for these frames, if they store the camera's images.

        Raises:
            DatasetError: the video is missing, damaged, or lacks a frame; or an image cannot be read.
        """
        if stored is not None:
            with unmarked():
                return _as_list(self.decode_images(row, camera, stored, frames), pool)
        request = VideoRequest(meta=self._meta, spec=self._spec, row=row, camera=camera, frames=frames, span=span)
        kept = self._find_kept(row, camera)
        if kept is None:
            return _as_list(self._decode(request), pool)
        pool = pool or FramePool()
        found = kept.read(frames, pool)
        with self._lock:
            self._counts.kept_frames += len(found)
        missing = np.array([frame for frame in frames.tolist() if frame not in found], dtype=np.int64)
        if len(missing):
            try:
                decoded = self._decode(replace(request, frames=missing, span=request.reach)).cpu().numpy()
            except BaseException:
                pool.give_back(found.values())
                raise
            # If the video was replaced since, these frames may come from either of the two.
            if (now := self._find_kept(row, camera)) is not None and now.key == kept.key:
                kept.write(missing, decoded)
            found.update(zip(missing.tolist(), map(pool.keep, decoded), strict=True))
        return [found[frame] for frame in frames.tolist()]

    def _find_kept(self, row: int, camera: str) -> KeptVideo | None:
        return self._kept.find(row, camera) if self._kept is not None else None

    def _decode(self, request: "VideoRequest") -> torch.Tensor:
        started = time.perf_counter()
        try:
            pixels = self._meta.storage.read_again(request.name, lambda: self._read_guarded(request), self._forget)
        except (RaypipeError, OSError) as error:
            told: BaseException = error
            if is_transient(error) or isinstance(error, OSError):
                kind = DownloadError if is_transient(error) else DecodeError
                told = kind(f"cannot read {request.place!r} of {self._meta.root!r}: {error}")
            note_episode(told, f"decoding camera {request.camera!r} of", request.episode, self._meta.root)
            if told is error:
                raise
            raise told from error
        self._check_size(tuple(pixels.shape[1:]), request.row, request.camera, f"in {request.place!r}")
        self._count(len(request.frames), started)
        return pixels

    def _check_size(self, found: tuple[int, ...], row: int, camera: str, place: str) -> None:
        """Raise if frames have another size than ``info.json`` declares, or `resize` asks for."""
        wanted = self._spec.frame_shape(self._meta.features[camera])
        if found != wanted[: len(found)]:
            episode = int(self._meta.episodes.episode_index[row])
            where = f"episode {episode} of {self._meta.root!r}, {place},"
            raise DecodeError(
                f"camera {camera!r} of {where} has frames of {(*found, *wanted[len(found) :])}, and info.json declares "
                f"{wanted} (height, width, channels). Correct info.json, or choose a size by "
                f"decode={{'resize': (height, width)}}. {without_episode(episode, self._meta.root)}"
            )

    def _read_guarded(self, request: "VideoRequest") -> torch.Tensor:
        key, num_deaths = self._look_up(request)
        if num_deaths < _MAX_DEATHS:

            def read() -> torch.Tensor:
                with process_journal().marking(key):
                    return self.read_video(request)

            return retry_transient(read)
        if key not in self._isolated:
            self._isolated.add(key)
            warnings.warn(
                f"decoding camera {request.camera!r} of episode {request.episode} of {self._meta.root!r} in a "
                f"subprocess, which is slower: {num_deaths} processes on this machine died while they decoded it from "
                f"{request.place!r}. If you ended them yourself, remove {process_journal().deaths!r}",
                stacklevel=2,
            )
        # Fetched here, so that it passes the gate of this process and the subprocess finds it on the node.
        with unmarked(), retry_transient(lambda: self._fetch(request)):
            return decode_isolated(replace(request, span=None))

    def _forget(self) -> None:
        # Close whatever is open of a file after its copy was replaced.
        self._videos.clear()
        forget_indexes()

    def _look_up(self, request: "VideoRequest") -> tuple[int, int]:
        """Return the number of an episode in the journal, and how many processes died over it.

        Looks at most once a second, because clips of an episode follow each other closely.
        """
        scope, now = death_scope.get(), time.monotonic()
        known = self._looked_up.get((scope, request.row, request.camera))
        if known is not None and now < known[0]:
            return known[1], known[2]
        key, journal = request.key(), process_journal()
        keys = {key}
        if scope:
            # What a subprocess has proved on this machine is true for every task.
            with journal_scope(""):
                keys.add(request.key())
        num_deaths = sum(journal.count_deaths(one) for one in keys if journal.is_suspect(one))
        if len(self._looked_up) >= _MOST_LOOKED_UP:
            self._looked_up.clear()
        self._looked_up[scope, request.row, request.camera] = (now + _LOOK_UP_S, key, num_deaths)
        return key, num_deaths

    def _fetch(self, request: "VideoRequest") -> AbstractContextManager[Any]:
        """Fetch to this node what these frames need; return the context that keeps it there, empty without a cache."""
        storage = self._meta.storage
        try:
            held = storage.hold(request.name)
            if held is not None:
                return held
            if not storage.is_ranged(request.name):
                return nullcontext()
            needed, parts = request.byte_range(), storage.open_ranged(request.name)
            parts.need(*needed)
            return parts
        except NotImplementedError:
            # Without a plain index, it is unknown which bytes decoding reads.
            return nullcontext()
        except DownloadError:
            # As in `read_video`.
            self._videos.clear()
            raise

    def read_video(self, request: "VideoRequest") -> torch.Tensor:
        """Return frames as this process decodes them, without guard against a crash and without a second try."""
        camera, codes = request.camera, self._meta.features[request.camera].depth_codes
        try:
            version = self._meta.storage.version(request.name) if self._kept is not None else ""
            with (
                blaming(f"cannot read the video {request.place!r}"),
                self._videos.lend(self._meta.storage, request.name, self._spec.device, version, codes) as video,
            ):
                first = video.first_frame(self._meta, request.row, camera)
                if size_of(self._spec.resize, camera) == ORIGINAL_SIZE and all(video.size):
                    # Before they take memory.
                    self._check_size(video.size, request.row, camera, f"in {video.place!r}")
                start, stop = request.reach
                video.need(first + start, first + stop)
                return self._resize(video.read_frames(first + request.frames), camera)
        except DownloadError:
            # A cache without room is full of open videos. Close them, so that the next try finds room.
            self._videos.clear()
            raise

    def prefetch(self, row: int, camera: str, frames: NDArray[np.int64]) -> "Future[bool] | None":
        """Start to fetch what decoding these frames reads, if it is remote; may read the index of a video first."""
        kept = self._find_kept(row, camera)
        if kept is not None and kept.has(frames):
            return None
        request = VideoRequest(meta=self._meta, spec=self._spec, row=row, camera=camera, frames=frames)
        storage, name = self._meta.storage, request.name
        if not storage.is_ranged(name):
            return storage.prefetch(name)
        start, stop = request.byte_range()
        return storage.prefetch_part(name, start, stop) if start < stop else None

    def decode_images(self, row: int, camera: str, stored: Sequence[Any], frames: NDArray[np.int64]) -> torch.Tensor:
        """Return images stored in rows ``(n, height, width, channels)``; messages name their positions `frames`."""
        started = time.perf_counter()
        feature = self._meta.features[camera]
        where = f"episode {self._meta.episodes.episode_index[row]} of {self._meta.root!r}"
        images = []
        for content, frame in zip(stored, frames.tolist(), strict=True):
            with blaming(f"cannot read the image {camera!r} of {where}, frame {frame}"):
                image = self._resize(decode_image(content, feature, f"{where}, frame {frame}")[None], camera)
            self._check_size(tuple(image.shape[1:]), row, camera, f"frame {frame}")
            images.append(image)
        self._count(len(frames), started)
        return torch.cat(images)

    def _resize(self, pixels: torch.Tensor, camera: str) -> torch.Tensor:
        return resize_frames(pixels, size_of(self._spec.resize, camera), self._spec.fit)

    def _count(self, num_frames: int, started: float) -> None:
        with self._lock:
            self._counts.frames += num_frames
            self._counts.seconds += time.perf_counter() - started


def _as_list(decoded: torch.Tensor, pool: FramePool | None) -> list[Pixels]:
    """Return frames one by one, in memory of `pool` if there is one."""
    array: NDArray[Any] = decoded.cpu().numpy()
    return list(map(pool.keep, array) if pool is not None else array)


@dataclass(frozen=True, kw_only=True)
class VideoRequest:
    """Frames of one camera of one episode, to be read from their video here or in a subprocess."""

    meta: DatasetMeta
    spec: DecodeSpec
    row: int
    """Of the episode table."""
    camera: str
    frames: NDArray[np.int64]
    """Ascending positions in the episode."""
    span: tuple[int, int] | None = None
    """Positions that will be needed soon; None: no others."""
    timeout_s: float = _TIMEOUT_S
    """Of a subprocess."""

    @property
    def reach(self) -> tuple[int, int]:
        """The positions to fetch from a remote file."""
        return self.span or (int(self.frames[0]), int(self.frames[-1]) + 1)

    @cached_property
    def name(self) -> str:
        """The file with the video."""
        return self.meta.video_file(self.row, self.camera)

    @property
    def place(self) -> str:
        """The path of the file, for messages."""
        return self.meta.storage.locate(self.name)

    @property
    def episode(self) -> int:
        """LeRobot's number of the episode."""
        return int(self.meta.episodes.episode_index[self.row])

    def key(self) -> int:
        """Return the number of the episode in the journal, in the current scope."""
        return video_key(self.meta.storage, self.name, self.episode, self.camera)

    def byte_range(self) -> tuple[int, int]:
        """Return the part of a remote video that decoding these frames reads; may read its index."""
        index = read_ranged_index(self.meta.storage, self.name)
        return index.byte_range(episode_first_frame(self.meta, self.row, self.camera, index) + self.frames)


def decode_isolated(request: VideoRequest) -> torch.Tensor:
    """Return what `FrameDecoder.read_video` does, decoded in a subprocess; raise what it raised there.

    Raises:
        DecodeError: the subprocess died, or did not finish in time.
    """
    answer = _process_child().ask(request)
    if isinstance(answer, int):
        raise _blame(request, answer)
    if isinstance(answer, Exception):
        raise answer
    return torch.from_numpy(answer).to(request.spec.device)


_Answer = NDArray[Any] | Exception | int
"""Pixels, the error of the subprocess, or the exit code with which it died."""


class _Child:
    """The subprocess that decodes for this process: starts when needed, serves one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: VideoRequest) -> _Answer:
        """Return the answer to a request; if the current subprocess dies, a fresh one answers."""
        content = pickle.dumps(request)
        with self._lock:
            answer = self._exchange(self._process, content) if self._process is not None else 0
            if isinstance(answer, int):
                # A used subprocess may die of earlier work, or of idleness: only the death of a fresh one is proof.
                answer = self._exchange(_start(), content)
            return answer

    def close(self) -> None:
        """End the subprocess, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _exchange(self, process: "subprocess.Popen[bytes]", content: bytes) -> _Answer:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = None
        try:
            process.stdin.write(content)
            process.stdin.flush()
            answer: _Answer = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            # It is dead.
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
    command = [sys.executable, "-P", "-c", _SERVE]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    process.communicate()
    return process.returncode


def _blame(request: VideoRequest, exit_code: int) -> DecodeError:
    """Return the error of a video that ends processes, and note it for all processes of this machine."""
    root = request.meta.root
    # In every scope.
    with journal_scope(""):
        process_journal().note_deaths(request.key())
    return DecodeError(
        f"decoding episode {request.episode} of {root!r}, camera {request.camera!r}, ends the process that does it: "
        f"several died over {request.place!r}, and a subprocess that did nothing else "
        f"{_fate(exit_code, request.timeout_s)}. Fetch the file again, or re-encode it. "
        f"{without_episode(request.episode, root)}"
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


def answer_requests(output: int) -> None:
    """Answer requests until standard input ends; runs in the subprocess."""
    # An alarm also ends a process inside a codec, and one whose parent is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    with os.fdopen(output, "wb") as answers:
        while True:
            signal.setitimer(signal.ITIMER_REAL, _IDLE_S)
            try:
                request: VideoRequest = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            with marked(Alarm(request.timeout_s)):
                answer = _answer(request)
            pickle.dump(answer, answers, protocol=5)
            answers.flush()


def _answer(request: VideoRequest) -> NDArray[Any] | Exception:
    try:
        decoder = FrameDecoder(request.meta, request.spec)
        pixels = retry_transient(lambda: decoder.read_video(request), unmarked()(time.sleep))
    except Exception as error:
        # Also those that are no fault of the video, such as memory that runs out: they are raised in the parent.
        return error
    array: NDArray[Any] = pixels.cpu().numpy()
    return array
