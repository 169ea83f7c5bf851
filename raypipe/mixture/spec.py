"""What a user asks of a mixture: its members, how often each is seen, and how unlike features become one.

This module decides which values are allowed, and the names of members. It opens no dataset: `unify` checks whether a
dataset has the features that a spec names. A YAML or TOML file has the fields of the specs as its keys, and
``datasets`` lists its members:

::

    datasets:                                   or, with names:     datasets:
      - data/aloha                                                    aloha: {root: data/aloha, weight: 2}
      - {root: s3://bucket/so101, weight: 2}                          so101: {root: s3://bucket/so101}
    temperature: 2
"""

import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Final, Literal, get_args

import yaml

from raypipe.dataset import DIM_IS_PAD, IS_MISSING, REPRESENTATION, TOLERANCE_S, Dataset
from raypipe.decode import ORIGINAL_SIZE, Fit, Resize, check_fit, check_resize
from raypipe.errors import ConfigError, as_damage, noting
from raypipe.format import INDEX_FEATURES
from raypipe.plan import SelectionSpec, check_whole
from raypipe.storage import take_login
from raypipe.text import MOST_JSON_BYTES, MOST_YAML_NODES, check_choice, check_keys, field_names, make_spec

WeightRule = Literal["given", "frames", "episodes", "sqrt"]
OnMissing = Literal["raise", "drop", "fill"]
OnBadDataset = Literal["raise", "skip"]

ALL_FRAMES: Final = "all"
OWN_RATE: Final = "own"
MIXTURE_TOLERANCE: Final = "mixture"

_BATCH_KEYS: Final = ("dataset_index", "dataset", "robot_type", "augment_seed", "is_repeat", "task")
_MASK_ENDINGS: Final = ("_is_pad", DIM_IS_PAD, IS_MISSING, REPRESENTATION)

MIXTURE_FILES: Final = (".yaml", ".yml", ".toml")
_MEMBERS: Final = "datasets"
_HUB_NAME: Final = re.compile(r"(?!\.{1,2}/)[\w.-]+/(?!\.{1,2}$)[\w.-]+")
"""``owner/name``: the name of a dataset on the Hub."""

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

    cameras: Mapping[str, str] | Literal["all"] = "all"
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
            _settle(self, root=os.fspath(self.root))
        for key in ("root", "name", "robot_type"):
            if not isinstance(getattr(self, key), str):
                raise ConfigError(f"{key} of a member is {getattr(self, key)!r}; give text")
        _settle(self, root=take_login(self.root))
        if not self.root:
            raise ConfigError(f"member {self.name!r} has an empty root; give the path or URI of a dataset")
        who = f"member {self.name or self.root!r}"
        _settle(self, weight=_number(f"weight of {who}", self.weight))
        _settle(self, tolerance_s=_number(f"tolerance_s of {who}", self.tolerance_s, named_value=MIXTURE_TOLERANCE))
        rename = _names(f"rename of {who}", self.rename, "own name -> name in the mixture", are_keys_new=False)
        _settle(self, rename=rename)
        if self.cameras != "all":
            meaning = "name in the mixture -> own camera, or 'all'"
            _settle(self, cameras=_names(f"cameras of {who}", self.cameras, meaning, are_keys_new=True))
        _settle(self, drop=_drop(who, self.drop), selection=_selection(who, self.selection))
        cameras = [] if isinstance(self.cameras, str) else list(self.cameras.values())
        for name in self.drop:
            if name in self.rename or name in cameras:
                raise ConfigError(
                    f"drop of {who} leaves out {name!r}, which rename or cameras gives a name; do one of them"
                )
        for name in cameras:
            if name in self.rename:
                raise ConfigError(f"{who} names the camera {name!r} in cameras and in rename; do one of them")


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
        is_auto = isinstance(self.weights, str) and self.weights == "auto"
        rule = ("given" if has_weights else "frames") if is_auto else self.weights
        _settle(self, members=members, weights=_weights(rule, members))
        for key, kind in (("on_missing", OnMissing), ("on_bad_dataset", OnBadDataset), ("fit", Fit)):
            check_choice(key, getattr(self, key), get_args(kind))
        _settle(self, temperature=_number("temperature", self.temperature, is_positive=True))
        _settle(self, tolerance_s=_number("tolerance_s", self.tolerance_s))
        _settle(self, rate=_number("rate", self.rate, is_positive=True, named_value=OWN_RATE))
        if self.frames_per_epoch != ALL_FRAMES:
            frames = check_whole("frames_per_epoch", self.frames_per_epoch, 1, _MAX_COUNT, ALL_FRAMES)
            _settle(self, frames_per_epoch=frames)
        widths: Any = self.widths
        if not isinstance(widths, Mapping):
            raise ConfigError(f"widths is {widths!r}; give a mapping of names in the mixture -> numbers of a vector")
        for name in widths:
            if name in INDEX_FEATURES:
                raise ConfigError(f"widths has {name!r}, which is one number in every dataset; leave it out")
        widths = {name: check_whole(f"widths of {name!r}", one, 1, _MAX_COUNT) for name, one in widths.items()}
        _settle(self, resize=check_resize(self.resize, "resize"), widths=widths)
        check_fit(self.fit, self.resize, "fit")


