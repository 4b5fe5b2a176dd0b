"""PredNet, a predictive-coding network for video, as the paper's authors wrote it in Chainer."""

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

from gpulab.data.feed import Feed
from gpulab.errors import UsageError
from gpulab.models.base import Trainable, draw_normal_
from gpulab.models.chainer import read_chainer

Frame = Float[Tensor, "b c h w"]


class LayerState(NamedTuple):
    """What a layer remembers: its representation R, the cell c, and its prediction P."""

    r: Tensor
    c: Tensor
    p: Tensor


State = list[LayerState]
TRUNCATIONS = ("loss", "state")


class PredNet(Trainable):
    """A predictive-coding network for video.

    Called on frames (T, B, C, H, W) in [0, 1], and a state or none, it returns the predictions, same shape, and the
    state. Prediction t is made after frame t, for frame t + 1.

    It predicts the next frame from the errors of the last prediction. Other than Lotter, Kreiman and Cox's, it has
    peepholes, sigmoid gates and LeCun-normal weights, and is trained on the squared error of the prediction.

    Args:
        channels: Of each layer, from the bottom up; the first is that of the frames.
        size: (height, width) of a frame in pixels, which halve once per layer.
        kernel_size: Of every convolution, published as 3.
        truncation: What backpropagation through time is cut off from between windows. `loss`, as published: from
            what the loss depends on (Chainer's `loss.unchain_backward()`). The last P of the layers above the lowest
            are not of that, so the next window's gradient reaches the convolutions that made them. `state`: from
            all of it.
        batch_size: How many films an update sees: a training window is cut into so many, each of which begins anew.
            With 1, as published, the state goes from window to window.

    Raises:
        UsageError: For a size that does not halve once per layer, naming the nearest that do, and other nonsense.

    Examples:
        >>> net = PredNet(channels=(3, 4, 8), size=(12, 16))
        >>> predictions, state = net(torch.rand(5, 1, 3, 12, 16))
        >>> predictions.shape
        torch.Size([5, 1, 3, 12, 16])

    References:
        Pietrowski et al. 2021, *Impact of GPU uncertainty on the training of predictive deep neural networks*
        (arXiv 2109.01451); Lotter, Kreiman, Cox 2016, *Deep predictive coding networks* (arXiv 1605.08104).
    """

    sequential: ClassVar[bool] = True

    def __init__(
        self,
        channels: Sequence[int] = (3, 48, 96, 192),
        size: tuple[int, int] = (120, 160),
        kernel_size: int = 3,
        truncation: str = "loss",
        batch_size: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"batch_size={batch_size!r}: expected a whole number from 1")
        if truncation not in TRUNCATIONS:
            raise UsageError(f"truncation={truncation!r}: expected {' or '.join(map(repr, TRUNCATIONS))}")
        if not channels or min(channels) < 1:
            raise UsageError(f"channels={tuple(channels)!r}: expected one positive number per layer")
        if kernel_size not in (1, 3, 5, 7, 9):
            raise UsageError(f"kernel_size={kernel_size!r}: expected 1, 3, 5, 7 or 9")
        _check_divides(size, len(channels))
        self.channels, self.size, self.kernel_size = tuple(channels), tuple(size), kernel_size
        self.truncation, self.batch_size = truncation, batch_size
        conv = functools.partial(nn.Conv2d, kernel_size=kernel_size, padding=kernel_size // 2)
        conv_a = [conv(2 * below, here) for below, here in itertools.pairwise(channels)]
        conv_p = [conv(here, here) for here in channels]
        lstm = [
            ConvLSTM((2 * here, above), here, self.layer_size(layer), kernel_size)
            for layer, (here, above) in enumerate(itertools.pairwise((*channels, 0)))
        ]
        self.conv_a: Sequence[nn.Conv2d] = nn.ModuleList(conv_a)  # type: ignore[assignment]
        self.conv_p: Sequence[nn.Conv2d] = nn.ModuleList(conv_p)  # type: ignore[assignment]
        self.lstm: Sequence[ConvLSTM] = nn.ModuleList(lstm)  # type: ignore[assignment]
        self.draw_weights(torch.Generator().manual_seed(0))

    @classmethod
    def from_chainer(cls, file: str | Path) -> PredNet:
        """The network in a `.model` file saved by the authors' Chainer code."""
        return read_chainer(file, cls)

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw LeCun-normal weights; biases are zero."""
        for conv in (*self.conv_a, *self.conv_p):
            draw_normal_(conv.weight, conv.in_channels * self.kernel_size**2, generator)
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        for cell in self.lstm:
            cell.draw_weights(generator)

    def forward(
        self, frames: Float[Tensor, "t b c h w"], state: State | None = None
    ) -> tuple[Float[Tensor, "t b c h w"], State]:
        """The prediction after each frame, and the state after the last."""
        expected = (self.channels[0], *self.size)
        if frames.ndim != 5 or tuple(frames.shape[2:]) != expected:
            raise UsageError(f"frames of shape {tuple(frames.shape)}: expected (T, B, {', '.join(map(str, expected))})")
        state = self.initial_state(frames[0]) if state is None else [LayerState(*layer) for layer in state]
        predictions = []
        for frame in frames:
            state = self.top_down(self.bottom_up(frame, state), state)
            predictions.append(state[0].p)
        return torch.stack(predictions), state

    def initial_state(self, frame: Frame) -> State:
        """All zero."""
        shapes = [(len(frame), channels, *self.layer_size(layer)) for layer, channels in enumerate(self.channels)]
        return [LayerState(zeros, zeros, zeros) for zeros in map(frame.new_zeros, shapes)]

    def bottom_up(self, frame: Frame, state: State) -> list[Tensor]:
        """The error units E of each layer, from the bottom up, (B, 2C, H, W) each."""
        errors: list[Tensor] = []
        for layer, (_, _, prediction) in enumerate(state):
            target = F.max_pool2d(F.relu(self.conv_a[layer - 1](errors[-1])), 2) if layer else frame
            surprise = target - prediction
            errors.append(F.relu(torch.cat([surprise, -surprise], 1)))
        return errors

    def top_down(self, errors: list[Tensor], state: State) -> State:
        """The next state, from the top layer down: representations, then predictions."""
        following: State = []
        for layer in reversed(range(len(state))):
            inputs = [errors[layer]]
            if following:
                inputs.append(F.interpolate(following[0].r, scale_factor=2, mode="nearest"))
            r, c = self.lstm[layer](inputs, state[layer].r, state[layer].c)
            p = F.relu(self.conv_p[layer](r))
            following.insert(0, LayerState(r, c, p.clamp(max=1.0) if layer == 0 else p))
        return following

    @property
    def begins_anew(self) -> bool:
        """Whether no state goes from window to window."""
        return self.batch_size > 1 and self.training

    def batches(self, window: Float[Tensor, "t c h w"]) -> Iterator[Float[Tensor, "t b c h w"]]:
        """One update per window; in evaluation a batch of one."""
        if not self.begins_anew:
            yield window[:, None]
            return
        if (length := len(window) // self.batch_size) < 2:
            raise UsageError(f"batch_size={self.batch_size}: of a window of {len(window)} frames too few for each film")
        films = window[-length * self.batch_size :].unflatten(0, (self.batch_size, length))
        yield films.transpose(0, 1).contiguous()

    def training_loss(
        self, batch: Float[Tensor, "t b c h w"] | Feed, state: State | None
    ) -> tuple[Tensor, Tensor, State | None]:
        """Predict every frame of the batch but the first, each from the frames before it.

        The loss, the sum of mean squared errors, is written here, in `_published_loop`, and in `prednet_windows`.
        """
        if self.begins_anew:
            state = None
        if state is not None and self.truncation == "loss":
            state = self._chained(state)
        if not isinstance(batch, Tensor):
            return self._published_loop(batch, state)
        predictions, after = self(batch[:-1], state)
        errors = (predictions - batch[1:]).square().flatten(1).mean(1)
        return errors.sum(), errors.detach(), None if self.begins_anew else detached(after)

    def _chained(self, state: State) -> State:
        """The same numbers, each P but the lowest depending once more on the convolution that made it, not on R."""
        lowest, *above = (LayerState(*layer) for layer in state)
        again = [conv(layer.r) for conv, layer in zip(self.conv_p[1:], above, strict=True)]
        # The weights are new: their convolution's gradient is wanted, and not its numbers.
        chained = [s.p + (s.p > 0) * (made - made.detach()) for s, made in zip(above, again, strict=True)]
        return [lowest, *(s._replace(p=p) for s, p in zip(above, chained, strict=True))]

    def _published_loop(self, frames: Feed, state: State | None) -> tuple[Tensor, Tensor, State | None]:
        """Frame by frame: a prediction is compared with the next frame as soon as that arrives."""
        losses: list[Tensor] = []
        for number, frame in enumerate(frames):
            state = self.initial_state(frame) if state is None else [LayerState(*layer) for layer in state]
            if number > 0:
                losses.append(F.mse_loss(state[0].p, frame))
            if number < len(frames) - 1:  # the last frame is the first of the next window
                state = self.top_down(self.bottom_up(frame, state), state)
        errors = torch.stack(losses)
        return errors.sum(), errors.detach(), None if state is None else detached(state)

    def layer_size(self, layer: int) -> tuple[int, int]:
        """Height and width of a layer's maps, from the bottom up."""
        return self.size[0] >> layer, self.size[1] >> layer


class ConvLSTM(nn.Module):
    """A convolutional LSTM (Shi et al. 2015), whose four gates i, f, c, o one convolution computes.

    It sees groups of `in_channels` and the hidden state. The gates see the cell through peepholes, element-wise
    weights of the state's full shape.
    """

    def __init__(self, in_channels: tuple[int, ...], channels: int, size: tuple[int, int], kernel_size: int) -> None:
        super().__init__()
        self.groups, self.area = (*in_channels, channels), kernel_size**2
        self.gates = nn.Conv2d(sum(self.groups), 4 * channels, kernel_size, padding=kernel_size // 2)
        self.peep_i, self.peep_f, self.peep_o = (nn.Parameter(torch.empty(1, channels, *size)) for _ in range(3))

    def draw_weights(self, generator: torch.Generator) -> None:
        """As if each gate had a convolution of its own for each group of inputs."""
        for group in self.gates.weight.split(self.groups, dim=1):
            if group.shape[1]:
                draw_normal_(group, group.shape[1] * self.area, generator)
        for peep in (self.peep_i, self.peep_f, self.peep_o):
            draw_normal_(peep, peep.numel(), generator)
        nn.init.zeros_(self.gates.bias)  # type: ignore[arg-type]

    def forward(self, inputs: list[Tensor], hidden: Frame, cell: Frame) -> tuple[Frame, Frame]:
        """The new hidden state and cell."""
        i, f, g, o = self.gates(torch.cat([*inputs, hidden], 1)).chunk(4, dim=1)
        i, f = i + self.peep_i * cell, f + self.peep_f * cell
        new_cell = g.tanh() * i.sigmoid() + f.sigmoid() * cell
        return (o + self.peep_o * cell).sigmoid() * new_cell.tanh(), new_cell


def detached(state: State) -> State:
    """The same state, cut off from the graph that made it."""
    return [LayerState(*(tensor.detach() for tensor in layer)) for layer in state]


def _check_divides(size: tuple[int, int], layers: int) -> None:
    step = 2 ** (layers - 1)
    if all(edge > 0 and edge % step == 0 for edge in size):
        return
    below = tuple(max(step, edge // step * step) for edge in size)
    above = tuple(max(step, -(-edge // step) * step) for edge in size)
    halve = f"{layers} layers halve a frame {layers - 1} times"
    multiples = f"height and width must be multiples of {step}, for example {below} or {above}"
    raise UsageError(f"size={tuple(size)}: {halve}, so {multiples}")
