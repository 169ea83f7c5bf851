"""Many datasets opened at once, some of them broken: all are told of, and none moves another."""

import pickle
import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from contents_equal import assert_same_meta, assert_same_sample
from damages import SOUND, TOP, WRIST, base_spec, doubled_episode_in_table, edit_info, truncate
from fsspec.implementations.local import LocalFileSystem

from raypipe.dataset import open_dataset, schema_of
from raypipe.errors import ConfigError, DatasetError, DownloadError
from raypipe.format import read_metadata
from raypipe.mixture.members import Opened, features_of, open_members
from raypipe.mixture.spec import MemberSpec, MixtureSpec
from raypipe.mixture.unify import add_windows, unify
from raypipe.storage.remote import Remote
from raypipe.testing import SynthSpec, write_dataset

REAL_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
VERSIONS = ("v3.0", "v2.1", "v2.0")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Datasets of each version with two cameras."""
    folder = tmp_path_factory.mktemp("bases")
    return {version: write_dataset(folder / version, base_spec(version)) for version in VERSIONS}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Datasets of each version without cameras."""
    folder = tmp_path_factory.mktemp("rows")
    return {
        version: write_dataset(folder / version, SynthSpec(version=version, cameras=(), lengths=(3, 1, 4)))
        for version in VERSIONS
    }


def cut_info(root):
    truncate(root / "meta/info.json", 0.5)


def old_version(root):
    edit_info(root, lambda info: info.update(codebase_version="v1.6"))


def no_fps(root):
    edit_info(root, lambda info: info.update(fps=0))


def empty_episode_table(root):
    for path in (root / "meta/episodes").rglob("*.parquet"):
        path.write_bytes(b"")


def no_tasks(root):
    (root / "meta/tasks.jsonl").unlink()


def no_rows(root):
    shutil.rmtree(root / "data")


def no_info(root):
    (root / "meta/info.json").unlink()


def no_videos_of_the_wrist(root):
    shutil.rmtree(root / f"videos/{WRIST}")


# version, what is done to it, what the error says of it
BROKEN = {
    "gone": ("v3.0", shutil.rmtree, "no such folder"),
    "no-info": ("v3.0", no_info, "it has no meta/info.json"),
    "cut-info": ("v2.1", cut_info, "not JSON"),
    "old-version": ("v2.0", old_version, "unknown format version 'v1.6'"),
    "no-fps": ("v3.0", no_fps, "fps is 0"),
    "empty-table": ("v3.0", empty_episode_table, "no readable parquet footer"),
    "doubled": ("v2.1", doubled_episode_in_table, "lists episode 1 more than once"),
    "no-tasks": ("v2.1", no_tasks, "no tasks at"),
    "no-rows": ("v2.1", no_rows, "missing file"),
    "no-wrist": ("v3.0", no_videos_of_the_wrist, f"camera '{WRIST}'"),
}


@pytest.fixture
def broken(bases, tmp_path):
    """Twenty members; every second one is broken, each in a way of its own."""
    members = []
    for number, (name, (version, damage, _)) in enumerate(BROKEN.items()):
        good = shutil.copytree(bases[VERSIONS[number % 3]], tmp_path / f"good-{number}")
        bad = shutil.copytree(bases[version], tmp_path / name)
        damage(bad)
        cameras = {"top": TOP, "wrist": WRIST} if name == "no-wrist" else "all"
        members.append(MemberSpec(root=str(bad), name=name, cameras=cameras))
        members.append(MemberSpec(root=str(good), name=good.name))
    return members


def as_members(*roots, **options):
    return [MemberSpec(root=str(root), name=f"member-{i}", **options) for i, root in enumerate(roots)]


