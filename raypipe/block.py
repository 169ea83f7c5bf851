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

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe import errors
from raypipe.dataset import Dataset
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import DatasetError, RaypipeError
from raypipe.metrics import TaskTimes
from raypipe.plan import RankPlan
from raypipe.rows import RowReader, column_values
from raypipe.storage import retry_transient
from raypipe.window import window_rows

if TYPE_CHECKING:
    from raypipe.decode.span import SpanDecoder

Frames = NDArray[np.int64]

HEADER: Final = "raypipe_span"
MARGIN: Final = "raypipe_margin"
"""Pixels (or stored images) of frames that windows show and that no row of the span is: in its first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRequest:
    """One span of a plan: what to read, and the identity that its block carries."""

    epoch: int
    dataset: int
    episode: int
    start: int
    stop: int
    lane: int
    place: int
    """Position in the lane's queue."""
    frames: tuple[int, ...] = ()
    """The frames to emit where they are not all of [start, stop): what an interrupted epoch left of the span."""

    @property
    def anchors(self) -> Frames:
        """The frames to emit, ascending: one per row of the block."""
        return np.array(self.frames, dtype=np.int64) if self.frames else np.arange(self.start, self.stop)


def span_request(plan: RankPlan, arrival: int) -> SpanRequest:
    """Return what to read for one block of a rank's queue."""
    queue = plan.queue
    is_whole = queue.num_rows[arrival] == queue.stop[arrival] - queue.start[arrival]
    return SpanRequest(
        epoch=plan.keys.epoch,
        dataset=int(queue.dataset[arrival]),
        episode=int(queue.episode[arrival]),
        start=int(queue.start[arrival]),
        stop=int(queue.stop[arrival]),
        lane=int(queue.lane[arrival]),
        place=int(queue.place[arrival]),
        frames=() if is_whole else tuple(plan.frames_of(arrival).tolist()),
    )


@dataclass(frozen=True)
class BlockContext:
    """Everything that a task or a rank needs to make and open blocks; a process receives it once."""

    datasets: tuple[Dataset, ...]
    decode: DecodeSpec

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
        return {"datasets": self.datasets, "decode": self.decode}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    request: SpanRequest | None
    """None in a filler."""
    num_rows: int
    first: int = 0
    """The frame of the first row read."""
    error: tuple[str, str] = ("", "")
    read_s: float = 0.0
    decode_s: float = 0.0
    num_decoded: int = 0
    finished_at: float = 0.0
    """Seconds since 1970 when the last stage of the task was done with the span."""


@dataclass(frozen=True, slots=True)
class _Span:
    """One span of a block on its way: its header, its columns, and its margins by camera."""

    header: _Header
    columns: dict[str, pa.Array]
    margins: dict[str, tuple[Frames, Any]]


def read_rows(
    context: BlockContext, requests: Sequence[SpanRequest], sleep: Callable[[float], None] = time.sleep
) -> pa.Table:
    """Return the rows of the spans and of their windows' reach, or their errors."""
    return _pack([_read_span(context, request, sleep) for request in requests])


def add_windows(context: BlockContext, table: pa.Table) -> pa.Table:
    """Return one row per frame to emit, with the windows of row features gathered."""
    return _pack([_guarded(_window_span, context, span) for span in _unpack(table)])


def add_pixels(context: BlockContext, table: pa.Table) -> pa.Table:
    """Return the table with the decoded frames of every camera."""
    return _pack([_guarded(_decode_span, context, span) for span in _unpack(table)])


def open_block(context: BlockContext, table: pa.Table) -> Iterator[SpanBlock]:
    """Yield the spans of a block as arrays; a filler yields nothing."""
    spans = list(_unpack(table))
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
    return _pack([_Span(_Header(request=None, num_rows=num_rows), {}, {})])


def window_frames(dataset: Dataset, camera: str, anchors: Frames, length: int) -> Frames:
    """Return the frames of a camera that the windows of `anchors` show: ``(len(anchors), T)``."""
    return window_rows(anchors, length, dataset.window.offsets.get(camera, (0,)))[0]


def _read_span(context: BlockContext, request: SpanRequest, sleep: Callable[[float], None]) -> _Span:
    started = time.perf_counter()
    try:
        span = retry_transient(lambda: _read_reach(context, request), sleep)
        return replace(span, header=replace(span.header, read_s=time.perf_counter() - started, finished_at=time.time()))
    except (RaypipeError, OSError) as error:
        return _failed(request, error)


def _read_reach(context: BlockContext, request: SpanRequest) -> _Span:
    dataset, row, length = context.find_episode(request)
    anchors = request.anchors
    before, after = dataset.window.reach(list(dataset.row_features))
    first, stop = max(int(anchors[0]) + before, 0), min(int(anchors[-1]) + after + 1, length)
    table = context.readers[request.dataset].read_frames(row, first, stop)
    columns = {name: _only_chunk(table.column(name)) for name in table.column_names}
    return _Span(_Header(request=request, num_rows=len(table), first=first), columns, {})


def _window_span(context: BlockContext, span: _Span, request: SpanRequest) -> _Span:
    dataset, _, length = context.find_episode(request)
    place = f"episode {request.episode} of {dataset.meta.root!r}"
    first, anchors, started = span.header.first, request.anchors, time.perf_counter()
    rows, columns, margins = pa.table(span.columns), {}, {}
    for name, feature in dataset.row_features.items():
        if feature.kind == "image":
            extra = _margin_frames(dataset, name, anchors, length)
            margins[name] = (extra, rows.column(name).take(extra - first).to_pylist())
            columns[name] = _only_chunk(rows.column(name).take(anchors - first))
            continue
        values = column_values(rows, feature, place)
        offsets = dataset.window.offsets.get(name)
        slots, padding = window_rows(anchors, length, offsets or (0,))
        wanted = slots - first if offsets else anchors - first
        columns[name] = _as_array(values[wanted]) if isinstance(values, np.ndarray) else _as_texts(values, wanted)
        if offsets:
            columns[f"{name}_is_pad"] = _as_array(padding)
    read_s = span.header.read_s + time.perf_counter() - started
    return _Span(replace(span.header, num_rows=len(anchors), read_s=read_s), columns, margins)


