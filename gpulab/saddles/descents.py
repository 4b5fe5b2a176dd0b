"""One training from a saddle: what an optimiser does there, step by step, in the arithmetic that is in force."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import UsageError, check_count
from gpulab.saddles.critical import CriticalPoint
from gpulab.saddles.hessians import Batch
from gpulab.saddles.operators import trained
from gpulab.saddles.optimizers import Factory, Law, build, name_of
from gpulab.saddles.theory import LinearAutoencoderSaddle
from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd

Saddle = LinearAutoencoderSaddle | CriticalPoint

GROWTH = 0.05  # η λ where no learning rate is given, unless that is too large for the steepest upward direction
ADAPTIVE = 1e-3  # the learning rate where none is given and no law makes one: Adam's usual one
FORGOTTEN = 1e-4  # batches whose push has become this small beside the first one's are not looked at


def trajectory(
    saddle: Saddle,
    setting: str | Setting = "cpu",
    *,
    optimizer: str | Factory = "sgd",
    learning_rate: float = 0.1,
    steps: int = 300,
    perturbation: float = 0.0,
) -> pd.DataFrame:
    """Follow an optimiser on its way from a saddle, in the plane of the least and the greatest curvature.

    Args:
        saddle: From `gpulab.saddles.linear_autoencoder_saddle` or `gpulab.saddles.find_critical_point`.
        setting: The arithmetic, such as `cpu:precision=bfloat16`.
        optimizer: `sgd` (gradient descent), `momentum` (0.9), `rmsprop` or `adam`, with torch's constants; or a
            function of weights and `lr=` that returns a `torch.optim.Optimizer`.
        learning_rate: The optimiser's.
        steps: How many steps to make; fewer are made where the weights become infinite or NaN.
        perturbation: How far to move the weights along the direction of the least curvature first.

    Returns:
        A data frame with a row for the start and one after each step: the signed distances from the saddle `along` the
        direction of the least curvature and `across`, along that of the greatest; and the `loss`.

    Raises:
        UsageError: Where the loss curves down in no direction, for a search that found no critical point, for an
            unknown or unfit optimiser, and for `steps` that are no whole number from 1.
        GpulabError: For a setting that cannot run here.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1])
        >>> path = gl.saddles.trajectory(saddle, "cpu:precision=float64", perturbation=0.01)
        >>> bool(path.loss.iloc[-1] < path.loss.iloc[0])
        True
    """
    import pandas as pd

    check_count("steps", steps)
    parsed = Setting.parse(setting)
    check_start(saddle.model, saddle, None)
    rows = []
    with parsed.apply():
        descent = Descent(saddle, parsed, optimizer, learning_rate)
        plane = torch.stack([saddle.direction, saddle.steepest]).to(descent.saddle)
        descent.move_to(descent.saddle + perturbation * plane[0])
        for loss, displacement in itertools.islice(descent.walk(), steps + 1):
            row = [*(plane @ displacement).tolist(), float(loss)]
            if not all(map(math.isfinite, row)):
                break
            rows.append(row)
    return pd.DataFrame(rows, columns=["along", "across", "loss"])


class Descent:
    """A training from a saddle, in the arithmetic that is in force."""

    def __init__(
        self,
        saddle: Saddle,
        setting: Setting,
        optimizer: str | Factory,
        rate: float | None,
        batch_size: int | None = None,
        seed: int = 0,
        master_weights: bool = False,
    ) -> None:
        self.objective, self.batch_size, self.seed = saddle.objective, batch_size, seed
        self.net = copy.deepcopy(saddle.model).to(setting.device, setting.dtype)
        self.parameters = trained(self.net)
        self.float64_device = "cpu" if setting.kind == "mps" else setting.device  # an Apple GPU has no float64
        self.weights = self.parameters  # those that the optimiser moves
        if master_weights:
            self.weights = [nn.Parameter(p.detach().to(self.float64_device, torch.float64)) for p in self.parameters]
        self.optimizer = build(optimizer, self.weights, 1.0 if rate is None else rate)
        self.name = name_of(optimizer, self.optimizer)
        if rate is None:
            plain = self.name.startswith(("sgd", "momentum"))
            rate = min(GROWTH / -saddle.curvature, 1 / float(saddle.eigenvalues[-1])) if plain else ADAPTIVE
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self.rate, self.law = rate, Law.of(self.optimizer)
        self.inputs, self.targets = (
            tensor.to(setting.device, setting.dtype if tensor.is_floating_point() else None) for tensor in saddle.batch
        )
        self.saddle = self.flat(trained(saddle.model))
        self.values, self.directions = (tensor.to(self.float64_device) for tensor in saddle.unstable)
        self.moved: list[float] = []  # of each step, the share of the weights that it changed

    def walk(self) -> Iterator[tuple[Tensor, Float[Tensor, " n"]]]:
        """Make steps without end; before each, the loss and the displacement from the saddle."""
        for batch in self.batches():
            loss, gradients = self.gradient(batch)
            yield loss, self.flat(self.weights) - self.saddle
            self._step(gradients)

    def noise(self) -> Float[Tensor, " m"]:
        """The displacement along each unstable direction that stands for the errors made at the saddle.

        A step moves by −η g. What moved n steps ago has grown by ρⁿ since, so that the first ones count most.
        """
        if self.batch_size is not None and (self.law is None or math.isfinite(self.law.longest)):
            return torch.full_like(self.values, math.nan).cpu()
        self.move_to(self.saddle)
        pushes = torch.zeros_like(self.values)
        stored = self.unstable(self.flat(self.weights) - self.saddle)
        for number, batch in enumerate(self.batches()):
            # The gradient at weights that were rounded has −λ times their displacement in it.
            error = self.unstable(self.flat(self.gradient(batch)[1])) - self.values * stored
            if self.batch_size is None:
                return (stored + error / self.values).cpu()
            assert self.law is not None
            weight = self.law.impulse(-self.values) * self.law.growth(-self.values) ** -(number + 1)
            pushes -= self.rate * error * weight
            if float(weight.max()) < FORGOTTEN:
                break
        return (stored + pushes).cpu()

    def batches(self) -> Iterator[Batch]:
        """The data in an order drawn from the seed, over and over; each pass has its own."""
        count = len(self.inputs)
        for number in itertools.count():
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            order = torch.randperm(count, generator=generator).to(self.inputs.device)
            if self.batch_size is None:
                yield from itertools.repeat((self.inputs[order], self.targets[order]))
            else:  # whole batches only: a few samples left over would be noisier than all the others
                for chosen in order[: count - count % self.batch_size].split(self.batch_size):
                    yield self.inputs[chosen], self.targets[chosen]

    def gradient(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss of a batch and its gradients."""
        loss = self.objective(self.net, batch)
        return loss.detach(), torch.autograd.grad(loss, self.parameters)

    @torch.no_grad()
    def move_to(self, weights: Float[Tensor, " n"]) -> None:
        """Put the network at these weights."""
        # Copied, not views of one vector: where a weight lies in memory may decide how a product of it is rounded.
        for weight, piece in zip(self.weights, weights.split([w.numel() for w in self.weights]), strict=True):
            weight.copy_(piece.view_as(weight))
        self._round()

    @torch.no_grad()
    def _step(self, gradients: Sequence[Tensor]) -> None:
        before = [weight.clone() for weight in self.weights]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient.to(weight)
        self.optimizer.step()
        self._round()
        changed = [(weight != old).sum() for weight, old in zip(self.weights, before, strict=True)]
        self.moved.append(int(torch.stack(changed).sum()) / len(self.saddle))

    def _round(self) -> None:
        """Round the master weights, if there are any, to what the gradients are computed with."""
        if self.weights is not self.parameters:
            for parameter, weight in zip(self.parameters, self.weights, strict=True):
                parameter.copy_(weight)

    def unstable(self, vector: Float[Tensor, " n"]) -> Float[Tensor, " m"]:
        """The parts of a vector along the directions that lead down."""
        return (self.directions * vector[:, None]).sum(0)

    def flat(self, tensors: Iterable[Tensor]) -> Float[Tensor, " n"]:
        """One vector of tensors, in float64."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(self.float64_device).double()


def check_start(model: nn.Module, saddle: Saddle, batch_size: int | None) -> None:
    """`UsageError` for a point, a model or a batch size with which there is no escape."""
    if not len(saddle.unstable[0]):
        least = saddle.curvature
        raise UsageError(f"no direction leads down: the least curvature is {least:.3g}, and there is no escape")
    if isinstance(saddle, CriticalPoint) and not saddle.found:
        raise UsageError(f"this is a {saddle.kind}, no critical point: {saddle.message}")
    if wrong := [item for item in saddle.batch if not isinstance(item, Tensor)]:
        raise UsageError(f"the data of the saddle are a {type(wrong[0]).__name__}: expected tensors")
    shapes = [[tuple(parameter.shape) for parameter in trained(net)] for net in (model, saddle.model)]
    if shapes[0] != shapes[1]:
        raise UsageError(f"a model with weights {shapes[0]}: those of the saddle are {shapes[1]}")
    if batch_size is not None:
        check_count("batch_size", batch_size, len(saddle.batch[0]))
