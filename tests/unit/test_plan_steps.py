import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.plan.rank import plan_steps


def sizes(share, extras, per_lane, tail, lanes=4):
    """Return for every step what each lane gives: new frames, and repeats."""
    steps = plan_steps(share, extras, position=0, per_lane=per_lane, tail=tail)
    edges = [steps.position_after(step) for step in range(steps.num_steps + 1)]
    return [
        [(edges[step + 1] - edges[step] + steps.extra(lane, step), steps.repeats(lane, step)) for lane in range(lanes)]
        for step in range(steps.num_steps)
    ]


@pytest.mark.parametrize(
    ("share", "extras", "tail", "expected"),
    [
        (10, 2, "short", [[4, 4, 4, 4], [4, 4, 4, 4], [3, 3, 2, 2]]),
        (8, 2, "short", [[4, 4, 4, 4], [2, 2, 2, 2], [3, 3, 2, 2]]),
        (8, 0, "short", [[4, 4, 4, 4], [4, 4, 4, 4]]),
        (3, 1, "short", [[4, 3, 3, 3]]),
        (10, 2, "drop", [[4, 4, 4, 4], [4, 4, 4, 4]]),
        (3, 1, "drop", []),
        (0, 3, "short", []),
        (0, 3, "drop", []),
        (0, 3, "wrap", []),
    ],
)
def test_steps_end_as_the_tail_says(share, extras, tail, expected):
    assert [[new for new, _ in step] for step in sizes(share, extras, 4, tail)] == expected


def test_wrap_fills_the_last_step_with_repeats():
    assert sizes(10, 2, 4, "wrap")[-1] == [(3, 1), (3, 1), (2, 2), (2, 2)]
    assert sizes(8, 1, 4, "wrap")[-1] == [(1, 3), (0, 4), (0, 4), (0, 4)]
    assert sizes(8, 0, 4, "wrap")[-1] == [(4, 0)] * 4


def test_single_frame_steps_leave_the_extras_over():
    assert sizes(2, 3, 1, "short") == [[(1, 0)] * 4] * 2


@given(st.integers(1, 60), st.integers(0, 3), st.integers(1, 9), st.sampled_from(["short", "drop", "wrap"]))
def test_no_step_is_larger_than_a_batch_or_empty_on_a_lane(share, extras, per_lane, tail):
    for step in sizes(share, extras, per_lane, tail):
        assert all(0 < new + repeats <= per_lane for new, repeats in step)


@given(st.integers(1, 60), st.integers(0, 3), st.integers(1, 9), st.sampled_from(["short", "drop", "wrap"]), st.data())
def test_the_steps_from_any_position_are_those_that_were_left(share, extras, per_lane, tail, data):
    steps = plan_steps(share, extras, position=0, per_lane=per_lane, tail=tail)
    done = data.draw(st.integers(0, max(0, steps.num_steps - 1)))

    rest = plan_steps(share, extras, position=steps.position_after(done), per_lane=per_lane, tail=tail)

    assert rest.starts().tolist() == steps.starts()[done:].tolist()
    assert [rest.end(lane) for lane in range(4)] == [steps.end(lane) for lane in range(4)]
    assert rest.num_repeats == steps.num_repeats
