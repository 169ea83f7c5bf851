"""Remote members of a mixture: they share the cache of a node, and none of them decides as if it had it for itself."""

import pickle
from pathlib import Path

import pytest
from batches import TOP, local_loader
from mixture_cases import frames_of
from s3_server import S3Server

from raypipe.mixture import Mixture
from raypipe.pipeline import Pipeline
from raypipe.storage import copies
from raypipe.testing import CameraSpec, SynthSpec, write_dataset

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("members")
    camera = CameraSpec(name=TOP, height=64, width=64, crf=1)
    return [
        write_dataset(folder / name, SynthSpec(lengths=(6,) * 4, cameras=(camera,), state_dim=2, seed=seed))
        for seed, name in enumerate(NAMES)
    ]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # Else files as small as these are fetched whole in any case.
    monkeypatch.setattr(copies, "PART_BYTES", 0)
    with S3Server() as running, running.as_s3():
        yield running


def size_of(*roots):
    return sum(path.stat().st_size for root in roots for path in Path(root).rglob("*") if path.is_file())


def mix(members, tmp_path, max_bytes, **settings):
    mixture = Mixture([str(member) for member in members], progress=False, **settings)
    cache = {"folder": str(tmp_path / "files"), "max_bytes": max_bytes}
    return Pipeline(mixture, batch_size=6, seed=0, order={"live_spans": 4}, cache=cache)


def is_ranged(pipe):
    """Whether videos are read by parts, of each member, as a process sees it that is sent the context."""
    context = pickle.loads(pickle.dumps(pipe.config.block_context()))
    metas = [dataset.meta for dataset in context.datasets]
    return [meta.storage.cache is not None and meta.storage.is_ranged(meta.video_file(0, TOP)) for meta in metas]


def test_members_that_fit_together_are_fetched_whole_and_those_that_do_not_by_parts(roots, server, tmp_path):
    uris = [server.add(root.name, root) for root in roots]
    total = size_of(*roots)

    assert is_ranged(mix(uris, tmp_path, total)) == [False] * 3
    assert is_ranged(mix(uris, tmp_path, total - 1)) == [True] * 3
    assert size_of(roots[0]) < total // 2, "each would fit"


def test_members_that_do_not_fit_together_are_read_within_the_cache(roots, server, tmp_path):
    uris = [server.add(root.name, root) for root in roots]

    pipe = mix(uris, tmp_path, size_of(*roots) - 1)
    server.reset()
    read = [frame for batch in local_loader(pipe) for frame in frames_of(batch)]

    assert len(set(read)) == len(read) == 72
    videos = [asked for key, asked in server.ranges if key.endswith(".mp4")]
    assert videos
    assert all(videos), "whole files were asked for"


def test_a_local_member_and_one_that_is_there_twice_take_no_room_of_the_others(roots, server, tmp_path):
    uri, other = server.add("one", roots[0]), server.add("two", roots[1])
    members = [{"root": uri, "name": "a"}, {"root": uri, "name": "b"}, {"root": other}, {"root": str(roots[2])}]
    mixture = Mixture(members, progress=False)
    folder, total = str(tmp_path / "files"), size_of(*roots[:2])

    kinds = [
        is_ranged(Pipeline(mixture, batch_size=6, seed=0, cache={"folder": folder, "max_bytes": most}))
        for most in (total, total - 1)
    ]

    assert kinds == [[False] * 4, [True, True, True, False]]


def test_the_sum_takes_no_listing_but_those_that_opening_made(roots, server, tmp_path):
    pipe = mix([server.add(root.name, root) for root in roots], tmp_path, size_of(*roots) - 1)
    server.reset()

    pipe.config.block_context()

    assert server.num_requests == 0
