"""Backpropagation through time in the published PredNet, written out: losses and gradients without autograd.

What `PredNet.training_loss` and `backward()` compute, up to rounding, in fewer operations. What the gates read lies in
one buffer, so nothing is concatenated, and a weight's gradient is one convolution over the whole window. On a GPU, the
cell is one kernel, and predictions are computed beside what does not wait for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.models.base import is_plain
from gpulab.models.prednet import ConvLSTM, LayerState, PredNet, State
from gpulab.models.prednet_kernels import Cell, Convolution, FusedCell, by_gate, uses_tf32, zeros

relu_backward = torch.ops.aten.threshold_backward
pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.grad_input


class Windows:
    """Losses and gradients of windows of one shape. Every call overwrites the gradients of the network's parameters.

    Args:
        net: One that it `follows`.
        frames: Of the shape, on the device and of the type of those to come.
        shared: As if all frames of a window lay in one memory (see `gpulab.data.feed`): gradients, and they alone, are
            of an error to the last frame.
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
        self.layers = [Layer(net, number, self.steps, frames, streams) for number in range(len(net.channels))]

    @staticmethod
    def follows(model: nn.Module) -> bool:
        """Whether these are the formulas of a model, on a device tried; what derives from `PredNet` may have others."""
        if type(model) is not PredNet or model.variant != "published" or not is_plain(model):
            return False
        replaced = {type(part) for part in model.modules()} - {PredNet, ConvLSTM, nn.Conv2d, nn.ModuleList}
        shared = len([*model.parameters()]) < len([*model.named_parameters(remove_duplicate=False)])
        return not replaced and not shared and model.conv_p[0].weight.device.type in ("cpu", "cuda")

    @torch.no_grad()
    def __call__(
        self, frames: Float[Tensor, "t b c h w"], state: State | None
    ) -> tuple[Float[Tensor, " t-1"], State | None]:
        """The mean squared error of each prediction, and the state after the last."""
        state = None if self.net.begins_anew else state
        before = self.net.initial_state(frames[0]) if state is None else state
        for layer, (r, c, p) in zip(self.layers, before, strict=True):
            layer.begin(r, c, p)
        for step in range(self.steps):
            errors = frames[step]
            for layer in self.layers:
                errors = layer.compare(step, errors)
            above = None
            for layer in reversed(self.layers):
                above = layer.represent(step, above)
        for layer in self.layers:
            layer.join()
        predictions = torch.stack(self.layers[0].predictions[1:])
        missed = predictions - frames[1:]
        losses = missed.square().flatten(1).mean(1)
        if self.shared:
            torch.sub(predictions, frames[-1], out=missed)
        self.layers[0].d_predictions[1:] = missed.mul_(2 / frames[0].numel())
        for step in reversed(range(self.steps)):
            for layer in self.layers:
                layer.predict_backward(step)
            d_above = None
            for layer in self.layers:
                d_above = layer.represent_backward(step, d_above)
            from_above = None
            for layer in reversed(self.layers):
                from_above = layer.compare_backward(step, from_above)
        for layer in self.layers:
            layer.forget()  # now, for a convolution over a whole window needs memory of its own
        for below, layer in zip([None, *self.layers], self.layers, strict=False):
            layer.set_gradients(below)
        return losses, None if self.net.begins_anew else [layer.after() for layer in self.layers]


