"""Datasets of the Hub through a server that speaks its API: revisions, the cache, offline, access, and requests."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import HubServer
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import disable_progress_bars

import raypipe
from raypipe.dataset import DownloadSpec, download_dataset, parse_episodes
from raypipe.decode.clips import ClipRequest
from raypipe.errors import ConfigError, DatasetError, DownloadError
from raypipe.storage import CacheSpec, HubFiles, Storage, cache_place, is_repo_id, open_root, resolve
from raypipe.storage.hub.cache import listing_locked, parse_name
from raypipe.testing import SynthSpec, write_dataset

ARM = "lab/arm"
TOP = "observation.images.top"
DIGITS = "1234567890" * 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Five episodes in two files, two cameras; read-only."""
    return write_dataset(tmp_path_factory.mktemp("hub") / "arm", SynthSpec())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("raypipe.storage.hub.client.FIRST_WAIT_S", 0.01)
    disable_progress_bars()
    with HubServer() as server, server.as_hub(tmp_path / "cache"):
        yield server


@pytest.fixture
def arm(hub, dataset):
    """The dataset on the Hub, with a format tag."""
    return hub.add_repo(ARM, dataset, tags=("v3.0",))


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


def test_a_file_read_without_a_cache_is_asked_for_once_however_its_reader_seeks(hub, arm):
    storage = open_root(ARM).cached(None)
    name = next(name for name in storage.list_files() if name.endswith(".mp4"))
    before = hub.num_requests
    whole = storage.read_bytes(name)
    needed, before = hub.num_requests - before, hub.num_requests

    with storage.open_file(name) as stream:
        content = stream.read(8)
        for place in (-40, -8):
            stream.seek(place, os.SEEK_END)
            stream.read(8)
        stream.seek(8)
        content += stream.read()

    assert content == whole
    assert hub.num_requests - before == needed


def test_what_was_read_ahead_without_a_cache_is_not_asked_for_again(hub, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("raypipe.storage.remote.AHEAD_BYTES", 40_000)
    folder, whole = shutil.copytree(dataset, tmp_path / "arm"), np.random.default_rng(0).bytes(100_000)
    (folder / "videos/large.mp4").write_bytes(whole)
    hub.add_repo(ARM, folder, tags=("v3.0",))
    storage = open_root(ARM).cached(None)
    storage.list_files()
    before = hub.num_requests
    storage.read_range("videos/large.mp4", 0, 10)
    needed, before = hub.num_requests - before, hub.num_requests

    with storage.open_file("videos/large.mp4") as stream:
        for place in (1_000, 30_000, 9_000):
            # Readers of parquet and of videos look for the size in this way.
            stream.seek(0, os.SEEK_END)
            stream.seek(place)
            assert stream.read(30) == whole[place : place + 30]
        assert hub.num_requests - before == needed

        # One answer for the rest, however long.
        assert stream.read() == whole[9_030:]
        assert hub.num_requests - before == 2 * needed


def test_nothing_is_written_to_a_commit_of_the_hub(arm):
    with pytest.raises(ConfigError, match="is a commit of the Hub"):
        open_root(ARM).write_atomic("notes.txt", b"")


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("lab/arm", True),
        ("lab/arm.v2_x-1", True),
        ("hf://datasets/lab/arm", True),
        ("hf://datasets/lab/arm@v3.0", True),
        ("hf://datasets/lab/arm@refs/pr/1/sub", True),
        ("hf://buckets/lab/arm", False),
        ("hf://datasets/arm", False),
        ("arm", False),
        ("a/b/c", False),
        ("/lab/arm", False),
        ("./arm", False),
        ("../arm", False),
        ("lab/..", False),
        ("~/arm", False),
        ("s3://lab/arm", False),
        ("", False),
    ],
)
def test_a_root_names_a_dataset_of_the_hub(root, expected):
    assert is_repo_id(root) is expected


