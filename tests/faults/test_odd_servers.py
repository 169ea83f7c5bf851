"""Servers whose answers make no sense, have no end, or ask to wait: a `DownloadError`, whatever they say."""

import functools
import http.server
import json
import threading
import time
import warnings

import pytest
from batches import varied_spec
from hub_server import HubServer

from raypipe.dataset import DownloadSpec, download_dataset, open_dataset
from raypipe.errors import DatasetError, DownloadError
from raypipe.storage import retry_transient
from raypipe.storage.hub.client import PassingError
from raypipe.storage.request_budget import Budget, parse_wait_s, use_gate
from raypipe.testing import write_dataset

REPO = "lab/arm"
FILE = "meta/info.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("odd") / "arm"
    (top / "meta").mkdir(parents=True)
    (top / FILE).write_bytes(b"{}")
    return top


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("raypipe.storage.hub.client.FIRST_WAIT_S", 0.001)
    with HubServer() as server, server.as_hub(tmp_path / "cache"):
        server.add_repo(REPO, folder, tags=("v3.0",))
        yield server


ROW = {"type": "file", "path": "a", "size": 1, "oid": "0" * 40}
LISTINGS = {
    "an object": {"error": "no"},
    "a number": 7,
    "null": None,
    "a text": "no",
    "numbers": [1, 2],
    "lists": [[]],
    "no type": [{"path": "a", "size": 1, "oid": "0" * 40}],
    "no path": [{"type": "file", "size": 1, "oid": "0" * 40}],
    "no size": [{"type": "file", "path": "a", "oid": "0" * 40}],
    "no hash": [{"type": "file", "path": "a", "size": 1}],
    "a size of letters": [{**ROW, "size": "many"}],
    "a negative size": [{**ROW, "size": -1}],
    "an endless size": [{**ROW, "size": float("inf")}],
    "lfs of text": [{**ROW, "lfs": "yes"}],
    "lfs of lists": [{**ROW, "lfs": [1]}],
    "a path of numbers": [{**ROW, "path": 7, "oid": 8}],
}


@pytest.mark.parametrize("name", LISTINGS)
def test_an_odd_listing_of_the_hub_is_said(hub, name):
    hub.fail("", kind="tree", content=json.dumps(LISTINGS[name]).encode(), times=100)

    with pytest.raises(DownloadError, match=r"dataset 'lab/arm'"):
        download_dataset(REPO)


@pytest.mark.parametrize("kind", ["tree", "revision", "refs"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b"{"])
def test_answers_that_are_no_json_are_said(hub, kind, content):
    hub.fail("", kind=kind, content=content, times=100)

    with pytest.raises(DownloadError):
        download_dataset(REPO, DownloadSpec(revision="" if kind == "refs" else "main"))


@pytest.mark.parametrize("content", [b"[]", b"null", b'"x"', b'{"tags": 3}'])
def test_refs_that_name_no_tags_lead_to_the_main_branch(hub, content):
    hub.fail("", kind="refs", content=content, times=100)

    assert download_dataset(REPO).revision == "main"


def test_refs_that_are_odd_do_not_hide_what_is_wrong(hub):
    hub.fail("", kind="refs", content=b'{"tags": [7, {"no": 1}], "branches": 3}', times=100)

    with pytest.raises(Exception, match="there is no revision 'nine'"):
        download_dataset(REPO, DownloadSpec(revision="nine"))


@pytest.mark.parametrize("kind", ["tree", "resolve"])
@pytest.mark.parametrize("target", ["", "http://[", "ftp://x/", "http://127.0.0.1:1/\x7f"])
def test_redirects_that_lead_nowhere_are_said(hub, kind, target):
    path = "" if kind == "tree" else FILE
    commit = hub.repos[REPO].branches["main"]
    itself = {
        "tree": f"/api/datasets/{REPO}/tree/{commit}?recursive=true&expand=false",
        "resolve": f"/datasets/{REPO}/resolve/{commit}/{FILE}",
    }[kind]
    hub.fail(path, kind=kind, status=302, headers={"Location": target or itself}, times=1000)

    with pytest.raises(DownloadError):
        download_dataset(REPO)


