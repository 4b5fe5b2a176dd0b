"""What every audit answers with: findings, the first of which explains most; for people, for programs, for an issue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gpulab import report
from gpulab.audits.findings import KINDS, Finding
from gpulab.passports import Passport

FAULTS = KINDS[:4]  # what no correct device or compiler explains
SHOWN = 3  # findings in an issue
FIELDS = ("kind", "setting", "operation", "phase", "module", "line", "detail", "advice", "size", "share", "ratio")


class Answer(report.Report):
    """The answer of an audit.

    Attributes:
        findings: What was found, as a list of `Finding`; what explains most of the difference comes first.
        titles: What the two sides are called.
        passports: The machines that they were computed on.
    """

    findings: list[Finding]
    titles: tuple[str, str]
    passports: tuple[Mapping[str, Any], Mapping[str, Any]]
    FORMAT: ClassVar[int] = 1  # of `as_json`

    @property
    def kind(self) -> str:
        """The kind of the first finding, which explains most of the difference; `rounding` when all is well."""
        return self.findings[0].kind

    @property
    def faulty(self) -> bool:
        """Whether there is what no correct device explains: not finite, mismatch, overwritten, cause not found."""
        return any(finding.kind in FAULTS for finding in self.findings)

    @property
    def headline(self) -> str:
        """The first line."""
        raise NotImplementedError

    def __str__(self) -> str:
        from gpulab.audits.summaries import by_line

        return "\n  ".join([self.headline, *by_line(self.findings)])

    def __repr__(self) -> str:
        return str(self)

    def save(self, file: str | Path, title: str = "") -> None:
        """Write the report to an HTML file of its own."""
        super().save(file, title or f"Audit: {self.titles[0]} against {self.titles[1]}")

    def as_json(self) -> dict[str, Any]:
        """The answer for a program, as a dictionary that JSON can hold.

        Returns:
            `format` (1), `headline`, `kind` (of the first finding), `faulty`, `settings` (two), `passports` (two), and
            `findings`: a list of dictionaries with `kind`, `setting`, `operation`, `phase`, `module`, `line`, `detail`,
            `advice`, and the numbers `size`, `share` and `ratio`, which are None where they are not known; see
            `Finding`.
        """
        return {
            "format": self.FORMAT,
            "headline": self.headline,
            "kind": self.kind,
            "faulty": self.faulty,
            "settings": list(self.titles),
            "passports": [dict(passport) for passport in self.passports],
            "findings": [{name: _plain(getattr(finding, name)) for name in FIELDS} for finding in self.findings],
        }

    def as_markdown(self) -> str:
        """What one pastes into an issue: the first line, the first three findings, and both machines."""
        findings = "\n\n".join(map(str, self.findings[:SHOWN]))
        sides = (
            f"- {title}: {Passport(passport).summary()}"
            for title, passport in zip(self.titles, self.passports, strict=True)
        )
        return "\n".join([self.headline, "", "```text", findings, "```", "", *sides])


def _plain(value: Any) -> Any:
    """A value as JSON has it, which knows neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