def test_a_folder_that_exists_is_not_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "lab" / "arm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert not is_repo_id("lab/arm")
    assert open_root("lab/arm").uri == str(tmp_path / "lab" / "arm")


def test_a_root_with_everything_is_taken_apart():
    name = parse_name("hf://datasets/lab/arm@feature%2Fx/sub/folder")

    assert (name.repo_id, name.revision, name.folder) == ("lab/arm", "feature/x", "sub/folder")
    with pytest.raises(ConfigError, match=r"names revision 'a', and revision='b'"):
        parse_name("hf://datasets/lab/arm@a", "b")


@pytest.mark.parametrize(
    ("tags", "expected"),
    [(("v2.0", "v2.1", "v3.0", "v9.0"), "v3.0"), (("v2.0", "v2.1"), "v2.1"), (("v2.0", "x"), "v2.0"), ((), "main")],
)
def test_the_default_revision_is_the_newest_format_that_is_read(hub, dataset, tags, expected):
    sha = hub.add_repo(ARM, dataset, tags=tags).branches["main"]

    source = resolve(ARM)

    assert (source.revision, source.commit) == (expected, sha)
    assert hub.counts == {"refs": 1, "revision": 1}


@pytest.mark.parametrize("revision", ["v3.0", "main", "feature/x", "20240131"])
def test_a_tag_or_branch_becomes_its_commit_with_one_request(hub, dataset, revision):
    repo = hub.add_repo(ARM, dataset, sha=DIGITS, tags=("v3.0", "20240131"))
    repo.branches["feature/x"] = DIGITS

    source = resolve(ARM, revision)

    assert (source.revision, source.commit) == (revision, DIGITS)
    assert source.uri == f"hf://datasets/{ARM}@{DIGITS}"
    assert hub.counts == {"revision": 1}


@pytest.mark.parametrize("sha", [DIGITS, "ab" * 20])
def test_a_commit_is_taken_as_it_is(hub, sha):
    assert resolve(ARM, sha).commit == resolve(f"hf://datasets/{ARM}@{sha}").commit == sha
    assert hub.num_requests == 0


def test_a_revision_that_is_not_there_names_the_nearest(arm):
    with pytest.raises(ConfigError, match=r"no revision 'v3.1' of dataset 'lab/arm'; did you mean 'v3.0'\?"):
        raypipe.open_dataset(ARM, revision="v3.1")


def test_a_commit_that_is_not_there_is_said_by_the_download(arm):
    with pytest.raises(ConfigError, match=f"no revision '{'0' * 40}' of dataset 'lab/arm'. Known: 'v3.0', 'main'"):
        download_dataset(ARM, DownloadSpec(revision="0" * 40))


def test_a_repo_that_is_not_there_is_said(hub):
    with pytest.raises(ConfigError, match=r"no dataset 'lab/none' is found at http.*and no such folder here") as raised:
        raypipe.open_dataset("lab/none")

    assert str(raised.value).startswith("no such folder: ")


def test_a_revision_is_only_for_the_hub(dataset):
    with pytest.raises(ConfigError, match=r"revision='v3.0' is for a dataset of the Hub"):
        raypipe.open_dataset(str(dataset), revision="v3.0")


def test_a_private_repo_wants_a_token(hub, dataset, monkeypatch):
    hub.add_repo(ARM, dataset, token="hf_secret")

    with pytest.raises(ConfigError, match=r"no dataset 'lab/arm'.*private, log in"):
        download_dataset(ARM)
    monkeypatch.setenv("HF_TOKEN", "bad_token")
    with pytest.raises(ConfigError, match="does not accept your token"):
        download_dataset(ARM)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ConfigError, match="no dataset 'lab/arm'"):
        download_dataset(ARM)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    report = download_dataset(ARM)

    assert files_of(report.folder) == files_of(dataset)
    assert hub.tokens_elsewhere == 0


