"""Critical points of any loss, distinguished from points where the gradient only stops shrinking.

The Levenberg–Marquardt method minimises ‖g‖², where g is the gradient. The step p minimises
‖g + H p‖² + μ‖p‖², where H is the Hessian. The damping μ is proportional to ‖g‖. It is decreased
after a step that reduced ‖g‖² as predicted, and increased after one that did not. Unlike Newton's
step, this step does not need an invertible H. Near the solution it converges as fast, even where
critical points are not isolated (Fan, Yuan). They never are in a network whose units can be
rescaled.

‖g‖² also has minima at which g is not zero but H g = 0: gradient-flat regions (Frye et al.).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gpulab.errors import UsageError
from gpulab.report import Progress
from gpulab.saddles._hessian import Hessian, hessian
from gpulab.saddles._objectives import Batch, Loss, Objective
from gpulab.steps import trainable_parameters

MAX_STEPS = 300  # the largest number of steps of the search
MAX_PARAMETERS = 5_000  # the largest number of weights, because each step computes their Hessian
GRADIENT_TOLERANCE = 1e-20  # the squared length of a gradient that counts as zero
# Eigenvalues with |λ| below this share of the largest |λ| belong to the kernel of the Hessian.
KERNEL_SHARE = 1e-4
# A region is gradient-flat if more than this share of the gradient is in the kernel (Frye et al.).
MIN_FLAT_SHARE = 0.9
# The search has stalled if ‖g‖² has fallen by less than 1 % over the last 10 steps.
STALL_STEPS = 10
STALL_RATIO = 0.99
# A step is accepted if it achieves more than this share of the predicted decrease of ‖g‖².
MIN_GAIN_RATIO = 1e-4
INITIAL_DAMPING = 1e-2
MIN_DAMPING = 1e-12
MAX_DAMPING = 1e30  # If a step this short does not reduce the gradient, no step does.
# If the Newton step is longer than this share of the weights, the critical point is elsewhere.
MAX_NEWTON_SHARE = 1e-2
MIN_DENOMINATOR = 1e-300  # replaces a denominator of zero


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CriticalPoint:
    """A critical point of a loss, or the point at which the search for one ended.

    `find_critical_point` returns one. Its vectors contain all trainable weights, flattened, in the
    order of the model's parameters, in float64. Eigenvalues are those of the whole Hessian, and are
    computed when first used.

    Attributes:
        model: A copy of the network, in float64, with the weights of this point.
        objective: The loss as a function of a model, with its data in float64.
        found: Whether this is a critical point, that is, whether the gradient is zero up to
            rounding.
        message: How the point was found, or why it is not a critical point. For example, it may lie
            in a gradient-flat region, where the gradient is not zero but cannot be reduced further.

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
        """Return the Hessian at this point, as torch computes it.

        Returns:
            A `gpulab.saddles.Hessian`.
        """
        return hessian(self.model, lambda: self.objective(self.model))

    @property
    def loss(self) -> float:
        """The loss at this point."""
        return float(self.objective(self.model).detach())

    @functools.cached_property
    def unstable(self) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]:
        """The m negative eigenvalues (m,), ascending, and their eigenvectors in columns (n, m).

        An eigenvalue counts as negative if it is below −1e-8 times the largest |λ|.
        """
        values, vectors = self._eigen
        # 1e-8 is the square of `KERNEL_SHARE`.
        threshold = KERNEL_SHARE**2 * values.abs().max()
        is_negative = values < -threshold
        return values[is_negative], vectors[:, is_negative]

    @property
    def eigenvalues(self) -> Float[Tensor, " n"]:
        """All eigenvalues of the Hessian, (n,), in ascending order."""
        values, _ = self._eigen
        return values

    @property
    def index(self) -> int:
        """The number of negative eigenvalues of the Hessian."""
        negative_values, _ = self.unstable
        return len(negative_values)

    @property
    def curvature(self) -> float:
        """The smallest eigenvalue of the Hessian: the curvature along `direction`."""
        return float(self.eigenvalues[0])

    @property
    def direction(self) -> Float[Tensor, " n"]:
        """The unit vector (n,) along which the loss curves down most; its sign is arbitrary."""
        _, vectors = self._eigen
        return vectors[:, 0]

    @property
    def steepest(self) -> Float[Tensor, " n"]:
        """The unit vector (n,) along which the loss curves up most; its sign is arbitrary."""
        _, vectors = self._eigen
        return vectors[:, -1]

    @functools.cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """All eigenvalues (n,), ascending, and their eigenvectors in columns (n, n)."""
        return torch.linalg.eigh(self.hessian().dense())

    def __repr__(self) -> str:
        kind = "Critical" if self.found else "No critical"
        return f"{kind} point at loss {self.loss:.6g}: {self.message}"


