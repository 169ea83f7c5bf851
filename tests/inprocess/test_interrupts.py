"""Ctrl-C at every point of an iteration: the state, the account and the training loop agree on the batches it has."""

import _thread
import dis
import signal
import sys
from collections import Counter
from contextlib import contextmanager
from functools import cache

import pytest
from batches import frames_of, local_loader, planned_epoch, rows_spec

from raypipe.account import lay_out, ledger
from raypipe.account.verdict import check_account
from raypipe.dataset import open_dataset
from raypipe.loader import epoch_run as run
from raypipe.loader import job
from raypipe.loader import rank_loader as loader
from raypipe.pipeline import Pipeline
from raypipe.plan import SINGLE_DATASET
from raypipe.testing import write_dataset

TRACED = {module.__file__ for module in (ledger, loader, job, run)}

LOOKS = {"CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "FOR_ITER", "SEND", "BEFORE_WITH", "YIELD_VALUE"}
"""Where Python looks for signals: after calls, at backward jumps, and where a function or generator is entered."""

OFTEN = {"RankLoader._iterate", "RankLoader._hand_over", "RankLoader._steps", "EpochRun.__next__", "Page.write"}
"""What every batch passes: there Ctrl-C comes before and after the first batch; elsewhere the first time."""


class Pending:
    """``-PENDING`` is Ctrl-C: Python raises `KeyboardInterrupt` where it looks for signals next.

    An operator and no call: after a call Python would look at once, within the code that traces.
    """

    __neg__ = _thread.interrupt_main


PENDING = Pending()


@cache
def instructions(code):
    return {one.offset: one.opname for one in dis.get_instructions(code)}


@contextmanager
def ctrl_c_at(wanted, places):
    """Press Ctrl-C at the instruction number `wanted` of the loader; `places` gets the instructions that were met."""

    def at_call(frame, event, arg):
        if frame.f_code.co_filename not in TRACED:
            return None
        frame.f_trace_opcodes = True
        return at_instruction

    def at_instruction(frame, event, arg):
        code, place = frame.f_code, frame.f_lasti
        if event != "opcode" or instructions(code)[place] not in LOOKS:
            return at_instruction
        visits[code, place] += 1
        if visits[code, place] > 1 + (code.co_qualname in OFTEN):
            return at_instruction
        places.append(f"{code.co_qualname}:{frame.f_lineno}")
        if len(places) <= wanted:
            return at_instruction
        sys.settrace(None)
        return -PENDING

    before, visits = sys.gettrace(), Counter()
    # Python 3.12 traces instructions if some frame asks for it before tracing begins.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.fixture(autouse=True)
def _ctrl_c_is_an_interrupt():
    """Ray Train leaves a handler of its own in a process that has trained."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    """13 frames in an epoch of 3 batches."""
    root = write_dataset(tmp_path_factory.mktemp("rows") / "dataset", rows_spec(lengths=(4, 3, 6)))
    return Pipeline(open_dataset(str(root)), batch_size=5, seed=1)


def verdicts(pipe, loader):
    episodes = pipe.config.dataset.meta.episodes
    axis = lay_out([SINGLE_DATASET], [(episodes.episode_index, episodes.length)])
    return check_account(pipe.config.index(), axis, loader.account(), ())


@pytest.mark.timeout(120)
def test_ctrl_c_at_any_point_loses_no_batch_and_repeats_none(pipe):
    planned = [frames for epoch in range(2) for frames in planned_epoch(pipe.plan(epoch=epoch), 0)]
    wanted, num_interrupts = 0, 0
    while True:
        received, places = [], []
        loader = local_loader(pipe)
        try:
            with ctrl_c_at(wanted, places):
                # Across the end of an epoch, with the next one opened ahead.
                for batch in loader.steps(5):
                    received.append(batch)
        except KeyboardInterrupt:
            num_interrupts += 1

        told = f"Ctrl-C at {places[-1]}, instruction {wanted}, after {len(received)} batches"
        assert loader.state_dict() == pipe.state_at(len(received)), told
        found = verdicts(pipe, loader)
        assert all(verdict.is_exact for verdict in found), told
        assert sum(verdict.num_emitted for verdict in found) == sum(len(frames_of(batch)) for batch in received), told
        received += loader.steps(6 - len(received))
        assert [frames_of(batch) for batch in received] == planned, told
        if len(places) <= wanted:
            break
        wanted += 1
    assert num_interrupts == wanted > 200
