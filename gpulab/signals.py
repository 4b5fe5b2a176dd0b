"""Ctrl-C and SIGTERM without a traceback: what they do before there is work, during it, and after it.

Little is imported here: what a signal interrupts while this is loaded is Python's to tell.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

heard: list[int] = []  # the signals that came while there was work


def leave_quietly() -> None:
    """From here on a signal ends this process at once: nothing is lost while it starts, or when its work is done."""
    _on_signals(_leave)


@contextlib.contextmanager
def interrupting(words: str) -> Iterator[None]:
    """Inside, a signal raises `KeyboardInterrupt`, for work to be saved; whatever comes out of that is one line.

    The exit status is 128 and the signal's number, as a shell has it. While a module is imported, or in a child that
    was forked, a signal ends the process at once: there `KeyboardInterrupt` becomes some other error, or is lost.

    Args:
        words: The line.
    """
    process = os.getpid()

    def interrupt(number: int, frame: Any) -> None:
        heard.append(number)
        if os.getpid() != process or _is_importing(frame):
            _leave(number)
        raise KeyboardInterrupt

    _on_signals(interrupt)
    try:
        yield
    except BaseException:
        leave_quietly()
        if not heard:
            raise
        with contextlib.suppress(OSError):  # nobody reads it
            print(words, file=sys.stderr)
        sys.exit(128 + heard[-1])
    finally:
        leave_quietly()


def _is_importing(frame: Any) -> bool:
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _on_signals(handler: Callable[[int, Any], Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as for a job in the background, which goes on
            signal.signal(number, handler)


def _leave(number: int, _: Any = None) -> NoReturn:
    os._exit(128 + number)
