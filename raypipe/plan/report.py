"""What a plan costs and gives, as one value: what ``raypipe plan`` prints.

Decides which figures a person needs before a run, and the advice in words. Reads no data: the caller says how large a
frame is.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from raypipe.errors import ConfigError
from raypipe.plan.budget import DEFAULT_LIVE_BYTES, RESIDENT_PER_LIVE, SHORTEST_SPAN, resolve_live
from raypipe.plan.members import MemberReport, report_members
from raypipe.plan.mixing import Mixing, measure_mixing
from raypipe.plan.world import WorldPlan

_GOOD_MIXING: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSizes:
    """Bytes of one frame."""

    row_bytes: int
    """Without cameras."""

    pixel_bytes: int
    """All cameras, decoded; 0 if live spans do not keep them."""

    is_decode_on_exit: bool = False
    """Cameras are decoded as a batch leaves: live spans keep rows alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What an epoch costs and gives. Bytes and live frames are those of the rank that has most."""

    epoch: int
    world_size: int
    lanes: int
    batch_size: int
    steps: int
    frames: int
    """Frames that are emitted, repeats not counted."""

    spans: int
    live_spans: int
    span_frames: int | Literal["episode"]
    fingerprint: str

    tail: str
    """How the epoch ends, in words."""

    left_over: int

    live_frames: int
    live_bytes: int
    """Rows and pixels of the live frames; Ray's balance makes a rank hold about 1.3 times that."""

    live_row_bytes: int
    live_pixel_bytes: int
    is_decode_on_exit: bool
    """Cameras are decoded as a batch leaves, and are not among the live bytes."""

    first_batch_frames: int
    """Frames that rank 0 reads before its first batch."""

    first_batch_bytes: int
    resume_frames: int
    """The same after a resume in the middle of the epoch."""

    spans_per_1000_frames: float
    """With one span a block: the blocks/s that 1,000 frames/s over all ranks need."""

    mixing: Mixing
    advice: tuple[str, ...]

    members: tuple[MemberReport, ...] = ()
    """Of a mixture, in the order of ``dataset_index``."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        plain = asdict(self)
        mixing = plain.pop("mixing")
        local_batch, global_batch = mixing["local_batch"], mixing["global_batch"]
        return {
            **plain,
            "distinct_episodes": local_batch,
            "distinct_episodes_full_shuffle": local_batch.pop("full_shuffle"),
            "distinct_episodes_global": global_batch,
            "distinct_episodes_global_full_shuffle": global_batch.pop("full_shuffle"),
            "overlap": mixing["overlap"],
            "overlap_full_shuffle": mixing["overlap_full_shuffle"],
            "distinct_datasets": mixing["datasets"],
        }


def report_plan(world: WorldPlan, sizes: FrameSizes, *, live_bytes: int = DEFAULT_LIVE_BYTES) -> PlanReport:
    """Return the report of a plan: a second for 64 lanes.

    Args:
        live_bytes: memory of a rank for the spans at hand; there is advice where they take more.
    """
    plan, frame_bytes = world.plan, sizes.row_bytes + sizes.pixel_bytes
    live_frames, first_frames = world.peak_live_frames(), _frames_before_first_batch(world)
    resumed = world.at(world.num_steps // 2)
    mixing = measure_mixing(world)
    frames, spans = int(world.frames_per_rank.sum()), len(plan.queues.spans)
    return PlanReport(
        epoch=plan.epoch,
        world_size=world.world_size,
        lanes=plan.leg.lanes,
        batch_size=world.steps.per_lane * len(world.lanes_of(0)),
        steps=world.num_steps,
        frames=frames,
        spans=spans,
        live_spans=plan.leg.live_spans,
        span_frames=plan.spec.span_frames,
        fingerprint=plan.fingerprint,
        tail=_describe_tail(world),
        left_over=len(world.left_over()),
        live_frames=live_frames,
        live_bytes=live_frames * frame_bytes,
        live_row_bytes=live_frames * sizes.row_bytes,
        live_pixel_bytes=live_frames * sizes.pixel_bytes,
        is_decode_on_exit=sizes.is_decode_on_exit,
        first_batch_frames=first_frames,
        first_batch_bytes=first_frames * frame_bytes,
        resume_frames=_frames_before_first_batch(resumed),
        spans_per_1000_frames=1000 * spans / max(1, frames),
        mixing=mixing,
        advice=(
            *_advise_lanes(world),
            *_advise_mixing(world, mixing),
            *_advise_memory(world, sizes, live_frames, live_bytes),
        ),
        members=report_members(world),
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
    text = f"{steps.num_full} full batches, then {' and '.join(map(str, sizes))} frames a rank"
    extras = f", one more from each of the first {steps.extras} lanes" if steps.extras else ""
    repeats = f", filled up with {steps.num_repeats} repeats a lane" if steps.num_repeats else ""
    return text + extras + repeats


def _advise_lanes(world: WorldPlan) -> list[str]:
    asked, used = world.plan.spec.lanes, world.plan.leg.lanes
    if asked == used:
        return []
    return [f"{asked} lanes do not share out over {world.world_size} ranks: this epoch has {used} lanes"]


def _advise_mixing(world: WorldPlan, mixing: Mixing) -> list[str]:
    batch, spec = mixing.local_batch, world.plan.spec
    if not spec.shuffle or batch.mean >= _GOOD_MIXING * batch.full_shuffle:
        return []
    poor = f"a rank's batch has {batch.mean:.1f} distinct episodes, a full shuffle {batch.full_shuffle:.1f}"
    wanted, live_spans = 2 * world.steps.per_lane, world.plan.leg.live_spans
    num_spans, share = int(world.plan.spans_per_lane.min()), int(world.plan.frames_per_lane.min())
    if live_spans < min(wanted, num_spans):
        return [f"{poor}: set live_spans to {wanted}, twice the {world.steps.per_lane} frames a batch takes of a lane"]
    longest = int((world.plan.queues.spans.stop - world.plan.queues.spans.start).max())
    if num_spans <= live_spans:
        shorter = max(SHORTEST_SPAN, _power_of_two(share // wanted))
        if shorter >= longest:
            return [f"{poor}: a lane has {num_spans} spans only; use more episodes, fewer lanes or a smaller batch"]
        return [f"{poor}: a lane has {num_spans} spans only, set span_frames to {shorter} to share episodes out"]
    typical = max(SHORTEST_SPAN, _power_of_two(world.plan.index.num_frames // (2 * len(world.plan.index))))
    shorter_spans = f"span_frames to {typical} or " if typical < longest else ""
    return [f"{poor}: lengths are uneven, set {shorter_spans}live_spans to {2 * live_spans}"]


def _advise_memory(world: WorldPlan, sizes: FrameSizes, live_frames: int, live_bytes: int) -> list[str]:
    held = int(RESIDENT_PER_LIVE * live_frames * (sizes.row_bytes + sizes.pixel_bytes))
    if held <= live_bytes:
        return []
    large = f"a rank holds up to {_size(held)} of rows{' and pixels' if sizes.pixel_bytes else ''}"
    lanes, live_spans = len(world.lanes_of(0)), world.plan.leg.live_spans
    fewer = f"lower live_spans from {live_spans}, or lanes from {lanes} a rank"
    try:
        budget = resolve_live(
            world.plan.index,
            row_bytes=sizes.row_bytes,
            pixel_bytes=sizes.pixel_bytes,
            live_spans=live_spans,
            live_bytes=live_bytes // lanes,
        )
    except ConfigError:
        return [f"{large}{', too much even as rows' if sizes.pixel_bytes else ''}: {fewer}"]
    if budget.is_decode_on_exit or budget.span_frames == world.plan.spec.span_frames:
        smaller = "decode when a batch leaves (decode when='exit'), or resize the cameras"
        return [f"{large}: {smaller if sizes.pixel_bytes else fewer}"]
    return [f"{large}: set span_frames to {budget.span_frames} for {_size(budget.live_bytes * lanes)}"]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def _power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)
