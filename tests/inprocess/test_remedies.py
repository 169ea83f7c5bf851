"""Every remedy that a message gives is done here, and helps.

A row damages a sound dataset and meets the message as a user does: from validate, on opening, from a sample, a loader
or reshard. The remedy is read from that message and done to the dataset, and then a whole epoch is read from it. What
no row tries is listed with the reason.
"""

import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import frames_of_all, local_loader, rows_spec
from damages import (
    DAMAGES,
    TOP,
    WRIST,
    Damaged,
    base_spec,
    column,
    data_file,
    edit_episodes,
    edit_info,
    edit_rows,
    is_packed,
    truncate,
    video_file,
    with_column,
    write_groups,
)
from program import run_program

from raypipe.dataset import open_dataset
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed import SpanRequest, open_block, read_block
from raypipe.loader import span_columns
from raypipe.mixture import Mixture
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate import KINDS, read_exclude_file, validate_dataset

INFO = "meta/info.json"
TABLE = "meta/episodes/chunk-000/file-000.parquet"
NOTHING_HIT = Damaged((), ())
SPECS = {
    "v3.0": base_spec("v3.0"),
    "v2.1": base_spec("v2.1"),
    "images": SynthSpec(lengths=(5, 6, 4), cameras=(CameraSpec(name=TOP, height=32, width=48, kind="image"),)),
    "long gop": SynthSpec(
        version="v2.1", lengths=(70, 9), fps=30, cameras=(CameraSpec(name=TOP, height=32, width=48, gop=250),)
    ),
}


@dataclass
class Bed:
    """A damaged dataset, where it is sound, and what the user was told."""

    root: Path
    sound: Path
    spare: Path
    """Where copies may be written."""
    hit: Damaged = NOTHING_HIT
    told: str = ""


@dataclass(frozen=True)
class Cured:
    """How the dataset is opened and read after a remedy."""

    root: Path | None = None
    opened: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    """Features."""
    is_mended: bool = True
    """Whether validate must find no more of it."""


NOT_CURED = Cured()
Damaging = Callable[[Path], Any]
Cure = Callable[[Bed], Cured]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A function that returns the root of a sound dataset, written once."""
    folder, roots = tmp_path_factory.mktemp("sound"), {}

    def root(name):
        if name not in roots:
            roots[name] = write_dataset(folder / name, SPECS[name])
        return roots[name]

    return root


@pytest.fixture
def bed(sound, tmp_path):
    """Make a damaged copy of a sound dataset."""

    def make(spec: str, damage: str | Damaging) -> Bed:
        root = shutil.copytree(sound(spec), tmp_path / "dataset")
        hit = (DAMAGES[damage].apply if isinstance(damage, str) else damage)(root)
        return Bed(root, sound(spec), tmp_path, hit if isinstance(hit, Damaged) else NOTHING_HIT)

    return make


def read_epoch(root, cured=NOT_CURED, *, is_quiet=False):
    """Read a whole epoch; every frame that is not left out comes once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_quiet else "ignore", UserWarning)
        dataset = open_dataset(str(cured.root or root), **cured.opened).drop_features(cured.dropped)
        pipe = Pipeline(dataset, batch_size=8, seed=1, **cured.parts)
        loader = local_loader(pipe)
        batches = list(loader)
    skipped = sum(span.stop - span.start for span in loader.skipped)
    frames = [frame for frame, batch in zip(frames_of_all(batches), repeats(batches), strict=True) if not batch]
    assert len(set(frames)) == len(frames) == pipe.config.index().num_frames - skipped
    assert len(frames) > 0
    return loader


def repeats(batches):
    return [
        again for batch in batches for again in batch.get("is_repeat", np.zeros(len(batch["index"]), bool)).tolist()
    ]


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def fetch(bed: Bed) -> Cured:
    """Fetch the files that the message names."""
    files = [path for path in bed.sound.rglob("*") if path.is_file()]
    named = [path for path in files if str(path.relative_to(bed.sound)) in bed.told]
    assert named, bed.told
    for path in named:
        shutil.copy(path, bed.root / path.relative_to(bed.sound))
    return Cured()


def fetch_cameras(bed: Bed) -> Cured:
    assert re.search(r"fetch its files|Fetch them", bed.told), bed.told
    shutil.copytree(bed.sound / "videos", bed.root / "videos", dirs_exist_ok=True)
    return Cured()


def fetch_meta(bed: Bed) -> Cured:
    assert "meta/" in bed.told
    shutil.copytree(bed.sound / "meta", bed.root / "meta", dirs_exist_ok=True)
    return Cured()


def correct_info(bed: Bed) -> Cured:
    assert "info.json" in bed.told
    shutil.copy(bed.sound / INFO, bed.root / INFO)
    return Cured()


def set_info(key: str, pattern: str, kind: type = str) -> Cure:
    """Set a key of info.json to what the message gives."""

    def cure(bed: Bed) -> Cured:
        value = re.search(pattern, bed.told)
        assert value, bed.told
        edit_info(bed.root, lambda info: info.update({key: kind(value[1])}))
        return Cured()

    return cure


def nothing(bed: Bed) -> Cured:
    """Leave it as it is: raypipe reads it all the same."""
    return Cured(is_mended=False)


def exclude_in_pipeline(bed: Bed) -> Cured:
    listed = bed.spare / "bad.txt"
    (command,) = re.findall(r"raypipe (validate \S+(?: --deep)? --exclude-file bad\.txt)", bed.told)[:1]
    run_program(*command.replace("bad.txt", str(listed)).split())
    assert "selection={'exclude': raypipe.validate.read_exclude_file('bad.txt')}" in bed.told
    numbers = read_exclude_file(listed)
    assert set(numbers) == set(bed.hit.episodes)
    return Cured(parts={"selection": {"exclude": numbers}}, is_mended=False)


