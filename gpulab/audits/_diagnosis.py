"""Diagnose the differences between two executions: one function for each kind of finding.

If the results agree in float64, each execution is judged separately, by its errors, number formats,
lost updates, NaN and infinity. If the results differ, the findings are the sources of the
difference, which are the first values that the executions do not have in common.

The docstrings of most functions name an example of what they find. Names in backquotes are cases of
`benchmarks/correctness/public_cases.py`, which come from questions that people asked in public.
Names in quotation marks are faults of `tests/audits/_fault_catalogue.py`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from gpulab.audits import _tolerances as tol
from gpulab.audits._comparison import (
    INFINITY,
    LEAF_RESULTS,
    Comparison,
    NotFinite,
    differing_arguments,
    is_infinite,
    kernel_name,
)
from gpulab.audits._findings import (
    ADVICE,
    Finding,
    describe,
    describe_first,
    operation_and_place,
    operation_phrase,
)
from gpulab.audits._float64_calls import DEFINITIONS
from gpulab.audits._rounding import FLUSHED
from gpulab.audits._sources import Source, same_call
from gpulab.audits._traces import HASH_MARK, RESULT, Json, Operation, Trace
from gpulab.audits._values import Value
from gpulab.settings import Setting

OTHER_FUNCTION_ADVICE = "it computes a different function there"
UNSEEDED_VALUES_ADVICE = (
    "seed it inside the step, or draw once and reuse the result: an unseeded generator"
    " (numpy.random.default_rng(), random.Random()), the clock, or a loader that continues where it"
    " stopped gives different values each time; also make the step start from the same weights and"
    " optimizer state"
)
LOST_UPDATE_ADVICE = (
    "keep the weights in {remedy}: a {dtype} number cannot represent a relative change of less than"
    " about {unit:.0e}"
)
FIX_FIRST_PREFIX = "fix this first, because no difference can be measured until then: "
UNINITIALISED_MEMORY_ADVICE = (
    "remove NaN and infinity from the data and the weights before the step;"
    " torch.isfinite(x).all() is False for a tensor that contains them"
)
SCALER_ADVICE = (
    "nothing, if only the first steps are skipped (the scale is then halved); a smaller init_scale"
    " skips fewer"
)
OUT_OF_RANGE_ADVICE = (
    "look for numbers beyond the range of {}: scale them down, subtract the largest before an"
    " exponential, or compute them in a longer format"
)
# Likely reasons for NaN or infinity, by a pattern of the name of the operation that produces it.
NOT_FINITE_HINTS = (
    (
        r"_?(log|log2|log10|log1p|sqrt|rsqrt|lgamma)",
        "look for a logarithm or square root of zero or less",
    ),
    (r"div|reciprocal", "look for a division by zero"),
    (r".*(softmax|scaled_dot_product|attention).*", "look for a row that is masked out entirely"),
)
BOUNDARY_ADVICE = (
    "compute this part in float32, or keep its input further from the numbers for which it is not"
    " finite: in {}, adding less than {:.0e} of a number does not change it"
)
INTEGER_ADVICE = (
    "compute it in torch.float32 if it matters: bfloat16 represents all integers only up to 256,"
    " and float16 up to 2,048"
)
STATE_ADVICE = (
    "save and restore this state together with the weights, at the same point of the program;"
    " everything that the step computes from it differs"
)
MISSING_STATE = "none"
MAX_LISTED_STATES = 6  # pieces of state in a finding
LOST_UPDATE_PREFIX = "update lost"
GRADIENT_SCALER_OPERATION = "_amp_foreach_non_finite_check_and_unscale"


def diagnose(comparison: Comparison, sources: Sequence[Source]) -> list[Finding]:
    """Collect all findings: those of each setting, of their differences, and of rounding."""
    findings = _merge_findings(
        [*_overwritten_findings(comparison.a)], [*_overwritten_findings(comparison.b)]
    )
    if len(comparison.not_finite) == 2:
        findings += _merge_findings(
            [_two_sided_nonfinite_finding(comparison, comparison.not_finite[0])],
            [_two_sided_nonfinite_finding(comparison, comparison.not_finite[1])],
        )
    findings += _state_findings(comparison)
    # The sources also explain results of single ranks, of which one process has only the whole.
    if not (comparison.has_ranks and sources):
        findings += _missing_result_findings(comparison)
    findings += _source_findings(comparison, sources)
    findings_by_side: list[list[Finding]] = [[], []]
    for side, trace in enumerate(comparison.traces):
        for op in trace.operations:
            findings_by_side[side] += _diagnose_operation(comparison, op)
        findings_by_side[side] += _lost_update_findings(comparison, side)
    findings += _merge_findings(*findings_by_side)
    findings += _one_sided_nonfinite_findings(comparison, findings)
    findings += _valid_answer_findings(comparison)
    return [*findings, _rounding_finding(comparison)]


def is_nonfinite_on_one_side(comparison: Comparison) -> bool:
    """Return whether NaN or infinity reaches the results of only one side, and float64 is finite.

    All other differences then follow from this one.
    """
    if len(comparison.not_finite) != 1:
        return False
    (origin,) = comparison.not_finite.values()
    return not origin.is_nonfinite_in_reference


def find_short_format_origin(comparison: Comparison) -> Operation | None:
    """Find the nearest operation in a short format that leads to a one-sided NaN or infinity.

    The search starts with the operation that produced the first NaN or infinity and continues
    breadth first through the operations that made its inputs.
    """
    if len(comparison.not_finite) != 1:
        return None
    ((side, origin),) = comparison.not_finite.items()
    graph = comparison.graphs[side]
    queue = deque([origin.first_operation])
    visited = {origin.first_operation}
    while queue:
        op = queue.popleft()
        if op.format or op.dtype in tol.SHORT_FORMATS:
            return op
        node = graph.node_of.get(op)
        makers = [graph.maker.get(value) for value in node.inputs] if node else []
        for maker in makers:
            if maker is not None and maker.op not in visited:
                visited.add(maker.op)
                queue.append(maker.op)
    return None


def digit_loss_finding(comparison: Comparison, op: Operation) -> Finding:
    """Make a finding about an operation in a short format at which NaN or infinity begins."""
    format_ = op.format or op.dtype
    unit = torch.finfo(getattr(torch, op.dtype)).eps / 2
    advice = BOUNDARY_ADVICE.format(format_, unit)
    return _make_finding(comparison, "reduced precision", op, f"computed in {format_}", advice)


# --- findings about one setting -------------------------------------------------------------------


def _overwritten_findings(trace: Trace) -> Iterator[Finding]:
    """Yield findings about overwritten memory that the backward pass needed.

    The guard recorded them while the step ran. `one_buffer_for_every_frame` is an example.
    """
    for entry in trace.overwritten:
        detail = (
            "the backward pass needed memory that had been overwritten since it was saved:"
            f" {entry['why']}"
        )
        yield Finding(
            kind="overwritten",
            setting=trace.title,
            operation=entry["operation"],
            phase="backward",
            module="",
            line=entry["line"],
            ratio=math.nan,
            detail=detail,
            advice=entry["remedy"],
            has_bound=False,
        )


def _nonfinite_finding(comparison: Comparison, origin: NotFinite) -> Finding:
    """Describe the origin of NaN or infinity in the results ("addmm in layers: NaN")."""
    if not origin.is_produced:
        detail = (
            f"receives {origin.value_kind}, which no operation of the step produced: it is in the"
            " data or the weights"
        )
    elif origin.infinity is not None:
        detail = (
            f"produces {origin.value_kind} from the infinity that"
            f" {operation_phrase(origin.infinity)} produced"
        )
    else:
        detail = f"turns finite numbers into {origin.value_kind}"
    detail += f"; it reaches {describe_first(origin.results)}"
    if origin.cancellation is not None:
        detail += (
            f"; nearly all digits were lost before, in {operation_and_place(origin.cancellation)}"
        )
    if _has_gradient_scaler(comparison, origin):
        detail += "; the gradient scaler skipped the step"
    if origin.is_nonfinite_in_reference:
        detail += "; the same happens in float64"
    elif origin.results[0].name not in LEAF_RESULTS:
        detail += "; in float64, the loss is finite"
    return _make_finding(comparison, "not finite", origin.op, detail, _advice_on_not_finite(origin))


def _has_gradient_scaler(comparison: Comparison, origin: NotFinite) -> bool:
    """Return whether a gradient scaler looked for NaN and infinity in the trace of their origin."""
    operations = comparison.trace_of(origin.op).operations
    return any(op.name == GRADIENT_SCALER_OPERATION for op in operations)


def is_loss_scaling(comparison: Comparison, origin: NotFinite) -> bool:
    """Return whether gradients overflow only because a gradient scaler scaled the loss.

    The scaler then skips the step and halves the scale, as it should. The loss is finite, and so
    are the gradients in float64, and a number beyond the range of a short format is the origin.
    """
    return (
        _has_gradient_scaler(comparison, origin)
        and origin.first_operation.dtype in tol.SHORT_FORMATS
        and all(result.name == "gradient" for result in origin.results)
        and not origin.is_nonfinite_in_reference
    )


def _two_sided_nonfinite_finding(comparison: Comparison, origin: NotFinite) -> Finding:
    """Describe the origin of NaN or infinity in the results of a side if both sides have it."""
    if is_loss_scaling(comparison, origin):
        return _loss_scaling_finding(comparison, origin)
    return _nonfinite_finding(comparison, origin)


def _loss_scaling_finding(comparison: Comparison, origin: NotFinite) -> Finding:
    """Describe gradients that overflow in a short format, so that the scaler skips the step."""
    op = origin.first_operation
    n_gradients = len(origin.results)
    detail = (
        f"turns numbers beyond the range of {op.dtype} into infinity, which reaches"
        f" {describe(origin.results[0])}"
    )
    if n_gradients > 1:
        detail += f" and {n_gradients - 1} more"
    detail += "; the gradient scaler skipped the step"
    return _make_finding(comparison, "reduced precision", op, detail, SCALER_ADVICE)


def _advice_on_not_finite(origin: NotFinite) -> str:
    """Return advice on the cause of NaN or infinity, which depends on the operation's name."""
    if not origin.is_produced:
        return FIX_FIRST_PREFIX + UNINITIALISED_MEMORY_ADVICE
    if not origin.is_nonfinite_in_reference:
        has_infinity = origin.value_kind == INFINITY or origin.infinity is not None
        return (
            FIX_FIRST_PREFIX + OUT_OF_RANGE_ADVICE.format(origin.first_operation.dtype)
            if has_infinity
            else ADVICE["not finite"]
        )
    for op in filter(None, (origin.infinity, origin.op)):
        for pattern, words in NOT_FINITE_HINTS:
            if re.fullmatch(pattern, op.name.rstrip("_")):
                if op.phase == "backward":
                    words += ", or an infinite derivative, such as that of a square root at zero"
                return FIX_FIRST_PREFIX + words
    return ADVICE["not finite"]


