"""The three bilinear maps of a convolution, for many tangents of one factor at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
TRIALS = 3
WORKSPACE = 2**28  # bytes for an algorithm to work in
Known = dict[tuple[Any, ...], Tensor]


@dataclass(frozen=True)
class Geometry:
    """What a convolution without groups is called with besides its tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def output(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """(B, I, …) and (O, I, …) to (B, O, …)."""
        none = [0] * len(self.stride)
        return aten.convolution(inputs, weight, bias, self.stride, self.padding, self.dilation, False, none, 1)

    def input(self, gradient: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradient by an input of `shape`."""
        return self._backward(gradient, _nothing(gradient, shape), weight, 0)

    def weight(self, gradient: Tensor, inputs: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradient by a weight of `shape`."""
        return self._backward(gradient, inputs, _nothing(gradient, shape), 1)

    def _backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor, which: int) -> Tensor:
        none, mask = [0] * len(self.stride), [which == 0, which == 1, False]
        return aten.convolution_backward(
            gradient, inputs, weight, None, self.stride, self.padding, self.dilation, False, none, 1, mask
        )[which]

    def mirrored(self, weight: Tensor) -> Geometry | None:
        """Of the convolution with the mirrored weight whose input gradient is this one's output, and the reverse."""
        padding = tuple(
            d * (edge - 1) - p for d, edge, p in zip(self.dilation, weight.shape[2:], self.padding, strict=True)
        )
        return Geometry(self.stride, padding, self.dilation) if set(self.stride) == {1} and min(padding) >= 0 else None


class Convolution:
    """One of the three maps, with one factor fixed.

    `which` is what the map makes: the convolution's `output` of an input and a weight, the gradient by the
    `input` of an output gradient and a weight, or the gradient by the `weight` of an output gradient and an
    input. `varies` says which of the two factors is the tangent (0 or 1); the other one is `constant`.
    `shape` is that of what is made. The result is cut into `pieces` along the batch. With a `bias`, a
    second tangent is added to the output.
    """

    def __init__(
        self, geometry: Geometry, which: str, varies: int, constant: Tensor, shape: tuple[int, ...], bias: bool = False
    ) -> None:
        self.geometry, self.which, self.varies, self.bias = geometry, which, varies, bias
        self.constant, self.shape, self.pieces, self.order = constant, shape, 1, 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for maps that can be done as one."""
        return self.geometry, self.which, self.varies, self.bias, self.shape, tuple(self.constant.shape)

    @property
    def weight_varies(self) -> bool:
        """Whether the tangent is the weight, so that all batches can go through it at once."""
        return self.which != "weight" and self.varies == 1

    @classmethod
    def joined(cls, maps: Sequence[Convolution], known: Known) -> Convolution:
        """One map whose batch is those of all `maps`; `known` are joined constants, which maps share."""
        first = maps[0]
        key = tuple(_identity(member.constant) for member in maps)
        if key not in known:
            known[key] = torch.cat([member.constant for member in maps])
        constant = known[key]
        shape = first.shape if first.which == "weight" else (len(maps) * first.shape[0], *first.shape[1:])
        return cls(first.geometry, first.which, first.varies, constant, shape, first.bias)

    def __call__(self, *tangents: Tensor) -> Tensor | Sequence[Tensor]:
        """The map of tangents (k, …): (k, …), or one such for each piece."""
        result = getattr(self, f"_{self.which}")(*tangents)
        return result.chunk(self.pieces, 1) if self.pieces > 1 else result

    def _output(self, tangent: Tensor, bias: Tensor | None = None) -> Tensor:
        k, (batch, outs, *space) = len(tangent), self.shape
        if self.varies == 0:
            result = made(self.geometry, tangent.flatten(0, 1), self.constant, (k * batch, outs, *space), "output")
            return result.unflatten(0, (k, batch))
        weights = tangent.flatten(0, 1)
        result = made(self.geometry, self.constant, weights, (batch, k * outs, *space), "output")
        if bias is not None:
            result += bias.reshape(-1, *[1] * len(space))
        return result.unflatten(1, (k, outs)).movedim(1, 0)

    def _input(self, tangent: Tensor) -> Tensor:
        k, (batch, ins, *space) = len(tangent), self.shape
        if self.varies == 0:
            result = made(self.geometry, tangent.flatten(0, 1), self.constant, (k * batch, ins, *space), "input")
            return result.unflatten(0, (k, batch))
        weights = tangent.movedim(0, 1).flatten(1, 2)
        result = made(self.geometry, self.constant, weights, (batch, k * ins, *space), "input")
        return result.unflatten(1, (k, ins)).movedim(1, 0)

    def _weight(self, tangent: Tensor) -> Tensor:
        k, (outs, ins, *space) = len(tangent), self.shape
        beside = tangent.movedim(0, 1).flatten(1, 2)
        if self.varies == 0:
            return made(self.geometry, beside, self.constant, (k * outs, ins, *space), "weight").unflatten(0, (k, outs))
        result = made(self.geometry, self.constant, beside, (outs, k * ins, *space), "weight")
        return result.unflatten(1, (k, ins)).movedim(1, 0)


def number_constants(maps: Sequence[Convolution]) -> None:
    """Give each map the number of its constant, counted by their first use."""
    numbers: dict[Any, int] = {}
    for member in maps:
        member.order = numbers.setdefault(_identity(member.constant), len(numbers))


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two views of the same numbers."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@dataclass(frozen=True)
class BiasGradient:
    """The sum of an output gradient over batch and space."""

    ndim: int

    @property
    def key(self) -> tuple[str, int]:
        """Equal for maps that can be done as one."""
        return "bias", self.ndim

    @classmethod
    def joined(cls, maps: Sequence[BiasGradient], known: Known) -> BiasGradient:  # noqa: ARG003
        """The same map of a larger batch."""
        return maps[0]

    def __call__(self, tangent: Tensor) -> Tensor:
        """(k, B, O, …) to (k, O)."""
        return tangent.sum([1, *range(3, self.ndim + 1)])


def made(geometry: Geometry, moving: Tensor, other: Tensor, shape: Sequence[int], which: str) -> Tensor:
    """One of the three maps; on a GPU by whichever of two equal ways is faster there.

    With a stride of one, an output is also an input's gradient with the mirrored weight, and the reverse,
    and for the two cuDNN may choose different algorithms. Its first choice can be fifteen times slower, and
    take gigabytes to work in; so each is tried once, with little memory.
    """
    question = _question(geometry, moving, other, which)
    ways = _ways(geometry, moving, other, shape, which)
    if question not in _CHOICE and moving.is_cuda and not torch.cuda.is_current_stream_capturing():
        room = WORKSPACE + 2 * math.prod(shape) * moving.element_size()
        times = [_seconds(way, moving.device, room) for way in ways]
        _CHOICE[question] = times.index(min(times))
    return ways[_CHOICE.get(question, 0)]()


_CHOICE: dict[Any, int] = {}


def _question(geometry: Geometry, moving: Tensor, other: Tensor, which: str) -> tuple[Any, ...]:
    flags = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    return geometry, which, moving.shape, other.shape, moving.dtype, moving.device, flags


def _ways(
    geometry: Geometry, moving: Tensor, other: Tensor, shape: Sequence[int], which: str
) -> list[Callable[[], Tensor]]:
    """The map itself, and the same by the mirrored weight where that exists."""
    if which == "weight":
        return [lambda: geometry.weight(moving, other, shape)]
    mirrored = geometry.mirrored(other)

    def turned() -> Tensor:
        return other.transpose(0, 1).flip(*range(2, other.ndim))

    if which == "output":
        first = [lambda: geometry.output(moving, other)]
        return first if mirrored is None else [*first, lambda: mirrored.input(moving, turned(), shape)]
    first = [lambda: geometry.input(moving, other, shape)]
    return first if mirrored is None else [*first, lambda: mirrored.output(moving, turned())]


def _seconds(way: Callable[[], Tensor], device: torch.device, room: int) -> float:
    """How long a way takes on the GPU, after a first time in which it may take only so many bytes more."""
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved(device) + room) / total), device)
    try:
        way()
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
    torch.cuda.current_stream().synchronize()
    started = time.perf_counter()
    for _ in range(TRIALS):
        way()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - started


def _nothing(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of which only the shape is read."""
    return like.new_empty(1).expand(shape)
