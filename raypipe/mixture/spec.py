"""What a user asks of a mixture: its members, how often each is seen, and how unlike features become one.

This module decides which values are allowed, the names of members, and what their weights come to. It opens nothing;
`unify` checks whether a dataset has the features that a spec names.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Final, Literal, get_args

from raypipe.dataset import DIM_IS_PAD, IS_MISSING, REPRESENTATION, TOLERANCE_S, Dataset
from raypipe.decode import ORIGINAL_SIZE, Fit, Resize, check_fit, check_resize
from raypipe.errors import ConfigError, as_damage, suggest
from raypipe.format import INDEX_FEATURES
from raypipe.plan import SelectionSpec, check_whole
from raypipe.storage import take_login

WeightRule = Literal["given", "frames", "episodes", "sqrt"]
OnMissing = Literal["raise", "drop", "fill"]
OnBadDataset = Literal["raise", "skip"]

ALL_CAMERAS: Final = "all"
ALL_FRAMES: Final = "all"
OWN_RATE: Final = "own"
MIXTURE_TOLERANCE: Final = "mixture"

_BATCH_KEYS: Final = ("dataset_index", "dataset", "robot_type", "augment_seed", "is_repeat", "task")
_MASK_ENDINGS: Final = ("_is_pad", DIM_IS_PAD, IS_MISSING, REPRESENTATION)

_MAX_COUNT: Final = 1 << 62
"""No real number of frames in an epoch, pixels of a side or numbers of a vector reaches this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """One dataset of a mixture."""

    root: str
    """A path, or a URI that fsspec knows."""

    name: str = ""
    """Unique in the mixture; the order depends on it. If it is empty, `MixtureSpec` takes it from `root`."""

    weight: float = 1.0
    """Relative to the other members, at least 0; 0 leaves the member out."""

    rename: Mapping[str, str] = field(default_factory=dict)
    """The dataset's own feature name -> its name in the mixture, for row features and cameras."""

    cameras: Mapping[str, str] | Literal["all"] = ALL_CAMERAS
    """Name in the mixture -> own camera name. A mapping uses only these cameras, and `rename` must name no camera."""

    drop: tuple[str, ...] = ()
    """Own feature names to leave out."""

    selection: SelectionSpec = field(default_factory=SelectionSpec)
    """May be given as a dict of its fields."""

    tolerance_s: float | Literal["mixture"] = MIXTURE_TOLERANCE
    """How far a window slot may be from a frame of this dataset; ``"mixture"``: as far as `MixtureSpec` allows."""

    robot_type: str = ""
    """Empty: the robot type in ``info.json``."""

    def __post_init__(self) -> None:
        if isinstance(self.root, os.PathLike):
            object.__setattr__(self, "root", os.fspath(self.root))
        for key in ("root", "name", "robot_type"):
            if not isinstance(getattr(self, key), str):
                raise ConfigError(f"{key} of a member is {getattr(self, key)!r}; give text")
        object.__setattr__(self, "root", take_login(self.root))
        if not self.root:
            raise ConfigError(f"member {self.name!r} has an empty root; give the path or URI of a dataset")
        who = f"member {self.name or self.root!r}"
        object.__setattr__(self, "weight", _number(f"weight of {who}", self.weight))
        if self.tolerance_s != MIXTURE_TOLERANCE:
            tolerance_s = _number(f"tolerance_s of {who}", self.tolerance_s, named_value=MIXTURE_TOLERANCE)
            object.__setattr__(self, "tolerance_s", tolerance_s)
        rename = _names(f"rename of {who}", self.rename, "own name -> name in the mixture")
        _check_free(f"rename of {who}", rename.values())
        object.__setattr__(self, "rename", rename)
        if self.cameras != ALL_CAMERAS:
            cameras = _names(f"cameras of {who}", self.cameras, "name in the mixture -> own camera, or 'all'")
            _check_free(f"cameras of {who}", cameras)
            object.__setattr__(self, "cameras", cameras)
        object.__setattr__(self, "drop", _drop(who, self.drop))
        object.__setattr__(self, "selection", _selection(who, self.selection))
        _check_own_names(self, who)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """Several datasets as one: the members, and the settings for all of them."""

    members: tuple[MemberSpec, ...]
    """At least one. An item may be a root or an opened `Dataset`, ``(either, weight)``, a dict of fields, or a
    `MemberSpec`."""

    weights: WeightRule | tuple[float, ...] | Literal["auto"] = "auto"
    """``given``: the members' own weights. ``frames``, ``episodes``, ``sqrt`` (square root of frames): counts over the
    selection of each member; of the members' own weights only 0 still matters, and leaves the member out. Or one number
    per member. ``auto`` becomes ``given`` if a member has a weight (a `MemberSpec`: other than 1), else ``frames``,
    which is one pass over everything."""

    temperature: float = 1.0
    """Weights become ``w ** (1 / temperature)``: above 1 it evens them out, below 1 it sharpens them."""

    frames_per_epoch: int | Literal["all"] = ALL_FRAMES
    """``"all"``: the sum of the selected frames of members with a weight above 0."""

    resize: Resize = ORIGINAL_SIZE
    """Height and width of every camera, or a mapping from cameras of the mixture to them."""

    fit: Fit = "stretch"
    """How to fit a frame into a size of another shape: ``stretch``, ``letterbox`` (all of it, between black bars) or
    ``crop`` (its middle)."""

    on_missing: OnMissing = "raise"
    """What to do with a feature that some members lack: raise an error with a table (``raise``), leave it out
    everywhere (``drop``), or fill it with zeros and a mask (``fill``)."""

    widths: Mapping[str, int] = field(default_factory=dict)
    """Pad these vectors to this many numbers, at least as many as the widest member has."""

    rate: float | Literal["own"] = OWN_RATE
    """A common rate in frames per second: windows count at this rate, and a slot takes the member's nearest frame."""

    tolerance_s: float = TOLERANCE_S
    """How far a window slot may be from a frame of a member; LeRobot's default. A common rate does not use it."""

    on_bad_dataset: OnBadDataset = "raise"
    """What to do with a member that cannot be opened: ``raise`` an error, or ``skip`` and name it."""

    def __post_init__(self) -> None:
        members, has_weights = _members(self.members)
        object.__setattr__(self, "members", members)
        if isinstance(self.weights, str) and self.weights == "auto":
            object.__setattr__(self, "weights", "given" if has_weights else "frames")
        object.__setattr__(self, "weights", _weights(self.weights, members))
        for key, kind in (("on_missing", OnMissing), ("on_bad_dataset", OnBadDataset), ("fit", Fit)):
            _check_choice(key, getattr(self, key), get_args(kind))
        object.__setattr__(self, "temperature", _number("temperature", self.temperature, is_positive=True))
        object.__setattr__(self, "tolerance_s", _number("tolerance_s", self.tolerance_s))
        if self.rate != OWN_RATE:
            rate = _number("rate", self.rate, is_positive=True, named_value=OWN_RATE)
            object.__setattr__(self, "rate", rate)
        if self.frames_per_epoch != ALL_FRAMES:
            frames = check_whole("frames_per_epoch", self.frames_per_epoch, 1, _MAX_COUNT, ALL_FRAMES)
            object.__setattr__(self, "frames_per_epoch", frames)
        object.__setattr__(self, "resize", check_resize(self.resize, "resize"))
        check_fit(self.fit, self.resize, "fit")
        object.__setattr__(self, "widths", _widths(self.widths))


