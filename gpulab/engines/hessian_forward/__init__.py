"""The engine behind `H @ v`: it captures a gradient and replays its derivative as a linear map.

The product of a Hessian with a vector is the derivative of the gradient along it (Pearlmutter
1994). `linearize_gradient`, the public function of this package, works that derivative out once.
Here it is by hand, for ∑ w³.

`capture` computes the loss and its gradient once, under a mode that sees every operation below
autograd, of the forward and of the backward pass. `_jvp_rules` has a rule for each, a
Jacobian-vector product: which instruction makes the tangent of its result from those of its
arguments. Tangents are numbered variables, w's is 0.

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

`_linear_maps` keeps the instructions that the gradients depend on, here on variable 5, and joins
them: neighbouring combinations into one pass, and convolutions with one weight, as those of several
time steps, into one batch. It replays them for k vectors at once: one by one, or on a GPU as one
CUDA graph.

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
    """A loss, its gradients at `points`, and the map from tangents (k, …) to the gradients' own.

    Args:
        objective: Computes the loss, a scalar, from the points.
        points: What it is differentiated by.

    Raises:
        UnsupportedError: Where the gradient cannot be followed; it may still be differentiated
            twice by autograd.
    """

    def linearize(create_graph: bool) -> tuple[Tensor, list[Tensor], LinearMap]:
        builder = Builder(len(points))

        def linearize_or_refuse(operation: CapturedOperation) -> list[int | None]:
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
        # Some gradients have one kernel that is fast and another that can be differentiated.
        return linearize(create_graph=True)
