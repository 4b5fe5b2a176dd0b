"""From runs to pairs: runs of one protocol under two levels of a factor, put side by side by seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


def check_one_protocol(frame: pd.DataFrame, besides: str = "") -> None:
    """Raise `UsageError` when a frame mixes runs that learned different things or for different times.

    `besides` is a column that may vary: the factor under comparison.
    """
    columns = [name for name in ("experiment", "profile", "frames", "protocol") if name in frame and name != besides]
    protocols = frame[columns].drop_duplicates()
    if columns and len(protocols) > 1:
        raise UsageError(f"the frame mixes {protocols.to_dict('records')}; compare runs of one protocol at a time")


def check_runs(frame: pd.DataFrame, metric: str, factor: str, block: str) -> pd.DataFrame:
    """A copy with the metric in float64, and `status`, `rerun` and `weights` where they were missing.

    Raises `UsageError` for columns that are missing, not numeric or incomplete, and for mixed protocols.
    """
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    for name in (metric, factor, block):
        if name not in frame:
            raise UsageError(f"no column {name!r}; there are {', '.join(map(str, frame.columns))}")
        if name != metric and frame[name].isna().any():
            raise UsageError(f"column {name!r} is empty in {frame[name].isna().sum()} rows; fill or drop them")
    if not (is_numeric_dtype(frame[metric]) or is_bool_dtype(frame[metric].dropna().infer_objects())):
        raise UsageError(f"metric {metric!r} is of type {frame[metric].dtype}; expected numbers or booleans")
    check_one_protocol(frame, besides=factor)
    frame = frame.assign(**{metric: frame[metric].astype("Float64").to_numpy(float, na_value=math.nan)})
    finite = np.isfinite(frame[metric])
    defaults = {"status": np.where(finite, "finished", "diverged"), "rerun": 0, "weights": None}
    frame = frame.assign(**{name: value for name, value in defaults.items() if name not in frame})
    if len(numberless := frame[~finite & (frame["status"] != "diverged")]):
        raise UsageError(
            f"{len(numberless)} finished run(s) have no finite {metric}: index {numberless.index[:3].tolist()}; "
            "mark them as diverged or leave their seeds out"
        )
    return frame


@dataclass(frozen=True, eq=False)
class Pairs:
    """Runs of the levels of a factor beside those of a reference level on the same seeds.

    `levels` are the others, in the order of the frame; `runs` the rows that are compared, first runs; `losses`
    the metric of the finished reference runs; `table` and `reruns` as `Verdict.pairs` and `Verdict.reruns`.
    """

    factor: str
    reference: Any
    levels: list[Any]
    runs: pd.DataFrame
    losses: np.ndarray
    table: pd.DataFrame
    reruns: pd.DataFrame

    def differences(self, level: Any) -> np.ndarray:
        """Level minus reference where both finished, shape (pairs,)."""
        return self.table.difference[self.table[self.factor] == level].dropna().to_numpy(float)


def pair(frame: pd.DataFrame, metric: str, factor: str, block: str, reference: Any) -> Pairs:
    """Put the runs of a frame beside those of the reference; `UsageError` for what cannot be compared."""
    frame = check_runs(frame, metric, factor, block)
    first = frame[frame["rerun"] == 0]
    repeated = first[first.duplicated([factor, block], keep=False)]
    if len(repeated):
        machines = sorted(set(repeated.machine.astype(str))) if "machine" in repeated else []
        raise UsageError(
            f"{factor} {repeated[factor].iloc[0]!r} {block} {repeated[block].iloc[0]} was run more than once"
            + (
                f", on {', '.join(machines)}; compare one machine's runs at a time"
                if len(machines) > 1
                else "; keep one row for each, or number repetitions in the column `rerun`"
            )
        )
    levels = list(dict.fromkeys(first[factor]))
    if not levels:
        raise UsageError(f"no runs to compare{f' with {reference!r}' if reference is not None else ''}")
    if reference is None:
        reference = "cpu" if "cpu" in levels else levels[0]
    elif reference not in levels:
        raise UsageError(f"no runs under {reference!r}; there are {sorted(map(str, levels))}")
    is_reference = frame[factor] == reference
    base = frame[is_reference & (frame["rerun"] == 0)]

    def beside(runs: pd.DataFrame) -> pd.DataFrame:
        """A row per run of a level and block that the reference has, too."""
        columns = [block, metric, "status", "weights"]
        both = runs[[factor, *columns]].merge(base[columns], on=block, suffixes=("", "_base"))
        diverged, base_diverged = both.status == "diverged", both.status_base == "diverged"
        table = both[[factor, block]].assign(
            reference=both[f"{metric}_base"],
            other=both[metric],
            difference=(both[metric] - both[f"{metric}_base"]).where(~diverged & ~base_diverged),
            reference_diverged=base_diverged,
            other_diverged=diverged,
            same_bits=(both.weights == both.weights_base) & both.weights.notna(),
        )
        return table.sort_values(block, kind="stable", ignore_index=True)

    return Pairs(
        factor,
        reference,
        [level for level in levels if level != reference],
        first,
        base.loc[base.status != "diverged", metric].to_numpy(float),
        beside(first[first[factor] != reference]),
        beside(frame[is_reference & (frame["rerun"] > 0)]),
    )
