"""Stores: the runs in a folder, or in a file of packed ones, as tables; and one run, as it is written and read.

A run is a folder with `run.json`, what was run and what came of it, and `results.safetensors`, its history and, where
they are kept, its weights. It is written to a folder of its own and
moved into place in one step, so many writers need no lock: the first to finish a run wins, and its copy and a later one
differ in nothing but the time. A run that was damaged since is found when it is read, set aside and trained again.
A checkpoint is a file like the results. Runs that are to be shared are packed into one file (`pack`); it can be read
wherever a store can, and a store may hold such files beside its folders.
"""

from __future__ import annotations

import functools
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
from gpulab.errors import DataError, UsageError
from gpulab.files import digest
from gpulab.numerics.flags import arithmetic
from gpulab.passports import machine
from gpulab.store import recorded
from gpulab.store.identities import FACTORS, Identity, factors_of_record, of_content, weights_digest

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    import torch

    Tensors = dict[str, torch.Tensor]
    Run = tuple[dict[str, Any], pd.DataFrame, Tensors | None]  # its record, its history, its weights

Record = dict[str, Any]  # what `run.json` says
Row = dict[str, Any]  # what the table of runs says
History = Any  # the columns of a history by their names: a structured array, or a data frame

RECORD, RESULTS = "run.json", "results.safetensors"
WORK, DAMAGED = ".unfinished", ".damaged"  # folders in a store: checkpoints and half-written runs; what was set aside
WEIGHT = "weights."  # how the names of weights begin among the results
LARGEST_RECORD = 1 << 24  # bytes
MOST_NAMED = 10  # of damaged runs, in one warning
SUMMARY = ("final_loss", "heldout_loss", "seconds", "frames_per_second", "weights")
COLUMNS = [
    *("experiment", "profile", "setting", "device", "seed", "rerun"),
    *FACTORS,
    *("status", *SUMMARY, "gradients", "diverged_at", "registered"),
    *("machine", "cpu", "gpu", "torch", "gpulab", "data", "frame_size", "scene_seed", "speed", "frames"),
    *("protocol", "recorded", "id", "path"),
]
# Empty for a run of a function, which may have options of these names.
OPEN = {"data", "speed", "frames", *FACTORS} - {"flip"}


def store_folder(store: str | Path | None = None) -> Path:
    """The folder of a store, by default `$GPULAB_STORE`, or the folder `runs` where you are.

    Raises `UsageError` for an address such as `s3://bucket`, which is no folder.
    """
    store = (os.environ.get("GPULAB_STORE") or "runs") if store is None else store
    if not isinstance(store, str | Path) or re.match(
        r"[a-z0-9]{2,}:[/\\]", str(store)
    ):  # one letter is a drive; a path has lost one of its slashes
        raise UsageError(f"store {str(store)!r}: expected a folder; copy what lies elsewhere into one first")
    try:
        str(store).encode()
    except UnicodeEncodeError:  # a table of runs could not hold their paths
        raise UsageError(f"{store}: this name is not UTF-8, and cannot be written down: rename it") from None
    return Path(store)


# --- all runs of a store, as tables ------------------------------------------------------------------------


