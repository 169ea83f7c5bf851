"""Makes the features of unlike datasets one: the names, shapes, dtypes and sizes of a batch that fit all of them.

This module decides the features of a mixture's batch, and reads only the metadata of features. If members do not fit
together, it raises one error that lists everything wrong, with a table and the lines that would fix it. `windows.py`
decides the windows.

::

    aloha   action [14], images.wrist 480x640     ->   action [14], so101 padded by 8
    so101   action [6],  images.wrist 480x640          images.wrist 480x640
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypipe.dataset import Dataset, MemberMap, Schema
from raypipe.decode import ORIGINAL_SIZE, Resize, size_of
from raypipe.errors import ConfigError, suggest
from raypipe.format import Feature
from raypipe.mixture.offer import (
    MemberFeatures,
    Misfit,
    Offer,
    describe,
    family,
    features_of,
    list_by_value,
    list_names,
    offer_of,
    sample_dtype,
)
from raypipe.mixture.spec import MemberSpec, MixtureSpec, is_batch_key
from raypipe.mixture.unify_table import explain_misfits
from raypipe.mixture.windows import add_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Unified:
    """The common schema of the members, and what was done to get it."""

    schema: Schema
    notes: tuple[str, ...]
    """What was left out, filled, padded or widened, one line each."""


def unify(members: Sequence[Dataset], spec: MixtureSpec, specs: Sequence[MemberSpec]) -> Unified:
    """Return the common schema of these datasets, without windows.

    Args:
        specs: one per dataset, with its name in the mixture.

    Raises:
        ConfigError: they do not fit together; the message lists everything wrong, which member has what, and what to
            write in the file.
    """
    features = [features_of(one.name, dataset) for one, dataset in zip(specs, members, strict=True)]
    return unify_features(features, spec, specs)


def unify_features(members: Sequence[MemberFeatures], spec: MixtureSpec, specs: Sequence[MemberSpec]) -> Unified:
    """Return the common schema of members with these features: `unify`, on plain values."""
    offers, misfits = [], []
    for member, one in zip(members, specs, strict=True):
        offer, wrong = offer_of(member, one)
        offers.append(offer)
        misfits += wrong
    lacking = {name: lacks for name in _names(offers) if (lacks := [o.name for o in offers if name not in o.features])}
    kept = [name for name in _names(offers) if spec.on_missing != "drop" or name not in lacking]
    misfits += _taken(kept, offers)
    misfits += _clashes(kept, offers, members)
    if spec.on_missing == "raise":
        # A feature with a name that batches use must be renamed, so do not suggest that name to the other members.
        misfits += [_missing(name, offers, lacks) for name, lacks in lacking.items() if not is_batch_key(name)]
    misfits += _unknown_widths(offers, spec)
    features = {}
    for name in kept:
        one_feature = _unify_feature(name, offers, spec)
        if isinstance(one_feature, Misfit):
            misfits.append(one_feature)
        else:
            features[name] = one_feature
    if misfits:
        raise ConfigError(explain_misfits(offers, misfits, specs, spec.resize))
    schema = _schema(features, offers)
    return Unified(schema=schema, notes=_notes(schema, offers, lacking, spec))


def _names(offers: Sequence[Offer]) -> list[str]:
    """Return all names in the mixture, row features first, each kind in the order in which members first have it."""
    rows = dict.fromkeys(name for offer in offers for name in offer.rows)
    return list(rows | dict.fromkeys(name for offer in offers for name in offer.cameras))


def _taken(kept: Sequence[str], offers: Sequence[Offer]) -> list[Misfit]:
    """Return a misfit for each feature with the name of a key that batches set themselves."""
    misfits = []
    for name in filter(is_batch_key, kept):
        has = list_names([offer.name for offer in offers if name in offer.features])
        text = f"{name!r} of {has} has the name of a key that batches use themselves; rename or drop it"
        misfits.append(Misfit(text=text, name=name))
    return misfits


def _clashes(kept: Sequence[str], offers: Sequence[Offer], members: Sequence[MemberFeatures]) -> list[Misfit]:
    """Return a misfit for each row feature named like a member's own camera: blocks could not tell them apart."""
    misfits = []
    for name in kept:
        rows = [offer.name for offer in offers if name in offer.rows]
        own = [
            one.name for one, offer in zip(members, offers, strict=True) if name in one.cameras.keys() - offer.cameras
        ]
        if rows and own:
            text = f"{name!r} of {list_names(rows)} is read from rows and is an own camera name of {list_names(own)}"
            misfits.append(Misfit(text=f"{text}; rename the row feature", name=name))
    return misfits


def _missing(name: str, offers: Sequence[Offer], lacks: Sequence[str]) -> Misfit:
    has = [offer.name for offer in offers if name in offer.features]
    return Misfit(
        text=f"{name!r} is in {list_names(has)}, and missing in {list_names(lacks)}", name=name, kind="missing"
    )


