"""Check one part against the plan: unplanned frames, and differences in order, counts and repeats."""

from collections.abc import Iterator, Sequence

from raypipe.account.axis import FrameAxis
from raypipe.account.parts import Part, RankRecord
from raypipe.account.replay import RankReplay, Replay
from raypipe.account.runs import Runs, add_runs, keep_values, subtract_runs
from raypipe.text import counted, either


def check_part(part: Part, replay: Replay, epoch_skipped: Runs) -> Iterator[str]:
    """Yield every difference from the plan.

    Args:
        part: a part that has a plan.
        replay: the replay of the datasets.
        epoch_skipped: all frames that any part of the epoch skipped.
    """
    skipped = add_runs(*(skip.frames for skip in part.skipped))
    yield from _check_frames(part, replay, skipped)
    yield from _check_listed(part, replay)
    yield from _check_skips(part, replay.axis)
    if wrong := [rank for rank in part.torn if not 0 <= rank < part.world_size]:
        yield f"{part.describe()}: rank {wrong[0]} is said to have died, and there is none"
    replays = []
    for record in part.ranks:
        if not 0 <= record.rank < part.world_size:
            yield f"{part.describe()}: there is a record of rank {record.rank}"
            continue
        replays.append(replay.rank(part, record.rank, skipped, epoch_skipped))
        yield from _check_rank(part, record, replays[-1])
    yield from _check_repeats(part, replay, replays, epoch_skipped)


def _check_frames(part: Part, replay: Replay, skipped: Runs) -> Iterator[str]:
    unplanned = subtract_runs(add_runs(part.emitted, skipped), replay.frames(part, 0, part.num_steps))
    if unplanned:
        first = replay.axis.name_frames(unplanned)[0]
        yield (
            f"{part.describe()}: {counted(unplanned.num_values, 'frame')} {either(unplanned.num_values, 'is', 'are')} "
            f"not of these steps, first {first.describe()}"
        )
    told = sum(record.num_frames for record in part.ranks)
    if told != part.emitted.num_values:
        yield (
            f"{part.describe()}: the ranks count {counted(told, 'frame')}, and {part.emitted.num_values} "
            f"{either(part.emitted.num_values, 'is', 'are')} listed"
        )


def _check_listed(part: Part, replay: Replay) -> Iterator[str]:
    """Yield frames in the file of a rank that another rank had."""
    for rank, frames in part.listed:
        wrong = subtract_runs(frames, replay.frames(part, 0, part.num_steps, (rank,)))
        if wrong:
            first = replay.axis.name_frames(wrong)[0]
            yield (
                f"{part.describe()}: the file of rank {rank} has {counted(wrong.num_values, 'frame')} that "
                f"{either(wrong.num_values, 'is', 'are')} not the rank's, first {first.describe()}"
            )


def _check_skips(part: Part, axis: FrameAxis) -> Iterator[str]:
    """Yield skips with frames outside the episode that they name."""
    for skip in part.skipped:
        found = {(frames.dataset, frames.episode) for frames in axis.name_frames(skip.frames)}
        if found != {(axis.name_of(skip.dataset), skip.episode)}:
            owners = ", ".join(f"episode {episode}" for _, episode in sorted(found)) or "none"
            yield f"{part.describe()}: a skip names episode {skip.episode}, and its frames are of {owners}"


def _check_rank(part: Part, record: RankRecord, replay: RankReplay) -> Iterator[str]:
    where = f"rank {record.rank} of {part.describe()}"
    if record.digest != replay.digest:
        yield f"{where}: its frames, or their order, are not those of the plan"
    if record.num_frames != replay.num_frames:
        yield f"{where}: it counts {counted(record.num_frames, 'frame')}, and the plan {replay.num_frames}"
    if record.lanes != replay.lanes:
        yield f"{where}: its lanes gave {dict(record.lanes)} frames, and by the plan {dict(replay.lanes)}"


def _check_repeats(part: Part, replay: Replay, replays: Sequence[RankReplay], epoch_skipped: Runs) -> Iterator[str]:
    planned = add_runs(*(one.repeated for one in replays))
    lost = subtract_runs(subtract_runs(planned, keep_values(planned, epoch_skipped)), part.repeated)
    if lost:
        first = replay.axis.name_frames(lost)[0]
        yield (
            f"{part.describe()}: {counted(lost.num_values, 'repeat')} of the tail "
            f"{either(lost.num_values, 'is', 'are')} missing, first {first.describe()}"
        )
    if foreign := [frames for frames in replay.axis.name_frames(part.repeated) if frames.episode < 0]:
        yield f"{part.describe()}: it repeats a frame that is none: {foreign[0].describe()}"
    num_more = subtract_runs(part.repeated, planned).num_values
    least, most = sum(one.least_stand_ins for one in replays), sum(one.most_stand_ins for one in replays)
    if not least <= num_more <= most:
        yield (
            f"{part.describe()}: {counted(num_more, 'repeat')} {either(num_more, 'is', 'are')} not the tail's, and "
            f"{counted(least, 'batch')} {either(least, 'has', 'have')} no frame"
        )
