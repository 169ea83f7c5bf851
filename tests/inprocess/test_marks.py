"""A process that waits for the network is not one that decodes: it has no mark, and its subprocess no alarm."""

import signal
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_server import Fault, HubServer
from torchcodec.decoders import VideoDecoder

from raypipe.dataset import open_dataset
from raypipe.decode import DecodeSpec, FrameDecoder
from raypipe.decode import frames as frames_module
from raypipe.decode import journal as journal_module
from raypipe.decode.frames import VideoRequest, decode_isolated
from raypipe.decode.journal import process_journal, video_key
from raypipe.storage import CacheSpec, num_requests
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

CAM = "cam"
KEPT = {"whole": 1 << 30, "by parts": 0, "off": None}
"""The largest files that are fetched whole."""


class WatchedHub(HubServer):
    """Notes what the journal of this process says while a request is under way."""

    def __init__(self, folder):
        super().__init__()
        self.journal = folder / f"raypipe-{Path('/proc/self').stat().st_uid}/decoding.1"
        self.marks = []
        self.delay_s = 0.0

    def take_fault(self, path, kind):
        self.marks.append(marks_in(self.journal))
        return Fault("", delay_s=self.delay_s if kind == "resolve" else 0.0)


def marks_in(file):
    return [slot for slot in np.fromfile(file, dtype="<u8").tolist() if slot] if file.exists() else []


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    spec = SynthSpec(lengths=(9, 6), cameras=(CameraSpec(name=CAM, gop=3),), state_dim=2, episodes_per_video_file=1)
    return write_dataset(tmp_path_factory.mktemp("marks") / "arm", spec)


@pytest.fixture
def hub(root, tmp_path, monkeypatch):
    """A Hub, and a journal of this test's own."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(journal_module, "_journals", {})
    with WatchedHub(tmp_path) as server, server.as_hub(tmp_path / "hub"):
        for name, value in server.environment(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        server.add_repo("lab/arm", root, tags=("v3.0",))
        yield server
    frames_module._end_child()


def open_meta(tmp_path, kept):
    meta, whole_bytes = open_dataset("lab/arm").meta, KEPT[kept]
    cache = None if whole_bytes is None else CacheSpec(folder=str(tmp_path / "files"), whole_bytes=whole_bytes)
    return replace(meta, storage=meta.storage.cached(cache))


def wanted_pixels(root, row=0):
    meta = open_dataset(str(root)).meta
    return FrameDecoder(meta, DecodeSpec()).decode_video(row, CAM, np.arange(meta.episodes.length[row]))


@pytest.mark.parametrize("kept", KEPT)
def test_no_process_is_marked_while_it_waits_for_the_hub(hub, root, tmp_path, monkeypatch, kept):
    wanted, decoding = wanted_pixels(root), []
    decode = VideoDecoder.get_frames_in_range

    def watched(self, *frames):
        decoding.append(marks_in(hub.journal))
        return decode(self, *frames)

    monkeypatch.setattr(VideoDecoder, "get_frames_in_range", watched)
    meta = open_meta(tmp_path, kept)
    hub.marks.clear()

    pixels = FrameDecoder(meta, DecodeSpec()).decode_video(0, CAM, np.arange(9))

    key = video_key(meta.storage, meta.video_file(0, CAM), 0, CAM)
    assert torch.equal(pixels, wanted)
    assert hub.marks
    assert not any(hub.marks)
    assert decoding == [[key]]
    assert marks_in(hub.journal) == []


def blame(meta):
    """Let it look as if two processes had died over the first episode."""
    key = video_key(meta.storage, meta.video_file(0, CAM), 0, CAM)
    grave = Path(process_journal()._grave(key))
    grave.mkdir(parents=True)
    for number in range(2):
        (grave / str(number)).touch()


@pytest.mark.parametrize("kept", ["whole", "by parts"])
def test_what_a_subprocess_decodes_is_fetched_by_its_parent(hub, root, tmp_path, kept):
    meta = open_meta(tmp_path, kept)
    blame(meta)
    sent, came = num_requests(), hub.num_requests

    with pytest.warns(UserWarning, match="in a subprocess"):
        pixels = FrameDecoder(meta, DecodeSpec()).decode_video(0, CAM, np.arange(9))

    assert torch.equal(pixels, wanted_pixels(root))
    assert num_requests() - sent == hub.num_requests - came > 0


def test_a_subprocess_may_wait_for_the_network_for_longer_than_it_may_decode(hub, root, tmp_path):
    meta = open_meta(tmp_path, "off")
    hub.delay_s, timeout_s = 4.0, 3.5
    request = VideoRequest(meta=meta, spec=DecodeSpec(), row=0, camera=CAM, frames=np.arange(9), timeout_s=timeout_s)

    pixels = decode_isolated(request)

    assert torch.equal(pixels, wanted_pixels(root))


def test_the_alarm_goes_on_where_it_stood_before_the_network():
    # Longer than any machine pauses: it must not ring. The test's own time-out uses the same timer, and has it back.
    outer = signal.getitimer(signal.ITIMER_REAL)
    alarm = journal_module.Alarm(250.0)
    alarm.set()
    threading.Event().wait(0.1)
    alarm.lift()
    signal.setitimer(signal.ITIMER_REAL, *outer)

    assert 0.0 < alarm._left_s <= 249.91
