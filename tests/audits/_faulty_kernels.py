"""Torch kernels that return wrong results under one of two settings, or in float32 under both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpulab.numerics._formats import round_to


def under_b() -> bool:
    return torch.get_num_threads() == 1


class Kernels(TorchDispatchMode):
    """A mode below the tracer that, like a faulty device, falsifies the results of a float32
    kernel.
    """

    def __init__(self, name: str, wrong: Callable[..., Any], always: bool) -> None:
        super().__init__()
        self.name, self.wrong, self.always, self.count = name, wrong, always, 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operation(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else (out,)
        first = next((t for t in results if isinstance(t, Tensor)), None)
        if (
            operation._schema.name != f"aten::{self.name}"
            or first is None
            or first.dtype != torch.float32
        ):
            return out
        if not (self.always or under_b()):
            return out
        self.count += 1
        falsified = self.wrong(
            operation, args, kwargs or {}, out.clone() if self.name.endswith("_") else out
        )
        return out.copy_(falsified) if self.name.endswith("_") else falsified

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        assert self.count, f"{self.name} was never called: no fault was planted"


def on_results(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def wrong(operation: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return change(out)
        return type(out)(
            change(t) if isinstance(t, Tensor) and t.is_floating_point() else t for t in out
        )

    return wrong


def one_number(t: Tensor) -> Tensor:
    most = torch.arange(t.numel()).view(t.shape) == t.abs().argmax()
    return torch.where(most, 1.5 * t, t)


def short_products(operation: Any, args: Any, kwargs: Any, out: Any) -> Any:
    added = 1 if "addmm" in operation._schema.name else 0
    short = [
        round_to(t, "tf32") if isinstance(t, Tensor) and p >= added else t
        for p, t in enumerate(args)
    ]
    return operation(*short, **kwargs)


WRONG = {
    "a thousandth": on_results(lambda t: t * (1 + 1e-3 * torch.sign(t))),
    "one number": on_results(one_number),
    "rolled": on_results(lambda t: t.roll(1, -1) if t.dim() else t + 0.01),
    "zero at the end": on_results(
        lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == t.numel() - 1, 0.7, t)
    ),
    "nothing": on_results(torch.zeros_like),
    "NaN": on_results(lambda t: t * torch.nan),
}
