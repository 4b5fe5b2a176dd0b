"""The choice of the module that draws a kind of result."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gpulab.picture import Picture
from gpulab.report import Report

MODULES = {  # by the name of a result's class
    "Audit": "gpulab.plots._instruments",
    "EscapeTable": "gpulab.plots._saddles",
    "Placement": "gpulab.plots._instruments",
    "Surface": "gpulab.plots._saddles",
    "Verdict": "gpulab.plots._runs",
}


def draw(result: Report, **options: Any) -> Picture:
    """Draw a result with the function that its module registered with `draw_registered`.

    Raises:
        TypeError: If no module draws this kind of result.
    """
    # Importing the module registers its function.
    for kind in type(result).__mro__:
        if kind.__name__ in MODULES:
            importlib.import_module(MODULES[kind.__name__])
    return draw_registered(result, **options)


@functools.singledispatch
def draw_registered(result: object, **options: Any) -> Picture:  # noqa: ARG001 - registered functions take them
    """Return the figure of a result; `@draw_registered.register` adds another kind of result."""
    raise TypeError(f"no module of gpulab.plots draws a {type(result).__name__}")
