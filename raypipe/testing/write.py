"""Writes a made dataset to disk: rows, videos, then meta/.

Decides which episodes share a file. `meta` has the layout of each version, `rows` and `pixels` the values.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raypipe.errors import ConfigError
from raypipe.storage import inside
from raypipe.testing.meta import DATA_PATHS, VIDEO_PATHS, VideoPlace, format_path, write_meta
from raypipe.testing.rows import EpisodeRange, episode_ranges, write_rows
from raypipe.testing.spec import SynthSpec
from raypipe.testing.stamp import GAP_EPISODE
from raypipe.testing.video import FrameRun, VideoFile, check_tools, write_video
from raypipe.text import count_bar

# Drawing and encoding keep one core busy per file; more threads would only take cores from other work.
_NUM_THREADS = 2


def write_dataset(root: str | os.PathLike[str], spec: SynthSpec, *, progress: bool = False) -> Path:
    """Write the dataset that `spec` describes to the folder `root`, and return it as a path.

    meta/ is written last, so a folder without it is unfinished. The same spec gives the same rows, metadata and stamps.

    Args:
        progress: show a bar, at a terminal or in a notebook.

    Raises:
        ConfigError: `root` is not empty, or FFmpeg here lacks what `spec` needs; then nothing was written.
    """
    folder = Path(root)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{str(folder)!r} is not an empty folder, and write_dataset changes no files. Choose another folder."
        )
    check_tools(spec)
    folder.mkdir(parents=True, exist_ok=True)
    for number, episodes in enumerate(episode_ranges(spec, spec.episodes_per_data_file)):
        path = format_path(DATA_PATHS[spec.version], number, spec.chunks_size)
        write_rows(spec, episodes, inside(folder, path))
    write_meta(folder, spec, _write_videos(folder, spec, progress=progress))
    return folder


def _write_videos(root: Path, spec: SynthSpec, *, progress: bool) -> dict[str, list[VideoPlace]]:
    groups = episode_ranges(spec, spec.episodes_per_video_file)
    cameras = [number for number, camera in enumerate(spec.cameras) if camera.is_video]
    files = [
        VideoFile(
            path=inside(root, _video_path(spec, camera, file_number)),
            camera_number=camera,
            runs=_runs(spec, episodes),
        )
        for camera in cameras
        for file_number, episodes in enumerate(groups)
    ]
    with ThreadPoolExecutor(_NUM_THREADS) as pool, count_bar("writing videos", len(files), is_on=progress) as advance:
        times = []
        for written in pool.map(lambda file: write_video(spec, file), files):
            times.append(written)
            advance(1)
    places: dict[str, list[VideoPlace]] = {spec.cameras[number].name: [] for number in cameras}
    for position, (file, run_times) in enumerate(zip(files, times, strict=True)):
        for run, (start, stop) in zip(file.runs, run_times, strict=True):
            place = VideoPlace(file_number=position % len(groups), from_timestamp=start, to_timestamp=stop)
            if run.episode != GAP_EPISODE:
                places[spec.cameras[file.camera_number].name].append(place)
    return places


def _video_path(spec: SynthSpec, camera_number: int, file_number: int) -> str:
    name = spec.cameras[camera_number].name
    return format_path(VIDEO_PATHS[spec.version], file_number, spec.chunks_size, name)


def _runs(spec: SynthSpec, episodes: EpisodeRange) -> tuple[FrameRun, ...]:
    runs: list[FrameRun] = []
    for episode in range(episodes.start, episodes.stop):
        if runs and spec.gap_frames:
            runs.append(FrameRun(episode=GAP_EPISODE, num_frames=spec.gap_frames))
        runs.append(FrameRun(episode=episode, num_frames=spec.lengths[episode]))
    return tuple(runs)
