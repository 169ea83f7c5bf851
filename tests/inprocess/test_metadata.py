import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ConfigError, DatasetError
from raypipe.format import read_metadata, read_stats
from raypipe.format.features import read_features
from raypipe.format.stats import _pool
from raypipe.format.tables import BoundedParquet
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

VERSIONS = ["v2.0", "v2.1", "v3.0"]
NO_CAMERAS = SynthSpec(cameras=(), lengths=(4, 1, 6, 3))


@pytest.fixture
def dataset(tmp_path, request):
    version = getattr(request, "param", "v3.0")
    return write_dataset(tmp_path / "dataset", SynthSpec(version=version, cameras=(), lengths=(4, 1, 6, 3)))


def change_info(root, **changes):
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info.update(changes)
    path.write_text(json.dumps({key: value for key, value in info.items() if value != "remove"}))


@pytest.mark.parametrize("version", VERSIONS)
def test_metadata_is_the_same_whatever_the_version(tmp_path, version):
    spec = SynthSpec(version=version, lengths=(4, 1, 6, 3))

    meta = read_metadata(str(write_dataset(tmp_path / "d", spec)))

    assert meta.version == version
    assert meta.episodes.length.tolist() == [4, 1, 6, 3]
    assert meta.episodes.episode_index.tolist() == [0, 1, 2, 3]
    assert meta.episodes.from_index.tolist() == [0, 4, 5, 11]
    assert meta.episodes.tasks.to_pylist() == [["pick up the cube"], ["open the drawer"]] * 2
    assert dict(meta.tasks.texts) == {0: "pick up the cube", 1: "open the drawer"}
    assert meta.cameras == ("observation.images.top", "observation.images.wrist")
    assert (meta.fps, meta.robot_type, meta.num_frames) == (10.0, "raypipe_synth", 14)
    assert meta.splits == {"train": (0, 4)}
    assert meta.notes == ()


def test_order_fingerprint_is_the_same_for_every_version_layout_and_camera(tmp_path):
    specs = [
        *(SynthSpec(version=version, lengths=(4, 1, 6)) for version in VERSIONS),
        SynthSpec(lengths=(4, 1, 6), episodes_per_data_file=1, row_groups="per-file", drop_columns=("index",)),
        SynthSpec(lengths=(4, 1, 6), cameras=(CameraSpec(name="other", height=32, width=48),)),
    ]

    found = {read_metadata(str(write_dataset(tmp_path / str(i), s))).order_fingerprint for i, s in enumerate(specs)}

    assert len(found) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": (4, 1, 7)},
        {"lengths": (1, 4, 6)},
        {"fps": 20},
        {"state_dim": 7},
        {"lengths": (4, 1, 6, 1)},
    ],
)
def test_order_fingerprint_changes_with_what_decides_an_order(tmp_path, change):
    base = {"cameras": (), "lengths": (4, 1, 6)}

    one = read_metadata(str(write_dataset(tmp_path / "a", SynthSpec(**base))))
    other = read_metadata(str(write_dataset(tmp_path / "b", SynthSpec(**{**base, **change}))))

    assert one.order_fingerprint != other.order_fingerprint


def test_source_tells_copies_apart(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "copy")

    one, other = read_metadata(str(dataset)), read_metadata(str(tmp_path / "copy"))

    assert one.order_fingerprint == other.order_fingerprint
    assert one.source.root != other.source.root
    assert one.source.layout == "v3.0 packed"


def test_only_the_columns_needed_are_read(dataset, monkeypatch):
    read = []
    original = BoundedParquet.read
    monkeypatch.setattr(
        BoundedParquet,
        "read",
        lambda self, columns=None, **kw: read.append(columns) or original(self, columns=columns, **kw),
    )

    read_metadata(str(dataset))

    columns = [column for names in read if names for column in names]
    assert "length" in columns
    assert not [column for column in columns if column.startswith("stats/")]


