import io
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks_drawn import weights

import gpulab as gl
from gpulab.models import chainer
from gpulab.models.chainer import chainer_views


@pytest.fixture(scope="module")
def saved(shared):
    return shared / "chainer" / "prednet_small.model"


@pytest.fixture(scope="module")
def expected(saved):
    return np.load(saved.with_name("prednet_small_expected.npz"))


@pytest.fixture(scope="module")
def net(saved):
    return gl.models.PredNet.from_chainer(saved)


@pytest.fixture(scope="module")
def frames(expected):
    return torch.from_numpy(expected["frames"])[:, None]


def gradients(net, loss):
    net.zero_grad()
    loss.backward()
    return {name: view.numpy().copy() for name, view in chainer_views(net, lambda parameter: parameter.grad).items()}


def of_chainer(expected, kind):
    prefix = f"grad_{kind}/predictor/"
    return {name.removeprefix(prefix): expected[name] for name in expected.files if name.startswith(prefix)}


def distance(mine, theirs):
    return np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)


def test_every_parameter_is_one_of_the_file_and_back_with_its_channels_and_size(net, saved):
    assert (net.channels, net.size) == ((3, 8, 16), (24, 32))
    assert not net.fresh, "training would draw other weights"
    views = chainer_views(gl.models.PredNet.from_chainer(str(saved)), lambda parameter: parameter.data)
    with np.load(saved) as archive:
        assert {name.removeprefix("predictor/") for name in archive.files} == set(views)
        for name in archive.files:
            assert (views[name.removeprefix("predictor/")].numpy() == archive[name]).all(), name
    assert sum(view.numel() for view in views.values()) == sum(parameter.numel() for parameter in net.parameters())


@torch.no_grad()
def test_predictions_and_losses_are_those_of_chainer(net, frames, expected):
    assert np.abs(net(frames[:-1])[0][:, 0].numpy() - expected["predictions"]).max() < 1e-5
    objective, per_frame, _ = net.training_loss(frames, None)
    np.testing.assert_allclose(per_frame.numpy(), expected["losses"], rtol=1e-5, atol=0)
    assert objective.item() == pytest.approx(float(expected["losses"].astype(np.float64).sum()), rel=1e-5)


def test_the_gradient_of_every_array_is_that_of_chainer(net, frames, expected):
    mine, theirs = gradients(net, net.training_loss(frames, None)[0]), of_chainer(expected, "copied")
    assert mine.keys() == theirs.keys()
    assert {name: d for name in mine if not (d := distance(mine[name], theirs[name])) < 1e-4} == {}


def test_the_gradient_is_not_that_of_the_reused_buffer(net, frames, expected):
    """On a CPU the authors' loop took every gradient against the window's last frame: another gradient."""
    mine, reused = gradients(net, net.training_loss(frames, None)[0]), of_chainer(expected, "reused")
    assert mine.keys() == reused.keys()
    assert min(distance(mine[name], reused[name]) for name in mine) > 1e-2
    predictions, _ = net(frames[:-1])
    against_the_last = gradients(net, (predictions - frames[-1]).square().flatten(1).mean(1).sum())
    assert max(distance(against_the_last[name], reused[name]) for name in mine) < 1e-4


def test_training_starts_from_the_loaded_weights(saved):
    net = gl.models.PredNet.from_chainer(saved)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    runs = [
        gl.train(net, "walk", setting="cpu:threads=1", seed=seed, profile="smoke", frames=20, progress=False)
        for seed in (0, 1)
    ]
    assert runs[0].record["summary"]["weights"] == runs[1].record["summary"]["weights"]
    assert all((tensor == before[name]).all() for name, tensor in net.state_dict().items())


def refused(file, *words):
    with pytest.raises(gl.DataError) as error:
        gl.models.PredNet.from_chainer(file)
    assert [word for word in (str(file), *words) if word not in str(error.value)] == []
    assert "\n" not in str(error.value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), by=st.none() | st.binary(min_size=1, max_size=2000))
