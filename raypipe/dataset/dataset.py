"""`open_dataset` and `Dataset`: the reference path, one sample at a time.

A sample has the keys, dtypes, shapes and padding of LeRobot's map-style sample, with cameras as uint8. Notebooks use
this plain implementation, and the tests compare every faster path with it. It reads and decodes what one sample needs,
and nothing ahead.
"""

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.dataset.action_stats import action_stats
from raypipe.dataset.windows import (
    REPRESENTATION,
    TOLERANCE_S,
    ActionMap,
    ActionSpec,
    WindowSpec,
    check_window,
    map_actions,
    window_from_offsets,
    window_from_timestamps,
    window_rows,
)
from raypipe.decode import CameraDtype
from raypipe.errors import ConfigError, DatasetError, DecodeError, note_episode, noting, suggest
from raypipe.format import (
    INDEX_FEATURES,
    DatasetMeta,
    Feature,
    RowReader,
    Stats,
    check_not_refused,
    column_values,
    episode_first_frame,
    find_absent_columns,
    looked_at_rows,
    read_metadata,
    read_stats,
    row_features_of,
)
from raypipe.plan import SINGLE_DATASET, EpisodeIndex, SelectionSpec, index_episodes
from raypipe.storage import REFUSED, open_root
from raypipe.text import check_choice, counted, make_spec

if TYPE_CHECKING:
    import torch

    from raypipe.decode import VideoPool

Timestamps = Literal["position", "strict"]

_OPEN_VIDEOS = 8
"""Videos kept open: a few cameras of this episode and of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """What a sample holds, and how strictly its parts are checked."""

    cameras: tuple[str, ...]
    camera_dtype: CameraDtype = "uint8"
    """``float32`` gives [0, 1], as LeRobot does by default."""
    timestamps: Timestamps = "position"
    """``position``: a row's place in the episode gives its frame; stored timestamps do not matter. ``strict``: the
    same, and a stored timestamp further than `tolerance_s` from its video frame's is an error, as in LeRobot."""
    tolerance_s: float = TOLERANCE_S

    def __post_init__(self) -> None:
        check_choice("camera_dtype", self.camera_dtype, get_args(CameraDtype))
        check_choice("timestamps", self.timestamps, get_args(Timestamps))
        if not isinstance(self.tolerance_s, Real) or not self.tolerance_s >= 0:
            raise ConfigError(f"tolerance_s must be at least 0, got {self.tolerance_s}")


