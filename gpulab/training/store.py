"""Where runs are kept: one folder a run, `run.json` and `history.parquet`, whole or not there at all.

Runs that are to be shared are packed into one file (`pack`); a file of packed runs can be read wherever a store can,
and a store may hold such files beside its folders.

A run is written to a folder of its own and moved into place in one step, so many writers need no
lock: the first to finish a run wins, and its copy and a later one differ in nothing but the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import records
from gpulab.errors import DataError, GpulabError
from gpulab.settings import arithmetic
from gpulab.training.protocol import FACTORS, factors_of_record

if TYPE_CHECKING:
    import pandas as pd
    import torch

RUN_FORMAT = 1
CHECKPOINT_FORMAT = 1
WORK = ".unfinished"  # the folder in a store that holds checkpoints and half-written runs


def default_store() -> Path:
    """`$GPULAB_STORE`, or the folder `runs` where you are."""
    return Path(os.environ.get("GPULAB_STORE") or "runs")


def run_id(identity: dict[str, Any]) -> str:
    """A name for a run that depends on what was run, on what, and on nothing else."""
    digest = _digest(identity)[:10]
    words = (identity["experiment"], identity["profile"], identity["setting"], f"seed{identity['seed']}", digest)
    return "-".join(re.sub(r"[^a-z0-9.]+", "_", str(word).lower()) for word in words)


def begun(identity: dict[str, Any], here: Mapping[str, Any], command: str | None) -> dict[str, Any]:
    """The record of a run that begins now; `here` is the passport."""
    return {
        "format": RUN_FORMAT,
        **identity,
        "arithmetic": arithmetic(),
        "passport": dict(here),
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def identified(identity: dict[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """An identity with its id. On another chip or torch it is another run."""
    chip = here["cpu"]["model"] if identity["setting"].startswith("cpu") else here["gpus"]
    software = {key: here["software"][key] for key in ("torch", "gpulab")}
    return {"id": run_id({**identity, "chip": chip, **software}), **identity}


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def is_done(store: Path, name: str, with_weights: bool = False) -> bool:
    """Whether the store holds a run of this name, and with it the trained weights."""
    wanted = ("run.json", "weights.safetensors") if with_weights else ("run.json",)
    return all((store / name / file).is_file() for file in wanted)


def write_run(
    store: Path,
    record: dict[str, Any],
    history: pd.DataFrame,
    weights: dict[str, torch.Tensor] | None = None,
    files: Path | None = None,
) -> Path:
    """Put a run into the store in one step and return its folder.

    A run already there stays as it is; weights are added to it when it has none. A folder of `files` is moved into it.
    """
    folder = store / record["id"]
    with _scratch(store) as scratch:
        _write_history(scratch / "history.parquet", history)
        if weights is not None:
            _write_tensors(scratch / "weights.safetensors", weights, {"run": record["id"]})
        (scratch / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if files is not None and files.is_dir():
            files.rename(scratch / "files")
        try:
            scratch.rename(folder)
        except OSError:  # another writer was first, or the store cannot be written
            if not is_done(store, record["id"]):
                raise
            if weights is not None:
                (scratch / "weights.safetensors").replace(folder / "weights.safetensors")
    return folder


def _write_history(file: Path, history: pd.DataFrame) -> None:
    """Losses do not repeat, so dictionaries gain nothing; splitting the bytes of numbers does."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pandas(history, preserve_index=False).replace_schema_metadata(None)
    numbers = [name for name, kind in history.dtypes.items() if kind.kind == "f"]
    counts = [name for name in history.columns if name not in numbers]
    encoding = dict.fromkeys(numbers, "BYTE_STREAM_SPLIT") | dict.fromkeys(counts, "DELTA_BINARY_PACKED")
    pyarrow.parquet.write_table(
        table, file, compression="zstd", use_dictionary=False, column_encoding=encoding, store_schema=False
    )


def read_run(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """A run's record and history. Raises `DataError`, naming the file, for a damaged one."""
    return read_record(folder), read_history(folder)


def read_record(folder: Path) -> dict[str, Any]:
    """A run's `run.json`, checked. Raises `DataError` for a damaged or foreign one."""
    file = folder / "run.json"
    record = records.read_json(file, RUN_FORMAT)
    required = {"id", "experiment", "profile", "setting", "seed", "status", "summary", "passport"}
    if missing := sorted(required - record.keys()):
        raise DataError(f"{file}: lacks {', '.join(missing)}")
    return record


def read_history(folder: Path) -> pd.DataFrame:
    """A run's history, one row a window: `window`, `step`, `loss`, `seconds`."""
    import pandas as pd

    try:
        return pd.read_parquet(folder / "history.parquet")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'history.parquet'}: cannot be read: {error}") from None


