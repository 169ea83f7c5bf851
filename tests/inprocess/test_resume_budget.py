"""A run goes on with another batch size or memory budget, though both would lead to another order."""

import pytest
from batches import frames_of_all, frames_of_dataset, local_loader, varied_spec

from raypipe.dataset import open_dataset
from raypipe.errors import ResumeError
from raypipe.pipeline import Pipeline
from raypipe.testing import SynthSpec, write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    spec = SynthSpec(lengths=(200, 150, 90, 170), cameras=varied_spec().cameras[:1])
    return open_dataset(str(write_dataset(tmp_path_factory.mktemp("budget") / "dataset", spec)))


def make_pipe(dataset, num_frames, **parts):
    """A pipeline with room for so many decoded frames."""
    feature = dataset.features[dataset.spec.cameras[0]]
    live_bytes = num_frames * feature.width * feature.height * 3
    return Pipeline(dataset, **{"batch_size": 10, "seed": 2, "live_bytes": live_bytes, **parts})


def test_a_run_goes_on_with_another_memory_budget_and_batch_size(dataset):
    long, short = make_pipe(dataset, 800), make_pipe(dataset, 41, batch_size=20)
    begun = local_loader(long)
    first = list(begun.steps(7))

    resumed = local_loader(short)
    resumed.load_state_dict(begun.state_dict())
    rest = list(resumed)

    assert short.config.order.clip_frames != long.config.order.clip_frames
    assert resumed.state_dict()["order"]["clip_frames"] == long.config.order.clip_frames
    assert sorted(frames_of_all(first) + frames_of_all(rest)) == frames_of_dataset(dataset)
    assert len(rest[0]["index"]) == 20


@pytest.mark.parametrize("field", ["span_frames", "clip_frames"])
def test_what_is_given_still_has_to_be_that_of_the_state_within_an_epoch(dataset, field):
    pipe = make_pipe(dataset, 800)
    other = local_loader(make_pipe(dataset, 800, order={field: 50}))

    with pytest.raises(ResumeError, match=rf"{field} is .* It may change between epochs only"):
        other.load_state_dict(pipe.state_at(7))
    other.load_state_dict(pipe.state_at(2 * pipe.plan().num_steps))
    assert other.state_dict()["order"][field] == 50
