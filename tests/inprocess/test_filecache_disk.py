"""A file cache on a real folder: what is there, what goes, what is refused, and that it stays within its bytes."""

import errno
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from filecache_cases import Fetch, Gated, data_bytes, extras, is_there, ledger_bytes, never, put
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from waiting import PATIENCE_S, wait_until

from raypipe.errors import ConfigError, DownloadError
from raypipe.storage import FileCache, cache_folder
from raypipe.storage.cache_folder import name_of
from raypipe.storage.local_files import lock_file


def run(*command):
    return subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def test_a_file_is_fetched_once_and_then_found(folder):
    cache, fetch = FileCache(folder, 1000), Fetch("a", 300)

    for _ in range(3):
        with cache.hold("a", fetch, 300) as held, open(held.path, "rb") as stream:
            assert stream.read() == fetch.content

    assert fetch.calls == 1
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.bytes_fetched, stats.evictions, stats.waits) == (2, 1, 300, 0, 0)
    assert extras(folder) == []


def test_another_cache_on_the_folder_finds_what_one_has_fetched(folder):
    put(FileCache(folder, 1000), "a")

    with pickle.loads(pickle.dumps(FileCache(folder, 1000))).hold("a", never, 100) as held:
        assert os.path.getsize(held.path) == 100


def test_the_least_recently_used_goes_first(folder):
    cache = FileCache(folder, 300)
    put(cache, "a", "b", "c")
    with cache.hold("a", never):
        pass

    put(cache, "d")

    assert [is_there(cache, key) for key in "abcd"] == [True, False, True, True]
    assert cache.stats().evictions == 1


def test_what_was_used_for_long_counts_from_its_end(folder):
    cache = FileCache(folder, 300)
    held = cache.hold("a", Fetch("a", 100), 100)
    put(cache, "b", "c")
    held.close()

    put(cache, "d")

    assert [is_there(cache, key) for key in "abcd"] == [True, False, True, True]


def test_what_is_in_use_stays_whoever_uses_it(folder):
    cache, other = FileCache(folder, 300), FileCache(folder, 300)
    held = other.hold("a", Fetch("a", 100), 100)
    with cache.hold("a", never), cache.hold("a", never):
        put(cache, "b", "c", "d", "e")

    put(cache, "f", "g", "h")
    assert os.path.getsize(held.path) == 100

    held.close()
    held.close()
    put(cache, "i", "j", "k")
    assert not is_there(cache, "a")


def test_a_held_file_is_let_go_when_nothing_refers_to_it(folder):
    cache = FileCache(folder, 100)
    held = cache.hold("a", Fetch("a", 100), 100)
    with pytest.raises(DownloadError):
        put(cache, "b")

    del held
    gc.collect()
    put(cache, "b")

    assert not is_there(cache, "a")


def test_a_file_larger_than_the_cache_is_refused_before_anything_goes(folder):
    cache = FileCache(folder, 300)
    put(cache, "a")

    with pytest.raises(ConfigError, match=r"'big' has 301 bytes.*may hold 300 in all.*larger max_bytes"):
        cache.hold("big", never, 301)

    assert is_there(cache, "a")
    assert extras(folder) == []


def test_no_room_because_all_is_in_use_names_the_sizes(folder):
    cache = FileCache(folder, 300)
    with cache.hold("a", Fetch("a", 200), 200), pytest.raises(DownloadError) as caught:
        cache.hold("b", never, 150)

    told = str(caught.value)
    assert "'b' of 150 bytes" in told
    assert "of the 300 bytes that it may hold, 200 are in use" in told
    assert str(folder) in told
    assert extras(folder) == []
    put(cache, "b", size=150)


@pytest.mark.parametrize("brought", [0, 299, 301])
def test_a_file_of_another_size_is_an_error_and_leaves_nothing(folder, brought):
    cache = FileCache(folder, 1000)

    with pytest.raises(DownloadError, match="'a' has 300 bytes, but"):
        cache.hold("a", Fetch("a", brought), 300)

    assert data_bytes(folder) == ledger_bytes(folder) == 0
    assert extras(folder) == []
    put(cache, "a", size=300)


