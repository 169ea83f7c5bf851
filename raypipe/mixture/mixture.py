"""`Mixture`: many unlike datasets as one; every epoch takes a stated share of each."""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from raypipe.dataset import (
    TOLERANCE_S,
    ActionSpec,
    Dataset,
    Schema,
    Timestamps,
    check_window,
    index_dataset,
    kept_features,
    knowing_rows,
)
from raypipe.dataset import open_dataset as open_single
from raypipe.decode import ORIGINAL_SIZE, CameraDtype, Resize
from raypipe.errors import ConfigError, noting
from raypipe.format import Feature
from raypipe.mixture.members import BadMember, MemberNote, features_of, member_actions, member_windows, open_members
from raypipe.mixture.spec import (
    ALL_FRAMES,
    MIXTURE_FILES,
    MIXTURE_TOLERANCE,
    OWN_RATE,
    MemberSpec,
    MixtureSpec,
    is_mixture_file,
    read_mixture_file,
)
from raypipe.mixture.unify import add_windows, unify
from raypipe.plan import EpisodeIndex, mix_indexes, split_frames
from raypipe.text import check_keys, counted, field_names, make_spec

if TYPE_CHECKING:
    from raypipe.mixture.stats import MixtureStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One dataset of a mixture, opened."""

    spec: MemberSpec
    dataset: Dataset

    @property
    def name(self) -> str:
        """Unique in the mixture."""
        return self.spec.name

    @property
    def robot_type(self) -> str:
        """The robot type that the mixture gives it, else the dataset's own."""
        return self.spec.robot_type or self.dataset.meta.robot_type

    def index(self) -> EpisodeIndex:
        """Return the anchor frames of the dataset."""
        return index_dataset(self.name, self.dataset.meta, self.spec.selection)


