"""The contents of a made dataset: its episodes, cameras, files and quirks.

Holds only the choices and their checks. Nothing here writes a file or knows a codec's options.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from raypipe.errors import ConfigError
from raypipe.format import why_unfit_name
from raypipe.text import check_choice

Version = Literal["v3.0", "v2.1", "v2.0"]
CameraKind = Literal["video", "image", "depth", "depth-image"]
Codec = Literal["h264", "av1", "hevc", "vp9"]
ShapeOrder = Literal["hwc", "chw"]
Join = Literal["encode", "concat"]
PixelStyle = Literal["flat", "textured"]
RowGroups = Literal["per-episode", "per-file"]
DroppedColumn = Literal["index", "frame_index", "task_index"]
ExtraFeature = Literal["next.done", "observation.grid", "note"]

MAX_CAMERAS = 16
"""A stamp has 4 bits for the camera's number."""

GRID_SHAPE = (2, 3)
"""Shape of the extra feature `observation.grid`."""

_MIN_SIZE = {"h264": 32, "hevc": 64, "vp9": 32, "av1": 64}
"""x265 (3.5) writes past its memory if a frame is narrower than its largest block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraSpec:
    """One camera of a made dataset, and how its frames are stored."""

    name: str
    """The feature's name, such as ``observation.images.top``."""
    height: int = 64
    width: int = 64
    kind: CameraKind = "video"
    """``video``: mp4. ``image``: PNG inside the parquet rows. ``depth``: mp4 with lossless 12-bit HEVC.
    ``depth-image``: TIFF of 16-bit millimetres inside the rows."""
    codec: Codec = "h264"
    """For ``video`` only; a depth video is always HEVC."""
    gop: int = 2
    """Frames from one keyframe to the next; LeRobot's recorder writes 2."""
    b_frames: int = 0
    """B-frames between two other frames (h264 and hevc); 0 decodes fast."""
    crf: int = 30
    """Quality of a lossy codec; LeRobot's recorder uses 30."""
    shape_order: ShapeOrder = "hwc"
    """Order in which info.json writes this camera's `shape`; real datasets have both."""

    def __post_init__(self) -> None:
        _check_choices(self, kind=CameraKind, codec=Codec, shape_order=ShapeOrder)
        for field_name, least in (("gop", 1), ("b_frames", 0), ("crf", 0)):
            _check_at_least(f"{field_name} of camera {self.name!r}", getattr(self, field_name), least)
        if why := why_unfit_name(self.name):
            raise ConfigError(f"the name of the camera {self.name!r} {why}")
        if self.b_frames and self.codec not in ("h264", "hevc"):
            raise ConfigError(f"camera {self.name!r}: {self.codec} has no B-frames; set b_frames=0 or codec='h264'")
        codec = "hevc" if self.kind == "depth" else self.codec
        least = _MIN_SIZE[codec] if self.is_video else 32
        size = f"{self.height}x{self.width}"
        if min(self.height, self.width) < least:
            raise ConfigError(f"camera {self.name!r} is {size}; {codec} needs {least}x{least} or more")
        # yuv420p halves the height and width of the chroma planes.
        if self.kind == "video" and (self.height % 2 or self.width % 2):
            raise ConfigError(f"camera {self.name!r} is {size}; a video needs an even height and width")

    @property
    def is_video(self) -> bool:
        """Whether the frames are in mp4 files."""
        return self.kind in ("video", "depth")

    @property
    def is_depth(self) -> bool:
        """Whether the frames are distances."""
        return self.kind in ("depth", "depth-image")


