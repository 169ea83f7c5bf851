"""The data, the counting and the page of ``benchmarks/peers.py``: no figure comes from anywhere else."""

import copy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name.partition("_")[0] in ("made", "peer", "machine")]:
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


def test_message_of_a_driver_is_its_last_exception_and_else_its_last_line():
    from peer_runs import find_message

    many = "Traceback:\n  File\nlib.FrameError: too far\nqueried: 8.2\nvideo: /a/b.mp4\n"
    native = "Check failed: not pending\n*** StackTrace ***\n/lib/libc.so.6(+0x10) [0x7f]\n\n"

    assert find_message(many) == "lib.FrameError: too far"
    assert find_message(native) == "Check failed: not pending"
    assert find_message("") == "no message"


@pytest.mark.parametrize(("kind", "size"), [("av1-640", (640, 480)), ("h264", (320, 240))])
def test_peers_get_one_video_file_a_camera_and_ten_episodes_a_data_file(kind, size):
    from made import peer_spec

    spec = peer_spec(kind, 50)

    assert [(camera.width, camera.height, camera.gop) for camera in spec.cameras] == [(*size, 2)] * 2
    assert (len(spec.lengths), spec.episodes_per_video_file, spec.episodes_per_data_file) == (50, 50, 10)


def made_figures(*kinds, run="2020-01-02 03:04:05", **settings):
    """Figures of four loaders on each of `kinds`; `settings` are those of raypipe, where a run wrote them down."""
    from peer_report import FLOOR

    speed = {"samples_per_s": 900.0, "first_batch_s": 3.0, "peak_mb": 700, "distinct_episodes": 40.0, "load_average": 1}
    peers = {
        FLOOR: {"cpu_s_per_1k": 0.5, **speed},
        "raypipe": {"cpu_s_per_1k": 1.0, **speed, **({"settings": settings} if settings else {})},
        "other": {"cpu_s_per_1k": 4.0, **speed, "convert_s": 5.0, "convert_cpu_s": 6.0, "copy_mb": 7.0},
        "broken": {"error": "does not install: no wheel"},
    }
    described = {"episodes": 50, "frames": 9999, "shortest": 3, "longest": 300, "fps": 30, "cameras": 2, "gop": 2}
    sizes = {"av1-640": {"size": "640x480", "codec": "av1"}, "h264": {"size": "320x240", "codec": "h264"}}
    timed = {name: {**figures, "run": run} for name, figures in peers.items()}
    return {
        "machine": {"processor": "made", "cores": 2, "memory_gb": 8, "time": run},
        "conditions": dict.fromkeys(("batch_size", "action_frames", "workers", "seconds", "small_frames"), 1),
        "data": {
            kind: {**described, **sizes[kind], "values": 14, "speed": copy.deepcopy(timed)} for kind in kinds or sizes
        },
        "counts": {
            "raypipe": {key: {"text": f"text of {key}"} for key in ("whole", "resume", "reshape")} | {"run": run}
        },
        "versions": {"raypipe": {"torch": "2"}},
    }


def read_page(figures, folder, plot=None):
    from peer_report import write_page

    write_page(figures, folder / "page.md", plot)
    return (folder / "page.md").read_text()


def test_page_shows_what_was_measured_and_why_something_was_not(tmp_path):
    page = read_page(made_figures(), tmp_path, tmp_path / "plots" / "a.png")

    # The cores of a GPU that eats 1,200 samples/s are 1.2 times the CPU seconds of 1,000 samples.
    assert page.count("| raypipe | 1 | 2 | 1.2 | 900 | 3 | 700 | 40 |") == 2
    assert page.count("| broken | not measured: does not install: no wheel |") == 2
    assert page.count("| raypipe | text of whole | text of resume | text of reshape |") == 1
    assert "| other | 5 | 6 | 7 |" in page
    assert "](plots/a.png)" in page


