"""The first window of a training: its losses and its gradient."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import gpulab as gl
from gpulab.data._feed import Loader
from gpulab.models import Trainable
from gpulab.store.recorded import recorded_table
from gpulab.training._networks import NetworkRun
from gpulab.wording import COPIED, OVERWRITTEN

if TYPE_CHECKING:
    import pandas as pd


class FirstWindow:
    """A step on a training's first window, whose frames a `loader` provides: see `gpulab.data`.

    `gpulab.audit` and `gpulab.record` accept it as a step; it updates nothing. `net` is the name of
    a network, whose weights are drawn from `seed`, or a trained network. `frames` limits the length
    of the window. `options` are the options of `gpulab.train` that affect the start of a training:
    `data`, `data_options`, `flip`, `draws`, and the `setting` whose device draws the weights.

    >>> FirstWindow("autoencoder", "reused", profile="smoke").gradient("cpu").losses.shape
    torch.Size([20])
    """

    def __init__(
        self,
        net: str | Trainable = "prednet",
        loader: str = "window",
        seed: int = 0,
        profile: str = "quick",
        frames: int | None = None,
        **options: Any,
    ) -> None:
        self.spec = NetworkRun.plan(net, seed=seed, profile=profile, loader=loader, **options)
        self.spec.draw_weights()
        self.frames = next(self.spec.data.windows(self.spec.window, seed)).frames[:frames]
        self.loader = loader

    @contextlib.contextmanager
    def prepared(self, setting: gl.Setting) -> Iterator[Callable[[], Computed]]:
        """Yield the step with its model on the device, so that audits do not trace the copying.

        The step can be called once.
        """
        model = copy.deepcopy(self.spec.model).to(setting.device, setting.dtype)
        setattr(model, model.compiled_part, setting.compiled(getattr(model, model.compiled_part)))
        batches = Loader(self.loader, setting).batches(model, self.frames)

        def once() -> Computed:
            losses = []
            for batch in batches:
                objective, per_frame, _ = model.training_loss(batch, None)
                objective.backward()
                losses.append(per_frame)
            gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            return Computed(torch.cat(losses), gradient)

        yield once

    def __call__(self, setting: gl.Setting) -> Computed:
        """Run the step."""
        with self.prepared(setting) as once:
            return once()

    def gradient(self, setting: gl.Setting | str = "cpu") -> Computed:
        """The losses and the gradient under a setting, on the CPU in float64."""
        parsed = gl.Setting.parse(setting)
        with parsed.apply():
            computed = self(parsed)
        gradient = {name: g.detach().to("cpu").double() for name, g in computed.gradient.items()}
        return Computed(computed.losses.to("cpu").double(), gradient)


@dataclass(frozen=True)
class Computed:
    """The `losses`, one per frame (t,), and the `gradient` of each parameter by name."""

    losses: Tensor
    gradient: dict[str, Tensor]

    def against(self, other: Computed) -> dict[str, float]:
        """Compare with another step: equal losses, and distance and cosine of the gradients."""
        own_gradient, other_gradient = (
            torch.cat([gradient[name].reshape(-1) for name in other.gradient])
            for gradient in (self.gradient, other.gradient)
        )
        return {
            "same_losses": int((self.losses == other.losses).sum()),
            "losses": len(self.losses),
            "gradient_difference": float(
                (own_gradient - other_gradient).norm() / other_gradient.norm()
            ),
            "cosine": float(
                own_gradient @ other_gradient / (own_gradient.norm() * other_gradient.norm())
            ),
        }


def recorded_windows() -> pd.DataFrame:
    """The windows that `benchmarks/record.py published` (commit 6aece191) recorded.

    More columns: the `machine`; in words, the device and condition of the `gradient`, and those of
    the gradient that it is `compared_with`.
    """
    windows = recorded_table("windows").drop(columns="recorded")
    return windows.assign(
        gradient=windows.of.map(_in_words), compared_with=windows.against.map(_in_words)
    )


def _in_words(cell: str) -> str:
    """The published line, `reused`, overwrites frames on a CPU and copies them to a GPU."""
    handed, _, trip = cell.partition(", ")
    words = {
        "cpu copied": f"CPU, {COPIED}",
        "cpu reused": f"CPU, {OVERWRITTEN}",
        "cuda copied": f"GPU, {COPIED}, also by .copy()",
        "cuda reused": f"GPU, {COPIED}",
        "cuda shared": f"GPU, {OVERWRITTEN}",
    }
    return ", ".join(filter(None, [words[handed], trip]))
