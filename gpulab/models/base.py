"""What the training loop asks of a model, and the part that gpulab's own models share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)
BITS = 32


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


def flip_bit(model: Model, weight: int = 0, bit: int = 0) -> Model:
    """Change one bit of one weight of a model in place; returns the model.

    `weight` counts through the model's parameters in their order. `bit` counts from the last place of the
    fraction, 0, up to the sign, 31: bit 0 is the smallest change that there is. Doing it twice undoes it.
    Raises `UsageError` where there is no such weight or bit, or the weight is not float32.

    >>> layer = torch.nn.Linear(1, 1)
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(1.0)
    >>> flip_bit(layer).weight.item()
    1.0000001192092896

    Source: Summers, Dinneen 2021, *Nondeterminism and instability in neural network optimization*
    (arXiv 2103.04514).
    """
    check_weight(model, weight)
    if not isinstance(bit, int) or not 0 <= bit < BITS:
        raise UsageError(f"bit {bit!r}: expected a whole number from 0, the last place, to {BITS - 1}, the sign")
    for parameter in model.parameters():
        if weight < parameter.numel():
            break
        weight -= parameter.numel()
    if parameter.dtype != torch.float32:
        raise UsageError(f"a bit is flipped in float32 weights, and these are {parameter.dtype}")
    with torch.no_grad():
        place = torch.unravel_index(torch.tensor(weight), parameter.shape)
        value = parameter[place].cpu()
        mask = torch.tensor(1 << bit if bit < BITS - 1 else -(1 << bit), dtype=torch.int32)
        parameter[place] = (value.view(torch.int32) ^ mask).view(torch.float32).to(parameter.device)
    return model


def check_weight(model: nn.Module, weight: int | None) -> None:
    """Raise `UsageError` unless the model has a weight of that number; None asks for none."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if weight is not None and not (type(weight) is int and 0 <= weight < count):
        raise UsageError(f"flip {weight!r}: expected the number of a weight, from 0 to {count - 1}")


def bytes_of(tensor: Tensor) -> bytes:
    """The bits of a tensor, for a digest."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
