"""The result of every audit: findings with a kind and advice, as text, JSON and Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gpulab import report
from gpulab.audits._traces import RESULT, Json, Operation
from gpulab.passports import Passport

# The order of findings that explain equal shares of the difference, the worst kind first.
KINDS = (
    "not finite",
    "mismatch",
    "overwritten",
    "other data",
    "cause not found",
    "nondeterminism",
    "different random numbers",
    "another valid answer",
    "cannot be told",
    "reduced precision",
    "rounding",
)
FAULTS = KINDS[:5]  # kinds that no correct device or compiler explains
ADVICE = {
    "not finite": (
        "fix this first, because no difference can be measured until then: look for a row that is"
        " masked out entirely, a division by zero, a logarithm or square root of zero or less, or"
        " numbers beyond the range of the format"
    ),
    "mismatch": (
        "look for a bug here: compare this operation's arguments and kernel under both settings"
    ),
    "nondeterminism": (
        "if runs must be reproducible, use deterministic=on (torch.use_deterministic_algorithms);"
        " otherwise compare settings only over many seeds, with gpulab.verdict"
    ),
    "different random numbers": (
        "draw on the CPU with a seeded torch.Generator and move the result; the generators of CPUs"
        " and GPUs differ"
    ),
    "another valid answer": (
        "nothing, unless the loss depends on signs, on the basis of an eigenspace, or on which of"
        " several equal numbers comes first: in that case compute it from a quantity that does not,"
        " such as the outer product of a vector with itself"
    ),
    "other data": "use the same batch, the same weights and the same seeds on both sides",
    "cannot be told": (
        "compare this operation by hand, or make it compute in float64 if its inputs are float64,"
        " so that the audit can repeat it"
    ),
    "rounding": "nothing to do",
    "cause not found": (
        "check this line and the lines before it: the audit does not see what they do outside"
        " torch's operations (NumPy, hooks, other libraries, control flow)"
    ),
}


MAX_MARKDOWN_FINDINGS = 3  # findings in an issue
MAX_PRINTED_LINES = 12  # printed groups of findings, each about one line of code
FIELDS = (
    "kind",
    "setting",
    "operation",
    "phase",
    "module",
    "line",
    "detail",
    "advice",
    "size",
    "share",
    "ratio",
)


@dataclass(frozen=True)
class Finding:
    """A finding about one operation.

    Attributes:
        kind: The kind of the finding, one of `KINDS`.
        setting: The setting under which it was found.
        operation: The name of the operation.
        phase: The phase of the operation, such as `forward` or `backward`.
        module: The path of the module that called it.
        line: The user's line that called it.
        ratio: The operation's own error divided by the error that rounding explains; NaN without a
            float64 reference.
        detail: What was observed.
        advice: What to do.
        size: The relative error of the operation's result for this reason; NaN if it is unknown.
        share: The share of the difference in the step's results that the finding explains; NaN if
            it is unknown or there is no difference.
        has_bound: Whether the effect is bounded. The effects of overwritten memory and of a missing
            result are not, and could explain all of the difference.
        op: The operation in its trace.
        is_pairwise: Whether the finding comes from comparing the two sides, each of which computes
            correctly by itself.
        under_both: Whether both settings have the finding.
        counterparts: The operations of the other setting with the same finding.
    """

    kind: str
    setting: str
    operation: str
    phase: str
    module: str
    line: str
    ratio: float
    detail: str
    advice: str
    size: float = math.nan
    share: float = math.nan
    has_bound: bool = True
    op: Operation | None = field(default=None, repr=False, compare=False)
    is_pairwise: bool = field(default=False, repr=False, compare=False)
    under_both: bool = field(default=False, repr=False, compare=False)
    counterparts: tuple[Operation, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        at = f"\n      at {self.line}" if self.line else ""
        return (
            f"{self.kind}: {self.operation} ({self.phase}){module_phrase(self.module)}, under"
            f" {self.setting}{at}\n      {self.detail}{self._effect()}\n      do: {self.advice}"
        )

    def _effect(self) -> str:
        """Describe the share of the difference that the finding explains; empty if unknown."""
        if not self.has_bound:
            return (
                "\n      its effect has no bound: it could explain all of the difference in the"
                " results"
            )
        if math.isnan(self.share) or self.kind == "rounding":
            return ""
        share = f"{self.share:.0%}" if self.share >= 0.01 else "less than 1%"
        return f"\n      explains {share} of the difference in the results"


def module_phrase(module: str) -> str:
    """Return the module of an operation as the end of a sentence; empty without a module."""
    return f" in {module}" if module else ""


def operation_phrase(op: Operation) -> str:
    """Describe an operation by its name, phase and module."""
    return f"{op.name} ({op.phase}){module_phrase(op.module)}"


def operation_and_place(op: Operation) -> str:
    """Describe an operation by its name, phase, module, file and line number."""
    return operation_phrase(op) + (f" at {op.line.partition(': ')[0]}" if op.line else "")


def describe(op: Operation) -> str:
    """Describe an operation, with its line, or a result of the step."""
    if op.phase == RESULT:
        preposition = "" if op.name == "updated" else "of "
        return f"the {op.name} {preposition}{op.module}" if op.module else f"the {op.name}"
    return operation_phrase(op) + (f" at {op.line}" if op.line else "")


def describe_first(results: Sequence[Operation]) -> str:
    """Describe the first of several results, and count the others."""
    n_more = len(results) - 1
    first = describe(results[0])
    if n_more == 0:
        return first
    return f"{first} and 1 more result" if n_more == 1 else f"{first} and {n_more} more results"


# --- the result of an audit -----------------------------------------------------------------------


class Answer(report.Report):
    """The result of an audit.

    Attributes:
        findings: A list of `Finding`. The finding that explains most of the difference comes first.
        titles: The names of the two sides.
        passports: The machines on which the two sides were computed.
    """

    findings: list[Finding]
    titles: tuple[str, str]
    passports: tuple[Mapping[str, Json], Mapping[str, Json]]
    FORMAT: ClassVar[int] = 1  # of `as_json`

    @property
    def kind(self) -> str:
        """The kind of the first finding, which explains the most; `rounding` if all is well."""
        return self.findings[0].kind

    @property
    def faulty(self) -> bool:
        """Whether any finding is of a kind in `FAULTS`, which no correct device explains."""
        return any(finding.kind in FAULTS for finding in self.findings)

    @property
    def headline(self) -> str:
        """The first line."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n  ".join([self.headline, *format_findings(self.findings)])

    def __repr__(self) -> str:
        return str(self)

    def save(self, file: str | Path, title: str = "") -> None:
        """Write the report to a self-contained HTML file."""
        super().save(file, title or f"Audit: {self.titles[0]} against {self.titles[1]}")

    def as_json(self) -> dict[str, Json]:
        """Return the result as a dictionary that can be written as JSON.

        Returns:
            `format` (1), `headline`, `kind` (of the first finding), `faulty`, `settings` (two),
            `passports` (two), and `findings`: a list of dictionaries with `kind`, `setting`,
            `operation`, `phase`, `module`, `line`, `detail`, `advice`, and the numbers `size`,
            `share` and `ratio`, which are None if they are unknown; see `Finding`.
        """
        return {
            "format": self.FORMAT,
            "headline": self.headline,
            "kind": self.kind,
            "faulty": self.faulty,
            "settings": list(self.titles),
            "passports": [dict(passport) for passport in self.passports],
            "findings": [
                {name: _to_json(getattr(finding, name)) for name in FIELDS}
                for finding in self.findings
            ],
        }

    def as_markdown(self) -> str:
        """Return Markdown for an issue: the headline, up to three findings, and both machines."""
        findings = "\n\n".join(map(str, self.findings[:MAX_MARKDOWN_FINDINGS]))
        sides = (
            f"- {title}: {Passport(passport).summary()}"
            for title, passport in zip(self.titles, self.passports, strict=True)
        )
        return "\n".join([self.headline, "", "```text", findings, "```", "", *sides])


def _to_json(value: object) -> Json:
    """Convert a value to JSON; NaN and infinity, which JSON cannot represent, become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def group_by_line(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Group findings with the same kind, setting, line and advice; keep the order of first ones."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        groups.setdefault(
            (f.kind, f.setting, f.line or f.module or f.operation, f.advice), []
        ).append(f)
    return list(groups.values())


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Format the findings, one text for each kind and line, up to `MAX_PRINTED_LINES` texts."""
    texts = []
    for representative, *similar_findings in group_by_line(findings):
        operations = Counter(
            f"{f.operation} ({f.phase}){module_phrase(f.module)}" for f in similar_findings
        )
        counted = (
            name if count == 1 else f"{count} × {name}" for name, count in operations.most_common(3)
        )
        listed = ", ".join(counted) + (", …" if len(operations) > 3 else "")
        texts.append(
            f"{representative}\n      also in this line: {listed}"
            if similar_findings
            else str(representative)
        )
    omission = (
        [f"… and {len(texts) - MAX_PRINTED_LINES} more lines"]
        if len(texts) > MAX_PRINTED_LINES
        else []
    )
    return texts[:MAX_PRINTED_LINES] + omission
