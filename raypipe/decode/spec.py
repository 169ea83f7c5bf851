"""What a user decides about decoding: where it runs, at what size, what is kept. Never what value a pixel has."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from numbers import Integral
from typing import Any, Final, Literal, get_args

from raypipe.errors import ConfigError, suggest
from raypipe.format import Feature
from raypipe.plan import check_whole, store_whole
from raypipe.text import how_to_install, make_spec, parse_bytes

Where = Literal["auto", "rank", "cluster"]
CameraDtype = Literal["uint8", "float32"]
Size = tuple[int, int]
"""Height and width."""
Resize = Size | Mapping[str, Size] | Literal["original"]
"""One size for every camera, or a size by camera; cameras without one keep their own."""
Fit = Literal["stretch", "letterbox", "crop"]
"""How a frame fits a size of another shape: stretched, whole between black bars, or cut to its middle."""

_MOST_PIXELS: Final = 1 << 15
"""Most pixels of a side; a larger number is a typing error."""

_MOST_THREADS: Final = 1 << 16
_MOST_VIDEOS: Final = 1 << 20

_COLOUR_BITS: Final = 8

_OF_FFMPEG: Final = re.compile(r"\blib(av|sw)\w+\.so")

ORIGINAL_SIZE: Final = "original"
ASSIGNED_CPUS: Final = "assigned"
ON_DISK: Final = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """Where and how pixels are decoded."""

    where: Where = "auto"
    """``rank``: threads of the training process; no pixel crosses the object store, and it costs least per frame.
    ``cluster``: Ray tasks on any node with CPUs; scales past the machine of the GPUs. ``auto``: ``cluster`` if
    the cluster has nodes with CPUs and no GPU while ranks run on nodes with GPUs, else ``rank``."""

    resize: Resize = ORIGINAL_SIZE
    """Height and width of every decoded frame, one number for both, or a dict of these by camera. The decoding thread
    resizes, bilinear with antialias. Depth takes the nearest pixel: the mean of two distances is the distance of
    nothing."""

    fit: Fit = "stretch"
    """``letterbox`` keeps a frame whole, centred between black bars; ``crop`` cuts it to its middle."""

    num_threads: int | Literal["assigned"] = ASSIGNED_CPUS
    """Decoding threads of a rank: by default the CPUs that Ray assigned to its process, at least 1. A process that Ray
    has not started takes its share of the machine's CPUs: all of them, or an equal part for each torchrun process."""

    camera_dtype: CameraDtype = "uint8"
    """``float32`` gives [0, 1]; the device converts after the copy."""

    device: str = "cpu"
    """``cuda`` lets torchcodec decode on the rank's GPU."""

    open_videos: int = 128
    """Videos that a process keeps open. A decoder of 640x480 holds 2 MB, and opening one costs 1 to 5 ms."""

    def __post_init__(self) -> None:
        for name, choices in (("where", Where), ("camera_dtype", CameraDtype), ("fit", Fit)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise ConfigError(f"decode {name} is {value!r}{suggest(value, get_args(choices))}")
        object.__setattr__(self, "device", device_name(self.device))
        if not isinstance(self.device, str):
            raise ConfigError(f"decode device is {self.device!r}; give 'cpu' or 'cuda'")
        if self.where == "cluster" and self.device != "cpu":
            raise ConfigError(f"decode device={self.device!r} needs where='rank': the tasks of a cluster have no GPU")
        object.__setattr__(self, "resize", check_resize(self.resize, "decode resize"))
        check_fit(self.fit, self.resize, "decode fit")
        store_whole(self, "num_threads", 1, _MOST_THREADS, ASSIGNED_CPUS, label="decode num_threads")
        store_whole(self, "open_videos", 1, _MOST_VIDEOS, label="decode open_videos")

    def frame_shape(self, feature: Feature) -> tuple[int, int, int]:
        """Return ``(height, width, channels)`` of a camera's decoded frames."""
        _, height, width = feature.shape
        size = size_of(self.resize, feature.name)
        if size != ORIGINAL_SIZE:
            height, width = size
        return height, width, 1 if feature.is_depth else 3

    def frame_bytes(self, feature: Feature) -> int:
        """Return the memory of a camera's decoded frame."""
        height, width, channels = self.frame_shape(feature)
        return height * width * channels * (4 if feature.is_depth else 1)

    def by_own_names(self, cameras: Mapping[str, str]) -> "DecodeSpec":
        """Return the spec for a dataset that names its cameras differently than a batch does.

        Args:
            cameras: the dataset's names by the names of a batch.
        """
        if not isinstance(self.resize, Mapping):
            return self
        return replace(self, resize={own: self.resize[name] for name, own in cameras.items() if name in self.resize})

    def check_cameras(self, cameras: Sequence[str], place: str) -> None:
        """Raise a `ConfigError` if `resize` names a camera that batches do not have."""
        for name in self.resize if isinstance(self.resize, Mapping) else ():
            if name not in cameras:
                raise ConfigError(
                    f"resize names the camera {name!r}, which {place} does not have{suggest(name, cameras)}"
                )


def size_of(resize: Resize, camera: str) -> Size | Literal["original"]:
    """Return the size that a camera's frames should have."""
    return resize.get(camera, ORIGINAL_SIZE) if isinstance(resize, Mapping) else resize


def check_resize(given: Any, name: str) -> Resize:
    """Return sizes in the form that a spec holds.

    Raises:
        ConfigError: `given` has no valid size; the message starts with `name`.
    """
    if isinstance(given, str) and given == ORIGINAL_SIZE:
        return ORIGINAL_SIZE
    if isinstance(given, Mapping):
        return {str(camera): _check_size(size, f"{name} of {camera!r}") for camera, size in given.items()}
    return _check_size(given, name)


def check_fit(fit: Fit, resize: Resize, name: str) -> None:
    """Raise a `ConfigError` if `fit` is set without a size."""
    if fit != "stretch" and resize == ORIGINAL_SIZE:
        raise ConfigError(f"{name} is {fit!r}, and no size is given beside it: give resize=(height, width) too")


def _check_size(given: Any, name: str) -> Size:
    sides = (given, given) if isinstance(given, Integral) and not isinstance(given, bool) else given
    if isinstance(sides, str) or not isinstance(sides, Sequence) or len(sides) != 2:
        raise ConfigError(
            f"{name} is {given!r}; give (height, width), one number for both, a dict of such by camera, or "
            f"{ORIGINAL_SIZE!r} for all"
        )
    height, width = (check_whole(f"{name} {given!r}: a side", side, 1, _MOST_PIXELS) for side in sides)
    return height, width


def check_decodable(feature: Feature, root: str) -> None:
    """Raise a `ConfigError` for a camera that raypipe cannot decode without loss."""
    if why := why_undecodable(feature):
        raise ConfigError(
            f"camera {feature.name!r} of {root!r} cannot be decoded: {why}, or name the others by cameras=[...]"
        )


def why_undecodable(feature: Feature) -> str:
    """Return why raypipe cannot decode a camera without loss, and what helps; empty if it can."""
    if feature.depth_codes is None:
        return ""
    if 0 < feature.depth_codes.num_bits <= _COLOUR_BITS:
        return (
            "it is declared a depth video, and its pixel format has 8 bits, too few for distances; if it is a picture, "
            "set is_depth_map to false in info.json"
        )
    return needs_av() if find_spec("av") is None else ""


def needs_av() -> str:
    """Return why depth videos need PyAV, and how to install it."""
    return (
        "torchcodec gives a depth video only 8 of its 12 bits, and PyAV, which gives all, is not installed here: run "
        + how_to_install("depth")
    )


def load_torchcodec() -> Any:
    """Import torchcodec, which takes a second, and return it.

    Raises:
        ConfigError: it cannot be loaded; the message says what is missing.
    """
    try:
        import torchcodec
    except (ImportError, OSError, RuntimeError) as error:
        # Not from the error: it has a traceback of each FFmpeg version that torchcodec tried, 140 lines.
        raise ConfigError(f"no video can be decoded here: {_why_not_loaded(str(error))}") from None
    return torchcodec


def _why_not_loaded(told: str) -> str:
    failed = [line.removeprefix("OSError: ") for line in told.splitlines() if line.startswith("OSError: ")]
    causes = [one for one in failed if not one.startswith("Could not load this library")]
    others = [one for one in causes if not _OF_FFMPEG.search(one)]
    if causes and not others:
        return (
            "torchcodec finds FFmpeg's shared libraries in none of the versions that it can use, 4 to 8. Run "
            "`apt-get install ffmpeg`, `conda install -c conda-forge ffmpeg` or `brew install ffmpeg`"
        )
    cause = others[0] if others else told.partition("\n")[0]
    return (
        f"torchcodec cannot be loaded ({cause}). Its version must fit that of torch, and a build for CUDA needs CUDA's "
        f"libraries: install versions that fit, as constraints.txt in a clone of raypipe lists them"
    )


def device_name(device: Any) -> Any:
    """Return the name of a `torch.device`, such as Accelerate's; anything else as it is. Imports no torch."""
    return str(device) if type(device).__module__ == "torch" else device


def check_device(device: str) -> None:
    """Raise a `ConfigError` for a device that torch does not know or this machine does not have."""
    import torch

    try:
        # As text: a number could be that of a device, and no other code takes one.
        kind = torch.device(str(device)).type
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, which torch does not know; give 'cpu', 'cuda' or 'cuda:1'") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, and torch finds no CUDA device here; use device='cpu'")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpec:
    """Where every node keeps decoded frames, and how many bytes of them. It does not keep images stored in rows."""

    folder: str = "~/.cache/raypipe/kept"
    """A folder on a local disk of the node. All processes and jobs of a user may share it."""

    max_bytes: int | Literal["disk"] = ON_DISK
    """Limit of all kept frames in the folder: a number, or text such as ``"200GB"`` or ``"100GiB"``. Kept frames never
    take more than half of the space that the disk would have free without them; ``"disk"`` is that half."""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str) or not self.folder or "://" in self.folder:
            raise ConfigError(f"folder of keep_frames is {self.folder!r}; give a folder on a local disk")
        if not self.folder.startswith("~"):
            # Each process of a cluster has its own working folder.
            object.__setattr__(self, "folder", os.path.abspath(self.folder))
        if self.max_bytes != ON_DISK:
            object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes, "max_bytes of keep_frames"))


def make_keep(value: Any) -> KeepSpec | None:
    """Return the spec of `value`: True (the defaults), False (None), a spec, or a dict of its fields."""
    if isinstance(value, bool):
        return KeepSpec() if value else None
    if not isinstance(value, KeepSpec | Mapping):
        raise ConfigError(f"keep_frames must be True, False or a dict of folder and max_bytes, got {value!r}")
    return make_spec(KeepSpec, value, "keep_frames")
