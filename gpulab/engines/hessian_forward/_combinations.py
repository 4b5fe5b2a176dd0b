"""Linear combinations of tangents, computed in fused kernels on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from gpulab._torch_internals import compile_elementwise_kernel

Coefficient = Tensor | float | None  # None means 1
MAX_INPUTS = 8  # tensors that one combination may read; a larger number would save little time


class Combination:
    """The linear combination `sum(coefficient * tangent)` of several tangents.

    Args:
        coefficients: The coefficient of each tangent; None means 1.
        shape: The shape of the result without its first dimension. For k tangents the result has
            the shape (k, *shape), to which tangents and coefficients are broadcast.
        is_plain_sum: Whether all coefficients are 1 and all tangents have the shape of the result.
    """

    def __init__(
        self, coefficients: Sequence[Coefficient], shape: Sequence[int], is_plain_sum: bool = False
    ) -> None:
        self.coefficients = tuple(coefficients)
        self.shape = tuple(shape)
        self.is_plain_sum = is_plain_sum
        # Products with tensors are computed first: they allocate the memory for the sum, to which
        # the other terms are added in place. (`sorted` puts False before True.)
        self.order = sorted(
            range(len(coefficients)),
            key=lambda position: not isinstance(coefficients[position], Tensor),
        )

    @property
    def input_count(self) -> int:
        """The number of tensors that a call reads: all tangents and all tensor coefficients."""
        return len(self.coefficients) + sum(isinstance(c, Tensor) for c in self.coefficients)

    def fuse(self, position: int, inner: Combination) -> Combination | None:
        """Substitute the combination `inner` for the tangent at `position`.

        Returns:
            The fused combination. None if the two results have different shapes, if the fused one
            would read more than `MAX_INPUTS` tensors, or if several pairs of tensor coefficients
            would have to be multiplied.
        """
        outer = self.coefficients[position]
        # A tensor `outer` times a tensor coefficient of `inner` is a new tensor that must be kept.
        needs_several_products = (
            isinstance(outer, Tensor) and sum(isinstance(c, Tensor) for c in inner.coefficients) > 1
        )
        if (
            needs_several_products
            or inner.shape != self.shape
            or self.input_count + inner.input_count - 1 > MAX_INPUTS
        ):
            return None
        # The inner tangents take the place of the one at `position`, which is no longer read.
        products = [_product(outer, coefficient) for coefficient in inner.coefficients]
        return Combination(
            [*self.coefficients[:position], *products, *self.coefficients[position + 1 :]],
            self.shape,
        )

    def __call__(self, *tangents: Tensor) -> Tensor:
        """Compute the combination of tangents (k, …).

        A GPU computes two products with tensor coefficients in one kernel.
        """
        shape = (len(tangents[0]), *self.shape)
        terms = [
            (lift(tangents[position], len(shape)), self.coefficients[position])
            for position in self.order
        ]
        total: Tensor | None = None
        # Tensor coefficients come first. So if the second of the remaining terms has one, the first
        # has one as well.
        while tangents[0].is_cuda and len(terms) > 1 and isinstance(terms[1][1], Tensor):
            (v, c), (w, d), *terms = terms
            if total is None:
                total = _kernel(with_total=False)(v, c, w, d)
            else:
                total = _kernel(with_total=True)(v, c, w, d, total)
        # Whether `total` has its own memory, so that terms can be added in place.
        is_owned = total is not None
        for tangent, coefficient in terms:
            if total is None:
                total = tangent if coefficient is None else tangent * coefficient
                is_owned = coefficient is not None
                continue
            is_in_place = is_owned and total.shape == shape
            if isinstance(coefficient, Tensor):
                add_product = total.addcmul_ if is_in_place else total.addcmul
                total = add_product(tangent, coefficient)
            else:
                add_multiple = total.add_ if is_in_place else total.add
                total = add_multiple(tangent, alpha=1 if coefficient is None else coefficient)
            is_owned = True
        assert total is not None
        return total if total.shape == shape else total.expand(shape)


def lift(tangent: Tensor, ndim: int) -> Tensor:
    """Insert dimensions of size 1 after the first, so that the tangent has `ndim` dimensions.

    Broadcasting would insert them before the first dimension, which counts the k tangents.
    """
    missing = ndim - tangent.ndim
    if not missing:
        return tangent
    return tangent.reshape(len(tangent), *[1] * missing, *tangent.shape[1:])


def _product(outer: Coefficient, inner: Coefficient) -> Coefficient:
    """Multiply two coefficients, where None means 1."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer * inner


@functools.cache
def _kernel(with_total: bool) -> Callable[..., Tensor]:
    """Compile the kernel for `c * v + d * w`; `with_total` it also adds a running total.

    Longer sums call these two kernels repeatedly, because each kernel takes half a second to
    compile.
    """
    parameters = "T v, T c, T w, T d"
    value = "c * v + d * w"
    if with_total:
        parameters += ", T total"
        value += " + total"
    code = f"template <typename T> T products({parameters}) {{ return {value}; }}"
    return compile_elementwise_kernel(code)