def find_critical_point(
    model: nn.Module, loss: Loss, batch: Batch, *, progress: bool = True
) -> CriticalPoint:
    """Search for a critical point near the weights of a model: a minimum, a saddle or a maximum.

    The search reduces the gradient by the Levenberg–Marquardt method, on a copy of the model in
    float64. It ends when the squared length of the gradient is 1e-20 or less, and after at most 300
    steps. Each step computes the whole Hessian, so the model may have at most 5,000 weights. The
    search may also end in a gradient-flat region, where the gradient is not zero but cannot be
    reduced further. The message of the result then says so.

    Args:
        model: The network from whose weights the search starts; it is not changed.
        loss: A function of the model's outputs and the targets, which returns a scalar.
        batch: Inputs and targets, or another batch that `gpulab.hessian` accepts.
        progress: Whether to show a progress bar.

    Returns:
        A `gpulab.saddles.CriticalPoint`. Its `found` and `message` say whether it is critical.

    Raises:
        UsageError: If there are more than 5,000 weights, or if `gpulab.hessian` rejects the model,
            the loss or the batch.
        DataError: If weights or the loss are not finite.

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
            "the search works on a copy of the model: expected a batch and a loss that takes the"
            " model's outputs, got no batch"
        )
    moving_model = copy.deepcopy(model).double()
    objective = Objective.of(loss, batch).double()
    parameters = trainable_parameters(moving_model)
    count = sum(parameter.numel() for parameter in parameters)
    if count > MAX_PARAMETERS:
        limit = f"expected at most {MAX_PARAMETERS:,}, because each step computes the whole Hessian"
        raise UsageError(f"{count:,} parameters: {limit}")

    def squared_gradient() -> float:
        """Compute ‖g‖² at the present weights."""
        gradients = torch.autograd.grad(objective(moving_model), parameters, materialize_grads=True)
        return sum(float(gradient.square().sum()) for gradient in gradients)

    damping = INITIAL_DAMPING
    scale = 0.0  # the largest |λ| so far
    squared_norms: list[float] = []  # ‖g‖² at each step
    for _ in Progress(range(MAX_STEPS + 1), unit="step", leave=False, disable=not progress):
        expansion = _Expansion.at_weights(moving_model, objective)
        scale = max(scale, float(expansion.values.abs().max()))
        squared_norms.append(expansion.squared_norm)
        is_zero = expansion.squared_norm <= GRADIENT_TOLERANCE
        if is_zero or _has_stalled(squared_norms) or len(squared_norms) > MAX_STEPS:
            break
        damping, has_moved = _make_step(parameters, expansion, squared_gradient, damping, scale)
        if not has_moved:
            break
    weights_norm = float(parameters_to_vector(parameters).detach().norm())
    is_critical, message = _describe_end(expansion, scale, weights_norm, squared_norms)
    # `vector_to_parameters` made the weights views of one vector. Copying separates them again.
    return CriticalPoint(
        model=copy.deepcopy(moving_model), objective=objective, found=is_critical, message=message
    )


@dataclass(frozen=True)
class _Expansion:
    """The gradient g and the Hessian H at a step of the search, in the basis of H's eigenvectors.

    Attributes:
        values: The eigenvalues λ of H, (n,).
        vectors: Its eigenvectors in columns, (n, n).
        coefficients: The components of g along the eigenvectors, (n,).
        squared_norm: ‖g‖².
    """

    values: Tensor
    vectors: Tensor
    coefficients: Tensor
    squared_norm: float

    @classmethod
    def at_weights(cls, model: nn.Module, objective: Objective) -> _Expansion:
        """Compute the gradient and the Hessian at the model's weights."""
        H = hessian(model, lambda: objective(model))
        values, vectors = torch.linalg.eigh(H.dense())
        return cls(values, vectors, vectors.T @ H.gradient, float(H.gradient @ H.gradient))

    def damped_step(self, mu: float) -> tuple[Tensor, float]:
        """Compute the step p that minimises ‖g + H p‖² + μ‖p‖².

        Returns:
            The step, (n,), and the decrease of ‖g‖² that it would cause if g were linear.
        """
        # In the basis of the eigenvectors, H is diagonal: each component of p is −λ g / (λ² + μ).
        step = -self.values * self.coefficients / (self.values.square() + mu)
        predicted_coefficients = self.coefficients + self.values * step
        predicted_decrease = (self.coefficients.square() - predicted_coefficients.square()).sum()
        return self.vectors @ step, float(predicted_decrease)


