"""The environments of the peers: one for each, made once below a folder, and why one cannot be made."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PROJECT_ENV = "project"
"""The environment that runs this: raypipe's own."""

_INSTALL_LIMIT_S = 3600


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a peer is installed with."""

    requirements: tuple[str, ...]
    packages: tuple[str, ...]
    """Those whose versions are told."""
    needs_python312: bool = False
    has_raypipe: bool = False


class EnvironmentMissingError(Exception):
    """An environment could not be made; the message says why."""


def environments() -> dict[str, Environment]:
    """Return the environments by name; where a peer leaves it open, torch and torchcodec are those of raypipe."""
    codec = tuple(f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "torchcodec"))
    by_hand = (*codec, "numpy", "pyarrow", "pillow")
    own = ("numpy", "pyarrow", "fsspec", "huggingface_hub", "pillow", "pyyaml", "rich", "typer", "matplotlib")
    return {
        "lerobot": Environment(
            requirements=("lerobot[dataset]==0.6.1", "accelerate", f"ray[data]=={version('ray')}"),
            packages=("lerobot", "ray", "torch", "torchcodec", "accelerate"),
            needs_python312=True,
        ),
        "datasets": Environment(
            requirements=(*by_hand, "datasets>=4", "torchdata"),
            packages=("datasets", "torchdata", "torch", "torchcodec"),
        ),
        "torchdata": Environment(
            requirements=(*codec, *own, "torchdata"), packages=("torchdata", "torch", "torchcodec"), has_raypipe=True
        ),
        # It imports torchvision, whose wheels on PyPI are for torch's CUDA builds; these go together.
        "streaming": Environment(
            requirements=("torch==2.11.0", "torchcodec==0.11.1", "numpy", "pyarrow", "pillow", "mosaicml-streaming"),
            packages=("mosaicml-streaming", "torch"),
            needs_python312=True,
        ),
        "litdata": Environment(requirements=(*by_hand, "litdata"), packages=("litdata", "torch")),
    }


def make_environment(name: str, folder: Path, python312: str | None) -> str:
    """Return the Python of an environment, which is made if it is not there.

    Raises:
        EnvironmentMissingError: it cannot be made here.
    """
    if name == PROJECT_ENV:
        return sys.executable
    environment = environments()[name]
    root = folder / name
    marker, wanted = root / "installed.json", sorted(environment.requirements)
    if not marker.exists() or json.loads(marker.read_text()) != wanted:
        base = _base_python(environment, python312)
        shutil.rmtree(root, ignore_errors=True)
        print(f"installing {name}: {' '.join(wanted)}", flush=True)
        _install(base, root, environment)
        marker.write_text(json.dumps(wanted))
    return str(root / "bin" / "python")


def find_python312(given: str | None) -> str | None:
    """Return a Python 3.12 or newer: the given one, this one, or one on the path."""
    candidates = [given] if given else [sys.executable, "python3.12", "python3.13"]
    for candidate in candidates:
        path = shutil.which(candidate)
        if path and _is_at_least_312(path):
            return path
    return None


def read_versions(python: str, name: str) -> dict[str, str]:
    """Return the versions of what matters in an environment."""
    packages = environments()[name].packages if name != PROJECT_ENV else ("raypipe", "ray", "torch", "torchcodec")
    code = (
        "import json, sys; from importlib.metadata import version as v; print(json.dumps(list(map(v, sys.argv[1:]))))"
    )
    found = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True).stdout
    return dict(zip(packages, json.loads(found), strict=True))


def _base_python(environment: Environment, python312: str | None) -> str:
    if not environment.needs_python312:
        return sys.executable
    found = find_python312(python312)
    if found is None:
        raise EnvironmentMissingError("needs Python 3.12; name one with --python312 PATH")
    return found


def _is_at_least_312(python: str) -> bool:
    check = "import sys; sys.exit(sys.version_info < (3, 12))"
    return subprocess.run([python, "-c", check], check=False, capture_output=True).returncode == 0


def _install(base: str, root: Path, environment: Environment) -> None:
    pip = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [[base, "-m", "venv", str(root)], [*pip, *environment.requirements]]
    if environment.has_raypipe:
        commands.append([*pip, "--no-deps", "--editable", str(PROJECT)])
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or ["no message"]
            raise EnvironmentMissingError(f"does not install: {lines[-1]}") from error
        except subprocess.TimeoutExpired as error:
            raise EnvironmentMissingError(f"does not install within {_INSTALL_LIMIT_S} s") from error
