"""The smallest change that makes a new setting give an old setting's losses again.

A network trained well under one setting; under another its loss is different, or not a number. Sources
advise to retune the learning rate, the batch size, kernels and strides. `reproduce` looks for the
smallest such change, a flag of the setting included, after which a verdict says `equivalent`.

- Distance: the sum over the factors of |log2(new / old)| for learning rate, batch size and whatever is
  given as a range; of steps along the sorted list for other numbers; of 1 for anything else.
- Search: nothing changed comes first, then one factor at a time, nearest first, then combinations
  proposed by Optuna's TPE sampler (Akiba et al. 2019), with the verdict as its constraint. What is not
  nearer than the best change so far is not trained.
- Many changes are tried, and one of many may look equivalent by luck. So half of the seeds are kept
  out of the search. A change that is equivalent on the seeds of the search is trained on those, and only
  a verdict there confirms it: the j-th confirmation at the level alpha / 2^j, so that all of them
  together err with probability alpha at most. Holm's p over the whole search is reported beside it.
- Hopeless trials end early, after 3, 6, 12, … seeds. That can only ever reject: a change is called
  equivalent from all its seeds or not at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import GpulabError, UsageError
from gpulab.report import Report
from gpulab.report import table as html_table
from gpulab.settings import Setting
from gpulab.stats.tests import holm, share_at_most
from gpulab.stats.verdicts import DIVERGED_APART, Verdict
from gpulab.training import store as stores
from gpulab.training.objective import Lab, Own, Records, Trainings, check_numbers, check_runs_here
from gpulab.training.search import Question, checked_search, checked_target, factor_of, key
from gpulab.training.trial_log import Study, losses_of

if TYPE_CHECKING:
    import pandas as pd

FIRST_LOOK = 3
HOPELESS = 0.999  # confidence of the interval that must lie outside the margin before a trial is given up
PROPOSALS = 30  # that may in a row be no news before the search looks elsewhere
WITHIN = ("equivalent", "different but negligible")  # both say that the difference is inside the margin


@dataclass(frozen=True, eq=False)
class Reproduction(Report):
    """What a search for the smallest change found.

    `table` has a row a trial: `changes` in words; a column for each factor with its value; `distance`;
    `state` (`finished`, `pruned`, `failed`); `decision` of the verdict on the seeds of the search (none for
    a pruned trial), with its `seeds`, `diverged`, `difference` (from the target, mean over seeds), interval
    `low`, `high`, `p_equivalent`, corrected over all trials `p_equivalent_holm`, and where it is inconclusive
    the `seeds_needed` to settle it, as many fresh ones not counted; from the fresh seeds
    `fresh_decision`, `fresh_seeds`, `fresh_difference`, `fresh_p_equivalent` and the level `fresh_alpha`
    that it was held to; `confirmed`; a `note` on why it was pruned or failed.

    `chosen` is the row of the answer and `best` its changes: of the smallest that was confirmed ({} where
    nothing need change); where none was, of the smallest that was equivalent on the seeds of the search,
    and `confirmed` is false; None where nothing worked. `setting` is the new setting, `best_setting` the
    same with `best` applied. `smaller_left` is how many points of the space, nearer than the answer, were
    not tried: 0 is proof, within the space; None says that they cannot be counted.

    `print(result)` says it in sentences, `result.plot()` draws it, a notebook shows both.
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
        shown = ["changes", "distance", "state", "decision", "seeds", "diverged", "difference", "p_equivalent_holm"]
        return super().html() + html_table(self.table[[*shown, "confirmed"]]) + self.plot().html()


