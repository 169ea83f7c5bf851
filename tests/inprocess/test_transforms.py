"""What users change about samples and batches: in threads, in order, by the seeds of the samples."""

import subprocess
import sys
import threading
from itertools import islice

import pytest
import torch
from batches import frames_of, local_loader, rows_spec

from raypipe.decode import executors
from raypipe.errors import ConfigError
from raypipe.loader.transforms import SeededRandom
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    """57 frames in an epoch of 15 batches."""
    root = write_dataset(tmp_path_factory.mktemp("rows") / "dataset", rows_spec())
    return Pipeline(root, batch_size=4, seed=1, order={"live_spans": 3})


@pytest.fixture(scope="module")
def seen(tiny_dataset):
    return Pipeline(tiny_dataset, batch_size=4, seed=0)


LATE_THREAD = """
import threading
import time

import torch

from raypipe.decode import use_one_core

def start_late():
    threading.main_thread().join()
    # The interpreter closes its pools of threads first, and then waits for this thread.
    time.sleep(0.5)
    use_one_core()
    assert torch.get_num_threads() == 1

threading.Thread(target=start_late).start()
"""


def add_noise(sample, _):
    """Uses every way to ask torch for random numbers that torchvision's transforms use."""
    value = sample["action"]
    sample["noise"] = torch.stack(
        [
            torch.rand(()),
            torch.randint(0, 99, ()).float(),
            torch.randperm(9)[0].float(),
            torch.empty(()).uniform_(2, 3),
            torch.randn_like(value)[0],
            torch.normal(0.0, 1.0, (1,))[0],
        ]
    )
    return sample


def noise_by_frame(batches):
    return {
        frame: noise
        for batch in batches
        for frame, noise in zip(frames_of(batch), batch["noise"].tolist(), strict=True)
    }


def test_random_numbers_are_of_the_sample_whatever_thread_or_batch_has_it(pipe):
    other = Pipeline(pipe.config.dataset, batch_size=7, seed=1, order={"live_spans": 3})

    whole = list(local_loader(pipe, sample_transform=add_noise, num_threads=4))
    alone = list(local_loader(pipe, sample_transform=add_noise, num_threads=1))
    resumed = local_loader(other, sample_transform=add_noise, num_threads=2)
    resumed.load_state_dict(pipe.state_at(5))

    noise = noise_by_frame(whole)
    assert noise == noise_by_frame(alone)
    assert noise_by_frame(resumed).items() <= noise.items()
    assert len({tuple(values) for values in noise.values()}) == 57


def test_random_numbers_of_a_batch_transform_are_of_its_samples(pipe):
    def shift(batch, seeds):
        return {**batch, "noise": torch.rand(len(seeds)) + torch.zeros(len(seeds)).uniform_()}

    first, second = (noise_by_frame(local_loader(pipe, transform=shift)) for _ in range(2))

    assert first == second
    assert len(set(first.values())) == 57


def test_training_keeps_its_own_random_numbers_and_cores(pipe):
    before, cores = torch.get_rng_state(), torch.get_num_threads()

    list(local_loader(pipe, sample_transform=add_noise, transform=lambda batch, _: batch, num_threads=3))

    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    assert (torch.get_num_threads(), later) == (cores, [cores])


