"""Compare one training step under two settings, or two programs under one setting."""

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
from gpulab.audits import _tolerances as tol
from gpulab.audits._attribution import rank_findings
from gpulab.audits._comparison import Comparison, Result
from gpulab.audits._compiled import CompiledAudit, audit_compiled
from gpulab.audits._diagnosis import diagnose, is_loss_scaling, is_nonfinite_on_one_side
from gpulab.audits._findings import KINDS, Finding, describe, describe_first, operation_phrase
from gpulab.audits._page import AnswerPage, Rows, operation_rows
from gpulab.audits._recording import record
from gpulab.audits._sources import Source, find_external_values, find_sources
from gpulab.audits._traces import RESULT, Trace
from gpulab.errors import UsageError
from gpulab.settings import Setting
from gpulab.steps import check_step

# The largest number of comparisons, each with a wider tolerance for more values from outside torch.
MAX_EXTERNAL_ROUNDS = 8


EXTERNAL_VALUES_NOTE = (
    "Values from outside torch (such as NumPy), or from a nondeterministic operation, differ by"
    " rounding errors; everything computed from them was compared with a wider tolerance."
)


class Audit(AnswerPage):
    """The result of `audit`: whether both sides compute the same function, what differs, and why.

    `print` shows the findings, and `plot()` draws the error of each operation.

    Attributes:
        a: The first trace.
        b: The second trace.
        findings: A list of `Finding`. The finding that explains most of the difference comes first.
        pairs: The pairs of operations that compute the same value on both sides, and the operations
            without a counterpart.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> step = gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4))
        >>> answer = gl.audit(step, "cpu", "cpu:emulate=bfloat16", progress=False)
        >>> answer.kind, answer.faulty
        ('reduced precision', False)
    """

    def __init__(self, comparison: Comparison, findings: list[Finding]) -> None:
        self.comparison = comparison
        self.findings = findings
        self.a = comparison.a
        self.b = comparison.b
        self.pairs = comparison.pairs
        self.titles = (self.a.title, self.b.title)
        self.passports = (self.a.passport, self.b.passport)
        self.step_name = self.a.step
        if self.a.step != self.b.step:
            self.step_name = " and ".join(filter(None, (self.a.step, self.b.step)))

    @property
    def headline(self) -> str:
        """The settings, the findings, the size of the differences, and what was compared."""
        comparison = self.comparison
        titles = f"{self.a.title} against {self.b.title}"
        findings_sentence = f"{titles}: {_describe_nonfinite(self)}{_describe_kinds(self)}."
        return " ".join([findings_sentence, *_describe_gaps(comparison), *_describe_coverage(self)])

    @cached_property
    def table(self) -> pd.DataFrame:
        """A table with a row for each operation, in the order of execution.

        Operations of the two sides share a row if they compute the same value in float64. The
        columns are:

        - `operation`, `phase`, `module`, `line` and `kind`.
        - For each side (`_a` and `_b`), the operation's own `error` relative to float64 on the same
          inputs, the `bound` on the error that rounding explains, and their `ratio`. Error and
          bound are relative to the size of the exact result.
        - The `difference` between the first results of the two sides, relative to side a.
        - Whether all results of the two sides have the `same_bits`.
        """
        kinds = {
            op: finding.kind
            for finding in reversed(self.findings)
            for op in (finding.op, *finding.counterparts)
        }
        rows = []
        for pair in self.pairs:
            pair_kinds = [kinds[op] for op in pair.operations if op in kinds]
            row: dict[str, object] = {
                name: getattr(pair.representative, name)
                for name in ("name", "phase", "module", "line")
            }
            row["kind"] = min(pair_kinds, key=KINDS.index, default="rounding")
            for side, op in (("a", pair.a), ("b", pair.b)):
                row |= {
                    f"{name}_{side}": np.float64(getattr(op, name, None))
                    for name in ("error", "bound", "ratio")
                }
            gaps = self.comparison.gaps(pair.a, pair.b) if pair.a and pair.b else [math.nan]
            row |= {"difference": gaps[0], "same_bits": max(gaps) < tol.SAME_BITS_TOLERANCE}
            rows.append(row)
        return pd.DataFrame(rows).rename(columns={"name": "operation"})

    def _rows(self) -> Rows:
        return operation_rows(self.table, self.findings, self.titles)

    picture = report.Report.plot  # the error of each operation under both settings


