"""Bad files: an error on the rank that names dataset, episode, camera and file; nothing hangs, nothing is left out."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import MODES, TOP, local_loader

from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError, DecodeError
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

BAD = 3
"""The episode that something is wrong with; its length is 7."""

LENGTHS = (6, 4, 9, 7, 5)


def video_of(root, episode) -> Path:
    return root / f"videos/chunk-000/{TOP}/episode_{episode:06d}.mp4"


def truncate(root):
    path = video_of(root, BAD)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(root):
    video_of(root, BAD).unlink()


def shorten(root):
    shutil.copy(video_of(root, 1), video_of(root, BAD))


def garble(root):
    """Overwrite the frames and leave the index whole."""
    path = video_of(root, BAD)
    content = bytearray(path.read_bytes())
    begin = content.index(b"mdat") + 4
    size = int.from_bytes(content[begin - 8 : begin - 4], "big") - 8
    content[begin : begin + size] = b"\xff" * size
    path.write_bytes(content)


def cut_and_garble(root):
    """Overwrite the frames of a video whose edit list cuts some off: they are counted by decoding."""
    garble(root)
    path = video_of(root, BAD)
    content = bytearray(path.read_bytes())
    edit = content.index(b"elst") + 12
    content[edit : edit + 4] = (300).to_bytes(4, "big")
    path.write_bytes(content)


def garble_an_image(root):
    path = root / f"data/chunk-000/episode_{BAD:06d}.parquet"
    table = pq.read_table(path)
    images = table.column(TOP).to_pylist()
    images[5]["bytes"] = images[5]["bytes"][:40]
    place = table.column_names.index(TOP)
    pq.write_table(table.set_column(place, TOP, pa.array(images, table.schema.field(TOP).type)), path)


def drop_a_row(root):
    path = root / f"data/chunk-000/episode_{BAD:06d}.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, len(table) - 1), path)


def remove_rows(root):
    (root / f"data/chunk-000/episode_{BAD:06d}.parquet").unlink()


def point_beyond(root):
    """Let the episode table say that the episode starts 100 s into its video file.

    The file has frames between its episodes, so that their lengths do not tell where it really starts.
    """
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    name = f"videos/{TOP}/from_timestamp"
    starts = table.column(name).to_pylist()
    starts[BAD] += 100.0
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(starts)), path)


@dataclass(frozen=True, kw_only=True)
class Fault:
    damage: Callable[[Path], None]
    error: type[Exception]
    names: tuple[str, ...]
    """What the message names, beside the root."""
    version: str = "v2.1"
    gap_frames: int = 0
    kind: str = "video"


VIDEO = f"episode_{BAD:06d}.mp4"
ROWS = f"episode_{BAD:06d}.parquet"
EPISODE = f"episode {BAD} of"

FAULTS = {
    "truncated video": Fault(damage=truncate, error=DatasetError, names=(EPISODE, TOP, VIDEO)),
    "missing video": Fault(damage=remove, error=DatasetError, names=(EPISODE, TOP, VIDEO)),
    "video shorter than its episode": Fault(
        damage=shorten, error=DecodeError, names=(EPISODE, TOP, VIDEO, "4 frames", "needs frames 0 to 6")
    ),
    "garbled video": Fault(damage=garble, error=DecodeError, names=(EPISODE, TOP, VIDEO)),
    "garbled video that has to be counted": Fault(
        damage=cut_and_garble, error=DecodeError, names=(EPISODE, TOP, VIDEO)
    ),
    "frames beyond the video": Fault(
        damage=point_beyond, error=DecodeError, names=(EPISODE, TOP, "file-001.mp4"), version="v3.0", gap_frames=2
    ),
    "garbled image": Fault(damage=garble_an_image, error=DecodeError, names=(EPISODE, TOP, "frame 5"), kind="image"),
    "rows that differ from the episode table": Fault(
        damage=drop_a_row, error=DatasetError, names=(EPISODE, ROWS, "6 rows", "promises 7")
    ),
    "missing rows": Fault(damage=remove_rows, error=DatasetError, names=(EPISODE, ROWS)),
}


def damaged_pipeline(tmp_path, fault, mode, **parts):
    spec = SynthSpec(
        version=fault.version,
        lengths=LENGTHS,
        cameras=(CameraSpec(name=TOP, height=32, width=32, kind=fault.kind),),
        gap_frames=fault.gap_frames,
    )
    root = write_dataset(tmp_path / "dataset", spec)
    fault.damage(root)
    dataset = open_dataset(str(root))
    return Pipeline(dataset, batch_size=4, seed=0, order={"live_spans": 2}, decode=MODES[mode], **parts)


def assert_told(caught, fault, tmp_path):
    told = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for name in (str(tmp_path / "dataset"), *fault.names):
        assert name in told
    assert isinstance(caught.value, fault.error)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_bad_file_is_an_error_on_the_rank_that_names_it(tmp_path, fault):
    loader = local_loader(damaged_pipeline(tmp_path, fault, "rank"))

    with pytest.raises(DatasetError) as caught:
        list(loader)

    assert_told(caught, fault, tmp_path)


ON_RAY = [
    ("truncated video", "cluster"),
    ("missing video", "rank"),
    ("video shorter than its episode", "rank"),
    ("frames beyond the video", "cluster"),
    ("garbled video that has to be counted", "cluster"),
    ("rows that differ from the episode table", "rank"),
]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("name", "mode"), ON_RAY)
def test_bad_file_that_a_task_or_a_rank_meets_is_an_error_on_the_rank(tmp_path, name, mode):
    loader = damaged_pipeline(tmp_path, FAULTS[name], mode, feed={"spans_per_block": 2}).loader()

    with pytest.raises(DatasetError) as caught:
        list(loader)

    assert_told(caught, FAULTS[name], tmp_path)
