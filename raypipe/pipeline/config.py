"""Compose `PipelineConfig`, the specs of all stages, from the specs or plain dicts that `PipelineParts` lists.

Defaults follow from the dataset without Ray: how large a frame is, and which order fits the memory budget.
"""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, TypedDict

from raypipe.dataset import Dataset, Schema, index_dataset, knowing_rows, schema_of, settle_selection
from raypipe.decode import ORIGINAL_SIZE, DecodeSpec, KeepSpec, make_keep
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed import BadDataSpec, BlockContext, FeedSpec, OnBadEpisode
from raypipe.format import Feature, keyframe_interval
from raypipe.loader import check_names
from raypipe.mixture import Mixture, open_dataset
from raypipe.plan import (
    DEFAULT_LIVE_BYTES,
    EQUAL,
    SINGLE_DATASET,
    WHOLE_EPISODE,
    BatchSpec,
    CameraCost,
    EpisodeIndex,
    LiveBudget,
    MemberCost,
    OrderSpec,
    SelectionSpec,
    resolve_live,
)
from raypipe.storage import CacheSpec, retry_transient
from raypipe.text import counted, make_mapping, make_spec, parse_bytes

_ROW_BLOCK_BYTES = 8 << 20
"""Size up to which spans share a block: a block costs Ray the same for 10 and for 3,000 rows."""

_USUAL_BATCH: Final = 64
"""Frames per rank that we assume of a global batch, because the number of ranks is not known yet."""

_LISTING_THREADS: Final = 32
"""The same number of threads opens the remote members of a mixture."""

_DERIVED: Final = ("live_spans", "span_frames", "clip_frames")
"""The fields of an order that the budget decides unless they are given."""

_NAMED: Final = ("dataset", "batch_size", "seed", "delta_timestamps", "features", "actions")
"""The arguments of `Pipeline` that are no parts; named where another name is mistyped."""

_BAD_DATA: Final = frozenset(one.name for one in fields(BadDataSpec))