def _one_sided_nonfinite_findings(
    comparison: Comparison, findings: Sequence[Finding]
) -> list[Finding]:
    """Return a finding about a one-sided NaN or infinity that nothing else explains.

    The list is empty if a short format on the way to it, or a mismatch in the operation that
    produced it, explains it.
    """
    if not is_nonfinite_on_one_side(comparison) or find_short_format_origin(comparison) is not None:
        return []
    (origin,) = comparison.not_finite.values()
    wrong = {finding.op for finding in findings if finding.kind == "mismatch"}
    return (
        []
        if {origin.op, origin.first_operation} & wrong
        else [_nonfinite_finding(comparison, origin)]
    )


def _diagnose_operation(comparison: Comparison, op: Operation) -> Iterator[Finding]:
    """Yield findings of nondeterminism, reduced precision, or an error beyond rounding.

    Examples are `messages_added_at_nodes`, `product_on_an_rtx_3080` and `running_variance`.
    """
    yield from _diagnose_repetition(comparison, op)
    yield from _diagnose_error(comparison, op)


def _diagnose_repetition(comparison: Comparison, op: Operation) -> Iterator[Finding]:
    """Yield a finding if an operation, or what it received, differed when it was repeated."""
    if op.inputs_changed:
        detail = (
            "received different values or arguments in the second execution, which no operation of"
            " the step produced"
        )
        yield _make_finding(
            comparison, "nondeterminism", op, detail, UNSEEDED_VALUES_ADVICE, is_pairwise=True
        )
    elif op.repeats is False:
        spread_text = "" if op.spread is None else f", {op.spread:.1e} apart (relative)"
        detail = f"gave different bits when it was repeated{spread_text}"
        size = math.nan if op.spread is None else op.spread
        yield _make_finding(
            comparison,
            "nondeterminism",
            op,
            detail,
            _advice_on_repetition(comparison, op),
            size=size,
        )


