import hashlib

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.models.chainer import chainer_views


@pytest.fixture(scope="module")
def expected(shared):
    with np.load(shared / "chainer" / "prednet_small_expected.npz") as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture(scope="module")
def saved(shared):
    return shared / "chainer" / "prednet_small.model"


@pytest.fixture(scope="module")
def net(saved):
    return gl.PredNet.from_chainer(saved)


@pytest.fixture(scope="module")
def frames(expected):
    return torch.from_numpy(expected["frames"])[:, None]


def gradients(net, loss):
    net.zero_grad()
    loss.backward()
    return {name: view.numpy().copy() for name, view in chainer_views(net, lambda parameter: parameter.grad).items()}


def distance(mine, theirs):
    return np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)


def test_channels_and_size_are_read_off_the_file(net, saved):
    assert (net.channels, net.size, net.variant) == ((3, 8, 16), (24, 32), "published")
    assert gl.PredNet.from_chainer(str(saved)).channels == (3, 8, 16)
    assert not net.fresh, "training would draw other weights"


def test_every_parameter_is_one_of_the_file_and_back(net, saved):
    views = chainer_views(net, lambda parameter: parameter.data)
    with np.load(saved) as archive:
        assert {name.removeprefix("predictor/") for name in archive.files} == set(views)
        for name in archive.files:
            assert (views[name.removeprefix("predictor/")].numpy() == archive[name]).all(), name
    assert sum(view.numel() for view in views.values()) == sum(parameter.numel() for parameter in net.parameters())


@torch.no_grad()
def test_predictions_are_those_of_chainer(net, frames, expected):
    predictions, _ = net(frames[:-1])
    assert np.abs(predictions[:, 0].numpy() - expected["predictions"]).max() < 1e-5


@torch.no_grad()
def test_losses_are_those_of_chainer(net, frames, expected):
    objective, per_frame, _ = net.training_loss(frames, None)
    np.testing.assert_allclose(per_frame.numpy(), expected["losses"], rtol=1e-5, atol=0)
    assert objective.item() == pytest.approx(float(expected["losses"].astype(np.float64).sum()), rel=1e-5)


def test_the_gradient_of_every_array_is_that_of_chainer(net, frames, expected):
    mine = gradients(net, net.training_loss(frames, None)[0])
    theirs = {
        name.removeprefix("grad_copied/predictor/"): value for name, value in expected.items() if "copied" in name
    }
    assert mine.keys() == theirs.keys()
    assert {name: d for name in mine if not (d := distance(mine[name], theirs[name])) < 1e-4} == {}


def test_the_gradient_is_not_that_of_the_reused_buffer(net, frames, expected):
    """On a CPU the authors' loop took every gradient against the window's last frame: another gradient."""
    mine = gradients(net, net.training_loss(frames, None)[0])
    reused = {
        name.removeprefix("grad_reused/predictor/"): value for name, value in expected.items() if "reused" in name
    }
    assert mine.keys() == reused.keys()
    assert min(distance(mine[name], reused[name]) for name in mine) > 1e-2
    predictions, _ = net(frames[:-1])
    against_the_last = gradients(net, (predictions - frames[-1]).square().flatten(1).mean(1).sum())
    assert max(distance(against_the_last[name], reused[name]) for name in mine) < 1e-4


def test_training_starts_from_the_loaded_weights(saved):
    net = gl.PredNet.from_chainer(saved)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    runs = [
        gl.train(net, "walk", setting="cpu:threads=1", seed=seed, profile="smoke", frames=20, progress=False)
        for seed in (0, 1)
    ]
    assert runs[0].record["summary"]["weights"] == runs[1].record["summary"]["weights"]
    assert all((tensor == before[name]).all() for name, tensor in net.state_dict().items())


# --- other files -----------------------------------------------------------------------------------------


def model_arrays(saved):
    with np.load(saved) as archive:
        return {name: archive[name] for name in archive.files}


