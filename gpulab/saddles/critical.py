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
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gpulab.errors import UsageError
from gpulab.report import Progress
from gpulab.saddles.hessians import Hessian, hessian
from gpulab.saddles.objectives import Batch, Loss, Objective
from gpulab.saddles.operators import trained

if TYPE_CHECKING:
    import pandas as pd

MOST_STEPS = 300
LARGEST = 5_000  # parameters: each step writes the whole Hessian out
KERNEL = 1e-4  # eigenvalues below this share of the largest are as good as none: a step along them leads nowhere
FLAT = 0.9  # share of the gradient in the kernel from which on a region is called gradient-flat (Frye et al.)
EXACTLY_FLAT = 1e-9  # ‖H g‖ relative to ‖H‖ ‖g‖, where going on is useless
STALLED = 10, 0.99  # so many steps that leave this share of ‖g‖² or more: it does not get smaller any more
FAR = 1e-2  # a Newton step longer than this share of the weights: the critical point is elsewhere
TINY = 1e-300
CRITICAL, GRADIENT_FLAT, NOT_CONVERGED = "critical point", "gradient-flat region", "not converged"


@dataclass(frozen=True, eq=False, repr=False)
class CriticalPoint:
    """The result of a search for a critical point: where it ended. `gpulab.saddles.find_critical_point` returns it.

    Its vectors are all trainable weights, flattened, in the order of the model's parameters, in float64. Eigenvalues
    are those of the whole Hessian, computed when first asked for.

    Attributes:
        model: A copy of the network, in float64, with the weights of that place.
        loss: The loss there.
        squared_gradient_norm: The squared length of the gradient there.
        kind: `critical point`; `gradient-flat region`, where the gradient is not zero and yet cannot get smaller; or
            `not converged`.
        message: Why, in words.
        history: A data frame with a row per step: `step`, `loss`, `squared_gradient_norm`, and `relative_residual`, the
            share of the gradient that the best undamped step would leave. Near 1, the gradient lies in the kernel of
            the Hessian.
        data: The loss and what it is computed on, in float64.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> data = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        >>> saddle = gl.saddles.linear_autoencoder_saddle(data, [1])
        >>> loss = torch.nn.functional.mse_loss
        >>> point = gl.saddles.find_critical_point(saddle.model, loss, (data, data), progress=False)
        >>> point.kind, len(point.unstable[0])
        ('critical point', 1)
    """

    model: nn.Module
    loss: float
    squared_gradient_norm: float
    kind: str
    message: str
    history: pd.DataFrame
    data: Objective

    @property
    def batch(self) -> Batch:
        """What the loss is computed on, in float64; of a `DataLoader` a list of its batches."""
        return self.data.batches[0] if len(self.data.batches) == 1 else [*self.data.batches]

    @property
    def found(self) -> bool:
        """Whether the search ended at a critical point."""
        return self.kind == CRITICAL

    def objective(self, model: nn.Module, batch: Batch | None = None) -> Tensor:
        """Compute the loss of a model.

        Args:
            model: A network in float64.
            batch: What to compute it on; by default what the search had.

        Returns:
            The loss, a scalar.
        """
        return (self.data if batch is None else Objective(self.data.loss, (batch,)))(model)

    def hessian(self) -> Hessian:
        """Make the Hessian there.

        Returns:
            A `gpulab.saddles.Hessian`.
        """
        with torch.enable_grad():
            return hessian(self.model, lambda: self.data(self.model))

    @functools.cached_property
    def unstable(self) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]:
        """The m negative eigenvalues, (m,), the least first, and their eigenvectors in columns, (n, m).

        An eigenvalue counts as negative below −1e-8 of the largest |λ|.
        """
        values, vectors = self._eigen
        negative = values < -(KERNEL**2) * values.abs().max()
        return values[negative], vectors[:, negative]

    @property
    def eigenvalues(self) -> Float[Tensor, " n"]:
        """All eigenvalues of the Hessian, (n,), the least first."""
        return self._eigen[0]

    @property
    def curvature(self) -> float:
        """The least eigenvalue of the Hessian."""
        return float(self.eigenvalues[0])

    @property
    def direction(self) -> Float[Tensor, " n"]:
        """The unit eigenvector of the least eigenvalue, (n,)."""
        return self._eigen[1][:, 0]

    @property
    def steepest(self) -> Float[Tensor, " n"]:
        """The unit eigenvector of the greatest eigenvalue, (n,)."""
        return self._eigen[1][:, -1]

    @functools.cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh(self.hessian().dense())

    def __repr__(self) -> str:
        numbers = f"loss {self.loss:.6g}, squared gradient norm {self.squared_gradient_norm:.1e}"
        return f"{self.kind.capitalize()}: {numbers}; {self.message}"


