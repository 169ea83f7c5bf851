"""Writes the numbers of bad episodes to a small text file for the pipeline's ``exclude``, and reads it back."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError
from raypipe.plan import SelectionSpec
from raypipe.validate.findings import Finding, Report
from raypipe.validate.mixture_report import MixtureReport


def bad_episodes(report: Report) -> dict[int, Finding]:
    """Return the episodes that have an error, ascending, each with its first error."""
    bad: dict[int, Finding] = {}
    for finding in report.findings:
        if finding.severity == "error":
            for episode in finding.place.episodes:
                bad.setdefault(episode, finding)
    return dict(sorted(bad.items()))


def format_exclude_file(report: Report) -> str:
    """Return the text of an exclude file: a comment with the reason, then the number, for each bad episode."""
    lines = [f"# {report.root}: episodes that raypipe validate found bad"]
    for episode, finding in bad_episodes(report).items():
        lines += [f"# {finding.kind}: {finding.place.file}: {' '.join(finding.message.split())}", str(episode)]
    return "\n".join(lines) + "\n"


def format_mixture_exclude_file(report: MixtureReport) -> str:
    """Return the selections to write under the datasets in the mixture file so that their bad episodes are left out.

    The text is TOML or YAML, like that file. It repeats what a member already selects, since a key may occur only once.
    """
    is_toml = report.mixture.lower().endswith(".toml")
    lines = [f"# {report.mixture}: episodes that raypipe validate found bad"]
    lines.append("# write each selection under its dataset in the mixture file, in place of the one that is there")
    for member in (one for one in report.members if one.name in report.reports):
        bad = bad_episodes(report.reports[member.name])
        if not bad:
            continue
        lines += ["", f"# {member.root}"]
        lines += [
            f"# {finding.kind}: episode {episode}: {finding.place.file}: {' '.join(finding.message.split())}"
            for episode, finding in bad.items()
        ]
        selection = {**_given(member.selection), "exclude": sorted({*member.selection.exclude, *bad})}
        name = json.dumps(member.name, ensure_ascii=False)
        fields_text = (f"{key} = {json.dumps(value)}" for key, value in selection.items())
        shown = f"selection = {{{', '.join(fields_text)}}}" if is_toml else f"  selection: {json.dumps(selection)}"
        lines += [f"[{name}]" if is_toml else f"{name}:", shown]
    return "\n".join(lines) + "\n"


def _given(selection: SelectionSpec) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    plain = asdict(SelectionSpec())
    return {name: value for name, value in asdict(selection).items() if value != plain[name]}


def read_exclude_file(path: str | Path) -> tuple[int, ...]:
    """Return the episode numbers in an exclude file, ascending, without repeats.

    Raises:
        ConfigError: a line is neither a number, nor empty, nor a comment.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the exclude file {str(path)!r}: {error}") from error
    numbers = set()
    for position, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if text and not (text.isascii() and text.isdecimal()):
            raise ConfigError(
                f"line {position} of {str(path)!r} is {text!r}; expected the number of an episode, or a comment "
                f"behind '#'"
            )
        if text:
            numbers.add(int(text))
    return tuple(sorted(numbers))
