"""``raypipe download``: what a person sees, what a program reads, and the exit codes."""

import json

import pytest
from hub_server import HubServer
from program import run_program

from raypipe.testing import SynthSpec, write_dataset

TOP = "observation.images.top"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("hub") / "arm", SynthSpec())


@pytest.fixture
def hub(dataset, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("raypipe.storage.hub.client.FIRST_WAIT_S", 0.01)
    with HubServer() as server, server.as_hub(tmp_path / "cache"):
        server.add_repo("lab/arm", dataset, tags=("v3.0",))
        yield server


def test_a_dataset_is_fetched_and_the_second_time_it_is_there(hub):
    first = run_program("download", "lab/arm")
    second = run_program("download", "lab/arm")

    commit = hub.repos["lab/arm"].branches["main"]
    assert (first.returncode, first.stderr) == (0, "")
    assert f"lab/arm, revision v3.0, commit {commit}: the whole dataset" in first.stdout
    assert "fetched 10 (98.4 kB) with 21 requests, 0 were complete" in first.stdout
    assert f"datasets--lab--arm/snapshots/{commit}; see: raypipe info lab/arm" in first.stdout
    assert "fetched 0 (0 bytes) with 0 requests, 10 were complete" in second.stdout


def test_a_part_is_fetched_to_a_folder(hub, tmp_path):
    options = ["--revision", "main", "--episodes", "0-1", "--cameras", TOP, "--out", tmp_path / "mine", "--json"]

    done = run_program("download", "lab/arm", *options)

    report = json.loads(done.stdout)
    assert report["folder"] == str(tmp_path / "mine")
    assert (report["revision"], report["is_whole"], report["num_skipped"]) == ("main", False, 0)
    assert sorted(path.name for path in (tmp_path / "mine/videos").rglob("*.mp4")) == ["file-000.mp4"]


def test_info_reads_a_dataset_of_the_hub(hub):
    run_program("download", "lab/arm")
    hub.reset()

    done = run_program("info", "lab/arm", "--json")

    assert json.loads(done.stdout)["root"] == f"hf://datasets/lab/arm@{hub.repos['lab/arm'].branches['main']}"
    assert hub.num_requests == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["lab/none"], "no dataset 'lab/none' is found at"),
        (["lab/arm", "--revision", "v4"], "no revision 'v4' of dataset 'lab/arm'"),
        (["lab/arm", "--episodes", "nine"], "'nine' is no number and no run; write 0-9,12"),
        (["lab/arm", "--episodes", "99"], "has no episode 99"),
        (["lab/arm", "--cameras", "top"], f"has no camera 'top'. Known: '{TOP}'"),
        (["/some/folder"], "'/some/folder' is no dataset of the Hub; give OWNER/NAME"),
        (["hf://datasets/lab/arm/sub"], "give the repo alone"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_paragraph(hub, arguments, expected):
    done = run_program("download", *arguments)

    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_that_fails_is_said(hub):
    hub.fail("meta/info.json", status=500, times=100)

    done = run_program("download", "lab/arm")

    assert done.returncode == 2
    assert "cannot fetch 'meta/info.json' of dataset 'lab/arm' at revision 'v3.0'" in done.stderr


def test_a_moved_tag_is_asked_for_again(hub, dataset):
    run_program("download", "lab/arm")
    hub.reset()

    done = run_program("download", "lab/arm", "--refresh")

    assert "with 2 requests, 10 were complete" in done.stdout
    assert hub.counts == {"refs": 1, "revision": 1}


def test_bench_wants_a_dataset_of_the_hub_downloaded(hub):
    refused = run_program("bench", "lab/arm", "--setting", "threads=0")
    run_program("download", "lab/arm")
    opened = run_program("bench", "lab/arm", "--setting", "threads=0")

    assert (refused.returncode, opened.returncode) == (2, 2)
    assert "'lab/arm' is not on this machine" in refused.stderr
    assert "`raypipe download lab/arm` first" in refused.stderr
    assert "is not on this machine" not in opened.stderr
    assert "threads" in opened.stderr