def open_dataset(
    root: str,
    *,
    cameras: Sequence[str] | Literal["all"] = "all",
    camera_dtype: CameraDtype = "uint8",
    timestamps: Timestamps = "position",
    tolerance_s: float = TOLERANCE_S,
    revision: str = "",
) -> "Dataset":
    """Open the LeRobot dataset at `root`, and no mixture; `raypipe.open_dataset` says what the arguments mean."""
    if not isinstance(cameras, Iterable) or (isinstance(cameras, str) and cameras != "all"):
        raise ConfigError(f"cameras is {cameras!r}; give a list of names, as cameras=[{cameras!r}], or 'all'")
    named = None if isinstance(cameras, str) else tuple(cameras)
    meta = read_metadata(open_root(root, revision).uri if revision else root)
    missing = find_missing_cameras(meta)
    for name, why in meta.opaque.items():
        warnings.warn(f"{meta.root}: leaving out {name}: {why}.", stacklevel=2)
    if named is None:
        unreadable = unreadable_cameras(meta, missing)
        for why in dict.fromkeys(unreadable.values()):
            names = ", ".join(name for name in unreadable if unreadable[name] == why)
            warnings.warn(
                f"{meta.root}: leaving out {names}: {why}. Name the cameras to use, as cameras=[...], to silence this.",
                stacklevel=2,
            )
        chosen = tuple(name for name in meta.cameras if name not in unreadable)
    else:
        check_cameras(meta, named, missing)
        chosen = named
    spec = SampleSpec(cameras=chosen, camera_dtype=camera_dtype, timestamps=timestamps, tolerance_s=tolerance_s)
    return Dataset(meta=meta, spec=spec, window=WindowSpec(), missing_cameras=missing)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Dataset:
    """A LeRobot dataset of any format version: its contents, and its samples one at a time."""

    meta: DatasetMeta
    spec: SampleSpec
    window: WindowSpec
    missing_cameras: tuple[str, ...]
    """Declared cameras without a file; see `why_missing`."""
    actions: ActionMap | None = None
    """How samples represent actions; None: as the dataset stores them."""

    def __getstate__(self) -> dict[str, Any]:
        # Open files and decoders stay behind: each process opens its own. The row features travel, so that only one
        # process reads which columns there are.
        known = {name: self.__dict__[name] for name in ("row_features",) if name in self.__dict__}
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, **known}

    def __len__(self) -> int:
        return self.meta.num_frames

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self.sample(position) for position in range(*index.indices(len(self)))]
        return self.sample(operator.index(index))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.sample(index) for index in range(len(self)))

    def __repr__(self) -> str:
        cameras = ", ".join(
            f"{name} {self.features[name].width}x{self.features[name].height}" for name in self.spec.cameras
        )
        return (
            f"Dataset({self.meta.root!r}, {self.meta.version}, {counted(len(self.meta.episodes), 'episode')}, "
            f"{counted(len(self), 'frame')}, {self.meta.fps:g} fps, robot {self.meta.robot_type}, cameras: "
            f"{cameras or 'none'}{f', actions {self.actions.spec}' if self.actions else ''})"
        )

    @property
    def features(self) -> Mapping[str, Feature]:
        """The declared features by name."""
        return self.meta.features

    @cached_property
    def row_features(self) -> dict[str, Feature]:
        """The features read from rows: those with a column, and the index columns."""
        absent = find_absent_columns(self.meta)
        rows = row_features_of(self.meta, self.spec.cameras, absent=())
        lost = [name for name in absent if name in rows and name not in INDEX_FEATURES]
        if lost:
            warnings.warn(
                f"{self.meta.root}: leaving out {', '.join(lost)}: declared in info.json, and the rows have no such "
                f"column. Take it out of info.json, if it was never recorded, to silence this.",
                stacklevel=3,
            )
        return row_features_of(self.meta, self.spec.cameras, absent)

    @cached_property
    def episodes(self) -> pa.Table:
        """One row per episode: its number, length, first ``index`` and tasks."""
        names = ("episode_index", "length", "from_index", "tasks")
        return pa.table({name: getattr(self.meta.episodes, name) for name in names})

    @cached_property
    def stats(self) -> Stats:
        """The statistics stored with the dataset, pooled over episodes if it stores them by episode; may be empty.

        Depth has statistics in millimetres, like its pixels. If `actions` is set, the action has statistics in that
        representation: computed from all rows once, and kept.
        """
        table = self.meta.episodes
        options: dict[str, Any] = {"fingerprint": self.meta.order_fingerprint, "selection": SelectionSpec()}
        return self.stats_of(index_episodes(SINGLE_DATASET, table.episode_index, table.length, **options))

    def stats_of(self, index: EpisodeIndex) -> Stats:
        """Return `stats`; actions in another representation have statistics of the anchors of `index` alone."""
        stored = dict(read_stats(self.meta.storage))
        for name in stored.keys() & self.features.keys():
            if self.features[name].has_metre_stats:
                metres = stored[name]
                stored[name] = {key: one if key == "count" else one * 1000 for key, one in metres.items()}
        return stored if self.actions is None else {**stored, self.actions.action: action_stats(self, index)}

    def windowed(
        self,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        *,
        offsets: Mapping[str, Sequence[int]] | None = None,
    ) -> "Dataset":
        """Return this dataset with windows, given either in seconds or as relative frame numbers."""
        if offsets is not None and delta_timestamps is None:
            window = window_from_offsets(offsets)
        elif delta_timestamps is not None and offsets is None:
            window = window_from_timestamps(delta_timestamps, fps=self.meta.fps, tolerance_s=self.spec.tolerance_s)
        else:
            raise ConfigError("give either delta_timestamps (seconds) or offsets (frames)")
        window.check_features([*self.row_features, *self.spec.cameras])
        if self.actions is not None:
            check_window(self.actions.spec, self.actions.action, window)
        return knowing_rows(replace(self, window=window), self.row_features)

    def with_actions(self, actions: ActionSpec | Mapping[str, Any]) -> "Dataset":
        """Return this dataset with its actions relative to a state, or to the action before; see `ActionSpec`."""
        spec = make_spec(ActionSpec, actions, "actions")
        names = {"action": spec.feature, "state": spec.to}
        mapped = map_actions(spec, self.row_features, **names, place=repr(self.meta.root))
        check_window(spec, spec.feature, self.window)
        return knowing_rows(replace(self, actions=mapped), self.row_features)

    def select_features(self, names: Sequence[str]) -> "Dataset":
        """Return this dataset with only these features and cameras; the index columns always stay.

        Use `drop_features` to name the features to leave out instead.
        """
        kept = kept_features(names, [*self.row_features, *self.spec.cameras], repr(self.meta.root))
        offsets = {name: frames for name, frames in self.window.offsets.items() if name in kept}
        spec = replace(self.spec, cameras=tuple(name for name in self.spec.cameras if name in kept))
        rows = {name: feature for name, feature in self.row_features.items() if name in kept}
        actions = self.actions and self.actions.among(kept, repr(self.meta.root))
        window = replace(self.window, offsets=offsets)
        return knowing_rows(replace(self, spec=spec, window=window, actions=actions), rows)

    def drop_features(self, names: Sequence[str]) -> "Dataset":
        """Return this dataset without these features; `names` may include declared features that it does not give."""
        given, dropped = dict.fromkeys((*self.row_features, *self.spec.cameras)), _listed("drop", names)
        for name in dropped:
            if name not in (*given, *self.features) or name in INDEX_FEATURES:
                choices = [one for one in given if one not in INDEX_FEATURES]
                raise ConfigError(f"{self.meta.root!r} has no feature {name!r} to drop{suggest(name, choices)}")
        return self.select_features([name for name in given if name not in dropped])

    def sample(self, index: int) -> dict[str, Any]:
        """Return the sample at position `index` over all episodes in order; a negative index counts from the end."""
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"there is no sample {index}; the dataset has {counted(len(self), 'frame')}")
        starts = self.meta.episodes.first_frames
        row = int(np.searchsorted(starts, position, side="right")) - 1
        return self._sample(row, position - int(starts[row]))

    def sample_of(self, episode_index: int, frame: int) -> dict[str, Any]:
        """Return the sample of one frame of one episode, by LeRobot's numbers."""
        row = self.meta.episodes.find_row(episode_index)
        length = int(self.meta.episodes.length[row])
        if not 0 <= frame < length:
            raise ConfigError(
                f"there is no frame {frame} in episode {episode_index}; it has {counted(length, 'frame')}"
            )
        return self._sample(row, frame)

    def timestamp_drift(self, episode_index: int) -> NDArray[np.float64]:
        """Return how far each stored timestamp of an episode is from ``frame / fps``, in seconds, signed."""
        table = self._reader.read_episode(self.meta.episodes.find_row(episode_index))
        stored = table.column("timestamp").to_numpy().astype(np.float64)
        return np.asarray(stored - np.arange(len(stored)) / self.meta.fps)

    @cached_property
    def _reader(self) -> RowReader:
        return RowReader(self.meta, list(self.row_features))

    @cached_property
    def _videos(self) -> "VideoPool":
        from raypipe.decode import VideoPool

        return VideoPool(_OPEN_VIDEOS)

    def _sample(self, row: int, frame: int) -> dict[str, Any]:
        import torch

        table = self._reader.read_episode(row)
        place = f"episode {self.meta.episodes.episode_index[row]} of {self.meta.root!r}"
        sample: dict[str, Any] = {}
        rows = {name: feature for name, feature in self.row_features.items() if not feature.is_camera}
        for name in (*self.spec.cameras, *rows):
            (frames,), (padding,) = window_rows(np.array([frame]), len(table), self.window.offsets.get(name, (0,)))
            if name in rows:
                found = column_values(table.take(frames), rows[name], place)
                values = found if isinstance(found, list) else torch.from_numpy(found.copy())
                sample[name] = values if name in self.window.offsets else values[0]
            else:
                sample[name] = self._camera(name, row, table, frames)
            if name in self.window.offsets:
                sample[f"{name}_is_pad"] = torch.from_numpy(padding)
        if self.actions is not None:
            name, has_window = self.actions.action, self.actions.action in self.window.offsets
            state = column_values(table.slice(frame, 1), rows[self.actions.state], repr(self.meta.root))
            encoded = self.actions.encode(sample[name].numpy()[None], np.asarray(state), has_window=has_window)
            sample[name] = torch.from_numpy(encoded[0])
            sample[f"{name}{REPRESENTATION}"] = str(self.actions.spec)
        with noting(f"in {place}, frame {frame}"):
            task_index = int(table.column("task_index")[frame].as_py())
            sample["task"] = self.meta.tasks.text(task_index) if len(self.meta.tasks) else ""
        return sample

    def _camera(self, name: str, row: int, table: pa.Table, frames: NDArray[np.int64]) -> "torch.Tensor":
        """Return the pixels of `frames`, ``(C, H, W)`` or ``(T, C, H, W)``."""
        import torch

        feature, episode = self.features[name], int(self.meta.episodes.episode_index[row])
        if feature.kind == "image":
            from raypipe.decode import decode_image

            stored = zip(frames.tolist(), table.column(name).take(frames).to_pylist(), strict=True)
            place = f"of {self.meta.root!r}"
            pixels = torch.stack(
                [decode_image(one, feature, f"episode {episode}, frame {frame} {place}") for frame, one in stored]
            )
        else:
            try:
                pixels = self._video_frames(name, row, table, frames)
            except DatasetError as error:
                note_episode(error, f"decoding camera {name!r} of", episode, self.meta.root)
                raise
        if self.spec.camera_dtype == "float32" and not feature.is_depth:
            pixels = pixels.to(torch.float32) / 255
        pixels = pixels.permute(0, 3, 1, 2).contiguous()
        return pixels if keeps_time_axis(self, name) else pixels[0]

    def _video_frames(self, name: str, row: int, table: pa.Table, frames: NDArray[np.int64]) -> "torch.Tensor":
        codes = self.features[name].depth_codes
        with self._videos.lend(self.meta.storage, self.meta.video_file(row, name), codes=codes) as video:
            first = episode_first_frame(self.meta, row, name, video.index)
            if self.spec.timestamps == "strict":
                self._check_timestamps(name, row, table, frames, video.index.pts_s[first + frames])
            # A window may name a frame twice (padding) or in any order; the decoder only goes forward.
            unique, slots = np.unique(first + frames, return_inverse=True)
            return video.read_frames(unique)[slots]

    def _check_timestamps(
        self, name: str, row: int, table: pa.Table, frames: NDArray[np.int64], pts_s: NDArray[np.float64]
    ) -> None:
        stored = table.column("timestamp").to_numpy().astype(np.float64)[frames]
        promised = stored + self.meta.episodes.videos[name].from_timestamp[row]
        worst = int(np.argmax(np.abs(promised - pts_s)))
        off = abs(float(promised[worst] - pts_s[worst]))
        if off > self.spec.tolerance_s:
            raise DecodeError(
                f"episode {self.meta.episodes.episode_index[row]} of {self.meta.root!r}, camera {name!r}: the row of "
                f"frame {frames[worst]} is at {promised[worst]:.4f} s and its video frame at {pts_s[worst]:.4f} s, "
                f"{off:.4f} s apart, and tolerance_s is {self.spec.tolerance_s:g}. Raise tolerance_s, or open the "
                f"dataset with timestamps='position'."
            )


