"""The values that validate returns: each `Finding`, and the `Report` of a dataset or of a mixture with all of them.

`KINDS` lists every kind of finding, with its severity and its remedy. The names of kinds are stable: people filter by
them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:
    from raypipe.mixture import MemberSpec
    from raypipe.validate.values import EpisodeSummary

Severity = Literal["error", "warning", "note"]
"""``error``: training fails, or trains on wrong values. ``warning``: costs or risks something. ``note``: to know."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What all findings of one kind have in common."""

    severity: Severity
    meaning: str
    remedy: str
    """The report puts the root of the dataset in the place of ``ROOT``."""


_LEAVE_OUT = (
    "leave the episodes out: raypipe validate ROOT --exclude-file bad.txt, then raypipe reshard ROOT OUT "
    "--exclude-file bad.txt, or selection={'exclude': raypipe.validate.read_exclude_file('bad.txt')}"
)
_LEAVE_FEATURE_OUT = f"leave the feature out, with drop_features([...]) or features=[...]; or {_LEAVE_OUT}"
_FETCH = f"fetch the file again, or {_LEAVE_OUT}"
_RE_ENCODE = "rewrite the videos: raypipe reshard ROOT OUT --gop 2"
_EDIT_INFO = "correct meta/info.json"
_EDIT_OR_LEAVE_OUT = f"correct meta/info.json if it is wrong; if the file is, {_LEAVE_OUT}"


_error, _warning, _note = (partial(Kind, severity) for severity in get_args(Severity))


def _deep(remedy: str) -> str:
    # Without --deep, the exclude file would lack these episodes.
    return remedy.replace("validate ROOT", "validate ROOT --deep")


