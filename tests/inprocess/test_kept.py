"""Frames kept between epochs: the same pixels without a decoder, and never a wrong one, whatever is in the folder."""

import errno
import os
import random
import shutil
import stat
import warnings
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from batches import TOP, WINDOWS, WRIST, local_loader, varied_spec
from mixture_cases import write_unlike

from raypipe.dataset import open_dataset
from raypipe.decode import kept
from raypipe.decode.clips import FramePool
from raypipe.decode.frames import FrameDecoder
from raypipe.decode.journal import Journal
from raypipe.decode.kept import KeepFolder, survey_kept
from raypipe.decode.spec import DecodeSpec, KeepSpec
from raypipe.errors import DecodeError
from raypipe.mixture import Mixture
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, Storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

LENGTHS = (40, 7, 64, 33)
NUM_FRAMES = 2 * sum(LENGTHS)
FRAME_BYTES = 32 * 48 * 3


def write_filmed(root, lengths=LENGTHS, **options):
    cameras = (CameraSpec(name=TOP, height=32, width=48), CameraSpec(name=WRIST, height=32, width=48, gop=5))
    return write_dataset(root, SynthSpec(lengths=lengths, cameras=cameras, episodes_per_video_file=9, **options))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Four episodes of two cameras; all episodes of a camera in one file."""
    return write_filmed(tmp_path_factory.mktemp("kept") / "dataset")


@pytest.fixture(scope="module")
def wanted(root):
    """All frames of the dataset, decoded."""
    return frames_of(FrameDecoder(open_dataset(str(root)).meta, DecodeSpec()))


class Kept(FrameDecoder):
    """The decoder of a dataset that keeps its frames in a folder, as a new process makes it."""

    def __init__(self, root, folder, dataset_bytes=1, meta=None, **spec):
        self.folder = KeepFolder(KeepSpec(folder=str(folder), **spec), dataset_bytes)
        super().__init__(meta or open_dataset(str(root)).meta, DecodeSpec(), folder=self.folder)


def frames_of(decoder, rows=None):
    """All frames of both cameras, in clips of 9: most lie across two groups of the hash at times."""
    meta, found = decoder._meta, []
    for row in range(len(meta.episodes)) if rows is None else rows:
        for camera in (TOP, WRIST):
            clips = np.split(np.arange(meta.episodes.length[row]), range(9, int(meta.episodes.length[row]), 9))
            found.append(np.concatenate([decoder.decode_video(row, camera, clip).numpy() for clip in clips]))
    return found


def assert_same_frames(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


def files_in(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def disk_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in files_in(folder))


def epochs(pipe, num_epochs):
    """Return the batches of some epochs, and the figures after the last, of a loader that is new."""
    loader = local_loader(pipe, num_epochs=num_epochs)
    batches = []
    for _ in range(num_epochs):
        # A loader uses its memory again.
        batches += [{key: torch.clone(value) for key, value in tensors_of(batch)} for batch in loader]
    return batches, loader.stats()


def tensors_of(batch):
    return [(key, value) for key, value in batch.items() if isinstance(value, torch.Tensor)]


def assert_same_batches(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), key


def open_case(name, root, tmp_path):
    if name == "mixture":
        return Mixture(str(write_unlike(tmp_path / "unlike")), progress=False), {}
    if name == "windows":
        return open_dataset(str(write_dataset(tmp_path / "varied", varied_spec()))).windowed(offsets=WINDOWS), {}
    decode = {"resize": {"resize": (20, 28), "fit": "letterbox"}, "by camera": {"resize": {TOP: (16, 24)}}}
    return open_dataset(str(root)), {"decode": decode.get(name, {})}


@pytest.mark.parametrize("name", ["plain", "resize", "by camera", "windows", "mixture"])
def test_kept_batches_are_the_decoded_ones_and_open_no_decoder(root, tmp_path, name):
    dataset, parts = open_case(name, root, tmp_path)
    parts = {"batch_size": 8, "seed": 3, **parts}
    wanted, _ = epochs(Pipeline(dataset, **parts), 2)
    pipe = Pipeline(dataset, keep_frames={"folder": str(tmp_path / "kept")}, **parts)

    kept_from, first = epochs(pipe, 2)
    # As another process or job does.
    later, figures = epochs(pipe, 2)

    assert_same_batches(kept_from, wanted)
    assert_same_batches(later, wanted)
    assert first.decoder_opens > 0
    assert figures.decoder_opens == 0
    assert figures.kept_frames > 0
    if name in ("plain", "resize", "by camera"):
        # The second epoch may ask for a frame that a thread still decodes for the first.
        assert first.decoded_frames >= NUM_FRAMES
        assert first.decoded_frames + first.kept_frames == 2 * NUM_FRAMES
        assert (figures.decoded_frames, figures.kept_frames) == (0, 2 * NUM_FRAMES)


def test_other_batches_orders_and_clips_find_the_same_kept_frames(root, tmp_path):
    dataset, keep = open_dataset(str(root)), {"folder": str(tmp_path / "kept")}
    epochs(Pipeline(dataset, batch_size=8, seed=3, order={"clip_frames": 2}, keep_frames=keep), 1)

    for seed, size, clip_frames in ((4, 5, 7), (5, 16, 1), (6, 3, "span")):
        order = {"clip_frames": clip_frames}
        _, figures = epochs(Pipeline(dataset, batch_size=size, seed=seed, order=order, keep_frames=keep), 1)

        assert (figures.decoded_frames, figures.kept_frames) == (0, NUM_FRAMES)


def test_reading_kept_frames_marks_nothing_in_the_journal(root, wanted, tmp_path, monkeypatch):
    frames_of(Kept(root, tmp_path))
    monkeypatch.setattr(Journal, "marking", None)

    assert_same_frames(frames_of(Kept(root, tmp_path)), wanted)


def test_one_file_holds_all_kept_frames_of_a_video_and_is_the_users_alone(root, tmp_path):
    frames_of(Kept(root, tmp_path))

    assert len(files_in(tmp_path)) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files_in(tmp_path))
    assert stat.S_IMODE((tmp_path / "frames.1").stat().st_mode) == 0o700
    (found,) = survey_kept(KeepSpec(folder=str(tmp_path)))
    assert (found.root, found.num_frames, found.cameras) == (str(root), NUM_FRAMES, (TOP, WRIST))


def test_a_changed_video_is_decoded_anew_also_while_its_decoder_is_open(root, wanted, tmp_path):
    mine = shutil.copytree(root, tmp_path / "mine")
    other = write_filmed(tmp_path / "other", pixels="textured")
    decoder = Kept(mine, tmp_path / "kept")
    assert_same_frames(frames_of(decoder), wanted)
    changed = frames_of(FrameDecoder(open_dataset(str(other)).meta, DecodeSpec()))
    before = files_in(tmp_path / "kept")
    assert not any(np.array_equal(one, another) for one, another in zip(changed, wanted, strict=True))

    for replaced in mine.rglob("*.mp4"):
        # Beside it first: an open decoder goes on with the old file.
        shutil.copy(other / replaced.relative_to(mine), tmp_path / "new.mp4")
        os.replace(tmp_path / "new.mp4", replaced)

    assert_same_frames(frames_of(decoder), changed)
    assert_same_frames(frames_of(Kept(mine, tmp_path / "kept")), changed)
    # What was kept of the old ones is gone.
    assert len(files_in(tmp_path / "kept")) == 2
    assert not set(before) & set(files_in(tmp_path / "kept"))


def test_a_video_that_is_replaced_while_it_is_decoded_is_not_kept(root, tmp_path, monkeypatch):
    mine = shutil.copytree(root, tmp_path / "mine")
    decoder, decode = Kept(mine, tmp_path / "kept"), FrameDecoder._decode

    def replace_meanwhile(self, request):
        video = mine / request.name
        os.utime(video, ns=(0, video.stat().st_mtime_ns + 1))
        return decode(self, request)

    monkeypatch.setattr(FrameDecoder, "_decode", replace_meanwhile)
    frames_of(decoder, rows=[1])

    assert files_in(tmp_path / "kept") == []


@pytest.mark.parametrize("change", ["decoder", "resize", "fit", "lengths"])
def test_frames_of_another_decoder_size_or_table_are_not_given(root, tmp_path, monkeypatch, change):
    meta, spec = open_dataset(str(root)).meta, DecodeSpec(resize=(20, 28))
    folder = KeepFolder(KeepSpec(folder=str(tmp_path)), 1)
    FrameDecoder(meta, spec, folder=folder).decode_video(1, TOP, np.arange(5))
    if change == "decoder":
        monkeypatch.setattr("raypipe.decode.frames.decoder_version", lambda _, **__: "another")
    elif change == "lengths":
        # As of a table in which the file holds the episodes otherwise.
        episodes = meta.episodes
        meta = replace(meta, episodes=replace(episodes, length=episodes.length[[1, 0, 2, 3]]))
    else:
        spec = DecodeSpec(resize=(28, 20) if change == "resize" else (20, 28), fit="crop")

    again = FrameDecoder(meta, spec, folder=folder)
    again.decode_video(1, TOP, np.arange(5))

    assert (again.counts().frames, again.counts().kept_frames) == (5, 0)


def garble(path, draw):
    """Damage a file in one of the ways in which files are damaged."""
    content = bytearray(path.read_bytes())
    kind = draw.choice(("flip", "zeros", "noise", "truncate", "shift", "swap", "grow"))
    first = draw.randrange(len(content))
    size = min(len(content) - first, draw.choice((1, 100, 5_000, 200_000)))
    if kind == "flip":
        content[first] ^= 1 << draw.randrange(8)
    elif kind == "zeros":
        content[first : first + size] = bytes(size)
    elif kind == "noise":
        content[first : first + size] = draw.randbytes(size)
    elif kind == "truncate":
        del content[first:]
    elif kind == "shift":
        del content[first : first + size]
    elif kind == "swap":
        half = size // 2
        content[first : first + 2 * half] = content[first + half : first + 2 * half] + content[first : first + half]
    else:
        content += draw.randbytes(size)
    path.write_bytes(content)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_never_gives_a_wrong_frame_and_is_mended(root, wanted, tmp_path, seed):
    draw = random.Random(seed)
    frames_of(Kept(root, tmp_path))
    one, other = files_in(tmp_path)
    garble(draw.choice((one, other)), draw)
    if seed % 10 == 0:
        # The frames of one camera under the name of the other.
        shutil.copy(one, other)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first = Kept(root, tmp_path)
        found = frames_of(first)
    mended = Kept(root, tmp_path)

    assert_same_frames(found, wanted)
    assert_same_frames(frames_of(mended), wanted)
    assert len(told) <= 1
    assert first.counts().kept_frames + first.counts().frames == NUM_FRAMES
    assert mended.counts().frames == 0


def test_a_damaged_frame_is_told_once(root, wanted, tmp_path):
    frames_of(Kept(root, tmp_path))
    for path in files_in(tmp_path):
        content = path.read_bytes()
        path.write_bytes(content[:-20_000] + bytes(20_000))

    with pytest.warns(UserWarning, match="is damaged, and is decoded anew") as told:
        assert_same_frames(frames_of(Kept(root, tmp_path)), wanted)

    assert len(told) == 1


class CountedPool(FramePool):
    """Counts the frames that are out."""

    num_out = 0

    def take(self, shape, dtype):
        self.num_out += 1
        return super().take(shape, dtype)

    def give_back(self, frames):
        given = list(frames)
        self.num_out -= len(given)
        super().give_back(given)


def read_error(*_):
    raise OSError(errno.EIO, "Input/output error")


def decode_error(*_):
    raise DecodeError("bad video")


@pytest.mark.parametrize("kind", ["damaged", "unreadable"])
def test_memory_of_a_frame_that_cannot_be_read_is_given_back(root, tmp_path, monkeypatch, kind):
    frames_of(Kept(root, tmp_path), rows=[0])
    if kind == "unreadable":
        monkeypatch.setattr(kept, "check_of", read_error)
    for path in files_in(tmp_path) if kind == "damaged" else ():
        content = path.read_bytes()
        path.write_bytes(content[: -3 * FRAME_BYTES] + bytes(3 * FRAME_BYTES))
    decoder, pool = Kept(root, tmp_path), CountedPool()

    with pytest.warns(UserWarning, match=r"is damaged|Input/output error"):
        found = decoder.read_clip(0, TOP, np.arange(LENGTHS[0]), pool)

    assert decoder.counts().frames > 0
    assert pool.num_out == len(found) == LENGTHS[0]


def test_memory_of_kept_frames_is_given_back_where_the_others_cannot_be_decoded(root, tmp_path, monkeypatch):
    kept_one = Kept(root, tmp_path)
    kept_one.decode_video(0, TOP, np.arange(9))
    decoder, pool = Kept(root, tmp_path), CountedPool()
    monkeypatch.setattr(FrameDecoder, "_decode", decode_error)

    with pytest.raises(DecodeError, match="bad video"):
        decoder.read_clip(0, TOP, np.arange(LENGTHS[0]), pool)

    assert (decoder.counts().kept_frames, pool.num_out) == (9, 0)


def test_half_the_space_gives_half_the_hits_in_every_epoch_and_keeps_the_bound(tmp_path):
    lengths = (400, 500, 300, 350)
    root = write_filmed(tmp_path / "dataset", lengths)
    total = 2 * sum(lengths) * FRAME_BYTES
    wanted = frames_of(FrameDecoder(open_dataset(str(root)).meta, DecodeSpec()))
    keep, hits, sizes = {"folder": tmp_path / "kept", "dataset_bytes": total, "max_bytes": total // 2}, [], []

    for _ in range(3):
        decoder = Kept(root, **keep)
        assert_same_frames(frames_of(decoder), wanted)
        hits.append(decoder.counts().kept_frames / (2 * sum(lengths)))
        sizes.append(disk_bytes(tmp_path / "kept"))

    assert hits[0] == 0
    assert 0.35 < hits[1] <= 0.5
    assert hits[2] == hits[1]
    assert total // 4 < sizes[0] <= total // 2
    assert sizes[1:] == sizes[:1] * 2


def test_which_frames_are_kept_does_not_depend_on_who_comes_first(tmp_path):
    root = write_filmed(tmp_path / "dataset", (160, 160))
    total = 2 * 320 * FRAME_BYTES
    shares = {"dataset_bytes": 4 * total, "max_bytes": total}
    frames_of(Kept(root, tmp_path / "one", **shares), rows=[0, 1])
    frames_of(Kept(root, tmp_path / "other", **shares), rows=[1, 0])

    pairs = zip(files_in(tmp_path / "one"), files_in(tmp_path / "other"), strict=True)

    assert all(one.read_bytes() == other.read_bytes() for one, other in pairs)
    (found,) = survey_kept(KeepSpec(folder=str(tmp_path / "one")))
    assert 0 < found.num_frames < 400


def test_frames_of_other_datasets_take_room(root, tmp_path):
    other = write_filmed(tmp_path / "other")
    frames_of(Kept(other, tmp_path / "kept"))
    size = disk_bytes(tmp_path / "kept")

    for room in (0, 1, 10, 30):
        decoder = Kept(root, tmp_path / "kept", dataset_bytes=1, max_bytes=size + room * FRAME_BYTES)
        frames_of(decoder)

        assert disk_bytes(tmp_path / "kept") <= size + room * FRAME_BYTES
    assert disk_bytes(tmp_path / "kept") > size


def test_kept_frames_take_at_most_half_of_the_free_disk(root, wanted, tmp_path, monkeypatch):
    def small_disk(_):
        return type("Disk", (), {"f_bavail": 400_000 - disk_bytes(tmp_path), "f_frsize": 1})

    monkeypatch.setattr(kept.os, "statvfs", small_disk)

    for _ in range(2):
        assert_same_frames(frames_of(Kept(root, tmp_path)), wanted)

    assert 0 < disk_bytes(tmp_path) <= 200_000


def full_after(num_writes, write):
    left = iter(range(num_writes))

    def fail(file, offset, content):
        if next(left, None) is None:
            write(file, offset, bytes(content)[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, offset, content)

    return fail


@pytest.mark.parametrize("num_writes", [0, 1, 2, 3, 51])
def test_a_full_disk_is_one_warning_and_decoding_goes_on(root, wanted, tmp_path, monkeypatch, num_writes):
    monkeypatch.setattr(kept, "_write", full_after(num_writes, kept._write))

    with pytest.warns(UserWarning, match="No space left on device.*decoding goes on") as told:
        assert_same_frames(frames_of(Kept(root, tmp_path)), wanted)

    assert len(told) == 1
    monkeypatch.undo()
    with warnings.catch_warnings(action="ignore"):
        assert_same_frames(frames_of(Kept(root, tmp_path)), wanted)


def spoil(kind, folder, monkeypatch):
    if kind == "file":
        folder.write_bytes(b"in the way")
    elif kind == "link":
        (folder.parent / "elsewhere").mkdir()
        folder.mkdir()
        (folder / "frames.1").symlink_to(folder.parent / "elsewhere")
    elif kind == "user":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    else:
        # A disk that may be read only; permissions do not bind a root user, who runs tests too.
        def refuse(path, *_args, **_kwargs):
            raise OSError(errno.EROFS, "Read-only file system", str(path))

        monkeypatch.setattr(kept, "make_private_folder", refuse)


@pytest.mark.parametrize("kind", ["file", "link", "user", "read-only"])
def test_a_folder_that_cannot_be_used_is_one_warning(root, wanted, tmp_path, monkeypatch, kind):
    spoil(kind, tmp_path / "kept", monkeypatch)

    decoder = Kept(root, tmp_path / "kept")
    with pytest.warns(UserWarning, match="keep_frames in .*decoding goes on") as told:
        assert_same_frames(frames_of(decoder), wanted)

    assert len(told) == 1
    assert decoder.counts().kept_frames == 0
    assert not (tmp_path / "elsewhere").exists() or files_in(tmp_path / "elsewhere") == []


def test_frames_in_a_read_only_folder_are_read(root, wanted, tmp_path, monkeypatch):
    frames_of(Kept(root, tmp_path), rows=[0, 1])
    spoil("read-only", tmp_path, monkeypatch)

    decoder = Kept(root, tmp_path)
    with pytest.warns(UserWarning, match="Read-only file system") as told:
        assert_same_frames(frames_of(decoder), wanted)

    assert len(told) == 1
    assert decoder.counts().kept_frames == 2 * (LENGTHS[0] + LENGTHS[1])


def test_a_link_in_place_of_a_file_is_not_followed(root, wanted, tmp_path):
    frames_of(Kept(root, tmp_path / "kept"))
    (tmp_path / "secret").write_bytes(b"not to be overwritten")
    for path in files_in(tmp_path / "kept"):
        path.unlink()
        path.symlink_to(tmp_path / "secret")

    with pytest.warns(UserWarning, match="decoding goes on") as told:
        assert_same_frames(frames_of(Kept(root, tmp_path / "kept")), wanted)

    assert len(told) == 1
    assert (tmp_path / "secret").read_bytes() == b"not to be overwritten"


def test_no_file_stays_open(root, tmp_path):
    decoder = Kept(root, tmp_path)
    frames_of(decoder)
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        frames_of(decoder)

    assert len(os.listdir("/proc/self/fd")) <= before


def test_kept_frames_of_a_remote_video_are_neither_fetched_nor_fetched_ahead(root, wanted, tmp_path):
    filesystem = fsspec.filesystem("memory")
    uri = f"memory://{tmp_path.name}"
    filesystem.put(str(root), uri, recursive=True)
    try:
        local = open_dataset(str(root)).meta
        for cache in ("first", "second"):
            storage = Storage(uri, CacheSpec(folder=str(tmp_path / cache)))
            decoder = Kept(root, tmp_path / "kept", meta=replace(local, storage=storage))
            assert_same_frames(frames_of(decoder), wanted)
            ahead = decoder.prefetch(0, TOP, np.arange(LENGTHS[0]))
        assert ahead is None
        assert decoder.counts().kept_frames == NUM_FRAMES
        assert not any(path.stat().st_size > 5_000 for path in files_in(tmp_path / "second"))
    finally:
        filesystem.rm(uri, recursive=True)


def test_clearing_follows_no_link_and_removes_nothing_else(root, tmp_path):
    other = tmp_path / "other" / "src"
    other.mkdir(parents=True)
    (other / "thesis.tex").write_text("years of work")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / f"frames.{kept.LAYOUT}").symlink_to(tmp_path / "other")
    own = tmp_path / "own"
    list(local_loader(Pipeline(open_dataset(str(root)), batch_size=4, seed=0, keep_frames={"folder": str(own)})))
    (strange,) = (own / f"frames.{kept.LAYOUT}").iterdir()
    (strange / "notes.txt").write_text("of somebody")

    assert kept.clear_kept(KeepSpec(folder=str(tmp_path / "linked"))) == 0
    assert kept.clear_kept(KeepSpec(folder=str(own))) > 0

    assert (other / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in files_in(own)] == ["notes.txt"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "text"])
def test_what_is_no_file_of_kept_frames_is_neither_waited_for_nor_an_error(root, wanted, tmp_path, kind):
    frames_of(Kept(root, tmp_path))
    for path in files_in(tmp_path):
        path.unlink()
        {"pipe": os.mkfifo, "folder": os.mkdir, "text": lambda name: Path(name).write_text("[]")}[kind](path)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = frames_of(Kept(root, tmp_path))

    assert_same_frames(found, wanted)
    survey_kept(KeepSpec(folder=str(tmp_path)))
