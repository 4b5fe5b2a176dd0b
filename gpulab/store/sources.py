"""What a function or a network was, so that a changed one is not taken for the same: its text, and what it holds."""

from __future__ import annotations

import ast
import contextlib
import copyreg
import functools
import hashlib
import inspect
import json
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpulab.store.identities import bytes_of

PACKAGE = Path(__file__).parents[1]
PARSING = threading.Lock()  # Python 3.11's parser counts its recursion for all threads together
MAIN = ("__name__ == '__main__'", "'__main__' == __name__")


def digest(function: Any, file: Path | None, bound: list[Any]) -> str:
    """A digest of the text of a function's file or cells, and of the values that `innermost` found.

    One of gpulab's own says in `PARTS` on which other files it depends. Any other may name files and packages of
    gpulab in `GPULAB_PARTS`: when one of them changes, its runs are others.
    """
    if file and file.is_relative_to(PACKAGE):
        text: Any = of_gpulab(file.relative_to(PACKAGE).as_posix(), *function.__globals__["PARTS"])
    else:
        text = _files_text(file) if file else sorted(_typed(function, {}).items())
        part_names = getattr(function, "__globals__", {}).get("GPULAB_PARTS")
        text = [text, of_gpulab(*part_names)] if part_names else text
    return hashlib.sha256(json.dumps([text, content(bound)]).encode()).hexdigest()


@functools.cache
def of_gpulab(*names: str) -> str:
    """A digest of files and packages of gpulab, without comments and docstrings."""
    paths = {path for name in names for path in [PACKAGE / name, *(PACKAGE / name).rglob("*.py")] if path.is_file()}
    texts = [(file.relative_to(PACKAGE).as_posix(), _without_docstrings(file)) for file in sorted(paths)]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _without_docstrings(file: Path) -> str:
    with PARSING:
        tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
    return ast.dump(tree)


def innermost(train: Any) -> tuple[Any, list[Any]]:
    """The function below partial, methods and decorators, and the values that they and its closure hold."""
    bound: list[Any] = []
    while not inspect.isfunction(train) or hasattr(train, "__wrapped__"):
        if isinstance(train, functools.partial):
            bound += [train.args, train.keywords]
            train = train.func
        elif inspect.ismethod(train):
            bound.append(vars(train.__self__) if not isinstance(train.__self__, type) else ())
            train = train.__func__
        elif hasattr(train, "__wrapped__"):
            train = train.__wrapped__
        elif inspect.isfunction(call := type(train).__call__):
            bound.append(vars(train))
            train = call
        else:
            return train, bound
    for cell in train.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that is empty
            bound.append(cell.cell_contents)
    return train, bound


def plain(value: Any) -> str:
    """A value as JSON; what JSON has not goes by its name, or by how it is written unless that is an address."""

    def as_text(item: Any) -> str:
        text = repr(item)
        return getattr(item, "__qualname__", type(item).__qualname__ if " at 0x" in text else text)

    return json.dumps(value, default=as_text, sort_keys=True, skipkeys=True)


def is_plain(value: Any) -> bool:
    """Whether JSON can carry a value as it is."""
    with contextlib.suppress(TypeError, ValueError):
        json.dumps(value)
        return True
    return isinstance(value, PurePath)


class UnknownContentError(Exception):
    """Something whose content cannot be known; the message says what."""


LIBRARIES = ("torch", "numpy", "pandas", "builtins", "gpulab", "functools", "collections", "copyreg")
WRITTEN = (torch.dtype, torch.device, torch.layout, torch.memory_format, PurePath, range, slice, complex, type(...))


