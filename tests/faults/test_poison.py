"""A video that ends the process that decodes it: after two deaths an error that names it, or right pixels."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import ray
from batches import MODES, TOP, assert_equals_samples, frames_of_all, frames_of_dataset, local_loader
from ray import cloudpickle
from ray_session import end_ray

from raypipe.dataset import open_dataset
from raypipe.decode import DecodeSpec
from raypipe.decode import frames as frames_module
from raypipe.decode import journal as journal_module
from raypipe.decode.frames import FrameDecoder, VideoRequest, _answer, decode_isolated
from raypipe.decode.journal import process_journal, video_key
from raypipe.errors import DatasetError, DecodeError
from raypipe.format import read_metadata
from raypipe.pipeline import Pipeline
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BAD = 3
"""The episode whose video is poison."""

LENGTHS = (6, 4, 9, 7, 5)

# What a damaged file does inside a codec, in every process that Python starts with this on its path.
STUB = """
import importlib.machinery, json, os, signal, sys, threading

POISONS = json.loads(os.environ["RAYPIPE_TEST_POISON"])
ROLE = "isolated" if any("answer_requests" in one for one in sys.orig_argv) else "first"


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "raypipe.decode.videos":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), poison(module))
        return spec


def poison(module):
    read_frames = module.OpenVideo.read_frames

    def read(self, frames):
        for poison in POISONS:
            if not self.place.endswith(poison["file"]):
                continue
            with open(poison["notes"], "a") as notes:
                notes.write(f"{ROLE} {os.getpid()}\\n")
            if ROLE in poison["roles"]:
                # To this thread, as a fault in a codec is, and it does not come back from it.
                signal.pthread_kill(threading.get_ident(), poison["signal"])
                threading.Event().wait()
        return read_frames(self, frames)

    module.OpenVideo.read_frames = read


sys.meta_path.insert(0, Finder)
"""

DECODE = """
import json, sys, warnings
import numpy as np
from raypipe.decode import DecodeSpec, FrameDecoder
from raypipe.errors import RaypipeError
from raypipe.format import read_metadata

warnings.simplefilter("always")
warnings.showwarning = lambda message, *_: told.append(str(message))
told, errors = [], {}
root, out, camera, *episodes = sys.argv[1:]
meta = read_metadata(root)
decoder = FrameDecoder(meta, DecodeSpec())
for episode in map(int, episodes):
    row = meta.episodes.find_row(episode)
    try:
        frames = decoder.decode_video(row, camera, np.arange(meta.episodes.length[row]))
        np.save(f"{out}/{episode}.npy", np.stack([frame.numpy() for frame in frames]))
    except RaypipeError as error:
        errors[str(episode)] = [type(error).__name__, *error.__notes__, str(error)]
print(json.dumps({"warnings": told, "errors": errors}))
"""


@dataclass(frozen=True)
class Ran:
    code: int
    errors: dict = field(default_factory=dict)
    warnings: list = field(default_factory=list)


@dataclass(frozen=True)
class Machine:
    """A machine of its own for the journal, on which the video of one episode is poison."""

    folder: Path
    root: Path
    fatal: signal.Signals = signal.SIGKILL
    roles: tuple[str, ...] = ("first", "isolated")

    def poison(self) -> dict:
        return {
            "file": f"{self.root}/videos/chunk-000/{TOP}/episode_{BAD:06d}.mp4",
            "signal": self.fatal,
            "roles": self.roles,
            "notes": str(self.folder / "notes"),
        }

    def start(self, *episodes) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", DECODE, str(self.root), str(self.folder), TOP, *map(str, episodes)],
            env={**os.environ, **environment(self.folder, self)},
            stdout=subprocess.PIPE,
        )

    def decode(self, *episodes) -> Ran:
        """Decode episodes one after the other in a process of their own."""
        return finish(self.start(*episodes))

    def visits(self) -> list[str]:
        """The role of every process that came to the poison, in order."""
        return [line.split()[0] for line in (self.folder / "notes").read_text().splitlines()]

    def num_processes(self) -> int:
        return len(set((self.folder / "notes").read_text().splitlines()))

    def assert_right(self, *episodes) -> None:
        dataset = open_dataset(str(self.root))
        for episode in episodes:
            pixels = np.load(self.folder / f"{episode}.npy")
            wanted = [dataset.sample_of(episode, frame)[TOP].numpy() for frame in range(LENGTHS[episode])]
            np.testing.assert_array_equal(pixels.transpose(0, 3, 1, 2), np.stack(wanted))


def environment(folder, *machines) -> dict[str, str]:
    """Of processes that meet the poison of these machines, with their journal in `folder`."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(STUB)
    return {
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(folder),
        "RAYPIPE_TEST_POISON": json.dumps([machine.poison() for machine in machines]),
    }