def reshard(bed: Bed) -> Cured:
    """Run the reshard command that the message shows, and before it the one that writes the exclude file."""
    listed, out = bed.spare / "bad.txt", bed.spare / "copy"
    for command in re.findall(r"raypipe (validate \S+(?: --deep)? --exclude-file bad\.txt)", bed.told)[:1]:
        run_program(*command.replace("bad.txt", str(listed)).split())
    command = re.search(r"raypipe (reshard \S+ OUT(?: --[\w-]+ [\w.]+)*)", bed.told)
    assert command, bed.told
    done = run_program(
        *command[1].replace("bad.txt", str(listed)).replace(" OUT", f" {out}").split(), "--where", "process"
    )
    assert done.returncode == 0, done.stderr
    return Cured(root=out)


def add_task(bed: Bed) -> Cured:
    """Add the task that is not listed to meta/tasks, with the number that rows have of it."""
    assert re.search("[Aa]dd the task to meta/tasks", bed.told), bed.told
    if is_packed(bed.root):
        path = bed.root / "meta/tasks.parquet"
        table = pq.read_table(path)
        text = next(name for name in table.column_names if name != "task_index")
        more = {text: ["juggle"] * 6, "task_index": [2, 3, 4, 5, 6, 7]}
        pq.write_table(pa.concat_tables([table, pa.table(more).select(table.column_names).cast(table.schema)]), path)
    else:
        with (bed.root / "meta/tasks.jsonl").open("a") as file:
            file.writelines(json.dumps({"task_index": i, "task": "juggle"}) + "\n" for i in range(2, 8))
    edit_info(bed.root, lambda info: info.update(total_tasks=8))
    return Cured()


def moved(folder: str) -> Damaging:
    return lambda root: (root / folder).rename(root / f"{folder}-moved")


def info_edit(**values: Any) -> Damaging:
    return lambda root: edit_info(root, lambda info: info.update(values))


def feature_edit(name: str, **values: Any) -> Damaging:
    return lambda root: edit_info(root, lambda info: info["features"].setdefault(name, {}).update(values))


def gap_in_numbers(root: Path) -> None:
    edit_rows(root, 4, lambda table: with_column(table, "episode_index", [7] * len(table)))
    edit_episodes(root, 4, {"episode_index": 7})


def strayed_rows(root: Path) -> None:
    first, second = (root / data_file(root, episode) for episode in (0, 4))
    rows = pq.read_table(second)
    stray = rows.filter(pa.array(rows.column("episode_index").to_numpy() == 4))
    groups = pq.ParquetFile(first)
    write_groups(first, [*(groups.read_row_group(i) for i in range(groups.num_row_groups)), stray])


def json_line(name: str, **values: Any) -> Damaging:
    """Change the second line of a file of JSON lines."""

    def damage(root: Path) -> None:
        lines = [json.loads(line) for line in (root / name).read_text().splitlines()]
        lines[1].update(values)
        (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return damage


def bytes_of(episode: int, old: bytes, new: bytes) -> Damaging:
    """Change bytes of a video."""

    def damage(root: Path) -> Damaged:
        name = video_file(root, episode)
        content = (root / name).read_bytes()
        assert old in content
        (root / name).write_bytes(content.replace(old, new))
        return Damaged((episode,), (name,))

    return damage


def in_all_files(change: Callable[[pa.Table], pa.Table]) -> Damaging:
    def damage(root: Path) -> None:
        for path in root.glob("data/*/*.parquet"):
            parquet = pq.ParquetFile(path)
            groups = [parquet.read_row_group(group) for group in range(parquet.num_row_groups)]
            write_groups(path, [change(group) for group in groups])

    return damage


def in_file_of(episode: int, change: Callable[[pa.Table], pa.Table]) -> Damaging:
    def damage(root: Path) -> Damaged:
        name = data_file(root, episode)
        pq.write_table(change(pq.read_table(root / name)), root / name)
        return Damaged((episode,), (name,))

    return damage


def dropped(name: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns([name])


def stored_as(name: str, values: Callable[[int], Any]) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values(len(table))))


