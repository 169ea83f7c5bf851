"""The values that validate returns for a mixture: its own findings, and the report of every dataset."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from raypipe.mixture import MemberSpec
from raypipe.validate.findings import Counts, Finding, Report, exit_code_of, worst_severity
from raypipe.validate.kinds import Severity


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureReport:
    """The findings of a mixture and of its datasets."""

    mixture: str
    """The path of the file, as the caller gave it."""
    members: tuple[MemberSpec, ...]
    """Those with a weight above 0, in the order of the file."""
    is_deep: bool
    findings: tuple[Finding, ...]
    """On the mixture itself: whether the datasets open and fit together. Worst first."""
    reports: Mapping[str, Report]
    """By member name, in the members' order; a dataset that is not there has no report."""
    elapsed_s: float

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings on the mixture, then those on every dataset."""
        return (*self.findings, *(found for report in self.reports.values() for found in report.findings))

    @property
    def severity(self) -> Severity | Literal["none"]:
        """The worst severity of all findings."""
        return worst_severity(self.all_findings)

    @property
    def exit_code(self) -> int:
        """0 without findings or with notes only, 1 with warnings, 2 with errors."""
        return exit_code_of(self.severity)

    @property
    def counts(self) -> Counts:
        """How much validate looked at in all datasets; a dataset that two members share counts once."""
        parts = [asdict(report.counts) for report in {id(report): report for report in self.reports.values()}.values()]
        return Counts(**{name: sum(part[name] for part in parts) for name in Counts.__dataclass_fields__})

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object, with every finding."""
        return {
            "mixture": self.mixture,
            "is_deep": self.is_deep,
            "severity": self.severity,
            "elapsed_s": round(self.elapsed_s, 3),
            "counts": asdict(self.counts),
            "findings": [asdict(finding) for finding in self.findings],
            "datasets": {name: report.to_json() for name, report in self.reports.items()},
        }
