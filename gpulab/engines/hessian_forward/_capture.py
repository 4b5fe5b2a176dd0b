"""Capture of every operation of a gradient computation, with the tangents of its arguments."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    UncompiledDispatchMode,
    WeakTensorKeyDictionary,
    functional_variant,
    graph_nodes,
    is_mutable,
    schema_name,
    tree_flatten,
    tree_unflatten,
)
from gpulab.errors import UnsupportedError

DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True)
class CapturedOperation:
    """One operation below autograd: `function(*arguments, **options)` returned `results`.

    The results are detached. An in-place operation such as `add_` is recorded as its functional
    variant, here `add`.
    """

    function: OpOverload
    arguments: tuple[Nested, ...]
    options: dict[str, Nested]
    results: Nested
    variables: dict[int, int]  # `id` of an argument -> number of the variable that is its tangent

    def tangent(self, argument: Nested) -> int | None:
        """Return the number of the variable that is an argument's tangent; None for a constant."""
        return self.variables.get(id(argument))


def as_list(results: Nested) -> list[Nested]:
    """Return the results of an operation as a list, even if there is only one result."""
    return list(results) if isinstance(results, tuple | list) else [results]


class Capture(UncompiledDispatchMode):
    """Shows `linearize` each operation that has an argument with a tangent.

    `linearize` returns the number of each result's tangent, or None for a result that is constant.

    Tangents are kept for tensor objects, and writes are recorded by the address of the memory. If
    an operation overwrites memory, two things follow. Operations that were captured earlier keep a
    copy of the old values. Other tensors that share the overwritten elements have outdated
    tangents, and `UnsupportedError` is raised if they are used.

    Args:
        points: The tensors whose tangents are the variables 0, 1, ….
        linearize: See above.
    """

    def __init__(
        self,
        points: Iterable[Tensor],
        linearize: Callable[[CapturedOperation], Sequence[int | None]],
    ) -> None:
        super().__init__()
        self.linearize = linearize
        self.is_forward = True  # False during the backward pass
        self.time = 0  # the number of operations so far
        # tensor -> number of the variable that is its tangent
        self.variables = WeakTensorKeyDictionary(
            {point: number for number, point in enumerate(points)}
        )
        # tensor -> the time at which it was last computed, and its tangent with it
        self.valid_since = WeakTensorKeyDictionary()
        # The keys are the results of the forward pass, without the copies that autograd saves.
        self.results = WeakTensorKeyDictionary()
        # memory address -> the tensors at this address that captured operations refer to
        self.detached_aliases: dict[int, list[weakref.ref[Tensor]]] = defaultdict(list)
        # memory address -> the time and the overwritten tensor of each write
        self.overwritten: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Run an operation, and linearize it if one of its arguments has a tangent."""
        self.time += 1
        # All arguments in one flat list, in which tensors are found without regard to nesting.
        leaves, spec = tree_flatten((tuple(args), kwargs or {}))
        # Autograd calls `detach` to save results for the backward pass.
        is_of_forward_pass = self.is_forward and function is not DETACH
        if is_of_forward_pass:
            # Autograd treats a tensor that requires no gradient as a constant.
            for leaf in leaves:
                if isinstance(leaf, Tensor) and not leaf.requires_grad:
                    self.variables.pop(leaf, None)
        numbers = [
            self.tangent(leaf, function) if isinstance(leaf, Tensor) else None for leaf in leaves
        ]
        has_tangent = any(number is not None for number in numbers)
        if has_tangent:
            leaves = [self._detach(leaf) for leaf in leaves]
        # An in-place operation is captured as its functional variant.
        functional = (
            self._preserve_overwritten(function, args[0]) if is_mutable(function) else function
        )
        results = function(*args, **kwargs or {})
        values = as_list(results)
        self.valid_since.update((value, self.time) for value in values if isinstance(value, Tensor))
        if is_of_forward_pass:
            self.results.update((value, None) for value in values if isinstance(value, Tensor))
        if not has_tangent:
            return results
        variables = {
            id(leaf): number
            for leaf, number in zip(leaves, numbers, strict=True)
            if number is not None
        }
        arguments, options = tree_unflatten(leaves, spec)
        aliases = [self._detach(value) for value in values]
        detached_results = aliases[0] if isinstance(results, Tensor) else aliases
        tangents = self.linearize(
            CapturedOperation(functional, arguments, options, detached_results, variables)
        )
        if functional is not function:
            # The first argument has new values, so its old tangent is discarded.
            self.overwritten[_address(args[0])].append((self.time, args[0].detach()))
            self.variables.pop(args[0], None)
        # `tangents` is empty if all results are constants.
        self.variables.update(
            (value, number)
            for value, number in zip(values, tangents, strict=False)
            if number is not None
        )
        return results

    def tangent(self, tensor: Tensor, function: OpOverload | None = None) -> int | None:
        """Return the number of the variable that is a tensor's tangent; None for a constant.

        Args:
            tensor: The tensor.
            function: The operation that is about to use the tensor; None if the tensor is a result
                of `capture_gradient`.

        Raises:
            UnsupportedError: If the tensor's memory was overwritten through another tensor, or if
                `function` uses a by-product of the forward pass.
        """
        self._check_not_overwritten(tensor)
        number = self.variables.get(tensor)
        if number is not None and self._is_by_product(tensor):
            # Only functions named `…_backward` take a by-product as a constant.
            if function is None or not schema_name(function).endswith("_backward"):
                raise UnsupportedError(f"{function} uses a by-product of the forward pass")
            return None
        return number

    def _check_not_overwritten(self, tensor: Tensor) -> None:
        """Raise `UnsupportedError` if a tensor was overwritten through another tensor."""
        # In the forward pass, a tensor that requires no gradient is a constant, without a tangent
        # that could be outdated.
        may_have_tangent = tensor.requires_grad or not self.is_forward
        if not (self.overwritten and may_have_tangent):
            return
        for time, overwritten_tensor in self.overwritten.get(_address(tensor), ()):
            computed_before_write = self.valid_since.get(tensor, 0) < time
            if computed_before_write and _overlap(tensor, overwritten_tensor):
                raise UnsupportedError(
                    "a tensor is used after its memory was overwritten through another tensor"
                )

    def _is_by_product(self, tensor: Tensor) -> bool:
        """Return whether the backward pass uses a by-product of the forward pass.

        A by-product is a result that torch does not differentiate, such as the factors of a matrix.
        Autograd treats it as a constant. It has a variable nevertheless, because `linearize`
        returns one for every floating-point result.
        """
        is_backward = not self.is_forward
        return is_backward and tensor in self.results and not tensor.requires_grad

    def _detach(self, value: Nested) -> Nested:
        """Return a detached alias of a tensor and register it; return other values unchanged."""
        if not isinstance(value, Tensor):
            return value
        alias = value.detach()
        self.detached_aliases[_address(alias)].append(weakref.ref(alias))
        return alias

    def _preserve_overwritten(self, function: OpOverload, written: Nested) -> OpOverload:
        """Copy the values that are about to be overwritten, for the operations captured so far.

        Args:
            function: An in-place operation.
            written: Its first argument, which it overwrites.

        Returns:
            The functional variant of the operation, which returns a new tensor.

        Raises:
            UnsupportedError: If there is no functional variant, or if a tensor that requires a
                gradient is overwritten while gradients are disabled.
        """
        name = schema_name(function)
        functional = functional_variant(function)
        if functional is None or not isinstance(written, Tensor):
            raise UnsupportedError(f"{name} overwrites its arguments")
        if self.is_forward and written.requires_grad and not torch.is_grad_enabled():
            raise UnsupportedError(f"{name} overwrites a variable while gradients are disabled")
        for reference in self.detached_aliases.pop(_address(written), ()):
            alias = reference()
            if alias is not None:
                # A captured operation keeps this alias, whose data are moved to memory of its own.
                alias.data = alias.clone()
        return functional


def capture_gradient(
    objective: Callable[[], Tensor],
    points: Sequence[Tensor],
    linearize: Callable[[CapturedOperation], Sequence[int | None]],
    create_graph: bool = False,
) -> tuple[Tensor, list[Tensor], list[int | None]]:
    """Compute a loss and its gradients, and capture every operation on the way.

    Args:
        objective: A function that computes the loss, a scalar, from the points.
        points: The tensors with respect to which the loss is differentiated.
        linearize: A function that assigns variables to the results of an operation: see `Capture`.
        create_graph: Whether autograd uses kernels that can be differentiated again.

    Returns:
        The loss, the gradients at `points`, and the number of the variable that is the tangent of
        each gradient; None for a gradient that is constant.

    Raises:
        UnsupportedError: If the backward pass runs a function that is written in Python, or a
            tensor is used after its memory was overwritten through another tensor: the dispatch
            mode cannot follow tangents in these cases. Errors of autograd are converted to this
            one, except for running out of memory.
    """
    capture = Capture(points, linearize)
    with torch.enable_grad(), capture:
        loss = objective()
        for node in graph_nodes(loss):
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                # Python code may pass numbers on without an operation that the mode could see.
                raise UnsupportedError(f"{type(node).__name__} is written in Python")
        capture.is_forward = False
        try:
            gradients = torch.autograd.grad(
                loss, points, create_graph=create_graph, materialize_grads=True
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UnsupportedError(str(error)) from error
    tangents = [capture.tangent(gradient) for gradient in gradients]
    return loss.detach(), [gradient.detach() for gradient in gradients], tangents


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 for a tensor without strides."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common.

    Tensors of different types are assumed to overlap.
    """
    if a.dtype != b.dtype:
        return True
    # One mark for each element of the storage. The elements of `a` are marked, those of `b` read.
    marks = torch.zeros(
        a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool, device="cpu"
    )
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())
