"""On which node a block is decoded: where the cache has its file, without changing the order.

A file belongs to the node that ranks highest for it, the same in every epoch and job, so that one node of a cluster
fetches it and the others need not. No node gets more than its share of the blocks and a little: what is over goes to
the next in the file's ranking. A node that is gone or has no CPU is replaced by Ray: placement is a wish.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.block import BlockContext
from raypipe.packed import SpanRequest

SPARE_SHARE: Final = 0.1
"""Blocks that a node may have beyond its equal share."""

_ANYWHERE: Final = ""


def place_blocks(files: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return a node for every block by the file that it reads; an empty name, of block or node, stands for anywhere."""
    most = math.ceil(sum(1 for file in files if file) / max(1, len(nodes)) * (1 + SPARE_SHARE))
    taken: Counter[str] = Counter()
    placed = []
    for file in files:
        chosen = next((node for node in _ranking(file, nodes) if taken[node] < most), _ANYWHERE) if file else _ANYWHERE
        taken[chosen] += 1
        placed.append(chosen)
    return placed


def _ranking(file: str, nodes: Sequence[str]) -> list[str]:
    return sorted(nodes, key=lambda node: hashlib.blake2b(f"{node} {file}".encode(), digest_size=8).digest())


def place_decoding(context: BlockContext, blocks: Sequence[tuple[SpanRequest, ...] | int]) -> list[str]:
    """Return the node that decodes each block, by the first video that it reads; none where there is no choice."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1)
    return place_blocks([_first_video(context, block) for block in blocks], nodes) if len(nodes) > 1 else []


def _first_video(context: BlockContext, block: tuple[SpanRequest, ...] | int) -> str:
    if isinstance(block, int):
        return ""
    meta, row = context.datasets[block[0].dataset].meta, context.find_episode(block[0])[1]
    own = next(iter(context.member_of(block[0]).cameras.values()), "")
    return f"{meta.root}/{meta.video_file(row, own)}" if own in meta.episodes.videos else ""


class Placement:
    """Tells Ray Data where each task of an operator shall run, in the order in which it starts them.

    Ray asks for the arguments of one task after the other, in the order of the blocks. Were it to ask in another order,
    blocks would be decoded elsewhere, with the same values.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = list(nodes)
        self._next = 0

    def __call__(self) -> dict[str, Any]:
        """Return the arguments of the next task."""
        node = self._nodes[self._next] if self._next < len(self._nodes) else _ANYWHERE
        self._next += 1
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)} if node else {}
