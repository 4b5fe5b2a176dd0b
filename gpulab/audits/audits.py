"""The audit: one training step under two settings, compared operation by operation, and explained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from gpulab import report
from gpulab.audits import tolerances as tol
from gpulab.audits.attribution import ranked
from gpulab.audits.comparison import Comparison, check_same_step
from gpulab.audits.compiled import CompiledAudit, audit_compiled
from gpulab.audits.count_sketch import WITH_FLOAT64
from gpulab.audits.findings import KINDS, Finding, described, named
from gpulab.audits.judgement import judge
from gpulab.audits.page import AnswerPage, Rows, operation_rows
from gpulab.audits.recording import record
from gpulab.audits.traces import RESULT, Trace
from gpulab.errors import UsageError
from gpulab.settings import Setting
from gpulab.steps import check_step


class Audit(AnswerPage):
    """What `audit` returns: where the two settings part, and why. `print` says it, and `plot()` shows it.

    Attributes:
        a: The first trace.
        b: The other trace.
        findings: What was found, as a list of `Finding`; what explains most of the difference comes first.
        pairs: Each operation as it is in `a` and in `b`, where it is.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> step = gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4))
        >>> answer = gl.audit(step, "cpu", "cpu:emulate=bfloat16", progress=False)
        >>> answer.kind, answer.faulty
        ('reduced precision', False)
    """

    def __init__(self, comparison: Comparison, findings: list[Finding]) -> None:
        self.comparison, self.findings = comparison, findings
        self.a, self.b, self.pairs = comparison.a, comparison.b, comparison.pairs
        self.titles, self.passports = (self.a.title, self.b.title), (self.a.passport, self.b.passport)

    @property
    def headline(self) -> str:
        """The two settings, what was found between them, what was looked at, and what was not."""
        comparison = self.comparison
        titles = f"{self.a.title} against {self.b.title}"
        sentences = [f"{titles}: {_kinds_in_words(comparison, self.findings)}.", *_extent(comparison)]
        if len(comparison.not_finite) == 1:
            ((side, origin),) = comparison.not_finite.items()
            where = f"{described(origin.results[0])}, first in {named(origin.op)}"
            sentences.append(f"Under {self.titles[side]} alone {origin.what} reaches {where}.")
        return " ".join(sentences)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each operation, in the order in which they ran.

        `operation`, `phase`, `module`, `line`; `kind`; for both settings the operation's own error
        `error_a` against float64 from the same inputs, the bound that rounding explains `bound_a`, and
        `ratio_a`, relative to the size of the exact result; the `difference` between the two settings, relative
        to what the first one made; and whether both gave the `same_bits`.
        """
        kinds = {finding.op: finding.kind for finding in reversed(self.findings)}
        rows = []
        for pair in self.pairs:
            of_both = [kinds[one] for one in pair.operations if one in kinds]
            row: dict[str, object] = {name: getattr(pair.one, name) for name in ("name", "phase", "module", "line")}
            row["kind"] = min(of_both, key=KINDS.index, default="rounding")
            for side, op in (("a", pair.a), ("b", pair.b)):
                row |= {f"{name}_{side}": np.float64(getattr(op, name, None)) for name in ("error", "bound", "ratio")}
            gaps = self.comparison.gaps(pair.a.outputs, pair.b.outputs) if pair.a and pair.b else [math.nan]
            row |= {"difference": gaps[0], "same_bits": max(gaps) < tol.SAME_BITS}
            rows.append(row)
        return pd.DataFrame(rows).rename(columns={"name": "operation"})

    def _rows(self) -> Rows:
        return operation_rows(self.table, self.findings, self.titles)

    picture = report.Report.plot  # each operation's error, under the one setting and the other


def _kinds_in_words(comparison: Comparison, findings: Sequence[Finding]) -> str:
    """The findings as a phrase, such as "2 × mismatch", or that all is well; what both settings share comes last."""
    shared = sum(f.under_both and f.kind == "reduced precision" for f in findings)
    counts = Counter(f.kind for f in findings if f.kind != "rounding")
    counts["reduced precision"] -= shared  # which is no difference between the two
    kinds = ", ".join(f"{counts[kind]} × {kind}" for kind in KINDS if counts[kind])
    if not kinds:
        identical = all(pair.a and pair.b and comparison.same_bits(pair.a, pair.b) for pair in comparison.pairs)
        kinds = "identical to the last bit" if identical else "all is well: rounding alone"
    return f"{kinds}; under both {shared} × reduced precision" if shared else kinds


