"""Every damage is found, with the right episodes and files, and nothing else is said; sound data gives notes only."""

import io
import json
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damages import DAMAGES, LENGTHS, SOUND, TOP, base_spec, edit_episodes, edit_info, edit_rows, with_column
from PIL import Image

from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate import KINDS, validate_dataset, write_report

CASES = [
    pytest.param(damage, version, id=f"{name}-{version}")
    for name, damage in DAMAGES.items()
    for version in damage.versions
]


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """The sound datasets that damages start from, by version."""
    roots = tmp_path_factory.mktemp("sound")
    return {version: write_dataset(roots / version, base_spec(version)) for version in ("v3.0", "v2.1")}


@pytest.fixture
def damaged(request, bases, tmp_path):
    """A damaged copy of a sound dataset: its root, and what was hit."""
    damage, version = request.param
    root = tmp_path / "dataset"
    shutil.copytree(bases[version], root)
    return damage, root, damage.apply(root)


def pair(case):
    return pytest.param(case.values, id=case.id)


@pytest.mark.parametrize("damaged", [pair(case) for case in CASES], indirect=True)
def test_a_damage_is_found_where_it_is_and_nothing_else(damaged):
    damage, root, hit = damaged

    report = validate_dataset(str(root), where="process", deep=damage.needs_deep)

    told = [finding for finding in report.findings if finding.severity != "note"]
    own = [finding for finding in told if finding.kind == damage.kind]
    assert own, f"not found; instead: {told}"
    assert {finding.kind for finding in told} <= {damage.kind, *damage.also}, told
    assert {number for finding in own for number in finding.place.episodes} == set(hit.episodes)
    assert {finding.place.file for finding in own} == set(hit.files)
    assert all(finding.message and finding.remedy and "ROOT" not in finding.remedy for finding in told)
    assert report.exit_code == (2 if any(finding.severity == "error" for finding in told) else 1)


def test_damages_of_each_kind_that_follow_are_met_in_some_version():
    for damage in DAMAGES.values():
        assert {damage.kind, *damage.also} <= set(KINDS)
    assert len(DAMAGES) >= 22


def test_corrupted_bytes_are_found_by_decoding_only(bases, tmp_path):
    shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    DAMAGES["corrupted-bytes"].apply(tmp_path / "dataset")

    assert validate_dataset(str(tmp_path / "dataset"), where="process").findings == ()


def test_a_black_camera_is_found_by_decoding_only(bases, tmp_path):
    shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    DAMAGES["black-camera"].apply(tmp_path / "dataset")

    assert validate_dataset(str(tmp_path / "dataset"), where="process").severity != "warning"


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="fragments are made by ffmpeg")
def test_a_black_camera_is_found_in_a_video_without_a_plain_index(bases, tmp_path):
    shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    (name,) = DAMAGES["black-camera"].apply(tmp_path / "dataset").files
    whole = (tmp_path / "dataset" / name).rename(tmp_path / "whole.mp4")
    options = ["-movflags", "frag_keyframe+empty_moov", "-c:v", "copy", tmp_path / "dataset" / name]
    subprocess.run(["ffmpeg", "-v", "error", "-i", whole, *options], check=True)

    report = validate_dataset(str(tmp_path / "dataset"), where="process", deep=True)

    (found,) = [one for one in report.findings if one.severity != "note"]
    assert (found.kind, found.place.episodes) == ("camera-black", (2,))
    assert report.counts.decoded_frames == 2 * sum(LENGTHS)


@pytest.mark.parametrize(("kind", "black"), [("image", 16), ("depth-image", 0)])
def test_images_in_rows_that_are_black_for_an_episode_are_found(tmp_path, kind, black):
    spec = SynthSpec(lengths=(4, 5), cameras=(CameraSpec(name=TOP, height=32, width=48, kind=kind),))
    root = write_dataset(tmp_path / "dataset", spec)

    def blacken(table):
        stored = table.column(TOP).to_pylist()
        pixels = np.full_like(np.asarray(Image.open(io.BytesIO(stored[0]["bytes"]))), black)
        image = io.BytesIO()
        Image.fromarray(pixels).save(image, "PNG" if kind == "image" else "TIFF")
        return with_column(table, TOP, [{**one, "bytes": image.getvalue()} for one in stored])

    name = edit_rows(root, 1, blacken)
    (found,) = validate_dataset(str(root), where="process", deep=True).findings

    assert (found.kind, found.place.file, found.place.episodes) == ("camera-black", name, (1,))
    assert found.message == "all 5 frames are black"


@pytest.mark.parametrize(
    ("number", "kinds"), [(None, {"null-values"}), ([1], set())], ids=["a row of no episode", "lists of one number"]
)
def test_odd_episode_numbers_do_not_end_the_check_of_images(tmp_path, number, kinds):
    camera = CameraSpec(name=TOP, height=32, width=48, kind="image")
    root = write_dataset(tmp_path / "dataset", SynthSpec(version="v2.1", lengths=(4, 5), cameras=(camera,)))
    path = root / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    numbers = [[1]] * 5 if number else [1, None, 1, 1, 1]
    column = pa.array(numbers, pa.list_(pa.int64()) if number else pa.int64())
    pq.write_table(table.drop_columns(["episode_index"]).append_column("episode_index", column), path)

    found = validate_dataset(str(root), where="process", deep=True).findings

    assert {finding.kind for finding in found} >= kinds
    assert "camera-black" not in {finding.kind for finding in found}


