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

ALPHA = 0.05


@dataclass(frozen=True)
class MetaAnalysis:
    """What studies say together; effects, intervals and tau are in the studies' unit, intervals are of 95 %."""

    studies: int  # how many
    effect: float  # the mean over studies
    low: float  # the mean's interval
    high: float
    p: float  # two-sided, that the mean is zero
    tau: float  # the standard deviation between the studies' own effects
    tau_low: float  # tau's interval
    tau_high: float
    i2: float  # I², the share of the variation seen that is not the studies' errors, from 0 to 1
    q: float  # Cochran's Q
    p_heterogeneous: float  # of Q, if the studies had one effect
    # The interval of the effect that another study would have; NaN below three. With few studies it holds less often
    # than it says: nine times in ten with six (Partlett, Riley 2017).
    predicted_low: float
    predicted_high: float


def meta_analysis(effects: ArrayLike, errors: ArrayLike) -> MetaAnalysis:
    """Pool effects with their standard errors above 0, both of shape (studies,) with two or more, in one unit.

    Examples:
        >>> alike = meta_analysis([0.1, 0.2, 0.15], [0.1, 0.1, 0.1])
        >>> round(alike.effect, 3), alike.tau
        (0.15, 0.0)
        >>> apart = meta_analysis([0.0, 1.0, 2.0], [0.1, 0.1, 0.1])
        >>> round(apart.effect, 3), round(apart.tau, 3), round(apart.i2, 2)
        (1.0, 0.995, 0.99)
    """
    effects, variances = np.asarray(effects, float), np.asarray(errors, float) ** 2
    k = len(effects)

    def cochran_q(tau2: float) -> float:
        weights = 1 / (variances + tau2)
        return float(weights @ (effects - weights @ effects / weights.sum()) ** 2)

    def tau2_where(q: float) -> float:
        """The tau² at which Cochran's Q, which falls as tau² rises, has a value; 0 where it is less already."""
        if cochran_q(0.0) <= q:
            return 0.0
        beyond = float(np.ptp(effects) ** 2 * k / q)  # there Q is below
        return float(brentq(lambda tau2: cochran_q(tau2) - q, 0.0, beyond, xtol=1e-12 * beyond))

    # The estimate is where Q is k − 1, an end of the interval where it is a quantile. statsmodels' `combine_effects`
    # has no interval, and says that tau is 0 where its last step goes too far by a rounding error.
    tau2, tau2_low, tau2_high = map(tau2_where, (k - 1, *chi2.isf((ALPHA / 2, 1 - ALPHA / 2), k - 1)))
    weights = 1 / (variances + tau2)
    effect, error = float(weights @ effects / weights.sum()), float(weights.sum() ** -0.5)
    # With tau by Paule and Mandel the factor of Hartung and Knapp is 1, or below where tau is 0, and then taken as 1.
    reach = float(t.isf(ALPHA / 2, k - 1)) * error
    predicted_reach = float(t.isf(ALPHA / 2, k - 2)) * math.hypot(error, math.sqrt(tau2)) if k > 2 else math.nan
    q = cochran_q(0.0)
    return MetaAnalysis(
        studies=k,
        effect=effect,
        low=effect - reach,
        high=effect + reach,
        p=float(2 * t.sf(abs(effect) / error, k - 1)),
        tau=math.sqrt(tau2),
        tau_low=math.sqrt(tau2_low),
        tau_high=math.sqrt(tau2_high),
        i2=max(0.0, 1 - (k - 1) / q) if q else 0.0,
        q=q,
        p_heterogeneous=float(chi2.sf(q, k - 1)),
        predicted_low=effect - predicted_reach,
        predicted_high=effect + predicted_reach,
    )