class PipelineParts(TypedDict, total=False):
    """The keyword arguments of `Pipeline` besides dataset, batch size, seed, windows, features and actions.

    A part that has a spec takes the spec or a dict of its fields.
    """

    selection: SelectionSpec | Mapping[str, Any]
    """Which episodes and frames."""

    weights: Any
    """How often each frame comes: the selection's weights, or a function of the episode table; see
    `settle_selection`."""

    order: OrderSpec | Mapping[str, Any]
    """Shuffling, live spans and clips, the end of an epoch."""

    decode: DecodeSpec | Mapping[str, Any]
    """Where to decode frames, in how many threads, to what size."""

    feed: FeedSpec | Mapping[str, Any]
    """How rows travel through Ray."""

    live_bytes: int | float | str
    """Memory per rank for decoded frames, as a number or ``"2GB"``. It decides the clip length, live spans and span
    length that ``order`` does not set."""

    cache: CacheSpec | Mapping[str, Any] | Literal["off"]
    """Where to keep files of remote storage."""

    keep_frames: bool | KeepSpec | Mapping[str, Any]
    """True or a spec decodes each frame once and keeps it on the node's disk for later epochs."""

    on_bad_episode: OnBadEpisode
    """See `BadDataSpec` for this and the next two."""

    max_bad_episodes: int | float
    check_finite: bool

    allow_mixture_change: bool
    """Whether a run may resume, between epochs, from a state of another mixture."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Everything that decides what a pipeline yields and how. It does not depend on the cluster."""

    dataset: Dataset | Mixture
    batch: BatchSpec
    order: OrderSpec
    selection: SelectionSpec
    decode: DecodeSpec
    bad_data: BadDataSpec
    feed: FeedSpec
    budget: LiveBudget
    """Memory per rank for decoded frames, and the order fields that raypipe derived from it."""

    derived: frozenset[str] = frozenset()
    """Fields of `order` that the budget decided."""

    allow_mixture_change: bool = False
    cache: CacheSpec | None = field(default_factory=CacheSpec)
    """None reads from remote storage every time."""

    keep: KeepSpec | None = None
    """None decodes frames in every epoch."""

    @property
    def mixture(self) -> Mixture | None:
        """The mixture; None for a single dataset."""
        return self.dataset if isinstance(self.dataset, Mixture) else None

    def index(self) -> EpisodeIndex:
        """Return the frames of an epoch."""
        return index_frames(self.dataset, self.selection)

    def block_context(self) -> BlockContext:
        """Return what tasks and ranks need to make and open blocks."""
        mixed: tuple[Any, ...] = ()
        if isinstance(self.dataset, Mixture):
            mixed = self.dataset.schema, self.dataset.robot_types, self.dataset.names
        keep: dict[str, Any] = {"keep": self.keep, "decoded_bytes": self.budget.decoded_bytes}
        return BlockContext(
            share_cache(datasets_of(self.dataset), self.cache), self.decode, self.bad_data, *mixed, **keep
        )

    def members(self) -> tuple[MemberCost, ...]:
        """Return what decides the memory and the cost of every dataset."""
        return measure_members(self.dataset, self.decode)

    def spans_per_block(self) -> int:
        """Return how many spans share a block under ``spans_per_block="by_size"``.

        Ray takes 20 to 40 ms of CPU for a block, however small. So a block packs spans up to 8 MB, but at most an
        eighth of the live spans, because a rank holds up to one block more than it needs. With stored images a block
        is one span.
        """
        datasets, schema, order = datasets_of(self.dataset), schema_for(self.dataset), self.order
        pairs = zip(datasets, schema.members, strict=True)
        if any(one.features[own].kind == "image" for one, member in pairs for own in member.cameras.values()):
            return 1
        num_episodes = sum(len(one.meta.episodes) for one in datasets)
        mean = max(1, sum(one.meta.num_frames for one in datasets) // max(1, num_episodes))
        if order.span_frames != WHOLE_EPISODE:
            mean = min(mean, order.span_frames)
        most = max(1, order.live_spans // 8) if schema.cameras else 64
        return int(min(most, max(1, _ROW_BLOCK_BYTES // (row_bytes(self.dataset) * mean))))


def as_dataset(given: Any) -> Dataset | Mixture:
    """Return a dataset or mixture unchanged; open a path, URI or Hub id."""
    if isinstance(given, Dataset | Mixture):
        return given
    if isinstance(given, str | os.PathLike):
        return open_dataset(os.fspath(given))
    raise ConfigError(
        f"a pipeline is of what rp.open_dataset or rp.Mixture gives, or of a path, URI or Hub id; got a "
        f"{type(given).__name__}"
    )


def compose_config(dataset: Dataset | Mixture, parts: PipelineParts, *, batch_size: Any, seed: int) -> PipelineConfig:
    """Return the config of a pipeline; derive clips, live spans and span length from `live_bytes` unless given."""
    check_names(parts, [*_NAMED, *PipelineParts.__annotations__], "Pipeline has no part")
    # A mapping has the fields of the spec; anything else is a size, which the spec checks.
    is_spec = isinstance(batch_size, BatchSpec | Mapping)
    batch = make_spec(BatchSpec, batch_size if is_spec else {"size": batch_size}, "batch_size")
    selection = _selection(dataset, parts)
    decode = _decode_spec(dataset, parts.get("decode", {}))
    if isinstance(dataset, Mixture) and decode.resize != dataset.spec.resize:
        dataset = dataset.resized(decode.resize)
    decode.check_cameras(schema_for(dataset).cameras, "the mixture" if isinstance(dataset, Mixture) else "the dataset")
    _check_windows(schema_for(dataset))
    index = index_frames(dataset, selection)
    _warn_of_large_batch(batch, index)
    order, cache = parts.get("order", {}), parts.get("cache", {})
    given = asdict(order) if isinstance(order, OrderSpec) else {"seed": seed, **make_mapping(order, "order")}
    live_bytes = parse_bytes(parts.get("live_bytes", DEFAULT_LIVE_BYTES), "live_bytes")
    order, budget = settle_order(dataset, index, batch, decode, given, live_bytes=live_bytes)
    if budget.is_long_gop and "clip_frames" not in given and order.shuffle:
        warn_of_long_gop(budget, measure_members(dataset, decode))
    return PipelineConfig(
        dataset=dataset,
        batch=batch,
        order=order,
        selection=selection,
        decode=decode,
        bad_data=BadDataSpec(**{name: value for name, value in parts.items() if name in _BAD_DATA}),  # type: ignore[arg-type]
        feed=make_spec(FeedSpec, parts.get("feed", {}), "feed"),
        budget=budget,
        derived=frozenset(_DERIVED) - frozenset(given),
        allow_mixture_change=bool(parts.get("allow_mixture_change", False)),
        cache=None if cache == "off" else make_spec(CacheSpec, cache, "cache"),
        keep=make_keep(parts.get("keep_frames", False)),
    )


def _selection(dataset: Dataset | Mixture, parts: Mapping[str, Any]) -> SelectionSpec:
    if not isinstance(dataset, Mixture):
        return settle_selection(dataset.meta, parts.get("selection", {}), parts.get("weights", EQUAL))
    if "weights" in parts:
        raise ConfigError(
            "weights are of one dataset, and this is a mixture: give a member its own by its selection, as "
            "{'root': ..., 'selection': {'weights': 'quality'}}; how often members come is Mixture(..., weights=...)"
        )
    return make_spec(SelectionSpec, parts.get("selection", {}), "selection")


def _warn_of_large_batch(batch: BatchSpec, index: EpisodeIndex) -> None:
    if batch.size > index.num_frames:
        warnings.warn(
            f"batch_size={batch.size} is more than the {counted(index.num_frames, 'frame')} of an epoch: an epoch is "
            f"one shorter batch, and none with order={{'tail': 'drop'}}. Take a smaller batch_size, or more frames.",
            stacklevel=4,
        )


def warn_of_long_gop(budget: LiveBudget, members: Sequence[MemberCost]) -> None:
    """Warn what distant keyframes cost, and give both remedies with figures."""
    interval = max(camera.keyframe_interval for member in members for camera in member.cameras)
    warnings.warn(
        f"the videos have a keyframe every {interval} frames only: in live_bytes={budget.live_bytes:_} decoding "
        f"costs about {budget.cost:.1f} times as much as in file order, in clips of {budget.clip_frames} with "
        f"{counted(budget.live_spans, 'live span')}, which mixes fewer episodes. `raypipe reshard ROOT TARGET --gop "
        f"2` makes both as good as they get, once; live_bytes={budget.ample_bytes:_} does so in memory. "
        f"order={{'clip_frames': ...}} silences this.",
        stacklevel=4,
    )


def _check_windows(schema: Schema) -> None:
    """Raise for a window on a column that identifies the sample: a batch needs one value of it per sample."""
    wrong = [name for name in ("frame_index", "episode_index", "task_index") if name in schema.windows]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} cannot have a window in a pipeline: it says which sample a row is of")


def share_cache(datasets: Sequence[Dataset], cache: CacheSpec | None) -> tuple[Dataset, ...]:
    """Return the datasets, remote ones set to read rows and videos through the node's cache.

    Each remote dataset also gets the total bytes of the others, because they share the cache's room. With several
    remote datasets and a cache this lists the files of those whose size is not known yet.
    """
    remote = {one.meta.storage.uri: one.meta.storage for one in datasets if one.meta.storage.is_remote}
    sizes = dict.fromkeys(remote, 0)
    if cache is not None and len(remote) > 1:
        with ThreadPoolExecutor(_LISTING_THREADS, thread_name_prefix="raypipe-list") as pool:
            listed = pool.map(lambda storage: retry_transient(storage.list_bytes), remote.values())
            sizes = dict(zip(remote, listed, strict=True))
    total = sum(sizes.values())

    def through_cache(dataset: Dataset) -> Dataset:
        known = dataset.meta.storage
        if not known.is_remote:
            return dataset
        storage = known.cached(cache).beside(total - sizes[known.uri])
        if (known.cache, known.beside_bytes) == (storage.cache, storage.beside_bytes):
            return dataset
        return knowing_rows(replace(dataset, meta=replace(dataset.meta, storage=storage)), dataset.row_features)

    return tuple(map(through_cache, datasets))


def _decode_spec(dataset: Dataset | Mixture, decode: Any) -> DecodeSpec:
    """Return the decode spec; the dataset supplies the cameras' dtype or size if `decode` does not set it."""
    if isinstance(dataset, Mixture):
        spec, size = make_spec(DecodeSpec, decode, "decode"), dataset.spec.resize
        if ORIGINAL_SIZE not in (spec.resize, size) and (spec.resize, spec.fit) != (size, dataset.spec.fit):
            raise ConfigError(
                f"the mixture has resize={size} with fit={dataset.spec.fit!r}, and decode has resize={spec.resize} "
                f"with fit={spec.fit!r}: say one of them"
            )
        return replace(spec, resize=size, fit=dataset.spec.fit) if spec.resize == ORIGINAL_SIZE else spec
    if dataset.spec.timestamps == "strict":
        raise ConfigError(
            "timestamps='strict' checks one sample at a time, and a pipeline decodes spans; check the dataset with "
            "ds.timestamp_drift(episode), and open it with timestamps='position'"
        )
    if isinstance(decode, Mapping):
        decode = {"camera_dtype": dataset.spec.camera_dtype, **decode}
    return make_spec(DecodeSpec, decode, "decode")


def schema_for(dataset: Dataset | Mixture) -> Schema:
    """Return the schema of the batches."""
    return dataset.schema if isinstance(dataset, Mixture) else schema_of(dataset)


def datasets_of(dataset: Dataset | Mixture) -> tuple[Dataset, ...]:
    """Return the members of a mixture, or the single dataset."""
    return dataset.datasets if isinstance(dataset, Mixture) else (dataset,)


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
        for one, member in zip(datasets_of(dataset), schema.members, strict=True)
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
    decode = _decode_spec(dataset, {})
    if set(_DERIVED) <= set(given):
        return dataset, make_spec(OrderSpec, given, "order"), decode
    index, num_bytes = index_frames(dataset, selection), parse_bytes(live_bytes, "live_bytes")
    order, _ = settle_order(dataset, index, batch, decode, given, live_bytes=num_bytes)
    return dataset, order, decode


def settle_order(
    dataset: Dataset | Mixture,
    index: EpisodeIndex,
    batch: BatchSpec,
    decode: DecodeSpec,
    given: Mapping[str, Any],
    *,
    live_bytes: int,
) -> tuple[OrderSpec, LiveBudget]:
    """Return the order of a pipeline and what it costs; `live_bytes` decide the spans and clips that `given` lacks."""
    # `OrderSpec` rejects a wrong value by name; below it would only give a wrong size.
    order = make_spec(OrderSpec, given, "order")
    replace(order, shuffle=True).clip_sizes(len(index.dataset_names))
    known = {name: getattr(order, name) if name in given else None for name in _DERIVED}
    shares = order.lanes if isinstance(order.lanes, int) else 1
    size = batch.size if batch.scope == "rank" or shares > 1 else min(batch.size, _USUAL_BATCH)
    members = measure_members(dataset, decode)
    budget = resolve_live(index, members, batch=max(1, size // shares), live_bytes=live_bytes, **known)
    return replace(order, **{name: getattr(budget, name) for name in _DERIVED}), budget
