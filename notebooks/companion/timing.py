"""Trustworthy timings: measured in rounds, and withheld if the rounds disagree."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd

from companion.microbenchmarks import count_cores, summarise_rounds, time_in_rounds
from gpulab.settings import Setting

MAX_SPREAD = 0.2  # interquartile range over median; above it, the rounds disagree
MIN_SHARE_OF_CORES = 0.85  # share of the processor time available on a quiet machine
HASHED = bytes(2**20)
TIMED_UNITS = ("s", "images/s")  # of the rows of `measure_speed` that are times or rates
BUSY = "This machine is too busy to measure"


def time_rounds(
    calls: Mapping[str, Callable[[], Any]], setting: Setting | str, rounds: int = 7
) -> pd.DataFrame:
    """Time calls that take turns, under the setting that is already applied.

    Args:
        calls: The functions to time, by name. Each is called twice beforehand.
        setting: The setting of the device whose work is waited for, such as `cpu`.
        rounds: The number of times that each is timed, at least 2.

    Returns:
        A row for each call, as `summarise_times` returns it.

    Examples:
        >>> table = time_rounds({"sum": lambda: sum(range(1000))}, "cpu", rounds=3)
        >>> list(table.index), int(table.rounds.iloc[0])
        (['sum'], 3)
    """
    kind = Setting.parse(setting).kind
    times = time_in_rounds(list(calls.values()), kind, rounds)
    return summarise_times(dict(zip(calls, times, strict=True)))


def summarise_times(times: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Summarise the seconds that each call took in each round.

    Args:
        times: For the name of each call, its seconds in each round; at least 2 rounds.

    Returns:
        A row for each call, with its name as the index: `seconds`, the median over the rounds;
        `fastest`, `lower`, `upper` and `slowest`, the minimum, the quartiles and the maximum;
        `rounds`; and `spread`, the interquartile range over the median.

    Examples:
        >>> summarise_times({"a call": [1.0, 2.0, 4.0]})[["seconds", "spread"]].values.tolist()
        [[2.0, 0.75]]
    """
    rows = [summarise_rounds(seconds) for seconds in times.values()]
    return add_spread(pd.DataFrame(rows, index=pd.Index(list(times))))


def measure_times(
    calls: Mapping[Any, Callable[[], Any]], setting: Setting | str, rounds: int = 7
) -> pd.DataFrame:
    """Time calls that take turns, print whether the times can be trusted, and withhold the others.

    Args:
        calls: As for `time_rounds`.
        setting: As for `time_rounds`.
        rounds: As for `time_rounds`.

    Returns:
        The table of `time_rounds`, with a missing number in `seconds` if the rounds of a call
        disagree or other programs use the cores.

    Examples:
        >>> table = measure_times({"sum": lambda: sum(range(1000))}, "cpu", rounds=3)
        T...
        >>> list(table.index)
        ['sum']
    """
    share = share_of_cores()
    table = time_rounds(calls, setting, rounds)
    print(describe_trust(table, share))
    return withhold(table, share)


def withhold_rows(rows: pd.DataFrame, share: float = 1.0) -> pd.DataFrame:
    """Withhold times and rates in a table of `measure_speed`, and print whether the rest is good.

    Runs from several seeds do the same work, so they count as the rounds of one measurement.

    Args:
        rows: A table with the columns of `measure_speed`. Only rows in seconds or in images per
            second are judged.
        share: As for `withhold`.

    Returns:
        The rows, with a missing number in `value` where it is withheld, and with `spread` for all
        rows that are judged.

    Examples:
        >>> columns = ["part", "what", "way", "setting", "unit", "value", "spread"]
        >>> rows = pd.DataFrame(
        ...     [("text", "net", "float32", "cpu", "s", value, None) for value in (1.0, 1.0, 2.0)],
        ...     columns=columns,
        ... )
        >>> withhold_rows(rows).value.tolist()
        This machine is too busy to measure: 1 of 1 times are withheld. Use the recorded times.
        [nan, nan, nan]
    """
    rows = rows.reset_index(drop=True)
    is_timing = rows.unit.isin(TIMED_UNITS) & rows.value.notna()
    work = ["part", "what", "way", "setting", "unit"]
    values = rows[is_timing].groupby(work, sort=False).value
    between = (values.transform("quantile", 0.75) - values.transform("quantile", 0.25)) / (
        values.transform("median")
    )
    timings = rows[is_timing].assign(spread=rows.spread.astype(float).fillna(between))
    print(describe_trust(timings.drop_duplicates(work), share))
    kept = withhold(timings.rename(columns={"value": "seconds"}), share).seconds
    withheld = rows.assign(spread=timings.spread.reindex(rows.index))
    return withheld.assign(value=rows.value.where(~is_timing, kept.reindex(rows.index)))


