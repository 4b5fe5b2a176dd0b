"""A linear map as a list of steps, each of which applies to k tensors at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpulab.saddles._forward.combinations import Combination
from gpulab.saddles._forward.convolutions import BiasGradient, Convolution, Known, number_constants

TOGETHER = 8  # more at a time would be little faster, and keep more tangents waiting
Maps = Callable[..., Tensor | Sequence[Tensor]]


@dataclass
class Step:
    """`outputs` are what `function` makes of `inputs`: numbers of variables, each with a first dimension of k."""

    function: Maps
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()

    @property
    def adds(self) -> bool:
        """Whether it is a plain sum of tensors of one shape."""
        return isinstance(self.function, Combination) and self.function.adds

    @property
    def sums(self) -> bool:
        """Whether it is a gradient that sums over a batch."""
        return isinstance(self.function, BiasGradient) or (
            isinstance(self.function, Convolution) and self.function.which == "weight"
        )


@dataclass
class Program:
    """Steps from the variables 0 … `inputs` − 1 to `results`, where None stands for zero.

    `bytes` is the size of all variables for k = 1; only some of them are there at any one time.
    """

    inputs: int
    steps: list[Step]
    results: list[int | None]
    bytes: int

    def __call__(self, *tensors: Tensor) -> list[Tensor | None]:
        """Apply the map to tensors of shape (k, …)."""
        values: dict[int, Tensor] = dict(enumerate(tensors))
        for step in self.steps:
            made = step.function(*[values[number] for number in step.inputs])
            values.update(zip(step.outputs, [made] if isinstance(made, Tensor) else made, strict=True))
            for number in step.frees:
                del values[number]
        return [None if number is None else values[number] for number in self.results]

    def simplified(self, dtype: torch.dtype) -> Program:
        """The same map in fewer and larger steps."""
        steps = without_the_unused(self.steps, self.results)
        number_constants([step.function for step in steps if isinstance(step.function, Convolution)])
        known: Known = {}
        steps = joined_by_weight(steps, known)
        steps = summed_in_one_batch(steps, self.results, known)
        steps = combined(steps, self.results)
        steps = freeing(without_the_unused(steps, self.results), self.results)
        masks: dict[int, tuple[Tensor, Tensor]] = {}
        for step in steps:
            if isinstance(step.function, Combination):
                step.function.settle(dtype, masks)
        return Program(self.inputs, steps, self.results, self.bytes)


def without_the_unused(steps: list[Step], results: Iterable[int | None]) -> list[Step]:
    """Only the steps that some result depends on."""
    wanted, kept = set(results), []
    for step in reversed(steps):
        if not wanted.isdisjoint(step.outputs):
            wanted.update(step.inputs)
            kept.append(step)
    return kept[::-1]


def freeing(steps: list[Step], results: Iterable[int | None]) -> list[Step]:
    """The same steps, which let go of what no later one needs."""
    needed, marked = set(results), []
    for step in reversed(steps):
        touched = dict.fromkeys((*step.inputs, *step.outputs))
        marked.append(replace(step, frees=tuple(number for number in touched if number not in needed)))
        needed.update(touched)
    return marked[::-1]


def joined_by_weight(steps: list[Step], known: Known) -> list[Step]:
    """Convolutions of several constants with one and the same tangent, such as those of eight time steps, in one."""
    groups: dict[object, list[Step]] = defaultdict(list)
    for step in steps:
        if isinstance(step.function, Convolution) and step.function.weight_varies:
            groups[(step.function.key, step.inputs)].append(step)
    chunks = [chunk for group in groups.values() for chunk in _chunks(group)]
    firsts = {id(chunk[0]): chunk for chunk in chunks if len(chunk) > 1}
    others = {id(step) for chunk in firsts.values() for step in chunk[1:]}
    made = []
    for step in steps:
        if id(step) in firsts:
            chunk = firsts[id(step)]
            function = Convolution.joined([member.function for member in chunk], known)  # type: ignore[misc]
            function.pieces = len(chunk)
            made.append(Step(function, step.inputs, tuple(member.outputs[0] for member in chunk)))
        elif id(step) not in others:
            made.append(step)
    return made


def summed_in_one_batch(steps: list[Step], results: Iterable[int | None], known: Known) -> list[Step]:
    """Gradients of one weight that are added up, such as those of eight time steps, as one gradient of one batch."""
    made_by = {number: step for step in steps for number in step.outputs}
    when = {number: index for index, step in enumerate(steps) for number in step.outputs}
    uses = _uses(steps, results)
    once = {number for number in made_by if uses[number] == 1}
    inner = {n for step in steps if step.adds for n in step.inputs if n in once and made_by[n].adds}
    fresh = max(made_by, default=0) + 1
    following: dict[int, list[Step]] = defaultdict(list)  # new steps, after the one of this index
    batches: dict[tuple[int, ...], int] = {}
    roots: dict[int, Step] = {}
    for root in [step for step in steps if step.adds and step.outputs[0] not in inner]:
        leaves = _addends(root, made_by, inner)
        groups: dict[object, list[Step]] = defaultdict(list)
        for number in leaves:
            if number in once and made_by[number].sums:
                groups[made_by[number].function.key].append(made_by[number])  # type: ignore[attr-defined]
        chunks = [chunk for group in groups.values() for chunk in _chunks(group) if len(chunk) > 1]
        gone = {member.outputs[0] for chunk in chunks for member in chunk}
        terms = [number for number in leaves if number not in gone]
        for chunk in chunks:
            inputs = tuple(member.inputs[0] for member in chunk)
            place = max(when.get(number, 0) for number in inputs)
            if inputs not in batches:
                following[place].append(Step(_joined, inputs, (fresh,)))
                batches[inputs], fresh = fresh, fresh + 1
            function = chunk[0].function.joined([member.function for member in chunk], known)  # type: ignore[attr-defined]
            following[place].append(Step(function, (batches[inputs],), (fresh,)))
            terms.append(fresh)
            fresh += 1
        function = Combination([None] * len(terms), root.function.shape)  # type: ignore[attr-defined]
        roots[id(root)] = Step(function, tuple(terms), root.outputs)
    return [new for index, step in enumerate(steps) for new in (roots.get(id(step), step), *following[index])]


def _chunks(group: list[Step]) -> list[list[Step]]:
    """Eight at a time, in an order that forward and backward sweeps agree on, so that they can share constants."""
    ordered = sorted(group, key=lambda step: getattr(step.function, "order", -step.inputs[0]))
    odd = len(ordered) % TOGETHER
    starts = range(odd, len(ordered), TOGETHER)
    return ([ordered[:odd]] if odd else []) + [ordered[start : start + TOGETHER] for start in starts]


def combined(steps: list[Step], results: Iterable[int | None]) -> list[Step]:
    """Combinations of combinations as one, where nothing else needs the inner one."""
    uses = _uses(steps, results)
    inner: dict[int, tuple[Combination, tuple[int, ...]]] = {}
    made = []
    for step in steps:
        outer, inputs = step.function, list(step.inputs)
        if isinstance(outer, Combination):
            place = 0
            while place < len(inputs):
                function, sources = inner.get(inputs[place], (None, ()))
                taken = 1
                if function is not None and uses[inputs[place]] == 1 and outer.holds(place, function):
                    outer = outer.after(place, function)
                    inputs[place : place + 1] = sources
                    taken = len(sources)
                place += taken
            inner[step.outputs[0]] = outer, tuple(inputs)
        made.append(replace(step, function=outer, inputs=tuple(inputs)))
    return without_the_unused(made, results)


def _uses(steps: Iterable[Step], results: Iterable[int | None]) -> Counter[int]:
    uses = Counter(number for step in steps for number in step.inputs)
    uses.update(number for number in results if number is not None)
    return uses


def _addends(root: Step, made_by: dict[int, Step], inner: set[int]) -> list[int]:
    """What a sum of sums adds up."""
    found, waiting = [], [root]
    while waiting:
        for number in waiting.pop().inputs:
            if number in inner:
                waiting.append(made_by[number])
            else:
                found.append(number)
    return found


def _joined(*tangents: Tensor) -> Tensor:
    """One batch of several."""
    return torch.cat(tangents, 1)
