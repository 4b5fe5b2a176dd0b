"""PredNet, a predictive-coding network for video: the paper's, written in Chainer, and Lotter, Kreiman and Cox's."""

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
TRUNCATIONS = {"published": ("loss", "state"), "lotter": ("state",)}  # of each variant, the published one first


class PredNet(Trainable):
    """A predictive-coding network for video.

    Called on frames (T, B, C, H, W) in [0, 1], and a state or none, it returns the predictions, same shape, and the
    state. Prediction t is made after frame t, for frame t + 1.

    It predicts the next frame from the errors of the last prediction. `published` has peepholes, sigmoid gates and
    LeCun-normal weights, and is trained on the squared error of the prediction. `lotter` has hard-sigmoid gates, no
    peepholes, Glorot-uniform weights, a first prediction before the first frame, and is trained on its error units.

    Args:
        channels: Of each layer, from the bottom up; the first is that of the frames.
        size: (height, width) of a frame in pixels, which halve once per layer.
        variant: `published` or `lotter`.
        layer_weights: Of each layer's error units in the loss of `lotter`: (1, 0, …), its authors' L_0, or
            (1, 0.1, 0.1, …), L_all.
        kernel_size: Of every convolution, published as 3.
        truncation: What backpropagation through time is cut off from between windows. `loss`, as published: from
            what the loss depends on (Chainer's `loss.unchain_backward()`). The last P of the layers above the lowest
            are not of that, so the next window's gradient reaches the convolutions that made them. `state`: from
            all of it, which is the only way of `lotter`. None: as the variant is published.
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
        variant: str = "published",
        layer_weights: Sequence[float] | None = None,
        kernel_size: int = 3,
        truncation: str | None = None,
        batch_size: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"batch_size={batch_size!r}: expected a whole number from 1")
        self.batch_size = batch_size
        if variant not in TRUNCATIONS:
            raise UsageError(f"variant={variant!r}: expected 'published' or 'lotter'")
        self.truncation = TRUNCATIONS[variant][0] if truncation is None else truncation
        if self.truncation not in TRUNCATIONS[variant]:
            there = " or ".join(map(repr, TRUNCATIONS[variant]))
            raise UsageError(f"truncation={truncation!r}: expected {there} for variant={variant!r}")
        if not channels or min(channels) < 1:
            raise UsageError(f"channels={tuple(channels)!r}: expected one positive number per layer")
        if kernel_size not in (1, 3, 5, 7, 9):
            raise UsageError(f"kernel_size={kernel_size!r}: expected 1, 3, 5, 7 or 9")
        _check_divides(size, len(channels))
        self.kernel_size = kernel_size
        self.channels, self.size, self.variant = tuple(channels), tuple(size), variant
        self.layer_weights = tuple(layer_weights or (1.0, *[0.0] * (len(channels) - 1)))
        if len(self.layer_weights) != len(channels):
            raise UsageError(f"layer_weights={self.layer_weights}: expected one for each of {len(channels)} layers")
        conv = functools.partial(nn.Conv2d, kernel_size=kernel_size, padding=kernel_size // 2)
        conv_a = [conv(2 * below, here) for below, here in itertools.pairwise(channels)]
        conv_p = [conv(here, here) for here in channels]
        lstm = [
            ConvLSTM((2 * here, above), here, self.layer_size(layer), variant, kernel_size)
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
        """Draw the variant's initial weights; biases are zero."""
        for conv in (*self.conv_a, *self.conv_p):
            fans = conv.in_channels * self.kernel_size**2, conv.out_channels * self.kernel_size**2
            if self.variant == "published":
                draw_normal_(conv.weight, fans[0], generator)
            else:
                _draw_glorot_(conv.weight, *fans, generator)
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
        """All zero; the `lotter` variant then makes its first prediction from zero errors."""
        shapes = [(len(frame), channels, *self.layer_size(layer)) for layer, channels in enumerate(self.channels)]
        state = [LayerState(zeros, zeros, zeros) for zeros in map(frame.new_zeros, shapes)]
        if self.variant == "lotter":
            state = self.top_down([torch.cat([s.p, s.p], 1) for s in state], state)
        return state

    def bottom_up(self, frame: Frame, state: State) -> list[Tensor]:
        """The error units E of each layer, from the bottom up, (B, 2C, H, W) each."""
        errors: list[Tensor] = []
        for layer, (_, _, prediction) in enumerate(state):
            target = F.max_pool2d(F.relu(self.conv_a[layer - 1](errors[-1])), 2) if layer else frame
            surprise = target - prediction if self.variant == "published" else prediction - target
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

        The loss of `published` is the sum over the window of the mean squared errors, that of `lotter` the weighted
        mean of the error units, averaged over the window.
        """
        if self.begins_anew:
            state = None
        if self.variant != "published":
            return self._error_unit_loss(iter(batch), state)
        if state is not None and self.truncation == "loss":
            state = self._chained(state)
        if not isinstance(batch, Tensor):
            return self._published_loop(batch, state)
        predictions, after = self(batch[:-1], state)
        errors = (predictions - batch[1:]).square().flatten(1).mean(1)
        return errors.sum(), errors.detach(), self._next(after)

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

    def _error_unit_loss(self, frames: Iterator[Tensor], state: State | None) -> tuple[Tensor, Tensor, State | None]:
        first = next(frames)
        state = self.initial_state(first) if state is None else [LayerState(*layer) for layer in state]
        errors, losses, squared = self.bottom_up(first, state), [], []
        for target in frames:
            state = self.top_down(errors, state)
            errors = self.bottom_up(target, state)
            losses.append(torch.stack([w * e.mean() for w, e in zip(self.layer_weights, errors, strict=True)]).sum())
            squared.append((state[0].p.detach() - target).square().mean())
        return torch.stack(losses).mean(), torch.stack(squared), self._next(state)

    def _next(self, state: State) -> State | None:
        return None if self.begins_anew else detached(state)

    def layer_size(self, layer: int) -> tuple[int, int]:
        """Height and width of a layer's maps, from the bottom up."""
        return self.size[0] >> layer, self.size[1] >> layer


