import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from gpulab.saddles import _curvature as curvature
from gpulab.saddles._spectrum import ZERO_SHARE
from gpulab.store import recorded as recordings

SMALL = {"profile": "smoke", "snapshots": 2, "steps": 8, "probes": 2, "progress": False}
SETTINGS = ["cpu:threads=1", "cpu:emulate=bfloat16"]


def along(**options):
    return gl.saddles.curvature_along("autoencoder", **SMALL | options)


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    return along(
        setting=SETTINGS,
        seeds=2,
        store=tmp_path_factory.getbasetemp() / "curvature",
        command="a command",
    )


def test_curvature_has_a_row_for_every_setting_seed_and_snapshot(frame):
    """All settings have the same weights before the training, and different ones after it."""
    assert len(frame) == 8
    assert frame.final.tolist() == [False, True] * 4
    assert (frame.step > 0).tolist() == [False, True] * 4
    measured = frame[frame.seed == 1].set_index("final")[list(curvature.MEASUREMENTS)]
    assert measured.notna().all(axis=None)
    assert len(measured.loc[False].drop_duplicates()) == 1
    assert measured.loc[True].largest.nunique() == 2


def test_curvature_is_that_of_the_hessian_at_the_trained_weights(frame):
    run = gl.train("autoencoder", setting="cpu:threads=1", seed=1, profile="smoke", progress=False)
    images = next(run.data.windows(200, 0)).frames
    model, batch = run.model, torch.from_numpy(images).float() / 255
    H = gl.hessian(model, lambda: model.training_loss(batch, None)[0])
    spectrum = gl.saddles.spectral_density(H, probes=2, steps=8)
    row = frame[(frame.setting == "cpu:threads=1") & (frame.seed == 1) & frame.final].iloc[0]
    assert row.loss == pytest.approx(H.loss, rel=1e-5)
    assert (row.smallest, row.largest) == pytest.approx(spectrum.extremes, rel=1e-4)
    index, size = spectrum.index(), len(H.gradient)
    assert (row.index_fraction, row.index_error) == pytest.approx(
        (index.value / size, index.error / size), rel=1e-3
    )


def test_curvature_of_a_sequence_begins_with_a_state_of_zero():
    frame = gl.saddles.curvature_along("prednet", seeds=[3], **SMALL)
    model = gl.models.PredNet(channels=(3, 8, 16), size=(24, 32))
    model.draw_weights(torch.Generator().manual_seed(3))
    frames = (
        torch.from_numpy(
            next(gl.load("walk", frames=40, size=(24, 32)).windows(10, 0)).frames
        ).float()
        / 255
    )
    _, losses, _ = model.training_loss(frames[:, None], None)
    assert frame.loss.iloc[0] == pytest.approx(float(losses.mean()), rel=1e-5)


def test_curvature_that_is_kept_is_not_made_again_and_a_damaged_file_is_named(
    frame, tmp_path, monkeypatch
):
    folder = tmp_path.parent / "curvature"
    monkeypatch.setattr(curvature, "train", None)
    again = along(setting=SETTINGS, seeds=2, store=folder)
    pd.testing.assert_frame_equal(again[frame.columns], frame, check_exact=True)
    for file in folder.glob("*.parquet"):
        assert recordings.read_table(file)[1]["command"] == "a command"
        (tmp_path / file.name).write_bytes(file.read_bytes()[:-9])
    with pytest.raises(TypeError, match="not callable"):  # other options need another recording
        along(setting=SETTINGS, seeds=2, store=folder, steps=3)
    with pytest.raises(gl.DataError, match=rf"{tmp_path}.*\.parquet"):
        along(setting=SETTINGS, seeds=2, store=tmp_path)


def test_curvature_of_a_training_that_diverges_has_a_last_row_without_numbers(
    monkeypatch, tmp_path
):
    def hot(*arguments, **options):
        return gl.train(*arguments, **options, learning_rate=1e30)

    monkeypatch.setattr(curvature, "train", hot)
    for _ in range(2):  # computed first, then read from the store
        frame = along(seeds=1, store=tmp_path)
        assert frame.status.tolist() == ["diverged"] * 2
        assert frame.final.tolist() == [False, True]
        assert np.isfinite(frame.largest.iloc[0])
        assert frame[list(curvature.MEASUREMENTS)].iloc[1].isna().all()
    assert along(seeds=1, snapshots=1)["size"].tolist() == [0]


def test_recorded_curvature_and_escapes_have_their_passports():
    assert gl.saddles.recorded_curvature().recorded.all()
    assert gl.saddles.recorded_escapes().recorded.all()
    for name in ("curvature", "escapes"):
        for _, record in recordings.read_tables(recordings.recorded_folder("saddles") / name):
            assert record["command"].startswith("python benchmarks/record_saddles.py")
            assert record["passport"]["software"]["commit"]
            assert name == "escapes" or record["tolerance"] == ZERO_SHARE, (
                "what counts as zero is the same in all"
            )
