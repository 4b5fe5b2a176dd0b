"""A progress bar that is finished when its work is, for whoever looks at a terminal or a notebook."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


class Progress(tqdm):
    """A bar of work that may be done before its total: what was done was all, and a notebook shows no failure in red.

    Where the output is no terminal, as in a pipe or the log of a cluster, there is none: each step of it would be a
    line.

    Examples:
        >>> with Progress(total=9, disable=True) as bar:
        ...     bar.update(3)
        >>> bar.total == bar.n
        True
    """

    def __init__(self, *args: Any, disable: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, disable=disable or None, **kwargs)  # None is for tqdm: if nobody sees it

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.total = self.n
        super().__exit__(kind, *error)
