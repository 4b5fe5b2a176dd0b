"""Extreme eigenpairs of a symmetric operator, from its products with a few vectors at once.

SciPy's `eigsh` and `lobpcg` compute in NumPy, and `torch.lobpcg` wants the matrix. Here vectors stay on the GPU, and
the operator is known by its products only: block Lanczos with full orthogonalisation and thick restarts. A block of k
vectors finds an eigenvalue k times, if it is repeated; and many products at once cost less than one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gpulab.errors import UsageError, check_count
from gpulab.numerics.tf32 import float32_products
from gpulab.progress import Progress
from gpulab.saddles.operators import Operator, check_products, check_square, check_symmetric

PIECE = 4_096  # so many products are added up in float32
WHICH = ("smallest", "largest", "both")


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenvalues and eigenvectors of a symmetric operator, as far as they were found.

    Attributes:
        values: The eigenvalues, (k,), ascending, in float64.
        vectors: The eigenvectors in columns, (n, k), of unit length, on the operator's device.
        residuals: ‖Hv − λv‖ of each pair, (k,), from products made for this. The operator has an eigenvalue within this
            distance of λ.
        scale: The largest |λ| that was met.
        products: How many products with one vector it took in all.
        converged: Whether every residual is below the tolerance.
    """

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "n k"]
    residuals: Float[Tensor, " k"]
    scale: float
    products: int
    converged: bool

    def __repr__(self) -> str:
        values = ", ".join(f"{value:.6g}" for value in self.values.tolist())
        residuals = f"{'' if self.converged else 'NOT converged, '}residuals up to {float(self.residuals.max()):.1e}"
        return f"Eigenpairs [{values}]: {residuals}, {self.products:,} products"


