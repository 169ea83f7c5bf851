"""`Mixture`: many unlike datasets as one; every epoch takes a stated share of each."""

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from raypipe.dataset import (
    ActionSpec,
    Dataset,
    Schema,
    WindowSpec,
    check_window,
    index_dataset,
    kept_features,
    knowing_rows,
)
from raypipe.decode import ORIGINAL_SIZE, Resize
from raypipe.errors import ConfigError, noting, suggest
from raypipe.format import Feature
from raypipe.mixture.file import is_mixture_file, read_mixture_file
from raypipe.mixture.members import BadMember, MemberNote, open_members
from raypipe.mixture.spec import ALL_FRAMES, MIXTURE_TOLERANCE, OWN_RATE, MemberSpec, MixtureSpec, resolve_weights
from raypipe.mixture.unify import unify, with_windows
from raypipe.mixture.windows import member_actions, member_windows
from raypipe.plan import EpisodeIndex, mix_indexes, split_frames
from raypipe.text import counted, make_spec

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
        self,
        members: "str | Path | MixtureSpec | Sequence[Any]",
        *,
        progress: bool = True,
        **settings: Any,
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
        spec = _make_spec(members, settings)
        is_file = isinstance(members, str | Path)
        with noting(f"while opening the mixture {str(members)!r}") if is_file else nullcontext():
            self._open(spec, progress=progress)

    def _open(self, spec: MixtureSpec, *, progress: bool) -> None:
        wanted, left_out = with_weight(spec)
        opened = open_members(wanted.members, on_bad_dataset=spec.on_bad_dataset, progress=progress)
        self.spec = only_members(wanted, opened.positions)
        self.members = tuple(
            Member(spec=one, dataset=dataset) for one, dataset in zip(self.spec.members, opened.datasets, strict=True)
        )
        unified = unify(self.datasets, self.spec, self.spec.members)
        self.schema = unified.schema
        self.bad = opened.bad
        self.notes = (
            *(MemberNote(name=name, text="left out: its weight is 0") for name in left_out),
            *_unused_settings(self.spec),
            *opened.notes,
            *(MemberNote(name="", text=text) for text in unified.notes),
        )
        self._check_shares()

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
        members = tuple(
            replace(member, dataset=_windowed(member.dataset, window))
            for member, window in zip(self.members, windows, strict=True)
        )
        return self._changed(members, self.schema)

    def with_actions(self, actions: ActionSpec | Mapping[str, Any]) -> "Mixture":
        """Return this mixture with actions relative to a state, or to the action before, by names in a batch.

        The numbers are those of each member's own vector. A name must fit every member that has the action; a pattern
        such as ``*gripper*`` must fit at least one.
        """
        spec = make_spec(ActionSpec, actions, "actions")
        maps = member_actions(spec, self.schema, [(member.name, member.dataset) for member in self.members])
        members = tuple(
            replace(member, dataset=_knowing(replace(member.dataset, actions=mapped), member.dataset))
            for member, mapped in zip(self.members, maps, strict=True)
        )
        return self._changed(members, self.schema)

    @property
    def actions(self) -> ActionSpec | None:
        """How batches represent actions; None: as the datasets store them."""
        return next((one.actions.spec for one in self.datasets if one.actions is not None), None)

    def select_features(self, names: Sequence[str]) -> "Mixture":
        """Return this mixture with only these features and cameras, by their names in a batch.

        The index columns always stay. Use `MemberSpec.drop` to leave out features of a single member.
        """
        kept = kept_features(names, list(self.features), "the mixture")
        members = tuple(replace(one, dataset=_with_actions_among(one.dataset, kept)) for one in self.members)
        changed = self._changed(members, self.schema.only(kept))
        if isinstance(self.spec.resize, Mapping):
            sizes = {camera: size for camera, size in self.spec.resize.items() if camera in kept}
            changed.spec = replace(self.spec, resize=sizes or ORIGINAL_SIZE)
        return changed

    def resized(self, resize: Resize) -> "Mixture":
        """Return this mixture with cameras of another size; the pipeline resizes them when it decodes."""
        changed = copy.copy(self)
        changed.spec = replace(self.spec, resize=resize)
        unified = unify(self.datasets, changed.spec, changed.spec.members)
        return changed._changed(self.members, unified.schema.only(self.schema.features))

    def _changed(self, members: tuple[Member, ...], schema: Schema) -> "Mixture":
        changed = copy.copy(self)
        changed.members = members
        changed.schema = with_windows(replace(schema, windows={}, time_axes=()), changed.datasets)
        return changed

    def _check_shares(self) -> None:
        """Raise now the errors that a plan would raise: a member without a frame, or shares that come to nothing."""
        self.index()

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


def _windowed(dataset: Dataset, window: WindowSpec) -> Dataset:
    # Pass the known columns on: without them a copy would open files to find them again.
    if dataset.actions is not None:
        check_window(dataset.actions.spec, dataset.actions.action, window)
    return _knowing(replace(dataset, window=window), dataset)


def _with_actions_among(dataset: Dataset, kept: Collection[str]) -> Dataset:
    if dataset.actions is None:
        return dataset
    return _knowing(replace(dataset, actions=dataset.actions.among(kept, "the mixture")), dataset)


def _knowing(changed: Dataset, dataset: Dataset) -> Dataset:
    return knowing_rows(changed, dataset.row_features)


def _make_spec(members: Any, settings: Mapping[str, Any]) -> MixtureSpec:
    known = [field.name for field in fields(MixtureSpec) if field.name != "members"]
    for name in settings:
        if name not in known:
            raise ConfigError(f"a mixture has no setting {name!r}{suggest(name, known)}")
    if isinstance(members, MixtureSpec):
        return replace(members, **settings)
    if isinstance(members, str | Path):
        if not is_mixture_file(str(members)):
            raise ConfigError(
                f"{str(members)!r} is no mixture file: give a .yaml, .yml or .toml file, or a list of datasets"
            )
        return replace(read_mixture_file(str(members)), **settings)
    return MixtureSpec(members=members, **settings)


def _unused_settings(spec: MixtureSpec) -> list[MemberNote]:
    """Return notes on settings that have no effect, because another setting decides."""
    notes = []
    for one in spec.members:
        if isinstance(spec.weights, str) and spec.weights != "given" and one.weight != 1:
            notes.append(
                MemberNote(
                    name=one.name, text=f"its weight {one.weight:g} decides nothing: weights is {spec.weights!r}"
                )
            )
        if spec.rate != OWN_RATE and one.tolerance_s != MIXTURE_TOLERANCE:
            notes.append(MemberNote(name=one.name, text="its tolerance_s decides nothing: windows go by the rate"))
    return notes


def with_weight(spec: MixtureSpec) -> tuple[MixtureSpec, list[str]]:
    """Return the spec without members of weight 0, and their names; raypipe does not open them."""
    given = [one.weight for one in spec.members] if isinstance(spec.weights, str) else list(spec.weights)
    kept = [position for position, weight in enumerate(given) if weight]
    if not kept:
        raise ConfigError(
            f"every member of the mixture has weight 0: {', '.join(repr(one.name) for one in spec.members)}; give at "
            f"least one of them a weight above 0"
        )
    return only_members(spec, kept), [one.name for one, weight in zip(spec.members, given, strict=True) if not weight]


def only_members(spec: MixtureSpec, positions: Sequence[int]) -> MixtureSpec:
    """Return the spec with some of its members, and their weights."""
    weights = spec.weights if isinstance(spec.weights, str) else tuple(spec.weights[i] for i in positions)
    return replace(spec, members=tuple(spec.members[i] for i in positions), weights=weights)
