"""Watching how a gradient is computed, operation by operation, so that it can be differentiated once more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gpulab.errors import DataError, GpulabError, UsageError

MARKED = once_differentiable(len).__code__  # of every function with that mark
DETACH = torch.ops.aten.detach.default
ONE_OWNER = torch._C._storage_Use_Count(torch.empty(1).untyped_storage()._cdata) + 1


class UnsupportedError(GpulabError):
    """A loss whose gradient cannot be followed from below; it can still be differentiated twice."""


@dataclass(frozen=True)
class Operation:
    """One call below autograd: `function(*arguments, **options)` returned `results`.

    `constants` are the arguments that autograd takes for constants, such as what was detached.
    `copied` is an argument that the call overwrote, with the copy that stands for it in `arguments`.
    """

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: Any
    constants: tuple[Tensor, ...] = ()
    copied: tuple[Tensor, Tensor] | None = None


def watch_gradient(
    objective: Callable[[], Tensor], points: Sequence[Tensor], follow: Callable[[Operation], None], twice: bool = False
) -> tuple[Tensor, list[Tensor | None]]:
    """A loss and its gradients at `points`; `follow` is told of each operation.

    Some gradients have one kernel that is fast and another that can be differentiated: `twice` asks for that.

    Raises `UnsupportedError` where Python code of the user's own takes part in the backward pass, or where
    memory that another tensor also sees is overwritten: what happens there cannot be seen from below.
    """
    watcher = _Watcher(follow)
    with torch.enable_grad(), watcher:
        loss = objective()
        check_loss(loss)
        _check_graph(loss)
        watcher.forward = False
        gradients = torch.autograd.grad(loss, points, create_graph=twice, allow_unused=True)
    return loss.detach(), list(gradients)


class _Watcher(TorchDispatchMode):
    """Sees every operation below autograd."""

    def __init__(self, follow: Callable[[Operation], None]) -> None:
        super().__init__()
        self.follow, self.forward = follow, True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and tell of it."""
        options, arguments, copied, told = kwargs or {}, tuple(args), None, function
        if function._schema.is_mutable:
            told = _without_overwriting(function, arguments)
            copied = arguments[0], arguments[0].clone()
            arguments = (copied[1], *arguments[1:])
        results = function(*args, **options)
        constants: tuple[Tensor, ...] = ()
        if self.forward and function is not DETACH:
            tensors = [a for a in tree_flatten((args, options))[0] if isinstance(a, Tensor)]
            constants = tuple(tensor for tensor in tensors if not tensor.requires_grad)
        self.follow(Operation(told, arguments, options, results, constants, copied))
        return results


# torch wraps the method so that its compiler leaves it alone, and the wrapper imports the compiler: 120 MB.
_Watcher.__torch_dispatch__ = getattr(_Watcher.__torch_dispatch__, "__wrapped__", _Watcher.__torch_dispatch__)  # type: ignore[method-assign]


def _without_overwriting(function: Any, arguments: tuple[Any, ...]) -> Any:
    """The operation that returns a new tensor where this one overwrites its first argument."""
    name, written = function._schema.name, arguments[0]
    packet = getattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_"), None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet and name.endswith("_") else []
    names = [argument.name for argument in function._schema.arguments]
    fitting = [o for o in overloads if [a.name for a in o._schema.arguments] == names and not o._schema.is_mutable]
    fitting.sort(key=lambda overload: overload._overloadname != function._overloadname)
    if not fitting or not isinstance(written, Tensor):
        raise UnsupportedError(f"{name} overwrites its arguments")
    if torch._C._storage_Use_Count(written.untyped_storage()._cdata) > ONE_OWNER:
        raise UnsupportedError(f"{name} overwrites memory that another tensor sees")
    return fitting[0]


def _check_graph(loss: Tensor) -> None:
    """Autograd functions written in Python may hand over numbers in ways that no operation shows."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            backward = getattr(type(node)._forward_cls, "backward", None)
            if getattr(backward, "__code__", None) is MARKED:
                raise UsageError(f"{type(node).__name__} has no second derivatives: it is marked once_differentiable")
            raise UnsupportedError(f"{type(node).__name__} is written in Python")
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]


def check_loss(value: Any) -> None:
    """Refuse what has no gradient."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(f"the loss is {getattr(value, 'shape', type(value).__name__)}: expected a scalar tensor")
    if not value.requires_grad:
        raise UsageError("the loss does not depend on the parameters by operations that torch can differentiate")
    if not math.isfinite(float(value.detach())):
        raise DataError(f"the loss is {float(value.detach())}: expected a finite number")
