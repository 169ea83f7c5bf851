"""How the program ends: exit codes, full disks, closed pipes, names that would steer the terminal."""

import os
import resource
import subprocess
import sys

import pytest
from program import run_program

import raypipe
import raypipe.views.info
from raypipe.testing import SynthSpec, write_dataset
from raypipe.text import terminal
from raypipe.validate.deep import read_decoder_log

PROGRAM = [sys.executable, "-c", "from raypipe.cli import main; main()"]


def run_apart(*arguments, **options):
    return subprocess.run([*PROGRAM, *arguments], stderr=subprocess.PIPE, check=False, timeout=60, **options)


@pytest.mark.parametrize("module", ["raypipe", "raypipe.cli"])
def test_python_runs_the_program_by_the_name_of_its_module(module, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", module, *arguments]
        return subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)

    version, usage, wrong = run("--version"), run("info", "--help"), run("info", str(tmp_path / "nothing"))

    assert (version.returncode, version.stdout) == (0, f"raypipe {raypipe.__version__}\n")
    assert "Usage: raypipe info" in usage.stdout
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("raypipe: ")


@pytest.fixture
def broken(monkeypatch):
    def describe(_root: str) -> None:
        raise RuntimeError("no such\nluck \x1b[31m")

    monkeypatch.setattr(raypipe.views.info, "describe", describe)


@pytest.mark.usefixtures("broken")
def test_an_unexpected_error_has_its_own_exit_code_and_asks_for_a_report():
    done = run_program("info", "somewhere")

    assert done.returncode == 3
    assert done.stderr.startswith("raypipe: unexpected RuntimeError: no such luck \\x1b[31m. ")
    assert raypipe.__version__ in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("broken")
def test_debug_adds_the_traceback_and_keeps_the_exit_code():
    done = run_program("info", "somewhere", "--debug")

    assert done.returncode == 3
    assert "Traceback" in done.stderr


def test_names_of_a_dataset_do_not_steer_the_terminal(tmp_path):
    root = write_dataset(tmp_path / "odd\x1b[2J", SynthSpec(cameras=(), robot_type="arm\x1b]0;owned\x07\u202e"))

    for done in (run_program("info", root), run_program("info", tmp_path / "no\x1b[2J")):
        assert "\\x1b[2J" in done.stdout + done.stderr
        assert not set("\x1b\x07\u202e") & set(done.stdout + done.stderr)


def test_letters_that_the_terminal_lacks_are_written_as_escapes(tmp_path):
    root = write_dataset(tmp_path / "odd", SynthSpec(cameras=(), tasks=("pick \N{CJK UNIFIED IDEOGRAPH-4E2D}",)))

    for command in ("info", "stats"):
        environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
        done = run_apart(command, root, stdout=subprocess.PIPE, env=environment)

        assert (done.returncode, done.stderr) == (0, b"")
        assert (b"pick \\u4e2d" in done.stdout) is (command == "info")


EVIL = "odd[bold]\x1b]0;owned\x07\u202e"


def show_epoch():
    with terminal.progress_bar(EVIL, 2, lambda: EVIL, is_on=True):
        pass


def show_count():
    with terminal.count_bar(EVIL, 2, is_on=True) as advance:
        advance(1)


def show_bytes():
    with terminal.count_bar(EVIL, 2, is_on=True, of_bytes=True) as advance:
        advance(1)


@pytest.mark.parametrize("show", [show_epoch, show_count, show_bytes])
def test_titles_of_bars_do_not_steer_the_terminal(show, monkeypatch, capfd):
    monkeypatch.setattr(terminal, "is_shown", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    show()

    told = capfd.readouterr().err
    # As much of it as fits.
    assert "odd[bold]\\x1b]0;o" in told
    assert not set("\x07\u202e") & set(told)
    assert "\x1b]0" not in told


def test_what_libraries_write_while_videos_are_decoded_does_not_steer_the_terminal(capfd):
    with read_decoder_log():
        os.write(2, b"odd \x1b]0;owned\x07\n")

    assert capfd.readouterr().err == "odd \\x1b]0;owned\\x07\n"


def test_an_output_that_does_not_fit_on_the_disk_is_named_and_leaves_what_was_there(tiny_dataset, tmp_path):
    file = tmp_path / "told.json"
    file.write_text("before")

    def let_files_be_small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    done = run_apart("info", tiny_dataset, "--json-file", file, stdout=subprocess.PIPE, preexec_fn=let_files_be_small)

    assert done.returncode == 2
    assert str(file).encode() in done.stderr
    assert b"Traceback" not in done.stderr
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["told.json"]


def test_a_reader_that_has_gone_is_no_error_to_tell(tiny_dataset):
    read_end, write_end = os.pipe()
    os.close(read_end)

    for arguments in (("info", tiny_dataset), ("info", tiny_dataset, "--json")):
        done = run_apart(*arguments, stdout=write_end)

        assert done.returncode == 1
        assert done.stderr == b""
    os.close(write_end)


def test_a_path_that_is_no_utf8_is_refused_in_words(tmp_path):
    done = run_apart("info", os.fsencode(tmp_path) + b"/\xff", stdout=subprocess.PIPE)

    assert done.returncode == 2
    assert b"is no UTF-8" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("info",), ("validate", "--where", "process"), ("plan", "--world-size=1", "--batch-size=2")]
)
def test_a_home_that_cannot_be_written_ends_no_command(tiny_dataset, arguments):
    environment = {**os.environ, "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"}

    done = run_apart(arguments[0], tiny_dataset, *arguments[1:], stdout=subprocess.PIPE, env=environment)

    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_pyarrow_imports_pandas_ends_the_program(tmp_path):
    write_dataset(tmp_path / "dataset", SynthSpec(lengths=(4,), cameras=()))
    interrupt = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "pandas":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
"""
    done = subprocess.run(
        [sys.executable, "-c", f"{interrupt}\n{PROGRAM[-1]}", "info", tmp_path / "dataset"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stdout) == (130, "")
