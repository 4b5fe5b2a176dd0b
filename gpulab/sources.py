"""What a value was, as a hash: of code the text that it was made from, of anything else what it holds."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterator
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import torch
from joblib.hashing import NumpyHasher
from torch import Tensor

from gpulab.content import bytes_of

PACKAGE = Path(__file__).parent
LIBRARIES = (PACKAGE, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
GENERATED = ("__dict__", "__weakref__", "__module__", "__dataclass_")  # members of a class that nobody wrote


class UnknownContentError(Exception):
    """Something whose content cannot be known; the message says what."""


def content_hash(value: Any) -> str:
    """The SHA-256 of what a value is: equal for equal content, in every process.

    A function or class counts by the text of its file, with the files beside it that this imports; or, where it was
    typed into a notebook, by its own text and all that this names. What belongs to a library counts by its name.
    Not noticed are files that are only read, and modules that are imported under a name that is computed.

    Raises:
        UnknownContentError: For what hides it, such as an object of a library in C.

    Examples:
        >>> content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1}) != content_hash({"a": 1})
        True
    """
    return ContentHasher("sha256").hash(value)


class ContentHasher(NumpyHasher):
    """joblib's hash, for which tensors count by their numbers, and code by its text."""

    def __init__(self, hash_name: str) -> None:
        super().__init__(hash_name=hash_name)
        self.inside: set[int] = set()  # the code that is being hashed, which may name itself

    def save(self, obj: Any) -> None:
        """As pickle's."""
        if isinstance(obj, Tensor):
            obj = ("tensor", str(obj.dtype), tuple(obj.shape), bytes_of(obj))
        elif isinstance(obj, torch.Generator):
            obj = ("generator", bytes_of(obj.get_state()))
        elif isinstance(obj, types.ModuleType):
            obj = ("module", obj.__name__)
        elif isinstance(obj, property):
            obj = (obj.fget, obj.fset, obj.fdel)
        elif isinstance(obj, staticmethod | classmethod):
            obj = obj.__func__
        elif isinstance(obj, types.FunctionType | type):
            obj = self.code(obj)
        try:
            super().save(obj)
        except UnknownContentError:
            raise
        except Exception:  # whatever a class says that cannot be copied
            raise UnknownContentError(f"a {type(obj).__qualname__} in it") from None

    def code(self, definition: Any) -> Any:
        """What stands for a function or class."""
        name = (definition.__module__, definition.__qualname__)
        if _of_library(definition) or id(definition) in self.inside:
            return name
        self.inside.add(id(definition))
        if file := file_of(definition):
            text: Any = sorted(texts_of(file).items())
        elif isinstance(definition, type):  # inspect gives no text of a class that was typed
            members = {key: value for key, value in vars(definition).items() if not key.startswith(GENERATED)}
            text = definition.__bases__, members
        else:
            text = _typed_text(definition), sorted(_named_globals(definition).items())
        closure = [cell.cell_contents for cell in getattr(definition, "__closure__", None) or ()]
        return name[1], text, closure


def file_of(definition: Any) -> Path | None:
    """The file in which a function or class is written; None where it was typed into a notebook or a console."""
    if definition.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return None
    try:
        file = Path(inspect.getsourcefile(definition) or "")
    except TypeError:
        return None
    return file.resolve() if file.is_file() else None


@functools.cache
def _library_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return bool(file) and any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def _of_library(definition: Any) -> bool:
    module = definition.__module__
    return module != "__main__" and (module in sys.builtin_module_names or _library_module(module))


def texts_of(file: Path) -> dict[str, str]:
    """The text of a file and of each that it imports from beside it, and those import, by their names from there."""
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    finder = ModuleFinder([str(root)])  # what is not below the folder, such as torch, it does not find
    if root == file.parent:
        finder.run_script(str(file))  # which it reads, and does not run
    else:
        finder.import_hook(".".join(file.relative_to(root).with_suffix("").parts))
    found = {Path(each.__file__) for each in finder.modules.values() if getattr(each, "__file__", None)}  # type: ignore[attr-defined]
    texts = {each: each.read_text(encoding="utf-8", errors="replace") for each in found}
    return {each.relative_to(root).as_posix(): text for each, text in texts.items()}


def _typed_text(function: Any) -> str:
    """The text of a function that was typed, or made by a decorator."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except OSError:
        raise UnknownContentError(f"no text of {function.__qualname__}") from None


def _named_globals(function: Any) -> dict[str, Any]:
    """What the code of a function names of what was typed beside it."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those inside it."""
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)
