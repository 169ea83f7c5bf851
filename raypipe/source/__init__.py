"""Blocks on their way through Ray Data.

::

    feed_order.py   the order in which blocks are fed, so that Ray's split delivers each to its rank    pure
    datasource.py   one read task, one block; the settings of Ray Data that raypipe needs               Ray
    placement.py    on which node a block is decoded                                                    Ray
    free_cpu.py     whether a CPU is left for reading                                                   Ray
"""

from raypipe.source.feed_order import Feed, feed_order, resident_spans, simulate_split

__all__ = ["Feed", "feed_order", "resident_spans", "simulate_split"]