def test_several_episode_files_in_any_column_order_make_one_table(tmp_path):
    spec = SynthSpec(lengths=(4, 1, 6, 3, 2), cameras=(), episodes_per_meta_file=2)
    root = write_dataset(tmp_path / "d", spec)
    first = sorted((root / "meta/episodes").rglob("*.parquet"))[0]
    table = pq.read_table(first)
    pq.write_table(table.select(table.column_names[::-1]), first)

    meta = read_metadata(str(root))

    assert meta.episodes.length.tolist() == [4, 1, 6, 3, 2]


@pytest.mark.parametrize("names", [["height", "width", "channels"], ["height", "width", "channel"]])
def test_camera_size_is_true_for_rows_first_shapes(names):
    spec = {"cam": {"dtype": "video", "shape": [240, 424, 3], "names": names}}

    assert read_features({"features": spec}, "x")["cam"].shape == (3, 240, 424)


@pytest.mark.parametrize("names", [["channels", "height", "width"], ["c", "h", "w"], None])
def test_camera_size_is_true_for_channels_first_shapes(names):
    spec = {"cam": {"dtype": "video", "shape": [3, 96, 64], "names": names}}

    assert read_features({"features": spec}, "x")["cam"].shape == (3, 96, 64)


def test_camera_size_of_the_video_record_wins():
    info = {"video.height": 480, "video.width": 640, "video.codec": "av1"}
    spec = {"cam": {"dtype": "video", "shape": [1, 2, 3], "names": None, "info": info}}

    feature = read_features({"features": spec}, "x")["cam"]

    assert (feature.height, feature.width, feature.codec) == (480, 640, "av1")


@pytest.mark.parametrize(
    ("names", "flat"),
    [
        (["a", "b"], ("a", "b")),
        ({"motors": ["a", "b"]}, ("a", "b")),
        ({"x": 0, "y": 1}, ("x", "y")),
        (None, ()),
    ],
)
def test_feature_names_come_flat_whatever_their_form(names, flat):
    spec = {"action": {"dtype": "float32", "shape": [2], "names": names}}

    assert read_features({"features": spec}, "x")["action"].names == flat


def test_v3_tasks_are_looked_up_by_row_as_lerobot_does(dataset):
    pq.write_table(
        pa.table({"task_index": [1, 0], "task": ["first row", "second row"]}), dataset / "meta/tasks.parquet"
    )

    assert dict(read_metadata(str(dataset)).tasks.texts) == {0: "first row", 1: "second row"}


@pytest.mark.parametrize("dataset", ["v2.1"], indirect=True)
def test_v2_tasks_are_looked_up_by_number(dataset):
    lines = [{"task_index": 1, "task": "one"}, {"task_index": 0, "task": "zero"}]
    (dataset / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))

    assert dict(read_metadata(str(dataset)).tasks.texts) == {0: "zero", 1: "one"}


@pytest.mark.parametrize("dataset", ["v2.1"], indirect=True)
def test_v2_episodes_may_hold_task_numbers_and_come_in_any_order(dataset):
    lines = [{"episode_index": e, "tasks": [e % 2], "length": n} for e, n in ((1, 1), (0, 4), (2, 6), (3, 3))]
    (dataset / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))

    episodes = read_metadata(str(dataset)).episodes

    assert episodes.length.tolist() == [4, 1, 6, 3]
    assert episodes.tasks.to_pylist() == [["0"], ["1"], ["0"], ["1"]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 1000))
@settings(max_examples=50)
def test_pooled_statistics_equal_those_of_all_rows(lengths, seed):
    generator = np.random.default_rng(seed)
    episodes = [generator.normal(1e4, 3.0, (length, 2)) for length in lengths]
    stats = [
        {
            "action": {
                "min": e.min(0),
                "max": e.max(0),
                "mean": e.mean(0),
                "std": e.std(0),
                "count": np.array([len(e)]),
            }
        }
        for e in episodes
    ]

    pooled = _pool(iter(stats))["action"]

    rows = np.concatenate(episodes)
    for name, value in (
        ("min", rows.min(0)),
        ("max", rows.max(0)),
        ("mean", rows.mean(0)),
        ("std", rows.std(0)),
    ):
        np.testing.assert_allclose(pooled[name], value, rtol=1e-9, atol=1e-6)
    assert pooled["count"].tolist() == [sum(lengths)]


