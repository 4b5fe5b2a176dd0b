"""One row for each run of a table that has a row for each epoch or step, as loggers write it.

Such rows are no repetitions, so their mean says nothing about what a run learned. The last row of each run is chosen,
or its best; without a choice the table is refused.
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
    """The words of a text."""
    return frozenset(text.split())


# Words of which the names of counting columns are made: `epoch`, `trainer/global_step`, `time/total_timesteps`.
COUNTED = word_set(
    "epoch epochs step steps iteration iterations iter iters itr timestep timesteps update updates round "
    "rounds generation generations"
)
AMOUNTS = word_set("frames images samples examples tokens sequences batches")  # counted where they are `seen`
SEEN = word_set("seen processed consumed")
QUALIFIERS = word_set(
    "global local trainer train training env environment agent total num n number no of count counter idx "
    "index id current cur optimizer optim opt gradient grad outer inner learner sgd overall absolute abs "
    "simulation sim communication federated server val valid validation eval test"
)
FOLDERS = QUALIFIERS | word_set("time timers progress rollout counters charts metrics")  # before a slash
CLOCKS = frozenset({"timestamp", "wall time", "relative time process", "relative time wall"})
RUN_NAMES = ("run", "run_id", "run_name", "Run", "Name", "ID")  # columns that say which run a row belongs to

LOWER_IS_BETTER = word_set(
    "loss error err mse mae rmse rmsle mape nll perplexity ppl bpb bpc wer cer fid kid ece brier crps regret"
)
HIGHER_IS_BETTER = word_set(
    "acc accuracy auc auroc auprc f precision recall reward return returns score iou miou dice map bleu "
    "rouge psnr ssim r mcc ndcg mrr success"
)
TURNED = word_set("neg negative minus inverse inv")  # words that turn a direction round
PARTS_OF_DATA = word_set(
    "train training val valid validation dev test eval evaluation heldout mean avg average ema smoothed "
    "macro micro weighted epoch step final"
)
MOST_NAMED = 5  # runs in one sentence


@dataclass(frozen=True)
class RowChoice:
    """Which row of a run is compared, where a run has several.

    Attributes:
        last: The counting column whose last value is taken, such as `epoch`; None for none.
        best: The column whose best value is taken, such as `val_loss`; None for none.
        mode: Whether the best is the `min` or the `max`; None where the name of the column says so.
    """

    last: str | None = None
    best: str | None = None
    mode: str | None = None

    def check(self, frame: pd.DataFrame) -> None:
        """Raise `UsageError` for a choice that cannot be made in this table."""
        if self.last is not None and self.best is not None:
            raise UsageError(f"last={self.last!r} and best={self.best!r}: expected one of the two")
        if self.mode is not None and self.mode not in MODES:
            raise UsageError(f"mode={self.mode!r}: expected 'min' or 'max', which of the values of best= is the best")
        if self.mode is not None and self.best is None:
            raise UsageError(f"mode={self.mode!r} says which value is the best: give the column by best=")
        for argument, name in (("last", self.last), ("best", self.best)):
            if name is not None and name not in frame:
                columns = ", ".join(map(str, frame.columns))
                raise UsageError(f"{argument}={name!r}: no such column; there are {columns:.900}")


AS_THEY_ARE = RowChoice()


@dataclass(frozen=True)
class Metric:
    """The metric's column as numbers, and what is known of those that are not finite.

    Attributes:
        values: The numbers, shape (rows,).
        lost: Which rows say that the run diverged: infinity, or NaN where an empty cell is another thing.
        may_be_lost: Whether a NaN may stand for an empty cell and for a loss that was NaN.
    """

    values: NDArray[np.float64]
    lost: NDArray[np.bool_]
    may_be_lost: bool


@dataclass(frozen=True)
class Chosen:
    """The rows that are compared.

    Attributes:
        positions: Their positions in the table.
        lost: Which of them say that the run diverged.
        notes: Sentences on what was chosen.
    """

    positions: NDArray[np.intp]
    lost: NDArray[np.bool_]
    notes: tuple[str, ...] = ()


def choose_rows(frame: pd.DataFrame, metric: str, factor: str, block: str, choice: RowChoice, column: Metric) -> Chosen:
    """Choose a row for each run where runs have several; all rows where they have one, or are mere repetitions.

    Args:
        frame: The table.
        metric: The column that is compared.
        factor: The column whose levels are compared.
        block: The column of what they are compared on.
        choice: Which row is taken.
        column: The metric's column as numbers.

    Raises:
        UsageError: For rows that count epochs or steps without a choice, and for a choice that cannot be made.
    """
    choice.check(frame)
    table = _RunTable(frame, metric, factor, block, column)
    counters = table.counters(np.arange(len(frame)))
    if choice.last in counters:
        counters.remove(choice.last)
    if choice.last is not None:
        counters.insert(0, choice.last)
    everything = Chosen(np.arange(len(frame)), column.lost)
    if not table.is_repeated(everything.positions) or not (counters or choice.best):
        return everything
    lost = table.find_lost(counters)
    filled = table.without_blanks(lost)
    table.check_one_run_each(filled)
    if not table.is_repeated(filled):
        note = f"{len(frame):,} rows, of which each {factor} and {block} has one that has {metric}, were read."
        return Chosen(filled, lost[filled], (note,))
    if choice.best is not None:
        return table.best_rows(choice.best, _direction(choice.best, choice.mode), choice.mode, counters, lost, filled)
    if choice.last is not None:
        return table.last_rows(choice.last, counters, lost, filled)
    differing = table.counters(filled)
    if differing:
        table.refuse(differing, filled)
    return Chosen(filled, lost[filled])


class _RunTable:
    """A table whose rows belong to runs: those with the same level, block and number of the repetition."""

    def __init__(self, frame: pd.DataFrame, metric: str, factor: str, block: str, column: Metric) -> None:
        self.frame, self.column = frame, column
        self.metric, self.factor, self.block = metric, factor, block
        keys = [frame[factor].to_numpy(object), frame[block].to_numpy(object)]
        if "rerun" in frame:
            keys.append(pd.to_numeric(frame["rerun"], errors="coerce").fillna(0).to_numpy(object))
        rows = pd.DataFrame(dict(enumerate(keys)))
        self.runs: NDArray[np.intp] = rows.groupby(list(rows), sort=False, dropna=False).ngroup().to_numpy()

    def is_repeated(self, positions: NDArray[np.intp]) -> bool:
        """Whether some run has several of these rows."""
        return bool(pd.Series(self.runs[positions]).duplicated().any())

    def counters(self, positions: NDArray[np.intp]) -> list[str]:
        """The counting columns in which rows of one run differ, epochs before steps, and clocks last."""
        found = []
        for name in map(str, self.frame.columns):
            if name in (self.metric, self.factor, self.block) or not (is_counter(name) or is_clock(name)):
                continue
            values = self.numbers(name)
            if values is not None and self._differs(values, positions):
                found.append(name)
        return sorted(found, key=lambda name: (is_clock(name), "epoch" not in name.lower()))

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        """A column as numbers, NaN where it is empty; None for a column of anything else."""
        column = self.frame[name]
        if is_bool_dtype(column.dtype):
            return None
        values = pd.to_numeric(column, errors="coerce")
        if not is_numeric_dtype(values) or (values.isna() & column.notna() & (column.astype(str) != "nan")).any():
            return None
        numbers: NDArray[np.float64] = values.astype(float).to_numpy(float, na_value=np.nan)
        return numbers

    def _differs(self, values: NDArray[np.float64], positions: NDArray[np.intp]) -> bool:
        """Whether a column has several values in the rows of some run."""
        return bool((pd.Series(values[positions]).groupby(self.runs[positions]).nunique() > 1).any())

    def find_lost(self, counters: Sequence[str]) -> NDArray[np.bool_]:
        """Which rows say that their run diverged.

        A NaN that may be an empty cell says so at the end of a run, where other runs have numbers at the same epoch.
        """
        lost = self.column.lost.copy()
        if "status" in self.frame:
            has_diverged = self.frame["status"].astype(str).str.lower() == "diverged"
            lost |= has_diverged.to_numpy(bool) & ~np.isfinite(self.column.values)
        at = self.numbers(counters[0]) if counters else None
        if at is None or not self.column.may_be_lost:
            return lost
        is_finite = np.isfinite(self.column.values)
        last_finite = np.full(self.runs.max() + 1, -np.inf)
        np.maximum.at(last_finite, self.runs[is_finite], np.nan_to_num(at[is_finite], nan=-np.inf))
        is_after = at > last_finite[self.runs]
        lost |= np.isnan(self.column.values) & is_after & np.isin(at, at[is_finite])
        return lost

    def without_blanks(self, lost: NDArray[np.bool_]) -> NDArray[np.intp]:
        """The rows in which the metric is given, and one row of each run that has none of them."""
        is_given = np.isfinite(self.column.values) | lost
        has_any = np.zeros(self.runs.max() + 1, bool)
        has_any[self.runs[is_given]] = True
        is_last = ~pd.Series(self.runs).duplicated(keep="last").to_numpy()
        return np.flatnonzero(is_given | (is_last & ~has_any[self.runs]))

    def check_one_run_each(self, positions: NDArray[np.intp]) -> None:
        """Raise `UsageError` where rows of one level and block belong to several runs by name."""
        for name in RUN_NAMES:
            if name not in self.frame or name in (self.factor, self.block) or self.numbers(name) is not None:
                continue
            column = self.frame[name].astype(str).to_numpy(object)[positions]
            counts = pd.Series(column).groupby(self.runs[positions]).nunique()
            if (counts > 1).any():
                run = counts.index[counts > 1][0]
                rows = positions[self.runs[positions] == run]
                named = list(dict.fromkeys(self.frame[name].astype(str).iloc[rows]))
                differing = self._differing_settings(rows, besides=(*RUN_NAMES, *self.counters(positions)))
                why = f", which differ in {', '.join(differing[:4])}" if differing else ""
                listed = ", ".join(named[:3]) + ", …" * (len(named) > 3)
                raise UsageError(
                    f"{self._run_text(rows[0])} has {len(named)} runs{why} ({name} {listed}); "
                    f"keep the rows of one, by --where or in pandas"
                )

    def _differing_settings(self, rows: NDArray[np.intp], besides: Iterable[str]) -> list[str]:
        """Columns that do not change inside a run by its name, and differ between the runs of these rows."""
        part = self.frame.iloc[rows]
        names = [
            name for name in map(str, part.columns) if name not in (self.metric, self.factor, self.block, *besides)
        ]
        texts = part[names].astype(str)
        by_run = texts.groupby(next(part[name].astype(str) for name in RUN_NAMES if name in part))
        return [name for name in names if texts[name].nunique() > 1 and (by_run[name].nunique() == 1).all()]

    def refuse(self, counters: list[str], positions: NDArray[np.intp]) -> None:
        """Raise `UsageError` that says in which column the rows of a run differ, and both ways to choose one."""
        values = self.numbers(counters[0])
        assert values is not None
        counts = pd.Series(values[positions]).groupby(self.runs[positions]).nunique()
        rows = positions[self.runs[positions] == counts.idxmax()]
        others = f" and {', '.join(counters[1:3])}" if counters[1:] else ""
        mode = "" if direction_of(self.metric) else ", mode='min'"
        flag = "" if direction_of(self.metric) else " --mode min"
        raise UsageError(
            f"{self._run_text(rows[0])} has {len(rows)} rows, which differ in {counters[0]!r}{others}, and are not "
            f"averaged: take the last by last={counters[0]!r} (--last {counters[0]}), or the best by "
            f"best={self.metric!r}{mode} (--best {self.metric}{flag})"
        )

    def last_rows(
        self, last: str, counters: Sequence[str], lost: NDArray[np.bool_], filled: NDArray[np.intp]
    ) -> Chosen:
        """Choose the last row of each run by a counting column, and among several of them by the others."""
        at = self._counted(last, filled)
        latest = self._latest(filled, at, counters)
        is_empty = ~np.isfinite(self.column.values[latest])  # several empty cells say no more than one
        latest = latest[~(is_empty & pd.Series(self.runs[latest]).duplicated(keep="last").to_numpy())]
        what = f"the last {last} that has {self.metric}"
        return Chosen(latest, lost[latest], (self._note(what, last, at, latest, lost[latest]),))

    def _counted(self, name: str, positions: NDArray[np.intp]) -> NDArray[np.float64]:
        """A column as numbers; `UsageError` where it does not count these rows."""
        at = self.numbers(name)
        if at is None:
            raise UsageError(f"last={name!r}: expected a column of numbers, such as epochs or steps")
        is_given = np.isfinite(self.column.values[positions])
        if len(empty := positions[np.isnan(at[positions]) & is_given]):
            others = [other for other in self.counters(positions) if other != name]
            advice = f"choose {', '.join(map(repr, others))}, or fill them" if others else "fill them"
            raise UsageError(f"last={name!r} is empty in {len(empty)} rows that have a {self.metric}: {advice}")
        return at

    def _latest(self, positions: NDArray[np.intp], at: NDArray[np.float64], others: Sequence[str]) -> NDArray[np.intp]:
        """Of these rows those with the largest count in each run; where there are several, by the other columns."""
        columns = [at, *(values for name in others if (values := self.numbers(name)) is not None)]
        for column in columns:
            counts = pd.Series(np.nan_to_num(column[positions], nan=-np.inf))
            largest = counts.groupby(self.runs[positions]).transform("max")
            positions = positions[(counts == largest).to_numpy()]
        return positions

    def best_rows(
        self,
        best: str,
        mode: Mode,
        asked_mode: str | None,
        counters: Sequence[str],
        lost: NDArray[np.bool_],
        filled: NDArray[np.intp],
    ) -> Chosen:
        """Choose the row of each run at which another column, or the metric itself, is best."""
        values = self.column.values if best == self.metric else self.numbers(best)
        if values is None:
            raise UsageError(f"best={best!r}: expected a column of numbers")
        signed = np.where(np.isfinite(values), values if mode == "min" else -values, np.inf)
        chosen: list[NDArray[np.intp]] = []
        lost = lost.copy()
        ended: list[int] = []  # a row of each run that diverged after its best
        of_run = pd.Series(np.arange(len(self.runs))).groupby(self.runs).indices
        filled_of_run = pd.Series(filled).groupby(self.runs[filled]).apply(lambda rows: rows.to_numpy())
        for run, rows in of_run.items():
            candidates = filled_of_run[run]
            if not np.isfinite(signed[rows]).any():  # it diverged, or ended, before it had one
                has_lost = lost[candidates]
                chosen.append(candidates[has_lost][:1] if has_lost.any() else candidates[-1:])
                self._check_ended(best, candidates[-1:], has_lost.any())
                continue
            at_best = rows[np.argmin(signed[rows])]
            taken = self._rows_at(at_best, candidates, counters)
            if not len(taken):
                where = f" {counters[0]} {self._count(counters[0], at_best)}" if counters else " that row"
                raise UsageError(
                    f"{self._run_text(at_best)} has no {self.metric} at{where}, where {best} is best: "
                    "take the last by last=, or the best of another column"
                )
            if lost[candidates].any() and not lost[taken].any():
                ended.append(int(at_best))
            chosen.append(taken)
        positions = np.sort(np.concatenate(chosen))
        how, better = DIRECTIONS[mode]
        reason = "" if asked_mode else f" ({better} is better, by its name)"
        what, counter = f"the row with the {how} {best}{reason}", counters[0] if counters else ""
        at = self.numbers(counter) if counter else None
        notes = [self._note(what, counter, at, positions, lost[positions])]
        if ended:
            notes.append(f"Diverged after their best row: {', '.join(map(self._run_text, ended[:MOST_NAMED]))}.")
        return Chosen(positions, lost[positions], tuple(notes))

    def _check_ended(self, best: str, row: NDArray[np.intp], has_diverged: bool) -> None:
        """Raise `UsageError` for a run that did not diverge and has no value to choose by."""
        if not has_diverged and np.isfinite(self.column.values[row]).all():
            raise UsageError(f"{self._run_text(row[0])} has no {best}: leave it out, or take the last by last=")

    def _rows_at(self, at_best: int, candidates: NDArray[np.intp], counters: Sequence[str]) -> NDArray[np.intp]:
        """The row itself where it has the metric, or else the last of the same epoch or step."""
        if at_best in candidates:
            return np.array([at_best])
        at = self.numbers(counters[0]) if counters else None
        if at is None:
            return np.array([], np.intp)
        same = candidates[at[candidates] == at[at_best]]
        return self._latest(same, at, counters[1:]) if len(same) else same

    def _note(
        self,
        what: str,
        counter: str,
        at: NDArray[np.float64] | None,
        positions: NDArray[np.intp],
        lost: NDArray[np.bool_],
    ) -> str:
        """Say what was taken of each run, and where runs ended before the others."""
        text = f"Of {len(self.frame):,} rows {what} was taken for each {self.factor} and {self.block}"
        if at is None or not np.isfinite(at[positions]).any():
            return f"{text}."
        positions = positions[np.isfinite(at[positions]) & (np.isfinite(self.column.values[positions]) | lost)]
        order = positions[np.argsort(at[positions], kind="stable")]
        low, high = self._count(counter, order[0]), self._count(counter, order[-1])
        if low == high:
            return f"{text}: {counter} {high}."
        if not what.startswith("the last"):
            return f"{text}: {counter} {low} to {high}."
        early = positions[at[positions] < at[order[-1]]]
        named = [f"{self._run_text(row)} ({self._count(counter, row)})" for row in early[:MOST_NAMED]]
        more = f" and {len(early) - MOST_NAMED} more" if len(early) > MOST_NAMED else ""
        return f"{text}: {counter} {high}, but an earlier one for {', '.join(named)}{more}."

    def _count(self, counter: str, row: int) -> str:
        """A count, such as the number of an epoch, or a date."""
        value = self.frame[counter].iloc[row]
        try:
            return f"{float(value):.12g}"
        except (TypeError, ValueError):
            return str(value)

    def _run_text(self, row: int) -> str:
        """What a run is called: its level and its block."""
        level = level_text(self.frame[self.factor].iloc[row], self.factor)
        name = level if "=" in level else f"{self.factor} {level}"
        return f"{name} {self.block} {self.frame[self.block].iloc[row]}"


def growing_columns(frame: pd.DataFrame, factor: str, block: str, names: Iterable[str]) -> list[str]:
    """Those of some columns that grow from row to row in each level and block, and so may count along a training.

    >>> table = pd.DataFrame({"setting": list("aaabbb"), "seed": 0, "episode": [0, 1, 2] * 2, "x": [3, 1, 2] * 2})
    >>> growing_columns(table, "setting", "seed", ["episode", "x"])
    ['episode']
    """
    groups = frame.groupby([factor, block], sort=False)
    numeric = [name for name in names if is_numeric_dtype(frame[name]) and not is_bool_dtype(frame[name])]
    return [name for name in numeric if (groups[name].diff().dropna() > 0).all() and groups.size().max() > 2]


def is_counter(name: str) -> bool:
    """Whether a column counts epochs, steps or the like, by its name.

    >>> [is_counter(name) for name in ("epoch", "_step", "trainer/global_step", "time/total_timesteps", "frames_seen")]
    [True, True, True, True, True]
    >>> [is_counter(name) for name in ("train_loss_epoch", "steps_per_second", "step_time", "max_epochs", "frames")]
    [False, False, False, False, False]
    """
    *folders, last = re.split(r"[/.]", name)
    words = _words(last)
    is_count = bool(words & COUNTED) or bool(words & SEEN and words & AMOUNTS)
    is_plain = words <= COUNTED | QUALIFIERS | SEEN | AMOUNTS
    return is_count and is_plain and all(_words(folder) <= FOLDERS | COUNTED for folder in folders)


def is_clock(name: str) -> bool:
    """Whether a column says when a row was written, by its name.

    >>> [is_clock(name) for name in ("_timestamp", "Wall time", "Relative Time (Process)", "time")]
    [True, True, True, False]
    """
    return " ".join(re.findall("[a-z]+", name.lower())) in CLOCKS


def direction_of(name: str) -> Mode | None:
    """Whether the lowest or the highest value of a metric is the best, by its name; None where that does not tell.

    >>> [direction_of(name) for name in ("val_loss", "eval/accuracy", "test_f1_macro", "valLoss", "acc@1", "mAP50")]
    ['min', 'max', 'max', 'min', 'max', 'max']
    >>> [direction_of(name) for name in ("neg_loss", "accuracy_drop", "val_metric", "loss_score", "log_likelihood")]
    [None, None, None, None, None]
    """
    words = [re.sub(r"\d+$", "", word) for word in _word_list(name)]
    while len(words) > 1 and words[-1] in PARTS_OF_DATA:
        words.pop()
    lower, higher = LOWER_IS_BETTER & set(words), HIGHER_IS_BETTER & set(words)
    if not words or TURNED & set(words) or (lower and higher) or re.search(r"\b1 ?-", name):
        return None
    if words[-1] in LOWER_IS_BETTER:
        return "min"
    return "max" if words[-1] in HIGHER_IS_BETTER else None


def _direction(best: str, mode: str | None) -> Mode:
    """The direction as asked for, or by the name; `UsageError` where that does not tell."""
    asked = next((known for known in MODES if known == mode), None)
    found = asked or direction_of(best)
    if found is None:
        raise UsageError(
            f"best={best!r}: its name does not tell whether lower or higher is better; "
            "give mode='min' or mode='max' (--mode min)"
        )
    return found


def _word_list(name: str) -> list[str]:
    """The words that a column's name is made of, in small letters."""
    return [word.lower() for word in re.findall(r"[A-Za-z]+\d*", re.sub(r"([a-z]{2})([A-Z])", r"\1 \2", name))]


def _words(name: str) -> set[str]:
    return set(_word_list(name))
