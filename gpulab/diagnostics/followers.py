"""Follows the memory of tensors, from the operation that makes or first meets one until it is freed."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpulab.diagnostics import sketches as sk
from gpulab.diagnostics.ledgers import BEFORE, Ledger, Origin, Piece
from gpulab.numerics.lines import Callers


class Follower(TorchDispatchMode):
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
Follower.__torch_dispatch__ = getattr(  # type: ignore[method-assign]
    Follower.__torch_dispatch__, "__wrapped__", Follower.__torch_dispatch__
)


def unpack(saved: tuple[Tensor, int]) -> Tensor:
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
