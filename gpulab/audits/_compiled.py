"""Audit a compiled network: compare its results, and those of each module, with uncompiled ones.

Compiled code has no operations that could be paired. Its values are visible only at the end of the
step and at the boundaries of separately compiled modules. So the whole step is compared first. If
it is wrong, each module is compiled and executed alone, with the inputs and output gradients that
it had in the step. Inner modules come before the modules that contain them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor, nn

from gpulab import _torch_internals
from gpulab.audits import _tolerances as tol
from gpulab.audits._count_sketch import FLOAT64_DEVICES, to_float64_device
from gpulab.audits._findings import ADVICE, Finding
from gpulab.audits._float64_failures import Request
from gpulab.audits._module_isolation import (
    MAX_ERROR_RATIO,
    MAX_NUDGE,
    ModuleCall,
    NamedTensors,
    execute,
    find_failing_request,
    module_calls,
    rounding_unit,
    uses_short_format,
)
from gpulab.audits._page import AnswerPage, Rows, result_rows
from gpulab.audits._recording import record
from gpulab.errors import GpulabError, UsageError
from gpulab.passports import passport
from gpulab.report import Progress
from gpulab.settings import Setting
from gpulab.steps import Step

# The number of random perturbations of a step's initial numbers. The effects of a single
# perturbation may cancel by chance.
N_NUDGES = 2
# In bfloat16 and float16, perturbations are smaller in units of a rounding, so more are needed.
N_SHORT_FORMAT_NUDGES = 4
MIN_STABLE_NORM_SIZE = 64  # the norm of fewer numbers varies much between perturbations
NO_REFERENCE_PREFIX = "There was no float64 reference:"
# If perturbations change a result by this share of its size, it has no digit that can be compared.
MIN_DIGITLESS_MOVE = 0.5
KEEP_UNCOMPILED_ADVICE = (
    "leave it uncompiled for now, with torch.compiler.disable, and report this module to the"
    " compiler's developers (an nn.Sequential that calls it is not compiled either)"
)


@dataclass(frozen=True)
class ResultComparison:
    """The results of a step compiled, uncompiled and in float64.

    Attributes:
        table: A row for each result; see `CompiledAudit.table`.
        graphs: The number of graphs that the compiler made from the step.
        no_reference: A sentence that explains why there was no float64 reference; empty if there
            was one.

    >>> results = pd.DataFrame(
    ...     {"result": ["gradient of w", "loss", "output"], "difference": [1.0, 0.2, 0.3]}
    ... )
    >>> ResultComparison(results.assign(tolerance=0.1, wrong=True), graphs=1).worst.result
    'output'
    >>> ResultComparison(
    ...     results.assign(tolerance=[0.1, 1.0, 1.0], wrong=[True, False, False]), graphs=1
    ... ).worst.result
    'gradient of w'
    """

    table: pd.DataFrame
    graphs: int
    no_reference: str = ""

    @property
    def wrong(self) -> bool:
        """Whether any result is wrong."""
        return bool(self.table.wrong.any())

    @property
    def worst(self) -> pd.Series:
        """The most suspicious result: wrong results first, then forward results, then by ratio.

        The ratio is the difference divided by the tolerance.
        """
        order = self.table.assign(
            backward=self.table.result.str.startswith("gradient"),
            ratio=(self.table.difference / self.table.tolerance).fillna(math.inf),
        )
        return order.sort_values(
            ["wrong", "backward", "ratio"], ascending=[False, True, False]
        ).iloc[0]


class CompiledAudit(AnswerPage):
    """The result of `audit` for a setting with `compile`: wrong results, and the faulty modules.

    `print` shows the findings. The first finding is about the smallest module that is wrong when it
    is compiled alone.

    Attributes:
        compared: The comparison of the results of the whole step.
        table: A table with a row for each result of the step: the loss, outputs, gradients and
            buffers. The columns are the name (`result`), the `difference` between the compiled and
            the uncompiled result, the distance of the compiled result (`error`) and of the
            uncompiled result (`plain_error`) from float64, the largest difference that rounding
            explains (`tolerance`), whether the compiled result is `wrong`, and whether all numbers
            of the uncompiled result are `finite`. Distances are relative to the size of the result.
            A result is wrong if its difference exceeds the tolerance and the uncompiled result is
            nearer to float64. If the step cannot be executed in float64, both errors are NaN, and
            every result with a difference beyond the tolerance is wrong.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> step = gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4))
        >>> gl.audit(step, "cpu", "cpu:compile=aot_eager", progress=False).kind
        'rounding'
    """

    def __init__(
        self,
        uncompiled: Setting,
        compiled: Setting,
        findings: list[Finding],
        comparison: ResultComparison,
    ) -> None:
        self.titles = (str(uncompiled), str(compiled))
        self.findings = findings
        self.compared = comparison
        self.table = comparison.table
        self.passports = (passport(), passport())

    @property
    def headline(self) -> str:
        """The two settings, the findings, and what was compared."""
        kinds = Counter(finding.kind for finding in self.findings if finding.kind != "rounding")
        counted_kinds = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        agreement = (
            "all is well: rounding alone"
            if self.table.difference.any()
            else "identical to the last bit"
        )
        n_graphs = self.compared.graphs
        graphs = "1 graph" if n_graphs == 1 else f"{n_graphs} graphs"
        graph_count = f"The compiler made {graphs}."
        coverage = f"{len(self.table)} results were compared"
        beginning = f"{self.titles[0]} against {self.titles[1]}: {counted_kinds or agreement}."
        if self.compared.no_reference:
            return f"{beginning} {coverage}. {graph_count} {self.compared.no_reference}"
        error = self.table.error
        plain_error = self.table.plain_error
        n_nearer = (error < plain_error).sum()
        n_further = (error > plain_error).sum()
        return (
            f"{beginning} {coverage}; with the compiler {n_nearer} of them are nearer to float64,"
            f" and {n_further} further away. {graph_count}"
        )

    def _rows(self) -> Rows:
        return result_rows(self.table)


def audit_compiled(
    step: object, uncompiled: Setting, compiled: Setting, progress: bool = True
) -> CompiledAudit:
    """Audit a compiled step against the uncompiled one; see `audit`.

    Raises:
        UsageError: If the step is not a `Step`, or the settings differ in more than `compile`.
        GpulabError: If the compiler fails, or compiles nothing.
    """
    if not isinstance(step, Step):
        raise UsageError(
            "a compiled step has to be a gpulab.Step(model, batch, loss), because the network of a"
            " function cannot be found"
        )
    if replace(compiled, compile=None) != uncompiled:
        raise UsageError(
            f"{uncompiled} against {compiled}: expected the same setting without and with"
            f" compile=…; for the other differences, audit {uncompiled} against"
            f" {replace(compiled, compile=None)}"
        )
    step = replace(step, model=_torch_internals.original_module(step.model))
    with Progress(unit="module", leave=False, disable=not progress) as bar:
        whole_step = compare_compiled(step, uncompiled, compiled)
        if not whole_step.graphs:
            name = type(step.model).__name__
            raise GpulabError(
                f"no part of {name} was compiled; set TORCH_LOGS=graph_breaks in the environment"
                " to see why"
            )
        step_findings = list(_whole_step_findings(step, whole_step, uncompiled, compiled))
        module_findings = (
            list(_wrong_module_findings(step, whole_step, uncompiled, compiled, bar))
            if whole_step.wrong
            else []
        )
        findings = [*module_findings, *step_findings]
    detail = (
        "the result that comes closest to the limit of what rounding explains:"
        f" {_describe_worst(whole_step.worst)}"
    )
    rounding = _make_finding(
        "rounding", str(compiled), None, detail, size=whole_step.worst.difference
    )
    return CompiledAudit(uncompiled, compiled, findings or [rounding], whole_step)


def compare_compiled(step: Step, uncompiled: Setting, compiled: Setting) -> ResultComparison:
    """Execute a step or module uncompiled, compiled and in float64, and compare all results.

    The tolerance is measured in two ways: the uncompiled step is repeated with initial numbers that
    are perturbed by a few roundings, and its results are compared with float64. If the step cannot
    be executed in float64, the tolerance follows from the perturbations alone.

    Args:
        step: The step or module.
        uncompiled: The setting without `compile`.
        compiled: The same setting with `compile`.

    Raises:
        GpulabError: If the compiler fails, or the step fails under either setting.
    """
    uncompiled_results = execute(step, uncompiled).results
    without_tf32 = replace(uncompiled, tf32=False) if uncompiled.kind == "cuda" else uncompiled
    results_without_tf32 = (
        uncompiled_results if without_tf32 == uncompiled else execute(step, without_tf32).results
    )
    # A setting may allow TF32 without the GPU using it. TF32 is used if results depend on it.
    uses_tf32 = any(
        not torch.equal(results_without_tf32[name], result)
        for name, result in uncompiled_results.items()
    )
    n_draws = N_SHORT_FORMAT_NUDGES if uses_short_format(uncompiled) else N_NUDGES
    nudged_setting = uncompiled if uses_tf32 else without_tf32
    nudged_results = [execute(step, nudged_setting, draw).results for draw in range(1, n_draws + 1)]
    exact, no_reference = _float64_reference(step, uncompiled, uncompiled_results, nudged_results)
    _torch_internals.forget_compiled_graphs()
    with _uncompiled_random_numbers():
        compiled_results = execute(step, compiled).results
    graphs = _torch_internals.compiled_graph_count()
    # NaN stands for a result that one execution does not have.
    missing = to_float64_device(torch.full((), math.nan, device=uncompiled.device))
    with uncompiled.apply():
        unit = rounding_unit(uncompiled) if uses_short_format(uncompiled) else None
    rows = []
    for name in sorted(uncompiled_results.keys() | compiled_results.keys()):
        uncompiled_result, compiled_result, *nudged = (
            results.get(name, missing)
            for results in (uncompiled_results, compiled_results, *nudged_results)
        )
        exact_result = None if exact is None else exact.get(name, missing)
        comparison = _compare_result(exact_result, uncompiled_result, compiled_result, nudged, unit)
        rows.append({"result": name, **comparison})
    # The columns are named explicitly because a module without numeric results has no rows.
    table = pd.DataFrame(
        rows,
        columns=["result", "difference", "error", "plain_error", "tolerance", "wrong", "finite"],
    )
    return ResultComparison(table, graphs, no_reference)


def _float64_reference(
    step: Step,
    uncompiled: Setting,
    uncompiled_results: NamedTensors,
    nudged_results: list[NamedTensors],
) -> tuple[NamedTensors | None, str]:
    """Compute the results in float64, starting from the numbers as the setting rounds them.

    Returns:
        The results and an empty string. If there is no valid reference, None and a sentence that
        explains why.
    """
    setting = Setting(
        uncompiled.device if uncompiled.kind in FLOAT64_DEVICES else "cpu", precision="float64"
    )
    try:
        exact = execute(step, setting, first_rounded_to=uncompiled.dtype).results
    except GpulabError as error:
        explanation = _explain_failure(error, find_failing_request(step, setting))
        return None, f"{NO_REFERENCE_PREFIX} {explanation}"
    if not _is_valid_reference(exact, uncompiled_results, nudged_results):
        explanation = (
            "in float64 the step computes something different, further away than rounding errors"
            " can explain, for example because it draws different random numbers."
        )
        return None, f"{NO_REFERENCE_PREFIX} {explanation}"
    return exact, ""


def _explain_failure(error: GpulabError, request: Request | None) -> str:
    """Explain why a step fails in float64, and how to change it so that it does not.

    >>> request = Request(torch.float32, "net.py:12: x.float()", "head", is_made=True)
    >>> _explain_failure(UsageError("expected Double but found Float."), request).partition(
    ...     " Take"
    ... )[0]
    'expected Double but found Float. net.py:12: x.float() (in head) requests float32.'
    """
    sentences = f"{str(error).removesuffix('.')}."
    if request is None:
        return sentences
    in_this_line = bool(request.line) and request.line in sentences
    sentences += f" In this line {request._replace(line='')}." if in_this_line else f" {request}."
    if request.is_made:
        sentences += (
            " Take the format from the inputs (x.dtype) or the weights, or from setting.dtype in a"
            " function step, to get a reference."
        )
    return sentences


def _is_valid_reference(
    exact: NamedTensors, uncompiled_results: NamedTensors, nudged_results: list[NamedTensors]
) -> bool:
    """Return whether the float64 results can be the reference, judged by the loss or the outputs.

    They are invalid if their distance from the uncompiled results exceeds both `MAX_NUDGE` times
    their size and the effect of every perturbation. This happens if a GPU draws different random
    numbers in float64. For a step without a loss, one valid output is enough.

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> [
    ...     _is_valid_reference({"loss": one}, {"loss": two}, [{"loss": nudged}])
    ...     for nudged in (two, -two)
    ... ]
    [False, True]
    >>> _is_valid_reference(
    ...     {"loss": one, "output": one},
    ...     {"loss": two, "output": one},
    ...     [{"loss": two, "output": one}],
    ... )
    False
    """
    outputs = [name for name in uncompiled_results if name.startswith("output")]
    names = ["loss"] if "loss" in uncompiled_results else outputs
    for name in names:
        moves = [
            float((nudged[name] - uncompiled_results[name]).norm()) for nudged in nudged_results
        ]
        error = float((uncompiled_results[name] - exact[name]).norm())
        size = float(exact[name].norm())
        is_beyond_nudges = math.isfinite(error) and error > max(MAX_NUDGE * size, *moves)
        if not is_beyond_nudges:
            return True
    return not names


def _compare_result(
    exact: Tensor | None,
    uncompiled: Tensor,
    compiled: Tensor,
    nudged: list[Tensor],
    unit: float | None = None,
) -> dict[str, float]:
    """Compute a row of the table: a compiled result compared with float64 and the uncompiled one.

    NaN does not count as a difference if both results contain it at the same positions.

    Args:
        exact: The result in float64; None without a reference.
        uncompiled: The result without the compiler.
        compiled: The result with the compiler.
        nudged: The uncompiled results from perturbed initial numbers.
        unit: The unit roundoff if the step computes in bfloat16 or float16; else None.

    >>> numbers = [torch.tensor([number]) for number in (2.0, 2.5, 4.0, 2.75)]
    >>> list(_compare_result(None, *numbers[1:3], nudged=numbers[3:]))
    ['difference', 'error', 'plain_error', 'tolerance', 'wrong', 'finite']
    >>> list(_compare_result(None, *numbers[1:3], nudged=numbers[3:]).values())
    [0.6, nan, nan, 0.2, True, True]
    >>> list(_compare_result(*numbers[:3], nudged=numbers[3:], unit=2**-8).values())
    [0.75, 1.0, 0.25, 0.5, True, True]
    """
    is_finite = bool(uncompiled.isfinite().all())
    if torch.equal(uncompiled.isnan(), compiled.isnan()):
        uncompiled, compiled, *nudged = (
            tensor.nan_to_num() for tensor in (uncompiled, compiled, *nudged)
        )
        exact = None if exact is None else exact.nan_to_num()
    size = float((uncompiled if exact is None else exact).norm()) or 1.0

    def relative_gap(x: Tensor, y: Tensor | None) -> float:
        return math.nan if y is None else float((x - y).norm()) / size

    row = {
        "difference": relative_gap(compiled, uncompiled),
        "error": relative_gap(compiled, exact),
        "plain_error": relative_gap(uncompiled, exact),
    }
    moves = [relative_gap(tensor, uncompiled) for tensor in nudged]
    plain_error = None if exact is None else row["plain_error"]
    tolerance = _tolerance(
        plain_error, moves, unit, has_few_numbers=uncompiled.numel() < MIN_STABLE_NORM_SIZE
    )
    # A compiled result that is nearer to float64, or finite instead of NaN, is an improvement.
    is_nearer = exact is not None and (
        row["error"] <= row["plain_error"]
        or (math.isnan(row["plain_error"]) and math.isfinite(row["error"]))
    )
    # A difference that is NaN is not within the tolerance.
    is_within_tolerance = row["difference"] <= tolerance
    is_wrong = not is_within_tolerance and not is_nearer
    return row | {"tolerance": tolerance, "wrong": is_wrong, "finite": is_finite}


def _tolerance(
    plain_error: float | None, moves: list[float], unit: float | None, has_few_numbers: bool = False
) -> float:
    """Compute the relative difference from the uncompiled result that rounding explains.

    In float32, a correct compiled result may be `MAX_ERROR_RATIO` times as far from float64 as the
    uncompiled one.

    In bfloat16 and float16, this factor would accept any result. In these formats both results have
    rounding errors of the same size, so the tolerance is the largest of three numbers: twice the
    error of the uncompiled result, twice the unit roundoff, and the largest effect of a
    perturbation of the initial numbers by one rounding. The third is doubled if the result has few
    numbers or if there is no float64 reference.

    A result without correct digits is treated as in float32. An example is the gradient of a bias
    before a batch normalisation, which is zero except for rounding errors.

    Args:
        plain_error: The distance of the uncompiled result from float64; None without a reference.
        moves: The differences that perturbations of the initial numbers made.
        unit: The unit roundoff if the step computes in bfloat16 or float16; else None.
        has_few_numbers: Whether the result has fewer than `MIN_STABLE_NORM_SIZE` numbers.

    >>> (
    ...     _tolerance(0.0, [0.001], unit=None),
    ...     _tolerance(0.01, [0.03], unit=2**-8),
    ...     _tolerance(None, [0.03], unit=2**-8),
    ... )
    (0.002, 0.03, 0.06)
    >>> _tolerance(1.0, [1.5], unit=2**-8)
    192.0
    """
    error = plain_error or 0.0
    if unit is None:
        # The factor 2 is for results near a discontinuity. The compiled result may cross it while
        # the perturbed results do not.
        return 2 * max(MAX_ERROR_RATIO * tol.FLOAT32_ROUNDOFF, MAX_ERROR_RATIO * error, *moves)
    if max(error, *moves) >= MIN_DIGITLESS_MOVE:
        return 2 * MAX_ERROR_RATIO * max(error, *moves)
    furthest = max(moves) * (2 if has_few_numbers or plain_error is None else 1)
    return max(2 * unit, 2 * error, furthest)


@contextlib.contextmanager
def _uncompiled_random_numbers(use_fallback: bool = True) -> Iterator[None]:
    """Let Inductor draw the same random numbers as uncompiled code, so that results agree."""
    torch.compiler.reset()  # the option has no effect on code that is already compiled
    with _torch_internals.uncompiled_random_numbers(use_fallback):
        yield


def _whole_step_findings(
    step: Step, whole_step: ResultComparison, uncompiled: Setting, compiled: Setting
) -> Iterator[Finding]:
    """Yield findings about the whole step: non-finite results and different random numbers."""
    if not whole_step.table.finite.all():
        names = _shorten_list(list(whole_step.table.result[~whole_step.table.finite]))
        detail = (
            f"{names}: not finite without the compiler either; to find out why, audit {uncompiled}"
            " against another device or number of threads"
        )
        yield _make_finding("not finite", f"{uncompiled} and {compiled}", step.model, detail)
    if compiled.compile == "inductor" and not _torch_internals.draws_as_uncompiled():
        yield from _random_numbers_findings(step, whole_step, uncompiled, compiled)


def _random_numbers_findings(
    step: Step, whole_step: ResultComparison, uncompiled: Setting, compiled: Setting
) -> Iterator[Finding]:
    """Yield a finding if Inductor draws different random numbers from uncompiled code.

    Two criteria are used. Different final states of the random number generators show it even if
    the effect on the results is small. On a GPU, the states only count draws and may be equal by
    chance. Therefore, the finding is also made if a result differs by more than its tolerance, and
    by more than twice the difference that remains when Inductor draws the same numbers.
    """
    with _uncompiled_random_numbers(use_fallback=False):
        uncompiled_run, compiled_run = (
            execute(step, setting) for setting in (uncompiled, compiled)
        )
    comparable_results = whole_step.table.set_index("result")
    differences: dict[str, float] = {}
    for name in uncompiled_run.results.keys() & compiled_run.results.keys():
        size = float(uncompiled_run.results[name].norm()) or 1.0
        differences[name] = (
            float((compiled_run.results[name] - uncompiled_run.results[name]).norm()) / size
        )
    results_differ = any(
        difference
        > max(comparable_results.tolerance[name], 2 * comparable_results.difference[name])
        for name, difference in differences.items()
    )
    if compiled_run.random_state != uncompiled_run.random_state or results_differ:
        detail = (
            "draws different random numbers from uncompiled code with the same seed: the loss"
            f" differs by {differences['loss']:.1e} (relative)"
        )
        advice = (
            "nothing, unless runs must have the same random numbers:"
            " torch._inductor.config.fallback_random = True draws them as uncompiled code does, and"
            " everything else was compared with this option"
        )
        yield _make_finding("different random numbers", str(compiled), step.model, detail, advice)


def _wrong_module_findings(
    step: Step, whole_step: ResultComparison, uncompiled: Setting, compiled: Setting, bar: Progress
) -> Iterator[Finding]:
    """Yield a finding for each innermost module that is wrong when it is compiled alone.

    If no module is wrong alone, the finding states that the cause was not found.
    """
    calls = module_calls(step, uncompiled)
    calls_by_signature: dict[tuple[object, ...], list[ModuleCall]] = {}
    for call in calls:
        calls_by_signature.setdefault(call.signature, []).append(call)
    trace = record(step, uncompiled, progress=False)  # has the lines of the operations
    bar.total = len(calls_by_signature)
    wrong_names: list[str] = []
    untried: list[str] = []
    for call, *similar_calls in calls_by_signature.values():
        bar.update()
        if any(call.contains(name) for name in wrong_names):
            continue  # a module that contains a wrong one is wrong as well
        try:
            isolated = compare_compiled(call, uncompiled, compiled)
        except GpulabError as error:
            untried.append(f"{call.name or 'the network'} ({error})")
            continue
        if isolated.wrong:
            wrong_names.append(call.name)
            inner = [
                candidate.name
                for candidate in calls
                if candidate is not call and call.contains(candidate.name)
            ]
            details = [
                _describe_worst(isolated.worst),
                *_explain_wrong_module(call, inner, uncompiled, compiled),
            ]
            if isolated.no_reference and not whole_step.no_reference:
                details.append(isolated.no_reference.rstrip("."))
            if similar_calls:
                details.append(f"{len(similar_calls)} more modules of this kind were not tried")
            phase = "backward" if isolated.worst.result.startswith("gradient") else "forward"
            line = next(
                (op.line for op in trace.operations if op.line and call.contains(op.module)), ""
            )
            yield _make_finding(
                "mismatch",
                str(compiled),
                call.model,
                "; ".join(details),
                KEEP_UNCOMPILED_ADVICE,
                phase=phase,
                name=call.name,
                line=line,
                size=isolated.worst.difference,
            )
    if not wrong_names:
        detail = (
            f"{_describe_worst(whole_step.worst)}; the first module of each kind is right when it"
            " is compiled alone"
        )
        if untried:
            detail += f", except {len(untried)} that could not be tried: {_shorten_list(untried)}"
        yield _make_finding(
            "cause not found",
            str(compiled),
            step.model,
            detail,
            KEEP_UNCOMPILED_ADVICE,
            size=whole_step.worst.difference,
        )


def _explain_wrong_module(
    call: ModuleCall, inner: list[str], uncompiled: Setting, compiled: Setting
) -> Iterator[str]:
    """Yield clauses that say why a compiled module is wrong.

    They name the stage of the compiler at which the fault occurs, and the inner modules that must
    be compiled for it to occur.

    Args:
        call: A call of the module, which is wrong if it and its inner modules are compiled.
        inner: The names of the modules inside, none of which was found to be wrong by itself.
        uncompiled, compiled: The settings to compare.
    """
    if compiled.compile != "aot_eager":
        if compare_compiled(call, uncompiled, replace(compiled, compile="aot_eager")).wrong:
            yield (
                "aot_eager is wrong as well, so the fault lies in decompositions or"
                " functionalisation"
            )
        else:
            yield f"aot_eager is right, so the fault lies in the code that {compiled.compile} makes"
    if inner:
        outermost = [
            name for name in inner if not any(name.startswith(f"{outer}.") for outer in inner)
        ]
        needed_modules = _find_needed_modules(call, outermost, uncompiled, compiled)
        if needed_modules:
            names = _shorten_list(needed_modules)
            yield f"no module inside is wrong alone, only with {names} compiled in it"
        else:
            yield "no module inside is wrong alone, so the fault lies in its own lines"


def _find_needed_modules(
    call: ModuleCall, inner: list[str], uncompiled: Setting, compiled: Setting
) -> list[str]:
    """Find a small set of inner modules that must be compiled for the outer module to be wrong.

    Groups of modules are left uncompiled, and remain uncompiled if the outer module is still wrong.
    The size of the groups is halved when no group can be removed.
    """

    def is_wrong(compiled_names: Sequence[str]) -> bool:
        """Return whether the outer module is wrong if only these inner modules are compiled."""
        with contextlib.ExitStack() as stack:
            for name in set(inner) - set(compiled_names):
                module = call.model.get_submodule(name.removeprefix(f"{call.name}."))
                # The attribute hides the method of the class until it is deleted.
                stack.callback(delattr, module, "forward")
                module.forward = torch.compiler.disable(module.forward)
            return compare_compiled(call, uncompiled, compiled).wrong

    needed_names = inner
    n_removed = max(1, len(inner) // 2)
    while n_removed and needed_names:
        subsets = (
            [*needed_names[:start], *needed_names[start + n_removed :]]
            for start in range(0, len(needed_names), n_removed)
        )
        smaller_set = next((names for names in subsets if is_wrong(names)), None)
        if smaller_set is None:
            n_removed //= 2
        else:
            needed_names = smaller_set
            n_removed = min(n_removed, len(smaller_set))
    return needed_names


def _describe_worst(worst: pd.Series) -> str:
    """Describe the distance of the most suspicious result from the uncompiled one and float64."""
    if math.isnan(worst.difference):
        return f"its {worst.result} is NaN or missing on only one side"
    error = "" if math.isnan(worst.error) else f", and by {worst.error:.1e} from float64"
    return (
        f"its {worst.result} differs by {worst.difference:.1e} (relative) from the uncompiled"
        f" one{error}; rounding explains {worst.tolerance:.1e}"
    )


def _shorten_list(names: list[str]) -> str:
    """Join the first three names, and append the number of the remaining ones.

    >>> _shorten_list(["a", "b", "c"]), _shorten_list(["a", "b", "c", "d"])
    ('a, b, c', 'a, b, c and 1 more')
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _make_finding(
    kind: str,
    setting: str,
    module: nn.Module | None,
    detail: str,
    advice: str = "",
    *,
    phase: str = "step",
    name: str = "",
    line: str = "",
    size: float = math.nan,
) -> Finding:
    """Make a finding about the step or a module; the default advice is that of its kind."""
    return Finding(
        kind=kind,
        setting=setting,
        operation="the step" if module is None else type(module).__name__,
        phase=phase,
        module=name,
        line=line,
        ratio=math.nan,
        detail=detail,
        advice=advice or ADVICE[kind],
        size=size,
    )
