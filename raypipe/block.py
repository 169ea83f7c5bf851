"""What travels from a read task to a rank: one block per span, as an Arrow table.

::

    read_rows      the rows of the span and of its windows' reach    one row per frame read
    add_windows    row features with their windows                   one row per frame to emit
    add_pixels     where decoding runs on the cluster: pixels        one row per frame to emit
    open_block     on the rank: arrays again                         SpanBlock

Plain functions on tables, without Ray. The first row of a span carries its identity in the column `HEADER`; a block may
pack several spans. **Nothing here raises for bad data**: the block keeps its planned rows and carries the error to the
rank, since a task that fails, or a row too few, would upset Ray's split for all ranks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from raypipe import errors
from raypipe.account import frame_numbers
from raypipe.dataset import Dataset
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import DatasetError, DownloadError, RaypipeError
from raypipe.metrics import TaskTimes
from raypipe.packed import (
    Frames,
    PackedSpan,
    SpanHeader,
    SpanRequest,
    as_array,
    as_numpy,
    as_texts,
    only_chunk,
    pack_spans,
    unpack_spans,
)
from raypipe.rows import RowReader, column_values
from raypipe.skips import RAISE, BadDataSpec
from raypipe.storage import is_transient, retry_transient
from raypipe.window import window_rows

if TYPE_CHECKING:
    from raypipe.decode.span import SpanDecoder

_TRAINED_ON: Final = ("action", "observation")
"""Features of which a value that is no number would end in the weights; a reward may be unknown."""


@dataclass(frozen=True)
class BlockContext:
    """Everything that a task or a rank needs to make and open blocks; a process receives it once."""

    datasets: tuple[Dataset, ...]
    decode: DecodeSpec
    bad_data: BadDataSpec = RAISE

    @cached_property
    def readers(self) -> tuple[RowReader, ...]:
        """A row reader per dataset."""
        return tuple(RowReader(dataset.meta, list(dataset.row_features)) for dataset in self.datasets)

    @cached_property
    def decoders(self) -> "tuple[SpanDecoder, ...]":
        """A span decoder per dataset."""
        from raypipe.decode.span import SpanDecoder

        return tuple(SpanDecoder(dataset.meta, self.decode) for dataset in self.datasets)

    def __getstate__(self) -> dict[str, Any]:
        # Open files and decoders stay behind: each process opens its own.
        return {"datasets": self.datasets, "decode": self.decode, "bad_data": self.bad_data}

    def frame_numbers(self, dataset: Frames, episode: Frames, frame: Frames) -> Frames:
        """Return the number of every frame on the axis of accounts, which holds all datasets; see `frame_numbers`."""
        numbers = np.empty(len(frame), dtype=np.int64)
        for i, one in enumerate(self.datasets):
            mine = dataset == i if len(self.datasets) > 1 else slice(None)
            episodes = one.meta.episodes
            row = np.searchsorted(episodes.episode_index, episode[mine])
            numbers[mine] = frame_numbers(i, episodes.first_frames[row] + frame[mine])
        return numbers

    def find_episode(self, request: SpanRequest) -> tuple[Dataset, int, int]:
        """Return the dataset of a span, the row of its episode in the episode table, and the episode's length."""
        dataset = self.datasets[request.dataset]
        row = dataset.meta.episodes.find_row(request.episode)
        return dataset, row, int(dataset.meta.episodes.length[row])


@dataclass(frozen=True, slots=True)
class CameraPart:
    """Decoded frames of a camera: ascending frame numbers, and their pixels ``(n, height, width, channels)``."""

    frames: Frames
    pixels: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlock:
    """A span as a rank receives it: arrays that are views on the block."""

    request: SpanRequest
    num_rows: int
    error: tuple[str, str]
    """Class and message of what is wrong with the data; empty strings where all is well."""
    columns: dict[str, Any]
    """Row features and their padding: arrays ``(rows, ...)``, or lists for text."""
    pixels: dict[str, tuple[CameraPart, ...]]
    """By camera, where decoding ran on the cluster."""
    stored_images: dict[str, tuple[Frames, list[Any]]]
    """By camera, frames and bytes of images that the rank decodes."""
    decode_s: float
    num_decoded: int
    task: TaskTimes
    """Of the task that made the block, which may hold other spans too."""

    def check(self) -> None:
        """Raise the error that the block carries, as the class that it had in the task."""
        kind, message = self.error
        if kind:
            raise getattr(errors, kind, DatasetError)(message)


def read_rows(
    context: BlockContext, requests: Sequence[SpanRequest], sleep: Callable[[float], None] = time.sleep
) -> pa.Table:
    """Return the rows of the spans and of their windows' reach, or their errors."""
    return pack_spans([_read_span(context, request, sleep) for request in requests])


def add_windows(context: BlockContext, table: pa.Table) -> pa.Table:
    """Return one row per frame to emit, with the windows of row features gathered."""
    return pack_spans([_guarded(_window_span, context, span) for span in unpack_spans(table)])