def lanczos(
    H: Operator,
    k: int = 1,
    which: str = "smallest",
    *,
    tolerance: float | None = None,
    max_products: int = 3_000,
    seed: int = 0,
    progress: bool = True,
) -> Eigenpairs:
    """Find the k smallest or largest eigenvalues of a symmetric operator, and their eigenvectors.

    It needs products with the operator only: block Lanczos with thick restarts.

    Args:
        H: A `gpulab.hessian`, a tensor (n, n), or anything else that multiplies vectors by `@` and has `shape`, `dtype`
            (float32 or float64) and `device`.
        k: How many pairs to find.
        which: `smallest`, `largest`, or `both` ends; of an odd k, one more comes from below.
        tolerance: The residuals ‖Hv − λv‖ to reach, relative to the largest |λ|; by default eps^(2/3) of the operator's
            type, which is 4e-11 in float64 and 2e-5 in float32.
        max_products: After about so many products with one vector the search ends, converged or not.
        seed: Draws the random vectors with which it begins.
        progress: Whether to show a progress bar, where it takes longer than two seconds.

    Returns:
        An object with `values` (k,), ascending, in float64; `vectors` (n, k), on the operator's device; the `residuals`
        (k,); `scale`, the largest |λ| met; the number of `products`; and whether all pairs have `converged`.

    Raises:
        UsageError: For an operator that is not square, or not float32 or float64, for an unknown `which`, and for
            another option out of range.
        DataError: For an operator that is not symmetric, or whose products are not finite.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> pairs = gl.saddles.lanczos(torch.diag(torch.tensor([3.0, -1.0, 2.0, -1.0])), k=2)
        >>> [round(value, 4) for value in pairs.values.tolist()], pairs.converged
        ([-1.0, -1.0], True)

    References:
        Wu, Simon 2000, *Thick-restart Lanczos method for large symmetric eigenvalue problems*; Zhou, Saad 2008, *Block
        Krylov–Schur method for large symmetric eigenvalue problems*.
    """
    n = check_square(H)
    check_count("k", k, n)
    check_count("max_products", max_products)
    if which not in WHICH:
        raise UsageError(f"which={which!r}: expected one of {', '.join(WHICH)}")
    if tolerance is None:
        tolerance = torch.finfo(H.dtype).eps ** (2 / 3)
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance={tolerance!r}: expected a number between 0 and 1")
    width = min(n, max(2, k))  # of a block: no repeated eigenvalue is found more often
    room = min(n, max(2 * k + 4 * width, 40))
    with Progress(total=max_products, unit="product", leave=False, delay=2, disable=not progress) as bar:
        space = KrylovSpace(H, width, room, seed, bar)
        while True:
            space.grow()
            values, vectors = torch.linalg.eigh(space.projected)  # Ritz values, and vectors within the space
            chosen = _select(values, k, which)
            scale = float(values.abs().max())
            residuals = (space.coupling @ vectors[-space.newest :]).norm(dim=0)  # as the recurrence has them
            converged = bool((residuals[chosen] <= 0.5 * tolerance * scale).all())
            if converged or space.size == n or space.products + k >= max_products:
                break
            if space.size + width > room:  # go on with the best Ritz vectors and half of the room that is left
                best = min(space.size, k + (room - k) // 2, max(k, room - 2 * width))
                space.restart(vectors[:, _select(values, best, which)])
        values = values[chosen]
        rows = space.lift(vectors[:, chosen])
        residuals = _lengths(space.multiply(rows) - rows * values.to(rows)[:, None])
    converged = bool((residuals <= tolerance * scale).all())
    return Eigenpairs(values, rows.T, residuals, scale, space.products, converged)


def _select(values: Tensor, k: int, which: str) -> Tensor:
    """The indices of k extreme ones among ascending values, ascending."""
    below = {"smallest": k, "largest": 0, "both": math.ceil(k / 2)}[which]
    return torch.tensor([*range(below), *range(len(values) - (k - below), len(values))])


class KrylovSpace:
    """An orthonormal basis of what products with an operator span, which grows by a block of vectors at a time.

    `next` (k, n) is the block to come; what the newest products have outside of the basis is couplingᵀ @ next. `newest`
    is how many vectors the last block had.
    """

    @float32_products()
    def __init__(self, H: Operator, start: int | Tensor, room: int, seed: int = 0, bar: Progress | None = None) -> None:
        """Begin with the rows of `start` (k, n), or with so many random ones; there is `room` for all the vectors."""
        self.H, self.n, self.bar = H, H.shape[0], bar
        self.generator = torch.Generator().manual_seed(seed)
        self.storage = torch.empty(room, self.n, dtype=H.dtype, device=H.device)
        self.inside = torch.zeros(room, room, dtype=torch.float64)
        self.size = self.products = self.newest = 0
        self.next, self.coupling = self._orthonormal(self._random(start) if isinstance(start, int) else start)

    @property
    def basis(self) -> Float[Tensor, "size n"]:
        """The vectors, a row each, on the operator's device."""
        return self.storage[: self.size]

    @property
    def projected(self) -> Float[Tensor, "size size"]:
        """The operator within the space, float64 on the CPU."""
        return self.inside[: self.size, : self.size]

    def multiply(self, rows: Tensor) -> Tensor:
        """Products with the operator, counted and checked."""
        self.products += len(rows)
        if self.bar is not None:
            self.bar.update(len(rows))
        products = (self.H @ rows.T).T
        check_products(products)
        return products

    def grow(self) -> None:
        """Take the next block in, and find the one after it."""
        block = self.next[: len(self.storage) - self.size]
        products = self.multiply(block).contiguous()
        if self.size == 0 and len(block) > 1:
            check_symmetric(self.H, block.T, products.T)
        start, self.newest = self.size, len(block)
        self.size += self.newest
        self.basis[start:] = block
        with float32_products():
            columns = _inner(self.basis, products)
            self.next, self.coupling = self._orthonormal(products, float(_lengths(products).max()))
        self.projected[:, start:] = columns
        self.projected[start:] = columns.T
        corner = self.projected[start:, start:]
        corner.copy_((corner + corner.T) / 2)

    @float32_products()
    def restart(self, vectors: Float[Tensor, "size k"]) -> None:
        """Keep these Ritz vectors alone, and go on from the block that follows."""
        values = torch.diag(vectors.T @ self.projected @ vectors)
        rows = self.lift(vectors)
        self.size = len(rows)
        self.basis.copy_(rows)
        self.projected.copy_(torch.diag(values))
        self.next, _ = self._orthonormal(self.next)

    @float32_products()
    def lift(self, vectors: Float[Tensor, "size k"]) -> Float[Tensor, "k n"]:
        """Unit vectors of the operator, a row each, from those within the space."""
        rows = vectors.T.to(self.storage) @ self.basis
        return rows / _lengths(rows)[:, None].to(rows)

    def _orthonormal(self, rows: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """A block orthonormal to itself and to the basis, with R: what the basis lacks of `rows` is Rᵀ @ block.

        Directions that are within the basis already are replaced by random ones, for which R is zero.
        """
        width = min(len(rows), self.n - self.size)
        if width == 0:
            return rows[:0], torch.zeros(0, len(rows), dtype=torch.float64)
        block, lengths, turn = _principal(self._outside(rows))
        # What is left of a vector after it loses its part within the basis is rounding, up to this.
        new = lengths[:width] > 10 * torch.finfo(rows.dtype).eps * math.sqrt(self.n) * scale
        coupling = torch.diag(lengths[:width] * new) @ turn.T[:width]
        block = block[:width]
        block[~new.to(block.device)] = self._random(int((~new).sum()))
        for _ in range(1 if new.all() else 3):
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


def _inner(a: Float[Tensor, "m n"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m k"]:
    """Inner products of rows, in float64 on the CPU: float32 would lose digits over millions of numbers."""
    if a.dtype == torch.float64:
        return (a @ b.T).cpu()
    pieces = a.shape[1] // PIECE
    covered_columns = pieces * PIECE
    left, right = (rows[:, :covered_columns].reshape(len(rows), pieces, PIECE) for rows in (a, b))
    sums = left.transpose(0, 1) @ right.permute(1, 2, 0)
    return sums.cpu().double().sum(0) + (a[:, covered_columns:] @ b[:, covered_columns:].T).cpu().double()


def _lengths(rows: Float[Tensor, "k n"]) -> Float[Tensor, " k"]:
    """The norms of rows, in float64 on the CPU."""
    if rows.device.type == "mps":
        return torch.stack([_inner(row[None], row[None])[0, 0].sqrt() for row in rows])
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu()


def _principal(rows: Float[Tensor, "k n"]) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of k ≪ n rows, the longest first: right vectors, values, left vectors."""
    if len(rows) == 1:
        lengths = _lengths(rows)
        return rows / lengths.clamp(min=1e-300).to(rows), lengths, torch.ones(1, 1, dtype=torch.float64)
    if rows.dtype == torch.float64:
        q, r = torch.linalg.qr(rows.T)
        left, lengths, right = torch.linalg.svd(r.cpu())
        return (q @ left.to(q)).T.contiguous(), lengths, right.T
    # The squares of what float32 can tell apart are still apart in float64.
    squares, turn = torch.linalg.eigh(_inner(rows, rows))
    lengths, turn = squares.clamp(min=0).sqrt().flip(0), turn.flip(1)
    directions = (turn / lengths.clamp(min=1e-300)).T.to(rows.dtype).to(rows.device)
    return directions @ rows, lengths, turn
