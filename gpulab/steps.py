"""Training steps that run under any setting: a `Step`, or a function that performs a step."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpulab._torch_internals import (
    Nested,
    convert_tensors,
    is_lazy,
    is_plain,
    tree_leaves,
    tree_map,
)
from gpulab.errors import UsageError
from gpulab.guards._call_sites import line_of_error
from gpulab.settings import Setting


@dataclass(frozen=True)
class Step:
    """A training step that can run under any setting: one forward and one backward pass.

    The model is moved to the setting's device and precision, and runs with all its hooks.
    Afterwards its parameters, gradients, buffers and attributes are restored. Side effects of hooks
    on other objects are not undone.

    Args:
        model: The network.
        batch: A pair (inputs, targets), each a tensor or any nesting of tensors; the inputs alone
            if there is no `loss`. A mapping is passed as keyword arguments if `forward` has
            parameters with these names. From a `DataLoader`, pass the first batch,
            `next(iter(loader))`.
        loss: A function of outputs and targets. If the batch is a mapping, a function of outputs
            and the whole batch; the model then receives only the keys that it accepts. Without a
            `loss`, the loss is the model's own: the output's `loss`, or the first output if that is
            a scalar. If the model has none, the loss is the mean square of the first tensor among
            the outputs.

    Raises:
        UsageError: If the batch is a `DataLoader`; or, when the step is executed, if batch, model
            and loss do not fit together.

    Notes:
        `gpulab.audit` and `gpulab.record` also accept a *function step*: any function that performs
        a complete step. Use one if a `Step` is too restrictive, because the step updates weights,
        clips gradients, accumulates them over several batches, or has no model. It is called as
        follows:

        - A function with a parameter `setting`, or with a parameter that has no default, is called
          with the `Setting` as its first argument. Other parameters need defaults;
          `functools.partial` can set them. The function puts its model and data on
          `setting.device` and converts floating-point numbers to `setting.dtype`.
        - A function without such a parameter is called without arguments. By default, tensors that
          it creates are on the setting's device and in its precision.

        The function may do several updates. The compared results are the returned tensors, if any,
        the gradients, the parameters and buffers that the function changes, and the states of its
        optimizers. In every execution, torch, NumPy and Python start from the same seed. Draw data
        and initial weights on the CPU in float32 and convert them afterwards, because random number
        generators differ between devices and number formats. An audit calls the function twice for
        each setting. The states of the modules and optimizers that it used are restored after each
        call. Any other object with a state, such as an iterator over a loader or a learning rate
        schedule, must be created inside the function. Settings with `compile` need a `Step`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import gpulab as gl
        >>> step = gl.Step(
        ...     nn.Linear(4, 2), (torch.ones(3, 4), torch.zeros(3, 2)), nn.functional.mse_loss
        ... )
        >>> step(gl.Setting.parse("cpu")).shape
        torch.Size([])

        A function step that does two updates:

        >>> def two_updates(setting, learning_rate=0.1):
        ...     model, inputs = nn.Linear(4, 1), torch.randn(8, 4)
        ...     model, inputs = (
        ...         model.to(setting.device, setting.dtype),
        ...         inputs.to(setting.device, setting.dtype),
        ...     )
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...     return loss
        >>> gl.audit(two_updates, "cpu", "cpu:threads=1", progress=False).faulty
        False
        >>> from functools import partial
        >>> gl.audit(
        ...     two_updates, partial(two_updates, learning_rate=0.2), setting="cpu", progress=False
        ... ).kind
        'mismatch'
    """

    model: nn.Module
    batch: Nested
    loss: Callable[[Nested, Nested], Tensor] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batch, DataLoader):
            raise UsageError("batch is a DataLoader; pass its first batch, next(iter(loader))")

    def __call__(self, setting: Setting) -> Tensor:
        """Execute the step under a setting and return the loss."""
        with self.prepared(setting) as run_step:
            return run_step()

    def prepared(self, setting: Setting) -> PreparedStep:
        """Return the step prepared for a setting, to be called inside a `with` block."""
        return PreparedStep(self, setting)


class PreparedStep:
    """A step under a setting, which can be called inside a `with` block.

    On entry the model, and a loss that is a module, are moved to the setting, and their gradients
    are removed. On exit the original state is restored.

    Attributes:
        model: The model. After the call its parameters have the gradients of the step.
        loss_taken: After the call, a description of the loss if the step has no loss function.
    """

    def __init__(self, step: Step, setting: Setting) -> None:
        self.setting = setting
        self.model = step.model
        self.loss = step.loss

        def move(value: Nested) -> Nested:
            """Convert the tensors of a part of the batch; copy those that need no conversion."""
            # `tree_map` does not know all mappings, such as the output of a tokenizer.
            if isinstance(value, Mapping):
                return {name: tree_map(move, item) for name, item in value.items()}
            if not isinstance(value, Tensor):
                return value
            # Neither the user's tensor nor its gradient may be changed.
            detached = value.detach()
            converted = self._convert(detached)
            own = converted.clone() if converted is detached else converted
            return own.requires_grad_(value.requires_grad)

        self.batch = tree_map(move, step.batch)

    def _convert(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the setting's device, and convert it unless it holds integers."""
        dtype = self.setting.dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.is_complex():  # the smallest complex type that torch computes with is complex64
            dtype = torch.complex128 if self.setting.dtype == torch.float64 else torch.complex64
        # Convert on the device, so that less data is transferred.
        return tensor.to(self.setting.device).to(dtype)

    def __enter__(self) -> PreparedStep:
        # A loss may have weights of its own, as in metric learning.
        loss_modules = [self.loss] if isinstance(self.loss, nn.Module) else []
        with contextlib.ExitStack() as stack:
            for module in (self.model, *loss_modules):
                snapshot = Snapshot(module)
                stack.callback(snapshot.restore)
                for tensor, _, _, _ in snapshot.tensors:
                    tensor.grad = None
                convert_tensors(module, self._convert)
                module.to(self.setting.device)  # some models override `to` to store their device
                for tensor, data, _, _ in snapshot.tensors:
                    # A tensor that was neither moved nor converted still has the user's memory.
                    if tensor.device == data.device and tensor.dtype == data.dtype:
                        tensor.data = data.clone()
            self.restored = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.restored.close()

    def __call__(self) -> Tensor:
        """Execute the step and return the loss."""
        loss, self.loss_taken = loss_of(self.model, self.batch, self.loss)
        # Torch advises against autocast in the backward pass, which follows the forward casts.
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        return loss.detach()


