"""On which node a block is decoded: where the cache has its file, without changing the order.

A file belongs to the node that ranks highest for it, the same in every epoch and job, so that one node of a cluster
fetches it and the others need not. A node with more CPUs is the home of more files, and none gets more than its share
of the blocks and a little: what is over goes to the next in the file's ranking. Placement is a wish: where the node is
gone, or has no CPU free at that moment, Ray takes another. It never waits for one, since the CPUs of a node may be held
for as long as the training lasts.
"""

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.block import BlockContext
from raypipe.packed import SpanRequest

SPARE_SHARE: Final = 0.1
"""Blocks that a node may have beyond its share."""

_ANYWHERE: Final = ""

_EXECUTOR: Final = "StreamingExecutor"
"""How the name of Ray Data's thread begins that starts tasks; a tripwire test pins it."""


def place_blocks(files: Sequence[str], nodes: Mapping[str, float]) -> list[str]:
    """Return a node for every block by the file that it reads; an empty name, of block or node, stands for anywhere.

    Args:
        files: the file of each block.
        nodes: the CPUs of each node, by which it gets its share.
    """
    share = sum(1 for file in files if file) * (1 + SPARE_SHARE) / max(1.0, sum(nodes.values()))
    most = {node: math.ceil(share * num_cpus) for node, num_cpus in nodes.items()}
    taken: Counter[str] = Counter()
    placed = []
    for file in files:
        chosen = _ANYWHERE
        if file:
            chosen = next((node for node in _ranking(file, nodes) if taken[node] < most[node]), _ANYWHERE)
        taken[chosen] += 1
        placed.append(chosen)
    return placed


def _ranking(file: str, nodes: Mapping[str, float]) -> list[str]:
    """Return the nodes for a file, the first in proportion to the CPUs: weighted rendezvous hashing."""

    def rank(node: str) -> float:
        digest = hashlib.blake2b(f"{node} {file}".encode(), digest_size=8).digest()
        # As many bits as a float has: it stays below 1.
        return -math.log1p(-(int.from_bytes(digest, "big") >> 11) / (1 << 53)) / nodes[node]

    return sorted(nodes, key=rank)


def place_decoding(context: BlockContext, blocks: Sequence[tuple[SpanRequest, ...] | int]) -> list[str]:
    """Return the node that decodes each block, by the first video that it reads; none where there is no choice."""
    cpus = {node["NodeID"]: float(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
    nodes = {node: num_cpus for node, num_cpus in sorted(cpus.items()) if num_cpus >= 1}
    return place_blocks([_first_video(context, block) for block in blocks], nodes) if len(nodes) > 1 else []


def _first_video(context: BlockContext, block: tuple[SpanRequest, ...] | int) -> str:
    if isinstance(block, int):
        return ""
    meta, row = context.datasets[block[0].dataset].meta, context.find_episode(block[0])[1]
    own = next(iter(context.member_of(block[0]).cameras.values()), "")
    return f"{meta.root}/{meta.video_file(row, own)}" if own in meta.episodes.videos else ""


class Placement:
    """Tells Ray Data where each task of an operator shall run, in the order in which it starts them.

    Its executor asks for the arguments of one task after the other, in the order of the blocks. What watches the memory
    of tasks asks too: from another thread before the first one, which is given none and not counted; and from the
    executor's later, unless the context of the dataset has it off. Were Ray to ask in another order, blocks would be
    decoded elsewhere, with the same values.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = list(nodes)
        self._next = 0

    def __call__(self) -> dict[str, Any]:
        """Return the arguments of the next task."""
        if not threading.current_thread().name.startswith(_EXECUTOR):
            return {}
        node = self._nodes[self._next] if self._next < len(self._nodes) else _ANYWHERE
        self._next += 1
        return {"scheduling_strategy": prefer_node(node)} if node else {}


def prefer_node(node: str) -> NodeAffinitySchedulingStrategy | str:
    """Return the strategy of a task that shall run on a node if a CPU is free there, else wherever one is."""
    try:
        # `soft` alone waits for ever for a node whose CPUs are held. The other argument is private to Ray: a tripwire
        # test pins what it does.
        return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    except TypeError:
        # A Ray without it: better anywhere than never.
        return "DEFAULT"