def doubled(name: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: pa.table([*table.columns, table.column(name)], names=[*table.column_names, name])


def jitter(table: pa.Table) -> pa.Table:
    stamps = column(table, "timestamp")
    return with_column(table, "timestamp", stamps + 1e-3 * (np.arange(len(stamps)) == 2))


def broken_image(content: bytes | None) -> Damaging:
    def change(table: pa.Table) -> pa.Table:
        images = table.column(TOP).to_pylist()
        images[2] = {**images[2], "bytes": content}
        return table.set_column(table.column_names.index(TOP), TOP, pa.array(images, table.schema.field(TOP).type))

    return lambda root: Damaged((1,), (edit_rows(root, 1, change),))


def overwrite(path: Path, start: int, stop: int) -> None:
    content = bytearray(path.read_bytes())
    content[start:stop] = b"\xff" * (stop - start)
    path.write_bytes(bytes(content))


def fragmented_video(root: Path) -> None:
    path = root / video_file(root, 1)
    before = path.rename(path.with_name("before.mp4"))
    options = ["-c:v", "copy", "-movflags", "frag_keyframe+empty_moov"]
    subprocess.run(["ffmpeg", "-v", "error", "-y", "-i", before, *options, path], check=True)
    before.unlink()


def as_depth(root: Path) -> None:
    edit_info(root, lambda info: info["features"][WRIST]["info"].update({"video.is_depth_map": True}))


def write_column(bed: Bed) -> Cured:
    assert "column episode_index" in bed.told
    lengths, numbers = SPECS["v3.0"].lengths, iter(range(5))
    for path in sorted(bed.root.glob("data/*/*.parquet")):
        table, groups, done = pq.read_table(path), [], 0
        while done < len(table):
            number = next(numbers)
            part = table.slice(done, lengths[number])
            groups.append(part.append_column("episode_index", pa.array([number] * len(part))))
            done += len(part)
        write_groups(path, groups)
    return Cured()


def declare_effort(bed: Bed) -> Cured:
    assert "declare it" in bed.told
    feature_edit("effort", dtype="float32", shape=[1], names=None)(bed.root)
    assert open_dataset(str(bed.root))[0]["effort"] == 0.5
    return Cured()


def take_out_of_info(bed: Bed) -> Cured:
    assert re.search(r"[Tt]ake it out of (meta/)?info\.json", bed.told), bed.told
    edit_info(bed.root, lambda info: info["features"].pop("effort"))
    return Cured()


def leave_copies_out(bed: Bed) -> Cured:
    assert "selection={'exclude': (...)}" in bed.told
    return Cured(parts={"selection": {"exclude": bed.hit.episodes[1:]}}, is_mended=False)


def correct_table(bed: Bed) -> Cured:
    assert "correct the episode table" in bed.told
    shutil.copytree(bed.sound / "meta" / "episodes", bed.root / "meta" / "episodes", dirs_exist_ok=True)
    return Cured()


def leave_black_out(bed: Bed) -> Cured:
    assert "selection={'exclude': (...)}" in bed.told
    return Cured(parts={"selection": {"exclude": bed.hit.episodes}}, is_mended=False)


def drop_action(bed: Bed) -> Cured:
    assert re.search(r"drop_features\(\[('action'|\.\.\.)\]\)", bed.told), bed.told
    return Cured(dropped=("action",), is_mended=False)


def name_cameras(*names: str) -> Cure:
    def cure(bed: Bed) -> Cured:
        assert re.search(r"[Nn]ame the cameras to use|cameras=\[\.\.\.\]", bed.told), bed.told
        return Cured(opened={"cameras": list(names)}, is_mended=False)

    return cure


LEAVE_OUT = (exclude_in_pipeline, reshard)
FETCH = (fetch, *LEAVE_OUT)
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="there is no ffmpeg command")


@dataclass(frozen=True)
class Row:
    """A damage, the dataset that it is done to, and what the remedy says, each tried alone."""

    damage: str | Damaging
    cures: tuple[Cure, ...]
    spec: str = "v3.0"
    marks: tuple[Any, ...] = ()


