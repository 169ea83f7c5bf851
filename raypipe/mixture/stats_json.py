"""Statistics as JSON text and in files: every number comes back unchanged.

Any other text raises a `ConfigError` that names the file: the caller who gave it must act.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError, RaypipeError, as_damage
from raypipe.format import Stats
from raypipe.storage import Storage, open_storage
from raypipe.text import parse_json

Value = TypeVar("Value")

_VERSION: Final = 1


def to_text(kind: str, content: Mapping[str, Any]) -> str:
    """Return `content` as JSON that names its kind."""
    return json.dumps({"kind": kind, "version": _VERSION, **content}, ensure_ascii=False)


def from_text(text: str, kind: str, place: str, build: Callable[[dict[str, Any]], Value]) -> Value:
    """Return the value that `build` makes from the JSON of `to_text`."""
    with as_damage(lambda error: ConfigError(f"{place!r} is not JSON: {error}. Write it again.")):
        found = parse_json(text)
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise ConfigError(f"{place!r} is not the JSON of a {kind}; write it again, or give the right file")
    if found.get("version") != _VERSION:
        raise ConfigError(
            f"{place!r} is of version {found.get('version')!r}; this raypipe reads version {_VERSION}. Write it again."
        )
    try:
        with as_damage(
            lambda error: ConfigError(f"{place!r} is damaged: {type(error).__name__}: {error}. Write it again.")
        ):
            return build(found)
    except RaypipeError as error:
        error.add_note(f"while reading {place!r}")
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, at a local path or an fsspec URI; a reader sees all of it or nothing."""
    storage, name = _split(path)
    storage.write_atomic(name, text.encode())


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of the file at a local path or an fsspec URI."""
    storage, name = _split(path)
    if not storage.exists(name):
        raise ConfigError(f"there is no file {storage.locate(name)!r}; give the path that was saved to")
    try:
        return storage.read_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{storage.locate(name)!r} is not text: {error}. Write it again.") from error


def plain_stats(stats: Stats) -> dict[str, dict[str, Any]]:
    """Return statistics as nested lists."""
    return {feature: {name: value.tolist() for name, value in values.items()} for feature, values in stats.items()}


def stats_of_plain(plain: Mapping[str, Mapping[str, Any]]) -> Stats:
    """Return statistics from nested lists."""
    return {feature: {name: _numbers(value) for name, value in values.items()} for feature, values in plain.items()}


def _numbers(value: Any) -> NDArray[np.float64]:
    array = np.asarray(value)
    # numpy would read null as nan, and the text "1" as 1.
    if array.dtype.kind not in "if":
        raise ValueError(f"{value!r} where numbers are expected")
    return array.astype(np.float64)


def _split(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    text = os.fspath(path)
    folder, slash, name = text.rpartition("/")
    if not name:
        raise ConfigError(f"{text!r} does not name a file; give a path as in 'run/stats.json'")
    return open_storage(folder or slash or "."), name
