"""Ctrl-C and SIGTERM without a traceback: what they do before there is work, during it, and after it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = "gpulab: interrupted; run the same command again to go on"
heard: list[int] = []  # the signals that came while there was work


def leave_quietly() -> None:
    """From here on a signal ends this process at once: nothing is lost while it starts, or when its work is done."""
    _on_signals(_leave)


@contextlib.contextmanager
def raising(words: str = AGAIN) -> Iterator[None]:
    """Inside, a signal raises `KeyboardInterrupt`, for work to be saved; what comes out of that is one line.

    The exit status is 128 and the signal's number, as a shell has it. While a module is imported, or in a child that
    was forked, a signal ends the process at once: there `KeyboardInterrupt` becomes some other error, or is lost.
    """
    process, usual = os.getpid(), sys.unraisablehook

    def interrupt(number: int, frame: Any) -> None:
        heard.append(number)
        if os.getpid() != process or _is_importing(frame):
            _leave(number)
        raise KeyboardInterrupt

    def unraisable(what: Any) -> None:  # where Python would print a traceback, and forget the error
        if isinstance(what.exc_value, KeyboardInterrupt):
            _leave(heard[-1])
        if not heard:
            usual(what)

    sys.unraisablehook = unraisable
    _on_signals(interrupt)
    try:
        yield
    except BaseException:
        if not heard:
            raise
        leave_quietly()
        print(words, file=sys.stderr)
        sys.exit(128 + heard[-1])
    finally:
        leave_quietly()


def _on_signals(handler: Callable[[int, Any], Any]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as for a job in the background, which goes on
            signal.signal(number, handler)


def _is_importing(frame: Any) -> bool:
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _leave(number: int, _: Any = None) -> NoReturn:
    os._exit(128 + number)
