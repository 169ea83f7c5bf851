"""A resharded copy of made datasets of all versions: every row value, every packet, every frame."""

import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from reshard_checks import assert_rows_kept, assert_times_exact, camera_packets, digests, info_of, packets

from raypipe.dataset import open_dataset
from raypipe.format import read_stats
from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.storage import open_storage
from raypipe.testing import CameraSpec, SynthSpec, has_encoder, read_stamp, write_dataset
from raypipe.validate import validate_dataset

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LONG = CameraSpec(name=TOP, gop=50, b_frames=2)
MIXED = (
    CameraSpec(name="cam with spaces é", gop=3),
    CameraSpec(name="observation.images.still", kind="image"),
)

SPECS = {
    "v2.0": SynthSpec(version="v2.0", two_tasks=True),
    "v2.1": SynthSpec(version="v2.1", extra_features=("next.done", "observation.grid", "note")),
    "v2.1 b-frames": SynthSpec(version="v2.1", cameras=(LONG,), lengths=(7, 1, 12, 5, 2)),
    "v2.1 no index": SynthSpec(version="v2.1", cameras=(), drop_columns=("index", "frame_index", "task_index")),
    "v3.0": SynthSpec(row_groups="per-file", extra_features=("note",)),
    "v3.0 b-frames": SynthSpec(cameras=(LONG,), row_groups=4),
    "v3.0 gaps": SynthSpec(gap_frames=2, episodes_per_video_file=2),
    "v3.0 images": SynthSpec(cameras=MIXED, episodes_per_meta_file=2, chunks_size=1),
    "v3.0 no stats": SynthSpec(with_stats=False, cameras=()),
}
if shutil.which("ffmpeg"):
    SPECS["v3.0 concat"] = SynthSpec(join="concat", cameras=(CameraSpec(name=TOP, gop=4, b_frames=1),))
    SPECS["v2.1 depth"] = SynthSpec(version="v2.1", cameras=(CameraSpec(name=TOP, kind="depth"),))
