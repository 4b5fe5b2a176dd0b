"""Extreme eigenpairs of a symmetric operator, from its products with a few vectors at once.

No library does this with vectors that stay on a GPU and an operator that is only known by its products:
SciPy's `eigsh` and `lobpcg` compute in NumPy, and `torch.lobpcg` wants the matrix. So it is here: block
Lanczos with full orthogonalisation and thick restarts (Wu, Simon 2000; Zhou, Saad 2008, *Block
Krylov–Schur method for large symmetric eigenvalue problems*). A block of k vectors finds an eigenvalue
k times, if it is repeated; and many products at once cost less than one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from gpulab.errors import UsageError
from gpulab.saddles.operators import Operator, check_count, check_products, check_square, check_symmetric
from gpulab.settings import float32_products

PIECE = 4_096  # so many products are added up in float32
WHICH = ("smallest", "largest", "both", "magnitude")


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenvalues `values` (k,) in ascending order, float64, and their unit `vectors` (n, k), on the operator's device.

    `residuals` (k,) are ‖Hv − λv‖, from products made for this; an eigenvalue lies within this distance of
    each value. `scale` is the largest |λ| that was seen, `products` how many products with a vector it all
    took, `converged` whether every residual is below the tolerance that was asked for.
    """

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "n k"]
    residuals: Float[Tensor, " k"]
    scale: float
    products: int
    converged: bool

    def __repr__(self) -> str:
        values = ", ".join(f"{value:.6g}" for value in self.values.tolist()[:8])
        more = ", …" if len(self.values) > 8 else ""
        state = "" if self.converged else "NOT converged, "
        worst = float(self.residuals.max())
        return f"Eigenpairs [{values}{more}]: {state}residuals up to {worst:.1e}, {self.products:,} products"


