"""Blocks: rows of spans with their windows, which a task or the rank packs into an Arrow table, and the rank opens.

Rows get the names, dtypes and widths of the schema when they are read, because a block may pack spans of different
files and datasets. Cameras, too, have their schema names; frames of one name may differ in size between datasets.
Decoded pixels do not travel with rows. The rank fills in features that a dataset lacks.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raypipe.dataset import Dataset, Schema, window_rows
from raypipe.errors import LEAVE_OUT, DatasetError, DownloadError, RaypipeError, is_data_fault, noting
from raypipe.feed.block_context import BlockContext, shown_frames
from raypipe.feed.order import SpanRequest
from raypipe.format import Feature, column_values, one_line
from raypipe.plan import Ints
from raypipe.storage import is_transient, num_requests, retry_transient
from raypipe.text import counted

HEADER: Final = "raypipe_span"
IMAGES: Final = "raypipe_images"
"""The column with a span's stored images, of all frames that its samples show, in the span's first row."""

Images = Mapping[str, tuple[Ints, list[Any]]]
"""By camera: ascending frames, and the stored image of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlock:
    """A span of a block. Its header has no rows; a rank receives it with arrays that are views on the block."""

    request: SpanRequest
    num_rows: int
    error: RaypipeError | None = None
    """The error in the data."""
    num_requests: int = 0
    """Requests to remote storage that the task sent for this span."""
    finished_at: float = 0.0
    """When the task finished the span, on a rank all spans of the block, in seconds since 1970 by the clock of its
    node."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Row features and their padding, under the names of the schema: arrays ``(rows, ...)``, or lists for text."""
    stored_images: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Stored images by camera and frame."""

    def check(self) -> None:
        """Raise the error that the block carries."""
        if self.error is not None:
            raise self.error


def read_block(
    context: BlockContext, requests: Sequence[SpanRequest], sleep: Callable[[float], None] = time.sleep
) -> pa.Table:
    """Return the block of the spans: a row per frame to emit with the windows of its features, or the spans' errors."""
    tables = [_read_span(context, request, sleep) for request in requests]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")


def filler_block(num_rows: int) -> pa.Table:
    """Return a block of empty rows. It only advances Ray's row counts; the rank discards it."""
    return _pack(num_rows, num_rows, {}, {})


def open_block(context: BlockContext, table: pa.Table) -> Iterator[SpanBlock]:
    """Yield the spans of a block as arrays; a filler yields nothing."""
    spans = list(_headers(table))
    finished_at = max((span.finished_at for _, span in spans), default=0.0)
    for begin, span in spans:
        packed = table.column(IMAGES)[begin].as_py()
        images: Images = pickle.loads(packed) if packed else {}
        by_frame = {name: dict(zip(frames.tolist(), stored, strict=True)) for name, (frames, stored) in images.items()}
        # A span with an error has no columns; packing pads them with nulls.
        columns = {} if span.error else _open_rows(context, table.slice(begin, span.num_rows), span.request)
        yield replace(span, finished_at=finished_at, columns=columns, stored_images=by_frame)


def has_error(table: pa.Table) -> bool:
    """Return whether any span of a block carries an error."""
    return any(span.error is not None for _, span in _headers(table))


def _pack(header: SpanBlock | int, num_rows: int, columns: Mapping[str, pa.Array], images: Images) -> pa.Table:
    """Return the rows of a span, with its header in the first one; the header of a filler is its number of rows."""
    rest, packed = [None] * (num_rows - 1), pickle.dumps(images) if images else None
    return pa.table(
        {
            HEADER: pa.array([pickle.dumps(header), *rest], pa.large_binary()),
            IMAGES: pa.array([packed, *rest], pa.large_binary()),
            **columns,
        }
    )


def _headers(table: pa.Table) -> Iterator[tuple[int, SpanBlock]]:
    """Yield the first row and the header of every span of a block."""
    begin = 0
    while begin < len(table):
        header: SpanBlock | int = pickle.loads(table.column(HEADER)[begin].as_py())
        if isinstance(header, int):
            return
        yield begin, header
        begin += header.num_rows


def _read_span(context: BlockContext, request: SpanRequest, sleep: Callable[[float], None]) -> pa.Table:
    sent = num_requests()
    try:
        dataset, row, _ = context.find_episode(request)
        read, forget = partial(_read_reach, context, request), partial(context.readers[request.dataset].forget, row)
        file = dataset.meta.data_file(row)
        reach = retry_transient(lambda: dataset.meta.storage.read_again(file, read, forget), sleep)
        sent = num_requests() - sent
        columns, images = _add_windows(context, request, reach)
        num_rows = len(request.anchors)
        header = SpanBlock(request=request, num_rows=num_rows, num_requests=sent, finished_at=time.time())
        return _pack(header, num_rows, columns, images)
    except Exception as error:
        # Catch any class: libraries raise many kinds of errors for damaged bytes.
        if not is_data_fault(error):
            raise
        num_rows, told = len(request.anchors), _carried(context, request, error)
        return _pack(SpanBlock(request=request, num_rows=num_rows, error=told), num_rows, {}, {})


