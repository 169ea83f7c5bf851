"""A dataset that is larger than the cache of its node: its bytes stay within, for one job, two, and a killed one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from batches import TOP, assert_equals_samples, frames_of_all, frames_of_dataset, local_loader
from filecache_cases import Watcher
from s3_server import S3Server

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, open_cache
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

TESTS = Path(__file__).parents[1]


def spec_of(per_file, num_episodes, size):
    return SynthSpec(
        lengths=(20,) * num_episodes,
        cameras=(CameraSpec(name=TOP, height=size, width=size, crf=1, gop=5),),
        state_dim=2,
        pixels="textured",
        episodes_per_video_file=per_file,
        episodes_per_data_file=8,
    )


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory):
    """Episodes with a video each, and larger ones in two packed files, of which a tenth is some parts."""
    top = tmp_path_factory.mktemp("bound")
    return {
        "whole": write_dataset(top / "whole", spec_of(1, 24, 160)),
        "parts": write_dataset(top / "parts", spec_of(20, 40, 320)),
    }


@pytest.fixture(scope="module")
def server():
    with S3Server() as running, running.as_s3():
        yield running


def size_of(root):
    return sum(path.stat().st_size for path in Path(root).rglob("*.mp4"))


def make_loader(uri, folder, max_bytes, kind):
    cache = CacheSpec(folder=str(folder), max_bytes=max_bytes, whole_bytes=(1 << 30) if kind == "whole" else 0)
    # Two open videos are what this cache has room for.
    order, decode = {"live_spans": 2}, {"num_threads": 1, "open_videos": 2 if kind == "whole" else 1}
    return local_loader(
        Pipeline(open_dataset(uri), batch_size=16, seed=0, order=order, decode=decode, cache=cache)
    ), cache


@pytest.mark.parametrize("kind", ["whole", "parts"])
def test_a_dataset_ten_times_larger_than_the_cache_stays_within_it(by_kind, server, tmp_path, kind):
    root = by_kind[kind]
    uri, most = server.add(f"ten-{kind}", root), size_of(root) // 10
    dataset = open_dataset(str(root))
    loader, cache = make_loader(uri, tmp_path / "cache", most, kind)

    with Watcher(tmp_path / "cache", every_s=0.01) as watcher:
        batches = list(loader)

    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches[::5]:
        assert_equals_samples(batch, dataset)
    assert 0.5 * most < watcher.most_bytes <= most
    assert watcher.num_looks > 10
    assert open_cache(cache).stats().evictions > 0


PROGRAM = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from batches import frames_of_all
from batches import local_loader
from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
uri, folder, most, seed = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
cache = {"folder": folder, "max_bytes": most, "whole_bytes": 1 << 30}
decode = {"num_threads": 1, "open_videos": 2}
pipe = Pipeline(open_dataset(uri), batch_size=16, seed=seed, order={"live_spans": 2}, decode=decode, cache=cache)
print(json.dumps(frames_of_all(local_loader(pipe))))
"""


def start(server, home, *arguments):
    env = {**os.environ, **server.environment(HOME=str(home))}
    program = [sys.executable, "-c", PROGRAM, str(TESTS), *map(str, arguments)]
    return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(240)
def test_two_jobs_share_a_cache_also_when_one_is_killed_while_it_fetches(by_kind, server, tmp_path):
    root, folder = by_kind["whole"], tmp_path / "cache"
    uri, most = server.add("two", root), size_of(root) // 3
    dataset = open_dataset(str(root))
    # The killed one hangs in its fetch of a video, with half of it on disk.
    held, is_held = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        held.wait(200)

    with Watcher(folder, every_s=0.01) as watcher:
        doomed = start(server, tmp_path / "home", uri, folder, most, 1)
        wait_until(lambda: server.counts["get"] >= 8, doomed)
        server.fail(".mp4", before=hold)
        wait_until(is_held.is_set, doomed)
        other = start(server, tmp_path / "home", uri, folder, most, 2)
        doomed.send_signal(signal.SIGKILL)
        doomed.communicate(timeout=30)
        held.set()
        out, err = other.communicate(timeout=200)

    assert other.returncode == 0, err[-2000:]
    frames = json.loads(out.splitlines()[-1])
    assert sorted(map(tuple, frames)) == frames_of_dataset(dataset)
    assert watcher.most_bytes <= most
    loader, _ = make_loader(uri, folder, most, "whole")
    batches = list(loader)
    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches[::5]:
        assert_equals_samples(batch, dataset)
    right = {path.read_bytes() for path in root.rglob("*") if path.is_file()}
    kept = [path.read_bytes() for path in folder.iterdir() if len(path.name) == 32]
    assert all(content in right or content.startswith(b"[[") for content in kept)


def wait_until(is_so, process, timeout_s=150):
    end = time.monotonic() + timeout_s
    while not is_so():
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
