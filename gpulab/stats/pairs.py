"""From runs to pairs: runs of one protocol under two levels of a factor, put side by side by seed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from gpulab.errors import UsageError

OWN = ("status", "rerun", "weights", "reference", "other", "difference")  # columns with a meaning of their own
TINY, HUGE = 1e-75, 1e75  # beyond, float64 does not hold fourth powers, which kurtosis is of


def check_one_protocol(frame: pd.DataFrame, besides: Collection[str] = ()) -> None:
    """Raise `UsageError` where runs learned different things or for different times; columns `besides` may vary."""
    names = ("experiment", "profile", "frames", "protocol", "options")
    columns = [name for name in names if name in frame and name not in besides]
    if "options" in columns:  # of trainings of the user's own
        frame = frame.assign(options=[_without(text, besides) for text in frame.options])
    protocols = frame[columns].drop_duplicates()
    if columns and len(protocols) > 1:
        rest = f" and {len(protocols) - 3} more" if len(protocols) > 3 else ""
        advice = "compare runs of one protocol at a time, or drop columns that do not tell protocols apart"
        raise UsageError(f"the frame mixes {protocols[:3].to_dict('records')}{rest}; {advice}")


def _without(options: Any, names: Collection[str]) -> str:
    """Options as JSON without some of them; what is not JSON as it is."""
    try:
        return str({name: value for name, value in json.loads(options).items() if name not in names})
    except (TypeError, ValueError, AttributeError):
        return str(options)


# What to do where a table's columns are called otherwise.
NAME_THEM = (
    "each row is a run: name its columns by metric=, factor= and block= (--metric, --factor and --block); a table with "
    "a column for each level becomes such rows by pandas.melt"
)


def rows_where(frame: pd.DataFrame, conditions: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """The rows that have these values, as text, in these columns, which are found as `find_column` says."""
    for name, text in conditions:
        frame = frame[frame[find_column(frame.columns, name)].astype(str) == text]
    return frame


def find_column(names: Iterable[Any], column: Any, advice: str = "") -> Any:
    """The name that is `column`, or else the one that ends in it after a dot or slash, such as `metrics.loss`.

    `UsageError` lists what several there are, or what there is, and gives the advice.
    """
    by_text = {str(name): name for name in names}
    if column in by_text.values():
        return column
    ending = [text for text in by_text if re.search(rf"[./]{re.escape(str(column))}$", text)]
    if len(ending) == 1:
        return by_text[ending[0]]
    if ending:
        raise UsageError(f"column {column!r} could be any of {', '.join(ending)}; give the whole name")
    shown = ", ".join([*by_text][:40]) + (f" and {len(by_text) - 40} more" if len(by_text) > 40 else "")
    raise UsageError(f"no column {column!r}; there are {shown or 'none'}" + (advice and f"; {advice}"))


def check_runs(frame: pd.DataFrame, metric: str, factor: str, block: str) -> pd.DataFrame:
    """A copy with the metric in float64, and `status`, `rerun` and `weights`; `UsageError` for nonsense."""
    if not isinstance(frame, pd.DataFrame):
        advice = "pandas.concat makes one of several, gpulab.stats.tables.read_table reads a file"
        raise UsageError(f"expected a pandas data frame, a row per run; got a {type(frame).__name__}: {advice}")
    frame = _name_columns(frame, metric, factor, block)
    frame = frame.assign(**{name: _levels(frame[name]) for name in (factor, block)})
    check_one_protocol(frame, besides=(metric, factor, block))
    frame[metric], missing, lost = _numbers(frame[metric])
    by_metric = np.select([missing, ~np.isfinite(frame[metric])], ["missing", "diverged"], "finished")
    states = pd.Series(by_metric, frame.index)
    if "status" in frame:
        named = frame["status"].astype(object).where(frame["status"].isna(), frame["status"].astype(str).str.lower())
        states = named.fillna(states).mask(lost & (named == "finished"), "diverged")
    frame["status"] = states
    frame["rerun"] = pd.to_numeric(frame["rerun"], errors="coerce") if "rerun" in frame else 0
    if len(unknown := frame[frame["rerun"].isna()]):
        raise UsageError(f"column 'rerun' has no number in {len(unknown)} rows: index {unknown.index[:3].tolist()}")
    _check_numbers(frame[metric][frame["status"] == "finished"], metric)
    return frame if "weights" in frame else frame.assign(weights=None)


def _numbers(column: pd.Series) -> tuple[pd.Series, pd.Series, pd.Series]:
    """The metric in float64; which are missing; and which are NaN or infinite.

    In a column of float64 NaN may stand for both, and is taken for neither.
    """
    plain = column.infer_objects()
    if is_numeric_dtype(plain) and not isinstance(plain.dtype, pd.api.extensions.ExtensionDtype):
        none = pd.Series(False, column.index)
        return plain.astype(float), none, none
    text = column.map(str, na_action="ignore").astype(object).replace({"True": "1", "False": "0"}).str.strip()
    numbers = pd.to_numeric(text, errors="coerce").astype(float)
    wrong = text[numbers.isna() & column.notna() & (text.str.lower() != "nan")]
    if len(wrong):
        first = f"index {wrong.index[0]!r} has {wrong.iloc[0]!r}"
        raise UsageError(f"metric {column.name!r} is not of numbers or booleans: {first}")
    return numbers, column.isna(), column.notna() & ~np.isfinite(numbers)


def _name_columns(frame: pd.DataFrame, metric: str, factor: str, block: str) -> pd.DataFrame:
    """A copy whose columns, index levels among them, are called as asked for; each must be one, and ours to use."""
    requested = [metric, factor, block]
    in_index = [name for name in frame.index.names if name in requested and name not in frame]
    frame = frame.reset_index(in_index) if in_index else frame.copy()
    frame.index = frame.index.set_names([None] * frame.index.nlevels)
    if twice := sorted(set(map(str, frame.columns[frame.columns.duplicated()]))):
        raise UsageError(f"more than one column is called {', '.join(twice)}; rename or drop one")
    columns = [find_column(frame.columns, name, NAME_THEM) for name in requested]
    for name, column in zip(requested, columns, strict=True):
        if columns.count(column) > 1:
            raise UsageError(f"column {column!r} stands for two of metric, factor and block; choose another")
        if name in OWN and not (name == metric and name in OWN[3:]):
            raise UsageError(f"column {name!r} has a meaning of its own; choose another, or rename it")
    return frame.rename(columns=dict(zip(columns, requested, strict=True)))


def _check_numbers(finished: pd.Series, metric: str) -> None:
    """Raise `UsageError` where a run that finished has no number, or one that is too large or small to compute with."""
    if len(numberless := finished[~np.isfinite(finished)]):
        which = f"{len(numberless)} finished run(s) have no finite {metric}: index {numberless.index[:3].tolist()}"
        raise UsageError(f"{which}; mark them as diverged, leave their seeds out, or choose another metric=")
    largest = finished.abs().max()
    if largest > HUGE or 0 < largest < TINY:
        raise UsageError(f"metric {metric!r} reaches {largest:.0e}, whose powers float64 cannot hold; rescale it")


def _levels(column: pd.Series) -> pd.Series:
    """A factor or block; `UsageError` for cells that are empty, or text beside numbers."""
    if column.isna().any():
        raise UsageError(f"column {column.name!r} is empty in {column.isna().sum()} rows; fill or drop them")
    if isinstance(column.dtype, pd.api.extensions.ExtensionDtype):  # categories, Arrow's, those with NA
        column = column.astype(object).infer_objects()
    if column.dtype == object and 0 < column.map(lambda value: isinstance(value, str)).mean() < 1:
        advice = f"make it one kind, such as frame[{column.name!r}].astype(str)"
        raise UsageError(f"column {column.name!r} holds text beside numbers, such as '0' and 0; {advice}")
    return column


def _differing(runs: pd.DataFrame, metric: str, factor: str, block: str) -> list[str]:
    """Columns besides the metric that differ between runs of one level and block."""
    others = runs.drop(columns=[metric, factor, block, *OWN], errors="ignore")
    groups = others.astype(str).groupby([runs[factor], runs[block]], sort=False)
    return [name for name in others if (groups[name].nunique() > 1).any()]


class Paired(NamedTuple):
    """Runs put side by side by seed."""

    reference: Any
    runs: pd.DataFrame  # the first of each level and block
    pairs: pd.DataFrame  # a row for each other level's run beside the reference's
    reruns: pd.DataFrame  # the same for the reference's reruns: a control
    notes: tuple[str, ...]  # sentences on rows that were left out, or averaged

    def by_level(self, factor: str) -> dict[Any, pd.DataFrame]:
        """The pairs of each other level, in the order of the runs."""
        levels = dict.fromkeys(level for level in self.runs[factor] if level != self.reference)
        return {level: self.pairs[self.pairs[factor] == level] for level in levels}


def pair(frame: pd.DataFrame, metric: str, factor: str, block: str, reference: Any) -> Paired:
    """Put runs under each level of a factor beside the reference's; `UsageError` where there is nothing to compare."""
    damaged = frame.attrs.get("damaged", 0) if isinstance(frame, pd.DataFrame) else 0
    frame = check_runs(frame, metric, factor, block)
    ended = frame["status"].isin(("finished", "diverged"))
    frame, unfinished = frame[ended], frame[~ended]
    runs = _one_row_each(first_runs := frame[frame["rerun"] == 0], metric, factor, block)
    reference = _find_reference(list(dict.fromkeys(runs[factor])), reference, unfinished)
    of_reference, others = runs[runs[factor] == reference], runs[runs[factor] != reference]
    again = frame[frame["rerun"] > 0]
    reruns = again[again[factor] == reference]
    columns = metric, factor, block
    notes = []
    if damaged:
        notes.append(f"{damaged} damaged run{'s' * (damaged > 1)} cannot be read, and may be missing from this.")
    if len(unfinished):
        ends = unfinished.groupby([factor, "status"]).size()
        where = ", ".join(f"{level} {count} {status}" for (level, status), count in ends.items())
        why = f"if it was the {factor} that stopped them, what is left flatters it"
        notes.append(f"Left out, because they did not finish: {len(unfinished)} ({where}); {why}.")
    if len(runs) < len(first_runs):
        differing = ", ".join(_differing(first_runs, metric, factor, block)) or "no column"
        notes.append(
            f"{len(first_runs):,} rows were averaged to {len(runs):,} first, one for each {factor} and {block}; those "
            f"of one {block} differ in {differing}."
        )
    if skipped := len(again) - len(reruns):
        notes.append(f"Not compared: {skipped:,} rows with `rerun` above 0 that are not under {reference}.")
    pairs, control = _beside(others, of_reference, *columns), _beside(reruns, of_reference, *columns)
    return Paired(reference, runs, pairs, control, tuple(notes))


