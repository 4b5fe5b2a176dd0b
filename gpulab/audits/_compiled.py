"""The audit of a compiled network: its results, and those of each module alone, beside the network
as it is written.

Compiled code has no operations that could be paired. Its values can be seen at the end of the step,
and at the border of every module that is compiled by itself. So the whole step is compared first;
where it is wrong, each module is done alone with the inputs and the output gradients that it had,
from the innermost outwards.
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

NUDGES = 2  # how often the numbers that a step begins with are moved: one lucky draw may cancel
SHORT_NUDGES = (
    4  # the same in bfloat16 and float16, where they are moved less and so count for less each
)
FEW_NUMBERS = 64  # the norm of fewer numbers varies much from draw to draw
NO_REFERENCE_PREFIX = "There was no float64 reference:"
MIN_DIGITLESS_MOVE = (
    0.5  # a result that roundings move by this much of its size has no digit that could be compared
)
KEEP_UNCOMPILED_ADVICE = (
    "keep it uncompiled meanwhile, by torch.compiler.disable, and show the compiler's developers"
    " this module (where an nn.Sequential calls it, that is not compiled either)"
)


@dataclass(frozen=True)
class ResultComparison:
    """A step under a setting that compiles, beside the same without, and float64.

    Attributes:
        table: A row for each result; see `CompiledAudit.table`.
        graphs: How many graphs the compiler made of it.
        no_reference: Why there was no float64 reference, as a sentence; empty where there was one.

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
        """Whether a result is wrong."""
        return bool(self.table.wrong.any())

    @property
    def worst(self) -> pd.Series:
        """The result that is furthest from what roundings explain; what the forward pass makes
        before gradients.
        """
        order = self.table.assign(
            backward=self.table.result.str.startswith("gradient"),
            ratio=(self.table.difference / self.table.tolerance).fillna(math.inf),
        )
        return order.sort_values(
            ["wrong", "backward", "ratio"], ascending=[False, True, False]
        ).iloc[0]


class CompiledAudit(AnswerPage):
    """What `audit` returns where a setting compiles: which results are wrong, and which module
    makes them so.

    `print` says it. The first finding is about the smallest module that is wrong when it is
    compiled alone.

    Attributes:
        compared: The results of the whole step, with what the compiler made of it.
        table: A row for each result of the step: the loss, outputs, gradients and buffers. All
            relative to its size. `result`; the `difference` that the compiler makes; how far it is
            from float64 compiled (`error`) and not (`plain_error`); how far roundings lead
            (`tolerance`); and whether it is `wrong`, which it is where no rounding explains the
            difference, and the one without the compiler is nearer to float64. `finite` says whether
            all its numbers are finite without the compiler. Where the step cannot be done in
            float64, both errors are NaN, and what no rounding explains is `wrong`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> step = gl.Step(torch.nn.Linear(4, 2), torch.ones(3, 4))
        >>> gl.audit(step, "cpu", "cpu:compile=aot_eager", progress=False).kind
        'rounding'
    """

    def __init__(
        self, plain: Setting, compiled: Setting, findings: list[Finding], compared: ResultComparison
    ) -> None:
        self.titles = (str(plain), str(compiled))
        self.findings = findings
        self.compared = compared
        self.table = compared.table
        self.passports = (passport(), passport())

    @property
    def headline(self) -> str:
        """The two settings, what was found between them, and what was looked at."""
        kinds = Counter(finding.kind for finding in self.findings if finding.kind != "rounding")
        found = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        alike = (
            "all is well: rounding alone"
            if self.table.difference.any()
            else "identical to the last bit"
        )
        n_graphs = self.compared.graphs
        graphs = "It made 1 graph." if n_graphs == 1 else f"It made {n_graphs} graphs."
        compared = f"{len(self.table)} results were compared"
        beginning = f"{self.titles[0]} against {self.titles[1]}: {found or alike}."
        if self.compared.no_reference:
            return f"{beginning} {compared}. {graphs} {self.compared.no_reference}"
        error, plain_error = self.table.error, self.table.plain_error
        nearer, further = (error < plain_error).sum(), (error > plain_error).sum()
        return (
            f"{beginning} {compared}; with the compiler {nearer} of them are nearer to float64, and"
            f" {further} further away. {graphs}"
        )

    def _rows(self) -> Rows:
        return result_rows(self.table)


