"""Bring blocks of rows to each rank, which reads them itself or gets them from Ray Data; and keep the ranks in step.

::

    block_context.py     the datasets, schema and specs that a task or a rank needs             BlockContext
    read_blocks.py       read_rows      the rows of a span and those its windows reach       one row per frame read
                         add_windows    row features with their windows                      one row per frame to emit
    packing.py           packs spans into rows of an Arrow table, and unpacks them              PackedSpan
    opened_block.py      on the rank: from the table back to arrays                             SpanBlock
    spec.py              how blocks travel                                                      FeedSpec
    local.py             the rank reads its own rows; no Ray                                    LocalFeed
    order.py             the feed order, with which Ray's split sends each block to its rank    feed_order     pure
    own_rows.py          the first blocks of a rank, which it reads while Ray starts
    ray_source.py        one read task, one block; the settings of Ray Data                     Ray
    ray_cluster.py       starts a local Ray, and checks that the cluster has enough             Ray
    feeder.py            the actor that opens Ray Datasets from plans                           Ray
    groups.py            ranks that share a split of Ray, and their blocks of a pass           FeedGroup
    agreement.py         ranks compare their places, and share a list of bad data               Meeting
    remote_agreement.py  the same between processes that torchrun started                       RemoteMeeting
    bad_data.py          the policy on unreadable data, and the list of what was left out       BadDataSpec, SkipList
    metrics.py           the figures of a run on one rank                                       LoaderStats, Meter
    prometheus.py        the same on the metrics port of a Ray node

Plain functions on tables make the blocks, without Ray. The first row of a span carries its identity in the column
`HEADER`. A block may pack several spans, even of different datasets: its columns have the names, dtypes and widths of
the schema. **Nothing here raises for bad data**: the block keeps its planned rows and carries the error to the rank. A
failed task or a missing row would upset Ray's split for all ranks. There `loader.assembly` makes a `BadSpan` of it,
`agreement` counts it against the policy of `bad_data`, and the holes of the batch take it to the account.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.feed.agreement import Meeting, PassPlace, name_attempt
    from raypipe.feed.bad_data import BadDataSpec, BadSpan, OnBadEpisode, describe_spans, merge_spans
    from raypipe.feed.block_context import BlockContext, shown_frames
    from raypipe.feed.feeder import FeederSource, start_feeder
    from raypipe.feed.local import LocalSource
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
    from raypipe.feed.opened_block import SpanBlock, open_block
    from raypipe.feed.order import feed_order, resident_spans, simulate_split
    from raypipe.feed.packing import RowFrames, SpanRequest, as_objects, span_request
    from raypipe.feed.ray_cluster import check_object_store, has_spare_cpu_nodes, start_ray
    from raypipe.feed.ray_source import as_samples, build_dataset
    from raypipe.feed.read_blocks import add_windows, filler_block, read_rows
    from raypipe.feed.remote_agreement import LOOPBACK, RemoteMeeting, serve_meeting
    from raypipe.feed.spec import BY_SIZE, FeedSpec
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            "agreement": "Meeting PassPlace name_attempt",
            "bad_data": "BadDataSpec BadSpan OnBadEpisode describe_spans merge_spans",
            "block_context": "BlockContext shown_frames",
            "feeder": "FeederSource start_feeder",
            "local": "LocalSource",
            "metrics": "Interval Live LoaderStats Meter RecentStats STAGES WorldStats split_wait sum_up",
            "opened_block": "SpanBlock open_block",
            "order": "feed_order resident_spans simulate_split",
            "packing": "RowFrames SpanRequest as_objects span_request",
            "ray_cluster": "check_object_store has_spare_cpu_nodes start_ray",
            "ray_source": "as_samples build_dataset",
            "read_blocks": "add_windows filler_block read_rows",
            "remote_agreement": "LOOPBACK RemoteMeeting serve_meeting",
            "spec": "BY_SIZE FeedSpec",
        },
    )
