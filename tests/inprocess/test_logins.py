"""User and password in the URI of a root open it, and stand in nothing that people or files are told."""

import base64
import functools
import http.server
import json
import pickle
import threading

import pytest
from program import run_program

import raypipe as rp
from raypipe.errors import ConfigError, DatasetError, DownloadError, RaypipeError, hide_logins
from raypipe.mixture import Mixture
from raypipe.plan import SelectionSpec
from raypipe.storage import open_root, open_storage
from raypipe.testing import SynthSpec, write_dataset

PASSWORD = "pw-7f3a%20b"
ASKED = "Basic " + base64.b64encode(b"bob:pw-7f3a b").decode()


class Guarded(http.server.SimpleHTTPRequestHandler):
    """Gives files to bob alone."""

    def send_head(self):
        if self.headers.get("Authorization") != ASKED:
            self.send_error(401)
            return None
        return super().send_head()

    def log_message(self, *_arguments):
        pass


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    top = tmp_path_factory.mktemp("web")
    write_dataset(top / "arm", SynthSpec())
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Guarded, directory=top))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def root(port, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("raypipe.storage.retry.RETRY_WAITS_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr("raypipe.storage.protocols._logins", {})
    return f"http://bob:{PASSWORD}@127.0.0.1:{port}/arm"


def check_clean(*texts):
    for text in texts:
        assert "7f3a" not in str(text), text
        assert "bob" not in str(text), text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot open 'http://bob:PW@host/x'.", "cannot open 'http://***@host/x'."),
        ("https://TOKEN@host/x", "https://***@host/x"),
        ("s3://KEY:SEC@bucket and ftp://a:b@c", "s3://***@bucket and ftp://***@c"),
        ("http://a:p@ss@host/x", "http://***@host/x"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("hf://datasets/lab/arm@v3.0", "hf://datasets/lab/arm@v3.0"),
        ("http://host/a:b@c", "http://host/a:b@c"),
        ("http://host:80/x, mail me@host", "http://host:80/x, mail me@host"),
    ],
)
def test_logins_are_hidden_and_nothing_else(text, shown):
    assert hide_logins(text) == shown
    error = RaypipeError(text)
    error.add_note(text)
    assert [str(error), *error.__notes__, str(pickle.loads(pickle.dumps(error)))] == [shown] * 3


def test_a_root_with_a_login_is_read_and_told_without_it(root, tmp_path):
    ds = rp.open_dataset(root)

    assert ds[0]["action"].shape
    again = pickle.loads(pickle.dumps(ds.meta.storage))
    assert again.read_bytes("meta/info.json")
    check_clean(ds, ds.meta.root, ds.meta.storage, again, ds.meta.storage.locate("x"), ds.meta.storage.uri)
    assert again.address == root


def test_states_and_accounts_have_no_login(root, tmp_path):
    loader = rp.Pipeline(rp.open_dataset(root), batch_size=4, seed=0).loader()
    next(iter(loader))
    loader.keep_account(tmp_path / "run")

    check_clean(json.dumps(loader.state_dict()), loader.account())
    loader.close()
    for path in tmp_path.rglob("*"):
        check_clean(path)
        if path.is_file():
            assert b"7f3a" not in path.read_bytes(), path


def test_commands_print_no_login(root, tmp_path):
    page, picture = tmp_path / "page.html", tmp_path / "card.html"
    for arguments in (
        ("info", root),
        ("info", root, "--json"),
        ("validate", root, "--where", "process", "--html", page),
        ("validate", root, "--where", "process", "--json"),
        ("show", root, "--out", picture),
        ("info", f"{root}x"),
        ("validate", f"{root}/nothing", "--where", "process"),
        ("account", root),
    ):
        done = run_program(*arguments)
        assert done.stdout + done.stderr, arguments
        check_clean(done.stdout, done.stderr)
    check_clean(page.read_text(), picture.read_text())


def test_errors_of_a_guarded_server_name_the_root_without_the_login(root):
    wrong = root.replace("pw-7f3a", "pw-7f3a-wrong")

    for broken in (wrong, f"{root}-nowhere"):
        with pytest.raises((DatasetError, DownloadError)) as caught:
            rp.open_dataset(broken)
        check_clean(caught.value, *getattr(caught.value, "__notes__", ()), repr(caught.value.__cause__))
    with pytest.raises(ConfigError) as refused:
        open_storage(f"sftp://bob:{PASSWORD}@host/x")
    check_clean(refused.value)


def test_members_of_a_mixture_have_no_login_and_open_by_it(root, tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text(f"datasets:\n  - root: {root}\n  - root: {root}\n    name: second\n")

    mixture = Mixture(str(file))
    given = Mixture([rp.open_dataset(root)])

    check_clean(mixture.spec, mixture.names, mixture.sources(), given.spec, given.sources())
    done = run_program("validate", file, "--where", "process", "--html", tmp_path / "page.html")
    check_clean(done.stdout, done.stderr, (tmp_path / "page.html").read_text())
    done = run_program("info", file, "--json")
    check_clean(done.stdout, done.stderr)


def test_a_root_without_a_login_is_not_opened_by_that_of_another(root, port):
    rp.open_dataset(root)

    assert open_root(f"http://127.0.0.1:{port}/other").login == ""
    with pytest.raises(RaypipeError):
        rp.open_dataset(f"http://127.0.0.1:{port}/arm/../arm2")


def test_weights_with_a_login_are_refused_since_states_keep_their_place():
    with pytest.raises(ConfigError, match=r"http://\*\*\*@host"):
        SelectionSpec(weights="http://bob:PW@host/weights.parquet")
