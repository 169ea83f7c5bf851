"""The pure parts of validate: segments, folds, runs, statistics, exclude files, the packing of units."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.format import same_codec
from raypipe.validate import KINDS, read_exclude_file
from raypipe.validate.data import find_segments
from raypipe.validate.findings import Place, make_finding, worst_first
from raypipe.validate.report import fold_findings, format_runs
from raypipe.validate.values import join_summaries
from raypipe.validate.whole import _compare, _judge_timestamps

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def rows_of(counts):
    episode = np.repeat(np.arange(len(counts)), counts)
    frame = np.concatenate([np.arange(count) for count in counts])
    return episode, frame


@given(lengths, st.randoms(use_true_random=False))
def test_segments_are_the_episodes_whatever_the_order_of_the_rows(counts, random):
    episode, frame = rows_of(counts)
    order = list(range(len(episode)))
    random.shuffle(order)

    segments = find_segments(episode[order], frame[order])

    assert segments.numbers.tolist() == list(range(len(counts)))
    assert segments.counts.tolist() == counts
    assert segments.num_frames.tolist() == counts
    assert segments.is_sound.all()
    assert np.array_equal(np.array(order)[segments.order], np.arange(len(order)))


@given(lengths, st.data())
def test_a_doubled_or_lost_row_makes_its_episode_unsound_and_no_other(counts, data):
    episode, frame = rows_of(counts)
    row = data.draw(st.integers(0, len(episode) - 1))
    doubled = np.sort([*range(len(episode)), row])

    segments = find_segments(episode[doubled], frame[doubled])

    assert segments.num_frames.tolist() == counts
    assert np.flatnonzero(~segments.is_sound).tolist() == [episode[row]]


@given(st.sets(st.integers(0, 60)))
def test_runs_say_every_number_once(numbers):
    text = format_runs(sorted(numbers), most=100)

    said = []
    for run in filter(None, text.split(", ")):
        first, _, last = run.partition("-")
        said += range(int(first), int(last or first) + 1)
    assert said == sorted(numbers)


def test_runs_beyond_the_most_are_counted():
    assert format_runs([0, 1, 2, 5, 7, 8, 20], most=2) == "0-2, 5 and 3 more"


def test_findings_alike_are_folded_and_the_worst_comes_first():
    found = [
        make_finding("constant", "a", Place(feature="x")),
        *(make_finding("nan-values", f"{n}", Place(episodes=(n,), feature="action")) for n in (3, 1, 2)),
    ]

    folds = fold_findings(worst_first(found, "here"))

    assert [(fold.kind, len(fold.findings)) for fold in folds] == [("nan-values", 3), ("constant", 1)]
    assert folds[0].episodes == (1, 2, 3)
    assert "raypipe validate here" in folds[0].findings[0].remedy


def test_every_kind_says_what_it_means_and_what_to_do():
    for name, kind in KINDS.items():
        assert name == name.lower().replace("_", "-")
        assert kind.severity in ("error", "warning", "note")
        assert kind.meaning
        assert kind.remedy


TRUE = {
    "min": np.array([-1.0, 5.0]),
    "max": np.array([1.0, 5.0]),
    "mean": np.array([0.25, 5.0]),
    "count": np.array([100]),
}


def stored(**changes):
    return {name: values.tolist() for name, values in {**TRUE, **changes}.items()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"max": np.array([1.00001, 5.0])}, ""),
        ({"mean": np.array([0.2505, 5.0])}, ""),
        ({"max": np.array([1.1, 5.0])}, "max[0] is 1.1, the values' is 1"),
        ({"mean": np.array([0.25, 5.1])}, "mean[1] is 5.1"),
        ({"count": np.array([99])}, "count[0] is 99"),
        ({"min": np.array([-1.0])}, "min has 1 number, the feature 2"),
        ({"min": np.array([np.nan, 5.0])}, "min[0] is nan"),
    ],
)
def test_statistics_are_compared_with_room_for_rounding(changes, said):
    found = _compare(stored(**changes), TRUE, Place(feature="x"))

    assert [finding.kind for finding in found] == (["stats-mismatch"] if said else [])
    assert all(said in finding.message for finding in found)


@pytest.mark.parametrize("fps", [7, 10, 29.97, 30, 50, 60, 1000])
@pytest.mark.parametrize("num_frames", [1, 100, 30_000, 400_000])
def test_timestamps_that_are_only_rounded_are_sound(fps, num_frames):
    stamps = (np.arange(num_frames) / fps).astype(np.float32).astype(np.float64)
    off = stamps - np.arange(num_frames) / fps

    kind, _ = _judge_timestamps(float(stamps[0]), float(off[np.argmax(np.abs(off))]), fps, num_frames)

    assert kind in (("", "timestamp-drift") if 1 / fps < 0.002 and num_frames > 100_000 else ("",))


def test_declared_codecs_have_many_names():
    assert same_codec("libsvtav1", "av1")
    assert same_codec("avc1", "h264")
    assert same_codec("H264", "h264")
    assert not same_codec("av1", "h264")


def test_a_summary_of_nothing_has_no_episodes():
    assert len(join_summaries([])) == 0


def test_an_exclude_file_may_have_comments_and_blank_lines(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("# why\n7\n\n3  # because\n7\n")

    assert read_exclude_file(path) == (3, 7)


@pytest.mark.parametrize("line", ["seven", "-1", "1.5", "1 2", "²"])
def test_an_exclude_file_with_anything_else_names_the_line(tmp_path, line):
    path = tmp_path / "bad.txt"
    path.write_text(f"1\n{line}\n")

    with pytest.raises(ConfigError, match="line 2"):
        read_exclude_file(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00PAR1", b"9" * 5000, "٣".encode()])
def test_an_exclude_file_of_something_else_is_an_error_of_the_caller(tmp_path, content):
    (tmp_path / "bad.txt").write_bytes(content)

    with pytest.raises(ConfigError, match=r"bad\.txt"):
        read_exclude_file(tmp_path / "bad.txt")


def test_a_missing_exclude_file_is_an_error_of_the_caller(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the exclude file"):
        read_exclude_file(tmp_path / "none.txt")