def refused(file, *words):
    with pytest.raises(gl.DataError) as error:
        gl.PredNet.from_chainer(file)
    assert [word for word in (str(file), *words) if word not in str(error.value)] == []


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_model_is_named(saved, tmp_path, part):
    content = saved.read_bytes()
    (tmp_path / "cut.model").write_bytes(content[: int(len(content) * part)])
    refused(tmp_path / "cut.model", "not a model saved by Chainer")


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_a_model_with_changed_bytes_is_named(saved, tmp_path, place):
    content = bytearray(saved.read_bytes())
    start = int(len(content) * place)
    content[start : start + 2000] = bytes(reversed(content[start : start + 2000]))
    (tmp_path / "changed.model").write_bytes(content)
    refused(tmp_path / "changed.model")


def test_what_is_not_a_model_is_named(tmp_path):
    (tmp_path / "text.model").write_text("Call me Ishmael.")
    (tmp_path / "empty.model").touch()
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", weights=np.zeros((3, 3)))
    np.savez(tmp_path / "nothing.npz")
    for name in ("text.model", "empty.model", "array.npy", "other.npz", "nothing.npz", "missing.model"):
        refused(tmp_path / name)
    refused(tmp_path)
    refused(tmp_path / "missing.model", "no such file")


def test_pickled_objects_are_not_loaded(tmp_path):
    with open(tmp_path / "objects.model", "wb") as stream:
        np.savez(stream, **{"predictor/ConvP0/W": np.array([print, {"a": 1}], dtype=object)})
    refused(tmp_path / "objects.model")


class Bomb:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_a_file_runs_no_code(saved, tmp_path):
    arrays = model_arrays(saved)
    arrays["predictor/ConvP0/W"] = np.array([Bomb(tmp_path / "ran")], dtype=object)
    with open(tmp_path / "bomb.model", "wb") as stream:
        np.savez(stream, **arrays)
    refused(tmp_path / "bomb.model")
    assert not (tmp_path / "ran").exists()


def rewritten(saved, file, change):
    arrays = model_arrays(saved)
    change(arrays)
    with open(file, "wb") as stream:
        np.savez(stream, **arrays)
    return file


def test_a_model_without_an_array_or_with_one_too_many_is_named_with_it(saved, tmp_path):
    name = "predictor/ConvLSTM1/h_f/W"
    refused(rewritten(saved, tmp_path / "a.model", lambda arrays: arrays.pop(name)), "ConvLSTM1/h_f/W", "missing")
    refused(
        rewritten(saved, tmp_path / "b.model", lambda arrays: arrays.update(extra=arrays[name])), "extra", "unknown"
    )


@pytest.mark.parametrize(
    "name", ["ConvLSTM1/h_f/W", "ConvA1/W", "ConvP0/W", "ConvP2/b", "ConvLSTM0/c_i/W", "ConvLSTM2/c_o/W"]
)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 3, 3), (1, 3, 23, 31)], ids=str)
def test_an_array_of_another_shape_is_refused(saved, tmp_path, name, shape):
    refused(
        rewritten(saved, tmp_path / "a.model", lambda arrays: arrays.update({f"predictor/{name}": np.zeros(shape)}))
    )


def test_an_array_of_text_is_refused(saved, tmp_path):
    text = np.full((3, 3, 3, 3), "a")
    refused(rewritten(saved, tmp_path / "a.model", lambda arrays: arrays.update({"predictor/ConvP0/W": text})))


def test_weights_that_are_not_finite_are_kept_as_they_are(saved, tmp_path):
    """A diverged network of the authors is still theirs; only its shape is checked."""
    file = rewritten(saved, tmp_path / "a.model", lambda arrays: arrays["predictor/ConvP0/b"].fill(np.nan))
    assert gl.PredNet.from_chainer(file).conv_p[0].bias.isnan().all()


def test_reading_changes_nothing_in_the_file(saved):
    before = hashlib.sha256(saved.read_bytes()).hexdigest()
    gl.PredNet.from_chainer(saved)
    assert hashlib.sha256(saved.read_bytes()).hexdigest() == before
