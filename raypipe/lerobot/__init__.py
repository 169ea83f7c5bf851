"""LeRobot's policies and its trainer on raypipe's batches; lerobot is imported when something here is used.

::

    config = ACTConfig(chunk_size=50, n_action_steps=50)
    pipe = rp.lerobot.pipeline(ds, config, batch_size=8, seed=0)      the windows that the policy asks for
    meta = rp.lerobot.metadata(pipe)                                  LeRobot's own class, of any format and of mixtures
    policy = make_policy(config, ds_meta=meta)
    preprocess, _ = make_pre_post_processors(config, dataset_stats=meta.stats)
    for batch in rp.lerobot.batches(pipe.loader()):                   cameras as float in [0, 1]
        loss, _ = policy.forward(preprocess(batch))

`raypipe lerobot-train` feeds LeRobot's own training script in the same way, see `raypipe.lerobot.trainer`.
"""

from raypipe.lerobot.bridge import VERSION_TRIED, batches, delta_timestamps, metadata, pipeline

__all__ = ["VERSION_TRIED", "batches", "delta_timestamps", "metadata", "pipeline"]
