"""The spectrum of a symmetric operator from its products: density, trace, and how many eigenvalues are negative."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpulab.errors import DataError, UsageError, check_count
from gpulab.numerics.tf32 import float32_products
from gpulab.progress import Progress
from gpulab.saddles.eigen import lanczos
from gpulab.saddles.operators import Operator, check_square, check_symmetric, dense, random_signs

Array = np.ndarray
SMALL = 1_000  # the index of a matrix of this size is counted in the matrix itself
ZERO = 1e-2  # of the largest |λ|: closer to zero, some sixty steps cannot tell the signs of a crowd


@dataclass(frozen=True)
class Estimate:
    """A number that was estimated from random probes: its `value`, and its standard `error`."""

    value: float
    error: float

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"{self.value:.6g} ± {self.error:.2g}"


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """A spectrum as quadratures, one from each random probe.

    The sum of weight × f(node) estimates the mean of f over all eigenvalues; probes differ by chance, and the standard
    errors here are of their mean. The outermost nodes approach the extreme eigenvalues from within.
    """

    nodes: Float[Array, "probes steps"]
    weights: Float[Array, "probes steps"]  # those of a probe add up to one
    size: int  # how many eigenvalues there are
    halfway: SpectralDensity | None = None  # from half of the steps: what is still different there has not converged

    @property
    def extremes(self) -> tuple[float, float]:
        """The lowest and the highest node."""
        nodes = self.nodes[self.weights > 0]
        return float(nodes.min()), float(nodes.max())

    def density(self) -> tuple[Array, Array, Array]:
        """A grid (1000,), the density of eigenvalues there, and its standard error.

        The density integrates to one. Each node is a normal curve with a width of a hundredth of the spectrum's range.
        """
        low, high = self.extremes
        width = max((high - low) / 100, 1e-3 * max(abs(low), abs(high)), 1e-12)
        grid = np.linspace(low - 4 * width, high + 4 * width, 1_000)
        curves = self.weights[:, None] * np.exp(-0.5 * ((grid[:, None] - self.nodes[:, None]) / width) ** 2)
        return grid, *_mean(curves.sum(-1) / (width * math.sqrt(2 * math.pi)))

    def mass_below(self, x: float) -> Estimate:
        """The share of eigenvalues below x."""
        return Estimate(*map(float, _mean((self.weights * (self.nodes < x)).sum(1))))

    def __repr__(self) -> str:
        (low, high), (probes, steps) = self.extremes, self.nodes.shape
        span = f"{self.size:,} eigenvalues from {low:.4g} to {high:.4g}"
        return f"SpectralDensity of {span}, {probes} probes of {steps} steps"


def spectral_density(
    H: Operator, *, probes: int = 10, steps: int = 100, seed: int = 0, progress: bool = True
) -> SpectralDensity:
    """The density of a symmetric operator's eigenvalues, by stochastic Lanczos quadrature.

    All probes advance together, with three vectors each. Unlike in `gpulab.saddles.lanczos` nothing is orthogonalised
    again: in finite precision the quadrature stays accurate without, although single nodes appear several times.

    Args:
        H, progress: As for `gpulab.saddles.lanczos`, whose errors are raised too.
        probes: How many vectors of random signs to begin with, drawn from the seed.
        steps: Of Lanczos from each; before rounding, exact for polynomials of degree 2 · steps − 1.

    Examples:
        >>> spectrum = spectral_density(torch.diag(torch.linspace(-1, 3, 50)), steps=20)
        >>> round(float(spectrum.mass_below(0.0)), 1)
        0.3

    References:
        Ubaru, Chen, Saad 2017, *Fast estimation of tr(f(A)) via stochastic Lanczos quadrature*; Ghorbani, Krishnan,
        Xiao 2019 (arXiv 1901.10159) for Hessians of networks; Greenbaum 1989 and Chen, Trogdon, Ubaru 2021 (arXiv
        2105.06595) on why orthogonalisation is not needed.
    """
    n = check_square(H)
    check_count("probes", probes)
    check_count("steps", steps)
    # In float64 where there is one: sums over millions of numbers, whatever the operator's type.
    kind = torch.float32 if H.device.type == "mps" else torch.float64
    vector = random_signs(n, probes, H, seed) / math.sqrt(n)
    before = torch.zeros((), dtype=H.dtype, device=H.device)
    beta = torch.zeros(probes, dtype=kind, device=H.device)
    alphas, betas = [], []
    # Nothing here waits for the device: what is computed on it is read when all is done.
    for step in Progress(range(steps), unit="step", leave=False, delay=2, disable=not progress):
        product = H @ vector
        if step == 0 and probes > 1:
            check_symmetric(H, vector, product)
        alpha = (vector * product).sum(0, dtype=kind)
        product = torch.addcmul(product, vector, alpha.to(H.dtype), value=-1)
        product.addcmul_(before, beta.to(H.dtype), value=-1)
        beta = torch.linalg.vector_norm(product, dim=0, dtype=kind)
        # Where nothing is left the space is complete: a vector of zeros adds nodes without weight.
        before, vector = vector, product * torch.where(beta > 0, 1 / beta, 0.0).to(H.dtype)
        alphas.append(alpha)
        betas.append(beta)
    diagonal, beside = (torch.stack(numbers, 1).cpu().double() for numbers in (alphas, betas))
    if not (diagonal.isfinite().all() and beside.isfinite().all()):
        raise DataError("H @ v has values that are not finite")
    half = max(1, steps // 2)
    halfway = SpectralDensity(*_quadrature(diagonal[:, :half], beside[:, :half]), n)
    return SpectralDensity(*_quadrature(diagonal, beside), n, halfway)


def _quadrature(diagonal: Tensor, beside: Tensor) -> tuple[Array, Array]:
    """Nodes and weights (probes, steps) of tridiagonal matrices (Golub, Welsch 1969)."""
    complete = (beside[:, :-1] == 0).cumsum(1) > 0
    later = torch.where(complete, diagonal[:, :1], diagonal[:, 1:])  # within the spectrum, of no weight
    coupled = torch.diag_embed(torch.where(complete, 0.0, beside[:, :-1]), -1)
    nodes, vectors = torch.linalg.eigh(torch.diag_embed(torch.cat([diagonal[:, :1], later], 1)) + coupled)
    return nodes.numpy(), vectors[:, 0].square().numpy()


def _mean(values: Array) -> tuple[Array, Array]:
    """The mean over probes and its standard error, NaN for one probe."""
    count = len(values)
    error = values.std(0, ddof=1) / math.sqrt(count) if count > 1 else np.full(values.shape[1:], math.nan)
    return values.mean(0), error


def trace(H: Operator, probes: int = 30, *, seed: int = 0) -> Estimate:
    """The sum of all eigenvalues, by Hutch++.

    A third of the products finds the directions of the large eigenvalues, a third sums these exactly, and a third
    estimates the rest by Hutchinson's random signs, whose spread is the error.

    Args:
        H: As for `gpulab.saddles.lanczos`, whose errors are raised too.
        probes: About how many products to make, six or more; as many as H has columns give the trace itself.
        seed: Of the signs.

    Examples:
        >>> trace(torch.diag(torch.arange(8.0)), probes=8)
        28 ± 0

    References:
        Meyer, Musco, Musco, Woodruff 2021, *Hutch++: Optimal stochastic trace estimation*.
    """
    n = check_square(H)
    check_count("probes", probes)
    if probes >= n:
        return Estimate(float(dense(H).trace()), 0.0)
    if probes < 6:
        raise UsageError(f"probes={probes}: expected 6 or more, for an error to be seen")
    third = probes // 3
    signs = random_signs(n, 2 * third, H, seed)
    sketch = H @ signs[:, :third]
    check_symmetric(H, signs[:, :third], sketch)
    basis = torch.linalg.qr(sketch).Q
    exact = (basis * (H @ basis)).sum(dtype=torch.float64)
    with float32_products():
        rest = signs[:, third:] - basis @ (basis.T @ signs[:, third:])
    value, error = _mean((rest * (H @ rest)).sum(0, dtype=torch.float64).cpu().numpy())
    return Estimate(float(exact) + float(value), float(error))


@dataclass(frozen=True, repr=False)
class Index(Estimate):
    """How many eigenvalues are negative: `int(index)`, or the `value` with its `error`, zero where it is exact."""

    exact: bool
    zero: float  # how many are within `threshold` of zero, and count as neither negative nor positive
    size: int  # how many eigenvalues there are
    threshold: float

    @property
    def fraction(self) -> float:
        """The share of all eigenvalues that are negative."""
        return self.value / self.size

    def __int__(self) -> int:
        return round(self.value)

    def __repr__(self) -> str:
        error = "" if self.exact else f" ± {self.error:,.0f}"
        words = f"{int(self):,}{error} of {self.size:,} eigenvalues are negative"
        words += f", {self.zero:,.0f} within {self.threshold:.1e} of zero"
        return words if self.exact else f"about {words} (estimated)"


def index(
    H: Operator,
    *,
    exact: bool | None = None,
    probes: int = 10,
    steps: int = 100,
    seed: int = 0,
    progress: bool = True,
) -> Index:
    """How many eigenvalues of a symmetric operator are negative: the index of a critical point.

    Args:
        H: As for `gpulab.saddles.lanczos`, whose errors are raised too.
        exact: Whether to count in the matrix itself, by default up to a thousand columns, or to estimate from
            `gpulab.saddles.spectral_density`; the error is of the probes' spread and what the second half of steps did.
        probes, steps, seed, progress: Of the estimate.

    An eigenvalue counts as zero within a share of the largest |λ|: n · eps of the operator's type in the matrix, and
    1e-2 in an estimate, because closer to zero, where networks have most eigenvalues, the signs of nodes are chance.

    Examples:
        >>> index(torch.diag(torch.tensor([3.0, -1.0, 0.0, -2.0])))
        2 of 4 eigenvalues are negative, 1 within 1.4e-06 of zero
    """
    n = check_square(H)
    exact = n <= SMALL if exact is None else exact
    if not exact:
        return estimated_index(spectral_density(H, probes=probes, steps=steps, seed=seed, progress=progress))
    values = torch.linalg.eigvalsh(dense(H))
    threshold = n * torch.finfo(H.dtype).eps * float(values.abs().max())
    negative, zero = int((values < -threshold).sum()), int((values.abs() <= threshold).sum())
    return Index(negative, 0.0, True, zero, n, threshold)


def estimated_index(spectrum: SpectralDensity) -> Index:
    """The index that a density implies: see `index`."""
    n, threshold = spectrum.size, ZERO * max(abs(end) for end in spectrum.extremes)
    negative, up_to = spectrum.mass_below(-threshold), spectrum.mass_below(threshold)
    earlier = negative if spectrum.halfway is None else spectrum.halfway.mass_below(-threshold)
    error = math.hypot(negative.error, negative.value - earlier.value)
    return Index(n * negative.value, n * error, False, n * (up_to.value - negative.value), n, threshold)


@dataclass(frozen=True, eq=False)
class Direction:
    """The direction in which a loss curves down most, or, where none does, that of the smallest curvature."""

    value: float  # the curvature: the least eigenvalue
    vector: Float[Tensor, " n"]
    residual: float  # ‖Hv − λv‖
    found: bool  # whether the curvature is negative, by more than the residual and rounding

    def __repr__(self) -> str:
        what = "curvature" if self.found else "no negative curvature: the smallest is"
        return f"{what} {self.value:.6g}, residual {self.residual:.1e}"


def most_negative(
    H: Operator, *, tolerance: float | None = None, max_products: int = 3_000, seed: int = 0, progress: bool = True
) -> Direction:
    """The most negative eigenvalue of a symmetric operator, and its direction.

    Args:
        H, tolerance, max_products, seed, progress: As for `gpulab.saddles.lanczos`, whose errors are raised too.

    Examples:
        >>> most_negative(torch.diag(torch.tensor([3.0, -1.0, 2.0]))).found
        True
        >>> most_negative(torch.eye(3)).found
        False
    """
    pairs = lanczos(H, 1, tolerance=tolerance, max_products=max_products, seed=seed, progress=progress)
    value, residual = float(pairs.values[0]), float(pairs.residuals[0])
    rounding = torch.finfo(H.dtype).eps * math.sqrt(H.shape[0]) * pairs.scale
    return Direction(value, pairs.vectors[:, 0], residual, value < -max(residual, rounding))