def add_pixels(context: BlockContext, table: pa.Table) -> pa.Table:
    """Return the table with the decoded frames of every camera."""
    return pack_spans([_guarded(_decode_span, context, span) for span in unpack_spans(table)])


def open_block(context: BlockContext, table: pa.Table) -> Iterator[SpanBlock]:
    """Yield the spans of a block as arrays; a filler yields nothing."""
    spans = list(unpack_spans(table))
    headers = [span.header for span in spans]
    task = TaskTimes(
        read_s=sum(header.read_s for header in headers),
        decode_s=sum(header.decode_s for header in headers),
        finished_at=max(header.finished_at for header in headers),
    )
    for span in spans:
        if span.header.request is not None:
            yield _open_span(context, span, span.header.request, task)


def filler_block(num_rows: int) -> pa.Table:
    """Return a block of rows that stand for nothing: it moves Ray's row counts, and the rank throws it away."""
    return pack_spans([PackedSpan(SpanHeader(request=None, num_rows=num_rows), {}, {})])


def window_frames(dataset: Dataset, camera: str, anchors: Frames, length: int) -> Frames:
    """Return the frames of a camera that the windows of `anchors` show: ``(len(anchors), T)``."""
    return window_rows(anchors, length, dataset.window.offsets.get(camera, (0,)))[0]


def _read_span(context: BlockContext, request: SpanRequest, sleep: Callable[[float], None]) -> PackedSpan:
    started = time.perf_counter()
    try:
        span = retry_transient(lambda: _read_reach(context, request), sleep)
        return replace(span, header=replace(span.header, read_s=time.perf_counter() - started, finished_at=time.time()))
    except (RaypipeError, OSError, ValueError, TypeError, pa.ArrowException) as error:
        return _failed(request, error)


def _read_reach(context: BlockContext, request: SpanRequest) -> PackedSpan:
    """Return the values of all rows that windows of the span show.

    Also of a span of which some frames were emitted before: what is bad about it was bad then. Types are made alike
    here, since files may differ in them and a block packs spans of several.
    """
    dataset, row, length = context.find_episode(request)
    before, after = dataset.window.reach(list(dataset.row_features))
    first, stop = max(request.start + before, 0), min(request.stop + after, length)
    table = context.readers[request.dataset].read_frames(row, first, stop)
    try:
        columns = _column_arrays(context, dataset, table, first, f"episode {request.episode} of {dataset.meta.root!r}")
    except DatasetError as error:
        error.add_note(f"in {dataset.meta.storage.locate(dataset.meta.data_file(row))!r}")
        raise
    return PackedSpan(SpanHeader(request=request, num_rows=len(table), first=first), columns, {})


def _column_arrays(
    context: BlockContext, dataset: Dataset, table: pa.Table, first: int, place: str
) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {}
    for name, feature in dataset.row_features.items():
        if feature.kind != "vector":
            columns[name] = only_chunk(table.column(name))
            continue
        values = column_values(table, feature, place)
        if context.bad_data.check_finite and name.startswith(_TRAINED_ON):
            _check_finite(values, name, first, place)
        if name == "task_index":
            _check_tasks(dataset, values, place)
        columns[name] = as_array(np.asarray(values))
    return columns


def _window_span(context: BlockContext, span: PackedSpan, request: SpanRequest) -> PackedSpan:
    dataset, _, length = context.find_episode(request)
    first, anchors, started = span.header.first, request.anchors, time.perf_counter()
    columns, margins = {}, {}
    for name, feature in dataset.row_features.items():
        rows = span.columns[name]
        if feature.kind == "image":
            extra = _margin_frames(context, request, name)
            margins[name] = (extra, rows.take(pa.array(extra - first)).to_pylist())
            columns[name] = rows.take(pa.array(anchors - first))
            continue
        offsets = dataset.window.offsets.get(name)
        slots, padding = window_rows(anchors, length, offsets or (0,))
        wanted = slots - first if offsets else anchors - first
        if feature.kind == "vector":
            columns[name] = as_array(as_numpy(rows, () if feature.shape == (1,) else feature.shape)[wanted])
        else:
            columns[name] = as_texts(rows.to_pylist(), wanted)
        if offsets:
            columns[f"{name}_is_pad"] = as_array(padding)
    read_s = span.header.read_s + time.perf_counter() - started
    return PackedSpan(replace(span.header, num_rows=len(anchors), read_s=read_s), columns, margins)


def _check_tasks(dataset: Dataset, task_index: Any, place: str) -> None:
    """Raise if a row names a task that the dataset does not have."""
    tasks = dataset.meta.tasks
    try:
        for index in np.unique(task_index).tolist() if len(tasks) else ():
            tasks.text(index)
    except DatasetError as error:
        error.add_note(f"in {place}")
        raise


def _check_finite(values: Any, name: str, first: int, place: str) -> None:
    """Raise if a feature has NaN or infinite values; `first` is the frame of the first row."""
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        return
    is_finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if not is_finite.all():
        frame = int(np.argmin(is_finite))
        raise DatasetError(
            f"feature {name!r} of {place} has {np.count_nonzero(~is_finite)} frames with NaN or infinite values, the "
            f"first is frame {first + frame}: {values[frame].tolist()}. Exclude the episode, skip it by "
            f"on_bad_episode='skip', or train on it all the same by check_finite=False"
        )


