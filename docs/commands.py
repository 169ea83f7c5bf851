"""The page of the commands, from the command line itself: what ``--help`` says, and nothing else."""

from collections.abc import Iterator
from typing import Any

import typer

from raypipe.cli import app

_PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands where a page asks for them; MkDocs calls this for every page."""
    return markdown.replace(_PLACE, "\n".join(_lines())) if _PLACE in markdown else markdown


def _lines() -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        usage = " ".join(["raypipe", name, *(_shown(parameter) for parameter in arguments)])
        yield f"\n## raypipe {name}\n\n{command.help}\n\n```sh\n{usage}\n```\n"
        if command.params:
            yield "| argument or option | | by default |\n|---|---|---|"
        for parameter in [*arguments, *options]:
            yield _row(parameter)


def _row(parameter: Any) -> str:
    # A 0 is told, and equals False.
    is_said = isinstance(parameter.default, int | float | str) and str(parameter.default) not in ("", "False")
    default = "required" if parameter.required else f"`{parameter.default}`" if is_said else ""
    return f"| `{_shown(parameter)}` | {parameter.help or ''} | {default} |"


def _shown(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return ", ".join(parameter.opts)
    return str(parameter.metavar or parameter.name.upper())
