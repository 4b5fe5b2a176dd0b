"""A linear map as a list of steps, each of which applies to k tangents at once; how it is optimised, and replayed.

The three bilinear maps of a convolution, for many tangents of one factor at once, come first.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpulab.engines.graphs import Graph
from gpulab.engines.hessian_forward.capture import Combination
from gpulab.numerics.flags import precision_allowed

aten = torch.ops.aten
TRIALS = 3
WORKSPACE = 2**28  # bytes for an algorithm to work in
Constants = dict[tuple[Any, ...], Tensor]  # batches of several, by their identities


@dataclass(frozen=True)
class Geometry:
    """What a convolution without groups is called with besides its tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, options: Sequence[Any]) -> Geometry | None:
        """What torch's operations are called with after their tensors; None for groups and transposed ones."""
        stride, padding, dilation, transposed, _, groups = options[:6]
        return cls(tuple(stride), tuple(padding), tuple(dilation)) if groups == 1 and not transposed else None

    def apply(self, which: str, first: Tensor, second: Tensor, shape: Sequence[int]) -> Tensor:
        """The `output` of inputs and a weight, or an output gradient's gradient by the `input` or the `weight`.

        Args:
            which: What is made, `output`, `input` or `weight`.
            first: Inputs (B, I, …), or an output gradient (B, O, …).
            second: A weight (O, I, …), or inputs (B, I, …) for the gradient by the weight.
            shape: Of what is made.
        """
        options = self.stride, self.padding, self.dilation, False, [0] * len(self.stride), 1
        if which == "output":
            return aten.convolution(first, second, None, *options)
        placeholder = first.new_empty(1).expand(shape)  # of which only the shape is read
        inputs, weight = (placeholder, second) if which == "input" else (second, placeholder)
        mask = [which == "input", which == "weight", False]
        return aten.convolution_backward(first, inputs, weight, None, *options, mask)[mask.index(True)]

    def mirrored(self, weight: Tensor) -> Geometry | None:
        """Of the convolution with the mirrored weight whose input gradient is this one's output, and the reverse."""
        padding = tuple(
            d * (edge - 1) - p for d, edge, p in zip(self.dilation, weight.shape[2:], self.padding, strict=True)
        )
        return Geometry(self.stride, padding, self.dilation) if set(self.stride) == {1} and min(padding) >= 0 else None


