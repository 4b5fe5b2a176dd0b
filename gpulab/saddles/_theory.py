"""Saddle points known in closed form: those of the linear autoencoder.

With data X (N, D), decoder A (D, h) and encoder B (h, D), the mean squared error that torch
computes is

    L = ‖X − X Bᵀ Aᵀ‖² / (N D) = tr((I − AB) Σ (I − AB)ᵀ) / D,      Σ = Xᵀ X / N = U diag(λ) Uᵀ.

Σ is the matrix of second moments; for centred data it is the covariance. For every subset S of the
components, A = U_S and B = U_Sᵀ is a critical point with the loss L = Σ_{i∉S} λ_i / D. If the
weights are displaced by P (decoder) and Q (encoder) in the basis U, the loss changes in second
order by

    (‖(P Eᵀ + E Q) √λ‖² − 2 Σ_{i∉S} λ_i (P Q)_ii) / D,      E = Uᵀ U_S.

This quadratic form is a sum of terms, each of which depends on one entry of the decoder and one
entry of the encoder. The Hessian therefore consists of 2 × 2 blocks:

- i ∉ S and the unit that holds s ∈ S: the block (2/D) [[λ_s, −λ_i], [−λ_i, λ_i]], which has one
  negative eigenvalue if λ_i > λ_s;
- s, t ∈ S: the eigenvalues 4 λ_t / D and 0. The zero belongs to the direction in which a component
  moves from one unit to another while the network's function stays the same;
- i ∉ S and a unit that is zero: the eigenvalues ±2 λ_i / D;
- t ∈ S and a unit that is zero: the eigenvalues 0 and 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor, nn

from gpulab.errors import DataError, UsageError, check_count
from gpulab.models import LinearAutoencoder
from gpulab.saddles._critical import CriticalPoint
from gpulab.saddles._objectives import Objective


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LinearAutoencoderSaddle(CriticalPoint):
    """A critical point of a linear autoencoder, whose Hessian is known in closed form.

    `gpulab.saddles.linear_autoencoder_saddle` returns one. At this point the weights hold some of
    the D principal components of the data. Eigenvalues, eigenvectors and index come from formulas,
    not from the Hessian that torch computes. Vectors consist of all weights, flattened, in the
    order of the model's parameters.

    Attributes:
        model: The network at this point, a `gpulab.models.LinearAutoencoder` in float64. Unless the
            hidden units were mixed, each column of the decoder and each row of the encoder is a
            component that is held, or zero.
        objective: The mean squared error as a function of a model, on the data (N, D), which are
            both inputs and targets.
        components: The indices of the components that are held, from 0.
        moments: The eigenvalues of XᵀX / N, (D,), in descending order.
        basis: The eigenvectors of XᵀX / N as columns, (D, D).
        mixing: An orthogonal matrix R (h, h) that mixes the h hidden units. It changes the weights,
            but not what the network computes.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(
        ...     torch.diag(torch.tensor([3.0, 2.0, 1.0])), [1, 2]
        ... )
        >>> (
        ...     saddle.index,
        ...     bool(
        ...         torch.allclose(
        ...             saddle.eigenvalues, torch.linalg.eigvalsh(saddle.hessian().dense())
        ...         )
        ...     ),
        ... )
        (2, True)

    References:
        Baldi, Hornik 1989, *Neural networks and principal component analysis* (Neural Networks
        2:53); Kunin, Bloom, Goeva, Seed 2019, *Loss landscapes of regularized linear autoencoders*
        (arXiv 1901.08168).
    """

    model: LinearAutoencoder
    components: tuple[int, ...]
    moments: Float[Tensor, " d"]
    basis: Float[Tensor, "d d"]
    mixing: Float[Tensor, "h h"]

    def mixed(self, seed: int) -> LinearAutoencoderSaddle:
        """Apply a random orthogonal matrix to the hidden units.

        The network computes the same function, and its Hessian has the same spectrum. The weights
        and their rounding errors are different.

        Args:
            seed: The seed of the random matrix.

        Returns:
            The saddle with mixed units.

        Examples:
            >>> import torch
            >>> import gpulab as gl
            >>> saddle = gl.saddles.linear_autoencoder_saddle(torch.randn(20, 4), [0, 2])
            >>> x = torch.randn(3, 4, dtype=torch.float64)
            >>> torch.allclose(saddle.model(x), saddle.mixed(seed=1).model(x))
            True
        """
        generator = torch.Generator().manual_seed(seed)
        mixing, _ = torch.linalg.qr(
            torch.randn(self.mixing.shape, dtype=torch.float64, generator=generator)
        )
        return dataclasses.replace(
            self, model=_autoencoder_at(self.basis, self.components, mixing), mixing=mixing
        )

    @property
    def loss(self) -> float:
        """The loss at this point: the sum of the moments that are not held, divided by D."""
        missing = [i for i in range(len(self.moments)) if i not in self.components]
        return float(self.moments[missing].sum() / len(self.moments))

    @property
    def eigenvalues(self) -> Float[Tensor, " n"]:
        """All eigenvalues of the Hessian, (n,), in ascending order."""
        return torch.stack(self._spectrum).flatten().sort().values

    @property
    def direction(self) -> Float[Tensor, " n"]:
        """The unit vector (n,) along which the loss curves down most; its sign is arbitrary."""
        low_eigenvalues, _ = self._spectrum
        return self._eigenvector(int(low_eigenvalues.argmin()))

    @property
    def steepest(self) -> Float[Tensor, " n"]:
        """The unit vector (n,) along which the loss curves up most; its sign is arbitrary."""
        _, high_eigenvalues = self._spectrum
        return self._eigenvector(int(high_eigenvalues.argmax()), is_higher=True)

    @functools.cached_property
    def unstable(self) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]:
        """The m negative eigenvalues (m,), ascending, and their eigenvectors in columns (n, m)."""
        # Only the lower eigenvalue of a block can be negative.
        low_eigenvalues = self._spectrum[0].flatten()
        negative_count = int((low_eigenvalues < 0).sum())
        blocks = low_eigenvalues.argsort(stable=True)[:negative_count].tolist()
        vectors = [self._eigenvector(block)[:, None] for block in blocks]
        # `cat` needs a tensor even if there are no vectors. Each block has two weights.
        no_vectors = low_eigenvalues.new_empty(2 * low_eigenvalues.numel(), 0)
        return low_eigenvalues[blocks], torch.cat([no_vectors, *vectors], dim=1)

    @functools.cached_property
    def _blocks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The entries a, b, c of the Hessian's 2 × 2 blocks [[a, b], [b, c]], and a c − b².

        The first row of a block belongs to an entry of the decoder, the second to one of the
        encoder.

        There is a block for each component and hidden unit; each of the four tensors is (D, h). The
        module's docstring lists the blocks. Determinants known to be zero are exactly zero.
        """
        features = len(self.moments)
        hidden = len(self.mixing)
        held_components = list(self.components)
        held_moments = self.moments.new_zeros(hidden)
        held_moments[: len(held_components)] = self.moments[held_components]
        missing_moments = self.moments.clone()
        missing_moments[held_components] = 0
        # The blocks of components that are not held. In the columns of unused units, a and c are 0.
        a = held_moments.expand(features, hidden).clone()
        c = missing_moments[:, None].repeat(1, hidden)
        b = -c
        c[:, len(held_components) :] = 0
        determinant = a * c - b * b
        # The blocks of components that are held. All entries are the same, so the determinant is 0.
        b[held_components] = c[held_components] = held_moments
        determinant[held_components] = 0
        scale = 2 / features
        return scale * a, scale * b, scale * c, scale**2 * determinant

    @functools.cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """The lower and the higher eigenvalue of each block, (D, h)."""
        a, b, c, determinant = self._blocks
        high = (a + c) / 2 + torch.hypot((a - c) / 2, b)
        # The determinant is the product of both eigenvalues. Computed from it, and not as a
        # difference of nearly equal numbers, the lower eigenvalue has the exact sign.
        nonzero_high = high.clamp(min=torch.finfo(high.dtype).tiny)
        low = torch.where(high > 0, determinant / nonzero_high, 0.0)
        return low, high

    def _eigenvector(self, block: int, is_higher: bool = False) -> Float[Tensor, " n"]:
        """Return the eigenvector of a block's lower or higher eigenvalue, in the order of weights.

        Args:
            block: The number of the block: the component times the number of units, plus the unit.
            is_higher: Whether the eigenvector of the higher eigenvalue is returned.
        """
        component, unit = divmod(block, len(self.mixing))
        decoder_entries, mixed_entries, _, _ = self._blocks
        low_eigenvalues, _ = self._spectrum
        a = float(decoder_entries[component, unit])
        b = float(mixed_entries[component, unit])
        low = float(low_eigenvalues[component, unit])
        # (p, q) is the eigenvector within the block: p belongs to an entry of the decoder, q to one
        # of the encoder. It solves the first row of the block, (a − low) p + b q = 0.
        p = b
        q = low - a
        if p == 0 and q == 0:  # The block is diagonal, and its first entry is the lower eigenvalue.
            p = 1.0
            q = 0.0
        if is_higher:
            p, q = -q, p  # orthogonal to the other eigenvector
        # The entry of the encoder usually has the same unit and component as that of the decoder.
        # Between two components that are held, it has the unit that holds this component, and the
        # component that this unit holds.
        row = unit
        column = component
        if component in self.components and unit < len(self.components):
            row = self.components.index(component)
            column = self.components[unit]
        decoder, encoder = (
            torch.zeros_like(layer.weight) for layer in (self.model.decoder, self.model.encoder)
        )
        decoder[:, unit] = p / math.hypot(p, q) * self.basis[:, component]
        encoder[row] = q / math.hypot(p, q) * self.basis[:, column]
        # The weights of this saddle are those of unmixed units, with the mixing applied.
        by_parameter = {
            "encoder.weight": self.mixing.T @ encoder,
            "decoder.weight": decoder @ self.mixing,
        }
        return torch.cat(
            [by_parameter[name].flatten() for name, _ in self.model.named_parameters()]
        )