def audit_compiled(
    step: object, plain: Setting, compiled: Setting, progress: bool = True
) -> CompiledAudit:
    """Audit a step under a setting that compiles against the same setting without; see `audit`.

    Raises:
        UsageError: For a step that is not a `Step`, and for settings that differ in more than
            `compile`.
        GpulabError: Where the compiler fails, or compiles nothing.
    """
    if not isinstance(step, Step):
        raise UsageError(
            "a compiled step has to be a gpulab.Step(model, batch, loss): a function hides its"
            " network"
        )
    if replace(compiled, compile=None) != plain:
        raise UsageError(
            f"{plain} against {compiled}: expected one setting without compile=… and with it; what"
            f" else differs is told by an audit of {plain} against"
            f" {replace(compiled, compile=None)}"
        )
    step = replace(step, model=_torch_internals.original_module(step.model))
    with Progress(unit="module", leave=False, disable=not progress) as bar:
        whole = compare_compiled(step, plain, compiled)
        if not whole.graphs:
            name = type(step.model).__name__
            raise GpulabError(
                f"nothing of {name} was compiled; TORCH_LOGS=graph_breaks in the environment"
                " says why"
            )
        findings = list(_whole_step_findings(step, whole, plain, compiled))
        if whole.wrong:
            findings = [*_wrong_module_findings(step, whole, plain, compiled, bar), *findings]
    detail = (
        "of the result that comes nearest to what rounding explains,"
        f" {_describe_worst(whole.worst)}"
    )
    rounding = _make_finding("rounding", str(compiled), None, detail, size=whole.worst.difference)
    return CompiledAudit(plain, compiled, findings or [rounding], whole)


def compare_compiled(step: Step, plain: Setting, compiled: Setting) -> ResultComparison:
    """Do a step, or a module alone, as it is written, compiled, and in float64, and compare all
    results.

    How far roundings lead is measured: by doing it again, as it is written, from numbers that are
    each moved by some roundings, and by how far it is from float64 anyway. Where it cannot be done
    in float64, the first has to do.

    Args:
        step: What is done.
        plain: The setting without `compile`.
        compiled: The same with it.

    Raises:
        GpulabError: Where the compiler fails, and where the step fails under either setting.
    """
    written = execute(step, plain).results
    without_tf32 = replace(plain, tf32=False) if plain.kind == "cuda" else plain
    others = written if without_tf32 == plain else execute(step, without_tf32).results
    # A GPU that may use TF32 need not do so.
    uses_tf32 = any(not torch.equal(others[name], result) for name, result in written.items())
    draws = range(1, 1 + (SHORT_NUDGES if uses_short_format(plain) else NUDGES))
    nudged = [execute(step, plain if uses_tf32 else without_tf32, draw).results for draw in draws]
    exact, no_reference = _float64_reference(step, plain, written, nudged)
    _torch_internals.forget_compiled_graphs()
    with _uncompiled_random_numbers():
        found = execute(step, compiled).results
    graphs = _torch_internals.compiled_graph_count()
    missing = to_float64_device(torch.full((), math.nan, device=plain.device))
    with plain.apply():
        unit = rounding_unit(plain) if uses_short_format(plain) else None
    rows = []
    for name in sorted(written.keys() | found.keys()):
        y, z, *moved = (results.get(name, missing) for results in (written, found, *nudged))
        rows.append(
            {
                "result": name,
                **_compare_result(
                    None if exact is None else exact.get(name, missing), y, z, moved, unit
                ),
            }
        )
    # With the columns, for a module that makes no numbers, such as a mask.
    table = pd.DataFrame(
        rows,
        columns=["result", "difference", "error", "plain_error", "tolerance", "wrong", "finite"],
    )
    return ResultComparison(table, graphs, no_reference)


def _float64_reference(
    step: Step, plain: Setting, written: NamedTensors, nudged: list[NamedTensors]
) -> tuple[NamedTensors | None, str]:
    """The results in float64, from the numbers as the setting rounds them; or None, and a
    sentence that says why.
    """
    setting = Setting(plain.device if plain.kind in FLOAT64_DEVICES else "cpu", precision="float64")
    try:
        exact = execute(step, setting, first_rounded_to=plain.dtype).results
    except GpulabError as error:
        return (
            None,
            f"{NO_REFERENCE_PREFIX} {_explain_failure(error, find_failing_request(step, setting))}",
        )
    if not _is_valid_reference(exact, written, nudged):
        return (
            None,
            (
                f"{NO_REFERENCE_PREFIX} in float64 the step computes something else, further away"
                " than roundings lead, as where it draws other random numbers."
            ),
        )
    return exact, ""


