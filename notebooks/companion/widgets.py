"""Things to touch: with a kernel they answer, without one they are a picture."""

from __future__ import annotations

import io
import math
import struct
from typing import Any

import ipywidgets
import torch

from gpulab.numerics.formats import FORMATS, MODES, round_to
from gpulab.numerics.sums import format_bits
from gpulab.plots.curvature import landscape_slice
from gpulab.plots.instruments import EXPONENT, FRACTION, SIGN, bits
from gpulab.report import PAGE_DPI, Picture, image
from gpulab.saddles.landscapes import Landscape

PARTS = {"sign": (SIGN, 1), "exponent": (EXPONENT, 8), "fraction": (FRACTION, 23)}  # of float32, as in the picture
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Explorer(ipywidgets.VBox):
    """Widgets that a still `picture` stands for where no kernel runs; `draw` shows it in `image`."""

    image: ipywidgets.HTML

    def draw(self, _: Any = None) -> None:
        """Show the picture as it is now, quickly: in all its colours, for to find 256 would take as long as to draw."""
        picture, png = self.picture(), io.BytesIO()
        picture.figure.savefig(png, format="png", dpi=PAGE_DPI, facecolor="white")
        self.image.value = image(png.getvalue(), picture.alt, PAGE_DPI)

    def picture(self) -> Picture:
        """What stands there without a kernel."""
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        """The widget, and the picture for those who cannot run it."""
        view = "application/vnd.jupyter.widget-view+json"
        self.picture().show(**{view: self._repr_mimebundle_()[view]})


class BitExplorer(Explorer):
    """The bits of a number, to be clicked; below them what a format makes of it by a rounding.

    >>> explorer = BitExplorer(1.0)
    >>> explorer.bits[-1].click()
    >>> explorer.number.value
    1.0000001192092896
    """

    def __init__(self, x: float = 0.1) -> None:
        self.x = x
        self.number = ipywidgets.FloatText(value=x, description="number")
        self.format = ipywidgets.Dropdown(options=list(FORMATS), value="tf32", description="format")
        self.rounding = ipywidgets.Dropdown(options=list(MODES), value=MODES[0], description="rounding")
        layout = ipywidgets.Layout(width="20px", height="26px", margin="1px", padding="0px")
        wrapped = ipywidgets.Layout(flex_flow="row wrap", margin="0 6px 0 0")
        self.bits, self.meanings, groups = [], [], []
        for name, (colour, count) in PARTS.items():
            style = {"font_weight": "bold", "text_color": colour, "button_color": "white"}
            bits = [ipywidgets.Button(description="0", tooltip=name, layout=layout, style=style) for _ in range(count)]
            self.bits += bits
            self.meanings.append(ipywidgets.HTML())
            groups.append(ipywidgets.VBox([self.meanings[-1], ipywidgets.HBox(bits, layout=wrapped)]))
        self.answer = ipywidgets.HTML()
        rows = [ipywidgets.HBox(row, layout=wrapped) for row in ([self.number, self.format, self.rounding], groups)]
        super().__init__([*rows, self.answer])
        self.number.observe(self._typed, "value")
        self.format.observe(self._show, "value")
        self.rounding.observe(self._show, "value")
        for bit in self.bits:
            bit.on_click(self._clicked)
        self._typed()

    def picture(self) -> Picture:
        """The number in all formats."""
        return bits(self.x)

    def _typed(self, _: Any = None) -> None:
        self.x = torch.tensor(self.number.value, dtype=torch.float32).item()
        self._show()

    def _clicked(self, clicked: ipywidgets.Button) -> None:
        clicked.description = "10"[int(clicked.description)]
        pattern = int("".join(bit.description for bit in self.bits), 2)
        (self.x,) = struct.unpack("f", struct.pack("I", pattern))
        if math.isfinite(self.x):  # infinity and NaN are no numbers that a page could be sent
            self.number.value = self.x
        self._show()

    def _show(self, _: Any = None) -> None:
        pattern = format_bits(self.x)
        for bit, digit in zip(self.bits, "".join(pattern), strict=True):
            bit.description, tint = digit, PARTS[bit.tooltip][0]
            bit.style.button_color, bit.style.text_color = (tint, "white") if digit == "1" else ("white", tint)
        for meaning, name, digits, words in zip(self.meanings, PARTS, pattern, _in_words(*pattern), strict=True):
            meaning.value = f'<span style="{_style(name)}" title="{digits}">{name}</span> {words}'
        name, mode = self.format.value, self.rounding.value
        rounded = round_to(torch.tensor([self.x]), name, mode).item()
        distance = abs(rounded - self.x)
        error_words = f", off by {distance:.2g}" if math.isfinite(distance) else ""
        float_fields = zip(PARTS, format_bits(self.x, name, mode), strict=True)
        shown = " ".join(f'<code style="{_style(field)}">{digits}</code>' for field, digits in float_fields)
        self.answer.value = f"float32: {self.x:.12g}<br>{name}, {mode}: <b>{rounded:.12g}</b>{error_words}<br>{shown}"


def _style(field: str) -> str:
    return f"background: {PARTS[field][0]}; color: white; padding: 0 4px; border-radius: 3px"


def _in_words(sign: str, exponent: str, fraction: str) -> tuple[str, str, str]:
    """What the bits of a float32 mean: `−`, `× 2⁻⁴` and `1.6`."""
    power, rest = int(exponent, 2), int(fraction, 2) / 2**23
    if power == 255:
        return "+−"[int(sign)], "not finite", "NaN" if rest else "infinity"
    first = int(power > 0)  # what is below the least power has no leading one
    return "+−"[int(sign)], f"× 2{str(max(power, 1) - 127).translate(RAISED)}", f"{first + rest:.9g}"


class SliceExplorer(Explorer):
    """The loss along a line through a network's weights, which a slider turns from the steepest way down to that up.

    Of a `gpulab.saddles.landscape`. Sliders are `angle`, in degrees, and `reach`, a multiple of the landscape's extent.
    """

    def __init__(self, landscape: Landscape) -> None:
        self.landscape = landscape
        self.angle = ipywidgets.FloatSlider(0, min=0, max=90, step=1, description="angle (°)", continuous_update=False)
        self.reach = ipywidgets.FloatLogSlider(1, min=-2, max=1, description="reach", continuous_update=False)
        self.image = ipywidgets.HTML()
        super().__init__([ipywidgets.HBox([self.angle, self.reach]), self.image])
        for slider in (self.angle, self.reach):
            slider.observe(self.draw, "value")
        self.draw()

    def picture(self) -> Picture:
        """The slice that the sliders ask for."""
        line = self.landscape.slice(self.angle.value, self.reach.value * self.landscape.extent)
        return landscape_slice(self.landscape, line, self.angle.value)


bit_explorer, slice_explorer = BitExplorer, SliceExplorer
