"""PredNet, a predictive-coding network for video, as in the authors' Chainer code."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.data._feed import Feed
from gpulab.errors import UsageError, check_counts
from gpulab.models._base import Trainable, draw_normal_
from gpulab.models._chainer import read_chainer

Frame = Float[Tensor, "b c h w"]


class LayerState(NamedTuple):
    """The state of a layer of PredNet between frames, each (B, C, H, W).

    Attributes:
        r: The representation R, the hidden state of the layer's LSTM.
        c: The cell of the LSTM.
        p: The prediction P of what the layer will see next.
    """

    r: Tensor
    c: Tensor
    p: Tensor


PredNetState = list[LayerState]
TRUNCATIONS = ("loss", "state")
KERNEL_WIDTH = 3  # the width of every convolution


class PredNet(Trainable):
    """Predicts the next frame of a film from the errors of its last prediction (predictive coding).

    A call takes frames (T, B, C, H, W) in [0, 1], and the state that an earlier call returned, or
    None. It returns the predictions, in the same shape, and the new state. Prediction t is made
    after frame t, for frame t + 1.

    This is the network of the 2021 article, whose code is written in Chainer. In contrast to the
    network of Lotter, Kreiman and Cox, it has peepholes, sigmoid gates and LeCun-normal weights,
    and is trained on the squared error of the predicted frame. A new object has weights drawn from
    seed 0; `gpulab.train` draws new ones from the seed of the run.

    Args:
        channels: The number of channels of each layer, from the bottom up. The first number is that
            of the frames.
        size: The height and width of a frame in pixels. Both are halved from layer to layer, so
            with n layers they must be multiples of 2 to the power of n − 1.
        truncation: Where backpropagation through time is truncated between two windows. `loss` is
            the published way, Chainer's `loss.unchain_backward()`. It cuts off everything that the
            loss of a window depends on. This does not include the last predictions of the layers
            above the lowest, so the gradient of the next window still reaches the convolutions
            that made them. `state` cuts off the whole state.

    Attributes:
        channels: The number of channels of each layer.
        size: The height and width of a frame in pixels.
        truncation: Where backpropagation through time is truncated.
        conv_a: For each layer except the lowest, the convolution that computes its target from the
            errors of the layer below.
        conv_p: For each layer, the convolution that computes its prediction.
        lstm: For each layer, its convolutional LSTM.

    Raises:
        UsageError: If the size cannot be halved often enough (the message names the nearest sizes
            that can), if channels or sizes are not positive integers, or if the truncation is
            unknown.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> net = gl.models.PredNet(channels=(3, 4, 8), size=(12, 16))
        >>> predictions, state = net(torch.rand(5, 1, 3, 12, 16))
        >>> predictions.shape
        torch.Size([5, 1, 3, 12, 16])

    References:
        Pietrowski et al. 2021, *Impact of GPU uncertainty on the training of predictive deep neural
        networks* (arXiv 2109.01451, since retracted); Lotter, Kreiman, Cox 2016, *Deep predictive
        coding networks for video prediction and unsupervised learning* (arXiv 1605.08104).
    """

    sequential: ClassVar[bool] = True
    # Compiling `training_loss` would unroll a window of 20 frames into a program 20 times as long.
    compiled_part: ClassVar[str] = "step"

    def __init__(
        self,
        channels: Sequence[int] = (3, 48, 96, 192),
        size: tuple[int, int] = (120, 160),
        truncation: str = "loss",
    ) -> None:
        super().__init__()
        if truncation not in TRUNCATIONS:
            raise UsageError(f"truncation={truncation!r}: expected one of {', '.join(TRUNCATIONS)}")
        channels = check_counts("channels", channels)
        height, width = check_counts("size", size, ("height", "width"))
        _check_divisible((height, width), len(channels))
        self.channels = channels
        self.size = (height, width)
        self.truncation = truncation
        conv = functools.partial(nn.Conv2d, kernel_size=KERNEL_WIDTH, padding=KERNEL_WIDTH // 2)
        conv_a = [conv(2 * lower, count) for lower, count in itertools.pairwise(channels)]
        conv_p = [conv(count, count) for count in channels]
        # The inputs of a layer's LSTM are its errors, positive and negative, and the representation
        # of the layer above. The top layer has none above it, hence the 0.
        lstm = [
            ConvLSTM((2 * count, upper), count, self.layer_size(layer))
            for layer, (count, upper) in enumerate(itertools.pairwise((*channels, 0)))
        ]
        self.conv_a: Sequence[nn.Conv2d] = nn.ModuleList(conv_a)  # type: ignore[assignment]
        self.conv_p: Sequence[nn.Conv2d] = nn.ModuleList(conv_p)  # type: ignore[assignment]
        self.lstm: Sequence[ConvLSTM] = nn.ModuleList(lstm)  # type: ignore[assignment]
        self.draw_weights(torch.Generator().manual_seed(0))

    @classmethod
    def from_chainer(cls, file: str | Path) -> PredNet:
        """Load a network from a `.model` file saved by the authors' Chainer code.

        Args:
            file: The file. Its arrays determine the number of layers and channels, and the size of
                a frame.

        Returns:
            The network. Training starts from its weights.

        Raises:
            DataError: If the file is missing or damaged, or does not contain a PredNet saved by the
                authors' code.
        """
        return read_chainer(file, cls)

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw LeCun-normal weights from a generator, and set all biases to zero.

        Args:
            generator: The generator of the random numbers, which are drawn in float32 on its
                device.
        """
        for conv in (*self.conv_a, *self.conv_p):
            draw_normal_(conv.weight, conv.in_channels * KERNEL_WIDTH**2, generator)
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        for cell in self.lstm:
            cell.draw_weights(generator)

    def forward(
        self, frames: Float[Tensor, "t b c h w"], state: PredNetState | None = None
    ) -> tuple[Float[Tensor, "t b c h w"], PredNetState]:
        """Predict a frame after each frame of a film.

        Args:
            frames: Frames (T, B, C, H, W), numbers in [0, 1].
            state: The state that an earlier call returned; None for a state of zeros.

        Returns:
            The predictions, (T, B, C, H, W), where prediction t is for frame t + 1, and the state
            after the last frame, a `LayerState` for each layer.

        Raises:
            UsageError: If the frames have a different shape.

        Examples:
            >>> import torch
            >>> import gpulab as gl
            >>> predictions, state = gl.models.PredNet((3, 4), (16, 16))(
            ...     torch.zeros(1, 1, 3, 16, 16)
            ... )
            >>> predictions.shape, len(state)
            (torch.Size([1, 1, 3, 16, 16]), 2)
        """
        expected = (self.channels[0], *self.size)
        if frames.ndim != 5 or tuple(frames.shape[2:]) != expected:
            raise UsageError(
                f"frames of shape {tuple(frames.shape)}: expected (T, B,"
                f" {', '.join(map(str, expected))})"
            )
        state = (
            self.initial_state(frames[0])
            if state is None
            else [LayerState(*layer) for layer in state]
        )
        predictions = []
        for frame in frames:
            state = self.step(frame, state)
            predictions.append(state[0].p)
        return torch.stack(predictions), state

    def initial_state(self, frame: Frame) -> PredNetState:
        """Make a state of zeros.

        Args:
            frame: A frame (B, C, H, W) with the batch size, the type and the device of the state.

        Returns:
            A `LayerState` for each layer, from the bottom up.
        """
        shapes = [
            (len(frame), channels, *self.layer_size(layer))
            for layer, channels in enumerate(self.channels)
        ]
        return [LayerState(zeros, zeros, zeros) for zeros in map(frame.new_zeros, shapes)]

    def check_state(self, state: PredNetState | None) -> None:
        """Check that a state has the shapes of this network, for a batch of one film.

        Args:
            state: A state that `training_loss` may have returned.

        Raises:
            UsageError: If the state has different shapes. The message names both.
        """
        if state is None:
            return
        shapes = [[tuple(tensor.shape) for tensor in layer] for layer in state]
        expected = [  # R, the cell and the prediction of a layer have the same shape
            3 * [(1, channels, *self.layer_size(layer))]
            for layer, channels in enumerate(self.channels)
        ]
        if shapes != expected:
            raise UsageError(f"state with shapes {shapes}: expected {expected}")

    def step(self, frame: Frame, state: PredNetState) -> PredNetState:
        """Process one frame: bottom-up comparison with the predictions, then top-down prediction.

        Args:
            frame: A frame (B, C, H, W), numbers in [0, 1].
            state: The state after the previous frame.

        Returns:
            The state after this frame.
        """
        return self.top_down(self.bottom_up(frame, state), state)

    def bottom_up(self, frame: Frame, state: PredNetState) -> list[Tensor]:
        """Compute the errors of each layer's last prediction, from the bottom up.

        The target of the lowest layer is the frame. The target of any other layer is computed from
        the errors of the layer below.

        Args:
            frame: A frame (B, C, H, W), numbers in [0, 1].
            state: The state after the previous frame.

        Returns:
            The error units of each layer, (B, 2C, H, W): the positive and the negative part of the
            difference between target and prediction.
        """
        errors: list[Tensor] = []
        for layer, (_, _, prediction) in enumerate(state):
            target = frame
            if layer > 0:
                target = F.max_pool2d(F.relu(self.conv_a[layer - 1](errors[-1])), 2)
            difference = target - prediction
            errors.append(F.relu(torch.cat([difference, -difference], 1)))
        return errors

    def top_down(self, errors: list[Tensor], state: PredNetState) -> PredNetState:
        """Compute the next state from the top layer down: representation, then prediction.

        Args:
            errors: The error units that `bottom_up` returned.
            state: The state after the previous frame.

        Returns:
            A `LayerState` for each layer, from the bottom up. The prediction of the lowest layer is
            clipped at 1.
        """
        next_state: PredNetState = []  # of the layers above, from the bottom up
        for layer in reversed(range(len(state))):
            inputs = [errors[layer]]
            if next_state:
                inputs.append(F.interpolate(next_state[0].r, scale_factor=2, mode="nearest"))
            r, c = self.lstm[layer](inputs, state[layer].r, state[layer].c)
            p = F.relu(self.conv_p[layer](r))
            next_state.insert(0, LayerState(r, c, p.clamp(max=1.0) if layer == 0 else p))
        return next_state

    def batches(self, window: Float[Tensor, "t c h w"]) -> Iterator[Float[Tensor, "t b c h w"]]:
        """Yield the whole window as a single batch, so that there is one update per window.

        Args:
            window: Frames (T, C, H, W).

        Yields:
            The window as a batch of one film, (T, 1, C, H, W).
        """
        yield window[:, None]

    def training_loss(
        self, batch: Float[Tensor, "t b c h w"] | Feed, state: PredNetState | None
    ) -> tuple[Tensor, Tensor, PredNetState | None]:
        """Predict each frame of the batch from the frames before it, and compute the errors.

        The first frame is not predicted.

        Args:
            batch: Frames (T, B, C, H, W), or a `Feed`, which yields them one after the other.
            state: The state that this method returned for the previous window; None at the
                beginning.

        Returns:
            Three things: the sum of the mean squared errors, a scalar to differentiate; the mean
            squared error of each predicted frame, (T − 1,); and the next state, detached from the
            graph.
        """
        if state is not None and self.truncation == "loss":
            state = self._chain_to_predictions(state)
        if not isinstance(batch, Tensor):
            return self._published_loop(batch, state)
        predictions, next_state = self(batch[:-1], state)
        errors = frame_errors(predictions, batch[1:])
        return errors.sum(), errors.detach(), detach_state(next_state)

    def _chain_to_predictions(self, state: PredNetState) -> PredNetState:
        """Connect the predictions of the upper layers to the convolutions that made them.

        The convolutions are computed again, so that gradients of this window's loss reach their
        weights. The values of the predictions do not change.
        """
        lowest_layer, *upper_layers = (LayerState(*layer) for layer in state)
        chained_layers = [lowest_layer]
        for conv, layer in zip(self.conv_p[1:], upper_layers, strict=True):
            recomputed = conv(layer.r)
            # The weights have changed since then, so the new values differ. They are subtracted
            # again, so that only their gradient remains. The factor (P > 0) is the derivative of
            # the ReLU.
            chained_layers.append(
                layer._replace(p=layer.p + (layer.p > 0) * (recomputed - recomputed.detach()))
            )
        return chained_layers

    def _published_loop(
        self, frames: Feed, state: PredNetState | None
    ) -> tuple[Tensor, Tensor, PredNetState | None]:
        """Compute the loss frame by frame, as the published code does.

        Each prediction is compared with the next frame as soon as the loader yields it.
        """
        losses: list[Tensor] = []
        for number, frame in enumerate(frames):
            state = (
                self.initial_state(frame)
                if state is None
                else [LayerState(*layer) for layer in state]
            )
            if number > 0:
                losses.append(frame_errors(state[0].p[None], frame[None]))
            if number < len(frames) - 1:  # the last frame is the first of the next window
                state = self.step(frame, state)
        errors = torch.cat(losses)
        return errors.sum(), errors.detach(), None if state is None else detach_state(state)

    def layer_size(self, layer: int) -> tuple[int, int]:
        """Return the size of a layer's maps.

        Args:
            layer: Its number, from 0 at the bottom.

        Returns:
            (height, width) in pixels.
        """
        return self.size[0] >> layer, self.size[1] >> layer


