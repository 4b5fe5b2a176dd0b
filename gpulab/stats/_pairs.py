"""Pairing of the runs in a table: the runs of two levels of a factor, matched by seed."""

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
from gpulab.stats._blocks import unify_types
from gpulab.stats._selection import ALL_ROWS, MetricColumn, RowChoice, choose_rows, growing_columns
from gpulab.wording import Level, level_text

RESERVED_COLUMNS = (
    "status",
    "rerun",
    "weights",
    "reference",
    "other",
    "difference",
)  # columns with a fixed meaning
# The largest absolute value of a metric. Kurtosis needs fourth powers, which overflow float64
# beyond it.
MAX_METRIC = 1e75
# The advice for a table whose columns have other names.
COLUMN_ADVICE = (
    "; choose the columns by metric=, factor= and block= (--metric …); if each level is a column,"
    " pandas.melt turns it into rows"
)


@dataclass(frozen=True, eq=False)
class PairedRuns:
    """Runs paired by seed, from which a `Verdict` is computed.

    Attributes:
        metric: The name of the metric.
        factor: The name of the column whose levels are compared.
        block: The name of the column by which runs are paired.
        reference: The level with which the others are compared.
        runs: A row for each level and block, without reruns.
        pairs: A row for each pair: a run of another level and the reference's run of that block.
        reruns: The same for reruns of the reference, which serve as a control.
        notes: Sentences on rows that were chosen, left out or averaged.
        source: The file or folder that the table was read from.
    """

    metric: str
    factor: str
    block: str
    reference: Level
    runs: pd.DataFrame
    pairs: pd.DataFrame
    reruns: pd.DataFrame
    notes: tuple[str, ...]
    source: str = field(default="", kw_only=True)

    def by_level(self) -> dict[Level, pd.DataFrame]:
        """Return the pairs of each level except the reference, in the order of the runs."""
        other_levels = dict.fromkeys(
            level for level in self.runs[self.factor] if level != self.reference
        )
        # Levels get a common type, as in a table column: 1 becomes 1.0 if there is a 2.5.
        levels = pd.Series([*other_levels]).tolist()
        return {level: self.pairs[self.pairs[self.factor] == level] for level in levels}

    def reference_losses(self) -> NDArray[np.float64]:
        """Return the metric of the finished runs under the reference, shape (runs,)."""
        finished = (self.runs[self.factor] == self.reference) & (self.runs.status == "finished")
        losses: NDArray[np.float64] = self.runs.loc[finished, self.metric].to_numpy(float)
        return losses

    def is_binary(self) -> bool:
        """Return whether the metric is 0 or 1 in all finished runs, so that its mean is a share."""
        values = self.runs[self.metric][self.runs.status == "finished"]
        return bool(len(values) and values.isin((0.0, 1.0)).all())


def pair_runs(
    frame: pd.DataFrame,
    metric: str,
    factor: str,
    block: str,
    reference: Level | None,
    choice: RowChoice = ALL_ROWS,
) -> PairedRuns:
    """Pair the runs of each level with those of the reference.

    If runs have a row for each epoch or step, `choice` says which row counts.

    Raises:
        UsageError: If the table is not suitable, or has no runs to compare.
    """
    columns = (metric, factor, block)
    checked_runs = check_runs(frame, *columns, choice)
    has_ended = checked_runs["status"].isin(("finished", "diverged"))
    ended_runs = checked_runs[has_ended]
    unfinished_runs = checked_runs[~has_ended]
    first_runs = ended_runs[ended_runs["rerun"] == 0]
    runs = _average_repeated_rows(first_runs, *columns)
    reference = _find_reference(
        list(dict.fromkeys(runs[factor])), reference, unfinished_runs, factor
    )
    reference_runs = runs[runs[factor] == reference]
    other_runs = runs[runs[factor] != reference]

    # Reruns of the reference are a control. Those of other levels are left out.
    reruns = ended_runs[(ended_runs["rerun"] > 0) & (ended_runs[factor] == reference)]
    n_skipped_reruns = len(ended_runs) - len(first_runs) - len(reruns)
    return PairedRuns(
        metric=metric,
        factor=factor,
        block=block,
        reference=reference,
        runs=runs,
        pairs=_merge_with_reference(other_runs, reference_runs, *columns),
        reruns=_merge_with_reference(reruns, reference_runs, *columns),
        source=str(checked_runs.attrs.get("source", "")),
        notes=(
            *checked_runs.attrs.get("chosen", ()),
            *_missing_run_notes(checked_runs, unfinished_runs, factor),
            *_averaged_row_notes(first_runs, runs, *columns),
            *_skipped_rerun_notes(n_skipped_reruns, reference),
            *checked_runs.attrs.get("notes", ()),
        ),
    )