class Layer:
    """The buffers of one layer, (steps, batch, channels, height, width), and what it does in a step, forward and back.

    What a step takes from the one before has one place more, the first, for what came before the window.
    """

    def __init__(self, net: PredNet, number: int, steps: int, like: Tensor, streams: bool) -> None:
        self.lstm, self.steps, self.channels = net.lstm[number], steps, net.channels[number]
        self.chained = net.truncation == "loss" and number > 0
        by_pixel = uses_tf32(like)
        self.gate, self.predict = Convolution(self.lstm.gates, by_pixel), Convolution(net.conv_p[number], by_pixel)
        # Takes the errors of the layer below.
        self.take = Convolution(net.conv_a[number - 1], by_pixel) if number else None
        self.side = torch.cuda.Stream(like.device) if like.is_cuda and streams else None

        def buffer(count: int, channels: int, scale: int = 1) -> Tensor:
            height, width = net.layer_size(number)
            shape = like.shape[1], channels, scale * height, scale * width
            return zeros(like, (count, *shape), by_pixel)

        self.inputs = buffer(steps + 1, sum(self.lstm.groups))
        self.errors, self.above, self.hidden = self.inputs.split(self.lstm.groups, 2)
        self.cells, self.d_predictions = buffer(steps + 1, self.channels), buffer(steps + 1, self.channels)
        self.d_gates = buffer(steps, 4 * self.channels)
        self.unpooled = buffer(1, self.channels, 2)[0] if number else None  # for its shape
        self.d_taken = buffer(steps, self.channels, 2) if number else None
        self.peepholes = buffer(1, 4 * self.channels)[0, :1].unflatten(1, (4, -1))
        self.cell = FusedCell(self.peepholes, by_pixel) if like.is_cuda else Cell(self.peepholes)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On a GPU, what is done here may be done beside what comes next, until `join`.

        What it reads has to stay until then: the memory of what is let go of may be used again at once.
        """
        if self.side is None:
            yield
        else:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                yield

    def join(self) -> None:
        """Wait for what was done aside."""
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def begin(self, r: Tensor, c: Tensor, p: Tensor) -> None:
        """The weights are new, and so is the state."""
        for convolution in filter(None, (self.gate, self.predict, self.take)):
            convolution.begin()
        self.peepholes[0, :2] = torch.cat([self.lstm.peep_i, self.lstm.peep_f])
        self.peepholes[0, 3] = self.lstm.peep_o[0]
        self.hidden[0], self.cells[0] = r, c
        self.predictions, self.unclipped = [p], [p]
        self.kept: list[tuple[Tensor, ...]] = []
        self.targets: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.d_predictions.zero_()
        self.d_cell, self.d_hidden = torch.zeros_like(c), torch.zeros_like(r)
        with self.aside():
            pass  # a graph that is captured has to know of the stream before it is waited for

    def after(self) -> LayerState:
        """The state after the window."""
        return LayerState(self.hidden[-1].clone(), self.cells[-1].clone(), self.predictions[-1])

    def compare(self, step: int, below: Tensor) -> Tensor:
        """The error units, from the frame, or from the error units of the layer below."""
        target = below
        if self.take:
            pooled, chosen = F.max_pool2d(self.take.forward(below), 2, return_indices=True)
            target = pooled.relu_()
            self.targets.append(target)
            self.chosen.append(chosen)
        self.join()
        surprise, errors = target - self.predictions[step], self.errors[step]
        torch.clamp(surprise, min=0, out=errors[:, : self.channels])
        torch.clamp(surprise.neg_(), min=0, out=errors[:, self.channels :])
        return errors

    def represent(self, step: int, above: Tensor | None) -> Tensor:
        """R, from that of the layer above, and the prediction made of it."""
        if above is not None:
            blocks = self.above[step].unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
            blocks.copy_(above[:, :, :, None, :, None])
        gates, r = self.gate.forward(self.inputs[step]), self.hidden[step + 1]
        self.kept.append(self.cell.forward(gates, self.cells[step], self.cells[step + 1], r))
        with self.aside():
            prediction = self.predict.forward(r).relu_()
            self.unclipped.append(prediction)
            self.predictions.append(prediction if self.take else prediction.clamp(max=1.0))
        return r

    def predict_backward(self, step: int) -> None:
        """From the gradient of the prediction: of R."""
        with self.aside():
            d_prediction, unclipped = self.d_predictions[step + 1], self.unclipped[step + 1]
            relu_backward.grad_input(d_prediction, unclipped, 0, grad_input=d_prediction)
            if not self.take:
                d_prediction.mul_(unclipped <= 1.0)
            self.d_r = self.predict.backward(d_prediction).add_(self.d_hidden)

    def represent_backward(self, step: int, d_above: Tensor | None) -> Tensor:
        """From the gradient of R, also through the layer below: of the errors, and of R above."""
        self.join()
        d_r = self.d_r if d_above is None else self.d_r.add_(d_above)
        d_gates, before = self.d_gates[step], self.cells[step]
        d_cell = self.cell.backward(d_r, self.d_cell, before, self.kept[step], d_gates)
        self.d_cell = d_cell.add_((by_gate(d_gates) * self.peepholes).sum(1))
        self.d_errors, d_above, self.d_hidden = self.gate.backward(d_gates).split(self.lstm.groups, 1)
        return F.avg_pool2d(d_above, 2, divisor_override=1) if d_above.shape[1] else d_above

    def compare_backward(self, step: int, from_above: Tensor | None) -> Tensor | None:
        """From the gradient of the error units: of the prediction before, and of the error units below."""
        d_errors = self.d_errors if from_above is None else from_above.add_(self.d_errors)
        positive, negative = relu_backward(d_errors, self.errors[step], 0).chunk(2, 1)
        d_target = positive - negative
        self.d_predictions[step] -= d_target
        if self.take is None or self.d_taken is None:
            return None
        d_target, d_taken = relu_backward(d_target, self.targets[step], 0), self.d_taken[step]
        options = [2, 2], [2, 2], [0, 0], [1, 1], False
        pool_backward(d_target, self.unpooled, *options, self.chosen[step], grad_input=d_taken)
        return self.take.backward(d_taken)

    def forget(self) -> None:
        """What is not needed once all steps have been gone back through."""
        for steps in (self.kept, self.targets, self.chosen, self.unclipped):
            steps.clear()

    def set_gradients(self, below: Layer | None) -> None:
        """Those of its weights. Where it is `chained`, P before the window is made once more: see `PredNet`."""
        if self.chained:
            relu_backward.grad_input(self.d_predictions[0], self.predictions[0], 0, grad_input=self.d_predictions[0])
        else:
            self.d_predictions[0] = 0
        self.gate.set_gradients(self.inputs[: self.steps], self.d_gates)
        self.predict.set_gradients(self.hidden, self.d_predictions)
        if self.take and below and self.d_taken is not None:
            self.take.set_gradients(below.errors[: self.steps], self.d_taken)
        cells = self.cells[: self.steps].flatten(0, 1)
        peepholes = (by_gate(self.d_gates.flatten(0, 1)) * cells[:, None]).sum(0, keepdim=True)
        self.lstm.peep_i.grad, self.lstm.peep_f.grad, self.lstm.peep_o.grad = (peepholes[:, n] for n in (0, 1, 3))