def _explain_failure(error: GpulabError, request: Request | None) -> str:
    """Why a step cannot be done in float64, and how to write it so that it can.

    >>> request = Request(torch.float32, "net.py:12: x.float()", "head", is_made=True)
    >>> _explain_failure(UsageError("expected Double but found Float."), request).partition(
    ...     " Take"
    ... )[0]
    'expected Double but found Float. net.py:12: x.float() (in head) asks for float32.'
    """
    sentences = f"{str(error).removesuffix('.')}."
    if request is None:
        return sentences
    in_this_line = bool(request.line) and request.line in sentences
    sentences += f" In this line {request._replace(line='')}." if in_this_line else f" {request}."
    if request.is_made:
        sentences += (
            " Take the format from the inputs (x.dtype) or the weights, or from setting.dtype in a"
            " step that is a function, and there is one."
        )
    return sentences


def _is_valid_reference(
    exact: NamedTensors, written: NamedTensors, nudged: list[NamedTensors]
) -> bool:
    """Whether the result in float64 can serve as the reference, judged by the loss, or the outputs
    of a module.

    It cannot where these are further from it than `MAX_NUDGE` of their size and than any movement
    of the inputs has led, as when a GPU draws other random numbers in float64.

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
    names = [name for name in written if name == "loss"] or [
        name for name in written if name.startswith("output")
    ]
    for name in names:
        moves = [float((moved[name] - written[name]).norm()) for moved in nudged]
        error, size = float((written[name] - exact[name]).norm()), float(exact[name].norm())
        if not (math.isfinite(error) and error > max(MAX_NUDGE * size, *moves)):
            return True
    return not names


def _compare_result(
    exact: Tensor | None,
    written: Tensor,
    found: Tensor,
    nudged: list[Tensor],
    unit: float | None = None,
) -> dict[str, float]:
    """How far a result is from float64 and from itself without the compiler; a NaN that both have
    is no difference.

    Args:
        exact: The result in float64, if there is a reference.
        written: The result without the compiler.
        found: The result with it.
        nudged: The results from numbers that were moved.
        unit: One rounding of bfloat16 or float16, where the step computes in these.

    >>> numbers = [torch.tensor([number]) for number in (2.0, 2.5, 4.0, 2.75)]
    >>> list(_compare_result(None, *numbers[1:3], nudged=numbers[3:]))
    ['difference', 'error', 'plain_error', 'tolerance', 'wrong', 'finite']
    >>> list(_compare_result(None, *numbers[1:3], nudged=numbers[3:]).values())
    [0.6, nan, nan, 0.2, True, True]
    >>> list(_compare_result(*numbers[:3], nudged=numbers[3:], unit=2**-8).values())
    [0.75, 1.0, 0.25, 0.5, True, True]
    """
    finite = bool(written.isfinite().all())
    if torch.equal(written.isnan(), found.isnan()):
        written, found, *nudged = (tensor.nan_to_num() for tensor in (written, found, *nudged))
        exact = None if exact is None else exact.nan_to_num()
    size = float((written if exact is None else exact).norm()) or 1.0

    def apart(x: Tensor, y: Tensor | None) -> float:
        return math.nan if y is None else float((x - y).norm()) / size

    row = {
        "difference": apart(found, written),
        "error": apart(found, exact),
        "plain_error": apart(written, exact),
    }
    moves = [apart(tensor, written) for tensor in nudged]
    plain_error = None if exact is None else row["plain_error"]
    tolerance = _tolerance(plain_error, moves, unit, has_few_numbers=written.numel() < FEW_NUMBERS)
    nearer = exact is not None and (
        row["error"] <= row["plain_error"]
        or (math.isnan(row["plain_error"]) and math.isfinite(row["error"]))
    )
    wrong = not (row["difference"] <= tolerance or nearer)
    return row | {"tolerance": tolerance, "wrong": wrong, "finite": finite}


def _tolerance(
    plain_error: float | None, moves: list[float], unit: float | None, has_few_numbers: bool = False
) -> float:
    """How far roundings lead a result away from itself without the compiler, relative to its size.

    In float32 a correct result may be `MAX_ERROR_RATIO` times as far from float64 as the one
    without the compiler is. That many roundings of bfloat16 or float16 would excuse anything. There
    the two results make roundings of the same size, so each may be as far from float64 as the
    other: the tolerance is twice the error without the compiler, twice one rounding of the result,
    or as far as one rounding of every number that the step begins with has led. That is twice as
    far for a result of few numbers, and if there is no float64 reference. A result that has no
    digit left, such as the gradient of a bias before a batch normalisation, which is zero, is
    treated as in float32.

    Args:
        plain_error: How far the result without the compiler is from float64; None without a
            reference.
        moves: How far moving the numbers has led.
        unit: One rounding of bfloat16 or float16, where the step computes in these; else None.
        has_few_numbers: Whether the result has less than `FEW_NUMBERS` numbers.

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
        # Twice, since where one number crosses an edge, the compiler's difference may be that very
        # crossing.
        return 2 * max(MAX_ERROR_RATIO * tol.FLOAT32_ROUNDOFF, MAX_ERROR_RATIO * error, *moves)
    if max(error, *moves) >= MIN_DIGITLESS_MOVE:
        return 2 * MAX_ERROR_RATIO * max(error, *moves)
    furthest = max(moves) * (2 if has_few_numbers or plain_error is None else 1)
    return max(2 * unit, 2 * error, furthest)