def _missing_run_notes(
    checked_runs: pd.DataFrame, unfinished_runs: pd.DataFrame, factor: str
) -> Iterator[str]:
    """Yield notes on runs that cannot be read, and on those that did not finish."""
    n_damaged = checked_runs.attrs.get("damaged", 0)
    if n_damaged:
        runs_text = "1 damaged run" if n_damaged == 1 else f"{n_damaged} damaged runs"
        yield f"{runs_text} cannot be read, and may be missing from this comparison."
    n_forbidden = checked_runs.attrs.get("forbidden", 0)
    if n_forbidden:
        yield (
            f"Runs may be missing from this comparison: {n_forbidden} folder(s) or file(s) in the"
            " store cannot be read (permission denied)."
        )
    if len(unfinished_runs):
        counts = unfinished_runs.groupby([factor, "status"]).size()
        counts_text = ", ".join(
            f"{level_text(level, factor)} {count} {status}"
            for (level, status), count in counts.items()
        )
        bias = f"if the {factor} stopped them, the remaining runs are biased in its favour"
        yield (
            f"Left out, because they did not finish: {len(unfinished_runs)} ({counts_text});"
            f" {bias}."
        )
    is_missing = (unfinished_runs["status"] == "missing").any()
    if checked_runs.attrs.get("ends_with_nan") or (
        is_missing and checked_runs.attrs.get("has_ambiguous_nan")
    ):
        yield (
            "An empty cell or NaN counts as missing; to mark runs as diverged, write `diverged`"
            " into a column `status`. If the table is a text file, gl.stats.read_table tells NaN"
            " from an empty cell."
        )


def _averaged_row_notes(
    first_runs: pd.DataFrame, runs: pd.DataFrame, metric: str, factor: str, block: str
) -> Iterator[str]:
    """Yield notes on rows that were averaged to one for each level and block."""
    if len(runs) < len(first_runs):
        names = _differing_columns(first_runs, metric, factor, block)
        counts = (
            f"{len(first_runs):,} rows were first averaged to {len(runs):,}, one for each {factor}"
            f" and {block}"
        )
        yield f"{counts}; rows of the same {block} differ in {', '.join(names) or 'no column'}."
        counting_columns = growing_columns(first_runs, factor, block, names)
        if counting_columns:
            choices = f"last={counting_columns[0]!r} or best= takes one row of each run"
            yield (
                f"If {counting_columns[0]!r} counts training steps, the mean says nothing"
                f" about its end: {choices}."
            )


def _skipped_rerun_notes(n_skipped: int, reference: Level) -> Iterator[str]:
    """Yield notes on repeated runs under levels other than the reference."""
    if n_skipped:
        yield (
            f"Not compared: {n_skipped:,} rows with `rerun` above 0 that are not under {reference}."
        )


