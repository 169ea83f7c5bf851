"""Makes the features of unlike datasets one: the names, shapes, dtypes and sizes of a batch that fit all of them.

This module decides the features of a mixture's batch, and reads only the metadata of features. If members do not fit
together, it raises one error that lists everything wrong, with a table of who has what and the lines that would fix it.
Such a line is a guess by names and shapes, and says so: only a person can tell what two cameras see.

::

    aloha   action [14], images.wrist 480x640     ->   action [14], so101 padded by 8
    so101   action [6],  images.wrist 480x640          images.wrist 480x640
"""

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

from raypipe.dataset import MemberMap, Schema, WindowSpec
from raypipe.decode import ORIGINAL_SIZE, Resize, size_of
from raypipe.errors import ConfigError, suggest
from raypipe.format import Feature
from raypipe.mixture.members import MemberFeatures, offer_of
from raypipe.mixture.spec import MemberSpec, MixtureSpec, is_batch_key
from raypipe.text import counted, first_of

_SHOWN_NAMES: Final = 6
"""The most members named in a line; of the others it gives the number."""

_SHOWN_MEMBERS: Final = 12
"""The most columns of the table; with more members, alike ones share a column."""

_LINE: Final = 120
"""Characters in a line of a terminal; columns that do not fit go below."""

_LIKE: Final = 0.5
"""How alike two names must be, by `difflib`, to be offered as one; the last pair of a kind is always offered."""


def unify(members: Sequence[MemberFeatures], spec: MixtureSpec) -> tuple[Schema, list[str]]:
    """Return the common schema of the members of `spec`, without windows, and notes on what it drops, fills or widens.

    Raises:
        ConfigError: they do not fit together; the message lists everything wrong, which member has what, and what to
            write in the file.
    """
    offers, misfits = [], []
    for member, one in zip(members, spec.members, strict=True):
        offer, wrong = offer_of(member, one)
        offers.append(offer)
        misfits += wrong
    lacking = {name: lacks for name in _names(offers) if (lacks := [o.name for o in offers if name not in o.features])}
    kept = [name for name in _names(offers) if spec.on_missing != "drop" or name not in lacking]
    misfits += [
        f"{name!r} of {_holders(name, offers)} has the name of a key that batches use themselves; rename or drop it"
        for name in kept
        if is_batch_key(name)
    ]
    misfits += _clashes(kept, offers, members)
    # A feature with a name that batches use must be renamed, so do not suggest that name to the other members.
    missing = [name for name in lacking if spec.on_missing == "raise" and not is_batch_key(name)]
    misfits += [
        f"{name!r} is in {_holders(name, offers)}, and missing in {list_names(lacking[name])}" for name in missing
    ]
    misfits += _unknown_widths(offers, spec)
    unified = {name: _unify_feature(name, offers, spec) for name in kept}
    misfits += [wrong for wrong in unified.values() if isinstance(wrong, str)]
    if misfits:
        raise ConfigError(_explain_misfits(offers, misfits, missing, spec))
    schema = _schema({name: one for name, one in unified.items() if isinstance(one, Feature)}, offers)
    return schema, _notes(schema, offers, lacking, spec)


def _names(offers: Sequence[MemberFeatures]) -> list[str]:
    """Return all names in the mixture, row features first, each kind in the order in which members first have it."""
    rows = dict.fromkeys(name for offer in offers for name in offer.rows)
    return list(rows | dict.fromkeys(name for offer in offers for name in offer.cameras))


def _holders(name: str, offers: Sequence[MemberFeatures]) -> str:
    return list_names([offer.name for offer in offers if name in offer.features])


