"""`RankLoader` in the hands of people: odd arguments, changes in the middle of a loop, evaluation, other processes."""

import multiprocessing
import sys
import threading
from itertools import islice

import numpy as np
import pytest
import torch
from batches import frames_of, frames_of_all, frames_of_dataset, local_loader, planned_epoch, rows_spec

from raypipe.account import lay_out
from raypipe.account.verdict import check_account
from raypipe.dataset import open_dataset
from raypipe.decode import DecodeSpec
from raypipe.errors import ConfigError
from raypipe.pipeline import Pipeline
from raypipe.plan import SINGLE_DATASET, plan_epoch
from raypipe.testing import write_dataset


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    """57 frames in an epoch of 15 batches."""
    dataset = open_dataset(str(write_dataset(tmp_path_factory.mktemp("rows") / "dataset", rows_spec())))
    return Pipeline(dataset, batch_size=4, seed=1, order={"live_spans": 3})


@pytest.fixture(scope="module")
def evaluation(pipe):
    return Pipeline(pipe.config.dataset, batch_size=4, seed=1, order={"shuffle": False})


@pytest.mark.parametrize("odd", [2.5, 2.0, "3", True, None, -1, 1 << 63], ids=repr)
def test_number_that_is_none_is_refused_at_once(pipe, odd):
    loader = local_loader(pipe)

    with pytest.raises(ConfigError, match=rf"num_steps must be an integer of at least 0.*got {odd!r}"):
        loader.steps(odd)
    with pytest.raises(ConfigError, match=rf"epoch must be an integer of at least 0.*got {odd!r}"):
        loader.set_epoch(odd)

    assert loader.state_dict() == pipe.state_at(0)


def test_numbers_of_numpy_are_numbers(pipe):
    loader = local_loader(pipe)

    loader.set_epoch(np.int64(2))

    assert len(list(loader.steps(np.int32(3)))) == 3
    assert type(loader.state_dict()["epoch"]) is int


