"""Opens all datasets of a mixture at once, so that everything that can be known before training is known then.

It reads the metadata in threads. One unusable dataset does not stop it from looking at the others: one error or one
warning names every unusable one. What a usable dataset leaves out becomes a note, not a warning: four hundred datasets
would make too many warnings.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa

from raypipe.dataset import (
    Dataset,
    SampleSpec,
    WindowSpec,
    check_cameras,
    find_missing_cameras,
    knowing_rows,
    unreadable_cameras,
)
from raypipe.errors import ConfigError, DatasetError, DownloadError, RaypipeError
from raypipe.format import INDEX_FEATURES, DatasetMeta, find_absent_columns, one_line, read_metadata, row_features_of
from raypipe.mixture.spec import MemberSpec, OnBadDataset
from raypipe.storage import Storage, is_repo_id, is_transient, open_root, retry_transient
from raypipe.text import counted, cut_inside, is_shown, open_console

NUM_THREADS: Final = {"local": 8, "remote": 32}
"""With storage that answers after 20 ms, 100 datasets take 37 s one by one and 1.4 s in 32 threads. For local files the
CPU is the limit: 4 ms a dataset, mostly under Python's lock, so more threads only cost more CPU. A few threads help
with folders that lie on another machine."""

_REASON_CHARACTERS: Final = 400
"""The most characters of one dataset's error in a list of many: about two lines of a terminal."""

_BAD_DATA: Final = (RaypipeError, OSError, pa.ArrowException)
"""Errors that make a dataset bad. Any other error is a bug in the program, not bad data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMember:
    """A dataset that cannot be used, and why."""

    name: str
    root: str
    error: str
    """On one line."""
    kind: Literal["data", "config", "storage"] = "data"
    """The cause: the dataset itself, what the mixture asks of it, or storage that does not answer."""

    def __str__(self) -> str:
        return f"{self.name} ({self.root}): {cut_inside(self.error, _REASON_CHARACTERS)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberNote:
    """Something odd or left out that does not prevent the use of a dataset."""

    name: str
    """The member's name; empty if the note is about no single member."""
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.name else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The datasets of a mixture."""

    datasets: tuple[Dataset, ...]
    """In the order of the members, without the bad ones."""
    positions: tuple[int, ...]
    """For each dataset, the position of its member."""
    bad: tuple[BadMember, ...]
    notes: tuple[MemberNote, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What raypipe finds when it opens a dataset: its metadata, and what its files lack."""

    meta: DatasetMeta
    missing_cameras: tuple[str, ...]
    """Declared cameras without a file."""
    absent_columns: tuple[str, ...]
    """Declared features that the rows do not have."""


OpenOne = Callable[[Storage], Contents]


def read_contents(storage: Storage) -> Contents:
    """Return the contents of the dataset at `storage`; reads ``meta/`` and up to three footers.

    Raises:
        DatasetError: it is not a dataset, or none of it can be read.
    """
    meta = read_metadata(storage)
    return Contents(meta=meta, missing_cameras=find_missing_cameras(meta), absent_columns=find_absent_columns(meta))


