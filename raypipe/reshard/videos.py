"""The videos of the copy: re-encodes episodes if asked, finds the packets to copy, joins them, and checks each file.

A re-encoded episode becomes a small video of its own, which is then joined like any other. So it starts at a keyframe,
and a killed run keeps the episodes that it had finished. One thread encodes it: the same frames give the same bytes.

Without re-encoding, packets are cut out as pieces without decoding. A piece starts at a keyframe that no later frame
refers back across, and ends where it has neither too few packets nor too many. If an episode does not start at such a
keyframe, the frames before it stay, and no episode shows them::

    frames   | 0 1 2 3 | 4 5 6 7 | 8 9 . . |        keyframes at 0, 4, 8; episodes 0-4, 5-6 (excluded), 7-9
    pieces   |=======================|              one piece: 5 and 6 stay as lead-in of 7, and are counted

A file without a plain index is kept whole. The times of an episode in ``meta/`` come from the written file, not from a
sum of durations.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ConfigError, DatasetError
from raypipe.format import (
    FILES_PER_CHUNK,
    DatasetMeta,
    VideoIndex,
    episode_first_frame,
    first_frames,
    read_video_format,
)
from raypipe.reshard.mp4 import Track, TrackClip, read_track, write_mp4
from raypipe.reshard.plan import (
    RECORDER_GOP,
    SOURCE,
    CopyJob,
    Encoding,
    Numbering,
    Piece,
    ReshardSpec,
    VideoCopy,
    check_size,
)
from raypipe.reshard.workspace import check_finished
from raypipe.storage import Storage, inside, open_storage
from raypipe.text import counted

if TYPE_CHECKING:
    from raypipe.decode import FrameSink, OpenVideo, VideoCoding

_FRAMES_AT_ONCE: Final = 32
_LEAST_HEVC_WIDTH: Final = 64
_PRESETS: Final = {"h264": "veryfast", "hevc": "veryfast", "av1": "8"}


def choose_encodings(
    meta: DatasetMeta, spec: ReshardSpec, numbering: Numbering, cameras: Sequence[str]
) -> dict[str, Encoding]:
    """Return how each re-encoded camera is encoded; empty if packets are copied. Opens a video of each camera."""
    encodings: dict[str, Encoding] = {}
    for camera in cameras if spec.is_reencoded else ():
        if not meta.features[camera].is_depth:
            codec, *size = _read_source(meta, int(numbering.rows[0]), camera)
            height, width = size if isinstance(spec.size, str) else spec.size
            encodings[camera] = Encoding(
                codec=codec if spec.codec == SOURCE else spec.codec,
                height=height,
                width=width,
                gop=RECORDER_GOP if isinstance(spec.gop, str) else spec.gop,
                crf=spec.crf,
            )
    for camera, encoding in encodings.items():
        check_size((encoding.height, encoding.width), encoding.codec, f"the size of camera {camera!r}")
        _check_encoder(encoding, camera, meta.fps)
    return encodings


def _read_source(meta: DatasetMeta, row: int, camera: str) -> tuple[str, int, int]:
    """Return codec, height and width of a camera, from the file of one episode."""
    from raypipe.decode import OpenVideo

    name = meta.video_file(row, camera)
    frame = OpenVideo(meta.storage, name).read_frames(np.zeros(1, dtype=np.int64))
    return read_video_format(meta.storage, name).codec, int(frame.shape[1]), int(frame.shape[2])


def _check_encoder(encoding: Encoding, camera: str, fps: float) -> None:
    """Raise a `ConfigError` if FFmpeg here cannot write such a video; encodes one frame."""
    from raypipe.testing import encoders, why_unwritable

    known = encoders()
    if encoding.codec not in known:
        raise ConfigError(
            f"camera {camera!r} would be re-encoded to {encoding.codec!r}, and FFmpeg here can write "
            f"{', '.join(known) or 'none'}. Choose one of these with --codec, or get a full FFmpeg."
        )
    if encoding.codec == "hevc" and encoding.width < _LEAST_HEVC_WIDTH:
        raise ConfigError(
            f"camera {camera!r} would be re-encoded to hevc with a width of {encoding.width}, and the encoder x265 "
            f"damages its process's memory below {_LEAST_HEVC_WIDTH}. Choose another codec with --codec, such as h264."
        )
    if why := why_unwritable(_coding(encoding, fps)):
        raise ConfigError(
            f"camera {camera!r} cannot be re-encoded to {encoding.codec!r} of {encoding.width}x{encoding.height} with "
            f"gop {encoding.gop} and crf {encoding.crf}: {why}. Choose other values."
        )


def _clip_name(camera: str, row: int) -> str:
    """Return the name of a re-encoded episode in the clips folder."""
    return f"{camera}/{row:08d}.mp4"


def encode_episodes(job: CopyJob, chosen: tuple[str, Sequence[int]]) -> None:
    """Write the clips of some episodes of a camera, given by their rows, except those that already exist."""
    from raypipe.decode import VideoPool, open_writer

    meta, workspace = job.meta, job.workspace
    camera, rows = chosen
    coding = _coding(job.encodings[camera], meta.fps)
    videos = VideoPool(1)
    for row in rows:
        target = inside(workspace.clips, _clip_name(camera, row))
        if target.exists():
            continue
        with (
            workspace.writing(target) as part,
            videos.lend(meta.storage, meta.video_file(row, camera)) as video,
            open_writer(part, coding) as stream,
        ):
            first = episode_first_frame(meta, row, camera, video.index)
            _encode(video, first, first + int(meta.episodes.length[row]), coding, stream)


def _encode(video: "OpenVideo", first: int, stop: int, coding: "VideoCoding", stream: "FrameSink") -> None:
    from raypipe.decode import resize_frames

    for start in range(first, stop, _FRAMES_AT_ONCE):
        frames = video.read_frames(np.arange(start, min(start + _FRAMES_AT_ONCE, stop)))
        frames = resize_frames(frames, (coding.height, coding.width))
        stream.add_frames(frames.permute(0, 3, 1, 2).contiguous())


def _coding(encoding: Encoding, fps: float) -> "VideoCoding":
    from raypipe.decode import VideoCoding
    from raypipe.testing import codec_options, encoders

    return VideoCoding(
        height=encoding.height,
        width=encoding.width,
        fps=fps,
        encoder=encoders()[encoding.codec],
        crf=encoding.crf,
        preset=_PRESETS.get(encoding.codec),
        options=codec_options(encoding.codec, encoding.gop),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A video to copy packets of, and the episodes in it."""

    storage: Storage
    name: str
    camera: str
    rows: tuple[int, ...]
    """All rows of the episode table that name this file, those of excluded episodes too."""


