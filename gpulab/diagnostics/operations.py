"""What a device does with single operations: which it fuses, which repeat themselves, how it converts bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpulab.diagnostics.processes import measure
from gpulab.numerics.sums import fma
from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd


def fused_operations(settings: tuple[str, ...] | None = None, count: int = 100_000) -> pd.DataFrame:
    """Which operations of this machine fuse: their share of the bits that `gpulab.fma` gives.

    Each computes a · b + c on `count` random numbers. `rounded_once` and `rounded_twice` are the shares of
    results with the bits of `fma(a, b, c)` and of `a * b + c`; where both are below 1 it does neither. By
    default the settings are `cpu` and, where the CPU can more, `cpu:isa=sse4`, which has no fused instruction.

    >>> fused_operations(("cpu",), count=1000).setting.unique().tolist()
    ['cpu']
    """
    import pandas as pd

    settings = _with_and_without_fma() if settings is None else settings
    return pd.DataFrame([row for setting in settings for row in measure(fused_share, setting, count=count)])


def _with_and_without_fma() -> tuple[str, ...]:
    from gpulab.settings import cpu_flags

    return ("cpu", "cpu:isa=sse4") if "fma" in cpu_flags() else ("cpu",)


def fused_share(setting: str, count: int) -> list[dict[str, Any]]:
    """The rows of `fused_operations` for one setting."""
    generator = torch.Generator().manual_seed(0)
    a, c = torch.randn(2, count, generator=generator)
    b = torch.randn(1, generator=generator)
    once, twice = fma(a, b, c), a * b + c
    with Setting.parse(setting).apply() as here:
        x, y, z = (tensor.to(here.device) for tensor in (a, b, c))
        pair = torch.stack([z, x])
        kernel = torch.stack([torch.ones_like(y), y])
        made = {
            "a * b + c": x * y + z,
            "torch.addcmul(c, a, b)": torch.addcmul(z, x, y),
            "matrix product": (pair.T @ kernel)[:, 0],
            "convolution": F.conv2d(pair[None, :, :, None], kernel.view(1, 2, 1, 1)).flatten(),
        }
    return [
        {
            "setting": setting,
            "operation": name,
            "rounded_once": (result.cpu() == once).double().mean().item(),
            "rounded_twice": (result.cpu() == twice).double().mean().item(),
        }
        for name, result in made.items()
    ]


def repeatability(settings: tuple[str, ...] = ("cpu",), times: int = 20) -> pd.DataFrame:
    """How many different results an operation gives when it is done `times` over on the same numbers.

    A row per setting and operation: `results` with other bits (1: it repeats itself) and `spread`, the
    largest relative distance between two of them. A GPU's threads add in the order in which they arrive,
    where the operation lets them; `deterministic=on` makes it choose another algorithm, or refuse
    (`results` is then empty).

    >>> repeatability(("cpu:threads=1",), times=3).results.tolist()
    [1, 1, 1, 1]
    """
    import pandas as pd

    rows = [row for setting in settings for row in _repeated(setting, times)]
    return pd.DataFrame(rows).astype({"results": "Int64"})


def _repeated(setting: str, times: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator)
    places = torch.randint(0, 100, (200_000,), generator=generator)
    images = torch.randn(8, 16, 48, 64, generator=generator)
    weight = torch.randn(32, 16, 3, 3, generator=generator)
    rows = []
    with Setting.parse(setting).apply() as here:
        x, where, frames, kernel = (t.to(here.device) for t in (values, places, images, weight))
        kernel.requires_grad_()
        operations = {
            "sum": lambda: x.sum(),
            "index_add": lambda: x.new_zeros(100).index_add_(0, where, x),
            "scatter_add": lambda: x.new_zeros(100).scatter_add_(0, where, x),
            "gradient of a convolution": lambda: torch.autograd.grad(F.conv2d(frames, kernel).square().sum(), kernel)[
                0
            ],
        }
        for name, operation in operations.items():
            try:
                made = [operation().detach().cpu() for _ in range(times)]
            except RuntimeError:  # asked to be deterministic, and has no such algorithm
                rows.append({"setting": setting, "operation": name, "results": None, "spread": math.nan})
                continue
            different = {tuple(result.flatten().tolist()) for result in made}
            spread = max(float((result - made[0]).norm() / made[0].norm()) for result in made)
            rows.append({"setting": setting, "operation": name, "results": len(different), "spread": spread})
    return rows


# --- bytes to numbers and back ---------------------------------------------------------------------------

FORMATS = (torch.float32, torch.float16, torch.bfloat16)


def conversion_check(device: str = "cpu") -> pd.DataFrame:
    """All 256 values of a byte, to numbers in [0, 1] and back, on a device, in every way that is in use.

    A row for each way and format: `returned`, how many of the 256 are the same byte after multiplying by 255
    and rounding to the nearest; `cut`, how many are when the fraction is cut off instead, as `.to(uint8)`
    does; and `as_division`, how many have the bits of x / 255 done by this machine's CPU in that format.

    >>> table = conversion_check().set_index(["way", "format"])
    >>> table.loc[("x / 255", "float32"), ["returned", "cut"]].tolist()
    [256, 256]
    """
    import pandas as pd

    here = Setting.parse(device)
    with here.apply():
        rows = [_row(way, dtype, convert(here.device, dtype)) for dtype in FORMATS for way, convert in WAYS.items()]
    return pd.DataFrame(rows).assign(device=here.device)


def _bytes() -> Tensor:
    return torch.arange(256, dtype=torch.uint8)


def _row(way: str, dtype: torch.dtype, made: Tensor) -> dict[str, Any]:
    back = made * 255
    division = _bytes().to(dtype) / 255
    return {
        "way": way,
        "format": str(dtype).removeprefix("torch."),
        "returned": int((back.round().to(torch.uint8).cpu() == _bytes()).sum()),
        "cut": int((back.to(torch.uint8).cpu() == _bytes()).sum()),
        "as_division": int((made.cpu() == division).sum()),
    }


def _divided(device: str, dtype: torch.dtype) -> Tensor:
    return _bytes().to(device).to(dtype) / 255


def _multiplied(device: str, dtype: torch.dtype) -> Tensor:
    return _bytes().to(device).to(dtype) * (1 / 255)


def _from_float32(device: str, dtype: torch.dtype) -> Tensor:
    """As a loader does: divided on the CPU in float32, then moved and rounded to the format."""
    return (_bytes().float() / 255).to(device, dtype)


def _to_tensor(device: str, dtype: torch.dtype) -> Tensor:
    from PIL import Image
    from torchvision.transforms.functional import to_tensor

    row = to_tensor(Image.fromarray(_bytes()[None].numpy()))
    return row.flatten().to(device, dtype)


def _to_dtype(device: str, dtype: torch.dtype) -> Tensor:
    from torchvision.transforms.v2 import ToDtype
    from torchvision.tv_tensors import Image

    return ToDtype(dtype, scale=True)(Image(_bytes().view(1, 1, -1).to(device))).flatten().as_subclass(Tensor)


WAYS = {
    "x / 255": _divided,
    "x * (1 / 255)": _multiplied,
    "x / 255 in float32, then rounded": _from_float32,
    "torchvision to_tensor": _to_tensor,
    "torchvision ToDtype(scale=True)": _to_dtype,
}