def test_page_has_the_realistic_dataset_first_and_tells_the_figures_of_each_apart(tmp_path):
    from peer_figures import join_figures

    figures = made_figures("h264")
    figures["data"]["h264"]["speed"]["other"]["cpu_s_per_1k"] = 3.0

    page = read_page(join_figures(figures, made_figures("av1-640")), tmp_path)

    assert page.index("## 640x480 AV1") < page.index("## 320x240 H.264")
    assert "Times the CPU of raypipe, 640x480 AV1: other 4.0." in page
    assert "Times the CPU of raypipe, 320x240 H.264: other 3.0." in page


def test_page_of_one_dataset_names_the_command_for_it(tmp_path):
    page = read_page(made_figures("h264"), tmp_path)

    assert "--data h264 --plot" in page
    assert "640x480" not in page


def test_page_says_of_raypipes_settings_what_the_run_wrote_down(tmp_path):
    settings = {"live_bytes": 1_500_000_000, "live_spans": 5, "span_frames": 7, "clip_frames": 3}
    figures = made_figures("h264", **settings)
    kept = {"settings": {"decoded_frames": 100, "kept_frames": 300}, "kept_mb": 2500, "run": "2020-01-02 03:04:05"}
    figures["data"]["h264"]["speed"]["raypipe, keep_frames"] = {"cpu_s_per_1k": 0.2, **kept}

    page = " ".join(read_page(figures, tmp_path).split())

    assert (
        "clips of 3 frames and up to 5 live spans (spans of up to 7 frames), with 1.50 GB for decoded frames." in page
    )
    assert "Kept frames took 2.5 GB of disk; the second epoch copied 75% of its frames from there." in page
    assert "here its default of 1.50 GB" in page
    assert "raypipe chose" not in read_page(made_figures("h264"), tmp_path)


def test_joined_figures_keep_other_peers_and_datasets_and_take_the_later_run_of_the_same(tmp_path):
    from peer_figures import join_figures, order_figures

    later = made_figures("h264", run="2020-01-05 00:00:00")
    later["data"]["h264"]["speed"] = {"raypipe": {"cpu_s_per_1k": 0.9, "run": "2020-01-05 00:00:00"}}

    joined = order_figures(join_figures(made_figures(), later), ["other", "raypipe"])

    assert {kind: list(data["speed"]) for kind, data in joined["data"].items()} == {
        "av1-640": ["other", "raypipe"],
        "h264": ["other", "raypipe"],
    }
    assert joined["data"]["h264"]["speed"]["raypipe"]["cpu_s_per_1k"] == 0.9
    assert joined["data"]["av1-640"]["speed"]["raypipe"]["cpu_s_per_1k"] == 1.0
    page = read_page(joined, tmp_path)
    assert "This page joins 2 runs" in page
    assert "2020-01-02 to 2020-01-05" in page


@pytest.mark.parametrize("change", [("conditions", "seconds"), ("machine", "processor"), ("data", "h264", "frames")])
def test_figures_of_unlike_data_settings_or_machines_are_not_joined(change):
    from peer_figures import join_figures

    other = made_figures("h264")
    *place, last = change
    inner = other
    for key in place:
        inner = inner[key]
    inner[last] = "another"

    with pytest.raises(SystemExit, match=f"{last} .* and 'another'; give --json-file another one"):
        join_figures(made_figures(), other)


def test_file_without_figures_by_dataset_is_refused(tmp_path):
    from peer_figures import read_figures

    (tmp_path / "peers.json").write_text('{"peers": {}}')

    with pytest.raises(SystemExit, match="does not hold figures by dataset"):
        read_figures(tmp_path / "peers.json")


def test_plot_has_a_row_of_panels_for_each_dataset(tmp_path):
    from matplotlib.image import imread
    from peer_report import write_plot

    for name, kinds in (("one", ["h264"]), ("two", [])):
        write_plot(made_figures(*kinds), tmp_path / f"{name}.png")

    one, two = (imread(tmp_path / f"{name}.png").shape for name in ("one", "two"))
    assert two[:2] == (2 * one[0], one[1])
