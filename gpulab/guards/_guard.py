"""A guard that detects tensors overwritten after autograd saved them and before it uses them.

Autograd counts only the in-place operations of torch itself. It does not see NumPy writing into a
buffer that a tensor shares, a program writing through `.data`, or a loader that keeps refilling one
buffer. In these cases `backward` computes with the new content. The guard takes a
fingerprint of every tensor when autograd saves it, in the hooks of
`torch.autograd.graph.saved_tensors_hooks`, and compares the fingerprint when autograd uses the
tensor. While such hooks are active, torch skips its own check of the version counter, so the guard
makes that check as well.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpulab._torch_internals import (
    Node,
    Span,
    base_of,
    call_after_backward,
    current_backward_pass,
    current_node,
    is_checkpoint_frame,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    register_optimizer_step_post_hook,
    saved_values,
    span_of,
    uncompiled,
    version_of,
)
from gpulab.errors import GpulabError, OverwrittenError, OverwrittenWarning, UsageError
from gpulab.guards._blind_spots import BlindSpots
from gpulab.guards._call_sites import Line, user_line
from gpulab.guards._findings import (
    HINT_IF_NOT_TRACED,
    HINT_IF_TRACED,
    OptimizerStep,
    Overwritten,
)
from gpulab.guards._fingerprints import fingerprint
from gpulab.guards._holders import Holder, nearest_holder, spans_overlap
from gpulab.guards._reentrancy import as_guard_work, is_guard_running
from gpulab.guards._shared_reads import SharedReads
from gpulab.guards._write_lines import next_time

FORBIDDEN = (
    "torch does not allow the guard's hooks here ({}); put the guard around the code that calls"
    " backward, not inside torch.func"
)


@as_guard_work
def drain_ready_queue() -> None:
    """Remove the tasks that a failed `backward` left in this thread's ready queue.

    Any further `backward` empties the queue, so this function calls a trivial one. Tasks in the
    queue keep their memory alive. When the thread or Python ends, torch destroys the remaining
    tasks, and the guard's hooks with them, outside Python. With torch 2.15 this can end the process
    with a segmentation fault.
    """
    # Inside a transform of torch.func, `backward` raises, and there are no tasks to remove.
    with contextlib.suppress(RuntimeError):
        torch.ones((), device="cpu", requires_grad=True).backward()


class _ThreadState(threading.local):
    """The state of each thread, created when it first enters a guard or uses a saved tensor."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        # Python destroys this set when the thread ends, before torch destroys the thread's queue.
        self.lifetime: set[None] = set()
        # The finalizer of the main thread's set runs when Python ends.
        weakref.finalize(self.lifetime, drain_ready_queue)


_thread = _ThreadState()


