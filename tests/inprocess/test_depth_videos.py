"""Depth videos: every bit of every number, as millimetres, on every way to a batch."""

import json
import shutil

import fsspec
import numpy as np
import pytest
import torch
from batches import TOP, assert_equals_samples, local_loader
from depth_cases import DEPTH, documented_mm, random_numbers, write_numbers

from raypipe.dataset import open_dataset
from raypipe.decode.frames import FrameDecoder, VideoRequest, decode_isolated
from raypipe.decode.kept import KeepFolder
from raypipe.decode.pixels import distances_mm
from raypipe.decode.spec import DecodeSpec, KeepSpec
from raypipe.errors import DatasetError, DecodeError
from raypipe.format import DepthCodes, read_metadata
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, Storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate import validate_dataset

pytest.importorskip("av", reason="needs the package av")
pytestmark = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs the ffmpeg command")

REORDERED = ("-c:v", "libx265", "-x265-params", "lossless=1:log-level=none:bframes=3:keyint=8:min-keyint=8:b-adapt=0")
FFV1 = ("-c:v", "ffv1", "-g", "4")
UNDECLARED = {"depth_min": None, "depth_max": None, "shift": None, "use_log": None}

LOG, PROPORTIONAL = DepthCodes(), DepthCodes(is_log=False)
NEAR = DepthCodes(min_m=0.2, max_m=3.0, shift_m=0.5)
VIDEOS = {
    "as LeRobot writes it": (12, {}, LOG),
    "frames stored in another order": (12, {"codec": REORDERED}, LOG),
    "another range": (12, {"depth_min": 0.2, "depth_max": 3.0, "shift": 0.5}, NEAR),
    "proportional": (12, {"use_log": False}, PROPORTIONAL),
    "nothing declared": (12, UNDECLARED, LOG),
    "12 bits in FFV1": (12, {"codec": FFV1}, LOG),
    "LeRobot's numbers in 16 bits": (12, {"codec": FFV1, "pix_fmt": "gray16le"}, LOG),
    "millimetres of 16 bits": (16, {"codec": FFV1, "pix_fmt": "gray16le", **UNDECLARED}, None),
}


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    """Two episodes of noise in one video, with the millimetres that it stands for."""
    numbers = random_numbers(12)
    root = write_numbers(tmp_path_factory.mktemp("depth") / "filmed", numbers, codec=REORDERED)
    return root, distances_mm(LOG, 12)[numbers]


@pytest.mark.parametrize("name", VIDEOS)
def test_every_number_of_a_depth_video_is_the_distance_that_was_written(tmp_path, name):
    num_bits, options, codes = VIDEOS[name]
    numbers = random_numbers(num_bits)
    root = write_numbers(tmp_path / "depth", numbers, **options)

    dataset = open_dataset(str(root))

    samples = [dataset[index][DEPTH] for index in (0, 1, 13, 12, 25, 3)]
    assert all((one.dtype, tuple(one.shape)) == (torch.float32, (1, 64, 100)) for one in samples)
    wanted = numbers[[0, 1, 13, 12, 25, 3]]
    np.testing.assert_array_equal(torch.cat(samples).numpy(), distances_mm(codes, 12)[wanted] if codes else wanted)


@pytest.mark.parametrize("codes", [LOG, PROPORTIONAL, NEAR])
def test_numbers_are_the_distances_that_lerobot_documents(codes):
    numbers = np.arange(4096)

    found = distances_mm(codes, 12)

    # LeRobot computes in single precision, and so a few round to the next millimetre.
    wanted = documented_mm(numbers, codes)
    assert np.abs(found[:4096] - wanted).max() <= 1
    assert (found[:4096] != wanted).mean() < 0.005
    assert (found[4096:] == 1000 * codes.max_m).all()


def test_distances_are_those_that_lerobot_computes():
    depth_utils = pytest.importorskip("lerobot.datasets.depth_utils", reason="needs the package lerobot")
    codes = torch.arange(4096, dtype=torch.int32).reshape(1, 64, 64)

    for is_log in (True, False):
        wanted = depth_utils.dequantize_depth(codes, use_log=is_log)
        np.testing.assert_array_equal(distances_mm(DepthCodes(is_log=is_log), 12)[:4096], wanted.numpy().ravel())


def test_loader_gives_depth_videos_as_the_reference_path_does(tmp_path):
    cameras = (CameraSpec(name=DEPTH, kind="depth", width=96, gop=4), CameraSpec(name=TOP))
    root = write_dataset(tmp_path / "dataset", SynthSpec(lengths=(5, 3, 6), cameras=cameras))
    dataset = open_dataset(str(root)).windowed(offsets={DEPTH: [-2, 0, 1]})
    pipe = Pipeline(dataset, batch_size=4, seed=3, order={"live_spans": 2})

    batches = list(local_loader(pipe))

    assert (batches[0][DEPTH].dtype, batches[0][DEPTH].shape[1:]) == (torch.float32, (3, 1, 64, 96))
    assert batches[0][DEPTH].unique().tolist() == [800, 2400]
    for batch in batches:
        assert_equals_samples(batch, dataset)