def open_quietly(members, **options) -> Opened:
    """Open the members, with any warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return open_members(members, **options)


def test_every_broken_dataset_is_named_in_one_error_with_its_reason(broken):

    for _ in range(2):
        with pytest.raises(DatasetError) as raised:
            open_members(broken)

    text = str(raised.value)
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("  - ")}
    assert list(lines) == list(BROKEN)
    for member in broken[::2]:
        assert member.root in lines[member.name]
        assert BROKEN[member.name][2] in lines[member.name]
    assert "10 of 20 datasets" in text
    assert "10 can" in text
    assert "on_bad_dataset: skip" in text
    assert "weight 0" in text


def test_broken_datasets_that_are_skipped_are_named_in_one_warning_and_the_rest_is_there(broken):
    with pytest.warns(UserWarning, match="10 of 20 datasets") as warned:
        opened = open_members(broken, on_bad_dataset="skip")

    assert len(warned) == 1
    assert all(name in str(warned[0].message) for name in BROKEN)
    assert [bad.name for bad in opened.bad] == list(BROKEN)
    assert [bad.root for bad in opened.bad] == [member.root for member in broken[::2]]
    assert [dataset.meta.root for dataset in opened.datasets] == [member.root for member in broken[1::2]]
    assert opened.positions == tuple(range(1, 20, 2))


def test_datasets_of_which_none_can_be_used_are_an_error_under_skip_too(broken):
    with pytest.raises(DatasetError, match="10 of 10 datasets"):
        open_members(broken[::2], on_bad_dataset="skip")


def test_no_members_are_an_error():
    with pytest.raises(ConfigError, match="no members"):
        open_members([])


def test_the_order_is_that_of_the_members_whichever_is_read_first(rows, monkeypatch):
    members = as_members(*list(rows.values()) * 4)
    waits = iter([0.2, 0.0, 0.1] * 4)

    def read_late(storage):
        time.sleep(next(waits))
        return read_metadata(storage)

    monkeypatch.setattr("raypipe.mixture.members.read_metadata", read_late)

    opened = open_quietly(members)

    assert [dataset.meta.root for dataset in opened.datasets] == [member.root for member in members]
    assert opened.positions == tuple(range(len(members)))


def test_datasets_are_read_at_the_same_time(rows, monkeypatch):
    members = as_members(*[rows["v3.0"]] * 16)
    meeting = threading.Barrier(2, timeout=30)

    def read_with_another(storage):
        meeting.wait()
        return read_metadata(storage)

    monkeypatch.setattr("raypipe.mixture.members.read_metadata", read_with_another)
    opened = open_quietly(members)

    assert len(opened.datasets) == 16


def test_a_mistake_in_the_program_is_not_taken_for_a_bad_dataset(rows, monkeypatch):
    def mistaken(storage):
        raise TypeError("a bug")

    monkeypatch.setattr("raypipe.mixture.members.read_metadata", mistaken)

    with pytest.raises(TypeError, match="a bug"):
        open_members(as_members(*rows.values()), on_bad_dataset="skip")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "info.json"), pa.ArrowInvalid("no such thing")], ids=type
)
def test_what_the_system_and_arrow_refuse_makes_a_dataset_bad(rows, error, monkeypatch):
    def refused(storage):
        if storage.uri.endswith("v2.1"):
            raise error
        return read_metadata(storage)

    monkeypatch.setattr("raypipe.mixture.members.read_metadata", refused)

    with pytest.warns(UserWarning, match=f"1 of 3 datasets .*\n.*{type(error).__name__}: "):
        opened = open_members(as_members(*rows.values()), on_bad_dataset="skip")

    assert [bad.name for bad in opened.bad] == ["member-1"]


def test_storage_that_fails_for_a_moment_is_asked_again(rows, monkeypatch):
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.0, 0.0))
    failures = [DownloadError("a hiccup"), TimeoutError("another")]

    def flaky(storage):
        if failures:
            raise failures.pop()
        return read_metadata(storage)

    monkeypatch.setattr("raypipe.mixture.members.read_metadata", flaky)

    opened = open_quietly(as_members(rows["v3.0"]))

    assert len(opened.datasets) == 1


def test_what_is_left_out_of_a_dataset_is_a_note_of_its_member(bases, tmp_path):
    root = shutil.copytree(bases["v3.0"], tmp_path / "d")
    no_videos_of_the_wrist(root)
    edit_info(root, lambda info: info["features"].update(ghost={"dtype": "float32", "shape": [2]}))
    edit_info(root, lambda info: info.update(total_frames=99))

    opened = open_quietly(as_members(bases["v2.1"], root))

    assert {note.name for note in opened.notes} == {"member-1"}
    texts = " ".join(note.text for note in opened.notes)
    assert f"camera '{WRIST}' is left out: no video file is there" in texts
    assert "feature 'ghost' is left out" in texts
    assert "total_frames in info.json is 99" in texts
    assert opened.datasets[1].spec.cameras == (TOP,)
    assert opened.datasets[1].missing_cameras == (WRIST,)
    assert "ghost" not in opened.datasets[1].row_features


def test_what_a_member_drops_is_neither_opened_nor_noted(bases, tmp_path):
    root = shutil.copytree(bases["v3.0"], tmp_path / "d")
    no_videos_of_the_wrist(root)
    edit_info(root, lambda info: info["features"].update(ghost={"dtype": "float32", "shape": [2]}))

    opened = open_quietly(as_members(root, drop=(WRIST, "ghost")))

    assert opened.notes == ()
    assert opened.datasets[0].spec.cameras == (TOP,)


def test_cameras_that_a_member_names_are_those_that_it_has(bases):
    opened = open_quietly(as_members(bases["v3.0"], cameras={"main": WRIST}))

    assert opened.datasets[0].spec.cameras == (WRIST,)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_camera_that_a_member_names_and_does_not_have_is_told_with_the_nearest(bases, policy):
    asked = as_members(bases["v3.0"], cameras={"main": "observation.images.tpo"})

    with pytest.raises(ConfigError, match=r"no camera 'observation\.images\.tpo'; did you mean '" + TOP):
        open_quietly([*as_members(bases["v2.1"]), *asked], on_bad_dataset=policy)


def test_storage_that_does_not_answer_is_no_bad_dataset_to_be_skipped(rows, monkeypatch):
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.0, 0.0))
    members = as_members(rows["v3.0"], rows["v2.1"])

    def read(storage):
        if storage.uri.endswith("v2.1"):
            raise TimeoutError("no answer")
        return read_metadata(storage)

    monkeypatch.setattr("raypipe.mixture.members.read_metadata", read)

    with pytest.raises(DownloadError, match=r"member-1 .*no answer"):
        open_quietly(members, on_bad_dataset="skip")


def test_neither_windows_nor_pickles_make_a_dataset_look_at_its_files_again(rows, tmp_path):
    root = shutil.copytree(rows["v3.0"], tmp_path / "d")
    dataset = open_quietly(as_members(root)).datasets[0]
    wanted = dict(dataset.row_features)
    shutil.rmtree(root)

    windowed = pickle.loads(pickle.dumps(dataset)).windowed(offsets={"action": [0, 1]})

    assert windowed.row_features == wanted


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Datasets that look odd and are sound, and real ones where they are at hand."""
    folder = tmp_path_factory.mktemp("odd-sound")
    made = {name: write_dataset(folder / str(i), spec) for i, (name, spec) in enumerate(SOUND.items())}
    real = sorted(path.parents[1] for path in REAL_DATA.glob("*/meta/info.json")) if REAL_DATA.exists() else []
    return [*made.values(), *real]


