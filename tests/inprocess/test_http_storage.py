"""A dataset behind a plain web server, as fsspec reads it: no listing, no versions but dates, and no retries."""

import functools
import gzip
import http.server
import threading
from collections import Counter
from pathlib import Path

import pytest
from batches import MODES, WINDOWS, frames_of_all, local_loader, varied_spec
from torch.testing import assert_close

from raypipe.dataset import open_dataset
from raypipe.errors import DatasetError, DownloadError
from raypipe.format.episodes import list_tables
from raypipe.format.stats import read_stats
from raypipe.pipeline import Pipeline
from raypipe.storage import CacheSpec, Storage, copies, is_transient, open_root, open_storage
from raypipe.testing import write_dataset
from raypipe.views import describe
from raypipe.views.card import view_dataset


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("http") / "arm", varied_spec())


class WebServer:
    """Serves the folders of `top`; `asked` counts the paths that were asked for with GET, and with any method."""

    def __init__(self, top):
        self.asked, self.asked_in_any_way = Counter(), Counter()
        self.folder_status = 0
        """With which folders are answered; 0: a page of links."""
        self.missing_status = 404
        self.has_parts = False
        """Whether bytes of a file may be asked for, as of most servers."""
        self.has_dates = True
        self.has_sizes = True
        """Whether it tells when a file was written, and how large it is."""
        self.faults = {}
        """By the end of a path: what each next request is answered with, a status or ``"hang up"``."""
        self.breaks = {}
        """By the end of a path: after how many bytes the next bodies break off."""
        self.packs = "never"
        """Whether it sends files as gzip: never, where it is asked for that, always."""
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self):
                server.asked[self.path] += 1
                self.answer(super().do_GET)

            def do_HEAD(self):
                self.answer(super().do_HEAD)

            def answer(self, rightly):
                server.asked_in_any_way[self.path] += 1
                faults = next((ones for end, ones in server.faults.items() if self.path.endswith(end)), [])
                fault = faults.pop(0) if faults else 0
                if fault == "hang up":
                    self.close_connection = True
                    self.connection.close()
                elif fault:
                    self.send_error(fault)
                elif server.folder_status and Path(self.translate_path(self.path)).is_dir():
                    self.send_error(server.folder_status)
                elif not Path(self.translate_path(self.path)).exists():
                    self.send_error(server.missing_status)
                elif self.command == "GET" and self.is_to_be_packed():
                    # A range is then one of the packed bytes.
                    self.send_part(gzip.compress(Path(self.translate_path(self.path)).read_bytes()), "gzip")
                elif server.has_parts and "Range" in self.headers:
                    self.send_part(Path(self.translate_path(self.path)).read_bytes())
                else:
                    rightly()

            def copyfile(self, source, target):
                breaks = next((ones for end, ones in server.breaks.items() if self.path.endswith(end)), [])
                if breaks:
                    target.write(source.read(breaks.pop(0)))
                    self.close_connection = True
                else:
                    super().copyfile(source, target)

            def is_to_be_packed(self):
                is_asked = "gzip" in self.headers.get("Accept-Encoding", "")
                return server.packs == "always" or (server.packs == "asked" and is_asked)

            def send_part(self, content, code="identity"):
                asked = self.headers.get("Range", "bytes=0-")
                start, _, last = asked.removeprefix("bytes=").partition("-")
                part = content[int(start) : int(last) + 1 if last else None]
                self.send_response(206 if "Range" in self.headers else 200)
                self.send_header("Content-Encoding", code)
                self.send_header("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}")
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                self.wfile.write(part)

            def send_header(self, keyword, value):
                told = {"Last-Modified": server.has_dates, "Content-Length": server.has_sizes}
                if told.get(keyword, True):
                    super().send_header(keyword, value)

            def log_message(self, *_arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=top))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(local, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.01, 0.01, 0.01))
    with WebServer(local.parent) as running:
        yield running


