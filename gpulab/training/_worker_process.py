"""Functions that a worker process calls before its first run, between runs, and at its end.

A training may start processes: a `DataLoader`, a pool, `torch.multiprocessing.spawn`, a program.
For this, a worker process of loky needs three preparations:

- `multiprocessing` would use loky's start method, which only works for loky's own processes. The
  start method of the user's program is set again.
- A started process cannot import a function that was typed into a notebook or script. Such
  functions are pickled by value.
- The parent must be able to end all processes that a worker has started. The worker leads a process
  group.
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
        start_method: The start method that the user's program has chosen for `multiprocessing`;
            None for the system's default.
        safe_path: The value of `PYTHONSAFEPATH` in the user's program; None if it is not set. It is
            restored here, because the value that this worker was started with must not affect
            programs that a training run starts.
    """
    global _start_method
    _start_method = start_method
    os.environ.pop("PYTHONSAFEPATH", None)
    if safe_path is not None:
        os.environ["PYTHONSAFEPATH"] = safe_path
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a process group, so that the parent can end all processes started here
    _handle_signals()
    _pickle_by_value()
    # At its end, this process would wait for processes that a training function has left running.
    # Pools end their own processes first, with priority 15.
    multiprocessing.util.Finalize(None, end_children, exitpriority=1)
    # loky would replace a process whose use of memory has grown.
    process_executor._MAX_MEMORY_LEAK_SIZE = math.inf


def reset_start_method() -> None:
    """Restore the start method of the user's program, which the last run may have changed."""
    multiprocessing.set_start_method(_start_method, force=True)


def end_children() -> None:
    """End the processes that functions started by `multiprocessing` and left running."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(CHILD_TIMEOUT)
        if child.is_alive():
            child.kill()


def _handle_signals() -> None:
    """Let SIGTERM interrupt a run, and ignore Ctrl-C.

    The parent handles Ctrl-C and sends SIGTERM. Forked processes get Python's default handling of
    both signals.
    """

    def interrupt(*_: Any) -> None:
        """Raise `KeyboardInterrupt`, at the first signal only."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt saving
        raise KeyboardInterrupt

    def restore() -> None:
        """Restore Python's default handlers."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def ignore(*_: Any) -> None:
        """Do nothing. SIG_IGN is not used, because a program started here would inherit it.

        A handler is not inherited: the program gets the default handling of the signal.
        """

    signal.signal(signal.SIGINT, ignore)
    signal.signal(signal.SIGTERM, interrupt)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=restore)


class _Pickler(cloudpickle.Pickler):
    """The pickler of `multiprocessing`, which sends unimportable objects by value."""

    # The reducers of `multiprocessing`, for pipes, locks and torch's tensors, take precedence.
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
    """Make `multiprocessing` send objects of notebooks and scripts to processes by value.

    This replaces the pickler in three modules of `multiprocessing`, for the whole process.
    """
    # The module that defines the pickler, and two that import it under another name.
    for module, name in (
        (multiprocessing.reduction, "ForkingPickler"),
        (multiprocessing.queues, "_ForkingPickler"),
        (multiprocessing.connection, "_ForkingPickler"),
    ):
        setattr(module, name, _Pickler)
