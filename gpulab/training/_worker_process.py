"""What a worker process does before its first run, between runs, and at its end.

A training may start processes: a `DataLoader`, a pool, `torch.multiprocessing.spawn`, a program. In
a worker of loky's that needs some help. `multiprocessing` would start them by loky's method, which
serves no other processes; what was typed into a notebook or a script has no name there by which a
started process could import it; and who starts a worker must end what the worker has started.
"""

from __future__ import annotations

import collections
import io
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.queues
import multiprocessing.reduction
import multiprocessing.util
import os
import signal
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
from joblib.externals.loky import process_executor

CHILD_TIMEOUT = 1.0  # seconds after which a process that was asked to end is killed

# The start method that the user's program has chosen, or None for the system's default.
_start_method: str | None = None


def prepare_worker(start_method: str | None, safe_path: str | None) -> None:
    """Prepare this worker for runs.

    Args:
        start_method: How the user's program starts processes, where that is not the system's
            default.
        safe_path: The variable `PYTHONSAFEPATH` there. It was set for this worker alone, and not
            for programs that a training runs.
    """
    global _start_method
    _start_method = start_method
    os.environ.pop("PYTHONSAFEPATH", None)
    if safe_path is not None:
        os.environ["PYTHONSAFEPATH"] = safe_path
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # of all that is started here, for the parent to end
    _handle_signals()
    _pickle_by_value()
    # What a training has left running would be waited for. Pools end their own processes first,
    # with priority 15.
    multiprocessing.util.Finalize(None, end_children, exitpriority=1)
    # loky would begin a new process when a training needs memory
    process_executor._MAX_MEMORY_LEAK_SIZE = math.inf


def reset_start_method() -> None:
    """Have `multiprocessing` start processes as in the user's program, not as in the last run."""
    multiprocessing.set_start_method(_start_method, force=True)


def end_children() -> None:
    """End the processes that trainings have started by `multiprocessing` and left running."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(CHILD_TIMEOUT)
        if child.is_alive():
            child.kill()


def _handle_signals() -> None:
    """Have SIGTERM interrupt a run, as the parent requests, and ignore Ctrl-C, which it handles.

    A process that is started here begins with Python's own handling of both.
    """

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    def restore() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # unlike SIG_IGN this is not passed on to programs
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, interrupt)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=restore)


class _Pickler(cloudpickle.Pickler):
    """The pickler of `multiprocessing`, which sends unimportable objects by value."""

    # Those of `multiprocessing` come first: pipes and locks, and torch's tensors.
    dispatch_table = collections.ChainMap(
        vars(ForkingPickler)["_extra_reducers"], cloudpickle.Pickler.dispatch_table
    )
    register = ForkingPickler.register
    loads = ForkingPickler.loads

    @classmethod
    def dumps(cls, value: object, protocol: int | None = None) -> memoryview:
        """Pickle a value into a buffer, as `ForkingPickler` does."""
        buffer = io.BytesIO()
        cls(buffer, protocol).dump(value)
        return buffer.getbuffer()


def _pickle_by_value() -> None:
    """Have `multiprocessing` send objects of notebooks and scripts to processes by value."""
    modules = multiprocessing.reduction, multiprocessing.queues, multiprocessing.connection
    for module, name in zip(
        modules, ("ForkingPickler", "_ForkingPickler", "_ForkingPickler"), strict=True
    ):
        setattr(module, name, _Pickler)
