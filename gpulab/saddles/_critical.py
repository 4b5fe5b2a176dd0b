"""Critical points of any loss, distinguished from places where the gradient only stalls.

The gradient g is driven to zero by minimising ‖g‖² with the method of Levenberg and Marquardt: the
step p minimises ‖g + H p‖² + μ‖p‖² (H the Hessian), and the damping μ, proportional to ‖g‖, falls
where the step did what it promised and grows where it did not. Unlike Newton's own step it needs no
regular H, and it is as fast near the solution even where critical points are not isolated (Fan,
Yuan), as they never are in a network whose units can be rescaled.

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
from gpulab.saddles._hessian import Hessian, hessian
from gpulab.saddles._objectives import Batch, Loss, Objective
from gpulab.steps import trainable_parameters

if TYPE_CHECKING:
    pass

MAX_STEPS = 300
MAX_PARAMETERS = 5_000  # parameters: each step writes the whole Hessian out
GRADIENT_TOLERANCE = 1e-20  # the squared length of a gradient that counts as zero
# eigenvalues below this share of the largest count as zero: a step along them leads nowhere
KERNEL_SHARE = 1e-4
# share of the gradient in the kernel from which on a region is called gradient-flat (Frye et al.)
MIN_FLAT_SHARE = 0.9
STALL_STEPS = 10  # the search has stalled where ‖g‖² has fallen by less than 1 % over these steps
STALL_RATIO = 0.99
MIN_GAIN_RATIO = (
    1e-4  # the least share of the predicted decrease of ‖g‖² that a step has to achieve
)
MAX_DAMPING = 1e30  # if a step this short does not make the gradient smaller, none does
MAX_NEWTON_SHARE = (
    1e-2  # a Newton step longer than this share of the weights: the critical point is elsewhere
)
MIN_DENOMINATOR = 1e-300


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CriticalPoint:
    """A critical point of a loss, or where the search ended: `find_critical_point` returns it.

    Its vectors are all trainable weights, flattened, in the order of the model's parameters, in
    float64. Eigenvalues are those of the whole Hessian, computed when first asked for.

    Attributes:
        model: A copy of the network, in float64, with the weights of that place.
        objective: The loss as a function of a model, with what it is computed on in float64.
        found: Whether it is a critical point: whether the gradient is zero, but for rounding.
        message: How it was found, or why it is not a critical point, such as a gradient-flat
            region, where the gradient is not zero and yet cannot get smaller.

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
        """The m negative eigenvalues (m,), ascending, and their eigenvectors in columns (n, m).

        An eigenvalue that was computed counts as negative below −1e-8 of the largest |λ|.
        """
        values, vectors = self._eigen
        negative = values < -(KERNEL_SHARE**2) * values.abs().max()
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
        kind = "Critical" if self.found else "No critical"
        return f"{kind} point at loss {self.loss:.6g}: {self.message}"


