"""The three bilinear maps of a convolution, applied to many tangents of one factor at once.

They are the output, the gradient of the input, and the gradient of the weight. Each is linear in
both of its factors. If one factor is constant, the map is linear in the tangent of the other.
"""

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
MAX_WORKSPACE_BYTES = 2**28  # bytes that an algorithm of cuDNN may use in addition to the result

# One call applies a map to all k tangents of a factor. They are folded into a dimension that the
# map does not sum over: the batch B, the output channels O or the input channels I. The results are
# unfolded from the same dimension of the result, whose number there is `tangent_position`.
FOLDED_DIM = {  # (target, tangent_position) -> the dimension of the factor
    ("output", 0): 0,  # inputs (B, I, …) -> (k B, I, …); result (k B, O, …)
    ("output", 1): 0,  # weight (O, I, …) -> (k O, I, …); result (B, k O, …)
    ("input", 0): 0,  # gradient (B, O, …) -> (k B, O, …); result (k B, I, …)
    ("input", 1): 1,  # weight (O, I, …) -> (O, k I, …); result (B, k I, …)
    ("weight", 0): 1,  # gradient (B, O, …) -> (B, k O, …); result (k O, I, …)
    ("weight", 1): 1,  # inputs (B, I, …) -> (B, k I, …); result (O, k I, …)
}

# Concatenations of constants, by the identities of the constants.
Constants = dict[tuple[object, ...], Tensor]


@dataclass(frozen=True)
class Geometry:
    """The options of a convolution without groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of_options(cls, options: Sequence[Nested]) -> Geometry | None:
        """Read the options of a torch operation; None for a grouped or transposed convolution."""
        stride, padding, dilation, transposed, _output_padding, groups = options[:6]
        if transposed or groups != 1:
            return None
        return cls(tuple(stride), tuple(padding), tuple(dilation))

    def apply(self, target: str, first: Tensor, second: Tensor, shape: Sequence[int]) -> Tensor:
        """Compute one of the three maps of its two factors.

        Args:
            target: The map: `output`, or the gradient of the `input` or of the `weight`.
            first: The inputs (B, I, …) for `output`; else the gradient of the output (B, O, …).
            second: The inputs (B, I, …) for `weight`; else the weight (O, I, …).
            shape: The shape of the result.
        """
        # The last three: the convolution is not transposed, has no output padding and one group.
        options = self.stride, self.padding, self.dilation, False, [0] * len(self.stride), 1
        if target == "output":
            return aten.convolution(first, second, None, *options)
        # torch requires the tensor whose gradient is computed, but reads only its shape.
        placeholder = first.new_empty(1).expand(shape)
        inputs, weight = (placeholder, second) if target == "input" else (second, placeholder)
        # The mask selects which gradients are computed: of the input, the weight and the bias.
        mask = [target == "input", target == "weight", False]
        gradients = aten.convolution_backward(first, inputs, weight, None, *options, mask)
        return gradients[mask.index(True)]

    def mirrored(self, weight: Tensor) -> Geometry | None:
        """Return the geometry of a convolution whose input gradient is this convolution's output.

        The other convolution has the mirrored weight. The same geometry also works the other way
        round: the output of the other convolution is this convolution's input gradient.

        Returns:
            The other geometry. None if a stride is not 1, or if the padding would be negative.
        """
        # A kernel with k weights along an edge, at distances d, spans d (k − 1) + 1 inputs. The
        # gradient of an input with padding p is an output with the padding d (k − 1) − p.
        padding = tuple(
            d * (edge - 1) - p
            for d, edge, p in zip(self.dilation, weight.shape[2:], self.padding, strict=True)
        )
        if set(self.stride) != {1} or min(padding) < 0:
            return None
        return Geometry(self.stride, padding, self.dilation)


@dataclass(eq=False)
class Convolution:
    """One of the three maps with one factor constant: a linear map of the other factor's tangent.

    Attributes:
        geometry: Stride, padding and dilation.
        target: The map, as `Geometry.apply` takes it.
        tangent_position: Which of the two factors is the tangent, 0 or 1.
        constant: The other factor.
        shape: The shape of the result for one tangent.
        has_bias: Whether the tangent of a bias is added to the output.
        chunk_count: The number of pieces into which the result is split along the batch.
        constant_number: A number that maps with the same constant have in common; see
            `number_constants`.
    """

    geometry: Geometry
    target: str
    tangent_position: int
    constant: Tensor
    shape: tuple[int, ...]
    has_bias: bool = False
    chunk_count: int = 1
    constant_number: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for maps that can be joined into one."""
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
        """Whether the tangent is that of a weight; such maps can be joined along the batch."""
        return self.target != "weight" and self.tangent_position == 1

    @classmethod
    def join(cls, maps: Sequence[Convolution], constants: Constants) -> Convolution:
        """Join maps into one, whose constant is the concatenation of their constants.

        Args:
            maps: Maps with the same `key`.
            constants: The concatenations made so far. A new one is added, so that another join of
                the same constants shares it.
        """
        first_map = maps[0]
        key = tuple(_identity(member.constant) for member in maps)
        if key not in constants:
            constants[key] = torch.cat([member.constant for member in maps])
        # The joined batch is the first dimension of the result, unless the result is the gradient
        # of a weight, which is a sum over the batch.
        shape = first_map.shape
        if first_map.target != "weight":
            shape = (len(maps) * shape[0], *shape[1:])
        return replace(
            first_map, constant=constants[key], shape=shape, chunk_count=1, constant_number=0
        )

    def __call__(self, tangent: Tensor, bias: Tensor | None = None) -> Tensor | Sequence[Tensor]:
        """Apply the map to tangents (k, …).

        Args:
            tangent: The tangents of the factor at `tangent_position`.
            bias: The tangents of the bias, (k, O).

        Returns:
            The results (k, *shape), or the list of their pieces if `chunk_count` is above 1.
        """
        k = len(tangent)
        folded_dim = FOLDED_DIM[self.target, self.tangent_position]
        if folded_dim == 0:
            folded_tangent = tangent.flatten(0, 1)
        else:
            folded_tangent = tangent.movedim(0, 1).flatten(1, 2)
        if self.tangent_position == 0:
            factors = folded_tangent, self.constant
        else:
            factors = self.constant, folded_tangent
        result_dim = self.tangent_position
        shape = list(self.shape)
        shape[result_dim] *= k
        result = convolve(self.geometry, self.target, *factors, shape)
        if bias is not None:
            # A bias is given only with the tangent of a weight. The result is then (B, k O, …), and
            # the folded channels (k O) are its dimension 1.
            spatial_ndim = len(shape) - 2
            result += bias.reshape(-1, *[1] * spatial_ndim)
        results = result.unflatten(result_dim, (k, self.shape[result_dim]))
        if result_dim == 1:
            results = results.movedim(1, 0)
        return results.chunk(self.chunk_count, 1) if self.chunk_count > 1 else results


