"""Escapes from a saddle: how long an optimiser stays if only rounding errors push it away.

Along an eigenvector of the Hessian with the eigenvalue −λ, a step of size η multiplies the distance
from the saddle by 1 + ηλ. An initial displacement δ therefore reaches a radius r after
ln(r/δ) / ln(1 + ηλ) steps, which is nearly ln(r/δ) / (ηλ). An arithmetic error ε in the gradient,
made at every step, has the same effect as the displacement δ = ε/λ. But rounding can also hold a
network at a saddle: a weight does not change if its step is smaller than half the distance to the
next number of its format. The optimiser determines the steps (`gpulab.saddles._optimizers`).

`Weights` holds the weights, `Descent` trains them, `escape` trains until they have left the saddle,
and `escape_table` repeats this for several settings.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from gpulab.errors import DataError, UsageError, check_count
from gpulab.passports import machine, passport
from gpulab.report import Progress, Report
from gpulab.saddles._critical import CriticalPoint
from gpulab.saddles._optimizers import (
    SETTLING_STEPS,
    EscapeLaw,
    OptimizerFactory,
    build_optimizer,
    optimizer_name,
    step_ratio,
)
from gpulab.saddles._theory import LinearAutoencoderSaddle
from gpulab.settings import Setting
from gpulab.steps import trainable_parameters
from gpulab.store.recorded import read_tables, recorded_folder

if TYPE_CHECKING:
    import pandas as pd

InputsTargets = tuple[Tensor, Tensor]

RADIUS = 0.1  # a network has left if its distance along the unstable directions exceeds this
# Steps without a change after which gradient descent counts as stalled: it will never move again.
# For optimisers with a memory this number is SETTLING_STEPS.
HELD_STEPS = 10
# The default limit of the number of steps is this multiple of the expected steps, plus a constant.
EXPECTED_STEPS_FACTOR = 3
MAX_STEPS = 100_000
# The default learning rate η gives this η λ, unless the steepest upward direction requires less.
DEFAULT_GROWTH = 0.05
# The default learning rate of optimisers that scale their steps: torch's default for Adam.
DEFAULT_ADAPTIVE_RATE = 1e-3
# Sums over batches end where the weight of a batch falls below this.
MIN_BATCH_WEIGHT = 1e-4
# The current names of columns, by the names under which recorded tables store them.
FORMER_COLUMNS = {
    "expected": "expected_steps",
    "held": "stalled",
    "left": "escaped",
    "moved": "changed_share",
}
# The columns that together identify an escape in a table.
KEY_COLUMNS = (
    "setting",
    "optimizer",
    "master_weights",
    "learning_rate",
    "perturbation",
    "batch_size",
    "seed",
)


# --- a training run from a saddle -----------------------------------------------------------------


class Weights:
    """A network's weights in a setting's format, and the weights that an optimiser updates.

    By default these are the same tensors. With `masters`, the optimiser updates copies in float64,
    and the network uses these copies rounded to its own format.
    """

    def __init__(self, model: nn.Module, setting: Setting, masters: bool = False) -> None:
        self.setting = setting
        self.net = copy.deepcopy(model).to(setting.device, setting.dtype)
        self.parameters = trainable_parameters(self.net)
        # Apple GPUs have no float64.
        self.float64_device = "cpu" if setting.kind == "mps" else setting.device
        self.trainable = self.parameters
        if masters:
            self.trainable = [
                nn.Parameter(p.detach().to(self.float64_device, torch.float64))
                for p in self.parameters
            ]

    def flat(self, tensors: Iterable[Tensor] | None = None) -> Float[Tensor, " n"]:
        """Join tensors into a vector in float64; by default the weights the optimiser updates."""
        tensors = self.trainable if tensors is None else tensors
        return (
            torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            .to(self.float64_device)
            .double()
        )

    @torch.no_grad()
    def set_weights(self, vector: Float[Tensor, " n"]) -> None:
        """Set the network's weights to the entries of a vector, rounded to the weights' format."""
        # The weights keep their memory instead of becoming views of the vector, because a library
        # may choose the kernel of a product by the address of its factors.
        for weight, piece in zip(
            self.trainable, vector.split([w.numel() for w in self.trainable]), strict=True
        ):
            weight.copy_(piece.view_as(weight))
        self._round_masters()

    @torch.no_grad()
    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor]) -> float:
        """Make a step of the optimiser, and return the share of the weights that it changed."""
        previous_weights = [weight.clone() for weight in self.trainable]
        for weight, gradient in zip(self.trainable, gradients, strict=True):
            weight.grad = gradient.to(weight)
        optimizer.step()
        self._round_masters()
        changed = [
            (weight != old).sum()
            for weight, old in zip(self.trainable, previous_weights, strict=True)
        ]
        return int(torch.stack(changed).sum()) / sum(weight.numel() for weight in self.trainable)

    def _round_masters(self) -> None:
        """Copy the master weights, if there are any, into the network, which rounds them."""
        if self.trainable is not self.parameters:
            for parameter, weight in zip(self.parameters, self.trainable, strict=True):
                parameter.copy_(weight)


def choose_optimizer(
    saddle: CriticalPoint, weights: Weights, optimizer: str | OptimizerFactory, rate: float | None
) -> Optimizer:
    """Build an optimiser, with a default learning rate if `rate` is None.

    For gradient descent, the default gives a growth of `DEFAULT_GROWTH` along the steepest unstable
    direction, or less if the steepest upward direction would diverge. For other optimisers it is
    `DEFAULT_ADAPTIVE_RATE`.
    """
    if rate is not None and not 0 < rate < math.inf:
        raise UsageError(f"learning rate {rate!r}: expected a number above 0")
    # The default rate depends on the class of the optimiser, which is known only once it is built.
    # Until then the rate is 1.
    built = build_optimizer(optimizer, weights.trainable, 1.0 if rate is None else rate)
    if rate is None:
        default_rate = DEFAULT_ADAPTIVE_RATE
        if optimizer_name(optimizer, built).startswith(("sgd", "momentum")):
            # Along the steepest upward direction, gradient descent would diverge above 2 / λ.
            max_rate = 1 / float(saddle.eigenvalues[-1])
            default_rate = min(DEFAULT_GROWTH / -saddle.curvature, max_rate)
        for group in built.param_groups:
            group["lr"] = default_rate
    return built


class Descent:
    """A training run that starts at a saddle, in the active arithmetic.

    Args:
        saddle: The saddle.
        weights: The weights to train.
        optimizer: The optimiser of these weights.
        size: The number of samples in a batch; None for all samples.
        seed: The seed of the order of the samples.

    Attributes:
        law: The law by which the optimiser leaves the saddle; None if no law is known for it.
        changed_shares: The share of the weights that each step changed.
    """

    def __init__(
        self,
        saddle: CriticalPoint,
        weights: Weights,
        optimizer: Optimizer,
        size: int | None = None,
        seed: int = 0,
    ) -> None:
        self.objective = saddle.objective
        self.weights = weights
        self.batch_size = size
        self.seed = seed
        self.optimizer = optimizer
        self.law = EscapeLaw.of_optimizer(optimizer)
        self.rate = float(optimizer.param_groups[0]["lr"])
        device = weights.setting.device
        dtype = weights.setting.dtype
        (pair,) = saddle.objective.batches  # `check_start` has checked that there is only one
        inputs, targets = (
            tensor.to(device, dtype if tensor.is_floating_point() else None) for tensor in pair
        )
        self.data = inputs, targets
        self.saddle = weights.flat(trainable_parameters(saddle.model))  # its weights, as a vector
        eigenvalues, eigenvectors = saddle.unstable
        self.unstable_values = eigenvalues.to(weights.float64_device)
        self.unstable_directions = eigenvectors.to(weights.float64_device)
        self.changed_shares: list[float] = []

    def batches(self) -> Iterator[InputsTargets]:
        """Yield batches indefinitely: inputs and targets in an order drawn from the seed.

        Minibatches are reshuffled for each pass over the data. Without a batch size, every batch
        consists of all samples, always in the same order.
        """
        inputs, targets = self.data
        count = len(inputs)
        size = self.batch_size
        for epoch in itertools.count():
            # The large factor gives each pair of seed and epoch its own number.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator).to(inputs.device)
            if size is None:
                yield from itertools.repeat((inputs[order], targets[order]))
            else:
                # An incomplete last batch is dropped, because it would be noisier than the others.
                for indices in order[: count - count % size].split(size):
                    yield inputs[indices], targets[indices]

    def gradient(self, batch: InputsTargets) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the loss of a batch and its gradients."""
        batch_objective = dataclasses.replace(self.objective, batches=(batch,))
        loss = batch_objective(self.weights.net)
        return loss.detach(), torch.autograd.grad(loss, self.weights.parameters)

    def iterate(self) -> Iterator[tuple[Tensor, Float[Tensor, " n"]]]:
        """Yield the loss and the displacement from the saddle before each of infinitely many steps.

        After each step, the share of the weights that it changed is appended to `changed_shares`.
        """
        for batch in self.batches():
            loss, gradients = self.gradient(batch)
            yield loss, self.weights.flat() - self.saddle
            self.changed_shares.append(self.weights.step(self.optimizer, gradients))

    def project_unstable(self, vector: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
        """Compute the components of a vector along the unstable directions."""
        return (self.unstable_directions * vector[:, None]).sum(0)

    def equivalent_displacement(self) -> Float[Tensor, " m"]:
        """Compute the unstable displacement that has the same effect as errors at the saddle.

        The errors are the rounding of the weights, errors in the gradients, and the noise of
        minibatches. A step moves the weights by −η g, and this movement grows by the factor ρⁿ in n
        further steps. The errors of the first batches therefore count most. With all samples in
        each batch, all batches have the same error ε, and their effects add up to −ε/λ, where −λ is
        the eigenvalue.

        Returns:
            The displacement along each unstable direction, (m,). NaN for minibatches with an
            optimiser for which this law does not hold.
        """
        grows_exponentially = self.law is not None and not math.isfinite(self.law.max_step)
        if self.batch_size is not None and not grows_exponentially:
            return torch.full_like(self.unstable_values, math.nan).cpu()
        self.weights.set_weights(self.saddle)
        rounding = self.project_unstable(self.weights.flat() - self.saddle)
        errors = (self._gradient_error(batch, rounding) for batch in self.batches())
        if self.batch_size is None:  # One batch is enough, because all are the same.
            return (rounding + next(errors) / self.unstable_values).cpu()
        return (rounding + self._displacement_by(errors)).cpu()

    def _gradient_error(
        self, batch: InputsTargets, rounding: Float[Tensor, " m"]
    ) -> Float[Tensor, " m"]:
        """Compute the error of a batch's gradient along the unstable directions.

        At rounded weights, even the exact gradient is not zero: it is −λ times their displacement
        `rounding`. Only the rest is an error.
        """
        _, gradients = self.gradient(batch)
        gradient = self.project_unstable(self.weights.flat(gradients))
        return gradient - self.unstable_values * rounding

    def _displacement_by(self, errors: Iterable[Float[Tensor, " m"]]) -> Float[Tensor, " m"]:
        """Compute the displacement that has the same effect as different errors in each step.

        A later error counts less: its effect has fewer steps in which to grow by ρ.
        """
        assert self.law is not None, "`equivalent_displacement` has checked that there is a law"
        curvatures = -self.unstable_values
        growth = self.law.growth(curvatures)
        accumulated_push = self.law.accumulated_push(curvatures)
        displacement = torch.zeros_like(self.unstable_values)
        for step, error in enumerate(errors, start=1):
            weight = accumulated_push * growth**-step
            displacement -= self.rate * error * weight
            if float(weight.max()) < MIN_BATCH_WEIGHT:
                break
        return displacement


# --- when it has left -----------------------------------------------------------------------------


class _Waiting(NamedTuple):
    """How many steps to wait for an optimiser. Those with a memory need time to settle first.

    Attributes:
        patience: The number of steps without a change after which rounding holds the network.
        extra_steps: The constant in the default limit of the number of steps.
        tolerated_steps: The number of steps beyond twice the expected number after which a run
            counts as stalled.
    """

    patience: int
    extra_steps: int
    tolerated_steps: int


SGD_WAITING = _Waiting(patience=HELD_STEPS, extra_steps=100, tolerated_steps=0)
SETTLING_WAITING = _Waiting(
    patience=SETTLING_STEPS, extra_steps=2 * SETTLING_STEPS, tolerated_steps=SETTLING_STEPS
)


def escape(
    descent: Descent, optimizer: str | OptimizerFactory, perturbation: float, steps: int | None
) -> tuple[dict[str, str | float], pd.DataFrame]:
    """Train until the network has left the saddle: see `EscapeTable` for what is measured.

    The training ends after at most `steps` steps, by default three times the expected number plus a
    constant. Without minibatches it ends earlier if no weight has changed in the last 10 steps of
    `sgd`, or in the last 500 steps of another optimiser.

    Returns:
        A row of the table of an `EscapeTable`, and the path, a data frame with a row for the start
        and one after each step.

    Raises:
        DataError: If weights or a loss become infinite or NaN.
    """
    name = optimizer_name(optimizer, descent.optimizer)
    waiting = SGD_WAITING if name == "sgd" else SETTLING_WAITING
    noise = descent.equivalent_displacement()
    steepest = descent.unstable_directions[:, 0]
    initial_weights = descent.saddle + perturbation * steepest
    # The displacement along each unstable direction at the start.
    start = noise + descent.project_unstable(initial_weights - descent.saddle).cpu()
    curvatures = -descent.unstable_values.cpu()
    law = descent.law
    expected_steps = math.nan
    expected_rate = math.nan
    if law is not None:
        expected_steps = law.expected_steps(start.abs(), curvatures, steepest.cpu(), RADIUS)
        # Optimisers that limit their steps have no constant rate of growth.
        if not math.isfinite(law.max_step):
            expected_rate = math.log1p(float(law.growth_minus_one(curvatures[:1])))
    # Measuring the noise has set the weights to those of the saddle.
    descent.weights.set_weights(initial_weights)
    _, gradients = descent.gradient(next(descent.batches()))
    ratio = step_ratio(optimizer, descent.rate, descent.weights.trainable, gradients)
    max_steps = _default_steps(expected_steps, waiting) if steps is None else steps
    history, has_left = _train_until_left(descent, waiting.patience, max_steps)
    step_count = len(history) - 1  # The first row is the start.
    # Whether the distance was the same in all of the last steps.
    last_distances = history.distance.tail(waiting.patience)
    is_still = len(last_distances) == waiting.patience and last_distances.nunique() == 1
    is_late = len(history) > 2 * expected_steps + waiting.tolerated_steps
    return {
        "optimizer": name,
        "learning_rate": descent.rate,
        "perturbation": perturbation,
        "curvature": -float(curvatures[0]),
        "noise": float(noise.norm()),
        "start": float(start.norm()),
        "expected_steps": expected_steps,
        "expected_rate": expected_rate,
        "steps": step_count if has_left else math.nan,
        "escaped": has_left,
        "stalled": not has_left and (is_still or is_late),
        "changed_share": descent.changed_shares[0] if descent.changed_shares else math.nan,
        "step_ratio": ratio,
    }, history


def _default_steps(expected_steps: float, waiting: _Waiting) -> int:
    """Return the default limit of the number of steps; `expected_steps` is NaN without a theory."""
    if math.isnan(expected_steps):
        return MAX_STEPS
    limit = EXPECTED_STEPS_FACTOR * expected_steps + waiting.extra_steps
    return math.ceil(min(limit, MAX_STEPS))


def _train_until_left(descent: Descent, patience: int, max_steps: int) -> tuple[pd.DataFrame, bool]:
    """Train from the present weights until the network has left the saddle.

    The training ends after at most `max_steps` steps. Without minibatches it ends earlier if no
    weight has changed in the last `patience` steps.

    Returns:
        The path, a data frame with a row for the start and one after each step; and whether the
        network has left.

    Raises:
        DataError: If weights or a loss become infinite or NaN.
    """
    import pandas as pd

    rows: list[list[float]] = []
    has_left = False
    for loss, displacement in descent.iterate():
        # With the same data in each step, weights that have not changed for this long never will.
        if descent.batch_size is None and descent.changed_shares[-patience:] == [0.0] * patience:
            break
        unstable = descent.project_unstable(displacement)
        # One tensor, so that the numbers are copied from the device together.
        row = torch.stack(
            [
                displacement.norm(),
                unstable.norm(),
                unstable[0].abs(),
                loss.double().to(displacement.device),
            ]
        ).tolist()
        rows.append(row)
        if not all(map(math.isfinite, row)):
            raise DataError(
                f"step {len(rows) - 1}: weights are not finite; learning_rate={descent.rate:g}"
            )
        _, unstable_distance, _, _ = row
        has_left = unstable_distance > RADIUS
        if has_left or len(rows) > max_steps:
            break
    path = pd.DataFrame(rows, columns=["distance", "unstable", "along", "loss"])
    return path.rename_axis("step").reset_index(), has_left


@dataclass(frozen=True, eq=False, repr=False)
class EscapeTable(Report):
    """Escapes from one saddle under several settings, as returned by `escape_table`.

    It can be printed and drawn (`plot`). Escapes that another machine recorded can be appended to
    both frames. The unstable directions of a saddle are those along which the loss curves down: the
    eigenvectors of the Hessian's negative eigenvalues −λ. Distances are Euclidean distances between
    the vectors of all weights, in float64.

    Attributes:
        table: A data frame with a row for each escape.

            - What was run: `setting`; `optimizer`, its name; `master_weights`; `learning_rate`,
              the η of a step; `batch_size`, the number of samples in a step, 0 for all samples;
              `seed`; `perturbation`, how far the weights were first moved along the steepest
              unstable direction; `emulated`, whether the setting emulates another chip; `recorded`
              (False); `machine`.
            - `curvature`, the smallest eigenvalue of the Hessian at the saddle, and `radius`, the
              distance along the unstable directions beyond which a network has left.
            - `noise`, the displacement along the unstable directions that has the same effect as
              errors in the gradients, the rounding of the weights, and the noise of minibatches. It
              is measured at the saddle before any step. With minibatches it is known only for
              gradient descent, with or without momentum, and is NaN for other optimisers.
            - `start`, the displacement along the unstable directions at the start: the noise and
              the perturbation.
            - `expected_steps`, the step at which theory expects the network to leave. Infinite if
              nothing displaces the network. NaN if `start` is NaN, and if there is no theory: for
              optimisers other than SGD, momentum, RMSprop and Adam, and for some of their options,
              such as weight decay.
            - `expected_rate`, how much the logarithm of the distance grows per step along the
              steepest direction: ln(1 + ηλ), or ln ρ with momentum, where ρ is the larger root of
              ρ² − (1 + μ + ηλ) ρ + μ = 0. NaN for optimisers that scale their steps, such as Adam.
            - `escaped`, whether the network left, and `steps`, the first step at which the unstable
              part of its displacement is longer than the radius; NaN if there is no such step.
              Other directions do not count: minibatches may move the weights as far along them, but
              the weights come back.
            - `stalled`, whether rounding held the network at the saddle: it did not leave, and
              either the weights did not change in the last steps (10 for `sgd`, 500 for others), or
              more than twice the expected steps were made (plus 500, except for `sgd`).
            - `changed_share`, the share of the weights that the first step changed.
            - `step_ratio`, the length of the step to which the optimiser settles at the saddle,
              divided by half the distance from the weights to the adjacent numbers in their
              format. Below 1, rounding keeps most weights from changing.
        paths: A data frame of all training runs, concatenated, with a row for the start and for
            each step: `step`; the `distance` of the weights from the saddle; its parts along all
            unstable directions (`unstable`) and along the steepest one (`along`); the `loss`; and
            the columns that identify a training run: `setting`, `optimizer`, `master_weights`,
            `learning_rate`, `perturbation`, `batch_size`, `seed`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(
        ...     torch.diag(torch.tensor([3.0, 2.0, 1.0])), [1]
        ... )
        >>> print(
        ...     gl.saddles.escape_table(saddle, ["cpu"], perturbations=[1e-3, 1e-4], progress=False)
        ... )
        2 training runs from a saddle: 2 left it, 0 stalled there
    """

    table: pd.DataFrame
    paths: pd.DataFrame

    def slope(self) -> tuple[float, float, float]:
        """Fit the ratio of observed to expected steps over the escapes by `sgd` that left.

        The expected steps are those of the steepest unstable direction alone, to first order:
        ln(radius / start) / (ηλ). Escapes that start beyond the radius are left out, because the
        law would give them a negative number of steps.

        Returns:
            The slope by least squares, and the lower and the upper end of its 95 % interval.

        Raises:
            DataError: If there are fewer than three different escapes.
        """
        from scipy import stats

        escaped = self.table[
            self.table.escaped
            & (self.table.optimizer == "sgd")
            & (self.table.start < self.table.radius)
        ]
        law = np.log(escaped.radius / escaped.start) / (escaped.learning_rate * -escaped.curvature)
        if law.nunique() < 3:
            raise DataError(f"{law.nunique()} different escapes: fitting a slope needs at least 3")
        fit = stats.linregress(law, escaped.steps)
        half_width = stats.t.ppf(0.975, len(escaped) - 2) * fit.stderr
        return float(fit.slope), float(fit.slope - half_width), float(fit.slope + half_width)

    def __str__(self) -> str:
        left_count = int(self.table.escaped.sum())
        held_count = int(self.table.stalled.sum())
        return (
            f"{len(self.table)} training runs from a saddle: {left_count} left it, {held_count}"
            " stalled there"
        )


def escape_table(
    saddle: CriticalPoint,
    settings: Sequence[str | Setting] = ("cpu:precision=float64", "cpu"),
    *,
    optimizers: Sequence[str | OptimizerFactory]
    | Mapping[str | OptimizerFactory, Sequence[float | None]] = ("sgd",),
    perturbations: Sequence[float] = (0.0,),
    batch_sizes: Sequence[int | None] = (None,),
    seeds: int | Sequence[int] = 1,
    steps: int | None = None,
    master_weights: bool = False,
    progress: bool = True,
) -> EscapeTable:
    """Train from a saddle until the network leaves it, for each combination of the arguments.

    At a saddle the gradient is zero. Only a perturbation, arithmetic errors and the noise of
    minibatches move the network away. The result contains the step at which each network left the
    saddle, and the step that theory predicts.

    Args:
        saddle: From `gpulab.saddles.linear_autoencoder_saddle` or
            `gpulab.saddles.find_critical_point`.
        settings: One or more settings, such as `cpu:precision=bfloat16`.
        optimizers: One or more of `sgd` (gradient descent), `momentum` (0.9), `rmsprop` and `adam`,
            with torch's constants, or functions of weights and `lr=` that return a
            `torch.optim.Optimizer`. A mapping gives each optimiser its own learning rates, such as
            `{"sgd": [None], "adam": [1e-4, 1e-3]}`. None means the default learning rate: for `sgd`
            and `momentum` the one with ηλ = 0.05 along the steepest unstable direction, or less if
            that would diverge; for optimisers that scale their steps, 1e-3.
        perturbations: One or more distances by which the model is first moved along the steepest
            unstable direction.
        batch_sizes: One or more numbers of samples in a step; None means all samples.
        seeds: The seeds, or their number. The order of the data depends on the seed. The hidden
            units of a linear autoencoder are also mixed by the seed: the saddle is the same, but
            the weights and their rounding errors differ.
        steps: The largest number of steps. By default three times the expected number, plus 100
            (1,000 for optimisers other than `sgd`), but at most 100,000; 100,000 if there is no
            theory. Without minibatches a training run ends earlier if no weight has changed in the
            last 10 steps of `sgd`, or in the last 500 steps of another optimiser.
        master_weights: Whether the optimiser updates weights in float64, and gradients are computed
            from a copy that is rounded to the setting's format, as in mixed precision.
        progress: Whether to show a progress bar.

    Returns:
        A `gpulab.saddles.EscapeTable`.

    Raises:
        UsageError: If a list is empty; if the loss does not curve down in any direction; if the
            saddle is not a critical point, or its data are not a pair of tensors; if an optimiser
            is unknown or ignores the given learning rate; or if numbers are out of range.
        DataError: If weights or a loss become infinite or NaN.
        GpulabError: If a setting cannot run on this machine.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> saddle = gl.saddles.linear_autoencoder_saddle(data, [1])
        >>> float64 = ["cpu:precision=float64"]
        >>> escapes = gl.saddles.escape_table(
        ...     saddle, float64, perturbations=[1e-3, 1e-6, 1e-9], progress=False
        ... )
        >>> 0.95 < escapes.slope()[0] < 1.05
        True

    References:
        Lee, Simchowitz, Jordan, Recht 2016, *Gradient descent only converges to minimizers* (COLT);
        Jin, Ge, Netrapalli, Kakade, Jordan 2017, *How to escape saddle points efficiently* (ICML,
        arXiv 1703.00887); Staib, Reddi, Kale, Kumar, Sra 2019, *Escaping saddle points with
        adaptive gradient methods* (ICML, arXiv 1901.09149); Antonakopoulos, Mertikopoulos,
        Piliouras, Wang 2022, *AdaGrad avoids saddle points* (ICML); on updates that are rounded
        to zero: Zamirai, Zhang, Aberger, De Sa 2020, *Revisiting BFloat16 training* (arXiv
        2010.06192).
    """
    import pandas as pd

    check_start(saddle, perturbations, batch_sizes, steps)
    machine_passport = passport()
    seed_values = range(seeds) if isinstance(seeds, int) else seeds
    rates = optimizers if isinstance(optimizers, Mapping) else dict.fromkeys(optimizers, (None,))
    optimizers_and_rates = [
        (optimizer, rate)
        for optimizer, optimizer_rates in rates.items()
        for rate in optimizer_rates
    ]
    # The seed also mixes the hidden units of a linear autoencoder. Other saddles stay as they are.
    mix_units = saddle.mixed if isinstance(saddle, LinearAutoencoderSaddle) else lambda _: saddle
    starts = [(seed, mix_units(seed)) for seed in seed_values]
    parsed = [Setting.parse(setting) for setting in settings]
    combinations = list(
        itertools.product(starts, parsed, optimizers_and_rates, perturbations, batch_sizes)
    )
    if not combinations:
        raise UsageError(
            "expected at least one value for each of settings, optimizers, perturbations,"
            " batch_sizes and seeds"
        )
    rows = []
    paths = []
    with Progress(combinations, unit="escape", leave=False, disable=not progress) as bar:
        for (seed, start), setting, (optimizer, rate), perturbation, size in bar:
            bar.set_postfix_str(str(setting))
            with setting.apply():
                weights = Weights(start.model, setting, masters=master_weights)
                built = choose_optimizer(start, weights, optimizer, rate)
                descent = Descent(start, weights, built, size=size, seed=seed)
                result, history = escape(descent, optimizer, perturbation, steps)
            row = {
                "setting": str(setting),
                "master_weights": master_weights,
                "batch_size": size or 0,  # 0 means all samples
                "seed": seed,
                "emulated": setting.emulated,
                "machine": machine(machine_passport, setting.kind),
                **result,
            }
            rows.append(row)
            paths.append(history.assign(**{key: row[key] for key in KEY_COLUMNS}))
    table = pd.DataFrame(rows).assign(radius=RADIUS, recorded=False)
    return EscapeTable(table, pd.concat(paths, ignore_index=True))


def check_start(
    saddle: CriticalPoint,
    perturbations: Sequence[float],
    batch_sizes: Sequence[int | None],
    steps: int | None,
) -> None:
    """Raise `UsageError` for a point that cannot be left, and for numbers out of range.

    Args:
        saddle: The point, which must be a critical point with a direction that leads down, and
            whose data must be one pair of tensors.
        perturbations: Distances, finite and not negative.
        batch_sizes: Numbers of samples, at most all of them; None means all.
        steps: The largest number of steps; None means the default.
    """
    if saddle.index == 0:
        least = saddle.curvature
        raise UsageError(
            f"no direction leads down: the smallest curvature is {least:.3g}, so there is no escape"
        )
    if not saddle.found:
        raise UsageError(f"this is not a critical point: {saddle.message}")
    batch, *further_batches = saddle.objective.batches
    if (
        further_batches
        or not isinstance(batch, list | tuple)
        or not all(isinstance(item, Tensor) for item in batch)
    ):
        raise UsageError("the data of this saddle are not a pair of tensors (inputs, targets)")
    for perturbation in perturbations:
        if not 0 <= perturbation < math.inf:
            raise UsageError(f"perturbation={perturbation!r}: expected a finite distance >= 0")
    for size in batch_sizes:
        if size is not None:
            check_count("batch_size", size, len(batch[0]))
    if steps is not None:
        check_count("steps", steps)


def recorded_escapes() -> pd.DataFrame:
    """Load the escapes from saddles that were recorded elsewhere and ship with gpulab.

    The files are in `data/saddles/escapes`.

    Returns:
        A data frame like the `table` of `gpulab.saddles.EscapeTable`, in which `recorded` is True.

    Examples:
        >>> import gpulab as gl
        >>> bool(gl.saddles.recorded_escapes().recorded.all())
        True
        >>> gl.saddles.recorded_escapes().index.is_unique
        True
    """
    import pandas as pd

    tables = [
        table.rename(columns=FORMER_COLUMNS).assign(recorded=True)
        for table, _ in read_tables(recorded_folder("saddles") / "escapes")
    ]
    return pd.concat(tables, ignore_index=True)
