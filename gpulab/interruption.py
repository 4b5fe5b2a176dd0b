"""Ctrl-C on the command line: one line and a matching exit status, also during imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types

INTERRUPTED = 130  # the exit status of a shell's command that Ctrl-C has ended
IMPORTING = "<frozen importlib._bootstrap>"  # the file of the frames that import a module
MESSAGE = "gpulab: interrupted; run the same command again to go on"


def answer_while_importing() -> None:
    """Have Ctrl-C end this process at once during imports, and else raise `KeyboardInterrupt`.

    Extensions such as NumPy's and torch's do not bear a `KeyboardInterrupt` while they are loaded:
    they make another error of it, go on without it, or abort. A program that answers Ctrl-C by a
    function of its own is left alone.
    """
    # no other thread may say who is told
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _answer)


def answer_as_python() -> None:
    """Undo `answer_while_importing`: a script may look who answers Ctrl-C, as asyncio does."""
    if signal.getsignal(signal.SIGINT) is _answer:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_interrupted() -> None:
    """Say that the command was interrupted."""
    print(MESSAGE, file=sys.stderr, flush=True)


def forget_interruption() -> None:
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
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


def _answer(number: int, frame: types.FrameType | None) -> None:
    if is_importing(frame):
        # a pipe that nobody reads, or a text that is just being written
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        say_interrupted()
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)
