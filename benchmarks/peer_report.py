"""The figures of the peers as tables, a plot and the page BENCHMARKS.md. Measures nothing."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from string import Template
from textwrap import fill as wrap
from typing import Any

from machine import markdown_table
from peer_figures import KINDS, find_runs

FLOOR = "floor: sequential decode, all cores"
RAYPIPE, KEPT, TASKS = "raypipe", "raypipe, keep_frames", "raypipe, Ray tasks"
FULL_SHUFFLE = "LeRobot map-style"
GPU_SAMPLES_PER_S = 1200
fill = partial(wrap, width=120, break_on_hyphens=False)
fill_item = partial(fill, initial_indent="- ", subsequent_indent="  ")
COST = "CPU s per 1,000 samples"
COLUMNS = (
    "loader",
    COST,
    "times the floor",
    f"cores for a GPU that eats {GPU_SAMPLES_PER_S:,} samples/s",
    "samples/s",
    "first batch, s",
    "peak memory, MB",
    "episodes per batch",
)
EXACT_COLUMNS = ("loader", "an epoch", "stopped, then resumed", "resumed on 3 ranks after 2")
CODECS = {"av1": "AV1", "h264": "H.264"}
NOTES = {
    "av1-640": "LeRobot records two cameras this way by default. The pictures are made, and cost about as much to "
    "decode as those of real cameras (`_camera_spec` in `benchmarks/made.py`).",
    "h264": "Small frames decode fast, so what a loader does beside decoding weighs more.",
}

READING = Template("""\
- **Cost** is the figure to compare: CPU seconds of the whole process tree for 1,000 samples. It says how many cores
  keep a GPU fed. raypipe decodes clips, a few frames that follow each other, each once and from files that stay open. A
  loader that fetches one random frame at a time seeks for each, and decodes from the keyframe before it.
- **raypipe as it comes** gets a batch size, a seed and the action chunk, and no other setting. On one machine it reads
  and decodes in threads of the training process and starts no Ray. With `keep_frames` the first epoch writes its
  decoded frames to disk, and the second, which is measured, copies them. With Ray tasks (`decode={"where": "cluster"}`)
  Ray reads the rows and decodes; that is for clusters with nodes to spare, and one machine only pays for Ray.
$mixing
- **Hugging Face datasets** knows no LeRobot videos: here they are decoded by hand, in file order, before its shuffle
  buffer. That is cheap, holds decoded samples in every worker, and shows a batch few episodes.
$memory
- **The first batch** counts from the start of the process. raypipe imports torch, reads the metadata, and then waits
  for the rows and clips of that batch alone. With Ray tasks it waits for Ray to start, too.
- **Going on**: LeRobot pads other ranks to the same number of batches, so some samples come twice. torchdata's
  distributed sampler skips as if the new ranks had been there from the start. Hugging Face datasets drops what is in
  its shuffle buffers, as its documentation says: 1,000 samples a worker, most of the small dataset here.

What the peers do better:

- **LeRobot map-style** gives any sample by its number, shuffles over the whole dataset, and is what LeRobot's policies,
  tools and training script use. Where one machine decodes fast enough, take it.
- **torch's DataLoader** needs nothing but torch, and fits any dataset with `__getitem__`; so does **torchdata**, which
  adds a state. Both read raypipe's own dataset here, sample by sample.
- **MosaicML Streaming and LitData** stream from object stores once the data is converted, are made for datasets far
  larger than a disk, and hold no decoded frames but those of the next batches, so they need less memory. The copy costs
  time and space (above), and its JPEG frames are not quite those of the video.
- **Hugging Face datasets** streams from the Hub without a download.
- **`ray.data.read_lerobot`** is part of Ray and joins any Ray Data pipeline: filters, maps, writes.
- raypipe's shuffle is not a full one: the frames of a clip look alike and leave within some batches of each other.
  `raypipe plan` prints how many.
