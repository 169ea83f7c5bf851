"""Damaged files and answers end as right data or as an error that names the file: past failures, and a short run.

`make fuzz MINUTES=30` is the long run.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fuzz import CORPUS, FAILURES, SITES, Counts, read_corpus, run_corpus, run_site

NUM_INPUTS = 120
"""Of all sites together, by their weight; each has a few."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def outcomes():
    return run_corpus()


@pytest.mark.parametrize("name", [kept["name"] for kept in read_corpus()])
def test_a_past_failure_is_right_data_or_an_error_that_names_the_file(name, outcomes):
    assert not outcomes[name].startswith(FAILURES), f"{outcomes[name]}: {name} of {CORPUS.name}"


def test_the_inputs_of_a_short_run_end_as_right_data_or_as_an_error_that_names_the_file():
    counts, weights = Counts(), {name: site.weight for name, site in SITES.items()}
    shares = {name: max(4, NUM_INPUTS * weight // sum(weights.values())) for name, weight in weights.items()}

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: run_site(name, 0, shares[name], counts), shares))

    assert not counts.failures, counts.describe()
    assert counts.num_inputs == sum(shares.values())