def _average_repeated_rows(
    runs: pd.DataFrame, metric: str, factor: str, block: str
) -> pd.DataFrame:
    """Average repeated rows to one row for each level and block.

    The averaged row is `diverged` if one of the repeated rows is. It has weights only if the
    repeated rows agree on them.

    Raises:
        UsageError: If repeated rows differ in a column of texts or booleans, since these are then
            different kinds of runs.
    """
    repeated = runs[runs.duplicated([factor, block], keep=False)]
    if not len(repeated):
        return runs
    differing_columns = _differing_columns(repeated, metric, factor, block)
    kind_columns = [
        name
        for name in differing_columns
        if (not is_numeric_dtype(runs[name]) or is_bool_dtype(runs[name]))
        # An id, whose values are all different, does not distinguish kinds of runs.
        and runs[name].astype(str).nunique() < len(runs)
    ]
    if kind_columns:
        level = repeated[factor].iloc[0]
        run_text = f"{factor} {level!r}" if isinstance(level, str) else level_text(level, factor)
        run_text += f" {block} {repeated[block].iloc[0]}"
        columns_text = ", ".join(kind_columns[:3])
        raise UsageError(
            f"{run_text} was run more than once, with different {columns_text}; keep the rows of"
            " one of these runs"
        )
    groups = runs.groupby([factor, block], sort=False)
    # For each row, whether any row of its level and block diverged.
    has_diverged = (
        (runs["status"] == "diverged")
        .groupby([runs[factor], runs[block]], sort=False)
        .transform("any")
    )
    averaged = runs.assign(
        **{metric: groups[metric].transform("mean")},
        status=np.where(has_diverged, "diverged", "finished"),
        weights=runs["weights"].where(groups["weights"].transform("nunique") == 1),
    )
    return averaged.drop_duplicates([factor, block])


def _differing_columns(runs: pd.DataFrame, metric: str, factor: str, block: str) -> list[str]:
    """List the columns other than the metric that differ between runs of one level and block."""
    other_columns = runs.drop(columns=[metric, factor, block, *RESERVED_COLUMNS], errors="ignore")
    groups = other_columns.astype(str).groupby([runs[factor], runs[block]], sort=False)
    return [name for name in other_columns if (groups[name].nunique() > 1).any()]


def _find_reference(
    levels: list[Level], reference: Level | None, unfinished: pd.DataFrame, factor: str
) -> Level:
    """Find the level that others are compared with: the given one, or else `cpu`, or the first.

    Raises:
        UsageError: If there are no levels, or none has the name of the given one.
    """
    if not levels:
        statuses = sorted(set(unfinished["status"]))
        reason = "the table has no rows"
        if statuses:
            reason = (
                f"the statuses are {statuses}, none is finished or diverged; write 'finished' into"
                " `status` for runs that finished"
            )
        raise UsageError(f"no runs to compare: {reason}")
    if reference is None:
        return "cpu" if "cpu" in levels else levels[0]
    for level in levels:
        # On the command line a level is given as text, even if it is a number.
        if str(reference) in (str(level), level_text(level, factor)):
            return level
    raise UsageError(
        f"no runs under {reference!r}; the levels are"
        f" {sorted(level_text(level, factor) for level in levels)}"
    )


def _merge_with_reference(
    runs: pd.DataFrame, reference_runs: pd.DataFrame, metric: str, factor: str, block: str
) -> pd.DataFrame:
    """Pair runs with those of the reference by block; runs without a partner are left out.

    The difference is NaN if one of the two diverged. The pairs are sorted by block.
    """
    columns = [block, metric, "status", "weights"]
    merged = runs[[factor, *columns]].merge(
        reference_runs[columns], on=block, suffixes=("", "_base")
    )
    diverged = merged.status == "diverged"
    reference_diverged = merged.status_base == "diverged"
    both_finished = ~diverged & ~reference_diverged
    difference = merged[metric] - merged[f"{metric}_base"]
    pairs = merged[[factor, block]].assign(
        reference=merged[f"{metric}_base"],
        other=merged[metric],
        difference=difference.where(both_finished),
        reference_diverged=reference_diverged,
        other_diverged=diverged,
        same_bits=(merged.weights == merged.weights_base) & merged.weights.notna(),
    )
    return pairs.sort_values(block, kind="stable", ignore_index=True)


