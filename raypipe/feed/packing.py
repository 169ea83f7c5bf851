"""Pack spans into the rows of an Arrow table, and unpack them on the rank.

The first row of a span carries its header in the column `HEADER`; a block may pack several spans. The rows of a span
are the frames to emit. A span with an error keeps its planned rows, without columns.
"""

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.plan import RankPlan

RowFrames = NDArray[np.int64]

HEADER: Final = "raypipe_span"
IMAGES: Final = "raypipe_images"
"""The column with a span's stored images, of all frames that its samples show, in the span's first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRequest:
    """One span of a plan: what to read, and the identity that its block carries."""

    epoch: int
    dataset: int
    lap: int
    """The pass over the dataset that the span belongs to. In a mixture an episode may come twice in an epoch."""
    episode: int
    start: int
    stop: int
    lane: int
    place: int
    """Position in the lane's queue."""
    clip_frames: int = 0
    """Frames of a clip; 0 if a clip is a whole span."""
    frames: tuple[int, ...] = ()
    """The frames to emit if an interrupted epoch left only some of [start, stop); empty for all."""

    @property
    def anchors(self) -> RowFrames:
        """The frames to emit, ascending: one per row of the block."""
        return np.array(self.frames, dtype=np.int64) if self.frames else np.arange(self.start, self.stop)


def span_request(plan: RankPlan, arrival: int) -> SpanRequest:
    """Return what to read for one block of a rank's queue."""
    queue = plan.queue
    is_whole = queue.num_rows[arrival] == queue.stop[arrival] - queue.start[arrival]
    return SpanRequest(
        epoch=plan.keys.epoch,
        dataset=int(queue.dataset[arrival]),
        lap=int(queue.lap[arrival]),
        episode=int(queue.episode[arrival]),
        start=int(queue.start[arrival]),
        stop=int(queue.stop[arrival]),
        lane=int(queue.lane[arrival]),
        place=int(queue.place[arrival]),
        clip_frames=plan.keys.clip_frames[int(queue.dataset[arrival])] if plan.keys.clip_frames else 0,
        frames=() if is_whole else tuple(plan.frames_of(arrival).tolist()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanHeader:
    """The header in the first row of a span."""

    request: SpanRequest | None
    """None for a filler."""
    num_rows: int
    first: int = 0
    """The frame of the first row read."""
    error: tuple[str, str] = ("", "")
    read_s: float = 0.0
    num_requests: int = 0
    """Requests to remote storage for this span."""
    finished_at: float = 0.0
    """When the last stage of the task finished the span, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class PackedSpan:
    """One span of a block in transit: its header, its columns, and stored images by camera."""

    header: SpanHeader
    columns: dict[str, pa.Array]
    images: dict[str, tuple[RowFrames, list[Any]]]
    """By camera: ascending frames, and the stored image of each."""


def pack_spans(spans: Sequence[PackedSpan]) -> pa.Table:
    """Return the block that holds these spans."""
    tables = []
    for span in spans:
        header = json.dumps(asdict(span.header)).encode()
        images = pickle.dumps(span.images) if span.images else None
        rest = [None] * (span.header.num_rows - 1)
        tables.append(
            pa.table(
                {
                    HEADER: pa.array([header, *rest], pa.large_binary()),
                    IMAGES: pa.array([images, *rest], pa.large_binary()),
                    **span.columns,
                }
            )
        )
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")


def unpack_spans(table: pa.Table) -> Iterator[PackedSpan]:
    """Yield the spans of a block."""
    for begin, header in _headers(table):
        images = table.column(IMAGES)[begin].as_py()
        columns = {}
        for name in table.column_names:
            array = table.column(name).slice(begin, header.num_rows)
            # A filler and a span with an error have no columns; packing pads them with nulls.
            if name not in (HEADER, IMAGES) and header.request is not None and not header.error[0]:
                columns[name] = only_chunk(array)
        yield PackedSpan(header, columns, pickle.loads(images) if images else {})


def has_error(table: pa.Table) -> bool:
    """Return whether any span of a block carries an error."""
    return any(header.error[0] for _, header in _headers(table))


def _headers(table: pa.Table) -> Iterator[tuple[int, SpanHeader]]:
    """Yield the first row and the header of every span of a block."""
    begin = 0
    while begin < len(table):
        header = _parse_header(table.column(HEADER)[begin].as_py())
        yield begin, header
        begin += header.num_rows


def _parse_header(content: bytes) -> SpanHeader:
    fields = json.loads(content)
    if fields["request"] is not None:
        frames = tuple(fields["request"].pop("frames"))
        fields["request"] = SpanRequest(**fields["request"], frames=frames)
    fields["error"] = tuple(fields["error"])
    return SpanHeader(**fields)


def only_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, copied only if it has several chunks."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def as_array(values: NDArray[Any]) -> pa.Array:
    """Return an Arrow array with a row per entry of the first axis; it shares the memory if possible."""
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))


def as_bytes(array: pa.Array) -> pa.Array:
    """Return texts, lists and structs as bytes, from which `as_values` restores the same values.

    Files and datasets store them in types that do not fit into one column, such as dictionaries and plain strings; and
    structs with different fields would gain each other's fields.
    """
    return pa.array([pickle.dumps(value) for value in array.to_pylist()], pa.large_binary())


def as_values(array: pa.Array) -> list[Any]:
    """Return the values given to `as_bytes`, after `take_windows`: a list for every window."""
    if pa.types.is_list(array.type):
        return [[pickle.loads(value) for value in window] for window in array.to_pylist()]
    return [pickle.loads(value) for value in array.to_pylist()]


def take_windows(array: pa.Array, wanted: RowFrames) -> pa.Array:
    """Return the values at `wanted`, ``(rows,)`` or ``(rows, T)``; for a window, lists of values."""
    taken = array.take(pa.array(wanted.reshape(-1)))
    if wanted.ndim == 1:
        return taken
    return pa.ListArray.from_arrays(pa.array(np.arange(len(wanted) + 1) * wanted.shape[1], pa.int32()), taken)


def as_numpy(array: pa.Array, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the array given to `as_array`, as a view if Arrow allows it."""
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(len(array), *shape)


def as_objects(values: Sequence[Any]) -> NDArray[Any]:
    """Return an array with one object per value, even if the values are lists of equal length."""
    # Fill one by one: from lists of equal length numpy would make a 2-D array.
    objects = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        objects[i] = value
    return objects
