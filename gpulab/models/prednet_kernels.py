"""What the written-out gradient of PredNet is made of: a convolution and the cell of the LSTM, forward and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

tanh_backward, sigmoid_backward = torch.ops.aten.tanh_backward.grad_input, torch.ops.aten.sigmoid_backward.grad_input
LARGE = 300_000  # weights; of smaller ones in PredNet's published and quick sizes cuDNN is faster on an H200


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
        self, d_r: Tensor, d_cell: Tensor, before: Tensor, kept: tuple[Tensor, ...], d_gates: Tensor
    ) -> Tensor:
        """Write `d_gates`; the gradient of the cell before, but for its peepholes. Overwrites `d_r`."""
        gates, tanh = kept
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
        return of_cell.mul_(f)


class FusedCell(Cell):
    """The same by torch's kernels for `nn.LSTMCell`, to which a frame or a pixel is one vector."""

    def __init__(self, peepholes: Float[Tensor, "1 4 c h w"], by_pixel: bool) -> None:
        super().__init__(peepholes)
        self.by_pixel = by_pixel

    def forward(self, gates: Tensor, before: Tensor, after: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        """Write the cell `after`, and R; what `backward` needs."""
        peeping = (self.peepholes * before[:, None]).flatten(1, 2)
        vectors = map(self._vectors, (gates, peeping, before))
        new_r, new_cell, activated = torch.ops.aten._thnn_fused_lstm_cell(*vectors, None, None)
        after.copy_(self._maps(new_cell, after))
        r.copy_(self._maps(new_r, r))
        return activated, after

    def backward(
        self, d_r: Tensor, d_cell: Tensor, before: Tensor, kept: tuple[Tensor, ...], d_gates: Tensor
    ) -> Tensor:
        """Write `d_gates`; the gradient of the cell before, but for its peepholes."""
        activated, after = kept
        vectors = map(self._vectors, (d_r, d_cell, before, after))
        new_gates, d_before, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*vectors, activated, False)
        d_gates.copy_(self._maps(new_gates, d_gates))
        return self._maps(d_before, before)

    def _vectors(self, maps: Tensor) -> Tensor:
        return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1]) if self.by_pixel else maps.reshape(len(maps), -1)

    def _maps(self, vectors: Tensor, like: Tensor) -> Tensor:
        if not self.by_pixel:
            return vectors.view(like.shape)
        return vectors.view(len(like), *like.shape[2:], like.shape[1]).permute(0, 3, 1, 2)


class Convolution:
    """One of the network's convolutions: forward, back to its input, and back to its weights for a whole window."""

    def __init__(self, conv: nn.Conv2d, by_pixel: bool) -> None:
        self.conv, self.padding = conv, [conv.kernel_size[0] // 2] * 2
        layout = torch.channels_last if by_pixel else torch.contiguous_format
        self.weight = conv.weight.detach().to(memory_format=layout, copy=by_pixel)
        self.turned = torch.empty_like(self._turned(), memory_format=layout)
        float32 = conv.weight.dtype == torch.float32
        # Small inputs, one at a time, torch leaves to a kernel that gains nothing from a second thread.
        on_cpu = conv.weight.device.type == "cpu" and float32
        self.threaded = on_cpu and torch.get_num_threads() > 1 and torch.backends.mkldnn.is_available()
        # Many channels of one small map cuDNN leaves to a part of the GPU; cuBLAS splits their sum.
        self.as_product = conv.weight.is_cuda and float32 and not by_pixel and conv.weight.numel() >= LARGE

    def _turned(self) -> Tensor:
        return self.conv.weight.detach().flip(2, 3).transpose(0, 1)

    def begin(self) -> None:
        """The weights are new."""
        self.turned.copy_(self._turned())
        if self.weight.data_ptr() != self.conv.weight.data_ptr():
            self.weight.copy_(self.conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        """What it makes of (b, c, h, w)."""
        return self._convolve(x, self.weight, self.conv.bias)

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient of its input."""
        return self._convolve(gradient, self.turned, None)

    def set_gradients(self, inputs: Tensor, gradients: Tensor) -> None:
        """Those of weights and bias, from all steps."""
        arguments = gradients.flatten(0, 1), inputs.flatten(0, 1), self.weight, [self.conv.out_channels]
        options = [1, 1], self.padding, [1, 1], False, [0, 0], 1, [False, True, True]
        _, weight, bias = torch.ops.aten.convolution_backward(*arguments, *options)
        self.conv.weight.grad, self.conv.bias.grad = weight.contiguous(), bias  # type: ignore[union-attr]

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
    backend: Any = torch.backends.cudnn
    return like.is_cuda and like.dtype == torch.float32 and backend.conv.fp32_precision == "tf32"


def zeros(like: Tensor, shape: tuple[int, int, int, int, int], by_pixel: bool) -> Float[Tensor, "t b c h w"]:
    """Maps in which the channels of a pixel lie side by side (`by_pixel`), or the pixels of a channel do."""
    if not by_pixel:
        return like.new_zeros(shape)
    t, b, c, h, w = shape
    return like.new_zeros(t, b, h, w, c).permute(0, 1, 4, 2, 3)
