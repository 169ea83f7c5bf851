"""How many requests a run from the Hub makes: for each file, not for each episode; none with a warm cache."""

import os
import subprocess
import sys

import pytest
from batches import TOP, frames_of_all, frames_of_dataset, local_loader
from hub_server import HubServer

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

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
    # The default cache is there.
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with HubServer() as server, server.as_hub(tmp_path / "hub"):
        yield server


def read_epoch(root, **cache):
    dataset = open_dataset(root)
    # Of the default folder, where the columns of the dataset were looked up too.
    spec = CacheSpec(**cache)
    loader = local_loader(Pipeline(dataset, batch_size=8, seed=0, order={"live_spans": 4}, cache=spec))
    return dataset, list(loader), loader.stats()


@pytest.mark.parametrize("kind", ["whole", "ranged"])
def test_an_epoch_takes_two_requests_a_file_and_three_more_whatever_the_episodes(hub, datasets, kind):
    sent = {}
    for number, folder in datasets.items():
        hub.add_repo(f"lab/arm{number}", folder, tags=("v3.0",))
        hub.reset()

        # What is fetched ahead of a part that comes with another one would be counted by chance.
        cache = {} if kind == "whole" else {"whole_bytes": 0, "prefetch": False}
        dataset, batches, _ = read_epoch(f"lab/arm{number}", **cache)

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


def test_every_file_of_an_epoch_is_asked_for_once(hub, datasets):
    hub.add_repo("lab/arm", datasets[60], tags=("v3.0",))

    read_epoch("lab/arm")

    large = {name: count for name, count in hub.paths.items() if name.endswith((".parquet", ".mp4"))}
    assert set(large.values()) == {2}, large
    assert hub.counts["tree"] == hub.counts["revision"] == hub.counts["refs"] == 1


def test_a_second_start_sends_nothing(hub, datasets):
    hub.add_repo("lab/arm", datasets[10], tags=("v3.0",))
    _, first, _ = read_epoch("lab/arm")
    hub.reset()

    _, second, stats = read_epoch("lab/arm")

    assert frames_of_all(second) == frames_of_all(first)
    assert dict(hub.counts) == {}
    assert stats.requests == 0


PROGRAM = """
import sys
from raypipe.format import read_metadata
from raypipe.storage import num_requests
from raypipe.storage import CacheSpec, open_root
storage = open_root(sys.argv[1]).cached(CacheSpec(folder=sys.argv[2], max_bytes=1 << 30))
meta = read_metadata(storage)
rows = range(len(meta.episodes))
names = sorted({meta.data_file(row) for row in rows} | {meta.video_file(row, sys.argv[3]) for row in rows})
print(sum(len(storage.read_bytes(name)) for name in names), num_requests())
"""
"""Reads all that training reads. Without torch and Ray, which take long to load eight times."""


def start(hub, tmp_path):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = {**clean, **hub.environment(tmp_path / "hub", HF_HOME=str(tmp_path / "home"))}
    program = [sys.executable, "-c", PROGRAM, "hf://datasets/lab/arm@v3.0", str(tmp_path / "cache"), TOP]
    return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-2000:]
    return [int(number) for number in out.split()]


@pytest.mark.timeout(240)
def test_eight_processes_of_a_node_ask_once_for_each_file_and_later_ones_for_nothing(hub, datasets, tmp_path):
    hub.add_repo("lab/arm", datasets[10], tags=("v3.0",))

    started = [start(hub, tmp_path) for _ in range(8)]
    results = [finish(process) for process in started]
    counts, paths = dict(hub.counts), dict(hub.paths)
    hub.reset()
    later = finish(start(hub, tmp_path))

    large = [*(datasets[10] / "data").rglob("*.parquet"), *(datasets[10] / "videos").rglob("*.mp4")]
    size_bytes = sum(path.stat().st_size for path in large)
    assert {result[0] for result in results} == {size_bytes}
    assert sum(result[1] for result in results) == sum(counts.values())
    assert counts["tree"] == 1
    # All may ask which commit a tag stands for before one of them has noted it.
    assert counts["revision"] <= 8
    for name, count in paths.items():
        assert count == (2 if name.endswith((".parquet", ".mp4")) else 1), name
    assert later == [size_bytes, 0]
    assert dict(hub.counts) == {}