def _diagnose_error(comparison: Comparison, op: Operation) -> Iterator[Finding]:
    """Yield a finding of reduced precision, or of an error beyond rounding."""
    error = op.error if op.error is not None else math.nan
    size = error if math.isfinite(error) else math.nan
    is_short = op.dtype in tol.SHORT_FORMATS
    # `format` is set if the kernel computes in a shorter format than that of its tensors, as with
    # TF32.
    if op.format or (is_short and op.inputs and op.error is not None):
        yield _make_finding(
            comparison,
            "reduced precision",
            op,
            _describe_precision(op, error),
            _advice_on_precision(comparison, op),
            size=size,
        )
    elif op.ratio is not None and not op.ratio <= 1:  # above 1, or NaN
        times = (
            "and rounding explains none of it"
            if math.isinf(op.ratio)
            else f"{op.ratio:.3g} times what rounding explains"
        )
        detail = f"its error against float64 is {error:.1e}, {times}"
        yield _make_finding(comparison, "mismatch", op, detail, size=size)
    elif is_short and not op.inputs and op.outputs:
        # A short format cannot represent all integers, such as positions from `arange`.
        deviation = max(value.deviation for value in comparison.values(op))
        if deviation > tol.REFERENCE_TOLERANCE:
            yield _make_finding(
                comparison,
                "reduced precision",
                op,
                f"computed in {op.dtype}",
                INTEGER_ADVICE,
                size=deviation,
            )


def _describe_precision(op: Operation, error: float) -> str:
    """Describe how an operation computes in a short format."""
    if op.format == FLUSHED:
        return f"flushed subnormal numbers, those below 1.2e-38, to zero; error {error:.1e}"
    if op.format and (op.has_rounded_factors or op.error is None):
        return f"its factors had already been rounded to {op.format}"
    if op.format:
        return f"the kernel rounds its factors to {op.format}; error {error:.1e}"
    return f"computed in {op.dtype}"


def _lost_update_findings(comparison: Comparison, side: int) -> Iterator[Finding]:
    """Yield a finding if many updates change the float64 reference, but not the recorded bits.

    Updates that leave the bits unchanged are too small for the weights' format (pytorch#67590).
    """
    trace = comparison.traces[side]
    graph = comparison.graphs[side]
    updates = [op for op in trace.operations if op.phase == RESULT and op.arguments.get("moved")]
    mostly_lost = [
        op
        for op in updates
        if op.arguments["lost"] >= tol.LOST_UPDATE_SHARE * op.arguments["moved"]
    ]
    if not mostly_lost:
        return
    makers = [graph.maker.get(value) for op in mostly_lost for value in comparison.values(op)]
    first_maker = next((node.op for node in makers if node), mostly_lost[0])
    n_lost = sum(op.arguments["lost"] for op in mostly_lost)
    n_changed = sum(op.arguments["moved"] for op in mostly_lost)
    names = ", ".join(op.module for op in mostly_lost[:3]) + (
        f" and {len(mostly_lost) - 3} more" if len(mostly_lost) > 3 else ""
    )
    dtype = comparison.values(mostly_lost[0])[0].dtype
    # Rounding to nearest discards an update of w that is smaller than half the distance from w to
    # the next number. This half distance lies between eps/4 and eps/2 times |w|, depending on w.
    # Every update below eps/4 times |w| is therefore lost, and the advice names this share.
    unit = {"bfloat16": 2.0**-9, "float16": 2.0**-12}.get(dtype, 2.0**-25)
    detail = (
        f"{LOST_UPDATE_PREFIX}: {n_lost:,} of the {n_changed:,} numbers in {names} that change in"
        f" float64 keep their old value (in {len(mostly_lost)} of {len(updates)} updated tensors)"
    )
    if dtype in tol.SHORT_FORMATS:
        remedy = "float32 and cast them for the forward pass, as autocast does"
    else:
        remedy = "float64, as precision=float64 does, or collect updates and apply them together"
    advice = LOST_UPDATE_ADVICE.format(remedy=remedy, dtype=dtype, unit=unit)
    yield _make_finding(comparison, "reduced precision", first_maker, detail, advice, size=math.nan)