""")


def print_table(written: Mapping[str, Any]) -> None:
    tables = [speed_rows(data["speed"]) for data in written["data"].values()]
    for table in (*tables, exact_rows(written["counts"])):
        print("\n".join(markdown_table(table, list(table[0]) if table else [])) + "\n")


def speed_rows(speed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row of figures for every peer on one dataset; one that failed has the reason in place of them."""
    floor = speed.get(FLOOR, {}).get("cpu_s_per_1k")
    rows = []
    for name, figures in speed.items():
        cpu = figures.get("cpu_s_per_1k")
        values = [
            cpu or f"not measured: {figures['error']}",
            round(cpu / floor, 1) if cpu and floor else None,
            round(cpu * GPU_SAMPLES_PER_S / 1000, 1) if cpu else None,
            *(figures.get(key) for key in ("samples_per_s", "first_batch_s", "peak_mb", "distinct_episodes")),
        ]
        rows.append(dict(zip(COLUMNS, [name, *values], strict=True)))
    return rows


def exact_rows(counts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was counted of every peer."""
    rows = []
    for name, figures in counts.items():
        texts = [figures.get(key, {}).get("text") for key in ("whole", "resume", "reshape")]
        options = ", ".join(f"{key}={value}" for key, value in figures.get("count_options", {}).items())
        rows.append(dict(zip(EXACT_COLUMNS, [f"{name}, {options}" if options else name, *texts], strict=True)))
    return rows


def write_page(written: Mapping[str, Any], path: Path, plot: Path | None) -> None:
    """Write the page; the plot is linked relative to it."""
    counts = exact_rows(written["counts"])
    parts = [
        "# Benchmarks",
        _command(written),
        _conditions(written),
        *(_data_section(kind, data) for kind, data in written["data"].items()),
        f"![CPU, memory and mixing of all loaders]({os.path.relpath(plot, path.parent)})" if plot else "",
        *(["## Stopped and resumed", _exact_conditions(written)] if counts else []),
        "\n".join(markdown_table(counts, EXACT_COLUMNS)) if counts else "",
        "## How to read it",
        *(_ratios(data) for data in written["data"].values()),
        _exactness(written["counts"]) if counts else "",
        _reading(written),
        "## Versions",
        "\n".join(_version_line(name, versions) for name, versions in written["versions"].items()),
    ]
    path.write_text("\n\n".join(part for part in parts if part) + "\n")


def _command(written: Mapping[str, Any]) -> str:
    said = fill(
        "Written by `benchmarks/peers.py`; no measured figure is typed by hand. The command makes an environment for "
        "every peer (several GB; some need a Python 3.12, see `--python312`) and measures them one after the other."
    )
    runs = find_runs(written)
    if len(runs) > 1:
        said += "\n" + fill(
            f"This page joins {len(runs)} runs, each of some loaders, datasets or parts (`--peers`, `--data`, "
            f"`--parts`)."
        )
    kinds = "" if set(written["data"]) == set(KINDS) else f" --data {' '.join(written['data'])}"
    options = f"--seconds {written['conditions']['seconds']:g}{kinds} --plot benchmarks/plots/peers.png"
    return f"{said}\n\n```\npython benchmarks/peers.py {options} --write BENCHMARKS.md\n```"


def _conditions(written: Mapping[str, Any]) -> str:
    machine, given = written["machine"], written["conditions"]
    speeds = [figures for data in written["data"].values() for figures in data["speed"].values()]
    loads = [figures["load_average"] for figures in speeds if "load_average" in figures]
    runs = find_runs(written)
    days = " to ".join(dict.fromkeys(run[:10] for run in (runs[0], runs[-1])))
    shared = fill(
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB; {days}. The load average was "
        f"{min(loads, default=0)} to {max(loads, default=0)} as the peers ended. Above the number of cores, others "
        f"were at work too: then samples/s and first batches are low and uneven, most of all where Ray has a part, "
        f"since its workers have a niceness of 15. Compare CPU seconds, memory and counts."
    )
    data = fill(
        f"Batch {given['batch_size']}, action chunk {given['action_frames']}, a frame of each camera as uint8, "
        f"{given['workers']} worker processes a peer. The figures are of the second of two epochs. raypipe's epochs "
        f"are whole; those of the peers are broken off {given['seconds']:g} s after their first batch. The first "
        f"batch counts from the start of the process, imports included."
    )
    return f"{shared}\n\n{data}"


def _data_section(kind: str, data: Mapping[str, Any]) -> str:
    """Return the part of the page about one dataset."""
    described = fill(
        f"{data['episodes']} made episodes of {data['shortest']} to {data['longest']} frames, {data['frames']:,} in "
        f"all, at {data['fps']} fps; {data['cameras']} cameras of {data['size']} ({CODECS[data['codec']]}, a keyframe "
        f"every {data['gop']} frames), state and action of {data['values']} values. {NOTES[kind]}"
    )
    parts = [f"## {_title(data)}", described, "\n".join(markdown_table(speed_rows(data["speed"]), COLUMNS))]
    return "\n\n".join(part for part in (*parts, _chosen(data["speed"]), _copies(data["speed"])) if part)


def _title(data: Mapping[str, Any]) -> str:
    return f"{data['size']} {CODECS[data['codec']]}"


def _chosen(speed: Mapping[str, Any]) -> str:
    """Return what raypipe chose by itself, and what it kept, as far as the run wrote it down."""
    settings = speed.get(RAYPIPE, {}).get("settings")
    sentences = []
    if settings:
        span = settings["span_frames"]
        spans = "whole episodes" if span == "episode" else f"spans of up to {span} frames"
        sentences.append(
            f"raypipe chose clips of {settings['clip_frames']} frames and up to {settings['live_spans']} live spans "
            f"({spans}), with {settings['live_bytes'] / 1e9:.2f} GB for decoded frames."
        )
    kept = speed.get(KEPT, {})
    if "kept_mb" in kept:
        decoded, copied = (kept["settings"][name] for name in ("decoded_frames", "kept_frames"))
        sentences.append(
            f"Kept frames took {kept['kept_mb'] / 1000:.1f} GB of disk; the second epoch copied "
            f"{copied / max(1, decoded + copied):.0%} of its frames from there."
        )
    return fill(" ".join(sentences)) if sentences else ""


def _copies(speed: Mapping[str, Any]) -> str:
    copies = [
        {"loader": name, "seconds": f["convert_s"], "CPU seconds": f["convert_cpu_s"], "MB on disk": f["copy_mb"]}
        for name, f in speed.items()
        if "convert_s" in f
    ]
    if not copies:
        return ""
    return "\n".join(["The copies that some peers need, made before:", "", *markdown_table(copies, list(copies[0]))])


def _exact_conditions(written: Mapping[str, Any]) -> str:
    return fill(
        f"Counted on {written['conditions']['small_frames']:,} frames of 30 episodes in batches of 16: a run stops "
        f'after 20 batches a rank, new processes load what the peer saves, and finish the epoch. "Exact" means the '
        f"batches of an uninterrupted epoch. From 2 ranks to 3, a rank that was not there takes the state of one that "
        f"was, unless one state is that of all. raypipe's ranks are threads of one process here."
    )


def write_plot(written: Mapping[str, Any], path: Path) -> None:
    """Draw CPU, memory and mixing of all that was measured: a row of panels for each dataset, cheapest loader first."""
    from matplotlib.figure import Figure

    heights = [1.2 + 0.32 * len(data["speed"]) for data in written["data"].values()]
    figure = Figure(figsize=(14, sum(heights)), layout="constrained")
    rows = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, data in zip(rows, written["data"].values(), strict=True):
        _draw_row(row, data, written)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw_row(row: Any, data: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    measured = [(name, figures) for name, figures in data["speed"].items() if figures.get("cpu_s_per_1k")]
    measured.sort(key=lambda each: each[1]["cpu_s_per_1k"])
    names = [name for name, _ in measured]
    colours = ["#1b6e53" if n.startswith("raypipe") else "#444444" if n == FLOOR else "#c8915a" for n in names]
    titles = {
        "cpu_s_per_1k": "CPU s per 1,000 samples (less is better)",
        "peak_mb": "peak memory, MB (less is better)",
        "distinct_episodes": "episodes in a batch (more is better)",
    }
    for axes, (key, title) in zip(row.subplots(1, 3, sharey=True), titles.items(), strict=True):
        bars = axes.barh(names, [figures.get(key) or 0 for _, figures in measured], color=colours)
        axes.bar_label(bars, [_label(figures.get(key)) for _, figures in measured], padding=3, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.16)
        # Ticks of five digits would run into each other.
        axes.locator_params(axis="x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
    row.axes[0].invert_yaxis()
    machine = written["machine"]
    row.suptitle(
        f"{data['cameras']} cameras of {_title(data)}, {data['frames']:,} frames of {data['episodes']} episodes, batch "
        f"{written['conditions']['batch_size']}; {machine['processor']}, {machine['cores']} cores",
        fontsize=11,
        fontweight="bold",
    )


def _label(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratios(data: Mapping[str, Any]) -> str:
    """Return a sentence with what was measured on one dataset: how many times the CPU of raypipe each peer takes."""
    cost = {name: figures["cpu_s_per_1k"] for name, figures in data["speed"].items() if "cpu_s_per_1k" in figures}
    others = {name: cpu for name, cpu in cost.items() if not name.startswith(("raypipe", "floor"))}
    if RAYPIPE not in cost or not others:
        return ""
    parts = [f"{name} {cpu / cost[RAYPIPE]:.1f}" for name, cpu in sorted(others.items(), key=lambda item: item[1])]
    return fill(f"Times the CPU of raypipe, {_title(data)}: {', '.join(parts)}.{_sooner(data)}")


def _sooner(data: Mapping[str, Any]) -> str:
    """Return a sentence with the peers that give their first batch before raypipe; empty where there are none."""
    first = {name: figures["first_batch_s"] for name, figures in data["speed"].items() if figures.get("first_batch_s")}
    sooner = [
        f"{name} {first[name]:.1f}"
        for name in sorted(first, key=first.__getitem__)
        if RAYPIPE in first and not name.startswith("raypipe") and first[name] < first[RAYPIPE]
    ]
    return f" Sooner at their first batch than raypipe ({first[RAYPIPE]:.1f} s): {', '.join(sooner)}." if sooner else ""


def _exactness(counts: Mapping[str, Any]) -> str:
    """Return who goes on exactly, by what was counted."""
    same = [name for name, figures in counts.items() if figures.get("resume", {}).get("is_same")]
    reshaped = [name for name, figures in counts.items() if figures.get("reshape", {}).get("text") == "exactly once"]
    return fill(
        f"These go on with the batches of an uninterrupted epoch, on the same ranks: {_list(same)}. These give every "
        f"frame exactly once from 2 ranks to 3: {_list(reshaped)}."
    )


def _list(names: list[str]) -> str:
    # Some names have commas.
    return "; ".join(names) or "none"


def _reading(written: Mapping[str, Any]) -> str:
    """Return what the figures mean."""
    mixed = [_mixing(data) for data in written["data"].values()]
    mixing = fill_item(
        f"**Mixing**: a full shuffle (LeRobot map-style, torch, torchdata) is the mark. "
        f"{'. '.join(text for text in mixed if text)}{'. ' if any(mixed) else ''}Where a dataset has more episodes "
        f"than live spans, batches that follow each other share more of them in raypipe than under a full shuffle."
    )
    settings = [data["speed"].get(RAYPIPE, {}).get("settings") for data in written["data"].values()]
    sizes = {f"{each['live_bytes'] / 1e9:.2f} GB" for each in settings if each}
    memory = fill_item(
        f"**Memory**: raypipe holds clips that have begun and clips decoded ahead for the next batches, up to "
        f"`live_bytes`{f', here its default of {sizes.pop()}' if len(sizes) == 1 else ''}. Rows, batches that are "
        f"ready and the libraries come on top. A smaller `live_bytes` gives shorter clips or fewer live spans. The "
        f"page cache, which holds kept frames too, is not counted for any loader."
    )
    return READING.substitute(mixing=mixing, memory=memory).rstrip()


def _mixing(data: Mapping[str, Any]) -> str:
    """Return how many episodes a batch of raypipe shows beside a full shuffle; empty where one was not measured."""
    own, full = (data["speed"].get(name, {}).get("distinct_episodes") for name in (RAYPIPE, FULL_SHUFFLE))
    if not own or not full:
        return ""
    return f"{_title(data)}: a batch of raypipe shows {own:g} of the {data['episodes']} episodes, of LeRobot {full:g}"


def _version_line(name: str, versions: Mapping[str, str]) -> str:
    return f"- {name}: {', '.join(f'{package} {number}' for package, number in versions.items())}"
