import ctypes
import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, Phase, settings

# A shared 2-core machine pauses at random: a deadline per example would judge the machine, not the code.
settings.register_profile("raypipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A mutant is to be found, not to be explained: the smallest example takes minutes.
settings.register_profile(
    "mutants", settings.get_profile("raypipe"), phases=[Phase.explicit, Phase.generate], database=None
)
settings.load_profile("raypipe")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Ray (2.60) clears the handlers of SIGSEGV, SIGABRT, SIGILL and SIGFPE when it ends: a crash after that would leave
    # no word. Disabled first: what is enabled is not set again.
    faulthandler.disable()
    faulthandler.enable(file=item.config.stash[fault_handler_stderr_fd_key])


@pytest.fixture(scope="module", autouse=True)
def _free_memory_goes_back() -> Iterator[None]:
    # Each file opens videos in threads of its own, and glibc keeps what they freed: a gigabyte by the end of all tests.
    yield
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A v3.0 dataset of a few short episodes with two cameras; read-only."""
    # Imported here: unit tests write no files, and torchcodec takes 2 s to import.
    from raypipe.testing import SynthSpec, write_dataset

    return write_dataset(tmp_path_factory.mktemp("tiny") / "dataset", SynthSpec())


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    # A shell starts what runs in the background with Ctrl-C ignored, and programs that tests interrupt inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray writes a token into the home folder, and matplotlib a cache: not into the user's.
    os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))
    # Tests of remote roots without a server.
    os.environ["RAYPIPE_PROTOCOLS"] = "memory"
    # Ray Train takes reports and looks at its workers every 2 s if nothing else is said: every save would wait for it.
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
