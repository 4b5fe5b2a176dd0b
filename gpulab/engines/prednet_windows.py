"""Backpropagation through time in the published PredNet, written out: losses and gradients without autograd.

What `PredNet.training_loss` and `backward()` compute, up to rounding, in fewer operations. What the gates read lies in
one buffer, so nothing is concatenated, and a weight's gradient is one convolution over many steps: on a CPU the whole
window, on a GPU a fifth of it, so that memory is let go of. There, the cell is one kernel, and predictions and the
gradients of weights are computed beside what does not wait for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gpulab._torch_internals import has_global_module_hooks, has_module_hooks, has_tensor_hooks
from gpulab.engines.prednet_kernels import (
    PEEPING,
    Cell,
    Convolution,
    FusedCell,
    add_gradient,
    by_gate,
    empty,
    roomy,
    uses_tf32,
)
from gpulab.models.prednet import ConvLSTM, LayerState, PredNet, State, frame_errors

FOLLOWED = ("loss", "state")  # the truncations whose formulas stand here

relu_backward = torch.ops.aten.threshold_backward
pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.grad_input


def is_plain(model: nn.Module) -> bool:
    """Whether a network computes what its class says: no hook sees or changes it, no part has another `forward`."""
    changed = any("forward" in vars(part) or has_module_hooks(part) for part in model.modules())
    watched = any(map(has_tensor_hooks, model.parameters()))
    return not (changed or watched or has_global_module_hooks())


class Windows:
    """Losses and gradients of windows of one shape. Every call overwrites the gradients of the network's parameters.

    Args:
        net: One that it `follows`.
        frames: Of the shape, on the device and of the type of those to come.
        shared: As if all frames of a window lay in one memory (see `gpulab.data.feed`): gradients, and they alone, are
            of an error to the last frame, because `mse_loss` saves the frame that it compares with. (A loss that saves
            something else is spoilt otherwise, or, as that of absolute errors, not at all.)
        streams: Whether kernels of this network run beside each other on a GPU: not where other networks keep it busy.

    Examples:
        >>> from gpulab.models import PredNet
        >>> net, frames = PredNet((3, 4), (8, 8)), torch.rand(5, 1, 3, 8, 8)
        >>> losses, state = Windows(net, frames)(frames, None)
        >>> losses.shape, net.conv_p[0].weight.grad.shape
        (torch.Size([4]), torch.Size([3, 3, 3, 3]))
    """

    def __init__(
        self, net: PredNet, frames: Float[Tensor, "t b c h w"], shared: bool = False, streams: bool = True
    ) -> None:
        self.net, self.steps, self.shared = net, len(frames) - 1, shared
        self.layers: list[Layer] = []
        for _ in net.channels:
            self.layers.append(Layer(net, self.layers, self.steps, frames, streams))
        # Steps of which a weight's gradient is made at once; meanwhile, those before them are gone back through.
        self.span = -(-self.steps // 5) if frames.is_cuda else self.steps

    @staticmethod
    def follows(model: nn.Module) -> bool:
        """Whether these are the formulas of a model, on a device tried; what derives from `PredNet` may have others."""
        if type(model) is not PredNet or model.truncation not in FOLLOWED or not is_plain(model):
            return False
        replaced = {type(part) for part in model.modules()} - {PredNet, ConvLSTM, nn.Conv2d, nn.ModuleList}
        every = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        return not replaced and len(set(every)) == len(every) and model.conv_p[0].weight.device.type in ("cpu", "cuda")

    @torch.no_grad()
    def __call__(self, frames: Float[Tensor, "t b c h w"], state: State | None) -> tuple[Float[Tensor, " t-1"], State]:
        """The mean squared error of each prediction, and the state after the last."""
        before = self.net.initial_state(frames[0]) if state is None else state
        for layer, (r, c, p) in zip(self.layers, before, strict=True):
            layer.begin(r, c, p)
        self._predict(self.layers[0].spread(frames))
        losses = self._losses(frames)
        for first in reversed(range(0, self.steps, self.span)):
            span = range(first, min(first + self.span, self.steps))
            for step in reversed(span):
                self._back(step)
            for layer in self.layers:
                layer.weigh(span)
        for layer in self.layers:
            layer.weighing.join()
        return losses, [layer.after() for layer in self.layers]

    def _predict(self, frames: Float[Tensor, "t b d h w"]) -> None:
        """Forward through the window."""
        for step in range(self.steps):
            errors = frames[step]
            for layer in self.layers:
                errors = layer.compare(step, errors)
            above = None
            for layer in reversed(self.layers):
                above = layer.represent(step, above)
        for layer in self.layers:
            layer.predicting.join()

    def _losses(self, frames: Float[Tensor, "t b c h w"]) -> Float[Tensor, " t-1"]:
        """Of each prediction, and their gradients."""
        lowest, real = self.layers[0], slice(frames.shape[2])
        predictions = torch.stack(lowest.predictions[1:])[:, :, real].requires_grad_()
        with torch.enable_grad():
            losses = differentiated = frame_errors(predictions, frames[1:])
            if self.shared:  # backward finds the last frame in the memory of each
                differentiated = frame_errors(predictions, frames[-1:].expand_as(predictions))
            (gradient,) = torch.autograd.grad(differentiated.sum(), predictions)
        lowest.d_predictions[1:, :, real] = gradient
        return losses.detach()

    def _back(self, step: int) -> None:
        """From the gradients of a step's predictions to those of the step before."""
        for layer in self.layers:
            layer.predict_backward(step)
        d_above = None
        for layer in self.layers:
            d_above = layer.represent_backward(step, d_above)
        from_above = None
        for layer in reversed(self.layers):
            from_above = layer.compare_backward(step, from_above)


