"""Findings: the table of answers, diverged runs, and details that are in another notebook."""

import re

import numpy as np
import pandas as pd
import pytest

import companion
import gpulab as gl
from companion.findings import short_answer


def judged(losses, reference=1.0):
    """A verdict on eight seeds under `cuda` with these losses against `cpu`; NaN diverged."""
    seeds = np.arange(8)
    cpu = np.broadcast_to(reference, 8) + 0.1 * seeds
    values = {"cpu": cpu, "cuda:tf32=on": np.broadcast_to(losses, 8) + 0.1 * seeds}
    rows = [
        {"setting": setting, "seed": seed, "final_loss": loss}
        for setting, both in values.items()
        for seed, loss in zip(seeds, both, strict=True)
    ]
    frame = pd.DataFrame(rows)
    status = frame.final_loss.isna().map({True: "diverged", False: "finished"})
    return gl.verdict(frame.assign(status=status), reference="cpu")


@pytest.mark.parametrize(
    ("losses", "reference", "seeds", "answer"),
    [
        (np.nan, 1.0, "8", "different: 8 of 8 diverged (0 of 8 of the reference)"),
        (np.nan, np.nan, "8", "inconclusive: 8 of 8 diverged (8 of 8 of the reference)"),
        (3.0, 1.0, "8", "different"),
    ],
)
def test_short_answer_counts_diverged_runs_where_no_seed_has_a_loss(
    losses, reference, seeds, answer
):
    assert short_answer([judged(losses, reference)]) == (seeds, answer, "")


def test_short_answer_counts_some_diverged_runs_beside_other_answers():
    seeds, answer, _ = short_answer([judged(np.nan), judged(3.0)])
    assert seeds == "8"
    assert "1 different: 8 of 8 diverged" in answer
    assert "1 different (GPU (TF32))" in answer


def test_finding_does_not_repeat_what_another_notebook_details():
    parts = {"In short": "Two questions.", "Here": judged(3.0), "There": judged(1.0)}
    page = companion.finding(parts, details={"There": "notebook 04"})
    html = page.words()
    rows = re.findall(r"<th>(\w+)</th>(?:<td>[^<]*</td>){2}<td>([^<]*)</td></tr>", html)
    assert dict(rows) == {"Here": "below", "There": "notebook 04"}
    folds = html.partition("<details>")[2]
    assert "Here" in folds
    assert "There" not in folds
    said = dict(page.sentences())
    assert said["There"] == ["equivalent (8 seeds; notebook 04)."]
    assert "times as high" in said["Here"][0]


def test_statistics_say_how_settings_are_written():
    html = companion.finding({"Here": judged(3.0)}).words()
    assert "as one types them" in html.partition("The statistics")[2]
    levels = judged(3.0).runs.rename(columns={"setting": "loader"})
    levels["loader"] = levels.loader.map({"cpu": "copied", "cuda:tf32=on": "reused"})
    other = gl.verdict(levels, factor="loader", reference="copied")
    assert "as one types them" not in companion.finding({"Here": other}).words()
