"""Decodes every pixel of a file, in file order, and keeps none.

On damaged data a decoder may raise, may crash, or may paint over the damage and report it only in FFmpeg's log. So this
module reads the log too. If the process dies, the process that started it knows what the decoder was doing.

A clean result proves that decoders do not complain, not that every pixel is right. With 16 wrong bytes in a frame,
H.264's decoder complains in most cases, those of AV1, HEVC and VP9 in few: these formats carry nothing to check with.
"""

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import DatasetError, as_damage
from raypipe.format import DepthCodes, Feature, episode_first_frame, one_line, open_parquet
from raypipe.storage import Storage
from raypipe.text import counted, echo, frames_text
from raypipe.validate.findings import Finding
from raypipe.validate.outline import DataUnit, Outline, Unit, VideoUnit
from raypipe.validate.video import Container, VideoSpans

if TYPE_CHECKING:
    from raypipe.decode import OpenVideo

_PIECE_BYTES: Final = 16 << 20
"""As in `raypipe.decode.frames`: larger pieces cost page faults."""

_LOOK_AHEAD: Final = 4
"""How many frames a decoder may read ahead of its output if frames are stored in another order than shown."""

_BLACK: Final = 16
"""The largest value of black in 0..255: 16 from decoders that take the narrow range of video for the full one."""

_LOG_LEVEL: Final = "TORCHCODEC_FFMPEG_LOG_LEVEL"
_LOG_LINE: Final = re.compile(r"^\[\S+ @ 0x[0-9a-f]+\] (.*)$")
"""How FFmpeg starts a line: ``[h264 @ 0x55d0c8] concealing 48 DC, 48 AC, 48 MV errors in I frame``."""
_COMPLAINT: Final = re.compile(
    r"conceal|error|invalid|corrupt|illegal|damaged|overread|out of range|non-existing|no frame|failed|missing picture",
    re.IGNORECASE,
)
"""What decoders log about damaged data. They also log their version and advice."""


def decode_video(
    outline: Outline, unit: VideoUnit, container: Container, spans: VideoSpans
) -> tuple[list[Finding], int]:
    """Return the findings on a video that does not decode without errors, and how many frames were decoded."""
    from raypipe.decode import why_undecodable

    meta = outline.meta
    feature = meta.features[unit.camera]
    if why := why_undecodable(feature):
        return [unit.finding("camera-undecodable", why)], 0
    reader = _Reader(meta.storage, unit.name, container, feature.depth_codes)
    try:
        said = reader.open()
    except DatasetError as error:
        said = one_line(error)
    if said:
        return [unit.finding("video-damaged", f"on opening it: {said}", unit.episodes)], 0
    if container.index is None:
        return _check_unindexed(outline, unit, reader)
    return _decode_spans(unit, reader, spans)


def _decode_spans(unit: VideoUnit, reader: "_Reader", spans: VideoSpans) -> tuple[list[Finding], int]:
    findings: list[Finding] = []
    count = 0
    for position in np.flatnonzero(spans.is_there):
        first, stop = int(spans.first[position]), int(spans.first[position] + spans.length[position])
        failure = reader.decode(first, stop)
        if failure is None:
            count += stop - first
            if reader.is_black:
                findings.append(_black(unit, stop - first, int(spans.episodes[position]), (first,)))
            continue
        frame, said = failure
        is_ahead = reader.container.is_reordered and frame >= stop - _LOOK_AHEAD
        episodes = spans.episodes[position : position + 1 + is_ahead].tolist()
        frames = (number for number in (frame - 1, frame, frame + 1) if first <= number < stop)
        message = f"decoding {frames_text(first, stop)} goes wrong at frame {frame}: {said}"
        findings.append(unit.finding("video-damaged", message, episodes, frames))
    return findings, count


def _black(unit: Unit, num_frames: int, episode: int, frames: tuple[int, ...] = (), camera: str = "") -> Finding:
    which = f"all {counted(num_frames, 'frame')} are" if num_frames > 1 else "its only frame is"
    return unit.finding("camera-black", f"{which} black", (episode,), frames, camera)


def _check_unindexed(outline: Outline, unit: VideoUnit, reader: "_Reader") -> tuple[list[Finding], int]:
    """Check a video whose frames were counted by decoding it on opening."""
    findings, first = [], {}
    for row, number in zip(unit.rows, unit.episodes, strict=True):
        try:
            first[row] = episode_first_frame(outline.meta, row, unit.camera, reader.video.index)
        except DatasetError as error:
            findings.append(unit.finding("video-short", one_line(error), (number,)))
    rows = np.array(list(first), np.int64)
    spans = VideoSpans(
        rows=rows,
        episodes=outline.meta.episodes.episode_index[rows],
        first=np.array(list(first.values()), np.int64),
        length=outline.meta.episodes.length[rows],
        drift_s=np.zeros(len(rows)),
        is_counted=False,
        is_there=np.ones(len(rows), np.bool_),
    )
    found, count = _decode_spans(unit, reader, spans)
    return [*findings, *found], count


