"""Save and restore what a run keeps of its loaders: position (a JSON file each), account and figures."""

import json
from pathlib import Path
from typing import Any, Final

import pyarrow.fs

from raypipe.account import HEAD, read_rank_accounts, write_rank_account
from raypipe.errors import ConfigError, ResumeError, as_damage
from raypipe.loader import RankLoader
from raypipe.text import parse_json

STATE_FOLDER: Final = "raypipe"
"""The folder in a checkpoint that holds one JSON file per loader."""


def write_states(checkpoint_dir: str | Path, *loaders: RankLoader) -> None:
    """Write the loaders' states and accounts into a folder that becomes a checkpoint.

    Rank 0 writes the state; every rank that calls this writes its own account. If only rank 0 calls it, the state is
    complete and the account is not.
    """
    names = [loader.name for loader in loaders]
    if len(set(names)) < len(names):
        raise ConfigError(f"loaders of one checkpoint need different names, got {names}")
    folder = Path(checkpoint_dir) / STATE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for loader in loaders:
        account = loader.account()
        write_rank_account(folder, account, loader.rank, loader.world_size)
        if loader.rank == 0:
            path = folder / f"{loader.name}.json"
            # Replace atomically: the folder may hold the state of an earlier step.
            saved = {**account.header.state, HEAD: account.header.head}
            path.with_suffix(".new").write_text(json.dumps(saved, indent=2))
            path.with_suffix(".new").replace(path)


def restore(checkpoint_dir: str | Path, loader: RankLoader) -> bool:
    """Resume a loader from a folder that `write_states` wrote; return whether the folder has its state."""
    state = read_state(checkpoint_dir, loader.name)
    if state is None:
        return False
    filesystem, path = pyarrow.fs.FileSystem.from_uri(str(Path(checkpoint_dir).absolute()))
    go_on(loader, state, filesystem, path)
    return True


def go_on(loader: RankLoader, state: dict[str, Any], filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Resume a loader from a state and the account beside it, in the folder `path` of a checkpoint."""
    loader.load_state_dict(state)
    # Rank 0 carries the earlier parts of all ranks. The other ranks drop what they did since the checkpoint.
    folder = f"{path}/{STATE_FOLDER}"
    loader.load_account(read_rank_accounts(filesystem, folder, loader.name) if loader.rank == 0 else ())


def read_state(checkpoint_dir: str | Path, name: str = "train") -> dict[str, Any] | None:
    """Return the state of the loader `name` in a folder that `write_states` wrote; None if it has none."""
    path = Path(checkpoint_dir) / STATE_FOLDER / f"{name}.json"
    return parse_state(path.read_bytes(), str(path)) if path.exists() else None


def parse_state(content: bytes, place: str) -> dict[str, Any]:
    """Return a state from the content of its file; `place` names the file in errors."""
    with as_damage(lambda error: ResumeError(f"damaged state {place!r}: {error}. Go back to an earlier checkpoint.")):
        state = parse_json(content)
    if not isinstance(state, dict):
        raise ResumeError(f"damaged state {place!r}: {state!r} is no JSON object. Go back to an earlier checkpoint.")
    state.pop(HEAD, None)
    return state


def loader_metrics(loader: RankLoader) -> dict[str, Any]:
    """Return figures of all ranks together and of this one, for a log or `ray.train.report`.

    Keys begin with the loader's name. ``train/samples_per_s`` and ``train/wait_share`` cover all ranks over the last
    steps; ``train/worst_rank`` is the rank that waits most, and ``train/waits_for`` is what it waits for.
    """
    world, mine = loader.world_stats(recent=True), loader.stats()
    figures = {**world.to_dict(), "first_batch_s": mine.first_batch_s, "live_bytes": mine.live_bytes}
    figures["decoded_per_emitted"] = mine.decoded_per_emitted
    return {f"{loader.name}/{key}": value for key, value in figures.items()}
