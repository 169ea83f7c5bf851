"""An episode for the Rerun viewer: its cameras, numbers and tasks on two time lines, ``frame`` and ``time``.

It needs the package rerun-sdk, the extra ``rerun``, and imports it on first use.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError
from raypipe.storage import check_writable
from raypipe.text import counted
from raypipe.views.episode import EpisodeView, view_episode
from raypipe.views.pixels import FrameReader, scale_told

MAX_FRAMES: Final = 2000
"""The most pictures of a camera; a longer episode has every second frame, or every third, ..., but all numbers."""

SUFFIX: Final = ".rrd"
_HEIGHT: Final = 480
_QUALITY: Final = 85
_FRAMES_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What Rerun was given."""

    episode_index: int
    num_frames: int
    cameras: tuple[str, ...]
    every: int
    """1 if it has all frames of the cameras, 2 if it has every second, ..."""

    @property
    def told(self) -> str:
        """A description in words."""
        kept = "" if self.every == 1 else f", one picture of {self.every}"
        cameras = counted(len(self.cameras), "camera")
        return f"episode {self.episode_index}: {counted(self.num_frames, 'frame')}, {cameras}{kept}"


def save_recording(dataset: Dataset, episode_index: int, path: str | Path) -> Logged:
    """Write one episode to a Rerun recording, a file that ends in .rrd."""
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ConfigError(f"cannot write a Rerun recording to {str(path)!r}: give a file that ends in {SUFFIX}")
    check_writable(path)
    rerun, episode = _import_rerun(), view_episode(dataset, episode_index, num_frames=1)
    stream = rerun.RecordingStream("raypipe", recording_id=_recording_id(dataset, episode_index))
    stream.save(str(path))
    logged = _log(rerun, stream, episode)
    # Write the buffer and close the file.
    stream.disconnect()
    return logged


def open_viewer(dataset: Dataset, episode_index: int) -> Logged:
    """Show an episode in the Rerun viewer; start one if none runs.

    Raises:
        ConfigError: the viewer does not start here, for example without a screen.
    """
    rerun, episode = _import_rerun(), view_episode(dataset, episode_index, num_frames=1)
    stream = rerun.RecordingStream("raypipe", recording_id=_recording_id(dataset, episode_index))
    # Use the program beside Python: its folder is on the path only if the environment is activated.
    program = Path(sys.executable).with_name("rerun")
    with _explained():
        rerun.spawn(executable_path=str(program) if program.exists() else None, recording=stream)
    logged = _log(rerun, stream, episode)
    # Without a screen the viewer starts and then ends.
    with _explained():
        stream.flush()
    return logged


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # Not every error has a text.
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"the Rerun viewer does not start here ({why}): save a recording with --rerun --out FILE{SUFFIX}, and "
            f"open it where there is a screen"
        ) from error


def _import_rerun() -> Any:
    try:
        import rerun
    except ImportError as error:
        raise ConfigError(
            f"the Rerun viewer needs the package rerun-sdk, which is not here ({error}): pip install rerun-sdk"
        ) from error
    return rerun


def _recording_id(dataset: Dataset, episode_index: int) -> str:
    return f"{dataset.meta.order_fingerprint}-{episode_index}"


def _log(rerun: Any, stream: Any, episode: EpisodeView) -> Logged:
    dataset, length = episode.dataset, episode.length
    stream.send_recording_name(episode.title)
    for curves in episode.curves:
        stream.log(curves.feature, rerun.SeriesLines(names=list(curves.names)), static=True)
        columns = rerun.Scalars.columns(scalars=curves.values.astype(np.float64))
        stream.send_columns(
            curves.feature, indexes=_indexes(rerun, np.arange(length), dataset.meta.fps), columns=columns
        )
    for run in episode.tasks:
        _set_time(stream, run.start, dataset.meta.fps)
        stream.log("task", rerun.TextLog(run.text or "(no text)"))
    every = -(-length // MAX_FRAMES)
    for camera in dataset.spec.cameras:
        _log_camera(rerun, stream, episode, camera, np.arange(0, length, every))
    return Logged(episode_index=episode.episode_index, num_frames=length, cameras=dataset.spec.cameras, every=every)


def _log_camera(rerun: Any, stream: Any, episode: EpisodeView, camera: str, frames: NDArray[np.int64]) -> None:
    dataset = episode.dataset
    reader, row = FrameReader(dataset, height=_HEIGHT), dataset.meta.episodes.find_row(episode.episode_index)
    scale = reader.measure(row, camera)
    if scale is not None:
        stream.log(f"{camera}/scale", rerun.TextDocument(scale_told(scale)), static=True)
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        wanted = frames[start : start + _FRAMES_AT_ONCE]
        for frame, pixels in zip(wanted.tolist(), reader.read(row, camera, wanted, scale), strict=True):
            _set_time(stream, frame, dataset.meta.fps)
            stream.log(camera, rerun.Image(pixels).compress(jpeg_quality=_QUALITY))


def _set_time(stream: Any, frame: int, fps: float) -> None:
    stream.set_time("frame", sequence=frame)
    stream.set_time("time", duration=frame / fps)


def _indexes(rerun: Any, frames: NDArray[np.int64], fps: float) -> list[Any]:
    return [rerun.TimeColumn("frame", sequence=frames), rerun.TimeColumn("time", duration=frames / fps)]
