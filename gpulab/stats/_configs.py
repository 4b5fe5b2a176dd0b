"""Read the configurations that Hydra and Lightning store next to a run's tables.

Files are read as plain data. A YAML tag for a Python object, such as `!!python/tuple`, is ignored:
its value is read as a list, dictionary or text. Nothing is imported or called.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import DataError

if TYPE_CHECKING:
    import yaml

# In order of precedence: first the overrides from Hydra's command line, then whole configurations.
OVERRIDES = ".hydra/overrides.yaml"
CONFIG_FILES = (OVERRIDES, ".hydra/config.yaml", "hparams.yaml", "config.yaml")
MAX_CONFIG_BYTES = 1 << 20
# The largest number of settings in a file. YAML's aliases can expand a short file enormously.
MAX_SETTINGS = 10_000
MAX_NESTING = 40  # levels of nesting
# YAML 1.1 reads 1e-3 as a text, because it has no point. Hydra reads it as a number, and so does
# this module.
NUMBER_PATTERN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
# A reference to another setting of the same file, such as ${optimizer.lr}.
REFERENCE_PATTERN = re.compile(r"\$\{([\w.]+)\}")

MAX_TEXT_LENGTH = 500  # the largest length of the text of a list or another object
# Writes lists as text and abbreviates large ones. YAML's aliases can make a list contain itself.
LIST_REPR = reprlib.Repr()
LIST_REPR.maxlevel = 4
LIST_REPR.maxlist = 64
LIST_REPR.maxdict = 64
LIST_REPR.maxstring = MAX_TEXT_LENGTH
LIST_REPR.maxlong = MAX_TEXT_LENGTH
LIST_REPR.maxother = MAX_TEXT_LENGTH

Value = str | int | float | bool
# A node of a YAML document: a mapping, a list or a plain value.
Node = Any


def read_settings(file: Path) -> dict[str, Value]:
    r"""Read the settings in a configuration file by name.

    Nested settings have names such as `optimizer.lr`. Lists become texts.

    Raises:
        DataError: If the file cannot be read, is not YAML, is too large, or is not a mapping.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "config.yaml"
        >>> _ = file.write_text(
        ...     "seed: 3\noptimizer:\n  lr: 1e-3\n  betas: !!python/tuple [0.9, 0.99]\n"
        ... )
        >>> read_settings(file)
        {'seed': 3, 'optimizer.lr': 0.001, 'optimizer.betas': '[0.9, 0.99]'}
    """
    content = files.read(file, MAX_CONFIG_BYTES)
    with files.convert_read_errors(file, "cannot be read as YAML"):
        node = load_yaml(content)
        if file.name == Path(OVERRIDES).name and isinstance(node, list):
            return dict(_parse_overrides(node))
        if node is None:
            return {}
        if not isinstance(node, dict):
            raise ValueError(f"expected settings by name, got a {type(node).__name__}")
        return _resolve_references(dict(_flatten(node)))


def load_yaml(content: bytes | str) -> Node:
    """Read a YAML document as plain data: mappings, lists, texts, numbers, booleans and None.

    Values with unknown tags are read as if they had no tag.

    Raises:
        yaml.YAMLError: If the content is not YAML.
        ValueError: If a mapping has more than `MAX_SETTINGS` entries.
    """
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """A safe loader that reads values of unknown tags as the data they are written with."""

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            # Merging mappings that are themselves merged can make the number grow exponentially.
            if len(node.value) > MAX_SETTINGS:
                raise ValueError(f"more than {MAX_SETTINGS:,} settings")

    def construct_plain(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> Node:
        """Read a value as a dictionary, a list or a plain value, whatever its tag is."""
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    PlainLoader.add_multi_constructor("", construct_plain)
    return yaml.load(content, PlainLoader)


def _flatten(settings: dict[Any, Node]) -> Iterator[tuple[str, Value]]:
    """Yield each setting of nested mappings with its full name, such as `optimizer.lr`.

    Metadata of Weights & Biases (`_wandb`) is left out.

    Raises:
        ValueError: If there are more than `MAX_SETTINGS` settings, or more than `MAX_NESTING`
            levels.
    """
    # A stack of nodes that are not read yet, each with its full name and its depth.
    pending: list[tuple[str, Node, int]] = [("", settings, 0)]
    for _ in range(MAX_SETTINGS):
        if not pending:
            return
        name, node, depth = pending.pop()
        if isinstance(node, dict) and name and "value" in node and set(node) <= {"value", "desc"}:
            node = node["value"]  # Weights & Biases writes settings as {"desc": …, "value": …}
        if not isinstance(node, dict):
            yield name, as_cell_value(node)
            continue
        if depth > MAX_NESTING:
            raise ValueError(f"settings are nested more than {MAX_NESTING} deep")
        children = [
            (f"{name}.{key}" if name else str(key), value, depth + 1) for key, value in node.items()
        ]
        # In reversed order, because the last one is taken from the stack first.
        pending += [
            (child_name, value, child_depth)
            for child_name, value, child_depth in reversed(children)
            if not child_name.startswith("_wandb")
        ]
    raise ValueError(f"more than {MAX_SETTINGS:,} settings")


def as_cell_value(value: Node) -> Value:
    """Convert a value of a YAML document to a cell of a table.

    None becomes the text `null`. Lists and other objects become texts of limited length.

    >>> [as_cell_value(value) for value in (1, True, "1e-3", None, [1, "a"], "cpu")]
    [1, True, 0.001, 'null', "[1, 'a']", 'cpu']
    """
    if value is None:
        return "null"
    if isinstance(value, str) and NUMBER_PATTERN.fullmatch(value):
        return float(value)
    if isinstance(value, (list, set, tuple)):
        return LIST_REPR.repr(list(value))
    return value if isinstance(value, (str, int, float, bool)) else str(value)[:MAX_TEXT_LENGTH]


def _parse_overrides(lines: list[Node]) -> Iterator[tuple[str, Value]]:
    """Yield the overrides of Hydra's command line, such as `optimizer=adam` and `+seed=3`.

    Deletions, such as `~optimizer.lr`, are skipped.
    """
    for line in lines:
        name, separator, text = str(line).partition("=")
        if separator and not name.startswith("~"):
            yield name.lstrip("+"), parse_value(text)


def parse_value(text: str) -> Value:
    """Parse the value of a setting from the text after `name=`.

    A text that is not YAML, or is a mapping, stays a text.

    >>> [parse_value(text) for text in ("3", "1e-3", "adam", "true", "[1,2]", "{")]
    [3, 0.001, 'adam', True, '[1, 2]', '{']
    """
    import yaml

    try:
        node = load_yaml(text)
    except (yaml.YAMLError, RecursionError):
        return text
    return text if isinstance(node, dict) else as_cell_value(node)


def _resolve_references(settings: dict[str, Value]) -> dict[str, Value]:
    """Replace each reference, such as `${optimizer.lr}`, by the value of the setting that it names.

    The dictionary is changed in place and returned.
    """
    for name in settings:
        for _ in range(5):  # follows chains of references, and ends for circular ones
            match = REFERENCE_PATTERN.fullmatch(str(settings[name]))
            if not match or match[1] not in settings:
                break
            settings[name] = settings[match[1]]
    return settings


def find_settings(table: Path, root: Path) -> tuple[dict[str, tuple[Value, Path]], list[DataError]]:
    """Find the settings of a table's run, each with its file, and the errors of unreadable files.

    Configuration files are searched for in the table's folder and in the folders above it, up to
    `root`. If a setting occurs several times, the file in the nearest folder takes precedence, and
    in one folder the first of `CONFIG_FILES`.
    """
    settings: dict[str, tuple[Value, Path]] = {}
    errors: list[DataError] = []
    # From the table's folder up to `root`; only the table's folder if it is not inside `root`.
    folders = [table.parent]
    while folders[-1] != root and root in folders[-1].parents:
        folders.append(folders[-1].parent)
    for folder in folders:
        for name in CONFIG_FILES:
            file = folder / name
            try:
                with files.convert_read_errors(file):
                    is_file = file.is_file()
                if not is_file:
                    continue
                file_settings = read_settings(file)
            except DataError as error:
                errors.append(error)
                continue
            for setting, value in file_settings.items():
                settings.setdefault(setting, (value, file))  # files that were read before win
    return settings, errors
