"""Analytic backpropagation through time in PredNet: losses and gradients without autograd.

The results are those of `PredNet.training_loss` and `backward()`, up to rounding, in fewer
operations. The inputs of the gates are views of one buffer, so nothing is concatenated. The
gradient of a weight is one convolution over many steps: over the whole window on a CPU, and over a
fifth of it on a GPU, so that memory is freed earlier. On a GPU the cell is one kernel. Predictions
and the gradients of weights are computed there concurrently with operations that do not depend on
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gpulab._torch_internals import has_global_module_hooks, has_module_hooks, has_tensor_hooks
from gpulab.engines._prednet_kernels import (
    PEEPHOLE_GATES,
    FusedLstmCell,
    LstmCell,
    PaddedConvolution,
    accumulate_grad,
    empty_maps,
    pad_group,
    split_gates,
    uses_tf32,
)
from gpulab.models.prednet import ConvLSTM, LayerState, PredNet, PredNetState, frame_errors

SUPPORTED_TRUNCATIONS = ("loss", "state")


relu_backward = torch.ops.aten.threshold_backward
pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.grad_input


def is_unmodified(model: nn.Module) -> bool:
    """Return whether a network computes what its class defines: no hooks and its own `forward`."""
    is_changed = any(
        "forward" in vars(module) or has_module_hooks(module) for module in model.modules()
    )
    is_watched = any(map(has_tensor_hooks, model.parameters()))
    return not (is_changed or is_watched or has_global_module_hooks())


class WindowGradients:
    """Computes losses and gradients of windows of one shape, without autograd.

    Each call overwrites the gradients of the network.

    Args:
        net: A network that `supports` accepts.
        frames: An example of the windows, with their shape, device and type.
        frames_share_memory: Whether to imitate frames that share one buffer (see
            `gpulab.data._feed`). `mse_loss` saves the frame that it compares with, and `backward`
            finds the last frame in that memory. Every gradient, but not the loss, is therefore
            computed from the difference to the last frame. (Other losses save other tensors, and
            are affected differently. The loss of absolute errors is not affected.)
        streams: Whether kernels run concurrently on a GPU. This helps only if no other network
            keeps the GPU busy.

    Examples:
        >>> from gpulab.models import PredNet
        >>> net, frames = PredNet((3, 4), (8, 8)), torch.rand(5, 1, 3, 8, 8)
        >>> losses, state = WindowGradients(net, frames)(frames, None)
        >>> losses.shape, net.conv_p[0].weight.grad.shape
        (torch.Size([4]), torch.Size([3, 3, 3, 3]))
    """

    def __init__(
        self,
        net: PredNet,
        frames: Float[Tensor, "t b c h w"],
        frames_share_memory: bool = False,
        streams: bool = True,
    ) -> None:
        self.net = net
        self.steps = len(frames) - 1
        self.frames_share_memory = frames_share_memory
        self.layers: list[WindowLayer] = []
        # A layer knows its number from the list of the layers below it.
        for _ in net.channels:
            self.layers.append(WindowLayer(net, self.layers, self.steps, frames, streams))
        # The number of steps whose weight gradients are computed together: all steps on a CPU, and
        # a fifth of them (rounded up) on a GPU, where this work overlaps with the backward pass.
        self.gradient_span = -(-self.steps // 5) if frames.is_cuda else self.steps

    @staticmethod
    def supports(model: nn.Module) -> bool:
        """Return whether these formulas hold for a model on its device.

        A subclass is not supported, because it may compute something else. Neither is a model in
        which a parameter occurs twice.
        """
        if (
            type(model) is not PredNet
            or model.truncation not in SUPPORTED_TRUNCATIONS
            or not is_unmodified(model)
        ):
            return False
        other_types = {type(module) for module in model.modules()} - {
            PredNet,
            ConvLSTM,
            nn.Conv2d,
            nn.ModuleList,
        }
        parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
        has_own_parameters = len(set(parameters)) == len(parameters)
        is_supported_device = model.conv_p[0].weight.device.type in ("cpu", "cuda")
        return not other_types and has_own_parameters and is_supported_device

    @torch.no_grad()
    def __call__(
        self, frames: Float[Tensor, "t b c h w"], state: PredNetState | None
    ) -> tuple[Float[Tensor, " t-1"], PredNetState]:
        """Compute the losses of a window, and store the gradients of their sum in `.grad`.

        Returns:
            The mean squared error of each prediction, and the state after the last frame.
        """
        previous_state = self.net.initial_state(frames[0]) if state is None else state
        for layer, (r, c, p) in zip(self.layers, previous_state, strict=True):
            layer.start_window(r, c, p)
        self._forward_window(self.layers[0].pad_channels(frames))
        losses = self._losses(frames)
        # The backward pass visits the spans, and the steps within a span, from the last to the
        # first. The last span may be shorter.
        for start in reversed(range(0, self.steps, self.gradient_span)):
            span = range(start, min(start + self.gradient_span, self.steps))
            for step in reversed(span):
                self._backward_step(step)
            for layer in self.layers:
                layer.accumulate_weight_gradients(span)
        for layer in self.layers:
            layer.weight_stream.join()
        return losses, [layer.final_state() for layer in self.layers]

    def _forward_window(self, frames: Float[Tensor, "t b d h w"]) -> None:
        """Compute all steps of the window: errors from the bottom up, then states from the top."""
        for step in range(self.steps):
            errors = frames[step]
            for layer in self.layers:
                errors = layer.compute_errors(step, errors)
            representation = None
            for layer in reversed(self.layers):
                representation = layer.update_representation(step, representation)
        for layer in self.layers:
            layer.prediction_stream.join()

    def _losses(self, frames: Float[Tensor, "t b c h w"]) -> Float[Tensor, " t-1"]:
        """Return the loss of each prediction, and store the gradients of the predictions."""
        lowest = self.layers[0]
        unpadded = slice(frames.shape[2])
        predictions = torch.stack(lowest.predictions[1:])[:, :, unpadded].requires_grad_()
        with torch.enable_grad():
            losses = frame_errors(predictions, frames[1:])
            differentiated_losses = losses
            if self.frames_share_memory:
                # In shared memory, `backward` finds the last frame in place of each frame.
                last_frames = frames[-1:].expand_as(predictions)
                differentiated_losses = frame_errors(predictions, last_frames)
            (gradient,) = torch.autograd.grad(differentiated_losses.sum(), predictions)
        lowest.d_predictions[1:, :, unpadded] = gradient
        return losses.detach()

    def _backward_step(self, step: int) -> None:
        """Backpropagate one step, which adds to the prediction gradients of the previous step.

        Layers are visited in the order opposite to that of `_forward_window`.
        """
        for layer in self.layers:
            layer.prediction_backward(step)
        from_below = None
        for layer in self.layers:
            from_below = layer.representation_backward(step, from_below)
        from_above = None
        for layer in reversed(self.layers):
            from_above = layer.errors_backward(step, from_above)


class SideStream:
    """A GPU stream for work that runs concurrently until `join`.

    On a CPU, or with `streams=False`, the work is not concurrent. Tensors that are read on the
    stream must live until `join`, because the memory of a freed tensor may be reused immediately.
    """

    def __init__(self, like: Tensor, streams: bool) -> None:
        self.stream = torch.cuda.Stream(like.device) if like.is_cuda and streams else None

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Launch the work inside the block on this stream, after all work launched before."""
        if self.stream is None:
            yield
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                yield

    def join(self) -> None:
        """Make the current stream wait for the work on this stream."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


class WindowLayer:
    """One layer: its buffers, and its parts of the forward and the backward pass.

    Buffers have the shape (steps, batch, channels, height, width). Those of the recurrent state
    have an additional first step for the state before the window. In channels-last layout the
    channels are padded with zeros, so that every group of channels begins at a multiple of 4 and
    the number of channels that the gates read is a multiple of 16. On an H200 this makes cuDNN up
    to three times as fast.

    Args:
        net: The network.
        layers_below: The layers below this one, from the bottom up.
        steps: The number of predictions in a window.
        like: A tensor with the batch size, the device and the type of the frames.
        streams: Whether kernels run concurrently on a GPU.
    """

    def __init__(
        self, net: PredNet, layers_below: list[WindowLayer], steps: int, like: Tensor, streams: bool
    ) -> None:
        number = len(layers_below)
        self.lstm = net.lstm[number]
        self.steps = steps
        self.is_chained = net.truncation == "loss" and number > 0
        by_pixel = uses_tf32(like)
        # The top layer has a layer without channels above it.
        n_channels, n_channels_above = (*net.channels, 0)[number : number + 2]
        self.group = pad_group(n_channels, by_pixel)
        group_above = pad_group(n_channels_above, by_pixel)
        self.n_channels, self.padded_channels = self.group
        # The gates read positive and negative errors, R of the layer above, and R of this layer.
        gate_inputs = [self.group, self.group, group_above, self.group]
        # The number of channels missing to the next multiple of 16.
        n_spare = -sum(padded for _, padded in gate_inputs) % 16 if by_pixel else 0
        self.gate_conv = PaddedConvolution(
            self.lstm.gates, 4 * [self.group], [*gate_inputs, (0, n_spare)], by_pixel
        )
        self.prediction_conv = PaddedConvolution(
            net.conv_p[number], [self.group], [self.group], by_pixel
        )
        self.layer_below = layers_below[-1] if layers_below else None
        self.target_conv: PaddedConvolution | None = None  # from the errors of the layer below
        if self.layer_below:
            inputs_below = 2 * [self.layer_below.group]
            self.target_conv = PaddedConvolution(
                net.conv_a[number - 1], [self.group], inputs_below, by_pixel
            )
        self.prediction_stream = SideStream(like, streams)
        self.weight_stream = SideStream(like, streams)

        def buffer(count: int, channels: int, scale: int = 1) -> Tensor:
            height, width = net.layer_size(number)
            return empty_maps(
                like, (count, like.shape[1], channels, scale * height, scale * width), by_pixel
            )

        self.buffer = buffer
        self.group_sizes = (2 * self.padded_channels, group_above[1], self.padded_channels, n_spare)
        # The inputs of the gates. Errors and representations are written into views of them.
        self.inputs = buffer(steps + 1, sum(self.group_sizes)).zero_()
        self.errors, self.inputs_above, self.hidden, _ = self.inputs.split(self.group_sizes, 2)
        self.cells, self.d_predictions = (
            buffer(2 * (steps + 1), self.padded_channels).zero_().chunk(2)
        )
        # Peepholes do not depend on the step or the example: (1, gates, channels, height, width).
        self.peepholes = buffer(1, 4 * self.padded_channels).zero_()[0, :1].unflatten(1, (4, -1))
        self.is_fused = like.is_cuda
        # On a CPU these buffers are allocated only once, because allocation takes time. On a GPU
        # each step allocates its own, which reuses memory that earlier steps have freed.
        self.gate_gradient_buffer: Tensor | None = None
        self.unpooled_gradient_buffer: Tensor | None = None
        if not self.is_fused:
            self.gate_gradient_buffer = buffer(steps, 4 * self.padded_channels)
            if self.target_conv:
                self.unpooled_gradient_buffer = buffer(steps, self.padded_channels, 2)
        self.d_gates: list[Tensor] = []
        self.d_unpooled: list[Tensor] = []
        self.cell = LstmCell(self.peepholes)
        if self.is_fused:
            self.cell = FusedLstmCell(self.peepholes, self.gate_conv.bias, by_pixel)

    def start_window(self, r: Tensor, c: Tensor, p: Tensor) -> None:
        """Load the weights and the state before the window, and clear the gradients.

        Args:
            r: The representation R of this layer, which is the LSTM's hidden state.
            c: The LSTM's cell.
            p: The prediction for the first step.
        """
        for convolution in filter(None, (self.gate_conv, self.prediction_conv, self.target_conv)):
            convolution.load_weights()
        # The gates are numbered as in `PEEPHOLE_GATES`: input 0, forget 1, output 3. Gate 2, the
        # candidate, has no peephole, and its entries stay zero.
        self.peepholes[0, :2, : self.n_channels] = torch.cat([self.lstm.peep_i, self.lstm.peep_f])
        self.peepholes[0, 3, : self.n_channels] = self.lstm.peep_o[0]
        self.lstm.peep_i.grad = self.lstm.peep_f.grad = self.lstm.peep_o.grad = None
        self.hidden[0, :, : self.n_channels] = r
        self.cells[0, :, : self.n_channels] = c
        p = self.pad_channels(p)
        self.predictions = [p]
        self.unclipped = [p]  # predictions before they are clipped at 1
        self.saved: list[tuple[Tensor, ...]] = []  # what the cell's backward pass needs, by step
        self.targets: list[Tensor] = []
        self.pooling_indices: list[Tensor] = []
        self.d_predictions.zero_()
        self.d_cell = torch.zeros_like(self.cells[0])
        self.d_hidden = torch.zeros_like(self.cells[0])
        for stream in (self.prediction_stream, self.weight_stream):
            with stream.activate():
                pass  # During graph capture, a stream must be entered before it can be joined.

    def final_state(self) -> LayerState:
        """Return the state after the window, without the padding channels.

        R and the cell are copied, because the next window reuses their buffers. The prediction has
        memory of its own.
        """
        r, c, p = (
            maps[:, : self.n_channels]
            for maps in (self.hidden[-1], self.cells[-1], self.predictions[-1])
        )
        return LayerState(r.clone(), c.clone(), p)

    def pad_channels(self, maps: Float[Tensor, "... c h w"]) -> Float[Tensor, "... d h w"]:
        """Append the padding channels of the buffers, filled with zeros, to maps."""
        n_spare = self.padded_channels - self.n_channels
        return F.pad(maps, (0, 0, 0, 0, 0, n_spare)) if n_spare else maps

    def compute_errors(self, step: int, errors_below: Tensor) -> Tensor:
        """Compute the error units: the positive and the negative differences from the prediction.

        The lowest layer compares its prediction with the frame, `errors_below`. A higher layer
        compares it with a target that it computes from the error units of the layer below.
        """
        target = errors_below
        if self.target_conv:
            target = self._compute_target(self.target_conv, errors_below)
        self.prediction_stream.join()
        difference = target - self.predictions[step]
        errors = self.errors[step]
        torch.clamp(difference, min=0, out=errors[:, : self.padded_channels])
        torch.clamp(difference.neg_(), min=0, out=errors[:, self.padded_channels :])
        return errors

    def _compute_target(self, target_conv: PaddedConvolution, errors_below: Tensor) -> Tensor:
        """Compute the target of a higher layer, and store what its backward pass needs."""
        # On a GPU, adding the bias is a separate operation. It is done after the pooling, where
        # there are a quarter as many numbers. The positions of the maxima are the same.
        unpooled = target_conv.forward(errors_below, biased=not self.is_fused)
        pooled, pooling_indices = F.max_pool2d(unpooled, 2, return_indices=True)
        del unpooled
        if self.is_fused:
            pooled.add_(target_conv.bias[:, None, None])
        target = pooled.relu_()
        self.targets.append(target)
        self.pooling_indices.append(pooling_indices)
        return target

    def update_representation(self, step: int, representation_above: Tensor | None) -> Tensor:
        """Compute R from the representation of the layer above, and then the prediction from R."""
        if representation_above is not None:
            # Each pixel of the layer above is copied to a block of 2 × 2 pixels.
            blocks = self.inputs_above[step].unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
            blocks.copy_(representation_above[:, :, :, None, :, None])
        # The fused cell adds the bias of the gates itself.
        gates = self.gate_conv.forward(self.inputs[step], biased=not self.is_fused)
        r = self.hidden[step + 1]
        self.saved.append(self.cell.forward(gates, self.cells[step], self.cells[step + 1], r))
        with self.prediction_stream.activate():
            prediction = self.prediction_conv.forward(r).relu_()
            self.unclipped.append(prediction)
            self.predictions.append(prediction if self.target_conv else prediction.clamp(max=1.0))
        return r

    def prediction_backward(self, step: int) -> None:
        """Compute the gradient of R, except for the part that comes from the layer below.

        It consists of a part from the prediction and one from the next step, where R is the hidden
        state. It is stored in `d_r`.
        """
        with self.prediction_stream.activate():
            d_prediction = self.d_predictions[step + 1]
            unclipped = self.unclipped[step + 1]
            relu_backward.grad_input(d_prediction, unclipped, 0, grad_input=d_prediction)
            if not self.target_conv:  # Only the lowest layer clips its prediction at 1.
                d_prediction.mul_(unclipped <= 1.0)
            self.d_r = self.prediction_conv.backward(d_prediction).add_(self.d_hidden)

    def representation_backward(self, step: int, from_below: Tensor | None) -> Tensor:
        """Backpropagate through the LSTM, and store the gradient of the error units in `d_errors`.

        Args:
            step: The number of the step.
            from_below: The part of this layer's gradient of R that comes from the layer below,
                which this method returned for that layer; None in the lowest layer.

        Returns:
            This layer's part of the gradient of R in the layer above; without channels in the top
            layer.
        """
        self.prediction_stream.join()
        d_r = self.d_r if from_below is None else self.d_r.add_(from_below)
        buffer = None if self.gate_gradient_buffer is None else self.gate_gradient_buffer[step]
        d_gates, self.d_cell = self.cell.backward(
            d_r, self.d_cell, self.cells[step], self.saved.pop(), buffer
        )
        self.d_gates.append(d_gates)
        self.d_errors, d_above, self.d_hidden, _ = self.gate_conv.backward(d_gates).split(
            self.group_sizes, 1
        )
        if not d_above.shape[1]:
            return d_above
        # Each pixel of the layer above was copied to 2 × 2 pixels, whose gradients are added.
        if not self.is_fused:
            return F.avg_pool2d(d_above, 2, divisor_override=1)
        rows = d_above.unflatten(2, (-1, 2))
        columns = (rows[:, :, :, 0] + rows[:, :, :, 1]).unflatten(3, (-1, 2))
        return columns[..., 0] + columns[..., 1]

    def errors_backward(self, step: int, from_above: Tensor | None) -> Tensor | None:
        """Backpropagate through the error units: add to the gradient of the previous prediction.

        Args:
            step: The number of the step.
            from_above: The part of the error units' gradient that comes from the layer above; None
                in the top layer.

        Returns:
            The gradient of the error units in the layer below; None in the lowest layer.
        """
        d_errors = self.d_errors if from_above is None else from_above.add_(self.d_errors)
        d_positive, d_negative = relu_backward(d_errors, self.errors[step], 0).chunk(2, 1)
        d_target = d_positive - d_negative
        # The error units depend on target − prediction.
        self.d_predictions[step] -= d_target
        if self.target_conv is None:
            return None
        d_target = relu_backward(d_target, self.targets.pop(), 0)
        if self.unpooled_gradient_buffer is None:
            d_unpooled = self.buffer(1, self.padded_channels, 2)[0]
        else:
            d_unpooled = self.unpooled_gradient_buffer[step]
        # The options of the pooling: kernel size, stride, padding, dilation and `ceil_mode`.
        pooling = ([2, 2], [2, 2], [0, 0], [1, 1], False)
        pool_backward(
            d_target, d_unpooled, *pooling, self.pooling_indices.pop(), grad_input=d_unpooled
        )
        self.d_unpooled.append(d_unpooled)
        return self.target_conv.backward(d_unpooled)

    def accumulate_weight_gradients(self, span: range) -> None:
        """Add the contribution of the steps in `span` to the gradients of the weights.

        The span that begins the window also includes the prediction before the window. If the layer
        `is_chained`, the gradient of this prediction reaches the weights: see `truncation` of
        `PredNet`. Otherwise it is set to zero.
        """
        inputs_slice = slice(span.start, span.stop)
        # Prediction 0 is the one before the window. Step t makes prediction t + 1.
        first_prediction = 0 if span.start == 0 else span.start + 1
        predictions_slice = slice(first_prediction, span.stop + 1)
        self.weight_stream.join()
        # These tensors must live until the stream is joined. They replace those of the last call,
        # which are freed now.
        self.side_stream_inputs = (self.d_gates, self.d_unpooled)
        with self.weight_stream.activate():
            self._accumulate_lstm_gradients(inputs_slice)
            if self.target_conv and self.layer_below:
                d_unpooled = concatenate_steps(self.d_unpooled, self.unpooled_gradient_buffer)
                self.target_conv.add_gradients(
                    self.layer_below.errors[inputs_slice].flatten(0, 1), d_unpooled
                )
            if span.start == 0:
                self._complete_initial_gradient()
            hidden = self.hidden[predictions_slice].flatten(0, 1)
            self.prediction_conv.add_gradients(
                hidden, self.d_predictions[predictions_slice].flatten(0, 1)
            )
        self.d_gates = []
        self.d_unpooled = []

    def _accumulate_lstm_gradients(self, inputs_slice: slice) -> None:
        """Add to the gradients of the gates' convolution and of the peepholes."""
        d_gates = concatenate_steps(self.d_gates, self.gate_gradient_buffer)
        self.gate_conv.add_gradients(self.inputs[inputs_slice].flatten(0, 1), d_gates)
        # A peephole multiplies the old cell, so its gradient is the sum of these products over all
        # steps and examples.
        products = split_gates(d_gates) * self.cells[inputs_slice].flatten(0, 1)[:, None]
        peephole_gradients = torch.sum(
            products, 0, keepdim=True, out=torch.empty_like(self.peepholes)
        )
        for gate, letter in zip(PEEPHOLE_GATES, "ifo", strict=True):
            gradient = peephole_gradients[:, gate, : self.n_channels].contiguous()
            accumulate_grad(getattr(self.lstm, f"peep_{letter}"), gradient)

    def _complete_initial_gradient(self) -> None:
        """Complete the gradient of the prediction before the window, or set it to zero."""
        initial_gradient = self.d_predictions[0]
        if not self.is_chained:
            initial_gradient.zero_()
            return
        # No step has backpropagated this prediction through its ReLU.
        relu_backward.grad_input(
            initial_gradient, self.predictions[0], 0, grad_input=initial_gradient
        )


def concatenate_steps(steps: list[Tensor], buffer: Tensor | None) -> Tensor:
    """Concatenate the gradients of a span of steps in the order of the steps.

    The list `steps` begins with the last step. A `buffer` already holds all steps in order.
    """
    if buffer is not None:
        return buffer.flatten(0, 1)
    return torch.cat(steps[::-1]) if len(steps) > 1 else steps[0]
