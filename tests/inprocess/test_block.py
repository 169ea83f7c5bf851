"""Blocks: what a task makes of a span is what a rank opens, whatever is packed, partial, or wrong with it."""

import errno
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from batches import TOP, WINDOWS, WRIST, varied_spec

from raypipe import errors
from raypipe.dataset import WindowSpec, open_dataset
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import DatasetError, DownloadError
from raypipe.feed import BadDataSpec, BlockContext, SpanRequest, filler_block, open_block, read_block
from raypipe.loader import span_columns
from raypipe.storage import Storage, is_transient
from raypipe.testing import write_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("block") / "dataset", varied_spec())


@pytest.fixture(scope="module")
def context(root):
    return BlockContext((open_dataset(str(root)).windowed(offsets=WINDOWS),), DecodeSpec())


@pytest.fixture(scope="module")
def without_cameras(context):
    """The same dataset with the same windows, for samples of rows alone."""
    dataset = context.datasets[0]
    return replace(dataset, spec=replace(dataset.spec, cameras=()))


@pytest.fixture(scope="module")
def without_windows(context):
    return replace(context.datasets[0], window=WindowSpec())


def request(episode, start, stop, frames=()):
    return SpanRequest(
        epoch=2, dataset=0, lap=2, episode=episode, start=start, stop=stop, lane=3, place=episode, frames=tuple(frames)
    )


def send(context, requests):
    """Do what a task does, send the table as Ray does, and open it as a rank does."""
    table = read_block(context, requests)
    assert len(table) == sum(len(request.anchors) for request in requests)
    return list(open_block(context, through_ipc(table)))


def through_ipc(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


REQUESTS = {
    "a whole episode": [request(2, 0, 12)],
    "the middle of one": [request(2, 4, 8)],
    "single frames": [request(1, 0, 1), request(2, 11, 12)],
    "what a resume left": [request(2, 0, 12, [0, 3, 4, 9])],
    "several packed": [request(0, 0, 7), request(2, 0, 6, [1, 5]), request(6, 5, 10), request(1, 0, 1)],
}


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_block_brings_its_spans_and_their_rows(context, without_cameras, requests):
    blocks = send(context, requests)

    assert [block.request for block in blocks] == requests
    for block in blocks:
        block.check()
        samples = [without_cameras.sample_of(block.request.episode, frame) for frame in block.request.anchors.tolist()]
        assert block.num_rows == len(samples)
        for name, values in block.columns.items():
            wanted = [sample[name] for sample in samples]
            if isinstance(values, list):
                assert values == wanted
            else:
                np.testing.assert_array_equal(values, np.stack([value.numpy() for value in wanted]), err_msg=name)
                assert values.dtype == wanted[0].numpy().dtype


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_span_as_columns_shows_every_frame_of_its_windows(context, requests):
    for block in send(context, requests):
        columns = span_columns(context, block)

        for i, frame in enumerate(block.request.anchors.tolist()):
            sample = context.datasets[0].sample_of(block.request.episode, frame)
            for camera in (TOP, WRIST):
                np.testing.assert_array_equal(columns[camera][i], sample[camera].numpy())
                np.testing.assert_array_equal(columns[f"{camera}_is_pad"][i], sample[f"{camera}_is_pad"].numpy())


def test_block_brings_the_stored_images_that_its_windows_show_and_no_others(context):
    (block,) = send(context, [request(2, 4, 8)])

    images = block.stored_images[WRIST]
    assert set(block.stored_images) == {WRIST}
    # Frames 4 to 7 and, three frames on, 8 to 10.
    assert sorted(images) == [4, 5, 6, 7, 8, 9, 10]
    assert all(image.startswith(b"\x89PNG") for image in images.values())


@pytest.mark.parametrize(("clip_frames", "frames"), [(0, range(5, 7)), (4, range(4, 8)), (5, range(5, 10))])
def test_where_bad_data_is_left_out_images_of_whole_clips_come(root, clip_frames, frames):
    dataset = open_dataset(str(root))
    context = BlockContext((dataset,), DecodeSpec(), BadDataSpec(on_bad_episode="skip"))

    (block,) = send(context, [replace(request(2, 5, 7, [6]), clip_frames=clip_frames)])

    assert sorted(block.stored_images[WRIST]) == list(frames)


def test_filler_has_its_rows_and_opens_to_nothing(context):
    table = filler_block(5)

    assert len(table) == 5
    assert list(open_block(context, through_ipc(table))) == []


def test_bad_span_keeps_its_rows_and_its_neighbours_whole(root, tmp_path):
    copy = write_dataset(tmp_path / "bad", varied_spec())
    # Episodes 4 to 7 share a file of rows.
    (copy / "data/chunk-000/file-001.parquet").write_bytes(b"no parquet")
    context = BlockContext((open_dataset(str(copy)),), DecodeSpec())

    before, bad, after = send(context, [request(2, 0, 12), request(5, 0, 3), request(8, 0, 6)])

    before.check()
    after.check()
    assert (bad.num_rows, bad.request) == (3, request(5, 0, 3))
    with pytest.raises(DatasetError, match=r"file-001\.parquet"):
        bad.check()
    assert before.columns["frame_index"].tolist() == list(range(12))
    assert after.columns["frame_index"].tolist() == list(range(6))


def test_error_of_a_block_is_raised_as_the_class_that_it_had(context):
    (block,) = send(context, [request(0, 0, 7)])
    for kind in ("DatasetError", "DecodeError", "DownloadError"):
        failed = replace(block, error=getattr(errors, kind)("what is wrong"))

        with pytest.raises(getattr(errors, kind), match="what is wrong") as caught:
            failed.check()

        assert type(caught.value).__name__ == kind


def chain(*links):
    """Return the first error, caused by the second, and so on."""
    for error, cause in pairwise(links):
        error.__cause__ = cause
    return links[0]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (TimeoutError("slow"), True),
        (ConnectionResetError("gone"), True),
        (OSError(errno.EIO, "input/output error"), True),
        (DatasetError("damaged file"), False),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (PermissionError(errno.EACCES, "not yours"), False),
        (OSError("Couldn't deserialize thrift"), False),
        (chain(DatasetError("cannot be read"), OSError(errno.EIO, "input/output error")), True),
        (chain(DatasetError("cannot be read"), DatasetError("damaged"), TimeoutError("slow")), True),
        (chain(DatasetError("cannot be read"), FileNotFoundError(errno.ENOENT, "no such file")), False),
        (chain(DatasetError("cannot be read"), OSError("Corrupt snappy data")), False),
    ],
    ids=lambda value: repr(value) if isinstance(value, BaseException) else str(value),
)
def test_faults_of_storage_that_may_pass_are_told_from_bad_data(error, wanted):
    assert is_transient(error) is wanted


