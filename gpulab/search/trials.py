"""The trials of a search: what is compared, what is trained, and when a change is pruned or confirmed."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import UsageError
from gpulab.stats.pairs import check_runs
from gpulab.stats.power import DIVERGED_APART
from gpulab.stats.tests import clopper_pearson_upper
from gpulab.stats.verdicts import verdict
from gpulab.store import listing as stores
from gpulab.store.factors import FACTORS
from gpulab.training.functions import TrainingFunction
from gpulab.training.protocol import Specification

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 3  # seeds of the search, and as many fresh ones
FIRST_LOOK = 3  # seeds after which a trial may be pruned
PRUNED_AT = 0.999  # confidence of the interval that must lie outside the margin before a trial is pruned
WITHIN = ("equivalent", "different but negligible")  # both say that the difference is inside the margin

# What a row of the table has from the verdict on the seeds of the search, and where there is none; from fresh seeds
# the columns `fresh_decision` and so on.
SEARCHED = {"decision": "", "seeds": 0, "diverged": 0} | dict.fromkeys(
    ("difference", "low", "high", "p_equivalent", "p_equivalent_holm", "seeds_needed"), math.nan
)
FRESH = ("decision", "seeds", "difference", "p_equivalent")
UNTRIED = (
    {"state": "finished", **SEARCHED}
    | {f"fresh_{name}": SEARCHED[name] for name in FRESH}
    | {"fresh_alpha": math.nan, "confirmed": False, "note": ""}
)


class Target:
    """The runs of the old setting: their losses, the seeds that search and the fresh ones, and the margin."""

    def __init__(self, runs: Any, metric: str, margin: str | float, alpha: float) -> None:
        self.runs = checked_target(runs, metric)
        self.metric, self.margin_asked, self.alpha = metric, margin, alpha
        self.losses = {int(seed): float(loss) for seed, loss in zip(self.runs.seed, self.runs[metric], strict=True)}
        seeds, half = list(self.losses), len(self.losses) // 2
        self.seeds, self.fresh = seeds[:-half], seeds[-half:]
        # All of the target's seeds say how large the margin is: they were there before any search.
        self.margin = float(self.compared(dict.fromkeys(seeds, 0.0))["margin"])
        if not self.margin > 0:
            raise UsageError(f"margin {margin!r}: the target's losses are all the same; give a number above 0")

    def compared(self, losses: Mapping[int, float], alpha: float | None = None) -> dict[str, Any]:
        """The row of a verdict on losses of the new setting, paired with these runs on the seeds that both have."""
        import pandas as pd

        rows = [("target", *run) for run in self.losses.items()] + [("changed", *run) for run in losses.items()]
        frame = pd.DataFrame(rows, columns=["runs", "seed", self.metric])
        frame["status"] = np.where(np.isfinite(frame[self.metric]), "finished", "diverged")
        answer = verdict(frame, self.metric, "runs", "seed", self.margin_asked, alpha or self.alpha, "target")
        return answer.table.to_dict("records")[0]


def checked_target(target: Any, metric: str) -> pd.DataFrame:
    """The first runs of one setting, one a seed, all finished; `UsageError` for anything else."""
    runs = check_runs(target, metric, "setting", "seed")
    first = runs[runs["rerun"] == 0]
    if len(settings := sorted(set(first.setting))) > 1:
        raise UsageError(f"target has runs of {', '.join(settings)}; choose those of one setting")
    if first.seed.duplicated().any():
        raise UsageError(f"target has seed {first.seed[first.seed.duplicated()].iloc[0]} more than once")
    if seeds := ", ".join(map(str, first.seed[~np.isfinite(first[metric])])):
        raise UsageError(f"target: no finite {metric} for seed {seeds}; leave diverged runs out")
    if len(first) < 2 * FEWEST:
        raise UsageError(
            f"target has {len(first)} seed(s); at least {2 * FEWEST} are needed, half to search and half to confirm"
        )
    return first.sort_values("seed", ignore_index=True)


# --- what is trained ---------------------------------------------------------------------------------------


def recorded_training(runs: pd.DataFrame, metric: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `gpulab.train`, but setting and seed, that made runs of gpulab's own networks, by their records.

    With them what can be changed: the learning rate, and numbers and words among the options of the model.
    """
    from gpulab.models import MODELS

    if "path" not in runs:
        raise UsageError("target does not say how it was trained (no column 'path'); give train=")
    record = stores.record_of(runs.iloc[0])
    if record["experiment"] not in MODELS or metric not in record["summary"]:
        raise UsageError(
            f"target: {metric} of {record['experiment']!r} cannot be trained again from its record; give train="
        )
    for name in FACTORS.keys() & set(runs.columns):
        if len(values := runs[name].drop_duplicates()) > 1:
            raise UsageError(f"target mixes runs with {name} {', '.join(map(str, values))}; choose those of one")
    arguments = replace(Specification.from_record(record), rerun=0).arguments() | {"keep_weights": False}
    parameters = inspect.signature(MODELS[record["experiment"]]).parameters
    model = {name: parameter.default for name, parameter in parameters.items()} | arguments["model_options"]
    numbers_and_words = {name: value for name, value in model.items() if isinstance(value, str | int | float)}
    return arguments, {"learning_rate": arguments["learning_rate"]} | numbers_and_words


