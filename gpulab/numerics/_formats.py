"""Number formats: rounding to a format, distances in it, and detection of rounded tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import is_zero_tensor
from gpulab.errors import UsageError

MODES = ("nearest", "away", "truncate")


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        precision: The number of significant bits, including the leading one.
        minexp: The exponent of the smallest normal number, which is two to this power.
        largest: The largest finite number.
        dtype: Torch's type for this format; None if there is none.
        has_infinities: Whether the format has infinities.
    """

    precision: int
    minexp: int
    largest: float
    dtype: torch.dtype | None = None
    has_infinities: bool = True


MAX_FLOAT32 = torch.finfo(torch.float32).max
SAMPLE_SIZE = 4096  # nearly always enough numbers to show that a tensor was not rounded
MIN_SHARE_OF_LAST_BITS = 0.25
FORMATS = {
    "float32": Format(24, -126, MAX_FLOAT32, torch.float32),
    "tf32": Format(11, -126, (2 - 2.0**-10) * 2.0**127),
    "bfloat16": Format(8, -126, torch.finfo(torch.bfloat16).max, torch.bfloat16),
    "float16": Format(11, -14, 65504.0, torch.float16),
    "float8_e4m3fn": Format(4, -6, 448.0, torch.float8_e4m3fn, has_infinities=False),
    "float8_e5m2": Format(3, -14, 57344.0, torch.float8_e5m2),
}


def round_to(x: Tensor, name: str, mode: str = "nearest") -> Tensor:
    """Round a float32 tensor to the numbers of a format.

    Args:
        x: float32 numbers, in any shape.
        name: The format, one of `gpulab.numerics.FORMATS`. `float32` leaves the numbers unchanged.
        mode: `nearest` (ties to even, IEEE 754). Formats with float32's exponents, such as `tf32`
            and `bfloat16`, also have `away` (nearest, ties away from zero, like `cvt.rna` on a GPU)
            and `truncate` (toward zero: the bits that the format lacks are dropped).

    Returns:
        The rounded numbers, as float32, in the same shape. Numbers that round beyond the format's
        largest number become infinite. With `truncate`, finite numbers become the largest number
        instead. `float8_e4m3fn` has no infinities, so all such numbers become its largest number.

    Raises:
        UsageError: If the format is unknown or does not have the mode, or if the numbers are not
            float32.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.numerics.round_to(torch.tensor([1 / 3]), "tf32").item()
        0.333251953125

    References:
        Micikevicius et al. 2022, *FP8 formats for deep learning* (arXiv 2209.05433); NVIDIA, *A100
        Tensor Core GPU Architecture* (TF32).
    """
    if name not in FORMATS or mode not in MODES:
        raise UsageError(
            f"format {name!r}, mode {mode!r}: expected one of {', '.join(FORMATS)}, and one of"
            f" {', '.join(MODES)}"
        )
    if x.dtype != torch.float32:
        raise UsageError(
            f"expected a tensor of float32 numbers, got {str(x.dtype).removeprefix('torch.')}"
        )
    target = FORMATS[name]
    float32 = FORMATS["float32"]
    if mode != "nearest" and target.minexp > float32.minexp:
        raise UsageError(f"mode {mode!r}: {name} supports only the mode 'nearest'")
    # The zero tensors of forward-mode differentiation have no memory to read bits from.
    if name == "float32" or is_zero_tensor(x):
        return x.clone()
    if target.dtype is None or mode != "nearest":
        return _round_bits(x, float32.precision - target.precision, mode)
    if not target.has_infinities:  # torch before 2.12 converts larger numbers to NaN.
        x = x.clamp(-target.largest, target.largest)
    return x.to(target.dtype).float()


def _round_bits(x: Tensor, n_dropped: int, mode: str) -> Tensor:
    """Round off the last `n_dropped` bits of float32's significand.

    A summand is added to the bits that are dropped. If the number has to be rounded up, the
    addition carries into the last kept bit. The carry may reach the exponent, which is correct as
    well. The dropped bits are then set to zero.
    """
    bits = x.view(torch.int32)
    half = 1 << (n_dropped - 1)  # half of the last kept bit
    summand = {"nearest": half - 1, "away": half, "truncate": 0}[mode]
    # In the mode `nearest` a tie is rounded up only if the last kept bit is 1: to an even number.
    last_kept_bit = (bits >> n_dropped).bitwise_and_(1) if mode == "nearest" else 0
    kept_bits_mask = -(1 << n_dropped)  # ones, followed by `n_dropped` zeros
    rounded = (bits + summand).add_(last_kept_bit).bitwise_and_(kept_bits_mask).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)  # The carry could turn a NaN into a number.


def rounded_format(x: Tensor) -> str | None:
    """Return the format that a float32 tensor was rounded to, `tf32` or `bfloat16`, or None.

    The result for float16 is `tf32`, which has as many significant bits. The result for integers
    and other multiples of one number is None, because these have few significant bits without
    having been rounded.

    >>> numbers = torch.tensor([0.1, 0.2, 0.7, 0.3])
    >>> (
    ...     rounded_format(numbers.bfloat16().float()),
    ...     rounded_format(numbers),
    ...     rounded_format(torch.arange(9.0)),
    ... )
    ('bfloat16', None, None)
    >>> rounded_format(numbers[:3].bfloat16().float()) is None  # three may have few bits by chance
    True
    """
    flat = x.detach().reshape(-1)
    if flat.numel() > SAMPLE_SIZE:
        sample_significands, _ = _significands(flat[:SAMPLE_SIZE])
        if _bit_length(sample_significands) > FORMATS["tf32"].precision:
            return None  # A sample with more bits than both formats settles the question.
    significands, exponents = _significands(flat)
    if significands.size < 4:  # Three numbers may have few bits by chance.
        return None
    length = _bit_length(significands)
    # The position of the lowest set bit of all numbers. If the bits of all numbers, from the
    # highest to this one, span little more than one significand, the numbers are multiples of one
    # number. (`n & -n` is the lowest set bit of n.)
    lowest = (exponents + np.log2(significands & -significands)).min()
    spanned_bits = exponents.max() + 24 - lowest
    if spanned_bits <= length + 2:
        return None
    # Rounding leaves the last kept bit set in about half of the numbers. The differences of nearly
    # equal numbers have few bits as well, but their lengths vary.
    last_bits = significands & -significands
    if np.mean(last_bits == last_bits.min()) < MIN_SHARE_OF_LAST_BITS:
        return None
    for name in ("bfloat16", "tf32"):
        # The numbers may use up to two bits fewer than their format has.
        if 0 <= FORMATS[name].precision - length <= 2:
            return name
    return None


def _significands(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the significands and exponents of the numbers that are neither zero nor subnormal.

    Both are integers. Significands include the leading bit, which float32 does not store.
    """
    # In float32 the 8 bits 0x7F800000 are the exponent, and the 23 bits 0x7FFFFF are the fraction.
    all_bits = x.to("cpu").contiguous().view(torch.int32).to(torch.int64).numpy()
    bits = all_bits[(all_bits & 0x7F800000) != 0]  # zeros and subnormals have the exponent 0
    return (bits & 0x7FFFFF) | 0x800000, (bits & 0x7F800000) >> 23


def _bit_length(significands: np.ndarray) -> int:
    """Return the number of bits from the first to the last that any significand uses."""
    used_bits = int(np.bitwise_or.reduce(significands, initial=0))
    lowest_bit = used_bits & -used_bits
    return used_bits.bit_length() - lowest_bit.bit_length() + 1
