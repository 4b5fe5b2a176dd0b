"""What a function was, so that a changed one is not taken for the same: its text, with what it calls of the user's."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def digest(function: Any, file: Path | None, bound: list[Any]) -> str:
    """A digest of the text of a function's file or cells, and of the values that `innermost` found."""
    text = _files_text(file) if file else sorted(_typed(function, {}).items())
    return hashlib.sha256(json.dumps([text, *map(plain, bound)]).encode()).hexdigest()


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
            if not isinstance(cell.cell_contents, list):  # which may be what the function writes to
                bound.append(cell.cell_contents)
    return train, bound


def plain(value: Any) -> str:
    """A value as JSON; what JSON has not goes by its name, or by how it is written unless that is an address."""

    def other(thing: Any) -> str:
        text = repr(thing)
        return getattr(thing, "__qualname__", type(thing).__qualname__ if " at 0x" in text else text)

    return json.dumps(value, default=other, sort_keys=True, skipkeys=True)


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
    left = [start]
    while left:
        file = left.pop()
        name = file.relative_to(root).as_posix()
        if name in texts or not file.is_file():
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # the import will say so
            continue
        tree.body = [node for node in tree.body if not _is_main(node)]
        texts[name] = ast.unparse(tree)
        if "site-packages" not in file.parts:
            left += _beside(tree, file.parent, root)
    return sorted(texts.items())


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


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
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                place = start.joinpath(*parts[:count])
                yield from (place.with_suffix(".py"), place / "__init__.py")


def _typed(thing: Any, texts: dict[str, str], name: str = "") -> dict[str, str]:
    """The text of a function or class that is in no file, and of what it names that was typed in, too."""
    name = name or thing.__qualname__
    if name in texts:
        return texts
    inside = (getattr(value, "__func__", value) for value in [thing, *vars(thing).values()])
    codes: list[Any] = [value.__code__ for value in inside if hasattr(value, "__code__")]
    try:
        texts[name] = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        texts[name] = repr([(code.co_code, [c for c in code.co_consts if not hasattr(c, "co_code")]) for code in codes])
    known = getattr(inspect.getmodule(thing), "__dict__", {}) | getattr(thing, "__globals__", {})
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if hasattr(inner, "co_code")]
        for other in code.co_names:
            value = known.get(other)
            if isinstance(value, str | int | float | bool | tuple | list | dict):
                texts[other] = plain(value)
            elif getattr(value, "__module__", "") == thing.__module__ and hasattr(value, "__qualname__"):
                _typed(value, texts, other)
    return texts