def _clashes(kept: Sequence[str], offers: Sequence[MemberFeatures], members: Sequence[MemberFeatures]) -> list[str]:
    """Return a misfit for each row feature named like a member's own camera: blocks could not tell them apart."""
    misfits = []
    for name in kept:
        rows = [offer.name for offer in offers if name in offer.rows]
        own = [
            one.name for one, offer in zip(members, offers, strict=True) if name in one.cameras.keys() - offer.cameras
        ]
        if rows and own:
            text = f"{name!r} of {list_names(rows)} is read from rows and is an own camera name of {list_names(own)}"
            misfits.append(f"{text}; rename the row feature")
    return misfits


def _unknown_widths(offers: Sequence[MemberFeatures], spec: MixtureSpec) -> list[str]:
    vectors = {
        name
        for offer in offers
        for name, feature in offer.rows.items()
        if feature.kind == "vector" and len(feature.shape) == 1
    }
    return [
        f"widths names {name!r}, which is no vector of the mixture{suggest(name, sorted(vectors))}"
        for name in spec.widths
        if name not in vectors
    ]


def _unify_feature(name: str, offers: Sequence[MemberFeatures], spec: MixtureSpec) -> Feature | str:
    """Return a feature that fits all members, or what prevents it; a vector is as wide as the widest."""
    given = {offer.name: offer.features[name] for offer in offers if name in offer.features}
    first = next(iter(given.values()))
    if len({family(feature) for feature in given.values()}) > 1:
        return f"{name!r} is not of one kind: {_described(given)}; rename or drop one of them"
    if first.is_camera:
        return _unify_camera(name, given, is_filled=len(given) < len(offers), resize=spec.resize)
    shape, dtype = first.shape, first.dtype
    is_flat = first.kind == "vector" and all(len(feature.shape) == 1 for feature in given.values())
    if is_flat:
        widest = max(given, key=lambda member: given[member].shape[0])
        wanted, width = spec.widths.get(name, 0), given[widest].shape[0]
        if 0 < wanted < width:
            return f"widths gives {name!r} {wanted} numbers, and {widest} has {width}; give at least {width}"
        shape = (max(wanted, width),)
    elif len({feature.shape for feature in given.values()}) > 1:
        return f"{name!r} has unlike shapes: {_described(given)}; only vectors are padded. Rename or drop it"
    if first.kind == "vector":
        dtypes = {feature.sample_dtype for feature in given.values()}
        dtype = next(one for one in ("float32", "int64", "bool") if one in dtypes)
    # Members must agree on the names of all numbers.
    is_named = len({feature.names for feature in given.values()}) == 1 and (not is_flat or len(first.names) == shape[0])
    return Feature(name=name, kind=first.kind, dtype=dtype, shape=shape, names=first.names if is_named else ())


def _described(given: Mapping[str, Feature]) -> str:
    return list_by_value({member: describe(feature) for member, feature in given.items()})


def _unify_camera(name: str, given: Mapping[str, Feature], *, is_filled: bool, resize: Resize) -> Feature | str:
    size = size_of(resize, name)
    sizes = {member: feature.shape[1:] for member, feature in given.items()}
    height, width = next(iter(sizes.values())) if size == ORIGINAL_SIZE else size
    is_unknown = 0 in (height, width) and (len(given) > 1 or is_filled)
    if size == ORIGINAL_SIZE and (len(set(sizes.values())) > 1 or is_unknown):
        return f"{name!r} has unlike or unknown sizes (height x width): {_described(given)}; give a resize"
    first = next(iter(given.values()))
    codecs = {feature.codec for feature in given.values()}
    return Feature(
        name=name,
        kind="image" if all(feature.kind == "image" for feature in given.values()) else "video",
        dtype=first.dtype,
        # The shape after decoding: grey and transparent pictures have three channels too.
        shape=(1 if first.is_depth else 3, height, width),
        is_depth=first.is_depth,
        codec=first.codec if len(codecs) == 1 else "",
    )


