"""Leaving a saddle: how long an optimiser stays, when nothing but an arithmetic's errors pushes it away.

Along an eigenvector of the Hessian with the eigenvalue −λ, a step of size η multiplies the distance by 1 + ηλ. A first
displacement δ therefore reaches a radius r after ln(r/δ) / ln(1 + ηλ) steps, nearly ln(r/δ) / (ηλ). An arithmetic that
at every step computes ε there instead of zero does what δ = ε/λ does. But a step smaller than half of what separates a
weight from the next number of its format leaves it as it is: rounding can also hold a network at a saddle. What a step
is, the optimiser decides (`gpulab.saddles.optimizers`).

From the top: `Weights` are what moves, `Descent` moves them, `escape` watches until they have left, and `escape_table`
does so under many settings.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim

from gpulab.errors import DataError, UsageError, check_count
from gpulab.passports import machine, passport
from gpulab.report import Progress, Report
from gpulab.saddles.critical import CriticalPoint
from gpulab.saddles.operators import trained
from gpulab.saddles.optimizers import SETTLED, Factory, Law, build, name_of, step_ratio
from gpulab.saddles.theory import LinearAutoencoderSaddle
from gpulab.settings import Setting
from gpulab.store.recorded import read_tables, recorded_folder

if TYPE_CHECKING:
    import pandas as pd

Saddle = LinearAutoencoderSaddle | CriticalPoint
Pair = tuple[Tensor, Tensor]

RADIUS = 0.1
UNMOVED = 10  # steps without any change after which gradient descent is held for good; with a memory, SETTLED
PATIENCE = 3  # times the expected steps that are made where `steps` does not say how many
LONGEST = 100_000
GROWTH = 0.05  # η λ where no learning rate is given, unless that is too large for the steepest upward direction
ADAPTIVE = 1e-3  # the learning rate where none is given and no law makes one: Adam's usual one
FORGOTTEN = 1e-4  # batches whose push has become this small beside the first one's are not looked at
# What tells the escapes of a table apart.
KEYS = ("setting", "optimizer", "master_weights", "learning_rate", "perturbation", "batch_size", "seed")


# --- a training from a saddle ----------------------------------------------------------------------------


class Weights:
    """A network's weights in a setting's format, and those that an optimiser moves: the same, or masters in float64."""

    def __init__(self, model: nn.Module, setting: Setting, masters: bool = False) -> None:
        self.setting = setting
        self.net = copy.deepcopy(model).to(setting.device, setting.dtype)
        self.parameters = trained(self.net)
        self.float64_device = "cpu" if setting.kind == "mps" else setting.device  # an Apple GPU has no float64
        self.moved = self.parameters
        if masters:
            self.moved = [nn.Parameter(p.detach().to(self.float64_device, torch.float64)) for p in self.parameters]

    def flat(self, tensors: Iterable[Tensor] | None = None) -> Float[Tensor, " n"]:
        """One vector of tensors, in float64; of the weights that are moved where none are given."""
        tensors = self.moved if tensors is None else tensors
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(self.float64_device).double()

    @torch.no_grad()
    def move_to(self, vector: Float[Tensor, " n"]) -> None:
        """Put the network at these weights."""
        # Copied, not views of one vector: where a weight lies in memory may decide how a product of it is rounded.
        for weight, piece in zip(self.moved, vector.split([w.numel() for w in self.moved]), strict=True):
            weight.copy_(piece.view_as(weight))
        self._round_masters()

    @torch.no_grad()
    def step(self, optimizer: optim.Optimizer, gradients: Sequence[Tensor]) -> float:
        """Let the optimiser make a step; the share of the weights that it changed."""
        before = [weight.clone() for weight in self.moved]
        for weight, gradient in zip(self.moved, gradients, strict=True):
            weight.grad = gradient.to(weight)
        optimizer.step()
        self._round_masters()
        changed = [(weight != old).sum() for weight, old in zip(self.moved, before, strict=True)]
        return int(torch.stack(changed).sum()) / sum(weight.numel() for weight in self.moved)

    def _round_masters(self) -> None:
        if self.moved is not self.parameters:
            for parameter, weight in zip(self.parameters, self.moved, strict=True):
                parameter.copy_(weight)


def batches(data: Pair, size: int | None, seed: int) -> Iterator[Pair]:
    """Inputs and targets in an order drawn from the seed, over and over; each pass has its own."""
    inputs, targets = data
    count = len(inputs)
    for number in itertools.count():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        order = torch.randperm(count, generator=generator).to(inputs.device)
        if size is None:
            yield from itertools.repeat((inputs[order], targets[order]))
        else:  # whole batches only: a few samples left over would be noisier than all the others
            for chosen in order[: count - count % size].split(size):
                yield inputs[chosen], targets[chosen]


def chosen_optimizer(saddle: Saddle, weights: Weights, optimizer: str | Factory, rate: float | None) -> optim.Optimizer:
    """One with the learning rate given, or with that at which the steepest way down grows by `GROWTH`."""
    built = build(optimizer, weights.moved, 1.0 if rate is None else rate)
    if rate is None:
        plain = name_of(optimizer, built).startswith(("sgd", "momentum"))
        rate = min(GROWTH / -saddle.curvature, 1 / float(saddle.eigenvalues[-1])) if plain else ADAPTIVE
        for group in built.param_groups:
            group["lr"] = rate
    return built


class Descent:
    """A training from a saddle, in the arithmetic that is in force: weights, data, and an optimiser with its law."""

    def __init__(
        self, saddle: Saddle, weights: Weights, optimizer: optim.Optimizer, size: int | None = None, seed: int = 0
    ) -> None:
        self.objective, self.weights, self.batch_size, self.seed = saddle.objective, weights, size, seed
        self.optimizer, self.law = optimizer, Law.of(optimizer)
        self.rate = float(optimizer.param_groups[0]["lr"])
        device, dtype = weights.setting.device, weights.setting.dtype
        inputs, targets = (tensor.to(device, dtype if tensor.is_floating_point() else None) for tensor in saddle.batch)
        self.data = inputs, targets
        self.saddle = weights.flat(trained(saddle.model))
        self.values, self.directions = (tensor.to(weights.float64_device) for tensor in saddle.unstable)
        self.moved: list[float] = []  # of each step, the share of the weights that it changed

    def batches(self) -> Iterator[Pair]:
        """The batches of its steps, without end."""
        return batches(self.data, self.batch_size, self.seed)

    def gradient(self, batch: Pair) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss of a batch and its gradients."""
        loss = self.objective(self.weights.net, batch)
        return loss.detach(), torch.autograd.grad(loss, self.weights.parameters)

    def walk(self) -> Iterator[tuple[Tensor, Float[Tensor, " n"]]]:
        """Make steps without end; before each, the loss and the displacement from the saddle."""
        for batch in self.batches():
            loss, gradients = self.gradient(batch)
            yield loss, self.weights.flat() - self.saddle
            self.moved.append(self.weights.step(self.optimizer, gradients))

    def unstable(self, vector: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
        """The parts of a vector along the directions that lead down."""
        return (self.directions * vector[:, None]).sum(0)

    def noise(self) -> Float[Tensor, " m"]:
        """The displacement along each unstable direction that stands for the errors made at the saddle.

        A step moves by −η g. What moved n steps ago has grown by ρⁿ since, so that the first ones count most.
        """
        if self.batch_size is not None and (self.law is None or math.isfinite(self.law.longest)):
            return torch.full_like(self.values, math.nan).cpu()
        self.weights.move_to(self.saddle)
        pushes = torch.zeros_like(self.values)
        stored = self.unstable(self.weights.flat() - self.saddle)
        for number, batch in enumerate(self.batches()):
            # The gradient at weights that were rounded has −λ times their displacement in it.
            error = self.unstable(self.weights.flat(self.gradient(batch)[1])) - self.values * stored
            if self.batch_size is None:
                return (stored + error / self.values).cpu()
            assert self.law is not None
            weight = self.law.impulse(-self.values) * self.law.growth(-self.values) ** -(number + 1)
            pushes -= self.rate * error * weight
            if float(weight.max()) < FORGOTTEN:
                break
        return (stored + pushes).cpu()


def check_start(saddle: Saddle, batch_size: int | None) -> None:
    """`UsageError` for a point or a batch size with which there is no escape."""
    if not len(saddle.unstable[0]):
        least = saddle.curvature
        raise UsageError(f"no direction leads down: the least curvature is {least:.3g}, and there is no escape")
    if isinstance(saddle, CriticalPoint) and not saddle.found:
        raise UsageError(f"this is a {saddle.kind}, no critical point: {saddle.message}")
    if not isinstance(saddle.batch, list | tuple) or not all(isinstance(item, Tensor) for item in saddle.batch):
        raise UsageError("the data of this saddle are no pair of tensors, inputs and targets")
    if batch_size is not None:
        check_count("batch_size", batch_size, len(saddle.batch[0]))


# --- when it has left -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Escape:
    """The result of one training that began at a saddle: whether and when it left. `gpulab.saddles.escape` returns it.

    The saddle's unstable directions are those along which the loss curves down: the eigenvectors of the Hessian's
    negative eigenvalues −λ. Distances are Euclidean, of all weights together, in float64.

    Attributes:
        setting: The setting that it trained under.
        optimizer: The optimiser's name.
        master_weights: Whether the optimiser kept the weights in float64.
        learning_rate: The η of a step.
        batch_size: Samples in a step; None for all of them.
        seed: What the order of the data was drawn from.
        perturbation: How far the weights were moved along the steepest unstable direction first.
        radius: The distance along the unstable directions at which the network has left.
        curvature: The least eigenvalue of the Hessian at the saddle.
        history: A data frame with a row for the start and one after each step: `step`; the `distance` of the weights
            from the saddle; its parts that are `unstable` (along all unstable directions) and `along` the steepest one;
            and the `loss`.
        steps: The first step whose unstable part is longer than the radius; None where there is none. Other directions
            do not count: minibatches may carry the weights as far there, but from there they come back.
        noise: The displacement along the unstable directions that has the effect of the arithmetic's errors: of
            gradients, of rounded weights, of batches. It is measured at the saddle before any step. NaN for minibatches
            and another optimiser than gradient descent, with or without momentum.
        start: The displacement along the unstable directions at the start: the noise and the perturbation.
        expected: The step at which theory expects the network to leave from there. Infinite where nothing displaces it;
            NaN where `start` is, and where there is no theory: for other optimisers than SGD, momentum, RMSprop and
            Adam, and for options of these such as weight decay.
        expected_rate: How much the logarithm of the distance grows per step along the steepest direction: ln(1 + ηλ),
            or ln ρ with momentum, where ρ is the larger root of ρ² − (1 + μ + ηλ) ρ + μ = 0. NaN for an optimiser whose
            steps have nearly the same size, whatever the gradient is.
        moved: The share of the weights that the first step changed.
        step_ratio: The length of the step that the optimiser settles to at the saddle, over that of half of what
            separates the weights from the next numbers of their format. Below 1, rounding holds most weights.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([3.0, 2.0, 1.0])), [1])
        >>> gone = gl.saddles.escape(saddle, "cpu", perturbation=1e-3, progress=False)
        >>> gone.left, gone.held, bool(gone.history.unstable.iloc[-1] > gone.radius)
        (True, False, True)
    """

    setting: str
    optimizer: str
    master_weights: bool
    learning_rate: float
    batch_size: int | None
    seed: int
    perturbation: float
    radius: float
    curvature: float
    history: pd.DataFrame
    steps: int | None
    noise: float
    start: float
    expected: float
    expected_rate: float
    moved: float
    step_ratio: float

    @property
    def left(self) -> bool:
        """Whether the network left the saddle."""
        return self.steps is not None

    @property
    def held(self) -> bool:
        """Whether rounding held the network at the saddle.

        It did not leave, and either the weights stood still in the last steps (10 of `sgd`, 500 of others), or more
        than twice the expected steps were made (and 500 more, unless by `sgd`).
        """
        count = _patience(self.optimizer)
        still = len(self.history) >= count and self.history.distance.tail(count).nunique() == 1
        rough = 0 if self.optimizer == "sgd" else SETTLED
        return not self.left and (still or len(self.history) > 2 * self.expected + rough)

    @property
    def law(self) -> float:
        """The steps that gradient descent should need: ln(radius / start) / (ηλ), with the λ of the steepest direction.

        Infinite without a displacement; NaN for other optimisers than `sgd`.
        """
        if self.optimizer != "sgd":
            return math.nan
        distance = math.log(self.radius / self.start) if self.start else math.inf
        return max(0.0, distance) / (self.learning_rate * -self.curvature)

    def __repr__(self) -> str:
        expected = "theory: never" if math.isinf(self.expected) else f"theory {self.expected:,.0f}"
        expected = "no theory" if math.isnan(self.expected) else expected
        outcome = "left after" if self.left else "held for" if self.held else "still there after"
        weights = ", weights in float64" if self.master_weights else ""
        return (
            f"Escape under {self.setting} by {self.optimizer}{weights}: {outcome} {len(self.history) - 1:,} steps "
            f"({expected}); noise {self.noise:.1e}, the first step moved {self.moved:.0%} of the weights"
        )


def escape(
    saddle: Saddle,
    setting: str | Setting = "cpu",
    *,
    optimizer: str | Factory = "sgd",
    learning_rate: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    perturbation: float = 0.0,
    radius: float = RADIUS,
    master_weights: bool = False,
    progress: bool = True,
) -> Escape:
    """Train the model that stands at a saddle, under a setting, until it has left.

    Only a perturbation, errors of the arithmetic and the noise of minibatches move it away. The result tells when it
    left, and when theory expects it to have left. A training by whole batches ends earlier where no weight has changed
    any more in 10 steps of `sgd`, or 500 of another optimiser.

    Args:
        saddle: From `gpulab.saddles.linear_autoencoder_saddle` or `gpulab.saddles.find_critical_point`.
        setting: The arithmetic, such as `cpu:precision=bfloat16`.
        optimizer: `sgd` (gradient descent), `momentum` (0.9), `rmsprop` or `adam`, with torch's constants; or a
            function of weights and `lr=` that returns a `torch.optim.Optimizer`.
        learning_rate: The η of a step. By default such that ηλ is 0.05 for the steepest way down, or less where that
            would diverge; for optimisers that scale their steps 1e-3.
        steps: The most steps to make. By default three times as many as theory expects, and 100 more (1,000 for other
            optimisers than `sgd`), but at most 100,000; 100,000 without a theory.
        batch_size: How many samples a step sees; by default all of them.
        seed: Draws the order of the data.
        perturbation: How far to move the model along the steepest way down first.
        radius: The distance along the directions that lead down at which the model has left.
        master_weights: Whether the optimiser keeps the weights in float64, and each gradient sees a copy rounded to the
            setting's format, as in mixed precision.
        progress: Whether to show a progress bar.

    Returns:
        A `gpulab.saddles.Escape`.

    Raises:
        UsageError: Where the loss curves down in no direction; for a search that found no critical point, or whose
            data are no pair of tensors; for an unknown optimiser, or one that does not use the learning rate that it is
            given; and for numbers out of range.
        DataError: Where the weights or the loss become infinite or NaN.
        GpulabError: For a setting that cannot run here.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> saddle = gl.saddles.linear_autoencoder_saddle(data, [1])
        >>> float64 = "cpu:precision=float64"
        >>> escape = gl.saddles.escape(saddle, float64, perturbation=1e-6, progress=False)
        >>> escape.left, abs(escape.steps - escape.expected) <= 2
        (True, True)

    References:
        Lee, Simchowitz, Jordan, Recht 2016, *Gradient descent only converges to minimizers* (COLT); Jin, Ge,
        Netrapalli, Kakade, Jordan 2017, *How to escape saddle points efficiently* (ICML, arXiv 1703.00887); Staib,
        Reddi, Kale, Kumar, Sra 2019, *Escaping saddle points with adaptive gradient methods* (ICML, arXiv 1901.09149);
        Antonakopoulos, Mertikopoulos, Piliouras, Wang 2022, *AdaGrad avoids saddle points* (ICML); on updates that are
        rounded away Zamirai, Zhang, Aberger, De Sa 2020, *Revisiting BFloat16 training* (arXiv 2010.06192).
    """
    import pandas as pd

    parsed = Setting.parse(setting)
    check_start(saddle, batch_size)
    for option, number in (("learning_rate", learning_rate), ("radius", radius)):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{option}={number!r}: expected a number above 0")
    if not 0 <= perturbation < math.inf:
        raise UsageError(f"perturbation={perturbation!r}: expected a distance, 0 or more")
    if steps is not None:
        check_count("steps", steps)
    with parsed.apply():
        weights = Weights(saddle.model, parsed, master_weights)
        built = chosen_optimizer(saddle, weights, optimizer, learning_rate)
        descent = Descent(saddle, weights, built, batch_size, seed)
        name, learning_rate = name_of(optimizer, built), descent.rate
        patience = _patience(name)
        noise = descent.noise()
        values, directions = (tensor.cpu() for tensor in saddle.unstable)
        origin = descent.saddle.cpu()
        begin = origin + perturbation * saddle.direction.cpu()
        start = noise + (directions * (begin - origin)[:, None]).sum(0)
        expected, expected_rate = math.nan, math.nan
        if law := descent.law:
            expected = law.expected(start.abs(), -values, directions[:, 0], radius)
            expected_rate = math.nan if math.isfinite(law.longest) else math.log1p(float(law.gain(-values[:1])))
        if steps is None:
            extra_steps = 100 if name == "sgd" else 2 * SETTLED
            steps = LONGEST if math.isnan(expected) else math.ceil(min(PATIENCE * expected + extra_steps, LONGEST))
        weights.move_to(begin)
        _, gradients = descent.gradient(next(descent.batches()))
        ratio = step_ratio(optimizer, learning_rate, weights.moved, gradients)
        rows: list[list[float]] = []
        with Progress(total=steps, unit="step", leave=False, disable=not progress) as bar:
            for loss, displacement in descent.walk():
                if batch_size is None and descent.moved[-patience:] == [0.0] * patience:
                    break
                unstable = descent.unstable(displacement)
                row = [displacement.norm(), unstable.norm(), unstable[0].abs(), loss.double().to(displacement.device)]
                rows.append(torch.stack(row).tolist())
                if not all(map(math.isfinite, rows[-1])):
                    raise DataError(f"step {len(rows) - 1}: weights are not finite; learning_rate={learning_rate:g}")
                if rows[-1][1] > radius or len(rows) > steps:
                    break
                bar.update()
    history = pd.DataFrame(rows, columns=["distance", "unstable", "along", "loss"]).rename_axis("step").reset_index()
    beyond = history.step[history.unstable > radius]
    options = str(parsed), name, master_weights, learning_rate, batch_size, seed, perturbation, radius
    theory = float(noise.norm()), float(start.norm()), expected, expected_rate
    left_at = int(beyond.iloc[0]) if len(beyond) else None
    moved = descent.moved[0] if descent.moved else math.nan
    return Escape(*options, saddle.curvature, history, left_at, *theory, moved, ratio)


def _patience(optimizer: str) -> int:
    """How many steps without any change show that an optimiser stays for good."""
    return UNMOVED if optimizer == "sgd" else SETTLED


@dataclass(frozen=True, eq=False, repr=False)
class EscapeTable(Report):
    """Escapes from one saddle under several settings; `gpulab.saddles.escape_table` returns one.

    It can be printed and drawn (`plot`). What another machine recorded can be appended to both frames.

    Attributes:
        table: A data frame with a row for each escape. Its columns are the attributes of `gpulab.saddles.Escape` but
            `history`, and its properties `law`, `left` and `held`. `batch_size` is 0 where all the data make a step,
            and `steps` is NaN where the network did not leave. Further columns: `emulated` (whether the setting
            emulates another chip), `recorded` (False), `machine`.
        paths: A data frame of all histories, one below the other: `step`, `distance`, `unstable`, `along`, `loss`, and
            what tells escapes apart: `setting`, `optimizer`, `master_weights`, `learning_rate`, `perturbation`,
            `batch_size`, `seed`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([3.0, 2.0, 1.0])), [1])
        >>> print(gl.saddles.escape_table(saddle, ["cpu"], perturbations=[1e-3, 1e-4], progress=False))
        2 trainings from a saddle: 2 left, 0 were held there
    """

    plots = "gpulab.plots.saddles"

    table: pd.DataFrame
    paths: pd.DataFrame

    def slope(self) -> tuple[float, float, float]:
        """Fit how many steps were made for each step that the `law` expects, over all escapes by `sgd` that left.

        Returns:
            The slope by least squares, and the lower and the upper end of its 95 % interval.

        Raises:
            DataError: For fewer than three different escapes.
        """
        from scipy import stats

        escaped = self.table[self.table.left & (self.table.law > 0)]
        if escaped.law.nunique() < 3:
            raise DataError(f"{escaped.law.nunique()} different escapes: a slope needs 3")
        fit = stats.linregress(escaped.law, escaped.steps)
        reach = stats.t.ppf(0.975, len(escaped) - 2) * fit.stderr
        return float(fit.slope), float(fit.slope - reach), float(fit.slope + reach)

    def __str__(self) -> str:
        left_count, held_count = int(self.table.left.sum()), int(self.table.held.sum())
        return f"{len(self.table)} trainings from a saddle: {left_count} left, {held_count} were held there"


def escape_table(
    saddle: Saddle,
    settings: Sequence[str | Setting] = ("cpu:precision=float64", "cpu"),
    *,
    optimizers: Sequence[str | Factory] | Mapping[str | Factory, Sequence[float | None]] = ("sgd",),
    perturbations: Sequence[float] = (0.0,),
    batch_sizes: Sequence[int | None] = (None,),
    seeds: int | Sequence[int] = 1,
    steps: int | None = None,
    master_weights: bool = False,
    progress: bool = True,
) -> EscapeTable:
    """Call `gpulab.saddles.escape` for every combination of seed, setting, optimiser, perturbation and batch size.

    Args:
        saddle: From `gpulab.saddles.linear_autoencoder_saddle` or `gpulab.saddles.find_critical_point`.
        settings: One or more settings.
        optimizers: One or more optimisers, as for `gpulab.saddles.escape`; or each with its own learning rates, such as
            `{"sgd": [None], "adam": [1e-4, 1e-3]}`, where None is the default one.
        perturbations: One or more distances by which the model is moved along the steepest way down first.
        batch_sizes: How many samples a step sees, one or more; None is all of them.
        seeds: The seeds, or how many. A seed draws the order of the data. It also mixes the hidden units of a linear
            autoencoder: the same saddle, written with other weights, which round otherwise.
        steps: The most steps to make; by default as for `gpulab.saddles.escape`.
        master_weights: Whether the optimiser keeps the weights in float64.
        progress: Whether to show a progress bar.

    Returns:
        A `gpulab.saddles.EscapeTable`.

    Raises:
        UsageError: For an empty list, and for what `gpulab.saddles.escape` refuses.
        DataError: Where weights or a loss become infinite or NaN.
        GpulabError: For a setting that cannot run here.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> saddle = gl.saddles.linear_autoencoder_saddle(data, [1])
        >>> float64 = ["cpu:precision=float64"]
        >>> escapes = gl.saddles.escape_table(saddle, float64, perturbations=[1e-3, 1e-6, 1e-9], progress=False)
        >>> 0.95 < escapes.slope()[0] < 1.05
        True
    """
    import pandas as pd

    machine_passport = passport()
    every_seed = range(seeds) if isinstance(seeds, int) else seeds
    rates = optimizers if isinstance(optimizers, Mapping) else dict.fromkeys(optimizers, (None,))
    chosen = [(optimizer, rate) for optimizer, every_rate in rates.items() for rate in every_rate]
    starts = {
        seed: saddle.mixed(seed) if isinstance(saddle, LinearAutoencoderSaddle) else saddle for seed in every_seed
    }
    combinations = list(itertools.product(starts.items(), settings, chosen, perturbations, batch_sizes))
    if not combinations:
        raise UsageError("settings, optimizers, perturbations, batch_sizes and seeds: each needs one or more")
    options: dict[str, Any] = {"steps": steps, "master_weights": master_weights, "progress": False}
    rows, paths = [], []
    with Progress(combinations, unit="escape", leave=False, disable=not progress) as bar:
        for (seed, start), setting, (optimizer, rate), push, size in bar:
            bar.set_postfix_str(str(setting))
            options |= {"optimizer": optimizer, "learning_rate": rate, "perturbation": push, "batch_size": size}
            result = escape(start, setting, seed=seed, **options)
            parsed = Setting.parse(setting)
            row = {name: value for name, value in vars(result).items() if name != "history"}
            row |= {"batch_size": size or 0, "steps": math.nan if result.steps is None else result.steps}
            row |= {"law": result.law, "left": result.left, "held": result.held, "recorded": False}
            row |= {"emulated": parsed.emulated, "machine": machine(machine_passport, parsed.kind)}
            rows.append(row)
            paths.append(result.history.assign(**{key: row[key] for key in KEYS}))
    return EscapeTable(pd.DataFrame(rows), pd.concat(paths, ignore_index=True))


def recorded_escapes() -> pd.DataFrame:
    """Read the escapes from saddles that were recorded on other machines and are shipped with gpulab.

    The files are in `data/saddles/escapes`.

    Returns:
        A data frame as the `table` of `gpulab.saddles.EscapeTable`, in which `recorded` is True.

    Examples:
        >>> import gpulab as gl
        >>> bool(gl.saddles.recorded_escapes().recorded.all())
        True
    """
    import pandas as pd

    tables = [table.assign(recorded=True) for table, _ in read_tables(recorded_folder("saddles") / "escapes")]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["setting", "steps", "recorded"])
