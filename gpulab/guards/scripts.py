"""Runs a script inside a guard, as `gpulab guard train.py` does."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from gpulab._torch_internals import OPERATOR_MODULE
from gpulab.errors import OverwrittenError
from gpulab.guards.guards import Guard

OWN_MODULES = ("runpy", "gpulab._torch_internals")  # besides those of gpulab.guards


def run_script(script: str, arguments: Sequence[str], report: Guard, is_module: bool = False) -> bool:
    """Run a script or a module as Python would, with its arguments, inside the guard `report`.

    What Python knows of the program, `sys.argv` and the first of `sys.path`, is the script's from here on.

    Args:
        script: a file, or the name of a module, as for `python -m`.
        arguments: what the script is given.
        report: the guard; what was found is in it, however the script ended.
        is_module: whether `script` is the name of a module.

    Returns:
        Whether an error ended the script. Its traceback is printed as Python would print it. `SystemExit` comes out.
    """
    sys.argv, sys.path[0] = [script, *arguments], str(Path.cwd() if is_module else Path(script).resolve().parent)
    try:
        with report:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except Exception as error:
        if not (isinstance(error, OverwrittenError) and report.findings):  # which the report tells
            keep_own_frames(error)
            sys.excepthook(type(error), error, error.__traceback__)
        return True
    return False


def keep_own_frames(error: BaseException) -> None:
    """Leave in the traceback of a script's error what it would have without runpy and the guard.

    The guard calls the operations that it watches, and torch calls them through a module of its own.
    """
    kept: list[types.TracebackType] = []
    trace, ours = error.__traceback__, False
    while trace:
        module = trace.tb_frame.f_globals.get("__name__", "")
        is_own = module in OWN_MODULES or module.startswith("gpulab.guards.")
        ours = is_own or (ours and module == OPERATOR_MODULE)
        if not ours:
            kept.append(trace)
        trace = trace.tb_next
    error.__traceback__ = None
    for trace in reversed(kept):
        trace.tb_next = error.__traceback__
        error.__traceback__ = trace
