"""What has a network learned, and does a factor change it?

A network is compared with predictions that need no learning, or no learning of motion; `films`
computes their losses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pandas as pd

from companion.films import Film, films_of_runs
from gpulab.report import Progress
from gpulab.stats import Verdict, verdict
from gpulab.stats._decisions import decide
from gpulab.stats._inference import holm
from gpulab.store import recorded_runs
from gpulab.store._tables import runs
from gpulab.store.recorded import recorded_folder
from gpulab.wording import condition_words

ALPHA = 0.05
# What runs are judged by. All but the first, which needs no threshold of ours, were planned in
# data/README.md before the runs on the anomaly were made; for a CPU against a GPU they were not.
BEAT = "share of seeds that beat repeating the last frame"
ALL, STUCK = "final loss of all seeds", "share of seeds that did not learn"
LEARNED = "final loss of the seeds that learned"
METRICS = (BEAT, ALL, STUCK, LEARNED)
FAMILY = ("experiment", "profile", "setting", "loader")
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
    """The verdicts on what runs of one size and film learned, for each applicable metric.

    A run whose final loss is not below the `plateau`, or that diverged, did not learn. `repeat` is
    the loss of repeating the last frame; NaN, or an infinite plateau, where there is none.
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
    """`learning_verdicts` for every experiment, size, setting, loader and speed in a frame of runs.

    The metrics and speeds of one experiment, size, setting and loader are one family: its p values
    have Holm's correction, those of differences and those of equivalence each for themselves. A row
    each: `metric`, `seeds`, `decision` after the correction, `difference` (level minus reference)
    with its interval `low`, `high`; `margin`; both over the reference's mean (`relative`,
    `margin_relative`); `p`, `p_holm`; `uncorrected`, the decision without the correction;
    `registered`, that against the margin as it was registered, a quarter of the sample's standard
    deviation itself (`registered_margin`); `worse` (seeds whose metric is higher), `same_bits`
    (seeds whose trained weights are identical), `beat` and `beat_reference` (runs that beat
    repeating the last frame: all, and the reference's); `reference`; `condition`, whether frames
    were copied or overwritten.
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
    """Levels of verdicts with Holm's correction in each family, and the decisions after it."""
    families = table.groupby(family, dropna=False)
    holm_of = {
        f"p_{name}_holm": families[f"p_{name}"].transform(holm)
        for name in ("different", "equivalent")
    }
    table = table.assign(**holm_of)
    table["decision"] = [decide(row, ALPHA) for row in table.itertuples()]
    return table.rename(columns={"p_different": "p", "p_different_holm": "p_holm"})


def _levels(judged: Verdict) -> list[dict[str, object]]:
    """The levels of a verdict with their decisions, ignoring the uncertainty of the sd."""
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
    """The chance that luck makes any of several corrected families of tests say `different`."""
    independent, most = 1 - (1 - ALPHA) ** families, min(1.0, families * ALPHA)
    return (
        f"{families} families of tests at alpha {ALPHA:.0%}. If nothing differed anywhere, at least"
        f" one of them would still say so with a\nprobability of {independent:.0%} where they are"
        f" independent, and of at most {most:.0%} in any case."
    ).replace("%", " %")


def repeat_losses(frame: pd.DataFrame) -> pd.Series:
    """For each run, the loss of repeating the last frame on the frames behind its `final_loss`.

    Mean squared errors of frames in [0, 1]; NaN where no film was rendered.
    """
    return _film_losses(frame, Film.repeat_loss)


def blurred_losses(frame: pd.DataFrame) -> pd.Series:
    """For each run, the loss of repeating the last frame with the best blur, without motion."""
    return _film_losses(frame, Film.blurred_loss)


def missing_colour_losses(frame: pd.DataFrame) -> pd.Series:
    """For each run, the least loss with a dead colour; infinite if no film was rendered."""
    return _film_losses(frame, Film.missing_colour_loss).fillna(math.inf)


def motion_finding(frame: pd.DataFrame) -> str:
    """How many of these runs beat repeating the last frame, in a sentence.

    >>> from gpulab.store import recorded_runs
    >>> print(motion_finding(recorded_runs().query("experiment == 'autoencoder'")))
    No run here predicts frames of a rendered film.
    """
    repeating = repeat_losses(frame)
    beat_repeating, beat_blurred = (
        int((frame.final_loss < limit).sum()) for limit in (repeating, blurred_losses(frame))
    )
    if not (run_count := int(repeating.notna().sum())):
        return "No run here predicts frames of a rendered film."
    if run_count == 1:
        if not beat_repeating:
            return (
                "The one network here does not beat repeating the last frame: it has not learned"
                " motion."
            )
        blurred = "and" if beat_blurred else "but not"
        return (
            f"The one network here beats repeating the last frame, {blurred} repeating it blurred."
        )
    if not beat_repeating:
        return (
            f"None of {run_count} networks beats repeating the last frame: none has learned motion."
        )
    return (
        f"{beat_repeating} of {run_count} networks beat repeating the last frame, {beat_blurred} of"
        f" {run_count} beat repeating it blurred."
    )


def conditions(frame: pd.DataFrame) -> pd.Series:
    """The condition of each run of gpulab's networks in words: copied or overwritten frames.

    >>> from gpulab.store import recorded_runs
    >>> sorted(set(conditions(recorded_runs())))
    ['copied frames', 'overwritten frames']
    """
    words = [condition_words(*run) for run in zip(frame.loader, frame.setting, strict=True)]
    return pd.Series(words, frame.index, dtype=object)


def atlas() -> pd.DataFrame:
    """The runs shipped with gpulab and those contributed to `data/atlas`, as `gpulab.runs`."""
    contributed = runs(recorded_folder("atlas")).assign(recorded=True)
    return pd.concat([recorded_runs(), contributed], ignore_index=True).drop_duplicates("id")


def title_runs() -> pd.DataFrame:
    """Recorded runs at the published size on CPUs of one kind and on a GPU, for the title question.

    What was run again has a setting of its own, such as `cuda:tf32=off again`, so that it can be
    compared with the first time. `gradients` is None for those that autograd computed. PredNet's
    seeds from 27 on were run on a CPU under the registration that `registered` names.
    """
    frame = pd.concat(
        [recorded_runs("title"), recorded_runs("stuck").query("device == 'cpu'")], ignore_index=True
    )
    return frame.assign(setting=frame.setting + frame["rerun"].map({0: "", 1: " again"}), rerun=0)


def _film_losses(frame: pd.DataFrame, film_loss: Callable[[Film], float]) -> pd.Series:
    """For each run a loss of the film that it was trained on; NaN where none was rendered."""
    losses = [math.nan if film is None else film_loss(film) for film in films_of_runs(frame)]
    return pd.Series(losses, frame.index, dtype=float)
