"""Whatever the data of one span makes a library raise is that span's error: "skip" leaves it out and goes on."""

import shutil
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import TOP, frames_of_all, local_loader
from PIL import Image

from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate import validate_dataset

LENGTHS = (12,) * 4
BAD = 2
SKIP = {"on_bad_episode": "skip", "max_bad_episodes": 1}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spans")
    return {
        kind: write_dataset(
            folder / kind,
            SynthSpec(version="v2.1", lengths=LENGTHS, cameras=(CameraSpec(name=TOP, height=32, width=48, kind=kind),)),
        )
        for kind in ("video", "image")
    }


def cut_and_garble(root):
    """Let the edit list cut frames off, so that the frames are counted by decoding, and overwrite half of them."""
    path = root / f"videos/chunk-000/{TOP}/episode_{BAD:06d}.mp4"
    content = bytearray(path.read_bytes())
    edit = content.index(b"elst") + 12
    content[edit : edit + 4] = struct.pack(">I", 300)
    begin = content.index(b"mdat") + 4
    size = int.from_bytes(content[begin - 8 : begin - 4], "big") - 8
    content[begin : begin + size] = b"\xff" * size
    path.write_bytes(content)


def drop_the_images(root):
    path = root / f"data/chunk-000/episode_{BAD:06d}.parquet"
    pq.write_table(pq.read_table(path).drop_columns([TOP]), path)


def put_numbers_for_images(root):
    path = root / f"data/chunk-000/episode_{BAD:06d}.parquet"
    table = pq.read_table(path)
    place = table.column_names.index(TOP)
    pq.write_table(table.set_column(place, TOP, pa.array(range(len(table)))), path)


def put_texts_for_numbers(root):
    path = root / f"data/chunk-000/episode_{BAD:06d}.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("frame_index")
    texts = pa.array([f"frame {i}" for i in range(len(table))])
    pq.write_table(table.set_column(place, "frame_index", texts), path)


FAULTS = {
    "video": (cut_and_garble,),
    "image": (drop_the_images, put_numbers_for_images, put_texts_for_numbers),
}


def make_pipe(root, **bad_data):
    return Pipeline(open_dataset(str(root)), batch_size=5, seed=0, order={"live_spans": 3}, **bad_data)


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in FAULTS.items() for fault in faults])
@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_fault_of_one_span_is_named_and_left_out(sound, tmp_path, kind, fault):
    root = shutil.copytree(sound[kind], tmp_path / kind)
    fault(root)

    with pytest.raises(DatasetError, match=rf"episode(_00000| ){BAD}"):
        list(local_loader(make_pipe(root)))
    left = frames_of_all(local_loader(make_pipe(root, **SKIP)))

    assert sorted(left) == [(episode, frame) for episode in (0, 1, 3) for frame in range(12)]


def test_validate_finds_a_video_that_cannot_be_counted(sound, tmp_path):
    root = shutil.copytree(sound["video"], tmp_path / "video")
    cut_and_garble(root)

    report = validate_dataset(str(root), deep=True, where="process")

    assert BAD in {episode for finding in report.findings for episode in finding.place.episodes}


def test_a_machine_without_memory_is_no_bad_episode(sound, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)

    with pytest.raises(MemoryError):
        list(local_loader(make_pipe(sound["image"], **SKIP)))


@pytest.mark.filterwarnings("ignore:.*left out")
def test_images_that_no_file_has_are_missed_by_name(sound, tmp_path):
    root = shutil.copytree(sound["image"], tmp_path / "image")
    for path in root.glob("data/**/*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns([TOP]), path)

    for read in (lambda: list(local_loader(make_pipe(root, **SKIP))), lambda: open_dataset(str(root))[0]):
        with pytest.raises(DatasetError, match=rf"no column for \['{TOP}'\].*cameras="):
            read()
