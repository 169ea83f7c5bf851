"""Values of files that writers store unlike, packed into one block: each is that of its dataset alone."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from batches import local_loader

from raypipe.dataset import open_dataset
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import DatasetError
from raypipe.feed import BlockContext, SpanRequest, open_block, read_block
from raypipe.loader import span_columns
from raypipe.mixture import Mixture
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

LENGTH = 5
TOP = "observation.images.top"


def write_with(root, name, dtype, values, shape=(1,)):
    """Write a dataset of two episodes, of which every row has another of `values` under a name."""
    write_dataset(root, SynthSpec(lengths=(LENGTH, LENGTH), cameras=(), robot_type=root.name))
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"][name] = {"dtype": dtype, "shape": list(shape), "names": None}
    path.write_text(json.dumps(info))
    change_rows(root, lambda table: table.append_column(name, values))
    return str(root)


def change_rows(root, change):
    for path in sorted((root / "data").rglob("*.parquet")):
        pq.write_table(change(pq.read_table(path)), path)


def replaced(table, name, values):
    return table.set_column(table.column_names.index(name), name, values)


def mix(*roots, offsets=None, **options):
    mixture = Mixture(list(roots), progress=False, **options)
    return mixture if offsets is None else mixture.windowed(offsets=offsets)


def request(dataset, episode=0):
    return SpanRequest(epoch=0, dataset=dataset, lap=0, episode=episode, start=0, stop=LENGTH, lane=0, place=0)


def send(mixture, requests):
    context = Pipeline(mixture, batch_size=2, seed=0).config.block_context()
    return list(open_block(context, read_block(context, requests)))


def assert_as_alone(roots, name, offsets):
    """Require the spans of a block of all datasets to hold what each dataset gives alone."""
    blocks = send(mix(*roots, offsets=offsets), [request(number) for number in range(len(roots))])
    for root, block in zip(roots, blocks, strict=True):
        block.check()
        alone = open_dataset(root)
        alone = alone if offsets is None else alone.windowed(offsets=offsets)
        assert block.columns[name] == [alone.sample_of(0, frame)[name] for frame in range(LENGTH)]


LANGUAGE = {
    "style": [[{"role": "user", "content": f"do {i}", "style": None}] for i in range(2 * LENGTH)],
    "timestamp": [[{"role": "robot", "content": "x", "timestamp": float(i)}] * (i % 3) for i in range(2 * LENGTH)],
    "nothing": [None] * (2 * LENGTH),
    "plain": [f"text {i}" for i in range(2 * LENGTH)],
}


@pytest.mark.parametrize("offsets", [None, {"events": [-1, 0, 2]}], ids=["", "window"])
def test_language_of_unlike_structs_is_that_of_each_dataset(tmp_path, offsets):
    roots = [write_with(tmp_path / key, "events", "language", pa.array(values)) for key, values in LANGUAGE.items()]

    assert_as_alone(roots, "events", offsets)
    for root in roots:
        assert_as_alone([root], "events", offsets)


def test_language_values_of_two_samples_are_not_one_object(tmp_path):
    root = write_with(tmp_path / "one", "events", "language", pa.array(LANGUAGE["style"]))

    (block,) = send(mix(root, offsets={"events": [0, 0]}), [request(0)])

    first, second = block.columns["events"][0]
    assert first == second
    assert first is not second


NOTES = [f"note {i}" for i in range(2 * LENGTH)]
TEXTS = {
    "plain": pa.array(NOTES),
    "dictionary": pa.array(NOTES).dictionary_encode(),
    "large": pa.array(NOTES, pa.large_string()),
    "large-dictionary": pa.array([*NOTES[:-1], None], pa.large_string()).dictionary_encode(),
    "nothing": pa.nulls(2 * LENGTH),
    "lists": pa.array([[note] for note in NOTES]),
    "numbers": pa.array(range(2 * LENGTH)),
}


@pytest.mark.parametrize("offsets", [None, {"note": [0, 1]}], ids=["", "window"])
def test_texts_are_those_of_each_dataset_whichever_way_they_are_stored(tmp_path, offsets):
    roots = [write_with(tmp_path / key, "note", "string", values) for key, values in TEXTS.items()]

    assert_as_alone(roots, "note", offsets)


def test_several_texts_in_a_row_are_those_of_each_dataset(tmp_path):
    pairs = [[note, "second"] for note in NOTES]
    stored = {"lists": pa.array(pairs), "large": pa.array(pairs, pa.large_list(pa.large_string()))}
    roots = [write_with(tmp_path / key, "note", "string", values, (2,)) for key, values in stored.items()]

    assert_as_alone(roots, "note", None)
    assert_as_alone(roots, "note", {"note": [0, 1]})


def test_a_span_whose_images_are_no_bytes_is_bad_alone_in_its_block(tmp_path):
    camera = CameraSpec(name=TOP, height=32, width=48, kind="image")
    spec = SynthSpec(lengths=(LENGTH, LENGTH, LENGTH), cameras=(camera,), episodes_per_data_file=1)
    root = write_dataset(tmp_path / "odd", spec)
    images = iter([None, pa.array([[1, 2]] * LENGTH), None])
    change_rows(root, lambda table: replaced(table, TOP, next(images) or table.column(TOP)))
    context = BlockContext((open_dataset(str(root)).windowed(offsets={"action": [0, 1]}),), DecodeSpec())
    # The third lacks its file: it keeps the error that it has.
    sorted((root / "data").rglob("*.parquet"))[2].unlink()
    wanted = [SpanRequest(epoch=0, dataset=0, lap=0, episode=i, start=1, stop=3, lane=0, place=i) for i in range(3)]

    table = read_block(context, wanted)

    assert len(table) == 6
    blocks = list(open_block(context, table))
    assert [(block.request, block.num_rows) for block in blocks] == [(one, 2) for one in wanted]
    assert len(span_columns(context, blocks[0])[TOP]) == 2
    with pytest.raises(DatasetError, match=rf"there are no image bytes for '{TOP}' in episode 1 of "):
        span_columns(context, blocks[1])
    with pytest.raises(DatasetError, match=r"file-002.parquet"):
        blocks[2].check()


def test_images_are_those_of_each_dataset_whichever_way_they_are_stored(tmp_path):
    camera = CameraSpec(name=TOP, height=32, width=48, kind="image")
    changes = {
        "structs": lambda images: images,
        "large": lambda images: images.cast(pa.struct([("bytes", pa.large_binary()), ("path", pa.string())])),
        "bytes": lambda images: pa.array([image["bytes"] for image in images.to_pylist()]),
    }
    roots = []
    for key, change in changes.items():
        root = write_dataset(tmp_path / key, SynthSpec(lengths=(LENGTH, LENGTH), cameras=(camera,)))
        change_rows(root, lambda table, change=change: replaced(table, TOP, change(table.column(TOP).combine_chunks())))
        roots.append(str(root))
    mixture = mix(*roots, offsets={TOP: [0, 1]})
    alone = [open_dataset(root).windowed(offsets={TOP: [0, 1]}) for root in roots]

    batches = list(local_loader(Pipeline(mixture, batch_size=4, seed=0, feed={"spans_per_block": 6})))

    assert sum(len(batch["index"]) for batch in batches) == 3 * 2 * LENGTH
    for batch in batches:
        places = zip(*(batch[key].tolist() for key in ("dataset_index", "episode_index", "frame_index")), strict=True)
        for i, (number, episode, frame) in enumerate(places):
            assert torch.equal(batch[TOP][i], alone[number].sample_of(episode, frame)[TOP])


def ticks(tmp_path, values):
    whole = write_with(tmp_path / "whole", "tick", "int64", pa.array(np.resize(values, 2 * LENGTH)))
    real = write_with(tmp_path / "real", "tick", "float32", pa.array(np.full(2 * LENGTH, 0.5, np.float32)))
    return mix(whole, real)


@pytest.mark.parametrize("value", [2**24 + 1, -(2**24) - 1, 2**53 + 1, 2**60 + 1, 2**63 - 1, 2**63 - 2**40 + 1])
def test_whole_number_that_the_common_dtype_does_not_hold_is_an_error(tmp_path, value):
    first, second = send(ticks(tmp_path, [0, 1, value]), [request(0), request(1)])

    second.check()
    with pytest.raises(DatasetError, match=rf"'tick' of episode 0 of .*whole' has {value} in frame 2, .* as float32"):
        first.check()


def test_whole_numbers_that_the_common_dtype_holds_are_themselves(tmp_path):
    values = [2**24, -(2**24), 2**40, -(2**63), 7]

    first, _ = send(ticks(tmp_path, values), [request(0), request(1)])

    first.check()
    assert first.columns["tick"].dtype == np.float32
    assert [int(value) for value in first.columns["tick"]] == values
