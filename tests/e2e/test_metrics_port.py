"""What Prometheus finds on the metrics port of a Ray node while raypipe runs."""

import re
import shutil
import socket
import sys
import time
import urllib.request

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray import cloudpickle
from ray_session import end_ray

import raypipe as rp
from raypipe.feed.metrics import COUNTERS, GAUGES

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLE = re.compile(r"^(?P<name>ray_raypipe_\w+)\{(?P<tags>.*)\} (?P<value>\S+)$", re.MULTILINE)


@pytest.fixture
def metrics_url():
    """The metrics page of a local Ray of its own."""
    end_ray()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
        _metrics_export_port=port,
        # Else every 10 s.
        _system_config={"metrics_report_interval_ms": 1000},
    )
    yield f"http://127.0.0.1:{port}/metrics"
    end_ray()


@ray.remote(num_cpus=0)
class Rank:
    def run(self, loader):
        return sum(len(batch["index"]) for batch in loader)


def scrape(url):
    """The metrics of raypipe as {name: {(pipeline, rank): value}}."""
    # Loopback: a proxy of the environment must not see it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        page = opener.open(url, timeout=10).read().decode()
    except OSError:
        return {}
    found = {}
    for match in SAMPLE.finditer(page):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', match["tags"]))
        found.setdefault(match["name"], {})[tags["pipeline"], tags["rank"]] = float(match["value"])
    return found


@pytest.fixture
def damaged(tiny_dataset, tmp_path):
    """A copy of the dataset with NaN in an action of episode 1."""
    root = shutil.copytree(tiny_dataset, tmp_path / "dataset")
    path = min((root / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    actions = table.column("action").to_pylist()
    actions[table.column("episode_index").to_pylist().index(1)][0] = float("nan")
    place = table.column_names.index("action")
    pq.write_table(table.set_column(place, "action", pa.array(actions, table.schema.field("action").type)), path)
    return rp.open_dataset(str(root))


def test_samples_and_skipped_frames_of_all_ranks_add_up_to_the_epoch_on_the_metrics_port(damaged, metrics_url):
    pipe = rp.Pipeline(damaged, batch_size=4, seed=0, on_bad_episode="skip")
    ranks = [Rank.remote() for _ in range(2)]
    counts = ray.get(
        [rank.run.remote(loader) for rank, loader in zip(ranks, pipe.loaders(2, name="demo"), strict=True)]
    )

    # Ray hands metrics to the node's agent every second.
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = scrape(metrics_url)
        samples = found.get("ray_raypipe_samples_total", {})
        skipped = sum(found.get("ray_raypipe_skipped_frames_total", {}).values())
        if sum(samples.values()) == sum(counts) and skipped:
            break
        time.sleep(0.1)

    assert samples == {("demo", "0"): counts[0], ("demo", "1"): counts[1]}
    assert skipped == pipe.config.dataset.meta.episodes.length[1]
    assert sum(counts) == len(pipe.config.dataset) - skipped
    # A counter that never counted is not shown.
    assert set(found) <= {*(f"ray_{name}_total" for name in COUNTERS), *(f"ray_{name}" for name in GAUGES)}
    assert {"ray_raypipe_wait_seconds_total", "ray_raypipe_live_bytes"} <= set(found)
