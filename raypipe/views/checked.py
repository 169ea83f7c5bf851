"""What the card of a dataset checks, and what it leaves to `raypipe validate`.

The card checks the metadata, and the list of files if the storage can list them. It checks the rows if they are few and
on this machine, and never looks into videos.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from raypipe.dataset import Dataset
from raypipe.validate import DataUnit, Finding, check_rows, check_structure, is_small, plan_units, read_outline

_READABLE: Final = ("nan-values", "inf-values", "task-unresolved")
"""Errors in rows that are still readable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The findings, and what was checked."""

    structure: tuple[Finding, ...] = ()
    rows: tuple[Finding, ...] = ()
    """Errors and warnings, without notes: the card makes its own notes on columns."""
    text: str

    def blames(self, text: str) -> bool:
        """Return whether `text` names a file that `rows` already report as unreadable: it would only repeat them."""
        broken = (one for one in self.rows if one.severity == "error" and one.kind not in _READABLE)
        return any(one.place.file and one.place.file in text for one in broken)


def check_cheaply(dataset: Dataset) -> Checked:
    """Return the findings that cost a second or two; reads the rows of up to half a million frames on local disk."""
    storage = dataset.meta.storage
    if not storage.is_listable:
        return Checked(text="meta/; for the rest copy the dataset to disk, and run raypipe validate on the copy")
    outline = read_outline(storage)
    units, findings = plan_units(outline)
    num_files = sum(isinstance(unit, DataUnit) for unit in units)
    has_rows = storage.is_local and is_small(dataset.meta.num_frames, num_files, deep=False)
    rows = check_rows(outline) if has_rows else ()
    seen, other = (["all rows"], []) if has_rows else ([], ["rows"])
    return Checked(
        structure=(*check_structure(outline), *findings),
        rows=tuple(one for one in rows if one.severity != "note"),
        text=_told(dataset, ["meta/", "the list of files", *seen], other),
    )


def _told(dataset: Dataset, done: Sequence[str], left: Sequence[str]) -> str:
    meta = dataset.meta
    kinds = {meta.features[name].kind for name in meta.cameras}
    command = f"raypipe validate {meta.root}"
    rest = [*left, "videos"] if "video" in kinds else [*left]
    unchecked = [f"not {_joined(rest)}: {command}"] if rest else []
    unchecked += [f"not every picture: {command} --deep"] if kinds else []
    return "; ".join([_joined(done), *unchecked])


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
