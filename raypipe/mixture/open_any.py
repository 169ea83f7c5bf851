"""`open_dataset` as users call it: opens a dataset, or the mixture that a file lists."""

from collections.abc import Sequence
from typing import Literal

from raypipe.dataset import TOLERANCE_S, Dataset, Timestamps
from raypipe.dataset import open_dataset as open_single
from raypipe.decode import CameraDtype
from raypipe.errors import ConfigError
from raypipe.mixture.file import is_mixture_file
from raypipe.mixture.mixture import Mixture
from raypipe.storage import open_root


def open_dataset(
    root: str,
    *,
    cameras: Sequence[str] | Literal["all"] = "all",
    camera_dtype: CameraDtype = "uint8",
    timestamps: Timestamps = "position",
    tolerance_s: float = TOLERANCE_S,
    revision: str = "",
) -> Dataset | Mixture:
    """Open the LeRobot dataset at `root`, or the mixture of a YAML or TOML file.

    A root is a path, an fsspec URI, or ``owner/name`` of the Hugging Face Hub. Reads ``meta/`` only. Returns a
    `Dataset` or a `Mixture`; both go into a `Pipeline`.

    Args:
        cameras: the cameras that samples hold. ``"all"`` leaves out, with a warning, cameras without any file and those
            that cannot be decoded; a camera that you name must be there.
        camera_dtype: see `SampleSpec.camera_dtype`.
        timestamps: see `SampleSpec.timestamps`.
        tolerance_s: see `SampleSpec.tolerance_s`.
        revision: a tag, branch or commit of a dataset on the Hub; by default the newest tag of a format that raypipe
            reads, else ``main``. This function resolves it to a commit, and all nodes read that commit.
    """
    if not is_mixture_file(str(root)):
        if "://" in str(root) and str(root).endswith((".yaml", ".yml", ".toml")):
            raise ConfigError(f"{str(root)!r} is no dataset; a mixture file must be a local one: fetch it first")
        if revision:
            root = open_root(root, revision).uri
        return open_single(
            root, cameras=cameras, camera_dtype=camera_dtype, timestamps=timestamps, tolerance_s=tolerance_s
        )
    given = {"cameras": cameras, "camera_dtype": camera_dtype, "timestamps": timestamps, "tolerance_s": tolerance_s}
    given["revision"] = revision
    plain = {"cameras": "all", "camera_dtype": "uint8", "timestamps": "position", "tolerance_s": TOLERANCE_S}
    plain["revision"] = ""
    for name, value in given.items():
        if value != plain[name]:
            raise ConfigError(
                f"{name}={value!r} is of one dataset, and {str(root)!r} is a mixture: say it in the file, for its "
                f"members, or in the Pipeline (decode={{'camera_dtype': ...}})"
            )
    return Mixture(root)
