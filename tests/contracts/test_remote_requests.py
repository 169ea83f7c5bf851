"""Two nodes that read from the Hub, each with a cache of its own: who asks for what, and what the figures say."""

from pathlib import Path

import pytest
import ray
from attempts import local_nodes
from batches import TOP, frames_of_all, frames_of_dataset
from hub_server import HubServer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.dataset import open_dataset
from raypipe.pipeline import Pipeline
from raypipe.reshard import reshard_dataset
from raypipe.storage import request_budget as requests
from raypipe.storage.request_budget import Budget
from raypipe.testing import CameraSpec, SynthSpec, write_dataset
from raypipe.validate import validate_dataset

NUM_EPISODES = 10


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A video per episode, and two data files."""
    spec = SynthSpec(
        lengths=(4,) * NUM_EPISODES,
        cameras=(CameraSpec(name=TOP, height=32, width=32),),
        state_dim=2,
        episodes_per_video_file=1,
        episodes_per_data_file=5,
    )
    return write_dataset(tmp_path_factory.mktemp("nodes") / "arm", spec)


@pytest.fixture
def hub(root, tmp_path, monkeypatch):
    """Two nodes of one CPU, and one without for this process; each has its own home, and so its own caches."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # A Ray that this process had before has left it in token mode, with the token in the home folder of then.
    token = Path.home() / ".ray/auth_token"
    if token.exists():
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("HOME", str(tmp_path / "driver"))
    with HubServer() as server, server.as_hub(tmp_path / "driver/hub"):
        server.add_repo("lab/arm", root, tags=("v3.0",))
        homes = [tmp_path / "node0", tmp_path / "node1"]
        variables = [{**server.environment(home / "hub"), "HOME": str(home)} for home in homes]
        with local_nodes(*({"num_cpus": 1, "env_vars": one} for one in variables)):
            yield server


def cluster_pipe():
    return Pipeline(
        open_dataset("lab/arm"),
        batch_size=4,
        seed=0,
        order={"live_spans": 2},
        decode={"where": "cluster"},
        feed={"spans_per_block": 1},
    )


@ray.remote(num_cpus=1)
class Holder:
    """As a worker of Ray Train has CPUs, for as long as it trains."""

    def ready(self):
        return True


@pytest.mark.timeout(240)
def test_clips_whose_node_has_no_free_cpu_are_decoded_on_another(hub, root):
    held = next(node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU", 0) == 1)
    strategy = NodeAffinitySchedulingStrategy(held, soft=False)
    holder = Holder.options(scheduling_strategy=strategy).remote()
    ray.get(holder.ready.remote(), timeout=60)

    batches = list(cluster_pipe().loader())

    assert sorted(frames_of_all(batches)) == frames_of_dataset(open_dataset(str(root)))


WORKS = {
    "validate": lambda tmp_path: validate_dataset("lab/arm", where="ray"),
    "reshard": lambda tmp_path: reshard_dataset("lab/arm", tmp_path / "out", where="ray"),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("work", WORKS)
def test_tasks_of_other_commands_ask_the_budget_of_the_cluster(hub, tmp_path, work, monkeypatch):
    # What this process has sent in other tests would be told to the cluster too.
    own = Budget()
    monkeypatch.setattr(requests._process, "own", own)
    monkeypatch.setattr(requests._process, "gate", own)
    named = {"name": requests._NAME, "namespace": requests._NAMESPACE, "num_cpus": 0, "max_concurrency": 8}
    # One that time makes up for nothing in.
    actor = ray.remote(Budget).options(**named).remote(3000, 1e9)
    ray.get(actor.take.remote())

    WORKS[work](tmp_path)

    files = {name for name in hub.paths if name.startswith(("data/", "videos/"))}
    assert len(files) == NUM_EPISODES + 2
    # Whoever has asked: what is sent on to where a file is stored is no request to the Hub.
    assert hub.counts["resolve"] > own.num_granted
    assert ray.get(actor.num_recent.remote()) >= hub.counts["resolve"]


@pytest.mark.timeout(240)
def test_no_node_fetches_a_video_twice_and_every_request_is_in_the_figures(hub, root, tmp_path):
    loader = cluster_pipe().loader()
    opened = hub.num_requests

    batches = list(loader)

    assert sorted(frames_of_all(batches)) == frames_of_dataset(open_dataset(str(root)))
    assert (tmp_path / "node0/.cache/raypipe").exists()
    assert (tmp_path / "node1/.cache/raypipe").exists()
    # A request to the Hub, which sends on to where it is stored.
    fetches = {name: count // 2 for name, count in hub.paths.items() if name.startswith(("data/", "videos/"))}
    videos = [count for name, count in fetches.items() if name.endswith(".mp4")]
    assert len(videos) == NUM_EPISODES
    # A video has a home, and goes elsewhere only while the one CPU there is busy.
    assert max(videos) <= 2
    # This process looks up the columns.
    assert max(fetches.values()) <= 3
    # Of each node the listing, and no file of meta/.
    assert hub.counts["tree"] <= 3
    assert hub.counts["refs"] == hub.counts["revision"] == 1
    assert abs(loader.stats().requests - (hub.num_requests - opened)) <= 2
