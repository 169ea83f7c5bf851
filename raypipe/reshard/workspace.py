"""The folder of an unfinished copy, so that a killed run can continue and nobody sees a half-written dataset.

::

    OUT.partial-<fingerprint>/manifest.json    the arguments that made it
                              lock             held by the active run
                              dataset/...      finished files, under their final names
                              records/...      one per finished file: its size and what meta/ says about it
                              parts/...        files being written, under temporary names
    OUT                                        dataset/, renamed once everything is written and checked

Each file is written in ``parts``, renamed into ``dataset``, then recorded: so a file with a record is whole.
"""

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import ConfigError, DatasetError, ResumeError
from raypipe.storage import Storage, inside

LAYOUT: Final = 2
"""Version of the layout of a copy. If it changes, unfinished copies of an older raypipe start again."""

ORIGIN: Final = "meta/reshard.json"
"""The file of a finished copy that records its source and its arguments."""


_REFUSED = "refused"
"""Marks a copy that ended at bad data: a copy with other arguments may replace it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The folder of an unfinished copy."""

    out: Path
    folder: Path
    fingerprint: str
    choices: dict[str, Any]
    """The spec as plain values."""

    @property
    def dataset(self) -> Path:
        """The part of the copy that is finished."""
        return self.folder / "dataset"

    @property
    def clips(self) -> Path:
        """The re-encoded episodes, one video each, before they are joined."""
        return self.folder / "clips"

    @contextmanager
    def writing(self, target: Path) -> Iterator[Path]:
        """Yield the path of a new file, which gets the name `target` when the body ends without an error."""
        target = inside(self.folder, target)
        part = self.folder / "parts" / f"{uuid.uuid4().hex}{target.suffix}"
        part.parent.mkdir(parents=True, exist_ok=True)
        yield part
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, target)

    def write_file(self, target: Path, write: Callable[[IO[bytes]], object]) -> int:
        """Write a file so that it appears whole or not at all, and return its size in bytes."""
        with self.writing(target) as part, open(part, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
            return os.fstat(stream.fileno()).st_size

    def write_bytes(self, target: Path, content: bytes) -> None:
        """Write a file of this content; see `write_file`."""
        self.write_file(target, lambda stream: stream.write(content))

    def write_table(self, path: str, table: pa.Table) -> None:
        """Write the parquet file `path` of the dataset."""
        self.write_file(self.dataset / path, lambda stream: pq.write_table(table, stream))

    def write_json(self, path: str, value: dict[str, Any]) -> None:
        """Write the JSON file `path` of the dataset."""
        self.write_bytes(self.dataset / path, (json.dumps(value, indent=4) + "\n").encode())

    def write_record(self, path: str, record: dict[str, Any]) -> None:
        """Record that the file `path` of the dataset is finished."""
        self.write_bytes(self._record_of(path), json.dumps(record).encode())

    def write_stats(self, path: str, stats: list[dict[str, Any]]) -> None:
        """Keep the statistics of the episodes in the data file `path`; call it before writing the record."""
        self.write_bytes(self._record_of(path, "stats.json"), json.dumps(stats).encode())

    def read_stats(self, path: str) -> list[dict[str, Any]]:
        """Return the statistics of the episodes in the finished data file `path`."""
        stats: list[dict[str, Any]] = json.loads(self._record_of(path, "stats.json").read_bytes())
        return stats

    def _record_of(self, path: str, suffix: str = "json") -> Path:
        # Statistics have a file of their own: every start reads all records, and statistics take kilobytes per episode.
        return self.folder / "records" / f"{path}.{suffix}"

    def find_record(self, path: str) -> dict[str, Any] | None:
        """Return the record of the file `path` if it is finished, else None."""
        place, file = self._record_of(path), self.dataset / path
        if not place.exists() or not file.exists():
            return None
        record: dict[str, Any] = json.loads(place.read_bytes())
        return record if record["size_bytes"] == file.stat().st_size else None


def find_workspace(
    storage: Storage, choices: dict[str, Any], out: str | os.PathLike[str], size_of: Mapping[str, int]
) -> Workspace:
    """Return the folder for the copy: a new one, or that of an interrupted run with the same arguments.

    Writes nothing.

    Args:
        choices: the spec as plain values.
        size_of: the sizes of the source's files by name.

    Raises:
        ConfigError: `out` is a URI, is the source, is inside it or contains it, or already exists and is something
            else.
        ResumeError: next to `out` is an unfinished copy with other arguments, or of a source that has changed.
    """
    text = os.fspath(out)
    if not text or "://" in text:
        raise ConfigError(
            f"OUT is {text!r}; reshard writes to a local folder, which appears at once when it is complete. Write it "
            f"to disk, then copy it to the store."
        )
    out = Path(os.path.abspath(os.path.expanduser(text)))
    _check_apart(storage, out)
    fingerprint = _fingerprint(storage, choices, size_of)
    folder = out.with_name(f"{out.name}.partial-{fingerprint[:12]}")
    workspace = Workspace(out=out, folder=folder, fingerprint=fingerprint, choices=choices)
    if not is_finished(workspace):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(
                f"OUT {str(out)!r} is there already, and was not made by these arguments. Choose another folder."
            )
        _check_no_other(workspace)
    return workspace


@contextmanager
def hold_workspace(workspace: Workspace, root: str) -> Iterator[None]:
    """Create the folder of the unfinished copy, store the arguments in it, and keep other runs out of it.

    Raises:
        ResumeError: another run is using it.
    """
    workspace.folder.mkdir(parents=True, exist_ok=True)
    with _open_lock(workspace) as lock:
        try:
            # The system releases the lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResumeError(
                f"another run of the same arguments is at work in {str(workspace.folder)!r}; wait for its end"
            ) from error
        told = {"fingerprint": workspace.fingerprint, "root": root, "spec": workspace.choices, "layout": LAYOUT}
        workspace.write_bytes(workspace.folder / "manifest.json", json.dumps(told, indent=2).encode())
        (workspace.folder / _REFUSED).unlink(missing_ok=True)
        try:
            yield
        except DatasetError:
            (workspace.folder / _REFUSED).touch()
            raise


