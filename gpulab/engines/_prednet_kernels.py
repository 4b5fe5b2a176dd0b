"""The parts of PredNet's analytic gradient: the forward and backward passes of its operations.

The operations are convolutions and the cell of the LSTM.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gpulab._torch_internals import fused_lstm_cell, fused_lstm_cell_backward
from gpulab.numerics._flags import precision_allowed

tanh_backward = torch.ops.aten.tanh_backward.grad_input
sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
PEEPHOLE_GATES = (0, 1, 3)  # the indices of the gates with peepholes: input, forget and output
# A convolution with at least this many weights is computed as a matrix product. For fewer weights,
# as in PredNet's published and quick sizes, cuDNN is faster on an H200.
MIN_PRODUCT_WEIGHTS = 300_000


# For each group, its number of channels and that number after padding.
Groups = Sequence[tuple[int, int]]


def pad_group(count: int, by_pixel: bool) -> tuple[int, int]:
    """Return a group of `count` channels, padded to a multiple of 4 in channels-last layout."""
    return count, -(-count // 4) * 4 if by_pixel else count


def channel_indices(groups: Groups) -> Tensor:
    """Return the indices at which padded groups have their channels, leaving out the padding.

    Examples:
        >>> channel_indices([(3, 4), (2, 4)])
        tensor([0, 1, 2, 4, 5])
    """
    starts = itertools.accumulate((padded for _, padded in groups), initial=0)
    return torch.cat(
        [
            torch.arange(start, start + count)
            for start, (count, _) in zip(starts, groups, strict=False)
        ]
    )


class LstmCell:
    """Computes the forward and the backward pass of an LSTM cell with peepholes.

    The gates come from a convolution: before their activation, and without the peepholes' terms.
    """

    def __init__(self, peepholes: Float[Tensor, "1 4 c h w"]) -> None:
        self.peepholes = peepholes

    def forward(
        self, gates: Tensor, cell_before: Tensor, cell_after: Tensor, r: Tensor
    ) -> tuple[Tensor, ...]:
        """Write the new cell into `cell_after` and R into `r`; return what `backward` needs.

        The gates are activated in place.
        """
        # The peepholes of the candidate g are zero: only the three gates see the old cell.
        split_gates(gates).addcmul_(self.peepholes, cell_before[:, None])
        i, f, g, o = gates.chunk(4, 1)
        gates[:, : 2 * cell_before.shape[1]].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        tanh = torch.mul(i, g, out=cell_after).addcmul_(f, cell_before).tanh()
        torch.mul(o, tanh, out=r)
        return gates, tanh

    def backward(
        self,
        d_r: Tensor,
        d_cell: Tensor,
        cell_before: Tensor,
        saved: tuple[Tensor, ...],
        buffer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the gates and of `cell_before`.

        The gradients of the gates are written into `buffer` if it is given. `d_r` is overwritten.
        """
        gates, tanh = saved
        d_gates = torch.empty_like(gates) if buffer is None else buffer
        i, f, g, o = gates.chunk(4, 1)
        d_i, d_f, d_g, d_o = d_gates.chunk(4, 1)
        torch.mul(d_r, tanh, out=d_o)
        d_cell_after = d_r.mul_(o)
        tanh_backward(d_cell_after, tanh, grad_input=d_cell_after)
        d_cell_after.add_(d_cell)
        torch.mul(d_cell_after, g, out=d_i)
        torch.mul(d_cell_after, cell_before, out=d_f)
        torch.mul(d_cell_after, i, out=d_g)
        i_and_f = slice(2 * cell_before.shape[1])
        sigmoid_backward(d_gates[:, i_and_f], gates[:, i_and_f], grad_input=d_gates[:, i_and_f])
        tanh_backward(d_g, g, grad_input=d_g)
        sigmoid_backward(d_o, o, grad_input=d_o)
        return d_gates, d_cell_after.mul_(f).add_((split_gates(d_gates) * self.peepholes).sum(1))