def test_a_gated_repo_is_said(hub, dataset):
    hub.add_repo(ARM, dataset, is_gated=True)

    with pytest.raises(ConfigError, match=r"'lab/arm' is gated: ask for access at http.*/datasets/lab/arm"):
        download_dataset(ARM)


def test_a_remote_dataset_is_read_at_the_commit_it_was_opened_at(hub, dataset, tmp_path):
    other = write_dataset(tmp_path / "other", SynthSpec(lengths=(4, 4, 4), seed=7))
    repo = hub.add_repo(ARM, dataset)
    opened = raypipe.open_dataset(ARM)
    first = repo.branches["main"]

    second = repo.add_commit(other)
    sample = opened.sample(20)

    local = raypipe.open_dataset(str(dataset)).sample(20)
    assert opened.meta.source.revision == first != second
    assert opened.meta.root == f"hf://datasets/{ARM}@{first}"
    assert all((sample[key] == local[key]).all() for key in (TOP, "action", "index"))
    assert raypipe.open_dataset(ARM).meta.source.revision == second
    assert len(raypipe.open_dataset(ARM, revision=first)) == len(opened) != len(raypipe.open_dataset(ARM))


def test_a_remote_dataset_crosses_to_another_process_with_its_commit(arm):
    storage = pickle.loads(pickle.dumps(open_root(ARM)))

    assert storage.commit == arm.branches["main"]
    assert not storage.is_local


def test_a_hub_that_fails_is_not_taken_for_a_missing_file(hub, arm):
    storage = open_root(ARM)
    hub.fail("", kind="tree", status=500, times=6)

    with pytest.raises(DownloadError, match=r"cannot fetch dataset 'lab/arm' at revision .*the Hub answers 500"):
        storage.exists("videos/a.mp4")

    assert storage.exists("meta/info.json")
    assert storage.exists("meta")
    assert not storage.exists("meta/none.json")
    assert not storage.exists("none/none.json")


def test_an_empty_file_is_read_as_one(hub, tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "empty.txt").touch()
    (folder / "other.txt").write_text("other")
    hub.add_repo(ARM, folder)
    cache = CacheSpec(folder=str(tmp_path / "files"))

    storage = open_root(ARM).cached(cache)

    assert storage.exists("empty.txt")
    assert storage.read_bytes("empty.txt") == b""
    assert storage.read_bytes("other.txt") == b"other"


@pytest.mark.parametrize("is_listed", [True, False], ids=["with the listing", "without"])
def test_a_cache_in_which_no_lock_can_be_taken_is_used(hub, arm, dataset, tmp_path, is_listed):
    storage = open_root(ARM)
    if is_listed:
        # As another process would.
        assert HubFiles(resolve(ARM, "")).listing
    # A folder with the name of the lock, since permissions do not keep root from anything.
    lock = tmp_path / f"cache/.locks/datasets--lab--arm/{storage.commit}.lock"
    lock.unlink(missing_ok=True)
    lock.mkdir(parents=True)
    hub.reset()

    content = storage.read_bytes("meta/info.json")

    assert content == (Path(dataset) / "meta/info.json").read_bytes()
    assert hub.counts["tree"] == (0 if is_listed else 1)


def test_a_listing_that_is_kept_is_read_without_a_lock(hub, arm, tmp_path):
    source = resolve(ARM, "")
    first = HubFiles(source).listing
    shutil.rmtree(tmp_path / "cache/.locks")
    hub.reset()

    assert HubFiles(source).listing == first
    assert not (tmp_path / "cache/.locks").exists()
    assert hub.counts["tree"] == 0


def test_an_error_while_a_listing_is_fetched_is_not_taken_for_one_of_its_lock(hub, arm):
    place = cache_place(resolve(ARM, ""))

    with pytest.raises(OSError, match="of the body"), listing_locked(place):
        raise OSError("of the body")


