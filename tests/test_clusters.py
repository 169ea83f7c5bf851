"""The files that start clusters: `cluster.yaml`, `examples/slurm.sbatch`, `examples/rayjob.yaml`.

No cloud, SLURM or Kubernetes is asked. Ray's own code reads the launcher's file and the groups of the manifest; the
batch script runs with stand-ins for what it calls.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray import cloudpickle
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.cluster_utils import Cluster
from ray_session import IGNORED_WARNINGS, end_ray

from raypipe.dataset import open_dataset
from raypipe.feed.feeder import has_spare_cpu_nodes
from raypipe.pipeline import Pipeline

# The workers of Ray cannot import modules of the tests: what is defined here travels to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).parents[1]
LAUNCHER = (ROOT / "cluster.yaml").read_text()
BATCH = ROOT / "examples" / "slurm.sbatch"
MANIFEST = yaml.safe_load((ROOT / "examples" / "rayjob.yaml").read_text())
MANIFEST_SCHEMA = json.loads((Path(__file__).parent / "schemas" / "rayjob.json").read_text())

# The header's command, over two lines of the comment.
LAUNCHER_COMMAND = re.search(r"train_policy\.py -- (.*?)\n#   ray down", LAUNCHER, flags=re.DOTALL)[1]
COMMANDS = {"cluster.yaml": LAUNCHER_COMMAND.replace("\\\n#", ""), "rayjob.yaml": MANIFEST["spec"]["entrypoint"]}


def launcher_node_types():
    # What `ray up` does with the file before it asks AWS: fills in the defaults, then checks it by Ray's schema.
    config = prepare_config(yaml.safe_load(LAUNCHER))
    validate_config(config)
    return config["available_node_types"]


def manifest_node_types():
    # What Ray's autoscaler makes of the manifest inside the head's pod; it checks the result by the same schema.
    cluster = {"metadata": {"name": "raypipe", "namespace": "default"}, "spec": MANIFEST["spec"]["rayClusterSpec"]}
    return _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]


NODE_TYPES = {
    "cluster.yaml": (launcher_node_types, ("head", "cpu_worker", "gpu_worker")),
    "rayjob.yaml": (manifest_node_types, ("headgroup", "cpu", "gpu")),
}


def options_of(command):
    """Return the options of a command line with their values."""
    words = shlex.split(command)
    return {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


@pytest.mark.parametrize("file", NODE_TYPES)
def test_nodes_are_what_ray_accepts(file):
    read, names = NODE_TYPES[file]

    assert tuple(read()) == names


@pytest.mark.parametrize("file", NODE_TYPES)
def test_training_workers_hold_all_cpus_that_gpu_nodes_offer(file):
    read, (head, _, gpu) = NODE_TYPES[file]
    per_worker = int(options_of(COMMANDS[file])["--cpus-per-worker"])

    types = read()

    assert types[head]["resources"]["CPU"] == 0
    assert types[gpu]["resources"]["CPU"] == types[gpu]["resources"]["GPU"] * per_worker


@pytest.mark.parametrize("file", NODE_TYPES)
def test_nodes_hold_as_many_training_workers_as_the_command_asks_for(file):
    read, (_, _, gpu) = NODE_TYPES[file]
    workers = int(options_of(COMMANDS[file])["--num-workers"])

    types = read()

    assert types[gpu]["max_workers"] * types[gpu]["resources"]["GPU"] == workers


@pytest.mark.parametrize("file", NODE_TYPES)
def test_a_cpu_node_is_always_there(file):
    read, (_, cpu, _) = NODE_TYPES[file]

    assert read()[cpu]["min_workers"] >= 1


def test_constraints_name_versions_and_no_builds():
    # One such as torch==2.13.0+cpu is on no registry, and not what a GPU node wants.
    assert "+" not in (ROOT / "constraints.txt").read_text()


def test_files_name_the_ray_of_the_constraints():
    constraints = (ROOT / "constraints.txt").read_text()

    version = re.search(r"^ray==(.+)$", constraints, flags=re.MULTILINE)[1]

    assert MANIFEST["spec"]["rayClusterSpec"]["rayVersion"] == version
    assert f"'ray[default]=={version}'" in LAUNCHER


def run_setup(home, command, *, has_gpu=False):
    """Run one of the launcher's set-up commands with stand-ins for what it installs with; return what pip was given."""
    tools = home / "env" / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    write_tool(tools / "pip", 'echo "$@" >> ~/pip-was-given')
    write_tool(tools / "nvidia-smi", f"exit {0 if has_gpu else 9}")
    subprocess.run(["bash", "-c", command], env={"HOME": str(home), "PATH": f"{tools}:/usr/bin:/bin"}, check=True)
    return (home / "pip-was-given").read_text() if (home / "pip-was-given").exists() else ""


