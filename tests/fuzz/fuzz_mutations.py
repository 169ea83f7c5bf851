"""Damage to bytes, JSON values, parquet tables and mp4 boxes, drawn from a random generator: the same for a seed.

Pure functions. Nothing here knows what the damaged thing is for.
"""

import copy
import io
import json
import random
import struct
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

ODD_BYTES: Final = (0, 1, 2, 0x20, 0x7F, 0x80, 0xFE, 0xFF)
ODD_NUMBERS: Final = (
    0,
    1,
    2,
    3,
    7,
    8,
    255,
    256,
    0x7FFF,
    0xFFFF,
    1 << 20,
    1 << 26,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
)
ODD_VALUES: Final = (
    *(None, True, False, 0, 1, -1, 2, 1000, 10**30, -(10**30), (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 31),
    *(0.0, -0.0, 0.5, 1.5, -1.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "a",
        "0",
        "-1",
        "1e400",
        "nan",
        "None",
        "\x00",
        "\x1b[31m",
        "\ud800",
        "é",
        "\u202e",
        "٣",
        "²",
        "x" * 300,
    ),
    *("../x", "/etc/passwd", "..", ".", "~", "a/b", "{", "}", "{0}", "{x}", "{episode_index:099d}", "%s", "{a.b}"),
    *("float32", "int64", "video", "image", "string", "language", "bool", "object", "O", "S1", "M8[s]", "f4,f4"),
    *("v2.0", "v2.1", "v3.0", "memory://x", "reference://::x", "0:1", "3:1"),
    *([], {}, [0], [1, 2], [None], [[1], [2]], [[]], [-1], ["a"], {"a": 1}, {"": None}, {"a": {"b": [1]}}),
    *([1] * 40, [1 << 62] * 3, [[[[[[1]]]]]]),
)

Change = Callable[[random.Random, bytearray], None]


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to four changes, most often one or two."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        rng.choice(_BYTE_CHANGES)(rng, changed)
    return bytes(changed)


def _at(rng: random.Random, content: bytearray) -> int:
    # Half of the time near an end, where headers and footers are.
    size = max(1, len(content))
    near = rng.random()
    if near < 0.25:
        return min(rng.randrange(64), size - 1)
    return max(0, size - 1 - rng.randrange(96)) if near < 0.4 else rng.randrange(size)


def _flip_bit(rng: random.Random, content: bytearray) -> None:
    if content:
        content[_at(rng, content)] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, content: bytearray) -> None:
    if content:
        content[_at(rng, content)] = rng.choice((*ODD_BYTES, rng.randrange(256)))


def _set_number(rng: random.Random, content: bytearray) -> None:
    form = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
    size = struct.calcsize(form)
    if len(content) > size:
        place = min(_at(rng, content), len(content) - size)
        struct.pack_into(form, content, place, rng.choice(ODD_NUMBERS) & ((1 << 8 * size) - 1))


def _cut_end(rng: random.Random, content: bytearray) -> None:
    del content[_at(rng, content) :]


def _run(rng: random.Random, content: bytearray) -> slice:
    start = _at(rng, content)
    return slice(start, start + rng.choice((1, 2, 4, 8, 16, 64, 256)))


def _remove(rng: random.Random, content: bytearray) -> None:
    del content[_run(rng, content)]


def _double(rng: random.Random, content: bytearray) -> None:
    found = _run(rng, content)
    content[found.start : found.start] = content[found]


def _insert(rng: random.Random, content: bytearray) -> None:
    place = _at(rng, content)
    content[place:place] = rng.randbytes(rng.choice((1, 2, 4, 16)))


def _overwrite(rng: random.Random, content: bytearray) -> None:
    found = _run(rng, content)
    size = len(content[found])
    content[found] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))


def _copy_elsewhere(rng: random.Random, content: bytearray) -> None:
    source, target = _run(rng, content), _at(rng, content)
    run = content[source]
    content[target : target + len(run)] = run


def _empty(_: random.Random, content: bytearray) -> None:
    content.clear()