def _unknown_widths(offers: Sequence[Offer], spec: MixtureSpec) -> list[Misfit]:
    vectors = {
        name
        for offer in offers
        for name, feature in offer.rows.items()
        if feature.kind == "vector" and len(feature.shape) == 1
    }
    return [
        Misfit(text=f"widths names {name!r}, which is no vector of the mixture{suggest(name, sorted(vectors))}")
        for name in spec.widths
        if name not in vectors
    ]


def _unify_feature(name: str, offers: Sequence[Offer], spec: MixtureSpec) -> Feature | Misfit:
    given = {offer.name: offer.features[name] for offer in offers if name in offer.features}
    kinds = {family(feature) for feature in given.values()}
    first = next(iter(given.values()))
    if len(kinds) > 1:
        who = list_by_value({member: describe(feature) for member, feature in given.items()})
        return Misfit(text=f"{name!r} is not of one kind: {who}; rename or drop one of them", name=name)
    if first.is_camera:
        return _unify_camera(name, given, is_filled=len(given) < len(offers), resize=spec.resize)
    if first.kind == "vector" and all(len(feature.shape) == 1 for feature in given.values()):
        return _unify_vector(name, given, spec.widths.get(name, 0))
    if len({feature.shape for feature in given.values()}) > 1:
        who = list_by_value({member: describe(feature) for member, feature in given.items()})
        return Misfit(text=f"{name!r} has unlike shapes: {who}; only vectors are padded. Rename or drop it", name=name)
    dtype = _common_dtype(given) if first.kind == "vector" else first.dtype
    return Feature(name=name, kind=first.kind, dtype=dtype, shape=first.shape, names=_common_names(given, 0))


def _unify_vector(name: str, given: Mapping[str, Feature], wanted: int) -> Feature | Misfit:
    """Return a vector as wide as the widest; a scalar in all members stays a scalar."""
    widest = max(given, key=lambda member: given[member].shape[0])
    width = max(wanted, given[widest].shape[0])
    if wanted and wanted < width:
        return Misfit(
            text=f"widths gives {name!r} {wanted} numbers, and {widest} has {width}; give at least {width}", name=name
        )
    return Feature(
        name=name, kind="vector", dtype=_common_dtype(given), shape=(width,), names=_common_names(given, width)
    )


def _common_dtype(given: Mapping[str, Feature]) -> str:
    dtypes = {sample_dtype(feature.dtype) for feature in given.values()}
    return next(dtype for dtype in ("float32", "int64", "bool") if dtype in dtypes)


def _common_names(given: Mapping[str, Feature], width: int) -> tuple[str, ...]:
    """Return the name of each number, if all members agree on all of them."""
    names = {feature.names for feature in given.values()}
    only = next(iter(names))
    return only if len(names) == 1 and (not width or len(only) == width) else ()


def _unify_camera(name: str, given: Mapping[str, Feature], *, is_filled: bool, resize: Resize) -> Feature | Misfit:
    size = size_of(resize, name)
    sizes = {member: feature.shape[1:] for member, feature in given.items()}
    height, width = next(iter(sizes.values())) if size == ORIGINAL_SIZE else size
    is_unknown = 0 in (height, width) and (len(given) > 1 or is_filled)
    if size == ORIGINAL_SIZE and (len(set(sizes.values())) > 1 or is_unknown):
        who = list_by_value({member: describe(feature) for member, feature in given.items()})
        return Misfit(
            text=f"{name!r} has unlike or unknown sizes (height x width): {who}; give a resize", name=name, kind="size"
        )
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


def _schema(features: Mapping[str, Feature], offers: Sequence[Offer]) -> Schema:
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
    schema: Schema, offers: Sequence[Offer], lacking: Mapping[str, Sequence[str]], spec: MixtureSpec
) -> tuple[str, ...]:
    done = "left out everywhere" if spec.on_missing == "drop" else "filled with zeros and marked there"
    notes = [f"{name!r} is {done}: missing in {list_names(lacks)}" for name, lacks in lacking.items()]
    for name, widths in schema.widths.items():
        width = schema.features[name].shape[0]
        narrow = {o.name: str(n) for o, n in zip(offers, widths, strict=True) if 0 < n < width}
        notes.append(f"{name!r} is padded to {width} numbers: {list_by_value(narrow)}")
    for name, feature in schema.rows.items():
        if feature.kind == "vector":
            dtypes = {o.name: sample_dtype(o.rows[name].dtype) for o in offers if name in o.rows}
            if len(set(dtypes.values())) > 1:
                notes.append(f"{name!r} is {_common_word(feature.dtype, dtypes.values())}: {list_by_value(dtypes)}")
    return tuple(notes)


def _common_word(dtype: str, dtypes: Iterable[str]) -> str:
    """Return a dtype and the dtypes that it holds; reading raises if a number would change in it."""
    is_close = dtype == "float32" and "int64" in dtypes
    return f"{dtype}, and a whole number that it does not hold is an error" if is_close else f"{dtype}, which holds all"


def with_windows(schema: Schema, members: Sequence[Dataset]) -> Schema:
    """Return the schema with the windows of these datasets, which have them under their own names.

    Raises:
        ConfigError: the members with a feature do not agree on the length of its window.
    """
    return add_windows(schema, [(dataset.meta.root, dataset.window) for dataset in members])
