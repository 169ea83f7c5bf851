"""The commands on a mixture file: what a person sees, what a program reads, and the exit codes."""

import io
import json
import shutil

import pytest
import ray
from damages import TOP, WRIST
from program import run_program
from ray_session import end_ray
from rich.console import Console

from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.views import describe_mixture, mixture_table

LENGTHS = (7, 9, 4)
ONE = "on_missing: fill\nresize: [32, 40]\n"


def camera(name, height=32, width=48):
    return CameraSpec(name=name, height=height, width=width)


SPECS = {
    "aloha": SynthSpec(
        version="v2.1", lengths=LENGTHS, fps=50, state_dim=14, action_dim=14, robot_type="aloha",
        cameras=(camera(TOP), camera(WRIST)),
    ),
    "so101": SynthSpec(lengths=LENGTHS, robot_type="so101", cameras=(camera(WRIST, 64, 64),)),
    "piper": SynthSpec(
        version="v2.0", lengths=(30,), fps=30, action_dim=7, robot_type="piper", cameras=(camera(TOP),),
        extra_features=("next.done",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """A folder with three unlike datasets; put mixture files beside them, and change nothing."""
    folder = tmp_path_factory.mktemp("unlike")
    for name, spec in SPECS.items():
        write_dataset(folder / name, spec)
    return folder


@pytest.fixture
def mixture(datasets):
    """Write a mixture file beside the datasets, and return its path."""
    written = []

    def write(text, name="mixture.yaml"):
        written.append(datasets / name)
        written[-1].write_text(text)
        return written[-1]

    yield write
    for path in written:
        path.unlink(missing_ok=True)


WEIGHTED = f"""{ONE}frames_per_epoch: 100
datasets:
  - {{root: aloha, weight: 2, selection: {{episodes: [0, 1], drop_last_frames: 1}}}}
  - so101
  - {{root: piper, drop: [next.done], robot_type: arm}}
"""


def test_info_json_has_every_member_with_its_share(mixture):
    printed = json.loads(run_program("info", mixture(WEIGHTED), "--json").stdout)

    assert (printed["datasets"], printed["episodes"], printed["frames"]) == (3, 7, 70)
    assert printed["robots"] == {"aloha": 1, "so101": 1, "arm": 1}
    assert printed["frames_per_epoch"] == 100
    assert printed["cameras"] == {TOP: "40x32", WRIST: "40x32"}
    assert printed["features"]["action"] == "float32 [14]"
    assert printed["missing"] == {TOP: 1, WRIST: 1}
    aloha, so101, piper = printed["members"]
    assert (aloha["selected_episodes"], aloha["selected_frames"], aloha["frames"]) == (2, 14, 20)
    assert (aloha["share"], aloha["frames_per_epoch"]) == (0.5, 50)
    assert aloha["passes_per_epoch"] == pytest.approx(50 / 14)
    assert so101["cameras"] == {WRIST: WRIST}
    assert piper["widths"] == {"observation.state": 6, "action": 7}
    assert (piper["version"], piper["fps"], piper["weight"]) == ("v2.0", 30, 1)
    assert {"name": "", "text": f"'{TOP}' is filled with zeros and marked there: missing in so101"} in printed["notes"]
    assert printed["bad"] == []


def row_of(printed, name):
    """Return the cells of the member's row, with one space between them."""
    return next(" ".join(line.split()) for line in printed.splitlines() if line.startswith(f"{name} "))


def test_info_prints_a_summary_and_a_row_per_member(mixture):
    printed = run_program("info", mixture(WEIGHTED)).stdout

    assert f"{TOP}  40x32  (zeros for 1 of 3 datasets, marked in {TOP}_is_missing)" in printed
    assert "100 frames, 1.56 passes over the selected frames; shares as given" in printed
    # dataset, robot, format, fps, episodes, frames, weight, share, frames of an epoch, passes, cameras, widths
    assert row_of(printed, "so101") == "so101 so101 v3.0 10 3 20 1 25.0% 25 1.25 wrist 6, 6"
    assert row_of(printed, "aloha") == "aloha aloha v2.1 50 2 of 3 14 of 20 2 50.0% 50 3.57 all 14, 14"
    assert "'action' is padded to 14 numbers: 6 in so101; 7 in piper" in printed


@pytest.mark.parametrize("width", [70, 90, 200])
def test_no_column_is_cut_off_in_a_narrow_terminal(mixture, width):
    console = Console(width=width, file=io.StringIO())

    console.print(mixture_table(describe_mixture(str(mixture(WEIGHTED)))))

    printed = console.file.getvalue()
    for title in ("robot", "format", "fps", "weight", "share", "per epoch", "passes", "cameras", "state, action"):
        assert f"{title} " in printed.replace("\n", " \n")
    rows = [line for line in printed.splitlines() if line.startswith("so101 ")]
    assert len(rows) == (1 if width == 200 else 2)
    assert "1.25" in rows[-1]


def test_info_of_a_toml_file_is_that_of_the_same_yaml_file(mixture):
    text = 'on_missing = "drop"\nweights = "sqrt"\ndatasets = ["aloha", "so101", "piper"]\n'
    toml = json.loads(run_program("info", mixture(text, "mixture.toml"), "--json").stdout)
    text = "on_missing: drop\nweights: sqrt\ndatasets: [aloha, so101, piper]\n"
    yaml = json.loads(run_program("info", mixture(text), "--json").stdout)

    assert toml.pop("mixture") != yaml.pop("mixture")
    assert toml == yaml
    assert (toml["weights"], toml["cameras"]) == ("by the square root of frames", {})


def test_info_tells_of_members_that_are_skipped_or_have_no_weight(mixture):
    text = f"{ONE}on_bad_dataset: skip\ndatasets: [aloha, so101, gone, {{root: piper, weight: 0}}]\n"

    done = run_program("info", mixture(text))
    printed = json.loads(run_program("info", mixture(text), "--json").stdout)

    assert (done.returncode, done.stderr) == (0, "")
    assert "2, and 1 skipped" in done.stdout
    assert "piper: left out: its weight is 0" in done.stdout
    assert [(bad["name"], bad["error"][:14]) for bad in printed["bad"]] == [("gone", "no such folder")]


# what the file says, what is to be seen
WRONG = {
    "no file": ("", "cannot read the mixture file"),
    "unknown key": ("dataset: [aloha]", "did you mean 'datasets'"),
    "missing members": ("datasets: [aloha, gone, lost]", "2 of 3 datasets of the mixture cannot be used; 1 can"),
    "no fit": ("datasets: [aloha, so101]", "who has what"),
    "no weight": ("datasets: [{root: aloha, weight: 0}]", "every member of the mixture has weight 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mixture_that_cannot_be_is_told_and_exit_code_2(mixture, case):
    text, message = WRONG[case]
    path = mixture(text)
    if not text:
        path.unlink()

    done = run_program("info", path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("raypipe: ")
    assert message in done.stderr


def test_many_members_are_a_table_of_40_rows_and_all_in_json(tmp_path):
    one = write_dataset(tmp_path / "set-0", SynthSpec(cameras=(), lengths=(3,)))
    for number in range(1, 45):
        shutil.copytree(one, tmp_path / f"set-{number}")
    path = tmp_path / "mixture.yaml"
    listed = ", ".join(f"[set-{number}, {100 - number}]" for number in range(45))
    path.write_text(f"frames_per_epoch: 3510\ndatasets: [{listed}]\n")

    printed = run_program("info", path).stdout
    members = json.loads(run_program("info", path, "--json").stdout)["members"]

    assert [line.split()[0] for line in printed.splitlines() if line.startswith("set-")] == [
        f"set-{number}" for number in range(39)
    ]
    # The last six have weights 61 to 56 of 3510, and three frames each.
    assert row_of(printed, "6") == "6 others raypipe_synth v3.0 10 6 18 351 10.0% 351 19.5"
    assert len(members) == 45
    assert sum(member["frames_per_epoch"] for member in members) == 3510


def test_names_of_members_are_printed_as_they_are(tmp_path):
    root = write_dataset(tmp_path / "a[bold]b", SynthSpec(cameras=(), lengths=(2,), robot_type="[red]arm"))
    (tmp_path / "mixture.yaml").write_text("datasets: ['a[bold]b', {root: 'a[bold]b', name: '[/b]'}]\n")

    info = run_program("info", tmp_path / "mixture.yaml")
    checked = run_program("validate", tmp_path / "mixture.yaml", "--where", "process")

    assert row_of(info.stdout, "a[bold]b").startswith("a[bold]b [red]arm v3.0 ")
    assert row_of(checked.stdout, "[/b]") == row_of(checked.stdout, "a[bold]b").replace("a[bold]b", "[/b]")
    assert describe_mixture(str(tmp_path / "mixture.yaml")).members[0].root == str(root)


def test_no_colons_in_the_name_of_a_member_become_a_picture(tmp_path):
    write_dataset(tmp_path / "arm", SynthSpec(cameras=(), lengths=(2,)))
    (tmp_path / "mixture.yaml").write_text("datasets: [{root: arm, name: 'a:smile:b'}]\n")

    for command in ("info", "stats"):
        assert "a:smile:b" in run_program(command, tmp_path / "mixture.yaml").stdout


def test_reshard_of_a_mixture_says_to_do_it_one_by_one(mixture, tmp_path):
    done = run_program("reshard", mixture(WEIGHTED), tmp_path / "out")

    assert done.returncode == 2
    assert "reshard its members one by one" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["info", "plan", "validate"])
def test_help_says_that_a_mixture_file_is_accepted(command):
    helped = " ".join(run_program(command, "--help").stdout.split())

    assert "a mixture file (.yaml, .yml, .toml)" in helped


@pytest.fixture
def ray_starts(monkeypatch):
    """The arguments of every start of Ray during the test, which is a small local one."""
    starts = []
    start = ray.init

    def init(**options):
        starts.append(options)
        return start(**options, address="local", num_cpus=2, include_dashboard=False)

    end_ray()
    monkeypatch.setattr(ray, "init", init)
    yield starts
    end_ray()


@pytest.mark.timeout(180)
def test_members_are_validated_on_one_ray_and_as_in_one_process(mixture, ray_starts):
    path = mixture(f"{ONE}datasets: [aloha, so101, piper, gone]\n")

    here = json.loads(run_program("validate", path, "--where", "process", "--json").stdout)
    assert ray_starts == []
    on_ray = json.loads(run_program("validate", path, "--where", "ray", "--json").stdout)

    assert len(ray_starts) == 1
    assert not ray.is_initialized()
    for told in (here, on_ray, *here["datasets"].values(), *on_ray["datasets"].values()):
        del told["elapsed_s"]
    assert on_ray == here
    assert list(on_ray["datasets"]) == ["aloha", "so101", "piper"]
