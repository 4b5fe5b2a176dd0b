"""Record a training step: run it twice, to see its values and which of them are repeated."""

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
from gpulab.audits._tracer import Tracer
from gpulab.audits._traces import RESULT, Trace, align_operations
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

MAX_ARGUMENT_LETTERS = 32  # of an argument in the name of a step
SEED = 0  # the seed of torch, NumPy and Python in every execution of a step


def record(
    step: Callable[..., object],
    setting: Setting | str = "cpu",
    file: str | Path | None = None,
    *,
    progress: bool = True,
) -> Trace:
    """Do a step under a setting and note what every operation computed.

    The step is done twice from the same random numbers (torch's, NumPy's and Python's are seeded).
    The first time only shows whether it repeats itself. The second time, the memory of every tensor
    has a copy in float64, on which every operation is repeated with the same random numbers and
    along the same branches. These copies are the float64 references of the values, with which two
    traces are compared.

    It takes several times as long as the step, and about three times its memory.

    Args:
        step: a `Step`, or a function that does one training step, backward pass included. It is
            called with the `Setting`, and puts its tensors on `setting.device` in `setting.dtype`;
            or, if it takes no argument, with these as torch's defaults. See `gpulab.Step`.
        setting: what it is done under.
        file: where the trace is kept, if anywhere.
        progress: whether to show a progress bar.

    Returns:
        A `Trace`. `gpulab.audit` compares two, from one machine or from two, of one program or of
        two. It holds sketches of the values and not the values themselves.

    Raises:
        UsageError: for what is no step, for a step that does nothing on floating-point numbers, and
            for a setting that compiles.
        GpulabError: for a setting that cannot run here.

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
            f"setting {setting}: compiled code has no operations to record; gpulab.audit compares"
            " its results"
        )
    with Progress(unit="operation", leave=False, disable=not progress) as bar:
        first_trace = perform(step, parsed, Tracer(bar.update))
        bar.total = len(first_trace.operations) * 2
        trace = _perform_measured(step, parsed, bar)
    _mark_changes(first_trace, trace)
    trace.passport = dict(passport())
    recorded_names = {value for op in trace.operations for value in op.values}
    trace.values = {name: value for name, value in trace.values.items() if name in recorded_names}
    if file is not None:
        trace.save(file)
    return trace


def _perform_measured(step: Callable[..., object], setting: Setting, bar: Progress) -> Trace:
    """Do the step with references inside the guard, or without it if torch forbids hooks."""
    try:
        return perform(step, setting, Tracer(bar.update, is_measuring=True))
    except GpulabError as error:
        if not is_forbidden(error):
            raise
    return perform(step, setting, Tracer(bar.update, is_measuring=True), guarded=False)


def perform(
    step: Callable[..., object], setting: Setting, tracer: Tracer, guarded: bool = True
) -> Trace:
    """Do the step once under a setting with a tracer; if that measures, inside the guard."""
    torch.clear_autocast_cache()  # it holds weights that another execution has cast
    tracer.is_preparing = True
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
        # Of the hooks of the Tracer.
        warnings.filterwarnings(
            "ignore", r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        tracer.is_preparing = False
        try:
            returned = run()
        except (RuntimeError, TypeError) as error:
            raise explain_step_error(error, setting, tracer.results.used_modules()) from error
        finally:
            tracer.is_preparing = True
        flags = arithmetic()
        tracer.operations += tracer.results.to_operations(returned)
    if tracer.is_measuring and not any(
        getattr(torch, op.dtype).is_floating_point for op in tracer.operations if op.phase != RESULT
    ):
        raise UsageError(
            "the step ran no operation of torch on floating-point numbers: there is nothing to"
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
    # While it is traced, torch runs a compiled model uncompiled.
    has_compiled_module = any(map(is_compiled, tracer.results.used_modules()))
    notes = {}
    if not guarded:
        notes["guard"] = (
            "torch.func forbids hooks for saved tensors: overwritten memory was not looked for"
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
    """The name of a step: that of its function, or of its model and loss if it is a `Step`.

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
    """An argument as a short text."""
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    text = str(value)
    return text if len(text) <= MAX_ARGUMENT_LETTERS else f"{text[:MAX_ARGUMENT_LETTERS]}…"


def _mark_changes(first_trace: Trace, trace: Trace) -> None:
    """Mark operations whose results or inputs were different in the second execution."""
    produced_before = _produced_contents(first_trace)
    produced = _produced_contents(trace)
    # Whether an earlier operation returned something else. Later ones may have been given that.
    varies = False
    for op, first_op in align_operations(trace.operations, first_trace.operations):
        if op is None or op.is_random or op.phase == RESULT:
            continue
        if first_op is None:
            op.repeats = False
            continue
        is_repeated = True
        first_inputs = _contents(first_trace, first_op.inputs)
        inputs = _contents(trace, op.inputs)
        if first_inputs != inputs:
            op.inputs_changed = any(
                x != y and x not in produced_before and y not in produced
                for x, y in zip(first_inputs, inputs, strict=False)
            )
        elif differing_arguments(first_op, op):
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
    return [trace.values[name].content for name in names]


def _produced_contents(trace: Trace) -> set[str]:
    """The contents that operations made, without those that a copy passed on."""
    return {
        content
        for op in trace.operations
        if op.phase != RESULT
        for content in _contents(trace, [*op.outputs, *op.mutated_values])
        if content not in _contents(trace, op.inputs)
    }
