"""Which roots raypipe opens: those of known protocols, none that chains others, and no stranger's without a word."""

import fsspec
import pytest
from account_cases import HandRun
from fsspec.implementations.memory import MemoryFileSystem

from raypipe.account.folder import open_filesystem
from raypipe.errors import ConfigError
from raypipe.mixture import Mixture
from raypipe.plan import OrderSpec, SelectionSpec
from raypipe.storage import open_root, open_storage
from raypipe.views.account import StepQuery, check_run, locate_recorded, read_frames

CHAINS = ("reference::http://host/refs.json", "reference://::http://host/refs.json", "simplecache::s3://bucket/arm")


class Trap(MemoryFileSystem):
    """A filesystem that a file from a stranger may name; opening it is the harm."""

    protocol = "trap"
    cachable = False
    opened = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        Trap.opened += 1


@pytest.fixture
def trap(monkeypatch):
    fsspec.register_implementation("trap", Trap, clobber=True)
    monkeypatch.setattr(Trap, "opened", 0)
    return Trap


@pytest.mark.parametrize("open_it", [open_storage, open_root, open_filesystem])
def test_a_protocol_that_is_not_listed_is_refused_before_it_is_opened(trap, open_it):
    with pytest.raises(ConfigError, match=r"'trap://x'.*s3.*RAYPIPE_PROTOCOLS=trap"):
        open_it("trap://x")

    assert trap.opened == 0


def test_pyarrow_is_not_asked_to_open_what_fsspec_would(trap):
    with pytest.raises(ConfigError, match=r"fsspec\+trap://x"):
        open_filesystem("fsspec+trap://x")

    assert trap.opened == 0


def test_protocols_of_the_environment_are_opened_too(trap, monkeypatch):
    monkeypatch.setenv("RAYPIPE_PROTOCOLS", "memory, trap")

    assert not open_storage("trap://x/y").exists("z")
    assert trap.opened == 1


@pytest.mark.parametrize("open_it", [open_storage, open_root, open_filesystem])
@pytest.mark.parametrize("root", CHAINS)
def test_a_chain_of_filesystems_is_refused_whatever_the_environment_says(monkeypatch, open_it, root):
    monkeypatch.setenv("RAYPIPE_PROTOCOLS", "reference,simplecache,reference::http")

    with pytest.raises(ConfigError, match=rf"{root}.*chains"):
        open_it(root)


def test_a_local_path_may_have_colons_and_is_never_a_chain(tmp_path, trap):
    folder = tmp_path / "trap::x" / "arm::1"
    storage = open_storage(folder)
    storage.write_atomic("a.json", b"1")

    assert (folder / "a.json").read_bytes() == b"1"
    assert open_storage(f"file://{tmp_path}/plain").path == f"{tmp_path}/plain"
    assert trap.opened == 0


def test_a_member_of_a_mixture_file_is_held_to_the_same(tmp_path, trap):
    file = tmp_path / "mix.yaml"
    file.write_text("datasets:\n  - root: trap://x\n")

    with pytest.raises(ConfigError, match="trap://x"):
        Mixture(str(file))
    assert trap.opened == 0


@pytest.fixture
def run_folder(tiny_dataset, tmp_path):
    index, axis = read_frames(str(tiny_dataset), SelectionSpec())

    def write(root, **selection):
        made = HandRun(index, OrderSpec(seed=3, live_spans=2), axis=axis)
        made.root = root
        made.selection = selection
        made.start(1, 4)
        made.steps(2)
        made.write_heartbeat(tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize("root", ["memory://lab/arm", "hf://datasets/lab/arm@" + "a" * 40, "lab/arm", "../arm"])
def test_a_root_that_only_the_account_names_is_not_opened_unless_it_is_a_local_path(run_folder, root):
    folder = run_folder(root)

    with pytest.raises(ConfigError, match=rf"{root}.*--root {root}"):
        check_run(folder)
    with pytest.raises(ConfigError, match=rf"{root}.*--root {root}"):
        locate_recorded(folder, StepQuery(step=0, rank=0))


def test_a_local_root_of_the_account_is_opened_and_any_that_the_user_names(run_folder, tiny_dataset):
    assert check_run(run_folder(str(tiny_dataset))).is_exact
    assert check_run(run_folder("memory://gone/arm"), root=str(tiny_dataset)).is_exact


def test_weights_that_only_the_account_names_are_not_fetched(run_folder, tiny_dataset, trap, monkeypatch):
    monkeypatch.setenv("RAYPIPE_PROTOCOLS", "trap")
    folder = run_folder(str(tiny_dataset), weights="trap://x/weights.parquet")

    with pytest.raises(ConfigError, match=r"trap://x/weights.parquet"):
        check_run(folder)
    assert trap.opened == 0


def test_members_that_only_the_account_names_are_not_opened(run_folder, trap, monkeypatch):
    monkeypatch.setenv("RAYPIPE_PROTOCOLS", "trap")
    monkeypatch.setattr(HandRun, "members", ({"name": "arm", "root": "trap://x", "selection": {}},))

    with pytest.raises(ConfigError, match=r"trap://x.*mixture file.*--root"):
        check_run(run_folder(""))
    assert trap.opened == 0
