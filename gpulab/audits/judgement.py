"""What two traces of one step say about each other, operation by operation: one function for each kind of finding.

Each names a case of `benchmarks/public_cases.py` that it is for, a question that people asked in public, or a fault of
`benchmarks/plant_faults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

from gpulab.audits import tolerances as tol
from gpulab.audits.comparison import Comparison, Pair, differing, largest, or_infinite
from gpulab.audits.findings import (
    ADVICE,
    DETAILS,
    Finding,
    advice_on_precision,
    described,
    finding_between,
    finding_of,
    in_module,
    named,
)
from gpulab.audits.not_finite import NotFinite, find_not_finite, is_infinite
from gpulab.audits.operations import RESULT, Operation
from gpulab.audits.rounding import FLUSHED, NOT_UNIQUE
from gpulab.audits.traces import Trace
from gpulab.settings import Setting


@dataclass
class Judgement:
    """What is known so far about a comparison, from the first operation on.

    Attributes:
        comparison: The two traces.
        not_finite: By the number of the trace, where the NaN or infinity in its results comes from.
        findings: What was found, in the order of the operations.
        wrong_alone: The operations that are wrong by themselves, whatever the other setting does.
        drew_otherwise: Those that are known to draw other numbers.
        blamed: Those that were blamed for what they make, which may have many users.
        parted: The operations whose results part between the settings, and whether it is known why.
        unexplained: The results that are furthest apart though nothing says why, if there are such.
    """

    comparison: Comparison
    not_finite: dict[int, NotFinite]
    findings: list[Finding] = field(default_factory=list)
    wrong_alone: set[Operation] = field(default_factory=set)
    drew_otherwise: set[Operation] = field(default_factory=set)
    blamed: set[Operation] = field(default_factory=set)
    parted: dict[Operation, bool] = field(default_factory=dict)
    unexplained: tuple[Operation, Operation] | None = None


def judge(comparison: Comparison) -> Judgement:
    """Go through the pairs of a comparison, and say of each what is to be said."""
    traces = comparison.a, comparison.b
    origins = {number: find_not_finite(trace) for number, trace in enumerate(traces)}
    judgement = Judgement(comparison, {number: origin for number, origin in origins.items() if origin})
    judgement.findings += _united(*(list(_overwritten(trace)) for trace in traces))
    if len(judgement.not_finite) == 2:
        judgement.findings += _united(*([_not_finite(comparison, o)] for o in judgement.not_finite.values()))
    for pair in comparison.pairs:
        judgement.findings += _judge_pair(judgement, pair)
    judgement.findings += [*_cause_not_found(judgement), _rounding(comparison)]
    return judgement


def _judge_pair(judgement: Judgement, pair: Pair) -> Iterator[Finding]:
    """What an operation shows by itself under either setting, and beside the one that stands for it."""
    comparison = judgement.comparison
    alone = _united(*(list(_by_itself(comparison, op)) if op else [] for op in (pair.a, pair.b)))
    yield from alone
    judgement.wrong_alone |= set(pair.operations) if alone else set()
    if not (pair.a and pair.b):
        if pair.one.phase == RESULT:
            there = comparison.other_trace(pair.one).title
            detail, advice = DETAILS["missing"].format(there=there), ADVICE["missing"].format(setting=there)
            yield finding_of(comparison, "mismatch", pair.one, detail, advice, bounded=False)
        return
    beside = list(_other_arguments(judgement, pair.a, pair.b))
    if not beside and all(finding.kind == "reduced precision" for finding in alone):
        beside = list(_side_by_side(judgement, pair.a, pair.b, rightly=not alone))
    yield from beside
    if comparison.part(pair.a, pair.b):
        known = bool(alone or beside) or comparison.values_may_differ or _inherits(judgement, pair.a, pair.b)
        judgement.parted |= dict.fromkeys(pair.operations, known)


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


def _other_arguments(judgement: Judgement, a: Operation, b: Operation) -> Iterator[Finding]:
    """One was called with other arguments, and made something else of its inputs (the faults "exact gelu", "momentum").

    Numbers may follow from the data or, with another data type, from its precision.
    """
    comparison = judgement.comparison
    values = differing(a, b)
    if a.dtype != b.dtype or ((comparison.values_may_differ or judgement.drew_otherwise) and not a.random):
        values = {name: both for name, both in values.items() if not all(isinstance(v, float) for v in both)}
    if not values:
        return
    if _same_results(comparison, a, b):
        return
    listed_b, listed_a = (", ".join(f"{name}={both[side]!r}" for name, both in values.items()) for side in (1, 0))
    line = f", at {a.line}" if a.line != b.line else ""
    gap = largest([0.0, *comparison.result_gaps(a, b)])
    words = {"arguments": listed_b, "others": listed_a, "line": line}
    yield finding_between(comparison, "mismatch", b, gap, "other arguments", "other arguments", **words)


def _same_results(comparison: Comparison, a: Operation, b: Operation) -> bool:
    """Whether two made the same of the same, except for rounding; of other inputs, whether they compute nothing."""
    if a.random or b.random:
        return comparison.same_bits(a, b)
    of_inputs = max(map(or_infinite, comparison.gaps(a.inputs, b.inputs)), default=0.0)
    computes = a.bound is not None and b.bound is not None
    if of_inputs > tol.SAME_INPUTS:
        return not computes
    gaps = [*comparison.result_gaps(a, b), *comparison.gaps(a.changed, b.changed)]
    if not computes:
        return or_infinite(largest(gaps)) <= max(tol.SAME_VALUE, 4 * of_inputs)
    bounds, errors = (a.bound or 0.0) + (b.bound or 0.0), (a.error or 0.0) + (b.error or 0.0)
    return or_infinite(largest(gaps)) <= bounds * max(1.0, of_inputs / tol.ROUNDOFF) + errors


def _side_by_side(judgement: Judgement, a: Operation, b: Operation, rightly: bool) -> Iterator[Finding]:
    """What shows only when two are laid side by side; if both compute `rightly`, they should make the same.

    Other draws are for `dropout`.
    """
    comparison = judgement.comparison
    if a.random or b.random:
        if not comparison.same_bits(a, b):
            gap = largest(comparison.result_gaps(a, b))
            yield finding_between(comparison, "different random numbers", b, gap, "other draw")
            judgement.drew_otherwise |= {a, b}
        return
    gaps = comparison.gaps(a.inputs, b.inputs)
    if a.name == b.name:  # kernels of other names take what they are given in another order
        same = tol.SHORT_SIZE if comparison.is_short(a, b) else tol.SAME_VALUE
        for x, y, gap in zip(a.inputs, b.inputs, map(or_infinite, gaps), strict=False):
            if gap > same and not comparison.common(x, y, a):
                found = _other_origin(judgement, x, y, b, gap)
                if found is not None:
                    yield from found
                    return
    largest_gap = max(map(or_infinite, gaps), default=0.0)
    if rightly and (a.ratio is None or b.ratio is None):
        yield from _without_a_twin(comparison, a, b, gaps)
    elif (
        rightly
        and largest_gap <= tol.SAME_INPUTS
        and not (a.name in tol.DECIDES and (largest_gap or a.name not in NOT_UNIQUE))
    ):
        yield from _another_kernel(comparison, a, b)  # of what decides, roundings before it may tip the decision


def _other_origin(judgement: Judgement, x: str, y: str, user: Operation, gap: float) -> list[Finding] | None:
    """Two inputs that should be one come from elsewhere: data, another value, or operations of one setting alone.

    For the faults in forward code, such as "a transposed weight".
    None where nothing can be said of them.
    """
    comparison = judgement.comparison
    maker_a, maker_b = comparison.maker(0, x), comparison.maker(1, y)
    by_both = all(maker in comparison.partners for maker in (maker_a, maker_b) if maker)
    if by_both and not (maker_a and maker_b):
        if comparison.values_may_differ:
            return None
        return [finding_between(comparison, "mismatch", user, gap, "other data")]
    if comparison.in_doubt(user):
        return None
    if by_both and maker_a and maker_b and not comparison.values_may_differ:
        if _cause_is_known(judgement, x, y, comparison.partners[user][0]):
            return []
        words = {"maker": described(maker_b), "other_maker": described(maker_a)}
        return [finding_between(comparison, "mismatch", user, gap, "other wiring", "other wiring", **words)]
    finding = _other_function(judgement, x, y, user, gap)
    if finding is None or finding.op is None:
        return None
    repeated = finding.op in judgement.blamed
    judgement.blamed.add(finding.op)
    return [] if repeated else [finding]


def _other_function(judgement: Judgement, x: str, y: str, user: Operation, gap: float) -> Finding | None:
    """What is wrong with the operations of one setting alone that lead to two values that should be one.

    `reset_gate_before_or_after`.
    """
    comparison = judgement.comparison
    stretch = comparison.stretch(x, y)
    alone = [*stretch.alone[1], *stretch.alone[0]]
    random = [op for op in alone if op.random]
    if random:  # then nobody can tell what else they did
        repeated = judgement.drew_otherwise.intersection(random)
        judgement.drew_otherwise |= set(random)
        return (
            None if repeated else finding_between(comparison, "different random numbers", random[0], gap, "other draw")
        )
    begins = map(comparison.gap_before, stretch.before)
    if gap <= tol.INHERITED * largest([0.0, *begins, *(op.error or 0.0 for op in alone)]):
        return None
    for of_one in reversed(stretch.alone):
        kernel = max((op for op in of_one if op.error is None), key=lambda op: len(op.inputs), default=None)
        if kernel and kernel.inputs and _tf32_explains(comparison, gap, kernel):
            return _as_by_tf32(comparison, kernel, gap, "as by TF32")
    explained = math.inf if comparison.is_short(*comparison.partners[user]) else tol.UNEXPLAINED
    if gap <= explained or comparison.values_may_differ:
        return None
    # Two values that should be one come from different operations: blame the one that made it, not its user.
    maker_a, maker_b = comparison.maker(0, x), comparison.maker(1, y)
    blamed, other_maker = (maker_b, maker_a) if maker_b else (maker_a, maker_b)
    assert blamed is not None
    words = {
        "other_maker": named(other_maker) if other_maker else "data or weights",
        "user": user.name + in_module(user.module),
    }
    return finding_between(comparison, "mismatch", blamed, gap, "other function", "other function", **words)


def _another_kernel(comparison: Comparison, a: Operation, b: Operation) -> Iterator[Finding]:
    """For kernels that agree with their twins in float64, and not with each other: they are two functions.

    Or answer a question that has several answers (`signs_of_singular_vectors`, `largest_among_equals`).
    """
    for number, gap in enumerate(comparison.result_gaps(a, b)):
        tolerance = comparison.tolerance(a, b, number)
        if a.name in NOT_UNIQUE and gap > tol.UNEXPLAINED:
            yield finding_between(comparison, "another valid answer", b, gap, "not unique")
            return
        if gap > tol.CARRIED * tolerance:
            yield finding_between(comparison, "mismatch", b, gap, "other kernel", "other kernel", tolerance=tolerance)
            return


def _without_a_twin(comparison: Comparison, a: Operation, b: Operation, of_inputs: list[float]) -> Iterator[Finding]:
    """For kernels without a twin in float64: do they make the same of nearly the same? (`whole_number_of_nan`.)"""
    finite = [gap for gap in of_inputs if not math.isnan(gap)]
    if not finite or max(finite) > tol.SAME_INPUTS:
        return
    both = (comparison.a, a), (comparison.b, b)
    infinite = any(is_infinite(trace.sketches[value]) for trace, op in both for value in op.inputs)
    if (a.name in tol.DECIDES or infinite) and any(finite):
        return  # as a cast to whole numbers, where roundings before it decide
    gap = largest(comparison.result_gaps(a, b))
    in_tf32 = next((op for op in (a, b) if _tf32_explains(comparison, gap, op)), None)
    if in_tf32 is not None:
        yield _as_by_tf32(comparison, in_tf32, gap, "results as by TF32")
    elif gap > tol.UNEXPLAINED:
        yield finding_between(comparison, "mismatch", b, gap, "other results")


def _as_by_tf32(comparison: Comparison, op: Operation, gap: float, about: str) -> Finding:
    finding = finding_between(comparison, "reduced precision", op, gap, about, "rounding")
    return replace(finding, advice=advice_on_precision(op, comparison.trace_of(op)))


def _tf32_explains(comparison: Comparison, apart: float, op: Operation) -> bool:
    """Whether two results are as far apart as TF32 makes them, and a GPU may use it."""
    trace = comparison.trace_of(op)
    least, most = tol.TF32_SIZE
    return Setting.parse(trace.setting).kind == "cuda" and "tf32" in trace.arithmetic.values() and least < apart < most


# --- whether it is known why values part --------------------------------------------------------------------


def _inherits(judgement: Judgement, a: Operation, b: Operation) -> bool:
    """Whether it is known why results part: a decision that rounding tips, or what came before and is known."""
    causes = [_cause_is_known(judgement, x, y, a) for x, y in zip(a.inputs, b.inputs, strict=False)]
    parted = [known for known in causes if known is not None]
    return all(parted) if parted else a.name in tol.DECIDES | NOT_UNIQUE


def _cause_is_known(judgement: Judgement, x: str, y: str, user: Operation) -> bool | None:
    """Whether it is known why two values part; None for values that do not."""
    comparison = judgement.comparison
    if x == y:
        return None
    if common := comparison.common(x, y, user):
        return judgement.parted.get(common[0])
    if comparison.gap(x, y) <= tol.SAME_VALUE:
        return None
    stretch = comparison.stretch(x, y)
    found = judgement.wrong_alone | judgement.blamed
    alone = [op for of_one in stretch.alone for op in of_one]
    makers = {comparison.maker(0, x), comparison.maker(1, y)}
    if judgement.blamed & makers or any(op in found or op.random or op.name == "_to_copy" for op in alone):
        return True
    known = [judgement.parted[a] for a, _, _ in stretch.before if a in judgement.parted]
    return bool(known) and all(known)


def _cause_not_found(judgement: Judgement) -> Iterator[Finding]:
    """The step's results part though nothing above says why; and between which operations that begins.

    For the faults in backward code, such as "forgotten factor in layers".
    """
    comparison = judgement.comparison
    unknown = [pair for pair in comparison.matched if judgement.parted.get(pair[0]) is False]
    results = [(a, b) for a, b in unknown if a.phase == RESULT]
    gaps = [max(map(or_infinite, comparison.gaps(a.outputs, b.outputs))) for a, b in results]
    if not gaps:
        return
    judgement.unexplained = a, b = results[gaps.index(max(gaps))]
    begins = comparison.matched.index(unknown[0])
    yield finding_between(
        comparison,
        "cause not found",
        unknown[0][1],
        max(gaps),
        "no cause",
        result=described(b),
        more=f" (and {len(gaps) - 1} more results)" if len(gaps) > 1 else "",
        tolerance=comparison.tolerance(a, b),
        begin=" and ".join(described(op) for _, op in comparison.matched[max(0, begins - 1) : begins + 1]),
    )
