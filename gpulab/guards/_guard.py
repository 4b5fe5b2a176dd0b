"""A guard that detects tensors overwritten after autograd saved them and before it uses them.

Autograd counts the in-place operations that torch itself does. It does not see NumPy writing into a
buffer that a tensor shares, a write through `.data`, or a loader that fills one buffer again and
again: `backward` then computes with whatever lies there. The guard takes a fingerprint of every
tensor when it is saved, in the hooks of `torch.autograd.graph.saved_tensors_hooks`, and compares it
when it is used. While such hooks are in force torch skips its own check of the version counter, so
the guard does that as well.
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
from dataclasses import replace

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
from gpulab.guards._findings import OptimizerStep, Overwritten
from gpulab.guards._fingerprints import fingerprint
from gpulab.guards._holders import Holder, nearest_holder, spans_overlap
from gpulab.guards._reentrancy import as_guard_work, is_guard_running
from gpulab.guards._shared_reads import SharedReads
from gpulab.guards._write_lines import next_time

FORBIDDEN = (
    "torch forbids the guard's hooks here ({}); put it around what calls backward, not around"
    " torch.func"
)


@as_guard_work
def drain_ready_queue() -> None:
    """Drop what a failed `backward` left in this thread's ready queue, as the next one does.

    What stays there keeps its memory. What is there when the thread or Python ends is destroyed by
    torch without Python, and with it the hooks of the guard: with torch 2.15 the process may die of
    it, with a segmentation fault.
    """
    # inside a transform of torch.func, where there is nothing to drop
    with contextlib.suppress(RuntimeError):
        torch.ones((), device="cpu", requires_grad=True).backward()


class _ThreadState(threading.local):
    """The state of each thread, created when it first enters a guard or uses a saved tensor."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        # ends with the thread, before torch destroys the thread's queue
        self.lifetime: set[None] = set()
        # The finalizer of the main thread's set runs when Python ends.
        weakref.finalize(self.lifetime, drain_ready_queue)


_thread = _ThreadState()