def write_tool(path, body):
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def set_up_command(word):
    (command,) = [command for command in yaml.safe_load(LAUNCHER)["setup_commands"] if word in command]
    return command


@pytest.mark.parametrize("has_gpu", [True, False])
def test_nodes_with_a_gpu_take_the_build_for_it(tmp_path, has_gpu):
    given = run_setup(tmp_path, set_up_command("nvidia-smi"), has_gpu=has_gpu)

    assert f"--constraint {tmp_path}/raypipe/constraints.txt {tmp_path}/raypipe ray[default]" in given
    assert ("download.pytorch.org/whl/cpu" in given) == (not has_gpu)


def test_shells_of_a_node_find_ray_and_its_token_after_any_number_of_set_ups(tmp_path):
    (tmp_path / ".bashrc").touch()

    for _ in range(2):
        run_setup(tmp_path, set_up_command(".bashrc"))

    assert len((tmp_path / ".bashrc").read_text().splitlines()) == 1
    shell = subprocess.run(
        ["bash", "-c", 'source ~/.bashrc && echo "$RAY_AUTH_MODE" && command -v pip'],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout.split() == ["token", f"{tmp_path}/env/bin/pip"]


def test_manifest_is_what_kuberay_accepts():
    jsonschema.validate(MANIFEST, MANIFEST_SCHEMA)


def worker_group(manifest):
    return manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda manifest: manifest["spec"].pop("entrypoint"), "'entrypoint' is a required property"),
        (lambda manifest: manifest["spec"].update(rayClusterSpecs={}), "'rayClusterSpecs' was unexpected"),
        (lambda manifest: worker_group(manifest).pop("groupName"), "'groupName' is a required property"),
        (
            lambda manifest: worker_group(manifest)["rayStartParams"].update({"num-cpus": 0}),
            "0 is not of type 'string'",
        ),
    ],
)
def test_manifests_that_kuberay_would_not_run_are_refused(damage, message):
    manifest = deepcopy(MANIFEST)
    damage(manifest)

    with pytest.raises(jsonschema.ValidationError, match=re.escape(message)):
        jsonschema.validate(manifest, MANIFEST_SCHEMA)


@pytest.fixture
def small_cluster():
    """A Ray with a head, a CPU node and a GPU node that offer what the files say, with 2 GPUs of 1 CPU each."""
    quiet = {"include_dashboard": False, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    cpu = cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=100_000_000)
    ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
    yield cpu.node_id
    end_ray()
    cluster.shutdown()


@ray.remote(num_cpus=1, num_gpus=1)
class TrainingWorker:
    def ready(self):
        return True


def add_node_id(block):
    return block.append_column("node", [[ray.get_runtime_context().get_node_id()] * len(block)])


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings(*IGNORED_WARNINGS)
def test_data_tasks_run_on_cpu_nodes_alone_beside_training_workers(small_cluster, tiny_dataset):
    workers = [TrainingWorker.remote() for _ in range(2)]
    ray.get([worker.ready.remote() for worker in workers])
    pipe = Pipeline(open_dataset(str(tiny_dataset)), batch_size=4, seed=0)

    rows = pipe.to_ray().map_batches(add_node_id, batch_size=None, batch_format="pyarrow").take_all()

    assert {row["node"] for row in rows} == {small_cluster}
    assert has_spare_cpu_nodes()


