"""Open blocks on a rank: turn spans back into arrays, and fill in the features that a dataset lacks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe import errors
from raypipe.dataset import Schema
from raypipe.errors import DatasetError
from raypipe.feed.block_context import BlockContext
from raypipe.feed.packing import PackedSpan, SpanRequest, as_numpy, as_values, unpack_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBlock:
    """A span as a rank receives it: arrays that are views on the block, under the names of the schema."""

    request: SpanRequest
    num_rows: int
    error: tuple[str, str]
    """Class and message of the error in the data; empty strings if there is none."""
    columns: dict[str, Any]
    """Row features and their padding: arrays ``(rows, ...)``, or lists for text."""
    stored_images: dict[str, dict[int, Any]]
    """Stored images by camera and frame."""
    num_requests: int
    """Requests to remote storage that the task sent for this span."""
    finished_at: float
    """When the task finished all spans of the block, in seconds since 1970 by the clock of its node."""

    def check(self) -> None:
        """Raise the error that the block carries, in its original class."""
        kind, message = self.error
        if kind:
            raise getattr(errors, kind, DatasetError)(message)


def open_block(context: BlockContext, table: pa.Table) -> Iterator[SpanBlock]:
    """Yield the spans of a block as arrays; a filler yields nothing."""
    spans = list(unpack_spans(table))
    finished_at = max(span.header.finished_at for span in spans)
    for span in spans:
        if span.header.request is not None:
            yield _open_span(context, span, span.header.request, finished_at)


def _open_span(context: BlockContext, span: PackedSpan, request: SpanRequest, finished_at: float) -> SpanBlock:
    is_sound = not span.header.error[0]
    images = {name: dict(zip(frames.tolist(), stored, strict=True)) for name, (frames, stored) in span.images.items()}
    return SpanBlock(
        request=request,
        num_rows=span.header.num_rows,
        error=span.header.error,
        columns=_open_rows(context, span, request) if is_sound else {},
        stored_images=images,
        num_requests=span.header.num_requests,
        finished_at=finished_at,
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
    """Return the values of a feature that a dataset lacks: zeros, or empty texts and lists."""
    feature = schema.features[name]
    if feature.kind == "vector":
        return np.zeros((num_rows, *schema.value_shape(name)), dtype=feature.dtype)
    window = range(schema.windows.get(name, 0))
    # Make a list for every sample, because a transform may write to it.
    empty: Callable[[], Any] = str if feature.kind == "string" else list
    return [[empty() for _ in window] if name in schema.windows else empty() for _ in range(num_rows)]
