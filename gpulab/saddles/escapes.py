"""Leaving a saddle: how long an optimiser stays, when nothing but an arithmetic's errors pushes it away.

Along an eigenvector of the Hessian with the eigenvalue −λ, a step of size η multiplies the distance by 1 + ηλ. A first
displacement δ therefore reaches a radius r after ln(r/δ) / ln(1 + ηλ) steps, nearly ln(r/δ) / (ηλ). An arithmetic that
at every step computes ε there instead of zero does what δ = ε/λ does. But a step smaller than half of what separates a
weight from the next number of its format leaves it as it is: rounding can also hold a network at a saddle. What a step
is, the optimiser decides (`gpulab.saddles.optimizers`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpulab.errors import DataError, UsageError, check_count
from gpulab.passports import passport
from gpulab.progress import Progress
from gpulab.report import Report
from gpulab.saddles.descents import Descent, Saddle, check_start
from gpulab.saddles.operators import trained
from gpulab.saddles.optimizers import SETTLED, Factory, step_ratio
from gpulab.saddles.theory import LinearAutoencoderSaddle
from gpulab.settings import Setting
from gpulab.store.records import machine, read_tables, recorded_folder

if TYPE_CHECKING:
    import pandas as pd

RADIUS = 0.1
UNMOVED = 10  # steps without any change after which gradient descent is held for good; with a memory, SETTLED
PATIENCE = 3  # times the expected steps that are made where `steps` does not say how many
LONGEST = 100_000
# What tells the escapes of a table apart.
KEYS = ("setting", "optimizer", "master_weights", "learning_rate", "perturbation", "batch_size", "seed")


@dataclass(frozen=True, eq=False, repr=False)
class Escape:
    """A training that began at a saddle, and when it left."""

    setting: str
    optimizer: str
    master_weights: bool
    learning_rate: float
    batch_size: int | None
    seed: int
    perturbation: float
    radius: float
    curvature: float  # the least eigenvalue of the Hessian at the saddle
    # A row per step: `step`, the `distance` of the weights from the saddle (Euclidean, in float64), its parts that are
    # `unstable` (along all directions that lead down) and `along` the steepest one, and the `loss`.
    history: pd.DataFrame
    # The first step whose unstable part is longer than the radius, if there is one: in the other directions
    # minibatches may carry the weights as far, but from there they come back.
    steps: int | None
    # The displacement along the unstable directions that has the effect of the arithmetic's errors (of gradients, of
    # rounded weights, of batches), measured at the saddle before any step. NaN for batches without a law.
    noise: float
    start: float  # that plus the perturbation
    expected: float  # the step at which the unstable directions together reach the radius from there; NaN without a law
    # What the logarithm of the distance gains per step along the steepest direction: ln(1 + ηλ), or ln ρ with momentum.
    # NaN for an optimiser whose steps have nearly the same size, whatever the gradient is.
    expected_rate: float
    moved: float  # the share of the weights that the first step changed
    # The length of the step that the optimiser settles to at the saddle, over that of half of what separates weights
    # from the next numbers of their format: below 1, rounding holds most of them.
    step_ratio: float

    @property
    def left(self) -> bool:
        """Whether the network left the saddle."""
        return self.steps is not None

    @property
    def held(self) -> bool:
        """Whether it stayed although what was measured at the saddle should have led it away long before."""
        count = _patience(self.optimizer)
        still = len(self.history) >= count and self.history.distance.tail(count).nunique() == 1
        rough = 0 if self.optimizer == "sgd" else SETTLED
        return not self.left and (still or len(self.history) > 2 * self.expected + rough)

    @property
    def law(self) -> float:
        """ln(radius/start) / (ηλ), with the steepest direction's λ; infinite without a displacement. Of `sgd` only."""
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
    model: nn.Module,
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
    """Train a model that stands at a saddle, under a setting, until it has left.

    Args:
        model: Where training begins: `saddle.model`, or a network of the same shape near it.
        saddle: From `gpulab.saddles.linear_autoencoder_saddle` or `gpulab.saddles.find_critical_point`.
        setting: The arithmetic, such as `cpu:precision=bfloat16`.
        optimizer: `sgd` (gradient descent), `momentum` (0.9), `rmsprop` or `adam`, with torch's constants; or a
            function of weights and `lr=` that returns a `torch.optim.Optimizer`.
        learning_rate: The η of a step; by default such that ηλ is 0.05, or less where that would diverge, and 1e-3 for
            optimisers that scale their steps.
        steps: The most to make; by default three times as many as theory expects, and a hundred (a thousand for other
            optimisers than `sgd`); 100,000 without a theory.
        batch_size: Samples in a step; by default all of them.
        seed: Of the order of the data.
        perturbation: How far to move the model along the steepest direction first.
        radius: The distance along the unstable directions at which the model has left.
        master_weights: Whether the optimiser keeps the weights in float64, and each gradient sees a copy rounded to the
            setting's format, as in mixed precision.
        progress: Whether to show a progress bar.

    Raises:
        UsageError: Where the loss falls nowhere to second order, and for options that cannot be.
        DataError: Where the weights become infinite.

    Examples:
        >>> import gpulab
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> saddle = gpulab.saddles.linear_autoencoder_saddle(data, [1])
        >>> float64 = "cpu:precision=float64"
        >>> escape = gpulab.saddles.escape(saddle.model, saddle, float64, perturbation=1e-6, progress=False)
        >>> escape.left, abs(escape.steps - escape.expected) <= 2
        (True, True)

    References:
        Lee, Simchowitz, Jordan, Recht 2016, *Gradient descent only converges to minimizers* (COLT); Jin, Ge,
        Netrapalli, Kakade, Jordan 2017, *How to escape saddle points efficiently* (ICML, arXiv 1703.00887); Staib,
        Reddi, Kale, Kumar, Sra 2019, *Escaping saddle points with adaptive gradient methods* (ICML, arXiv 1901.09149);
        Antonakopoulos, Mertikopoulos, Piliouras, Wang 2022, *AdaGrad avoids saddle points* (ICML); on updates that
        are rounded away Zamirai, Zhang, Aberger, De Sa 2020, *Revisiting BFloat16 training* (arXiv 2010.06192).
    """
    import pandas as pd

    parsed = Setting.parse(setting)
    check_start(model, saddle, batch_size)
    for option, number in (("learning_rate", learning_rate), ("radius", radius)):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{option}={number!r}: expected a number above 0")
    if not 0 <= perturbation < math.inf:
        raise UsageError(f"perturbation={perturbation!r}: expected a distance, 0 or more")
    if steps is not None:
        check_count("steps", steps)
    with parsed.apply():
        descent = Descent(saddle, parsed, optimizer, learning_rate, batch_size, seed, master_weights)
        name, learning_rate = descent.name, float(descent.rate)
        patience = _patience(name)
        noise = descent.noise()
        values, directions = (tensor.cpu() for tensor in saddle.unstable)
        begin = descent.flat(trained(model)).cpu() + perturbation * saddle.direction.cpu()
        start = noise + (directions * (begin - descent.saddle.cpu())[:, None]).sum(0)
        expected, expected_rate = math.nan, math.nan
        if law := descent.law:
            expected = law.expected(start.abs(), -values, directions[:, 0], radius)
            expected_rate = math.nan if math.isfinite(law.longest) else math.log1p(float(law.gain(-values[:1])))
        if steps is None:
            more = 100 if name == "sgd" else 2 * SETTLED
            steps = LONGEST if math.isnan(expected) else math.ceil(min(PATIENCE * expected + more, LONGEST))
        descent.move_to(begin)
        ratio = step_ratio(optimizer, learning_rate, descent.weights, descent.gradient(next(descent.batches()))[1])
        rows: list[list[float]] = []
        with Progress(total=steps, unit="step", leave=False, disable=not progress) as bar:
            for loss, displacement in descent.walk():
                if batch_size is None and descent.moved[-patience:] == [0.0] * patience:
                    break
                unstable = descent.unstable(displacement)
                row = [displacement.norm(), unstable.norm(), unstable[0].abs(), loss.double().to(displacement.device)]
                rows.append(torch.stack(row).tolist())
                if not all(map(math.isfinite, rows[-1])):
                    raise DataError(
                        f"step {len(rows) - 1}: the weights are not finite; learning_rate={learning_rate:g}"
                    )
                if rows[-1][1] > radius or len(rows) > steps:
                    break
                bar.update()
    history = pd.DataFrame(rows, columns=["distance", "unstable", "along", "loss"]).rename_axis("step").reset_index()
    beyond = history.step[history.unstable > radius]
    options = str(parsed), name, master_weights, learning_rate, batch_size, seed, perturbation, radius
    theory = float(noise.norm()), float(start.norm()), expected, expected_rate
    left = int(beyond.iloc[0]) if len(beyond) else None
    moved = descent.moved[0] if descent.moved else math.nan
    return Escape(*options, saddle.curvature, history, left, *theory, moved, ratio)


