"""One run at rest: a folder with `run.json`, what was run and what came of it, and `results.safetensors`, its history.

Where weights are kept, they lie beside the history; a function's own files lie in the folder `files`. A run is written
to a folder of its own and moved into place in one step, so many writers need no lock: the first to finish a run wins,
and its copy and a later one differ in nothing but the time. Both files are sealed; one that was damaged since is found
when it is read, and its run is set aside and trained again. A checkpoint is a file like the results.
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
from gpulab.errors import DataError
from gpulab.settings import arithmetic
from gpulab.store import records, schemas
from gpulab.store.identities import Identity, weights_digest

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    import torch

    Tensors = dict[str, torch.Tensor]

RECORD, RESULTS = "run.json", "results.safetensors"
WORK, DAMAGED = ".unfinished", ".damaged"  # folders in a store: checkpoints and half-written runs; what was set aside
FORMAT = 3  # of results and checkpoints
WEIGHT = "weights."  # how the names of weights begin among the results
RUN_NAME = re.compile(r"-seed-?\d+-[0-9a-f]{10}$")  # how the names of runs end
LARGEST_RECORD = 1 << 24  # bytes


# --- runs that are done ------------------------------------------------------------------------------------


def begun(identity: Identity, machine_passport: Mapping[str, Any], **notes: str | None) -> dict[str, Any]:
    """The record of a run that begins now; `notes` are no part of what identifies it."""
    return {
        "format": records.FORMAT,
        **identity.record,
        "arithmetic": arithmetic(),
        "passport": dict(machine_passport),
        **notes,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def find(store: Path, identity: Identity, with_weights: bool = False) -> Path | None:
    """The folder of a run that the store holds whole, and with it the trained weights if they are asked for.

    A damaged one is set aside, and a warning says so: the run is not done. Another says what cannot be known.
    """
    if identity.unknown:
        unknown_names = ", ".join(identity.unknown)
        warnings.warn(
            f"{unknown_names}: its content cannot be known: this run is not resumed, nor taken for another",
            stacklevel=3,
        )
    folder = store / identity.id
    if not os.path.lexists(folder):
        return None
    try:
        weights = read_run(folder)[2]
    except DataError as error:
        if moved := set_aside(store, folder):
            warnings.warn(f"{error}; the run is trained again (set aside in {moved})", stacklevel=3)
        return None
    return None if with_weights and weights is None else folder


def is_run(path: str | Path) -> bool:
    """Whether a folder is a run's, or what is left of one: by a file in it, or by its name."""
    inside = any(os.path.lexists(os.path.join(path, name)) for name in (RECORD, RESULTS))
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
    history: Mapping[str, Any],
    weights: Tensors | None = None,
    own_files: Path | None = None,
) -> Path:
    """Put a run into the store in one step and return its folder.

    A run already there stays as it is, unless it is damaged; weights are added to it when it has none. A folder of the
    run's own files is moved into it.
    """
    folder = store / record["id"]
    with _scratch(store) as scratch, files.writing(folder):
        records.write_json(scratch / RECORD, record)
        write_results(scratch, record["id"], history, weights)
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
                _add_weights(folder, weights)
    return folder


def _add_weights(folder: Path, weights: Tensors) -> None:
    """Keep the weights of a run that was kept without them, if they are those that its record tells of."""
    record, history, existing = read_run(folder)
    if existing is None and weights_digest(weights) == record["summary"].get("weights"):
        write_results(folder, record["id"], history, weights)
    elif existing is None:
        warnings.warn(f"{folder}: trained again, it ended with other weights, which are not kept", stacklevel=4)


def read_run(folder: Path) -> tuple[dict[str, Any], pd.DataFrame, Tensors | None]:
    """A run's record, history, and weights where it has any. Raises `DataError`, naming the file, for a damaged one."""
    record = read_record(folder)
    history, weights = read_results(folder, record["id"])
    return record, history.to_pandas(), weights


