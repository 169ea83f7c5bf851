"""A bench of a small dataset, to its end: settings and floor in processes of their own."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from raypipe.bench import BenchSpec, bench_table, plot_bench, read_report, run_bench
from raypipe.testing import SynthSpec, write_dataset


def printed(renderable):
    out = io.StringIO()
    Console(width=200, file=out).print(renderable)
    return out.getvalue()


@pytest.mark.timeout(600)
def test_bench_measures_a_setting_beside_the_floor(tiny_dataset, tmp_path):
    told = []

    report = run_bench(
        BenchSpec(root=str(tiny_dataset), batch_size=4, seconds=1.0, gpu_samples_per_s=1200),
        ["where=rank,threads=1,clip_frames=2,span_frames=4,live_spans=8"],
        on_line=told.append,
    )

    (row,) = [row for row in report.rows if "setting" in row]
    assert "error" not in row, row
    assert told[0].startswith("floor, all cores: ")
    assert " to measure, about " in told[1]
    assert told[2].startswith("1 of ")
    assert ": rank, 1 thread, clips of 2, spans of 4, 8 live: " in told[2]
    assert row["samples"] == 34
    assert row["cpu_s_per_1k"] > 0
    assert row["peak_mb"] > report.floor["peak_mb"] / 10
    # Two epochs of 34 samples, each decoded once, and of a third what is asked for ahead: 5 batches of clips at most.
    assert 1 <= row["decoded_per_emitted"] <= (2 * 34 + 5 * 4 * 2) / (2 * 34)
    assert 1 < row["distinct_episodes"] <= 4
    assert 1 < report.conditions["full_shuffle_episodes"] < 4
    assert row["clip_frames"] == 2
    assert row["cores_exact"] == pytest.approx(1.2 * row["cpu_s_per_1k"], abs=1e-4)
    assert report.floor["cores"] >= 1
    assert "order={'span_frames': 4, 'live_spans': 8, 'clip_frames': 2})" in report.advice()
    assert "* rank, 1 thread" in printed(bench_table(report))
    assert f"{row['cores']} ({row['cores_exact']:.1f})" in printed(bench_table(report))
    plot_bench(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "a.json").write_text(json.dumps(report.to_json()))
    assert read_report(tmp_path / "a.json").advice() == report.advice()


@pytest.mark.timeout(600)
def test_bench_of_rows_has_no_decode_settings(tmp_path):
    root = write_dataset(tmp_path / "rows", SynthSpec(cameras=(), lengths=(20, 30, 25)))

    report = run_bench(BenchSpec(root=str(root), batch_size=8, seconds=1.0), is_quick=True)

    (row,) = [row for row in report.rows if "setting" in row]
    assert "error" not in row, row
    assert row["samples"] == 75
    assert "decode" not in report.advice()


BROKEN_OFF = """
import sys
from itertools import islice
from raypipe.bench.loaders import RaypipeLoader, Request

request = Request(root=sys.argv[1], batch_size=4, num_cpus=2, parts={"live_bytes": 1 << 30})
loader = RaypipeLoader(request)
part = [num_samples for num_samples, _ in islice(loader.epoch(), 3)]
whole = [num_samples for num_samples, _ in loader.epoch()]
loader.close()
print(sum(part), sum(whole))
"""


@pytest.mark.timeout(300)
def test_epoch_after_one_that_was_broken_off_is_whole(tiny_dataset):
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_OFF, str(tiny_dataset)], capture_output=True, text=True, check=True
    )

    assert done.stdout.split()[-2:] == ["12", "34"]
