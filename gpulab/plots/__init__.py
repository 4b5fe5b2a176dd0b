"""Figures, one visual language for all notebooks: from finished results only.

`style` holds the theme, `names` the words for settings; the other modules draw what their names say, with seaborn and
matplotlib. They are imported when a figure is first drawn; `__init__.pyi` lists what they draw.
"""

from gpulab._lazy import attach, homes_in

_homes = homes_in(f"{__file__}i", __name__)

__all__ = [*_homes]

__getattr__ = attach(__name__, _homes)