class Snapshot:
    """A saved state of a module, a tensor or an optimizer, which can be restored.

    Args:
        owner: The object whose state is saved. For a module, the state consists of the
            attributes of all submodules, and the memory of their parameters and buffers; for a
            tensor, of its memory and its gradient; and for an optimizer, of its `state_dict`.
        with_contents: Whether to copy the numbers in the memory as well. By default, only the
            reference to the memory is saved. This is enough if the tensor is given new memory,
            but not if numbers are overwritten.

    Attributes:
        containers: Dictionaries, lists and sets of a module, each with a shallow copy.
        tensors: The tensors, each with its data, its gradient and `requires_grad`.
        contents: The memory of data and gradients, each with a copy; empty without `with_contents`.
        storages: The storages of data and gradients, each with its size in bytes.
        optimizer: The owner if it is an optimizer, else None.
        progress: A copy of the optimizer's `state_dict`.

    Raises:
        UsageError: If the module has lazy parameters.
    """

    def __init__(
        self, owner: nn.Module | Tensor | torch.optim.Optimizer, with_contents: bool = False
    ) -> None:
        attributes = (
            [vars(module) for module in owner.modules()] if isinstance(owner, nn.Module) else []
        )
        values = [value for module_attributes in attributes for value in module_attributes.values()]
        containers = [
            *attributes,
            *(value for value in values if type(value) in (dict, OrderedDict, list, set)),
        ]
        self.containers = [(container, copy.copy(container)) for container in containers]
        tensors = (
            (*owner.parameters(), *owner.buffers()) if isinstance(owner, nn.Module) else (owner,)
        )
        if any(isinstance(tensor, Tensor) and is_lazy(tensor) for tensor in tensors):
            raise UsageError(
                f"{type(owner).__name__} has lazy parameters: call it once to set their shapes"
            )
        self.tensors = [
            (tensor, tensor.data, tensor.grad, tensor.requires_grad)
            for tensor in tensors
            if isinstance(tensor, Tensor)
        ]
        memories = [
            memory
            for _, data, gradient, _ in self.tensors
            for memory in (data, gradient)
            if memory is not None
        ]
        self.contents = [(memory, memory.clone()) for memory in memories if with_contents]
        self.storages = [
            (storage, storage.nbytes())
            for storage in (memory.untyped_storage() for memory in memories if is_plain(memory))
        ]
        self.optimizer = owner if isinstance(owner, torch.optim.Optimizer) else None
        self.progress = copy.deepcopy(self.optimizer.state_dict()) if self.optimizer else {}

    def restore(self) -> None:
        """Restore the state in place.

        Parameters and containers remain the same objects, because other code may refer to them.
        """
        for container, content in self.containers:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        for tensor, data, gradient, needs_gradient in self.tensors:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(needs_gradient)
            tensor.grad = gradient
        for storage, size in self.storages:
            if storage.nbytes() < size:  # sharded training frees the memory of whole parameters
                storage.resize_(size)
        for memory, content in self.contents:
            memory.detach().copy_(content)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(self.progress)


