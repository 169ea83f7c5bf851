"""What a plan costs and gives, as one value: what ``raypipe plan`` prints.

Decides which figures a person needs before a run, and the advice in words. Reads no data: the caller says how large a
frame is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from raypipe.plan.budget import DEFAULT_LIVE_BYTES, SHORTEST_SPAN, MemberCost, decoded_bytes, measure_held, resolve_live
from raypipe.plan.epoch import WorldPlan
from raypipe.plan.index import EpisodeIndex
from raypipe.plan.keyhash import Ints, OrderKeys
from raypipe.plan.mixing import Mixing, measure_mixing
from raypipe.plan.rates import mean_times
from raypipe.plan.spans import lap_sizes
from raypipe.plan.spec import ClipLength, SpanLength
from raypipe.text import counted, plural

_UNCLIPPED_FRAMES: Final = 16
"""Frames decoded together in file order, or if whole live spans fit in memory."""

_GOOD_MIXING: Final = 0.95

_DEAR: Final = 1.5

_STEPS_LOOKED_AT: Final = 32

_MOST_RATES: Final = 8
_QUARTERS: Final = 4
"""The report groups more than `_MOST_RATES` different rates by quarters of the frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateReport:
    """Frames that come equally often, or nearly so."""

    least_times: float
    most_times: float
    """How often one of them comes in an epoch, or in a lap of a mixture, on average."""

    frames: int
    share: float

    def describe(self) -> str:
        """Return it in words."""
        return (
            f"{counted(self.frames, 'frame')} {_often(self.least_times, self.most_times)} each, {self.share:.2%} of "
            f"the epoch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """One dataset of a mixture in an epoch."""

    name: str
    frames: int
    """Anchor frames of the dataset."""

    epoch_frames: int
    """Frames that the epoch takes of the dataset."""

    share: float
    """Its part of the epoch, between 0 and 1."""

    laps: float
    """Passes over the dataset in an epoch."""

    spans: int
    deviation: float
    """The largest difference between the dataset's emitted frames and `share`, in frames, at the sampled steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What an epoch costs and gives. Bytes and live frames are those of the rank with the most."""

    epoch: int
    world_size: int
    lanes: int
    batch_size: int
    steps: int
    frames: int
    """Frames that are emitted, repeats not counted."""

    spans: int
    live_spans: int
    span_frames: SpanLength
    clip_frames: ClipLength
    fingerprint: str

    tail: str
    """How the epoch ends, in words."""

    left_over: int

    live_frames: int
    """Rows at hand; Ray's balance makes a rank hold about 1.3 times that."""

    live_bytes: int
    """Bytes of the rows at hand and of the decoded frames."""

    live_row_bytes: int
    live_pixel_bytes: int
    """Bytes of the most decoded frames, at hand or ahead of need as far as the budget allows, and of two batches."""

    decode_cost: float
    """CPU of decoding, relative to decoding every frame once in file order."""

    decoded_bytes: int
    """Bytes of all frames of the videos, decoded: what ``keep_frames`` takes on disk, on one node."""

    first_batch_frames: int
    """Rows that rank 0 reads before its first batch."""

    first_batch_bytes: int
    resume_frames: int
    """The same after a resume in the middle of the epoch."""

    spans_per_1000_frames: float
    """With one span a block: the blocks/s that 1,000 frames/s over all ranks need."""

    mixing: Mixing
    advice: tuple[str, ...]

    members: tuple[MemberReport, ...] = ()
    """The datasets of a mixture, in the order of ``dataset_index``."""

    selection: tuple[str, ...] = ()
    """What the selection leaves out, and how often frames come, in words; empty: each comes once."""

    rates: tuple[RateReport, ...] = ()
    """How often frames come, rarest first; empty: each comes once."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        plain = asdict(self)
        mixing = plain.pop("mixing")
        local_batch, global_batch = mixing["local_batch"], mixing["global_batch"]
        near = mixing["near_repeats"] or {"share": None, "full_shuffle": None, "num_batches": 0}
        return {
            **plain,
            "distinct_episodes": local_batch,
            "distinct_episodes_full_shuffle": local_batch.pop("full_shuffle"),
            "distinct_episodes_global": global_batch,
            "distinct_episodes_global_full_shuffle": global_batch.pop("full_shuffle"),
            "overlap": mixing["overlap"],
            "overlap_full_shuffle": mixing["overlap_full_shuffle"],
            "near_repeats": near["share"],
            "near_repeats_full_shuffle": near["full_shuffle"],
            "near_repeats_batches": near["num_batches"],
            "distinct_datasets": mixing["datasets"],
        }


def report_plan(
    world: WorldPlan,
    members: Sequence[MemberCost],
    *,
    live_bytes: int = DEFAULT_LIVE_BYTES,
    near_frames: Sequence[int] = (),
) -> PlanReport:
    """Return the report of a plan; takes a second for 64 lanes.

    It gives advice if decoded frames take more than `live_bytes` of a rank. For `near_frames` see `measure_mixing`.
    """
    plan, row_bytes = world.plan, max(member.row_bytes for member in members)
    live_frames, first_frames = world.peak_live_frames(), _frames_before_first_batch(world)
    live_pixels = live_frames * max(member.sample_bytes for member in members)
    clip_frames = plan.keys.clip_frames or (unclipped_frames(plan.keys, live_pixels, live_bytes),) * len(members)
    pixel_bytes, next_bytes = measure_held(world, members, clip_frames, live_bytes=live_bytes)
    cost = max(member.cost(size) for member, size in zip(members, clip_frames, strict=True))
    mixing = measure_mixing(world, near_frames=near_frames)
    frames, spans = int(world.frames_per_rank.sum()), len(plan.queues.spans)
    return PlanReport(
        epoch=plan.epoch,
        world_size=world.world_size,
        lanes=plan.leg.lanes,
        batch_size=world.batch_size,
        steps=world.num_steps,
        frames=frames,
        spans=spans,
        live_spans=plan.leg.live_spans,
        span_frames=plan.spec.span_frames,
        clip_frames=plan.spec.clip_frames,
        fingerprint=plan.fingerprint,
        tail=_describe_tail(world),
        left_over=world.num_left_over,
        live_frames=live_frames,
        live_bytes=live_frames * row_bytes + pixel_bytes,
        live_row_bytes=live_frames * row_bytes,
        live_pixel_bytes=pixel_bytes,
        decode_cost=cost,
        decoded_bytes=decoded_bytes(plan.index, members),
        first_batch_frames=first_frames,
        first_batch_bytes=first_frames * row_bytes,
        resume_frames=_frames_before_first_batch(world.at(world.num_steps // 2)),
        spans_per_1000_frames=1000 * spans / max(1, frames),
        mixing=mixing,
        advice=(*_advise_order(world, mixing), *_advise_decoding(world, members, next_bytes, live_bytes, cost)),
        members=report_members(world),
        selection=describe_frames(plan.index),
        rates=report_rates(plan.index),
    )


def _frames_before_first_batch(world: WorldPlan) -> int:
    rank = world.rank(0)
    batch = next(rank.batches(), None)
    return int(rank.queue.num_rows[: batch.num_needed].sum()) if batch else 0


def _describe_tail(world: WorldPlan) -> str:
    steps, lanes = world.steps, len(world.lanes_of(0))
    sizes = [per_lane * lanes for per_lane in steps.short]
    if not sizes:
        return "full batches only"
    full, last = counted(steps.num_full, "full batch"), " and ".join(map(str, sizes))
    extras = f", one more from each of the first {steps.extras} lanes" if steps.extras else ""
    repeats = f", filled up with {counted(steps.num_repeats, 'repeat')} a lane" if steps.num_repeats else ""
    return f"{full}, then {last} {plural(sizes[-1], 'frame')} a rank{extras}{repeats}"


def _advise_order(world: WorldPlan, mixing: Mixing) -> Iterator[str]:
    asked, used, plan = world.plan.spec.lanes, world.plan.leg.lanes, world.plan
    if asked != used:
        ranks = counted(world.world_size, "rank")
        yield f"{asked} lanes do not share out over {ranks}: this epoch has {counted(used, 'lane')}"
    batch = mixing.local_batch
    if plan.spec.shuffle and batch.mean < _GOOD_MIXING * batch.full_shuffle:
        poor = f"a rank's batch has {batch.mean:.1f} distinct episodes, a full shuffle {batch.full_shuffle:.1f}"
        yield f"{poor}: {_mixing_remedy(world)}"


def _mixing_remedy(world: WorldPlan) -> str:
    plan, per_lane = world.plan, world.steps.per_lane
    wanted, live_spans = 2 * per_lane, plan.leg.live_spans
    num_spans, share = int(plan.spans_per_lane.min()), int(plan.frames_per_lane.min())
    if live_spans < min(wanted, num_spans):
        return f"set live_spans to {wanted}, twice the {counted(per_lane, 'frame')} a batch takes of a lane"
    longest = int((plan.queues.spans.stop - plan.queues.spans.start).max())
    if num_spans <= live_spans:
        few, shorter = f"a lane has only {counted(num_spans, 'span')}", _at_most_power(share // wanted)
        if shorter >= longest:
            return f"{few}; use more episodes, fewer lanes or a smaller batch"
        return f"{few}, set span_frames to {shorter} to share episodes out"
    typical = _at_most_power(plan.index.num_frames // (2 * len(plan.index)))
    shorter_spans = f"span_frames to {typical} or " if typical < longest else ""
    return f"lengths are uneven, set {shorter_spans}live_spans to {2 * live_spans}"


def _at_most_power(number: int) -> int:
    """Return the largest power of two that is at most `number`, and no span that is too short."""
    return max(SHORTEST_SPAN, 1 << max(0, number.bit_length() - 1))


def unclipped_frames(keys: OrderKeys, span_bytes: int, live_bytes: int) -> int:
    """Return how many frames a rank decodes together if the order has no clips.

    In a shuffled order it then holds nearly all of every live span (`span_bytes`), or decodes each frame alone.
    """
    return _UNCLIPPED_FRAMES if not keys.shuffle or span_bytes <= live_bytes else 1


def _advise_decoding(
    world: WorldPlan, members: Sequence[MemberCost], next_bytes: int, live_bytes: int, cost: float
) -> Iterator[str]:
    has_cameras = any(member.cameras for member in members)
    if has_cameras and next_bytes > live_bytes:
        yield (
            f"a rank holds up to {_size(next_bytes)} of decoded frames, and live_bytes is {_size(live_bytes)}: lower "
            f"live_spans from {world.plan.leg.live_spans}, or let raypipe choose it"
        )
    if has_cameras and cost > _DEAR:
        ample = resolve_live(world.plan.index, members, batch=world.batch_size, live_bytes=1 << 50)
        yield f"decoding costs {cost:.1f} times as much as in file order: {ample.describe_remedies(members)}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def report_rates(index: EpisodeIndex) -> tuple[RateReport, ...]:
    """Return how often frames come, rarest first; empty if each comes once, or for a mixture."""
    if index.rates is None or index.shares is not None:
        return ()
    times, frames = mean_times(index.rates, index.stop - index.start)
    # Units are spread over frames one by one: times that differ by less than that are the same.
    times, number = np.unique(np.round(times, 6), return_inverse=True)
    frames = np.bincount(number, weights=frames)
    group = np.arange(len(times))
    if len(times) > _MOST_RATES:
        group = np.minimum((np.cumsum(frames) - frames) * _QUARTERS // frames.sum(), _QUARTERS - 1).astype(np.int64)
    return tuple(
        RateReport(
            least_times=float(times[group == one].min()),
            most_times=float(times[group == one].max()),
            frames=int(frames[group == one].sum()),
            share=float((times * frames)[group == one].sum() / (times * frames).sum()),
        )
        for one in np.unique(group).tolist()
    )


def describe_frames(index: EpisodeIndex) -> tuple[str, ...]:
    """Return in words what no epoch has, and how often an epoch has the other frames; usually empty."""
    episodes, frames = index.left_out
    texts = []
    if frames:
        whole = f", {counted(episodes, 'whole episode')} among them" if episodes else ""
        texts.append(f"{counted(frames, 'frame')} left out{whole}")
    rates = report_rates(index)
    if rates and (rates[0].least_times, rates[-1].most_times) != (1, 1):
        kept, often = sum(one.frames for one in rates), _often(rates[0].least_times, rates[-1].most_times)
        texts.append(f"{counted(index.num_frames, 'frame')} an epoch of {kept:,}, each {often}")
    return tuple(texts)


def _often(least: float, most: float) -> str:
    if f"{least:.3g}" == f"{most:.3g}":
        return "once" if least == 1 else f"{least:.3g} times"
    return f"{least:.3g} to {most:.3g} times"


def report_members(world: WorldPlan) -> tuple[MemberReport, ...]:
    """Return a report for every dataset of a mixture; empty for a single dataset."""
    index = world.plan.index
    if index.shares is None:
        return ()
    taken, spans = np.array(index.shares.frames), world.plan.queues.spans
    num_spans = np.bincount(spans.dataset, minlength=len(taken))
    sizes, shares = lap_sizes(index), taken / taken.sum()
    emitted = emitted_frames(world, np.unique(np.linspace(0, world.num_steps, _STEPS_LOOKED_AT).astype(np.int64)))
    deviation = np.abs(emitted - emitted.sum(axis=1, keepdims=True) * shares).max(axis=0)
    return tuple(
        MemberReport(
            name=name,
            frames=int(sizes[i]),
            epoch_frames=int(taken[i]),
            share=float(shares[i]),
            laps=float(taken[i] / sizes[i]),
            spans=int(num_spans[i]),
            deviation=float(deviation[i]),
        )
        for i, name in enumerate(index.dataset_names)
    )


def emitted_frames(world: WorldPlan, steps: Ints) -> Ints:
    """Return ``(steps, datasets)``: the frames of every dataset that all ranks have emitted before each of `steps`."""
    num_datasets = len(world.plan.index.dataset_names)
    emitted = np.zeros((len(steps), num_datasets), dtype=np.int64)
    for number in range(world.plan.leg.lanes):
        lane = world.plan.lane(number)
        for i, step in enumerate(steps.tolist()):
            counts = lane.counts(world.steps.position_after(step))
            # Whole numbers below 2**53 are exact as floats.
            emitted[i] += np.bincount(lane.spans.dataset, weights=counts, minlength=num_datasets).astype(np.int64)
    return emitted
