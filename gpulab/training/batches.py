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
    """How noisy a gradient is at one place: what `noise_scale` returns.

    Attributes:
        gradient: The squared length of the true gradient, |G|². The estimate is without bias, so noise can bring it
            below zero.
        variance: The trace of the covariance of one example's gradient, tr Σ.
    """

    gradient: float
    variance: float

    @property
    def scale(self) -> float:
        """The noise scale tr Σ / |G|², in examples per batch; infinite where the estimate of |G|² is not above zero."""
        return self.variance / self.gradient if self.gradient > 0 else float("inf")


def noise_scale(model: Trainable, examples: Tensor, batch_size: int = 16) -> NoiseScale:
    """Estimate the noise scale of a model's gradient at its present weights: how large a batch is worth its cost.

    This is the simple noise scale of the source. In a batch of that size the noise of the gradient is as large as the
    gradient itself. Much smaller batches gain from more examples nearly in proportion, much larger ones hardly gain. A
    gradient averaged over b examples has the squared length |G|² + tr Σ / b in expectation. It is measured for small
    batches and for all examples together, and the two equations are solved for |G|² and tr Σ.

    Args:
        model: A network whose `training_loss` is the mean over a batch. Its gradients and weights are left as they are.
        examples: A tensor (n, …) of examples that were drawn independently; n is a multiple of `batch_size`, at least
            twice it.
        batch_size: How many examples the small batches have.

    Returns:
        A `NoiseScale` with `gradient` (|G|²), `variance` (tr Σ) and `scale`, the quotient tr Σ / |G|², in examples.

    Raises:
        UsageError: For a number of examples that does not give two or more full batches.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.training.noise_scale(gl.models.Autoencoder((16,)), torch.rand(64, 1, 28, 28)).variance > 0
        True

    References:
        McCandlish, Kaplan, Amodei et al. 2018, *An empirical model of large-batch training* (arXiv 1812.06162),
        appendix A.1.
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
    """Count the updates that Adam needs to reach a loss, for each batch size at each learning rate.

    The loss is that on all held-out images. It is computed after updates 1, 2, 3 and so on, and from the fortieth on
    ever more rarely: each time after a twentieth more updates.

    Args:
        model: Each training starts from its weights; the model itself is left as it is.
        data: Images, as `gpulab.load` gives them.
        target: The held-out loss at which a training ends: the mean squared error, of pixels in [0, 1].
        batch_sizes: The numbers of images per update to compare.
        learning_rates: The learning rates to try for each batch size.
        seed: What the order of images is drawn from.
        most: The number of updates after which a training is given up.
        progress: Whether to show a progress bar.

    Returns:
        A data frame with a row for each batch size and learning rate. Its columns are `batch_size`, `learning_rate`,
        `steps` (NaN where the target was not reached), `examples` (steps × batch size) and `best` (whether no other
        learning rate took fewer steps at this batch size).

    Raises:
        UsageError: For a sequence of frames, whose examples are not independent.

    Examples:
        >>> import gpulab as gl
        >>> net, rates = gl.models.Autoencoder((16,)), [3e-3, 1e-2]
        >>> table = gl.training.steps_to_target(net, gl.load("digits"), 0.15, [16], rates, progress=False)
        >>> table[["learning_rate", "best"]].values.tolist()
        [[0.003, False], [0.01, True]]

    References:
        McCandlish, Kaplan, Amodei et al. 2018, *An empirical model of large-batch training* (arXiv 1812.06162).
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
    """Fit how the number of steps to a loss falls with the batch size: S = S_min (1 + B_noise / B).

    The fit is by least squares of the logarithm of S.

    Args:
        batch_sizes: B, three or more, in examples.
        steps: S for each of them, all finite, such as the best `steps` of `steps_to_target`.

    Returns:
        S_min, the steps that even the largest batch needs, and B_noise, the batch size at which it takes twice as many.

    Raises:
        UsageError: For fewer than three pairs, unequal numbers of both, or steps that are not finite.

    Examples:
        >>> import gpulab as gl
        >>> gl.training.fit_law([1, 10, 100], [100 * (1 + 20 / size) for size in [1, 10, 100]])
        (100.0, 20.0)

    References:
        McCandlish, Kaplan, Amodei et al. 2018, *An empirical model of large-batch training* (arXiv 1812.06162).
    """
    from scipy.optimize import curve_fit

    if len(batch_sizes) < 3 or len(batch_sizes) != len(steps) or not all(map(math.isfinite, steps)):
        raise UsageError(f"{len(steps)} numbers of steps {list(steps)}: expected three or more, all finite")

    def law(size: Any, least: float, noise: float) -> Any:
        return least + np.logaddexp(0, noise - np.log(size))

    start = [math.log(min(steps)), math.log(batch_sizes[len(batch_sizes) // 2])]
    (least, noise), _ = curve_fit(law, np.array(batch_sizes, float), np.log(steps), p0=start)
    return round(math.exp(least), 6), round(math.exp(noise), 6)
