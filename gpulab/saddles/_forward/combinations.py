"""Sums of tangents times constants, element by element, each in one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Coefficient = Tensor | float | None
MOST_INPUTS = 8  # more constants in one sum would save little


class Combination:
    """`sum(coefficient * tangent)`; None stands for 1.

    The result has the `shape` (k, *shape), to which tangents and coefficients are broadcast.
    """

    def __init__(self, coefficients: Sequence[Coefficient], shape: tuple[int, ...], plain: bool = False) -> None:
        self.coefficients, self.shape = tuple(coefficients), tuple(shape)
        self.adds = plain and all(c is None for c in coefficients)
        self.order: list[int] | None = None
        self.ordered: list[Coefficient] = []

    @property
    def inputs(self) -> int:
        """How many tensors it reads."""
        return len(self.coefficients) + sum(isinstance(c, Tensor) for c in self.coefficients)

    def holds(self, place: int, inner: Combination) -> bool:
        """Whether `after` is possible, fits into one kernel, and needs no more constants than there are."""
        outer = self.coefficients[place]
        if any(_mask(a) and isinstance(b, float) for c in inner.coefficients for a, b in ((outer, c), (c, outer))):
            return False  # their product would have torch's default type
        constants = sum(isinstance(c, Tensor) for c in inner.coefficients)
        more = isinstance(outer, Tensor) and constants > 1
        return inner.shape == self.shape and not more and self.inputs + inner.inputs - 1 <= MOST_INPUTS

    def after(self, place: int, inner: Combination) -> Combination:
        """The combination in which the tangent at `place` is itself a combination."""
        outer = self.coefficients[place]
        new = [_times(outer, coefficient) for coefficient in inner.coefficients]
        coefficients = [*self.coefficients[:place], *new, *self.coefficients[place + 1 :]]
        return Combination(coefficients, self.shape)

    def settle(self, dtype: torch.dtype, known: dict[int, tuple[Tensor, Tensor]]) -> None:
        """On a CPU, masks become numbers, once for all that share them: products of two types are slow there."""

        def settled(coefficient: Coefficient) -> Coefficient:
            if not isinstance(coefficient, Tensor) or coefficient.is_cuda or not _mask(coefficient):
                return coefficient
            return known.setdefault(id(coefficient), (coefficient, coefficient.to(dtype)))[1]

        self.coefficients = tuple(map(settled, self.coefficients))

    def __call__(self, *tangents: Tensor) -> Tensor:
        """The sum for tangents (k, …)."""
        if self.order is None:
            # Products first: they make memory of their own, which the others are then added to.
            self.order = sorted(
                range(len(tangents)), key=lambda place: not isinstance(self.coefficients[place], Tensor)
            )
            self.ordered = [self.coefficients[place] for place in self.order]
        ndim, shape = len(self.shape) + 1, (len(tangents[0]), *self.shape)
        chosen = [tangents[place] for place in self.order]
        total = self._sum([t if t.ndim == ndim else self._lift(t) for t in chosen], self.ordered, shape)
        return total if total.shape == shape else total.expand(shape)

    def _lift(self, tangent: Tensor) -> Tensor:
        missing = len(self.shape) + 1 - tangent.ndim
        return tangent.reshape(len(tangent), *[1] * missing, *tangent.shape[1:])

    @staticmethod
    def _sum(tangents: Sequence[Tensor], coefficients: Sequence[Coefficient], shape: tuple[int, ...]) -> Tensor:
        """Term by term, into memory of its own; on a GPU the products two by two, each pair in one kernel."""
        total, mine, done = tangents[0], False, 1
        first, second = coefficients[0], coefficients[1] if len(coefficients) > 1 else None
        if total.is_cuda and isinstance(first, Tensor) and isinstance(second, Tensor):
            total, mine, done = _kernel(False)(total, first, tangents[1], second), True, 2
        elif first is not None:
            total, mine = total * first, True
        while done < len(tangents):
            tangent, coefficient = tangents[done], coefficients[done]
            following = coefficients[done + 1] if done + 1 < len(tangents) else None
            fits = mine and total.shape == shape
            if total.is_cuda and isinstance(coefficient, Tensor) and isinstance(following, Tensor):
                total = _kernel(True)(tangent, coefficient, tangents[done + 1], following, total)
                done += 1
            elif isinstance(coefficient, Tensor) and _mask(coefficient):
                total = total + tangent * coefficient
            elif isinstance(coefficient, Tensor):
                total = total.addcmul_(tangent, coefficient) if fits else torch.addcmul(total, tangent, coefficient)
            else:
                scale = 1 if coefficient is None else coefficient
                total = total.add_(tangent, alpha=scale) if fits else torch.add(total, tangent, alpha=scale)
            mine = True
            done += 1
        return total


def _times(outer: Coefficient, inner: Coefficient) -> Coefficient:
    if outer is None or inner is None:
        return inner if outer is None else outer
    return _narrow(outer) * _narrow(inner)


def _narrow(coefficient: Tensor | float) -> Tensor | float:
    """Masks as small integers: times −1 they would become large ones."""
    return coefficient.to(torch.int8) if isinstance(coefficient, Tensor) and _mask(coefficient) else coefficient


def _mask(coefficient: Coefficient) -> bool:
    return isinstance(coefficient, Tensor) and not coefficient.is_floating_point()


@functools.cache
def _kernel(more: bool) -> Callable[..., Tensor]:
    """The sum of two products, and with `more` of a sum so far. Only these: each kernel compiles for half a second."""
    names, rest = ("T v, T c, T w, T d, T total", " + total") if more else ("T v, T c, T w, T d", "")
    code = f"template <typename T> T products({names}) {{ return c * v + d * w{rest}; }}"
    return torch.cuda.jiterator._create_jit_fn(code)