def test_a_model_that_is_damaged_or_cut_anywhere_never_loads_as_another(net, saved, tmp_path, share, by):
    content, file = saved.read_bytes(), tmp_path / "a.model"
    place = int(len(content) * share)
    file.write_bytes(content[:place] + (by + content[place + len(by) :] if by else b""))
    try:
        found = gl.models.PredNet.from_chainer(file)
    except gl.DataError:
        refused(file)
    else:
        assert by, "what is cut is refused"
        assert (weights(found) == weights(net)).all(), "what was damaged was not needed"


@pytest.fixture
def rewritten(saved, tmp_path):
    """The model with other arrays, or without those that are None."""

    def rewrite(changes):
        with np.load(saved) as archive:
            arrays = {**archive, **changes}
        with open(tmp_path / "a.model", "wb") as stream:
            np.savez(stream, **{name: array for name, array in arrays.items() if array is not None})
        return tmp_path / "a.model"

    return rewrite


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("it ran",)


NAMES = ("ConvLSTM1/h_f/W", "ConvA1/W", "ConvP0/W", "ConvP2/b", "ConvLSTM0/c_i/W", "ConvLSTM2/c_o/W")
CHANGES = {
    "missing": ({"predictor/ConvLSTM1/h_f/W": None}, ["ConvLSTM1/h_f/W", "missing"]),
    "unknown": ({"extra": np.zeros(3)}, ["extra", "unknown"]),
    "code": ({"predictor/ConvP0/W": np.array([Bomb()], dtype=object)}, []),
    "of fields": ({"a": np.zeros(1, [("x", "<f4")])}, ["a is of type [('x'"]),
    "whole numbers": ({"a\x1b[31m": np.zeros(1, np.int64)}, [r"a\x1b[31m is of type int64"]),
    "not finite": ({"predictor/ConvP0/b": np.array([np.inf])}, ["ConvP0/b holds numbers that are not finite"]),
    "far too large": ({"a": np.array([1e300])}, ["a holds numbers that are not finite"]),
}


@pytest.mark.parametrize(("changes", "words"), CHANGES.values(), ids=CHANGES)
def test_an_array_that_is_missing_unknown_or_of_something_else_is_refused(rewritten, changes, words):
    refused(rewritten(changes), *words)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 3, 3), (1, 3, 23, 31)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_array_of_another_shape_is_refused(rewritten, name, shape):
    refused(rewritten({f"predictor/{name}": np.zeros(shape)}))


def npy(shape, content=b""):
    """A `.npy` file of so many float32 numbers that holds what it holds."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue() + content


def archive(file, arrays):
    """A `.model` of (name, content of the .npy file)."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in arrays.items():
            made.writestr(f"{name}.npy", content)
    return file


def test_what_is_not_a_model_or_promises_more_than_it_holds_is_named(tmp_path):
    (tmp_path / "text.model").write_text("Call me Ishmael.")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", weights=np.zeros((3, 3)))
    np.savez(tmp_path / "nothing.npz")
    for name in ("text.model", "array.npy", "other.npz", "nothing.npz", "."):
        refused(tmp_path / name)
    refused(tmp_path / "missing.model", "No such file")
    for shape in ((10**9, 10**9), (1000,)):
        refused(archive(tmp_path / "a.model", {"a": npy(shape)}), "not a model saved by Chainer")


def test_more_than_fits_is_not_unpacked_and_a_network_of_many_channels_not_made_at_once(tmp_path, monkeypatch):
    """These would be 1.4 terabytes."""
    wide = {f"ConvP{layer}/W": npy((10**5, 1, 1, 1), bytes(4 * 10**5)) for layer in range(3)}
    wide |= {"ConvLSTM0/c_i/W": npy((1, 1, 64, 64), bytes(4 * 64 * 64))}
    refused(archive(tmp_path / "wide.model", wide), "not a PredNet of 3 layers: of its arrays")
    monkeypatch.setattr(chainer, "MOST_BYTES", 1 << 20)
    file = archive(tmp_path / "a.model", {"a": npy((1 << 18,), bytes(1 << 20))})
    refused(file, "it unpacks to more than 1,048,576 bytes")
