"""Interactive widgets, which are still pictures on pages without a kernel."""

from __future__ import annotations

import io
import math
import struct

import ipywidgets
import torch
from matplotlib.patches import Rectangle

from gpulab.numerics import round_to
from gpulab.numerics._formats import FORMATS, MODES
from gpulab.picture import PAGE_DPI, Picture, image
from gpulab.plots import theme
from gpulab.plots.theme import FAINT, INK, ON_CPU, ON_GPU
from gpulab.saddles import Landscape

SHOWN = ("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SIGN, EXPONENT, FRACTION = "#B84D00", "#007A59", "#0072B2"  # dark enough for white letters
# The colours and numbers of bits of the parts of float32.
PARTS = {
    "sign": (SIGN, 1),
    "exponent": (EXPONENT, 8),
    "fraction": (FRACTION, 23),
}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Explorer(ipywidgets.VBox):
    """Widgets with a still `picture` for pages without a kernel; `draw` shows it in `image`."""

    image: ipywidgets.HTML

    def draw(self, _: object = None) -> None:
        """Show the picture in full colour; quantising to 256 colours takes as long as drawing."""
        picture, png = self.picture(), io.BytesIO()
        picture.figure.savefig(png, format="png", dpi=PAGE_DPI, facecolor="white")
        self.image.value = image(png.getvalue(), picture.alt, PAGE_DPI)

    def picture(self) -> Picture:
        """Return the picture that is shown without a kernel."""
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        """Show the widget, or the picture where the widget cannot run."""
        view = "application/vnd.jupyter.widget-view+json"
        self.picture().show(**{view: self._repr_mimebundle_()[view]})


def format_bits(x: float, name: str = "float32", mode: str = "nearest") -> tuple[str, str, str]:
    """Return the sign, exponent and fraction of a number rounded by `gpulab.numerics.round_to`.

    >>> format_bits(-0.1, "float16")
    ('1', '01011', '1001100110')
    """
    rounded = round_to(torch.tensor([x], dtype=torch.float32), name, mode)
    target = FORMATS[name]
    fraction, dtype = target.precision - 1, target.dtype or torch.float32
    stored = rounded.to(dtype).view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    )
    pattern = f"{int(stored) & (1 << 8 * dtype.itemsize) - 1:0{8 * dtype.itemsize}b}"
    if target.dtype is None:  # tf32 is float32 without its last bits
        pattern = pattern[: 9 + fraction]
    return pattern[0], pattern[1:-fraction], pattern[-fraction:]


@theme.with_theme
def bits_figure(x: float) -> Picture:
    """Draw a number's bits in float32 and after rounding to other formats; filled boxes are 1.

    The fractions are aligned, so the bits that a format drops are missing on the right.
    """
    figure, (axes,) = theme.canvas(height=0.7 + 0.4 * len(SHOWN))
    axes.set_axis_off()
    for row, name in enumerate(SHOWN):
        sign, exponent, fraction = format_bits(x, name)
        for column, bit in [
            (0, sign),
            *enumerate(exponent, 9 - len(exponent)),
            *enumerate(fraction, 9),
        ]:
            tint = SIGN if column == 0 else EXPONENT if column < 9 else FRACTION
            face, ink = (tint, "white") if bit == "1" else ("white", tint)
            axes.add_patch(
                Rectangle(
                    (column + 0.08, row + 0.1), 0.84, 0.8, facecolor=face, edgecolor=tint, lw=0.8
                )
            )
            axes.text(
                column + 0.5, row + 0.52, bit, ha="center", va="center", fontsize=6, color=ink
            )
        value = round_to(torch.tensor([x], dtype=torch.float32), name).item()
        off = abs(value - x)
        axes.text(-0.4, row + 0.5, name, ha="right", va="center", fontsize=8)
        axes.text(32.5, row + 0.5, f"{value:.10g}", va="center", fontsize=8)
        note = "exact" if off == 0 else f"off by {off:.0e}" if math.isfinite(off) else ""
        axes.text(46, row + 0.5, note, ha="right", va="center", fontsize=7, color=FAINT)
    for middle, label, tint in (
        (0.5, "±", SIGN),
        (5, "exponent", EXPONENT),
        (20.5, "fraction", FRACTION),
    ):
        axes.text(middle, -0.15, label, ha="center", va="bottom", fontsize=8, color=tint)
    axes.set(xlim=(-7, 46), ylim=(len(SHOWN), -0.8))
    alt = f"Bits of {x:g}: sign, exponent and fraction in {', '.join(SHOWN)}."
    title = f"{x:.10g} in float32, and rounded to formats with fewer bits"
    return theme.finish_figure(figure, title, alt)


