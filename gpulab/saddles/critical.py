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
from torch.utils._pytree import tree_map_only

from gpulab.errors import UsageError, check_count
from gpulab.progress import Progress
from gpulab.saddles.eigen import KrylovSpace
from gpulab.saddles.hessians import Batch, Hessian, Loss, hessian
from gpulab.saddles.operators import trained

if TYPE_CHECKING:
    import pandas as pd

WRITTEN_OUT = 500  # parameters up to which a step uses the whole Hessian, and a Krylov space beyond
SPECTRUM = 5_000  # parameters of which all eigenvalues are computed
KRYLOV = 100  # dimensions of that space
KERNEL = 1e-4  # eigenvalues below this share of the largest are as good as none: a step along them leads nowhere
FLAT = 0.9  # share of the gradient in the kernel from which on a region is called gradient-flat (Frye et al.)
EXACTLY_FLAT = 1e-9  # ‖H g‖ relative to ‖H‖ ‖g‖, where going on is useless
STALLED = 10, 0.99  # so many steps that leave this share of ‖g‖² or more: it does not get smaller any more
FAR = 1e-2  # a Newton step longer than this share of the weights: the critical point is elsewhere
TINY = 1e-300
CRITICAL, GRADIENT_FLAT, NOT_CONVERGED = "critical point", "gradient-flat region", "not converged"


@dataclass(frozen=True, eq=False, repr=False)
class CriticalPoint:
    """Where a search for a critical point ended."""

    model: nn.Module  # a copy of the network, in float64, with the weights of that place
    loss: float
    squared_gradient_norm: float
    kind: str  # `critical point`, `gradient-flat region`, or `not converged`
    message: str  # why, in words
    # A row per step: `step`, `loss`, `squared_gradient_norm`, and `relative_residual`, the share of the gradient that
    # the best undamped step would leave: near 1, the gradient lies in the kernel of the Hessian.
    history: pd.DataFrame
    batch: Batch  # in float64
    loss_function: Loss

    @property
    def found(self) -> bool:
        """Whether it is a critical point."""
        return self.kind == CRITICAL

    def objective(self, model: nn.Module, batch: Batch | None = None) -> Tensor:
        """The loss of a model, on the data of the search or on a batch."""
        inputs, targets = self.batch if batch is None else batch
        return self.loss_function(model(inputs), targets)

    def hessian(self) -> Hessian:
        """The Hessian there."""
        with torch.enable_grad():
            return hessian(self.model, self.loss_function, self.batch)

    @functools.cached_property
    def unstable(self) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]:
        """The m negative eigenvalues, the least first, and their eigenvectors, in columns; of the whole Hessian."""
        values, vectors = self._eigen
        negative = values < -(KERNEL**2) * values.abs().max()
        return values[negative], vectors[:, negative]

    @property
    def eigenvalues(self) -> Float[Tensor, " n"]:
        """All eigenvalues of the Hessian, the least first."""
        return self._eigen[0]

    @property
    def curvature(self) -> float:
        """The least eigenvalue."""
        return float(self.eigenvalues[0])

    @property
    def direction(self) -> Float[Tensor, " n"]:
        """The eigenvector of the least eigenvalue."""
        return self._eigen[1][:, 0]

    @property
    def steepest(self) -> Float[Tensor, " n"]:
        """The eigenvector of the greatest eigenvalue."""
        return self._eigen[1][:, -1]

    @functools.cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        H = self.hessian()
        if H.shape[0] > SPECTRUM:
            raise UsageError(f"{H.shape[0]:,} parameters: the whole spectrum is computed of at most {SPECTRUM:,}")
        return torch.linalg.eigh(H.dense())

    def __repr__(self) -> str:
        numbers = f"loss {self.loss:.6g}, squared gradient norm {self.squared_gradient_norm:.1e}"
        return f"{self.kind.capitalize()}: {numbers}; {self.message}"