KINDS: Final[Mapping[str, Kind]] = {
    # a mixture: ROOT is its file
    "member-unusable": _error(
        "a dataset of the mixture cannot be opened with what the file says of it",
        "mend the dataset or its lines in the file, give it weight 0, or leave out all that cannot be used with "
        "on_bad_dataset: skip",
    ),
    "mixture-misfit": _error("the datasets cannot be one mixture as the file says", "change ROOT as the message says"),
    "mixture-note": _note(
        "what the mixture pads, fills or leaves out", "nothing to do, if that is meant; see: raypipe info ROOT"
    ),
    # meta/
    "info-unreadable": _error("info.json is missing or no JSON object", "fetch meta/info.json again"),
    "info-key": _error("info.json lacks a key, or has it with a value that means nothing", _EDIT_INFO),
    "version-unknown": _error(
        "the format version is none that raypipe reads",
        "convert the dataset with LeRobot's own scripts, or set codebase_version in info.json to what the files are",
    ),
    "template-invalid": _error("a path template cannot be filled in", _EDIT_INFO),
    "template-mismatch": _error(
        "the files are laid out by another template than that of info.json",
        "set it in meta/info.json to the template that the message gives",
    ),
    "layout-mismatch": _warning(
        "the version and the layout of the files do not go together",
        "set codebase_version in meta/info.json to the version of the layout; LeRobot goes by it",
    ),
    "feature-unknown": _warning(
        "a feature of a dtype that raypipe has no words for",
        "raypipe leaves it out of samples; correct its dtype in meta/info.json, if it is mistyped",
    ),
    "feature-invalid": _error("a feature's declaration means nothing", _EDIT_INFO),
    "episodes-unreadable": _error("the episode table cannot be read", "fetch meta/ again"),
    "tasks-unreadable": _error("the tasks cannot be read", "fetch meta/tasks.parquet or meta/tasks.jsonl again"),
    "metadata-unreadable": _error("meta/ cannot be read", "fetch meta/ again"),
    "count-mismatch": _warning("a total in info.json is not what is there", _EDIT_INFO),
    "split-invalid": _note("a split of info.json is no run of episodes that exist", _EDIT_INFO),
    "episode-numbers": _warning(
        "episodes are not numbered 0, 1, 2, ...",
        "raypipe goes by the numbers; LeRobot v3.0 by the position: raypipe reshard ROOT OUT renumbers",
    ),
    "index-range": _warning(
        "dataset_from_index or dataset_to_index is not where the episode is",
        "raypipe does not use it; LeRobot does: raypipe reshard ROOT OUT writes it anew",
    ),
    "task-unlisted": _warning("an episode names a task that meta/tasks does not list", "add the task to meta/tasks"),
    # files
    "data-missing": _error("a data file is not there", _FETCH),
    "data-unreadable": _error("a data file is damaged", _FETCH),
    "video-missing": _error("a video file is not there", _FETCH),
    "camera-missing": _warning(
        "a declared camera has no file at all",
        "fetch its files; without them raypipe leaves the camera out with a warning",
    ),
    "file-extra": _warning(
        "a file that meta/ does not name", "raypipe does not read it: keep it until you know what it is"
    ),
    "row-groups": _warning(
        "a row group holds several episodes: reading one costs all of them",
        "rewrite it with one per episode: raypipe reshard ROOT OUT",
    ),
    # rows
    "length-mismatch": _error("an episode has not the rows that the episode table promises", _LEAVE_OUT),
    "rows-orphaned": _warning(
        "rows of an episode that the episode table does not list",
        "raypipe never reads them; LeRobot does: raypipe reshard ROOT OUT leaves them behind",
    ),
    "rows-misplaced": _warning(
        "rows of an episode that the episode table places in another file",
        "raypipe never reads them; raypipe reshard ROOT OUT leaves them behind",
    ),
    "rows-duplicated": _error("a frame of an episode stands in several rows", _LEAVE_OUT),
    "frame-gap": _error("frame_index does not count 0, 1, 2, ...", _LEAVE_OUT),
    "rows-unordered": _warning(
        "rows are not in the order of their frames",
        "raypipe sorts them at each reading; LeRobot does not: raypipe reshard ROOT OUT",
    ),
    "index-mismatch": _warning(
        "the index column does not count all frames of the dataset",
        "raypipe does not use it; LeRobot does: raypipe reshard ROOT OUT numbers anew",
    ),
    "episode-duplicate": _warning(
        "episodes with the same values, frame by frame", "leave all but one of them out: selection={'exclude': (...)}"
    ),
    # timestamps
    "fps-mismatch": _error("timestamps advance at another rate than info.json says", "correct fps in meta/info.json"),
    "timestamp-order": _warning(
        "timestamps do not increase",
        "raypipe pairs rows and frames by position; look at the episode before you trust its order",
    ),
    "timestamp-drift": _warning(
        "timestamps leave frame / fps by more than half a frame",
        "keep timestamps='position', raypipe's default; LeRobot would pair rows with other frames",
    ),
    "timestamp-offset": _warning(
        "an episode's timestamps do not start at 0",
        "keep timestamps='position', raypipe's default; LeRobot would pair rows with other frames",
    ),
    "timestamp-jitter": _note(
        "timestamps leave frame / fps by more than LeRobot's tolerance of 0.1 ms",
        "keep timestamps='position', raypipe's default",
    ),
    # features
    "feature-missing": _error("some data files lack the column of a feature", _LEAVE_FEATURE_OUT),
    "feature-absent": _warning(
        "no data file has the column of a feature",
        "raypipe leaves it out of samples; take it out of meta/info.json, if it was never recorded",
    ),
    "feature-undeclared": _note("a column that info.json does not declare", "declare it, if samples need it"),
    "column-derived": _note("an index column is not there; raypipe derives it", "nothing to do"),
    "column-doubled": _error(
        "a data file has a column twice", f"rewrite the file with each column once, or {_LEAVE_OUT}"
    ),
    "episode-column": _error(
        "a data file holds several episodes, and no column tells which row is whose",
        "fetch the file again, or write its column episode_index",
    ),
    "dtype-mismatch": _error("a column's values are not of the declared dtype", _EDIT_OR_LEAVE_OUT),
    "shape-mismatch": _error("a column's values are not of the declared shape", _EDIT_OR_LEAVE_OUT),
    "null-values": _error("a column has empty values", _LEAVE_FEATURE_OUT),
    "nan-values": _error("a feature is not a number somewhere", _LEAVE_FEATURE_OUT),
    "inf-values": _error("a feature is infinite somewhere", _LEAVE_FEATURE_OUT),
    "constant": _note("a number of a feature never changes", "nothing to do, if that is meant"),
    "action-constant": _warning(
        "a number of the action never changes: nothing is learnt of it",
        "nothing to do, if that is meant; else see it with `raypipe show ROOT`, and leave the dataset out",
    ),
    "task-mismatch": _warning(
        "rows have a task that the episode table does not list for their episode",
        "raypipe and LeRobot go by the rows: correct the episode table, or task_index where the rows are wrong",
    ),
    "task-unresolved": _error(
        "rows have a task_index that meta/tasks does not list", f"add the task to meta/tasks, or {_LEAVE_OUT}"
    ),
    # statistics
    "stats-missing": _note("no statistics of a feature are stored", "LeRobot can compute them"),
    "stats-unreadable": _warning(
        "stored statistics cannot be read",
        "fetch the file again, or have LeRobot compute them anew; samples do not need it",
    ),
    "stats-mismatch": _warning(
        "stored statistics are not those of the values",
        "normalisation would be off: have LeRobot compute them again, or look at the values",
    ),
    "stats-flat": _warning(
        "a stored deviation is so small that values normalised by it are huge",
        "rp.Normaliser(ds.stats, {...}) with the mode 'min_max' or 'identity' for the feature; or have LeRobot compute "
        "the statistics again",
    ),
    # videos
    "video-unreadable": _error("a video file is damaged", _FETCH),
    "video-truncated": _error("a video file ends before its frames do", _FETCH),
    "video-unindexed": _note("a video without a plain index: its frames are counted by --deep only", _RE_ENCODE),
    "video-short": _error("a video has fewer frames than its episodes", _FETCH),
    "video-long": _warning(
        "a video has more frames than its episode has rows",
        "see whether it is the episode's: raypipe takes the first frames",
    ),
    "video-start": _error("a video has no frame where an episode should start", _LEAVE_OUT),
    "video-drift": _warning(
        "from_timestamp is more than half a frame from where the lengths put the episode",
        "raypipe goes by the lengths; LeRobot would show frames of the neighbour: raypipe reshard ROOT OUT",
    ),
    "video-span": _warning(
        "to_timestamp is not where the episode ends", "raypipe does not use it: raypipe reshard ROOT OUT writes it anew"
    ),
    "video-overlap": _error("two episodes share frames of a video", _LEAVE_OUT),
    "video-codec": _warning("a video is not of the declared codec", _EDIT_INFO),
    "video-size": _error("a video is not of the declared size", _EDIT_INFO),
    "video-fps": _warning(
        "a video does not play at the dataset's rate",
        "raypipe takes one frame per row; see whether the video is the episode's",
    ),
    "video-gop": _note("keyframes are far apart: a random frame costs many", _RE_ENCODE),
    "camera-undecodable": _note("a kind of video that raypipe cannot decode", "name the cameras to use"),
    "video-damaged": _error("frames of a video cannot be decoded without errors", _deep(_FETCH)),
    "video-crash": _error("decoding a video ends the process that does it", _deep(_FETCH)),
    "camera-black": _warning(
        "a camera is black for a whole episode",
        "see it with `raypipe show ROOT --episode N`; leave the camera out with cameras=[...], or the episodes with "
        "selection={'exclude': (...)}",
    ),
    "image-undecodable": _error("an image inside the rows cannot be decoded", _deep(_LEAVE_OUT)),
}

