"""A linear map as a list of instructions on k tangents: how it is optimised and replayed."""

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

MAX_FUSED_CONVS = 8  # more at a time would be little faster, and keep more tangents in memory
LIVE_TANGENT_RATIO = 5  # about one in five of a map's tangents is in memory at a time
ResultVariables = Sequence[int | None]


@dataclass
class Instruction:
    """`outputs = function(inputs)`: numbers of variables, each with a first dimension of size k.

    `last_uses` are those that no later instruction needs.
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
        """Whether it is a plain sum of tensors of one shape."""
        return isinstance(self.function, Combination) and self.function.is_plain_sum

    @property
    def is_batch_sum(self) -> bool:
        """Whether it is a gradient that sums over a batch."""
        return (
            isinstance(self.function, BiasGradient)
            or getattr(self.function, "target", "") == "weight"
        )


class LinearMap:
    """Instructions from the variables 0, 1, … to `results`, one for each; None means zero.

    `bytes` is about what it takes at a time for k = 1, where all variables together take `size`. On
    a GPU a map is thousands of small kernels, and launching them takes longer than running them. So
    it is captured in a CUDA graph, one for each k, at the first call with that k.
    """

    def __init__(
        self, instructions: Sequence[Instruction], results: ResultVariables, size: int
    ) -> None:
        self.instructions = optimize(instructions, results)
        self.results = results
        self.bytes = size // LIVE_TANGENT_RATIO
        self.graphs: dict[int, Graph] = {}
        self.pool: GraphPool | None = None  # of the memory that they share

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
        values: dict[int, Tensor] = dict(enumerate(tangents))
        for instruction in self.instructions:
            outputs = instruction.function(*[values[number] for number in instruction.inputs])
            values.update(
                zip(
                    instruction.outputs,
                    [outputs] if isinstance(outputs, Tensor) else outputs,
                    strict=True,
                )
            )
            for number in instruction.last_uses:
                del values[number]
        return [
            torch.zeros_like(tangent) if number is None else values[number]
            for tangent, number in zip(tangents, self.results, strict=True)
        ]


def optimize(instructions: Sequence[Instruction], results: ResultVariables) -> list[Instruction]:
    """Fewer and larger instructions that do the same."""
    constants: Constants = {}
    functions = [instruction.function for instruction in instructions]
    number_constants([function for function in functions if isinstance(function, Convolution)])
    instructions = batch_by_weight(instructions, constants)
    instructions = merge_weight_gradients(instructions, results, constants)
    return fuse(instructions, results)


def remove_unused(
    instructions: Sequence[Instruction], results: ResultVariables
) -> list[Instruction]:
    """Keep only the instructions that results depend on; each frees what is not needed later."""
    needed_variables = set(results)
    used_instructions = []
    for instruction in reversed(instructions):
        if not needed_variables.isdisjoint(instruction.outputs):
            variables = dict.fromkeys((*instruction.inputs, *instruction.outputs))
            last_uses = tuple(number for number in variables if number not in needed_variables)
            used_instructions.append(replace(instruction, last_uses=last_uses))
            needed_variables.update(variables)
    return used_instructions[::-1]


def batch_by_weight(instructions: Sequence[Instruction], constants: Constants) -> list[Instruction]:
    """Batch convolutions of one tangent with several constants, such as those of time steps."""
    by_weight = [
        instruction
        for instruction in instructions
        if isinstance(instruction.function, Convolution) and instruction.function.has_weight_tangent
    ]
    replacements: dict[int, list[Instruction]] = {}  # identity of an instruction -> what it becomes
    for batch in _batches(
        ((instruction.function.key, instruction.inputs), instruction) for instruction in by_weight
    ):
        function = Convolution.join([member.function for member in batch], constants)
        function.chunk_count = len(batch)
        replacements |= {id(member): [] for member in batch}
        outputs = tuple(member.outputs[0] for member in batch)
        replacements[id(batch[0])] = [Instruction(function, batch[0].inputs, outputs)]
    return [
        replacement
        for instruction in instructions
        for replacement in replacements.get(id(instruction), [instruction])
    ]


def merge_weight_gradients(
    instructions: Sequence[Instruction], results: ResultVariables, constants: Constants
) -> list[Instruction]:
    """Merge gradients of one weight that are added up into one gradient of a larger batch."""
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
    inner_variables = {
        number
        for instruction in instructions
        if instruction.is_addition
        for number in instruction.inputs
        if number in used_once and producers[number].is_addition
    }
    next_variable = max(producers, default=0) + 1
    # Each list is an instruction and the new ones that are inserted after it.
    rewritten = [[instruction] for instruction in instructions]
    concatenated: dict[tuple[int, ...], int] = {}
    for index, root in enumerate(instructions):
        if not root.is_addition or root.outputs[0] in inner_variables:
            continue
        addends: list[int] = []
        pending = [root]
        while pending:
            for number in pending.pop().inputs:
                if number in inner_variables:
                    pending.append(producers[number])
                else:
                    addends.append(number)
        gradients = [
            producers[number]
            for number in addends
            if number in used_once and producers[number].is_batch_sum
        ]
        for batch in _batches((instruction.function.key, instruction) for instruction in gradients):
            inputs = tuple(member.inputs[0] for member in batch)
            successors = rewritten[max(positions.get(number, 0) for number in inputs)]
            if inputs not in concatenated:
                successors.append(Instruction(_concatenate, inputs, (next_variable,)))
                concatenated[inputs] = next_variable
                next_variable += 1
            function = batch[0].function.join([member.function for member in batch], constants)
            successors.append(Instruction(function, (concatenated[inputs],), (next_variable,)))
            replaced = {member.outputs[0] for member in batch}
            addends = [*(number for number in addends if number not in replaced), next_variable]
            next_variable += 1
        function = Combination([None] * len(addends), root.function.shape)
        rewritten[index][0] = Instruction(function, tuple(addends), root.outputs)
    return [instruction for group in rewritten for instruction in group]


def _concatenate(*tangents: Tensor) -> Tensor:
    """One batch of several."""
    return torch.cat(tangents, 1)


def _batches(keyed: Iterable[tuple[object, Instruction]]) -> list[list[Instruction]]:
    """Group instructions of one key by two to eight, so that both sweeps can share constants."""
    groups: dict[object, list[Instruction]] = defaultdict(list)
    for key, instruction in keyed:
        groups[key].append(instruction)
    batches = []
    for group in groups.values():
        ordered = sorted(group, key=_batch_order)
        starts = range(len(ordered) % MAX_FUSED_CONVS, len(ordered), MAX_FUSED_CONVS)
        batches += [
            ordered[: starts.start],
            *[ordered[start : start + MAX_FUSED_CONVS] for start in starts],
        ]
    return [batch for batch in batches if len(batch) > 1]


def _batch_order(instruction: Instruction) -> int:
    return getattr(instruction.function, "constant_number", -instruction.inputs[0])


def fuse(instructions: Sequence[Instruction], results: ResultVariables) -> list[Instruction]:
    """Fuse combinations of combinations, if nothing else needs the inner one."""
    use_counts = _count_uses(instructions, results)
    combinations: dict[int, Instruction] = {}  # by the variable that they compute
    rewritten = []
    for instruction in instructions:
        if isinstance(instruction.function, Combination):
            outer = instruction.function
            inputs = list(instruction.inputs)
            position = 0
            while position < len(inputs):
                inner = (
                    combinations.get(inputs[position])
                    if use_counts[inputs[position]] == 1
                    else None
                )
                combined = outer.fuse(position, inner.function) if inner else None
                if inner and combined:
                    outer = combined
                    inputs[position : position + 1] = inner.inputs
                    position += len(inner.inputs)
                else:
                    position += 1
            instruction = Instruction(outer, tuple(inputs), instruction.outputs)
            combinations[instruction.outputs[0]] = instruction
        rewritten.append(instruction)
    return remove_unused(rewritten, results)


def _count_uses(instructions: Sequence[Instruction], results: ResultVariables) -> Counter[int]:
    inputs = [number for instruction in instructions for number in instruction.inputs]
    return Counter(inputs + [number for number in results if number is not None])