def _decode_span(context: BlockContext, span: PackedSpan, request: SpanRequest) -> PackedSpan:
    dataset, row, _ = context.find_episode(request)
    decoder, anchors = context.decoders[request.dataset], request.anchors
    columns, margins = dict(span.columns), {}
    started, num_decoded = time.perf_counter(), 0
    for camera in dataset.spec.cameras:
        extra = _margin_frames(context, request, camera)
        frames = np.union1d(anchors, extra)
        if dataset.features[camera].kind == "image":
            stored = dict(zip(anchors.tolist(), span.columns[camera].to_pylist(), strict=True))
            stored |= dict(zip(extra.tolist(), span.margins[camera][1], strict=True))
            pixels = decoder.decode_images(row, camera, [stored[frame] for frame in frames.tolist()], frames)
        else:
            pixels = decoder.decode_video(row, camera, frames)
        num_decoded += len(frames)
        values = pixels.numpy()
        columns[camera] = as_array(values if not len(extra) else values[np.searchsorted(frames, anchors)])
        margins[camera] = (extra, values[np.searchsorted(frames, extra)])
    seconds = time.perf_counter() - started
    return PackedSpan(replace(span.header, decode_s=seconds, num_decoded=num_decoded), columns, margins)


def shown_frames(context: BlockContext, request: SpanRequest, camera: str) -> Frames:
    """Return the frames of a camera that are decoded for a span, ascending.

    Where bad spans are left out, all that the whole span shows, also if some of it was emitted before: whether a span
    is bad does not depend on where a run was interrupted.
    """
    dataset, _, length = context.find_episode(request)
    is_whole = context.bad_data.on_bad_episode == "skip"
    anchors = np.arange(request.start, request.stop) if is_whole else request.anchors
    return np.unique(window_frames(dataset, camera, anchors, length))


def _margin_frames(context: BlockContext, request: SpanRequest, camera: str) -> Frames:
    return np.setdiff1d(shown_frames(context, request, camera), request.anchors)


def _open_span(context: BlockContext, span: PackedSpan, request: SpanRequest, task: TaskTimes) -> SpanBlock:
    dataset = context.datasets[request.dataset]
    columns: dict[str, Any] = {}
    pixels: dict[str, tuple[CameraPart, ...]] = {}
    stored: dict[str, tuple[Frames, list[Any]]] = {}
    for name, array in span.columns.items():
        if name not in dataset.spec.cameras:
            shape = _row_shape(dataset, name)
            columns[name] = array.to_pylist() if shape is None else as_numpy(array, shape)
        elif pa.types.is_fixed_size_list(array.type):
            values = as_numpy(array, context.decode.frame_shape(dataset.features[name]))
            pixels[name] = (CameraPart(request.anchors, values), CameraPart(*span.margins[name]))
        else:
            extra, images = span.margins[name]
            stored[name] = (np.concatenate([request.anchors, extra]), [*array.to_pylist(), *images])
    return SpanBlock(
        request=request,
        num_rows=span.header.num_rows,
        error=span.header.error,
        columns=columns,
        pixels=pixels,
        stored_images=stored,
        decode_s=span.header.decode_s,
        num_decoded=span.header.num_decoded,
        task=task,
    )


def _row_shape(dataset: Dataset, column: str) -> tuple[int, ...] | None:
    """Return the shape of one row of a column; None for text and language, which have none."""
    name = column.removesuffix("_is_pad") if column not in dataset.row_features else column
    feature, offsets = dataset.row_features[name], dataset.window.offsets.get(name)
    window = (len(offsets),) if offsets else ()
    if column != name:
        return window
    if feature.kind != "vector":
        return None
    return (*window, *(() if feature.shape == (1,) else feature.shape))


def _guarded(
    stage: Callable[[BlockContext, PackedSpan, SpanRequest], PackedSpan], context: BlockContext, span: PackedSpan
) -> PackedSpan:
    """Run a stage on a span; what is wrong with its data becomes the span's error."""
    request = span.header.request
    if request is None or span.header.error[0]:
        return span
    try:
        done = stage(context, span, request)
        return replace(done, header=replace(done.header, finished_at=time.time()))
    except (RaypipeError, OSError, ValueError, TypeError, pa.ArrowException) as error:
        return _failed(request, error)


def _failed(request: SpanRequest, error: Exception) -> PackedSpan:
    kind = type(error).__name__ if isinstance(error, RaypipeError) else DatasetError.__name__
    text = str(error) if isinstance(error, RaypipeError) else f"{type(error).__name__}: {error}"
    if is_transient(error):
        # Storage that does not answer is no bad data: it may not be left out.
        kind = DownloadError.__name__
    message = "; ".join([text, *getattr(error, "__notes__", ())])
    return PackedSpan(SpanHeader(request=request, num_rows=len(request.anchors), error=(kind, message)), {}, {})
