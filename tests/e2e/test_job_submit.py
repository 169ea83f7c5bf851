"""`ray job submit` of the training example to a cluster that asks for a token: trains, stops, goes on, refuses."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from doc_pages import PAGES, fenced
from ray.runtime_env import RuntimeEnv

import raypipe as rp

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PORTS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "ray-client-server-port",
)


NEVER_RAN = "The actor never ran - it was cancelled before it started running."


@dataclass(frozen=True)
class Cluster:
    """A running head, as those who have its token see it."""

    address: str
    env: dict[str, str]
    storage: Path

    def submit(self, *arguments, env=None):
        """Submit a command; waits for its end unless told otherwise."""
        command = [BIN / "ray", "job", "submit", "--address", self.address, "--working-dir", ".", *arguments]
        done = self._run(command, env)
        # On a busy machine Ray may lose the process that would start the command: as a person would, once more.
        return self._run(command, env) if NEVER_RAN in done.stdout else done

    def _run(self, command, env):
        return subprocess.run(
            command,
            cwd=REPOSITORY,
            env=env or self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def train(self, *options, before=()):
        script = ("python", "examples/train_policy.py", "--storage", self.storage, "--num-workers", "2", *options)
        return self.submit(*before, "--", *script)

    def stop(self, job):
        command = [BIN / "ray", "job", "stop", "--address", self.address, job]
        subprocess.run(command, env=self.env, check=True, capture_output=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head with 4 CPUs, with a home, a token, a temporary folder and ports of its own."""
    home = tmp_path_factory.mktemp("home")
    env = {**os.environ, "HOME": str(home), "RAY_AUTH_MODE": "token", "PATH": f"{BIN}:{os.environ['PATH']}"}
    # A proxy of the environment must not see what stays on this machine.
    env |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", "RAY_ADDRESS": ""}
    subprocess.run([BIN / "ray", "get-auth-token", "--generate"], env=env, check=True, capture_output=True)
    (home / ".ray" / "auth_token").chmod(0o600)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    # Sockets have paths of at most 107 characters.
    folder = tempfile.mkdtemp(prefix="rp-", dir="/tmp")
    options = ["--num-cpus=4", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--disable-usage-stats"]
    # 0: any that is free, where Ray's own choice is a range that other clusters of the machine use too.
    options += ["--min-worker-port=0", "--max-worker-port=0", *(f"--{name}={port}" for name, port in ports.items())]
    head = subprocess.Popen(
        [BIN / "ray", "start", "--head", "--block", *options],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        wait_for_answer(address, head)
        yield Cluster(address, env, tmp_path_factory.mktemp("storage"))
    finally:
        end(head, folder)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for free in sockets:
        free.bind(("127.0.0.1", 0))
    ports = [free.getsockname()[1] for free in sockets]
    for free in sockets:
        free.close()
    return ports


def wait_for_answer(address, head):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert head.poll() is None, "the head has ended"
        try:
            opener.open(address, timeout=5).close()
            return
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                return
            time.sleep(0.5)
    raise AssertionError(f"the head does not answer at {address}")


def end(head, folder):
    """Kill all processes of a head: told to end, it would wait half a minute for work to drain."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # One may end while this goes on.
        with suppress(OSError):
            if folder in path.read_text():
                os.kill(int(path.parent.name), signal.SIGKILL)
    head.wait(timeout=60)


def losses(log):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", log)}


def test_jobs_of_the_documentation_train_and_go_on_and_their_logs_show_a_falling_loss(cluster):
    (block,) = fenced("sh", PAGES / "jobs-and-clusters.md")
    # The token and the head are there already, and `ray stop` would end every Ray of the machine.
    jobs = block[block.index("ray job submit") : block.index("ray stop")]
    jobs = jobs.replace("http://127.0.0.1:8265", cluster.address)

    done = subprocess.run(
        ["bash", "-e", "-c", jobs.replace("/tmp/runs", str(cluster.storage))],
        cwd=REPOSITORY,
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-5000:]
    assert "at step 0: epoch 0 of 3, 16 batches of it left" in done.stdout
    assert "at step 48: epoch 3 of 4" in done.stdout
    found = losses(done.stdout)
    assert list(found)[:4] == [10, 20, 30, 40]
    assert found[40] < found[10] / 2
    assert max(found) > 48
    assert re.search(r"samples/s, waiting \d+% of the time, most on rank [01] \(\d+%\), for \w+", done.stdout)


@pytest.fixture(scope="module")
def refused(cluster):
    """A job that tells how large its folder is, and then trains under a name that is taken."""
    (cluster.storage / "used").mkdir()
    script = f"du -sk . && python examples/train_policy.py --storage {cluster.storage} --num-workers 2 --name used"
    return cluster.submit("--", "bash", "-c", script)


def test_upload_of_the_repository_is_small(refused):
    # Neither the virtual environment nor what the demo and the tools write: Ray reads .gitignore.
    # Ray prints the end of a failed job's log once more.
    (kilobytes,) = set(re.findall(r"^(\d+)\s+\.$", refused.stdout, flags=re.MULTILINE))
    assert int(kilobytes) < 10_000


def test_used_name_is_refused_without_resume(cluster, refused):
    assert refused.returncode != 0
    told = f"there is a run 'used' in {cluster.storage}: go on with --resume, or choose another --name"
    assert told in refused.stdout


def test_job_that_was_stopped_goes_on_with_the_very_next_batch(cluster):
    run = cluster.storage / "stopped"
    cluster.train(
        "--name", "stopped", "--epochs", "99", "--checkpoint-every", "7", before=("--no-wait", "--submission-id", "job")
    )
    wait_for(run / "checkpoint_manager_snapshot.json")
    cluster.stop("job")
    saved = newest_checkpoint(run)
    state = rp.train.read_state(saved)
    step, epoch = torch.load(saved / "policy.pt", weights_only=True)["step"], state["epoch"]

    done = cluster.train("--name", "stopped", "--epochs", str(epoch + 1), "--resume")

    assert done.returncode == 0, done.stdout[-5000:]
    left = 16 - step % 16
    assert f"at step {step}: epoch {epoch} of {epoch + 1}, {left} batches of it left" in done.stdout
    end = torch.load(newest_checkpoint(run) / "policy.pt", weights_only=True)["step"]
    assert end == step + left == 16 * (epoch + 1)
    assert rp.train.read_state(newest_checkpoint(run))["epoch"] == epoch + 1


def wait_for(path):
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.2)


def newest_checkpoint(run):
    """The checkpoint that Ray Train would go on from."""
    snapshot = json.loads((run / "checkpoint_manager_snapshot.json").read_text())
    return run / snapshot["latest_checkpoint_result"]["checkpoint_dir_name"]


def test_submit_without_the_token_is_refused(cluster, tmp_path):
    env = {name: value for name, value in cluster.env.items() if name != "RAY_AUTH_MODE"}

    done = cluster.submit("--", "python", "-c", "print('it ran')", env={**env, "HOME": str(tmp_path)})

    assert done.returncode != 0
    assert "it ran" not in done.stdout
    assert re.search(r"401|Unauthorized|[Aa]uthentication", done.stdout), done.stdout[-2000:]


def test_runtime_env_of_the_examples_is_one_that_ray_takes():
    runtime_env = yaml.safe_load((REPOSITORY / "examples" / "runtime_env.yaml").read_text())

    RuntimeEnv(**{**runtime_env, "working_dir": str(REPOSITORY)})

    excludes = runtime_env["excludes"]
    assert {".venv/", "demo-data/"} <= set(excludes)
    # What pip is told to install lies in the folder that is uploaded.
    variable = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"
    installed = [line.split()[-1] for line in runtime_env["pip"]]
    assert [path.partition(variable)[0] for path in installed] == ["", ""]
    names = [path.removeprefix(variable).removeprefix("/") for path in installed]
    assert names == ["constraints.txt", ""]
    assert all((REPOSITORY / name).exists() for name in names)
    assert not {"constraints.txt", "pyproject.toml", "raypipe/", "README.md"} & set(excludes)
