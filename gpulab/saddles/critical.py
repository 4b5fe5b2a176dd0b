"""Critical points of any loss: where the gradient vanishes, told apart from where it only cannot get smaller.

The gradient g is driven to zero by minimising ‖g‖² with the method of Levenberg and Marquardt: the step p minimises
‖g + H p‖² + μ‖p‖² (H the Hessian), and the damping μ, proportional to ‖g‖, falls where the step did what it promised
and grows where it did not. Unlike Newton's own step it needs no regular H, and it is as fast near the solution even
where critical points are not isolated (Fan, Yuan), as they never are in a network whose units can be rescaled.

‖g‖² has minima of its own, where H g = 0 but g is not: gradient-flat regions (Frye et al.).

Sources: Levenberg 1944 (Quart. Appl. Math. 2:164); Marquardt 1963 (SIAM J. 11:431); Fan, Yuan 2005, *On the quadratic
convergence of the Levenberg-Marquardt method without nonsingularity assumption* (Computing 74:23); Frye, Simon,
Wadia, Ligeralde, DeWeese, Bouchard 2021, *Critical point-finding methods reveal gradient-flat regions of deep network
losses* (Neural Computation 33:1469, arXiv 2003.10397); Roosta, Liu, Xu, Mahoney 2018 (arXiv 1810.00303) on solving
with a Krylov space of H.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from gpulab.errors import UsageError
from gpulab.saddles.hessians import Batch, Hessian, Loss, hessian

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
CRITICAL, GRADIENT_FLAT, NOT_CONVERGED = "critical point", "gradient-flat region", "not converged"


@dataclass(frozen=True, eq=False, repr=False)
class CriticalPoint:
    """Where the search ended: a `critical point`, a `gradient-flat region`, or `not converged` (its `kind`).

    `model` is a copy of the network, in float64, with the weights of that place, and `loss` the loss there.
    `history` has a row per step: `step`, `loss`, `squared_gradient_norm`, and `relative_residual`, the share of the
    gradient that the best undamped step would leave: near 1, the gradient lies in the kernel of the Hessian.
    """

    model: nn.Module
    loss: float
    squared_gradient_norm: float
    kind: str
    message: str
    history: pd.DataFrame
    batch: Batch | None
    loss_function: Loss = field(hash=False)
    source: nn.Module | None = None

    @property
    def found(self) -> bool:
        """Whether it is a critical point."""
        return self.kind == CRITICAL

    def objective(self, model: nn.Module, batch: Batch | None = None) -> Tensor:
        """The loss of a model, on the data of the search or on a batch."""
        chosen = self.batch if batch is None else batch
        if chosen is None:
            raise UsageError("this point was found from a loss without a batch: it cannot be computed for a copy")
        return self.loss_function(model(chosen[0]), chosen[1])

    def hessian(self) -> Hessian:
        """The Hessian there."""
        if self.source is None:
            return hessian(self.model, self.loss_function, self.batch)
        with _restored(self.source):
            _set_weights(self.source, _weights(self.model))
            return hessian(self.source, self.loss_function)

    @functools.cached_property
    def unstable(self) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]:
        """The m negative eigenvalues, the least first, and their eigenvectors, in columns; of the whole Hessian."""
        values, vectors = self._eigen
        negative = values < -(KERNEL**2) * values.abs().max()
        return values[negative], vectors[:, negative]

    @property
    def curvature(self) -> float:
        """The least eigenvalue of the Hessian."""
        return float(self._eigen[0][0])

    @property
    def direction(self) -> Float[Tensor, " n"]:
        """Its eigenvector."""
        return self._eigen[1][:, 0]

    @property
    def steepest(self) -> Float[Tensor, " n"]:
        """The eigenvector of the greatest eigenvalue."""
        return self._eigen[1][:, -1]

    @property
    def eigenvalues(self) -> Float[Tensor, " n"]:
        """All eigenvalues of the Hessian, the least first."""
        return self._eigen[0]

    @functools.cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        size = self.hessian().shape[0]
        if size > SPECTRUM:
            raise UsageError(f"{size:,} parameters: the whole spectrum is computed of at most {SPECTRUM:,}")
        return torch.linalg.eigh(self.hessian().dense())

    def __repr__(self) -> str:
        kind = self.kind[0].upper() + self.kind[1:]
        return f"{kind}: loss {self.loss:.6g}, squared gradient norm {self.squared_gradient_norm:.1e}; {self.message}"


def find_critical_point(
    model: nn.Module,
    loss: Loss,
    batch: Batch | None = None,
    *,
    tolerance: float = 1e-20,
    max_steps: int = 300,
    progress: bool = True,
) -> CriticalPoint:
    """A critical point of `loss(model(inputs), targets)` near the weights of a model: a minimum or a saddle.

    The search, by the method of Levenberg and Marquardt on the gradient, is made in float64 by a copy, and ends
    when the squared norm of the gradient is at most `tolerance`. What it returns says whether that is a critical
    point, or a gradient-flat region, where the gradient cannot get smaller although it is not zero.

    Without a batch, `loss()` is any function of the model, which then must be of float64 itself.

    Sources: Levenberg 1944; Marquardt 1963; Fan, Yuan 2005 (Computing 74:23); Frye et al. 2021 (arXiv 2003.10397).

    >>> import gpulab
    >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
    >>> net = gpulab.LinearAutoencoder(features=4, hidden=2)
    >>> point = find_critical_point(net, torch.nn.functional.mse_loss, (data, data), progress=False)
    >>> point.found, point.squared_gradient_norm <= 1e-20
    (True, True)
    """
    if not tolerance > 0 or not math.isfinite(tolerance):
        raise UsageError(f"tolerance={tolerance!r}: expected a number above 0")
    if not isinstance(max_steps, int) or max_steps < 1:
        raise UsageError(f"max_steps={max_steps!r}: expected a whole number from 1")
    working, data = _in_float64(model, batch)
    with _restored(working), tqdm(total=max_steps, unit="step", leave=False, disable=not progress) as bar:
        search = _Search(working, loss, data)
        while not search.ended(tolerance, max_steps):
            search.advance()
            bar.set_postfix(squared_gradient_norm=f"{search.size:.1e}", refresh=False)
            bar.update()
        return search.outcome(tolerance, None if batch is not None else model)


class _Linearisation(NamedTuple):
    """g + H p in the coordinates where H is diagonal: residual c + s y for the step p = W y."""

    s: Tensor
    c: Tensor
    w: Tensor
    rest: float
    scale: float  # the largest eigenvalue met so far

    def step(self, damping: float) -> tuple[Tensor, float]:
        """The step p, and how much it should take off ‖g‖²."""
        y = -self.s * self.c / (self.s.square() + damping)
        return self.w @ y, float((self.c.square() - (self.c + self.s * y).square()).sum())

    def kernel_share(self) -> float:
        """The share of the gradient along which H (almost) vanishes."""
        small = self.s.abs() <= KERNEL * self.scale
        lost = math.hypot(float(self.c[small].norm()), self.rest)
        return lost / max(math.hypot(float(self.c.norm()), self.rest), 1e-300)

    def newton_length(self) -> float:
        """The length of the undamped step, along all that is more than rounding."""
        large = self.s.abs() > 1e-12 * self.scale
        return float((self.c[large] / self.s[large]).norm())


class _Search:
    """The point, the linearisation there, and the damping."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Batch | None) -> None:
        self.model, self.loss, self.batch = model, loss, batch
        self.damping, self.norm = 1e-2, 0.0
        self.stuck = False
        self.rows: list[dict[str, float]] = []
        self.look()

    def look(self) -> None:
        """Linearise the gradient at the weights that the model has now."""
        operator = hessian(self.model, self.loss, self.batch)
        gradient = operator.gradient
        self.weights = _weights(self.model)
        self.value, self.size = operator.loss, float(gradient @ gradient)
        linear = _written_out(operator) if operator.shape[0] <= WRITTEN_OUT else _krylov(operator)
        self.norm = max(self.norm, linear.scale)
        self.linear = linear._replace(scale=self.norm)
        moved = float((operator @ gradient).norm())
        self.flat = self.size > 0 and moved <= EXACTLY_FLAT * self.norm * math.sqrt(self.size)
        self.rows.append(
            {
                "step": len(self.rows),
                "loss": self.value,
                "squared_gradient_norm": self.size,
                "relative_residual": self.linear.kernel_share(),
            }
        )

    def ended(self, tolerance: float, max_steps: int) -> bool:
        return self.size <= tolerance or self.stuck or self.flat or len(self.rows) > max_steps

    def advance(self) -> None:
        """One step that makes the gradient smaller, more damped until one does."""
        for _ in range(60):
            step, promised = self.linear.step(self.damping * self.norm * math.sqrt(self.size))
            _set_weights(self.model, self.weights + step)
            kept = (self.size - self._size_here()) / max(promised, 1e-300)
            if kept > 1e-4:
                self.damping *= 4 if kept < 0.25 else 1 / 6 if kept > 0.75 else 1
                self.damping = max(self.damping, 1e-12)
                self.look()
                self.stuck = len(self.rows) > STALLED[0] and self.size > STALLED[1] * self._size_before(STALLED[0])
                return
            self.damping *= 4
        _set_weights(self.model, self.weights)
        self.stuck = True

    def _size_before(self, steps: int) -> float:
        return self.rows[-1 - steps]["squared_gradient_norm"]

    def _size_here(self) -> float:
        chosen = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        value = self.loss() if self.batch is None else self.loss(self.model(self.batch[0]), self.batch[1])
        parts = torch.autograd.grad(value, chosen, materialize_grads=True)
        size = sum(float(part.square().sum()) for part in parts)
        return size if math.isfinite(size) else math.inf

    def outcome(self, tolerance: float, source: nn.Module | None) -> CriticalPoint:
        """What the search has come to."""
        import pandas as pd

        kind, message = self._kind(tolerance)
        return CriticalPoint(
            model=copy.deepcopy(self.model),
            loss=self.value,
            squared_gradient_norm=self.size,
            kind=kind,
            message=message,
            history=pd.DataFrame(self.rows),
            batch=self.batch,
            loss_function=self.loss,
            source=source,
        )

    def _kind(self, tolerance: float) -> tuple[str, str]:
        steps = len(self.rows) - 1
        share = self.linear.kernel_share()
        if self.size <= tolerance:
            length = self.linear.newton_length()
            if length > FAR * (1 + float(self.weights.norm())):
                return NOT_CONVERGED, (
                    f"the gradient fades on a plateau, but a critical point, if there is one, is {length:.1e} away"
                )
            return CRITICAL, f"found in {steps} steps"
        if self.norm == 0:
            return GRADIENT_FLAT, (
                "no critical point: the Hessian is zero, for the loss is linear here, as sums of absolute values and "
                "of rectified units are"
            )
        if self.flat or share > FLAT:
            return GRADIENT_FLAT, (
                f"no critical point: {share:.0%} of the gradient lies in the kernel of the Hessian, where no step "
                f"makes it smaller; start elsewhere"
            )
        if self.stuck:
            return (
                NOT_CONVERGED,
                f"after {steps} steps the gradient gets no smaller: nearly flat, or the loss is not smooth here",
            )
        return NOT_CONVERGED, f"{steps} steps were not enough: give more max_steps, or start elsewhere"