def _extent(comparison: Comparison) -> list[str]:
    """What was compared and checked, of which loss, and what the step leaves that could not be."""
    results = comparison.results
    alone = len(comparison.pairs) - len(comparison.matched)
    unpaired = f" ({alone} more ran under one setting only)" if alone else ""
    checked = sum(op.ratio is not None for pair in comparison.pairs for op in pair.operations)
    sentences = [
        f"{len(comparison.matched) - len(results)} operations and {len(results)} results were matched{unpaired}; "
        f"{checked} were checked against float64."
    ]
    if "loss" in comparison.a.notes:
        sentences.append(f"The loss was {comparison.a.notes['loss']}.")
    if not results:
        sentences.append("The step returned nothing and left no gradient: what it is for could not be compared.")
    elif not any(pair.one.name in ("gradient", "updated") for pair in comparison.pairs if pair.one.phase == RESULT):
        sentences.append("It left no gradient and updated nothing: only what it returned was compared.")
    return sentences


def compare(a: Trace, b: Trace) -> Audit:
    """The audit of two traces of one step: paired, judged, and what was found in the order of what it explains."""
    comparison = Comparison(a, b)
    return Audit(comparison, ranked(comparison, judge(comparison)))


def audit(
    step: Callable[..., object] | Trace | str | Path,
    a: str | Setting | Trace | Path,
    b: str | Setting | None = None,
    *,
    progress: bool = True,
) -> Audit | CompiledAudit:
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
    a bug; `cause not found`, the loss, a gradient or what was updated is further apart than that, and most of the
    difference goes back to no operation.

    What explains most of the difference in loss, gradients and what was updated comes first: the difference is passed
    back along the values, and each operation keeps the share that its own error makes (`Finding.share`). A cast,
    and a product of factors that were rounded before, come after what they belong to.

    A setting with `compile` is compared with the same setting without, `audit(step, "cpu", "cpu:compile=inductor")`:
    the results of the whole step, and where they are wrong each module alone, as `CompiledAudit` says.

    A fault that is the same under both settings and in float64 cannot be seen, nor what is computed outside of torch
    unless it changes values that torch meets.

    Args:
        step: a `Step` or a function, as `gpulab.record` takes it; or a trace, or a file of one.
        a: a setting; or the other trace.
        b: the other setting; None with traces.
        progress: whether to show a bar.

    Returns:
        An `Audit`, or a `CompiledAudit` where a setting compiles. `print` says its findings; of an `Audit`, `plot()`
        shows where the two settings part.

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
        if b is not None or not isinstance(a, Trace | str | Path):
            raise UsageError("audit of traces: expected two, as audit(trace_a, trace_b)")
        traces = [x if isinstance(x, Trace) else Trace.load(x) for x in (step, a)]
        check_same_step(*traces)
        files = ["" if isinstance(x, Trace) else Path(x).stem for x in (step, a)]
        return compare(*_named_apart(traces[0], traces[1], files))
    if not isinstance(a, str | Setting) or not isinstance(b, str | Setting):
        raise UsageError('audit of a step: expected two settings, as audit(step, "cpu", "cuda")')
    check_step(step)
    first, second = map(Setting.parse, (a, b))
    first.check()
    second.check()
    if first.compile or second.compile:
        return audit_compiled(step, first, second, progress)
    on = first.device if first.device == second.device and first.kind in WITH_FLOAT64 else "cpu"  # where it is quickest
    trace = record(step, a, on=on, progress=progress)
    return compare(*_named_apart(trace, record(step, b, reference=trace, on=on, progress=progress)))


def _named_apart(a: Trace, b: Trace, files: Sequence[str] = ("", "")) -> list[Trace]:
    """Two traces of two names: their own; or else by file, or by order.

    >>> trace = Trace("cpu", [], [], {}, [])
    >>> for files in (("before", "after"), ("same", "same"), ("", "")):
    ...     print(*(one.title for one in _named_apart(trace, trace, files)))
    cpu (before) cpu (after)
    cpu (first) cpu (second)
    cpu (first) cpu (second)
    """
    if a.title != b.title:
        return [a, b]
    names = files if all(files) and files[0] != files[1] else ("first", "second")
    return [replace(trace, label=f"{trace.title} ({name})") for trace, name in zip((a, b), names, strict=True)]
