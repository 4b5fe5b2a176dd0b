"""gpulab: does the device change what a neural network learns, and if so, which factor does it?

The names that most people call are here; the packages hold the rest, as in scipy and torch. A name
is imported when it is first used, so that `import gpulab` is light and a setting can still choose
the environment in which torch loads. `__init__.pyi` lists the names.
"""

import os

import lazy_loader

# OpenMP's threads wait by spinning, which brings two programs that share the cores nearly to a
# standstill, unless they give up sooner; alone that costs a few per cent. It is read when torch
# loads.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "1.0.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PACKAGES = (
    "audits",
    "data",
    "device",
    "guards",
    "models",
    "numerics",
    "plots",
    "saddles",
    "stats",
    "store",
    "testing",
    "training",
)
