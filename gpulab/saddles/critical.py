"""Critical points of any loss: where the gradient vanishes, told apart from where it only cannot get smaller.

The gradient g is driven to zero by minimising ‖g‖² with the method of Levenberg and Marquardt: the step p minimises
‖g + H p‖² + μ‖p‖² (H the Hessian), and the damping μ, proportional to ‖g‖, falls where the step did what it promised
and grows where it did not. Unlike Newton's own step it needs no regular H, and it is as fast near the solution even
where critical points are not isolated (Fan, Yuan), as they never are in a network whose units can be rescaled.

‖g‖² has minima of its own, where H g = 0 but g is not: gradient-flat regions (Frye et al.).

Around such a point, and around any weights, `landscape` and `surface` compute the loss along a line, and over the plane
of the two directions that curve most.
"""

from __future__ import annotations

import copy
import functools
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
from gpulab.report import Progress, Report
from gpulab.saddles.hessians import Hessian, hessian
from gpulab.saddles.objectives import Batch, Loss, Objective
from gpulab.saddles.spectrum import extreme_eigenpairs, trained

if TYPE_CHECKING:
    import pandas as pd

MOST_STEPS = 300
LARGEST = 5_000  # parameters: each step writes the whole Hessian out
TOLERANCE = 1e-20  # the squared length of a gradient that counts as zero
KERNEL = 1e-4  # eigenvalues below this share of the largest are as good as none: a step along them leads nowhere
FLAT = 0.9  # share of the gradient in the kernel from which on a region is called gradient-flat (Frye et al.)
STALLED = 10, 0.99  # so many steps that leave this share of ‖g‖² or more: it does not get smaller any more
MOST_DAMPED = 1e30  # where a step this short does not make the gradient smaller, none does
FAR = 1e-2  # a Newton step longer than this share of the weights: the critical point is elsewhere
TINY = 1e-300


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CriticalPoint:
    """A critical point of a loss, or where the search for one ended. `gpulab.saddles.find_critical_point` returns it.

    Its vectors are all trainable weights, flattened, in the order of the model's parameters, in float64. Eigenvalues
    are those of the whole Hessian, computed when first asked for.

    Attributes:
        model: A copy of the network, in float64, with the weights of that place.
        objective: The loss as a function of a model, with what it is computed on in float64.
        found: Whether it is a critical point: whether the gradient is zero, but for rounding.
        message: Which it is or how it was found; or why it is none, such as a gradient-flat region, where the gradient
            is not zero and yet cannot get smaller.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> data = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        >>> saddle = gl.saddles.linear_autoencoder_saddle(data, [1])
        >>> loss = torch.nn.functional.mse_loss
        >>> point = gl.saddles.find_critical_point(saddle.model, loss, (data, data), progress=False)
        >>> point.found, point.index
        (True, 1)
    """

    model: nn.Module
    objective: Objective
    found: bool = True
    message: str

    def hessian(self) -> Hessian:
        """Make the Hessian there, as torch computes it.

        Returns:
            A `gpulab.saddles.Hessian`.
        """
        return hessian(self.model, lambda: self.objective(self.model))

    @property
    def loss(self) -> float:
        """The loss there."""
        return float(self.objective(self.model).detach())

    @functools.cached_property
    def unstable(self) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]:
        """The m negative eigenvalues, (m,), the least first, and their eigenvectors in columns, (n, m).

        An eigenvalue that was computed counts as negative below −1e-8 of the largest |λ|.
        """
        values, vectors = self._eigen
        negative = values < -(KERNEL**2) * values.abs().max()
        return values[negative], vectors[:, negative]

    @property
    def eigenvalues(self) -> Float[Tensor, " n"]:
        """All eigenvalues of the Hessian, (n,), the least first."""
        return self._eigen[0]

    @property
    def index(self) -> int:
        """How many eigenvalues of the Hessian are negative."""
        return len(self.unstable[0])

    @property
    def curvature(self) -> float:
        """The least eigenvalue of the Hessian: the curvature along `direction`."""
        return float(self.eigenvalues[0])

    @property
    def direction(self) -> Float[Tensor, " n"]:
        """The unit vector (n,) along which the loss curves down most; its sign is arbitrary."""
        return self._eigen[1][:, 0]

    @property
    def steepest(self) -> Float[Tensor, " n"]:
        """The unit vector (n,) along which the loss curves up most; its sign is arbitrary."""
        return self._eigen[1][:, -1]

    @functools.cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh(self.hessian().dense())

    def __repr__(self) -> str:
        return f"{'Critical' if self.found else 'No critical'} point at loss {self.loss:.6g}: {self.message}"