@contextlib.contextmanager
def _uncompiled_random_numbers(wanted: bool = True) -> Iterator[None]:
    """Have Inductor draw random numbers as uncompiled code does, so that all else can be
    compared.
    """
    torch.compiler.reset()  # what is compiled already draws as it does
    with _torch_internals.uncompiled_random_numbers(wanted):
        yield


def _whole_step_findings(
    step: Step, whole: ResultComparison, plain: Setting, compiled: Setting
) -> Iterator[Finding]:
    """What the whole step shows: results that are no numbers, or were drawn otherwise."""
    if not whole.table.finite.all():
        names = _shorten_list(list(whole.table.result[~whole.table.finite]))
        detail = (
            f"{names}: without the compiler; an audit of {plain} against another device or number"
            " of threads says why"
        )
        yield _make_finding("not finite", f"{plain} and {compiled}", step.model, detail)
    if compiled.compile == "inductor" and not _torch_internals.draws_as_uncompiled():
        yield from _random_numbers_findings(step, whole, plain, compiled)


def _random_numbers_findings(
    step: Step, whole: ResultComparison, plain: Setting, compiled: Setting
) -> Iterator[Finding]:
    """The finding that Inductor draws different random numbers: other states of generators, or
    other results.

    The states show it however small its effect is. On a GPU they are counts, which may be equal by
    chance. There the results are further apart than roundings lead, and than they are where
    Inductor draws as uncompiled code does.
    """
    with _uncompiled_random_numbers(False):
        written, found = (execute(step, setting) for setting in (plain, compiled))
    known = whole.table.set_index("result")
    differences: dict[str, float] = {}
    for name in written.results.keys() & found.results.keys():
        size = float(written.results[name].norm()) or 1.0
        differences[name] = float((found.results[name] - written.results[name]).norm()) / size
    are_apart = any(
        difference > max(known.tolerance[name], 2 * known.difference[name])
        for name, difference in differences.items()
    )
    if found.random_state != written.random_state or are_apart:
        detail = (
            "draws different random numbers from uncompiled code with the same seed: the loss"
            f" differs by {differences['loss']:.1e} (relative)"
        )
        advice = (
            "nothing, unless runs must have the same random numbers:"
            " torch._inductor.config.fallback_random = True draws them as uncompiled code does, and"
            " all else was compared with it"
        )
        yield _make_finding("different random numbers", str(compiled), step.model, detail, advice)


