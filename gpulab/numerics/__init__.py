"""Number formats, another chip's arithmetic, sums in many orders, and a GPU's random numbers."""

from gpulab.numerics.cuda_random import cuda_uniform, same_draws
from gpulab.numerics.emulation import emulate
from gpulab.numerics.formats import FORMATS, round_to, ulp_distance
from gpulab.numerics.sums import first_bit, fma, format_bits, product_errors, shuffled_sums, summation

__all__ = [
    "FORMATS",
    "cuda_uniform",
    "emulate",
    "first_bit",
    "fma",
    "format_bits",
    "product_errors",
    "round_to",
    "same_draws",
    "shuffled_sums",
    "summation",
    "ulp_distance",
]
