"""The verdict on a table of runs: does a factor change a metric?

`verdict` pairs runs by seed (`_pairs`), decides on each level (`_decisions`, with the tests in
`_inference`) and returns a `Verdict`, which says the result in words (`_wording`).
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

MAX_LOOKS = 1_000_000


@dataclass(frozen=True, eq=False)
class Verdict(VerdictPage):
    """The result of `verdict`: each level of a factor compared with a reference on the same seeds.

    `print(verdict)` says it in sentences, `verdict.plot()` draws it, a notebook shows both, and
    `verdict.save(file)` writes both to an HTML page.

    Attributes:
        metric: The name of the metric that was compared.
        factor: The name of the column whose levels were compared.
        block: The name of the column of what they were compared on, usually `seed`.
        reference: The level that the others were compared with.
        margin: The largest difference without importance, as it was asked for.
        alpha: The level of significance.
        rows: The decision on each other level, as a `LevelDecision`.
        table: The same as a data frame with a row for each other level; its columns are below.
        pairs: A data frame with a row for each level and seed that both have. `difference` is the
            level's metric minus the reference's, and NaN where one of the two diverged.
        reruns: The same for the reference run again, as a control: what chance alone changes.
        runs: The rows of the frame that were compared.
        notes: Sentences on rows that were chosen, left out or averaged, and on where `read_table`
            found what it read.
        source: The file or folder that the table was read from; empty where that is not known.
        between_seeds: The standard deviation of the metric over seeds under the reference.
        looks: How often the question may be asked as runs come in.

    The table has these columns, after the one of the level. Each `p_…` has a counterpart,
    `p_…_holm`, after the correction for looks and Holm's correction for several tests.

    - `decision`: `different`, `different but negligible`, `equivalent` or `inconclusive`; see
      `verdict`.
    - `seeds`: How many pairs finished under both levels.
    - `difference`: The level's metric minus the reference's, the mean over these seeds.
    - `low`, `high`: The ends of the confidence interval of the difference. It holds zero exactly
      where `p_different_holm` > alpha. They are NaN where so few seeds could show nothing: below
      six at alpha = 0.05.
    - `confidence`: The level of that interval. It is 1 − alpha, and with several tests 1 − alpha /
      k, where k is the number of tests that Holm's correction does not reject; with several looks,
      1 minus that level at each look.
    - `p_different`: The p value of the test that the mean difference is zero; NaN for fewer than
      two pairs, and where all pairs have the same bits.
    - `p_equivalent`: The p value of the test that the mean difference is outside ± the margin; NaN
      likewise, and where the margin is.
    - `equivalent_low`, `equivalent_high`: The ends of the interval that belongs to the test of
      equivalence. It lies within ± the margin exactly where `p_equivalent_holm` <= alpha.
    - `equivalent_confidence`: The level of that interval, 1 − 2 alpha / k, where k is counted among
      the tests of equivalence.
    - `margin`: The margin in the metric's units; NaN where it was asked for in standard deviations
      and the seeds do not differ under the reference.
    - `margin_relative`: The margin as a multiple of the pairs' mean under the reference.
    - `largest_difference`: The largest absolute difference.
    - `same_bits`: How many pairs ended with identical weights.
    - `beyond_margin`: How many seeds moved by more than the margin.
    - `diverged`, `reference_diverged`, `discordant_diverged`: How many of the shared seeds diverged
      under the level, under the reference, and under one of the two only.
    - `discordant_diverged_upper`: The share of all seeds that could diverge under one only,
      likewise at 95 %.
    - `p_diverged`: The p value of the test that both diverge equally often.
    - `unpaired`: How many runs have no partner of the same seed.
    - `seeds_needed`: The approximate number of seeds for a power of 80 %, both to establish
      equivalence if the true difference is zero and to detect a difference as large as the margin.
      It assumes normal differences, and a test at alpha divided by the number of levels. If the
      decision is inconclusive, it is larger than the present number of seeds. It is infinite if
      100,000 seeds are not enough, and NaN for fewer than two pairs.

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
        """Summarise the levels in a sentence or two for each decision, effects first.

        Args:
            words: Names for levels and for the metric, such as `{"cuda": "the GPU", "final_loss":
                "loss"}`. Those that are missing keep their own name.

        Returns:
            The sentences.
        """
        return level_sentences(self, words or {})

    def picture(self) -> Picture | None:
        """The figure of every run and every difference; None if there is nothing to compare."""
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

    - `different`: The mean difference over seeds is not zero.
    - `equivalent`: The mean difference is shown to be within ± the margin.
    - `different but negligible`: Both.
    - `inconclusive`: Neither is shown. So it is with one shared seed or none.

    The metric is compared on the seeds that finished under both levels, and how often the levels
    diverge on all that both have. A difference in how often they diverge makes the decision
    `different`. Where seeds diverged under one of the two levels only, and by a one-sided 95 %
    limit more than a tenth of all seeds could, the level is not called `equivalent`. Levels that
    end with the same bits in every weight from every seed are `equivalent` without a test.

    All levels are corrected for their number (Holm): among many candidates against one reference,
    the chance that any is called `different` though it is not, is at most `alpha`, and so it is
    with `equivalent`. To compare them in one call is enough. To compare again and again as seeds
    come in is not: say how often at most with `looks`.

    Args:
        frame: A data frame with a row for each run, as from `gpulab.runs` or
            `gpulab.stats.read_table`. Rows with `rerun` above 0 are a control; without that
            column all are first runs. The column `status` says how a run ended: one that is neither
            `finished` nor `diverged` is left out, and the verdict says so. Without that column a
            run whose metric is infinite counts as diverged, and so does one whose metric is NaN,
            where the table tells NaN from an empty cell, as `read_table` does; an empty cell is a
            missing run, which is left out. In a column of float64, as `pandas.read_csv` makes it,
            NaN counts as an empty cell.
        metric: A column of numbers, or of booleans.
        factor: The column whose levels are compared.
        block: The column of what they are compared on, usually the seed.
        margin: The largest difference without importance, in the metric's units; or as a text in
            standard deviations between seeds under the reference (`"0.25sd"`, the default), or of
            their mean (`"1%"`). For booleans it is a share of the seeds, by default 0.1.
        alpha: The level of significance, between 0 and 0.5.
        reference: The level that the others are compared with; by default `cpu`, or where there is
            none the first in the frame.
        looks: How often this question is asked at most as runs come in, this time included. With 4,
            the decisions of all four looks together have the error `alpha`: each is at alpha / 4.
            Every look counts at which the results could change whether more seeds are run, and each
            is asked with the same `looks`. The times need no plan. If what was seen decides when to
            look again, the error can be a little larger: of four looks 5.6 % at most where alpha is
            5 % and the last look has 16 times as many seeds as the first, 5.0 % where it has 8
            times as many. The limits of shares, such as of seeds that jump, are those of one look.
        last: For a table with a row for each epoch or step: the column that counts them, such as
            `epoch`. The last row of each run is compared that has the metric. Without `last` or
            `best` such a table is refused.
        best: In place of `last`, a column such as `val_loss`: the row of each run at which it is
            best is compared, or where that row has no metric, the last of the same epoch.
        mode: `min` or `max`: whether the lowest or the highest value of `best` is the best. By
            default its name says so, as in `val_loss` and `accuracy`.

    Returns:
        The `Verdict`, which prints as sentences; its `table` has all the numbers.

    Raises:
        UsageError: For what is no table of runs, a missing column, a margin, alpha or looks out of
            range, an unknown reference, runs that learned different things or for different times,
            a finished run without a finite number, first runs of one seed and level that differ in
            more than numbers, rows for several epochs or steps without `last` or `best`, and seeds
            that are text under one level and other numbers under another.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> losses = [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]
        >>> cpu = pd.DataFrame({"setting": "cpu", "seed": range(6), "final_loss": losses})
        >>> cuda = cpu.assign(setting="cuda", final_loss=cpu.final_loss + 0.1)
        >>> gl.verdict(pd.concat([cpu, cuda])).decision
        'different'
        >>> found = gl.verdict(pd.concat([cpu, cuda]), looks=4)
        >>> found.decision  # of four looks, six seeds show nothing
        'inconclusive'

        If a table has a row for each epoch, the last or the best row of each run is compared:

        >>> epochs = pd.concat([pd.concat([cpu, cuda]).assign(epoch=epoch) for epoch in range(3)])
        >>> print(gl.verdict(epochs, last="epoch").notes[0])
        Of 36 rows the last epoch that has final_loss was taken for each setting and seed: epoch 2.

    References:
        The difference is tested by sign flips (Fisher 1935, *The design of experiments*), and where
        differences are skewed also by a t test that is corrected for it (Johnson 1978, *Modified t
        tests and confidence intervals for asymmetrical populations*, Journal of the American
        Statistical Association 73:536). Equivalence is tested by two one-sided tests (Schuirmann
        1987, *A comparison of the two one-sided tests procedure and the power approach for
        assessing the equivalence of average bioavailability*, Journal of Pharmacokinetics and
        Biopharmaceutics 15:657). For booleans, and for how often runs diverge, the test is
        McNemar's (1947, *Note on the sampling error of the difference between correlated
        proportions or percentages*, Psychometrika 12:153), and equivalence is tested by an exact
        test that few seeds switch (Clopper, Pearson 1934, *The use of confidence or fiducial limits
        illustrated in the case of the binomial*, Biometrika 26:404). Several tests are corrected by
        Holm 1979, *A simple sequentially rejective multiple test procedure* (Scandinavian Journal
        of Statistics 6:65). Repeated looks raise the error of a test (Armitage, McPherson, Rowe
        1969, *Repeated significance tests on accumulating data*, Journal of the Royal Statistical
        Society A 132:235); Bonferroni's inequality bounds it for any test and any times. How far
        what was seen can raise it by the choice of times follows Proschan, Hunsberger 1995,
        *Designed extension of studies based on conditional power* (Biometrics 51:1315).
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