def _schema(features: Mapping[str, Feature], offers: Sequence[MemberFeatures]) -> Schema:
    members = tuple(
        MemberMap(
            rows={name: feature.name for name, feature in offer.rows.items() if name in features},
            cameras={name: feature.name for name, feature in offer.cameras.items() if name in features},
        )
        for offer in offers
    )
    widths = {}
    for name, feature in features.items():
        if feature.kind == "vector" and len(feature.shape) == 1:
            numbers = tuple(offer.rows[name].shape[0] if name in offer.rows else 0 for offer in offers)
            if any(0 < number < feature.shape[0] for number in numbers):
                widths[name] = numbers
    return Schema(features=features, members=members, widths=widths, windows={}, time_axes=())


def _notes(
    schema: Schema, offers: Sequence[MemberFeatures], lacking: Mapping[str, Sequence[str]], spec: MixtureSpec
) -> list[str]:
    done = "left out everywhere" if spec.on_missing == "drop" else "filled with zeros and marked there"
    notes = [f"{name!r} is {done}: missing in {list_names(lacks)}" for name, lacks in lacking.items()]
    for name, widths in schema.widths.items():
        width = schema.features[name].shape[0]
        narrow = {o.name: str(n) for o, n in zip(offers, widths, strict=True) if 0 < n < width}
        notes.append(f"{name!r} is padded to {width} numbers: {list_by_value(narrow)}")
    for name, feature in schema.rows.items():
        if feature.kind == "vector":
            dtypes = {o.name: o.rows[name].sample_dtype for o in offers if name in o.rows}
            if len(set(dtypes.values())) > 1:
                is_close = feature.dtype == "float32" and "int64" in dtypes.values()
                held = "and a whole number that it does not hold is an error" if is_close else "which holds all"
                notes.append(f"{name!r} is {feature.dtype}, {held}: {list_by_value(dtypes)}")
    return notes


def add_windows(schema: Schema, windows: Sequence[tuple[str, WindowSpec]]) -> Schema:
    """Return the schema with the window lengths of its members; `windows` pairs each with its name for messages.

    Raises:
        ConfigError: the members with a feature do not agree on the length of its window.
    """
    lengths: dict[str, int] = {}
    for name in schema.features:
        found = {}
        for position, (own, (who, window)) in enumerate(zip(schema.members, windows, strict=True)):
            if name in own.own_names:
                found[f"member {position} ({who})"] = len(window.offsets.get(own.own_names[name], ()))
        if len(set(found.values())) > 1:
            who = list_by_value({member: counted(length, "frame") for member, length in found.items()})
            raise ConfigError(f"the windows of {name!r} differ in length: {who}; give every member the same number")
        if any(found.values()):
            lengths[name] = max(found.values())
    # As in one dataset: a window of one frame has a time axis only for images stored in rows, and then in all members.
    kept = [name for name in schema.cameras if name in lengths]
    time_axes = tuple(name for name in kept if lengths[name] > 1 or schema.features[name].kind == "image")
    return replace(schema, windows=lengths, time_axes=time_axes)


def _explain_misfits(
    offers: Sequence[MemberFeatures], misfits: Sequence[str], missing: Sequence[str], spec: MixtureSpec
) -> str:
    """Return the message for misfits: one line each, the table of what differs, and what to write in the file."""
    lines = ["the features of the mixture do not fit together:"]
    lines += [f"  - {misfit}" for misfit in misfits]
    table = _table_of(offers)
    if table:
        lines += ["", "who has what (features that all have alike are left out):", *(f"  {line}" for line in table)]
    remedies = _remedies(offers, missing, spec)
    if remedies:
        lines += ["", "to write in the mixture file, once the names are known to mean the same:"]
        lines += [f"  {line}" for line in remedies]
    return "\n".join(lines)


