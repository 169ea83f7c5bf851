"""The order of an epoch, as a pure function of (order fingerprint, order spec, seed, epoch, legs).

No files, no Ray, no torch, no clock: a plan made on the driver, on a rank or in a test is the same plan. To be read in
this order:

::

    index.py       which frames are anchors                          EpisodeIndex
    shares.py      of a mixture: what an epoch takes of each dataset Shares
    spans.py       cut into spans, ordered by a keyed hash           Spans
    lanes.py       shared out over lanes, equal up to one frame      LaneQueues
    livewindow.py  the frames of a lane in a sequence                Lane
    epoch.py       all of that, through the legs of an epoch         EpochPlan
    steps.py       frames per step, and the three tails              Steps
    world.py       who emits what on W ranks                         WorldPlan
    rank.py        a rank's blocks in arrival order, and batches     RankPlan
    state.py       where a run stands, and how it goes on            OrderState
    budget.py      bytes -> live spans and span length               LiveBudget
    mixing.py      distinct episodes per batch                       Mixing
    members.py     of a mixture: what each dataset gives, and when   MemberReport
    report.py      what `raypipe plan` says                          PlanReport

**Lanes.** Spans in the order of their hash go to the emptiest lane; the last ones are cut so that lanes are equal. A
rank serves one or more lanes, so the order does not depend on how many ranks there are if they divide the lanes.

::

    spans by hash   [c   ][a ][f     ][b  ][e    ][d ]...
    lane 0          [c   ][e    ]..............[x1]       every lane has the same number of frames;
    lane 1          [a ][b  ][d ]..............[x2]       span x was cut
    lane 2          [f     ]...................[y ]

**The live window.** At most `live_spans` spans of a lane are open at once. The frames of a span are spread evenly over
its life, so every batch sees nearly all live spans, and spans come and go first in, first out.

::

    lane 0     emitted frames ->
    c          c--c---c--c---c|
    e          -e--e--e---e--e--e|
    g             |g--g---g--g---g--g|
    h                 |h--h--h---h--h--h--h|

**Legs.** On a number of ranks that does not divide the lanes, what is left of the epoch becomes a new leg: the same
spans without the frames already emitted, shared out anew.
"""

from raypipe.plan.budget import DEFAULT_LIVE_BYTES, LiveBudget, resolve_live
from raypipe.plan.emit import Batch, BatchChunk
from raypipe.plan.epoch import EpochPlan, plan_epoch
from raypipe.plan.index import (
    SINGLE_DATASET,
    EpisodeIndex,
    SelectionSpec,
    Shares,
    concat_indexes,
    describe_selection,
    index_episodes,
)
from raypipe.plan.keyhash import ORDER_VERSION
from raypipe.plan.members import MemberReport, emitted_frames
from raypipe.plan.mixing import Distinct, Mixing, expected_distinct, measure_mixing
from raypipe.plan.rank import RankPlan, SpanQueue
from raypipe.plan.report import FrameSizes, PlanReport, report_plan
from raypipe.plan.shares import (
    UNVERSIONED,
    anchor_runs,
    describe_changes,
    first_laps,
    lap_sizes,
    mix_indexes,
    split_frames,
)
from raypipe.plan.spec import WHOLE_EPISODE, WORLD_SIZE, BatchSpec, Leg, OrderSpec, first_leg, parse_order
from raypipe.plan.state import (
    OrderState,
    Resumed,
    check_state,
    follow_state,
    resume,
    start,
    state_after,
    state_at,
    state_of,
)
from raypipe.plan.world import Frames, WorldPlan, plan_world

__all__ = [
    "DEFAULT_LIVE_BYTES",
    "ORDER_VERSION",
    "SINGLE_DATASET",
    "UNVERSIONED",
    "WHOLE_EPISODE",
    "WORLD_SIZE",
    "Batch",
    "BatchChunk",
    "BatchSpec",
    "Distinct",
    "EpisodeIndex",
    "EpochPlan",
    "FrameSizes",
    "Frames",
    "Leg",
    "LiveBudget",
    "MemberReport",
    "Mixing",
    "OrderSpec",
    "OrderState",
    "PlanReport",
    "RankPlan",
    "Resumed",
    "SelectionSpec",
    "Shares",
    "SpanQueue",
    "WorldPlan",
    "anchor_runs",
    "check_state",
    "concat_indexes",
    "describe_changes",
    "describe_selection",
    "emitted_frames",
    "expected_distinct",
    "first_laps",
    "first_leg",
    "follow_state",
    "index_episodes",
    "lap_sizes",
    "measure_mixing",
    "mix_indexes",
    "parse_order",
    "plan_epoch",
    "plan_world",
    "report_plan",
    "resolve_live",
    "resume",
    "split_frames",
    "start",
    "state_after",
    "state_at",
    "state_of",
]
