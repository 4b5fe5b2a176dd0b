"""Figures of finished results, in one visual language for all notebooks.

`theme` holds colours, axes and legends; the other modules draw runs, saddle points and instruments
with seaborn and matplotlib. They are imported when a figure is first drawn; `__init__.pyi` lists
the public functions.
"""

import lazy_loader

from gpulab.errors import extra

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = extra("notebooks")(__getattr__)