@dataclass(frozen=True)
class BiasGradient:
    """The gradient of a bias: the sum of the output gradient (B, O, …) over batch and space.

    `ndim` is the number of dimensions of the output gradient.
    """

    ndim: int

    @property
    def key(self) -> BiasGradient:
        """A key that is equal for maps that can be joined into one."""
        return self

    def join(self, _: Sequence[BiasGradient], __: Constants) -> BiasGradient:
        """Return the map of a larger batch, which is the same map."""
        return self

    def __call__(self, tangent: Tensor) -> Tensor:
        """Sum tangents (k, B, O, …) of the output gradient over batch and space; return (k, O)."""
        return tangent.sum([1, *range(3, self.ndim + 1)])


def convolve(
    geometry: Geometry, target: str, first: Tensor, second: Tensor, shape: Sequence[int]
) -> Tensor:
    """Compute `geometry.apply`; on a GPU, use the faster of two equivalent computations.

    With stride 1, an output can also be computed as the gradient of an input with the mirrored
    weight, and vice versa. cuDNN may choose different algorithms for the two. The algorithm that it
    chooses first can be fifteen times slower and can need gigabytes of memory. Each computation is
    therefore tried once with limited memory. This is done even if there is only one, because cuDNN
    remembers the algorithm that it chose.
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
    # A candidate may also allocate the result and one temporary copy of it.
    workspace = MAX_WORKSPACE_BYTES + 2 * math.prod(shape) * first.element_size()
    return candidates[fastest_candidate(key, candidates, first.device, workspace)]()


def number_constants(maps: Sequence[Convolution]) -> None:
    """Set `constant_number` of each map: maps with the same constant get the same number.

    Constants are numbered from 0 in the order in which they first occur.
    """
    numbers: dict[object, int] = {}
    for member in maps:
        member.constant_number = numbers.setdefault(_identity(member.constant), len(numbers))


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two views of the same numbers."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
