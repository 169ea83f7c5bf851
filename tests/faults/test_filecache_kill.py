"""A file cache whose processes are killed at any moment: the bound holds, contents are right, nothing stays locked."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filecache_cases import Watcher, data_bytes
from waiting import PATIENCE_S, wait_until

from raypipe.storage import FileCache
from raypipe.storage.cache_folder import name_of, survey_folder
from raypipe.storage.local_files import lock_file

COMMON = """
import os, random, signal, sys, time
import fcntl
from raypipe.errors import DownloadError
from raypipe.storage import FileCache

def size_of(key):
    return random.Random(f"size {key}").randrange(1_000, 40_000)

def content_of(key):
    return random.Random(key).randbytes(size_of(key))

def fetch_of(key, pause_s=0.0):
    def fetch(path, progress):
        content = content_of(key)
        with open(path, "wb", buffering=0) as stream:
            for start in range(0, len(content), 4096):
                piece = content[start:start + 4096]
                progress(start + len(piece))
                stream.write(piece)
                time.sleep(pause_s)
    return fetch

def check(path, key):
    with open(path, "rb") as stream:
        if stream.read() != content_of(key):
            sys.exit(f"wrong content of {key}")
"""

WANDER = (
    COMMON
    + """
folder, max_bytes, num_keys, seed, num_uses = sys.argv[1], *map(int, sys.argv[2:])
draw = random.Random(seed)
cache = FileCache(folder, max_bytes, prefetch_threads=1)
held = None
for _ in range(num_uses):
    key = str(draw.randrange(num_keys))
    size = size_of(key) if draw.random() < 0.7 else None
    if draw.random() < 0.2:
        cache.prefetch(key, fetch_of(key, 0.0005), size)
        continue
    with cache.hold(key, fetch_of(key, 0.0002), size) as used:
        check(used.path, key)
    if draw.random() < 0.3:
        # Kept while others are used, as a decoder keeps its video.
        held = cache.hold(key, fetch_of(key), size)
        check(held.path, key)
cache.close()
print(cache.stats().bytes_fetched)
"""
)
"""Uses, holds and fetches ahead files at random; ends with a message where a content is wrong."""

NUM_KEYS = 200
MAX_BYTES = 420_000
"""A tenth of all files, which have 20,500 bytes on average. Each of four processes has at most two in use or asked for,
of up to 40,000 bytes: so there is room for all of them, whatever the order of events."""


def start(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return out


def check_sound(folder, max_bytes):
    """Nothing is locked or half there, and every byte that may be used can be."""
    cache = FileCache(folder, max_bytes)
    assert {len(name) for name in os.listdir(folder)} <= {32, len("ledger"), len("bound")}
    survey = survey_folder(str(folder))
    assert survey.fetching == []
    assert int((folder / "ledger").read_bytes()) == survey.total_bytes == data_bytes(folder) <= max_bytes
    for entry in survey.finished:
        lock_file(str(folder / entry.name), wait=False).release()

    def whole(path, progress):
        with open(path, "wb") as stream:
            stream.write(bytes(max_bytes))

    cache.hold("everything", whole, max_bytes).close()
    assert os.listdir(folder).count(name_of("everything")) == 1
    assert data_bytes(folder) == max_bytes


def test_ten_times_the_bound_by_four_processes_stays_within_it(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()

    with Watcher(folder) as watcher:
        running = [start(WANDER, folder, MAX_BYTES, NUM_KEYS, seed, 250) for seed in range(4)]
        fetched = sum(int(finish(process)) for process in running)

    assert fetched > 10 * MAX_BYTES
    assert MAX_BYTES * 0.9 < watcher.most_bytes <= MAX_BYTES
    assert watcher.num_looks > 100
    check_sound(folder, MAX_BYTES)


@pytest.mark.parametrize("seed", [1, 2])
def test_processes_killed_at_random_moments_leave_a_sound_cache(tmp_path, seed):
    draw = random.Random(seed)
    folder = tmp_path / "cache"
    folder.mkdir()
    next_seed = iter(range(100 * seed, 200 * seed + 100))

    with Watcher(folder) as watcher:
        running = [start(WANDER, folder, MAX_BYTES, NUM_KEYS, next(next_seed), 100_000) for _ in range(3)]
        for _ in range(20):
            time.sleep(draw.uniform(0.05, 0.35))
            victim = running.pop(draw.randrange(len(running)))
            assert victim.poll() is None, victim.communicate()[1]
            victim.kill()
            victim.communicate(timeout=PATIENCE_S)
            running.append(start(WANDER, folder, MAX_BYTES, NUM_KEYS, next(next_seed), 100_000))
        # Whoever is left goes on, and so does one that comes anew.
        finish(start(WANDER, folder, MAX_BYTES, NUM_KEYS, next(next_seed), 50))
        for process in running:
            assert process.poll() is None, process.communicate()[1]
            process.kill()
            process.communicate(timeout=PATIENCE_S)

    assert watcher.most_bytes <= MAX_BYTES
    check_sound(folder, MAX_BYTES)


SLOW = (
    COMMON
    + """
