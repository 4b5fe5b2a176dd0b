"""gpulab: does the device change what a neural network learns, and if so, which factor does it?

What most people call stands here, the rest in the packages, as in scipy and torch. Names are imported when
first used, so that `import gpulab` is light and the environment of a setting can still be put in force
before torch loads. `__init__.pyi` lists them.
"""

from __future__ import annotations

import os

from gpulab._lazy import attach, homes_in

# OpenMP's threads wait by spinning, which brings two programs that share the cores nearly to a standstill, unless
# they give up sooner; alone that costs a few per cent. It is read when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "1.0.0"

_homes = homes_in(f"{__file__}i", __name__)
PACKAGES = tuple(name for name, home in _homes.items() if not home)

__all__ = [*_homes]

__getattr__ = attach(__name__, _homes)


def __dir__() -> list[str]:
    return sorted(__all__)