def check_runs(
    frame: pd.DataFrame, metric: str, factor: str, block: str, choice: RowChoice = ALL_ROWS
) -> pd.DataFrame:
    """Check a table of runs, and return a copy in the form that `pair_runs` expects.

    The copy has the metric in float64 and the columns `status`, `rerun` and `weights`. If runs have
    several rows, it has the rows that `choice` selects. `attrs["chosen"]` has sentences on the
    selection, `attrs["has_ambiguous_nan"]` says whether NaN may be an empty cell, and
    `attrs["ends_with_nan"]` whether some run ends with such values. A `status` in the table is
    kept, except that `finished` becomes `diverged` if the metric is NaN in a column that
    distinguishes NaN from an empty cell. Runs without a status are `diverged` in that case or if
    the metric is infinite, `missing` if it is any other NaN, and `finished` otherwise.

    Raises:
        UsageError: If the table is not valid or mixes protocols, or if a run is `finished` although
            its metric is missing, infinite or not below `MAX_METRIC` in size.
    """
    if not isinstance(frame, pd.DataFrame):
        raise UsageError(
            f"expected a pandas data frame with a row for each run, got a {type(frame).__name__}"
        )
    frame = frame.reset_index(allow_duplicates=True) if any(frame.index.names) else frame.copy()
    duplicates = sorted(set(map(str, frame.columns[frame.columns.duplicated()])))
    if duplicates:
        raise UsageError(
            f"more than one column is called {', '.join(duplicates)}; rename or drop one"
        )
    check_columns(frame, (metric, factor, block), COLUMN_ADVICE)
    names = [metric, factor, block, *RESERVED_COLUMNS]
    if len(set(names)) < len(names):
        raise UsageError(
            "metric, factor and block: expected three different columns, and none of"
            f" {', '.join(RESERVED_COLUMNS)}; rename yours"
        )
    frame = frame.assign(**{name: _as_plain_levels(frame[name]) for name in (factor, block)})
    frame = unify_types(frame, factor, block)
    check_one_protocol(frame, ignored_columns=(metric, factor, block))
    column = _parse_metric(frame[metric])
    chosen = choose_rows(frame, metric, factor, block, choice, column)
    notes = {
        "chosen": chosen.notes,
        "has_ambiguous_nan": column.has_ambiguous_nan,
        "ends_with_nan": chosen.ends_with_nan,
    }
    frame = frame.assign(**{metric: column.values}).iloc[chosen.positions]
    frame.attrs |= notes
    frame["status"] = _find_statuses(frame, metric, chosen.is_diverged)
    frame["rerun"] = pd.to_numeric(frame["rerun"]).fillna(0) if "rerun" in frame else 0
    _check_numbers(frame[metric][frame["status"] == "finished"], metric)
    return frame if "weights" in frame else frame.assign(weights=None)


def _find_statuses(
    frame: pd.DataFrame, metric: str, is_diverged: NDArray[np.bool_]
) -> NDArray[np.str_] | pd.Series:
    """Return the status of each run: the one that the table gives, or else that of its metric.

    Args:
        frame: The runs, a row each.
        metric: The column of the metric.
        is_diverged: Whether the metric of each run shows that it diverged.
    """
    is_missing = frame[metric].isna()
    # The first condition that holds decides; `finished` if none does.
    by_metric = np.select([is_diverged, is_missing], ["diverged", "missing"], "finished")
    if "status" not in frame:
        return by_metric
    given = frame["status"].astype(str).str.lower().where(frame["status"].notna(), by_metric)
    # A run that finished with a loss of NaN has diverged. One that finished with an infinite metric
    # keeps its status, and is rejected later.
    return given.mask(is_diverged & (given == "finished") & is_missing, "diverged")


