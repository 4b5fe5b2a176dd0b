"""Capture: every operation of a gradient computation, with the tangents that enter it."""

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
    """One call below autograd: `function(*arguments, **options)` and its detached `results`.

    Something that overwrites its argument is captured as the function that returns a new tensor
    instead.
    """

    function: OpOverload
    arguments: tuple[Nested, ...]
    options: dict[str, Nested]
    results: Nested
    variables: dict[int, int]  # identity of an argument -> number of its tangent

    def tangent(self, argument: Nested) -> int | None:
        """The number of the variable that is an argument's tangent; None for a constant."""
        return self.variables.get(id(argument))


def as_list(results: Nested) -> list[Nested]:
    """The results of an operation as a list."""
    return list(results) if isinstance(results, tuple | list) else [results]


class Capture(UncompiledDispatchMode):
    """Records every operation, and has `linearize` number the tangents of its results.

    Tensors are told apart as objects, memory by its address. Where memory is overwritten, whatever
    else lies there has a wrong tangent from then on, and must not be used. What earlier operations
    were given is copied.
    """

    def __init__(
        self,
        points: Iterable[Tensor],
        linearize: Callable[[CapturedOperation], Sequence[int | None]],
    ) -> None:
        super().__init__()
        self.linearize = linearize
        self.is_forward = True
        self.time = 0  # operations so far
        self.variables = WeakTensorKeyDictionary(
            {point: number for number, point in enumerate(points)}
        )
        # tensor -> the time from which on its tangent is valid
        self.valid_since = WeakTensorKeyDictionary()
        # Results of the forward pass other than those that autograd saves.
        self.results = WeakTensorKeyDictionary()
        # By address: the tensors that captured operations refer to, and the time and target of each
        # write.
        self.detached_aliases: dict[int, list[weakref.ref[Tensor]]] = defaultdict(list)
        self.overwritten: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Run an operation, and linearize it if one of its inputs is variable."""
        self.time += 1
        leaves, spec = tree_flatten((tuple(args), kwargs or {}))
        # autograd saves results as something detached
        if self.is_forward and function is not DETACH:
            for leaf in leaves:
                if isinstance(leaf, Tensor) and not leaf.requires_grad:
                    self.variables.pop(leaf, None)  # autograd takes it for a constant
        numbers = [
            self.tangent(leaf, function) if isinstance(leaf, Tensor) else None for leaf in leaves
        ]
        has_tangent = any(number is not None for number in numbers)
        if has_tangent:
            leaves = [self._detach(leaf) for leaf in leaves]
        functional = (
            self._preserve_overwritten(function, args[0]) if is_mutable(function) else function
        )
        results = function(*args, **kwargs or {})
        values = as_list(results)
        self.valid_since.update((value, self.time) for value in values if isinstance(value, Tensor))
        if self.is_forward and function is not DETACH:
            self.results.update((value, None) for value in values if isinstance(value, Tensor))
        if has_tangent:
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
                self.overwritten[_address(args[0])].append((self.time, args[0].detach()))
                self.variables.pop(args[0], None)
            self.variables.update(
                (v, t) for v, t in zip(values, tangents, strict=False) if t is not None
            )
        return results

    def tangent(self, tensor: Tensor, function: OpOverload | None = None) -> int | None:
        """The number of the variable that is a tensor's tangent; None for a constant."""
        if self.overwritten and (tensor.requires_grad or not self.is_forward):
            for time, overwritten_tensor in self.overwritten.get(_address(tensor), ()):
                if self.valid_since.get(tensor, 0) < time and _overlap(tensor, overwritten_tensor):
                    raise UnsupportedError(
                        "a tensor is used whose memory was overwritten by way of another one"
                    )
        number = self.variables.get(tensor)
        if (
            number is not None
            and not self.is_forward
            and not tensor.requires_grad
            and tensor in self.results
        ):
            # A by-product that has no derivative for torch, such as a matrix's factors;
            # `…_backward` allow for that.
            if function is None or not schema_name(function).endswith("_backward"):
                raise UnsupportedError(f"{function} is given a by-product of the forward pass")
            return None
        return number

    def _detach(self, value: Nested) -> Nested:
        if not isinstance(value, Tensor):
            return value
        alias = value.detach()
        self.detached_aliases[_address(alias)].append(weakref.ref(alias))
        return alias

    def _preserve_overwritten(self, function: OpOverload, written: Nested) -> OpOverload:
        """The operation that returns a new tensor where this one overwrites its first argument."""
        name = schema_name(function)
        functional = functional_variant(function)
        if functional is None or not isinstance(written, Tensor):
            raise UnsupportedError(f"{name} overwrites its arguments")
        if self.is_forward and written.requires_grad and not torch.is_grad_enabled():
            raise UnsupportedError(f"{name} overwrites a variable, unseen by autograd")
        for reference in self.detached_aliases.pop(_address(written), ()):
            alias = reference()
            if alias is not None:
                alias.data = alias.clone()
        return functional


def capture_gradient(
    objective: Callable[[], Tensor],
    points: Sequence[Tensor],
    linearize: Callable[[CapturedOperation], Sequence[int | None]],
    create_graph: bool = False,
) -> tuple[Tensor, list[Tensor], list[int | None]]:
    """A loss, its gradients at `points`, and the numbers of the variables that are their tangents.

    Raises:
        UnsupportedError: Where Python code of the user's own takes part in the backward pass, or a
            tensor is used whose memory was overwritten by way of another one: what happens there
            cannot be seen from below.
    """
    capture = Capture(points, linearize)
    with torch.enable_grad(), capture:
        loss = objective()
        for node in graph_nodes(loss):
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                # It may hand over numbers in ways that no operation shows.
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
    return loss.detach(), [g.detach() for g in gradients], [capture.tangent(g) for g in gradients]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if a.dtype != b.dtype:
        return True
    marks = torch.zeros(
        a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool, device="cpu"
    )
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())
