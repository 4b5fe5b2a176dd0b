"""The loss around a network's weights: along a line through them, and over the plane of a saddle's two directions."""

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
from torch.nn.utils.stateless import _reparametrize_module

from gpulab.errors import UsageError, check_count
from gpulab.report import Report
from gpulab.saddles.critical import CriticalPoint
from gpulab.saddles.eigen import lanczos
from gpulab.saddles.hessians import Batch, Loss, hessian
from gpulab.saddles.operators import trained
from gpulab.saddles.spectrum import most_negative
from gpulab.saddles.theory import LinearAutoencoderSaddle

if TYPE_CHECKING:
    import pandas as pd

TOLERANCE = 1e-3  # of an eigenpair, relative to the largest |λ|: finer than what a picture shows


@dataclass(frozen=True, eq=False, repr=False)
class Landscape:
    """The weights of a network, and the unit vectors along which its loss curves down and up most."""

    model: nn.Module
    objective: Loss
    batch: Batch | None
    parameters: dict[str, Tensor]  # the weights, by name
    loss: float
    gradient: Float[Tensor, " n"]
    down: Float[Tensor, " n"]
    up: Float[Tensor, " n"]
    curvatures: tuple[float, float]  # the eigenvalues of `down` and of `up`

    @property
    def extent(self) -> float:
        """sqrt(2 · loss / |λ|): the distance at which the curvature along `down` alone would leave no loss."""
        return math.sqrt(2 * self.loss / abs(self.curvatures[0])) if self.loss > 0 and self.curvatures[0] else 1.0

    def curvature(self, angle: float = 0.0) -> float:
        """The curvature along the direction at an `angle` in degrees: 0 is `down`, 90 is `up`."""
        cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        return cosine**2 * self.curvatures[0] + sine**2 * self.curvatures[1]

    def slice(self, angle: float = 0.0, extent: float | None = None, places: int = 41) -> pd.DataFrame:
        """The loss along a line through the weights.

        Args:
            angle: Degrees by which the line turns from `down` to `up`.
            extent: How far to go, both ways; by default the landscape's own.
            places: How many to evaluate.

        Returns:
            Columns `distance`, `loss`, and `quadratic`: what slope and curvature at the weights would make of it.
        """
        import pandas as pd

        check_count("places", places)
        reach = self.extent if extent is None else extent
        if not 0 < reach < math.inf:
            raise UsageError(f"extent={extent!r}: expected a distance above 0")
        direction = math.cos(math.radians(angle)) * self.down + math.sin(math.radians(angle)) * self.up
        slope, distance = float(self.gradient @ direction), np.linspace(-reach, reach, places)
        losses = [self._loss_at(direction * step) for step in distance]
        quadratic = self.loss + slope * distance + self.curvature(angle) * distance**2 / 2
        return pd.DataFrame({"distance": distance, "loss": losses, "quadratic": quadratic})

    @torch.no_grad()
    def _loss_at(self, displacement: Float[Tensor, " n"]) -> float:
        pieces = displacement.split([tensor.numel() for tensor in self.parameters.values()])
        weights = {n: t + piece.view_as(t) for piece, (n, t) in zip(pieces, self.parameters.items(), strict=True)}
        with _reparametrize_module(self.model, weights, tie_weights=True):
            if self.batch is None:
                return float(self.objective())
            return float(self.objective(self.model(self.batch[0]), self.batch[1]))

    def __repr__(self) -> str:
        curvature = "curvature from {:.3g} to {:.3g}".format(*self.curvatures)
        return f"Landscape at loss {self.loss:.4g}: {curvature}, slope {float(self.gradient.norm()):.2g}"


def landscape(
    model: nn.Module, loss: Loss, batch: Batch | None = None, *, seed: int = 0, progress: bool = True
) -> Landscape:
    """The loss around a network's weights, over the directions of its most negative and its largest curvature.

    Args:
        model, loss, batch: As for `gpulab.hessian`, whose errors are raised too.
        seed: Of the vectors with which `gpulab.saddles.lanczos` begins.
        progress: Whether to show a progress bar.

    Examples:
        >>> layer = torch.nn.Linear(3, 1, bias=False).double()
        >>> x, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
        >>> around = landscape(layer, torch.nn.functional.mse_loss, (x, y), progress=False)
        >>> line = around.slice(90, extent=1.0, places=3)
        >>> bool(np.allclose(line.loss, line.quadratic))  # the loss of a linear layer is quadratic
        True

    References:
        Goodfellow, Vinyals, Saxe 2015, *Qualitatively characterizing neural network optimization problems* (ICLR, arXiv
        1412.6544), for slices; Alain, Le Roux, Manzagol 2019, *Negative eigenvalues of the Hessian in deep neural
        networks* (arXiv 1902.02366), for those along negative curvature.
    """
    H = hessian(model, loss, batch)
    lowest = most_negative(H, tolerance=TOLERANCE, seed=seed, progress=progress)
    highest = lanczos(H, 1, "largest", tolerance=TOLERANCE, seed=seed, progress=progress)
    directions, curvatures = (lowest.vector, highest.vectors[:, 0]), (lowest.value, float(highest.values[0]))
    return Landscape(model, loss, batch, H.parameters, H.loss, H.gradient, *directions, curvatures)


@dataclass(frozen=True, eq=False, repr=False)
class Surface(Report):
    """The loss around a saddle, over the plane of its least and its greatest curvature."""

    along: Float[np.ndarray, " k"]  # distances of the weights from the saddle in the direction of the least curvature
    across: Float[np.ndarray, " k"]  # and of the greatest
    losses: Float[np.ndarray, "k k"]  # a row for each distance across
    loss: float  # at the saddle
    curvatures: tuple[float, float]  # the least and the greatest eigenvalue of the Hessian
    index: int  # how many eigenvalues are negative
    size: int  # of how many

    def __str__(self) -> str:
        return f"A saddle at loss {self.loss:.4g}: {self.index} of {self.size:,} directions lead down"


@torch.no_grad()
def surface(saddle: LinearAutoencoderSaddle | CriticalPoint, extent: float = 1.0, places: int = 12) -> Surface:
    """The loss around a saddle, over the plane of its least and its greatest curvature.

    Args:
        saddle: From `gpulab.saddles.linear_autoencoder_saddle` or `gpulab.saddles.find_critical_point`.
        extent: How far to go along the least curvature; along the greatest less far, where that is steeper.
        places: How many to evaluate on each side of the saddle, along each direction.

    Examples:
        >>> import gpulab
        >>> saddle = gpulab.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1])
        >>> around = surface(saddle, extent=0.1, places=1)
        >>> bool(around.losses[1, 0] < around.loss < around.losses[0, 1])
        True
    """
    check_count("places", places)
    curvatures = saddle.curvature, float(saddle.eigenvalues[-1])
    along = np.linspace(-extent, extent, 2 * places + 1)
    across = along * np.sqrt(min(1.0, -curvatures[0] / curvatures[1]))
    model = copy.deepcopy(saddle.model)
    parameters = trained(model)
    centre = parameters_to_vector(parameters)
    losses = np.empty((len(across), len(along)))
    for row, column in np.ndindex(losses.shape):
        vector_to_parameters(centre + along[column] * saddle.direction + across[row] * saddle.steepest, parameters)
        losses[row, column] = float(saddle.objective(model))
    return Surface(along, across, losses, saddle.loss, curvatures, len(saddle.unstable[0]), len(saddle.eigenvalues))
