"""What a plan costs and gives, as one value: what ``raypipe plan`` prints.

Decides which figures a person needs before a run, and the advice in words. Reads no data: the caller says how large a
frame is.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from raypipe.plan.budget import (
    DEFAULT_LIVE_BYTES,
    LONG_GOP_FRAMES,
    SHORTEST_SPAN,
    LiveBudget,
    MemberCost,
    clip_bound,
    decoded_bytes,
    resolve_live,
)
from raypipe.plan.held import HeldPeak, measure_held
from raypipe.plan.keyhash import OrderKeys
from raypipe.plan.members import MemberReport, RateReport, describe_frames, report_members, report_rates
from raypipe.plan.mixing import Mixing, measure_mixing
from raypipe.plan.world import WorldPlan
from raypipe.text import counted, plural

AHEAD_BATCHES: Final = 4
"""How many batches ahead a loader decodes clips by default."""

_UNCLIPPED_FRAMES: Final = 16
"""Frames decoded together in file order, or if whole live spans fit in memory."""

_GOOD_MIXING: Final = 0.95

_DEAR: Final = 1.5


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
    span_frames: int | Literal["episode"]
    clip_frames: int | tuple[int, ...] | Literal["span"]
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

    Args:
        members: the sizes of every dataset.
        live_bytes: memory of a rank for decoded frames; the report gives advice if they take more.
        near_frames: how many frames half a second has, of every dataset in turn; empty: near repeats are not measured.
    """
    plan, row_bytes = world.plan, max(member.row_bytes for member in members)
    clip_frames = decoded_together(world, members, live_bytes)
    held = measure_held(world, members, clip_frames, ahead_batches=AHEAD_BATCHES)
    pixel_bytes = _pixel_bytes(world, members, held, live_bytes)
    live_frames, first_frames = world.peak_live_frames(), _frames_before_first_batch(world)
    resumed = world.at(world.num_steps // 2)
    mixing = measure_mixing(world, near_frames=near_frames)
    frames, spans = int(world.frames_per_rank.sum()), len(plan.queues.spans)
    return PlanReport(
        epoch=plan.epoch,
        world_size=world.world_size,
        lanes=plan.leg.lanes,
        batch_size=_batch_size(world),
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
        decode_cost=max(member.cost(size) for member, size in zip(members, clip_frames, strict=True)),
        decoded_bytes=decoded_bytes(plan.index, members),
        first_batch_frames=first_frames,
        first_batch_bytes=first_frames * row_bytes,
        resume_frames=_frames_before_first_batch(resumed),
        spans_per_1000_frames=1000 * spans / max(1, frames),
        mixing=mixing,
        advice=_advise(world, members, mixing, held, live_bytes),
        members=report_members(world),
        selection=describe_frames(plan.index),
        rates=report_rates(plan.index),
    )


def _advise(
    world: WorldPlan, members: Sequence[MemberCost], mixing: Mixing, held: HeldPeak, live_bytes: int
) -> tuple[str, ...]:
    return (
        *_advise_lanes(world),
        *_advise_mixing(world, mixing),
        *_advise_decoding(world, members, held.next_bytes, live_bytes),
    )


def _pixel_bytes(world: WorldPlan, members: Sequence[MemberCost], held: HeldPeak, live_bytes: int) -> int:
    """Return the bytes of the most decoded frames of a rank: of clips, and of two batches."""
    batch_bytes = _batch_size(world) * max(member.sample_bytes for member in members)
    return max(held.next_bytes, min(held.num_bytes, clip_bound(live_bytes, batch_bytes))) + 2 * batch_bytes


def _batch_size(world: WorldPlan) -> int:
    return world.steps.per_lane * len(world.lanes_of(0))


def _frames_before_first_batch(world: WorldPlan) -> int:
    rank = world.rank(0)
    batch = next(rank.batches(), None)
    return int(rank.queue.num_rows[: batch.num_needed].sum()) if batch else 0


def _describe_tail(world: WorldPlan) -> str:
    steps, lanes = world.steps, len(world.lanes_of(0))
    sizes = [per_lane * lanes for per_lane in steps.short]
    if not sizes:
        return "full batches only"
    text = (
        f"{counted(steps.num_full, 'full batch')}, then {' and '.join(map(str, sizes))} {plural(sizes[-1], 'frame')} "
        f"a rank"
    )
    extras = f", one more from each of the first {steps.extras} lanes" if steps.extras else ""
    repeats = f", filled up with {counted(steps.num_repeats, 'repeat')} a lane" if steps.num_repeats else ""
    return text + extras + repeats


def _advise_lanes(world: WorldPlan) -> list[str]:
    asked, used = world.plan.spec.lanes, world.plan.leg.lanes
    if asked == used:
        return []
    return [
        f"{asked} lanes do not share out over {counted(world.world_size, 'rank')}: this epoch has "
        f"{counted(used, 'lane')}"
    ]


def _advise_mixing(world: WorldPlan, mixing: Mixing) -> list[str]:
    batch, spec = mixing.local_batch, world.plan.spec
    if not spec.shuffle or batch.mean >= _GOOD_MIXING * batch.full_shuffle:
        return []
    poor = f"a rank's batch has {batch.mean:.1f} distinct episodes, a full shuffle {batch.full_shuffle:.1f}"
    wanted, live_spans = 2 * world.steps.per_lane, world.plan.leg.live_spans
    num_spans, share = int(world.plan.spans_per_lane.min()), int(world.plan.frames_per_lane.min())
    if live_spans < min(wanted, num_spans):
        return [
            f"{poor}: set live_spans to {wanted}, twice the {counted(world.steps.per_lane, 'frame')} a batch takes of "
            f"a lane"
        ]
    longest = int((world.plan.queues.spans.stop - world.plan.queues.spans.start).max())
    if num_spans <= live_spans:
        shorter = max(SHORTEST_SPAN, _power_of_two(share // wanted))
        if shorter >= longest:
            return [
                f"{poor}: a lane has only {counted(num_spans, 'span')}; use more episodes, fewer lanes or a smaller "
                f"batch"
            ]
        return [
            f"{poor}: a lane has only {counted(num_spans, 'span')}, set span_frames to {shorter} to share episodes out"
        ]
    typical = max(SHORTEST_SPAN, _power_of_two(world.plan.index.num_frames // (2 * len(world.plan.index))))
    shorter_spans = f"span_frames to {typical} or " if typical < longest else ""
    return [f"{poor}: lengths are uneven, set {shorter_spans}live_spans to {2 * live_spans}"]


def decoded_together(world: WorldPlan, members: Sequence[MemberCost], live_bytes: int) -> tuple[int, ...]:
    """Return how many frames of every dataset a rank decodes together: a clip, if the order has clips."""
    keys = world.plan.keys
    if keys.clip_frames:
        return keys.clip_frames
    frame_bytes = max(member.sample_bytes for member in members)
    return (unclipped_frames(keys, world.peak_live_frames() * frame_bytes, live_bytes),) * len(members)


def unclipped_frames(keys: OrderKeys, span_bytes: int, live_bytes: int) -> int:
    """Return how many frames a rank decodes together if the order has no clips.

    In a shuffled order it then holds nearly all of every live span (`span_bytes`), or decodes each frame alone.
    """
    return _UNCLIPPED_FRAMES if not keys.shuffle or span_bytes <= live_bytes else 1


def _advise_decoding(world: WorldPlan, members: Sequence[MemberCost], next_bytes: int, live_bytes: int) -> list[str]:
    if not any(member.cameras for member in members):
        return []
    advice, batch = [], _batch_size(world)
    if next_bytes > live_bytes:
        advice.append(
            f"a rank holds up to {_size(next_bytes)} of decoded frames, and live_bytes is {_size(live_bytes)}: lower "
            f"live_spans from {world.plan.leg.live_spans}, or let raypipe choose it"
        )
    pairs = zip(members, decoded_together(world, members, live_bytes), strict=True)
    cost = max(member.cost(size) for member, size in pairs)
    if cost > _DEAR:
        ample = resolve_live(world.plan.index, members, batch=batch, live_bytes=1 << 50)
        advice.append(f"decoding costs {cost:.1f} times as much as in file order: {describe_remedies(members, ample)}")
    return advice


def describe_remedies(members: Sequence[MemberCost], ample: LiveBudget) -> str:
    """Return what makes decoding cheaper, with figures."""
    interval = max(camera.keyframe_interval for member in members for camera in member.cameras)
    remedy = f"live_bytes={ample.clip_bytes:_} brings it to {ample.cost:.1f}"
    if interval > LONG_GOP_FRAMES:
        remedy += (
            f", and `raypipe reshard ROOT TARGET --gop 2` to about 1, in any memory: the videos have a keyframe every "
            f"{interval} frames only"
        )
    return remedy


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def _power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)
