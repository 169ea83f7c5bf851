"""Accounts as files: the same comes back, small, whole or not at all."""

import json

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from account_cases import HandRun
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import lengths, make_index, plan_start, specs

from raypipe.account import Account, Handed, Header, Ledger
from raypipe.account.file import dump_account, load_account, read_account, write_account
from raypipe.errors import ConfigError, DatasetError
from raypipe.plan import OrderSpec


def made_account(bad=(1,)):
    run = HandRun(make_index([9, 8, 7, 12]), OrderSpec(seed=2**64 - 1, live_spans=2, tail="wrap"), bad=bad)
    run.start(3, 2)
    run.steps(run.world.num_steps + 2)
    return run.save()


@settings(max_examples=25)
@given(lengths, specs, st.integers(1, 4), st.integers(0, 20))
def test_an_account_comes_back_as_it_was(frames, spec, world_size, num_steps):
    run = HandRun(make_index(frames), spec, bad={0})
    try:
        run.start(world_size, 2)
        run.steps(num_steps)
    except ConfigError:
        return
    account = run.save()

    assert load_account(dump_account(account), "memory") == account


@pytest.mark.parametrize("kind", ["path", "pyarrow", "fsspec"])
def test_an_account_is_written_and_read_on_any_filesystem(tmp_path, kind):
    filesystem = {"path": None, "pyarrow": pyarrow.fs.LocalFileSystem(), "fsspec": fsspec.filesystem("file")}[kind]
    account, path = made_account(), tmp_path / "deep" / "folder" / "rank-00000-of-00001.parquet"

    write_account(path, account, filesystem)
    write_account(path, account, filesystem)

    assert read_account(path, filesystem) == account
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_an_account_without_parts_and_one_with_a_selection_come_back():
    selection = {"episodes": (1, 2), "segments": ((0, 1, 2),)}
    header = Header(root="s3://bucket/x", selection=selection, state=made_account().header.state, name="val")
    account = Account(header=header, parts=())

    assert load_account(dump_account(account), "memory") == account


def test_the_size_goes_with_the_runs_and_not_with_the_frames():
    # 2 million frames of 1,000 episodes in a shuffled order: all of them, and half.
    world = plan_start(make_index([2000] * 1000), OrderSpec(seed=0, live_spans=16), world_size=1, per_lane=1 << 15)
    plan, ledger = world.rank(0), Ledger()
    ledger.begin(world, 0)
    halfway = ()
    for batch in plan.batches():
        numbers = plan.queue.episode[batch.span] * 2000 + batch.frame
        ledger.record(Handed(numbers=numbers, is_repeat=batch.is_repeat, lanes=np.zeros(len(numbers), dtype=np.int32)))
        halfway = ledger.parts() if batch.step == world.num_steps // 2 else halfway
    header = made_account().header

    (part,) = ledger.parts()

    assert part.emitted.num_values == 2_000_000
    assert len(part.emitted) == 1
    assert len(dump_account(Account(header=header, parts=(part,)))) < 8_000
    # Beside whole episodes it has the frames of those that are live: 16 of 2,000.
    assert len(halfway[0].emitted) < 500 + 16 * 1000
    assert len(dump_account(Account(header=header, parts=halfway))) < 100_000


def damaged(change):
    table = pq.read_table(pa.BufferReader(dump_account(made_account())))
    sink = pa.BufferOutputStream()
    pq.write_table(change(table), sink)
    return bytes(sink.getvalue())


def change_told(**changes):
    def change(table):
        told = json.loads(table.schema.metadata[b"raypipe.account"])
        told.update(changes)
        return table.replace_schema_metadata({b"raypipe.account": json.dumps(told).encode()})

    return change


def first_row_of_no_part(table):
    part = table.column("part").to_numpy().copy()
    part[0] = 99
    return table.set_column(0, "part", pa.array(part, pa.int32()))


DAMAGES = {
    "truncated": (lambda: dump_account(made_account())[:-40], "no account, or is damaged"),
    "empty": (lambda: b"", "no account, or is damaged"),
    "text": (lambda: b"no parquet" * 10, "no account, or is damaged"),
    "another parquet": (lambda: damaged(lambda table: table.replace_schema_metadata({})), "no account"),
    "another version": (lambda: damaged(change_told(version=99)), "version 99"),
    "no header": (lambda: damaged(change_told(header={})), "no account"),
    "rows of no part": (lambda: damaged(first_row_of_no_part), "rows of no part"),
    "rows upside down": (lambda: damaged(lambda table: table.take(np.arange(len(table))[::-1])), "damaged"),
    "rows twice": (lambda: damaged(lambda table: pa.concat_tables([table, table])), "damaged"),
    "no column": (lambda: damaged(lambda table: table.drop_columns(["times"])), "damaged"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_account_is_an_error_that_names_the_file(tmp_path, case):
    content, message = DAMAGES[case]
    path = tmp_path / "rank-00000-of-00001.parquet"
    path.write_bytes(content())

    with pytest.raises(DatasetError, match=message) as raised:
        read_account(path)

    assert str(path) in str(raised.value)


def test_a_missing_account_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(DatasetError, match=r"there is no account at .*nothing\.parquet"):
        read_account(tmp_path / "nothing.parquet")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    account, path = made_account(), tmp_path / "rank-00000-of-00001.parquet"
    write_account(path, account)
    filesystem = pyarrow.fs.PyFileSystem(FailingMove(fsspec.filesystem("file")))

    with pytest.raises(OSError, match="disk is gone"):
        write_account(path, made_account(bad=()), filesystem)

    assert read_account(path) == account
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


class FailingMove(pyarrow.fs.FSSpecHandler):
    def move(self, src, dest):
        raise OSError("the disk is gone")
