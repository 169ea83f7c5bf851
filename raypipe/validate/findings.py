"""The values that validate returns: each `Finding`, and the `Report` with all of them.

`KINDS` lists every kind of finding, with its severity and its remedy. The names of kinds are stable: people filter by
them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from raypipe.validate.kinds import KINDS, Severity

if TYPE_CHECKING:
    from raypipe.validate.summary import EpisodeSummary

__all__ = ["KINDS", "Counts", "Finding", "Place", "Report", "Severity", "make_finding"]

_EXIT_CODES: dict[Severity, int] = {"note": 0, "warning": 1, "error": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a finding is; parts that do not apply are empty."""

    dataset: str = ""
    """The member's name, in findings on a mixture."""
    file: str = ""
    """Relative to the root of the dataset."""
    episodes: tuple[int, ...] = ()
    """LeRobot's episode numbers."""
    feature: str = ""
    """A feature, which may be a camera."""
    frames: tuple[int, ...] = ()
    """A few frames that show the problem, counted in the file for a video and in the episode for rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that validate reports."""

    kind: str
    """One of `KINDS`."""
    severity: Severity
    place: Place
    message: str
    """Shows the values: both sides of a mismatch."""
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much validate looked at."""

    episodes: int
    frames: int
    data_files: int
    video_files: int
    decoded_frames: int
    """0 unless deep."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """The findings of one dataset, the worst first."""

    root: str
    version: str
    fps: float
    is_deep: bool
    findings: tuple[Finding, ...]
    counts: Counts
    elapsed_s: float
    summary: "EpisodeSummary"
    """What validate measured of every episode; not part of the JSON."""

    @property
    def severity(self) -> Severity | Literal["none"]:
        """The worst severity of all findings."""
        return worst_severity(self.findings)

    @property
    def exit_code(self) -> int:
        """0 without findings or with notes only, 1 with warnings, 2 with errors."""
        return exit_code_of(self.severity)

    @property
    def tally(self) -> dict[str, int]:
        """The number of findings of each kind that occurs, worst first."""
        return dict(Counter(finding.kind for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, with every finding."""
        return {
            "root": self.root,
            "version": self.version,
            "is_deep": self.is_deep,
            "severity": self.severity,
            "elapsed_s": round(self.elapsed_s, 3),
            "counts": asdict(self.counts),
            "tally": self.tally,
            "findings": [asdict(finding) for finding in self.findings],
        }


def worst_severity(findings: Iterable[Finding]) -> Severity | Literal["none"]:
    """Return the worst severity of `findings`."""
    return next((severity for severity, number in count_severities(findings).items() if number), "none")


def exit_code_of(severity: Severity | Literal["none"]) -> int:
    """Return 0 for nothing and for notes, 1 for warnings, 2 for errors."""
    return 0 if severity == "none" else _EXIT_CODES[severity]


def count_severities(findings: Iterable[Finding]) -> dict[Severity, int]:
    """Return the number of errors, warnings and notes, in this order."""
    numbers = Counter(finding.severity for finding in findings)
    return {severity: numbers[severity] for severity in reversed(_EXIT_CODES)}


def make_finding(kind: str, message: str, place: Place, *, severity: Severity | None = None) -> Finding:
    """Return a finding with the severity and the remedy of its kind.

    Args:
        severity: replaces the kind's severity if this case is better or worse than usual.
    """
    known = KINDS[kind]
    return Finding(kind=kind, severity=severity or known.severity, place=place, message=message, remedy=known.remedy)


def worst_first(findings: list[Finding], root: str) -> tuple[Finding, ...]:
    """Return the findings ordered by severity, kind and place, with the root filled into the commands of remedies."""
    ranks = {name: rank for rank, name in enumerate(reversed(_EXIT_CODES))}
    ordered = sorted(
        findings,
        key=lambda found: (
            ranks[found.severity],
            found.kind,
            found.place.feature,
            found.place.episodes,
            found.place.file,
            found.message,
        ),
    )
    return tuple(
        Finding(
            kind=found.kind,
            severity=found.severity,
            place=found.place,
            message=found.message,
            remedy=found.remedy.replace("ROOT", root),
        )
        for found in ordered
    )