def keeps_time_axis(dataset: Dataset, camera: str) -> bool:
    """Return whether a sample of a camera has a time axis.

    As in LeRobot: a window of one frame of a *video* has none; a window of one image stored in rows has one, like any
    row feature.
    """
    offsets = dataset.window.offsets.get(camera)
    if offsets is None:
        return False
    return len(offsets) > 1 or dataset.features[camera].kind == "image"


def kept_features(names: Sequence[str], known: Sequence[str], owner: str) -> frozenset[str]:
    """Return the features that stay when a user selects `names`: these, and the index columns.

    Raises:
        ConfigError: `owner` has no feature with one of these names.
    """
    kept = _listed("select", names)
    for name in kept:
        if name not in known:
            raise ConfigError(f"{owner} has no feature {name!r}{suggest(name, known)}")
    return frozenset((*kept, *INDEX_FEATURES))


def _listed(purpose: str, names: Any) -> tuple[str, ...]:
    """Return names that a user gives in anything that holds several; it may be possible to read them only once."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(f"the features to {purpose} are {names!r}; give a list of names, as [{names!r}]")
    return tuple(names)


def knowing_rows(dataset: Dataset, row_features: dict[str, Feature]) -> Dataset:
    """Return the dataset with its `row_features` set: it opens no data file to find them, and does not warn."""
    known = replace(dataset)
    known.__dict__["row_features"] = row_features
    return known


def find_missing_cameras(meta: DatasetMeta) -> tuple[str, ...]:
    """Return the video cameras without a readable file; looks at the first, a middle and the last episode."""
    videos = [name for name in meta.cameras if meta.features[name].kind == "video"]
    return tuple(name for name in videos if not any(map(meta.storage.offers, _looked_at_videos(meta, name))))


def _looked_at_videos(meta: DatasetMeta, camera: str) -> tuple[str, ...]:
    rows = sorted(set(looked_at_rows(meta))) if camera in meta.episodes.videos else ()
    return tuple(dict.fromkeys(meta.video_file(row, camera) for row in rows))


def why_missing(meta: DatasetMeta, camera: str) -> str:
    """Return why `find_missing_cameras` lists a camera: it has no file, or a web server refuses to say."""
    if any(map(meta.storage.is_refused, _looked_at_videos(meta, camera))):
        return f"video files are answered with status {REFUSED}: refused, or lacking where nobody may list"
    fitting = meta.find_fitting_templates(meta.storage.list_files()) if meta.storage.is_listable else {}
    if "video_path" in fitting:
        return f"video_path in info.json gives no file, and {fitting['video_path']!r} gives all"
    return "no video file is there"


def unreadable_cameras(meta: DatasetMeta, missing: Sequence[str]) -> dict[str, str]:
    """Return why cameras cannot be read, by camera."""
    from raypipe.decode import why_undecodable

    reasons = {name: why_undecodable(meta.features[name]) for name in meta.cameras}
    reasons |= {name: why_missing(meta, name) for name in missing}
    return {name: why for name, why in reasons.items() if why}


def check_cameras(meta: DatasetMeta, cameras: Sequence[str], missing: Sequence[str]) -> None:
    """Raise if one of `cameras` is not declared, has no file, or cannot be decoded."""
    from raypipe.decode import check_decodable

    for name in cameras:
        if name not in meta.cameras:
            raise ConfigError(f"{meta.root!r} has no camera {name!r}{suggest(name, meta.cameras)}")
        if name in missing:
            place = meta.video_file(0, name) if name in meta.episodes.videos else meta.video_template
            check_not_refused(meta.storage, _looked_at_videos(meta, name))
            raise DatasetError(
                f"camera {name!r} of {meta.root!r} is declared, and its files are missing: "
                f"{meta.storage.locate(place)!r}. Fetch them, or leave the camera out of cameras=[...]."
            )
        check_decodable(meta.features[name], meta.root)
