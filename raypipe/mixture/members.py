"""Every member of a mixture by itself: opened, under the mixture's names, with windows at its own frame rate.

`open_members` opens all datasets at once, so that everything that can be known before training is known then. It reads
the metadata in threads. One unusable dataset does not stop it from looking at the others: one error or one warning
names every unusable one. What a usable dataset leaves out becomes a note, not a warning: four hundred datasets would
make too many warnings.

The user gives windows once, by names in the mixture. Frame rates differ, so seconds become another number of frames in
each dataset. Seconds that fall between two frames are an error, unless a common `rate` takes the nearest one.

::

    0.1 s     at 30 fps -> frame 3      at 50 fps -> frame 5      at 15 fps -> 1.5: no frame
    k = 3     at its own rate -> 3      with rate=10, at 50 fps: 0.3 s -> 15
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from raypipe.dataset import (
    ActionMap,
    ActionSpec,
    Dataset,
    MemberMap,
    SampleSpec,
    Schema,
    WindowSpec,
    as_seconds,
    between_frames,
    check_cameras,
    find_dims,
    find_missing_cameras,
    is_pattern,
    knowing_rows,
    map_actions,
    off_frame_s,
    unreadable_cameras,
    window_from_offsets,
)
from raypipe.errors import ConfigError, DatasetError, DownloadError, RaypipeError, suggest
from raypipe.format import INDEX_FEATURES, Feature, find_absent_columns, one_line, read_metadata, row_features_of
from raypipe.mixture.spec import MemberSpec, MixtureSpec, OnBadDataset
from raypipe.storage import Storage, is_repo_id, is_transient, open_root, retry_transient
from raypipe.text import count_bar, counted, cut_inside

NUM_THREADS: Final = {"local": 8, "remote": 32}
"""With storage that answers after 20 ms, 100 datasets take 37 s one by one and 1.4 s in 32 threads. For local files the
CPU is the limit: 4 ms a dataset, mostly under Python's lock, so more threads only cost more CPU. A few threads help
with folders that lie on another machine."""

_REASON_CHARACTERS: Final = 400
"""The most characters of one dataset's error in a list of many: about two lines of a terminal."""

