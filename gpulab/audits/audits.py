"""The audit: one training step under two settings, compared operation by operation, and explained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from gpulab import report
from gpulab.audits.attribution import ranked
from gpulab.audits.comparison import Comparison, check_same_step
from gpulab.audits.confirmation import Confirmation
from gpulab.audits.confirmation import confirm as confirm_lines
from gpulab.audits.count_sketch import WITH_FLOAT64, distance
from gpulab.audits.findings import KINDS, Finding, described, in_module, named
from gpulab.audits.judgement import judge
from gpulab.audits.operations import RESULT, Operation
from gpulab.audits.recording import record
from gpulab.audits.steps import check_step
from gpulab.audits.traces import Trace
from gpulab.errors import UsageError
from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd

FAULTS = KINDS[:4]  # what no correct device explains
MOST_FINDINGS, MOST_GROUPS, MOST_PLACES = 20, 12, 6  # that are shown


class Audit(report.Report):
    """What `audit` returns: where the two settings part, and why. `print` says it, and `plot()` shows it.

    Attributes:
        a: The first trace.
        b: The other trace.
        findings: What was found, as a list of `Finding`; what explains most of the difference comes first.
        pairs: Each operation as it is in `a` and in `b`, where it is, with the same one in float64.
        confirmed: With `confirm`, what was left of the difference when the lines that were found were put right.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> step = gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4))
        >>> answer = gl.audit(step, "cpu", "cpu:emulate=bfloat16", progress=False)
        >>> answer.kind, answer.faulty
        ('reduced precision', False)
    """

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        comparison = self.comparison = Comparison(a, b)
        self.judgement = judge(comparison)
        self.confirmed: list[Confirmation] = []
        self.pairs, self.findings = comparison.pairs, ranked(self.judgement)

    @property
    def kind(self) -> str:
        """The kind of the first finding, which explains most of the difference; `rounding` when all is well."""
        return self.findings[0].kind

    @property
    def faulty(self) -> bool:
        """Whether something is wrong that no correct device explains: mismatch, overwritten, or cause not found."""
        return any(finding.kind in FAULTS for finding in self.findings)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each operation, in the order in which they ran.

        `operation`, `phase`, `module`, `line`; `kind`; for both settings the operation's own error
        `error_a` against float64 from the same inputs, the bound that rounding explains `bound_a`, and
        `ratio_a`; the error that has come together since the beginning of the step, `so_far_a`; the
        `difference` between the two settings; all relative to the size of the exact result (NaN where
        that is next to nothing, as the gradient of a bias before a normalisation is); and whether both
        gave the `same_bits`.
        """
        import pandas as pd

        def size(op: Operation) -> float:
            return float(np.linalg.norm(self.a.sketches[op.outputs[0]]))

        def apart(trace: Trace, op: Operation | None, exact: Operation | None) -> float:
            if op is None or exact is None:
                return math.nan
            return distance(trace.sketches[op.outputs[0]], self.a.sketches[exact.outputs[0]])

        sizes = [size(pair.exact) for pair in self.pairs if pair.exact and not pair.exact.nans]
        zero = 2.0**-36 * float(np.median(sizes)) if sizes else 0.0  # what roundings leave of it
        kinds = {finding.op: finding.kind for finding in reversed(self.findings)}
        rows = []
        for pair in self.pairs:
            op = pair.one
            row: dict[str, Any] = {"operation": op.name, "phase": op.phase, "module": op.module, "line": op.line}
            of_both = [kinds[one] for one in pair.operations if one in kinds]
            row["kind"] = min(of_both, key=KINDS.index, default="rounding")
            exact = pair.exact if pair.exact and size(pair.exact) > zero else None
            for side, trace, mine in (("a", self.a, pair.a), ("b", self.b, pair.b)):
                for quantity in ("error", "bound", "ratio"):
                    value = getattr(mine, quantity, None)
                    row[f"{quantity}_{side}"] = math.nan if value is None else value
                row[f"so_far_{side}"] = apart(trace, mine, exact)
            row["difference"] = apart(self.b, pair.b, pair.a)
            row["same_bits"] = bool(pair.a and pair.b and self.comparison.same_bits(pair.a, pair.b))
            rows.append(row)
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        confirmed = [f"confirmed: {one}" for one in self.confirmed]
        return "\n  ".join([self._headline(), *confirmed, *self._groups(), *self._alone()])

    def __repr__(self) -> str:
        return str(self)

    def words(self) -> Markup:
        """The findings and all operations."""
        return self._page(Markup())

    def picture(self) -> report.Picture:
        """Each operation's error, under the one setting and the other."""
        return self.plot()

    def html(self) -> Markup:
        """The picture between the headline and the findings, and all operations."""
        return self._page(self.plot().html())

    def _page(self, picture: str) -> Markup:
        import pandas as pd

        findings = pd.DataFrame(
            {
                "finding": f.kind,
                "operation": f"{f.operation} ({f.phase})",
                "what to do": f.advice,
                "what was seen": f.detail,
                "at": f.line,
                "of the difference": f"{f.share:.0%}" if f.share == f.share else "",
                "module": f.module,
                "under": f.setting,
            }
            for f in self.findings[:MOST_FINDINGS]
        )
        findings = findings.loc[:, (findings != "").any()]
        shown = ["operation", "phase", "module", "kind", "ratio_a", "ratio_b", "so_far_a", "so_far_b", "difference"]
        return report.render(
            "audit.html",
            headline=self._headline(),
            picture=picture,
            findings=report.table(findings),
            more=len(self.findings) - MOST_FINDINGS,
            count=len(self.pairs),
            operations=report.table(self.table[shown], na_rep=""),
        )

    def save(self, file: str | Path, title: str = "") -> None:
        """Write the report to an HTML file of its own, the plot included."""
        super().save(file, title or f"Audit: {self.a.title} against {self.b.title}")

    def _headline(self) -> str:
        matched = [pair.one.phase for pair in self.pairs if pair.a and pair.b]
        results = matched.count(RESULT)
        alone = len(self.pairs) - len(matched)
        checked = sum(op.ratio is not None for pair in self.pairs for op in (pair.a, pair.b) if op is not None)
        shared = [f.kind for f in self.findings if f.under_both and f.kind == "reduced precision"]
        counts = Counter(f.kind for f in self.findings if f.kind != "rounding")
        counts.subtract(shared)  # which is no difference between the two, and said last
        kinds = ", ".join(f"{counts[kind]} × {kind}" for kind in KINDS if counts[kind])
        if not kinds:
            kinds = "identical to the last bit" if self._identical() else "all is well: rounding alone"
        if shared:
            kinds += f"; under both {len(shared)} × reduced precision"
        unpaired = f" ({alone} more ran under one setting only)" if alone else ""
        text = (
            f"{self.a.title} against {self.b.title}: {kinds}. "
            f"{len(matched) - results} operations and {results} results were matched{unpaired}; {checked} were checked "
            "against float64."
        )
        if "loss" in self.a.notes:
            text += f" The loss was {self.a.notes['loss']}."
        if not results:
            text += " The step returned nothing and left no gradient: what it is for could not be compared."
        elif not any(pair.one.name in ("gradient", "updated") for pair in self.pairs if pair.one.phase == RESULT):
            text += " It left no gradient and updated nothing: only what it returned was compared."
        if len(self.judgement.not_finite) == 1:
            ((side, origin),) = self.judgement.not_finite.items()
            title, first = (self.a, self.b)[side].title, origin.results[0]
            text += f" Under {title} alone {origin.what} reaches {described(first)}, first in {named(origin.op)}."
        return text

    def _identical(self) -> bool:
        """Whether both traces have the same operations, each with the same bits."""
        return all(pair.a and pair.b and self.comparison.same_bits(pair.a, pair.b) for pair in self.pairs)

    def _groups(self) -> list[str]:
        """The findings as text, those of one kind and line together; what explains most of the results comes first."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.kind, finding.setting, finding.place, finding.advice), []).append(finding)
        texts = [
            f"{first}\n      and so in this line: {_listed(alike)}" if alike else str(first)
            for first, *alike in groups.values()
        ]
        return _at_most(MOST_GROUPS, texts, "more lines")

    def _alone(self) -> list[str]:
        """What ran under one setting only, by module: another kernel, or another function."""
        counts: dict[tuple[str, str, str], Counter[str]] = {}
        for pair in self.pairs:
            if pair.a is None or pair.b is None:
                title = self.b.title if pair.a is None else self.a.title
                counts.setdefault((title, pair.one.phase, pair.one.module), Counter())[pair.one.name] += 1
        texts = [
            f"under {title} only, {phase}{f' in {module}' if module else ''}: "
            + ", ".join(name if count == 1 else f"{count} × {name}" for name, count in names.items())
            for (title, phase, module), names in counts.items()
        ]
        return _at_most(MOST_PLACES, texts, "more places", "in ")


def _listed(findings: list[Finding]) -> str:
    """The operations of findings, those alike counted."""
    names = Counter(f"{finding.operation} ({finding.phase}){in_module(finding.module)}" for finding in findings)
    listed = ", ".join(name if count == 1 else f"{count} × {name}" for name, count in names.most_common(3))
    return f"{listed}, …" if len(names) > 3 else listed


def _at_most(count: int, texts: list[str], rest_label: str, where: str = "") -> list[str]:
    return texts[:count] + ([f"… and {where}{len(texts) - count} {rest_label}"] if len(texts) > count else [])


def audit(
    step: Callable[..., Any] | Trace | str | Path,
    a: str | Setting | Trace | Path,
    b: str | Setting | None = None,
    *,
    confirm: bool = False,
    progress: bool = True,
) -> Audit:
    """Do one training step under two settings and in float64, and explain where they part.

    `audit(step, "cpu", "cuda")` does the step here, as `gpulab.record` does; `audit(trace_a, trace_b)`
    compares two traces, or files of traces, from different machines.

    Each operation's result is compared with the same operation in float64 from the same inputs, and its
    error with what rounding explains. The findings: `not finite`, the loss or a gradient is NaN or infinite under both
    settings; `rounding`, all is well; `reduced precision`, a
    product was computed in TF32, bfloat16 or float16; `nondeterminism`, the step does not repeat itself;
    `different random numbers`, drawn on the device; `another valid answer`, of a factorisation
    that has several, as to signs, or of equal numbers; `overwritten`, memory that the backward pass needed
    had changed; `mismatch`, nothing known explains it, or the step calls an operation with other arguments:
    a bug; `cause not found`, the loss, a gradient or what was updated is further apart than roundings lead
    (by Monte Carlo arithmetic), and no operation says why.

    What explains most of the difference in loss, gradients and what was updated comes first: the difference is passed
    back along the values, and each operation keeps the share that its own error makes (`Finding.share`); with
    `confirm` it is measured. What is a part or a consequence of another finding is told under that.

    A fault that is the same under both settings and in float64 cannot be seen, nor what is computed outside of torch
    unless it changes values that torch meets.

    Args:
        step: a `Step` or a function, as `gpulab.record` takes it; or a trace, or a file of one.
        a: a setting; or the other trace.
        b: the other setting; None with traces.
        confirm: whether to do the step again with each line that was found put right, and to say how much of the
            difference in loss and gradients goes (`Audit.confirmed`); not with traces.
        progress: whether to show a bar.

    Returns:
        An `Audit`. `print` says its findings, `plot()` shows where the two settings part.

    Raises:
        UsageError: for arguments that are neither.
        DataError: for traces of different steps, and files that are no traces.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.audit(gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4)), "cpu", "cpu:threads=1", progress=False).kind
        'rounding'

    References:
        N. J. Higham, T. Mary 2019, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5).
    """
    if isinstance(step, Trace | str | Path):
        if confirm:
            raise UsageError("confirm=True needs the step itself, as audit(step, a, b, confirm=True), to do it again")
        if b is not None or not isinstance(a, Trace | str | Path):
            raise UsageError("audit of traces: expected two, as audit(trace_a, trace_b)")
        traces = [x if isinstance(x, Trace) else Trace.load(x) for x in (step, a)]
        check_same_step(*traces)
        files = ["" if isinstance(x, Trace) else Path(x).stem for x in (step, a)]
        return Audit(*_named_apart(traces[0], traces[1], *files))
    if not isinstance(a, str | Setting) or not isinstance(b, str | Setting):
        raise UsageError('audit of a step: expected two settings, as audit(step, "cpu", "cuda")')
    check_step(step)
    first, second = map(Setting.parse, (a, b))
    first.check()
    second.check()
    on = first.device if first.device == second.device and first.kind in WITH_FLOAT64 else "cpu"  # where it is quickest
    trace = record(step, a, on=on, progress=progress)
    report = Audit(*_named_apart(trace, record(step, b, reference=trace, on=on, progress=progress)))
    if confirm:
        report.confirmed = confirm_lines(step, report.judgement, report.findings, progress)
        report.findings = ranked(report.judgement, {one.line: one.share for one in report.confirmed})
    return report


def _named_apart(a: Trace, b: Trace, file_a: str = "", file_b: str = "") -> list[Trace]:
    """Two traces of two names: their own; or else by file, by what differs in machine or flags, or by order."""
    if a.title == b.title:
        about_a, about_b = (trace.passport | trace.arithmetic for trace in (a, b))
        differing = [name for name in about_a if name in about_b and about_a[name] != about_b[name]]
        by_machine = [f"{differing[0]} {about[differing[0]]}" if differing else "" for about in (about_a, about_b)]
        pairs = ((file_a, file_b), by_machine, ("first", "second"))
        names = next(pair for pair in pairs if all(pair) and pair[0] != pair[1])
        return [replace(trace, label=f"{trace.title} ({name})") for trace, name in zip((a, b), names, strict=True)]
    return [a, b]
