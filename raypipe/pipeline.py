"""`Pipeline`: composes the stages, and alone decides where each runs.

::

    config.compose_config   specs                                   driver
    plan                    order, on every rank and in the feeder  pure
    feeder.start_feeder     plans -> Ray Datasets -> splits         actor on this node
      datasource            read, window (and decode)               Ray tasks on any node
    loader.RankLoader       receive, (decode), shuffle, assemble    rank
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import ray

from raypipe.batch import span_columns
from raypipe.config import PipelineConfig, compose_config, make_cache, spans_per_block
from raypipe.dataset import Dataset
from raypipe.decode.spec import check_device
from raypipe.errors import ConfigError, suggest
from raypipe.feeder import BY_SIZE, FeederSource, start_feeder
from raypipe.loader import RankLoader
from raypipe.loader_spec import LoaderSpec, change_spec
from raypipe.mixture import Mixture
from raypipe.packed import span_request
from raypipe.plan import DEFAULT_LIVE_BYTES, WHOLE_EPISODE, WorldPlan, plan_epoch, plan_world, start, state_at
from raypipe.rank_job import RankJob, with_source
from raypipe.sizes import measure_frame
from raypipe.skips import BadDataSpec
from raypipe.source.datasource import as_samples, build_dataset


class Pipeline:
    """A dataset, an order and a batch size: what training is fed with.

    Parts may be given as specs or as plain dicts of their fields::

        pipe = rp.Pipeline(ds, batch_size=64, seed=0, delta_timestamps={"action": [0.0, 0.1]}, decode={"where": "rank"})
        for batch in pipe.loader(): ...
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        batch_size: Any,
        seed: int,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        live_bytes: int = DEFAULT_LIVE_BYTES,
        **parts: Any,
    ) -> None:
        """Compose and check a pipeline; touches neither rows nor Ray.

        Args:
            dataset: what `open_dataset` returns, or a `Mixture`; perhaps `windowed`.
            batch_size: frames per rank; ``{"size": 512, "scope": "global"}`` is over all ranks.
            seed: of the order.
            delta_timestamps: windows in seconds, as in LeRobot.
            live_bytes: memory of a rank for the spans at hand; decides span length where ``order`` does not.
            parts: ``selection``, ``order``, ``decode``, ``feed``: see `SelectionSpec`, `OrderSpec`, `DecodeSpec`,
                `FeedSpec`; the fields of `BadDataSpec`, such as ``on_bad_episode="skip"``; ``cache``, a `CacheSpec`
                for files of remote storage, or ``"off"``; and ``allow_mixture_change=True``, to go on between epochs
                from a state of another mixture.
        """
        allow_mixture_change = bool(parts.pop("allow_mixture_change", False))
        cache = make_cache(parts.pop("cache", {}))
        known = (
            "selection",
            "order",
            "decode",
            "feed",
            "cache",
            "allow_mixture_change",
            *(field.name for field in fields(BadDataSpec)),
        )
        for name in parts:
            if name not in known:
                raise ConfigError(f"Pipeline has no part {name!r}{suggest(name, known)}")
        if delta_timestamps is not None:
            dataset = dataset.windowed(delta_timestamps)
        bad_data = {field.name: parts.pop(field.name) for field in fields(BadDataSpec) if field.name in parts}
        every = {"selection": {}, "order": {}, "decode": {}, "feed": {}, "bad_data": bad_data, **parts}
        config = compose_config(dataset, every, batch_size=batch_size, seed=seed, live_bytes=live_bytes)
        self.config = replace(config, allow_mixture_change=allow_mixture_change, cache=cache)

    @cached_property
    def _index(self) -> Any:
        return self.config.index()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __repr__(self) -> str:
        """Tell what was picked: span length, live spans, and what they cost on a single rank."""
        order, decode = self.config.order, self.config.decode
        span = "whole episodes" if order.span_frames == WHOLE_EPISODE else f"{order.span_frames} frames"
        return (
            f"Pipeline({self.config.dataset!r}, batch of {self.config.batch.size} a {self.config.batch.scope}, seed "
            f"{order.seed}, spans of {span}, {order.live_spans} live, up to {self.live_bytes() / 1e6:,.0f} MB at hand "
            f"on one rank, decode {decode.where}/{decode.when})"
        )

    def plan(self, *, epoch: int = 0, world_size: int = 1) -> WorldPlan:
        """Return the plan of a whole epoch on `world_size` ranks; reads nothing.

        As of a run that began with this dataset or mixture: a loader that goes on from a changed mixture plans by its
        state.
        """
        begin = start(self.config.order, world_size=world_size, epoch=epoch)
        plan = plan_epoch(self._index, begin.spec, epoch=epoch, legs=begin.legs)
        return plan_world(plan, world_size=world_size, batch=self.config.batch)

    def state_at(self, step: int, *, world_size: int = 1) -> dict[str, Any]:
        """Return the state after `step` batches of a run that never changed its ranks: a lost checkpoint, rebuilt."""
        return with_source(state_at(self.plan(world_size=world_size), step).to_dict(), self.config.dataset)

    def loader(self, **settings: Any) -> RankLoader:
        """Return the loader of a single rank, in this process; starts a local Ray if none is there.

        Args:
            settings: the fields of `LoaderSpec`: ``prefetch_batches``, ``device``, ``transform``, ``num_threads``.
        """
        return self.loaders(1, **settings)[0]

    def loaders(self, world_size: int, *, name: str = "train", **settings: Any) -> list[RankLoader]:
        """Return the loaders of all ranks. They may be sent to other processes; all must be iterated at once."""
        start_ray()
        config = self._resolved(world_size)
        is_decoding = config.decode.where == "cluster"
        feeder = start_feeder(
            config.block_context(), self._index, config.feed, world_size=world_size, is_decoding=is_decoding
        )
        source = FeederSource(feeder, config.feed)
        spec = self._loader_spec(settings)
        return [
            RankLoader(
                RankJob(
                    # One for each: decoders count what they do.
                    context=config.block_context(),
                    index=self._index,
                    order=config.order,
                    is_span_derived=config.live_bytes > 0,
                    batch=config.batch,
                    rank=rank,
                    world_size=world_size,
                    selection=config.selection,
                    mixture=config.mixture,
                    allow_mixture_change=config.allow_mixture_change,
                ),
                source,
                spec,
                name,
            )
            for rank in range(world_size)
        ]

    def live_bytes(self, *, world_size: int = 1) -> int:
        """Return the most bytes of rows and decoded frames that the live spans of a rank hold in an epoch."""
        sizes = measure_frame(self.config.dataset, self.config.decode)
        return self.plan(world_size=world_size).peak_live_frames() * (sizes.row_bytes + sizes.pixel_bytes)

    def to_ray(self, *, epoch: int = 0) -> "ray.data.Dataset":
        """Return one epoch as a Ray Dataset, for people who go on with Ray Data.

        A row is a sample with its windows and decoded cameras; a block is a span, in the order of the plan's spans. The
        order of frames over spans is the loader's doing, and is not in it.
        """
        start_ray()
        plan = self.plan(epoch=epoch).rank(0)
        context = ray.put(self.config.block_context())
        blocks = [(span_request(plan, arrival),) for arrival in range(len(plan.queue))]
        return as_samples(build_dataset(context, blocks, is_decoding=True), context, span_columns)

    def _resolved(self, world_size: int) -> PipelineConfig:
        """Return the config with where and when to decode decided for this cluster and these ranks."""
        config, decode = self.config, self.config.decode
        if decode.where == "auto":
            is_cluster = decode.when == "block" and has_spare_cpu_nodes()
            decode = replace(decode, where="cluster" if is_cluster else "rank")
        live_bytes = self.live_bytes(world_size=world_size)
        if decode.where == "cluster":
            check_object_store(live_bytes * world_size)
        elif decode.when == "block" and config.live_bytes and live_bytes > config.live_bytes:
            warnings.warn(
                f"{live_bytes / 1e9:.1f} GB of decoded frames would be at hand on each of {world_size} ranks, and "
                f"live_bytes is {config.live_bytes / 1e9:.1f} GB: decoding each batch as it leaves instead. Values do "
                f"not change. Raise live_bytes, or use more ranks, to decode each span once.",
                stacklevel=4,
            )
            decode = replace(decode, when="exit")
        feed = config.feed
        if feed.spans_per_block == BY_SIZE:
            feed = replace(feed, spans_per_block=spans_per_block(config, decode))
        return replace(config, decode=decode, feed=feed)

    def _loader_spec(self, settings: Mapping[str, Any]) -> LoaderSpec:
        decode = self.config.decode
        if decode.device != "cpu":
            check_device(decode.device)
        return change_spec(LoaderSpec(num_threads=decode.num_threads), settings)


