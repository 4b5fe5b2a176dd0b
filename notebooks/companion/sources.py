"""Source code in a fold, for notebooks that first show a shorter version of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from gpulab.report import Report


@dataclass(frozen=True)
class Source(Report):
    """The source code of functions. A notebook shows it folded below a title."""

    title: str
    code: str

    def __str__(self) -> str:
        return self.code

    def words(self) -> Markup:
        """Return the title and the folded code as HTML."""
        fold = Markup("<details><summary>{}</summary><pre>{}</pre></details>")
        return fold.format(self.title, self.code)


def source(title: str, *functions: Callable[..., Any]) -> Source:
    """Return the source code of functions, which a notebook shows folded below a title.

    >>> from companion.findings import listed
    >>> print(str(source("How to join words", listed)).partition(":")[0])
    def listed(words
    """
    return Source(title, "\n".join(inspect.getsource(function) for function in functions))
