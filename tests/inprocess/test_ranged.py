"""Files of which only parts are on the node: the bytes and pixels of the whole file, with few requests."""

import os
import tempfile
import uuid
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from raypipe.dataset import open_dataset
from raypipe.decode.frames import FrameDecoder
from raypipe.decode.spec import DecodeSpec
from raypipe.format import episode_first_frame, read_ranged_index, read_video_index
from raypipe.storage import CacheSpec, FileCache, RangedFile, Storage, copies, num_requests, open_cache
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.testing.video import encoders

SHARED = Path(__file__).parents[3] / "shared" / "data"
CAM = "cam"


class Held:
    """Parts of a content as files, counted."""

    def __init__(self, content, folder):
        self.cache = FileCache(folder, 1 << 30)
        self.content = content
        self.asked = []

    def __call__(self, start, stop):
        self.asked.append((start, stop))

        def fetch(path, progress):
            progress(stop - start)
            Path(path).write_bytes(self.content[start:stop])

        return self.cache.hold(f"{start}-{stop}", fetch, stop - start)


steps = st.one_of(
    st.tuples(st.just("seek"), st.integers(-50, 700), st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])),
    st.tuples(st.just("read"), st.integers(-1, 300), st.none()),
    st.tuples(st.just("readinto"), st.integers(0, 300), st.none()),
    st.tuples(st.just("readline"), st.integers(-1, 300), st.none()),
    st.tuples(st.just("need"), st.integers(0, 700), st.integers(0, 700)),
)