def own_training(train: Callable[..., Any] | str, runs: pd.DataFrame) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same for a function of the user's: its options as they made the runs, or else its defaults."""
    function = TrainingFunction(train)
    options: dict[str, Any] = {}
    if "options" in runs and runs.experiment.iloc[0] == function.name:
        recorded, defaults = json.loads(runs.options.iloc[0]), function.plain_options({})
        options = {n: value for n, value in recorded.items() if n in defaults and value != defaults[n]}
    return {"net": function, "rerun": 0, "model_options": options}, function.options | options


def changed_arguments(arguments: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a training with the learning rate or options of the model changed."""
    job, options = dict(arguments), {**arguments["model_options"], **changes}
    if "learning_rate" in job and "learning_rate" in options:
        job["learning_rate"] = options.pop("learning_rate")
    return job | {"model_options": options}


# --- a trial ----------------------------------------------------------------------------------------------


def verdicts_on(target: Target, losses_of: Callable[[Sequence[int]], dict[int, float]], earlier: int) -> dict[str, Any]:
    """What a row of the table has of a change: looks at its losses, and where they are equivalent, at fresh ones.

    `earlier` is how many changes had fresh seeds before this one, which says to what level it is held.
    """
    seeds, looked_at, losses = target.seeds, FIRST_LOOK, dict[int, float]()
    while looked_at < len(seeds):
        losses |= losses_of(seeds[len(losses) : looked_at])
        searched = target.compared(losses)
        if why := prune_reason(searched, len(seeds)):
            return {name: searched[name] for name in SEARCHED} | {"decision": "", "state": "pruned", "note": why}
        looked_at *= 2
    searched = target.compared(losses | losses_of(seeds[len(losses) :]))
    row = {name: searched[name] for name in SEARCHED}
    if searched["decision"] in WITHIN:
        level = target.alpha / 2 ** (1 + earlier)
        fresh = target.compared(losses_of(target.fresh), level)
        row |= {f"fresh_{name}": fresh[name] for name in FRESH}
        row |= {"fresh_alpha": level, "confirmed": fresh["decision"] in WITHIN}
    return row


def prune_reason(row: Mapping[str, Any], seeds: int) -> str:
    """Why a trial, a row of a verdict, cannot become equivalent on so many seeds, or hardly; else empty."""
    from scipy.stats import t

    count, diverged, difference = row["seeds"], row["one_diverged"], row["difference"]
    if diverged and clopper_pearson_upper(diverged, seeds) > DIVERGED_APART:
        return f"{diverged} of {count + diverged} seeds diverged"
    if count < FIRST_LOOK:
        return ""
    reach = t.isf((1 - PRUNED_AT) / 2, count - 1) * row["sd_of_differences"] / math.sqrt(count)
    if abs(difference) - reach <= row["margin"]:
        return ""
    return f"the difference, {difference:.2g} ± {reach:.2g} after {count} seeds, is outside the margin"
