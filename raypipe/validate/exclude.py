"""The numbers of bad episodes in a small text file: written for the pipeline's ``exclude``, and read back."""

from pathlib import Path

from raypipe.errors import ConfigError
from raypipe.validate.findings import Finding, Report


def bad_episodes(report: Report) -> dict[int, Finding]:
    """Return the episodes to which an error belongs, ascending, each with its first error."""
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


def read_exclude_file(path: str | Path) -> tuple[int, ...]:
    """Return the episode numbers in an exclude file, ascending, each once.

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