def _rounding_finding(comparison: Comparison) -> Finding:
    """Report the operation whose error comes closest to the bound that rounding explains."""
    operations = (*comparison.a.operations, *comparison.b.operations)
    within_bounds = [
        op for op in operations if op.ratio is not None and op.ratio <= 1 and op.format is None
    ]
    if not within_bounds:
        return Finding(
            kind="rounding",
            setting="",
            operation="",
            phase="",
            module="",
            line="",
            ratio=math.nan,
            detail="no operation was compared with float64",
            advice="",
        )
    op = max(within_bounds, key=attrgetter("ratio"))
    count = "1 operation" if len(within_bounds) == 1 else f"{len(within_bounds)} operations"
    detail = (
        f"rounding explains the errors of {count}; the error of this one is {op.ratio:.2f} times"
        " its bound"
    )
    if len(within_bounds) > 1:
        detail += ", the largest ratio"
    return _make_finding(comparison, "rounding", op, detail)


def _merge_findings(findings_a: list[Finding], findings_b: list[Finding]) -> list[Finding]:
    """Combine the findings of both settings; merge findings that both settings have.

    The sizes of two merged findings are added in squares, because their errors are independent.
    """

    def key(finding: Finding) -> tuple[object, ...]:
        format_ = (finding.op.format or finding.op.dtype) if finding.op else ""
        return finding.kind, finding.operation, finding.phase, finding.module, finding.line, format_

    unmatched: dict[tuple[object, ...], deque[Finding]] = defaultdict(deque)
    for finding in findings_b:
        unmatched[key(finding)].append(finding)
    merged = []
    for finding in findings_a:
        candidates = unmatched[key(finding)]
        if not candidates:
            merged.append(finding)
            continue
        counterpart = candidates.popleft()
        merged.append(
            replace(
                finding,
                setting=f"{finding.setting} and {counterpart.setting}",
                size=math.hypot(finding.size, counterpart.size),
                under_both=True,
                counterparts=(counterpart.op,) if counterpart.op else (),
            )
        )
    unmatched_ids = {id(finding) for findings in unmatched.values() for finding in findings}
    return merged + [finding for finding in findings_b if id(finding) in unmatched_ids]


# --- results that differ --------------------------------------------------------------------------


def _state_findings(comparison: Comparison) -> Iterator[Finding]:
    """Yield a finding if two steps of running programs started from different states.

    An example is a step after a resume that did not restore the moving averages of the optimizer.
    """
    start_a, start_b = comparison.a.state, comparison.b.state
    if not start_a or not start_b:
        return  # only steps of running programs have a state
    names = [*start_a, *(name for name in start_b if name not in start_a)]
    differing = [
        (name, start_a.get(name, MISSING_STATE), start_b.get(name, MISSING_STATE))
        for name in names
        if start_a.get(name) != start_b.get(name)
    ]
    if not differing:
        return
    # The averages of an optimizer for all parameters count as one piece of state.
    groups: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for entry in differing:
        name, _, _ = entry
        key, separator, _ = name.partition(" of ")
        is_option = not separator or " of group " in name or name.startswith("random numbers")
        groups[name if is_option else key].append(entry)
    # Options, such as a learning rate, come first, and the counts of updates last.
    keys = sorted(groups, key=lambda key: (key == "step", len(groups[key]) > 1))
    shown = "; ".join(_describe_state_difference(groups[key]) for key in keys[:MAX_LISTED_STATES])
    if len(keys) > MAX_LISTED_STATES:
        shown += f"; and {len(keys) - MAX_LISTED_STATES} more"
    yield Finding(
        kind="other data",
        setting=comparison.b.title,
        operation="state",
        phase="before the step",
        module="",
        line="",
        ratio=math.nan,
        detail=f"the two steps start from different states: {shown}",
        advice=STATE_ADVICE,
        has_bound=False,
        is_pairwise=True,
    )


def _describe_state_difference(entries: Sequence[tuple[str, str, str]]) -> str:
    """Name a piece of state that differs, with both values unless they are tensors.

    >>> _describe_state_difference([("lr", "0.1", "0.2")])
    'lr (0.1 and 0.2)'
    >>> _describe_state_difference([("exp_avg of a", "#1", "none"), ("exp_avg of b", "#2", "none")])
    'exp_avg of a and of 1 more (the second side has none)'
    """
    name, a, b = entries[0]
    if len(entries) > 1:
        name += f" and of {len(entries) - 1} more"
    if MISSING_STATE in (a, b):
        side = "first" if a == MISSING_STATE else "second"
        return f"{name} (the {side} side has none)"
    return name if HASH_MARK in a + b else f"{name} ({a} and {b})"


def _missing_result_findings(comparison: Comparison) -> Iterator[Finding]:
    """Yield a finding for each gradient or update of only one side ("a bias without gradient")."""
    if is_nonfinite_on_one_side(comparison):
        return  # the missing results follow from the NaN or infinity
    for result in comparison.differing_results:
        if not (result.a and result.b):
            op = result.representative
            other_title = comparison.other_title(op)
            advice = f"check why {other_title} does not compute it: {OTHER_FUNCTION_ADVICE}"
            # Either of two different programs may have additional results. The finding is then
            # ranked by its share, so that other differences can come first.
            has_bound = not comparison.is_same_program
            detail = (
                f"{other_title} has neither this result nor its parts"
                if comparison.has_ranks
                else f"{other_title} does not compute it"
            )
            yield _make_finding(comparison, "mismatch", op, detail, advice, has_bound=has_bound)


