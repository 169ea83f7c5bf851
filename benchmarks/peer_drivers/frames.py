"""Samples of a v3.0 dataset read by hand, for peers that know nothing of LeRobot: with pyarrow and torchcodec."""

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def read_tables(folder: Path) -> pa.Table:
    """Return all parquet files below a folder as one table."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.rglob("*.parquet"))])


class Frames:
    """Rows with their action chunk and the decoded frames of every camera; one per process."""

    def __init__(self, root: str, action_frames: int) -> None:
        self.root = Path(root)
        rows = read_tables(self.root / "data")
        self.episodes = read_tables(self.root / "meta" / "episodes").to_pylist()
        self.actions = np.stack(rows["action"].to_numpy(zero_copy_only=False)).astype(np.float32)
        self.states = np.stack(rows["observation.state"].to_numpy(zero_copy_only=False)).astype(np.float32)
        self.cameras = sorted(path.name for path in (self.root / "videos").iterdir())
        self._action_frames = action_frames

    def bounds(self, episode: int) -> tuple[int, int]:
        """Return the first frame of an episode and the one after its last, in the dataset."""
        row = self.episodes[episode]
        return row["dataset_from_index"], row["dataset_to_index"]

    def read(self, episode: int, start: int, stop: int) -> list[dict[str, Any]]:
        """Return consecutive samples of one episode, by their numbers in the dataset; one pass over each video."""
        first, end = self.bounds(episode)
        pixels = {camera: self._decode(camera, episode, start - first, stop - first) for camera in self.cameras}
        samples = []
        for number in range(start, stop):
            window = np.minimum(np.arange(number, number + self._action_frames), end - 1)
            cameras = {camera: pixels[camera][number - start] for camera in self.cameras}
            samples.append(
                {"index": number, "episode_index": episode, "action": self.actions[window]}
                | {"observation.state": self.states[number], **cameras}
            )
        return samples

    def _decode(self, camera: str, episode: int, start: int, stop: int) -> np.ndarray:
        row, key = self.episodes[episode], f"videos/{camera}"
        place = (row[f"{key}/chunk_index"], row[f"{key}/file_index"])
        decoder = open_video(str(self.root / key / f"chunk-{place[0]:03d}" / f"file-{place[1]:03d}.mp4"))
        first = round(row[f"{key}/from_timestamp"] * decoder.metadata.average_fps)
        return decoder.get_frames_in_range(first + start, first + stop).data.numpy()


_OPEN = threading.local()
"""Decoders by path: two threads must not share one, and `datasets` reads its shards in several."""


def open_video(path: str) -> Any:
    """Return a decoder of one thread, kept open."""
    from torchcodec.decoders import VideoDecoder

    videos = _OPEN.__dict__
    if path not in videos:
        videos[path] = VideoDecoder(path, seek_mode="approximate", num_ffmpeg_threads=1)
    return videos[path]


def to_jpeg(frame: np.ndarray) -> bytes:
    """Return a frame (C, H, W) as a JPEG file of quality 95."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(frame.transpose(1, 2, 0)).save(target, format="JPEG", quality=95)
    return target.getvalue()


def from_jpeg(content: bytes) -> np.ndarray:
    """Return the frame (C, H, W) of a JPEG file."""
    from PIL import Image

    return np.ascontiguousarray(np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1))
