"""Things to touch: with a kernel they answer, without one they are a picture."""

from __future__ import annotations

import math
import struct
from typing import Any

import ipywidgets
import torch

from gpulab.errors import UsageError
from gpulab.numerics.formats import FORMATS, MODES, round_to
from gpulab.numerics.sums import format_bits
from gpulab.plots.instruments import EXPONENT, FRACTION, SIGN, bits, landscape_slice
from gpulab.report import Picture
from gpulab.saddles.landscapes import Landscape

COLOURS = (SIGN, *[EXPONENT] * 8, *[FRACTION] * 23)  # as in the picture


class Explorer(ipywidgets.VBox):
    """Widgets that a still `picture` stands for where no kernel runs."""

    def picture(self) -> Picture:
        """What stands there without a kernel."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget, and the picture for those who cannot run it."""
        still, about = self.picture()._repr_mimebundle_()
        return super()._repr_mimebundle_(**options) | still, about


class BitExplorer(Explorer):
    """The bits of a number, to be clicked; below them what a format makes of it.

    Type a number or click a bit of its float32 pattern; choose a format and a rounding. In a notebook that
    no kernel runs, the still picture `gpulab.plots.bits` stands there instead.

    Args:
        x: The number to begin with.
        name: The format to begin with.

    Raises:
        UsageError: For an unknown format.

    Examples:
        >>> explorer = BitExplorer(1.0)
        >>> explorer.bits[-1].value = True  # a click on the last bit
        >>> explorer.number.value
        1.0000001192092896
    """

    def __init__(self, x: float = 0.1, name: str = "tf32") -> None:
        if name not in FORMATS:
            raise UsageError(f"format {name!r}: expected one of {', '.join(FORMATS)}")
        self.x = x
        self.number = ipywidgets.FloatText(value=x, description="number")
        self.format = ipywidgets.Dropdown(options=list(FORMATS), value=name, description="format")
        self.rounding = ipywidgets.Dropdown(options=list(MODES), value=MODES[0], description="rounding")
        layout = ipywidgets.Layout(width="20px", height="26px", margin="1px", padding="0px")
        self.bits = [ipywidgets.ToggleButton(layout=layout) for _ in COLOURS]
        self.answer = ipywidgets.HTML()
        self.busy = False  # a change is being shown, and is not another one
        groups = [self.bits[:1], self.bits[1:9], self.bits[9:]]
        apart = ipywidgets.Layout(margin="0 6px 0 0")
        row = ipywidgets.HBox([ipywidgets.HBox(group, layout=apart) for group in groups])
        super().__init__([ipywidgets.HBox([self.number, self.format, self.rounding]), row, self.answer])
        self.number.observe(self._typed, "value")
        self.format.observe(self._show, "value")
        self.rounding.observe(self._show, "value")
        for bit in self.bits:
            bit.observe(self._clicked, "value")
        self._typed()

    def picture(self) -> Picture:
        """What stands there without a kernel: the number in all formats."""
        return bits(self.x)

    def _typed(self, _: Any = None) -> None:
        """A number was typed: show its bits."""
        if self.busy:
            return
        self.busy = True
        self.x = torch.tensor(self.number.value, dtype=torch.float32).item()
        for bit, digit in zip(self.bits, "".join(format_bits(self.x)), strict=True):
            bit.value = digit == "1"
        self.busy = False
        self._show()

    def _clicked(self, _: Any) -> None:
        """A bit was clicked: show the number that these bits are."""
        if self.busy:
            return
        self.busy = True
        pattern = int("".join("1" if bit.value else "0" for bit in self.bits), 2)
        (self.x,) = struct.unpack("f", struct.pack("I", pattern))
        if math.isfinite(self.x):  # infinity and NaN are no numbers that a page could be sent
            self.number.value = self.x
        self.busy = False
        self._show()

    def _show(self, _: Any = None) -> None:
        for bit, colour in zip(self.bits, COLOURS, strict=True):
            bit.description = "1" if bit.value else "0"
            bit.style.button_color = colour if bit.value else "white"
            bit.style.text_color = "white" if bit.value else colour
        name, mode = self.format.value, self.rounding.value
        rounded = round_to(torch.tensor([self.x]), name, mode).item()
        apart = abs(rounded - self.x)
        off = f", off by {apart:.2g}" if math.isfinite(apart) else ""
        self.answer.value = (
            f"float32: {self.x:.12g}<br>{name}, {mode}: <b>{rounded:.12g}</b>{off}"
            f"<br><code>{' '.join(format_bits(self.x, name, mode))}</code>"
        )


class SliceExplorer(Explorer):
    """The loss along a line through a network's weights, which a slider turns from the steepest way down to that up.

    Sliders are `angle`, in degrees, and `reach`, a multiple of the landscape's extent. In a notebook that no kernel
    runs, the slice along the steepest way down stands there instead.

    Args:
        landscape: From `gpulab.landscape`.

    Examples:
        >>> import gpulab
        >>> layer = torch.nn.Linear(3, 1)
        >>> around = gpulab.landscape(layer, torch.nn.functional.mse_loss, (torch.randn(9, 3), torch.randn(9, 1)))
        >>> explorer = SliceExplorer(around)
        >>> explorer.angle.value = 90
    """

    def __init__(self, landscape: Landscape) -> None:
        self.landscape = landscape
        self.angle = ipywidgets.FloatSlider(0, min=0, max=90, step=1, description="angle (°)", continuous_update=False)
        self.reach = ipywidgets.FloatLogSlider(1, min=-2, max=1, description="reach", continuous_update=False)
        self.image = ipywidgets.Image(format="png")
        super().__init__([ipywidgets.HBox([self.angle, self.reach]), self.image])
        for slider in (self.angle, self.reach):
            slider.observe(self._show, "value")
        self._show()

    def picture(self) -> Picture:
        """What stands there without a kernel: the slice that the sliders ask for."""
        line = self.landscape.slice(self.angle.value, self.reach.value * self.landscape.extent)
        return landscape_slice(self.landscape, line, self.angle.value)

    def _show(self, _: Any = None) -> None:
        self.image.value = self.picture().png()


bit_explorer, slice_explorer = BitExplorer, SliceExplorer