KIND_ROWS: dict[str, list[Row]] = {
    "info-unreadable": [Row("truncated-info", (fetch,)), Row(lambda root: (root / INFO).unlink(), (fetch,))],
    "info-key": [Row("missing-fps", (correct_info,)), Row("missing-features", (correct_info,))],
    "version-unknown": [Row("unknown-version", (set_info("codebase_version", r"By its files it is (v\d\.\d)"),))],
    "template-invalid": [Row("broken-template", (correct_info,))],
    "template-mismatch": [
        Row(moved("data"), (set_info("data_path", r"all files are there is '(data-moved/.*?)'"),)),
        Row(moved("videos"), (set_info("video_path", r"all files are there is '(videos-moved/.*?)'"),), "v2.1"),
    ],
    "layout-mismatch": [
        Row(
            info_edit(codebase_version="v3.0"),
            (nothing, lambda bed: (info_edit(codebase_version="v2.1")(bed.root), Cured())[1]),
            "v2.1",
        )
    ],
    "feature-unknown": [Row("unknown-dtype", (nothing, correct_info))],
    "feature-invalid": [Row("no-dtype", (correct_info,))],
    "episodes-unreadable": [Row("truncated-episode-table", (fetch_meta,)), Row("missing-episode-table", (fetch_meta,))],
    "tasks-unreadable": [Row("missing-tasks", (fetch,)), Row("missing-tasks", (fetch,), "v2.1")],
    "metadata-unreadable": [Row(info_edit(chunks_size="many"), (fetch_meta, correct_info), "v2.1")],
    "count-mismatch": [Row("wrong-total", (nothing, correct_info)), Row("lost-episode-in-table", (correct_info,))],
    "split-invalid": [Row(info_edit(splits={"train": "all"}), (nothing, correct_info))],
    "episode-numbers": [Row(gap_in_numbers, (nothing, reshard))],
    "index-range": [Row("wrong-from-index", (nothing, reshard))],
    "task-unlisted": [Row("unlisted-task", (add_task,)), Row("unlisted-task", (add_task,), "v2.1")],
    "data-missing": [Row("missing-parquet", FETCH)],
    "data-unreadable": [Row("zero-byte-parquet", FETCH), Row("corrupt-parquet-page", FETCH)],
    "video-missing": [Row("missing-video", FETCH)],
    "camera-missing": [Row("missing-camera", (nothing, fetch_cameras))],
    "file-extra": [Row("extra-data-file", (nothing,))],
    "row-groups": [Row("collapsed-row-groups", (nothing, reshard))],
    "length-mismatch": [Row("lost-rows", LEAVE_OUT)],
    "rows-orphaned": [Row("orphaned-rows", (nothing, reshard))],
    "rows-misplaced": [Row(strayed_rows, (nothing, reshard))],
    "rows-duplicated": [Row("duplicated-rows", LEAVE_OUT)],
    "frame-gap": [Row("frame-gap", LEAVE_OUT)],
    "rows-unordered": [Row("unordered-rows", (nothing, reshard))],
    "index-mismatch": [Row("index-gap", (nothing, reshard))],
    "episode-duplicate": [Row("duplicate-episode", (leave_copies_out,))],
    "fps-mismatch": [Row("wrong-fps", (correct_info,))],
    "timestamp-order": [Row("timestamps-that-fall", (nothing,))],
    "timestamp-drift": [Row("drifted-timestamps", (nothing,))],
    "timestamp-offset": [Row("late-timestamps", (nothing,))],
    "timestamp-jitter": [Row(in_all_files(jitter), (nothing,))],
    "feature-missing": [Row("missing-column", (drop_action, *LEAVE_OUT))],
    "feature-absent": [Row(feature_edit("effort", dtype="float32", shape=[6]), (nothing, take_out_of_info))],
    "feature-undeclared": [
        Row(
            in_all_files(lambda table: table.append_column("effort", pa.array([0.5] * len(table)))),
            (nothing, declare_effort),
        )
    ],
    "column-derived": [Row(in_all_files(dropped("index")), (nothing,))],
    "column-doubled": [Row(in_file_of(3, doubled("action")), FETCH, "v2.1")],
    "episode-column": [Row(in_all_files(dropped("episode_index")), (fetch, write_column))],
    "dtype-mismatch": [
        Row("wrong-dtype", (correct_info,)),
        Row(in_file_of(3, stored_as("action", lambda n: [["a"] * 6] * n)), LEAVE_OUT, "v2.1"),
    ],
    "shape-mismatch": [
        Row("wrong-shape", (correct_info,)),
        Row(in_file_of(3, stored_as("action", lambda n: [[0.5] * 5] * n)), LEAVE_OUT, "v2.1"),
    ],
    "null-values": [
        Row("null-actions", (drop_action, *LEAVE_OUT)),
        Row(in_all_files(stored_as("action", lambda n: pa.nulls(n, pa.list_(pa.float32())))), (drop_action,)),
    ],
    "nan-values": [Row("nan-actions", (drop_action, *LEAVE_OUT))],
    "inf-values": [Row("inf-state", LEAVE_OUT)],
    "constant": [Row(in_all_files(stored_as("observation.state", lambda n: [[0.5] * 6] * n)), (nothing,))],
    "action-constant": [Row(in_all_files(stored_as("action", lambda n: [[0.5] * 6] * n)), (nothing,))],
    "task-mismatch": [Row("other-task-in-table", (nothing, correct_table))],
    "task-unresolved": [Row("unresolved-task", (add_task, *LEAVE_OUT))],
    "stats-unreadable": [
        Row("truncated-stats", (nothing, fetch)),
        Row(json_line("meta/episodes_stats.jsonl", stats=None), (nothing, fetch), "v2.1"),
    ],
    "video-unreadable": [
        Row("truncated-video", FETCH),
        Row("git-lfs-pointer", FETCH),
        Row(bytes_of(3, b"stts", b"zzzz"), FETCH, "v2.1"),
    ],
    "video-truncated": [Row("truncated-video-with-its-index-first", FETCH)],
    "video-unindexed": [Row(fragmented_video, (nothing, reshard), "v2.1", (needs_ffmpeg,))],
    "video-short": [Row("short-video", FETCH)],
    "video-long": [Row("long-video", (nothing,), "v2.1")],
    "video-start": [Row("start-behind-the-end", LEAVE_OUT)],
    "video-drift": [Row("drifted-from-timestamp", (nothing, reshard))],
    "video-span": [Row("wrong-to-timestamp", (nothing, reshard))],
    "video-overlap": [Row("overlapping-episodes", LEAVE_OUT)],
    "video-codec": [Row("wrong-codec", (nothing, correct_info))],
    "video-size": [Row("wrong-size", (correct_info,))],
    "video-fps": [Row("wrong-fps", (nothing,))],
    "video-gop": [Row(lambda root: None, (nothing, reshard), "long gop")],
    "camera-undecodable": [Row(as_depth, (name_cameras(TOP),))],
    "video-damaged": [Row("corrupted-bytes", FETCH)],
    "camera-black": [Row("black-camera", (name_cameras(WRIST), leave_black_out))],
    "image-undecodable": [Row(broken_image(b"no image"), LEAVE_OUT, "images")],
}

UNTRIED_KINDS = {
    "stats-missing": "LeRobot computes statistics, and is not part of the tests",
    "stats-mismatch": "LeRobot computes statistics, and is not part of the tests",
    "stats-flat": "tests/inprocess/test_normalise.py scales by the other modes",
    "video-crash": "tests/faults/test_poison.py has a video that ends its process",
    "member-unusable": "test_a_mixture_of_a_bad_dataset_goes_on_by_each_remedy",
    "mixture-misfit": "tests/inprocess/test_mixture_opening.py writes the lines that the message shows",
    "mixture-note": "there is nothing to do",
}

DEEP = {"video-damaged", "camera-black", "camera-undecodable", "image-undecodable"}


def rows_of(table):
    return [
        pytest.param(subject, row, id=f"{subject}-{number}", marks=row.marks)
        for subject, rows in table.items()
        for number, row in enumerate(rows)
    ]


def cures_of(row, made):
    """Do one remedy after the other, each to the dataset as it was damaged, and yield how it is read then."""
    damaged, told = shutil.copytree(made.root, made.spare / "damaged"), made.told
    for cure in row.cures:
        made.told = told
        try:
            yield cure(made)
        except BaseException as error:
            error.add_note(f"the remedy was {cure.__name__}")
            raise
        shutil.rmtree(made.root)
        shutil.copytree(damaged, made.root)


