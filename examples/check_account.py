"""Check the account of a run without raypipe: every frame exactly once, equal steps on all ranks, skips listed.

    python check_account.py CHECKPOINT [DATASET] [--name train]

Reads the files that ranks wrote (pyarrow) and the lengths of the episodes; knows nothing of the order, so it cannot say
whether frames came in the planned order: ``raypipe account`` does. Exit code 0: all is accounted for. 1: it is not.
A dataset of which a part was selected, or a mixture, is checked by number: as many different frames as an epoch takes.
With weights a frame may come several times: each time is a number of its own, and comes once.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

DATASET_BITS = 40
KINDS = ("emitted", "repeated", "skipped")
START = ("epoch", "legs", "world_size", "per_lane", "attempt", "turn", "num_steps")


def read_file(path):
    """Return one rank's account as (header, parts); every part with its runs, (N, 3) start, stop and times."""
    table = pq.read_table(path)
    told = json.loads(table.schema.metadata[b"raypipe.account"])
    if told["version"] != 1:
        raise ValueError(f"{path} is of version {told['version']!r}, not 1")
    rows = table.to_pydict()
    for number, part in enumerate(told["parts"]):
        lists = {("emitted", -1): [], ("repeated", -1): []}
        lists |= {("skipped", place): [] for place in range(len(part["skipped"]))}
        part["runs"] = {key: lists[key] for key in sorted(lists, key=lambda key: (KINDS.index(key[0]), key[1]))}
        part["number"] = number
    columns = zip(*(rows[name] for name in ("part", "kind", "skip", "start", "stop", "times")), strict=True)
    for number, kind, skip, *run in columns:
        told["parts"][number]["runs"][kind, skip].append(run)
    return told["header"], told["parts"]


