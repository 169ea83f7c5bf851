"""Compute the defaults of a pipeline without Ray: how large a frame is, and which order fits the memory budget."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from raypipe.dataset import Dataset, Schema, index_dataset, schema_of
from raypipe.decode import DecodeSpec
from raypipe.errors import ConfigError, RaypipeError
from raypipe.format import Feature, keyframe_interval
from raypipe.mixture import Mixture, open_dataset
from raypipe.plan import (
    DEFAULT_LIVE_BYTES,
    SINGLE_DATASET,
    BatchSpec,
    CameraCost,
    EpisodeIndex,
    LiveBudget,
    MemberCost,
    OrderSpec,
    SelectionSpec,
    resolve_live,
)
from raypipe.text import make_spec, parse_bytes

_USUAL_BATCH: Final = 64
"""Frames per rank that we assume of a global batch, because the number of ranks is not known yet."""


def schema_for(dataset: Dataset | Mixture) -> Schema:
    """Return the schema of the batches."""
    return dataset.schema if isinstance(dataset, Mixture) else schema_of(dataset)


def row_bytes(dataset: Dataset | Mixture) -> int:
    """Return the bytes of one sample without its cameras; each window counts in full."""
    schema = schema_for(dataset)
    return sum(
        feature.frame_bytes * schema.windows.get(name, 1)
        for name, feature in schema.rows.items()
        if feature.kind == "vector"
    )


def measure_members(dataset: Dataset | Mixture, decode: DecodeSpec) -> tuple[MemberCost, ...]:
    """Return the figures that decide memory and cost, per dataset. Reads one video of each camera."""
    schema = schema_for(dataset)
    datasets = dataset.datasets if isinstance(dataset, Mixture) else (dataset,)
    rows = row_bytes(dataset)
    return tuple(
        MemberCost(
            row_bytes=rows + _stored_bytes(one, member.cameras.values()),
            cameras=tuple(
                CameraCost(
                    name=name,
                    keyframe_interval=keyframe_interval(one.meta, own),
                    frame_bytes=decode.frame_bytes(schema.features[name]),
                    offsets=one.window.offsets.get(own, (0,)),
                    num_pixels=_num_pixels(one.features[own]),
                )
                for name, own in member.cameras.items()
            ),
        )
        for one, member in zip(datasets, schema.members, strict=True)
    )


def _num_pixels(feature: Feature) -> int:
    return 0 if feature.kind == "image" else feature.height * feature.width


def _stored_bytes(dataset: Dataset, cameras: Iterable[str]) -> int:
    """Return the mean bytes of the images that a row stores, estimated from the size of the first data file."""
    images = [dataset.features[name] for name in cameras if dataset.features[name].kind == "image"]
    if not images:
        return 0
    meta, episodes = dataset.meta, dataset.meta.episodes
    with suppress(RaypipeError, OSError):
        same = (episodes.chunk_index == episodes.chunk_index[0]) & (episodes.file_index == episodes.file_index[0])
        num_frames = int(episodes.length[same].sum()) if meta.is_packed else int(episodes.length[0])
        return int(meta.storage.size_bytes(meta.data_file(0)) // max(1, num_frames))
    return sum(image.frame_bytes for image in images)


def index_frames(dataset: Dataset | Mixture, selection: SelectionSpec | None = None) -> EpisodeIndex:
    """Return the frames of an epoch. In a mixture each member has its own selection."""
    selection = selection or SelectionSpec()
    if isinstance(dataset, Mixture):
        if selection != SelectionSpec():
            raise ConfigError(
                f"selection={selection} is of one dataset, and this is a mixture of {len(dataset.members)}: give each "
                f"member its own selection"
            )
        return dataset.index()
    return index_dataset(SINGLE_DATASET, dataset.meta, selection)


def decode_spec_of(dataset: Dataset | Mixture) -> DecodeSpec:
    """Return how a pipeline decodes by default; a mixture sets the size."""
    if isinstance(dataset, Mixture):
        return DecodeSpec(resize=dataset.spec.resize, fit=dataset.spec.fit)
    return DecodeSpec()


def open_with_order(
    root: str,
    batch: BatchSpec,
    given: Mapping[str, Any],
    *,
    live_bytes: int | str = DEFAULT_LIVE_BYTES,
    selection: SelectionSpec | None = None,
) -> tuple[Dataset | Mixture, OrderSpec, DecodeSpec]:
    """Return the dataset at `root` with the order and decode spec that a pipeline of it would use.

    Order fields that `given` lacks get a pipeline's defaults. A pipeline with windows, another frame size, another
    `selection` or other `live_bytes` may choose other spans: trust what ``print(pipe)`` shows.
    """
    with warnings.catch_warnings():
        # `raypipe info` reports which cameras and datasets are left out.
        warnings.simplefilter("ignore", UserWarning)
        dataset = open_dataset(root)
    decode = decode_spec_of(dataset)
    if not {"live_spans", "span_frames", "clip_frames"} <= set(given):
        budget = choose_live(
            dataset,
            index_frames(dataset, selection),
            batch,
            decode,
            given,
            live_bytes=parse_bytes(live_bytes, "live_bytes"),
        )
        given = {**chosen_order(budget), **given}
    return dataset, make_spec(OrderSpec, given, "order"), decode


def choose_live(
    dataset: Dataset | Mixture,
    index: EpisodeIndex,
    batch: BatchSpec,
    decode: DecodeSpec,
    order: Mapping[str, Any],
    *,
    live_bytes: int = DEFAULT_LIVE_BYTES,
) -> LiveBudget:
    """Return the live spans, span length and clip length that a pipeline uses; those in `order` stay."""
    known = {name: order.get(name) for name in ("live_spans", "span_frames", "clip_frames")}
    # Let `OrderSpec` reject a wrong value by name; below it would only give a wrong size.
    given = {name: value for name, value in known.items() if value is not None}
    checked = make_spec(OrderSpec, {"seed": 0, **given}, "order")
    checked.clip_sizes(len(index.dataset_names))
    known |= {name: getattr(checked, name) for name in given}
    lanes = order.get("lanes")
    shares = lanes if isinstance(lanes, int) else 1
    size = batch.size if batch.scope == "rank" or shares > 1 else min(batch.size, _USUAL_BATCH)
    return resolve_live(
        index, measure_members(dataset, decode), batch=max(1, size // shares), live_bytes=live_bytes, **known
    )


def chosen_order(budget: LiveBudget) -> dict[str, Any]:
    """Return the fields of an order that a budget decides."""
    return {name: getattr(budget, name) for name in ("live_spans", "span_frames", "clip_frames")}
