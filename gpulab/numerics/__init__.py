"""Number formats, another chip's arithmetic, and sums in many orders."""

from gpulab.numerics.emulation import emulate
from gpulab.numerics.formats import FORMATS, round_to, ulp_distance
from gpulab.numerics.sums import first_bit, fma, format_bits, product_errors, shuffled_sums, summation

__all__ = [
    "FORMATS",
    "emulate",
    "first_bit",
    "fma",
    "format_bits",
    "product_errors",
    "round_to",
    "shuffled_sums",
    "summation",
    "ulp_distance",
]