def _source_findings(comparison: Comparison, sources: Sequence[Source]) -> list[Finding]:
    """Return one finding for each line at which the executions begin to differ.

    If the results differ but no source is known, a finding may state that.
    """
    has_changed_inputs = any(
        op.inputs_changed for trace in comparison.traces for op in trace.operations
    )
    if not sources:
        # NaN or infinity, and inputs that changed, have findings of their own.
        is_explained = has_changed_inputs or is_nonfinite_on_one_side(comparison)
        return [] if is_explained else _unexplained_findings(comparison)
    has_foreign_source = any(_is_data(source) or _is_drawn(source) for source in sources)
    from_other_inputs = _values_from_other_inputs(comparison, sources)
    findings: dict[tuple[str, ...], Finding] = {}
    for source in sources:
        if has_changed_inputs and (
            _is_data(source) or any(node.op.inputs_changed for node in source.nodes)
        ):
            continue  # the finding of nondeterminism reports it
        if _is_data(source):
            finding = _data_finding(comparison, source)
        elif _is_drawn(source):
            finding = _operation_finding(comparison, source)
        elif has_foreign_source and not _has_one_kernel(source):
            # If the data or random numbers differ, a different algorithm for the same function
            # cannot be distinguished from a different function.
            continue
        elif _follows(source, from_other_inputs):
            continue  # its results differ only because its inputs do
        else:
            finding = _operation_finding(comparison, source)
        findings.setdefault((finding.kind, finding.operation, finding.line, finding.phase), finding)
    return list(findings.values())


def _is_data(source: Source) -> bool:
    """Return whether a source is data or weights."""
    return source.data_a is not None or source.data_b is not None


def _is_drawn(source: Source) -> bool:
    """Return whether a source has an operation that draws random numbers."""
    return any(node.op.is_random for node in source.nodes)


def _has_one_kernel(source: Source) -> bool:
    """Return whether the operations of both sides exist and use equivalent kernels."""
    return (
        source.a is not None
        and source.b is not None
        and kernel_name(source.a.op) == kernel_name(source.b.op)
    )


def _values_from_other_inputs(comparison: Comparison, sources: Sequence[Source]) -> set[Value]:
    """Return the values that depend on inputs in which the two sides or executions differ.

    Such inputs are different data, arguments that changed between the two executions of a step,
    and different random numbers.
    """
    drawing_nodes = {node for source in sources for node in source.nodes if node.op.is_random}
    different_data = {
        value for source in sources for value in (source.data_a, source.data_b) if value is not None
    }
    dependent_values: set[Value] = set()
    for graph in comparison.graphs:
        first_outputs = {
            value
            for node in graph.nodes
            if node.op.inputs_changed or node in drawing_nodes
            for value in node.outputs
        }
        dependent_values |= graph.following(different_data | first_outputs)
    return dependent_values


def _follows(source: Source, from_other_inputs: set[Value]) -> bool:
    """Return whether a source differs only because it received values that depend on other inputs.

    A call whose arguments differ between the two sides is a separate difference.
    """
    a, b = source.a, source.b
    if (
        a is not None
        and b is not None
        and _has_one_kernel(source)
        and differing_arguments(a.op, b.op)
    ):
        return False
    return any(not from_other_inputs.isdisjoint(node.inputs) for node in source.nodes)


def _describe_effect(comparison: Comparison) -> str:
    """Describe the largest difference of the results in float64; empty if none is paired."""
    paired = [result for result in comparison.differing_results if result.a and result.b]
    if not paired:
        return ""
    furthest = max(paired, key=lambda result: result.gap)
    return (
        f"; in float64, {describe(furthest.representative)} differs by {furthest.gap:.1e}"
        " (relative)"
    )


def _data_finding(comparison: Comparison, source: Source) -> Finding:
    """Describe data or weights that only one side has ("another batch")."""
    x, y = source.data_a, source.data_b
    value = x if y is None else y
    assert value is not None
    # Data that no operation uses are reported at the first operation.
    op = source.user.op if source.user else comparison.traces[0].operations[0]
    if not all(value_on_side.exact for value_on_side in (x, y) if value_on_side is not None):
        reason = next(
            iter(comparison.trace_of(op).without_reference.values()), "it requests float32"
        )
        detail = (
            f"one of its inputs has no float64 reference ({reason}), and the recorded numbers"
            " differ"
        )
        return _make_pairwise_finding(
            comparison, "cannot be told", op, math.nan, detail + _describe_effect(comparison)
        )
    shape = "×".join(map(str, value.shape)) or "one number"
    if x is not None and y is not None:
        gap = comparison.gap(x, y)
        detail = (
            f"receives data or weights ({shape}) that differ by {gap:.1e} (relative) from those of"
            " the other side"
        )
    else:
        gap = math.nan
        side = 0 if y is None else 1
        title = comparison.traces[side].title
        detail = (
            f"receives data or weights ({shape}) under {title} that the other side does not have"
        )
    advice = (
        "use the same batch, weights and seeds on both sides; everything computed from them differs"
    )
    return _make_pairwise_finding(
        comparison, "other data", op, gap, detail + _describe_effect(comparison), advice
    )