def is_batch_key(name: str) -> bool:
    """Return whether a batch sets a key of this name itself, so that no feature can have the name."""
    return name in _BATCH_KEYS or name.endswith(_MASK_ENDINGS)


def resolve_weights(spec: MixtureSpec, frames: Sequence[int], episodes: Sequence[int]) -> tuple[float, ...]:
    """Return the share of each member; shares add up to 1, and a member of weight 0 has exactly 0.

    Args:
        frames: the selected frames of each member.
        episodes: the selected episodes of each member.

    Raises:
        ConfigError: no member is left, one has a weight but no frame, or its share is 0 at this temperature.
    """
    assert len(frames) == len(episodes) == len(spec.members), "counts and members do not match"
    names = [member.name for member in spec.members]
    weights = _relative_weights(spec, frames, episodes)
    most = max(weights)
    if not most:
        raise ConfigError(
            f"every member of the mixture has weight 0: {', '.join(map(repr, names))} with weights={spec.weights!r}; "
            f"give at least one of them a weight above 0"
        )
    # Divide by the largest first: powers and sums of large weights overflow.
    raised = [(weight / most) ** (1 / spec.temperature) for weight in weights]
    for name, weight, power, count in zip(names, weights, raised, frames, strict=True):
        if weight and not count:
            raise ConfigError(f"member {name!r} has weight {weight:g} and no selected frame; give it weight 0")
        if weight and not power:
            raise ConfigError(
                f"member {name!r} with weight {weight:g} comes to nothing beside {most:g} at temperature "
                f"{spec.temperature:g}; raise the temperature, or give the member weight 0"
            )
    total = math.fsum(raised)
    return tuple(power / total for power in raised)