def linear_autoencoder_saddle(
    data: Tensor | ArrayLike, components: Sequence[int], *, hidden: int | None = None
) -> LinearAutoencoderSaddle:
    """Build the critical point of a linear autoencoder that holds some principal components.

    The components are the eigenvectors of XᵀX / N; the data are not centred. The point and its
    Hessian are known in closed form, and are computed in float64. The point is a saddle if a
    component that is not held could lower the loss. This is the case if its eigenvalue is larger
    than that of a component that is held, or if its eigenvalue is above zero and a hidden unit is
    unused. Otherwise the point is a minimum.

    Args:
        data: A matrix (N, D) of numbers, a row for each sample.
        components: The indices of the components to hold; 0 has the largest eigenvalue of XᵀX / N.
            Components with equal eigenvalues are in an arbitrary order.
        hidden: The number of hidden units; by default one for each component. Additional units have
            weights of zero.

    Returns:
        A `gpulab.saddles.LinearAutoencoderSaddle`.

    Raises:
        UsageError: If components are not integers from 0 to D − 1 or are given twice, or if there
            are fewer hidden units than components.
        DataError: If the data are not a matrix of finite numbers.

    Examples:
        >>> import math
        >>> import torch
        >>> import gpulab as gl
        >>> # Second moments 9, 4 and 1
        >>> data = math.sqrt(3) * torch.diag(torch.tensor([3.0, 2.0, 1.0]))
        >>> # The middle component is held, so the loss is (9 + 1) / 3
        >>> saddle = gl.saddles.linear_autoencoder_saddle(data, [1])
        >>> saddle
        Critical point at loss 3.33333: the components held are [1]
        >>> saddle.index, round(saddle.curvature, 3)
        (1, -1.894)

    References:
        Baldi, Hornik 1989, *Neural networks and principal component analysis* (Neural Networks
        2:53); Kunin, Bloom, Goeva, Seed 2019, *Loss landscapes of regularized linear autoencoders*
        (arXiv 1901.08168).
    """
    matrix, moments, basis = _principal_components(data)
    held_components = tuple(components) if isinstance(components, Iterable) else (components,)
    for component in held_components:
        check_count("component", component, maximum=len(moments) - 1, minimum=0)
    if len(set(held_components)) < len(held_components):
        raise UsageError(f"components={held_components}: expected each component at most once")
    least = max(1, len(held_components))
    hidden = least if hidden is None else hidden
    check_count("hidden", hidden, minimum=least)
    mixing = torch.eye(hidden, dtype=torch.float64)
    return LinearAutoencoderSaddle(
        model=_autoencoder_at(basis, held_components, mixing),
        objective=Objective.of(nn.functional.mse_loss, (matrix, matrix)),
        message=f"the components held are {list(held_components)}",
        components=held_components,
        moments=moments,
        basis=basis,
        mixing=mixing,
    )