@uncompiled
def guard(on: str = "raise", reads: str = "backward") -> Guard:
    """Detect tensors that are overwritten between the forward pass and their use in `backward`.

    Autograd saves tensors in the forward pass and uses them in `backward`. The guard checks that
    their content has not changed in between. It checks every tensor saved inside the `with` block,
    even if `backward` is called after the block. It is not an error to overwrite a tensor that is
    never used. Gradients are bitwise identical with and without the guard.

    The guard sees only tensors that pass through torch's hooks for saved tensors. It does not see:

    - a tensor that was overwritten before the forward pass read it, as in a list of frames that
      share one buffer (`reads="any"` detects this);
    - a tensor that a `torch.autograd.Function` keeps as an attribute (`ctx.x = x` instead of
      `ctx.save_for_backward(x)`), or that a function written in C++ keeps as a member;
    - a tensor that a hook of a tensor or module, or any other closure, keeps for backward;
    - a graph that another thread builds, unless that thread enters the same guard;
    - a tensor that a graph made by `torch.compile` keeps internally. The guard does check tensors
      that such a graph saves through autograd. With `reads="any"` torch compiles nothing inside the
      block, so a compiled model runs uncompiled there. Torch 2.6 compiles the guard itself if a
      compiled function calls `backward`, and the guard then fails or reports tensors that are
      correct. With torch 2.6, compile only the model;
    - a tensor that is saved inside `torch.autograd.graph.save_on_cpu`, because torch applies only
      the innermost hooks. A guard inside `save_on_cpu` replaces the hooks of `save_on_cpu`.

    `Guard.unwatched` lists the cases that occurred inside the block, as far as the guard can detect
    them. With `reads="any"` a finding names the lines that wrote into the memory
    (`Overwritten.writers`), unless a debugger or a coverage tool already traces the program, or
    lines of your program run in a thread that was started before the guard. If another process
    wrote to the memory, or a thread that runs no line of your program did, the line that was
    running at that time is named. With `reads="backward"` the lines that wrote are not named.

    Args:
        on: What to do about an overwritten tensor. `raise` raises `OverwrittenError` when the first
            one is about to be used, which ends `backward`. `warn` lets `backward` continue,
            collects the findings in the `Guard`, and warns once at the end of the block.
        reads: `backward` checks only the tensors that autograd has saved. `any` also checks the
            memory that tensors share with NumPy or another library, whenever an operation reads it.
            A tensor is reported if its content has changed and another tensor has since been
            created over the same memory. With CUDA, pinned memory is reported if it is written or
            read between a copy with `non_blocking=True` and the next wait. `.numpy()` counts as a
            read. `any` does not see later reads through the array that `.numpy()` returned, reads
            by `torch.save`, other processes, views of the same memory that begin at different
            addresses, two calls of `torch.from_file` for one file, or calls of `frombuffer` or
            `from_dlpack`
            under a name that was imported earlier. It ignores a single tensor that is read before
            and after its memory was written, because that may be intended. It wrongly reports two
            tensors made from one array if both are intended as views of it. If the shared memory is
            larger than 64 KiB, it may also report a tensor that has not changed, because elements
            near it have.

    Returns:
        A `Guard`, to be used in a `with` statement.

    Raises:
        UsageError: If `on` or `reads` has any other value.
        GpulabError: If torch does not allow saved-tensor hooks, as inside `torch.func.grad` and
            functions built on it.

    Examples:
        >>> import warnings
        >>> import numpy as np
        >>> import torch
        >>> import gpulab as gl
        >>> buffer = np.ones(3, np.float32)
        >>> x = torch.ones(3, requires_grad=True)
        >>> with warnings.catch_warnings(action="ignore"), gl.guard(on="warn") as report:
        ...     loss = (x * torch.from_numpy(buffer)).sum()
        ...     buffer[:] = 2  # the next frame arrives before backward
        ...     loss.backward()
        >>> report.findings[0].function, report.findings[0].cause, x.grad.tolist()
        ('mul', 'numpy', [2.0, 2.0, 2.0])
    """
    if on not in ("raise", "warn"):
        raise UsageError(f"on={on!r}: expected 'raise' or 'warn'")
    if reads not in ("backward", "any"):
        raise UsageError(f"reads={reads!r}: expected 'backward' or 'any'")
    return Guard(on, reads)


def is_forbidden(error: Exception) -> bool:
    """Return whether the guard raised this error because torch forbids saved-tensor hooks here."""
    return _is_hooks_error(error.__cause__)


def _is_hooks_error(error: BaseException | None) -> bool:
    """Return whether an error is torch's own error about saved-tensor hooks.

    `torch.func.grad` and functions built on it raise it, because they do not support such hooks.
    """
    return isinstance(error, RuntimeError) and "saved tensor hooks" in str(error)