def runs(store: str | Path | None = None) -> pd.DataFrame:
    """List all runs in a store as a data frame with a row for each run.

    A damaged run is skipped, and a warning names it; `attrs["damaged"]` of the frame says how many there were. A run
    that is there twice, as a folder and packed, is listed once.

    Args:
        store: A folder, or a file of packed runs. By default `$GPULAB_STORE`, or the folder `runs`.

    Returns:
        A data frame with a row for each run, empty where there is no such store.

        It has these columns:

        - `experiment` (the network, or the function that trained), `profile`, `setting`, `device` (`cpu`, `cuda`, …),
          `seed`, `rerun` (0 for the first run).
        - `loader` (how frames reached the device), `decoder` (of the JPEG frames of some recorded runs), `flip` (the
          initial weight whose last bit was changed), `fast` (whether gradients may be computed in fewer operations),
          `draws` (whose generator drew the initial weights), `covariance` (how the whitener computes it), `truncation`
          (what PredNet's backpropagation through time is cut off from).
        - `status` (`finished` or `diverged`), `final_loss`, `heldout_loss`, `seconds`, `frames_per_second` (missing
          where other trainings shared the GPU), `weights` (the SHA-256 of the trained weights: equal digests, equal
          bits), `gradients` (whether by autograd or by formulas that are written out; None where nobody noted it),
          `diverged_at` (the update).
        - `registered`: Name and SHA-256 of the registration that the run was made under.
        - `machine` (the chip that did the work), `cpu`, `gpu`, `torch` and `gpulab` (versions).
        - `data`, `frame_size` (height×width), `scene_seed` and `speed` (what a rendered scene was drawn from, and how
          fast it moves), `frames` (how many were trained on).
        - `protocol`: A digest of model, data, length and learning rate. Runs with equal ones can be compared.
        - `recorded` (whether the run was shipped with gpulab), `id`, `path`.

        Runs of a training of your own have further columns: `options` (all of them, as JSON), one for each option, and
        one for each number that it gave.

    Raises:
        UsageError: For an address such as `s3://bucket`, which is no folder.

    Examples:
        >>> import gpulab as gl
        >>> gl.runs("a-folder-that-is-not-there").empty
        True
    """
    return _frame(entries(store_folder(store)))


def recorded_runs(study: str | None = None) -> pd.DataFrame:
    """List the runs that are shipped with gpulab, as a data frame.

    They were recorded on several machines. Each has the passport of its machine in its record.

    Args:
        study: In place of these, the runs of one question, such as `longer`: those in `data/studies/STUDY.parquet` and
            `data/studies/STUDY-*.parquet`.

    Returns:
        A data frame with a row for each run and the columns of `gpulab.runs`; `recorded` is true.

    Raises:
        UsageError: For a study that does not exist; the message names those that do.

    Examples:
        >>> import gpulab as gl
        >>> bool(gl.recorded_runs().recorded.all()), bool(gl.recorded_runs().frames_per_second.notna().any())
        (True, True)
        >>> sorted(set(gl.recorded_runs("longer").experiment))
        ['prednet']
    """
    if study is None:
        return _frame(entries(recorded.recorded_folder("runs"))).assign(recorded=True)
    packed = sorted(recorded.recorded_folder("studies").glob("*.parquet"))
    names = [file.stem.partition("-")[0] for file in packed]
    if study not in names:
        raise UsageError(f"study {study!r}: expected one of {', '.join(dict.fromkeys(names))}")
    chosen = [str(file) for file, name in zip(packed, names, strict=True) if name == study]
    return _frame(chosen).assign(recorded=True)


def history(frame: pd.DataFrame) -> pd.DataFrame:
    """Read the losses along the way of the runs in a frame.

    Args:
        frame: A data frame from `gpulab.runs`, or some of its rows.

    Returns:
        A data frame with a row for each window of each run, empty for an empty frame. Its columns are `window` (from
        0), `step` (updates so far), `loss` (the mean over the window), `seconds` (since the beginning), `frames_seen`
        (frames or images up to the end of the window), and of the run `id`, `experiment`, `profile`, `setting`,
        `loader`, `seed`, `rerun`, `recorded` and `machine`.

    Raises:
        DataError: Where the history of a run is missing or damaged; the message names it.

    Examples:
        >>> import gpulab as gl
        >>> some = gl.recorded_runs().head(2)
        >>> gl.store.history(some).groupby("id").loss.last().size
        2
        >>> gl.store.history(some).columns[:6].tolist()
        ['window', 'step', 'loss', 'seconds', 'frames_seen', 'id']
        >>> gl.store.history(some).groupby("id").frames_seen.agg(["min", "max"]).values.tolist()
        [[20, 60000], [20, 60000]]
    """
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    if frame.empty:
        return pd.DataFrame()
    records, tables = zip(*with_histories(frame), strict=True)
    lengths = [table.num_rows for table in tables]
    windows = np.repeat([record["configuration"].get("window", 1) for record in records], lengths)
    histories = pa.concat_tables(tables).to_pandas()
    histories["frames_seen"] = (histories["window"] + 1) * windows
    of_run = frame[["id", "experiment", "profile", "setting", "loader", "seed", "rerun", "recorded", "machine"]]
    repeated = of_run.iloc[np.repeat(range(len(frame)), lengths)].reset_index(drop=True)
    return pd.concat([histories, repeated], axis=1)