def test_a_download_asks_once_for_each_file_and_then_not_at_all(hub, arm, dataset):
    report = download_dataset(ARM)
    counts = dict(hub.counts)
    names = files_of(dataset)
    large = [name for name in names if name.endswith((".parquet", ".mp4"))]
    hub.reset()
    again = download_dataset(ARM)

    assert files_of(report.folder) == names
    assert counts == {"refs": 1, "revision": 1, "tree": 1, "resolve": len(names), "lfs": len(large)}
    assert report.num_requests == sum(counts.values())
    assert (report.num_fetched, report.num_skipped, report.is_whole) == (len(names), 0, True)
    assert report.fetched_bytes == report.size_bytes == sum(map(len, names.values()))
    assert (again.num_fetched, again.num_skipped, again.num_requests, hub.num_requests) == (0, len(names), 0, 0)


def test_a_long_listing_comes_in_pages(hub, arm, dataset):
    hub.page_size = 4

    report = download_dataset(ARM)

    assert files_of(report.folder) == files_of(dataset)
    assert hub.counts["tree"] > 3


def test_what_is_complete_in_the_cache_is_read_there_without_a_request(hub, arm):
    report = download_dataset(ARM)
    hub.reset()

    opened = raypipe.open_dataset(ARM)
    sample = opened.sample(0)

    assert opened.meta.storage.is_local
    assert opened.meta.storage.path == report.folder
    assert opened.meta.root == f"hf://datasets/{ARM}@{report.commit}"
    assert sample["index"] == 0
    assert hub.num_requests == 0


def test_a_node_without_the_files_keeps_them_in_the_cache_that_was_given_also_if_the_driver_has_them(
    hub, arm, tmp_path
):
    download_dataset(ARM)
    pipe = raypipe.Pipeline(raypipe.open_dataset(ARM), batch_size=4, seed=0, cache={"folder": str(tmp_path / "given")})
    sent = pickle.dumps(pipe.config.block_context())

    with hub.as_hub(tmp_path / "other node"):
        meta = pickle.loads(sent).datasets[0].meta
        meta.storage.read_bytes(meta.data_file(0))

    assert pipe.config.block_context().datasets[0].meta.storage.is_local
    content = (tmp_path / "cache").rglob(meta.data_file(0))
    assert next(content).read_bytes() in [path.read_bytes() for path in (tmp_path / "given").iterdir()]


@pytest.mark.parametrize(("cache", "expected"), [({}, True), ("off", False)])
def test_clips_keep_to_the_node_of_their_video_also_if_the_driver_has_all_of_them(hub, arm, cache, expected):
    download_dataset(ARM)

    pipe = raypipe.Pipeline(raypipe.open_dataset(ARM), batch_size=4, seed=0, cache=cache)

    context = pipe.config.block_context()
    camera = next(iter(context.datasets[0].meta.episodes.videos))
    clip = ClipRequest(dataset=0, row=0, camera=camera, frames=np.arange(2), span=(0, 2), frame_bytes=1)
    assert bool(context.home_video(clip)) == expected


def test_a_moved_tag_is_seen_when_asked_for(hub, arm, tmp_path):
    first = download_dataset(ARM)
    arm.add_commit(write_dataset(tmp_path / "other", SynthSpec(lengths=(4, 4, 4), seed=7)), tags=("v3.0",))

    again = download_dataset(ARM)
    fresh = download_dataset(ARM, DownloadSpec(is_fresh=True))

    assert again.commit == first.commit != fresh.commit
    assert raypipe.open_dataset(ARM).meta.source.revision == fresh.commit


def test_content_of_another_commit_is_not_fetched_again(hub, arm, dataset, tmp_path):
    download_dataset(ARM)
    changed = tmp_path / "changed"
    shutil.copytree(dataset, changed)
    (changed / "README.md").write_text("new")
    sha = arm.add_commit(changed)
    hub.reset()

    report = download_dataset(ARM, DownloadSpec(revision=sha))

    assert files_of(report.folder) == files_of(changed)
    assert hub.counts == {"tree": 1, "resolve": 1}


