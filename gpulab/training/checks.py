"""A store looked through: all is read and verified, what is damaged set aside, what killed processes left removed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpulab import files, records
from gpulab.errors import DataError
from gpulab.training import folders
from gpulab.training.remote import folder_of
from gpulab.training.store import default_store, entries

if TYPE_CHECKING:
    import pandas as pd

OLD = 24 * 3600.0  # seconds after which a file that is being written is nobody's, whichever machine's process began it
SET_ASIDE, REMOVED, LEFT = "set aside", "removed", "left as it is"


class Trouble(NamedTuple):
    """Something in a store that is not as it should be: what is to be done with a path, and why."""

    path: Path
    problem: str
    remedy: str


def check(store: str | Path | None = None, mend: bool = True, progress: bool = True) -> pd.DataFrame:
    """Read and verify everything in a store, and mend it.

    Runs, checkpoints and packed files that are damaged are set aside, in the store's folder `.damaged`, so that the
    next `experiment` or `train` does them again. What killed processes left half-written is removed, and so are
    checkpoints of runs that are done. Nothing else is deleted.

    Args:
        store: A folder; by default `$GPULAB_STORE`, or the folder `runs`.
        mend: Whether to do so, or to look only.
        progress: Whether to show a bar.

    Returns:
        A row for each trouble: `path`, `problem`, `remedy`, and `megabytes`. Its `attrs` say how many `runs` are whole.

    Raises:
        DataError: Where there is no such folder.
        GpulabError: Where the store cannot be written.

    Examples:
        >>> import tempfile
        >>> check(tempfile.mkdtemp(), progress=False).empty
        True
    """
    import pandas as pd

    from gpulab.progress import Progress

    folder = folder_of(default_store() if store is None else store)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    found, whole = [], 0
    paths = entries(folder)
    for path in Progress(paths, unit="run", leave=False, disable=not progress):
        troubles = list(_of_entry(Path(path)))
        whole += not troubles
        found += troubles
    found += [*_of_writing(folder), *_of_unfinished(folder)]
    rows = [(str(path), problem, remedy, _size(path) / 1e6) for path, problem, remedy in found]
    if mend:
        for path, _, remedy in found:
            _mend(folder, path, remedy)
    frame = pd.DataFrame(rows, columns=["path", "problem", "remedy", "megabytes"])
    frame.attrs["runs"] = whole
    return frame


def _of_entry(path: Path) -> Iterator[Trouble]:
    """What is wrong with a run, or with a file of packed ones."""
    parts: list[tuple[Path, Callable[[], object]]]
    if path.is_dir():
        if not folders.is_run(path):
            yield Trouble(path, "not a run", LEFT)
            return
        parts = [(path, lambda: folders.read_run(path))]
        if (weights := path / folders.WEIGHTS).is_file():
            parts.append((weights, lambda: folders.read_weights(path)))
    else:
        parts = [(path, lambda: records.packed_runs(path) and records.packed_histories(path))]
    for part, read in parts:
        try:
            read()
        except DataError as error:
            yield Trouble(part, _without(part, error), SET_ASIDE)
            return


def _of_writing(folder: Path) -> Iterator[Trouble]:
    """What processes that are gone have left half-written."""
    work = folder / folders.WORK
    gone = {path for part in (folder, work) if part.is_dir() for path in files.strays(part)}
    for path in [*folder.glob(".*.part"), *work.glob("*")]:
        unfinished = files.SCRATCH.fullmatch(path.name)
        if path in gone or (unfinished and time.time() - path.lstat().st_mtime > OLD):
            yield Trouble(path, "left half-written by a process that is gone", REMOVED)


def _of_unfinished(folder: Path) -> Iterator[Trouble]:
    """What is wrong with checkpoints and with the files of unfinished runs."""
    for path in (folder / folders.WORK).glob("[!.]*"):
        if (folder / path.name.removesuffix(".safetensors") / folders.RECORD).is_file():
            yield Trouble(path, "of a run that is done", REMOVED)
        elif path.suffix == ".safetensors":
            try:
                folders.read_checkpoint(path)
            except DataError as error:
                yield Trouble(path, _without(path, error), SET_ASIDE)


def _without(path: Path, error: DataError) -> str:
    """What an error says, without the path that is named beside it."""
    return str(error).removeprefix(str(path)).lstrip("/\\: ")


def _mend(store: Path, path: Path, remedy: str) -> None:
    if remedy == SET_ASIDE:
        folders.set_aside(store, path)
    elif remedy == REMOVED:
        with files.writing(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in inside if not file.is_dir())
