"""An index of a large store: its table as it was last read, in the user's cache, so that only what is new is read.

A run is taken from the index as long as its files have the times, sizes and inodes that they had; `gpulab check` reads
them all. Histories are not in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab import __version__, files, records
from gpulab.errors import DataError, GpulabError
from gpulab.training import folders

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 2000  # runs that are read in a fraction of a second, and need no index
STAMP = "stamp"
RECORD, HISTORY = os.sep + folders.RECORD, os.sep + folders.HISTORY


def stamp(entry: str) -> int:
    """A number that changes when a run, or a file of packed runs, is replaced or written to."""
    try:
        try:
            a, b = os.stat(entry + RECORD), os.stat(entry + HISTORY)
        except NotADirectoryError:
            a = b = os.stat(entry)
    except OSError:  # damaged, or gone since it was listed: it is read, and what is wrong is told
        return 0
    return hash((a.st_mtime_ns, a.st_size, a.st_ino, b.st_mtime_ns, b.st_size, b.st_ino))


def read(store: Path, columns: Sequence[str], stamps: Mapping[str, int]) -> pd.DataFrame | None:
    """The rows of what is as it was; None where there is no index.

    Args:
        store: The store that the index is of.
        columns: Those that its table begins with; one that was made with others is not used.
        stamps: What is in the store now: the paths of its runs, and of its files of packed ones, with their stamps.
    """
    file = _file(store)
    if not file.is_file():
        return None
    try:
        table, notes = records.read_rows(file)
        if notes.get("columns") != [__version__, *columns]:
            return None
        known = table.to_pandas()
        for name in notes["mixed"]:
            known[name] = known[name].map(json.loads)
        current = known["path"].map(stamps).eq(known[STAMP]) & known[STAMP].ne(0)
        if not current.all():  # an option that no run has any more is no column
            known = known[current]
            known = known.drop(columns=known.columns[known.isna().all()].difference(list(columns)))
        return known.drop(columns=STAMP)
    except (DataError, KeyError, TypeError, ValueError) as error:
        warnings.warn(f"{error}; the index is made anew", stacklevel=5)
        return None


def write(store: Path, columns: Sequence[str], stamps: Mapping[str, int], frame: pd.DataFrame) -> None:
    """Keep a table; one that cannot be kept is read again next time. The stamps are of before the runs were read."""
    import pyarrow as pa

    table, mixed = frame.assign(**{STAMP: frame["path"].map(stamps)}), []
    for name in [name for name, kind in table.dtypes.items() if kind.kind == "O"]:
        try:
            pa.array(table[name])
        except pa.ArrowException:  # an option that is a number here and a text there
            mixed.append(name)
            table[name] = table[name].map(json.dumps)
    notes = {"columns": [__version__, *columns], "mixed": mixed}
    with contextlib.suppress(GpulabError):  # such as a full disk
        records.write_table(_file(store), table, notes, compression_level=1)


def joined(known: pd.DataFrame, fresh: pd.DataFrame) -> pd.DataFrame:
    """Two tables of runs one below the other, each column of the type that it has where all are read at once."""
    import pandas as pd

    def column(name: str) -> pd.Series:
        parts = [part[name] for part in (known, fresh) if name in part]
        if len(parts) == 2 and parts[0].dtype == parts[1].dtype:
            return pd.concat(parts, ignore_index=True)
        values = [part[name].tolist() if name in part else [math.nan] * len(part) for part in (known, fresh)]
        return pd.Series([value for part in values for value in part])

    return pd.DataFrame({name: column(name) for name in dict.fromkeys([*known.columns, *fresh.columns])})


def _file(store: Path) -> Path:
    name = hashlib.sha256(str(store.absolute()).encode()).hexdigest()[:20]
    return files.cache_folder() / "stores" / f"{name}.parquet"