def test_the_cache_is_shared_with_huggingface_hub(hub, arm, dataset):
    theirs = snapshot_download(ARM, repo_type="dataset", revision="v3.0")
    hub.reset()

    opened = raypipe.open_dataset(ARM)
    report = download_dataset(ARM)

    assert opened.meta.storage.is_local
    assert report.folder == theirs
    assert hub.num_requests == 0


def test_huggingface_hub_finds_what_raypipe_fetched(hub, arm, dataset, tmp_path):
    report = download_dataset(ARM)

    with hub.as_hub(tmp_path / "cache", is_offline=True):
        theirs = snapshot_download(ARM, repo_type="dataset", revision="v3.0")

    assert theirs == report.folder
    assert files_of(theirs) == files_of(dataset)


def test_the_token_is_not_sent_to_where_the_next_page_is_said_to_be(hub, arm, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubServer() as other:
        hub.link = f'<{other.endpoint}/api/datasets/{ARM}/tree/main?recursive=true>; rel="next"'

        with pytest.raises(DownloadError, match="comes back to a page"):
            download_dataset(ARM)

        assert other.num_requests == 0


def test_huggingface_hub_itself_does_not_do_what_raypipe_does_in_its_place(hub, arm, dataset, monkeypatch):
    # If this fails, see whether `Client` can be left to huggingface_hub.
    name = "data/chunk-000/file-000.parquet"
    hub.fail(name, kind="lfs", content=bytes(len(files_of(dataset)[name])))
    assert files_of(snapshot_download(ARM, repo_type="dataset"))[name] != files_of(dataset)[name]

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubServer() as other:
        other.add_repo(ARM, dataset, token="hf_secret")
        hub.link = f'<{other.endpoint}/api/datasets/{ARM}/tree/main?recursive=true>; rel="next"'

        assert list(HfApi().list_repo_tree(ARM, repo_type="dataset", recursive=True))


@pytest.mark.parametrize("revision", ["", "v3.0", "main"])
def test_offline_with_a_complete_cache_nothing_is_asked(hub, arm, tmp_path, revision):
    commit = download_dataset(ARM, DownloadSpec(revision=revision)).commit
    hub.reset()

    with hub.as_hub(tmp_path / "cache", is_offline=True):
        opened = raypipe.open_dataset(ARM, revision=revision)
        opened.sample(0)
        pinned = raypipe.open_dataset(ARM, revision=commit)
        report = download_dataset(ARM, DownloadSpec(revision=revision))

    assert opened.meta.source.revision == pinned.meta.source.revision == report.commit == commit
    assert hub.num_requests == 0


def test_offline_a_cache_without_listings_is_used_as_it_is(hub, arm, tmp_path):
    report = download_dataset(ARM)
    shutil.rmtree(tmp_path / "cache/datasets--lab--arm/trees")

    with hub.as_hub(tmp_path / "cache", is_offline=True):
        opened = raypipe.open_dataset(ARM)

    assert opened.meta.storage.path == report.folder


def test_offline_without_the_revision_says_what_to_run(hub, arm, tmp_path):
    with (
        hub.as_hub(tmp_path / "cache", is_offline=True),
        pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE=0 raypipe download lab/arm --revision v2.1"),
    ):
        raypipe.open_dataset(ARM, revision="v2.1")
    with (
        hub.as_hub(tmp_path / "cache", is_offline=True),
        pytest.raises(DownloadError, match=f"Missing: all files.*raypipe download lab/arm --revision {DIGITS}"),
    ):
        raypipe.open_dataset(ARM, revision=DIGITS)
    assert hub.num_requests == 0


def test_offline_with_a_part_says_what_is_missing(hub, arm, tmp_path):
    download_dataset(ARM, DownloadSpec(episodes=(0,)))

    with (
        hub.as_hub(tmp_path / "cache", is_offline=True),
        pytest.raises(DownloadError, match=r"not complete at .*Missing: data/chunk-000/file-001.parquet, videos/"),
    ):
        raypipe.open_dataset(ARM)


def test_a_part_is_the_files_of_its_episodes_and_cameras(hub, arm, dataset):
    spec = DownloadSpec(episodes=(0, 1), cameras=(TOP,))
    report = download_dataset(ARM, spec)
    counts = hub.num_requests
    hub.reset()
    again = download_dataset(ARM, spec)

    found = files_of(report.folder)
    large = sorted(name for name in found if name.startswith(("data/", "videos/")))
    assert large == ["data/chunk-000/file-000.parquet", f"videos/{TOP}/chunk-000/file-000.mp4"]
    assert {name for name in files_of(dataset) if name.startswith("meta/")} <= set(found)
    assert report.num_files == len(found) == report.num_fetched
    assert report.num_requests == counts
    assert (again.num_requests, hub.num_requests, again.num_skipped) == (0, 0, len(found))
    assert not raypipe.open_dataset(ARM).meta.storage.is_local


def test_a_part_of_a_dataset_that_lacks_files_is_refused(hub, dataset, tmp_path):
    lacking = tmp_path / "lacking"
    shutil.copytree(dataset, lacking)
    (lacking / "data/chunk-000/file-001.parquet").unlink()
    hub.add_repo(ARM, lacking)

    with pytest.raises(DownloadError, match=r"does not have the files .*: data/chunk-000/file-001.parquet\."):
        download_dataset(ARM, DownloadSpec(episodes=(0, 4)))


def test_an_episode_or_camera_that_is_not_there_is_refused(arm):
    with pytest.raises(ConfigError, match="has no episode 77; it has"):
        download_dataset(ARM, DownloadSpec(episodes=(0, 77)))
    with pytest.raises(ConfigError, match=r"has no camera 'observation.images.tip'; did you mean"):
        download_dataset(ARM, DownloadSpec(cameras=("observation.images.tip",)))


def test_a_folder_of_ones_own_holds_plain_files(hub, arm, dataset, tmp_path):
    spec = DownloadSpec(out=str(tmp_path / "mine"))
    report = download_dataset(ARM, spec)
    hub.reset()
    again = download_dataset(ARM, spec)

    assert report.folder == str(tmp_path / "mine")
    assert files_of(tmp_path / "mine") == files_of(dataset)
    assert not any(path.is_symlink() for path in (tmp_path / "mine").rglob("*"))
    assert len(raypipe.open_dataset(str(tmp_path / "mine"))) == len(raypipe.open_dataset(str(dataset)))
    assert (again.num_fetched, hub.num_requests) == (0, 0)


@pytest.mark.parametrize("out", ["", "mine"])
@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_a_damaged_file_is_fetched_again_and_no_other(hub, arm, dataset, tmp_path, out, damage):
    spec = DownloadSpec(out=str(tmp_path / out) if out else "")
    victim = Path(download_dataset(ARM, spec).folder) / "data/chunk-000/file-000.parquet"
    content = victim.read_bytes()
    os.utime(victim, ns=(1, 1))
    if damage == "removed":
        victim.resolve().unlink()
    else:
        victim.write_bytes(content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    hub.reset()

    report = download_dataset(ARM, spec)

    assert files_of(report.folder) == files_of(dataset)
    assert hub.counts == {"resolve": 1, "lfs": 1}
    assert report.num_fetched == 1


def test_a_cut_file_in_the_cache_is_not_taken_for_complete(hub, arm):
    report = download_dataset(ARM)
    victim = Path(report.folder) / "data/chunk-000/file-000.parquet"
    victim.write_bytes(victim.read_bytes()[:-1])

    with (
        hub.as_hub(Path(report.folder).parents[2], is_offline=True),
        pytest.raises(DownloadError, match=r"Missing: data/chunk-000/file-000.parquet\."),
    ):
        raypipe.open_dataset(ARM, revision=report.commit)


def test_a_file_outside_the_folder_is_not_fetched(hub, arm):
    arm.files[arm.branches["main"]]["../../escaped"] = b"x"

    with pytest.raises(DownloadError, match=r"'../../escaped', which would lie outside"):
        download_dataset(ARM)


def test_a_hash_that_is_none_is_refused(arm, monkeypatch):
    monkeypatch.setattr("hub_server.git_oid", lambda _content: "../../escaped")

    with pytest.raises(DownloadError, match=r"'meta/info.json' with the hash '../../escaped', which is none"):
        download_dataset(ARM)


def test_a_mixture_without_network_tells_at_once_what_is_missing(hub, arm, tmp_path, monkeypatch):
    monkeypatch.setattr("raypipe.storage.retry.time.sleep", lambda _s: pytest.fail("waited"))
    members = [f"hf://datasets/{ARM}@{DIGITS}"]

    with (
        hub.as_hub(tmp_path / "cache", is_offline=True),
        pytest.raises(DownloadError, match=r"is not complete at .* and HF_HUB_OFFLINE is set"),
    ):
        raypipe.Mixture(members)


def test_a_mixture_takes_a_member_of_the_hub(hub, arm, dataset, tmp_path):
    local = write_dataset(tmp_path / "local", SynthSpec(lengths=(4, 4), seed=7))
    (tmp_path / "mixture.yaml").write_text(f"datasets: [{{root: {ARM}, weight: 2}}, {local}]\n")

    mixture = raypipe.open_dataset(str(tmp_path / "mixture.yaml"))

    sources = [one.meta.source for one in mixture.datasets]
    assert [one.revision for one in sources] == [arm.branches["main"], "unversioned"]
    assert sources[0].root == f"hf://datasets/{ARM}@{arm.branches['main']}"
    with pytest.raises(ConfigError, match=r"revision='v3.0' is of one dataset"):
        raypipe.open_dataset(str(tmp_path / "mixture.yaml"), revision="v3.0")


def test_a_missing_remote_file_is_named(arm):
    with pytest.raises(DatasetError, match=r"missing file .*lab/arm@.*meta/none.json"):
        Storage(open_root(ARM).uri).read_bytes("meta/none.json")


def test_the_variables_of_the_hub_are_followed(hub, dataset, tmp_path):
    sha = hub.add_repo(ARM, dataset, token="hf_secret").branches["main"]
    code = "import raypipe; from raypipe.dataset import download_dataset as d; import sys; print(d(sys.argv[1]).folder)"
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}

    def run(**more):
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        program = [sys.executable, "-c", code, ARM]
        env = {**clean, **variables, **more}
        return subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=True)

    folder = run().stdout.strip()
    hub.reset()
    offline = run(HF_HUB_OFFLINE="1")

    assert folder == offline.stdout.strip() == str(tmp_path / "home/hub/datasets--lab--arm/snapshots" / sha)
    assert files_of(folder) == files_of(dataset)
    assert hub.num_requests == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("", "all"), ("3", (3,)), ("0-2,5", (0, 1, 2, 5)), (" 4 , 1-2 ,1", (4, 1, 2))]
)
def test_episodes_are_read_from_text(text, expected):
    assert parse_episodes(text) == expected


@pytest.mark.parametrize("text", ["x", "3-1", "1,,2", "-1", "1-", "٣", pytest.param("9" * 5000, id="endless")])
def test_episodes_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match=r"write 0-9,12"):
        parse_episodes(text)


def test_a_run_of_more_episodes_than_any_dataset_has_is_refused():
    with pytest.raises(ConfigError, match="no dataset has as many as '3-90000000000'"):
        parse_episodes("1,3-90000000000")
