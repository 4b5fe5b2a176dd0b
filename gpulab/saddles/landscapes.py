"""The loss along straight lines through a network's weights: from the steepest way down to the steepest way up.

Source: Goodfellow, Vinyals, Saxe 2015, *Qualitatively characterizing neural network optimization problems* (ICLR, arXiv
1412.6544), for slices; Alain, Le Roux, Manzagol 2019, *Negative eigenvalues of the Hessian in deep neural networks*
(arXiv 1902.02366), for those along negative curvature.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import UsageError
from gpulab.saddles.eigen import lanczos
from gpulab.saddles.hessians import Batch, Loss, hessian
from gpulab.saddles.operators import check_count
from gpulab.saddles.spectrum import most_negative

if TYPE_CHECKING:
    import pandas as pd

TOLERANCE = 1e-3  # of an eigenpair, relative to the largest |λ|: finer than what a picture shows


@dataclass(frozen=True, eq=False, repr=False)
class Landscape:
    """The weights of a network, and the unit vectors along which its loss curves down and up most.

    `curvatures` are the eigenvalues of `down` (n,) and `up` (n,), `slopes` the gradient along them, `loss` and
    `gradient_norm` those of the place. `extent` is how far the curvature alone would need to take all of the loss away,
    in the Euclidean distance of the weights.
    """

    model: nn.Module
    objective: Loss
    batch: Batch | None
    parameters: dict[str, Tensor]
    loss: float
    gradient_norm: float
    down: Float[Tensor, " n"]
    up: Float[Tensor, " n"]
    curvatures: tuple[float, float]
    slopes: tuple[float, float]

    @property
    def extent(self) -> float:
        """sqrt(2 · loss / |λ|), with the λ of the steepest way down."""
        return math.sqrt(2 * self.loss / abs(self.curvatures[0])) if self.loss > 0 and self.curvatures[0] else 1.0

    def curvature(self, angle: float = 0.0) -> float:
        """The curvature along the direction at an `angle` in degrees: 0 is `down`, 90 is `up`."""
        cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        return cosine**2 * self.curvatures[0] + sine**2 * self.curvatures[1]

    def slice(self, angle: float = 0.0, extent: float | None = None, places: int = 41) -> pd.DataFrame:
        """The loss along a line: columns `distance` (from −extent to extent), `loss`, `quadratic`.

        The line turns by `angle` degrees from `down` to `up`. `quadratic` is what gradient and curvature at the
        place would make of it.
        """
        import pandas as pd

        check_count("places", places)
        reach = self.extent if extent is None else extent
        if not 0 < reach < math.inf:
            raise UsageError(f"extent={extent!r}: expected a distance above 0")
        cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        direction = cosine * self.down + sine * self.up
        slope = cosine * self.slopes[0] + sine * self.slopes[1]
        distance = np.linspace(-reach, reach, places)
        with _restored(self.model, self.parameters) as move, torch.no_grad():
            losses = [float(self._at(move, direction * away)) for away in distance]
        quadratic = self.loss + slope * distance + self.curvature(angle) * distance**2 / 2
        return pd.DataFrame({"distance": distance, "loss": losses, "quadratic": quadratic})

    def _at(self, move: _Mover, vector: Tensor) -> Tensor:
        move(vector)
        return self.objective() if self.batch is None else self.objective(self.model(self.batch[0]), self.batch[1])

    def __repr__(self) -> str:
        down, up = self.curvatures
        return (
            f"Landscape at loss {self.loss:.4g}: curvature from {down:.3g} to {up:.3g}, slope {self.gradient_norm:.2g}"
        )


def landscape(
    model: nn.Module, loss: Loss, batch: Batch | None = None, *, seed: int = 0, progress: bool = True
) -> Landscape:
    """The loss around a network's weights, over the directions of its most negative and its largest curvature.

    `loss` and `batch` are those of `gpulab.hessian`, and so are the errors.

    >>> layer = torch.nn.Linear(3, 1, bias=False).double()
    >>> x, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)
    >>> around = landscape(layer, torch.nn.functional.mse_loss, (x, y), progress=False)
    >>> line = around.slice(90, extent=1.0, places=3)
    >>> bool(np.allclose(line.loss, line.quadratic))  # the loss of a linear layer is quadratic
    True
    """
    H = hessian(model, loss, batch)
    lowest = most_negative(H, tolerance=TOLERANCE, seed=seed, progress=progress)
    highest = lanczos(H, 1, "largest", tolerance=TOLERANCE, seed=seed, progress=progress)
    up = highest.vectors[:, 0]
    return Landscape(
        model=model,
        objective=loss,
        batch=batch,
        parameters={name: tensor.detach().clone() for name, tensor in H.parameters.items()},
        loss=H.loss,
        gradient_norm=float(H.gradient.norm()),
        down=lowest.vector,
        up=up,
        curvatures=(lowest.value, float(highest.values[0])),
        slopes=(float(H.gradient @ lowest.vector), float(H.gradient @ up)),
    )


class _Mover:
    """Puts a model's weights a vector away from where they were."""

    def __init__(self, weights: Mapping[str, Tensor], begin: dict[str, Tensor]) -> None:
        self.weights, self.begin = weights, begin

    def __call__(self, vector: Float[Tensor, " n"]) -> None:
        pieces = vector.split([tensor.numel() for tensor in self.begin.values()])
        for piece, (name, tensor) in zip(pieces, self.begin.items(), strict=True):
            self.weights[name].copy_(tensor + piece.view_as(tensor))


@contextlib.contextmanager
def _restored(model: nn.Module, begin: dict[str, Tensor]) -> Iterator[_Mover]:
    """Weights that may be moved, and are what they were in the end."""
    weights = dict(model.named_parameters())
    before = {name: weights[name].detach().clone() for name in begin}
    with torch.no_grad():
        try:
            yield _Mover(weights, begin)
        finally:
            for name, tensor in before.items():
                weights[name].copy_(tensor)
