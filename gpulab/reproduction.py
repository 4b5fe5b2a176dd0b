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

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import store as stores
from gpulab.errors import DataError, GpulabError, UsageError
from gpulab.inference import holm, share_at_most
from gpulab.retraining import Lab, Own, Records, Trainings, check_numbers, check_runs_here, optional
from gpulab.search_space import Question, checked_search, checked_target, factor_of, key
from gpulab.settings import Setting
from gpulab.verdicts import DIVERGED_APART, Verdict

if TYPE_CHECKING:
    import pandas as pd

FIRST_LOOK = 3
HOPELESS = 0.999  # confidence of the interval that must lie outside the margin before a trial is given up
PROPOSALS = 30  # that may in a row be no news before the search looks elsewhere
WITHIN = ("equivalent", "different but negligible")  # both say that the difference is inside the margin


@dataclass(frozen=True, eq=False)
class Reproduction:
    """What a search for the smallest change found.

    `table` has a row a trial, the unchanged one first: `changes` in words, a column for each factor with
    its value, `distance`, `state` (`finished`, `pruned`, `failed`), `decision` of the verdict on the
    seeds of the search with `seeds`, `diverged`, `difference` (from the target, mean over seeds), its
    interval `low`, `high`, `p_equivalent` and, corrected over all trials, `p_equivalent_holm`; on the
    fresh seeds `fresh_decision`, `fresh_seeds`, `fresh_difference`, `fresh_p_equivalent` and the level
    `fresh_alpha` that it was held to; `confirmed`; and a `note` on why it was pruned or failed.

    `best` has the changes of the smallest that was confirmed, {} where nothing need change; where none
    was confirmed, of the smallest that was equivalent on the seeds of the search (`confirmed` is then
    false); None where nothing worked. `setting` is the new setting, and `best_setting` the same with
    `best` applied. `smaller_left` is how many nearer points of the space were not tried: 0 is proof,
    within the space; None says that it has infinitely many.

    `print(result)` says it in sentences, a notebook shows both.
    """

    table: pd.DataFrame
    target: str
    setting: str
    metric: str
    margin: float
    margin_asked: str | float
    alpha: float
    factors: tuple[str, ...]
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

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sentences, table and figure as one piece of HTML; the sentences alone as text."""
        return {"text/plain": str(self), "text/html": _html(self)}, {}


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
    question = Question(runs, metric, margin, alpha, parsed, factors, lab)
    check_runs_here(parsed)
    file = Path(study) if study is not None else _study_folder(store) / f"reproduce-{question.digest[:10]}.journal"
    with _Study(file, question) as kept, Trainings(lab, workers) as trainings:
        return _Search(question, kept, trainings, trials, prune).run(progress)


# --- the study ---------------------------------------------------------------------------------------


class _Study:
    """Optuna's study in a file of its own, which one process at a time may use."""

    def __init__(self, file: Path, question: Question) -> None:
        self.file, self.question = file, question
        self.optuna = optional("optuna")
        self.lock = optional("filelock").FileLock(f"{file}.owner", timeout=0)

    def __enter__(self) -> _Study:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
        except optional("filelock").Timeout:
            raise UsageError(f"{self.file}: another process is at work on this study") from None
        except OSError as error:
            raise GpulabError(f"{self.file}: cannot be written: {error}") from None
        try:
            with self._quietly():
                self.study = self._opened()
                self._take_up()
        except BaseException:
            self.lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def _opened(self) -> Any:
        journal = self.optuna.storages.journal
        Path(f"{self.file}.lock").unlink(missing_ok=True)  # Optuna's, of a process that was killed: we own the file
        _drop_half_a_line(self.file)
        empty = not self.file.exists() or self.file.stat().st_size == 0
        try:
            storage = self.optuna.storages.JournalStorage(journal.JournalFileBackend(str(self.file)))
            if empty:
                study = self.optuna.create_study(storage=storage, study_name="reproduce", direction="minimize")
                study.set_user_attr("question", self.question.text)
            else:
                study = self.optuna.load_study(storage=storage, study_name="reproduce")
            asked = study.user_attrs["question"]
            trials = [(trial.state, trial.params, trial.user_attrs) for trial in study.trials]
            assert isinstance(asked, dict)
            assert all(isinstance(losses, dict) for *_, kept in trials if (losses := kept.get("losses")) is not None)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            AssertionError,
            self.optuna.exceptions.OptunaError,
        ) as error:
            raise DataError(
                f"{self.file}: not a whole study of gpulab reproduce ({type(error).__name__}: {error}); "
                "move it away to begin anew"
            ) from None
        other = [name for name, value in _as_json(self.question.text).items() if asked.get(name) != value]
        if other:
            raise DataError(
                f"{self.file}: a study of another question (other {'; other '.join(other)}); name another file"
            )
        return study

    def _take_up(self) -> None:
        """Queue again what a process left behind when it was killed, and what failed."""
        if not self.study.trials:
            for point in [self.question.original(), *self.question.alone()]:
                self.study.enqueue_trial(point)
        states = self.optuna.trial.TrialState
        for trial in self.study.get_trials(deepcopy=False, states=(states.RUNNING, states.FAIL)):
            kept = trial.user_attrs
            if trial.state == states.RUNNING:
                self.study._storage.set_trial_user_attr(trial._trial_id, "left", "killed")
                self.study.tell(trial.number, state=states.FAIL)
            elif "error" not in kept or kept.get("left"):
                continue
            else:
                self.study._storage.set_trial_user_attr(trial._trial_id, "left", "tried again")
            point = kept.get("point") or trial.params
            if len(point) == len(self.question.factors):
                attributes = {name: kept[name] for name in ("losses", "confirmation") if name in kept}
                self.study.enqueue_trial(point, attributes)

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Optuna's log and its warnings of a queue whose ranges have narrowed say nothing new."""
        import warnings

        before = self.optuna.logging.get_verbosity()
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self.optuna.logging.set_verbosity(before)


