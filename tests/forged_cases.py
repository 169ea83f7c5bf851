"""Kinds of forged and damaged accounts: a doctor of a checkpoint each, and what both judges say of what it makes.

First what `raypipe account` says, then `examples/check_account.py`; nothing where only a plan tells.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.account import Skip, add_runs, count_values, subtract_runs
from raypipe.account.file import read_account, write_account
from raypipe.account.frames import DATASET_BITS, empty_runs
from raypipe.account.parts import seal_account


class Checkpoint:
    """A copy of a checkpoint, to be doctored in place."""

    def __init__(self, folder: Path, runs: Path, *, is_sealed: bool = True) -> None:
        self.folder, self.runs, self.is_sealed = folder, runs, is_sealed

    @property
    def accounts(self) -> Path:
        return self.folder / "raypipe/account/train"

    @property
    def state_file(self) -> Path:
        return self.folder / "raypipe/train.json"

    def file(self, rank: int) -> Path:
        return self.accounts / f"rank-{rank:05d}-of-00003.parquet"

    def account(self, rank: int):
        return read_account(self.file(rank))

    def take(self, run: str, *ranks: int) -> None:
        """Put the files of ranks of another checkpoint here."""
        for rank in ranks:
            shutil.copy(self.runs / run / "raypipe/account/train" / self.file(rank).name, self.file(rank))

    def parts(self, change, *ranks: int) -> None:
        for rank in ranks or (0,):
            account = self.account(rank)
            self.write(rank, replace(account, parts=tuple(change(list(account.parts)))))

    def part(self, place: int, change, *ranks: int) -> None:
        self.parts(lambda parts: [change(part) if part is parts[place] else part for part in parts], *ranks)

    def second_leg(self, change) -> None:
        """Change the part after the change of world size, in the files of all ranks."""
        self.parts(lambda parts: [change(part) if len(part.legs) > 1 else part for part in parts], 0, 1, 2)

    def header(self, change, *ranks: int) -> None:
        for rank in ranks or (0, 1, 2):
            account = self.account(rank)
            self.write(rank, replace(account, header=change(account.header)))

    def write(self, rank: int, account) -> None:
        if not self.is_sealed:
            write_account(self.file(rank), account)
            return
        sealed = seal_account(account.header, account.parts)
        write_account(self.file(rank), sealed)
        if rank == 0:
            self.state_file.write_text(json.dumps({**sealed.header.state, "account": sealed.header.head}))

    def state(self, change) -> None:
        """Change the state of the checkpoint alone."""
        self.state_file.write_text(json.dumps(change(json.loads(self.state_file.read_text()))))

    def rows(self, change, rank: int = 0) -> None:
        pq.write_table(change(pq.read_table(self.file(rank))), self.file(rank))

    def version(self, version) -> None:
        table = pq.read_table(self.file(0))
        told = json.loads(table.schema.metadata[b"raypipe.account"]) | {"version": version}
        pq.write_table(table.replace_schema_metadata({"raypipe.account": json.dumps(told)}), self.file(0))

    def swap_files(self, one: int, other: int) -> None:
        first = self.file(one).read_bytes()
        shutil.copy(self.file(other), self.file(one))
        self.file(other).write_bytes(first)

    def rename(self, world_size: int) -> None:
        for path in sorted(self.accounts.glob("*.parquet")):
            path.rename(path.with_name(path.name.replace("00003.", f"{world_size:05d}.")))

    def lose(self, rank: int) -> None:
        """Leave of a rank what it had replaced."""
        newest = self.file(rank)
        (self.accounts / "before").mkdir()
        shutil.copy(self.runs / "older/raypipe/account/train" / newest.name, self.accounts / "before")
        newest.unlink()

    def move_frames(self, source: int, target: int) -> None:
        """Move the first frame of a rank's last part into the file of another rank."""
        frames = first_of(self.account(source).parts[-1].emitted)
        self.part(-1, lambda part: without(part, frames), source)
        self.part(-1, lambda part: replace(part, emitted=add_runs(part.emitted, frames)), target)

    def exchange_frames(self) -> None:
        mine, theirs = (first_of(self.account(rank).parts[-1].emitted) for rank in (0, 1))
        self.part(-1, lambda part: replace(without(part, mine), emitted=swapped(part, mine, theirs)), 0)
        self.part(-1, lambda part: replace(without(part, theirs), emitted=swapped(part, theirs, mine)), 1)

    def move_skips(self, source: int, target: int) -> None:
        skips = self.account(source).parts[-1].skipped
        self.part(-1, lambda part: replace(part, skipped=()), source)
        self.part(-1, lambda part: replace(part, skipped=(*part.skipped, *skips)), target)


