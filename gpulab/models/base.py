"""What the training loop asks of a model, and the part that gpulab's own models share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Trainable(nn.Module):
    """A model that `gpulab.train` can train. A model of your own derives from this class.

    The loop hands over windows of frames in [0, 1], shaped (frames, C, H, W). `batches` cuts a
    window into what one update sees; `training_loss` returns what `backward` is called on, the mean
    squared error per frame for the history, and a state for the next batch, cut off from the graph:
    None, or tensors and numbers, in lists, tuples or dictionaries if need be. `fresh` is true until
    weights are loaded: training draws the weights of a fresh model from the seed.
    """

    sequential: ClassVar[bool] = False
    fresh: bool = True

    def batches(self, window: Float[Tensor, "t c h w"]) -> Iterator[Tensor]:
        """The pieces of a window after each of which the weights are updated."""
        raise NotImplementedError

    def training_loss(self, batch: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """(what to differentiate, the mean squared error of each frame (n,), the next state)."""
        raise NotImplementedError

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw initial weights from a generator, in float32 on its own device, whatever the setting is."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load weights, which training then starts from."""
        self.fresh = False
        return super().load_state_dict(state_dict, *args, **options)


def draw_normal_(parameter: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Fill with a normal of variance 1 / fan_in (LeCun et al. 1998), drawn on the generator's device in float32."""
    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device=generator.device).cpu()
    with torch.no_grad():
        parameter.copy_(drawn / math.sqrt(fan_in))


def zero_bias_(layer: nn.Linear | nn.Conv2d) -> None:
    """Set a layer's bias to zero."""
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
