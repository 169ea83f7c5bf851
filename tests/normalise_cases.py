"""Raw values of three datasets of two robots, the schema of their mixture, and their statistics."""

import numpy as np

from raypipe.dataset import MemberMap, Schema
from raypipe.format import Feature
from raypipe.mixture import MemberStats, mixture_stats

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def describe(values, *, is_camera=False):
    """Return the statistics of raw values ``(frames, numbers)``."""
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    found |= dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True))
    if is_camera:
        found = {name: value.reshape(3, 1, 1) for name, value in found.items()}
    return found | {"count": np.array([len(values)], dtype=np.float64)}


def vector(name, shape, dtype="float32"):
    return Feature(name=name, kind="vector", dtype=dtype, shape=shape)


def raw(seed, frames, width):
    generator = np.random.default_rng(seed)
    return generator.normal(generator.normal(0, 5, width), generator.uniform(0.5, 4, width), (frames, width))


ACTIONS = {"aloha": raw(1, 40, 4), "so101": raw(2, 20, 2), "so101-kitchen": raw(3, 100, 2)}
REWARDS = {"aloha": raw(4, 40, 1), "so101": raw(5, 20, 1), "so101-kitchen": raw(6, 100, 1)}
PIXELS = {name: np.random.default_rng(seed).uniform(0, 1, (30, 3)) for seed, name in enumerate(ACTIONS)}

SCHEMA = Schema(
    features={
        "action": vector("action", (5,)),
        "reward": vector("reward", (1,)),
        "note": Feature(name="note", kind="string", dtype="string", shape=(1,)),
        "timestamp": vector("timestamp", (1,)),
        "wrist": Feature(name="wrist", kind="video", dtype="uint8", shape=(3, 8, 8)),
        "top": Feature(name="top", kind="video", dtype="uint8", shape=(3, 8, 8)),
    },
    members=(
        MemberMap(rows={"action": "act", "reward": "reward"}, cameras={"wrist": "cam_left", "top": "cam_high"}),
        MemberMap(rows={"action": "action", "reward": "reward"}, cameras={"wrist": "gripper"}),
        MemberMap(rows={"action": "action", "reward": "reward"}, cameras={"wrist": "gripper"}),
    ),
    # One number more than the widest has.
    widths={"action": (4, 2, 2)},
    windows={},
    time_axes=(),
)


def make_members(**changes):
    """Return the statistics of three datasets of two robots, in their own names; `changes` by dataset and feature."""
    own = {
        "aloha": {"act": ACTIONS["aloha"], "cam_left": PIXELS["aloha"], "cam_high": PIXELS["so101"]},
        "so101": {"action": ACTIONS["so101"], "gripper": PIXELS["so101"]},
        "so101-kitchen": {"action": ACTIONS["so101-kitchen"], "gripper": PIXELS["so101-kitchen"]},
    }
    members = []
    for name, values in own.items():
        stats = {key: describe(value, is_camera=key.startswith(("cam", "grip"))) for key, value in values.items()}
        stats |= {"reward": describe(REWARDS[name]), "timestamp": describe(np.ones((3, 1)))}
        robot = name.partition("-")[0]
        members.append(MemberStats(name=name, robot_type=robot, stats={**stats, **changes.get(name, {})}))
    return members


STATS = mixture_stats(SCHEMA, make_members())


def alone(values, name="action"):
    """Return the statistics of a dataset that stands alone, with one vector."""
    schema = Schema(
        features={name: vector(name, values.shape[1:])},
        members=(MemberMap(rows={name: name}, cameras={}),),
        widths={},
        windows={},
        time_axes=(),
    )
    return mixture_stats(schema, [MemberStats(name="alone", robot_type="arm", stats={name: describe(values)})])
