"""Ray's split rule, simulated, takes a feed apart into the planned queues; a video has one home among the nodes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import WORLDS, lengths, make_index, plan_resumed, plan_start, specs

from raypipe.decode.executors import home_node
from raypipe.errors import ConfigError
from raypipe.feed import feed_order, resident_spans, simulate_split
from raypipe.plan import state_after


def split_by_hand(rows, world_size):
    loads, ranks = [0] * world_size, []
    for count in rows:
        ranks.append(min(range(world_size), key=lambda rank: (loads[rank], rank)))
        loads[ranks[-1]] += count
    return ranks


@st.composite
def balanced_queues(draw):
    """Queues whose totals differ by at most one row, extras on the lowest ranks, cut anywhere."""
    world_size, share = draw(st.integers(1, 5)), draw(st.integers(1, 30))
    extras = draw(st.integers(0, world_size - 1))
    queues = []
    for rank in range(world_size):
        total = share + (rank < extras)
        cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=8))) if total > 1 else []
        queues.append(np.diff([0, *cuts, total]))
    return queues


@settings(max_examples=60)
@given(balanced_queues(), st.integers(1, 4))
def test_the_split_delivers_every_block_to_its_rank_in_order(queues, spans_per_block):
    feed = feed_order(queues, spans_per_block=spans_per_block)

    delivered = split_by_hand(feed.num_rows.tolist(), len(queues))

    assert delivered == feed.rank.tolist() == simulate_split(feed.num_rows, len(queues)).tolist()
    for rank, queue in enumerate(queues):
        mine = feed.rank == rank
        spans = [
            span for first, stop in zip(feed.first[mine], feed.stop[mine], strict=True) for span in range(first, stop)
        ]
        assert spans == list(range(len(queue)))
        rows = [queue[first:stop].sum() for first, stop in zip(feed.first[mine], feed.stop[mine], strict=True)]
        assert feed.num_rows[mine].tolist() == rows


def plans(frames, spec, data):
    """Yield the plan of a first start, of a resume on the same world size, and of one on another."""
    index, world_size = make_index(frames), data.draw(st.sampled_from(WORLDS))
    try:
        world = plan_start(index, spec, world_size=world_size)
    except ConfigError:
        return
    yield world
    state = state_after(world, data.draw(st.integers(0, world.num_steps - 1)))
    if not state.legs:
        return
    yield plan_resumed(state, index, spec, world_size=world_size)
    yield plan_resumed(state, index, spec, world_size=data.draw(st.sampled_from([*WORLDS, 5])))


@settings(max_examples=30)
@given(lengths, specs, st.sampled_from([1, 1, 2, 5]), st.data())
def test_the_queues_of_any_plan_can_be_fed_and_ranks_hold_no_more_than_the_slack(frames, spec, spans_per_block, data):
    for world in plans(frames, spec, data):
        ranks = [world.rank(rank) for rank in range(world.world_size)]
        feed = feed_order([rank.queue.num_rows for rank in ranks], spans_per_block=spans_per_block)
        assert simulate_split(feed.num_rows, world.world_size).tolist() == feed.rank.tolist()
        if world.num_steps:
            slack = resident_spans(feed, [rank.lives() for rank in ranks], world.steps)
            assert (most_held(world, ranks, feed) <= slack).all()


def most_held(world, ranks, feed):
    """Return the most spans that each rank holds when a block arrives only after all that were fed before it."""
    batches = [list(rank.batches()) for rank in ranks]
    arrived, gone, most = np.zeros((3, world.world_size), dtype=np.int64)
    fed = 0
    for step in range(world.num_steps):
        for rank in range(world.world_size):
            while arrived[rank] < batches[rank][step].num_needed:
                arrived[feed.rank[fed]] = feed.stop[fed]
                fed += 1
        most = np.maximum(most, arrived - gone)
        gone += [len(batches[rank][step].done) for rank in range(world.world_size)]
    return most


def test_queues_that_no_order_can_feed_are_refused_with_their_rows():
    with pytest.raises(AssertionError, match=r"cannot deliver these queues: .*rows per rank: \[9, 3\]"):
        feed_order([np.array([3, 3, 3]), np.array([3])])
    with pytest.raises(AssertionError, match=r"rows per rank: \[3, 4\]"):
        feed_order([np.array([3]), np.array([3, 1])])
    with pytest.raises(AssertionError, match=r"ranks \[1\] have blocks without rows"):
        feed_order([np.array([3, 1]), np.array([4, 0])])


def test_queues_with_nothing_in_them_are_an_empty_feed():
    assert len(feed_order([np.empty(0, dtype=np.int64)] * 3)) == 0


files = st.sampled_from([f"videos/file-{i:03d}.mp4" for i in range(40)])
clusters = st.dictionaries(st.uuids().map(str), st.integers(1, 64), min_size=1, max_size=8)
"""The CPUs of the nodes."""


@given(files, clusters)
def test_a_file_has_the_same_node_whatever_the_order_of_the_nodes(file, nodes):
    assert home_node(file, nodes) == home_node(file, dict(reversed(nodes.items())))


def test_files_have_their_homes_in_proportion_to_the_cpus():
    nodes = {"small": 2, "large": 64}

    homes = Counter(home_node(f"videos/file-{i:04d}.mp4", nodes) for i in range(3300))

    assert homes["small"] == pytest.approx(100, abs=40)


@given(files, clusters, st.integers(2, 9))
def test_a_node_that_grows_takes_files_from_others_and_loses_none(file, nodes, times):
    grown = next(iter(nodes))
    before = home_node(file, nodes)

    after = home_node(file, {**nodes, grown: nodes[grown] * times})

    assert after in (before, grown)


@given(files, clusters)
def test_a_node_that_goes_moves_only_its_own_files(file, nodes):
    gone = next(iter(nodes))
    rest = {node: number for node, number in nodes.items() if node != gone}
    before = home_node(file, nodes)

    assert not rest or before == gone or home_node(file, rest) == before
