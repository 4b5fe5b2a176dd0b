"""Scripts of `benchmarks/` that notebooks call: trainings in other libraries, and comparisons with them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from gpulab.errors import GpulabError
from gpulab.store import records

# The folder of a clone, in which this file lies two levels down; or what an installed package has of it.
FOLDERS = (Path(__file__).parents[2] / "benchmarks", records.PACKAGE / "recorded")


def benchmark(name: str) -> ModuleType:
    """The script `benchmarks/NAME.py` as a module, which imports what lies beside it.

    Raises:
        GpulabError: Where there is none: an installed package has only those that its notebooks need.
    """
    folder = next((str(folder) for folder in FOLDERS if (folder / f"{name}.py").is_file()), None)
    if folder is None:
        raise GpulabError(f"benchmarks/{name}.py is not installed with gpulab: run the notebook in a clone of it")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
