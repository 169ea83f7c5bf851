"""Whether a file can be written, known before minutes are spent on what goes into it."""

import os
from pathlib import Path

from raypipe.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raise a `ConfigError` where the file `path` cannot be written."""
    if path.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {str(path)!r}: no permission; choose another place")