@pytest.mark.filterwarnings("ignore:.*leaving out")
def test_datasets_opened_together_equal_those_opened_one_by_one_and_give_the_same_samples(odd):
    members = as_members(*odd)

    opened = open_quietly(members)

    for member, dataset in zip(members, opened.datasets, strict=True):
        alone = open_dataset(member.root)
        assert_same_meta(dataset.meta, alone.meta)
        assert (dataset.spec, dataset.missing_cameras) == (alone.spec, alone.missing_cameras)
        assert [*dataset.row_features.items()] == [*alone.row_features.items()]
        for index in (0, len(alone) - 1):
            assert_same_sample(dataset[index], alone[index])


def test_datasets_on_another_filesystem_are_opened(bases):
    memory = fsspec.filesystem("memory")
    for version, root in bases.items():
        memory.put(str(root), f"/mixture/{version}", recursive=True)
    members = as_members(*(f"memory://mixture/{version}" for version in bases))

    opened = open_quietly(members)

    local = open_quietly(as_members(*bases.values()))
    for one, here in zip(opened.datasets, local.datasets, strict=True):
        assert_same_sample(one[0], here[0])


class _MeetingFileSystem(LocalFileSystem):
    """A storage whose listings answer once two are asked for at a time."""

    protocol = "meeting"
    meeting = threading.Barrier(2, timeout=30)

    def find(self, path, **options):
        self.meeting.wait()
        return super().find(self._strip_protocol(path), **options)

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("meeting://"))


def test_roots_are_listed_at_the_same_time():
    filesystem = _MeetingFileSystem(skip_instance_cache=True)
    remotes = [Remote(filesystem, str(Path(__file__).parent), "") for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        listings = list(pool.map(lambda remote: remote.entries, remotes))

    assert listings[0] == listings[1]
    assert Path(__file__).name in listings[0]


def test_nothing_is_printed_where_nobody_looks(rows, capfd):
    open_quietly(as_members(*rows.values()), progress=True)

    assert capfd.readouterr() == ("", "")


def test_a_bar_counts_the_datasets_where_a_person_looks(rows, capfd, monkeypatch):
    monkeypatch.setattr("raypipe.text.terminal.is_shown", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")

    open_quietly(as_members(*rows.values()), progress=True)
    shown = capfd.readouterr()
    open_quietly(as_members(*rows.values()), progress=False)

    assert shown.out == ""
    assert "3/3" in shown.err
    assert capfd.readouterr() == ("", "")


def test_a_mixture_of_one_dataset_has_the_schema_of_the_dataset(tiny_dataset):
    dataset = open_dataset(str(tiny_dataset)).windowed(offsets={"action": [0, 1], TOP: [-1, 0]})
    spec = MixtureSpec(members=[str(tiny_dataset)])

    features = features_of(spec.members[0].name, dataset)
    found = add_windows(unify([features], spec)[0], [(dataset.meta.root, dataset.window)])

    alone = schema_of(dataset)
    assert (found.members, found.windows, found.time_axes) == (alone.members, alone.windows, alone.time_axes)
    assert list(found.features) == list(alone.features)
    for name, feature in found.features.items():
        assert feature.shape == alone.features[name].shape
        assert found.value_shape(name) == alone.value_shape(name) or feature.is_camera