_BAD_DATA: Final = (RaypipeError, OSError, pa.ArrowException)
"""Errors that make a dataset bad. Any other error is a bug in the program, not bad data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMember:
    """A dataset that cannot be used, and why."""

    name: str
    root: str
    error: str
    """On one line."""
    cause: type[RaypipeError]
    """The dataset itself (`DatasetError`), what the mixture asks of it, or storage that does not answer."""

    def __str__(self) -> str:
        return f"{self.name} ({self.root}): {cut_inside(self.error, _REASON_CHARACTERS)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberNote:
    """Something odd or left out that does not prevent the use of a dataset."""

    name: str
    """The member's name; empty if the note is about no single member."""
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.name else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The datasets of a mixture."""

    datasets: tuple[Dataset, ...]
    """In the order of the members, without the bad ones."""
    positions: tuple[int, ...]
    """For each dataset, the position of its member."""
    bad: tuple[BadMember, ...]
    notes: tuple[MemberNote, ...]


def open_members(
    members: Sequence[MemberSpec], *, on_bad_dataset: OnBadDataset = "raise", progress: bool = True
) -> Opened:
    """Return the datasets of `members`, with the cameras that each asks for; reads ``meta/`` and a few footers.

    Args:
        progress: whether to show a bar at a terminal or in a notebook.

    Raises:
        DatasetError: a dataset is unusable and `on_bad_dataset` is ``"raise"``, or all are. The message lists every
            unusable one.
        DownloadError: storage does not answer. ``"skip"`` raises it too, since the dataset itself may be good.
        ConfigError: a member asks for a camera that its dataset does not have. ``"skip"`` raises it too.
    """
    if not members:
        raise ConfigError("the mixture has no members; give at least one dataset")
    results = _open_all(members, progress=progress)
    bad = tuple(one for one in results if isinstance(one, BadMember))
    good = {position: one for position, one in enumerate(results) if not isinstance(one, BadMember)}
    causes = {one.cause for one in bad}
    worst = next((cause for cause in (ConfigError, DownloadError) if cause in causes), DatasetError)
    if bad:
        listed = "\n".join(f"  - {member}" for member in bad)
        text = (
            f"{len(bad)} of {counted(len(members), 'dataset')} of the mixture cannot be used; {len(good)} can:\n"
            f"{listed}\nMend them (`raypipe validate ROOT` says what is wrong with one), give them weight 0, or leave "
            f"out all that cannot be used with on_bad_dataset: skip."
        )
        if worst is not DatasetError:
            text += " It leaves out bad datasets only, not what is asked wrongly or does not answer now."
        if on_bad_dataset == "raise" or not good or worst is not DatasetError:
            raise worst(text)
        warnings.warn(text, stacklevel=2)
    return Opened(
        datasets=tuple(dataset for dataset, _ in good.values()),
        positions=tuple(good),
        bad=bad,
        notes=tuple(MemberNote(name=members[i].name, text=text) for i, (_, texts) in good.items() for text in texts),
    )


def _open_all(members: Sequence[MemberSpec], *, progress: bool) -> list[tuple[Dataset, list[str]] | BadMember]:
    """Return every member, opened with the notes about it or bad, in order, however fast each was read."""
    is_remote = any("://" in member.root or is_repo_id(member.root) for member in members)
    kind = "remote" if is_remote else "local"
    pool = ThreadPoolExecutor(min(NUM_THREADS[kind], len(members)), thread_name_prefix="raypipe-open")
    try:
        futures = [pool.submit(_open_member, member) for member in members]
        with count_bar("opening datasets", len(members), is_on=progress) as advance:
            for future in as_completed(futures):
                # Raises any error that is not about the data, without waiting for the rest.
                future.result()
                advance(1)
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _open_member(member: MemberSpec) -> tuple[Dataset, list[str]] | BadMember:
    try:
        storage = open_root(member.root)
        return retry_transient(lambda: _read_member(member, storage))
    except _BAD_DATA as error:
        reason = one_line(error) or type(error).__name__
        named = reason if isinstance(error, RaypipeError) else f"{type(error).__name__}: {reason}"
        cause: type[RaypipeError] = DownloadError if is_transient(error) else DatasetError
        cause = ConfigError if isinstance(error, ConfigError) else cause
        return BadMember(name=member.name, root=member.root, error=named, cause=cause)


def _read_member(member: MemberSpec, storage: Storage) -> tuple[Dataset, list[str]]:
    """Return the dataset with the cameras that the member asks for, and the notes about it."""
    meta = read_metadata(storage)
    missing, absent = find_missing_cameras(meta), find_absent_columns(meta)
    if not len(meta.episodes):
        raise DatasetError("it has no episodes")
    left_out = {name: f"feature {name!r} is left out: {why}" for name, why in meta.opaque.items()}
    if member.cameras == "all":
        unreadable = unreadable_cameras(meta, missing)
        cameras = tuple(name for name in meta.cameras if name not in unreadable and name not in member.drop)
        left_out |= {name: f"camera {name!r} is left out: {why}" for name, why in unreadable.items()}
    else:
        cameras = tuple(dict.fromkeys(name for name in member.cameras.values() if name not in member.drop))
        check_cameras(meta, cameras, missing)
    declared, rows = (row_features_of(meta, cameras, without) for without in ((), absent))
    for name in (name for name in absent if name in declared and name not in rows):
        left_out[name] = f"feature {name!r} is left out: declared in info.json, and the rows have no such column"
    dataset = Dataset(meta=meta, spec=SampleSpec(cameras=cameras), window=WindowSpec(), missing_cameras=missing)
    return knowing_rows(dataset, rows), [*meta.notes, *(left_out[name] for name in left_out if name not in member.drop)]


@dataclass(frozen=True, kw_only=True)
class MemberFeatures:
    """The features of one dataset: by its own names, or by those in the mixture. A `Feature` keeps its own name."""

    name: str
    rows: Mapping[str, Feature]
    cameras: Mapping[str, Feature]
    others: tuple[str, ...] = ()
    """Declared but not given: columns and cameras without files. A spec may drop them, but not rename them."""

    @cached_property
    def features(self) -> Mapping[str, Feature]:
        """Row features, then cameras."""
        return {**self.rows, **self.cameras}


def features_of(name: str, dataset: Dataset) -> MemberFeatures:
    """Return the features of a dataset under its `name` in the mixture; reads which columns the rows have."""
    rows = {key: feature for key, feature in dataset.row_features.items() if not feature.is_camera}
    cameras = {key: dataset.features[key] for key in dataset.spec.cameras}
    others = tuple(key for key in dataset.features if key not in rows and key not in cameras)
    return MemberFeatures(name=name, rows=rows, cameras=cameras, others=others)


def offer_of(member: MemberFeatures, spec: MemberSpec) -> tuple[MemberFeatures, list[str]]:
    """Return what a member gives under the mixture's names, and its misfits: names that it lacks or gives twice."""
    misfits = _unknown_names(member, spec)
    rows = {own: feature for own, feature in member.rows.items() if own not in spec.drop}
    named_rows = [(spec.rename.get(own, own), own) for own in rows]
    named_cameras = [(spec.rename.get(own, own), own) for own in member.cameras if own not in spec.drop]
    if not isinstance(spec.cameras, str):
        named_cameras = [(name, own) for name, own in spec.cameras.items() if own in member.cameras]
    named: dict[str, str] = {}
    misfits += [
        f"{member.name}: {named[name]!r} and {own!r} both become {name!r}; rename or drop one of them"
        for name, own in (*named_rows, *named_cameras)
        if named.setdefault(name, own) != own
    ]
    offer = MemberFeatures(
        name=member.name,
        rows={name: rows[own] for name, own in named_rows},
        cameras={name: member.cameras[own] for name, own in named_cameras},
    )
    return offer, misfits


