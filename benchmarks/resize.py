"""What it costs to decode the frames of a video at another size, and how near each way comes to the exact result.

    python benchmarks/resize.py VIDEO [--size 224 224] [--clip 2] [--clips 20] [--repeats 7] [--json-file FILE]

Clips of a few frames are decoded at random from a decoder that stays open, and made smaller by one way after the other,
all of them in every repetition, so that a slow minute of the machine falls on all. CPU is that of the whole process,
in ms per frame, the median of the repetitions: `cpu_ms` of decoding with resizing, `resize_ms` of resizing alone as
measured around the call (for the resize within torchcodec: the difference to no resize). `other_threads` is the share
of the CPU of resizing that falls on other threads than the calling one, with two threads of torch.

Quality is the mean absolute difference, in steps of 0 to 255, from two references in float64, not rounded: `from_area`
the average over the area of a pixel, `from_triangle` bilinear with antialias. `worst` is the largest difference from
the nearer of the two. `same_in_any_clip`: a frame comes out alike from clips of 1, of 2 and of 8 frames.
`same_by_threads`: and with one thread of torch as with two.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import write_results
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate
from torchcodec.decoders import VideoDecoder
from torchcodec.transforms import Resize

COLUMNS = (
    "way",
    "size",
    "cpu_ms",
    "resize_ms",
    "other_threads",
    "from_area",
    "from_triangle",
    "worst",
    "same_in_any_clip",
    "same_by_threads",
)
Size = tuple[int, int]
Way = Callable[[torch.Tensor, Size], torch.Tensor]
"""From (n, height, width, 3) uint8 to the same of another height and width."""
ORIGINAL, WITHIN = "no resize", "torchcodec Resize"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video")
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--clip", type=int, default=2, help="frames of a clip")
    parser.add_argument("--clips", type=int, default=20, help="of a repetition")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json-file", dest="json", help="also write the figures here")
    arguments = parser.parse_args()
    size = (arguments.size[0], arguments.size[1])
    write_results(arguments.json, measure(arguments, size), COLUMNS)


def measure(arguments: argparse.Namespace, size: Size) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    plain, within = open_decoder(arguments.video, None), open_decoder(arguments.video, size)
    names = [ORIGINAL, WITHIN, *ways_for(plain, size)]
    cpu_ms: dict[str, list[float]] = {name: [] for name in names}
    resize_ms: dict[str, list[float]] = {name: [] for name in names}
    rng = random.Random(0)
    for repeat in range(arguments.repeats + 1):
        starts = random_starts(plain, arguments.clip, arguments.clips, rng)
        for name in rng.sample(names, len(names)):
            total, resizing = time_way(name, plain, within, size, starts, arguments.clip)
            if repeat:
                cpu_ms[name].append(total)
                resize_ms[name].append(resizing)
    results = []
    for name in names:
        alone = statistics.median(resize_ms[name])
        if name == WITHIN:
            both = zip(cpu_ms[WITHIN], cpu_ms[ORIGINAL], strict=True)
            alone = statistics.median(total - plain_ms for total, plain_ms in both)
        result: dict[str, Any] = {
            "way": name,
            "size": f"{size[0]}x{size[1]}",
            "cpu_ms": round(statistics.median(cpu_ms[name]), 3),
            "resize_ms": None if name == ORIGINAL else round(alone, 3),
        }
        if name != ORIGINAL:
            result |= judge(name, plain, within, size)
        results.append(result)
    return results


def open_decoder(video: str, size: Size | None) -> VideoDecoder:
    """Open a video as the loader does."""
    transforms = None if size is None else [Resize(size)]
    return VideoDecoder(
        video, dimension_order="NHWC", seek_mode="approximate", num_ffmpeg_threads=1, transforms=transforms
    )


def random_starts(decoder: VideoDecoder, clip: int, clips: int, rng: random.Random) -> list[int]:
    return [rng.randrange(len(decoder) // clip) * clip for _ in range(clips)]


def time_way(
    name: str, plain: VideoDecoder, within: VideoDecoder, size: Size, starts: list[int], clip: int
) -> tuple[float, float]:
    """Return the CPU in ms per frame of all and of resizing."""
    decoder = within if name == WITHIN else plain
    resize = WAYS.get(name)
    resizing = 0.0
    began = time.process_time()
    for start in starts:
        frames = decoder.get_frames_in_range(start, start + clip).data
        if resize is not None:
            before = time.process_time()
            resize(frames, size)
            resizing += time.process_time() - before
    per_frame = 1e3 / (len(starts) * clip)
    return (time.process_time() - began) * per_frame, resizing * per_frame


def judge(name: str, plain: VideoDecoder, within: VideoDecoder, size: Size) -> dict[str, Any]:
    """Return how near a way comes to the references, and whether it gives a frame alike however it is decoded."""

    def show(first: int, end: int) -> NDArray[np.uint8]:
        if name == WITHIN:
            return within.get_frames_in_range(first, end).data.numpy()
        return WAYS[name](plain.get_frames_in_range(first, end).data, size).numpy()

    original = plain.get_frames_in_range(0, 8).data
    shown = show(0, 8)
    exact = original.numpy().astype(np.float64)
    off = {weigh.__name__: np.abs(reduce_exactly(exact, size, weigh) - shown) for weigh in (area, triangle)}
    nearer = min(off.values(), key=lambda each: float(each.mean()))
    parts = [np.concatenate([show(at, at + clip) for at in range(0, 8, clip)]) for clip in (1, 2)]
    result = {
        "from_area": round(float(off["area"].mean()), 3),
        "from_triangle": round(float(off["triangle"].mean()), 3),
        "worst": round(float(nearer.max()), 1),
        "same_in_any_clip": all(np.array_equal(part, shown) for part in parts),
    }
    torch.set_num_threads(2)
    result["same_by_threads"] = bool(np.array_equal(show(0, 8), shown))
    if name != WITHIN:
        result["other_threads"] = round(other_threads(WAYS[name], original, size), 2)
    torch.set_num_threads(1)
    return result


def other_threads(resize: Way, frames: torch.Tensor, size: Size) -> float:
    own, whole = time.thread_time(), time.process_time()
    for _ in range(9):
        resize(frames, size)
    own, whole = time.thread_time() - own, time.process_time() - whole
    return max(0.0, 1 - own / whole)


def area(long: int, short: int) -> NDArray[np.float64]:
    """Return the share of every old pixel in every new one, by the area that they have in common."""
    scale = long / short
    new, old = np.arange(short)[:, None] * scale, np.arange(long)[None]
    common = np.minimum(new + scale, old + 1) - np.maximum(new, old)
    return common.clip(0) / scale


def triangle(long: int, short: int) -> NDArray[np.float64]:
    """Return the share of every old pixel in every new one by bilinear interpolation with antialias."""
    scale = max(long / short, 1.0)
    centre, old = (np.arange(short)[:, None] + 0.5) * (long / short), np.arange(long)[None] + 0.5
    weight = (1 - np.abs(old - centre) / scale).clip(0)
    return np.asarray(weight / weight.sum(1, keepdims=True))


def reduce_exactly(
    frames: NDArray[np.float64], size: Size, weigh: Callable[[int, int], NDArray[np.float64]]
) -> NDArray[np.float64]:
    rows, columns = weigh(frames.shape[1], size[0]), weigh(frames.shape[2], size[1])
    return np.einsum("hi,nijc,wj->nhwc", rows, frames, columns, optimize=True)


def by_torch(frames: torch.Tensor, size: Size, **options: Any) -> torch.Tensor:
    # Permuted, not copied: what torch calls channels_last, for which it has a kernel of uint8.
    return interpolate(frames.permute(0, 3, 1, 2), size, **options).permute(0, 2, 3, 1)


def torch_copied(frames: torch.Tensor, size: Size) -> torch.Tensor:
    planes = frames.permute(0, 3, 1, 2).contiguous()
    return interpolate(planes, size, mode="bilinear", antialias=True).permute(0, 2, 3, 1).contiguous()


def torch_float(frames: torch.Tensor, size: Size, **options: Any) -> torch.Tensor:
    return by_torch(frames.float(), size, **options).round_().clamp_(0, 255).to(torch.uint8)


def by_pillow(frames: torch.Tensor, size: Size, resample: Image.Resampling, gap: float | None = None) -> torch.Tensor:
    out = np.empty((len(frames), *size, 3), dtype=np.uint8)
    for number, frame in enumerate(frames.numpy()):
        out[number] = np.asarray(Image.fromarray(frame).resize((size[1], size[0]), resample, reducing_gap=gap))
    return torch.from_numpy(out)


def numpy_nearest(frames: torch.Tensor, size: Size) -> torch.Tensor:
    height, width = frames.shape[1:3]
    rows = ((np.arange(size[0]) + 0.5) * height / size[0]).astype(np.int64)
    columns = ((np.arange(size[1]) + 0.5) * width / size[1]).astype(np.int64)
    return torch.from_numpy(frames.numpy()[:, rows][:, :, columns])


def numpy_blocks(frames: torch.Tensor, size: Size) -> torch.Tensor:
    """Average whole blocks of pixels; only where the size divides the old one."""
    pixels = frames.numpy()
    down, right = pixels.shape[1] // size[0], pixels.shape[2] // size[1]
    total = np.full((len(frames), *size, 3), down * right // 2, dtype=np.uint16)
    for row in range(down):
        for column in range(right):
            total += pixels[:, row::down, column::right]
    return torch.from_numpy((total // (down * right)).astype(np.uint8))


WAYS: dict[str, Way] = {
    "torch bilinear antialias, uint8": lambda f, s: by_torch(f, s, mode="bilinear", antialias=True),
    "torch bilinear antialias, uint8, planes copied": torch_copied,
    "torch bilinear antialias, float": lambda f, s: torch_float(f, s, mode="bilinear", antialias=True),
    "torch bilinear, no antialias, uint8": lambda f, s: by_torch(f, s, mode="bilinear"),
    "torch area, float": lambda f, s: torch_float(f, s, mode="area"),
    "torch nearest-exact, uint8": lambda f, s: by_torch(f, s, mode="nearest-exact"),
    "Pillow BOX": lambda f, s: by_pillow(f, s, Image.Resampling.BOX),
    "Pillow BILINEAR": lambda f, s: by_pillow(f, s, Image.Resampling.BILINEAR),
    "Pillow BILINEAR, reducing_gap 1": lambda f, s: by_pillow(f, s, Image.Resampling.BILINEAR, 1.0),
    "Pillow BILINEAR, reducing_gap 2": lambda f, s: by_pillow(f, s, Image.Resampling.BILINEAR, 2.0),
    "numpy nearest": numpy_nearest,
    "numpy blocks": numpy_blocks,
}


def ways_for(decoder: VideoDecoder, size: Size) -> list[str]:
    _, height, width, _ = decoder.get_frames_in_range(0, 1).data.shape
    is_whole = height % size[0] == 0 and width % size[1] == 0
    return [name for name in WAYS if is_whole or name != "numpy blocks"]


if __name__ == "__main__":
    main()
