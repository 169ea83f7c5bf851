"""Damaged files and answers end as right data or as an error that names the file: past failures, and a short run.

`make fuzz MINUTES=30` is the long run.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fuzz import CORPUS, FAILURES, Counts, read_corpus, run_corpus, run_site

SHORT = ("rows", "old-meta", "mp4", "mixture")
NUM_INPUTS = 100


@pytest.fixture(scope="module")
def outcomes():
    return run_corpus()


@pytest.mark.parametrize("name", [kept["name"] for kept in read_corpus()])
def test_a_past_failure_is_right_data_or_an_error_that_names_the_file(name, outcomes):
    assert not outcomes[name].startswith(FAILURES), f"{outcomes[name]}: {name} of {CORPUS.name}"


def test_the_inputs_of_a_short_run_end_as_right_data_or_as_an_error_that_names_the_file():
    counts = Counts()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda site: run_site(site, 0, NUM_INPUTS, counts), SHORT))

    assert not counts.failures, counts.describe()
    assert counts.num_inputs == len(SHORT) * NUM_INPUTS
