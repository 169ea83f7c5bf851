"""validate on a mixture: that its datasets open and fit together, then every one of them, whatever the others are."""

import json
import shutil
import tomllib

import pytest
import yaml
from damages import DAMAGES, TOP, WRIST, truncate
from test_validate_outputs import PageParser
from typer.testing import CliRunner

from raypipe.cli import app
from raypipe.errors import ConfigError
from raypipe.mixture import Mixture
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate import format_mixture_exclude_file, validate_dataset, validate_mixture

LENGTHS = (7, 9, 12, 9, 8)
ONE = "on_missing: fill\nresize: [32, 40]\n"


def cameras(*names, height=32, width=48):
    return tuple(CameraSpec(name=name, height=height, width=width) for name in names)


SPECS = {
    "aloha": SynthSpec(version="v2.1", lengths=LENGTHS, action_dim=14, cameras=cameras(TOP, WRIST)),
    "so101": SynthSpec(lengths=LENGTHS, fps=30, cameras=cameras(WRIST, height=64, width=64)),
    "piper": SynthSpec(version="v2.0", lengths=LENGTHS, action_dim=7, cameras=cameras(TOP)),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with three unlike sound datasets; copy it."""
    folder = tmp_path_factory.mktemp("members")
    for name, spec in SPECS.items():
        write_dataset(folder / name, spec)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    """A copy of the datasets, to be damaged, and to put a mixture file into."""
    return shutil.copytree(sound, tmp_path / "members")


def write(folder, text, name="mixture.yaml"):
    (folder / name).write_text(text)
    return folder / name


def run(*arguments):
    return CliRunner().invoke(app, ["validate", *map(str, arguments), "--where", "process"])


def check(path, **options):
    return validate_mixture(str(path), where="process", **options)


def test_sound_datasets_that_fit_have_notes_only(folder):
    path = write(folder, f"{ONE}datasets: [aloha, so101, piper]\n")

    report = check(path)
    printed = run(path)

    assert (report.severity, printed.exit_code) == ("note", 0)
    assert {finding.kind for finding in report.all_findings} == {"mixture-note"}
    assert "'action' is padded to 14 numbers: 6 in so101; 7 in piper" in [found.message for found in report.findings]
    assert list(report.reports) == ["aloha", "so101", "piper"]
    assert (report.counts.episodes, report.counts.frames) == (15, 135)


def test_datasets_that_are_alike_have_nothing_wrong(folder):
    printed = run(write(folder, "datasets: {one: {root: aloha}, two: {root: aloha}}\n"))

    assert printed.exit_code == 0
    assert "nothing is wrong with them" in printed.stdout
    # One dataset is looked at once, whoever has it.
    assert "5 episodes, 45 frames" in printed.stdout


def test_every_dataset_is_reported_as_if_it_stood_alone(folder):
    DAMAGES["nan-actions"].apply(folder / "aloha")
    DAMAGES["short-video"].apply(folder / "piper")
    path = write(folder, f"{ONE}datasets: [aloha, so101, {{root: piper, selection: {{episodes: [0]}}}}]\n")

    report = check(path, deep=True)

    assert (report.exit_code, run(path).exit_code) == (2, 2)
    assert report.counts.decoded_frames > 150
    for name, one in report.reports.items():
        alone = validate_dataset(str(folder / name), where="process", deep=True)
        assert one.findings == alone.findings
    assert {name: one.severity for name, one in report.reports.items()} == {
        "aloha": "error",
        "so101": "none",
        "piper": "error",
    }


def test_a_broken_member_and_one_that_is_not_there_do_not_stop_the_others(folder):
    truncate(folder / "so101/meta/info.json", 0.5)
    path = write(folder, f"{ONE}datasets: [aloha, so101, gone, piper]\n")

    printed = run(path)
    told = json.loads(run(path, "--json").stdout)

    assert printed.exit_code == 2
    unusable = [found for found in told["findings"] if found["kind"] == "member-unusable"]
    assert [found["place"]["dataset"] for found in unusable] == ["gone", "so101"]
    assert [found["severity"] for found in unusable] == ["error", "error"]
    assert "not JSON" in unusable[1]["message"]
    # What is there is looked at all the same: the broken one salvaged, the others as ever.
    assert list(told["datasets"]) == ["aloha", "so101", "piper"]
    assert told["datasets"]["so101"]["tally"]["info-unreadable"] == 1
    assert told["datasets"]["aloha"]["severity"] == "none"
    assert "3 checked, 1 could not be" in printed.stdout
    assert "not checked" in printed.stdout


def test_a_member_that_the_mixture_skips_is_a_warning(folder):
    path = write(folder, f"{ONE}on_bad_dataset: skip\ndatasets: [aloha, gone]\n")

    report = check(path)

    assert [(found.kind, found.severity) for found in report.findings if found.place.dataset] == [
        ("member-unusable", "warning")
    ]
    assert report.exit_code == 1


def test_members_that_are_all_unusable_are_one_finding_with_all_of_them(folder):
    path = write(folder, "datasets: [gone, {root: aloha, cameras: {x: observation.images.side}}]\n")

    report = check(path)

    together = next(found for found in report.findings if not found.place.dataset)
    assert together.kind == "member-unusable"
    assert "2 of 2 datasets" in together.message
    assert "has no camera 'observation.images.side'" in together.message
    assert [found for found in report.findings if found.place.dataset] == []
    assert list(report.reports) == ["aloha"]


def test_a_member_that_asks_for_the_impossible_does_not_hide_how_the_others_fit(folder):
    odd = "{root: piper, cameras: {x: observation.images.side}}"
    path = write(folder, f"on_bad_dataset: skip\ndatasets: [aloha, {odd}, so101]\n")

    report = check(path)

    assert [(found.kind, found.severity) for found in report.findings] == [
        ("member-unusable", "error"),
        ("mixture-misfit", "error"),
    ]
    assert "has no camera 'observation.images.side'" in report.findings[0].message
    assert "aloha" in report.findings[1].message
    assert "piper" not in report.findings[1].message
    assert list(report.reports) == ["aloha", "piper", "so101"]


# what the file says, what the finding says
MISFITS = {
    "features": ("datasets: [aloha, so101]", "who has what"),
    "no frames": (
        f"{ONE}datasets: [so101, {{root: piper, weight: 1, selection: {{exclude: [0, 1, 2, 3, 4]}}}}]",
        "'piper'",
    ),
    "share of nothing": (f"{ONE}frames_per_epoch: 1\ndatasets: [so101, piper]", "would give 0 frames"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_members_that_cannot_be_one_are_a_finding_and_are_checked(folder, case):
    text, message = MISFITS[case]
    path = write(folder, text)

    report = check(path)
    printed = run(path)

    assert [(found.kind, found.severity) for found in report.findings] == [("mixture-misfit", "error")]
    assert message in report.findings[0].message
    assert (len(report.reports), printed.exit_code) == (2, 2)
    assert message in printed.stdout


def test_a_member_without_weight_is_not_checked_and_told(folder):
    shutil.rmtree(folder / "so101/data")
    path = write(folder, "datasets: [aloha, {root: so101, weight: 0}]\n")

    report = check(path)

    assert [(found.kind, found.place.dataset) for found in report.findings] == [("mixture-note", "so101")]
    assert list(report.reports) == ["aloha"]
    assert report.exit_code == 0


def test_a_file_that_is_no_mixture_is_an_error_of_the_caller(folder):
    for text, message in {
        "datasets: [aloha]\nresise: [1, 1]": "did you mean 'resize'",
        "datasets: [{root: aloha, weight: 0}]": "every member of the mixture has weight 0",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check(write(folder, text))


def test_json_goes_to_a_file_with_everything(folder, tmp_path):
    DAMAGES["nan-actions"].apply(folder / "aloha")
    path = write(folder, f"{ONE}datasets: [aloha, so101]\n")

    run(path, "--json-file", tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())

    assert (written["mixture"], written["severity"]) == (str(path), "error")
    assert written["datasets"]["aloha"]["tally"] == {"nan-values": 1}
    assert written["datasets"]["so101"]["findings"] == []
    assert written["counts"]["frames"] == 90


SELECTED = {
    "mixture.yaml": "datasets:\n  - {root: aloha, selection: {exclude: [4], drop_last_frames: 1}}\n  - so101\n",
    "mixture.toml": '[datasets.aloha]\nroot = "aloha"\nselection = {exclude = [4], drop_last_frames = 1}\n'
    '[datasets.so101]\nroot = "so101"\n',
}


@pytest.mark.parametrize("name", SELECTED)
def test_the_exclude_file_says_what_to_write_under_each_dataset(folder, tmp_path, name):
    DAMAGES["nan-actions"].apply(folder / "aloha")
    head = ONE if name.endswith(".yaml") else 'on_missing = "fill"\nresize = [32, 40]\n'
    path = write(folder, head + SELECTED[name], name)

    run(path, "--exclude-file", tmp_path / "bad")
    text = (tmp_path / "bad").read_text()
    parsed = yaml.safe_load(text) if name.endswith(".yaml") else tomllib.loads(text)

    # Episode 2 is bad; what the member selected already stays.
    assert parsed == {"aloha": {"selection": {"exclude": [2, 4], "drop_last_frames": 1}}}
    assert "# nan-values: episode 2: data/chunk-000/episode_000002.parquet: " in text
    mixture = Mixture([{"root": str(folder / "aloha"), **parsed["aloha"]}])
    assert sorted(set(mixture.members[0].index().episode.tolist())) == [0, 1, 3]


@pytest.mark.parametrize("name", SELECTED)
def test_the_exclude_file_keeps_the_letters_of_what_a_member_selects(folder, tmp_path, name):
    DAMAGES["nan-actions"].apply(folder / "aloha")
    task = "Würfel 🤖 greifen\x7f\x85\x9f"
    tasks = f'["{task[:-3]}\\u007f\\u0085\\u009f"]'
    selection = f"selection: {{tasks: {tasks}}}" if name.endswith(".yaml") else f"selection = {{tasks = {tasks}}}"
    text = f"datasets:\n  aloha:\n    root: aloha\n    {selection}\n"
    path = write(folder, text if name.endswith(".yaml") else f'[datasets.aloha]\nroot = "aloha"\n{selection}\n', name)

    text = format_mixture_exclude_file(validate_mixture(str(path), where="process"))

    parsed = yaml.safe_load(text) if name.endswith(".yaml") else tomllib.loads(text)
    assert parsed == {"aloha": {"selection": {"exclude": [2], "tasks": [task]}}}


class LinkParser(PageParser):
    """Also collects where links and what has a name of its own."""

    def __init__(self):
        super().__init__()
        self.links, self.names = [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        super().handle_starttag(tag, [item for item in attrs if item[0] != "href"])
        self.links += [attributes["href"]] if "href" in attributes else []
        self.names += [attributes["id"]] if "id" in attributes else []


def test_the_page_has_an_index_and_a_section_per_dataset(folder, tmp_path):
    DAMAGES["short-video"].apply(folder / "aloha")
    path = write(folder, "datasets: {'<b>': {root: aloha}, so101: {root: so101}, gone: {root: gone}}\n")

    assert run(path, "--html", tmp_path / "page.html").exit_code == 2
    page = (tmp_path / "page.html").read_text()
    parser = LinkParser()
    parser.feed(page)
    parser.close()

    assert parser.open == []
    assert parser.outside == []
    assert parser.names == ["top", "dataset-0", "dataset-1"]
    assert set(parser.links) == {"#top", "#dataset-0", "#dataset-1"}
    # Lengths of both, and of the first the kinds and the last frame of the short video.
    assert len(parser.images) == 4
    assert "<b>" not in page
    assert "who has what" in page
    assert "not checked" in page
