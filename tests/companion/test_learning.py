"""What networks have learned."""

import numpy as np
import pandas as pd
import pytest

import gpulab as gl
from gpulab.companion import learning


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


def test_a_dead_colour_costs_what_the_film_says(frame):
    losses = learning.missing_colour_losses(frame)
    film = gl.load("walk", frames=200, size=(24, 32))
    (usual,) = losses[(frame.scene_seed == 0) & (frame.speed == 1)]
    assert usual == film.missing_colour_loss()
    assert np.isinf(losses[frame.experiment == "autoencoder"]).all()


def test_the_finding_counts_the_runs(frame):
    prednet = frame[frame.experiment == "prednet"]
    assert learning.motion_finding(prednet) == (
        "No network has learned motion here: none of 3 runs beats repeating the last frame."
    )
    better = prednet.assign(final_loss=[1e-9, 1.0, np.nan])
    assert learning.motion_finding(better) == "1 of 3 runs beat repeating the last frame."


def test_recorded_films_differ_in_the_film_alone():
    films = gl.companion.recorded_films()
    cells = pd.crosstab(films.seed, films.scene_seed)
    assert (cells == 1).all(axis=None)
    assert cells.shape >= (5, 5)
    for name in ("setting", "machine", "profile", "frames", "frame_size", "speed", "loader", "torch"):
        assert films[name].nunique() == 1, name
    components = gl.stats.variance_components(films, factor="scene_seed")
    assert {"seed", "scene_seed"} < set(components.table.source)


def test_most_recorded_networks_of_the_motion_profile_learn_motion():
    recorded = gl.recorded_runs().query("profile == 'motion'")
    assert len(recorded) >= 10
    assert (recorded.final_loss < learning.repeat_losses(recorded)).mean() > 0.5