class BitExplorer(Explorer):
    """The bits of a number, which can be clicked, and below them the number after rounding.

    >>> explorer = BitExplorer(1.0)
    >>> explorer.bits[-1].click()
    >>> explorer.number.value
    1.0000001192092896
    """

    def __init__(self, x: float = 0.1) -> None:
        self.x = x
        self.number = ipywidgets.FloatText(value=x, description="number")
        self.format = ipywidgets.Dropdown(options=list(FORMATS), value="tf32", description="format")
        self.rounding = ipywidgets.Dropdown(
            options=list(MODES), value=MODES[0], description="rounding"
        )
        layout = ipywidgets.Layout(width="20px", height="26px", margin="1px", padding="0px")
        wrapped = ipywidgets.Layout(flex_flow="row wrap", margin="0 6px 0 0")
        self.bits, self.meanings, groups = [], [], []
        for name, (colour, count) in PARTS.items():
            style = {"font_weight": "bold", "text_color": colour, "button_color": "white"}
            bits = [
                ipywidgets.Button(description="0", tooltip=name, layout=layout, style=style)
                for _ in range(count)
            ]
            self.bits += bits
            self.meanings.append(ipywidgets.HTML())
            groups.append(
                ipywidgets.VBox([self.meanings[-1], ipywidgets.HBox(bits, layout=wrapped)])
            )
        self.answer = ipywidgets.HTML()
        rows = [
            ipywidgets.HBox(row, layout=wrapped)
            for row in ([self.number, self.format, self.rounding], groups)
        ]
        super().__init__([*rows, self.answer])
        self.number.observe(self._typed, "value")
        self.format.observe(self._show, "value")
        self.rounding.observe(self._show, "value")
        for bit in self.bits:
            bit.on_click(self._clicked)
        self._typed()

    def picture(self) -> Picture:
        """Draw the number in all formats."""
        return bits_figure(self.x)

    def _typed(self, _: object = None) -> None:
        self.x = torch.tensor(self.number.value, dtype=torch.float32).item()
        self._show()

    def _clicked(self, clicked: ipywidgets.Button) -> None:
        clicked.description = "10"[int(clicked.description)]
        pattern = int("".join(bit.description for bit in self.bits), 2)
        (self.x,) = struct.unpack("f", struct.pack("I", pattern))
        if math.isfinite(self.x):  # infinity and NaN cannot be sent to a page
            self.number.value = self.x
        self._show()

    def _show(self, _: object = None) -> None:
        pattern = format_bits(self.x)
        for bit, digit in zip(self.bits, "".join(pattern), strict=True):
            bit.description, tint = digit, PARTS[bit.tooltip][0]
            bit.style.button_color, bit.style.text_color = (
                (tint, "white") if digit == "1" else ("white", tint)
            )
        for meaning, name, digits, words in zip(
            self.meanings, PARTS, pattern, _in_words(*pattern), strict=True
        ):
            meaning.value = f'<span style="{_style(name)}" title="{digits}">{name}</span> {words}'
        name = self.format.value
        mode = (
            self.rounding.value if FORMATS[name].minexp == FORMATS["float32"].minexp else MODES[0]
        )
        rounded = round_to(torch.tensor([self.x]), name, mode).item()
        distance = abs(rounded - self.x)
        error_words = f", off by {distance:.2g}" if math.isfinite(distance) else ""
        float_fields = zip(PARTS, format_bits(self.x, name, mode), strict=True)
        shown = " ".join(
            f'<code style="{_style(field)}">{digits}</code>' for field, digits in float_fields
        )
        self.answer.value = (
            f"float32: {self.x:.12g}<br>{name}, {mode}:"
            f" <b>{rounded:.12g}</b>{error_words}<br>{shown}"
        )


def _style(field: str) -> str:
    return f"background: {PARTS[field][0]}; color: white; padding: 0 4px; border-radius: 3px"


def _in_words(sign: str, exponent: str, fraction: str) -> tuple[str, str, str]:
    """Return the meaning of the bits of a float32: `−`, `× 2⁻⁴` and `1.6`."""
    power, rest = int(exponent, 2), int(fraction, 2) / 2**23
    if power == 255:
        return "+−"[int(sign)], "not finite", "NaN" if rest else "infinity"
    first = int(power > 0)  # subnormal numbers have no leading one
    return (
        "+−"[int(sign)],
        f"× 2{str(max(power, 1) - 127).translate(RAISED)}",
        f"{first + rest:.9g}",
    )


class SliceExplorer(Explorer):
    """The loss along a line through a network's weights in a `gpulab.saddles.landscape`.

    The slider `angle`, in degrees, turns the line from the direction of the least curvature to that
    of the greatest. The slider `reach` sets the length as a multiple of the landscape's extent.
    """

    def __init__(self, landscape: Landscape) -> None:
        self.landscape = landscape
        self.angle = ipywidgets.FloatSlider(
            0, min=0, max=90, step=1, description="angle (°)", continuous_update=False
        )
        self.reach = ipywidgets.FloatLogSlider(
            1, min=-2, max=1, description="reach", continuous_update=False
        )
        self.image = ipywidgets.HTML()
        super().__init__([ipywidgets.HBox([self.angle, self.reach]), self.image])
        for slider in (self.angle, self.reach):
            slider.observe(self.draw, "value")
        self.draw()

    @theme.with_theme
    def picture(self) -> Picture:
        """Draw the slice that the sliders select."""
        landscape, angle = self.landscape, self.angle.value
        line = landscape.slice(angle, self.reach.value * landscape.extent)
        curvature, low, high = (
            landscape.curvature(angle),
            min(line.loss.min(), landscape.loss),
            line.loss.max(),
        )
        figure, (axes,) = theme.canvas()
        axes.plot(
            line.distance,
            line.loss,
            color=ON_GPU if curvature < 0 else ON_CPU,
            lw=1.8,
            label="loss",
        )
        axes.plot(
            line.distance,
            line.quadratic,
            color=INK,
            lw=0.9,
            ls="--",
            label="quadratic approximation",
        )
        axes.plot(0, landscape.loss, "o", ms=7, color="white", mec=INK, label="the network")
        axes.set_ylim(low - 0.25 * (high - low), high + 0.1 * (high - low))
        axes.set(xlabel="distance from the network's weights", ylabel="loss")
        gain = 1 - line.loss.min() / landscape.loss
        lowest = "no loss on the line is below the network's"
        if gain > 0:
            lowest = f"the lowest loss on the line is {gain:.1%} below the network's"
        headline = f"At {angle:g}° the curvature is {curvature:.2g}; {lowest}"
        return theme.finish_figure(
            figure, headline, "The loss along a line through the weights.", columns=3
        )


bit_explorer, slice_explorer = BitExplorer, SliceExplorer