def list_source_files(job: CopyJob, camera: str) -> list[SourceFile]:
    """Return the videos of a camera that hold kept episodes, each with all its episodes."""
    meta = job.meta
    if camera in job.encodings:
        clips = open_storage(job.workspace.clips)
        return [
            SourceFile(storage=clips, name=_clip_name(camera, row), camera=camera, rows=(row,))
            for row in job.numbering.rows.tolist()
        ]
    is_kept = job.numbering.is_kept
    return [
        SourceFile(storage=meta.storage, name=name, camera=camera, rows=tuple(rows))
        for name, rows in meta.rows_by_file(camera).items()
        if is_kept[rows].any()
    ]


def scan_files(job: CopyJob, files: Sequence[SourceFile]) -> list[Piece]:
    """Return the pieces of files that each hold a kept episode, in file order; reads only the indexes.

    Raises:
        DecodeError: a file lacks frames that a kept episode needs; names the episode.
    """
    return [piece for file in files for piece in _scan_file(job, file)]


def _scan_file(job: CopyJob, file: SourceFile) -> list[Piece]:
    try:
        track = read_track(file.storage, file.name)
    except NotImplementedError:
        return [_whole_file(job, file)]
    order = np.argsort(track.pts, kind="stable")
    index = VideoIndex(track.pts[order] / track.description.timescale, track.is_keyframe[order])
    return _cut(file, track, order, _segments(job, file, _first_frames(job, file, index), len(track)))


def _first_frames(job: CopyJob, file: SourceFile, index: VideoIndex) -> NDArray[np.int64]:
    meta, rows = job.meta, np.array(file.rows)
    length = meta.episodes.length[rows]
    if file.camera in job.encodings:
        assert len(index) == length.sum(), f"{file.name} has {len(index)} frames, not {length}"
        return np.zeros(1, dtype=np.int64)
    is_kept = job.numbering.is_kept[rows]
    if not len(index):
        episode_first_frame(meta, int(rows[is_kept][0]), file.camera, index)
    found = first_frames(meta.episodes.videos[file.camera].from_timestamp[rows], length, index.pts_s)
    is_wrong = (~np.bool_(found.is_counted) & (found.drift_s > 0.5 / meta.fps)) | (found.frame + length > len(index))
    for row in rows[is_wrong & is_kept]:
        # Fails for the same reason on one episode, with an error that names it.
        episode_first_frame(meta, int(row), file.camera, index)
    return found.frame


@dataclass(frozen=True, slots=True)
class _Segment:
    """The frames ``[start, stop)`` from an episode's first to the next episode's first, with unused ones between."""

    row: int
    first: int
    start: int
    stop: int
    is_kept: bool


