"""What networks have learned, and findings in one sentence each."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import films, learning


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for options in ({}, {"speed": 2.0}, {"seed": 3}):
        gl.train("prednet", profile="smoke", data_options=options, store=store, progress=False)
    gl.train("autoencoder", profile="smoke", store=store, progress=False)
    return gl.runs(store)


def test_repeat_losses_are_those_of_the_film_that_the_final_loss_is_of(frame):
    losses = learning.repeat_losses(frame)
    assert losses.isna().tolist() == (frame.experiment == "autoencoder").tolist()
    for row, loss in zip(frame.itertuples(), losses, strict=True):
        if row.experiment == "prednet":
            film = gl.load(
                "walk", frames=200, size=(24, 32), seed=int(row.scene_seed), speed=row.speed
            )
            frames = np.stack(list(film.stream(0, 200))) / 255
            errors = np.square(np.diff(frames, axis=0)).mean((1, 2, 3))  # of frames 1 to 199
            assert loss == pytest.approx(errors[-40:].mean()), "the last two of ten windows of 20"
    assert losses.dropna().nunique() == 3, "each film and speed has a different loss"


@pytest.mark.slow("renders films")
def test_recorded_losses_of_films_are_those_of_rendered_films():
    losses = films.recorded_losses()
    small = [film for film in losses if film.frames == 1000 or film.frame_size == "56x80"]
    assert len(small) >= 8
    for film in small:
        rendered = films.RenderedLosses(film)
        assert (rendered.repeat, rendered.blurred, rendered.missing_colour) == pytest.approx(
            losses[film], rel=1e-6
        )


def test_films_of_runs_are_shared_and_have_recorded_losses():
    runs = gl.recorded_runs()
    of_runs = films.films_of_runs(runs)
    assert [film is not None for film in of_runs] == (runs.data == "walk").tolist()
    assert len(set(of_runs)) < len(of_runs)
    recorded = films.recorded_losses()
    for film in set(of_runs) - {None}:
        assert films.losses_of(film) == recorded[film]
        assert film.repeat_loss() == recorded[film].repeat


# --- findings -------------------------------------------------------------------------------------


def judged(shift, spread, seeds=12):
    losses = 10 + np.arange(seeds) / seeds
    moved = losses + shift + np.random.default_rng(0).normal(0, spread, seeds)
    frame = pd.DataFrame({"cpu": losses, "cpu:threads=1": moved}).rename_axis("seed").reset_index()
    return gl.verdict(
        frame.melt("seed", var_name="setting", value_name="final_loss"), reference="cpu"
    )


@pytest.mark.parametrize(
    ("shift", "spread", "decision"),
    [
        (0.0, 1e-9, "equivalent"),
        (1e-3, 1e-9, "different but negligible"),
        (5.0, 1e-9, "different"),
        (0.0, 1.0, "inconclusive"),
    ],
)
def test_finding_says_each_decision_with_its_settings_in_words(shift, spread, decision):
    verdict = judged(shift, spread)
    assert verdict.decision == decision
    said = str(companion.finding({"Here": verdict}))
    assert "Here: Under CPU (one thread) the loss " in said
    assert "under CPU" in said.partition("(one thread)")[2]


def test_verdict_page_shows_what_its_example_prints(capsys):
    page = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text(encoding="utf-8")
    example, printed = re.search(r"```python\n(.+?)```\n```\n(.+?)```", page, re.DOTALL).groups()
    exec(compile(example, "docs/verdict.md", "exec"), {})
    assert capsys.readouterr().out.strip() == printed.strip()


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ([1.0, 8.0], "8.0-fold between seeds, 1.00-fold between settings"),
        ([9.0, 2.0], "1.0-fold between seeds, 9.00-fold between settings"),
    ],
)
def test_variation_title_compares_seeds_with_settings(gpu, words):
    losses = pd.DataFrame({"CPU": [1.0, 8.0], "GPU": gpu})
    assert companion.variation_title(losses).endswith(words)


@pytest.mark.parametrize("order", [["CPU", "GPU, again"], ["GPU, again", "CPU"]])
def test_median_moves_title_names_the_level_of_each_median(order):
    moved = {"CPU": [1e-5, 2e-5, 9.0], "GPU, again": [0.3, 0.4, 0.5]}
    series = pd.concat([pd.Series(moved[level], [level] * 3) for level in order])
    title = companion.median_moves_title(series)
    assert "2e-05 (CPU)" in title
    assert "0.4 (GPU, again)" in title