def slow(path, progress):
    progress(size_of("a"))
    with open(path, "wb") as stream:
        stream.write(b"wrong")
        stream.flush()
        print("fetching", flush=True)
        time.sleep(600)
FileCache(sys.argv[1], 100_000).hold("a", slow, size_of("a"))
"""
)

WAITING = (
    COMMON
    + """
cache = FileCache(sys.argv[1], 100_000)
with cache.hold("a", fetch_of("a"), size_of("a")) as held:
    check(held.path, "a")
print(cache.stats().waits, cache.stats().misses, cache.stats().hits)
"""
)


def waits_for(process, path):
    """Whether a process keeps a file open that another has locked: a first try without waiting is over sooner."""
    for _ in range(3):
        opened = Path("/proc", str(process.pid), "fd")
        if not any(os.path.realpath(number) == str(path) for number in opened.iterdir()):
            return False
        time.sleep(0.05)
    return True


def test_a_fetch_whose_process_is_killed_is_taken_over_by_one_that_waits(tmp_path):
    folder = tmp_path / "cache"
    fetching = start(SLOW, folder)
    assert fetching.stdout.readline() == "fetching\n"
    waiting = [start(WAITING, folder) for _ in range(2)]
    wait_until(lambda: all(waits_for(process, folder / f"{name_of('a')}.lock") for process in waiting))

    fetching.kill()
    fetching.communicate(timeout=PATIENCE_S)

    counts = sorted(finish(process).split() for process in waiting)
    assert counts == [["1", "0", "1"], ["1", "1", "0"]]
    check_sound(folder, 100_000)


EVERY_MOMENT = (
    COMMON
    + """
folder = sys.argv[1]
WATCHED = [(os, name) for name in ("open", "unlink", "rename", "pwrite", "utime", "ftruncate", "close", "fsync")]
WATCHED.append((fcntl, "flock"))

def die_at(moment):
    '''Kill this process before or after one of its calls to the kernel: the moment counts both.'''
    left = [moment]
    def count():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def watched(call):
        def counted(*arguments, **options):
            count()
            result = call(*arguments, **options)
            count()
            return result
        return counted
    for module, name in WATCHED:
        setattr(module, name, watched(getattr(module, name)))

def total_bytes():
    return sum(os.stat(f"{folder}/{name}").st_size for name in os.listdir(folder) if name[32:] != ".lock"
               and name not in ("ledger", "bound"))

def scenario():
    '''A hit, a miss that removes two files, one of unknown size, one that fails, and one that is fetched ahead.'''
    cache = FileCache(folder, 100_000)
    for key in ("2", "large", "small"):
        cache.hold(key, sized(key), None if key == "small" else SIZES.get(key, 30_000)).close()
    try:
        cache.hold("short", sized("short"), 10_000)
    except DownloadError:
        pass
    # In this thread, so that the moments are the same every time.
    cache._fetch_ahead(wanted("ahead"))

SIZES = {"large": 55_000, "small": 5_000, "short": 9_999}

def sized(key):
    def fetch(path, progress):
        progress(SIZES.get(key, 30_000))
        with open(path, "wb") as stream:
            stream.write(key.encode() * SIZES.get(key, 30_000))
            stream.truncate(SIZES.get(key, 30_000))
    return fetch

def wanted(key):
    from raypipe.storage.node_cache import Wanted
    return Wanted(key, sized(key), 30_000)

moment = 0
while True:
    moment += 1
    before = FileCache(folder, 100_000)
    for key in "123":
        before.hold(key, sized(key), 30_000).close()
    # Of another job, and one that the child has to write in its place.
    with open(f"{folder}/bound", "w") as stream:
        stream.write(f"{400_000:020d}")
    child = os.fork()
    if child == 0:
        die_at(moment)
        scenario()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    on_disk, told = total_bytes(), int(open(f"{folder}/ledger").read())
    if on_disk > 100_000 or told < on_disk:
        sys.exit(f"killed at {moment}: {on_disk} bytes on disk, {told} in the ledger")
    if int(open(f"{folder}/bound").read()) not in (400_000, 100_000):
        sys.exit(f"killed at {moment}: the bound is {open(f'{folder}/bound').read()!r}")
    # One that was open all the time goes on without looking for the dead.
    for key in ("2", "large", "4"):
        with before.hold(key, sized(key), SIZES.get(key, 30_000)) as held:
            if open(held.path, "rb").read(len(key)) != key.encode():
                sys.exit(f"killed at {moment}: wrong content of {key}")
    FileCache(folder, 100_000)
    left = [name for name in os.listdir(folder) if len(name) != 32 and name not in ("ledger", "bound")]
    if left or total_bytes() > 100_000 or total_bytes() != int(open(f"{folder}/ledger").read()):
        sys.exit(f"killed at {moment}: {left} are left, {total_bytes()} bytes")
    if code == 0:
        break
    if code != -signal.SIGKILL:
        sys.exit(f"killed at {moment}: ended with {code}")
print(moment)
"""
)


def test_a_kill_before_and_after_every_call_to_the_kernel_leaves_a_sound_cache(tmp_path):
    folder = tmp_path / "cache"

    moments = int(finish(start(EVERY_MOMENT, folder)))

    assert moments > 200
    check_sound(folder, 100_000)
