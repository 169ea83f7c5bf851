"""Which damage to the frames of a video is noticed, and by whom: the decoder, its log, or the lengths inside a packet.

    python benchmarks/unnoticed.py [--inputs 300] [--frames 24]

Damages the bytes of one frame at a time, at random with a fixed seed, and reads all frames as training does. Prints for
each codec how many inputs were an error, how many gave a wrong picture without one, and of those how many FFmpeg's log
tells (as `raypipe validate --deep` reads it) and how many a walk over the packet's NAL units or OBUs would.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from raypipe.decode import OpenVideo
from raypipe.errors import RaypipeError
from raypipe.format import read_video_index
from raypipe.storage import open_storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate.deep import read_decoder_log

TOP = "observation.images.top"
DAMAGES = {"1 byte": 1, "16 bytes": 16, "half a frame": 0, "4 kB of zeros": 4096}


def walks_as_nal_units(packet):
    """Return whether a packet of H.264 or HEVC is a row of NAL units, each behind its length in 4 bytes."""
    place = 0
    while place + 4 <= len(packet):
        place += 4 + int.from_bytes(packet[place : place + 4], "big")
    return place == len(packet)


def walks_as_obus(packet):
    """Return whether a packet of AV1 is a row of OBUs that tell their sizes."""
    place = 0
    while place < len(packet):
        head = packet[place]
        if head & 0x81 or not head & 0x02:
            return False
        place += 2 if head & 0x04 else 1
        size = shift = 0
        while place < len(packet):
            size |= (packet[place] & 0x7F) << shift
            shift, place = shift + 7, place + 1
            if not packet[place - 1] & 0x80:
                break
        place += size
    return place == len(packet)


class Sound:
    """A video of one codec, its pixels and its packets."""

    def __init__(self, folder, codec, num_frames):
        camera = CameraSpec(name=TOP, height=96, width=128, codec=codec)
        write_dataset(folder, SynthSpec(lengths=(num_frames,), cameras=(camera,), pixels="textured"))
        self.storage, self.name = open_storage(str(folder)), f"videos/{TOP}/chunk-000/file-000.mp4"
        self.path = folder / self.name
        self.content = self.path.read_bytes()
        self.packets = read_video_index(self.storage, self.name).packets
        self.walk = walks_as_obus if codec == "av1" else walks_as_nal_units
        self.has_walk = codec != "vp9"
        self.pixels = self.read()

    def read(self):
        """Return all frames, as training reads them."""
        video = OpenVideo(self.storage, self.name)
        return video.read_frames(np.arange(len(video.index))).numpy()

    def packet(self, content, place):
        """Return the bytes of one frame."""
        start = int(self.packets.offset[place])
        return content[start : start + int(self.packets.size[place])]

    def _is_hit(self, place, first, last):
        start = int(self.packets.offset[place])
        return start < last and first < start + int(self.packets.size[place])

    def judge(self, rng, size):
        """Return what came of one damage."""
        place = rng.randrange(len(self.packets.size))
        start, stop = int(self.packets.offset[place]), int(self.packets.offset[place] + self.packets.size[place])
        first = rng.randrange(start, stop) if size else start + (stop - start) // 2
        last = min(first + size, stop) if size else stop
        content = bytearray(self.content)
        if size == 4096:
            # A page that never came, of a file system or a download: it begins where pages begin, and hits many frames.
            first = start // size * size
            # Not the index behind the frames.
            last = min(first + size, int((self.packets.offset + self.packets.size).max()))
            first = max(first, int(self.packets.offset.min()))
            content[first:last] = bytes(last - first)
        else:
            content[first:last] = bytes(one ^ rng.randrange(1, 256) for one in content[first:last])
        self.path.write_bytes(content)
        hit = [place for place in range(len(self.packets.size)) if self._is_hit(place, first, last)]
        walks = not self.has_walk or all(self.walk(self.packet(bytes(content), place)) for place in hit)
        try:
            pixels = self.read()
        except RaypipeError:
            return "error", "", walks
        if np.array_equal(pixels, self.pixels):
            return "right", "", walks
        with read_decoder_log() as log:
            self.read()
        return "wrong", "log" if log else "", walks


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=300)
    parser.add_argument("--frames", type=int, default=24)
    options = parser.parse_args()
    for codec in ("h264", "hevc", "av1", "vp9"):
        with tempfile.TemporaryDirectory() as folder:
            sound = Sound(Path(folder) / "dataset", codec, options.frames)
            started = time.perf_counter()
            for place in range(options.frames):
                assert not sound.has_walk or sound.walk(sound.packet(sound.content, place))
            walk_us = 1e6 * (time.perf_counter() - started) / options.frames
            for name, size in DAMAGES.items():
                rng = random.Random(f"{codec} {name}")
                counts = Counter(sound.judge(rng, size) for _ in range(options.inputs))
                sums = Counter()
                for (outcome, log, walks), count in counts.items():
                    sums[outcome] += count
                    if outcome == "wrong":
                        sums["log"] += count if log else 0
                        sums["walk"] += 0 if walks else count
                print(
                    f"{codec:5} {name:13} of {options.inputs}: error {sums['error']}, same pixels {sums['right']}, "
                    f"wrong picture {sums['wrong']}: of these told by the log {sums['log']}, by the walk {sums['walk']}"
                    f"  ({walk_us:.1f} us a packet)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
