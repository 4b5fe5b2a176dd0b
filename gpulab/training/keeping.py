"""Where a run is kept, and how: in a folder, or nowhere."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gpulab.store import identities
from gpulab.store import runs as stores
from gpulab.training import checkpoints
from gpulab.training.loop import Training

CHECKPOINT_SECONDS = 10.0
History = Mapping[str, Any]  # the columns of a history: arrays, or those of a data frame


class StoredRun(NamedTuple):
    """A run at rest, or on its way there."""

    folder: Path | None  # in the store
    record: dict[str, Any]
    history: History
    weights: dict[str, Tensor] | None  # where they were kept


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What `gpulab.train` was told of keeping a run.

    Attributes:
        store: The folder of all runs; None keeps nothing.
        take_existing: Whether a run that is there already is taken.
        use_checkpoints: Whether to go on from one.
        checkpoint_seconds: Time between checkpoints.
        weights: Whether the trained weights are kept.
    """

    store: Path | None = None
    take_existing: bool = True
    use_checkpoints: bool = True
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    weights: bool = True

    def existing_run(self, identity: identities.Identity, with_weights: bool = False) -> StoredRun | None:
        """A run that was done before, and whose trained weights were kept if they are asked for; else None."""
        if self.store is None or not self.take_existing:
            return None
        run = stores.find(self.store, identity)
        return None if run is None or (with_weights and run[2] is None) else StoredRun(self.store / identity.id, *run)

    def resume(self, identity: identities.Identity, training: Training) -> bool:
        """Take a training to where an interrupted one was; False without a checkpoint. A damaged one is set aside."""
        file = self._checkpoint_file(identity)
        if file is None or not self.use_checkpoints:
            return False
        return stores.resume(file, functools.partial(checkpoints.restore, training))

    def save_checkpoint(self, identity: identities.Identity, training: Training) -> None:
        """Keep a training that is between two windows."""
        file = self._checkpoint_file(identity)
        if file is not None:
            stores.write_tensors(file, *checkpoints.checkpoint(training))

    def keep(self, run: StoredRun, own_files: Path | None = None) -> Path | None:
        """Put a run that is done into the store, with a folder of its own files; returns its folder there."""
        if self.store is None:
            return None
        weights = run.weights if self.weights else None
        folder = stores.write_run(self.store, run.record, run.history, weights, own_files)
        stores.checkpoint_file(self.store, run.record["id"]).unlink(missing_ok=True)
        return folder

    def _checkpoint_file(self, identity: identities.Identity) -> Path | None:
        """None also for a run that nobody could tell from another."""
        if self.store is None or identity.unknown:
            return None
        return stores.checkpoint_file(self.store, identity.id)
