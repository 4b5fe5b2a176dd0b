"""User functions: found by the name of a module or file, and identified by their source text."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from gpulab.errors import UsageError, describe_error
from gpulab.files import JSON, PACKAGE

Definition = Callable[..., object] | type  # a function or a class

LIBRARY_FOLDERS = [PACKAGE, *map(Path, map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))]
# Older commands name the file.
MOVED_FILES = {"benchmarks/networks.py": "gpulab.models.example_steps"}
# Modules of gpulab by the names that they had when digests of user code began to include them, so
# that stored runs keep their ids. Other private modules had their name without the underscore.
FORMER_MODULES = {
    "gpulab.audits._audit": "gpulab.audits.audits",
    "gpulab.device._roofline": "gpulab.device.rooflines",
    "gpulab.guards._guard": "gpulab.guards.guards",
    "gpulab.saddles._hessian": "gpulab.saddles.hessians",
    "gpulab.stats._inference": "gpulab.stats.tests",
    "gpulab.stats._verdict": "gpulab.stats.verdicts",
    "gpulab.store._run_store": "gpulab.store.runs",
}
# Members of a class that nobody wrote.
GENERATED_MEMBERS = (
    "__dict__",
    "__weakref__",
    "__module__",
    "__annotations__",
)


def find_function(name: str, role: str) -> Callable[..., Any]:
    """Find the function or other callable that `module:name` or `file.py:name` names.

    A file is read anew each time. As for a script, what lies beside it can be imported.

    Args:
        name: Where, and what there.
        role: What is wanted, in the words of an error: a `step`, a `training`.

    Raises:
        UsageError: Where there is none, with what the import raised.

    Examples:
        >>> find_function("math:sqrt", "step")
        <built-in function sqrt>
        >>> for name in ("math", "math:2"):
        ...     try:
        ...         find_function(name, "step")
        ...     except UsageError as error:
        ...         print(error)
        step 'math': expected module:name or file.py:name, such as my_training:step
        step 'math:2': expected module:name or file.py:name, such as my_training:step
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise UsageError(
            f"{role} {name!r}: expected module:name or file.py:name, such as my_training:{role}"
        )
    moved_module = MOVED_FILES.get(Path(source).as_posix())
    if moved_module is not None and not Path(source).exists():
        source = moved_module
    try:
        if source.endswith(".py"):
            module = _load_module(Path(source).resolve())
        else:
            _add_to_path(os.getcwd())
            module = importlib.import_module(source)
    except (Exception, SystemExit) as error:
        words = (
            str(error)
            if isinstance(error, ImportError | OSError)
            else describe_error(error, source)
        )
        raise UsageError(f"{role} {name!r}: {source} cannot be imported: {words}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        expected = "function or gpulab.Step" if role == "step" else "function"
        raise UsageError(f"{role} {name!r}: {source} has no {expected} named {attribute!r}")
    return function


def _add_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _load_module(file: Path) -> types.ModuleType:
    """Load a file as a module from its text, without Python's cache.

    The cache confuses two texts of the same length that were written within a second.
    """
    _add_to_path(str(file.parent))
    loaded = sys.modules.get(file.stem)
    is_another = loaded is not None and getattr(loaded, "__file__", None) != str(file)
    name = f"_{file.stem}" if is_another else file.stem
    module = types.ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and the processes of a DataLoader look for it there
    try:
        exec(compile(file.read_bytes(), file, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]  # half a module would be taken for the whole by the next import
        raise
    return module


# --- source text ----------------------------------------------------------------------------------


class UnknownSourceError(Exception):
    """An object without source text that JSON cannot represent; the message names it."""


def source_of(value: object, file: Path | None = None, enclosing: tuple[object, ...] = ()) -> JSON:
    """The source of a function as JSON: its file, and the files beside it that this imports.

    Of one that was typed into a notebook it is its own text, with what that names: functions and
    classes by their text, what belongs to a library by its name, numbers and texts as they are.
    What a function takes from one around it counts, too. Not noticed are files that are only read,
    and modules that are imported under a computed name.

    Args:
        value: The function; or what it names.
        file: Where it is written, if that is known.
        inside: What names it, which may be itself.

    Raises:
        UnknownSourceError: For a function without a text, and for an object, whose content has
            none.
    """
    if isinstance(value, functools.partial):  # its keywords are options
        return [source_of(value.func, file), [source_of(item) for item in value.args]]
    if not isinstance(
        value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type
    ):
        try:
            return json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise UnknownSourceError(f"a {type(value).__qualname__} in it has no text") from None
    if (
        value in enclosing
        or isinstance(value, types.ModuleType)
        or (enclosing and _is_library_code(value))
    ):
        return [_digest_module_name(getattr(value, "__module__", "")), value.__name__]
    if isinstance(value, types.BuiltinFunctionType):
        raise UnknownSourceError(f"no text of {value.__qualname__}")
    file = file or file_of(value)
    referenced = _referenced_objects(value, typed=file is None)
    text: JSON = ""  # `inspect` knows no text of a class that was typed: its members stand for it
    try:
        if file:
            text = read_sources(file)
        elif not isinstance(value, type):
            text = inspect.getsource(value)
    except (OSError, TypeError):
        raise UnknownSourceError(f"no text of {value.__qualname__}") from None
    return [
        text,
        {name: source_of(item, None, (*enclosing, value)) for name, item in referenced.items()},
    ]


def _referenced_objects(definition: types.FunctionType | type, typed: bool) -> dict[str, object]:
    """The objects that a function takes from its surroundings.

    If it was typed interactively, also what it names of what was typed there.

    Of a class that was typed, of which `inspect` has no text, its bases and members.
    """
    if isinstance(definition, type):
        members = {
            name: member
            for name, member in vars(definition).items()
            if name not in GENERATED_MEMBERS
        }
        plain_members = {
            name: getattr(member, "__func__", getattr(member, "fget", member))
            for name, member in members.items()
        }
        return (
            plain_members | {base.__name__: base for base in definition.__bases__} if typed else {}
        )
    cells = zip(definition.__code__.co_freevars, definition.__closure__ or (), strict=True)
    referenced = {name: cell.cell_contents for name, cell in cells}
    global_names = (
        {name for code in _nested_codes(definition.__code__) for name in code.co_names}
        if typed
        else set()
    )
    return referenced | {
        name: definition.__globals__[name]
        for name in sorted(global_names & definition.__globals__.keys())
    }


def file_of(definition: Definition) -> Path | None:
    """The file that defines a function or class; None if it was typed interactively."""
    if definition.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return None
    try:
        file = Path(inspect.getsourcefile(definition) or "")
    except TypeError:
        return None
    return file.resolve() if file.is_file() else None


def _digest_module_name(module: str) -> str:
    """The name that stands for a module in the digest of user code.

    >>> _digest_module_name("gpulab.training._run"), _digest_module_name("gpulab.guards._guard")
    ('gpulab.training.run', 'gpulab.guards.guards')
    """
    if module in FORMER_MODULES:
        return FORMER_MODULES[module]
    return module.replace("._", ".") if module.startswith("gpulab.") else module


def _is_library_code(definition: Definition) -> bool:
    file = file_of(definition)
    in_library = file is None or any(
        file.is_relative_to(folder.resolve()) for folder in LIBRARY_FOLDERS
    )
    return in_library and definition.__module__ != "__main__"


def read_sources(file: Path) -> dict[str, str]:
    """The text of a file and of all files beside it that it imports, by relative name."""
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    # What is not below the folder, such as torch, it does not find.
    finder = ModuleFinder([str(root)])
    if root == file.parent:
        finder.run_script(str(file))  # it reads the script without running it
    else:
        finder.import_hook(".".join(file.relative_to(root).with_suffix("").parts))
    names = [getattr(module, "__file__", None) for module in finder.modules.values()]
    files = {Path(name) for name in names if name}
    texts = {file: file.read_text(encoding="utf-8", errors="replace") for file in files}
    return {file.relative_to(root).as_posix(): text for file, text in texts.items()}


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code objects of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _nested_codes(constant)
