"""Notebook 10: the comparisons in its figure, and what the title says about them."""

import re

import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import overview


def verdict_of(shift, settings=("cuda:tf32=off", "cuda:tf32=on")):
    """A verdict on eight seeds under `cpu` and, shifted by `shift`, under two settings of a GPU."""
    rows = [
        {"setting": setting, "seed": seed, "final_loss": 1 + 0.1 * seed + off, "weights": bits}
        for setting, off, bits in [("cpu", 0.0, "a"), *((name, shift, "b") for name in settings)]
        for seed in range(8)
    ]
    frame = pd.DataFrame(rows)
    frame["final_loss"] += 1e-6 * (frame.seed % 3) * (frame.setting != "cpu")
    frame["weights"] += frame.seed.astype(str)
    return gl.verdict(frame, reference="cpu")


def test_comparison_table_divides_by_the_margin_and_merges_levels_with_the_same_bits():
    judged = verdict_of(0.5)
    (row,) = companion.comparison_table({"Settings: A network": judged}).itertuples()
    level = judged.table.iloc[0]
    assert (row.question, row.comparison) == ("Settings", "A network, GPU: no TF32 / TF32")
    assert row.decision == "different"
    assert row.difference == pytest.approx(level.difference / level.margin)
    assert row.low == pytest.approx(level.low / level.margin)


def test_comparison_table_leaves_out_comparisons_in_which_nothing_can_differ():
    same = verdict_of(0.0)
    frame = same.runs.assign(final_loss=1 + 0.1 * same.runs.seed, weights=same.runs.seed)
    judged = gl.verdict(frame, reference="cpu")
    assert companion.comparison_table({"Settings: A network": judged}).empty


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (0.5, "differs in 1 of 1 comparisons: settings (1)"),
        (0.0, "None of 1 comparisons shows a difference"),
    ],
)
def test_draw_comparisons_has_a_title_that_follows_the_decisions(shift, said):
    table = companion.comparison_table({"Settings: A network": verdict_of(shift)})
    picture = companion.draw_comparisons(table)
    assert said in picture.figure.get_suptitle().replace("\n", " ")
    assert said in picture.alt.replace("\n", " ")


def test_draw_comparisons_shows_every_interval_of_the_recorded_runs_on_its_axis():
    longer = gl.recorded_runs("longer").query("setting == 'cuda:tf32=off'")
    table = companion.comparison_table(
        {"Longer": companion.learning_table(longer, "loader", "window")}
    )
    (axes,) = companion.draw_comparisons(table).figure.axes
    low, high = axes.get_xlim()
    assert low < table.low.min() < table.high.max() < high


def test_depending_decisions_names_only_rows_that_depend():
    row = {"profile": "quick", "speed": 2, "metric": "final loss of all seeds"}
    row |= dict.fromkeys(("decision", "uncorrected", "registered"), "equivalent")
    strict = row | {"decision": "inconclusive"}
    registered = row | {"registered": "different but negligible"}
    said = overview.depending_decisions(pd.DataFrame([row, strict, registered]))
    assert len(said) == 2
    assert all(sentence.startswith("Quick size, speed 2, final loss") for sentence in said)
    decisions = re.compile("different but negligible|different|equivalent|inconclusive")
    assert decisions.findall(said[0]) == ["inconclusive", "equivalent"]
    assert ("correction" in said[0], "registered" in said[0]) == (True, False)
    assert decisions.findall(said[1]) == ["equivalent", "different but negligible"]
    assert "registered margin" in said[1]
