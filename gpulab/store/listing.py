"""Stores: the runs in a folder, or in a file of packed ones, as tables.

Runs that are to be shared are packed into one file (`pack`); a file of packed runs can be read wherever a store can,
and a store may hold such files beside its folders.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import DataError, UsageError
from gpulab.store import identities, records, run_files
from gpulab.store.factors import FACTORS, factors_of_record

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

MOST_NAMED = 10  # of damaged runs, in one warning
COLUMNS = [
    *("experiment", "profile", "setting", "device", "seed", "rerun"),
    *FACTORS,
    *("status", "final_loss", "heldout_loss", "seconds", "frames_per_second", "weights", "gradients", "diverged_at"),
    "registered",
    *("machine", "cpu", "gpu", "torch", "gpulab", "data", "frame_size", "scene_seed", "speed", "frames"),
    *("protocol", "recorded", "id", "path"),
]
# Empty for a run of a function, which may have options of these names.
OPEN = {"data", "speed", "frames", *FACTORS} - {"flip"}


def default_store() -> Path:
    """`$GPULAB_STORE`, or the folder `runs` where you are."""
    return Path(os.environ.get("GPULAB_STORE") or "runs")


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
    return _frame(entries(run_files.store_folder(default_store() if store is None else store)), recorded=False)


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
        >>> bool(gl.recorded_runs().recorded.all())
        True
        >>> sorted(set(gl.recorded_runs("longer").experiment))
        ['prednet']
    """
    if study is None:
        return _frame(entries(records.recorded_folder("runs")), recorded=True)
    files = sorted(records.recorded_folder("studies").glob("*.parquet"))
    names = [file.stem.partition("-")[0] for file in files]
    if study not in names:
        raise UsageError(f"study {study!r}: expected one of {', '.join(dict.fromkeys(names))}")
    return _frame([str(file) for file, name in zip(files, names, strict=True) if name == study], recorded=True)


def record_of(run: Any) -> dict[str, Any]:
    """The whole record of a row of `runs`."""
    return next(record for record in read_records(run.path) if record["id"] == run.id)


def metrics_of(run: Any) -> list[str]:
    """The names of the numbers that a row of `runs` has."""
    record = record_of(run)
    return list(record["metrics"] or {}) if "metrics" in record else ["final_loss", "heldout_loss"]


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
    """
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    if frame.empty:
        return pd.DataFrame()
    _, documents, tables = zip(*with_histories(frame), strict=True)
    lengths = [table.num_rows for table in tables]
    windows = np.repeat([record["configuration"].get("window", 1) for record in documents], lengths)
    histories = pa.concat_tables(tables, promote_options="permissive").to_pandas()
    histories["frames_seen"] = (histories["window"] + 1) * windows
    of_run = frame[["id", "experiment", "profile", "setting", "loader", "seed", "rerun", "recorded", "machine"]]
    repeated = of_run.iloc[np.repeat(range(len(frame)), lengths)].reset_index(drop=True)
    return pd.concat([histories, repeated], axis=1)


def with_histories(frame: pd.DataFrame) -> Iterator[tuple[Any, dict[str, Any], pyarrow.Table]]:
    """Each row of `runs`, the run's record, and its history."""
    by_path = functools.cache(lambda path: {record["id"]: (record, rows) for record, rows in read_entry(path)})
    for row in frame.itertuples():
        try:
            yield row, *by_path(row.path)[row.id]
        except DataError as error:
            raise DataError(f"{error}; doing the same experiment again sets a damaged run aside") from None


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
        raise DataError(f"{store if isinstance(store, str | Path) else file}: no runs to pack")
    return records.pack_runs(Path(file), ((record, rows) for _, record, rows in with_histories(frame)))


# --- what is in a store --------------------------------------------------------------------------------------


def entries(store: Path) -> list[str]:
    """The paths of the runs in a store, in order, and then of its files of packed ones."""
    if not store.is_dir():
        return [str(store)] if os.path.lexists(store) else []
    with os.scandir(store) as directory:
        visible = [entry for entry in directory if entry.name[0] != "."]
    # What is no link needs no look at it; and one at a link to itself may not raise.
    folders = [entry.path for entry in visible if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path)]
    packed = {entry.path for entry in visible if entry.name.endswith(".parquet")} - {*folders}
    return sorted(folders) + sorted(packed)


