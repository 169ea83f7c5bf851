"""A batch as the training loop gets it: the keys, dtypes and shapes of LeRobot's collated samples.

Cameras are ``(B, channels, height, width)``, or ``(B, T, channels, height, width)`` with a window of several frames; in
memory the channels come last, as FFmpeg writes them and as convolutions on a GPU want them. Beside LeRobot's keys a
batch has ``dataset_index`` and ``augment_seed``, and ``is_repeat`` where frames may come twice: with ``tail="wrap"``
and with ``on_bad_episode="skip"``. A batch of a mixture has ``dataset`` and ``robot_type`` too, the names of every
sample's dataset and robot, and the masks of its schema; the cameras that a robot lacks are black.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.block import BlockContext, SpanBlock, window_frames
from raypipe.errors import DatasetError
from raypipe.packed import Frames
from raypipe.plan import Batch, RankPlan
from raypipe.shuffle import LiveWindow, find_pixels
from raypipe.window import window_rows


class BatchBuilder:
    """Builds the batches of one rank from its live window."""

    def __init__(self, context: BlockContext, plan: RankPlan, window: LiveWindow, num_threads: int) -> None:
        self._context = context
        self._plan = plan
        self._window = window
        self._exit = ExitDecoder(context, num_threads)

    def build(self, batch: Batch) -> dict[str, Any]:
        """Return a batch as tensors on the CPU, cameras as uint8."""
        rows = self._window.take_rows(batch)
        dataset_index = self._plan.queue.dataset[batch.span].astype(np.int64)
        built = self._cameras(batch, rows, dataset_index)
        for name, values in rows.items():
            built[name] = values.tolist() if values.dtype == object else torch.from_numpy(values)
        built["task"] = self._tasks(dataset_index, rows["task_index"])
        built["dataset_index"] = torch.from_numpy(dataset_index)
        built["augment_seed"] = torch.from_numpy(
            self._plan.keys.augment_seeds(
                dataset_index, self._plan.queue.lap[batch.span], rows["episode_index"], rows["frame_index"]
            )
        )
        for name, mask in self._context.batch_schema.masks(dataset_index).items():
            built[name] = torch.from_numpy(mask)
        built.update(_origins(self._context, dataset_index))
        if self._plan.steps.num_repeats or self._context.bad_data.on_bad_episode == "skip":
            built["is_repeat"] = torch.from_numpy(batch.is_repeat.copy())
        return built

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with cameras in the dtype asked for; on the device: bytes were copied, not floats."""
        if self._context.decode.camera_dtype == "uint8":
            return batch
        return {
            key: value.to(torch.float32) / 255
            if isinstance(value, torch.Tensor) and value.dtype == torch.uint8
            else value
            for key, value in batch.items()
        }

    def close(self) -> None:
        """End the threads that decode on exit."""
        self._exit.close()

    def _cameras(self, batch: Batch, rows: dict[str, NDArray[Any]], dataset_index: NDArray[np.int64]) -> dict[str, Any]:
        schema, blanks = self._context.batch_schema, self._context.blanks
        built: dict[str, Any] = {}
        decoded = self._exit.decode(batch, rows, dataset_index, self._window)
        for camera in schema.cameras:
            is_decoded = camera in decoded
            pixels = decoded[camera] if is_decoded else self._window.take_pixels(batch, camera, blanks[camera])
            tensor = torch.from_numpy(pixels).permute(0, 1, 4, 2, 3)
            built[camera] = tensor if camera in schema.time_axes else tensor[:, 0]
            if camera in schema.windows:
                padding = self._padding(camera, rows, dataset_index)
                built[f"{camera}_is_pad"] = torch.from_numpy(padding)
        return built

    def _padding(
        self, camera: str, rows: dict[str, NDArray[Any]], dataset_index: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        schema = self._context.batch_schema
        padding = np.ones((len(dataset_index), schema.windows[camera]), dtype=np.bool_)
        for i, (number, episode, frame) in enumerate(_identities(rows, dataset_index)):
            dataset, own = self._context.datasets[number], schema.members[number].cameras.get(camera)
            if own is not None:
                length = int(dataset.meta.episodes.length[dataset.meta.episodes.find_row(episode)])
                wanted = frame + np.asarray(dataset.window.offsets[own])
                padding[i] = (wanted < 0) | (wanted >= length)
        return padding

    def _tasks(self, dataset_index: NDArray[np.int64], task_index: NDArray[np.int64]) -> list[str]:
        tasks = [dataset.meta.tasks for dataset in self._context.datasets]
        pairs = zip(dataset_index.tolist(), task_index.tolist(), strict=True)
        return [tasks[number].text(index) if len(tasks[number]) else "" for number, index in pairs]


def span_columns(context: BlockContext, block: SpanBlock) -> dict[str, Any]:
    """Return a span as columns of samples, cameras ``(rows, [T,] channels, height, width)``: for users of Ray Data."""
    block.check()
    schema, number = context.batch_schema, block.request.dataset
    columns: dict[str, Any] = {}
    for camera in schema.cameras:
        frames, padding = _span_camera(context, block, camera)
        frames = frames.transpose(0, 1, 4, 2, 3)
        columns[camera] = frames if camera in schema.time_axes else frames[:, 0]
        if camera in schema.windows:
            columns[f"{camera}_is_pad"] = padding
    columns.update(block.columns)
    tasks = context.datasets[number].meta.tasks
    columns["task"] = tasks.texts_of(block.columns["task_index"]) if len(tasks) else [""] * block.num_rows
    columns["dataset_index"] = np.full(block.num_rows, number)
    columns.update(schema.masks(columns["dataset_index"]))
    columns.update(_origins(context, columns["dataset_index"]))
    return columns


def _span_camera(context: BlockContext, block: SpanBlock, camera: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the frames of a camera in every window of a span, and which of them are padding: all of a black one."""
    dataset, _, length = context.find_episode(block.request)
    own, blank = context.member_of(block.request).cameras.get(camera), context.blanks[camera]
    if own is None:
        return np.zeros((block.num_rows, *blank.shape), blank.dtype), np.ones((block.num_rows, len(blank)), np.bool_)
    windows, padding = window_rows(block.request.anchors, length, dataset.window.offsets.get(own, (0,)))
    parts, found = block.pixels[camera], find_pixels(block.pixels[camera], windows)
    pairs = zip(found.part, found.index, strict=True)
    return np.stack([[parts[p].pixels[i] for p, i in zip(*pair, strict=True)] for pair in pairs]), padding


def _origins(context: BlockContext, dataset_index: NDArray[np.int64]) -> dict[str, list[str]]:
    """Return the keys that name the dataset and the robot of every sample; a dataset that stands alone has none."""
    if context.schema is None:
        return {}
    numbers = dataset_index.tolist()
    named = {"dataset": [context.names[number] for number in numbers]} if context.names else {}
    return {**named, "robot_type": [context.robots[number] for number in numbers]}


def _identities(rows: dict[str, NDArray[Any]], dataset_index: NDArray[np.int64]) -> Any:
    return zip(dataset_index.tolist(), rows["episode_index"].tolist(), rows["frame_index"].tolist(), strict=True)


class SpanErrors(Exception):  # noqa: N818
    """Spans of a batch could not be decoded as it left."""

    def __init__(self, errors: dict[int, DatasetError]) -> None:
        super().__init__(f"{len(errors)} spans could not be decoded")
        self.errors = errors
        """By arrival number."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One window of one sample: where its frames go in the batch, and which they are."""

    sample: int
    frames: Frames


class ExitDecoder:
    """With ``when="exit"`` decodes videos as a batch leaves: per episode in one pass, files spread over threads."""

    def __init__(self, context: BlockContext, num_threads: int) -> None:
        self._context = context
        self._videos = _video_cameras(context) if context.decode.when == "exit" else {}
        # A file always goes to the same thread, so that it is open in one decoder, not in one per thread.
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="raypipe-exit-decode") for _ in range(num_threads)]

    def decode(
        self, batch: Batch, rows: dict[str, NDArray[Any]], dataset_index: NDArray[np.int64], window: LiveWindow
    ) -> dict[str, NDArray[Any]]:
        """Return the frames of cameras that some dataset has as videos: ``(B, T, height, width, channels)``.

        Args:
            batch: which samples.
            rows: the row columns of the batch.
            dataset_index: of every sample.
            window: whose buffers are used, and which has the frames of datasets that store the camera as images.

        Raises:
            SpanErrors: some spans could not be decoded.
        """
        buffers, jobs = {}, []
        for camera, own_names in self._videos.items():
            blank = self._context.blanks[camera]
            buffers[camera] = window.empty_pixels((len(dataset_index), *blank.shape), blank.dtype)
            for (arrival, number, episode), wanted in self._group(camera, batch.span, rows, dataset_index).items():
                job = self._submit(number, episode, own_names[number], wanted, buffers[camera])
                jobs.append((arrival, job))
            others = [i for i, number in enumerate(dataset_index.tolist()) if number not in own_names]
            window.copy_pixels(batch, camera, blank, buffers[camera], others)
        errors = {arrival: error for arrival, job in jobs if isinstance(error := job.exception(), Exception)}
        if errors:
            raise _first_or_all(errors)
        return buffers

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    def _group(
        self, camera: str, span: Frames, rows: dict[str, NDArray[Any]], dataset_index: NDArray[np.int64]
    ) -> dict[tuple[int, int, int], list[_Wanted]]:
        groups: dict[tuple[int, int, int], list[_Wanted]] = {}
        samples = zip(span.tolist(), _identities(rows, dataset_index), strict=True)
        for sample, (arrival, (number, episode, frame)) in enumerate(samples):
            dataset, own = self._context.datasets[number], self._videos[camera].get(number)
            if own is not None:
                length = int(dataset.meta.episodes.length[dataset.meta.episodes.find_row(episode)])
                frames = window_frames(dataset, own, np.array([frame]), length)[0]
                groups.setdefault((arrival, number, episode), []).append(_Wanted(sample, frames))
        return groups

    def _submit(
        self, number: int, episode: int, camera: str, wanted: list[_Wanted], out: NDArray[Any]
    ) -> "Future[None]":
        meta = self._context.datasets[number].meta
        row = meta.episodes.find_row(episode)
        columns = meta.episodes.videos[camera]
        key = hash((number, camera, int(columns.chunk_index[row]), int(columns.file_index[row])))
        thread = self._threads[key % len(self._threads)]
        return thread.submit(self._decode_episode, number, row, camera, wanted, out)

    def _decode_episode(self, number: int, row: int, camera: str, wanted: list[_Wanted], out: NDArray[Any]) -> None:
        frames = np.unique(np.concatenate([want.frames for want in wanted]))
        # Batches take a few frames each: of a remote episode all come at once, not some with every batch.
        episode = np.arange(int(self._context.datasets[number].meta.episodes.length[row]))
        pixels = self._context.decoders[number].decode_video(row, camera, frames, span=episode).cpu().numpy()
        for want in wanted:
            out[want.sample] = pixels[np.searchsorted(frames, want.frames)]


def _video_cameras(context: BlockContext) -> dict[str, dict[int, str]]:
    """Return the cameras of a batch that are videos in some dataset: in which ones, and under which own name."""
    videos: dict[str, dict[int, str]] = {}
    for number, member in enumerate(context.batch_schema.members):
        for camera, own in member.cameras.items():
            if not context.stores_images(number, own):
                videos.setdefault(camera, {})[number] = own
    return videos


def _first_or_all(errors: dict[int, Exception]) -> Exception:
    """Return what to raise: bad data of all spans together, anything else as it is."""
    bad = {key: error for key, error in errors.items() if isinstance(error, DatasetError)}
    other = [error for error in errors.values() if not isinstance(error, DatasetError)]
    return other[0] if other else SpanErrors(bad)
