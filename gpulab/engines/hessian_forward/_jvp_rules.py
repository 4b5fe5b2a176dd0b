"""Rules for Jacobian-vector products (JVPs): how each captured operation maps tangents.

The k tangents of a tensor have its shape with a first dimension of size k.

Operations without a rule in `RULES` are differentiated by torch. An elementwise operation is
differentiated once, when the map is built. Any other operation is differentiated in forward mode in
every product.
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
from gpulab.engines.hessian_forward._capture import CapturedOperation, as_list
from gpulab.engines.hessian_forward._combinations import Coefficient, Combination, lift
from gpulab.engines.hessian_forward._convolutions import BiasGradient, Convolution, Geometry
from gpulab.engines.hessian_forward._linear_maps import Instruction, LinearMap, remove_unused
from gpulab.errors import UnsupportedError

aten = torch.ops.aten
# The numbers of the variables that are tangents of the results; None for a constant result.
Tangents: TypeAlias = int | Sequence[int | None] | None
TangentMap: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]  # takes tangents (k, …)


class Builder:
    """Builds the instructions of a linear map, operation by operation.

    Args:
        inputs: The number of inputs, whose tangents are the variables 0, 1, ….

    Attributes:
        instructions: The instructions so far.
        variable_count: The number of variables so far.
        bytes: The memory of one tangent of every variable so far.
        function: The operation that a rule is called for.
        results: The results of this operation.
        tangent: Returns the number of the variable that is an argument's tangent; None for a
            constant.
    """

    function: OpOverload
    results: Nested
    tangent: Callable[[Nested], int | None]

    def __init__(self, inputs: int) -> None:
        self.instructions: list[Instruction] = []
        self.variable_count = inputs
        self.bytes = 0

    def linearize(self, operation: CapturedOperation) -> list[int | None]:
        """Add the instructions that map tangents of an operation's arguments to those of results.

        Returns:
            The variable that is the tangent of each result; None for a constant. An empty list if
            all results are constants.

        Raises:
            UnsupportedError: If a result is complex.
        """
        results = as_list(operation.results)
        self.function = operation.function
        self.results = operation.results
        self.tangent = operation.tangent
        if any(isinstance(result, Tensor) and result.is_complex() for result in results):
            raise UnsupportedError(f"{operation.function} returns complex numbers")
        name = schema_name(operation.function).removeprefix("aten::")
        # Operations such as `zeros_like` and `new_ones` read only the shapes of their arguments.
        if (
            name.endswith("_like")
            or name.startswith("new_")
            or not any(_is_float(result) for result in results)
        ):
            return []
        rule = RULES.get(operation.function)
        variables = (
            rule(self, *operation.arguments, **operation.options) if rule else NotImplemented
        )
        if variables is NotImplemented:
            variables = self._linearize_by_torch(operation)
        numbers = as_list(variables)
        if operation.function not in COPIES:  # A copy has the same tangent as its argument.
            self.bytes += sum(
                result.nbytes
                for result, number in zip(results, numbers, strict=False)
                if number is not None
            )
        return numbers

    def _linearize_by_torch(self, operation: CapturedOperation) -> list[int | None]:
        """Add an instruction by which torch computes the tangents of an operation's results.

        These are the tangents of the floating-point results. The other results are constants.
        """
        torch_jvp = TorchJvp(operation)
        float_count = sum(torch_jvp.float_results)
        outputs = iter(self.add_instruction(torch_jvp, torch_jvp.variables, float_count))
        return [next(outputs) if is_float else None for is_float in torch_jvp.float_results]

    def linear_map(self, results: Sequence[int | None]) -> LinearMap:
        """Return the map from the inputs to the variables `results`; None means zero."""
        instructions = remove_unused(self.instructions, results)
        # Only now, because operations that no result depends on need not be differentiable.
        for instruction in instructions:
            if isinstance(instruction.function, TorchJvp):
                instruction.function = instruction.function.resolve()
        return LinearMap(instructions, results, self.bytes)

    def add_instruction(
        self, function: TangentMap, inputs: Sequence[int | None], result_count: int
    ) -> tuple[int, ...]:
        """Add an instruction with `result_count` outputs, and return the numbers of the outputs.

        Inputs that are None, the tangents of constants, are left out.
        """
        outputs = tuple(range(self.variable_count, self.variable_count + result_count))
        self.variable_count += result_count
        self.instructions.append(
            Instruction(function, tuple(number for number in inputs if number is not None), outputs)
        )
        return outputs

    def apply(self, function: TangentMap, *arguments: Nested) -> int | None:
        """Add an instruction that applies a function to the tangents of `arguments`.

        Returns:
            The variable of the result; None if all arguments are constants.
        """
        tangents = [self.tangent(argument) for argument in arguments]
        if all(tangent is None for tangent in tangents):
            return None
        (output,) = self.add_instruction(function, tangents, result_count=1)
        return output

    def combine(self, *terms: tuple[Coefficient, int | None]) -> int | None:
        """Add an instruction for the sum of coefficients times variables.

        The terms are broadcast to the shape of the operation's result. Terms whose variable is None
        are left out.

        Returns:
            The variable of the sum; None if no term is left.
        """
        terms_with_tangent = [
            (coefficient, variable) for coefficient, variable in terms if variable is not None
        ]
        if not terms_with_tangent:
            return None
        # A coefficient may have a type other than that of the result, such as a boolean mask.
        coefficients = [
            c.to(self.results.dtype) if isinstance(c, Tensor) else c for c, _ in terms_with_tangent
        ]
        function = Combination(coefficients, self.results.shape)
        variables = [variable for _, variable in terms_with_tangent]
        (output,) = self.add_instruction(function, variables, result_count=1)
        return output

    def add(self, *variables: int | None, shape: Sequence[int] | None = None) -> int | None:
        """Add an instruction for the plain sum of variables.

        All variables have the shape `shape`, by default that of the operation's result. Those that
        are None are left out.

        Returns:
            The variable of the sum; None if no variable is left.
        """
        addends = [variable for variable in variables if variable is not None]
        if len(addends) < 2:
            return addends[0] if addends else None
        if shape is None:
            shape = self.results.shape
        function = Combination([None] * len(addends), shape, is_plain_sum=True)
        (output,) = self.add_instruction(function, addends, result_count=1)
        return output


class TorchJvp:
    """Computes the tangents of an operation by torch's forward mode, which runs it again.

    Attributes:
        leaves: All arguments and options of the operation, flattened.
        indices: The positions in `leaves` of the arguments that have a tangent.
        variables: The tangents of these arguments, as numbers of variables.
        float_results: For each result, whether it is a floating-point tensor. Other results have no
            tangent.
        shape: The shape of the result of an elementwise operation; None for any other operation,
            and if the types of the arguments and the result differ.
    """

    def __init__(self, operation: CapturedOperation) -> None:
        self.function = operation.function
        results = as_list(operation.results)
        self.leaves, self.spec = tree_flatten((operation.arguments, operation.options))
        self.indices = [
            index for index, value in enumerate(self.leaves) if operation.tangent(value) is not None
        ]
        self.variables = [operation.tangent(self.leaves[index]) for index in self.indices]
        self.float_results = [_is_float(result) for result in results]
        self.shape = None
        # Elementwise operations have one result. Elsewhere the first result may be None.
        if torch.Tag.pointwise in self.function.tags:
            types = {self.leaves[index].dtype for index in self.indices}
            if types == {results[0].dtype}:
                self.shape = results[0].shape

    def resolve(self) -> TangentMap:
        """Return the map that is applied in every product.

        For an elementwise operation it is a linear combination, whose coefficients are the
        derivatives. For any other operation it is this object.

        Raises:
            UnsupportedError: If torch cannot differentiate the operation.
        """
        for index in self.indices:  # torch cannot write tangents if elements share memory
            self.leaves[index] = self.leaves[index].contiguous()
        try:
            if self.shape is not None:
                return Combination(self._derivatives(), self.shape)
            # A call with zero tangents fails now if torch has no forward mode for this operation.
            self(*[torch.zeros_like(self.leaves[index])[None] for index in self.indices])
            return self
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise UnsupportedError(f"{self.function}: {first_line}") from error

    def _derivatives(self) -> list[Tensor]:
        """Compute the derivative of an elementwise operation with respect to each argument.

        Each element of the result depends only on the elements at the same position. The gradient
        of the sum of all results therefore consists of the derivatives at each position.
        """
        with torch.enable_grad():
            arguments = [
                self.leaves[index].expand(self.shape).clone().requires_grad_()
                for index in self.indices
            ]
            result, *_ = self._run(*arguments)
            return list(torch.autograd.grad(result.sum(), arguments))

    def __call__(self, *tangents: Tensor) -> tuple[Tensor, ...]:
        """Compute k tangents of each floating-point result from tangents (k, …)."""
        return torch.func.vmap(self._jvp)(*tangents)

    def _jvp(self, *tangents: Tensor) -> tuple[Tensor, ...]:
        """Compute one tangent of each floating-point result."""
        # torch warns about missing batching rules of its own operations.
        with warnings.catch_warnings(action="ignore"):
            arguments = tuple(self.leaves[index] for index in self.indices)
            results_and_tangents = torch.func.jvp(self._run, arguments, tangents)
        return results_and_tangents[1]

    def _run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the operation with other values of the arguments that have a tangent.

        Returns:
            The floating-point results.
        """
        leaves = list(self.leaves)
        for index, tensor in zip(self.indices, tensors, strict=True):
            leaves[index] = tensor
        arguments, options = tree_unflatten(leaves, self.spec)
        results = as_list(self.function(*arguments, **options))
        return tuple(
            result for result, is_float in zip(results, self.float_results, strict=True) if is_float
        )


