"""An interrupted training as a file of tensors and JSON, and back: everything needed to go on to the same bits."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpulab import files
from gpulab.errors import DataError
from gpulab.store.identities import Identity
from gpulab.store.runs import WORK, read_tensors, set_aside, write_tensors
from gpulab.training.loop import Training, WindowNote


class Checkpoints:
    """Where a run leaves what it needs to go on: in the store, beside the runs, until it is done.

    Args:
        store: The folder of runs; None keeps nothing.
        identity: Of the run.
        seconds: The time between two.
    """

    def __init__(self, store: Path | None, identity: Identity, seconds: float) -> None:
        self.store, self.seconds, self.saved = store, seconds, time.monotonic()
        self.file = None if store is None else store / WORK / f"{identity.id}.safetensors"

    def resume(self, training: Training) -> bool:
        """Take a training to where an interrupted one was, if there is one. A damaged file is set aside."""
        if self.file is None or self.store is None or not os.path.lexists(self.file):
            return False
        try:
            restore(training, *read_tensors(self.file))
        except Exception as error:  # whatever a checkpoint of another training leads to
            why = f"{self.file}: a damaged checkpoint, or not one of this run ({error!r:.300})"
            moved = set_aside(self.store, self.file)
            warnings.warn(f"{why}: the run starts anew (set aside in {moved})", stacklevel=4)
            return False
        return True

    def save(self, training: Training) -> None:
        """Keep a training, if nothing of it has changed since its last window ended."""
        if self.file and training.history and not training.inside_window and training.diverged_at is None:
            write_tensors(self.file, *checkpoint(training))
        self.saved = time.monotonic()

    def save_if_due(self, training: Training) -> None:
        """The same, when the last is long enough ago."""
        if time.monotonic() - self.saved >= self.seconds:
            self.save(training)

    def remove(self) -> None:
        """The run is done."""
        if self.file:
            with files.writing(self.file):
                self.file.unlink(missing_ok=True)


def checkpoint(training: Training) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, Adam's moments and the state; and notes that JSON can carry, such as the history."""
    tensors, layers = _weights_and_moments(training), training.state or []
    for number, layer in enumerate(layers):
        tensors |= {f"state.{number}.{part}": tensor for part, tensor in enumerate(layer)}
    return tensors, {"history": training.history, "state": [*map(len, layers)], "ways": sorted(training.ways)}


def restore(training: Training, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Go back to where `checkpoint` was called.

    Raises:
        DataError: Where it was of another network, before anything is changed. Where a tensor is missing, `KeyError`.
    """
    own = _weights_and_moments(training)
    if any(tensors[name].shape != tensor.shape for name, tensor in own.items()):
        raise DataError("not a checkpoint of this training: its tensors have other shapes")
    device = next(training.model.parameters()).device
    state = [
        [tensors[f"state.{number}.{part}"].to(device) for part in range(parts)]
        for number, parts in enumerate(notes["state"])
    ]
    training.model.check_state(state or None)
    training.state = state or None
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    training.history, training.ways = [WindowNote(*note) for note in notes["history"]], set(notes["ways"])
    training.step = training.history[-1].step


def _weights_and_moments(training: Training) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for name, moments in training.optimizer.state.items():
        tensors |= {f"adam.{name}.{index}": tensor for index, tensor in enumerate(moments)}
    return tensors