@dataclass(eq=False)
class Convolution:
    """One of the three maps, with one factor fixed."""

    geometry: Geometry
    which: str  # what the map makes of its two factors: see `Geometry.apply`
    varies: int  # which of them is the tangent, 0 or 1
    constant: Tensor  # the other one
    shape: tuple[int, ...]  # of what it makes
    bias: bool = False  # whether a second tangent is added to the output
    pieces: int = 1  # into which the result is cut along the batch
    order: int = 0  # the number of the constant

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for maps that can be done as one."""
        return self.geometry, self.which, self.varies, self.bias, self.shape, tuple(self.constant.shape)

    @property
    def weight_varies(self) -> bool:
        """Whether the tangent is the weight, so that all batches can go through it at once."""
        return self.which != "weight" and self.varies == 1

    @classmethod
    def joined(cls, maps: Sequence[Convolution], constants: Constants) -> Convolution:
        """One map whose batch is those of all `maps`; constants that were joined before are shared."""
        first, key = maps[0], tuple(_identity(member.constant) for member in maps)
        if key not in constants:
            constants[key] = torch.cat([member.constant for member in maps])
        shape = first.shape if first.which == "weight" else (len(maps) * first.shape[0], *first.shape[1:])
        return cls(first.geometry, first.which, first.varies, constants[key], shape, first.bias)

    def __call__(self, tangent: Tensor, bias: Tensor | None = None) -> Tensor | Sequence[Tensor]:
        """The map of tangents (k, …): (k, …), or one such for each piece."""
        # The k tangents are more members of a batch, or more channels; so are their results.
        k, axis, shape = len(tangent), self.varies, list(self.shape)
        shape[axis] *= k
        more_members = self.which == "output" or (self.which == "input" and axis == 0)
        folded = tangent.flatten(0, 1) if more_members else tangent.movedim(0, 1).flatten(1, 2)
        factors = (folded, self.constant) if axis == 0 else (self.constant, folded)
        result = convolve(self.geometry, self.which, *factors, shape)
        if bias is not None:
            result += bias.reshape(-1, *[1] * (len(shape) - 2))
        result = result.unflatten(axis, (k, self.shape[axis]))
        result = result.movedim(1, 0) if axis == 1 else result
        return result.chunk(self.pieces, 1) if self.pieces > 1 else result


@dataclass(frozen=True)
class BiasGradient:
    """The sum of an output gradient (B, O, …) of `ndim` dimensions over batch and space; of any batch."""

    ndim: int

    @property
    def key(self) -> BiasGradient:
        """Equal for maps that can be done as one."""
        return self

    def joined(self, _: Sequence[BiasGradient], __: Constants) -> BiasGradient:
        """The same map of a larger batch."""
        return self

    def __call__(self, tangent: Tensor) -> Tensor:
        """(k, B, O, …) to (k, O)."""
        return tangent.sum([1, *range(3, self.ndim + 1)])


def number_constants(maps: Sequence[Convolution]) -> None:
    """Give each map the number of its constant, counted by their first use."""
    numbers: dict[Any, int] = {}
    for member in maps:
        member.order = numbers.setdefault(_identity(member.constant), len(numbers))


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two views of the same numbers."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def convolve(geometry: Geometry, which: str, first: Tensor, second: Tensor, shape: Sequence[int]) -> Tensor:
    """`geometry.apply`; on a GPU by whichever of two equal ways is faster there.

    With a stride of one, an output is also an input's gradient with the mirrored weight, and the reverse, and for the
    two cuDNN may choose different algorithms. Its first choice can be fifteen times slower, and take gigabytes to work
    in. So each way is tried once with little memory, also where there is only one: cuDNN remembers what it chose then.
    """
    if not first.is_cuda:
        return geometry.apply(which, first, second, shape)
    candidates: list[Callable[[], Tensor]] = [partial(geometry.apply, which, first, second, shape)]
    if which != "weight" and (mirrored := geometry.mirrored(second)) is not None:

        def by_mirror() -> Tensor:
            mirrored_role = "input" if which == "output" else "output"
            return mirrored.apply(mirrored_role, first, second.transpose(0, 1).flip(*range(2, second.ndim)), shape)

        candidates.append(by_mirror)
    flags = precision_allowed("conv"), torch.backends.cudnn.deterministic
    key = geometry, which, first.shape, second.shape, first.dtype, first.device, flags
    if key not in _FASTER and not torch.cuda.is_current_stream_capturing():
        room = WORKSPACE + 2 * math.prod(shape) * first.element_size()
        times = [_seconds(candidate, first.device, room) for candidate in candidates]
        _FASTER[key] = times.index(min(times))
    return candidates[_FASTER.get(key, 0)]()


_FASTER: dict[Any, int] = {}


def _seconds(candidate: Callable[[], Tensor], device: torch.device, room: int) -> float:
    """How long a candidate takes on the GPU, after a first time in which it may take only so many bytes more."""
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved(device) + room) / total), device)
    try:
        candidate()
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
    torch.cuda.current_stream().synchronize()
    started = time.perf_counter()
    for _ in range(TRIALS):
        candidate()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - started


TOGETHER = 8  # more at a time would be little faster, and keep more tangents waiting
LIVE = 5  # of the tangents of a map, about one in five is there at a time
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


class LinearMap:
    """Steps from the variables 0, 1, … to `results`, one for each of them and of its shape; None stands for zero.

    `bytes` is about what it takes at a time for k = 1, where all variables together take `size`. On a GPU a map is
    thousands of small kernels, and launching them takes longer than running them. So it is captured in a CUDA graph,
    one for each k, at the first call with that k.
    """

    def __init__(self, steps: Sequence[Step], results: Results, size: int) -> None:
        self.steps, self.results, self.bytes = optimized(steps, results), results, size // LIVE
        self.graphs: dict[int, Graph] = {}
        self.pool: Any = None  # of the memory that they share

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
