"""Scripts in `benchmarks/` that notebooks call: other libraries, and comparisons with them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def benchmark(script: str) -> ModuleType:
    """Import a script by its path below `benchmarks/`, such as `peers/frameworks`.

    As when it is run, the script can import the scripts in its folder by name.
    """
    folder, _, name = script.rpartition("/")
    if str(SCRIPTS / folder) not in sys.path:
        sys.path.append(str(SCRIPTS / folder))
    return importlib.import_module(name)
