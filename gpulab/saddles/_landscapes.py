"""The loss around a network's weights: along lines, and over the plane of extreme curvatures."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gpulab._torch_internals import reparametrized
from gpulab.errors import UsageError, check_count
from gpulab.report import Report
from gpulab.saddles._critical import CriticalPoint
from gpulab.saddles._eigenpairs import extreme_eigenpairs
from gpulab.saddles._hessian import hessian
from gpulab.saddles._objectives import Batch, Loss, Objective
from gpulab.steps import trainable_parameters

if TYPE_CHECKING:
    import pandas as pd


EIGENPAIR_TOLERANCE = 1e-3  # errors of eigenpairs below this cannot be seen in a figure


@dataclass(frozen=True, eq=False, repr=False)
class Landscape:
    """The weights of a network, with the directions of the least and the greatest curvature.

    `gpulab.saddles.landscape` returns one. It keeps a copy of the weights.

    Attributes:
        model: The network.
        objective: The loss, as a function of the model.
        parameters: The copy of the weights, by name. Vectors consist of all weights, flattened, in
            this order.
        loss: The loss at these weights.
        gradient: The gradient at these weights, (n,).
        down: The unit eigenvector (n,) of the Hessian's smallest eigenvalue.
        up: The unit eigenvector (n,) of the Hessian's largest eigenvalue.
        curvatures: The two eigenvalues.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> layer = torch.nn.Linear(2, 1, bias=False).double()
        >>> loss = lambda: layer.weight[0, 0] ** 2 - layer.weight[0, 1] ** 2
        >>> around = gl.saddles.landscape(layer, loss)
        >>> [round(curvature, 6) for curvature in around.curvatures]
        [-2.0, 2.0]
    """

    model: nn.Module
    objective: Objective
    parameters: dict[str, Tensor]
    loss: float
    gradient: Float[Tensor, " n"]
    down: Float[Tensor, " n"]
    up: Float[Tensor, " n"]
    curvatures: tuple[float, float]

    @property
    def extent(self) -> float:
        """The default length of a slice on either side: sqrt(2 · loss / |λ|).

        λ is the curvature along `down`. If λ is negative, a loss without a slope and without any
        other curvature would reach zero at this distance. The length is 1 if the loss is not above
        zero or if λ is zero.
        """
        least, _ = self.curvatures
        if self.loss <= 0 or least == 0:
            return 1.0
        return math.sqrt(2 * self.loss / abs(least))

    def curvature(self, angle: float = 0.0) -> float:
        """Compute the curvature along a direction in the plane of `down` and `up`.

        Args:
            angle: The direction in degrees: 0 is `down`, 90 is `up`.

        Returns:
            The second derivative of the loss along this direction.
        """
        least, greatest = self.curvatures
        cosine = math.cos(math.radians(angle))
        sine = math.sin(math.radians(angle))
        return cosine**2 * least + sine**2 * greatest

    def slice(
        self, angle: float = 0.0, extent: float | None = None, places: int = 41
    ) -> pd.DataFrame:
        """Compute the loss along a line through the weights.

        Args:
            angle: The line's direction in degrees: 0 is `down`, 90 is `up`.
            extent: The length of the line on either side of the weights; by default the `extent`
                of the landscape.
            places: The number of points at which the loss is computed.

        Returns:
            A data frame with the columns `distance` (from the weights, with a sign), `loss`, and
            `quadratic`, the loss predicted from the slope and the curvature at the weights.

        Raises:
            UsageError: If the extent is not a number above 0, or `places` is not a positive
                integer.
        """
        import pandas as pd

        check_count("places", places)
        radius = self.extent if extent is None else extent
        if not 0 < radius < math.inf:
            raise UsageError(f"extent={extent!r}: expected a distance above 0")
        direction = (
            math.cos(math.radians(angle)) * self.down + math.sin(math.radians(angle)) * self.up
        )
        slope = float(self.gradient @ direction)
        distance = np.linspace(-radius, radius, places)
        losses = [self._loss_at(direction * position) for position in distance]
        quadratic = self.loss + slope * distance + self.curvature(angle) * distance**2 / 2
        return pd.DataFrame({"distance": distance, "loss": losses, "quadratic": quadratic})

    @torch.no_grad()
    def _loss_at(self, displacement: Float[Tensor, " n"]) -> float:
        """Compute the loss at the weights moved by a displacement."""
        pieces = displacement.split([tensor.numel() for tensor in self.parameters.values()])
        weights = {
            name: tensor + piece.view_as(tensor)
            for piece, (name, tensor) in zip(pieces, self.parameters.items(), strict=True)
        }
        with reparametrized(self.model, weights, tie_weights=True):
            return float(self.objective(self.model))


def landscape(model: nn.Module, loss: Loss, batch: Batch | None = None) -> Landscape:
    """Find the directions of the least and the greatest curvature at a network's weights.

    The loss along lines in their plane can then be computed (`slice`).

    Args:
        model: A network with parameters in float32 or float64.
        loss: A function of the model's outputs and the targets that returns a scalar. If there is
            no batch, a function without arguments that calls the model itself.
        batch: Inputs and targets, or another batch that `gpulab.hessian` accepts.

    Returns:
        A `gpulab.saddles.Landscape`.

    Raises:
        UsageError: If `gpulab.hessian` rejects the model, the loss or the batch.
        DataError: If weights or the loss are not finite, or if the Hessian is not symmetric.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> import gpulab as gl
        >>> layer = torch.nn.Linear(3, 1, bias=False).double()
        >>> x, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
        >>> around = gl.saddles.landscape(layer, torch.nn.functional.mse_loss, (x, y))
        >>> line = around.slice(90, extent=1.0, places=3)
        >>> bool(np.allclose(line.loss, line.quadratic))  # the loss of a linear layer is quadratic
        True

    References:
        Goodfellow, Vinyals, Saxe 2015, *Qualitatively characterizing neural network optimization
        problems* (ICLR, arXiv 1412.6544), on slices; Alain, Le Roux, Manzagol 2019, *Negative
        eigenvalues of the Hessian in deep neural networks* (arXiv 1902.02366), on slices along
        negative curvature.
    """
    objective = Objective.of(loss, batch)
    H = hessian(model, lambda: objective(model))
    (least, greatest), vectors = extreme_eigenpairs(H, tolerance=EIGENPAIR_TOLERANCE)
    return Landscape(
        model=model,
        objective=objective,
        parameters=H.parameters,
        loss=H.loss,
        gradient=H.gradient,
        down=vectors[:, 0],
        up=vectors[:, 1],
        curvatures=(float(least), float(greatest)),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Surface(Report):
    """The loss around a saddle, over the plane of its least and its greatest curvature.

    `gpulab.saddles.surface` returns one. It can be printed and drawn (`plot`, or
    `gpulab.plots.saddle_surface`).

    Attributes:
        along: Distances of the weights from the saddle in the direction of the least curvature,
            (k,).
        across: Distances in the direction of the greatest curvature, (k,).
        losses: The loss at each point, (k, k): a row for each distance in `across`, a column for
            each distance in `along`. The saddle is in the middle, because k is odd and both
            distances are zero there.
        loss: The loss at the saddle.
        curvatures: The smallest and the largest eigenvalue of the Hessian.
        index: The number of negative eigenvalues.
        size: The number of eigenvalues.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(
        ...     torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1]
        ... )
        >>> print(gl.saddles.surface(saddle, places=2))
        A saddle at loss 2.222: 1 of 6 directions lead down
    """

    along: Float[np.ndarray, " k"]
    across: Float[np.ndarray, " k"]
    losses: Float[np.ndarray, "k k"]
    loss: float
    curvatures: tuple[float, float]
    index: int
    size: int

    def __str__(self) -> str:
        return (
            f"A saddle at loss {self.loss:.4g}: {self.index} of {self.size:,} directions lead down"
        )


def surface(saddle: CriticalPoint, extent: float = 1.0, places: int = 12) -> Surface:
    """Compute the loss around a saddle, over the plane of its least and its greatest curvature.

    Args:
        saddle: From `gpulab.saddles.linear_autoencoder_saddle` or
            `gpulab.saddles.find_critical_point`. Its smallest eigenvalue must be negative and its
            largest positive.
        extent: The largest distance from the saddle in the direction of the least curvature. If the
            greatest curvature is larger in magnitude, distances in its direction are shorter, so
            that the loss changes by about the same amount in both directions.
        places: The number of points on each side of the saddle, along each direction.

    Returns:
        A `gpulab.saddles.Surface` of (2 · places + 1) × (2 · places + 1) losses.

    Raises:
        UsageError: If `places` is not a positive integer, or if the Hessian does not have both
            negative and positive eigenvalues.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(
        ...     torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1]
        ... )
        >>> around = gl.saddles.surface(saddle, extent=0.1, places=1)
        >>> bool(around.losses[1, 0] < around.loss < around.losses[0, 1])
        True

    References:
        Li, Xu, Taylor, Studer, Goldstein 2018, *Visualizing the loss landscape of neural nets*
        (NeurIPS, arXiv 1712.09913), who draw such planes along random directions; here the
        directions are eigenvectors of the Hessian.
    """
    check_count("places", places)
    least = saddle.curvature
    greatest = float(saddle.eigenvalues[-1])
    if not least < 0 < greatest:
        raise UsageError(
            f"the least curvature is {least:.2g} and the greatest {greatest:.2g}: expected one"
            " below and one above zero; for other points use gpulab.saddles.landscape"
        )
    along = np.linspace(-extent, extent, 2 * places + 1)
    # At a distance x the loss changes by λ x² / 2, so this factor makes both changes equal.
    across = along * np.sqrt(min(1.0, -least / greatest))
    model = copy.deepcopy(saddle.model)
    parameters = trainable_parameters(model)
    centre = parameters_to_vector(parameters).detach()
    losses = np.empty((len(across), len(along)))
    for row, column in np.ndindex(losses.shape):
        vector_to_parameters(
            centre + along[column] * saddle.direction + across[row] * saddle.steepest, parameters
        )
        losses[row, column] = float(saddle.objective(model).detach())
    return Surface(
        along=along,
        across=across,
        losses=losses,
        loss=saddle.loss,
        curvatures=(least, greatest),
        index=saddle.index,
        size=len(saddle.eigenvalues),
    )
