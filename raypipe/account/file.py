"""An account as one parquet file: a row per run, all else as JSON in the schema's metadata.

::

    part  kind      skip  start  stop  times         part: its place in the account
    0     emitted   -1    0      300   1             skip: its place in the part's list of skipped episodes
    0     skipped    0    300    410   1
    1     repeated  -1    17     18    1

Ten thousand runs take about 50 kB. A reader sees the old file or the new one, never a partial one.
"""

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from raypipe.account.frames import Runs, empty_runs, make_runs
from raypipe.account.parts import Account, Header, Part, RankRecord, Skip
from raypipe.errors import DatasetError, RaypipeError, as_damage
from raypipe.format import BoundedParquet
from raypipe.plan import Leg, OrderSpec
from raypipe.text import counted, parse_json

ACCOUNT_VERSION: Final = 1
_KEY: Final = b"raypipe.account"
_KINDS: Final = ("emitted", "repeated", "skipped")
_NO_SKIP: Final = -1
_MOST: Final = 1 << 63
_MOST_RANKS: Final = 1 << 20
RunKey = tuple[int, str, int]

_SCHEMA: Final = pa.schema(
    {
        "part": pa.int32(),
        "kind": pa.dictionary(pa.int8(), pa.string()),
        "skip": pa.int32(),
        "start": pa.int64(),
        "stop": pa.int64(),
        "times": pa.int64(),
    }
)


def write_account(path: str | os.PathLike[str], account: Account, filesystem: Any = None) -> None:
    """Write an account atomically; create folders as needed.

    Args:
        path: the file, as a path of `filesystem`.
        filesystem: of pyarrow or fsspec; None is the local one.
    """
    content = dump_account(account)
    arrow = _arrow_filesystem(filesystem)
    target = str(path) if filesystem is not None else os.path.abspath(path)
    partial = f"{target}.{uuid.uuid4().hex}.part"
    arrow.create_dir(target.rpartition("/")[0] or ".", recursive=True)
    try:
        with arrow.open_output_stream(partial) as stream:
            stream.write(content)
        arrow.move(partial, target)
    except BaseException:
        if arrow.get_file_info(partial).type != pyarrow.fs.FileType.NotFound:
            arrow.delete_file(partial)
        raise


def read_account(path: str | os.PathLike[str], filesystem: Any = None) -> Account:
    """Return the account in a file.

    Raises:
        DatasetError: the file is missing or damaged, or has another version.
    """
    place = str(path) if filesystem is not None else os.path.abspath(path)
    try:
        with _arrow_filesystem(filesystem).open_input_file(place) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise DatasetError(f"there is no account at {place!r}") from error
    return load_account(content, place)


def read_state(path: Path) -> Any:
    """Return the state in the header of an account file, without reading the rest."""
    return parse_json((pq.read_schema(path).metadata or {})[_KEY])["header"]["state"]


def dump_account(account: Account) -> bytes:
    """Return an account as the content of its file."""
    listed = _list_runs(account.parts)
    keys = np.array([(part, _KINDS.index(kind), skip) for part, kind, skip in listed], dtype=np.int64).reshape(-1, 3)
    part, kind, skip = np.repeat(keys, [len(runs) for runs in listed.values()], axis=0).T
    kinds = pa.DictionaryArray.from_arrays(pa.array(kind, pa.int8()), pa.array(_KINDS))
    nothing = np.empty(0, dtype=np.int64)
    ranges = [
        np.concatenate([nothing, *(getattr(runs, name) for runs in listed.values())]) for name in _SCHEMA.names[3:]
    ]
    arrays = [pa.array(array, field.type) for array, field in zip((part, kinds, skip, *ranges), _SCHEMA, strict=True)]
    table = pa.table(arrays, schema=_SCHEMA)
    told = {"version": ACCOUNT_VERSION, "header": asdict(account.header), "parts": list(map(_part_json, account.parts))}
    return _as_parquet(table.replace_schema_metadata({_KEY: json.dumps(told).encode()}))


