"""The optimisers that `escape_table` starts at a saddle, and the laws by which they leave it.

Along a direction of curvature −λ, the gradient at a distance x is −λx. With momentum μ, a step of
rate η is x₊ = x + μ (x − x₋) + ηλ x (Polyak's heavy ball), so that x grows by the factor ρ, the
larger root of

    ρ² − (1 + μ + ηλ) ρ + μ = 0,        ρ = 1 + ηλ without momentum.

Adam and RMSprop divide a weight's gradient g by the size of its past gradients, plus ε. Where |g|
is far below ε, this is momentum or gradient descent with the rate η/ε. Where |g| is far above ε, a
weight moves by about η no matter how large the gradient is, and the network moves along the unit
vector v by η‖v‖₁. This law is rough. Steps are longer while gradients grow. With a large η the
steps also excite the other directions, whose gradients then dominate. The median recorded escape of
Adam took 0.9 times the expected steps at η = 1e-5, and 14 times at η = 1e-2.

A step is rounded to zero if it is smaller than half the distance from a weight to the next number
of its format.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim
from torch.nn.utils import parameters_to_vector

from gpulab.errors import UsageError

OptimizerFactory = Callable[..., optim.Optimizer]

# After this number of steps an optimiser has forgotten its start: 0.99 to this power is below 1 %.
SETTLING_STEPS = 500
# `foreach=False` selects the same implementation on all devices.
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": functools.partial(optim.SGD, foreach=False),
    "momentum": functools.partial(optim.SGD, momentum=0.9, foreach=False),
    "rmsprop": functools.partial(optim.RMSprop, foreach=False),
    "adam": functools.partial(optim.Adam, foreach=False),
}
# Options that select an implementation and do not change the formula, and the learning rate.
IMPLEMENTATION_OPTIONS = {
    "lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
}
# Options that change the law in a way that `EscapeLaw` does not model.
UNMODELLED_OPTIONS = ("weight_decay", "dampening", "nesterov", "centered", "amsgrad", "maximize")


def build_optimizer(
    optimizer: str | OptimizerFactory, weights: Sequence[Tensor], rate: float
) -> optim.Optimizer:
    """Build an optimiser of these weights.

    Raises:
        UsageError: If the name is unknown, if the function does not return an optimiser, or if the
            optimiser ignores the learning rate.
    """
    prefix = f"optimizer={optimizer!r}:"
    factory = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if factory is None:
        advice = "or a function such as functools.partial(torch.optim.Adam, eps=1e-4)"
        raise UsageError(f"{prefix} expected {', '.join(OPTIMIZERS)}, {advice}")
    try:
        built = factory(weights, lr=rate)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{prefix} cannot be called with weights and lr={rate:g}: {error}"
        ) from None
    if not isinstance(built, optim.Optimizer) or any(
        group.get("lr") != rate for group in built.param_groups
    ):
        raise UsageError(
            f"{prefix} expected a torch.optim.Optimizer that uses the learning rate it is given,"
            f" {rate:g}"
        )
    return built


def optimizer_name(optimizer: str | OptimizerFactory, built: optim.Optimizer) -> str:
    """Return a name for tables: the given one, or the optimizer's class and unusual options.

    Examples:
        >>> small_steps = functools.partial(torch.optim.Adam, eps=1e-4)
        >>> optimizer_name(small_steps, small_steps([torch.zeros(2)]))
        'adam(eps=0.0001)'
    """
    if isinstance(optimizer, str):
        return optimizer
    parameters = inspect.signature(type(built)).parameters
    unusual = {
        name: value
        for name, value in built.defaults.items()
        if name in parameters
        and name not in IMPLEMENTATION_OPTIONS
        and value != parameters[name].default
    }
    class_name = type(built).__name__.lower()
    if not unusual:
        return class_name
    return f"{class_name}({', '.join(f'{name}={value}' for name, value in unusual.items())})"


@dataclass(frozen=True)
class EscapeLaw:
    """The law by which displacements grow along unstable directions, to first order.

    Attributes:
        rate: The learning rate η; for optimisers that scale their steps, η/ε.
        momentum: The momentum μ.
        max_step: The approximate largest change of a weight in one step; infinite if unlimited.
        saturation_gradient: The gradient of a weight at which its step reaches `max_step`.

    Examples:
        >>> # The larger root of ρ² − 1.95 ρ + 0.9 = 0
        >>> EscapeLaw(rate=0.5, momentum=0.9).growth(torch.tensor([0.1]))
        tensor([1.2000])
    """

    rate: float
    momentum: float = 0.0
    max_step: float = math.inf
    saturation_gradient: float = math.inf

    @classmethod
    def of_optimizer(cls, optimizer: optim.Optimizer) -> EscapeLaw | None:
        """Return the law of an optimiser of torch; None if its options are not modelled.

        >>> weights = [torch.zeros(2, requires_grad=True)]
        >>> EscapeLaw.of_optimizer(optim.Adam(weights, lr=0.25, betas=(0.5, 0.9), eps=0.125))
        EscapeLaw(rate=1.0, momentum=0.5, max_step=0.25, saturation_gradient=0.125)
        >>> EscapeLaw.of_optimizer(optim.RMSprop(weights, lr=0.25, eps=0.125))
        EscapeLaw(rate=2.0, momentum=0.0, max_step=0.25, saturation_gradient=0.125)
        >>> EscapeLaw.of_optimizer(optim.SGD(weights, lr=0.25, momentum=0.5, nesterov=True)) is None
        True
        """
        options = optimizer.param_groups[0]
        has_unmodelled_option = any(options.get(name) for name in UNMODELLED_OPTIONS)
        divides_by_zero = options.get("eps") == 0
        if has_unmodelled_option or divides_by_zero or len(optimizer.param_groups) > 1:
            return None
        rate = float(options["lr"])
        if type(optimizer) is optim.SGD:
            return cls(rate, options["momentum"])
        # Where the gradient is far below ε, RMSprop and Adam divide it by ε. Where it is far above,
        # a weight moves by about the learning rate.
        if type(optimizer) is optim.RMSprop and not options["momentum"]:
            eps = options["eps"]
            return cls(rate / eps, momentum=0.0, max_step=rate, saturation_gradient=eps)
        if type(optimizer) is optim.Adam:
            # Adam's mean of past gradients is a momentum of β₁ with a rate of (1 − β₁) η.
            beta, _ = options["betas"]
            eps = options["eps"]
            effective_rate = rate * (1 - beta) / eps
            return cls(effective_rate, momentum=beta, max_step=rate, saturation_gradient=eps)
        return None

    def growth(self, curvature: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Compute the factor ρ by which a displacement grows in one step, for each λ."""
        return 1 + self.growth_minus_one(curvature)

    def growth_minus_one(self, curvature: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Compute ρ − 1 without subtracting nearly equal numbers.

        With r = ρ − 1, a = ηλ and b = 1 − μ − a, the equation of ρ becomes r² + b r − a = 0. Its
        larger root (√(b² + 4a) − b) / 2 is equal to 2a / (b + √(b² + 4a)).
        """
        a = self.rate * curvature
        if not self.momentum:
            return a
        b = 1 - self.momentum - a
        return 2 * a / (b + (b.square() + 4 * a).sqrt())

    def accumulated_push(self, curvature: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Compute ρ / (ρ − μ), the total effect of a push relative to its effect in the first step.

        Momentum repeats a push in later steps. A step that is pushed by p has, in the long run, the
        same effect as an initial displacement of p / (ρ − μ), instead of p / ρ. For a small ηλ the
        ratio of the two is 1 / (1 − μ).
        """
        growth = self.growth(curvature)
        return growth / (growth - self.momentum)

    def expected_steps(
        self,
        start: Float[Tensor, " m"],
        curvature: Float[Tensor, " m"],
        steepest: Float[Tensor, " n"],
        radius: float,
    ) -> float:
        """Compute the step at which displacements that start at rest reach the radius.

        Args:
            start: The absolute initial displacement along each unstable direction.
            curvature: The λ of each direction, the largest first.
            steepest: The unit vector v of the first direction.
            radius: The Euclidean length that all displacements together must reach.

        Returns:
            The step, not rounded: NaN if `start` has NaN, infinite if nothing is displaced.
        """
        if start.isnan().any():
            return math.nan
        l1_norm = float(steepest.abs().sum())  # ‖v‖₁
        # The displacement x at which the mean gradient of a weight along v, λ x ‖v‖₁ / n, reaches
        # saturation. Below it, displacements grow exponentially. Above it, each weight moves by
        # the largest step, and the network moves along v by this step times ‖v‖₁.
        saturation_radius = (
            self.saturation_gradient * len(steepest) / (float(curvature[0]) * l1_norm)
        )
        growth = self.growth(curvature)
        # The part of the initial displacement that grows by ρ. With momentum there is another part,
        # which decays by the smaller root μ/ρ.
        amplitude = start * (growth - self.momentum) / (growth - self.momentum / growth)
        log_growth = torch.log1p(self.growth_minus_one(curvature))
        exponential_steps = _time_to_radius(amplitude, log_growth, min(saturation_radius, radius))
        linear_distance = max(0.0, radius - max(saturation_radius, float(start.norm())))
        return exponential_steps + linear_distance / (self.max_step * l1_norm)


def _time_to_radius(start: Float[Tensor, " m"], rates: Float[Tensor, " m"], radius: float) -> float:
    """Compute the step at which exponentially growing displacements together reach the radius.

    Args:
        start: The displacement along each direction at step 0.
        rates: By how much the logarithm of each displacement grows per step.
        radius: The Euclidean length that all displacements together must reach.

    Returns:
        The step, not rounded; 0 if the radius is reached at the start, infinite if nothing is
        displaced.
    """
    from scipy.optimize import brentq

    if not (start > 0).any():
        return math.inf
    logs = start.clamp(min=1e-300).log()  # finite also for directions without a displacement

    def excess(step: float) -> float:
        """Return the logarithm of the total displacement after a step, relative to the radius."""
        # The logarithm of a Euclidean length is half the logarithm of the sum of squares.
        log_length = float(torch.logsumexp(2 * (logs + rates * step), 0)) / 2
        return log_length - math.log(radius)

    if excess(0) >= 0:
        return 0.0
    # At this step a single displacement has reached the radius, so all together have. One step more
    # makes the excess positive in spite of rounding, as `brentq` requires.
    upper_bound = float(((math.log(radius) - logs) / rates).min())
    return float(brentq(excess, 0, upper_bound + 1))


def step_ratio(
    optimizer: str | OptimizerFactory,
    rate: float,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> float:
    """Compute the length of the optimiser's step, relative to half the weights' last place.

    The step is the one to which the optimiser settles if the gradient stays the same. It is
    computed in float64 from weights of zero, so that no part of it is lost to rounding. The last
    place is the distance from a weight to the next number of its own format. Both are Euclidean
    lengths over all weights. If the ratio is far below 1, rounding prevents any further change.

    Args:
        optimizer: The optimiser, as for `escape_table`.
        rate: Its learning rate.
        weights: The weights, in their own format.
        gradients: The gradient of each tensor of weights.

    Examples:
        >>> weights = [torch.ones(3)]
        >>> # Half a place of float32's 1 is 2⁻²⁴
        >>> step_ratio("sgd", 1.0, weights, [torch.full((3,), 2.0**-25)])
        0.5
    """
    zeros = [nn.Parameter(torch.zeros_like(weight, dtype=torch.float64)) for weight in weights]
    settling = build_optimizer(optimizer, zeros, rate)
    for zero, gradient in zip(zeros, gradients, strict=True):
        zero.grad = gradient.to(zero)
    for _ in range(SETTLING_STEPS):
        for zero in zeros:
            zero.data.zero_()  # The weights after the last step are then that step alone.
        settling.step()
    step = parameters_to_vector(zeros).detach()
    half_places = parameters_to_vector(map(_half_place, weights))
    return float(step.norm() / half_places.norm())


def _half_place(weights: Tensor) -> Tensor:
    """Compute half the distance from each weight to the next number of its format, in float64.

    For a weight of zero it is taken as zero.
    """
    limits = torch.finfo(weights.dtype)
    # `frexp` gives a significand in [0.5, 1): the leading bit has the exponent − 1, so that half of
    # the last place is eps · 2^(exponent − 2).
    exponent = torch.frexp(weights.detach().double()).exponent
    return (limits.eps * torch.exp2(exponent.double() - 2)).where(weights != 0, 0.0)