def lanczos(
    H: Operator,
    k: int = 1,
    which: str = "smallest",
    *,
    tolerance: float | None = None,
    max_products: int = 3_000,
    block: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Eigenpairs:
    """The k `smallest`, `largest`, or largest in `magnitude` of the eigenvalues, or as many of `both` ends.

    `H` is any symmetric operator: a `gpulab.hessian`, or a tensor. Of `both` ends, an odd one more comes from
    below. The residuals are asked to be below `tolerance` times the largest |λ|; by default this is eps^(2/3) of the
    operator's type: 4e-11 in float64, 2e-5 in float32. What has not converged after about `max_products` products
    is returned as such. `block` is how many vectors are multiplied at once, by default k, but at least two: a
    repeated eigenvalue is found that often and no more.

    Raises `UsageError` for a k or `which` that cannot be, `DataError` for an operator that is not symmetric
    or whose products are not finite.

    >>> pairs = lanczos(torch.diag(torch.tensor([3.0, -1.0, 2.0, -1.0])), k=2)
    >>> [round(value, 4) for value in pairs.values.tolist()], pairs.converged
    ([-1.0, -1.0], True)
    """
    n = check_square(H)
    check_count("k", k, n)
    check_count("max_products", max_products)
    check_count("block", 1 if block is None else block, n)
    if which not in WHICH:
        raise UsageError(f"which={which!r}: expected one of {', '.join(WHICH)}")
    if tolerance is None:
        tolerance = torch.finfo(H.dtype).eps ** (2 / 3)
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance={tolerance!r}: expected a number between 0 and 1")
    width = min(n, block or max(2, k))
    with tqdm(total=max_products, unit="product", leave=False, delay=2, disable=not progress) as bar:
        space = _Space(H, width, min(n, max(2 * k + 4 * width, 40)), seed, bar)
        return _search(space, k, which, tolerance, max_products)


def _search(space: _Space, k: int, which: str, tolerance: float, max_products: int) -> Eigenpairs:
    """Grow the space, and restart it from its best vectors, until the wanted pairs have converged."""
    while True:
        space.grow()
        values, vectors = space.ritz()
        if space.size < k:
            continue
        chosen = _chosen(values, k, which)
        scale = float(values.abs().max())
        close = bool((space.residuals(vectors)[chosen] <= 0.5 * tolerance * scale).all())
        if close or space.size == space.n or space.products + k >= max_products:
            return _pairs(space, values[chosen], vectors[:, chosen], scale, tolerance)
        if space.size + space.width > space.most:
            space.restart(vectors[:, _chosen(values, space.kept(k), which)])


def _chosen(values: Tensor, k: int, which: str) -> Tensor:
    """The places of the wanted ones among ascending values, ascending."""
    m = len(values)
    k = min(k, m)
    if which == "magnitude":
        return values.abs().argsort(descending=True)[:k].sort().values
    below = {"smallest": k, "largest": 0, "both": math.ceil(k / 2)}[which]
    return torch.tensor([*range(below), *range(m - (k - below), m)])


def _pairs(space: _Space, values: Tensor, small: Tensor, scale: float, tolerance: float) -> Eigenpairs:
    rows = space.vectors(small)
    products = space.multiply(rows)
    apart = products - rows * values.to(rows)[:, None]
    residuals = _lengths(apart)
    converged = bool((residuals <= tolerance * scale).all())
    return Eigenpairs(values, rows.T, residuals, scale, space.products, converged)


class _Space:
    """An orthonormal basis of a Krylov space, a row a vector, and the operator within it, `inside` (size, size)."""

    def __init__(self, H: Operator, width: int, most: int, seed: int, bar: tqdm) -> None:
        self.H, self.n, self.width, self.most, self.bar = H, H.shape[0], width, most, bar
        self.generator = torch.Generator().manual_seed(seed)
        self.storage = torch.empty(most, self.n, dtype=H.dtype, device=H.device)
        self.inside = torch.zeros(most, most, dtype=torch.float64)
        self.size = self.products = self.newest = 0
        self.next, self.coupling = self._orthonormal(self._random(width))

    @property
    def basis(self) -> Float[Tensor, "size n"]:
        return self.storage[: self.size]

    def multiply(self, rows: Tensor) -> Tensor:
        """Products with the operator, counted and checked."""
        self.products += len(rows)
        self.bar.update(len(rows))
        products = (self.H @ rows.T).T
        check_products(products)
        return products

    def grow(self) -> None:
        """Take the next block in, and find the one after it."""
        block = self.next[: self.most - self.size]
        products = self.multiply(block)
        if self.size == 0 and len(block) > 1:
            check_symmetric(block.T * self.n**0.5, products.T)
        self._take(block, products.contiguous())

    @float32_products()
    def _take(self, block: Tensor, products: Tensor) -> None:
        start, self.newest = self.size, len(block)
        self.size += self.newest
        self.basis[start:] = block
        inside = _inner(self.basis, products)
        self.inside[: self.size, start : self.size] = inside
        self.inside[start : self.size, : self.size] = inside.T
        corner = self.inside[start : self.size, start : self.size]
        corner.copy_((corner + corner.T) / 2)
        self.next, self.coupling = self._orthonormal(products, float(_lengths(products).max()))

    @float32_products()
    def _orthonormal(self, rows: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """A block orthonormal to itself and to the basis, with R: what the basis lacks of `rows` is Rᵀ @ block.

        Directions that are within the basis already are replaced by random ones, for which R is zero.
        """
        width = min(len(rows), self.n - self.size)
        if width == 0:
            return rows[:0], torch.zeros(0, len(rows), dtype=torch.float64)
        block, lengths, turn = _principal(self._outside(rows))
        # What is left of a vector after it loses its part within the basis is rounding, up to this.
        known = lengths[:width] > 10 * torch.finfo(rows.dtype).eps * math.sqrt(self.n) * scale
        coupling = torch.diag(lengths[:width] * known) @ turn.T[:width]
        block = block[:width]
        block[~known.to(block.device)] = self._random(int((~known).sum()))
        for _ in range(1 if known.all() else 3):
            block = self._outside(block / _lengths(block)[:, None].to(block))
            block = _principal(block)[0]
        return block, coupling

    def _outside(self, rows: Tensor) -> Tensor:
        """What of the vectors is orthogonal to the basis; twice is enough (Parlett)."""
        for _ in range(2):
            rows = torch.addmm(rows, _inner(rows, self.basis).to(rows), self.basis, alpha=-1)
        return rows

    def _random(self, count: int) -> Tensor:
        """Random vectors from the CPU's generator, so that they are the same on every device."""
        drawn = torch.randn(count, self.n, generator=self.generator, dtype=torch.float32)
        return drawn.to(self.H.device).to(self.H.dtype)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (size,), ascending, and eigenvectors of the operator within the space."""
        return torch.linalg.eigh(self.inside[: self.size, : self.size])

    def residuals(self, small: Tensor) -> Tensor:
        """‖Hv − λv‖ of Ritz vectors, as the recurrence has it."""
        if self.size == self.n:
            return torch.zeros(small.shape[1], dtype=torch.float64)
        return (self.coupling @ small[-self.newest :]).norm(dim=0)

    @float32_products()
    def vectors(self, small: Tensor) -> Tensor:
        """Vectors of the operator, a row each, from those within the space."""
        made = small.T.to(self.storage.dtype).to(self.storage.device) @ self.basis
        return made / _lengths(made)[:, None].to(made)

    def kept(self, k: int) -> int:
        """How many vectors a restart keeps: the wanted ones and half of the room that is left."""
        return min(self.size, k + (self.most - k) // 2, max(k, self.most - 2 * self.width))

    def restart(self, small: Tensor) -> None:
        """Keep these Ritz vectors alone, and go on from the block that follows."""
        values = torch.diag(small.T @ self.inside[: self.size, : self.size] @ small)
        kept = self.vectors(small)
        self.size = len(kept)
        self.basis.copy_(kept)
        self.inside.zero_()
        self.inside[: self.size, : self.size] = torch.diag(values)
        self.next, _ = self._orthonormal(self.next)


def _inner(a: Float[Tensor, "m n"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m k"]:
    """Inner products of rows, in float64 on the CPU: float32 would lose digits over millions of numbers."""
    if a.dtype == torch.float64:
        return (a @ b.T).cpu()
    pieces = a.shape[1] // PIECE
    whole = pieces * PIECE
    left, right = (rows[:, :whole].reshape(len(rows), pieces, PIECE) for rows in (a, b))
    sums = left.transpose(0, 1) @ right.permute(1, 2, 0)
    return sums.cpu().double().sum(0) + (a[:, whole:] @ b[:, whole:].T).cpu().double()


def _lengths(rows: Float[Tensor, "k n"]) -> Float[Tensor, " k"]:
    """The norms of rows, in float64 on the CPU."""
    if rows.device.type == "mps":
        return torch.stack([_inner(row[None], row[None])[0, 0].sqrt() for row in rows])
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu()


def _principal(rows: Float[Tensor, "k n"]) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of k ≪ n rows, the longest first: right vectors, values, left vectors."""
    if rows.dtype == torch.float64:
        q, r = torch.linalg.qr(rows.T)
        left, lengths, right = torch.linalg.svd(r.cpu())
        return (q @ left.to(q)).T.contiguous(), lengths, right.T
    # The squares of what float32 can tell apart are still apart in float64.
    squares, turn = torch.linalg.eigh(_inner(rows, rows))
    lengths, turn = squares.clamp(min=0).sqrt().flip(0), turn.flip(1)
    directions = (turn / lengths.clamp(min=1e-300)).T.to(rows.dtype).to(rows.device)
    return directions @ rows, lengths, turn