def _describe_nonfinite(answer: Audit) -> str:
    """Begin the sentence on findings with NaN or infinity on one side, if there is any.

    A step that a gradient scaler skipped on both sides is mentioned, too. Otherwise the text is
    empty.
    """
    origins = answer.comparison.not_finite
    if len(origins) == 2 and all(is_loss_scaling(answer.comparison, o) for o in origins.values()):
        return "the gradient scaler skipped the step under both; "
    if len(origins) != 1:
        return ""
    ((side, origin),) = origins.items()
    cause = operation_phrase(origin.first_operation)
    return (
        f"{origin.value_kind} reaches {describe_first(origin.results)} under"
        f" {answer.titles[side]} alone, from {cause}; "
    )


def _describe_kinds(answer: Audit) -> str:
    """Count the findings by kind, such as "2 × mismatch", or state that all is well.

    Reduced precision under both settings is counted separately, at the end.
    """
    findings = answer.findings
    shared = sum(f.under_both and f.kind == "reduced precision" for f in findings)
    counts = Counter(f.kind for f in findings if f.kind != "rounding")
    counts["reduced precision"] -= shared  # the settings do not differ in these findings
    counted = ", ".join(f"{counts[kind]} × {kind}" for kind in KINDS if counts[kind])
    kinds = counted or _describe_rounding_alone(answer)
    return f"{kinds}; under both {shared} × reduced precision" if shared else kinds


def _describe_rounding_alone(answer: Audit) -> str:
    """State that there is no difference between the settings, or that only rounding causes it."""
    gaps = answer.comparison.gaps
    are_identical = all(
        pair.a and pair.b and max(gaps(pair.a, pair.b)) < tol.SAME_BITS_TOLERANCE
        for pair in answer.pairs
    )
    if _describe_nonfinite(answer):  # then not all is well
        statement = "rounding alone otherwise"
    elif are_identical:
        statement = "identical to the last bit"
    else:
        statement = "all is well: rounding alone"
    limits = ", in the results that both sides have" if answer.comparison.unpaired_results else ""
    return f"{statement}{limits}"


def _describe_gaps(comparison: Comparison) -> list[str]:
    """Describe the largest differences in loss and gradients, and what rounding explains.

    Updates are described as well if one differs in float64, or if there is no other result.
    """
    gaps = _meaningful_gaps(comparison)
    chosen: list[Result] = []
    for group in ("loss", "gradient", "updated"):
        of_group = [result for result in gaps if result.group == group]
        is_reported = group != "updated" or not chosen or not all(r.agrees for r in of_group)
        if of_group and is_reported:
            chosen.append(max(of_group, key=lambda result: gaps[result]))
    if not any(gaps[result] for result in chosen):
        return []
    first, *further = chosen
    phrases = [f"{describe(first.representative)} {_describe_gap(gaps[first])}"]
    phrases += [
        f"{describe(result.representative)}, which is furthest apart, {_describe_gap(gaps[result])}"
        for result in further
    ]
    full_precision_sides = [side for side in (0, 1) if not comparison.uses_short_format(side)]
    deviations = [
        size
        for side in full_precision_sides
        for size in _rounding_deviations(comparison, chosen, side)
    ]
    if deviations:
        explained = min(filter(None, deviations), default=0.0)
        phrases.append(f"rounding alone explains {explained:.1e}")
    sentence = "; ".join(phrases)
    return [f"{sentence[0].upper()}{sentence[1:]}."]


def _meaningful_gaps(comparison: Comparison) -> dict[Result, float]:
    """Return the relative differences of the results that both sides have.

    A result that is not finite or consists of rounding errors has no meaningful size, so it is left
    out: a relative difference would be misleading.
    """
    nonfinite_ops = {op for origin in comparison.not_finite.values() for op in origin.results}
    gaps = {
        result: comparison.recorded_gap(result)
        for result in comparison.results
        if result.a
        and result.b
        and nonfinite_ops.isdisjoint((result.a, result.b))
        and not any(value.is_pure_rounding for value in comparison.values(result.a))
    }
    return {result: gap for result, gap in gaps.items() if math.isfinite(gap)}


