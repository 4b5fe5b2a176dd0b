"""A progress bar that is finished when its work is, and whose work goes on when nobody reads it any more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

from gpulab import files


class Progress(tqdm):
    """A bar of work that may be done before its total: what was done was all, and a notebook shows no failure in red.

    Where it can no longer be drawn, as in `2>&1 | head`, the work goes on without it. tqdm's own bar raises there, and
    keeps a lock for which every other thread then waits for ever.

    Examples:
        >>> with Progress(total=9, disable=True) as bar:
        ...     bar.update(3)
        >>> bar.total == bar.n
        True
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with self._drawing():
            if not kwargs.get("disable"):
                sys.stderr.flush()  # as tqdm does, where this raises
        super().__init__(*args, **kwargs)

    def refresh(self, *_: Any, **__: Any) -> None:
        """Draw it; the lock is given back whatever happens."""
        with self._drawing():
            super().refresh(nolock=True)

    def clear(self, *_: Any, **__: Any) -> None:
        """Remove it until it is drawn again."""
        with self._drawing():
            super().clear(nolock=True)

    def close(self) -> None:
        """End it."""
        with self._drawing():
            super().close()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        with self.get_lock():
            try:
                yield
            except OSError:
                files.write_nowhere(sys.stderr)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.total = self.n
        super().__exit__(kind, *error)
