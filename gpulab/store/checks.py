"""A store looked through: all is read and verified, what is damaged set aside, what killed processes left removed."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from gpulab import files
from gpulab.errors import DataError
from gpulab.store import run_files
from gpulab.store.listing import default_store, entries, read_entry
from gpulab.store.object_store import folder_of

if TYPE_CHECKING:
    import pandas as pd

OLD = 24 * 3600.0  # seconds after which a file that is being written is nobody's, whichever machine's process began it
SET_ASIDE, REMOVED, LEFT = "set aside", "removed", "left as it is"
SCRATCH = re.compile(r"\.(\d+)-([0-9a-f]{8})-[0-9a-f]{8}\.part")  # as `files.scratch_name` makes them


def check(store: str | Path | None = None, mend: bool = True, progress: bool = True) -> pd.DataFrame:
    """Read and verify everything in a store of runs, and mend what is damaged.

    Runs, checkpoints and files of packed runs that are damaged are moved into the store's folder `.damaged`. The next
    `experiment` or `train` then does these runs again. What killed processes left half-written is removed, and so are
    checkpoints of runs that are done. Nothing else is deleted.

    Args:
        store: A folder; by default `$GPULAB_STORE`, or the folder `runs`.
        mend: Whether to mend the store. False only looks, and changes nothing.
        progress: Whether to show a progress bar.

    Returns:
        A data frame with a row for each trouble, empty where all is well. Its columns are `path`, `problem`, `remedy`
        (`set aside`, `removed` or `left as it is`: what is done, or with `mend=False` what would be) and `megabytes`.
        Its `attrs["runs"]` says how many runs and packed files are whole.

    Raises:
        UsageError: For a store in object storage, such as `s3://bucket/prefix`.
        DataError: Where there is no such folder.
        GpulabError: Where the store cannot be written.

    Examples:
        >>> import tempfile
        >>> import gpulab as gl
        >>> gl.store.check(tempfile.mkdtemp(), progress=False).empty
        True
    """
    import pandas as pd

    from gpulab.progress import Progress

    folder = folder_of(default_store() if store is None else store)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    paths = [Path(entry) for entry in entries(folder)]
    of_runs = [*map(_of_entry, Progress(paths, unit="run", leave=False, disable=not progress))]
    troubles = [*filter(None, of_runs), *_left_behind(folder), *_of_checkpoints(folder)]
    rows = [(str(path), problem, remedy, _size(path) / 1e6) for path, problem, remedy in troubles]
    for path, _, remedy in troubles if mend else ():
        if remedy == SET_ASIDE:
            run_files.set_aside(folder, path)
        elif remedy == REMOVED:
            with files.writing(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    frame = pd.DataFrame(rows, columns=["path", "problem", "remedy", "megabytes"])
    frame.attrs["runs"] = of_runs.count(None)
    return frame


Trouble = tuple[Path, str, str]  # a path, what is wrong with it, and what is to be done with it


def _of_entry(path: Path) -> Trouble | None:
    """What is wrong with a run, or with a file of packed ones."""
    if path.is_dir() and not run_files.is_run(path):
        return path, "not a run", LEFT
    try:
        read_entry(str(path))
    except DataError as error:
        return _damaged(path, error)
    return None


def _left_behind(folder: Path) -> Iterator[Trouble]:
    """What processes that are gone left half-written; of another machine's that is known by its age."""
    for path in [*folder.glob(".*.part"), *folder.glob("*/.*.part")]:
        with contextlib.suppress(FileNotFoundError):  # its writer has just moved it into its place
            old = time.time() - path.lstat().st_mtime > OLD
            writer = SCRATCH.fullmatch(path.name)
            if writer and (old or (writer[2] == files.HERE and not psutil.pid_exists(int(writer[1])))):
                yield path, "left half-written by a process that is gone", REMOVED


def _of_checkpoints(folder: Path) -> Iterator[Trouble]:
    """What is wrong with checkpoints and with the files of unfinished runs."""
    for path in (folder / run_files.WORK).glob("[!.]*"):
        if (folder / path.name.removesuffix(".safetensors") / run_files.RECORD).is_file():
            yield path, "of a run that is done", REMOVED
        elif path.suffix == ".safetensors":
            try:
                run_files.read_checkpoint(path)
            except DataError as error:
                yield _damaged(path, error)


def _damaged(path: Path, error: DataError) -> Trouble:
    """What an error says, without the path that is named beside it."""
    return path, str(error).removeprefix(str(path)).lstrip("/\\: "), SET_ASIDE


def _size(path: Path) -> int:
    inside = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in inside if not file.is_dir())