def pack(store: str | Path | pd.DataFrame, file: str | Path) -> int:
    """Pack runs, without their weights, into one file that can be shared.

    Args:
        store: A folder of runs, or another file of packed runs; or the rows of `gpulab.runs` that are to be packed.
        file: The file to write. `gpulab.runs(file)` reads it. In a store it is found if its name ends in `.parquet`.

    Returns:
        How many runs were packed.

    Raises:
        DataError: Where there are no runs, or one is damaged.
        GpulabError: Where the file cannot be written.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import gpulab as gl
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "some.parquet")
        ...     gl.store.pack(gl.recorded_runs().head(2), file), len(gl.runs(file))
        (2, 2)
    """
    frame = runs(store) if isinstance(store, str | Path) else store
    if frame.empty:
        raise DataError(f"{file}: not written: there are no runs in {'the table' if store is frame else store}")
    records, histories = zip(*with_histories(frame), strict=True)
    recorded.write_packed(Path(file), list(records), list(histories))
    return len(frame)


def with_histories(frame: pd.DataFrame) -> Iterator[tuple[Record, pyarrow.Table]]:
    """The record and the history of each row of `runs`."""
    by_id = functools.cache(lambda path: {row["id"]: (record, load) for record, row, load in read_entry(path)})
    for run in frame.itertuples():
        try:
            record, load = by_id(run.path)[run.id]
            yield record, load()
        except DataError as error:
            raise DataError(f"{error}; doing the same experiment again sets a damaged run aside") from None


def entries(store: Path) -> list[str]:
    """The paths of the runs in a store, in order, and then of its files of packed ones.

    >>> import tempfile
    >>> store = Path(tempfile.mkdtemp())
    >>> for folder in ("b", "a.parquet", ".hidden"):
    ...     (store / folder).mkdir()
    >>> for file in ("packed.parquet", ".half.parquet", "notes.txt"):
    ...     (store / file).touch()
    >>> [Path(path).name for path in entries(store)]
    ['a.parquet', 'b', 'packed.parquet']
    """
    if not store.is_dir():
        return [str(store)] if os.path.lexists(store) else []
    paths = sorted(os.path.join(store, name) for name in os.listdir(store) if name[0] != ".")
    folders = [path for path in paths if os.path.isdir(path)]
    return folders + [path for path in paths if path.endswith(".parquet") and not os.path.isdir(path)]


def read_entry(path: str) -> list[tuple[Record, Row, Callable[[], pyarrow.Table]]]:
    """A run, or those in a file of packed ones: the record, the row in the table of runs, what reads the history.

    Raises `DataError`, naming the file, for a damaged or foreign one, or without results beside it.
    """
    if not os.path.isdir(path):
        return [(record, _row(path, path, record), load) for record, load in recorded.read_packed(Path(path))]
    file = os.path.join(path, RECORD)  # paths as objects would take as long as the reading
    record = recorded.read_json(file, LARGEST_RECORD)
    row = _row(file, path, record)
    if row["id"] != os.path.basename(path):
        raise DataError(f"{file}: is of the run {row['id']}, in a folder of another name: a copy?")
    if not os.path.isfile(results := os.path.join(path, RESULTS)):
        raise DataError(f"{results}: no such file")
    return [(record, row, lambda: read_results(path)[0])]


def _frame(paths: list[str]) -> pd.DataFrame:
    import pandas as pd

    from gpulab.report import Progress

    rows: dict[str, Row] = {}
    damaged: list[str] = []
    for path in Progress(paths, unit="run", leave=False, delay=2):
        try:
            for _, row, _ in read_entry(path):
                rows.setdefault(row["id"], row)
        except DataError as error:
            of_run = any(os.path.lexists(os.path.join(path, name)) for name in (RECORD, RESULTS))
            if of_run or not os.path.isdir(path):  # other folders are nobody's business
                damaged.append(str(error))
    if damaged:
        named = "; ".join(damaged[:MOST_NAMED]) + "; …" * (len(damaged) > MOST_NAMED)
        warnings.warn(f"{len(damaged)} damaged run(s) skipped, which are mended if done again: {named}", stacklevel=3)
    own = dict.fromkeys(name for row in rows.values() for name in row if name not in COLUMNS)
    frame = pd.DataFrame(list(rows.values()), columns=[*COLUMNS, *own])
    # A missing number becomes NaN; a function may have an option named speed that is no number.
    frame = frame.astype(dict.fromkeys((*SUMMARY[:4], "speed", "flip"), float), errors="ignore")
    # Runs that have the same of the others are in the order of their paths.
    frame = frame.sort_values(["experiment", "profile", "setting", "seed", "path"], ignore_index=True, kind="stable")
    frame.attrs["damaged"] = len(damaged)
    return frame