for codec in ("av1", "hevc", "vp9"):
    if has_encoder(codec):
        SPECS[f"v2.1 {codec}"] = SynthSpec(version="v2.1", cameras=(CameraSpec(name=TOP, codec=codec, gop=4),))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Made datasets by name, written when first asked for."""
    made = {}

    def source(name):
        if name not in made:
            made[name] = write_dataset(tmp_path_factory.mktemp("source") / "dataset", SPECS[name])
        return made[name]

    return source


def reshard(root, out, **choices):
    return reshard_dataset(str(root), out, ReshardSpec(**choices), where="process")


@pytest.mark.parametrize("name", SPECS)
def test_a_copy_keeps_every_row_value_and_every_packet(sources, tmp_path, name):
    root, out = sources(name), tmp_path / "copy"

    report = reshard(root, out)

    spec = SPECS[name]
    assert (report.num_episodes, report.num_frames) == (len(spec.lengths), sum(spec.lengths))
    assert_rows_kept(root, out, range(len(spec.lengths)))
    for camera in spec.cameras:
        if camera.is_video:
            before = camera_packets(root, camera.name)
            assert camera_packets(out, camera.name) == before
            assert len(before) >= sum(spec.lengths)
    assert_times_exact(out)
    assert report.num_video_files == sum(camera.is_video for camera in spec.cameras)
    assert info_of(out)["codebase_version"] == "v3.0"
    assert not list(tmp_path.glob("copy.partial-*"))


@pytest.mark.parametrize("name", [name for name in SPECS if "depth" not in name])
def test_every_sample_of_a_copy_equals_the_sources(sources, tmp_path, name):
    root, out = sources(name), tmp_path / "copy"

    reshard(root, out)

    source, copy = open_dataset(str(root)), open_dataset(str(out))
    assert copy.meta.order_fingerprint == source.meta.order_fingerprint
    for old, new in zip(source, copy, strict=True):
        assert_same_sample(old, new)


def assert_same_sample(old, new, renumbered=()):
    assert old.keys() == new.keys()
    for key, value in old.items():
        if key in renumbered:
            continue
        assert torch.equal(value, new[key]) if isinstance(value, torch.Tensor) else value == new[key], key


@pytest.mark.parametrize("name", ["v2.1", "v3.0", "v3.0 gaps", "v2.0"])
def test_a_copy_of_a_sound_dataset_is_sound(sources, tmp_path, name):
    reshard(sources(name), tmp_path / "copy")

    report = validate_dataset(str(tmp_path / "copy"), where="process", deep=True)

    assert [finding for finding in report.findings if finding.severity != "note"] == []


@pytest.mark.parametrize("name", ["v2.1", "v3.0", "v3.0 gaps"])
@pytest.mark.parametrize("excluded", [(0,), (1, 3), (4,), (0, 1, 2)])
def test_excluded_episodes_leave_and_the_others_are_numbered_anew(sources, tmp_path, name, excluded):
    root, out = sources(name), tmp_path / "copy"
    kept = [episode for episode in range(5) if episode not in excluded]

    report = reshard(root, out, exclude=excluded)

    assert_rows_kept(root, out, kept)
    assert_times_exact(out)
    assert_stamps(root, out, kept)
    assert report.num_excluded == len(excluded)
    mapping = pq.read_table(out / "meta/reshard_episodes.parquet").to_pydict()
    assert mapping["episode_index"] == list(range(len(kept)))
    assert mapping["source_episode_index"] == kept
    assert info_of(out)["splits"] == {"train": f"0:{len(kept)}"}


def assert_stamps(root, out, kept):
    """Every frame of a copy shows the episode and frame that it was in the source."""
    copy = open_dataset(str(out))
    for sample in copy:
        for number, camera in enumerate(copy.spec.cameras):
            stamp = read_stamp(sample[camera])
            expected = kept[int(sample["episode_index"])], int(sample["frame_index"]), number
            assert (stamp.episode, stamp.frame, stamp.camera) == expected


def test_frames_before_an_episode_that_starts_between_keyframes_stay_and_are_told(sources, tmp_path):
    # One file of several episodes and one keyframe: nothing can be cut.
    root, out = sources("v3.0 b-frames"), tmp_path / "copy"

    report = reshard(root, out, exclude=(0, 4))

    # The 7 of episode 0 before episode 1, and 2 of episode 4 that the last frames of episode 3 refer to.
    assert any(note.startswith("9 frames of excluded episodes stay") for note in report.notes)
    assert_stamps(root, out, [1, 2, 3])
    assert_times_exact(out)


def test_frames_behind_the_last_kept_episode_leave_without_a_keyframe(tmp_path):
    spec = SynthSpec(lengths=(3, 4), cameras=(CameraSpec(name=TOP, gop=50),), episodes_per_video_file=2)
    root = write_dataset(tmp_path / "source", spec)

    report = reshard(root, tmp_path / "copy", exclude=(1,))

    assert camera_packets(tmp_path / "copy", TOP) == camera_packets(root, TOP)[:3]
    assert not any("excluded" in note for note in report.notes)


def test_episodes_that_start_at_keyframes_are_cut_without_a_rest(tmp_path):
    spec = SynthSpec(lengths=(8, 4, 12, 4), cameras=(CameraSpec(name=TOP, gop=4),), episodes_per_video_file=4)
    root = write_dataset(tmp_path / "source", spec)

    report = reshard(root, tmp_path / "copy", exclude=(1,))

    before = camera_packets(root, TOP)
    assert camera_packets(tmp_path / "copy", TOP) == before[:8] + before[12:]
    assert not any("excluded" in note for note in report.notes)


def test_statistics_follow_the_kept_episodes(sources, tmp_path):
    root, out = sources("v3.0"), tmp_path / "copy"
    spec = SynthSpec(row_groups="per-file", extra_features=("note",), lengths=(7, 1, 12))
    expected = read_stats(open_storage(write_dataset(tmp_path / "first", spec)))

    reshard(root, out, exclude=(3, 4))

    found = read_stats(open_storage(out))
    assert found.keys() == expected.keys()
    for feature, stats in expected.items():
        for name, value in stats.items():
            np.testing.assert_allclose(found[feature][name], value, rtol=1e-6, atol=1e-9, err_msg=f"{feature} {name}")


@pytest.mark.parametrize("name", ["v2.1", "v3.0"])
def test_statistics_are_carried_over_where_nothing_leaves(sources, tmp_path, name):
    root, out = sources(name), tmp_path / "copy"

    reshard(root, out)

    before, after = read_stats(open_storage(root)), read_stats(open_storage(out))
    assert before.keys() == after.keys()
    for feature, stats in before.items():
        for statistic, value in stats.items():
            np.testing.assert_allclose(after[feature][statistic], value, rtol=1e-9, atol=1e-12)
    columns = pq.read_schema(next(out.glob("meta/episodes/*/*.parquet"))).names
    assert {f"stats/{feature}/mean" for feature in before} <= set(columns)


def test_row_statistics_are_computed_where_the_source_has_none(sources, tmp_path):
    reshard(sources("v3.0 no stats"), tmp_path / "copy")

    stats = read_stats(open_storage(tmp_path / "copy"))

    values = np.stack([sample["action"].numpy() for sample in open_dataset(str(sources("v3.0 no stats")))])
    np.testing.assert_allclose(stats["action"]["mean"], values.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats["action"]["std"], values.std(axis=0), rtol=1e-5, atol=1e-6)
    assert stats["action"]["count"] == [34]


def test_a_dropped_camera_leaves_files_features_and_statistics(sources, tmp_path):
    reshard(sources("v2.1"), tmp_path / "copy", drop_cameras=(WRIST,))

    copy = open_dataset(str(tmp_path / "copy"))
    assert copy.spec.cameras == (TOP,)
    assert not [name for name in digests(tmp_path / "copy") if WRIST in name]
    assert WRIST not in copy.stats
    columns = pq.read_schema(next((tmp_path / "copy").glob("meta/episodes/*/*.parquet"))).names
    assert not [name for name in columns if WRIST in name]


def test_a_dropped_image_camera_leaves_its_column(sources, tmp_path):
    camera = "observation.images.still"

    reshard(sources("v3.0 images"), tmp_path / "copy", drop_cameras=(camera,))

    assert_rows_kept(sources("v3.0 images"), tmp_path / "copy", range(5), dropped_columns=(camera,))


def test_tasks_stand_once_and_rows_follow(sources, tmp_path):
    root = tmp_path / "source"
    shutil.copytree(sources("v2.0"), root)
    lines = ['{"task_index": 0, "task": "same"}', '{"task_index": 1, "task": "same"}', '{"task_index": 5, "task": "x"}']
    (root / "meta/tasks.jsonl").write_text("\n".join(lines) + "\n")

    reshard(root, tmp_path / "copy")

    copy = open_dataset(str(tmp_path / "copy"))
    assert copy.meta.tasks.texts == {0: "same", 1: "x"}
    assert {sample["task"] for sample in copy} == {"same"}
    assert info_of(tmp_path / "copy")["total_tasks"] == 2


def test_files_are_closed_at_their_limits(tmp_path):
    spec = SynthSpec(
        version="v2.1",
        lengths=(40,) * 8,
        cameras=(CameraSpec(name=TOP, height=192, width=192, gop=1, crf=1),),
        pixels="textured",
        state_dim=2000,
    )
    root = write_dataset(tmp_path / "source", spec)

    reshard(root, tmp_path / "copy", data_mb=1, video_mb=1)

    for pattern in ("data/*/*.parquet", "videos/*/*/*.mp4"):
        sizes = [path.stat().st_size for path in sorted((tmp_path / "copy").glob(pattern))]
        largest = max(path.stat().st_size for path in root.rglob(f"*{pattern[-4:]}"))
        assert len(sizes) > 1
        assert max(sizes) < max(1.05 * 2**20, largest)
    assert_rows_kept(root, tmp_path / "copy", range(8))
    info = info_of(tmp_path / "copy")
    assert (info["data_files_size_in_mb"], info["video_files_size_in_mb"]) == (1, 1)


def test_the_same_arguments_give_the_same_bytes(sources, tmp_path):
    for name in ("one", "two"):
        reshard(sources("v3.0"), tmp_path / name, exclude=(2,))

    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_a_copy_of_a_copy_keeps_everything(sources, tmp_path):
    reshard(sources("v2.1 b-frames"), tmp_path / "one")

    reshard(tmp_path / "one", tmp_path / "two")

    assert_rows_kept(tmp_path / "one", tmp_path / "two", range(5))
    assert camera_packets(tmp_path / "two", TOP) == camera_packets(tmp_path / "one", TOP)


def test_videos_of_other_settings_get_files_of_their_own(tmp_path):
    spec = SynthSpec(version="v2.1", cameras=(CameraSpec(name=TOP),), lengths=(5, 6, 7))
    other = SynthSpec(version="v2.1", cameras=(CameraSpec(name=TOP, gop=3, b_frames=2),), lengths=(5, 6, 7))
    root = write_dataset(tmp_path / "source", spec)
    strange = write_dataset(tmp_path / "other", other)
    name = f"videos/chunk-000/{TOP}/episode_000001.mp4"
    shutil.copy(strange / name, root / name)

    report = reshard(root, tmp_path / "copy")

    assert report.num_video_files == 3
    assert [len(packets(path)) for path in sorted((tmp_path / "copy").rglob("*.mp4"))] == [5, 6, 7]
    assert_stamps(root, tmp_path / "copy", [0, 1, 2])


def test_other_files_of_meta_are_copied_and_strangers_are_told(sources, tmp_path):
    root = tmp_path / "source"
    shutil.copytree(sources("v2.1"), root)
    (root / "meta/modality.json").write_text("{}")
    (root / "README.md").write_text("about")
    (root / "data/chunk-000/stray.txt").write_text("?")

    report = reshard(root, tmp_path / "copy")

    assert (tmp_path / "copy/meta/modality.json").read_text() == "{}"
    assert (tmp_path / "copy/README.md").read_text() == "about"
    assert any("data/chunk-000/stray.txt" in note for note in report.notes)