def _patience(optimizer: str) -> int:
    """How many steps without any change show that an optimiser stays for good."""
    return UNMOVED if optimizer == "sgd" else SETTLED


@dataclass(frozen=True, eq=False, repr=False)
class EscapeTable(Report):
    """Escapes from one saddle, or from its mixtures, under several settings.

    The `table` has a row for each `Escape`, with its fields and properties by name: `batch_size` is 0 where all the
    data make a step, `steps` are NaN where it did not leave; and `emulated`, `recorded` and `machine`. The `paths` are
    the `history` of each. What another machine recorded can be appended to both.
    """

    table: pd.DataFrame
    paths: pd.DataFrame

    def slope(self) -> tuple[float, float, float]:
        """How many steps are made for one of the `law`, ln(r/δ)/(ηλ), by all that left: least squares.

        Returns the slope and the ends of its 95 % interval; `DataError` for fewer than three different escapes.
        """
        from scipy import stats

        left = self.table[self.table.left & (self.table.law > 0)]
        if left.law.nunique() < 3:
            raise DataError(f"{left.law.nunique()} different escapes: a slope needs 3")
        fit = stats.linregress(left.law, left.steps)
        reach = stats.t.ppf(0.975, len(left) - 2) * fit.stderr
        return float(fit.slope), float(fit.slope - reach), float(fit.slope + reach)

    def __str__(self) -> str:
        left, held = int(self.table.left.sum()), int(self.table.held.sum())
        return f"{len(self.table)} trainings from a saddle: {left} left, {held} were held there"


