"""A linear map as a list of steps, each of which applies to k tangents at once, and how such a list is optimised."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpulab.saddles._forward.combinations import Combination
from gpulab.saddles._forward.convolutions import Batches, BiasGradient, Convolution, number_constants

TOGETHER = 8  # more at a time would be little faster, and keep more tangents waiting
Results = Sequence[int | None]


@dataclass
class Step:
    """`outputs` are what `function` makes of `inputs`: numbers of variables, each with a first dimension of k.

    `last` are those that no later step needs.
    """

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


@dataclass
class LinearMap:
    """Steps from the variables 0, 1, … to `results`, one for each of them and of its shape; None stands for zero.

    `bytes` is the size of all variables for k = 1; only some of them are there at any one time.
    """

    steps: list[Step]
    results: Results
    bytes: int

    def __call__(self, *tangents: Tensor) -> list[Tensor]:
        """Apply the map to tensors of shape (k, …)."""
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

    def optimized(self) -> LinearMap:
        """The same map in fewer and larger steps."""
        batches: Batches = {}
        steps = self.steps
        number_constants([step.function for step in steps if isinstance(step.function, Convolution)])
        steps = batched_by_weight(steps, batches)
        steps = summed_in_one_batch(steps, self.results, batches)
        steps = fused(steps, self.results)
        return LinearMap(with_last_uses(steps, self.results), self.results, self.bytes)


def without_the_unused(steps: Sequence[Step], results: Results) -> list[Step]:
    """Only the steps that some result depends on."""
    needed, used = set(results), []
    for step in reversed(steps):
        if not needed.isdisjoint(step.outputs):
            needed.update(step.inputs)
            used.append(step)
    return used[::-1]


def with_last_uses(steps: Sequence[Step], results: Results) -> list[Step]:
    """The same steps, which let go of what no later one needs."""
    needed, marked = set(results), []
    for step in reversed(steps):
        touched = dict.fromkeys((*step.inputs, *step.outputs))
        marked.append(replace(step, last=tuple(number for number in touched if number not in needed)))
        needed.update(touched)
    return marked[::-1]


def batched_by_weight(steps: Sequence[Step], batches: Batches) -> list[Step]:
    """Convolutions of several constants with one and the same tangent, such as those of eight time steps, in one."""
    groups: dict[object, list[Step]] = defaultdict(list)
    for step in steps:
        if isinstance(step.function, Convolution) and step.function.weight_varies:
            groups[(step.function.key, step.inputs)].append(step)
    replacements: dict[int, list[Step]] = {}  # identity of a step -> what it becomes
    for chunk in [chunk for group in groups.values() for chunk in _chunks(group) if len(chunk) > 1]:
        function = Convolution.joined([member.function for member in chunk], batches)
        function.pieces = len(chunk)
        replacements |= {id(member): [] for member in chunk}
        replacements[id(chunk[0])] = [Step(function, chunk[0].inputs, tuple(member.outputs[0] for member in chunk))]
    return [new for step in steps for new in replacements.get(id(step), [step])]


def summed_in_one_batch(steps: Sequence[Step], results: Results, batches: Batches) -> list[Step]:
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
        groups: dict[object, list[Step]] = defaultdict(list)
        for number in addends:
            if number in once and made_by[number].sums:
                groups[made_by[number].function.key].append(made_by[number])
        for chunk in [chunk for group in groups.values() for chunk in _chunks(group) if len(chunk) > 1]:
            inputs = tuple(member.inputs[0] for member in chunk)
            place = max(when.get(number, 0) for number in inputs)
            if inputs not in concatenated:
                rewritten[place].append(Step(_concatenate, inputs, (fresh,)))
                concatenated[inputs], fresh = fresh, fresh + 1
            function = chunk[0].function.joined([member.function for member in chunk], batches)
            rewritten[place].append(Step(function, (concatenated[inputs],), (fresh,)))
            members = {member.outputs[0] for member in chunk}
            addends = [*(number for number in addends if number not in members), fresh]
            fresh += 1
        rewritten[index][0] = Step(
            Combination([None] * len(addends), root.function.shape), tuple(addends), root.outputs
        )
    return [step for group in rewritten for step in group]


def _concatenate(*tangents: Tensor) -> Tensor:
    """One batch of several."""
    return torch.cat(tangents, 1)


def _chunks(group: Sequence[Step]) -> list[list[Step]]:
    """Eight at a time, in an order that forward and backward sweeps agree on, so that they can share constants."""
    ordered = sorted(group, key=lambda step: getattr(step.function, "order", -step.inputs[0]))
    odd = len(ordered) % TOGETHER
    starts = range(odd, len(ordered), TOGETHER)
    return ([ordered[:odd]] if odd else []) + [ordered[start : start + TOGETHER] for start in starts]


def fused(steps: Sequence[Step], results: Results) -> list[Step]:
    """Combinations of combinations as one, where nothing else needs the inner one."""
    uses = _uses(steps, results)
    combinations: dict[int, Step] = {}  # by what they make
    changed = []
    for step in steps:
        if isinstance(step.function, Combination):
            outer, inputs, place = step.function, list(step.inputs), 0
            while place < len(inputs):
                inner = combinations.get(inputs[place]) if uses[inputs[place]] == 1 else None
                both = outer.fused(place, inner.function) if inner is not None else None
                if inner is not None and both is not None:
                    outer = both
                    inputs[place : place + 1] = inner.inputs
                    place += len(inner.inputs)
                else:
                    place += 1
            step = Step(outer, tuple(inputs), step.outputs)
            combinations[step.outputs[0]] = step
        changed.append(step)
    return without_the_unused(changed, results)


def _uses(steps: Sequence[Step], results: Results) -> Counter[int]:
    return Counter([number for step in steps for number in step.inputs] + [n for n in results if n is not None])