def finish(process) -> Ran:
    out, _ = process.communicate(timeout=120)
    return Ran(process.returncode, **json.loads(out)) if out else Ran(process.returncode)


def write(root) -> Path:
    spec = SynthSpec(version="v2.1", lengths=LENGTHS, cameras=(CameraSpec(name=TOP, height=32, width=48, gop=4),))
    return write_dataset(root, spec)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("poison") / "dataset")


def assert_named(told, root) -> None:
    for name in (f"episode {BAD} of", str(root), TOP, f"episode_{BAD:06d}.mp4", f"'exclude': ({BAD},)"):
        assert name in told


@pytest.mark.parametrize(
    ("fatal", "at_once"), [(signal.SIGKILL, False), (signal.SIGSEGV, True)], ids=["SIGKILL", "SIGSEGV"]
)
def test_video_that_ends_every_process_is_an_error_after_two_deaths(tmp_path, root, fatal, at_once):
    machine = Machine(tmp_path, root, fatal=fatal)

    if at_once:
        codes = [finish(process).code for process in [machine.start(0, BAD, 1) for _ in range(2)]]
    else:
        codes = [machine.decode(0, BAD, 1).code for _ in range(2)]
    third = machine.decode(0, BAD, 1)

    assert codes == [-fatal, -fatal]
    assert third.code == 0
    assert machine.visits() == ["first", "first", "isolated"]
    assert list(third.errors) == [str(BAD)]
    kind, *_, told = third.errors[str(BAD)]
    assert kind == "DecodeError"
    assert fatal.name in told
    assert_named(told, root)
    machine.assert_right(0, 1)


def test_video_that_ends_only_its_first_processes_gives_right_pixels(tmp_path, root):
    machine = Machine(tmp_path, root, roles=("first",))

    codes = [machine.decode(0, BAD).code for _ in range(2)]
    third = machine.decode(BAD, 0, BAD, 1, BAD)

    assert codes == [-signal.SIGKILL] * 2
    assert third == Ran(0, {}, third.warnings)
    assert len(third.warnings) == 1
    assert f"episode {BAD} of" in third.warnings[0]
    assert "2 processes" in third.warnings[0]
    # Three decodes in one subprocess, which is started once.
    assert machine.visits() == ["first", "first", "isolated", "isolated", "isolated"]
    assert machine.num_processes() == 3
    machine.assert_right(0, 1, BAD)


def test_a_replaced_file_is_decoded_in_its_process_again(tmp_path):
    machine = Machine(tmp_path, write(tmp_path / "dataset"))
    for _ in range(2):
        machine.decode(BAD)

    os.utime(machine.root / f"videos/chunk-000/{TOP}/episode_{BAD:06d}.mp4", (1, 1))
    after = machine.decode(BAD)

    assert after.code == -signal.SIGKILL
    assert machine.visits() == ["first"] * 3


MARK = """
import os, sys
from raypipe.decode.journal import process_journal

with process_journal().marking(7):
    print("marked", flush=True)
    sys.stdin.readline()
    if "fork" in sys.argv:
        if os.fork() == 0:
            with process_journal().marking(8):
                os.kill(os.getpid(), 9)
        os.wait()
    if "raise" in sys.argv:
        raise RuntimeError
"""