def _as_json(document: Any) -> Any:
    return json.loads(json.dumps(document))


def _drop_half_a_line(file: Path) -> None:
    """A process that was killed while it wrote leaves half a line; what is appended to it would be lost."""
    if not file.exists():
        return
    with file.open("rb+") as stream:
        text = stream.read()
        if text and not text.endswith(b"\n"):
            stream.truncate(text.rfind(b"\n") + 1)


def _study_folder(store: str | Path | None) -> Path:
    return Path(stores.default_store() if store is None else store)


# --- the search --------------------------------------------------------------------------------------


class _Search:
    """Tries points of the space, until none that is nearer than the best is left or `trials` are done."""

    def __init__(self, question: Question, kept: _Study, trainings: Trainings, trials: int, prune: bool) -> None:
        self.question, self.kept, self.trainings, self.trials, self.prune = question, kept, trainings, trials, prune
        self.study, self.states = kept.study, kept.optuna.trial.TrialState
        self.points = question.points()

    def run(self, progress: bool) -> Reproduction:
        """Try, and say what was found."""
        from tqdm.auto import tqdm

        per_trial = len(self.question.seeds)
        with (
            self.kept._quietly(),
            tqdm(total=self.trials * per_trial, unit="run", disable=not progress, leave=False) as self.bar,
        ):
            while (done := len(self.tried())) < self.trials:
                self._show(done * per_trial)
                trial = self._next()
                if trial is None:
                    break
                self._try(trial)
            tried = self.tried()
        if tried and all(trial.state == self.states.FAIL for trial in tried):
            raise GpulabError(f"every trial failed ({len(tried)}); the first: {tried[0].user_attrs['error']}")
        return self._result(tried)

    def tried(self) -> list[Any]:
        """The trials that count: not those passed over, nor those that were killed and tried again."""
        over = (self.states.COMPLETE, self.states.PRUNED, self.states.FAIL)
        every = self.study.get_trials(deepcopy=False, states=over)
        return [t for t in every if "left" not in t.user_attrs and "passed over" not in t.user_attrs]

    def best(self) -> Any:
        """The nearest trial that was confirmed, or None."""
        confirmed = [t for t in self.tried() if t.user_attrs.get("confirmed")]
        return min(confirmed, key=lambda t: t.value, default=None)

    @property
    def limit(self) -> float:
        """The distance that a point must stay under to be of interest."""
        best = self.best()
        return math.inf if best is None else best.value

    def nearer(self) -> list[dict[str, Any]] | None:
        """The points not tried yet that would be better than the best; None where they cannot be listed."""
        if self.points is None:
            return [] if self.limit == 0 else None
        seen, limit = {key(t.params) for t in self.tried()}, self.limit
        return [p for p in self.points if self.question.distance(p) < limit and key(p) not in seen]

    def _next(self) -> Any:
        """A trial worth training: from the queue, then from the sampler, then the nearest untried."""
        left = self.nearer()
        if left == []:
            return None
        proposals = 0
        while proposals < PROPOSALS:
            queued = bool(self.study.get_trials(deepcopy=False, states=(self.states.WAITING,)))
            trial = self._ask()
            if self._worth(trial.params):
                return trial
            trial.set_user_attr("passed over", True)
            self.study.tell(trial, state=self.states.FAIL)
            proposals += not queued
        if not left:
            return None
        self.study.enqueue_trial(left[0])
        return self._ask()

    def _ask(self) -> Any:
        limit = self.limit
        number = len(self.study.get_trials(deepcopy=False))
        # Seeded by what came before, so that a search that was interrupted goes the way of one that was not.
        self.study.sampler = self.kept.optuna.samplers.TPESampler(seed=number, n_startup_trials=1)
        return self.study.ask({f.name: f.distribution(limit) for f in self.question.factors})

    def _worth(self, point: Mapping[str, Any]) -> bool:
        seen = {key(t.params) for t in self.tried()}
        return self.question.distance(point) < self.limit and key(point) not in seen

    def _try(self, trial: Any) -> None:
        """Train the seeds of one trial, in looks, and judge it."""
        trial.set_user_attr("point", trial.params)
        question = self.question
        losses = {int(seed): _number(loss) for seed, loss in trial.user_attrs.get("losses", {}).items()}
        try:
            for size in self._looks():
                self._train(trial, losses, question.seeds[:size])
                seen = question.verdict({seed: losses[seed] for seed in question.seeds[:size]})
                reason = hopeless(seen, len(question.seeds)) if self.prune and size < len(question.seeds) else ""
                if reason:
                    break
            violation = _violation(seen, question.alpha)
            if not reason and seen.decision in WITHIN:
                violation = self._confirm(trial, losses, violation)
        except Exception as error:  # whatever a function of the user's raises
            trial.set_user_attr("error", _said(error))
            self.study.tell(trial, state=self.states.FAIL)
            return
        trial.set_constraint("equivalent", violation)
        if reason:
            trial.set_user_attr("note", reason)
            trial.report(question.distance(trial.params), len(losses))
            self.study.tell(trial, state=self.states.PRUNED)
        else:
            self.study.tell(trial, question.distance(trial.params))

    def _looks(self) -> list[int]:
        """After how many seeds a trial is looked at."""
        n = len(self.question.seeds)
        doubling = itertools.takewhile(lambda size: size < n, (FIRST_LOOK * 2**k for k in itertools.count()))
        return [*(doubling if self.prune else ()), n]

    def _train(self, trial: Any, losses: dict[int, float], seeds: Sequence[int]) -> None:
        """Train the seeds whose loss is not known yet; each is written down at once."""
        changes = self.question.changes(trial.params)
        setting, told = self.question.arguments(changes)
        missing = [seed for seed in seeds if seed not in losses]
        for seed, loss in self.trainings.losses(setting, missing, told):
            losses[seed] = loss
            trial.set_user_attr("losses", {str(s): _json(value) for s, value in sorted(losses.items())})
            self.bar.update()
            self.bar.set_description(self.question.words(trial.params), refresh=False)

    def _confirm(self, trial: Any, losses: dict[int, float], violation: float) -> float:
        """Train the fresh seeds; a verdict on those alone confirms. Returns the violation for the sampler."""
        number = trial.user_attrs.get("confirmation")
        if number is None:
            number = 1 + sum("confirmation" in t.user_attrs for t in self.tried())
            trial.set_user_attr("confirmation", number)
        self._train(trial, losses, self.question.fresh)
        seen = self.question.verdict({s: losses[s] for s in self.question.fresh}, self.question.alpha / 2**number)
        confirmed = seen.decision in WITHIN
        trial.set_user_attr("confirmed", confirmed)
        return min(violation, 0.0) if confirmed else max(_violation(seen, self.question.alpha), 0.01)

    def _show(self, done: int) -> None:
        """Bring the bar up to date: pruned trials left seeds untrained, confirmed ones trained more."""
        self.bar.update(done - self.bar.n)
        best = self.best()
        words = "none yet" if best is None else f"{self.question.words(best.params)} ({best.value:.3g})"
        self.bar.set_postfix(best=words)

    def _result(self, tried: list[Any]) -> Reproduction:
        """The answer, computed anew from the losses that are written down."""
        question = self.question
        rows, search_verdicts, fresh_verdicts = [], {}, {}
        for place, trial in enumerate(tried):
            losses = {int(seed): _number(loss) for seed, loss in trial.user_attrs.get("losses", {}).items()}
            row, search_verdicts[place], fresh_verdicts[place] = self._row(place, trial, losses)
            rows.append(row)
        table = _table(rows)
        chosen, confirmed = _chosen(table)
        best = None if chosen is None else question.changes(tried[chosen].params)
        left = self.nearer()
        return Reproduction(
            table=table,
            target=question.target,
            setting=str(question.setting),
            metric=question.metric,
            margin=question.margin,
            margin_asked=question.margin_asked,
            alpha=question.alpha,
            factors=tuple(factor.name for factor in question.factors),
            best=best,
            best_setting=None if best is None else question.arguments(best)[0],
            confirmed=confirmed,
            search_verdict=None if chosen is None else search_verdicts[chosen],
            fresh_verdict=None if chosen is None else fresh_verdicts[chosen],
            smaller_left=None if left is None else len(left),
            study=self.kept.file,
        )

    def _row(self, place: int, trial: Any, losses: dict[int, float]) -> tuple[dict[str, Any], Any, Any]:
        """One trial: its row of the table, its verdict on the seeds of the search and on the fresh ones."""
        question, kept = self.question, trial.user_attrs
        names = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
        row: dict[str, Any] = {
            "trial": place,
            "changes": question.words(trial.params),
            **{name: trial.params[name] for name in (f.name for f in question.factors)},
            "distance": question.distance(trial.params),
            "state": names[trial.state.name],
            "note": kept.get("error") or kept.get("note") or "",
        }
        if trial.state == self.states.FAIL:
            return row, None, None
        searched = question.verdict({s: loss for s, loss in losses.items() if s in question.seeds})
        row |= _judged(searched, "")
        fresh = None
        if "confirmed" in kept:
            level = question.alpha / 2 ** kept["confirmation"]
            fresh = question.verdict({s: losses[s] for s in question.fresh}, level)
            row |= _judged(fresh, "fresh_") | {"fresh_alpha": level, "confirmed": fresh.decision in WITHIN}
        return row, searched, fresh


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
    names = ["decision", "seeds", "difference", "p_equivalent", *(["diverged", "low", "high"] if not prefix else [])]
    return {f"{prefix}{name}": row[name] for name in names}


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The trials as a data frame; a trial that was given up or failed counts in Holm's correction with p = 1."""
    import pandas as pd

    judged = ["decision", "seeds", "diverged", "difference", "low", "high", "p_equivalent", "p_equivalent_holm"]
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


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _json(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, GpulabError) else f"{type(error).__name__}: {error}"


