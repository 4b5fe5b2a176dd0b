"""A result's faces: a picture, HTML and plain text; and while it is computed, a bar.

A result derives from `Report` and knows nothing of plots. The function that draws it registers with `draw`,
as in `@draw.register`, and is found when the picture is asked for.
"""

from __future__ import annotations

import base64
import functools
import importlib
import io
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from markupsafe import Markup
from tqdm.auto import tqdm

from gpulab import files
from gpulab.errors import extra

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DPI = 200  # twice what a page shows, for modern screens
PAGE_DPI = 100
IN_WORDS = "In words"  # above what a figure shows, as text
# A white card with a margin, which stands on a dark page too.
STYLE = "max-width: 100%; height: auto; background: white; border-radius: 6px"


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure together with a text that says what it shows, for readers who cannot see it.

    Every function of `gpulab.plots` returns one. As the last line of a notebook's cell it shows the figure, and its
    text in a fold below.

    Attributes:
        figure: The `matplotlib.figure.Figure`.
        alt: The text.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.roofline(gl.device.recorded_rooflines())
        >>> print(picture.alt.partition(":")[0])
        Roofline
    """

    figure: Figure
    alt: str

    def png(self, dpi: int = DPI) -> bytes:
        """Draw the figure as PNG, in 256 colours of its own, which keeps notebooks small.

        Args:
            dpi: Dots per inch; by default twice as many as a page shows.

        Returns:
            The content of a PNG file.
        """
        from PIL import Image

        drawn, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.15, facecolor="white")
        picture = Image.open(drawn, formats=["PNG"]).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
        return small.getvalue()

    def html(self) -> str:
        """Write the figure as an HTML element, with its text, that needs no other file.

        Returns:
            An `<img>` element.
        """
        return image(self.png(), self.alt, DPI)

    def save(self, file: str | Path) -> None:
        """Write the figure to a PNG file, whole or not at all.

        Args:
            file: Where to; its folder is made if need be.
        """
        files.write(file, self.png())

    def show(self, **instead: Any) -> None:
        """Show the figure in a notebook, and below it a fold with its text.

        An `image/png` is what every viewer shows. The text is also in the output's plain text and in its metadata,
        where VS Code and nbconvert find the alternative text; JupyterLab shows a PNG without any.

        Args:
            **instead: What a page may show in place of the PNG where it can, by its type.
        """
        from IPython.display import display

        png = self.png()
        about = {"width": _page_width(png, DPI), "alt": self.alt}
        still = {"image/png": base64.b64encode(png).decode(), "text/plain": self.alt}
        display(still | instead, metadata={"image/png": about}, raw=True)
        heading = f"{IN_WORDS}, before anything is moved" if instead else IN_WORDS
        fold = Markup("<details><summary>{}</summary><p>{}</p></details>").format(heading, self.alt)
        display({"text/html": fold, "text/plain": f"{heading}: {self.alt}"}, raw=True)
        if "matplotlib.pyplot" in sys.modules:  # whose figures, such as seaborn's, a notebook shows by itself
            sys.modules["matplotlib.pyplot"].close(self.figure)

    def _ipython_display_(self) -> None:
        self.show()


def _page_width(png: bytes, dpi: int) -> int:
    """How wide a PNG of so many dots an inch is on a page."""
    return int.from_bytes(png[16:20], "big") * PAGE_DPI // dpi  # a PNG begins with its size


def image(png: bytes, alt: str, dpi: int) -> Markup:
    """An element that shows a PNG, and needs no other file."""
    element = Markup('<img alt="{}" src="data:image/png;base64,{}" width="{}" style="{}">')
    return element.format(alt, base64.b64encode(png).decode(), _page_width(png, dpi), STYLE)


@functools.singledispatch
def draw(result: Any) -> Picture:
    """The picture of a result. Raises `TypeError` for a kind that no plot is registered for."""
    raise TypeError(f"nothing draws a {type(result).__name__}")


class Report:
    """A result that `print` says in sentences, `plot` draws, and a notebook shows with both."""

    plots: ClassVar[str] = "gpulab.plots"  # where the function that draws it is registered

    def plot(self) -> Picture:
        """The result as a figure."""
        with extra("notebooks"):
            importlib.import_module(self.plots)
        return draw(self)

    def words(self) -> Markup:
        """The result without a picture as a piece of HTML, in which every text is escaped."""
        return paragraphs(str(self).splitlines())

    def picture(self) -> Picture | None:
        """What a notebook and a page show below the words, if anything."""
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
    """A page of `gpulab/templates`. Whatever is not `Markup` is escaped, as it is when the two are added."""
    import jinja2

    loader = jinja2.PackageLoader("gpulab")
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return Markup(templates.get_template(template).render(values))


def paragraphs(lines: Iterable[str]) -> Markup:
    """Lines of text as HTML."""
    return Markup().join(Markup("<p>{}</p>").format(line) for line in lines)


def table(frame: pd.DataFrame, small: bool = False, **options: Any) -> Markup:
    """A data frame as HTML that wraps where its words and settings may; `options` are `to_html`'s.

    Numbers have three digits, texts stand there in full. Tables of many columns fit into a notebook in `small` letters.
    """
    import pandas as pd

    frame = frame.rename(columns=lambda name: str(name).replace("_", " "))
    options = {"index": False, "float_format": "{:.3g}".format} | options
    with pd.option_context("display.max_colwidth", None):
        html = re.sub(r",(?=\S)", ",<wbr>", frame.to_html(**options, escape=True))
    return Markup(html.replace("<table ", '<table style="font-size: 11px" ', 1) if small else html)


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
