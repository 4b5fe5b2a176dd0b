"""JVP rules: what each operation of a captured gradient does to tangents, as steps of a linear map.

The coefficients of a step are worked out once, at the capture. Operations without a rule here are
differentiated by torch's forward mode. A tangent has one more dimension than its tensor, in front.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpulab.errors import UnsupportedError
from gpulab.saddles._forward.capture import Operation, as_list
from gpulab.saddles._forward.combinations import Coefficient, Combination, lift
from gpulab.saddles._forward.convolutions import BiasGradient, Convolution, Geometry
from gpulab.saddles._forward.linear_maps import Step

aten = torch.ops.aten
RULES: dict[Any, Callable[..., Any]] = {}  # operation -> rule(builder, *arguments, **options)


def rule(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the rule of these operations."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(functions, function))
        return function

    return register


class Builder:
    """The steps so far; `count` variables are numbered, and take `bytes` for one tangent each.

    Rules find in it the `function` and the `results` of the operation, and the `tangent` of each of its arguments.
    """

    function: Any
    results: Any
    tangent: Callable[[Any], int | None]

    def __init__(self, inputs: int) -> None:
        self.steps: list[Step] = []
        self.count, self.bytes = inputs, 0
        self.shared: dict[Any, tuple[Tensor, Tensor]] = {}

    def linearize(self, operation: Operation) -> list[int | None]:
        """Add what an operation does to tangents; the variables that are the tangents of its results."""
        results = as_list(operation.results)
        if not any(_floats(result) for result in results):
            return []
        self.function, self.results, self.tangent = operation.function, operation.results, operation.tangent
        rule = RULES.get(operation.function)
        made = rule(self, *operation.arguments, **operation.options) if rule else NotImplemented
        numbers = by_torch(self, operation) if made is NotImplemented else as_list(made)
        if rule is not same:
            self.bytes += sum(r.nbytes for r, number in zip(results, numbers, strict=False) if number is not None)
        return numbers

    def step(self, function: Callable[..., Any], *inputs: int | None) -> int:
        """A new variable, made from others."""
        return self.steps_of(function, inputs, 1)[0]

    def steps_of(self, function: Callable[..., Any], inputs: Sequence[int | None], count: int) -> tuple[int, ...]:
        """Several new variables at once."""
        outputs = tuple(range(self.count, self.count + count))
        self.count += count
        self.steps.append(Step(function, tuple(number for number in inputs if number is not None), outputs))
        return outputs

    def combine(self, *terms: tuple[Coefficient, int | None], shape: Sequence[int] | None = None) -> int | None:
        """The sum of coefficients times variables, broadcast to the shape of the result or another one."""
        present = [(coefficient, variable) for coefficient, variable in terms if variable is not None]
        if not present:
            return None
        coefficients, variables = zip(*present, strict=True)
        return self.step(Combination(coefficients, self.results.shape if shape is None else shape), *variables)

    def sum(self, *terms: int | None, shape: Sequence[int] | None = None) -> int | None:
        """The sum of variables that all have the shape of the result, or another one."""
        present = [term for term in terms if term is not None]
        if len(present) < 2:
            return present[0] if present else None
        coefficients = [None] * len(present)
        return self.step(Combination(coefficients, self.results.shape if shape is None else shape, True), *present)

    def once(self, function: Any, result: Tensor) -> Tensor:
        """The derivative of a function by its result: forward and backward pass share it."""
        key = function, result.data_ptr(), result.shape, result.stride()
        if key not in self.shared:
            self.shared[key] = result, SLOPES_BY_RESULT[function](result)
        return self.shared[key][1]


def by_torch(builder: Builder, operation: Operation) -> list[int | None]:
    """Any operation, by torch's own derivative of it."""
    function = ByTorch(operation)
    numbers = iter(builder.steps_of(function, function.variables, sum(function.float_results)))
    return [next(numbers) if floats else None for floats in function.float_results]