class Guard:
    """The result of `guard`: a context manager that is also the report of its findings.

    `len` is the number of findings, so a report is true if something was found. `print` shows the
    findings. A guard may be entered again, nested in itself, and in several threads. On an
    accelerator, fingerprints are compared only once, when `backward` ends. The error is therefore
    raised at that point, before the optimizer's step, and it does not name the operand.

    Attributes:
        on: `raise` or `warn`, as for `guard`.
        reads: `backward` or `any`, as for `guard`.
        findings: The findings, a list of `Overwritten`.
        checked: The number of uses of saved tensors that were compared.
        unchecked: The number of uses that were not compared, because torch does not expose the
            content (meta tensors, tensors inside a transform such as vmap or during the capture of
            a CUDA graph). With `reads="any"` this also counts the reads of tensors that are not
            plain memory, such as tensors of a subclass. `print` shows the number.
        unwatched: A sentence for each thing that ran inside the block without being watched (other
            processes and threads, other hooks for saved tensors, CUDA graphs, TorchScript), or that
            ran differently because of the guard (compiled code with `reads="any"`). `print` shows
            them.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> report, weight = gl.guard(on="warn"), torch.ones(3, requires_grad=True)
        >>> with report:
        ...     (weight * torch.ones(3)).sum().backward()
        >>> print(report)
        nothing was overwritten (uses of saved tensors: 1)
    """

    def __init__(self, on: str = "raise", reads: str = "backward") -> None:
        self.on = on
        self.reads = reads
        self.checked = 0
        self._unchecked = 0
        self._warned_count = 0
        self._shared_reads = SharedReads(self._add_finding)
        self._blind_spots = BlindSpots()
        self._step_count = 0  # steps of all optimizers
        self._latest_steps: dict[int, OptimizerStep] = {}  # by the identity of the optimizer
        self._findings: dict[tuple[object, ...], Overwritten] = {}
        self._lock = threading.RLock()
        # The identifier of each thread that is inside the block, once for each time it entered.
        self._threads_inside: list[int] = []
        # For each line that saved a tensor, the variable that shares the tensor's memory.
        self._holders: dict[Line, Holder | None] = {}
        # The comparisons that wait for the end of a backward pass, by autograd's number of it.
        self._pending: dict[int, list[_Comparison]] = {}

    @property
    def findings(self) -> list[Overwritten]:
        """The findings so far, one for each line and operation."""
        return list(self._findings.values())

    @property
    def unchecked(self) -> int:
        """The number of uses and reads that were not compared."""
        return self._unchecked + self._shared_reads.unchecked

    @property
    def unwatched(self) -> list[str]:
        """A sentence for each thing that ran unwatched or differently inside the block."""
        return self._blind_spots.sentences()

    def __len__(self) -> int:
        return len(self._findings)

    def __str__(self) -> str:
        """Return all findings as text, and what was not compared or not watched."""
        uses = f"uses of saved tensors: {self.checked}"
        if self.reads == "any":
            uses += f"; reads of memory shared with other libraries: {self._shared_reads.checked}"
        lines = list(map(str, self.findings)) or [f"nothing was overwritten ({uses})"]
        if self.unchecked:
            reason = "because torch does not expose the tensor's content"
            lines.append(f"not compared, {reason}: {self.unchecked}")
        return "\n".join([*lines, *self.unwatched])

    @uncompiled
    def __enter__(self) -> Guard:
        """Start to check the tensors that this thread saves for backward."""
        try:
            push_saved_tensor_hooks(self._pack, self._unpack)
        except RuntimeError as error:
            raise GpulabError(FORBIDDEN.format(error)) from error
        if not self._threads_inside:
            self._step_hook = register_optimizer_step_post_hook(self._record_step)
        self._last_thread = _thread.ident
        self._threads_inside.append(self._last_thread)
        self._blind_spots.start(keeps_compiled=self.reads != "any")
        if self.reads == "any":
            self._shared_reads.__enter__()
        return self

    @uncompiled
    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Stop the checks in this thread; the last thread to leave the block issues the warning.

        All hooks are removed first, so that none remains active if a later call raises an error.

        Raises:
            OverwrittenError: If an overwritten tensor is found only now, and `on` is `raise`.
            GpulabError: If the block ended because torch does not allow saved-tensor hooks.
        """
        pop_saved_tensor_hooks()
        self._threads_inside.remove(_thread.ident)
        self._blind_spots.stop()
        if not self._threads_inside:
            self._step_hook.remove()
        if self.reads == "any":
            # This removes its own hooks before it reports the findings that it has stored, which
            # may raise an error.
            self._shared_reads.__exit__(error_type, error, traceback)
        # An error, including one raised for a finding, may have ended `backward` early. Its
        # remaining tasks are then still in the queue.
        if error is not None or self._findings:
            drain_ready_queue()
        if _is_hooks_error(error):
            raise GpulabError(FORBIDDEN.format(error)) from error
        if not self._threads_inside:
            self._warn()

    @as_guard_work
    def _pack(self, tensor: Tensor) -> _Saved:
        """Return the object that autograd saves in place of a tensor; torch's hook for saving."""
        saved = _Saved(tensor, user_line(self._last_thread), self._step_count)
        # torch cannot resize a storage whose memory belongs to another library.
        is_foreign = saved.span[1] and not saved.tensor.untyped_storage().resizable()
        # The variable that holds the memory is looked up now, once for each line, because the
        # loader that filled the array may be gone when the tensor is used.
        if is_foreign and saved.line not in self._holders:
            self._holders[saved.line] = nearest_holder(saved.span, self._last_thread)
        return saved

    @uncompiled
    def _unpack(self, saved: _Saved) -> Tensor:
        """Check a saved tensor and return it; torch's hook for use."""
        if not is_guard_running():
            self._check(saved, _current_node(sys._getframe().f_back))
        return saved.tensor

    @as_guard_work
    def _check(self, saved: _Saved, node: Node | None) -> None:
        """Report a saved tensor that `node` is about to use if its content has changed.

        Digests on an accelerator are only stored here; `_report_pending` compares them.
        """
        if version_of(saved.tensor) != saved.version:
            finding = saved.finding(node, "step" if saved.is_parameter else "inplace")
            self._report(finding, saved.span, saved.steps, saved.time)
            return
        digest = None if saved.digest is None else fingerprint(saved.tensor)
        with self._lock:
            if digest is None:
                self._unchecked += 1
            else:
                self.checked += 1
        task = current_backward_pass()
        # Digests on an accelerator are compared once, when `backward` ends.
        is_deferred = isinstance(digest, Tensor) and isinstance(saved.digest, Tensor) and task >= 0
        if not is_deferred and (digest is None or bool(digest == saved.digest)):
            return
        if _is_scratch(node, saved.tensor):
            return
        cause = "data" if span_of(saved.tensor) == saved.span else "replaced"
        finding = saved.finding(node, cause, name_operand=not is_deferred)
        # The report does not refer to the tensor, so it does not keep the content alive.
        report = functools.partial(self._report, finding, saved.span, saved.steps, saved.time)
        if is_deferred:
            assert isinstance(digest, Tensor)
            assert isinstance(saved.digest, Tensor)
            self._compare_after_backward(task, _Comparison(digest, saved.digest, report))
            return
        report()
        buffer = self._shared_reads.track(saved.tensor)
        if buffer:
            # The operation reads this memory next. Without this, it would be reported again.
            buffer.remember(saved.span)

    def _compare_after_backward(self, task: int, comparison: _Comparison) -> None:
        """Make a comparison when the backward pass with this number ends."""
        with self._lock:
            if task not in self._pending:
                call_after_backward(functools.partial(self._report_pending, task))
            self._pending.setdefault(task, []).append(comparison)

    @as_guard_work
    def _report_pending(self, task: int) -> None:
        """Report the tensors that a backward pass used on an accelerator and that had changed.

        All digests are compared in one operation, so that the program waits only once.
        """
        comparisons = self._pending.pop(task)
        device = comparisons[0].at_use.device
        at_use = torch.stack([comparison.at_use.to(device) for comparison in comparisons])
        at_saving = torch.stack([comparison.at_saving.to(device) for comparison in comparisons])
        has_changed = (at_use != at_saving).tolist()
        for comparison in itertools.compress(comparisons, has_changed):
            comparison.report()

    @as_guard_work
    def _record_step(self, optimizer: Optimizer, *_: object) -> None:
        """Record the step of an optimizer, which changed the parameters that have a gradient."""
        self._step_count += 1
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        changed = [span_of(parameter) for parameter in parameters if parameter.grad is not None]
        self._latest_steps[id(optimizer)] = OptimizerStep(
            self._step_count, type(optimizer).__name__, user_line(), changed
        )

    def _report(self, finding: Overwritten, span: Span, steps: int, time: int) -> None:
        """Report a finding of the backward pass.

        `steps` is the number of optimizer steps when the tensor was saved. If a later step changed
        the tensor's memory, the finding names that step as the cause.
        """
        newer_steps = (step for step in self._latest_steps.values() if step.number > steps)
        step = next(
            (
                step
                for step in newer_steps
                if any(spans_overlap(span, changed) for changed in step.changed)
            ),
            None,
        )
        if step:
            finding = finding.with_optimizer_step(step)
        self._add_finding(finding, span, time)
        # After the end of the block, nothing else would issue the warning.
        if not self._threads_inside:
            self._warn()

    def _add_finding(
        self, finding: Overwritten, span: Span = (0, 0), since: int | None = None
    ) -> None:
        """Store a finding with the variable that holds its memory, and raise if `on` is `raise`.

        A repeated finding increases the count of the first one and adds the lines that wrote.
        `since` is a time at which the memory still had the right content: lines that wrote to it
        later are added to the finding.
        """
        with self._lock:
            # Findings with the same key are reported as one.
            key = (finding.operation, *finding.lines.items())
            previous_finding = self._findings.get(key)
            if previous_finding is None:
                finding = self._with_holder(finding, span)
            if since is not None and "changed by" not in finding.lines:
                writers = self._shared_reads.write_lines.writers_since(span, since)
                finding = finding.with_writers(writers, self._hint_for_writers())
            if previous_finding is not None:
                finding = previous_finding.merged_with(finding)
            self._findings[key] = finding
        if self.on == "raise":
            raise OverwrittenError(finding)

    def _with_holder(self, finding: Overwritten, span: Span) -> Overwritten:
        """Return a finding with the variable that holds its memory, if there is one."""
        # The variable that was found at saving is preferred if it still holds this memory.
        holder = self._holders.get(finding.line)
        if not holder or not spans_overlap(holder.span, span):
            holder = nearest_holder(span, self._last_thread)
        return finding.with_holder(holder) if holder else finding

    def _hint_for_writers(self) -> str:
        """Return how the program can find the line that wrote, for a message; "" if it cannot."""
        if self._shared_reads.write_lines.is_tracing and self.on == "raise":
            return HINT_IF_TRACED
        return HINT_IF_NOT_TRACED if self.reads == "backward" else ""

    def _warn(self) -> None:
        """Issue one warning for all findings since the last warning."""
        findings = self.findings[self._warned_count :]
        self._warned_count += len(findings)
        if findings and self.on == "warn":
            warnings.warn("\n".join(map(str, findings)), OverwrittenWarning, stacklevel=3)


