"""Critical points of any loss: where the gradient vanishes, told apart from where it only cannot get smaller.

The gradient g is driven to zero by minimising ‖g‖² with the method of Levenberg and Marquardt: the step p minimises
‖g + H p‖² + μ‖p‖² (H the Hessian), and the damping μ, proportional to ‖g‖, falls where the step did what it promised
and grows where it did not. Unlike Newton's own step it needs no regular H, and it is as fast near the solution even
where critical points are not isolated (Fan, Yuan), as they never are in a network whose units can be rescaled.

‖g‖² has minima of its own, where H g = 0 but g is not: gradient-flat regions (Frye et al.).
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gpulab.errors import UsageError
from gpulab.report import Progress
from gpulab.saddles.hessians import Hessian, hessian
from gpulab.saddles.objectives import Batch, Loss, Objective
from gpulab.steps import trainable_parameters

if TYPE_CHECKING:
    pass

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
    parameters = trainable_parameters(searched)
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
