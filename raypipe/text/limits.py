"""How much a file, an answer or a state may ask for, and the reason of each limit.

What a few bytes claim is compared with these before memory is taken for it. Datasets of 50 million frames, tables of a
million episodes and mixtures of thousands of datasets are far below them all.
"""

import json
from collections.abc import Iterable, Iterator
from typing import IO, Any, Final

FREE_BYTES: Final = 1 << 29
"""What the values of a parquet file may take in memory however small the file is: a million episodes with 30 columns
take half of it."""

MOST_RATIO: Final = 64
"""How many times its own size the values of a larger file may take. Real rows are 1 to 4 times as large in memory, and
10 to 40 times where most of a state is padded with zeros; to take gigabytes, a file must have tens of megabytes."""

MOST_JSON_BYTES: Final = 1 << 28
"""Of a JSON document, of an answer, and of a line of JSON lines. The statistics of an episode have kilobytes, the
listing of a repo of 300,000 files 80 MB."""

MOST_JSON_NODES: Final = 1 << 24
"""Of a JSON document: what stands behind a comma or an opening bracket. Each may take 60 bytes, however short."""

MOST_TEXT_BYTES: Final = 1 << 30
"""Of a file of JSON lines that is read whole: a million episodes take a fifth of it."""

MOST_YAML_NODES: Final = 1 << 18
"""Of a mixture file, with what aliases repeat: 10,000 datasets of 20 keys. Each takes a kilobyte."""

MOST_VIDEO_FRAMES: Final = 1 << 24
"""Of one mp4: 150 hours at 30 fps. Its index takes some 60 bytes a frame."""

MOST_ALIKE_FRAMES: Final = 1 << 20
"""Of an mp4 that says of its frames that each has so many bytes, and lists none: raw pictures, 9 hours at 30 fps."""

MOST_INDEX_BYTES: Final = 1 << 28
"""Of the index of an mp4, of which a frame takes 8 to 16."""

MOST_PIXELS: Final = 1 << 26
"""Of a frame of a camera: 8192 x 8192, which is 200 MB."""

MOST_NUMBERS: Final = 1 << 24
"""Of a feature in one frame: 64 MB, as a cloud of 5 million points."""

MOST_LANES: Final = 1 << 20
"""Ranks of a run, and lanes of an epoch: a million, ten times the largest cluster."""

MOST_COUNT: Final = 1 << 53
"""Of whatever ``info.json`` counts: a JSON number is exact up to there."""


BODY_CODES: Final = frozenset({"", "identity", "gzip", "deflate"})
"""How a server may send a body. None is asked to pack it; of these one byte becomes a thousand at most, of others any
number."""


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or has more values or depth than real data has.
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
    """Return the lines of a file; of one that is longer than JSON may be, enough for `parse_json` to refuse it."""
    return iter(lambda: stream.readline(MOST_JSON_BYTES + 1), b"")


def join_within(pieces: Iterable[bytes], most: int) -> bytes:
    """Return the bytes of an answer that comes in pieces.

    Raises:
        ValueError: there are more than `most`; the rest is not taken.
    """
    content = bytearray()
    for piece in pieces:
        content += piece
        if len(content) > most:
            raise ValueError(f"more than the {most:,} bytes that it may have")
    return bytes(content)