# --- words -------------------------------------------------------------------------------------------


def _sentences(found: Reproduction) -> list[str]:
    table = found.table
    lines = [_answer(found)]
    if found.best is not None:
        lines += [_evidence(found)]
    if found.best != {}:
        lines += [_unchanged(table.iloc[0])]
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
    row = _best_row(found)
    change = f"{row.changes} (distance {row.distance:.3g}; {tried})"
    if found.confirmed:
        return f"The smallest change found that gives the losses of {found.target} {where} again: {change}."
    return f"Not confirmed: {change} gave the losses of {found.target} {where} again on the seeds of the search only."


def _best_row(found: Reproduction) -> Any:
    place, _ = _chosen(found.table)
    return found.table.loc[place]


def _evidence(found: Reproduction) -> str:
    row = _best_row(found)
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
    original = table.iloc[0]
    changed = {
        name: table[name].ne(original[name]) & ~(table[name].isna() & _missing(original[name]))
        for name in found.factors
    }
    number = sum(flags.astype(int) for flags in changed.values())
    parts = []
    for name, flags in changed.items():
        some = table[flags & (number == 1)]
        if len(some):
            parts.append(f"{name} {int(some.confirmed.sum())} of {len(some)}")
    combined = table[number > 1]
    if len(combined):
        parts.append(f"several together {int(combined.confirmed.sum())} of {len(combined)}")
    return [f"Confirmed, by what was changed: {'; '.join(parts)}."] if parts else []