def content(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """What a value is and holds, as JSON can carry it: equal for equal content, in every process.

    Raises:
        UnknownContentError: For what hides it, such as a generator of random numbers or an object of a library in C.

    Examples:
        >>> content({"size": (3, 4), "dtype": torch.float32})
        ['dict', [['size', ['tuple', [3, 4]]], ['dtype', 'torch.float32']]]
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in inside:
        return "itself"
    of = functools.partial(content, inside=(*inside, id(value)))
    type_name = type(value).__qualname__
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return [type_name, str(value.dtype), list(value.shape), hashlib.sha256(bytes_of(value)).hexdigest()]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return [type_name, str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, bytes | bytearray):
        return [type_name, hashlib.sha256(value).hexdigest()]
    if isinstance(value, Mapping):
        return [type_name, [[of(key), of(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple | deque):
        return [type_name, [*map(of, value)]]
    if isinstance(value, set | frozenset):
        return [type_name, sorted(map(of, value), key=json.dumps)]
    if isinstance(value, WRITTEN):
        return str(value)
    if isinstance(value, nn.Module):
        weights = [of(parameter.detach()) for parameter in value.parameters(recurse=False)]
        return [of_module(value, of), weights, [*map(of, value.children())]]
    if isinstance(value, type | functools.partial) or inspect.isroutine(value):  # of code, and what it is bound to
        return _code(value, of)
    try:
        reduce = copyreg.dispatch_table.get(type(value), lambda instance: instance.__reduce_ex__(4))
        copied: Any = reduce(value)  # what a copy would be made of
    except Exception:  # whatever a class says that cannot be copied
        raise UnknownContentError(f"a {type_name} in it") from None
    if isinstance(copied, str):
        return [type_name, copied]
    return [type_name, *(of(list(element) if isinstance(element, Iterator) else element) for element in copied[:5])]


def _code(definition: Any, of: Any) -> Any:
    """A function or class by its name and, unless it is of a library, its text and what it is bound to."""
    if isinstance(definition, type):
        own = [base for base in definition.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES]
        return [definition.__qualname__, [digest(base, file_of(base), []) for base in own]]
    function, bound = innermost(definition)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)!s}"
    if inspect.isbuiltin(function) or name.partition(".")[0] in LIBRARIES:
        return [name, of(bound)]
    return [name, digest(function, file_of(function), []), of(bound)]


def of_module(module: nn.Module, of: Any = content) -> Any:
    """What a module is, and holds beside its parameters and parts: attributes, buffers and hooks."""
    ours = type(module).__module__.partition(".")[0] != "torch"
    skipped = ("_parameters", "_modules", "_backward_hooks", "_is_full_backward_hook")
    attributes = {name: value for name, value in vars(module).items() if name not in skipped}
    hooks = {name: list(value.values()) for name, value in attributes.items() if "_hooks" in name and value}
    rest = {n: v for n, v in attributes.items() if "_hooks" not in n and (ours or n[0] != "_" or n == "_buffers")}
    state = {n: v for n, v in rest.items() if not isinstance(v, nn.Parameter)} | hooks
    return [_code(type(module), of), of(state)]


def file_of(function: Any) -> Path | None:
    """Where a function is written; None for one that was typed into a notebook or a console."""
    if function.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return None
    with contextlib.suppress(TypeError):
        file = Path(inspect.getsourcefile(function) or "")
        return file.resolve() if file.is_file() else None
    return None


def _files_text(start: Path) -> list[tuple[str, str]]:
    """The text of a file and of those it imports from beside it, without comments and `if __name__ == "__main__"`."""
    root = start.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    texts: dict[str, str] = {}
    pending = [start]
    while pending:
        file = pending.pop()
        name = file.relative_to(root).as_posix()
        if name in texts or not file.is_file():
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # the import will say so
            continue
        tree.body = [n for n in tree.body if not isinstance(n, ast.If) or ast.unparse(n.test) not in MAIN]
        texts[name] = ast.unparse(tree)
        if "site-packages" not in file.parts:
            pending += _beside(tree, file.parent, root)
    return sorted(texts.items())


def _beside(tree: ast.Module, folder: Path, root: Path) -> Iterator[Path]:
    """Where a module's imports could be, below the root."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, start = [alias.name for alias in node.names], root
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
            start = [root, folder, *folder.parents][node.level]
            if not start.is_relative_to(root):
                continue
        else:
            continue
        for name in names:
            components = name.split(".")
            for count in range(1, len(components) + 1):
                module = start.joinpath(*components[:count])
                yield from (module.with_suffix(".py"), module / "__init__.py")


def _typed(definition: Any, texts: dict[str, str], name: str = "") -> dict[str, str]:
    """The text of a function or class that is in no file, and of what it names that was typed in, too."""
    name = name or definition.__qualname__
    if name in texts:
        return texts
    inside = (getattr(value, "__func__", value) for value in [definition, *vars(definition).values()])
    codes: list[Any] = [value.__code__ for value in inside if hasattr(value, "__code__")]
    try:
        texts[name] = textwrap.dedent(inspect.getsource(definition))
    except (OSError, TypeError):
        texts[name] = repr([(code.co_code, [c for c in code.co_consts if not hasattr(c, "co_code")]) for code in codes])
    namespace = getattr(inspect.getmodule(definition), "__dict__", {}) | getattr(definition, "__globals__", {})
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if hasattr(inner, "co_code")]
        for global_name in code.co_names:
            value = namespace.get(global_name)
            if isinstance(value, str | int | float | bool | tuple | list | dict):
                texts[global_name] = plain(value)
            elif getattr(value, "__module__", "") == definition.__module__ and hasattr(value, "__qualname__"):
                _typed(value, texts, global_name)
    return texts