_BYTE_CHANGES: Final[tuple[Change, ...]] = (
    *(_flip_bit,) * 5,
    *(_set_byte,) * 4,
    *(_set_number,) * 4,
    *(_cut_end, _remove, _double, _insert, _overwrite, _overwrite, _copy_elsewhere),
)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one to three parts replaced, removed, renamed, doubled or exchanged."""
    holder = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(holder))
        if places:
            _change_place(rng, *rng.choice(places), places)
    return holder[0] if holder else None


def _places(value: Any) -> Any:
    """Yield every container with the key of each of its parts."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _change_place(rng: random.Random, holder: Any, key: Any, places: list[Any]) -> None:
    kind, old = rng.randrange(10), holder[key]
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "a/b", "..", f"{key}2", f"{key}"[:-1], "\x00"))] = holder.pop(key)
    elif kind == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(old))
    elif kind == 3:
        other, its = rng.choice(places)
        holder[key] = copy.deepcopy(other[its])
    elif kind == 4:
        holder[key] = rng.choice((str, lambda one: [one], lambda one: {"a": one}, lambda one: [one, one]))(old)
    elif kind == 5 and isinstance(old, int | float):
        with_sign = (old + 1, old - 1, -old, old * 2, float(old), old + 0.5, old * 1000)
        holder[key] = rng.choice(with_sign)
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))


def mutate_json(content: bytes, rng: random.Random, *, is_lines: bool = False) -> bytes:
    """Return JSON, or JSON lines, with other values, or as a text that is damaged."""
    if rng.random() < 0.25:
        return mutate_bytes(content, rng)
    if rng.random() < 0.04:
        return _odd_text(rng, content)
    if not is_lines:
        return _dump(mutate_value(json.loads(content), rng), rng)
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = _dump(mutate_value(json.loads(lines[place]), rng), rng).replace(b"\n", b" ")
    return b"\n".join(lines) + b"\n"


def _dump(value: Any, rng: random.Random) -> bytes:
    return json.dumps(value, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")


def _odd_text(rng: random.Random, content: bytes) -> bytes:
    depth = rng.choice((100, 1000, 100_000))
    return rng.choice(
        (
            b"[" * depth,
            b'{"a":' * depth + b"1" + b"}" * depth,
            b"[" * depth + b"]" * depth,
            b"\xef\xbb\xbf" + content,
            content.decode().encode("utf-16"),
            b"1" * 5000,
            content.replace(b"0", b"1" * 5000, 1),
            content.replace(b"1", b"1e999", 1),
            content.replace(b'"', b'"\\ud800', 1),
            content + content,
            b"null",
            b'""',
            b" ",
        )
    )


def mutate_table(content: bytes, rng: random.Random) -> bytes:
    """Return a parquet file with other types, names, values, rows or way of writing; or damaged bytes."""
    if rng.random() < 0.5:
        return mutate_bytes(content, rng)
    table = pq.read_table(io.BytesIO(content))
    for _ in range(rng.choice((1, 1, 2))):
        changed = rng.choice(_TABLE_CHANGES)(table, rng)
        table = changed if changed is not None else table
    options = {
        "compression": rng.choice(("snappy", "none", "zstd", "gzip")),
        "row_group_size": rng.choice((1, 2, 5, 1000)),
        "write_statistics": rng.random() < 0.8,
        "use_dictionary": rng.random() < 0.5,
        "data_page_version": rng.choice(("1.0", "2.0")),
        "store_schema": rng.random() < 0.8,
    }
    try:
        sink = io.BytesIO()
        pq.write_table(table, sink, **options)
    except (pa.ArrowException, ValueError, TypeError):
        # Not every type can be written.
        return mutate_bytes(content, rng)
    return sink.getvalue()


_TYPES: Final = (
    *(pa.int8(), pa.uint64(), pa.int32(), pa.int64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.null()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.date32(), pa.timestamp("us"), pa.duration("s"), pa.time64("ns")),
    *(pa.decimal128(20, 3), pa.list_(pa.int64()), pa.list_(pa.string()), pa.large_list(pa.float32())),
    *(
        pa.list_(pa.float32(), 1),
        pa.list_(pa.float32(), 6),
        pa.list_(pa.float64(), 0),
        pa.map_(pa.string(), pa.int64()),
    ),
    *(pa.struct([("bytes", pa.binary()), ("path", pa.string())]), pa.struct([("a", pa.int64())]), pa.struct([])),
    *(pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.list_(pa.float32())), pa.binary(3)),
)


def _pick(table: pa.Table, rng: random.Random) -> int:
    return rng.randrange(table.num_columns)


def _other_type(table: pa.Table, rng: random.Random) -> pa.Table | None:
    place, kind = _pick(table, rng), rng.choice(_TYPES)
    column = table.column(place)
    try:
        changed = column.cast(kind)
    except (pa.ArrowException, ValueError):
        try:
            changed = pa.nulls(len(table), kind)
        except (pa.ArrowException, ValueError):
            return None
    return table.set_column(place, table.schema.names[place], changed)


