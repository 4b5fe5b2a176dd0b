"""Products of a real GPU beside the emulated ones: how much of what the chip does does the emulation explain?

A case is one matrix product or convolution on inputs that any machine can make again from their number.
What a GPU computed is kept in `data/products`, so that every machine can compare.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from gpulab.numerics import FORMATS, round_to

KEPT = 2048  # elements of each result
# (rows, summed, columns) of a matrix product; (images, channels, height, width), (channels, size, stride).
MATRICES = ((64, 64, 64), (48, 112, 80), (128, 1024, 64), (32, 8192, 32))
CONVOLUTIONS = (((1, 16, 48, 64), (32, 3, 1)), ((8, 32, 16, 16), (64, 3, 2)), ((2, 64, 20, 24), (48, 1, 1)))
PASSES = ("convolution", "gradient of the input", "gradient of the weight")
INPUTS = ("normal", "badly scaled", "positive", "already rounded")


@dataclass(frozen=True)
class Case:
    """One product: its kind, the format asked for, the format of the result, the inputs and their shape."""

    operation: str
    format: str
    result: str
    inputs: str
    shape: int

    def __str__(self) -> str:
        return f"{self.operation}/{self.format}/{self.result}/{self.inputs}/{self.shape}"

    def operands(self) -> tuple[Tensor, Tensor]:
        """The two float32 factors; for gradients the second is the one that flows in."""
        seed = [INPUTS.index(self.inputs), self.shape, ("matrix", *PASSES).index(self.operation)]
        generator = np.random.default_rng(seed)
        pair = [self._drawn(generator, shape) for shape in self._shapes()]
        if self.inputs == "already rounded" and self.format in FORMATS:
            pair = [round_to(x, self.format) for x in pair]
        return pair[0], pair[1]

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.operation == "matrix":
            rows, inner, columns = MATRICES[self.shape]
            return (rows, inner), (inner, columns)
        x, (channels, size, stride) = CONVOLUTIONS[self.shape]
        weight = (channels, x[1], size, size)
        out = (x[0], channels, *((n - 1) // stride + 1 for n in x[2:]))
        return {PASSES[0]: (x, weight), PASSES[1]: (out, weight), PASSES[2]: (out, x)}[self.operation]

    def _drawn(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
        if self.inputs == "positive":
            return torch.from_numpy(generator.random(shape, dtype=np.float32))
        x = generator.standard_normal(shape, dtype=np.float32)
        if self.inputs == "badly scaled":
            x = np.ldexp(x, generator.integers(-10, 11, shape))
        return torch.from_numpy(x.astype(np.float32))

    def compute(self, first: Tensor, second: Tensor) -> Tensor:
        """The product, in the operands' own type."""
        if self.operation == "matrix":
            if self.result == "float32" and first.dtype in (torch.bfloat16, torch.float16):
                return torch.mm(first, second, out_dtype=torch.float32)
            return first @ second
        x, (channels, size, stride) = CONVOLUTIONS[self.shape]
        padding = size // 2
        if self.operation == PASSES[0]:
            return F.conv2d(first, second, stride=stride, padding=padding)
        if self.operation == PASSES[1]:
            return conv2d_input(x, second, first, stride=stride, padding=padding)
        return conv2d_weight(second, (channels, x[1], size, size), first, stride=stride, padding=padding)


def cases() -> list[Case]:
    """Every case: matrix products in all formats, convolutions and their gradients in those that cuDNN has."""
    formats = (("float32", "float32"), ("tf32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"))
    more = (("bfloat16", "float32"), ("float16", "float32"), ("float8_e4m3fn", "float32"))
    matrices = itertools.product(["matrix"], (*formats, *more), INPUTS, range(len(MATRICES)))
    convolutions = itertools.product(PASSES, formats, INPUTS, range(len(CONVOLUTIONS)))
    return [Case(op, format_, result, given, n) for op, (format_, result), given, n in (*matrices, *convolutions)]


def kept(x: Tensor) -> Tensor:
    """Up to `KEPT` elements of a result, spread evenly."""
    flat = x.reshape(-1)
    return flat[torch.linspace(0, flat.numel() - 1, min(KEPT, flat.numel())).long().to(flat.device)]
