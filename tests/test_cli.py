import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import typer
from program import PROGRAM, run_program

import raypipe
from raypipe.cli import app
from raypipe.decode.frames import FrameDecoder
from raypipe.decode.kept import KeepFolder
from raypipe.decode.spec import DecodeSpec, KeepSpec
from raypipe.testing import SynthSpec, write_dataset


def run(*arguments):
    return run_program(*arguments)


def test_installed_program_runs_and_ends_with_an_exit_code(tmp_path):
    done = subprocess.run([PROGRAM, "info", tmp_path], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith("raypipe: no LeRobot dataset")


def test_help_lists_every_command_with_a_sentence():
    helped = run("--help")

    assert helped.returncode == 0
    for command in ("info", "plan", "synth", "validate", "reshard", "account", "where", "bench", "kept"):
        assert re.search(rf"^  {command}\s+\w+.*\.$", helped.stdout, flags=re.MULTILINE)
    assert run().stdout == helped.stdout


@pytest.mark.parametrize(
    "command", ["info", "plan", "synth", "validate", "reshard", "account", "where", "bench", "kept"]
)
def test_every_command_explains_its_options(command):
    helped = run(command, "--help")

    assert helped.returncode == 0
    assert "Usage: raypipe" in helped.stdout


def test_version_is_the_packages():
    assert run("--version").stdout == f"raypipe {raypipe.__version__}\n"


def test_info_json_has_the_promised_keys(tiny_dataset):
    printed = json.loads(run("info", tiny_dataset, "--json").stdout)

    assert printed["version"] == "v3.0"
    assert (printed["episodes"], printed["frames"], printed["fps"]) == (5, 34, 10)
    assert printed["cameras"] == ["observation.images.top", "observation.images.wrist"]
    assert printed["missing_cameras"] == []
    assert printed["tasks"] == ["pick up the cube", "open the drawer"]
    assert printed["row_groups"] == "per-episode"
    assert len(printed["fingerprint"]) == 32


def json_commands():
    group = typer.main.get_command(app)
    return {name: one for name, one in group.commands.items() if any("--json" in it.opts for it in one.params)}


def test_json_is_the_same_option_in_every_command():
    for name, command in json_commands().items():
        options = {opt: option for option in command.params for opt in option.opts}
        assert options["--json"].is_flag, name
        assert not options["--json-file"].is_flag, name

    assert len(json_commands()) == 10


CALLS = {
    "info": ["info", "{tiny}"],
    "plan": ["plan", "{tiny}", "--world-size", "2", "--batch-size", "4"],
    "validate": ["validate", "{tiny}"],
    "reshard": ["reshard", "{tiny}", "{tmp}/copy"],
    "kept": ["kept", "--folder", "{tmp}/kept"],
    "where": ["where", "1", "0", "--root", "{tiny}", "--batch-size", "4"],
    "bench": ["bench", "compare", "{tmp}/a.json", "{tmp}/a.json"],
}
"""Those that need neither a run nor a server, whose own tests call them with ``--json``."""


@pytest.mark.parametrize("command", CALLS)
def test_json_is_all_of_standard_output_and_of_its_file(tiny_dataset, tmp_path, command):
    (tmp_path / "a.json").write_text(
        json.dumps({"raypipe_bench": 2, "machine": {}, "conditions": {}, "floor": {}, "rows": []})
    )
    call = [argument.format(tiny=tiny_dataset, tmp=tmp_path) for argument in CALLS[command]]

    printed = run(*call, "--json", "--json-file", tmp_path / "told.json")
    shown = run(*call, "--json-file", tmp_path / "again.json")

    assert (printed.returncode, shown.returncode) == (0, 0), printed.stderr + shown.stderr
    assert printed.stdout == (tmp_path / "told.json").read_text()
    assert json.loads(printed.stdout).keys() == json.loads((tmp_path / "again.json").read_text()).keys()
    assert shown.stdout
    assert not shown.stdout.startswith("{")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_done(tiny_dataset, tmp_path):
    done = run("reshard", tiny_dataset, tmp_path / "copy", "--json-file", tmp_path / "no" / "told.json")

    assert done.returncode == 2
    assert "there is no folder" in done.stderr
    assert not (tmp_path / "copy").exists()


def test_info_prints_a_table_that_a_person_can_read(tiny_dataset):
    printed = run("info", tiny_dataset).stdout

    assert "5 (1 to 12 frames each)" in printed
    assert "observation.images.top  64x64 h264" in printed


@pytest.mark.parametrize("version", ["v3.0", "v2.1", "v2.0"])
def test_synth_writes_a_dataset_that_info_reads(tmp_path, version):
    options = ("--version", version, "--episodes", 3, "--frames", 9, "--cameras", 1, "--size", "48x32", "--fps", 5)
    written = run("synth", tmp_path / "made", *options)

    info = json.loads(run("info", tmp_path / "made", "--json").stdout)

    assert written.returncode == 0, written.stderr
    assert (info["version"], info["episodes"], info["fps"]) == (version, 3, 5)
    assert next(iter(info["camera_sizes"].values())).startswith("48x32 ")
    assert 6 * 3 <= info["frames"] <= 12 * 3


BAD_CALLS = {
    "missing root": (["info", "{tmp}/nothing"], "no such folder"),
    "no dataset": (["info", "{tmp}"], "no LeRobot dataset"),
    "folder in use": (["synth", "{tiny}"], "not an empty folder"),
    "odd size": (["synth", "{tmp}/x", "--size", "big"], "'big'"),
    "unknown version": (["synth", "{tmp}/x", "--version", "v9"], "'v9'"),
    "unknown codec": (["synth", "{tmp}/x", "--codec", "mjpeg"], "'mjpeg'"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_one_paragraph_and_exit_code_2(tmp_path, tiny_dataset, case):
    arguments, message = BAD_CALLS[case]

    done = run(*(argument.format(tmp=tmp_path, tiny=tiny_dataset) for argument in arguments))

    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("raypipe: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"
ROWS = "data/chunk-000/file-000.parquet"

DAMAGES = {
    "truncated json": (lambda root: truncate(root / "meta/info.json"), "info.json"),
    "truncated rows": (lambda root: truncate(root / ROWS), ROWS),
    "missing rows": (lambda root: (root / ROWS).unlink(), ROWS),
    "truncated video": (lambda root: truncate(root / VIDEO), VIDEO),
    "missing video": (lambda root: (root / VIDEO).unlink(), VIDEO),
    "truncated tasks": (lambda root: truncate(root / "meta/tasks.parquet"), "tasks.parquet"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_info_of_a_damaged_dataset_names_the_file(tmp_path, tiny_dataset, case):
    damage, name = DAMAGES[case]
    shutil.copytree(tiny_dataset, tmp_path / "copy")
    damage(tmp_path / "copy")

    done = run("info", tmp_path / "copy")

    assert done.returncode == 2
    told, *remedy = done.stderr.strip().splitlines()
    assert name in told
    # Where the metadata can be read, there may be more that is wrong.
    assert len(remedy) == name.startswith(("data/", "videos/"))
    assert all(f"raypipe validate {tmp_path / 'copy'}" in line for line in remedy)


def test_brackets_in_names_are_printed_as_they_are(tmp_path):
    spec = SynthSpec(cameras=(), lengths=(2,), tasks=("put [left] cup [/b]", "b"))
    root = write_dataset(tmp_path / "a[bold]b", spec)

    printed = run("info", root).stdout

    assert "put [left] cup [/b]" in printed
    assert "a[bold]b" in printed


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path):
    for arguments in (["--debug", "info", tmp_path], ["info", tmp_path, "--debug"]):
        done = run(*arguments)

        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert "raypipe: no LeRobot dataset" in done.stderr


def test_an_unknown_command_or_option_is_exit_code_2(tmp_path):
    assert run("inof", tmp_path).returncode == 2
    assert run("info", tmp_path, "--jsno").returncode == 2


def test_kept_shows_what_is_kept_and_clears_it(tiny_dataset, tmp_path):
    meta = raypipe.open_dataset(tiny_dataset).meta
    camera, folder = next(iter(meta.episodes.videos)), tmp_path / "kept"
    decoder = FrameDecoder(meta, DecodeSpec(), folder=KeepFolder(KeepSpec(folder=str(folder)), 1))
    decoder.decode_video(0, camera, np.arange(3))

    shown = run_program("kept", "--folder", folder)
    (listed,) = json.loads(run_program("kept", "--folder", folder, "--json").stdout)["datasets"]
    cleared = run_program("kept", "--folder", folder, "--clear")

    assert f"{meta.root}: 3 frames of {camera}" in shown.stdout
    assert (listed["num_frames"], listed["num_files"], listed["root"]) == (3, 1, str(meta.root))
    assert cleared.stdout.endswith(f"removed 0.00 GB in {folder / 'frames.1'}\n")
    assert run_program("kept", "--folder", folder).stdout == f"kept 0.00 GB in {folder / 'frames.1'}\n"
    assert not any(path.is_file() for path in folder.rglob("*"))
