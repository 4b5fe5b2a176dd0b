"""A measurement in a process of its own: for settings that hold from a process's start only."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from gpulab.errors import GpulabError
from gpulab.settings import PATIENCE, Setting


def measure(function: Callable[..., Any], setting: str, **arguments: Any) -> Any:
    """Call a function of a module with a setting and JSON; in a fresh process where the setting needs one.

    Its answer is JSON, too. Raises `GpulabError` when the process fails.
    """
    parsed = Setting.parse(setting)
    if parsed.isa is None:
        return function(setting, **arguments)
    environment = {**PATIENCE, **os.environ, **parsed.environment()}
    asked = json.dumps(
        {"function": [function.__module__, function.__name__], "setting": setting, "arguments": arguments}
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpulab.diagnostics.processes"],
        input=asked,
        env=environment,
        text=True,
        capture_output=True,
    )
    if done.returncode:
        words = " ".join(done.stderr.split()[-30:]) or "it said nothing"
        raise GpulabError(f"setting {setting!r}: its process ended with status {done.returncode}: {words}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Read one measurement from standard input, and print its answer."""
    asked = json.loads(sys.stdin.read())
    module, name = asked["function"]
    function = getattr(importlib.import_module(module), name)
    print(json.dumps(function(asked["setting"], **asked["arguments"])))


if __name__ == "__main__":
    main()
