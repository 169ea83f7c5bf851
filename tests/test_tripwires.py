"""What raypipe relies on in Ray without Ray's promise. If one of these fails, so does a rule that raypipe stands on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray
from attempts import local_nodes
from ray import cloudpickle
from ray.data import DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_session import IGNORED_WARNINGS, end_ray, ensure_ray, run_ranks

from raypipe.dataset import open_dataset
from raypipe.decode.executors import prefer_node
from raypipe.decode.spec import DecodeSpec
from raypipe.feed import BlockContext, SpanRequest, simulate_split
from raypipe.feed.ray_data import build_dataset, split_dataset

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.timeout(180), *(pytest.mark.filterwarnings(ignored) for ignored in IGNORED_WARNINGS)]


@pytest.fixture(scope="module", autouse=True)
def _ray():
    ensure_ray(2)
    yield
    end_ray()


class Tables(Datasource):
    """Read tasks that give tables of these sizes, after different waits."""

    def __init__(self, tasks):
        self._tasks = tasks

    def estimate_inmemory_data_size(self):
        return None

    def get_read_tasks(self, parallelism, per_task_row_limit=None, data_context=None):
        return [ReadTask(reader(i, sizes), metadata(sizes)) for i, sizes in enumerate(self._tasks)]


def metadata(sizes):
    return BlockMetadata(num_rows=sum(sizes), size_bytes=None, exec_stats=None, input_files=None)


def reader(task, sizes):
    def read():
        time.sleep(task * 7 % 5 / 20)
        return [pa.table({"task": np.full(size, task), "part": np.full(size, i)}) for i, size in enumerate(sizes)]

    return read


def read_tables(tasks):
    """Build a dataset with the settings of `build_dataset` on which the rules below depend."""
    context = DataContext.get_current().copy()
    context.target_max_block_size = None
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    with DataContext.current(context):
        return ray.data.read_datasource(Tables(tasks), override_num_blocks=len(tasks))


def blocks_of(iterator):
    return list(iterator.iter_batches(batch_size=None, batch_format="pyarrow"))


def test_split_gives_a_block_to_the_rank_with_the_fewest_rows_and_keeps_the_order():
    sizes = [5, 3, 4, 2, 4, 4, 1, 1, 9, 2, 2, 2, 7, 1]
    splits = split_dataset(read_tables([[size] for size in sizes]), 3)

    # Rank 0 asks late and slowly: who asks when must not matter.
    def consume(rank_and_split):
        rank, split = rank_and_split
        tasks = []
        for block in split.iter_batches(batch_size=None, batch_format="pyarrow"):
            time.sleep(0.1 if rank == 0 else 0.0)
            tasks.append(block.column("task")[0].as_py())
        return tasks

    came = run_ranks(list(enumerate(splits)), consume)

    ranks = simulate_split(np.array(sizes), 3).tolist()
    assert came == [[task for task, rank in enumerate(ranks) if rank == wanted] for wanted in range(3)]


def test_several_blocks_of_one_read_task_are_merged_into_one():
    (split,) = split_dataset(read_tables([[2, 3, 4], [1]]), 1)

    blocks = blocks_of(split)

    # If this fails because 4 blocks came: one read task could then give several spans, each as a block of its own.
    assert [len(block) for block in blocks] == [9, 1]


@pytest.fixture(scope="module")
def context(tiny_dataset):
    return ray.put(BlockContext((open_dataset(str(tiny_dataset)),), DecodeSpec()))


REQUESTS = [
    (SpanRequest(epoch=0, dataset=0, lap=0, episode=episode, start=0, stop=stop, lane=0, place=episode),)
    for episode, stop in enumerate((7, 1, 12, 5, 9))
]


def test_one_task_gives_one_block_of_any_size_with_our_settings(context):
    small = DataContext.get_current().copy()
    # Smaller than the rows of a span.
    small.target_max_block_size = 1 << 6
    with DataContext.current(small):
        dataset = build_dataset(context, REQUESTS)

    (split,) = split_dataset(dataset, 1)
    blocks = blocks_of(split)

    assert [len(block) for block in blocks] == [7, 1, 12, 5, 9]


def test_split_asks_for_its_blocks_anew_whenever_all_ranks_begin(context):
    @ray.remote
    class Source:
        def __init__(self):
            self._num_asked = 0

        def blocks(self):
            self._num_asked += 1
            return REQUESTS[-self._num_asked :]

    source = Source.remote()
    (split,) = split_dataset(build_dataset(context, lambda: ray.get(source.blocks.remote())), 1)

    executions = [[len(block) for block in blocks_of(split)] for _ in range(3)]

    assert executions == [[9], [5, 9], [12, 5, 9]]


def test_reading_and_windowing_run_as_one_operator(context):
    dataset = build_dataset(context, REQUESTS).materialize()

    assert "Operator 1 ReadSpans:" in dataset.stats()
    assert "Operator 2" not in dataset.stats()


def test_a_preferred_node_is_taken_where_it_has_a_free_cpu_and_another_where_it_has_none():
    """The last one here: it leaves the Ray of the others for two nodes of its own."""

    @ray.remote(num_cpus=1)
    class Holder:
        def node(self):
            return ray.get_runtime_context().get_node_id()

    @ray.remote(num_cpus=1)
    def find_node():
        return ray.get_runtime_context().get_node_id()

    with local_nodes({"num_cpus": 1}, {"num_cpus": 1}):
        one, other = (node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU", 0) == 1)
        free = [ray.get(find_node.options(scheduling_strategy=prefer_node(node)).remote()) for node in (one, other)]
        holder = Holder.options(scheduling_strategy=prefer_node(one)).remote()
        held = ray.get(holder.node.remote())

        ran = ray.get(find_node.options(scheduling_strategy=prefer_node(one)).remote(), timeout=60)
        waits = find_node.options(scheduling_strategy=NodeAffinitySchedulingStrategy(one, soft=True)).remote()
        is_stuck = not ray.wait([waits], timeout=10)[0]

    assert (free, held, ran) == ([one, other], one, other)
    # If this fails, the public argument is enough, and the private one may go.
    assert is_stuck


CRASH_AFTER_RAY = """
import ctypes
import ray

def test_ray():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    ray.shutdown()

def test_crash():
    ctypes.string_at(0)
"""


def test_a_crash_of_the_tests_after_ray_has_ended_tells_where(tmp_path):
    (tmp_path / "test_crash.py").write_text(CRASH_AFTER_RAY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}

    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", str(tmp_path), str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert ended.returncode == -signal.SIGSEGV, ended.stdout
    assert "in test_crash" in ended.stderr, ended.stderr