def test_every_kind_of_finding_has_its_remedy_tried_or_says_why_not():
    assert set(KIND_ROWS) | set(UNTRIED_KINDS) == set(KINDS)
    assert not set(KIND_ROWS) & set(UNTRIED_KINDS)


@pytest.mark.filterwarnings("ignore:.*leaving out", "ignore:.*keyframe every")
@pytest.mark.parametrize(("kind", "row"), rows_of(KIND_ROWS))
def test_the_remedy_of_a_finding_helps(bed, kind, row):
    made = bed(row.spec, row.damage)
    report = validate_dataset(str(made.root), where="process", deep=kind in DEEP)
    found = [finding for finding in report.findings if finding.kind == kind]
    assert found, report.tally
    made.told = "\n".join(f"{one.place.file}: {one.message}. {one.remedy}" for one in found)
    assert "raypipe info" not in made.told

    for cured in cures_of(row, made):
        read_epoch(made.root, cured)
        if cured.is_mended:
            again = validate_dataset(str(cured.root or made.root), where="process", deep=kind in DEEP)
            assert kind not in again.tally, again.findings
            assert [finding for finding in again.findings if finding.severity == "error"] == []


def opening(**options: Any) -> Callable[[Path], Any]:
    return lambda root: open_dataset(str(root), **options)


def open_root(root: Path) -> Any:
    return open_dataset(str(root))


def stats_of(root: Path) -> Any:
    return open_dataset(str(root)).stats


def sampling(**options: Any) -> Callable[[Path], Any]:
    def meet(root: Path) -> None:
        dataset = open_dataset(str(root), **options)
        for episode in dataset.meta.episodes.episode_index.tolist():
            dataset.sample_of(episode, 4)

    return meet


def loading(**parts: Any) -> Callable[[Path], Any]:
    return lambda root: read_epoch(root, Cured(parts=parts))


def resharding(root: Path) -> Any:
    done = run_program("reshard", root, root.with_name("copy"), "--where", "process")
    if done.returncode:
        raise RaypipeError(done.stderr)


def exclude(bed: Bed) -> Cured:
    """Leave out the episode that the message names, and the next one that then comes up."""
    assert "on_bad_episode='skip'" in bed.told or "max_bad_episodes" in bed.told
    numbers: set[int] = set()
    while named := re.search(r"selection=\{'exclude': \((\d+),\)\}", bed.told):
        numbers.add(int(named[1]))
        assert numbers <= set(bed.hit.episodes)
        try:
            read_epoch(bed.root, Cured(parts={"selection": {"exclude": tuple(numbers)}}))
            break
        except RaypipeError as error:
            bed.told = text_of(error)
    return Cured(parts={"selection": {"exclude": tuple(numbers) or bed.hit.episodes}}, is_mended=False)


def skip(bed: Bed) -> Cured:
    assert "on_bad_episode='skip'" in bed.told
    return Cured(parts={"on_bad_episode": "skip", "max_bad_episodes": 5}, is_mended=False)


def with_parts(says: str, **parts: Any) -> Cure:
    def cure(bed: Bed) -> Cured:
        assert says in bed.told, bed.told
        return Cured(parts=parts, is_mended=False)

    return cure


def with_options(says: str, **options: Any) -> Cure:
    def cure(bed: Bed) -> Cured:
        assert says in bed.told, bed.told
        sampling(**options)(bed.root)
        return Cured(is_mended=False)

    return cure


def run_again(*options: str) -> Cure:
    """Run reshard again to the same folder, with the options that the message gives."""

    def cure(bed: Bed) -> Cured:
        assert all(option in bed.told for option in options if option.startswith("--")), bed.told
        out, listed = bed.spare / "copy", bed.spare / "bad.txt"
        if "--exclude-file" in options:
            (command,) = set(re.findall(r"`raypipe (validate \S+ --exclude-file bad\.txt)`", bed.told))
            run_program(*command.replace("bad.txt", str(listed)).split())
        given = [str(listed) if option == "bad.txt" else option for option in options]
        done = run_program("reshard", bed.root, out, "--where", "process", *given)
        assert done.returncode == 0, done.stderr
        return Cured(root=out, parts={"check_finite": False})

    return cure


def take_episode_out(bed: Bed) -> Cured:
    assert "take their rows out of meta/episodes" in bed.told
    assert "lower total_episodes" in bed.told
    path = bed.root / "meta/episodes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["length"]))
    edit_info(bed.root, lambda info: info.update(total_episodes=4))
    return Cured()


def episode_stats(statistic: str, value: Any) -> Damaging:
    """Change a statistic of the action in the second episode."""

    def damage(root: Path) -> None:
        lines = [json.loads(line) for line in (root / PER_EPISODE).read_text().splitlines()]
        lines[1]["stats"]["action"][statistic] = value
        (root / PER_EPISODE).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return damage


def unknown_task(root: Path) -> Damaged:
    """Rows that do not say their task, and an episode table that names one that is not there."""
    in_all_files(dropped("task_index"))(root)
    edit_episodes(root, 2, {"tasks": ["juggle"]})
    return Damaged((2,), ())


def correct_episode_table(bed: Bed) -> Cured:
    assert "Correct the episode table" in bed.told
    edit_episodes(bed.root, 2, {"tasks": ["pick up the cube"]})
    return Cured()


def by_validate(bed: Bed) -> Cured:
    """Run the command that the message shows, and do what its first finding says."""
    (root,) = set(re.findall(r"`raypipe validate (\S+)`", bed.told))
    report = validate_dataset(root, where="process")
    bed.told = report.findings[0].remedy
    assert "correct meta/info.json" in bed.told
    return correct_info(bed)


def json_file(name: str, change: Callable[[Any], Any]) -> Damaging:
    return lambda root: (root / name).write_text(json.dumps(change(json.loads((root / name).read_text()))))


