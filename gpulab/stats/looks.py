"""Repeated looks: by how much a test has to be stricter if its runs are looked at as they come in.

A test at 5 % that is made four times, each time with more seeds, is wrong more often than in 5 % of cases: in up to
24 % if what was seen decides when to look again. `looks_factor` says how much smaller the level of each look must be.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import scipy
from numpy.typing import NDArray

MOST_LOOKS = 1000  # more would take minutes
LOWEST_Z = -8.0  # z values below it are taken for it
CELLS = 200  # of the grid of z values
RATIOS = 1 + np.geomspace(3e-3, 1e6, 50)  # seeds at a look over those at the look before
# Relative, in the factor: what the grid makes the error too small by, and more.
GRID_ERROR = 0.01


@functools.lru_cache
def looks_factor(alpha: float, looks: int) -> float:
    """The number by which p is multiplied so that a test holds its level `alpha` over up to so many looks.

    It is the smallest that suffices whatever rule chooses when to look, and what was seen so far may be part of the
    rule: "p was 0.06, so nine more seeds". Where the times of the looks do not depend on the results, `looks` itself
    would suffice (Bonferroni). The rule must not see the results between the looks.

    Args:
        alpha: The level that the test is to hold over all looks.
        looks: How many looks there are at most.

    Returns:
        The factor, 1 for one look.

    Examples:
        >>> [round(looks_factor(0.05, looks), 1) for looks in (1, 2, 4, 8)]
        [1.0, 2.5, 7.5, 25.3]
    """
    if looks == 1:
        return 1.0

    def excess(log_factor: float) -> float:
        return worst_error(alpha * math.exp(-log_factor), looks) - alpha

    log_factor: float = scipy.optimize.brentq(excess, 0.0, 2 + 3 * math.log(looks), xtol=1e-4)
    return math.exp(log_factor) * (1 + GRID_ERROR)


def worst_error(level: float, looks: int) -> float:
    """The error over up to so many looks of a one-sided test at `level`, for the worst rule of when to look.

    The test rejects at a look where z, its sum over the root of its variance, is c or more, with c the normal quantile
    of `level`. If the sum has grown from variance 1 to r between two looks, the second z is normal with mean z / √r and
    variance 1 − 1 / r. The worst rule picks the r at which rejection at that look or a later one is likeliest, which is
    found backwards, from the last look (dynamic programming). With two looks it picks r = (c / z)², and the error is
    level + exp(−c² / 2) / 4 (Proschan and Hunsberger 1995, *Designed extension of studies based on conditional power*,
    Biometrics 51:1315). A two-sided test with the same `level` on both sides together errs slightly less often.

    Examples:
        >>> round(worst_error(0.05, looks=2), 4), round(0.05 + math.exp(-(1.6449**2) / 2) / 4, 4)
        (0.1144, 0.1146)
        >>> round(worst_error(0.05, looks=4), 2)
        0.25
    """
    c = -float(scipy.special.ndtri(level))
    edges = np.linspace(LOWEST_Z, c, CELLS + 1)
    z = (edges[1:] + edges[:-1]) / 2
    steps = [_step(z / math.sqrt(r), math.sqrt(1 - 1 / r), edges) for r in RATIOS]
    (reject,), (stay,) = _step(np.zeros(1), 1.0, edges)
    later = np.zeros(CELLS)  # the chance of a rejection at the looks that are left, by the z of this look
    for _ in range(looks - 1):
        later = np.max([rejects + stays @ later for rejects, stays in steps], axis=0)
    return float(reject + stay @ later)


def _step(
    mean: NDArray[np.float64], sd: float, edges: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The chances that the next z is beyond the last edge, shape (z,), and in each of the cells, shape (z, cells)."""
    below = scipy.special.ndtr((edges - mean[:, None]) / sd)
    reject = 1 - below[:, -1]
    below[:, 0] = 0  # what is below the first edge counts to the first cell
    return reject, np.diff(below, axis=1)
