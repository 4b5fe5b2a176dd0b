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
    """Tell in which bit of the fraction two float32 numbers first differ.

    The answer comes from their distance, `gpulab.numerics.ulp_distance`: it is the place of that number's leading bit.
    So neighbours differ in bit 23, the last one, even 1.000…0 and 0.111…1, in which every bit is another. Numbers that
    are a factor of two or more apart, or have other signs, differ in bit 0.

    Args:
        a: A number, or a tensor that holds one; it is taken as float32.
        b: Another one.

    Returns:
        From 1, the first bit of the fraction, to 23, the last; 0 as above, and for a NaN beside a number; None for
        equal numbers.

    Examples:
        >>> import gpulab as gl
        >>> gl.numerics.first_bit(1.0, 1.0 + 2.0**-23), gl.numerics.first_bit(1.0, 1.5), gl.numerics.first_bit(1.0, 1.0)
        (23, 1, None)
    """
    ulps = int(ulp_distance(*(torch.as_tensor(x, dtype=torch.float32).reshape(()) for x in (a, b))))
    return None if ulps == 0 else max(0, 24 - ulps.bit_length())


def format_bits(x: float, name: str = "float32", mode: str = "nearest") -> tuple[str, str, str]:
    """Write down the bits of a number as a format stores them.

    Args:
        x: The number. It is taken as float32, and rounded to the format by `gpulab.numerics.round_to`.
        name: The format, one of `gpulab.numerics.FORMATS`.
        mode: How to round: `nearest`, `away` or `truncate`.

    Returns:
        Sign, exponent and fraction, a text of 0 and 1 each.

    Raises:
        UsageError: For an unknown format or mode.

    Examples:
        >>> import gpulab as gl
        >>> gl.numerics.format_bits(-0.1, "float16")
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
    """Add the same numbers in several orders, and show how far each sum is from the exact one.

    Args:
        x: float32 numbers, in one row (N,).

    Returns:
        A data frame with a row for each `order`: `exact` (the exact sum, rounded once), `backwards`, `sequential`,
        `pairwise` and `split-4` as `gpulab.numerics.emulate` has them, and this machine's `torch.sum`, with one thread
        and with as many as torch uses, and `torch.dot`. Its other columns: `sum`; `ulps`, how many float32 numbers the
        sum is from the exact one; and `first_bit`, in which the two first differ, empty where they are the same.

    Raises:
        UsageError: For numbers of another type or shape, and for none.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.numerics.summation(torch.tensor([1e8, 1.0, -1e8])).set_index("order").loc["sequential", "sum"].item()
        0.0

    References:
        Higham 1993, *The accuracy of floating point summation* (SIAM J. Sci. Comput. 14:783).
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
    """Add the same numbers in many random orders, each from left to right in float32.

    Args:
        x: float32 numbers, in one row (N,).
        count: How many orders to try.
        seed: What the orders are drawn from.

    Returns:
        The sums, float32, (count,).

    Raises:
        UsageError: For numbers of another type or shape, for none, and for a `count` that is no whole number from 1.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> len(gl.numerics.shuffled_sums(torch.ones(10), 5).unique())
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
    """Compute a · b + c of float32 tensors, rounded once, as a fused multiply-add does; `a * b + c` rounds twice.

    In float64 the product is exact. Its sum with c is rounded to odd, so that rounding to float32 is the only rounding
    that shows.

    Args:
        a: float32 numbers.
        b: float32 numbers, of a shape that broadcasts.
        c: float32 numbers, of a shape that broadcasts.

    Returns:
        A float32 tensor.

    Raises:
        UsageError: For numbers of another type.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> a = torch.tensor(1 + 2.0**-12)
        >>> gl.numerics.fma(a, a, torch.tensor(-1.0)).item(), (a * a - 1).item()
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
    """Show how far a matrix product in each of several arithmetics is from that in float64.

    The product is of two square matrices of normal random numbers, always the same ones.

    Args:
        names: Formats and chips that `gpulab.numerics.emulate` knows. A chip uses TF32 only where the program allows
            it.
        size: The rows and columns of a matrix.

    Returns:
        A data frame with a row for each of `names`: `arithmetic`, its name; `error`, the relative distance from the
        product in float64 (Frobenius norm); and `first_bit`, the bit of the fraction that such an error reaches, empty
        for none.

    Raises:
        UsageError: For an unknown name, and for a size that is no whole number from 1.

    Examples:
        >>> import gpulab as gl
        >>> errors = gl.numerics.product_errors(("float32", "tf32"), size=64).error
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
