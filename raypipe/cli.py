"""The command line: parse, call one function, print. No logic of its own.

An error of raypipe prints as one paragraph and exits with code 2; an unexpected one asks for a report and exits with
code 3. ``--debug`` shows the traceback.
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from raypipe import __version__
from raypipe.errors import ConfigError
from raypipe.storage import check_writable, write_whole
from raypipe.text import counted, echo, print_table, run_to_an_end

app = typer.Typer(
    name="raypipe",
    help="Feeds robot-policy training on a Ray cluster from LeRobot datasets.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT",
        help="A LeRobot dataset (a local path or an fsspec URI), or a mixture file (.yaml, .yml, .toml).",
    ),
]
DatasetRoot = Annotated[str, typer.Argument(metavar="ROOT", help="A LeRobot dataset: a local path or an fsspec URI.")]
# As `Pipeline` chooses them, where they are not given.
LiveSpansOption = Annotated[
    int | None, typer.Option(help="Spans that are live at once in a lane.  [default: by --live-bytes]")
]
SpanFrames = Annotated[str, typer.Option(help="Longest span in frames, or 'episode'.  [default: by --live-bytes]")]
ClipFrames = Annotated[str, typer.Option(help="Frames of a clip, or 'span'.  [default: by the keyframes]")]
LiveBytes = Annotated[str, typer.Option(metavar="SIZE", help="Memory of a rank for decoded frames, as 2GB.")]
Lanes = Annotated[str, typer.Option(help="Lanes that the ranks share, or 'world_size'.")]
OrderSeed = Annotated[int, typer.Option(help="Decides the order.")]
BatchSize = Annotated[int, typer.Option(help="Frames of a batch on each rank.")]
WorldSize = Annotated[int, typer.Option(help="Ranks.")]
TaskPlace = Annotated[str, typer.Option(help="process, ray, or auto: Ray unless the dataset is small.")]


def _checked_file(path: Path | None) -> Path | None:
    # Before the command runs, which may take minutes.
    if path is not None:
        check_writable(path)
    return path


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json-file", metavar="FILE", callback=_checked_file, help="Also write the JSON to this file."),
]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
) -> None:
    if version:
        echo(f"raypipe {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def info(root: Root, as_json: AsJson = False, json_file: JsonFile = None) -> None:
    """Tell what a dataset or a mixture holds, and what it lacks; exits with 2 where files are missing."""
    from raypipe.mixture import is_mixture_file
    from raypipe.views import describe, describe_mixture, info_table, lacking_error, mixture_table

    is_mixture = is_mixture_file(root)
    described: Any = describe_mixture(root) if is_mixture else describe(root)
    table: Any = mixture_table if is_mixture else info_table
    _tell(described.to_json(), as_json, json_file, lambda: table(described))
    if not is_mixture and described.missing_files:
        raise lacking_error(described)


@app.command()
def stats(
    root: Root,
    actions: Annotated[str, typer.Option(help="Of actions that are 'relative' or 'delta', computed and kept.")] = "",
    to: Annotated[str, typer.Option(help="What actions are relative to.")] = "observation.state",
    absolute: Annotated[list[str] | None, typer.Option(help="A number that stays as it is; may be repeated.")] = None,
    wrap: Annotated[list[str] | None, typer.Option(help="An angle, as wrist_roll=360; may be repeated.")] = None,
    match: Annotated[list[str] | None, typer.Option(help="What a number is relative to, as x=pose_x.")] = None,
    frames: Annotated[int, typer.Option(help="Length of the window of actions, from the sample's frame on.")] = 0,
    as_json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """Tell the statistics that a normaliser takes, also of relative actions; the JSON is for rp.MixtureStats.load."""
    from raypipe.views import parse_actions, report_stats, stats_tables

    numbers = {"absolute": absolute, "wrap": wrap, "match": match}
    spec, length = parse_actions(actions, to=to, numbers=numbers, frames=frames)
    report = report_stats(root, spec, length)
    _tell(json.loads(report.stats.to_json()), as_json, json_file, lambda: stats_tables(report))


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist or be empty.")],
    version: Annotated[str, typer.Option(help="Format version: v3.0, v2.1 or v2.0.")] = "v3.0",
    episodes: Annotated[int, typer.Option(help="Number of episodes.")] = 10,
    frames: Annotated[int, typer.Option(help="Mean frames per episode; lengths vary by a third.")] = 60,
    cameras: Annotated[int, typer.Option(help="Number of cameras.")] = 2,
    size: Annotated[str, typer.Option(help="Size of a camera, as WIDTHxHEIGHT.")] = "96x96",
    fps: Annotated[int, typer.Option(help="Frames per second.")] = 10,
    robot: Annotated[str, typer.Option(help="Name of the robot.")] = "raypipe_synth",
    state_dim: Annotated[int, typer.Option(help="Numbers of the state.")] = 6,
    action_dim: Annotated[int, typer.Option(help="Numbers of an action.")] = 6,
    codec: Annotated[str, typer.Option(help="h264, hevc, av1 or vp9, as FFmpeg here can encode.")] = "h264",
    gop: Annotated[int, typer.Option(help="A keyframe every so many frames.")] = 2,
    seed: Annotated[int, typer.Option(help="Decides the lengths.")] = 0,
) -> None:
    """Write a small real dataset whose pixels say which frame they are."""
    from raypipe.testing import SynthSpec, numbered_cameras, varied_lengths, write_dataset

    spec = SynthSpec(
        version=version,  # type: ignore[arg-type]
        lengths=varied_lengths(episodes, frames, seed),
        fps=fps,
        robot_type=robot,
        state_dim=state_dim,
        action_dim=action_dim,
        cameras=numbered_cameras(cameras, size, codec, gop),
        seed=seed,
    )
    write_dataset(out, spec, progress=True)
    echo(
        f"wrote {counted(len(spec.lengths), 'episode')}, {counted(sum(spec.lengths), 'frame')} to {out}; see: raypipe "
        f"info {out}"
    )


@app.command()
def plan(
    root: Root,
    world_size: WorldSize,
    batch_size: BatchSize,
    live_spans: LiveSpansOption = None,
    span_frames: SpanFrames = "",
    clip_frames: ClipFrames = "",
    live_bytes: LiveBytes = "1GiB",
    seed: OrderSeed = 0,
    epoch: Annotated[int, typer.Option(help="Counted from 0.")] = 0,
    lanes: Lanes = "world_size",
    selection: Annotated[
        str, typer.Option(help='Frames and weights, as a pipeline takes them: \'{"every": 3, "weights": "quality"}\'.')
    ] = "{}",
    plot: Annotated[Path | None, typer.Option(help="Also draw the plan of rank 0 to this PNG file.")] = None,
    as_json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """Tell what an epoch costs and how well it mixes, before it runs."""
    from raypipe.plan import BatchSpec, parse_order
    from raypipe.views import check_picture, plan_table, plot_plan, view_plan

    if plot:
        check_picture(plot)
    order = parse_order(seed=seed, live_spans=live_spans, span_frames=span_frames, lanes=lanes, clip_frames=clip_frames)
    batch = BatchSpec(size=batch_size)
    chosen = _parse_selection(selection)
    view = view_plan(root, order, batch, world_size=world_size, epoch=epoch, live_bytes=live_bytes, selection=chosen)
    _tell(view.report.to_json(), as_json, json_file, lambda: plan_table(view.report))
    if plot:
        plot_plan(view, plot)
        echo(f"wrote {plot}", err=True)


@app.command()
def show(
    root: Root,
    episode: Annotated[int | None, typer.Option(help="One episode, by its number, in place of the whole.")] = None,
    member: Annotated[str, typer.Option(help="One dataset of a mixture, by its name.")] = "",
    out: Annotated[str, typer.Option(help="File to write: .html, .png, of an episode .mp4, with --rerun .rrd.")] = "",
    rerun: Annotated[bool, typer.Option("--rerun", help="Open an episode in the Rerun viewer.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Browse a dataset in the browser, until Ctrl-C.")] = False,
    port: Annotated[
        int | None, typer.Option(help="With --serve: where on 127.0.0.1, by default 8750; 0 takes any free port.")
    ] = None,
) -> None:
    """Make a page, a picture or a video of a dataset, a mixture or one episode; or serve a page to browse it."""
    from raypipe.views import ShowRequest, show_root

    if port is not None and not serve:
        raise ConfigError(f"--port {port} is about --serve, which is not given")
    at = (8750 if port is None else port) if serve else None
    show_root(ShowRequest(root=root, member=member, episode=episode, out=out, with_rerun=rerun, port=at), echo)


@app.command()
def validate(
    root: Root,
    deep: Annotated[bool, typer.Option("--deep", help="Also decode every frame of every camera.")] = False,
    as_json: AsJson = False,
    json_file: JsonFile = None,
    exclude_file: Annotated[Path | None, typer.Option(help="Write the bad episodes to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots and frames to this file.")] = None,
    where: TaskPlace = "auto",
) -> None:
    """Check a dataset or a mixture and tell what is wrong; exits with 1 for warnings and 2 for errors."""
    from raypipe.mixture import is_mixture_file
    from raypipe.validate import findings_table, validate_dataset, validate_mixture, write_report

    check: Any = validate_mixture if is_mixture_file(root) else validate_dataset
    report = check(root, deep=deep, where=where, progress=True)
    write_report(report, exclude_file=exclude_file, html_file=html)
    _tell(report.to_json(), as_json, json_file, lambda: findings_table(report))
    raise typer.Exit(report.exit_code)


@app.command()
def reshard(
    root: DatasetRoot,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder of the copy; it appears when it is complete.")],
    exclude: Annotated[str, typer.Option(help="Episodes to leave out, as 3,7-9; the others are numbered anew.")] = "",
    exclude_file: Annotated[Path | None, typer.Option(help="Also leave out the episodes that this file lists.")] = None,
    drop_camera: Annotated[list[str] | None, typer.Option(help="A camera to leave out; may be repeated.")] = None,
    gop: Annotated[str, typer.Option(help="Re-encode: a keyframe every so many frames.")] = "source",
    size: Annotated[str, typer.Option(help="Re-encode: size of every camera, as WIDTHxHEIGHT.")] = "source",
    codec: Annotated[str, typer.Option(help="Re-encode: h264, hevc, av1 or vp9.")] = "source",
    crf: Annotated[int, typer.Option(help="Quality where videos are re-encoded; lower is better.")] = 24,
    data_mb: Annotated[int, typer.Option(help="Size at which a data file is closed.")] = 100,
    video_mb: Annotated[int, typer.Option(help="Size at which a video file is closed.")] = 200,
    allow_findings: Annotated[bool, typer.Option("--allow-findings", help="Keep errors of the source.")] = False,
    where: TaskPlace = "auto",
    as_json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """Write a dataset anew: v3.0, one row group per episode, videos without loss; goes on where it was killed."""
    from raypipe.mixture import is_mixture_file
    from raypipe.reshard import parse_spec, report_lines, reshard_dataset

    if is_mixture_file(root):
        raise ConfigError(
            f"{root!r} is a mixture, and reshard writes one dataset anew: reshard its members one by one, and write "
            f"the new roots in the file; `raypipe info {root}` lists them"
        )
    spec = parse_spec(
        exclude=exclude,
        exclude_file=exclude_file,
        drop_cameras=drop_camera or (),
        encoding={"gop": gop, "size": size, "codec": codec, "crf": crf},
        limits={"data_mb": data_mb, "video_mb": video_mb},
    )
    report = reshard_dataset(root, out, spec, where=where, progress=True, allow_findings=allow_findings)  # type: ignore[arg-type]
    _tell(report.to_json(), as_json, json_file, lambda: "\n".join(report_lines(report)))


@app.command()
def download(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="A dataset of the Hugging Face Hub: OWNER/NAME.")],
    revision: Annotated[str, typer.Option(help="A tag, branch or commit; by default the newest format tag.")] = "",
    episodes: Annotated[str, typer.Option(help="Only the files of these, as 0-9,12.")] = "",
    cameras: Annotated[list[str] | None, typer.Option(help="Only the files of this one; may be repeated.")] = None,
    out: Annotated[str, typer.Option(help="A folder of its own, in place of the Hub's cache.")] = "",
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask again where a known format tag points to.")] = False,
    as_json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """Fetch a dataset of the Hub, or a part of it; goes on where it was broken off."""
    from raypipe.dataset import DownloadSpec, download_dataset, parse_episodes, report_lines

    spec = DownloadSpec(
        revision=revision,
        episodes=parse_episodes(episodes),
        cameras=tuple(cameras) if cameras else "all",
        out=out,
        is_fresh=refresh,
    )
    report = download_dataset(repo, spec)
    _tell(report.to_json(), as_json, json_file, lambda: "\n".join(report_lines(report)))


@app.command()
def kept(
    folder: Annotated[str, typer.Option(help="The folder of keep_frames, where it is not the default one.")] = "",
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of them; running jobs go on and decode.")] = False,
    as_json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """Show the decoded frames that keep_frames keeps on this machine, or remove them."""
    from raypipe.decode import KeepSpec, clear_kept, frames_folder, survey_kept

    spec = KeepSpec(folder=folder) if folder else KeepSpec()
    found = survey_kept(spec)
    cleared = clear_kept(spec) if clear else 0
    told = {"folder": frames_folder(spec), "datasets": [asdict(one) for one in found], "cleared_bytes": cleared}
    size = sum(one.size_bytes for one in found)
    last = f"{'removed' if clear else 'kept'} {size / 1e9:,.2f} GB in {frames_folder(spec)}"
    _tell(told, as_json, json_file, lambda: "\n".join([*(one.describe() for one in found), last]))


@app.command()
def account(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint, or a run's folder: a path or a URI.")],
    root: Annotated[str, typer.Option(help="Where the dataset, or mixture file, is; else the local path it had.")] = "",
    name: Annotated[str, typer.Option(help="The loader, where the run has several.")] = "",
    as_json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """Check that a run has handed over every frame exactly once; exit code 1 if not, 2 if that cannot be told."""
    from raypipe.views import check_run, verdict_table

    checked = check_run(folder, root=root, name=name)
    _tell(checked.to_json(), as_json, json_file, lambda: verdict_table(checked), lambda: "\n".join(checked.describe()))
    raise typer.Exit(checked.exit_code)


@app.command()
def where(
    step: Annotated[int, typer.Argument(help="Counted from 0 at the run's start, or at that of --epoch.")],
    rank: Annotated[int, typer.Argument(help="Counted from 0.")],
    folder: Annotated[str, typer.Option("--account", metavar="DIR", help="A checkpoint or a run's folder.")] = "",
    root: Annotated[str, typer.Option(help="A LeRobot dataset, or a mixture file: a path or an fsspec URI.")] = "",
    name: Annotated[str, typer.Option(help="The loader of the account, where the run has several.")] = "",
    batch_size: BatchSize = 0,
    world_size: WorldSize = 1,
    seed: OrderSeed = 0,
    epoch: Annotated[int | None, typer.Option(help="Count the steps of this epoch alone.")] = None,
    live_spans: LiveSpansOption = None,
    span_frames: SpanFrames = "",
    clip_frames: ClipFrames = "",
    live_bytes: LiveBytes = "1GiB",
    lanes: Lanes = "world_size",
    tail: Annotated[str, typer.Option(help="The end of an epoch: short, drop or wrap.")] = "short",
    as_json: AsJson = False,
    json_file: JsonFile = None,
) -> None:
    """Tell which frames a step gave to a rank, by the plan: of a run with an account, or of the options."""
    from raypipe.plan import parse_order
    from raypipe.views import StepQuery, locate_planned, locate_recorded, step_table

    query = StepQuery(step=step, rank=rank, epoch=epoch)
    if folder:
        located = locate_recorded(folder, query, root=root, name=name)
    else:
        order = parse_order(
            seed=seed, live_spans=live_spans, span_frames=span_frames, lanes=lanes, clip_frames=clip_frames
        )
        order["tail"] = tail
        located = locate_planned(
            root, query, order, batch_size=batch_size, world_size=world_size, live_bytes=live_bytes
        )
    _tell(located.to_json(), as_json, json_file, located.describe, lambda: step_table(located))


@app.command()
def bench(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="ROOT", help="A LeRobot dataset on this machine; or: compare A.json B.json, what two benches told."
        ),
    ],
    batch_size: Annotated[int, typer.Option(help="Frames of a batch.")] = 64,
    action_frames: Annotated[int, typer.Option(help="Length of the action chunk.")] = 16,
    observation_frames: Annotated[int, typer.Option(help="Frames of every camera in a sample.")] = 1,
    seconds: Annotated[
        float, typer.Option(help="What the floor takes for two epochs; a setting takes some three times that.")
    ] = 20.0,
    live_bytes: LiveBytes = "1GiB",
    live_gb: Annotated[float, typer.Option(hidden=True, help="GiB, in place of live bytes.")] = 0.0,
    gpu_samples_per_s: Annotated[
        float, typer.Option(metavar="N", help="Also tell how many cores feed a GPU that takes N samples/s.")
    ] = 0.0,
    setting: Annotated[list[str] | None, typer.Option(help="Try this: where=rank,threads=2; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only where to decode, and one other clip length.")] = False,
    as_json: AsJson = False,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the figures to this PNG file.")] = None,
) -> None:
    """Measure which settings are best on this machine for a dataset; or compare two such measurements."""
    from raypipe.bench import BenchSpec, bench_table, check_plot, plot_bench, run_bench
    from raypipe.text import parse_bytes

    if targets[0] == "compare":
        _compare_benches(targets[1:], as_json, json_file)
        return
    if len(targets) != 1:
        raise ConfigError(f"bench takes one dataset, got {len(targets)}: {', '.join(targets)}")
    if plot:
        check_plot(plot)
    spec = BenchSpec(
        root=targets[0],
        batch_size=batch_size,
        action_frames=action_frames,
        observation_frames=observation_frames,
        seconds=seconds,
        live_bytes=parse_bytes(f"{live_gb:f}GiB" if live_gb else live_bytes, "live_bytes"),
        gpu_samples_per_s=gpu_samples_per_s,
    )
    report = run_bench(spec, setting or (), is_quick=quick, on_line=lambda line: echo(line, err=True))
    _tell(report.to_json(), as_json, json_file, lambda: bench_table(report))
    if plot:
        plot_bench(report, plot)


@app.command(
    "lerobot-train",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="[OPTIONS OF LEROBOT-TRAIN]",
)
def lerobot_train(context: typer.Context) -> None:
    """Run LeRobot's lerobot-train, with its own options unchanged, on raypipe's batches."""
    from raypipe.lerobot import run_lerobot_train

    run_lerobot_train(context.args)


def main() -> None:
    """Run the command line; the entry point of the ``raypipe`` program."""
    # Taken out here so that it may stand anywhere, also behind the command.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    warnings.showwarning = _show_warning
    is_debug = len(arguments) < len(sys.argv) - 1
    run_to_an_end(lambda: app(arguments, prog_name="raypipe"), is_debug=is_debug)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the place in the code that Python adds."""
    echo(f"raypipe: warning: {' '.join(str(message).split())}", err=True)


