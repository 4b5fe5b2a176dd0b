"""A linear map as a list of instructions on k tangents: its optimisation and its application."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpulab.engines._graphs import Graph, GraphPool
from gpulab.engines.hessian_forward._combinations import Combination
from gpulab.engines.hessian_forward._convolutions import (
    BiasGradient,
    Constants,
    Convolution,
    number_constants,
)

# Convolutions that are joined into one. A larger number would save little time, and would keep more
# tangents in memory.
MAX_FUSED_CONVS = 8
LIVE_TANGENT_RATIO = 5  # about one in five of a map's tangents is in memory at the same time
ResultVariables = Sequence[int | None]  # the variable of each result; None means zero


@dataclass
class Instruction:
    """One instruction, `outputs = function(*inputs)`, where variables are given by their numbers.

    The value of a variable has a first dimension of size k, for k tangents. `last_uses` are the
    variables that no later instruction needs, so that their memory can be released.
    """

    # A function of tangents, such as a `Combination`, a `Convolution` or a `BiasGradient`. It is
    # `Any` because mypy does not narrow it for instructions that were selected by the class of
    # their function.
    function: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last_uses: tuple[int, ...] = ()

    @property
    def is_addition(self) -> bool:
        """Whether the function is a plain sum of tensors of the same shape."""
        return isinstance(self.function, Combination) and self.function.is_plain_sum

    @property
    def is_batch_sum(self) -> bool:
        """Whether the function is the gradient of a weight or bias, which sums over a batch."""
        return (
            isinstance(self.function, BiasGradient)
            or getattr(self.function, "target", "") == "weight"
        )


class LinearMap:
    """A linear map, given by instructions that compute `results` from the variables 0, 1, ….

    On a GPU a map consists of thousands of small kernels, and launching them takes longer than
    running them. The first call with a number k of tangents therefore captures the map in a CUDA
    graph, and later calls with the same k replay it.

    Args:
        instructions: The instructions, in an order in which they can be run.
        results: The variable of each result; there is one for each input. None means zero.
        size: The bytes of one tangent of every variable.

    Attributes:
        bytes: The approximate peak memory in bytes of a call with k = 1.
    """

    def __init__(
        self, instructions: Sequence[Instruction], results: ResultVariables, size: int
    ) -> None:
        self.instructions = optimize(instructions, results)
        self.results = results
        self.bytes = size // LIVE_TANGENT_RATIO
        self.graphs: dict[int, Graph] = {}
        self.pool: GraphPool | None = None  # the memory pool that all graphs of this map share

    def __call__(self, *tangents: Tensor) -> list[Tensor]:
        """Apply the map to tensors (k, …); on a GPU, the next call overwrites the results."""
        if not tangents[0].is_cuda:
            return self._replay(*tangents)
        k = len(tangents[0])
        if k not in self.graphs:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.graphs[k] = Graph(self._replay, tangents, pool=self.pool)
        return self.graphs[k](*tangents)

    def _replay(self, *tangents: Tensor) -> list[Tensor]:
        """Run the instructions one after the other, and release each value after its last use."""
        values: dict[int, Tensor] = dict(enumerate(tangents))  # by the number of the variable
        for instruction in self.instructions:
            inputs = [values[number] for number in instruction.inputs]
            results = instruction.function(*inputs)
            outputs = [results] if isinstance(results, Tensor) else results
            values.update(zip(instruction.outputs, outputs, strict=True))
            for number in instruction.last_uses:
                del values[number]
        return [
            torch.zeros_like(tangent) if number is None else values[number]
            for tangent, number in zip(tangents, self.results, strict=True)
        ]


def optimize(instructions: Sequence[Instruction], results: ResultVariables) -> list[Instruction]:
    """Return fewer and larger instructions that compute the same results."""
    constants: Constants = {}  # shared by the first two steps, which concatenate the same constants
    # The order within a batch depends on these numbers, so they come first: see `_batch_order`.
    functions = [instruction.function for instruction in instructions]
    number_constants([function for function in functions if isinstance(function, Convolution)])
    instructions = batch_by_weight(instructions, constants)
    instructions = merge_weight_gradients(instructions, results, constants)
    return fuse(instructions, results)


def remove_unused(
    instructions: Sequence[Instruction], results: ResultVariables
) -> list[Instruction]:
    """Return the instructions that the results depend on, with updated `last_uses`."""
    # Instructions are visited from the last to the first. These are the variables that the results
    # need, or the instructions visited so far.
    needed_variables = set(results)
    used_instructions = []
    for instruction in reversed(instructions):
        if not needed_variables.isdisjoint(instruction.outputs):
            # All variables of the instruction, each of them once.
            variables = dict.fromkeys((*instruction.inputs, *instruction.outputs))
            last_uses = tuple(number for number in variables if number not in needed_variables)
            used_instructions.append(replace(instruction, last_uses=last_uses))
            needed_variables.update(variables)
    return used_instructions[::-1]


def batch_by_weight(instructions: Sequence[Instruction], constants: Constants) -> list[Instruction]:
    """Join convolutions with the same tangent of a weight, such as those of several time steps.

    The joined convolution takes the place of the first one, and its result is split into the
    results of all of them.
    """
    by_weight = [
        instruction
        for instruction in instructions
        if isinstance(instruction.function, Convolution) and instruction.function.has_weight_tangent
    ]
    # `id` of an instruction -> the instructions that replace it
    replacements: dict[int, list[Instruction]] = {}
    for batch in _batches(
        ((instruction.function.key, instruction.inputs), instruction) for instruction in by_weight
    ):
        function = Convolution.join([member.function for member in batch], constants)
        function.chunk_count = len(batch)
        outputs = tuple(member.outputs[0] for member in batch)
        replacements |= {id(member): [] for member in batch}
        # The first member is replaced by the joined convolution, the others by nothing.
        replacements[id(batch[0])] = [Instruction(function, batch[0].inputs, outputs)]
    return [
        replacement
        for instruction in instructions
        for replacement in replacements.get(id(instruction), [instruction])
    ]


def merge_weight_gradients(
    instructions: Sequence[Instruction], results: ResultVariables, constants: Constants
) -> list[Instruction]:
    """Merge gradients of one weight that are added up into one gradient of a larger batch.

    A gradient of a weight or bias sums over a batch. The sum of several gradients, such as those of
    several time steps, is therefore equal to one gradient of the concatenated batches.
    """
    producers = {
        number: instruction for instruction in instructions for number in instruction.outputs
    }
    positions = {
        number: index
        for index, instruction in enumerate(instructions)
        for number in instruction.outputs
    }
    use_counts = _count_uses(instructions, results)
    used_once = {
        number for number, count in use_counts.items() if count == 1 and number in producers
    }
    # Sums that are used only as an addend of another sum. Their addends are added there directly.
    inner_variables = {
        number
        for instruction in instructions
        if instruction.is_addition
        for number in instruction.inputs
        if number in used_once and producers[number].is_addition
    }
    next_variable = max(producers, default=0) + 1  # the number of the next new variable
    # Each list holds an instruction and the new ones that are inserted after it.
    rewritten = [[instruction] for instruction in instructions]
    concatenated: dict[tuple[int, ...], int] = {}  # variables -> the variable of their batch
    # A root is a sum that is not part of another sum.
    for index, root in enumerate(instructions):
        if not root.is_addition or root.outputs[0] in inner_variables:
            continue
        addends = _flatten_sum(root, inner_variables, producers)
        gradients = [
            producers[number]
            for number in addends
            if number in used_once and producers[number].is_batch_sum
        ]
        for batch in _batches((instruction.function.key, instruction) for instruction in gradients):
            inputs = tuple(member.inputs[0] for member in batch)
            # New instructions are inserted where the last of their inputs has been computed. Inputs
            # of the map have no position, because no instruction computes them.
            successors = rewritten[max(positions.get(number, 0) for number in inputs)]
            if inputs not in concatenated:
                successors.append(Instruction(_concatenate, inputs, (next_variable,)))
                concatenated[inputs] = next_variable
                next_variable += 1
            # One gradient of the concatenated batches replaces the gradients of all members.
            function = batch[0].function.join([member.function for member in batch], constants)
            successors.append(Instruction(function, (concatenated[inputs],), (next_variable,)))
            replaced = {member.outputs[0] for member in batch}
            addends = [*(number for number in addends if number not in replaced), next_variable]
            next_variable += 1
        function = Combination([None] * len(addends), root.function.shape)
        rewritten[index][0] = Instruction(function, tuple(addends), root.outputs)
    return [instruction for group in rewritten for instruction in group]


def _flatten_sum(
    root: Instruction, inner_variables: set[int], producers: dict[int, Instruction]
) -> list[int]:
    """Return the addends of a sum, where addends that are themselves sums are replaced by theirs.

    Args:
        root: The sum.
        inner_variables: The variables to be replaced.
        producers: The instruction that computes each variable.
    """
    addends: list[int] = []
    pending = [root]
    while pending:
        for number in pending.pop().inputs:
            if number in inner_variables:
                pending.append(producers[number])
            else:
                addends.append(number)
    return addends


def _concatenate(*tangents: Tensor) -> Tensor:
    """Concatenate tangents (k, B, …) along the batch, the second dimension."""
    return torch.cat(tangents, 1)


def _batches(keyed: Iterable[tuple[object, Instruction]]) -> list[list[Instruction]]:
    """Group instructions with the same key into batches of 2 to `MAX_FUSED_CONVS`.

    `batch_by_weight` and `merge_weight_gradients` both use this order, so that their batches
    concatenate the same constants, which are then shared. An instruction without a partner is left
    out.
    """
    groups: dict[object, list[Instruction]] = defaultdict(list)
    for key, instruction in keyed:
        groups[key].append(instruction)
    batches = []
    for group in groups.values():
        ordered = sorted(group, key=_batch_order)
        # The remainder is the first batch, before the full ones.
        remainder = len(ordered) % MAX_FUSED_CONVS
        starts = range(remainder, len(ordered), MAX_FUSED_CONVS)
        batches.append(ordered[:remainder])
        batches += [ordered[start : start + MAX_FUSED_CONVS] for start in starts]
    return [batch for batch in batches if len(batch) > 1]


def _batch_order(instruction: Instruction) -> int:
    """Return the position of an instruction in a batch.

    Convolutions are ordered by their constants, which the forward pass uses in the order of the
    time steps. Gradients of biases have no constants. The backward pass computes their inputs from
    the last step to the first, so the negative number of the input gives the same order.
    """
    return getattr(instruction.function, "constant_number", -instruction.inputs[0])


def fuse(instructions: Sequence[Instruction], results: ResultVariables) -> list[Instruction]:
    """Fuse linear combinations whose tangents are themselves linear combinations.

    An inner combination is fused only if its result is used once. It is then no longer needed, and
    its instruction is removed.
    """
    use_counts = _count_uses(instructions, results)
    # number of a variable that is used once -> the combination that computes it
    inner_combinations: dict[int, Instruction] = {}
    rewritten = []
    for instruction in instructions:
        if not isinstance(instruction.function, Combination):
            rewritten.append(instruction)
            continue
        fused = _fuse_inputs(instruction, inner_combinations)
        rewritten.append(fused)
        (output,) = fused.outputs
        if use_counts[output] == 1:
            inner_combinations[output] = fused
    return remove_unused(rewritten, results)


def _fuse_inputs(
    instruction: Instruction, inner_combinations: dict[int, Instruction]
) -> Instruction:
    """Return a linear combination that also computes those of its inputs that can be fused.

    Args:
        instruction: The linear combination.
        inner_combinations: The combinations that may be fused, by the variable that they compute.
    """
    outer = instruction.function
    inputs = list(instruction.inputs)
    position = 0
    while position < len(inputs):
        inner = inner_combinations.get(inputs[position])
        combined = None if inner is None else outer.fuse(position, inner.function)
        if inner is None or combined is None:
            position += 1
            continue
        # The inputs of the inner combination take the place of its result. They need no further
        # look: the inner combination was fused when its own turn came.
        outer = combined
        inputs[position : position + 1] = inner.inputs
        position += len(inner.inputs)
    return Instruction(outer, tuple(inputs), instruction.outputs)


def _count_uses(instructions: Sequence[Instruction], results: ResultVariables) -> Counter[int]:
    """Count how often each variable is used, as an input of an instruction or as a result."""
    inputs = [number for instruction in instructions for number in instruction.inputs]
    return Counter(inputs + [number for number in results if number is not None])