class _Reader:
    """Decodes one video and watches FFmpeg's log."""

    def __init__(self, storage: Storage, name: str, container: Container, codes: DepthCodes | None) -> None:
        self.container = container
        self._codes = codes
        # The nearest distance also marks pixels that were not measured.
        self._black = _BLACK if codes is None else 1000 * codes.min_m if codes.is_declared else 0.0
        self._storage = storage
        self._name = name
        self.video: OpenVideo
        self.is_black = True
        """Whether all frames of the last `decode` are black."""

    def open(self) -> str:
        """Open the video again; return the decoder's complaint, empty if there is none."""
        from raypipe.decode import OpenVideo

        # torchcodec sets the log level when it opens a file.
        with read_decoder_log() as log:
            self.video = OpenVideo(self._storage, self._name, codes=self._codes)
        return f"the decoder says: {log[0]}" if log else ""

    def decode(self, first: int, stop: int) -> tuple[int, str] | None:
        """Decode frames ``[first, stop)``; return the first bad frame and the complaint, or None."""
        self.is_black = True
        size = max(1, _PIECE_BYTES // max(1, 3 * self.container.format.height * self.container.format.width))
        for start in range(first, stop, size):
            frames = np.arange(start, min(start + size, stop))
            said = self._decode_piece(frames)
            if said:
                return self._locate(frames, said)
        return None

    def _decode_piece(self, frames: NDArray[np.int64]) -> str:
        try:
            with read_decoder_log() as log:
                pixels = self.video.read_frames(frames)
        except DatasetError as error:
            return one_line(error)
        self.is_black = self.is_black and float(pixels.max()) <= self._black
        return f"the decoder says: {log[0]}" if log else ""

    def _locate(self, frames: NDArray[np.int64], said: str) -> tuple[int, str]:
        """Return the first frame that fails when decoded alone, and its complaint; else the first one and `said`."""
        # Open the video again: a decoder that has failed once is not used further.
        self.open()
        for frame in frames:
            alone = self._decode_piece(np.array([frame]))
            if alone:
                self.open()
                return int(frame), alone
        return int(frames[0]), said


@contextmanager
def read_decoder_log() -> Iterator[list[str]]:
    """Collect decoders' complaints from FFmpeg's log while the body runs; the list fills when the body ends.

    FFmpeg writes to the process's standard error, whatever Python's is. Other text that is written there meanwhile is
    passed on afterwards. Only one thread at a time may use this.
    """
    lines: list[str] = []
    before = os.environ.get(_LOG_LEVEL)
    # FFmpeg logs concealment at this level, not among the errors.
    os.environ[_LOG_LEVEL] = "INFO"
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log, _read_av_log(lines):
        os.dup2(log.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            if before is None:
                os.environ.pop(_LOG_LEVEL, None)
            else:
                os.environ[_LOG_LEVEL] = before
            log.seek(0)
            for line in log.read().decode(errors="replace").splitlines():
                found = _LOG_LINE.match(line)
                if found is None and line.strip():
                    echo(line, err=True)
                elif found is not None and _COMPLAINT.search(found[1]):
                    lines.append(found[1])


@contextmanager
def _read_av_log(lines: list[str]) -> Iterator[None]:
    """Collect the complaints of PyAV's decoders: PyAV has its own FFmpeg, which logs to Python."""
    try:
        from av import logging
    except ImportError:
        yield
        return
    before = logging.get_level()
    logging.set_level(logging.INFO)
    try:
        with logging.Capture() as heard:
            yield
    finally:
        logging.set_level(before)
    lines += [text.strip() for _, _, text in heard if _COMPLAINT.search(text)]


def decode_images(outline: Outline, unit: DataUnit) -> tuple[list[Finding], int]:
    """Return the findings on the images of a data file, and how many images were decoded."""
    findings: list[Finding] = []
    decoded: Counter[tuple[int, str]] = Counter()
    not_black: set[tuple[int, str]] = set()
    try:
        for episode, feature, stored in _stored_images(outline, unit):
            key = (episode, feature.name)
            said, is_lit = _look(stored, feature, episode)
            if said:
                findings.append(unit.finding("image-undecodable", said, (episode,), feature=feature.name))
            else:
                decoded[key] += 1
            if said or is_lit:
                not_black.add(key)
    except DatasetError as error:
        # The episodes in the rest of the file are unknown.
        findings.append(unit.finding("image-undecodable", one_line(error)))
    for episode, camera in decoded.keys() - not_black:
        findings.append(_black(unit, decoded[episode, camera], episode, camera=camera))
    return findings, decoded.total()


def _look(stored: Any, feature: Feature, episode: int) -> tuple[str, bool]:
    """Return why an image cannot be decoded, empty if it can; and whether any pixel is brighter than black."""
    from raypipe.decode import decode_image

    try:
        pixels = decode_image(stored, feature, f"episode {episode}")
    except DatasetError as error:
        return one_line(error), False
    # Depth is 0 where nothing was measured.
    return "", float(pixels.nan_to_num().max()) > (0 if feature.is_depth else _BLACK)


def _stored_images(outline: Outline, unit: DataUnit) -> Iterator[tuple[int, Feature, Any]]:
    """Yield the images in the rows of a data file, with their episode and camera."""
    meta = outline.meta
    cameras = [meta.features[name] for name in meta.cameras if meta.features[name].kind == "image"]
    with (
        as_damage(lambda error: DatasetError(f"its images cannot be read: {one_line(error)}")),
        open_parquet(meta.storage, unit.name) as parquet,
    ):
        names = parquet.schema_arrow.names
        chosen = [feature for feature in cameras if feature.name in names]
        if not chosen or "episode_index" not in names:
            return
        columns = ["episode_index", *(feature.name for feature in chosen)]
        for batch in parquet.iter_batches(batch_size=64, columns=columns, use_threads=False):
            episodes = [_plain_number(value) for value in batch.column("episode_index").to_pylist()]
            for feature in chosen:
                for episode, stored in zip(episodes, batch.column(feature.name), strict=True):
                    # Rows without an episode get a finding of their own.
                    if episode is not None:
                        yield episode, feature, stored.as_py()


def _plain_number(value: Any) -> int | None:
    """Return the number of a row; some writers store a list of one number."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return one if isinstance(one, int) else None