def runs(store: str | Path | None = None) -> pd.DataFrame:
    """All runs in a store as one data frame, one row a run.

    Columns: `experiment`, `profile`, `setting`, `device`, `seed`, `rerun`, `loader` (how frames reached
    the device), `decoder` (of JPEG frames), `flip` (the initial weight whose last bit was changed), `draws`
    (whose generator drew the initial weights), `covariance` (how the whitener computes it), `status`,
    `final_loss`, `heldout_loss`, `seconds`, `frames_per_second`, `weights` (the SHA-256 of the trained
    weights, so that equal bits can be seen), `diverged_at`, `machine`, `cpu`, `gpu`, `torch`, `gpulab`,
    `data`, `speed` (of the motion in a rendered scene), `frames`, `protocol` (a digest of model, data,
    length and learning rate: runs with equal ones can be compared), `recorded`, `id` and `path`. A damaged
    run is reported as a warning and skipped. Runs of a function have, after these, `options` (all of them, as JSON)
    and a column for each option and each metric.

    Args:
        store: A folder, or a file of packed runs; by default `$GPULAB_STORE`, or the folder `runs`.

    Examples:
        >>> runs("a-folder-that-is-not-there").empty
        True
    """
    return _frame(default_store() if store is None else Path(store), recorded=False)


def recorded_runs() -> pd.DataFrame:
    """The runs that are shipped with gpulab, as `runs`; each has the passport of its machine.

    Examples:
        >>> bool(recorded_runs().recorded.all())
        True
    """
    return _frame(records.recorded_folder("runs"), recorded=True)


def record_of(run: Any) -> dict[str, Any]:
    """The whole record of a row of `runs`."""
    if Path(run.path).is_dir():
        return read_record(Path(run.path))
    return next(record for record in records.packed_runs(Path(run.path)) if record["id"] == run.id)


def metrics_of(run: Any) -> list[str]:
    """The names of the numbers that a row of `runs` has."""
    record = record_of(run)
    return list(record["metrics"] or {}) if "metrics" in record else ["final_loss", "heldout_loss"]


