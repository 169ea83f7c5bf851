"""Bring blocks of rows to each rank, which reads them itself or gets them from Ray Data; and keep the ranks in step.

The modules, from the bottom up (each may use those above it)::

    order.py          what a block request holds; the order of blocks that makes Ray's split hit   FeedSpec, SpanRequest
                      the planned rank; no files, no Ray
    metrics.py        the figures of a run on one rank, also for Prometheus                        LoaderStats, Meter
    agreement.py      what the ranks agree on; the limit on bad episodes                           Meeting, BadSpan
    block_context.py  the datasets, schema and specs that a task or a rank needs                   BlockContext
    blocks.py         read_block: the rows of spans with their windows, one row per frame to emit
                      open_block, on the rank: from the table back to arrays                       SpanBlock
    local.py          the rank reads its own rows: all of them, or those until Ray's first block   LocalSource
                      comes; no Ray
    ray_data.py       one read task, one block; streaming_split; settings; imports Ray             build_dataset
    feeder.py         the actor that plans and opens the splits, and a rank's end of one;          FeederSource, RayFeed
                      imports Ray

Plain functions on tables make the blocks, without Ray. The first row of a span carries its identity in the column
`HEADER`. A block may pack several spans, even of different datasets: its columns have the names, dtypes and widths of
the schema. **Nothing here raises for bad data**: the block keeps its planned rows and carries the error to the rank. A
failed task or a missing row would upset Ray's split for all ranks. On the rank, `loader.assembly` raises the
error or notes a `BadSpan`; the `Meeting` counts it against `max_bad_episodes`; the account records the missing frames
as skipped.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.feed.agreement import (
        BadDataSpec,
        BadSpan,
        Meeting,
        OnBadEpisode,
        PassPlace,
        add_span,
        describe_spans,
        name_attempt,
    )
    from raypipe.feed.block_context import BlockContext, clip_request, shown_frames
    from raypipe.feed.blocks import SpanBlock, as_objects, filler_block, open_block, read_block
    from raypipe.feed.feeder import (
        FeederSource,
        RayFeed,
        check_object_store,
        has_spare_cpu_nodes,
        start_feeder,
        start_ray,
    )
    from raypipe.feed.local import LOOPBACK, LocalFeed, LocalSource, serve_meeting
    from raypipe.feed.metrics import (
        STAGES,
        Interval,
        Live,
        LoaderStats,
        Meter,
        RecentStats,
        WorldStats,
        split_wait,
        sum_up,
    )
    from raypipe.feed.order import (
        BY_SIZE,
        FeedSpec,
        SpanRequest,
        feed_order,
        resident_spans,
        simulate_split,
        span_request,
    )
    from raypipe.feed.ray_data import as_samples, build_dataset
else:
    __all__, __getattr__ = lazy_names(__name__)
