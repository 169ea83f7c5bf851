"""What a rank fetches before its spans come: files that are remote, in the order of the plan."""

import threading
import time
from contextlib import suppress

import fsspec
import pytest
from batches import local_loader
from waiting import PATIENCE_S, wait_until

from raypipe.dataset import open_dataset
from raypipe.errors import ConfigError
from raypipe.feed.local import LocalFeed
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, open_cache
from raypipe.storage.node_cache import PREFETCH_THREADS
from raypipe.storage.remote import Remote
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

NUM_EPISODES = 14


@pytest.fixture
def remote(tmp_path):
    """A dataset with a video file for every episode, on a filesystem that is none of the system's, by its URI."""
    cameras = (CameraSpec(name="observation.images.top", height=32, width=32),)
    root = write_dataset(tmp_path / "arm", SynthSpec(version="v2.1", lengths=(4,) * NUM_EPISODES, cameras=cameras))
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/ahead/arm", recursive=True)
    yield "memory://ahead/arm"
    memory.rm("/ahead", recursive=True)


def make_loader(remote, spec, live_spans, **settings):
    pipe = Pipeline(
        open_dataset(remote),
        batch_size=4,
        seed=3,
        order={"live_spans": live_spans},
        decode={"where": "rank"},
        cache=spec,
    )
    return local_loader(pipe, **settings)


def fetched_by(spec, wanted, timeout_s=PATIENCE_S):
    """Return how many files were fetched, by whomever, once there are `wanted`, or the time is over."""
    end = time.monotonic() + timeout_s
    while (fetched := count_fetched(spec)) < wanted and time.monotonic() < end:
        time.sleep(0.01)
    return fetched


def count_fetched(spec):
    stats = open_cache(spec).stats()
    return stats.prefetched + stats.misses


def test_all_that_the_first_batch_needs_is_fetched_while_no_block_has_come(remote, tmp_path, monkeypatch):
    spec, fetched, blocks = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30), [], LocalFeed.blocks

    def late_blocks(feed):
        # Rows and a video of each; what the first clips need their decoders may fetch before.
        fetched.append(fetched_by(spec, 2 * NUM_EPISODES))
        yield from blocks(feed)

    monkeypatch.setattr(LocalFeed, "blocks", late_blocks)

    list(make_loader(remote, spec, live_spans=NUM_EPISODES))

    assert fetched == [2 * NUM_EPISODES]
    assert open_cache(spec).stats().misses < NUM_EPISODES


def test_nothing_is_fetched_ahead_where_that_is_off(remote, tmp_path):
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30, prefetch=False)

    list(make_loader(remote, spec, live_spans=4))

    assert open_cache(spec).stats().prefetched == 0


def test_indices_of_videos_kept_by_parts_are_read_at_once(remote, tmp_path, monkeypatch):
    spec = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30, whole_bytes=0)
    loader = make_loader(remote, spec, live_spans=NUM_EPISODES)
    together, fetch = threading.Barrier(6, timeout=PATIENCE_S), Remote.fetch_range
    lock, left = threading.Lock(), [6]

    def fetch_with_others(self, name, start, stop):
        with lock:
            left[0] -= name.endswith(".mp4")
            is_among = name.endswith(".mp4") and left[0] >= 0
        if is_among:
            # Broken unless so many videos are read at one time.
            with suppress(threading.BrokenBarrierError):
                together.wait()
        return fetch(self, name, start, stop)

    monkeypatch.setattr(Remote, "fetch_range", fetch_with_others)

    list(loader)

    assert not together.broken
    assert left[0] < 0


@pytest.mark.parametrize("kind", [".mp4", ".parquet"])
def test_what_has_not_begun_is_not_fetched_any_more_when_the_loader_is_closed(remote, tmp_path, monkeypatch, kind):
    spec, begun, go_on, fetch = CacheSpec(folder=str(tmp_path / "cache")), [], threading.Event(), Remote.fetch
    loader = make_loader(remote, spec, live_spans=NUM_EPISODES, num_threads=1)
    before = set(threading.enumerate())

    def slow(self, name, target, progress):
        if name.endswith(kind):
            begun.append(name)
            assert go_on.wait(PATIENCE_S)
        fetch(self, name, target, progress)

    monkeypatch.setattr(Remote, "fetch", slow)

    def train():
        with pytest.raises(ConfigError, match=r"close\(\) during the iteration"):
            list(loader)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    wait_until(lambda: len(begun) >= PREFETCH_THREADS)
    time.sleep(0.2)
    asking = [one for one in set(threading.enumerate()) - before if one.name.startswith("raypipe-ahead")]
    # It waits for the thread that decodes, or reads, which waits for its file.
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    # It has come so far: nothing more is asked for ahead.
    assert asking
    wait_until(lambda: not any(one.is_alive() for one in asking))
    time.sleep(0.2)
    go_on.set()
    closing.join(PATIENCE_S)
    thread.join(PATIENCE_S)
    wait_until(lambda: not any(thread.name == "raypipe-prefetch" for thread in threading.enumerate()))

    # Those that were under way, and one that the decoding thread may have begun.
    assert PREFETCH_THREADS <= len(begun) <= PREFETCH_THREADS + 1 < NUM_EPISODES
