"""Runs a script inside a guard, as `gpulab guard train.py` does."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from gpulab._torch_internals import OPERATOR_MODULE
from gpulab.errors import OverwrittenError
from gpulab.guards._guard import Guard

RUNNER_MODULES = ("runpy", "gpulab._torch_internals")  # in addition to those of gpulab.guards


def run_script(
    script: str, arguments: Sequence[str], report: Guard, is_module: bool = False
) -> bool:
    """Run a script or a module as Python would, with its arguments, inside the guard `report`.

    It sets `sys.argv` and the first entry of `sys.path` for the script, and does not restore them.

    Args:
        script: A file, or the name of a module, as for `python -m`.
        arguments: The arguments of the script.
        report: The guard, which holds the findings no matter how the script ended.
        is_module: Whether `script` is the name of a module.

    Returns:
        Whether an error ended the script. Its traceback is printed as Python would print it, unless
        the error is a finding of the guard, which the report shows. `SystemExit` is not caught.
    """
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path.cwd() if is_module else Path(script).resolve().parent)
    try:
        with report:
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except Exception as error:
        is_in_report = isinstance(error, OverwrittenError) and report.findings
        if not is_in_report:
            remove_guard_frames(error)
            sys.excepthook(type(error), error, error.__traceback__)
        return True
    return False


def remove_guard_frames(error: BaseException) -> None:
    """Remove the frames of runpy and the guard from the traceback of a script's error.

    The guard calls the operations that it watches, so its frames lie between those of the script
    and of torch. torch makes these calls through the module `OPERATOR_MODULE`, whose frames are
    removed if they follow a frame of the guard.
    """
    script_traces: list[types.TracebackType] = []
    trace = error.__traceback__
    is_guard_frame = False
    while trace:
        module = trace.tb_frame.f_globals.get("__name__", "")
        is_guard_module = module in RUNNER_MODULES or module.startswith("gpulab.guards.")
        is_guard_frame = is_guard_module or (is_guard_frame and module == OPERATOR_MODULE)
        if not is_guard_frame:
            script_traces.append(trace)
        trace = trace.tb_next
    # The remaining entries are linked again, from the innermost one outwards.
    error.__traceback__ = None
    for trace in reversed(script_traces):
        trace.tb_next = error.__traceback__
        error.__traceback__ = trace
