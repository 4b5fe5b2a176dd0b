import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpulab as gl
from gpulab.models._chainer import chainer_views
from tests.models._helpers import weights


@pytest.fixture(scope="module")
def saved(real_data):
    return real_data("chainer/prednet_small.model")


@pytest.fixture(scope="module")
def net(saved):
    return gl.models.PredNet.from_chainer(saved)


def test_from_chainer_reads_every_parameter_and_chainer_views_give_it_back(net, saved):
    assert (net.channels, net.size) == ((3, 8, 16), (24, 32))
    views = chainer_views(
        gl.models.PredNet.from_chainer(str(saved)), lambda parameter: parameter.data
    )
    with np.load(saved) as archive:
        assert {name.removeprefix("predictor/") for name in archive.files} == set(views)
        for name in archive.files:
            assert (views[name.removeprefix("predictor/")].numpy() == archive[name]).all(), name
    assert sum(view.numel() for view in views.values()) == sum(
        parameter.numel() for parameter in net.parameters()
    )


@torch.no_grad()
def test_from_chainer_predictions_and_losses_are_those_of_chainer(net, real_data):
    expected = np.load(real_data("chainer/prednet_small_expected.npz"))
    frames = torch.from_numpy(expected["frames"])[:, None]
    assert np.abs(net(frames[:-1])[0][:, 0].numpy() - expected["predictions"]).max() < 1e-5
    objective, per_frame, _ = net.training_loss(frames, None)
    np.testing.assert_allclose(per_frame.numpy(), expected["losses"], rtol=1e-5, atol=0)
    assert objective.item() == pytest.approx(
        float(expected["losses"].astype(np.float64).sum()), rel=1e-5
    )


def refused(file, *words):
    with pytest.raises(gl.DataError) as error:
        gl.models.PredNet.from_chainer(file)
    assert [word for word in (str(file), *words) if word not in str(error.value)] == []
    assert "\n" not in str(error.value)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(share=st.floats(0, 1, exclude_max=True), by=st.none() | st.binary(min_size=1, max_size=2000))
def test_from_chainer_never_loads_a_damaged_or_cut_model_as_another(
    net, saved, tmp_path, share, by
):
    content, file = saved.read_bytes(), tmp_path / "a.model"
    place = int(len(content) * share)
    file.write_bytes(content[:place] + (by + content[place + len(by) :] if by else b""))
    try:
        found = gl.models.PredNet.from_chainer(file)
    except gl.DataError:
        refused(file)
    else:
        assert by, "a truncated file is rejected"
        assert (weights(found) == weights(net)).all(), "the damaged part was not needed"


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


CHANGES = {
    "missing": ({"predictor/ConvLSTM1/h_f/W": None}, ["ConvLSTM1/h_f/W", "missing"]),
    "unknown": ({"extra": np.zeros(3)}, ["extra", "unknown"]),
    "code": ({"predictor/ConvP0/W": np.array([Bomb()], dtype=object)}, []),
    "whole numbers": ({"a\x1b[31m": np.zeros(1, np.int64)}, [r"a\x1b[31m is of type int64"]),
    "of another shape": ({"predictor/ConvA1/W": np.zeros((2, 3, 3, 3))}, ["ConvA1/W"]),
    "of another size": ({"predictor/ConvLSTM0/c_i/W": np.zeros((1, 3, 23, 31))}, []),
    "not finite": (
        {"predictor/ConvP0/b": np.array([np.inf])},
        ["ConvP0/b holds numbers that are not finite"],
    ),
}


@pytest.mark.parametrize(("changes", "words"), CHANGES.values(), ids=CHANGES)
def test_from_chainer_refuses_an_array_that_is_missing_unknown_or_of_another_kind(
    rewritten, changes, words
):
    refused(rewritten(changes), *words)


def test_from_chainer_names_a_file_that_is_no_model(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", weights=np.zeros((3, 3)))
    for name in ("array.npy", "other.npz", "."):
        refused(tmp_path / name)
    refused(tmp_path / "missing.model", "No such file")
