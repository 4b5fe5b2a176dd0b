"""What two traces of one step say about each other, operation by operation: one function for each kind of finding.

Each names a case of `benchmarks/public_cases.py` that it is for, a question that people asked in public, or a fault of
`benchmarks/plant_faults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from gpulab.audits import tolerances as tol
from gpulab.audits.comparison import Comparison, Pair, Values, differing
from gpulab.audits.findings import (
    ADVICE,
    DETAILS,
    Finding,
    advice_on_precision,
    described,
    finding_between,
    finding_of,
    named,
)
from gpulab.audits.not_finite import NotFinite, find_not_finite, is_infinite
from gpulab.audits.operations import RESULT, Operation
from gpulab.audits.rounding import FLUSHED, NOT_UNIQUE
from gpulab.audits.traces import Trace
from gpulab.settings import Setting


def judge(comparison: Comparison) -> list[Finding]:
    """Go through the pairs of a comparison, and say of each what is to be said."""
    findings = _united(*(list(_overwritten(trace)) for trace in (comparison.a, comparison.b)))
    if len(comparison.not_finite) == 2:
        findings += _united(*([_not_finite(comparison, origin)] for origin in comparison.not_finite.values()))
    blamed: set[Operation | None] = set()  # side by side, each once
    for pair in comparison.pairs:
        new = [one for one in _judge_pair(comparison, pair) if not (one.side_by_side and one.op in blamed)]
        blamed |= {finding.op for finding in new if finding.side_by_side}
        findings += new
    return [*findings, _rounding(comparison)]


def _judge_pair(comparison: Comparison, pair: Pair) -> Iterator[Finding]:
    """What an operation shows by itself under either setting, and beside the one that stands for it."""
    alone = _united(*(list(_by_itself(comparison, op)) if op else [] for op in (pair.a, pair.b)))
    yield from alone
    if not (pair.a and pair.b):
        if pair.one.phase == RESULT:
            there = comparison.other_trace(pair.one).title
            detail, advice = DETAILS["missing"].format(there=there), ADVICE["missing"].format(setting=there)
            yield finding_of(comparison, "mismatch", pair.one, detail, advice, bounded=False)
        return
    beside = list(_other_arguments(comparison, pair.a, pair.b))
    if not beside and all(finding.kind == "reduced precision" for finding in alone):
        beside = list(_side_by_side(comparison, pair.a, pair.b, rightly=not alone))
    yield from beside


# --- under either setting -----------------------------------------------------------------------------------


def _overwritten(trace: Trace) -> Iterator[Finding]:
    """What the guard found: memory that the backward pass needed had changed (`one_buffer_for_every_frame`)."""
    for entry in trace.overwritten:
        detail = DETAILS["overwritten"].format(why=entry["why"])
        location = (entry["operation"], "backward", "", entry["line"])
        yield Finding("overwritten", trace.title, *location, math.nan, detail, entry["remedy"], bounded=False)


def _not_finite(comparison: Comparison, origin: NotFinite) -> Finding:
    """A result is NaN or infinite under both settings (the faults "addmm in layers: NaN")."""
    first, *others = origin.results
    more = f" and {len(others)} more results" if others else ""
    words = {"what": origin.what, "reaches": f"it reaches {described(first)}{more}", "of": "", "exact": ""}
    exact = find_not_finite(replace(comparison.a, operations=comparison.a.reference))
    if exact is not None:
        words["exact"] = "; so it is in float64"
    elif first.name not in ("gradient", "updated"):  # of large gradients in float64 nobody knows
        words["exact"] = "; in float64, the loss is finite"
    if origin.infinity is not None:
        words["of"] = DETAILS["of infinity"].format(maker=named(origin.infinity))
    detail = DETAILS["makes it" if origin.made else "is given it"].format(**words)
    return finding_of(comparison, "not finite", origin.op, detail)


def _by_itself(comparison: Comparison, op: Operation) -> Iterator[Finding]:
    """Nondeterminism, reduced precision, or an error that rounding does not explain.

    `messages_added_at_nodes`, `product_on_an_rtx_3080`, `running_variance`.
    """
    if op.anew:
        yield finding_of(comparison, "nondeterminism", op, DETAILS["anew"], ADVICE["anew"], side_by_side=True)
    elif op.repeats is False:
        detail = DETAILS["restless" if op.spread is None else "spread"].format(spread=op.spread)
        yield finding_of(comparison, "nondeterminism", op, detail, size=math.nan if op.spread is None else op.spread)
    error = op.error if op.error is not None else math.nan
    size = error if math.isfinite(error) else math.nan
    if op.format or (op.dtype in tol.SHORT and op.inputs and op.error is not None):
        about = "short type"
        if op.format == FLUSHED:
            about = "flushed"
        elif op.format:
            about = "rounded before" if op.rounded_before or op.error is None else "rounded by kernel"
        detail = DETAILS[about].format(dtype=op.dtype, format=op.format, error=op.error)
        advice = advice_on_precision(op, comparison.trace_of(op))
        yield finding_of(comparison, "reduced precision", op, detail, advice, size=size)
    elif op.ratio is not None and not op.ratio <= 1:
        times = "rounding explains none" if math.isinf(op.ratio) else f"{op.ratio:.3g} times what rounding explains"
        yield finding_of(comparison, "mismatch", op, DETAILS["wrong"].format(error=error, times=times), size=size)


def _rounding(comparison: Comparison) -> Finding:
    """The operation that rounding alone moved most: a measure of how well all is."""
    operations = (*comparison.a.operations, *comparison.b.operations)
    fine = [op for op in operations if op.ratio is not None and op.ratio <= 1 and op.format is None]
    if not fine:
        return Finding("rounding", "", "", "", "", "", math.nan, DETAILS["no twin"], "")
    op = max(fine, key=attrgetter("ratio"))
    return finding_of(comparison, "rounding", op, DETAILS["rounding"].format(count=len(fine), ratio=op.ratio))


def _united(first: list[Finding], second: list[Finding]) -> list[Finding]:
    """What both settings show, once."""
    key = attrgetter("kind", "operation", "line")
    others = {key(finding): finding for finding in second}
    merged = []
    for one in first:
        if other := others.pop(key(one), None):
            title = f"{one.setting} and {other.setting}"
            one = replace(one, setting=title, size=math.hypot(one.size, other.size))
        merged.append(one)
    return merged + list(others.values())


# --- one operation beside the other -------------------------------------------------------------------------


def _other_arguments(comparison: Comparison, a: Operation, b: Operation) -> Iterator[Finding]:
    """One was called with other arguments, and made something else of its inputs (the faults "exact gelu", "momentum").

    With another data type, numbers may follow from its precision.
    """
    values = differing(a, b)
    if a.dtype != b.dtype:
        values = {name: both for name, both in values.items() if not all(isinstance(v, float) for v in both)}
    if not values:
        return
    gaps = [*comparison.result_gaps(a, b), *comparison.gaps(a.changed, b.changed)]
    of_inputs = max(comparison.gaps(a.inputs, b.inputs), default=0.0)
    if max(gaps, default=0.0) > max(tol.SAME_VALUE, tol.INHERITED * of_inputs):
        listed_b, listed_a = (", ".join(f"{name}={both[side]!r}" for name, both in values.items()) for side in (1, 0))
        words = {"arguments": listed_b, "others": listed_a, "line": f", at {a.line}" if a.line != b.line else ""}
        yield finding_between(comparison, "mismatch", b, max(gaps), "other arguments", "other arguments", **words)


def _side_by_side(comparison: Comparison, a: Operation, b: Operation, rightly: bool) -> Iterator[Finding]:
    """What shows only when two are laid side by side; if both compute `rightly`, they should make the same.

    Other draws are for `dropout`.
    """
    if a.random or b.random:
        if not comparison.same_bits(a, b):
            gap = max(comparison.result_gaps(a, b))
            yield finding_between(comparison, "different random numbers", b, gap, "other draw")
        return
    short = next((op for op in (b, a) if op.dtype in tol.SHORT), None)
    if short and not (a.inputs or b.inputs) and a.dtype != b.dtype and not comparison.same_bits(a, b):
        gap = max(comparison.result_gaps(a, b))  # such as places, counted by `arange`
        yield finding_between(comparison, "reduced precision", short, gap, "short type", "counted", dtype=short.dtype)
        return
    gaps = comparison.gaps(a.inputs, b.inputs)
    if a.name == b.name:  # kernels of other names take what they are given in another order
        same = tol.SHORT_SIZE if comparison.is_short(a, b) else tol.SAME_VALUE
        for x, y, gap in zip(a.inputs, b.inputs, gaps, strict=False):
            if (
                gap > same
                and not comparison.common(x, y, a)
                and (found := _other_origin(comparison, a, b, (x, y), gap))
            ):
                yield found
                return
    if rightly and max(gaps, default=0.0) <= tol.SAME_INPUTS:
        yield from _another_kernel(comparison, a, b, exactly=not any(gaps))


def _other_origin(comparison: Comparison, a: Operation, b: Operation, values: Values, gap: float) -> Finding | None:
    """Two inputs that should be one come from elsewhere: data, another value, or operations of one setting alone.

    For the faults in forward code, such as "a transposed weight", and `reset_gate_before_or_after`. None where nothing
    can be said of them.
    """
    if comparison.in_doubt(b):
        return None
    makers = comparison.maker(0, values[0]), comparison.maker(1, values[1])
    there, here = (f"what {described(maker)} makes" if maker else "data or weights" for maker in makers)
    origin = comparison.origin(*values, a)
    if not origin.alone:
        return finding_between(
            comparison, "mismatch", b, gap, "other wiring", "other function", maker=here, other=there
        )
    random = next((op for op in origin.alone if op.random), None)
    if random:  # then nobody can tell what else they did
        return finding_between(comparison, "different random numbers", random, gap, "other draw")
    begins = (comparison.gap(values) for _, values in origin.before)
    if gap <= tol.INHERITED * max([0.0, *begins, *(op.error or 0.0 for op in origin.alone)]):
        return None
    kernels = [op for op in origin.alone if op.error is None and op.inputs and _tf32_explains(comparison, gap, op)]
    if kernels:
        return _as_by_tf32(comparison, max(kernels, key=lambda op: len(op.inputs)), gap)
    if comparison.is_short(a, b) or gap <= tol.UNEXPLAINED:
        return None
    # Two values that should be one come from different operations: blame the one that made it, not its user.
    blamed, other = (makers[1], there) if makers[1] else (makers[0], here)
    assert blamed is not None
    words = {"other": other, "user": named(b)}
    return finding_between(comparison, "mismatch", blamed, gap, "other function", "other function", **words)


def _another_kernel(comparison: Comparison, a: Operation, b: Operation, exactly: bool) -> Iterator[Finding]:
    """Two kernels that were given the same, and `exactly` so or nearly, and do not agree: they are two functions.

    Or answer a question that has several answers (`signs_of_singular_vectors`, `largest_among_equals`), or multiply in
    TF32. Of two without a twin in float64 nothing else is known (`whole_number_of_nan`).
    """
    if a.name in tol.DECIDES and not (exactly and (a.name in NOT_UNIQUE or a.ratio is None)):
        return  # of what decides, roundings before it may tip the decision
    if not exactly and any(is_infinite(comparison.a.sketches[value]) for value in a.inputs):
        return  # beside which nobody sees how far the numbers are apart
    twins, tolerance = a.ratio is not None and b.ratio is not None, comparison.tolerance(a, b)
    for gap in comparison.result_gaps(a, b):
        if a.name in NOT_UNIQUE and gap > tol.UNEXPLAINED:
            yield finding_between(comparison, "another valid answer", b, gap, "not unique")
            return
        in_tf32 = next((op for op in (a, b) if not twins and _tf32_explains(comparison, gap, op)), None)
        if in_tf32 is not None:
            yield _as_by_tf32(comparison, in_tf32, gap)
            return
        if gap > tolerance:
            yield finding_between(comparison, "mismatch", b, gap, "other kernel", "other kernel", tolerance=tolerance)
            return


def _as_by_tf32(comparison: Comparison, op: Operation, gap: float) -> Finding:
    finding = finding_between(comparison, "reduced precision", op, gap, "as by TF32", "rounding")
    return replace(finding, advice=advice_on_precision(op, comparison.trace_of(op)))


def _tf32_explains(comparison: Comparison, apart: float, op: Operation) -> bool:
    """Whether two results are as far apart as TF32 makes them, and a GPU may use it."""
    trace = comparison.trace_of(op)
    least, most = tol.TF32_SIZE
    return Setting.parse(trace.setting).kind == "cuda" and "tf32" in trace.arithmetic.values() and least < apart < most


# --- the results --------------------------------------------------------------------------------------------


def cause_not_found(comparison: Comparison, lost: dict[Operation, float], total: float) -> Iterator[Finding]:
    """Half of the difference in the step's results, or more, goes back to nothing, and was `lost` at these operations.

    For the faults in backward code, such as "forgotten factor in layers".
    """
    gaps = [gap for a, b in comparison.results for gap in comparison.gaps(a.outputs, b.outputs)]
    most = tol.SHORT_SIZE if comparison.short_setting else tol.UNEXPLAINED
    share = sum(lost.values()) / total if total else 0.0
    if share >= tol.EXPLAINED and max(gaps, default=0.0) > most:
        a, b = comparison.partners[max(lost, key=lambda op: lost[op])]
        of_data = max((gap for gap in comparison.gaps(a.inputs, b.inputs)), default=0.0)
        if comparison.short_setting and 0 < of_data <= tol.SHORT_SIZE:
            finding = finding_between(comparison, "reduced precision", b, of_data, "data", "data")
        else:
            finding = finding_between(comparison, "cause not found", b, max(gaps), "no cause")
        yield replace(finding, share=share)
