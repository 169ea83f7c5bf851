"""The order of an epoch, as a pure function of (order fingerprint, order spec, seed, epoch, legs).

It uses no files, no Ray, no torch and no clock: the driver, a rank and a test compute the same plan. An *anchor* is a
frame that a sample starts from. A *leg* is a stretch of an epoch on one number of lanes.

The modules, from the bottom up (each may use those above it)::

    spec.py     what a user decides about the order                                     OrderSpec, BatchSpec
    keyhash.py  the keyed hashes behind the order                                       OrderKeys
    rates.py    every n-th frame, and weights: how often each                           Rates
    index.py    which frames are anchors, of which dataset                              EpisodeIndex, SelectionSpec
    spans.py    what an epoch takes, cut into spans, in an order                        Spans
    lanes.py    spans shared out to lanes, and the order of their frames                LaneQueues, Lane
    rank.py     frames per step; a rank's blocks and its batches                        Steps, RankPlan
    epoch.py    all of the above, and which rank emits which frames                     EpochPlan, WorldPlan
    state.py    the position of a run, and how it resumes                               OrderState
    budget.py   memory -> clips, live spans, span length; the most decoded frames held  LiveBudget
    mixing.py   distinct episodes per batch, near repeats                               Mixing
    report.py   what `raypipe plan` prints: memory of a rank, mixing, advice            PlanReport

`loader.job` adds the source of the dataset to the state, and `train` writes it to a file.

**Lanes.** Each span, in the order of the hashes, goes to the emptiest lane; the last spans are cut to make lanes equal.
A rank serves one or more lanes, so every number of ranks that divides the lanes gives the same order.

::

    spans by hash   [c   ][a ][f     ][b  ][e    ][d ]...
    lane 0          [c   ][e    ]..............[x1]       every lane has the same number of frames;
    lane 1          [a ][b  ][d ]..............[x2]       span x was cut
    lane 2          [f     ]...................[y ]

**The live window.** At most `live_spans` spans of a lane are open at once. A span gives its frames at about even
intervals while it is open, so the frames of a batch mostly come from different spans. Spans come and go first in, first
out; ``lanes.py`` draws it.

**Legs.** If the number of ranks does not divide the lanes, or the batch does not share out over them, the rest of the
epoch becomes a new leg: the same spans without the frames already emitted, shared out over new lanes.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.plan.budget import (
        AHEAD_BATCHES,
        DEFAULT_LIVE_BYTES,
        MOST_LIVE_SPANS,
        CameraCost,
        LiveBudget,
        MemberCost,
        clip_bound,
        measure_held,
        resolve_live,
    )
    from raypipe.plan.epoch import EpochPlan, WorldPlan, check_rank, plan_epoch, plan_world
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
    from raypipe.plan.lanes import Lane
    from raypipe.plan.mixing import NearRepeats, expected_distinct, measure_mixing
    from raypipe.plan.rank import Batch, RankPlan, Steps
    from raypipe.plan.rates import ragged_arange
    from raypipe.plan.report import PlanReport, describe_frames, emitted_frames, report_plan, unclipped_frames
    from raypipe.plan.spans import (
        anchor_runs,
        first_laps,
        lap_sizes,
        make_keys,
        mix_indexes,
        order_frames,
        run_frames,
        split_frames,
    )
    from raypipe.plan.spec import (
        WHOLE_EPISODE,
        WHOLE_SPAN,
        BatchSpec,
        Leg,
        OrderSpec,
        check_whole,
        check_world_size,
        first_leg,
        parse_order,
    )
    from raypipe.plan.state import (
        OrderState,
        Resumed,
        describe_changes,
        follow_state,
        resume,
        start,
        state_after,
        state_at,
        state_of,
    )
else:
    __all__, __getattr__ = lazy_names(__name__)