def start_ray() -> None:
    """Use the Ray that is there, or start a local one and say so."""
    if ray.is_initialized():
        return
    ray.init(logging_level="warning")
    print(f"raypipe: using Ray with {ray.cluster_resources().get('CPU', 0):g} CPUs", flush=True)


def check_object_store(live_bytes: int) -> None:
    """Raise where the frames at hand on all ranks would fill more than half of the cluster's object store.

    Ranks hold views on the blocks there, which Ray does not count: beyond that it would spill to disk, or stop.
    """
    size = sum(node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"])
    if live_bytes > size / 2:
        raise ConfigError(
            f"decoding on the cluster keeps {live_bytes / 1e9:.2f} GB of decoded frames in Ray's object store, which "
            f"has {size / 1e9:.2f} GB, and half of it must stay free. Use decode={{'where': 'rank'}}, smaller "
            f"live_spans or span_frames in order={{...}}, decode={{'resize': ...}}, or a larger object store."
        )


def has_spare_cpu_nodes() -> bool:
    """Return whether the cluster has nodes with CPUs and no GPU beside nodes with GPUs."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_gpu = any(resources.get("GPU", 0) for resources in nodes)
    return has_gpu and any(resources.get("CPU", 0) >= 1 and not resources.get("GPU", 0) for resources in nodes)
