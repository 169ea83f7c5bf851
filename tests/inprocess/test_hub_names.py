"""Names that lead out of a folder, in listings and revisions: of a shared cache, of a server, of a mixture file."""

import json

import pytest
from hub_server import HubServer

from raypipe.dataset import DownloadSpec, download_dataset
from raypipe.errors import ConfigError, DownloadError
from raypipe.mixture import Mixture
from raypipe.storage import CacheSpec, Storage, cache_place, is_repo_id, open_root, resolve
from raypipe.storage.hub.cache import leaves_folder, parse_name, parse_pinned, read_listing, write_ref
from raypipe.storage.remote import unpack_entries
from raypipe.testing import SynthSpec, write_dataset

ARM = "lab/arm"
OUT = ("../x", "a/../../x", "/x", "..", "", ".", "./", "a\\..\\b", "a\x00b", "a\nb", "a/..")
HASH = "a" * 64


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("hub") / "arm", SynthSpec())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("raypipe.storage.hub.client.FIRST_WAIT_S", 0.01)
    with HubServer() as server, server.as_hub(tmp_path / "cache"):
        yield server


@pytest.fixture
def place(hub, dataset):
    """Where the commit of a dataset goes, with the listing of it that a download has kept."""
    hub.add_repo(ARM, dataset, tags=("v3.0",))
    download_dataset(ARM, DownloadSpec(progress=False))
    return cache_place(resolve(ARM))


def poison(place, name, **fields):
    """Add a file to the kept listing, as anybody can who may write to the cache."""
    content = json.loads(place.listing.read_text())
    content["files"][name] = {"size": 3, "blob_id": "b" * 40, "lfs_sha256": HASH} | fields
    place.listing.write_text(json.dumps(content))


@pytest.mark.parametrize("name", OUT)
def test_a_name_that_leads_out_of_its_folder_is_told(name):
    assert leaves_folder(name)


@pytest.mark.parametrize(
    "name", ["a", "meta/info.json", "..a/b..", "a b/ü.mp4", "refs/pr/1", "data/", ".gitattributes"]
)
def test_other_names_are_let_be(name):
    assert not leaves_folder(name)


@pytest.mark.parametrize("name", ["../../../../victim.txt", "/victim.txt"])
def test_a_poisoned_listing_links_nothing_outside_and_is_asked_for_again(place, tmp_path, name):
    (place.blobs / HASH).write_bytes(b"bad")
    victim = (place.folder / name).resolve() if name.startswith("..") else tmp_path / "victim.txt"
    poison(place, name if name.startswith("..") else str(victim))

    done = download_dataset(ARM, DownloadSpec(progress=False))

    assert not victim.is_symlink()
    assert not victim.exists()
    assert done is not None
    assert victim.name not in place.listing.read_text()


def test_a_poisoned_hash_is_no_path(place):
    poison(place, "meta/more.json", lfs_sha256="../../../../../etc/passwd")

    assert read_listing(place.listing) is None


def test_a_server_that_lists_names_outside_is_refused(hub, dataset):
    hub.add_repo(ARM, dataset, tags=("v3.0",))
    for commit in hub.repos[ARM].files.values():
        commit["a\\..\\..\\x"] = b"bad"

    with pytest.raises(DownloadError, match="outside"):
        download_dataset(ARM, DownloadSpec(progress=False))


@pytest.mark.parametrize("revision", ["../../../victim", "..", "/nowhere-of-raypipe/x", "a/../../b", "a\\b", "a\nb"])
def test_a_revision_that_leads_out_of_the_refs_is_refused_and_writes_nothing(hub, dataset, tmp_path, revision):
    hub.add_repo(ARM, dataset, tags=("v3.0",))
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(ConfigError, match="revision"):
        resolve(ARM, revision)
    with pytest.raises(ConfigError, match="revision"):
        write_ref(ARM, revision, "a" * 40)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_revision_of_a_mixture_file_overwrites_nothing(hub, dataset, tmp_path):
    repo = hub.add_repo(ARM, dataset, tags=("v3.0",))
    # A server that answers whatever it is asked for: the harm would be done with its answer.
    repo.branches["../../../victim"] = repo.tags["v3.0"]
    victim = tmp_path / "victim"
    victim.write_text("mine")
    file = tmp_path / "mix.yaml"
    file.write_text("datasets:\n  - root: hf://datasets/lab/arm@..%2F..%2F..%2Fvictim\n")

    with pytest.raises(ConfigError, match=r"revision '\.\./\.\./\.\./victim'"):
        Mixture(str(file))
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("below", ["..", "../../../other", "a/../../b", "a\\b"])
def test_a_folder_of_a_hub_root_stays_in_the_commit(hub, below):
    root = f"hf://datasets/{ARM}@{'a' * 40}/{below}"

    with pytest.raises(ConfigError, match="folder"):
        parse_pinned(root)
    with pytest.raises(ConfigError, match="folder"):
        open_root(root)


@pytest.mark.parametrize("repo_id", ["../arm", "lab/..", "lab/a\\b", "lab/a b", "lab/%2e%2e"])
def test_a_hub_root_of_no_owner_and_name_is_refused(repo_id):
    root = f"hf://datasets/{repo_id}"

    assert is_repo_id(root)
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        parse_name(root)


def test_a_listing_of_other_storage_is_held_to_the_same(tmp_path):
    storage = Storage("memory://bucket/arm", CacheSpec(folder=str(tmp_path)))
    storage.filesystem.store["/bucket/arm/meta/../../x"] = storage.filesystem.store.get("x") or _file()

    try:
        with pytest.raises(DownloadError, match="outside"):
            storage.list_files()
    finally:
        storage.filesystem.store.pop("/bucket/arm/meta/../../x")
    with pytest.raises(DownloadError, match="outside"):
        unpack_entries(b'[["../x", 3, ""]]')


def _file():
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    return MemoryFile(MemoryFileSystem(), "/bucket/arm/meta/../../x", b"bad")