CHANGES = {
    "close": lambda loader: loader.close(),
    "set_epoch": lambda loader: loader.set_epoch(4),
    "load_state_dict": lambda loader: loader.load_state_dict(loader.state_dict()),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("begin", [iter, lambda loader: loader.steps(40)], ids=["iter", "steps"])
def test_change_in_the_middle_of_a_loop_ends_it_with_an_error(pipe, name, begin):
    loader = local_loader(pipe)
    batches = begin(loader)
    next(batches)
    CHANGES[name](loader)
    state = loader.state_dict()

    with pytest.raises(ConfigError, match=rf"{name}\(.*\) during the iteration has ended it after 1 of 15 batches"):
        next(batches)

    assert loader.state_dict() == state
    assert len(list(loader)) == (15 if name == "set_epoch" else 14)


@pytest.mark.timeout(120)
def test_loop_that_waits_for_a_batch_is_told_that_another_thread_has_ended_it(pipe):
    is_held, goes_on = threading.Event(), threading.Event()

    def hold(batch, seeds):
        is_held.set()
        goes_on.wait()
        return batch

    def close():
        is_held.wait()
        # The thread that puts batches together ends with the one that it holds.
        threading.Timer(0.05, goes_on.set).start()
        loader.close()

    loader = local_loader(pipe, transform=hold)
    threading.Thread(target=close).start()

    with pytest.raises(ConfigError, match=r"close\(\) during the iteration"):
        list(loader)


@pytest.mark.parametrize("name", CHANGES)
def test_change_after_the_last_batch_loses_nothing_and_is_no_error(pipe, name):
    loader = local_loader(pipe)

    came = []
    for batch in loader:
        came.append(frames_of(batch))
        if len(came) == 15:
            CHANGES[name](loader)

    assert came == planned_epoch(pipe.plan(), 0)
    assert loader.epoch == (4 if name == "set_epoch" else 1)


def test_evaluation_that_is_broken_off_starts_over(evaluation):
    loader = local_loader(evaluation)
    whole = planned_epoch(evaluation.plan(), 0)

    came = []
    for stop in (9, 3, 15, 6):
        assert len(loader) == 15
        came.append([frames_of(batch) for batch in islice(loader, stop)])
    came.append([frames_of(batch) for batch in loader])

    assert came == [whole[:9], whole[:3], whole, whole[:6], whole]
    assert loader.epoch == 2


def test_evaluation_goes_on_once_from_a_loaded_state(evaluation):
    stopped, resumed = local_loader(evaluation), local_loader(evaluation)
    list(islice(stopped, 5))

    resumed.load_state_dict(stopped.state_dict())
    lengths = [resumed.steps_left]
    first = [frames_of(batch) for batch in islice(resumed, 2)]
    lengths.append(resumed.steps_left)
    second = [frames_of(batch) for batch in islice(resumed, 2)]

    whole = planned_epoch(evaluation.plan(), 0)
    assert (first, second, lengths) == (whole[5:7], whole[:2], [10, 15])
    assert resumed.state_dict() == evaluation.state_at(2)


def test_evaluation_by_steps_goes_on_where_it_stopped(evaluation):
    loader = local_loader(evaluation)

    came = [frames_of(batch) for num_steps in (4, 7, 4) for batch in loader.steps(num_steps)]

    assert came == planned_epoch(evaluation.plan(), 0)


def test_account_of_an_evaluation_that_starts_over_is_exact(evaluation):
    loader = local_loader(evaluation)
    list(islice(loader, 6))
    list(islice(loader, 4))

    whole = list(loader)

    episodes = evaluation.config.dataset.meta.episodes
    axis = lay_out([SINGLE_DATASET], [(episodes.episode_index, episodes.length)])
    (verdict,) = check_account(evaluation.config.index(), axis, loader.account(), ())
    assert verdict.is_exact, verdict.describe()
    assert verdict.num_emitted == len(frames_of_all(whole)) == len(frames_of_dataset(evaluation.config.dataset))


class Wrapped(torch.utils.data.IterableDataset):
    """What people write to give a loader to a torch DataLoader."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self):
        return iter(self._loader)


# Python warns of forks where there are threads.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.timeout(120)
def test_torch_dataloader_with_workers_around_a_loader_is_an_error(pipe):
    around = torch.utils.data.DataLoader(Wrapped(local_loader(pipe)), batch_size=None, num_workers=2)

    with pytest.raises(ConfigError, match=r"worker 0 of the 2 of a torch DataLoader.*num_workers=0"):
        next(iter(around))


def test_torch_dataloader_without_workers_around_a_loader_gives_its_batches(pipe):
    around = torch.utils.data.DataLoader(Wrapped(local_loader(pipe)), batch_size=None)

    assert [frames_of(batch) for batch in around] == planned_epoch(pipe.plan(), 0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.timeout(120)
def test_forked_process_that_iterates_the_loader_of_its_parent_is_told_so(pipe):
    fork = multiprocessing.get_context("fork")
    loader, told = local_loader(pipe), fork.SimpleQueue()

    child = fork.Process(target=tell_error, args=(loader, told))
    child.start()
    child.join()

    assert f"in {child.pid}, a fork of it" in told.get()
    assert len(list(loader)) == 15


def tell_error(loader, told):
    try:
        told.put(str(frames_of(next(iter(loader)))))
    except ConfigError as error:
        told.put(str(error))


@pytest.mark.timeout(60)
def test_forked_process_that_goes_on_with_a_loop_of_its_parent_is_told_so(pipe):
    fork = multiprocessing.get_context("fork")
    loader, told = local_loader(pipe), fork.SimpleQueue()
    batches = iter(loader)
    next(batches)

    child = fork.Process(target=tell_error, args=(batches, told))
    child.start()
    child.join(timeout=30)
    child.kill()

    assert not told.empty(), "the child waits for threads that it does not have"
    assert f"in {child.pid}, a fork of it" in told.get()
    assert len(list(batches)) == 14


@pytest.mark.parametrize("device", ["gpu", "cudda:0", 3.5], ids=str)
def test_device_that_torch_does_not_know_is_refused(pipe, device):
    with pytest.raises(ConfigError, match=f"device is {device!r}, which torch does not know"):
        next(iter(local_loader(pipe, device=device)))


def test_device_that_is_not_here_is_refused_where_the_loader_is_iterated(pipe):
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    loader = local_loader(pipe, device="cuda")

    with pytest.raises(ConfigError, match="torch finds no CUDA device here"):
        next(iter(loader))


@pytest.mark.timeout(120)
def test_state_that_a_thread_takes_during_set_epoch_is_of_one_plan(pipe):
    loader, taken = local_loader(pipe), []
    loader.set_epoch(1)
    is_planning, goes_on = threading.Event(), threading.Event()

    def pause(frame, event, arg):
        if frame.f_code is plan_epoch.__code__:
            is_planning.set()
            goes_on.wait()

    def take():
        sys.settrace(pause)
        taken.append(loader.state_dict())

    thread = threading.Thread(target=take)
    thread.start()
    is_planning.wait()
    loader.set_epoch(2)
    goes_on.set()
    thread.join()

    assert taken == [pipe.state_at(15)]
    assert loader.state_dict() == pipe.state_at(30)
    assert [frames_of(batch) for batch in loader] == planned_epoch(pipe.plan(epoch=2), 0)


def test_iteration_that_is_refused_leaves_the_figures_of_the_running_one(pipe):
    loader = local_loader(pipe)
    batches = iter(loader)
    next(batches)
    before = loader.stats()

    with pytest.raises(ConfigError, match="being iterated already"):
        next(iter(loader))
    next(batches)

    after = loader.stats()
    assert after.first_batch_s == before.first_batch_s
    assert after.step_s > before.step_s


def test_device_may_be_one_of_torch(pipe):
    loader = pipe.loader(device=torch.device("cpu"))

    assert loader.settings.device == "cpu"
    assert next(iter(loader))["index"].device == torch.device("cpu")


def test_decoding_takes_a_device_of_torch_too(rows):
    assert Pipeline(rows, batch_size=4, seed=1, decode={"device": torch.device("cpu")}).config.decode == DecodeSpec()
