"""What a device does with single operations: which it fuses, and which repeat themselves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from gpulab.errors import GpulabError
from gpulab.numerics.sums import fma
from gpulab.settings import Setting, cpu_flags


def measure(function: Callable[..., Any], setting: str, **arguments: Any) -> Any:
    """Call a module's function with a setting; in a fresh process where only that can have the setting.

    Raises:
        GpulabError: where that process dies. What the function raises is raised here, too.
    """
    from joblib.externals.loky import ProcessPoolExecutor

    if Setting.parse(setting).isa is None:
        return function(setting, **arguments)
    try:
        with ProcessPoolExecutor(1, env=Setting.parse(setting).environment()) as process:
            return process.submit(function, setting, **arguments).result()
    except BrokenProcessPool as error:
        raise GpulabError(f"setting {setting!r}: its process ended: {error}") from error


def fused_operations(settings: Sequence[str] | None = None, count: int = 100_000) -> pd.DataFrame:
    """Find out which operations of this machine fuse a multiplication with an addition, and so round once, not twice.

    Each operation computes a · b + c of random float32 numbers, in its own way. The bits are compared with those of
    `gpulab.numerics.fma`, which rounds once, and of `a * b + c` in two steps, which rounds twice.

    Args:
        settings: The settings to compare. By default `cpu`, and where the CPU has a fused instruction `cpu:isa=sse4`,
            which does without. A setting with an `isa` is measured in a process of its own.
        count: How many results each operation gives.

    Returns:
        A data frame with a row for each `setting` and `operation`. `rounded_once` and `rounded_twice` are the shares of
        results with the bits of the one and of the other. Where both are below 1, the operation does neither
        throughout.

    Raises:
        UsageError: For a malformed setting.
        GpulabError: For a setting that cannot run here.

    Examples:
        >>> import gpulab as gl
        >>> gl.device.fused_operations(("cpu",), count=1000).setting.unique().tolist()
        ['cpu']

    References:
        IEEE 754-2008, *IEEE standard for floating-point arithmetic*, which defines the fused multiply-add.
    """
    if settings is None:
        settings = ("cpu", "cpu:isa=sse4") if "fma" in cpu_flags() else ("cpu",)
    return pd.DataFrame([row for setting in settings for row in measure(fused_share, setting, count=count)])


def fused_share(setting: str, count: int) -> list[dict[str, Any]]:
    """The rows of `fused_operations` for one setting."""
    generator = torch.Generator().manual_seed(0)
    (a, c), b = torch.randn(2, count, generator=generator), torch.randn(1, generator=generator)
    expected = {"once": fma(a, b, c), "twice": a * b + c}
    with Setting.parse(setting).apply() as applied:
        x, y, z = (tensor.to(applied.device) for tensor in (a, b, c))
        pair = torch.stack([z, x])
        kernel = torch.stack([torch.ones_like(y), y])
        results = {
            "a * b + c": x * y + z,
            "torch.addcmul(c, a, b)": torch.addcmul(z, x, y),
            "matrix product": (pair.T @ kernel)[:, 0],
            "convolution": F.conv2d(pair[None, :, :, None], kernel.view(1, 2, 1, 1)).flatten(),
        }
    rows = []
    for name, result in results.items():
        shares = {f"rounded_{times}": (result.cpu() == x).double().mean().item() for times, x in expected.items()}
        rows.append({"setting": setting, "operation": name, **shares})
    return rows


def repeatability(settings: Sequence[str] = ("cpu",), times: int = 20) -> pd.DataFrame:
    """Repeat operations on the same numbers, and count how many different results each gives under each setting.

    The operations are a sum, `index_add`, `scatter_add` and the gradient of a convolution. A GPU's threads may add in
    the order in which they arrive. With `deterministic=on` an operation takes another algorithm, or refuses.

    Args:
        settings: The settings to try.
        times: How often each operation is repeated.

    Returns:
        A data frame with a row for each `setting` and `operation`. `results` is the number of results with different
        bits: 1 where the operation repeats itself, empty where it refused. `spread` is the largest distance of a result
        from the first, relative to the norm of the first; NaN where it refused.

    Raises:
        UsageError: For a malformed setting.
        GpulabError: For a setting that cannot run here.

    Examples:
        >>> import gpulab as gl
        >>> gl.device.repeatability(("cpu:threads=1",), times=3).results.tolist()
        [1, 1, 1, 1]
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator)
    indices = torch.randint(0, 100, (200_000,), generator=generator)
    images = torch.randn(8, 16, 48, 64, generator=generator)
    weight = torch.randn(32, 16, 3, 3, generator=generator)
    operations: dict[str, Callable[..., Tensor]] = {
        "sum": lambda x, *_: x.sum(),
        "index_add": lambda x, where, *_: x.new_zeros(100).index_add_(0, where, x),
        "scatter_add": lambda x, where, *_: x.new_zeros(100).scatter_add_(0, where, x),
        "gradient of a convolution": lambda *inputs: _gradient(*inputs[2:]),
    }
    rows = []
    for setting in settings:
        with Setting.parse(setting).apply() as applied:
            inputs = [tensor.to(applied.device) for tensor in (values, indices, images, weight)]
            for name, operation in operations.items():
                row = {"setting": setting, "operation": name, "results": None, "spread": math.nan}
                with contextlib.suppress(RuntimeError):  # asked to be deterministic, and has no such algorithm
                    results = [operation(*inputs).detach().cpu() for _ in range(times)]
                    row["results"] = len({tuple(result.flatten().tolist()) for result in results})
                    row["spread"] = max(float((result - results[0]).norm() / results[0].norm()) for result in results)
                rows.append(row)
    return pd.DataFrame(rows).astype({"results": "Int64"})


def _gradient(images: Tensor, kernel: Tensor) -> Tensor:
    kernel.requires_grad_()
    return torch.autograd.grad(F.conv2d(images, kernel).square().sum(), kernel)[0]