def _table_of(offers: Sequence[MemberFeatures]) -> list[str]:
    """Return the features that differ as rows of text, with a column for each member or group of alike members."""
    cells = [{name: describe(feature) for name, feature in offer.features.items()} for offer in offers]
    names = [name for name in _all_names(cells) if len({one.get(name, "-") for one in cells}) > 1]
    if not names:
        return []
    columns = [[offer.name, *(one.get(name, "-") for name in names)] for offer, one in zip(offers, cells, strict=True)]
    left_out = 0
    if len(columns) > _SHOWN_MEMBERS:
        groups: dict[tuple[str, ...], list[str]] = {}
        for member, *found in columns:
            groups.setdefault(tuple(found), []).append(member)
        largest = sorted(groups.items(), key=lambda group: -len(group[1]))
        columns = [[f"{one[0]} ({len(one)} alike)" if one[1:] else one[0], *found] for found, one in largest]
        left_out = max(0, len(columns) - _SHOWN_MEMBERS)
    lines = _aligned(["", *names], columns[:_SHOWN_MEMBERS])
    return [*lines, f"and {left_out} other kinds of datasets"] if left_out else lines


def _aligned(labels: Sequence[str], columns: Sequence[Sequence[str]]) -> list[str]:
    """Return labels and columns side by side; columns that do not fit in a line go below, with the labels repeated."""
    left = max(map(len, labels))
    lines: list[str] = []
    rest = list(columns)
    while rest:
        taken, used = 1, left + 2 + max(map(len, rest[0]))
        while taken < len(rest) and (used := used + 2 + max(map(len, rest[taken]))) <= _LINE:
            taken += 1
        shown, rest = rest[:taken], rest[taken:]
        for row, label in enumerate(labels):
            cells = [column[row].ljust(max(map(len, column))) for column in shown]
            lines.append("  ".join([label.ljust(left), *cells]).rstrip())
        lines += [""] if rest else []
    return lines


def _remedies(offers: Sequence[MemberFeatures], missing: Sequence[str], spec: MixtureSpec) -> list[str]:
    """Return the lines to paste into the mixture file."""
    renames = _find_renames(offers, missing)
    # Members that need the same lines share them.
    grouped: dict[tuple[str, ...], list[str]] = {}
    for position, pairs in sorted(renames.items()):
        texts = _member_lines(offers[position], spec.members[position], pairs)
        grouped.setdefault(tuple(texts), []).append(offers[position].name)
    lines = []
    for shared, names in grouped.items():
        lines += [f"under {', '.join(names)}:", *(f"  {text}" for text in shared)]
    mended: list[dict[str, Feature]] = []
    for position, offer in enumerate(offers):
        pairs = renames.get(position, {})
        mended.append({pairs.get(name, name): feature for name, feature in offer.features.items()})
    sizes = [] if isinstance(spec.resize, tuple) else _unlike_sizes(mended)
    if sizes:
        height, width = min(sizes, key=lambda size: size[0] * size[1])
        lines.append(f"resize: [{height}, {width}]")
    still = [name for name in _all_names(mended) if name in missing and any(name not in one for one in mended)]
    if still:
        lines.append(f"on_missing: fill  # zeros and a mask; or drop: leaves out {list_names(still)}")
    return lines


def _find_renames(offers: Sequence[MemberFeatures], missing: Sequence[str]) -> dict[int, dict[str, str]]:
    """Return by position of a member the names that it gives -> those that it might give, the most alike first.

    If one member has both names, they are not the same thing. The name that more members have wins; of equals, the
    one that comes first.
    """
    holders = {name: {p for p, offer in enumerate(offers) if name in offer.features} for name in missing}
    first = {name: offers[min(holders[name])].features[name] for name in missing}
    pairs = [pair for pair in combinations(missing, 2) if _are_alike(first[pair[0]], first[pair[1]])]
    # By the last parts of the names: most share the parts before.
    ends = {name: name.rpartition(".")[2] for name in missing}
    likeness = {
        pair: difflib.SequenceMatcher(None, ends[pair[0]], ends[pair[1]], autojunk=False).ratio() for pair in pairs
    }
    renames: dict[int, dict[str, str]] = {}
    sources: set[str] = set()
    targets: set[str] = set()

    def join(chosen: Sequence[tuple[str, str]]) -> None:
        for one, other in chosen:
            target, source = (one, other) if len(holders[one]) >= len(holders[other]) else (other, one)
            if not ({source, target} & sources or source in targets or holders[source] & holders[target]):
                for position in holders[source]:
                    renames.setdefault(position, {})[source] = target
                holders[target] |= holders[source]
                sources.add(source)
                targets.add(target)

    def score(pair: tuple[str, str]) -> float:
        return likeness[pair] + 0.25 * (first[pair[0]].shape == first[pair[1]].shape)

    # Sorting is stable: of equals, the pair that comes first in the mixture wins.
    join(sorted((pair for pair in pairs if likeness[pair] >= _LIKE), key=score, reverse=True))
    # Then those that are the only ones left of their kind, whatever their names.
    left = [name for name in missing if name not in sources | targets]
    families = Counter(family(first[name]) for name in left)
    join([pair for pair in pairs if {*pair} <= {*left} and families[family(first[pair[0]])] == 2])
    return renames


