"""A value of a training step: the content of a tensor at one moment, and of its reference.

A trace contains no tensors. It contains a sketch of the recorded numbers, a sketch of the
reference, and sums of the reference. They show whether two values of different executions are
equal, are equal in another order, or are parts of each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gpulab.audits import _count_sketch as sketches
from gpulab.audits import _tolerances as tol

SLAB_SIZE = 1 << 17  # float64 numbers that are allocated at once
MAX_PROFILE_SIZE = 512  # longer dimensions have no profile
MIN_MASK_SIZE = 8  # fewer Boolean values may be equal by chance
Array = np.ndarray


class Slabs:
    """Memory for small long-lived arrays, allocated in large pieces, and sketches by content.

    Small arrays that are allocated one by one between large temporary arrays fragment the heap, so
    that the memory of the large arrays cannot be reused. Without slabs, the heap of a process that
    recorded a transformer grew five times as much.
    """

    def __init__(self) -> None:
        self.slab = np.empty(0)
        self.n_used = 0
        self.sketches: dict[str, Array] = {}  # by the content of the tensor

    def sketch_of(self, tensor: Tensor, content: str) -> Array:
        """Return the sketch of a tensor; tensors with equal content share one."""
        known = self.sketches.get(content)
        if known is None:
            known = self.sketches[content] = self.store(sketches.sketch(tensor))
        return known

    def store(self, array: Array) -> Array:
        """Copy an array of float64 numbers to the current slab, and return the copy.

        >>> Slabs().store(np.array([[1.0, 2.0]]))
        array([[1., 2.]])
        """
        if self.n_used + array.size > self.slab.size:
            self.slab = np.empty(max(SLAB_SIZE, array.size))
            self.n_used = 0
        copy = self.slab[self.n_used : self.n_used + array.size].reshape(array.shape)
        copy[...] = array
        self.n_used += array.size
        return copy


@dataclass(eq=False)
class Value:
    """A tensor's content at one moment of an execution.

    Attributes:
        content: A hash of the recorded bits, the type and the shape.
        shape: The shape of the tensor.
        dtype: The type of the tensor, such as `float32`.
        sketch: The sketch of the recorded numbers; see `_count_sketch`.
        reference: The sketch of the float64 reference; None without references.
        total: The sum of the reference's numbers, and the sum of their squares.
        profiles: For each dimension, by its number, the sums of the numbers and of their squares
            over all other dimensions. Dimensions of size 1 and long ones have no profile.
        exact: Whether the reference was computed entirely in float64. If not, recorded numbers were
            used at some point, and the reference is as inaccurate as they are.
    """

    content: str
    shape: list[int]
    dtype: str
    sketch: Array
    reference: Array | None = None
    total: list[float] = field(default_factory=list)
    profiles: dict[int, Array] = field(default_factory=dict)
    exact: bool = True

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        reference: Tensor,
        exact: bool,
        slabs: Slabs | None = None,
        digest: int | None = None,
        equal_value: Value | None = None,
    ) -> Value:
        """Create the value of a tensor and its reference.

        Args:
            tensor: A strided tensor.
            reference: A tensor of the same shape, or `tensor` if it is its own reference.
            exact: Whether the reference was computed entirely in float64.
            slabs: The memory for sketches and profiles.
            digest: The digest of the tensor's content, if it is known.
            equal_value: A value with the same numbers and reference in the same order, but perhaps
                in another shape. Its sketches are reused.
        """
        slabs = slabs or Slabs()
        value = cls._recorded(tensor, exact, slabs, digest, equal_value)
        real = torch.view_as_real(reference.resolve_conj()) if reference.is_complex() else reference
        if equal_value is not None:
            value.reference = equal_value.reference
        elif reference is tensor:
            value.reference = value.sketch
        else:
            value.reference = slabs.store(sketches.sketch(real))
        numbers = sketches.to_float64_device(real.detach()).double()
        value.profiles = {dim: slabs.store(profile) for dim, profile in _profiles(numbers).items()}
        value.total = _totals(numbers, value.profiles) if equal_value is None else equal_value.total
        return value

    @classmethod
    def as_recorded(
        cls,
        tensor: Tensor,
        stands_in: bool,
        slabs: Slabs,
        digest: int | None = None,
        equal_value: Value | None = None,
    ) -> Value:
        """Create the value of a tensor without a float64 reference.

        If `stands_in` is true, the recorded numbers are used as the reference, which is then not
        exact.
        """
        value = cls._recorded(tensor, not stands_in, slabs, digest, equal_value)
        if stands_in:
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            wide = torch.float64 if real.device.type in sketches.FLOAT64_DEVICES else None
            value.reference = value.sketch
            norm = (
                float(torch.linalg.vector_norm(real, dtype=wide))
                if sketches.is_float_or_complex(real)
                else math.nan
            )
            value.total = (
                [float(real.sum(dtype=wide)), norm**2]
                if sketches.is_float_or_complex(real)
                else _totals(real.double(), {})
            )
        return value

    @classmethod
    def _recorded(
        cls,
        tensor: Tensor,
        exact: bool,
        slabs: Slabs,
        digest: int | None,
        equal_value: Value | None,
    ) -> Value:
        """Create a value with the content and the sketch of the recorded numbers only."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        content = sketches.content_id(tensor, digest)
        sketch = slabs.sketch_of(tensor, content) if equal_value is None else equal_value.sketch
        return cls(content, list(tensor.shape), dtype, sketch, exact=exact)

    @cached_property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def is_float_or_complex(self) -> bool:
        """Whether it has floating-point or complex numbers, which rounding affects."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @cached_property
    def deviation(self) -> float:
        """The distance of the recorded numbers from the reference, relative to it."""
        return 0.0 if self.reference is None else finite_distance(self.sketch, self.reference)

    @cached_property
    def is_pure_rounding(self) -> bool:
        """Whether the value consists of rounding errors or zeros, or has no reference."""
        return (
            self.reference is None
            or self.deviation > tol.PURE_ROUNDING_RATIO
            or not self.reference.any()
        )

    @cached_property
    def is_constant(self) -> bool:
        """Whether all numbers are equal, so that the squared sum is n times the sum of squares."""
        total, squares = self.total or (0.0, 0.0)
        return (
            self.count > 1
            and abs(squares * self.count - total * total) <= 1e-9 * squares * self.count
        )

    @cached_property
    def is_integral(self) -> bool:
        """Whether all numbers in the sketch of the reference are integers."""
        return self.reference is not None and bool(
            (np.round(self.reference) == self.reference).all()
        )

    @cached_property
    def is_uninformative(self) -> bool:
        """Whether equality may be a coincidence: integers, equal numbers, or rounding errors."""
        is_infinite = bool(self.total) and not math.isfinite(self.total[0])
        is_single_integer = self.count == 1 and (self.is_integral or is_infinite)
        is_short_mask = self.dtype == "bool" and self.count < MIN_MASK_SIZE
        return (
            self.count == 0
            or is_short_mask
            or self.is_pure_rounding
            or is_single_integer
            or self.is_constant
        )

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def finite_distance(x: Array, reference: Array) -> float:
    """Return the relative distance of two sketches; infinity instead of NaN.

    >>> finite_distance(np.array([1.0, np.nan]), np.array([2.0, 1.0]))
    inf
    """
    distance = sketches.relative_distance(x, reference)
    return math.inf if math.isnan(distance) else distance


def _profiles(numbers: Tensor) -> dict[int, Array]:
    """For each dimension, sum the numbers and their squares over all other dimensions."""
    if numbers.dim() == 0 or numbers.numel() == 0:
        return {}
    dims = range(numbers.dim())
    profiled_dims = [dim for dim in dims if 2 <= numbers.shape[dim] <= MAX_PROFILE_SIZE]
    # For speed, each half of the dimensions is summed first. The profiles are computed from these
    # partial sums, so that the data are not read again for each profile.
    middle = (numbers.dim() + 1) // 2
    halves = [list(dims[:middle]), list(dims[middle:])]
    profiles: dict[int, list[Tensor]] = {}
    for power in (numbers, numbers * numbers):
        for half, other_half in (halves, halves[::-1]):
            half_profiled = [dim for dim in half if dim in profiled_dims]
            if not half_profiled:
                continue
            half_sums = power.sum(other_half) if other_half else power
            for dim in half_profiled:
                summed_positions = [
                    position for position, half_dim in enumerate(half) if half_dim != dim
                ]
                sums = half_sums.sum(summed_positions) if summed_positions else half_sums
                profiles.setdefault(dim, []).append(sums)
    return {dim: torch.stack(pair).cpu().numpy() for dim, pair in sorted(profiles.items())}


def _totals(numbers: Tensor, profiles: dict[int, Array]) -> list[float]:
    """Sum the numbers and their squares, from a profile if there is one, which is faster."""
    if profiles:
        first_profile = next(iter(profiles.values()))
        with np.errstate(invalid="ignore", over="ignore"):
            return [float(first_profile[0].sum()), float(first_profile[1].sum())]
    return [float(numbers.sum()), float(numbers.square().sum())]
