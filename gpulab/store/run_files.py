"""One folder a run: `run.json`, `history.parquet`, and perhaps `weights.safetensors` and the run's own `files`.

A run is written to a folder of its own and moved into place in one step, so many writers need no lock: the first to
finish a run wins, and its copy and a later one differ in nothing but the time. Every file is sealed; one that was
damaged since is found when it is read, and its run is set aside and trained again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import DataError, GpulabError
from gpulab.settings import arithmetic
from gpulab.store import records, schemas
from gpulab.store.identities import Identity, weights_digest

if TYPE_CHECKING:
    import pandas as pd
    import torch

RECORD, HISTORY, WEIGHTS = "run.json", "history.parquet", "weights.safetensors"
WORK, DAMAGED = ".unfinished", ".damaged"  # folders in a store: checkpoints and half-written runs; what was set aside
PREPARED = "GPULAB_PREPARED"  # in the environment: a store to take finished runs from, such as a lecturer's
CHECKPOINT_FORMAT = 2
RUN_NAME = re.compile(r"-seed-?\d+-[0-9a-f]{10}$")  # how the names of runs end
LARGEST_RECORD = 1 << 24  # bytes


# --- runs that are done ------------------------------------------------------------------------------------


def begun(identity: Identity, here: Mapping[str, Any], **notes: str | None) -> dict[str, Any]:
    """The record of a run that begins now; `here` is the passport, `notes` are no part of what identifies it."""
    return {
        "format": records.FORMAT,
        **identity.record,
        "arithmetic": arithmetic(),
        "passport": dict(here),
        **notes,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def find(store: Path, identity: Identity, with_weights: bool | None = None) -> Path | None:
    """The folder of a run that the store holds whole, and with it the trained weights if they are asked for.

    With None nobody is going to read these, and they are not verified. A damaged one is set aside, and a warning says
    so: the run is not done. Another says what cannot be known. One that the store lacks is copied from the store that
    `$GPULAB_PREPARED` names, which is only read.
    """
    if identity.unknown:
        what = ", ".join(identity.unknown)
        warnings.warn(
            f"{what}: its content cannot be known: this run is not resumed, nor taken for another", stacklevel=3
        )
    folder = store / identity.id
    prepared = Path(os.environ.get(PREPARED) or store) / identity.id
    if not os.path.lexists(folder) and (prepared / (WEIGHTS if with_weights else RECORD)).is_file():
        with contextlib.suppress(OSError, GpulabError):  # what cannot be copied is trained
            _copy(prepared, store)
    if not os.path.lexists(folder):
        return None
    try:
        read_run(folder)
        has_weights = (folder / WEIGHTS).is_file()
        if has_weights and with_weights is not None:
            read_weights(folder)
    except DataError as error:
        if moved := set_aside(store, folder):
            warnings.warn(f"{error}; the run is trained again (set aside in {moved})", stacklevel=3)
        return None
    return folder if has_weights or not with_weights else None


def _copy(run: Path, store: Path) -> None:
    with _scratch(store) as scratch:
        for file in filter(Path.is_file, run.rglob("*")):
            copy = scratch / file.relative_to(run)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)  # without its permissions
        scratch.rename(store / run.name)


def is_run(path: str | Path) -> bool:
    """Whether a folder is a run's, or what is left of one: by a file in it, or by its name."""
    inside = any(os.path.lexists(os.path.join(path, name)) for name in (RECORD, HISTORY, WEIGHTS))
    return inside or bool(RUN_NAME.search(str(path)))


def set_aside(store: Path, path: Path) -> Path | None:
    """Move what is damaged into the store's folder for it; None where another process already has."""
    moved = store / DAMAGED / f"{path.name}-{uuid.uuid4().hex[:6]}"
    with files.writing(moved):
        moved.parent.mkdir(parents=True, exist_ok=True)
        try:
            return path.rename(moved)
        except FileNotFoundError:
            return None


def write_run(
    store: Path,
    record: dict[str, Any],
    history: pd.DataFrame,
    weights: dict[str, torch.Tensor] | None = None,
    own_files: Path | None = None,
) -> Path:
    """Put a run into the store in one step and return its folder.

    A run already there stays as it is, unless it is damaged; weights are added to it when it has none. A folder of the
    run's own files is moved into it.
    """
    folder = store / record["id"]
    with _scratch(store) as scratch, files.writing(folder):
        # Losses do not repeat, so dictionaries gain nothing.
        records.write_table(scratch / HISTORY, history, {"run": record["id"]}, use_dictionary=False)
        records.write_json(scratch / RECORD, record)
        if weights is not None:
            _write_tensors(scratch / WEIGHTS, weights, {"run": record["id"]})
        if own_files is not None and own_files.is_dir():
            own_files.rename(scratch / "files")
        try:
            scratch.rename(folder)
        except OSError:  # another writer was first, or the store cannot be written
            if not folder.is_dir():
                raise
            if find(store, Identity(record["id"], record)) is None:
                scratch.rename(folder)
            elif weights is not None:
                os.replace(scratch / WEIGHTS, folder / WEIGHTS)
    return folder


