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

DPI = 200  # twice what a page shows, for modern screens
PAGE_DPI = 100
IN_WORDS = "In words"  # above what a figure shows, as text
# A white card with a margin, which stands on a dark page too.
STYLE = "max-width: 100%; height: auto; background: white; border-radius: 6px"


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure together with a text that says what it shows, for readers who cannot see it.

    Every function of `gpulab.plots` returns one. As the last line of a notebook's cell it shows the
    figure, and its text in a fold below.

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
        self.figure.savefig(
            drawn, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.15, facecolor="white"
        )
        picture = Image.open(drawn, formats=["PNG"]).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
        return small.getvalue()

    def html(self) -> Markup:
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

        An `image/png` is what every viewer shows. The text is also in the output's plain text and
        in its metadata, where VS Code and nbconvert find the alternative text; JupyterLab shows a
        PNG without any.

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
        # whose figures, such as seaborn's, a notebook shows by itself
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close(self.figure)

    def _ipython_display_(self) -> None:
        self.show()


def responsive(wide: Picture, narrow: Picture) -> Markup:
    """An element that shows a figure, or on a phone the narrow one, whose words are large enough
    there.
    """
    element = Markup(
        '<picture><source media="(max-width: 36rem)" srcset="data:image/png;base64,{}">{}</picture>'
    )
    return element.format(base64.b64encode(narrow.png()).decode(), wide.html())


def _page_width(png: bytes, dpi: int) -> int:
    """How wide a PNG of so many dots an inch is on a page."""
    return int.from_bytes(png[16:20], "big") * PAGE_DPI // dpi  # a PNG begins with its size


def image(png: bytes, alt: str, dpi: int) -> Markup:
    """An element that shows a PNG, and needs no other file."""
    element = Markup('<img alt="{}" src="data:image/png;base64,{}" width="{}" style="{}">')
    return element.format(alt, base64.b64encode(png).decode(), _page_width(png, dpi), STYLE)