def loss_of(
    model: nn.Module, batch: Nested, loss: Callable[[Nested, Nested], Tensor] | None
) -> tuple[Tensor, str]:
    """Compute the loss of a step, and a description of it that is empty for a given loss.

    Raises:
        UsageError: If the batch has no targets for the loss, or it is unclear which loss is meant.
    """
    if loss is None:
        return _infer_loss(model, batch)
    # The model receives the keys that it accepts, and the loss the whole batch.
    if isinstance(batch, Mapping):
        return loss(_call_model(model, batch, drop_unknown=True), batch), ""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        inputs, targets = batch
        return loss(_call_model(model, inputs), targets), ""
    raise UsageError(
        f"batch: expected (inputs, targets) or a mapping, because there is a loss; got"
        f" {_describe(batch)}"
    )


def _infer_loss(model: nn.Module, batch: Nested) -> tuple[Tensor, str]:
    """Compute the loss without a loss function, by the rules of `Step`, and describe it.

    Raises:
        UsageError: If the output has a `loss` that is not a scalar, several named scalars without a
            `loss`, or no tensor.
    """
    output = _call_model(model, batch)
    named_loss = (
        output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    )
    tensors = [
        leaf
        for leaf in tree_leaves(output if named_loss is None else named_loss)
        if isinstance(leaf, Tensor)
    ]
    first_is_scalar = bool(tensors) and tensors[0].ndim == 0
    if named_loss is not None and first_is_scalar:
        return tensors[0], "the output's loss"
    # No output is called "loss".
    only_scalars = isinstance(output, Mapping) and all(tensor.ndim == 0 for tensor in tensors)
    if named_loss is not None or only_scalars or not tensors:
        raise UsageError(
            f"the loss of {type(model).__name__} is unclear: it returned {_describe(output)}; pass"
            " loss="
        )
    if first_is_scalar:
        return tensors[0], "the output" if output is tensors[0] else "the first of the output"
    return tensors[0].square().mean(), "the mean square of the output"


def _call_model(model: nn.Module, inputs: Nested, drop_unknown: bool = False) -> Nested:
    """Call a model on its inputs; pass a mapping as keyword arguments if the names fit.

    Raises:
        UsageError: If the model accepts only some keys and `drop_unknown` is false, or if it does
            not accept a pair as its input.
    """
    name = type(model).__name__
    if isinstance(inputs, Mapping):
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        accepted = {key: value for key, value in inputs.items() if takes_any or key in parameters}
        if accepted and len(accepted) < len(inputs) and not drop_unknown:
            unknown = ", ".join(inputs.keys() - accepted.keys())
            raise UsageError(
                f"batch: expected parameters of {name} ({', '.join(parameters)}), got {unknown}"
            )
        return model(**accepted) if accepted else model(inputs)
    try:
        return model(inputs)
    except TypeError as error:
        if not isinstance(inputs, list | tuple) or len(inputs) != 2:
            raise
        message = (
            f"{name} received a pair as its only input ({error}); if the batch is (inputs,"
            " targets), pass loss="
        )
        raise UsageError(message) from error