def find_critical_point(model: nn.Module, loss: Loss, batch: Batch, *, progress: bool = True) -> CriticalPoint:
    """Search for a critical point near the weights of a model: a minimum, a saddle or a maximum.

    The search makes the gradient smaller, by the method of Levenberg and Marquardt, on a copy of the model in float64.
    It makes 300 steps at most, and each writes the whole Hessian out: the model has at most 5,000 weights. It ends
    where the squared length of the gradient is 1e-20 or less. It may also end in a gradient-flat region, where the
    gradient is not zero and yet cannot get smaller: the result says so.

    Args:
        model: The network whose weights to begin with; it is left alone.
        loss: A function of the model's outputs and the targets, which returns a scalar.
        batch: Inputs and targets, or what else `gpulab.hessian` accepts.
        progress: Whether to show a progress bar.

    Returns:
        A `gpulab.saddles.CriticalPoint`. Whether it is one, its `found` and `message` say.

    Raises:
        UsageError: For more than 5,000 weights, and for what `gpulab.hessian` refuses.
        DataError: For weights or a loss that are not finite.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> net = gl.models.LinearAutoencoder(features=4, hidden=2)
        >>> point = gl.saddles.find_critical_point(net, torch.nn.functional.mse_loss, (data, data), progress=False)
        >>> point.found, bool(point.hessian().gradient.norm() <= 1e-10)
        (True, True)

    References:
        Levenberg 1944 (Quart. Appl. Math. 2:164); Marquardt 1963 (SIAM J. 11:431); Fan, Yuan 2005 (Computing 74:23) on
        its convergence; Frye, Simon, Wadia, Ligeralde, DeWeese, Bouchard 2021, *Critical point-finding methods reveal
        gradient-flat regions of deep network losses* (Neural Computation 33:1469, arXiv 2003.10397).
    """
    if batch is None:
        raise UsageError("the search goes on with a copy of the model: give a batch and a loss of the outputs")
    searched, objective = copy.deepcopy(model).double(), Objective.of(loss, batch).double()
    parameters = trained(searched)
    if (count := sum(parameter.numel() for parameter in parameters)) > LARGEST:
        raise UsageError(f"{count:,} parameters: each step writes the Hessian out, and it has at most {LARGEST:,} rows")
    damping, scale = 1e-2, 0.0  # the largest |λ| met so far
    sizes: list[float] = []  # ‖g‖² at each step
    for _ in Progress(range(MOST_STEPS + 1), unit="step", leave=False, disable=not progress):
        H = hessian(searched, lambda: objective(searched))
        values, vectors = torch.linalg.eigh(H.dense())
        along = vectors.T @ H.gradient  # g, where the Hessian is diagonal
        scale, size = max(scale, float(values.abs().max())), float(H.gradient @ H.gradient)
        sizes.append(size)
        stalled = len(sizes) > STALLED[0] and size > STALLED[1] * sizes[-1 - STALLED[0]]
        if size <= TOLERANCE or stalled or len(sizes) > MOST_STEPS:
            break
        weights, gain = parameters_to_vector(parameters).detach(), 0.0
        while not gain > 1e-4 and damping < MOST_DAMPED:  # a step is damped until it makes the gradient smaller
            step = -values * along / (values.square() + damping * scale * math.sqrt(size))
            promised = float((along.square() - (along + values * step).square()).sum())
            vector_to_parameters(weights + vectors @ step, parameters)
            gradients = torch.autograd.grad(objective(searched), parameters, materialize_grads=True)
            gain = (size - sum(float(gradient.square().sum()) for gradient in gradients)) / max(promised, TINY)
            if not gain >= 0.25:  # or it is NaN
                damping *= 4
            elif gain > 0.75:
                damping = max(damping * (1 / 6), 1e-12)
        if not gain > 1e-4:
            vector_to_parameters(weights, parameters)
            break
    small, known = values.abs() <= KERNEL * scale, values.abs() > 1e-12 * scale
    share = float(along[small].norm()) / max(float(along.norm()), TINY)  # of the gradient in the kernel
    newton_step = float((along[known] / values[known]).norm())
    far = FAR * (1 + float(parameters_to_vector(parameters).detach().norm()))
    found = size <= TOLERANCE and newton_step <= far
    message = f"after {len(sizes) - 1} steps the squared length of the gradient is {size:.1e}"
    if size <= TOLERANCE and not found:
        message += f", but on a plateau: a critical point, if there is one, is {newton_step:.1e} away"
    elif share > FLAT and not found:
        message += f", in a gradient-flat region: {share:.0%} of it lies in the kernel of the Hessian; start elsewhere"
    elif len(sizes) > MOST_STEPS and not found:
        message += ": search again from `model`, or start elsewhere"
    elif not found:
        message += ", and it gets no smaller: nearly flat, or the loss is not smooth here"
    # A copy has weights of their own again, which are no views of one vector.
    return CriticalPoint(model=copy.deepcopy(searched), objective=objective, found=found, message=message)


