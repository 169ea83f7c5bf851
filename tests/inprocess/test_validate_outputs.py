"""What validate hands to people and programs: JSON, exit codes, the exclude file, the page, the command."""

import base64
import json
import shutil
from html.parser import HTMLParser

import pytest
from damages import DAMAGES, TOP, base_spec
from typer.testing import CliRunner

from raypipe.cli import app
from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError
from raypipe.plan import SelectionSpec
from raypipe.testing import write_dataset
from raypipe.validate import bad_episodes, format_exclude_file, read_exclude_file, validate_dataset
from raypipe.validate.report import format_page


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A sound dataset; copy it."""
    return write_dataset(tmp_path_factory.mktemp("outputs") / "dataset", base_spec("v2.1"))


@pytest.fixture
def root(base, tmp_path):
    """A copy of a sound dataset, to be damaged."""
    return shutil.copytree(base, tmp_path / "dataset")


def run(*arguments):
    return CliRunner().invoke(app, ["validate", *map(str, arguments), "--where", "process"])


def test_exit_codes_go_by_the_worst_finding(root):
    sound = run(root)
    DAMAGES["late-timestamps"].apply(root)
    warned = run(root)
    DAMAGES["nan-actions"].apply(root)
    failed = run(root)

    assert (sound.exit_code, warned.exit_code, failed.exit_code) == (0, 1, 2)
    assert "nothing is wrong with it" in sound.stdout
    assert "timestamp-offset" in warned.stdout
    assert "nan-values" in failed.stdout


def test_json_has_every_finding_with_its_place(root, tmp_path):
    DAMAGES["nan-actions"].apply(root)
    DAMAGES["drifted-timestamps"].apply(root)

    printed = json.loads(run(root, "--json").stdout)
    run(root, "--json-file", tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())

    assert printed["severity"] == "error"
    assert printed["tally"] == {"nan-values": 1, "timestamp-drift": 1}
    nan = printed["findings"][0]
    assert nan["place"]["episodes"] == [2]
    assert (nan["place"]["feature"], nan["place"]["frames"]) == ("action", [4])
    assert nan["place"]["file"] == "data/chunk-000/episode_000002.parquet"
    assert written["findings"] == printed["findings"]


def test_the_exclude_file_leaves_out_the_bad_episodes_and_no_others(root, tmp_path):
    DAMAGES["nan-actions"].apply(root)
    DAMAGES["missing-video"].apply(root)
    DAMAGES["late-timestamps"].apply(root)

    run(root, "--exclude-file", tmp_path / "bad.txt")
    numbers = read_exclude_file(tmp_path / "bad.txt")

    assert numbers == (2, 3)
    assert SelectionSpec(exclude=numbers).exclude == (2, 3)
    lines = (tmp_path / "bad.txt").read_text().splitlines()
    assert lines[lines.index("2") - 1].startswith("# nan-values: data/chunk-000/episode_000002.parquet: ")
    assert lines[lines.index("3") - 1].startswith("# video-missing: ")


def test_a_sound_dataset_has_an_exclude_file_without_numbers(base, tmp_path):
    report = validate_dataset(str(base), where="process")
    (tmp_path / "bad.txt").write_text(format_exclude_file(report))

    assert bad_episodes(report) == {}
    assert read_exclude_file(tmp_path / "bad.txt") == ()


class PageParser(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self):
        super().__init__()
        self.images, self.outside, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "img":
            self.images.append(attributes["src"])
        if tag in ("script", "link", "iframe") or "href" in attributes:
            self.outside.append(tag)
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page):
    parser = PageParser()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_holds_its_plots_and_the_frames_of_what_is_wrong(root, tmp_path):
    DAMAGES["short-video"].apply(root)
    DAMAGES["drifted-timestamps"].apply(root)

    assert run(root, "--html", tmp_path / "page.html").exit_code == 2
    page = (tmp_path / "page.html").read_text()
    parser = parse(page)

    # Lengths, kinds and drift, and the last frame of the short video.
    assert len(parser.images) == 4
    for source in parser.images:
        kind, data = source.split(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert parser.outside == []
    assert "http" not in page
    assert "video-short: frame 9 of videos/chunk-000/observation.images.top/episode_000002.mp4" in page


def test_the_page_of_a_sound_dataset_has_its_lengths_only(base):
    page = format_page(validate_dataset(str(base), where="process"))

    assert len(parse(page).images) == 1
    assert "Nothing is wrong with it." in page


def test_names_are_data_on_the_page_and_in_the_table(tmp_path):
    root = write_dataset(tmp_path / "<b>[red]x", base_spec("v2.1"))
    DAMAGES["nan-actions"].apply(root)

    page = format_page(validate_dataset(str(root), where="process"))

    assert "<b>" not in page
    parse(page)
    assert "<b>[red]x" in run(root).stdout.replace("\n", "")


def test_findings_on_many_episodes_are_one_line_of_the_table_and_all_in_json(root):
    for path in root.glob(f"videos/chunk-000/{TOP}/episode_00000[1-4].mp4"):
        path.unlink()

    printed = run(root)
    findings = json.loads(run(root, "--json").stdout)["findings"]

    assert printed.stdout.count("video-missing") == 1
    assert "episodes 1-4" in printed.stdout
    assert [finding["place"]["episodes"] for finding in findings] == [[1], [2], [3], [4]]


def test_nothing_at_the_root_is_an_error_of_the_caller(tmp_path):
    with pytest.raises(DatasetError, match="no such folder"):
        validate_dataset(str(tmp_path / "nothing"), where="process")


def test_an_empty_folder_is_a_finding(tmp_path):
    report = validate_dataset(str(tmp_path), where="process")

    assert "info-unreadable" in report.tally
    # There is no info.json that could count anything.
    assert not [finding for finding in report.findings if "counts" in finding.message]


def test_a_dataset_in_memory_is_checked_as_one_on_disk_is(root):
    import fsspec

    DAMAGES["nan-actions"].apply(root)
    DAMAGES["truncated-video"].apply(root)
    local = validate_dataset(str(root), where="process")
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/validated", recursive=True)

    remote = validate_dataset("memory://validated", where="process", deep=True)

    assert [(f.kind, f.place) for f in remote.findings] == [(f.kind, f.place) for f in local.findings]
    memory.rm("/validated", recursive=True)


def test_a_dataset_found_sound_can_be_read_in_full(base):
    assert validate_dataset(str(base), where="process", deep=True).findings == ()

    dataset = open_dataset(str(base))
    for position in range(len(dataset)):
        dataset.sample(position)
