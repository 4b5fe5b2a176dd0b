"""Checks of the exercises in `00_start_here.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import Answer, exercise, near, need, pair, table
from companion.findings import setting_in_text


@exercise("00-1", "a number of seeds")
def _fewest_seeds(answer: Answer) -> str:
    mistakes = {
        7: "half of the chance is missing: all seeds may move up, or all may move down",
        6: "the smallest number for 5 %, not for 1 %",
    }
    near(answer, 8, mistakes, rel=1e-6)
    return f"by chance alone, 8 seeds agree with a probability of 2 in 256, or {2 / 256:.3g}."


@exercise("00-2", "(calm, busy), two tables of runs from two stores")
def _under_load(answer: Answer) -> str:
    calm, busy = (
        table(runs, "protocol", "setting", "seed", "weights", "path", "seconds")
        for runs in pair(answer)
    )
    need(
        not set(calm.path) & set(busy.path),
        "both tables contain the same runs: a store does not train a run again, so use two stores",
    )
    pairs = calm.merge(busy, on=["protocol", "setting", "seed"])
    need(
        pairs.seed.nunique() >= 3,
        f"{pairs.seed.nunique()} seeds are in both tables under the same setting: use three",
    )
    same, slower = (
        (pairs.weights_x == pairs.weights_y).sum(),
        pairs.seconds_y.sum() / pairs.seconds_x.sum(),
    )
    return (
        f"{same} of {len(pairs)} runs have the same bits; under load, training took"
        f" {slower:.2g} times as long."
    )


@exercise(
    "00-3", "a table of runs with two or more settings and three or more seeds, each run twice"
)
def _reruns(answer: Answer) -> str:
    runs = table(answer, "setting", "seed", "rerun", "weights").groupby(["setting", "seed"])
    need((runs["rerun"].nunique() >= 2).all(), "a seed was run only once: use reruns=2")
    results = runs.weights.nunique().unstack("seed")
    settings, seeds = results.shape
    need(settings >= 2, "there is only one setting: compare at least two")
    need(seeds >= 3, f"{seeds} seeds are too few: use at least three")
    others = ", ".join(map(setting_in_text, results.index[results.max(axis=1) > 1]))
    outcome = f"different bits under {others}" if others else "the same bits"
    return (
        f"{settings} settings were run twice, and the second run gave {outcome}. Nobody has a"
        " complete list of settings that are not repeatable."
    )
