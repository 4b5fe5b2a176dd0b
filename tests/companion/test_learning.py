"""What networks have learned."""

import numpy as np
import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import findings, learning
from gpulab.store import records

OFF = "cuda:tf32=off"


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


def test_a_blurred_frame_is_a_better_guess_than_a_sharp_one_and_a_dead_colour_costs_what_the_film_says(frame):
    walks = frame[frame.experiment == "prednet"]
    assert (learning.blurred_losses(walks) < learning.repeat_losses(walks)).all()
    losses = learning.missing_colour_losses(frame)
    (usual,) = losses[(frame.scene_seed == 0) & (frame.speed == 1)]
    assert usual == gl.load("walk", frames=200, size=(24, 32)).missing_colour_loss()
    assert np.isinf(losses[frame.experiment == "autoencoder"]).all()


@pytest.mark.slow("renders films")
def test_what_was_recorded_of_a_film_is_what_it_gives_when_it_is_rendered():
    films = records.recorded_table("films")
    small = films[(films.frames == 1000) | (films.frame_size == "56x80")]
    assert len(small) >= 8
    for row in small.to_dict("records"):
        film = tuple(row[name] for name in learning.FILM)
        for loss, measure in learning.LOSSES_OF_A_FILM.items():
            assert measure(*film) == pytest.approx(row[loss], rel=1e-6)


def test_the_finding_counts_the_runs(frame):
    prednet = frame[frame.experiment == "prednet"]
    assert learning.motion_finding(prednet).endswith("none of 3 runs beats repeating the last frame.")
    one = learning.motion_finding(prednet[:1].assign(final_loss=1e-9))
    assert one.startswith("The one run here beats repeating the last frame, and beats repeating it blurred")
    text = learning.motion_finding(prednet.assign(final_loss=[1e-9, 1.0, np.nan]))
    assert text.startswith("1 of 3 runs beat repeating the last frame, and 1 of 3 beat repeating it blurred")


def test_any_factor_has_a_table_and_equal_amounts_are_said_once():
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
    text = "\n".join(companion.finding({"It": table.reset_index()}).statistics())
    assert "final loss of the seeds that learned: equivalent at speed 1 (1 times, higher in 0 of 7 seeds)." in text
    assert "final loss of all seeds: different at speed 1" in text
    rows = pd.DataFrame({"speed": [1.0, 2.0], "decision": "equivalent", "difference": 0.0, "worse": 0, "seeds": 9})
    said = ["equivalent at speed 1 and 2 (+0 points, higher in 0 of 9 seeds)"]
    assert findings._decisions(learning.STUCK, rows) == said


def test_recorded_runs_differ_in_what_they_are_recorded_for_alone():
    films, longer, title = companion.recorded_films(), companion.longer_runs(), companion.title_runs()
    title = title[title.profile == "paper"]
    prednet = title.query("experiment == 'prednet' and device == 'cpu'")
    same = "profile torch machine "
    for runs, columns in (
        (films, same + "setting frames frame_size speed loader"),
        (longer, same + "experiment data speed frame_size status"),
        (prednet, same + "protocol setting gradients cpu"),
        *((some, "protocol torch cpu") for _, some in title.groupby("experiment")),
        *((some, same + "protocol loader fast") for _, some in title[title.device == "cuda"].groupby("experiment")),
    ):
        for name in columns.split():
            assert runs[name].nunique(dropna=False) == 1, name
    assert (pd.crosstab(films.seed, films.scene_seed) == 1).all(axis=None)
    assert not title.duplicated(["experiment", "profile", "setting", "seed", "gradients"]).any()
    assert sorted(prednet.seed) == [*range(31), 35]
    assert set(longer.frames) == {50_000}
    cells = longer.groupby(["setting", "loader"]).seed.nunique().to_dict()
    assert cells == dict.fromkeys([(OFF, "imitated"), (OFF, "window"), ("cuda:tf32=on", "window")], 16)


def test_on_a_gpu_no_difference_is_seen_between_the_gradient_written_out_and_that_of_autograd():
    title = companion.title_runs()
    for _, runs in title.query("experiment == 'prednet' and device == 'cuda'").groupby("setting"):
        runs = runs.fillna({"gradients": "autograd"})
        (row,) = gl.verdict(runs, factor="gradients", reference="autograd").table.itertuples()
        assert row.seeds == 16
        assert row.decision in ("equivalent", "inconclusive")
        assert row.largest_difference < runs.final_loss.std()
    (row,) = gl.verdict(title.query("profile == 'quick'"), reference="cpu:threads=1").table.itertuples()
    assert (row.setting, row.same_bits, row.seeds) == ("cpu:threads=1,denormals=off", 16, 16)


def test_one_family_of_eight_changes_no_decision_on_the_long_runs():
    longer = companion.longer_runs()
    memory = learning.learning_table(longer[longer.setting == OFF], "loader", "window")
    tf32 = learning.learning_table(longer[longer.loader == "window"], "setting", OFF)
    together = learning.holm(pd.concat([memory.p, tf32.p], ignore_index=True))
    assert ((together < 0.05) == (pd.concat([memory.decision, tf32.decision]) == "different").to_numpy()).all()
    assert together[together < 0.05].max() < 0.0003
