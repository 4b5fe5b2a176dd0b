"""Why two correct devices disagree: sums in another order, products rounded once or twice, races.

Every number here is computed where it is asked for. What a GPU gave is recorded by `benchmarks/record_factors.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpulab.errors import UsageError, check_count
from gpulab.numerics.emulation import emulate
from gpulab.numerics.formats import FORMATS, round_to, ulp_distance

if TYPE_CHECKING:
    import pandas as pd


def first_bit(a: Tensor | float, b: Tensor | float) -> int | None:
    """The first bit of the fraction, 1 to 23, in which two float32 numbers differ; None for equal ones.

    That is the place of the leading bit of their distance: neighbours differ in bit 23 (also 1.000…0 and 0.111…1, whose
    every bit is another), those of other signs or a factor of two apart in bit 0.

    Examples:
        >>> first_bit(1.0, 1.0 + 2.0**-23), first_bit(1.0, 1.5), first_bit(1.0, 1.0)
        (23, 1, None)
    """
    ulps = int(ulp_distance(*(torch.as_tensor(x, dtype=torch.float32).reshape(()) for x in (a, b))))
    return None if ulps == 0 else max(0, 24 - ulps.bit_length())


def format_bits(x: float, name: str = "float32", mode: str = "nearest") -> tuple[str, str, str]:
    """Sign, exponent and fraction of a number, rounded to a format by `round_to`, as that stores them, in 0 and 1.

    Examples:
        >>> format_bits(-0.1, "float16")
        ('1', '01011', '1001100110')
    """
    rounded = round_to(torch.tensor([x], dtype=torch.float32), name, mode)
    target = FORMATS[name]
    fraction, dtype = target.precision - 1, target.dtype or torch.float32
    stored = rounded.to(dtype).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    pattern = f"{int(stored) & (1 << 8 * dtype.itemsize) - 1:0{8 * dtype.itemsize}b}"
    if target.dtype is None:  # tf32 is float32 without its last bits
        pattern = pattern[: 9 + fraction]
    return pattern[0], pattern[1:-fraction], pattern[-fraction:]


# --- order of summation ----------------------------------------------------------------------------------


def summation(x: Tensor) -> pd.DataFrame:
    """The same float32 numbers (N,), added in several orders that `emulate` has, and by this machine's own kernels.

    Returns:
        A row each: `order`, `sum`, `ulps` (how many float32 numbers lie between it and the exact sum, rounded once)
        and `first_bit` (empty where the sum is the exact one's float32 number).

    Raises:
        UsageError: for numbers of another type or shape.

    Examples:
        >>> summation(torch.tensor([1e8, 1.0, -1e8])).set_index("order").loc["sequential", "sum"].item()
        0.0
    """
    import pandas as pd

    numbers = _checked_numbers(x)
    exact = np.float32(math.fsum(numbers.tolist())).item()
    sums = {"exact": exact, "backwards": _emulated_sum(numbers.flip(0), "sequential")}
    sums |= {order: _emulated_sum(numbers, order) for order in ("sequential", "pairwise", "split-4")}
    usual = torch.get_num_threads()
    for threads in sorted({1, usual}):
        torch.set_num_threads(threads)
        sums[f"torch.sum, {threads} thread{'s' if threads > 1 else ''}"] = numbers.sum().item()
    torch.set_num_threads(usual)
    sums["torch.dot"] = torch.dot(numbers, torch.ones_like(numbers)).item()
    ulps = ulp_distance(torch.tensor(list(sums.values())), torch.tensor(exact))
    frame = pd.DataFrame({"order": list(sums), "sum": sums.values(), "ulps": ulps.tolist()})
    return frame.assign(first_bit=[first_bit(value, exact) for value in frame["sum"]]).astype({"first_bit": "Int64"})


def shuffled_sums(x: Tensor, count: int = 1000, seed: int = 0) -> Tensor:
    """The sums (count,) of random orders of the same float32 numbers (N,), each added from left to right.

    Examples:
        >>> len(shuffled_sums(torch.ones(10), 5).unique())
        1
    """
    check_count("count", count)
    numbers = _checked_numbers(x).numpy()
    generator = np.random.default_rng(seed)
    # NumPy's accumulate adds in float32, one after the other.
    return torch.tensor([np.add.accumulate(generator.permutation(numbers))[-1].item() for _ in range(count)])


def _checked_numbers(x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.ndim != 1 or not len(x):
        raise UsageError(f"numbers of shape {tuple(x.shape)} and type {x.dtype}: expected float32 in one row")
    return x.detach().cpu()


def _emulated_sum(x: Tensor, order: str) -> float:
    """A product with ones, which are exact, adds in the order that is asked for."""
    with emulate(order=order):
        return (x[None] @ torch.ones(len(x), 1)).item()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A · b + c of float32 tensors, rounded once, as a fused multiply-add does; `a * b + c` rounds twice.

    In float64 the product is exact, and its sum with c is rounded to odd, so that rounding again rounds once.

    Raises:
        UsageError: for numbers of another type.

    Examples:
        >>> a = torch.tensor(1 + 2.0**-12)
        >>> fma(a, a, torch.tensor(-1.0)).item(), (a * a - 1).item()
        (0.0004883408546447754, 0.00048828125)

    References:
        Boldo, Melquiond 2008, *Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd*
        (IEEE Trans. Comput. 57).
    """
    if {a.dtype, b.dtype, c.dtype} != {torch.float32}:
        raise UsageError(f"a, b and c are {a.dtype}, {b.dtype} and {c.dtype}: expected float32")
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)  # Knuth's: what rounding the sum left out
    even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.copysign(torch.full_like(total, math.inf), error))
    return torch.where((error != 0) & even & error.isfinite(), odd, total).float()


# --- products in fewer bits ------------------------------------------------------------------------------


def product_errors(names: tuple[str, ...] = ("float32", "tf32", "bfloat16"), size: int = 256) -> pd.DataFrame:
    """How far a product of random square matrices, computed in a format or as a chip does, is from float64's.

    Returns:
        A row for each of `names`, which `emulate` knows: `arithmetic`, `error`, the relative distance (Frobenius), and
        `first_bit`, the bit of the fraction that such an error reaches.

    Examples:
        >>> errors = product_errors(("float32", "tf32"), size=64).error
        >>> bool(errors[1] > 100 * errors[0])
        True
    """
    import pandas as pd

    check_count("size", size)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, size, size, generator=generator)
    exact = a.double() @ b.double()
    rows = []
    for name in names:
        with emulate(name):
            product = a @ b
        error = float((product.double() - exact).norm() / exact.norm())
        rows.append({"arithmetic": name, "error": error, "first_bit": bit_of(error)})
    return pd.DataFrame(rows).astype({"first_bit": "Int64"})


def bit_of(relative: float) -> int | None:
    """The bit of the fraction, 1 to 23 and beyond, that a relative difference reaches; None for nothing."""
    return max(0, -math.floor(math.log2(relative))) if relative > 0 else None
