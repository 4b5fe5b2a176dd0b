"""An interrupted training as a file of tensors and JSON, and back: everything needed to go on to the same bits.

The file lies in the store, beside the runs, until the run is done; without a store there is none (`None`).
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from gpulab.errors import DataError
from gpulab.store.runs import read_tensors, set_aside, write_tensors
from gpulab.training.loop import Training, WindowNote


def save(training: Training, file: Path | None) -> None:
    """Keep a training, if nothing of it has changed since its last window ended."""
    if file is None or not training.history or training.inside_window or training.diverged_at is not None:
        return
    tensors, layers = _weights_and_moments(training), training.state or []
    for number, layer in enumerate(layers):
        tensors |= {f"state.{number}.{part}": tensor for part, tensor in enumerate(layer)}
    notes = {"history": training.history, "state": [*map(len, layers)], "ways": sorted(training.ways)}
    write_tensors(file, tensors, notes)


def resume(training: Training, file: Path | None) -> bool:
    """Take a training to where an interrupted one was, if there is one; whether there was.

    A file that is damaged, or of another network, is set aside before anything is changed.
    """
    if file is None or not os.path.lexists(file):
        return False
    own, device = _weights_and_moments(training), next(training.model.parameters()).device
    try:
        tensors, notes = read_tensors(file)
        if any(tensors[name].shape != tensor.shape for name, tensor in own.items()):
            raise DataError("its tensors have other shapes")
        names = [[f"state.{number}.{part}" for part in range(parts)] for number, parts in enumerate(notes["state"])]
        state = [[tensors[name].to(device) for name in layer] for layer in names] or None
        training.model.check_state(state)
        history, ways = [WindowNote(*note) for note in notes["history"]], set(notes["ways"])
        step = history[-1].step
    except Exception as error:  # whatever a checkpoint of another training leads to
        why = f"{file}: a damaged checkpoint, or not one of this run ({error!r:.300})"
        moved = set_aside(file.parents[1], file)
        warnings.warn(f"{why}: the run starts anew (set aside in {moved})", stacklevel=4)
        return False
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    training.state, training.history, training.ways, training.step = state, history, ways, step
    return True


def _weights_and_moments(training: Training) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for name, moments in training.optimizer.state.items():
        tensors |= {f"adam.{name}.{index}": tensor for index, tensor in enumerate(moments)}
    return tensors
