"""What every method here asks of a matrix that it knows by its products only."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import DataError, UsageError
from gpulab.numerics.emulation import float32_products

AT_ONCE = 64  # columns of a matrix that is written out


class Operator(Protocol):
    """A symmetric (n, n) matrix that multiplies vectors: a `Hessian`, a dense tensor, or anything with these.

    Attributes:
        shape: (n, n).
        dtype: float32 or float64.
        device: Where its vectors are.
    """

    shape: Any
    dtype: torch.dtype
    device: torch.device

    def __matmul__(self, vectors: Any) -> Any:
        """Return the product with a vector (n,), or with k vectors (n, k)."""


def check_square(A: Operator) -> int:
    """The size n of an operator (n, n); `UsageError` for anything else."""
    shape = tuple(getattr(A, "shape", ()))
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise UsageError(f"an operator of shape {shape or type(A).__name__}: expected (n, n)")
    if A.dtype not in (torch.float32, torch.float64):
        raise UsageError(f"an operator of {A.dtype}: expected torch.float32 or torch.float64")
    return shape[0]


def check_products(products: Float[Tensor, "n k"]) -> None:
    """`DataError` when a product is not finite."""
    if not products.isfinite().all():
        raise DataError(f"H @ v has {int((~products.isfinite()).sum()):,} values that are not finite")


@float32_products()
def check_symmetric(A: Operator, vectors: Float[Tensor, "n k"], products: Float[Tensor, "n k"]) -> None:
    """`DataError` unless the products are finite, and uᵀAv = vᵀAu for every two of k random vectors, but for rounding.

    The numbers uᵀAv of all pairs are a (k, k) matrix, which is symmetric if A is. Where it is so to half of the digits,
    nothing more is done. Where it is not, A may round that much. So rounding is measured: three times the product with
    a third of a vector is the product with the vector, rounded otherwise. Only what is a hundred times as far apart as
    these two is no rounding any more.
    """
    check_products(products)
    dtype = torch.float32 if products.device.type == "mps" else torch.float64
    scale = products.abs().max().clamp(min=torch.finfo(products.dtype).tiny).to(dtype)  # whose square may be nothing
    scaled_products = products.to(dtype) / scale
    pairs = vectors.to(dtype).T @ scaled_products
    apart = float((pairs - pairs.T).abs().max())
    element = float(vectors.to(dtype).norm(dim=0).max()) / len(vectors) ** 0.5  # the typical one of a vector
    size = element * float(scaled_products.norm(dim=0).max())  # the typical one of the pairs' numbers
    if apart <= torch.finfo(vectors.dtype).eps ** 0.5 * size:
        return
    repeated_products = 3 * (A @ (vectors / 3)).to(dtype) / scale
    rounding = element * float((repeated_products - scaled_products).norm(dim=0).max())
    if apart > 100 * rounding:
        apart, size = apart * float(scale), size * float(scale)
        raise DataError(f"the operator is not symmetric: uᵀAv and vᵀAu differ by {apart:.3g}, of {size:.3g}")


def random_signs(n: int, k: int, A: Operator, seed: int) -> Float[Tensor, "n k"]:
    """Vectors of +1 and −1 (Rademacher), drawn on the CPU: the same ones on every device."""
    drawn = torch.randint(0, 2, (k, n), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    return (2 * drawn - 1).T.to(A.device).to(A.dtype).contiguous()


def dense(A: Operator) -> Float[Tensor, "n n"]:
    """The matrix itself, symmetric and in float64 on the CPU, by n products."""
    identity = torch.eye(check_square(A), dtype=A.dtype, device=A.device)
    matrix = torch.cat([(A @ columns).cpu().double() for columns in identity.split(AT_ONCE, dim=1)], dim=1)
    check_products(matrix)
    scale, apart = float(matrix.abs().max()), float((matrix - matrix.T).abs().max())
    if apart > (1e-2 if A.dtype == torch.float32 else 1e-6) * scale:
        raise DataError(f"the operator is not symmetric: two elements differ by {apart:.3g}, of {scale:.3g}")
    return (matrix + matrix.T) / 2


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
