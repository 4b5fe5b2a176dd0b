"""The equivalence margin: parsed from text, and converted to units of the metric."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

import gpulab.stats.tests as inference
from gpulab.errors import UsageError


def parse_margin(margin: str | float) -> tuple[float, str]:
    """The number in a margin such as 0.01, "0.25sd" or "1%", and its unit: `sd`, `%` or nothing."""
    with_unit = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(sd|%)\s*", margin) if isinstance(margin, str) else None
    is_number = isinstance(margin, (int, float, np.number)) and not isinstance(margin, bool)
    number = float(with_unit[1]) if with_unit else float(margin) if is_number else math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"margin {margin!r}: expected a number above 0, or such as '0.25sd' or '1%'")
    return number, with_unit[2] if with_unit else ""


def margin_size(margin: str | float, losses: np.ndarray, yes_or_no: bool = False, n: Any = None) -> Any:
    """A margin in the metric's units; `losses` is the metric under the reference, shape (seeds,).

    One in standard deviations is of their lower 97.5 % limit as it were for n seeds, by default as many as there are;
    NaN where the losses do not differ. Of yes and no a margin is a share of the seeds.

    >>> margin_size("10%", np.array([0.0, 1.0]), yes_or_no=True), margin_size("10%", np.array([4.0, 6.0]))
    (0.1, np.float64(0.5))
    >>> losses = np.arange(12.0)
    >>> margin_size("0.5sd", losses, n=np.array([10, 12, 14])).round(4).tolist()  # wider with more seeds
    [1.0577, 1.1276, 1.1802]
    >>> margin_size("0.5sd", losses) == 0.5 * inference.sd_lower_limit(losses)
    np.True_
    >>> margin_size(1, np.array([0.0, 1.0]), yes_or_no=True)
    Traceback (most recent call last):
    gpulab.errors.UsageError: margin 1: of yes and no it is a share of the seeds below 1, such as 0.1
    """
    number, unit = parse_margin(margin)
    share = number / 100 if unit == "%" else number
    if yes_or_no and (unit == "sd" or share >= 1):
        raise UsageError(f"margin {margin!r}: of yes and no it is a share of the seeds below 1, such as {USUAL_SHARE}")
    if unit == "sd":
        return number * inference.sd_lower_limit(losses, n)
    if unit == "%" and not yes_or_no:
        return share * abs(losses.mean()) if losses.any() else math.nan
    return share


USUAL_MARGIN, USUAL_SHARE = "0.25sd", 0.1  # of numbers, and of yes and no
