"""What a rank writes down: parts, digests, copies; and parts that merge."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from account_cases import HandRun
from plan_cases import make_index, plan_start

from raypipe.account import Handed, Ledger, Skip, merge_parts
from raypipe.account.frames import count_values
from raypipe.account.ledger import add_batch, add_equal_batches, begin_digest
from raypipe.errors import RaypipeError
from raypipe.plan import OrderSpec

SPEC = OrderSpec(seed=5, live_spans=3)


def handed(*numbers, repeats=(), skipped=()):
    values = np.array([*numbers, *repeats], dtype=np.int64)
    is_repeat = np.arange(len(values)) >= len(numbers)
    lanes = np.zeros(len(numbers) + sum(skip.frames.num_values for skip in skipped), dtype=np.int32)
    return Handed(numbers=values, is_repeat=is_repeat, lanes=lanes, skipped=skipped)


def begun(prior=(), **options):
    ledger = Ledger(prior, **options)
    ledger.begin(plan_start(make_index([20, 20]), SPEC, world_size=1), 0)
    return ledger


def test_a_ledger_counts_what_is_handed_over():
    ledger = begun()

    ledger.record(handed(4, 2, 3, skipped=(Skip.of(0, 1, np.array([25, 24]), "broken\nat line 3"),)))
    ledger.record(handed(9, repeats=[4, 4]))

    (part,) = ledger.parts()
    assert (part.num_steps, part.epoch, part.world_size) == (2, 0, 1)
    assert part.emitted == count_values(np.array([2, 3, 4, 9]))
    assert part.repeated == count_values(np.array([4, 4]))
    assert [(skip.episode, skip.why, skip.frames.values().tolist()) for skip in part.skipped] == [
        (1, "broken", [24, 25])
    ]
    assert (part.ranks[0].num_frames, part.ranks[0].lanes) == (4, ((0, 6),))


def test_parts_end_where_a_pass_begins_and_empty_ones_are_not_kept():
    ledger = begun()
    ledger.record(handed(1))
    ledger.begin(plan_start(make_index([20, 20]), SPEC, world_size=1, epoch=1), 0)

    assert [part.epoch for part in ledger.parts()] == [0]
    ledger.record(handed(2))
    assert [(part.epoch, part.num_steps) for part in ledger.parts()] == [(0, 1), (1, 1)]


def test_a_batch_before_a_pass_is_an_error():
    with pytest.raises(RaypipeError, match="no pass has begun"):
        Ledger().record(handed(1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([(1, 2), (3,)], [(2, 1), (3,)]),
        ([(1, 2), (3,)], [(1,), (2, 3)]),
        ([(1, 2), (3,)], [(1, 2), (3,), ()]),
        ([(1, 2)], [(1, 3)]),
    ],
)
def test_a_digest_depends_on_order_and_on_the_ends_of_batches(one, other):
    digests = []
    for batches in (one, other):
        ledger = begun()
        for batch in batches:
            ledger.record(handed(*batch))
        digests.append(ledger.parts()[0].ranks[0].digest)

    assert digests[0] != digests[1]


def test_a_digest_of_many_equal_batches_is_that_of_one_after_the_other():
    numbers = np.arange(60).reshape(12, 5) * 7919
    together, apart = begin_digest(), begin_digest()

    add_equal_batches(together, numbers[:7])
    add_equal_batches(together, numbers[7:])
    for row in numbers:
        add_batch(apart, row.astype("<i8").tobytes())

    assert together.hexdigest() == apart.hexdigest()


def test_asking_for_the_parts_changes_nothing():
    looked, not_looked = begun(), begun()
    for number in range(20):
        looked.record(handed(number))
        not_looked.record(handed(number))
        looked.parts()

    assert looked.parts() == not_looked.parts()


def test_a_batch_that_is_written_over_later_was_recorded_as_it_was():
    ledger, batch = begun(), handed(1, 2)

    ledger.record(batch)
    batch.numbers[:] = 9

    assert ledger.parts()[0].emitted.values().tolist() == [1, 2]


def test_many_batches_are_compacted_on_the_way():
    ledger = begun()
    order = np.random.default_rng(0).permutation(1 << 17).reshape(-1, 64)
    for numbers in order:
        ledger.record(handed(*numbers.tolist()))

    assert ledger._pages[1]._num_buffered <= 1 << 16
    (part,) = ledger.parts()
    assert len(part.emitted) == 1
    assert part.emitted.num_values == 1 << 17


def test_a_pickled_ledger_goes_on_with_a_new_part():
    ledger = begun(attempt="first")
    ledger.record(handed(1, 2))

    copy = pickle.loads(pickle.dumps(ledger))

    assert copy.parts() == ledger.parts()
    with pytest.raises(RaypipeError, match="no pass has begun"):
        copy.record(handed(3))
    copy.begin(plan_start(make_index([20, 20]), SPEC, world_size=1, epoch=3), 0)
    copy.record(handed(3))
    assert [(part.epoch, part.attempt) for part in copy.parts()] == [(0, "first"), (3, "first")]


def test_the_same_start_twice_is_told_apart_by_its_turn():
    ledger = begun()
    ledger.record(handed(1))
    ledger.begin(plan_start(make_index([20, 20]), SPEC, world_size=1), 0)
    ledger.record(handed(1))

    assert [part.turn for part in ledger.parts()] == [0, 1]
    assert len(merge_parts(ledger.parts())) == 2


def parts_of_ranks():
    run = HandRun(make_index([9, 8, 7]), SPEC)
    run.start(3, 2)
    run.steps(3)
    return [ledger.parts()[0] for ledger in run.ledgers]


def test_parts_of_ranks_merge_to_one_in_any_order():
    parts = parts_of_ranks()

    (merged,) = merge_parts(parts)

    assert [record.rank for record in merged.ranks] == [0, 1, 2]
    assert merged.emitted.num_values == sum(part.emitted.num_values for part in parts) == 18
    assert merge_parts(reversed(parts)) == (merged,)
    assert merge_parts([merge_parts(parts[:2])[0], parts[2]]) == (merged,)
    assert not merged.missing_ranks


def test_the_same_rank_twice_is_refused_by_name():
    parts = parts_of_ranks()

    with pytest.raises(RaypipeError, match="rank 1 is there twice in the account of epoch 0"):
        merge_parts([*parts, parts[1]])


def test_ranks_that_stopped_after_different_steps_stay_apart():
    first, *others = parts_of_ranks()

    merged = merge_parts([replace(first, num_steps=2), *others])

    assert [part.missing_ranks for part in merged] == [(1, 2), (0,)]
