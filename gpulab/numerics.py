"""Number formats: rounding to them, and telling that a tensor's numbers were rounded."""

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
SIGNIFICANT_BITS = {"tf32": 11, "bfloat16": 8}


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


def rounded_format(x: Tensor) -> str | None:
    """The format that the numbers of a float32 tensor were rounded to, judging by their ends.

    `tf32` (or float16, which keeps as many bits), `bfloat16`, or None for full float32 numbers, and for
    whole numbers and their like, which are short without having been rounded.

    >>> rounded_format(torch.randn(100)), rounded_format(round_to(torch.randn(100), "tf32"))
    (None, 'tf32')
    """
    bits = x.detach().to("cpu").contiguous().view(torch.int32).to(torch.int64).numpy().ravel()
    bits = bits[(bits & 0x7F800000) != 0]  # neither zeros nor subnormals, which are short by nature
    if bits.size < 4:
        return None
    significands, exponents = (bits & 0x7FFFFF) | 0x800000, (bits & 0x7F800000) >> 23
    used = int(np.bitwise_or.reduce(significands))
    length = used.bit_length() - (used & -used).bit_length() + 1
    lowest = (exponents + np.log2(significands & -significands)).min()  # the last place of any, and the first below
    if exponents.max() + 24 - lowest <= length + 2:
        return None  # whole numbers and other multiples of one number: short without having been rounded
    formats = ("bfloat16", "tf32")
    return next((name for name in formats if 0 <= SIGNIFICANT_BITS[name] - length <= 2), None)
