"""Find user functions by module or file name, and identify them by their source text."""

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
# Commands of earlier versions refer to example steps by a file that has moved into the package.
MOVED_FILES = {"benchmarks/networks.py": "gpulab.models.example_steps"}
# The former names of modules that have been renamed. Digests of user code use the former names, so
# that the ids of stored runs remain valid. All other private modules were renamed by adding an
# underscore only.
FORMER_MODULES = {
    "gpulab.audits._audit": "gpulab.audits.audits",
    "gpulab.device._roofline": "gpulab.device.rooflines",
    "gpulab.guards._guard": "gpulab.guards.guards",
    "gpulab.saddles._hessian": "gpulab.saddles.hessians",
    "gpulab.stats._inference": "gpulab.stats.tests",
    "gpulab.stats._verdict": "gpulab.stats.verdicts",
    "gpulab.store._run_store": "gpulab.store.runs",
}
# Members of a class that Python creates itself.
GENERATED_MEMBERS = ("__dict__", "__weakref__", "__module__", "__annotations__")


def find_function(name: str, role: str) -> Callable[..., Any]:
    """Find the function or other callable given as `module:name` or `file.py:name`.

    A file is read again at each call. The folder of the file, or the current folder for a module,
    is added to the import path, as for a script.

    Args:
        name: The module or file, and the name in it.
        role: The word for the function in error messages, such as `step` or `training`.

    Raises:
        UsageError: If there is no such callable, or the import fails.

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
    """Add a folder at the beginning of the import path, unless it is there already."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _load_module(file: Path) -> types.ModuleType:
    """Load a file as a module, without Python's cache of compiled files.

    The cache misses a change within the same second that keeps the length of the file. The module
    is registered under the name of the file, with an underscore if that name is taken.
    """
    _add_to_path(str(file.parent))
    loaded = sys.modules.get(file.stem)
    is_another = loaded is not None and getattr(loaded, "__file__", None) != str(file)
    name = f"_{file.stem}" if is_another else file.stem
    module = types.ModuleType(name)
    module.__file__ = str(file)
    # The module must be registered for dataclasses and for the processes of a DataLoader.
    sys.modules[name] = module
    try:
        exec(compile(file.read_bytes(), file, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]  # otherwise the next import would find the incomplete module
        raise
    return module


# --- source text ----------------------------------------------------------------------------------


class UnknownSourceError(Exception):
    """Raised for an object without source text that JSON cannot represent; the message names it."""


def source_of(value: object, file: Path | None = None, enclosing: tuple[object, ...] = ()) -> JSON:
    """Return the source of a function as JSON: the text of its file and of the files it imports.

    Only imported files in the same folder or package are included. For a function that was typed
    interactively, as in a notebook, the source consists of its own text and of the objects that it
    refers to: functions and classes by their source, objects of libraries by their names, and
    numbers and texts by their values. Variables of enclosing functions are included in both cases.
    Data files, and modules whose names are computed at run time, are not included.

    Args:
        value: The function, or an object that it refers to.
        file: The file that defines the function, if known.
        enclosing: The functions and classes that refer to `value`, the innermost last. Their own
            text is not repeated, so recursive references end.

    Raises:
        UnknownSourceError: If a function has no text, or an object cannot be represented in JSON.
    """
    if isinstance(value, functools.partial):  # keywords are options, which are identified elsewhere
        return [source_of(value.func, file), [source_of(item) for item in value.args]]
    if not isinstance(
        value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type
    ):
        try:
            return json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise UnknownSourceError(
                f"a {type(value).__qualname__} in it has no source code"
            ) from None
    if (
        value in enclosing
        or isinstance(value, types.ModuleType)
        or (enclosing and _is_library_code(value))
    ):
        return [_digest_module_name(getattr(value, "__module__", "")), value.__name__]
    if isinstance(value, types.BuiltinFunctionType):
        raise UnknownSourceError(f"{value.__qualname__} has no source code")
    file = file or file_of(value)
    referenced = _referenced_objects(value, typed=file is None)
    # `inspect` has no text of a class that was typed interactively. Its members represent it.
    text: JSON = ""
    try:
        if file:
            text = read_sources(file)
        elif not isinstance(value, type):
            text = inspect.getsource(value)
    except (OSError, TypeError):
        raise UnknownSourceError(f"{value.__qualname__} has no source code") from None
    return [
        text,
        {name: source_of(item, None, (*enclosing, value)) for name, item in referenced.items()},
    ]


def _referenced_objects(definition: types.FunctionType | type, typed: bool) -> dict[str, object]:
    """Return the objects that a function or class refers to, by name.

    For a function, these are the variables of enclosing functions, and the globals if it was typed
    interactively (`typed`). For a class, these are its members and bases if it was typed
    interactively, and nothing otherwise.
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
    """Return the file that defines a function or class; None if it was typed interactively."""
    if definition.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return None
    try:
        file = Path(inspect.getsourcefile(definition) or "")
    except TypeError:
        return None
    return file.resolve() if file.is_file() else None


def _digest_module_name(module: str) -> str:
    """Return the name of a module in digests of user code, which is its former name.

    >>> _digest_module_name("gpulab.training._run"), _digest_module_name("gpulab.guards._guard")
    ('gpulab.training.run', 'gpulab.guards.guards')
    """
    if module in FORMER_MODULES:
        return FORMER_MODULES[module]
    return module.replace("._", ".") if module.startswith("gpulab.") else module


def _is_library_code(definition: Definition) -> bool:
    """Return whether a function or class belongs to gpulab, Python or an installed library."""
    file = file_of(definition)
    in_library = file is None or any(
        file.is_relative_to(folder.resolve()) for folder in LIBRARY_FOLDERS
    )
    return in_library and definition.__module__ != "__main__"


def read_sources(file: Path) -> dict[str, str]:
    """Read a file and all files of the same folder or package that it imports, by relative name."""
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    # The finder searches only below this folder, so it does not find libraries such as torch.
    finder = ModuleFinder([str(root)])
    if root == file.parent:
        finder.run_script(str(file))  # despite its name, the method only reads the script
    else:
        finder.import_hook(".".join(file.relative_to(root).with_suffix("").parts))
    names = [getattr(module, "__file__", None) for module in finder.modules.values()]
    files = {Path(name) for name in names if name}
    texts = {file: file.read_text(encoding="utf-8", errors="replace") for file in files}
    return {file.relative_to(root).as_posix(): text for file, text in texts.items()}


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code objects of a function and of all functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _nested_codes(constant)
