"""The smallest change that makes a new setting give an old setting's losses again.

A network trained well under one setting; under another its loss is different, or not a number. Sources
advise to retune the learning rate, the batch size, kernels and strides. `reproduce` looks for the
smallest such change, a flag of the setting included, after which a verdict says `equivalent`.

- Distance: the sum over the parameters of |log2(new / old)| for learning rate, batch size and whatever is
  given as a range; of steps along the sorted list for other numbers; of 1 for anything else.
- Search: nothing changed, then one parameter at a time, nearest first, then combinations: nearest first, or
  where there are too many to list, as a Halton sequence spreads them. What is not nearer than the best so far is
  not trained. So the next trial follows from the losses so far, and the store keeps these: a search that is called
  again goes the same way, through runs that are there, to where it ended.
- One of many changes may look equivalent by luck. So half of the seeds are kept out of the search: a change
  that is equivalent on the others is confirmed there, for the j-th time at the level alpha / 2^j, so that all
  confirmations together err with probability alpha at most. Holm's p over the whole search is reported beside it.
- Trials without hope are pruned, after 3, 6, 12, … seeds. That can only ever reject: a change is called
  equivalent from all its seeds or not at all.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import GpulabError, UsageError
from gpulab.report import Report
from gpulab.report import table as html_table
from gpulab.search.space import Point, Space
from gpulab.settings import Setting
from gpulab.stats.pairs import check_runs
from gpulab.stats.power import DIVERGED_APART
from gpulab.stats.tests import clopper_pearson_upper, holm
from gpulab.stats.verdicts import Verdict, p_text, verdict
from gpulab.training import store as stores
from gpulab.training.functions import TrainingFunction
from gpulab.training.protocol import FACTORS, Specification
from gpulab.training.remote import folder_of
from gpulab.training.seeds import Trainings, check_numbers, check_runs_here

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 3  # seeds of the search, and as many fresh ones
FIRST_LOOK = 3  # seeds after which a trial may be pruned
PRUNED_AT = 0.999  # confidence of the interval that must lie outside the margin before a trial is pruned
WITHIN = ("equivalent", "different but negligible")  # both say that the difference is inside the margin

# The columns of the table from the verdict on the seeds of the search, with what they hold where there is none.
SEARCHED = dict.fromkeys(
    ["decision", "seeds", "diverged", "difference", "low", "high", "p_equivalent", "p_equivalent_holm", "seeds_needed"],
    math.nan,
) | {"decision": "", "seeds": 0, "diverged": 0}
FRESH = ("decision", "seeds", "difference", "p_equivalent")  # the same from fresh seeds, as `fresh_decision` and so on


@dataclass(frozen=True, eq=False)
class Reproduction(Report):
    """What a search for the smallest change found.

    `print(result)` says it in sentences, `result.plot()` draws it, a notebook shows both.

    Attributes:
        table: A row a trial: `changes` in words; a column for each parameter with its value; `distance`;
            `state` (`finished`, `pruned`, `failed`); `decision` of the verdict on the seeds of the search (none
            for a pruned trial), with its `seeds`, `diverged`, `difference` (from the target, mean over seeds),
            interval `low`, `high`, `p_equivalent`, corrected over all trials `p_equivalent_holm`, and where it is
            inconclusive the `seeds_needed` to settle it, as many fresh ones not counted; from the fresh seeds
            `fresh_decision`, `fresh_seeds`, `fresh_difference`, `fresh_p_equivalent` and the level `fresh_alpha`
            that it was held to; `confirmed`; a `note` on why it was pruned or failed.
        original: What each parameter was.
        chosen: The row of the answer; None where nothing worked.
        best: Its changes: of the smallest that was confirmed ({} where nothing need change); where none was, of
            the smallest that was equivalent on the seeds of the search, and `confirmed` is false.
        setting: The new setting; `best_setting` is the same with `best` applied.
        smaller_left: How many points of the space, nearer than the answer, were not tried: 0 is proof, within
            the space; None says that they cannot be counted.
    """

    table: pd.DataFrame
    target: str
    setting: str
    metric: str
    margin: float
    margin_asked: str | float
    alpha: float
    original: dict[str, Any]
    chosen: int | None
    best: dict[str, Any] | None
    best_setting: str | None
    confirmed: bool
    search_verdict: Verdict | None
    fresh_verdict: Verdict | None
    smaller_left: int | None

    @property
    def finding(self) -> str:
        """The answer in sentences, from the numbers of this search."""
        return "\n".join(_sentences(self))

    def __str__(self) -> str:
        return self.finding

    def html(self) -> str:
        """Sentences, table and figure."""
        columns = ["changes", "distance", "state", "decision", "seeds", "diverged", "difference", "p_equivalent_holm"]
        return super().html() + html_table(self.table[[*columns, "confirmed"]]) + self.plot().html()


def reproduce(
    target: pd.DataFrame,
    search: Mapping[str, Sequence[Any]],
    setting: Setting | str,
    train: Callable[..., Any] | str | None = None,
    *,
    metric: str = "final_loss",
    margin: str | float = "0.25sd",
    alpha: float = 0.05,
    trials: int = 30,
    workers: int = 1,
    prune: bool = True,
    store: str | Path | None = None,
    progress: bool = True,
) -> Reproduction:
    """Find the smallest change after which `setting` gives the losses of the runs in `target` again.

    Every run is kept in `store`: a search that was killed goes on where it was when it is called again, and one
    that is done trains nothing. Failed trainings are then tried once more, and a larger `trials` goes further.

    Args:
        target: The runs of the old setting, a row a seed, as from `gpulab.runs` or `seed_runs`: at least 6
            seeds, better 20. The second half of them is kept for confirmation.
        search: What may change: {name: [values]}, or {name: (low, high)} for a range of numbers. A name is an
            option of a setting (`tf32`, `precision`, …; the value None leaves the option out), or something to
            train with: a parameter of `train`, or without it `learning_rate` and the numbers and words among the
            options of the model (`batch_size` of the autoencoder, `kernel_size` of PredNet).
        setting: The new setting.
        train: Trains a network of your own, as `gpulab.train` describes it: its options are what can be changed, and
            their defaults, or what the runs of `target` had instead, are what was trained. A training that raises
            makes the trial fail, and the search goes on. Without it the runs of `target` are trained again as their
            records say.
        metric: The column of `target` to compare by.
        margin: The largest difference of no importance, as for `verdict`.
        alpha: The probability with which a change may be confirmed wrongly.
        trials: How many changes are tried at most.
        workers: How many seeds train at the same time, each in a process of its own (above one, `train` travels
            there by cloudpickle). It changes nothing but the time, if the setting says how many threads compute.
        prune: Whether trials without hope end early.
        store: The folder in which runs are kept, those of `train` by its text and its options; by default
            `$GPULAB_STORE`, or the folder `runs`.
        progress: Whether to show a bar.

    Returns:
        What was tried, and the answer.

    Raises:
        UsageError: For what makes no sense.
        GpulabError: When the setting cannot run here, or every trial failed.

    Examples:
        >>> import tempfile, torch
        >>> def train(seed, setting, learning_rate=0.002):
        ...     x = torch.linspace(-1, 1, 64, dtype=setting.dtype)[:, None]
        ...     net = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(net.parameters(), learning_rate)
        ...     for _ in range(100):
        ...         loss = (net(x) - x).square().mean()
        ...         optimizer.zero_grad(); loss.backward(); optimizer.step()
        ...         yield loss.item()
        >>> from gpulab import seed_runs
        >>> old = seed_runs(train, "cpu", seeds=12, progress=False)
        >>> space = {"learning_rate": [0.001, 0.004], "precision": ["float32"]}
        >>> where = tempfile.mkdtemp()
        >>> found = reproduce(old, space, "cpu:precision=bfloat16", train, store=where, progress=False)
        >>> found.best, found.confirmed
        ({'precision': 'float32'}, True)
    """
    from gpulab.progress import Progress

    check_numbers(trials=trials, workers=workers)
    parsed = Setting.parse(setting)
    wanted = Target(target, metric, margin, alpha)
    training = Training.of_records(wanted.runs, metric) if train is None else Training.of_function(train, wanted.runs)
    space = Space(search, training.originals, parsed)
    check_runs_here(parsed)
    folder = folder_of(stores.default_store() if store is None else store)
    bar = Progress(total=trials * len(wanted.seeds), unit="run", disable=not progress, leave=False)
    with bar, Trainings(workers) as trainings:
        done = _Search(wanted, space, training, folder, prune, trials, trainings, bar)
        done.run()
    return done.result()


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
class _Search:
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
            if note := prune_reason(_row(trial.search_verdict), len(seeds)):
                trial.state, trial.note = "pruned", note
                return
            looked_at *= 2
        trial.search_verdict = self._judge(trial, seeds)
        if _row(trial.search_verdict)["decision"] in WITHIN:
            earlier = sum(other.fresh_alpha is not None for other in self.trials)
            level = self.target.alpha / 2 ** (1 + earlier)
            trial.fresh_verdict = self._judge(trial, self.target.fresh, level)
            trial.fresh_alpha = level
            trial.confirmed = _row(trial.fresh_verdict)["decision"] in WITHIN

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

    def result(self) -> Reproduction:
        """The answer of the trials."""
        table, target = _table(self.space, self.trials), self.target
        confirmed = bool(table.confirmed.any())
        worked = table[table.confirmed if confirmed else (table.state == "finished") & table.decision.isin(WITHIN)]
        answer: dict[str, Any] = dict.fromkeys(("chosen", "best", "best_setting", "search_verdict", "fresh_verdict"))
        if len(worked):
            answer["chosen"] = int(worked.distance.idxmin())
            trial = self.trials[answer["chosen"]]
            answer["best"] = self.space.changes(trial.point)
            answer["best_setting"], _ = self.space.arguments(trial.point)
            answer |= {"search_verdict": trial.search_verdict, "fresh_verdict": trial.fresh_verdict}
        return Reproduction(
            table=table,
            target=target.setting,
            setting=str(self.space.setting),
            metric=target.metric,
            margin=target.margin,
            margin_asked=target.margin_asked,
            alpha=target.alpha,
            original=self.space.original(),
            confirmed=confirmed,
            smaller_left=self._smaller_left(),
            **answer,
        )

    def _smaller_left(self) -> int | None:
        """How many points nearer than the answer were not tried; None where they cannot be counted."""
        limit, tried = self.limit(), [trial.point for trial in self.trials]
        if limit == 0:
            return 0
        points = self.space.points()
        if points is None:
            return None
        return sum(self.space.distance(point) < limit and point not in tried for point in points)


def _table(space: Space, trials: list[Trial]) -> pd.DataFrame:
    """A row a trial, as `Reproduction` says."""
    import pandas as pd

    rows = []
    for number, trial in enumerate(trials):
        row = {"trial": number, "changes": space.words(trial.point), **trial.point}
        row |= {"distance": trial.distance, "state": trial.state}
        row |= SEARCHED | {f"fresh_{name}": SEARCHED[name] for name in FRESH}
        if trial.search_verdict:
            cells = _row(trial.search_verdict)
            row |= {name: cells[name] for name in SEARCHED}
        if trial.state == "pruned":
            row["decision"] = ""
        if trial.fresh_verdict:
            cells = _row(trial.fresh_verdict)
            row |= {f"fresh_{name}": cells[name] for name in FRESH}
        rows.append(row | {"fresh_alpha": trial.fresh_alpha, "confirmed": trial.confirmed, "note": trial.note})
    table = pd.DataFrame(rows).astype({"fresh_alpha": float})
    # A trial that was pruned or failed counts in Holm's correction with p = 1.
    whole = (table.state == "finished") & table.p_equivalent.notna()
    table["p_equivalent_holm"] = holm(list(table.p_equivalent.astype(float).where(whole, 1.0)))
    return table


def _row(verdict: Verdict) -> dict[str, Any]:
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


# --- words -------------------------------------------------------------------------------------------


def _sentences(found: Reproduction) -> Iterator[str]:
    table, losses, under = found.table, f"the losses of {found.target}", f"under {found.setting}"
    if found.chosen is None:
        yield f"No change tried gives {losses} {under} again ({len(table)} tried)."
    else:
        row = table.loc[found.chosen]
        change = f"{row.changes} (distance {row.distance:.3g}; {len(table)} tried)"
        if not found.best:
            doubt = "" if found.confirmed else " (not confirmed)"
            yield f"Nothing need change: {under} {losses} come back as they are{doubt}."
        elif found.confirmed:
            yield f"The smallest change found that gives {losses} {under} again: {change}."
        else:
            yield f"Not confirmed: {change} gave {losses} {under} again on the seeds of the search only."
        yield _evidence(found, row)
    if found.best != {}:
        for row in table[table.distance == 0].itertuples():
            if row.state == "failed":
                yield "With nothing changed, the training failed."
            elif row.diverged:
                yield f"With nothing changed, {row.diverged} of {row.diverged + row.seeds} seeds diverged."
            else:
                interval = "" if math.isnan(row.low) else f" [{row.low:.2g}, {row.high:.2g}]"
                yield f"With nothing changed: {row.decision}, difference {row.difference:.2g}{interval}."
    if parts := list(_confirmed_by_parameter(found)):
        yield f"Confirmed, by what was changed: {'; '.join(parts)}."
    if found.best != {}:
        yield _smaller(found)
    failed = table[table.state == "failed"]
    if len(failed):
        yield f"{len(failed)} trial(s) failed; the first, {failed.changes.iloc[0]}: {failed.note.iloc[0]}."


def _evidence(found: Reproduction, row: Any) -> str:
    searched = (
        f"n the {row.seeds} of the search {row.decision}, equivalence p = {p_text(row.p_equivalent)}, "
        f"{p_text(row.p_equivalent_holm)} after Holm over {len(found.table)} trials."
    )
    if not row.fresh_seeds:
        return f"O{searched}"
    margin = "as asked"
    if isinstance(found.margin_asked, str):
        asked = found.margin_asked.replace("sd", " sd")
        margin = f"{asked} between the target's seeds, at that sd's lower 97.5 % limit"
    return (
        f"On {row.fresh_seeds} seeds that the search had not seen: {row.fresh_decision} within ±{found.margin:.2g} "
        f"({margin}), difference {row.fresh_difference:.2g}, equivalence p = "
        f"{p_text(row.fresh_p_equivalent)} (held to {row.fresh_alpha:.2g}); o{searched}"
    )


def _confirmed_by_parameter(found: Reproduction) -> Iterator[str]:
    """How many changes of each parameter alone were confirmed, and of several together."""
    table = found.table
    changed = {
        name: table[name].notna() if original is None else table[name].map(lambda value, was=original: value != was)
        for name, original in found.original.items()
    }
    count = sum(flags.astype(int) for flags in changed.values())
    groups = {name: flags & (count == 1) for name, flags in changed.items()} | {"several together": count > 1}
    for name, flags in groups.items():
        if flags.any():
            unsettled = int((table.decision[flags] == "inconclusive").sum())
            note = f" ({unsettled} inconclusive)" if unsettled else ""
            yield f"{name} {int(table.confirmed[flags].sum())} of {int(flags.sum())}{note}"


def _smaller(found: Reproduction) -> str:
    """What is known of smaller changes, or where nothing worked, of any."""
    table, kind = found.table[found.table.distance > 0], "change"
    if found.confirmed:
        table, kind = table[table.distance < found.table.distance[found.chosen]], "smaller change"
    unsettled = int(((table.decision == "inconclusive") & (table.state == "finished")).sum())
    words = f"No {kind} was tried in vain"
    if len(table):
        words = f"{len(table)} {kind}{'' if len(table) == 1 else 's'} tried in vain, {unsettled} of them inconclusive"
    if found.smaller_left is None:
        return f"{words}; the space holds more."
    return f"{words}; {found.smaller_left or 'none'} in the space left untried."
