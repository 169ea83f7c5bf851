"""Blocks on their way through Ray Data.

::

    feed_order.py   the order in which blocks are fed, so that Ray's split delivers each to its rank    pure
    groups.py       ranks that share a split, and their blocks, chapter by chapter                      pure
    own_rows.py     the first blocks of a rank, read by itself while Ray starts
    datasource.py   one read task, one block; the settings of Ray Data that raypipe needs               Ray
    cluster.py      starts a local Ray, and tells whether one has what a pipeline needs                 Ray
"""

from raypipe.source.feed_order import Feed, feed_order, resident_spans, simulate_split
from raypipe.source.spec import BY_SIZE, FeedSpec

__all__ = ["BY_SIZE", "Feed", "FeedSpec", "feed_order", "resident_spans", "simulate_split"]