def read_records(path: str) -> list[dict[str, Any]]:
    """The record of a run, or of each in a file of packed ones; `DataError` for a damaged one."""
    return [run_files.read_record(path)] if os.path.isdir(path) else records.packed_runs(Path(path))


def read_entry(path: str) -> list[tuple[dict[str, Any], pyarrow.Table]]:
    """The same, each with its history."""
    documents = read_records(path)
    if os.path.isdir(path):
        return [(documents[0], run_files.read_results(Path(path), documents[0]["id"])[0])]
    histories = records.packed_histories(Path(path)) if documents else {}
    return [(record, histories[record["id"]]) for record in documents]


def _frame(paths: list[str], recorded: bool) -> pd.DataFrame:
    import pandas as pd

    from gpulab.progress import Progress

    rows: dict[str, dict[str, Any]] = {}
    damaged: list[str] = []
    for entry in Progress(paths, unit="run", leave=False, delay=2):
        try:
            for record in read_records(entry):
                rows.setdefault(record["id"], _row(record, entry, recorded))
        except DataError as error:
            if not os.path.isdir(entry) or run_files.is_run(entry):  # other folders are nobody's business
                damaged.append(str(error))
    if damaged:
        listed = "; ".join(damaged[:MOST_NAMED]) + ("; …" if len(damaged) > MOST_NAMED else "")
        warnings.warn(
            f"{len(damaged)} damaged run(s) skipped (the same experiment done again mends them): {listed}", stacklevel=3
        )
    numbers = dict.fromkeys(("final_loss", "heldout_loss", "seconds", "frames_per_second", "speed", "flip"), float)
    own = dict.fromkeys(name for row in rows.values() for name in row if name not in COLUMNS)
    frame = pd.DataFrame(list(rows.values()), columns=[*COLUMNS, *own]).astype(numbers)  # JSON's null becomes NaN
    # Runs that have the same of the others are in the order of their paths.
    frame = frame.sort_values(["experiment", "profile", "setting", "seed", "path"], ignore_index=True, kind="stable")
    frame.attrs["damaged"] = len(damaged)
    return frame


def _row(record: dict[str, Any], path: str, recorded: bool) -> dict[str, Any]:
    passport, summary, configuration = record["passport"], record["summary"], record["configuration"]
    device = record["setting"].partition(":")[0]
    return {
        **{key: record[key] for key in ("experiment", "profile", "setting", "seed", "status", "id")},
        **{key: summary.get(key) for key in records.SUMMARY},
        **factors_of_record(record),
        **{key: record.get(key) for key in ("gradients", "diverged_at", "registered")},
        "device": device,
        "rerun": record.get("rerun", 0),
        "machine": records.machine(passport, device),
        "cpu": passport["cpu"]["model"],
        "gpu": ", ".join(gpu["name"] for gpu in passport["gpus"]) or None,
        "torch": passport["software"]["torch"],
        "gpulab": passport["software"]["gpulab"],
        **(_of_function(record) if "source" in configuration else _of_network(configuration)),
        "protocol": identities.digest(_learned(record))[:8],
        "recorded": recorded,
        "path": path,
    }


def _of_network(configuration: dict[str, Any]) -> dict[str, Any]:
    """What one of gpulab's own networks learned from."""
    options = configuration.get("data_options", {})
    return {
        "data": configuration["data"],
        "frames": configuration["frames"],
        "frame_size": "x".join(map(str, options["size"])) if "size" in options else None,
        "scene_seed": options.get("scene_seed"),
        "speed": options.get("speed"),
    }


def _of_function(record: dict[str, Any]) -> dict[str, Any]:
    """The columns that a run of a function fills in other ways, or has beside the others."""
    options, metrics = record["configuration"]["options"], record.get("metrics") or {}
    cells = {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in options.items()}
    cells.pop("loss", None)  # which loss: the column is how large
    own = {name: value for name, value in metrics.items() if name not in COLUMNS}
    return {**dict.fromkeys(OPEN), "options": json.dumps(options), **cells, **own}


def _learned(record: dict[str, Any]) -> dict[str, Any]:
    """What was to be learned, which a factor among the options of a model should not change."""
    configuration = identities.of_content(record["configuration"], record)
    if "source" in configuration:
        return {"source": configuration["source"], **({"content": record["content"]} if "content" in record else {})}
    options = {name: value for name, value in configuration.get("model_options", {}).items() if name not in FACTORS}
    return {**configuration, "model_options": options} if "model_options" in configuration else configuration