NODES = ("robot1", "robot2", "robot3")
ADDRESS = "10.0.0.1:20042"

STAND_INS = {
    "sleep": "exec /bin/sleep 0.1",
    "scontrol": f"echo {' '.join(NODES)} | tr ' ' '\\n' | head -n \"$NUM_NODES\"",
    "hostname": 'echo "${IP:-10.0.0.1} fe80::1"',
    # Runs its command here, under the name of the node.
    "srun": """
        echo "srun $*" >> calls
        while [[ $1 == --* ]]; do [[ $1 != --nodelist=* ]] || export NODE=${1#*=}; shift; done
        exec "$@"
    """,
    "ray": """
        trap 'trap "" TERM; echo "end $NODE" >> calls; exit 1' TERM
        echo "ray $NODE $RAY_AUTH_MODE $*" >> calls
        while [[ $1 == start && $LOST != "$NODE" ]]; do sleep 1; done
    """,
    # Waits for nodes as the script's own Python does, or stands for the training.
    "python": """
        [[ $1 != -c ]] || exit "${NO_CLIENT:-0}"
        if [[ $1 == - ]]; then
            until (($(grep -c "^ray .* start" calls) >= $2)); do sleep 1; done
            exit
        fi
        trap 'trap "" TERM; echo "end training" >> calls; exit 1' TERM
        echo "python $RAY_ADDRESS $*" >> calls
        while [[ -n $ENDLESS ]]; do sleep 1; done
        exit "${EXIT_CODE:-0}"
    """,
}


class Job:
    """A job of the batch script in a folder of its own, with stand-ins for SLURM, Ray and Python."""

    def __init__(self, folder):
        self.folder = folder
        for name, body in STAND_INS.items():
            write_tool(folder / name, body)
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "activate").touch()
        self.calls_file = folder / "calls"
        self.calls_file.touch()

    def start(self, *args, **settings):
        given = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "NUM_NODES": "3",
            "SLURM_JOB_ID": "8042",
            "SLURM_JOB_NODELIST": "robot[1-3]",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_PER_TASK": "48",
        }
        return subprocess.Popen(
            ["bash", BATCH, *args],
            cwd=self.folder,
            env={**given, **settings},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, process):
        """Return its exit code and what it complained of. If it hangs, nothing of it is left behind."""
        try:
            _, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, errors

    def run(self, *args, **settings):
        return self.wait(self.start(*args, **settings))

    def calls(self, *begin):
        """Return the calls that began with these words, without them."""
        lines = [line.split() for line in self.calls_file.read_text().splitlines()]
        return [line[len(begin) :] for line in lines if line[: len(begin)] == list(begin)]


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.fixture(scope="module")
def ended_job(tmp_path_factory):
    """A job on three nodes that ran to its end."""
    job = Job(tmp_path_factory.mktemp("job"))
    assert job.run("--data", "/shared/dataset", "--name", "first run") == (0, "")
    return job


def test_batch_script_is_bash():
    done = subprocess.run(["bash", "-n", BATCH], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_batch_script_has_its_settings_before_its_first_command():
    lines = BATCH.read_text().splitlines()

    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))

    # sbatch reads no further.
    settings = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert settings
    assert max(settings) < first_command


def test_batch_script_starts_one_head_and_a_worker_on_every_other_node(ended_job):
    started = {node: args for node, _, verb, *args in ended_job.calls("ray") if verb == "start"}

    # The workers start at once, in any order.
    assert next(iter(started)) == "robot1"
    assert sorted(started) == list(NODES)
    assert started["robot1"][:3] == ["--head", "--node-ip-address=10.0.0.1", "--port=20042"]
    assert [started[node][0] for node in NODES[1:]] == [f"--address={ADDRESS}"] * 2
    for args in started.values():
        assert {"--num-cpus=48", "--num-gpus=4", "--block"} <= set(args)


def test_batch_script_gives_every_node_a_step_with_all_its_cpus_and_gpus(ended_job):
    steps = [args[: args.index("ray")] for args in ended_job.calls("srun")]

    limits = ["--cpus-per-task=48", "--gpus-per-node=4"]
    assert sorted(steps) == [["--nodes=1", "--ntasks=1", f"--nodelist={node}", *limits] for node in NODES]


