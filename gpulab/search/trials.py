"""The trials of a search: what is compared, what is trained, and which change is tried next."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import GpulabError, UsageError
from gpulab.search.space import Point, Space
from gpulab.stats.pairs import check_runs
from gpulab.stats.power import DIVERGED_APART
from gpulab.stats.tests import clopper_pearson_upper
from gpulab.stats.verdicts import Verdict, verdict
from gpulab.training import store as stores
from gpulab.training.functions import TrainingFunction
from gpulab.training.protocol import FACTORS, Specification
from gpulab.training.seeds import Trainings

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 3  # seeds of the search, and as many fresh ones
FIRST_LOOK = 3  # seeds after which a trial may be pruned
PRUNED_AT = 0.999  # confidence of the interval that must lie outside the margin before a trial is pruned
WITHIN = ("equivalent", "different but negligible")  # both say that the difference is inside the margin


# --- what is compared, and what is trained ---------------------------------------------------------------


class Target:
    """The runs of the old setting: their losses, the seeds that search and the fresh ones, and the margin."""

    def __init__(self, runs: Any, metric: str, margin: str | float, alpha: float) -> None:
        self.runs = checked_target(runs, metric)
        self.metric, self.margin_asked, self.alpha = metric, margin, alpha
        self.setting = str(self.runs.setting.iloc[0])
        self.losses = {int(seed): float(loss) for seed, loss in zip(self.runs.seed, self.runs[metric], strict=True)}
        seeds, half = list(self.losses), len(self.losses) // 2
        self.seeds, self.fresh = seeds[:-half], seeds[-half:]
        # All of the target's seeds say how large the margin is: they were there before any search.
        self.margin = float(self.verdict(dict.fromkeys(seeds, 0.0)).table.margin.iloc[0])
        if not self.margin > 0:
            raise UsageError(f"margin {margin!r}: the target's losses are all the same; give a number above 0")

    def verdict(self, losses: Mapping[int, float], alpha: float | None = None) -> Verdict:
        """These runs against losses of the new setting, paired on the seeds that both have."""
        import pandas as pd

        rows = [("target", *run) for run in self.losses.items()] + [("changed", *run) for run in losses.items()]
        frame = pd.DataFrame(rows, columns=["runs", "seed", self.metric])
        frame["status"] = np.where(np.isfinite(frame[self.metric]), "finished", "diverged")
        return verdict(
            frame, self.metric, "runs", margin=self.margin_asked, alpha=alpha or self.alpha, reference="target"
        )


def checked_target(target: Any, metric: str) -> pd.DataFrame:
    """The first runs of one setting, one a seed, all finished; `UsageError` for anything else."""
    import pandas as pd

    if isinstance(target, pd.DataFrame) and "setting" not in target:
        target = target.assign(setting="the target")
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


@dataclass
class Training:
    """What a search trains, again and again: arguments of `gpulab.train`, some of which can be changed.

    Attributes:
        arguments: All but setting and seed.
        originals: What can be changed, with what it was: `learning_rate`, where it is among the arguments, and
            options of the model or of the function.
    """

    arguments: dict[str, Any]
    originals: dict[str, Any]

    @classmethod
    def of_records(cls, runs: pd.DataFrame, metric: str) -> Training:
        """One of gpulab's own networks, as the records of runs say."""
        from gpulab.models import MODELS

        if "path" not in runs:
            raise UsageError("target does not say how it was trained (no column 'path'); give train=")
        record = stores.record_of(runs.iloc[0])
        if record["experiment"] not in MODELS or metric not in record["summary"]:
            raise UsageError(
                f"target: {metric} of {record['experiment']!r} cannot be trained again from its record; give train="
            )
        for name in FACTORS.keys() & set(runs.columns):
            if FACTORS[name].of != "model" and len(values := runs[name].drop_duplicates()) > 1:
                raise UsageError(f"target mixes runs with {name} {', '.join(map(str, values))}; choose those of one")
        arguments = replace(Specification.from_record(record), rerun=0).arguments() | {"keep_weights": False}
        parameters = inspect.signature(MODELS[record["experiment"]]).parameters
        model = {name: parameter.default for name, parameter in parameters.items()} | arguments["model_options"]
        numbers_and_words = {name: value for name, value in model.items() if isinstance(value, str | int | float)}
        return cls(arguments, {"learning_rate": arguments["learning_rate"]} | numbers_and_words)

    @classmethod
    def of_function(cls, train: Callable[..., Any] | str, runs: pd.DataFrame) -> Training:
        """A function of the user's, with the options that it made the runs with where these are not its defaults."""
        function = TrainingFunction(train)
        options: dict[str, Any] = {}
        if "options" in runs and runs.experiment.iloc[0] == function.name:
            recorded, defaults = json.loads(runs.options.iloc[0]), function.plain_options({})
            options = {n: value for n, value in recorded.items() if n in defaults and value != defaults[n]}
        arguments = {"net": function, "rerun": 0, "model_options": options}
        return cls(arguments, function.options | options)

    def job(self, setting: str, seed: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `gpulab.train` for one seed, changed."""
        changes = dict(changes)
        job = self.arguments | {"setting": setting, "seed": seed}
        if "learning_rate" in job:
            job["learning_rate"] = changes.pop("learning_rate", job["learning_rate"])
        return job | {"model_options": job["model_options"] | changes}


# --- the search ------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """One point of the space, and what training there gave."""

    point: Point
    distance: float
    losses: dict[int, float] = field(default_factory=dict)  # by seed, NaN for a diverged run
    state: str = "finished"  # or `pruned` or `failed`
    note: str = ""  # why it was pruned or failed
    search_verdict: Verdict | None = None  # on the seeds of the search that were trained
    fresh_verdict: Verdict | None = None
    fresh_alpha: float | None = None  # the level that the fresh seeds were held to
    confirmed: bool = False


@dataclass
class Search:
    """Tries points of the space, until none that is nearer than the best is left or `most` trials are done."""

    target: Target
    space: Space
    training: Training
    store: Path
    prune: bool
    most: int
    trainings: Trainings
    bar: Any
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> None:
        """Do what `trials` then has."""
        for point in self.space.candidates(self.limit):
            if len(self.trials) == self.most:
                return
            per_trial = len(self.target.seeds)  # pruned trials trained less, confirmed ones more
            self.bar.update(len(self.trials) * per_trial - self.bar.n)
            self.bar.set_description(self.space.words(point))
            trial = Trial(point, self.space.distance(point))
            try:
                self._try(trial)
            except Exception as error:  # whatever a function of the user's raises
                trial.note = str(error) if isinstance(error, GpulabError) else f"{type(error).__name__}: {error}"
                trial.state, trial.search_verdict = "failed", None
            self.trials.append(trial)
            best = "none yet" if math.isinf(self.limit()) else f"{self.limit():.3g} away"
            self.bar.set_postfix(best=best)
        if all(trial.state == "failed" for trial in self.trials):
            raise GpulabError(f"every trial failed ({len(self.trials)}); the first: {self.trials[0].note}")

    def limit(self) -> float:
        """The distance of the nearest trial that was confirmed, which a point of interest must stay under."""
        return min((trial.distance for trial in self.trials if trial.confirmed), default=math.inf)

    def _try(self, trial: Trial) -> None:
        """Train the seeds of a trial, with looks in between; where they are equivalent, the fresh ones too."""
        seeds, looked_at = self.target.seeds, FIRST_LOOK
        while self.prune and looked_at < len(seeds):
            trial.search_verdict = self._judge(trial, seeds[:looked_at])
            if note := prune_reason(row_of(trial.search_verdict), len(seeds)):
                trial.state, trial.note = "pruned", note
                return
            looked_at *= 2
        trial.search_verdict = self._judge(trial, seeds)
        if row_of(trial.search_verdict)["decision"] in WITHIN:
            earlier = sum(other.fresh_alpha is not None for other in self.trials)
            level = self.target.alpha / 2 ** (1 + earlier)
            trial.fresh_verdict = self._judge(trial, self.target.fresh, level)
            trial.fresh_alpha = level
            trial.confirmed = row_of(trial.fresh_verdict)["decision"] in WITHIN

    def _judge(self, trial: Trial, seeds: Sequence[int], alpha: float | None = None) -> Verdict:
        """The verdict on these seeds, those of which are trained that this trial has no loss of."""
        setting, changes = self.space.arguments(trial.point)
        unknown = [seed for seed in seeds if seed not in trial.losses]
        jobs = [self.training.job(setting, seed, changes) | {"store": str(self.store)} for seed in unknown]
        for seed, metrics in self.trainings.metrics(jobs):
            if metrics and self.target.metric not in metrics:
                raise GpulabError(f"there is no {self.target.metric!r}; the training gave {', '.join(metrics)}")
            trial.losses[seed] = float(metrics.get(self.target.metric, math.nan))
            self.bar.update()
        return self.target.verdict({seed: trial.losses[seed] for seed in seeds}, alpha)

    def smaller_left(self) -> int | None:
        """How many points nearer than the answer were not tried; None where they cannot be counted."""
        limit, tried = self.limit(), [trial.point for trial in self.trials]
        if limit == 0:
            return 0
        points = self.space.points()
        if points is None:
            return None
        return sum(self.space.distance(point) < limit and point not in tried for point in points)


def row_of(verdict: Verdict) -> dict[str, Any]:
    """What a verdict on one level says, by column."""
    return verdict.table.to_dict("records")[0]


def prune_reason(row: Mapping[str, Any], seeds: int) -> str:
    """Why a trial, a row of a verdict, cannot become equivalent on so many seeds, or very nearly cannot; else empty.

    With one run diverged alone too many, no further seed can help. And when a t interval of the
    difference at 99.9 % lies outside the margin, hardly.
    """
    diverged, trained = row["one_diverged"], row["seeds"] + row["one_diverged"]
    if diverged and clopper_pearson_upper(diverged, seeds) > DIVERGED_APART:
        return f"{diverged} of {trained} seeds diverged"
    if row["seeds"] < FIRST_LOOK:
        return ""
    reach = _reach(row, (1 - PRUNED_AT) / 2)
    if abs(row["difference"]) - reach <= row["margin"]:
        return ""
    return f"the difference, {row['difference']:.2g} ± {reach:.2g} after {row['seeds']} seeds, is outside the margin"


def _reach(row: Mapping[str, Any], tail: float) -> float:
    """Half the t interval of a mean difference."""
    from scipy.stats import t

    return t.isf(tail, row["seeds"] - 1) * row["sd_of_differences"] / math.sqrt(row["seeds"])
