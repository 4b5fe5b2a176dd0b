"""Leaving a saddle: how long gradient descent stays, when nothing but an arithmetic's errors pushes it away.

Along an eigenvector of the Hessian with the eigenvalue −λ, a step of size η multiplies the distance by 1 + ηλ. A first
displacement δ therefore reaches a radius r after ln(r/δ) / ln(1 + ηλ) steps, nearly ln(r/δ) / (ηλ). At the saddle
itself the exact gradient is zero. An arithmetic that computes ε instead, along that eigenvector and at every step,
does what a displacement δ = ε/λ does. But a step that is smaller than half of what separates a weight from the next
number of its format leaves that weight as it is: rounding can also hold a network at a saddle.

Sources: Lee, Simchowitz, Jordan, Recht 2016, *Gradient descent only converges to minimizers* (COLT); Jin, Ge,
Netrapalli, Kakade, Jordan 2017, *How to escape saddle points efficiently* (ICML, arXiv 1703.00887).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from gpulab.errors import DataError, UsageError
from gpulab.passports import passport
from gpulab.records import read_tables, recorded_folder
from gpulab.report import Report
from gpulab.saddles.critical import CriticalPoint
from gpulab.saddles.hessians import Batch
from gpulab.saddles.theory import LinearAutoencoderSaddle
from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd

Saddle = LinearAutoencoderSaddle | CriticalPoint

RADIUS = 0.1
GROWTH = 0.05  # η λ where no learning rate is given, unless that is too large for the steepest upward direction
FORGOTTEN = 1e-4  # batches whose push has become this small beside the first one's are not looked at
UNMOVED = 10  # steps without any change after which a network is held for good
PATIENCE = 3  # times the expected steps that are made where `steps` does not say how many
LONGEST = 100_000


@dataclass(frozen=True, eq=False, repr=False)
class Escape:
    """A training that began at a saddle, and when it left.

    `history` has a row per step: `step`, the `distance` of the weights from the saddle (Euclidean, in float64), the
    part of it that is `unstable`, along all directions that lead down, and `along` the steepest one, and the `loss`.
    `steps` is the first step whose unstable part is longer than `radius`, None if there is none: in the other
    directions minibatches may carry the weights as far, but from there they come back.

    Measured at the saddle, before any step: `noise`, the displacement along the unstable directions that has the
    effect of the arithmetic's errors (of gradients, of rounded weights, of batches), and `start`, which is that plus
    the `perturbation`. `expected` is when the unstable directions together reach the radius from there, and `law`
    the estimate ln(radius/start)/(ηλ). `moved` is the share of the weights that the first step changed.
    """

    setting: str
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
    moved: float

    @property
    def left(self) -> bool:
        """Whether the network left the saddle."""
        return self.steps is not None

    @property
    def held(self) -> bool:
        """Whether it stayed although what was measured at the saddle should have led it away long before."""
        still = len(self.history) >= UNMOVED and self.history.distance.tail(UNMOVED).nunique() == 1
        return not self.left and (still or len(self.history) > 2 * self.expected)

    @property
    def law(self) -> float:
        """ln(radius/start) / (ηλ), with the λ of the steepest direction; infinite without a displacement."""
        if self.start == 0:
            return math.inf
        return max(0.0, math.log(self.radius / self.start)) / (self.learning_rate * -self.curvature)

    @property
    def expected_rate(self) -> float:
        """ln(1 + ηλ): what the logarithm of the distance gains per step along the steepest direction."""
        return math.log1p(self.learning_rate * -self.curvature)

    @property
    def rate(self) -> float:
        """The same as measured, where the distance is well above its beginning; NaN where it hardly grew."""
        import numpy as np

        unstable = self.history.unstable
        growing = self.history[(unstable > 10 * unstable.iloc[0]) & (unstable > 10 * self.noise)]
        if len(growing) < 10:
            return math.nan
        return float(np.polyfit(growing.step, np.log(growing.unstable), 1)[0])

    def __repr__(self) -> str:
        expected = f"theory {self.expected:,.0f}" if math.isfinite(self.expected) else "theory: never"
        if self.left:
            outcome = f"left after {self.steps:,} steps ({expected})"
        elif self.held:
            outcome = f"held for {len(self.history) - 1:,} steps ({expected})"
        else:
            outcome = f"still there after {len(self.history) - 1:,} steps ({expected})"
        noise = f"noise {self.noise:.1e}, the first step moved {self.moved:.0%} of the weights"
        return f"Escape under {self.setting}: {outcome}; {noise}"


def escape(
    model: nn.Module,
    saddle: Saddle,
    setting: str | Setting = "cpu",
    *,
    learning_rate: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    perturbation: float | None = None,
    radius: float = RADIUS,
    progress: bool = True,
) -> Escape:
    """Train a model that stands at a saddle, by gradient descent under a setting, until it has left.

    `model` is where training begins: `saddle.model`, or a network of the same shape near it. A `perturbation` moves
    it that far along the steepest direction. All the data make a step, in an order that `seed` draws, or `batch_size`
    of them. The `learning_rate` η is chosen so that ηλ is 0.05, or less where that would diverge. At most `steps` are
    made: without it, three times as many as theory expects, and a hundred.

    Raises `UsageError` where the loss falls nowhere to second order, and `GpulabError` for what this machine lacks.

    Source: Jin, Ge, Netrapalli, Kakade, Jordan 2017, *How to escape saddle points efficiently* (arXiv 1703.00887).

    >>> import gpulab
    >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
    >>> saddle = gpulab.linear_autoencoder_saddle(data, [1])
    >>> escape = gpulab.escape(saddle.model, saddle, "cpu:precision=float64", perturbation=1e-6, progress=False)
    >>> escape.left, abs(escape.steps - escape.expected) <= 2
    (True, True)
    """
    parsed = Setting.parse(setting)
    rate = _learning_rate(saddle, learning_rate)
    _check(model, saddle, steps, batch_size, perturbation, radius)
    with parsed.apply():
        training = _Training(saddle, parsed, rate, batch_size, seed)
        noise = training.noise()
        values, directions = (part.cpu() for part in saddle.unstable)
        kick = perturbation or 0.0
        begin = _weights(model).double().cpu() + kick * saddle.direction.cpu()
        start = noise + (directions * (begin - training.exact.cpu())[:, None]).sum(0)
        expected = _expected(start.abs(), torch.log1p(rate * -values), radius)
        wait = min(PATIENCE * expected + 100, LONGEST)
        rows, moved = training.run(begin, math.ceil(wait) if steps is None else steps, radius, progress)
    history = _frame(rows)
    beyond = history.step[history.unstable > radius]
    return Escape(
        setting=str(parsed),
        learning_rate=rate,
        batch_size=batch_size,
        seed=seed,
        perturbation=kick,
        radius=radius,
        curvature=saddle.curvature,
        history=history,
        steps=int(beyond.iloc[0]) if len(beyond) else None,
        noise=float(noise.norm()),
        start=float(start.norm()),
        expected=expected,
        moved=moved,
    )


@dataclass(frozen=True, eq=False, repr=False)
class EscapeTable(Report):
    """Escapes from one saddle, or from its mixtures, under several settings.

    `table` has a row for each: `setting`, `perturbation`, `batch_size` (0 where all the data make a step), `seed`,
    `learning_rate`, `curvature`, `radius`; `noise`, `start`, `expected`, `law` and `moved`, measured or computed at the
    saddle; `steps` (NaN where it did not leave), `left`, `held`, `rate` and `expected_rate`; `emulated`, `recorded` and
    `machine`. `paths` has the `history` of each. What another machine recorded can be appended to both.
    """

    table: pd.DataFrame
    paths: pd.DataFrame

    def slope(self, against: str = "law") -> tuple[float, float, float]:
        """How many steps are made for one that theory expects, with its 95 % interval: of all that left, least squares.

        `against` is `law`, ln(r/δ)/(ηλ), or `expected`, which counts every unstable direction and takes whole steps.
        """
        from scipy import stats

        left = self.table[self.table.left & (self.table[against] > 0)]
        if left[against].nunique() < 3:
            raise DataError(f"{left[against].nunique()} different escapes: a slope needs 3")
        fit = stats.linregress(left[against], left.steps)
        reach = stats.t.ppf(0.975, len(left) - 2) * fit.stderr
        return float(fit.slope), float(fit.slope - reach), float(fit.slope + reach)

    def __str__(self) -> str:
        left, held = int(self.table.left.sum()), int(self.table.held.sum())
        return f"{len(self.table)} trainings from a saddle: {left} left, {held} were held there"

    def html(self) -> str:
        """The table."""
        shown = ["setting", "perturbation", "batch_size", "seed", "noise", "start", "expected", "steps", "held"]
        formats = dict.fromkeys(("perturbation", "noise", "start"), "{:.1e}".format)
        return self.table[shown].to_html(index=False, formatters=formats, float_format="{:,.0f}".format, na_rep="–")


def escape_table(
    saddle: Saddle,
    settings: Sequence[str | Setting] = ("cpu:precision=float64", "cpu"),
    *,
    perturbations: Sequence[float | None] = (None,),
    batch_sizes: Sequence[int | None] = (None,),
    seeds: int | Sequence[int] = 1,
    learning_rate: float | None = None,
    steps: int | None = None,
    radius: float = RADIUS,
    progress: bool = True,
) -> EscapeTable:
    """`gpulab.escape` for every setting, perturbation, batch size and seed.

    A seed draws the order of the data, and mixes the hidden units of a linear autoencoder: the same saddle, written
    with other weights, which round otherwise.

    >>> import gpulab
    >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
    >>> saddle = gpulab.linear_autoencoder_saddle(data, [1])
    >>> float64 = ["cpu:precision=float64"]
    >>> escapes = gpulab.escape_table(saddle, float64, perturbations=[1e-3, 1e-6, 1e-9], progress=False)
    >>> 0.95 < escapes.slope()[0] < 1.05
    True
    """
    import pandas as pd

    chosen = range(seeds) if isinstance(seeds, int) else seeds
    runs = list(itertools.product(chosen, settings, perturbations, batch_sizes))
    if not runs:
        raise UsageError("settings, perturbations, batch_sizes and seeds: each needs one or more")
    rows, paths = [], []
    with tqdm(runs, unit="escape", leave=False, disable=not progress) as bar:
        for seed, setting, perturbation, batch_size in bar:
            bar.set_postfix_str(str(setting))
            place = saddle.mixed(seed) if isinstance(saddle, LinearAutoencoderSaddle) else saddle
            one = escape(
                place.model,
                place,
                setting,
                learning_rate=learning_rate,
                steps=steps,
                batch_size=batch_size,
                seed=seed,
                perturbation=perturbation,
                radius=radius,
                progress=False,
            )
            rows.append(_row(one))
            same = {
                "setting": one.setting,
                "perturbation": one.perturbation,
                "batch_size": batch_size or 0,
                "seed": seed,
            }
            paths.append(one.history.assign(**same))
    return EscapeTable(pd.DataFrame(rows), pd.concat(paths, ignore_index=True))


def _row(one: Escape) -> dict[str, Any]:
    setting = Setting.parse(one.setting)
    names = ("setting", "perturbation", "seed", "learning_rate", "curvature", "radius", "noise", "start")
    derived = ("expected", "law", "moved", "left", "held", "rate", "expected_rate")
    here = passport()
    return {
        **{name: getattr(one, name) for name in names + derived},
        "batch_size": one.batch_size or 0,
        "steps": math.nan if one.steps is None else one.steps,
        "emulated": setting.emulated,
        "recorded": False,
        "machine": here["cpu"]["model"] if setting.kind == "cpu" else here["gpus"][0]["name"],
    }


class _Training:
    """Gradient descent from a saddle, in the arithmetic that is in force."""

    def __init__(self, saddle: Saddle, setting: Setting, rate: float, batch_size: int | None, seed: int) -> None:
        self.saddle, self.rate, self.batch_size, self.seed = saddle, rate, batch_size, seed
        self.net = copy.deepcopy(saddle.model).to(setting.device, setting.dtype)
        self.parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.where = "cpu" if setting.kind == "mps" else setting.device  # an Apple GPU has no float64
        assert saddle.batch is not None
        self.inputs, self.targets = (_to(part, setting) for part in saddle.batch)
        self.exact = _weights(saddle.model).double().to(self.where)

    def batches(self) -> Iterator[Batch]:
        """The data in an order drawn from the seed, over and over; each pass has its own."""
        count = len(self.inputs)
        for number in itertools.count():
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            order = torch.randperm(count, generator=generator).to(self.inputs.device)
            if self.batch_size is None:
                yield from itertools.repeat((self.inputs[order], self.targets[order]))
            size = self.batch_size or count
            # Whole batches only: a few samples left over would be noisier than all the others.
            for chosen in order[: count - count % size].split(size):
                yield self.inputs[chosen], self.targets[chosen]

    def gradient(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = self.saddle.objective(self.net, batch)
        return loss.detach(), torch.autograd.grad(loss, self.parameters)

    def noise(self) -> Float[Tensor, " m"]:
        """The displacement along each unstable direction that stands for the errors made at the saddle.

        A step moves by −η g. What moved n steps ago has grown by (1 + ηλ)ⁿ since, so that the first ones count most.
        """
        values, directions = (part.to(self.where) for part in self.saddle.unstable)
        growth = 1 + self.rate * -values
        self.place(self.exact)
        pushes = torch.zeros_like(values)
        constant = self.batch_size is None
        stored = (directions * self._displacement()[:, None]).sum(0)
        for number, batch in enumerate(self.batches()):
            error = self._flat(self.gradient(batch)[1])
            # The gradient at weights that were rounded has −λ times their displacement in it.
            error = (directions * error[:, None]).sum(0) - values * stored
            if constant:
                return (stored + error / values).cpu()
            weight = growth ** -(number + 1)
            pushes -= self.rate * error * weight
            if float(weight.max()) < FORGOTTEN:
                break
        return (stored + pushes).cpu()

    def run(self, begin: Tensor, steps: int, radius: float, progress: bool) -> tuple[list[list[float]], float]:
        """Rows of distance, its parts and the loss; and the share of the weights that the first step moved."""
        directions = self.saddle.unstable[1].to(self.where)
        self.place(begin.to(self.where))
        rows: list[list[float]] = []
        moved, unmoved = math.nan, 0
        with tqdm(total=steps, unit="step", leave=False, disable=not progress) as bar:
            for batch in self.batches():
                loss, gradients = self.gradient(batch)
                away = self._displacement()
                parts = (directions * away[:, None]).sum(0)
                here = torch.stack([away.norm(), parts.norm(), parts[0].abs(), loss.double().to(self.where)])
                rows.append(here.tolist())
                if not all(map(math.isfinite, rows[-1])):
                    raise DataError(f"step {len(rows) - 1}: the weights are not finite; learning_rate={self.rate:g}")
                if rows[-1][1] > radius or len(rows) > steps:
                    return rows, moved
                share = self._update(gradients)
                moved = share if len(rows) == 1 else moved
                unmoved = unmoved + 1 if share == 0 else 0
                if unmoved == UNMOVED and self.batch_size is None:
                    return rows, moved
                bar.update()
        raise AssertionError("batches never end")

    @torch.no_grad()
    def place(self, weights: Tensor) -> None:
        """Give the network these weights, as far as its format can hold them."""
        for parameter, piece in zip(self.parameters, weights.split([p.numel() for p in self.parameters]), strict=True):
            parameter.copy_(piece.view_as(parameter))

    @torch.no_grad()
    def _update(self, gradients: Sequence[Tensor]) -> float:
        """One step; the share of the weights that it changed."""
        changed = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            before = parameter.clone()
            parameter.add_(gradient, alpha=-self.rate)
            changed += (parameter != before).sum()
        return int(changed) / len(self.exact)

    def _displacement(self) -> Float[Tensor, " n"]:
        return self._flat(parameter.detach() for parameter in self.parameters) - self.exact

    def _flat(self, tensors: Any) -> Float[Tensor, " n"]:
        return torch.cat([tensor.reshape(-1).to(self.where).double() for tensor in tensors])


def _expected(start: Float[Tensor, " m"], rates: Float[Tensor, " m"], radius: float) -> float:
    """The step at which displacements that grow by their own rates are together as long as the radius."""
    if not bool((start > 0).any()):
        return math.inf
    logs = start.clamp(min=1e-300).log()

    def length(step: float) -> float:
        return float(torch.logsumexp(2 * (logs + rates * step), 0)) / 2

    low, high = 0.0, 1.0
    if length(low) >= math.log(radius):
        return 0.0
    while length(high) < math.log(radius):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if length(middle) >= math.log(radius) else (middle, high)
    return high


def _learning_rate(saddle: Saddle, wanted: float | None) -> float:
    if not saddle.curvature < 0 or not len(saddle.unstable[0]):
        raise UsageError(
            f"no direction leads down: the least curvature is {saddle.curvature:.3g}, and there is no escape"
        )
    if isinstance(saddle, CriticalPoint) and not saddle.found:
        raise UsageError(f"this is a {saddle.kind}, no critical point: {saddle.message}")
    if wanted is None:
        return min(GROWTH / -saddle.curvature, 1 / float(saddle.eigenvalues[-1]))
    if not 0 < wanted < math.inf:
        raise UsageError(f"learning_rate={wanted!r}: expected a number above 0")
    return float(wanted)


def _check(
    model: nn.Module,
    saddle: Saddle,
    steps: int | None,
    batch_size: int | None,
    perturbation: float | None,
    radius: float,
) -> None:
    if saddle.batch is None:
        raise UsageError("this point was found from a loss without a batch: give find_critical_point a batch")
    shapes = [[tuple(p.shape) for p in net.parameters() if p.requires_grad] for net in (model, saddle.model)]
    if shapes[0] != shapes[1]:
        raise UsageError(f"a model with weights {shapes[0]}: those of the saddle are {shapes[1]}")
    count = len(saddle.batch[0])
    if batch_size is not None and not (isinstance(batch_size, int) and 1 <= batch_size <= count):
        raise UsageError(f"batch_size={batch_size!r}: expected a whole number from 1 to {count}, or None for all")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise UsageError(f"steps={steps!r}: expected a whole number from 1")
    if perturbation is not None and not 0 <= perturbation < math.inf:
        raise UsageError(f"perturbation={perturbation!r}: expected a distance, 0 or more")
    if not 0 < radius < math.inf:
        raise UsageError(f"radius={radius!r}: expected a distance above 0")


def _frame(rows: list[list[float]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=["distance", "unstable", "along", "loss"]).rename_axis("step").reset_index()


def _weights(model: nn.Module) -> Float[Tensor, " n"]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def _to(part: Any, setting: Setting) -> Tensor:
    if not isinstance(part, Tensor):
        raise UsageError(f"the data of the saddle are a {type(part).__name__}: expected tensors")
    return part.to(setting.device, setting.dtype if part.is_floating_point() else None)


def recorded_escapes() -> pd.DataFrame:
    """The escapes that other machines recorded: the `table` of `gpulab.escape_table`, kept in `data/saddles/escapes`.

    >>> bool(recorded_escapes().recorded.all())
    True
    """
    import pandas as pd

    parts = [table.assign(recorded=True) for table, _ in read_tables(recorded_folder("saddles") / "escapes")]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["setting", "steps", "recorded"])