def test_pages_that_go_round_in_a_circle_end(hub, folder):
    link = f"{hub.endpoint}/api/datasets/{REPO}/tree/{hub.repos[REPO].branches['main']}?recursive=true&expand=false"
    hub.link = f'<{link}>; rel="next"'

    with pytest.raises(DownloadError, match="comes back to a page"):
        download_dataset(REPO)


def test_pages_without_end_end(hub, monkeypatch):
    monkeypatch.setattr("raypipe.storage.hub.client._MOST_PAGES", 20)
    hub.link = "count"

    with pytest.raises(DownloadError, match="more than 20 pages"):
        download_dataset(REPO)


@pytest.mark.parametrize(
    "given", ["²", "٣", "1e9", "nan", "-5", "9" * 400, "Mon, 99 Foo", "Mon, 01 Jan 0001 00:00:00 -0000"]
)
def test_a_wait_that_is_no_number_is_none(hub, given):
    hub.fail(FILE, status=503, headers={"Retry-After": given})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert parse_wait_s(given) == 0
        assert parse_wait_s("12") == 12
        assert 50 < parse_wait_s(time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))) < 70
        if given.isascii() or given == "²":
            assert download_dataset(REPO).num_files == 1


def test_s3_that_asks_for_an_odd_wait_is_read_again():
    tries = []

    def read():
        tries.append(1)
        if len(tries) == 1:
            error = OSError(5, "busy")
            error.response = {"ResponseMetadata": {"HTTPHeaders": {"retry-after": "²"}}}
            raise error
        return "there"

    assert retry_transient(read, lambda wait_s: None) == "there"


def test_a_long_wait_that_the_hub_asks_for_is_said_once(hub, monkeypatch):
    hub.fail(FILE, status=503, headers={"Retry-After": "25"})
    slept = []
    monkeypatch.setattr("raypipe.storage.hub.client.Client._sleep", lambda self, wait_s: slept.append(wait_s))
    monkeypatch.setattr("raypipe.storage.hub.client.Client._wait_turn", lambda self: None)

    with pytest.warns(UserWarning, match=r"waits for 25 s: the Hub answers 503") as told:
        download_dataset(REPO)

    assert len(told) == 1
    assert max(slept) >= 25
    use_gate(Budget())


def test_a_long_wait_for_the_budget_is_said(hub, monkeypatch):
    use_gate(Budget(limit=30, period_s=600, is_empty=True))
    monkeypatch.setattr("raypipe.storage.hub.client.Client._sleep", lambda self, wait_s: use_gate(Budget()))
    try:
        with pytest.warns(UserWarning, match=r"waits for \d+ s: the budget of requests"):
            download_dataset(REPO)
    finally:
        use_gate(Budget())


def test_a_long_wait_that_storage_asks_for_is_said():
    tries = []

    def read():
        tries.append(1)
        if len(tries) == 1:
            raise DownloadError("busy") from PassingError("the store answers 503", wait_s=40)
        return "there"

    with pytest.warns(UserWarning, match=r"waits for 40 s: storage asks for that \(DownloadError: busy\)"):
        assert retry_transient(read, lambda wait_s: None) == "there"


class EveryName:
    """A web server that has the same episode table under every name."""

    def __init__(self, top, table):
        self.num_tables = 0
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def translate_path(self, path):
                if "/meta/episodes/" not in path:
                    return super().translate_path(path)
                server.num_tables += 1
                # Else a reader that asks on and on would never end here.
                return str(table) if server.num_tables < 100 else str(top / "none")

            def log_message(self, *_arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=top))
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_error):
        self._server.shutdown()
        self._server.server_close()


def test_a_web_server_with_a_table_for_every_name_is_asked_for_what_info_promises(tmp_path):
    root = write_dataset(tmp_path / "web", varied_spec())
    (table,) = root.glob("meta/episodes/*/*.parquet")
    with EveryName(root, table) as server:
        with pytest.raises(DatasetError, match=r"file-001\.parquet.* info\.json promises \d+ episodes"):
            open_dataset(server.address)

        assert server.num_tables < 10