def _open_lock(workspace: Workspace) -> IO[bytes]:
    place = workspace.folder / "lock"
    try:
        # Do not follow a link that somebody else put there: this would open the file it points to.
        return open(os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b")
    except OSError as error:
        raise ResumeError(
            f"cannot lock the unfinished copy by {str(place)!r}: {error.strerror}. Look who has put it there; remove "
            f"the copy: rm -r {workspace.folder}"
        ) from error


def is_finished(workspace: Workspace) -> bool:
    """Return whether `out` is the finished copy of these arguments."""
    try:
        origin = json.loads((workspace.out / ORIGIN).read_bytes())
        return bool(origin.get("fingerprint") == workspace.fingerprint)
    except (OSError, ValueError, AttributeError):
        return False


def publish(workspace: Workspace) -> None:
    """Rename the finished dataset to `out`, and remove the rest."""
    try:
        # A rename can replace only an empty folder: what somebody has put there meanwhile is not lost.
        os.rename(workspace.dataset, workspace.out)
    except OSError as error:
        raise ConfigError(
            f"cannot rename the finished copy {str(workspace.dataset)!r} to {str(workspace.out)!r}: {error}. Make "
            f"room, and run the same command again: nothing is written twice."
        ) from error
    shutil.rmtree(workspace.folder, ignore_errors=True)


def _fingerprint(storage: Storage, choices: dict[str, Any], size_of: Mapping[str, int]) -> str:
    """Return a hash of the arguments and of the source: names and sizes of its files, and its info.json."""
    digest = hashlib.sha256(json.dumps([LAYOUT, storage.uri, choices]).encode())
    digest.update(storage.read_bytes("meta/info.json"))
    for name, size in sorted(size_of.items()):
        # The name of a file may have bytes that are not UTF-8.
        digest.update(f"{name}\0{size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def list_sizes(storage: Storage) -> dict[str, int]:
    """Return the size of every file of a dataset by name, from one listing, without hidden files."""
    names = [name for name in storage.list_files() if not any(part.startswith(".") for part in name.split("/"))]
    return {name: storage.size_bytes(name) for name in names}


def _check_apart(storage: Storage, out: Path) -> None:
    if not storage.is_local:
        return
    root = Path(storage.path).resolve()
    target = out.resolve()
    if target == root or root in target.parents or target in root.parents:
        where = "is the dataset itself" if target == root else "and the dataset are inside one another"
        raise ConfigError(
            f"OUT {str(out)!r} {where} ({str(root)!r}); reshard never changes a dataset in place. Choose a folder "
            f"beside it, as {str(root.with_name(root.name + '-resharded'))!r}."
        )


def _check_no_other(workspace: Workspace) -> None:
    out = workspace.out
    others = sorted(
        path
        for path in (out.parent.iterdir() if out.parent.is_dir() else ())
        if path.name.startswith(f"{out.name}.partial-") and path != workspace.folder
    )
    for path in others:
        if (path / _REFUSED).exists():
            shutil.rmtree(path, ignore_errors=True)
    others = [path for path in others if path.exists()]
    if not others:
        return
    manifest = others[0] / "manifest.json"
    try:
        before = json.loads(manifest.read_bytes())
        wanted = workspace.choices
        changed = {key: (value, wanted.get(key)) for key, value in before["spec"].items() if wanted.get(key) != value}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResumeError(
            f"an unfinished copy stands in {str(others[0])!r} and cannot be told apart ({error}). Remove it: "
            f"rm -r {others[0]}"
        ) from error
    told = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items())
    told = told or f"its source {before.get('root')!r} is another one or has changed since"
    raise ResumeError(
        f"an unfinished copy of other arguments stands in {str(others[0])!r}: {told}. Run with the arguments it was "
        f"started with to finish it, or remove it: rm -r {others[0]}"
    )


def check_finished(workspace: Workspace, path: str) -> dict[str, Any]:
    """Return the record of a file that a task says it has written.

    Raises:
        DatasetError: it is missing, for example because the task ran on a machine that does not share the folder.
    """
    record = workspace.find_record(path)
    if record is None:
        raise DatasetError(
            f"a task wrote {path!r}, and it is not in {str(workspace.dataset)!r} here. On a cluster of several "
            f"machines OUT must be on storage that all of them share; else run reshard on one machine."
        )
    return record