def episode_column(name: str, values: Callable[[list[Any]], pa.Array]) -> Damaging:
    def damage(root: Path) -> None:
        path = root / "meta/episodes/chunk-000/file-000.parquet"
        table = pq.read_table(path)
        new = values(table.column(name).to_pylist())
        pq.write_table(table.set_column(table.column_names.index(name), name, new), path)

    return damage


def tasks_without_text(root: Path) -> None:
    pq.write_table(pa.table({"task_index": [0, 1]}), root / "meta/tasks.parquet")


def lfs_pointers(root: Path) -> None:
    for path in root.glob("videos/**/*.mp4"):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4711\n")


def pull(bed: Bed) -> Cured:
    assert "git lfs pull" in bed.told
    shutil.copytree(bed.sound / "videos", bed.root / "videos", dirs_exist_ok=True)
    return Cured()


def remove_folder_name(bed: Bed) -> Cured:
    assert "Give the folder that holds meta/, data/ and videos/" in bed.told
    return Cured(is_mended=False)


def give_the_root(bed: Bed) -> Cured:
    assert "Give the root of a LeRobot dataset" in bed.told
    return Cured(is_mended=False)


@dataclass(frozen=True)
class Told(Row):
    """A row whose message comes from something that a user does."""

    meet: Callable[[Path], Any] = open_root


PER_EPISODE = "meta/episodes_stats.jsonl"
ZERO = {"length": 0}
BAD_ROWS = ("lost-rows", "frame-gap", "duplicated-rows", "null-actions", "missing-column", "unresolved-task")
BAD_FILES = tuple(
    name
    for name, damage in DAMAGES.items()
    if damage.pipeline == "bad_episodes" and name not in (*BAD_ROWS, "wrong-dtype", "wrong-shape", "swapped-videos")
    if not name.startswith(("nan-", "inf-", "wrong-"))
)

