"""What networks have learned, and whether a factor changes it.

Networks are compared with predictions that need no learning, or no learning of motion; `films`
computes the losses of these predictions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pandas as pd

from companion.films import Film, films_of_runs
from companion.metrics import ALL, BEAT, FAMILY, LEARNED, STUCK
from gpulab.report import Progress
from gpulab.stats import Verdict, verdict
from gpulab.stats._decisions import decide
from gpulab.stats._inference import holm
from gpulab.store import recorded_runs
from gpulab.store._tables import runs
from gpulab.store.recorded import recorded_folder
from gpulab.wording import condition_words

ALPHA = 0.05
COLUMNS = (
    "speed",
    "metric",
    "seeds",
    "decision",
    "difference",
    "low",
    "high",
    "relative",
    "margin",
    "p",
    "p_holm",
    "uncorrected",
    "registered",
    "margin_relative",
    "registered_margin",
    "same_bits",
    "worse",
    "beat",
    "beat_reference",
)


def learning_verdicts(
    frame: pd.DataFrame, factor: str, reference: str, plateau: float, repeat: float = math.nan
) -> dict[str, Verdict]:
    """Return a verdict for each applicable metric of what runs of one size and film learned.

    A run did not learn if it diverged or if its final loss is not below the `plateau`. `repeat` is
    the loss of repeating the last frame. It is NaN, and the plateau infinite, if there is none.
    """
    stuck = ~(frame.final_loss < plateau)
    learned = frame[~stuck.groupby(frame.seed).transform("any")]
    compare = functools.partial(verdict, factor=factor, reference=reference)
    shares = frame.assign(beat=frame.final_loss < repeat, stuck=stuck, status="finished")
    verdicts = {BEAT: compare(shares, metric="beat")} if not math.isnan(repeat) else {}
    verdicts[ALL] = compare(frame)
    if plateau < math.inf:
        verdicts[STUCK] = compare(shares, metric="stuck")
        if len(learned):
            verdicts[LEARNED] = compare(learned)
    return verdicts


def learning_table(frame: pd.DataFrame, factor: str, reference: str) -> pd.DataFrame:
    """Apply `learning_verdicts` to each experiment, size, setting, loader and speed in a table.

    The metrics and speeds of one experiment, size, setting and loader form a family, within which
    Holm's correction is applied to the p values of differences and, separately, to those of
    equivalence. There is a row for each comparison, with these columns: `metric`, `seeds`,
    `decision` after the correction, `difference` (level minus reference) with its interval `low`,
    `high`; `margin`; both divided by the reference's mean (`relative`, `margin_relative`); `p`,
    `p_holm`; `uncorrected`, the decision without the correction; `registered`, the decision for the
    margin as registered, which is a quarter of the sample's standard deviation without a cautious
    estimate (`registered_margin`); `worse` (seeds whose metric is higher), `same_bits` (seeds whose
    trained weights are identical), `beat` and `beat_reference` (runs that beat repeating the last
    frame: all of them, and those of the reference); `reference`; `condition`, whether frames were
    copied or overwritten.
    """
    rows, fixed_columns = [], [name for name in FAMILY if name != factor]
    groups = list(frame.groupby([*fixed_columns, "data", "speed"], dropna=False))
    for key, film_runs in Progress(groups, unit="verdict", leave=False):
        common = dict(zip([*fixed_columns, "data", "speed"], key, strict=True))
        repeat, plateau = repeat_losses(film_runs).iloc[0], missing_colour_losses(film_runs).iloc[0]
        beats_repeating = film_runs.final_loss < repeat
        common |= {
            "beat": int(beats_repeating.sum()),
            "beat_reference": int(beats_repeating[film_runs[factor] == reference].sum()),
        }
        for metric, judged in learning_verdicts(
            film_runs, factor, reference, plateau, repeat
        ).items():
            rows += [{**common, "metric": metric, **level} for level in _levels(judged)]
    table = pd.DataFrame(rows)
    family_size = table.groupby([*FAMILY], dropna=False).seeds.transform("size")
    table["p_diverged_holm"] = (table.p_diverged * family_size).clip(upper=1.0)
    table = corrected(table, [*FAMILY])[[*FAMILY, *COLUMNS]]
    return table.assign(reference=reference, condition=conditions(table))


def corrected(table: pd.DataFrame, family: list[str]) -> pd.DataFrame:
    """Apply Holm's correction to the levels of verdicts in each family, and decide again."""
    families = table.groupby(family, dropna=False)
    holm_of = {
        f"p_{name}_holm": families[f"p_{name}"].transform(holm)
        for name in ("different", "equivalent")
    }
    table = table.assign(**holm_of)
    table["decision"] = [decide(row, ALPHA) for row in table.itertuples()]
    return table.rename(columns={"p_different": "p", "p_different_holm": "p_holm"})


def _levels(judged: Verdict) -> list[dict[str, object]]:
    """Return the levels of a verdict, with a decision that ignores the uncertainty of the sd."""
    table = judged.table.rename(columns={"decision": "uncorrected"}).assign(
        registered=judged.table.decision
    )
    table["registered_margin"] = table.margin
    if isinstance(judged.margin, str) and judged.between_seeds > 0:
        margin = float(judged.margin.removesuffix("sd")) * judged.between_seeds
        registered_verdict = verdict(
            judged.runs, judged.metric, judged.factor, margin=margin, reference=judged.reference
        )
        table = table.assign(registered=registered_verdict.table.decision, registered_margin=margin)
    pairs = judged.pairs.groupby(judged.factor)
    of_level = table[judged.factor]
    table["worse"] = of_level.map(
        pairs.difference.agg(lambda differences: int((differences > 0).sum()))
    )
    reference_means = of_level.map(pairs.reference.mean())
    table["relative"] = (table.difference / reference_means.where(reference_means != 0)).fillna(0.0)
    return table.to_dict("records")