@pytest.mark.parametrize("dataset", VERSIONS, indirect=True)
def test_statistics_of_every_version_are_those_of_the_rows(dataset):
    rows = pa.concat_tables(pq.read_table(path).select(["action"]) for path in sorted(dataset.glob("data/*/*.parquet")))
    actions = np.array(rows.column("action").to_pylist())

    stats = read_stats(read_metadata(str(dataset)).storage)

    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["action"]["std"], actions.std(0), rtol=1e-5)
    np.testing.assert_allclose(stats["action"]["max"], actions.max(0), rtol=1e-6)


@pytest.mark.parametrize("dataset", ["v2.1"], indirect=True)
def test_an_episode_table_cut_at_the_end_of_a_line_is_an_error(dataset):
    path = dataset / "meta/episodes.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))

    with pytest.raises(DatasetError, match="counts 4 episodes and the episode table lists 2"):
        read_metadata(str(dataset))


def test_a_dataset_without_statistics_has_none(tmp_path):
    root = write_dataset(tmp_path / "d", SynthSpec(cameras=(), with_stats=False))

    assert read_stats(read_metadata(str(root)).storage) == {}


def test_episode_files_may_differ_in_number_types(tmp_path):
    root = write_dataset(tmp_path / "d", SynthSpec(lengths=(4, 1, 6), episodes_per_meta_file=2))
    last = sorted((root / "meta/episodes").rglob("*.parquet"))[-1]
    table = pq.read_table(last)
    name = "videos/observation.images.top/chunk_index"
    pq.write_table(table.set_column(table.column_names.index(name), name, table.column(name).cast(pa.float64())), last)

    meta = read_metadata(str(root))

    assert meta.episodes.videos["observation.images.top"].chunk_index.tolist() == [0, 0, 0]


def test_a_task_that_looks_like_a_date_stays_text(tmp_path):
    root = write_dataset(tmp_path / "d", SynthSpec(version="v2.1", cameras=(), tasks=("2024-01-01", "b")))

    meta = read_metadata(str(root))

    assert meta.tasks.text(0) == "2024-01-01"
    assert meta.episodes.tasks[0].as_py() == ["2024-01-01"]


def test_an_empty_dataset_opens(dataset):
    shutil.rmtree(dataset / "meta/episodes")
    change_info(dataset, total_episodes=0, total_frames=0)

    meta = read_metadata(str(dataset))

    assert (len(meta.episodes), meta.num_frames) == (0, 0)


def test_counts_that_disagree_are_noted(dataset):
    change_info(dataset, total_frames=99, splits={"train": "0:9", "odd": "first half"})

    notes = " ".join(read_metadata(str(dataset)).notes)

    assert "total_frames in info.json is 99; the episode table holds 14" in notes
    assert "ends at episode 9" in notes
    assert "'first half'" in notes


BROKEN_INFO = {
    "text total_tasks": ({"total_tasks": "x"}, "total_tasks is 'x'"),
    "odd camera record": (
        {"features": {"c": {"dtype": "video", "shape": [4, 4, 3], "info": [1]}}},
        "'info' of camera 'c'",
    ),
    "text height": (
        {"features": {"c": {"dtype": "video", "shape": [4, 4, 3], "info": {"video.height": "abc"}}}},
        "'video.height' of camera 'c' .* 'abc'",
    ),
    "unknown version": ({"codebase_version": "v1.6"}, r"unknown format version 'v1\.6'.*v2\.0, v2\.1, v3\.0"),
    "no version": ({"codebase_version": "remove"}, "unknown format version 'missing'"),
    "no features": ({"features": {}}, "declares no features"),
    "no fps": ({"fps": 0}, "fps is 0"),
    "text fps": ({"fps": "ten"}, "fps is 'ten'"),
    "odd template": ({"data_path": "data/{nonsense}.parquet"}, r"data_path .*nonsense.*may use chunk_index"),
    "odd shape": ({"features": {"x": {"dtype": "float32", "shape": ["a"]}}}, "shape"),
}


