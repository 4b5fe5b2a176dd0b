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
        0.95**20: "this is the probability that none of them is called different",
        1.0: "twenty times 5 % is only an upper bound, because several can happen together",
    }
    right = near(answer, 1 - 0.95**20, mistakes)
    return (
        f"{right:.0%}: it is more likely than not that at least one of twenty settings that do"
        " nothing is called different."
    )


@exercise(
    "10-2",
    "a table of your runs: the autoencoder, profile quick, cpu:threads=1, at least three seeds",
)
def _own_runs(answer: Answer) -> str:
    runs = table(answer, "setting", "seed", "protocol", "final_loss", "weights", "recorded")
    need(
        not runs.recorded.any(),
        "some of these runs are recorded ones: pass only the runs that you made",
    )
    recorded_runs = recorded("autoencoder", "quick", loader="window", setting="cpu:threads=1")
    paired_runs = runs.merge(recorded_runs, on=["protocol", "setting", "seed"])
    seeds = paired_runs.seed.nunique()
    need(
        seeds >= 3,
        "expected at least three seeds with the profile quick under cpu:threads=1 that were also"
        f" recorded, got {seeds}",
    )
    largest_difference = (paired_runs.final_loss_x - paired_runs.final_loss_y).abs().max()
    same_bits = int((paired_runs.weights_x == paired_runs.weights_y).sum())
    in_sd = largest_difference / recorded_runs.final_loss.std()
    return (
        f"{same_bits} of {len(paired_runs)} runs have the same bits as the recorded ones; the"
        f" losses differ by at most {in_sd:.1e} standard deviations between seeds."
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
            f"{name} {shown(plan[name])} is not a column of gl.runs",
        )
    if plan["factor"] == "setting":
        Setting.parse(plan["reference"])  # raises an error that says what is wrong
    seeds = number(plan["seeds"])
    need(seeds >= 6, f"{seeds:g} seeds cannot show a difference, however large: take at least six")
    found = verdict(
        runs[runs["rerun"] == 0], margin=plan["margin"], reference="cuda:tf32=off"
    ).table
    needed = found.seeds_needed.where(found.decision == "inconclusive", 10).min()
    need(
        seeds >= needed,
        f"{seeds:g} seeds are too few: recorded runs suggest {needed:g} or more for this margin",
    )
    return (
        f"{seeds:g} seeds are enough for the setting whose losses scatter least. Whether the plan"
        " is convincing is for you to judge."
    )
