import warnings

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.saddles import curvature as trajectories
from gpulab.saddles.curvature import read_curvature, row_spectra
from gpulab.saddles.spectrum import ZERO
from gpulab.store import recorded as recordings

SMALL = {"profile": "smoke", "frames": 40, "snapshots": 2, "steps": 8, "probes": 2, "progress": False}
SETTINGS = ["cpu:threads=1", "cpu:precision=float64", "cpu:emulate=bfloat16"]


@pytest.fixture(scope="module", autouse=True)
def few_evaluated():
    """Frames and images of the fixed batch, few enough for a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectories, "EVALUATED", {True: 3, False: 20})
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("curvature")


@pytest.fixture(scope="module")
def frame(folder):
    return gl.saddles.curvature_along(
        "autoencoder", setting=SETTINGS, seeds=2, store=folder, command="a command", **SMALL
    )


def test_other_questions_are_other_recordings_and_no_damaged_runs(tmp_path):
    for steps in (2, 3, 3):
        gl.saddles.curvature_along("autoencoder", seeds=1, store=tmp_path, **SMALL | {"steps": steps})
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gl.runs(tmp_path).empty


def test_a_row_for_every_setting_seed_and_snapshot_by_the_same_instrument(frame):
    """Before training all have the same weights; afterwards they do not."""
    measured = list(trajectories.MEASURED)
    assert frame.groupby(["setting", "seed"]).step.apply(list).tolist() == [[0, 40]] * 6
    assert frame.final.tolist() == [False, True] * 6
    assert not frame.recorded.any()
    assert frame[measured].notna().all(axis=None)
    assert len(frame[(frame.seed == 1) & (frame.step == 0)][measured].drop_duplicates()) == 1
    assert frame[(frame.seed == 1) & frame.final].largest.nunique() == 3


def test_what_is_measured_is_the_hessian_of_the_trained_weights(frame):
    run = gl.train("autoencoder", setting="cpu:threads=1", seed=1, profile="smoke", frames=40, progress=False)
    images = next(run.data.windows(20, 0)).frames
    model, batch = run.model, torch.from_numpy(images).float() / 255
    H = gl.hessian(model, lambda: model.training_loss(batch, None)[0])
    spectrum = gl.saddles.spectral_density(H, probes=2, steps=8)
    row = frame[(frame.setting == "cpu:threads=1") & (frame.seed == 1) & frame.final].iloc[0]
    assert row.loss == pytest.approx(H.loss, rel=1e-5)
    assert row.gradient_norm == pytest.approx(float(H.gradient.norm()), rel=1e-4)
    assert (row.smallest, row.largest) == pytest.approx(spectrum.extremes, rel=1e-4)
    for drawn, whole in row_spectra(frame):
        assert whole.extremes == pytest.approx((drawn.smallest, drawn.largest))
        assert whole.weights.sum(1) == pytest.approx(np.ones(2))
    assert len(list(row_spectra(frame))) == len(frame)
    below = spectrum.mass_below(-ZERO * max(map(abs, spectrum.extremes)))
    assert row.index_fraction == pytest.approx(below.value, rel=1e-3)


def test_a_sequence_is_looked_at_from_a_state_of_zero():
    frame = gl.saddles.curvature_along("prednet", seeds=[3], **SMALL)
    assert frame.evaluated.tolist() == [3, 3]
    model = gl.models.PredNet(channels=(3, 8, 16), size=(24, 32))
    model.draw_weights(torch.Generator().manual_seed(3))
    frames = torch.from_numpy(next(gl.load("walk", frames=40, size=(24, 32)).windows(3, 0)).frames).float() / 255
    _, losses, _ = model.training_loss(frames[:, None], None)
    assert frame.loss.iloc[0] == pytest.approx(float(losses.mean()), rel=1e-5)


def test_what_is_kept_is_not_made_again(frame, folder, monkeypatch):
    monkeypatch.setattr(trajectories, "train", None)
    again = gl.saddles.curvature_along("autoencoder", setting=SETTINGS, seeds=2, store=folder, **SMALL)
    columns = [name for name in frame if name not in ("nodes", "node_weights")]
    assert again[columns].equals(frame[columns])
    for name in ("nodes", "node_weights"):
        assert np.abs(np.stack(again[name]) - np.stack(frame[name])).max() < 1e-6
    kept = read_curvature(folder)
    assert sorted(kept.id) == sorted(frame.id)
    _, record = recordings.read_table(next(folder.glob("*.parquet")))
    assert record["command"] == "a command"
    assert record["passport"]["software"]["torch"] == torch.__version__


def test_a_training_that_diverges_has_a_last_row_without_numbers(monkeypatch):
    def hot(*arguments, **options):
        return gl.train(*arguments, **options, learning_rate=1e30)

    monkeypatch.setattr(trajectories, "train", hot)
    frame = gl.saddles.curvature_along("autoencoder", seeds=1, **SMALL)
    assert frame.status.tolist() == ["diverged"] * 2
    assert frame.final.tolist() == [False, True]
    assert np.isfinite(frame.largest.iloc[0])
    assert frame[list(trajectories.MEASURED)].iloc[1].isna().all()


def test_damaged_recordings_are_named(frame, tmp_path, folder):
    good = next(folder.glob("*.parquet"))
    frame[["step", "loss"]].to_parquet(tmp_path / "foreign.parquet")
    with pytest.raises(gl.DataError, match=r"foreign\.parquet: not a recording of gpulab's"):
        read_curvature(tmp_path)
    (tmp_path / good.name).write_bytes(good.read_bytes()[:-9])
    with pytest.raises(gl.DataError, match=f"{good.name}.*without this file, the training is made"):
        gl.saddles.curvature_along("autoencoder", setting=SETTINGS, seeds=2, store=tmp_path, **SMALL)


def test_what_is_shipped_is_recorded_with_its_passport():
    frame, escapes = gl.saddles.recorded_curvature(), gl.saddles.recorded_escapes()
    assert frame.recorded.all()
    assert escapes.recorded.all()
    for name in ("curvature", "escapes"):
        for _, record in recordings.read_tables(recordings.recorded_folder("saddles") / name):
            assert record["command"].startswith("python benchmarks/record_saddles.py")
            assert record["passport"]["software"]["commit"]
            assert name == "escapes" or record["tolerance"] == ZERO, "what counts as zero is the same in all"
