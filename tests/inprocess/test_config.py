import pickle
import warnings
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.dataset import open_dataset
from raypipe.decode.kept import check_of
from raypipe.decode.spec import DecodeSpec, KeepSpec, make_keep
from raypipe.errors import ConfigError
from raypipe.feed import BadDataSpec
from raypipe.loader import LoaderSettings, LoaderSpec
from raypipe.pipeline import Pipeline, PipelineParts
from raypipe.pipeline import config as config_module
from raypipe.pipeline.config import row_bytes
from raypipe.plan import BatchSpec, OrderSpec

WINDOW = {"action": [0.0, 0.1, 0.2]}


@pytest.fixture(scope="module")
def dataset(tiny_dataset):
    return open_dataset(str(tiny_dataset))


def test_parts_may_be_specs_or_dicts(dataset):
    as_dicts = Pipeline(
        dataset,
        batch_size={"size": 4, "scope": "global"},
        seed=3,
        order={"live_spans": 8, "span_frames": 16, "clip_frames": 4},
    )
    as_specs = Pipeline(
        dataset,
        batch_size=BatchSpec(size=4, scope="global"),
        seed=3,
        order=OrderSpec(seed=3, live_spans=8, span_frames=16, clip_frames=4),
    )

    assert as_dicts.config == as_specs.config


def test_windows_in_seconds_become_the_datasets(dataset):
    pipe = Pipeline(dataset, batch_size=4, seed=0, delta_timestamps=WINDOW)

    assert pipe.config.dataset.window.offsets == {"action": (0, 1, 2)}


@pytest.mark.parametrize("name", ["frame_index", "episode_index", "task_index"])
def test_a_column_that_says_which_sample_it_is_has_no_window(dataset, name):
    with pytest.raises(ConfigError, match=f"{name} cannot have a window"):
        Pipeline(dataset.windowed(offsets={name: [0, 1]}), batch_size=4, seed=0)


def test_enough_memory_keeps_whole_episodes_and_as_many_live_spans_as_mix_better(dataset):
    config = Pipeline(dataset, batch_size=4, seed=0).config

    assert (config.order.span_frames, config.order.live_spans, config.order.clip_frames) == ("episode", 1024, 4)


def test_given_orders_are_not_changed_by_the_budget(dataset):
    order = {"live_spans": 4, "span_frames": "episode", "clip_frames": 3}

    config = Pipeline(dataset, batch_size=4, seed=0, live_bytes=300_000, order=order).config

    assert (config.order.span_frames, config.order.live_spans, config.order.clip_frames) == ("episode", 4, 3)
    assert config.derived == frozenset()


def test_what_is_not_given_is_chosen_and_noted(dataset):
    config = Pipeline(dataset, batch_size=4, seed=0, order={"live_spans": 4}).config

    assert (config.order.span_frames, config.order.clip_frames) == ("episode", 4)
    assert config.derived == {"span_frames", "clip_frames"}


def test_blocks_are_packed_by_size(dataset, tiny_dataset, monkeypatch):
    rows_only = Pipeline(open_dataset(str(tiny_dataset), cameras=[]), batch_size=4, seed=0).config
    with_cameras = Pipeline(dataset, batch_size=4, seed=0, order={"live_spans": 128}).config

    assert rows_only.spans_per_block() == 64
    assert with_cameras.spans_per_block() == 128 // 8
    mean = dataset.meta.num_frames // len(dataset.meta.episodes)
    monkeypatch.setattr(config_module, "_ROW_BLOCK_BYTES", 3 * mean * row_bytes(dataset))
    assert with_cameras.spans_per_block() == 3


def test_live_bytes_are_those_of_rows_and_decoded_frames(dataset):
    order = {"live_spans": 2, "span_frames": "episode", "clip_frames": 2}

    pipe = Pipeline(dataset, batch_size=4, seed=0, order=order)

    frame_bytes, rows = 2 * 64 * 64 * 3, (12 + 9) * 200
    # Two batches in memory of their own; the clips of the next, of 4 batches ahead, and what is left of two clips.
    assert 3 * 4 * frame_bytes <= pipe.live_bytes() <= ((2 + 5) * 4 + 2 * 2) * frame_bytes + rows


