"""On which node a block is decoded: a wish that keeps files together and nodes busy."""

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.source import placement
from raypipe.source.placement import SPARE_SHARE, Placement, place_blocks

names = st.lists(st.sampled_from([f"videos/file-{i:03d}.mp4" for i in range(40)]), min_size=1, max_size=300)
clusters = st.dictionaries(st.uuids().map(str), st.integers(1, 64), min_size=1, max_size=8)
"""The CPUs of the nodes."""


def most_of(node, files, nodes):
    return len(files) * nodes[node] / sum(nodes.values()) * (1 + SPARE_SHARE)


@given(names, clusters)
def test_no_node_has_more_than_its_share_and_the_spare(files, nodes):
    placed = Counter(place_blocks(files, nodes))

    assert set(placed) <= set(nodes)
    assert all(placed[node] <= most_of(node, files, nodes) + 1 for node in nodes)


@given(names, clusters)
def test_blocks_of_a_file_stay_on_its_node_while_that_has_room(files, nodes):
    placed = place_blocks(files, nodes)
    homes = {file: place_blocks([file], nodes)[0] for file in set(files)}

    for i, (file, node) in enumerate(zip(files, placed, strict=True)):
        is_full = placed[:i].count(homes[file]) + 1 > most_of(homes[file], files, nodes)
        assert node == homes[file] or is_full


@given(names, clusters)
def test_a_file_has_the_same_node_whatever_the_order_of_the_nodes(files, nodes):
    alone = place_blocks([files[0]], nodes)

    assert place_blocks([files[0]], dict(reversed(nodes.items()))) == alone


def test_files_have_their_homes_in_proportion_to_the_cpus():
    nodes = {"small": 2, "large": 64}

    homes = Counter(place_blocks([f"videos/file-{i:04d}.mp4"], nodes)[0] for i in range(3300))

    assert homes["small"] == pytest.approx(100, abs=40)


@given(names, clusters, st.integers(2, 9))
def test_a_node_that_grows_takes_files_from_others_and_loses_none(files, nodes, times):
    grown = next(iter(nodes))
    before = {file: place_blocks([file], nodes)[0] for file in files}

    after = {file: place_blocks([file], {**nodes, grown: nodes[grown] * times})[0] for file in files}

    assert all(after[file] in {home, grown} for file, home in before.items())


def test_a_block_without_a_file_may_run_anywhere():
    assert place_blocks(["", "a.mp4", ""], {"n1": 1, "n2": 1})[::2] == ["", ""]


def test_a_ray_that_cannot_be_kept_from_waiting_for_a_node_is_given_no_wish(monkeypatch):
    monkeypatch.setattr(placement, "NodeAffinitySchedulingStrategy", lambda node, soft: (node, soft))

    assert ask_as("StreamingExecutor-1", Placement(["ab" * 28])) == {"scheduling_strategy": "DEFAULT"}


def test_whoever_else_asks_than_the_executor_is_told_nothing_and_not_counted(monkeypatch):
    monkeypatch.setattr(placement, "prefer_node", lambda node: node)
    placed = Placement(["one", "other"])

    asked = [ask_as(name, placed) for name in ("MainThread", "StreamingExecutor-1", "watcher", "StreamingExecutor-1")]

    assert asked == [{}, {"scheduling_strategy": "one"}, {}, {"scheduling_strategy": "other"}]


def ask_as(name, placed):
    """Return what a thread of this name is told."""
    told = []
    thread = threading.Thread(target=lambda: told.append(placed()), name=name)
    thread.start()
    thread.join()
    return told[0]
