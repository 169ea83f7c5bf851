"""Names in a dataset that lead out of it: of features, templates and links. Nothing outside is read or written."""

import json
import os
import shutil

import pytest
from reshard_checks import digests

from raypipe import open_dataset
from raypipe.errors import ConfigError, DatasetError, ResumeError
from raypipe.format import features
from raypipe.format.dataset_meta import why_unfit
from raypipe.reshard import ReshardSpec, reshard_dataset
from raypipe.reshard import run as run_module
from raypipe.reshard.workspace import find_workspace, list_sizes
from raypipe.storage import inside, open_storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate import validate_dataset

TOP = "observation.images.top"
SPEC = SynthSpec(lengths=(3, 2), cameras=(CameraSpec(name=TOP),))
BAD_NAMES = ["../../../victim/videos/top", "a/b", "a\\b", "..", ".", "a..b", "", "a\0b", "a\nb", "a\x1b[2Jb", "\ud800"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return {version: write_dataset(folder / version, SPEC_OF[version]) for version in SPEC_OF}


SPEC_OF = {
    "v2.1": SynthSpec(version="v2.1", lengths=(3, 2), cameras=(CameraSpec(name=TOP),)),
    "v3.0": SPEC,
}


@pytest.fixture(params=["v2.1", "v3.0"])
def source(request, made, tmp_path):
    return shutil.copytree(made[request.param], tmp_path / "source")


def edit_info(root, change):
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


def reshard(root, out, *, allow_findings=False, **choices):
    return reshard_dataset(str(root), out, ReshardSpec(**choices), where="process", allow_findings=allow_findings)


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("renamed", [TOP, "action"])
def test_a_feature_with_a_name_that_may_be_a_path_is_refused_by_name(made, tmp_path, name, renamed):
    root = shutil.copytree(made["v3.0"], tmp_path / "source")
    edit_info(root, lambda info: info["features"].update({name: info["features"].pop(renamed)}))

    with pytest.raises(DatasetError) as refused:
        open_dataset(str(root))

    assert repr(name) in str(refused.value)
    assert "meta/info.json" in str(refused.value)
    assert "feature-invalid" in {finding.kind for finding in validate_dataset(str(root), where="process").findings}


def test_a_feature_may_have_dots_blanks_and_letters_of_any_script(source):
    edit_info(source, lambda info: info["features"].update({"stärke. der Hand": info["features"].pop("action")}))

    assert "stärke. der Hand" in open_dataset(str(source)).meta.features


def hostile(source, victim):
    """The camera of a dataset leads to that of another."""
    name = os.path.relpath(victim / "videos" / TOP, source.parent / "copy.partial/dataset/videos")

    def rename(info):
        info["features"][name] = info["features"].pop(TOP)
        info["video_path"] = info["video_path"].replace("{video_key}", TOP)

    edit_info(source, rename)


@pytest.mark.parametrize("choices", [{}, {"gop": 2}])
def test_reshard_writes_no_file_of_another_dataset(made, tmp_path, choices):
    source = shutil.copytree(made["v2.1"], tmp_path / "source")
    victim = shutil.copytree(made["v3.0"], tmp_path / "victim")
    hostile(source, victim)
    before = digests(victim)

    with pytest.raises(DatasetError, match="name of the feature '"):
        reshard(source, tmp_path / "copy", **choices)

    assert digests(victim) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "victim"]


@pytest.mark.parametrize("choices", [{}, {"gop": 2}])
def test_reshard_stays_in_its_folder_even_where_a_name_was_let_through(made, tmp_path, monkeypatch, choices):
    source = shutil.copytree(made["v2.1"], tmp_path / "source")
    victim = shutil.copytree(made["v3.0"], tmp_path / "victim")
    hostile(source, victim)
    before = digests(victim)
    monkeypatch.setattr(features, "why_unfit_name", lambda name: "")

    with pytest.raises(DatasetError, match="lies outside the folder"):
        reshard(source, tmp_path / "copy", **choices)

    assert digests(victim) == before


