"""What people write and read: settings as dicts and byte counts; messages with plurals, ranges and shortened texts."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final, TypeVar

from raypipe.errors import ConfigError, suggest

Spec = TypeVar("Spec")

_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([KMGT]?)(i?)B?", re.I)
_UNITS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_SHOWN_NAMES: Final = 8
_ES: Final = ("s", "x", "ch", "sh")
"""Endings of nouns whose plural ends in ``es``: batches, passes."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 frame``, ``0 frames``, ``1,200 batches``."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """Return the noun that follows a number: singular for one, plural for any other."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(_ES) else f"{noun}s"


def either(number: float, one: str, several: str) -> str:
    """Return the word that agrees with a number: ``is`` or ``are``, ``it`` or ``them``."""
    return one if number == 1 else several


def span_text(first: float, last: float) -> str:
    """Return a range with both ends, or its one number: ``3 to 461``, ``461``."""
    return f"{first}" if first == last else f"{first} to {last}"


def frames_text(start: int, stop: int) -> str:
    """Return the frames ``[start, stop)`` in words: ``frames 3 to 9``, ``frame 3``."""
    return f"{plural(stop - start, 'frame')} {span_text(start, stop - 1)}"


def cut_inside(text: str, most: int) -> str:
    """Return a text cut to `most` characters in its middle, since an error ends with what to do about it."""
    if len(text) <= most:
        return text
    kept = most - len(" ... ")
    return f"{text[: kept - kept // 2].rstrip()} ... {text[len(text) - kept // 2 :].lstrip()}"


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of raypipe from its own origin: a clone, a URL or an index."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").exists():
        return f"pip install --editable '{clone}[{extra}]'"
    # pip writes direct_url.json for packages that did not come from an index.
    told = (found.read_text("direct_url.json") for found in distributions(name="raypipe"))
    origin = json.loads(next(filter(None, told), "{}"))
    url, vcs = origin.get("url", ""), origin.get("vcs_info")
    if vcs:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install 'raypipe[{extra}] @ {url}'" if url else f"pip install 'raypipe[{extra}]'"


def first_of(names: Sequence[str], most: int) -> str:
    """Return names in a row, the first `most` alone if there are more: ``a, b and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def constant_text(constant: Sequence[str], total: int) -> str:
    """Return which of a feature's numbers never change, by name; the first 8 if there are more."""
    if len(constant) == total:
        return f"none of its {total} numbers ever changes" if total > 1 else "its number never changes"
    verb = either(len(constant), "changes", "change")
    return f"{len(constant)} of its {total} numbers never {verb}: {first_of(constant, _SHOWN_NAMES)}"


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