def _default_cameras() -> tuple[CameraSpec, ...]:
    return tuple(CameraSpec(name=f"observation.images.{place}") for place in ("top", "wrist"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthSpec:
    """A made LeRobot dataset. The defaults are small: 34 frames, two 64x64 cameras."""

    version: Version = "v3.0"
    lengths: tuple[int, ...] = (7, 1, 12, 5, 9)
    """Frames of each episode. The default has odd lengths and a single frame, since joins go wrong there."""
    fps: int = 10
    cameras: tuple[CameraSpec, ...] = field(default_factory=_default_cameras)
    state_dim: int = 6
    action_dim: int = 6
    tasks: tuple[str, ...] = ("pick up the cube", "open the drawer")
    """Episode e has task ``e % len(tasks)``."""
    two_tasks: bool = False
    """Whether the second half of an episode has the next task."""
    episodes_per_data_file: int = 3
    """v3.0 only; v2.x has one per file."""
    episodes_per_video_file: int = 3
    """v3.0 only; v2.x has one per file."""
    episodes_per_meta_file: int = 1000
    """v3.0 only: rows in one file under meta/episodes."""
    row_groups: RowGroups | int = "per-episode"
    """A number gives the rows of each group, which then cross episodes, as some converters write them."""
    gap_frames: int = 0
    """v3.0 only: frames without an episode between two episodes of an mp4."""
    join: Join = "encode"
    """``concat`` encodes a clip per episode and copies the streams into one mp4, as LeRobot's recorder does."""
    drop_columns: tuple[DroppedColumn, ...] = ()
    """Columns to leave out; some real datasets lack them."""
    extra_features: tuple[ExtraFeature, ...] = ()
    """A bool, a float32 and a string feature; the float32 one has the shape (2, 3)."""
    chunks_size: int = 1000
    """Files in one chunk folder (v2.x: episodes)."""
    robot_type: str = "raypipe_synth"
    with_stats: bool = True
    pixels: PixelStyle = "flat"
    """``textured`` costs about as much to decode as a real camera; for benchmarks."""
    seed: int = 0
    """Sets the phases of the curves in state and action, and the texture."""

    def __post_init__(self) -> None:
        _check_choices(self, version=Version, join=Join, pixels=PixelStyle)
        _check_choices(self, drop_columns=DroppedColumn, extra_features=ExtraFeature)
        counts = ["fps", "state_dim", "action_dim", "chunks_size"]
        counts += ["episodes_per_data_file", "episodes_per_video_file", "episodes_per_meta_file"]
        if isinstance(self.row_groups, int):
            counts.append("row_groups")
        else:
            _check_choices(self, row_groups=RowGroups)
        for name in counts:
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("gap_frames", self.gap_frames, 0)
        _check_at_least("the number of episodes in lengths", len(self.lengths), 1)
        _check_at_least("the shortest of lengths", min(self.lengths), 1)
        _check_at_least("the number of tasks", len(self.tasks), 2 if self.two_tasks else 1)
        if len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"tasks must differ from each other, got {self.tasks}")
        if self.gap_frames and not self.is_packed:
            raise ConfigError(
                f"gap_frames={self.gap_frames} needs version 'v3.0': an mp4 of {self.version} has one episode"
            )
        names = [camera.name for camera in self.cameras]
        if len(set(names)) < len(names):
            raise ConfigError(f"cameras must have different names, got {names}")
        if len(names) > MAX_CAMERAS:
            raise ConfigError(f"a stamp tells at most {MAX_CAMERAS} cameras apart, got {len(names)}")

    @property
    def is_packed(self) -> bool:
        """Whether files hold several episodes (v3.0)."""
        return self.version == "v3.0"


def varied_lengths(num_episodes: int, mean: int, seed: int) -> tuple[int, ...]:
    """Return lengths that differ by up to a third from `mean`; the same seed gives the same lengths."""
    _check_at_least("the number of episodes", num_episodes, 1)
    _check_at_least("the mean length", mean, 1)
    generator = random.Random(seed)
    return tuple(mean + generator.randint(-(mean // 3), mean // 3) for _ in range(num_episodes))


def numbered_cameras(num_cameras: int, size: str, codec: str, gop: int) -> tuple[CameraSpec, ...]:
    """Return cameras that differ only in their names, with `size` as ``WIDTHxHEIGHT``."""
    _check_at_least("the number of cameras", num_cameras, 0)
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", size)
    if not match:
        raise ConfigError(f"the size of a camera is WIDTHxHEIGHT, as 96x64, got {size!r}")
    check_choice("codec", codec, get_args(Codec))
    return tuple(
        CameraSpec(
            name=f"observation.images.camera_{number}",
            height=int(match[2]),
            width=int(match[1]),
            codec=codec,  # type: ignore[arg-type]
            gop=gop,
        )
        for number in range(num_cameras)
    )


def _check_choices(spec: object, **kinds: Any) -> None:
    """Check fields of a spec, or each item of a tuple, by their `Literal`."""
    for name, kind in kinds.items():
        value = getattr(spec, name)
        for item in value if isinstance(value, tuple) else (value,):
            check_choice(name, item, get_args(kind))


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
