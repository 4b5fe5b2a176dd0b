"""Follow several perturbed float64 executions of a function, to measure the effect of rounding.

The tracer keeps one exact float64 copy of each storage. This module keeps additional copies. On
each of them, the result of every operation is perturbed at random by as much as its own rounding
may change it. The spread of the copies around the exact one is the error that rounding explains, in
each number of each value. This is Monte Carlo arithmetic (Parker 1997), applied to operations on
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    find_tensors,
    map_nested,
    only_allocates,
    operation_name,
    returned_or_written,
    storage_identity,
)
from gpulab.audits import _count_sketch as sketches
from gpulab.audits._float64_calls import Float64Reference, prepare_rounded_results
from gpulab.audits._references import UNREPEATED_OPERATIONS, References
from gpulab.audits._rounding import PRODUCT_OPERANDS, count_terms
from gpulab.audits._tracer import Call, Tracer
from gpulab.audits._traces import Operation

SUMS = {"sum", "mean", "cumsum"}
# IEEE 754 requires the results of these operations to be the exact results, rounded once.
CORRECTLY_ROUNDED_OPERATIONS = {
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "sqrt",
    "neg",
    "abs",
    "_to_copy",
}


@dataclass(frozen=True)
class ResultRounding:
    """How rounding may change one result of an operation.

    Attributes:
        unit: The unit roundoff of the result, multiplied by the root of the number of summed terms.
        sizes: The sums of the absolute values of the terms, for each number of a product; None for
            other operations.
        has_floor: Whether small numbers are perturbed as much as numbers of typical size. The error
            of a kernel for a function such as `gelu` is small only relative to the function's
            typical values.
        tiny: The smallest positive number of the format.
    """

    unit: float
    sizes: Tensor | None
    has_floor: bool
    tiny: float


class PerturbedReferences(References):
    """Copies of all storages in float64 on which the results of every operation are perturbed.

    Args:
        seed: The seed of the random perturbations.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def draw_like(self, tensor: Tensor) -> Tensor:
        """Draw normally distributed numbers of a tensor's shape, complex if the tensor is."""
        generator = self.generators.setdefault(
            tensor.device, torch.Generator(tensor.device).manual_seed(self.seed)
        )
        return torch.randn(
            tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator
        )

    def perturb_inputs(self, inputs: Nested, written: set[int], unit: float) -> Nested:
        """Perturb the inputs of an operation by rounding errors; those in `written` in place."""

        def move(value: Nested) -> Nested:
            """Perturb a tensor of floating-point numbers; return any other value unchanged."""
            if not isinstance(value, Tensor) or not sketches.is_float_or_complex(value):
                return value
            moved = value * (1 + unit * self.draw_like(value))
            if storage_identity(value.untyped_storage()) in written:
                return value.copy_(moved)
            return moved

        return map_nested(move, inputs)

    def perturb_results(
        self, results: Sequence[Tensor], roundings: Sequence[ResultRounding]
    ) -> None:
        """Perturb the results of an operation in place by their own rounding errors."""
        for result, rounding in zip(results, roundings, strict=True):
            if not result.numel():
                continue
            sizes = result.abs()
            if rounding.has_floor:
                finite = torch.where(sizes.isfinite(), sizes, 0.0)
                sizes = sizes.clamp(min=float(finite.square().mean().sqrt()))
            if rounding.sizes is not None:
                sizes = torch.maximum(sizes, rounding.sizes)
            moved = result + (rounding.unit * sizes + rounding.tiny) * self.draw_like(result)
            result.copy_(torch.where(result.isfinite(), moved, result))