def _operation_finding(comparison: Comparison, source: Source) -> Finding:
    """Describe operations that compute different results although their inputs agree.

    The kinds of findings are tried in this order: different arguments, different random numbers,
    another valid answer, a result without an exact reference. Otherwise, it is a mismatch.
    """
    gap = _output_gap(comparison, source)
    a, b = (node.op if node else None for node in (source.a, source.b))
    are_alike = a is not None and b is not None and kernel_name(a) == kernel_name(b)
    drawn = next((node.op for node in source.nodes if node.op.is_random), None)
    if a is not None and b is not None and are_alike:
        arguments = differing_arguments(a, b)
        if arguments and (drawn is None or arguments.keys() != {"size"}):
            return _arguments_finding(comparison, (a, b), arguments, gap)
    if drawn is not None:
        return _random_numbers_finding(comparison, drawn, gap)
    # An argument may be a constant of the number format, as in `clamp(min=finfo(dtype).tiny)`. On a
    # side where the call clips nothing, it leaves its input unchanged and is not part of the
    # source, so the same call is looked up on the other side.
    for node in source.nodes:
        counterpart = same_call(comparison, node)
        if counterpart is not None:
            is_second_side = comparison.side_of[node.op] == 1
            operations = (counterpart.op, node.op) if is_second_side else (node.op, counterpart.op)
            arguments = differing_arguments(*operations)
            if _are_format_constants(comparison, operations, arguments):
                return _arguments_finding(comparison, operations, arguments, gap)
    if (
        a is not None
        and b is not None
        and are_alike
        and a.name in DEFINITIONS
        and _are_within_bounds(a, b)
    ):
        detail = (
            f"both results satisfy its definition but differ by {gap:.1e} (relative): several"
            " answers are correct"
        )
        return _make_pairwise_finding(comparison, "another valid answer", b, gap, detail)
    if _is_uncertain(comparison, source):
        return _uncertain_finding(comparison, source, gap)
    return _mismatch_finding(comparison, source, gap)


def _are_within_bounds(*operations: Operation) -> bool:
    """Return whether the errors of all operations are within the bounds of rounding."""
    return all(op.ratio is None or op.ratio <= 1 for op in operations)


def _arguments_finding(
    comparison: Comparison,
    operations: tuple[Operation, Operation],
    arguments: dict[str, tuple[Json, Json]],
    gap: float,
) -> Finding:
    """Describe an operation called with different arguments ("exact gelu", "momentum")."""
    a, b = operations
    arguments_a = ", ".join(f"{name}={value!r}" for name, (value, _) in arguments.items())
    arguments_b = ", ".join(f"{name}={value!r}" for name, (_, value) in arguments.items())
    line = f", at {a.line}" if a.line != b.line else ""
    detail = (
        f"called with {arguments_b}; under {comparison.other_title(b)} with {arguments_a}{line}"
    )
    detail += _describe_effect(comparison)
    if _are_format_constants(comparison, operations, arguments):
        detail += "; both are properties of the number formats"
        advice = "take the number from torch.float32 under both settings if it matters"
        return _make_pairwise_finding(comparison, "reduced precision", b, gap, detail, advice)
    advice = (
        f"check why {_user_location(b)} calls it with different arguments under"
        f" {comparison.trace_of(b).title}: "
    )
    return _make_pairwise_finding(
        comparison, "mismatch", b, gap, detail, advice + OTHER_FUNCTION_ADVICE
    )


def _are_format_constants(
    comparison: Comparison,
    operations: tuple[Operation, Operation],
    arguments: dict[str, tuple[Json, Json]],
) -> bool:
    """Return whether all differing arguments are constants of each side's number formats.

    These constants are the machine epsilon and the limits of a format. The result is false if no
    arguments differ.
    """
    formats = [_formats_of(comparison, op) for op in operations]
    return bool(arguments) and all(
        any(_is_format_constant(number, dtype) for dtype in dtypes)
        for numbers in arguments.values()
        for number, dtypes in zip(numbers, formats, strict=True)
    )


def _formats_of(comparison: Comparison, op: Operation) -> set[str]:
    """Return the number formats of an operation's inputs and of its first output."""
    values = comparison.trace_of(op).values
    return {op.dtype, *(values[name].dtype for name in op.inputs)}


def _is_format_constant(number: object, dtype: str) -> bool:
    """Return whether a number is the machine epsilon or a limit of a format.

    >>> _is_format_constant(2.0**-7, "bfloat16"), _is_format_constant(2.0**-7, "float32")
    (True, False)
    """
    info = torch.finfo(getattr(torch, dtype)) if dtype.startswith(("float", "bfloat")) else None
    return info is not None and number in (info.eps, info.tiny, info.max, info.min, info.resolution)


def _output_gap(comparison: Comparison, source: Source) -> float:
    """Return the largest gap between outputs of two operations; NaN if no shapes are equal."""
    if source.a is None or source.b is None:
        return math.nan
    pairs = zip(source.a.outputs, source.b.outputs, strict=False)
    gaps = [comparison.gap(x, y) for x, y in pairs if x.shape == y.shape]
    return max(gaps, default=math.nan)


def _is_uncertain(comparison: Comparison, source: Source) -> bool:
    """Return whether a difference may come from values without an exact float64 reference.

    This is so if an operation is discontinuous or has no reference. It is also so if the other side
    has a value that is close enough to an output to be equal up to rounding.
    """
    for node in source.nodes:
        side = comparison.side_of[node.op]
        uncertain = comparison.uncertain[side]
        if uncertain.isdisjoint(node.outputs):
            continue
        if (
            node.op.name in tol.DISCONTINUOUS_OPERATIONS
            or node.op.name in comparison.traces[side].without_reference
        ):
            return True
        for value in node.outputs:
            candidates = [
                v
                for v in comparison.graphs[1 - side].values()
                if v.shape == value.shape and v.dtype == value.dtype
            ]
            smallest_gap = min(
                (comparison.gap(value, candidate) for candidate in candidates), default=0.0
            )
            if smallest_gap <= tol.INEXACT_FAULT_FACTOR * comparison.tolerance(value):
                return True
    return False