def _missing(value: Any) -> bool:
    return value is None or value != value


def _smaller(found: Reproduction) -> str:
    """What is known of smaller changes."""
    table = found.table
    if found.confirmed:
        nearer = table[(table.distance < _best_row(found).distance) & (table.trial > 0)]
        open_ones = int((nearer.decision == "inconclusive").sum())
        words = f"Of {len(nearer)} smaller change(s) tried none was confirmed, {open_ones} remained inconclusive"
    else:
        open_ones = int(((table.decision == "inconclusive") & (table.state == "finished")).sum())
        words = f"{open_ones} of {len(table)} trials remained inconclusive"
    left = "smaller changes" if found.confirmed else "changes"
    if found.smaller_left is None:
        return f"{words}; the space holds more {left} than were tried."
    if found.smaller_left:
        return f"{words}; {found.smaller_left} {left} in the space were not tried."
    return f"{words}; no {left.removesuffix('s')} in the space is left untried."


def _p(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.2g}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _html(found: Reproduction) -> str:
    shown = ["changes", "distance", "state", "decision", "seeds", "diverged", "difference", "p_equivalent_holm"]
    sentences = "".join(f"<p>{escape(line)}</p>" for line in found.finding.splitlines())
    return sentences + found.table[[*shown, "confirmed"]].to_html(index=False, float_format="{:.3g}".format)
