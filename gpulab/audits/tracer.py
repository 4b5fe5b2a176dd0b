"""One execution of a training step, watched below autograd: every operation that it runs, and what came of it.

What a step is for are its loss, gradients and updates. What it found is put back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    UncompiledDispatchMode,
    base_of,
    decomposition_of,
    find_tensors,
    has_wrapper_subclass,
    is_composite,
    is_view,
    map_nested,
    name_as_written,
    named_arguments,
    named_leaves,
    only_allocates,
    operation_name,
    overwrites_first_argument,
    register_optimizer_step_pre_hook,
    result_names,
    returned_or_written,
)
from gpulab.audits import count_sketch as sk
from gpulab.audits.rounding import forward_error
from gpulab.audits.traces import RESULT, Operation, as_json
from gpulab.audits.twins import DEFINITIONS, writes
from gpulab.guards.call_sites import Callers
from gpulab.guards.reentrancy import at_work, own_work
from gpulab.steps import State

SILENT = {"detach", "alias", "set", "lift_fresh"}  # they compute nothing
# What kernels return beside their results, by the names of torch's schemas: no data, but notes for the backward pass,
# which nobody has set where nothing is dropped, or memory that nobody has written.
NOTES = {"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"}
NOTES |= {"logsumexp", "log_sumexp", "log_alpha"}  # which are written in part
# Kernels that write to an input though their schema says nothing: cuDNN's notes of the forward pass serve once.
WRITES_UNSAID = {"_cudnn_rnn_backward", "miopen_rnn_backward"}


class Tracer(UncompiledDispatchMode):
    """Notes every operation below autograd, forward and backward; `results` follows what the step is for.

    Args:
        sketches: of all values, by name; what is new is added.
        tell: is called after each operation.
        measured: whether each operation's error and steadiness are measured.
    """

    def __init__(self, sketches: dict[str, np.ndarray], tell: Callable[[], object], measured: bool = False) -> None:
        super().__init__()
        self.sketches, self.tell, self.measured = sketches, tell, measured
        self.results = StepResults(self._value)
        self.operations: list[Operation] = []
        self.callers = Callers()

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Run an operation and note what it did."""
        kwargs = kwargs or {}
        name = operation_name(operation)
        if name in SILENT or at_work():
            return operation(*args, **kwargs)
        if only_allocates(name):
            out = operation(*args, **kwargs)
            return out.zero_() if type(out) is Tensor and sk.is_plain(out) else out  # what lies there is nobody's data
        if has_wrapper_subclass(types):
            self.results.find_leaves(args)
            return NotImplemented  # such as a nested tensor, whose class calls operations on its parts
        if name == "_euclidean_dist":  # which has no kernel of its own: the root of a product, each seen by itself
            with self:
                return decomposition_of(operation)(*args)
        if is_composite(operation):
            with self:
                return operation.decompose(*args, **kwargs)
        changes = writes(operation)
        written_to = changes or name in WRITES_UNSAID
        before = map_nested(_copy, (args, kwargs)) if written_to else (args, kwargs)
        named = named_arguments(operation, *before)
        arguments = {key: as_json(value) for key, value in named.items()}
        random = _is_random(operation, arguments)
        blind = changes and (random or overwrites_first_argument(name))
        inputs = self._values(find_tensors([value for key, value in named.items() if key not in NOTES])[blind:])
        self.results.find_leaves(args[1:] if blind else args)
        out = self._run(operation, args, kwargs)
        raw_results = returned_or_written(operation, args, out)
        results = _results(operation, raw_results)
        if not results:
            return out
        rounded = [t for t in results if sk.rounds(t)]
        measured = self.measured and not random and not operation.is_view and bool(rounded or name in DEFINITIONS)
        caller = self.callers.of_this(self.results.path[-1] if self.results.path else "")
        shape, dtype = list(results[0].shape), str(results[0].dtype).removeprefix("torch.")
        op = Operation(name, *caller, inputs, self._values(results), shape, dtype, arguments, random=random)
        op.changed = self._changed(before, (args, kwargs), blind) if changes else []
        op.nans = self.measured and any(map(_has_nan, rounded))
        if measured:
            again_args, again_kwargs = map_nested(_copy, before) if written_to else before
            returned_again = operation(*again_args, **again_kwargs)
            again = _results(operation, returned_or_written(operation, again_args, returned_again))
            repeated = self._values(again)
            if repeated != op.outputs:
                op.repeats, op.spread = False, sk.spread(self.sketches, repeated, op.outputs)
            plain = all(
                map(sk.is_plain, find_tensors((before, raw_results)))
            )  # others are compared by their parts alone
            if plain:
                vars(op).update(vars(forward_error(operation, name, before[0], before[1], raw_results)))
        self.operations.append(op)
        self.tell()
        return out

    def _run(self, operation: OpOverload, args: Sequence[Nested], kwargs: dict[str, Nested]) -> Nested:
        """The operation; one that has no kernel for float64, as mixtures of experts use, in float32 or bfloat16."""
        try:
            return operation(*args, **kwargs)
        except RuntimeError:
            tensors = find_tensors((args, kwargs))
            if not any(t.dtype == torch.float64 for t in tensors) or writes(operation):
                raise
            for dtype in (torch.float32, torch.bfloat16):
                shorter_args, shorter_kwargs = map_nested(_as_type(torch.float64, dtype), (args, kwargs))
                with contextlib.suppress(RuntimeError):
                    return map_nested(_as_type(dtype, torch.float64), operation(*shorter_args, **shorter_kwargs))
            raise

    def _values(self, values: Nested) -> list[str]:
        return [self._value(t) for t in _numeric_tensors(values)]

    def _value(self, tensor: Tensor) -> str:
        """The name of a tensor's content; its sketch is kept."""
        name = sk.name(tensor)
        if name not in self.sketches:
            self.sketches[name] = sk.sketch(tensor)
        return name

    def _changed(self, before: Nested, after: Nested, blind: bool) -> list[str]:
        """The values that an operation left in its inputs, where it wrote to them, and in what these are parts of."""
        tensors = zip(find_tensors(before), find_tensors(after), strict=True)
        plain = [(then, now) for then, now in tensors if now.numel() and sk.is_plain(now)]
        changed = [now for then, now in plain if sk.name(then) != sk.name(now)]
        bases = [base for now in changed if (base := base_of(now)) is not None]  # which has changed with its part
        return [self._value(t) for t in ([] if blind else changed) + bases]


