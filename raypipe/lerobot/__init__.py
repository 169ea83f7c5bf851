"""Feeds LeRobot's policies and its trainer with raypipe's batches; the first use imports lerobot.

::

    config = ACTConfig(chunk_size=50, n_action_steps=50)
    pipe = rp.lerobot.pipeline(ds, config, batch_size=8, seed=0)      the windows that the policy asks for
    meta = rp.lerobot.metadata(pipe)                                  LeRobot's own class, of any format and of mixtures
    policy = make_policy(config, ds_meta=meta)
    preprocess, _ = make_pre_post_processors(config, dataset_stats=meta.stats)
    for batch in rp.lerobot.batches(pipe.loader()):                   cameras as float in [0, 1]
        loss, _ = policy.forward(preprocess(batch))

``bridge.py`` does this. ``trainer.py`` is `raypipe lerobot-train`, which feeds LeRobot's own training script the same
way.
"""

from typing import TYPE_CHECKING

from raypipe import lazy_names

if TYPE_CHECKING:
    from raypipe.lerobot.bridge import VERSION_TRIED, batches, delta_timestamps, metadata, pipeline
    from raypipe.lerobot.trainer import run_lerobot_train as run_lerobot_train
else:
    _, __getattr__ = lazy_names(__name__)

__all__ = [
    "VERSION_TRIED",
    "batches",
    "delta_timestamps",
    "metadata",
    "pipeline",
]