class ConvLSTM(nn.Module):
    """A convolutional LSTM (Shi et al. 2015), whose four gates i, f, c, o one convolution computes.

    It sees groups of `in_channels` and the hidden state. With peepholes (`published`), the gates see the cell
    through element-wise weights of the state's full shape.
    """

    def __init__(
        self, in_channels: tuple[int, ...], channels: int, size: tuple[int, int], variant: str, kernel_size: int = 3
    ) -> None:
        super().__init__()
        self.groups, self.channels = (*in_channels, channels), channels
        self.hard, self.area = variant == "lotter", kernel_size**2
        self.gates = nn.Conv2d(sum(self.groups), 4 * channels, kernel_size, padding=kernel_size // 2)
        if not self.hard:
            self.peep_i, self.peep_f, self.peep_o = (nn.Parameter(torch.empty(1, channels, *size)) for _ in range(3))

    def draw_weights(self, generator: torch.Generator) -> None:
        """As if each gate had a convolution of its own for each group of inputs (published)."""
        fan_in = sum(self.groups) * self.area
        if self.hard:
            for gate in self.gates.weight.chunk(4):
                _draw_glorot_(gate, fan_in, self.channels * self.area, generator)
        else:
            for group in self.gates.weight.split(self.groups, dim=1):
                if group.shape[1]:
                    draw_normal_(group, group.shape[1] * self.area, generator)
            for peep in (self.peep_i, self.peep_f, self.peep_o):
                draw_normal_(peep, peep.numel(), generator)
        nn.init.zeros_(self.gates.bias)  # type: ignore[arg-type]

    def forward(self, inputs: list[Tensor], hidden: Frame, cell: Frame) -> tuple[Frame, Frame]:
        """The new hidden state and cell."""
        i, f, g, o = self.gates(torch.cat([*inputs, hidden], 1)).chunk(4, dim=1)
        if self.hard:
            new_cell = _hard_sigmoid(f) * cell + _hard_sigmoid(i) * g.tanh()
            return _hard_sigmoid(o) * new_cell.tanh(), new_cell
        i, f = i + self.peep_i * cell, f + self.peep_f * cell
        new_cell = g.tanh() * i.sigmoid() + f.sigmoid() * cell
        return (o + self.peep_o * cell).sigmoid() * new_cell.tanh(), new_cell


def detached(state: State) -> State:
    """The same state, cut off from the graph that made it."""
    return [LayerState(*(tensor.detach() for tensor in layer)) for layer in state]


def _hard_sigmoid(x: Tensor) -> Tensor:
    """Keras's: 0.2 x + 0.5, clipped to [0, 1] (torch's has the slope 1/6)."""
    return (0.2 * x + 0.5).clamp(0.0, 1.0)


def _draw_glorot_(parameter: Tensor, fan_in: int, fan_out: int, generator: torch.Generator) -> None:
    bound = (6.0 / (fan_in + fan_out)) ** 0.5
    drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float32, device=generator.device).cpu()
    with torch.no_grad():
        parameter.copy_((2.0 * drawn - 1.0) * bound)


def _check_divides(size: tuple[int, int], layers: int) -> None:
    step = 2 ** (layers - 1)
    if all(edge > 0 and edge % step == 0 for edge in size):
        return
    below = tuple(max(step, edge // step * step) for edge in size)
    above = tuple(max(step, -(-edge // step) * step) for edge in size)
    halve = f"{layers} layers halve a frame {layers - 1} times"
    multiples = f"height and width must be multiples of {step}, for example {below} or {above}"
    raise UsageError(f"size={tuple(size)}: {halve}, so {multiples}")
