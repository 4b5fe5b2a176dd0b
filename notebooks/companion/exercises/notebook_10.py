"""Checks of the exercises in `10_verdict.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import (
    Answer,
    exercise,
    fields,
    near,
    need,
    number,
    recorded,
    shown,
    table,
)
from gpulab.settings import Setting
from gpulab.stats import verdict


@exercise("10-1", "a probability, between 0 and 1")
def _luck(answer: Answer) -> str:
    mistakes = {
        0.95**20: "the probability that none of them does",
        1.0: "twenty times 5 %: a bound, which adds up what happens together",
    }
    right = near(answer, 1 - 0.95**20, mistakes)
    return (
        f"{right:.0%}: of twenty settings that do nothing, one is more likely than not to be called"
        " different."
    )


@exercise(
    "10-2",
    "a table of runs of yours: the autoencoder, quick, under cpu:threads=1, three seeds at least",
)
def _own_runs(answer: Answer) -> str:
    runs = table(answer, "setting", "seed", "protocol", "final_loss", "weights", "recorded")
    need(
        not runs.recorded.any(),
        "some of these runs are the recorded ones: give those that you made",
    )
    recorded_runs = recorded("autoencoder", "quick", loader="window", setting="cpu:threads=1")
    paired_runs = runs.merge(recorded_runs, on=["protocol", "setting", "seed"])
    seeds = paired_runs.seed.nunique()
    need(
        seeds >= 3,
        f"{seeds} seeds are of the profile quick, under cpu:threads=1, and recorded too: take"
        " three",
    )
    largest_difference = (paired_runs.final_loss_x - paired_runs.final_loss_y).abs().max()
    same_bits = int((paired_runs.weights_x == paired_runs.weights_y).sum())
    apart = (
        f"{largest_difference / recorded_runs.final_loss.std():.1e} standard deviations between"
        " seeds apart"
    )
    return (
        f"{same_bits} of {len(paired_runs)} have the same bits as the recorded ones; the losses are"
        f" at most {apart}."
    )


@exercise(
    "10-3",
    "{'metric': …, 'factor': …, 'reference': …, 'margin': …, 'seeds': …}, planned before any run",
)
def _registration(answer: Answer) -> str:
    plan = fields(answer, "metric", "factor", "reference", "margin", "seeds")
    runs = recorded("prednet", "paper", loader="window")
    for name in ("metric", "factor"):
        need(
            isinstance(plan[name], str) and plan[name] in runs,
            f"{name} {shown(plan[name])}: no column of gl.runs",
        )
    if plan["factor"] == "setting":
        Setting.parse(plan["reference"])  # which says what is wrong with it
    seeds = number(plan["seeds"])
    need(seeds >= 6, f"{seeds:g} seeds cannot show a difference, however large: six are the fewest")
    found = verdict(
        runs[runs["rerun"] == 0], margin=plan["margin"], reference="cuda:tf32=off"
    ).table
    needed = found.seeds_needed.where(found.decision == "inconclusive", 10).min()
    need(
        seeds >= needed,
        f"{seeds:g} seeds: as far as recorded runs tell, this margin takes {needed:g} at least",
    )
    return (
        f"{seeds:g} seeds are enough for the setting that scatters least. Whether it convinces is"
        " yours to say."
    )
