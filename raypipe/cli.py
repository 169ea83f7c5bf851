"""The command line: parse, call one function, print. No logic of its own.

An error of raypipe prints as one paragraph and exits with code 2; ``--debug`` shows the traceback.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from raypipe import __version__
from raypipe.errors import RaypipeError

app = typer.Typer(
    name="raypipe",
    help="Feeds robot-policy training on a Ray cluster from LeRobot datasets.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Root = Annotated[str, typer.Argument(metavar="ROOT", help="A LeRobot dataset: a local path or an fsspec URI.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001
) -> None:
    if version:
        typer.echo(f"raypipe {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def info(root: Root, as_json: Json = False) -> None:
    """Tell what a dataset holds."""
    from raypipe.info import describe, info_table

    described = describe(root)
    if as_json:
        typer.echo(json.dumps(described.to_json(), indent=2))
    else:
        _print(info_table(described))


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist or be empty.")],
    version: Annotated[str, typer.Option(help="Format version: v3.0, v2.1 or v2.0.")] = "v3.0",
    episodes: Annotated[int, typer.Option(help="Number of episodes.")] = 10,
    frames: Annotated[int, typer.Option(help="Mean frames per episode; lengths vary by a third.")] = 60,
    cameras: Annotated[int, typer.Option(help="Number of cameras.")] = 2,
    size: Annotated[str, typer.Option(help="Size of a camera, as WIDTHxHEIGHT.")] = "96x96",
    fps: Annotated[int, typer.Option(help="Frames per second.")] = 10,
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
        cameras=numbered_cameras(cameras, size, codec, gop),
        seed=seed,
    )
    write_dataset(out, spec)
    typer.echo(f"wrote {len(spec.lengths)} episodes, {sum(spec.lengths)} frames to {out}; see: raypipe info {out}")


@app.command()
def plan(
    root: Root,
    world_size: Annotated[int, typer.Option(help="Ranks.")],
    batch_size: Annotated[int, typer.Option(help="Frames of a batch on each rank.")],
    live_spans: Annotated[int, typer.Option(help="Spans that are live at once in a lane.")] = 128,
    span_frames: Annotated[str, typer.Option(help="Longest span in frames, or 'episode'.")] = "episode",
    seed: Annotated[int, typer.Option(help="Decides the order.")] = 0,
    epoch: Annotated[int, typer.Option(help="Counted from 0.")] = 0,
    lanes: Annotated[str, typer.Option(help="Lanes that the ranks share, or 'world_size'.")] = "world_size",
    plot: Annotated[Path | None, typer.Option(help="Also draw the plan of rank 0 to this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Tell what an epoch costs and how well it mixes, before it runs."""
    from raypipe.plan import BatchSpec, parse_order_spec
    from raypipe.views import plan_table, plot_plan, view_plan

    spec = parse_order_spec(seed=seed, live_spans=live_spans, span_frames=span_frames, lanes=lanes)
    view = view_plan(root, spec, BatchSpec(size=batch_size), world_size=world_size, epoch=epoch)
    if as_json:
        typer.echo(json.dumps(view.report.to_json(), indent=2))
    else:
        _print(plan_table(view.report))
    if plot:
        plot_plan(view.world, plot)


def main() -> None:
    """Run the command line; the entry point of the ``raypipe`` program."""
    # Taken out here so that it may stand anywhere, also behind the command.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(arguments)
    except (RaypipeError, OSError) as error:
        if len(arguments) < len(sys.argv) - 1:
            raise
        typer.echo(f"raypipe: {error}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(f"  {note}", err=True)
        sys.exit(2)


def _print(renderable: Any) -> None:
    from rich.console import Console

    # Names and tasks are data: brackets in them are no markup.
    Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False).print(renderable)