@dataclass(frozen=True, slots=True)
class _Reach:
    """The values of all rows that windows of a whole span show."""

    first: int
    """The frame of the first row."""
    numbers: dict[str, NDArray[Any]]
    """Vectors, under the names of the schema."""
    others: dict[str, pa.Array]
    """Texts, lists and structs as bytes, and stored images."""


def _read_reach(context: BlockContext, request: SpanRequest) -> _Reach:
    """Return the rows that windows of the whole span show.

    It reads the whole span even if some frames were emitted before, so that the span is bad now if it was bad then.
    """
    dataset, row, length = context.find_episode(request)
    before, after = dataset.window.reach(list(context.stored[request.dataset]))
    start, stop = request.start, request.stop
    if context.has_images and request.clip_frames and context.bad_data.on_bad_episode == "skip":
        # Read the images of whole clips: a cut may have put some of their frames into another span.
        start -= start % request.clip_frames
        stop += -stop % request.clip_frames
    first, stop = max(start + before, 0), min(stop + after, length)
    table = context.readers[request.dataset].read_frames(row, first, stop)
    with noting(f"in {dataset.meta.storage.locate(dataset.meta.data_file(row))!r}"):
        return _to_schema(context, request, table, first)


def _to_schema(context: BlockContext, request: SpanRequest, table: pa.Table, first: int) -> _Reach:
    dataset, member, schema = context.datasets[request.dataset], context.member_of(request), context.batch_schema
    stored, trained_on = context.stored[request.dataset], context.trained_on[request.dataset]
    place = f"episode {request.episode} of {dataset.meta.root!r}"
    reach = _Reach(first, {}, {})
    for name, own in member.rows.items():
        if stored[own].kind != "vector":
            reach.others[name] = as_bytes(only_chunk(table.column(own)))
            continue
        values = np.asarray(column_values(table, stored[own], place))
        if context.bad_data.check_finite and own in trained_on:
            _check_finite(values, own, first, place)
        if own == "task_index":
            _check_tasks(dataset, values, place)
        feature = schema.features[name]
        if context.schema is not None:
            values = _widened(values, feature, f"feature {own!r} of {place}", first)
        reach.numbers[name] = values.reshape(len(values), *(() if feature.shape == (1,) else feature.shape))
    for name, own in member.cameras.items():
        if context.stores_images(request.dataset, own):
            reach.others[name] = _image_bytes(only_chunk(table.column(own)))
    return reach


def _widened(values: NDArray[Any], feature: Feature, place: str, first: int) -> NDArray[Any]:
    """Return rows of a vector in the dtype of the schema, with zeros up to its width; `first` is the first frame."""
    values = _cast(values, feature, place, first)
    if feature.shape == (1,) or values.shape[1:] == feature.shape:
        return values
    # A scalar that is a vector in other datasets becomes the vector's first number.
    narrow = values.reshape(len(values), -1)
    return np.pad(narrow, ((0, 0), (0, feature.shape[0] - narrow.shape[1])))


def _cast(values: NDArray[Any], feature: Feature, place: str, first: int) -> NDArray[Any]:
    """Return values in the dtype of the schema; raise if the cast would change a value."""
    cast = values.astype(feature.dtype, copy=False)
    if cast.dtype == values.dtype:
        return cast
    # Compare in the original dtype: as float64, different integers beyond 2**53 seem equal. No int64 reaches 2**63.
    with np.errstate(invalid="ignore"):
        is_other = (cast >= 2.0**63) | (cast.astype(values.dtype) != values)
    if is_other.any():
        at = tuple(int(axis[0]) for axis in is_other.nonzero())
        raise DatasetError(
            f"{place} has {values[at]} in frame {first + at[0]}, which would become {cast[at]:.0f}: the mixture has it "
            f"as {feature.dtype} under the name {feature.name!r}, as another dataset has it so. Rename or drop it in "
            f"one of them"
        )
    return cast


def _image_bytes(array: pa.Array) -> pa.Array:
    """Return stored images as plain bytes: some writers put them in structs, next to a path."""
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        array = pc.struct_field(array, "bytes")
    is_bytes = pa.types.is_binary(array.type) or pa.types.is_binary_view(array.type)
    return array.cast(pa.large_binary()) if is_bytes else array