def make_pipe(root, **parts):
    dataset = open_dataset(str(root)).windowed(offsets=WINDOWS)
    return Pipeline(dataset, batch_size=6, seed=3, order={"live_spans": 4}, decode=MODES["rank"], **parts)


def test_a_dataset_of_a_web_server_gives_the_batches_of_the_local_files(local, server, tmp_path):
    batches = list(local_loader(make_pipe(f"{server.address}/arm", cache={"folder": str(tmp_path / "cache")})))

    expected = list(local_loader(make_pipe(local)))
    assert frames_of_all(batches) == frames_of_all(expected)
    for one, other in zip(batches, expected, strict=True):
        assert_close(one["observation.images.top"], other["observation.images.top"], rtol=0, atol=0)
    videos = {path: count for path, count in server.asked.items() if path.endswith(".mp4")}
    assert videos == dict.fromkeys(videos, 1)
    assert len(videos) == len(list(local.rglob("*.mp4")))


def test_a_file_that_a_web_server_lacks_is_named(server):
    with pytest.raises(DatasetError, match=r"missing file .*data/none\.parquet"):
        open_root(f"{server.address}/arm").read_bytes("data/none.parquet")


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("status", [0, 403, 404])
def test_no_folder_of_a_web_server_is_asked_for_whether_it_shows_them_or_not(server, tmp_path, status, version):
    root = write_dataset(tmp_path / "web/arm", varied_spec(version=version))

    with WebServer(tmp_path / "web") as other:
        other.folder_status = status
        read = frames_of_all(local_loader(make_pipe(f"{other.address}/arm")))
        told = describe(f"{other.address}/arm")
        card = view_dataset(open_dataset(f"{other.address}/arm"))

    assert ("note", "a web server") in [(one.severity, one.text[:12]) for one in card.remarks]
    assert not [one.text for one in card.remarks if one.severity == "error"]
    assert dict(card.lines)["checked"].startswith("meta/; for the rest copy the dataset")
    assert len(card.thumbnails) == len(view_dataset(open_dataset(str(root))).thumbnails)
    assert read == frames_of_all(local_loader(make_pipe(root)))
    assert told.episodes == describe(str(root)).episodes
    assert not [path for path in other.asked_in_any_way if "." not in Path(path).name]


def test_episode_tables_are_found_by_their_numbers(server, local, tmp_path):
    (table,) = local.glob("meta/episodes/*/*.parquet")
    root = tmp_path / "web/arm/meta/episodes"
    names = [f"chunk-{chunk:03d}/file-{file:03d}.parquet" for chunk, file in ((0, 0), (0, 1), (1, 0), (3, 0))]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(table.read_bytes())

    with WebServer(tmp_path / "web") as other:
        found = list(list_tables(open_root(f"{other.address}/arm")))

    assert found == [f"meta/episodes/{name}" for name in names[:3]]


def test_a_folder_that_a_web_server_does_not_show_is_not_taken_for_empty(server):
    server.folder_status = 404

    with pytest.raises(DownloadError, match=r"shows no files in .*/arm/data'.* copy the dataset"):
        open_root(f"{server.address}/arm").list_files("data")


@pytest.mark.parametrize("fault", [503, 429, 500, "hang up"])
def test_a_web_server_that_fails_for_a_while_is_asked_again(server, local, fault):
    # HEAD and then GET of one question.
    server.faults = {"meta/info.json": [fault] * 2, "meta/stats.json": [fault] * 2, "file-000.parquet": [fault] * 2}

    dataset = open_dataset(f"{server.address}/arm")

    assert dataset.meta.num_frames == open_dataset(str(local)).meta.num_frames
    assert read_stats(dataset.meta.storage).keys() == read_stats(open_dataset(str(local)).meta.storage).keys()
    assert not any(server.faults.values())


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (503, "is answered with status 503"),
        (401, "status 401"),
        (403, "status 403"),
        ("hang up", "is not answered: "),
    ],
)
@pytest.mark.parametrize("kept", [CacheSpec(), None])
@pytest.mark.parametrize("read_before", [(), ("meta/info.json",)])
def test_a_file_of_a_web_server_that_does_not_answer_is_not_taken_for_missing(server, fault, told, kept, read_before):
    storage = Storage(f"{server.address}/arm", kept)
    for name in read_before:
        storage.read_bytes(name)
    server.faults = {"meta/stats.json": [fault] * 1000}

    for ask in (storage.exists, storage.size_bytes, storage.read_bytes, storage.open_file):
        with pytest.raises(DownloadError) as caught:
            ask("meta/stats.json")

        assert f"{server.address}/arm/meta/stats.json" in str(caught.value)
        assert told in str(caught.value)
        assert is_transient(caught.value)


