"""The card of a dataset: what it holds at a glance, with a few of its frames.

Reads ``meta/``, lists files, other than those of a web server, and decodes a few frames; what is damaged is told on the
card and does not end it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.errors import DatasetError
from raypipe.info import camera_text, column_notes, missing_notes
from raypipe.metadata import DatasetMeta, Feature
from raypipe.storage import Storage
from raypipe.validate.outline import read_outline
from raypipe.validate.structure import check_structure, plan_units
from raypipe.validate.table import fold_findings
from raypipe.views.pixels import FrameReader
from raypipe.views.ranges import Range, draw_range, range_height, try_ranges, vector_features
from raypipe.views.view import (
    Picture,
    View,
    counted,
    draw_pictures,
    duration,
    first_lines,
    html_heading,
    html_lines,
    html_picture,
    html_plot,
    html_table,
    html_text,
    new_figure,
    not_drawn,
    short_name,
    shortened,
    stacked,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EPISODES_SHOWN: Final = 3
_CAMERAS_SHOWN: Final = 8
_TASKS_SHOWN: Final = 12
_TASK_LETTERS: Final = 44
_FINDINGS_SHOWN: Final = 30
_THUMBNAIL_HEIGHT: Final = 150
_DRAWN_LINES: Final = 60
_RANGES_HEIGHT: Final = 100.0
"""Inches for the ranges: with frames and text the picture stays below `MAX_INCHES`."""
_WIDTH: Final = 11.0
_TEXT_FAMILY: Final = "monospace"
"""So that the texts stand below each other. It has fewer letters than the font of titles and tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Something that is wrong or odd about a dataset."""

    severity: str
    """``error``, ``warning`` or ``note``."""
    text: str


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DatasetCard(View):
    """What a dataset holds."""

    root: str
    lines: tuple[tuple[str, str], ...]
    """Names and texts."""
    thumbnails: tuple[Picture, ...]
    """The middle frame of the first, a middle and the last episode, camera by camera."""
    lengths: NDArray[np.int64]
    fps: float
    tasks: tuple[tuple[str, int], ...]
    """Texts, and in how many episodes they come; the most frequent first."""
    ranges: tuple[Range, ...]
    remarks: tuple[Remark, ...]

    @property
    def title(self) -> str:
        """The dataset's root."""
        return self.root

    @property
    def drawn_ranges(self) -> tuple[Range, ...]:
        """The first ranges, as many as one picture has room for."""
        ends = np.cumsum([range_height(one) for one in self.ranges])
        return self.ranges[: int((ends <= _RANGES_HEIGHT).sum())]

    def figure(self) -> "Figure":
        """Return it as one picture: text, frames, lengths, tasks and ranges."""
        columns = _EPISODES_SHOWN
        rows = [self.thumbnails[i : i + columns] for i in range(0, len(self.thumbnails), columns)]
        ranges = self.drawn_ranges
        heights = [0.17 * len(self._text_lines()) + 0.2, *[2.0] * len(rows), 2.4, *map(range_height, ranges)]
        figure = new_figure(_WIDTH, sum(heights))
        places = iter(stacked(figure, heights))
        self._draw_text(next(places).subplots())
        for pictures in rows:
            draw_pictures(next(places), pictures, columns)
        self._draw_summary(next(places))
        for one in ranges:
            draw_range(next(places).subplots(), one)
        return figure

    def parts(self) -> list[str]:
        """Return it as pieces of HTML."""
        parts = [html_lines(self.lines)]
        if self.remarks:
            shown = self.remarks[:_FINDINGS_SHOWN]
            more = [html_text(f"and {len(self.remarks) - len(shown)} more")] if len(self.remarks) > len(shown) else []
            texts = [html_text(f"{one.severity}: {one.text}", one.severity) for one in shown]
            parts += [html_heading("What is odd about it"), *texts, *more]
        parts += [html_heading("Frames"), *map(html_picture, self.thumbnails)] if self.thumbnails else []
        parts += [html_heading("Episodes"), html_plot(self._summary(), "lengths of episodes, and tasks")]
        if len(self.tasks) > _TASKS_SHOWN or not all(is_drawn_whole(text) for text, _ in self.tasks):
            rows = [(text, f"{count:,}") for text, count in self.tasks[: 4 * _TASKS_SHOWN]]
            parts += [html_heading(counted(len(self.tasks), "task")), html_table(("task", "episodes"), rows)]
        if self.ranges:
            parts += [html_heading("Numbers"), html_plot(self._ranges_figure(), "ranges of actions and states")]
        return [*parts, *map(html_text, self._ranges_left_out())]

    def _ranges_left_out(self) -> list[str]:
        return not_drawn([one.feature for one in self.ranges[len(self.drawn_ranges) :]], "feature")

    def _summary(self) -> "Figure":
        figure = new_figure(_WIDTH, 2.4)
        self._draw_summary(figure)
        return figure

    def _draw_summary(self, figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        draw_lengths(left, self.lengths, self.fps)
        draw_tasks(right, self.tasks)

    def _ranges_figure(self) -> "Figure":
        heights = [range_height(one) for one in self.drawn_ranges]
        figure = new_figure(_WIDTH, sum(heights))
        places = stacked(figure, heights)
        for one, place in zip(self.drawn_ranges, places, strict=True):
            draw_range(place.subplots(), one)
        return figure

    def _text_lines(self) -> list[str]:
        from raypipe.views.plain import boxes_told

        told = [f"{name + ':':<13}{shortened(text, 118)}" for name, text in self.lines if name != "root"]
        remarks = [f"{one.severity + ':':<13}{shortened(one.text, 118)}" for one in self.remarks[:6]]
        more = [f"{'':<13}and {len(self.remarks) - 6} more remarks"] if len(self.remarks) > 6 else []
        left_out = [shortened(text, 131) for text in self._ranges_left_out()]
        lines = [self.root, *first_lines(told, _DRAWN_LINES), *remarks, *more, *left_out]
        return [*lines, *boxes_told(lines, _TEXT_FAMILY)]

    def _draw_text(self, axes: Any) -> None:
        axes.set_axis_off()
        lines = self._text_lines()
        axes.text(0, 1, "\n".join(lines), fontsize=8.5, va="top", family=_TEXT_FAMILY, transform=axes.transAxes)


def view_dataset(dataset: Dataset) -> DatasetCard:
    """Return the card of a dataset; lists its files and decodes three frames of every camera, up to 8 cameras."""
    meta = dataset.meta
    thumbnails, failures = _read_thumbnails(dataset)
    ranges, why = try_ranges(dataset)
    remarks = [*_remarks(dataset), *(Remark(severity="error", text=text) for text in [*failures, why] if text)]
    constant = {one.feature: one.constant for one in ranges if one.constant}
    for name, numbers in constant.items():
        text = f"{len(numbers)} of the numbers of {name} never change: {shortened(', '.join(numbers), 80)}"
        remarks.append(Remark(severity="note", text=text))
    return DatasetCard(
        root=meta.root,
        lines=tuple(_lines(dataset)),
        thumbnails=tuple(thumbnails),
        lengths=meta.episodes.length,
        fps=meta.fps,
        tasks=count_tasks(meta),
        ranges=ranges,
        remarks=tuple(remarks),
    )


def _lines(dataset: Dataset) -> list[tuple[str, str]]:
    meta, lengths = dataset.meta, dataset.meta.episodes.length
    ends = dict.fromkeys([str(lengths.min()), str(lengths.max())]) if len(lengths) else {}
    seconds = meta.num_frames / meta.fps
    vectors = [f"{one.name} {list(one.shape)}" for one in vector_features(_try_features(dataset).values())]
    absent = [(name, "declared, and no file is found") for name in dataset.missing_cameras]
    return [
        ("root", meta.root),
        ("robot", meta.robot_type),
        ("format", meta.source.layout),
        ("episodes", f"{len(meta.episodes):,}" + f" of {' to '.join(ends)} frames" * bool(ends)),
        ("frames", f"{meta.num_frames:,} at {meta.fps:g} fps: {seconds / 3600:.3g} hours ({duration(seconds)})"),
        *(("camera", f"{name}  {camera_text(meta.features[name])}") for name in dataset.spec.cameras),
        *(("camera", f"{name}  {text}") for name, text in absent),
        ("numbers", ", ".join(vectors)),
        ("fingerprint", meta.order_fingerprint),
    ]


def _try_features(dataset: Dataset) -> Mapping[str, Feature]:
    """Return the features that rows have; as declared, where no data file can be opened, which the remarks tell."""
    try:
        return dataset.row_features
    except DatasetError:
        return dataset.features


def _read_thumbnails(dataset: Dataset) -> tuple[list[Picture], list[str]]:
    """Return the pictures, and what could not be decoded."""
    meta, pictures, failures = dataset.meta, [], []
    if not len(meta.episodes):
        return [], []
    reader = FrameReader(dataset, height=_THUMBNAIL_HEIGHT)
    rows = np.unique(np.linspace(0, len(meta.episodes) - 1, _EPISODES_SHOWN).round().astype(int)).tolist()
    for camera in dataset.spec.cameras[:_CAMERAS_SHOWN]:
        for row in rows:
            frame = int(meta.episodes.length[row]) // 2
            try:
                pixels = reader.read(row, camera, np.array([frame]))[0]
            except DatasetError as error:
                failures.append(str(error))
                continue
            place = f"episode {meta.episodes.episode_index[row]}, frame {frame}"
            pictures.append(Picture(pixels, f"{short_name(camera)}\n{place}"))
    return pictures, failures


def first_thumbnail(dataset: Dataset, camera: str) -> Picture | None:
    """Return the middle frame of a dataset's first episode; None where it cannot be decoded."""
    meta = dataset.meta
    frame = int(meta.episodes.length[0]) // 2
    try:
        pixels = FrameReader(dataset, height=_THUMBNAIL_HEIGHT).read(0, camera, np.array([frame]))[0]
    except DatasetError:
        return None
    return Picture(pixels, f"{short_name(camera)}\nepisode {meta.episodes.episode_index[0]}, frame {frame}")


def count_tasks(meta: DatasetMeta) -> tuple[tuple[str, int], ...]:
    """Return every task with the number of episodes that list it, the most frequent first."""
    counts: Counter[str] = Counter(dict.fromkeys(meta.tasks.texts.values(), 0))
    for listed in meta.episodes.tasks.to_pylist():
        # Some datasets list the numbers of their tasks instead of the texts.
        texts = {str(text) for text in listed or ()}
        counts.update({meta.tasks.texts.get(int(text), text) if text.isdecimal() else text for text in texts})
    return tuple(counts.most_common())


def _remarks(dataset: Dataset) -> list[Remark]:
    """Return what the metadata and the list of files tell, without a look into the files."""
    remarks = _structure_remarks(dataset.meta.storage)
    try:
        columns = column_notes(dataset)
    except DatasetError as error:
        columns = []
        remarks.append(Remark(severity="error", text=str(error)))
    told = " ".join(one.text for one in remarks)
    notes = [note for note in (*dataset.meta.notes, *missing_notes(dataset), *columns) if note not in told]
    return [*remarks, *(Remark(severity="note", text=note) for note in notes)]


def _structure_remarks(storage: Storage) -> list[Remark]:
    if not storage.is_listable:
        return [Remark(severity="note", text="a web server lists nothing: which files are there was not checked")]
    outline = read_outline(storage)
    findings = [*check_structure(outline), *plan_units(outline)[1]]
    return [
        Remark(severity=fold.severity, text=f"{', '.join(fold.place.splitlines())}: {fold.message}")
        for fold in fold_findings(findings)
    ]


def draw_lengths(axes: Any, lengths: NDArray[np.int64], fps: float) -> None:
    """Draw how many episodes are how long."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(f"lengths of {counted(len(lengths), 'episode')}", fontsize=9, loc="left")
    axes.set(xlabel="frames", ylabel="episodes")
    if not len(lengths):
        return
    width = max(1, int(np.ceil((lengths.max() - lengths.min() + 1) / 40)))
    edges = np.arange(lengths.min(), lengths.max() + width + 1, width) - 0.5
    axes.hist(lengths, bins=edges, color="#3367d6", edgecolor="white", linewidth=0.3)
    if lengths.max() - lengths.min() < 4:
        # A single bar would fill the axes.
        axes.set_xlim(lengths.min() - 5, lengths.max() + 5)
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_major_locator(MaxNLocator(integer=True))
    seconds = axes.secondary_xaxis("top", functions=(lambda frames: frames / fps, lambda seconds: seconds * fps))
    seconds.set_xlabel("seconds", fontsize=8)
    for scale in (axes, seconds):
        scale.tick_params(labelsize=7)


def is_drawn_whole(task: str) -> bool:
    """Return whether a picture shows all of a task's text: it is short, and the font has its letters."""
    from raypipe.views.plain import has_letters

    return len(task) <= _TASK_LETTERS and has_letters(task)


def draw_tasks(axes: Any, tasks: tuple[tuple[str, int], ...]) -> None:
    """Draw in how many episodes the most frequent tasks come."""
    from matplotlib.ticker import MaxNLocator

    from raypipe.views.plain import boxes_told

    shown = tasks[:_TASKS_SHOWN]
    more = f", the {len(shown)} most frequent" if len(tasks) > len(shown) else ""
    title = f"{counted(len(tasks), 'task')}{more}"
    axes.set_title("; ".join([title, *boxes_told(text for text, _ in shown)]), fontsize=9, loc="left")
    if not shown:
        axes.set_axis_off()
        return
    places = np.arange(len(shown))
    bars = axes.barh(places, [count for _, count in shown], color="#9db7ee")
    axes.bar_label(bars, padding=2, fontsize=7)
    axes.set_yticks(places, [shortened(text or "(no text)", _TASK_LETTERS) for text, _ in shown], fontsize=7)
    axes.set_ylim(max(len(shown), 6) - 0.5, -0.5)
    axes.set_xlabel("episodes")
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(axis="x", labelsize=7)
