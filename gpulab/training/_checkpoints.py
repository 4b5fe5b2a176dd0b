"""Checkpoints: files from which an interrupted training resumes at the end of a window."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from gpulab import files
from gpulab.errors import DataError, GpulabError
from gpulab.store._run_store import quarantine
from gpulab.store._tensors import Tensors, read_tensors, write_tensors
from gpulab.training.loop import ModelState, Training, WindowRecord


@dataclass(frozen=True)
class Checkpoint:
    """A training at the end of a window.

    Attributes:
        tensors: The weights (`model.…`) and the moments of Adam (`adam.…`), by name.
        state: The network's state for the next window.
        history: A record of each window so far.
        gradient_methods: The methods by which gradients were computed so far.
    """

    tensors: Tensors
    state: ModelState
    history: list[WindowRecord]
    gradient_methods: set[str]

    @classmethod
    def of(cls, training: Training) -> Checkpoint:
        """Return the checkpoint of a training run that is at the end of a window."""
        return cls(
            _weights_and_moments(training),
            training.state,
            training.history,
            training.gradient_methods,
        )

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            DataError: If the file is damaged or is not a checkpoint. The message names it.
        """
        tensors, notes = read_tensors(file)
        with files.convert_read_errors(file, "not a checkpoint"):
            # The tensors of the state are taken out; the weights and moments remain. The note
            # `state` has the number of tensors of each layer.
            state = [
                [tensors.pop(f"state.{layer}.{part}") for part in range(parts)]
                for layer, parts in enumerate(notes["state"])
            ]
            history = [WindowRecord(*note) for note in notes["history"]]
            if not history:
                raise DataError(f"{file}: a checkpoint without a window")
            # A network without a state has a state of no layers in the file.
            return cls(tensors, state or None, history, set(notes["ways"]))

    def write(self, file: Path) -> None:
        """Write the checkpoint atomically."""
        layers = self.state or []
        states = {
            f"state.{layer}.{part}": tensor
            for layer, parts in enumerate(layers)
            for part, tensor in enumerate(parts)
        }
        notes = {
            "history": self.history,
            "state": [len(parts) for parts in layers],
            "ways": sorted(self.gradient_methods),
        }
        write_tensors(file, self.tensors | states, notes)

    def validate(self, training: Training) -> None:
        """Check that the checkpoint is of a training run of this network.

        Raises:
            DataError: If tensors are missing or have different shapes.
            UsageError: If the state does not fit the network.
        """
        for name, tensor in _weights_and_moments(training).items():
            if name not in self.tensors:
                raise DataError(f"it has no {name}")
            if self.tensors[name].shape != tensor.shape:
                raise DataError("its tensors have unexpected shapes")
        training.model.check_state(self.state)

    @torch.no_grad()
    def restore(self, training: Training) -> None:
        """Set a training run to the state at the end of the checkpoint's last window."""
        device = next(training.model.parameters()).device
        for name, tensor in _weights_and_moments(training).items():
            tensor.copy_(self.tensors[name])
        training.state = None
        if self.state is not None:
            training.state = [[tensor.to(device) for tensor in layer] for layer in self.state]
        training.history = list(self.history)
        # The set is changed in place, because engines hold a reference to it.
        training.gradient_methods.clear()
        training.gradient_methods.update(self.gradient_methods)
        training.step = self.history[-1].step


def save_checkpoint(training: Training, file: Path | None) -> None:
    """Write a checkpoint if a file is given and the training can be resumed from where it is.

    Nothing is written before the first window, inside a window, or after the training diverged.
    """
    has_finished_window = len(training.history) > 0 and not training.inside_window
    if file is not None and has_finished_window and training.diverged_at is None:
        Checkpoint.of(training).write(file)


def resume_checkpoint(training: Training, file: Path | None) -> bool:
    """Restore an interrupted training from its checkpoint, and return whether this was done.

    A file that is damaged or belongs to another network is quarantined with a warning, and the
    training is not changed.
    """
    if file is None or not os.path.lexists(file):
        return False
    try:
        checkpoint = Checkpoint.read(file)
        checkpoint.validate(training)
    except GpulabError as error:
        problem = f"{file}: a damaged checkpoint, or not one of this run ({error!r:.300})"
        quarantined = quarantine(file.parents[1], file)
        warnings.warn(
            f"{problem}: the run starts from the beginning (checkpoint moved to {quarantined})",
            stacklevel=5,
        )
        return False
    checkpoint.restore(training)
    return True


def _weights_and_moments(training: Training) -> Tensors:
    """List the model's weights and the moments of Adam by the names that checkpoints use."""
    tensors = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for name, moments in training.optimizer.state.items():
        tensors |= {f"adam.{name}.{index}": tensor for index, tensor in enumerate(moments)}
    return tensors