TOLD: dict[str, list[Told]] = {
    "no folder": [
        Told(lambda root: None, (give_the_root,), meet=lambda root: open_dataset(f"{root}/nothing")),
        Told(lambda root: None, (give_the_root,), meet=lambda root: validate_dataset(f"{root}/nothing")),
    ],
    "no dataset": [Told(lambda root: None, (remove_folder_name,), meet=lambda root: open_dataset(str(root / "data")))],
    "version": [
        Told("unknown-version", (set_info("codebase_version", r"raypipe reads .*(v3\.0)"),)),
        Told(lambda root: edit_info(root, lambda info: info.pop("codebase_version")), (correct_info,)),
    ],
    "info.json": [
        Told("missing-fps", (correct_info, fetch)),
        Told(info_edit(fps=-1), (correct_info,)),
        Told("broken-template", (correct_info,)),
        Told(info_edit(video_path="{camera}.mp4"), (correct_info,)),
        Told("missing-features", (correct_info,)),
        Told("no-dtype", (correct_info,)),
        Told(feature_edit("action", shape="wide"), (correct_info,)),
        Told(feature_edit(TOP, video_info="h264"), (correct_info,)),
        Told(feature_edit(TOP, info={"video.width": -3}), (correct_info,)),
        Told(info_edit(total_tasks="two"), (correct_info,)),
        Told(info_edit(chunks_size=-1), (correct_info,), "v2.1"),
        Told("truncated-info", (fetch,)),
        Told(json_file(INFO, lambda info: [info]), (fetch,)),
    ],
    "episode table": [
        Told("lost-episode-in-table", (fetch_meta, set_info("total_episodes", r"set total_episodes to (\d+)", int))),
        Told("missing-episode-table", (fetch_meta,)),
        Told("missing-episode-table", (fetch_meta,), "v2.1"),
        Told("truncated-episode-table", (fetch,)),
        Told("truncated-episode-table", (fetch,), "v2.1"),
        Told("doubled-episode-in-table", (fetch_meta,)),
        Told("doubled-episode-in-table", (fetch_meta,), "v2.1"),
        Told(episode_column("length", lambda old: pa.array([f"{n} frames" for n in old])), (fetch,)),
        Told(episode_column("length", lambda old: pa.array([None, *old[1:]])), (fetch_meta,)),
        Told(lambda root: edit_episodes(root, 2, ZERO), (take_episode_out,), "v2.1"),
        Told(json_line("meta/episodes.jsonl", length=7.5), (fetch_meta,), "v2.1"),
        Told(lambda root: (root / "meta/episodes.jsonl").write_text('{"episode_index": 0}'), (fetch,), "v2.1"),
        Told(lambda root: pq.write_table(pa.table({"length": [7]}), root / TABLE), (fetch,)),
        Told(lambda root: overwrite(root / TABLE, 4, 36), (fetch,)),
    ],
    "tasks": [
        Told("missing-tasks", (fetch, set_info("total_tasks", r"set total_tasks to (0)", int))),
        Told("missing-tasks", (fetch, set_info("total_tasks", r"set total_tasks to (0)", int)), "v2.1"),
        Told(lambda root: truncate(root / "meta/tasks.parquet", 0.5), (fetch,)),
        Told(tasks_without_text, (fetch,)),
        Told(json_line("meta/tasks.jsonl", task_index=None), (fetch,), "v2.1"),
    ],
    "statistics": [
        Told("truncated-stats", (fetch, nothing), meet=stats_of),
        Told(json_file("meta/stats.json", lambda stats: [stats]), (fetch, nothing), meet=stats_of),
        Told(json_file("meta/stats.json", lambda stats: {**stats, "action": 1}), (fetch,), meet=stats_of),
        Told(json_file("meta/stats.json", lambda stats: {**stats, "action": {"min": "a"}}), (fetch,), meet=stats_of),
        Told(lambda root: truncate(root / PER_EPISODE, 0.5), (fetch, nothing), "v2.1", meet=stats_of),
        Told(lambda root: (root / PER_EPISODE).write_text("\n"), (fetch,), "v2.1", meet=stats_of),
        Told(episode_stats("mean", [[0.5]]), (fetch, nothing), "v2.1", meet=stats_of),
        Told(episode_stats("count", [-4]), (fetch,), "v2.1", meet=stats_of),
        Told(episode_stats("count", [4, 4, 4]), (fetch,), "v2.1", meet=stats_of),
    ],
    "cameras": [
        Told("missing-camera", (fetch_cameras, name_cameras(TOP)), meet=opening(cameras=[TOP, WRIST])),
        Told(as_depth, (name_cameras(TOP),), meet=opening(cameras=[TOP, WRIST])),
        Told(lfs_pointers, (pull,), meet=sampling()),
    ],
    "timestamps": [
        Told(
            "drifted-timestamps",
            (
                with_options("Raise tolerance_s", timestamps="strict", tolerance_s=1.0),
                with_options("timestamps='position'", timestamps="position"),
            ),
            meet=sampling(timestamps="strict"),
        )
    ],
    "bad rows": [Told(name, (exclude,), meet=loading()) for name in BAD_ROWS],
    "bad files": [
        Told(name, (fetch, exclude), DAMAGES[name].versions[0], meet=loading())
        for name in BAD_FILES
        if "start" not in name
    ],
    "bad samples": [Told("truncated-video", (fetch, exclude, skip), meet=sampling())],
    "video of another size": [
        Told("wrong-size", (correct_info, with_parts("decode={'resize'", decode={"resize": (32, 48)})), meet=loading())
    ],
    "values": [
        Told("nan-actions", (exclude, skip, with_parts("check_finite=False", check_finite=False)), meet=loading()),
        Told("wrong-dtype", (correct_info, drop_action), meet=loading()),
        Told("wrong-shape", (correct_info,), meet=loading()),
        Told("null-actions", (drop_action, exclude), meet=loading()),
        Told(
            in_file_of(3, stored_as("action", lambda n: [["a"] * 6] * n)), (drop_action, exclude), "v2.1", (), loading()
        ),
        Told(in_all_files(dropped("episode_index")), (write_column,), meet=loading()),
        Told(in_file_of(3, doubled("action")), (fetch, exclude), "v2.1", meet=loading()),
        Told(broken_image(b"no image"), (exclude, skip), "images", meet=loading()),
        Told(broken_image(None), (exclude,), "images", meet=loading()),
        Told(unknown_task, (correct_episode_table, exclude), meet=loading()),
        Told("start-behind-the-end", (exclude,), meet=loading()),
        Told(bytes_of(3, b"avc1", b"zzzz"), (fetch, exclude), "v2.1", meet=loading()),
        Told(bytes_of(3, b"stts", b"zzzz"), (fetch, exclude), "v2.1", meet=loading()),
        Told("wrong-shape", (by_validate,), meet=loading(on_bad_episode="skip", max_bad_episodes=5)),
    ],
    "too many bad episodes": [
        Told(
            "lost-rows",
            (with_parts("raise max_bad_episodes", on_bad_episode="skip", max_bad_episodes=1), exclude),
            meet=loading(on_bad_episode="skip", max_bad_episodes=0),
        )
    ],
    "reshard": [
        Told("missing-camera", (run_again("--drop-camera", WRIST),), meet=resharding),
        Told("lost-rows", (run_again("--exclude-file", "bad.txt"),), meet=resharding),
        Told("zero-byte-parquet", (run_again("--exclude-file", "bad.txt"),), meet=resharding),
        Told("truncated-video", (run_again("--exclude-file", "bad.txt"),), meet=resharding),
        Told("truncated-video-with-its-index-first", (run_again("--exclude-file", "bad.txt"),), meet=resharding),
        Told(json_line(PER_EPISODE, stats=None), (fetch,), "v2.1", meet=resharding),
        Told("unresolved-task", (run_again("--exclude", "2"),), meet=resharding),
        Told("unresolved-task", (add_task,), meet=resharding),
        Told("nan-actions", (run_again("--exclude-file", "bad.txt"),), meet=resharding),
        Told("nan-actions", (run_again("--allow-findings"),), meet=resharding),
        Told(
            in_file_of(3, lambda table: table.append_column("effort", pa.array([0.5] * len(table)))),
            (run_again("--exclude", "3"),),
            "v2.1",
            meet=resharding,
        ),
        Told(
            in_file_of(3, stored_as("action", lambda n: [["a"] * 6] * n)),
            (run_again("--exclude", "3"),),
            "v2.1",
            meet=resharding,
        ),
    ],
}


@pytest.mark.filterwarnings("ignore:.*leaving out", "ignore:rank . left out", "ignore:.*keyframe every")
@pytest.mark.parametrize(("subject", "row"), rows_of(TOLD))
def test_the_remedy_of_a_message_helps(bed, subject, row):
    made = bed(row.spec, row.damage)
    with pytest.raises(RaypipeError) as raised:
        row.meet(made.root)
    made.told = text_of(raised.value)

    for cured in cures_of(row, made):
        read_epoch(made.root, cured)
        if cured.is_mended and cured.root is None:
            row.meet(made.root)


WARNED: dict[str, list[Row]] = {
    "camera without files": [Row("missing-camera", (name_cameras(TOP),))],
    "videos elsewhere": [Row(moved("videos"), (set_info("video_path", r"'(videos-moved/.*?)' gives all"),))],
    "depth video": [Row(as_depth, (name_cameras(TOP),))],
    "feature without a column": [Row(feature_edit("effort", dtype="float32", shape=[6]), (take_out_of_info,))],
}


