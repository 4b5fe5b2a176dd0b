"""Ctrl-C on the command line: one line and a matching exit status, also during imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types

INTERRUPTED_EXIT_STATUS = 130  # as shells report for a command ended by Ctrl-C
IMPORTLIB_FILE = "<frozen importlib._bootstrap>"  # the file of frames that import a module
INTERRUPTION_MESSAGE = "gpulab: interrupted; run the same command again to continue"


def exit_on_interrupted_import() -> None:
    """Set a handler for Ctrl-C that ends this process at once if a module is being imported.

    At other times the handler raises `KeyboardInterrupt`, as Python's own does. Extension modules
    such as NumPy's and torch's cannot handle a `KeyboardInterrupt` while they are loaded: they
    convert it to another error, ignore it, or abort. Nothing is changed if the program has its own
    handler.
    """
    # Python allows only the main thread to set a handler.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle_interrupt)


def restore_default_handler() -> None:
    """Undo `exit_on_interrupted_import`, for scripts that check the handler, as asyncio does."""
    if signal.getsignal(signal.SIGINT) is _handle_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def report_interruption() -> None:
    """Report on standard error that the command was interrupted."""
    print(INTERRUPTION_MESSAGE, file=sys.stderr, flush=True)


def prevent_exit_by_signal() -> None:
    """Reset a flag inside Python, so that the process exits with the status that it chose.

    If Ctrl-C arrives while a string is executed as code, as `dataclasses` does, Python remembers
    this. Under `python -m` it then ends by sending itself the signal of Ctrl-C. Executing another
    string, here an empty one, resets the flag.
    """
    exec("")


def is_importing(frame: types.FrameType | None) -> bool:
    """Return whether a frame, or one that called it, imports a module.

    Examples:
        >>> is_importing(sys._getframe())
        False
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORTLIB_FILE:
            return True
        frame = frame.f_back
    return False


def _handle_interrupt(number: int, frame: types.FrameType | None) -> None:
    """End the process if a module is being imported; otherwise raise `KeyboardInterrupt`."""
    if is_importing(frame):
        # Flushing fails for a closed pipe, or while a text is being written.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        report_interruption()
        os._exit(INTERRUPTED_EXIT_STATUS)
    signal.default_int_handler(number, frame)