def _has_stalled(squared_norms: list[float]) -> bool:
    """Return whether ‖g‖² has hardly fallen over the last `STALL_STEPS` steps."""
    if len(squared_norms) <= STALL_STEPS:
        return False
    return squared_norms[-1] > STALL_RATIO * squared_norms[-1 - STALL_STEPS]


def _make_step(
    parameters: list[nn.Parameter],
    expansion: _Expansion,
    squared_gradient: Callable[[], float],
    damping: float,
    scale: float,
) -> tuple[float, bool]:
    """Increase the damping until a step reduces the gradient, and make this step.

    Args:
        parameters: The weights that are moved.
        expansion: The gradient and the Hessian at these weights.
        squared_gradient: Computes ‖g‖² at the weights, wherever they are.
        damping: The damping of the first step that is tried.
        scale: The largest |λ| so far.

    Returns:
        The damping for the next step, and whether the weights have moved. If no step reduces the
        gradient, the weights are restored.
    """
    weights = parameters_to_vector(parameters).detach()
    # The gain ratio is the achieved decrease of ‖g‖² divided by the predicted one. The comparisons
    # are negated because the gain ratio may be NaN, which then counts as a failed step.
    gain_ratio = 0.0
    while not gain_ratio > MIN_GAIN_RATIO and damping < MAX_DAMPING:
        mu = damping * scale * math.sqrt(expansion.squared_norm)
        step, predicted_decrease = expansion.damped_step(mu)
        vector_to_parameters(weights + step, parameters)
        decrease = expansion.squared_norm - squared_gradient()
        gain_ratio = decrease / max(predicted_decrease, MIN_DENOMINATOR)
        # A poor prediction makes the next step shorter, and a good one makes it longer.
        if not gain_ratio >= 0.25:
            damping *= 4
        elif gain_ratio > 0.75:
            damping = max(damping * (1 / 6), MIN_DAMPING)
    has_moved = gain_ratio > MIN_GAIN_RATIO
    if not has_moved:
        vector_to_parameters(weights, parameters)
    return damping, has_moved


def _describe_end(
    expansion: _Expansion, scale: float, weights_norm: float, squared_norms: list[float]
) -> tuple[bool, str]:
    """Decide whether the search has ended at a critical point, and describe its end.

    Args:
        expansion: The gradient and the Hessian at the end.
        scale: The largest |λ| during the search.
        weights_norm: The length of the vector of all weights at the end.
        squared_norms: ‖g‖² at each step.

    Returns:
        Whether this is a critical point, and the message of the `CriticalPoint`.
    """
    values = expansion.values
    coefficients = expansion.coefficients
    message = (
        f"after {len(squared_norms) - 1} steps the squared length of the gradient is"
        f" {expansion.squared_norm:.1e}"
    )
    if expansion.squared_norm <= GRADIENT_TOLERANCE:
        is_resolved = values.abs() > 1e-12 * scale  # eigenvalues that are more than rounding errors
        newton_step = float((coefficients[is_resolved] / values[is_resolved]).norm())
        if newton_step <= MAX_NEWTON_SHARE * (1 + weights_norm):
            return True, message
        message += (
            f", but on a plateau: a critical point, if there is one, is {newton_step:.1e} away"
        )
        return False, message
    is_in_kernel = values.abs() <= KERNEL_SHARE * scale
    gradient_norm = max(float(coefficients.norm()), MIN_DENOMINATOR)
    kernel_share = float(coefficients[is_in_kernel].norm()) / gradient_norm
    if kernel_share > MIN_FLAT_SHARE:
        message += (
            f", in a gradient-flat region: {kernel_share:.0%} of it lies in the kernel of the"
            " Hessian; start elsewhere"
        )
    elif len(squared_norms) > MAX_STEPS:
        message += ": search again from `model`, or start elsewhere"
    else:
        message += ", and it stopped decreasing: the loss is nearly flat or not smooth here"
    return False, message
