"""Figures, one visual language for all notebooks: from finished results only.

`theme` holds colours, axes and legends; the other modules draw runs, saddle points and instruments with seaborn and
matplotlib. They are imported when a figure is first drawn; `__init__.pyi` lists the public functions.
"""

from gpulab._lazy import attach, homes_in

_homes = homes_in(f"{__file__}i", __name__)

__all__ = [*_homes]

__getattr__ = attach(__name__, _homes)
