"""The runs of a store as tables: a row for each run or each window, and packed files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import DataError, UsageError
from gpulab.files import digest
from gpulab.passports import machine
from gpulab.run_options import FACTORS
from gpulab.store import recorded
from gpulab.store._records import RunRecord, device_of, factors_of_record, learning_task
from gpulab.store._run_store import (
    RECORD_FILE,
    RESULTS_FILE,
    RunEntry,
    find_forbidden,
    list_entries,
    read_entry,
    store_folder,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow


Row = dict[str, Any]  # a row of the table of runs, by column
MAX_NAMED_RUNS = 10  # the largest number of runs that a warning names
LOSS_COLUMNS = ("final_loss", "heldout_loss")
SUMMARY_NUMBERS = (*LOSS_COLUMNS, "seconds", "frames_per_second")
SUMMARY_COLUMNS = (*SUMMARY_NUMBERS, "weights")
RUN_COLUMNS = [
    *("experiment", "profile", "setting", "device", "seed", "rerun"),
    *FACTORS,
    *("status", *SUMMARY_COLUMNS, "gradients", "diverged_at", "registered"),
    *(
        "machine",
        "cpu",
        "gpu",
        "torch",
        "gpulab",
        "data",
        "frame_size",
        "scene_seed",
        "speed",
        "frames",
    ),
    *("protocol", "recorded", "id", "path"),
]
# Columns that a run of a training function fills only if it has an option or metric of that name.
OVERRIDABLE_COLUMNS = {"data", "speed", "frames", *FACTORS} - {"flip"}


def runs(store: str | Path | None = None) -> pd.DataFrame:
    """List all runs in a store as a data frame with a row for each run.

    A damaged run is skipped with a warning that names it, and so is a run without permission to
    read it. The attribute `attrs["damaged"]` of the frame is the number of damaged runs, and
    `attrs["forbidden"]` that of folders and files without this permission. A run that is stored
    twice, as a folder and packed, is listed once.

    Args:
        store: A folder, or a file of packed runs. By default `$GPULAB_STORE`, or the folder `runs`.

    Returns:
        A data frame with a row for each run; it is empty if the store does not exist.

        It has these columns:

        - What was trained: `experiment` (the network or the training function), `profile`,
          `setting`, `device` (`cpu`, `cuda`, …), `seed`, `rerun` (0 for the first run).
        - The factors: `loader` (how frames were copied to the device), `decoder` (of the JPEG
          frames of some recorded runs), `flip` (the number of the initial weight whose last bit was
          changed), `fast` (whether faster methods than autograd might be used), `draws` (the
          generator of the initial weights), `covariance` (the whitener's formula for the
          covariance), `truncation` (where PredNet's backpropagation through time is truncated).
        - The results: `status` (`finished` or `diverged`), `final_loss`, `heldout_loss`, `seconds`,
          `frames_per_second` (missing if other runs shared the GPU), `weights` (the SHA-256 of the
          trained weights, which is equal only for bitwise equal weights), `gradients` (the method
          by which gradients were computed; None if it was not recorded), `diverged_at` (the update
          whose loss was not finite).
        - `registered`: The name and the SHA-256 of the file that the run was registered with.
        - The machine: `machine` (the chip that trained the run), `cpu`, `gpu`, and the versions
          `torch` and `gpulab`.
        - The data: `data` (the name), `frame_size` (height×width), `scene_seed` and `speed` (of a
          rendered scene), `frames` (the number of frames that were trained on).
        - `protocol`: A digest of model, data, length and learning rate. Runs can be compared if
          their digests are equal.
        - `recorded` (whether the run was shipped with gpulab), `id`, `path`.

        Runs of a custom training function have further columns: `options` (all of them, as JSON),
        one for each option, and one for each number that the function returned.

    Raises:
        UsageError: For an address such as `s3://bucket`, which is not a folder.

    Examples:
        >>> import gpulab as gl
        >>> gl.runs("a-folder-that-is-not-there").empty
        True
    """
    folder = store_folder(store)
    frame = _build_frame(list_entries(folder))
    frame.attrs["source"] = str(folder)
    return frame


def has_runs(folder: Path) -> bool:
    """Return whether a folder is a store: it has a run, even a damaged one, or packed runs.

    >>> import tempfile
    >>> has_runs(Path(tempfile.mkdtemp()))
    False
    """
    for path in list_entries(folder):
        if os.path.isdir(path):
            if any(
                os.path.lexists(os.path.join(path, name)) for name in (RECORD_FILE, RESULTS_FILE)
            ):
                return True
        else:
            with contextlib.suppress(DataError):
                if recorded.read_packed(Path(path)):
                    return True
    return False


def drop_empty_losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Drop empty columns of losses from a table of runs whose metrics have other names.

    Nothing is dropped if `final_loss` has values, or if runs have no other metrics: all runs may
    have diverged.

    >>> import pandas as pd
    >>> nan = float("nan")
    >>> list(
    ...     drop_empty_losses(
    ...         pd.DataFrame({"seed": [0, 1], "final_loss": [nan, nan], "accuracy": [0.5, 0.6]})
    ...     )
    ... )
    ['seed', 'accuracy']
    >>> # Both diverged
    >>> list(drop_empty_losses(pd.DataFrame({"seed": [0, 1], "final_loss": [nan, nan]})))
    ['seed', 'final_loss']
    """
    metric_columns = [name for name in frame if name not in (*RUN_COLUMNS, "options")]
    if "options" in frame and metric_columns:
        options = {name for text in frame["options"].dropna() for name in json.loads(text)}
        metric_columns = [name for name in metric_columns if name not in options]
    empty_losses = [name for name in LOSS_COLUMNS if name in frame and frame[name].isna().all()]
    if metric_columns and "final_loss" in empty_losses:
        return frame.drop(columns=empty_losses)
    return frame


def recorded_runs(study: str | None = None) -> pd.DataFrame:
    """List the runs that are shipped with gpulab, as a data frame.

    They were recorded on several machines. The record of each run contains its machine's passport.

    Args:
        study: The name of a study, such as `longer`. Its runs are listed instead, from
            `data/studies/STUDY.parquet` and `data/studies/STUDY-*.parquet`.

    Returns:
        A data frame with a row for each run and the columns of `gpulab.runs`; `recorded` is true.

    Raises:
        UsageError: If the study does not exist. The message names those that do.

    Examples:
        >>> import gpulab as gl
        >>> (
        ...     bool(gl.recorded_runs().recorded.all()),
        ...     bool(gl.recorded_runs().frames_per_second.notna().any()),
        ... )
        (True, True)
        >>> sorted(set(gl.recorded_runs("longer").experiment))
        ['prednet']
    """
    if study is None:
        return _build_frame(list_entries(recorded.recorded_folder("runs"))).assign(recorded=True)
    packed = sorted(recorded.recorded_folder("studies").glob("*.parquet"))
    names = [file.stem.partition("-")[0] for file in packed]
    if study not in names:
        raise UsageError(f"study {study!r}: expected one of {', '.join(dict.fromkeys(names))}")
    study_files = [str(file) for file, name in zip(packed, names, strict=True) if name == study]
    return _build_frame(study_files).assign(recorded=True)


def history(frame: pd.DataFrame) -> pd.DataFrame:
    """Read the histories of runs: the loss of each window.

    Args:
        frame: A data frame from `gpulab.runs`, or some of its rows.

    Returns:
        A data frame with a row for each window of each run; empty for an empty frame.

        It has these columns:

        - `window`: The number of the window, from 0.
        - `step`: The number of updates up to the end of the window.
        - `loss`: The mean loss over the window.
        - `seconds`: The seconds from the beginning of the training to the end of the window.
        - `frames_seen`: The number of frames or images up to the end of the window.
        - `id`, `experiment`, `profile`, `setting`, `loader`, `seed`, `rerun`, `status`, `recorded`
          and `machine` of the run. The last loss of a run with the status `diverged` is not finite.

    Raises:
        DataError: If the history of a run is missing or damaged. The message names the run.

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
    records, tables = zip(*read_histories(frame), strict=True)
    lengths = [table.num_rows for table in tables]
    # A training function has no windows: its history has a single row.
    frames_per_window = [record["configuration"].get("window", 1) for record in records]
    histories = pa.concat_tables(tables).to_pandas()
    histories["frames_seen"] = (histories["window"] + 1) * np.repeat(frames_per_window, lengths)
    run_frame = frame[
        [
            *("id", "experiment", "profile", "setting", "loader", "seed", "rerun"),
            *("status", "recorded", "machine"),
        ]
    ]
    # The columns of a run are repeated for each of its windows.
    repeated = run_frame.iloc[np.repeat(range(len(frame)), lengths)].reset_index(drop=True)
    return pd.concat([histories, repeated], axis=1)


def pack(store: str | Path | pd.DataFrame, file: str | Path) -> int:
    """Pack runs, without their weights, into one file that can be shared.

    Args:
        store: A folder of runs, or another file of packed runs; or a data frame from `gpulab.runs`
            with the runs to pack.
        file: The file to write. `gpulab.runs(file)` reads it. If the file lies in a store and its
            name ends in `.parquet`, its runs are also listed with those of the store.

    Returns:
        The number of runs that were packed.

    Raises:
        DataError: If there are no runs, or one is damaged.
        GpulabError: If the file cannot be written.

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
        source = "the table" if store is frame else store
        raise DataError(f"{file}: not written: there are no runs in {source}")
    records, histories = zip(*read_histories(frame), strict=True)
    recorded.write_packed(Path(file), list(records), list(histories))
    return len(frame)


def read_histories(frame: pd.DataFrame) -> Iterator[tuple[RunRecord, pyarrow.Table]]:
    """Yield the record and the history of each row of a table from `runs`.

    Raises:
        DataError: If a run is damaged; the message names it.
    """
    # A file of packed runs is read once for all of its rows.
    entries_by_id = functools.cache(
        lambda path: {entry.record["id"]: entry for entry in read_entry(path)}
    )
    for run in frame.itertuples():
        try:
            entry = entries_by_id(run.path)[run.id]
            yield entry.record, entry.read_history()
        except DataError as error:
            raise DataError(
                f"{error}; run the same experiment again to replace a damaged run"
            ) from None


def _build_frame(paths: list[str]) -> pd.DataFrame:
    """Build the table of the runs at these paths.

    Of runs with the same id, the first is listed. Damaged runs are left out with a warning, and so
    are those that may not be read.
    """
    import pandas as pd

    from gpulab.report import Progress

    rows: dict[str, Row] = {}
    damaged: list[str] = []
    forbidden: list[str] = []
    for path in Progress(paths, unit="run", leave=False, delay=2):
        try:
            for entry in read_entry(path):
                rows.setdefault(entry.record["id"], _build_row(entry))
        except DataError as error:
            forbidden_path = find_forbidden(path)
            if forbidden_path:
                forbidden.append(forbidden_path)
                continue
            is_run = any(
                os.path.lexists(os.path.join(path, name)) for name in (RECORD_FILE, RESULTS_FILE)
            )
            if is_run or not os.path.isdir(path):  # other folders are ignored
                damaged.append(str(error))
    if damaged:
        message = (
            f"{len(damaged)} damaged run(s) skipped; run the experiment again to replace them:"
            f" {_join_first(damaged)}"
        )
        warnings.warn(message, stacklevel=3)
    if forbidden:
        message = (
            f"{len(forbidden)} folder(s) or file(s) skipped, because they cannot be read"
            f" (permission denied): {_join_first(forbidden)}"
        )
        warnings.warn(message, stacklevel=3)
    function_columns = dict.fromkeys(
        name for row in rows.values() for name in row if name not in RUN_COLUMNS
    )
    frame = pd.DataFrame(list(rows.values()), columns=[*RUN_COLUMNS, *function_columns])
    # Missing numbers become NaN. Errors are ignored, because a function may have an option `speed`
    # that is not a number.
    frame = frame.astype(dict.fromkeys((*SUMMARY_NUMBERS, "speed", "flip"), float), errors="ignore")
    # Runs that are equal in the other columns are ordered by their paths.
    frame = frame.sort_values(
        ["experiment", "profile", "setting", "seed", "path"], ignore_index=True, kind="stable"
    )
    frame.attrs["damaged"] = len(damaged)
    frame.attrs["forbidden"] = len(forbidden)
    return frame


def _join_first(texts: list[str]) -> str:
    """Join at most `MAX_NAMED_RUNS` texts; an ellipsis stands for the others."""
    joined = "; ".join(texts[:MAX_NAMED_RUNS])
    return joined if len(texts) <= MAX_NAMED_RUNS else f"{joined}; …"


def _build_row(entry: RunEntry) -> Row:
    """Build the table row of a run; a damaged record raises a `DataError` that names its file."""
    record = entry.record
    configuration = record["configuration"]
    is_function = "source" in configuration
    with files.convert_read_errors(entry.file, "a damaged record"):
        row = _columns_of_record(record) | _columns_of_machine(record) | factors_of_record(record)
        row |= {
            "protocol": digest(learning_task(record))[:8],
            "recorded": False,
            "path": entry.path,
        }
        row |= _columns_of_data({} if is_function else configuration)
        if is_function:
            row |= _function_columns(configuration["options"], record.get("metrics") or {})
        return row


def _columns_of_record(record: RunRecord) -> Row:
    """Return the columns that say what was trained, and with which result."""
    summary = record["summary"]
    return {
        "experiment": record["experiment"],
        "profile": record["profile"],
        "setting": record["setting"],
        "device": device_of(record),
        "seed": record["seed"],
        "rerun": record.get("rerun", 0),
        "status": record["status"],
        "final_loss": summary["final_loss"],
        "heldout_loss": summary["heldout_loss"],
        "seconds": summary["seconds"],
        "frames_per_second": summary.get("frames_per_second"),
        "weights": summary.get("weights"),
        "gradients": record.get("gradients"),
        "diverged_at": record.get("diverged_at"),
        "registered": record.get("registered"),
        "id": record["id"],
    }


def _columns_of_machine(record: RunRecord) -> Row:
    """Return the columns that describe the machine; `gpu` is None without a GPU."""
    passport = record["passport"]
    return {
        "machine": machine(passport, device_of(record)),
        "cpu": passport["cpu"]["model"],
        "gpu": ", ".join(gpu["name"] for gpu in passport["gpus"]) or None,
        "torch": passport["software"]["torch"],
        "gpulab": passport["software"]["gpulab"],
    }


def _columns_of_data(configuration: dict[str, Any]) -> Row:
    """Return the columns that describe the data; all are None for an empty configuration."""
    options = configuration.get("data_options", {})
    return {
        "data": configuration.get("data"),
        "frames": configuration.get("frames"),
        "frame_size": "x".join(map(str, options["size"])) if "size" in options else None,
        "scene_seed": options.get("scene_seed"),
        "speed": options.get("speed"),
    }


def _function_columns(options: dict[str, Any], metrics: dict[str, Any]) -> Row:
    """Return the columns for the options and metrics of a training function.

    Options and metrics with the name of a column of `runs` are left out, except for
    `OVERRIDABLE_COLUMNS`.
    """
    cells = {
        name: json.dumps(value) if isinstance(value, list | dict) else value
        for name, value in options.items()
    }
    # An option `loss` names the kind of loss. The column `loss` holds the metric of this name.
    cells.pop("loss", None)

    reserved = set(RUN_COLUMNS) - OVERRIDABLE_COLUMNS
    own_cells = {name: value for name, value in (cells | metrics).items() if name not in reserved}
    # Columns that only networks fill are empty, unless an option or metric has this name.
    return {**dict.fromkeys(OVERRIDABLE_COLUMNS), "options": json.dumps(options), **own_cells}
