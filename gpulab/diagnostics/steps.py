"""A training step as something that can be done under any setting."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpulab.errors import UsageError, in_one_line
from gpulab.settings import Setting


@dataclass(frozen=True)
class Step:
    """A training step that can be done under any setting: one forward and one backward pass.

    The model is copied, moved to the setting's device and precision, and `loss(model(inputs), targets)`
    differentiated. The model itself stays as it is.

    Args:
        model: the network.
        batch: (inputs, targets), each a tensor or any nesting of tensors; without a `loss`, the inputs alone.
        loss: a function of outputs and targets. Without it, the mean of the squared output is differentiated.

    Examples:
        >>> step = Step(nn.Linear(4, 2), (torch.ones(3, 4), torch.zeros(3, 2)), nn.functional.mse_loss)
        >>> step(Setting.parse("cpu")).shape
        torch.Size([])
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None

    def __call__(self, setting: Setting) -> Tensor:
        """Do the step and return the loss."""
        return self.prepared(setting)()

    def prepared(self, setting: Setting) -> Callable[[], Tensor]:
        """The step with its model and batch in place; call it once."""

        def there(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(setting.device, setting.dtype if value.is_floating_point() else None)

        model, batch = copy.deepcopy(self.model).to(setting.device, setting.dtype), tree_map(there, self.batch)
        model.zero_grad()

        def once() -> Tensor:
            if self.loss is None:
                loss = next(t for t in tree_leaves(model(batch)) if isinstance(t, Tensor)).square().mean()
            else:
                inputs, targets = batch
                loss = self.loss(model(inputs), targets)
            loss.backward()
            return loss.detach()

        return once


@contextlib.contextmanager
def ready(step: Callable[..., Any], setting: Setting) -> Iterator[Callable[[], Any]]:
    """The step as a function without arguments, under a setting that is in force."""
    if hasattr(step, "prepared"):
        yield step.prepared(setting)
        return
    parameters = inspect.signature(step).parameters
    if "setting" in parameters or any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values()
    ):
        yield functools.partial(step, setting)
    else:
        with torch.device(setting.device):
            yield step


def find_step(name: str) -> Callable[..., Any]:
    """The step that `module:name` or `file.py:name` stands for. Raises `UsageError` where there is none."""
    return find_function(name, "step")


def find_function(name: str, what: str) -> Callable[..., Any]:
    """The function, or whatever can be called, that `module:name` or `file.py:name` stands for.

    A file is read anew each time. As for a script, what lies beside it can be imported.

    Args:
        name: Where, and what there.
        what: What is wanted, in the words of an error: a `step`, a `training`.

    Raises:
        UsageError: Where there is none, with what the import raised.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise UsageError(f"{what} {name!r}: expected module:name or file.py:name, such as my_training:{what}")
    try:
        if where.endswith(".py"):
            module = _module_of(Path(where).resolve())
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        words = str(error) if isinstance(error, ImportError | OSError) else in_one_line(error, where)
        raise UsageError(f"{what} {name!r}: {where} cannot be imported: {words}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        wanted = "function or gpulab.Step" if what == "step" else "function"
        raise UsageError(f"{what} {name!r}: {where} has no {wanted} named {attribute!r}")
    return found


def _module_of(file: Path) -> types.ModuleType:
    """A file as a module, from its text: Python's cache takes two texts of one second and one length for the same."""
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    known = sys.modules.get(file.stem)
    name = file.stem if known is None or getattr(known, "__file__", None) == str(file) else f"_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    code = compile(file.read_bytes(), file, "exec")
    sys.modules[name] = module  # dataclasses and the processes of a DataLoader look for it there
    exec(code, module.__dict__)
    return module