def _relative_weights(spec: MixtureSpec, frames: Sequence[int], episodes: Sequence[int]) -> list[float]:
    if not isinstance(spec.weights, str):
        return list(spec.weights)
    given = [member.weight for member in spec.members]
    if spec.weights == "given":
        return given
    counts = episodes if spec.weights == "episodes" else frames
    values = [math.sqrt(count) if spec.weights == "sqrt" else float(count) for count in counts]
    return [value if weight else 0.0 for value, weight in zip(values, given, strict=True)]


def _members(given: Any) -> tuple[tuple[MemberSpec, ...], bool]:
    """Return the members with their names, and whether the user gave any of them a weight."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"members is {given!r}; give a list of datasets, as [('path', 2.0), 'other path']")
    pairs = [_member(item, position) for position, item in enumerate(given)]
    if not pairs:
        raise ConfigError("a mixture needs at least one dataset, and its list of members is empty")
    return _named([member for member, _ in pairs]), any(has_weight for _, has_weight in pairs)


def _member(item: Any, position: int) -> tuple[MemberSpec, bool]:
    if isinstance(item, MemberSpec):
        return item, item.weight != 1
    if isinstance(item, str | os.PathLike):
        return MemberSpec(root=os.fspath(item)), False
    if isinstance(item, Dataset):
        return _opened_member(item), False
    if isinstance(item, Mapping):
        _check_keys(item, [one.name for one in fields(MemberSpec)], f"members[{position}]")
        if "root" not in item:
            raise ConfigError(
                f"members[{position}] is {dict(item)!r} and has no 'root'; give the dataset's path or URI"
            )
        return MemberSpec(**item), "weight" in item
    if isinstance(item, Sequence) and len(item) == 2:
        if isinstance(item[0], Dataset):
            return replace(_opened_member(item[0]), weight=item[1]), True
        return MemberSpec(root=item[0], weight=item[1]), True
    raise ConfigError(
        f"members[{position}] is {item!r}; give a root, a dataset, (either, weight), a dict of the fields of "
        f"MemberSpec, or a MemberSpec"
    )


def _opened_member(dataset: Dataset) -> MemberSpec:
    """Return an opened dataset as a member: its root, and what it leaves out. Raise if it has windows or actions."""
    if dataset.window.offsets:
        raise ConfigError(
            f"{dataset.meta.root!r} has windows, and a mixture has its own for all members: give the dataset without, "
            f"and mixture.windowed(...), or delta_timestamps to the Pipeline"
        )
    if dataset.actions is not None:
        raise ConfigError(
            f"{dataset.meta.root!r} has actions {dataset.actions.spec}, and a mixture has one representation for all "
            f"members: give the dataset without, and mixture.with_actions(...), or actions to the Pipeline"
        )
    given = {*dataset.row_features, *dataset.spec.cameras, *INDEX_FEATURES, *dataset.missing_cameras}
    return MemberSpec(
        root=str(dataset.meta.root),
        drop=tuple(name for name in dataset.features if name not in given),
        tolerance_s=MIXTURE_TOLERANCE if dataset.spec.tolerance_s == TOLERANCE_S else dataset.spec.tolerance_s,
    )


def _check_keys(given: Mapping[Any, Any], known: Sequence[str], place: str) -> None:
    """Raise for a key that is not `known`, and suggest the nearest."""
    for key in given:
        if key not in known:
            raise ConfigError(f"{place} has no field {key!r}{suggest(str(key), known)}")


def _named(members: Sequence[MemberSpec]) -> tuple[MemberSpec, ...]:
    given = Counter(member.name for member in members if member.name)
    for name, count in given.items():
        if count > 1:
            raise ConfigError(f"{count} members of the mixture are called {name!r}; their names must differ")
    parts = [_parts(member.root) for member in members]
    short = _short_names({part for member, part in zip(members, parts, strict=True) if not member.name}, given)
    used, named = set(given), []
    for member, part in zip(members, parts, strict=True):
        name = member.name or _free_name(short[part], used)
        used.add(name)
        named.append(member if member.name else replace(member, name=name))
    return tuple(named)


def _parts(root: str) -> tuple[str, ...]:
    """Return the folders of a root, outermost first, without protocol and dots."""
    parts = root.replace(os.sep, "/").split("/")
    return tuple(part for part in parts if part not in ("", ".", "..") and not part.endswith(":")) or ("dataset",)


def _short_names(roots: set[tuple[str, ...]], taken: Iterable[str]) -> dict[tuple[str, ...], str]:
    """Return for each root the shortest run of its last parts that no other root ends in."""
    names: dict[tuple[str, ...], str] = {}
    for count in range(1, max(map(len, roots), default=0) + 1):
        ends = Counter("/".join(parts[-count:]) for parts in roots)
        for parts in roots:
            end = "/".join(parts[-count:])
            if ends[end] == 1 and end not in taken:
                names.setdefault(parts, end)
    return {parts: names.get(parts, "/".join(parts)) for parts in roots}


def _free_name(name: str, used: set[str]) -> str:
    number, free = 1, name
    while free in used:
        number += 1
        free = f"{name}-{number}"
    return free


def _weights(given: Any, members: Sequence[MemberSpec]) -> WeightRule | tuple[float, ...]:
    if isinstance(given, str):
        _check_choice("weights", given, get_args(WeightRule))
        return given  # type: ignore[return-value]
    if not isinstance(given, Iterable):
        raise ConfigError(f"weights is {given!r}; give one of {get_args(WeightRule)}, or a number per member")
    values = list(given)
    if len(values) != len(members):
        raise ConfigError(f"weights has {len(values)} numbers for {len(members)} members: {values!r}")
    return tuple(
        _number(f"weight of member {member.name!r}", value) for member, value in zip(members, values, strict=True)
    )


def _number(label: str, value: Any, *, is_positive: bool = False, named_value: str = "") -> float:
    is_real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_real or value < 0 or (is_positive and not value):
        known = f", or {named_value!r}" if named_value else ""
        raise ConfigError(f"{label} is {value!r}; give a number {'above' if is_positive else 'of at least'} 0{known}")
    return float(value)


def _names(label: str, given: Any, meaning: str) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{label} is {given!r}; give a mapping {meaning}")
    for key, value in given.items():
        for name in (key, value):
            if not isinstance(name, str) or not name:
                raise ConfigError(f"{label} has {key!r}: {value!r}; names of features are text")
            if name in INDEX_FEATURES:
                raise ConfigError(f"{label} has {key!r}: {value!r}, and {name!r} is always there under its own name")
    doubled = [name for name, count in Counter(given.values()).items() if count > 1]
    if doubled:
        raise ConfigError(f"{label} names {doubled[0]!r} twice: {dict(given)!r}")
    return dict(given)


def _check_free(label: str, names: Iterable[str]) -> None:
    for name in names:
        if is_batch_key(name):
            raise ConfigError(f"{label} gives a feature the name {name!r}, which batches use themselves; give another")


def _drop(who: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"drop of {who} is {given!r}; give a list of own feature names")
    names = tuple(given)
    for name in names:
        if not isinstance(name, str) or name in INDEX_FEATURES:
            raise ConfigError(
                f"drop of {who} has {name!r}; give own feature names that are none of {[*INDEX_FEATURES]}"
            )
    return names


def _selection(who: str, given: Any) -> SelectionSpec:
    selection = given if isinstance(given, SelectionSpec) else _make_selection(who, given)
    if isinstance(selection.episodes, str) and selection.episodes != "all":
        raise ConfigError(f"selection of {who} has episodes={selection.episodes!r}; give a list of numbers, or 'all'")
    return selection


def _make_selection(who: str, given: Any) -> SelectionSpec:
    if not isinstance(given, Mapping):
        raise ConfigError(f"selection of {who} is {given!r}; give a SelectionSpec or a dict of its fields")
    _check_keys(given, [one.name for one in fields(SelectionSpec)], f"selection of {who}")
    with as_damage(lambda error: ConfigError(f"selection of {who} is {dict(given)!r}: {error}")):
        return SelectionSpec(**given)


def _check_own_names(spec: MemberSpec, who: str) -> None:
    cameras = [] if isinstance(spec.cameras, str) else list(spec.cameras.values())
    for name in spec.drop:
        if name in spec.rename or name in cameras:
            raise ConfigError(
                f"drop of {who} leaves out {name!r}, which rename or cameras gives a name; do one of them"
            )
    for name in cameras:
        if name in spec.rename:
            raise ConfigError(f"{who} names the camera {name!r} in cameras and in rename; do one of them")


def _widths(given: Any) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"widths is {given!r}; give a mapping of names in the mixture -> numbers of a vector")
    for name in given:
        if name in INDEX_FEATURES:
            raise ConfigError(f"widths has {name!r}, which is one number in every dataset; leave it out")
    return {name: check_whole(f"widths of {name!r}", width, 1, _MAX_COUNT) for name, width in given.items()}


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}{suggest(str(value), known)}")