def first_of(runs, number=1):
    return count_values(runs.values()[:number])


def without(part, frames):
    return replace(part, emitted=subtract_runs(part.emitted, frames))


def swapped(part, gone, come):
    return add_runs(subtract_runs(part.emitted, gone), come)


def skip_first(part, episode=0):
    frames = first_of(part.emitted)
    return replace(part, skipped=(*part.skipped, Skip(dataset=0, episode=episode, frames=frames, why="bad")))


def as_if_read(part):
    """Return a part with its skipped frames as handed over."""
    frames = part.skipped[0].frames
    one = replace(part, skipped=(), emitted=add_runs(part.emitted, frames))
    return record(one, 0, num_frames=one.ranks[0].num_frames + frames.num_values)


def record(part, place, **changes):
    ranks = [replace(one, **changes) if i == place else one for i, one in enumerate(part.ranks)]
    return replace(part, ranks=tuple(ranks))


def exchanged(part, name):
    """Return a part whose first two ranks have exchanged what they say."""
    one, other = (getattr(part.ranks[place], name) for place in (0, 1))
    return record(record(part, 0, **{name: other}), 1, **{name: one})


def joined(parts):
    one, two = parts
    frames = add_runs(one.emitted, two.emitted)
    return replace(one, num_steps=one.num_steps + two.num_steps, emitted=frames, skipped=one.skipped + two.skipped)


def moved_skips(parts, source, target):
    skips = parts[source].skipped
    parts[source] = replace(parts[source], skipped=())
    parts[target] = replace(parts[target], skipped=parts[target].skipped + skips)
    return parts


def order(**changes):
    return lambda part: replace(part, spec=replace(part.spec, **changes))


def leg(place, **changes):
    def change(part):
        legs = [replace(one, **changes) if i == place else one for i, one in enumerate(part.legs)]
        return replace(part, legs=tuple(legs))

    return change


def state(**changes):
    return lambda header: replace(header, state={**header.state, **changes})


DAMAGED = "is no account, or is damaged"
CHECKER_DAMAGED = "train.json, is damaged: "
NOT_THE_STATE = "no file of rank 0 leads to the state of the checkpoint"
NOT_THE_SAVED = "the checkpoint has another state, or was saved with another account"
NOT_ONE = "the files are not of one state of one run"
NO_RECORD = "has no record in some part"
NOT_PLANNED = "are not those of the plan"