def find_critical_point(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    tolerance: float = 1e-20,
    max_steps: int = 300,
    progress: bool = True,
) -> CriticalPoint:
    """A critical point near the weights of a model: a minimum or a saddle.

    The search, by the method of Levenberg and Marquardt on the gradient, is made in float64 by a copy. It may end in a
    gradient-flat region, where the gradient cannot get smaller although it is not zero: the result says so.

    Args:
        model: Where to begin; it is left alone.
        loss: `loss(model(inputs), targets)`.
        batch: Inputs and targets.
        tolerance: The squared norm of the gradient at which to stop.
        max_steps: How many steps to make at most.
        progress: Whether to show a progress bar.

    Raises:
        UsageError: For options that cannot be, and as `gpulab.hessian` does.
        DataError: For weights or a loss that are not finite.

    Examples:
        >>> import gpulab
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> net = gpulab.models.LinearAutoencoder(features=4, hidden=2)
        >>> point = find_critical_point(net, torch.nn.functional.mse_loss, (data, data), progress=False)
        >>> point.found, point.squared_gradient_norm <= 1e-20
        (True, True)

    References:
        Levenberg 1944 (Quart. Appl. Math. 2:164); Marquardt 1963 (SIAM J. 11:431); Fan, Yuan 2005 (Computing 74:23) on
        its convergence; Frye, Simon, Wadia, Ligeralde, DeWeese, Bouchard 2021, *Critical point-finding methods reveal
        gradient-flat regions of deep network losses* (Neural Computation 33:1469, arXiv 2003.10397); Roosta, Liu, Xu,
        Mahoney 2018 (arXiv 1810.00303) on solving with a Krylov space of H.
    """
    if not tolerance > 0 or not math.isfinite(tolerance):
        raise UsageError(f"tolerance={tolerance!r}: expected a number above 0")
    check_count("max_steps", max_steps)
    import pandas as pd

    searched = copy.deepcopy(model).double()
    batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
    parameters = trained(searched)
    damping, norm, stuck = 1e-2, 0.0, False  # the norm of H: the largest |λ| met so far
    rows: list[dict[str, float]] = []
    with Progress(total=max_steps, unit="step", leave=False, disable=not progress) as bar:
        while True:
            H = hessian(searched, loss, batch)
            weights, size = parameters_to_vector(parameters).detach(), float(H.gradient @ H.gradient)
            linear = _linearise(H)
            norm = max(norm, float(linear.s.abs().max()))
            share = linear.kernel_share(norm)
            rows.append({"step": len(rows), "loss": H.loss, "squared_gradient_norm": size, "relative_residual": share})
            flat = size > 0 and float((H @ H.gradient).norm()) <= EXACTLY_FLAT * norm * math.sqrt(size)
            if len(rows) > STALLED[0]:
                stuck = size > STALLED[1] * rows[-1 - STALLED[0]]["squared_gradient_norm"]
            if size <= tolerance or stuck or flat or len(rows) > max_steps:
                break
            for _ in range(60):  # a step that makes the gradient smaller, more damped until one does
                step, promised = linear.step(damping * norm * math.sqrt(size))
                vector_to_parameters(weights + step, parameters)
                value = loss(searched(batch[0]), batch[1])
                gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
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
        message = f"{steps} steps were not enough: give more max_steps, or start elsewhere"
    # A copy has weights of their own again, which are no views of one vector.
    return CriticalPoint(copy.deepcopy(searched), H.loss, size, kind, message, pd.DataFrame(rows), batch, loss)


class _Linearisation(NamedTuple):
    """g + H p in the coordinates where H is diagonal: residual c + s y for the step p = W y."""

    s: Tensor
    c: Tensor
    w: Tensor
    rest: float = 0.0  # how much of g is in none of these coordinates

    def step(self, damping: float) -> tuple[Tensor, float]:
        """The step p, and how much it should take off ‖g‖²."""
        y = -self.s * self.c / (self.s.square() + damping)
        return self.w @ y, float((self.c.square() - (self.c + self.s * y).square()).sum())

    def kernel_share(self, scale: float) -> float:
        """The share of the gradient along which H (almost) vanishes, beside its largest eigenvalue `scale`."""
        lost = self.c[self.s.abs() <= KERNEL * scale].norm()
        return math.hypot(float(lost), self.rest) / max(math.hypot(float(self.c.norm()), self.rest), TINY)

    def newton_length(self, scale: float) -> float:
        """The length of the undamped step, along all that is more than rounding."""
        large = self.s.abs() > 1e-12 * scale
        return float((self.c[large] / self.s[large]).norm())


def _linearise(H: Hessian) -> _Linearisation:
    """Of the whole Hessian; where that is too large, in the space spanned by g, H g, H² g, …"""
    if H.shape[0] <= WRITTEN_OUT:
        values, vectors = torch.linalg.eigh(H.dense())
        return _Linearisation(values, vectors.T @ H.gradient, vectors)
    length = H.gradient.norm()
    space = KrylovSpace(H, H.gradient[None] / length.clamp(min=TINY), min(KRYLOV, H.shape[0] - 1))
    for _ in range(len(space.storage)):
        space.grow()
        if space.coupling == 0:  # the space holds all that H makes of g
            break
    outside = torch.zeros(1, space.size, dtype=torch.float64)
    outside[0, -1] = space.coupling
    u, s, vt = torch.linalg.svd(torch.cat([space.projected, outside]).to(H.gradient), full_matrices=False)
    c = length * u[0]
    rest = float((length**2 - c.square().sum()).clamp(min=0).sqrt())
    return _Linearisation(s, c, (vt @ space.basis).T, rest)