def test_threads_of_a_loader_use_one_core_each_and_training_its_own(seen, monkeypatch):
    """More OpenMP threads than cores in a process put those of training to sleep after every operation."""
    cores, decode = {"decode": set(), "assemble": set()}, executors.decode_clip
    monkeypatch.setattr(
        executors, "decode_clip", lambda *args: (cores["decode"].add(torch.get_num_threads()), decode(*args))[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def note(batch, _):
        cores["assemble"].add(torch.get_num_threads())
        return batch

    try:
        list(local_loader(seen, transform=note, num_threads=2))
        trains_on = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)

    assert cores == {"decode": {1}, "assemble": {1}}
    assert trains_on == 3


def test_a_thread_that_starts_while_the_program_ends_says_nothing():
    ended = subprocess.run([sys.executable, "-c", LATE_THREAD], capture_output=True, text=True, check=True, timeout=120)

    assert ended.stdout + ended.stderr == ""


def test_samples_are_changed_at_once_each_on_one_core_and_stay_in_order(pipe):
    meeting, cores = threading.Barrier(2, timeout=60), set()

    def meet(sample, _):
        # Only passes where two threads are here.
        meeting.wait()
        cores.add(torch.get_num_threads())
        sample["double"] = 2 * sample["index"]
        return sample

    batches = list(islice(local_loader(pipe, sample_transform=meet, num_threads=2), 3))

    plain = list(islice(local_loader(pipe), 3))
    assert [frames_of(batch) for batch in batches] == [frames_of(batch) for batch in plain]
    assert all(torch.equal(batch["double"], 2 * batch["index"]) for batch in batches)
    assert cores == {1}


def test_what_is_not_changed_stays_as_it_is_and_pictures_are_stacked(seen):
    camera = "observation.images.top"

    def halve(sample, _):
        assert sample[camera].dtype == torch.uint8
        return {**sample, camera: sample[camera][:, ::2, ::2], "task": sample["task"].upper(), "side": 3}

    plain = next(iter(local_loader(seen)))
    changed = next(iter(local_loader(seen, sample_transform=halve)))

    assert torch.equal(changed[camera], plain[camera][:, :, ::2, ::2])
    assert changed["task"] == [task.upper() for task in plain["task"]]
    assert changed["side"].tolist() == [3] * 4
    assert {name: type(value) for name, value in changed.items() if name != "side"} == {
        name: type(value) for name, value in plain.items()
    }
    assert torch.equal(changed["action"], plain["action"])


def test_torchvision_changes_a_sample_by_its_seed_in_any_thread(seen):
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="needs the package torchvision")
    camera, jitter = "observation.images.top", v2.Compose([v2.ColorJitter(0.5, 0.5, 0.5, 0.2), v2.RandomCrop(40)])

    def change(sample, _):
        return {**sample, camera: jitter(sample[camera].contiguous())}

    one, four = (next(iter(local_loader(seen, sample_transform=change, num_threads=count))) for count in (1, 4))

    assert one[camera].shape == (4, 3, 40, 40)
    assert torch.equal(one[camera], four[camera])


def lose_a_name(sample, seed):
    return {name: value for name, value in sample.items() if name != "task" or seed % 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sample, _: None, "must return a sample, a dict by name; it has returned a NoneType"),
        (lose_a_name, "the same names for every sample, and 'task' is in some only"),
        (
            lambda sample, _: {**sample, "index": torch.zeros(1 + int(sample["frame_index"]) % 3)},
            "gives 'index' unlike shapes",
        ),
    ],
)
def test_changes_that_make_no_batch_are_told(pipe, change, message):
    with pytest.raises(ConfigError, match=message):
        list(local_loader(pipe, sample_transform=change))


def test_batch_transform_without_a_return_is_an_error(pipe):
    with pytest.raises(ConfigError, match="transform must return a batch; it has returned None"):
        next(iter(pipe.loader(transform=lambda batch, _: batch.update(is_new=True))))


def test_error_of_a_sample_transform_reaches_the_training_loop(pipe):
    def fail(sample, _):
        raise ZeroDivisionError("in the user's code")

    with pytest.raises(ZeroDivisionError, match="in the user's code"):
        next(iter(local_loader(pipe, sample_transform=fail)))


def test_a_batch_on_a_gpu_is_the_one_of_the_cpu(seen):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def double(batch, _):
        return {**batch, "action": 2 * batch["action"]}

    for here, there in zip(
        local_loader(seen, transform=double), local_loader(seen, transform=double, device="cuda"), strict=True
    ):
        assert all(torch.equal(here[name], there[name].cpu()) for name in here if isinstance(here[name], torch.Tensor))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(3),
        lambda: torch.randint_like(torch.zeros(3), 1000),
        lambda: torch.randint_like(torch.zeros(3), low=5, high=1000),
        lambda: torch.rand_like(torch.zeros(2, 3, 4, 4), memory_format=torch.channels_last).flatten()[:3],
        lambda: torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample((3,)),
        lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
        lambda: torch.poisson(torch.full((3,), 100.0)),
        lambda: torch.empty(3).cauchy_(),
        lambda: torch.bernoulli(input=torch.full((64,), 0.5)),
    ],
    ids=["rand", "randint_like", "low", "memory_format", "Beta", "Dirichlet", "poisson", "cauchy", "bernoulli"],
)
def test_random_numbers_are_the_seeds_and_leave_those_of_training_alone(draw):
    before = torch.get_rng_state()

    drawn = []
    for seed in (1, 1, 2):
        with SeededRandom(seed):
            drawn.append(draw().tolist())

    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before)