class _Comparison(NamedTuple):
    """A comparison of two digests on an accelerator, which is made when `backward` ends.

    Attributes:
        at_use: The digest of the content when the tensor was used.
        at_saving: The digest of the content when the tensor was saved.
        report: Reports the tensor; called if the digests differ.
    """

    at_use: Tensor
    at_saving: Tensor
    report: Callable[[], None]


class _Saved:
    """The object that autograd saves in place of a tensor."""

    __slots__ = ("digest", "is_parameter", "line", "span", "steps", "tensor", "time", "version")

    def __init__(self, tensor: Tensor, line: Line, steps: int) -> None:
        # A leaf itself is kept, as without a guard, so that assignments to its `.data` are seen.
        # Other tensors are detached. Otherwise an operation that saves its own output would refer
        # to itself and never be freed.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version_of(tensor)
        base = base_of(tensor)
        owner = tensor if base is None else base
        self.is_parameter = owner.is_leaf and owner.requires_grad
        self.line = line
        self.steps = steps
        self.time = next_time()
        self.digest = fingerprint(self.tensor)
        self.span = span_of(self.tensor)

    def finding(self, node: Node | None, cause: str, name_operand: bool = True) -> Overwritten:
        """Return a finding for this tensor, without the variable that holds its memory."""
        if node is not None:
            operation = node.name()
        elif current_backward_pass() >= 0:
            operation = "recomputation"
        else:
            operation = "no operation"
        operand = next(_saved_names(node, self.tensor), None) if name_operand else None
        return Overwritten.of(cause, operation, self.tensor, {"saved by": self.line}, operand)