def _parse_metric(column: pd.Series) -> MetricColumn:
    """Convert the metric to float64, and find the rows that show that a run diverged.

    In a numeric column of NumPy, NaN may be either an empty cell or a loss that was NaN, so only
    infinity shows that a run diverged. Other columns distinguish empty cells from NaN.

    Raises:
        UsageError: If a cell is neither empty nor a number, a boolean or the text of one.
    """
    inferred = column.infer_objects()
    if is_numeric_dtype(inferred) and not isinstance(
        inferred.dtype, pd.api.extensions.ExtensionDtype
    ):
        values = inferred.to_numpy(float)
        return MetricColumn(values, np.isinf(values), has_ambiguous_nan=True)
    text = (
        column.map(str, na_action="ignore")
        .astype(object)
        .replace({"True": "1", "False": "0"})
        .str.strip()
    )
    numbers = pd.to_numeric(text, errors="coerce").astype(float)
    unparsed = text[numbers.isna() & column.notna() & (text.str.lower() != "nan")]
    if len(unparsed):
        first_cell = f"index {unparsed.index[0]!r} has {unparsed.iloc[0]!r}"
        raise UsageError(
            f"metric {column.name!r} has cells other than numbers or booleans: {first_cell}; leave"
            " cells without a number empty, or choose another metric="
        )
    values = numbers.to_numpy(float)
    is_diverged = column.notna().to_numpy(bool) & ~np.isfinite(values)
    return MetricColumn(values, is_diverged, has_ambiguous_nan=False)


def _check_numbers(finished: pd.Series, metric: str) -> None:
    """Raise `UsageError` unless every finished run has a metric, of a size below `MAX_METRIC`.

    Args:
        finished: The metric of each finished run.
        metric: The name of the metric.
    """
    # NaN is not below any number, so the negation also selects runs without a metric.
    unusable_values = finished[~(finished.abs() < MAX_METRIC)]
    if len(unusable_values):
        raise UsageError(
            f"{len(unusable_values)} finished run(s) have no {metric} that is finite and below"
            f" {MAX_METRIC:.0e}: index {unusable_values.index[:3].tolist()}; mark them as diverged,"
            " leave out their seeds, or choose another metric="
        )


def _as_plain_levels(column: pd.Series) -> pd.Series:
    """Convert a column of levels or blocks to plain objects; `UsageError` if a cell is empty."""
    if column.isna().any():
        raise UsageError(
            f"column {column.name!r} is empty in {column.isna().sum()} rows; fill or drop them"
        )
    # The conversion removes categories, Arrow's types and nullable types.
    return column.astype(object).infer_objects()


def check_columns(frame: pd.DataFrame, names: Iterable[str], advice: str = "") -> None:
    """Raise a `UsageError` that lists all columns and adds the advice if a column is missing."""
    for name in names:
        if name not in frame:
            columns = textwrap.shorten(", ".join(map(str, frame.columns)) or "none", 900)
            raise UsageError(f"no column {name!r}; the columns are {columns}{advice}")


def check_one_protocol(frame: pd.DataFrame, ignored_columns: Collection[str] = ()) -> None:
    """Raise `UsageError` if runs differ in what they learned, or for how long.

    Differences in `ignored_columns` are allowed, even if these are names of options.
    """
    names = ("experiment", "profile", "frames", "protocol", "options")
    columns = [name for name in names if name in frame and name not in ignored_columns]
    if "options" in columns:  # the column of runs of training functions
        frame = frame.assign(
            options=[_drop_options(text, ignored_columns) for text in frame.options]
        )
    protocols = frame[columns].drop_duplicates()
    if columns and len(protocols) > 1:
        advice = (
            "compare runs of one protocol at a time, or drop columns that do not distinguish"
            " protocols"
        )
        raise UsageError(
            f"the frame mixes {len(protocols)} protocols: {protocols[:3].to_dict('records')};"
            f" {advice}"
        )


def _drop_options(options: object, names: Collection[str]) -> str:
    """Remove options by name from a JSON text; a cell that is not a JSON object stays as it is."""
    if not isinstance(options, (str, bytes)):
        return str(options)
    try:
        return str(
            {name: value for name, value in json.loads(options).items() if name not in names}
        )
    except (ValueError, AttributeError):
        return str(options)


def select_rows(frame: pd.DataFrame, conditions: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Select the rows in which each column, as text, has the given value.

    `conditions` are pairs of a column's name and a value.
    """
    for name, text in conditions:
        check_columns(frame, [name])
        frame = frame[frame[name].astype(str) == text]
    return frame
