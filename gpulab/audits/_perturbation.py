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
from gpulab.audits._rounding import PRODUCT_OPERANDS, count_terms, requested_results
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
    """The size of the rounding error in each number of one result of an operation.

    The error of a number is assumed to be normally distributed. Its standard deviation is
    `relative_error` times the size of the number, plus `smallest_number`. The size is the absolute
    value of the number, unless `term_sums` or `has_floor` makes it larger.

    Attributes:
        relative_error: The unit roundoff of the result's format, multiplied by the root of the
            number of summed terms.
        term_sums: For each number of a product or a sum, the sum of the absolute values of its
            terms, because rounding errors do not cancel where the terms do. None for other
            operations.
        has_floor: Whether small numbers are perturbed as much as numbers of typical size. The error
            of a kernel for a function such as `gelu` is small only relative to the function's
            typical values.
        smallest_number: The smallest positive number of the format, which is about the error of
            numbers that underflow.
    """

    relative_error: float
    term_sums: Tensor | None
    has_floor: bool
    smallest_number: float


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

    def perturb_inputs(
        self, inputs: Nested, written_storages: set[int], relative_error: float
    ) -> Nested:
        """Perturb the inputs of an operation by random relative errors.

        Args:
            inputs: The arguments of the operation.
            written_storages: The identities of the storages that the operation writes to. Tensors
                over them are perturbed in place, because the operation must write to them and not
                to copies.
            relative_error: The standard deviation of the relative errors.
        """

        def perturb(value: Nested) -> Nested:
            """Perturb a tensor of floating-point numbers; return any other value unchanged."""
            if not isinstance(value, Tensor) or not sketches.is_float_or_complex(value):
                return value
            perturbed = value * (1 + relative_error * self.draw_like(value))
            if storage_identity(value.untyped_storage()) in written_storages:
                return value.copy_(perturbed)
            return perturbed

        return map_nested(perturb, inputs)

    def perturb_results(
        self, results: Sequence[Tensor], roundings: Sequence[ResultRounding]
    ) -> None:
        """Perturb the results of an operation in place by their own rounding errors."""
        for result, rounding in zip(results, roundings, strict=True):
            if not result.numel():
                continue
            sizes = result.abs()
            if rounding.has_floor:
                finite_sizes = torch.where(sizes.isfinite(), sizes, 0.0)
                typical_size = float(finite_sizes.square().mean().sqrt())
                sizes = sizes.clamp(min=typical_size)
            if rounding.term_sums is not None:
                sizes = torch.maximum(sizes, rounding.term_sums)
            deviations = rounding.relative_error * sizes + rounding.smallest_number
            perturbed = result + deviations * self.draw_like(result)
            result.copy_(torch.where(result.isfinite(), perturbed, result))


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
            roundings = _estimate_roundings(call, op, out, initial_arguments)
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
        """Repeat an operation on one perturbed copy, and store the results.

        Args:
            call: The call that has run.
            copy: The perturbed copies of all storages.
            inputs: The arguments of the call, taken from these copies.
            out: What the call returned.
            roundings: The rounding of each result; empty if the results are exact.
        """
        # The error of a kernel that is not correctly rounded may be as large as the effect of a
        # rounding of its inputs.
        if roundings and call.name not in CORRECTLY_ROUNDED_OPERATIONS:
            written_storages = {
                storage_identity(copy.of(t).untyped_storage()) for t in call.mutated_tensors
            }
            inputs = copy.perturb_inputs(inputs, written_storages, roundings[0].relative_error)
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


def _estimate_roundings(
    call: Call,
    op: Operation,
    out: Nested,
    initial_arguments: tuple[Sequence[Nested], dict[str, Nested]],
) -> list[ResultRounding]:
    """Estimate how much rounding may change the results of an operation that has just run.

    Args:
        call: The call.
        op: The record of the call, with its measured error.
        out: What the call returned.
        initial_arguments: Its positional and keyword arguments, as they were before the call.

    Returns:
        The rounding of each result, in the order of `prepare_rounded_results`. Empty if the
        results are exact, or if they are not repeated on the copies.
    """
    if call.is_random or call.name in UNREPEATED_OPERATIONS or _is_exact(op):
        return []
    returned = returned_or_written(call.operation, call.args, out)
    results = prepare_rounded_results(requested_results(call.name, call.args, returned))
    if not results:
        return []
    args, kwargs = initial_arguments
    reference = Float64Reference(call.operation, args, kwargs, len(results))
    term_counts = count_terms(call.name, args, reference, results)
    term_sums = _sum_absolute_terms(call.name, reference)
    roundings = []
    for i, (result, n_terms) in enumerate(zip(results, term_counts, strict=True)):
        finfo = torch.finfo(result.dtype)
        unit_roundoff = finfo.eps / 2
        rounding = ResultRounding(
            relative_error=math.sqrt(max(1.0, n_terms)) * unit_roundoff,
            term_sums=None if term_sums is None else term_sums[i],
            has_floor=call.name not in CORRECTLY_ROUNDED_OPERATIONS,
            smallest_number=finfo.smallest_normal * finfo.eps,
        )
        roundings.append(rounding)
    return roundings


def _is_exact(op: Operation) -> bool:
    """Return whether an operation returns exact results, as one that only moves numbers does.

    A product without an error does not count as exact. It may have been exact by chance, for
    example because its factors are small integers.
    """
    return op.error == 0.0 and op.name not in PRODUCT_OPERANDS


def _sum_absolute_terms(name: str, reference: Float64Reference) -> list[Tensor] | None:
    """Sum the absolute values of the terms of each number of each result of a product or sum.

    Returns None for other operations.
    """
    if name not in PRODUCT_OPERANDS and name not in SUMS:
        return None
    # The operation itself sums the absolute values if it is given absolute values.
    return reference(torch.abs)
