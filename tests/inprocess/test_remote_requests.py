"""How many requests a run from the Hub makes: for each file, not for each episode; none with a warm cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from batches import TOP, frames_of_all, frames_of_dataset
from hub_server import HubServer
from local_source import local_loader

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

TESTS = Path(__file__).parents[1]

FIXED = 3
"""Requests that do not go with a file: the tags, the commit of the one that is taken, and the listing."""


def packed(folder, num_episodes):
    """A dataset whose episodes are in two data files and two videos, however many they are."""
    half = -(-num_episodes // 2)
    return write_dataset(
        folder,
        SynthSpec(
            lengths=(4,) * num_episodes,
            cameras=(CameraSpec(name=TOP, height=32, width=32),),
            state_dim=2,
            episodes_per_data_file=half,
            episodes_per_video_file=half,
        ),
    )


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    top = tmp_path_factory.mktemp("packed")
    return {number: packed(top / str(number), number) for number in (10, 60)}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer() as server, server.as_hub(tmp_path / "hub"):
        yield server


def read_epoch(root, folder, revision="", **cache):
    dataset = open_dataset(root, revision=revision)
    spec = CacheSpec(folder=str(folder), max_bytes=1 << 30, **cache)
    loader = local_loader(Pipeline(dataset, batch_size=8, seed=0, order={"live_spans": 4}, cache=spec))
    return dataset, list(loader), loader.stats()


@pytest.mark.parametrize("kind", ["whole", "ranged"])
def test_an_epoch_takes_two_requests_a_file_and_three_more_whatever_the_episodes(hub, datasets, tmp_path, kind):
    sent = {}
    for number, folder in datasets.items():
        hub.add_repo(f"lab/arm{number}", folder, tags=("v3.0",))
        hub.reset()

        dataset, batches, _ = read_epoch(
            f"lab/arm{number}", tmp_path / f"cache{number}", whole_bytes=1 << 30 if kind == "whole" else 0
        )

        sent[number] = hub.num_requests
        assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    files = [path for path in datasets[10].rglob("*") if path.is_file()]
    assert len(files) == len([path for path in datasets[60].rglob("*") if path.is_file()])
    if kind == "whole":
        # A large file is asked for at the Hub, which sends on to where it is stored.
        assert max(sent.values()) <= FIXED + 2 * len(files)
        assert sent[10] == sent[60]
    else:
        # Two more for the part of each span, which a short one shares with those beside it.
        assert sent[60] <= FIXED + 2 * (len(files) + 60)


def test_every_file_of_an_epoch_is_asked_for_once(hub, datasets, tmp_path):
    hub.add_repo("lab/arm", datasets[60], tags=("v3.0",))

    read_epoch("lab/arm", tmp_path / "cache")

    large = {name: count for name, count in hub.paths.items() if name.endswith((".parquet", ".mp4"))}
    assert set(large.values()) == {2}, large
    assert hub.counts["tree"] == hub.counts["revision"] == hub.counts["refs"] == 1


def test_a_second_start_sends_nothing(hub, datasets, tmp_path):
    hub.add_repo("lab/arm", datasets[10], tags=("v3.0",))
    _, first, _ = read_epoch("lab/arm", tmp_path / "cache", revision="v3.0")
    hub.reset()

    _, second, stats = read_epoch("lab/arm", tmp_path / "cache", revision="v3.0")

    assert frames_of_all(second) == frames_of_all(first)
    assert dict(hub.counts) == {}
    assert stats.requests == 0


PROGRAM = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from local_source import local_loader
from batches import frames_of_all
from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
dataset = open_dataset("lab/arm", revision="v3.0")
cache = {"folder": sys.argv[2], "max_bytes": 1 << 30}
loader = local_loader(Pipeline(dataset, batch_size=8, seed=0, order={"live_spans": 4}, cache=cache))
print(json.dumps([frames_of_all(loader), loader.stats().requests]))
"""


def start(hub, tmp_path):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = {**clean, **hub.environment(tmp_path / "hub", HF_HOME=str(tmp_path / "home"))}
    program = [sys.executable, "-c", PROGRAM, str(TESTS), str(tmp_path / "cache")]
    return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.timeout(240)
def test_eight_processes_of_a_node_ask_once_for_each_file_and_later_ones_for_nothing(hub, datasets, tmp_path):
    hub.add_repo("lab/arm", datasets[10], tags=("v3.0",))

    started = [start(hub, tmp_path) for _ in range(8)]
    results = [finish(process) for process in started]
    counts, paths = dict(hub.counts), dict(hub.paths)
    hub.reset()
    later = finish(start(hub, tmp_path))

    assert all(result[0] == results[0][0] for result in results)
    assert len(results[0][0]) == 40
    assert counts["tree"] == 1
    # All may ask which commit a tag stands for before one of them has noted it.
    assert counts["revision"] <= 8
    for name, count in paths.items():
        assert count == (2 if name.endswith((".parquet", ".mp4")) else 1), name
    assert later == [results[0][0], 0]
    assert dict(hub.counts) == {}