def _numeric_tensors(values: Nested) -> list[Tensor]:
    """The tensors among nested values; bytes that a kernel keeps beside numbers are its own affair."""
    tensors = sk.tensors(values)
    return [t for t in tensors if t.dtype != torch.uint8] if any(map(sk.rounds, tensors)) else tensors


def _results(operation: OpOverload, raw_results: Nested) -> list[Tensor]:
    """What an operation made of tensors, without its notes."""
    names = result_names(operation)
    if isinstance(raw_results, tuple) and len(raw_results) == len(names):
        raw_results = [value for name, value in zip(names, raw_results, strict=True) if name not in NOTES]
    return _numeric_tensors(raw_results)


def _as_type(old: torch.dtype, new: torch.dtype) -> Callable[[Nested], Nested]:
    return lambda value: value.to(new) if isinstance(value, Tensor) and value.dtype == old else value


def _has_nan(tensor: Tensor) -> bool:
    """Whether a tensor has a NaN.

    >>> _has_nan(torch.tensor([torch.inf, -torch.inf])), _has_nan(torch.tensor([1.0, torch.nan]))
    (False, True)
    """
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no sum
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())  # the sum is quicker, and NaN if any number is


def _copy(value: Nested) -> Nested:
    """Copy a tensor so that it has the same strides, gaps included: another layout may select another kernel.

    >>> _copy(torch.arange(6).reshape(2, 3).T).stride()
    (1, 3)
    """
    if not isinstance(value, Tensor):
        return value
    if not sk.is_plain(value) or value.is_conj() or value.is_neg() or not value.numel():
        return value.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.detach().as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride())


def _is_random(operation: OpOverload, arguments: Mapping[str, object]) -> bool:
    """Whether an operation draws; attention and an LSTM are marked as drawing also when they drop nothing."""
    dropped = (arguments.get(name) for name in ("dropout_p", "dropout"))
    return torch.Tag.nondeterministic_seeded in operation.tags and 0.0 not in dropped


# --- what the step is for -------------------------------------------------------------------------------------


