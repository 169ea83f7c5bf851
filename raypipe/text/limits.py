"""What comes in: how much a file, an answer or a state may claim, with the reason for each limit; and settings.

raypipe compares a claim with its limit before it allocates memory for it. Datasets of 50 million frames, tables of a
million episodes and mixtures of thousands of datasets are far below every limit.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import IO, Any, Final, TypeVar

from raypipe.errors import ConfigError, suggest

Spec = TypeVar("Spec")

FREE_BYTES: Final = 1 << 29
"""Memory that the values of a parquet file may take, however small the file: a million episodes of 30 columns take
half of it."""

MOST_RATIO: Final = 64
"""How many times its own size the values of a larger file may take. Real rows are 1 to 4 times as large in memory, and
10 to 40 times where most of a state is padded with zeros; to take gigabytes, a file must have tens of megabytes."""

MOST_JSON_BYTES: Final = 1 << 28
"""For a JSON document, an answer, or a line of JSON lines. The statistics of an episode take kilobytes, the listing of
a repo of 300,000 files 80 MB."""

MOST_JSON_NODES: Final = 1 << 24
"""Commas and opening brackets in a JSON document. The value after each may take 60 bytes, however short it is."""

MOST_TEXT_BYTES: Final = 1 << 30
"""For a file of JSON lines that is read whole: a million episodes take a fifth of it."""

MOST_YAML_NODES: Final = 1 << 18
"""For a mixture file, counting what aliases repeat: 10,000 datasets of 20 keys. Each node takes a kilobyte."""

MOST_VIDEO_FRAMES: Final = 1 << 24
"""In one mp4: 150 hours at 30 fps. Its index takes about 60 bytes a frame."""

MOST_ALIKE_FRAMES: Final = 1 << 20
"""In an mp4 that gives one size for all its frames instead of a list: raw pictures, 9 hours at 30 fps."""

MOST_INDEX_BYTES: Final = 1 << 28
"""For the index of an mp4; a frame takes 8 to 16."""

MOST_PIXELS: Final = 1 << 26
"""In a frame of a camera: 8192 x 8192, which is 200 MB."""

MOST_NUMBERS: Final = 1 << 24
"""In a feature of one frame: 64 MB, such as a cloud of 5 million points."""

MOST_LANES: Final = 1 << 20
"""Ranks of a run, or lanes of an epoch: a million, ten times the largest cluster."""

MOST_COUNT: Final = 1 << 53
"""For every count in ``info.json``: a JSON number is exact up to here."""

BODY_CODES: Final = frozenset({"", "identity", "gzip", "deflate"})
"""Content encodings that a server may use, though raypipe asks for none. A byte of these expands to a thousand at most;
other encodings have no such bound."""


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or has more values or depth than real data has.
    """
    if len(content) > MOST_JSON_BYTES:
        raise ValueError(f"it has {len(content):,} bytes, and JSON may have {MOST_JSON_BYTES:,}")
    marks: Iterable[Any] = (b",", b"[", b"{") if isinstance(content, bytes) else (",", "[", "{")
    nodes = sum(map(content.count, marks))
    if nodes > MOST_JSON_NODES:
        raise ValueError(f"it has {nodes:,} values or more, and JSON may have {MOST_JSON_NODES:,}")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its lists and objects lie in each other too deeply") from None


def read_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Return the lines of a file; a line longer than JSON may be is cut where `parse_json` still refuses it."""
    return iter(lambda: stream.readline(MOST_JSON_BYTES + 1), b"")


def join_within(pieces: Iterable[bytes], most: int) -> bytes:
    """Return the bytes of an answer that arrives in pieces.

    Raises:
        ValueError: there are more than `most`; the rest is not read.
    """
    content = bytearray()
    for piece in pieces:
        content += piece
        if len(content) > most:
            raise ValueError(f"more than the {most:,} bytes that it may have")
    return bytes(content)


def make_spec(kind: type[Spec], value: Any, name: str) -> Spec:
    """Return `value` as a spec: itself, or made from a dict. An unknown key is an error."""
    if isinstance(value, kind):
        return value
    value = make_mapping(value, name, kind.__name__)
    check_keys(value, field_names(kind), f"{name} has no field")
    try:
        return kind(**value)
    except TypeError as error:
        # A spec raises it, too, for a value of a wrong type.
        wrong = "is not complete" if " missing " in str(error) else "has a value of a wrong type"
        raise ConfigError(f"{name}={dict(value)!r} {wrong}: {error}") from error


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
        article = "an" if kind[0] in "AEIOU" else "a"
        raise ConfigError(f"{name} must be {article} {kind} or a dict of its fields, got {value!r}")
    return value


_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([KMGT]?)(i?)B?", re.I)
_UNITS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


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