OPENED: Counter = Counter()
"""How often each file was opened, by name."""


@dataclass(frozen=True)
class FlakyStorage(Storage):
    """A local folder whose files fail with `error_number` the first `num_failures` times that they are opened."""

    num_failures: int = 2
    error_number: int = errno.EIO

    def size_bytes(self, name):
        OPENED[name] += 1
        if OPENED[name] <= self.num_failures:
            raise OSError(self.error_number, "the storage did not answer", name)
        return super().size_bytes(name)


def flaky_context(root, **options):
    dataset = open_dataset(str(root), cameras=[])
    # Which columns are there is read from the first file when it is first asked for: before the storage fails.
    assert dataset.row_features
    flaky = replace(dataset, meta=replace(dataset.meta, storage=FlakyStorage(str(root), **options)))
    flaky.__dict__["row_features"] = dataset.row_features
    OPENED.clear()
    return BlockContext((flaky,), DecodeSpec())


def assert_spread(waits, around):
    """Require a wait around each of these, by half to all sides."""
    assert len(waits) == len(around)
    assert all(0.5 * middle <= wait <= 1.5 * middle for wait, middle in zip(waits, around, strict=True))


def test_storage_that_fails_twice_and_then_works_gives_right_rows(root, context):
    waits = []
    flaky = flaky_context(root, num_failures=2)

    table = read_block(flaky, [request(2, 0, 12)], waits.append)

    (block,) = open_block(flaky, table)
    block.check()
    assert block.columns["frame_index"].tolist() == list(range(12))
    assert_spread(waits, [0.5, 2.0])


def test_storage_that_keeps_failing_becomes_the_error_of_the_block(root):
    waits = []
    flaky = flaky_context(root, num_failures=1000)

    table = read_block(flaky, [request(2, 0, 12)], waits.append)

    (block,) = open_block(flaky, table)
    assert len(table) == 12
    assert_spread(waits, [0.5, 2.0, 8.0])
    # No bad data: it may not be left out.
    with pytest.raises(DownloadError, match=r"file-000\.parquet': the storage did not answer"):
        block.check()


def test_missing_file_is_not_tried_again(root):
    waits = []
    flaky = flaky_context(root, num_failures=1000, error_number=errno.ENOENT)

    table = read_block(flaky, [request(2, 0, 12)], waits.append)

    assert waits == []
    assert len(table) == 12
