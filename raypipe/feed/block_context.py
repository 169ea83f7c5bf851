"""`BlockContext`: what a task or a rank needs to make and open blocks, of one dataset or of a mixture."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from raypipe.account import frame_numbers
from raypipe.dataset import Dataset, MemberMap, Schema, schema_of, window_rows
from raypipe.decode import BatchBuffers, ClipRequest, DecodeSpec, FramePool, KeepFolder, KeepSpec
from raypipe.feed.agreement import RAISE, BadDataSpec
from raypipe.feed.order import SpanRequest
from raypipe.format import INDEX_FEATURES, Feature, OpenFiles, RowReader
from raypipe.plan import Ints

if TYPE_CHECKING:
    from raypipe.decode import FrameDecoder, VideoPool

_OPEN_FILES: Final = 128
"""Data files of a mixture that a process keeps open. A footer is usually a few kilobytes. With 1,000 row groups it is a
megabyte, and opening the file again takes 10 ms."""

_TRAINED_ON: Final = ("action", "observation")
"""Prefixes of features in which a NaN would reach the weights. A reward may be unknown, so it is not one of them."""

_MAKING: Final = threading.Lock()
"""Held while decoders are made."""


@dataclass(frozen=True)
class BlockContext:
    """Everything that a task or a rank needs to make and open blocks. A process receives it once."""

    datasets: tuple[Dataset, ...]
    decode: DecodeSpec
    bad_data: BadDataSpec = RAISE

    schema: Schema | None = None
    """The schema of a mixture; None for a single dataset, which has its own. Read `batch_schema` instead."""

    robot_types: tuple[str, ...] = ()
    """Robot types in a mixture, one per dataset; if empty, those of the datasets apply."""

    names: tuple[str, ...] = ()
    """Names of the datasets in a mixture; empty for a single dataset."""

    keep: KeepSpec | None = None
    """Keeps decoded frames on the nodes that decode them; None decodes them each time."""

    decoded_bytes: int = 0
    """Size of all decoded frames of a run, which `keep` may keep."""

    @cached_property
    def batch_schema(self) -> Schema:
        """The schema of a batch."""
        return schema_of(self.datasets[0]) if self.schema is None else self.schema

    @cached_property
    def robots(self) -> tuple[str, ...]:
        """The robot type of every dataset."""
        return self.robot_types or tuple(dataset.meta.robot_type for dataset in self.datasets)

    @cached_property
    def stored(self) -> tuple[Mapping[str, Feature], ...]:
        """Per dataset, by its own names, the features to read from its rows, including stored images.

        These are the features that the schema maps, and the index columns.
        """
        stored = []
        for dataset, member in zip(self.datasets, self.batch_schema.members, strict=True):
            mapped = {*member.rows.values(), *member.cameras.values(), *INDEX_FEATURES}
            stored.append({name: feature for name, feature in dataset.row_features.items() if name in mapped})
        return tuple(stored)

    @cached_property
    def trained_on(self) -> tuple[frozenset[str], ...]:
        """Per dataset, its names of features that must be finite: actions and observations, here or in the mixture."""
        return tuple(
            frozenset(
                own for name, own in member.rows.items() if name.startswith(_TRAINED_ON) or own.startswith(_TRAINED_ON)
            )
            for member in self.batch_schema.members
        )

    @cached_property
    def blanks(self) -> Mapping[str, NDArray[Any]]:
        """By camera, black frames for samples of datasets without it: ``(T, height, width, channels)``.

        They take no memory. Their shape and dtype are those of a sample.
        """
        schema, blanks = self.batch_schema, {}
        for camera in schema.cameras:
            feature = schema.features[camera]
            shape = (schema.windows.get(camera, 1), *self.decode.frame_shape(feature))
            blanks[camera] = np.broadcast_to(np.zeros(1, dtype=np.float32 if feature.is_depth else np.uint8), shape)
        return blanks

    @cached_property
    def readers(self) -> tuple[RowReader, ...]:
        """A row reader per dataset; together they keep a limited number of files open."""
        files = OpenFiles() if len(self.datasets) == 1 else OpenFiles(_OPEN_FILES)
        pairs = zip(self.datasets, self.stored, strict=True)
        return tuple(RowReader(dataset.meta, list(stored), files) for dataset, stored in pairs)

    @cached_property
    def reading(self) -> threading.Lock:
        """Held while rows are read: a reader is not thread-safe, and another thread may read for the next epoch."""
        return threading.Lock()

    @property
    def decoders(self) -> "tuple[FrameDecoder, ...]":
        """A decoder per dataset."""
        # Several threads of a rank ask first, and since Python 3.12 each would make decoders, which count their work.
        with _MAKING:
            return self._decoders

    @property
    def made_decoders(self) -> "tuple[FrameDecoder, ...]":
        """The decoders if a thread has asked for them, else none: figures need no codec where nothing is decoded."""
        made: tuple[FrameDecoder, ...] = self.__dict__.get("_decoders", ())
        return made

    @cached_property
    def _decoders(self) -> "tuple[FrameDecoder, ...]":
        from raypipe.decode import FrameDecoder, load_torchcodec

        pairs = zip(self.datasets, self.batch_schema.members, strict=True)
        cameras = [dataset.features[own] for dataset, member in pairs for own in member.cameras.values()]
        if any(camera.kind == "video" and camera.depth_codes is None for camera in cameras):
            # A second, which a rank spends here in a thread while its first rows are read.
            load_torchcodec()
        folder = KeepFolder(self.keep, self.decoded_bytes) if self.keep is not None else None
        # Together they keep no more videos open than a single decoder would.
        return tuple(
            FrameDecoder(dataset.meta, self.decode.by_own_names(member.cameras), self.videos, folder)
            for dataset, member in zip(self.datasets, self.batch_schema.members, strict=True)
        )

    @cached_property
    def videos(self) -> "VideoPool":
        """The videos open in this process."""
        from raypipe.decode import VideoPool

        return VideoPool(self.decode.open_videos)

    @cached_property
    def batch_buffers(self) -> BatchBuffers:
        """Memory for the pixels of batches, shared by all epochs of a rank."""
        return BatchBuffers()

    @cached_property
    def frame_pool(self) -> FramePool:
        """Memory for waiting frames, shared by all epochs of a rank."""
        return FramePool()

    @cached_property
    def has_images(self) -> bool:
        """Whether any dataset stores images in its rows."""
        members = enumerate(self.batch_schema.members)
        return any(self.stores_images(number, own) for number, one in members for own in one.cameras.values())

    @cached_property
    def pixel_bytes(self) -> int:
        """Bytes of one decoded frame of every camera together."""
        return sum(int(np.prod(blank.shape[1:])) * blank.dtype.itemsize for blank in self.blanks.values())

    def home_video(self, request: ClipRequest) -> str:
        """Return a name for the source of a clip, if nodes keep its file or its frames; else an empty string."""
        meta = self.datasets[request.dataset].meta
        if request.stored is not None:
            return ""
        video = f"{meta.root}/{meta.video_file(request.row, request.camera)}"
        if meta.storage.cache is not None and meta.storage.is_remote:
            return video
        # Add the episode, because one file of a local dataset may hold all of them.
        return f"{video} {request.row}" if self.keep is not None else ""

    def __getstate__(self) -> dict[str, Any]:
        # Leave out open files and decoders: each process opens its own.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def member_of(self, request: SpanRequest) -> MemberMap:
        """Return the member map of a span's dataset."""
        return self.batch_schema.members[request.dataset]

    def stores_images(self, dataset: int, camera: str) -> bool:
        """Return whether a dataset stores a camera as images in rows; `camera` is the dataset's own name."""
        return self.datasets[dataset].features[camera].kind == "image"

    def frame_numbers(self, dataset: Ints, episode: Ints, frame: Ints, lap: Ints) -> Ints:
        """Return the number of every frame on the accounts' axis, which covers all datasets; see `frame_numbers`.

        Args:
            lap: the pass over its dataset that each frame belongs to, counted from the first of the epoch. The numbers
                of a lap follow those of the whole lap before.
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
    context: BlockContext, request: SpanRequest, camera: str, anchors: Ints | None = None, clip_frames: int = 0
) -> Ints:
    """Return the frames of a camera, by the dataset's own name, to decode for samples of a span, ascending.

    Under ``on_bad_episode="skip"`` these are all frames that the samples' whole clips show. So whether a clip is bad
    does not depend on where a run was interrupted or a span was cut.

    Args:
        anchors: the samples; None takes all those of the span that are still to be emitted.
        clip_frames: the clip length if the order does not set one.
    """
    dataset, _, length = context.find_episode(request)
    anchors = request.anchors if anchors is None else anchors
    if context.bad_data.on_bad_episode == "skip":
        anchors = _whole_clips(request, anchors, length, request.clip_frames or clip_frames)
    offsets = dataset.window.offsets.get(camera, (0,))
    return anchors if offsets == (0,) else np.unique(window_rows(anchors, length, offsets)[0])


def _whole_clips(request: SpanRequest, anchors: Ints, length: int, clip_frames: int) -> Ints:
    if not clip_frames:
        return np.arange(request.start, request.stop)
    start, stop = (0, length) if request.clip_frames else (request.start, request.stop)
    frames = (np.unique(anchors // clip_frames)[:, None] * clip_frames + np.arange(min(clip_frames, length))).ravel()
    return frames[(frames >= start) & (frames < stop)]


def clip_request(
    context: BlockContext,
    request: SpanRequest,
    camera: str,
    frames: Ints,
    span: tuple[int, int],
    images: Mapping[str, Mapping[int, Any]],
) -> ClipRequest:
    """Return the request for frames of a camera, named as in a batch; `images` are those that the rows store."""
    _, row, _ = context.find_episode(request)
    own, stored = context.member_of(request).cameras[camera], None
    if context.stores_images(request.dataset, own):
        stored = tuple(images[camera][frame] for frame in frames.tolist())
    return ClipRequest(
        dataset=request.dataset,
        row=row,
        camera=own,
        frames=frames,
        span=span,
        frame_bytes=context.blanks[camera][0].nbytes,
        stored=stored,
    )
