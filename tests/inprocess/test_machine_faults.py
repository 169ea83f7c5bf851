"""What the machine does to files that are sound: cut under a reader, unreadable, too many of them open."""

import os
import shutil
import subprocess
import sys

import pytest
from batches import TOP
from test_http_storage import WebServer

from raypipe.decode import load_torchcodec
from raypipe.errors import ConfigError
from raypipe.storage import CacheSpec, Storage
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

CUT_UNDER_A_READER = """
import os, sys
from raypipe.errors import DatasetError
from raypipe.format import read_metadata
from raypipe.format import RowReader
meta = read_metadata(sys.argv[1])
reader = RowReader(meta, ["action"])
assert len(reader.read_episode(0)) == 300
os.truncate(meta.storage.locate(meta.data_file(0)), 4096)
try:
    reader.read_episode(7)
except DatasetError as error:
    print("told", error)
"""


def test_a_data_file_that_is_cut_under_its_reader_is_an_error_and_the_process_lives(tmp_path):
    root = write_dataset(tmp_path / "rows", SynthSpec(lengths=(300,) * 8, cameras=(), episodes_per_data_file=8))

    done = subprocess.run(
        [sys.executable, "-c", CUT_UNDER_A_READER, root], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("told episode 7 of")
    assert "file-000.parquet" in done.stdout


FAILING_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
ssize_t read(int fd, void *buffer, size_t size) {
    static ssize_t (*next)(int, void *, size_t);
    char link[64], path[4096];
    if (!next) next = dlsym(RTLD_NEXT, "read");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (strstr(path, BAD_NAME)) {
        off_t at = lseek(fd, 0, SEEK_CUR);
        if (at >= BAD_START && at < BAD_STOP) { errno = EIO; return -1; }
        if (at < BAD_START && at + (off_t)size > BAD_START) size = BAD_START - at;
    }
    return next(fd, buffer, size);
}
"""
"""Reading the frames of a video behind the first 2 kB fails as on a bad disk; its index can be read."""

SKIPPING = """
import os, sys, warnings
sys.path.insert(0, sys.argv[2])
from batches import frames_of_all, local_loader
from raypipe.dataset import open_dataset
from raypipe.errors import RaypipeError
from raypipe.pipeline import Pipeline
from raypipe.storage import retry
retry.RETRY_WAITS_S = ()
cache = {"folder": os.environ["CACHE"]} if "CACHE" in os.environ else {}
parts = {"on_bad_episode": "skip", "max_bad_episodes": 4, **({"cache": cache} if cache else {})}
pipe = Pipeline(open_dataset(sys.argv[1]), batch_size=5, seed=0, **parts)
try:
    print(len(frames_of_all(local_loader(pipe))), "frames")
except RaypipeError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    camera = CameraSpec(name=TOP, height=240, width=320, gop=2)
    return write_dataset(
        tmp_path_factory.mktemp("disk") / "videos", SynthSpec(version="v2.1", lengths=(40,) * 4, cameras=(camera,))
    )


def read_all(root, **environment):
    tests = os.path.dirname(os.path.dirname(__file__))
    command = [sys.executable, "-W", "ignore", "-c", SKIPPING, root, tests]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment}
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")
def test_a_disk_that_fails_under_ffmpeg_is_no_bad_episode(videos, tmp_path):
    video = next(videos.glob("videos/**/episode_000002.mp4")).read_bytes()
    source, library = tmp_path / "disk.c", tmp_path / "disk.so"
    source.write_text(FAILING_DISK)
    bad = ['-DBAD_NAME="episode_000002.mp4"', "-DBAD_START=2048", f"-DBAD_STOP={video.index(b'moov') - 4}"]
    subprocess.run(["cc", "-shared", "-fPIC", *bad, source, "-o", library, "-ldl"], check=True)

    done = read_all(videos, LD_PRELOAD=str(library))

    assert video.index(b"moov") > 2 * 2048
    assert done.stdout.startswith("DownloadError"), done.stdout + done.stderr
    assert "episode_000002.mp4': Input/output error" in done.stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")
