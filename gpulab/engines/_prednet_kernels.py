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
    """Return a group's number of channels, and that number after padding.

    In channels-last layout (`by_pixel`) the number is padded to the next multiple of 4. In the
    other layout there is no padding.
    """
    padded_count = -(-count // 4) * 4 if by_pixel else count  # −(−a // b) rounds a / b up
    return count, padded_count


def channel_indices(groups: Groups) -> Tensor:
    """Return the indices at which padded groups have their channels, leaving out the padding.

    Examples:
        >>> channel_indices([(3, 4), (2, 4)])
        tensor([0, 1, 2, 4, 5])
    """
    # The start of each group, and finally the end of the last group, which `zip` leaves out.
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

        The gates are activated in place. Their channels are in the order i, f, g, o: input gate,
        forget gate, candidate, output gate.
        """
        # The peepholes of the candidate g are zero: only the three gates see the old cell.
        split_gates(gates).addcmul_(self.peepholes, cell_before[:, None])
        i, f, g, o = gates.chunk(4, 1)
        i_and_f = slice(2 * cell_before.shape[1])
        gates[:, i_and_f].sigmoid_()
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

        Args:
            d_r: The gradient of R, which is overwritten.
            d_cell: The part of the gradient of the new cell that comes from the next step.
            cell_before: The old cell.
            saved: What `forward` returned.
            buffer: Where the gradients of the gates are written; by default a new tensor.
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
        # The old cell also reaches the gates, through the peepholes.
        through_peepholes = (split_gates(d_gates) * self.peepholes).sum(1)
        return d_gates, d_cell_after.mul_(f).add_(through_peepholes)


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
        # The kernel adds this to the gates: their bias, and the peepholes' terms.
        bias_and_peepholes = torch.addcmul(self.bias, self.peepholes, cell_before[:, None])
        vectors = map(self._vectors, (gates, bias_and_peepholes.flatten(1, 2), cell_before))
        new_r, new_cell, activated = fused_lstm_cell(*vectors, input_bias=None, hidden_bias=None)
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
        d_gate_vectors, d_cell_vectors, _ = fused_lstm_cell_backward(
            *vectors, activated, has_bias=False
        )
        d_gates = self._maps(d_gate_vectors, cell_before)
        d_before = self._maps(d_cell_vectors, cell_before)
        # The kernel knows no peepholes, through which the old cell also reaches the gates.
        for gate in PEEPHOLE_GATES:
            d_before.addcmul_(d_gates.chunk(4, 1)[gate], self.peepholes[:, gate])
        return d_gates, d_before

    def _vectors(self, maps: Tensor) -> Tensor:
        """Reshape maps (b, c, h, w) to the vectors of the kernels.

        There is a vector for each pixel in channels-last layout, and otherwise one for each frame.
        """
        if self.by_pixel:
            return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
        return maps.reshape(len(maps), -1)

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
        # A column and a row of indices: together they select a block of a weight.
        self.output_indices = channel_indices(outputs).to(device)[:, None]
        self.input_indices = channel_indices(inputs_read).to(device)
        padded_shape = (
            sum(padded for _, padded in outputs),
            sum(padded for _, padded in inputs_read),
            *conv.kernel_size,
        )
        layout = torch.channels_last if by_pixel else torch.contiguous_format
        self.is_padded = padded_shape != conv.weight.shape
        # Only channels-last layout has padding. Otherwise the convolution's own weights are used.
        self.weight = conv.weight.detach()
        if by_pixel:
            self.weight = conv.weight.new_zeros(padded_shape).to(memory_format=layout)
        self.bias = conv.weight.new_zeros(padded_shape[0])
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
        # Without padding the weights are in memory of their own only in channels-last layout.
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
        """Add to `.grad` of the weight and the bias, given inputs and gradients of the output.

        Entries that belong to padding are left out.
        """
        _, d_weight, d_bias = torch.ops.aten.convolution_backward(
            gradients,
            inputs,
            self.weight,
            bias_sizes=[len(self.bias)],
            stride=[1, 1],
            padding=self.padding,
            dilation=[1, 1],
            transposed=False,
            output_padding=[0, 0],
            groups=1,
            output_mask=[False, True, True],  # not the gradient of the input
        )
        if self.is_padded:
            unpadded_d_weight = d_weight[self.output_indices, self.input_indices]
        else:
            # In channels-last layout `d_weight` has this layout as well, but the parameter has not.
            # (Selecting by indices, as above, copies to the parameter's layout in any case.)
            unpadded_d_weight = d_weight.contiguous()
        accumulate_grad(self.conv.weight, unpadded_d_weight)
        accumulate_grad(self.conv.bias, d_bias[self.output_indices[:, 0]])

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve by the kernel that is fastest for this device and number of weights."""
        if self.uses_mkldnn:
            return torch.mkldnn_convolution(
                x, weight, bias, self.padding, stride=[1, 1], dilation=[1, 1], groups=1
            )
        if self.uses_product and len(x) == 1:
            # Each column holds the inputs that one pixel of the output depends on.
            columns = F.unfold(x, self.conv.kernel_size, padding=self.padding[0])[0]
            convolved = (weight.flatten(1) @ columns).view(1, -1, *x.shape[2:])
            return convolved if bias is None else convolved.add_(bias[:, None, None])
        return F.conv2d(x, weight, bias, padding=self.padding)


def split_gates(gates: Float[Tensor, "b 4c h w"]) -> Float[Tensor, "b 4 c h w"]:
    """Split the channels of the gates into two dimensions: the four gates, and their channels."""
    return gates.unflatten(1, (4, -1))


def uses_tf32(like: Tensor) -> bool:
    """Return whether convolutions of tensors like this one may use TF32.

    The engine then uses channels-last layout, in which TF32 is faster.
    """
    return like.is_cuda and like.dtype == torch.float32 and precision_allowed("conv") == "tf32"


def accumulate_grad(parameter: Tensor | None, gradient: Tensor) -> None:
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