@pytest.mark.parametrize("case", BROKEN_INFO)
def test_broken_info_is_an_error_that_shows_the_value(dataset, case):
    changes, message = BROKEN_INFO[case]
    change_info(dataset, **changes)

    with pytest.raises(DatasetError, match=message):
        read_metadata(str(dataset))


def test_a_missing_root_and_a_folder_without_dataset_are_told_apart(tmp_path):
    with pytest.raises(DatasetError, match="no such folder"):
        read_metadata(str(tmp_path / "nothing"))
    with pytest.raises(DatasetError, match=r"no LeRobot dataset.*no meta/info\.json"):
        read_metadata(str(tmp_path))


DAMAGES = {
    ("v3.0", "meta/info.json"): r"info\.json.*not JSON",
    ("v3.0", "meta/tasks.parquet"): r"tasks\.parquet.*parquet footer",
    ("v3.0", "meta/episodes/chunk-000/file-000.parquet"): r"file-000\.parquet.*parquet footer",
    ("v2.1", "meta/episodes.jsonl"): r"episodes\.jsonl.*not JSON lines",
    ("v2.1", "meta/tasks.jsonl"): r"tasks\.jsonl.*not JSON lines",
}


@pytest.mark.parametrize("keep", [0, 0.45])
@pytest.mark.parametrize(("dataset", "name"), DAMAGES, indirect=["dataset"])
def test_a_truncated_metadata_file_is_named(dataset, name, keep, request):
    content = (dataset / name).read_bytes()
    (dataset / name).write_bytes(content[: int(len(content) * keep)])

    with pytest.raises(DatasetError, match=DAMAGES[request.node.callspec.params["dataset"], name]):
        read_metadata(str(dataset))


@pytest.mark.parametrize("dataset", ["v2.0", "v3.0"], indirect=True)
@pytest.mark.parametrize("what", ["episodes", "tasks"])
def test_a_missing_metadata_file_is_named(dataset, what):
    for path in (dataset / "meta").glob(f"{what}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    with pytest.raises(DatasetError, match=f"no {what.removesuffix('s')}.*{what}"):
        read_metadata(str(dataset))


@pytest.mark.parametrize("dataset", ["v2.1"], indirect=True)
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([(0, 4), (0, 3)], "lists episode 0 more than once"),
        ([(0, 4), (1, 0)], "episode 1 .* has length 0"),
    ],
)
def test_an_impossible_episode_table_is_an_error(dataset, lines, message):
    change_info(dataset, total_episodes=2)
    rows = [{"episode_index": e, "tasks": ["a"], "length": n} for e, n in lines]
    (dataset / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))

    with pytest.raises(DatasetError, match=message):
        read_metadata(str(dataset))


def test_an_episode_that_is_not_there_is_an_error_with_the_range(dataset):
    with pytest.raises(ConfigError, match="no episode 4; the dataset has 4 episodes, numbered 0 to 3"):
        read_metadata(str(dataset)).episodes.find_row(4)


@pytest.mark.parametrize("first", [b"null", b"7", b"[1]", b"{} null", b"[" * 100_000])
def test_a_first_line_that_is_no_object_is_an_error_of_the_file(first, tmp_path):
    root = write_dataset(tmp_path / "dataset", SynthSpec(version="v2.1", cameras=()))
    path = root / "meta/episodes.jsonl"
    path.write_bytes(first + b"\n" + path.read_bytes())

    with pytest.raises(DatasetError, match=r"episodes\.jsonl.*not JSON lines"):
        read_metadata(str(root))
