"""JVP rules: what each operation of a captured gradient does to tangents, as steps of a linear map.

A tangent has one more dimension than its tensor, in front. Operations without a rule here are differentiated by
torch: those that work element by element once, at the capture, and the others by forward mode in every product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gpulab._torch_internals import (
    UNSAFE_VIEW,
    Nested,
    OpOverload,
    named_arguments,
    schema_name,
    tree_flatten,
    tree_unflatten,
)
from gpulab.engines.hessian_forward.capture import Operation, as_list
from gpulab.engines.hessian_forward.combinations import Coefficient, Combination, lift
from gpulab.engines.hessian_forward.convolutions import BiasGradient, Convolution, Geometry
from gpulab.engines.hessian_forward.linear_maps import LinearMap, Step, without_the_unused
from gpulab.errors import UnsupportedError

aten = torch.ops.aten
Tangents: TypeAlias = int | Sequence[int | None] | None  # variables, by number; None for a constant
TangentMap: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]  # of tangents (k, …)


class Builder:
    """The steps so far; `count` variables are numbered, and take `bytes` for one tangent each.

    Rules find in it the `function` and the `results` of the operation, and the `tangent` of each of its arguments.
    """

    function: OpOverload
    results: Nested
    tangent: Callable[[Nested], int | None]

    def __init__(self, inputs: int) -> None:
        self.steps: list[Step] = []
        self.count, self.bytes = inputs, 0

    def linearize(self, operation: Operation) -> list[int | None]:
        """Add what an operation does to tangents; the variables that are the tangents of its results."""
        results = as_list(operation.results)
        self.function, self.results, self.tangent = operation.function, operation.results, operation.tangent
        if any(isinstance(result, Tensor) and result.is_complex() for result in results):
            raise UnsupportedError(f"{operation.function} makes complex numbers")
        name = schema_name(operation.function).removeprefix("aten::")
        if name.endswith("_like") or name.startswith("new_") or not any(_floats(result) for result in results):
            return []
        rule = RULES.get(operation.function)
        variables = rule(self, *operation.arguments, **operation.options) if rule else NotImplemented
        if variables is NotImplemented:
            by_torch = ByTorch(operation)
            numbers = iter(self.steps_of(by_torch, by_torch.variables, sum(by_torch.float_results)))
            variables = [next(numbers) if floats else None for floats in by_torch.float_results]
        if operation.function not in COPIES:
            self.bytes += sum(r.nbytes for r, n in zip(results, as_list(variables), strict=False) if n is not None)
        return as_list(variables)

    def linear_map(self, results: Sequence[int | None]) -> LinearMap:
        """The map from the inputs to these variables."""
        steps = without_the_unused(self.steps, results)
        for step in steps:
            if isinstance(step.function, ByTorch):
                step.function = step.function.tried()
        return LinearMap(steps, results, self.bytes)

    def steps_of(self, function: TangentMap, inputs: Sequence[int | None], count: int) -> tuple[int, ...]:
        """Several new variables, made at once from others."""
        outputs = tuple(range(self.count, self.count + count))
        self.count += count
        self.steps.append(Step(function, tuple(number for number in inputs if number is not None), outputs))
        return outputs

    def apply(self, function: TangentMap, *arguments: Nested) -> int | None:
        """The variable that a function makes of the tangents of arguments; None for constants."""
        tangents = [self.tangent(argument) for argument in arguments]
        return None if all(t is None for t in tangents) else self.steps_of(function, tangents, 1)[0]

    def combine(self, *terms: tuple[Coefficient, int | None]) -> int | None:
        """The sum of coefficients times variables, broadcast to the shape of the result; None for constants."""
        present = [(coefficient, variable) for coefficient, variable in terms if variable is not None]
        if not present:
            return None
        coefficients = [c.to(self.results.dtype) if isinstance(c, Tensor) else c for c, _ in present]  # also masks
        function = Combination(coefficients, self.results.shape)
        return self.steps_of(function, [variable for _, variable in present], 1)[0]

    def add(self, *variables: int | None, shape: Sequence[int] | None = None) -> int | None:
        """The sum of variables of one shape, that of the result unless it is given."""
        present = [variable for variable in variables if variable is not None]
        if len(present) < 2:
            return present[0] if present else None
        function = Combination([None] * len(present), self.results.shape if shape is None else shape, plain=True)
        return self.steps_of(function, present, 1)[0]


class ByTorch:
    """Tangents of one operation by torch's forward mode, which computes the operation itself along."""

    def __init__(self, operation: Operation) -> None:
        self.function, results = operation.function, as_list(operation.results)
        self.flat, self.spec = tree_flatten((operation.arguments, operation.options))
        self.indices = [index for index, value in enumerate(self.flat) if operation.tangent(value) is not None]
        self.variables = [operation.tangent(self.flat[index]) for index in self.indices]
        self.float_results = [_floats(result) for result in results]
        types = {self.flat[index].dtype for index in self.indices}
        pointwise = torch.Tag.pointwise in self.function.tags
        self.shape = results[0].shape if pointwise and types == {results[0].dtype} else None

    def tried(self) -> TangentMap:
        """Itself, if torch can do it; or of an operation element by element, the sum of tangents times factors."""
        for index in self.indices:  # torch cannot write tangents where elements share memory
            self.flat[index] = self.flat[index].contiguous()
        try:
            if self.shape is not None:
                return Combination(self._factors(), self.shape)
            self(*[torch.zeros_like(self.flat[index])[None] for index in self.indices])
            return self
        except RuntimeError as error:
            raise UnsupportedError(f"{self.function}: {str(error).partition(chr(10))[0]}") from error

    def _factors(self) -> list[Tensor]:
        """What each argument's tangent is multiplied by.

        No element depends on another, so that the gradient of the result's sum has every derivative in its place.
        """
        with torch.enable_grad():
            arguments = [self.flat[index].expand(self.shape).clone().requires_grad_() for index in self.indices]
            return list(torch.autograd.grad(self._call(*arguments)[0].sum(), arguments))

    def __call__(self, *tangents: Tensor) -> tuple[Tensor, ...]:
        """Tangents of the results, k at a time."""
        return torch.func.vmap(self._directional)(*tangents)

    def _directional(self, *tangents: Tensor) -> tuple[Tensor, ...]:
        with warnings.catch_warnings(action="ignore"):  # of torch, about its own rules
            return torch.func.jvp(self._call, tuple(self.flat[index] for index in self.indices), tangents)[1]

    def _call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        changed = list(self.flat)
        for index, tensor in zip(self.indices, tensors, strict=True):
            changed[index] = tensor
        arguments, options = tree_unflatten(changed, self.spec)
        results = as_list(self.function(*arguments, **options))
        return tuple(result for result, floats in zip(results, self.float_results, strict=True) if floats)


