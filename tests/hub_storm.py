"""Four ranks on Ray read a dataset of the Hub, each in a process of its own; prints their frames. ``LIMIT PERIOD_S``"""

import json
import sys

import ray
from batches import frames_of_all

import raypipe as rp
from raypipe.storage import request_budget as requests
from raypipe.storage.request_budget import Budget


@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, loader) -> None:
        self.loader = loader

    def read(self):
        return frames_of_all(self.loader)


def run(limit: int, period_s: float) -> list:
    # The one that all processes find: smaller than the Hub's.
    named = {"name": requests._NAME, "namespace": requests._NAMESPACE, "num_cpus": 0, "max_concurrency": 8}
    actor = ray.remote(Budget).options(**named).remote(limit, period_s)
    ray.get(actor.take.remote())
    cache = {"whole_bytes": 0}
    pipe = rp.Pipeline(rp.open_dataset("lab/arm"), batch_size=2, seed=1, order={"live_spans": 2}, cache=cache)
    ranks = [Rank.remote(loader) for loader in pipe.loaders(4)]
    return ray.get([rank.read.remote() for rank in ranks])


if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    print(json.dumps(run(int(sys.argv[1]), float(sys.argv[2]))))