def open_members(
    members: Sequence[MemberSpec],
    *,
    on_bad_dataset: OnBadDataset = "raise",
    progress: bool = True,
    open_one: OpenOne = read_contents,
) -> Opened:
    """Return the datasets of `members`, with the cameras that each asks for; reads ``meta/`` and a few footers.

    Args:
        progress: whether to show a bar at a terminal or in a notebook.
        open_one: finds what the dataset at a storage holds.

    Raises:
        DatasetError: a dataset is unusable and `on_bad_dataset` is ``"raise"``, or all are. The message lists every
            unusable one.
        DownloadError: storage does not answer. ``"skip"`` raises it too, since the dataset itself may be good.
        ConfigError: a member asks for a camera that its dataset does not have. ``"skip"`` raises it too.
    """
    if not members:
        raise ConfigError("the mixture has no members; give at least one dataset")
    results = _open_all(members, open_one, progress=progress)
    bad = tuple(result for result in results if isinstance(result, BadMember))
    good = {position: one for position, one in enumerate(results) if isinstance(one, _OpenedMember)}
    if bad and (on_bad_dataset == "raise" or not good or any(one.kind != "data" for one in bad)):
        raise _error_of(bad)(_bad_text(bad, len(members)))
    if bad:
        warnings.warn(_bad_text(bad, len(members)), stacklevel=2)
    return Opened(
        datasets=tuple(one.dataset for one in good.values()),
        positions=tuple(good),
        bad=bad,
        notes=tuple(MemberNote(name=members[i].name, text=text) for i, one in good.items() for text in one.notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenedMember:
    dataset: Dataset
    notes: tuple[str, ...]


def _open_all(members: Sequence[MemberSpec], open_one: OpenOne, *, progress: bool) -> list["_OpenedMember | BadMember"]:
    """Return every member, opened or bad, in order, however fast each was read."""
    is_remote = any("://" in member.root or is_repo_id(member.root) for member in members)
    kind = "remote" if is_remote else "local"
    pool = ThreadPoolExecutor(min(NUM_THREADS[kind], len(members)), thread_name_prefix="raypipe-open")
    try:
        futures: dict[Future[_OpenedMember | BadMember], int] = {
            pool.submit(_open_member, member, open_one): position for position, member in enumerate(members)
        }
        with _bar(len(members), is_on=progress) as advance:
            for future in as_completed(futures):
                # Raises any error that is not about the data, without waiting for the rest.
                future.result()
                advance(members[futures[future]].name)
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _open_member(member: MemberSpec, open_one: OpenOne) -> "_OpenedMember | BadMember":
    try:
        storage = open_root(member.root)
        contents = retry_transient(lambda: open_one(storage))
        return _as_member(member, contents)
    except _BAD_DATA as error:
        reason = one_line(error) or type(error).__name__
        named = reason if isinstance(error, RaypipeError) else f"{type(error).__name__}: {reason}"
        return BadMember(name=member.name, root=member.root, error=named, kind=_kind_of(error))


def _as_member(member: MemberSpec, contents: Contents) -> _OpenedMember:
    """Return the dataset with the cameras that the member asks for, and the notes about it."""
    meta, missing = contents.meta, contents.missing_cameras
    if not len(meta.episodes):
        raise DatasetError("it has no episodes")
    opaque = {name: why for name, why in meta.opaque.items() if name not in member.drop}
    notes = [*meta.notes, *(f"feature {name!r} is left out: {why}" for name, why in opaque.items())]
    if member.cameras == "all":
        unreadable = unreadable_cameras(meta, missing)
        left_out = {*member.drop, *(name for names in unreadable.values() for name in names)}
        cameras = tuple(name for name in meta.cameras if name not in left_out)
        for why, names in unreadable.items():
            notes += [f"camera {name!r} is left out: {why}" for name in names if name not in member.drop]
    else:
        cameras = tuple(dict.fromkeys(name for name in member.cameras.values() if name not in member.drop))
        check_cameras(meta, cameras, missing)
    declared = row_features_of(meta, cameras, absent=())
    for name in contents.absent_columns:
        if name in declared and name not in member.drop and name not in INDEX_FEATURES:
            notes.append(f"feature {name!r} is left out: declared in info.json, and the rows have no such column")
    dataset = Dataset(
        meta=meta, spec=SampleSpec(cameras=cameras), window=WindowSpec(), missing_cameras=contents.missing_cameras
    )
    rows = row_features_of(meta, cameras, contents.absent_columns)
    return _OpenedMember(dataset=knowing_rows(dataset, rows), notes=tuple(notes))


def _kind_of(error: BaseException) -> Literal["data", "config", "storage"]:
    if isinstance(error, ConfigError):
        return "config"
    return "storage" if is_transient(error) else "data"


def _error_of(bad: Sequence[BadMember]) -> type[RaypipeError]:
    kinds = {one.kind for one in bad}
    if "config" in kinds:
        return ConfigError
    return DownloadError if "storage" in kinds else DatasetError


def _bad_text(bad: Sequence[BadMember], num_members: int) -> str:
    is_all_data = all(one.kind == "data" for one in bad)
    listed = "\n".join(f"  - {member}" for member in bad)
    return (
        f"{len(bad)} of {counted(num_members, 'dataset')} of the mixture cannot be used; {num_members - len(bad)} "
        f"can:\n{listed}\n"
        f"Mend them (`raypipe validate ROOT` says what is wrong with one), give them weight 0, or leave out all that "
        f"cannot be used with on_bad_dataset: skip."
        + ("" if is_all_data else " It leaves out bad datasets only, not what is asked wrongly or does not answer now.")
    )


@contextmanager
def _bar(num_members: int, *, is_on: bool) -> Iterator[Callable[[str], None]]:
    """Show how many datasets are open while the body runs, if `is_on`, at a terminal or in a notebook."""
    if not is_on or not is_shown():
        yield lambda _name: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns: tuple[Any, ...] = (
        TextColumn("opening datasets"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    with Progress(*columns, console=open_console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=num_members, name="")
        yield lambda name: shown.update(task, advance=1, name=name)
