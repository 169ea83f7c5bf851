"""The card of a dataset: its contents at a glance, with a few of its frames.

It reads ``meta/`` and some rows, lists files, except on a web server, and decodes a few frames. The card reports damage
and shows the rest.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.dataset import Dataset
from raypipe.errors import DatasetError
from raypipe.format import DatasetMeta
from raypipe.text import (
    constant_text,
    count_whole,
    counted,
    either,
    new_figure,
    page_part,
    page_table,
    plural,
    span_text,
)
from raypipe.validate import (
    DataUnit,
    Finding,
    check_rows,
    check_structure,
    fold_findings,
    format_runs,
    is_small,
    plan_units,
    read_outline,
)
from raypipe.views.info import camera_text, column_notes, largest_drift, missing_notes
from raypipe.views.pixels import FrameReader
from raypipe.views.rows import (
    STORED,
    TASKS_SHOWN,
    Measured,
    Range,
    TaskCounts,
    count_tasks,
    draw_range,
    draw_tasks,
    is_drawn_whole,
    measure_ranges,
    range_height,
    vector_features,
)
from raypipe.views.view import (
    Picture,
    View,
    draw_pictures,
    draw_text,
    duration,
    first_lines,
    html_picture,
    html_plot,
    html_texts,
    not_drawn,
    share_scales,
    short_name,
    shortened,
    spread,
    stacked,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EPISODES_SHOWN: Final = 3
_CAMERAS_SHOWN: Final = 8
_FINDINGS_SHOWN: Final = 30
_THUMBNAIL_HEIGHT: Final = 150
_DRAWN_LINES: Final = 60
_DRAWN_REMARKS: Final = 6
_SEVERITIES: Final = ("error", "warning", "note")
_RANGES_HEIGHT: Final = 100.0
"""Inches for the ranges: with them, frames and text stay below `MAX_INCHES`."""
_WIDTH: Final = 11.0
_SUMMARY_HEIGHT: Final = 2.4
_TEXT_FAMILY: Final = "monospace"
"""Monospace aligns the texts in columns. It has fewer letters than the font of titles and tasks."""


@dataclass(frozen=True, slots=True)
class Remark:
    """Something wrong or odd about a dataset."""

    severity: str
    """One of `_SEVERITIES`."""
    text: str


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DatasetCard(View):
    """The contents of a dataset."""

    root: str
    lines: tuple[tuple[str, str], ...]
    thumbnails: tuple[Picture, ...]
    """The middle frame of the first, a middle and the last episode, camera by camera."""
    lengths: NDArray[np.int64]
    fps: float
    tasks: tuple[tuple[str, int], ...]
    """Texts and their number of episodes, the most frequent first."""
    tasks_source: str = ""
    """In words, what was counted, if not the rows."""
    ranges: tuple[Range, ...]
    remarks: tuple[Remark, ...]
    """The worst first."""

    @property
    def title(self) -> str:
        """The dataset's root."""
        return self.root

    @property
    def drawn_ranges(self) -> tuple[Range, ...]:
        """The first ranges, as many as fit in one picture."""
        ends = np.cumsum([range_height(one) for one in self.ranges])
        return self.ranges[: int((ends <= _RANGES_HEIGHT).sum())]

    def figure(self) -> "Figure":
        """Return the card as one picture: text, frames, lengths, tasks and ranges."""
        columns, lines, ranges = _EPISODES_SHOWN, self._text_lines(), self.drawn_ranges
        rows = [self.thumbnails[i : i + columns] for i in range(0, len(self.thumbnails), columns)]
        heights = [0.17 * len(lines) + 0.2, *[2.0] * len(rows), _SUMMARY_HEIGHT, *map(range_height, ranges)]
        figure, made = stacked(_WIDTH, heights)
        places = iter(made)
        draw_text(next(places), lines, fontsize=8.5, family=_TEXT_FAMILY)
        for pictures in rows:
            draw_pictures(next(places), pictures, columns)
        self._draw_summary(next(places))
        _draw_ranges(places, ranges)
        return figure

    def parts(self) -> list[str]:
        """Return the card as pieces of HTML."""
        parts = [page_part("lines", self.lines)]
        if self.remarks:
            shown = self.remarks[:_FINDINGS_SHOWN]
            texts = [page_part("text", f"{one.severity}: {one.text}", one.severity) for one in shown]
            more = html_texts([f"and {len(self.remarks) - len(shown)} more"] if len(self.remarks) > len(shown) else [])
            parts += [page_part("heading", "What is odd about it"), *texts, *more]
        parts += [page_part("heading", "Frames"), *map(html_picture, self.thumbnails)] if self.thumbnails else []
        summary = new_figure(_WIDTH, _SUMMARY_HEIGHT)
        self._draw_summary(summary)
        parts += [page_part("heading", "Episodes"), html_plot(summary, "lengths of episodes, and tasks")]
        if len(self.tasks) > TASKS_SHOWN or not all(is_drawn_whole(text) for text, _ in self.tasks):
            rows = [(text, f"{count:,}") for text, count in self.tasks[: 4 * TASKS_SHOWN]]
            heading = page_part("heading", f"{counted(len(self.tasks), 'task')}{self.tasks_source}")
            parts += [heading, page_table(("task", "episodes"), rows)]
        if self.ranges:
            heights = [range_height(one) for one in self.drawn_ranges]
            figure, places = stacked(_WIDTH, heights)
            _draw_ranges(places, self.drawn_ranges)
            parts += [page_part("heading", "Numbers"), html_plot(figure, "ranges of actions and states")]
        return [*parts, *html_texts(self._ranges_left_out())]

    def _ranges_left_out(self) -> list[str]:
        return not_drawn([one.feature for one in self.ranges[len(self.drawn_ranges) :]], "feature")

    def _draw_summary(self, figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        draw_lengths(left, self.lengths, self.fps)
        draw_tasks(right, self.tasks, self.tasks_source)

    def _text_lines(self) -> list[str]:
        from raypipe.text import boxes_told

        def drawn_lines(texts: Iterable[tuple[str, str]]) -> list[str]:
            # The whole text of each: the end of an error says what to do.
            told = [(name, wrapped(text, 118)) for name, text in texts]
            return [f"{name if not i else '':<13}{line}" for name, lines in told for i, line in enumerate(lines)]

        told = drawn_lines((f"{name}:", text) for name, text in self.lines if name != "root")
        remarks = drawn_lines((f"{one.severity}:", one.text) for one in self.remarks[:_DRAWN_REMARKS])
        hidden = len(self.remarks) - _DRAWN_REMARKS
        more = [f"{'':<13}and {counted(hidden, 'more remark')}"] if hidden > 0 else []
        left_out = [shortened(text, 131) for text in self._ranges_left_out()]
        lines = [self.root, *first_lines(told, _DRAWN_LINES), *remarks, *more, *left_out]
        return [*lines, *boxes_told(lines, _TEXT_FAMILY)]


def _draw_ranges(places: Iterable[Any], ranges: Sequence[Range]) -> None:
    drawn = [(place.subplots(), one) for place, one in zip(places, ranges, strict=True)]
    for axes, one in drawn:
        draw_range(axes, one)
    share_scales("x", ((axes, one.names) for axes, one in drawn))


_READABLE: Final = ("nan-values", "inf-values", "task-unresolved")
"""Errors in rows that are still readable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The findings, and what was checked."""

    structure: tuple[Finding, ...] = ()
    rows: tuple[Finding, ...] = ()
    """Errors and warnings, without notes: the card makes its own notes on columns."""
    text: str

    def blames(self, text: str) -> bool:
        """Return whether `text` names a file that `rows` already report as unreadable: it would only repeat them."""
        broken = (one for one in self.rows if one.severity == "error" and one.kind not in _READABLE)
        return any(one.place.file and one.place.file in text for one in broken)


def check_cheaply(dataset: Dataset) -> Checked:
    """Return the findings that cost a second or two; reads the rows of up to half a million frames on local disk."""
    storage = dataset.meta.storage
    if not storage.is_listable:
        return Checked(text="meta/; for the rest copy the dataset to disk, and run raypipe validate on the copy")
    outline = read_outline(storage)
    units, findings = plan_units(outline)
    num_files = sum(isinstance(unit, DataUnit) for unit in units)
    has_rows = storage.is_local and is_small(dataset.meta.num_frames, num_files, deep=False)
    rows = check_rows(outline) if has_rows else ()
    done = "meta/, the list of files and all rows" if has_rows else "meta/ and the list of files"
    return Checked(
        structure=(*check_structure(outline), *findings),
        rows=tuple(one for one in rows if one.severity != "note"),
        text="; ".join([done, *_unchecked(dataset.meta, has_rows=has_rows)]),
    )


def _unchecked(meta: DatasetMeta, *, has_rows: bool) -> list[str]:
    """Return what was not checked, with the command that checks it."""
    kinds, command = {meta.features[name].kind for name in meta.cameras}, f"raypipe validate {meta.root}"
    left = [*([] if has_rows else ["rows"]), *(["videos"] if "video" in kinds else [])]
    pictures = [f"not every picture: {command} --deep"] if kinds else []
    return [*([f"not {' and '.join(left)}: {command}"] if left else []), *pictures]


def view_dataset(dataset: Dataset) -> DatasetCard:
    """Return the card of a dataset.

    It lists the files, checks all rows of a small dataset on local disk, reads the tasks of all rows there and the rows
    of up to 8 episodes, and decodes three frames of every camera, for up to 8 cameras.
    """
    meta = dataset.meta
    thumbnails, failures = read_thumbnails(dataset, dataset.spec.cameras[:_CAMERAS_SHOWN], _EPISODES_SHOWN)
    measured, tasks, checked = measure_ranges(dataset), count_tasks(meta), check_cheaply(dataset)
    told = [*_row_remarks(checked, measured, tasks), *_remarks(dataset, checked)]
    texts = {one.text for one in told}
    errors = [
        Remark("error", text)
        for text in dict.fromkeys((*failures, *measured.errors, *tasks.errors))
        if text not in texts and not checked.blames(text)
    ]
    remarks = [*told, *errors, *_own_remarks(measured, tasks, meta.root)]
    return DatasetCard(
        root=meta.root,
        lines=(*dataset_lines(dataset), ("checked", checked.text)),
        thumbnails=tuple(thumbnails),
        lengths=meta.episodes.length,
        fps=meta.fps,
        tasks=tasks.counts,
        tasks_source="" if tasks.is_of_rows else ", as the episode table lists them",
        ranges=measured.ranges,
        remarks=tuple(sorted(remarks, key=lambda one: _SEVERITIES.index(one.severity))),
    )


def _row_remarks(checked: Checked, measured: Measured, tasks: TaskCounts) -> list[Remark]:
    """Return remarks from the rows that no other part of the card makes."""
    features = {text.partition(": ")[0] for text in measured.contradicted}
    found = [
        one
        for one in checked.rows
        if not (
            one.kind == "action-constant"
            or (one.kind == "stats-mismatch" and one.place.feature in features)
            or (one.kind == "stats-unreadable" and any(one.place.file in text for text in measured.errors))
            or (one.kind == "task-mismatch" and tasks.contradicted)
        )
    ]
    return _folded(found)


def _own_remarks(measured: Measured, tasks: TaskCounts, root: str) -> list[Remark]:
    """Return remarks on what the card itself has compared: tasks and ranges."""
    remarks = []
    if tasks.contradicted:
        number = len(tasks.contradicted)
        text = (
            f"the rows of {plural(number, 'episode')} {format_runs(tasks.contradicted)} have a task that the episode "
            f"table does not list for {either(number, 'it', 'them')}: the card counts rows"
        )
        remarks.append(Remark("warning", text))
    for found in measured.contradicted:
        text = f"stored statistics are not those of the rows: {found}. See raypipe validate {root}"
        remarks.append(Remark("warning", text))
    for one in measured.ranges:
        if one.constant:
            basis = "" if one.source == STORED else f" ({one.source})"
            remarks.append(Remark("note", f"{one.feature}: {constant_text(one.constant, len(one.names))}{basis}"))
    return remarks


def dataset_lines(dataset: Dataset) -> list[tuple[str, str]]:
    """Return the contents of a dataset as names and texts; reads ``meta/`` and the index of a video of each camera."""
    meta, lengths = dataset.meta, dataset.meta.episodes.length
    each = f" of {span_text(lengths.min(), lengths.max())} {plural(lengths.max(), 'frame')}" if len(lengths) else ""
    each += " each" if len(lengths) > 1 and lengths.min() == lengths.max() else ""
    seconds = meta.num_frames / meta.fps
    features, drift = dataset.features, []
    # The remarks report what is unreadable.
    with suppress(DatasetError):
        features = dataset.row_features
    with suppress(DatasetError):
        largest_s = largest_drift(dataset)
        more = f", more than half a frame: see raypipe validate {meta.root}" if largest_s > 0.5 / meta.fps else ""
        drift = [("timestamps", f"up to {round(largest_s, 4):g} s from frame / fps{more}")]
    return [
        ("root", meta.root),
        ("robot", meta.robot_type),
        ("format", meta.source.layout),
        ("episodes", f"{len(meta.episodes):,}{each}"),
        ("frames", f"{meta.num_frames:,} at {meta.fps:g} fps: {duration(seconds)}"),
        *(("camera", f"{name}  {camera_text(dataset, name)}") for name in dataset.spec.cameras),
        *(("camera", f"{name}  declared, and no file is found") for name in dataset.missing_cameras),
        ("numbers", ", ".join(f"{one.name} {list(one.shape)}" for one in vector_features(features.values()))),
        *drift,
        ("fingerprint", meta.order_fingerprint),
    ]


def read_thumbnails(dataset: Dataset, cameras: Iterable[str], num_episodes: int = 1) -> tuple[list[Picture], list[str]]:
    """Return the middle frame of some episodes, camera by camera, and the errors of those that cannot be decoded."""
    meta, pictures, failures = dataset.meta, [], []
    reader = FrameReader(dataset, height=_THUMBNAIL_HEIGHT)
    for camera in cameras:
        for row in spread(len(meta.episodes), num_episodes):
            frame = int(meta.episodes.length[row]) // 2
            try:
                pixels, scale = reader.read_measured(row, camera, np.array([frame]))
            except DatasetError as error:
                failures.append(str(error))
                continue
            place = f"episode {meta.episodes.episode_index[row]}, frame {frame}"
            metres = f"\n{scale[0] / 1000:.2f} to {scale[1] / 1000:.2f} m" if scale is not None else ""
            pictures.append(Picture(pixels[0], f"{short_name(camera)}\n{place}{metres}"))
    return pictures, failures


def _remarks(dataset: Dataset, checked: Checked) -> list[Remark]:
    """Return remarks from the metadata and the list of files, without reading the files."""
    remarks = _folded(checked.structure)
    if not dataset.meta.storage.is_listable:
        remarks.append(Remark("note", "a web server lists nothing: which files are there was not checked"))
    try:
        columns = column_notes(dataset)
    except DatasetError as error:
        columns = []
        if not checked.blames(str(error)):
            remarks.append(Remark("error", str(error)))
    told = " ".join(one.text for one in remarks)
    notes = [note for note in (*dataset.meta.notes, *missing_notes(dataset), *columns) if note not in told]
    return [*remarks, *(Remark("note", note) for note in notes)]


def _folded(findings: Iterable[Finding]) -> list[Remark]:
    return [
        Remark(fold.severity, f"{', '.join(fold.place.splitlines())}: {fold.message}")
        for fold in fold_findings(findings)
    ]


def draw_lengths(axes: Any, lengths: NDArray[np.int64], fps: float) -> None:
    """Draw a histogram of episode lengths."""
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
    count_whole(axes.xaxis, axes.yaxis)
    seconds = axes.secondary_xaxis("top", functions=(lambda frames: frames / fps, lambda seconds: seconds * fps))
    seconds.set_xlabel("seconds", fontsize=8)
    for scale in (axes, seconds):
        scale.tick_params(labelsize=7)
