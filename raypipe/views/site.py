"""The data that the page of `raypipe show --serve` requests, as plain values: episodes, frames, batches, findings.

It knows nothing of HTTP, and reads only what the page requests. `raypipe validate` runs in a separate process, so that
a damaged file can crash only that process.
"""

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError, DatasetError
from raypipe.format import VideoIndex, episode_first_frame, read_ranged_index, read_video_index
from raypipe.text import counted, cut_inside, encode_pixels, frames_text
from raypipe.validate import Finding, Place, fold_findings, is_small
from raypipe.views.card import dataset_lines
from raypipe.views.episode import Curves, read_numbers
from raypipe.views.pixels import FrameReader
from raypipe.views.rows import SHOWN_NUMBERS
from raypipe.views.view import short_name

if TYPE_CHECKING:
    from raypipe.pipeline import Pipeline

_MOST_POINTS: Final = 4000
"""The most points of a curve; of a longer episode it has every second frame, or every third, ..."""
_MOST_FEATURES: Final = 24
_MOST_BATCH: Final = 1024
_KEPT_INDEXES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQuery:
    """Which batch of which run; `Pipeline` plans the run with its defaults."""

    step: int = 0
    batch_size: int = 16
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= _MOST_BATCH:
            raise ConfigError(f"the page shows batches of 1 to {_MOST_BATCH} frames, got batch_size {self.batch_size}")
        if min(self.step, self.epoch, self.rank) < 0 or self.world_size < 1:
            raise ConfigError(
                f"step, epoch and rank are at least 0 and world_size at least 1, got step {self.step}, epoch "
                f"{self.epoch}, rank {self.rank}, world_size {self.world_size}"
            )


