"""Runs kept in object storage: trained in a folder of this machine, uploaded when they are done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulab.store import identities
from gpulab.store.object_store import Remote, remote
from gpulab.training.keeping import Keeping, StoredRun


@dataclass(frozen=True, kw_only=True)
class Uploading(Keeping):
    """Keeping in a folder whose runs are those of a store in object storage: `objects`."""

    objects: Remote

    @property
    def address(self) -> str | None:
        """As of `Keeping`."""
        return self.objects.url

    def existing_run(self, identity: identities.Identity, with_weights: bool = False) -> StoredRun | None:
        """As of `Keeping`, downloaded if need be; a run whose upload was cut off is uploaded."""
        if self.take_existing:
            self.objects.fetch(identity)
        stored = super().existing_run(identity, with_weights)
        if stored:
            self._upload(stored.folder)
        return stored

    def keep(self, run: StoredRun, own_files: Path | None = None) -> Path | None:
        """As of `Keeping`, and uploaded, without the weights."""
        folder = super().keep(run, own_files)
        self._upload(folder)
        return folder

    def _upload(self, folder: Path | None) -> None:
        if folder is not None:
            self.objects.push(folder)


def keeping_in(store: str | Path | None, **how: Any) -> Keeping:
    """For a store as `gpulab.train` takes it: a folder, one in object storage, or none."""
    objects = remote(store)
    if objects:
        return Uploading(store=objects.work, objects=objects, **how)
    return Keeping(store=None if store is None else Path(store), **how)
