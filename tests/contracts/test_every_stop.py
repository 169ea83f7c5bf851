"""A stop after any batch of an epoch, restored in a process that knows nothing else: the same rest, pixels included."""

import json
import os
import sys
from itertools import cycle

import pytest
import ray
from attempts import wait_for
from batches import MODES, assert_equals_samples, digest_of, frames_of, planned_epoch
from ray import cloudpickle

from raypipe.pipeline import Pipeline

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


WAYS = (("rank", "ray"), ("cluster", "ray"), ("rank", "local"))
"""Where frames are decoded, and what brings the rows."""


@ray.remote(num_cpus=0, max_calls=1)
def finish_epoch(pipe, transport, state):
    """Return the process, and the digest of every batch that is left of an epoch with the state after it.

    Runs in a new process, which ends with it.
    """
    loader = pipe.loader(transport=transport, progress=False)
    loader.load_state_dict(json.loads(state))
    return os.getpid(), [(digest_of(batch), loader.state_dict()) for batch in loader]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(300)
def test_rest_after_every_stop_is_identical_in_a_new_process(varied):
    # One rank that serves two lanes; what reads and decodes changes from process to process, and must not matter.
    dataset = varied["v3.0"]
    pipes = {
        mode: Pipeline(dataset, batch_size=10, seed=1, order={"live_spans": 3, "lanes": 2}, decode=decode)
        for mode, decode in MODES.items()
    }
    planned = pipes["rank"].plan()
    stops = range(1, planned.num_steps)

    loader = pipes["rank"].loader(progress=False)
    whole = [(batch, loader.state_dict()) for batch in loader]
    came = dict(zip(stops, _finish_after(stops, whole, pipes), strict=True))

    assert [frames_of(batch) for batch, _ in whole] == planned_epoch(planned, 0)
    for batch, _ in whole:
        assert_equals_samples(batch, dataset)
    wanted = [(digest_of(batch), state) for batch, state in whole]
    for stop, (way, _, rest) in came.items():
        assert rest == wanted[stop:], f"after batch {stop}, with {way}"
    assert len({os.getpid(), *(pid for _, pid, _ in came.values())}) == len(stops) + 1


def _finish_after(stops, whole, pipes):
    """Return the way, the process and the rest after every stop; two processes at once."""
    jobs = [(way, json.dumps(whole[stop - 1][1])) for stop, way in zip(stops, cycle(WAYS), strict=False)]
    finished = []
    for i in range(0, len(jobs), 2):
        pair = jobs[i : i + 2]
        rests = wait_for([finish_epoch.remote(pipes[way[0]], way[1], state) for way, state in pair])
        finished += [(way, *rest) for (way, _), rest in zip(pair, rests, strict=True)]
    return finished