class Site:
    """A dataset as the page sees it; threads may share it."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._cameras = dataset.spec.cameras
        self._stills = Stills(dataset)
        self.checks = Checks(dataset)
        self._index = lru_cache(_KEPT_INDEXES)(self._read_index)
        self._pipeline = lru_cache(4)(self._make_pipeline)

    @cached_property
    def about(self) -> dict[str, Any]:
        """A description of the dataset."""
        meta = self._dataset.meta
        return {
            "root": meta.root,
            "name": PurePosixPath(meta.root.rstrip("/")).name or meta.root,
            "fps": meta.fps,
            "lines": [(name, text) for name, text in dataset_lines(self._dataset) if name != "root"],
            "cameras": [{"name": name, "short": short_name(name)} for name in self._cameras],
        }

    @cached_property
    def episodes(self) -> dict[str, Any]:
        """All episodes as columns: number, frames, and the numbers of the tasks that the episode table lists."""
        meta = self._dataset.meta
        places: dict[str, int] = {}
        tasks = [
            [places.setdefault(text, len(places)) for text in sorted(meta.tasks.named(texts))]
            for texts in meta.episodes.tasks.to_pylist()
        ]
        return {
            "episode": meta.episodes.episode_index.tolist(),
            "length": meta.episodes.length.tolist(),
            "tasks": tasks,
            "texts": list(places),
        }

    def episode(self, number: int) -> dict[str, Any]:
        """Return one episode, by LeRobot's number: where its cameras are, its numbers and its tasks.

        It reports damage next to everything that it can read.
        """
        meta = self._dataset.meta
        row = meta.episodes.find_row(number)
        length = int(meta.episodes.length[row])
        told: dict[str, Any] = {"episode": number, "length": length, "errors": [], "curves": [], "tasks": []}
        try:
            curves, tasks = read_numbers(self._dataset, row)
        except DatasetError as error:
            told["errors"].append(str(error))
        else:
            every = -(-length // _MOST_POINTS)
            told["every"] = every
            told["curves"] = [_curves_json(one, every) for one in curves[:_MOST_FEATURES]]
            told["tasks"] = [{"text": one.text, "start": one.start, "stop": one.stop} for one in tasks]
        told["cameras"] = [self._camera(row, place) for place in range(len(self._cameras))]
        return told

    def _camera(self, row: int, place: int) -> dict[str, Any]:
        """Return how to show a camera of an episode: as a part of its video, or frame by frame."""
        name = self._cameras[place]
        feature = self._dataset.meta.features[name]
        told = {"name": name, "short": short_name(name), "width": feature.width, "height": feature.height}
        try:
            return {**told, **self._played(row, name), "error": ""}
        except DatasetError as error:
            return {**told, "start_s": None, "error": str(error)}

    def _played(self, row: int, camera: str) -> dict[str, Any]:
        """Return when the episode starts in the camera's video; None if frame times are uneven or there is no video."""
        meta = self._dataset.meta
        if meta.features[camera].kind == "image":
            return {"start_s": None, "why": "images"}
        try:
            index = self._index(meta.video_file(row, camera))
        except NotImplementedError as error:
            return {"start_s": None, "why": str(error)}
        first, length = episode_first_frame(meta, row, camera, index), int(meta.episodes.length[row])
        times = index.pts_s[first : first + length]
        if np.abs(times - times[0] - np.arange(length) / meta.fps).max() > 0.5 / meta.fps:
            return {"start_s": None, "why": f"its frames are not {meta.fps:g} a second"}
        return {"start_s": float(times[0]), "why": ""}

    def _read_index(self, name: str) -> VideoIndex:
        storage = self._dataset.meta.storage
        return read_ranged_index(storage, name) if storage.is_ranged(name) else read_video_index(storage, name)

    def open_video(self, number: int, place: int) -> tuple[IO[bytes], int]:
        """Return the video file of an episode's camera, open, and its size; the caller closes it.

        Raises:
            ConfigError: there is no such episode or camera, or its frames are images.
            DatasetError: the file is missing, or is not an mp4; the page serves nothing else.
        """
        row, camera = self._dataset.meta.episodes.find_row(number), self._camera_name(place)
        if self._played(row, camera)["start_s"] is None:
            raise ConfigError(f"camera {camera!r} of episode {number} is shown frame by frame")
        name, storage = self._dataset.meta.video_file(row, camera), self._dataset.meta.storage
        return storage.open_file(name), storage.size_bytes(name)

    def still(self, number: int, place: int, frame: int, size: str) -> bytes:
        """Return a frame of an episode's camera as JPEG; `size` is ``small`` or ``large``."""
        meta, camera = self._dataset.meta, self._camera_name(place)
        row = meta.episodes.find_row(number)
        length = int(meta.episodes.length[row])
        if not 0 <= frame < length:
            raise ConfigError(f"there is no frame {frame} in episode {number}; it has {frames_text(0, length)}")
        return self._stills.read(row, camera, frame, size)

    def _camera_name(self, place: int) -> str:
        if not 0 <= place < len(self._cameras):
            raise ConfigError(f"there is no camera {place}; the dataset has {counted(len(self._cameras), 'camera')}")
        return self._cameras[place]

    def batch(self, query: BatchQuery) -> dict[str, Any]:
        """Return the frames of a batch, by the plan; `Pipeline.batch_at` gives its tensors."""
        plan = self._pipeline(query.batch_size, query.seed).plan(epoch=query.epoch, world_size=query.world_size)
        if query.step >= plan.num_steps:
            raise ConfigError(f"epoch {query.epoch} has {counted(plan.num_steps, 'step')}, from 0: no {query.step}")
        frames = plan.frames_at(query.step, query.rank)
        return {
            "num_steps": plan.num_steps,
            "episode": frames.episode.tolist(),
            "frame": frames.frame.tolist(),
            "is_repeat": frames.is_repeat.tolist(),
        }

    def _make_pipeline(self, batch_size: int, seed: int) -> "Pipeline":
        from raypipe.pipeline import Pipeline

        return Pipeline(self._dataset, batch_size=batch_size, seed=seed)


def _curves_json(one: Curves, every: int) -> Mapping[str, Any]:
    """Return curves number by number; NaN and infinite values become None, which leaves a gap."""
    shown: NDArray[Any] = one.values[::every, :SHOWN_NUMBERS].astype(np.float64)
    return {
        "feature": one.feature,
        "names": list(one.names[:SHOWN_NUMBERS]),
        "num_hidden": max(0, len(one.names) - SHOWN_NUMBERS),
        "values": [[_number(value) for value in column] for column in shown.T.tolist()],
    }


def _number(value: float) -> float | None:
    # Six digits: as many as a curve, or a number beside it, shows.
    return float(f"{value:.6g}") if np.isfinite(value) else None


HEIGHTS: Final = {"small": 120, "large": 360}
"""Heights in pixels, by the size that the page requests."""

_AT_ONCE: Final = 16
"""Frames decoded together: a page that plays a video asks for the next ones anyway."""

_KEPT_BYTES: Final = 64 << 20
_MOST_DECODING: Final = 2
"""Requests that decode at the same time; the others wait."""


