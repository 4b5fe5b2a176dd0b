"""Scripts of `benchmarks/` that notebooks call: trainings in other libraries, and comparisons with them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

CLONE = Path(__file__).parents[2]
SCRIPTS = CLONE / "benchmarks"


def benchmark(script: str) -> ModuleType:
    """Import a script by its path below `benchmarks/`, such as `peers/frameworks`.

    As when it is run, the script finds what lies beside it and `benchmarks.measuring`.
    """
    folder, _, name = script.rpartition("/")
    for importable in (CLONE, SCRIPTS / folder):
        if str(importable) not in sys.path:
            sys.path.append(str(importable))
    return importlib.import_module(name)
