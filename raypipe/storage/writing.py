"""Checks that a file can be written, before minutes are spent on its content; writes files whole or not at all."""

import io
import os
import uuid
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError, DatasetError


def inside(folder: str | os.PathLike[str], name: str | os.PathLike[str]) -> Path:
    """Return the path of the file `name` in `folder`; use it for every file whose name comes from data.

    Raises:
        DatasetError: the path leads out of the folder, by ``..``, as an absolute path or through a link.
    """
    top, target = Path(folder), Path(folder) / name
    parts = target.relative_to(top).parts if target.is_relative_to(top) else ()
    is_path = parts and ".." not in parts and "\0" not in str(target)
    if not is_path or not Path(os.path.realpath(target.parent)).is_relative_to(os.path.realpath(top)):
        raise DatasetError(
            f"{os.fspath(name)!r} lies outside the folder {str(top)!r}, and nothing is written there. A name in the "
            f"dataset leads out of it; correct the name."
        )
    return target


def check_writable(path: Path) -> None:
    """Raise a `ConfigError` if the file `path` cannot be written."""
    if path.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {str(path)!r}: no permission; choose another place")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file next to its place and rename it, so that a full disk leaves the old file.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    data = content.encode() if isinstance(content, str) else content
    # Write the target of a link, never the link itself.
    target = Path(os.path.realpath(path))
    is_renamed = (target.is_file() or not target.exists()) and os.access(target.parent, os.W_OK)
    half = target.with_name(f".{uuid.uuid4().hex}.part") if is_renamed else target
    try:
        half.write_bytes(data)
        if is_renamed:
            os.replace(half, target)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from error
    finally:
        if is_renamed:
            half.unlink(missing_ok=True)


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Write a matplotlib figure in the format of the file's suffix; see `write_whole`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=dpi)
    write_whole(path, buffer.getvalue())
