"""A span on its rank: arrays again, with what its dataset lacks filled in."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe import errors
from raypipe.block.context import BlockContext
from raypipe.errors import DatasetError
from raypipe.metrics import TaskTimes
from raypipe.packed import Frames, PackedSpan, SpanRequest, as_numpy, as_values, unpack_spans
from raypipe.schema import Schema


@dataclass(frozen=True, slots=True)
class CameraPart:
    """Decoded frames of a camera: ascending frame numbers, and their pixels ``(n, height, width, channels)``."""

    frames: Frames
    pixels: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlock:
    """A span as a rank receives it: arrays that are views on the block. Names are those of the schema."""

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
    num_requests: int
    """Sent to remote storage by the task that made the block, for this span."""
    task: TaskTimes
    """Of the task that made the block, which may hold other spans too."""

    def check(self) -> None:
        """Raise the error that the block carries, as the class that it had in the task."""
        kind, message = self.error
        if kind:
            raise getattr(errors, kind, DatasetError)(message)


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


def _open_span(context: BlockContext, span: PackedSpan, request: SpanRequest, task: TaskTimes) -> SpanBlock:
    is_sound = not span.header.error[0]
    pixels: dict[str, tuple[CameraPart, ...]] = {}
    stored: dict[str, tuple[Frames, list[Any]]] = {}
    for name, own in context.member_of(request).cameras.items() if is_sound else ():
        array = span.columns.get(name)
        if array is not None and pa.types.is_fixed_size_list(array.type):
            values = as_numpy(array, context.blanks[name].shape[1:])
            pixels[name] = (CameraPart(request.anchors, values), CameraPart(*span.margins[name]))
        elif context.stores_images(request.dataset, own):
            assert array is not None, f"images of {name!r} are read with the rows"
            extra, images = span.margins[name]
            stored[name] = (np.concatenate([request.anchors, extra]), [*array.to_pylist(), *images])
    return SpanBlock(
        request=request,
        num_rows=span.header.num_rows,
        error=span.header.error,
        columns=_open_rows(context, span, request) if is_sound else {},
        pixels=pixels,
        stored_images=stored,
        decode_s=span.header.decode_s,
        num_decoded=span.header.num_decoded,
        num_requests=span.header.num_requests,
        task=task,
    )


def _open_rows(context: BlockContext, span: PackedSpan, request: SpanRequest) -> dict[str, Any]:
    schema, given, num_rows = context.batch_schema, context.member_of(request).rows, span.header.num_rows
    columns: dict[str, Any] = {}
    for name, feature in schema.rows.items():
        if name not in given:
            columns[name] = _fill(schema, name, num_rows)
        elif feature.kind == "vector":
            columns[name] = as_numpy(span.columns[name], schema.value_shape(name))
        else:
            columns[name] = as_values(span.columns[name])
        if name in schema.windows:
            shape = (schema.windows[name],)
            is_given, padding = name in given, f"{name}_is_pad"
            columns[padding] = as_numpy(span.columns[padding], shape) if is_given else np.ones((num_rows, *shape), bool)
    return columns


def _fill(schema: Schema, name: str, num_rows: int) -> Any:
    """Return what stands for a feature that a dataset lacks: zeros, or empty texts and lists."""
    feature = schema.features[name]
    if feature.kind == "vector":
        return np.zeros((num_rows, *schema.value_shape(name)), dtype=feature.dtype)
    window = range(schema.windows.get(name, 0))
    # A list for every sample: a transform may write to it.
    empty: Callable[[], Any] = str if feature.kind == "string" else list
    return [[empty() for _ in window] if name in schema.windows else empty() for _ in range(num_rows)]