class Stills:
    """Decodes frames of a dataset's cameras, and keeps the latest; threads may share it."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._readers = {size: FrameReader(dataset, height=height) for size, height in HEIGHTS.items()}
        self._lock = threading.Lock()
        self._decoding = threading.Semaphore(_MOST_DECODING)
        self._kept: OrderedDict[tuple[int, str, int, str], list[bytes]] = OrderedDict()
        self._kept_bytes = 0
        # The two ends of an episode's depth scale, the same for all its frames.
        self._scale = lru_cache(None)(self._readers["small"].measure)

    def read(self, row: int, camera: str, frame: int, size: str) -> bytes:
        """Return one frame as JPEG; for a large one, also decode and keep the frames beside it.

        Raises:
            DatasetError: the frame cannot be decoded.
        """
        first = frame - frame % _AT_ONCE if size == "large" else frame
        key = (row, camera, first, size)
        found = self._find(key)
        if found is None:
            with self._decoding:
                # Another request may have decoded it while this one waited.
                found = self._find(key) or self._decode(key)
        return found[frame - first]

    def _find(self, key: tuple[int, str, int, str]) -> list[bytes] | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _decode(self, key: tuple[int, str, int, str]) -> list[bytes]:
        row, camera, first, size = key
        stop = min(first + _AT_ONCE, int(self._dataset.meta.episodes.length[row])) if size == "large" else first + 1
        pixels = self._readers[size].read(row, camera, np.arange(first, stop), self._scale(row, camera))
        stills = [encode_pixels(one, "jpeg", pil_kwargs={"quality": 85}) for one in pixels]
        with self._lock:
            self._kept_bytes += sum(map(len, stills)) - sum(map(len, self._kept.pop(key, [])))
            self._kept[key] = stills
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= sum(map(len, self._kept.popitem(last=False)[1]))
        return stills


_PROGRAM: Final = ("-m", "raypipe")
_LONGEST_ERROR: Final = 2000
_MOST_DETAILS: Final = 5000
"""Findings of one kind that the page shows with their own text; later episodes show the text of the first."""


class Checks:
    """The findings of a dataset, checked on request; threads may share it."""

    def __init__(self, dataset: Dataset) -> None:
        self._meta = dataset.meta
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._told: dict[str, Any] = {"stage": "waiting", "error": "", "folds": [], "by_episode": {}}

    @property
    def is_quick(self) -> bool:
        """Whether to check files without a request: they are few, and on this machine."""
        num_files = len(self._meta.episodes) * (1 + len(self._meta.cameras)) if not self._meta.is_packed else 0
        return self._meta.storage.is_local and is_small(self._meta.num_frames, num_files, deep=False)

    def told(self, *, is_asked: bool) -> Mapping[str, Any]:
        """Return what is known now; start the check if it is quick or `is_asked`, and has not started."""
        with self._lock:
            is_started = self._told["stage"] != "waiting"
            if not is_started and (is_asked or self.is_quick) and not self._is_closed:
                self._told = {**self._told, "stage": "running"}
                self._process = _start(self._meta.storage.address)
                threading.Thread(target=self._wait, args=(self._process,), daemon=True).start()
            return self._told

    def close(self) -> None:
        """Stop a running check."""
        with self._lock:
            self._is_closed, process = True, self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def _wait(self, process: "subprocess.Popen[str]") -> None:
        out, err = process.communicate()
        try:
            found = _read_findings(json.loads(out))
        except (ValueError, KeyError, TypeError):
            why = err.strip() or f"raypipe validate ended with code {process.returncode}"
            found = {"stage": "failed", "error": cut_inside(why, _LONGEST_ERROR)}
        with self._lock:
            self._told = {**self._told, **found}


def _start(root: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *_PROGRAM, "validate", "--json", "--where", "process", "--", root],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C in the terminal goes to the server, which then ends this process.
        start_new_session=True,
    )


def _read_findings(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the findings of a JSON report, alike ones folded together, and the worst severity of every episode."""
    findings = [
        Finding(**{**one, "place": Place(**{**one["place"], "episodes": tuple(one["place"]["episodes"])})})
        for one in report["findings"]
    ]
    by_episode: dict[int, str] = {}
    for finding in findings:
        # The worst come first.
        for number in finding.place.episodes:
            by_episode.setdefault(number, finding.severity)
    folds = [
        {
            "severity": fold.severity,
            "kind": fold.kind,
            "place": fold.place,
            "message": fold.message,
            "remedy": fold.findings[0].remedy,
            "episodes": list(fold.episodes),
            "details": [
                {"episodes": list(one.place.episodes), "message": one.message} for one in fold.findings[:_MOST_DETAILS]
            ],
        }
        for fold in fold_findings(findings)
    ]
    return {"stage": "done", "folds": folds, "by_episode": by_episode, "elapsed_s": report["elapsed_s"]}