class Marking:
    """A process that says that it decodes key 7, until it is told to go on."""

    def __init__(self, tmp, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-c", MARK, *words],
            env={**os.environ, "TMPDIR": str(tmp)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout.readline() == b"marked\n"

    def go_on(self):
        self.process.communicate(b"\n", timeout=60)

    def kill(self):
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def own_journal(tmp_path, monkeypatch):
    """The journal of a machine of its own, for this process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(journal_module, "_journals", {})
    return process_journal()


def test_a_process_counts_when_it_is_dead_and_not_before(tmp_path, own_journal):
    processes = [Marking(tmp_path) for _ in range(3)]
    alive = own_journal.count_deaths(7)

    counts = []
    for process in processes:
        process.kill()
        counts.append(own_journal.count_deaths(7))

    assert alive == 0
    assert counts == [1, 2, 3]


def test_a_process_that_nobody_has_waited_for_is_dead_all_the_same(tmp_path, own_journal):
    marking = Marking(tmp_path)

    marking.process.kill()
    os.waitid(os.P_PID, marking.process.pid, os.WEXITED | os.WNOWAIT)

    assert own_journal.count_deaths(7) == 1
    marking.process.communicate(timeout=60)


@pytest.mark.parametrize("words", [(), ("raise",)], ids=["ends", "raises"])
def test_a_process_that_ends_by_itself_leaves_no_death(tmp_path, own_journal, words):
    Marking(tmp_path, *words).go_on()

    assert own_journal.count_deaths(7) == 0
    assert not list(tmp_path.rglob("deaths"))


def test_the_death_of_a_forked_process_is_not_its_parents(tmp_path, own_journal):
    Marking(tmp_path, "fork").go_on()

    assert own_journal.count_deaths(8) == 1
    assert own_journal.count_deaths(7) == 0


def blame(journal, root, episode) -> None:
    """Let it look as if two processes had died over an episode."""
    meta = read_metadata(root)
    key = video_key(meta.storage, meta.video_file(meta.episodes.find_row(episode), TOP), episode, TOP)
    for number in range(2):
        grave = Path(journal._grave(key))
        grave.mkdir(parents=True, exist_ok=True)
        (grave / str(number)).touch()


def test_loader_gives_right_data_where_episodes_are_decoded_in_a_subprocess(root, own_journal):
    dataset = open_dataset(str(root))
    for episode in (1, BAD):
        blame(own_journal, str(root), episode)
    loader = local_loader(Pipeline(dataset, batch_size=4, seed=0, order={"live_spans": 2}, decode=MODES["rank"]))

    with pytest.warns(UserWarning, match="in a subprocess") as told:
        batches = list(loader)

    assert len(told) == 2
    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches:
        assert_equals_samples(batch, dataset)


def test_what_the_warning_of_a_subprocess_says_to_remove_ends_it(root, own_journal):
    pipe = Pipeline(open_dataset(str(root)), batch_size=4, seed=0, decode=MODES["rank"])
    blame(own_journal, str(root), BAD)
    with pytest.warns(UserWarning, match="If you ended them yourself, remove") as told:
        list(local_loader(pipe))

    shutil.rmtree(str(told[0].message).rpartition("remove ")[2].strip("'"))

    # A warning would be an error here.
    assert sorted(frames_of_all(list(local_loader(pipe)))) == frames_of_dataset(pipe.config.dataset)


def request(root, **fields) -> VideoRequest:
    frames = {"row": BAD, "camera": TOP, "frames": np.arange(1, 6)} | fields
    return VideoRequest(meta=read_metadata(root), **{"spec": DecodeSpec(), **frames})


def test_memory_that_runs_out_in_a_subprocess_is_no_fault_of_the_video(root, monkeypatch):
    def fail(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(FrameDecoder, "read_video", fail)

    # The parent raises what it is answered; a subprocess that dies would be held against the video.
    assert isinstance(_answer(request(str(root))), MemoryError)


# A filesystem that is not the local one, and that a subprocess can reach.
@pytest.mark.parametrize("prefix", ["", "file://"], ids=["path", "uri"])
def test_subprocess_gives_the_same_pixels(root, prefix):
    dataset = open_dataset(str(root))

    pixels = decode_isolated(request(f"{prefix}{root}"))

    wanted = np.stack([dataset.sample_of(BAD, frame)[TOP].numpy() for frame in range(1, 6)])
    np.testing.assert_array_equal(pixels.permute(0, 3, 1, 2).numpy(), wanted)
    assert decode_isolated(request(str(root), spec=DecodeSpec(resize=(16, 20)))).shape == (5, 16, 20, 3)


def test_what_the_subprocess_raises_is_raised_as_it_is(tmp_path):
    root = write(tmp_path / "dataset")
    video = root / f"videos/chunk-000/{TOP}/episode_{BAD:06d}.mp4"
    video.write_bytes(video.read_bytes()[:100])

    with pytest.raises(DatasetError, match=r"damaged video .*episode_000003\.mp4.* Fetch the file again"):
        decode_isolated(request(str(root)))


def test_subprocess_that_is_not_done_in_time_is_bad_data(root):
    with pytest.raises(DecodeError, match=r"was not done after 1e-06 s\. Fetch") as caught:
        decode_isolated(request(str(root), timeout_s=1e-6))

    assert_named(str(caught.value), root)
    assert len(decode_isolated(request(str(root)))) == 5


def test_subprocess_that_died_between_two_requests_is_no_bad_data(root):
    decode_isolated(request(str(root)))
    frames_module._process_child()._process.kill()

    assert len(decode_isolated(request(str(root)))) == 5


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """Three poisons on a Ray of their own, whose processes meet them; this process does not."""
    folder = tmp_path_factory.mktemp("poisoned")
    kinds = {
        "tasks": {"fatal": signal.SIGSEGV},
        "only tasks": {"roles": ("first",)},
        "ranks": {"fatal": signal.SIGSEGV},
    }
    machines = {name: Machine(folder / name, write(folder / name / "dataset"), **kind) for name, kind in kinds.items()}
    end_ray()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
        runtime_env={"env_vars": environment(folder, *machines.values())},
    )
    yield machines
    end_ray()


def pipeline(root, mode) -> Pipeline:
    feed = {"spans_per_block": 2}
    dataset = open_dataset(str(root))
    # An episode is one clip, and so of one task: each task that meets a poisonous clip dies of it twice.
    order = {"live_spans": 2, "clip_frames": 64}
    return Pipeline(dataset, batch_size=4, seed=0, order=order, decode=MODES[mode], feed=feed)


def test_video_that_ends_ray_tasks_is_an_error_on_the_rank(poisoned):
    machine = poisoned["tasks"]
    loader = pipeline(machine.root, "cluster").loader()

    with pytest.raises(DecodeError) as caught:
        list(loader)

    assert machine.visits() == ["first", "first", "isolated"]
    assert machine.num_processes() == 3
    assert "SIGSEGV" in str(caught.value)
    assert_named(str(caught.value), machine.root)


def test_video_that_ends_only_ray_tasks_gives_right_data(poisoned):
    machine = poisoned["only tasks"]

    batches = list(pipeline(machine.root, "cluster").loader())

    dataset = open_dataset(str(machine.root))
    assert machine.visits() == ["first", "first", "isolated"]
    assert sorted(frames_of_all(batches)) == frames_of_dataset(dataset)
    for batch in batches:
        assert_equals_samples(batch, dataset)


class Rank:
    def train(self, loader):
        for _ in loader:
            pass


def train(root) -> None:
    """Let a rank in a process of its own train for an epoch."""
    rank = ray.remote(Rank).remote()
    ray.get(rank.train.remote(pipeline(root, "rank").loader()), timeout=120)


def test_video_that_ends_ranks_is_an_error_in_the_third(poisoned):
    machine = poisoned["ranks"]

    for _ in range(2):
        with pytest.raises(ray.exceptions.ActorDiedError):
            train(machine.root)
    with pytest.raises(DecodeError) as caught:
        train(machine.root)

    assert machine.visits() == ["first", "first", "isolated"]
    assert machine.num_processes() == 3
    assert "SIGSEGV" in str(caught.value)
    assert_named(str(caught.value), machine.root)