def test_an_error_of_the_fetch_passes_through_with_its_place(folder):
    class Cut(Fetch):
        def during(self, written):
            if written >= 128:
                raise ConnectionResetError("peer went away")

    cache = FileCache(folder, 1000)

    with pytest.raises(ConnectionResetError) as caught:
        cache.hold("a", Cut("a", 300), 300)

    assert caught.value.__notes__ == [f"while fetching 'a' into the cache at {str(folder)!r}"]
    assert data_bytes(folder) == 0
    put(cache, "b", size=1000)


def test_a_file_of_unknown_size_reserves_as_it_grows(folder):
    class Watched(Fetch):
        def during(self, written):
            assert data_bytes(folder) + self.piece <= 1000

    cache = FileCache(folder, 1000)
    put(cache, "a", "b", "c", size=300)

    with cache.hold("big", Watched("big", 1000, piece=50)) as held:
        assert os.path.getsize(held.path) == 1000

    assert data_bytes(folder) == 1000
    with pytest.raises(ConfigError, match="has 1001 bytes or more"):
        cache.hold("bigger", Fetch("bigger", 1001, piece=1))
    assert extras(folder) == []


def test_a_fetch_of_unknown_size_that_announces_nothing_is_an_error(folder):
    cache = FileCache(folder, 1000)

    with pytest.raises(ConfigError, match="wrote 300 bytes but announced 0"):
        cache.hold("a", Fetch("a", 300, announces=False))

    assert data_bytes(folder) == 0


def test_a_fetch_must_write_a_file(folder, tmp_path):
    cache = FileCache(folder, 1000)

    with pytest.raises(ConfigError, match="wrote no file"):
        cache.hold("a", lambda path, progress: None)
    with pytest.raises(ConfigError, match="a link or folder"):
        cache.hold("a", lambda path, progress: os.symlink(tmp_path, path))
    with pytest.raises(ConfigError, match="a link or folder"):
        cache.hold("a", lambda path, progress: os.makedirs(f"{path}/inside"))

    assert extras(folder) == []


@pytest.mark.parametrize(("key", "size"), [("", 1), ("a", -1)])
def test_a_bad_request_is_refused(folder, key, size):
    cache = FileCache(folder, 1000)

    with pytest.raises(ConfigError):
        cache.hold(key, never, size)


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot keep files in"):
        FileCache(tmp_path / "file" / "cache", 100)


def test_threads_that_want_one_file_fetch_it_once(folder):
    cache, fetch = FileCache(folder, 1000), Gated("a", 300)

    with ThreadPoolExecutor(8) as pool:
        held = [pool.submit(cache.hold, "a", fetch, 300) for _ in range(8)]
        wait_until(lambda: cache.stats().waits == 7)
        fetch.gate.set()
        paths = {item.result(PATIENCE_S).path for item in held}

    assert len(paths) == 1
    assert fetch.calls == 1
    assert (cache.stats().hits, cache.stats().misses) == (7, 1)


def test_a_fetch_that_fails_is_taken_over_by_one_that_waits(folder):
    class Failing(Gated):
        def during(self, written):
            super().during(written)
            raise ConnectionResetError("peer went away")

    cache, failing, good = FileCache(folder, 1000), Failing("a", 300), Fetch("a", 300)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.hold, "a", failing, 300)
        assert failing.started.wait(PATIENCE_S)
        second = pool.submit(cache.hold, "a", good, 300)
        wait_until(lambda: cache.stats().waits == 1)
        failing.gate.set()

        with pytest.raises(ConnectionResetError):
            first.result(PATIENCE_S)
        assert os.path.getsize(second.result(PATIENCE_S).path) == 300


def test_fetches_at_once_do_not_together_pass_the_bound(folder):
    cache, one = FileCache(folder, 1000), Gated("a", 600)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.hold, "a", one, 600)
        assert one.started.wait(PATIENCE_S)
        # Nothing of the first is on disk yet.
        with pytest.raises(DownloadError, match="600 are being fetched for others"):
            cache.hold("b", never, 401)
        put(cache, "c", size=400)
        one.gate.set()
        first.result(PATIENCE_S).close()

    assert data_bytes(folder) == 1000


