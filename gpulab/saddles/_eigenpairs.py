"""The extreme eigenvalues and eigenvectors of a symmetric operator, by SciPy's `eigsh`."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpulab.errors import DataError, UsageError
from gpulab.saddles._operators import (
    Operator,
    check_products,
    check_square,
    check_symmetric,
    dense,
    random_signs,
)

MAX_DENSE_SIZE = 20  # up to this size, the whole matrix needs no more products than ARPACK
MAX_RESTARTS = 300  # restarts of ARPACK, each of which takes some twenty products


def extreme_eigenpairs(
    H: Operator, *, tolerance: float | None = None
) -> tuple[Float[Tensor, " 2"], Float[Tensor, "n 2"]]:
    """Find the smallest and the largest eigenvalue of a symmetric operator, with eigenvectors.

    It needs only products with the operator, and uses `scipy.sparse.linalg.eigsh` (implicitly
    restarted Lanczos). For more eigenpairs, call `eigsh` yourself; `docs/hessians.md` shows how.
    For the whole spectrum, see `gpulab.saddles.spectral_density`.

    Args:
        H: A `gpulab.hessian`, a tensor (n, n), or any other object that supports `H @ v` and
            has `shape`, `dtype` (float32 or float64) and `device`.
        tolerance: The residual ‖Hv − λv‖ to reach, as a share of the distance between the two
            eigenvalues; by default eps^(2/3) of the operator's type, which is 4e-11 in float64 and
            2e-5 in float32.

    Returns:
        The smallest and the largest eigenvalue, (2,), in float64 on the CPU; and their unit
        eigenvectors as columns, (n, 2), in the operator's type on its device.

    Raises:
        UsageError: If the operator is not square or not of type float32 or float64, or if the
            tolerance is out of range.
        DataError: If the operator is not symmetric, if products are not finite, or if the
            eigenvectors are not found to the given tolerance.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> values, vectors = gl.saddles.extreme_eigenpairs(
        ...     torch.diag(torch.tensor([3.0, -1.0, 2.0]))
        ... )
        >>> [round(value, 4) for value in values.tolist()], vectors.shape
        ([-1.0, 3.0], torch.Size([3, 2]))

    References:
        Lehoucq, Sorensen, Yang 1998, *ARPACK users' guide* (SIAM).
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n = check_square(H)
    if tolerance is None:
        tolerance = torch.finfo(H.dtype).eps ** (2 / 3)
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance={tolerance!r}: expected a number between 0 and 1")
    if n <= MAX_DENSE_SIZE:
        values, vectors = torch.linalg.eigh(dense(H))
        extremes = [0, -1]
        return values[extremes], vectors[:, extremes].to(H.dtype).to(H.device)
    signs = random_signs(n, k=2, A=H, seed=0)
    check_symmetric(H, signs, H @ signs)

    def find_farthest_eigenpair(shift: float, deflated: np.ndarray) -> tuple[float, np.ndarray]:
        """Find the eigenpair whose eigenvalue is farthest from `shift`.

        The search starts orthogonal to the eigenvector `deflated`, which may be zero.
        """

        def product(vector: np.ndarray) -> np.ndarray:
            """Multiply a vector by H − shift · I."""
            products = H @ torch.from_numpy(vector.ravel()).to(H.dtype).to(H.device)
            check_products(products)
            return products.cpu().double().numpy() - shift * vector.ravel()

        start = np.random.default_rng(0).standard_normal(n)
        # `deflated` is a unit vector or zero, so this makes the start orthogonal to it.
        start -= (deflated @ start) * deflated
        if not product(start).any():  # The operator is a multiple of the identity.
            return shift, start / np.linalg.norm(start)
        shifted = LinearOperator((n, n), product, dtype=np.float64)
        try:
            values, vectors = eigsh(
                shifted, 1, which="LM", v0=start, tol=tolerance, maxiter=MAX_RESTARTS
            )
        except ArpackNoConvergence as error:
            raise DataError(
                f"found no eigenvector to a tolerance of {tolerance:.1g}: {error}; use a larger"
                " tolerance"
            ) from None
        return float(values[0]) + shift, vectors[:, 0]

    # The eigenvalue farthest from zero is one of the two extreme ones. The eigenvalue farthest from
    # that one is the other.
    first_value, first_vector = find_farthest_eigenpair(shift=0.0, deflated=np.zeros(n))
    second_value, second_vector = find_farthest_eigenpair(shift=first_value, deflated=first_vector)
    pairs = [(first_value, first_vector), (second_value, second_vector)]
    values, vectors = zip(*sorted(pairs, key=lambda pair: pair[0]), strict=True)
    columns = torch.from_numpy(np.stack(vectors, axis=1))
    return torch.tensor(values, dtype=torch.float64), columns.to(H.dtype).to(H.device)
