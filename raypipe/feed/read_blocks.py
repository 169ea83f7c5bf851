"""Read the rows of spans and gather their windows, in tasks or on the rank. Decoded pixels do not travel with them.

Rows get the names, dtypes and widths of the schema when they are read, because a block packs spans of different files
and datasets. Cameras, too, have their schema names; frames of one name may differ in size between datasets. The rank
fills in features that a dataset lacks. Nothing here raises for bad data: it becomes the error of its span.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raypipe.dataset import Dataset, Schema, window_rows
from raypipe.errors import LEAVE_OUT, DatasetError, DownloadError, RaypipeError, is_data_fault
from raypipe.feed.block_context import BlockContext, shown_frames
from raypipe.feed.packing import (
    PackedSpan,
    SpanHeader,
    SpanRequest,
    as_array,
    as_bytes,
    as_numpy,
    only_chunk,
    pack_spans,
    take_windows,
    unpack_spans,
)
from raypipe.format import Feature, column_values, one_line
from raypipe.storage import is_transient, num_requests, retry_transient
from raypipe.text import counted


def read_rows(
    context: BlockContext, requests: Sequence[SpanRequest], sleep: Callable[[float], None] = time.sleep
) -> pa.Table:
    """Return the rows of the spans and those that their windows reach, or the spans' errors."""
    return _packed(context, [_read_span(context, request, sleep) for request in requests])


def add_windows(context: BlockContext, table: pa.Table) -> pa.Table:
    """Return one row per frame to emit, with the windows of row features gathered."""
    return _packed(context, [_guarded(_window_span, context, span) for span in unpack_spans(table)])


def filler_block(num_rows: int) -> pa.Table:
    """Return a block of empty rows. It only advances Ray's row counts; the rank discards it."""
    return pack_spans([PackedSpan(SpanHeader(request=None, num_rows=num_rows), {}, {})])


def _read_span(context: BlockContext, request: SpanRequest, sleep: Callable[[float], None]) -> PackedSpan:
    started, sent = time.perf_counter(), num_requests()
    try:
        dataset, row, _ = context.find_episode(request)
        storage, reader = dataset.meta.storage, context.readers[request.dataset]
        span = retry_transient(
            lambda: storage.read_again(
                dataset.meta.data_file(row), lambda: _read_reach(context, request), lambda: reader.forget(row)
            ),
            sleep,
        )
        read_s, requests = time.perf_counter() - started, num_requests() - sent
        header = replace(span.header, read_s=read_s, num_requests=requests, finished_at=time.time())
        return replace(span, header=header)
    except Exception as error:
        # Catch any class: libraries raise many kinds of errors for damaged bytes.
        if not is_data_fault(error):
            raise
        return _failed(context, request, error)