# A broken disk, or somebody who copies files: what each says, raypipe and the checker.
FILES = {
    "a file that is cut off": (lambda c: c.file(1).write_bytes(c.file(1).read_bytes()[:-9]), DAMAGED, CHECKER_DAMAGED),
    "an empty file": (lambda c: c.file(2).write_bytes(b""), DAMAGED, CHECKER_DAMAGED),
    "a file of zeros": (lambda c: c.file(1).write_bytes(bytes(4096)), DAMAGED, CHECKER_DAMAGED),
    "the file of a rank twice": (lambda c: shutil.copy(c.file(2), c.file(1)), "of rank 2", "is of ranks [2]"),
    "the file of rank 0 twice": (lambda c: shutil.copy(c.file(0), c.file(1)), "of rank 0", "is of ranks [0, 1]"),
    "files of two ranks swapped": (lambda c: c.swap_files(1, 2), "of rank 2", "is of ranks [2]"),
    "rank 0's file swapped": (lambda c: c.swap_files(0, 1), "whose head is", NOT_THE_SAVED),
    "a file too many": (lambda c: shutil.copy(c.file(2), c.file(3)), "of rank 2", "4 files"),
    "files of more ranks by name": (lambda c: c.rename(4), "has 3 of 4 files", "3 files"),
    "files of fewer ranks by name": (lambda c: c.rename(2), "has 3 files of 2 ranks", "3 files"),
    "a rank's file of another seed": (lambda c: c.take("other", 1), "its seed is 4, not 3", NOT_ONE),
    "rank 0's file of another seed": (lambda c: c.take("other", 0), NOT_THE_STATE, NOT_ONE),
    "rank 0's file of before": (lambda c: c.take("older", 0), NOT_THE_STATE, NOT_ONE),
    "a rank's file of later": (lambda c: c.take("later", 1), "leads to a later state", NOT_ONE),
    "all files of before": (lambda c: c.take("older", 0, 1, 2), NOT_THE_STATE, NOT_THE_SAVED),
    "a newest file that is gone": (lambda c: c.lose(1), "has 2 of 3 files", "2 files"),
    "rank 0's newest file that is gone": (lambda c: c.lose(0), NOT_THE_STATE, NOT_THE_SAVED),
    "the state of before": (
        lambda c: shutil.copy(c.runs / "older/raypipe/train.json", c.state_file),
        NOT_THE_STATE,
        NOT_THE_SAVED,
    ),
    "a state that is cut off": (lambda c: c.state_file.write_text('{"epoch":'), "damaged state", CHECKER_DAMAGED),
    "an empty state": (lambda c: c.state_file.write_text(""), "damaged state", CHECKER_DAMAGED),
    "a state that is a number": (lambda c: c.state_file.write_text("7"), "damaged state", CHECKER_DAMAGED),
    "a state without its head": (
        lambda c: c.state(lambda saved: {**saved, "account": ""}),
        "lacks the head of its account",
        NOT_THE_SAVED,
    ),
    "another state without its head": (
        lambda c: c.state(lambda saved: {key: saved[key] for key in saved if key != "account"} | {"epoch": 7}),
        "lacks the head of its account",
        NOT_THE_SAVED,
    ),
    "another head of the state": (
        lambda c: c.state(lambda saved: {**saved, "account": "0" * 32}),
        "whose head is 000",
        NOT_THE_SAVED,
    ),
    "rows twice": (lambda c: c.rows(lambda rows: pa.concat_tables([rows, rows])), DAMAGED, "was changed"),
    "rows turned round": (
        lambda c: c.rows(lambda rows: rows.take([*range(len(rows))][::-1])),
        DAMAGED,
        "was changed",
    ),
    "a row that is gone": (lambda c: c.rows(lambda rows: rows.slice(1)), DAMAGED, "was changed"),
    "rows of no part": (
        lambda c: c.rows(lambda rows: rows.set_column(0, "part", pa.array([9] * len(rows), pa.int32()))),
        DAMAGED,
        CHECKER_DAMAGED,
    ),
    "another version": (lambda c: c.version(2), "is of version 2", "is of version 2"),
}

