"""``raypipe bench``: what it refuses, and the table of two measurements."""

import json
from dataclasses import asdict

import pytest
from program import run_program

from raypipe.bench import BenchReport, Setting


def run(*arguments):
    return run_program("bench", *arguments)


def write_report(path, samples_per_s, **conditions):
    setting = Setting(where="rank", threads=2)
    figures = {"samples_per_s": samples_per_s, "cpu_s_per_1k": 1.0, "distinct_episodes": 4.0, "peak_mb": 100.0}
    report = BenchReport(
        machine={"processor": "made", "cores": 2, "versions": {}},
        conditions={"batch_size": 4, **conditions},
        floor={"samples_per_s": 100.0, "cpu_s_per_1k": 0.5},
        rows=({"name": setting.name, "setting": asdict(setting), **figures},),
    )
    path.write_text(json.dumps(report.to_json()))
    return path


def test_compare_prints_ratios_and_what_differs(tmp_path):
    first = write_report(tmp_path / "a.json", 1000.0)
    second = write_report(tmp_path / "b.json", 1500.0, used_frames=7)

    done = run("compare", first, second)

    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "rank, 2 threads" in line]
    assert line.split()[-4:] == ["1.50", "1.00", "1.00", "1.00"]
    assert "differs: used_frames: None against 7" in done.stdout


BAD_CALLS = {
    "no dataset": (["{tmp}/nothing"], "no such folder"),
    "two datasets": (["{tiny}", "{tmp}"], "bench takes one dataset, got 2"),
    "no files": (["compare"], "bench compare takes two files"),
    "one file": (["compare", "{tmp}/a.json"], "got 1"),
    "missing file": (["compare", "{tmp}/a.json", "{tmp}/b.json"], "there is no file"),
    "folder named compare": (["./compare"], "no such folder"),
    "mixture": (["{tmp}/mixture.yaml"], "is a mixture, and bench measures one dataset"),
    "no time": (["{tiny}", "--seconds", "0"], "seconds must be more than 0"),
    "endless": (["{tiny}", "--seconds", "inf"], "seconds must be more than 0, and not endless"),
    "no memory": (["{tiny}", "--live-gb", "nan"], "live_bytes must be a number of bytes"),
    "no batch": (["{tiny}", "--batch-size", "0"], "batch_size must be at least 1"),
    "negative rate": (["{tiny}", "--gpu-samples-per-s", "-1"], "gpu_samples_per_s must be a number from 0 on"),
    "remote dataset": (["memory://arm"], "'memory://arm' is not on this machine"),
    "no folder for JSON": (["{tiny}", "--json-file", "{tmp}/no/a.json"], "there is no folder"),
    "folder as JSON": (["{tiny}", "--json-file", "{tmp}"], "it is a folder"),
    "no folder for the plot": (["{tiny}", "--plot", "{tmp}/no/a.png"], "there is no folder"),
    "plot that is no PNG": (["{tiny}", "--plot", "{tmp}/a.txt"], "give a file that ends in .png"),
    "unknown setting": (["{tiny}", "--setting", "thread=1"], "did you mean 'threads'"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_one_paragraph_and_exit_code_2(tmp_path, tiny_dataset, case):
    arguments, message = BAD_CALLS[case]
    (tmp_path / "mixture.yaml").write_text("datasets: []\n")

    done = run(*(argument.format(tmp=tmp_path, tiny=tiny_dataset) for argument in arguments))

    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("raypipe: ")
    assert len(done.stderr.strip().splitlines()) == 1