@pytest.mark.parametrize("fault", [503, 429, "hang up"])
@pytest.mark.parametrize("has_dates", [True, False])
def test_an_open_file_of_a_web_server_that_fails_for_a_while_is_read_on(server, local, monkeypatch, fault, has_dates):
    # Without a cache, and with one that cannot tell one content of a file from another.
    monkeypatch.setattr("raypipe.storage.remote.AHEAD_BYTES", 1 << 10)
    server.has_parts, server.has_dates = True, has_dates
    video = next(local.rglob("*.mp4"))
    storage = Storage(f"{server.address}/arm", None if has_dates else CacheSpec())
    content, half = video.read_bytes(), video.stat().st_size // 2

    with storage.open_file(video.relative_to(local).as_posix()) as stream:
        server.faults = {".mp4": [fault] * 2}
        first = stream.read(100)
        stream.seek(half)
        server.faults = {".mp4": [fault] * 2}
        rest = stream.read()
        assert stream.tell() == stream.seek(0, 2) == len(content)

    assert (first, rest) == (content[:100], content[half:])
    assert not any(server.faults.values())


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        (503, DownloadError, "is answered with status 503"),
        (403, DownloadError, "is answered with status 403"),
        ("hang up", DownloadError, "is not answered: "),
        (404, DatasetError, "missing file"),
    ],
)
@pytest.mark.parametrize("kept", [CacheSpec(), None])
def test_an_open_file_of_a_web_server_that_fails_for_good_is_named(server, fault, error, told, kept):
    server.has_parts, server.has_dates = True, False
    stream = Storage(f"{server.address}/arm", kept).open_file("meta/info.json")
    server.faults = {"meta/info.json": [fault] * 1000}

    with pytest.raises(error, match=told) as caught:
        stream.read()

    assert f"{server.address}/arm/meta/info.json" in str(caught.value)


def test_a_run_without_a_cache_outlasts_faults_of_a_web_server(server, local):
    server.has_parts = True
    pipe = make_pipe(f"{server.address}/arm", cache="off")
    server.faults = {".mp4": [0, 503] * 20, ".parquet": [0, 503] * 20}

    assert frames_of_all(local_loader(pipe)) == frames_of_all(local_loader(make_pipe(local)))


def test_a_body_that_breaks_off_is_fetched_again_from_its_start(server, local):
    size = (local / "meta/info.json").stat().st_size
    server.breaks = {"meta/info.json": [size - 1, 1]}

    assert open_root(f"{server.address}/arm").read_bytes("meta/info.json") == (local / "meta/info.json").read_bytes()
    assert server.asked["/arm/meta/info.json"] == 3


def test_a_file_of_which_a_web_server_does_not_tell_the_size_is_read_whole(server, local):
    server.has_sizes = False

    with Storage(f"{server.address}/arm").open_file("meta/info.json") as stream:
        assert stream.read() == (local / "meta/info.json").read_bytes()


@pytest.mark.parametrize("has_dates", [True, False])
def test_a_dataset_of_a_web_server_that_tells_no_sizes_is_read_with_a_cache(server, local, tmp_path, has_dates):
    server.has_sizes, server.has_dates = False, has_dates

    pipe = make_pipe(f"{server.address}/arm", cache={"folder": str(tmp_path / "cache")})

    assert frames_of_all(local_loader(pipe)) == frames_of_all(local_loader(make_pipe(local)))


