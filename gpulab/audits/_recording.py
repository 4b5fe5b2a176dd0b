"""Record a training step: execute it twice, and note which operations are deterministic."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gpulab._torch_internals import ctc_lengths_as_lists, is_compiled
from gpulab.audits import _count_sketch as sketches
from gpulab.audits._comparison import differing_arguments
from gpulab.audits._references import return_freed_memory
from gpulab.audits._tracer import Tracer
from gpulab.audits._traces import RESULT, Trace, align_operations
from gpulab.audits._values import Slabs
from gpulab.errors import GpulabError, OverwrittenWarning, UsageError
from gpulab.guards._guard import guard, is_forbidden
from gpulab.numerics._flags import arithmetic
from gpulab.passports import passport
from gpulab.report import Progress
from gpulab.settings import Setting
from gpulab.steps import (
    PreparedStep,
    Step,
    check_step,
    explain_step_error,
    prepare_step,
    seed_generators,
)

MAX_ARGUMENT_LETTERS = 32  # longer arguments are shortened in the name of a step
SEED = 0  # the seed of torch, NumPy and Python in every execution of a step


def record(
    step: Callable[..., object],
    setting: Setting | str = "cpu",
    file: str | Path | None = None,
    *,
    progress: bool = True,
) -> Trace:
    """Execute a step under a setting and record every operation and its results.

    The step is executed twice with the same seeds of torch, NumPy and Python. The first execution
    only shows whether the step is deterministic. In the second execution, the memory of every
    tensor has a copy in float64, and every operation is repeated on these copies with the same
    random numbers and along the same branches. The copies are the float64 references of the values.
    Two traces are compared by their references.

    Recording takes several times as long as the step and about three times as much memory.

    Args:
        step: A `Step`, or a function that does one training step including the backward pass. The
            function is called with the `Setting`, and creates its tensors on `setting.device` in
            `setting.dtype`. If it takes no argument, that device and type are torch's defaults
            during the call. See `gpulab.Step`.
        setting: The setting to execute the step under.
        file: The file in which the trace is saved; None to save no file.
        progress: Whether to show a progress bar.

    Returns:
        A `Trace`, which contains sketches of the values and not the values themselves.
        `gpulab.audit` compares two traces, which may come from different machines or programs.

    Raises:
        UsageError: If `step` is not a step or runs no floating-point operation, or if the setting
            has `compile`.
        GpulabError: If the setting cannot run on this machine.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.record(
        ...     lambda setting: torch.ones(3, dtype=setting.dtype).exp(),
        ...     "cpu:threads=1",
        ...     progress=False,
        ... )
        trace of 2 operations under cpu:threads=1
    """
    parsed = Setting.parse(setting)
    check_step(step)
    parsed.check()
    if parsed.compile:
        raise UsageError(
            f"setting {setting}: compiled code has no operations to record; use gpulab.audit, which"
            " compares its results"
        )
    with Progress(unit="operation", leave=False, disable=not progress) as bar:
        slabs = Slabs()
        first_trace = perform(step, parsed, Tracer(bar.update, slabs=slabs))
        return_freed_memory()
        bar.total = len(first_trace.operations) * 2  # two executions
        trace = _perform_measured(step, parsed, bar, slabs)
        return_freed_memory()
    _mark_changes(first_trace, trace)
    trace.passport = dict(passport())
    recorded_names = {value for op in trace.operations for value in op.values}
    trace.values = {name: value for name, value in trace.values.items() if name in recorded_names}
    if file is not None:
        trace.save(file)
    return trace


def _perform_measured(
    step: Callable[..., object], setting: Setting, bar: Progress, slabs: Slabs
) -> Trace:
    """Execute the step with references inside the guard, or without it if torch forbids hooks."""
    try:
        return perform(step, setting, Tracer(bar.update, is_measuring=True, slabs=slabs))
    except GpulabError as error:
        if not is_forbidden(error):
            raise
    tracer = Tracer(bar.update, is_measuring=True, slabs=slabs)
    return perform(step, setting, tracer, guarded=False)


def perform(
    step: Callable[..., object], setting: Setting, tracer: Tracer, guarded: bool = True
) -> Trace:
    """Execute the step once under a setting with a tracer.

    A tracer that measures runs inside the guard, unless `guarded` is false.

    Raises:
        UsageError: If a tracer that measures saw no floating-point operation.
    """
    torch.clear_autocast_cache()  # it contains weights that an earlier execution has cast
    tracer.is_outside_step = True
    default_dtype = torch.get_default_dtype()
    with (
        seed_generators(setting, SEED),
        setting.apply(),
        warnings.catch_warnings(action="ignore", category=OverwrittenWarning),
        ctc_lengths_as_lists(),
        tracer,
        prepare_step(step, setting, default_dtype) as run,
        tracer.results.follow(),
        guard(on="warn") if tracer.is_measuring and guarded else contextlib.nullcontext() as report,
    ):
        tracer.results.restores = not isinstance(run, PreparedStep)
        tracer.results.counts_updates = tracer.results.restores
        # The global hooks that this warning refers to are those of the tracer.
        warnings.filterwarnings(
            "ignore", r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        tracer.is_outside_step = False
        try:
            returned = run()
        except (RuntimeError, TypeError) as error:
            raise explain_step_error(error, setting, tracer.results.used_modules()) from error
        finally:
            tracer.is_outside_step = True
        flags = arithmetic()
        tracer.operations += tracer.results.to_operations(returned)
    if tracer.is_measuring and not any(
        getattr(torch, op.dtype).is_floating_point for op in tracer.operations if op.phase != RESULT
    ):
        raise UsageError(
            "the step ran no torch operation on floating-point numbers, so there is nothing to"
            " compare"
        )
    overwritten = [
        {
            "operation": f.operation,
            "line": f"{f.line}: {f.line.text}",
            "why": f.explanation,
            "remedy": f.remedy,
        }
        for f in (report.findings if report else [])
    ]
    # torch runs compiled models uncompiled while the tracer is active.
    has_compiled_module = any(map(is_compiled, tracer.results.used_modules()))
    notes = {}
    if not guarded:
        notes["guard"] = (
            "torch.func forbids hooks for saved tensors, so overwritten memory was not looked for"
        )
    loss_note = getattr(run, "loss_taken", "")
    if loss_note:
        notes["loss"] = loss_note
    if has_compiled_module:
        notes["compiled"] = "not compiled"
    return Trace(
        str(setting),
        tracer.operations,
        tracer.values,
        overwritten,
        arithmetic=flags,
        notes=notes,
        without_reference=tracer.references.failures,
        step=describe_step(step),
    )


def describe_step(step: Callable[..., object]) -> str:
    """Return the name of a step: that of its function, or of the model and loss of a `Step`.

    >>> (
    ...     describe_step(functools.partial(round, ndigits=2)),
    ...     describe_step(Step(torch.nn.Linear(1, 1), torch.ones(1))),
    ... )
    ('round(ndigits=2)', 'Linear')
    """
    if isinstance(step, functools.partial):
        options = [
            *map(_shorten, step.args),
            *(f"{name}={_shorten(value)}" for name, value in step.keywords.items()),
        ]
        return f"{describe_step(step.func)}({', '.join(options)})"
    if isinstance(step, Step):
        loss = f", {describe_step(step.loss)}" if step.loss is not None else ""
        return type(step.model).__name__ + loss
    return getattr(step, "__qualname__", type(step).__name__)


def _shorten(value: object) -> str:
    """Convert an argument of a step to a short text."""
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    text = str(value)
    return text if len(text) <= MAX_ARGUMENT_LETTERS else f"{text[:MAX_ARGUMENT_LETTERS]}…"


def _mark_changes(first_trace: Trace, trace: Trace) -> None:
    """Mark operations whose results or inputs differ between the two executions.

    `repeats` and `spread` are set if an operation returned different results from equal inputs.
    `inputs_changed` is set if an operation received different values or arguments that no recorded
    operation explains.
    """
    produced_before = _produced_contents(first_trace)
    produced = _produced_contents(trace)
    # Whether an earlier operation returned a different result. Later arguments may depend on it.
    varies = False
    for op, first_op in align_operations(trace.operations, first_trace.operations):
        if op is None or op.is_random or op.phase == RESULT:
            continue
        if first_op is None:
            op.repeats = False  # the first execution has no such operation
            continue
        first_inputs = _contents(first_trace, first_op.inputs)
        inputs = _contents(trace, op.inputs)
        if first_inputs != inputs:
            is_repeated = True  # other results are expected from other inputs
            op.inputs_changed = any(
                x != y and x not in produced_before and y not in produced
                for x, y in zip(first_inputs, inputs, strict=False)
            )
        elif differing_arguments(first_op, op):
            is_repeated = True
            op.inputs_changed = not varies
        else:
            is_repeated = _contents(first_trace, first_op.outputs) == _contents(trace, op.outputs)
            if not is_repeated:
                varies = True
                output_sketches = (
                    [t.values[v].sketch for v in o.outputs]
                    for t, o in ((first_trace, first_op), (trace, op))
                )
                op.spread = max(op.spread or 0.0, sketches.max_distance(*output_sketches))
        op.repeats = op.repeats is not False and is_repeated and not op.inputs_changed


def _contents(trace: Trace, names: Sequence[str]) -> list[str]:
    """Return the content hashes of values that are given by name."""
    return [trace.values[name].content for name in names]


def _produced_contents(trace: Trace) -> set[str]:
    """Return the content hashes of all values that operations produced, except for mere copies."""
    return {
        content
        for op in trace.operations
        if op.phase != RESULT
        for content in _contents(trace, [*op.outputs, *op.mutated_values])
        if content not in _contents(trace, op.inputs)
    }