def false_alarms(families: int) -> str:
    """Return the probability that at least one of several corrected families of tests errs."""
    independent, most = 1 - (1 - ALPHA) ** families, min(1.0, families * ALPHA)
    return (
        f"{families} families of tests at alpha {ALPHA:.0%}. If nothing differed anywhere, at least"
        f" one of them would still report a\ndifference with a probability of {independent:.0%} if"
        f" they are independent, and of at most {most:.0%} in any case."
    ).replace("%", " %")


def repeat_losses(frame: pd.DataFrame) -> pd.Series:
    """Return for each run the loss of repeating the last frame, on the frames of `final_loss`.

    The losses are mean squared errors of frames in [0, 1]; NaN for runs without a rendered film.
    """
    return _film_losses(frame, Film.repeat_loss)


def blurred_losses(frame: pd.DataFrame) -> pd.Series:
    """Return for each run the loss of repeating the last frame with the best blur."""
    return _film_losses(frame, Film.blurred_loss)


def missing_colour_losses(frame: pd.DataFrame) -> pd.Series:
    """Return for each run the lowest loss with a dead colour; infinite without a rendered film."""
    return _film_losses(frame, Film.missing_colour_loss).fillna(math.inf)


def motion_finding(frame: pd.DataFrame) -> str:
    """Say in a sentence how many of these runs beat repeating the last frame.

    >>> from gpulab.store import recorded_runs
    >>> print(motion_finding(recorded_runs().query("experiment == 'autoencoder'")))
    None of these runs predicts frames of a rendered film.
    """
    repeating = repeat_losses(frame)
    beat_repeating, beat_blurred = (
        int((frame.final_loss < limit).sum()) for limit in (repeating, blurred_losses(frame))
    )
    if not (run_count := int(repeating.notna().sum())):
        return "None of these runs predicts frames of a rendered film."
    if run_count == 1:
        if not beat_repeating:
            return "The network does not beat repeating the last frame: it has not learned motion."
        blurred = "and" if beat_blurred else "but not"
        return f"The network beats repeating the last frame, {blurred} repeating it blurred."
    if not beat_repeating:
        return (
            f"None of {run_count} networks beats repeating the last frame: none has learned motion."
        )
    return (
        f"{beat_repeating} of {run_count} networks beat repeating the last frame, {beat_blurred} of"
        f" {run_count} beat repeating it blurred."
    )


def variation_title(losses: pd.DataFrame) -> str:
    """Say how many times a loss varies between seeds, and between settings of one seed.

    Between seeds, the means over the settings are compared.

    Args:
        losses: A row for each seed and a column for each setting.

    >>> print(variation_title(pd.DataFrame({"CPU": [1.0, 4.0], "GPU": [1.0, 4.4]})))
    The mean loss of a run varies 4.2-fold between seeds, 1.10-fold between settings
    """
    seeds = losses.mean(axis="columns")
    settings = losses.max(axis="columns") / losses.min(axis="columns")
    return (
        f"The mean loss of a run varies {seeds.max() / seeds.min():.1f}-fold between seeds,"
        f" {settings.max():.2f}-fold between settings"
    )


def median_moves_title(moved: pd.Series) -> str:
    """Say by how much less than half of the seeds move, for each level.

    Args:
        moved: How far each seed's loss moves; the index holds the levels.

    >>> print(median_moves_title(pd.Series([1e-5, 3e-5, 4e-5], ["CPU", "CPU", "GPU, again"])))
    Half of the seeds move by less than 2e-05 (CPU) and 4e-05 (GPU, again)
    """
    medians = moved.groupby(level=0, sort=False).median()
    clauses = [f"{median:.2g} ({level})" for level, median in medians.items()]
    return f"Half of the seeds move by less than {' and '.join(clauses)}"


def conditions(frame: pd.DataFrame) -> pd.Series:
    """Return the condition of each run in words: copied or overwritten frames.

    >>> from gpulab.store import recorded_runs
    >>> sorted(set(conditions(recorded_runs())))
    ['copied frames', 'overwritten frames']
    """
    words = [condition_words(*run) for run in zip(frame.loader, frame.setting, strict=True)]
    return pd.Series(words, frame.index, dtype=object)


def atlas() -> pd.DataFrame:
    """Return the runs shipped with gpulab and those in `data/atlas`, as `gpulab.runs` does."""
    contributed = runs(recorded_folder("atlas")).assign(recorded=True)
    return pd.concat([recorded_runs(), contributed], ignore_index=True).drop_duplicates("id")


def title_runs() -> pd.DataFrame:
    """Return recorded runs at the published size on CPUs of one kind and on a GPU.

    They answer the question in the title. Repeated runs have a separate setting, such as
    `cuda:tf32=off again`, so that they can be compared with the first runs. `gradients` is None if
    autograd computed them. PredNet's seeds from 27 on were run on a CPU under the registration that
    `registered` names.
    """
    frame = pd.concat(
        [recorded_runs("title"), recorded_runs("stuck").query("device == 'cpu'")], ignore_index=True
    )
    return frame.assign(setting=frame.setting + frame["rerun"].map({0: "", 1: " again"}), rerun=0)


def _film_losses(frame: pd.DataFrame, film_loss: Callable[[Film], float]) -> pd.Series:
    """Return for each run a loss of its film; NaN for runs without a rendered film."""
    losses = [math.nan if film is None else film_loss(film) for film in films_of_runs(frame)]
    return pd.Series(losses, frame.index, dtype=float)