def _mismatch_finding(comparison: Comparison, source: Source, gap: float) -> Finding:
    """Describe a fault in forward or backward code, such as "a transposed weight".

    `reset_gate_before_or_after` is another example. The finding is about the operation of the
    second side if the source has one there, and otherwise about that of the first side.
    """
    op = source.nodes[0].op
    title = comparison.trace_of(op).title
    other_title = comparison.other_title(op)
    if source.a is None or source.b is None:
        detail = (
            f"no value under {other_title} equals its result, although all its inputs exist there"
        )
    elif not source.share_inputs:
        detail = (
            f"no value under {other_title} equals its result; the first value there without a"
            f" counterpart is the result of {describe(source.a.op)}"
        )
    elif math.isnan(gap):
        detail = f"from the same values, {other_title} computes {describe(source.a.op)}"
    else:
        detail = (
            f"from the same values, {other_title} computes {describe(source.a.op)}; the results"
            f" differ by {gap:.1e} (relative)"
        )
    advice = f"check what {_user_location(op)} does under {title}: {OTHER_FUNCTION_ADVICE}"
    return _make_pairwise_finding(
        comparison, "mismatch", op, gap, detail + _describe_effect(comparison), advice
    )


def _uncertain_finding(comparison: Comparison, source: Source, gap: float) -> Finding:
    """Describe different results of an operation without an exact float64 reference.

    The finding is a mismatch if both sides use the same kernel and the difference exceeds what
    rounding explains. Otherwise its kind is `cannot be told`.
    """
    op = source.nodes[0].op
    trace = comparison.trace_of(op)
    has_one_kernel = (
        source.a is not None and source.b is not None and source.a.op.name == source.b.op.name
    )
    inputs = [value for node in source.nodes for value in node.inputs]
    if has_one_kernel and not any(is_infinite(value.sketch) for value in inputs):
        bound = tol.BOUND_SLACK * sum(n.op.max_bound or n.op.bound or 0.0 for n in source.nodes)
        allowed = max(bound, comparison.inexact_tolerance())
        if gap > allowed and op.name not in tol.DISCONTINUOUS_OPERATIONS:
            detail = (
                f"from the same inputs, its result differs by {gap:.1e} (relative) from that under "
                f"{comparison.other_title(op)}; rounding explains {allowed:.1e}"
            )
            advice = f"compare the kernels registered for both settings: {OTHER_FUNCTION_ADVICE}"
            return _make_pairwise_finding(comparison, "mismatch", op, gap, detail, advice)
    reason = trace.without_reference.get(op.name) or next(
        iter(trace.without_reference.values()), "it requests float32"
    )
    detail = (
        f"it, or one of its inputs, has no float64 reference ({reason}), and the recorded numbers"
        " differ"
    )
    return _make_pairwise_finding(
        comparison, "cannot be told", op, gap, detail + _describe_effect(comparison)
    )


def _random_numbers_finding(comparison: Comparison, op: Operation, gap: float) -> Finding:
    """Describe an operation that draws different random numbers on the two sides."""
    draws = f"drew different random numbers from those under {comparison.other_title(op)}"
    devices = {Setting.parse(trace.setting).kind for trace in comparison.traces}
    if op.phase == "backward":
        detail = f"{draws}, in a forward pass that the backward pass recomputes"
        advice = (
            "let checkpointing restore the state of the random number generators:"
            " preserve_rng_state=True"
        )
    elif len(devices) == 1:
        detail = draws
        advice = (
            "draw from a torch.Generator that the step seeds, in the same order and with the same"
            " shapes on both sides"
        )
    else:
        detail = draws
        advice = ""  # the default advice is about different devices
    return _make_pairwise_finding(comparison, "different random numbers", op, gap, detail, advice)


def _unexplained_findings(comparison: Comparison) -> list[Finding]:
    """Return a finding if results differ although no source of the difference was found.

    It is about the result with the largest gap. The list is empty if no such result is paired.
    """
    # Differences of values from outside torch explain the results that follow from them.
    follow_external_values = comparison.graphs[0].following(set(comparison.external_values))
    unexplained = [
        result
        for result in comparison.differing_results
        if result.a and result.b and follow_external_values.isdisjoint(comparison.values(result.a))
    ]
    if not unexplained:
        return []
    result = max(unexplained, key=lambda result: result.gap)
    name = describe(result.representative)
    if all(value.exact for value in comparison.values(result.representative)):
        kind = "cause not found"
        detail = (
            f"{name} differs by {result.gap:.1e} (relative) in float64, although both sides have"
            " every value that leads to it: one side leaves out one of these values, or uses it for"
            " something else"
        )
    else:
        kind = "cannot be told"
        reasons = comparison.trace_of(result.representative).without_reference.values()
        reason = next(iter(reasons), "")
        explanation = f" ({reason})" if reason else ""
        detail = (
            f"{name} has no exact float64 reference{explanation}, and the recorded numbers differ"
            f" by {comparison.recorded_gap(result):.1e} (relative)"
        )
    # The operation that made the result on the second side, if it is known.
    makers = map(comparison.graphs[1].maker.get, comparison.values(result.b))
    op = next((node.op for node in makers if node), result.representative)
    return [_make_pairwise_finding(comparison, kind, op, result.gap, detail)]


