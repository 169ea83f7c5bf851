"""The kinds of findings: the severity, the meaning and the remedy of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

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


def _deep(remedy: str) -> str:
    # Without --deep, the exclude file would lack these episodes.
    return remedy.replace("validate ROOT", "validate ROOT --deep")


KINDS: Final[Mapping[str, Kind]] = {
    # a mixture: ROOT is its file
    "member-unusable": Kind(
        "error",
        "a dataset of the mixture cannot be opened with what the file says of it",
        "mend the dataset or its lines in the file, give it weight 0, or leave out all that cannot be used with "
        "on_bad_dataset: skip",
    ),
    "mixture-misfit": Kind(
        "error", "the datasets cannot be one mixture as the file says", "change ROOT as the message says"
    ),
    "mixture-note": Kind(
        "note", "what the mixture pads, fills or leaves out", "nothing to do, if that is meant; see: raypipe info ROOT"
    ),
    # meta/
    "info-unreadable": Kind("error", "info.json is missing or no JSON object", "fetch meta/info.json again"),
    "info-key": Kind("error", "info.json lacks a key, or has it with a value that means nothing", _EDIT_INFO),
    "version-unknown": Kind(
        "error",
        "the format version is none that raypipe reads",
        "convert the dataset with LeRobot's own scripts, or set codebase_version in info.json to what the files are",
    ),
    "template-invalid": Kind("error", "a path template cannot be filled in", _EDIT_INFO),
    "template-mismatch": Kind(
        "error",
        "the files are laid out by another template than that of info.json",
        "set it in meta/info.json to the template that the message gives",
    ),
    "layout-mismatch": Kind(
        "warning",
        "the version and the layout of the files do not go together",
        "set codebase_version in meta/info.json to the version of the layout; LeRobot goes by it",
    ),
    "feature-unknown": Kind(
        "warning",
        "a feature of a dtype that raypipe has no words for",
        "raypipe leaves it out of samples; correct its dtype in meta/info.json, if it is mistyped",
    ),
    "feature-invalid": Kind("error", "a feature's declaration means nothing", _EDIT_INFO),
    "episodes-unreadable": Kind("error", "the episode table cannot be read", "fetch meta/ again"),
    "tasks-unreadable": Kind("error", "the tasks cannot be read", "fetch meta/tasks.parquet or meta/tasks.jsonl again"),
    "metadata-unreadable": Kind("error", "meta/ cannot be read", "fetch meta/ again"),
    "count-mismatch": Kind("warning", "a total in info.json is not what is there", _EDIT_INFO),
    "split-invalid": Kind("note", "a split of info.json is no run of episodes that exist", _EDIT_INFO),
    "episode-numbers": Kind(
        "warning",
        "episodes are not numbered 0, 1, 2, ...",
        "raypipe goes by the numbers; LeRobot v3.0 by the position: raypipe reshard ROOT OUT renumbers",
    ),
    "index-range": Kind(
        "warning",
        "dataset_from_index or dataset_to_index is not where the episode is",
        "raypipe does not use it; LeRobot does: raypipe reshard ROOT OUT writes it anew",
    ),
    "task-unlisted": Kind(
        "warning", "an episode names a task that meta/tasks does not list", "add the task to meta/tasks"
    ),
    # files
    "data-missing": Kind("error", "a data file is not there", _FETCH),
    "data-unreadable": Kind("error", "a data file is damaged", _FETCH),
    "video-missing": Kind("error", "a video file is not there", _FETCH),
    "camera-missing": Kind(
        "warning",
        "a declared camera has no file at all",
        "fetch its files; without them raypipe leaves the camera out with a warning",
    ),
    "file-extra": Kind(
        "warning",
        "a file that meta/ does not name",
        "raypipe does not read it: keep it until you know what it is",
    ),
    "row-groups": Kind(
        "warning",
        "a row group holds several episodes: reading one costs all of them",
        "rewrite it with one per episode: raypipe reshard ROOT OUT",
    ),
    # rows
    "length-mismatch": Kind("error", "an episode has not the rows that the episode table promises", _LEAVE_OUT),
    "rows-orphaned": Kind(
        "warning",
        "rows of an episode that the episode table does not list",
        "raypipe never reads them; LeRobot does: raypipe reshard ROOT OUT leaves them behind",
    ),
    "rows-misplaced": Kind(
        "warning",
        "rows of an episode that the episode table places in another file",
        "raypipe never reads them; raypipe reshard ROOT OUT leaves them behind",
    ),
    "rows-duplicated": Kind("error", "a frame of an episode stands in several rows", _LEAVE_OUT),
    "frame-gap": Kind("error", "frame_index does not count 0, 1, 2, ...", _LEAVE_OUT),
    "rows-unordered": Kind(
        "warning",
        "rows are not in the order of their frames",
        "raypipe sorts them at each reading; LeRobot does not: raypipe reshard ROOT OUT",
    ),
    "index-mismatch": Kind(
        "warning",
        "the index column does not count all frames of the dataset",
        "raypipe does not use it; LeRobot does: raypipe reshard ROOT OUT numbers anew",
    ),
    "episode-duplicate": Kind(
        "warning",
        "episodes with the same values, frame by frame",
        "leave all but one of them out: selection={'exclude': (...)}",
    ),
    # timestamps
    "fps-mismatch": Kind(
        "error", "timestamps advance at another rate than info.json says", "correct fps in meta/info.json"
    ),
    "timestamp-order": Kind(
        "warning",
        "timestamps do not increase",
        "raypipe pairs rows and frames by position; look at the episode before you trust its order",
    ),
    "timestamp-drift": Kind(
        "warning",
        "timestamps leave frame / fps by more than half a frame",
        "keep timestamps='position', raypipe's default; LeRobot would pair rows with other frames",
    ),
    "timestamp-offset": Kind(
        "warning",
        "an episode's timestamps do not start at 0",
        "keep timestamps='position', raypipe's default; LeRobot would pair rows with other frames",
    ),
    "timestamp-jitter": Kind(
        "note",
        "timestamps leave frame / fps by more than LeRobot's tolerance of 0.1 ms",
        "keep timestamps='position', raypipe's default",
    ),
    # features
    "feature-missing": Kind("error", "some data files lack the column of a feature", _LEAVE_FEATURE_OUT),
    "feature-absent": Kind(
        "warning",
        "no data file has the column of a feature",
        "raypipe leaves it out of samples; take it out of meta/info.json, if it was never recorded",
    ),
    "feature-undeclared": Kind("note", "a column that info.json does not declare", "declare it, if samples need it"),
    "column-derived": Kind("note", "an index column is not there; raypipe derives it", "nothing to do"),
    "column-doubled": Kind(
        "error", "a data file has a column twice", f"rewrite the file with each column once, or {_LEAVE_OUT}"
    ),
    "episode-column": Kind(
        "error",
        "a data file holds several episodes, and no column tells which row is whose",
        "fetch the file again, or write its column episode_index",
    ),
    "dtype-mismatch": Kind("error", "a column's values are not of the declared dtype", _EDIT_OR_LEAVE_OUT),
    "shape-mismatch": Kind("error", "a column's values are not of the declared shape", _EDIT_OR_LEAVE_OUT),
    "null-values": Kind("error", "a column has empty values", _LEAVE_FEATURE_OUT),
    "nan-values": Kind("error", "a feature is not a number somewhere", _LEAVE_FEATURE_OUT),
    "inf-values": Kind("error", "a feature is infinite somewhere", _LEAVE_FEATURE_OUT),
    "constant": Kind("note", "a number of a feature never changes", "nothing to do, if that is meant"),
    "action-constant": Kind(
        "warning",
        "a number of the action never changes: nothing is learnt of it",
        "nothing to do, if that is meant; else see it with `raypipe show ROOT`, and leave the dataset out",
    ),
    "task-mismatch": Kind(
        "warning",
        "rows have a task that the episode table does not list for their episode",
        "raypipe and LeRobot go by the rows: correct the episode table, or task_index where the rows are wrong",
    ),
    "task-unresolved": Kind(
        "error", "rows have a task_index that meta/tasks does not list", f"add the task to meta/tasks, or {_LEAVE_OUT}"
    ),
    # statistics
    "stats-missing": Kind("note", "no statistics of a feature are stored", "LeRobot can compute them"),
    "stats-unreadable": Kind(
        "warning",
        "stored statistics cannot be read",
        "fetch the file again, or have LeRobot compute them anew; samples do not need it",
    ),
    "stats-mismatch": Kind(
        "warning",
        "stored statistics are not those of the values",
        "normalisation would be off: have LeRobot compute them again, or look at the values",
    ),
    "stats-flat": Kind(
        "warning",
        "a stored deviation is so small that values normalised by it are huge",
        "rp.Normaliser(ds.stats, {...}) with the mode 'min_max' or 'identity' for the feature; or have LeRobot compute "
        "the statistics again",
    ),
    # videos
    "video-unreadable": Kind("error", "a video file is damaged", _FETCH),
    "video-truncated": Kind("error", "a video file ends before its frames do", _FETCH),
    "video-unindexed": Kind("note", "a video without a plain index: its frames are counted by --deep only", _RE_ENCODE),
    "video-short": Kind("error", "a video has fewer frames than its episodes", _FETCH),
    "video-long": Kind(
        "warning",
        "a video has more frames than its episode has rows",
        "see whether it is the episode's: raypipe takes the first frames",
    ),
    "video-start": Kind("error", "a video has no frame where an episode should start", _LEAVE_OUT),
    "video-drift": Kind(
        "warning",
        "from_timestamp is more than half a frame from where the lengths put the episode",
        "raypipe goes by the lengths; LeRobot would show frames of the neighbour: raypipe reshard ROOT OUT",
    ),
    "video-span": Kind(
        "warning",
        "to_timestamp is not where the episode ends",
        "raypipe does not use it: raypipe reshard ROOT OUT writes it anew",
    ),
    "video-overlap": Kind("error", "two episodes share frames of a video", _LEAVE_OUT),
    "video-codec": Kind("warning", "a video is not of the declared codec", _EDIT_INFO),
    "video-size": Kind("error", "a video is not of the declared size", _EDIT_INFO),
    "video-fps": Kind(
        "warning",
        "a video does not play at the dataset's rate",
        "raypipe takes one frame per row; see whether the video is the episode's",
    ),
    "video-gop": Kind(
        "note",
        "keyframes are far apart: a random frame costs many",
        _RE_ENCODE,
    ),
    "camera-undecodable": Kind("note", "a kind of video that raypipe cannot decode", "name the cameras to use"),
    "video-damaged": Kind("error", "frames of a video cannot be decoded without errors", _deep(_FETCH)),
    "video-crash": Kind("error", "decoding a video ends the process that does it", _deep(_FETCH)),
    "camera-black": Kind(
        "warning",
        "a camera is black for a whole episode",
        "see it with `raypipe show ROOT --episode N`; leave the camera out with cameras=[...], or the episodes with "
        "selection={'exclude': (...)}",
    ),
    "image-undecodable": Kind("error", "an image inside the rows cannot be decoded", _deep(_LEAVE_OUT)),
}