# --- the loss around them ---------------------------------------------------------------------------------

EIGENPAIR_TOLERANCE = 1e-3  # of an eigenpair: finer than what a picture shows


@dataclass(frozen=True, eq=False, repr=False)
class Landscape:
    """The weights of a network, and the directions along which its loss curves down most and up most.

    `gpulab.saddles.landscape` makes one. It keeps a copy of the weights.

    Attributes:
        model: The network.
        objective: The loss, as a function of the model.
        parameters: The copy of the weights, by name. A vector is all of them, flattened, in this order.
        loss: The loss at these weights.
        gradient: The gradient there, (n,).
        down: The unit vector (n,) of the least eigenvalue of the Hessian.
        up: The unit vector (n,) of the greatest one.
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
        """How far a slice goes by default: sqrt(2 · loss / |λ|), with the curvature λ along `down`.

        At this distance that curvature alone would leave no loss. It is 1 where the loss is not above zero or λ is
        zero.
        """
        return math.sqrt(2 * self.loss / abs(self.curvatures[0])) if self.loss > 0 and self.curvatures[0] else 1.0

    def curvature(self, angle: float = 0.0) -> float:
        """Compute the curvature along a direction in the plane of `down` and `up`.

        Args:
            angle: The direction in degrees: 0 is `down`, 90 is `up`.

        Returns:
            The second derivative of the loss along it.
        """
        cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        return cosine**2 * self.curvatures[0] + sine**2 * self.curvatures[1]

    def slice(self, angle: float = 0.0, extent: float | None = None, places: int = 41) -> pd.DataFrame:
        """Compute the loss along a line through the weights.

        Args:
            angle: The line's direction in degrees: 0 is `down`, 90 is `up`.
            extent: How far to go from the weights, both ways; by default the landscape's own `extent`.
            places: At how many places to compute the loss.

        Returns:
            A data frame with the columns `distance` (signed, of the weights), `loss`, and `quadratic`: the loss that
            slope and curvature at the weights would give.

        Raises:
            UsageError: For an extent that is no number above 0, and for `places` that are no whole number from 1.
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
            return float(self.objective(self.model))


def landscape(model: nn.Module, loss: Loss, batch: Batch | None = None) -> Landscape:
    """Find the directions from a network's weights along which its loss curves down most and up most.

    The loss along lines in their plane can then be computed (`slice`).

    Args:
        model: A network with parameters in float32 or float64.
        loss: A function of the model's outputs and the targets, which returns a scalar; without a batch, a function of
            nothing that asks the model itself.
        batch: Inputs and targets, or what else `gpulab.hessian` accepts.

    Returns:
        A `gpulab.saddles.Landscape`.

    Raises:
        UsageError: For what `gpulab.hessian` refuses.
        DataError: For weights or a loss that are not finite, and for an operator that is not symmetric.

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
        Goodfellow, Vinyals, Saxe 2015, *Qualitatively characterizing neural network optimization problems* (ICLR, arXiv
        1412.6544), for slices; Alain, Le Roux, Manzagol 2019, *Negative eigenvalues of the Hessian in deep neural
        networks* (arXiv 1902.02366), for those along negative curvature.
    """
    objective = Objective.of(loss, batch)
    H = hessian(model, lambda: objective(model))
    (least, greatest), vectors = extreme_eigenpairs(H, tolerance=EIGENPAIR_TOLERANCE)
    directions, curvatures = (vectors[:, 0], vectors[:, 1]), (float(least), float(greatest))
    return Landscape(model, objective, H.parameters, H.loss, H.gradient, *directions, curvatures)


