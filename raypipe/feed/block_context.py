"""`BlockContext`: what a task or a rank needs to make and open blocks, of one dataset or of several unlike ones."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.account import frame_numbers
from raypipe.dataset import Dataset, MemberMap, Schema, schema_of, window_rows
from raypipe.decode import BatchBuffers, ClipRequest, DecodeSpec, FramePool, KeepFolder, KeepSpec
from raypipe.feed.bad_data import RAISE, BadDataSpec
from raypipe.feed.packing import RowFrames, SpanRequest
from raypipe.format import INDEX_FEATURES, Feature, OpenFiles, RowReader

if TYPE_CHECKING:
    from raypipe.decode import FrameDecoder, VideoPool

_OPEN_FILES: Final = 128
"""Data files of a mixture that a process keeps open. A footer is mostly some kilobytes, and of a file with 1,000 row
groups a megabyte; opening it anew takes 10 ms then."""

_TRAINED_ON: Final = ("action", "observation")
"""Features of which a value that is no number would end in the weights; a reward may be unknown."""


@dataclass(frozen=True)
class BlockContext:
    """Everything that a task or a rank needs to make and open blocks; a process receives it once."""

    datasets: tuple[Dataset, ...]
    decode: DecodeSpec
    bad_data: BadDataSpec = RAISE

    schema: Schema | None = None
    """Of a mixture. None where a dataset stands alone, whose schema is its own: read `batch_schema`."""

    robot_types: tuple[str, ...] = ()
    """What the robots of a mixture are called, one per dataset; empty: as the datasets say."""

    names: tuple[str, ...] = ()
    """What the datasets of a mixture are called; empty: nothing, where one stands alone."""

    keep: KeepSpec | None = None
    """Keeps decoded frames on the nodes that decode them; None decodes them whenever they are needed."""

    decoded_bytes: int = 0
    """All frames of a run that may be kept."""

    @cached_property
    def batch_schema(self) -> Schema:
        """What a batch is made of."""
        return schema_of(self.datasets[0]) if self.schema is None else self.schema

    @cached_property
    def robots(self) -> tuple[str, ...]:
        """The robot type of every dataset."""
        return self.robot_types or tuple(dataset.meta.robot_type for dataset in self.datasets)

    @cached_property
    def stored(self) -> tuple[Mapping[str, Feature], ...]:
        """Per dataset, by own name, what is read from its rows: the features that the schema maps, and index columns.

        Images that are stored in rows are among them.
        """
        stored = []
        for dataset, member in zip(self.datasets, self.batch_schema.members, strict=True):
            mapped = {*member.rows.values(), *member.cameras.values(), *INDEX_FEATURES}
            stored.append({name: feature for name, feature in dataset.row_features.items() if name in mapped})
        return tuple(stored)

    @cached_property
    def trained_on(self) -> tuple[frozenset[str], ...]:
        """Per dataset, the own names of features that must hold numbers, by their own name or that in the mixture."""
        return tuple(
            frozenset(
                own for name, own in member.rows.items() if name.startswith(_TRAINED_ON) or own.startswith(_TRAINED_ON)
            )
            for member in self.batch_schema.members
        )

    @cached_property
    def blanks(self) -> Mapping[str, NDArray[Any]]:
        """By camera of a batch, black frames for samples of datasets that lack it: ``(T, height, width, channels)``.

        They take no memory, and say the shape and dtype of a sample.
        """
        schema, blanks = self.batch_schema, {}
        for camera in schema.cameras:
            feature = schema.features[camera]
            shape = (schema.windows.get(camera, 1), *self.decode.frame_shape(feature))
            blanks[camera] = np.broadcast_to(np.zeros(1, dtype=np.float32 if feature.is_depth else np.uint8), shape)
        return blanks

    @cached_property
    def readers(self) -> tuple[RowReader, ...]:
        """A row reader per dataset; together they keep a bounded number of files open."""
        files = OpenFiles() if len(self.datasets) == 1 else OpenFiles(_OPEN_FILES)
        pairs = zip(self.datasets, self.stored, strict=True)
        return tuple(RowReader(dataset.meta, list(stored), files) for dataset, stored in pairs)

    @cached_property
    def decoders(self) -> "tuple[FrameDecoder, ...]":
        """A decoder per dataset."""
        from raypipe.decode import FrameDecoder

        folder = KeepFolder(self.keep, self.decoded_bytes) if self.keep is not None else None
        # Together they keep no more videos open than one would.
        return tuple(
            FrameDecoder(dataset.meta, self.decode.by_own_names(member.cameras), self.videos, folder)
            for dataset, member in zip(self.datasets, self.batch_schema.members, strict=True)
        )

    @cached_property
    def videos(self) -> "VideoPool":
        """The videos that are open in this process."""
        from raypipe.decode import VideoPool

        return VideoPool(self.decode.open_videos)

    @cached_property
    def batch_buffers(self) -> BatchBuffers:
        """Memory for the pixels of batches: all epochs of a rank use the same."""
        return BatchBuffers()

    @cached_property
    def frame_pool(self) -> FramePool:
        """Memory for frames that wait: all epochs of a rank use the same."""
        return FramePool()

    @cached_property
    def has_images(self) -> bool:
        """Whether some dataset stores images in its rows."""
        members = enumerate(self.batch_schema.members)
        return any(self.stores_images(number, own) for number, one in members for own in one.cameras.values())

    @cached_property
    def pixel_bytes(self) -> int:
        """Memory of one decoded frame of every camera."""
        return sum(int(np.prod(blank.shape[1:])) * blank.dtype.itemsize for blank in self.blanks.values())

    def home_video(self, request: ClipRequest) -> str:
        """Return what a clip is decoded from, where nodes keep such files, or frames of them; else nothing."""
        meta = self.datasets[request.dataset].meta
        if request.stored is not None:
            return ""
        video = f"{meta.root}/{meta.video_file(request.row, request.camera)}"
        if meta.storage.cache is not None and meta.storage.is_remote:
            return video
        # By episode: of a local dataset one file may hold all of them.
        return f"{video} {request.row}" if self.keep is not None else ""

    def __getstate__(self) -> dict[str, Any]:
        # Open files and decoders stay behind: each process opens its own.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def member_of(self, request: SpanRequest) -> MemberMap:
        """Return what the dataset of a span gives."""
        return self.batch_schema.members[request.dataset]

    def stores_images(self, dataset: int, camera: str) -> bool:
        """Return whether a dataset has a camera, by its own name, as images in rows."""
        return self.datasets[dataset].features[camera].kind == "image"

    def frame_numbers(self, dataset: RowFrames, episode: RowFrames, frame: RowFrames, lap: RowFrames) -> RowFrames:
        """Return the number of every frame on the axis of accounts, which holds all datasets; see `frame_numbers`.

        Args:
            lap: which pass over its dataset a frame is of, counted from the first of the epoch: numbers of the next lap
                follow those of the whole dataset.
        """
        numbers = np.empty(len(frame), dtype=np.int64)
        for i in np.unique(dataset).tolist():
            mine = dataset == i if len(self.datasets) > 1 else slice(None)
            meta = self.datasets[i].meta
            row = np.searchsorted(meta.episodes.episode_index, episode[mine])
            first = lap[mine] * meta.num_frames + meta.episodes.first_frames[row]
            numbers[mine] = frame_numbers(i, first + frame[mine])
        return numbers

    def find_episode(self, request: SpanRequest) -> tuple[Dataset, int, int]:
        """Return the dataset of a span, the row of its episode in the episode table, and the episode's length."""
        dataset = self.datasets[request.dataset]
        row = dataset.meta.episodes.find_row(request.episode)
        return dataset, row, int(dataset.meta.episodes.length[row])


