"""The equivalence margin: parsed from text, and converted to units of the metric."""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import ArrayLike, NDArray

import gpulab.stats._inference as inference
from gpulab.errors import UsageError

DEFAULT_MARGIN = "0.25sd"  # for numbers, in standard deviations between seeds under the reference
DEFAULT_BINARY_MARGIN = 0.1  # for booleans, a share of the seeds


def parse_margin(margin: str | float) -> tuple[float, str]:
    """Split a margin such as 0.01, "0.25sd" or "1%" into its number and its unit.

    The unit is `sd`, `%` or an empty string.

    Raises:
        UsageError: If the margin has a different form, or is not a finite number above 0.
    """
    unit_match = (
        re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(sd|%)\s*", margin)
        if isinstance(margin, str)
        else None
    )
    is_number = isinstance(margin, (int, float, np.number)) and not isinstance(margin, bool)
    number = math.nan
    if unit_match:
        number = float(unit_match[1])
    elif is_number:
        number = float(margin)
    if not 0 < number < math.inf:
        raise UsageError(
            f"margin {margin!r}: expected a number above 0, or a string such as '0.25sd' or '1%'"
        )
    return number, unit_match[2] if unit_match else ""


def margin_size(
    margin: str | float,
    losses: NDArray[np.float64],
    is_binary: bool = False,
    confidence: float = inference.SD_CONFIDENCE,
) -> float:
    """Convert a margin to units of the metric.

    `losses` is the metric under the reference, shape (seeds,). A margin in standard deviations is a
    multiple of the lower limit of the standard deviation at `confidence`; it is NaN if all losses
    are equal. For a binary metric the margin is a share of the seeds.

    >>> (
    ...     margin_size("10%", np.array([0.0, 1.0]), is_binary=True),
    ...     margin_size("10%", np.array([4.0, 6.0])),
    ... )
    (0.1, 0.5)
    >>> losses = np.arange(12.0)
    >>> margin_size("0.5sd", losses) == 0.5 * inference.sd_lower_limit(losses)
    True
    >>> margin_size(1, np.array([0.0, 1.0]), is_binary=True)
    Traceback (most recent call last):
    gpulab.errors.UsageError: margin 1: for a yes/no metric, expected a share of the seeds ...
    """
    return float(margin_sizes(margin, losses, len(losses), is_binary, confidence))


def margin_sizes(
    margin: str | float,
    losses: NDArray[np.float64],
    n: ArrayLike,
    is_binary: bool = False,
    confidence: float = inference.SD_CONFIDENCE,
) -> NDArray[np.float64]:
    """Compute the margin for each number of seeds in n.

    Only a margin in standard deviations depends on n. A margin in percent is NaN if all losses are
    zero.

    >>> # The margin is wider with more seeds
    >>> margin_sizes("0.5sd", np.arange(12.0), n=[10, 12, 14]).round(4).tolist()
    [1.0577, 1.1276, 1.1802]
    >>> margin_sizes(0.5, np.arange(12.0), n=[10, 12, 14]).tolist()
    [0.5, 0.5, 0.5]
    """
    number, unit = parse_margin(margin)
    # A share for `%` and for booleans. Otherwise it is already in units of the metric.
    share = number / 100 if unit == "%" else number
    if is_binary and (unit == "sd" or share >= 1):
        example = DEFAULT_BINARY_MARGIN
        raise UsageError(
            f"margin {margin!r}: for a yes/no metric, expected a share of the seeds below 1, such"
            f" as {example}"
        )
    if unit == "sd":
        return number * inference.sd_lower_limits(losses, n, confidence)
    size = share
    if unit == "%" and not is_binary:
        size = share * abs(losses.mean()) if losses.any() else math.nan
    return np.full(np.shape(n), size)
