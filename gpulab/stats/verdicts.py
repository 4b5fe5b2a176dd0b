"""What runs on the same seeds allow one to say of a factor: different, equivalent, or not settled.

The seed is the unit. A level of the factor (a setting, say) is compared with the reference on the
seeds that both have, by the mean of the paired differences:

- different: a sign-flip permutation test (Fisher 1935). Were the two levels the same, each difference
  could as well have had the other sign. It assumes no shape, so losses may have two humps.
- equivalent: two one-sided t tests against a margin (Schuirmann 1987); for yes and no an exact test.
  A margin in standard deviations between seeds is uncertain itself, so it is taken at the sd's lower
  97.5 % confidence limit (`sd_at_least`).
- Several levels: Holm's correction (1979), of the differences and of the equivalences, each for itself.

`benchmarks/verdict_calibration.md` has the measured error rates, and where they are missed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import UsageError
from gpulab.report import Report, paragraphs
from gpulab.report import table as html_table
from gpulab.stats.tests import (
    bca_interval,
    deviation,
    equivalence_p,
    heaviness,
    holm,
    sd_at_least,
    share_at_most,
    shrink,
    sign_flip_p,
    sign_test_p,
    switches_p,
)

if TYPE_CHECKING:
    import pandas as pd

DECISIONS = ("different", "different but negligible", "inconclusive", "equivalent")
DIVERGED_APART = 0.1  # levels that may diverge on more of the seeds differently are not called equivalent
MOST_SEEDS = 100_000  # seeds_needed looks no further


@dataclass(frozen=True, eq=False)
class Verdict(Report):
    """Levels of a factor compared with a reference level on the same seeds.

    `table` has a row per other level, in the order of the frame: the level in a column named as the
    factor; `decision`; `seeds` (pairs compared, both finished); `difference` (mean of level minus
    reference) with its BCa interval `low`, `high` at 1 − alpha (of little use below ten seeds: there it
    holds the truth in 76 to 90 % of cases, not 95); `p_different` and `p_equivalent`, and
    after Holm's correction `p_different_holm` and `p_equivalent_holm`; `margin` (in the metric's own
    units); `sd_of_differences`; `largest_difference` on a seed; `same_bits` (pairs with identical
    trained weights); `moved` (seeds moved by more than the margin) and `moved_at_most` (the share of
    seeds that could be, 95 % one-sided Clopper and Pearson limit); `left_out` (seeds that only one of
    the two has); `diverged`, `reference_diverged` (on the shared seeds) and `p_diverged` (sign test,
    McNemar's) with `p_diverged_holm`; `seeds_needed` to settle the matter.

    `pairs` has a row per level and seed: the level, the block, `reference` and `other` (the metric),
    `difference` (NaN where one of the two diverged), `reference_diverged`, `other_diverged` and
    `same_bits`. `reruns` has the same columns for the reference run again: a control. `runs` are the
    rows of the frame that were compared. `between_seeds` is the standard deviation over seeds under
    the reference, and `between_seeds_at_least` its lower 97.5 % limit.

    `print(verdict)` says it in sentences, `verdict.plot()` draws it, a notebook shows both.
    """

    metric: str
    factor: str
    block: str
    reference: Any
    margin: str | float
    alpha: float
    table: pd.DataFrame
    pairs: pd.DataFrame
    reruns: pd.DataFrame
    runs: pd.DataFrame
    between_seeds: float
    between_seeds_at_least: float

    @property
    def decisions(self) -> dict[Any, str]:
        """The decision of each level."""
        return dict(zip(self.table[self.factor], self.table.decision, strict=True))

    @property
    def decision(self) -> str:
        """The decision of the whole: the first in `DECISIONS` that some level has.

        So one level that is different makes the whole `different`, and only when every level is
        equivalent, the whole is. With nothing to compare it is `inconclusive`.
        """
        return min(self.decisions.values(), key=DECISIONS.index, default="inconclusive")

    @property
    def largest(self) -> float:
        """The largest change that another level made to a seed; NaN without a pair, 0 without a level."""
        return float(self.table.largest_difference.max()) if len(self.table) else 0.0

    @property
    def ratio(self) -> float:
        """The largest change as a multiple of the spread between seeds; NaN when either is unknown."""
        return self.largest / self.between_seeds if self.between_seeds else math.nan

    def __str__(self) -> str:
        lines = [_sentence(self, row) for row in self.table.to_dict("records")]
        if not lines:
            lines = [f"Only {self.reference} was run: there is nothing to compare it with."]
        return "\n".join([*lines, _spread_sentence(self), *_rerun_sentence(self), _diverged_sentence(self)])

    def html(self) -> str:
        """Sentences, table and figure."""
        if not len(self.table):
            return super().html()
        shown = [self.factor, "decision", "seeds", "difference", "low", "high", "p_different_holm", "p_equivalent_holm"]
        shown += ["margin", "largest_difference", "same_bits", "diverged"]
        return super().html() + html_table(self.table[shown]) + self.plot().html()


def verdict(
    frame: pd.DataFrame,
    metric: str = "final_loss",
    factor: str = "setting",
    block: str = "seed",
    margin: str | float = "0.25sd",
    alpha: float = 0.05,
    reference: Any = None,
) -> Verdict:
    """Say of each level of a factor whether it differs from the reference, is equivalent, or neither.

    `frame` has a row per run, as from `gpulab.runs`; `metric` is a column of numbers or of booleans
    (then the tests are of how many seeds switch: McNemar's and `switches_p`); `factor` and `block` are
    columns. `margin` is the largest difference without importance: a number in the metric's units, or a
    string such as "0.25sd", in standard deviations between seeds under the reference. `reference` is a
    level; by default "cpu", where there is none the first in the frame.

    Decisions: `different`, `equivalent`, `different but negligible` (both), `inconclusive`. Pairs with
    a diverged run have no difference of the metric: the metric is compared where both finished, and
    how often the levels diverge is compared on all pairs. A difference there makes the decision
    `different`; and while more than a tenth of the seeds could diverge under one level only (95 %
    limit), the level is not called equivalent. One pair or none is `inconclusive`. Differences that
    are all exactly zero are `equivalent`. Rows with `rerun` above 0 are a control, and not compared.
    Columns `status` and `rerun` may be missing: then a run without a number diverged, and all are
    first runs.

    Raises `UsageError` for missing or non-numeric columns, a finished run without a finite number, a
    margin or alpha out of range, an unknown reference, mixed protocols, and two first runs of one
    seed and level.

    >>> import pandas as pd
    >>> losses = [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]
    >>> cpu = pd.DataFrame({"setting": "cpu", "seed": range(6), "final_loss": losses})
    >>> cuda = cpu.assign(setting="cuda", final_loss=cpu.final_loss + 0.1)
    >>> verdict(pd.concat([cpu, cuda])).decision
    'different'
    """
    _check_alpha(alpha)
    _check_columns(frame, metric, factor, block)
    check_one_protocol(frame, besides=factor)
    frame = _prepared(frame, metric)
    first = frame[frame["rerun"] == 0]
    _check_once(first, factor, block)
    levels = list(dict.fromkeys(first[factor]))
    reference = _reference(levels, reference)
    base = first[first[factor] == reference]
    losses = base.loc[base.status != "diverged", metric].to_numpy(float)
    spread, at_least = deviation(losses), sd_at_least(losses)
    size = _margin(margin, at_least)
    others = [level for level in levels if level != reference]
    pairs = _pairs(base, first, metric, factor, block, others)
    again = frame[(frame["rerun"] > 0) & (frame[factor] == reference)]
    reruns = _pairs(base, again, metric, factor, block, [reference] if len(again) else [])
    table = _table(pairs, first, factor, block, reference, others, size, alpha)
    table["seeds_needed"] = _to_settle(table, margin, losses, alpha)
    return Verdict(metric, factor, block, reference, margin, alpha, table, pairs, reruns, first, spread, at_least)


def check_one_protocol(frame: pd.DataFrame, besides: str = "") -> None:
    """Raise `UsageError` when a frame mixes runs that learned different things or for different times.

    `besides` is a column that may vary: the factor under comparison.
    """
    columns = [name for name in ("experiment", "profile", "frames", "protocol") if name in frame and name != besides]
    protocols = frame[columns].drop_duplicates()
    if columns and len(protocols) > 1:
        raise UsageError(f"the frame mixes {protocols.to_dict('records')}; compare runs of one protocol at a time")


# --- from runs to a table ----------------------------------------------------------------------------


def _check_alpha(alpha: float) -> None:
    if not (isinstance(alpha, (int, float)) and 0 < alpha < 1):
        raise UsageError(f"alpha {alpha!r}: expected a number between 0 and 1, such as 0.05")


def _check_columns(frame: pd.DataFrame, metric: str, factor: str, block: str) -> None:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    for name in (metric, factor, block):
        if name not in frame:
            raise UsageError(f"no column {name!r}; there are {', '.join(map(str, frame.columns))}")
        if name != metric and frame[name].isna().any():
            raise UsageError(f"column {name!r} is empty in {frame[name].isna().sum()} rows; fill or drop them")
    if not (is_numeric_dtype(frame[metric]) or is_bool_dtype(frame[metric].dropna().infer_objects())):
        raise UsageError(f"metric {metric!r} is of type {frame[metric].dtype}; expected numbers or booleans")


def _prepared(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A copy with the metric in float64, and `status`, `rerun` and `weights` where they were missing."""
    frame = frame.assign(**{metric: frame[metric].astype("Float64").to_numpy(float, na_value=math.nan)})
    finite = np.isfinite(frame[metric])
    if "status" not in frame:
        frame["status"] = np.where(finite, "finished", "diverged")
    if "rerun" not in frame:
        frame["rerun"] = 0
    if "weights" not in frame:
        frame["weights"] = None
    if len(lost := frame[~finite & (frame["status"] != "diverged")]):
        raise UsageError(
            f"{len(lost)} finished run(s) have no finite {metric}: index {lost.index[:3].tolist()}; "
            "mark them as diverged or leave their seeds out"
        )
    return frame


def _check_once(first: pd.DataFrame, factor: str, block: str) -> None:
    twice = first[first.duplicated([factor, block], keep=False)]
    if len(twice):
        machines = sorted(set(twice.machine.astype(str))) if "machine" in twice else []
        where = f", on {', '.join(machines)}; compare one machine's runs at a time" if len(machines) > 1 else ""
        raise UsageError(
            f"{factor} {twice[factor].iloc[0]!r} {block} {twice[block].iloc[0]} was run more than once"
            + (where or "; keep one row for each, or number repetitions in the column `rerun`")
        )


def _reference(levels: list[Any], reference: Any) -> Any:
    if not levels:
        raise UsageError(f"no runs to compare{f' with {reference!r}' if reference is not None else ''}")
    if reference is None:
        return "cpu" if "cpu" in levels else levels[0]
    if reference not in levels:
        raise UsageError(f"no runs under {reference!r}; there are {sorted(map(str, levels))}")
    return reference


def _margin(margin: str | float, at_least: float = math.nan) -> float:
    """A margin in the metric's units, from a number or from such as "0.25sd"."""
    share = _share(margin)
    if share is not None:
        return share * at_least
    number = float(margin) if isinstance(margin, (int, float, np.number)) and not isinstance(margin, bool) else math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"margin {margin!r}: expected a number above 0, or such as '0.25sd'")
    return number


def _share(margin: str | float) -> float | None:
    """The standard deviations in a margin such as "0.25sd"; None for a number."""
    if not isinstance(margin, str):
        return None
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*sd\s*", margin)
    if not found or not float(found[1]) > 0:
        raise UsageError(f"margin {margin!r}: expected a number above 0, or such as '0.25sd'")
    return float(found[1])


def _pairs(
    base: pd.DataFrame, runs: pd.DataFrame, metric: str, factor: str, block: str, levels: list[Any]
) -> pd.DataFrame:
    """A row per level and block that the reference has, too."""
    runs = runs[runs[factor].isin(levels)]
    keep = [block, metric, "status", "weights"]
    both = runs[[factor, *keep]].merge(base[keep], on=block, suffixes=("", "_base"))
    lost, base_lost = both.status == "diverged", both.status_base == "diverged"
    pairs = both[[factor, block]].assign(
        reference=both[f"{metric}_base"],
        other=both[metric],
        difference=(both[metric] - both[f"{metric}_base"]).where(~lost & ~base_lost),
        reference_diverged=base_lost,
        other_diverged=lost,
        same_bits=(both.weights == both.weights_base) & both.weights.notna(),
    )
    return pairs.sort_values(block, kind="stable", ignore_index=True)


def _table(
    pairs: pd.DataFrame,
    first: pd.DataFrame,
    factor: str,
    block: str,
    reference: Any,
    levels: list[Any],
    margin: float,
    alpha: float,
) -> pd.DataFrame:
    import pandas as pd

    blocks = {level: set(group[block]) for level, group in first.groupby(factor)}
    groups = dict(list(pairs.groupby(factor)))
    rows = []
    for level in levels:
        some = groups.get(level, pairs[:0])
        left_out = len(blocks[level] ^ blocks[reference])
        rows.append({factor: level, "decision": "", **_row(some, margin, alpha), "left_out": left_out})
    columns = [factor, "decision", *_row(pairs[:0], margin, alpha), "left_out"]
    table = pd.DataFrame(rows, columns=columns)
    _correct(table, alpha)
    table["decision"] = [_decide(row, alpha) for row in table.to_dict("records")]
    return table


def _is_yes_or_no(pairs: pd.DataFrame) -> bool:
    return bool(pairs[["reference", "other"]].stack().dropna().isin((0.0, 1.0)).all())


def _row(pairs: pd.DataFrame, margin: float, alpha: float) -> dict[str, Any]:
    """What one level's pairs say, before any correction for the other levels."""
    moved = pairs.difference.dropna().to_numpy(float)
    n = len(moved)
    one_only = pairs.reference_diverged != pairs.other_diverged
    low, high = bca_interval(moved, alpha)
    equivalent = switches_p if _is_yes_or_no(pairs) else equivalence_p
    far = int((np.abs(moved) > margin).sum())
    return {
        "seeds": n,
        "difference": float(np.sort(moved).mean()) if n else math.nan,
        "low": low,
        "high": high,
        "p_different": sign_flip_p(moved) if n > 1 else math.nan,
        "p_different_holm": math.nan,
        "p_equivalent": equivalent(moved, margin) if n > 1 else math.nan,
        "p_equivalent_holm": math.nan,
        "margin": margin,
        "sd_of_differences": deviation(moved),
        "largest_difference": float(np.abs(moved).max()) if n else math.nan,
        "same_bits": int(pairs.same_bits.sum()),
        "moved": far,
        "moved_at_most": share_at_most(far, n),
        "diverged": int(pairs.other_diverged.sum()),
        "reference_diverged": int(pairs.reference_diverged.sum()),
        "one_diverged": int(one_only.sum()),
        "diverged_apart_at_most": share_at_most(int(one_only.sum()), len(pairs)),
        "p_diverged": sign_test_p(int((one_only & pairs.other_diverged).sum()), int(one_only.sum())),
        "p_diverged_holm": math.nan,
    }


def _correct(table: pd.DataFrame, alpha: float) -> None:
    """Fill in Holm's p, over levels; a test of divergence joins where it could reach alpha at all.

    A sign test on k pairs cannot fall below 2^(1 − k), so the others cannot be false alarms and need
    no correction (Tarone 1990).
    """
    could = [2.0 ** (1 - k) <= alpha for k in table.one_diverged]
    lost = np.where(could, table.p_diverged, math.nan)
    corrected = holm([*table.p_different, *lost])
    table["p_different_holm"] = corrected[: len(table)]
    table["p_diverged_holm"] = np.where(could, corrected[len(table) :], 1.0)
    table["p_equivalent_holm"] = holm(list(table.p_equivalent))


def _decide(row: dict[str, Any], alpha: float) -> str:
    if row["p_diverged_holm"] <= alpha:
        return "different"
    different = row["p_different_holm"] <= alpha
    apart = row["one_diverged"] > 0 and row["diverged_apart_at_most"] > DIVERGED_APART
    equivalent = row["p_equivalent_holm"] <= alpha and not apart
    if different:
        return "different but negligible" if equivalent else "different"
    return "equivalent" if equivalent else "inconclusive"


# --- how many seeds ----------------------------------------------------------------------------------


def seeds_needed(
    frame: pd.DataFrame | None = None,
    metric: str = "final_loss",
    factor: str = "setting",
    block: str = "seed",
    margin: str | float = "0.25sd",
    alpha: float = 0.05,
    reference: Any = None,
    power: float | Sequence[float] = (0.8, 0.9),
    sd: float | None = None,
    between_seeds: float | None = None,
) -> pd.DataFrame:
    """How many seeds a paired comparison needs, for each level of `frame` or for a given `sd`.

    `sd` is the standard deviation of the paired differences, and `between_seeds` that between seeds,
    which a margin in sd needs; both are measured where a frame is given (its options are `verdict`'s).
    Returns a row per level and power: `to_detect` a difference of the size of the margin, `to_exclude`
    one (conclude equivalence where there is none), and `seeds`, the larger. Infinite where 100,000
    seeds are not enough. For one comparison with normal differences; two humps and Holm's correction
    need more. t tests (statsmodels' `TTestPower`), and no fewer seeds than the sign-flip test needs.

    >>> seeds_needed(sd=1.0, margin=1.0, power=0.8)[["to_detect", "to_exclude"]].iloc[0].tolist()
    [10.0, 11.0]
    """
    import pandas as pd

    _check_alpha(alpha)
    powers = [float(wanted) for wanted in np.atleast_1d(power)]
    if not all(alpha < wanted < 1 for wanted in powers):
        raise UsageError(f"power {power!r}: expected numbers between alpha ({alpha}) and 1, such as 0.8")
    heavy = 3.0
    if frame is not None:
        if sd is not None or between_seeds is not None:
            raise UsageError("give a frame, or sd and between_seeds; not both")
        seen = verdict(frame, metric, factor, block, margin, alpha, reference)
        base = seen.runs[(seen.runs[factor] == seen.reference) & (seen.runs.status != "diverged")]
        heavy, between_seeds = heaviness(base[metric].to_numpy(float)), seen.between_seeds
        levels = [{factor: row[factor], "sd": row.sd_of_differences} for _, row in seen.table.iterrows()]
    elif sd is None or not 0 <= sd < math.inf:
        raise UsageError(f"sd {sd!r}: give the standard deviation of paired differences, or a frame of runs")
    else:
        levels = [{"sd": float(sd)}]
    sizes = _sizes(margin, between_seeds, heavy)
    rows = [
        {
            **level,
            "margin": margin,
            "power": wanted,
            "to_detect": _to_detect(level["sd"], sizes, alpha, wanted),
            "to_exclude": _to_exclude(level["sd"], sizes, alpha, wanted),
        }
        for level in levels
        for wanted in powers
    ]
    table = pd.DataFrame(rows)
    return table.assign(seeds=table[["to_detect", "to_exclude"]].max(axis=1, skipna=False)) if rows else table


def _sizes(margin: str | float, between_seeds: float | None, heavy: float) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of seeds, and the margin that a verdict from so many would use."""
    seeds = np.unique(np.round(np.concatenate([np.arange(2, 201), np.geomspace(200, MOST_SEEDS, 800)]))).astype(int)
    share = _share(margin)
    if share is None:
        return seeds, np.full(len(seeds), _margin(margin))
    if between_seeds is None or not between_seeds >= 0:
        raise UsageError(f"margin {margin!r} needs the standard deviation between seeds: between_seeds=…, or 2 seeds")
    return seeds, share * between_seeds * shrink(seeds, heavy)


def _to_detect(sd: float, sizes: tuple[np.ndarray, np.ndarray], alpha: float, power: float) -> float:
    from scipy.special import ndtr
    from statsmodels.stats.power import TTestPower

    seeds, margins = sizes
    if math.isnan(sd):
        return math.nan
    possible = 2.0 ** (1 - seeds) <= alpha
    if sd == 0:
        return _first(seeds, possible & (margins > 0))
    effect = margins / sd
    reached = TTestPower().power(effect, seeds, alpha, df=seeds - 1, alternative="two-sided")
    # With the fewest seeds the sign-flip test asks that every one moves the same way.
    all_alike = ndtr(effect) ** seeds
    reached = np.where(2.0 ** (2 - seeds) > alpha, np.minimum(reached, all_alike), reached)
    return _first(seeds, possible & (reached >= power))


def _to_exclude(sd: float, sizes: tuple[np.ndarray, np.ndarray], alpha: float, power: float) -> float:
    from scipy.stats import nct, t

    seeds, margins = sizes
    if math.isnan(sd):
        return math.nan
    if sd == 0:
        return _first(seeds, margins > 0)
    away = np.minimum(margins / sd * np.sqrt(seeds), 30)  # beyond, the power is 1 and the series slow
    reached = np.maximum(0, 2 * nct.sf(t.isf(alpha, seeds - 1), seeds - 1, away) - 1)
    return _first(seeds, reached >= power)


def _first(seeds: np.ndarray, enough: np.ndarray) -> float:
    return float(seeds[enough.argmax()]) if enough.any() else math.inf


def _to_settle(table: pd.DataFrame, margin: str | float, losses: np.ndarray, alpha: float) -> list[float]:
    """Seeds at which an inconclusive level would be settled with a power of 0.8."""
    if len(losses) < 2 or "inconclusive" not in set(table.decision):
        return [math.nan] * len(table)
    sizes = _sizes(margin, deviation(losses), heaviness(losses))
    corrected = alpha / max(1, len(table))
    yes_or_no = bool(np.isin(losses, (0.0, 1.0)).all())
    settled = []
    for row in table.itertuples():
        detect = _to_detect(row.sd_of_differences, sizes, corrected, 0.8)
        if yes_or_no:
            exclude = _to_exclude_switches(row.moved / row.seeds if row.seeds else 0.0, sizes, corrected)
        else:
            exclude = _to_exclude(row.sd_of_differences, sizes, corrected, 0.8)
        settled.append(max(detect, exclude) if row.decision == "inconclusive" else math.nan)
    return settled


def _to_exclude_switches(share: float, sizes: tuple[np.ndarray, np.ndarray], alpha: float) -> float:
    """Seeds at which as large a share of switches as was seen would be shown to be under the margin."""
    from scipy.stats import binom

    seeds, margins = sizes
    return _first(seeds, binom.cdf(np.floor(share * seeds), seeds, np.minimum(margins, 1.0)) <= alpha)


# --- where the variance comes from -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class VarianceComponents(Report):
    """The variance of a metric split by source; `table` has `source`, `variance`, `sd` and `share`.

    `notes` say what could not be separated or was left out; `print` shows both.
    """

    metric: str
    table: pd.DataFrame
    notes: tuple[str, ...]

    def __getitem__(self, source: str) -> float:
        """The variance from one source; `UsageError` for one that was not estimated."""
        found = self.table.set_index("source").variance
        if source not in found:
            raise UsageError(f"no component {source!r}; there are {', '.join(found.index)}")
        return float(found[source])

    def __str__(self) -> str:
        lines = [f"Variance of {self.metric}:"]
        for row in self.table.itertuples():
            lines.append(f"  {row.source:<24} sd {row.sd:9.2e}   {row.share:8.3%} of the variance")
        return "\n".join([*lines, *self.notes])

    def html(self) -> str:
        """The table and the notes."""
        return html_table(self.table) + paragraphs(self.notes)


def variance_components(
    frame: pd.DataFrame, metric: str = "final_loss", factor: str = "setting", block: str = "seed"
) -> VarianceComponents:
    """Split the variance of a metric into seed, setting, their interaction and rerun.

    Random-effects analysis of variance in closed form, on the means of cells (unweighted means: Searle,
    Casella and McCulloch 1992, ch. 4), on the seeds that finished under every setting. The reruns may
    be of some cells only. Without any, interaction and rerun cannot be told apart and are one
    component. Estimates below zero are shown as zero. Raises `UsageError` for fewer than two levels
    or fewer than two complete seeds.

    >>> import pandas as pd
    >>> rows = [(seed, setting, 10.0 * seed) for seed in range(3) for setting in ("cpu", "cuda")]
    >>> frame = pd.DataFrame(rows, columns=["seed", "setting", "final_loss"])
    >>> variance_components(frame)["seed"]
    100.0
    """
    import pandas as pd

    _check_columns(frame, metric, factor, block)
    check_one_protocol(frame, besides=factor)
    finished = _prepared(frame, metric)
    finished = finished[finished.status != "diverged"]
    cells = finished.groupby([factor, block], observed=True)[metric].agg(["mean", "var", "size"])
    means = cells["mean"].unstack(factor)
    whole = means.dropna()
    n, k = whole.shape
    if n < 2 or k < 2:
        raise UsageError(f"{n} {block}(s) finished under all of {k} {factor}(s); at least 2 of each are needed")
    values = whole.to_numpy(float)
    grand = values.mean()
    rows, columns = values.mean(axis=1), values.mean(axis=0)
    between_rows = k * ((rows - grand) ** 2).sum() / (n - 1)
    between_columns = n * ((columns - grand) ** 2).sum() / (k - 1)
    left = ((values - rows[:, None] - columns + grand) ** 2).sum() / ((n - 1) * (k - 1))
    used = cells[cells.index.get_level_values(block).isin(whole.index)]
    repeated = used[used["size"] > 1]
    notes = []
    if dropped := len(means) - n:
        notes.append(f"{dropped} {block}(s) did not finish under every {factor} and were left out.")
    estimates = {block: (between_rows - left) / k, factor: (between_columns - left) / n}
    if len(repeated):
        freedom = repeated["size"] - 1
        rerun = float((repeated["var"] * freedom).sum() / freedom.sum())
        estimates[f"{block} × {factor}"] = left - rerun * float((1 / used["size"]).mean())
        estimates["rerun"] = rerun
        notes.append(f"Reruns: {int(freedom.sum())} in {len(repeated)} of {n * k} cells.")
    else:
        estimates[f"{block} × {factor}, rerun"] = left
        notes.append(f"Nothing was run twice, so {block} × {factor} and rerun cannot be told apart.")
    kept = {source: max(0.0, float(variance)) for source, variance in estimates.items()}
    total = sum(kept.values())
    table = pd.DataFrame({"source": list(kept), "variance": list(kept.values())})
    table["sd"] = np.sqrt(table.variance)
    table["share"] = table.variance / total if total else math.nan
    return VarianceComponents(metric, table, tuple(notes))


# --- words -------------------------------------------------------------------------------------------


def _sentence(seen: Verdict, row: dict[str, Any]) -> str:
    """One level's decision, and what follows from its numbers."""
    n = row["seeds"]
    head = f"{row[seen.factor]} against {seen.reference}, {_count(n, seen.block)}: {row['decision']}"
    if n < 2:
        return f"{head}; {_too_few(seen, row)}{_left_out(seen, row)}"
    within = f" within ±{row['margin']:.2g}{_in_words(seen)}"
    if row["decision"] in ("equivalent", "different but negligible"):
        head += within
    parts = [f"{head}; difference {_estimate(row)}, p = {_p(row['p_different_holm'])}"]
    if row["decision"] != "different":
        parts[0] += f"; equivalence p = {_p(row['p_equivalent_holm'])}"
    if row["decision"] == "inconclusive":
        parts.append(_unsettled(seen, row, within))
    if row["diverged"] or row["reference_diverged"]:
        parts.append(
            f"Diverged: {row['diverged']}, under {seen.reference} {row['reference_diverged']} "
            f"(p = {_p(row['p_diverged'])})"
        )
    if row["decision"] in ("equivalent", "inconclusive"):
        parts.append(_unseen(seen, row))
    return ". ".join(parts) + "." + _left_out(seen, row)


def _count(n: int, block: str) -> str:
    return f"{n} {block}" if n == 1 else f"{n} {block}s"


def _p(value: float) -> str:
    if math.isnan(value):
        return "unknown"
    return f"{value:.2g}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _estimate(row: dict[str, Any]) -> str:
    interval = "" if math.isnan(row["low"]) else f" [{row['low']:.2g}, {row['high']:.2g}]"
    return f"{row['difference']:.2g}{interval}"


def _in_words(seen: Verdict) -> str:
    share = _share(seen.margin)
    return "" if share is None else f" ({share:g} sd between {seen.block}s, at that sd's lower 97.5 % limit)"


def _too_few(seen: Verdict, row: dict[str, Any]) -> str:
    if row["diverged"] or row["reference_diverged"]:
        return (
            f"too few {seen.block}s finished under both (diverged: {row['diverged']}, under {seen.reference} "
            f"{row['reference_diverged']}; p = {_p(row['p_diverged'])})."
        )
    return f"one {seen.block} is no evidence." if row["seeds"] else f"they have no {seen.block} in common."


def _unsettled(seen: Verdict, row: dict[str, Any], within: str) -> str:
    words = f"Neither a difference nor equivalence{within} is shown"
    fewest = math.ceil(1 + math.log2(1 / seen.alpha))
    if row["seeds"] < fewest:
        words += f"; {row['seeds']} {seen.block}s cannot show a difference at alpha {seen.alpha:g}, {fewest} can"
    needed = row["seeds_needed"]
    if row["one_diverged"] and row["diverged_apart_at_most"] > DIVERGED_APART:
        return words + (
            f"; on up to {row['diverged_apart_at_most']:.0%} of {seen.block}s one of the two could diverge alone"
        )
    if math.isfinite(needed):
        return words + f"; about {max(needed, row['seeds'] + 1):.0f} {seen.block}s would settle it (power 0.8)"
    return words + f"; no number of {seen.block}s up to {MOST_SEEDS:,} would settle it"


def _unseen(seen: Verdict, row: dict[str, Any]) -> str:
    """What cannot be excluded: a level that makes few seeds jump."""
    return (
        f"{row['moved']} of {_count(row['seeds'], seen.block)} moved by more than the margin; up to "
        f"{row['moved_at_most']:.0%} of {seen.block}s could (95 % limit)"
    )


def _left_out(seen: Verdict, row: dict[str, Any]) -> str:
    if not row["left_out"]:
        return ""
    return f" Left out: {_count(row['left_out'], seen.block)} that only one of the two has."


def _spread_sentence(seen: Verdict) -> str:
    if math.isnan(seen.between_seeds):
        return f"The spread between {seen.block}s under {seen.reference} is unknown: fewer than two finished."
    words = f"The standard deviation between {seen.block}s under {seen.reference} is {seen.between_seeds:.2e}"
    if not len(seen.table) or math.isnan(seen.ratio):
        return words + "."
    return words + (
        f"; the largest change that another {seen.factor} made to a {seen.block} is {seen.largest:.2e}, "
        f"{seen.ratio:.2g} of it."
    )


def _rerun_sentence(seen: Verdict) -> list[str]:
    if not len(seen.reruns):
        return []
    same = int(seen.reruns.groupby(seen.block).same_bits.all().sum())
    return [
        f"{seen.reference} run again changed a {seen.block} by up to {seen.reruns.difference.abs().max():.2e}; "
        f"{same} of {_count(seen.reruns[seen.block].nunique(), seen.block)} gave the same bits twice."
    ]


def _diverged_sentence(seen: Verdict) -> str:
    lost = seen.runs[seen.runs.status == "diverged"].groupby(seen.factor).size()
    where = ", ".join(f"{level} {count}" for level, count in lost.items())
    return f"Diverged runs: {len(seen.runs[seen.runs.status == 'diverged'])}{f' ({where})' if where else ''}."
