"""On which node a block is decoded: a wish that keeps files together and nodes busy."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from raypipe.source.placement import SPARE_SHARE, place_blocks

names = st.lists(st.sampled_from([f"videos/file-{i:03d}.mp4" for i in range(40)]), min_size=1, max_size=300)
clusters = st.lists(st.uuids().map(str), min_size=1, max_size=8, unique=True)


@given(names, clusters)
def test_no_node_has_more_than_its_share_and_the_spare(files, nodes):
    placed = Counter(place_blocks(files, nodes))

    assert set(placed) <= set(nodes)
    assert max(placed.values()) <= len(files) / len(nodes) * (1 + SPARE_SHARE) + 1


@given(names, clusters)
def test_blocks_of_a_file_stay_on_its_node_while_that_has_room(files, nodes):
    placed = place_blocks(files, nodes)
    homes = {file: place_blocks([file], nodes)[0] for file in set(files)}

    for i, (file, node) in enumerate(zip(files, placed, strict=True)):
        is_full = placed[:i].count(homes[file]) + 1 > len(files) / len(nodes) * (1 + SPARE_SHARE)
        assert node == homes[file] or is_full


@given(names, clusters)
def test_a_file_has_the_same_node_whatever_else_is_read(files, nodes):
    alone = place_blocks([files[0]], nodes)

    assert place_blocks([files[0]] * 1, list(reversed(nodes))) == alone


def test_a_block_without_a_file_may_run_anywhere():
    assert place_blocks(["", "a.mp4", ""], ["n1", "n2"])[::2] == ["", ""]