def _row(file: str, path: str, record: Record) -> Row:
    """The row of a run in the table; `DataError`, naming the file, for a record that lacks something of it."""
    with files.reading(file, "a damaged record"):
        passport, configuration, metrics = record["passport"], record["configuration"], record.get("metrics") or {}
        options = configuration.get("data_options", {})
        of_function = "source" in configuration
        device = record["setting"].partition(":")[0]
        row = {name: record[name] for name in ("experiment", "profile", "setting", "seed", "status", "id")}
        row |= {name: record.get(name) for name in ("gradients", "diverged_at", "registered")}
        row |= {name: record["summary"][name] for name in SUMMARY[:3]} | factors_of_record(record)
        row |= {name: record["summary"].get(name) for name in SUMMARY[3:]}
        row |= {
            "device": device,
            "rerun": record.get("rerun", 0),
            "machine": machine(passport, device),
            "cpu": passport["cpu"]["model"],
            "gpu": ", ".join(gpu["name"] for gpu in passport["gpus"]) or None,
            "torch": passport["software"]["torch"],
            "gpulab": passport["software"]["gpulab"],
            "data": None if of_function else configuration["data"],
            "frames": 0 if of_function else configuration["frames"],
            "frame_size": "x".join(map(str, options["size"])) if "size" in options else None,
            "scene_seed": options.get("scene_seed"),
            "speed": options.get("speed"),
            "protocol": digest(_learned(record))[:8],
            "recorded": False,
            "path": path,
        }
        return row | _own_columns(configuration["options"], metrics) if of_function else row


def _own_columns(options: dict[str, Any], metrics: dict[str, Any]) -> Row:
    """The columns that a run of a function fills in other ways, or has beside the others."""
    cells = {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in options.items()}
    cells.pop("loss", None)  # which loss: the column is how large
    own = {name: value for name, value in (cells | metrics).items() if name not in COLUMNS or name in OPEN}
    return {**dict.fromkeys(OPEN), "options": json.dumps(options), **own}


def _learned(record: dict[str, Any]) -> dict[str, Any]:
    """What was to be learned, which a factor among the options of a model should not change.

    >>> configuration = {"model_options": {"channels": [3, 4], "truncation": "loss"}}
    >>> _learned({"configuration": configuration})
    {'model_options': {'channels': [3, 4]}}
    """
    configuration = of_content(record["configuration"], record)
    if "source" in configuration:
        return {"source": configuration["source"], **({"content": record["content"]} if "content" in record else {})}
    options = {name: value for name, value in configuration.get("model_options", {}).items() if name not in FACTORS}
    return {**configuration, "model_options": options} if "model_options" in configuration else configuration


# --- one run -----------------------------------------------------------------------------------------------