def _describe(value: object) -> str:
    """Describe a value in an error message: its class, with its names or its number of items."""
    description = f"a {type(value).__name__}"
    if isinstance(value, list | tuple):
        return f"{description} of {len(value)}"
    names = list(value) if isinstance(value, Mapping) else [*getattr(value, "__dict__", ())]
    return f"{description} with {names}" if names else description


def check_step(step: object) -> None:
    """Raise `UsageError` for an object that is not a step, and state what is expected."""
    if isinstance(step, nn.Module) and not hasattr(step, "prepared"):
        name = type(step).__name__
        raise UsageError(
            f"step: expected gpulab.Step(model, batch, loss), got the network {name} itself"
        )
    if not callable(step):
        raise UsageError(
            "step: expected gpulab.Step or a function that performs one step, got a"
            f" {type(step).__name__}"
        )


def explain_step_error(
    error: Exception, setting: Setting, modules: Iterable[nn.Module]
) -> Exception:
    """Convert an error of a step to a `UsageError` that names tensors that `.to()` did not move.

    These are plain attributes of a module that have a different format or device. If there
    are none and the setting computes in float32, the error itself is returned, because then the
    setting is not its cause.
    """
    unmoved = {
        f"{type(module).__name__}.{name} ({tensor.dtype} on {tensor.device})": None
        for module in modules
        for name, value in vars(module).items()
        for tensor in tree_leaves(value)
        if isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and (tensor.dtype, tensor.device.type) != (setting.dtype, setting.kind)
    }
    if not unmoved and setting.dtype == torch.float32:
        return error
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if unmoved:
        reason += (
            f"; .to() does not move {', '.join(unmoved)}: make it a buffer, with register_buffer"
        )
    message = f"the step fails under {setting}: {reason}"
    line = line_of_error(error)
    if line:
        message += f" (at {line})"
    return UsageError(message)


@contextlib.contextmanager
def prepare_step(
    step: Callable[..., Nested], setting: Setting, default_dtype: torch.dtype | None = None
) -> Iterator[Callable[[], Nested]]:
    """Provide the step as a function without arguments, under the active setting.

    Args:
        step: A `Step`, or a function step.
        setting: The setting.
        default_dtype: Torch's default type before the setting was applied. A function that receives
            the setting runs with this default, so that it draws its weights in the same type under
            every setting.

    >>> for step in (lambda: "alone", lambda *rest: len(rest), lambda where: str(where)):
    ...     with prepare_step(step, Setting.parse("cpu")) as once:
    ...         once()
    'alone'
    0
    'cpu'
    """
    if hasattr(step, "prepared"):
        with step.prepared(setting) as run_step:
            yield run_step
        return
    if _takes_setting(step):
        applied_dtype = torch.get_default_dtype()
        torch.set_default_dtype(default_dtype or applied_dtype)
        try:
            yield functools.partial(step, setting)
        finally:
            torch.set_default_dtype(applied_dtype)
        return
    # A default device slows down every operation, so it is set only if it differs.
    is_other_device = torch.device(setting.device) != torch.get_default_device()
    with torch.device(setting.device) if is_other_device else contextlib.nullcontext():
        yield step


def _takes_setting(step: Callable[..., Nested]) -> bool:
    """Return whether a function step takes the setting as its argument.

    It does if it has a parameter named `setting`, or any parameter that must be given.
    """
    parameters = inspect.signature(step).parameters
    must_be_given = [
        parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in parameters.values()
    ]
    return "setting" in parameters or any(must_be_given)


@contextlib.contextmanager
def seed_generators(setting: Setting, seed: int) -> Iterator[None]:
    """Seed torch, NumPy and Python inside the block, and restore their states afterwards.

    >>> for seed in (5, 2**32 + 5):  # NumPy uses only the lower 32 bits
    ...     with seed_generators(Setting.parse("cpu"), seed):
    ...         round(np.random.rand(), 4)
    0.222
    0.222
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng([torch.device(setting.device)] if setting.kind == "cuda" else [])
        )
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(random.setstate, random.getstate())
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients, in the order of `parameters()`.

    >>> layer = nn.Linear(2, 1)
    >>> _ = layer.bias.requires_grad_(False)
    >>> [parameter is layer.weight for parameter in trainable_parameters(layer)]
    [True]
    """
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
