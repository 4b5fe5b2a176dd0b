"""What the written-out gradient of PredNet is made of: a convolution and the cell of the LSTM, forward and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gpulab._torch_internals import fused_lstm_cell, fused_lstm_cell_backward
from gpulab.numerics.flags import precision_allowed

tanh_backward, sigmoid_backward = torch.ops.aten.tanh_backward.grad_input, torch.ops.aten.sigmoid_backward.grad_input
PEEPING = 0, 1, 3  # of the four gates
LARGE = 300_000  # weights; of smaller ones in PredNet's published and quick sizes cuDNN is faster on an H200


Groups = Sequence[tuple[int, int]]  # of channels side by side: how many there are, and for how many there is room


def roomy(count: int, by_pixel: bool) -> tuple[int, int]:
    """A group of so many channels; pixel by pixel with room for a multiple of four."""
    return count, -(-count // 4) * 4 if by_pixel else count


def places(groups: Groups) -> Tensor:
    """Where the channels of groups lie.

    Examples:
        >>> places([(3, 4), (2, 4)])
        tensor([0, 1, 2, 4, 5])
    """
    begins = itertools.accumulate((room for _, room in groups), initial=0)
    return torch.cat([torch.arange(begin, begin + count) for begin, (count, _) in zip(begins, groups, strict=False)])


class Cell:
    """What the gates make of the cell, and back; they come before their nonlinearities and without peepholes."""

    def __init__(self, peepholes: Float[Tensor, "1 4 c h w"]) -> None:
        self.peepholes = peepholes

    def forward(self, gates: Tensor, before: Tensor, after: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        """Write the cell `after`, and R; what `backward` needs."""
        by_gate(gates).addcmul_(self.peepholes, before[:, None])
        i, f, g, o = gates.chunk(4, 1)
        gates[:, : 2 * before.shape[1]].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        tanh = torch.mul(i, g, out=after).addcmul_(f, before).tanh()
        torch.mul(o, tanh, out=r)
        return gates, tanh

    def backward(
        self, d_r: Tensor, d_cell: Tensor, before: Tensor, kept: tuple[Tensor, ...], room: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the gates, in `room` where there is any, and of the cell before. Overwrites `d_r`."""
        gates, tanh = kept
        d_gates = torch.empty_like(gates) if room is None else room
        i, f, g, o = gates.chunk(4, 1)
        d_i, d_f, d_g, d_o = d_gates.chunk(4, 1)
        torch.mul(d_r, tanh, out=d_o)
        of_cell = d_r.mul_(o)
        tanh_backward(of_cell, tanh, grad_input=of_cell)
        of_cell.add_(d_cell)
        torch.mul(of_cell, g, out=d_i)
        torch.mul(of_cell, before, out=d_f)
        torch.mul(of_cell, i, out=d_g)
        i_and_f = slice(2 * before.shape[1])
        sigmoid_backward(d_gates[:, i_and_f], gates[:, i_and_f], grad_input=d_gates[:, i_and_f])
        tanh_backward(d_g, g, grad_input=d_g)
        sigmoid_backward(d_o, o, grad_input=d_o)
        return d_gates, of_cell.mul_(f).add_((by_gate(d_gates) * self.peepholes).sum(1))


