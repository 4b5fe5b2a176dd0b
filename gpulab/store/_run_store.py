"""One run in a store: writing, finding and reading it, and the quarantine of damaged runs.

A store is a folder, and each run in it is a folder with two files. `run.json` is the record: what
was run, and its results. `results.safetensors` holds the history and, if they are kept, the
weights. A checkpoint has the format of this second file.

A run is written to a scratch folder, which is then renamed in one step, so several writers need no
lock. The first one to finish a run stores it. The copies of other writers differ from it only in
the measured times, and are discarded. A damaged run is detected when it is read. It is then
quarantined and trained again.

Runs can be packed into one Parquet file for sharing (`gpulab.store.pack`). Such a file can be read
like a store, and a store may contain such files in addition to its folders.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpulab import files
from gpulab.errors import DataError, GpulabError, UsageError
from gpulab.numerics._flags import arithmetic
from gpulab.store import recorded
from gpulab.store._records import RunRecord, check_record
from gpulab.store._run_identity import Identity, weights_digest
from gpulab.store._tensors import Tensors, read_tensors, write_tensors

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

History = Any  # the columns of a history by name: a structured array, or a data frame

RECORD_FILE = "run.json"
RESULTS_FILE = "results.safetensors"
WORK_FOLDER = ".unfinished"  # in a store, for checkpoints and half-written runs
DAMAGED_FOLDER = ".damaged"  # in a store, for quarantined files and folders
WEIGHT_PREFIX = "weights."  # the prefix of the names of weights in the file of results
MAX_RECORD_BYTES = 1 << 24  # the largest size of a record


def store_folder(store: str | Path | None = None) -> Path:
    """Return the folder of a store, by default `$GPULAB_STORE`, or `runs` in the current folder.

    Raises:
        UsageError: For an address such as `s3://bucket`, and for a name that is not UTF-8.
    """
    store = (os.environ.get("GPULAB_STORE") or "runs") if store is None else store
    # One letter before the colon is a drive of Windows. In a `Path`, `//` has become `/`.
    is_address = re.match(r"[a-z0-9]{2,}:[/\\]", str(store))
    if not isinstance(store, str | Path) or is_address:
        raise UsageError(
            f"store {str(store)!r}: expected a local folder; copy the runs into one first"
        )
    try:
        str(store).encode()
    except UnicodeEncodeError:  # a table of runs could not hold their paths
        raise UsageError(
            f"{store}: this name is not valid UTF-8 and cannot be written into a table; rename it"
        ) from None
    return Path(store)


def list_entries(store: Path) -> list[str]:
    """List the entries of a store: first the folders of runs, then the files of packed runs.

    Each entry is a path, and both groups are sorted. If the store is itself a file, it is the only
    entry. A store that does not exist has no entries. Hidden files and folders are ignored.

    Raises:
        DataError: If the folder cannot be read.

    Examples:
        >>> import tempfile
        >>> store = Path(tempfile.mkdtemp())
        >>> for folder in ("b", "a.parquet", ".hidden"):
        ...     (store / folder).mkdir()
        >>> for file in ("packed.parquet", ".half.parquet", "notes.txt"):
        ...     (store / file).touch()
        >>> [Path(path).name for path in list_entries(store)]
        ['a.parquet', 'b', 'packed.parquet']
    """
    with files.convert_read_errors(store):
        if not store.is_dir():
            return [str(store)] if os.path.lexists(store) else []
        names = os.listdir(store)
    paths = sorted(os.path.join(store, name) for name in names if name[0] != ".")
    folders = []
    packed_files = []
    for path in paths:
        if os.path.isdir(path):
            folders.append(path)
        elif path.endswith(".parquet"):
            packed_files.append(path)
    return folders + packed_files


@dataclass(frozen=True)
class RunEntry:
    """A run in a store, with its record and a function that reads its history.

    Attributes:
        record: The complete content of `run.json`.
        path: The folder of the run, or the file of packed runs that contains it.
        file: The file that contains the record.
        read_history: A function that reads the history, with one row for each window.
    """

    record: RunRecord
    path: str
    file: str
    read_history: Callable[[], pyarrow.Table]


class StoredRun(NamedTuple):
    """A run as a store keeps it.

    Attributes:
        record: The content of `run.json`.
        history: A data frame with one row for each window: `window`, `step`, `loss` and `seconds`.
        weights: The trained weights by name; None if they were not kept.
    """

    record: RunRecord
    history: pd.DataFrame
    weights: Tensors | None


def read_entry(path: str) -> list[RunEntry]:
    """Read the record of the run in a folder, or the records of all runs in a packed file.

    Raises:
        DataError: If a file is damaged or foreign, if the folder is not named by the id of the run,
            or if the run has no results. The message names the file.
    """
    if not os.path.isdir(path):
        return [
            # A packed file is both the place of its runs and the file of their records.
            RunEntry(
                record=check_record(path, record), path=path, file=path, read_history=read_history
            )
            for record, read_history in recorded.read_packed(Path(path))
        ]
    # Paths are texts here: creating `Path` objects would take as long as reading the files.
    file = os.path.join(path, RECORD_FILE)
    record = check_record(file, recorded.read_document(file, MAX_RECORD_BYTES))
    if record["id"] != os.path.basename(path):
        raise DataError(
            f"{file}: belongs to the run {record['id']}, but its folder has another name (a copy?)"
        )
    results = os.path.join(path, RESULTS_FILE)
    if not os.path.isfile(results):
        raise DataError(f"{results}: no such file")

    def read_history() -> pyarrow.Table:
        history, _weights = read_results(path)
        return history

    return [RunEntry(record=record, path=path, file=file, read_history=read_history)]


def find_forbidden(path: str) -> str | None:
    """Return the folder or file of a run that this process has no permission to read, if any.

    Args:
        path: The folder of a run, or a file of packed runs.
    """
    run_files = [path]
    if os.path.isdir(path):
        run_files = [os.path.join(path, name) for name in (RECORD_FILE, RESULTS_FILE)]
    for file in run_files:
        try:
            with open(file, "rb"):
                continue
        except PermissionError:
            # Without permission to search the folder, it is not known which files it has.
            return file if os.path.lexists(file) else path
        except OSError:  # the file is missing, or is a folder
            continue
    return None


def begin_record(
    identity: Identity, machine_passport: Mapping[str, Any], **notes: str | None
) -> dict[str, Any]:
    """Create the record of a run that begins now.

    The `notes`, such as the command line, are recorded but are not part of the run's identity.
    """
    return {
        **identity.record,
        "arithmetic": arithmetic(),
        "passport": dict(machine_passport),
        **notes,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def find_run(store: Path, identity: Identity) -> StoredRun | None:
    """Read a run, or return None if the store does not have it.

    A damaged run is quarantined with a warning and reported as missing.

    Raises:
        GpulabError: If the run may not be read. It is not damaged, and stays where it is.
    """
    folder = store / identity.id
    if not os.path.lexists(folder):
        return None
    try:
        return read_run(folder)
    except DataError as error:
        forbidden_path = find_forbidden(str(folder))
        if forbidden_path:
            raise GpulabError(
                f"{forbidden_path}: cannot be read: permission denied; the store has this run and"
                " does not train it again: allow reading, or choose another store"
            ) from None
        quarantined = quarantine(store, folder)
        if quarantined:
            warnings.warn(
                f"{error}; the run is trained again (damaged one moved to {quarantined})",
                stacklevel=3,
            )
        return None


def quarantine(store: Path, path: Path) -> Path | None:
    """Move a damaged file or folder to quarantine and return its new path.

    The result is None if another process has already moved it.
    """
    target = store / DAMAGED_FOLDER / f"{path.name}-{uuid.uuid4().hex[:6]}"
    with files.convert_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            return path.rename(target)
        except FileNotFoundError:
            return None


def write_run(
    store: Path, record: Mapping[str, Any], history: History, weights: Tensors | None = None
) -> Path:
    """Write a run into a store atomically.

    The run may have been trained on another machine. If the store already has the run, the stored
    run is kept, unless it is damaged. Weights are added to a run that has none.

    Args:
        store: The folder of the store.
        record: The record of the run, which contains its id.
        history: The history of the run.
        weights: The trained weights, as `model.state_dict()` returns them; None to store none.

    Returns:
        The folder of the run.

    Raises:
        GpulabError: If the store cannot be written.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import gpulab as gl
        >>> run = gl.train("autoencoder", profile="smoke", frames=40, progress=False)
        >>> folder = Path(tempfile.mkdtemp())
        >>> gl.store.write_run(folder, run.record, run.history) == folder / gl.runs(folder).id[0]
        True
    """
    folder = store / record["id"]
    scratch = store / WORK_FOLDER / files.scratch_name()
    try:
        with files.convert_write_errors(folder):
            recorded.write_document(scratch / RECORD_FILE, record)
            write_results(scratch, record["id"], history, weights)
            try:
                scratch.rename(folder)
            except OSError:  # another writer was first, or the store cannot be written
                if not folder.is_dir():
                    raise
                existing = find_run(store, Identity(record["id"], dict(record)))
                if existing is None:  # it was damaged, and has been moved to quarantine
                    scratch.rename(folder)
                elif existing.weights is None and weights is not None:
                    _add_weights(folder, existing, weights)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _add_weights(folder: Path, run: StoredRun, weights: Tensors) -> None:
    """Add weights to a run that was stored without them.

    A warning is given, and nothing is added, if they do not match the digest in its record.
    """
    if weights_digest(weights) == run.record["summary"].get("weights"):
        write_results(folder, folder.name, run.history, weights)
    else:
        warnings.warn(
            f"{folder}: trained again, the run ended with different weights, which are not stored",
            stacklevel=4,
        )


def read_run(folder: Path) -> StoredRun:
    """Read a run from its folder; a damaged run raises a `DataError` that names the file."""
    (entry,) = read_entry(str(folder))
    history, weights = read_results(folder)
    return StoredRun(entry.record, history.to_pandas(), weights)


def read_results(folder: str | Path) -> tuple[pyarrow.Table, Tensors | None]:
    """Read a run's history, and its weights if they were kept.

    The history has a row for each window, and the columns `window`, `step`, `loss` and `seconds`.

    Raises:
        DataError: If the file is damaged or belongs to another run.
    """
    file = Path(folder) / RESULTS_FILE
    tensors, notes = read_tensors(file)
    if notes.get("run") != file.parent.name:
        raise DataError(f"{file}: does not contain the results of run {file.parent.name}")
    weight_names = [name for name in tensors if name.startswith(WEIGHT_PREFIX)]
    weights = {name.removeprefix(WEIGHT_PREFIX): tensors[name] for name in weight_names}
    columns = {
        name: tensor.numpy() for name, tensor in tensors.items() if name in recorded.HISTORY_TYPES
    }
    return recorded.check_history(file, columns), weights or None


def write_results(folder: Path, run: str, history: History, weights: Tensors | None = None) -> None:
    """Write the history and weights of a run into its folder atomically, or replace them."""
    import numpy as np
    import torch

    tensors = {name: torch.tensor(np.array(history[name])) for name in recorded.HISTORY_TYPES}
    tensors |= {WEIGHT_PREFIX + name: tensor for name, tensor in (weights or {}).items()}
    write_tensors(folder / RESULTS_FILE, tensors, {"run": run})
