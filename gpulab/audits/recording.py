"""A training step recorded: done several times, to see what it computes and repeats, and how far roundings lead."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpulab.audits import count_sketch as sk
from gpulab.audits.operations import RESULT, Call, Operation
from gpulab.audits.rounding import FACTORS, SAFETY
from gpulab.audits.steps import PreparedStep, check_step, ready, refused, seeded
from gpulab.audits.tracer import Tracer
from gpulab.audits.traces import Trace, aligned
from gpulab.errors import OverwrittenWarning, UsageError
from gpulab.guards.guards import guard
from gpulab.passports import passport
from gpulab.settings import Setting, arithmetic

SEED = 0  # the random numbers of torch, NumPy and Python begin here in every execution of a step
DRAWS = 2  # how often the roundings are drawn: one lucky draw may cancel
ROUNDOFF = 2.0**-24
UNKNOWN = 2.0**-17  # the error that is granted to a float32 kernel without a twin in float64
IN_TF32 = 2.0**-10  # and to one that may multiply in TF32


def record(
    step: Callable[..., Any],
    setting: Setting | str = "cpu",
    file: str | Path | None = None,
    *,
    reference: Trace | None = None,
    on: str = "cpu",
    label: str = "",
    progress: bool = True,
) -> Trace:
    """Do a step under a setting and note what every operation computed.

    The step is done five times from the same random numbers (torch's, NumPy's and Python's are seeded): twice under
    the setting, to see whether it repeats itself, once in float64, and twice in float64 with every operation's
    result moved at random by what rounding may do to it under the setting, to see how far that leads (Monte Carlo
    arithmetic).

    Args:
        step: a `Step`, or a function that does one training step, backward pass included. It is called
            with the `Setting`, whose `.device` and `.dtype` it puts its tensors on, or, if it takes no
            argument, with these as torch's defaults.
        setting: what it is done under.
        file: where the trace is kept, if anywhere.
        reference: another trace of the step, whose execution in float64 serves again.
        on: the device of the execution in float64; traces for other machines need the CPU's.
        label: what reports call the trace, instead of its setting.
        progress: whether to show a bar.

    Returns:
        A `Trace`; two of them, from two machines, are compared by `audit`.

    Raises:
        UsageError: for a step that is none, or does nothing on floating-point numbers.
        GpulabError: for a setting that cannot run here.

    References:
        D. S. Parker 1997, Monte Carlo arithmetic: exploiting randomness in floating-point arithmetic, UCLA CSD-970002.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.record(lambda setting: torch.ones(3, dtype=setting.dtype).exp(), "cpu:threads=1", progress=False)
        trace of 2 operations under cpu:threads=1
    """
    from gpulab.progress import Progress

    parsed = Setting.parse(setting)
    check_step(step)
    parsed.check()
    if parsed.compile:
        raise UsageError(
            f"setting {setting}: compiled code has no operations to record; gpulab.audit compares its results"
        )
    exact_setting = Setting.parse(f"{on}:precision=float64")
    sketches = dict(reference.sketches) if reference else {}
    with Progress(unit="operation", leave=False, disable=not progress) as bar:
        watched = functools.partial(Tracer, sketches, bar.update)
        first = perform(step, parsed, watched(results_only=True, unwritten=1))
        trace = perform(step, parsed, watched(measured=True))
        bar.total = len(trace.operations) * (1 if reference else 2 + DRAWS)
        if not _results(trace) or _results(trace) != _results(first):
            # Every operation, to see which does not repeat itself; with what the first time was other in new memory
            # where that alone made the results differ.
            first = perform(step, parsed, watched())
            if _results(trace) and _results(trace) == _results(first):
                first = perform(step, parsed, watched(unwritten=1))
        exact = reference.reference if reference else perform(step, exact_setting, watched()).operations
        amounts = _roundings(trace, exact)
        trace.reference = exact
        if reference is None or not _alike(amounts, _roundings(reference, exact)):
            bar.total = bar.n + DRAWS * len(exact)
            shaken = [
                perform(step, exact_setting, watched(change=_shaken(amounts, draw))).operations for draw in range(DRAWS)
            ]
            carried = _carried(exact, shaken, sketches)
        else:
            carried = {
                id(twin): op.carried for op, twin in aligned(reference.operations, exact) if op and twin and op.carried
            }
    for op, twin in aligned(trace.operations, exact):
        if op is not None and twin is not None:
            op.carried = carried.get(id(twin))
    _compare_executions(first, trace)
    trace.label, trace.passport = label, dict(passport())
    trace.sketches = {value: sketches[value] for op in (*trace.operations, *exact) for value in op.values}
    if file is not None:
        trace.save(file)
    return trace


def perform(step: Callable[..., Any], setting: Setting, watcher: Tracer) -> Trace:
    """Do the step once under a setting, watched."""
    with (
        seeded(setting, SEED),
        setting.apply(),
        ready(step, setting) as run,
        _autocast(setting) as formats,
        watcher.results.followed(),
        warnings.catch_warnings(action="ignore", category=OverwrittenWarning),
        guard(on="warn") if watcher.measured else contextlib.nullcontext() as report,
        watcher,
    ):
        watcher.results.restores = not isinstance(run, PreparedStep)
        # Of the hooks of the Tracer.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        try:
            returned = run()
        except (RuntimeError, TypeError) as error:
            raise refused(error, setting, watcher.results.used_modules(run)) from error
        flags = arithmetic()
        watcher.operations += watcher.results.as_operations(returned, watcher.sketches)
    if watcher.measured and not any(
        getattr(torch, op.dtype).is_floating_point for op in watcher.operations if op.phase != RESULT
    ):
        raise UsageError("the step ran no operation of torch on floating-point numbers: there is nothing to compare")
    overwritten = [
        {"operation": f.operation, "line": f"{f.line}: {f.line.text}", "why": f.explanation, "remedy": f.remedy}
        for f in (report.findings if report else [])
    ]
    notes = {"loss": getattr(run, "loss_taken", ""), "autocast": " and ".join(dict.fromkeys(formats))}
    # Torch runs a model as it is written where it is watched.
    notes["compiled"] = "not compiled" * watcher.results.compiled
    notes = {name: words for name, words in notes.items() if words}
    return Trace(str(setting), watcher.operations, [], watcher.sketches, overwritten, arithmetic=flags, notes=notes)


@contextlib.contextmanager
def _autocast(setting: Setting) -> Iterator[list[str]]:
    """Collect the formats that autocast computes in, if any. In float64 it is kept from computing in others."""
    formats: list[str] = []
    allowed, enter, kind = setting.dtype != torch.float64, torch.autocast.__enter__, setting.kind

    def enter_and_note(self: torch.autocast) -> Any:
        if self._enabled:
            formats.append(str(self.fast_dtype).removeprefix("torch."))
        enabled, self._enabled = self._enabled, self._enabled and allowed
        try:
            return enter(self)
        finally:
            self._enabled = enabled

    torch.clear_autocast_cache()  # which holds weights that another execution has cast
    around = torch.is_autocast_enabled(kind)
    torch.autocast.__enter__ = enter_and_note  # type: ignore[method-assign]
    try:
        with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=around):
            yield formats
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


def _results(trace: Trace) -> list[list[str]]:
    return [op.outputs for op in trace.operations if op.phase == RESULT]


def _compare_executions(first: Trace, trace: Trace) -> None:
    """Note which operations did not do again what they had done, of the same inputs, and which had other inputs."""
    if all(op.phase == RESULT for op in first.operations):  # which are the same
        for one in trace.operations:
            one.repeats = None if one.random or one.phase == RESULT else one.steady
        return
    values_made_before, values_made = _values_made(first), _values_made(trace)
    for op, before in aligned(trace.operations, first.operations):
        if op is None or op.random or op.phase == RESULT:
            continue
        if before is not None and before.inputs != op.inputs:
            pairs = zip(before.inputs, op.inputs, strict=False)
            op.anew = any(x != y and x not in values_made_before and y not in values_made for x, y in pairs)
        made = (op.outputs, op.changed)
        same = before is not None and (before.inputs != op.inputs or (before.outputs, before.changed) == made)
        op.repeats = op.steady and same and not op.anew
        if before is not None and before.inputs == op.inputs and before.outputs != op.outputs:
            outputs = zip(before.outputs, op.outputs, strict=False)
            distances = [sk.distance(trace.sketches[x], trace.sketches[y]) for x, y in outputs]
            op.spread = max([op.spread or 0.0, *distances])


def _values_made(trace: Trace) -> set[str]:
    """The values that operations of an execution made; not those that one passed on, as a copy does."""
    return {value for op in trace.operations for value in (*op.outputs, *op.changed) if value not in op.inputs}


def _roundings(trace: Trace, exact: list[Operation]) -> list[float]:
    """How far rounding may have led each operation of the trace, by the place of its twin in float64."""
    may_use_tf32 = Setting.parse(trace.setting).kind == "cuda" and "tf32" in trace.arithmetic.values()
    unknown = IN_TF32 if may_use_tf32 else UNKNOWN
    of_twin = {id(twin): op for op, twin in aligned(trace.operations, exact) if op and twin}
    amounts = []
    for twin in exact:
        op = of_twin.get(id(twin))
        if op is None or op.bound is None:
            amount = unknown
            if op is not None and hasattr(torch, op.dtype) and (dtype := getattr(torch, op.dtype)).is_floating_point:
                amount = max(amount, 64 * torch.finfo(dtype).eps) if dtype != torch.float64 else 0.0
        elif op.format and not op.rounded_before:
            amount = max(op.bound, SAFETY * (op.error or 0.0))
        else:
            amount = op.bound if op.error else 0.0  # what computes exactly has nothing to round
            amount = max(amount, _cancelled(op, trace.sketches))
        amounts.append(min(amount, 1.0) if np.isfinite(amount) else 0.0)
    return amounts


def _cancelled(op: Operation, sketches: dict[str, np.ndarray]) -> float:
    """What a normalisation loses by subtracting a mean of many deviations: so many units in the last place.

    Its error and bound may be those of another of its results, the mean or the reciprocal of the deviation.
    """
    if "norm" not in op.name or "backward" in op.name or len(op.outputs) != 3:
        return 0.0
    if normalized := op.arguments.get("normalized_shape"):
        groups = math.prod(op.shape) / math.prod(normalized)
    else:
        groups = op.arguments["N"] * op.arguments["group"] if "group" in op.arguments else op.shape[1]
    mean, reciprocal = (float(np.linalg.norm(sketches[value])) for value in op.outputs[1:])
    return ROUNDOFF * mean * reciprocal / groups


def _apart(x: np.ndarray, y: np.ndarray) -> float:
    """The norm of a difference, without what is not a finite number in either."""
    if x.shape != y.shape:
        return math.inf
    finite = np.isfinite(x) & np.isfinite(y)
    return float(np.linalg.norm(x[finite] - y[finite]))


def _shaken(amounts: list[float], draw: int) -> Callable[[Call], None]:
    """What moves an operation's results at random by these amounts: each number by its size, a sum by that of all."""

    def shake(call: Call) -> None:
        amount = amounts[call.position] if call.position < len(amounts) else 0.0
        if not amount or call.operation.is_view or torch.Tag.nondeterministic_seeded in call.operation.tags:
            return
        for t in filter(sk.rounds, call.results):  # by .data, which autograd does not count
            if t.element_size() == 1:
                continue  # float8 is computed with by casts alone
            moves = sk.moves(t, 131 * call.position + draw)
            size = float(torch.linalg.vector_norm(t)) / math.sqrt(t.numel()) if call.name in FACTORS else math.nan
            if math.isfinite(size):
                t.data.add_(moves, alpha=amount * size)
            else:
                t.data.mul_(1 + amount * moves)

    return shake


def _alike(amounts: list[float], other_amounts: list[float]) -> bool:
    """Whether roundings of some sizes lead about as far as, or less far than, those of others."""
    pairs = list(zip(amounts, other_amounts, strict=True))
    return math.hypot(*amounts) <= 2 * math.hypot(*other_amounts) and all(x <= 8 * max(y, UNKNOWN) for x, y in pairs)


def _carried(
    exact: list[Operation], shaken: list[list[Operation]], sketches: dict[str, np.ndarray]
) -> dict[int, list[float]]:
    """How far each output of the step in float64 was moved when all its operations were shaken."""
    carried: dict[int, list[float]] = {}
    for operations in shaken:
        for op, moved in aligned(exact, operations):
            if op is None or moved is None or len(op.outputs) != len(moved.outputs):
                continue
            apart = [_apart(sketches[x], sketches[y]) for x, y in zip(op.outputs, moved.outputs, strict=True)]
            carried[id(op)] = list(map(max, carried.get(id(op), apart), apart))
    return carried