@pytest.mark.parametrize(("fit", "size"), [("stretch", (32, 50)), ("stretch", (31, 120)), ("letterbox", (50, 50))])
def test_resized_depth_holds_only_distances_that_were_measured(filmed, fit, size):
    root, wanted = filmed
    meta = open_dataset(str(root)).meta

    pixels = FrameDecoder(meta, DecodeSpec(resize=size, fit=fit)).decode_video(0, DEPTH, np.array([2]))[0].numpy()

    assert pixels.shape == (*size, 1)
    if fit == "letterbox":
        rows = np.flatnonzero(pixels.any(axis=(1, 2)))
        assert (rows[0], rows[-1]) == (9, 40)
        pixels = pixels[rows]
    places = [
        ((np.arange(new) + 0.5) * old / new).astype(int) for new, old in zip(pixels.shape, (64, 100), strict=False)
    ]
    np.testing.assert_array_equal(pixels[..., 0], wanted[2][np.ix_(*places)])


def test_kept_depth_is_what_was_decoded_and_another_range_is_another_file(filmed, tmp_path):
    root, wanted = filmed
    shutil.copytree(root, tmp_path / "copy")

    def decode():
        folder = KeepFolder(KeepSpec(folder=str(tmp_path / "kept")), 1)
        decoder = FrameDecoder(open_dataset(str(tmp_path / "copy")).meta, DecodeSpec(), folder=folder)
        return decoder.decode_video(1, DEPTH, np.arange(21)).numpy()[..., 0], decoder.counts()

    first, counts = decode()
    assert (counts.frames, counts.kept_frames) == (21, 0)
    again, counts = decode()
    assert (counts.frames, counts.kept_frames) == (0, 21)
    np.testing.assert_array_equal(first, wanted[5:])
    np.testing.assert_array_equal(again, wanted[5:])

    path = tmp_path / "copy/meta/info.json"
    path.write_text(path.read_text().replace('"video.depth_max": 10.0', '"video.depth_max": 5.0'))
    other, counts = decode()
    assert (counts.frames, counts.kept_frames) == (21, 0)
    np.testing.assert_array_equal(other, distances_mm(DepthCodes(max_m=5.0), 12)[random_numbers(12)[5:]])


@pytest.mark.parametrize("cache", [None, "node"])
def test_remote_depth_is_what_it_is_on_disk(filmed, tmp_path, cache):
    root, wanted = filmed
    uri = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").put(str(root), uri, recursive=True)
    storage = Storage(uri, CacheSpec(folder=str(tmp_path / "cache")) if cache else None)
    decoder = FrameDecoder(read_metadata(storage), DecodeSpec())

    np.testing.assert_array_equal(
        decoder.decode_video(1, DEPTH, np.array([4, 5, 9]))[..., 0].numpy(), wanted[[9, 10, 14]]
    )


def test_a_subprocess_decodes_depth_too(filmed):
    root, wanted = filmed
    meta = open_dataset(str(root)).meta
    request = VideoRequest(meta=meta, spec=DecodeSpec(), row=1, camera=DEPTH, frames=np.array([0, 4]))

    np.testing.assert_array_equal(decode_isolated(request).numpy()[..., 0], wanted[[5, 9]])


def test_validate_reads_every_frame_of_a_depth_video(filmed, tmp_path):
    root, _ = filmed
    shutil.copytree(root, tmp_path / "copy")
    sound = validate_dataset(str(root), deep=True)
    assert [finding.kind for finding in sound.findings if finding.severity == "error"] == []
    assert sound.counts.decoded_frames == 26

    video = next((tmp_path / "copy").rglob("*.mp4"))
    content = bytearray(video.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 20_000] = b"\xff" * 20_000
    video.write_bytes(bytes(content))

    damaged = validate_dataset(str(tmp_path / "copy"), deep=True)

    assert "video-damaged" in [finding.kind for finding in damaged.findings]


def test_a_picture_that_claims_to_be_depth_is_refused_when_its_pixels_are_seen(tmp_path):
    root = write_dataset(tmp_path / "dataset", SynthSpec(lengths=(4,), cameras=(CameraSpec(name=TOP),)))
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"][TOP]["info"] |= {"is_depth_map": True, "video.pix_fmt": "gray12le", "video.channels": 1}
    path.write_text(json.dumps(info))

    with pytest.raises(DecodeError, match=r"its pixels are yuv420p.*set is_depth_map to false"):
        open_dataset(str(root))[0]


@pytest.mark.parametrize("wrong", [{"depth_min": "near"}, {"depth_min": 12.0}, {"depth_min": -4.0, "use_log": True}])
def test_a_range_that_is_none_is_an_error_that_shows_it(filmed, tmp_path, wrong):
    shutil.copytree(filmed[0], tmp_path / "copy")
    path = tmp_path / "copy/meta/info.json"
    info = json.loads(path.read_text())
    info["features"][DEPTH]["info"].update({f"video.{key}": value for key, value in wrong.items()})
    path.write_text(json.dumps(info))

    with pytest.raises(DatasetError, match=rf"depth range of camera '{DEPTH}'.*{wrong['depth_min']}"):
        open_dataset(str(tmp_path / "copy"))
