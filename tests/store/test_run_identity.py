"""The identity of a run depends on what was run, so a store never returns another run's result."""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import gpulab as gl
from gpulab.data._images import Images
from gpulab.training import _networks as networks
from gpulab.training._planned_run import as_json

SMALL = {"profile": "smoke", "setting": "cpu:threads=1", "progress": False}


def frames(folder, brightness):
    """Write 60 images through which a stripe moves."""
    folder.mkdir()
    for number in range(60):
        image = np.full((24, 32, 3), brightness, np.uint8)
        image[:, number % 32] = 255
        Image.fromarray(image).save(folder / f"{number}.png")
    return folder


def test_run_identity_depends_on_the_content_of_frames_and_not_on_their_name(tmp_path):
    clip, store = frames(tmp_path / "clip", 40), tmp_path / "runs"
    train = functools.partial(gl.train, "prednet", store=store, frames=40, **SMALL)
    first = train(f"frames:{clip}")
    moved = shutil.move(clip, tmp_path / "elsewhere")
    other = train(f"frames:{frames(clip, 200)}")
    assert first.path != other.path
    assert first.final_loss != other.final_loss
    assert train(f"frames:{moved}").path == first.path
    assert gl.runs(store).protocol.nunique() == 2, "a verdict does not compare them, either"


def test_store_refuses_data_whose_content_cannot_be_known(tmp_path):
    class Brighter(Images):
        def windows(self, length, seed=0, start=0):
            yield from super().windows(length, seed, start)

    digits = gl.load("digits")
    own = Brighter("digits", digits.train, digits.heldout_images)
    with pytest.raises(
        gl.UsageError, match=r"data .digits.: its content cannot be .*train it without a store"
    ):
        gl.train("autoencoder", own, store=tmp_path, frames=20, **SMALL)
    assert gl.train("autoencoder", own, frames=20, **SMALL).status == "finished"


def test_run_identity_depends_on_the_code_version(tmp_path, monkeypatch):
    first = gl.train("autoencoder", store=tmp_path, frames=20, **SMALL).path
    monkeypatch.setattr(networks, "CODE_VERSION", networks.CODE_VERSION + 1)
    assert gl.train("autoencoder", store=tmp_path, frames=20, **SMALL).path != first


TRAINING = """
def train(seed, setting, file="table.csv", scale=1.0):
    return seed + scale * float(open(file).read())
"""


def test_run_identity_depends_on_the_content_of_a_file_that_an_option_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("table_training.py").write_text(TRAINING)
    Path("table.csv").write_text("1.5")
    train = functools.partial(
        gl.train, "table_training.py:train", seed=2, store="runs", progress=False
    )
    first = train()
    assert first.final_loss == 3.5
    assert train().path == first.path
    Path("table.csv").write_text("2.5")
    assert train().final_loss == 4.5
    assert gl.runs("runs").protocol.nunique() == 2, "a verdict does not compare them"


def test_as_json_depends_on_values_and_not_on_their_order():
    assert as_json({"b": 1, "a": max}) == as_json({"a": max, "b": 1}) == '{"a": "max", "b": 1}'
    assert as_json([object()]) == '["object"]', "the address is left out"
