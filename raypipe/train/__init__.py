"""Give each training worker its loader, and save the position in the data inside the checkpoint.

::

    trainer = TorchTrainer(train_loop, ..., **rp.train.ingest(train=pipe, val=val_pipe))

    def train_loop(config):
        loader = rp.train.get_loader("train")             this rank's; resumes from the checkpoint
        for batch in loader: ...
        rp.train.report(metrics, checkpoint_dir, loader)  ray.train.report with the data's state inside

Every start of the worker group creates new feeders and loaders: the first start, a restart after a failure, and a start
with another number of workers. Only the checkpoint says where they resume. Without Ray Train, call `share_loader` in
each process that ``torchrun`` or Accelerate starts.

The modules, from the top down (each may use those below it)::

    workers.py    ingest, get_loader, report           workers of Ray Train; imports Ray when one of its names is used
    processes.py  share_loader, write_states, restore  processes of torchrun or Accelerate, and the data's position
                                                       and account in a checkpoint folder of any trainer; no Ray
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.train.processes import (
        STATE_FOLDER,
        loader_metrics,
        read_state,
        restore,
        share_loader,
        write_states,
    )
    from raypipe.train.workers import PipelineDataConfig, get_loader, ingest, read_checkpoint, report
else:
    _, __getattr__ = lazy_names(__name__)

__all__ = [
    "STATE_FOLDER",
    "PipelineDataConfig",
    "get_loader",
    "ingest",
    "loader_metrics",
    "read_checkpoint",
    "read_state",
    "report",
    "restore",
    "share_loader",
    "write_states",
]
