"""Weights, frames and protocol that trainings in other libraries share with those of gpulab."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from companion.first_windows import Computed
from gpulab.data._feed import Loader
from gpulab.errors import GpulabError, UsageError
from gpulab.settings import OPTIONS, Setting
from gpulab.training._networks import NetworkRun
from gpulab.training._profiles import FINAL_LOSS_DIVISOR

PRECISIONS = (None, "float32", "float64")


class MissingLibraryError(GpulabError, ImportError):
    """A library that is not installed; the message says how to install it."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f'{library} is not installed: pip install "gpulab[{extra}]"')


def begun(net: str, seed: int, setting: Setting, size: str, **model_options: Any) -> NetworkRun:
    """Prepare a training as `gpulab.train` does: its network with initial weights, and its data.

    Raises:
        UsageError: If only torch can honour the setting (the message names the option), or if
            arguments are invalid.
    """
    honoured = ("threads", "tf32", "precision")
    refused = [
        name for name in OPTIONS if name not in honoured and getattr(setting, name) is not None
    ]
    if setting.precision not in PRECISIONS:
        refused.append(f"precision={setting.precision}")
    if setting.kind not in ("cpu", "cuda"):
        refused.append(setting.kind)
    if refused:
        raise UsageError(
            f"setting {str(setting)!r}: only torch supports {refused[0]}; other libraries support"
            f" cpu and cuda with {', '.join(honoured)} (float32 or float64)"
        )
    spec = NetworkRun.plan(
        net, setting=setting, seed=seed, profile=size, model_options=model_options
    )
    spec.draw_weights()
    return spec


def batches(spec: NetworkRun) -> Iterator[tuple[npt.NDArray[Any], bool]]:
    """Yield the frames of each window of a training, and whether its state is reset.

    Frames are in [0, 1], in the setting's precision: (1, t, 1, C, H, W) for PredNet, with one
    update on t frames; (t, 1, 1, H, W) for the autoencoder, with t updates on one image each.
    """
    loader = Loader("window", replace(spec.setting, device="cpu"))
    windows = spec.data.windows(spec.window, spec.seed)
    for frames, restart in itertools.islice(windows, spec.frames // spec.window):
        yield (
            np.stack([batch.numpy() for batch in spec.model.batches(loader.window(frames))]),
            restart,
        )


def weights_of(spec: NetworkRun) -> dict[str, npt.NDArray[Any]]:
    """Return the weights of the spec's network in the setting's precision, named as in torch."""
    return {
        name: p.detach().to(spec.setting.dtype).numpy() for name, p in spec.model.named_parameters()
    }


def final_loss(losses: Iterable[float]) -> float:
    """Return the mean loss of the last fifth of the windows, as `gpulab.train` computes it."""
    values = list(losses)
    last = values[-max(1, len(values) // FINAL_LOSS_DIVISOR) :]
    return sum(last) / len(last)


def computed(spec: NetworkRun, losses: Any, gradient: dict[str, Any]) -> Computed:
    """Convert a library's arrays to `Computed` in float64; gradients are named as in torch."""

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(array, np.float64))

    return Computed(
        tensor(losses).flatten(),
        {name: tensor(gradient[name]) for name, _ in spec.model.named_parameters()},
    )
