"""What a worker process does before its first run, between runs, and when its parent has died.

A training may start processes: a `DataLoader`, a pool, `torch.multiprocessing.spawn`, a program. In a worker of loky's
that needs some help. `multiprocessing` would start them by loky's method, which serves no other processes; what was
typed into a notebook or a script has no name there by which a started process could import it; and who starts a worker
must end what the worker has started.
"""

from __future__ import annotations

import collections
import contextlib
import io
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.queues
import multiprocessing.reduction
import multiprocessing.util
import os
import signal
import threading
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import psutil
from joblib.externals.loky import process_executor

PARENT_SECONDS = 0.5  # between two looks at whether the parent lives
END_SECONDS = 10.0  # after which a worker whose parent has died is killed, if it does not end by itself
CHILD_SECONDS = 1.0  # that a process has to end in

# The start method that the user's program has chosen, or None for the system's own.
_start_method: str | None = None


def begin(parent: int, start_method: str | None, safe_path: str | None) -> None:
    """Prepare this worker for runs.

    Args:
        parent: The process that started it.
        start_method: How processes are started there, if the program said so.
        safe_path: The variable `PYTHONSAFEPATH` there. It was set for this worker alone, and not for programs that a
            training runs.
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
    # What a training has left running, where it is not daemonic, would be waited for.
    multiprocessing.util.Finalize(None, end_children, exitpriority=100)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    process_executor._MAX_MEMORY_LEAK_SIZE = math.inf  # loky would begin a new process when a training needs memory


def begin_run() -> None:
    """Have `multiprocessing` start processes as in the user's program, whatever the last run has chosen."""
    multiprocessing.set_start_method(_start_method, force=True)


def end_children() -> None:
    """End the processes that trainings have started by `multiprocessing` and left running."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(CHILD_SECONDS)
        if child.is_alive():
            child.kill()


def _handle_signals() -> None:
    """Have SIGTERM interrupt a run, as the parent asks for, and Ctrl-C do nothing here: the parent hears it, too.

    A process that is started here begins with Python's own handling of both.
    """

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    def restore() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, lambda *_: None)  # unlike SIG_IGN this is not passed on to programs
    signal.signal(signal.SIGTERM, interrupt)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=restore)


def _end_with_parent(parent: int) -> None:
    """When the parent has died, have the run save a checkpoint and end, and kill what does not end."""
    while _lives(parent):
        time.sleep(PARENT_SECONDS)
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(END_SECONDS)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _lives(parent: int) -> bool:
    # Where a parent has died, POSIX gives its children another, and Windows does not.
    return os.getppid() == parent and (os.name == "posix" or psutil.pid_exists(parent))


class _Pickler(cloudpickle.Pickler):
    """The pickler of `multiprocessing`, which takes along what cannot be imported by name, such as a notebook's."""

    # Those of `multiprocessing` come first: pipes and locks, and torch's tensors.
    dispatch_table = collections.ChainMap(ForkingPickler._extra_reducers, cloudpickle.Pickler.dispatch_table)
    register = ForkingPickler.register
    loads = ForkingPickler.loads

    @classmethod
    def dumps(cls, value: Any, protocol: int | None = None) -> memoryview:
        """Pickle a value into a buffer, as `ForkingPickler` does."""
        buffer = io.BytesIO()
        cls(buffer, protocol).dump(value)
        return buffer.getbuffer()


def _pickle_by_value() -> None:
    """Have `multiprocessing` send what was typed into a notebook or a script to processes that it starts afresh."""
    multiprocessing.reduction.ForkingPickler = _Pickler
    for module in (multiprocessing.queues, multiprocessing.connection):
        with contextlib.suppress(AttributeError):
            module._ForkingPickler = _Pickler
