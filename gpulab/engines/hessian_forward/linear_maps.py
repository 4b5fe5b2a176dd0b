"""A linear map as a list of steps, each of which applies to k tangents at once; how it is optimised, and replayed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpulab.engines.graphs import Graph, GraphPool
from gpulab.engines.hessian_forward.combinations import Combination
from gpulab.engines.hessian_forward.convolutions import BiasGradient, Constants, Convolution, number_constants

TOGETHER = 8  # more at a time would be little faster, and keep more tangents waiting
LIVE = 5  # of the tangents of a map, about one in five is there at a time
Results = Sequence[int | None]


@dataclass
class Step:
    """`outputs` are what `function` makes of `inputs`: numbers of variables, each with a first dimension of k.

    `last` are those that no later step needs.
    """

    # A function of tangents, such as a `Combination`, a `Convolution` or a `BiasGradient`. mypy does not see which of
    # them the steps have that were selected by its class.
    function: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last: tuple[int, ...] = ()

    @property
    def adds(self) -> bool:
        """Whether it is a plain sum of tensors of one shape."""
        return isinstance(self.function, Combination) and self.function.plain

    @property
    def sums(self) -> bool:
        """Whether it is a gradient that sums over a batch."""
        return isinstance(self.function, BiasGradient) or getattr(self.function, "which", "") == "weight"


class LinearMap:
    """Steps from the variables 0, 1, … to `results`, one for each of them and of its shape; None stands for zero.

    `bytes` is about what it takes at a time for k = 1, where all variables together take `size`. On a GPU a map is
    thousands of small kernels, and launching them takes longer than running them. So it is captured in a CUDA graph,
    one for each k, at the first call with that k.
    """

    def __init__(self, steps: Sequence[Step], results: Results, size: int) -> None:
        self.steps, self.results, self.bytes = optimized(steps, results), results, size // LIVE
        self.graphs: dict[int, Graph] = {}
        self.pool: GraphPool | None = None  # of the memory that they share

    def __call__(self, *tangents: Tensor) -> list[Tensor]:
        """The map of tensors of shape (k, …); on a GPU, the next call overwrites what it returns."""
        if not tangents[0].is_cuda:
            return self._replay(*tangents)
        k = len(tangents[0])
        if k not in self.graphs:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.graphs[k] = Graph(self._replay, tangents, pool=self.pool)
        return self.graphs[k](*tangents)

    def _replay(self, *tangents: Tensor) -> list[Tensor]:
        values: dict[int, Tensor] = dict(enumerate(tangents))
        for step in self.steps:
            outputs = step.function(*[values[number] for number in step.inputs])
            values.update(zip(step.outputs, [outputs] if isinstance(outputs, Tensor) else outputs, strict=True))
            for number in step.last:
                del values[number]
        return [
            torch.zeros_like(tangent) if number is None else values[number]
            for tangent, number in zip(tangents, self.results, strict=True)
        ]


def optimized(steps: Sequence[Step], results: Results) -> list[Step]:
    """Fewer and larger steps that do the same."""
    constants: Constants = {}
    number_constants([step.function for step in steps if isinstance(step.function, Convolution)])
    steps = batched_by_weight(steps, constants)
    steps = summed_in_one_batch(steps, results, constants)
    return fused(steps, results)


def without_the_unused(steps: Sequence[Step], results: Results) -> list[Step]:
    """Only the steps that some result depends on, each of which lets go of what no later one needs."""
    needed, used = set(results), []
    for step in reversed(steps):
        if not needed.isdisjoint(step.outputs):
            variables = dict.fromkeys((*step.inputs, *step.outputs))
            used.append(replace(step, last=tuple(number for number in variables if number not in needed)))
            needed.update(variables)
    return used[::-1]


def batched_by_weight(steps: Sequence[Step], constants: Constants) -> list[Step]:
    """Convolutions of several constants with one and the same tangent, such as those of eight time steps, in one."""
    by_weight = [step for step in steps if isinstance(step.function, Convolution) and step.function.weight_varies]
    replacements: dict[int, list[Step]] = {}  # identity of a step -> what it becomes
    for batch in _batches(((step.function.key, step.inputs), step) for step in by_weight):
        function = Convolution.joined([member.function for member in batch], constants)
        function.pieces = len(batch)
        replacements |= {id(member): [] for member in batch}
        replacements[id(batch[0])] = [Step(function, batch[0].inputs, tuple(member.outputs[0] for member in batch))]
    return [new for step in steps for new in replacements.get(id(step), [step])]


def summed_in_one_batch(steps: Sequence[Step], results: Results, constants: Constants) -> list[Step]:
    """Gradients of one weight that are added up, such as those of eight time steps, as one gradient of one batch."""
    made_by = {number: step for step in steps for number in step.outputs}
    when = {number: index for index, step in enumerate(steps) for number in step.outputs}
    once = {number for number, uses in _uses(steps, results).items() if uses == 1 and number in made_by}
    inner = {n for step in steps if step.adds for n in step.inputs if n in once and made_by[n].adds}
    fresh = max(made_by, default=0) + 1
    rewritten = [[step] for step in steps]  # each with the new steps that can follow it
    concatenated: dict[tuple[int, ...], int] = {}
    for index, root in enumerate(steps):
        if not root.adds or root.outputs[0] in inner:
            continue
        addends, waiting = [], [root]
        while waiting:
            for number in waiting.pop().inputs:
                if number in inner:
                    waiting.append(made_by[number])
                else:
                    addends.append(number)
        gradients = [made_by[number] for number in addends if number in once and made_by[number].sums]
        for batch in _batches((step.function.key, step) for step in gradients):
            inputs = tuple(member.inputs[0] for member in batch)
            following = rewritten[max(when.get(number, 0) for number in inputs)]
            if inputs not in concatenated:
                following.append(Step(_concatenate, inputs, (fresh,)))
                concatenated[inputs], fresh = fresh, fresh + 1
            function = batch[0].function.joined([member.function for member in batch], constants)
            following.append(Step(function, (concatenated[inputs],), (fresh,)))
            replaced = {member.outputs[0] for member in batch}
            addends = [*(number for number in addends if number not in replaced), fresh]
            fresh += 1
        function = Combination([None] * len(addends), root.function.shape)
        rewritten[index][0] = Step(function, tuple(addends), root.outputs)
    return [step for group in rewritten for step in group]


def _concatenate(*tangents: Tensor) -> Tensor:
    """One batch of several."""
    return torch.cat(tangents, 1)


def _batches(keyed: Iterable[tuple[object, Step]]) -> list[list[Step]]:
    """Steps of one key, two to eight at a time, in an order in which both sweeps can share constants."""
    groups: dict[object, list[Step]] = defaultdict(list)
    for key, step in keyed:
        groups[key].append(step)
    batches = []
    for group in groups.values():
        ordered = sorted(group, key=lambda step: getattr(step.function, "order", -step.inputs[0]))
        starts = range(len(ordered) % TOGETHER, len(ordered), TOGETHER)
        batches += [ordered[: starts.start], *[ordered[start : start + TOGETHER] for start in starts]]
    return [batch for batch in batches if len(batch) > 1]


def fused(steps: Sequence[Step], results: Results) -> list[Step]:
    """Combinations of combinations as one, where nothing else needs the inner one."""
    uses = _uses(steps, results)
    combinations: dict[int, Step] = {}  # by what they make
    changed = []
    for step in steps:
        if isinstance(step.function, Combination):
            outer, inputs, position = step.function, list(step.inputs), 0
            while position < len(inputs):
                inner = combinations.get(inputs[position]) if uses[inputs[position]] == 1 else None
                combined = outer.fused(position, inner.function) if inner else None
                if inner and combined:
                    outer, inputs[position : position + 1] = combined, inner.inputs
                position += len(inner.inputs) if inner and combined else 1
            step = Step(outer, tuple(inputs), step.outputs)
            combinations[step.outputs[0]] = step
        changed.append(step)
    return without_the_unused(changed, results)


def _uses(steps: Sequence[Step], results: Results) -> Counter[int]:
    return Counter([number for step in steps for number in step.inputs] + [n for n in results if n is not None])
