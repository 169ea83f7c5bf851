"""What `test_torchrun` lets torchrun start: takes some batches, and rank 0 writes where the data stands."""

import os
import sys
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from committed import Journal

import raypipe as rp


def open_pipe(root, **decode):
    return rp.Pipeline(rp.open_dataset(str(root)), batch_size=6, seed=3, order={"live_spans": 3}, decode=decode)


def main(root, folder, stop_after, transport):
    dist.init_process_group("gloo")
    # That of rank 0 counts.
    pipe = open_pipe(root, **({"num_threads": 7} if dist.get_rank() else {}))
    loader = rp.train.share_loader(pipe, transport=transport)
    # All processes are on this machine, and share its CPUs.
    assert loader._spec.num_threads == max(1, len(os.sched_getaffinity(0)) // dist.get_world_size())
    number = len(list(folder.glob("state-*")))
    dist.barrier()
    if number:
        loader.load_state_dict(rp.train.read_state(folder / f"state-{number - 1}"))
    journal = Journal(folder, dist.get_rank(), dist.get_world_size(), loader)
    for batch in islice(loader, stop_after):
        journal.add(batch, loader)
    if dist.get_rank() == 0:
        rp.train.write_states(folder / f"state-{number}", loader)
    loader.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