def test_a_damaged_file_is_fetched_again(folder):
    cache = FileCache(folder, 1000)
    put(cache, "a")
    os.truncate(folder / name_of("a"), 50)

    with cache.hold("a", Fetch("a", 100), 100) as held:
        assert os.path.getsize(held.path) == 100
        with pytest.raises(DownloadError, match="has not the 90 bytes that it should, and is in use"):
            cache.hold("a", never, 90)

    put(cache, "b", size=1000)


def test_what_the_dead_have_left_is_removed_and_files_of_others_are_not(folder):
    put(FileCache(folder, 1000), "a")
    for name in (f"{name_of('b')}.part", f"{name_of('b')}.part.tmp", f"{name_of('c')}.lock", f"{name_of('c')}.part"):
        (folder / name).write_bytes(b"x" * 300)
    (folder / "README").write_bytes(b"not of the cache")

    cache = FileCache(folder, 1000)

    assert extras(folder) == ["README"]
    assert is_there(cache, "a")


def test_a_lower_bound_is_kept_from_the_start(folder):
    put(FileCache(folder, 1000), "a", "b", "c", "d")

    cache = FileCache(folder, 200)

    assert [is_there(cache, key) for key in "abcd"] == [False, False, True, True]


def test_a_default_bound_gives_way_to_a_larger_one_that_was_given_for_the_folder(folder):
    put(FileCache(folder, 400), "a", "b", "c")

    cache = pickle.loads(pickle.dumps(FileCache(folder, 200, is_default=True)))
    before = [is_there(cache, key) for key in "abc"]
    put(cache, "d", "e")

    assert before == [True] * 3
    assert [is_there(cache, key) for key in "abcde"] == [False, True, True, True, True]


def test_a_default_bound_follows_whoever_last_fetched_with_one_that_was_given(folder):
    large, default = FileCache(folder, 600), FileCache(folder, 200, is_default=True)
    FileCache(folder, 300)
    put(default, "a", "b", "c", "d")
    after_a_lower_one = ledger_bytes(folder)

    put(large, "e", "f")
    put(default, "g")

    assert after_a_lower_one == 300
    assert [is_there(large, key) for key in "abcdefg"] == [False] + [True] * 6


def test_a_default_bound_holds_where_a_smaller_one_was_given(folder):
    FileCache(folder, 100)
    cache = FileCache(folder, 200, is_default=True)

    put(cache, "a", "b", "c")

    assert [is_there(cache, key) for key in "abc"] == [False, True, True]
    assert FileCache(folder, 100).max_bytes == ledger_bytes(folder) == 100


@pytest.mark.parametrize("record", [b"", b"no number", b"9" * 21])
def test_a_bound_that_cannot_be_read_counts_as_none(folder, record):
    put(FileCache(folder, 1000), "a", "b", "c")
    (folder / "bound").write_bytes(record)

    cache = FileCache(folder, 200, is_default=True)
    kept = [is_there(cache, key) for key in "abc"]
    FileCache(folder, 300)

    assert kept == [False, True, True]
    assert int((folder / "bound").read_bytes()) == 300


def test_a_folder_that_is_removed_meanwhile_is_made_again(folder):
    cache = FileCache(folder, 300)
    held = cache.hold("a", Fetch("a", 100), 100)
    shutil.rmtree(folder)

    put(cache, "a", "b", "c", "d")
    held.close()

    assert data_bytes(folder) == 300


def test_hits_and_misses_with_room_do_not_look_at_the_whole_folder_and_one_look_serves_many_removals(
    folder, monkeypatch
):
    cache, looks = FileCache(folder, 2000), []
    survey = cache_folder.survey_folder
    monkeypatch.setattr(cache_folder, "survey_folder", lambda place: looks.append(place) or survey(place))
    put(cache, *map(str, range(20)))
    put(cache, *map(str, range(20)))
    assert looks == []

    put(cache, *map(str, range(20, 38)))

    assert len(looks) == 1
    assert [is_there(cache, str(number)) for number in range(38)] == [number >= 18 for number in range(38)]