def test_batch_script_runs_on_one_node_too(job):
    code, _ = job.run(NUM_NODES="1")

    assert code == 0
    assert [args[-1] for args in job.calls("srun")] == ["--block"]
    assert job.calls("end") == [["robot1"]]


def test_batch_script_trains_on_all_gpus_of_its_own_cluster(ended_job):
    (command,) = ended_job.calls("python")

    assert command[:2] == [ADDRESS, "examples/train_policy.py"]
    assert command[2:7] == ["--num-workers", "12", "--cpus-per-worker", "10", "--use-gpu"]
    assert command[7:] == ["--data", "/shared/dataset", "--name", "first", "run"]


def test_batch_script_resumes_a_job_that_was_queued_again(job):
    job.run("--name", "first", SLURM_RESTART_COUNT="1")

    (command,) = job.calls("python")
    assert command[7:] == ["--resume", "--name", "first"]


def test_batch_script_asks_for_a_token_on_every_node(ended_job):
    # The first call is outside any node: the token is made before a node starts.
    assert ended_job.calls("ray")[0] == ["token", "get-auth-token", "--generate"]
    assert [mode for _, mode, verb, *_ in ended_job.calls("ray") if verb == "start"] == ["token"] * 3


@pytest.mark.parametrize("exit_code", [0, 3])
def test_batch_script_ends_all_nodes_and_the_head_last_whatever_becomes_of_the_training(job, exit_code):
    code, _ = job.run(EXIT_CODE=str(exit_code))

    assert code == exit_code
    *workers, head = job.calls("end")
    assert sorted(workers) == [["robot2"], ["robot3"]]
    assert head == ["robot1"]


def test_batch_script_ends_training_and_nodes_on_a_signal(job):
    process = job.start(ENDLESS="yes")
    while not job.calls("python"):
        time.sleep(0.1)

    process.send_signal(signal.SIGTERM)
    code, _ = job.wait(process)

    assert code == 143
    training, *nodes = job.calls("end")
    assert training == ["training"]
    assert sorted(nodes) == [["robot1"], ["robot2"], ["robot3"]]


def test_batch_script_trains_nothing_without_its_head(job):
    code, errors = job.run(LOST="robot1", ENDLESS="yes")

    assert code == 1
    assert "the head of Ray has ended" in errors
    assert not job.calls("python")


def test_batch_script_goes_on_when_it_loses_a_worker(job):
    code, _ = job.run(LOST="robot2")

    assert code == 0
    assert job.calls("python")
    assert job.calls("end") == [["robot3"], ["robot1"]]


@pytest.mark.parametrize(("has_client", "options"), [(True, ["--ray-client-server-port=28042"]), (False, [])])
def test_batch_script_sets_the_port_of_ray_client_where_ray_has_it(job, has_client, options):
    job.run(NO_CLIENT="0" if has_client else "1")

    assert [word for word in job.calls("srun")[0] if "client" in word] == options


def test_batch_script_refuses_an_address_that_other_nodes_do_not_reach(job):
    code, errors = job.run(IP="127.0.1.1")

    assert code == 2
    assert "set HEAD_IP" in errors
    assert not job.calls("srun")


def test_batch_script_refuses_nodes_without_a_cpu_for_reading(job):
    code, errors = job.run(SLURM_CPUS_PER_TASK="40")

    assert code == 2
    assert "4 workers with 10 CPUs each leave none of a node's 40 for reading" in errors
    assert not job.calls("srun")


def test_commands_use_options_that_the_example_has(job):
    job.run(SLURM_RESTART_COUNT="1")
    commands = [*COMMANDS.values(), *(" ".join(words) for words in job.calls("python"))]

    helped = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_policy.py", "--help"], capture_output=True, text=True, check=True
    ).stdout

    known = set(re.findall(r"--[\w-]+", helped))
    assert len(commands) == 3
    assert not [option for command in commands for option in options_of(command) if option not in known]