class StepResults:
    """Follows the modules, leaves and optimizers that a step uses, and says in the end what came of them.

    Args:
        name: gives a tensor's content its name in the trace.

    Attributes:
        path: The modules at work, the innermost last.
        restores: Whether modules and optimizers that the step uses are put back afterwards, as they were.
    """

    def __init__(self, name: Callable[[Tensor], str]) -> None:
        self.name, self.restores = name, True
        self.path: list[str] = []
        self.names: dict[nn.Module, str] = {}
        self.kept: set[nn.Module | Tensor | torch.optim.Optimizer] = set()
        self.undo = contextlib.ExitStack()
        self.roots: dict[nn.Module, dict[str, list[str]]] = {}  # modules called first, and their buffers
        # What a gradient is accumulated for, and its content at first; `Module.to` leaves a leaf of another type or
        # device, which is no update of it.
        self.leaves: dict[Tensor, dict[tuple[torch.dtype, torch.device], list[str]]] = {}
        self.gradients: dict[Tensor, list[str]] = {}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow which module is at work, until the step is done; then put back what it changed."""

        def enter(module: nn.Module, inputs: Nested) -> None:  # noqa: ARG001
            if not self.path:
                own_name = type(module).__name__
                self.names = {inner: name_as_written(name) or own_name for name, inner in module.named_modules()}
                if module not in self.roots:
                    self._keep(module)
                    self.roots[module] = self._buffers(module)
            self.path.append(self.names.get(module, type(module).__name__))

        def leave(module: nn.Module, inputs: Nested, output: Nested) -> None:  # noqa: ARG001
            if self.path:
                self.path.pop()

        with self.undo:
            for handle in (
                register_optimizer_step_pre_hook(lambda optimizer, *_: self._keep(optimizer)),
                hooks.register_module_forward_pre_hook(enter),
                hooks.register_module_forward_hook(leave, always_call=True),
            ):
                self.undo.callback(handle.remove)
            yield

    @own_work
    def _keep(self, owner: nn.Module | Tensor | torch.optim.Optimizer) -> None:
        """Remember what a module, an optimizer or a tensor holds when the step first uses it, to put it back."""
        if self.restores and owner not in self.kept:
            self.kept.add(owner)
            self.undo.callback(State(owner, with_contents=True).restore)

    def find_leaves(self, args: Nested) -> None:
        """Note which of the arguments of an operation are leaves, whose gradients and updates are results."""
        for t in find_tensors(args):
            if not t.requires_grad or is_view(t) or not t.is_leaf:
                continue
            if t not in self.leaves and not t.is_inference():
                self.undo.callback(t.register_post_accumulate_grad_hook(self._keep_gradient).remove)
                self._keep(t)
            contents = self.leaves.setdefault(t, {})
            if (t.dtype, t.device) not in contents:
                contents[t.dtype, t.device] = self._names_of(t)

    def _keep_gradient(self, leaf: Tensor) -> None:
        self.gradients[leaf] = [] if leaf.grad is None else self._names_of(leaf.grad)

    @own_work
    def _names_of(self, tensor: Tensor) -> list[str]:
        """The names of a tensor's values; what computes them is none of the step's operations."""
        return [self.name(t) for t in sk.tensors(tensor.detach())]

    def _buffers(self, module: nn.Module) -> dict[str, list[str]]:
        return {name_as_written(name): self._names_of(buffer) for name, buffer in module.named_buffers()}

    def used_modules(self) -> list[nn.Module]:
        """The modules that a step called, and their own."""
        return [submodule for model in self.roots for submodule in model.modules()]

    def as_operations(self, returned: Nested, sketches: dict[str, np.ndarray]) -> list[Operation]:
        """What the step returned, each gradient, and every parameter and buffer that it changed."""
        entries: list[tuple[str, str, list[str]]] = []
        returned_leaves = named_leaves(returned)
        for place, value in returned_leaves:
            if isinstance(value, Tensor | float):
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                label = "loss" if len(returned_leaves) == 1 else f"result {place}"
                entries.append((label, "", self._names_of(tensor)))
        names: dict[Tensor, str] = {}
        for root in reversed(self.roots):  # a parameter of two has its name in the first
            names |= {parameter: name_as_written(name) for name, parameter in root.named_parameters()}
        for number, (leaf, contents) in enumerate(self.leaves.items(), 1):
            name, values = names.get(leaf, f"tensor {number} of shape {tuple(leaf.shape)}"), self._names_of(leaf)
            entries.append(("gradient", name, self.gradients.get(leaf, [])))
            if values != contents.get((leaf.dtype, leaf.device), values):
                entries.append(("updated", name, values))
        for module, before in self.roots.items():
            now = self._buffers(module).items()
            entries += [("updated", name, values) for name, values in now if values != before.get(name)]
        return [
            Operation(label, RESULT, name, "", values, values, list(sketches[values[-1]].shape), "float64")
            for label, name, values in sorted(entries)
            if values
        ]