def _settle(spec: Any, **values: Any) -> None:
    """Put checked values into the fields of a frozen spec."""
    for name, value in values.items():
        object.__setattr__(spec, name, value)


def is_batch_key(name: str) -> bool:
    """Return whether a batch sets a key of this name itself, so that no feature can have the name."""
    return name in _BATCH_KEYS or name.endswith(_MASK_ENDINGS)


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
        check_keys(item, field_names(MemberSpec), f"members[{position}] has no field")
        if "root" not in item:
            raise ConfigError(
                f"members[{position}] is {dict(item)!r} and has no 'root'; give the dataset's path or URI"
            )
        return MemberSpec(**item), "weight" in item
    if isinstance(item, Sequence) and len(item) == 2:
        member = _opened_member(item[0]) if isinstance(item[0], Dataset) else MemberSpec(root=item[0])
        return replace(member, weight=item[1]), True
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


def _named(members: Sequence[MemberSpec]) -> tuple[MemberSpec, ...]:
    given = Counter(member.name for member in members if member.name)
    for name, count in given.items():
        if count > 1:
            raise ConfigError(f"{count} members of the mixture are called {name!r}; their names must differ")
    parts = [_parts(member.root) for member in members]
    short = _short_names({part for member, part in zip(members, parts, strict=True) if not member.name}, given)
    used, named = set(given), []
    for member, part in zip(members, parts, strict=True):
        name, number = member.name or short[part], 1
        while not member.name and name in used:
            number += 1
            name = f"{short[part]}-{number}"
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


def _weights(given: Any, members: Sequence[MemberSpec]) -> WeightRule | tuple[float, ...]:
    if isinstance(given, str):
        check_choice("weights", given, get_args(WeightRule))
        return given  # type: ignore[return-value]
    if not isinstance(given, Iterable):
        raise ConfigError(f"weights is {given!r}; give one of {get_args(WeightRule)}, or a number per member")
    values = list(given)
    if len(values) != len(members):
        raise ConfigError(f"weights has {len(values)} numbers for {len(members)} members: {values!r}")
    return tuple(_number(f"weight of member {one.name!r}", value) for one, value in zip(members, values, strict=True))


def _number(label: str, value: Any, *, is_positive: bool = False, named_value: str = "") -> Any:
    if named_value and value == named_value:
        return value
    # Greater than any float: a whole number of 400 digits has none.
    is_real = isinstance(value, Real) and not isinstance(value, bool) and value <= sys.float_info.max
    if not is_real or not value >= 0 or (is_positive and not value):
        known = f", or {named_value!r}" if named_value else ""
        raise ConfigError(f"{label} is {value!r}; give a number {'above' if is_positive else 'of at least'} 0{known}")
    return float(value)


def _names(label: str, given: Any, meaning: str, *, are_keys_new: bool) -> dict[str, str]:
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
    for name in given if are_keys_new else given.values():
        if is_batch_key(name):
            raise ConfigError(f"{label} gives a feature the name {name!r}, which batches use themselves; give another")
    return dict(given)


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
    with noting(f"the selection of {who} is {given!r}"):
        return make_spec(SelectionSpec, given, f"selection of {who}")


def is_mixture_file(root: str) -> bool:
    """Return whether `root` is a local mixture file, by its suffix, and not a dataset."""
    path = os.fspath(root)
    return "://" not in path and path.lower().endswith(MIXTURE_FILES) and not os.path.isdir(path)


