"""A Hub that fails while a run reads from it: right data, or an error that names file, commit and cause."""

import time
from pathlib import Path

import numpy as np
import pytest
from batches import TOP, assert_equals_samples, frames_of_all, frames_of_dataset, local_loader
from hub_server import HubServer

from raypipe.dataset import open_dataset
from raypipe.errors import DownloadError
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, open_root
from raypipe.storage import request_budget as requests
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

ROWS = "data/chunk-000/file-000.parquet"
VIDEO = f"videos/{TOP}/chunk-000/file-000.mp4"

KEPT = {"whole": 1 << 30, "ranged": 0}
"""The `whole_bytes` of a cache that fetches files whole, and of one that fetches parts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    spec = SynthSpec(lengths=(7, 3, 5), cameras=(CameraSpec(name=TOP, height=32, width=32),), state_dim=2, action_dim=2)
    return write_dataset(tmp_path_factory.mktemp("hub") / "arm", spec)


@pytest.fixture(scope="module")
def dataset(folder):
    return open_dataset(str(folder))


@pytest.fixture
def hub(folder, tmp_path, monkeypatch, request):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("raypipe.storage.hub.client.FIRST_WAIT_S", 0.01)
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.0, 0.01, 0.02))
    # A pause of a test is not to hold up the next one.
    own = requests.Budget()
    monkeypatch.setattr(requests._process, "own", own)
    monkeypatch.setattr(requests._process, "gate", own)
    # Little patience only where the server is slow on purpose.
    timeout_s = 0.5 if "slow" in request.node.name else 20
    with HubServer() as server, server.as_hub(tmp_path / "hub", timeout_s=timeout_s):
        server.add_repo("lab/arm", folder, tags=("v3.0",))
        yield server


def make_loader(tmp_path, kept):
    cache = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=1 << 30, whole_bytes=KEPT[kept])
    return local_loader(Pipeline(open_dataset("lab/arm"), batch_size=6, seed=0, order={"live_spans": 2}, cache=cache))


def assert_nothing_wrong_is_kept(tmp_path, folder):
    """Whatever has a final name is a file of the dataset, or a part of one."""
    right = [path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()]
    for path in (tmp_path / "cache").iterdir():
        if len(path.name) == 32:
            content = path.read_bytes()
            assert any(content in one for one in right)


WRONG = b"\0" * 100

PASSING = {
    "429 with Retry-After": {"kind": "resolve", "status": 429, "headers": {"Retry-After": "1"}},
    "429 of the storage": {"kind": "lfs", "status": 429, "times": 2},
    "500": {"kind": "resolve", "status": 500, "times": 3},
    "503 of the storage": {"kind": "lfs", "status": 503, "times": 3},
    "slow": {"kind": "lfs", "delay_s": 0.8},
    "cut before the answer": {"kind": "resolve", "cut_after": 0, "times": 2},
    "cut in the body": {"kind": "lfs", "cut_after": 100, "times": 2},
    "truncated": {"kind": "lfs", "truncate_to": 100, "times": 2},
    "short content that seems whole": {"kind": "lfs", "content": WRONG, "times": 2},
    "missing for a moment": {"kind": "resolve", "is_missing": True},
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_leaves_right_data(hub, folder, dataset, tmp_path, name, kept):
    loader = make_loader(tmp_path, kept)
    hub.fail(ROWS, **PASSING[name])
    hub.fail(VIDEO, **PASSING[name])

    batches = list(loader)

    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches:
        assert_equals_samples(batch, dataset)
    assert not any(fault.times for fault in hub.faults), "the fault was not met"
    assert_nothing_wrong_is_kept(tmp_path, folder)


LASTING = {
    "500": ({"kind": "lfs", "status": 500}, "the Hub answers 500"),
    "429": ({"kind": "resolve", "status": 429}, "the Hub answers 429"),
    "long wait": (
        {"kind": "resolve", "status": 429, "headers": {"Retry-After": "3600"}},
        "it asks to wait for 3600 s",
    ),
    "slow": ({"kind": "lfs", "delay_s": 0.8}, "ReadTimeout"),
    "cut": ({"kind": "lfs", "cut_after": 10}, "Error: "),
    "truncated": ({"kind": "lfs", "truncate_to": 10}, "RemoteProtocolError"),
    "short": ({"kind": "lfs", "content": WRONG}, "(it ended after 100 of|: 100 of [0-9]+ bytes came)"),
    "missing": ({"kind": "resolve", "is_missing": True}, "has no file"),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", LASTING)
def test_a_fault_that_lasts_names_file_commit_and_cause(hub, folder, tmp_path, monkeypatch, name, kept):
    fault, cause = LASTING[name]
    monkeypatch.setattr("raypipe.storage.hub.client.TRIES", 2)
    loader = make_loader(tmp_path, kept)
    commit = hub.repos["lab/arm"].tags["v3.0"]
    hub.fail(VIDEO, times=10_000, **fault)
    began = time.monotonic()

    with pytest.raises(DownloadError, match=cause) as raised:
        list(loader)

    assert VIDEO in str(raised.value)
    assert commit in str(raised.value)
    assert time.monotonic() - began < 60
    assert_nothing_wrong_is_kept(tmp_path, folder)


def test_content_of_the_right_size_that_is_another_is_not_kept(hub, folder, tmp_path, dataset):
    content = bytearray((folder / VIDEO).read_bytes())
    content[len(content) // 2] ^= 1
    loader = make_loader(tmp_path, "whole")
    hub.fail(VIDEO, kind="lfs", content=bytes(content))

    batches = list(loader)

    assert hub.counts["lfs"] > len({VIDEO, ROWS})
    for batch in batches:
        assert_equals_samples(batch, dataset)
    assert_nothing_wrong_is_kept(tmp_path, folder)


@pytest.mark.parametrize("kept", KEPT)
def test_a_hub_that_wants_a_long_wait_is_left_alone(hub, tmp_path, kept):
    loader = make_loader(tmp_path, kept)
    hub.fail(VIDEO, kind="resolve", status=429, headers={"Retry-After": "3600"}, times=10_000)

    with pytest.raises(DownloadError, match="it asks to wait for 3600 s"):
        list(loader)

    # For each of three spans a fetch ahead, and one that met the wait and was not tried again.
    assert hub.paths[VIDEO] <= 6


@pytest.fixture
def big(hub, tmp_path):
    """A file of three blocks, and its content."""
    content = np.random.default_rng(0).bytes(3 << 20)
    (tmp_path / "big/videos").mkdir(parents=True)
    (tmp_path / "big/videos/big.mp4").write_bytes(content)
    hub.add_repo("lab/big", tmp_path / "big")
    storage = open_root("lab/big").cached(CacheSpec(folder=str(tmp_path / "cache"), whole_bytes=0))
    return storage, content


def test_an_answer_of_another_range_is_asked_for_again(hub, big):
    storage, content = big
    hub.fail("big.mp4", kind="lfs", ignores_ranges=True, times=2)

    with storage.open_ranged("videos/big.mp4") as file:
        file.need(2_000_000, 2_100_000)
        file.seek(2_000_000)
        found = file.read(100_000)

    assert found == content[2_000_000:2_100_000]
    assert set(hub.ranges) == {"bytes=2000000-2099999"}


def test_a_storage_without_ranges_is_said(hub, big, tmp_path):
    hub.fail("big.mp4", kind="lfs", ignores_ranges=True, times=1000)

    with big[0].open_ranged("videos/big.mp4") as file, pytest.raises(DownloadError, match="'no range' came") as raised:
        file.need(2_000_000, 2_100_000)

    assert raised.match("'videos/big.mp4' of dataset 'lab/big'")
    assert not [path for path in (tmp_path / "cache").iterdir() if len(path.name) == 32]


@pytest.mark.parametrize("kept", KEPT)
def test_nothing_is_sent_while_the_hub_wants_a_pause(hub, tmp_path, kept):
    loader = make_loader(tmp_path, kept)
    hub.fail("", kind="resolve", status=429, headers={"Retry-After": "2"})
    hub.times.clear()

    list(loader)

    # What was on its way when the pause began may come after it; on a busy machine not within moments.
    first = hub.times[0]
    assert not [at for at in hub.times if first + 1.0 < at < first + 2.0]
    assert max(hub.times) > first + 2.0
