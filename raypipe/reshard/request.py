"""Checks on the driver, before anything is written, whether the request can be met."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raypipe.dataset import find_missing_cameras, why_missing
from raypipe.errors import ConfigError, DatasetError, suggest
from raypipe.format import DatasetMeta
from raypipe.reshard.info import Encoding, plan_encodings
from raypipe.reshard.mp4 import read_track
from raypipe.reshard.plan import Numbering
from raypipe.reshard.spec import ReshardSpec, check_size
from raypipe.text import counted, either, span_text


def local_folder(out: str | os.PathLike[str]) -> Path:
    """Return the folder of the copy, as an absolute path.

    Raises:
        ConfigError: `out` is a URI, where a folder cannot be renamed in one step.
    """
    text = os.fspath(out)
    if not text or "://" in text:
        raise ConfigError(
            f"OUT is {text!r}; reshard writes to a local folder, which appears at once when it is complete. Write it "
            f"to disk, then copy it to the store."
        )
    return Path(os.path.abspath(os.path.expanduser(text)))


def check_choices(meta: DatasetMeta, spec: ReshardSpec) -> None:
    """Raise if the spec names episodes or cameras that do not exist, or leaves nothing."""
    known = set(meta.episodes.episode_index.tolist())
    unknown = sorted(set(spec.exclude) - known)
    if unknown:
        span = span_text(min(known), max(known)) if known else "none"
        raise ConfigError(
            f"exclude names the episodes {unknown[:10]}, and {meta.root!r} has {counted(len(known), 'episode')}, "
            f"numbered {span}"
        )
    if known and known <= set(spec.exclude):
        raise ConfigError(
            f"exclude names {either(len(known), 'the only episode', f'all {len(known):,} episodes')} of "
            f"{meta.root!r}; nothing would be left"
        )
    if not known:
        raise ConfigError(f"{meta.root!r} has no episodes; there is nothing to write")
    for camera in spec.drop_cameras:
        if camera not in meta.cameras:
            raise ConfigError(f"{meta.root!r} has no camera {camera!r} to drop{suggest(camera, meta.cameras)}")


def video_cameras(meta: DatasetMeta, spec: ReshardSpec) -> tuple[str, ...]:
    """Return the cameras whose videos are copied.

    Raises:
        DatasetError: a declared camera has no files, so LeRobot could not open the copy.
    """
    missing = [camera for camera in find_missing_cameras(meta) if camera not in spec.drop_cameras]
    if missing:
        options = " ".join(f"--drop-camera {camera}" for camera in missing)
        raise DatasetError(
            f"{meta.root!r} declares {', '.join(missing)}, and {why_missing(meta, missing[0])}. Fetch the files, or "
            f"leave {'them' if len(missing) > 1 else 'it'} out: {options}"
        )
    return tuple(name for name in meta.cameras if meta.features[name].kind == "video" and name not in spec.drop_cameras)


def choose_encodings(
    meta: DatasetMeta, spec: ReshardSpec, numbering: Numbering, cameras: Sequence[str]
) -> dict[str, Encoding]:
    """Return how each re-encoded camera is encoded; empty if packets are copied. Opens a video of each camera."""
    if not spec.is_reencoded:
        return {}
    from raypipe.reshard.encode import check_encoder

    colour = [camera for camera in cameras if not meta.features[camera].is_depth]
    sources = {camera: _read_source(meta, int(numbering.rows[0]), camera) for camera in colour}
    encodings = plan_encodings(spec, sources)
    for camera, encoding in encodings.items():
        check_size((encoding.height, encoding.width), encoding.codec, f"the size of camera {camera!r}")
        check_encoder(encoding, camera)
    return encodings


def _read_source(meta: DatasetMeta, row: int, camera: str) -> tuple[str, int, int]:
    """Return codec, height and width of a camera, from the file of one episode."""
    from raypipe.decode import open_video

    name = meta.video_file(row, camera)
    try:
        codec = read_track(meta.storage, name).description.codec
    except NotImplementedError:
        codec = meta.features[camera].codec
    frame = open_video(meta.storage, name).read_frames(np.zeros(1, dtype=np.int64))
    return codec, int(frame.shape[1]), int(frame.shape[2])