def read_run(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """A run's record and history. Raises `DataError`, naming the file, for a damaged one."""
    record = read_record(folder)
    return record, read_history(folder, record).to_pandas()


def read_record(folder: str | Path) -> dict[str, Any]:
    """A run's `run.json`, checked. Raises `DataError` for a damaged or foreign one."""
    file = os.path.join(folder, RECORD)  # paths as objects would take as long as the reading
    record = records.read_json(file, LARGEST_RECORD)
    schemas.check(schemas.Run, record, file)
    if record["id"] != os.path.basename(folder):
        raise DataError(f"{file}: is of the run {record['id']}, in a folder of another name: a copy?")
    return record


def read_history(folder: Path, record: Mapping[str, Any]) -> Any:
    """A run's history as a table of pyarrow, one row a window: `window`, `step`, `loss`, `seconds`."""
    file = folder / HISTORY
    rows, notes = records.read_rows(file)
    if notes.get("run") != record["id"]:
        raise DataError(f"{file}: not the history of {record['id']}")
    return records.check_history(file, rows)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The trained weights of a run. Raises `DataError` for others than the record says."""
    record, file = read_record(folder), folder / WEIGHTS
    tensors, _ = _read_tensors(file)
    if weights_digest(tensors) != record["summary"].get("weights"):
        raise DataError(f"{file}: damaged: not the weights that {RECORD} tells of")
    return tensors


# --- runs that are not ---------------------------------------------------------------------------------------


def checkpoint_file(store: Path, name: str) -> Path:
    """Where the checkpoint of an unfinished run is kept."""
    return store / WORK / f"{name}.safetensors"


def files_folder(store: Path, name: str, keep: bool) -> Path:
    """The folder of the files of an unfinished run, with what an interrupted one left in it if that is to be kept."""
    folder = store / WORK / name
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    with files.writing(f"the store {store}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_checkpoint(file: Path, tensors: dict[str, torch.Tensor], notes: dict[str, Any]) -> None:
    """Replace the checkpoint in one step: one safetensors file, with JSON notes in its header."""
    _write_tensors(file, tensors, {"gpulab": json.dumps({"format": CHECKPOINT_FORMAT, **notes})})


def resume(file: Path, restore: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> bool:
    """Go on from a checkpoint, if there is one; a damaged one is set aside with a warning, and the run begins anew."""
    if not os.path.lexists(file):
        return False
    try:
        restore(*read_checkpoint(file))
    except Exception as error:  # whatever a checkpoint of another training leads to
        why = str(error) if isinstance(error, DataError) else f"{file}: not a checkpoint of this run ({error!r:.200})"
        moved = set_aside(file.parents[1], file)
        warnings.warn(f"{why}; a damaged checkpoint: the run starts anew (set aside in {moved})", stacklevel=3)
        return False
    return True


def read_checkpoint(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the notes of a checkpoint. Raises `DataError` for a damaged or foreign one."""
    tensors, metadata = _read_tensors(file)
    notes = files.read_json(file, metadata.get("gpulab", "null").encode())
    if isinstance(notes, dict) and notes.get("format") != CHECKPOINT_FORMAT:
        raise DataError(f"{file}: a checkpoint of another version of gpulab")
    return tensors, schemas.check(schemas.Checkpoint, notes, file)


def _write_tensors(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save

    # Cloned, because a tensor that two names share could not be stored.
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    files.write(file, files.seal(save(own, {**metadata, "seal": files.UNSEALED})))


def _read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = files.read(file)
    files.check_seal(file, content)
    try:
        header = files.read_json(file, content[8 : 8 + int.from_bytes(content[:8], "little")])
        return load(content), header["__metadata__"]
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"{file}: not tensors: {error}") from None


@contextlib.contextmanager
def _scratch(store: Path) -> Iterator[Path]:
    scratch = store / WORK / files.scratch_name()
    with files.writing(f"the store {store}"):
        scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
