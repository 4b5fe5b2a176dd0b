"""From a table of runs to pairs: the runs of two levels of a factor, matched by seed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from gpulab.errors import UsageError
from gpulab.stats.blocks import with_common_types
from gpulab.stats.selection import AS_THEY_ARE, Metric, RowChoice, choose_rows, growing_columns
from gpulab.wording import Level, level_text

OWN = ("status", "rerun", "weights", "reference", "other", "difference")  # columns with a meaning of their own
HUGE = 1e75  # in the metric's units: beyond, float64 does not hold fourth powers, which kurtosis is of
# What to do where a table's columns are called otherwise.
NAME_THEM = "; say which by metric=, factor= and block= (--metric …); pandas.melt makes rows of a column for each level"


@dataclass(frozen=True, eq=False)
class Paired:
    """Runs put side by side by seed: what a `Verdict` begins with."""

    metric: str
    factor: str
    block: str
    reference: Level
    runs: pd.DataFrame  # the first of each level and block
    pairs: pd.DataFrame  # a row for each other level's run beside the reference's
    reruns: pd.DataFrame  # the same for the reference's reruns: a control
    notes: tuple[str, ...]  # sentences on rows that were chosen, left out or averaged
    source: str = field(default="", kw_only=True)  # the file or folder that the table was read from

    def by_level(self) -> dict[Level, pd.DataFrame]:
        """The pairs of each other level, in the order of the runs."""
        others = dict.fromkeys(level for level in self.runs[self.factor] if level != self.reference)
        levels = pd.Series([*others]).tolist()  # a common type, as in a table column: 1 beside 2.5 becomes 1.0
        return {level: self.pairs[self.pairs[self.factor] == level] for level in levels}

    def losses_of_reference(self) -> NDArray[np.float64]:
        """The metric of the runs of the reference that finished, shape (runs,)."""
        finished = (self.runs[self.factor] == self.reference) & (self.runs.status == "finished")
        losses: NDArray[np.float64] = self.runs.loc[finished, self.metric].to_numpy(float)
        return losses

    def is_yes_or_no(self) -> bool:
        """Whether the metric of all runs that finished is 0 or 1: its mean is a share."""
        values = self.runs[self.metric][self.runs.status == "finished"]
        return bool(len(values) and values.isin((0.0, 1.0)).all())


def pair(
    frame: pd.DataFrame,
    metric: str,
    factor: str,
    block: str,
    reference: Level | None,
    choice: RowChoice = AS_THEY_ARE,
) -> Paired:
    """Put runs under each level of a factor beside the reference's; `UsageError` where there is nothing to compare.

    Where runs have a row for each epoch or step, `choice` says which of them counts.
    """
    columns = (metric, factor, block)
    checked = check_runs(frame, *columns, choice)
    has_ended = checked["status"].isin(("finished", "diverged"))
    ended, unfinished = checked[has_ended], checked[~has_ended]
    first_runs = ended[ended["rerun"] == 0]
    runs = _one_row_each(first_runs, *columns)
    reference = _find_reference(list(dict.fromkeys(runs[factor])), reference, unfinished, factor)
    of_reference, others = runs[runs[factor] == reference], runs[runs[factor] != reference]
    reruns = ended[(ended["rerun"] > 0) & (ended[factor] == reference)]
    return Paired(
        metric=metric,
        factor=factor,
        block=block,
        reference=reference,
        runs=runs,
        pairs=_beside(others, of_reference, *columns),
        reruns=_beside(reruns, of_reference, *columns),
        source=str(checked.attrs.get("source", "")),
        notes=(
            *checked.attrs.get("chosen", ()),
            *_notes_on_lost(checked, unfinished, factor),
            *_notes_on_averaged(first_runs, runs, *columns),
            *_notes_on_skipped(len(ended) - len(first_runs) - len(reruns), reference),
            *checked.attrs.get("notes", ()),
        ),
    )


def _notes_on_lost(checked: pd.DataFrame, unfinished: pd.DataFrame, factor: str) -> Iterator[str]:
    """Yield notes on runs that cannot be read, and on those that did not finish."""
    if damaged := checked.attrs.get("damaged", 0):
        yield f"{damaged} damaged run{'s' * (damaged > 1)} cannot be read, and may be missing from this."
    if len(unfinished):
        ends = unfinished.groupby([factor, "status"]).size()
        where = ", ".join(f"{level_text(level, factor)} {count} {status}" for (level, status), count in ends.items())
        why = f"if it was the {factor} that stopped them, what is left flatters it"
        yield f"Left out, because they did not finish: {len(unfinished)} ({where}); {why}."
        if (unfinished["status"] == "missing").any() and checked.attrs.get("may_be_lost"):
            yield "An empty cell or NaN counts as missing; `diverged` in a column `status` says that runs diverged."


def _notes_on_averaged(
    first_runs: pd.DataFrame, runs: pd.DataFrame, metric: str, factor: str, block: str
) -> Iterator[str]:
    """Yield notes on rows that were averaged to one for each level and block."""
    if len(runs) < len(first_runs):
        names = _differing(first_runs, metric, factor, block)
        counts = f"{len(first_runs):,} rows were averaged to {len(runs):,} first, one for each {factor} and {block}"
        yield f"{counts}; those of one {block} differ in {', '.join(names) or 'no column'}."
        if growing := growing_columns(first_runs, factor, block, names):
            ways = f"last={growing[0]!r} or best= takes one row of each run"
            yield f"If {growing[0]!r} counts along a training, the mean says nothing about its end: {ways}."


def _notes_on_skipped(skipped: int, reference: Level) -> Iterator[str]:
    """Yield notes on repeated runs under other levels than the reference."""
    if skipped:
        yield f"Not compared: {skipped:,} rows with `rerun` above 0 that are not under {reference}."


def _one_row_each(runs: pd.DataFrame, metric: str, factor: str, block: str) -> pd.DataFrame:
    """A row for each level and block, with the mean of several such as episodes; it diverged where one of them did."""
    repeated = runs[runs.duplicated([factor, block], keep=False)]
    if not len(repeated):
        return runs
    differing = _differing(repeated, metric, factor, block)
    words = [name for name in differing if not is_numeric_dtype(runs[name]) or is_bool_dtype(runs[name])]
    # A name that each run has for itself tells no two kinds of runs apart.
    if words := [name for name in words if runs[name].astype(str).nunique() < len(runs)]:
        level = repeated[factor].iloc[0]
        which = f"{factor} {level!r}" if isinstance(level, str) else level_text(level, factor)
        which += f" {block} {repeated[block].iloc[0]}"
        raise UsageError(f"{which} was run more than once, with another {', '.join(words[:3])}; keep the rows of one")
    groups = runs.groupby([factor, block], sort=False)
    lost = (runs["status"] == "diverged").groupby([runs[factor], runs[block]], sort=False).transform("any")
    averaged = runs.assign(
        **{metric: groups[metric].transform("mean")},
        status=np.where(lost, "diverged", "finished"),
        weights=runs["weights"].where(groups["weights"].transform("nunique") == 1),
    )
    return averaged.drop_duplicates([factor, block])


def _differing(runs: pd.DataFrame, metric: str, factor: str, block: str) -> list[str]:
    """Columns besides the metric that differ between runs of one level and block."""
    others = runs.drop(columns=[metric, factor, block, *OWN], errors="ignore")
    groups = others.astype(str).groupby([runs[factor], runs[block]], sort=False)
    return [name for name in others if (groups[name].nunique() > 1).any()]


def _find_reference(levels: list[Level], reference: Level | None, unfinished: pd.DataFrame, factor: str) -> Level:
    """The level that others are compared with: as asked for, or else `cpu`, or the first."""
    if not levels:
        there = sorted(set(unfinished["status"]))
        why = f"none is finished or diverged, but {there}; write 'finished' into `status` of those that did"
        why = why if there else "the table has no rows"
        raise UsageError(f"no runs to compare: {why}")
    if reference is None:
        return "cpu" if "cpu" in levels else levels[0]
    for level in levels:
        if str(reference) in (str(level), level_text(level, factor)):  # on the command line a number is text
            return level
    raise UsageError(f"no runs under {reference!r}; there are {sorted(level_text(level, factor) for level in levels)}")


def _beside(runs: pd.DataFrame, of_reference: pd.DataFrame, metric: str, factor: str, block: str) -> pd.DataFrame:
    """A row for each run that the reference has a run beside, from the same seed, with the difference of the two."""
    columns = [block, metric, "status", "weights"]
    merged = runs[[factor, *columns]].merge(of_reference[columns], on=block, suffixes=("", "_base"))
    diverged, base_diverged = merged.status == "diverged", merged.status_base == "diverged"
    pairs = merged[[factor, block]].assign(
        reference=merged[f"{metric}_base"],
        other=merged[metric],
        difference=(merged[metric] - merged[f"{metric}_base"]).where(~diverged & ~base_diverged),
        reference_diverged=base_diverged,
        other_diverged=diverged,
        same_bits=(merged.weights == merged.weights_base) & merged.weights.notna(),
    )
    return pairs.sort_values(block, kind="stable", ignore_index=True)


def check_runs(
    frame: pd.DataFrame, metric: str, factor: str, block: str, choice: RowChoice = AS_THEY_ARE
) -> pd.DataFrame:
    """A copy with the metric in float64, and `status`, `rerun` and `weights`; `UsageError` for nonsense.

    It has one row for each run where `choice` says which; `attrs["chosen"]` then has a sentence on it.
    """
    if not isinstance(frame, pd.DataFrame):
        raise UsageError(f"expected a pandas data frame, a row per run; got a {type(frame).__name__}")
    frame = frame.reset_index(allow_duplicates=True) if any(frame.index.names) else frame.copy()
    if twice := sorted(set(map(str, frame.columns[frame.columns.duplicated()]))):
        raise UsageError(f"more than one column is called {', '.join(twice)}; rename or drop one")
    check_columns(frame, (metric, factor, block), NAME_THEM)
    if len({metric, factor, block, *OWN}) < 3 + len(OWN):
        raise UsageError(
            f"metric, factor and block: expected three columns, and none of {', '.join(OWN)}; rename yours"
        )
    frame = frame.assign(**{name: _levels(frame[name]) for name in (factor, block)})
    frame = with_common_types(frame, factor, block)
    check_one_protocol(frame, besides=(metric, factor, block))
    column = _numbers(frame[metric])
    chosen = choose_rows(frame, metric, factor, block, choice, column)
    notes = {"chosen": chosen.notes, "may_be_lost": column.may_be_lost}
    frame = frame.assign(**{metric: column.values}).iloc[chosen.positions]
    frame.attrs |= notes
    states = np.select([chosen.lost, frame[metric].isna()], ["diverged", "missing"], "finished")
    if "status" in frame:
        named = frame["status"].astype(str).str.lower().where(frame["status"].notna(), states)
        states = named.mask(chosen.lost & (named == "finished") & frame[metric].isna(), "diverged")
    frame["status"] = states
    frame["rerun"] = pd.to_numeric(frame["rerun"]).fillna(0) if "rerun" in frame else 0
    _check_numbers(frame[metric][frame["status"] == "finished"], metric)
    return frame if "weights" in frame else frame.assign(weights=None)


def _numbers(column: pd.Series) -> Metric:
    """The metric in float64, and which of its numbers are lost.

    In a column of float64 NaN may stand for an empty cell and for a loss that was NaN.
    """
    plain = column.infer_objects()
    if is_numeric_dtype(plain) and not isinstance(plain.dtype, pd.api.extensions.ExtensionDtype):
        values = plain.to_numpy(float)
        return Metric(values, np.isinf(values), may_be_lost=True)
    text = column.map(str, na_action="ignore").astype(object).replace({"True": "1", "False": "0"}).str.strip()
    numbers = pd.to_numeric(text, errors="coerce").astype(float)
    if len(wrong := text[numbers.isna() & column.notna() & (text.str.lower() != "nan")]):
        first = f"index {wrong.index[0]!r} has {wrong.iloc[0]!r}"
        raise UsageError(
            f"metric {column.name!r} is not of numbers or booleans: {first}; leave cells without a number empty, or "
            "choose another metric="
        )
    values = numbers.to_numpy(float)
    return Metric(values, column.notna().to_numpy(bool) & ~np.isfinite(values), may_be_lost=False)


def _check_numbers(finished: pd.Series, metric: str) -> None:
    """Raise `UsageError` where a run that finished has no number, or one that is too large to compute with."""
    if len(unusable := finished[~(finished.abs() < HUGE)]):
        which = f"{len(unusable)} finished run(s) have no {metric} that is finite and below {HUGE:.0e}: index"
        advice = "mark them as diverged, leave their seeds out, or choose another metric="
        raise UsageError(f"{which} {unusable.index[:3].tolist()}; {advice}")


def _levels(column: pd.Series) -> pd.Series:
    """A factor or block as plain objects or numbers; `UsageError` for cells that are empty."""
    if column.isna().any():
        raise UsageError(f"column {column.name!r} is empty in {column.isna().sum()} rows; fill or drop them")
    return column.astype(object).infer_objects()  # without categories, Arrow's types and those with NA


def check_columns(frame: pd.DataFrame, names: Iterable[str], advice: str = "") -> None:
    """Raise `UsageError`, which lists what there is and gives the advice, where a frame lacks one of these columns."""
    for name in names:
        if name not in frame:
            columns = textwrap.shorten(", ".join(map(str, frame.columns)) or "none", 900)
            raise UsageError(f"no column {name!r}; there are {columns}{advice}")


def check_one_protocol(frame: pd.DataFrame, besides: Collection[str] = ()) -> None:
    """Raise `UsageError` where runs learned different things or for different times; columns `besides` may vary."""
    names = ("experiment", "profile", "frames", "protocol", "options")
    columns = [name for name in names if name in frame and name not in besides]
    if "options" in columns:  # of trainings of the user's own
        frame = frame.assign(options=[_without(text, besides) for text in frame.options])
    protocols = frame[columns].drop_duplicates()
    if columns and len(protocols) > 1:
        advice = "compare runs of one protocol at a time, or drop columns that do not tell protocols apart"
        raise UsageError(f"the frame mixes {len(protocols)}: {protocols[:3].to_dict('records')}; {advice}")


def _without(options: object, names: Collection[str]) -> str:
    """Options as JSON without some of them; a cell that is not JSON as it is."""
    if not isinstance(options, (str, bytes)):
        return str(options)
    try:
        return str({name: value for name, value in json.loads(options).items() if name not in names})
    except (ValueError, AttributeError):
        return str(options)


def rows_where(frame: pd.DataFrame, conditions: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """The rows that have these values, as text, in these columns."""
    for name, text in conditions:
        check_columns(frame, [name])
        frame = frame[frame[name].astype(str) == text]
    return frame