def test_a_video_whose_index_packs_the_sizes_of_frames_is_sound(bases, tmp_path):
    shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    for path in (tmp_path / "dataset").rglob("*.mp4"):
        content = bytearray(path.read_bytes())
        table = content.index(b"stsz")
        (count,) = struct.unpack_from(">I", content, table + 12)
        sizes = struct.unpack_from(f">{count}I", content, table + 16)
        struct.pack_into(f">4s4xII{count}H", content, table, b"stz2", 16, count, *sizes)
        path.write_bytes(content)

    assert {finding.severity for finding in validate_dataset(str(tmp_path / "dataset"), deep=True).findings} <= {"note"}


def test_a_task_that_the_table_lists_beside_those_of_the_rows_is_no_contradiction(bases, tmp_path):
    # Some datasets list there what other columns refer to.
    shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    edit_episodes(tmp_path / "dataset", 2, {"tasks": ["pick up the cube", "open the drawer"]})

    assert validate_dataset(str(tmp_path / "dataset"), where="process").findings == ()


def test_a_contradiction_of_tasks_tells_both_sides(bases, tmp_path):
    shutil.copytree(bases["v2.1"], tmp_path / "dataset")
    # By number, as some datasets do.
    edit_episodes(tmp_path / "dataset", 2, {"tasks": ["1"]})

    (found,) = validate_dataset(str(tmp_path / "dataset"), where="process").findings

    assert found.kind == "task-mismatch"
    assert found.message == (
        "12 rows with the task 'pick up the cube', the first is frame 0; the episode table lists 'open the drawer'"
    )


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("deep", [False, True], ids=["", "deep"])
def test_a_sound_dataset_gives_neither_error_nor_warning(tmp_path_factory, sound, name, deep):
    report = validate_dataset(str(sound(name)), where="process", deep=deep)

    assert [finding for finding in report.findings if finding.severity != "note"] == []
    assert report.exit_code == 0
    assert report.counts.frames == sum(SOUND[name].lengths)
    if deep:
        cameras = len(SOUND[name].cameras)
        assert report.counts.decoded_frames == cameras * sum(SOUND[name].lengths)


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """A function that returns the root of a sound dataset, written once."""
    folder, roots = tmp_path_factory.mktemp("ünicode [and] blanks"), {}

    def root(name):
        if name not in roots:
            roots[name] = write_dataset(folder / str(len(roots)), SOUND[name])
        return roots[name]

    return root


def test_a_dataset_without_info_is_still_looked_into(bases, tmp_path):
    root = tmp_path / "dataset"
    shutil.copytree(bases["v3.0"], root)
    DAMAGES["truncated-video"].apply(root)
    DAMAGES["zero-byte-parquet"].apply(root)
    (root / "meta/info.json").unlink()

    kinds = validate_dataset(str(root), where="process").tally

    assert {"info-unreadable", "data-unreadable"} <= set(kinds)


@pytest.mark.parametrize("fps", [10**400, 1e-9, 1e9])
def test_a_rate_that_the_pipeline_refuses_is_one_finding(bases, tmp_path, fps):
    root = shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    edit_info(root, lambda info: info.update(fps=fps))

    report = validate_dataset(str(root), where="process")

    assert [(found.kind, found.place.feature) for found in report.findings] == [("info-key", "fps")]


@pytest.mark.parametrize("template", ["", "data/episode_{number}.parquet"])
def test_a_template_that_says_nothing_does_not_hide_the_episodes(bases, tmp_path, template):
    root = shutil.copytree(bases["v2.1"], tmp_path / "dataset")
    edit_info(root, lambda info: info.update(data_path=template, fps=0))

    report = validate_dataset(str(root), where="process")

    wanted = {"info-key", "template-invalid"} if template else {"info-key"}
    assert {found.kind for found in report.findings} == wanted
    assert report.counts.data_files == len(LENGTHS)


def test_a_file_whose_name_is_no_text_is_reported(bases, tmp_path):
    root = shutil.copytree(bases["v3.0"], tmp_path / "dataset")
    Path(os.fsdecode(os.fsencode(root) + b"/data/notes\xff.txt")).touch()

    report = validate_dataset(str(root), where="process")
    write_report(report, html_file=tmp_path / "page.html")

    assert [(found.kind, found.place.file) for found in report.findings] == [("file-extra", "data/notes\udcff.txt")]
    assert r"data/notes\udcff.txt" in (tmp_path / "page.html").read_text()


def test_a_dataset_with_many_damages_tells_all_of_them(bases, tmp_path):
    root = tmp_path / "dataset"
    shutil.copytree(bases["v2.1"], root)
    names = ["inf-state", "missing-video", "wrong-stats", "wrong-codec", "extra-data-file", "missing-total"]
    for name in names:
        DAMAGES[name].apply(root)
    edit = json.loads((root / "meta/info.json").read_text())
    del edit["fps"]
    (root / "meta/info.json").write_text(json.dumps(edit))

    report = validate_dataset(str(root), where="process")

    assert {DAMAGES[name].kind for name in names} <= set(report.tally)
    assert sum(LENGTHS) == report.counts.frames


@pytest.mark.parametrize("seed", range(40))
def test_no_random_damage_stops_it(bases, tmp_path, seed):
    draw = random.Random(seed)
    root = tmp_path / "dataset"
    shutil.copytree(bases[draw.choice(["v3.0", "v2.1"])], root)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    # Half of them in meta/, where damage means most.
    chosen = draw.choice([path for path in files if draw.random() < 0.5 or "meta" in path.parts])
    content = bytearray(chosen.read_bytes())
    if draw.random() < 0.3:
        content = content[: draw.randrange(1, len(content))]
    for _ in range(draw.choice([1, 5, 50])):
        content[draw.randrange(len(content))] = draw.randrange(256)
    chosen.write_bytes(bytes(content))

    report = validate_dataset(str(root), where="process")

    assert json.loads(json.dumps(report.to_json()))["severity"] == report.severity
