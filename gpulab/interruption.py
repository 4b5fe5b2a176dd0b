"""Ctrl-C on the command line: one line and a matching exit status, also during imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types

INTERRUPTED_EXIT_STATUS = 130  # the exit status of a shell's command that Ctrl-C has ended
IMPORTLIB_FILE = "<frozen importlib._bootstrap>"  # the file of the frames that import a module
INTERRUPTION_MESSAGE = "gpulab: interrupted; run the same command again to go on"


def exit_on_interrupted_import() -> None:
    """Have Ctrl-C end this process at once during imports, and else raise `KeyboardInterrupt`.

    Extensions such as NumPy's and torch's do not bear a `KeyboardInterrupt` while they are loaded:
    they make another error of it, go on without it, or abort. A program that answers Ctrl-C by a
    function of its own is left alone.
    """
    # Only the main thread may set a handler.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle_interrupt)


def restore_default_handler() -> None:
    """Undo `exit_on_interrupted_import`: a script may check the handler, as asyncio does."""
    if signal.getsignal(signal.SIGINT) is _handle_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def report_interruption() -> None:
    """Say that the command was interrupted."""
    print(INTERRUPTION_MESSAGE, file=sys.stderr, flush=True)


def prevent_exit_by_signal() -> None:
    """Have Python exit with the given status, without sending itself the signal of Ctrl-C.

    Under `python -m` it does the latter if Ctrl-C came while a text was executed as code, as
    `dataclasses` does, and no other text was since.
    """
    exec("")


def is_importing(frame: types.FrameType | None) -> bool:
    """Whether a frame, or one that called it, imports a module.

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
    if is_importing(frame):
        # Flushing fails for a closed pipe, or while a text is being written.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        report_interruption()
        os._exit(INTERRUPTED_EXIT_STATUS)
    signal.default_int_handler(number, frame)
