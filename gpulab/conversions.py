"""From bytes to numbers and back: does a device change the pixels on the way in, or on the way out?

One of the sources blames a GPU's "read-write conversion" of images for a network that fails on a newer
card. There are only 256 bytes, so all of them can be tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd

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