@pytest.mark.parametrize("name", ["../a", "b/../../a", "/etc/a", "", ".", "..", "b/..", "a\0b", "link/a"])
def test_no_writer_leaves_its_folder(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link").symlink_to(tmp_path)

    with pytest.raises(DatasetError, match="outside"):
        inside(tmp_path / "folder", name)
    with pytest.raises(DatasetError, match="outside"):
        open_storage(tmp_path / "folder").write_atomic(name, b"content")

    assert os.listdir(tmp_path) == ["folder"]


def test_a_writer_writes_below_its_folder_also_where_that_is_a_link(tmp_path):
    (tmp_path / "true").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "true")

    open_storage(tmp_path / "link").write_atomic("a/..b.json", b"content")

    assert (tmp_path / "true/a/..b.json").read_bytes() == b"content"


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name])
def test_synth_refuses_the_names_that_reading_refuses(name):
    with pytest.raises(ConfigError, match="name"):
        CameraSpec(name=name)


def test_a_camera_that_is_missing_in_a_copy_is_an_error(source, tmp_path, monkeypatch):
    def lose_camera(job, *others):
        notes = write_meta(job, *others)
        shutil.rmtree(job.workspace.dataset / "videos" / TOP)
        return notes

    write_meta = run_module.write_meta
    monkeypatch.setattr(run_module, "write_meta", lose_camera)

    with pytest.raises(DatasetError, match=rf"lacks videos of the camera {TOP!r}"):
        reshard(source, tmp_path / "copy", allow_findings=True)

    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("key", ["data_path", "video_path"])
@pytest.mark.parametrize(
    "lead",
    [
        "../other/",
        "data/../../other/",
        "/",
        "C:/",
        "c:\\",
        "..\\other\\",
        "file:///",
        "a\0/",
        "{video_key:.>2}/",
        "{{/../",
    ],
)
def test_a_template_that_leads_out_of_the_dataset_is_refused_by_name(source, key, lead):
    template = []

    def change(info):
        info[key] = lead + info[key]
        template.append(info[key])

    edit_info(source, change)

    with pytest.raises(DatasetError) as refused:
        open_dataset(str(source))

    assert f"{key} in " in str(refused.value)
    assert repr(template[0]) in str(refused.value)
    assert "template-invalid" in {finding.kind for finding in validate_dataset(str(source), where="process").findings}


@pytest.mark.parametrize("template", ["{chunk_index:0999999999d}", "{chunk_index.__class__}", "{chunk_index!r:>9}"])
def test_a_template_has_plain_fields_only(template):
    assert "cannot be filled in" in why_unfit(f"data/{template}.parquet")


def test_a_copy_takes_no_file_to_which_a_link_leads_out_of_the_dataset(source, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("of another")
    (source / "meta/extra.json").symlink_to(tmp_path / "secret/key")
    (source / "README.md").symlink_to(tmp_path / "secret/key")
    (source / "meta/more").symlink_to(tmp_path / "secret", target_is_directory=True)
    (source / "meta/mine.json").write_text("mine")
    (source / "meta/same.json").symlink_to("mine.json")

    report = reshard(source, tmp_path / "copy")

    copied = [path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert b"of another" not in copied
    assert (tmp_path / "copy/meta/same.json").read_text() == "mine"
    assert "3 files to which links lead out of the dataset were not copied: README.md, meta/extra.json" in str(
        report.notes
    )


def test_a_copy_of_a_snapshot_in_the_hubs_cache_has_the_files_that_the_cache_links(source, tmp_path):
    root, blobs = tmp_path / "datasets--o--n/snapshots/abc", tmp_path / "datasets--o--n/blobs"
    shutil.copytree(source, root)
    blobs.mkdir()
    (blobs / "1").write_text("read me")
    (root / "README.md").symlink_to("../../blobs/1")

    reshard(root, tmp_path / "copy")

    assert (tmp_path / "copy/README.md").read_text() == "read me"


def test_reshard_empties_no_file_to_which_a_link_in_place_of_its_lock_leads(source, tmp_path):
    (tmp_path / "precious").write_text("mine")
    meta = open_dataset(str(source)).meta
    workspace = find_workspace(meta.storage, ReshardSpec().to_json(), tmp_path / "copy", list_sizes(meta.storage))
    workspace.folder.mkdir()
    (workspace.folder / "lock").symlink_to(tmp_path / "precious")

    with pytest.raises(ResumeError, match="cannot lock the unfinished copy"):
        reshard(source, tmp_path / "copy")

    assert (tmp_path / "precious").read_text() == "mine"
