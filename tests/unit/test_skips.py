"""The policy for bad data: how many episodes may be bad, and what is said when there are more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ConfigError, DatasetError
from raypipe.feed import BadDataSpec, BadSpan
from raypipe.feed.agreement import SkipList


def bad_span(episode, dataset=0, start=0):
    return BadSpan(
        epoch=0, dataset=dataset, root="/data/pusht", episode=episode, start=start, stop=start + 5, why="is truncated"
    )


def skip_list(max_bad_episodes, num_episodes):
    return SkipList(BadDataSpec(on_bad_episode="skip", max_bad_episodes=max_bad_episodes), num_episodes)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40), st.integers(0, 12))
def test_list_ends_the_run_at_the_first_episode_beyond_the_budget(reported, budget):
    skips = skip_list(budget, 30)
    seen = set()

    for dataset, episode in reported:
        seen.add((dataset, episode))
        if len(seen) > budget:
            with pytest.raises(DatasetError, match=rf"{len(seen)} of 30 episodes (is|are) bad"):
                skips.add(bad_span(episode, dataset))
        else:
            skips.add(bad_span(episode, dataset))

    assert {(span.dataset, span.episode) for span in skips.spans()} == seen


def test_error_beyond_the_budget_names_every_bad_episode_and_the_command():
    skips = skip_list(1, 50)
    skips.add(bad_span(7))

    with pytest.raises(DatasetError) as raised:
        skips.add(bad_span(9))

    assert "episode 7 of '/data/pusht', frames 0 to 4: is truncated" in str(raised.value)
    assert "episode 9 of" in str(raised.value)
    assert "raypipe validate /data/pusht" in str(raised.value)
    assert "max_bad_episodes=1" in str(raised.value)


@pytest.mark.parametrize(
    ("most", "num_episodes", "budget"),
    [(0, 100, 0), (0.0, 100, 0), (3, 100, 3), (0.05, 100, 5), (0.01, 50, 1), (0.999, 1000, 999), (1.0, 100, 1)],
)
def test_budget_is_a_count_or_a_share(most, num_episodes, budget):
    assert BadDataSpec(max_bad_episodes=most).budget(num_episodes) == budget


@pytest.mark.parametrize("most", [-1, 1.5, "many", True, None])
def test_budget_that_is_no_number_of_episodes_is_refused(most):
    with pytest.raises(ConfigError, match="max_bad_episodes must be"):
        BadDataSpec(max_bad_episodes=most)


def test_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'raise', 'skip'"):
        BadDataSpec(on_bad_episode="ignore")
