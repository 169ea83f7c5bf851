"""Kept frames whose writers and readers are killed at any moment: a frame is whole, or it is not there."""

import subprocess
import sys

import numpy as np
import pytest

from raypipe.dataset import open_dataset
from raypipe.decode.frames import FrameDecoder
from raypipe.decode.spec import DecodeSpec
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

CAM = "observation.images.top"

STORM = """
import os, random, signal, sys, time, warnings
import numpy as np
from raypipe.dataset import open_dataset
from raypipe.decode import FramePool
from raypipe.decode import frames as decoding
from raypipe.decode import FrameDecoder
from raypipe.decode import KeepSpec
from raypipe.decode import KeepFolder, clear_kept
from raypipe.decode import DecodeSpec

root, folder, known, num_kills, seed = *sys.argv[1:4], *map(int, sys.argv[4:])
# A frame that is there and does not pass its check is an error too: nothing but kills damages any here.
warnings.simplefilter("error")
# The deaths here are no reason to decode in a subprocess.
decoding._MAX_DEATHS = 1 << 30
spec, meta, cam = KeepSpec(folder=folder), open_dataset(root).meta, "observation.images.top"
wanted = np.load(known)["wanted"]
first = np.cumsum(meta.episodes.length) - meta.episodes.length

def work(draw):
    decoder = FrameDecoder(meta, DecodeSpec(), folder=KeepFolder(spec, 1))
    is_decoding = draw.random() < 0.5
    while True:
        row = draw.randrange(len(meta.episodes))
        start = draw.randrange(int(meta.episodes.length[row]))
        frames = np.arange(start, min(start + draw.randrange(1, 6), int(meta.episodes.length[row])))
        right = wanted[first[row] + frames]
        if is_decoding:
            found = dict(zip(frames.tolist(), decoder.decode_video(row, cam, frames).numpy(), strict=True))
        else:
            # Nearly all of its time goes into reading and writing.
            kept = decoder._kept.find(row, cam)
            found = kept.read(frames, FramePool())
            kept.write(frames, right)
        if not all(np.array_equal(pixels, wanted[first[row] + frame]) for frame, pixels in found.items()):
            raise SystemExit(f"a wrong frame among {frames} of row {row}")

def start(number):
    child = os.fork()
    if child:
        return child
    try:
        work(random.Random(number))
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    os._exit(1)

draw, children = random.Random(seed), []
for number in range(num_kills):
    while len(children) < 3:
        children.append(start(1000 * seed + number + len(children)))
    time.sleep(draw.random() * 0.06)
    if draw.random() < 0.2:
        clear_kept(spec)
    child = children.pop(draw.randrange(3))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        print("a process ended by itself", file=sys.stderr)
        break
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
decoder = FrameDecoder(meta, DecodeSpec(), folder=KeepFolder(spec, 1))
for row in range(len(meta.episodes)):
    frames = np.arange(meta.episodes.length[row])
    assert np.array_equal(decoder.decode_video(row, cam, frames).numpy(), wanted[first[row] + frames]), row
print(num_kills, "kills,", decoder.counts().kept_frames, "frames kept,", decoder.counts().frames, "decoded")
"""
"""Kills one of three processes at random moments, which read, decode and keep frames and compare them all."""


@pytest.mark.parametrize("num_kills", [60])
def test_no_kill_of_writers_and_readers_leaves_a_wrong_frame(tmp_path, num_kills):
    camera = CameraSpec(name=CAM, height=240, width=320)
    spec = SynthSpec(lengths=(30, 20, 25), cameras=(camera,), episodes_per_video_file=2)
    root = write_dataset(tmp_path / "dataset", spec)
    meta = open_dataset(str(root)).meta
    decoder = FrameDecoder(meta, DecodeSpec())
    pixels = [decoder.decode_video(row, CAM, np.arange(meta.episodes.length[row])).numpy() for row in range(3)]
    np.savez(tmp_path / "known.npz", wanted=np.concatenate(pixels))

    program = [sys.executable, "-c", STORM, root, tmp_path / "kept", tmp_path / "known.npz", num_kills, 0]
    done = subprocess.run(list(map(str, program)), capture_output=True, text=True, timeout=170, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{num_kills} kills, ")