def history(frame: pd.DataFrame) -> pd.DataFrame:
    """The histories of the runs in a frame, one below the other, each row with the run's columns.

    `frames_seen` counts the frames, or images, up to the end of the row's window.
    """
    import pandas as pd

    recorded: dict[str, dict[str, Any]] = {}  # of files of packed runs, by id
    histories: dict[str, dict[str, pd.DataFrame]] = {}
    for path in {path for path in frame.path if Path(path).is_file()}:
        recorded[path] = {record["id"]: record for record in records.packed_runs(Path(path))}
        histories[path] = records.packed_histories(Path(path))
    parts = []
    for row in frame.itertuples():
        if row.path in recorded:
            record, part = recorded[row.path][row.id], histories[row.path][row.id]
        else:
            record, part = read_run(Path(row.path))
        part["frames_seen"] = (part.window + 1) * record["configuration"].get("window", 1)
        keys = ("id", "experiment", "profile", "setting", "seed", "rerun", "recorded", "machine")
        parts.append(part.assign(**{key: getattr(row, key) for key in keys}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def pack(store: str | Path, file: str | Path) -> int:
    """Pack all runs of a store, without weights, into one file that others can read; returns how many.

    Args:
        store: A folder, or another file of packed runs.
        file: Where to write; `gpulab.runs(file)` and `gpulab.history` read it.

    Raises:
        DataError: Where there are no runs.
        GpulabError: Where the file cannot be written.
    """
    frame = runs(store)
    if frame.empty:
        raise DataError(f"{store}: no runs to pack")
    whole = history(frame)[["id", *records.HISTORY]].groupby("id", sort=False)
    return records.pack_runs(Path(file), ((record_of(row), whole.get_group(row.id)) for row in frame.itertuples()))


COLUMNS = [
    *("experiment", "profile", "setting", "device", "seed", "rerun"),
    *FACTORS,
    *("status", "final_loss", "heldout_loss", "seconds", "frames_per_second", "weights", "diverged_at"),
    *("machine", "cpu", "gpu", "torch", "gpulab", "data", "speed", "frames", "protocol", "recorded", "id", "path"),
]
OPEN = {"data", "frames", *FACTORS} - {"flip"}  # empty for a run of a function, which may have options of these names


def _frame(store: Path, recorded: bool) -> pd.DataFrame:
    import pandas as pd

    rows, damaged = [], []
    entries = sorted(store.iterdir()) if store.is_dir() else [store] if store.is_file() else []
    for entry in entries:
        if entry.name.startswith(".") or not (entry.is_dir() or entry.suffix == ".parquet"):
            continue
        try:
            if entry.is_dir():
                row = _row(read_record(entry), entry, recorded)
                _check_history(entry / "history.parquet")
                rows.append(row)
            else:
                rows += [_row(record, entry, recorded) for record in records.packed_runs(entry)]
        except DataError as error:
            damaged.append(str(error))
    if damaged:
        warnings.warn(f"{len(damaged)} damaged run(s) skipped: " + "; ".join(damaged), stacklevel=3)
    numbers = dict.fromkeys(("final_loss", "heldout_loss", "seconds", "frames_per_second", "speed", "flip"), float)
    more = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
    frame = pd.DataFrame(rows, columns=[*COLUMNS, *more]).astype(numbers)  # JSON's null becomes NaN
    return frame.sort_values(["experiment", "profile", "setting", "seed"], ignore_index=True)


def _row(record: dict[str, Any], path: Path, recorded: bool) -> dict[str, Any]:
    try:
        passport, summary, configuration = record["passport"], record["summary"], record["configuration"]
        device = record["setting"].partition(":")[0]
        return {
            **{key: record[key] for key in ("experiment", "profile", "setting", "seed", "status", "id")},
            **{key: summary.get(key) for key in records.SUMMARY},
            **factors_of_record(record),
            "device": device,
            "rerun": record.get("rerun", 0),
            "diverged_at": record.get("diverged_at"),
            "machine": records.machine(passport, device),
            "cpu": passport["cpu"]["model"],
            "gpu": ", ".join(gpu["name"] for gpu in passport["gpus"]) or None,
            "torch": passport["software"]["torch"],
            "gpulab": passport["software"]["gpulab"],
            **(_of_function(record) if "source" in configuration else _of_network(configuration)),
            "protocol": _digest(_learned(configuration))[:8],
            "recorded": recorded,
            "path": str(path),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path / 'run.json'}: not a whole record: {error!r}") from None


def _of_network(configuration: dict[str, Any]) -> dict[str, Any]:
    """What one of gpulab's own networks learned from."""
    speed = configuration.get("data_options", {}).get("speed")
    return {"data": configuration["data"], "speed": speed, "frames": configuration["frames"]}


def _of_function(record: dict[str, Any]) -> dict[str, Any]:
    """The columns that a run of a function fills in other ways, or has beside the others."""
    options, metrics = record["configuration"]["options"], record["metrics"] or {}
    cells = {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in options.items()}
    cells.pop("loss", None)  # which loss: the column is how large
    own = {name: value for name, value in metrics.items() if name not in COLUMNS}
    return {**dict.fromkeys(OPEN), "options": json.dumps(options), **cells, **own}


def _learned(configuration: dict[str, Any]) -> dict[str, Any]:
    """What was to be learned, which a factor among the options of a model should not change."""
    if "source" in configuration:
        return {"source": configuration["source"]}
    options = {name: value for name, value in configuration.get("model_options", {}).items() if name not in FACTORS}
    return {**configuration, "model_options": options} if "model_options" in configuration else configuration


def _check_history(file: Path) -> None:
    """Raise `DataError` unless a Parquet file's own description can be read, which it ends with."""
    import pyarrow
    import pyarrow.parquet

    try:
        pyarrow.parquet.read_metadata(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None


# --- checkpoints -------------------------------------------------------------------------------------


def checkpoint_file(store: Path, name: str) -> Path:
    """Where the checkpoint of an unfinished run is kept."""
    return store / WORK / f"{name}.safetensors"


def files_folder(store: Path, name: str, keep: bool) -> Path:
    """The folder of the files of an unfinished run, with what an interrupted one left in it if that is to be kept."""
    folder = store / WORK / name
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpulabError(f"the store {store} cannot be written: {error}") from None
    return folder


def write_checkpoint(file: Path, tensors: dict[str, torch.Tensor], notes: dict[str, Any]) -> None:
    """Replace the checkpoint in one step: one safetensors file, with JSON notes in its header."""
    scratch = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpulabError(f"the store {file.parent.parent} cannot be written: {error}") from None
    try:
        _write_tensors(scratch, tensors, {"gpulab": json.dumps({"format": CHECKPOINT_FORMAT, **notes})})
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def read_checkpoint(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """The tensors and notes of a checkpoint; None where there is none, or none of this format."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as archive:
            notes = json.loads((archive.metadata() or {})["gpulab"])
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        warnings.warn(f"{file}: a damaged checkpoint, set aside; the run starts anew ({error})", stacklevel=2)
        with contextlib.suppress(OSError):
            file.replace(file.with_suffix(".damaged"))
        return None
    return (tensors, notes) if notes.get("format") == CHECKPOINT_FORMAT else None


def _write_tensors(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    # Cloned, because a tensor that two names share could not be stored.
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, file, metadata)
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _scratch(store: Path) -> Iterator[Path]:
    scratch = store / WORK / uuid.uuid4().hex
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise GpulabError(f"the store {store} cannot be written: {error}") from None
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