def _decode_span(context: BlockContext, span: _Span, request: SpanRequest) -> _Span:
    dataset, row, length = context.find_episode(request)
    decoder, anchors = context.decoders[request.dataset], request.anchors
    columns, margins = dict(span.columns), {}
    started, num_decoded = time.perf_counter(), 0
    for camera in dataset.spec.cameras:
        extra = _margin_frames(dataset, camera, anchors, length)
        frames = np.union1d(anchors, extra)
        if dataset.features[camera].kind == "image":
            stored = dict(zip(anchors.tolist(), span.columns[camera].to_pylist(), strict=True))
            stored |= dict(zip(extra.tolist(), span.margins[camera][1], strict=True))
            pixels = decoder.decode_images(row, camera, [stored[frame] for frame in frames.tolist()], frames)
        else:
            pixels = decoder.decode_video(row, camera, frames)
        num_decoded += len(frames)
        values = pixels.numpy()
        columns[camera] = _as_array(values if not len(extra) else values[np.searchsorted(frames, anchors)])
        margins[camera] = (extra, values[np.searchsorted(frames, extra)])
    seconds = time.perf_counter() - started
    return _Span(replace(span.header, decode_s=seconds, num_decoded=num_decoded), columns, margins)


def _margin_frames(dataset: Dataset, camera: str, anchors: Frames, length: int) -> Frames:
    return np.setdiff1d(window_frames(dataset, camera, anchors, length), anchors)


def _open_span(context: BlockContext, span: _Span, request: SpanRequest, task: TaskTimes) -> SpanBlock:
    dataset = context.datasets[request.dataset]
    columns: dict[str, Any] = {}
    pixels: dict[str, tuple[CameraPart, ...]] = {}
    stored: dict[str, tuple[Frames, list[Any]]] = {}
    for name, array in span.columns.items():
        if name not in dataset.spec.cameras:
            shape = _row_shape(dataset, name)
            columns[name] = array.to_pylist() if shape is None else _as_numpy(array, shape)
        elif pa.types.is_fixed_size_list(array.type):
            values = _as_numpy(array, context.decode.frame_shape(dataset.features[name]))
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


def _guarded(stage: Callable[[BlockContext, _Span, SpanRequest], _Span], context: BlockContext, span: _Span) -> _Span:
    """Run a stage on a span; what is wrong with its data becomes the span's error."""
    request = span.header.request
    if request is None or span.header.error[0]:
        return span
    try:
        done = stage(context, span, request)
        return replace(done, header=replace(done.header, finished_at=time.time()))
    except (RaypipeError, OSError) as error:
        return _failed(request, error)


def _failed(request: SpanRequest, error: RaypipeError | OSError) -> _Span:
    kind = type(error).__name__ if isinstance(error, RaypipeError) else DatasetError.__name__
    text = str(error) if isinstance(error, RaypipeError) else f"{type(error).__name__}: {error}"
    message = "; ".join([text, *getattr(error, "__notes__", ())])
    return _Span(_Header(request=request, num_rows=len(request.anchors), error=(kind, message)), {}, {})


def _pack(spans: Sequence[_Span]) -> pa.Table:
    tables = []
    for span in spans:
        header = json.dumps(asdict(span.header)).encode()
        margin = pickle.dumps(span.margins) if span.margins else None
        rest = [None] * (span.header.num_rows - 1)
        tables.append(
            pa.table(
                {
                    HEADER: pa.array([header, *rest], pa.large_binary()),
                    MARGIN: pa.array([margin, *rest], pa.large_binary()),
                    **span.columns,
                }
            )
        )
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")


def _unpack(table: pa.Table) -> Iterator[_Span]:
    begin = 0
    while begin < len(table):
        header = _parse_header(table.column(HEADER)[begin].as_py())
        margin = table.column(MARGIN)[begin].as_py()
        columns = {}
        for name in table.column_names:
            array = table.column(name).slice(begin, header.num_rows)
            # A filler and a span with an error have no columns: packed with others, they are padded with nulls.
            if name not in (HEADER, MARGIN) and header.request is not None and not header.error[0]:
                columns[name] = _only_chunk(array)
        yield _Span(header, columns, pickle.loads(margin) if margin else {})
        begin += header.num_rows


def _parse_header(content: bytes) -> _Header:
    fields = json.loads(content)
    if fields["request"] is not None:
        frames = tuple(fields["request"].pop("frames"))
        fields["request"] = SpanRequest(**fields["request"], frames=frames)
    fields["error"] = tuple(fields["error"])
    return _Header(**fields)


def _only_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _as_array(values: NDArray[Any]) -> pa.Array:
    """Return an Arrow array with a row per entry of the first axis, sharing the memory where it can."""
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))


def _as_texts(values: list[Any], wanted: Frames) -> pa.Array:
    return pa.array([[values[i] for i in row] if isinstance(row, list) else values[row] for row in wanted.tolist()])


def _as_numpy(array: pa.Array, shape: tuple[int, ...]) -> NDArray[Any]:
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(len(array), *shape)
