"""From runs to pairs: runs of one protocol under two levels of a factor, put side by side by seed."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


def check_one_protocol(frame: pd.DataFrame, besides: str = "") -> None:
    """Raise `UsageError` where runs learned different things or for different times; the column `besides` may vary."""
    names = ("experiment", "profile", "frames", "protocol", "options")
    columns = [name for name in names if name in frame and name != besides]
    if "options" in frame:  # of trainings of the user's own
        given = (json.loads(text) if isinstance(text, str) else {} for text in frame.options)
        frame = frame.assign(options=[str({n: v for n, v in each.items() if n != besides}) for each in given])
    protocols = frame[columns].drop_duplicates()
    if columns and len(protocols) > 1:
        raise UsageError(f"the frame mixes {protocols.to_dict('records')}; compare runs of one protocol at a time")


def check_runs(frame: pd.DataFrame, metric: str, factor: str, block: str) -> pd.DataFrame:
    """A copy with the metric in float64, and `status`, `rerun` and `weights`; `UsageError` for nonsense."""
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
        which = f"{len(numberless)} finished run(s) have no finite {metric}: index {numberless.index[:3].tolist()}"
        raise UsageError(f"{which}; mark them as diverged or leave their seeds out")
    return frame


def pair(
    frame: pd.DataFrame, metric: str, factor: str, block: str, reference: Any
) -> tuple[Any, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The reference, the first runs, their pairs with those of the reference, and its pairs with its reruns."""
    frame = check_runs(frame, metric, factor, block)
    runs = frame[frame["rerun"] == 0]
    if len(repeated := runs[runs.duplicated([factor, block], keep=False)]):
        advice = "; keep one row for each, or number repetitions in the column `rerun`"
        if "machine" in repeated and len(machines := sorted(set(repeated.machine.astype(str)))) > 1:
            advice = f", on {', '.join(machines)}; compare one machine's runs at a time"
        which = f"{factor} {repeated[factor].iloc[0]!r} {block} {repeated[block].iloc[0]}"
        raise UsageError(f"{which} was run more than once{advice}")
    if not (levels := list(dict.fromkeys(runs[factor]))):
        raise UsageError(f"no runs to compare{f' with {reference!r}' if reference is not None else ''}")
    if reference is None:
        reference = "cpu" if "cpu" in levels else levels[0]
    elif reference not in levels:
        raise UsageError(f"no runs under {reference!r}; there are {sorted(map(str, levels))}")
    columns = [block, metric, "status", "weights"]
    base = runs.loc[runs[factor] == reference, columns]

    def beside_base(others: pd.DataFrame) -> pd.DataFrame:
        both = others[[factor, *columns]].merge(base, on=block, suffixes=("", "_base"))
        diverged, base_diverged = both.status == "diverged", both.status_base == "diverged"
        pairs = both[[factor, block]].assign(
            reference=both[f"{metric}_base"],
            other=both[metric],
            difference=(both[metric] - both[f"{metric}_base"]).where(~diverged & ~base_diverged),
            reference_diverged=base_diverged,
            other_diverged=diverged,
            same_bits=(both.weights == both.weights_base) & both.weights.notna(),
        )
        return pairs.sort_values(block, kind="stable", ignore_index=True)

    reruns = frame[(frame["rerun"] > 0) & (frame[factor] == reference)]
    return reference, runs, beside_base(runs[runs[factor] != reference]), beside_base(reruns)


def finished(runs: pd.DataFrame, metric: str, factor: str, level: Any) -> np.ndarray:
    """The metric of the runs of a level that finished, shape (runs,)."""
    return runs.loc[(runs[factor] == level) & (runs.status != "diverged"), metric].to_numpy(float)
