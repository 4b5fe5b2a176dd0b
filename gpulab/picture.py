"""A figure with a text alternative, as notebooks, HTML pages and files show it."""

from __future__ import annotations

import base64
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gpulab import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200  # dots per inch of a PNG: twice the resolution of a page, for high-resolution screens
PAGE_DPI = 100  # dots per inch of a page
IN_WORDS = "In words"  # the heading of the text alternative
# The white background also makes a figure readable on a dark page.
STYLE = "max-width: 100%; height: auto; background: white; border-radius: 6px"


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure with a text alternative, which describes it for readers who cannot see it.

    Every function of `gpulab.plots` returns one. At the end of a notebook cell it is displayed as
    the figure, with the text in a collapsed section below.

    Attributes:
        figure: The `matplotlib.figure.Figure`.
        alt: The text alternative.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.roofline(gl.device.recorded_rooflines())
        >>> print(picture.alt.partition(":")[0])
        Roofline
    """

    figure: Figure
    alt: str

    def png(self, dpi: int = DPI) -> bytes:
        """Draw the figure as PNG, with a palette of 256 colours, which keeps notebooks small.

        Args:
            dpi: Dots per inch; by default twice the resolution of a page.

        Returns:
            The content of a PNG file.
        """
        from PIL import Image

        drawn, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(
            drawn, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.15, facecolor="white"
        )
        picture = Image.open(drawn, formats=["PNG"]).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
        return small.getvalue()

    def html(self) -> Markup:
        """Render the figure as an HTML element with its text alternative.

        Returns:
            An `<img>` element that contains the PNG.
        """
        return image(self.png(), self.alt, DPI)

    def save(self, file: str | Path) -> None:
        """Write the figure to a PNG file atomically.

        Args:
            file: The file to write. Its folder is created if necessary.
        """
        files.write(file, self.png())

    def show(self, **instead: Any) -> None:
        """Show the figure in a notebook, with its text in a collapsed section below.

        The output has the type `image/png`, which every viewer can show. The text is also in the
        output's plain text and in its metadata, from which VS Code and nbconvert take the text
        alternative. JupyterLab shows a PNG without a text alternative.

        Args:
            **instead: Contents that a viewer may show instead of the PNG, by their MIME types.
        """
        from IPython.display import display

        png = self.png()
        about = {"width": _page_width(png, DPI), "alt": self.alt}
        still = {"image/png": base64.b64encode(png).decode(), "text/plain": self.alt}
        display(still | instead, metadata={"image/png": about}, raw=True)
        heading = f"{IN_WORDS}, before a control is moved" if instead else IN_WORDS
        fold = Markup("<details><summary>{}</summary><p>{}</p></details>").format(heading, self.alt)
        display({"text/html": fold, "text/plain": f"{heading}: {self.alt}"}, raw=True)
        # A notebook would show an open pyplot figure, such as one of seaborn's, a second time.
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close(self.figure)

    def _ipython_display_(self) -> None:
        self.show()


def responsive(wide: Picture, narrow: Picture) -> Markup:
    """Render an HTML element that shows the wide figure, and on a phone the narrow one.

    The text in the narrow figure is large enough for a phone.
    """
    element = Markup(
        '<picture><source media="(max-width: 36rem)" srcset="data:image/png;base64,{}">{}</picture>'
    )
    return element.format(base64.b64encode(narrow.png()).decode(), wide.html())


def _page_width(png: bytes, dpi: int) -> int:
    """Return the width of a PNG on a page, in pixels of the page.

    Bytes 16 to 19 of a PNG file are the width of the image.
    """
    return int.from_bytes(png[16:20], "big") * PAGE_DPI // dpi


def image(png: bytes, alt: str, dpi: int) -> Markup:
    """Render an HTML element that contains a PNG and its text alternative."""
    element = Markup('<img alt="{}" src="data:image/png;base64,{}" width="{}" style="{}">')
    return element.format(alt, base64.b64encode(png).decode(), _page_width(png, dpi), STYLE)