def _unknown_names(member: MemberFeatures, spec: MemberSpec) -> list[str]:
    given = [*(name for name in member.rows if name not in INDEX_FEATURES), *member.cameras]
    cameras = [] if isinstance(spec.cameras, str) else list(spec.cameras.values())
    misfits = []
    for key, names, known in (
        ("rename", spec.rename, given),
        ("cameras", cameras, [*member.cameras]),
        ("drop", spec.drop, [*given, *member.others]),
    ):
        for name in names:
            if name not in known:
                why = " declares and does not give" if name in member.others else " does not have"
                misfits.append(f"{member.name}: {key} names {name!r}, which it{why}{suggest(name, known)}")
    if not isinstance(spec.cameras, str):
        misfits += [
            f"{member.name}: rename names the camera {name!r}; give its name in `cameras`, which stands too"
            for name in spec.rename
            if name in member.cameras
        ]
    return misfits


def member_windows(
    schema: Schema,
    spec: MixtureSpec,
    members_fps: Sequence[float],
    *,
    delta_timestamps: Mapping[str, Sequence[float]] | None = None,
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> tuple[WindowSpec, ...]:
    """Return the window of each member under its own names, from windows given by names in the mixture.

    Seconds become the frame of each member within its tolerance. Frames count at each member's own rate. With a common
    `spec.rate`, frame ``k`` is at ``k / rate`` seconds, and a slot takes the nearest frame, whatever its distance. A
    member has no window for a feature that it lacks.

    Args:
        spec: the mixture of exactly the members of `schema`, in their order.

    Raises:
        ConfigError: a name is unknown, or seconds fall between frames; the message lists all members and seconds.
    """
    assert len(spec.members) == len(schema.members) == len(members_fps), "the spec is of other members"
    if (delta_timestamps is None) == (offsets is None):
        raise ConfigError("give either delta_timestamps (seconds) or offsets (frames)")
    _check_names(delta_timestamps or offsets or {}, schema)
    if offsets is not None:
        frames = window_from_offsets(offsets).offsets
        if isinstance(spec.rate, str):
            return tuple(_own_window(one, frames) for one in schema.members)
        seconds = {name: [number / spec.rate for number in numbers] for name, numbers in frames.items()}
    else:
        seconds = as_seconds(delta_timestamps or {})
    nearest: Callable[[float], int] = _half_up
    if isinstance(spec.rate, str):
        _check_distances(schema, spec, members_fps, seconds)
        # As for the window of a single dataset.
        nearest = round
    return tuple(
        _own_window(one, {name: tuple(nearest(delta * fps) for delta in deltas) for name, deltas in seconds.items()})
        for one, fps in zip(schema.members, members_fps, strict=True)
    )


def member_actions(
    spec: ActionSpec, schema: Schema, members: Sequence[tuple[str, Dataset]]
) -> tuple[ActionMap | None, ...]:
    """Return the action representation of each member; None for a member that has no action.

    Raises:
        ConfigError: a member lacks the state or a number, or a pattern fits no member.
    """
    _check_names({spec.feature: (), spec.to: ()}, schema)
    patterns = [one for one in (*spec.absolute, *spec.wrap) if is_pattern(one)]
    maps: list[ActionMap | None] = []
    for (name, dataset), own in zip(members, schema.members, strict=True):
        if spec.feature not in own.rows:
            maps.append(None)
            continue
        if spec.to not in own.rows:
            raise ConfigError(
                f"actions are {spec.mode} to {spec.to!r}, which member {name!r} does not have; drop its "
                f"{spec.feature!r}, or leave it out"
            )
        action, state = own.rows[spec.feature], own.rows[spec.to]
        place, features = f"member {name!r}", dataset.row_features
        maps.append(map_actions(spec, features, action=action, state=state, place=place, known=patterns))
    having = [(one.action, dataset) for one, (_, dataset) in zip(maps, members, strict=True) if one is not None]
    for one in patterns:
        if not any(find_dims(one, data.row_features[own], "", is_needed=False) for own, data in having):
            names = {name for own, data in having for name in data.row_features[own].names}
            raise ConfigError(
                f"no member has a number of {spec.feature!r} that fits {one!r}{suggest(str(one), sorted(names))}"
            )
    return tuple(maps)


def _check_names(given: Mapping[str, Any], schema: Schema) -> None:
    unknown = [name for name in given if name not in schema.features]
    if unknown:
        raise ConfigError(
            f"the window names {', '.join(map(repr, unknown))}, which the mixture does not have"
            f"{suggest(unknown[0], schema.features)}"
        )


def _half_up(frame: float) -> int:
    # Halves go up, not to the even number as in round(), so that slots half a frame apart take each frame twice. The
    # inner rounding treats a float's 1.4999999 as a half too.
    return math.floor(round(frame, 6) + 0.5)


def _own_window(member: MemberMap, frames: Mapping[str, tuple[int, ...]]) -> WindowSpec:
    own = member.own_names
    return WindowSpec(offsets={own[name]: numbers for name, numbers in frames.items() if name in own})


def _check_distances(
    schema: Schema, spec: MixtureSpec, members_fps: Sequence[float], seconds: Mapping[str, Sequence[float]]
) -> None:
    misses: list[str] = []
    needed: dict[str, float] = {}
    for member, own, fps in zip(spec.members, schema.members, members_fps, strict=True):
        tolerance_s, place = spec.tolerance_s, "for the whole mixture"
        if not isinstance(member.tolerance_s, str):
            tolerance_s, place = member.tolerance_s, f"under {member.name}"
        given = {name: deltas for name, deltas in seconds.items() if name in own.own_names}
        wrong = between_frames(given, fps, tolerance_s)
        if wrong:
            misses.append(f"  {member.name} at {fps:g} fps, within {tolerance_s:g} s: {wrong}")
            away_s = max(off_frame_s(delta, fps) for deltas in wrong.values() for delta in deltas)
            needed[place] = max(needed.get(place, 0.0), away_s)
    if misses:
        lines = ["delta_timestamps must fall on frames of every member, and these do not:", *misses]
        lines += ["Give other seconds, or write in the mixture file the smallest tolerance that takes them:"]
        lines += [f"  {place}:  tolerance_s: {_round_up(away_s):g}" for place, away_s in needed.items()]
        lines += [f"or let every slot go to the nearest frame, however far:  rate: {max(members_fps):g}"]
        raise ConfigError("\n".join(lines))


def _round_up(value: float) -> float:
    """Return `value` rounded up to two digits."""
    return float(Context(prec=2, rounding=ROUND_CEILING).create_decimal_from_float(value))
