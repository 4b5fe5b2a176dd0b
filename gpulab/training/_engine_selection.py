"""The choice of the engine that computes the windows of a training run."""

from __future__ import annotations

from importlib.util import find_spec

from gpulab.data._feed import has_exclusive_device
from gpulab.settings import Setting
from gpulab.training.loop import BatchEngine, Engine


def select_engine(autograd_engine: BatchEngine, setting: Setting, fast: bool) -> Engine:
    """Return the fastest engine that computes what `autograd_engine` computes, up to rounding.

    In three cases this is `autograd_engine` itself: if `fast` is false, if the setting compiles the
    model or casts its operations, and if the optional package `gpulab.engines` is not installed.
    """
    needs_autograd = not fast or setting.compile or setting.autocast
    if needs_autograd or find_spec("gpulab.engines") is None:
        return autograd_engine
    from gpulab.engines import fastest

    return fastest(autograd_engine, has_exclusive_device(setting))