def _autoencoder_at(
    basis: Tensor, components: tuple[int, ...], mixing: Tensor
) -> LinearAutoencoder:
    """Build the network whose hidden units hold some columns of the basis, mixed.

    The decoder is the transpose of the encoder. Because the mixing is orthogonal, it cancels in
    their product, and the network projects onto the columns that it holds.

    Args:
        basis: The principal components (D, D), one in each column.
        components: The columns to hold, at most h of them. Further hidden units are zero.
        mixing: An orthogonal matrix (h, h), which is applied to the hidden units.
    """
    model = LinearAutoencoder(len(basis), len(mixing)).double()
    held_columns = basis.new_zeros(len(basis), len(mixing))
    held_columns[:, : len(components)] = basis[:, list(components)]
    decoder_weights = held_columns @ mixing
    with torch.no_grad():
        model.decoder.weight.copy_(decoder_weights)
        model.encoder.weight.copy_(decoder_weights.T)
    return model


def _principal_components(data: Tensor | ArrayLike) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the principal components of data.

    Returns:
        The data X as a matrix (N, D) in float64; the eigenvalues of XᵀX / N, (D,), in descending
        order; and its eigenvectors as columns, (D, D). Eigenvalues that are zero up to rounding
        become zero, and those that are equal up to rounding become equal.

    Raises:
        DataError: If the data are not a matrix of finite numbers.
    """
    try:
        matrix = torch.as_tensor(data).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data of type {type(data).__name__}: expected a matrix (N, D) of numbers: {error}"
        ) from None
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise DataError(
            f"data of shape {tuple(matrix.shape)}: expected (N, D), with a row for each sample"
        )
    not_finite = int((~matrix.isfinite()).sum())
    if not_finite:
        raise DataError(f"data: {not_finite} of {matrix.numel()} values are not finite")
    ascending_moments, ascending_basis = torch.linalg.eigh(matrix.T @ matrix / len(matrix))
    moments = ascending_moments.flip(0)
    basis = ascending_basis.flip(1)
    rounding = 100 * len(moments) * torch.finfo(moments.dtype).eps * float(moments[0])
    # Eigenvalues that differ only by rounding are made equal. Otherwise their differences would
    # count as negative curvatures.
    for i in range(1, len(moments)):
        if moments[i - 1] - moments[i] <= rounding:
            moments[i] = moments[i - 1]
    return matrix, torch.where(moments > rounding, moments, 0.0), basis
