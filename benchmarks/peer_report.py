"""The figures of the peers as a table, a plot and the page BENCHMARKS.md. Measures nothing."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from string import Template
from textwrap import fill as wrap
from typing import Any

from machine import markdown_table

FLOOR = "floor: sequential decode, all cores"
RAYPIPE = "raypipe"
fill = partial(wrap, width=120, break_on_hyphens=False)
fill_item = partial(fill, initial_indent="- ", subsequent_indent="  ")
COLUMNS = (
    "loader",
    "CPU s per 1,000 samples",
    "times the floor",
    "samples/s",
    "first batch, s",
    "peak memory, MB",
    "episodes per batch",
)
EXACT_COLUMNS = ("loader", "an epoch", "stopped, then resumed", "resumed on 3 ranks after 2")

READING = Template("""\
- **Cost** is the figure to compare: CPU seconds of the whole process tree for 1,000 samples. It says how many cores
  keep a GPU fed. raypipe decodes clips, a few frames that follow each other, each once and from files that stay open; a
  loader that fetches one random frame at a time opens, seeks and decodes for each.
$mixing
- **Hugging Face datasets** knows no LeRobot videos: here they are decoded by hand, in file order, before its shuffle
  buffer. That is cheap, holds decoded samples in every worker, and shows a batch few episodes.
$memory
- **The first batch** is late in raypipe too: Ray starts, and the rows of the live window are read first. The map-style
  loaders start sooner.
- **Going on**: what comes twice in LeRobot on other ranks is padding, so that all ranks have as many batches;
  torchdata's distributed sampler skips as if the new ranks had been there from the start. Hugging Face datasets drops
  what is in its shuffle buffers, as its documentation says: 1,000 samples a worker, most of the small dataset here.

What the peers do better:

- **LeRobot map-style** gives any sample by its number, without Ray, and is what its policies, tools and examples use.
  For a dataset that one machine decodes fast enough it is the plain choice.
- **torch and torchdata** need nothing else installed, and fit any dataset with `__getitem__`.
- **MosaicML Streaming and LitData** stream from object stores once the data is converted, are made for datasets far
  larger than a disk, and start sooner with a fraction of raypipe's memory. The copy costs time and space (above), and
  its JPEG frames are not quite those of the video.
- **Hugging Face datasets** streams from the Hub without a download.
- **`ray.data.read_lerobot`** is part of Ray and joins any Ray Data pipeline: filters, maps, writes.
- raypipe needs Ray, and pays for its start in every run.
""")


def print_table(written: Mapping[str, Any]) -> None:
    for table in (speed_rows(written), exact_rows(written)):
        print("\n".join(markdown_table(table, list(table[0]) if table else [])))


def speed_rows(written: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row of figures for every peer; one that failed has the reason in place of them."""
    floor = written["peers"].get(FLOOR, {}).get("cpu_s_per_1k")
    rows = []
    for name, figures in written["peers"].items():
        cpu = figures.get("cpu_s_per_1k")
        values = [
            f"not measured: {figures['error']}" if "error" in figures else cpu or "not measured",
            round(cpu / floor, 1) if cpu and floor else None,
            *(figures.get(key) for key in ("samples_per_s", "first_batch_s", "peak_mb", "distinct_episodes")),
        ]
        rows.append(dict(zip(COLUMNS, [name, *values], strict=True)))
    return rows


