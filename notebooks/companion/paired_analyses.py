"""The analyses of paired runs that plans in `data/registered` name: the mean, and a robust one."""

from __future__ import annotations

import numpy as np
import pandas as pd

import gpulab as gl

# The robust analysis, as registered.
TRIMMED = 0.2
CONFIDENCE = 0.975
RESAMPLES = 9_999


def compare_pairs(
    runs: pd.DataFrame, factor: str, reference: str, looks: int = 1, alpha: float = 0.05
) -> pd.DataFrame:
    """Compare a level of a factor with the reference on the same seeds, by two analyses.

    Args:
        runs: Runs of two levels of the factor, with the columns `seed` and `final_loss`.
        factor: The column that names the level.
        reference: The level that the other one is compared with.
        looks: How often the seeds are looked at while they come in; see `gpulab.verdict`.
        alpha: The level of significance of the verdict.

    Returns:
        A row for the mean, by `gpulab.verdict`, and one for the 20 % trimmed mean, which a few
        seeds cannot decide, with a bootstrap interval. Each has the number of `pairs`, the
        `margin` of the verdict, the `difference`, the limits `low` and `high` of the interval that
        decides about equivalence, and a `decision`. All but the first and the last are shares of
        the mean loss under the reference.

    References:
        Trimmed means: Wilcox 2017, *Introduction to robust estimation and hypothesis testing*; the
        bootstrap interval: Efron 1987, *Better bootstrap confidence intervals* (BCa).
    """
    losses = runs.pivot_table(index="seed", columns=factor, values="final_loss").dropna()
    (other,) = losses.columns.drop(reference)
    differences = (losses[other] - losses[reference]).to_numpy()
    level = losses[reference].mean()
    verdict = gl.verdict(runs, factor=factor, reference=reference, looks=looks, alpha=alpha)
    found = verdict.table.iloc[0]
    mean = {
        "difference": found.difference / level,
        "low": found.equivalent_low / level,
        "high": found.equivalent_high / level,
        "decision": found.decision,
    }
    trimmed_mean = trimmed_mean_decision(differences / level, found.margin / level)
    table = pd.DataFrame({"analysis": ["mean", "trimmed mean"]})
    table = table.join(pd.DataFrame([mean, trimmed_mean]))
    return table.assign(pairs=len(losses), margin=found.margin / level)


def trimmed_mean_decision(differences: np.ndarray, margin: float) -> dict[str, object]:
    """Decide by the bootstrap interval of the trimmed mean of paired differences.

    Args:
        differences: The differences, at least five.
        margin: The largest negligible difference.

    Returns:
        `difference`, `low`, `high` and `decision`, as registered: `equivalent` if the interval lies
        within the margin, `different` if it does not contain zero, `different but negligible` if
        both are true, else `inconclusive`.

    Examples:
        >>> same = trimmed_mean_decision(np.linspace(-0.1, 0.1, 21), 1.0)
        >>> same["decision"]
        'equivalent'
    """
    from scipy import stats

    interval = stats.bootstrap(
        (differences,),
        lambda sample, axis: stats.trim_mean(sample, TRIMMED, axis=axis),
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    is_different = not interval.low <= 0 <= interval.high
    is_equivalent = -margin < interval.low and interval.high < margin
    decisions = {
        (True, True): "different but negligible",
        (True, False): "different",
        (False, True): "equivalent",
        (False, False): "inconclusive",
    }
    return {
        "difference": float(stats.trim_mean(differences, TRIMMED)),
        "low": float(interval.low),
        "high": float(interval.high),
        "decision": decisions[is_different, is_equivalent],
    }
