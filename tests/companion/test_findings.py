"""Findings, a sentence each."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import companion
import gpulab as gl


def judged(shift, seeds=12, spread=1.0, weights=None, **options):
    noise = np.random.default_rng(0).normal(0, spread, seeds)
    rows = [{"setting": "a", "seed": seed, "final_loss": 10 + seed / seeds} for seed in range(seeds)]
    rows += [
        {"setting": "b", "seed": seed, "final_loss": 10 + seed / seeds + shift + noise[seed]} for seed in range(seeds)
    ]
    frame = pd.DataFrame(rows)
    if weights:
        frame["weights"] = [f"{weights}{row.seed}" for row in frame.itertuples()]
    return gl.verdict(frame, reference="a", **options)


@pytest.mark.parametrize(
    ("shift", "spread", "decision", "said"),
    [
        (0.0, 1e-9, "equivalent", "no difference that matters (less than 0.45 % of the mean), with 12 seeds"),
        (1e-3, 1e-9, "different but negligible", "different, by too little to matter (less than 0.45 % of the mean)"),
        (5.0, 1e-9, "different", "1.48 times as high, higher in 12 of 12 seeds"),
        (-5.0, 1e-9, "different", "0.522 times as high, higher in 0 of 12 seeds"),
        (0.0, 1.0, "inconclusive", "higher in 7 of 12 seeds, but 12 seeds do not settle it"),
    ],
)
def test_every_decision_has_its_words(shift, spread, decision, said):
    verdict = judged(shift, spread=spread)
    assert verdict.decision == decision
    assert f"b against a: {said}" in str(companion.finding({"Here": verdict}))


def test_same_bits_a_setting_alone_and_runs_that_diverged_have_words_of_their_own():
    same = judged(0.0, spread=0.0, weights="w")
    assert str(companion.finding({"Here": same})) == "Here: b against a: the same bits in every seed."
    frame = pd.DataFrame({"setting": ["a"] * 12 + ["b"] * 12, "seed": [*range(12)] * 2})
    frame["final_loss"] = np.where((frame.setting == "b") & (frame.seed < 10), np.nan, 1.0 + frame.seed)
    frame["status"] = np.where(frame.final_loss.isna(), "diverged", "finished")
    text = str(companion.finding({"Here": gl.verdict(frame, reference="a")}))
    assert text == "Here: b against a: 10 of its runs diverged, and 0 of the others."
    assert "nothing to compare" in str(companion.finding({"Here": gl.verdict(frame[:12])}))


def test_the_statistics_are_behind_a_fold_and_text_is_escaped():
    verdict = judged(5.0, spread=1e-9)
    page = companion.finding({"A <b>": verdict, "Said": "1 < 2"}).html()
    before, fold = page.split("<details>")
    assert "A &lt;b&gt;" in before
    assert "1 &lt; 2" in before
    assert "standard deviation" not in before
    assert "standard deviation" in fold
    assert "<details>" not in companion.finding({"Said": "nothing else"}).html()


def test_a_table_says_a_sentence_for_each_family():
    longer = companion.longer_runs().query("setting == 'cuda:tf32=off'")
    table = companion.learning_table(longer, factor="loader", reference="window")
    ((heading, (sentence,)),) = companion.finding([("Memory", table)]).sentences()
    assert heading == "Memory"
    (loss,) = table[table.metric == "final loss of all seeds"].relative
    assert f"the loss is {1 + loss:.3g} times as high" in sentence
    assert "0 instead of 16 of 16 seeds beat repeating the last frame" in sentence


def test_the_page_on_reading_a_verdict_shows_what_its_example_prints(capsys):
    page = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text(encoding="utf-8")
    example, printed = re.search(r"```python\n(.+?)```\n```\n(.+?)```", page, re.S).groups()
    exec(compile(example, "docs/verdict.md", "exec"), {})
    assert capsys.readouterr().out.strip() == printed.strip()
