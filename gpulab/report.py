"""The base class of results (text, HTML and figure), and the progress bar.

A result derives from `Report` and imports nothing of `gpulab.plots`, so that matplotlib stays
optional. The function that draws it is looked up in `gpulab.plots._drawing` when a figure is asked
for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from tqdm.auto import tqdm

from gpulab import files
from gpulab.errors import extra, printable

if TYPE_CHECKING:
    import pandas as pd

    from gpulab.picture import Picture


class Report:
    """A result that `print` says in sentences, `plot` draws, and a notebook shows with both."""

    def plot(self) -> Picture:
        """The result as a figure."""
        return self._draw()

    def _draw(self, **options: Any) -> Picture:
        """The figure, with options of the function that draws it."""
        with extra("notebooks"):
            drawing = importlib.import_module("gpulab.plots._drawing")
            picture: Picture = drawing.draw(self, **options)
        return picture

    def words(self) -> Markup:
        """The result without a picture as a piece of HTML, in which every text is escaped."""
        return paragraphs(str(self).splitlines())

    def picture(self) -> Picture | None:
        """The figure that a notebook and a page show below the words, if any."""
        return None

    def html(self) -> Markup:
        """The result as a piece of HTML that needs no other file: its words, then its picture."""
        picture = self.picture()
        return self.words() + (picture.html() if picture else "")

    def save(self, file: str | Path, title: str = "gpulab") -> None:
        """Write the result to an HTML file of its own, whole or not at all."""
        files.write(file, render("page.html", title=title, body=self.html()).encode())

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({"text/plain": str(self), "text/html": self.words()}, raw=True)
        picture = self.picture()
        if picture:
            picture.show()


def render(template: str, **values: Any) -> Markup:
    """Render a page of `gpulab/templates`.

    Whatever is not `Markup` is escaped, and control characters are written out.
    """
    import jinja2

    loader = jinja2.PackageLoader("gpulab")
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return Markup(printable(templates.get_template(template).render(values)))


def paragraphs(lines: Iterable[str]) -> Markup:
    """Lines of text as HTML."""
    return Markup().join(Markup("<p>{}</p>").format(line) for line in lines)


def table(frame: pd.DataFrame, small: bool = False, **options: Any) -> Markup:
    """A data frame as HTML that wraps where its words and settings may; `options` are `to_html`'s.

    Numbers have three digits, texts stand there in full. Tables of many columns fit into a notebook
    in `small` letters.
    """
    import pandas as pd

    frame = frame.rename(columns=lambda name: str(name).replace("_", " "))
    options = {"index": False, "float_format": "{:.3g}".format} | options
    with pd.option_context("display.max_colwidth", None):
        html = re.sub(r",(?=\S)", ",<wbr>", frame.to_html(**options, escape=True))
    return Markup(html.replace("<table ", '<table style="font-size: 11px" ', 1) if small else html)


class Progress(tqdm):
    """A progress bar that takes an early end as complete, so that notebooks do not show it in red.

    Where the output is no terminal, as in a pipe or the log of a cluster, there is none: each step
    of it would be a line.

    Examples:
        >>> with Progress(total=9, disable=True) as bar:
        ...     bar.update(3)
        >>> bar.total == bar.n
        True
    """

    def __init__(self, *args: Any, disable: bool = False, **kwargs: Any) -> None:
        # None is for tqdm: if nobody sees it
        super().__init__(*args, disable=disable or None, **kwargs)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.total = self.n
        super().__exit__(kind, *error)