def _rounding_deviations(
    comparison: Comparison, results: Sequence[Result], side: int
) -> list[float]:
    """Return the largest deviation of one side's results from their references, as a list.

    The list is empty if a reference is not exact. The deviation of a side in float64 is zero.
    """
    if Setting.parse(comparison.traces[side].setting).precision == "float64":
        return [0.0]
    values = [value for result in results for value in comparison.values(result.of_side(side))]
    return (
        [max(value.deviation for value in values)] if all(value.exact for value in values) else []
    )


def _describe_gap(size: float) -> str:
    """Describe the difference in a result as a phrase.

    >>> _describe_gap(0.00123), _describe_gap(0.0)
    ('differs by 1.2e-03 (relative)', 'has the same bits')
    """
    return f"differs by {size:.1e} (relative)" if size else "has the same bits"


def _describe_coverage(answer: Audit) -> list[str]:
    """Return sentences on what was compared and checked, the loss, and what was impossible."""
    comparison = answer.comparison
    guard = comparison.a.notes.get("guard", "")
    loss = comparison.a.notes.get("loss", "")
    sentences = [
        _describe_counts(answer),
        _describe_unpaired(comparison),
        EXTERNAL_VALUES_NOTE if comparison.external_values else "",
        _describe_missing_references(comparison),
        f"{guard[:1].upper()}{guard[1:]}." if guard else "",
        f"The loss was {loss}." if loss else "",
        _describe_missing_results(comparison),
    ]
    return list(filter(None, sentences))


def _describe_counts(answer: Audit) -> str:
    """Count the agreeing results, and the paired and checked operations, in a sentence."""
    results = [result for result in answer.comparison.results if result.a and result.b]
    operations = [pair for pair in answer.pairs if pair.representative.phase != RESULT]
    n_unpaired = sum(not (pair.a and pair.b) for pair in operations)
    unpaired = f" ({n_unpaired} more have no counterpart)" if n_unpaired else ""
    checked = sum(op.ratio is not None for pair in operations for op in pair.operations)
    agree = sum(result.agrees for result in results)
    count = len(operations) - n_unpaired
    counted = "1 operation computes" if count == 1 else f"{count} operations compute"
    agreement = _describe_agreement(agree, len(results))
    return (
        f"{agreement} in float64; {counted} the same values{unpaired}, and {checked} were checked"
        " against float64."
    )


def _describe_unpaired(comparison: Comparison) -> str:
    """Name the results that only one of the two programs has; empty if there are none."""
    names = [describe(result.representative) for result in comparison.unpaired_results]
    if not names:
        return ""
    have = "results have" if len(names) > 1 else "result has"
    return f"{len(names)} {have} no counterpart to be compared with: {_shorten_list(names)}."


def _describe_missing_references(comparison: Comparison) -> str:
    """Name the operations without a float64 reference; empty if there are none."""
    missing = {name: None for trace in comparison.traces for name in trace.without_reference}
    return (
        f"Without a float64 reference, and compared as recorded: {_shorten_list(list(missing))}."
        if missing
        else ""
    )


def _describe_missing_results(comparison: Comparison) -> str:
    """State that a step left no result, or no gradient, to compare; empty otherwise."""
    if not any(result.a and result.b for result in comparison.results):
        return "The step returned nothing and left no gradient, so no result could be compared."
    if all(result.group == "loss" for result in comparison.results):
        return "It left no gradient and updated nothing, so only what it returned was compared."
    return ""


