"""Read folders of runs, as Hydra, Lightning and TensorBoard write them, into one table."""

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
from gpulab.stats._configs import CONFIG_FILES, Value, find_settings, parse_value

RUN_COLUMN = "run"  # the column that says which run a row belongs to
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
# Usual names of log files. If a folder also has tables of other names, only these are read.
USUAL_TABLE_NAMES = ("metrics.csv", "progress.csv", "results.csv", "history.csv", "log.csv")
SEED_NAMES = ("seed", "random_seed", "seed_everything", "rng_seed", "manual_seed", "global_seed")
# Columns with a fixed meaning in a verdict. A setting with such a name is renamed.
VERDICT_COLUMNS = frozenset(
    {"status", "rerun", "weights", "reference", "other", "difference", RUN_COLUMN}
)
PROTOCOL_COLUMNS = frozenset({"experiment", "profile", "frames", "protocol", "options"})
RESERVED_NAMES = VERDICT_COLUMNS | PROTOCOL_COLUMNS
# The columns and the name of a CSV file that is downloaded from TensorBoard.
TENSORBOARD_COLUMNS = ("Wall time", "Step", "Value")
TENSORBOARD_FILE_PATTERN = re.compile(r"run-(?P<run>.*)-tag-(?P<tag>.+)")
SEED_PATTERN = re.compile(r"(?<![a-z])seed[ _=-]?(\d+)", re.IGNORECASE)
MAX_TABLES = 100_000
MAX_NAMED_FILES = 5  # the largest number of files in one sentence
MAX_NAMED_SETTINGS = 12  # the largest number of settings in one sentence

TableReader = Callable[[Path], tuple[pd.DataFrame, list[str]]]  # a table, and notes on it


def is_pattern(name: str | Path) -> bool:
    """Return whether a name is a pattern for several files, such as `outputs/*/metrics.csv`.

    The name of an existing file is not a pattern, even if it has characters such as `*`.

    >>> is_pattern("outputs/*/metrics.csv"), is_pattern("outputs/metrics.csv")
    (True, False)
    """
    return glob.has_magic(str(name)) and not os.path.lexists(name)


def read_runs(
    names: Sequence[str | Path], read_table: TableReader
) -> tuple[pd.DataFrame, list[str]]:
    """Read the tables of folders, files and patterns into one table.

    Each run's settings become columns. Tables and configurations that cannot be read are left out
    with a warning.

    Returns:
        The table, and sentences on what was read and where settings come from.

    Raises:
        DataError: If there are no tables, if none can be read, or if a folder has tables with
            different names.
    """
    # Each table has a folder at which the search for its settings stops.
    roots: dict[Path, Path] = {}
    read_errors: list[str] = []
    empty_folders: list[Path] = []
    for name in names:
        tables, folders_without_table = _find_tables(name)
        for table, root in tables:
            roots.setdefault(table, root)
        empty_folders += folders_without_table
    if not roots:
        names_text = ", ".join(map(str, names))
        expected = f"expected files such as {USUAL_TABLE_NAMES[0]}"
        raise DataError(f"{names_text}: contains neither gpulab runs nor tables; {expected}")
    base = _common_folder(roots.values())
    # Several names are usually a pattern that a shell has expanded, so settings are searched for up
    # to the common folder.
    if len(names) > 1:
        roots = {table: base if base in table.parents else root for table, root in roots.items()}
    frames: list[pd.DataFrame] = []
    origins: dict[str, set[str]] = {}  # the names of files that settings came from, by setting
    notes: list[str] = []
    for table, root in roots.items():
        try:
            frame, table_notes = read_table(table)
        except DataError as error:
            read_errors.append(str(error))
            continue
        notes += table_notes
        settings, errors = find_settings(table, root)
        read_errors += [str(error) for error in errors]
        frame = _add_run_name(frame, table, base)
        frame, columns = _add_settings(
            frame, {name: value for name, (value, _) in settings.items()}
        )
        for setting, column in columns.items():
            _value, file = settings[setting]
            origins.setdefault(column, set()).add(_config_name(file))
        frames.append(frame)
    if not frames:
        raise DataError(
            f"none of {len(roots)} tables can be read: {'; '.join(read_errors[:MAX_NAMED_FILES])}"
        )
    frame = pd.concat(frames, ignore_index=True)
    tables_phrase = "1 table was" if len(frames) == 1 else f"{len(frames)} tables were"
    sentences = [f"{tables_phrase} read ({_count_names(table.name for table in roots)})."]
    sentences += dict.fromkeys(notes)
    frame = _add_seed(frame, origins, sentences)
    sentences += _origin_notes(origins)
    if not origins:
        known_columns = list(frame)
        frame = add_settings_from_names(frame)
        new_columns = [name for name in frame if name not in known_columns]
        if new_columns:
            origin = f"the names of folders and files: {', '.join(new_columns)}"
            sentences.append(f"No configuration files were found. Settings are from {origin}.")
    if empty_folders:
        folder_names = [os.path.relpath(folder, base) for folder in empty_folders]
        folders_text = _shorten_list(folder_names, MAX_NAMED_FILES)
        sentences.append(f"Left out, because there is no table: {folders_text}.")
    if read_errors:
        unread_text = "; ".join(read_errors[:MAX_NAMED_FILES])
        if len(read_errors) > MAX_NAMED_FILES:
            unread_text += "; …"
        sentences.append(f"Left out, because it cannot be read: {unread_text}.")
        warnings.warn(f"left out, because it cannot be read: {unread_text}", stacklevel=4)
    return frame, sentences


