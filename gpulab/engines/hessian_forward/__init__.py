"""The engine behind `H @ v`: it captures a gradient and replays its derivative as a linear map.

The product of a Hessian with a vector is the derivative of the gradient in the direction of the
vector (Pearlmutter 1994). `linearize_gradient`, the public function of this package, derives the
instructions for this product once. They can then be applied to any number of vectors. The example
below does the same step by step for the loss ∑ w³.

`_capture` computes the loss and its gradient once, under a dispatch mode that sees every operation
below autograd, in the forward and in the backward pass. `_jvp_rules` has a rule for each operation,
its Jacobian-vector product: the instruction that computes the tangent of the result from the
tangents of the arguments. Tangents are numbered variables; the tangent of w is number 0.

    >>> import torch
    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> builder = Builder(inputs=1)
    >>> def linearize(operation):
    ...     tangents = builder.linearize(operation)
    ...     print(
    ...         operation.function,
    ...         [operation.tangent(argument) for argument in operation.arguments],
    ...         tangents,
    ...     )
    ...     return tangents
    >>> loss, gradients, results = capture_gradient(lambda: (w**3).sum(), [w], linearize)
    aten.pow.Tensor_Scalar [0, None] [1]
    aten.sum.default [1] [2]
    aten.ones_like.default [2] []
    aten.pow.Tensor_Scalar [0, None] [3]
    aten.mul.Scalar [3, None] [4]
    aten.mul.Tensor [None, 4] [5]

`_linear_maps` keeps the instructions that the tangents of the gradients depend on (here variable 5
is the only such tangent) and optimises them. It fuses successive linear combinations into one, and
batches convolutions that share a weight, such as those of several time steps. It then applies the
instructions to k vectors at once: one after the other, or on a GPU as one CUDA graph.

    >>> linear_map = builder.linear_map(results)
    >>> [
    ...     (step.inputs, step.outputs, step.function.coefficients)
    ...     for step in linear_map.instructions
    ... ]
    [((0,), (5,), (tensor([ 6., 12.]),))]
    >>> linear_map(torch.eye(2))
    [tensor([[ 6.,  0.],
            [ 0., 12.]])]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpulab.engines.hessian_forward._capture import CapturedOperation, capture_gradient
from gpulab.engines.hessian_forward._jvp_rules import Builder
from gpulab.engines.hessian_forward._linear_maps import LinearMap
from gpulab.errors import UnsupportedError

__all__ = ["linearize_gradient"]


def linearize_gradient(
    objective: Callable[[], Tensor], points: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], LinearMap]:
    """Compute a loss and its gradients, and derive the linear map that multiplies by the Hessian.

    Args:
        objective: A function that computes the loss, a scalar, from the points.
        points: The tensors with respect to which the loss is differentiated.

    Returns:
        The loss, the gradients at `points`, and the map. The map takes k tangents of each point,
        with shapes (k, *point.shape), and returns the tangents of the gradients in the same shapes.

    Raises:
        UnsupportedError: If the gradient has an operation that cannot be linearized here. Autograd
            may still be able to differentiate it twice.
    """

    def linearize(create_graph: bool) -> tuple[Tensor, list[Tensor], LinearMap]:
        """Compute and linearize the gradient once, with or without `create_graph`."""
        builder = Builder(len(points))

        def linearize_or_refuse(operation: CapturedOperation) -> list[int | None]:
            """Linearize an operation; raise `UnsupportedError` if a rule or torch fails."""
            try:
                return builder.linearize(operation)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                raise UnsupportedError(f"{operation.function}: {error}") from error

        loss, gradients, results = capture_gradient(
            objective, points, linearize_or_refuse, create_graph
        )
        return loss, gradients, builder.linear_map(results)

    try:
        return linearize(create_graph=False)
    except UnsupportedError:
        # Some gradients have two kernels: a fast one, and one that can be differentiated. With
        # `create_graph`, autograd uses the second.
        return linearize(create_graph=True)