@pytest.mark.parametrize("kept", [CacheSpec(), None])
def test_a_file_of_unknown_size_has_its_limit(server, local, monkeypatch, kept):
    server.has_sizes = False
    size = (local / "meta/info.json").stat().st_size
    for most in (size - 1, size):
        monkeypatch.setattr("raypipe.storage.remote.MOST_JSON_BYTES", most)
        storage = Storage(f"{server.address}/arm", kept)
        if most < size:
            with pytest.raises(DownloadError, match=rf"info\.json' has more than {most:,} bytes"):
                storage.read_bytes("meta/info.json")
        else:
            assert storage.read_bytes("meta/info.json") == (local / "meta/info.json").read_bytes()


@pytest.mark.parametrize("status", [404, 410])
def test_a_file_that_a_web_server_says_it_lacks_is_missing_at_once(server, status):
    storage = open_storage(f"{server.address}/arm")
    server.faults = {"meta/stats.json": [status] * 1000}

    assert not storage.exists("meta/stats.json")
    for ask in (storage.size_bytes, storage.read_bytes, storage.open_file):
        with pytest.raises(DatasetError, match="missing file"):
            ask("meta/stats.json")

    assert server.asked_in_any_way["/arm/meta/stats.json"] <= 7, "it was asked for again"


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_bucket_that_refuses_what_it_lacks_is_read_and_its_data_are_not_taken_for_missing(server, tmp_path, version):
    # As S3 over HTTPS answers where nobody may list the bucket.
    root = write_dataset(tmp_path / "web/arm", varied_spec(version=version))
    expected = frames_of_all(local_loader(make_pipe(root)))

    with WebServer(tmp_path / "web") as other:
        other.missing_status = other.folder_status = 403
        assert frames_of_all(local_loader(make_pipe(f"{other.address}/arm"))) == expected
        with pytest.raises(DownloadError, match=r"none/meta/info\.json' is answered with status 403"):
            open_dataset(f"{other.address}/none")
        gone = make_pipe(f"{other.address}/arm", cache={"folder": str(tmp_path / "cache")}, on_bad_episode="skip")
        next(root.rglob("*.mp4")).unlink()
        with pytest.raises(DownloadError, match=r"\.mp4' is answered with status 403"):
            list(local_loader(gone))


def test_a_web_server_that_does_not_know_who_asks_lacks_neither_cameras_nor_statistics(server):
    server.faults = {".mp4": [401] * 1000}
    with pytest.raises(DownloadError, match=r"\.mp4' is answered with status 401"):
        open_dataset(f"{server.address}/arm")

    server.faults = {"stats.json": [401] * 1000}
    with pytest.raises(DownloadError, match=r"stats\.json' is answered with status 401"):
        _ = open_dataset(f"{server.address}/arm").stats


def test_a_camera_that_a_web_server_refuses_is_left_out_with_the_status_and_not_taken_for_missing(server, local):
    camera, *others = open_dataset(str(local)).spec.cameras
    server.faults = {path.relative_to(local).as_posix(): [403] * 1000 for path in local.glob(f"videos/{camera}/*/*")}

    with pytest.warns(UserWarning, match=rf"leaving out {camera}: video files are answered with status 403: refused"):
        dataset = open_dataset(f"{server.address}/arm")

    assert dataset.missing_cameras == (camera,)
    assert dataset.spec.cameras == tuple(others)
    assert any(camera in note and "status 403" in note for note in describe(f"{server.address}/arm").notes)
    with pytest.raises(DownloadError, match=r"\.mp4 of .* are answered with status 403: .*Check your permissions"):
        open_dataset(f"{server.address}/arm", cameras=[camera])


