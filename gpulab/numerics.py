"""Number formats: rounding to them, and how many bits a tensor's numbers really use."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpulab.errors import UsageError

# Bits of the significand that are dropped from float32's 23 stored ones.
DROPPED_BITS = {"tf32": 13}
TORCH_FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = ("tf32", *TORCH_FORMATS)
# Significant bits of each format, the leading one included.
SIGNIFICANT_BITS = {"float32": 24, "tf32": 11, "float16": 11, "bfloat16": 8}


def round_to(x: Tensor, name: str, mode: str = "nearest") -> Tensor:
    """Round a float32 tensor to a format's numbers, to the nearest (ties to even); float32 again.

    `mode="truncate"`, for `tf32`, drops the bits that the format lacks, as a unit does that is
    handed float32 numbers and does not read their end. Raises `UsageError` for an unknown format.

    >>> round_to(torch.tensor([1 / 3]), "tf32").item()
    0.333251953125
    """
    if name in TORCH_FORMATS:
        return x.to(TORCH_FORMATS[name]).to(torch.float32)
    if name not in DROPPED_BITS or mode not in ("nearest", "truncate"):
        raise UsageError(f"format {name!r}, mode {mode!r}: expected {', '.join(FORMATS)}, and nearest or truncate")
    dropped = DROPPED_BITS[name]
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    special = ~torch.isfinite(x)
    if mode == "nearest":
        odd = (bits >> dropped) & 1
        bits = bits + ((1 << (dropped - 1)) - 1) + odd
    rounded = (bits & ~((1 << dropped) - 1)).view(torch.float32)
    return torch.where(special, x.to(torch.float32), rounded)


def significant_bits(x: Tensor) -> int:
    """How many significant bits the numbers of a tensor use, the leading one included.

    Full float32 numbers use 24, numbers that were once rounded to TF32 11, to bfloat16 8.

    >>> significant_bits(torch.tensor([0.5, 0.75]))
    2
    """
    numbers = x.detach().to("cpu", torch.float32).contiguous().view(torch.int32).numpy()
    used = int(np.bitwise_or.reduce(numbers & 0x7FFFFF, axis=None)) if numbers.size else 0
    trailing = (used & -used).bit_length() - 1 if used else 23
    return 24 - trailing
