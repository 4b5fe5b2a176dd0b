"""The spectral density of a symmetric operator, and how many eigenvalues are negative."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpulab.errors import DataError, check_count
from gpulab.report import Progress
from gpulab.saddles._operators import Operator, check_square, check_symmetric, dense, random_signs

Array = np.ndarray
MAX_COUNTED_SIZE = 1_000  # up to this size, negative eigenvalues are counted in the whole matrix
# In an estimate, eigenvalues count as zero if |λ| is below this share of the largest |λ|. Many
# eigenvalues are closer to zero, and some sixty Lanczos steps cannot determine their signs.
ZERO_SHARE = 1e-2


@dataclass(frozen=True)
class Estimate:
    """A number estimated from random probes, with its standard error.

    Attributes:
        value: The estimate.
        error: Its standard error.
    """

    value: float
    error: float


@dataclass(frozen=True, repr=False)
class Index(Estimate):
    """The number of negative eigenvalues, counted or estimated; `int(index)` rounds it.

    Attributes:
        value: The number of eigenvalues below −`threshold`. An estimate need not be an integer.
        error: The standard error of `value`; 0 if the eigenvalues were counted. It does not include
            the eigenvalues that count as `zero`, whose signs are unknown.
        exact: Whether the eigenvalues were counted.
        zero: The number of eigenvalues within `threshold` of zero. They count as neither negative
            nor positive.
        size: The total number of eigenvalues.
        threshold: The distance from zero below which an eigenvalue counts as zero.
    """

    exact: bool
    zero: float
    size: int
    threshold: float

    def __int__(self) -> int:
        return round(self.value)

    def __repr__(self) -> str:
        if self.exact:
            words = f"{int(self):,} of {self.size:,} eigenvalues are negative, {self.zero:,.0f}"
            return f"{words} within {self.threshold:.1e} of zero"
        # The estimate of a count is shown with an uncertainty of at least one.
        about = f"about {int(self):,} ± {max(self.error, 1.0):,.0f}"
        return (
            f"{about} of {self.size:,} eigenvalues are below -{self.threshold:.1e}; "
            f"some {self.zero:,.0f} are closer to zero, and their signs are unknown (estimated)"
        )


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """An estimate of an operator's eigenvalue distribution: nodes and weights for each probe.

    `gpulab.saddles.spectral_density` returns one. Nodes are positions on the axis of eigenvalues.
    For a function f, the sum of weight × f(node) over the nodes of a probe estimates the mean of f
    over all eigenvalues. Estimates are means over the random probes, and their errors are the
    standard errors of these means. The outermost nodes approach the extreme eigenvalues from
    within.

    Attributes:
        nodes: (probes, steps).
        weights: (probes, steps); the weights of a probe add up to one.
        size: The number of eigenvalues of the operator.
        halfway: The estimate from the first half of the steps. Where the two differ, this estimate
            has not converged. None if it was not kept.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> spectrum = gl.saddles.spectral_density(torch.diag(torch.linspace(-1, 3, 50)), steps=20)
        >>> spectrum.size, spectrum.nodes.shape
        (50, (10, 20))
    """

    nodes: Float[Array, "probes steps"]
    weights: Float[Array, "probes steps"]
    size: int
    halfway: SpectralDensity | None = None

    @property
    def extremes(self) -> tuple[float, float]:
        """The lowest and the highest node with a weight above zero."""
        nodes = self.nodes[self.weights > 0]
        return float(nodes.min()), float(nodes.max())

    def mass_below(self, x: float) -> Estimate:
        """Estimate the share of eigenvalues below a number.

        Args:
            x: The number.

        Returns:
            The share, from 0 to 1, as `value`, and its standard `error`, NaN with a single probe.

        Examples:
            >>> nodes, weights = (
            ...     np.array([[-1.0, 2.0], [-1.5, 2.0]]),
            ...     np.array([[0.5, 0.5], [0.25, 0.75]]),
            ... )
            >>> SpectralDensity(nodes, weights, size=8).mass_below(0.0)
            Estimate(value=0.375, error=0.125)
            >>> SpectralDensity(nodes[:1], weights[:1], size=8).mass_below(2.0)
            Estimate(value=0.5, error=nan)
        """
        shares = (self.weights * (self.nodes < x)).sum(1)  # the estimate of each probe
        error = math.nan
        if len(shares) > 1:
            error = float(shares.std(ddof=1)) / math.sqrt(len(shares))
        return Estimate(float(shares.mean()), error)

    def index(self) -> Index:
        """Estimate how many eigenvalues are negative: see `gpulab.saddles.index`.

        Returns:
            The estimate, with the number of eigenvalues that are too close to zero for their signs
            to be determined. Its error combines the standard error over the probes with the change
            in the second half of the steps.

        Examples:
            >>> nodes, weights = (
            ...     np.array([[-1.0, 2.0], [-1.5, 2.0]]),
            ...     np.array([[0.5, 0.5], [0.25, 0.75]]),
            ... )
            >>> halfway = SpectralDensity(nodes[:, 1:], np.ones((2, 1)), size=8)
            >>> found = SpectralDensity(nodes, weights, size=8, halfway=halfway).index()
            >>> found.value, round(found.error, 3)  # the error is 8 · √(0.125² + 0.375²)
            (3.0, 3.162)
        """
        threshold = ZERO_SHARE * max(abs(extreme) for extreme in self.extremes)
        negative = self.mass_below(-threshold)
        not_positive = self.mass_below(threshold)
        # Without an estimate from half of the steps, the change is unknown and counts as zero.
        halfway_negative = negative if self.halfway is None else self.halfway.mass_below(-threshold)
        change = negative.value - halfway_negative.value
        error = math.hypot(negative.error, change)
        return Index(
            value=self.size * negative.value,
            error=self.size * error,
            exact=False,
            zero=self.size * (not_positive.value - negative.value),
            size=self.size,
            threshold=threshold,
        )

    def __repr__(self) -> str:
        low, high = self.extremes
        probes, steps = self.nodes.shape
        span = f"{self.size:,} eigenvalues from {low:.4g} to {high:.4g}"
        return f"SpectralDensity of {span}, {probes} probes of {steps} steps"


def spectral_density(
    H: Operator, *, probes: int = 10, steps: int = 100, seed: int = 0, progress: bool = True
) -> SpectralDensity:
    """Estimate the spectral density of a symmetric operator by stochastic Lanczos quadrature.

    It needs only `probes` times `steps` products with the operator. All probes advance together,
    and each needs memory for three vectors. The Lanczos vectors are not reorthogonalised. In finite
    precision a node may therefore appear several times, but the quadrature remains accurate.

    Args:
        H: A `gpulab.hessian`, a tensor (n, n), or any other object that supports `H @ v` and
            has `shape`, `dtype` (float32 or float64) and `device`.
        probes: The number of random vectors of +1 and −1 from which the method starts.
        steps: The number of Lanczos steps from each vector. Without rounding, the quadrature is
            exact for polynomials of degree 2 · steps − 1.
        seed: The seed of the random vectors.
        progress: Whether to show a progress bar if it takes longer than two seconds.

    Returns:
        A `gpulab.saddles.SpectralDensity`.

    Raises:
        UsageError: If the operator is not square or not of type float32 or float64, or if `probes`
            or `steps` is not a positive integer.
        DataError: If the operator is not symmetric (checked only with two or more probes), or if
            products are not finite.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> spectrum = gl.saddles.spectral_density(torch.diag(torch.linspace(-1, 3, 50)), steps=20)
        >>> round(spectrum.mass_below(0.0).value, 1)
        0.3

    References:
        Ubaru, Chen, Saad 2017, *Fast estimation of tr(f(A)) via stochastic Lanczos quadrature*;
        Ghorbani, Krishnan, Xiao 2019 (arXiv 1901.10159) for Hessians of networks; Greenbaum 1989
        and Chen, Trogdon, Ubaru 2021 (arXiv 2105.06595) on why reorthogonalisation is not needed.
    """
    n = check_square(H)
    check_count("probes", probes)
    check_count("steps", steps)
    # Sums over millions of numbers are computed in float64 if the device supports it.
    dtype = torch.float32 if H.device.type == "mps" else torch.float64
    vector = random_signs(n, probes, H, seed) / math.sqrt(n)
    previous = torch.zeros((), dtype=H.dtype, device=H.device)
    beta = torch.zeros(probes, dtype=dtype, device=H.device)
    alphas = []
    betas = []
    # The Lanczos recurrence: H v = β₋ v₋ + α v + β v₊, for all probes at once. `previous` is v₋,
    # and at the top of the loop `beta` is β₋. No operation in this loop waits for the device. The
    # results are read after the last step.
    for step in Progress(range(steps), unit="step", leave=False, delay=2, disable=not progress):
        product = H @ vector
        if step == 0 and probes > 1:
            check_symmetric(H, vector, product)
        alpha = (vector * product).sum(0, dtype=dtype)
        product = torch.addcmul(product, vector, alpha.to(H.dtype), value=-1)
        product.addcmul_(previous, beta.to(H.dtype), value=-1)
        beta = torch.linalg.vector_norm(product, dim=0, dtype=dtype)
        # If β is zero, the Krylov space is exhausted. The next vector is then zero, and further
        # steps add nodes without weight.
        previous = vector
        vector = product * torch.where(beta > 0, 1 / beta, 0.0).to(H.dtype)
        alphas.append(alpha)
        betas.append(beta)
    diagonal = torch.stack(alphas, 1).cpu().double()
    off_diagonal = torch.stack(betas, 1).cpu().double()
    if not (diagonal.isfinite().all() and off_diagonal.isfinite().all()):
        raise DataError("H @ v has values that are not finite")
    half = max(1, steps // 2)
    halfway = SpectralDensity(*_quadrature(diagonal[:, :half], off_diagonal[:, :half]), n)
    return SpectralDensity(*_quadrature(diagonal, off_diagonal), n, halfway)


def _quadrature(diagonal: Tensor, off_diagonal: Tensor) -> tuple[Array, Array]:
    """Compute the nodes and weights (probes, steps) of Gauss quadrature from Lanczos' coefficients.

    Nodes are the eigenvalues of each probe's tridiagonal matrix. Weights are the squared first
    entries of its eigenvectors (Golub, Welsch 1969).
    """
    # Steps after the first β of zero are padding. The last β belongs to a step that is not made.
    is_exhausted = (off_diagonal[:, :-1] == 0).cumsum(1) > 0
    # The padding repeats the first entry of the diagonal, which lies within the spectrum. It is
    # decoupled from the other entries, so its nodes have no weight.
    later_diagonal = torch.where(is_exhausted, diagonal[:, :1], diagonal[:, 1:])
    padded_diagonal = torch.cat([diagonal[:, :1], later_diagonal], 1)
    # `eigh` reads the lower triangle only.
    lower_diagonal = torch.where(is_exhausted, 0.0, off_diagonal[:, :-1])
    tridiagonal = torch.diag_embed(padded_diagonal) + torch.diag_embed(lower_diagonal, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes.numpy(), vectors[:, 0].square().numpy()


def index(H: Operator, *, progress: bool = True) -> Index:
    """Count the negative eigenvalues of a symmetric operator: at a critical point, its index.

    If the operator has at most 1,000 columns, the whole matrix is computed, with one product for
    each column, and its negative eigenvalues are counted. For a larger operator, the number is
    estimated by `gpulab.saddles.spectral_density` with 1,000 products. To use a different number of
    products, call `spectral_density` and then the `index` method of its result.

    An eigenvalue counts as zero if |λ| is below a share of the largest |λ|. In an exact count, the
    share is n · eps of the operator's type. In an estimate it is 1e-2, because most eigenvalues of
    a network are close to zero, where the signs of nodes are random. An estimate therefore consists
    of two numbers: the eigenvalues below −1e-2 of the largest |λ|, and those too close to zero for
    their signs to be determined. Many more eigenvalues may be negative than the error suggests.

    Args:
        H: The operator, as for `gpulab.saddles.spectral_density`.
        progress: Whether an estimate shows a progress bar if it takes longer than two seconds.

    Returns:
        An object with these attributes; `int(…)` gives the rounded number.

        - `value`: The number of negative eigenvalues.
        - `error`: Its standard error. For a count it is 0. For an estimate it combines the spread
          over the probes with the change in the second half of the steps.
        - `zero`: The number of eigenvalues that count as zero.
        - `threshold`: The largest |λ| that counts as zero.
        - `size`: The total number of eigenvalues.

    Raises:
        UsageError: If the operator is not square or not of type float32 or float64.
        DataError: If the operator is not symmetric, or products are not finite.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.saddles.index(torch.diag(torch.tensor([3.0, -1.0, 0.0, -2.0])))
        2 of 4 eigenvalues are negative, 1 within 1.4e-06 of zero

    References:
        On the index and the loss at critical points: Dauphin, Pascanu, Gulcehre, Cho, Ganguli,
        Bengio 2014, *Identifying and attacking the saddle point problem* (arXiv 1406.2572).
    """
    n = check_square(H)
    if n > MAX_COUNTED_SIZE:
        return spectral_density(H, progress=progress).index()
    values = torch.linalg.eigvalsh(dense(H))
    threshold = n * torch.finfo(H.dtype).eps * float(values.abs().max())
    return Index(
        value=int((values < -threshold).sum()),
        error=0.0,
        exact=True,
        zero=int((values.abs() <= threshold).sum()),
        size=n,
        threshold=threshold,
    )
