"""A run is known by what it was made of: never is another result returned for it."""

import functools
import importlib.util
import linecache
import shutil
import sys
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from gpulab.store import identities
from gpulab.store import runs as stores
from gpulab.training import spec

SMALL = {"profile": "smoke", "setting": "cpu:threads=1", "progress": False}
CLIP = {
    **SMALL,
    "frames": 40,
    "model_options": {"size": (8, 12), "channels": [3, 4]},
    "data_options": {"size": (8, 12)},
}


def film(file, brightness):
    """60 frames of moving stripes."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=20)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for number in range(60):
            image = np.full((32, 48, 3), brightness, np.uint8)
            image[:, number % 48] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return file


def stopping(done, _):
    if done >= 20:
        raise KeyboardInterrupt


def test_a_film_is_known_by_what_is_in_it_and_not_by_its_name(tmp_path):
    clip, store = film(tmp_path / "clip.mp4", 40), tmp_path / "runs"
    train = functools.partial(gl.train, "prednet", store=store)
    first = train(f"video:{clip}", **CLIP)
    moved = shutil.move(clip, tmp_path / "elsewhere.mp4")
    other = train(f"video:{film(clip, 200)}", **CLIP)
    assert first.path != other.path
    assert first.final_loss != other.final_loss
    assert train(f"video:{moved}", **CLIP).path == first.path
    assert gl.runs(store).protocol.nunique() == 2, "they are not compared either"


class Closed:
    """Something that hides what it holds."""

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        raise TypeError


NETWORK = """
from torch import nn
from gpulab.models.base import Trainable, draw_linear_

class Mine(Trainable):
    def __init__(self, scale=1.0):
        super().__init__()
        self.inner, self.scale, self.size, self.channels = nn.Linear(784, 784), scale, (28, 28), (1,)

    def batches(self, window):
        return window.split(1)

    def forward(self, x):
        return self.inner(x.flatten(1)).view_as(x) * self.scale

    def training_loss(self, batch, state):
        each = (self(batch) - batch).square().mean((1, 2, 3))
        return each.mean(), each.detach(), None

    def draw_weights(self, generator):
        draw_linear_(self, generator)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A network from a file, which may be written anew: `mine(replacements, **attributes)`."""

    def made(*changes, **attributes):
        text = NETWORK
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "mine.py"
        file.write_text(text)
        specification = importlib.util.spec_from_file_location("mine", file)
        module = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, "mine", module)
        linecache.clearcache()
        specification.loader.exec_module(module)
        net = module.Mine()
        for name, value in attributes.items():
            setattr(net, name, value)
        return net

    return made


def path_of(net, store, **options):
    return gl.train(net, "digits", store=store, frames=20, **SMALL | options).path


def test_an_edited_forward_is_another_run(mine, tmp_path):
    store = tmp_path / "runs"
    first = path_of(mine(), store)
    assert path_of(mine(), store) == first
    assert path_of(mine((".view_as(x) * self", ".view_as(x).tanh() * self")), store) != first


def hooked(mine):
    net = mine()
    net.inner.register_forward_hook(lambda *given: given[-1] * 0.5)
    return net


def filled(value, mine):
    """A network that keeps the weights it has."""
    net = mine(draw_weights=None, fresh=False)
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, value)
    return net


HELD = [  # beside its weights
    {},
    {"table": torch.arange(3)},
    {"table": torch.arange(3) + 1},
    {"table": pd.DataFrame({"a": [1, 2]})},
    {"table": pd.DataFrame({"a": [1, 3]})},
    {"noise": torch.Generator().manual_seed(3)},
    {"activation": lambda x: 2 * x},
]


def test_all_that_a_network_holds_its_hooks_and_weights_that_are_not_drawn_count(mine, tmp_path):
    made = [functools.partial(lambda held, mine: mine(**held), held) for held in HELD]
    made += [hooked, functools.partial(filled, 0.01), functools.partial(filled, 0.02)]
    seen = set()
    for number, make in enumerate(made):
        path = path_of(make(mine), tmp_path)
        assert path not in seen, number
        assert path_of(make(mine), tmp_path) == path, number
        seen.add(path)


def test_what_cannot_be_known_is_trained_again_and_said(mine, tmp_path):
    paths = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="Closed in it.*cannot be known: .*nor taken for another"):
            paths.append(path_of(mine(noise=Closed()), tmp_path))
    assert len(set(paths)) == 2
    assert len(gl.runs(tmp_path)) == 2, "both are kept"
    with pytest.warns(UserWarning, match="cannot be known"), pytest.raises(KeyboardInterrupt):
        path_of(mine(noise=Closed()), tmp_path, progress=stopping)
    assert not list((tmp_path / stores.WORK).iterdir()), "no checkpoint that nobody could go on from"


def test_data_of_a_class_of_somebody_elses_are_never_taken_for_others(tmp_path):
    class Brighter(gl.data.images.Images):
        def windows(self, length, seed=0, start=0):
            yield from super().windows(length, seed, start)

    digits = gl.load("digits")
    own = Brighter("digits", digits.train, digits.held)
    with pytest.warns(UserWarning, match="data 'digits': its content cannot be known"):
        gl.train("autoencoder", own, store=tmp_path, frames=20, **SMALL)


def test_what_gpulab_itself_computes_counts(tmp_path, monkeypatch):
    first = gl.train("autoencoder", store=tmp_path, frames=20, **SMALL).path
    monkeypatch.setattr(spec, "CODE_VERSION", spec.CODE_VERSION + 1)
    assert gl.train("autoencoder", store=tmp_path, frames=20, **SMALL).path != first


TRAINING = """
def train(seed, setting, file="table.csv", scale=1.0):
    return seed + scale * float(open(file).read())
"""


def test_the_file_that_an_option_names_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("table_training.py").write_text(TRAINING)
    Path("table.csv").write_text("1.5")
    first = gl.train("table_training.py:train", seed=2, store="runs", progress=False)
    assert first.final_loss == 3.5
    assert gl.train("table_training.py:train", seed=2, store="runs", progress=False).path == first.path
    Path("table.csv").write_text("2.5")
    assert gl.train("table_training.py:train", seed=2, store="runs", progress=False).final_loss == 4.5
    assert gl.runs("runs").protocol.nunique() == 2, "they are not compared"


def test_options_are_known_by_what_they_are_and_not_by_their_order():
    assert identities.plain({"b": 1, "a": max}) == identities.plain({"a": max, "b": 1}) == '{"a": "max", "b": 1}'
    assert identities.plain([object()]) == '["object"]', "an address is no part of it"