class PerturbingTracer(Tracer):
    """A tracer that also follows perturbed executions.

    Args:
        n_copies: The number of perturbed executions.

    Attributes:
        copies: The float64 copies of each perturbed execution.
        allocated: The serial numbers of the storages that were allocated without content.
        has_foreign_writes: Whether an operation read memory that something other than a torch
            operation had written to during the execution.
    """

    def __init__(self, n_copies: int) -> None:
        super().__init__(lambda: None, is_measuring=True)
        self.copies = [PerturbedReferences(seed) for seed in range(n_copies)]
        self.allocated: set[int] = set()
        self.has_foreign_writes = False

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Run an operation and record it; note storages that are allocated without content."""
        out = super().__torch_dispatch__(operation, types, args, kwargs)
        if (
            only_allocates(operation_name(operation))
            and type(out) is Tensor
            and sketches.is_strided(out)
        ):
            self.allocated.add(self.references.memory(out).serial)
        return out

    def is_written_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether something other than torch operations has written to a new tensor."""
        if not sketches.is_strided(tensor) or not tensor.numel():
            return False
        memory = self.references.memory(tensor)
        return memory.maker is None and memory.serial in self.allocated and bool(tensor.any())

    def value_of(self, tensor: Tensor, maker: Operation | None = None) -> str:
        """Return the name of a tensor's value; note if its memory changed unobserved."""
        memory = self.references.memory(tensor)
        version = memory.version
        name = super().value_of(tensor, maker)
        if self.references.memory(tensor).version != version:
            self.has_foreign_writes = True  # the memory was read again
        return name

    def _follow_copies(self, call: Call) -> Callable[..., None]:
        """Read the inputs from all copies now, and return a function that repeats the operation."""
        self.has_foreign_writes |= any(
            map(self.is_written_elsewhere, find_tensors(call.read_arguments))
        )
        inputs = [
            copy.inputs_of(call.args, call.kwargs, call.mutated_tensors) for copy in self.copies
        ]

        def finish(
            op: Operation,
            out: Nested,
            initial_arguments: tuple[Sequence[Nested], dict[str, Nested]],
        ) -> None:
            """Repeat the operation, which has run, on all copies."""
            roundings = self._roundings(call, op, out, initial_arguments)
            for copy, copy_inputs in zip(self.copies, inputs, strict=True):
                self._repeat(call, copy, copy_inputs, out, roundings)

        return finish

    def _repeat(
        self,
        call: Call,
        copy: PerturbedReferences,
        inputs: Nested,
        out: Nested,
        roundings: list[ResultRounding],
    ) -> None:
        """Repeat an operation on one perturbed copy, and store the results."""
        if roundings and call.name not in CORRECTLY_ROUNDED_OPERATIONS:
            written = {storage_identity(copy.of(t).untyped_storage()) for t in call.mutated_tensors}
            inputs = copy.perturb_inputs(inputs, written, roundings[0].unit)
        copy_out = copy.compute(call.operation, call.name, inputs, out, is_random=call.is_random)
        if copy_out is not None and roundings:
            results = [
                t
                for t in find_tensors(returned_or_written(call.operation, inputs[0], copy_out))
                if sketches.is_float_or_complex(t) and t.numel()
            ]
            if len(results) == len(roundings):
                copy.perturb_results(results, roundings)
        self._update_written_references(copy, call, copy_out, exact=True, state=None)
        self._store_new_references(copy, call, out, copy_out, exact=True, inputs=inputs)

    def _roundings(
        self,
        call: Call,
        op: Operation,
        out: Nested,
        initial_arguments: tuple[Sequence[Nested], dict[str, Nested]],
    ) -> list[ResultRounding]:
        """Return how rounding may change the results of an operation; empty if they are exact."""
        is_exact = op.error == 0.0 and op.name not in PRODUCT_OPERANDS
        if is_exact or call.is_random or call.name in UNREPEATED_OPERATIONS:
            return []
        raw_results = returned_or_written(call.operation, call.args, out)
        if call.name == "convolution_backward":  # oneDNN also returns other gradients
            output_mask = call.args[10]
            raw_results = [
                t for t, is_requested in zip(out, output_mask, strict=True) if is_requested
            ]
        results = prepare_rounded_results(raw_results)
        if not results:
            return []
        args, kwargs = initial_arguments
        reference = Float64Reference(call.operation, args, kwargs, len(results))
        terms = count_terms(call.name, args, reference, results)
        sizes: list[Tensor] | list[None] = [None] * len(results)
        if call.name in PRODUCT_OPERANDS or call.name in SUMS:
            sizes = reference(torch.abs)
        has_floor = call.name not in CORRECTLY_ROUNDED_OPERATIONS
        return [
            ResultRounding(
                math.sqrt(max(1.0, n_terms)) * torch.finfo(result.dtype).eps / 2,
                size,
                has_floor,
                torch.finfo(result.dtype).smallest_normal * torch.finfo(result.dtype).eps,
            )
            for result, n_terms, size in zip(results, terms, sizes, strict=True)
        ]
