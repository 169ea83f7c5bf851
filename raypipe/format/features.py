"""The features of ``info.json`` as values: kind, dtype, shape, and the true size of a camera."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from raypipe.errors import DatasetError, as_damage
from raypipe.format.tables import CORRECT_INFO
from raypipe.text import MOST_NUMBERS, MOST_PIXELS

INDEX_FEATURES: Mapping[str, str] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""The columns that every sample has, with their dtypes. raypipe derives those that a dataset lacks."""

FeatureKind = Literal["video", "image", "vector", "string", "language", "opaque"]
"""``opaque``: of a dtype that raypipe does not know; kept in copies, and in no sample."""

_CHANNEL_COUNTS = (1, 3, 4)

_NAMED_BITS = re.compile(r"(?:gray|p)(\d+)(?:le|be)")
_NOT_DECLARED = 0

_MOST_GOP = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCodes:
    """The distance that each number of a depth video means. The defaults are LeRobot's."""

    min_m: float = 0.01
    """Metres for the number 0: at this distance, nearer, or not measured."""
    max_m: float = 10.0
    """Metres for the number 4095 and larger ones."""
    shift_m: float = 3.5
    """Added before the logarithm."""
    is_log: bool = True
    """Whether the numbers are logarithms; otherwise they are proportional to the distance."""
    is_declared: bool = False
    """Whether ``info.json`` gives any of this. If not, numbers of more than 12 bits are millimetres."""
    num_bits: int = _NOT_DECLARED
    """Bits of a number, by the pixel format in ``info.json``; 0 if it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One named part of a frame."""

    name: str
    kind: FeatureKind
    dtype: str
    """numpy's name for a vector; ``uint8`` for a camera; the word of ``info.json`` for the others."""
    shape: tuple[int, ...]
    """Without the time axis. ``(1,)`` is a scalar. A camera has ``(channels, height, width)``, whatever the
    order in ``info.json``; a size is 0 if ``info.json`` does not give it."""
    is_depth: bool = False
    depth_codes: DepthCodes | None = None
    """For a depth video only."""
    has_metre_stats: bool = False
    """Whether stored statistics of depth are in metres; pixels are always in millimetres."""
    names: tuple[str, ...] = ()
    """The name of each number of a vector, if the dataset gives them."""
    codec: str = ""
    """A camera's declared codec; empty if unknown."""
    gop: int = 0
    """Declared number of frames from one keyframe of a camera to the next; 0 if unknown."""

    @property
    def is_camera(self) -> bool:
        """True for a feature with pixels, from a video or from images inside the rows."""
        return self.kind in ("video", "image")

    @property
    def height(self) -> int:
        """Rows of pixels of a camera."""
        return self.shape[1]

    @property
    def width(self) -> int:
        """Columns of pixels of a camera."""
        return self.shape[2]

    @property
    def frame_bytes(self) -> int:
        """The size of one decoded frame of a camera, or of one row of a vector."""
        if self.is_camera:
            # Depth is decoded to one float32, everything else to three bytes.
            return self.height * self.width * (4 if self.is_depth else 3)
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize if self.kind == "vector" else 0


INDEX_COLUMNS: Mapping[str, Feature] = {
    name: Feature(name=name, kind="vector", dtype=dtype, shape=(1,)) for name, dtype in INDEX_FEATURES.items()
}
"""The columns that every sample has as features; a dataset need not declare them."""


def read_features(info: Mapping[str, Any], place: str) -> dict[str, Feature]:
    """Return the features that `info` declares, in its order.

    Args:
        place: the path of ``info.json``, for messages.
    """
    declared = info.get("features")
    if not isinstance(declared, dict) or not declared:
        raise DatasetError(
            f"{place!r} declares no features; a LeRobot dataset has a 'features' object there. {CORRECT_INFO}"
        )
    features = {}
    for name, spec in declared.items():
        with as_damage(partial(_no_feature, name, place)):
            features[name] = _read_feature(name, spec, place)
    return features


def _no_feature(name: str, place: str, error: Exception) -> DatasetError:
    return DatasetError(f"feature {name!r} in {place!r} cannot be read: {error!r}. {CORRECT_INFO}")


def why_unfit_name(name: str) -> str:
    """Return why a feature cannot have this name; empty if it can. Cameras give their names to files and folders."""
    if not name or name == "." or ".." in name or "/" in name or "\\" in name:
        return "is empty or may be a path: it must not be '.', nor have '/', '\\' or '..' in it"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return "has control characters, or half of a character, in it"
    return ""


