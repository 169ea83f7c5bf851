"""A state says where its dataset was read, and a run that goes on from a copy is told so."""

import shutil
import warnings

import pytest
from batches import frames_of_all, local_loader, rows_spec

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset


@pytest.fixture
def roots(tmp_path):
    """The same dataset in two places."""
    first = write_dataset(tmp_path / "first", rows_spec())
    shutil.copytree(first, tmp_path / "second")
    return str(first), str(tmp_path / "second")


def make_pipe(root):
    return Pipeline(open_dataset(root), batch_size=4, seed=1, order={"live_spans": 3})


def test_a_state_names_root_revision_and_layout(roots):
    state = local_loader(make_pipe(roots[0])).state_dict()

    assert state["source"]["root"] == roots[0]
    assert state["source"]["revision"] == "unversioned"
    assert "v3.0" in state["source"]["layout"]


def test_a_run_goes_on_from_a_copy_with_a_warning_that_names_both(roots):
    state, moved = make_pipe(roots[0]).state_at(3), local_loader(make_pipe(roots[1]))

    with pytest.warns(UserWarning, match=rf"root was '{roots[0]}' and is '{roots[1]}'"):
        moved.load_state_dict(state)

    assert frames_of_all(moved) == frames_of_all(list(local_loader(make_pipe(roots[0])))[3:])


def test_a_run_goes_on_in_its_place_without_a_word(roots):
    loader = local_loader(make_pipe(roots[0]))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_state_dict(make_pipe(roots[0]).state_at(3))

    assert loader.state_dict() == make_pipe(roots[0]).state_at(3)


def test_a_state_without_a_source_is_gone_on_from(roots):
    state = make_pipe(roots[0]).state_at(3)
    del state["source"]
    loader = local_loader(make_pipe(roots[0]))

    loader.load_state_dict(state)

    assert len(list(loader)) == len(list(local_loader(make_pipe(roots[0])))) - 3