def _shorten_list(names: Sequence[str]) -> str:
    """Join the first names of a list, and append the number of the others.

    >>> _shorten_list(["a", "b"]), _shorten_list(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _describe_agreement(agree: int, count: int) -> str:
    """Describe the number of agreeing results, as the beginning of a sentence.

    >>> _describe_agreement(1, 1), _describe_agreement(0, 1)
    ('The only result agrees', 'The only result does not agree')
    >>> _describe_agreement(3, 3), _describe_agreement(2, 3)
    ('All 3 results agree', '2 of 3 results agree')
    """
    if count == 1:
        return "The only result agrees" if agree else "The only result does not agree"
    return f"All {count} results agree" if agree == count else f"{agree} of {count} results agree"


def compare(a: Trace, b: Trace) -> Audit:
    """Compare the results of two traces, examine each trace, and find where they diverge.

    If the first differences are small and in values from outside torch, the comparison is repeated
    with a wider tolerance for everything that follows from these values.
    """
    comparison = Comparison(a, b)
    sources: list[Source] = []
    for _ in range(MAX_EXTERNAL_ROUNDS):
        if not comparison.differing_results or is_nonfinite_on_one_side(comparison):
            sources = []
            break
        sources = find_sources(comparison)
        entered = find_external_values(comparison, sources)
        if entered.keys() <= comparison.external_values.keys():
            break
        comparison = Comparison(a, b, entered | comparison.external_values)
    return Audit(comparison, rank_findings(comparison, diagnose(comparison, sources)))


def audit(
    step: Callable[..., object] | Trace | str | Path,
    a: str | Setting | Trace | Path | Callable[..., object],
    b: str | Setting | None = None,
    *,
    setting: str | Setting | None = None,
    progress: bool = True,
) -> Audit | CompiledAudit:
    """Explain how one step differs under two settings, or two programs under one setting.

    It can be called in three ways:

    - `audit(step, "cpu", "cuda")` records the step under both settings, as `gpulab.record` does.
    - `audit(step_a, step_b, setting="cpu")` records two steps under one setting, such as two ways
      to write an optimizer.
    - `audit(trace_a, trace_b)` compares two traces or trace files, from one machine or from
      two.

    Each side is executed twice, to check whether it is deterministic. In the second execution,
    every operation is repeated in float64, so that every value has a float64 reference. The results
    of a step are the returned values, gradients, updated parameters and buffers, and the states of
    optimizers. They are compared first, by their references:

    - If all agree, both sides compute the same function, whatever operations they use. Each side is
      then judged by itself: the error of each operation relative to the same operation in float64
      on the same inputs, number formats, lost updates, NaN and infinity, and nondeterministic
      operations.
    - If some differ, values of both sides are matched by their references, and the findings are the
      first operations whose inputs have counterparts on the other side and whose output has none.

    An operation without a float64 reference is compared as it was recorded, and the first line
    of the report names it.

    These kinds of findings are faults (`Audit.faulty`):

    - `not finite`: the loss or a gradient is NaN or infinite, and no short number format explains
      it. If only a short format makes it infinite, the finding is `reduced precision`, and the
      first line reports the infinity as well.
    - `mismatch`: an operation computes something else from the same values, is called with
      different arguments, or is further from float64 than rounding explains.
    - `overwritten`: memory that the backward pass needed had been overwritten.
    - `other data`: the two sides received different batches or weights.
    - `cause not found`: results differ in float64, although every value that leads to them exists
      on both sides.

    These kinds of findings are not faults:

    - `nondeterminism`: repeating the step does not give the same results.
    - `different random numbers`: the two sides drew different random numbers from the same seed.
    - `another valid answer`: several answers are correct, such as either sign of a singular vector.
    - `cannot be told`: values differ, and no float64 reference can tell a fault from rounding.
    - `reduced precision`: something was computed in TF32, bfloat16 or float16, or an update was
      lost in it.
    - `rounding`: all is well.

    The finding that explains most of the difference in the results comes first. To find it, the
    difference is passed back along the graph of each side, and each operation keeps the share that
    its own error explains (`Finding.share`). Findings at which the two sides begin to differ are
    listed in the order in which the operations ran.

    A setting with `compile` is compared with the same setting without it, as in `audit(step, "cpu",
    "cpu:compile=inductor")`. The results of the whole step are compared and, if one is wrong, the
    results of each module alone; see `CompiledAudit`.

    The audit cannot detect a fault that is the same on both sides, nor one in computations outside
    torch unless their results enter a tensor again.

    Args:
        step: A `Step` or a function, as for `gpulab.record`; or a trace or its file.
        a: The first setting, the second step, or the second trace.
        b: The second setting; None for two steps and for traces.
        setting: The setting under which two steps are executed.
        progress: Whether to show a progress bar.

    Returns:
        An `Audit`, or a `CompiledAudit` if a setting has `compile`. `print` shows its findings, and
        `plot()` of an `Audit` draws the error of each operation.

    Raises:
        UsageError: If the arguments fit none of the three forms above, or a step fails.
        DataError: If a file is not a trace, or has a different format.
        GpulabError: If a setting cannot run on this machine.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.audit(
        ...     gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4)),
        ...     "cpu",
        ...     "cpu:threads=1",
        ...     progress=False,
        ... ).kind
        'rounding'

        Two programs:

        >>> x = torch.linspace(0, 1, 64).reshape(8, 8)
        >>> def sums_of_rows():
        ...     return x.sum(1).sum()
        >>> def sums_of_columns():
        ...     return x.sum(0).sum()
        >>> gl.audit(sums_of_rows, sums_of_columns, setting="cpu", progress=False).faulty
        False
        >>> def sums_of_some_columns():
        ...     return x[:, 1:].sum(0).sum()
        >>> gl.audit(sums_of_rows, sums_of_some_columns, setting="cpu", progress=False).kind
        'mismatch'

    References:
        - F. Benz, A. Hildebrandt, S. Hack 2012, A dynamic program analysis to find floating-point
          accuracy problems, PLDI.
        - A. Sanchez-Stern et al. 2018, Finding root causes of floating point error, PLDI.
        - N. J. Higham, T. Mary 2019, A new approach to probabilistic rounding error analysis, SIAM
          J. Sci. Comput. 41(5).
        - S. Bach et al. 2015, On pixel-wise explanations for non-linear classifier decisions by
          layer-wise relevance propagation, PLoS ONE 10(7).
    """
    if isinstance(step, Trace | str | Path):
        if b is not None or setting is not None or not isinstance(a, Trace | str | Path):
            raise UsageError("audit of traces: expected two traces, as in audit(trace_a, trace_b)")
        traces = [x if isinstance(x, Trace) else Trace.load(x) for x in (step, a)]
        names = ["" if isinstance(x, Trace) else Path(x).stem for x in (step, a)]
        return compare(*_label_traces(traces[0], traces[1], names))
    if setting is not None:
        return _audit_two_steps(step, a, b, setting, progress)
    if not isinstance(a, str | Setting) or not isinstance(b, str | Setting):
        raise UsageError(
            'audit of a step: expected two settings, as in audit(step, "cpu", "cuda"), or two'
            ' steps under one setting, as in audit(step_a, step_b, setting="cpu")'
        )
    check_step(step)
    setting_a, setting_b = map(Setting.parse, (a, b))
    setting_a.check()
    setting_b.check()
    if setting_a.compile or setting_b.compile:
        return audit_compiled(step, setting_a, setting_b, progress)
    trace_a, trace_b = (record(step, text, progress=progress) for text in (a, b))
    return compare(*_label_traces(trace_a, trace_b))


def _audit_two_steps(
    step_a: object, step_b: object, extra_argument: object, setting: str | Setting, progress: bool
) -> Audit:
    """Audit two programs under one setting; `extra_argument` must be None.

    Raises:
        UsageError: If there is an extra argument, or one of the steps is not a step.
    """
    if extra_argument is not None:
        raise UsageError(
            'audit of two steps: expected one setting, as in audit(step_a, step_b, setting="cpu")'
        )
    for step in (step_a, step_b):
        check_step(step)
    traces = [
        record(step, setting, progress=progress) for step in (step_a, step_b) if callable(step)
    ]
    steps = [trace.step for trace in traces]
    names = steps if steps[0] != steps[1] else ["first", "second"]
    labelled = [
        replace(t, label=f"{t.title} ({name})", step=name)
        for t, name in zip(traces, names, strict=True)
    ]
    return compare(*labelled)


def _label_traces(a: Trace, b: Trace, files: Sequence[str] = ("", "")) -> list[Trace]:
    """Give two traces different titles: keep their own, or add the file, step or position.

    >>> trace = Trace("cpu", [], {}, [])
    >>> for files in (("before", "after"), ("same", "same"), ("", "")):
    ...     print(*(labelled.title for labelled in _label_traces(trace, trace, files)))
    cpu (before) cpu (after)
    cpu (first) cpu (second)
    cpu (first) cpu (second)
    """
    if a.title != b.title:
        return [a, b]
    candidates: list[Sequence[str]] = [files, (a.step, b.step), ("first", "second")]
    names = next(pair for pair in candidates if all(pair) and pair[0] != pair[1])
    return [
        replace(trace, label=f"{trace.title} ({name})")
        for trace, name in zip((a, b), names, strict=True)
    ]