def _parse_selection(text: str) -> dict[str, Any]:
    try:
        selection = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--selection is no JSON ({error}): {text!r}; give it as '{{\"every\": 3}}'") from error
    if not isinstance(selection, dict):
        raise ConfigError(f"--selection is {text!r}; give an object, as '{{\"every\": 3}}'")
    return selection


def _compare_benches(files: list[str], as_json: bool, json_file: Path | None) -> None:
    from raypipe.bench import compare, compare_table, read_report

    if len(files) != 2:
        raise ConfigError(
            f"bench compare takes two files that `raypipe bench ROOT --json-file FILE` wrote, got {len(files)}; a "
            f"dataset in a folder named 'compare' is ./compare"
        )
    compared = compare(read_report(files[0]), read_report(files[1]))
    _tell(asdict(compared), as_json, json_file, lambda: compare_table(compared))


def _tell(content: Mapping[str, Any], as_json: bool, json_file: Path | None, *shown: Callable[[], Any]) -> None:
    """Print what a command found, as JSON or as people read it, and write the JSON to the file that was asked for."""
    text = json.dumps(content, indent=2)
    if json_file is not None:
        write_whole(json_file, f"{text}\n")
    if as_json:
        echo(text)
        return
    for show in shown:
        renderable = show()
        (echo if isinstance(renderable, str) else print_table)(renderable)


if __name__ == "__main__":
    main()