def _wrong_module_findings(
    step: Step, whole: ResultComparison, plain: Setting, compiled: Setting, bar: Progress
) -> Iterator[Finding]:
    """The innermost modules that are wrong when they are compiled alone; or that none is."""
    calls = module_calls(step, plain)
    alike: dict[tuple[object, ...], list[ModuleCall]] = {}
    for call in calls:
        alike.setdefault(call.signature, []).append(call)
    trace = record(step, plain, progress=False)  # for the lines
    bar.total = len(alike)
    wrong: list[str] = []
    untried: list[str] = []
    for call, *others in alike.values():
        bar.update()
        if any(call.contains(name) for name in wrong):
            continue  # what is around a wrong module is wrong as well
        try:
            alone = compare_compiled(call, plain, compiled)
        except GpulabError as error:
            untried.append(f"{call.name or 'the network'} ({error})")
            continue
        if alone.wrong:
            wrong.append(call.name)
            inner = [
                other.name for other in calls if other is not call and call.contains(other.name)
            ]
            details = [
                _describe_worst(alone.worst),
                *_explain_wrong_module(call, inner, plain, compiled),
            ]
            details += (
                [alone.no_reference.rstrip(".")]
                if alone.no_reference and not whole.no_reference
                else []
            )
            details += [f"{len(others)} more of this kind were not tried"] if others else []
            phase = "backward" if alone.worst.result.startswith("gradient") else "forward"
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
                size=alone.worst.difference,
            )
    if not wrong:
        detail = (
            f"{_describe_worst(whole.worst)}; of each kind of module the first is right when it is"
            " compiled alone"
        )
        detail += (
            f", except {len(untried)} that could not be tried: {_shorten_list(untried)}"
            if untried
            else ""
        )
        yield _make_finding(
            "cause not found",
            str(compiled),
            step.model,
            detail,
            KEEP_UNCOMPILED_ADVICE,
            size=whole.worst.difference,
        )


def _explain_wrong_module(
    call: ModuleCall, inner: list[str], plain: Setting, compiled: Setting
) -> Iterator[str]:
    """Which part of the compiler makes a module wrong, and which modules inside have to be
    compiled with it.
    """
    if compiled.compile != "aot_eager":
        if compare_compiled(call, plain, replace(compiled, compile="aot_eager")).wrong:
            yield "aot_eager is wrong, too, so it comes from decompositions or functionalisation"
        else:
            yield f"aot_eager is right, so it comes from the code that {compiled.compile} makes"
    if inner:
        outermost = [
            name for name in inner if not any(name.startswith(f"{other}.") for other in inner)
        ]
        together = _find_needed_modules(call, outermost, plain, compiled)
        compiled_with = (
            f"only with {_shorten_list(together)} compiled in it"
            if together
            else "so it is in its own lines"
        )
        yield f"no module inside is wrong alone, {compiled_with}"


def _find_needed_modules(
    call: ModuleCall, inner: list[str], plain: Setting, compiled: Setting
) -> list[str]:
    """The modules inside of a wrong one that have to be compiled with it for it to be wrong,
    found by halving them.
    """

    def is_wrong(kept: Sequence[str]) -> bool:
        with contextlib.ExitStack() as stack:
            for name in set(inner) - set(kept):
                module = call.model.get_submodule(name.removeprefix(f"{call.name}."))
                stack.callback(delattr, module, "forward")
                module.forward = torch.compiler.disable(module.forward)
            return compare_compiled(call, plain, compiled).wrong

    kept, size = inner, max(1, len(inner) // 2)
    while size and kept:
        parts = ([*kept[:start], *kept[start + size :]] for start in range(0, len(kept), size))
        fewer = next((part for part in parts if is_wrong(part)), None)
        kept, size = (kept, size // 2) if fewer is None else (fewer, min(size, len(fewer)))
    return kept


def _describe_worst(worst: pd.Series) -> str:
    if math.isnan(worst.difference):
        return f"its {worst.result} is NaN or missing on one side alone"
    error = "" if math.isnan(worst.error) else f", and {worst.error:.1e} from float64"
    return (
        f"its {worst.result} is {worst.difference:.1e} (relative) from the one without the"
        f" compiler{error}; roundings lead to {worst.tolerance:.1e}"
    )


def _shorten_list(names: list[str]) -> str:
    """Three names, and how many more there are.

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
    operation = "the step" if module is None else type(module).__name__
    advice = advice or ADVICE[kind]
    return Finding(kind, setting, operation, phase, name, line, math.nan, detail, advice, size)
