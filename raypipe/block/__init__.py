"""What travels from a read task to a rank: one block per span, as an Arrow table.

::

    context.py  what a task or a rank knows of the datasets and of their schema            BlockContext
    tasks.py    read_rows      the rows of the span and of its windows' reach              one row per frame read
                add_windows    row features with their windows                             one row per frame to emit
    opened.py   open_block     on the rank: arrays again                                   SpanBlock

Plain functions on tables, without Ray. The first row of a span carries its identity in the column `HEADER`; a block may
pack several spans, also of unlike datasets: its columns have the names, dtypes and widths of the schema. **Nothing here
raises for bad data**: the block keeps its planned rows and carries the error to the rank, since a task that fails, or a
row too few, would upset Ray's split for all ranks.
"""

from raypipe.block.context import BlockContext, shown_frames
from raypipe.block.opened import SpanBlock, open_block
from raypipe.block.tasks import add_windows, filler_block, read_rows

__all__ = [
    "BlockContext",
    "SpanBlock",
    "add_windows",
    "filler_block",
    "open_block",
    "read_rows",
    "shown_frames",
]
