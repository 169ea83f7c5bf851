"""Specs from plain dicts: keys and choices are checked by name, and an error suggests the nearest."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

from raypipe.errors import ConfigError, suggest

Spec = TypeVar("Spec")

_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([KMGT]?)(i?)B?", re.I)
_UNITS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def make_spec(kind: type[Spec], value: Any, name: str) -> Spec:
    """Return `value` as a spec: itself, or made from a dict. An unknown key is an error."""
    if isinstance(value, kind):
        return value
    value = make_mapping(value, name, kind.__name__)
    check_keys(value, field_names(kind), f"{name} has no field")
    try:
        return kind(**value)
    except TypeError as error:
        raise ConfigError(f"{name}={dict(value)!r} is not complete: {error}") from error


def field_names(kind: Any) -> list[str]:
    """Return the names of the fields of a spec."""
    return [field.name for field in fields(kind)]


def check_keys(given: Iterable[Any], known: Sequence[str], wrong: str, within: str = "") -> None:
    """Raise for a key that is not `known`, and suggest the nearest.

    Args:
        wrong: the beginning of the message, before the key.
        within: put before the key, with a dot.
    """
    for key in given:
        if key not in known:
            raise ConfigError(f"{wrong} {f'{within}.{key}' if within else key!r}{suggest(str(key), known)}")


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raise for a value that is not `known`, and suggest the nearest."""
    if value not in known:
        raise ConfigError(f"{name} is {value!r}{suggest(str(value), known)}")


def make_mapping(value: Any, name: str, kind: str = "OrderSpec") -> Mapping[str, Any]:
    """Return `value` if it is a dict; raise an error that says what is wanted otherwise."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a {kind} or a dict of its fields, got {value!r}")
    return value


def parse_bytes(value: Any, name: str, *, least: int = 1, named_value: str = "") -> int:
    """Return a number of bytes that a person wrote: 200e9, "200GB", "100 GiB".

    Raises:
        ConfigError: it is not a number, or less than `least`. The message says where it was given (`name`) and which
            word is allowed instead (`named_value`).
    """
    number = value
    found = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        digits, unit, is_binary = found.groups()
        number = float(digits) * (1024 if is_binary else 1000) ** _UNITS[unit.upper()]
    is_whole = isinstance(number, int | float) and not isinstance(number, bool) and (found or number == number // 1)
    if not is_whole or not least <= number < 1 << 60:
        other = f", or {named_value!r}" if named_value else ""
        raise ConfigError(
            f"{name} must be a number of bytes such as 200e9 or '200GB', at least {least}{other}; got {value!r}"
        )
    return int(number)
