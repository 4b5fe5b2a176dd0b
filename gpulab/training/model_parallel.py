"""One network cut over several devices: each holds a part of the layers, and what passes between them is copied.

The plainest way that is right: every layer lies on a device, and its inputs are brought there before it computes;
autograd copies the gradients back. One device computes at a time, so it is for networks that do not fit on one, not
for speed (a pipeline keeps all busy: Huang et al. 2019, *GPipe*, arXiv 1811.06965).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from gpulab.data.feed import Loader
from gpulab.errors import UsageError
from gpulab.models.autoencoders import Autoencoder
from gpulab.models.base import Trainable
from gpulab.models.prednet import LayerState, PredNet, State
from gpulab.training.loop import Plain, Training
from gpulab.training.plan import Plan


def split(model: Trainable, devices: Sequence[str]) -> Trainable:
    """Distribute the layers of an autoencoder or a PredNet over several devices, in place.

    Each device gets about as many layers, in a row. One device computes at a time, and the others wait for it. So this
    is for a network that does not fit on one device; it makes none faster.

    Args:
        model: An `Autoencoder`, cut between its linear layers; or a `PredNet`, cut between its layers. The upper layers
            of a PredNet are the heavier in weights, the lower ones in what is kept for the backward pass.
        devices: One or more names, at most as many as there are layers, such as `["cuda:0", "cuda:1"]`.
            `["cpu", "cpu"]` tries it without a GPU. Inputs go to the first.

    Returns:
        The same model. The attribute `part` of each of its modules is the number of the device on which it computes,
        from 0.

    Raises:
        UsageError: For another model, for no device, and for more devices than layers.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> net, images = gl.models.Autoencoder((16,)), torch.rand(2, 1, 28, 28)
        >>> before = net(images)
        >>> bool((gl.training.split(net, ["cpu", "cpu"])(images) == before).all()), [layer.part for layer in net.layers]
        (True, [0, 0, 1, 1])
    """
    groups = _groups(model)
    if not 0 < len(devices) <= len(groups):
        name = type(model).__name__
        raise UsageError(f"{name} of {len(groups)} layers over {len(devices)} devices: expected 1 to {len(groups)}")
    for number, group in enumerate(groups):
        part = number * len(devices) // len(groups)
        for module in group:
            module.to(devices[part])
            for each in module.modules():
                each.part = part  # type: ignore[assignment]
            module.register_forward_pre_hook(functools.partial(_bring, devices[part]), with_kwargs=True)
    first, last = devices[0], devices[-1]
    if isinstance(model, Autoencoder):
        model.register_forward_hook(lambda *call: call[-1].to(first))
    elif isinstance(model, PredNet) and first != last:
        usual = model.initial_state
        where = [devices[number * len(devices) // len(groups)] for number in range(len(groups))]

        def initial_state(frame: Tensor) -> State:
            return [LayerState(*(t.to(to) for t in layer)) for layer, to in zip(usual(frame), where, strict=True)]

        model.initial_state = initial_state  # type: ignore[method-assign]
    return model


def _groups(model: Trainable) -> list[list[nn.Module]]:
    """The modules of each layer, which stay together."""
    if isinstance(model, Autoencoder):
        layers = list(model.layers)
        return [layers[place : place + 2] for place in range(0, len(layers), 2)]
    if isinstance(model, PredNet):
        takes = [[], *([conv] for conv in model.conv_a)]
        return [[*take, p, cell] for take, p, cell in zip(takes, model.conv_p, model.lstm, strict=True)]
    raise UsageError(f"{type(model).__name__}: an Autoencoder or a PredNet can be split")


def _bring(device: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ARG001
    """A hook that brings a module's inputs to its device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))


def begin_split(plan: Plan, devices: Sequence[str]) -> tuple[Training, Plain]:
    """What is planned, at its beginning, for a network that is cut over devices; and the engine that computes it."""
    model = split(plan.model.to(dtype=plan.setting.dtype), devices)
    training = Training(model, plan.learning_rate)
    loader = Loader(plan.factors["loader"], plan.setting)
    loader.device = devices[0]
    return training, Plain(training, loader)


def memory_per_part(model: Trainable, batch: Tensor, devices: int) -> list[dict[str, int]]:
    """Count the bytes that a training step keeps on each of the devices that a model was split over.

    Args:
        model: A model that was `split`.
        batch: A batch as the model's `training_loss` takes it. The loss is computed once, to see what autograd saves.
        devices: Over how many devices the model was split.

    Returns:
        A list with a dictionary for each device, all in bytes. `weights` are the parameters. `optimizer` is the
        gradient and Adam's two moments, three times the weights. `activations` is what autograd saves for the backward
        pass, without the weights, each piece of memory counted once. What an operation between two modules saves counts
        for the device of the module called before it.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> net = gl.training.split(gl.models.Autoencoder((16,)), ["cpu", "cpu"])
        >>> [part["weights"] for part in gl.training.memory_per_part(net, torch.rand(2, 1, 28, 28), 2)]
        [50240, 53312]
    """
    parts: list[dict[str, int]] = [{"weights": 0, "optimizer": 0, "activations": 0} for _ in range(devices)]
    own: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            here: Any = parts[getattr(module, "part", 0)]
            size = parameter.numel() * parameter.element_size()
            here["weights"] += size
            here["optimizer"] += 3 * size
            own.add(parameter.untyped_storage().data_ptr())
    current, seen, kept = [0], set(own), []

    def enter(module: nn.Module, _: Any) -> None:
        current[0] = getattr(module, "part", current[0])

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(tensor)  # so that its memory is not given to another
            parts[current[0]]["activations"] += storage.nbytes()
        return tensor

    handles = [module.register_forward_pre_hook(enter) for module in model.modules()]
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            model.training_loss(batch, None)
    finally:
        for handle in handles:
            handle.remove()
    return parts
