"""A mixture in a YAML or TOML file: its keys are the fields of the specs, and ``datasets`` lists its members.

::

    datasets:                                   or, with names:     datasets:
      - data/aloha                                                    aloha: {root: data/aloha, weight: 2}
      - {root: s3://bucket/so101, weight: 2}                          so101: {root: s3://bucket/so101}
    temperature: 2

This module reads the one file and checks whether folders exist beside it. It opens no dataset.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import yaml

from raypipe.errors import ConfigError, as_damage, suggest
from raypipe.mixture.spec import MemberSpec, MixtureSpec
from raypipe.plan import SelectionSpec
from raypipe.text import MOST_JSON_BYTES, MOST_YAML_NODES

_YAML: Final = (".yaml", ".yml")
_TOML: Final = (".toml",)

_MEMBERS: Final = "datasets"

_HUB_NAME: Final = re.compile(r"(?!\.{1,2}/)[\w.-]+/(?!\.{1,2}$)[\w.-]+")
"""``owner/name``: the name of a dataset on the Hub."""


def is_mixture_file(root: str) -> bool:
    """Return whether `root` is a local mixture file, by its suffix, and not a dataset."""
    path = os.fspath(root)
    return "://" not in path and path.lower().endswith((*_YAML, *_TOML)) and not os.path.isdir(path)


def read_mixture_file(path: str) -> MixtureSpec:
    """Return the mixture that a ``.yaml``, ``.yml`` or ``.toml`` file describes.

    A relative root starts at the file's folder. A root such as ``owner/name`` stays as it is if the file has no such
    folder beside it.

    Raises:
        ConfigError: the file is missing or damaged, has an unknown key, or describes an impossible mixture.
    """
    path = os.fspath(path)

    def describe(error: Exception) -> ConfigError:
        return ConfigError(f"the mixture file {path!r} cannot be read: {type(error).__name__}: {error}")

    with as_damage(describe):
        content = _parse(path)
        try:
            return _make_spec(content, path)
        except ConfigError as error:
            raise ConfigError(f"in {path!r}: {error}") from error


def _make_spec(content: Mapping[str, Any], path: str) -> MixtureSpec:
    _check_keys(content, [_MEMBERS, *(one.name for one in fields(MixtureSpec) if one.name != "members")], "")
    folder = os.path.dirname(os.path.abspath(path))
    options = {key: value for key, value in content.items() if key != _MEMBERS}
    members: Any = _members(content.get(_MEMBERS), folder)
    return MixtureSpec(members=members, **options)


def _parse(path: str) -> Mapping[str, Any]:
    if not path.lower().endswith((*_YAML, *_TOML)):
        raise ConfigError(f"{path!r} is no mixture file; its name ends in one of {', '.join((*_YAML, *_TOML))}")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_JSON_BYTES)
        content = tomllib.loads(text) if path.lower().endswith(_TOML) else yaml.load(text, _YamlLoader)
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
    except (ValueError, RecursionError) as error:
        # A number with thousands of digits, an impossible date, or too deeply nested lists.
        raise ConfigError(f"{path!r} holds a value that cannot be: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{path!r} holds {_shown(content)}; a mixture file has keys, and its members under {_MEMBERS!r}"
        )
    return content


def _members(given: Any, folder: str) -> list[Any]:
    """Return the members as `MixtureSpec` takes them, from a list or from a mapping of names."""
    if isinstance(given, Mapping):
        return [_named_member(str(name), item, folder) for name, item in given.items()]
    if isinstance(given, list):
        return [_member(item, f"{_MEMBERS}[{position}]", folder) for position, item in enumerate(given)]
    raise ConfigError(
        f"{_MEMBERS!r} is {_shown(given)}; give a list of roots or objects, or a mapping of names to them"
    )


def _named_member(name: str, item: Any, folder: str) -> dict[str, Any]:
    place = f"{_MEMBERS}.{name}"
    member = _member(item, place, folder)
    if member.setdefault("name", name) != name:
        raise ConfigError(f"{place}.name is {member['name']!r}; the name stands before the object, leave this one out")
    return member


def _member(item: Any, place: str, folder: str) -> dict[str, Any]:
    """Return the fields of a member given as a root, ``[root, weight]`` or an object, with its paths resolved."""
    if isinstance(item, str):
        item = {"root": item}
    elif isinstance(item, list) and len(item) == 2:
        item = {"root": item[0], "weight": item[1]}
    if not isinstance(item, Mapping):
        raise ConfigError(f"{place} is {_shown(item)}; give a root, [root, weight], or an object with 'root'")
    _check_keys(item, [one.name for one in fields(MemberSpec)], place)
    if not isinstance(item.get("root"), str) or "\0" in item["root"]:
        raise ConfigError(f"{place}.root is {_shown(item.get('root'))}; give the path or URI of a dataset")
    if isinstance(item.get("selection"), Mapping):
        _check_keys(item["selection"], [one.name for one in fields(SelectionSpec)], f"{place}.selection")
    member = {**item, "root": _resolve_root(item["root"], folder)}
    weights = item["selection"].get("weights") if isinstance(item.get("selection"), Mapping) else None
    if isinstance(weights, str) and weights.endswith(".parquet"):
        member["selection"] = {**item["selection"], "weights": _resolve_root(weights, folder)}
    try:
        MemberSpec(**member)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    return member


def _check_keys(given: Mapping[Any, Any], known: list[str], place: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {f'{place}.{key}' if place else str(key)!r}{suggest(str(key), known)}")


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
