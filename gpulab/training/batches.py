"""How large a batch is worth its cost: the gradient's noise scale, and the steps to a target against the batch size.

With batches of B examples training to a target takes about S = S_min (1 + B_noise / B) steps: twice the devices halve
the steps while B is far below the noise scale, and gain nothing far above it.

Source: McCandlish, Kaplan, Amodei et al. 2018, *An empirical model of large-batch training* (arXiv 1812.06162).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpulab.data.base import Data
from gpulab.data.feed import Loader
from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.progress import Progress
from gpulab.settings import Setting
from gpulab.training.adam import Adam

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class NoiseScale:
    """The noise of a gradient at one place.

    Attributes:
        gradient: The squared length of the true gradient, |G|².
        variance: The trace of the covariance of one example's gradient, tr Σ.
        scale: Their quotient, the batch at which noise and gradient are as large.
    """

    gradient: float
    variance: float

    @property
    def scale(self) -> float:
        """Tr Σ / |G|², in examples; infinite where the gradient is lost in the noise."""
        return self.variance / self.gradient if self.gradient > 0 else float("inf")


def noise_scale(model: Trainable, examples: Tensor, batch_size: int = 16) -> NoiseScale:
    """The simple noise scale of a model's loss where its weights are now.

    From the squared gradients of small batches, their mean g², and of all examples together, G²: an average over b of
    n examples has the expectation |G|² + tr Σ / b, so both can be solved for without bias (appendix A.1 of the source).

    Args:
        model: Its `training_loss` is the mean over a batch. Gradients and weights are left as they are.
        examples: (n, …), drawn independently, a multiple of `batch_size` and more than one.
        batch_size: Of the small batches.

    Raises:
        UsageError: For a number of examples that does not give two batches or more.

    Examples:
        >>> from gpulab.models import Autoencoder
        >>> noise_scale(Autoencoder((16,)), torch.rand(64, 1, 28, 28)).variance > 0
        True
    """
    count = len(examples) // batch_size if batch_size > 0 else 0
    if count < 2 or len(examples) % batch_size:
        raise UsageError(f"{len(examples)} examples in batches of {batch_size}: expected two or more full batches")
    total, small = torch.zeros(()), 0.0
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for batch in examples.split(batch_size):
        gradients = torch.autograd.grad(model.training_loss(batch, None)[0], parameters)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).double()
        small += flat.square().sum().item() / count
        total = total + flat / count
    large, everything = total.square().sum().item(), len(examples)
    gradient = (everything * large - batch_size * small) / (everything - batch_size)
    return NoiseScale(gradient, (small - large) / (1 / batch_size - 1 / everything))


def steps_to_target(
    model: Trainable,
    data: Data,
    target: float,
    batch_sizes: Sequence[int] = (1, 4, 16, 64),
    learning_rates: Sequence[float] = (3e-4, 1e-3, 2e-3, 4e-3),
    seed: int = 0,
    most: int = 2000,
    progress: bool = True,
) -> pd.DataFrame:
    """How many updates of Adam it takes to a loss, for each batch size at each learning rate.

    The loss is that on held-out images, looked at after 1, 2, 3, … updates, ever more rarely (a twentieth more).

    Args:
        model: Each training starts from its weights; left as it is.
        data: Images.
        target: The mean squared error that ends a training.
        batch_sizes: To compare.
        learning_rates: Of which the best counts, for each batch size.
        seed: Of the order of images.
        most: Updates after which a training has failed.
        progress: Whether to show a bar.

    Returns:
        A row for each batch size and learning rate: `batch_size`, `learning_rate`, `steps` (NaN where the target was
        not reached), `examples` (steps × batch size), `best` (whether no other rate takes fewer steps).

    Raises:
        UsageError: For a sequence of frames.
    """
    import pandas as pd

    if data.sequential:
        raise UsageError(f"{data.name} is a sequence of frames: its examples are not independent")
    as_tensor = Loader("window", Setting.parse("cpu")).window
    heldout = torch.cat([as_tensor(window.frames) for window in data.heldout(1000)])
    rows = []
    for size, rate in Progress([*itertools.product(batch_sizes, learning_rates)], leave=False, disable=not progress):
        batches = (as_tensor(window.frames) for window in data.windows(size, seed))
        steps = _steps(copy.deepcopy(model), batches, heldout, target, rate, most)
        rows.append({"batch_size": size, "learning_rate": rate, "steps": steps, "examples": steps * size})
    table = pd.DataFrame(rows)
    return table.assign(best=table.steps == table.groupby("batch_size").steps.transform("min"))


def _steps(
    model: Trainable, batches: Iterator[Tensor], heldout: Tensor, target: float, rate: float, most: int
) -> float:
    optimizer = Adam([*model.parameters()], rate)
    look = 1
    for step, images in zip(range(1, most + 1), batches, strict=False):
        optimizer.zero_grad()
        model.training_loss(images, None)[0].backward()
        optimizer.step()
        if step == look:
            with torch.no_grad():
                loss = model.training_loss(heldout, None)[0].item()
            if loss <= target:
                return step
            if not math.isfinite(loss):
                break
            look += max(1, step // 20)
    return math.nan


def fit_law(batch_sizes: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    """S_min and B_noise of S = S_min (1 + B_noise / B), by least squares of the logarithm of S.

    Examples:
        >>> fit_law([1, 10, 100], [100 * (1 + 20 / size) for size in [1, 10, 100]])
        (100.0, 20.0)
    """
    from scipy.optimize import curve_fit

    if len(batch_sizes) < 3 or len(batch_sizes) != len(steps) or not all(map(math.isfinite, steps)):
        raise UsageError(f"{len(steps)} numbers of steps {list(steps)}: expected three or more, all finite")

    def law(size: Any, least: float, noise: float) -> Any:
        return least + np.logaddexp(0, noise - np.log(size))

    start = [math.log(min(steps)), math.log(batch_sizes[len(batch_sizes) // 2])]
    (least, noise), _ = curve_fit(law, np.array(batch_sizes, float), np.log(steps), p0=start)
    return round(math.exp(least), 6), round(math.exp(noise), 6)
