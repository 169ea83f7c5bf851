"""`KeepSpec`: where a node keeps decoded frames between epochs, and how many bytes of them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from raypipe.errors import ConfigError
from raypipe.text import make_spec, parse_bytes

ON_DISK: Final = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpec:
    """Where every node keeps decoded frames, and how many bytes of them. It does not keep images stored in rows."""

    folder: str = "~/.cache/raypipe/kept"
    """A folder on a local disk of the node. All processes and jobs of a user may share it."""

    max_bytes: int | Literal["disk"] = ON_DISK
    """Limit of all kept frames in the folder: a number, or text such as ``"200GB"`` or ``"100GiB"``. Kept frames never
    take more than half of the space that the disk would have free without them; ``"disk"`` is that half."""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str) or not self.folder or "://" in self.folder:
            raise ConfigError(f"folder of keep_frames is {self.folder!r}; give a folder on a local disk")
        if not self.folder.startswith("~"):
            # Each process of a cluster has its own working folder.
            object.__setattr__(self, "folder", os.path.abspath(self.folder))
        if self.max_bytes != ON_DISK:
            object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes, "max_bytes of keep_frames"))


def make_keep(value: Any) -> KeepSpec | None:
    """Return the spec of `value`: True (the defaults), False (None), a spec, or a dict of its fields."""
    if isinstance(value, bool):
        return KeepSpec() if value else None
    if not isinstance(value, KeepSpec | Mapping):
        raise ConfigError(f"keep_frames must be True, False or a dict of folder and max_bytes, got {value!r}")
    return make_spec(KeepSpec, value, "keep_frames")
