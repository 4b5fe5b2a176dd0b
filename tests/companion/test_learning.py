"""What networks have learned, and findings, a sentence each."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import learning
from gpulab.store import recorded


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for options in ({}, {"speed": 2.0}, {"seed": 3}):
        gl.train("prednet", profile="smoke", data_options=options, store=store, progress=False)
    gl.train("autoencoder", profile="smoke", store=store, progress=False)
    return gl.runs(store)


def test_what_is_repeated_is_what_the_final_loss_is_of(frame):
    losses = learning.repeat_losses(frame)
    assert losses.isna().tolist() == (frame.experiment == "autoencoder").tolist()
    for row, loss in zip(frame.itertuples(), losses, strict=True):
        if row.experiment == "prednet":
            film = gl.load("walk", frames=200, size=(24, 32), seed=int(row.scene_seed), speed=row.speed)
            frames = np.stack(list(film.stream(0, 200))) / 255
            errors = np.square(np.diff(frames, axis=0)).mean((1, 2, 3))  # of frames 1 to 199
            assert loss == pytest.approx(errors[-40:].mean()), "the last two of ten windows of 20"
    assert losses.dropna().nunique() == 3, "each film and speed has its own"


@pytest.mark.slow("renders films")
def test_what_was_recorded_of_a_film_is_what_it_gives_when_it_is_rendered():
    films = recorded.recorded_table("films")
    small = films[(films.frames == 1000) | (films.frame_size == "56x80")]
    assert len(small) >= 8
    for row in small.to_dict("records"):
        film = tuple(row[name] for name in learning.FILM)
        for loss, measure in learning.LOSSES_OF_A_FILM.items():
            assert measure(*film) == pytest.approx(row[loss], rel=1e-6)


def test_any_factor_has_a_table():
    common = {"experiment": "prednet", "profile": "smoke", "loader": "copied", "data": "walk", "speed": 1.0}
    common |= {"scene_seed": 0, "frame_size": "24x32", "frames": 200, "status": "finished", "rerun": 0}
    losses = np.array([0.008, 0.009, 0.0095, 0.0085, 0.0092, 0.2, 0.0088, 0.0091])
    of_setting = {"cpu": losses, "cuda": losses, "xpu": losses + 0.01}
    frame = pd.DataFrame(of_setting).rename_axis("seed").reset_index()
    frame = frame.melt("seed", var_name="setting", value_name="final_loss")
    frame = frame.assign(weights=frame.final_loss.map(str), **common)
    table = learning.learning_table(frame, "setting", "cpu").set_index(["setting", "metric"])
    same = table.loc["cuda"]
    assert (same.decision == "equivalent").all(), "the same bits are not tested"
    assert same.p.isna().all()
    assert table.loc[("xpu", learning.ALL), "worse"] == 8
    assert table.loc[("xpu", learning.LEARNED), "seeds"] == 7, "one seed has a dead colour"
    assert table.loc[("xpu", learning.BEAT), "difference"] == pytest.approx(-7 / 8)


def test_atlas_has_shipped_and_contributed_runs():
    atlas = companion.atlas()
    assert set(atlas.id) == {*gl.recorded_runs().id, *gl.runs(recorded.recorded_folder("atlas")).id}
    assert atlas.recorded.all()


# --- findings --------------------------------------------------------------------------------------------


def judged(shift, spread, seeds=12):
    noise = np.random.default_rng(0).normal(0, spread, seeds)
    rows = [{"setting": "a", "seed": seed, "final_loss": 10 + seed / seeds} for seed in range(seeds)]
    rows += [
        {"setting": "b", "seed": seed, "final_loss": 10 + seed / seeds + shift + noise[seed]} for seed in range(seeds)
    ]
    return gl.verdict(pd.DataFrame(rows), reference="a")


@pytest.mark.parametrize(
    ("shift", "spread", "decision", "said"),
    [
        (
            0.0,
            1e-9,
            "equivalent",
            "the loss differs by 2.1e-10 % on average from that under a; differences below 0.45 % (a quarter of the",
        ),
        (
            1e-3,
            1e-9,
            "different but negligible",
            "the loss differs by 0.0096 % on average from that under a, and is higher in 12 of 12 seeds: ",
        ),
        (5.0, 1e-9, "different", "the loss is 1.48 times as high as under a, and higher in 12 of 12 seeds."),
        (-5.0, 1e-9, "different", "the loss is 0.522 times as high as under a, and lower in 12 of 12 seeds."),
        (
            0.0,
            1.0,
            "inconclusive",
            "the loss differs by 0.21 % on average from that under a, and is higher in 7 of 12 seeds, which",
        ),
    ],
)
def test_every_decision_has_its_words(shift, spread, decision, said):
    verdict = judged(shift, spread)
    assert verdict.decision == decision
    assert f"Here: Under b {said}" in str(companion.finding({"Here": verdict}))


def test_levels_are_called_in_words():
    rows = [
        {
            "setting": setting,
            "seed": seed,
            "final_loss": 10 + seed + shift * (seed % 2 - 0.5),
            "weights": f"{seed}{shift}",
        }
        for setting, shift in (("cpu", 0), ("cpu:threads=1", 0), ("cuda:tf32=on", 3), ("cuda:cudnn=off", 3))
        for seed in range(6)
    ]
    said = str(companion.finding({"Here": gl.verdict(pd.DataFrame(rows))}))
    assert (
        "Under CPU (one thread) every seed ends with the same bits as under CPU, so there is nothing to test." in said
    )
    assert "Under GPU (no cuDNN) the loss differs by 0 % on average from that under CPU, and is" in said


def test_the_page_on_reading_a_verdict_shows_what_its_example_prints(capsys):
    page = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text(encoding="utf-8")
    example, printed = re.search(r"```python\n(.+?)```\n```\n(.+?)```", page, re.S).groups()
    exec(compile(example, "docs/verdict.md", "exec"), {})
    assert capsys.readouterr().out.strip() == printed.strip()
