"""One episode: frames of its cameras over time, the curves of its numbers, its tasks, and a video of all of it.

It also gives the episode to the Rerun viewer, on two time lines, ``frame`` and ``time``. That needs the package
rerun-sdk, the extra ``rerun``, imported on first use.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.errors import ConfigError, DatasetError
from raypipe.format import RowReader, column_values
from raypipe.storage import check_writable, write_whole
from raypipe.text import counted, frames_text, new_figure, page_part
from raypipe.views.pixels import Clip, FrameReader, Scale, depth_colours, encode_clip, scale_bar, scale_told
from raypipe.views.rows import SHOWN_NUMBERS, number_names, vector_features
from raypipe.views.view import (
    Picture,
    View,
    draw_legend,
    draw_pictures,
    draw_text,
    duration,
    first_lines,
    html_picture,
    html_plot,
    html_texts,
    line_colours,
    not_drawn,
    numbers_told,
    share_scales,
    short_name,
    shortened,
    spread,
    stacked,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STRIP_HEIGHT: Final = 140
_DRAWN_FEATURES: Final = 32
_DRAWN_CAMERAS: Final = 24
_DRAWN_LINES: Final = 30
"""With this many of each, and with errors of 8 lines, the picture is 165 inches high, less than `MAX_INCHES`."""
_WIDTH: Final = 12.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """The numbers of a feature over an episode."""

    feature: str
    names: tuple[str, ...]
    values: NDArray[Any]
    """``(frames, numbers)``."""

    @property
    def is_constant(self) -> bool:
        """Whether it is a single number that stays the same: a line of text says as much as a curve."""
        return len(self.names) == 1 and bool((self.values == self.values[0]).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """A run of frames with one task."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EpisodeView(View):
    """One episode of a dataset."""

    dataset: Dataset
    episode_index: int
    length: int
    frames: tuple[int, ...]
    strips: Mapping[str, tuple[Picture, ...]]
    """By camera: one picture for each of `frames`; none if the camera cannot be decoded."""
    scales: Mapping[str, Scale]
    """By depth camera, the distances that the strips show as blue and red."""
    failures: tuple[str, ...]
    curves: tuple[Curves, ...]
    tasks: tuple[TaskRun, ...]

    @property
    def drawn(self) -> tuple[Curves, ...]:
        """The curves to draw, up to 32; text describes single numbers that stay the same."""
        return self._changing[:_DRAWN_FEATURES]

    @property
    def _changing(self) -> tuple[Curves, ...]:
        return tuple(one for one in self.curves if not one.is_constant)

    @property
    def title(self) -> str:
        """The episode and its dataset."""
        return f"episode {self.episode_index} of {self.dataset.meta.root}"

    @cached_property
    def clip(self) -> Clip:
        """The episode as a video; the first access decodes and encodes it."""
        return encode_clip(self.dataset, self.dataset.meta.episodes.find_row(self.episode_index))

    def writers(self) -> Mapping[str, Callable[[Path], object]]:
        """Return the functions that write the view, by suffix of the file."""
        return {**super().writers(), ".mp4": lambda path: write_whole(path, self.clip.mp4)}

    def figure(self) -> "Figure":
        """Return one picture: strips of all cameras, with the curves below."""
        strips, lines = dict(list(self.strips.items())[:_DRAWN_CAMERAS]), self._text_lines()
        heights = [0.25 + 0.2 * len(lines), *[1.75] * len(strips), *([2.1 * len(self.drawn)] if self.drawn else [])]
        figure, (text, *places) = stacked(_WIDTH, heights)
        draw_text(text, lines, fontsize=9)
        for place, (camera, strip) in zip(places, strips.items(), strict=False):
            place.suptitle(camera, fontsize=9, x=0.005, ha="left")
            row = draw_pictures(place, strip, len(strip))
            if camera in self.scales:
                _draw_scale(place, row, self.scales[camera])
        if self.drawn:
            self._draw_numbers(places[-1])
        return figure

    def parts(self) -> list[str]:
        """Return the view as pieces of HTML, with the video inside."""
        parts = [page_part("lines", self._lines()), *html_texts(self.failures, "error")]
        parts += self._video()
        for camera, strip in self.strips.items():
            parts += [page_part("heading", camera), *map(html_picture, strip)]
            if camera in self.scales:
                parts.append(html_picture(Picture(scale_bar(16, 256), scale_told(self.scales[camera]))))
        if self.drawn:
            figure = new_figure(_WIDTH, 2.3 * len(self.drawn))
            self._draw_numbers(figure)
            parts += [page_part("heading", "Numbers"), html_plot(figure, "numbers over the episode")]
        return [*parts, *html_texts(self._features_left_out())]

    def _features_left_out(self) -> list[str]:
        return not_drawn([one.feature for one in self._changing[_DRAWN_FEATURES:]], "feature")

    def _video(self) -> list[str]:
        if not self.strips:
            return []
        try:
            clip = self.clip
        except (DatasetError, ConfigError) as error:
            return [page_part("text", f"no video: {error}", "error")]
        return [page_part("heading", "Video"), page_part("video", clip.mp4, clip.told), page_part("text", clip.told)]

    def _lines(self) -> list[tuple[str, str]]:
        fps = self.dataset.meta.fps
        shown = self.tasks[:20]
        more = [("task", f"and {counted(len(self.tasks) - 20, 'more run')} of tasks")] if len(self.tasks) > 20 else []
        where = [
            one.text if len(self.tasks) == 1 else f"{one.text}  ({frames_text(one.start, one.stop)})" for one in shown
        ]
        return [
            ("length", f"{counted(self.length, 'frame')} at {fps:g} fps: {duration(self.length / fps)}"),
            *(("task", text or "(no text)") for text in where),
            *more,
            *((one.feature, f"{one.values[0, 0]:g} in every frame") for one in self.curves if one.is_constant),
        ]

    def _text_lines(self) -> list[str]:
        from raypipe.text import boxes_told

        told = [f"{name}: {text}" for name, text in self._lines()]
        failures = first_lines([f"error: {text}" for text in self.failures], _DRAWN_LINES)
        errors = [line for text in failures for line in wrapped(text, 156)]
        left_out = [*not_drawn(list(self.strips)[_DRAWN_CAMERAS:], "camera"), *self._features_left_out()]
        lines = [shortened(line, 156) for line in first_lines(told, _DRAWN_LINES)]
        shown = [self.title, *lines, *errors, *(shortened(line, 156) for line in left_out)]
        return [*shown, *boxes_told(shown)]

    def _draw_numbers(self, figure: Any) -> None:
        """Draw all curves below each other, on the same time axis."""
        places = figure.subplots(len(self.drawn), 1, squeeze=False)[:, 0]
        for axes, curves in zip(places, self.drawn, strict=True):
            self._draw_curves(axes, curves, self.dataset.meta.fps)
        share_scales("y", ((axes, curves.names) for axes, curves in zip(places, self.drawn, strict=True)))

    def _draw_curves(self, axes: Any, curves: Curves, fps: float) -> None:
        seconds, names = np.arange(self.length) / fps, curves.names[:SHOWN_NUMBERS]
        axes.set_prop_cycle(color=line_colours(len(names)))
        style = {"marker": "."} if self.length == 1 else {"linewidth": 1.0}
        for number, name in enumerate(names):
            axes.plot(seconds, curves.values[:, number], label=shortened(name, 22), **style)
        for frame in self.frames if self.strips else ():
            axes.axvline(frame / fps, color="#bbb", linewidth=0.6, linestyle=":")
        for run in self.tasks[1:]:
            axes.axvline(run.start / fps, color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"{curves.feature} ({numbers_told(len(curves.names), len(names))})", fontsize=9, loc="left")
        axes.set_xlabel("seconds", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.margins(x=0.005)
        if len(curves.names) > 1:
            draw_legend(axes)


def _draw_scale(place: Any, row: list[Any], scale: Scale) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = ScalarMappable(Normalize(scale[0] / 1000, scale[1] / 1000), depth_colours())
    bar = place.colorbar(colours, ax=row, fraction=0.02, pad=0.01, aspect=12)
    bar.set_label("metres", fontsize=7)
    bar.ax.tick_params(labelsize=7)


def view_episode(dataset: Dataset, episode_index: int, *, num_frames: int = 8) -> EpisodeView:
    """Return the view of one episode, by LeRobot's number; reads its rows and decodes the frames of the strips.

    Raises:
        ConfigError: there is no such episode.
        DatasetError: its rows are damaged; the view reports a damaged camera.
    """
    if num_frames < 1:
        raise ConfigError(f"num_frames must be at least 1, got {num_frames}")
    row = dataset.meta.episodes.find_row(episode_index)
    length = int(dataset.meta.episodes.length[row])
    frames = np.array(spread(length, num_frames))
    curves, tasks = read_numbers(dataset, row)
    strips, scales, failures = _read_strips(dataset, row, frames)
    return EpisodeView(
        dataset=dataset,
        episode_index=episode_index,
        length=length,
        frames=tuple(frames.tolist()),
        strips=strips,
        scales=scales,
        failures=tuple(failures),
        curves=curves,
        tasks=tasks,
    )


def read_numbers(dataset: Dataset, row: int) -> tuple[tuple[Curves, ...], tuple[TaskRun, ...]]:
    """Return the numbers and tasks of the episode in row `row` of the episode table; decodes nothing.

    Raises:
        DatasetError: its rows are damaged.
    """
    meta, curves = dataset.meta, []
    features = vector_features(dataset.row_features.values())
    table = RowReader(meta, [one.name for one in features]).read_episode(row)
    place = f"episode {meta.episodes.episode_index[row]} of {meta.root!r}"
    for one in features:
        values = np.asarray(column_values(table, one, place)).reshape(len(table), -1)
        curves.append(Curves(feature=one.name, names=number_names(one), values=values))
    return tuple(curves), _task_runs(dataset, table)


def _read_strips(
    dataset: Dataset, row: int, frames: NDArray[np.int64]
) -> tuple[dict[str, tuple[Picture, ...]], dict[str, Scale], list[str]]:
    reader, failures = FrameReader(dataset, height=_STRIP_HEIGHT), []
    strips: dict[str, tuple[Picture, ...]] = {}
    scales: dict[str, Scale] = {}
    captions = [f"frame {frame}, {frame / dataset.meta.fps:.2f} s" for frame in frames.tolist()]
    for camera in dataset.spec.cameras:
        try:
            pixels, scale = reader.read_measured(row, camera, frames)
        except DatasetError as error:
            failures.append(f"{short_name(camera)}: {error}")
            continue
        strips[camera] = tuple(Picture(one, text) for one, text in zip(pixels, captions, strict=True))
        if scale is not None:
            scales[camera] = scale
    return strips, scales, failures


def _task_runs(dataset: Dataset, table: pa.Table) -> tuple[TaskRun, ...]:
    numbers, tasks = table.column("task_index").to_numpy(), dataset.meta.tasks
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    stops = [*starts[1:], len(numbers)]
    return tuple(
        TaskRun(text=tasks.texts.get(int(numbers[start]), f"task {numbers[start]}"), start=start, stop=stop)
        for start, stop in zip(starts, stops, strict=True)
    )


_LOGGED_FRAMES: Final = 2000
"""The most pictures of a camera in Rerun; a longer episode has every second, or every third, ..., but all numbers."""

SUFFIX: Final = ".rrd"
_LOGGED_HEIGHT: Final = 480
_LOGGED_QUALITY: Final = 85
_FRAMES_AT_ONCE: Final = 32


def save_recording(dataset: Dataset, episode_index: int, path: str | Path) -> str:
    """Write one episode to a Rerun recording, a file that ends in .rrd; return in words what it has."""
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ConfigError(f"cannot write a Rerun recording to {str(path)!r}: give a file that ends in {SUFFIX}")
    check_writable(path)
    rerun, episode, stream = _new_stream(dataset, episode_index)
    stream.save(str(path))
    told = _log(rerun, stream, episode)
    # Write the buffer and close the file.
    stream.disconnect()
    return told


def open_viewer(dataset: Dataset, episode_index: int) -> str:
    """Show an episode in the Rerun viewer, and return in words what it shows; start a viewer if none runs.

    Raises:
        ConfigError: the viewer does not start here, for example without a screen.
    """
    rerun, episode, stream = _new_stream(dataset, episode_index)
    # Use the program beside Python: its folder is on the path only if the environment is activated.
    program = Path(sys.executable).with_name("rerun")
    with _explained():
        rerun.spawn(executable_path=str(program) if program.exists() else None, recording=stream)
    told = _log(rerun, stream, episode)
    # Without a screen the viewer starts and then ends.
    with _explained():
        stream.flush()
    return told


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


def _new_stream(dataset: Dataset, episode_index: int) -> tuple[Any, EpisodeView, Any]:
    try:
        import rerun
    except ImportError as error:
        raise ConfigError(
            f"the Rerun viewer needs the package rerun-sdk, which is not here ({error}): pip install rerun-sdk"
        ) from error
    recording_id = f"{dataset.meta.order_fingerprint}-{episode_index}"
    episode = view_episode(dataset, episode_index, num_frames=1)
    return rerun, episode, rerun.RecordingStream("raypipe", recording_id=recording_id)


def _log(rerun: Any, stream: Any, episode: EpisodeView) -> str:
    """Give an episode to a stream; return in words what it got."""
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
    every = -(-length // _LOGGED_FRAMES)
    for camera in dataset.spec.cameras:
        _log_camera(rerun, stream, episode, camera, np.arange(0, length, every))
    kept = "" if every == 1 else f", one picture of {every}"
    cameras = counted(len(dataset.spec.cameras), "camera")
    return f"episode {episode.episode_index}: {counted(length, 'frame')}, {cameras}{kept}"


def _log_camera(rerun: Any, stream: Any, episode: EpisodeView, camera: str, frames: NDArray[np.int64]) -> None:
    dataset = episode.dataset
    reader, row = FrameReader(dataset, height=_LOGGED_HEIGHT), dataset.meta.episodes.find_row(episode.episode_index)
    scale = reader.measure(row, camera)
    if scale is not None:
        stream.log(f"{camera}/scale", rerun.TextDocument(scale_told(scale)), static=True)
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        wanted = frames[start : start + _FRAMES_AT_ONCE]
        for frame, pixels in zip(wanted.tolist(), reader.read(row, camera, wanted, scale), strict=True):
            _set_time(stream, frame, dataset.meta.fps)
            stream.log(camera, rerun.Image(pixels).compress(jpeg_quality=_LOGGED_QUALITY))


def _set_time(stream: Any, frame: int, fps: float) -> None:
    stream.set_time("frame", sequence=frame)
    stream.set_time("time", duration=frame / fps)


def _indexes(rerun: Any, frames: NDArray[np.int64], fps: float) -> list[Any]:
    return [rerun.TimeColumn("frame", sequence=frames), rerun.TimeColumn("time", duration=frames / fps)]
