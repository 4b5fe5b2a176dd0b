"""A training under way as tensors and JSON, and back: everything needed to go on to the same bits."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from gpulab.errors import DataError
from gpulab.training.loop import Training, WindowNote


def checkpoint(training: Training) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, Adam's moments, the state, the random numbers and the history; and notes that JSON can carry."""
    tensors = _weights_and_moments(training)
    notes = {"step": training.step, "state": _packed(training.state, tensors), "ways": sorted(training.ways)}
    tensors["random"] = torch.get_rng_state()
    tensors["history"] = torch.tensor(training.history, dtype=torch.float64)
    return tensors, notes


def restore(training: Training, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Go back to where `checkpoint` was called.

    Raises:
        DataError: Where it was of another network, before anything is changed.
    """
    own = _weights_and_moments(training)
    expected = {name: tensor.shape for name, tensor in {**own, "random": torch.get_rng_state()}.items()}
    shapes = {name: tensors[name].shape for name in expected.keys() & tensors.keys()}
    rows = tensors.get("history", torch.empty(0))
    step, ways = operator.index(notes["step"]), {str(way) for way in notes["ways"]}
    if shapes != expected or rows.ndim != 2 or rows.shape[1] != len(WindowNote._fields) or not len(rows):
        raise DataError("not a checkpoint of this training: its tensors have other names or shapes")
    device = next(training.model.parameters()).device
    state = _unpacked(notes["state"], tensors, device)
    training.model.check_state(state)
    training.state = state
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    torch.set_rng_state(tensors["random"])
    training.history = [WindowNote(int(w), int(step), loss, seconds) for w, step, loss, seconds in rows.tolist()]
    training.step, training.ways = step, ways


def _weights_and_moments(training: Training) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for name, moments in training.optimizer.state.items():
        tensors |= {f"adam.{name}.{index}": tensor for index, tensor in enumerate(moments)}
    return tensors


def _packed(state: Any, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON; its tensors go into `tensors`, under the names that stand in for them."""
    if isinstance(state, Tensor):
        name = f"state.{len(tensors)}"
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        return {"dict": [[key, _packed(value, tensors)] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        kind = "list" if isinstance(state, list) else "tuple"
        return {kind: [_packed(value, tensors) for value in state]}
    return {"value": state}


def _unpacked(packed: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """The state that `_packed` took apart."""
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content].to(device)
    if kind == "dict":
        return {key: _unpacked(value, tensors, device) for key, value in content}
    if kind in ("list", "tuple"):
        values = [_unpacked(value, tensors, device) for value in content]
        return values if kind == "list" else tuple(values)
    return content