def frame_errors(
    predictions: Float[Tensor, "t b c h w"], frames: Float[Tensor, "t b c h w"]
) -> Float[Tensor, " t"]:
    """Compute the mean squared error of each predicted frame; their sum is differentiated.

    Every engine uses this function and takes its gradient from autograd. As in the published loop,
    `backward` reads the frames again, with the content that their memory has by then.
    """
    return F.mse_loss(predictions, frames, reduction="none").flatten(1).mean(1)


class ConvLSTM(nn.Module):
    """A convolutional LSTM (Shi et al. 2015) with peepholes.

    A single convolution computes the input gate i, the forget gate f, the candidate g and the
    output gate o. The three gates also depend on the cell through peepholes, which are elementwise
    weights with the full shape of the cell.

    Args:
        in_channels: The numbers of channels of the inputs. The hidden state is a further input.
        channels: The number of channels of the hidden state and of the cell.
        size: The height and width of the maps.
    """

    def __init__(self, in_channels: tuple[int, ...], channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.groups = (*in_channels, channels)
        self.gates = nn.Conv2d(
            sum(self.groups), 4 * channels, KERNEL_WIDTH, padding=KERNEL_WIDTH // 2
        )
        self.peep_i, self.peep_f, self.peep_o = (
            nn.Parameter(torch.empty(1, channels, *size)) for _ in range(3)
        )

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw the gates' weights with the fan-in of each group of inputs; biases are zero."""
        # The groups are views of the weight. The top layer has no inputs from above.
        for group in self.gates.weight.split(self.groups, dim=1):
            if group.shape[1]:
                draw_normal_(group, group.shape[1] * KERNEL_WIDTH**2, generator)
        for peep in (self.peep_i, self.peep_f, self.peep_o):
            draw_normal_(peep, peep.numel(), generator)
        nn.init.zeros_(self.gates.bias)  # type: ignore[arg-type]

    def forward(self, inputs: list[Tensor], hidden: Frame, cell: Frame) -> tuple[Frame, Frame]:
        """Compute the new hidden state and cell from the input groups and the old ones."""
        i, f, g, o = self.gates(torch.cat([*inputs, hidden], 1)).chunk(4, dim=1)
        i = i + self.peep_i * cell
        f = f + self.peep_f * cell
        new_cell = g.tanh() * i.sigmoid() + f.sigmoid() * cell
        # Like the other gates, the output gate sees the old cell.
        return (o + self.peep_o * cell).sigmoid() * new_cell.tanh(), new_cell


def detach_state(state: PredNetState) -> PredNetState:
    """Return the same state, detached from the graph that made it."""
    return [LayerState(*(tensor.detach() for tensor in layer)) for layer in state]


def _check_divisible(size: tuple[int, int], layers: int) -> None:
    """Raise `UsageError` unless a frame of this size can be halved for each layer but the first."""
    divisor = 2 ** (layers - 1)
    if all(edge % divisor == 0 for edge in size):
        return
    # The nearest sizes that can. −(−a // b) rounds a / b up.
    rounded_down = tuple(max(divisor, edge // divisor * divisor) for edge in size)
    rounded_up = tuple(max(divisor, -(-edge // divisor) * divisor) for edge in size)
    halve = f"{layers} layers halve a frame {layers - 1} times"
    multiples = (
        f"height and width must be multiples of {divisor}, for example {rounded_down} or"
        f" {rounded_up}"
    )
    raise UsageError(f"size={tuple(size)}: {halve}, so {multiples}")