def test_a_file_that_was_used_while_the_folder_was_looked_at_may_still_go(folder, monkeypatch):
    cache = FileCache(folder, 100)
    put(cache, "a")
    survey = cache_folder.survey_folder

    def survey_then_use(place):
        found = survey(place)
        os.utime(folder / name_of("a"))
        return found

    monkeypatch.setattr(cache_folder, "survey_folder", survey_then_use)
    put(cache, "b")

    assert not is_there(cache, "a")


def test_a_file_is_on_the_disk_before_it_is_in_place(folder, monkeypatch):
    calls = []
    for name in ("fsync", "rename"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, call=call: calls.append(name) or call(*given))

    put(FileCache(folder, 100), "a")

    assert calls == ["fsync", "rename"]


def test_an_interrupt_just_after_a_file_is_in_place_does_not_give_its_bytes_back(folder, monkeypatch):
    cache, rename = FileCache(folder, 100), os.rename

    def rename_then_stop(*paths):
        rename(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", rename_then_stop)
    with pytest.raises(KeyboardInterrupt):
        put(cache, "a")
    monkeypatch.undo()

    assert ledger_bytes(folder) >= data_bytes(folder) == 100
    put(cache, "b")
    assert data_bytes(folder) == 100


def test_a_claim_that_was_lost_does_not_harm_the_next(folder):
    book = cache_folder.CacheFolder(str(folder), 100)
    lost = book.claim("a", is_ahead=False, wait=False)
    os.unlink(lost.lock.path)
    other = book.claim("a", is_ahead=False, wait=False)
    with open(other.partial, "wb") as stream:
        stream.write(b"half")

    book.drop(lost)

    assert extras(folder) == [f"{name_of('a')}.lock", f"{name_of('a')}.part"]
    book.drop(other)
    assert extras(folder) == []


def test_a_lock_is_free_once_given_up_though_a_copy_of_its_file_is_open(tmp_path):
    lock = lock_file(str(tmp_path / "lock"), create=True)
    # As a child has between fork and exec.
    copy = os.dup(lock.fd)

    lock.release()

    lock_file(str(tmp_path / "lock"), wait=False).release()
    os.close(copy)


def test_a_full_disk_takes_what_nobody_uses_and_tries_again(folder):
    class Disk(Fetch):
        def during(self, written):
            if data_bytes(folder) + self.piece > 250:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = FileCache(folder, 10_000)
    put(cache, "a", "b")

    cache.hold("c", Disk("c", 150), 150).close()
    assert [is_there(cache, key) for key in "abc"] == [False, False, True]

    with pytest.raises(DownloadError) as caught:
        cache.hold("d", Disk("d", 400), 400)
    told = str(caught.value)
    assert f"the disk of {str(folder)!r} is full" in told
    assert "'d' of 400 bytes" in told
    assert "after removing 150 bytes" in told
    assert extras(folder) == []
    with pytest.raises(DownloadError, match="is full"):
        cache.prefetch("e", Disk("e", 400), 400).result(PATIENCE_S)


SMALL_DISK = """
import os, sys
from raypipe.errors import DownloadError
from raypipe.storage import FileCache
def fetch(path, progress):
    with open(path, "wb") as stream:
        stream.write(bytes(400_000))
cache = FileCache(sys.argv[1] + "/cache", 10**9)
for key in "abcdef":
    cache.hold(key, fetch, 400_000).close()
held = [cache.hold(key, fetch, 400_000) for key in "gh"]
try:
    cache.hold("i", fetch, 400_000)
except DownloadError as error:
    print(cache.stats().evictions, error)
"""


def test_a_disk_that_is_really_full(tmp_path):
    mounted = f"mount -t tmpfs -o size=1m none {tmp_path} && {sys.executable} -c '{SMALL_DISK}' {tmp_path}"
    if run("unshare", "-m", "true").returncode:
        pytest.skip("a disk of its own needs the right to mount one")

    done = run("unshare", "-m", "sh", "-c", mounted)

    assert done.stdout.startswith("6 the disk of"), done.stdout + done.stderr


FORKS = """
import os, signal, sys, threading
from raypipe.storage import FileCache
def fetch(path, progress):
    open(path, "wb").write(bytes(100))
def stuck(path, progress):
    started.set()
    threading.Event().wait()
started = threading.Event()
cache = FileCache(sys.argv[1], 300, prefetch_threads=1)
cache.prefetch("stuck", stuck, 100)
started.wait()
held = cache.hold("a", fetch, 100)
kept = cache.hold("b", fetch, 100)
done = os.pipe()
if os.fork() == 0:
    kept.close()
    os.write(done[1], b"x")
    sys.stdin.read()
    print(cache.prefetch("c", fetch, 100).result(30))
    sys.exit()
os.read(done[0], 1)
try:
    cache.hold("c", fetch, 200)
except Exception as error:
    print(type(error).__name__, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def forking(folder):
    """The parent of a child that waits for its input to end; both are gone after the test."""
    command = [sys.executable, "-c", FORKS, folder]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield parent
    with suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate()


def test_a_forked_child_lets_its_parent_hold_and_die_and_can_fetch_ahead(folder, forking):
    assert forking.wait(PATIENCE_S) == -signal.SIGKILL

    # The child lives, and has a copy of all that its parent held.
    cache = FileCache(folder, 300)
    put(cache, "everything", size=300)
    told, _ = forking.communicate(timeout=PATIENCE_S)

    assert told.split() == ["DownloadError", "True"]
    assert extras(folder) == []


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of uses and holds of two caches on one folder, against a list in order of use."""

    KEYS = st.sampled_from("abcdefgh")
    MAX_BYTES = 1000

    @initialize()
    def start(self):
        self.folder = FOLDERS()
        self.caches = [FileCache(self.folder, self.MAX_BYTES) for _ in range(2)]
        self.there = OrderedDict()
        self.held = []

    def size_of(self, key):
        return 100 + 50 * "abcdefgh".index(key)

    @rule(key=KEYS, which=st.integers(0, 1), is_known=st.booleans(), keeps=st.booleans())
    def use(self, key, which, is_known, keeps):
        size = self.size_of(key)
        fetch = Fetch(key, size, piece=size)
        try:
            held = self.caches[which].hold(key, fetch, size if is_known else None)
        except DownloadError:
            in_use = {other for other, _ in self.held}
            assert key not in self.there
            assert sum(map(self.size_of, in_use)) + size > self.MAX_BYTES
            # What could go may have gone before this was known.
            self.forget(self.there.keys() - in_use)
            return
        with open(held.path, "rb") as stream:
            assert stream.read() == fetch.content
        assert fetch.calls == (key not in self.there)
        self.make_room(key)
        self.there[key] = None
        self.there.move_to_end(key)
        self.held.append((key, held))
        if not keeps:
            self.let_go(len(self.held) - 1)

    def make_room(self, key):
        wanted = {*self.there, key}
        in_use = {other for other, _ in self.held}
        for oldest in list(self.there):
            if sum(map(self.size_of, wanted)) <= self.MAX_BYTES:
                break
            if oldest != key and oldest not in in_use:
                wanted.remove(oldest)
                del self.there[oldest]

    def forget(self, keys):
        for key in keys:
            if not is_there(self.caches[0], key):
                del self.there[key]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close_one(self, data):
        self.let_go(data.draw(st.integers(0, len(self.held) - 1)))

    def let_go(self, index):
        key, held = self.held.pop(index)
        held.close()
        self.there.move_to_end(key)

    @rule(which=st.integers(0, 1))
    def reopen(self, which):
        self.caches[which] = FileCache(self.folder, self.MAX_BYTES)

    @invariant()
    def holds_what_it_should_within_the_bound(self):
        assert {key for key in "abcdefgh" if is_there(self.caches[0], key)} == set(self.there)
        assert data_bytes(self.folder) == ledger_bytes(self.folder) <= self.MAX_BYTES
        assert extras(self.folder) == []

    def teardown(self):
        for _, held in self.held:
            held.close()


FOLDERS = None


def test_any_sequence_of_uses_keeps_order_bound_and_content(tmp_path_factory, monkeypatch):
    monkeypatch.setitem(globals(), "FOLDERS", lambda: tmp_path_factory.mktemp("machine"))
    machine = CacheMachine.TestCase
    machine.settings = settings(max_examples=40, stateful_step_count=25)

    machine().runTest()
