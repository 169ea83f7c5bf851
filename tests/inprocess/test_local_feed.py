"""The local feed: ranks that meet without Ray, in one process or in that of rank 0, and batches by their number."""

import gc
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
from batches import assert_equals_samples, frames_of, frames_of_all, frames_of_dataset, planned_epoch, rows_spec
from ray_session import run_ranks

from raypipe.dataset import open_dataset
from raypipe.errors import ConfigError, DatasetError, RaypipeError, ResumeError
from raypipe.feed import LOOPBACK, BadDataSpec, BadSpan, BlockContext, Meeting, serve_meeting
from raypipe.pipeline import Pipeline
from raypipe.testing import write_dataset

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pipe(rows):
    return Pipeline(rows, batch_size=4, seed=1, order={"live_spans": 3})


def served(pipe, world_size):
    """Loaders as processes of torchrun have them: all but the first came by pickle."""
    first, *others = pipe.served_loaders(world_size, host=LOOPBACK, name="train")
    return [first, *pickle.loads(pickle.dumps(others))]


MAKERS = {
    "threads": lambda pipe, world_size: pipe.loaders(world_size, transport="local"),
    "processes": served,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_ranks_that_meet_share_epochs_as_planned(pipe, make):
    loaders = make(pipe, 3)

    first = run_ranks(loaders)
    second = run_ranks(loaders)

    for epoch, ranks in enumerate((first, second)):
        world = pipe.plan(epoch=epoch, world_size=3)
        for rank, batches in enumerate(ranks):
            assert [frames_of(batch) for batch in batches] == planned_epoch(world, rank)
    assert {stats.samples for stats in loaders[1].rank_stats().values()} == {38}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_ranks_that_stand_at_different_places_are_all_told_so(pipe, make):
    loaders = make(pipe, 2)
    loaders[1].load_state_dict(pipe.state_at(2, world_size=2))
    told = []

    def begin(loader):
        with pytest.raises(ResumeError, match=r"rank 0 asked for epoch 0.*; rank 1 asked for epoch 0"):
            next(iter(loader))
        told.append(loader.rank)

    run_ranks(loaders, begin)

    assert sorted(told) == [0, 1]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.filterwarnings("ignore:rank . left out")
def test_ranks_share_the_number_of_episodes_that_may_be_bad(tmp_path, make):
    root = write_dataset(tmp_path / "dataset", replace(rows_spec(), version="v2.1"))
    pipe = Pipeline(open_dataset(str(root)), batch_size=4, seed=1, on_bad_episode="skip", max_bad_episodes=4)
    for path in sorted((root / "data").rglob("*.parquet"))[3:]:
        path.write_bytes(b"no parquet at all")

    with pytest.raises(DatasetError, match=r"of 9 episodes are bad, and max_bad_episodes=4"):
        run_ranks(make(pipe, 2))


def test_meeting_of_rank_0_ends_with_its_loader(pipe):
    before = set(threading.enumerate())
    loader, other = pipe.served_loaders(2, host=LOOPBACK, name="train")
    meeting = pickle.loads(pickle.dumps(other._source.meeting))
    assert meeting.figures() == {}
    (server,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "raypipe-meeting"]

    del loader, other
    gc.collect()

    with pytest.raises(RaypipeError, match=r"rank 0, where the ranks of this run meet .* does not answer"):
        call_until_it_fails(meeting)
    # Figures are for people: they end no run.
    assert meeting.figures() == {}
    server.join(timeout=60)
    assert not server.is_alive()


def call_until_it_fails(meeting):
    while True:
        meeting.missing_ranks()


def test_caller_without_the_key_learns_nothing_and_disturbs_nobody(pipe):
    meeting = serve_meeting(Meeting(BadDataSpec(), pipe.config.index(), 1), LOOPBACK)

    with pytest.raises(RaypipeError, match="AuthenticationError"):
        type(meeting)(meeting.address, b"another key").missing_ranks()
    with pytest.raises(RaypipeError, match="no call '__reduce__'"):
        meeting.call("__reduce__")
    with pytest.raises(RaypipeError, match="where the ranks meet: TypeError"):
        meeting.call("tell")

    assert meeting.missing_ranks() == []


def test_caller_that_says_nothing_holds_up_nobody(pipe):
    meeting = serve_meeting(Meeting(BadDataSpec(), pipe.config.index(), 1), LOOPBACK)

    with socket.create_connection(meeting.address):
        assert meeting.figures() == {}
        meeting.tell(0, pipe.loader(transport="local").stats())
        assert list(meeting.figures()) == [0]


def test_errors_of_a_meeting_reach_the_rank_that_called(pipe):
    spec = BadDataSpec(on_bad_episode="skip", max_bad_episodes=0)
    meeting = serve_meeting(Meeting(spec, pipe.config.index(), 1), LOOPBACK)
    span = BadSpan(epoch=0, dataset=0, root="somewhere", episode=3, start=0, stop=2, why="it is broken")

    with pytest.raises(DatasetError, match="1 of 9 episodes is bad"):
        meeting.report_bad(span)


def test_loaders_of_threads_cannot_be_sent_away_and_one_alone_can(pipe):
    with pytest.raises(ConfigError, match=r"cannot be sent to others.*rp\.train\.share_loader"):
        pickle.dumps(pipe.loaders(2, transport="local"))

    alone = pickle.loads(pickle.dumps(pipe.loader(transport="local")))

    assert sorted(frames_of_all(alone)) == frames_of_dataset(pipe.config.dataset)


def test_batch_by_its_number_is_the_one_that_a_run_gives(pipe):
    for world_size, epoch in ((1, 0), (3, 2)):
        world = pipe.plan(world_size=world_size, epoch=epoch)
        for rank in range(world_size):
            for step in (0, world.num_steps // 2, world.num_steps - 1):
                batch = pipe.batch_at(step, rank=rank, world_size=world_size, epoch=epoch)

                assert frames_of(batch) == planned_epoch(world, rank)[step]
                assert_equals_samples(batch, pipe.config.dataset)


def test_batch_by_its_number_needs_no_cluster(rows):
    pipe = Pipeline(rows, batch_size=4, seed=1, decode={"where": "cluster"})

    assert frames_of(pipe.batch_at(3)) == planned_epoch(pipe.plan(), 0)[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 15}, r"step 15 is not one of the 15 of epoch 0 on 1 rank,"),
        ({"step": -1}, r"step -1 is not one of the 15"),
        ({"step": "1"}, r"step '1' is not one of the 15"),
        ({"step": 0, "rank": "0"}, r"there is no rank '0': the world has 1 rank,"),
        ({"step": 0, "rank": 0.0}, r"there is no rank 0\.0: the world has 1 rank,"),
        ({"step": 0, "rank": 2, "world_size": 2}, r"there is no rank 2: the world has 2 ranks"),
        ({"step": 0, "rank": -1}, r"there is no rank -1: the world has 1 rank,"),
    ],
)
def test_batch_that_is_not_there_is_an_error(pipe, arguments, message):
    with pytest.raises(ConfigError, match=message):
        pipe.batch_at(**arguments)


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        ({}, {"transport": "rey"}, r"transport='rey' is not known.*'ray'"),
        ({"decode": {"where": "cluster"}}, {"transport": "local"}, r"where': 'cluster'.* uses no Ray: leave one out"),
        ({}, {"transport": "ray", "world_size": 2}, r"alone needs transport='local'"),
        ({}, {"transport": "lokal", "world_size": 2}, r"transport='lokal' is not known.*'local'"),
        ({}, {"transport": 3}, r"transport=3 is not known.*'local'"),
        ({}, {"rank": 1}, r"there is no rank 1: the world has 1 rank,"),
        ({}, {"rank": 1.0, "world_size": 2}, r"there is no rank 1\.0: the world has 2 ranks,"),
    ],
)
def test_transport_that_cannot_be_is_an_error(rows, parts, settings, message):
    pipe = Pipeline(rows, batch_size=4, seed=0, **parts)

    with pytest.raises(ConfigError, match=message):
        pipe.loader(**settings)