def _shorten_list(names: Sequence[str], limit: int) -> str:
    """Join at most `limit` names, and append the number of the others.

    >>> _shorten_list(["a", "b"], 2), _shorten_list(["a", "b", "c"], 2)
    ('a, b', 'a, b and 1 more')
    """
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def _common_folder(folders: Iterable[Path]) -> Path:
    """Find the lowest folder that contains all of these; the current one if there is none."""
    try:
        return Path(os.path.commonpath([str(folder) for folder in folders]))
    except ValueError:  # some are absolute and others relative, or on several drives
        return Path()


# --- search for tables ----------------------------------------------------------------------------


def _find_tables(name: str | Path) -> tuple[list[tuple[Path, Path]], list[Path]]:
    """Find the tables of a folder, file or pattern, and the runs without a table.

    Returns:
        The tables, each with the folder at which the search for its settings stops; and folders
        that have a Hydra configuration but no table.

    Raises:
        DataError: If nothing matches a pattern, or a folder cannot be read.
    """
    path = Path(name)
    if is_pattern(name):
        matches = sorted(glob.glob(str(name), recursive=True), key=_natural_key)
        if not matches:
            raise DataError(f"{name}: no file or folder matches this pattern")
        root = _pattern_root(path)
        folders = [Path(match) for match in matches if os.path.isdir(match)]
        matched_files = [Path(match) for match in matches if not os.path.isdir(match)]
        tables = [file for file in matched_files if file.name.endswith(TABLE_SUFFIXES)]
        folders_without_table: list[Path] = []
        for folder in folders:
            folder_tables, configured_folders = _list_tables(folder)
            tables += folder_tables
            folders_without_table += configured_folders
        # If no match has the suffix of a table, as with `logs/*.txt`, all files are read as tables.
        return [(table, root) for table in tables or matched_files], folders_without_table
    if os.path.isdir(path):
        tables, folders_without_table = _list_tables(path)
        return [(table, path) for table in tables], folders_without_table
    return [(path, path.parent)], []


def _pattern_root(pattern: Path) -> Path:
    """Return the folder above the first part of a pattern that has wildcards.

    >>> (
    ...     _pattern_root(Path("outputs/a/*/metrics.csv")).as_posix(),
    ...     _pattern_root(Path("*.csv")).as_posix(),
    ... )
    ('outputs/a', '.')
    """
    parts: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _list_tables(folder: Path) -> tuple[list[Path], list[Path]]:
    """List the tables in a folder tree, and its folders with a Hydra configuration but no table.

    Hidden files and folders are ignored.

    Raises:
        DataError: If a folder cannot be read, if there are more than `MAX_TABLES` tables, or if
            tables have several names and none is in `USUAL_TABLE_NAMES`.
    """
    tables: list[Path] = []
    configured: list[Path] = []

    def raise_data_error(error: OSError) -> None:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror or error}")

    with files.convert_read_errors(folder):
        for parent, folders, names in os.walk(folder, onerror=raise_data_error):
            if ".hydra" in folders:
                configured.append(Path(parent))
            # `os.walk` skips the folders that are removed from this list.
            folders[:] = [name for name in folders if not name.startswith(".")]
            visible_names = [name for name in names if not name.startswith(".")]
            tables += [
                Path(parent, name) for name in visible_names if name.endswith(TABLE_SUFFIXES)
            ]
            if len(tables) > MAX_TABLES:
                raise DataError(
                    f"{folder}: more than {MAX_TABLES:,} tables; give a pattern such as"
                    " */metrics.csv"
                )
    usual_tables = sorted(_select_usual_tables(folder, tables), key=_natural_key)
    folders_with_table = {parent for table in usual_tables for parent in table.parents}
    folders_without_table = [run for run in configured if run not in folders_with_table]
    return usual_tables, sorted(folders_without_table, key=_natural_key)


