"""Which episodes share a file, what the copy may be asked for, and how statistics are pooled."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raypipe.errors import ConfigError, DatasetError
from raypipe.format import QUANTILES, Feature, Tasks
from raypipe.reshard import ReshardSpec, parse_spec
from raypipe.reshard.data import computed_kinds, describe_rows
from raypipe.reshard.meta import StatsPool, stats_arrays
from raypipe.reshard.mp4 import Description
from raypipe.reshard.plan import Piece, number_tasks, plan_data_files, plan_numbering, plan_video_files
from raypipe.storage import open_storage

sizes = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@given(sizes, st.integers(10, 300))
def test_every_episode_has_one_data_file_and_files_are_filled_in_order(size_bytes, limit):
    units = plan_data_files(np.array(size_bytes, dtype=np.float64), limit)

    assert [e for unit in units for e in range(unit.start, unit.stop)] == list(range(len(size_bytes)))
    assert [unit.number for unit in units] == list(range(len(units)))
    for unit in units:
        total = sum(size_bytes[unit.start : unit.stop])
        assert total < limit or unit.stop - unit.start == 1
        if unit.stop < len(size_bytes):
            assert total + size_bytes[unit.stop] >= limit


def piece(row, size, description):
    return Piece(
        storage=open_storage("/nowhere"),
        name=f"{row}.mp4",
        rows=(row,),
        first_frame=(0,),
        start=0,
        stop=10,
        size_bytes=size,
        description=description,
        num_lead_in=0,
        has_other_tracks=False,
    )


KINDS = [Description(samples=name, timescale=1, display=b"") for name in (b"one", b"two")] + [None]


@given(st.lists(st.tuples(st.integers(1, 100), st.sampled_from(KINDS)), min_size=1, max_size=40), st.integers(10, 300))
def test_pieces_of_different_descriptions_never_share_a_file(items, limit):
    pieces = [piece(row, size, kind) for row, (size, kind) in enumerate(items)]

    units = plan_video_files("camera", list(reversed(pieces)), limit)

    assert [p.rows[0] for unit in units for p in unit.pieces] == list(range(len(pieces)))
    for unit in units:
        assert len({p.description for p in unit.pieces}) == 1
        assert sum(p.size_bytes for p in unit.pieces) < limit or len(unit.pieces) == 1
        assert unit.pieces[0].description is not None or len(unit.pieces) == 1


def test_file_numbers_beyond_a_chunk_go_to_the_next_folder():
    units = plan_data_files(np.full(1002, 10.0), 10)

    assert units[999].path == "data/chunk-000/file-999.parquet"
    assert units[1001].path == "data/chunk-001/file-001.parquet"


@given(st.lists(st.integers(1, 9), min_size=2, max_size=30), st.data())
def test_kept_episodes_are_numbered_without_gaps_in_their_order(lengths, data):
    numbers = sorted(data.draw(st.sets(st.integers(0, 99), min_size=len(lengths), max_size=len(lengths))))
    excluded = data.draw(st.sets(st.sampled_from(numbers), max_size=len(numbers) - 1))
    episodes = SimpleNamespace(episode_index=np.array(numbers), length=np.array(lengths))

    numbering = plan_numbering(SimpleNamespace(episodes=episodes), tuple(excluded))

    kept = [row for row, number in enumerate(numbers) if number not in excluded]
    assert numbering.rows.tolist() == kept
    assert numbering.from_index.tolist() == [sum(lengths[row] for row in kept[:i]) for i in range(len(kept))]
    assert [numbering.new_number[row] for row in kept] == list(range(len(kept)))


def test_a_task_that_stands_twice_stands_once():
    tasks = number_tasks(Tasks({0: "a", 3: "b", 4: "a"}))

    assert tasks.texts == ("a", "b")
    assert tasks.renumber(np.array([4, 3, 0, 4]), "here").tolist() == [0, 1, 0, 0]
    with pytest.raises(DatasetError, match="a row of here has task_index 7"):
        tasks.renumber(np.array([0, 7]), "here")


floats = st.floats(-100, 100, width=32)


@given(st.lists(arrays(np.float32, st.tuples(st.integers(1, 8), st.just(3)), elements=floats), min_size=1, max_size=6))
def test_pooled_statistics_are_those_of_all_rows(episodes):
    features = {"action": Feature(name="action", kind="vector", dtype="float32", shape=(3,))}
    kinds = computed_kinds(features, ["action"])
    pool = StatsPool()

    for values in episodes:
        table = pa.table({"action": pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 3)})
        pool.add(stats_arrays([describe_rows(table, features, ["action"], "here")], kinds))

    found = pool.result()["action"]
    every = np.concatenate(episodes).astype(np.float64)
    for name, value in {"min": every.min(0), "max": every.max(0), "mean": every.mean(0), "std": every.std(0)}.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-4)
    assert found["count"] == [len(every)]


@given(arrays(np.float64, st.tuples(st.integers(1, 30), st.integers(1, 3)), elements=st.floats(-1e3, 1e3)))
def test_quantiles_are_numpys(values):
    table = pa.table({"a": pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])})
    features = {"a": Feature(name="a", kind="vector", dtype="float32", shape=values.shape[1:])}

    found = describe_rows(table, features, ["a"], "here")["a"]

    expected = np.quantile(values.astype(np.float32).astype(np.float64), list(QUANTILES.values()), axis=0)
    np.testing.assert_allclose([found[name] for name in QUANTILES], expected.reshape(5, -1), rtol=1e-12, atol=1e-9)


def test_a_feature_that_some_episodes_do_not_describe_is_not_pooled():
    features = {"action": Feature(name="action", kind="vector", dtype="float32", shape=(1,))}
    kinds = computed_kinds(features, ["action"])
    described = describe_rows(pa.table({"action": pa.array([1.0, 2.0])}), features, ["action"], "here")
    pool = StatsPool()

    pool.add(stats_arrays([described, {}], kinds))

    assert pool.result() == {}


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"data_mb": 0}, "data_mb must be at least 1"),
        ({"video_mb": -1}, "video_mb must be at least 1"),
        ({"gop": 0}, "gop must be at least 1"),
        ({"codec": "mpeg2"}, "codec must be one of 'source', 'h264', 'av1', 'hevc', 'vp9', got 'mpeg2'"),
        ({"size": (30, 64)}, "size is 30x64"),
        ({"size": (64, 65)}, "even height and width"),
        ({"size": (32, 32), "codec": "av1"}, "at least 64x64"),
        ({"crf": -1}, "crf must be at least 0"),
        ({"exclude": (-2,)}, r"exclude has the episodes \[-2\]"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(choice, told):
    with pytest.raises(ConfigError, match=told):
        ReshardSpec(**choice)


def words(**changed):
    encoding = {"gop": "source", "size": "source", "codec": "source", "crf": 24}
    limits = {"data_mb": 100, "video_mb": 200}
    plain = {"exclude": "", "exclude_file": None, "drop_cameras": ()}
    return parse_spec(
        **(plain | {k: v for k, v in changed.items() if k in plain}),
        encoding=encoding | {k: v for k, v in changed.items() if k in encoding},
        limits=limits,
    )


def test_words_of_the_command_line_become_a_spec(tmp_path):
    listed = tmp_path / "bad.txt"
    listed.write_text("# why\n9\n")

    spec = words(exclude="3, 6-7,", exclude_file=listed, gop="4", size="64x48", codec="h264", drop_cameras=["a"])

    assert spec == ReshardSpec(exclude=(3, 6, 7, 9), drop_cameras=("a",), gop=4, size=(48, 64), codec="h264")
    assert words() == ReshardSpec()


@pytest.mark.parametrize(("name", "text"), [("exclude", "3;7"), ("gop", "two"), ("size", "64"), ("size", "axb")])
def test_words_that_mean_nothing_are_refused_with_their_value(name, text):
    with pytest.raises(ConfigError, match=text.split(";")[0]):
        words(**{name: text})
