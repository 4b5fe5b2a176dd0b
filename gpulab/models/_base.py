"""The interface of models for the training loop, and functions that gpulab's models share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)

# The types of a batch and of a state depend on the network. PredNet takes a tensor or a `Feed`, and
# its state is a list of `LayerState`. An autoencoder takes images and has no state. The training
# loop passes both on without using their content.
Batch = Any
ModelState = Any


class Trainable(nn.Module):
    """The base class of gpulab's networks, which `gpulab.train` trains.

    The training loop gives windows of frames to the model. A derived class defines three methods:
    `batches` splits a window into batches, one for each update; `training_loss` computes the loss
    that is differentiated; and `draw_weights` draws the initial weights. It also needs a `forward`,
    with which `Run.predict` computes outputs for held-out data. To train a network of your own,
    write a training function: see `gpulab.train`.

    Attributes:
        sequential: Whether the order of the frames matters, so that a state is passed from batch to
            batch. False by default.
        threads: The number of CPU threads beyond which the model does not get faster; None if it is
            not known.
        compiled_part: The name of the method that is compiled under a setting with `compile`.
        size: The height and width of the frames.
        fresh: Whether training draws the weights from the seed of its run. `load_state_dict` sets
            it to False: training then starts from the loaded weights.
    """

    sequential: ClassVar[bool] = False
    threads: ClassVar[int | None] = None
    compiled_part: ClassVar[str] = "training_loss"
    size: tuple[int, int]
    fresh: bool = True

    def batches(self, window: Float[Tensor, "t c h w"]) -> Iterator[Tensor]:
        """Split a window into batches; the weights are updated after each of them.

        Args:
            window: Frames (T, C, H, W), numbers in [0, 1].

        Yields:
            The batches, in the shape that `training_loss` takes.
        """
        raise NotImplementedError

    def training_loss(self, batch: Batch, state: ModelState) -> tuple[Tensor, Tensor, ModelState]:
        """Compute the loss of one batch, on which the loop calls `backward`.

        Args:
            batch: A tensor; or a `Feed`, which yields the frames one after the other.
            state: The state that this method returned for the previous batch; None at the beginning
                of a sequence.

        Returns:
            Three things: the loss to differentiate, a scalar; the mean squared error of each frame,
            (n,), for the history; and the next state, detached from the graph. A state is None, or
            a list of tensors for each layer.
        """
        raise NotImplementedError

    def check_state(self, state: ModelState) -> None:
        """Check a state that was read from a file, such as a checkpoint, before resuming from it.

        A tensor of the wrong shape may broadcast, so that no operation raises an error. By default
        every state is accepted.

        Args:
            state: A state that `training_loss` may have returned.

        Raises:
            UsageError: If `training_loss` cannot have returned this state.
        """

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw the initial weights.

        Args:
            generator: The generator of the random numbers. They must be drawn in float32 on the
                generator's device, whatever the setting is.
        """
        raise NotImplementedError

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> tuple[list[str], list[str]]:
        """Load weights as `torch.nn.Module.load_state_dict` does; training then starts from them.

        Args:
            state_dict: Tensors by the names of parameters and buffers.
            strict: Whether missing and unexpected names are errors.
            assign: Whether the tensors themselves become the weights, instead of their values.

        Returns:
            What torch's method returns: the missing and the unexpected names.
        """
        self.fresh = False
        return super().load_state_dict(state_dict, strict, assign)


def draw_normal_(parameter: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Fill a parameter with normal numbers of variance 1 / fan_in (LeCun et al. 1998).

    They are drawn and scaled in float32, whatever the type of the parameter is.
    """
    normal_values = torch.randn(
        parameter.shape, generator=generator, dtype=torch.float32, device=generator.device
    ).cpu()
    with torch.no_grad():
        parameter.copy_(normal_values / math.sqrt(fan_in))


def draw_linear_(model: nn.Module, generator: torch.Generator) -> None:
    """Draw LeCun-normal weights for every linear layer; biases are zero."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            draw_normal_(layer.weight, layer.in_features, generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def flip_bit(model: Model, weight: int = 0) -> Model:
    """Flip the last bit of one weight in place, the smallest possible change.

    A second call with the same arguments restores the weight.

    Args:
        model: A network with float32 weights.
        weight: The number of the weight, from 0, counted through all of the model's parameters in
            their order.

    Returns:
        The same model.

    Raises:
        UsageError: If there is no such weight, or the weight is not float32.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> layer = torch.nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _ = layer.weight.fill_(1.0)
        >>> gl.models.flip_bit(layer).weight.item()
        1.0000001192092896

    References:
        Summers, Dinneen 2021, *Nondeterminism and instability in neural network optimization*
            (arXiv 2103.04514).
    """
    check_weight(model, weight)
    # Find the parameter that has the weight, and the number of the weight within it. There is one,
    # because the number was checked.
    number_within = weight
    for parameter in model.parameters():
        if number_within < parameter.numel():
            break
        number_within -= parameter.numel()
    if parameter.dtype != torch.float32:
        raise UsageError(
            f"flip_bit: expected float32 weights, got {parameter.dtype}; convert the model first"
        )
    position = torch.unravel_index(torch.tensor(number_within), parameter.shape)
    bits = parameter.detach().view(torch.int32)  # the memory of the parameter, seen as integers
    bits[position] ^= 1
    return model


def check_weight(model: nn.Module, weight: int | None) -> None:
    """Raise `UsageError` unless the model has a weight of this number; None is always accepted."""
    count = sum(parameter.numel() for parameter in model.parameters())
    is_valid = weight is None or (type(weight) is int and 0 <= weight < count)
    if not is_valid:
        raise UsageError(f"flip {weight!r}: expected the number of a weight, from 0 to {count - 1}")
