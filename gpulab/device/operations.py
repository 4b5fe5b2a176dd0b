"""How a device converts bytes to numbers and back."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from gpulab.errors import extra
from gpulab.settings import Setting

FORMATS = (torch.float32, torch.float16, torch.bfloat16)


@extra("notebooks")
def byte_round_trip(device: str = "cpu") -> pd.DataFrame:
    """Convert all 256 values of a byte to numbers in [0, 1] and back, and count how many return.

    This is done on a device, in the ways in which programs scale images: by division, by multiplication with 1 / 255,
    and by two functions of torchvision; in float32, float16 and bfloat16.

    Args:
        device: The setting to compute under, such as `cpu` or `cuda`.

    Returns:
        A data frame with a row for each `way` and `format`. `returned` is how many of the 256 bytes come back after the
        number is multiplied by 255 and rounded to the nearest; `cut`, how many do when the fraction is cut off instead,
        as `.to(torch.uint8)` does; `as_division`, how many numbers have the bits of x / 255 computed on this machine's
        CPU in that format. `device` is where it was done.

    Raises:
        UsageError: For a malformed setting.
        GpulabError: For a setting that cannot run here, or where Pillow or torchvision is not installed.

    Examples:
        >>> import gpulab as gl
        >>> table = gl.device.byte_round_trip().set_index(["way", "format"])
        >>> table.loc[("x / 255", "float32"), ["returned", "cut"]].tolist()
        [256, 256]
    """
    pixels = torch.arange(256, dtype=torch.uint8)
    rows = []
    with Setting.parse(device).apply() as applied:
        for dtype in FORMATS:
            for way, numbers in _to_numbers(pixels, applied.device, dtype).items():
                back = numbers * 255
                returned = int((back.round().to(torch.uint8).cpu() == pixels).sum())
                cut = int((back.to(torch.uint8).cpu() == pixels).sum())
                as_division = int((numbers.cpu() == pixels.to(dtype) / 255).sum())
                rows.append((way, str(dtype).removeprefix("torch."), returned, cut, as_division))
    frame = pd.DataFrame(rows, columns=["way", "format", "returned", "cut", "as_division"])
    return frame.assign(device=applied.device)


def _to_numbers(pixels: Tensor, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Bytes (256,) as numbers from 0 to 1, by the way they are converted."""
    from PIL import Image
    from torchvision import tv_tensors
    from torchvision.transforms.functional import to_tensor
    from torchvision.transforms.v2 import ToDtype

    on_device = pixels.to(device)
    image = tv_tensors.Image(on_device.view(1, 1, -1))
    return {
        "x / 255": on_device.to(dtype) / 255,
        "x * (1 / 255)": on_device.to(dtype) * (1 / 255),
        "x / 255 in float32, then rounded": (pixels.float() / 255).to(device, dtype),  # as a loader does, on the CPU
        "torchvision to_tensor": to_tensor(Image.fromarray(pixels[None].numpy())).flatten().to(device, dtype),
        "torchvision ToDtype(scale=True)": ToDtype(dtype, scale=True)(image).flatten().as_subclass(Tensor),
    }
