"""How large a frame is, and what a memory budget makes of the order: the defaults of a pipeline, without Ray."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from raypipe.dataset import Dataset
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import ConfigError
from raypipe.mixture import Mixture, open_dataset
from raypipe.plan import (
    DEFAULT_LIVE_BYTES,
    SINGLE_DATASET,
    BatchSpec,
    EpisodeIndex,
    FrameSizes,
    LiveBudget,
    OrderSpec,
    SelectionSpec,
    index_episodes,
    resolve_live,
)
from raypipe.schema import Schema, schema_of
from raypipe.specs import make_spec

MIN_LIVE_SPANS: Final = 128
"""Live spans of a lane where nothing is said: twice a batch of 64, and never fewer than twice the batch."""


def schema_for(dataset: Dataset | Mixture) -> Schema:
    """Return what batches are made of."""
    return dataset.schema if isinstance(dataset, Mixture) else schema_of(dataset)


def row_bytes(dataset: Dataset | Mixture) -> int:
    """Return the bytes of one sample without its cameras: windows are kept gathered."""
    schema = schema_for(dataset)
    return sum(
        feature.frame_bytes * schema.windows.get(name, 1)
        for name, feature in schema.rows.items()
        if feature.kind == "vector"
    )


def pixel_bytes(dataset: Dataset | Mixture, decode: DecodeSpec) -> int:
    """Return the bytes of one decoded frame of every camera."""
    schema, total = schema_for(dataset), 0
    for name in schema.cameras:
        height, width, channels = decode.frame_shape(schema.features[name])
        total += height * width * channels * (4 if schema.features[name].is_depth else 1)
    return total


def measure_frame(dataset: Dataset | Mixture, decode: DecodeSpec) -> FrameSizes:
    """Return the bytes of one frame as live spans keep it: without pixels where they are decoded as a batch leaves."""
    is_on_exit = decode.when == "exit"
    return FrameSizes(
        row_bytes=row_bytes(dataset),
        pixel_bytes=0 if is_on_exit else pixel_bytes(dataset, decode),
        is_decode_on_exit=is_on_exit and bool(schema_for(dataset).cameras),
    )


def index_frames(dataset: Dataset | Mixture, selection: SelectionSpec | None = None) -> EpisodeIndex:
    """Return the frames of an epoch; of a mixture each member has its own selection."""
    selection = selection or SelectionSpec()
    if isinstance(dataset, Mixture):
        if selection != SelectionSpec():
            raise ConfigError(
                f"selection={selection} is of one dataset, and this is a mixture of {len(dataset.members)}: give each "
                f"member its own selection"
            )
        return dataset.index()
    episodes = dataset.meta.episodes
    return index_episodes(
        SINGLE_DATASET,
        episodes.episode_index,
        episodes.length,
        fingerprint=dataset.meta.order_fingerprint,
        selection=selection,
    )


def decode_spec_of(dataset: Dataset | Mixture) -> DecodeSpec:
    """Return how a pipeline decodes where nothing is said: a mixture says the size."""
    return DecodeSpec(resize=dataset.spec.resize) if isinstance(dataset, Mixture) else DecodeSpec()


def open_with_order(
    root: str, batch: BatchSpec, given: Mapping[str, Any], *, live_bytes: int | None = None
) -> tuple[Dataset | Mixture, OrderSpec, DecodeSpec]:
    """Return what is at `root`, and how a pipeline of it orders and decodes: what `given` lacks is chosen as there.

    A pipeline with windows, frames of another size, a selection or other `live_bytes` may choose other spans: what
    ``print(pipe)`` shows holds.
    """
    with warnings.catch_warnings():
        # Which cameras and datasets are left out is what `raypipe info` tells.
        warnings.simplefilter("ignore", UserWarning)
        dataset = open_dataset(root)
    decode = decode_spec_of(dataset)
    if not {"live_spans", "span_frames"} <= set(given):
        budget = choose_live(
            dataset,
            index_frames(dataset),
            batch,
            decode,
            live_spans=given.get("live_spans"),
            live_bytes=DEFAULT_LIVE_BYTES if live_bytes is None else live_bytes,
        )
        decode = fit_decode(decode, budget, given)
        given = {"live_spans": budget.live_spans, "span_frames": budget.span_frames, **given}
    return dataset, make_spec(OrderSpec, given, "order"), decode


def choose_live(
    dataset: Dataset | Mixture,
    index: EpisodeIndex,
    batch: BatchSpec,
    decode: DecodeSpec,
    *,
    live_spans: int | None = None,
    live_bytes: int = DEFAULT_LIVE_BYTES,
) -> LiveBudget:
    """Return live spans and span length as a pipeline takes them where `order` does not say them."""
    if live_spans is None:
        live_spans = max(MIN_LIVE_SPANS, 2 * batch.size) if batch.scope == "rank" else MIN_LIVE_SPANS
    sizes = measure_frame(dataset, decode)
    return resolve_live(
        index,
        row_bytes=sizes.row_bytes,
        pixel_bytes=sizes.pixel_bytes,
        live_spans=live_spans,
        live_bytes=live_bytes,
    )


def fit_decode(decode: DecodeSpec, budget: LiveBudget, order: Mapping[str, Any]) -> DecodeSpec:
    """Return how a pipeline decodes on a budget: as a batch leaves where pixels do not fit, if `order` lets it choose.

    Args:
        order: the fields that were given; with a span length among them the budget decides nothing.
    """
    is_free = "span_frames" not in order and decode.where != "cluster" and decode.when == "block"
    return replace(decode, when="exit", where="rank") if budget.is_decode_on_exit and is_free else decode
