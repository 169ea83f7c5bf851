"""`DatasetMeta`: everything that ``meta/`` says about a dataset, its order fingerprint and its source."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from string import Formatter
from typing import Any, Final

import numpy as np

from raypipe.errors import DatasetError
from raypipe.format.episodes import FILES_PER_CHUNK, FOLDER, EpisodeTable, VideoColumns, read_episodes, split_tables
from raypipe.format.features import INDEX_FEATURES, Feature, Tasks, TextColumn, find_texts, read_features, read_tasks
from raypipe.format.tables import CORRECT_INFO, read_count, read_json
from raypipe.storage import Storage, open_root
from raypipe.text import counted

VERSIONS = ("v2.0", "v2.1", "v3.0")
"""The format versions that raypipe reads."""

_INFO = "meta/info.json"

DATA_TEMPLATES: Final = {
    True: "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    False: "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
}
VIDEO_TEMPLATES: Final = {
    True: "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    False: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
"""LeRobot's own templates, by whether a file may hold several episodes."""

_MOST_CANDIDATES: Final = 8

_NUMBER: Final = re.compile(r"0?\d{0,2}d?")
_NOTHING: Final = re.compile("(?!)")
_FIELDS: Final = {
    **dict.fromkeys(("chunk_index", "file_index", "episode_chunk", "episode_index"), _NUMBER),
    "video_key": re.compile(""),
}
"""The format that each field allows: a width of at most two digits, or a few letters could ask for gigabytes."""