def read_record(folder: str | Path) -> dict[str, Any]:
    """A run's `run.json`, checked. Raises `DataError` for a damaged or foreign one, or without results beside it."""
    file = os.path.join(folder, RECORD)  # paths as objects would take as long as the reading
    record = records.read_json(file, LARGEST_RECORD)
    schemas.check(schemas.Run, record, file)
    if record["id"] != os.path.basename(folder):
        raise DataError(f"{file}: is of the run {record['id']}, in a folder of another name: a copy?")
    if not os.path.isfile(results := os.path.join(folder, RESULTS)):
        raise DataError(f"{results}: no such file")
    return record


def read_results(folder: Path, run: str) -> tuple[pyarrow.Table, Tensors | None]:
    """A run's history, one row a window: `window`, `step`, `loss`, `seconds`; and its weights where it has any."""
    import pyarrow

    file = folder / RESULTS
    tensors, notes = read_tensors(file)
    if notes.get("run") != run:
        raise DataError(f"{file}: not the results of {run}")
    weights = {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
    with files.reading(file, "not a history"):
        history = pyarrow.table({name: tensors[name].numpy() for name in records.HISTORY})
    return records.check_history(file, history), weights or None


def write_results(folder: Path, run: str, history: Mapping[str, Any], weights: Tensors | None = None) -> None:
    """Write the results of a run into its folder, or replace them, in one step."""
    import numpy as np
    import torch

    tensors = {name: torch.tensor(np.asarray(history[name])) for name in records.HISTORY}
    tensors |= {WEIGHT + name: tensor for name, tensor in (weights or {}).items()}
    write_tensors(folder / RESULTS, tensors, {"run": run})


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


def write_checkpoint(file: Path, tensors: Tensors, notes: dict[str, Any]) -> None:
    """Replace the checkpoint in one step."""
    write_tensors(file, tensors, notes)


def resume(file: Path, restore: Callable[[Tensors, dict[str, Any]], None]) -> bool:
    """Go on from a checkpoint, if there is one; a damaged one is set aside with a warning, and the run begins anew."""
    if not os.path.lexists(file):
        return False
    try:
        restore(*read_checkpoint(file))
    except Exception as error:  # whatever a checkpoint of another training leads to
        named = str(file) in str(error)
        why = str(error) if named else f"{file}: not a checkpoint of this run ({error!r:.200})"
        moved = set_aside(file.parents[1], file)
        warnings.warn(f"{why}; a damaged checkpoint: the run starts anew (set aside in {moved})", stacklevel=3)
        return False
    return True


def read_checkpoint(file: Path) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the notes of a checkpoint. Raises `DataError` for a damaged or foreign one."""
    tensors, notes = read_tensors(file)
    return tensors, schemas.check(schemas.Checkpoint, notes, file)


# --- the format of both --------------------------------------------------------------------------------------


def write_tensors(file: Path, tensors: Tensors, notes: dict[str, Any]) -> None:
    """Write tensors, in one step, as a safetensors file with JSON notes and a seal in its header."""
    from safetensors.torch import save

    # Cloned, because a tensor that two names share could not be stored.
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    metadata = {"gpulab": json.dumps({"format": FORMAT, **notes}), "seal": files.UNSEALED}
    files.write(file, files.seal(save(own, metadata)))


def read_tensors(file: Path) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the notes of such a file. Raises `DataError` for a damaged or foreign one."""
    from safetensors.torch import load

    content = files.read(file)
    files.check_seal(file, content)
    with files.reading(file, "not tensors"):
        header = files.read_json(file, content[8 : 8 + int.from_bytes(content[:8], "little")])
        notes = files.read_json(file, header["__metadata__"]["gpulab"].encode())
        if notes["format"] != FORMAT:
            raise DataError(f"{file}: of another version of gpulab")
        return load(content), notes


@contextlib.contextmanager
def _scratch(store: Path) -> Iterator[Path]:
    """A folder in the store for what is moved into place, or else removed."""
    scratch = store / WORK / files.scratch_name()
    with files.writing(f"the store {store}"):
        scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
