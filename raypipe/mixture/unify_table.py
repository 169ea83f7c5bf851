"""The message when members of a mixture do not fit together: everything wrong, who has what, and the lines to fix it.

Pure text. A suggestion is a guess by names and shapes, and says so: only a person can tell what two cameras see.
"""

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from raypipe.decode import Resize
from raypipe.format import Feature
from raypipe.mixture.offer import Misfit, Offer, describe, family, list_names
from raypipe.mixture.spec import MemberSpec

_SHOWN_MEMBERS: Final = 12
"""The most columns of the table; with more members, alike ones share a column."""

_LINE: Final = 120
"""Characters in a line of a terminal; columns that do not fit go below."""

_LIKE: Final = 0.5
"""How alike two names must be, by `difflib`, to be offered as one; the last pair of a kind is always offered."""

Renames = Mapping[int, Mapping[str, str]]
"""By position of a member: the name in the mixture that it gives now -> the name that it might give."""


def explain_misfits(
    offers: Sequence[Offer],
    misfits: Sequence[Misfit],
    specs: Sequence[MemberSpec],
    size: Resize,
) -> str:
    """Return the message for misfits: one line each, the table of what differs, and what to write in the file."""
    lines = ["the features of the mixture do not fit together:"]
    lines += [f"  - {misfit.text}" for misfit in misfits]
    table = table_of(offers)
    if table:
        lines += ["", "who has what (features that all have alike are left out):", *(f"  {line}" for line in table)]
    remedies = _remedies(offers, misfits, specs, is_resized=isinstance(size, tuple))
    if remedies:
        lines += ["", "to write in the mixture file, once the names are known to mean the same:"]
        lines += [f"  {line}" for line in remedies]
    return "\n".join(lines)


def table_of(offers: Sequence[Offer]) -> list[str]:
    """Return the features that differ as rows of text, with a column for each member or group of alike members."""
    cells = [{name: describe(feature) for name, feature in offer.features.items()} for offer in offers]
    names = [name for name in _all_names(offers) if len({one.get(name, "-") for one in cells}) > 1]
    if not names:
        return []
    columns = [[offer.name, *(one.get(name, "-") for name in names)] for offer, one in zip(offers, cells, strict=True)]
    left_out = 0
    if len(columns) > _SHOWN_MEMBERS:
        columns = _grouped(columns)
        left_out = max(0, len(columns) - _SHOWN_MEMBERS)
    lines = _aligned(["", *names], columns[:_SHOWN_MEMBERS])
    return [*lines, f"and {left_out} other kinds of datasets"] if left_out else lines


