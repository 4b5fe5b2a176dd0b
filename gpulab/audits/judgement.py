"""What two traces of one step say about each other, operation by operation: one function for each kind of finding.

Each names a case of `benchmarks/correctness/public_cases.py` that it is for, a question that people asked in public, or
a fault of `tests/audits/fault_catalogue.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from gpulab.audits import tolerances as tol
from gpulab.audits.comparison import Comparison, NotFinite, Pair, Values, differing, find_not_finite, is_infinite
from gpulab.audits.findings import ADVICE, Finding, described, named
from gpulab.audits.rounding import FLUSHED
from gpulab.audits.traces import RESULT, Operation, Trace
from gpulab.audits.twins import DEFINITIONS
from gpulab.settings import Setting

ANOTHER_FUNCTION = "it computes another function there"
GIVEN_OTHER_VALUES = (
    "seed it inside of the step, or draw once and use that: an unseeded generator (numpy.random.default_rng(), "
    "random.Random()), the clock or a loader that goes on gives other values each time; and have the step begin "
    "with the same weights and the same optimizer"
)

COUNTED = "make it in torch.float32 if it counts: bfloat16 holds whole numbers up to 256, and float16 up to 2,048"


def judge(comparison: Comparison) -> list[Finding]:
    """All findings: what either setting shows by itself, what shows side by side, and how far rounding went."""
    findings = _united([*_overwritten(comparison.a)], [*_overwritten(comparison.b)])
    if len(comparison.not_finite) == 2:
        findings += _united(*([_not_finite(comparison, origin)] for origin in comparison.not_finite.values()))
    blamed: set[Operation | None] = set()  # have a side-by-side finding already; one is enough
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
            there = comparison.other_title(pair.one)
            advice = f"see why {there} computes none: {ANOTHER_FUNCTION}"
            yield _finding_of(comparison, "mismatch", pair.one, f"under {there} there is none", advice, bounded=False)
        return
    beside = list(_other_arguments(comparison, pair.a, pair.b))
    others = [finding for finding in alone if finding.kind != "nondeterminism" or not finding.size <= tol.UNEXPLAINED]
    if not beside and all(finding.kind == "reduced precision" for finding in others):
        beside = list(_side_by_side(comparison, pair.a, pair.b, rightly=not others))
    yield from beside


# --- under either setting -----------------------------------------------------------------------------------


def _overwritten(trace: Trace) -> Iterator[Finding]:
    """What the guard found: memory that the backward pass needed had changed (`one_buffer_for_every_frame`)."""
    for entry in trace.overwritten:
        detail = f"what it needed had been overwritten since it was saved: {entry['why']}"
        location = (entry["operation"], "backward", "", entry["line"])
        yield Finding("overwritten", trace.title, *location, math.nan, detail, entry["remedy"], bounded=False)


def _not_finite(comparison: Comparison, origin: NotFinite) -> Finding:
    """A result is NaN or infinite under both settings (the faults "addmm in layers: NaN")."""
    first, *others = origin.results
    more = f" and {len(others)} more results" if others else ""
    detail = f"makes {origin.what} of numbers"
    if not origin.made:
        detail = f"is given {origin.what}, which no operation of the step made: it is in the data or the weights"
    detail += f"; it reaches {described(first)}{more}"
    if origin.infinity is not None:
        detail += f"; it was given the infinity that {named(origin.infinity)} makes"
    if find_not_finite(replace(comparison.a, operations=comparison.a.reference)):
        detail += "; so it is in float64"
    elif first.name not in ("gradient", "updated"):  # of large gradients in float64 nobody knows
        detail += "; in float64, the loss is finite"
    return _finding_of(comparison, "not finite", origin.op, detail)


def _by_itself(comparison: Comparison, op: Operation) -> Iterator[Finding]:
    """Nondeterminism, reduced precision, or an error that rounding does not explain.

    `messages_added_at_nodes`, `product_on_an_rtx_3080`, `running_variance`.
    """
    if op.anew:
        detail = "was given other values when the step was done again, which no operation of the step had made"
        yield _finding_of(comparison, "nondeterminism", op, detail, GIVEN_OTHER_VALUES, side_by_side=True)
    elif op.repeats is False:
        apart = "" if op.spread is None else f", {op.spread:.1e} (relative) apart"
        detail = f"gave other bits when the step was done again{apart}"
        yield _finding_of(comparison, "nondeterminism", op, detail, size=math.nan if op.spread is None else op.spread)
    error = op.error if op.error is not None else math.nan
    size = math.hypot(error, comparison.cast_error(op)) if math.isfinite(error) else math.nan
    if op.format or (op.dtype in tol.SHORT and op.inputs and op.error is not None):
        detail = f"computed in {op.dtype}"
        if op.format == FLUSHED:
            detail = f"took numbers below 1.2e-38 for zero; error {error:.1e}"
        elif op.format and (op.rounded_before or op.error is None):
            detail = f"its factors were rounded to {op.format} before"
        elif op.format:
            detail = f"its factors are rounded to {op.format} by the kernel; error {error:.1e}"
        yield _finding_of(comparison, "reduced precision", op, detail, _advice_on_precision(comparison, op), size=size)
    elif op.ratio is not None and not op.ratio <= 1:
        times = "rounding explains none" if math.isinf(op.ratio) else f"{op.ratio:.3g} times what rounding explains"
        detail = f"its error against float64 is {error:.1e}, {times}"
        yield _finding_of(comparison, "mismatch", op, detail, size=size)


def _rounding(comparison: Comparison) -> Finding:
    """The operation that rounding alone moved most: a measure of how well all is."""
    operations = (*comparison.a.operations, *comparison.b.operations)
    fine = [op for op in operations if op.ratio is not None and op.ratio <= 1 and op.format is None]
    if not fine:
        return Finding("rounding", "", "", "", "", "", math.nan, "no operation has a twin in float64", "")
    op = max(fine, key=attrgetter("ratio"))
    nearest = f"this one comes nearest, {op.ratio:.2f} of it"
    return _finding_of(comparison, "rounding", op, f"{len(fine)} operations within what rounding explains; {nearest}")


def _united(first: list[Finding], second: list[Finding]) -> list[Finding]:
    """What both settings show, once."""
    key = attrgetter("kind", "operation", "line")
    others = {key(finding): finding for finding in second}
    merged = []
    for one in first:
        if other := others.pop(key(one), None):
            titles, size = f"{one.setting} and {other.setting}", math.hypot(one.size, other.size)
            one = replace(one, setting=titles, size=size, under_both=True)
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
    gaps = [*comparison.gaps(a.outputs, b.outputs), *comparison.gaps(a.changed, b.changed)]
    of_inputs = max(comparison.gaps(a.inputs, b.inputs), default=0.0)
    if max(gaps, default=0.0) > max(tol.SAME_VALUE, tol.INHERITED * of_inputs):
        here, there = (", ".join(f"{name}={both[side]!r}" for name, both in values.items()) for side in (1, 0))
        line = f", at {a.line}" if a.line != b.line else ""
        detail = f"called with {here}; under {comparison.other_title(b)} with {there}{line}"
        look = f"see why {_place_of(b)} calls it with other arguments under"
        yield _another_function(comparison, b, max(gaps), detail, look)


def _side_by_side(comparison: Comparison, a: Operation, b: Operation, rightly: bool) -> Iterator[Finding]:
    """What shows only when two are laid side by side; if both compute `rightly`, they should make the same.

    Other draws are for `dropout`.
    """
    if a.random or b.random:
        if not comparison.same_bits(a, b):
            yield _other_draw(comparison, b, max(comparison.gaps(a.outputs, b.outputs)))
        return
    short = next((op for op in (b, a) if op.dtype in tol.SHORT), None)
    if short and not (a.inputs or b.inputs) and a.dtype != b.dtype and not comparison.same_bits(a, b):
        gap = max(comparison.gaps(a.outputs, b.outputs))  # such as places, counted by `arange`
        yield _finding_between(comparison, "reduced precision", short, gap, f"computed in {short.dtype}", COUNTED)
        return
    same = tol.SHORT_SIZE if comparison.is_short(a, b) else tol.SAME_VALUE
    for values in comparison.inputs(a, b):
        gap = comparison.gap(values)
        if gap > same and (found := _other_origin(comparison, a, b, values, gap)):
            yield found
            return
    gaps = comparison.gaps(a.inputs, b.inputs)
    if rightly and max(gaps, default=0.0) <= tol.SAME_INPUTS:
        yield from _another_kernel(comparison, a, b, exactly=not any(gaps))


def _other_origin(comparison: Comparison, a: Operation, b: Operation, values: Values, gap: float) -> Finding | None:
    """Two inputs that should be one come from elsewhere: data, another value, or operations of one setting alone.

    For the faults in forward code, such as "a transposed weight", and `reset_gate_before_or_after`. None where nothing
    can be said of them.
    """
    if comparison.in_doubt(b) or comparison.common(*values, a):
        return None
    makers = comparison.maker(0, values[0]), comparison.maker(1, values[1])
    there, here = (f"what {described(maker)} makes" if maker else "data or weights" for maker in makers)
    origin = comparison.origin(*values, a)
    if not origin.alone:
        detail = f"is given {here}; under {comparison.other_title(b)} {there}, {gap:.1e} (relative) apart"
        return _another_function(comparison, b, gap, detail, f"see what {_place_of(b)} does under")
    random = next((op for op in origin.alone if op.random), None)
    if random:  # then nobody can tell what else they did
        return _other_draw(comparison, random, gap)
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
    detail = (
        f"what it makes is {gap:.1e} (relative) from {other}, which is in its place under "
        f"{comparison.other_title(blamed)}, though each computes rightly what it is asked to; first used by {named(b)}"
    )
    return _another_function(comparison, blamed, gap, detail, f"see what {_place_of(blamed)} does under")


def _other_draw(comparison: Comparison, op: Operation, gap: float) -> Finding:
    detail = f"drew other numbers than under {comparison.other_title(op)}"
    return _finding_between(comparison, "different random numbers", op, gap, detail)


def _another_kernel(comparison: Comparison, a: Operation, b: Operation, exactly: bool) -> Iterator[Finding]:
    """Two kernels that were given the same, and `exactly` so or nearly, and do not agree: they are two functions.

    Or answer a question that has several answers (`signs_of_singular_vectors`, `largest_among_equals`), or multiply in
    TF32. Of two without a twin in float64 nothing else is known (`whole_number_of_nan`).
    """
    if a.name in tol.DECIDES and not (exactly and (a.name in DEFINITIONS or a.ratio is None)):
        return  # of what decides, roundings before it may tip the decision
    if not exactly and any(is_infinite(comparison.a.sketches[value]) for value in a.inputs):
        return  # beside which nobody sees how far the numbers are apart
    twins, tolerance = a.ratio is not None and b.ratio is not None, comparison.tolerance(a, b)
    for gap in comparison.gaps(a.outputs, b.outputs):
        if a.name in DEFINITIONS and gap > tol.UNEXPLAINED:
            detail = f"each fits its definition, and they are {gap:.1e} (relative) apart: it has no single answer"
            yield _finding_between(comparison, "another valid answer", b, gap, detail)
            return
        in_tf32 = next((op for op in (a, b) if not twins and _tf32_explains(comparison, gap, op)), None)
        if in_tf32 is not None:
            yield _as_by_tf32(comparison, in_tf32, gap)
            return
        if gap > tolerance:
            from_there = f"{gap:.1e} (relative) from its result under {comparison.other_title(b)}"
            detail = f"of the same inputs it makes what is {from_there}; roundings lead to {tolerance:.1e}"
            advice = f"compare the kernels registered for both settings: {ANOTHER_FUNCTION}"
            yield _finding_between(comparison, "mismatch", b, gap, detail, advice)
            return


def _as_by_tf32(comparison: Comparison, op: Operation, gap: float) -> Finding:
    detail = f"what it makes is {gap:.1e} (relative) from what there is under {comparison.other_title(op)}, as by TF32"
    return _finding_between(comparison, "reduced precision", op, gap, detail, _advice_on_precision(comparison, op))


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
            from_there = f"{of_data:.1e} (relative) from those under {comparison.other_title(b)}"
            detail = f"was given data or weights that are {from_there}, as one rounding makes it"
            kept = f"keep what {_place_of(b)} is given in float32 if it was meant to be"
            advice = f"{kept}: it is a parameter or buffer, or in the batch"
            finding = _finding_between(comparison, "reduced precision", b, of_data, detail, advice)
        else:
            detail = (
                f"the results are up to {max(gaps):.1e} (relative) from what they are under {comparison.other_title(b)}"
                ", and most of that comes from what this was given, which no operation made so"
            )
            finding = _finding_between(comparison, "cause not found", b, max(gaps), detail)
        yield replace(finding, share=share)


# --- findings made of operations ------------------------------------------------------------------------------


def _finding_of(
    comparison: Comparison,
    kind: str,
    op: Operation,
    detail: str,
    advice: str = "",
    *,
    size: float = math.nan,
    bounded: bool = True,
    side_by_side: bool = False,
) -> Finding:
    """A finding about an operation of one of two traces."""
    return Finding(
        kind,
        comparison.trace_of(op).title,
        op.name,
        op.phase,
        op.module,
        op.line,
        math.nan if op.ratio is None else op.ratio,
        detail,
        advice or ADVICE[kind],
        size=size,
        bounded=bounded,
        op=op,
        side_by_side=side_by_side,
    )


def _finding_between(comparison: Comparison, kind: str, op: Operation, gap: float, *words: str) -> Finding:
    """A finding that shows side by side, of an operation that is so far from its twin; its detail, and an advice."""
    return _finding_of(comparison, kind, op, *words, size=gap, side_by_side=True)


def _another_function(comparison: Comparison, op: Operation, gap: float, detail: str, look: str) -> Finding:
    """A mismatch that shows side by side: an operation computes something else than its twin."""
    advice = f"{look} {comparison.trace_of(op).title}: {ANOTHER_FUNCTION}"
    return _finding_between(comparison, "mismatch", op, gap, detail, advice)


def _place_of(op: Operation) -> str:
    """Where the user finds an operation: its module, or its line."""
    return op.module or op.line or "the step"


def _advice_on_precision(comparison: Comparison, op: Operation) -> str:
    """Which switch lets an operation keep all digits, by what had rounded them."""
    setting = Setting.parse(comparison.trace_of(op).setting)
    convolution = op.name.startswith("convolution")
    if op.format == FLUSHED:
        return "denormals=on, or torch.set_flush_denormal(False), keeps them; or scale the numbers up before this line"
    if op.dtype in tol.SHORT:
        return f"look for autocast, .to(torch.{op.dtype}) or precision={op.dtype} if float32 was meant"
    if op.rounded_before:
        return f"look for what rounds to {op.format} before this line: an emulation, or a cast there and back"
    if setting.emulated:
        return f"{setting} asks for it; gpulab.float32_products() around this line keeps it in float32"
    if setting.kind == "cuda":
        backend = "cudnn" if convolution or op.name.startswith("_cudnn") else "cuda.matmul"
        return f"tf32=off, or torch.backends.{backend}.allow_tf32 = False, computes it in float32"
    product_type = "conv" if convolution else "matmul"
    return f'torch.backends.mkldnn.{product_type}.fp32_precision = "ieee" computes it in float32'