class FusedCell(Cell):
    """The same by torch's kernels for `nn.LSTMCell`, to which a frame or a pixel is one vector.

    The gates come to it before their bias, too.
    """

    def __init__(self, peepholes: Float[Tensor, "1 4 c h w"], bias: Float[Tensor, " 4c"], by_pixel: bool) -> None:
        super().__init__(peepholes)
        self.bias, self.by_pixel = bias.view(1, 4, -1, 1, 1), by_pixel

    def forward(self, gates: Tensor, before: Tensor, after: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        """Write the cell `after`, and R; what `backward` needs."""
        peeping = torch.addcmul(self.bias, self.peepholes, before[:, None]).flatten(1, 2)
        vectors = map(self._vectors, (gates, peeping, before))
        new_r, new_cell, activated = fused_lstm_cell(*vectors, None, None)
        after.copy_(self._maps(new_cell, after))
        r.copy_(self._maps(new_r, r))
        return activated, after

    def backward(
        self, d_r: Tensor, d_cell: Tensor, before: Tensor, kept: tuple[Tensor, ...], room: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the gates and of the cell before."""
        assert room is None, "torch's kernel makes its own"
        activated, after = kept
        vectors = map(self._vectors, (d_r, d_cell, before, after))
        new_gates, new_cell, _ = fused_lstm_cell_backward(*vectors, activated, False)
        d_gates, d_before = self._maps(new_gates, before), self._maps(new_cell, before)
        for number in PEEPING:
            d_before.addcmul_(d_gates.chunk(4, 1)[number], self.peepholes[:, number])
        return d_gates, d_before

    def _vectors(self, maps: Tensor) -> Tensor:
        return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1]) if self.by_pixel else maps.reshape(len(maps), -1)

    def _maps(self, vectors: Tensor, like: Tensor) -> Tensor:
        if not self.by_pixel:
            return vectors.view(len(like), -1, *like.shape[2:])
        return vectors.view(len(like), *like.shape[2:], -1).permute(0, 3, 1, 2)


class Convolution:
    """One of the network's convolutions: forward, back to its input, and back to its weights.

    Args:
        conv: Whose weights they are.
        made: The groups of channels that it makes, as they lie in a buffer.
        read: Those that it reads.
        by_pixel: Whether the channels of a pixel lie side by side.
    """

    def __init__(self, conv: nn.Conv2d, made: Groups, read: Groups, by_pixel: bool) -> None:
        self.conv, self.padding = conv, [conv.kernel_size[0] // 2] * 2
        device = conv.weight.device
        self.made, self.read = places(made).to(device)[:, None], places(read).to(device)
        shape = sum(room for _, room in made), sum(room for _, room in read), *conv.kernel_size
        layout = torch.channels_last if by_pixel else torch.contiguous_format
        self.weight, self.spread = conv.weight.detach(), shape != conv.weight.shape
        if by_pixel:
            self.weight = conv.weight.new_zeros(shape).to(memory_format=layout)
        self.bias = conv.weight.new_zeros(shape[0])
        self.turned = torch.empty_like(self._turned(), memory_format=layout)
        float32 = conv.weight.dtype == torch.float32
        # Small inputs, one at a time, torch leaves to a kernel that gains nothing from a second thread.
        on_cpu = device.type == "cpu" and float32
        self.threaded = on_cpu and torch.get_num_threads() > 1 and torch.backends.mkldnn.is_available()
        # Many channels of one small map cuDNN leaves to a part of the GPU; cuBLAS splits their sum.
        self.as_product = conv.weight.is_cuda and float32 and not by_pixel and conv.weight.numel() >= LARGE

    def _turned(self) -> Tensor:
        return self.weight.flip(2, 3).transpose(0, 1)

    def begin(self) -> None:
        """The weights are new, and have no gradients yet."""
        if self.spread:
            self.weight[self.made, self.read] = self.conv.weight
        elif self.weight.data_ptr() != self.conv.weight.data_ptr():
            self.weight.copy_(self.conv.weight)
        self.bias[self.made[:, 0]] = self.conv.bias  # type: ignore[assignment]
        self.turned.copy_(self._turned())
        self.conv.weight.grad = self.conv.bias.grad = None  # type: ignore[union-attr]

    def forward(self, x: Tensor, biased: bool = True) -> Tensor:
        """What it makes of (b, c, h, w)."""
        return self._convolve(x, self.weight, self.bias if biased else None)

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient of its input."""
        return self._convolve(gradient, self.turned, None)

    def add_gradients(self, inputs: Float[Tensor, "n c h w"], gradients: Float[Tensor, "n d h w"]) -> None:
        """Add the gradients of weights and bias for these inputs and gradients of the output."""
        arguments = gradients, inputs, self.weight, [len(self.bias)]
        options = [1, 1], self.padding, [1, 1], False, [0, 0], 1, [False, True, True]
        _, weight, bias = torch.ops.aten.convolution_backward(*arguments, *options)
        weight = weight[self.made, self.read] if self.spread else weight.contiguous()
        add_gradient(self.conv.weight, weight)
        add_gradient(self.conv.bias, bias[self.made[:, 0]])

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.threaded:
            return torch.mkldnn_convolution(x, weight, bias, self.padding, [1, 1], [1, 1], 1)
        if self.as_product and len(x) == 1:
            product = weight.flatten(1) @ F.unfold(x, self.conv.kernel_size, padding=self.padding[0])[0]
            convolved = product.view(1, -1, *x.shape[2:])
            return convolved if bias is None else convolved.add_(bias[:, None, None])
        return F.conv2d(x, weight, bias, padding=self.padding)


def by_gate(gates: Float[Tensor, "b 4c h w"]) -> Float[Tensor, "b 4 c h w"]:
    """The four gates apart."""
    return gates.unflatten(1, (4, -1))


def uses_tf32(like: Tensor) -> bool:
    """Whether convolutions of such a tensor on a GPU are allowed to be TF32, which is faster pixel by pixel."""
    return like.is_cuda and like.dtype == torch.float32 and precision_allowed("conv") == "tf32"


def add_gradient(parameter: Tensor | None, gradient: Tensor) -> None:
    """Add a gradient to the parameter's `.grad`, or set it where there is none yet."""
    if parameter is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def empty(like: Tensor, shape: tuple[int, int, int, int, int], by_pixel: bool) -> Float[Tensor, "t b c h w"]:
    """Maps in which the channels of a pixel lie side by side (`by_pixel`), or the pixels of a channel do."""
    if not by_pixel:
        return like.new_empty(shape)
    t, b, c, h, w = shape
    return like.new_empty(t, b, h, w, c).permute(0, 1, 4, 2, 3)
