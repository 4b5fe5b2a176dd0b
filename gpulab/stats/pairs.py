"""From runs to pairs: runs of one protocol under two levels of a factor, put side by side by seed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from gpulab.errors import UsageError

OWN = ("status", "rerun", "weights", "reference", "other", "difference")  # columns with a meaning of their own
MOST_LEVELS = 1000  # of a factor, each of which takes some 30 ms
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
NAME_THEM = "each row is a run: name its columns by metric=, factor= and block= (--metric, --factor and --block)"


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


def run_states(frame: pd.DataFrame) -> pd.Series | None:
    """How each run ended, in small letters: its `status`; None where there is no such column."""
    if "status" not in frame:
        return None
    return frame["status"].astype(object).where(frame["status"].isna(), frame["status"].astype(str).str.lower())


def check_runs(frame: pd.DataFrame, metric: str, factor: str, block: str) -> pd.DataFrame:
    """A copy with the metric in float64, and `status`, `rerun` and `weights`; `UsageError` for nonsense."""
    if not isinstance(frame, pd.DataFrame):
        advice = "pandas.concat makes one of several, gpulab.stats.tables.read_table reads a file"
        raise UsageError(f"expected a pandas data frame, a row per run; got a {type(frame).__name__}: {advice}")
    frame = _name_columns(frame, metric, factor, block)
    frame = frame.assign(**{name: _levels(frame[name]) for name in (factor, block)})
    values = frame[metric].dropna().infer_objects()
    if not (is_numeric_dtype(values) or is_bool_dtype(values)):
        raise UsageError(f"metric {metric!r} is of type {frame[metric].dtype}; expected numbers or booleans")
    check_one_protocol(frame, besides=(metric, factor, block))
    frame[metric] = frame[metric].astype("Float64").to_numpy(float, na_value=math.nan)
    by_metric = pd.Series(np.where(np.isfinite(frame[metric]), "finished", "diverged"), frame.index)
    states = run_states(frame)
    frame["status"] = by_metric if states is None else states.fillna(by_metric)
    frame["rerun"] = pd.to_numeric(frame["rerun"], errors="coerce") if "rerun" in frame else 0
    if len(unknown := frame[frame["rerun"].isna()]):
        raise UsageError(f"column 'rerun' has no number in {len(unknown)} rows: index {unknown.index[:3].tolist()}")
    _check_numbers(frame[metric][frame["status"] == "finished"], metric)
    return frame if "weights" in frame else frame.assign(weights=None)


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
        if len(numberless) == len(finished):
            raise UsageError(f"{which}, nor has any other; if yours is called otherwise, say metric='its name'")
        raise UsageError(f"{which}; mark them as diverged or leave their seeds out")
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


def _differing(repeated: pd.DataFrame, factor: str, block: str) -> list[str]:
    """Columns of words that differ between runs of one level and block, and have fewer words than there are runs."""
    words = repeated.drop(columns=[factor, block, *OWN], errors="ignore").select_dtypes(["object", "bool", "string"])
    words = words.astype(str)
    groups = words.groupby([repeated[factor], repeated[block]], sort=False)
    return [name for name in words if words[name].nunique() < len(words) and (groups[name].nunique() > 1).any()]


def pair(
    frame: pd.DataFrame, metric: str, factor: str, block: str, reference: Any
) -> tuple[Any, pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The reference; the first runs; their pairs with its runs; its reruns' pairs with its runs; unfinished runs."""
    frame = check_runs(frame, metric, factor, block)
    ended = frame["status"].isin(("finished", "diverged"))
    frame, unfinished = frame[ended], frame[~ended]
    runs = frame[frame["rerun"] == 0]
    if len(repeated := runs[runs.duplicated([factor, block], keep=False)]):
        advice = "; keep one row for each, or number repetitions in the column `rerun`"
        if differing := _differing(repeated, factor, block):
            advice = f", with another {', '.join(differing[:3])}; keep the rows of one, or number them in `rerun`"
        if "machine" in repeated and len(machines := sorted(set(map(str, repeated.machine)))) > 1:
            advice = f", on {', '.join(machines)}; compare one machine's runs at a time"
        which = f"{factor} {repeated[factor].iloc[0]!r} {block} {repeated[block].iloc[0]}"
        raise UsageError(f"{which} was run more than once{advice}")
    levels = list(dict.fromkeys(runs[factor]))
    if not levels:
        ends = ", ".join(sorted(set(unfinished["status"])))
        unended = f"; none of {len(unfinished)} is finished or diverged, but {ends}" if len(unfinished) else ""
        raise UsageError(f"no runs to compare{f' with {reference!r}' if reference is not None else ''}{unended}")
    if len(levels) > MOST_LEVELS:
        sample = ", ".join(map(repr, levels[:3]))
        raise UsageError(
            f"factor {factor!r} has {len(levels):,} levels ({sample}, …), and may have {MOST_LEVELS:,}: choose another "
            "column, or fewer rows"
        )
    if reference is None:
        reference = "cpu" if "cpu" in levels else levels[0]
    elif reference not in levels:  # on the command line a number is text
        by_text = {str(level): level for level in levels}
        if str(reference) not in by_text:
            raise UsageError(f"no runs under {reference!r}; there are {sorted(by_text)}")
        reference = by_text[str(reference)]
    of_reference = runs[runs[factor] == reference]
    other_runs = runs[runs[factor] != reference]
    reruns = frame[(frame["rerun"] > 0) & (frame[factor] == reference)]
    columns = metric, factor, block
    return (
        reference,
        runs,
        _beside(other_runs, of_reference, *columns),
        _beside(reruns, of_reference, *columns),
        unfinished,
    )


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