def _current_node(caller: types.FrameType | None) -> Node | None:
    """Return the operation whose backward pass uses a saved tensor.

    Returns None outside a backward pass, and where checkpointing recomputes a forward pass.
    """
    node = current_node()
    if is_checkpoint_frame(caller) and not isinstance(
        node, torch.autograd.function.BackwardCFunction
    ):
        return None
    return node


def _saved_names(node: Node | None, tensor: Tensor, among: Iterable[str] = ()) -> Iterator[str]:
    """Yield the names under which a node saved this tensor, matched by shape and memory."""
    span = span_of(tensor)
    for name, value in saved_values(node, among):
        with contextlib.suppress(RuntimeError):  # some nested tensors have no shape
            # The span (0, 0) belongs to tensors without memory, which cannot be distinguished.
            if (
                isinstance(value, Tensor)
                and value.shape == tensor.shape
                and span_of(value) == span != (0, 0)
            ):
                yield name


def _is_scratch(node: Node | None, tensor: Tensor) -> bool:
    """Return whether the operation itself overwrites the saved tensor, as its backward expects.

    Two operations do this in training mode. Batch normalisation updates its running mean and
    variance, which its backward pass does not use in that mode. A randomised leaky ReLU saves the
    noise tensor before it fills it.
    """
    is_training = any(value for _, value in saved_values(node, ["training"]))
    return is_training and any(_saved_names(node, tensor, ("running_mean", "running_var", "noise")))