def read_mixture_file(path: str) -> MixtureSpec:
    """Return the mixture that a ``.yaml``, ``.yml`` or ``.toml`` file describes.

    A relative root starts at the file's folder. A root such as ``owner/name`` stays as it is if the file has no such
    folder beside it.

    Raises:
        ConfigError: the file is missing or damaged, has an unknown key, or describes an impossible mixture.
    """
    path = os.fspath(path)
    damaged = f"the mixture file {path!r} cannot be read"
    with as_damage(lambda error: ConfigError(f"{damaged}: {type(error).__name__}: {error}")):
        content = _parse(path)
        try:
            check_keys(content, [_MEMBERS, *field_names(MixtureSpec)[1:]], "unknown key")
            options = dict(content)
            members: Any = _listed_members(options.pop(_MEMBERS, None), os.path.dirname(os.path.abspath(path)))
            return MixtureSpec(members=members, **options)
        except ConfigError as error:
            raise ConfigError(f"in {path!r}: {error}") from error


def _parse(path: str) -> Mapping[str, Any]:
    if not path.lower().endswith(MIXTURE_FILES):
        raise ConfigError(f"{path!r} is no mixture file; its name ends in one of {', '.join(MIXTURE_FILES)}")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_JSON_BYTES)
        content = tomllib.loads(text) if path.lower().endswith(".toml") else yaml.load(text, _YamlLoader)
    except OSError as error:
        raise ConfigError(f"cannot read the mixture file {path!r}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path!r} is not valid YAML{place}: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path!r} is not valid YAML or TOML text: {' '.join(str(error).split())}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path!r} is not valid TOML: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{path!r} holds {_shown(content)}; a mixture file has keys, and its members under {_MEMBERS!r}"
        )
    return content


def _listed_members(given: Any, folder: str) -> list[Any]:
    """Return the members as `MixtureSpec` takes them, from a list or from a mapping of names."""
    if isinstance(given, list):
        return [_member_of_file(item, f"{_MEMBERS}[{position}]", folder) for position, item in enumerate(given)]
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{_MEMBERS!r} is {_shown(given)}; give a list of roots or objects, or a mapping of names to them"
        )
    members = []
    for name, item in given.items():
        place = f"{_MEMBERS}.{name}"
        members.append(_member_of_file(item, place, folder))
        own = members[-1].setdefault("name", str(name))
        if own != str(name):
            raise ConfigError(f"{place}.name is {own!r}; the name stands before the object, leave this one out")
    return members


def _member_of_file(item: Any, place: str, folder: str) -> dict[str, Any]:
    """Return the fields of a member given as a root, ``[root, weight]`` or an object, with its paths resolved."""
    if isinstance(item, str):
        item = {"root": item}
    elif isinstance(item, list) and len(item) == 2:
        item = {"root": item[0], "weight": item[1]}
    if not isinstance(item, Mapping):
        raise ConfigError(f"{place} is {_shown(item)}; give a root, [root, weight], or an object with 'root'")
    check_keys(item, field_names(MemberSpec), "unknown key", place)
    if not isinstance(item.get("root"), str) or "\0" in item["root"]:
        raise ConfigError(f"{place}.root is {_shown(item.get('root'))}; give the path or URI of a dataset")
    member, selection = {**item, "root": _resolve_root(item["root"], folder)}, item.get("selection")
    if isinstance(selection, Mapping):
        check_keys(selection, field_names(SelectionSpec), "unknown key", f"{place}.selection")
        weights = selection.get("weights")
        if isinstance(weights, str) and weights.endswith(".parquet"):
            member["selection"] = {**selection, "weights": _resolve_root(weights, folder)}
    try:
        MemberSpec(**member)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    return member


def _resolve_root(root: str, folder: str) -> str:
    is_local = "://" not in root and "::" not in root
    if not root or not is_local or root.startswith("~") or os.path.isabs(root):
        return root
    beside = os.path.normpath(os.path.join(folder, root))
    return root if _HUB_NAME.fullmatch(root) and not os.path.isdir(beside) else beside


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader; it also refuses a duplicate key and reads ``1e-4`` as a number.

    It counts an alias as all the nodes that it repeats, so a few aliases cannot expand to billions of values.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        before, is_alias = self._num_nodes, self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        # A node that contains itself has no size yet.
        self._num_nodes += self._sizes.get(id(node), MOST_YAML_NODES) if is_alias else 1
        self._sizes[id(node)] = self._num_nodes - before
        if self._num_nodes > MOST_YAML_NODES:
            problem = f"more than {MOST_YAML_NODES} values, with what aliases repeat"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return node


# PyYAML reads YAML 1.1, where a number with an exponent needs a dot: 1e-4 would be text.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