def _select_usual_tables(folder: Path, tables: list[Path]) -> list[Path]:
    """Select the tables that are logs.

    If the tables have several names, those with the first of `USUAL_TABLE_NAMES` are logs. All
    tables are logs if they have the same name, or if each has a different name.

    Raises:
        DataError: If there are several names, none of them usual, and one occurs repeatedly.
    """
    counts = Counter(table.name for table in tables)
    for name in USUAL_TABLE_NAMES:
        if name in counts and len(counts) > 1:
            return [table for table in tables if table.name == name]
    if len(counts) <= 1 or max(counts.values()) == 1:
        return tables
    ((most_common_name, _),) = counts.most_common(1)
    raise DataError(
        f"{folder}: tables with different names ({_count_names(table.name for table in tables)}); "
        f"give a pattern such as '{folder}/**/{most_common_name}'"
    )


def _natural_key(path: str | Path) -> list[tuple[int, str]]:
    """Build a sorting key that orders paths by the numbers in them: `2` before `10`.

    Each part of a path is a pair, so that numbers can be compared with texts: texts come first.
    """
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))
    ]


def _count_names(names: Iterable[str]) -> str:
    """Write names with their counts, the most frequent first, such as `3 a.csv, b.csv`.

    The count of a single name is left out.
    """
    counts = Counter(names).most_common()
    count_texts = []
    for name, count in counts[:MAX_NAMED_FILES]:
        count_texts.append(name if count == 1 or len(counts) == 1 else f"{count} {name}")
    if len(counts) > MAX_NAMED_FILES:
        count_texts.append("…")
    return ", ".join(count_texts)


# --- names and settings of runs -------------------------------------------------------------------


def _add_run_name(frame: pd.DataFrame, table: Path, base: Path) -> pd.DataFrame:
    """Add a column with the run's name to a table, unless the table has one.

    The name is the path of the table relative to `base`: of its folder for a usual log file, and
    without the suffix for other files. For a file from TensorBoard, the run is part of the file's
    name, and the column `Value` is renamed to the tag.
    """
    name = table.relative_to(base).as_posix() if table.is_relative_to(base) else table.as_posix()
    if table.name in USUAL_TABLE_NAMES:
        run = Path(name).parent.as_posix()
    else:
        run = name.removesuffix(table.suffix)
    match = TENSORBOARD_FILE_PATTERN.fullmatch(table.stem)
    if match and set(frame.columns) == set(TENSORBOARD_COLUMNS):
        run = match["run"]
        frame = frame.rename(columns={"Value": match["tag"]})
    return frame if RUN_COLUMN in frame else frame.assign(**{RUN_COLUMN: run})