@uncompiled
def guard(on: str = "raise", reads: str = "backward") -> Guard:
    """Refuse, inside the `with` block, tensors that something overwrites before they are used.

    Autograd saves tensors in the forward pass and uses them in `backward`; the guard compares their
    content in between. What is saved inside the block is compared even where `backward` is called
    after it. A tensor that is overwritten and never used is no error. Gradients are the same bits
    with and without the guard.

    What never passes torch's hooks for saved tensors is not seen:

    - what was overwritten before the forward pass read it, as in a list of frames that share one
      buffer (with `reads="any"` it is);
    - what a `torch.autograd.Function` keeps as an attribute (`ctx.x = x`; say
      `ctx.save_for_backward(x)`), or one written in C++ as a member of its own;
    - what a hook of a tensor or module, or any other closure, keeps for backward;
    - a graph that another thread builds: enter the same guard in that thread, too;
    - what a graph that `torch.compile` made keeps for itself; what it saves through autograd is
      compared. With `reads="any"` torch compiles nothing inside the block, so there a compiled
      model runs as if it were not. Torch 2.6 compiles the guard itself, which then fails or blames
      what is right, where a compiled function calls `backward`: compile the model alone there;
    - what is saved inside `torch.autograd.graph.save_on_cpu`, because torch applies the innermost
      hooks alone. A guard inside `save_on_cpu` takes its place.

    Where such things occur inside the block and can be noticed, the report says so
    (`Guard.unwatched`). With `reads="any"` a finding names the line that wrote
    (`Overwritten.writers`), unless a debugger or a measurement of coverage follows the program's
    lines already.

    Args:
        on: `raise` raises `OverwrittenError` where the first one is about to be used, which ends
            `backward`; `warn` lets `backward` go on, collects into the `Guard` that the block
            yields, and warns once at its end.
        reads: `backward` compares what autograd has saved. `any` compares, too, what any operation
            reads of memory that a tensor shares with NumPy or another library: a tensor is refused
            that was made there earlier than another one, and whose content has changed since. With
            CUDA, pinned memory is refused, too, that is written or read between a copy with
            `non_blocking=True` and the next wait. `.numpy()` is a read. Not seen are what NumPy
            reads later through the view that it gave, what `torch.save` writes, other processes,
            views of one memory that begin at different places, `torch.from_file` twice of one file,
            `frombuffer` and `from_dlpack` under a name that was imported before, and a single
            tensor that is read before and after its memory was written, which may be meant. Two
            tensors of one array that are both meant as views of it are blamed; so may be, in a
            memory above 64 KiB, a tensor beside whose elements others have changed.

    Returns:
        A `Guard`, to be used in a `with` statement.

    Raises:
        UsageError: for another `on` or `reads`.
        GpulabError: where torch forbids its hooks (inside `torch.func.grad` and what is built on
            it).

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
    """Whether an error says that torch forbids saved-tensor hooks, as in `torch.func.grad`."""
    return isinstance(error.__cause__, RuntimeError) and "saved tensor hooks" in str(
        error.__cause__
    )


class Guard:
    """The result of `guard`: a context manager, and at the same time the report of its findings.

    `len` is the number of findings, so a report is true when something was found; `print` says
    them. A guard may be entered again, inside itself, and in several threads. On an accelerator the
    answers are read once, when `backward` ends, so the error comes then, before the optimizer's
    step, and the operand is not named.

    Attributes:
        on: `raise` or `warn`, as for `guard`.
        reads: `backward` or `any`, as for `guard`.
        findings: What was found, as a list of `Overwritten`.
        checked: how many uses of saved tensors were compared.
        unchecked: how many were not, because torch does not give their content away (meta tensors,
            inside a transform such as vmap, while a CUDA graph is being captured). With
            `reads="any"` it counts, too, the reads of tensors that are no plain memory, such as
            those of a subclass. `print` says how many there were.
        unwatched: What ran inside the block and was not watched (other processes and threads, other
            hooks for saved tensors, CUDA graphs, TorchScript), or ran otherwise because of the
            guard (compiled code, under `reads="any"`), a sentence each. `print` says them.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> report, weight = gl.guard(on="warn"), torch.ones(3, requires_grad=True)
        >>> with report:
        ...     (weight * torch.ones(3)).sum().backward()
        >>> print(report)
        nothing was overwritten in 1 uses of saved tensors
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
        self._threads: list[int] = []  # the threads inside the block
        self._holders: dict[Line, Holder | None] = {}  # of the memory that a line saved
        # The digests of an accelerator and the function that reports a difference, by autograd's
        # number of a backward pass.
        self._pending: dict[int, list[tuple[Tensor, Tensor, Callable[[], None]]]] = {}

    @property
    def findings(self) -> list[Overwritten]:
        """The findings so far, one for each line and operation."""
        return list(self._findings.values())

    @property
    def unchecked(self) -> int:
        """How many uses and reads were not compared."""
        return self._unchecked + self._shared_reads.unchecked

    @property
    def unwatched(self) -> list[str]:
        """What ran inside unwatched, or differently because of the guard, a sentence each."""
        return self._blind_spots.sentences()

    def __len__(self) -> int:
        return len(self._findings)

    def __str__(self) -> str:
        uses = f"{self.checked} uses of saved tensors"
        if self.reads == "any":
            uses += (
                f" and {self._shared_reads.checked} reads of memory that tensors share with others"
            )
        lines = list(map(str, self.findings)) or [f"nothing was overwritten in {uses}"]
        if self.unchecked:
            reason = "because torch does not give the tensor's content away"
            lines.append(f"not compared: {self.unchecked} others, {reason}")
        return "\n".join([*lines, *self.unwatched])

    @uncompiled
    def __enter__(self) -> Guard:
        try:
            push_saved_tensor_hooks(self._pack, self._unpack)
        except RuntimeError as error:
            raise GpulabError(FORBIDDEN.format(error)) from error
        if not self._threads:
            self._step_hook = register_optimizer_step_post_hook(self._record_step)
        self._last_thread = _thread.ident
        self._threads.append(self._last_thread)
        self._blind_spots.start(keeps_compiled=self.reads != "any")
        if self.reads == "any":
            self._shared_reads.__enter__()
        return self

    @uncompiled
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        pop_saved_tensor_hooks()
        self._threads.remove(_thread.ident)
        self._blind_spots.stop()
        if not self._threads:
            self._step_hook.remove()
        if self.reads == "any":
            self._shared_reads.__exit__(kind, error, trace)  # this may raise
        if error is not None or self._findings:
            drain_ready_queue()
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise GpulabError(FORBIDDEN.format(error)) from error
        if not self._threads:
            self._warn()

    @as_guard_work
    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, user_line(self._last_thread), self._step_count)
        foreign = saved.span[1] and not saved.tensor.untyped_storage().resizable()
        # Asked now, once a line: the loader that has filled the array may be gone when the tensor
        # is used.
        if foreign and saved.line not in self._holders:
            self._holders[saved.line] = nearest_holder(saved.span, self._last_thread)
        return saved

    @uncompiled
    def _unpack(self, saved: _Saved) -> Tensor:
        if not is_guard_running():
            self._check(saved, _current_node(sys._getframe().f_back))
        return saved.tensor

    @as_guard_work
    def _check(self, saved: _Saved, node: Node | None) -> None:
        if version_of(saved.tensor) != saved.version:
            finding = saved.finding(node, "step" if saved.is_parameter else "inplace")
            self._report(finding, saved.span, saved.steps, saved.time)
            return
        digest = None if saved.digest is None else fingerprint(saved.tensor)
        with self._lock:
            self.checked += digest is not None
            self._unchecked += digest is None
        task = current_backward_pass()
        # Digests on an accelerator are compared once, when `backward` ends.
        is_deferred = isinstance(digest, Tensor) and isinstance(saved.digest, Tensor) and task >= 0
        if not is_deferred and (digest is None or bool(digest == saved.digest)):
            return
        if _is_scratch(node, saved.tensor):
            return
        cause = "data" if span_of(saved.tensor) == saved.span else "replaced"
        finding = saved.finding(node, cause, name_operand=not is_deferred)
        # The report refers to no tensor, so it keeps no content of one alive.
        report = functools.partial(self._report, finding, saved.span, saved.steps, saved.time)
        if not is_deferred:
            report()
            buffer = self._shared_reads.track(saved.tensor)
            if buffer:
                buffer.remember(saved.span)  # reported once: the operation is about to read it
            return
        assert isinstance(digest, Tensor)
        assert isinstance(saved.digest, Tensor)
        with self._lock:
            if task not in self._pending:
                call_after_backward(functools.partial(self._report_pending, task))
            self._pending.setdefault(task, []).append((digest, saved.digest, report))

    @as_guard_work
    def _report_pending(self, task: int) -> None:
        """Report the changed tensors among those that a backward pass used on an accelerator."""
        digests_used, digests_saved, reports = zip(*self._pending.pop(task), strict=True)
        device = digests_used[0].device
        used_digests = torch.stack([digest.to(device) for digest in digests_used])
        saved_digests = torch.stack([digest.to(device) for digest in digests_saved])
        has_changed = (used_digests != saved_digests).tolist()
        for report in itertools.compress(reports, has_changed):
            report()

    @as_guard_work
    def _record_step(self, optimizer: Optimizer, *_: object) -> None:
        """An optimizer has made a step: it changed the parameters that have a gradient."""
        self._step_count += 1
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        changed = [span_of(parameter) for parameter in parameters if parameter.grad is not None]
        self._latest_steps[id(optimizer)] = OptimizerStep(
            self._step_count, type(optimizer).__name__, user_line(), changed
        )

    def _report(self, finding: Overwritten, span: Span, steps: int, time: int) -> None:
        """Report a finding of the backward pass, which an optimizer step may have caused."""
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
        if not self._threads:
            self._warn()

    def _add_finding(
        self, finding: Overwritten, span: Span = (0, 0), since: int | None = None
    ) -> None:
        """Store a finding with the holder of its memory; raise or warn as requested.

        It is of memory that was right at a time, so the line that wrote there after it is looked
        for.
        """
        with self._lock:
            # Findings with the same key are reported as one.
            key = (
                finding.operation,
                *finding.lines.items(),
            )
            previous_finding = self._findings.get(key)
            if previous_finding:
                finding = replace(previous_finding, count=previous_finding.count + 1)
            else:
                holder = self._holders.get(finding.line)
                if not holder or not spans_overlap(holder.span, span):
                    holder = nearest_holder(span, self._last_thread)
                if holder:
                    finding = finding.with_holder(holder)
            is_writer_known = finding.writers or "changed by" in finding.lines
            if since is not None and not is_writer_known and not previous_finding:
                writers = self._shared_reads.write_lines.writers_since(span, since)
                finding = finding.with_writers(writers, self.reads == "any")
            self._findings[key] = finding
        if self.on == "raise":
            raise OverwrittenError(finding)

    def _warn(self) -> None:
        """Warn once of all findings since the last warning."""
        findings = self.findings[self._warned_count :]
        self._warned_count += len(findings)
        if findings and self.on == "warn":
            warnings.warn("\n".join(map(str, findings)), OverwrittenWarning, stacklevel=3)