def _are_alike(one: Feature, other: Feature) -> bool:
    is_alike = one.is_camera or one.shape == other.shape or len(one.shape) == len(other.shape) == 1
    return is_alike and family(one) == family(other)


def _member_lines(offer: MemberFeatures, spec: MemberSpec, pairs: Mapping[str, str]) -> list[str]:
    """Return the whole `rename` and `cameras` of a member, with its present entries: a file has each key only once."""
    has_cameras = not isinstance(spec.cameras, str)
    own = {
        offer.features[source].name: target
        for source, target in pairs.items()
        if not (has_cameras and source in offer.cameras)
    }
    lines = [f"rename: {_flow({**spec.rename, **own})}"] if own else []
    if not isinstance(spec.cameras, str) and any(source in offer.cameras for source in pairs):
        lines.append(f"cameras: {_flow({pairs.get(name, name): camera for name, camera in spec.cameras.items()})}")
    return lines


def _flow(mapping: Mapping[str, Any]) -> str:
    # JSON on one line is valid YAML, whatever characters the names have.
    return json.dumps(dict(mapping), ensure_ascii=False)


def _unlike_sizes(members: Iterable[Mapping[str, Feature]]) -> list[tuple[int, int]]:
    """Return the known sizes of cameras that differ in size between members."""
    sizes: dict[str, list[tuple[int, int]]] = {}
    for features in members:
        for name, feature in features.items():
            if feature.is_camera:
                sizes.setdefault(name, []).append((feature.height, feature.width))
    unlike = [size for found in sizes.values() if len(set(found)) > 1 for size in found]
    return [size for size in dict.fromkeys(unlike) if 0 not in size]


def _all_names(members: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for features in members for name in features))


def family(feature: Feature) -> str:
    """Return the family of a feature; only features of one family can become one: pixels of a sort, or numbers."""
    if feature.is_camera:
        return "depth" if feature.is_depth else "rgb"
    return feature.kind


def describe(feature: Feature) -> str:
    """Return a feature in two words: its kind, and its shape or its height and width."""
    if feature.is_camera:
        return f"{family(feature)} {feature.height or '?'}x{feature.width or '?'}"
    shape = "x".join(map(str, feature.shape))
    word = feature.sample_dtype if feature.kind == "vector" else feature.kind
    return f"{word} [{shape}]" if feature.kind == "vector" or feature.shape != (1,) else word


def list_names(names: Sequence[str]) -> str:
    """Return names as a list; if there are many, the first ones and the number of the others."""
    return first_of(names, _SHOWN_NAMES - (len(names) > _SHOWN_NAMES))


def list_by_value(values: Mapping[str, str]) -> str:
    """Return which members have which value, grouped by value: ``x in a, b; y in c``."""
    grouped: dict[str, list[str]] = {}
    for name, value in values.items():
        grouped.setdefault(value, []).append(name)
    return "; ".join(f"{value} in {list_names(names)}" for value, names in grouped.items())
