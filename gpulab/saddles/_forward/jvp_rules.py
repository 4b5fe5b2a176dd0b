"""The derivative of a recorded gradient along a vector: a linear program, k vectors at a time.

Pearlmutter 1994, *Fast exact multiplication by the Hessian*: differentiate the computation of the
gradient in a direction. Each recorded operation contributes its own derivative, whose coefficients
are worked out once. Operations without a rule here are differentiated by torch's forward mode.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpulab.saddles._forward.capture import DETACH, Operation, UnsupportedError, watch_gradient
from gpulab.saddles._forward.combinations import Combination
from gpulab.saddles._forward.convolutions import BiasGradient, Convolution, Geometry
from gpulab.saddles._forward.linear_maps import Program, Step

aten = torch.ops.aten


def linearized(
    objective: Callable[[], Tensor], points: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None], Program]:
    """(the loss, its gradients, the map from tangents of `points` to tangents of the gradients)."""
    try:
        return _linearized(objective, points, twice=False)
    except UnsupportedError:
        return _linearized(objective, points, twice=True)


def _linearized(
    objective: Callable[[], Tensor], points: Sequence[Tensor], *, twice: bool
) -> tuple[Tensor, list[Tensor | None], Program]:
    builder = Builder(points)
    loss, gradients = watch_gradient(objective, points, builder.follow, twice)
    for step in builder.steps:
        if isinstance(step.function, ByTorch):
            step.function.settle()
    results = [None if gradient is None else builder.tangent(gradient) for gradient in gradients]
    program = Program(len(points), builder.steps, results, builder.bytes)
    found = [None if gradient is None else gradient.detach() for gradient in gradients]
    return loss, found, program.simplified(points[0].dtype)


class Builder:
    """Which variable is the tangent of which tensor, and the steps so far."""

    def __init__(self, points: Sequence[Tensor]) -> None:
        # By identity. A new tensor may get the identity of one that is gone; `follow` forgets those.
        self.of = {id(point): number for number, point in enumerate(points)}
        self.steps: list[Step] = []
        self.count = len(points)
        self.bytes = 0
        self.known: dict[Any, tuple[Tensor, Tensor]] = {}

    def tangent(self, tensor: Any) -> int | None:
        """The variable that is a tensor's tangent; None for a constant."""
        return self.of.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def step(self, function: Callable[..., Any], *inputs: int | None) -> int:
        """A new variable, made from others."""
        return self.steps_of(function, inputs, 1)[0]

    def steps_of(self, function: Callable[..., Any], inputs: Sequence[int | None], count: int) -> tuple[int, ...]:
        """Several new variables at once."""
        outputs = tuple(range(self.count, self.count + count))
        self.count += count
        self.steps.append(Step(function, tuple(number for number in inputs if number is not None), outputs))
        return outputs

    def combine(self, result: Tensor, *terms: tuple[Tensor | float | None, int | None]) -> int | None:
        """The sum of coefficients times variables, broadcast to the shape of `result`."""
        present = [(c.detach() if isinstance(c, Tensor) else c, v) for c, v in terms if v is not None]
        if not present:
            return None
        return self.step(Combination([c for c, _ in present], tuple(result.shape)), *[v for _, v in present])

    def sum(self, result: Tensor, *terms: int | None) -> int | None:
        """The sum of variables that all have the shape of `result`."""
        present = [term for term in terms if term is not None]
        if len(present) < 2:
            return present[0] if present else None
        return self.step(Combination([None] * len(present), tuple(result.shape), plain=True), *present)

    def once(self, kind: str, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """A coefficient that forward and backward pass share, computed once."""
        key = kind, tensor.data_ptr(), tensor.shape, tensor.stride()
        if key not in self.known:
            self.known[key] = tensor.detach(), make(tensor.detach())
        return self.known[key][1]

    def follow(self, operation: Operation) -> None:
        """Add what an operation does to tangents."""
        for constant in operation.constants:
            self.of.pop(id(constant), None)
        if operation.copied is not None:
            self._carry(*operation.copied)
        given = [a for a in tree_flatten((operation.arguments, operation.options))[0] if self.tangent(a) is not None]
        made: list[int | None] = []
        results = _slots(operation.results)
        if given and operation.function not in WITHOUT_DERIVATIVE and any(_floats(result) for result in results):
            made = self._derivative(operation)
        for result in results:
            self.of.pop(id(result), None)
        for result, number in zip(results, made, strict=False):
            if number is not None:
                self.of[id(result)] = number
                self.bytes += result.nbytes if operation.function not in SAME else 0

    def _derivative(self, operation: Operation) -> list[int | None]:
        if operation.function in SAME:
            return [self.tangent(operation.arguments[0])]
        rule = RULES.get(operation.function)
        made = rule(self, operation, *operation.arguments, **operation.options) if rule else NotImplemented
        if made is NotImplemented:
            made = by_torch(self, operation)
        return [made] if made is None or isinstance(made, int) else list(made)

    def _carry(self, source: Tensor, target: Tensor) -> None:
        self.of.pop(id(target), None)
        number = self.tangent(source)
        if number is not None:
            self.of[id(target)] = number


def by_torch(builder: Builder, operation: Operation) -> list[int | None]:
    """Any operation, by torch's own derivative of it."""
    function = ByTorch(builder, operation)
    sources = [builder.tangent(value) for value in function.varying]
    numbers = iter(builder.steps_of(function, sources, sum(function.wanted)))
    return [next(numbers) if want else None for want in function.wanted]


class ByTorch:
    """Tangents of one operation by torch's forward mode, or where it has none by two backward passes.

    Each computes the operation itself along.
    """

    def __init__(self, builder: Builder, operation: Operation) -> None:
        flat, self.spec = tree_flatten((operation.arguments, operation.options))
        self.places = [place for place, value in enumerate(flat) if builder.tangent(value) is not None]
        self.varying = [flat[place] for place in self.places]
        self.flat = [value.detach() if isinstance(value, Tensor) else value for value in flat]
        self.primals = tuple(self.flat[place] for place in self.places)
        self.wanted = [_floats(result) for result in _slots(operation.results)]
        self.function = operation.function
        self.way = self.forward_mode

    def settle(self) -> None:
        """Find a way that works, with one tangent of zeros."""
        self.varying = []
        zeros = [torch.zeros_like(primal)[None] for primal in self.primals]
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
        return torch.func.jvp(self._called, self.primals, tangents)[1]

    def twice_backward(self, *tangents: Tensor) -> tuple[Tensor, ...]:
        """The transpose of the transpose."""
        results, back, *_ = torch.func.vjp(self._called, *self.primals)
        zeros = tuple(torch.zeros_like(result) for result in results)
        return torch.func.vjp(back, zeros)[1](tangents)[0]

    def _called(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        changed = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=True):
            changed[place] = tensor
        arguments, options = tree_unflatten(changed, self.spec)
        results = _slots(self.function(*arguments, **options))
        return tuple(result for result, want in zip(results, self.wanted, strict=True) if want)


# Shapes. A tangent has one more dimension, in front.


def reshaped(builder: Builder, operation: Operation, x: Tensor, *_: Any, **__: Any) -> Any:
    shape = tuple(operation.results.shape)
    return builder.step(lambda tangent: tangent.reshape(len(tangent), *shape), builder.tangent(x))


def expanded(builder: Builder, operation: Operation, x: Tensor, *_: Any, **__: Any) -> Any:
    shape, lift = tuple(operation.results.shape), _lifting(operation.results.ndim)
    return builder.step(lambda tangent: lift(tangent).expand(len(tangent), *shape), builder.tangent(x))


def permuted(builder: Builder, operation: Operation, x: Tensor, dims: Sequence[int]) -> Any:
    order = (0, *[dim % x.ndim + 1 for dim in dims])
    return builder.step(lambda tangent: tangent.permute(order), builder.tangent(x))


def transposed(builder: Builder, operation: Operation, x: Tensor, a: int = 0, b: int = 1) -> Any:
    if x.ndim < 2:
        return builder.tangent(x)
    return builder.step(lambda tangent: tangent.transpose(a % x.ndim + 1, b % x.ndim + 1), builder.tangent(x))


def along(builder: Builder, operation: Operation, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """Operations whose argument `dim` has to be one more."""
    names = [argument.name for argument in operation.function._schema.arguments[1:]]
    filled = {a.name: a.default_value for a in operation.function._schema.arguments[1:] if a.has_default_value()}
    filled |= dict(zip(names, arguments, strict=False)) | options
    filled["dim"] = filled["dim"] % max(x.ndim, 1) + 1
    values = [filled[name] for name in names]
    function = operation.function
    single = isinstance(operation.results, Tensor)
    count = 1 if single else len(operation.results)
    made = builder.steps_of(lambda tangent: function(tangent, *values), [builder.tangent(x)], count)
    return made[0] if single else made


def unsqueezed(builder: Builder, operation: Operation, x: Tensor, dim: int) -> Any:
    return builder.step(lambda tangent: tangent.unsqueeze(dim % (x.ndim + 1) + 1), builder.tangent(x))


def joined(builder: Builder, operation: Operation, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """`cat` and `stack`: constants have the tangent zero."""
    function = operation.function
    numbers = [builder.tangent(tensor) for tensor in tensors]
    place = dim % operation.results.ndim + 1
    shapes = [tuple(tensor.shape) for tensor in tensors]

    def join(*tangents: Tensor) -> Tensor:
        given = iter(tangents)
        k = len(tangents[0])
        parts = [
            tangents[0].new_zeros(1).expand(k, *shape) if number is None else next(given)
            for number, shape in zip(numbers, shapes, strict=True)
        ]
        return function(parts, place)

    return builder.step(join, *[number for number in numbers if number is not None])


def reduced(builder: Builder, operation: Operation, x: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    """`sum` and `mean`."""
    dims = range(x.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    places = [d % x.ndim + 1 for d in dims]
    function = torch.sum if "sum" in operation.function._schema.name else torch.mean
    if not places:
        return builder.tangent(x)
    return builder.step(lambda tangent: function(tangent, places, keepdim=keepdim), builder.tangent(x))


def by_batch(builder: Builder, operation: Operation, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """Linear operations that treat each member of a batch alike: the k tangents become a larger batch."""
    function, sizes = operation.function, tuple(operation.results.shape)
    names = [argument.name for argument in function._schema.arguments[1:]]
    place = names.index("input_size") if "input_size" in names else None
    batch = len(x)

    def apply(tangent: Tensor) -> Tensor:
        values = list(arguments)
        if place is not None:
            values[place] = [len(tangent) * batch, *values[place][1:]]
        return function(tangent.flatten(0, 1), *values, **options).reshape(len(tangent), *sizes)

    return builder.step(apply, builder.tangent(x))


# Arithmetic, element by element.


def added(builder: Builder, operation: Operation, a: Any, b: Any, *, alpha: float = 1) -> Any:
    sign = -alpha if "sub" in operation.function._schema.name else alpha
    ta, tb, result = builder.tangent(a), builder.tangent(b), operation.results
    if ta is not None and tb is not None and a.shape == b.shape and sign == 1:
        return builder.sum(result, ta, tb)
    return builder.combine(result, (None, ta), (None if sign == 1 else sign, tb))


def multiplied(builder: Builder, operation: Operation, a: Any, b: Any) -> Any:
    return builder.combine(operation.results, (b, builder.tangent(a)), (a, builder.tangent(b)))


def divided(builder: Builder, operation: Operation, a: Any, b: Any) -> Any:
    slope = None if builder.tangent(b) is None else -operation.results / b
    return builder.combine(operation.results, (1 / b, builder.tangent(a)), (slope, builder.tangent(b)))


def negated(builder: Builder, operation: Operation, x: Tensor) -> Any:
    return builder.combine(operation.results, (-1, builder.tangent(x)))


def sloped(slope: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function of each element, from its derivative in terms of (result, argument, …)."""

    def rule(builder: Builder, operation: Operation, x: Tensor, *arguments: Any, **options: Any) -> Any:
        factor = slope(operation.results.detach(), x.detach(), *arguments, **options)
        return builder.combine(operation.results, (factor, builder.tangent(x)))

    return rule


def _power(y: Tensor, x: Tensor, exponent: float) -> Tensor:
    return exponent * x ** (exponent - 1) if exponent else torch.zeros_like(x)


def _between(y: Tensor, x: Tensor, least: float | None = None, most: float | None = None) -> Tensor:
    inside = torch.ones_like(x, dtype=torch.bool)
    if least is not None:
        inside &= x >= least
    if most is not None:
        inside &= x <= most
    return inside


def _of_sigmoid(y: Tensor) -> Tensor:
    return y * (1 - y)


def _of_tanh(y: Tensor) -> Tensor:
    return 1 - y * y


def _of_relu(y: Tensor) -> Tensor:
    return y > 0


def by_result(slope: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A function of each element whose derivative is known from its result."""

    def rule(builder: Builder, operation: Operation, x: Tensor) -> Any:
        factor = builder.once(slope.__name__, operation.results, slope)
        return builder.combine(operation.results, (factor, builder.tangent(x)))

    return rule


def by_result_backward(slope: Callable[[Tensor], Tensor], bend: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The gradient g · slope(y) of such a function: both factors vary."""

    def rule(builder: Builder, operation: Operation, g: Tensor, y: Tensor) -> Any:
        factor = builder.once(slope.__name__, y, slope)
        ty = builder.tangent(y)
        curved = None if ty is None else g * bend(y)
        return builder.combine(operation.results, (factor, builder.tangent(g)), (curved, ty))

    return rule


def threshold_backward(builder: Builder, operation: Operation, g: Tensor, y: Tensor, threshold: float) -> Any:
    mask = builder.once(_of_relu.__name__, y, _of_relu) if threshold == 0 else y.detach() > threshold
    return builder.combine(operation.results, (mask, builder.tangent(g)))


def selected(builder: Builder, operation: Operation, condition: Tensor, a: Tensor, b: Tensor) -> Any:
    return builder.combine(operation.results, (condition, builder.tangent(a)), (~condition, builder.tangent(b)))


def linear_in_gradient(builder: Builder, operation: Operation, g: Tensor, *others: Any) -> Any:
    """A gradient whose factor is constant between kinks."""
    function, others = operation.function, tuple(o.detach() if isinstance(o, Tensor) else o for o in others)

    def apply(tangent: Tensor) -> Tensor:
        return function(tangent, *[o.expand(tangent.shape) if isinstance(o, Tensor) else o for o in others])

    return None if builder.tangent(g) is None else builder.step(apply, builder.tangent(g))


def squared_error(builder: Builder, operation: Operation, x: Tensor, y: Tensor, reduction: int = 1) -> Any:
    slope = 2 * (x - y)
    each = builder.combine(slope, (slope, builder.tangent(x)), (-slope, builder.tangent(y)))
    if reduction == 0:
        return each
    scale = 1 / slope.numel() if reduction == 1 else 1
    return builder.step(lambda tangent: tangent.flatten(1).sum(1) * scale, each)


def squared_error_backward(
    builder: Builder, operation: Operation, g: Tensor, x: Tensor, y: Tensor, reduction: int
) -> Any:
    scale = 2 / x.numel() if reduction == 1 else 2
    by_g = None if builder.tangent(g) is None else scale * (x - y)
    return builder.combine(
        operation.results,
        (by_g, builder.tangent(g)),
        (scale * g, builder.tangent(x)),
        (-scale * g, builder.tangent(y)),
    )


# Pooling: the places of the largest are constants.


def max_pooled(builder: Builder, operation: Operation, x: Tensor, *_: Any, **__: Any) -> Any:
    values, places = operation.results
    if x.ndim != 4:
        return NotImplemented
    places = places.flatten(2)

    def gather(tangent: Tensor) -> Tensor:
        k = len(tangent)
        return tangent.flatten(3).gather(3, places.expand(k, *places.shape)).reshape(k, *values.shape)

    return builder.step(gather, builder.tangent(x)), None


def max_pool_backward(builder: Builder, operation: Operation, g: Tensor, x: Tensor, *arguments: Any) -> Any:
    if g.ndim != 4 or builder.tangent(g) is None:
        return None if builder.tangent(g) is None else NotImplemented
    places, shape = arguments[-1].flatten(2), tuple(x.shape)

    def scatter(tangent: Tensor) -> Tensor:
        k = len(tangent)
        zeros = tangent.new_zeros(k, *shape[:2], math.prod(shape[2:]))
        return zeros.scatter_add_(3, places.expand(k, *places.shape), tangent.flatten(3)).reshape(k, *shape)

    return builder.step(scatter, builder.tangent(g))


# Products.


def matrix_product(builder: Builder, operation: Operation, a: Tensor, b: Tensor) -> Any:
    return builder.sum(operation.results, *_halves(builder, a, b))


def matrix_product_and_sum(
    builder: Builder, operation: Operation, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    left, right = _halves(builder, a, b)
    scale = None if alpha == 1 else alpha
    return builder.combine(
        operation.results, (scale, left), (scale, right), (None if beta == 1 else beta, builder.tangent(c))
    )


def _halves(builder: Builder, a: Tensor, b: Tensor) -> tuple[int | None, int | None]:
    left, right = builder.tangent(a), builder.tangent(b)
    a, b = a.detach(), b.detach()
    return (
        None if left is None else builder.step(lambda tangent: torch.matmul(tangent, b), left),
        None if right is None else builder.step(lambda tangent: torch.matmul(a, tangent), right),
    )


def convolution(
    builder: Builder,
    operation: Operation,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if groups != 1 or transposed:
        return NotImplemented
    geometry, shape = Geometry(tuple(stride), tuple(padding), tuple(dilation)), tuple(operation.results.shape)
    tx, tw, tb = builder.tangent(x), builder.tangent(w), builder.tangent(bias)
    left = None if tx is None else builder.step(Convolution(geometry, "output", 0, w.detach(), shape), tx)
    if tw is not None:
        both = tb is not None
        right = Convolution(geometry, "output", 1, x.detach(), shape, both)
        return builder.sum(operation.results, left, builder.step(right, *((tw, tb) if both else (tw,))))
    if tb is None:
        return left
    ones = [1] * (x.ndim - 2)
    alone = builder.step(lambda t: t.reshape(len(t), 1, -1, *ones).expand(len(t), *shape), tb)
    return builder.sum(operation.results, left, alone)


def convolution_backward(
    builder: Builder,
    operation: Operation,
    g: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Sequence[bool],
) -> Any:
    if groups != 1 or transposed:
        return NotImplemented
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation))
    tg, tx, tw = builder.tangent(g), builder.tangent(x), builder.tangent(w)

    def half(which: str, varies: int, number: int | None, constant: Tensor, shape: Sequence[int]) -> int | None:
        function = Convolution(geometry, which, varies, constant.detach(), tuple(shape))
        return None if number is None else builder.step(function, number)

    made: list[int | None] = [None, None, None]
    if mask[0]:
        made[0] = builder.sum(x, half("input", 0, tg, w, x.shape), half("input", 1, tw, g, x.shape))
    if mask[1]:
        made[1] = builder.sum(w, half("weight", 0, tg, x, w.shape), half("weight", 1, tx, g, w.shape))
    if mask[2] and tg is not None:
        made[2] = builder.step(BiasGradient(g.ndim), tg)
    return made


def _lifting(ndim: int) -> Callable[[Tensor], Tensor]:
    """Adds dimensions between the first and the others, as broadcasting to `ndim` dimensions would in front."""

    def lift(tangent: Tensor) -> Tensor:
        missing = ndim + 1 - tangent.ndim
        return tangent.reshape(len(tangent), *[1] * missing, *tangent.shape[1:]) if missing else tangent

    return lift


def _slots(results: Any) -> list[Any]:
    """What an operation returned, one or several."""
    return list(results) if isinstance(results, tuple | list) else [results]


def _floats(result: Any) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point()


SAME = {DETACH, aten.alias.default, aten.clone.default, aten.lift_fresh.default}
WITHOUT_DERIVATIVE = {
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default,
    aten.new_empty_strided.default, aten.sign.default, aten.bernoulli.default, aten.rand_like.default,
    aten.randn_like.default,
}  # fmt: skip
RULES: dict[Any, Callable[..., Any]] = {
    aten.view.default: reshaped,
    aten._unsafe_view.default: reshaped,
    aten.reshape.default: reshaped,
    aten.squeeze.default: reshaped,
    aten.squeeze.dim: reshaped,
    aten.squeeze.dims: reshaped,
    aten.expand.default: expanded,
    aten.permute.default: permuted,
    aten.t.default: transposed,
    aten.transpose.int: transposed,
    aten.slice.Tensor: along,
    aten.select.int: along,
    aten.split.Tensor: along,
    aten.split_with_sizes.default: along,
    aten.unbind.int: along,
    aten.unsqueeze.default: unsqueezed,
    aten.cat.default: joined,
    aten.stack.default: joined,
    aten.sum.default: reduced,
    aten.sum.dim_IntList: reduced,
    aten.mean.default: reduced,
    aten.mean.dim: reduced,
    aten.upsample_nearest2d.default: by_batch,
    aten.upsample_nearest2d_backward.default: by_batch,
    aten.add.Tensor: added,
    aten.sub.Tensor: added,
    aten.mul.Tensor: multiplied,
    aten.mul.Scalar: multiplied,
    aten.div.Tensor: divided,
    aten.div.Scalar: divided,
    aten.neg.default: negated,
    aten.relu.default: by_result(_of_relu),
    aten.sigmoid.default: by_result(_of_sigmoid),
    aten.tanh.default: by_result(_of_tanh),
    aten.exp.default: sloped(lambda y, x: y),
    aten.log.default: sloped(lambda y, x: 1 / x),
    aten.sqrt.default: sloped(lambda y, x: 0.5 / y),
    aten.pow.Tensor_Scalar: sloped(_power),
    aten.clamp.default: sloped(_between),
    aten.abs.default: sloped(lambda y, x: x.sign()),
    aten.sigmoid_backward.default: by_result_backward(_of_sigmoid, lambda y: 1 - 2 * y),
    aten.tanh_backward.default: by_result_backward(_of_tanh, lambda y: -2 * y),
    aten.mse_loss.default: squared_error,
    aten.mse_loss_backward.default: squared_error_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.hardsigmoid_backward.default: linear_in_gradient,
    aten.hardtanh_backward.default: linear_in_gradient,
    aten.leaky_relu_backward.default: linear_in_gradient,
    aten.where.self: selected,
    aten.max_pool2d_with_indices.default: max_pooled,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.mm.default: matrix_product,
    aten.bmm.default: matrix_product,
    aten.addmm.default: matrix_product_and_sum,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}  # fmt: skip