def _wrapped(table: pa.Table, rng: random.Random) -> pa.Table:
    place = _pick(table, rng)
    values = table.column(place).to_pylist()
    wrap = rng.choice((lambda one: [one], lambda one: [one, one], lambda one: {"a": one}, str))
    return table.set_column(place, table.schema.names[place], pa.array([wrap(one) for one in values]))


def _other_values(table: pa.Table, rng: random.Random) -> pa.Table | None:
    place = _pick(table, rng)
    values, kind = table.column(place).to_pylist(), table.schema.field(place).type
    for _ in range(rng.choice((1, 1, 3)) if values else 0):
        at = rng.randrange(len(values))
        values[at] = mutate_value(values[at], rng) if isinstance(values[at], list | dict) else rng.choice(ODD_VALUES)
    for wanted in (kind, None):
        try:
            return table.set_column(place, table.schema.names[place], pa.array(values, wanted))
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            continue
    return None


def _dropped(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.remove_column(_pick(table, rng)) if table.num_columns > 1 else table.slice(0, 0)


def _renamed(table: pa.Table, rng: random.Random) -> pa.Table:
    names = list(table.schema.names)
    place = rng.randrange(len(names))
    names[place] = rng.choice((rng.choice(names), "", "x", "a.b", "é", names[place].upper(), "../x", "task"))
    return table.rename_columns(names)


def _other_rows(table: pa.Table, rng: random.Random) -> pa.Table:
    count = len(table)
    rows = list(range(count))
    kind = rng.randrange(6)
    if kind == 0:
        rows = rows[: rng.randrange(count + 1)]
    elif kind == 1:
        rows = rows[rng.randrange(count + 1) :]
    elif kind == 2:
        rng.shuffle(rows)
    elif kind == 3:
        rows = rows * 2
    elif kind == 4:
        rows = []
    elif rows:
        rows.pop(rng.randrange(count))
    return table.take(pa.array(rows, pa.int64()))


def _other_notes(table: pa.Table, rng: random.Random) -> pa.Table:
    notes = dict(table.schema.metadata or {})
    notes = {key: mutate_bytes(value, rng) for key, value in notes.items()} or {b"huggingface": b"{"}
    return table.replace_schema_metadata(notes)


_TABLE_CHANGES: Final = (
    *(_other_type, _other_type, _wrapped, _other_values, _other_values, _other_values),
    *(_dropped, _renamed, _other_rows, _other_notes),
)

_NESTS: Final = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"dinf", b"udta", b"moof", b"traf")


def find_boxes(content: bytes, start: int = 0, stop: int | None = None) -> list[tuple[bytes, int, int]]:
    """Return kind, start and stop of all boxes of an mp4, those inside others too."""
    stop, found = len(content) if stop is None else stop, []
    while start + 8 <= stop:
        size, kind = struct.unpack_from(">I4s", content, start)
        if not 8 <= size <= stop - start:
            break
        found.append((kind, start, start + size))
        if kind in _NESTS:
            found += find_boxes(content, start + 8, start + size)
        start += size
    return found


def mutate_mp4(content: bytes, rng: random.Random) -> bytes:
    """Return an mp4 with a box changed: its size, its kind, its numbers, its place; or damaged bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(content, rng)
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2))):
        boxes = find_boxes(bytes(changed))
        if boxes:
            _change_box(rng, changed, rng.choice(boxes), boxes)
    return bytes(changed)


def _change_box(rng: random.Random, content: bytearray, box: tuple[bytes, int, int], boxes: list[Any]) -> None:
    _, start, stop = box
    kind = rng.randrange(12)
    if kind == 0:
        struct.pack_into(
            ">I", content, start, rng.choice((*ODD_NUMBERS, stop - start + 1, stop - start - 1, len(content)))
        )
    elif kind == 1:
        content[start + 4 : start + 8] = rng.choice((b"free", b"mdat", b"moov", b"mvex", rng.choice(boxes)[0]))
    elif kind == 2:
        del content[start:stop]
    elif kind == 3:
        content[start:start] = content[start:stop]
    elif kind == 4:
        _, other, end = rng.choice(boxes)
        content[start:start] = content[other:end]
    elif kind == 5 and stop - start > 16:
        del content[start + 8 + rng.randrange(stop - start - 8) : stop]
    elif stop - start >= 12:
        for _ in range(rng.choice((1, 1, 2, 4))):
            place = start + 8 + rng.randrange((stop - start - 8) // 4) * 4
            (old,) = struct.unpack_from(">I", content, place)
            struct.pack_into(
                ">I", content, place, rng.choice((*ODD_NUMBERS, old + 1, old - 1, old ^ (1 << 31))) & 0xFFFFFFFF
            )