def load_account(content: bytes, place: str) -> Account:
    """Return the account in the content of a file; `place` names it in errors.

    Raises:
        DatasetError: it is damaged or has another version.
    """

    def describe(error: Exception) -> DatasetError:
        return DatasetError(
            f"{place!r} is no account, or is damaged ({type(error).__name__}: {error}). Take the account of an earlier "
            f"checkpoint."
        )

    try:
        with as_damage(describe):
            return _parse_account(content, place)
    except DatasetError:
        raise
    except (RaypipeError, AssertionError) as error:
        raise describe(error) from error


def _parse_account(content: bytes, place: str) -> Account:
    table = BoundedParquet(pa.BufferReader(content), len(content)).read()
    told = parse_json((table.schema.metadata or {})[_KEY])
    if told["version"] != ACCOUNT_VERSION:
        raise DatasetError(
            f"the account {place!r} is of version {told['version']}, and this raypipe reads {ACCOUNT_VERSION}"
        )
    runs = _split_runs(table.select(_SCHEMA.names))
    parts = tuple(_load_part(saved, number, runs) for number, saved in enumerate(told["parts"]))
    _check_parts(parts)
    known = _list_runs(parts)
    if unknown := [key for key in runs if key not in known]:
        raise ValueError(f"rows of no part or skip: {unknown[0]}")
    header = Header(**told["header"])
    _check_header(header)
    members = tuple({**one, "selection": _as_tuples(one["selection"])} for one in header.members)
    header = replace(header, selection=_as_tuples(header.selection), members=members)
    account = Account(header=header, parts=parts)
    if broken := account.find_break():
        raise ValueError(f"it was changed since: {broken}")
    return account


def _arrow_filesystem(filesystem: Any) -> Any:
    if filesystem is None:
        return pyarrow.fs.LocalFileSystem()
    if isinstance(filesystem, pyarrow.fs.FileSystem):
        return filesystem
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem))


def _as_parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    delta = {"start": "DELTA_BINARY_PACKED", "stop": "DELTA_BINARY_PACKED"}
    names = ["part", "kind", "skip", "times"]
    pq.write_table(table, sink, compression="zstd", use_dictionary=names, column_encoding=delta)
    return bytes(sink.getvalue())


def _list_runs(parts: Sequence[Part]) -> dict[RunKey, Runs]:
    """Return all runs of the parts by the number of the part, the kind, and the number of the skip."""
    listed: dict[RunKey, Runs] = {}
    for number, part in enumerate(parts):
        listed[number, "emitted", _NO_SKIP] = part.emitted
        listed[number, "repeated", _NO_SKIP] = part.repeated
        listed |= {(number, "skipped", place): skip.frames for place, skip in enumerate(part.skipped)}
    return listed


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "epoch": part.epoch,
        "legs": [asdict(leg) for leg in part.legs],
        "spec": part.spec.to_dict(),
        "selection": part.selection,
        "world_size": part.world_size,
        "per_lane": part.per_lane,
        "num_steps": part.num_steps,
        "ranks": [asdict(record) for record in part.ranks],
        "skipped": [{"dataset": skip.dataset, "episode": skip.episode, "why": skip.why} for skip in part.skipped],
        "attempt": part.attempt,
        "turn": part.turn,
        "before": part.before,
        **({"torn": part.torn} if part.torn else {}),
    }