def escape_table(
    saddle: Saddle,
    settings: Sequence[str | Setting] = ("cpu:precision=float64", "cpu"),
    *,
    optimizers: Sequence[str | Factory] | Mapping[str | Factory, Sequence[float | None]] = ("sgd",),
    perturbations: Sequence[float] = (0.0,),
    batch_sizes: Sequence[int | None] = (None,),
    seeds: int | Sequence[int] = 1,
    learning_rate: float | None = None,
    steps: int | None = None,
    radius: float = RADIUS,
    master_weights: bool = False,
    progress: bool = True,
) -> EscapeTable:
    """`gpulab.saddles.escape` for every setting, optimiser, perturbation, batch size and seed.

    Args:
        saddle, learning_rate, steps, radius, master_weights, progress: As for `gpulab.saddles.escape`, whose errors
            are raised too.
        settings, perturbations, batch_sizes: One or more of each.
        optimizers: One or more; or each with its own learning rates, such as `{"sgd": [None], "adam": [1e-4, 1e-3]}`.
        seeds: Which, or how many. A seed draws the order of the data, and mixes the hidden units of a linear
            autoencoder: the same saddle, written with other weights, which round otherwise.

    Examples:
        >>> import gpulab
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> saddle = gpulab.saddles.linear_autoencoder_saddle(data, [1])
        >>> float64 = ["cpu:precision=float64"]
        >>> escapes = gpulab.saddles.escape_table(saddle, float64, perturbations=[1e-3, 1e-6, 1e-9], progress=False)
        >>> 0.95 < escapes.slope()[0] < 1.05
        True
    """
    import pandas as pd

    here = passport()
    every_seed = range(seeds) if isinstance(seeds, int) else seeds
    if isinstance(optimizers, Mapping) and learning_rate is not None:
        raise UsageError(f"learning_rate={learning_rate!r}: optimizers={optimizers!r} has its own learning rates")
    rates = optimizers if isinstance(optimizers, Mapping) else {name: [learning_rate] for name in optimizers}
    chosen = [(optimizer, rate) for optimizer, every_rate in rates.items() for rate in every_rate]
    starts = {
        seed: saddle.mixed(seed) if isinstance(saddle, LinearAutoencoderSaddle) else saddle for seed in every_seed
    }
    asked = list(itertools.product(starts.items(), settings, chosen, perturbations, batch_sizes))
    if not asked:
        raise UsageError("settings, optimizers, perturbations, batch_sizes and seeds: each needs one or more")
    options: dict[str, Any] = {"steps": steps, "radius": radius, "master_weights": master_weights, "progress": False}
    rows, paths = [], []
    with Progress(asked, unit="escape", leave=False, disable=not progress) as bar:
        for (seed, start), setting, (optimizer, rate), push, size in bar:
            bar.set_postfix_str(str(setting))
            options |= {"optimizer": optimizer, "learning_rate": rate, "perturbation": push, "batch_size": size}
            result = escape(start.model, start, setting, seed=seed, **options)
            parsed = Setting.parse(setting)
            row = {name: value for name, value in vars(result).items() if name != "history"}
            row |= {"batch_size": size or 0, "steps": math.nan if result.steps is None else result.steps}
            row |= {"law": result.law, "left": result.left, "held": result.held, "recorded": False}
            row |= {"emulated": parsed.emulated, "machine": machine(here, parsed.kind)}
            rows.append(row)
            paths.append(result.history.assign(**{key: row[key] for key in KEYS}))
    return EscapeTable(pd.DataFrame(rows), pd.concat(paths, ignore_index=True))


def recorded_escapes() -> pd.DataFrame:
    """The `table` of `gpulab.saddles.escape_table` as other machines recorded it, kept in `data/saddles/escapes`.

    Examples:
        >>> bool(recorded_escapes().recorded.all())
        True
    """
    import pandas as pd

    parts = [table.assign(recorded=True) for table, _ in read_tables(recorded_folder("saddles") / "escapes")]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["setting", "steps", "recorded"])