class Mixture:
    """Many datasets as one; give it to a `Pipeline` like a dataset.

    ::

        mixture = rp.Mixture([("data/aloha", 2.0), ("data/so101", 1.0)], resize=(224, 224), on_missing="fill")
        mixture = rp.Mixture("mixture.yaml")
        pipe = rp.Pipeline(mixture, batch_size=64, seed=0, delta_timestamps={"action": [0.0, 0.1]})
    """

    spec: MixtureSpec
    """As the user gave it, without the members that have weight 0 or cannot be used."""

    members: tuple[Member, ...]
    schema: Schema
    """The features of a batch, and which member gives which."""

    notes: tuple[MemberNote, ...]
    """What raypipe left out, filled or padded, and what is odd about the members."""

    bad: tuple[BadMember, ...]
    """Members that cannot be used, under ``on_bad_dataset="skip"``."""

    def __init__(
        self, members: "str | Path | MixtureSpec | Sequence[Any]", *, progress: bool = True, **settings: Any
    ) -> None:
        """Open all members and check that they fit together; reads ``meta/`` and a few footers of each.

        Args:
            members: roots or opened datasets, pairs of one and a weight, dicts or `MemberSpec`; or a YAML or TOML file
                with all of it.
            progress: whether to show a bar at a terminal or in a notebook.
            settings: the fields of `MixtureSpec`, such as ``weights``, ``resize`` and ``on_missing``.

        Raises:
            ConfigError: the members do not fit together; the message lists every problem, and suggests what to write.
            DatasetError: members cannot be opened; the message lists all of them.
        """
        check_keys(settings, field_names(MixtureSpec)[1:], "a mixture has no setting")
        given: Any = members
        is_file = isinstance(members, str | Path)
        if is_file:
            if not is_mixture_file(str(members)):
                raise ConfigError(
                    f"{str(members)!r} is no mixture file: give a .yaml, .yml or .toml file, or a list of datasets"
                )
            given = read_mixture_file(str(members))
        spec = replace(given, **settings) if isinstance(given, MixtureSpec) else MixtureSpec(members=given, **settings)
        with noting(f"while opening the mixture {str(members)!r}") if is_file else nullcontext():
            self._open(spec, progress=progress)

    def _open(self, spec: MixtureSpec, *, progress: bool) -> None:
        wanted, left_out = with_weight(spec)
        opened = open_members(wanted.members, on_bad_dataset=spec.on_bad_dataset, progress=progress)
        self.spec = only_members(wanted, opened.positions)
        self.members = tuple(
            Member(spec=one, dataset=dataset) for one, dataset in zip(self.spec.members, opened.datasets, strict=True)
        )
        self.schema, notes = self._unify()
        self.bad = opened.bad
        self.notes = (
            *(MemberNote(name=name, text="left out: its weight is 0") for name in left_out),
            *_unused_settings(self.spec),
            *opened.notes,
            *(MemberNote(name="", text=text) for text in notes),
        )
        # Raises now what a plan would raise: for a member without a frame, or shares that come to nothing.
        self.index()

    def _unify(self) -> tuple[Schema, list[str]]:
        return unify([features_of(one.name, one.dataset) for one in self.members], self.spec)

    def __len__(self) -> int:
        return sum(self.shares.values())

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise, and name what to use instead: a mixture has no samples; shares and an order make its batches."""
        names = ", ".join(map(repr, self.names[:6])) + ", ..." * (len(self.names) > 6)
        raise ConfigError(
            f"a mixture has no sample {index!r}: each epoch takes a share of every dataset. One dataset of an "
            f"rp.Mixture is mixture.datasets[0], of {names}, and has samples; "
            f"rp.Pipeline(mixture, batch_size=..., seed=...).batch_at(0) is a batch of all."
        )

    def __repr__(self) -> str:
        """Return a line with the numbers of datasets, episodes and frames, the robots, the cameras and the shares."""
        episodes = sum(len(dataset.meta.episodes) for dataset in self.datasets)
        robots = ", ".join(dict.fromkeys(self.robot_types))
        shown = ", ".join(f"{name} {frames / len(self):.1%}" for name, frames in list(self.shares.items())[:6])
        more = ", ..." if len(self.members) > 6 else ""
        return (
            f"Mixture({counted(len(self.members), 'dataset')}, {counted(episodes, 'episode')}, "
            f"{counted(len(self), 'frame')} an epoch, robots: {robots}, cameras: "
            f"{', '.join(self.schema.cameras) or 'none'}; {shown}{more})"
        )

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The members' datasets, in the order of ``dataset_index``."""
        return tuple(member.dataset for member in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names, in the order of ``dataset_index``."""
        return tuple(member.name for member in self.members)

    @property
    def robot_types(self) -> tuple[str, ...]:
        """The members' robot types, in the order of ``dataset_index``."""
        return tuple(member.robot_type for member in self.members)

    @property
    def features(self) -> Mapping[str, Feature]:
        """The features of a batch by name, in shapes that fit all members."""
        return self.schema.features

    @cached_property
    def shares(self) -> Mapping[str, int]:
        """Frames that an epoch takes of every member; over many epochs a member's frames come equally often."""
        indexes = self._indexes
        frames = [index.num_frames for index in indexes]
        weights = resolve_weights(self.spec, frames, [len(set(index.episode.tolist())) for index in indexes])
        total = sum(frames) if self.spec.frames_per_epoch == ALL_FRAMES else self.spec.frames_per_epoch
        return dict(zip(self.names, split_frames(weights, total), strict=True))

    @cached_property
    def stats(self) -> "MixtureStats":
        """Statistics by dataset, by robot type, and of all together; reads the statistics that the datasets store."""
        from raypipe.mixture.stats import MemberStats, mixture_stats

        parts = [
            MemberStats(
                name=member.name,
                robot_type=member.robot_type,
                stats=member.dataset.stats_of(member.index()),
                num_frames=member.dataset.meta.num_frames,
            )
            for member in self.members
        ]
        return mixture_stats(self.schema, parts)

    def index(self) -> EpisodeIndex:
        """Return the frames of all members with their shares, for a plan."""
        revisions = [dataset.meta.source.revision for dataset in self.datasets]
        return mix_indexes(self._indexes, list(self.shares.values()), revisions=revisions)

    def sources(self) -> tuple[dict[str, Any], ...]:
        """Return name, root and selection of every member as plain values: an account needs them to open it again."""
        return tuple(
            {"name": one.name, "root": str(one.dataset.meta.root), "selection": one.spec.selection.to_dict()}
            for one in self.members
        )

    def windowed(
        self,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        *,
        offsets: Mapping[str, Sequence[int]] | None = None,
    ) -> "Mixture":
        """Return this mixture with windows, by names in a batch, in seconds or frames at each member's fps."""
        windows = member_windows(
            self.schema,
            self.spec,
            [dataset.meta.fps for dataset in self.datasets],
            delta_timestamps=delta_timestamps,
            offsets=offsets,
        )
        datasets = [replace(one, window=window) for one, window in zip(self.datasets, windows, strict=True)]
        return self._changed(datasets, self.schema)

    def with_actions(self, actions: ActionSpec | Mapping[str, Any]) -> "Mixture":
        """Return this mixture with actions relative to a state, or to the action before, by names in a batch.

        The numbers are those of each member's own vector. A name must fit every member that has the action; a pattern
        such as ``*gripper*`` must fit at least one.
        """
        spec = make_spec(ActionSpec, actions, "actions")
        maps = member_actions(spec, self.schema, [(member.name, member.dataset) for member in self.members])
        datasets = [replace(one, actions=mapped) for one, mapped in zip(self.datasets, maps, strict=True)]
        return self._changed(datasets, self.schema)

    @property
    def actions(self) -> ActionSpec | None:
        """How batches represent actions; None: as the datasets store them."""
        return next((one.actions.spec for one in self.datasets if one.actions is not None), None)

    def select_features(self, names: Sequence[str]) -> "Mixture":
        """Return this mixture with only these features and cameras, by their names in a batch.

        The index columns always stay. Use `MemberSpec.drop` to leave out features of a single member.
        """
        kept = kept_features(names, list(self.features), "the mixture")
        datasets = [
            replace(one, actions=one.actions and one.actions.among(kept, "the mixture")) for one in self.datasets
        ]
        changed = self._changed(datasets, self.schema.only(kept))
        if isinstance(self.spec.resize, Mapping):
            sizes = {camera: size for camera, size in self.spec.resize.items() if camera in kept}
            changed.spec = replace(self.spec, resize=sizes or ORIGINAL_SIZE)
        return changed

    def resized(self, resize: Resize) -> "Mixture":
        """Return this mixture with cameras of another size; the pipeline resizes them when it decodes."""
        changed = copy.copy(self)
        changed.spec = replace(self.spec, resize=resize)
        return changed._changed(self.datasets, changed._unify()[0].only(self.schema.features))

    def _changed(self, datasets: Sequence[Dataset], schema: Schema) -> "Mixture":
        changed = copy.copy(self)
        # Other actions, windows or sizes have other statistics; the shares stay.
        changed.__dict__.pop("stats", None)
        for one in datasets:
            if one.actions is not None:
                check_window(one.actions.spec, one.actions.action, one.window)
        # Pass the known columns on: without them a copy would open files to find them again.
        changed.members = tuple(
            replace(member, dataset=knowing_rows(one, member.dataset.row_features))
            for member, one in zip(self.members, datasets, strict=True)
        )
        changed.schema = add_windows(schema, [(one.meta.root, one.window) for one in datasets])
        return changed

    @cached_property
    def _indexes(self) -> list[EpisodeIndex]:
        indexes, wrong = [], []
        for member in self.members:
            try:
                indexes.append(member.index())
            except ConfigError as error:
                wrong.append(str(error))
        if wrong:
            listed = "\n".join(f"  - {text}" for text in wrong)
            raise ConfigError(
                f"members of the mixture have no frame to give, or ask for others than they have:\n{listed}\n"
                f"Correct their selection, or give them weight 0."
            )
        return indexes


def open_dataset(
    root: str,
    *,
    cameras: Sequence[str] | Literal["all"] = "all",
    camera_dtype: CameraDtype = "uint8",
    timestamps: Timestamps = "position",
    tolerance_s: float = TOLERANCE_S,
    revision: str = "",
) -> Dataset | Mixture:
    """Open the LeRobot dataset at `root`, or the mixture of a YAML or TOML file.

    A root is a path, an fsspec URI, or ``owner/name`` of the Hugging Face Hub. Reads ``meta/`` only. Returns a
    `Dataset` or a `Mixture`; both go into a `Pipeline`.

    Args:
        cameras: the cameras that samples hold. ``"all"`` leaves out, with a warning, cameras without any file and those
            that cannot be decoded; a camera that you name must be there.
        camera_dtype: see `SampleSpec.camera_dtype`.
        timestamps: see `SampleSpec.timestamps`.
        tolerance_s: see `SampleSpec.tolerance_s`.
        revision: a tag, branch or commit of a dataset on the Hub; by default the newest tag of a format that raypipe
            reads, else ``main``. This function resolves it to a commit, and all nodes read that commit.
    """
    given: dict[str, Any] = {"cameras": cameras, "camera_dtype": camera_dtype, "timestamps": timestamps}
    given |= {"tolerance_s": tolerance_s, "revision": revision}
    defaults: dict[str, Any] = open_dataset.__kwdefaults__ or {}
    if not is_mixture_file(str(root)):
        if "://" in str(root) and str(root).endswith(MIXTURE_FILES):
            raise ConfigError(f"{str(root)!r} is no dataset; a mixture file must be a local one: fetch it first")
        return open_single(root, **given)
    for name, value in given.items():
        if value != defaults[name]:
            raise ConfigError(
                f"{name}={value!r} is of one dataset, and {str(root)!r} is a mixture: say it in the file, for its "
                f"members, or in the Pipeline (decode={{'camera_dtype': ...}})"
            )
    return Mixture(root)


def _unused_settings(spec: MixtureSpec) -> list[MemberNote]:
    """Return notes on settings that have no effect, because another setting decides."""
    notes = []
    for one in spec.members:
        if isinstance(spec.weights, str) and spec.weights != "given" and one.weight != 1:
            notes.append((one.name, f"its weight {one.weight:g} decides nothing: weights is {spec.weights!r}"))
        if spec.rate != OWN_RATE and one.tolerance_s != MIXTURE_TOLERANCE:
            notes.append((one.name, "its tolerance_s decides nothing: windows go by the rate"))
    return [MemberNote(name=name, text=text) for name, text in notes]


def with_weight(spec: MixtureSpec) -> tuple[MixtureSpec, list[str]]:
    """Return the spec without members of weight 0, and their names; raypipe does not open them."""
    given = _given_weights(spec)
    kept = [position for position, weight in enumerate(given) if weight]
    if not kept:
        raise _all_zero(spec)
    return only_members(spec, kept), [one.name for one, weight in zip(spec.members, given, strict=True) if not weight]


def only_members(spec: MixtureSpec, positions: Sequence[int]) -> MixtureSpec:
    """Return the spec with some of its members, and their weights."""
    weights = spec.weights if isinstance(spec.weights, str) else tuple(spec.weights[i] for i in positions)
    return replace(spec, members=tuple(spec.members[i] for i in positions), weights=weights)


def _given_weights(spec: MixtureSpec) -> list[float]:
    return [one.weight for one in spec.members] if isinstance(spec.weights, str) else list(spec.weights)


def _all_zero(spec: MixtureSpec) -> ConfigError:
    names = ", ".join(repr(one.name) for one in spec.members)
    return ConfigError(
        f"every member of the mixture has weight 0: {names} with weights={spec.weights!r}; give at least one of them a "
        f"weight above 0"
    )


def resolve_weights(spec: MixtureSpec, frames: Sequence[int], episodes: Sequence[int]) -> tuple[float, ...]:
    """Return the share of each member; shares add up to 1, and a member of weight 0 has exactly 0.

    Args:
        frames: the selected frames of each member.
        episodes: the selected episodes of each member.

    Raises:
        ConfigError: no member is left, one has a weight but no frame, or its share is 0 at this temperature.
    """
    assert len(frames) == len(episodes) == len(spec.members), "counts and members do not match"
    weights = _given_weights(spec)
    if isinstance(spec.weights, str) and spec.weights != "given":
        counts = [float(count) for count in (episodes if spec.weights == "episodes" else frames)]
        counts = list(map(math.sqrt, counts)) if spec.weights == "sqrt" else counts
        weights = [count if weight else 0.0 for count, weight in zip(counts, weights, strict=True)]
    most = max(weights)
    if not most:
        raise _all_zero(spec)
    # Divide by the largest first: powers and sums of large weights overflow.
    raised = [(weight / most) ** (1 / spec.temperature) for weight in weights]
    for one, weight, power, count in zip(spec.members, weights, raised, frames, strict=True):
        if weight and not count:
            raise ConfigError(f"member {one.name!r} has weight {weight:g} and no selected frame; give it weight 0")
        if weight and not power:
            raise ConfigError(
                f"member {one.name!r} with weight {weight:g} comes to nothing beside {most:g} at temperature "
                f"{spec.temperature:g}; raise the temperature, or give the member weight 0"
            )
    total = math.fsum(raised)
    return tuple(power / total for power in raised)
