"""Selection of one row for each run from a table with a row for each epoch or step.

Loggers write such tables. The rows of one run are not repetitions, so their mean says nothing about
what the run learned. The user chooses the last or the best row of each run; without a choice the
table is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from gpulab.errors import UsageError
from gpulab.wording import level_text

Mode = Literal["min", "max"]  # whether the lowest or the highest value of a column is the best
MODES: tuple[Mode, ...] = get_args(Mode)
DIRECTIONS: dict[Mode, tuple[str, str]] = {"min": ("lowest", "lower"), "max": ("highest", "higher")}


def word_set(text: str) -> frozenset[str]:
    """Split a text into its words."""
    return frozenset(text.split())


# Words in the names of columns that count, such as `epoch`, `trainer/global_step` and
# `time/total_timesteps`.
COUNTER_WORDS = word_set(
    "epoch epochs step steps iteration iterations iter iters itr timestep timesteps update updates"
    " round rounds generation generations"
)
# A name with one of these words is a counter only if it also has one of `SEEN_WORDS`, as
# `frames_seen` has.
AMOUNT_WORDS = word_set("frames images samples examples tokens sequences batches")
SEEN_WORDS = word_set("seen processed consumed")
# Further words that the name of a counting column may have. No others are allowed.
QUALIFIER_WORDS = word_set(
    "global local trainer train training env environment agent total num n number no of count"
    " counter idx index id current cur optimizer optim opt gradient grad outer inner learner sgd"
    " overall absolute abs simulation sim communication federated server val valid validation eval"
    " test"
)
# Words that may precede a slash in a metric's name.
FOLDER_WORDS = QUALIFIER_WORDS | word_set("time timers progress rollout counters charts metrics")
CLOCK_NAMES = frozenset({"timestamp", "wall time", "relative time process", "relative time wall"})
# Columns that may say which run a row belongs to.
RUN_NAME_COLUMNS = (
    "run",
    "run_id",
    "run_name",
    "Run",
    "Name",
    "ID",
)

LOWER_IS_BETTER = word_set(
    "loss error err mse mae rmse rmsle mape nll perplexity ppl bpb bpc wer cer fid kid ece brier"
    " crps regret"
)
HIGHER_IS_BETTER = word_set(
    "acc accuracy auc auroc auprc f precision recall reward return returns score iou miou dice map"
    " bleu rouge psnr ssim r mcc ndcg mrr success"
)
INVERTING_WORDS = word_set("neg negative minus inverse inv")  # words that reverse a direction
# Words at the end of a metric's name that do not affect its direction, as in `loss_epoch`.
SUBSET_WORDS = word_set(
    "train training val valid validation dev test eval evaluation heldout mean avg average ema"
    " smoothed macro micro weighted epoch step final"
)
MAX_NAMED_RUNS = 5  # runs in one sentence


@dataclass(frozen=True)
class RowChoice:
    """The user's choice of the row that is compared if a run has several.

    Attributes:
        last: A counting column, such as `epoch`: the row with its largest value is taken.
        best: A column, such as `val_loss`: the row with its best value is taken.
        mode: Whether the best value is the `min` or the `max`; None to infer it from the column's
            name.
    """

    last: str | None = None
    best: str | None = None
    mode: str | None = None

    def check(self, frame: pd.DataFrame) -> None:
        """Raise `UsageError` if the choice contradicts itself or names a column that is missing."""
        if self.last is not None and self.best is not None:
            raise UsageError(
                f"last={self.last!r} and best={self.best!r}: expected only one of the two"
            )
        if self.mode is not None and self.mode not in MODES:
            raise UsageError(
                f"mode={self.mode!r}: expected 'min' or 'max', depending on which value of best= is"
                " the best"
            )
        if self.mode is not None and self.best is None:
            raise UsageError(
                f"mode={self.mode!r} is used only with best=: give the column as best="
            )
        for argument, column in (("last", self.last), ("best", self.best)):
            if column is not None and column not in frame:
                columns = ", ".join(map(str, frame.columns))
                raise UsageError(
                    f"{argument}={column!r}: no such column; the columns are {columns:.900}"
                )


ALL_ROWS = RowChoice()


@dataclass(frozen=True)
class MetricColumn:
    """The metric's column as numbers, and which of them say that a run diverged.

    Attributes:
        values: The numbers, shape (rows,).
        is_diverged: Whether the value of a row shows that the run diverged. Infinity does. NaN does
            if it can be told from an empty cell.
        has_ambiguous_nan: Whether NaN may be either an empty cell or a loss that was NaN.
    """

    values: NDArray[np.float64]
    is_diverged: NDArray[np.bool_]
    has_ambiguous_nan: bool


@dataclass(frozen=True)
class ChosenRows:
    """The rows that are compared.

    Attributes:
        positions: The positions of the rows in the table.
        is_diverged: Whether each of these rows shows that the run diverged.
        notes: Sentences on what was chosen.
    """

    positions: NDArray[np.intp]
    is_diverged: NDArray[np.bool_]
    notes: tuple[str, ...] = ()


def choose_rows(
    frame: pd.DataFrame,
    metric: str,
    factor: str,
    block: str,
    choice: RowChoice,
    column: MetricColumn,
) -> ChosenRows:
    """Choose one row for each run whose rows are epochs or steps.

    All rows are kept if no run has several, or if there is no counting column and no best row is
    requested: several rows of a run are then repetitions.

    Args:
        frame: The table.
        metric: The column that is compared.
        factor: The column whose levels are compared.
        block: The column that pairs the runs of different levels, such as the seed.
        choice: Which row is taken.
        column: The metric's column as numbers.

    Raises:
        UsageError: If rows differ in a counting column and there is no choice, or if the choice
            cannot be made in this table.
    """
    choice.check(frame)
    table = _RunTable(frame, metric, factor, block, column)
    counters = table.counters(np.arange(len(frame)))
    # The column of `last` comes first. It may be one that is not a counter by its name.
    if choice.last in counters:
        counters.remove(choice.last)
    if choice.last is not None:
        counters.insert(0, choice.last)
    all_rows = ChosenRows(np.arange(len(frame)), column.is_diverged)
    has_one_row_each = not table.is_repeated(all_rows.positions)
    are_repetitions = not counters and not choice.best
    if has_one_row_each or are_repetitions:
        return all_rows
    is_diverged = table.find_diverged(counters)
    filled_rows = table.rows_with_metric(is_diverged)
    table.check_one_run_each(filled_rows)
    if not table.is_repeated(filled_rows):
        note = (
            f"{len(frame):,} rows were read. For each {factor} and {block}, one of them has"
            f" {metric}."
        )
        return ChosenRows(filled_rows, is_diverged[filled_rows], (note,))
    if choice.best is not None:
        mode = _choose_direction(choice.best, choice.mode)
        return table.best_rows(choice.best, mode, choice.mode, counters, is_diverged, filled_rows)
    if choice.last is not None:
        return table.last_rows(choice.last, counters, is_diverged, filled_rows)
    differing_counters = table.counters(filled_rows)
    if differing_counters:
        table.refuse(differing_counters, filled_rows)
    return ChosenRows(filled_rows, is_diverged[filled_rows])


class _RunTable:
    """A table whose rows belong to runs, identified by level, block and repetition.

    Attributes:
        runs: The number of the run to which each row belongs, shape (rows,).
        frame, metric, factor, block, column: As in `choose_rows`.
    """

    def __init__(
        self, frame: pd.DataFrame, metric: str, factor: str, block: str, column: MetricColumn
    ) -> None:
        self.frame = frame
        self.column = column
        self.metric = metric
        self.factor = factor
        self.block = block
        keys = [frame[factor].to_numpy(object), frame[block].to_numpy(object)]
        if "rerun" in frame:
            keys.append(pd.to_numeric(frame["rerun"], errors="coerce").fillna(0).to_numpy(object))
        key_table = pd.DataFrame(dict(enumerate(keys)))
        # Rows with equal keys belong to the same run. Runs are numbered as they first occur.
        groups = key_table.groupby(list(key_table), sort=False, dropna=False)
        self.runs: NDArray[np.intp] = groups.ngroup().to_numpy()

    def is_repeated(self, positions: NDArray[np.intp]) -> bool:
        """Return whether some run has more than one of these rows."""
        return bool(pd.Series(self.runs[positions]).duplicated().any())

    def counters(self, positions: NDArray[np.intp]) -> list[str]:
        """List the counting columns that vary within a run, epochs first and clocks last."""
        counters = []
        for name in map(str, self.frame.columns):
            has_role = name in (self.metric, self.factor, self.block)
            counts_by_name = is_counter(name) or is_clock(name)
            if has_role or not counts_by_name:
                continue
            values = self.numbers(name)
            if values is not None and self._varies_within_runs(values, positions):
                counters.append(name)
        # False is sorted before True.
        return sorted(counters, key=lambda name: (is_clock(name), "epoch" not in name.lower()))

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        """Return a column as numbers, with NaN for empty cells, or None if it is not numeric.

        A column of booleans counts as not numeric.
        """
        column = self.frame[name]
        if is_bool_dtype(column.dtype):
            return None
        values = pd.to_numeric(column, errors="coerce")
        # A cell that is not empty and cannot be converted, apart from the text "nan".
        is_text = values.isna() & column.notna() & (column.astype(str) != "nan")
        if not is_numeric_dtype(values) or is_text.any():
            return None
        numbers: NDArray[np.float64] = values.astype(float).to_numpy(float, na_value=np.nan)
        return numbers

    def _varies_within_runs(self, values: NDArray[np.float64], positions: NDArray[np.intp]) -> bool:
        """Return whether a column has several values in the rows of some run."""
        return bool(
            (pd.Series(values[positions]).groupby(self.runs[positions]).nunique() > 1).any()
        )

    def find_diverged(self, counters: Sequence[str]) -> NDArray[np.bool_]:
        """Return for each row whether it shows that its run diverged.

        It does if its metric is infinite, or if its metric is not finite and its `status` is
        `diverged`. If NaN may be an empty cell, NaN counts only in rows after the last finite value
        of the run, and only at epochs (or steps) at which some row has a finite value.
        """
        is_diverged = self.column.is_diverged.copy()
        if "status" in self.frame:
            has_diverged = self.frame["status"].astype(str).str.lower() == "diverged"
            is_diverged |= has_diverged.to_numpy(bool) & ~np.isfinite(self.column.values)
        counts = self.numbers(counters[0]) if counters else None
        if counts is None or not self.column.has_ambiguous_nan:
            return is_diverged
        is_finite = np.isfinite(self.column.values)
        # For each run, the largest epoch (or step) at which its metric is finite.
        last_finite = np.full(self.runs.max() + 1, -np.inf)
        np.maximum.at(
            last_finite, self.runs[is_finite], np.nan_to_num(counts[is_finite], nan=-np.inf)
        )
        is_nan = np.isnan(self.column.values)
        is_after_last_finite = counts > last_finite[self.runs]
        # Epochs at which no run has a value may be those at which the metric is not computed.
        is_at_used_count = np.isin(counts, counts[is_finite])
        is_diverged |= is_nan & is_after_last_finite & is_at_used_count
        return is_diverged

    def rows_with_metric(self, is_diverged: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Find the rows that have a metric, and the last row of each run that has none.

        Rows that show that their run diverged count as rows with a metric.
        """
        has_value = np.isfinite(self.column.values) | is_diverged
        run_has_value = np.zeros(self.runs.max() + 1, bool)  # by the number of the run
        run_has_value[self.runs[has_value]] = True
        is_last_of_run = ~pd.Series(self.runs).duplicated(keep="last").to_numpy()
        return np.flatnonzero(has_value | (is_last_of_run & ~run_has_value[self.runs]))

    def check_one_run_each(self, positions: NDArray[np.intp]) -> None:
        """Raise `UsageError` if rows of one level and block have several names of runs.

        A column of names that is numeric is ignored.
        """
        for name in RUN_NAME_COLUMNS:
            if name not in self.frame or name in (self.factor, self.block):
                continue
            is_numeric = self.numbers(name) is not None
            if is_numeric:
                continue
            column = self.frame[name].astype(str).to_numpy(object)[positions]
            counts = pd.Series(column).groupby(self.runs[positions]).nunique()
            if (counts > 1).any():
                run = counts.index[counts > 1][0]
                rows = positions[self.runs[positions] == run]
                run_names = list(dict.fromkeys(self.frame[name].astype(str).iloc[rows]))
                ignored = (*RUN_NAME_COLUMNS, *self.counters(positions))
                differing_columns = self._differing_settings(rows, ignored)
                difference = (
                    f", which differ in {', '.join(differing_columns[:4])}"
                    if differing_columns
                    else ""
                )
                shown_names = ", ".join(run_names[:3])
                if len(run_names) > 3:
                    shown_names += ", …"
                raise UsageError(
                    f"{self._run_text(rows[0])} has {len(run_names)} runs{difference} ({name}"
                    f" {shown_names}); keep the rows of one, with --where or in pandas"
                )

    def _differing_settings(
        self, rows: NDArray[np.intp], ignored_columns: Iterable[str]
    ) -> list[str]:
        """List the columns that differ between the named runs of these rows, but not within one."""
        selected_rows = self.frame.iloc[rows]
        ignored = (self.metric, self.factor, self.block, *ignored_columns)
        names = [name for name in map(str, selected_rows.columns) if name not in ignored]
        texts = selected_rows[names].astype(str)
        run_name_column = next(name for name in RUN_NAME_COLUMNS if name in selected_rows)
        texts_by_run = texts.groupby(selected_rows[run_name_column].astype(str))
        return [
            name
            for name in names
            if texts[name].nunique() > 1 and (texts_by_run[name].nunique() == 1).all()
        ]

    def refuse(self, counters: list[str], positions: NDArray[np.intp]) -> None:
        """Raise a `UsageError` that names the differing columns and the two ways to choose a row.

        The example in the message is the run with the most values of the first column.
        """
        values = self.numbers(counters[0])
        assert values is not None
        counts = pd.Series(values[positions]).groupby(self.runs[positions]).nunique()
        rows = positions[self.runs[positions] == counts.idxmax()]
        further_counters = f" and {', '.join(counters[1:3])}" if counters[1:] else ""
        mode_argument = "" if direction_of(self.metric) else ", mode='min'"
        mode_option = "" if direction_of(self.metric) else " --mode min"
        raise UsageError(
            f"{self._run_text(rows[0])} has {len(rows)} rows, which differ in"
            f" {counters[0]!r}{further_counters} and are not averaged: take the last row with"
            f" last={counters[0]!r} (--last {counters[0]}), or the best with"
            f" best={self.metric!r}{mode_argument} (--best {self.metric}{mode_option})"
        )

    def last_rows(
        self,
        last: str,
        counters: Sequence[str],
        is_diverged: NDArray[np.bool_],
        filled_rows: NDArray[np.intp],
    ) -> ChosenRows:
        """Choose the last row of each run by the column `last`; `counters` resolve ties."""
        counts = self._counter_values(last, filled_rows)
        chosen_rows = self._rows_with_largest_count(filled_rows, counts, counters)
        # Of several rows of a run, those without a finite metric are dropped, except the last row.
        is_empty = ~np.isfinite(self.column.values[chosen_rows])
        is_followed = pd.Series(self.runs[chosen_rows]).duplicated(keep="last").to_numpy()
        chosen_rows = chosen_rows[~(is_empty & is_followed)]
        description = f"the last {last} with {self.metric}"
        note = self._describe_choice(
            description,
            last,
            counts,
            chosen_rows,
            is_diverged[chosen_rows],
            names_early_runs=True,
        )
        return ChosenRows(chosen_rows, is_diverged[chosen_rows], (note,))

    def _counter_values(self, name: str, positions: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return a counting column as numbers.

        Raises:
            UsageError: If the column is not numeric, or is empty in one of these rows that has a
                metric.
        """
        counts = self.numbers(name)
        if counts is None:
            raise UsageError(
                f"last={name!r}: expected a column of numbers, such as epochs or steps"
            )
        has_value = np.isfinite(self.column.values[positions])
        n_empty = np.count_nonzero(np.isnan(counts[positions]) & has_value)
        if n_empty:
            alternatives = [
                repr(counter) for counter in self.counters(positions) if counter != name
            ]
            advice = (
                f"choose {', '.join(alternatives)}, or fill them" if alternatives else "fill them"
            )
            raise UsageError(
                f"last={name!r} is empty in {n_empty} rows that have a {self.metric}: {advice}"
            )
        return counts

    def _rows_with_largest_count(
        self,
        positions: NDArray[np.intp],
        counter_values: NDArray[np.float64],
        tie_breakers: Sequence[str],
    ) -> NDArray[np.intp]:
        """Find the rows of each run with the largest count; the tie breakers resolve ties.

        Empty cells count as the smallest value. Rows that are equal in all columns are all kept.
        """
        for values in (counter_values, *map(self.numbers, tie_breakers)):
            if values is None:
                continue
            counts = pd.Series(np.nan_to_num(values[positions], nan=-np.inf))
            largest = counts.groupby(self.runs[positions]).transform("max")
            positions = positions[(counts == largest).to_numpy()]
        return positions

    def best_rows(
        self,
        best: str,
        mode: Mode,
        given_mode: str | None,
        counters: Sequence[str],
        is_diverged: NDArray[np.bool_],
        filled_rows: NDArray[np.intp],
    ) -> ChosenRows:
        """Choose the row of each run at which the column `best` has its best value.

        If that row has no metric, the last row with a metric at the same epoch or step is taken. A
        run without any finite value of `best` keeps its first row that shows that it diverged, or
        else its last row.

        Raises:
            UsageError: If `best` is not numeric, if a run has no metric at its best row, or if a
                finished run has no value of `best`.
        """
        values = self.column.values if best == self.metric else self.numbers(best)
        if values is None:
            raise UsageError(f"best={best!r}: expected a column of numbers")
        # The values with the sign changed for `max`, so that the smallest is always the best.
        signed = np.where(np.isfinite(values), values if mode == "min" else -values, np.inf)
        chosen_rows: list[NDArray[np.intp]] = []  # for each run, one or more equal rows
        diverged_later: list[int] = []  # the best row of each run that diverged at another row
        # All rows of each run, and those with a metric. Every run has at least one of the latter.
        rows_by_run = pd.Series(np.arange(len(self.runs))).groupby(self.runs).indices
        filled_by_run = (
            pd.Series(filled_rows)
            .groupby(self.runs[filled_rows])
            .apply(lambda rows: rows.to_numpy())
        )
        for run, rows in rows_by_run.items():
            candidates = filled_by_run[run]
            if not np.isfinite(signed[rows]).any():  # the run has no value of `best`
                diverged_rows = candidates[is_diverged[candidates]]
                has_diverged = len(diverged_rows) > 0
                self._check_ended(best, candidates[-1:], has_diverged)
                chosen_rows.append(diverged_rows[:1] if has_diverged else candidates[-1:])
                continue
            best_row = rows[np.argmin(signed[rows])]
            rows_at_best = self._rows_at(best_row, candidates, counters)
            if not len(rows_at_best):
                position = (
                    f" {counters[0]} {self._count_text(counters[0], best_row)}"
                    if counters
                    else " that row"
                )
                raise UsageError(
                    f"{self._run_text(best_row)} has no {self.metric} at{position}, where {best} is"
                    " best: take the last row with last=, or give another column as best="
                )
            if is_diverged[candidates].any() and not is_diverged[rows_at_best].any():
                diverged_later.append(int(best_row))
            chosen_rows.append(rows_at_best)
        positions = np.sort(np.concatenate(chosen_rows))
        superlative, comparative = DIRECTIONS[mode]
        reason = "" if given_mode else f" ({comparative} is better, judging by its name)"
        description = f"the row with the {superlative} {best}{reason}"
        counter = counters[0] if counters else ""
        counts = self.numbers(counter) if counter else None
        notes = [
            self._describe_choice(
                description,
                counter,
                counts,
                positions,
                is_diverged[positions],
                names_early_runs=False,
            )
        ]
        if diverged_later:
            named_runs = ", ".join(map(self._run_text, diverged_later[:MAX_NAMED_RUNS]))
            notes.append(f"Diverged after their best row: {named_runs}.")
        return ChosenRows(positions, is_diverged[positions], tuple(notes))

    def _check_ended(self, best: str, row: NDArray[np.intp], has_diverged: bool) -> None:
        """Raise `UsageError` if a run without values of `best` has a metric and did not diverge."""
        if not has_diverged and np.isfinite(self.column.values[row]).all():
            raise UsageError(
                f"{self._run_text(row[0])} has no {best}: leave out the run, or take the last"
                " row with last="
            )

    def _rows_at(
        self, best_row: int, candidates: NDArray[np.intp], counters: Sequence[str]
    ) -> NDArray[np.intp]:
        """Find the row with the metric that belongs to the best row of a run.

        This is the best row itself if it has a metric, and otherwise the last candidate at the same
        epoch or step. The result is empty if there is no such candidate. Of several rows that are
        equal in all counters, all are returned.
        """
        if best_row in candidates:
            return np.array([best_row])
        counts = self.numbers(counters[0]) if counters else None
        if counts is None:
            return np.array([], np.intp)
        same_count = candidates[counts[candidates] == counts[best_row]]
        if not len(same_count):
            return same_count
        return self._rows_with_largest_count(same_count, counts, counters[1:])

    def _describe_choice(
        self,
        description: str,
        counter: str,
        counts: NDArray[np.float64] | None,
        positions: NDArray[np.intp],
        is_diverged: NDArray[np.bool_],
        names_early_runs: bool,
    ) -> str:
        """Describe which rows were chosen, and at which counts, for a note.

        Args:
            description: Which row of each run was chosen.
            counter: The counting column.
            counts: The numbers in this column; None if there is no such column, so that the text
                has no counts.
            positions: The chosen rows.
            is_diverged: Whether each chosen row shows that its run diverged.
            names_early_runs: Whether the runs that ended earlier than others are named.
        """
        text = (
            f"From {len(self.frame):,} rows, {description} was taken for each {self.factor} and"
            f" {self.block}"
        )
        if counts is None or not np.isfinite(counts[positions]).any():
            return f"{text}."
        has_metric = np.isfinite(self.column.values[positions]) | is_diverged
        counted_rows = positions[np.isfinite(counts[positions]) & has_metric]
        ordered_rows = counted_rows[np.argsort(counts[counted_rows], kind="stable")]
        last_row = ordered_rows[-1]
        low = self._count_text(counter, ordered_rows[0])
        high = self._count_text(counter, last_row)
        if low == high:
            return f"{text}: {counter} {high}."
        if not names_early_runs:
            return f"{text}: {counter} {low} to {high}."
        early_rows = counted_rows[counts[counted_rows] < counts[last_row]]
        shown_runs = [
            f"{self._run_text(row)} ({self._count_text(counter, row)})"
            for row in early_rows[:MAX_NAMED_RUNS]
        ]
        early_text = ", ".join(shown_runs)
        if len(early_rows) > MAX_NAMED_RUNS:
            early_text += f" and {len(early_rows) - MAX_NAMED_RUNS} more"
        return f"{text}: {counter} {high}, but an earlier one for {early_text}."

    def _count_text(self, counter: str, row: int) -> str:
        """Format a cell of a counting column, such as the number of an epoch or a date."""
        value = self.frame[counter].iloc[row]
        try:
            return f"{float(value):.12g}"
        except (TypeError, ValueError):
            return str(value)

    def _run_text(self, row: int) -> str:
        """Name the run of a row by its level and its block, such as `setting cuda seed 3`."""
        level = level_text(self.frame[self.factor].iloc[row], self.factor)
        name = level if "=" in level else f"{self.factor} {level}"
        return f"{name} {self.block} {self.frame[self.block].iloc[row]}"


def growing_columns(
    frame: pd.DataFrame, factor: str, block: str, names: Iterable[str]
) -> list[str]:
    """List the columns that grow from row to row in each level and block, and so may count steps.

    Only numeric columns are considered. A growing column is listed only if some level and block has
    more than two rows, since two values may grow by chance.

    >>> table = pd.DataFrame(
    ...     {"setting": list("aaabbb"), "seed": 0, "episode": [0, 1, 2] * 2, "x": [3, 1, 2] * 2}
    ... )
    >>> growing_columns(table, "setting", "seed", ["episode", "x"])
    ['episode']
    """
    groups = frame.groupby([factor, block], sort=False)
    numeric = [
        name for name in names if is_numeric_dtype(frame[name]) and not is_bool_dtype(frame[name])
    ]
    return [
        name
        for name in numeric
        if (groups[name].diff().dropna() > 0).all() and groups.size().max() > 2
    ]


def is_counter(name: str) -> bool:
    """Return whether a column counts epochs, steps or the like, judging by its name.

    The name must have a word such as `epoch`, or words such as `frames` and `seen`. All its other
    words, and those of the folders before a slash or a point, must be known qualifiers.

    >>> [
    ...     is_counter(name)
    ...     for name in (
    ...         "epoch",
    ...         "_step",
    ...         "trainer/global_step",
    ...         "time/total_timesteps",
    ...         "frames_seen",
    ...     )
    ... ]
    [True, True, True, True, True]
    >>> [
    ...     is_counter(name)
    ...     for name in (
    ...         "train_loss_epoch",
    ...         "steps_per_second",
    ...         "step_time",
    ...         "max_epochs",
    ...         "frames",
    ...     )
    ... ]
    [False, False, False, False, False]
    """
    *folders, column_name = re.split(r"[/.]", name)
    words = _word_set(column_name)
    is_count = bool(words & COUNTER_WORDS) or bool(words & SEEN_WORDS and words & AMOUNT_WORDS)
    has_only_known_words = words <= COUNTER_WORDS | QUALIFIER_WORDS | SEEN_WORDS | AMOUNT_WORDS
    return (
        is_count
        and has_only_known_words
        and all(_word_set(folder) <= FOLDER_WORDS | COUNTER_WORDS for folder in folders)
    )


def is_clock(name: str) -> bool:
    """Return whether a column says when a row was written, judging by its name.

    >>> [is_clock(name) for name in ("_timestamp", "Wall time", "Relative Time (Process)", "time")]
    [True, True, True, False]
    """
    return " ".join(re.findall("[a-z]+", name.lower())) in CLOCK_NAMES


def direction_of(name: str) -> Mode | None:
    """Infer from the name of a metric whether the lowest or the highest value is best.

    The last word that is not one of `SUBSET_WORDS` decides. The result is None if this word is
    unknown, if the name has words for both directions, or if it has a word such as `neg` or `1 -`.

    >>> [
    ...     direction_of(name)
    ...     for name in ("val_loss", "eval/accuracy", "test_f1_macro", "valLoss", "acc@1", "mAP50")
    ... ]
    ['min', 'max', 'max', 'min', 'max', 'max']
    >>> [
    ...     direction_of(name)
    ...     for name in ("neg_loss", "accuracy_drop", "val_metric", "loss_score", "log_likelihood")
    ... ]
    [None, None, None, None, None]
    """
    words = [re.sub(r"\d+$", "", word) for word in _word_list(name)]  # `mAP50` is read as `map`
    while len(words) > 1 and words[-1] in SUBSET_WORDS:
        words.pop()
    is_inverted = INVERTING_WORDS & set(words) or re.search(r"\b1 ?-", name)
    has_both_directions = LOWER_IS_BETTER & set(words) and HIGHER_IS_BETTER & set(words)
    if not words or is_inverted or has_both_directions:
        return None
    if words[-1] in LOWER_IS_BETTER:
        return "min"
    return "max" if words[-1] in HIGHER_IS_BETTER else None


def _choose_direction(best: str, mode: str | None) -> Mode:
    """Return the requested mode, or infer it from the column's name; `UsageError` if unclear."""
    # None if no mode was requested; an unknown one has been rejected before.
    valid_mode = next((candidate for candidate in MODES if candidate == mode), None)
    direction = valid_mode or direction_of(best)
    if direction is None:
        raise UsageError(
            f"best={best!r}: its name does not show whether lower or higher is better; "
            "give mode='min' or mode='max' (--mode min)"
        )
    return direction


def _word_list(name: str) -> list[str]:
    """Split a column's name into its words, in lower case.

    A capital letter after two small letters begins a new word: `valLoss` has the words `val` and
    `loss`, `mAP50` is one word.
    """
    return [
        word.lower()
        for word in re.findall(r"[A-Za-z]+\d*", re.sub(r"([a-z]{2})([A-Z])", r"\1 \2", name))
    ]


def _word_set(name: str) -> set[str]:
    """Split a column's name into the set of its words, in lower case."""
    return set(_word_list(name))