def _read_reach(context: BlockContext, request: SpanRequest) -> PackedSpan:
    """Return the values of all rows that windows of the whole span show.

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
    try:
        columns = _column_arrays(context, request, table, first)
    except DatasetError as error:
        error.add_note(f"in {dataset.meta.storage.locate(dataset.meta.data_file(row))!r}")
        raise
    return PackedSpan(SpanHeader(request=request, num_rows=len(table), first=first), columns, {})


def _column_arrays(context: BlockContext, request: SpanRequest, table: pa.Table, first: int) -> dict[str, pa.Array]:
    dataset, member = context.datasets[request.dataset], context.member_of(request)
    stored, trained_on = context.stored[request.dataset], context.trained_on[request.dataset]
    place = f"episode {request.episode} of {dataset.meta.root!r}"
    columns: dict[str, pa.Array] = {}
    for name, own in member.rows.items():
        if stored[own].kind != "vector":
            columns[name] = as_bytes(only_chunk(table.column(own)))
            continue
        values = np.asarray(column_values(table, stored[own], place))
        if context.bad_data.check_finite and own in trained_on:
            _check_finite(values, own, first, place)
        if own == "task_index":
            _check_tasks(dataset, values, place)
        if context.schema is not None:
            values = _widened(values, context.schema.features[name], f"feature {own!r} of {place}", first)
        columns[name] = as_array(values)
    for name, own in member.cameras.items():
        if context.stores_images(request.dataset, own):
            columns[name] = _image_bytes(only_chunk(table.column(own)))
    return columns


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


def _window_span(context: BlockContext, span: PackedSpan, request: SpanRequest) -> PackedSpan:
    dataset, _, length = context.find_episode(request)
    schema, member = context.batch_schema, context.member_of(request)
    first, anchors, started = span.header.first, request.anchors, time.perf_counter()
    columns, images = {}, {}
    for name, own in member.rows.items():
        rows, feature = span.columns[name], schema.features[name]
        offsets = dataset.window.offsets.get(own)
        slots, padding = window_rows(anchors, length, offsets or (0,))
        wanted = slots - first if offsets else anchors - first
        if feature.kind == "vector":
            values = _numbers(schema, span, name)[wanted]
            if dataset.actions is not None and own == dataset.actions.action:
                values = _represented(context, span, request, values)
            columns[name] = as_array(values)
        else:
            columns[name] = take_windows(rows, wanted)
        if offsets:
            columns[f"{name}_is_pad"] = as_array(padding)
    for name, own in member.cameras.items():
        if context.stores_images(request.dataset, own):
            frames = shown_frames(context, request, own)
            images[name] = (frames, span.columns[name].take(pa.array(frames - first)).to_pylist())
    read_s = span.header.read_s + time.perf_counter() - started
    return PackedSpan(replace(span.header, num_rows=len(anchors), read_s=read_s), columns, images)


def _numbers(schema: Schema, span: PackedSpan, name: str) -> NDArray[Any]:
    feature = schema.features[name]
    return as_numpy(span.columns[name], () if feature.shape == (1,) else feature.shape)


def _represented(context: BlockContext, span: PackedSpan, request: SpanRequest, actions: NDArray[Any]) -> NDArray[Any]:
    """Return the action windows relative to the state of each anchor. Numbers that pad the width stay 0."""
    dataset, schema = context.datasets[request.dataset], context.batch_schema
    assert dataset.actions is not None
    name = dataset.actions.spec.to
    states = _numbers(schema, span, name)[request.anchors - span.header.first]
    return dataset.actions.encode(actions, states, has_window=dataset.actions.spec.feature in schema.windows)


def _check_tasks(dataset: Dataset, task_index: Any, place: str) -> None:
    """Raise if a row names a task that the dataset does not have."""
    tasks = dataset.meta.tasks
    try:
        for index in np.unique(task_index).tolist() if len(tasks) else ():
            tasks.text(index)
    except DatasetError as error:
        error.add_note(f"in {place}")
        raise


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


def _guarded(
    stage: Callable[[BlockContext, PackedSpan, SpanRequest], PackedSpan], context: BlockContext, span: PackedSpan
) -> PackedSpan:
    """Return the span after a stage; bad data becomes the span's error."""
    request = span.header.request
    if request is None or span.header.error[0]:
        return span
    try:
        done = stage(context, span, request)
        return replace(done, header=replace(done.header, finished_at=time.time()))
    except Exception as error:
        if not is_data_fault(error):
            raise
        return _failed(context, request, error)


def _packed(context: BlockContext, spans: Sequence[PackedSpan]) -> pa.Table:
    """Return the block of these spans; if they do not fit into one table, a block with their errors."""
    try:
        return pack_spans(spans)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        # A span keeps an error it already has: unreachable storage must not turn into bad data.
        sound = {i: span.header.request for i, span in enumerate(spans) if not span.header.error[0]}
        requests = {i: request for i, request in sound.items() if request is not None}
        places = [f"episode {one.episode} of {context.datasets[one.dataset].meta.root!r}" for one in requests.values()]
        why = DatasetError(
            f"{', '.join(places)} were read together and do not go into one block: {one_line(error)}. Rewrite the "
            f"files so that the column is of one type, or choose others by features=[...]."
        )
        return pack_spans(
            [_failed(context, requests[i], why) if i in requests else span for i, span in enumerate(spans)]
        )


def _failed(context: BlockContext, request: SpanRequest, error: Exception) -> PackedSpan:
    kind, text = type(error).__name__, str(error)
    if not isinstance(error, RaypipeError):
        dataset, row, _ = context.find_episode(request)
        file = dataset.meta.storage.locate(dataset.meta.data_file(row))
        text = f"cannot read episode {request.episode} of {dataset.meta.root!r} in {file!r}: {kind}: {one_line(error)}"
        kind = DatasetError.__name__
    if is_transient(error):
        # Unreachable storage is not bad data, so the span must not be left out.
        kind = DownloadError.__name__
    message = "; ".join([text, *getattr(error, "__notes__", ())])
    return PackedSpan(SpanHeader(request=request, num_rows=len(request.anchors), error=(kind, message)), {}, {})
