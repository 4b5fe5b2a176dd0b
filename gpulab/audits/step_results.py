"""What a training step is for: loss, gradients and updates; and what it found, to be put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten_with_path

from gpulab.audits import count_sketch as sk
from gpulab.audits.operations import RESULT, Operation
from gpulab.audits.steps import PreparedStep, State
from gpulab.guards.memory import own_work


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
        self.states: dict[nn.Module | Tensor | torch.optim.Optimizer, State] = {}
        self.roots: dict[nn.Module, dict[str, list[str]]] = {}  # modules called first, and their buffers
        # What a gradient is accumulated for, and its content at first; `Module.to` leaves a leaf of another type or
        # device, which is no update of it.
        self.leaves: dict[Tensor, dict[tuple[torch.dtype, torch.device], list[str]]] = {}
        self.gradients: dict[Tensor, list[str]] = {}
        self.handles: list[Any] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow which module is at work, until the step is done; then put back what it changed."""

        def enter(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001
            if not self.path:
                own_name = type(module).__name__
                self.names = {inner: _as_written(name) or own_name for name, inner in module.named_modules()}
                if module not in self.roots:
                    self._keep(module)
                    self.roots[module] = self._buffers(module)
            self.path.append(self.names.get(module, type(module).__name__))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
            if self.path:
                self.path.pop()

        self.handles += (
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._keep(optimizer)),
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

    @own_work
    def _keep(self, owner: nn.Module | Tensor | torch.optim.Optimizer) -> None:
        """Remember what a module, an optimizer or a tensor holds when the step first uses it, to put it back."""
        if self.restores and owner not in self.states:
            self.states[owner] = State(owner, with_contents=True)

    def find_leaves(self, args: Any) -> None:
        """Note which of the arguments of an operation are leaves, whose gradients and updates are results."""
        for t in sk.leaves(args):
            if not t.requires_grad or t._is_view() or not t.is_leaf:
                continue
            if t not in self.leaves and not t.is_inference():
                self.handles.append(t.register_post_accumulate_grad_hook(self._keep_gradient))
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
        return {_as_written(name): self._names_of(buffer) for name, buffer in module.named_buffers()}

    def used_modules(self, run: Any) -> list[nn.Module]:
        """The modules that a step called, and their own; of a `Step`, its model's."""
        models = [run.model] if isinstance(run, PreparedStep) else self.roots
        return [submodule for model in models for submodule in model.modules()]

    def as_operations(self, returned: Any, sketches: dict[str, np.ndarray]) -> list[Operation]:
        """What the step returned, each gradient, and every parameter and buffer that it changed."""
        entries: list[tuple[str, str, list[str]]] = []
        returned_leaves, _ = tree_flatten_with_path(returned)
        for path, value in returned_leaves:
            if isinstance(value, Tensor | float):
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                label = "loss" if len(returned_leaves) == 1 else f"result {keystr(path)}"
                entries.append((label, "", self._names_of(tensor)))
        names: dict[Tensor, str] = {}
        for root in reversed(self.roots):  # a parameter of two has its name in the first
            names |= {parameter: _as_written(name) for name, parameter in root.named_parameters()}
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


def _as_written(name: str) -> str:
    """The name of a module or parameter, without what `torch.compile` puts before it."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod")