def add_spread(table: pd.DataFrame) -> pd.DataFrame:
    """Add the column `spread`: the interquartile range of the rounds over their median."""
    return table.assign(spread=(table.upper - table.lower) / table.seconds)


def withhold(
    table: pd.DataFrame, share: float = 1.0, max_spread: float = MAX_SPREAD
) -> pd.DataFrame:
    """Replace times that cannot be trusted by missing numbers.

    Args:
        table: A table with the columns of `time_rounds`.
        share: The share of its cores that this process got, as measured by `share_of_cores`. Below
            0.85, all times are withheld.
        max_spread: The largest spread at which a time is kept.

    Returns:
        The table, with a missing number in `seconds` where a time is withheld. `spread` is kept.

    Examples:
        >>> table = pd.DataFrame({"seconds": [1.0, 1.0], "spread": [0.05, 0.6]})
        >>> withhold(table).seconds.tolist()
        [1.0, nan]
    """
    is_kept = (table.spread <= max_spread) & (share >= MIN_SHARE_OF_CORES)
    return table.assign(seconds=table.seconds.where(is_kept))


def share_of_cores(seconds: float = 0.3) -> float:
    """Measure the share of its cores that this process gets: less than 1 if other programs run.

    For a moment, all cores that the process may use are kept busy. The processor time that was used
    is divided by the time that these cores could have provided, so a quota, as in a container,
    lowers the share as well.

    Examples:
        >>> 0 < share_of_cores(0.02) < 1.5
        True
    """
    cores = count_cores()
    started, used = time.perf_counter(), time.process_time()
    until = started + seconds
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(keep_busy, [until] * cores))
    return (time.process_time() - used) / (cores * (time.perf_counter() - started))


def keep_busy(until: float) -> None:
    """Compute until `time.perf_counter` reaches a time, without blocking other threads."""
    while time.perf_counter() < until:
        hashlib.sha256(HASHED).digest()


def describe_trust(table: pd.DataFrame, share: float, max_spread: float = MAX_SPREAD) -> str:
    """Say in a sentence or two whether the times of a table can be trusted.

    Args:
        table: A table with a column `spread`.
        share: As `share_of_cores` returns it.
        max_spread: As for `withhold`.
    """
    disagree = int((table.spread > max_spread).sum())
    middle = f"The median spread of the rounds is {table.spread.median():.0%}"
    if share < MIN_SHARE_OF_CORES:
        return (
            f"{BUSY}: other programs leave us {share:.0%} of the cores. {middle}. Use the recorded"
            " times."
        )
    if disagree > len(table) / 2:
        return f"{BUSY}: {disagree} of {len(table)} times are withheld. Use the recorded times."
    if disagree:
        return (
            f"{middle}. {disagree} of {len(table)} times are withheld, because their rounds differ"
            f" by more than {max_spread:.0%}."
        )
    return f"{middle}, and the largest {table.spread.max():.0%}. These times can be trusted."


def is_trusted(table: pd.DataFrame, share: float, max_spread: float = MAX_SPREAD) -> bool:
    """Whether we got enough of the cores, and the rounds of at least half of the times agree."""
    agree = float((table.spread <= max_spread).mean())
    return share >= MIN_SHARE_OF_CORES and agree >= 0.5


def rows_for_record(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Convert a table to rows for a JSON record, in which a withheld number is null.

    Examples:
        >>> rows_for_record(pd.DataFrame({"seconds": [0.5, float("nan")]}))
        [{'seconds': 0.5}, {'seconds': None}]
    """
    values = table.astype(object).where(table.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in values.to_dict("records")]
