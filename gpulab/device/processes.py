"""A measurement in a process of its own: for settings that hold from a process's start only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from gpulab.errors import GpulabError
from gpulab.settings import Setting

CALL = """
import importlib, json, sys
module, function, setting, arguments = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), function)(setting, **json.loads(arguments))))
"""


def measure(function: Callable[..., Any], setting: str, **arguments: Any) -> Any:
    """Call a module's function with a setting; in a fresh process where only that can have the setting.

    The arguments and the answer are JSON. Raises `GpulabError`, with its last words, when the process fails.
    """
    parsed = Setting.parse(setting)
    if parsed.isa is None:
        return function(setting, **arguments)
    process = subprocess.run(
        [sys.executable, "-P", "-c", CALL, function.__module__, function.__name__, setting, json.dumps(arguments)],
        env={**os.environ, **parsed.environment()},
        text=True,
        capture_output=True,
    )
    if process.returncode:
        words = " ".join(process.stderr.split()[-30:]) or "it said nothing"
        raise GpulabError(f"setting {setting!r}: its process ended with status {process.returncode}: {words}")
    return json.loads(process.stdout.splitlines()[-1])
