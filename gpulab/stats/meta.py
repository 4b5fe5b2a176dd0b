"""Meta-analysis: one effect from several studies, and how far their own effects lie apart.

Random effects: each study has an effect of its own, drawn about a mean with standard deviation tau, and is measured
with its standard error.

References:
    Paule, Mandel 1982, *Consensus values and weighting factors* (tau). Hartung, Knapp 2001, and Sidik, Jonkman 2002
    (the interval of the mean), never narrower than the errors make it (Röver, Knapp, Friede 2015). Viechtbauer 2007
    (the interval of tau). Higgins, Thompson, Spiegelhalter 2009 (prediction). Higgins, Thompson 2002 (I²).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.stats import chi2, t

from gpulab.errors import UsageError


@dataclass(frozen=True)
class MetaAnalysis:
    """What studies say together.

    Attributes:
        studies: How many.
        effect, low, high: The mean over studies and its interval at 1 − alpha.
        p: Two-sided, that this mean is zero.
        tau, tau_low, tau_high: The standard deviation between the studies' own effects, and its interval.
        i2: I², the share of the variation seen that is not the studies' errors; from 0 to 1.
        q, p_heterogeneous: Cochran's Q, and its p if the studies had one effect.
        predicted_low, predicted_high: The interval of the effect that another study would have; NaN below three. With
            few it holds less often than it says: nine times in ten with six (Partlett, Riley 2017).
    """

    studies: int
    effect: float
    low: float
    high: float
    p: float
    tau: float
    tau_low: float
    tau_high: float
    i2: float
    q: float
    p_heterogeneous: float
    predicted_low: float
    predicted_high: float


def meta_analysis(effects: ArrayLike, errors: ArrayLike, alpha: float = 0.05) -> MetaAnalysis:
    """Pool effects with their standard errors, both of shape (studies,), in one unit.

    Raises:
        UsageError: For fewer than two studies, shapes that differ, numbers that are not finite, or no error above 0.

    Examples:
        >>> alike = meta_analysis([0.1, 0.2, 0.15], [0.1, 0.1, 0.1])
        >>> round(alike.effect, 3), alike.tau
        (0.15, 0.0)
        >>> apart = meta_analysis([0.0, 1.0, 2.0], [0.1, 0.1, 0.1])
        >>> round(apart.effect, 3), round(apart.tau, 3), round(apart.i2, 2)
        (1.0, 0.995, 0.99)
    """
    y, errors = np.asarray(effects, float), np.asarray(errors, float)
    k = len(y)
    if (
        k < 2
        or y.shape != errors.shape
        or not (np.isfinite(y).all() and np.isfinite(errors).all() and errors.min() > 0)
    ):
        raise UsageError(
            f"effects {y.tolist()}, errors {errors.tolist()}: expected two or more, each with an error > 0"
        )
    v = errors**2
    tau2, low2, high2 = (_tau2(y, v, at) for at in (k - 1, *chi2.isf((alpha / 2, 1 - alpha / 2), k - 1)))
    weights = 1 / (v + tau2)
    # With tau by Paule and Mandel the factor of Hartung and Knapp is 1, or below where tau is 0, and then taken as 1.
    effect, error, q = float(weights @ y / weights.sum()), float(weights.sum() ** -0.5), _q(0.0, y, v)
    reach = float(t.isf(alpha / 2, k - 1)) * error
    ahead = float(t.isf(alpha / 2, k - 2)) * math.hypot(error, math.sqrt(tau2)) if k > 2 else math.nan
    return MetaAnalysis(
        studies=k,
        effect=effect,
        low=effect - reach,
        high=effect + reach,
        p=float(2 * t.sf(abs(effect) / error, k - 1)),
        tau=math.sqrt(tau2),
        tau_low=math.sqrt(low2),
        tau_high=math.sqrt(high2),
        i2=max(0.0, 1 - (k - 1) / q) if q else 0.0,
        q=q,
        p_heterogeneous=float(chi2.sf(q, k - 1)),
        predicted_low=effect - ahead,
        predicted_high=effect + ahead,
    )


def _q(tau2: float, y: np.ndarray, v: np.ndarray) -> float:
    """The weighted squares about the weighted mean, which fall as tau² rises."""
    weights = 1 / (v + tau2)
    return float(weights @ (y - weights @ y / weights.sum()) ** 2)


def _tau2(y: np.ndarray, v: np.ndarray, at: float) -> float:
    """The tau² at which Q is `at`; 0 where it is less already."""
    if _q(0.0, y, v) <= at:
        return 0.0
    most = float(np.ptp(y) ** 2 * len(y) / at)  # there Q is below
    return float(brentq(lambda tau2: _q(tau2, y, v) - at, 0.0, most, xtol=1e-12 * most))