@pytest.mark.parametrize(("subject", "row"), rows_of(WARNED))
def test_the_remedy_of_a_warning_silences_it(bed, subject, row):
    made = bed(row.spec, row.damage)
    with pytest.warns(UserWarning, match="leaving out") as warned:
        open_dataset(str(made.root))[0]
    made.told = "\n".join(str(one.message) for one in warned)

    for cured in cures_of(row, made):
        read_epoch(made.root, cured, is_quiet=True)


@pytest.mark.parametrize("name", [name for name, damage in DAMAGES.items() if damage.pipeline != "harmless"])
def test_info_leads_to_validate_and_validate_leads_out(bed, name):
    damage = DAMAGES[name]
    made = bed(damage.versions[0], name)

    shown = run_program("info", made.root)
    report = validate_dataset(str(made.root), where="process", deep=damage.needs_deep)

    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert errors
    assert not [one for one in errors if "raypipe info" in f"{one.message} {one.remedy}"]
    assert "raypipe info" not in shown.stderr
    if shown.returncode:
        assert re.search(r"raypipe validate|[Ff]etch|[Cc]orrect|set |rewrite", shown.stderr), shown.stderr


@pytest.fixture
def members(sound, tmp_path):
    """A sound dataset, and one with a broken table."""
    bad = shutil.copytree(sound("v3.0"), tmp_path / "bad")
    DAMAGES["truncated-episode-table"].apply(bad)
    return [{"root": str(sound("v2.1")), "name": "good"}, {"root": str(bad), "name": "bad"}]


def test_a_mixture_of_a_bad_dataset_goes_on_by_each_remedy(members, sound):
    with pytest.raises(RaypipeError) as raised:
        Mixture(members)
    told = text_of(raised.value)
    (root,) = {one["root"] for one in members if one["name"] == "bad"}
    assert all(words in told for words in ("`raypipe validate ROOT`", "weight 0", "on_bad_dataset: skip")), told

    left = Mixture([members[0], {**members[1], "weight": 0}])
    with pytest.warns(UserWarning, match="1 of 2 datasets of the mixture cannot be used"):
        skipped = Mixture(members, on_bad_dataset="skip")
    found = validate_dataset(root, where="process").findings[0]
    made = Bed(Path(root), sound("v3.0"), Path(root), told=f"{found.place.file} {found.message} {found.remedy}")
    fetch_meta(made)
    mended = Mixture(members)

    assert [left.names, skipped.names, mended.names] == [("good",), ("good",), ("good", "bad")]


def test_a_bad_episode_of_a_mixture_is_left_out_where_its_dataset_stands(sound, tmp_path):
    bad = shutil.copytree(sound("v3.0"), tmp_path / "bad")
    DAMAGES["lost-rows"].apply(bad)
    members = [str(sound("v2.1")), str(bad)]
    with pytest.raises(RaypipeError, match=r"selection=\{'exclude': \(2,\)\}"):
        list(local_loader(Pipeline(Mixture(members), batch_size=8, seed=0)))
    with pytest.raises(ConfigError, match="give each member its own selection"):
        Pipeline(Mixture(members), batch_size=8, seed=0, selection={"exclude": (2,)})

    mixture = Mixture([members[0], {"root": members[1], "selection": {"exclude": (2,)}}])

    assert list(local_loader(Pipeline(mixture, batch_size=8, seed=0)))


def test_spans_whose_images_are_no_bytes_go_on_without_the_feature(sound, tmp_path):
    root = shutil.copytree(sound("images"), tmp_path / "dataset")
    edit_info(root, lambda info: info.update(data_path="data/{episode_index}.parquet"))
    rows = pq.read_table(root / "data/chunk-000/file-000.parquet")
    for episode, change in enumerate((None, stored_as(TOP, lambda n: [[1, 2]] * n))):
        mine = rows.filter(pa.array(rows.column("episode_index").to_numpy() == episode))
        pq.write_table(change(mine) if change else mine, root / f"data/{episode}.parquet")
    spans = [SpanRequest(epoch=0, dataset=0, lap=0, episode=i, start=0, stop=3, lane=0, place=i) for i in range(2)]

    def read(**parts):
        context = Pipeline(open_dataset(str(root)), batch_size=2, seed=0, **parts).config.block_context()
        return [span_columns(context, block) for block in open_block(context, read_block(context, spans))]

    with pytest.raises(RaypipeError, match="there are no image bytes"):
        read()
    assert [len(columns["action"]) for columns in read(features=["action"])] == [3, 3]


def test_a_number_that_a_mixture_cannot_hold_goes_on_without_it(tmp_path):
    for name, value in (("whole", 2**53 + 1), ("half", 0.5)):
        root = write_dataset(tmp_path / name, rows_spec((5, 4)))
        feature_edit("count", dtype="float32" if name == "half" else "int64", shape=[1], names=None)(root)
        in_all_files(lambda table, value=value: table.append_column("count", pa.array([value] * len(table))))(root)
    whole, half = str(tmp_path / "whole"), str(tmp_path / "half")

    with pytest.raises(RaypipeError, match="Rename or drop it in one of them"):
        list(local_loader(Pipeline(Mixture([whole, half]), batch_size=4, seed=0)))

    for change in ({"rename": {"count": "tally"}}, {"drop": ["count"]}):
        mixture = Mixture([{"root": whole, **change}, half], on_missing="fill")
        assert list(local_loader(Pipeline(mixture, batch_size=4, seed=0)))
