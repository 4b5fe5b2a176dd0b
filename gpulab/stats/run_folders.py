"""Folders of runs, as Hydra, Lightning and TensorBoard leave them, as one table."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from gpulab import files
from gpulab.errors import DataError
from gpulab.stats.configs import CONFIGS, Value, parse_value, settings_beside

RUN = "run"  # the column that says which run a row belongs to
SUFFIXES = (".csv", ".tsv", ".parquet")
USUAL_NAMES = ("metrics.csv", "progress.csv", "results.csv", "history.csv", "log.csv")  # where there are others beside
SEEDS = ("seed", "random_seed", "seed_everything", "rng_seed", "manual_seed", "global_seed")
# Columns that mean something to a verdict, which a setting of that name does not.
MEANINGS = frozenset({"status", "rerun", "weights", "reference", "other", "difference", RUN})
PROTOCOL = frozenset({"experiment", "profile", "frames", "protocol", "options"})
TAKEN = MEANINGS | PROTOCOL
TENSORBOARD = ("Wall time", "Step", "Value")  # the columns of a file that its page offers
TAG = re.compile(r"run-(?P<run>.*)-tag-(?P<tag>.+)")  # and its name
SEED_IN_NAME = re.compile(r"(?<![a-z])seed[ _=-]?(\d+)", re.IGNORECASE)
MOST_TABLES = 100_000
MOST_NAMED = 5  # files in one sentence

Reader = Callable[[Path], tuple[pd.DataFrame, list[str]]]  # a table, and notes on it


def is_pattern(name: str | Path) -> bool:
    """Whether a name stands for several files, such as `outputs/*/metrics.csv`, and is no file itself.

    >>> is_pattern("outputs/*/metrics.csv"), is_pattern("outputs/metrics.csv")
    (True, False)
    """
    return glob.has_magic(str(name)) and not os.path.lexists(name)


def read_runs(names: Sequence[str | Path], read: Reader) -> tuple[pd.DataFrame, list[str]]:
    """The tables in some folders and files as one, with the settings of each run, and notes on where they are from.

    Raises:
        DataError: Where there are no tables, none that can be read, or tables of several names.
    """
    found: dict[Path, Path] = {}  # each table, and the folder up to which its settings are looked for
    unread: list[str] = []
    empty: list[Path] = []
    for name in names:
        tables, without = _find_tables(name)
        for table, root in tables:
            found.setdefault(table, root)
        empty += without
    if not found:
        given = ", ".join(map(str, names))
        raise DataError(f"{given}: neither runs of gpulab nor tables in it; expected files such as {USUAL_NAMES[0]}")
    base = _common_folder(found.values())
    if len(names) > 1:  # as a shell makes them of a pattern
        found = {table: base if base in table.parents else root for table, root in found.items()}
    parts: list[pd.DataFrame] = []
    origins: dict[str, set[str]] = {}  # the names of files that settings came from, by setting
    notes: list[str] = []
    for table, root in found.items():
        try:
            frame, on_table = read(table)
        except DataError as error:
            unread.append(str(error))
            continue
        notes += on_table
        settings, errors = settings_beside(table, root)
        unread += [str(error) for error in errors]
        frame = _named_run(frame, table, base)
        frame, used = _with_settings(frame, {name: value for name, (value, _) in settings.items()})
        for setting, column in used.items():
            file = settings[setting][1]
            origins.setdefault(column, set()).add(_config_name(file))
        parts.append(frame)
    if not parts:
        raise DataError(f"none of {len(found)} tables can be read: {'; '.join(unread[:MOST_NAMED])}")
    frame = pd.concat(parts, ignore_index=True)
    tables_were = "1 table was" if len(parts) == 1 else f"{len(parts)} tables were"
    said = [f"{tables_were} read ({_counted(table.name for table in found)})."]
    said += dict.fromkeys(notes)
    frame = _with_seed(frame, origins, said)
    said += _origin_notes(origins)
    if not origins:
        before = list(frame)
        frame = with_names(frame)
        if new := [name for name in frame if name not in before]:
            said.append(f"No configuration files were found; {', '.join(new)}: from the names of folders and files.")
    if empty:
        named = ", ".join(os.path.relpath(folder, base) for folder in empty[:MOST_NAMED])
        more = f" and {len(empty) - MOST_NAMED} more" if len(empty) > MOST_NAMED else ""
        said.append(f"Without a table, and so left out: {named}{more}.")
    if unread:
        listed = "; ".join(unread[:MOST_NAMED]) + "; …" * (len(unread) > MOST_NAMED)
        said.append(f"Left out, because it cannot be read: {listed}.")
        warnings.warn(f"left out, because it cannot be read: {listed}", stacklevel=4)
    return frame, said


def _common_folder(folders: Iterable[Path]) -> Path:
    """The lowest folder that holds all of these; the current one where there is none."""
    try:
        return Path(os.path.commonpath([str(folder) for folder in folders]))
    except ValueError:  # some are absolute and others relative, or on several drives
        return Path()


# --- which files -----------------------------------------------------------------------------------------------


def _find_tables(name: str | Path) -> tuple[list[tuple[Path, Path]], list[Path]]:
    """The tables that a folder, a file or a pattern stands for, each with its root, and folders of runs without one."""
    path = Path(name)
    if is_pattern(name):
        matches = sorted(glob.glob(str(name), recursive=True), key=_natural)
        if not matches:
            raise DataError(f"{name}: no file or folder matches this pattern")
        root = _fixed_part(path)
        folders = [match for match in map(Path, matches) if match.is_dir()]
        found = [Path(match) for match in matches if match.endswith(SUFFIXES) and not os.path.isdir(match)]
        without: list[Path] = []
        for folder in folders:
            of_folder, configured = _tables_in(folder)
            found += of_folder
            without += configured
        return [(table, root) for table in found or map(Path, matches) if not table.is_dir()], without
    if os.path.isdir(path):
        in_folder, without = _tables_in(path)
        return [(table, path) for table in in_folder], without
    return [(path, path.parent)], []


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first part of a pattern that stands for several names.

    >>> _fixed_part(Path("outputs/a/*/metrics.csv")).as_posix(), _fixed_part(Path("*.csv")).as_posix()
    ('outputs/a', '.')
    """
    parts: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _tables_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The tables in a folder and those below it, and folders with a configuration of Hydra and no table.

    Raises:
        DataError: For a folder that cannot be read, and tables of several names of which none is usual.
    """
    tables: list[Path] = []
    configured: list[Path] = []

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror or error}")

    with files.reading(folder):
        for place, folders, names in os.walk(folder, onerror=refuse):
            if ".hydra" in folders:
                configured.append(Path(place))
            folders[:] = [name for name in folders if not name.startswith(".")]
            tables += [Path(place, name) for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
            if len(tables) > MOST_TABLES:
                raise DataError(f"{folder}: more than {MOST_TABLES:,} tables; give a pattern such as */metrics.csv")
    tables = sorted(_of_one_name(folder, tables), key=_natural)
    holders = {parent for table in tables for parent in table.parents}
    return tables, sorted((run for run in configured if run not in holders), key=_natural)


def _of_one_name(folder: Path, tables: list[Path]) -> list[Path]:
    """The tables with the usual name for logs, or all where they have one name, or lie in one folder."""
    counts = Counter(table.name for table in tables)
    for name in USUAL_NAMES:
        if name in counts and len(counts) > 1:
            return [table for table in tables if table.name == name]
    if len(counts) <= 1 or max(counts.values()) == 1:
        return tables
    raise DataError(
        f"{folder}: tables of several names ({_counted(table.name for table in tables)}); "
        f"give a pattern such as '{folder}/**/{counts.most_common(1)[0][0]}'"
    )


def _natural(path: str | Path) -> list[tuple[int, str]]:
    """A key that sorts `2` before `10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _counted(names: Iterable[str]) -> str:
    """How often names occur, the most frequent first."""
    counts = Counter(names).most_common()
    shown = [name if count == 1 or len(counts) == 1 else f"{count} {name}" for name, count in counts[:MOST_NAMED]]
    return ", ".join(shown) + ", …" * (len(counts) > MOST_NAMED)


# --- what the run of a table is called, and what was set ---------------------------------------------------------


def _named_run(frame: pd.DataFrame, table: Path, base: Path) -> pd.DataFrame:
    """A table with the name of its run; one of TensorBoard's has a column that is called as its tag."""
    name = table.relative_to(base).as_posix() if table.is_relative_to(base) else table.as_posix()
    run = name.removesuffix(table.suffix) if table.name not in USUAL_NAMES else Path(name).parent.as_posix()
    if set(frame.columns) == set(TENSORBOARD) and (tagged := TAG.fullmatch(table.stem)):
        run = tagged["run"]
        frame = frame.rename(columns={"Value": tagged["tag"]})
    return frame if RUN in frame else frame.assign(**{RUN: run})


def _with_settings(frame: pd.DataFrame, settings: dict[str, Value]) -> tuple[pd.DataFrame, dict[str, str]]:
    """A table with a column for each setting, and what the columns are called.

    A setting whose name is that of a column of the table, or means something to a verdict, has `config.` before it.
    """
    columns = {
        setting: f"config.{setting}" if setting in frame or setting in TAKEN else setting for setting in settings
    }
    new = pd.DataFrame(
        {column: [settings[setting]] * len(frame) for setting, column in columns.items()},
        index=frame.index,
        dtype=object,
    )
    return pd.concat([frame, new], axis=1), columns


def _with_seed(frame: pd.DataFrame, origins: dict[str, set[str]], notes: list[str]) -> pd.DataFrame:
    """A table with a column `seed`, if exactly one of its settings is called like one."""
    if "seed" in frame:
        return frame
    called = [name for name in map(str, frame.columns) if name.rpartition(".")[2] in SEEDS]
    if outermost := [name for name in called if "." not in name]:
        called = outermost
    if len(called) > 1:
        notes.append(f"Several settings may be the seed ({', '.join(called)}): choose one by block=.")
    if len(called) != 1:
        return frame
    origins["seed"] = origins.get(called[0], set())
    notes.append(f"The column seed is {called[0]}.")
    return frame.assign(seed=frame[called[0]])


def _config_name(file: Path) -> str:
    """The name of a configuration file, with the folder that belongs to it."""
    return next(name for name in CONFIGS if file.as_posix().endswith(name))


def _origin_notes(origins: dict[str, set[str]]) -> Iterator[str]:
    """Yield sentences on which settings came from which files."""
    by_files: dict[str, list[str]] = {}
    for column, names in origins.items():
        by_files.setdefault(" and ".join(sorted(names)), []).append(column)
    for origin, columns in by_files.items():
        shown = ", ".join(sorted(columns)[:12]) + f" and {len(columns) - 12} more" * (len(columns) > 12)
        yield f"Settings are from {origin}: {shown}."


def with_names(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with what the names of its runs say: `optimizer=adam,seed=3`, `adam/seed_3`.

    What remains of a name without its seed, and is not the same for all, is the column `group`.

    >>> with_names(pd.DataFrame({"run": ["adam/seed_0", "sgd/seed_0"]})).to_dict("list")
    {'run': ['adam/seed_0', 'sgd/seed_0'], 'seed': [0, 0], 'group': ['adam', 'sgd']}
    >>> with_names(pd.DataFrame({"run": ["lr=0.1,seed=2", "lr=0.2,seed=2"]})).to_dict("list")
    {'run': ['lr=0.1,seed=2', 'lr=0.2,seed=2'], 'lr': [0.1, 0.2], 'seed': [2, 2]}
    """
    runs = list(dict.fromkeys(frame[RUN].astype(str)))
    said = {run: _settings_in_name(run) for run in runs}
    for name in dict.fromkeys(name for settings, _ in said.values() for name in settings):
        if name not in frame and all(name in settings for settings, _ in said.values()):
            frame = frame.assign(**{name: [said[run][0][name] for run in frame[RUN].astype(str)]})
    parts = [set(rest) for _, rest in said.values()]
    shared = set.intersection(*parts)
    groups = {run: "/".join(part for part in rest if part not in shared) for run, (_, rest) in said.items()}
    if "seed" in frame and "group" not in frame and len(set(groups.values())) > 1 and all(groups.values()):
        frame = frame.assign(group=frame[RUN].astype(str).map(groups))
    return frame


def _settings_in_name(run: str) -> tuple[dict[str, Value], list[str]]:
    """The settings that a run's name says, and what remains of it.

    >>> _settings_in_name("optimizer=adam,seed=3"), _settings_in_name("adam-seed3/version_0")
    (({'optimizer': 'adam', 'seed': 3}, []), ({'seed': 3}, ['adam', 'version_0']))
    """
    settings: dict[str, Value] = {}
    rest: list[str] = []
    for part in re.split(r"[/\\]|,(?=[^,=/]+=)", run):
        name, sign, text = part.partition("=")
        if sign and name.isidentifier():
            settings[name] = parse_value(text)
            continue
        if seed := SEED_IN_NAME.search(part):
            settings["seed"] = int(seed[1])
            part = (part[: seed.start()] + part[seed.end() :]).strip(" _-=.,:")
        if part:
            rest.append(part)
    return settings, rest