def find_critical_point(
    model: nn.Module, loss: Loss, batch: Batch, *, progress: bool = True
) -> CriticalPoint:
    """Search for a critical point near the weights of a model: a minimum, a saddle or a maximum.

    The search makes the gradient smaller, by the method of Levenberg and Marquardt, on a copy of
    the model in float64. It makes 300 steps at most, and each writes the whole Hessian out: the
    model has at most 5,000 weights. It ends where the squared length of the gradient is 1e-20 or
    less. It may also end in a gradient-flat region, where the gradient is not zero and yet cannot
    get smaller: the result says so.

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
        >>> point = gl.saddles.find_critical_point(
        ...     net, torch.nn.functional.mse_loss, (data, data), progress=False
        ... )
        >>> point.found, bool(point.hessian().gradient.norm() <= 1e-10)
        (True, True)

    References:
        Levenberg 1944 (Quart. Appl. Math. 2:164); Marquardt 1963 (SIAM J. 11:431); Fan, Yuan 2005
        (Computing 74:23) on its convergence; Frye, Simon, Wadia, Ligeralde, DeWeese, Bouchard 2021,
        *Critical point-finding methods reveal gradient-flat regions of deep network losses* (Neural
        Computation 33:1469, arXiv 2003.10397).
    """
    if batch is None:
        raise UsageError(
            "the search goes on with a copy of the model: give a batch and a loss of the outputs"
        )
    moving_model = copy.deepcopy(model).double()
    objective = Objective.of(loss, batch).double()
    parameters = trainable_parameters(moving_model)
    count = sum(parameter.numel() for parameter in parameters)
    if count > MAX_PARAMETERS:
        limit = f"each step writes the Hessian out, and it has at most {MAX_PARAMETERS:,} rows"
        raise UsageError(f"{count:,} parameters: {limit}")
    damping = 1e-2
    scale = 0.0  # the largest |λ| so far
    squared_norms: list[float] = []  # ‖g‖² at each step
    for _ in Progress(range(MAX_STEPS + 1), unit="step", leave=False, disable=not progress):
        H = hessian(moving_model, lambda: objective(moving_model))
        values, vectors = torch.linalg.eigh(H.dense())
        coefficients = vectors.T @ H.gradient  # g in the basis of the eigenvectors
        scale = max(scale, float(values.abs().max()))
        squared_norm = float(H.gradient @ H.gradient)
        squared_norms.append(squared_norm)
        is_stalled = (
            len(squared_norms) > STALL_STEPS
            and squared_norm > STALL_RATIO * squared_norms[-1 - STALL_STEPS]
        )
        if squared_norm <= GRADIENT_TOLERANCE or is_stalled or len(squared_norms) > MAX_STEPS:
            break
        weights = parameters_to_vector(parameters).detach()
        gain_ratio = 0.0
        # A step is damped until it makes the gradient smaller; the gain ratio may be NaN.
        while not gain_ratio > MIN_GAIN_RATIO and damping < MAX_DAMPING:
            step = (
                -values
                * coefficients
                / (values.square() + damping * scale * math.sqrt(squared_norm))
            )
            predicted_decrease = float(
                (coefficients.square() - (coefficients + values * step).square()).sum()
            )
            vector_to_parameters(weights + vectors @ step, parameters)
            gradients = torch.autograd.grad(
                objective(moving_model), parameters, materialize_grads=True
            )
            decrease = squared_norm - sum(float(gradient.square().sum()) for gradient in gradients)
            gain_ratio = decrease / max(predicted_decrease, MIN_DENOMINATOR)
            if not gain_ratio >= 0.25:  # or it is NaN
                damping *= 4
            elif gain_ratio > 0.75:
                damping = max(damping * (1 / 6), 1e-12)
        if not gain_ratio > MIN_GAIN_RATIO:
            vector_to_parameters(weights, parameters)
            break
    is_in_kernel = values.abs() <= KERNEL_SHARE * scale
    is_resolved = values.abs() > 1e-12 * scale
    # The share of the gradient that lies in the kernel.
    kernel_share = float(coefficients[is_in_kernel].norm()) / max(
        float(coefficients.norm()), MIN_DENOMINATOR
    )
    newton_step = float((coefficients[is_resolved] / values[is_resolved]).norm())
    max_newton_step = MAX_NEWTON_SHARE * (
        1 + float(parameters_to_vector(parameters).detach().norm())
    )
    is_critical = squared_norm <= GRADIENT_TOLERANCE and newton_step <= max_newton_step
    message = (
        f"after {len(squared_norms) - 1} steps the squared length of the gradient is"
        f" {squared_norm:.1e}"
    )
    if squared_norm <= GRADIENT_TOLERANCE and not is_critical:
        message += (
            f", but on a plateau: a critical point, if there is one, is {newton_step:.1e} away"
        )
    elif kernel_share > MIN_FLAT_SHARE and not is_critical:
        message += (
            f", in a gradient-flat region: {kernel_share:.0%} of it lies in the kernel of the"
            " Hessian; start elsewhere"
        )
    elif len(squared_norms) > MAX_STEPS and not is_critical:
        message += ": search again from `model`, or start elsewhere"
    elif not is_critical:
        message += ", and it gets no smaller: nearly flat, or the loss is not smooth here"
    # The copy's weights are separate tensors again, not views of one vector.
    return CriticalPoint(
        model=copy.deepcopy(moving_model), objective=objective, found=is_critical, message=message
    )
