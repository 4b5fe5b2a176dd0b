"""Functions of the user's, found by the name of a module or file."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpulab.errors import UsageError, in_one_line
from gpulab.files import shipped


def find_function(name: str, role: str) -> Callable[..., Any]:
    """The function, or whatever can be called, that `module:name` or `file.py:name` stands for.

    A file is read anew each time. As for a script, what lies beside it can be imported.

    Args:
        name: Where, and what there.
        role: What is wanted, in the words of an error: a `step`, a `training`.

    Raises:
        UsageError: Where there is none, with what the import raised.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise UsageError(f"{role} {name!r}: expected module:name or file.py:name, such as my_training:{role}")
    try:
        if where.endswith(".py"):
            module = _module_of(shipped(where).resolve())
        else:
            _look_in(os.getcwd())
            module = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        words = str(error) if isinstance(error, ImportError | OSError) else in_one_line(error, where)
        raise UsageError(f"{role} {name!r}: {where} cannot be imported: {words}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        expected = "function or gpulab.Step" if role == "step" else "function"
        raise UsageError(f"{role} {name!r}: {where} has no {expected} named {attribute!r}")
    return function


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _module_of(file: Path) -> types.ModuleType:
    """A file as a module, from its text: Python's cache takes two texts of one second and one length for the same."""
    _look_in(str(file.parent))
    loaded_module = sys.modules.get(file.stem)
    name = (
        file.stem if loaded_module is None or getattr(loaded_module, "__file__", None) == str(file) else f"_{file.stem}"
    )
    module = types.ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and the processes of a DataLoader look for it there
    try:
        exec(compile(file.read_bytes(), file, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]  # half a module would be taken for the whole by the next import
        raise
    return module
