"""How large a frame is, and what a memory budget makes of the order: the defaults of a pipeline, without Ray."""

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
"""What a rank takes of a global batch whose ranks are not known yet."""


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


def measure_members(dataset: Dataset | Mixture, decode: DecodeSpec) -> tuple[MemberCost, ...]:
    """Return what decides the memory and the cost of every dataset; looks at one video of each camera."""
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
    """Return the mean bytes of the images that a row stores, by the size of the first data file."""
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
    """Return the frames of an epoch; of a mixture each member has its own selection."""
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
    """Return how a pipeline decodes where nothing is said: a mixture says the size."""
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
    """Return what is at `root`, and how a pipeline of it orders and decodes: what `given` lacks is chosen as there.

    A pipeline with windows, frames of another size, another `selection` or other `live_bytes` may choose other spans:
    what ``print(pipe)`` shows holds.
    """
    with warnings.catch_warnings():
        # Which cameras and datasets are left out is what `raypipe info` tells.
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
    """Return live spans, span length and clip length as a pipeline takes them where `order` does not say them."""
    known = {name: order.get(name) for name in ("live_spans", "span_frames", "clip_frames")}
    # A wrong value is an error of the order, which names it; here it would only be a wrong size.
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