def test_a_pipeline_says_what_it_picked(dataset):
    told = repr(Pipeline(dataset, batch_size=4, seed=0, order={"live_spans": 8, "span_frames": 16}))

    assert "batch of 4 a rank, seed 0, spans of 16 frames, 8 live, clips of 4, decode auto at 1.10 times" in told


def test_a_lost_state_is_rebuilt_from_the_step(dataset):
    pipe = Pipeline(dataset, batch_size=4, seed=0)
    num_steps = pipe.plan().num_steps

    state = pipe.state_at(2 * num_steps + 3)

    assert (state["epoch"], state["legs"][0]["frames_per_lane"]) == (2, 12)


def test_a_pipeline_pickles(dataset):
    pipe = Pipeline(dataset, batch_size=4, seed=0, delta_timestamps=WINDOW)

    again = pickle.loads(pickle.dumps(pipe))

    assert again.config.order == pipe.config.order
    assert again.plan().plan.fingerprint == pipe.plan().plan.fingerprint


BAD = {
    "part like an argument": ({"delta_timestamp": {}}, "no part 'delta_timestamp'; did you mean 'delta_timestamps'"),
    "windows in frames": ({"offsets": {}}, r"'offsets': windows in frames are rp.Pipeline\(ds.windowed\(offsets="),
    "ranks": ({"world_size": 2}, r"'world_size': ranks are pipe.loaders\(world_size\)"),
    "batch as text": ({"batch_size": "4"}, "batch_size must be an integer of at least 1, got '4'"),
    "actions as text": ({"actions": "relative"}, "actions must be an ActionSpec or a dict"),
    "mask of episodes": ({"selection": {"episodes": [True, False]}}, "episodes has True; give whole numbers"),
    "unknown part": ({"ordr": {}}, "no part 'ordr'"),
    "unknown field": ({"order": {"live_span": 3}}, "order has no field 'live_span'; did you mean 'live_spans'"),
    "wrong type": ({"decode": 3}, "decode must be a DecodeSpec or a dict"),
    "unknown where": ({"decode": {"where": "gpu"}}, "decode where is 'gpu'"),
    "when of before": ({"decode": {"when": "exit"}}, "decode has no field 'when'"),
    "no clip": ({"order": {"clip_frames": 0}}, "clip_frames must be an integer of at least 1 or 'span', got 0"),
    "half a clip": ({"order": {"clip_frames": 2.5}}, "clip_frames must be an integer of at least 1 or 'span', got 2.5"),
    "clips of two datasets": ({"order": {"clip_frames": [2, 3]}}, "is for 2 datasets, and there is 1"),
    "no room": ({"live_bytes": 50_000}, "live_bytes=50,000 does not hold the decoded frames of one batch"),
    "cuda on the cluster": ({"decode": {"where": "cluster", "device": "cuda"}}, "needs where='rank'"),
    "odd resize": ({"decode": {"resize": (0, 3)}}, "resize"),
    "no threads": ({"decode": {"num_threads": 0}}, "num_threads must be an integer of at least 1 or 'assigned', got 0"),
    "half a thread": ({"decode": {"num_threads": 1.5}}, "num_threads must be an integer of at least 1"),
    "a video and a half": ({"decode": {"open_videos": 1.5}}, "open_videos must be an integer of at least 1, got 1.5"),
    "no device": ({"decode": {"device": None}}, "decode device is None; give 'cpu' or 'cuda'"),
    "unknown episode": ({"selection": {"episodes": (99,)}}, "no episode 99"),
    "nothing left": ({"selection": {"drop_first_frames": 50}}, "no frame is left"),
    "no blocks": ({"feed": {"spans_per_block": 0}}, "spans_per_block must be at least 1"),
    "empty batch": ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    "unknown batch field": ({"batch_size": {"sise": 4}}, "batch_size has no field 'sise'; did you mean 'size'"),
    "unknown window": ({"delta_timestamps": {"actoin": [0.0]}}, "did you mean 'action'"),
    "workers": ({"num_workers": 8}, "no part 'num_workers': a loader reads and decodes in threads .*'num_threads'"),
    "shuffle": (
        {"shuffle": True},
        r"'shuffle': it is a field of order: rp.Pipeline\(\.\.\., order=\{'shuffle'",
    ),
    "resize": ({"resize": 224}, "it is a field of decode"),
    "transform": ({"transform": print}, r"it is a setting of the loader: pipe.loader\(transform=\.\.\.\)"),
    "image transforms": ({"image_transforms": print}, r"a change of samples is pipe.loader\(sample_transform="),
    "threads": ({"num_threads": 2}, "it is a field of decode"),
    "drop last": ({"drop_last": True}, "order={'tail': 'drop'}"),
    "bytes of nothing": ({"live_bytes": "2 apples"}, "live_bytes must be a number of bytes such as .*'2 apples'"),
    "no such side": ({"decode": {"resize": -3}}, "a side must be an integer of at least 1"),
    "size of a truth": ({"decode": {"resize": True}}, "one number for both"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_request_is_an_error_before_anything_starts(dataset, case):
    arguments, message = BAD[case]

    with pytest.raises(ConfigError, match=message):
        Pipeline(dataset, **{"batch_size": 4, "seed": 0, **arguments})


def test_a_batch_size_may_be_a_number_of_numpy(dataset):
    assert Pipeline(dataset, batch_size=np.int64(4), seed=0).config.batch == BatchSpec(size=4)


@pytest.mark.parametrize("name", ["", "a/b", "../train"])
def test_a_name_of_a_loader_that_names_no_file_is_refused(dataset, name):
    with pytest.raises(ConfigError, match="also names its files in a checkpoint"):
        Pipeline(dataset, batch_size=4, seed=0).loaders(1, name=name)


@pytest.mark.parametrize("name", ["shuffle", "num_workers", "batch_size"])
def test_a_loader_says_where_a_setting_lives(dataset, name):
    with pytest.raises(ConfigError, match=f"a loader has no setting '{name}': .*(Pipeline|num_threads)"):
        Pipeline(dataset, batch_size=4, seed=0).loader(**{name: 1})


@pytest.mark.parametrize("settings", [{"prefetch_batches": "4"}, {"num_epochs": None}, {"num_threads": "two"}])
def test_a_setting_of_a_loader_of_a_wrong_type_is_said_to_have_one(dataset, settings):
    with pytest.raises(ConfigError, match=rf"'{next(iter(settings))}': .* has a value of a wrong type"):
        Pipeline(dataset, batch_size=4, seed=0).loader(**settings)


def test_the_keywords_of_a_loader_are_the_fields_of_its_spec():
    assert list(LoaderSettings.__annotations__) == [one.name for one in fields(LoaderSpec)]


def test_the_parts_of_a_pipeline_name_every_field_of_the_bad_data_spec():
    assert {one.name for one in fields(BadDataSpec)} < set(PipelineParts.__annotations__)


def test_a_path_is_opened(tiny_dataset, dataset):
    for root in (str(tiny_dataset), tiny_dataset):
        pipe = Pipeline(root, batch_size=4, seed=0)

        assert pipe.config.order == Pipeline(dataset, batch_size=4, seed=0).config.order
        assert pipe.config.dataset.meta.root == dataset.meta.root


def test_what_is_no_dataset_is_refused_by_its_type(dataset):
    with pytest.raises(ConfigError, match="or of a path, URI or Hub id; got a list"):
        Pipeline([dataset], batch_size=4, seed=0)


def test_bytes_may_be_written_with_a_unit(dataset):
    pipe = Pipeline(
        dataset,
        batch_size=4,
        seed=0,
        live_bytes="1.5GB",
        cache={"max_bytes": "200 GB", "whole_bytes": "1MiB"},
        keep_frames={"max_bytes": "3g"},
    )

    assert pipe.config.budget.live_bytes == 1_500_000_000
    assert (pipe.config.cache.max_bytes, pipe.config.cache.whole_bytes) == (200 * 10**9, 1 << 20)
    assert pipe.config.keep.max_bytes == 3 * 10**9


def test_one_number_is_both_sides_of_a_frame(dataset):
    decode = Pipeline(dataset, batch_size=4, seed=0, decode={"resize": 24}).config.decode

    assert decode == DecodeSpec(resize=(24, 24)) == DecodeSpec(resize=24)
    assert DecodeSpec(resize={"top": 8, "wrist": (4, 6)}).resize == {"top": (8, 8), "wrist": (4, 6)}


def test_a_batch_that_is_larger_than_the_dataset_warns(dataset):
    with pytest.warns(UserWarning, match=r"batch_size=5000 is more than the \d+ frames of an epoch"):
        Pipeline(dataset, batch_size=5000, seed=0)


def test_decode_spec_tells_the_size_of_a_frame(dataset):
    feature = dataset.features["observation.images.top"]

    assert DecodeSpec().frame_shape(feature) == (64, 64, 3)
    assert DecodeSpec(resize=(32, 48)).frame_shape(feature) == (32, 48, 3)


def test_composing_warns_of_nothing(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pipeline(dataset, batch_size=4, seed=0)


KEY = bytes(range(16))


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        (200e9, 200 * 10**9),
        (5, 5),
        ("200GB", 200 * 10**9),
        ("1.5 gib", 3 << 29),
        ("7k", 7000),
        ("64", 64),
        ("200e9", 200 * 10**9),
        ("1.5E3", 1500),
    ],
)
def test_sizes_are_numbers_or_texts_with_a_unit(given, num_bytes):
    assert KeepSpec(max_bytes=given).max_bytes == num_bytes


@pytest.mark.parametrize("given", ["much", "-3GB", "0", 0, True, None, float("nan"), float("inf"), "1e9XB", [1]])
def test_a_size_that_is_none_is_an_error_that_shows_it(given):
    with pytest.raises(ConfigError, match="max_bytes of keep_frames must be a number of bytes"):
        make_keep({"max_bytes": given})


def test_keep_frames_is_off_on_or_says_what_differs():
    assert make_keep(False) is None
    assert make_keep(True) == KeepSpec()
    assert make_keep({"folder": "/scratch"}) == KeepSpec(folder="/scratch", max_bytes="disk")
    with pytest.raises(ConfigError, match="did you mean 'max_bytes'"):
        make_keep({"max_byte": 5})
    with pytest.raises(ConfigError, match="must be True, False or a dict"):
        make_keep("/scratch")
    with pytest.raises(ConfigError, match="a folder on a local disk"):
        make_keep({"folder": "s3://bucket/frames"})


@given(st.integers(1, 20_000), st.integers(0, 2**32), st.data())
def test_a_check_finds_changed_moved_and_misplaced_bytes(size, seed, data):
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    check = check_of(KEY, 7, pixels)
    place = data.draw(st.integers(0, size - 1))
    changed, moved = pixels.copy(), np.roll(pixels, 1)
    changed[place] ^= data.draw(st.integers(1, 255))

    assert check_of(KEY, 7, pixels.copy()) == check
    assert check_of(KEY, 7, changed) != check
    assert np.array_equal(moved, pixels) or check_of(KEY, 7, moved) != check
    assert check_of(KEY, 8, pixels) != check
    assert check_of(KEY[::-1], 7, pixels) != check


def test_a_relative_folder_is_the_one_of_the_process_that_named_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert KeepSpec(folder="kept").folder == str(tmp_path / "kept")
    assert KeepSpec(folder="~/kept").folder == "~/kept"