def find_critical_point(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    tolerance: float = 1e-20,
    progress: bool = True,
) -> CriticalPoint:
    """Search for a critical point near the weights of a model: a minimum, a saddle or a maximum.

    The search makes the gradient smaller, by the method of Levenberg and Marquardt, on a copy of the model in float64.
    It makes 300 steps at most, and each writes the whole Hessian out: the model has at most 5,000 weights. It may end
    in a gradient-flat region, where the gradient is not zero and yet cannot get smaller: the result says so.

    Args:
        model: The network whose weights to begin with; it is left alone.
        loss: A function of the model's outputs and the targets, which returns a scalar.
        batch: Inputs and targets, or what else `gpulab.hessian` accepts.
        tolerance: The squared length of the gradient at which to stop.
        progress: Whether to show a progress bar.

    Returns:
        A `gpulab.saddles.CriticalPoint`. Whether it is one, its `found`, `kind` and `message` say.

    Raises:
        UsageError: For a tolerance that is no number above 0, for more than 5,000 weights, and for what
            `gpulab.hessian` refuses.
        DataError: For weights or a loss that are not finite.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> net = gl.models.LinearAutoencoder(features=4, hidden=2)
        >>> point = gl.saddles.find_critical_point(net, torch.nn.functional.mse_loss, (data, data), progress=False)
        >>> point.found, point.squared_gradient_norm <= 1e-20
        (True, True)

    References:
        Levenberg 1944 (Quart. Appl. Math. 2:164); Marquardt 1963 (SIAM J. 11:431); Fan, Yuan 2005 (Computing 74:23) on
        its convergence; Frye, Simon, Wadia, Ligeralde, DeWeese, Bouchard 2021, *Critical point-finding methods reveal
        gradient-flat regions of deep network losses* (Neural Computation 33:1469, arXiv 2003.10397).
    """
    if not tolerance > 0 or not math.isfinite(tolerance):
        raise UsageError(f"tolerance={tolerance!r}: expected a number above 0")
    import pandas as pd

    if batch is None:
        raise UsageError("the search goes on with a copy of the model: give a batch and a loss of the outputs")
    searched, objective = copy.deepcopy(model).double(), Objective.of(loss, batch).double()
    parameters = trained(searched)
    if (count := sum(parameter.numel() for parameter in parameters)) > LARGEST:
        raise UsageError(f"{count:,} parameters: each step writes the Hessian out, and it has at most {LARGEST:,} rows")
    damping, norm, stuck = 1e-2, 0.0, False  # the norm of H is the largest |λ| met so far
    rows: list[dict[str, float]] = []
    with Progress(total=MOST_STEPS, unit="step", leave=False, disable=not progress) as bar:
        while True:
            H = hessian(searched, lambda: objective(searched))
            weights, size = parameters_to_vector(parameters).detach(), float(H.gradient @ H.gradient)
            linear = _Linearisation.of(H)
            norm = max(norm, float(linear.s.abs().max()))
            share = linear.kernel_share(norm)
            rows.append({"step": len(rows), "loss": H.loss, "squared_gradient_norm": size, "relative_residual": share})
            flat = size > 0 and float((H @ H.gradient).norm()) <= EXACTLY_FLAT * norm * math.sqrt(size)
            if len(rows) > STALLED[0]:
                stuck = size > STALLED[1] * rows[-1 - STALLED[0]]["squared_gradient_norm"]
            if size <= tolerance or stuck or flat or len(rows) > MOST_STEPS:
                break
            for _ in range(60):  # a step that makes the gradient smaller, more damped until one does
                step, promised = linear.step(damping * norm * math.sqrt(size))
                vector_to_parameters(weights + step, parameters)
                gradients = torch.autograd.grad(objective(searched), parameters, materialize_grads=True)
                after = sum(float(gradient.square().sum()) for gradient in gradients)
                gain = (size - after) / max(promised, TINY) if math.isfinite(after) else -math.inf
                if gain < 0.25:
                    damping *= 4
                elif gain > 0.75:
                    damping = max(damping * (1 / 6), 1e-12)
                if gain > 1e-4:
                    break
            else:
                vector_to_parameters(weights, parameters)
                stuck = True
                break
            bar.set_postfix(squared_gradient_norm=f"{size:.1e}", refresh=False)
            bar.update()
    steps, length, kind = len(rows) - 1, linear.newton_length(norm), NOT_CONVERGED
    if size <= tolerance and length <= FAR * (1 + float(weights.norm())):
        kind, message = CRITICAL, f"found in {steps} steps"
    elif size <= tolerance:
        message = f"the gradient fades on a plateau, but a critical point, if there is one, is {length:.1e} away"
    elif norm == 0:
        kind, message = GRADIENT_FLAT, "no critical point: the Hessian is zero, for the loss is linear here, as sums "
        message += "of absolute values and of rectified units are"
    elif flat or share > FLAT:
        kind, message = GRADIENT_FLAT, f"no critical point: {share:.0%} of the gradient lies in the kernel of the "
        message += "Hessian, where no step makes it smaller; start elsewhere"
    elif stuck:
        message = f"after {steps} steps the gradient gets no smaller: nearly flat, or the loss is not smooth here"
    else:
        message = f"{steps} steps were not enough: search again from `model`, or start elsewhere"
    # A copy has weights of their own again, which are no views of one vector.
    return CriticalPoint(copy.deepcopy(searched), H.loss, size, kind, message, pd.DataFrame(rows), objective)


class _Linearisation(NamedTuple):
    """g + H p in the coordinates where H is diagonal: residual c + s y for the step p = W y."""

    s: Tensor
    c: Tensor
    w: Tensor

    @classmethod
    def of(cls, H: Hessian) -> _Linearisation:
        """That of the Hessian at its weights."""
        values, vectors = torch.linalg.eigh(H.dense())
        return cls(values, vectors.T @ H.gradient, vectors)

    def step(self, damping: float) -> tuple[Tensor, float]:
        """The step p, and how much it should take off ‖g‖²."""
        y = -self.s * self.c / (self.s.square() + damping)
        return self.w @ y, float((self.c.square() - (self.c + self.s * y).square()).sum())

    def kernel_share(self, scale: float) -> float:
        """The share of the gradient along which H (almost) vanishes, beside its largest eigenvalue `scale`."""
        lost = self.c[self.s.abs() <= KERNEL * scale].norm()
        return float(lost) / max(float(self.c.norm()), TINY)

    def newton_length(self, scale: float) -> float:
        """The length of the undamped step, along all that is more than rounding."""
        large = self.s.abs() > 1e-12 * scale
        return float((self.c[large] / self.s[large]).norm())
