"""What a training step is for: loss, gradients and updates; and what it found, to be put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten_with_path

from gpulab.audits import count_sketch as sk
from gpulab.audits.operations import RESULT, Operation
from gpulab.audits.steps import PreparedStep, State


class StepResults:
    """Follows the modules, leaves and optimizers that a step uses, and says in the end what came of them.

    Args:
        name: gives a tensor's content its name in the trace.

    Attributes:
        path: The modules at work, the innermost last.
        paused: Whether what is computed is none of the step's operations.
        restores: Whether modules and optimizers that the step uses are put back afterwards, as they were.
    """

    def __init__(self, name: Callable[[Tensor], str]) -> None:
        self.name, self.paused, self.restores = name, False, True
        self.path: list[str] = []
        self.names: dict[int, str] = {}
        self.states: dict[int, State] = {}
        self.roots: dict[int, tuple[nn.Module, dict[str, list[str]]]] = {}  # modules called first, and their buffers
        self.leaves: dict[int, Tensor] = {}  # what a gradient is accumulated for
        # Their content at first; `Module.to` leaves a leaf of another type or device, which is no update of it.
        self.leaf_contents: dict[tuple[int, torch.dtype, torch.device], list[str]] = {}
        self.gradients: dict[int, list[str]] = {}
        self.handles: list[Any] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow which module is at work, until the step is done; then put back what it changed."""

        def enter(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001
            if not self.path:
                self.names = {
                    id(submodule): _as_written(name) or type(module).__name__
                    for name, submodule in module.named_modules()
                }
                if id(module) not in self.roots:
                    self._keep(module, module)
                    self.roots[id(module)] = module, self._buffers(module)
            self.path.append(self.names.get(id(module), type(module).__name__))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
            if self.path:
                self.path.pop()

        def update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._keep(optimizer)

        self.handles += (
            register_optimizer_step_pre_hook(update),
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in self.handles:
                handle.remove()
            for state in reversed(self.states.values()):
                state.restore()

    def _keep(self, owner: Any, *modules: nn.Module, tensors: Sequence[Tensor] = ()) -> None:
        """Remember what a module, an optimizer or a tensor holds when the step first uses it, to put it back."""
        if self.restores and id(owner) not in self.states:
            before, self.paused = self.paused, True
            self.states[id(owner)] = State(modules, tensors, owner)
            self.paused = before

    def find_leaves(self, args: Any) -> None:
        """Note which of the arguments of an operation are leaves, whose gradients and updates are results."""
        for t in sk.leaves(args):
            if not t.requires_grad or t._is_view() or not t.is_leaf:
                continue
            if id(t) not in self.leaves and not t.is_inference():
                self.handles.append(t.register_post_accumulate_grad_hook(self._keep_gradient))
                self._keep(t, tensors=[t])
            self.leaves[id(t)] = t
            if _as_it_is(t) not in self.leaf_contents:
                self.leaf_contents[_as_it_is(t)] = self._quietly(t)

    def _keep_gradient(self, leaf: Tensor) -> None:
        self.gradients[id(leaf)] = self._quietly(leaf.grad)

    def _quietly(self, tensor: Tensor | None) -> list[str]:
        """The names of a tensor's values, on the quiet: what computes them is none of the step's operations."""
        before, self.paused = self.paused, True
        try:
            return [] if tensor is None else [self.name(t) for t in sk.tensors(tensor.detach())]
        finally:
            self.paused = before

    def _buffers(self, module: nn.Module) -> dict[str, list[str]]:
        return {_as_written(name): self._quietly(buffer) for name, buffer in module.named_buffers()}

    def used_modules(self, run: Any) -> list[nn.Module]:
        """The modules that a step called, and their own; of a `Step`, its model's."""
        models = [run.model] if isinstance(run, PreparedStep) else [module for module, _ in self.roots.values()]
        return [submodule for model in models for submodule in model.modules()]

    @property
    def compiled(self) -> bool:
        """Whether a module is compiled; torch runs it as it is written where operations are watched."""
        submodules = (submodule for module, _ in self.roots.values() for submodule in module.modules())
        return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in submodules)

    def as_operations(self, returned: Any, sketches: dict[str, np.ndarray]) -> list[Operation]:
        """What the step returned, each gradient, and every parameter and buffer that it changed."""
        names: dict[int, str] = {}
        for module, _ in self.roots.values():
            names |= {
                id(parameter): _as_written(name)
                for name, parameter in module.named_parameters()
                if id(parameter) not in names
            }
        entries: list[tuple[str, str, list[str]]] = []
        returned_leaves, _ = tree_flatten_with_path(returned)
        for path, value in returned_leaves:
            if isinstance(value, Tensor | float):
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                label = "loss" if len(returned_leaves) == 1 else f"result {torch.utils._pytree.keystr(path)}"
                entries.append((label, "", self._quietly(tensor)))
        for number, leaf in enumerate(self.leaves.values(), 1):
            names.setdefault(id(leaf), f"tensor {number} of shape {tuple(leaf.shape)}")
        entries += [("gradient", names[leaf], values) for leaf, values in self.gradients.items()]
        for leaf in self.leaves.values():
            values = self._quietly(leaf)
            if values != self.leaf_contents.get(_as_it_is(leaf), values):
                entries.append(("updated", names[id(leaf)], values))
        for module, before in self.roots.values():
            now = self._buffers(module).items()
            entries += [("updated", name, values) for name, values in now if values != before.get(name)]
        return [
            Operation(label, RESULT, name, "", values, values, list(sketches[values[-1]].shape), "float64")
            for label, name, values in sorted(entries)
            if values
        ]


def _as_written(name: str) -> str:
    """The name of a module or parameter, without what `torch.compile` puts before it."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod")


def _as_it_is(leaf: Tensor) -> tuple[int, torch.dtype, torch.device]:
    return id(leaf), leaf.dtype, leaf.device