class _Saved:
    """The object that autograd saves in place of a tensor."""

    __slots__ = ("digest", "is_parameter", "line", "span", "steps", "tensor", "time", "version")

    def __init__(self, tensor: Tensor, line: Line, steps: int) -> None:
        # A leaf is kept itself, as without a guard, and sees what is assigned to its `.data`.
        # Others are detached: an operation that keeps its own output would otherwise keep itself
        # alive for ever.
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
        """The finding before the holder of the memory is searched for."""
        is_backward = current_backward_pass() >= 0
        operation = "recomputation" if is_backward else "no operation"
        if node is not None:
            operation = node.name()
        operand = next(_saved_names(node, self.tensor), None) if name_operand else None
        return Overwritten.of(cause, operation, self.tensor, {"saved by": self.line}, operand)


def _current_node(caller: types.FrameType | None) -> Node | None:
    """The operation whose backward pass uses a saved tensor; None in recomputation or outside."""
    node = current_node()
    if is_checkpoint_frame(caller) and not isinstance(
        node, torch.autograd.function.BackwardCFunction
    ):
        return None
    return node


def _saved_names(node: Node | None, tensor: Tensor, among: Iterable[str] = ()) -> Iterator[str]:
    """The names under which a node saved this tensor, matched by shape and memory address."""
    span = span_of(tensor)
    for name, value in saved_values(node, among):
        with contextlib.suppress(RuntimeError):  # some nested tensors have no shape
            if (
                isinstance(value, Tensor)
                and value.shape == tensor.shape
                and span_of(value) == span != (0, 0)
            ):
                yield name


def _is_scratch(node: Node | None, tensor: Tensor) -> bool:
    """Whether the operation itself writes there after saving, as its backward pass expects.

    Batch normalisation moves its running mean and variance, which its backward pass never uses; a
    randomised leaky ReLU keeps the tensor that it is about to fill with its noise.
    """
    is_training = any(value for _, value in saved_values(node, ["training"]))
    return is_training and any(_saved_names(node, tensor, ("running_mean", "running_var", "noise")))