class FusedLstmCell(LstmCell):
    """Computes the passes of `LstmCell` by torch's fused kernels for `nn.LSTMCell`.

    The kernels take one vector for each pixel in channels-last layout, and otherwise one for each
    frame. The gates come from the convolution without their bias, which is added here.
    """

    def __init__(
        self, peepholes: Float[Tensor, "1 4 c h w"], bias: Float[Tensor, " 4c"], by_pixel: bool
    ) -> None:
        super().__init__(peepholes)
        self.bias = bias.view(1, 4, -1, 1, 1)
        self.by_pixel = by_pixel

    def forward(
        self, gates: Tensor, cell_before: Tensor, cell_after: Tensor, r: Tensor
    ) -> tuple[Tensor, ...]:
        """Write the new cell into `cell_after` and R into `r`; return what `backward` needs."""
        peephole_gates = torch.addcmul(self.bias, self.peepholes, cell_before[:, None]).flatten(
            1, 2
        )
        vectors = map(self._vectors, (gates, peephole_gates, cell_before))
        new_r, new_cell, activated = fused_lstm_cell(*vectors, None, None)
        cell_after.copy_(self._maps(new_cell, cell_after))
        r.copy_(self._maps(new_r, r))
        return activated, cell_after

    def backward(
        self,
        d_r: Tensor,
        d_cell: Tensor,
        cell_before: Tensor,
        saved: tuple[Tensor, ...],
        buffer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the gates and of `cell_before`; `buffer` must be None."""
        assert buffer is None, "torch's kernel allocates its own buffer"
        activated, cell_after = saved
        vectors = map(self._vectors, (d_r, d_cell, cell_before, cell_after))
        new_gates, new_cell, _ = fused_lstm_cell_backward(*vectors, activated, False)
        d_gates = self._maps(new_gates, cell_before)
        d_before = self._maps(new_cell, cell_before)
        for gate in PEEPHOLE_GATES:
            d_before.addcmul_(d_gates.chunk(4, 1)[gate], self.peepholes[:, gate])
        return d_gates, d_before

    def _vectors(self, maps: Tensor) -> Tensor:
        """Reshape maps (b, c, h, w) to the vectors of the kernels: one a pixel, or one a frame."""
        return (
            maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
            if self.by_pixel
            else maps.reshape(len(maps), -1)
        )

    def _maps(self, vectors: Tensor, like: Tensor) -> Tensor:
        """Reshape vectors of the kernels to maps with the height and width of `like`."""
        if not self.by_pixel:
            return vectors.view(len(like), -1, *like.shape[2:])
        return vectors.view(len(like), *like.shape[2:], -1).permute(0, 3, 1, 2)


class PaddedConvolution:
    """Computes a convolution of the network on padded channels, and its gradients.

    Args:
        conv: The convolution, whose weights are used.
        outputs: The groups of output channels, with their padding.
        inputs_read: The groups of input channels, with their padding.
        by_pixel: Whether the layout is channels-last.
    """

    def __init__(
        self, conv: nn.Conv2d, outputs: Groups, inputs_read: Groups, by_pixel: bool
    ) -> None:
        self.conv = conv
        self.padding = [conv.kernel_size[0] // 2] * 2
        device = conv.weight.device
        self.output_indices = channel_indices(outputs).to(device)[:, None]
        self.input_indices = channel_indices(inputs_read).to(device)
        # The shape of the padded weight.
        shape = (
            sum(padded for _, padded in outputs),
            sum(padded for _, padded in inputs_read),
            *conv.kernel_size,
        )
        layout = torch.channels_last if by_pixel else torch.contiguous_format
        self.weight = conv.weight.detach()
        self.is_padded = shape != conv.weight.shape
        if by_pixel:
            self.weight = conv.weight.new_zeros(shape).to(memory_format=layout)
        self.bias = conv.weight.new_zeros(shape[0])
        self.transposed_weight = torch.empty_like(self._transpose_weight(), memory_format=layout)
        is_float32 = conv.weight.dtype == torch.float32
        # For small inputs torch itself would choose a kernel that uses only one thread.
        on_cpu = device.type == "cpu" and is_float32
        self.uses_mkldnn = (
            on_cpu and torch.get_num_threads() > 1 and torch.backends.mkldnn.is_available()
        )
        # For one small map with many channels, cuDNN uses only part of the GPU. cuBLAS splits the
        # sum over the channels and thereby uses more of it.
        has_many_weights = conv.weight.numel() >= MIN_PRODUCT_WEIGHTS
        self.uses_product = conv.weight.is_cuda and is_float32 and not by_pixel and has_many_weights

    def _transpose_weight(self) -> Tensor:
        """Return the weight of the convolution that maps output gradients to input gradients."""
        return self.weight.flip(2, 3).transpose(0, 1)

    def load_weights(self) -> None:
        """Copy the convolution's current weights into the padded ones, and clear its gradients."""
        if self.is_padded:
            self.weight[self.output_indices, self.input_indices] = self.conv.weight
        elif self.weight.data_ptr() != self.conv.weight.data_ptr():
            self.weight.copy_(self.conv.weight)
        self.bias[self.output_indices[:, 0]] = self.conv.bias  # type: ignore[assignment]
        self.transposed_weight.copy_(self._transpose_weight())
        self.conv.weight.grad = self.conv.bias.grad = None  # type: ignore[union-attr]

    def forward(self, x: Tensor, biased: bool = True) -> Tensor:
        """Compute the output for an input (b, c, h, w), with the bias if `biased`."""
        return self._convolve(x, self.weight, self.bias if biased else None)

    def backward(self, gradient: Tensor) -> Tensor:
        """Compute the gradient of the input from the gradient of the output."""
        return self._convolve(gradient, self.transposed_weight, None)

    def add_gradients(
        self, inputs: Float[Tensor, "n c h w"], gradients: Float[Tensor, "n d h w"]
    ) -> None:
        """Add to the gradients of weights and bias, given inputs and gradients of the output."""
        arguments = gradients, inputs, self.weight, [len(self.bias)]
        options = [1, 1], self.padding, [1, 1], False, [0, 0], 1, [False, True, True]
        _, weight, bias = torch.ops.aten.convolution_backward(*arguments, *options)
        weight = (
            weight[self.output_indices, self.input_indices]
            if self.is_padded
            else weight.contiguous()
        )
        add_gradient(self.conv.weight, weight)
        add_gradient(self.conv.bias, bias[self.output_indices[:, 0]])

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve by the kernel that is fastest for this device and number of weights."""
        if self.uses_mkldnn:
            return torch.mkldnn_convolution(x, weight, bias, self.padding, [1, 1], [1, 1], 1)
        if self.uses_product and len(x) == 1:
            product = (
                weight.flatten(1) @ F.unfold(x, self.conv.kernel_size, padding=self.padding[0])[0]
            )
            convolved = product.view(1, -1, *x.shape[2:])
            return convolved if bias is None else convolved.add_(bias[:, None, None])
        return F.conv2d(x, weight, bias, padding=self.padding)


def split_gates(gates: Float[Tensor, "b 4c h w"]) -> Float[Tensor, "b 4 c h w"]:
    """Split the channels of the gates into two dimensions: the four gates, and their channels."""
    return gates.unflatten(1, (4, -1))


def uses_tf32(like: Tensor) -> bool:
    """Return whether convolutions of such a tensor may use TF32.

    The engine then uses channels-last layout, in which TF32 is faster.
    """
    return like.is_cuda and like.dtype == torch.float32 and precision_allowed("conv") == "tf32"


def add_gradient(parameter: Tensor | None, gradient: Tensor) -> None:
    """Add a gradient to the parameter's `.grad`, or set it if there is none yet."""
    if parameter is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def empty_maps(
    like: Tensor, shape: tuple[int, int, int, int, int], by_pixel: bool
) -> Float[Tensor, "t b c h w"]:
    """Allocate feature maps, in channels-last layout if `by_pixel`, otherwise channels-first."""
    if not by_pixel:
        return like.new_empty(shape)
    t, b, c, h, w = shape
    return like.new_empty(t, b, h, w, c).permute(0, 1, 4, 2, 3)
