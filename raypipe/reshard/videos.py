"""Writes one video file of the copy: joins its pieces, then reads the file back and checks it.

The times of an episode in ``meta/`` come from the written file, not from a sum of durations.
"""

import shutil
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError
from raypipe.format import DatasetMeta, read_video_index
from raypipe.reshard.mp4 import Track, read_track
from raypipe.reshard.mux import TrackClip, write_mp4
from raypipe.reshard.plan import VideoCopy
from raypipe.reshard.workspace import Workspace
from raypipe.storage import open_storage
from raypipe.text import counted


def write_video_file(meta: DatasetMeta, workspace: Workspace, unit: VideoCopy) -> None:
    """Write one video file, and its record with the time at which each episode starts and stops in it."""
    tracks: dict[str, Track] = {}
    size_bytes = workspace.write_file(
        workspace.dataset / unit.path, lambda stream: _write_pieces(stream, meta, unit, tracks)
    )
    pts_s, end_s = _read_times(meta, workspace, unit)
    rows, start_s, stop_s = _episode_times(meta, unit, pts_s, end_s)
    record: dict[str, Any] = {"size_bytes": size_bytes, "rows": rows, "from": start_s, "to": stop_s}
    workspace.write_record(unit.path, record)


def _write_pieces(stream: IO[bytes], meta: DatasetMeta, unit: VideoCopy, tracks: dict[str, Track]) -> None:
    first = unit.pieces[0]
    if first.description is None:
        assert len(unit.pieces) == 1, "a file that is copied as it is shares with nobody"
        with first.storage.open_file(first.name) as source:
            shutil.copyfileobj(source, stream, 8 << 20)
        return
    clips = []
    for piece in unit.pieces:
        # Many pieces can come from one file.
        if piece.name not in tracks:
            tracks[piece.name] = read_track(piece.storage, piece.name)
        track = tracks[piece.name]
        if track.description != piece.description or len(track) < piece.stop:
            raise DatasetError(
                f"{piece.storage.locate(piece.name)!r} has changed while it was copied. Run the same command again."
            )
        clips.append(TrackClip(storage=piece.storage, name=piece.name, track=track, start=piece.start, stop=piece.stop))
    write_mp4(stream, clips, round(first.description.timescale / meta.fps))


def _read_times(meta: DatasetMeta, workspace: Workspace, unit: VideoCopy) -> tuple[NDArray[np.float64], float]:
    """Return when the written file shows each frame, and when its last frame ends."""
    storage = open_storage(workspace.dataset)
    expected = sum(piece.num_frames for piece in unit.pieces)
    if unit.pieces[0].description is None:
        from raypipe.decode import open_video

        pts_s = open_video(storage, unit.path).index.pts_s
        end_s = float(pts_s[-1]) + 1 / meta.fps
    else:
        pts_s = read_video_index(storage, unit.path).pts_s
        track = read_track(storage, unit.path)
        end_s = int(track.duration.sum()) / track.description.timescale
    if len(pts_s) != expected or np.any(np.diff(pts_s) <= 0):
        raise DatasetError(
            f"{unit.path!r} was written with {counted(len(pts_s), 'frame')}, expected {expected} with ascending "
            f"times; the times of {unit.pieces[0].name!r} or of a file after it are out of order. Re-encode the "
            f"camera, as with --gop 2."
        )
    return pts_s, end_s


def _episode_times(
    meta: DatasetMeta, unit: VideoCopy, pts_s: NDArray[np.float64], end_s: float
) -> tuple[list[int], list[float], list[float]]:
    bounds = np.append(pts_s, end_s)
    rows, start_s, stop_s = [], [], []
    before = 0
    for piece in unit.pieces:
        for row, first in zip(piece.rows, piece.first_frame, strict=True):
            rows.append(row)
            start_s.append(float(bounds[before + first]))
            stop_s.append(float(bounds[before + first + int(meta.episodes.length[row])]))
        before += piece.num_frames
    return rows, start_s, stop_s
