"""`PipelineConfig`: the specs of all stages, composed; from specs or from plain dicts."""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from raypipe.block import BlockContext
from raypipe.dataset import Dataset, knowing_rows
from raypipe.decode.spec import ORIGINAL_SIZE, DecodeSpec
from raypipe.errors import ConfigError
from raypipe.feeder import FeedSpec
from raypipe.mixture import Mixture
from raypipe.plan import WHOLE_EPISODE, BatchSpec, EpisodeIndex, OrderSpec, SelectionSpec
from raypipe.schema import Schema
from raypipe.sizes import choose_live, fit_decode, index_frames, pixel_bytes, row_bytes, schema_for
from raypipe.skips import BadDataSpec
from raypipe.specs import make_spec
from raypipe.storage import CacheSpec, Storage, retry_transient

_ROW_BLOCK_BYTES = 8 << 20
"""Ray's cost of a block is the same for 10 and for 3,000 rows."""

_PIXEL_BLOCK_BYTES = 64 << 20
"""Half of what Ray itself aims at: a rank fetches some blocks ahead."""

_LISTING_THREADS: Final = 32
"""As many as open the remote members of a mixture."""

NO_CACHE: Final = "off"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Everything that decides what a pipeline yields and how; nothing in it depends on the cluster."""

    dataset: Dataset | Mixture
    batch: BatchSpec
    order: OrderSpec
    selection: SelectionSpec
    decode: DecodeSpec
    bad_data: BadDataSpec
    feed: FeedSpec
    live_bytes: int
    """Memory of a rank for the spans at hand, or 0 where live spans and span length were given instead."""

    allow_mixture_change: bool = False
    """Whether a run may go on, between epochs, from a state of another mixture."""

    cache: CacheSpec | None = field(default_factory=CacheSpec)
    """Keeps files of remote datasets on the nodes that read them; None reads them from afar whenever they are used."""

    @property
    def mixture(self) -> Mixture | None:
        """The mixture, where it is no dataset that stands alone."""
        return self.dataset if isinstance(self.dataset, Mixture) else None

    def index(self) -> EpisodeIndex:
        """Return the frames of an epoch."""
        return index_frames(self.dataset, self.selection)

    def block_context(self) -> BlockContext:
        """Return what tasks and ranks need to make and open blocks."""
        if isinstance(self.dataset, Mixture):
            mixture = self.dataset
            datasets = share_cache(mixture.datasets, self.cache)
            return BlockContext(
                datasets, self.decode, self.bad_data, mixture.schema, mixture.robot_types, mixture.names
            )
        return BlockContext(share_cache((self.dataset,), self.cache), self.decode, self.bad_data)


def compose_config(
    dataset: Dataset | Mixture, parts: Mapping[str, Any], *, batch_size: Any, seed: int, live_bytes: int
) -> PipelineConfig:
    """Return the config of a pipeline; live spans and span length that are not given are resolved from `live_bytes`.

    Args:
        parts: ``selection``, ``order``, ``decode``, ``bad_data`` and ``feed``, each a spec or a dict of its fields.
        batch_size: frames per rank, or a `BatchSpec` or a dict of its fields.
    """
    batch = (
        BatchSpec(size=batch_size) if isinstance(batch_size, int) else make_spec(BatchSpec, batch_size, "batch_size")
    )
    selection = make_spec(SelectionSpec, parts["selection"], "selection")
    decode = _decode_spec(dataset, parts["decode"])
    if isinstance(dataset, Mixture) and decode.resize != dataset.spec.resize:
        dataset = dataset.resized(decode.resize)
    _check_windows(schema_for(dataset))
    index = index_frames(dataset, selection)
    order = parts["order"]
    given = {} if isinstance(order, OrderSpec) else dict(order)
    live_spans = order.live_spans if isinstance(order, OrderSpec) else given.get("live_spans")
    budget = choose_live(dataset, index, batch, decode, live_spans=live_spans, live_bytes=live_bytes)
    if not isinstance(order, OrderSpec):
        resolved = {"seed": seed, "live_spans": budget.live_spans, "span_frames": budget.span_frames}
        order = make_spec(OrderSpec, {**resolved, **given}, "order")
    fitted = fit_decode(decode, budget, given)
    if fitted != decode:
        warnings.warn(
            f"live_bytes={live_bytes:,} does not hold {budget.live_spans} live spans of decoded frames, however short: "
            f"decoding each batch as it leaves instead, which costs more CPU. Values do not change. Raise "
            f"live_bytes, lower live_spans, or say decode={{'when': 'exit'}} to silence this.",
            stacklevel=3,
        )
    return PipelineConfig(
        dataset=dataset,
        batch=batch,
        order=order,
        selection=selection,
        decode=fitted,
        bad_data=make_spec(BadDataSpec, parts["bad_data"], "bad_data"),
        feed=make_spec(FeedSpec, parts["feed"], "feed"),
        live_bytes=0 if "span_frames" in given or isinstance(parts["order"], OrderSpec) else live_bytes,
    )


def _check_windows(schema: Schema) -> None:
    """Raise for a window on a column that says which sample it is: a batch needs one number of it."""
    wrong = [name for name in ("frame_index", "episode_index", "task_index") if name in schema.windows]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} cannot have a window in a pipeline: it says which sample a row is of")


def share_cache(datasets: Sequence[Dataset], cache: CacheSpec | None) -> tuple[Dataset, ...]:
    """Return datasets whose rows and videos are read through this cache of the node; local ones as they are.

    Each knows how many bytes the others have, which take room of it too. Lists those that were opened without that.
    """
    remote = {one.meta.storage.uri: one.meta.storage for one in datasets if one.meta.storage.is_remote}
    sizes = dict.fromkeys(remote, 0)
    if cache is not None and len(remote) > 1:
        with ThreadPoolExecutor(_LISTING_THREADS, thread_name_prefix="raypipe-list") as pool:
            listed = pool.map(lambda storage: retry_transient(storage.list_bytes), remote.values())
            sizes = dict(zip(remote, listed, strict=True))
    total = sum(sizes.values())
    return tuple(
        _with_storage(dataset, storage.cached(cache).beside(total - sizes[storage.uri]))
        if (storage := dataset.meta.storage).is_remote
        else dataset
        for dataset in datasets
    )


def _with_storage(dataset: Dataset, storage: Storage) -> Dataset:
    known = dataset.meta.storage
    if (known.cache, known.beside_bytes) == (storage.cache, storage.beside_bytes):
        return dataset
    meta = replace(dataset.meta, storage=storage)
    return knowing_rows(replace(dataset, meta=meta), dataset.row_features)


def make_cache(value: Any) -> CacheSpec | None:
    """Return the cache that `value` says: a spec, a dict of its fields, or ``"off"`` for none."""
    return None if value == NO_CACHE else make_spec(CacheSpec, value, "cache")


def _decode_spec(dataset: Dataset | Mixture, decode: Any) -> DecodeSpec:
    """Return the decode spec; where it does not say the cameras' dtype or size, the dataset's holds."""
    if isinstance(dataset, Mixture):
        spec, size = make_spec(DecodeSpec, decode, "decode"), dataset.spec.resize
        if ORIGINAL_SIZE not in (spec.resize, size) and tuple(spec.resize) != tuple(size):
            raise ConfigError(f"the mixture has resize={size}, and decode has resize={spec.resize}: say one of them")
        return replace(spec, resize=size) if spec.resize == ORIGINAL_SIZE else spec
    if dataset.spec.timestamps == "strict":
        raise ConfigError(
            "timestamps='strict' checks one sample at a time, and a pipeline decodes spans; check the dataset with "
            "ds.timestamp_drift(episode), and open it with timestamps='position'"
        )
    if isinstance(decode, Mapping):
        decode = {"camera_dtype": dataset.spec.camera_dtype, **decode}
    return make_spec(DecodeSpec, decode, "decode")


def spans_per_block(config: PipelineConfig, decode: DecodeSpec) -> int:
    """Return how many spans share a block, where that is left to their size.

    Ray takes 20 to 40 ms of CPU for a block, however small it is. So blocks of rows alone, also those whose videos the
    ranks decode, are packed up to 8 MB, and blocks with pixels up to 64 MB. With cameras they hold at most an eighth of
    the live spans, since a rank holds up to a block more than it needs. Blocks with stored images are one span each.
    """
    dataset, order = config.dataset, config.order
    datasets, schema = dataset.datasets if isinstance(dataset, Mixture) else (dataset,), schema_for(dataset)
    pairs = zip(datasets, schema.members, strict=True)
    if any(one.features[own].kind == "image" for one, member in pairs for own in member.cameras.values()):
        return 1
    num_episodes = sum(len(one.meta.episodes) for one in datasets)
    mean = max(1, sum(one.meta.num_frames for one in datasets) // max(1, num_episodes))
    if order.span_frames != WHOLE_EPISODE:
        mean = min(mean, order.span_frames)
    has_cameras = bool(schema.cameras)
    most = max(1, order.live_spans // 8) if has_cameras else 64
    if has_cameras and decode.where == "cluster":
        fitting = _PIXEL_BLOCK_BYTES // ((row_bytes(dataset) + pixel_bytes(dataset, decode)) * mean)
    else:
        fitting = _ROW_BLOCK_BYTES // (row_bytes(dataset) * mean)
    return int(min(most, max(1, fitting)))
