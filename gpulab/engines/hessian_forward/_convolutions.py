"""The three bilinear maps of a convolution, for many tangents of one factor at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gpulab._torch_internals import Nested
from gpulab.engines.hessian_forward._conv_autotune import fastest_candidate
from gpulab.numerics._flags import precision_allowed

aten = torch.ops.aten
MAX_WORKSPACE_BYTES = 2**28  # bytes that an algorithm of cuDNN may use besides the result

Constants = dict[tuple[object, ...], Tensor]  # batches of several, by their identities


@dataclass(frozen=True)
class Geometry:
    """The options of a convolution without groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of_options(cls, options: Sequence[Nested]) -> Geometry | None:
        """The geometry from the options of a torch operation; None if grouped or transposed."""
        stride, padding, dilation, transposed, _, groups = options[:6]
        return (
            cls(tuple(stride), tuple(padding), tuple(dilation))
            if groups == 1 and not transposed
            else None
        )

    def apply(self, target: str, first: Tensor, second: Tensor, shape: Sequence[int]) -> Tensor:
        """Compute the `output`, the gradient of the `input`, or the gradient of the `weight`.

        Args:
            target: What is computed, `output`, `input` or `weight`.
            first: Inputs (B, I, …), or an output gradient (B, O, …).
            second: A weight (O, I, …), or inputs (B, I, …) for the gradient by the weight.
            shape: Of what is made.
        """
        options = self.stride, self.padding, self.dilation, False, [0] * len(self.stride), 1
        if target == "output":
            return aten.convolution(first, second, None, *options)
        placeholder = first.new_empty(1).expand(shape)  # only its shape is read
        inputs, weight = (placeholder, second) if target == "input" else (second, placeholder)
        mask = [target == "input", target == "weight", False]
        return aten.convolution_backward(first, inputs, weight, None, *options, mask)[
            mask.index(True)
        ]

    def mirrored(self, weight: Tensor) -> Geometry | None:
        """The convolution whose input gradient with the mirrored weight is this one's output.

        None for a stride other than one, and where the mirrored padding would be negative.
        """
        padding = tuple(
            d * (edge - 1) - p
            for d, edge, p in zip(self.dilation, weight.shape[2:], self.padding, strict=True)
        )
        if set(self.stride) != {1} or min(padding) < 0:
            return None
        return Geometry(self.stride, padding, self.dilation)


@dataclass(eq=False)
class Convolution:
    """One of the three maps, with one factor fixed."""

    geometry: Geometry
    target: str  # what the map makes of its two factors: see `Geometry.apply`
    tangent_position: int  # which of them is the tangent, 0 or 1
    constant: Tensor  # the other one
    shape: tuple[int, ...]  # of what it makes
    has_bias: bool = False  # whether a second tangent is added to the output
    chunk_count: int = 1  # into which the result is cut along the batch
    constant_number: int = 0  # the number of the constant

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for maps that can be done as one."""
        return (
            self.geometry,
            self.target,
            self.tangent_position,
            self.has_bias,
            self.shape,
            tuple(self.constant.shape),
        )

    @property
    def has_weight_tangent(self) -> bool:
        """Whether the tangent is the weight, so that all batches can go through it at once."""
        return self.target != "weight" and self.tangent_position == 1

    @classmethod
    def join(cls, maps: Sequence[Convolution], constants: Constants) -> Convolution:
        """One map of the concatenated batches of all `maps`; concatenated constants are shared."""
        first_map = maps[0]
        key = tuple(_identity(member.constant) for member in maps)
        if key not in constants:
            constants[key] = torch.cat([member.constant for member in maps])
        shape = first_map.shape
        if first_map.target != "weight":
            shape = (len(maps) * shape[0], *shape[1:])
        return replace(
            first_map, constant=constants[key], shape=shape, chunk_count=1, constant_number=0
        )

    def __call__(self, tangent: Tensor, bias: Tensor | None = None) -> Tensor | Sequence[Tensor]:
        """The map of tangents (k, …): (k, …), or one such for each piece."""
        # The k tangents are more members of a batch, or more channels; so are their results.
        k = len(tangent)
        axis = self.tangent_position
        shape = list(self.shape)
        shape[axis] *= k
        is_in_batch = self.target == "output" or (self.target == "input" and axis == 0)
        folded_tangent = (
            tangent.flatten(0, 1) if is_in_batch else tangent.movedim(0, 1).flatten(1, 2)
        )
        factors = (folded_tangent, self.constant) if axis == 0 else (self.constant, folded_tangent)
        result = convolve(self.geometry, self.target, *factors, shape)
        if bias is not None:
            result += bias.reshape(-1, *[1] * (len(shape) - 2))
        result = result.unflatten(axis, (k, self.shape[axis]))
        result = result.movedim(1, 0) if axis == 1 else result
        return result.chunk(self.chunk_count, 1) if self.chunk_count > 1 else result


@dataclass(frozen=True)
class BiasGradient:
    """The sum of an output gradient (B, O, …) of `ndim` dimensions over batch and space."""

    ndim: int

    @property
    def key(self) -> BiasGradient:
        """Equal for maps that can be done as one."""
        return self

    def join(self, _: Sequence[BiasGradient], __: Constants) -> BiasGradient:
        """The same map of a larger batch."""
        return self

    def __call__(self, tangent: Tensor) -> Tensor:
        """(k, B, O, …) to (k, O)."""
        return tangent.sum([1, *range(3, self.ndim + 1)])


def convolve(
    geometry: Geometry, target: str, first: Tensor, second: Tensor, shape: Sequence[int]
) -> Tensor:
    """`geometry.apply`; on a GPU by the faster of two equivalent algorithms.

    With a stride of one, an output is also an input's gradient with the mirrored weight, and the
    reverse, and for the two cuDNN may choose different algorithms. Its first choice can be fifteen
    times slower, and take gigabytes to work in. So each algorithm is tried once with little memory,
    even a single one: cuDNN remembers what it chose then.
    """
    if not first.is_cuda:
        return geometry.apply(target, first, second, shape)
    candidates: list[Callable[[], Tensor]] = [partial(geometry.apply, target, first, second, shape)]
    mirrored = geometry.mirrored(second) if target != "weight" else None
    if mirrored is not None:
        mirrored_target = "input" if target == "output" else "output"

        def apply_mirrored() -> Tensor:
            mirrored_weight = second.transpose(0, 1).flip(*range(2, second.ndim))
            return mirrored.apply(mirrored_target, first, mirrored_weight, shape)

        candidates.append(apply_mirrored)
    flags = precision_allowed("conv"), torch.backends.cudnn.deterministic
    key = geometry, target, first.shape, second.shape, first.dtype, first.device, flags
    workspace = MAX_WORKSPACE_BYTES + 2 * math.prod(shape) * first.element_size()
    return candidates[fastest_candidate(key, candidates, first.device, workspace)]()


def number_constants(maps: Sequence[Convolution]) -> None:
    """Give each map the number of its constant, counted by their first use."""
    numbers: dict[object, int] = {}
    for member in maps:
        member.constant_number = numbers.setdefault(_identity(member.constant), len(numbers))


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two views of the same numbers."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
