"""The failure of an assertion."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeAlias

Message: TypeAlias = str | Callable[[str], str] | None


def fail(message: str, msg: Message) -> NoReturn:
    """Raise `AssertionError` with `msg`, which is a message or a function that makes it."""
    __tracebackhide__ = True  # pytest then shows the line of the test
    if msg is None:
        raise AssertionError(message)
    raise AssertionError(msg(message) if callable(msg) else msg)