def _written_out(operator: Hessian) -> _Linearisation:
    values, vectors = torch.linalg.eigh(operator.dense())
    return _Linearisation(values, vectors.T @ operator.gradient, vectors, 0.0, float(values.abs().max()))


def _krylov(operator: Hessian) -> _Linearisation:
    """In the space spanned by g, H g, H² g, …: Lanczos's method, orthogonalised twice."""
    gradient = operator.gradient
    size = min(KRYLOV, operator.shape[0] - 1)
    basis = gradient.new_zeros(operator.shape[0], size + 1)
    basis[:, 0] = gradient / gradient.norm().clamp(min=1e-300)
    projected = gradient.new_zeros(size + 1, size)
    for column in range(size):
        vector = operator @ basis[:, column]
        before = vector.norm()
        for _ in range(2):
            part = basis[:, : column + 1].T @ vector
            vector = vector - basis[:, : column + 1] @ part
            projected[: column + 1, column] += part
        if vector.norm() <= 1e-14 * before or before == 0:  # the space holds all that H makes of g
            size = column + 1
            break
        projected[column + 1, column] = vector.norm()
        basis[:, column + 1] = vector / vector.norm()
    u, s, vt = torch.linalg.svd(projected[: size + 1, :size], full_matrices=False)
    c = gradient.norm() * u[0]
    rest = float((gradient.norm() ** 2 - c.square().sum()).clamp(min=0).sqrt())
    return _Linearisation(s, c, basis[:, :size] @ vt.T, rest, float(s.max()))


def _in_float64(model: nn.Module, batch: Batch | None) -> tuple[nn.Module, Batch | None]:
    """A copy of the model, and the batch, in float64; or the model itself, where the loss needs it."""
    if batch is not None:
        return copy.deepcopy(model).double(), (_double(batch[0]), _double(batch[1]))
    if wrong := [n for n, p in model.named_parameters() if p.dtype != torch.float64]:
        raise UsageError(f"{wrong[0]} is not of float64: call model.double(), or give a batch and let a copy be made")
    return model, None


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        return type(value)(_double(part) for part in value)
    return value


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Afterwards the model has the weights that it had."""
    before = _weights(model)
    try:
        yield
    finally:
        _set_weights(model, before)


def _weights(model: nn.Module) -> Float[Tensor, " n"]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


@torch.no_grad()
def _set_weights(model: nn.Module, vector: Float[Tensor, " n"]) -> None:
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, piece in zip(chosen, vector.split([p.numel() for p in chosen]), strict=True):
        parameter.copy_(piece.view_as(parameter))