def _segments(job: CopyJob, file: SourceFile, firsts: NDArray[np.int64], num_frames: int) -> list[_Segment]:
    order = np.argsort(firsts, kind="stable")
    segments, is_kept = [], job.numbering.is_kept
    for position, place in enumerate(order.tolist()):
        row, first = file.rows[place], int(firsts[place])
        last = position + 1 == len(order)
        following = num_frames if last else int(firsts[order[position + 1]])
        stop = max(following, min(first + int(job.meta.episodes.length[row]), num_frames))
        segments.append(_Segment(row, first, first if position else 0, stop, bool(is_kept[row])))
    return segments


def _cut(file: SourceFile, track: Track, order: NDArray[np.int64], segments: list[_Segment]) -> list[Piece]:
    """Return the pieces of the kept segments; segments that share packets become one piece."""
    starts, stops = np.flatnonzero(clean_cuts(track, order)), np.flatnonzero(clean_ends(order))
    groups: list[tuple[int, int, list[_Segment]]] = []
    for segment in (segment for segment in segments if segment.is_kept):
        start = int(starts[np.searchsorted(starts, segment.start, side="right") - 1])
        stop = int(stops[np.searchsorted(stops, segment.stop)])
        if groups and start < groups[-1][1]:
            first, last, members = groups.pop()
            groups.append((first, max(last, stop), [*members, segment]))
        else:
            groups.append((start, stop, [segment]))
    excluded = [segment for segment in segments if not segment.is_kept]
    return [_piece(file, track, group, excluded) for group in groups]


