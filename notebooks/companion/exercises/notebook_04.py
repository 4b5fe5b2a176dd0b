"""Checks of the exercises in `04_prednet.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import (
    Answer,
    decisions,
    exercise,
    judged,
    near,
    need,
    pair,
    recorded,
    shown,
)
from companion.learning import missing_colour_losses
from gpulab.training import Run


@exercise("04-1", "the number of seeds among the 32")
def _not_learned(answer: Answer) -> str:
    runs = recorded("prednet", "quick", loader="copied", speed=1)
    stuck_runs = runs[runs.final_loss >= missing_colour_losses(runs)]
    stuck = int((stuck_runs.setting == "cpu:threads=1").sum())
    mistakes = {
        32 - stuck: "these are the seeds that learned, but the question is about the others",
        len(stuck_runs): "this counts both settings, but each seed was run under both",
    }
    near(answer, stuck, mistakes, rel=1e-6)
    return (
        f"{stuck} of 32 seeds, and {len(stuck_runs) - stuck} on the GPU. A mean over all seeds"
        " mixes whether they learn with how well."
    )


@exercise(
    "04-2",
    "(run, ratio): a run of gl.train, and its held-out loss over that of repeating the last frame",
)
def _own_film(answer: Answer) -> str:
    run, ratio = pair(answer)
    need(isinstance(run, Run), f"{shown(run)} is not a run: gl.train(…) returns one")
    film = run.record["configuration"]["data"]
    need(
        film != "walk",
        "this is the walk, the film of the notebook: use another, 'video:FILE' or 'moving-digits'",
    )
    repeat = run.data.repeat_loss()
    trained_on = "final_loss is the loss on the training frames: use heldout_loss"
    near(ratio, run.heldout_loss / repeat, {run.final_loss / repeat: trained_on})
    beats = "beats" if run.heldout_loss < repeat else "does not beat"
    return (
        f"on {film} the network {beats} repeating the last frame: {run.heldout_loss / repeat:.3g}"
        " times its loss."
    )


@exercise(
    "04-3",
    "a verdict by setting on when a seed leaves its plateau (a column that you add), from at least"
    " six seeds",
)
def _leaving(answer: Answer) -> str:
    metric = getattr(answer, "metric", "")
    need(
        metric not in ("final_loss", "heldout_loss"),
        f"{metric} says how well a seed learns, but the question is when it leaves the plateau",
    )
    plateau_verdict = judged(answer, "setting", metric=metric)
    not_counted = int(plateau_verdict.table.diverged.sum() + plateau_verdict.table.unpaired.sum())
    return (
        f"{decisions(plateau_verdict)}. Not counted: {not_counted} seeds. Another threshold might"
        " lead to another decision."
    )
