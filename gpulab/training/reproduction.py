"""The smallest change that makes a new setting give an old setting's losses again.

A network trained well under one setting; under another its loss is different, or not a number. Sources
advise to retune the learning rate, the batch size, kernels and strides. `reproduce` looks for the
smallest such change, a flag of the setting included, after which a verdict says `equivalent`.

- Distance: the sum over the parameters of |log2(new / old)| for learning rate, batch size and whatever is
  given as a range; of steps along the sorted list for other numbers; of 1 for anything else.
- Search: nothing changed, then one parameter at a time, nearest first, then combinations: nearest first, or
  where there are too many to list, as a sampler proposes. What is not nearer than the best so far is not trained.
- One of many changes may look equivalent by luck. So half of the seeds are kept out of the search: a change
  that is equivalent on the others is confirmed there, for the j-th time at the level alpha / 2^j, so that all
  confirmations together err with probability alpha at most. Holm's p over the whole search is reported beside it.
- Trials without hope are pruned, after 3, 6, 12, … seeds. That can only ever reject: a change is called
  equivalent from all its seeds or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import GpulabError
from gpulab.report import Report
from gpulab.report import table as html_table
from gpulab.settings import Setting
from gpulab.stats.power import DIVERGED_APART
from gpulab.stats.tests import clopper_pearson_upper, holm
from gpulab.stats.verdicts import Verdict, p_text
from gpulab.training import store as stores
from gpulab.training.functions import optional
from gpulab.training.objective import Records, Trainings, UserFunction, check_numbers, check_runs_here
from gpulab.training.proposals import propose
from gpulab.training.remote import folder_of
from gpulab.training.search import Point, SearchProblem, checked_space, checked_target, key
from gpulab.training.trial_log import LedgerError, Trial, TrialLog

if TYPE_CHECKING:
    import pandas as pd

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
        study: The file with every loss.
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
    study: Path

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
    study: str | Path | None = None,
    progress: bool = True,
) -> Reproduction:
    """Find the smallest change after which `setting` gives the losses of the runs in `target` again.

    Every loss goes at once into the file `study`: a search that was killed goes on where it was when it is
    called again, and one that is done is read. Failed trials are then tried once more, and a larger `trials`
    goes further.

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
        store: The folder for runs and for the study.
        study: The file of the search, by default one in `store` named after what is searched for; that includes
            the text of `train`.
        progress: Whether to show a bar.

    Returns:
        What was tried, and the answer.

    Raises:
        UsageError: For what makes no sense.
        DataError: For a damaged study or one of another search.
        GpulabError: When the setting cannot run here, every trial failed, or the space cannot be listed (it has a
            range, or over 20,000 points) and Optuna is not installed.

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
    runs = checked_target(target, metric)
    objective = Records(runs, metric, store) if train is None else UserFunction(train, metric, runs)
    dimensions = checked_space(search, objective, parsed)
    problem = SearchProblem(runs, metric, margin, alpha, parsed, dimensions, objective, prune)
    check_runs_here(parsed)
    folder = folder_of(stores.default_store() if store is None else store)
    file = folder / f"reproduce-{problem.digest[:10]}.jsonl" if study is None else Path(study)
    if (points := problem.points()) is None:
        optional("optuna")  # before anything trains
    bar = Progress(total=trials * len(problem.seeds), unit="run", disable=not progress, leave=False)
    with bar, TrialLog(file, problem) as log, Trainings(objective.loss, workers) as trainings:
        return _Search(problem, points, log, trainings, bar).run(trials)


