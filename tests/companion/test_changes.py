"""Single changes on networks that learned: names, comparison and title of the figure."""

import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import changes


@pytest.fixture(scope="module")
def recorded():
    return companion.name_changes(gl.recorded_runs("changes"))


@pytest.fixture(scope="module")
def judged(recorded):
    return companion.judge_changes(recorded)


def test_name_changes_calls_only_plain_runs_under_a_reference_nothing(recorded):
    plain = recorded[recorded.change == "nothing"]
    assert set(plain.setting) == {"cuda:tf32=off", "cpu:threads=1"}
    assert plain["flip"].isna().all()
    assert (plain.rerun == 0).all()
    assert set(plain.draws.dropna()) <= {"cpu"}


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("cuda:tf32=off", "nothing"),
        ("cuda:tf32=on", "TF32"),
        ("cuda:tf32=on,cudnn=off,deterministic=on", "TF32 + deterministic + without cuDNN"),
        ("cpu:threads=1,emulate=tf32", "TF32, emulated"),
        ("cpu:threads=2", "more threads"),
        ("cpu:threads=1", "nothing"),
    ],
)
def test_name_changes_names_every_part_that_differs(setting, change):
    runs = pd.DataFrame(
        {"setting": [setting], "rerun": [0], "flip": [None], "draws": [None], "seed": [0]}
    )
    assert companion.name_changes(runs).change.tolist() == [change]


def test_judge_changes_means_agree_with_differences_by_hand(recorded, judged):
    table, seeds = judged
    runs = recorded.query("experiment == 'prednet' and profile == 'motion' and change != ''")
    runs = runs[runs.machine == "NVIDIA H200"]
    losses = runs.pivot_table(index="seed", columns="change", values="final_loss")
    sd = losses["nothing"].std()
    moves = (losses["TF32"] - losses["nothing"]) / sd
    row = table[(table.profile == "motion") & (table.change == "TF32")].iloc[0]
    assert row["mean"] == pytest.approx(moves.mean())
    assert row.largest_move == pytest.approx(moves.abs().max())
    own = seeds[(seeds.profile == "motion") & (seeds.change == "TF32")]
    assert len(own) == 16


def test_judge_changes_leaves_out_changes_of_few_seeds(recorded):
    few = recorded[(recorded.change != "TF32") | (recorded.seed < changes.MIN_SEEDS - 1)]
    table, _ = companion.judge_changes(few)
    assert "TF32" not in set(table.change)


def test_title_of_changes_says_what_moved_the_mean(judged):
    table, seeds = judged
    assert "beyond it" not in changes.title_of_changes(table, seeds)
    refuted = table.assign(decision=table.decision.mask(table.change == "TF32", "different"))
    assert changes.title_of_changes(refuted, seeds).splitlines()[0].endswith("beyond it: TF32")


def test_draw_changes_shows_each_change_and_each_seed(judged):
    table, seeds = (part[part.profile == "paper"] for part in judged)
    picture = companion.draw_changes(table, seeds, {"paper": "250 updates"})
    left, right = picture.figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == list(
        table.sort_values("median_move").change
    )
    assert len(right.collections[0].get_offsets()) == len(seeds)
    assert "of 2 changes" in picture.alt  # a second run of the reference is not a change
    assert f"of {len(seeds)} seeds" in picture.alt


def test_describe_changes_says_how_far_the_furthest_seed_moves(judged):
    table, seeds = (part[part.profile == "motion"] for part in judged)
    text = changes.describe_changes(table, seeds)
    arithmetic = seeds[seeds.change != "weights drawn by the GPU"]
    assert f"{arithmetic.move.max():.2g} sd" in text
    still = changes.describe_changes(table, seeds.assign(move=0.0))
    assert " sd" not in still


def test_describe_changes_of_too_few_seeds_decides_nothing(recorded):
    few = recorded[recorded.seed < 2]
    assert "cannot show" in changes.describe_changes(*changes.judge_changes(few))
