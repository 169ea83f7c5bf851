"""The order of an epoch, as a pure function of (order fingerprint, order spec, seed, epoch, legs).

It uses no files, no Ray, no torch and no clock: the driver, a rank and a test compute the same plan. Read the modules
in this order:

::

    spec.py        what a user decides about the order               OrderSpec, BatchSpec
    keyhash.py     the keyed hashes behind the order                 OrderKeys
    index.py       which frames are anchors, of which dataset        EpisodeIndex, Shares, SelectionSpec
    rates.py       every n-th frame, and weights: how often each     Rates
    shares.py      what an epoch takes of each dataset of a mixture  interleave
    spans.py       runs cut into spans, ordered by a keyed hash      Spans
    lanes.py       spans shared out to lanes, equal up to one frame  LaneQueues
    livewindow.py  the order in which a lane emits its frames        Lane
    epoch.py       all of the above, through the legs of an epoch    EpochPlan
    steps.py       frames per step, and the three tails              Steps
    emit.py        from positions in lanes to batches                BatchChunk
    world.py       which rank of W emits which frames                WorldPlan
    rank.py        a rank's blocks in arrival order, and batches     RankPlan
    state.py       the position of a run, and how it resumes         OrderState
    budget.py      bytes -> clips, live spans and span length        LiveBudget
    held.py        decoded frames that a rank holds                  HeldPeak
    mixing.py      distinct episodes per batch, near repeats         Mixing
    members.py     what each dataset of a mixture gives, and when    MemberReport
    report.py      what `raypipe plan` prints                        PlanReport

**Lanes.** Each span, in the order of the hashes, goes to the emptiest lane; the last spans are cut to make lanes equal.
A rank serves one or more lanes, so every number of ranks that divides the lanes gives the same order.

::

    spans by hash   [c   ][a ][f     ][b  ][e    ][d ]...
    lane 0          [c   ][e    ]..............[x1]       every lane has the same number of frames;
    lane 1          [a ][b  ][d ]..............[x2]       span x was cut
    lane 2          [f     ]...................[y ]

**The live window.** At most `live_spans` spans of a lane are open at once. The frames of a span are spread evenly over
its life, so a batch draws on as many live spans as it has frames. Spans come and go first in, first out.

::

    lane 0     emitted frames ->
    c          c--c---c--c---c|
    e          -e--e--e---e--e--e|
    g             |g--g---g--g---g--g|
    h                 |h--h--h---h--h--h--h|

**Legs.** If the number of ranks does not divide the lanes, or the batch does not share out over them, the rest of the
epoch becomes a new leg: the same spans without the frames already emitted, shared out over new lanes.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.plan.budget import (
        DEFAULT_LIVE_BYTES,
        MOST_LIVE_SPANS,
        CameraCost,
        LiveBudget,
        MemberCost,
        clip_bound,
        resolve_live,
    )
    from raypipe.plan.emit import Batch
    from raypipe.plan.epoch import EpochPlan, plan_epoch
    from raypipe.plan.held import measure_held
    from raypipe.plan.index import (
        EQUAL,
        SINGLE_DATASET,
        EpisodeIndex,
        SelectionSpec,
        Shares,
        concat_indexes,
        describe_selection,
        index_episodes,
        passing_episodes,
    )
    from raypipe.plan.keyhash import ORDER_VERSION, Ints
    from raypipe.plan.livewindow import Lane
    from raypipe.plan.members import describe_frames, emitted_frames
    from raypipe.plan.mixing import NearRepeats, expected_distinct, measure_mixing
    from raypipe.plan.rank import RankPlan
    from raypipe.plan.rates import ragged_arange
    from raypipe.plan.report import AHEAD_BATCHES, PlanReport, report_plan, unclipped_frames
    from raypipe.plan.shares import (
        anchor_runs,
        describe_changes,
        first_laps,
        lap_sizes,
        make_keys,
        mix_indexes,
        run_frames,
        split_frames,
    )
    from raypipe.plan.spans import order_frames
    from raypipe.plan.spec import (
        WHOLE_EPISODE,
        WHOLE_SPAN,
        BatchSpec,
        Leg,
        OrderSpec,
        check_whole,
        first_leg,
        parse_order,
    )
    from raypipe.plan.state import OrderState, Resumed, follow_state, resume, start, state_after, state_at, state_of
    from raypipe.plan.steps import Steps
    from raypipe.plan.world import WorldPlan, plan_world
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "budget": "CameraCost DEFAULT_LIVE_BYTES LiveBudget MOST_LIVE_SPANS MemberCost clip_bound resolve_live",
            "emit": "Batch",
            "epoch": "EpochPlan plan_epoch",
            "held": "measure_held",
            "index": (
                "EQUAL EpisodeIndex SINGLE_DATASET SelectionSpec Shares concat_indexes describe_selection "
                "index_episodes passing_episodes"
            ),
            "keyhash": "Ints ORDER_VERSION",
            "livewindow": "Lane",
            "members": "describe_frames emitted_frames",
            "mixing": "NearRepeats expected_distinct measure_mixing",
            "rank": "RankPlan",
            "rates": "ragged_arange",
            "report": "AHEAD_BATCHES PlanReport report_plan unclipped_frames",
            "shares": "anchor_runs describe_changes first_laps lap_sizes make_keys mix_indexes run_frames split_frames",
            "spans": "order_frames",
            "spec": "BatchSpec Leg OrderSpec WHOLE_EPISODE WHOLE_SPAN check_whole first_leg parse_order",
            "state": "OrderState Resumed follow_state resume start state_after state_at state_of",
            "steps": "Steps",
            "world": "WorldPlan plan_world",
        },
    )