# A forger, who makes the chain anew and gives the state its head.
FORGED = {
    "a later state of a rank": (lambda c: c.header(state(epoch=4, legs=[]), 1), "leads to a later state", NOT_ONE),
    "an earlier state of a rank": (lambda c: c.header(state(epoch=2, legs=[]), 1), "it was changed", NOT_ONE),
    "another seed of a rank": (lambda c: c.header(state(seed=8), 1), "its seed is 8, not 3", NOT_ONE),
    "another dataset of a rank": (
        lambda c: c.header(state(fingerprint="x"), 2),
        "its fingerprint is 'x'",
        NOT_ONE,
    ),
    "another root of a rank": (
        lambda c: c.header(lambda header: replace(header, root="x"), 1),
        "are not of one state of one run",
        NOT_ONE,
    ),
    "a dataset with the same lengths": (
        lambda c: c.header(lambda header: replace(header, root=str(c.runs / "alike"))),
        "the account is of another dataset",
        "",
    ),
    "a dataset of other lengths": (
        lambda c: c.header(lambda header: replace(header, root=str(c.runs / "longer"))),
        "the account is of another dataset",
        "its frames are of others",
    ),
    "a leg of the state without a frame": (
        lambda c: c.header(state(legs=[{"lanes": 3, "live_spans": 2, "frames_per_lane": 0}])),
        "the parts lead up to",
        "the parts do not lead up to the state",
    ),
    "an epoch of the state before the first": (
        lambda c: c.header(state(epoch=-1)),
        "epoch must be",
        "the parts do not lead",
    ),
    "a state of a mixture": (
        lambda c: c.header(state(mixture={"since": 3, "members": []})),
        "one of the two was changed",
        "the state is of a mixture",
    ),
    "a part twice": (lambda c: c.parts(lambda parts: [parts[0], *parts]), "it is there twice", "it is there twice"),
    "a rank's part twice": (
        lambda c: c.parts(lambda parts: [*parts, parts[-1]], 1),
        "it is there twice",
        "it is there twice",
    ),
    "a part before the first epoch": (
        lambda c: c.parts(lambda parts: [replace(parts[0], epoch=-1), *parts]),
        "there is no such epoch",
        "of no epoch",
    ),
    "a part after the state": (
        lambda c: c.parts(lambda parts: [*parts, replace(parts[0], epoch=9)]),
        "22 frames missing, 1 gap",
        "the parts do not lead up to the state",
    ),
    "two epochs that exchanged their numbers": (
        lambda c: c.parts(lambda parts: [replace(p, epoch={0: 2, 2: 0}.get(p.epoch, p.epoch)) for p in parts], 0, 1, 2),
        "10 out of order",
        "epoch 1: 0 different frames of 34",
    ),
    "an epoch that is a copy of another": (
        lambda c: c.parts(lambda parts: [replace(parts[3], epoch=0), *parts[1:]]),
        "22 frames missing",
        "has the records of ranks [0]",
    ),
    "two parts as one": (
        lambda c: c.parts(lambda parts: [parts[0], joined(parts[1:3]), *parts[3:]]),
        "8 frames missing, 7 out of order",
        "its lanes gave",
    ),
    "no parts of a rank": (lambda c: c.parts(lambda parts: [], 1), NO_RECORD, "has the records of ranks [0, 2]"),
    "no last part of a rank": (lambda c: c.parts(lambda p: p[:-1], 1), NO_RECORD, "has the records of ranks [0, 2]"),
    "no first part of a rank": (lambda c: c.parts(lambda p: p[1:], 1), NO_RECORD, "has the records of ranks [0, 2]"),
    "fewer steps of a rank": (
        lambda c: c.part(-1, lambda part: replace(part, num_steps=1), 1),
        NO_RECORD,
        "has the records of ranks [1]",
    ),
    "ranks that exchanged their numbers": (
        lambda c: c.parts(lambda ps: [record(p, 0, rank=3 - p.ranks[0].rank) for p in ps], 1, 2),
        "of rank 2",
        "is of ranks [2]",
    ),
    "a rank twice in a part": (
        lambda c: c.part(0, lambda part: replace(part, ranks=(*part.ranks, part.ranks[1]))),
        "the ranks count 39 frames, and 22 are listed",
        "has the records of ranks [0, 1, 1]",
    ),
    "digests exchanged": (lambda c: c.part(0, lambda part: exchanged(part, "digest")), NOT_PLANNED, ""),
    "counts exchanged": (lambda c: c.part(0, lambda part: exchanged(part, "num_frames")), "and the plan", ""),
    "lanes exchanged": (lambda c: c.part(0, lambda part: exchanged(part, "lanes")), "by the plan", "lane of another"),
    "a frame of one lane as another's": (
        lambda c: c.part(0, lambda part: record(record(part, 0, lanes=((0, 16),)), 1, lanes=((1, 18),))),
        "by the plan",
        "unequal numbers of frames",
    ),
    "another attempt of a rank": (
        lambda c: c.parts(lambda parts: [replace(part, attempt="attempt-000") for part in parts], 1),
        NO_RECORD,
        "has the records of ranks [1]",
    ),
    "a frame in the file of another rank": (
        lambda c: c.move_frames(0, 1),
        "has 1 frame that is not the rank's",
        "its lanes gave 4",
    ),
    "frames exchanged between ranks": (lambda c: c.exchange_frames(), "has 1 frame that is not the rank's", ""),
    "skips in the file of another rank": (
        lambda c: c.move_skips(2, 0),
        "has 4 frames that are not the rank's",
        "its lanes gave 4",
    ),
    "skips of another part": (
        lambda c: c.parts(lambda parts: moved_skips(parts, 1, 2)),
        "are not of these steps",
        "its lanes gave",
    ),
    "skips of another epoch": (
        lambda c: c.parts(lambda parts: moved_skips(parts, 0, 1)),
        "are not of these steps",
        "its lanes gave",
    ),
    "a frame that was handed over and skipped": (lambda c: c.part(0, skip_first), "1 frame doubled", "its lanes gave"),
    "a skip of a good frame": (
        lambda c: c.part(0, lambda part: without(skip_first(part), first_of(part.emitted))),
        NOT_PLANNED,
        "its lanes gave",
    ),
    "bad frames as if they were read": (lambda c: c.part(0, as_if_read), NOT_PLANNED, ""),
    "skips twice": (
        lambda c: c.part(0, lambda part: replace(part, skipped=part.skipped * 2)),
        "12 frames doubled",
        "its lanes gave",
    ),
    "a skip of a dataset below the first": (
        lambda c: c.part(0, lambda part: replace(part, skipped=(replace(part.skipped[0], dataset=-1),))),
        "a skip names episode 2",
        "a skip names episode 2",
    ),
    "a rank that died and has a record": (
        lambda c: c.part(0, lambda p: replace(p, torn=(1,))),
        "17 frames doubled",
        "[0, 1, 1]",
    ),
    "a rank that died and is none": (
        lambda c: c.part(0, lambda part: replace(part, torn=(7,))),
        "rank 7 is said to have died, and there is none",
        "has the records of ranks [0, 1, 7]",
    ),
    "frames of another epoch": (
        lambda c: c.parts(lambda parts: [replace(parts[0], emitted=parts[3].emitted), *parts[1:]]),
        "15 frames missing",
        "its lanes gave",
    ),
    "a repeat that is gone": (
        lambda c: c.part(0, lambda part: replace(part, repeated=empty_runs())),
        "has no frame",
        "",
    ),
    "a repeat of no frame": (
        lambda c: c.part(0, lambda part: replace(part, repeated=count_values([10**6]))),
        "it repeats a frame that is none",
        "",
    ),
    "a longer leg before the change of ranks": (
        lambda c: c.second_leg(leg(0, frames_per_lane=9)),
        "1 gap",
        "a part is missing",
    ),
    "no leg before the change of ranks": (
        lambda c: c.second_leg(lambda part: replace(part, legs=part.legs[1:])),
        "12 frames missing",
        "different frames of 34",
    ),
    "other lanes before the change of ranks": (
        lambda c: c.second_leg(leg(0, lanes=3, frames_per_lane=4)),
        "12 frames missing",
        "",
    ),
    "other live spans before the change of ranks": (
        lambda c: c.second_leg(leg(0, live_spans=5)),
        "12 frames missing",
        "a part is missing",
    ),
    "other live spans after the change of ranks": (lambda c: c.second_leg(leg(1, live_spans=4)), NOT_PLANNED, ""),
    "legs turned round": (
        lambda c: c.second_leg(lambda part: replace(part, legs=part.legs[::-1])),
        "12 frames missing",
        "unequal numbers of frames",
    ),
    "other lanes after the change of ranks": (
        lambda c: c.second_leg(lambda part: replace(leg(1, lanes=6)(part), per_lane=1)),
        "the plan has only 3 steps from there",
        "unequal numbers of frames",
    ),
    "other live spans in a leg": (lambda c: c.part(0, leg(0, live_spans=1)), NOT_PLANNED, ""),
    "another tail of a part": (lambda c: c.part(0, order(tail="drop")), "the plan has only 5 steps from there", ""),
    "no shuffle of a part": (lambda c: c.part(0, order(shuffle=False)), NOT_PLANNED, ""),
    "another span length of a part": (lambda c: c.part(0, order(span_frames=4)), NOT_PLANNED, ""),
}


