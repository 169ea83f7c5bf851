"""One mp4 of each kind, and images as rows hold them, as sites: what decoders make of damaged bytes."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_mutations import find_boxes, mutate_bytes, mutate_mp4
from fuzz_site import CHANGED, IMAGE, RIGHT, TOP, Damage, Site, WrongData
from PIL import Image

from raypipe.decode import OpenVideo, decode_image
from raypipe.errors import DecodeError
from raypipe.format import Feature, read_metadata, read_video_index
from raypipe.storage import open_storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset


class Mp4Site(Site):
    """One mp4, all frames of which are decoded: the frames that the damage does not touch are as they were."""

    weight = 6
    codec = "h264"
    gop = 2
    b_frames = 0
    kind = "video"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "dataset")
        size = 64 if self.codec in ("hevc", "av1") or self.kind == "depth" else 32
        options: dict[str, Any] = {"codec": self.codec, "gop": self.gop, "b_frames": self.b_frames, "kind": self.kind}
        camera = CameraSpec(name=TOP, height=size, width=size, **options)
        write_dataset(self.folder, SynthSpec(lengths=(12,), cameras=(camera,), pixels="textured"))
        self.file = f"videos/{TOP}/chunk-000/file-000.mp4"
        self.content = (self.folder / self.file).read_bytes()
        self.codes = read_metadata(str(self.folder)).features[TOP].depth_codes
        self.storage, self._open = open_storage(str(self.folder)), OpenVideo
        self.index = read_video_index(self.storage, self.file)
        self.pixels = self._read()

    def _read(self) -> np.ndarray:
        video = self._open(self.storage, self.file, codes=self.codes)
        # Not a million frames, where a table says so.
        count = min(len(video.index), 16)
        if not count:
            raise_empty(self.file)
        return video.read_frames(np.arange(count)).numpy()

    def draw(self, rng: random.Random) -> Damage:
        if rng.random() < 0.35:
            return Damage(self.file, self._damage_frames(rng), "frames")
        return Damage(self.file, mutate_mp4(self.content, rng), "file")

    def _damage_frames(self, rng: random.Random) -> bytes:
        """Damage some bytes of frames alone, so that no byte moves."""
        _, start, stop = next(box for box in find_boxes(self.content) if box[0] == b"mdat")
        content = bytearray(self.content)
        for _ in range(rng.choice((1, 1, 2, 4))):
            place = rng.randrange(start + 8, stop)
            run = min(rng.choice((1, 1, 2, 4, 16, 64)), stop - place)
            content[place : place + run] = rng.choice((bytes(run), b"\xff" * run, rng.randbytes(run)))
        return bytes(content)

    def use(self, damage: Damage) -> str:
        pixels = self._read()
        if pixels.shape == self.pixels.shape and np.array_equal(pixels, self.pixels):
            return RIGHT
        if damage.use == "frames":
            count = min(len(pixels), len(self.pixels))
            different = {int(one) for one in np.flatnonzero((pixels[:count] != self.pixels[:count]).any((1, 2, 3)))}
            wrong = sorted(different - self._touched(damage.content))
            if wrong:
                raise WrongData(f"frames {wrong} differ, and none of their bytes was touched")
        return CHANGED

    def _touched(self, content: bytes) -> set[int]:
        """Return the frames that decoding damaged packets may change: to the end of the group of pictures."""
        packets = self.index.packets
        assert packets is not None
        places = np.flatnonzero(np.frombuffer(content, np.uint8) != np.frombuffer(self.content, np.uint8))
        inside = (packets.offset[:, None] <= places) & (places < (packets.offset + packets.size)[:, None])
        damaged = np.flatnonzero(inside.any(axis=1))
        ends = np.append(packets.keyframes, len(packets.offset))
        # With B-frames a picture may lean on the keyframe behind it.
        reach = 2 if self.b_frames else 1
        touched: set[int] = set()
        for place in damaged:
            group = int(np.searchsorted(packets.keyframes, place, side="right")) - 1
            first = packets.keyframes[max(0, group - (reach - 1))]
            touched |= set(range(int(first), int(ends[min(group + reach, len(ends) - 1)])))
        return {frame for frame, place in enumerate(packets.place.tolist()) if place in touched}


def raise_empty(file: str) -> None:
    """Raise as a reader does that wants a frame of a video without any."""
    raise DecodeError(f"{file} holds no frame")


class Av1Site(Mp4Site):
    """As LeRobot records."""

    weight = 2
    codec = "av1"


class HevcSite(Mp4Site):
    """HEVC."""

    weight = 2
    codec = "hevc"
    gop = 4


class ReorderedSite(Mp4Site):
    """H.264 with B-frames, whose frames are stored in another order than they are shown."""

    weight = 2
    gop = 6
    b_frames = 2


class DepthSite(Mp4Site):
    """Depth: HEVC of 12 bits, decoded by PyAV."""

    weight = 2
    kind = "depth"


class ImageSite(Site):
    """Images as rows hold them: PNG, JPEG, TIFF."""

    weight = 10

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "images")
        self.folder.mkdir()
        values = np.arange(32 * 48, dtype=np.uint16).reshape(32, 48)
        picture = Image.fromarray(np.stack([values % 251, values % 83, values % 7], 2).astype(np.uint8))
        options: dict[str, Any] = {"name": IMAGE, "kind": "image", "dtype": "uint8"}
        color = Feature(**options, shape=(3, 32, 48))
        depth = Feature(**options, shape=(1, 32, 48), is_depth=True)
        free = Feature(**options, shape=(3, 0, 0))
        self.features = {"color": color, "depth": depth, "free": free}
        made = {"png": picture, "jpeg": picture, "tiff": picture}
        for name, one in {**made, "depth.png": Image.fromarray(values), "depth.tiff": Image.fromarray(values)}.items():
            content = io.BytesIO()
            one.save(content, name.split(".")[-1].upper())
            (self.folder / name).write_bytes(content.getvalue())
        self.files = sorted(path.name for path in self.folder.iterdir())

    def draw(self, rng: random.Random) -> Damage:
        file = rng.choice(self.files)
        use = "depth" if file.startswith("depth") else rng.choice(("color", "free"))
        return Damage(file, mutate_bytes((self.folder / file).read_bytes(), rng), use)

    def use(self, damage: Damage) -> str:
        stored = rng_free_wrap(damage)
        pixels = decode_image(stored, self.features[damage.use], f"frame 0 of {damage.file}")
        if damage.use != "free" and pixels.shape[0] * pixels.shape[1] > 32 * 48:
            raise WrongData(f"an image of {tuple(pixels.shape)}")
        return CHANGED


def rng_free_wrap(damage: Damage) -> Any:
    """Return image bytes as rows hold them: plain, or with their path."""
    return damage.content if len(damage.content) % 2 else {"bytes": damage.content, "path": None}
