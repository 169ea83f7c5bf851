"""A run on a Ray of its own, as a program: prints digests of its batches. ``ROOT CACHE_FOLDER``"""

import hashlib
import json
import sys

import ray
import torch
from batches import WINDOWS
from ray_session import run_ranks

import raypipe as rp


def digest_of(batch) -> str:
    digest = hashlib.sha256()
    for key in sorted(batch):
        value = batch[key]
        content = value.contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        digest.update(key.encode() + content)
    return digest.hexdigest()


def make_pipe(root: str, **options) -> rp.Pipeline:
    dataset = rp.open_dataset(root).windowed(offsets=WINDOWS)
    batch = {"size": 8, "scope": "global"}
    return rp.Pipeline(dataset, batch_size=batch, seed=5, order={"live_spans": 3}, **options)


def run(root: str, folder: str) -> list:
    """Three steps on two ranks, then the rest of the epoch on one; by step the digests of the ranks."""
    pipe = make_pipe(root, cache={"folder": folder, "max_bytes": 1 << 30})
    loaders = pipe.loaders(2)
    begun = run_ranks(loaders, lambda loader: [digest_of(batch) for batch in loader.steps(3)])
    (rest,) = pipe.loaders(1)
    rest.load_state_dict(loaders[0].state_dict())
    steps = [list(step) for step in zip(*begun, strict=True)]
    return steps + [[digest_of(batch)] for batch in rest]


if __name__ == "__main__":
    ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="error")
    print(json.dumps(run(*sys.argv[1:])))
