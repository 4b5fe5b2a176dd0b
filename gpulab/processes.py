"""A measurement in a process of its own: for settings that hold from a process's start only."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from gpulab.errors import GpulabError
from gpulab.settings import PATIENCE, Setting

# What such a process may be asked for: functions of a setting and of JSON, whose answer is JSON.
MEASUREMENTS = {"fused_share": "roundings", "first_step": "factors"}


def measure(name: str, setting: str, **arguments: Any) -> Any:
    """Call the measurement `name` under a setting, in a fresh process where the setting needs one.

    Raises `GpulabError` when the process fails.
    """
    parsed = Setting.parse(setting)
    if parsed.isa is None:
        return _call(name, setting, arguments)
    environment = {**PATIENCE, **os.environ, **parsed.environment()}
    asked = json.dumps({"name": name, "setting": setting, "arguments": arguments})
    done = subprocess.run(
        [sys.executable, "-m", "gpulab.processes"], input=asked, env=environment, text=True, capture_output=True
    )
    if done.returncode:
        words = " ".join(done.stderr.split()[-30:]) or "it said nothing"
        raise GpulabError(f"setting {setting!r}: its process ended with status {done.returncode}: {words}")
    return json.loads(done.stdout.splitlines()[-1])


def _call(name: str, setting: str, arguments: dict[str, Any]) -> Any:
    function = getattr(importlib.import_module(f"gpulab.{MEASUREMENTS[name]}"), name)
    return function(setting, **arguments)


def main() -> None:
    """Read one measurement from standard input, and print its answer."""
    asked = json.loads(sys.stdin.read())
    print(json.dumps(_call(asked["name"], asked["setting"], asked["arguments"])))


if __name__ == "__main__":
    main()
