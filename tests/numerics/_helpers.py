"""Random numbers, and rounding of exact fractions."""

from fractions import Fraction

import numpy as np
import torch


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def float32_of(value):
    """Return the float32 number nearest to a fraction, with ties to even."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf)]
    even = {n: int(n.view(np.uint32)) & 1 for n in (near, *around)}
    return min((near, *around), key=lambda n: (abs(Fraction(float(n)) - value), even[n]))