def digest(before, content):
    text = json.dumps([before, content], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_part(part):
    runs = [np.array(run, dtype="<i8").reshape(-1, 3) for run in part["runs"].values()]
    legs = [[leg["lanes"], leg["live_spans"], leg["frames_per_lane"]] for leg in part["legs"]]
    ranks = [[one["rank"], one["num_frames"], one["lanes"], one["digest"]] for one in part["ranks"]]
    skips = [[skip["dataset"], skip["episode"], skip["why"]] for skip in part["skipped"]]
    told = [part["epoch"], legs, part["spec"], part["selection"], part["world_size"], part["per_lane"]]
    told += [part["num_steps"], ranks, part["attempt"], part["turn"], skips, part.get("torn", [])]
    found = hashlib.blake2b(json.dumps([*told, list(map(len, runs))], sort_keys=True).encode(), digest_size=16)
    for run in runs:
        for column in run.T:
            found.update(column.tobytes())
    return found.hexdigest()


def check_chain(name, header, parts):
    """Yield where the chain of digests through a file is broken; files from before there was one have none."""
    before = digest("", [header["state"].get("fingerprint"), header["state"].get("seed"), header["name"]])
    if not header.get("head") and not any(part.get("before") for part in parts):
        return
    for part in parts:
        if part.get("before") != before:
            yield f"{name}: something before part {part['number']} was changed"
            return
        before = digest(before, digest_part(part))
    fields = [header["root"], header["selection"], header["state"], header["name"], header["members"]]
    if header.get("head") != digest(before, fields):
        yield f"{name}: the header or the last part was changed"


def check_own(name, parts):
    """Yield what a rank cannot have written: parts twice, of no epoch, of other ranks, or with other frames."""
    mine, keys = int(name.split("-")[1]), [start_of(part) for part in parts]
    for part in parts:
        where = f"{name}, part {part['number']}"
        ranks = [record["rank"] for record in part["ranks"]]
        emitted, _, *skips = (len(expand(run)) for run in part["runs"].values())
        if part["epoch"] < 0 or keys.index(keys[part["number"]]) < part["number"]:
            yield f"{where}: it is there twice, or of no epoch"
        if mine and ranks != [mine]:
            yield f"{where}: it is of ranks {ranks}"
        told = sum(record["num_frames"] for record in part["ranks"])
        lanes = sum(frames for record in part["ranks"] for _, frames in record["lanes"])
        if (told, lanes) != (emitted, emitted + sum(skips)):
            yield f"{where}: {emitted} frames and {sum(skips)} skipped, and its lanes gave {lanes}"


def start_of(part):
    return json.dumps([part[key] for key in START])


def merge(files):
    """Return the parts of all ranks, those with the same start and as many steps as one."""
    merged = {}
    for _, parts in files:
        for part in parts:
            merged.setdefault(start_of(part), []).append(part)
    found = []
    for same in merged.values():
        largest = max(same, key=lambda part: len(part["ranks"]))
        group = [largest] if len(largest["ranks"]) > 1 else same
        ranks = sorted((record for part in group for record in part["ranks"]), key=lambda record: record["rank"])
        pairs = (zip(part["skipped"], list(part["runs"].values())[2:], strict=True) for part in group)
        skips = [pair for part in pairs for pair in part]
        emitted = [run for part in group for run in part["runs"]["emitted", -1]]
        found.append({**group[0], "ranks": ranks, "skips": skips, "frames": expand(emitted)})
    return found


def expand(runs):
    values = [np.repeat(np.arange(start, stop), times) for start, stop, times in runs]
    return np.concatenate([np.empty(0, dtype=np.int64), *values])


def given(part):
    """Return how many frames every lane gave; a lane that gave none is not listed."""
    lanes = dict.fromkeys(range(part["legs"][-1]["lanes"]), 0)
    torn = {lane for lane in lanes if lane % part["world_size"] in part.get("torn", [])}
    lanes |= {lane: frames for record in part["ranks"] for lane, frames in record["lanes"]}
    return {lane: frames for lane, frames in lanes.items() if lane not in torn}


def end_of(part):
    *legs, last = part["legs"]
    legs = [*legs, {**last, "frames_per_lane": last["frames_per_lane"] + min(given(part).values())}]
    return [leg for leg in legs if leg["frames_per_lane"]]


def check_part(part, axis):
    """Yield what is wrong within a part: ranks, equal steps, and skips that are not of the episode they name."""
    where = f"epoch {part['epoch']}, part of {part['num_steps']} steps on {part['world_size']} ranks"
    ranks = sorted([record["rank"] for record in part["ranks"]] + list(part.get("torn", [])))
    lanes = given(part)
    if ranks != list(range(part["world_size"])):
        yield f"{where}: has the records of ranks {ranks}"
    if any(lane % part["world_size"] != one["rank"] for one in part["ranks"] for lane, _ in one["lanes"]):
        yield f"{where}: a rank served the lane of another"
    if max(lanes.values()) - min(lanes.values()) > 1 or max(lanes) >= part["legs"][-1]["lanes"]:
        yield f"{where}: its lanes gave unequal numbers of frames: {lanes}"
    full = -(-max(lanes.values()) // part["per_lane"])
    if not full <= part["num_steps"] <= full + 1 or (part["num_steps"] and not full):
        yield f"{where}: {max(lanes.values())} frames of every lane are not {part['num_steps']} steps"
    for skip, run in part["skips"]:
        dataset, episode = skip["dataset"], skip["episode"]
        start, length = axis[dataset].get(episode, (0, 0)) if 0 <= dataset < len(axis) else (0, 0)
        size = sum(length for _, length in axis[dataset].values()) if 0 <= dataset < len(axis) else 1
        place = (expand(run) - (dataset << DATASET_BITS)) % size - start
        if not len(place) or place.min() < 0 or place.max() >= length:
            yield f"{where}: a skip names episode {episode}, and its frames are of others"


def is_behind(part, other):
    """Return whether `other` begins at or before the start of `part`, so that all of `part` was rolled back."""
    mine, theirs = part["legs"], other["legs"]
    key = [[leg["frames_per_lane"] for leg in legs] for legs in (theirs, mine)]
    return key[0] <= key[1] and part["epoch"] == other["epoch"]


def check_links(parts, state):
    """Return the parts that count, those cut by going back, and what is wrong between them and the state."""
    kept, cut, wrong = [], [], []
    for part in parts:
        while kept and (kept[-1]["epoch"] > part["epoch"] or is_behind(kept[-1], part)):
            kept.pop()
        last = kept[-1] if kept and kept[-1]["epoch"] == part["epoch"] else None
        begins = [leg for leg in part["legs"] if leg["frames_per_lane"]]
        if last and end_of(last) != begins:
            is_inside = begins and begins[-1]["frames_per_lane"] < end_of(last)[-1]["frames_per_lane"]
            (cut if is_inside else wrong).append(last if is_inside else f"epoch {part['epoch']}: a part is missing")
        if not last and begins:
            wrong.append(f"epoch {part['epoch']}: its beginning is missing")
        if part["spec"]["seed"] != state["seed"]:
            wrong.append(f"epoch {part['epoch']}: a part has the seed {part['spec']['seed']}, not {state['seed']}")
        if last and (part["spec"] | {"live_spans": 0}) != (last["spec"] | {"live_spans": 0}):
            wrong.append(f"epoch {part['epoch']}: its parts are of different orders")
        kept.append(part)
    while kept and kept[-1]["epoch"] >= state["epoch"] and not state["legs"]:
        kept.pop()
    order = {key: value for key, value in state["order"].items() if key not in ("live_spans", "selection")}
    if state["legs"]:
        spec = {k: v for k, v in kept[-1]["spec"].items() if k not in ("live_spans", "seed")} if kept else {}
        is_same = kept and (kept[-1]["epoch"], end_of(kept[-1])) == (state["epoch"], state["legs"])
        if not is_same or spec != order or kept[-1]["selection"] != state["order"]["selection"]:
            wrong.append("the parts do not lead up to the state")
    elif kept and kept[-1]["epoch"] + 1 != state["epoch"]:
        wrong.append("the parts do not lead up to the state")
    return kept, cut, wrong


def check_epoch(epoch, parts, cut, state, axis, *, has_laps):
    """Return a line about the frames of an epoch, and what is wrong with them."""
    wrong = []
    frames = np.concatenate([np.empty(0, np.int64), *(part["frames"] for part in parts)])
    skipped = np.concatenate([np.empty(0, np.int64), *(expand(run) for part in parts for _, run in part["skips"])])
    values, times = np.unique(np.concatenate([frames, skipped]), return_counts=True)
    again = np.concatenate([np.empty(0, np.int64), *(part["frames"] for part in cut if part["epoch"] == epoch)])
    doubled = values[(times > 1) & ~np.isin(values, again)]
    sizes = [sum(length for _, length in episodes.values()) for episodes in axis]
    members = state.get("mixture", {}).get("members", [])
    foreign = [v for v in values.tolist() if not is_known(v, sizes, has_laps=has_laps)]
    selection = parts[-1]["selection"] if parts else state["order"]["selection"]
    wanted = sum(one["frames"] for one in members) if members else int(selection.split(" runs, ")[1].split()[0])
    missing = wanted - len(values)
    shares = ((part, part["legs"][-1]["lanes"] // part["world_size"] * len(part.get("torn", []))) for part in parts)
    torn = sum(max(given(part).values()) * lanes for part, lanes in shares)
    is_over, most = epoch < state["epoch"], 0
    for part in parts[-1:]:
        most = part["legs"][-1]["lanes"] * (part["per_lane"] + 1 if part["spec"]["tail"] == "drop" else 1) - 1
    if len(doubled):
        wrong.append(f"epoch {epoch}: {len(doubled)} frames came twice, first {doubled[0]}")
    if foreign:
        wrong.append(f"epoch {epoch}: {len(foreign)} frames are of no dataset, first {foreign[0]}")
    if missing < 0 or (is_over and missing > most + torn):
        wrong.append(f"epoch {epoch}: {len(values)} different frames of {wanted}")
    rest = "left over" if is_over else "to come"
    return (
        f"epoch {epoch}: {len(frames)} emitted, {len(skipped)} skipped, {missing - torn} {rest}, {torn} unrecorded",
        wrong,
    )


def is_known(number, sizes, *, has_laps):
    dataset, place = number >> DATASET_BITS, number & ((1 << DATASET_BITS) - 1)
    return dataset < len(sizes) and (has_laps or place < sizes[dataset])


def read_axis(root):
    """Return, by episode, its first frame and its length."""
    lines = Path(root) / "meta/episodes.jsonl"
    if lines.exists():
        rows = [json.loads(line) for line in lines.read_text().splitlines() if line.strip()]
        lengths = {row["episode_index"]: row["length"] for row in rows}
    else:
        tables = [
            pq.read_table(path, columns=["episode_index", "length"])
            for path in sorted(Path(root).glob("meta/episodes/*/*.parquet"))
        ]
        lengths = {e: n for t in tables for e, n in zip(*t.to_pydict().values(), strict=True)}
    starts = np.cumsum([0, *(lengths[episode] for episode in sorted(lengths))]).tolist()
    return {episode: (start, lengths[episode]) for episode, start in zip(sorted(lengths), starts, strict=False)}


def check(folder, dataset="", name="train"):
    """Return (lines, what is wrong) about the account in a checkpoint or in a folder of rank files."""
    place = next((p for p in (Path(folder) / "raypipe/account" / name, Path(folder)) if p.is_dir()), Path(folder))
    paths = sorted(place.glob("rank-*.parquet"))
    if not paths:
        return [], [f"there is no account in {folder}"]
    beside = place.parent.parent / f"{name}.json"
    try:
        files = [read_file(path) for path in paths]
        saved = dict(json.loads(beside.read_text())) if beside.exists() else {}
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return [], [f"a file of the account, or {beside}, is damaged: {error!r}"]
    wrong = [text for path, file in zip(paths, files, strict=True) for text in check_chain(path.name, *file)]
    wrong += [text for path, (_, parts) in zip(paths, files, strict=True) for text in check_own(path.name, parts)]
    header, state = files[0][0], files[0][0]["state"]
    if beside.exists() and saved != {**state, **({"account": header["head"]} if header.get("head") else {})}:
        wrong.append("the checkpoint has another state, or was saved with another account")
    if bool(header["members"]) != ("mixture" in state):
        wrong.append("the state is of a mixture and the account is not, or the other way round")
    is_one = all({**other, "head": ""} == {**header, "head": ""} for other, _ in files)
    if not is_one or header["name"] != place.name == name:
        wrong.append("the files are not of one state of one run")
    if len(paths) != int(paths[0].stem.rpartition("-")[2]):
        wrong.append(f"{len(paths)} files, and {paths[0].name} says how many there were")
    roots = [dataset] if dataset else [one["root"] for one in header["members"]] or [header["root"]]
    axis = [read_axis(root) for root in roots]
    if not all(axis):
        return [], [*wrong, f"there are no lengths of episodes in {', '.join(map(str, roots))}: give the dataset"]
    parts, cut, found = check_links(merge(files), state)
    wrong += found + [text for part in parts for text in check_part(part, axis)]
    since = state.get("mixture", {}).get("since", 0)
    # Each time that an epoch has a frame is one number: those after the first are of later laps.
    has_laps, lines = bool(header["members"]) or "weights" in header["selection"], []
    for epoch in range(since, max([state["epoch"] + bool(state["legs"]), *(part["epoch"] + 1 for part in parts)])):
        mine = [part for part in parts if part["epoch"] == epoch]
        line, found = check_epoch(epoch, mine, cut, state, axis, has_laps=has_laps)
        lines.append(line)
        wrong += found
        skips = [pair for part in mine for pair in part["skips"]]
        lines += [f"  skipped: episode {one['episode']}, {len(expand(run))} frames: {one['why']}" for one, run in skips]
    return lines, wrong


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder")
    options.add_argument("dataset", nargs="?", default="")
    options.add_argument("--name", default="train")
    told, wrong = check(**vars(options.parse_args()))
    print(*told, *(f"WRONG: {text}" for text in wrong), sep="\n")
    sys.exit(1 if wrong else 0)