_EXIT_CODES: dict[Severity | Literal["none"], int] = {"none": 0, "note": 0, "warning": 1, "error": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a finding is; parts that do not apply are empty."""

    dataset: str = ""
    """The member's name, in findings on a mixture."""
    file: str = ""
    """Relative to the root of the dataset."""
    episodes: tuple[int, ...] = ()
    """LeRobot's episode numbers."""
    feature: str = ""
    """A feature, which may be a camera."""
    frames: tuple[int, ...] = ()
    """A few frames that show the problem, counted in the file for a video and in the episode for rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that validate reports."""

    kind: str
    """One of `KINDS`."""
    severity: Severity
    place: Place
    message: str
    """Shows the values: both sides of a mismatch."""
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much validate looked at."""

    episodes: int
    frames: int
    data_files: int
    video_files: int
    decoded_frames: int
    """0 unless deep."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """The findings of one dataset, the worst first."""

    root: str
    version: str
    fps: float
    is_deep: bool
    findings: tuple[Finding, ...]
    counts: Counts
    elapsed_s: float
    summary: "EpisodeSummary"
    """What validate measured of every episode; not part of the JSON."""

    @property
    def severity(self) -> Severity | Literal["none"]:
        """The worst severity of all findings."""
        return worst_severity(self.findings)

    @property
    def exit_code(self) -> int:
        """0 without findings or with notes only, 1 with warnings, 2 with errors."""
        return _EXIT_CODES[self.severity]

    @property
    def tally(self) -> dict[str, int]:
        """The number of findings of each kind that occurs, worst first."""
        return dict(Counter(finding.kind for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, with every finding."""
        return {
            "root": self.root,
            "version": self.version,
            "is_deep": self.is_deep,
            "severity": self.severity,
            "elapsed_s": round(self.elapsed_s, 3),
            "counts": asdict(self.counts),
            "tally": self.tally,
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureReport:
    """The findings of a mixture and of its datasets."""

    mixture: str
    """The path of the file, as the caller gave it."""
    members: "tuple[MemberSpec, ...]"
    """Those with a weight above 0, in the order of the file."""
    is_deep: bool
    findings: tuple[Finding, ...]
    """On the mixture itself: whether the datasets open and fit together. Worst first."""
    reports: Mapping[str, Report]
    """By member name, in the members' order; a dataset that is not there has no report."""
    elapsed_s: float

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings on the mixture, then those on every dataset."""
        return (*self.findings, *(found for report in self.reports.values() for found in report.findings))

    @property
    def severity(self) -> Severity | Literal["none"]:
        """The worst severity of all findings."""
        return worst_severity(self.all_findings)

    @property
    def exit_code(self) -> int:
        """0 without findings or with notes only, 1 with warnings, 2 with errors."""
        return _EXIT_CODES[self.severity]

    @property
    def counts(self) -> Counts:
        """How much validate looked at in all datasets; a dataset that two members share counts once."""
        parts = [asdict(report.counts) for report in {id(report): report for report in self.reports.values()}.values()]
        return Counts(**{name: sum(part[name] for part in parts) for name in Counts.__dataclass_fields__})

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, with every finding."""
        return {
            "mixture": self.mixture,
            "is_deep": self.is_deep,
            "severity": self.severity,
            "elapsed_s": round(self.elapsed_s, 3),
            "counts": asdict(self.counts),
            "findings": [asdict(finding) for finding in self.findings],
            "datasets": {name: report.to_json() for name, report in self.reports.items()},
        }


def worst_severity(findings: Iterable[Finding]) -> Severity | Literal["none"]:
    """Return the worst severity of `findings`."""
    return next((severity for severity, number in count_severities(findings).items() if number), "none")


def count_severities(findings: Iterable[Finding]) -> dict[Severity, int]:
    """Return the number of errors, warnings and notes, in this order."""
    numbers = Counter(finding.severity for finding in findings)
    return {severity: numbers[severity] for severity in get_args(Severity)}


def make_finding(kind: str, message: str, place: Place, *, severity: Severity | None = None) -> Finding:
    """Return a finding with the remedy of its kind, and its severity if this case is not better or worse than usual."""
    known = KINDS[kind]
    return Finding(kind=kind, severity=severity or known.severity, place=place, message=message, remedy=known.remedy)


def worst_first(findings: list[Finding], root: str) -> tuple[Finding, ...]:
    """Return the findings ordered by severity, kind and place, with the root filled into the commands of remedies."""

    def key(found: Finding) -> tuple[Any, ...]:
        place = found.place
        return -_EXIT_CODES[found.severity], found.kind, place.feature, place.episodes, place.file, found.message

    return tuple(replace(one, remedy=one.remedy.replace("ROOT", root)) for one in sorted(findings, key=key))