def clean_cuts(track: Track, order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return before which frames a video can be cut; one entry more than frames, for the end.

    A cut before frame s needs three things: s is a keyframe, it is packet s, and the packets before it hold exactly the
    frames before it.
    """
    number = np.arange(len(order))
    is_clean = clean_ends(order)[:-1] & (order == number) & track.is_keyframe
    result = np.append(is_clean, True)
    # The first piece includes anything before the first keyframe.
    result[0] = True
    return result


def clean_ends(order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return before which frames a piece may end: there the packets so far hold exactly the frames so far."""
    highest_before = np.concatenate([[-1], np.maximum.accumulate(order)])
    return np.asarray(highest_before == np.arange(len(order) + 1) - 1)


def _piece(file: SourceFile, track: Track, group: tuple[int, int, list[_Segment]], excluded: list[_Segment]) -> Piece:
    start, stop, members = group
    size_bytes = file.storage.size_bytes(file.name)
    if int((track.offset + track.size)[start:stop].max(initial=0)) > size_bytes:
        raise DatasetError(
            f"damaged video {file.storage.locate(file.name)!r}: its index points behind the end of its {size_bytes} "
            f"bytes. Fetch the file again."
        )
    lead_in = sum(max(0, min(stop, other.stop) - max(start, other.start)) for other in excluded)
    return Piece(
        storage=file.storage,
        name=file.name,
        rows=tuple(segment.row for segment in members),
        first_frame=tuple(segment.first - start for segment in members),
        start=start,
        stop=stop,
        size_bytes=int(track.size[start:stop].sum()),
        description=track.description,
        num_lead_in=lead_in,
        has_other_tracks=track.has_other_tracks,
    )


def _whole_file(job: CopyJob, file: SourceFile) -> Piece:
    from raypipe.decode import OpenVideo

    index = OpenVideo(file.storage, file.name).index
    firsts, is_kept = _first_frames(job, file, index), job.numbering.is_kept
    rows = [(row, int(first)) for row, first in zip(file.rows, firsts, strict=True) if is_kept[row]]
    excluded = sum(int(job.meta.episodes.length[row]) for row in file.rows if not is_kept[row])
    return Piece(
        storage=file.storage,
        name=file.name,
        rows=tuple(row for row, _ in rows),
        first_frame=tuple(first for _, first in rows),
        start=0,
        stop=len(index),
        size_bytes=file.storage.size_bytes(file.name),
        description=None,
        num_lead_in=excluded,
        has_other_tracks=False,
    )


def write_video_file(job: CopyJob, unit: VideoCopy) -> None:
    """Write one video file, and its record with the time at which each episode starts and stops in it."""
    workspace = job.workspace
    size_bytes = workspace.write_file(
        workspace.dataset / unit.path, lambda stream: _write_pieces(stream, unit.pieces, job.meta.fps)
    )
    bounds = _read_bounds(job, unit)
    record: dict[str, Any] = {"size_bytes": size_bytes, "rows": [], "from": [], "to": []}
    before = 0
    for piece in unit.pieces:
        for row, first in zip(piece.rows, piece.first_frame, strict=True):
            record["rows"].append(row)
            record["from"].append(float(bounds[before + first]))
            record["to"].append(float(bounds[before + first + int(job.meta.episodes.length[row])]))
        before += piece.stop - piece.start
    workspace.write_record(unit.path, record)


def _write_pieces(stream: IO[bytes], pieces: Sequence[Piece], fps: float) -> None:
    first = pieces[0]
    if first.description is None:
        assert len(pieces) == 1, "a file that is copied as it is shares with nobody"
        with first.storage.open_file(first.name) as source:
            shutil.copyfileobj(source, stream, 8 << 20)
        return
    # Many pieces can come from one file.
    tracks: dict[str, Track] = {}
    clips = []
    for piece in pieces:
        if piece.name not in tracks:
            tracks[piece.name] = read_track(piece.storage, piece.name)
        track = tracks[piece.name]
        if track.description != piece.description or len(track) < piece.stop:
            raise DatasetError(
                f"{piece.storage.locate(piece.name)!r} has changed while it was copied. Run the same command again."
            )
        clips.append(TrackClip(storage=piece.storage, name=piece.name, track=track, start=piece.start, stop=piece.stop))
    write_mp4(stream, clips, round(first.description.timescale / fps))


def _read_bounds(job: CopyJob, unit: VideoCopy) -> NDArray[np.float64]:
    """Return when the written file shows each frame, and last when its last frame ends."""
    storage = open_storage(job.workspace.dataset)
    expected = sum(piece.stop - piece.start for piece in unit.pieces)
    if unit.pieces[0].description is None:
        from raypipe.decode import OpenVideo

        pts_s = OpenVideo(storage, unit.path).index.pts_s
        end_s = float(pts_s[-1]) + 1 / job.meta.fps
    else:
        track = read_track(storage, unit.path)
        pts_s = np.sort(track.pts) / track.description.timescale
        end_s = int(track.duration.sum()) / track.description.timescale
    if len(pts_s) != expected or np.any(np.diff(pts_s) <= 0):
        raise DatasetError(
            f"{unit.path!r} was written with {counted(len(pts_s), 'frame')}, expected {expected} with ascending "
            f"times; the times of {unit.pieces[0].name!r} or of a file after it are out of order. Re-encode the "
            f"camera, as with --gop 2."
        )
    return np.append(pts_s, end_s)


def video_columns(job: CopyJob, units: Sequence[VideoCopy]) -> dict[str, NDArray[Any]]:
    """Return the columns of the episode table that say where episodes are in the written files."""
    columns: dict[str, NDArray[Any]] = {}
    for unit in units:
        record = check_finished(job.workspace, unit.path)
        numbers = job.numbering.new_number[np.array(record["rows"])]
        chunk, file = divmod(unit.number, FILES_PER_CHUNK)
        times = {"from_timestamp": record["from"], "to_timestamp": record["to"]}
        for name, value in {"chunk_index": chunk, "file_index": file, **times}.items():
            kind = np.float64 if name in times else np.int64
            column = columns.setdefault(f"videos/{unit.camera}/{name}", np.full(len(job.numbering), -1, dtype=kind))
            column[numbers] = value
    for name, column in columns.items():
        assert (column >= 0).all(), f"{name} of an episode was never written"
    return columns


_OF_SOUND: Final = "audio."
_OF_FIRST_ENCODER: Final = ("video.preset", "video.fast_decode", "video.video_backend", "video.extra_options")


def declare_camera(
    feature: dict[str, Any], shape: tuple[int, ...], encoding: Encoding | None, fps: float
) -> dict[str, Any]:
    """Return the declaration of a camera for ``info.json``; sound is not copied, so it is not declared."""
    older = feature.pop("video_info", None) or {}
    record = {**older, **(feature.get("info") or {})}
    if record.get("has_audio"):
        record = {key: value for key, value in record.items() if not key.startswith(_OF_SOUND)} | {"has_audio": False}
    if encoding is not None:
        feature["shape"] = _resized(feature, shape, encoding)
        record |= {
            "video.height": encoding.height,
            "video.width": encoding.width,
            "video.codec": encoding.codec,
            "video.pix_fmt": "yuv420p",
            "video.fps": int(fps) if fps == int(fps) else fps,
            "video.channels": 3,
            "has_audio": False,
            "video.g": encoding.gop,
            "video.crf": encoding.crf,
        }
        # The options of the first encoder do not describe these packets.
        record = {key: value for key, value in record.items() if key not in _OF_FIRST_ENCODER}
    return {**feature, "info": record} if record else feature


def _resized(feature: Mapping[str, Any], shape: tuple[int, ...], encoding: Encoding) -> list[int]:
    """Return the shape with the new height and width, in the source's order of axes."""
    sizes = {"c": shape[0], "h": encoding.height, "w": encoding.width}
    names = feature.get("names")
    axes = [str(name)[:1] for name in names] if isinstance(names, list) else []
    if sorted(axes) == ["c", "h", "w"]:
        return [sizes[axis] for axis in axes]
    declared = list(feature.get("shape") or ())
    is_channels_first = declared[:1] == [shape[0]] and declared[-1:] != [shape[0]]
    return [sizes[axis] for axis in ("chw" if is_channels_first else "hwc")]
