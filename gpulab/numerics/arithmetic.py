"""What a chip makes of a product of matrices: the format that it rounds the factors to, and how it adds up.

Sources: Fasi, Higham, Mikaitis, Pranesh 2021, *Numerical behavior of NVIDIA tensor cores* (PeerJ Computer
Science 7:e330); Xie, Wang, Yang, Yang 2025, *MMA-Sim* (arXiv 2511.10909); Khattak, Mikaitis 2025, *Accurate
models of NVIDIA tensor cores* (arXiv 2512.07004); NVIDIA, *A100 Tensor Core GPU Architecture* (TF32).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpulab.errors import UsageError
from gpulab.numerics.formats import FORMATS, power_of_two, round_to

ORDERS = ("sequential", "pairwise", "tensor-core")
MATRIX, CONVOLUTION, WEIGHT = range(3)  # kinds of product, as `Arithmetic.roundings` counts them
CHUNK = 1 << 18  # products that are looked at together: a tensor of 2 MiB, which caches hold


@dataclass(frozen=True)
class Arithmetic:
    """How a chip multiplies and sums matrices of float32 numbers.

    Attributes:
        name: What it is called.
        format: The format that the factors are rounded to, a name of `gpulab.numerics.FORMATS`.
        roundings: How they are rounded (a mode of `gpulab.numerics.round_to`): in matrix products; in convolutions and
            the gradient of their input; in the gradient of their weight.
        result: The format that the sum, which is float32's, is rounded to.
        order: How the products are added, see `gpulab.numerics.emulate`; None leaves it to this machine.
        slices: Into how many sums a sum is split; these are added in turn.
        block: How many products a tensor core adds to the sum at once.
        fraction: How many bits below the leading bit of the block's largest product each product is cut.
        kept: How many significant bits the new sum is cut to.
        step: A slice has a multiple of so many products.
        tile: How many channels a convolution runs through at every place of its kernel before the next ones; None for
            all.
    """

    name: str
    format: str = "float32"
    roundings: tuple[str, str, str] = ("nearest", "nearest", "nearest")
    result: str = "float32"
    order: str | None = None
    slices: int = 1
    block: int = 8
    fraction: int = 25
    kept: int = 24
    step: int = 8
    tile: int | None = None

    def rounded(self, x: Tensor, kind: int = MATRIX) -> Tensor:
        """Round a factor to the format; for an 8-bit format it is first scaled to its range, by a power of two."""
        if self.format == "float32":
            return x
        if not self.format.startswith("float8"):
            return round_to(x, self.format, self.roundings[kind])
        largest = x.abs().amax() if x.numel() else x.new_tensor(1.0)
        exponent = torch.log2(FORMATS[self.format].largest / largest).floor()
        scale = torch.where(exponent.isfinite(), torch.exp2(exponent.clamp(-100, 100)), 1.0)
        return round_to(x * scale, self.format, self.roundings[kind]) / scale

    def finished(self, x: Tensor) -> Tensor:
        """Round a product to the result's format, contiguous, as a kernel returns it."""
        return (x if self.result == "float32" else round_to(x, self.result)).contiguous()

    @property
    def adds_up_here(self) -> bool:
        """Whether `summed` adds up the products, and not this machine's library."""
        if self.order == "tensor-core" and self.format == "float32":
            return False  # float32 numbers do not pass the tensor cores
        return self.order is not None or self.slices > 1

    def summed(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply float32 matrices (…, M, K) and (…, K, N) as they are, and add up in the order."""
        slice_size = max(1, -(-a.shape[-1] // self.slices))
        if self.order == "tensor-core":
            slice_size = -(-slice_size // self.step) * self.step
        tensor_core: Any = functools.partial(_tensor_core, arithmetic=self)
        add_up = {None: torch.matmul, "sequential": _sequential, "pairwise": _pairwise, "tensor-core": tensor_core}
        slices = zip(a.split(slice_size, -1), b.split(slice_size, -2), strict=True)
        return functools.reduce(torch.add, itertools.starmap(add_up[self.order], slices))


# Asked for 16 bits, as autocast asks, a GPU returns 16 bits. Of 8-bit products its tensor cores keep 14 bits.
PRECISIONS = {name: Arithmetic(name, name) for name in FORMATS}
PRECISIONS |= {n: Arithmetic(n, n, result=n, block=16, step=64) for n in ("bfloat16", "float16")}
PRECISIONS |= {n: Arithmetic(n, n, block=32, fraction=13, kept=14, step=128) for n in ("float8_e4m3fn", "float8_e5m2")}
# Generations of cards whose tensor cores take float32 numbers, as TF32; older ones multiply them in float32. Blocks
# and bits are those of Fasi et al. 2021 and Xie et al. 2025. Roundings and tiles are what cuBLAS's and cuDNN's kernels
# for each generation were found to do on an H200, which runs both; for hopper, blocks and bits as well (data/measured).
CHIPS = {
    "ampere": Arithmetic("ampere", "tf32", ("nearest", "away", "away"), block=4, fraction=24),
    "hopper": Arithmetic("hopper", "tf32", ("nearest", "nearest", "truncate"), tile=32),
}
KNOWN = PRECISIONS | CHIPS


def arithmetic_of(name: str = "float32", order: str | None = None) -> Arithmetic:
    """Look an arithmetic up by the name of a format or a chip, with another order of summation."""
    if name not in KNOWN:
        formats, chips = ", ".join(PRECISIONS), ", ".join(CHIPS)
        raise UsageError(f"arithmetic {name!r}: there are the formats {formats} and the chips {chips}")
    words = re.fullmatch(rf"({'|'.join(ORDERS)})?(?:(?:^|\+)split-([1-9]\d{{0,3}}))?", order or "")
    if words is None or order == "":
        raise UsageError(
            f"order {order!r}: expected {', '.join(ORDERS)} or split-N (N sums, added in turn; N from 1 to 9999), "
            f"or both, such as {ORDERS[-1]}+split-4"
        )
    within_slice, slices = words.groups()
    if within_slice == "tensor-core" and name.startswith("float32"):
        raise UsageError(f"order {order!r}: there are no tensor cores for {name}; tf32, ampere or hopper have them")
    return replace(KNOWN[name], order=within_slice, slices=int(slices or 1))


def rounded_factor(x: Tensor, name: str, rounding: str = "nearest") -> Tensor:
    """A factor of a matrix product in a format, scaled first where that has 8 bits."""
    return replace(arithmetic_of(name), roundings=(rounding,) * 3).rounded(x)


# --- orders of summation ---------------------------------------------------------------------------------


def _sequential(a: Tensor, b: Tensor) -> Tensor:
    """One product after the other, each fused with its addition, as a thread of a GPU's plain cores does.

    In float64 the product is exact, so that the sum is rounded to float32 all but once.
    """
    a, b = a.double(), b.double()
    total = a.new_zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    for k in range(a.shape[-1]):
        total = torch.addcmul(total, a[..., :, k : k + 1], b[..., k : k + 1, :]).float().double()
    return total.float()


def _pairwise(a: Tensor, b: Tensor) -> Tensor:
    """Neighbours are added, then neighbouring sums, and so on: the first half is a power of two of products."""
    terms = a.shape[-1]
    if terms < 2:
        return (a[..., None] * b[..., None, :, :]).sum(-2)
    half = 1 << ((terms - 1).bit_length() - 1)
    return _pairwise(a[..., :half], b[..., :half, :]) + _pairwise(a[..., half:], b[..., half:, :])


def _tensor_core(a: Tensor, b: Tensor, arithmetic: Arithmetic) -> Tensor:
    """A block of products and the sum so far at once: aligned to the largest, cut, added, cut to float32."""
    matrices = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    rows = max(1, CHUNK // max(1, matrices * arithmetic.block * b.shape[-1]))
    return torch.cat([_added_in_blocks(some_rows, b, arithmetic) for some_rows in a.split(rows, -2)], -2)


def _added_in_blocks(a: Tensor, b: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The product of matrices (…, M, K) and (…, K, N), as a tensor core adds it up block by block."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros(*batch, a.shape[-2], b.shape[-1], dtype=torch.float64)
    for start in range(0, a.shape[-1], arithmetic.block):
        span = slice(start, start + arithmetic.block)
        left, right = a[..., span, None], b[..., None, span, :]
        products = left.double() * right.double()  # (…, M, block, N), exact
        largest = (_exponents(left) + _exponents(right)).amax(-2)
        largest = torch.maximum(largest, _exponents(total.float()))
        last_place = power_of_two(largest - arithmetic.fraction)
        aligned = torch.trunc(products / last_place[..., None, :]).sum(-2) + torch.trunc(total / last_place)
        all_finite = products.isfinite().all(-2) & total.isfinite()
        total = _cut(aligned * last_place, arithmetic.kept).where(all_finite, products.sum(-2) + total)
    return total.float()


def _exponents(x: Tensor) -> Tensor:
    """The exponent of each float32 number; that of the smallest normal one for zeros and subnormal numbers."""
    return (x.view(torch.int32) >> 23).bitwise_and_(0xFF).clamp_min_(1).sub_(127)


def _cut(x: Tensor, bits: int) -> Tensor:
    """Float64 numbers without what lies below so many significant bits, in float32's range."""
    step = power_of_two(torch.frexp(x).exponent.clamp_min(-125) - bits)
    return (torch.trunc(x / step) * step).float().double()