def _one_row_each(runs: pd.DataFrame, metric: str, factor: str, block: str) -> pd.DataFrame:
    """A row for each level and block, with the mean of several such as episodes; it diverged where one of them did."""
    repeated = runs[runs.duplicated([factor, block], keep=False)]
    if not len(repeated):
        return runs
    differing = _differing(repeated, metric, factor, block)
    words = [name for name in differing if not is_numeric_dtype(runs[name]) or is_bool_dtype(runs[name])]
    # A name that each run has for itself tells no two kinds of runs apart.
    if words := [name for name in words if runs[name].astype(str).nunique() < len(runs)]:
        which = f"{factor} {repeated[factor].iloc[0]!r} {block} {repeated[block].iloc[0]}"
        advice = f"with another {', '.join(words[:3])}; keep the rows of one"
        raise UsageError(f"{which} was run more than once, {advice}")
    groups = runs.groupby([factor, block], sort=False)
    lost = (runs["status"] == "diverged").groupby([runs[factor], runs[block]], sort=False).transform("any")
    averaged = runs.assign(
        **{metric: groups[metric].transform("mean")},
        status=np.where(lost, "diverged", "finished"),
        weights=runs["weights"].where(groups["weights"].transform("nunique") == 1),
    )
    return averaged.drop_duplicates([factor, block])