def _grouped(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return one column for each group of alike members, the largest group first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in columns:
        groups.setdefault(tuple(cells), []).append(name)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [[names[0] if len(names) == 1 else f"{names[0]} ({len(names)} alike)", *cells] for cells, names in ordered]


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


def _remedies(
    offers: Sequence[Offer], misfits: Sequence[Misfit], specs: Sequence[MemberSpec], *, is_resized: bool
) -> list[str]:
    missing = [misfit.name for misfit in misfits if misfit.kind == "missing"]
    renames = _find_renames(offers, missing)
    lines = _rename_lines(offers, specs, renames)
    mended = [_renamed(offer, renames.get(position, {})) for position, offer in enumerate(offers)]
    sizes = [] if is_resized else _unlike_sizes(mended)
    if sizes:
        height, width = min(sizes, key=lambda size: size[0] * size[1])
        lines.append(f"resize: [{height}, {width}]")
    still = [name for name in _all_features(mended) if name in missing and any(name not in one for one in mended)]
    if still:
        lines.append(f"on_missing: fill  # zeros and a mask; or drop: leaves out {list_names(still)}")
    return lines


def _find_renames(offers: Sequence[Offer], missing: Sequence[str]) -> Renames:
    """Return the features that may be the same under another name in other members, the most alike first.

    If one member has both names, they are not the same thing. The name that more members have wins; of equals, the
    one that comes first.
    """
    holders = {name: {p for p, offer in enumerate(offers) if name in offer.features} for name in missing}
    first = {name: offers[min(holders[name])].features[name] for name in missing}
    renames: dict[int, dict[str, str]] = {}
    sources: set[str] = set()
    targets: set[str] = set()

    def join(pairs: Sequence[tuple[str, str]]) -> None:
        for one, other in pairs:
            target, source = (one, other) if len(holders[one]) >= len(holders[other]) else (other, one)
            if not ({source, target} & sources or source in targets or holders[source] & holders[target]):
                for position in holders[source]:
                    renames.setdefault(position, {})[source] = target
                holders[target] |= holders[source]
                sources.add(source)
                targets.add(target)

    join(_likely_pairs(missing, first))
    join(_lone_pairs([name for name in missing if name not in sources | targets], first))
    return renames


def _likely_pairs(names: Sequence[str], features: Mapping[str, Feature]) -> list[tuple[str, str]]:
    scored = []
    for one, other in combinations(names, 2):
        if _are_alike(features[one], features[other]):
            likeness = _likeness(one, other)
            if likeness >= _LIKE:
                scored.append((likeness + 0.25 * (features[one].shape == features[other].shape), one, other))
    # Sorting is stable: of equals, the pair that comes first in the mixture wins.
    return [(one, other) for _, one, other in sorted(scored, key=lambda pair: -pair[0])]


def _lone_pairs(names: Sequence[str], features: Mapping[str, Feature]) -> list[tuple[str, str]]:
    """Return the pairs of features that are the only ones left of their kind, whatever their names."""
    families = Counter(family(features[name]) for name in names)
    pairs = combinations(names, 2)
    return [
        (one, other)
        for one, other in pairs
        if families[family(features[one])] == 2 and _are_alike(features[one], features[other])
    ]


def _are_alike(one: Feature, other: Feature) -> bool:
    if family(one) != family(other):
        return False
    return one.is_camera or one.shape == other.shape or len(one.shape) == len(other.shape) == 1


def _likeness(one: str, other: str) -> float:
    """Return how alike the last parts of two names are; most names share the parts before."""
    return difflib.SequenceMatcher(a=one.rpartition(".")[2], b=other.rpartition(".")[2], autojunk=False).ratio()


def _rename_lines(offers: Sequence[Offer], specs: Sequence[MemberSpec], renames: Renames) -> list[str]:
    """Return the lines to paste; members that need the same lines share them."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for position, pairs in sorted(renames.items()):
        texts = _member_lines(offers[position], specs[position], pairs)
        grouped.setdefault(tuple(texts), []).append(offers[position].name)
    lines = []
    for shared, names in grouped.items():
        lines += [f"under {', '.join(names)}:", *(f"  {text}" for text in shared)]
    return lines


def _member_lines(offer: Offer, spec: MemberSpec, pairs: Mapping[str, str]) -> list[str]:
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


def _renamed(offer: Offer, pairs: Mapping[str, str]) -> dict[str, Feature]:
    return {pairs.get(name, name): feature for name, feature in offer.features.items()}


def _unlike_sizes(members: Iterable[Mapping[str, Feature]]) -> list[tuple[int, int]]:
    """Return the known sizes of cameras that differ in size between members."""
    sizes: dict[str, list[tuple[int, int]]] = {}
    for features in members:
        for name, feature in features.items():
            if feature.is_camera:
                sizes.setdefault(name, []).append((feature.height, feature.width))
    unlike = [size for found in sizes.values() if len(set(found)) > 1 for size in found]
    return [size for size in dict.fromkeys(unlike) if 0 not in size]


def _all_names(offers: Sequence[Offer]) -> list[str]:
    return _all_features([offer.features for offer in offers])


def _all_features(members: Iterable[Mapping[str, Feature]]) -> list[str]:
    return list(dict.fromkeys(name for features in members for name in features))