def shares(change):
    """Return a doctor that changes what the state says of the members of the mixture."""

    def doctor(header):
        mixture = header.state["mixture"]
        members = change([dict(one) for one in mixture["members"]])
        return replace(header, state={**header.state, "mixture": {**mixture, "members": members}})

    return lambda c: c.header(doctor)


def member(place, **changes):
    return lambda members: [one | changes if i == place else one for i, one in enumerate(members)]


def hide_first_epoch(c):
    for rank in range(3):
        account = c.account(rank)
        mixture = {**account.header.state["mixture"], "since": 1}
        header = replace(account.header, state={**account.header.state, "mixture": mixture})
        c.write(rank, replace(account, header=header, parts=tuple(part for part in account.parts if part.epoch)))


def of_member(part, shift):
    frames = first_of(part.emitted)
    return replace(part, emitted=add_runs(subtract_runs(part.emitted, frames), count_values(frames.values() + shift)))


def swapped_roots(header):
    one, two = header.members
    return replace(header, members=({**one, "root": two["root"]}, {**two, "root": one["root"]}))


OTHER_MIXTURE = "is of another mixture"

MIXED = {
    "other shares": (
        shares(lambda members: [members[0] | {"frames": 27}, members[1] | {"frames": 41}]),
        "4 frames foreign",
        "",
    ),
    "a smaller share": (shares(member(1, frames=30)), "15 frames foreign", "different frames of"),
    "another place in its laps": (shares(member(0, position=5)), "5 frames foreign", ""),
    "another fingerprint of a member": (shares(member(0, fingerprint="x")), OTHER_MIXTURE, ""),
    "another name of a member": (shares(member(0, name="x")), "its state is of another mixture", ""),
    "a mixture that begins later": (hide_first_epoch, "51 frames foreign", ""),
    "members that exchanged their places": (lambda c: c.header(swapped_roots), OTHER_MIXTURE, ""),
    "a frame of another member": (
        lambda c: c.part(0, lambda part: of_member(part, 1 << DATASET_BITS), 0),
        "1 frame doubled",
        "1 frames came twice",
    ),
    "a frame of another lap": (
        lambda c: c.part(0, lambda part: of_member(part, 20), 0),
        "1 frame doubled",
        "1 frames came twice",
    ),
    "a frame of no member": (
        lambda c: c.part(0, lambda part: of_member(part, 5 << DATASET_BITS), 0),
        "1 frame foreign",
        "are of no dataset",
    ),
    "no members": (
        lambda c: c.header(lambda header: replace(header, members=())),
        "names no dataset",
        "the state is of a mixture and the account is not",
    ),
}