@dataclass(frozen=True, eq=False, repr=False)
class Surface(Report):
    """The loss around a saddle, over the plane of its least and its greatest curvature.

    `gpulab.saddles.surface` makes one. It can be printed and drawn (`plot`, or `gpulab.plots.saddle_surface`).

    Attributes:
        along: Distances of the weights from the saddle in the direction of the least curvature, (k,).
        across: Distances in the direction of the greatest curvature, (k,).
        losses: The loss at each place, (k, k): a row for each distance `across`, a column for each `along`.
        loss: The loss at the saddle.
        curvatures: The least and the greatest eigenvalue of the Hessian.
        index: How many eigenvalues are negative.
        size: How many eigenvalues there are.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1])
        >>> print(gl.saddles.surface(saddle, places=2))
        A saddle at loss 2.222: 1 of 6 directions lead down
    """

    plots = "gpulab.plots.saddles"

    along: Float[np.ndarray, " k"]
    across: Float[np.ndarray, " k"]
    losses: Float[np.ndarray, "k k"]
    loss: float
    curvatures: tuple[float, float]
    index: int
    size: int

    def __str__(self) -> str:
        return f"A saddle at loss {self.loss:.4g}: {self.index} of {self.size:,} directions lead down"


def surface(saddle: CriticalPoint, extent: float = 1.0, places: int = 12) -> Surface:
    """Compute the loss around a saddle, over the plane of its least and its greatest curvature.

    Args:
        saddle: From `gpulab.saddles.linear_autoencoder_saddle` or `gpulab.saddles.find_critical_point`. Its least
            eigenvalue has to be negative and its greatest positive.
        extent: How far to go from the saddle along the least curvature. Along the greatest it goes less far, where that
            is steeper.
        places: At how many places to compute the loss on each side of the saddle, along each direction.

    Returns:
        A `gpulab.saddles.Surface` of (2 · places + 1) × (2 · places + 1) losses.

    Raises:
        UsageError: For `places` that are no whole number from 1, and for a minimum or a maximum, which has no such
            plane.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1])
        >>> around = gl.saddles.surface(saddle, extent=0.1, places=1)
        >>> bool(around.losses[1, 0] < around.loss < around.losses[0, 1])
        True

    References:
        Li, Xu, Taylor, Studer, Goldstein 2018, *Visualizing the loss landscape of neural nets* (NeurIPS, arXiv
        1712.09913), who draw such planes along random directions; here the directions are eigenvectors of the Hessian.
    """
    check_count("places", places)
    curvatures = saddle.curvature, float(saddle.eigenvalues[-1])
    if not curvatures[0] < 0 < curvatures[1]:
        ends = "the least curvature is {:.2g} and the greatest {:.2g}".format(*curvatures)
        raise UsageError(f"{ends}: a saddle has one below and one above zero; see gpulab.saddles.landscape")
    along = np.linspace(-extent, extent, 2 * places + 1)
    across = along * np.sqrt(min(1.0, -curvatures[0] / curvatures[1]))
    model = copy.deepcopy(saddle.model)
    parameters = trained(model)
    centre = parameters_to_vector(parameters).detach()
    losses = np.empty((len(across), len(along)))
    for row, column in np.ndindex(losses.shape):
        vector_to_parameters(centre + along[column] * saddle.direction + across[row] * saddle.steepest, parameters)
        losses[row, column] = float(saddle.objective(model).detach())
    return Surface(along, across, losses, saddle.loss, curvatures, saddle.index, len(saddle.eigenvalues))
