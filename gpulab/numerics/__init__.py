"""Number formats, and another chip's arithmetic."""

from gpulab.numerics.emulation import emulate
from gpulab.numerics.formats import FORMATS, round_to

__all__ = ["FORMATS", "emulate", "round_to"]
