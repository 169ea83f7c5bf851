"""Servers that send next to nothing: they fail after a while, whichever they are; a body that comes is never too large.

One minute is short here: a body must bring 1 kB in 0.3 s.
"""

import functools
import http.server
import os
import signal
import subprocess
import sys
import threading
import time

import aiohttp
import pytest
from batches import varied_spec
from hub_server import HubServer
from s3_server import S3Server
from waiting import PATIENCE_S, wait_until

from raypipe.dataset import download_dataset
from raypipe.errors import DownloadError
from raypipe.storage import CacheSpec, open_root
from raypipe.storage.hub.cache import resolve
from raypipe.storage.hub.files import open_files
from raypipe.testing import write_dataset

REPO = "lab/arm"
BIG = "videos/top/big.mp4"
BIG_BYTES = 300_000
DRIP_S = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("slow") / "arm"
    for name, content in {"meta/info.json": b"{}\n" * 100, BIG: os.urandom(BIG_BYTES)}.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(content)
    return top


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("raypipe.storage.hub.client.FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("raypipe.storage.hub.client.TRIES", 2)
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.01,))
    monkeypatch.setattr("raypipe.storage.request_budget.PACE_S", 0.3, raising=False)
    monkeypatch.setattr("raypipe.storage.request_budget.PACE_BYTES", 1000, raising=False)


@pytest.fixture
def hub(folder, tmp_path):
    with HubServer() as server, server.as_hub(tmp_path / "hub"):
        server.add_repo(REPO, folder, tags=("v3.0",))
        yield server


class SlowWeb:
    """Serves a folder; what ends in `slow` comes a byte at a time, or in `pieces` pieces with a pause before each."""

    def __init__(self, top):
        self.slow, self.drip_s, self.pieces, self.pause_s = "", 0.0, 1, 0.0
        self.was_asked = threading.Event()
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def copyfile(self, source, outputfile):
                server.was_asked.set()
                content = source.read()
                size = len(content) // server.pieces + 1
                if server.slow and self.path.endswith(server.slow) and server.drip_s:
                    size = 1
                for start in range(0, len(content), size):
                    time.sleep(server.drip_s or server.pause_s)
                    try:
                        outputfile.write(content[start : start + size])
                    except OSError:
                        return

            def log_message(self, *_arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=top))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_error):
        self._server.shutdown()
        self._server.server_close()


def cache_of(tmp_path, whole_bytes=1 << 30):
    return CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30, whole_bytes=whole_bytes)


def assert_too_slow(read):
    began = time.monotonic()
    with pytest.raises(DownloadError) as raised:
        read()
    assert "in 0.3 s" in "; ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("kind", ["tree", "revision", "lfs"])
def test_a_hub_that_sends_a_byte_at_a_time_is_a_fault(hub, kind):
    hub.fail("", kind=kind, drip_s=DRIP_S, times=100)

    assert_too_slow(lambda: download_dataset(REPO))


def test_a_part_of_a_file_of_the_hub_that_drips_is_a_fault(hub):
    source = resolve(REPO)
    files = open_files(source)
    assert files.listing
    hub.fail(BIG, kind="lfs", drip_s=DRIP_S, times=100)

    assert_too_slow(lambda: files.cat_file(f"{files.root}/{BIG}", 10, 100_000))


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0], ids=["whole", "ranged"])
def test_a_web_server_that_drips_is_a_fault(folder, tmp_path, whole_bytes):
    with SlowWeb(folder) as server:
        server.slow, server.drip_s = BIG, DRIP_S
        storage = open_root(server.address).cached(cache_of(tmp_path, whole_bytes))

        assert_too_slow(lambda: storage.read_range(BIG, 0, 100_000))
        assert_too_slow(lambda: storage.cached(None).read_bytes(BIG))


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0], ids=["whole", "ranged"])
def test_an_object_store_that_drips_is_a_fault(folder, tmp_path, whole_bytes):
    with S3Server() as s3, s3.as_s3():
        storage = open_root(s3.add("arm", folder)).cached(cache_of(tmp_path, whole_bytes))
        s3.fail(BIG, drip_s=DRIP_S, times=100)

        assert_too_slow(lambda: storage.read_range(BIG, 0, 100_000))
        assert_too_slow(lambda: storage.cached(None).read_range(BIG, 0, 100_000))


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0], ids=["whole", "ranged"])
def test_a_large_file_of_a_web_server_may_take_longer_than_any_time_out(folder, tmp_path, monkeypatch, whole_bytes):
    # The total of aiohttp's default, which is 300 s, in short.
    short = aiohttp.ClientTimeout(total=1)
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", short)
    monkeypatch.setattr("raypipe.storage.request_budget.PACE_S", 1.0)
    with SlowWeb(folder) as server:
        server.pieces, server.pause_s = 20, 0.1
        storage = open_root(f"{server.address}/").cached(cache_of(tmp_path, whole_bytes))

        content = storage.read_bytes(BIG)

    assert content == (folder / BIG).read_bytes()


def test_s3_whole_files_come_in_parts_at_once_and_are_right(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("raypipe.storage.bodies.PART_BYTES", 70_000)
    # A part that a busy machine brings late is not asked for again: they are counted.
    monkeypatch.setattr("raypipe.storage.request_budget.PACE_S", 60.0)
    with S3Server() as s3, s3.as_s3():
        storage = open_root(s3.add("arm", folder)).cached(cache_of(tmp_path))
        s3.fail(BIG, truncate_to=30_000)

        content = storage.read_bytes(BIG)

    assert content == (folder / BIG).read_bytes()
    assert s3.keys[f"arm/{BIG}"] == 6


PROGRAM = [sys.executable, "-c", "from raypipe.cli import main; main()", "download", REPO]


def start_download(hub, tmp_path, out):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = {**clean, **hub.environment(tmp_path / "mine"), "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    return subprocess.Popen(
        [*PROGRAM, "--out", str(out)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


SLOW = {
    "before the answer": {"kind": "lfs", "delay_s": 600},
    "in a body": {"kind": "lfs", "pause_after": 100_000, "pause_s": 600},
    "in a wait": {"kind": "lfs", "status": 503, "headers": {"Retry-After": "500"}},
    "in a wait for the listing": {"kind": "tree", "path": "", "status": 503, "headers": {"Retry-After": "500"}},
}


@pytest.mark.parametrize("name", SLOW)
def test_ctrl_c_ends_a_download_at_once(hub, tmp_path, name):
    fault = {"path": BIG, **SLOW[name]}
    hub.fail(**fault)
    running = start_download(hub, tmp_path, tmp_path / "out")
    wait_until(lambda: not hub.faults[0].times)
    time.sleep(0.3)

    pressed = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=60)

    # Far below every time-out and wait, which are 500 s and more.
    assert time.monotonic() - pressed < 30
    assert running.returncode == 130
    assert "Traceback" not in told
    assert not (tmp_path / "out" / BIG).exists()


def test_ctrl_c_ends_a_read_of_a_slow_web_server_at_once(folder, tmp_path):
    write_dataset(tmp_path / "web", varied_spec())
    with SlowWeb(tmp_path / "web") as server:
        server.pause_s = 600
        running = subprocess.Popen(
            [*PROGRAM[:3], "info", server.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        # Not while Python itself still starts, which may take long on a busy machine.
        assert server.was_asked.wait(PATIENCE_S)
        time.sleep(0.3)
        pressed = time.monotonic()
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=60)

    assert time.monotonic() - pressed < 30
    assert running.returncode == 130
    assert "Traceback" not in told
