"""Record one step of a running training, which the program itself executes."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from gpulab._torch_internals import (
    Nested,
    is_compiled,
    named_leaves,
    register_optimizer_step_post_hook,
)
from gpulab.audits import _count_sketch as sketches
from gpulab.audits._tracer import Tracer, describe_state
from gpulab.audits._traces import HASH_MARK, RESULT, Trace
from gpulab.errors import GpulabError, UsageError
from gpulab.guards._reentrancy import as_guard_work
from gpulab.numerics._flags import arithmetic
from gpulab.passports import passport

# The types of the parts of a state that can be compared between two traces.
_STATE_LEAF_TYPES = (Tensor, np.ndarray, bool, int, float, str, bytes, type(None))


class StepRecording:
    """The recording of a step of a running program, as `record_step` yields it.

    Attributes:
        trace: The trace, after the `with` block; None inside it.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> weight = torch.ones(3, requires_grad=True)
        >>> with gl.record_step() as recording:
        ...     loss = weight.square().sum()
        ...     loss.backward()
        ...     recording.add(loss=loss)
        >>> recording.trace
        trace of 7 operations under cpu
    """

    def __init__(self, state: Mapping[str, object], label: str) -> None:
        self.trace: Trace | None = None
        self._label = label
        self._returned: dict[str, Nested] = {}
        self._start = describe_states(state)
        self._generators: dict[str, str] = {}
        self._tracer = Tracer(lambda: None, is_measuring=True)
        self._tracer.results.restores = False
        self._tracer.is_outside_step = True
        self._stack = contextlib.ExitStack()

    def _enter(self) -> None:
        """Start to follow the program, without recording it yet."""
        self._stack.enter_context(self._tracer.results.follow())
        self._stack.enter_context(self._tracer)

    @as_guard_work
    def _begin(self) -> None:
        """Start to record."""
        self._generators = _generator_states()
        self._tracer.is_outside_step = False

    def _leave(self) -> None:
        """Stop recording without a trace."""
        self._stack.close()

    def _end(self, file: str | Path | None) -> None:
        """Stop recording, make the trace, and save it unless `file` is None."""
        # What follows is not part of the step, so no further operation is recorded. The flags are
        # those under which the step ran.
        self._tracer.is_outside_step = True
        flags = arithmetic()
        # The results are read before the block ends, because its end closes the tracer.
        with self._stack:
            self._tracer.operations += self._tracer.results.to_operations(self._returned)
        # Only generators whose state changed were drawn from. The states before the step are part
        # of the state that it started from.
        final_states = _generator_states()
        drawn_from = {
            f"random numbers of {name}": initial_state
            for name, initial_state in self._generators.items()
            if final_states[name] != initial_state
        }
        initial_states = {**self._tracer.results.start, **drawn_from, **self._start}
        self.trace = _make_trace(self._tracer, initial_states, flags, self._label)
        if file is not None:
            self.trace.save(file)

    def add(self, **results: Nested) -> None:
        """Add named results of the step, such as the loss, for the audit to compare.

        Args:
            results: Tensors or any nesting of tensors, by name.

        Raises:
            UsageError: If the `with` block has ended.
        """
        if self.trace is not None:
            raise UsageError(
                "add: the recording of the step has ended; call add inside the with block"
            )
        self._returned |= results


@contextlib.contextmanager
def record_step(
    file: str | Path | None = None,
    *,
    state: Mapping[str, object] | None = None,
    label: str = "",
) -> Iterator[StepRecording]:
    """Record what a running program does inside a `with` block, usually one training step.

    `gpulab.record` executes a step itself. This function records a step that the program executes:
    nothing is moved, seeded, repeated or restored, and the training continues with the same numbers
    as without the recording. As in `gpulab.record`, the results of the step are the gradients, the
    updated parameters and buffers, and the states of optimizers. `gpulab.audit(trace_a, trace_b)`
    compares two such traces, for example from two machines, from two precisions, or from an
    uninterrupted and a resumed run.

    The trace also contains the state that the step started from: the state of every optimizer that
    the step calls, with its options such as the learning rate; the states of the random number
    generators from which the step draws; and the states of all objects in `state`. `gpulab.audit`
    names the parts of the state that differ.

    The forward and the backward pass must be inside the block. A recorded step takes several times
    as long as any other step and three times as much memory, because each operation is repeated in
    float64. Steps outside the block cost nothing. Compiled modules run uncompiled inside the block.
    The guard is not active there either.

    Args:
        file: The file in which the trace is saved; None to save no file.
        state: Further objects whose state before the step is recorded, by name: anything with a
            `state_dict()`, such as a learning rate schedule, a gradient scaler, a stateful loader
            or an averaged model; tensors, numbers and strings; or nestings of these.
        label: The name of the trace in reports.

    Yields:
        A `StepRecording`. After the block, its attribute `trace` holds the trace.

    Raises:
        UsageError: If an object in `state` has no state that can be compared.

    Examples:
        A step after a resume, compared with the same step of the uninterrupted run. The moving
        averages of the optimizer were not restored:

        >>> import copy
        >>> import torch
        >>> import gpulab as gl
        >>> net = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> def train_step(net, optimizer):
        ...     optimizer.zero_grad()
        ...     net(torch.ones(2, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> train_step(net, optimizer)
        >>> weights = copy.deepcopy(net.state_dict())
        >>> with gl.record_step(label="uninterrupted") as uninterrupted:
        ...     train_step(net, optimizer)
        >>> net.load_state_dict(weights)
        <All keys matched successfully>
        >>> with gl.record_step(label="resumed") as resumed:
        ...     train_step(net, torch.optim.Adam(net.parameters()))
        >>> answer = gl.audit(uninterrupted.trace, resumed.trace)
        >>> answer.findings[0].kind, "exp_avg of weight" in answer.findings[0].detail
        ('other data', True)
    """
    recording = StepRecording(state or {}, label)
    recording._enter()
    try:
        recording._begin()
        yield recording
    except BaseException:
        recording._leave()
        raise
    recording._end(file)


def record_script_step(
    script: str, arguments: Sequence[str], at_step: int, file: str | Path
) -> Trace:
    """Run a script as Python would, and record one of its training steps in a file.

    The number of steps is the number of updates by the first optimizer that does one. Step 1 begins
    with the first call of a module. Every other step begins after the update of the previous step.

    Args:
        script: The file of the script.
        arguments: The arguments of the script.
        at_step: The number of the step, starting from 1.
        file: The file in which the trace is saved.

    Returns:
        The trace.

    Raises:
        GpulabError: If the script ends before that step is complete. Errors of the script are not
            caught.
    """
    recording = StepRecording({}, "")
    counter = _StepCounter(recording, at_step, file)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with counter:
        runpy.run_path(script, run_name="__main__")
    if recording.trace is None:
        done = "1 step" if counter.n_steps == 1 else f"{counter.n_steps} steps"
        raise GpulabError(
            f"{script} ended after {done} of its optimizer; expected at least {at_step}"
        )
    return recording.trace


class _StepCounter:
    """Counts the updates of the first optimizer of a program, and records one step of it."""

    def __init__(self, recording: StepRecording, at_step: int, file: str | Path) -> None:
        self.recording = recording
        self.at_step = at_step
        self.file = file
        self.n_steps = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _StepCounter:
        """Follow the program from now on; for step 1, start its recording as well."""
        self._stack.callback(self.recording._leave)
        # This hook comes before those of the recording, so that the first module is recorded, too.
        self._stack.callback(modules.register_module_forward_pre_hook(self._before_module).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_update).remove)
        if self.at_step == 1:
            self.recording._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _before_module(self, module: nn.Module, inputs: Nested) -> None:  # noqa: ARG002
        """Begin to record step 1 at the first call of a module, unless it has begun already."""
        if self.at_step == 1 and self.n_steps == 0 and self.recording._tracer.is_outside_step:
            self.recording._begin()

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count an update by the first optimizer, and begin or end the recording after it.

        Step 1 does not begin here but at the first call of a module, in `_before_module`.
        """
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is not self.optimizer:
            return
        self.n_steps += 1
        if self.n_steps == self.at_step - 1:
            self.recording._enter()
            self.recording._begin()
        elif self.n_steps == self.at_step:
            self.recording._end(self.file)


def _make_trace(
    tracer: Tracer, state: dict[str, str], flags: Mapping[str, object], label: str
) -> Trace:
    """Make the trace of what a tracer has recorded in a running program.

    Raises:
        UsageError: If no operation on floating-point numbers was recorded.
    """
    operations = [op for op in tracer.operations if op.phase != RESULT]
    if not any(getattr(torch, op.dtype).is_floating_point for op in operations):
        raise UsageError(
            "the step ran no torch operation on floating-point numbers; expected the forward and"
            " the backward pass inside the with block"
        )
    names = {value for op in tracer.operations for value in op.values}
    notes = {"guard": "overwritten memory was not looked for"}
    if any(map(is_compiled, tracer.results.used_modules())):
        notes["compiled"] = "not compiled"
    devices = {leaf.device.type for leaf in tracer.results.leaves}
    return Trace(
        "cuda" if "cuda" in devices else "cpu",
        tracer.operations,
        {name: value for name, value in tracer.values.items() if name in names},
        passport=dict(passport()),
        arithmetic=dict(flags),
        label=label,
        notes=notes,
        without_reference=tracer.references.failures,
        state=state,
    )


def describe_states(state: Mapping[str, object]) -> dict[str, str]:
    """Describe the states of objects as text, so that the states of two traces can be compared.

    Args:
        state: The objects by name, as for `record_step`. The state of an object is its
            `state_dict()` if it has one, and otherwise the object itself.

    Returns:
        A description of each leaf of the states. That of a tensor or an array contains a hash of
        its content, unless it is a single number. Any other leaf is described by its `repr`. The
        keys are the name of the object followed by the path of the leaf.

    Raises:
        UsageError: If a leaf is an object that cannot be compared.

    >>> describe_states({"epoch": 3, "schedule": {"last": 0.5}})
    {'epoch': '3', "schedule['last']": '0.5'}
    """
    # Hashing a tensor runs operations. They are not the user's, so no guard should check them.
    describe = as_guard_work(describe_state)
    descriptions = {}
    for name, owner in state.items():
        content = owner.state_dict() if hasattr(owner, "state_dict") else owner
        for path, leaf in named_leaves(content):
            if callable(leaf):
                continue  # learning rate schedules keep functions in their state
            if not isinstance(leaf, _STATE_LEAF_TYPES):
                raise UsageError(
                    f"state[{name!r}]{path}: expected an object with a state_dict(), a tensor, a"
                    f" number or a string, got a {type(leaf).__name__}"
                )
            if isinstance(leaf, np.ndarray):
                leaf = torch.from_numpy(leaf)
            descriptions[f"{name}{path}"] = describe(leaf)
    return descriptions


def _generator_states() -> dict[str, str]:
    """Return hashes of the states of the global generators of random numbers, by name."""
    states = {
        "torch": str(sketches.content_id(torch.get_rng_state())),
        "NumPy": hashlib.sha256(pickle.dumps(np.random.get_state())).hexdigest(),
        "Python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
    }
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            states[f"cuda:{number}"] = sketches.content_id(torch.cuda.get_rng_state(number))
    return {name: f"generator {HASH_MARK}{state}" for name, state in states.items()}