@pytest.mark.parametrize("world_size", [0, -1, "2"])
def test_loaders_of_no_number_of_ranks_are_an_error(pipe, world_size):
    with pytest.raises(ConfigError, match=f"world_size must be an integer of at least 1, got {world_size!r}"):
        pipe.loaders(world_size)


WITHOUT_RAY = """
import sys
import raypipe as rp

pipe = rp.Pipeline(rp.open_dataset(sys.argv[1]), batch_size=8, seed=0)
num_frames = sum(len(batch["index"]) for batch in pipe.loader())
rp.train.write_states(sys.argv[2], pipe.loader())
print(num_frames, [name for name in ("ray", "ray.data") if name in sys.modules])
"""


def test_loading_and_saving_import_no_ray(tiny_dataset, tmp_path):
    command = [sys.executable, "-c", WITHOUT_RAY, str(tiny_dataset), str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.split(maxsplit=1) == ["34", "[]\n"]


SLOW_METADATA = """
import functools, http.server, sys, threading, time
import raypipe as rp

class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        # Not before both are imported, which shows that reading does not hold them up.
        last = time.monotonic() + 120
        while self.path.endswith("info.json") and "VideoDecoder" not in dir(sys.modules.get("torchcodec.decoders")):
            assert time.monotonic() < last, "torch was not imported while the metadata was read"
            time.sleep(0.01)
        super().do_GET()

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=sys.argv[1]))
threading.Thread(target=server.serve_forever, daemon=True).start()
pipe = rp.Pipeline(f"http://127.0.0.1:{server.server_port}", batch_size=8, seed=0, cache={"folder": sys.argv[2]})
print(sum(len(batch["index"]) for batch in pipe.loader()))
"""


def test_pipeline_imports_torch_and_its_codec_while_the_metadata_is_read(tiny_dataset, tmp_path):
    command = [sys.executable, "-c", SLOW_METADATA, str(tiny_dataset), str(tmp_path)]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (done.stdout, done.returncode) == ("34\n", 0), done.stderr


@pytest.mark.parametrize("before", ["", "from raypipe.loader import RankLoader; "])
def test_pipeline_of_a_dataset_that_is_open_imports_no_codec(tiny_dataset, before):
    code = f"import raypipe as rp, sys; {before}rp.Pipeline(rp.open_dataset(sys.argv[1]), batch_size=8, seed=0)"
    check = f"{code}; print([name in sys.modules for name in ('torch', 'torchcodec')])"

    printed = subprocess.run(
        [sys.executable, "-c", check, str(tiny_dataset)], capture_output=True, text=True, check=True
    )

    assert printed.stdout == "[True, False]\n"


def test_batches_without_cameras_import_no_codec(tiny_dataset):
    code = "import raypipe as rp, sys; pipe = rp.Pipeline(sys.argv[1], batch_size=8, seed=0, features=['action'])"
    check = f"{code}; print(len(list(pipe.loader())), 'torchcodec' in sys.modules)"

    printed = subprocess.run(
        [sys.executable, "-c", check, str(tiny_dataset)], capture_output=True, text=True, check=True
    )

    assert printed.stdout == "5 False\n"


def test_threads_that_ask_for_decoders_at_once_get_the_same(tiny_dataset, monkeypatch):
    context = Pipeline(tiny_dataset, batch_size=8, seed=0).config.block_context()
    both = threading.Barrier(2)

    def load():
        # Until the other thread comes here too, if it does.
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)

    # As since Python 3.12, where a cached property has no lock.
    monkeypatch.setattr(BlockContext.__dict__["_decoders"], "lock", nullcontext(), raising=False)
    monkeypatch.setattr("raypipe.decode.load_torchcodec", load)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: context.decoders, range(2))

    assert first is second
