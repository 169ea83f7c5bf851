import pickle
import warnings

import pytest

from raypipe import config as config_module
from raypipe.config import spans_per_block
from raypipe.dataset import open_dataset
from raypipe.decode.spec import DecodeSpec
from raypipe.errors import ConfigError
from raypipe.pipeline import Pipeline
from raypipe.plan import BatchSpec, OrderSpec
from raypipe.sizes import pixel_bytes, row_bytes

WINDOW = {"action": [0.0, 0.1, 0.2]}


@pytest.fixture(scope="module")
def dataset(tiny_dataset):
    return open_dataset(str(tiny_dataset))


def test_parts_may_be_specs_or_dicts(dataset):
    as_dicts = Pipeline(
        dataset, batch_size={"size": 4, "scope": "global"}, seed=3, order={"live_spans": 8, "span_frames": 16}
    )
    as_specs = Pipeline(
        dataset,
        batch_size=BatchSpec(size=4, scope="global"),
        seed=3,
        order=OrderSpec(seed=3, live_spans=8, span_frames=16),
    )

    assert as_dicts.config == as_specs.config


def test_windows_in_seconds_become_the_datasets(dataset):
    pipe = Pipeline(dataset, batch_size=4, seed=0, delta_timestamps=WINDOW)

    assert pipe.config.dataset.window.offsets == {"action": (0, 1, 2)}


@pytest.mark.parametrize("name", ["frame_index", "episode_index", "task_index"])
def test_a_column_that_says_which_sample_it_is_has_no_window(dataset, name):
    with pytest.raises(ConfigError, match=f"{name} cannot have a window"):
        Pipeline(dataset.windowed(offsets={name: [0, 1]}), batch_size=4, seed=0)


def test_enough_memory_keeps_whole_episodes(dataset):
    config = Pipeline(dataset, batch_size=4, seed=0).config

    assert (config.order.span_frames, config.order.live_spans, config.decode.when) == ("episode", 128, "block")


def test_a_large_batch_widens_the_live_window(dataset):
    assert Pipeline(dataset, batch_size=100, seed=0).config.order.live_spans == 200


def test_little_memory_decodes_as_a_batch_leaves(dataset):
    with pytest.warns(UserWarning, match="decoding each batch as it leaves"):
        config = Pipeline(dataset, batch_size=4, seed=0, live_bytes=100_000).config

    assert (config.decode.when, config.decode.where) == ("exit", "rank")


def test_given_spans_are_not_changed_by_the_budget(dataset):
    order = {"live_spans": 4, "span_frames": "episode"}

    config = Pipeline(dataset, batch_size=4, seed=0, live_bytes=100_000, order=order).config

    assert (config.order.span_frames, config.order.live_spans, config.decode.when) == ("episode", 4, "block")


def test_blocks_are_packed_by_size(dataset, tiny_dataset, monkeypatch):
    rows_only = Pipeline(open_dataset(str(tiny_dataset), cameras=[]), batch_size=4, seed=0).config
    with_cameras = Pipeline(dataset, batch_size=4, seed=0).config

    assert spans_per_block(rows_only, DecodeSpec(where="cluster")) == 64
    assert spans_per_block(with_cameras, DecodeSpec(where="rank")) == 128 // 8
    assert spans_per_block(with_cameras, DecodeSpec(where="cluster")) == 128 // 8
    mean = dataset.meta.num_frames // len(dataset.meta.episodes)
    episode_bytes = mean * (row_bytes(dataset) + pixel_bytes(dataset, DecodeSpec()))
    monkeypatch.setattr(config_module, "_PIXEL_BLOCK_BYTES", 3 * episode_bytes)
    assert spans_per_block(with_cameras, DecodeSpec(where="cluster")) == 3
    assert spans_per_block(with_cameras, DecodeSpec(where="rank")) == 128 // 8


def test_live_bytes_are_those_of_the_live_spans(dataset):
    order = {"live_spans": 2, "span_frames": "episode"}

    pipe = Pipeline(dataset, batch_size=4, seed=0, order=order)

    frame_bytes = 2 * 64 * 64 * 3
    longest_two = 12 + 9
    assert pipe.live_bytes() <= longest_two * (frame_bytes + 200)
    assert pipe.live_bytes() >= 12 * frame_bytes


def test_a_pipeline_says_what_it_picked(dataset):
    told = repr(Pipeline(dataset, batch_size=4, seed=0, order={"live_spans": 8, "span_frames": 16}))

    assert "batch of 4 a rank, seed 0, spans of 16 frames, 8 live, up to 1 MB at hand on one rank" in told


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
    "unknown part": ({"ordr": {}}, "no part 'ordr'"),
    "unknown field": ({"order": {"live_span": 3}}, "order has no field 'live_span'; did you mean 'live_spans'"),
    "wrong type": ({"decode": 3}, "decode must be a DecodeSpec or a dict"),
    "unknown where": ({"decode": {"where": "gpu"}}, "decode where is 'gpu'"),
    "exit on the cluster": ({"decode": {"where": "cluster", "when": "exit"}}, "runs on the rank"),
    "cuda on the cluster": ({"decode": {"where": "cluster", "device": "cuda"}}, "needs where='rank'"),
    "odd resize": ({"decode": {"resize": (0, 3)}}, "resize"),
    "no threads": ({"decode": {"num_threads": 0}}, "num_threads must be at least 1"),
    "unknown episode": ({"selection": {"episodes": (99,)}}, "no episode 99"),
    "nothing left": ({"selection": {"drop_first_frames": 50}}, "no frame is left"),
    "no blocks": ({"feed": {"spans_per_block": 0}}, "spans_per_block must be at least 1"),
    "empty batch": ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    "unknown batch field": ({"batch_size": {"sise": 4}}, "batch_size has no field 'sise'; did you mean 'size'"),
    "unknown window": ({"delta_timestamps": {"actoin": [0.0]}}, "did you mean 'action'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_request_is_an_error_before_anything_starts(dataset, case):
    arguments, message = BAD[case]

    with pytest.raises(ConfigError, match=message):
        Pipeline(dataset, **{"batch_size": 4, "seed": 0, **arguments})


def test_decode_spec_tells_the_size_of_a_frame(dataset):
    feature = dataset.features["observation.images.top"]

    assert DecodeSpec().frame_shape(feature) == (64, 64, 3)
    assert DecodeSpec(resize=(32, 48)).frame_shape(feature) == (32, 48, 3)


def test_composing_warns_of_nothing(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pipeline(dataset, batch_size=4, seed=0)