class Aside:
    """A stream of a GPU, on which something may be done beside what comes next, until `join`; else it is done at once.

    What is read there has to stay until then: the memory of what is let go of may be used again at once.
    """

    def __init__(self, like: Tensor, streams: bool) -> None:
        self.stream = torch.cuda.Stream(like.device) if like.is_cuda and streams else None

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """What is done in here is done aside."""
        if self.stream is None:
            yield
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                yield

    def join(self) -> None:
        """Wait for what was done."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


class Layer:
    """The buffers of one layer, (steps, batch, channels, height, width), and what it does in a step, forward and back.

    What a step takes from the one before has one place more, the first, for what came before the window. Where the
    channels of a pixel lie side by side, there is room for some more, which are zero: on an H200 cuDNN is up to three
    times as fast where groups of channels begin at multiples of 4, and what the gates read is a multiple of 16.
    """

    def __init__(self, net: PredNet, below: list[Layer], steps: int, like: Tensor, streams: bool) -> None:
        number = len(below)
        self.lstm, self.steps = net.lstm[number], steps
        self.chained = net.truncation == "loss" and number > 0
        by_pixel = uses_tf32(like)
        self.own, above = (roomy(count, by_pixel) for count in (*net.channels, 0)[number : number + 2])
        own, (self.count, self.channels) = [self.own], self.own
        read = [*own, *own, above, *own]
        spare = -sum(room for _, room in read) % 16 if by_pixel else 0
        self.gate = Convolution(self.lstm.gates, 4 * own, [*read, (0, spare)], by_pixel)
        self.predict = Convolution(net.conv_p[number], own, own, by_pixel)
        # Takes the errors of the layer below.
        self.below = below[-1] if below else None
        self.take = Convolution(net.conv_a[number - 1], own, 2 * [self.below.own], by_pixel) if self.below else None
        self.predicting, self.weighing = Aside(like, streams), Aside(like, streams)

        def buffer(count: int, channels: int, scale: int = 1) -> Tensor:
            height, width = net.layer_size(number)
            return empty(like, (count, like.shape[1], channels, scale * height, scale * width), by_pixel)

        self.buffer = buffer
        self.groups = 2 * self.channels, above[1], self.channels, spare
        self.inputs = buffer(steps + 1, sum(self.groups)).zero_()
        self.errors, self.above, self.hidden, _ = self.inputs.split(self.groups, 2)
        self.cells, self.d_predictions = buffer(2 * (steps + 1), self.channels).zero_().chunk(2)
        self.peepholes = buffer(1, 4 * self.channels).zero_()[0, :1].unflatten(1, (4, -1))
        self.fused = like.is_cuda
        # On a CPU new memory takes time; on a GPU it is what the steps gone back through let go of.
        self.room_for_gates = None if self.fused else buffer(steps, 4 * self.channels)
        self.room_for_taken = buffer(steps, self.channels, 2) if self.take and not self.fused else None
        self.d_gates: list[Tensor] = []
        self.d_taken: list[Tensor] = []
        self.cell = FusedCell(self.peepholes, self.gate.bias, by_pixel) if self.fused else Cell(self.peepholes)

    def begin(self, r: Tensor, c: Tensor, p: Tensor) -> None:
        """The weights are new, and so is the state."""
        for convolution in filter(None, (self.gate, self.predict, self.take)):
            convolution.begin()
        self.peepholes[0, :2, : self.count] = torch.cat([self.lstm.peep_i, self.lstm.peep_f])
        self.peepholes[0, 3, : self.count] = self.lstm.peep_o[0]
        self.lstm.peep_i.grad = self.lstm.peep_f.grad = self.lstm.peep_o.grad = None
        self.hidden[0, :, : self.count], self.cells[0, :, : self.count] = r, c
        p = self.spread(p)
        self.predictions, self.unclipped = [p], [p]
        self.kept: list[tuple[Tensor, ...]] = []
        self.targets: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.d_predictions.zero_()
        self.d_cell, self.d_hidden = torch.zeros_like(self.cells[0]), torch.zeros_like(self.cells[0])
        for aside in (self.predicting, self.weighing):
            with aside.begun():
                pass  # a graph that is captured has to know of the stream before it is waited for

    def after(self) -> LayerState:
        """The state after the window."""
        r, c, p = (maps[:, : self.count] for maps in (self.hidden[-1], self.cells[-1], self.predictions[-1]))
        return LayerState(r.clone(), c.clone(), p)

    def spread(self, maps: Float[Tensor, "... c h w"]) -> Float[Tensor, "... d h w"]:
        """As they lie where there is room for more channels."""
        spare = self.channels - self.count
        return F.pad(maps, (0, 0, 0, 0, 0, spare)) if spare else maps

    def compare(self, step: int, below: Tensor) -> Tensor:
        """The error units, from the frame, or from the error units of the layer below."""
        target = below
        if self.take:
            # On a GPU the bias is an operation of its own, a quarter as long after the pooling.
            pooled, chosen = F.max_pool2d(self.take.forward(below, not self.fused), 2, return_indices=True)
            target = (pooled.add_(self.take.bias[:, None, None]) if self.fused else pooled).relu_()
            self.targets.append(target)
            self.chosen.append(chosen)
        self.predicting.join()
        surprise, errors = target - self.predictions[step], self.errors[step]
        torch.clamp(surprise, min=0, out=errors[:, : self.channels])
        torch.clamp(surprise.neg_(), min=0, out=errors[:, self.channels :])
        return errors

    def represent(self, step: int, above: Tensor | None) -> Tensor:
        """R, from that of the layer above, and the prediction made of it."""
        if above is not None:
            blocks = self.above[step].unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
            blocks.copy_(above[:, :, :, None, :, None])
        gates, r = self.gate.forward(self.inputs[step], not self.fused), self.hidden[step + 1]
        self.kept.append(self.cell.forward(gates, self.cells[step], self.cells[step + 1], r))
        with self.predicting.begun():
            prediction = self.predict.forward(r).relu_()
            self.unclipped.append(prediction)
            self.predictions.append(prediction if self.take else prediction.clamp(max=1.0))
        return r

    def predict_backward(self, step: int) -> None:
        """From the gradient of the prediction: of R."""
        with self.predicting.begun():
            d_prediction, unclipped = self.d_predictions[step + 1], self.unclipped[step + 1]
            relu_backward.grad_input(d_prediction, unclipped, 0, grad_input=d_prediction)
            if not self.take:
                d_prediction.mul_(unclipped <= 1.0)
            self.d_r = self.predict.backward(d_prediction).add_(self.d_hidden)

    def represent_backward(self, step: int, d_above: Tensor | None) -> Tensor:
        """From the gradient of R, with what comes through the layer below: store the errors', return R's above."""
        self.predicting.join()
        d_r = self.d_r if d_above is None else self.d_r.add_(d_above)
        room = None if self.room_for_gates is None else self.room_for_gates[step]
        d_gates, self.d_cell = self.cell.backward(d_r, self.d_cell, self.cells[step], self.kept.pop(), room)
        self.d_gates.append(d_gates)
        self.d_errors, d_above, self.d_hidden, _ = self.gate.backward(d_gates).split(self.groups, 1)
        if not d_above.shape[1]:
            return d_above
        if not self.fused:
            return F.avg_pool2d(d_above, 2, divisor_override=1)
        rows = d_above.unflatten(2, (-1, 2))
        columns = (rows[:, :, :, 0] + rows[:, :, :, 1]).unflatten(3, (-1, 2))
        return columns[..., 0] + columns[..., 1]

    def compare_backward(self, step: int, from_above: Tensor | None) -> Tensor | None:
        """From the gradient of the error units: of the prediction before, and of the error units below."""
        d_errors = self.d_errors if from_above is None else from_above.add_(self.d_errors)
        positive, negative = relu_backward(d_errors, self.errors[step], 0).chunk(2, 1)
        d_target = positive - negative
        self.d_predictions[step] -= d_target
        if self.take is None:
            return None
        d_target = relu_backward(d_target, self.targets.pop(), 0)
        d_taken = self.buffer(1, self.channels, 2)[0] if self.room_for_taken is None else self.room_for_taken[step]
        options = [2, 2], [2, 2], [0, 0], [1, 1], False
        pool_backward(d_target, d_taken, *options, self.chosen.pop(), grad_input=d_taken)
        self.d_taken.append(d_taken)
        return self.take.backward(d_taken)

    def weigh(self, span: range) -> None:
        """Add to the gradients of the weights what comes of these steps.

        Where it is `chained`, P before the window is made once more: see `PredNet`.
        """
        steps, made = slice(span.start, span.stop), slice(span.start + (span.start > 0), span.stop + 1)
        self.weighing.join()
        self.read_aside = self.d_gates, self.d_taken  # what was read there before is let go of
        with self.weighing.begun():
            d_gates = together(self.d_gates, self.room_for_gates)
            self.gate.add_gradients(self.inputs[steps].flatten(0, 1), d_gates)
            peeped = by_gate(d_gates) * self.cells[steps].flatten(0, 1)[:, None]
            found = torch.sum(peeped, 0, keepdim=True, out=torch.empty_like(self.peepholes))
            del peeped  # convolutions need memory of their own
            for number, name in zip(PEEPING, "ifo", strict=True):
                add_gradient(getattr(self.lstm, f"peep_{name}"), found[:, number, : self.count].contiguous())
            if self.take and self.below:
                d_taken = together(self.d_taken, self.room_for_taken)
                self.take.add_gradients(self.below.errors[steps].flatten(0, 1), d_taken)
            first = self.d_predictions[0]
            if span.start == 0 and self.chained:
                relu_backward.grad_input(first, self.predictions[0], 0, grad_input=first)
            elif span.start == 0:
                first.zero_()
            self.predict.add_gradients(self.hidden[made].flatten(0, 1), self.d_predictions[made].flatten(0, 1))
        self.d_gates, self.d_taken = [], []


def together(steps: list[Tensor], room: Tensor | None) -> Tensor:
    """What was found of a span of steps, the last of them first, in the order of the steps."""
    if room is not None:
        return room.flatten(0, 1)
    return torch.cat(steps[::-1]) if len(steps) > 1 else steps[0]
