"""`Pipeline`: composes the stages, and alone decides where each runs; `Pipeline._compose` is the flow.

Functions import Ray when they need it: a pipeline on the local feed runs without Ray. They import torch when they need
it too, so that `Pipeline` can begin that import while it waits for metadata.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import PurePath
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, get_args

from raypipe.dataset import ActionSpec, Dataset
from raypipe.decode import check_device
from raypipe.errors import ConfigError, suggest
from raypipe.feed import BY_SIZE, LocalSource, Meeting, name_attempt, serve_meeting, span_request
from raypipe.loader import LoaderSettings, LoaderSpec, RankJob, change_spec, with_source
from raypipe.mixture import Mixture
from raypipe.pipeline.config import PipelineConfig, PipelineParts, as_dataset, compose_config, schema_for
from raypipe.plan import (
    AHEAD_BATCHES,
    WHOLE_EPISODE,
    WHOLE_SPAN,
    BatchSpec,
    WorldPlan,
    check_rank,
    check_world_size,
    describe_frames,
    plan_epoch,
    plan_world,
    report_plan,
    start,
    state_after,
    state_at,
)
from raypipe.text import counted

if TYPE_CHECKING:
    import ray.data

    from raypipe.format import Stats
    from raypipe.loader import RankLoader
    from raypipe.mixture import MixtureStats

_SOON_S: Final = 0.2
"""Metadata that takes longer comes from far away. A dataset that is open already has it, also where torch is too."""

Transport = Literal["auto", "local", "ray"]
"""Who reads the rows: the rank's own process, or Ray Data. "auto" means Ray if this process is connected to one or
decodes clips on a cluster, else local. The batches are the same."""


class Pipeline:
    """A dataset, an order and a batch size: the source of training batches.

    Give parts as specs or as plain dicts of their fields::

        pipe = rp.Pipeline(ds, batch_size=64, seed=0, delta_timestamps={"action": [0.0, 0.1]}, decode={"where": "rank"})
        for batch in pipe.loader(): ...
    """

    def __init__(
        self,
        dataset: Dataset | Mixture | str | PathLike[str],
        *,
        batch_size: int | BatchSpec | Mapping[str, Any],
        seed: int,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        features: Sequence[str] | None = None,
        actions: ActionSpec | Mapping[str, Any] | None = None,
        **parts: Unpack[PipelineParts],
    ) -> None:
        """Compose and check a pipeline, without reading rows or starting Ray.

        Args:
            dataset: a `Dataset` from `open_dataset`, or a `Mixture`, with or without windows; or a path, URI or Hub id
                to open.
            batch_size: frames per rank; ``{"size": 512, "scope": "global"}`` is over all ranks.
            seed: seed of the order.
            delta_timestamps: windows in seconds, as in LeRobot.
            features: features in a batch, including cameras, as in `Dataset.select_features` and
                `Mixture.select_features`; None takes all. The pipeline reads and decodes only these.
            actions: ``{"mode": "relative"}`` or ``{"mode": "delta"}``: actions minus the state; see `ActionSpec`.
            parts: see `PipelineParts`; a part that has a spec takes the spec or a dict of its fields.
        """
        with _importing_torch() as metadata_is_here:
            dataset = as_dataset(dataset)
            metadata_is_here.set()
            if features is not None:
                dataset = dataset.select_features(features)
            if delta_timestamps is not None:
                dataset = dataset.windowed(delta_timestamps)
            if actions is not None:
                dataset = dataset.with_actions(actions)
            self.config = compose_config(dataset, parts, batch_size=batch_size, seed=seed)

    @cached_property
    def _index(self) -> Any:
        return self.config.index()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __repr__(self) -> str:
        """Show the chosen settings and what they cost."""
        order, budget = self.config.order, self.config.budget
        span = "whole episodes" if order.span_frames == WHOLE_EPISODE else counted(int(order.span_frames), "frame")
        clips = "no clips" if order.clip_frames == WHOLE_SPAN else f"clips of {order.clip_frames}"
        decoding = (
            f", decode {self.config.decode.where} at {budget.cost:.2f} times the cost of file order, in up to "
            f"{max(budget.clip_bytes, budget.live_bytes) / 1e6:,.0f} MB on one rank"
            if schema_for(self.config.dataset).cameras
            else ""
        )
        frames = "".join(f", {text}" for text in describe_frames(self._index))
        return (
            f"Pipeline({self.config.dataset!r}{frames}, batch of {self.config.batch.size} a {self.config.batch.scope}, "
            f"seed {order.seed}, spans of {span}, {order.live_spans} live, {clips}{decoding})"
        )

    @cached_property
    def stats(self) -> "Stats | MixtureStats":
        """The statistics by which a `Normaliser` scales the batches.

        They are as the dataset stores them, except for relative actions: raypipe computes those once, over the frames
        that the pipeline selects, and keeps them.
        """
        dataset = self.config.dataset
        return dataset.stats if isinstance(dataset, Mixture) else dataset.stats_of(self._index)

    def plan(self, *, epoch: int = 0, world_size: int = 1) -> WorldPlan:
        """Return the plan of a whole epoch on `world_size` ranks, without reading files.

        It is the plan of a run that began with this dataset or mixture. A loader that resumes after the mixture changed
        plans from its state instead.
        """
        begin = start(self.config.order, world_size=world_size, epoch=epoch)
        plan = plan_epoch(self._index, begin.spec, epoch=epoch, legs=begin.legs)
        return plan_world(plan, world_size=world_size, batch=self.config.batch)

    def state_at(self, step: int, *, world_size: int = 1) -> dict[str, Any]:
        """Return the state after `step` batches of a run with a constant number of ranks, as its checkpoint had it."""
        return with_source(state_at(self.plan(world_size=world_size), step).to_dict(), self.config.dataset)

    def loader(
        self, *, rank: int = 0, world_size: int = 1, transport: Transport = "auto", **settings: Unpack[LoaderSettings]
    ) -> "RankLoader":
        """Return the loader of a single rank, in this process. By default it does not start Ray.

        Args:
            rank: the rank to load, of `world_size`. With several ranks this loader does not wait for the others: use it
                to look at what a rank gets, not for training. It needs the local transport.
            settings: the fields of `LoaderSpec`: ``prefetch_batches``, ``device``, ``transform``, ``num_threads``.
        """
        check_rank(rank, world_size)
        if world_size == 1:
            return self.loaders(1, transport=transport, **settings)[0]
        if self.transport(transport) == "ray" and transport != "auto":
            raise ConfigError(
                f"a loader of rank {rank} of {world_size} alone needs transport='local': Ray's split waits for all"
            )
        return self._compose("local", world_size, self._loader_spec(settings), rank=rank)[0]

    def loaders(
        self, world_size: int, *, name: str = "train", transport: Transport = "auto", **settings: Unpack[LoaderSettings]
    ) -> "list[RankLoader]":
        """Return the loaders of all ranks. Iterate all of them concurrently.

        You may send Ray loaders to other processes. Local loaders are for threads of this process.
        """
        return self._compose(self.transport(transport), world_size, self._loader_spec(settings), name=name)

    def served_loaders(self, world_size: int, *, host: str, name: str) -> "list[RankLoader]":
        """Return local loaders for ranks in separate processes, which compare their places in this process.

        Keep the first loader here: the meeting ends with it. Send the others to their processes by pickle.

        Args:
            host: the name under which the other processes reach this machine.
        """
        return self._compose("local", world_size, self._loader_spec({}), name=name, host=host)

    def _compose(
        self,
        transport: Literal["local", "ray"],
        world_size: int,
        spec: LoaderSpec,
        *,
        rank: int | None = None,
        name: str = "train",
        host: str = "",
    ) -> "list[RankLoader]":
        """Return the loaders of all ranks, which wait for each other, or of one `rank` alone.

        These are the stages of the flow, and where each runs.
        """
        check_world_size(world_size)
        _check_name(name)
        # format.read_metadata: when the dataset was opened. Settings that depend on the transport are decided here.
        config = self._resolved(transport)
        # plan.plan_epoch: every rank, and the feeder, computes each epoch's plan from these values; no plan travels.
        jobs = [
            RankJob(
                # A context per rank, because decoders count their own work.
                context=config.block_context(),
                index=self._index,
                order=config.order,
                derived=config.derived,
                live_bytes=config.budget.live_bytes,
                batch=config.batch,
                rank=number,
                world_size=world_size,
                selection=config.selection,
                mixture=config.mixture,
                allow_mixture_change=config.allow_mixture_change,
            )
            for number in (range(world_size) if rank is None else [rank])
        ]
        sources: Sequence[Any]
        if transport == "local":
            # feed.read_block: the rank itself. The ranks compare their places at a meeting.
            own = Meeting(config.bad_data, self._index, len(jobs))
            meeting, attempt = serve_meeting(own, host) if host else own, name_attempt()
            sources = [LocalSource(job.context, meeting, config.feed, attempt) for job in jobs]
        else:
            # feed.read_block, streaming_split: Ray Data. It steers each block to its planned rank.
            sources = self._ray_sources(config, jobs)
        # loader.LiveRows, decode.ClipStore, loader.RankLoader: the rank. Ray tasks decode if `config.decode` says so.
        from raypipe.loader import RankLoader

        return [RankLoader(job, source, spec, name) for job, source in zip(jobs, sources, strict=True)]

    def _ray_sources(self, config: PipelineConfig, jobs: Sequence[RankJob]) -> Sequence[Any]:
        from raypipe.feed import FeederSource, check_object_store, start_feeder

        if config.decode.where == "cluster":
            members = config.members()
            sizes = config.order.clip_sizes(len(members)) or (1,) * len(members)
            largest = max(member.clip_bytes(size) for member, size in zip(members, sizes, strict=True))
            # What a rank requests ahead, as if every sample opened a clip.
            ahead_bytes = min(config.budget.live_bytes, (AHEAD_BATCHES + 1) * config.batch.size * largest)
            check_object_store(ahead_bytes * len(jobs))
        attempt = name_attempt()
        if len(jobs) == 1:
            shared: dict[str, Any] = {"lone": Meeting(config.bad_data, self._index, 1)}
        else:
            shared = {"feeder": start_feeder(config.block_context(), self._index, config.feed, world_size=len(jobs))}
        return [FeederSource(job.context, config.feed, attempt, **shared) for job in jobs]

    def transport(self, wanted: Transport = "auto") -> Literal["local", "ray"]:
        """Return which transport a loader of this pipeline would use in this process now."""
        is_on_cluster = self.config.decode.where == "cluster"
        if wanted not in get_args(Transport):
            raise ConfigError(f"transport={wanted!r} is not known{suggest(wanted, get_args(Transport))}")
        if wanted == "local" and is_on_cluster:
            raise ConfigError(
                "decode={'where': 'cluster'} decodes in Ray tasks, and transport='local' uses no Ray: leave one out"
            )
        if wanted == "auto":
            return "ray" if is_on_cluster or is_ray_running() else "local"
        return wanted

    def batch_at(self, step: int, *, rank: int = 0, world_size: int = 1, epoch: int = 0) -> dict[str, Any]:
        """Return the batch of a step of an epoch, from 0, on a constant number of ranks; reads only what it needs.

        `raypipe where` names the frames of the batch; this returns its tensors, for example to examine a loss spike.
        """
        plan = self.plan(epoch=epoch, world_size=world_size)
        if step not in range(plan.num_steps):
            raise ConfigError(
                f"step {step!r} is not one of the {plan.num_steps} of epoch {epoch} on {counted(world_size, 'rank')}, "
                f"from 0"
            )
        check_rank(rank, world_size)
        state = with_source(state_after(plan, int(step)).to_dict(), self.config.dataset)
        (loader,) = self._compose("local", world_size, self._loader_spec({"progress": False}), rank=rank)
        with loader:
            loader.load_state_dict(state)
            return next(iter(loader))

    def live_bytes(self, *, world_size: int = 1) -> int:
        """Return the most bytes of rows and decoded frames that a rank holds at any time in an epoch."""
        world, live_bytes = self.plan(world_size=world_size), self.config.budget.live_bytes
        return report_plan(world, self.config.members(), live_bytes=live_bytes).live_bytes

    def to_ray(self, *, epoch: int = 0) -> "ray.data.Dataset":
        """Return one epoch as a Ray Dataset, for use with Ray Data.

        A row is a sample with its windows and decoded cameras. A block is a span; blocks come in the plan's order. The
        dataset does not mix frames across spans: the loader does that.
        """
        import ray

        from raypipe.feed import as_samples, build_dataset, start_ray
        from raypipe.loader import span_columns

        start_ray()
        plan = self.plan(epoch=epoch).rank(0)
        context = ray.put(self.config.block_context())
        blocks = [(span_request(plan, arrival),) for arrival in range(len(plan.queue))]
        return as_samples(build_dataset(context, blocks), context, span_columns)

    def _resolved(self, transport: Literal["local", "ray"]) -> PipelineConfig:
        """Return the config with every setting that depends on the transport decided; "ray" may start a local Ray."""
        config, decode, feed = self.config, self.config.decode, self.config.feed
        if transport == "local":
            return replace(config, decode=replace(decode, where="rank"))
        from raypipe.feed import has_spare_cpu_nodes, start_ray

        start_ray()
        if decode.where == "auto":
            decode = replace(decode, where="cluster" if has_spare_cpu_nodes() else "rank")
        if feed.spans_per_block == BY_SIZE:
            feed = replace(feed, spans_per_block=config.spans_per_block())
        return replace(config, decode=decode, feed=feed)

    def _loader_spec(self, settings: Mapping[str, Any]) -> LoaderSpec:
        decode = self.config.decode
        if decode.device != "cpu":
            check_device(decode.device)
        return change_spec(LoaderSpec(num_threads=decode.num_threads), settings)


@contextmanager
def _importing_torch() -> Iterator[Event]:
    """Import torch in a thread, which costs 0.7 s, and torchcodec if the event that it yields is not set soon after.

    The block waits for storage meanwhile. The thread ends with the block: a program may end, or fork, right after it.
    """
    metadata_is_here = Event()

    def load() -> None:
        from raypipe.loader import RankLoader  # noqa: F401

        # A driver of Ray Train decodes nothing. A rank imports torchcodec while it reads its first rows, and then says
        # what is missing if that fails.
        if not metadata_is_here.wait(_SOON_S):
            with suppress(Exception):
                from raypipe.decode import load_torchcodec

                load_torchcodec()

    with ThreadPoolExecutor(1, "raypipe-import") as thread:
        loading = thread.submit(load)
        try:
            yield metadata_is_here
        finally:
            metadata_is_here.set()
    loading.result()


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name or PurePath(name).name != name:
        raise ConfigError(f"the name {name!r} of a loader also names its files in a checkpoint; give a file name")


def is_ray_running() -> bool:
    """Return whether this process is connected to a Ray."""
    ray = sys.modules.get("ray")
    # While another thread imports the module it lacks this name.
    return bool(ray is not None and getattr(ray, "is_initialized", bool)())
