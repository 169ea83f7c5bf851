"""A dataset behind a plain web server, as fsspec reads it: folders as pages of links, no versions but dates."""

import functools
import http.server
import threading
from collections import Counter

import pytest
from batches import MODES, WINDOWS, frames_of_all, varied_spec
from local_source import local_loader
from torch.testing import assert_close

from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError
from raypipe.pipeline import Pipeline
from raypipe.storage import open_root
from raypipe.testing import write_dataset


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("http") / "arm", varied_spec())


@pytest.fixture
def web(local):
    """The address of the dataset, and how often each path was asked for with GET."""
    asked = Counter()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked[self.path] += 1
            super().do_GET()

        def log_message(self, *_arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=local.parent))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/arm", asked
    server.shutdown()
    server.server_close()
    thread.join()


def make_pipe(root, **parts):
    dataset = open_dataset(str(root)).windowed(offsets=WINDOWS)
    return Pipeline(dataset, batch_size=6, seed=3, order={"live_spans": 4}, decode=MODES["rank/block"], **parts)


def test_a_dataset_of_a_web_server_gives_the_batches_of_the_local_files(local, web, tmp_path):
    root, asked = web

    batches = list(local_loader(make_pipe(root, cache={"folder": str(tmp_path / "cache")})))

    expected = list(local_loader(make_pipe(local)))
    assert frames_of_all(batches) == frames_of_all(expected)
    for one, other in zip(batches, expected, strict=True):
        assert_close(one["observation.images.top"], other["observation.images.top"], rtol=0, atol=0)
    videos = {path: count for path, count in asked.items() if path.endswith(".mp4")}
    assert videos == dict.fromkeys(videos, 1)
    assert len(videos) == len(list(local.rglob("*.mp4")))


def test_a_file_that_a_web_server_lacks_is_named(web):
    root, _ = web

    with pytest.raises(DatasetError, match=r"missing file .*data/none\.parquet"):
        open_root(root).read_bytes("data/none.parquet")