def test_a_disk_that_fails_under_a_cached_copy_is_no_bad_episode(videos, tmp_path):
    name = next(path.relative_to(videos).as_posix() for path in videos.glob("videos/**/episode_000002.mp4"))
    video = (videos / name).read_bytes()
    source, library, cache = tmp_path / "disk.c", tmp_path / "disk.so", tmp_path / "cache"
    source.write_text(FAILING_DISK)

    with WebServer(videos) as server:
        storage = Storage(server.address, CacheSpec(folder=str(cache)))
        with storage.hold(name) as held:
            copy = held.path
        bad = [f'-DBAD_NAME="{os.path.basename(copy)}"', "-DBAD_START=2048", f"-DBAD_STOP={video.index(b'moov') - 4}"]
        subprocess.run(["cc", "-shared", "-fPIC", *bad, source, "-o", library, "-ldl"], check=True)
        done = read_all(server.address, LD_PRELOAD=str(library), CACHE=str(cache))

    assert done.stdout.startswith("DownloadError"), done.stdout + done.stderr
    assert f"{copy}': Input/output error" in done.stdout


def test_too_many_open_files_are_no_damaged_file(tmp_path):
    root = write_dataset(tmp_path / "rows", SynthSpec(lengths=(3, 3), cameras=()))
    code = (
        "import resource, sys; from raypipe.format import read_metadata; from raypipe.format.tables import "
        "open_parquet; from raypipe.errors import RaypipeError; meta = read_metadata(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try:\n    open_parquet(meta.storage, meta.data_file(0))\n"
        "except RaypipeError as error:\n    print(type(error).__name__, error)"
    )

    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=False, timeout=60)

    assert done.stdout.startswith("DownloadError this machine cannot read"), done.stdout + done.stderr
    assert "Too many open files" in done.stdout


LOAD = """
import sys
import raypipe as rp

pipe = rp.Pipeline(rp.open_dataset(sys.argv[1]), batch_size=8, seed=0, on_bad_episode="skip")
loader = pipe.loader()
for _ in range(2):
    try:
        next(iter(loader))
    except rp.ConfigError as error:
        print("told", error)
print(loader.stats().decoded_frames, "frames")
"""


@pytest.fixture
def without_ffmpeg(tmp_path):
    """Return the environment of a machine on which no version of FFmpeg can be loaded."""
    for version in range(50, 70):
        (tmp_path / f"libavutil.so.{version}").touch()
    return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}


def test_machine_without_ffmpeg_is_told_so_in_a_paragraph_and_no_episode_is_called_bad(tiny_dataset, without_ffmpeg):
    command = [sys.executable, "-c", LOAD, str(tiny_dataset)]

    done = subprocess.run(command, env=without_ffmpeg, capture_output=True, text=True, check=False, timeout=120)

    first, second, figures = done.stdout.splitlines()
    assert first.startswith("told no video can be decoded here: torchcodec finds FFmpeg's shared libraries in none")
    assert "apt-get install ffmpeg" in first
    # The error has ended the iteration, and figures need no codec.
    assert (second, figures) == (first, "0 frames")
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        (
            "OSError: libavutil.so.60: no such file\nOSError: core5.so: undefined symbol: _ZN",
            "core5.so: undefined symbol",
        ),
        ("No module named 'torchcodec'", "No module named 'torchcodec'"),
    ],
)
def test_torchcodec_that_does_not_fit_torch_is_told_apart_from_a_missing_ffmpeg(monkeypatch, tmp_path, told, cause):
    (tmp_path / "torchcodec.py").write_text(f"raise RuntimeError({told!r})")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(ConfigError, match=rf"torchcodec cannot be loaded \({cause}.* must fit that of torch"):
        load_torchcodec()