_OUTSIDE: Final = re.compile(r"^/|^[A-Za-z]:|://|\\|[\x00-\x1f]|(^|/)\.\.(/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a dataset was read from; recorded with a run, but not part of its identity."""

    root: str
    revision: str
    """A commit of the Hub, or ``"unversioned"``."""
    layout: str
    """The format version, and whether a file holds one episode or several."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetMeta:
    """The content of a dataset, the same for every format version."""

    storage: Storage
    version: str
    fps: float
    robot_type: str
    features: Mapping[str, Feature]
    episodes: EpisodeTable
    tasks: Tasks
    splits: Mapping[str, tuple[int, int]]
    """Half-open ranges of episode numbers by name, as in ``info.json``."""
    data_template: str
    video_template: str
    """Path templates of ``info.json``, or LeRobot's own; `video_template` is empty if there are no videos."""
    is_packed: bool
    """True if a file may hold several episodes."""
    notes: tuple[str, ...]
    """Contradictions in ``meta/`` whose meaning is clear all the same."""

    @property
    def root(self) -> str:
        """Where the dataset is."""
        return self.storage.uri

    @cached_property
    def num_frames(self) -> int:
        """Frames in all episodes."""
        return int(self.episodes.length.sum())

    @cached_property
    def cameras(self) -> tuple[str, ...]:
        """The names of the features that give pixels."""
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @cached_property
    def texts(self) -> dict[str, TextColumn]:
        """The text features that derive from other columns, such as subtasks; reads their files."""
        return find_texts(self.storage, self.features, self.tasks)

    @cached_property
    def opaque(self) -> dict[str, str]:
        """Why features of an unknown dtype are in no sample, by name."""
        return {
            name: f"raypipe has no words for the dtype {feature.dtype!r}"
            for name, feature in self.features.items()
            if feature.kind == "opaque"
        }

    @cached_property
    def order_fingerprint(self) -> str:
        """A hash of everything that decides an order: episode numbers, lengths, frame rate and the row features.

        It is the same for a copy elsewhere, another revision with the same episodes, and a resharded copy. Cameras and
        the derived index columns do not count: a copy may re-encode, resize or drop a camera, and add an index column,
        without moving a frame.
        """
        schema = sorted(
            (feature.name, feature.dtype, list(feature.shape))
            for feature in self.features.values()
            if not feature.is_camera and feature.name not in INDEX_FEATURES
        )
        digest = hashlib.sha256(json.dumps([float(self.fps), schema]).encode())
        digest.update(np.ascontiguousarray(self.episodes.episode_index, dtype="<i8").tobytes())
        digest.update(np.ascontiguousarray(self.episodes.length, dtype="<i8").tobytes())
        return digest.hexdigest()[:32]

    @cached_property
    def source(self) -> Source:
        """Where this copy is and how it is laid out."""
        packing = "packed" if self.is_packed else "file-per-episode"
        revision = self.storage.commit or "unversioned"
        return Source(root=self.root, revision=revision, layout=f"{self.version} {packing}")

    def data_file(self, row: int) -> str:
        """Return the name of the file with the rows of the episode in row `row` of the table."""
        return self._file(self.data_template, row, self.episodes)

    def video_file(self, row: int, camera: str) -> str:
        """Return the name of the mp4 with the episode in row `row` of the table; it may not exist."""
        return self._file(self.video_template, row, self.episodes.videos[camera], camera)

    def rows_by_file(self, camera: str = "") -> dict[str, list[int]]:
        """Return the rows of the episode table by the name of their data file, or of their video of a camera."""
        rows: dict[str, list[int]] = {}
        for row in range(len(self.episodes)):
            rows.setdefault(self.video_file(row, camera) if camera else self.data_file(row), []).append(row)
        return rows

    def _file(self, template: str, row: int, columns: EpisodeTable | VideoColumns, camera: str = "") -> str:
        chunk = int(columns.chunk_index[row])
        return template.format(
            chunk_index=chunk,
            file_index=int(columns.file_index[row]),
            episode_chunk=chunk,
            episode_index=int(self.episodes.episode_index[row]),
            video_key=camera,
        )

    def find_fitting_templates(self, files: Iterable[str]) -> dict[str, str]:
        """Return templates that fit the files, for those keys of ``info.json`` whose template finds no file.

        Empty if the files are where ``info.json`` says, or no template fits.
        """
        there, fitting = set(files), {}
        for key, names in {"data_path": ("",), "video_path": tuple(self.episodes.videos)}.items():
            if len(self.episodes) and names and there.isdisjoint(self._files(key, names)):
                for template in _likely_templates(there, names[0], is_packed=self.is_packed):
                    if there.issuperset(self.with_templates({key: template})._files(key, names)):
                        fitting[key] = template
                        break
        return fitting

    def with_templates(self, templates: Mapping[str, str]) -> "DatasetMeta":
        """Return this with other templates, by their keys in ``info.json``."""
        return replace(
            self,
            data_template=templates.get("data_path", self.data_template),
            video_template=templates.get("video_path", self.video_template),
        )

    def _files(self, key: str, cameras: Sequence[str]) -> Iterator[str]:
        for row in range(len(self.episodes)):
            for camera in cameras:
                yield self.video_file(row, camera) if key == "video_path" else self.data_file(row)


def read_metadata(root: str | Storage) -> DatasetMeta:
    """Return the metadata of the dataset at `root`; reads only ``meta/``, without the statistics.

    Raises:
        DatasetError: there is no LeRobot dataset, its version is unknown, or ``meta/`` is damaged.
    """
    storage = root if isinstance(root, Storage) else open_root(root)
    info = _read_info(storage)
    place = storage.locate(_INFO)
    version = _check_version(info, place)
    features = read_features(info, place)
    data_template = _read_template(info, "data_path", DATA_TEMPLATES[version == "v3.0"], place)
    # The template decides, not the version: some datasets labelled v3.0 have the older layout.
    is_packed = "{episode_index" not in data_template
    videos = [name for name, feature in features.items() if feature.kind == "video"]
    video_template = _read_template(info, "video_path", VIDEO_TEMPLATES[is_packed], place) if videos else ""
    # pyarrow imports pandas when it first converts to numpy, and swallows what is raised meanwhile: Ctrl-C too.
    with suppress(ImportError):
        import_module("pandas")
    episodes = read_episodes(storage, info, videos, is_packed=is_packed)
    _check_num_episodes(info, len(episodes), place)
    total_tasks = read_count(info, "total_tasks", place, default=1)
    tasks = read_tasks(storage, total_tasks)
    splits, notes = _read_splits(info, len(episodes))
    if is_packed and storage.is_listable:
        told = "is not read: neither LeRobot nor raypipe reads tables there"
        notes += [f"{name} {told}" for name in split_tables(storage.list_files(FOLDER))[1]]
    if len(tasks) < total_tasks:
        notes.append(f"total_tasks in info.json is {total_tasks}; meta/tasks lists {len(tasks)}")
    for key, count in (("total_episodes", len(episodes)), ("total_frames", int(episodes.length.sum()))):
        if info.get(key, count) != count:
            notes.append(f"{key} in info.json is {info[key]}; the episode table holds {count}")
    return DatasetMeta(
        storage=storage,
        version=version,
        fps=read_fps(info, place),
        robot_type=str(info.get("robot_type") or "unknown"),
        features=features,
        episodes=episodes,
        tasks=tasks,
        splits=splits,
        data_template=data_template,
        video_template=video_template,
        is_packed=is_packed,
        notes=tuple(notes),
    )


def _read_info(storage: Storage) -> dict[str, Any]:
    if storage.exists(_INFO):
        return read_json(storage, _INFO)
    if not storage.exists():
        raise DatasetError(
            f"no such folder: {storage.uri!r}. Give the root of a LeRobot dataset, as a path or a URI; one on the "
            f"Hugging Face Hub is OWNER/NAME."
        )
    raise DatasetError(
        f"no LeRobot dataset at {storage.uri!r}: it has no {_INFO}. Give the folder that holds meta/, data/ and "
        f"videos/."
    )


def _check_version(info: Mapping[str, Any], place: str) -> str:
    version = str(info.get("codebase_version", "missing"))
    if version not in VERSIONS:
        raise DatasetError(
            f"unknown format version {version!r} in {place!r}; raypipe reads {', '.join(VERSIONS)}. Convert the "
            f"dataset with LeRobot's own scripts, or set codebase_version there, if its files are of one of these."
        )
    return version


def read_fps(info: Mapping[str, Any], place: str) -> float:
    """Return the frame rate in ``info.json``, which is at `place`."""
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1e-6 <= fps <= 1e6:
        raise DatasetError(
            f"fps is {fps!r} in {place!r}; expected a positive number of frames per second, at least 1e-6 and at "
            f"most 1e6. {CORRECT_INFO}"
        )
    return float(fps)


def _read_template(info: Mapping[str, Any], key: str, usual: str, place: str) -> str:
    template = str(info.get(key) or usual)
    why = why_unfit(template)
    if why:
        raise DatasetError(f"{key} in {place!r} is {template!r}, which {why}. {CORRECT_INFO}")
    return template


def _read_splits(info: Mapping[str, Any], num_episodes: int) -> tuple[dict[str, tuple[int, int]], list[str]]:
    splits, notes = {}, []
    declared = info.get("splits") or {}
    if not isinstance(declared, dict):
        return {}, [f"splits in info.json is {declared!r}, not an object of runs of episodes"]
    for name, text in declared.items():
        match = re.fullmatch(r"\s*(\d{1,16})\s*:\s*(\d{1,16})\s*", str(text))
        if not match:
            notes.append(f"split {name!r} in info.json is {text!r}, not a run of episodes such as '0:10'")
            continue
        start, stop = int(match[1]), int(match[2])
        splits[str(name)] = (start, stop)
        if stop > num_episodes:
            notes.append(
                f"split {name!r} in info.json ends at episode {stop}; the dataset has "
                f"{counted(num_episodes, 'episode')}"
            )
    return splits, notes


def _check_num_episodes(info: Mapping[str, Any], num_episodes: int, place: str) -> None:
    """Raise if the episode table is shorter than promised: a file cut at the end of a line looks whole."""
    promised = info.get("total_episodes")
    if isinstance(promised, int) and num_episodes < promised:
        raise DatasetError(
            f"{place!r} counts {counted(promised, 'episode')} and the episode table lists {num_episodes}; a file of "
            f"meta/ is cut off or missing. Fetch meta/ again, or set total_episodes to {num_episodes} if that is "
            f"meant."
        )


def format_path(template: str, number: int, camera: str = "", chunks_size: int = FILES_PER_CHUNK) -> str:
    """Return the path of file `number`, counted over all chunks; in v2.x of episode `number`."""
    chunk, file = divmod(number, chunks_size)
    return template.format(
        chunk_index=chunk, file_index=file, episode_chunk=chunk, episode_index=number, video_key=camera
    )


def why_unfit(template: str) -> str:
    """Return why a template cannot name files: it cannot be filled in, or leads out of the dataset; empty if it can.

    Only plain fields are filled in, so that only the text between them can be a path.
    """
    try:
        fields = [(name, spec, form) for _, name, spec, form in Formatter().parse(template) if name is not None]
        strange = [name for name, spec, form in fields if form or not _FIELDS.get(name, _NOTHING).fullmatch(spec or "")]
        if strange:
            raise KeyError(*strange)
        name = template.format(chunk_index=0, file_index=0, episode_chunk=0, episode_index=0, video_key="key")
    except (KeyError, ValueError, IndexError) as error:
        return (
            f"cannot be filled in: {error!r}. It may use chunk_index, file_index, episode_chunk and episode_index, as "
            f"{{file_index:03d}}, and {{video_key}}"
        )
    if _OUTSIDE.search(name):
        return "leads out of the dataset: a path there is relative, with '/' and without '..'"
    return ""


def _likely_templates(files: set[str], camera: str, *, is_packed: bool) -> Iterator[str]:
    """Yield templates that look like the names of data files, or of files of a camera, the most frequent first."""
    suffix = ".mp4" if camera else ".parquet"
    looks = Counter(_generalise(name, camera, is_packed=is_packed) for name in files if name.endswith(suffix))
    for template, _ in looks.most_common(_MOST_CANDIDATES):
        is_alike = camera or ("{episode_index" in template) != is_packed
        is_whole = ("{video_key}" in template) == bool(camera)
        if is_alike and is_whole and not template.startswith("meta/"):
            yield template


def _generalise(name: str, camera: str, *, is_packed: bool) -> str:
    """Return a template for the name of a file, with fields in place of its camera and numbers."""
    template = name.replace("{", "{{").replace("}", "}}")
    if camera:
        template = "/".join("{video_key}" if part == camera else part for part in template.split("/"))
    fields = {
        "chunk": "chunk_index" if is_packed else "episode_chunk",
        "file": "file_index",
        "episode": "episode_index",
    }
    return re.sub(
        r"(chunk|file|episode)([-_]?)(\d+)",
        lambda match: f"{match[1]}{match[2]}{{{fields[match[1]]}:0{len(match[3])}d}}",
        template,
    )
