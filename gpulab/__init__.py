"""gpulab: does the device change what a neural network learns, and if so, through which factor?

The most used names are here, and the packages hold the rest, as in SciPy and PyTorch. Names are
imported on first use, so that `import gpulab` is light and a setting can still set environment
variables before torch loads. `__init__.pyi` lists the names.
"""

import os

import lazy_loader

# OpenMP's threads spin while they wait, which brings two programs that share the cores nearly to a
# standstill. With this variable, which is read when torch loads, they stop spinning sooner. A
# program that has the cores to itself becomes a few per cent slower.
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