def shown_frames(
    context: BlockContext, request: SpanRequest, camera: str, anchors: RowFrames | None = None, clip_frames: int = 0
) -> RowFrames:
    """Return the frames of a camera, by its own name, that are decoded for samples of a span, ascending.

    Where bad clips are left out, those are what the whole clips of the samples show: whether a clip is bad depends
    neither on where a run was interrupted nor on where a span was cut.

    Args:
        anchors: the samples; all of the span that are still to be emitted, where nothing is said.
        clip_frames: how the samples are cut into clips where the order does not say it.
    """
    dataset, _, length = context.find_episode(request)
    anchors = request.anchors if anchors is None else anchors
    if context.bad_data.on_bad_episode == "skip":
        anchors = _whole_clips(request, anchors, length, request.clip_frames or clip_frames)
    offsets = dataset.window.offsets.get(camera, (0,))
    return anchors if offsets == (0,) else np.unique(window_rows(anchors, length, offsets)[0])


def _whole_clips(request: SpanRequest, anchors: RowFrames, length: int, clip_frames: int) -> RowFrames:
    if not clip_frames:
        return np.arange(request.start, request.stop)
    start, stop = (0, length) if request.clip_frames else (request.start, request.stop)
    frames = (np.unique(anchors // clip_frames)[:, None] * clip_frames + np.arange(min(clip_frames, length))).ravel()
    return frames[(frames >= start) & (frames < stop)]