def _read_feature(name: str, spec: Any, place: str) -> Feature:
    why = why_unfit_name(name)
    if why:
        raise DatasetError(f"the name of the feature {name!r} in {place!r} {why}. {CORRECT_INFO}")
    if not isinstance(spec, dict) or not isinstance(spec.get("dtype"), str):
        raise DatasetError(
            f"feature {name!r} in {place!r} is {spec!r}; expected an object with a 'dtype'. {CORRECT_INFO}"
        )
    shape = _shape(name, spec.get("shape") or (1,), place)
    names = _flat_names(spec.get("names"))
    kind = _kind(spec["dtype"])
    if kind not in ("video", "image"):
        _check_size(shape, MOST_NUMBERS, name, place)
        return Feature(name=name, kind=kind, dtype=spec["dtype"], shape=shape, names=names)
    video = {**_object(spec, "video_info", name, place), **_object(spec, "info", name, place)}
    pixels = _camera_shape(shape, names, _sizes(video, name, place))
    _check_size(pixels[1:], MOST_PIXELS, name, place)
    is_depth = bool(video.get("is_depth_map") or video.get("video.is_depth_map"))
    return Feature(
        name=name,
        kind=kind,
        dtype="uint8",
        shape=pixels,
        is_depth=is_depth,
        depth_codes=_depth_codes(video, name, place) if is_depth and kind == "video" else None,
        has_metre_stats=is_depth and video.get("depth_unit") == "m",
        codec=str(video.get("video.codec") or ""),
        gop=_gop(video.get("video.g")),
    )


def _shape(name: str, given: Any, place: str) -> tuple[int, ...]:
    wrong = f"feature {name!r} in {place!r} has the shape {given!r}; expected numbers, none below 0. {CORRECT_INFO}"
    with as_damage(lambda _: DatasetError(wrong)):
        shape = tuple(int(size) for size in given)
        if min(shape, default=0) < 0:
            raise ValueError("below 0")
        return shape


def _check_size(shape: Sequence[int], most: int, name: str, place: str) -> None:
    if math.prod(shape) > most:
        raise DatasetError(
            f"feature {name!r} in {place!r} has the shape {list(shape)}, which is {math.prod(shape):,} numbers or "
            f"pixels; expected at most {most:,}. {CORRECT_INFO}"
        )


def _depth_codes(video: Mapping[str, Any], name: str, place: str) -> DepthCodes:
    keys = {"video.depth_min": "min_m", "video.depth_max": "max_m", "video.shift": "shift_m"}
    declared = {field: video[key] for key, field in keys.items() if video.get(key) is not None}
    is_log, pix_fmt = video.get("video.use_log"), str(video.get("video.pix_fmt") or "")
    bits = _NAMED_BITS.search(pix_fmt)
    codes = DepthCodes(
        **{field: value for field, value in declared.items() if _is_number(value)},
        is_log=is_log is not False,
        is_declared=bool(declared) or is_log is not None,
        num_bits=int(bits[1]) if bits else 8 if pix_fmt else _NOT_DECLARED,
    )
    is_possible = codes.min_m < codes.max_m and (not codes.is_log or codes.min_m + codes.shift_m > 0)
    if not all(map(_is_number, declared.values())) or not is_possible:
        raise DatasetError(
            f"the depth range of camera {name!r} in {place!r} is {declared}; expected numbers of metres with depth_min "
            f"below depth_max, and depth_min + shift above 0 where use_log is true. {CORRECT_INFO}"
        )
    return codes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _gop(value: Any) -> int:
    # From an encoder's record; an implausible value counts as unknown.
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST_GOP else 0


def _object(spec: Mapping[str, Any], key: str, name: str, place: str) -> dict[str, Any]:
    value = spec.get(key) or {}
    if not isinstance(value, dict):
        raise DatasetError(f"{key!r} of camera {name!r} in {place!r} is {value!r}; expected an object. {CORRECT_INFO}")
    return value


def _sizes(video: Mapping[str, Any], name: str, place: str) -> dict[str, int]:
    """Return the sizes in the record of a video."""
    sizes = {}
    for key in ("video.channels", "video.height", "video.width"):
        value = video.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DatasetError(
                f"{key!r} of camera {name!r} in {place!r} is {value!r}; expected a whole number. {CORRECT_INFO}"
            )
        sizes[key] = value
    return sizes


def _kind(dtype: str) -> FeatureKind:
    if dtype in get_args(FeatureKind):
        return dtype  # type: ignore[return-value]
    try:
        is_number = np.dtype(dtype).kind in "biuf"
    except TypeError:
        is_number = False
    return "vector" if is_number else "opaque"


def _flat_names(names: Any) -> tuple[str, ...]:
    """Return names given as a list, as ``{"motors": [...]}`` or as ``{"x": 0, "y": 1}``, in order."""
    if isinstance(names, dict):
        lists = [value for value in names.values() if isinstance(value, list)]
        names = [name for group in lists for name in group] if lists else list(names)
    if not isinstance(names, list):
        return ()
    return tuple(str(name) for name in names)


def _camera_shape(shape: Sequence[int], names: Sequence[str], video: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return ``(channels, height, width)`` from the video's own record, else the axis names, else the sizes."""
    axes = {name.rstrip("s")[:1]: size for name, size in zip(names, shape, strict=False)}
    if len(shape) == 3 and set(axes) == {"c", "h", "w"}:
        channels, height, width = axes["c"], axes["h"], axes["w"]
    elif len(shape) == 3 and shape[0] in _CHANNEL_COUNTS and shape[2] not in _CHANNEL_COUNTS:
        channels, height, width = shape
    elif len(shape) == 3:
        height, width, channels = shape
    else:
        height, width, channels = (*(*shape, 0, 0)[:2], 3)
    return (
        video.get("video.channels", channels),
        video.get("video.height", height),
        video.get("video.width", width),
    )
