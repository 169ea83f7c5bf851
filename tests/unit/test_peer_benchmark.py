"""The counting and the page of ``benchmarks/peers.py``, which measures peers: no figure comes from anywhere else."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("peer_counts", "peer_report", "machine"):
        sys.modules.pop(name, None)


def test_count_tells_frames_that_came_again_and_that_did_not_come():
    from peer_counts import count_frames

    count = count_frames([[[0, 1], [2, 3]], [[3, 3], [5]]], num_frames=7)

    assert (count.repeated, count.missing) == (2, 2)
    assert str(count) == "2 twice, 2 missing of 7"
    assert str(count_frames([[[1, 0]], [[2]]], num_frames=3)) == "exactly once"


def test_count_refuses_frames_of_another_dataset():
    from peer_counts import count_frames

    with pytest.raises(AssertionError, match="does not have"):
        count_frames([[[7]]], num_frames=7)


def test_resume_is_exact_only_with_the_batches_of_an_uninterrupted_run():
    from peer_counts import judge_resume

    whole = [[0, 1], [2, 3], [4]]

    assert judge_resume(whole, [[0, 1]], [[2, 3], [4]], 5)["text"] == "exact: same batches"
    assert judge_resume(whole, [[0, 1]], [[4, 3], [2]], 5)["text"] == "exactly once, other batches"
    assert judge_resume(whole, [[0, 1]], [[1, 2], [3]], 5)["text"] == "1 twice, 1 missing of 5, other batches"


def made_figures(**settings):
    """Figures of four peers; `settings` are those of raypipe, where a run wrote them down."""
    from peer_report import FLOOR

    speed = {"samples_per_s": 900.0, "first_batch_s": 3.0, "peak_mb": 700, "distinct_episodes": 40.0, "load_average": 1}
    exact = {key: {"text": f"text of {key}"} for key in ("whole", "resume", "reshape")}
    return {
        "machine": {"processor": "made", "cores": 2, "memory_gb": 8, "time": "2020-01-02 03:04:05"},
        "conditions": dict.fromkeys(
            ("episodes", "frames", "batch_size", "action_frames", "workers", "seconds", "small_frames"), 1
        ),
        "peers": {
            FLOOR: {"cpu_s_per_1k": 0.5, **speed, "versions": {"torch": "2"}},
            "raypipe": {
                "cpu_s_per_1k": 1.0,
                **speed,
                **exact,
                **({"settings": settings} if settings else {}),
            },
            "other": {"cpu_s_per_1k": 4.0, **speed, "convert_s": 5.0, "convert_cpu_s": 6.0, "copy_mb": 7.0},
            "broken": {"error": "does not install: no wheel"},
        },
    }


def test_page_shows_what_was_measured_and_why_something_was_not(tmp_path):
    from peer_report import write_page

    write_page(made_figures(), tmp_path / "page.md", tmp_path / "plots" / "a.png")

    page = (tmp_path / "page.md").read_text()
    assert "| raypipe | 1 | 2 | 900 | 3 | 700 | 40 |" in page
    assert "| broken | not measured: does not install: no wheel |" in page
    assert "| raypipe | text of whole | text of resume | text of reshape |" in page
    assert "| other | 5 | 6 | 7 |" in page
    assert "in this run: other 4.0." in page
    assert "](plots/a.png)" in page


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"live_bytes": 1_500_000_000, "live_spans": 5, "span_frames": 7},
            ["raypipe's live window, here of 5 spans of up to 7 frames, comes to", "`live_bytes` allows, here 1.5 GB."],
        ),
        ({"live_spans": 5, "span_frames": "episode"}, ["raypipe's live window, here of 5 whole episodes, comes to"]),
        ({"live_spans": 5}, ["raypipe's live window comes to"]),
        ({}, ["raypipe's live window comes to", "as far as `live_bytes` allows. It is set"]),
    ],
)
def test_page_says_of_raypipes_settings_what_the_run_wrote_down(settings, told, tmp_path):
    from peer_report import write_page

    write_page(made_figures(**settings), tmp_path / "page.md", None)

    reading = " ".join((tmp_path / "page.md").read_text().partition("## How to read it")[2].split())
    assert [text for text in told if text not in reading] == []
    assert "128" not in reading
    assert "3.2 GB" not in reading
