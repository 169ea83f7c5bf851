"""Whether a file can be written, and where: known before minutes are spent on what goes into it."""

import os
from pathlib import Path

from raypipe.errors import ConfigError, DatasetError


def inside(folder: str | os.PathLike[str], name: str | os.PathLike[str]) -> Path:
    """Return the path of the file `name` in `folder`; every writer of files that data names asks for it.

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
    """Raise a `ConfigError` where the file `path` cannot be written."""
    if path.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {str(path)!r}: no permission; choose another place")