class ByTorch:
    """Tangents of one operation by torch's forward mode, or where it has none by two backward passes.

    Each computes the operation itself along.
    """

    def __init__(self, operation: Operation) -> None:
        self.function = operation.function
        self.flat, self.spec = tree_flatten((operation.arguments, operation.options))
        self.places = [place for place, value in enumerate(self.flat) if operation.tangent(value) is not None]
        self.variables = [operation.tangent(self.flat[place]) for place in self.places]
        self.float_results = [_floats(result) for result in as_list(operation.results)]
        self.way = self.forward_mode

    def settle(self) -> None:
        """Find a way that works, with one tangent of zeros."""
        zeros = [torch.zeros_like(self.flat[place])[None] for place in self.places]
        reasons = []
        for way in (self.forward_mode, self.twice_backward):
            self.way = way
            try:
                self(*zeros)
            except (RuntimeError, NotImplementedError) as error:
                reasons.append(str(error).partition("\n")[0])
            else:
                return
        raise UnsupportedError(f"{self.function}: {'; '.join(reasons)}")

    def __call__(self, *tangents: Tensor) -> tuple[Tensor, ...]:
        """Tangents of the results, k at a time."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own rules
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.func.vmap(self.way)(*tangents)

    def forward_mode(self, *tangents: Tensor) -> tuple[Tensor, ...]:
        """The directional derivative."""
        return torch.func.jvp(self._call, tuple(self.flat[place] for place in self.places), tangents)[1]

    def twice_backward(self, *tangents: Tensor) -> tuple[Tensor, ...]:
        """The transpose of the transpose."""
        results, back, *_ = torch.func.vjp(self._call, *[self.flat[place] for place in self.places])
        zeros = tuple(torch.zeros_like(result) for result in results)
        return torch.func.vjp(back, zeros)[1](tangents)[0]

    def _call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        changed = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=True):
            changed[place] = tensor
        arguments, options = tree_unflatten(changed, self.spec)
        results = as_list(self.function(*arguments, **options))
        return tuple(result for result, floats in zip(results, self.float_results, strict=True) if floats)


def _floats(result: Any) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point()


@rule(aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default)
def same(builder: Builder, x: Tensor, **_: Any) -> Any:
    return builder.tangent(x)


@rule(
    *(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default),
    *(aten.new_empty_strided.default, aten.sign.default, aten.bernoulli.default),
    *(aten.rand_like.default, aten.randn_like.default),
)
def constant(builder: Builder, *_: Any, **__: Any) -> Any:
    return None


# Shapes.


@rule(
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
def reshaped(builder: Builder, x: Tensor, *_: Any) -> Any:
    shape = builder.results.shape
    return builder.step(lambda tangent: tangent.reshape(len(tangent), *shape), builder.tangent(x))


@rule(aten.expand.default)
def expanded(builder: Builder, x: Tensor, *_: Any, **__: Any) -> Any:
    shape = builder.results.shape
    return builder.step(lambda t: lift(t, len(shape) + 1).expand(len(t), *shape), builder.tangent(x))


@rule(aten.permute.default)
def permuted(builder: Builder, x: Tensor, dims: Sequence[int]) -> Any:
    order = (0, *[dim % x.ndim + 1 for dim in dims])
    return builder.step(lambda tangent: tangent.permute(order), builder.tangent(x))


@rule(aten.t.default, aten.transpose.int)
def transposed(builder: Builder, x: Tensor, a: Any = 0, b: Any = 1) -> Any:
    if x.ndim < 2:
        return builder.tangent(x)
    return builder.step(lambda tangent: tangent.transpose(a % x.ndim + 1, b % x.ndim + 1), builder.tangent(x))


@rule(
    *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
    aten.unsafe_split.Tensor,
)
def along(builder: Builder, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """Operations whose argument `dim` has to be one more."""
    function, schema = builder.function, builder.function._schema.arguments[1:]
    filled = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    filled |= dict(zip([argument.name for argument in schema], arguments, strict=False)) | options
    filled["dim"] = filled["dim"] % max(x.ndim, 1) + 1
    values = [filled[argument.name] for argument in schema]
    count = len(as_list(builder.results))
    return builder.steps_of(lambda tangent: function(tangent, *values), [builder.tangent(x)], count)


@rule(aten.cat.default, aten.stack.default)
def joined(builder: Builder, tensors: Sequence[Tensor], dim: Any = 0) -> Any:
    """Constants have the tangent zero."""
    function, place = builder.function, dim % builder.results.ndim + 1
    varies, shapes = [builder.tangent(t) is not None for t in tensors], [t.shape for t in tensors]

    def join(*tangents: Tensor) -> Tensor:
        k, rest, zero = len(tangents[0]), iter(tangents), tangents[0].new_zeros(1)
        pairs = zip(varies, shapes, strict=True)
        return function([next(rest) if varying else zero.expand(k, *shape) for varying, shape in pairs], place)

    return builder.step(join, *[builder.tangent(t) for t in tensors])


@rule(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def reduced(builder: Builder, x: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    dims = range(x.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    places = [d % x.ndim + 1 for d in dims]
    function = torch.sum if "sum" in builder.function._schema.name else torch.mean
    if not places:
        return builder.tangent(x)
    return builder.step(lambda tangent: function(tangent, places, keepdim=keepdim), builder.tangent(x))


@rule(aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default)
def by_batch(builder: Builder, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """Linear operations that treat each member of a batch alike: the k tangents become a larger batch."""
    function, shape, batch = builder.function, builder.results.shape, len(x)
    names = [argument.name for argument in function._schema.arguments[1:]]
    place = names.index("input_size") if "input_size" in names else None

    def apply(tangent: Tensor) -> Tensor:
        values = list(arguments)
        if place is not None:
            values[place] = [len(tangent) * batch, *values[place][1:]]
        return function(tangent.flatten(0, 1), *values, **options).reshape(len(tangent), *shape)

    return builder.step(apply, builder.tangent(x))


# Arithmetic, element by element.


@rule(aten.add.Tensor, aten.sub.Tensor)
def added(builder: Builder, a: Any, b: Any, *, alpha: float = 1) -> Any:
    scale = -alpha if "sub" in builder.function._schema.name else alpha
    ta, tb = builder.tangent(a), builder.tangent(b)
    if ta is not None and tb is not None and a.shape == b.shape and scale == 1:
        return builder.sum(ta, tb)
    return builder.combine((None, ta), (None if scale == 1 else scale, tb))


@rule(aten.mul.Tensor, aten.mul.Scalar)
def multiplied(builder: Builder, a: Any, b: Any) -> Any:
    return builder.combine((b, builder.tangent(a)), (a, builder.tangent(b)))


@rule(aten.div.Tensor, aten.div.Scalar)
def divided(builder: Builder, a: Any, b: Any) -> Any:
    slope = None if builder.tangent(b) is None else -builder.results / b
    return builder.combine((1 / b, builder.tangent(a)), (slope, builder.tangent(b)))


@rule(aten.neg.default)
def negated(builder: Builder, x: Tensor) -> Any:
    return builder.combine((-1, builder.tangent(x)))


@rule(aten.where.self)
def selected(builder: Builder, condition: Tensor, a: Any, b: Any) -> Any:
    return builder.combine((condition, builder.tangent(a)), (~condition, builder.tangent(b)))


def _between(y: Tensor, x: Tensor, least: Any = None, most: Any = None) -> Any:
    inside = torch.ones_like(x, dtype=torch.bool)
    if least is not None:
        inside &= x >= least
    if most is not None:
        inside &= x <= most
    return inside


SLOPES: dict[Any, Callable[..., Tensor]] = {  # in terms of (result, argument, …)
    aten.exp.default: lambda y, x: y,
    aten.log.default: lambda y, x: 1 / x,
    aten.sqrt.default: lambda y, x: 0.5 / y,
    aten.pow.Tensor_Scalar: lambda y, x, n: n * x ** (n - 1) if n else torch.zeros_like(x),
    aten.clamp.default: _between,
    aten.abs.default: lambda y, x: x.sign(),
}
SLOPES_BY_RESULT: dict[Any, Callable[[Tensor], Tensor]] = {
    aten.relu.default: lambda y: y > 0,
    aten.sigmoid.default: lambda y: y * (1 - y),
    aten.tanh.default: lambda y: 1 - y * y,
}


@rule(*SLOPES)
def sloped(builder: Builder, x: Tensor, *arguments: Any, **options: Any) -> Any:
    slope = SLOPES[builder.function](builder.results, x, *arguments, **options)
    return builder.combine((slope, builder.tangent(x)))


@rule(*SLOPES_BY_RESULT)
def sloped_by_result(builder: Builder, x: Tensor) -> Any:
    return builder.combine((builder.once(builder.function, builder.results), builder.tangent(x)))


@rule(aten.sigmoid_backward.default, aten.tanh_backward.default)
def sloped_backward(builder: Builder, g: Tensor, y: Tensor) -> Any:
    """The gradient g · slope(y): both factors vary."""
    sigmoid = builder.function is aten.sigmoid_backward.default
    slope = builder.once(aten.sigmoid.default if sigmoid else aten.tanh.default, y)
    bend = None if builder.tangent(y) is None else g * (1 - 2 * y if sigmoid else -2 * y)
    return builder.combine((slope, builder.tangent(g)), (bend, builder.tangent(y)))


@rule(aten.threshold_backward.default)
def threshold_backward(builder: Builder, g: Tensor, y: Tensor, threshold: float) -> Any:
    mask = builder.once(aten.relu.default, y) if threshold == 0 else y > threshold
    return builder.combine((mask, builder.tangent(g)))


@rule(aten.hardsigmoid_backward.default, aten.hardtanh_backward.default, aten.leaky_relu_backward.default)
def linear_in_gradient(builder: Builder, g: Tensor, *others: Any) -> Any:
    """A gradient whose factor is constant between kinks."""
    function = builder.function

    def apply(tangent: Tensor) -> Tensor:
        return function(tangent, *[o.expand(tangent.shape) if isinstance(o, Tensor) else o for o in others])

    return None if builder.tangent(g) is None else builder.step(apply, builder.tangent(g))


@rule(aten.mse_loss.default)
def squared_error(builder: Builder, x: Tensor, y: Tensor, reduction: int = 1) -> Any:
    slope = 2 * (x - y)
    each = builder.combine((slope, builder.tangent(x)), (-slope, builder.tangent(y)), shape=slope.shape)
    if reduction == 0:
        return each
    scale = 1 / slope.numel() if reduction == 1 else 1
    return builder.step(lambda tangent: tangent.flatten(1).sum(1) * scale, each)


@rule(aten.mse_loss_backward.default)
def squared_error_backward(builder: Builder, g: Tensor, x: Tensor, y: Tensor, reduction: int) -> Any:
    scale = 2 / x.numel() if reduction == 1 else 2
    terms = [(scale * (x - y), g), (scale * g, x), (-scale * g, y)]
    return builder.combine(*[(slope, builder.tangent(value)) for slope, value in terms])


# Pooling: the places of the largest are constants.


@rule(aten.max_pool2d_with_indices.default)
def max_pooled(builder: Builder, x: Tensor, *_: Any) -> Any:
    values, places = builder.results
    if x.ndim != 4:
        return NotImplemented
    places = places.flatten(2)

    def gather(tangent: Tensor) -> Tensor:
        k = len(tangent)
        return tangent.flatten(3).gather(3, places.expand(k, *places.shape)).reshape(k, *values.shape)

    return [builder.step(gather, builder.tangent(x)), None]


@rule(aten.max_pool2d_with_indices_backward.default)
def max_pool_backward(builder: Builder, g: Tensor, x: Tensor, *arguments: Any) -> Any:
    if builder.tangent(g) is None:
        return None
    if g.ndim != 4:
        return NotImplemented
    places, shape = arguments[-1].flatten(2), x.shape

    def scatter(tangent: Tensor) -> Tensor:
        k = len(tangent)
        zeros = tangent.new_zeros(k, *shape[:2], math.prod(shape[2:]))
        return zeros.scatter_add_(3, places.expand(k, *places.shape), tangent.flatten(3)).reshape(k, *shape)

    return builder.step(scatter, builder.tangent(g))


# Products.


def _halves(builder: Builder, a: Any, b: Any) -> Any:
    left, right = builder.tangent(a), builder.tangent(b)
    return (
        None if left is None else builder.step(lambda tangent: torch.matmul(tangent, b), left),
        None if right is None else builder.step(lambda tangent: torch.matmul(a, tangent), right),
    )


@rule(aten.mm.default, aten.bmm.default)
def matrix_product(builder: Builder, a: Any, b: Any) -> Any:
    return builder.sum(*_halves(builder, a, b))


@rule(aten.addmm.default)
def matrix_product_and_sum(builder: Builder, c: Tensor, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    left, right = _halves(builder, a, b)
    scale = None if alpha == 1 else alpha
    bias = None if beta == 1 else beta, builder.tangent(c)
    return builder.combine((scale, left), (scale, right), bias)


@rule(aten.convolution.default)
def convolution(
    builder: Builder,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    _: Any,
    groups: int,
) -> Any:
    if groups != 1 or transposed:
        return NotImplemented
    geometry, shape = Geometry(tuple(stride), tuple(padding), tuple(dilation)), builder.results.shape
    tx, tw, tb = (builder.tangent(tensor) for tensor in (x, w, bias))
    left = None if tx is None else builder.step(Convolution(geometry, "output", 0, w, shape), tx)
    if tw is not None:
        by_weight = Convolution(geometry, "output", 1, x, shape, tb is not None)
        return builder.sum(left, builder.step(by_weight, tw, tb))
    if tb is None:
        return left
    ones = [1] * (x.ndim - 2)
    by_bias = builder.step(lambda t: t.reshape(len(t), 1, -1, *ones).expand(len(t), *shape), tb)
    return builder.sum(left, by_bias)


@rule(aten.convolution_backward.default)
def convolution_backward(
    builder: Builder,
    g: Tensor,
    x: Tensor,
    w: Tensor,
    _: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    __: Any,
    groups: int,
    mask: Any,
) -> Any:
    if groups != 1 or transposed:
        return NotImplemented
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation))

    def half(which: str, varies: int, tangent: int | None, constant: Tensor, like: Tensor) -> int | None:
        function = Convolution(geometry, which, varies, constant, like.shape)
        return None if tangent is None else builder.step(function, tangent)

    tg, tx, tw = (builder.tangent(tensor) for tensor in (g, x, w))
    by_input = by_weight = by_bias = None
    if mask[0]:
        by_input = builder.sum(half("input", 0, tg, w, x), half("input", 1, tw, g, x), shape=x.shape)
    if mask[1]:
        by_weight = builder.sum(half("weight", 0, tg, x, w), half("weight", 1, tx, g, w), shape=w.shape)
    if mask[2] and tg is not None:
        by_bias = builder.step(BiasGradient(g.ndim), tg)
    return [by_input, by_weight, by_bias]