def _is_float(result: object) -> bool:
    """Return whether an object is a floating-point tensor."""
    return isinstance(result, Tensor) and result.is_floating_point()


# The rules. A rule takes the builder and the arguments of an operation. It returns the variable
# that is the tangent of the result, or a list of variables for several results. It returns
# NotImplemented to leave the operation to `TorchJvp`.
#
# Instructions keep their functions as long as the map exists. A function in a rule therefore refers
# to a tensor of the operation only if it needs the values. If it needs only the shape, the rule
# first stores the shape in a variable.
#
# In the docstrings, dx is the tangent of x.


def reshape_jvp(b: Builder, x: Tensor, *_: Nested) -> Tangents:
    """Reshape the tangents like the result: d(view(x)) = view(dx)."""
    shape = b.results.shape
    return b.apply(lambda tangent: tangent.reshape(len(tangent), *shape), x)


def expand_jvp(b: Builder, x: Tensor, *_: Nested, **__: Nested) -> Tangents:
    """Expand the tangents to the shape of the result."""
    shape = b.results.shape
    return b.apply(lambda tangent: lift(tangent, len(shape) + 1).expand(len(tangent), *shape), x)


def shifted_dims_jvp(b: Builder, x: Tensor, *arguments: Nested, **options: Nested) -> Tangents:
    """Apply the operation itself to the tangents, with its dimensions shifted by one.

    The shift accounts for the first dimension of the tangents. Operations such as `split` have
    several results, and so does the instruction.
    """
    function = b.function
    # All arguments by name, in the order of the schema, with defaults for those that were not
    # given: a default dimension has to be shifted as well.
    values = named_arguments(function, (x, *arguments), options)
    for name in values.keys() & {"dim", "dim0", "dim1"}:
        dim = values[name] % max(x.ndim, 1)  # not negative; a scalar also has a dimension 0
        values[name] = dim + 1
    _x, *other_values = values.values()
    result_count = len(as_list(b.results))
    return b.add_instruction(
        lambda tangent: function(tangent, *other_values), [b.tangent(x)], result_count
    )