@settings(max_examples=60)
@given(st.integers(0, 600), st.lists(steps, max_size=40), st.integers(1, 90))
def test_any_way_of_reading_gives_the_bytes_of_the_file(size, sequence, block_bytes):
    content = np.random.default_rng(size).bytes(size)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "plain").write_bytes(content)
        patch.setattr(copies, "BLOCK_BYTES", block_bytes)
        patch.setattr(copies, "_KEPT", 3)
        patch.setattr(copies, "_LINE_BYTES", max(1, block_bytes // 3))
        held = Held(content, f"{folder}/cache")
        with open(Path(folder) / "plain", "rb") as plain, RangedFile(size, held) as file:
            for kind, one, other in sequence:
                num_asked = len(held.asked)
                if kind == "seek":
                    # A plain file refuses to go before its start, and so nobody does.
                    base = {os.SEEK_SET: 0, os.SEEK_CUR: plain.tell(), os.SEEK_END: size}[other]
                    assert file.seek(max(one, -base), other) == plain.seek(max(one, -base), other)
                elif kind == "read":
                    assert file.read(one) == plain.read(one)
                elif kind == "readline":
                    assert file.readline(one) == plain.readline(one)
                elif kind == "readinto":
                    buffer = bytearray(one)
                    count = file.readinto(buffer)
                    assert bytes(buffer[:count]) == plain.read(count)
                    assert count or not one or plain.read(1) == b""
                else:
                    file.need(one, other)
                    file.need(one, other)
                    assert len(held.asked) - num_asked <= 1
                assert file.tell() == plain.tell()
                assert len(file._parts) <= 3
        assert all(0 <= start < stop <= size for start, stop in held.asked)


def test_lines_are_not_read_byte_by_byte(tmp_path, monkeypatch):
    lines = [bytes([48 + number % 10]) * 5_000 + b"\n" for number in range(500)]
    held, reads, read = Held(b"".join(lines), tmp_path / "cache"), [], os.pread
    monkeypatch.setattr(os, "pread", lambda *asked: reads.append(asked) or read(*asked))

    with RangedFile(len(held.content), held) as file:
        assert list(file) == lines

    assert len(reads) < 5 * len(lines)
    assert [start for start, _ in held.asked] == list(range(0, len(held.content), copies.BLOCK_BYTES))


def test_a_part_that_was_needed_is_read_without_another(tmp_path):
    content = bytes(range(256)) * 20_000
    held = Held(content, tmp_path / "cache")
    with RangedFile(len(content), held) as file:
        file.need(1_000_000, 3_000_000)
        file.seek(1_000_000)

        assert file.read(2_000_000) == content[1_000_000:3_000_000]

        file.need(1_500_000, 2_000_000)
    assert held.asked == [(1_000_000, 3_000_000)]


@contextmanager
def in_memory(root):
    """A dataset on a filesystem that is none of the system's."""
    name = f"/ranged-{uuid.uuid4().hex}"
    put_files(root, f"{name}/arm")
    try:
        yield f"memory:/{name}/arm"
    finally:
        fsspec.filesystem("memory").rm(name, recursive=True)


def put_files(root, path):
    for file in sorted(Path(root).rglob("*")):
        if file.is_file():
            fsspec.filesystem("memory").pipe_file(f"{path}/{file.relative_to(root).as_posix()}", file.read_bytes())


def by_parts(uri, folder):
    """The metadata of a dataset whose files are kept by parts."""
    meta = open_dataset(uri).meta
    return replace(meta, storage=Storage(uri, CacheSpec(folder=str(folder), max_bytes=1 << 30, whole_bytes=0)))


def assert_same_pixels(root, tmp_path, num_spans, seed=0):
    """Compare random spans of all cameras, decoded from parts, with the local file."""
    draw = np.random.default_rng(seed)
    local = open_dataset(str(root)).meta
    with in_memory(root) as uri:
        remote = by_parts(uri, tmp_path / "cache")
        plain, parts = FrameDecoder(local, DecodeSpec()), FrameDecoder(remote, DecodeSpec())
        for camera in local.episodes.videos:
            for _ in range(num_spans):
                row = int(draw.integers(len(local.episodes)))
                length = int(local.episodes.length[row])
                first = int(draw.integers(length))
                frames = np.arange(first, int(draw.integers(first, length)) + 1)
                if draw.random() < 0.3:
                    frames = frames[:: int(draw.integers(1, 4))]
                pairs = zip(
                    parts.decode_video(row, camera, frames), plain.decode_video(row, camera, frames), strict=True
                )
                assert all(torch.equal(one, other) for one, other in pairs)
        assert open_cache(remote.storage.cache).stats().misses > 0


CODINGS = {
    "h264-gop-2": CameraSpec(name=CAM, gop=2),
    "h264-gop-1": CameraSpec(name=CAM, gop=1),
    "h264-b-frames": CameraSpec(name=CAM, gop=12, b_frames=3),
    "h264-one-keyframe": CameraSpec(name=CAM, gop=250, b_frames=2),
    "hevc": CameraSpec(name=CAM, codec="hevc", gop=8),
    "vp9": CameraSpec(name=CAM, codec="vp9", gop=8),
    "av1": CameraSpec(name=CAM, codec="av1", gop=4),
}


@pytest.mark.parametrize("coding", [name for name in CODINGS if CODINGS[name].codec in encoders()])
@pytest.mark.parametrize("join", ["encode", "concat"])
def test_pixels_from_parts_are_those_of_the_file(tmp_path, coding, join):
    lengths = (7, 1, 12, 5, 9, 20)
    spec = SynthSpec(lengths=lengths, cameras=(CODINGS[coding],), join=join, episodes_per_video_file=6, state_dim=2)
    root = write_dataset(tmp_path / "arm", spec)

    assert_same_pixels(root, tmp_path, num_spans=6)


def filmed_datasets():
    """Those whose videos are all there under the names that their metadata gives."""
    with warnings.catch_warnings(action="ignore"):
        found = sorted(path.parent.parent for path in SHARED.glob("*/meta/info.json"))
        return [root for root in found if not open_dataset(str(root)).missing_cameras and any(root.rglob("*.mp4"))]


@pytest.mark.parametrize("root", filmed_datasets(), ids=lambda root: root.name)
def test_pixels_of_real_datasets_from_parts_are_those_of_the_file(tmp_path, root):
    assert_same_pixels(root, tmp_path, num_spans=3)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file of videos of some megabytes: 12 episodes with textures that do not compress."""
    camera = CameraSpec(name=CAM, height=192, width=192, gop=5, crf=1)
    lengths = (30,) * 12
    spec = SynthSpec(lengths=lengths, cameras=(camera,), pixels="textured", episodes_per_video_file=12, state_dim=2)
    return write_dataset(tmp_path_factory.mktemp("large") / "arm", spec)


def test_a_span_takes_one_request_of_its_bytes_and_none_where_it_was_fetched_ahead(large, tmp_path):
    with in_memory(large) as uri:
        meta = by_parts(uri, tmp_path / "cache")
        storage, name = meta.storage, meta.video_file(0, CAM)
        cache, decoder = open_cache(storage.cache), FrameDecoder(meta, DecodeSpec())
        file_bytes = storage.size_bytes(name)
        index = read_ranged_index(storage, name)
        assert file_bytes > 4 << 20
        decoder.decode_video(0, CAM, np.arange(3))
        for row in (5, 8):
            frames = np.arange(4, 12)
            start, stop = index.byte_range(episode_first_frame(meta, row, CAM, index) + frames)
            before, sent = cache.stats(), num_requests()

            decoder.decode_video(row, CAM, frames)

            # A look at the version goes with each part of a storage that does not take conditions.
            assert num_requests() - sent == 2
            assert cache.stats().misses - before.misses == 1
            assert cache.stats().bytes_fetched - before.bytes_fetched == stop - start < file_bytes / 8
        before = cache.stats()

        decoder.prefetch(10, CAM, np.arange(30))
        wait_until(lambda: cache.stats().prefetched > before.prefetched)
        fetched = cache.stats()
        for start in range(0, 30, 2):
            decoder.decode_video(10, CAM, np.arange(start, start + 2), span=(0, 30))

        assert fetched.prefetched == before.prefetched + 1
        assert cache.stats().misses == fetched.misses
        assert cache.stats().bytes_fetched == fetched.bytes_fetched


def test_the_index_tells_bytes_that_hold_all_packets_of_a_span(large):
    storage = Storage(str(large))
    index = read_video_index(storage, f"videos/{CAM}/chunk-000/file-000.mp4")
    size = (large / f"videos/{CAM}/chunk-000/file-000.mp4").stat().st_size

    for first, stop in ((0, 1), (0, len(index)), (7, 9), (358, 360)):
        begin, end = index.byte_range(np.arange(first, stop))

        places = index.packets.place[first:stop]
        assert begin <= index.packets.offset[places].min()
        assert end >= (index.packets.offset + index.packets.size)[places].max()
        assert 0 < begin < end <= size + (1 << 16)


def test_a_file_that_was_replaced_is_read_by_its_own_index(tmp_path):
    """Also in the process that has read the one before it: a notebook opens a dataset again."""
    one = write_dataset(tmp_path / "one", SynthSpec(lengths=(9,), cameras=(CameraSpec(name=CAM, gop=3),)))
    two = write_dataset(tmp_path / "two", SynthSpec(lengths=(14,), cameras=(CameraSpec(name=CAM, gop=7),), seed=5))
    with in_memory(one) as uri:
        first = by_parts(uri, tmp_path / "cache")
        FrameDecoder(first, DecodeSpec()).decode_video(0, CAM, np.arange(9))
        put_files(two, uri.removeprefix("memory:/"))

        second = by_parts(uri, tmp_path / "cache")
        pixels = FrameDecoder(second, DecodeSpec()).decode_video(0, CAM, np.arange(14))

    wanted = FrameDecoder(open_dataset(str(two)).meta, DecodeSpec()).decode_video(0, CAM, np.arange(14))
    assert torch.equal(pixels, wanted)