def _load_part(saved: Mapping[str, Any], number: int, runs: Mapping[RunKey, Runs]) -> Part:
    ranks = tuple(
        RankRecord(**{**record, "lanes": tuple((lane, frames) for lane, frames in record["lanes"])})
        for record in saved["ranks"]
    )
    skipped = tuple(
        Skip(frames=runs.get((number, "skipped", place), empty_runs()), **skip)
        for place, skip in enumerate(saved["skipped"])
    )
    return Part(
        **{
            **saved,
            "legs": tuple(Leg(**leg) for leg in saved["legs"]),
            "spec": OrderSpec(**saved["spec"]),
            "ranks": ranks,
            "torn": tuple(saved.get("torn", ())),
            "skipped": skipped,
            "emitted": runs.get((number, "emitted", _NO_SKIP), empty_runs()),
            "repeated": runs.get((number, "repeated", _NO_SKIP), empty_runs()),
        }
    )


def _check_parts(parts: tuple[Part, ...]) -> None:
    """Raise if a part occurs twice or belongs to no epoch: no rank writes that."""
    seen: set[tuple[Any, ...]] = set()
    for part in parts:
        _check_kinds(part)
        if part.epoch < 0:
            raise ValueError(f"{part.describe()}: there is no such epoch")
        if part.key in seen:
            raise ValueError(f"{part.describe()}: it is there twice")
        seen.add(part.key)


def _check_kinds(part: Part) -> None:
    """Raise if a part has anything but the numbers and texts that ranks write."""
    numbers = [part.epoch, part.world_size, part.per_lane, part.num_steps, part.turn, *part.torn]
    texts = [part.selection, part.attempt, part.before]
    for record in part.ranks:
        numbers += [record.rank, record.num_frames, *(number for lane in record.lanes for number in lane)]
        texts.append(record.digest)
    for skip in part.skipped:
        numbers += [skip.dataset, skip.episode]
        texts.append(skip.why)
    odd: list[Any] = [one for one in numbers if type(one) is not int or not -_MOST <= one < _MOST]
    odd += [one for one in texts if not isinstance(one, str)]
    if odd:
        raise ValueError(f"a part has {odd[0]!r}, which no rank writes there")
    if not part.legs or not 1 <= part.world_size <= _MOST_RANKS:
        raise ValueError(f"a part has {counted(len(part.legs), 'leg')} and {counted(part.world_size, 'rank')}")


def _check_header(header: Header) -> None:
    texts = [header.root, header.name, header.head]
    objects = [header.selection, header.state, *header.members]
    for one in header.members:
        texts += [one["name"], one["root"]]
        objects.append(one["selection"])
    odd = [one for one in texts if not isinstance(one, str)] + [one for one in objects if not isinstance(one, dict)]
    if odd:
        raise ValueError(f"its header has {odd[0]!r}, which no rank writes there")


def _split_runs(table: pa.Table) -> dict[RunKey, Runs]:
    """Return the runs of every part and kind; raise if they are not in the form that ranks write."""
    kinds = table.column("kind").cast(pa.string())
    kind = np.array([_KINDS.index(name) for name in kinds.unique().to_pylist()], dtype=np.int64)
    kind = kind[kinds.dictionary_encode().combine_chunks().indices.to_numpy()] if len(table) else kind
    columns = {name: table.column(name).to_numpy().astype(np.int64) for name in ("part", "skip", "start", "stop")}
    times = table.column("times").to_numpy().astype(np.int64)
    keys = np.stack([columns["part"], kind, columns["skip"]], axis=1)
    cuts = np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1
    found: dict[RunKey, Runs] = {}
    for rows in np.split(np.arange(len(table)), cuts) if len(table) else []:
        part, number, skip = keys[rows[0]].tolist()
        runs = Runs(columns["start"][rows], columns["stop"][rows], times[rows])
        key = (part, _KINDS[number], skip)
        if key in found or make_runs(runs.start, runs.stop, runs.times) != runs:
            raise ValueError(f"the runs of part {part} ({_KINDS[number]}) are not ascending and disjoint")
        found[key] = runs
    return found


def _as_tuples(selection: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a selection with JSON's lists turned back into tuples."""

    def change(value: Any) -> Any:
        return tuple(map(change, value)) if isinstance(value, list) else value

    return {name: change(value) for name, value in selection.items()}