def _valid_answer_findings(comparison: Comparison) -> Iterator[Finding]:
    """Yield findings about recorded results that differ although both are correct.

    Examples are `signs_of_singular_vectors` and `largest_among_equals`.
    """
    for a, b in comparison.partners.items():
        # Each pair occurs twice, so only operations of the first side (side 0) are considered.
        if comparison.side_of[a] or a.name not in DEFINITIONS or a.name != b.name:
            continue
        if not _are_within_bounds(a, b):
            continue
        inputs_a, inputs_b = (
            [comparison.trace_of(op).values[name] for name in op.inputs] for op in (a, b)
        )
        input_gap = max(map(comparison.gap, inputs_a, inputs_b), default=0.0)
        gap = max(map(comparison.gap, comparison.values(a), comparison.values(b)), default=0.0)
        if gap > tol.MIN_UNEXPLAINED_DIFFERENCE and input_gap <= tol.SAME_INPUTS_TOLERANCE:
            detail = (
                f"both results satisfy its definition but differ by {gap:.1e} (relative): several"
                " answers are correct"
            )
            yield _make_pairwise_finding(comparison, "another valid answer", b, gap, detail)


# --- making findings ------------------------------------------------------------------------------


def _make_finding(
    comparison: Comparison,
    kind: str,
    op: Operation,
    detail: str,
    advice: str = "",
    *,
    size: float = math.nan,
    has_bound: bool = True,
    is_pairwise: bool = False,
) -> Finding:
    """Make a finding about an operation; the default advice is that of its kind."""
    return Finding(
        kind=kind,
        setting=comparison.trace_of(op).title,
        operation=op.name,
        phase=op.phase,
        module=op.module,
        line=op.line,
        ratio=math.nan if op.ratio is None else op.ratio,
        detail=detail,
        advice=advice or ADVICE[kind],
        size=size,
        has_bound=has_bound,
        op=op,
        is_pairwise=is_pairwise,
    )


def _make_pairwise_finding(
    comparison: Comparison, kind: str, op: Operation, gap: float, detail: str, advice: str = ""
) -> Finding:
    """Make a finding from the comparison of an operation with its counterpart.

    `gap` is the relative difference of their results.
    """
    return _make_finding(comparison, kind, op, detail, advice, size=gap, is_pairwise=True)


def _user_location(op: Operation) -> str:
    """Return where the user finds an operation: its module, or else its line."""
    return op.module or op.line or "the step"


def _advice_on_repetition(comparison: Comparison, op: Operation) -> str:
    """Return advice on how to make an operation deterministic, if that is possible."""
    setting = Setting.parse(comparison.trace_of(op).setting)
    if not hasattr(torch.ops.aten, op.name):
        return (
            "if runs must be reproducible, make its kernel seed what it draws and sum in a fixed"
            " order: deterministic=on affects only the operations of torch"
        )
    if setting.deterministic:
        return (
            "compare settings only over many seeds, with gpulab.verdict: deterministic=on does not"
            " affect it"
        )
    return ADVICE["nondeterminism"]


def _advice_on_precision(comparison: Comparison, op: Operation) -> str:
    """Return advice on how to compute an operation in float32, depending on what prevents it."""
    setting = Setting.parse(comparison.trace_of(op).setting)
    is_convolution = op.name.startswith("convolution")
    place = "this line" if op.line else op.module or "the loss"
    if op.format == FLUSHED:
        return (
            "denormals=on, or torch.set_flush_denormal(False), keeps them; or scale the numbers up"
            " before this line"
        )
    # The gradient of a conversion to float32 is itself a conversion.
    is_of_converted = op.name == "_to_copy" and op.phase == "backward"
    if is_of_converted and op.dtype in (setting.autocast, setting.precision):
        return (
            f"no change is needed here: {setting} rounds what comes before {place} to {op.dtype};"
            " keep that in float32 as well"
        )
    if op.dtype in tol.SHORT_FORMATS and setting.autocast == op.dtype:
        protection = f"torch.autocast({setting.kind!r}, enabled=False) around {place}"
        conversion = ".float() on its inputs and `backward` outside autocast"
        return f"{setting} requests it; {protection}, with {conversion}, keeps it in float32"
    if op.name == "_to_copy" and setting.precision == op.dtype:
        return f"{setting} requests it; if it matters, leave out the conversion in {place}"
    if op.dtype in tol.SHORT_FORMATS and setting.precision == op.dtype:
        protection = f".float() on all inputs of {place}, including parameters"
        return f"{setting} requests it; if it matters, {protection}, keeps it in float32"
    if op.dtype in tol.SHORT_FORMATS:
        return f"look for autocast or .to(torch.{op.dtype}) if float32 was meant"
    if op.has_rounded_factors and op.format in (setting.autocast, setting.precision):
        return (
            f"no change is needed here: {setting} rounds what comes before {place} to {op.format};"
            " keep that in float32 as well"
        )
    if op.has_rounded_factors:
        return (
            f"look for what rounds to {op.format} before this line: an emulation, or a cast to"
            f" {op.format} and back"
        )
    if setting.emulated:
        place = "`backward`, in a function step," if op.phase == "backward" else place
        return (
            f"{setting} requests it; gpulab.float32_products() around {place} keeps it in float32"
        )
    if setting.kind == "cuda":
        backend = "cudnn" if is_convolution or op.name.startswith("_cudnn") else "cuda.matmul"
        return f"tf32=off, or torch.backends.{backend}.allow_tf32 = False, computes it in float32"
    product_type = "conv" if is_convolution else "matmul"
    return f'torch.backends.mkldnn.{product_type}.fp32_precision = "ieee" computes it in float32'