def _floats(result: object) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point()


# Rules: each is given the builder and the arguments of an operation, and returns the variable that is the tangent of
# its result, a list where there are several, or NotImplemented, which leaves the operation to torch. Functions that
# steps keep must not hold the tensors of an operation that they do not need.


def reshaped(b: Builder, x: Tensor, *_: Nested) -> Tangents:
    shape = b.results.shape
    return b.apply(lambda tangent: tangent.reshape(len(tangent), *shape), x)


def expanded(b: Builder, x: Tensor, *_: Nested, **__: Nested) -> Tangents:
    shape = b.results.shape
    return b.apply(lambda tangent: lift(tangent, len(shape) + 1).expand(len(tangent), *shape), x)


def along(b: Builder, x: Tensor, *arguments: Nested, **options: Nested) -> Tangents:
    """Operations whose dimensions have to be one more."""
    function, values = b.function, named_arguments(b.function, (x, *arguments), options)
    for name in values.keys() & {"dim", "dim0", "dim1"}:
        values[name] = values[name] % max(x.ndim, 1) + 1
    _, *ordered = values.values()  # without x
    return b.steps_of(lambda tangent: function(tangent, *ordered), [b.tangent(x)], len(as_list(b.results)))


def joined(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tangents:
    """Constants among them have the tangent zero."""
    function, dim = b.function, dim % b.results.ndim + 1
    members = [(b.tangent(tensor) is not None, tensor.shape) for tensor in tensors]

    def join(*tangents: Tensor) -> Tensor:
        first, rest = tangents[0], iter(tangents)
        zeros = [None if varies else first.new_zeros(1).expand(len(first), *shape) for varies, shape in members]
        return function([next(rest) if zero is None else zero for zero in zeros], dim)

    return b.apply(join, *tensors)


def reduced(
    b: Builder, x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, **_: Nested
) -> Tangents:
    dims = range(x.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    shifted, function = [d % x.ndim + 1 for d in dims], torch.sum if "sum" in str(b.function) else torch.mean
    return b.apply(lambda t: function(t, shifted, keepdim=keepdim), x) if shifted else b.tangent(x)


def upsampled(b: Builder, x: Tensor, *arguments: Nested) -> Tangents:
    """Each member of a batch is treated alike, and the k tangents become a larger batch."""
    function, shape, batch = b.function, b.results.shape, len(x)

    def apply(tangent: Tensor) -> Tensor:
        k, values = len(tangent), list(arguments)
        if function is aten.upsample_nearest2d_backward.default:  # (g, output size, input size, …)
            values[1] = [k * batch, *values[1][1:]]
        return function(tangent.flatten(0, 1), *values).reshape(k, *shape)

    return b.apply(apply, x)


def added(b: Builder, x: Nested, y: Nested, *, alpha: float = 1) -> Tangents:
    scale = -alpha if "sub" in str(b.function) else alpha
    if b.tangent(x) is not None and b.tangent(y) is not None and x.shape == y.shape and scale == 1:
        return b.add(b.tangent(x), b.tangent(y))
    return b.combine((None, b.tangent(x)), (None if scale == 1 else scale, b.tangent(y)))


def multiplied(b: Builder, x: Nested, y: Nested) -> Tangents:
    return b.combine((y, b.tangent(x)), (x, b.tangent(y)))


def squared_error_backward(b: Builder, g: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tangents:
    scale = 2 / x.numel() if reduction == 1 else 2
    return b.combine((scale * (x - y), b.tangent(g)), (scale * g, b.tangent(x)), (-scale * g, b.tangent(y)))


def max_pooled(b: Builder, x: Tensor, *_: Nested) -> Tangents:
    """The places of the largest are constants."""
    shape, largest = b.results[0].shape, b.results[1].flatten(-2)

    def gather(tangent: Tensor) -> Tensor:
        indices = largest.expand(len(tangent), *largest.shape)
        return tangent.flatten(-2).gather(-1, indices).reshape(len(tangent), *shape)

    return [b.apply(gather, x), None]


def max_pool_backward(b: Builder, g: Tensor, x: Tensor, *arguments: Nested) -> Tangents:
    shape, largest = x.shape, arguments[-1].flatten(-2)

    def scatter(tangent: Tensor) -> Tensor:
        indices = largest.expand(len(tangent), *largest.shape)
        zeros = tangent.new_zeros(*indices.shape[:-1], shape[-2] * shape[-1])
        return zeros.scatter_add_(-1, indices, tangent.flatten(-2)).reshape(len(tangent), *shape)

    return b.apply(scatter, g)


def matrix_product(b: Builder, x: Tensor, y: Tensor) -> Tangents:
    return b.add(b.apply(lambda t: torch.matmul(t, y), x), b.apply(lambda t: torch.matmul(x, t), y))


def matrix_product_and_sum(b: Builder, c: Tensor, x: Tensor, y: Tensor, **scales: float) -> Tangents:
    if scales:
        return NotImplemented
    by_x, by_y = b.apply(lambda t: torch.matmul(t, y), x), b.apply(lambda t: torch.matmul(x, t), y)
    return b.combine((None, by_x), (None, by_y), (None, b.tangent(c)))


def convolution(b: Builder, x: Tensor, w: Tensor, bias: Tensor | None, *options: Nested) -> Tangents:
    if (geometry := Geometry.of(options)) is None:
        return NotImplemented
    shape, ones = b.results.shape, [1] * (x.ndim - 2)
    by_input = b.apply(Convolution(geometry, "output", 0, w, shape), x)
    if b.tangent(w) is not None:
        with_bias = b.tangent(bias) is not None
        return b.add(by_input, b.apply(Convolution(geometry, "output", 1, x, shape, with_bias), w, bias))
    return b.add(by_input, b.apply(lambda t: t.reshape(len(t), 1, -1, *ones).expand(len(t), *shape), bias))


def convolution_backward(
    b: Builder, g: Tensor, x: Tensor, w: Tensor, sizes: Sequence[int], *options: Nested
) -> Tangents:
    if (geometry := Geometry.of(options)) is None:
        return NotImplemented
    gradients = []
    for which, like, other_factor, needed in zip(("input", "weight"), (x, w), (w, x), options[-1], strict=False):
        by_gradient = Convolution(geometry, which, 0, other_factor, like.shape)
        by_other = Convolution(geometry, which, 1, g, like.shape)
        gradients.append(
            b.add(b.apply(by_gradient, g), b.apply(by_other, other_factor), shape=like.shape) if needed else None
        )
    return [*gradients, b.apply(BiasGradient(g.ndim), g) if options[-1][2] else None]


COPIES = aten.detach.default, aten.clone.default
VIEWS = aten.view.default, UNSAFE_VIEW, aten.unsqueeze.default, aten.squeeze.dim
ALONG = aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.split.Tensor, aten.unbind.int
REDUCTIONS = aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim
RULES: dict[OpOverload, Callable[..., Tangents]] = {  # rule(builder, *arguments, **options)
    **dict.fromkeys(COPIES, lambda b, x, **_: b.tangent(x)),
    **dict.fromkeys(VIEWS, reshaped),
    **dict.fromkeys(ALONG, along),
    **dict.fromkeys(REDUCTIONS, reduced),
    aten.expand.default: expanded,
    aten.t.default: lambda b, x: b.apply(lambda tangent: tangent.transpose(1, -1), x),
    **dict.fromkeys((aten.cat.default, aten.stack.default), joined),
    **dict.fromkeys((aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default), upsampled),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), added),
    aten.neg.default: lambda b, x: b.combine((-1, b.tangent(x))),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), multiplied),
    aten.mse_loss_backward.default: squared_error_backward,
    aten.copy.default: lambda b, _, y, *__: b.combine((None, b.tangent(y))),
    aten.max_pool2d_with_indices.default: max_pooled,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    **dict.fromkeys((aten.mm.default, aten.bmm.default), matrix_product),
    aten.addmm.default: matrix_product_and_sum,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
