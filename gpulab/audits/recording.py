"""A training step recorded: done twice, to see what it computes, and what of that it repeats."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gpulab._torch_internals import ctc_lengths_as_lists, is_compiled
from gpulab.audits import count_sketch as sk
from gpulab.audits.tracer import Tracer
from gpulab.audits.traces import RESULT, Trace, aligned
from gpulab.errors import GpulabError, OverwrittenWarning, UsageError
from gpulab.guards.guards import guard, is_forbidden
from gpulab.numerics.flags import arithmetic
from gpulab.passports import passport
from gpulab.report import Progress
from gpulab.settings import Setting
from gpulab.steps import PreparedStep, Step, check_step, explain_step_error, prepare_step, seed_generators

MOST_LETTERS = 32  # of an argument in the name of a step
SEED = 0  # the random numbers of torch, NumPy and Python begin here in every execution of a step


def record(
    step: Callable[..., object],
    setting: Setting | str = "cpu",
    file: str | Path | None = None,
    *,
    progress: bool = True,
) -> Trace:
    """Do a step under a setting and note what every operation computed.

    The step is done twice from the same random numbers (torch's, NumPy's and Python's are seeded). The first time only
    shows whether it repeats itself. The second time, the memory of every tensor has a copy in float64, on which every
    operation is repeated with the same random numbers and along the same branches. These copies are the float64
    references of the values, with which two traces are compared.

    It takes several times as long as the step, and about three times its memory.

    Args:
        step: a `Step`, or a function that does one training step, backward pass included. It is called with the
            `Setting`, and puts its tensors on `setting.device` in `setting.dtype`; or, if it takes no argument, with
            these as torch's defaults. See `gpulab.Step`.
        setting: what it is done under.
        file: where the trace is kept, if anywhere.
        progress: whether to show a progress bar.

    Returns:
        A `Trace`. `gpulab.audit` compares two, from one machine or from two, of one program or of two. It holds
        sketches of the values and not the values themselves.

    Raises:
        UsageError: for what is no step, for a step that does nothing on floating-point numbers, and for a setting that
            compiles.
        GpulabError: for a setting that cannot run here.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.record(lambda setting: torch.ones(3, dtype=setting.dtype).exp(), "cpu:threads=1", progress=False)
        trace of 2 operations under cpu:threads=1
    """
    parsed = Setting.parse(setting)
    check_step(step)
    parsed.check()
    if parsed.compile:
        raise UsageError(
            f"setting {setting}: compiled code has no operations to record; gpulab.audit compares its results"
        )
    with Progress(unit="operation", leave=False, disable=not progress) as bar:
        first = perform(step, parsed, Tracer(bar.update))
        bar.total = len(first.operations) * 2
        trace = _measured(step, parsed, bar)
    _compare_executions(first, trace)
    trace.passport = dict(passport())
    used = {value for op in trace.operations for value in op.values}
    trace.values = {name: value for name, value in trace.values.items() if name in used}
    if file is not None:
        trace.save(file)
    return trace


def _measured(step: Callable[..., object], setting: Setting, bar: Progress) -> Trace:
    """Do the step with references, inside of the guard; without it where torch forbids its hooks."""
    try:
        return perform(step, setting, Tracer(bar.update, measured=True))
    except GpulabError as error:
        if not is_forbidden(error):
            raise
    return perform(step, setting, Tracer(bar.update, measured=True), guarded=False)


def perform(step: Callable[..., object], setting: Setting, watcher: Tracer, guarded: bool = True) -> Trace:
    """Do the step once under a setting, watched; and guarded, if each operation is measured."""
    torch.clear_autocast_cache()  # which holds weights that another execution has cast
    watcher.is_preparing = True
    default_dtype = torch.get_default_dtype()
    with (
        seed_generators(setting, SEED),
        setting.apply(),
        warnings.catch_warnings(action="ignore", category=OverwrittenWarning),
        ctc_lengths_as_lists(),
        watcher,
        prepare_step(step, setting, default_dtype) as run,
        watcher.results.followed(),
        guard(on="warn") if watcher.measured and guarded else contextlib.nullcontext() as report,
    ):
        watcher.results.restores = not isinstance(run, PreparedStep)
        # Of the hooks of the Tracer.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        watcher.is_preparing = False
        try:
            returned = run()
        except (RuntimeError, TypeError) as error:
            raise explain_step_error(error, setting, watcher.results.used_modules()) from error
        finally:
            watcher.is_preparing = True
        flags = arithmetic()
        watcher.operations += watcher.results.as_operations(returned)
    if watcher.measured and not any(
        getattr(torch, op.dtype).is_floating_point for op in watcher.operations if op.phase != RESULT
    ):
        raise UsageError("the step ran no operation of torch on floating-point numbers: there is nothing to compare")
    overwritten = [
        {"operation": f.operation, "line": f"{f.line}: {f.line.text}", "why": f.explanation, "remedy": f.remedy}
        for f in (report.findings if report else [])
    ]
    # Torch runs a model as it is written where it is watched.
    compiled = any(map(is_compiled, watcher.results.used_modules()))
    unguarded = "torch.func forbids hooks for saved tensors: overwritten memory was not looked for"
    about = {
        "guard": unguarded * (not guarded),
        "loss": getattr(run, "loss_taken", ""),
        "compiled": "not compiled" * compiled,
    }
    notes = {name: words for name, words in about.items() if words}
    return Trace(
        str(setting),
        watcher.operations,
        watcher.values,
        overwritten,
        arithmetic=flags,
        notes=notes,
        without_reference=watcher.references.failures,
        step=name_of_step(step),
    )


def name_of_step(step: Callable[..., object]) -> str:
    """What a step is called: a function by its name, a `Step` by its model and loss.

    >>> name_of_step(functools.partial(round, ndigits=2)), name_of_step(Step(torch.nn.Linear(1, 1), torch.ones(1)))
    ('round(ndigits=2)', 'Linear')
    """
    if isinstance(step, functools.partial):
        options = [*map(_short, step.args), *(f"{name}={_short(value)}" for name, value in step.keywords.items())]
        return f"{name_of_step(step.func)}({', '.join(options)})"
    if isinstance(step, Step):
        loss = f", {name_of_step(step.loss)}" if step.loss is not None else ""
        return type(step.model).__name__ + loss
    return getattr(step, "__qualname__", type(step).__name__)


def _short(value: object) -> str:
    """An argument in a few letters."""
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    text = str(value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


def _compare_executions(first: Trace, trace: Trace) -> None:
    """Mark operations that gave other results from the same inputs the second time, and those given other inputs."""
    made_before, made = _values_made(first), _values_made(trace)
    for op, before in aligned(trace.operations, first.operations):
        if op is None or op.random or op.phase == RESULT:
            continue
        same = before is not None
        if before is not None and _contents(first, before.inputs) != _contents(trace, op.inputs):
            pairs = zip(_contents(first, before.inputs), _contents(trace, op.inputs), strict=False)
            op.anew = any(x != y and x not in made_before and y not in made for x, y in pairs)
        elif before is not None:
            same = _contents(first, before.outputs) == _contents(trace, op.outputs)
            if not same:
                sketches = ([t.values[v].sketch for v in o.outputs] for t, o in ((first, before), (trace, op)))
                op.spread = max(op.spread or 0.0, sk.spread(*sketches))
        op.repeats = op.repeats is not False and same and not op.anew


def _contents(trace: Trace, names: Sequence[str]) -> list[str]:
    return [trace.values[name].content for name in names]


def _values_made(trace: Trace) -> set[str]:
    """The contents that operations of an execution made; not those that one passed on, as a copy does."""
    return {
        content
        for op in trace.operations
        if op.phase != RESULT
        for content in _contents(trace, [*op.outputs, *op.changed])
        if content not in _contents(trace, op.inputs)
    }
