"""The datasets that benchmarks write themselves."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

from made_copies import write_repeated

from raypipe.testing import CameraSpec, SynthSpec, write_dataset

KINDS = ("av1-640", "gop250", "h264", "av1", "rows")
"""``av1-640``: 50 episodes of 100 to 300 frames, 2 cameras 640x480; see `_camera_spec`. ``gop250``: 20 episodes of 300
frames, 1 camera 640x480; see `_gop250_spec`. ``h264``, ``av1``: 50 episodes of about 200 frames, 2 cameras 320x240.
``rows``: 2,000 episodes of 300 rows."""

_DISTINCT = 4
"""Episodes of ``av1-640`` whose videos are encoded: 25 ms a frame. The others begin as one of them."""


def make_dataset(kind: str, root: Path, num_episodes: int | None = None) -> Path:
    """Write a dataset of one of `KINDS` to `root`, unless it is there."""
    if (root / "meta" / "info.json").exists():
        return root
    if kind == "av1-640":
        return write_repeated(root, _camera_spec(num_episodes or 50), _DISTINCT)
    if kind == "gop250":
        return write_dataset(root, _gop250_spec(num_episodes or 20))
    spec = _rows_spec(num_episodes or 2000) if kind == "rows" else _video_spec(kind, num_episodes or 50)
    return write_dataset(root, spec)


def make_many_files(root: Path, num_episodes: int, episodes_per_file: int) -> Path:
    """Write an ``h264`` dataset with few episodes in a video file, unless it is there.

    Its quality is higher, for some 9 KB a frame: videos of real cameras are harder to compress than made ones.
    """
    if (root / "meta" / "info.json").exists():
        return root
    spec = _video_spec("h264", num_episodes)
    cameras = tuple(replace(camera, crf=20) for camera in spec.cameras)
    return write_dataset(root, replace(spec, cameras=cameras, episodes_per_video_file=episodes_per_file))


def make_peer_dataset(kind: str, root: Path, num_episodes: int) -> Path:
    """Write the dataset of `peer_spec`, unless it is there."""
    if (root / "meta" / "info.json").exists():
        return root
    return write_repeated(root, peer_spec(kind, num_episodes), _DISTINCT if kind == "av1-640" else num_episodes)


def peer_spec(kind: str, num_episodes: int) -> SynthSpec:
    """Return ``av1-640``, ``h264`` or ``av1`` with 10 episodes to a data file and one video file to a camera.

    Peers that stream share out data files among workers, and LeRobot's streaming class gives wrong frames where a
    camera has more than one video file.
    """
    spec = _camera_spec(num_episodes) if kind == "av1-640" else _video_spec(kind, num_episodes)
    return replace(spec, episodes_per_data_file=10, episodes_per_video_file=num_episodes)


def make_resume_dataset(root: Path, num_episodes: int = 30) -> Path:
    """Write a dataset of short 96x96 episodes with one camera, for counting frames: 3 episodes to a data file."""
    if (root / "meta" / "info.json").exists():
        return root
    draw = random.Random(1)
    lengths = tuple(draw.randint(40, 80) for _ in range(num_episodes))
    camera = CameraSpec(name="observation.images.top", height=96, width=96)
    spec = replace(_spec(lengths, (camera,)), episodes_per_data_file=3, episodes_per_video_file=num_episodes)
    return write_repeated(root, spec, num_episodes)


def make_small_episodes(num_episodes: int, root: Path) -> Path:
    """Write a dataset of 96x96 episodes of 40 frames, a file each; most videos are hard links of the first 50."""
    if (root / "meta" / "info.json").exists():
        return root
    camera = CameraSpec(name="observation.images.top", height=96, width=96)
    written = 50
    spec = _small_spec((40,) * min(num_episodes, written), (camera,))
    if num_episodes <= written:
        return write_dataset(root, spec)
    pattern = write_dataset(root.with_name(root.name + "-pattern"), spec)
    # A whole dataset without videos, whose info.json then says that there is a camera: nothing else tells.
    write_dataset(root, _small_spec((40,) * num_episodes, ()))
    _add_camera(pattern, root)
    _link_videos(pattern, root, written, num_episodes)
    shutil.rmtree(pattern)
    return root


def _small_spec(lengths: tuple[int, ...], cameras: tuple[CameraSpec, ...]) -> SynthSpec:
    # v2.1 has a file per episode, whose name tells the episode.
    return SynthSpec(version="v2.1", lengths=lengths, fps=10, cameras=cameras, pixels="textured", with_stats=False)


def _add_camera(pattern: Path, root: Path) -> None:
    info, with_camera = (json.loads((folder / "meta" / "info.json").read_text()) for folder in (root, pattern))
    for key in ("features", "video_path"):
        info[key] = with_camera[key]
    (root / "meta" / "info.json").write_text(json.dumps(info, indent=4))


def _link_videos(pattern: Path, root: Path, written: int, num_episodes: int) -> None:
    first = sorted(pattern.glob("videos/**/*.mp4"))
    assert len(first) == written, f"{len(first)} videos in {pattern}"
    camera = first[0].parent.name
    for episode in range(num_episodes):
        folder = root / "videos" / f"chunk-{episode // 1000:03d}" / camera
        folder.mkdir(parents=True, exist_ok=True)
        os.link(first[episode % written], folder / f"episode_{episode:06d}.mp4")


def _camera_spec(num_episodes: int) -> SynthSpec:
    """Return what a user with two 640x480 cameras has: AV1, keyframe every 2, in the files that LeRobot writes.

    Moving texture and noise, which cost what real cameras do: side by side on two busy cores a frame decoded in file
    order took 4.6 ms of CPU, one of the real dataset ``HuangJunkai2023/CR5_TCP_test`` (640x480, AV1, keyframe every 2)
    4.6, and one of ``TristanGabl/lerobot_robot_learning`` (the same, upright) 3.8.
    """
    draw = random.Random(0)
    lengths = tuple(draw.randint(100, 300) for _ in range(num_episodes))
    cameras = tuple(
        # At LeRobot's crf of 30 the texture costs 0.7 of a real camera.
        CameraSpec(name=f"observation.images.{place}", height=480, width=640, codec="av1", crf=24)
        for place in ("top", "wrist")
    )
    # 40 episodes of a camera come to 180 MB; LeRobot begins another file at 200.
    return replace(_spec(lengths, cameras), episodes_per_video_file=40)


def _gop250_spec(num_episodes: int) -> SynthSpec:
    """Return H.264 as x264 writes it unasked: a keyframe every 250 and 3 B-frames in a row.

    A single frame costs up to 250 frames of decoding. A file per episode: v2.1.
    """
    camera = CameraSpec(name="observation.images.top", height=480, width=640, codec="h264", gop=250, b_frames=3, crf=23)
    return replace(_spec((300,) * num_episodes, (camera,)), version="v2.1")


def _video_spec(codec: str, num_episodes: int) -> SynthSpec:
    draw = random.Random(0)
    lengths = tuple(draw.randint(140, 261) for _ in range(num_episodes))
    cameras = tuple(
        CameraSpec(name=f"observation.images.{place}", height=240, width=320, codec=codec)  # type: ignore[arg-type]
        for place in ("top", "wrist")
    )
    return _spec(lengths, cameras)


def _rows_spec(num_episodes: int) -> SynthSpec:
    return _spec((300,) * num_episodes, ())


def _spec(lengths: tuple[int, ...], cameras: tuple[CameraSpec, ...]) -> SynthSpec:
    return SynthSpec(
        lengths=lengths,
        fps=30,
        state_dim=14,
        action_dim=14,
        cameras=cameras,
        episodes_per_data_file=500,
        episodes_per_video_file=50,
        pixels="textured",
        # As LeRobot writes them: every episode begins at a keyframe.
        join="concat",
    )
