"""On which node a remote video is decoded: always the same, so that one node fetches it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.decode.executors import home_node

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
