"""Checks of the exercises in `06_saddle_points.ipynb`."""

from __future__ import annotations

import pandas as pd

from companion.exercises.answers import Answer, choice, exercise, need, pair, table


def _escapes(value: Answer, optimizer: str) -> pd.DataFrame:
    columns = (
        "setting",
        "optimizer",
        "perturbation",
        "learning_rate",
        "master_weights",
        "escaped",
        "changed_share",
        "step_ratio",
    )
    frame = table(getattr(value, "table", value), *columns)
    return frame[frame.optimizer == optimizer]


@exercise(
    "06-1",
    "(table, who): the result of gl.saddles.escape_table, and who left: 'float32', 'float64',"
    " 'both' or 'neither'",
)
def _pushed(answer: Answer) -> str:
    frame, who = pair(answer)
    frame = _escapes(frame, "sgd")
    need(
        set(frame.perturbation) == {1e-9},
        "the question is about perturbations=[1e-9], not about another push",
    )
    exact = frame.setting.str.contains("precision=float64")
    plain = ~frame.setting.str.contains("precision|emulate")
    need(
        exact.any() and plain.any(),
        "the table lacks float32 or float64: use both on the same kind of CPU",
    )
    names = {
        (True, True): "both",
        (True, False): "float64",
        (False, True): "float32",
        (False, False): "neither",
    }
    left = names[bool(frame.escaped[exact].all()), bool(frame.escaped[plain].all())]
    moved = (
        f"in float32 the first step changed {frame.changed_share[plain].mean():.0%} of the weights"
    )
    need(choice(who, *names.values()) == left, f"in this table {left} left, and {moved}")
    return f"{left} left, and {moved}; the step of the other weights was rounded away."


@exercise(
    "06-2",
    "a table of escapes by Adam, weights in bfloat16, with and without master weights, at several"
    " learning rates",
)
def _adam_in_bfloat16(answer: Answer) -> str:
    frame = _escapes(answer, "adam")
    frame = frame[frame.setting.str.contains("precision=bfloat16")]
    left = frame.groupby(["master_weights", "learning_rate"]).escaped.all()
    plain = left.get(False, left[:0])
    need(
        plain.any() and not plain.all(),
        "without master weights, Adam should leave at some learning rates and not at others",
    )
    leaves, holds = plain[plain].index.min(), plain[~plain].index.max()
    need(
        leaves <= 10.001 * holds,
        f"{holds:g} and {leaves:g} are more than a factor of ten apart: try rates between them",
    )
    need(
        (True, holds) in left.index,
        f"the rate {holds:g}, at which Adam stays without master weights, was not tried with them",
    )
    outcome = "leaves" if left[True, holds] else "stays as well"
    return (
        f"Adam does not leave at a learning rate of {holds:g} and leaves at {leaves:g}; with master"
        f" weights it {outcome} at {holds:g}."
    )


@exercise("06-3", "a table of escapes by sgd in float32, from a saddle with small weights")
def _small_weights(answer: Answer) -> str:
    frame = _escapes(answer, "sgd")
    frame = frame[~frame.setting.str.contains("precision|emulate") & ~frame.master_weights]
    need(
        (frame.step_ratio > 1).any(),
        "the steps in float32 are still rounded away: step_ratio should be above 1",
    )
    frame = frame[frame.step_ratio > 1]
    times_expected = float((frame.steps / frame.expected_steps).median())
    need(
        0.5 < times_expected < 2,
        "it did not leave when the law predicted: push it with perturbations=[…], or wait longer",
    )
    return (
        f"float32 leaves after {times_expected:.2f} times the number of steps that the law"
        " predicts. Would a trained network pass there?"
    )
