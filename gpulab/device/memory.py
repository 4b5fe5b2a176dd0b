"""What holds memory along training steps: its peak, the lines that made what was there, and what stays."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from gpulab.diagnostics.count_sketch import leaves
from gpulab.diagnostics.guards import drain, drain_at_the_end
from gpulab.errors import UsageError
from gpulab.numerics.call_sites import Callers, UncompiledDispatchMode
from gpulab.report import Report
from gpulab.settings import Setting

KINDS = ("parameters", "gradients", "optimizer state", "saved for backward", "other")  # a surer one wins over the next
BEFORE = "there before"  # the line of what is older than the watch
NO_TENSOR = "no tensor seen: what kernels take, and the like"
RISES = 3  # steps after which more is held than after the one before, to call it a leak
SHOWN = 6  # lines of the report


@contextlib.contextmanager
def memory_watch(device: Setting | str = "cpu") -> Iterator[MemoryWatch]:
    """Watch what holds memory on a device during training steps: the peak, the lines of code that made it, and leaks.

    Call `watch.step()` at the end of each training step, or give `watch=lambda *_: watch.step()` to `gpulab.train`.
    Print the watch after the block. Every tensor that exists at the beginning, or that torch's operations make or meet,
    is followed until its memory is freed. This makes operations slower: watch a few dozen steps. On CUDA the peak is
    that of torch's allocator, whose peak count is set back at the beginning. `gpulab.guard`, `save_on_cpu` and
    checkpointing keep what the backward pass needs in their own way; inside them it counts as `other`.

    Args:
        device: `cpu`, `cuda` or `cuda:1`. A setting is taken, too; its options do not matter.

    Yields:
        A `MemoryWatch`, which has its results when the block has ended.

    Raises:
        UsageError: For another device.
        GpulabError: For a device that this machine lacks.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> kept, model = [], torch.nn.Linear(100, 100)
        >>> with gl.device.memory_watch() as watch:
        ...     for _ in range(6):
        ...         kept.append(model(torch.ones(5, 100)))
        ...         watch.step()
        >>> print(watch.leaks.iloc[0] >= 5 * 100 * 4)  # bytes more after each step
        True
    """
    setting = Setting.parse(device)
    if setting.kind not in ("cpu", "cuda"):
        raise UsageError(f"device {setting.device!r}: memory is watched on cpu and cuda")
    setting.check()
    follower = _Follower(torch.empty(0, device=setting.device).device)  # of several GPUs with its number
    if setting.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(follower.device)
    watch, saved_tensors = MemoryWatch(follower), saved_tensors_hooks(follower.pack, _unpack)
    try:
        with register_optimizer_step_post_hook(follower.optimizer_stepped), saved_tensors, follower:
            yield watch
    finally:
        drain()
        watch.conclude()


class MemoryWatch(Report):
    """What held memory on a device: what `memory_watch` yields. Print it after the block.

    Attributes:
        peak_bytes: The most bytes that were held at a time.
        peak_step: The step in which that was, from 1.
        peak: A data frame of what was held at the peak, the largest first, with the columns `kind`, `line` and `bytes`.
            The kind is `parameters`, `gradients`, `optimizer state`, `saved for backward` or `other`. The line is the
            one of your code that made it; for what a backward pass made, the line that it differentiates; and
            `there before` for what is older than the watch.
        leaks: A Series of the lines of which ever more stays after each step: how many bytes more a step, by line, the
            worst first. It takes more than three steps to see one.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> weight = torch.ones(1000, requires_grad=True)
        >>> with gl.device.memory_watch() as watch:
        ...     for _ in range(5):
        ...         (2 * weight).sum().backward()
        ...         watch.step()
        >>> watch.peak_bytes >= 2 * 4000, len(watch.leaks)  # at least the weight and its gradient; no leak
        (True, 0)
    """

    def __init__(self, follower: _Follower) -> None:
        self._follower = follower
        self._bytes_by_step: list[Counter[str]] = []  # after each step, by line, the bytes that were made before it

    def step(self) -> None:
        """Mark the end of a training step."""
        self._bytes_by_step.append(self._follower.made_before(self._follower.step))
        self._follower.step += 1

    def conclude(self) -> None:
        """Compute the results. `memory_watch` calls it at the end of its block."""
        follower = self._follower
        follower.meet_all()
        self.peak_bytes, self.peak_step = follower.peak, follower.peak_step
        pieces = [*follower.live.values(), *follower.freed_since_peak]
        rows = [(piece.kind, piece.line, piece.size) for piece in pieces if piece.number <= follower.count_at_peak]
        if follower.device.type == "cuda":
            allocated = torch.cuda.memory_stats(follower.device)["requested_bytes.all.peak"]
            self.peak_bytes = max(follower.peak, allocated)
            rows.append(("other", NO_TENSOR, self.peak_bytes - follower.peak))
        sums = pd.DataFrame(rows, columns=["kind", "line", "bytes"]).groupby(["kind", "line"], as_index=False).sum()
        self.peak = sums.sort_values("bytes", ascending=False, ignore_index=True)
        gc.collect()  # what reference cycles hold is no leak
        self.leaks = leaks(self._bytes_by_step, follower.made_before(follower.step - 1))

    def __str__(self) -> str:
        kinds = self.peak.groupby("kind").bytes.sum().reindex(KINDS).dropna()
        shares = ", ".join(f"{kind} {size / max(1, self.peak_bytes):.0%}" for kind, size in kinds.items())
        before = decimal(self.peak.bytes[self.peak.line == BEFORE].sum())
        peak = f"Peak {decimal(self.peak_bytes)} on {self._follower.device} in step {self.peak_step}"
        lines = [f"{peak}, {before} of it there before: {shares}."]
        rows = self.peak.head(SHOWN).itertuples()
        lines += [f"  {decimal(row.bytes)}, {row.kind}: {row.line or 'no line known'}" for row in rows]
        for line, rate in self.leaks.head(SHOWN).items():
            lines.append(f"A leak, {decimal(round(rate))} more a step: {line or 'no line known'}")
        steps = len(self._bytes_by_step)
        if len(self.leaks):
            lines.append("A loss or an output that is kept keeps its graph: keep loss.item() or x.detach().")
        elif steps > RISES:
            lines.append(f"No leak in {steps} steps.")
        else:
            lines.append(f"{steps} steps are too few to see a leak.")
        return "\n".join([*lines, "Not seen: NumPy's memory, other libraries', and on a CPU what kernels take."])


def leaks(bytes_by_step: Sequence[Mapping[str, int]], remaining: Mapping[str, int]) -> pd.Series:
    """The lines of which ever more stays, with the bytes more a step, the worst first.

    Their bytes never shrank, and grew after three steps at least and in the second half of them: what is made once,
    such as Adam's moments, does not grow, and a cache that is full does so no more. `bytes_by_step` has, after each
    step, by line the bytes that are older than the step; `remaining` those that are left of them in the end.
    """
    if len(bytes_by_step) <= RISES:
        return pd.Series(dtype=float)
    by_step = pd.DataFrame(bytes_by_step).fillna(0)
    rises, last = by_step.diff().iloc[1:], by_step.iloc[-1]
    grows = (rises >= 0).all() & ((rises > 0).sum() >= RISES) & (rises.tail(len(bytes_by_step) // 2) > 0).any()
    stays = pd.Series(remaining, dtype=float).reindex(last.index, fill_value=0) > last / 2
    return rises.mean()[grows & stays].sort_values(ascending=False)


@dataclass(eq=False)
class _Piece:
    """A piece of memory: what made it, in which step and as which of all, its bytes, and what it is for."""

    line: str
    step: int  # 0: before the watch
    number: int
    freed: weakref.ref[Any]  # calls back when the memory is
    size: int = 0
    kind: str = KINDS[-1]


class _Follower(UncompiledDispatchMode):
    """Follows the memory of every tensor that an operation meets or makes, until it is freed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.callers = device, Callers()
        self.live: dict[int, _Piece] = {}  # by the storage
        self.freed_since_peak: list[_Piece] = []
        self.step = self.total = self.peak = self.count = self.count_at_peak = 0
        self.meet_all()
        self.step = self.peak_step = 1

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and see what is new."""
        kwargs = kwargs or {}
        _, _, line = self.callers.of_this()
        for tensor in leaves((args, kwargs)):  # what from_numpy or a loader's worker made is met here first
            self.meet(tensor, line)
        out = operation(*args, **kwargs)
        for tensor in leaves(out):
            self.meet(tensor, line)
        if [argument.name for argument in operation._schema.arguments[:2]] == ["self", "grads"]:  # a fused optimizer's
            self.label("gradients", args[1])
            self.label("optimizer state", leaves(args[2:]))
        return out

    def meet(self, tensor: Tensor, line: str = "") -> _Piece | None:
        """The piece of memory of a tensor, known or new; None for one that has none here."""
        try:
            storage = tensor.untyped_storage() if tensor.device == self.device else None
        except (RuntimeError, NotImplementedError, ValueError):  # sparse, nested, not initialized, in a transform
            storage = None
        if storage is None:
            return None
        key, size = storage._cdata, storage.nbytes()
        if key not in self.live:
            self.count += 1
            freed = weakref.ref(storage, functools.partial(self._freed, key))
            self.live[key] = _Piece(line if self.step else BEFORE, self.step, self.count, freed)
        piece = self.live[key]
        piece.line = piece.line or line  # autograd saves an input before the operation runs
        if isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf and not tensor._is_view()):
            piece.kind = KINDS[0]
        self.total += size - piece.size
        piece.size = size
        if self.total > self.peak:
            self.peak, self.peak_step, self.count_at_peak = self.total, self.step, self.count
            self.freed_since_peak.clear()
        return piece

    def _freed(self, key: int, _: Any) -> None:
        piece = self.live.pop(key)
        self.total -= piece.size
        if piece.number <= self.count_at_peak:
            self.freed_since_peak.append(piece)

    def meet_all(self) -> None:
        """Meet all tensors of this process, and see which of them are gradients."""
        for candidate in gc.get_objects():
            if issubclass(type(candidate), Tensor) and self.meet(candidate) and candidate.is_leaf:
                self.label("gradients", [candidate.grad])

    def made_before(self, step: int) -> Counter[str]:
        """The bytes that are older than a step, by the line that made them."""
        sizes = Counter[str]()
        for piece in list(self.live.values()):
            if piece.step < step:
                sizes[piece.line] += piece.size
        return sizes

    def label(self, kind: str, tensors: Iterable[Any]) -> None:
        """Note what those tensors are for that there are, unless something surer is known."""
        for tensor in tensors:
            piece = self.meet(tensor) if isinstance(tensor, Tensor) else None
            if piece is not None:
                piece.kind = min(piece.kind, kind, key=KINDS.index)

    def optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        """Called after each step of an optimizer of torch's."""
        self.label("gradients", (p.grad for group in optimizer.param_groups for p in group["params"]))
        self.label("optimizer state", tree_leaves(dict(optimizer.state)))

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """What autograd keeps in place of a tensor: the tensor, detached, which keeps no graph alive."""
        drain_at_the_end()
        self.label("saved for backward", [tensor])
        return tensor.detach(), tensor._version


def _unpack(saved: tuple[Tensor, int]) -> Tensor:
    """The tensor that was saved. While hooks are in force torch leaves it to them to see that it is the same."""
    drain_at_the_end()  # backward may be called in another thread
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(f"a tensor {tuple(tensor.shape)} for backward has been modified by an inplace operation")
    return tensor
