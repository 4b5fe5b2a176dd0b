"""Linear combinations of tangents, on a GPU in fused kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from gpulab._torch_internals import compile_elementwise_kernel

Coefficient = Tensor | float | None
MAX_INPUTS = 8  # more constants in one sum would save little


class Combination:
    """`sum(coefficient * tangent)`; None stands for 1.

    The result has the `shape` (k, *shape), to which tangents and coefficients are broadcast.
    `is_plain_sum` says that all tangents have that shape and all coefficients are 1.
    """

    def __init__(
        self, coefficients: Sequence[Coefficient], shape: Sequence[int], is_plain_sum: bool = False
    ) -> None:
        self.coefficients = tuple(coefficients)
        self.shape = tuple(shape)
        self.is_plain_sum = is_plain_sum
        # Products come first: they allocate memory, and the other terms are added to it.
        self.order = sorted(
            range(len(coefficients)),
            key=lambda position: not isinstance(coefficients[position], Tensor),
        )

    @property
    def input_count(self) -> int:
        """The number of tensors that it reads."""
        return len(self.coefficients) + sum(isinstance(c, Tensor) for c in self.coefficients)

    def fuse(self, position: int, inner: Combination) -> Combination | None:
        """The combination in which the tangent at `position` is itself a combination.

        None where that would not fit into one kernel, or need more constants than there are.
        """
        outer = self.coefficients[position]
        new_constants = (
            isinstance(outer, Tensor) and sum(isinstance(c, Tensor) for c in inner.coefficients) > 1
        )
        if (
            new_constants
            or inner.shape != self.shape
            or self.input_count + inner.input_count - 1 > MAX_INPUTS
        ):
            return None
        products = [_product(outer, coefficient) for coefficient in inner.coefficients]
        return Combination(
            [*self.coefficients[:position], *products, *self.coefficients[position + 1 :]],
            self.shape,
        )

    def __call__(self, *tangents: Tensor) -> Tensor:
        """The sum for tangents (k, …); on a GPU, one kernel computes each pair of products."""
        shape = (len(tangents[0]), *self.shape)
        terms = [
            (lift(tangents[position], len(shape)), self.coefficients[position])
            for position in self.order
        ]
        total: Tensor | None = None
        while tangents[0].is_cuda and len(terms) > 1 and isinstance(terms[1][1], Tensor):
            (v, c), (w, d), *terms = terms
            total = (
                _kernel(False)(v, c, w, d) if total is None else _kernel(True)(v, c, w, d, total)
            )
        # whether `total` has memory of its own, which can be added to in place
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
    """Insert dimensions after the first, up to `ndim`, as broadcasting would do in front."""
    missing = ndim - tangent.ndim
    if not missing:
        return tangent
    return tangent.reshape(len(tangent), *[1] * missing, *tangent.shape[1:])


def _product(outer: Coefficient, inner: Coefficient) -> Coefficient:
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer * inner


@functools.cache
def _kernel(with_total: bool) -> Callable[..., Tensor]:
    """The sum of two products, `with_total` added to a running sum.

    There are only these two kernels, because each compiles for half a second.
    """
    parameters = "T v, T c, T w, T d"
    value = "c * v + d * w"
    if with_total:
        parameters += ", T total"
        value += " + total"
    code = f"template <typename T> T products({parameters}) {{ return {value}; }}"
    return compile_elementwise_kernel(code)