def exact_rows(written: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was counted of every peer."""
    rows = []
    for name, figures in written["peers"].items():
        texts = [figures.get(key, {}).get("text") for key in ("whole", "resume", "reshape")]
        options = ", ".join(f"{key}={value}" for key, value in figures.get("count_options", {}).items())
        if any(texts):
            rows.append(dict(zip(EXACT_COLUMNS, [f"{name}, {options}" if options else name, *texts], strict=True)))
    return rows


def write_page(written: Mapping[str, Any], path: Path, plot: Path | None) -> None:
    """Write the page; the plot is linked relative to it."""
    speed = speed_rows(written)
    picture = f"![CPU, memory and mixing of all loaders]({os.path.relpath(plot, path.parent)})" if plot else ""
    parts = [
        "# Benchmarks",
        _command(written),
        _conditions(written),
        "\n".join(markdown_table(speed, COLUMNS)),
        picture,
        _exact_conditions(written),
        "\n".join(markdown_table(exact_rows(written), EXACT_COLUMNS)),
        _copies(written),
        "## How to read it",
        _ratios(speed),
        _exactness(written),
        _reading(written),
        "## Versions",
        "\n".join(_version_line(name, figures) for name, figures in written["peers"].items()),
    ]
    path.write_text("\n\n".join(part for part in parts if part) + "\n")


def _command(written: Mapping[str, Any]) -> str:
    said = fill(
        "Written by `benchmarks/peers.py`; no measured figure is typed by hand. The command makes an environment for "
        "every peer (several GB; some need a Python 3.12, see `--python312`) and measures them one after the other."
    )
    if written.get("num_runs", 1) > 1:
        said += "\n" + fill(
            f"This page is put together from {written['num_runs']} runs of parts of it (`--parts`, `--peers`, "
            f"`--report`), some of them at the same time. The load average and `--seconds` are those of the speed "
            f"figures; the frames were counted in runs of their own, with other values of both."
        )
    seconds = f"--seconds {written['conditions']['seconds']:g}"
    command = f"python benchmarks/peers.py {seconds} --plot benchmarks/plots/peers.png --write BENCHMARKS.md"
    return f"{said}\n\n```\n{command}\n```"


def _conditions(written: Mapping[str, Any]) -> str:
    machine, given = written["machine"], written["conditions"]
    loads = [f["load_average"] for f in written["peers"].values() if "load_average" in f]
    shared = fill(
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB; {machine['time'][:10]}. The "
        f"load average was {min(loads, default=0)} to {max(loads, default=0)} as the peers ended: above the number of "
        f"cores others were at work too, and samples/s and first batches are low and uneven, most of all where Ray "
        f"has a part, since its workers have a niceness of 15. CPU seconds, memory and counts are what to compare."
    )
    data = fill(
        f"Made data: {given['episodes']} episodes, {given['frames']:,} frames at 30 fps, two 320x240 cameras (h264, a "
        f"keyframe every 2 frames), state and action of 14 values. Batch {given['batch_size']}, action chunk "
        f"{given['action_frames']}, a frame of each camera as uint8, {given['workers']} worker processes a peer. "
        f"The second of two epochs; those of the peers are broken off {given['seconds']:g} s after their first batch. "
        f"The first batch counts from the start of the process, imports and Ray included."
    )
    return f"{shared}\n\n{data}"


def _exact_conditions(written: Mapping[str, Any]) -> str:
    return fill(
        f"Counted on {written['conditions']['small_frames']:,} frames of 30 episodes in batches of 16: a run stops "
        f'after 20 batches a rank, new processes load what the peer saves, and finish the epoch. "Exact" means the '
        f"batches of an uninterrupted epoch. From 2 ranks to 3, a rank that was not there takes the state of one that "
        f"was, unless one state is that of all."
    )


def _copies(written: Mapping[str, Any]) -> str:
    copies = [
        {"loader": name, "seconds": f["convert_s"], "CPU seconds": f["convert_cpu_s"], "MB on disk": f["copy_mb"]}
        for name, f in written["peers"].items()
        if "convert_s" in f
    ]
    if not copies:
        return ""
    return "\n".join(["The copies that some peers need, made before:", "", *markdown_table(copies, list(copies[0]))])


def write_plot(written: Mapping[str, Any], path: Path) -> None:
    """Draw CPU, memory and mixing of all that was measured, cheapest first."""
    from matplotlib.figure import Figure

    rows = [(n, f) for n, f in written["peers"].items() if f.get("cpu_s_per_1k")]
    rows.sort(key=lambda row: row[1]["cpu_s_per_1k"])
    names = [name for name, _ in rows]
    colours = ["#1b6e53" if n.startswith("raypipe") else "#444444" if n == FLOOR else "#c8915a" for n in names]
    figure = Figure(figsize=(13, 1.6 + 0.4 * len(rows)), layout="constrained")
    titles = {
        "cpu_s_per_1k": "CPU s per 1,000 samples (less is better)",
        "peak_mb": "peak memory, MB (less is better)",
        "distinct_episodes": "episodes in a batch (more is better)",
    }
    for axes, (key, title) in zip(figure.subplots(1, 3, sharey=True), titles.items(), strict=True):
        bars = axes.barh(names, [figures.get(key) or 0 for _, figures in rows], color=colours)
        axes.bar_label(bars, [_label(figures.get(key)) for _, figures in rows], padding=3, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.16)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    given, machine = written["conditions"], written["machine"]
    figure.suptitle(
        f"{given['frames']:,} frames of {given['episodes']} episodes, two 320x240 cameras, batch "
        f"{given['batch_size']}; {machine['processor']}, {machine['cores']} cores",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _label(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratios(rows: list[dict[str, Any]]) -> str:
    """Return a sentence with what this run measured: how many times the CPU of raypipe each peer takes."""
    cost = {row["loader"]: row[COLUMNS[1]] for row in rows if isinstance(row[COLUMNS[1]], float)}
    own = cost.get(RAYPIPE)
    if not own:
        return ""
    others = {n: c for n, c in cost.items() if not n.startswith(("raypipe", "floor"))}
    parts = [f"{name} {value / own:.1f}" for name, value in sorted(others.items(), key=lambda item: item[1])]
    return fill(f"Times the CPU of {RAYPIPE}, in this run: {', '.join(parts)}.")


def _exactness(written: Mapping[str, Any]) -> str:
    """Return who goes on exactly, by what was counted."""
    peers = written["peers"]
    same = [name for name, figures in peers.items() if figures.get("resume", {}).get("is_same")]
    reshaped = [name for name, figures in peers.items() if figures.get("reshape", {}).get("text") == "exactly once"]
    return fill(
        f"With the batches of an uninterrupted epoch go on, on the same ranks: {', '.join(same) or 'none'}. From 2 "
        f"ranks to 3, every frame exactly once: {', '.join(reshaped) or 'none'}."
    )


def _reading(written: Mapping[str, Any]) -> str:
    """Return what the figures mean; raypipe's settings are named as far as the run wrote them down."""
    settings = written["peers"].get(RAYPIPE, {}).get("settings", {})
    window = _window(settings)
    mixing = fill_item(
        f"**Mixing**: a full shuffle (LeRobot map-style, torch, torchdata) is the mark. raypipe's live window"
        f"{f', here of {window},' if window else ''} comes to as many episodes in a batch; batches that follow each "
        f"other share more episodes than under a full shuffle (`raypipe plan` prints it)."
    )
    here = f", here {settings['live_bytes'] / 1e9:g} GB" if settings.get("live_bytes") else ""
    memory = fill_item(
        f"**Memory** is what raypipe pays: it holds the rows of live spans, clips that have begun, and clips decoded "
        f"ahead for the next batches, the frames as far as `live_bytes` allows{here}. It is set above its default "
        f"here (`RAYPIPE_MEMORY` in `benchmarks/peers.py`): with less, clips are decoded fewer batches ahead, and "
        f"where that is not enough they are shorter, or fewer spans are live."
    )
    return READING.substitute(mixing=mixing, memory=memory).rstrip()


def _window(settings: Mapping[str, Any]) -> str:
    """Return the live window of a pipeline in words; empty where it is not known."""
    if not {"live_spans", "span_frames"} <= set(settings):
        return ""
    live_spans, span_frames = settings["live_spans"], settings["span_frames"]
    return (
        f"{live_spans} whole episodes"
        if span_frames == "episode"
        else f"{live_spans} spans of up to {span_frames} frames"
    )


def _version_line(name: str, figures: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in figures.get("versions", {}).items())
    return f"- {name}: {versions or figures.get('error', 'unknown')}"