def _add_windows(context: BlockContext, request: SpanRequest, reach: _Reach) -> tuple[dict[str, pa.Array], Images]:
    """Return a row per frame to emit, with the windows of row features gathered; and the stored images."""
    dataset, _, length = context.find_episode(request)
    member, anchors = context.member_of(request), request.anchors
    columns, images = {}, {}
    for name, own in member.rows.items():
        wanted, offsets = anchors - reach.first, dataset.window.offsets.get(own)
        if offsets:
            slots, padding = window_rows(anchors, length, offsets)
            wanted = slots - reach.first
            columns[f"{name}_is_pad"] = as_array(padding)
        if name in reach.others:
            columns[name] = take_windows(reach.others[name], wanted)
            continue
        values = reach.numbers[name][wanted]
        if dataset.actions is not None and own == dataset.actions.action:
            values = _represented(context, request, reach, values)
        columns[name] = as_array(values)
    for name, own in member.cameras.items():
        if context.stores_images(request.dataset, own):
            frames = shown_frames(context, request, own)
            images[name] = (frames, reach.others[name].take(pa.array(frames - reach.first)).to_pylist())
    return columns, images


def _represented(context: BlockContext, request: SpanRequest, reach: _Reach, actions: NDArray[Any]) -> NDArray[Any]:
    """Return the action windows relative to the state of each anchor. Numbers that pad the width stay 0."""
    dataset, schema = context.datasets[request.dataset], context.batch_schema
    assert dataset.actions is not None
    states = reach.numbers[dataset.actions.spec.to][request.anchors - reach.first]
    return dataset.actions.encode(actions, states, has_window=dataset.actions.spec.feature in schema.windows)


def _check_tasks(dataset: Dataset, task_index: Any, place: str) -> None:
    """Raise if a row names a task that the dataset does not have."""
    tasks = dataset.meta.tasks
    with noting(f"in {place}"):
        for index in np.unique(task_index).tolist() if len(tasks) else ():
            tasks.text(index)


def _check_finite(values: NDArray[Any], name: str, first: int, place: str) -> None:
    """Raise if a feature has NaN or infinite values; `first` is the frame of the first row."""
    if values.dtype.kind != "f":
        return
    is_finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if not is_finite.all():
        frame = int(np.argmin(is_finite))
        raise DatasetError(
            f"feature {name!r} of {place} has {counted(int(np.count_nonzero(~is_finite)), 'frame')} with NaN or "
            f"infinite values, the first is frame {first + frame}: {values[frame].tolist()}. Train on it all the same "
            f"by check_finite=False, or {LEAVE_OUT}"
        )


def _carried(context: BlockContext, request: SpanRequest, error: Exception) -> RaypipeError:
    """Return an error of reading a span in the form in which its block carries it."""
    text, kind = str(error), type(error) if isinstance(error, RaypipeError) else DatasetError
    if not isinstance(error, RaypipeError):
        dataset, row, _ = context.find_episode(request)
        file, name = dataset.meta.storage.locate(dataset.meta.data_file(row)), type(error).__name__
        text = f"cannot read episode {request.episode} of {dataset.meta.root!r} in {file!r}: {name}: {one_line(error)}"
    if is_transient(error):
        # Unreachable storage is not bad data, so the span must not be left out.
        kind = DownloadError
    return kind("; ".join([text, *getattr(error, "__notes__", ())]))


def _open_rows(context: BlockContext, rows: pa.Table, request: SpanRequest) -> dict[str, Any]:
    schema, given = context.batch_schema, context.member_of(request).rows
    columns: dict[str, Any] = {}
    for name, feature in schema.rows.items():
        if name not in given:
            columns[name] = _fill(schema, name, len(rows))
        elif feature.kind == "vector":
            columns[name] = as_numpy(only_chunk(rows.column(name)), schema.value_shape(name))
        else:
            columns[name] = as_values(only_chunk(rows.column(name)))
        if name in schema.windows:
            shape, padding = (schema.windows[name],), f"{name}_is_pad"
            if name in given:
                columns[padding] = as_numpy(only_chunk(rows.column(padding)), shape)
            else:
                columns[padding] = np.ones((len(rows), *shape), dtype=np.bool_)
    return columns


def _fill(schema: Schema, name: str, num_rows: int) -> Any:
    """Return the values of a feature that a dataset lacks: zeros, or empty texts and lists."""
    feature = schema.features[name]
    if feature.kind == "vector":
        return np.zeros((num_rows, *schema.value_shape(name)), dtype=feature.dtype)
    window = range(schema.windows.get(name, 0))
    # Make a list for every sample, because a transform may write to it.
    empty: Callable[[], Any] = str if feature.kind == "string" else list
    return [[empty() for _ in window] if name in schema.windows else empty() for _ in range(num_rows)]


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


def take_windows(array: pa.Array, wanted: Ints) -> pa.Array:
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