def reproduce(
    target: pd.DataFrame,
    search: Mapping[str, Sequence[Any]],
    setting: Setting | str,
    train: Callable[..., Any] | None = None,
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

    `target` has a row a seed, the runs of the old setting, as from `gpulab.runs` or `seed_runs`: at
    least 6 seeds, and 20 are better. The second half of them is kept for confirmation.

    `search` says what may change: {name: [values]}, or {name: (low, high)} for a range of numbers. A name
    is an option of a setting (`tf32`, `precision`, …; the value None leaves the option out), or
    something to train with. Without `train` the runs of `target` are trained again as their records
    say, and that is `learning_rate` and the numbers and words among the options of the model
    (`batch_size` of the autoencoder, `kernel_size` of PredNet).

    A network of your own is trained by `train(setting, seed, **changes)`: `setting` is a
    `gpulab.Setting` that is already in force (`setting.device`, `setting.dtype`), torch's random
    numbers are already drawn from `seed`, and the other parameters are what can be changed; their
    defaults are what was trained. It returns the final loss, or yields the loss of every window as it
    goes: a loss that is not finite then ends the run, and the final loss is the mean of the last fifth. A
    loss that is not finite, an `ArithmeticError` or a `LinAlgError` is a diverged run. Any other
    exception makes the trial fail, and the search goes on.

    `trials` bounds how many changes are tried, `workers` how many seeds train at the same time, each in a
    process of its own (above one, `train` travels there by cloudpickle). How many changes nothing but the time,
    if the setting says how many threads compute. `prune=False` trains every seed of every trial.

    Every loss goes at once into the file `study` (by default one in `store` named after the question),
    so a search that was killed goes on where it was when it is called again, and one that is done is
    read. Failed trials are then tried once more, and a larger `trials` goes further. The question
    includes the text of `train`, but not what `train` calls.

    Raises `UsageError` for what makes no sense, `DataError` for a damaged study or one of another
    question, `GpulabError` when the setting cannot run here or every trial failed.

    >>> import tempfile, torch
    >>> def train(setting, seed, learning_rate=0.002):
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
    check_numbers(trials=trials, workers=workers)
    parsed = Setting.parse(setting)
    runs = checked_target(target, metric)
    lab: Lab = Records(runs, metric, store) if train is None else Own(train)
    factors = [factor_of(name, values, lab, parsed) for name, values in checked_search(search).items()]
    if not any(factor.others for factor in factors):
        raise UsageError(f"search {dict(search)!r}: every value is what it is already, so nothing can change")
    question = Question(runs, metric, margin, alpha, parsed, factors, lab, prune)
    check_runs_here(parsed)
    folder = Path(stores.default_store() if store is None else store)
    file = folder / f"reproduce-{question.digest[:10]}.journal" if study is None else Path(study)
    with Study(file, question) as kept, Trainings(lab, workers) as trainings:
        return _Search(question, kept, trainings, trials, prune).run(progress)


# --- the search --------------------------------------------------------------------------------------


class _Search:
    """Tries points of the space, until none that is nearer than the best is left or `trials` are done."""

    def __init__(self, question: Question, study: Study, trainings: Trainings, trials: int, prune: bool) -> None:
        self.question, self.study, self.trainings, self.trials, self.prune = question, study, trainings, trials, prune
        self.points = question.points()

    def run(self, progress: bool) -> Reproduction:
        """Try, and say what was found."""
        from tqdm.auto import tqdm

        per_trial = len(self.question.seeds)
        with tqdm(total=self.trials * per_trial, unit="run", disable=not progress, leave=False) as self.bar:
            while (done := len(self.study.tried())) < self.trials:
                self._show(done * per_trial)
                trial = self._next()
                if trial is None:
                    break
                self._try(trial)
        tried = self.study.tried()
        if tried and all("error" in trial.user_attrs for trial in tried):
            raise GpulabError(f"every trial failed ({len(tried)}); the first: {tried[0].user_attrs['error']}")
        return self._result(tried)

    def best(self) -> Any:
        """The nearest trial that was confirmed, or None."""
        confirmed = [trial for trial in self.study.tried() if trial.user_attrs.get("confirmed")]
        return min(confirmed, key=lambda trial: trial.value, default=None)

    def limit(self) -> float:
        """The distance that a point must stay under to be of interest."""
        best = self.best()
        return math.inf if best is None else best.value

    def news(self, points: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the points that are not tried yet and nearer than the best."""
        seen, limit = {key(trial.params) for trial in self.study.tried()}, self.limit()
        return [point for point in points if self.question.distance(point) < limit and key(point) not in seen]

    def untried(self) -> list[dict[str, Any]] | None:
        """The points of the space that are news; None where they cannot be listed."""
        if self.points is None:
            return [] if self.limit() == 0 else None
        return self.news(self.points)

    def _next(self) -> Any:
        """A trial of the next point: what was left, one factor changed, the sampler's, the nearest; else None."""
        untried = self.untried()
        if untried == []:
            return None
        if first := self.news([*self.study.left(), self.question.original(), *self.question.alone()]):
            return self.study.begin(first[0])
        for _ in range(PROPOSALS):
            trial = self.study.propose(self.limit())
            if self.news([trial.params]):
                return trial
            self.study.pass_over(trial)
        return self.study.begin(untried[0]) if untried else None

    def _try(self, trial: Any) -> None:
        """Train the seeds of one trial, with looks in between, and judge it."""
        question, seeds = self.question, self.question.seeds
        losses = self.study.losses(trial.params)
        try:
            for size in self._looks():
                self._train(trial, losses, seeds[:size])
                seen = question.verdict({seed: losses[seed] for seed in seeds[:size]})
                pruned = hopeless(seen, len(seeds)) if size < len(seeds) else ""
                if pruned:
                    break
            violation = _violation(seen, question.alpha)
            if not pruned and seen.decision in WITHIN:
                violation = self._confirm(trial, losses)
        except Exception as error:  # whatever a function of the user's raises
            self.study.fail(trial, error)
        else:
            self.study.finish(trial, question.distance(trial.params), violation, pruned)

    def _looks(self) -> list[int]:
        """After how many seeds a trial is looked at."""
        n = len(self.question.seeds)
        doubling = itertools.takewhile(lambda size: size < n, (FIRST_LOOK * 2**k for k in itertools.count()))
        return [*(doubling if self.prune else ()), n]

    def _train(self, trial: Any, losses: dict[int, float], seeds: Sequence[int]) -> None:
        """Train the seeds whose loss is not known yet; each is written down at once."""
        setting, changes = self.question.arguments(self.question.changes(trial.params))
        self.bar.set_description(self.question.words(trial.params))
        self.study.write_losses(trial, losses)
        for seed, loss in self.trainings.losses(setting, [seed for seed in seeds if seed not in losses], changes):
            losses[seed] = loss
            self.study.write_losses(trial, losses)
            self.bar.update()

    def _confirm(self, trial: Any, losses: dict[int, float]) -> float:
        """Train the fresh seeds; a verdict on those alone confirms. Returns the violation for the sampler."""
        question = self.question
        self._train(trial, losses, question.fresh)
        number = 1 + sum("confirmed" in other.user_attrs for other in self.study.tried())
        level = question.alpha / 2**number
        seen = question.verdict({seed: losses[seed] for seed in question.fresh}, level)
        confirmed = seen.decision in WITHIN
        trial.set_user_attr("fresh_alpha", level)
        trial.set_user_attr("confirmed", confirmed)
        return 0.0 if confirmed else max(_violation(seen, level), 0.01)

    def _show(self, done: int) -> None:
        """Bring the bar up to date: pruned trials left seeds untrained, confirmed ones trained more."""
        self.bar.update(done - self.bar.n)
        best = self.best()
        words = "none yet" if best is None else f"{self.question.words(best.params)} ({best.value:.3g})"
        self.bar.set_postfix(best=words)

    def _result(self, tried: list[Any]) -> Reproduction:
        """The answer, computed anew from the losses that are written down."""
        question = self.question
        judged = [self._judge(place, trial) for place, trial in enumerate(tried)]
        table = _table([row for row, _, _ in judged])
        chosen, confirmed = _chosen(table)
        best = None if chosen is None else question.changes(tried[chosen].params)
        untried = self.untried()
        return Reproduction(
            table=table,
            target=question.target,
            setting=str(question.setting),
            metric=question.metric,
            margin=question.margin,
            margin_asked=question.margin_asked,
            alpha=question.alpha,
            original=question.original(),
            chosen=chosen,
            best=best,
            best_setting=None if best is None else question.arguments(best)[0],
            confirmed=confirmed,
            search_verdict=None if chosen is None else judged[chosen][1],
            fresh_verdict=None if chosen is None else judged[chosen][2],
            smaller_left=None if untried is None else len(untried),
            study=self.study.file,
        )

    def _judge(self, place: int, trial: Any) -> tuple[dict[str, Any], Verdict | None, Verdict | None]:
        """One trial: its row of the table, its verdict on the seeds of the search and on the fresh ones."""
        question, kept = self.question, trial.user_attrs
        row: dict[str, Any] = {
            "trial": place,
            "changes": question.words(trial.params),
            **{factor.name: trial.params[factor.name] for factor in question.factors},
            "distance": question.distance(trial.params),
            "state": "failed" if "error" in kept else "pruned" if "pruned" in kept else "finished",
            "note": kept.get("error") or kept.get("pruned") or "",
        }
        if row["state"] == "failed":
            return row, None, None
        losses = losses_of(trial)
        searched = question.verdict({seed: losses[seed] for seed in question.seeds if seed in losses})
        row |= _judged(searched, "")
        if row["state"] == "pruned":
            row["decision"] = ""
        if "confirmed" not in kept:
            return row, searched, None
        level = kept["fresh_alpha"]
        fresh = question.verdict({seed: losses[seed] for seed in question.fresh}, level)
        return row | _judged(fresh, "fresh_") | {"fresh_alpha": level, "confirmed": kept["confirmed"]}, searched, fresh


def hopeless(seen: Verdict, seeds: int) -> str:
    """Why a trial cannot become equivalent on so many seeds, or very nearly cannot; else an empty string.

    With one run diverged alone too many, no further seed can help. And when a t interval of the
    difference at 99.9 % lies outside the margin, hardly.
    """
    from scipy.stats import t

    (row,) = seen.table.to_dict("records")
    lost, seen_so_far = row["one_diverged"], row["seeds"] + row["one_diverged"]
    if lost and share_at_most(lost, seeds) > DIVERGED_APART:
        return f"{lost} of {seen_so_far} seeds diverged"
    if row["seeds"] < FIRST_LOOK:
        return ""
    reach = t.isf((1 - HOPELESS) / 2, row["seeds"] - 1) * row["sd_of_differences"] / math.sqrt(row["seeds"])
    if abs(row["difference"]) - reach > row["margin"]:
        return (
            f"the difference, {row['difference']:.2g} ± {reach:.2g} after {row['seeds']} seeds, is outside the margin"
        )
    return ""


def _violation(seen: Verdict, alpha: float) -> float:
    """How far a trial is from equivalent, for the sampler: 0 or less where the t tests pass."""
    from scipy.stats import t

    (row,) = seen.table.to_dict("records")
    if row["seeds"] < 2 or row["one_diverged"]:
        return 10.0 * (1 + row["one_diverged"] / max(1, row["seeds"] + row["one_diverged"]))
    reach = t.isf(alpha, row["seeds"] - 1) * row["sd_of_differences"] / math.sqrt(row["seeds"])
    return min(10.0, (abs(row["difference"]) + reach) / row["margin"] - 1)


def _judged(seen: Verdict, prefix: str) -> dict[str, Any]:
    (row,) = seen.table.to_dict("records")
    names = ["decision", "seeds", "difference", "p_equivalent"]
    names += [] if prefix else ["diverged", "low", "high", "seeds_needed"]
    return {f"{prefix}{name}": row[name] for name in names}


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The trials as a data frame; a trial that was given up or failed counts in Holm's correction with p = 1."""
    import pandas as pd

    judged = ["decision", "seeds", "diverged", "difference", "low", "high", "p_equivalent", "p_equivalent_holm"]
    judged += ["seeds_needed"]
    fresh = [f"fresh_{name}" for name in ("decision", "seeds", "difference", "p_equivalent", "alpha")]
    first = [name for name in rows[0] if name not in {*judged, *fresh, "note", "confirmed"}] if rows else []
    frame = pd.DataFrame(rows).reindex(columns=[*first, *judged, *fresh, "confirmed", "note"])
    whole = (frame.state == "finished") & frame.p_equivalent.notna()
    frame["p_equivalent_holm"] = holm(list(frame.p_equivalent.astype(float).where(whole, 1.0)))
    frame["confirmed"] = [value is True for value in frame.confirmed]
    for name in ("decision", "fresh_decision"):
        frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
    for name in ("seeds", "diverged", "fresh_seeds"):
        frame[name] = frame[name].fillna(0).astype(int)
    return frame


def _chosen(table: pd.DataFrame) -> tuple[int | None, bool]:
    """The row of the smallest change confirmed; else of the smallest equivalent in the search; else None."""
    for rows, confirmed in ((table[table.confirmed], True), (table[_worked(table)], False)):
        if len(rows):
            return int(rows.distance.idxmin()), confirmed
    return None, False


def _worked(table: pd.DataFrame) -> pd.Series:
    return (table.state == "finished") & table.decision.isin(WITHIN)


# --- words -------------------------------------------------------------------------------------------


def _sentences(found: Reproduction) -> list[str]:
    table = found.table
    lines = [_answer(found)]
    if found.best is not None:
        lines += [_evidence(found)]
    if found.best != {}:
        lines += [_unchanged(row) for _, row in table[table.distance == 0].iterrows()]
    lines += _alone(found)
    lines += [_smaller(found)] if found.best != {} else []
    failed = table[table.state == "failed"]
    if len(failed):
        lines.append(f"{len(failed)} trial(s) failed; the first, {failed.changes.iloc[0]}: {failed.note.iloc[0]}.")
    return lines


def _answer(found: Reproduction) -> str:
    where = f"under {found.setting}"
    tried = f"{len(found.table)} tried"
    if found.best == {}:
        held = "" if found.confirmed else " (not confirmed)"
        return f"Nothing need change: {where} the losses of {found.target} come back as they are{held}."
    if found.best is None:
        return f"No change tried gives the losses of {found.target} {where} again ({tried})."
    row = found.table.loc[found.chosen]
    change = f"{row.changes} (distance {row.distance:.3g}; {tried})"
    if found.confirmed:
        return f"The smallest change found that gives the losses of {found.target} {where} again: {change}."
    return f"Not confirmed: {change} gave the losses of {found.target} {where} again on the seeds of the search only."


def _evidence(found: Reproduction) -> str:
    row = found.table.loc[found.chosen]
    searched = (
        f"on the {row.seeds} of the search {row.decision}, equivalence p = {_p(row.p_equivalent)}, "
        f"{_p(row.p_equivalent_holm)} after Holm over {len(found.table)} trials"
    )
    if not row.fresh_seeds:
        return f"{searched[0].upper()}{searched[1:]}."
    return (
        f"On {row.fresh_seeds} seeds that the search had not seen: {row.fresh_decision} within ±{found.margin:.2g}"
        f" ({_margin_in_words(found)}), difference {row.fresh_difference:.2g}, equivalence p = "
        f"{_p(row.fresh_p_equivalent)} (held to {row.fresh_alpha:.2g}); {searched}."
    )


def _margin_in_words(found: Reproduction) -> str:
    if not isinstance(found.margin_asked, str):
        return "as asked"
    return f"{found.margin_asked.replace('sd', ' sd')} between the target's seeds, at that sd's lower 97.5 % limit"


def _unchanged(row: Any) -> str:
    if row.state == "failed":
        return "With nothing changed, the training failed."
    if row.diverged:
        return f"With nothing changed, {row.diverged} of {row.diverged + row.seeds} seeds diverged."
    return f"With nothing changed: {row.decision}, difference {row.difference:.2g} [{row.low:.2g}, {row.high:.2g}]."


def _alone(found: Reproduction) -> list[str]:
    """What each factor did without the others."""
    table = found.table
    changed = {name: _differs(table[name], value) for name, value in found.original.items()}
    number = sum(flags.astype(int) for flags in changed.values())
    groups = {name: table[flags & (number == 1)] for name, flags in changed.items()}
    groups["several together"] = table[number > 1]
    parts = []
    for name, some in groups.items():
        unsettled = int((some.decision == "inconclusive").sum())
        if len(some):
            note = f" ({unsettled} inconclusive)" if unsettled else ""
            parts.append(f"{name} {int(some.confirmed.sum())} of {len(some)}{note}")
    return [f"Confirmed, by what was changed: {'; '.join(parts)}."] if parts else []


def _differs(values: pd.Series, original: Any) -> pd.Series:
    return values.notna() if original is None else values != original


def _smaller(found: Reproduction) -> str:
    """What is known of smaller changes, or where nothing worked, of any."""
    table, which = found.table, "change"
    if found.confirmed:
        table, which = table[table.distance < table.distance[found.chosen]], "smaller change"
    tried = table[table.distance > 0]
    unsettled = int(((tried.decision == "inconclusive") & (tried.state == "finished")).sum())
    words = f"{len(tried)} {which}{'' if len(tried) == 1 else 's'} tried in vain, {unsettled} of them inconclusive"
    if not len(tried):
        words = f"No {which} was tried in vain"
    if found.smaller_left is None:
        return f"{words}; the space holds more."
    return f"{words}; {found.smaller_left or 'none'} in the space left untried."


def _p(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.2g}" if value >= 0.001 or value == 0 else f"{value:.0e}"
