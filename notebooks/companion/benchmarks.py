"""Scripts of `benchmarks/` that notebooks call: trainings in other libraries, and comparisons with them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """The script `benchmarks/NAME.py` as a module, which imports what lies beside it."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)