@dataclass
class _Search:
    """Tries points of the space, until none that is nearer than the best is left or `trials` are done."""

    problem: SearchProblem
    points: list[Point] | None
    log: TrialLog
    trainings: Trainings
    bar: Any

    def run(self, trials: int) -> Reproduction:
        problem, tried, per_trial = self.problem, self.log.tried, len(self.problem.seeds)
        while len(tried) < trials:
            self.bar.update(len(tried) * per_trial - self.bar.n)  # pruned trials trained less, confirmed ones more
            best, limit = self.best()
            self.bar.set_postfix(best="none yet" if best is None else f"{problem.words(best.point)} ({limit:.3g})")
            if (trial := self._next()) is None:
                break
            try:
                outcome = self._try(trial)
            except LedgerError:
                raise
            except Exception as error:  # whatever a function of the user's raises
                note = str(error) if isinstance(error, GpulabError) else f"{type(error).__name__}: {error}"
                outcome = {"state": "failed", "note": note}
            self.log.end(trial, **outcome)
        if all(trial.state == "failed" for trial in tried):
            raise GpulabError(f"every trial failed ({len(tried)}); the first: {tried[0].note}")
        return self._result()

    def best(self) -> tuple[Trial | None, float | None]:
        """The nearest trial that was confirmed, and its distance, which a point of interest must stay under."""
        confirmed = [trial for trial in self.log.tried if trial.confirmed]
        best = min(confirmed, key=lambda trial: self.problem.distance(trial.point), default=None)
        return best, None if best is None else self.problem.distance(best.point)

    def untried(self, points: Iterable[Point]) -> Iterator[Point]:
        """Those of the points that are not tried yet and nearer than the best."""
        tried, (_, limit) = {key(trial.point) for trial in self.log.tried}, self.best()
        near = (point for point in points if limit is None or self.problem.distance(point) < limit)
        return (point for point in near if key(point) not in tried)

    def _next(self) -> Trial | None:
        """A trial of what was left, nothing changed, one parameter changed, then the nearest or what is proposed."""
        problem, log, (_, limit) = self.problem, self.log, self.best()
        for point in self.untried([*log.left, problem.original(), *problem.alone(), *(self.points or ())]):
            return log.begin(point)
        if self.points is None and limit != 0:
            for number, point in propose(problem, log.tried, limit, log.next_number):
                if list(self.untried([point])):
                    return log.begin(point, number, limit)
        return None

    def _try(self, trial: Trial) -> dict[str, Any]:
        """Train the seeds of a trial, with looks in between; where they are equivalent, the fresh ones too."""
        problem, seeds, size = self.problem, self.problem.seeds, FIRST_LOOK
        while problem.prune and size < len(seeds):
            row = self._judge(trial, seeds[:size])
            if note := prune_reason(row, len(seeds)):
                return {"state": "pruned", "note": note, "violation": _violation(row, problem.alpha)}
            size *= 2
        row = self._judge(trial, seeds)
        if row["decision"] not in WITHIN:
            return {"state": "finished", "violation": _violation(row, problem.alpha)}
        level = problem.alpha / 2 ** (1 + sum(other.fresh_alpha is not None for other in self.log.tried))
        fresh = self._judge(trial, problem.fresh, level)
        confirmed = fresh["decision"] in WITHIN
        violation = 0.0 if confirmed else max(_violation(fresh, level), 0.01)
        return {"state": "finished", "violation": violation, "fresh_alpha": level, "confirmed": confirmed}

    def _judge(self, trial: Trial, seeds: Sequence[int], alpha: float | None = None) -> dict[str, Any]:
        """The verdict on these seeds. Those whose loss is not known are trained; each is written down at once."""
        setting, changes = self.problem.arguments(trial.point)
        self.bar.set_description(self.problem.words(trial.point))
        unknown = [seed for seed in seeds if seed not in trial.losses]
        for seed, loss in self.trainings.results(setting, unknown, changes):
            self.log.add_loss(trial, seed, loss)
            self.bar.update()
        return _row(_verdict(self.problem, trial, seeds, alpha))

    def _result(self) -> Reproduction:
        """The answer, computed anew from the losses that are written down."""
        problem, tried = self.problem, self.log.tried
        table = _table(problem, tried)
        chosen, best, best_setting, search_verdict, fresh_verdict = None, None, None, None, None
        confirmed = bool(table.confirmed.any())
        worked = table[table.confirmed if confirmed else (table.state == "finished") & table.decision.isin(WITHIN)]
        if len(worked):
            chosen = int(worked.distance.idxmin())
            trial = tried[chosen]
            best, (best_setting, _) = problem.changes(trial.point), problem.arguments(trial.point)
            search_verdict = _verdict(problem, trial, problem.seeds)
            if trial.fresh_alpha is not None:
                fresh_verdict = _verdict(problem, trial, problem.fresh, trial.fresh_alpha)
        countable = [] if self.best()[1] == 0 else self.points
        return Reproduction(
            table=table,
            target=problem.target,
            setting=str(problem.setting),
            metric=problem.metric,
            margin=problem.margin,
            margin_asked=problem.margin_asked,
            alpha=problem.alpha,
            original=problem.original(),
            chosen=chosen,
            best=best,
            best_setting=best_setting,
            confirmed=confirmed,
            search_verdict=search_verdict,
            fresh_verdict=fresh_verdict,
            smaller_left=None if countable is None else len(list(self.untried(countable))),
            study=self.log.file,
        )


def _table(problem: SearchProblem, tried: list[Trial]) -> pd.DataFrame:
    """A row a trial, as `Reproduction` says."""
    import pandas as pd

    rows = []
    for number, trial in enumerate(tried):
        row = {"trial": number, "changes": problem.words(trial.point), **trial.point}
        row |= {"distance": problem.distance(trial.point), "state": trial.state}
        row |= SEARCHED | {f"fresh_{name}": SEARCHED[name] for name in FRESH}
        if trial.state != "failed":
            cells = _row(_verdict(problem, trial, problem.seeds))
            row |= {name: cells[name] for name in SEARCHED}
        if trial.state == "pruned":
            row["decision"] = ""
        if trial.fresh_alpha is not None:
            cells = _row(_verdict(problem, trial, problem.fresh, trial.fresh_alpha))
            row |= {f"fresh_{name}": cells[name] for name in FRESH}
        rows.append(row | {"fresh_alpha": trial.fresh_alpha, "confirmed": trial.confirmed, "note": trial.note})
    table = pd.DataFrame(rows).astype({"fresh_alpha": float})
    # A trial that was pruned or failed counts in Holm's correction with p = 1.
    whole = (table.state == "finished") & table.p_equivalent.notna()
    table["p_equivalent_holm"] = holm(list(table.p_equivalent.astype(float).where(whole, 1.0)))
    return table


def _verdict(problem: SearchProblem, trial: Trial, seeds: Sequence[int], alpha: float | None = None) -> Verdict:
    """The verdict on those of the seeds that were trained."""
    return problem.verdict({seed: trial.losses[seed] for seed in seeds if seed in trial.losses}, alpha)


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


def _violation(row: Mapping[str, Any], alpha: float) -> float:
    """How far a trial, a row of a verdict, is from equivalent, for a sampler: 0 or less where the t tests pass."""
    if row["seeds"] < 2 or row["one_diverged"]:
        return 10.0 * (1 + row["one_diverged"] / max(1, row["seeds"] + row["one_diverged"]))
    return min(10.0, (abs(row["difference"]) + _reach(row, alpha)) / row["margin"] - 1)


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
