"""The base class of results (text, HTML and figure), and the progress bar.

A result class derives from `Report` and imports nothing from `gpulab.plots`, so that matplotlib
stays optional. The function that draws the result is looked up in `gpulab.plots._drawing` when a
figure is needed.
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
    """A result with a text and a figure: `print` describes it, `plot` draws it.

    A notebook shows both.
    """

    def plot(self) -> Picture:
        """Draw the result."""
        return self._draw()

    def _draw(self, **options: Any) -> Picture:
        """Draw the result; `options` are those of the function that draws this kind of result."""
        with extra("notebooks"):
            drawing = importlib.import_module("gpulab.plots._drawing")
            picture: Picture = drawing.draw(self, **options)
        return picture

    def words(self) -> Markup:
        """Render the text of the result as HTML, with every text escaped."""
        return paragraphs(str(self).splitlines())

    def picture(self) -> Picture | None:
        """Return the figure that a notebook and a page show below the text, or None."""
        return None

    def html(self) -> Markup:
        """Render the result as self-contained HTML: the text, then the figure."""
        picture = self.picture()
        return self.words() + (picture.html() if picture else "")

    def save(self, file: str | Path, title: str = "gpulab") -> None:
        """Write the result to a self-contained HTML file atomically."""
        files.write(file, render("page.html", title=title, body=self.html()).encode())

    def _ipython_display_(self) -> None:
        """Show the result in words, and its figure if it has one; IPython calls this method."""
        from IPython.display import display

        display({"text/plain": str(self), "text/html": self.words()}, raw=True)
        picture = self.picture()
        if picture:
            picture.show()


def render(template: str, **values: Any) -> Markup:
    r"""Render a template of `gpulab/templates`.

    Values that are not `Markup` are escaped. Control characters in the result are replaced by
    escape sequences, such as `\x1b`.

    Args:
        template: The name of the template.
        **values: The values of the template's variables.
    """
    import jinja2

    loader = jinja2.PackageLoader("gpulab")
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return Markup(printable(templates.get_template(template).render(values)))


def paragraphs(lines: Iterable[str]) -> Markup:
    """Render each line of a text as an HTML paragraph."""
    return Markup().join(Markup("<p>{}</p>").format(line) for line in lines)


def table(frame: pd.DataFrame, small: bool = False, **options: Any) -> Markup:
    """Render a data frame as HTML.

    Numbers have three digits. Texts are not truncated, and settings may wrap after a comma.

    Args:
        frame: The data frame.
        small: Whether to use a small font, so that a table with many columns fits into a notebook.
        **options: Options of `pandas.DataFrame.to_html`.
    """
    import pandas as pd

    frame = frame.rename(columns=lambda name: str(name).replace("_", " "))
    options = {"index": False, "float_format": "{:.3g}".format} | options
    with pd.option_context("display.max_colwidth", None):
        html = re.sub(r",(?=\S)", ",<wbr>", frame.to_html(**options, escape=True))
    return Markup(html.replace("<table ", '<table style="font-size: 11px" ', 1) if small else html)


class Progress(tqdm):
    """A progress bar that counts as complete if the loop ends early; it is then not shown in red.

    There is no bar if the output is not a terminal but, for example, a pipe or the log of a cluster
    job, in which each update of the bar would be a new line.

    Examples:
        >>> with Progress(total=9, disable=True) as bar:
        ...     bar.update(3)
        >>> bar.total == bar.n
        True
    """

    def __init__(self, *args: Any, disable: bool = False, **kwargs: Any) -> None:
        # With None, tqdm disables the bar if the output is not a terminal.
        super().__init__(*args, disable=disable or None, **kwargs)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.total = self.n
        super().__exit__(kind, *error)
