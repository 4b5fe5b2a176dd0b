"""A progress bar that is finished when its work is."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


class Progress(tqdm):
    """A bar of work that may be done before its total: what was done was all, and a notebook shows no failure in red.

    Examples:
        >>> with Progress(total=9, disable=True) as bar:
        ...     bar.update(3)
        >>> bar.total == bar.n
        True
    """

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.total = self.n
        super().__exit__(kind, *error)
