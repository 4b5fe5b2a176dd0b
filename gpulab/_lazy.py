"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def homes_in(stub: str, package: str) -> dict[str, str]:
    """The homes of a package's names, as `attach` takes them, from the lines `from … import name as name` of a stub."""
    with open(stub, encoding="utf-8") as lines:
        words = [line.split() for line in lines if line.startswith("from ")]
    return {name: module.removeprefix(package).removeprefix(".") for _, module, _, name, *_ in words}


def attach(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: each name of `homes` comes from the module named there.

    A home is a module below the package, `"training.run"`; an empty one is a module or package of that name itself.
    """

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        from gpulab.errors import extra

        with extra("notebooks"):  # what the library itself needs is always installed
            home = importlib.import_module(f"{package}.{homes[name] or name}")
        value = getattr(home, name) if homes[name] else home
        setattr(sys.modules[package], name, value)
        return value

    return getattr_
