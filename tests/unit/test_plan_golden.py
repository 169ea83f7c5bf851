"""Frozen orders: a change that moves a frame for the same seed must raise ORDER_VERSION and write a new file.

``python tests/unit/test_plan_golden.py`` writes the files of the current version that are not there yet.
"""

import json
from pathlib import Path

import pytest
from plan_cases import make_index, plan_resumed, plan_start

from raypipe.plan import ORDER_VERSION, OrderSpec, concat_indexes, mix_indexes, state_after

FOLDER = Path(__file__).parent.parent / "golden"

CASES = {
    "defaults": OrderSpec(seed=0),
    "narrow window, cut spans": OrderSpec(seed=1, live_spans=3, span_frames=4),
    "drop": OrderSpec(seed=2, live_spans=2, tail="drop"),
    "wrap": OrderSpec(seed=2**64 - 1, live_spans=4, tail="wrap"),
    "file order": OrderSpec(seed=0, shuffle=False),
}


MIXED = {
    "shares": OrderSpec(seed=0),
    "shares, cut spans": OrderSpec(seed=3, live_spans=3, span_frames=4),
    "shares, file order": OrderSpec(seed=0, shuffle=False),
}
CLIPS = {
    "clips": OrderSpec(seed=0, clip_frames=2),
    "clips, cut spans": OrderSpec(seed=1, live_spans=3, span_frames=4, clip_frames=3),
    "clips, wrap": OrderSpec(seed=2**64 - 1, live_spans=4, tail="wrap", clip_frames=5),
    "clips, shares": OrderSpec(seed=3, live_spans=3, clip_frames=(2, 4)),
}
WEIGHTED = {
    "weights": OrderSpec(seed=0, clip_frames=2),
    "weights, cut spans": OrderSpec(seed=1, live_spans=3, span_frames=4, tail="wrap"),
    "weights, file order": OrderSpec(seed=0, shuffle=False),
    "weights, shares": OrderSpec(seed=3, live_spans=3, clip_frames=(2, 4)),
}
GOLDEN = {
    FOLDER / f"order_{ORDER_VERSION}.json": CASES,
    FOLDER / f"mixture_order_{ORDER_VERSION}.json": MIXED,
    FOLDER / f"clip_order_{ORDER_VERSION}.json": CLIPS,
    FOLDER / f"weight_order_{ORDER_VERSION}.json": WEIGHTED,
}


def emitted(world):
    """Return [dataset, episode, frame] of every frame, by rank and step."""
    return [
        [
            [list(map(int, frame)) for frame in zip(found.dataset, found.episode, found.frame, strict=True)]
            for found in (world.frames_at(step, rank) for step in range(world.num_steps))
        ]
        for rank in range(world.world_size)
    ]


def make_orders(name):
    """Return the order of a start on 2 ranks, and of its rest on 3 from the second step on."""
    members = [make_index([7, 1, 12, 5], name="a"), make_index([6, 9], name="b")]
    if "weights" in name:
        # Of episodes, and of every frame of which an epoch takes about every other one.
        by_frame = [number % 4 / 3 for number in range(15)]
        members = [
            make_index([7, 1, 12, 5], name="a", weights=[1, 0, 2.5, 0.5]),
            make_index([6, 9], name="b", weights=by_frame, every=2),
        ]
    # Of 25 and 15 frames an epoch takes four fifths of a lap, and one and a third.
    index = mix_indexes(members, [20, 20]) if "shares" in name else concat_indexes(members)
    spec = {**CASES, **MIXED, **CLIPS, **WEIGHTED}[name]
    world = plan_start(index, spec, world_size=2, per_lane=4, epoch=3)
    rest = plan_resumed(state_after(world, 2), index, spec, world_size=3, per_lane=2)
    return {
        "start": emitted(world),
        "rest": emitted(rest),
        "fingerprints": [world.plan.fingerprint, rest.plan.fingerprint],
    }


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, cases in GOLDEN.items() for name in cases])
def test_order_is_the_one_of_its_version(path, name):
    golden = json.loads(path.read_text())

    assert make_orders(name) == golden[name], "the order moved: raise ORDER_VERSION, and say so under 'Data order'"


if __name__ == "__main__":
    for path, cases in GOLDEN.items():
        if path.exists():
            print(f"{path} is frozen: raise ORDER_VERSION first")
            continue
        orders = [f"{json.dumps(name)}: {json.dumps(make_orders(name))}" for name in cases]
        path.write_text("{\n" + ",\n".join(orders) + "\n}\n")
