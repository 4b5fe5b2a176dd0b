"""The verdict on a table of runs: does a factor change a metric?

`verdict` pairs runs by seed (`_pairs`), decides on each level (`_decisions`, with the tests in
`_inference`) and returns a `Verdict`, which describes the result in words (`_wording`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

import gpulab.stats._inference as inference
from gpulab.errors import UsageError, check_count
from gpulab.stats._decisions import DECISION_COLUMNS, compare_levels
from gpulab.stats._margins import DEFAULT_BINARY_MARGIN, DEFAULT_MARGIN
from gpulab.stats._page import VerdictPage
from gpulab.stats._pairs import pair_runs
from gpulab.stats._selection import RowChoice
from gpulab.stats._wording import describe_with_numbers, level_sentences
from gpulab.wording import Level, TextByLevel

if TYPE_CHECKING:
    from gpulab.picture import Picture

MAX_LOOKS = 1_000_000  # the largest `looks` that `verdict` accepts


@dataclass(frozen=True, eq=False)
class Verdict(VerdictPage):
    """The result of `verdict`: each level of a factor compared with a reference on the same seeds.

    `print(verdict)` describes the result in sentences, and `verdict.plot()` draws it. A notebook
    shows both, and `verdict.save(file)` writes both to an HTML page.

    Attributes:
        metric: The name of the metric that was compared.
        factor: The name of the column whose levels were compared.
        block: The name of the column by which runs were paired, usually `seed`.
        reference: The level that the others were compared with.
        margin: The largest negligible difference, as it was passed to `verdict`.
        alpha: The level of significance.
        rows: The decision on each other level, as a `LevelDecision`.
        table: The decisions as a data frame with a row for each level; its columns are below.
        pairs: A data frame with a row for each level and each seed that it shares with the
            reference. `difference` is the level's metric minus the reference's; it is NaN if one of
            the two runs diverged.
        reruns: The same for reruns of the reference, as a control: their differences are due to
            chance alone.
        runs: The rows of the frame that were compared.
        notes: Sentences about rows that were chosen, left out or averaged, and about the files that
            `read_table` read.
        source: The file or folder that the table was read from; empty if it is not known.
        between_seeds: The standard deviation of the metric over seeds under the reference.
        looks: The number of looks while seeds are added, as it was passed to `verdict`.

    The table has the factor's column and the following ones. There is also a column `p_…_holm` for
    each column `p_…`: the p value after the correction for looks and Holm's correction for several
    tests.

    - `decision`: `different`, `different but negligible`, `equivalent` or `inconclusive`; see
      `verdict`.
    - `seeds`: The number of pairs that finished under both levels.
    - `difference`: The mean over these pairs of the level's metric minus the reference's.
    - `low`, `high`: The ends of the confidence interval of the difference. The interval contains
      zero if and only if `p_different_holm` > alpha. The ends are NaN if there are too few seeds
      for any significant result, which means fewer than six at alpha = 0.05.
    - `confidence`: The confidence level of this interval, 1 − alpha / (k · looks). Here k is the
      number of tests that Holm's method does not reject, at least 1.
    - `p_different`: The p value of the test that the mean difference is zero. NaN for fewer than
      two pairs, and if the weights of all pairs are bitwise equal.
    - `p_equivalent`: The p value of the test that the mean difference is outside ± the margin. NaN
      in the same cases, and if `margin` is NaN.
    - `equivalent_low`, `equivalent_high`: The ends of the interval that belongs to the test of
      equivalence. It lies within ± the margin if and only if `p_equivalent_holm` <= alpha.
    - `equivalent_confidence`: The confidence level of this interval, 1 − 2 alpha / (k · looks),
      where k counts the tests of equivalence.
    - `margin`: The margin in the metric's units. NaN if it was given in standard deviations and the
      reference has the same metric for every seed.
    - `margin_relative`: The margin divided by the absolute mean of the pairs under the reference.
    - `largest_difference`: The largest absolute difference.
    - `same_bits`: The number of pairs that ended with identical weights.
    - `beyond_margin`: The number of pairs whose absolute difference exceeds the margin.
    - `diverged`, `reference_diverged`, `discordant_diverged`: The number of pairs that diverged
      under the level, under the reference, and under only one of the two.
    - `discordant_diverged_upper`: The upper 95 % confidence limit of the share of seeds that
      diverge under only one of the two.
    - `p_diverged`: The p value of the test that runs diverge equally often under both.
    - `unpaired`: The number of runs without a partner of the same seed.
    - `seeds_needed`: The approximate number of seeds for a power of 80 %, both to establish
      equivalence if the true difference is zero and to detect a difference as large as the margin.
      It assumes normal differences, and a test at alpha divided by the number of levels and by the
      number of looks. If the decision is inconclusive, it is larger than the present number of
      seeds. It is infinite if 100,000 seeds are not enough, and NaN for fewer than two pairs.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> losses = [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]
        >>> cpu = pd.DataFrame({"setting": "cpu", "seed": range(6), "final_loss": losses})
        >>> found = gl.verdict(
        ...     pd.concat([cpu, cpu.assign(setting="cuda", final_loss=cpu.final_loss + 0.1)])
        ... )
        >>> found.table[["decision", "seeds", "difference"]].round(3).values.tolist()
        [['different', 6, 0.1]]
    """

    def __str__(self) -> str:
        return describe_with_numbers(self)

    def sentences(self, words: TextByLevel | None = None) -> list[str]:
        """Summarise the levels in one or two sentences for each decision, differences first.

        Args:
            words: Names for levels and for the metric, such as `{"cuda": "the GPU", "final_loss":
                "loss"}`. A level or metric that is missing here keeps its own name.

        Returns:
            The sentences.
        """
        return level_sentences(self, words)

    def picture(self) -> Picture | None:
        """Draw every run and every difference; None if there is nothing to compare."""
        return self.plot() if self.rows else None


def verdict(
    frame: pd.DataFrame,
    metric: str = "final_loss",
    factor: str = "setting",
    block: str = "seed",
    margin: str | float | None = None,
    alpha: float = 0.05,
    reference: Level | None = None,
    looks: int = 1,
    *,
    last: str | None = None,
    best: str | None = None,
    mode: str | None = None,
) -> Verdict:
    """Decide for each level of a factor whether it changes a metric, using the same seeds.

    Each level is compared with a reference, seed by seed. It gets one of four decisions:

    - `different`: The mean difference over seeds is significantly different from zero.
    - `equivalent`: The mean difference is shown to be within ± the margin.
    - `different but negligible`: Both of these hold.
    - `inconclusive`: Neither holds. This is always the decision for fewer than two shared seeds.

    The metric is compared on the seeds that finished under both levels. How often runs diverge is
    compared on all shared seeds, and a significant difference makes the decision `different`. A
    level is not called `equivalent` if seeds diverged under only one of the two levels and the
    one-sided 95 % confidence limit of the share of such seeds is above 0.1. If all weights are
    bitwise equal for every seed, the decision is `equivalent` without a test.

    Holm's method corrects for the number of levels: the probability that any level is wrongly
    called `different` is at most `alpha`, and likewise for `equivalent`. So compare all levels in
    one call. The correction does not cover repeated calls as more seeds are run; for that, set
    `looks`.

    Args:
        frame: A data frame with a row for each run, as from `gpulab.runs` or
            `gpulab.stats.read_table`. Rows with `rerun` above 0 are a control; without this column,
            all rows are first runs. Runs whose `status` is neither `finished` nor `diverged` are
            left out with a note. Without a column `status`, a run counts as diverged if its metric
            is infinite, or if it is NaN in a table that distinguishes NaN from empty cells, as
            those of `read_table` do. A run whose metric is an empty cell is left out. In a float64
            column, such as those of `pandas.read_csv`, NaN counts as an empty cell; a note says so.
        metric: A column of numbers or booleans.
        factor: The column whose levels are compared.
        block: The column by which runs are paired, usually the seed.
        margin: The largest negligible difference. A number is in the metric's units. A string such
            as `"0.25sd"` (the default) is in standard deviations between seeds under the reference,
            and one such as `"1%"` is a share of the mean under the reference. For booleans the
            margin is a share of the seeds, by default 0.1.
        alpha: The level of significance, between 0 and 0.5.
        reference: The level that the others are compared with. By default `cpu`, or the first level
            in the frame if there is no `cpu`.
        looks: The largest number of times that the verdict is computed while more seeds are run,
            including this time. With 4, each look is tested at alpha / 4, so that the error of all
            four together is `alpha`. Count every look whose result could decide whether more seeds
            are run, and use the same `looks` each time. The times of the looks need not be planned.
            If earlier results decide when to look again, the error can be slightly larger. For
            example, with four looks at alpha = 5 % it is at most 5.6 % if the last look has 16
            times as many seeds as the first, and 5.0 % if it has 8 times as many. Confidence limits
            of shares, such as the share of seeds that differ by more than the margin, are not
            corrected for several looks.
        last: For a table with a row for each epoch or step: the column that counts them, such as
            `epoch`. For each run, the last row that has the metric, or shows that the run diverged,
            is compared. Such a table is rejected without `last` or `best`.
        best: Instead of `last`, a column such as `val_loss`. For each run, the row with the best
            value is compared; if this row has no metric, the last row of the same epoch.
        mode: Whether the lowest (`min`) or the highest (`max`) value of `best` is the best. By
            default it is inferred from the name, such as `val_loss` or `accuracy`.

    Returns:
        The `Verdict`, which prints as sentences; its `table` has all the numbers.

    Raises:
        UsageError: If the frame is not a table of runs or lacks a column; if `margin`, `alpha` or
            `looks` is out of range, or the reference is unknown; if runs have different learning
            tasks or lengths; if a finished run has no finite metric; if first runs of the same seed
            and level differ in columns that are not numeric; if there are several epochs or steps
            without `last` or `best`; or if the seeds of different levels are written in different
            ways, such as text and numbers.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> losses = [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]
        >>> cpu = pd.DataFrame({"setting": "cpu", "seed": range(6), "final_loss": losses})
        >>> cuda = cpu.assign(setting="cuda", final_loss=cpu.final_loss + 0.1)
        >>> gl.verdict(pd.concat([cpu, cuda])).decision
        'different'
        >>> found = gl.verdict(pd.concat([cpu, cuda]), looks=4)
        >>> found.decision  # six seeds are too few for the correction for four looks
        'inconclusive'

        If a table has a row for each epoch, the last or the best row of each run is compared:

        >>> epochs = pd.concat([pd.concat([cpu, cuda]).assign(epoch=epoch) for epoch in range(3)])
        >>> print(gl.verdict(epochs, last="epoch").notes[0])
        From 36 rows, the last epoch with final_loss was taken for each setting and seed: epoch 2.

    References:
        The difference is tested by sign flips (Fisher 1935, *The design of experiments*). If
        differences are skewed, a t test that is corrected for skewness is used as well (Johnson
        1978, *Modified t tests and confidence intervals for asymmetrical populations*, Journal of
        the American Statistical Association 73:536). Equivalence is tested by two one-sided tests
        (Schuirmann 1987, *A comparison of the two one-sided tests procedure and the power approach
        for assessing the equivalence of average bioavailability*, Journal of Pharmacokinetics and
        Biopharmaceutics 15:657). Booleans, and how often runs diverge, are tested by McNemar's test
        (1947, *Note on the sampling error of the difference between correlated proportions or
        percentages*, Psychometrika 12:153). Equivalence of booleans is tested by an exact test of
        the share of discordant pairs (Clopper, Pearson 1934, *The use of confidence or fiducial
        limits illustrated in the case of the binomial*, Biometrika 26:404). Multiple tests are
        corrected by Holm's method (1979, *A simple sequentially rejective multiple test procedure*,
        Scandinavian Journal of Statistics 6:65). Repeated looks increase the error of a test
        (Armitage, McPherson, Rowe 1969, *Repeated significance tests on accumulating data*, Journal
        of the Royal Statistical Society A 132:235). Bonferroni's inequality bounds this error for
        any test and for looks at any times. The larger error that results if earlier results decide
        when to look again follows Proschan, Hunsberger 1995, *Designed extension of studies based
        on conditional power* (Biometrics 51:1315).
    """
    if not (isinstance(alpha, (int, float, np.number)) and 0 < alpha < 0.5):
        raise UsageError(f"alpha {alpha!r}: expected a number between 0 and 0.5, such as 0.05")
    check_count("looks", looks, MAX_LOOKS)
    if factor in DECISION_COLUMNS:
        raise UsageError(
            f"factor {factor!r} is also a column of the verdict's own table; rename it"
        )
    paired = pair_runs(frame, metric, factor, block, reference, RowChoice(last, best, mode))
    if margin is None:
        margin = DEFAULT_BINARY_MARGIN if paired.is_binary() else DEFAULT_MARGIN
    return Verdict(
        **vars(paired),
        margin=margin,
        alpha=alpha,
        rows=compare_levels(paired, margin, alpha, int(looks)),
        between_seeds=inference.sample_sd(paired.reference_losses()),
        looks=int(looks),
    )