def _find_reference(levels: list[Any], reference: Any, unfinished: pd.DataFrame) -> Any:
    """The level that others are compared with: as asked for, or else `cpu`, or the first."""
    if not levels:
        ends = ", ".join(sorted(set(unfinished["status"])))
        unended = f"; none of {len(unfinished)} is finished or diverged, but {ends}" if len(unfinished) else ""
        raise UsageError(f"no runs to compare{f' with {reference!r}' if reference is not None else ''}{unended}")
    if reference is None:
        return "cpu" if "cpu" in levels else levels[0]
    by_text = {str(level): level for level in levels}  # on the command line a number is text
    if str(reference) not in by_text:
        raise UsageError(f"no runs under {reference!r}; there are {sorted(by_text)}")
    return by_text[str(reference)]


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


def finished(runs: pd.DataFrame, metric: str, factor: str, level: Any) -> np.ndarray:
    """The metric of the runs of a level that finished, shape (runs,)."""
    return runs.loc[(runs[factor] == level) & (runs.status == "finished"), metric].to_numpy(float)


def is_yes_or_no(runs: pd.DataFrame, metric: str) -> bool:
    """Whether the metric of all runs that finished is 0 or 1: its mean is a share."""
    finished_values = runs[metric][runs.status == "finished"]
    return bool(len(finished_values) and finished_values.isin((0.0, 1.0)).all())
