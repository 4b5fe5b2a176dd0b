"""What holds memory along training steps: its peak, who made what is there, and what stays from step to step."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import psutil
import torch
from markupsafe import Markup
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpulab.diagnostics import sketches as sk
from gpulab.diagnostics.ledgers import BEFORE, KINDS, RISES, Blocks, Leak, Ledger, Origin, Piece, in_words
from gpulab.errors import UsageError
from gpulab.numerics.lines import Callers
from gpulab.report import Report, paragraphs, table
from gpulab.settings import Setting

SHOWN = 6  # lines of a report


def memory_watch(device: Setting | str = "cpu") -> MemoryWatch:
    """A context manager that sees what holds memory on a device: the peak, its lines, and leaks.

    Call `step()` at the end of each training step, or give it to `gpulab.train` as `watch=lambda *_: watch.step()`.
    On a CPU it follows every tensor that torch's operations make or meet, until its memory is freed, and begins with
    all tensors that there are. On CUDA the bytes are those of torch's memory snapshots, which see what kernels
    allocate for themselves, too; recording these begins and ends with the block. Operations become slower: watch a
    few dozen steps.

    It does not see the memory that NumPy or a C library holds, nor on a CPU what a kernel takes while it runs; the
    resident memory of the whole process (RSS) stands beside what it sees.

    What autograd saves is seen through torch's hooks for saved tensors. Inside another's such hooks (`gpulab.guard`,
    `save_on_cpu`, checkpointing) these apply in its place, and what they keep counts as other.

    Args:
        device: `cpu`, `cuda` or `cuda:1`; options of a setting do not matter.

    Returns:
        A `MemoryWatch`, to be used in a `with` statement, and printed, plotted or saved after it.

    Raises:
        UsageError: for a device without such an instrument.
        GpulabError: for one that this machine lacks.

    Examples:
        >>> model = nn.Linear(100, 100)
        >>> kept = []
        >>> with memory_watch() as watch:
        ...     for _ in range(6):
        ...         kept.append(model(torch.ones(5, 100)))
        ...         watch.step()
        >>> watch.leaks[0].rate >= 5 * 100 * 4, watch.leaks[0].held_by_python
        (True, True)
    """
    return MemoryWatch(Setting.parse(device))


class MemoryWatch(Report):
    """What held memory; see `memory_watch`.

    Attributes:
        peak_bytes: the most that was held at a time, and in which step (`peak_step`).
        before_bytes: what of that was there before the watch.
        peak: a row for each `kind` and `line` with the `bytes` held at the peak, the largest first. The kinds are
            parameters (of modules that were there before, buffers, too), gradients, optimizer state, what was saved
            for backward, and other; the lines are those that made it, of a backward pass those that it differentiates.
        steps: a row a step: `step`, `bytes` held after it, and `rss`, the resident memory of the process.
        leaks: see `Leak`.
    """

    def __init__(self, setting: Setting) -> None:
        if setting.kind not in ("cpu", "cuda"):
            raise UsageError(f"device {setting.device!r}: memory is watched on cpu and cuda")
        setting.check()
        self.device = torch.device(setting.device)
        if setting.kind == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.leaks: list[Leak] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> MemoryWatch:
        self._follower = follower = _Follower(self.device)
        self._rows: list[tuple[int, int, int]] = []
        self._rss = [psutil.Process().memory_info().rss]
        follower.meet_what_there_is()
        self._blocks = None
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history("all", stacks="python")
            self._open.callback(torch.cuda.memory._record_memory_history, None)
            self._blocks = Blocks(torch.cuda.memory._snapshot(), self.device.index, follower.take_addresses())
        self._open.callback(follower.close)
        self._open.callback(register_optimizer_step_post_hook(follower.optimizer_stepped).remove)
        self._open.enter_context(saved_tensors_hooks(follower.pack, _unpack))
        self._open.enter_context(follower)
        return self

    def step(self) -> None:
        """Mark the end of a training step."""
        self._catch_up()
        rss = psutil.Process().memory_info().rss
        self._rows.append((self._ledger.step, self._ledger.total, rss))
        self._ledger.mark()
        if self._blocks:
            self._follower.ledger.mark()

    def __exit__(self, *_: object) -> None:
        try:
            self._catch_up()
            self._conclude()
        finally:
            self._open.close()

    @property
    def _ledger(self) -> Ledger:
        return self._blocks.ledger if self._blocks else self._follower.ledger

    def _catch_up(self) -> None:
        if self._blocks:
            self._blocks.replay(torch.cuda.memory._snapshot(), self._follower.take_addresses())

    def _conclude(self) -> None:
        ledger = self._ledger
        self.steps = pd.DataFrame(self._rows, columns=["step", "bytes", "rss"])
        self.peak_bytes, self.peak_step = ledger.peak, ledger.peak_step
        pieces = list(ledger.at_peak())
        self.before_bytes = sum(piece.size for piece in pieces if piece.step == 0)
        rows = pd.DataFrame([(p.origin.kind, p.origin.line, p.size) for p in pieces], columns=["kind", "line", "bytes"])
        sums = rows.groupby(["kind", "line"], as_index=False).bytes.sum()
        self.peak = sums.sort_values("bytes", ascending=False, ignore_index=True)
        self.leaks = ledger.leaks()
        if self.leaks:
            gc.collect()
            self._catch_up()
            held = self._follower.lines_held_by_python()
            for leak in self.leaks:
                leak.collected = sum(piece.size for piece in ledger.old(leak.line)) < leak.held[-1] / 2
                leak.held_by_python = leak.line in held
        self._rss.append(psutil.Process().memory_info().rss)

    # --- what it says ----------------------------------------------------------------------------------------

    @property
    def growth(self) -> float:
        """Bytes more after each step, from the second to the last; 0 with fewer than two."""
        held = self.steps.bytes
        return float((held.iloc[-1] - held.iloc[1]) / (len(held) - 2)) if len(held) > 2 else 0.0

    @property
    def headline(self) -> str:
        """The peak and the worst leak."""
        peak = f"Peak {in_words(self.peak_bytes)} in step {self.peak_step}"
        if not self.leaks:
            return f"{peak}; {self._no_leak()}"
        return f"{peak}; a leak of {in_words(sum(leak.rate for leak in self.leaks))} a step"

    def _no_leak(self) -> str:
        count = len(self.steps)
        return f"no leak in {count} steps" if count > RISES else f"{count} steps are too few to see a leak"

    def __str__(self) -> str:
        kinds = self.peak.groupby("kind").bytes.sum().reindex(KINDS).dropna()
        shares = ", ".join(f"{kind} {size / max(1, self.peak_bytes):.0%}" for kind, size in kinds.items())
        lines = [
            f"Peak {in_words(self.peak_bytes)} on {self.device} in step {self.peak_step}, "
            f"{in_words(self.before_bytes)} of it there before: {shares}."
        ]
        rows = self.peak.head(SHOWN).itertuples()
        lines += [f"  {in_words(row.bytes)}, {row.kind}: {row.line or 'no line known'}" for row in rows]
        if len(self.steps):
            first, last, more = map(in_words, (self.steps.bytes.iloc[0], self.steps.bytes.iloc[-1], self.growth))
            lines.append(
                f"Held: {first} after the first step, {last} after the last, {more} more a step since the second."
            )
        lines += self._findings() or [f"{self._no_leak()[0].upper()}{self._no_leak()[1:]}."]
        rss = f"The process's resident memory went from {in_words(self._rss[0])} to {in_words(self._rss[1])}"
        if self._blocks:
            seen = "torch's memory snapshots. Not seen: what other libraries allocate, such as NCCL"
        else:
            seen = "every tensor of torch's operations. Not seen: NumPy's memory, C libraries', and what kernels take"
        return "\n".join([*lines, f"Seen: {seen}. {rss}."])

    def _findings(self) -> list[str]:
        """A sentence a leak: first what the program holds, then what hangs on it."""
        found = []
        for leak in sorted(self.leaks, key=lambda leak: not leak.held_by_python)[:SHOWN]:
            words = (
                f"A leak: {in_words(leak.rate)} more a step stay of what was made in {leak.line or 'an unknown line'}"
            )
            if leak.collected:
                words += "; reference cycles held it until Python's collector ran (gc.collect)"
            elif not leak.held_by_python:
                words += "; no tensor of the program holds it, but the graph of one: keep loss.item() or x.detach()"
            found.append(f"{words}.")
        return found

    def html(self) -> str:
        """The sentences, and what was held at the peak as a table."""
        return paragraphs(str(self).splitlines()) + Markup(table(self.peak.head(20)))


# --- tensors ---------------------------------------------------------------------------------------------


class _Follower(TorchDispatchMode):
    """Follows the memory of every tensor that an operation meets or makes, until it is freed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.ledger, self.callers = device, Ledger(), Callers()
        self.references: dict[int, weakref.ref[Any]] = {}
        self.leaves: dict[int, Any] = {}  # of each leaf the handle of its hook
        self.packed: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.addresses: dict[int, list[tuple[int, Origin]]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and see what is new."""
        kwargs = kwargs or {}
        _, _, line = self.callers.of_this()
        for tensor in sk.leaves((args, kwargs)):  # what from_numpy or a loader's worker made is met here first
            self.meet(tensor, line)
        out = operation(*args, **kwargs)
        for tensor in sk.leaves(out):
            self.meet(tensor, line)
        if operation._schema.name.startswith("aten::_fused_"):  # an optimizer that need not be one of torch's
            self.is_for("optimizer state", sk.leaves(args[2:]))
        return out

    def meet(self, tensor: Tensor, line: str, before: bool = False) -> Piece | None:
        """The piece of memory of a tensor, known or new; None for one that has none here."""
        storage = _storage(tensor, self.device)
        if storage is None:
            return None
        key, size = storage._cdata, storage.nbytes()
        piece = self.ledger.live.get(key)
        if piece is None:
            self.references[key] = weakref.ref(storage, functools.partial(self._freed, key))
            piece = self.ledger.born(key, size, Origin(line), before)
            if self.device.type == "cuda":
                self.addresses.setdefault(storage.data_ptr(), []).append((size, piece.origin))
        elif piece.size != size:
            self.ledger.resized(piece, size)
        if tensor.requires_grad and tensor.is_leaf and not tensor._is_view():  # as one without history may be
            piece.origin.kind = "parameters"
            if id(tensor) not in self.leaves and not tensor.is_inference():
                self.leaves[id(tensor)] = tensor.register_post_accumulate_grad_hook(self._accumulated)
        return piece

    def _freed(self, key: int, _: Any) -> None:
        del self.references[key]
        self.ledger.died(key)

    def is_for(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Note what tensors are for; what is a parameter stays one."""
        for tensor in tensors:
            piece = self.meet(tensor, "")
            if piece is not None and piece.origin.kind != "parameters":
                piece.origin.kind = kind

    def meet_what_there_is(self) -> None:
        """Every tensor of this process; of modules, parameters and buffers as such."""
        modules = []
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                piece = self.meet(thing, BEFORE, before=True)
                if piece and thing.is_leaf and (gradient := thing.grad) is not None:
                    self.meet(gradient, BEFORE, before=True)
                    self.is_for("gradients", [gradient])
            elif issubclass(type(thing), nn.Module):
                modules.append(thing)
        for module in modules:
            tensors = [*vars(module).get("_parameters", {}).values(), *vars(module).get("_buffers", {}).values()]
            for piece in (self.meet(t, BEFORE, before=True) for t in tensors if t is not None):
                if piece:
                    piece.origin.kind = "parameters"

    def take_addresses(self) -> dict[int, list[tuple[int, Origin]]]:
        """(bytes, origin) of the tensors that came since the last time, by address."""
        taken, self.addresses = self.addresses, {}
        return taken

    def lines_held_by_python(self) -> set[str]:
        """The lines whose pieces tensors of the program hold, and not only graphs."""
        lines = set()
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and id(thing) not in self.packed:
                storage = _storage(thing, self.device)
                piece = self.ledger.live.get(storage._cdata) if storage is not None else None
                if piece is not None and 0 < piece.step < self.ledger.step - 1:
                    lines.add(piece.origin.line)
        return lines

    def close(self) -> None:
        """Let go of everything."""
        for handle in self.leaves.values():
            handle.remove()
        self.references.clear()
        self.ledger.live.clear()

    # --- what tensors are for --------------------------------------------------------------------------------

    def _accumulated(self, leaf: Tensor) -> None:
        if leaf.grad is not None:
            self.is_for("gradients", [leaf.grad])

    def optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        """Called after each step of an optimizer of torch's."""
        self.is_for("optimizer state", (t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor)))

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """What autograd keeps in place of a tensor: the tensor, detached, which keeps no graph alive."""
        piece, kept = self.meet(tensor, ""), tensor.detach()
        if piece is not None and piece.origin.kind == "other":
            piece.origin.kind = "saved for backward"
        self.packed[id(kept)] = kept
        return kept, kept._version


# torch wraps the method so that its compiler leaves it alone, and the wrapper imports the compiler: 120 MB.
_Follower.__torch_dispatch__ = getattr(  # type: ignore[method-assign]
    _Follower.__torch_dispatch__, "__wrapped__", _Follower.__torch_dispatch__
)


def _unpack(saved: tuple[Tensor, int]) -> Tensor:
    """The tensor that was saved. While hooks are in force torch leaves it to them to see that it is the same."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


def _storage(tensor: Tensor, device: torch.device) -> Any:
    """The memory of a tensor on a device; None for what is none of it."""
    try:
        here = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        return tensor.untyped_storage() if here else None
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, nested, not yet initialized, inside a transform
        return None
