"""Symmetric linear operators: the interface that all spectral methods use, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from gpulab.errors import DataError, UsageError
from gpulab.numerics._emulation import float32_products


class Operator(Protocol):
    """A symmetric (n, n) operator: a `Hessian`, a dense tensor, or anything with these members.

    Attributes:
        shape: (n, n).
        dtype: float32 or float64.
        device: The device of its vectors.
    """

    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> Sequence[int]:
        """(n, n)."""

    def __matmul__(self, vectors: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Return the product with a vector (n,), or with k vectors (n, k)."""


def check_square(A: Operator) -> int:
    """Return the size n of an operator (n, n) of float32 or float64.

    Raises:
        UsageError: If the operator is not square, or has a different type.
    """
    shape = tuple(getattr(A, "shape", ()))
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise UsageError(f"operator of shape {shape or type(A).__name__}: expected (n, n)")
    if A.dtype not in (torch.float32, torch.float64):
        raise UsageError(f"operator of {A.dtype}: expected torch.float32 or torch.float64")
    return shape[0]


def check_products(products: Float[Tensor, "n k"]) -> None:
    """Raise `DataError` if a product has values that are not finite."""
    if not products.isfinite().all():
        raise DataError(
            f"H @ v has {int((~products.isfinite()).sum()):,} values that are not finite"
        )


@float32_products()
def check_symmetric(
    A: Operator, vectors: Float[Tensor, "n k"], products: Float[Tensor, "n k"]
) -> None:
    """Raise `DataError` unless products are finite and uᵀ(Av) = vᵀ(Au) holds up to rounding.

    The numbers uᵀ(Av) of all pairs of vectors form a (k, k) matrix, which is symmetric if A is. Its
    asymmetry, the largest difference from its transpose, is compared with two sizes:

    1. The typical size of these numbers if u and Av have random directions. An asymmetry below
       √eps times this size is ignored.
    2. The size of rounding errors. It is measured by computing the product a second time, as three
       times the product with a third of the vector. An asymmetry of more than a hundred times the
       difference between the two products cannot be due to rounding.
    """
    check_products(products)
    dtype = torch.float32 if products.device.type == "mps" else torch.float64
    # Products are scaled, because the squares of small ones may underflow to zero.
    scale = products.abs().max().clamp(min=torch.finfo(products.dtype).tiny).to(dtype)
    u = vectors.to(dtype)
    Av = products.to(dtype) / scale
    pairs = u.T @ Av
    asymmetry = float((pairs - pairs.T).abs().max())

    def typical_product(columns: Tensor) -> float:
        """Return the size of a product with a column in a random direction: its length over √n."""
        vector_length = float(u.norm(dim=0).max())
        column_length = float(columns.norm(dim=0).max())
        return vector_length / len(u) ** 0.5 * column_length

    if asymmetry <= torch.finfo(vectors.dtype).eps ** 0.5 * typical_product(Av):
        return
    Av_rounded_differently = 3 * (A @ (vectors / 3)).to(dtype) / scale
    rounding = typical_product(Av_rounded_differently - Av)
    if asymmetry > 100 * rounding:
        difference = asymmetry * float(scale)
        size = typical_product(Av) * float(scale)
        raise DataError(
            f"the operator is not symmetric: uᵀAv and vᵀAu differ by {difference:.3g}, while their"
            f" typical size is {size:.3g}"
        )


def random_signs(n: int, k: int, A: Operator, seed: int) -> Float[Tensor, "n k"]:
    """Draw k random vectors of +1 and −1 (Rademacher), on the CPU: the same on every device."""
    bits = torch.randint(
        0, 2, (k, n), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
    )
    return (2 * bits - 1).T.to(A.device).to(A.dtype).contiguous()


def dense(A: Operator) -> Float[Tensor, "n n"]:
    """Compute the whole matrix with n products and symmetrise it, in float64 on the CPU."""
    identity = torch.eye(check_square(A), dtype=A.dtype, device=A.device)
    products = A @ identity
    check_symmetric(A, identity, products)
    matrix = products.cpu().double()
    return (matrix + matrix.T) / 2