def begun(identity: Identity, machine_passport: Mapping[str, Any], **notes: str | None) -> dict[str, Any]:
    """The record of a run that begins now; `notes` are no part of what identifies it."""
    return {
        **identity.record,
        "arithmetic": arithmetic(),
        "passport": dict(machine_passport),
        **notes,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def find(store: Path, identity: Identity) -> Run | None:
    """A run that the store holds whole, as `read_run` gives it.

    A damaged one is set aside, and a warning says so: the run is not done.
    """
    folder = store / identity.id
    if not os.path.lexists(folder):
        return None
    try:
        return read_run(folder)
    except DataError as error:
        if moved := set_aside(store, folder):
            warnings.warn(f"{error}; the run is trained again (set aside in {moved})", stacklevel=3)
        return None


def set_aside(store: Path, path: Path) -> Path | None:
    """Move what is damaged into the store's folder for it; None where another process already has."""
    moved = store / DAMAGED / f"{path.name}-{uuid.uuid4().hex[:6]}"
    with files.writing(moved):
        moved.parent.mkdir(parents=True, exist_ok=True)
        try:
            return path.rename(moved)
        except FileNotFoundError:
            return None


def write_run(store: Path, record: Record, history: History, weights: Tensors | None = None) -> Path:
    """Put a run into a store in one step, such as one that was trained on another machine.

    A run already there stays as it is, unless it is damaged; weights are added to it when it has none.

    Args:
        store: The folder.
        record: The run's `record`, and so its id.
        history: Its `history`.
        weights: Those of its `model`, as `state_dict` gives them, if they are to be kept.

    Returns:
        The run's own folder.

    Raises:
        GpulabError: Where the store cannot be written.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import gpulab as gl
        >>> run = gl.train("autoencoder", profile="smoke", frames=40, progress=False)
        >>> folder = Path(tempfile.mkdtemp())
        >>> gl.store.write_run(folder, run.record, run.history) == folder / gl.runs(folder).id[0]
        True
    """
    folder, scratch = store / record["id"], store / WORK / files.scratch_name()
    try:
        with files.writing(folder):
            recorded.write_json(scratch / RECORD, record)
            write_results(scratch, record["id"], history, weights)
            try:
                scratch.rename(folder)
            except OSError:  # another writer was first, or the store cannot be written
                if not folder.is_dir():
                    raise
                existing = find(store, Identity(record["id"], record))
                if existing is None:
                    scratch.rename(folder)
                elif existing[2] is None and weights is not None:
                    _add_weights(folder, existing, weights)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _add_weights(folder: Path, run: Run, weights: Tensors) -> None:
    """Keep the weights of a run that was kept without them, if they are those that its record tells of."""
    if weights_digest(weights) == run[0]["summary"].get("weights"):
        write_results(folder, folder.name, run[1], weights)
    else:
        warnings.warn(f"{folder}: trained again, it ended with other weights, which are not kept", stacklevel=4)


def read_run(folder: Path) -> Run:
    """A run's record, history, and weights where it has any. Raises `DataError`, naming the file, for a damaged one."""
    ((record, _, _),) = read_entry(str(folder))
    history, weights = read_results(folder)
    return record, history.to_pandas(), weights


def read_results(folder: str | Path) -> tuple[pyarrow.Table, Tensors | None]:
    """A run's history, one row a window: `window`, `step`, `loss`, `seconds`; and its weights where it has any."""
    file = Path(folder) / RESULTS
    tensors, notes = read_tensors(file)
    if notes.get("run") != file.parent.name:
        raise DataError(f"{file}: not the results of {file.parent.name}")
    weights = {name.removeprefix(WEIGHT): tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
    columns = {name: tensor.numpy() for name, tensor in tensors.items() if name in recorded.HISTORY}
    return recorded.as_history(file, columns), weights or None


def write_results(folder: Path, run: str, history: History, weights: Tensors | None = None) -> None:
    """Write the results of a run into its folder, or replace them, in one step."""
    import numpy as np
    import torch

    tensors = {name: torch.tensor(np.array(history[name])) for name in recorded.HISTORY}
    tensors |= {WEIGHT + name: tensor for name, tensor in (weights or {}).items()}
    write_tensors(folder / RESULTS, tensors, {"run": run})


def write_tensors(file: Path, tensors: Tensors, notes: dict[str, Any]) -> None:
    """Write tensors, in one step, as a safetensors file with JSON notes and a seal in its header."""
    from safetensors.torch import save

    # Cloned, because a tensor that two names share could not be stored.
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    header = {"gpulab": json.dumps({"format": recorded.FORMAT, **notes}), "seal": files.UNSEALED}
    files.write(file, files.seal(save(own, header)))


def read_tensors(file: Path) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the notes of such a file. Raises `DataError` for a damaged or foreign one."""
    from safetensors.torch import load

    content = files.read(file)
    with files.reading(file, "not tensors"):
        header = files.read_json(file, content[8 : 8 + int.from_bytes(content[:8], "little")])
        notes = recorded.checked(file, files.read_json(file, header["__metadata__"]["gpulab"].encode()), content)
        return load(content), notes