def _add_settings(
    frame: pd.DataFrame, settings: dict[str, Value]
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Add a column for each setting to a table, and also return the columns' names by setting.

    The column of a setting `x` is called `config.x` if `x` is a column of the table or has a fixed
    meaning in a verdict.
    """
    columns = {
        setting: f"config.{setting}" if setting in frame or setting in RESERVED_NAMES else setting
        for setting in settings
    }
    setting_columns = pd.DataFrame(
        {column: [settings[setting]] * len(frame) for setting, column in columns.items()},
        index=frame.index,
        dtype=object,
    )
    return pd.concat([frame, setting_columns], axis=1), columns


def _add_seed(frame: pd.DataFrame, origins: dict[str, set[str]], notes: list[str]) -> pd.DataFrame:
    """Add a column `seed` if exactly one column has a usual name of a seed, such as `rng_seed`.

    Columns such as `data.seed` are considered only if there is none without a point in its name.
    The function also extends `notes` and `origins`, in place.
    """
    if "seed" in frame:
        return frame
    named_seed = [name for name in map(str, frame.columns) if name.rpartition(".")[2] in SEED_NAMES]
    outermost = [name for name in named_seed if "." not in name]
    seed_columns = outermost or named_seed
    if len(seed_columns) > 1:
        notes.append(
            f"Several settings may be the seed ({', '.join(seed_columns)}): choose one by block=."
        )
    if len(seed_columns) != 1:
        return frame
    (seed_column,) = seed_columns
    origins["seed"] = origins.get(seed_column, set())
    notes.append(f"The column seed is a copy of {seed_column}.")
    return frame.assign(seed=frame[seed_column])


def _config_name(file: Path) -> str:
    """Return the entry of `CONFIG_FILES` that a configuration file has as the end of its path."""
    return next(name for name in CONFIG_FILES if file.as_posix().endswith(name))


def _origin_notes(origins: dict[str, set[str]]) -> Iterator[str]:
    """Yield a sentence for each set of files, on the settings that came from these files."""
    columns_by_files: dict[str, list[str]] = {}
    for column, names in origins.items():
        columns_by_files.setdefault(" and ".join(sorted(names)), []).append(column)
    for origin, columns in columns_by_files.items():
        columns_text = _shorten_list(sorted(columns), MAX_NAMED_SETTINGS)
        yield f"Settings are from {origin}: {columns_text}."


def add_settings_from_names(frame: pd.DataFrame) -> pd.DataFrame:
    """Add columns parsed from the names of runs: `optimizer=adam,seed=3`, `adam/seed_3`.

    A setting becomes a column if all names have it. The parts of a name that are not settings and
    not common to all names become the column `group`. It is added only if runs have a seed, every
    run has such parts, and they differ.

    >>> add_settings_from_names(pd.DataFrame({"run": ["adam/seed_0", "sgd/seed_0"]})).to_dict(
    ...     "list"
    ... )
    {'run': ['adam/seed_0', 'sgd/seed_0'], 'seed': [0, 0], 'group': ['adam', 'sgd']}
    >>> add_settings_from_names(pd.DataFrame({"run": ["lr=0.1,seed=2", "lr=0.2,seed=2"]})).to_dict(
    ...     "list"
    ... )
    {'run': ['lr=0.1,seed=2', 'lr=0.2,seed=2'], 'lr': [0.1, 0.2], 'seed': [2, 2]}
    """
    run_names = frame[RUN_COLUMN].astype(str)
    settings_by_run: dict[str, dict[str, Value]] = {}
    remainders: dict[str, list[str]] = {}  # the other parts of each run's name
    for run in dict.fromkeys(run_names):
        settings_by_run[run], remainders[run] = _parse_run_name(run)
    all_names = dict.fromkeys(name for settings in settings_by_run.values() for name in settings)
    for name in all_names:
        if name not in frame and all(name in settings for settings in settings_by_run.values()):
            frame = frame.assign(**{name: [settings_by_run[run][name] for run in run_names]})
    shared_parts = set.intersection(*map(set, remainders.values()))
    groups = {}
    for run, remainder in remainders.items():
        groups[run] = "/".join(part for part in remainder if part not in shared_parts)
    if (
        "seed" in frame
        and "group" not in frame
        and len(set(groups.values())) > 1
        and all(groups.values())
    ):
        frame = frame.assign(group=frame[RUN_COLUMN].astype(str).map(groups))
    return frame


def _parse_run_name(run: str) -> tuple[dict[str, Value], list[str]]:
    """Split a run's name into settings and remaining parts.

    >>> _parse_run_name("optimizer=adam,seed=3"), _parse_run_name("adam-seed3/version_0")
    (({'optimizer': 'adam', 'seed': 3}, []), ({'seed': 3}, ['adam', 'version_0']))
    """
    settings: dict[str, Value] = {}
    remainder: list[str] = []
    # A name is split at slashes, and at a comma that a name and an equals sign follow.
    for segment in re.split(r"[/\\]|,(?=[^,=/]+=)", run):
        name, separator, text = segment.partition("=")
        if separator and name.isidentifier():
            settings[name] = parse_value(text)
            continue
        match = SEED_PATTERN.search(segment)
        if match:
            settings["seed"] = int(match[1])
            # The seed is cut out, and with it the marks that separated it from the rest.
            segment = (segment[: match.start()] + segment[match.end() :]).strip(" _-=.,:")
        if segment:
            remainder.append(segment)
    return settings, remainder