def concatenate_jvp(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tangents:
    """Concatenate or stack the tangents; constants among the tensors have zero tangents."""
    function = b.function
    # A negative dimension counts from the end of the result, which for `stack` has one more
    # dimension than the tensors. The first dimension of a tangent counts the tangents.
    tangent_dim = dim % b.results.ndim + 1
    # For each tensor: whether it has a tangent, and its shape.
    members = [(b.tangent(tensor) is not None, tensor.shape) for tensor in tensors]

    def join(*tangents: Tensor) -> Tensor:
        """Concatenate or stack the tangents of those tensors that have one, in their order."""
        k = len(tangents[0])
        zero = tangents[0].new_zeros(1)
        remaining = iter(tangents)
        parts = [
            next(remaining) if has_tangent else zero.expand(k, *shape)
            for has_tangent, shape in members
        ]
        return function(parts, tangent_dim)

    return b.apply(join, *tensors)


def reduce_jvp(
    b: Builder,
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    **_: Nested,
) -> Tangents:
    """Sum or average each tangent over the dimensions over which the operation does so."""
    # None and an empty list mean all dimensions.
    dims: Sequence[int] = [dim] if isinstance(dim, int) else dim or range(x.ndim)
    if not dims:  # The sum or mean of a scalar is the scalar.
        return b.tangent(x)
    tangent_dims = [d % x.ndim + 1 for d in dims]  # the first dimension counts the tangents
    function = torch.sum if "sum" in str(b.function) else torch.mean
    return b.apply(lambda tangent: function(tangent, tangent_dims, keepdim=keepdim), x)


def upsample_jvp(b: Builder, x: Tensor, *arguments: Nested) -> Tangents:
    """Apply the operation itself to all tangents at once, as a batch of k times the size.

    The operation is nearest-neighbour upsampling, or its backward pass, whose x is the gradient of
    the output.
    """
    function = b.function
    shape = b.results.shape
    batch_size = len(x)

    def upsample(tangent: Tensor) -> Tensor:
        """Apply the operation to tangents (k, B, …), as a batch of k B examples."""
        k = len(tangent)
        values = list(arguments)
        if function is aten.upsample_nearest2d_backward.default:
            # The arguments after x are the output size and the input size; the latter begins with
            # the size of the batch.
            values[1] = [k * batch_size, *values[1][1:]]
        return function(tangent.flatten(0, 1), *values).reshape(k, *shape)

    return b.apply(upsample, x)


def add_jvp(b: Builder, x: Nested, y: Nested, *, alpha: float = 1) -> Tangents:
    """Compute d(x ± alpha y) = dx ± alpha dy."""
    scale = -alpha if "sub" in str(b.function) else alpha
    dx = b.tangent(x)
    dy = b.tangent(y)
    # A plain sum does not broadcast, but can be merged with others: see `merge_weight_gradients`.
    if dx is not None and dy is not None and x.shape == y.shape and scale == 1:
        return b.add(dx, dy)
    return b.combine((None, dx), (None if scale == 1 else scale, dy))


def multiply_jvp(b: Builder, x: Nested, y: Nested) -> Tangents:
    """Compute d(x y) = y dx + x dy."""
    return b.combine((y, b.tangent(x)), (x, b.tangent(y)))


def mse_backward_jvp(b: Builder, g: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tangents:
    """Compute the tangent of the gradient of a squared error, s g (x − y).

    The factor s is 2, divided by the number of elements for a mean (reduction 1).
    """
    scale = 2 / x.numel() if reduction == 1 else 2
    return b.combine(
        (scale * (x - y), b.tangent(g)), (scale * g, b.tangent(x)), (-scale * g, b.tangent(y))
    )


def max_pool_jvp(b: Builder, x: Tensor, *_: Nested) -> Tangents:
    """Select the entries of the tangents dx at the positions of the maxima of x.

    The operation returns the maxima and their positions. The positions are integers, which have no
    tangent.
    """
    maxima, positions = b.results
    shape = maxima.shape
    # Positions are counted row by row over the height and width of a channel.
    flat_positions = positions.flatten(-2)

    def gather(tangent: Tensor) -> Tensor:
        indices = flat_positions.expand(len(tangent), *flat_positions.shape)
        return tangent.flatten(-2).gather(-1, indices).reshape(len(tangent), *shape)

    return [b.apply(gather, x), None]


def max_pool_backward_jvp(b: Builder, g: Tensor, x: Tensor, *arguments: Nested) -> Tangents:
    """Add each entry of the tangents dg to zeros at the position that its maximum has in x.

    Here g is the gradient of the maxima. The last argument of the operation are their positions,
    which are constants.
    """
    shape = x.shape
    *_, positions = arguments
    # Positions are counted row by row over the height and width of a channel.
    flat_positions = positions.flatten(-2)

    def scatter(tangent: Tensor) -> Tensor:
        indices = flat_positions.expand(len(tangent), *flat_positions.shape)
        zeros = tangent.new_zeros(*indices.shape[:-1], shape[-2] * shape[-1])
        return zeros.scatter_add_(-1, indices, tangent.flatten(-2)).reshape(len(tangent), *shape)

    return b.apply(scatter, g)


def matmul_jvp(b: Builder, x: Tensor, y: Tensor) -> Tangents:
    """Compute d(x y) = dx y + x dy for a matrix product."""
    by_x = b.apply(lambda dx: torch.matmul(dx, y), x)
    by_y = b.apply(lambda dy: torch.matmul(x, dy), y)
    return b.add(by_x, by_y)


def addmm_jvp(b: Builder, c: Tensor, x: Tensor, y: Tensor, **scales: float) -> Tangents:
    """Compute d(c + x y) = dc + dx y + x dy; leave scaled sums to torch."""
    if scales:
        return NotImplemented
    by_x = b.apply(lambda dx: torch.matmul(dx, y), x)
    by_y = b.apply(lambda dy: torch.matmul(x, dy), y)
    return b.combine((None, by_x), (None, by_y), (None, b.tangent(c)))


def convolution_jvp(
    b: Builder, x: Tensor, w: Tensor, bias: Tensor | None, *options: Nested
) -> Tangents:
    """Compute d(x * w + bias) = dx * w + x * dw + dbias, where * is a convolution."""
    geometry = Geometry.of_options(options)
    if geometry is None:
        return NotImplemented
    shape = b.results.shape
    input_map = Convolution(geometry, "output", tangent_position=0, constant=w, shape=shape)
    by_input = b.apply(input_map, x)
    if b.tangent(w) is not None:
        # x * dw + dbias is computed by one convolution.
        has_bias = b.tangent(bias) is not None
        weight_map = Convolution(
            geometry, "output", tangent_position=1, constant=x, shape=shape, has_bias=has_bias
        )
        return b.add(by_input, b.apply(weight_map, w, bias))

    spatial_ndim = x.ndim - 2

    def broadcast_bias(tangent: Tensor) -> Tensor:
        column = tangent.reshape(len(tangent), 1, -1, *[1] * spatial_ndim)
        return column.expand(len(tangent), *shape)

    return b.add(by_input, b.apply(broadcast_bias, bias))


def convolution_backward_jvp(
    b: Builder, g: Tensor, x: Tensor, w: Tensor, sizes: Sequence[int], *options: Nested
) -> Tangents:
    """Compute the tangents of the gradients of a convolution's input, weight and bias.

    The gradient of the input is linear in the output gradient g and in w, that of the weight is
    linear in g and in x, and that of the bias is linear in g. The last option is a mask that
    selects which of the three are needed.
    """
    geometry = Geometry.of_options(options)
    if geometry is None:
        return NotImplemented
    *_, (needs_input, needs_weight, needs_bias) = options
    gradients: list[int | None] = []
    # Each gradient is linear in g and in another factor: w for the input, and x for the weight.
    for target, shape, factor, is_needed in (
        ("input", x.shape, w, needs_input),
        ("weight", w.shape, x, needs_weight),
    ):
        if not is_needed:
            gradients.append(None)
            continue
        gradient_map = Convolution(
            geometry, target, tangent_position=0, constant=factor, shape=shape
        )
        factor_map = Convolution(geometry, target, tangent_position=1, constant=g, shape=shape)
        by_gradient = b.apply(gradient_map, g)
        by_factor = b.apply(factor_map, factor)
        gradients.append(b.add(by_gradient, by_factor, shape=shape))
    bias_gradient = b.apply(BiasGradient(g.ndim), g) if needs_bias else None
    return [*gradients, bias_gradient]


COPIES = aten.detach.default, aten.clone.default
VIEWS = aten.view.default, UNSAFE_VIEW, aten.unsqueeze.default, aten.squeeze.dim
DIM_OPERATIONS = (
    aten.slice.Tensor,
    aten.select.int,
    aten.transpose.int,
    aten.split.Tensor,
    aten.unbind.int,
)
REDUCTIONS = aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim
RULES: dict[OpOverload, Callable[..., Tangents]] = {  # rule(builder, *arguments, **options)
    **dict.fromkeys(COPIES, lambda b, x, **_: b.tangent(x)),
    **dict.fromkeys(VIEWS, reshape_jvp),
    **dict.fromkeys(DIM_OPERATIONS, shifted_dims_jvp),
    **dict.fromkeys(REDUCTIONS, reduce_jvp),
    aten.expand.default: expand_jvp,
    aten.t.default: lambda b, x: b.apply(lambda tangent: tangent.transpose(1, -1), x),
    **dict.fromkeys((aten.cat.default, aten.stack.default), concatenate_jvp),
    **dict.fromkeys(
        (aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default), upsample_jvp
    ),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), add_jvp),
    aten.neg.default: lambda b, x: b.combine((-1, b.tangent(x))),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), multiply_jvp),
    aten.mse_loss_backward.default: mse_backward_jvp,
    aten.copy.default: lambda b, _, y, *__: b.combine((None, b.tangent(y))),
    aten.max_pool2d_with_indices.default: max_pool_jvp,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward_jvp,
    **dict.fromkeys((aten.mm.default, aten.bmm.default), matmul_jvp),
    aten.addmm.default: addmm_jvp,
    aten.convolution.default: convolution_jvp,
    aten.convolution_backward.default: convolution_backward_jvp,
}
