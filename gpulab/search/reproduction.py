"""The smallest change that makes a new setting give an old setting's losses again.

A network trained well under one setting; under another its loss is different, or not a number. Sources
advise to retune the learning rate, the batch size, kernels and strides. `reproduce` looks for the
smallest such change, a flag of the setting included, after which a verdict says `equivalent`.

- Distance: the sum over the parameters of |log2(new / old)| for learning rate, batch size and whatever is
  given as a range; of steps along the sorted list for other numbers; of 1 for anything else.
- Search: nothing changed, then one parameter at a time, nearest first, then combinations: nearest first, or
  where there are too many to list, as a Halton sequence spreads them. What is not nearer than the best so far is
  not trained. So the next trial follows from the losses so far, which the store keeps: called again, a search goes
  the same way.
- One of many changes may look equivalent by luck. So half of the seeds are kept out of the search: a change
  that is equivalent on the others is confirmed there, for the j-th time at the level alpha / 2^j, so that all
  confirmations together err with probability alpha at most. Holm's p over the whole search is reported beside it.
- Trials without hope are pruned, after 3, 6, 12, … seeds. That can only ever reject: a change is called
  equivalent from all its seeds or not at all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gpulab.errors import GpulabError, UsageError, check_count
from gpulab.report import Picture, Report
from gpulab.report import table as html_table
from gpulab.search.space import Point, Space
from gpulab.search.trials import (
    UNTRIED,
    WITHIN,
    Target,
    changed_arguments,
    own_training,
    recorded_training,
    verdicts_on,
)
from gpulab.settings import Setting
from gpulab.stats.tests import holm
from gpulab.stats.verdicts import p_text
from gpulab.store import listing as stores
from gpulab.store.object_store import folder_of
from gpulab.training.seeds import check_runs_here, trainings

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Reproduction(Report):
    """What `reproduce` returns: the smallest change that was found, and all changes that were tried.

    `print(result)` says it in sentences, `result.plot()` draws it, a notebook shows both.

    Attributes:
        table: A data frame with a row for each trial, which is one change. Its columns are below.
        target: The setting of the old runs.
        setting: The new setting.
        metric: The name of the metric that was compared.
        margin: The largest difference without importance, in the metric's units.
        margin_asked: The margin as it was asked for, such as `"0.25sd"`.
        original: A dictionary with the old value of each parameter that may change.
        chosen: The row of the answer in the table; None where nothing worked.
        best: The changes of the answer, by name: the smallest that was confirmed ({} where nothing need change). Where
            none was, the smallest that was equivalent on the seeds of the search. None where nothing worked.
        best_setting: The new setting with those changes that are options of a setting; None where nothing worked.
        confirmed: Whether the answer was confirmed on seeds that the search had not seen.
        smaller_left: How many changes nearer to the original than a confirmed answer were not tried; without one, how
            many changes at all. So 0 beside a confirmed answer says that every smaller change in the space was tried.
            None says that they cannot be counted.

    The table has these columns:

    - `trial` (from 0), `changes` (in words), a column for each parameter with its value, `distance` (see `reproduce`).
    - `state`: `finished`, `pruned` (given up early) or `failed`; `note` says why it was pruned or failed.
    - From the verdict on the seeds of the search: `decision` (empty for a pruned trial), `seeds`, `diverged`,
      `difference` (from the target, the mean over seeds), its interval `low` and `high`, `p_equivalent`, and
      `p_equivalent_holm`, which is corrected over all trials by Holm's method.
    - `seeds_needed`: Where the decision is inconclusive, about how many seeds would settle it, without the fresh ones.
    - From the verdict on the fresh seeds, those that were kept out of the search: `fresh_decision`, `fresh_seeds`,
      `fresh_difference`, `fresh_p_equivalent`, and `fresh_alpha`, the level that it was held to. A trial that got no
      fresh seeds has an empty decision, 0 and NaN.
    - `confirmed`: Whether the fresh seeds say the same.

    Examples:
        >>> import tempfile
        >>> import gpulab as gl
        >>> def train(seed, setting, shift=0.0):  # with one thread the loss is larger by 1
        ...     return 0.1 * seed + shift + (setting.threads == 1)
        >>> old = gl.seed_runs(train, "cpu", seeds=8, progress=False)
        >>> with tempfile.TemporaryDirectory() as store:
        ...     found = gl.reproduce(old, {"shift": [-1.0, 1.0]}, "cpu:threads=1", train, store=store, progress=False)
        >>> print(found.best, found.confirmed, found.smaller_left)
        {'shift': -1.0} True 0
    """

    table: pd.DataFrame
    target: str
    setting: str
    metric: str
    margin: float
    margin_asked: str | float
    original: dict[str, Any]
    chosen: int | None
    best: dict[str, Any] | None
    best_setting: str | None
    confirmed: bool
    smaller_left: int | None

    @property
    def finding(self) -> str:
        """The answer in sentences, with the numbers of this search."""
        return "\n".join(_sentences(self))

    def __str__(self) -> str:
        return self.finding

    def words(self) -> Markup:
        """The sentences and the main columns of the table, as HTML."""
        columns = ["changes", "distance", "state", "decision", "seeds", "diverged", "difference", "p_equivalent_holm"]
        return super().words() + html_table(self.table[[*columns, "confirmed"]])

    def picture(self) -> Picture:
        """The figure of where each change of the search ended."""
        return self.plot()


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
    store: str | Path | None = None,
    progress: bool = True,
) -> Reproduction:
    """Find the smallest change after which a new setting gives the losses of old runs again.

    A network was trained well under one setting, and is worse, or not a number, under another. This tries changes of
    what `search` names: first nothing, then one parameter at a time, the smallest changes first, then several together.
    A change works if `gpulab.verdict` says that its losses and the old ones are equivalent, on the same seeds.

    One of many changes may look equivalent by luck. So half of the seeds are kept out of the search. A change that
    works on the others is confirmed on these fresh seeds: the first at the level alpha / 2, the second at alpha / 4,
    and so on, so that all together err with the probability alpha at most. A change without hope is given up after 3,
    6, 12, … seeds. Nothing is trained that is not smaller than the smallest confirmed change.

    The size of a change is its distance from the original. It is the sum, over the parameters, of |log2(new / old)| for
    the learning rate, the batch size and what is given as a range; of the steps along the sorted list for other
    numbers; and of 1 for anything else.

    Every run is kept in `store`. A search that was killed goes on where it was when it is called again, and one that is
    done trains nothing. Then only trainings that failed are tried again; a larger `trials` goes further.

    Args:
        target: The runs of the old setting, a row for each seed, as from `gpulab.runs` or `seed_runs`. At least 6 seeds
            are needed, better 20. The second half of them is kept for confirmation.
        search: What may change, by name: a list of values, or (low, high) for a range of numbers. A name is an option
            of a setting (`tf32`, `precision`, …; the value None leaves the option out), or a parameter of the training:
            an option of `train`; without it `learning_rate` and the numbers and words among the options of the model
            (`batch_size` of the autoencoder, `kernel_size` of PredNet).
        setting: The new setting.
        train: A training of your own, as `gpulab.train` describes it. The values of its options are those that the runs
            of `target` had, or else their defaults. A training that raises makes the trial fail, and the search goes
            on. Without this argument the runs of `target` are trained again as their records say.
        metric: The column of `target` to compare by.
        margin: The largest difference without importance, as for `verdict`.
        alpha: The probability with which a change may be confirmed wrongly.
        trials: How many changes are tried at most.
        workers: How many seeds train at the same time. With more than one, each trains in a process of its own, where
            `train` travels by cloudpickle. This changes nothing but the time, if the setting says how many threads
            compute.
        store: The folder in which runs are kept, those of `train` by its text and its options. By default
            `$GPULAB_STORE`, or the folder `runs`.
        progress: Whether to show a progress bar.

    Returns:
        The `Reproduction`, with the answer in `best` and `confirmed`, and all trials in `table`.

    Raises:
        UsageError: For a target that is not of one setting, has fewer than 6 seeds or a diverged run, or does not say
            how it was trained; for what cannot be searched; and for a store in object storage.
        GpulabError: When the setting cannot run here, or every trial failed.

    Examples:
        >>> import tempfile, torch
        >>> import gpulab as gl
        >>> def train(seed, setting, learning_rate=0.002):
        ...     x = torch.linspace(-1, 1, 64, dtype=setting.dtype)[:, None]
        ...     net = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(net.parameters(), learning_rate)
        ...     for _ in range(100):
        ...         loss = (net(x) - x).square().mean()
        ...         optimizer.zero_grad(); loss.backward(); optimizer.step()
        ...         yield loss.item()
        >>> old = gl.seed_runs(train, "cpu", seeds=12, progress=False)
        >>> space = {"learning_rate": [0.001, 0.004], "precision": ["float32"]}
        >>> where = tempfile.mkdtemp()
        >>> found = gl.reproduce(old, space, "cpu:precision=bfloat16", train, store=where, progress=False)
        >>> found.best, found.confirmed
        ({'precision': 'float32'}, True)

    References:
        The statistics are those of `verdict`. Combinations that are too many to be listed are drawn by a sequence of
        Halton's (1960, *On the efficiency of certain quasi-random sequences of points in evaluating multi-dimensional
        integrals*, Numerische Mathematik 2:84).
    """
    check_count("trials", trials)
    check_count("workers", workers)
    parsed = Setting.parse(setting)
    old = Target(target, metric, margin, alpha)
    arguments, originals = recorded_training(old.runs, metric) if train is None else own_training(train, old.runs)
    arguments["store"] = str(folder_of(stores.default_store() if store is None else store))
    space = Space(search, originals, parsed)
    if clashing := sorted(space.original.keys() & {*UNTRIED, "trial", "changes", "distance", "p_equivalent_holm"}):
        raise UsageError(f"search: {clashing[0]!r} is a column of the search's own table; call that option otherwise")
    check_runs_here(parsed)
    points, table = _search(old, space, arguments, trials, workers, progress)
    confirmed = bool(table.confirmed.any())
    worked = table[table.confirmed if confirmed else table.decision.isin(WITHIN)]
    chosen = int(worked.distance.idxmin()) if len(worked) else None
    point = None if chosen is None else points[chosen]
    return Reproduction(
        table=table,
        target=str(old.runs.setting[0]),
        setting=str(parsed),
        metric=metric,
        margin=old.margin,
        margin_asked=margin,
        original=space.original,
        chosen=chosen,
        best=None if point is None else space.changes(point),
        best_setting=None if point is None else space.arguments(point)[0],
        confirmed=confirmed,
        smaller_left=space.count_nearer(table.distance[chosen] if confirmed else math.inf, points),
    )


def _search(
    target: Target, space: Space, arguments: dict[str, Any], trials: int, workers: int, progress: bool
) -> tuple[list[Point], pd.DataFrame]:
    """Try points of the space, until none nearer than the best is left or all trials are done; and a row of each."""
    import pandas as pd

    from gpulab.progress import Progress

    points: list[Point] = []
    rows: list[dict[str, Any]] = []

    def limit() -> float:
        return min((row["distance"] for row in rows if row["confirmed"]), default=math.inf)

    def losses_of(point: Point, seeds: Sequence[int]) -> dict[int, float]:
        setting, changes = space.arguments(point)
        job = changed_arguments(arguments, changes) | {"setting": setting}
        losses = {}
        for seed, metrics in train_all([{**job, "seed": seed} for seed in seeds]):
            if metrics and target.metric not in metrics:
                raise GpulabError(f"there is no {target.metric!r}; the training gave {', '.join(metrics)}")
            losses[seed] = float(metrics.get(target.metric, math.nan))
        return losses

    bar = Progress(total=trials, unit="trial", disable=not progress, leave=False)
    with bar, trainings(workers) as train_all:
        for point in itertools.islice(space.candidates(limit), trials):
            bar.set_description(words := space.words(point))
            row = {"trial": len(rows), "changes": words, **point, "distance": space.distance(point), **UNTRIED}
            earlier = sum(not math.isnan(earlier_row["fresh_alpha"]) for earlier_row in rows)
            try:
                row |= verdicts_on(target, functools.partial(losses_of, point), earlier)
            except Exception as error:  # whatever a function of the user's raises
                note = str(error) if isinstance(error, GpulabError) else f"{type(error).__name__}: {error}"
                row |= {"state": "failed", "note": note}
            points.append(point)
            rows.append(row)
            bar.update()
    if all(row["state"] == "failed" for row in rows):
        raise GpulabError(f"every trial failed ({len(rows)}); the first: {rows[0]['note']}")
    table = pd.DataFrame(rows)
    # A trial that was pruned or failed counts in Holm's correction with p = 1.
    counted = (table.state == "finished") & table.p_equivalent.notna()
    table["p_equivalent_holm"] = holm(list(table.p_equivalent.astype(float).where(counted, 1.0)))
    return points, table


# --- words -------------------------------------------------------------------------------------------


def _sentences(result: Reproduction) -> Iterator[str]:
    table, losses, under = result.table, f"the losses of {result.target}", f"under {result.setting}"
    if result.chosen is None:
        yield f"No change tried gives {losses} {under} again ({len(table)} tried)."
    else:
        row = table.loc[result.chosen]
        change = f"{row.changes} (distance {row.distance:.3g}; {len(table)} tried)"
        if not result.best:
            doubt = "" if result.confirmed else " (not confirmed)"
            yield f"Nothing need change: {under} {losses} come back as they are{doubt}."
        elif result.confirmed:
            yield f"The smallest change found that gives {losses} {under} again: {change}."
        else:
            yield f"Not confirmed: {change} gave {losses} {under} again on the seeds of the search only."
        yield _evidence(result, row)
    if result.best != {}:
        for row in table[table.distance == 0].itertuples():
            if row.state == "failed":
                yield "With nothing changed, the training failed."
            elif row.diverged:
                yield f"With nothing changed, {row.diverged} of {row.diverged + row.seeds} seeds diverged."
            elif row.state == "pruned":  # before there was a decision
                yield f"With nothing changed, {row.note}."
            else:
                interval = "" if math.isnan(row.low) else f" [{row.low:.2g}, {row.high:.2g}]"
                yield f"With nothing changed: {row.decision}, difference {row.difference:.2g}{interval}."
    if counts := list(_confirmed_by_parameter(result)):
        yield f"Confirmed, by what was changed: {'; '.join(counts)}."
    if result.best != {}:
        yield _smaller(result)
    failed = table[table.state == "failed"]
    if len(failed):
        yield f"{len(failed)} trial(s) failed; the first, {failed.changes.iloc[0]}: {failed.note.iloc[0]}."


def _evidence(result: Reproduction, row: Any) -> str:
    """What the verdicts say of the answer, on the fresh seeds and on those of the search."""
    searched = (
        f"on the {row.seeds} of the search {row.decision}, equivalence p = {p_text(row.p_equivalent)}, "
        f"{p_text(row.p_equivalent_holm)} after Holm over {len(result.table)} trials."
    )
    if not row.fresh_seeds:
        return f"O{searched[1:]}"
    margin = "as asked"
    if isinstance(result.margin_asked, str):
        margin_words = result.margin_asked.replace("sd", " sd")
        margin = f"{margin_words} between the target's seeds, cautiously estimated"
    return (
        f"On {row.fresh_seeds} seeds that the search had not seen: {row.fresh_decision} within ±{result.margin:.2g} "
        f"({margin}), difference {row.fresh_difference:.2g}, equivalence p = "
        f"{p_text(row.fresh_p_equivalent)} (held to {row.fresh_alpha:.2g}); {searched}"
    )


def _confirmed_by_parameter(result: Reproduction) -> Iterator[str]:
    """How many changes of each parameter alone were confirmed, and of several together."""
    table = result.table
    changed = {
        name: table[name].notna() if original is None else table[name].map(lambda value, was=original: value != was)
        for name, original in result.original.items()
    }
    count = sum(flags.astype(int) for flags in changed.values())
    groups = {name: flags & (count == 1) for name, flags in changed.items()} | {"several together": count > 1}
    for name, flags in groups.items():
        matching = table[flags]
        unsettled = int((matching.decision == "inconclusive").sum())
        note = f" ({unsettled} inconclusive)" if unsettled else ""
        if len(matching):
            yield f"{name} {int(matching.confirmed.sum())} of {len(matching)}{note}"


def _smaller(result: Reproduction) -> str:
    """What is known of smaller changes, or where nothing worked, of any."""
    table, noun = result.table[result.table.distance > 0], "change"
    if result.confirmed:
        table, noun = table[table.distance < result.table.distance[result.chosen]], "smaller change"
    unsettled = int(((table.decision == "inconclusive") & (table.state == "finished")).sum())
    words = f"No {noun} was tried in vain"
    if len(table):
        words = f"{len(table)} {noun}{'' if len(table) == 1 else 's'} tried in vain, {unsettled} of them inconclusive"
    if result.smaller_left is None:
        return f"{words}; the space holds more."
    return f"{words}; {result.smaller_left or 'none'} in the space left untried."