def test_statistics_that_a_web_server_refuses_are_told_of(server):
    dataset = open_dataset(f"{server.address}/arm")
    server.faults = {"stats.json": [403] * 1000}

    with pytest.warns(UserWarning, match=r"no statistics are read: meta/stats\.json is answered with status 403"):
        assert dataset.stats == {}


@pytest.mark.parametrize(
    ("version", "refused"),
    [("v3.0", "file-000.parquet"), ("v2.1", "episodes.jsonl"), ("v3.0", "tasks.parquet"), ("v2.1", "tasks.jsonl")],
)
def test_a_table_that_a_web_server_refuses_is_not_taken_for_bad_data(server, tmp_path, version, refused):
    write_dataset(tmp_path / "web/arm", varied_spec(version=version))

    with WebServer(tmp_path / "web") as other:
        other.faults = {refused: [403] * 1000}
        with pytest.raises(DownloadError, match=rf"{refused} of .* is answered with status 403"):
            open_dataset(f"{other.address}/arm")


def test_an_outage_of_a_web_server_is_not_skipped_as_bad_data(server, tmp_path):
    pipe = make_pipe(f"{server.address}/arm", cache={"folder": str(tmp_path / "cache")}, on_bad_episode="skip")
    server.faults = {".mp4": [503] * 10_000}

    with pytest.raises(DownloadError, match=r"\.mp4' is answered with status 503"):
        list(local_loader(pipe))


def test_files_of_a_web_server_count_as_they_are_met(server, local, tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "PART_BYTES", 0)
    videos = sorted(path.relative_to(local).as_posix() for path in local.rglob("*.mp4"))
    sizes = [(local / name).stat().st_size for name in videos]
    cache = CacheSpec(folder=str(tmp_path / "cache"), max_bytes=sum(sizes) - 1)
    storage = Storage(f"{server.address}/arm", cache)

    before = [storage.is_ranged(name) for name in videos]

    assert before == [False] * (len(videos) - 1) + [True]
    assert all(storage.is_ranged(name) for name in videos), "by now it is known that they do not fit"


def test_a_web_server_that_gives_whole_files_alone_is_told_of(server, local, tmp_path):
    storage = Storage(f"{server.address}/arm", CacheSpec(folder=str(tmp_path / "cache"), whole_bytes=0))
    name = next(local.rglob("*.mp4")).relative_to(local).as_posix()

    with pytest.raises(DownloadError, match=rf"10 bytes from 5 of '{name}' came: .* whole files alone\. Give the"):
        storage.open_ranged(name).need(5, 15)
    with pytest.raises(DownloadError, match=rf"10 bytes from 5 of '{name}' came: .* whole files alone\. Give the"):
        storage.cached(None).read_range(name, 5, 15)
    with storage.cached(None).open_file(name) as stream:
        stream.seek(5)
        with pytest.raises(DownloadError, match=rf"bytes from 5 of '{name}' came: .* whole files alone\. Give the"):
            stream.read(10)
    for stop in (None, 1 << 30):
        # The whole file is no longer than that.
        with pytest.raises(DownloadError, match=rf"bytes from 5 of '{name}' came: .* whole files alone\. Give the"):
            Storage(f"{server.address}/arm").read_range(name, 5, stop)


def test_a_web_server_is_asked_for_no_packed_body(server, local):
    server.packs, server.has_parts = "asked", True
    video = next(local.rglob("*.mp4"))
    name, content = video.relative_to(local).as_posix(), video.read_bytes()
    storage = Storage(f"{server.address}/arm")

    assert storage.read_range(name, 100, 200) == content[100:200]
    assert storage.read_bytes(name) == content
    with storage.open_file(name) as stream:
        stream.seek(300)
        assert stream.read(100) == content[300:400]


@pytest.mark.parametrize("kept", [CacheSpec(), None])
def test_a_web_server_that_packs_whole_files_all_the_same_is_read(server, local, kept):
    server.packs = "always"

    content = Storage(f"{server.address}/arm", kept).read_bytes("meta/info.json")

    assert content == (local / "meta/info.json").read_bytes()
