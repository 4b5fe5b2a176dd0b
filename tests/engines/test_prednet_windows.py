"""The analytic gradient compared with that of autograd."""

import types

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.data._feed import Loader
from gpulab.engines import _prednet_windows as prednet_windows
from gpulab.engines._prednet_kernels import uses_tf32
from gpulab.engines._prednet_windows import SUPPORTED_TRUNCATIONS, WindowGradients
from gpulab.models import PredNet
from gpulab.numerics._flags import restore_tf32_on_exit, switch_tf32
from gpulab.settings import Setting

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA GPU"
)
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5}


def unlike_fresh(dtype=torch.float64, device="cpu", **options):
    """Return a network without zero biases, and with predictions close to the ends of [0, 1]."""
    torch.manual_seed(0)
    net = PredNet((3, 8, 12), (16, 24), **options).to(device, dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        net.conv_p[0].bias.copy_(torch.tensor([0.0, 0.5, 1.0]))
    return net


def both_ways(net, film, length=6):
    """Return losses, gradients and state of each window, by autograd and analytically."""
    states, windows = [None, None], None
    for start in range(0, len(film) - length, length):
        frames, found = film[start : start + length + 1], []
        for way in range(2):
            net.zero_grad()
            if way == 0:
                objective, losses, states[0] = net.training_loss(frames, states[0])
                objective.backward()
            else:
                windows = windows or WindowGradients(net, frames)
                losses, states[1] = windows(frames, states[1])
            found.append(
                (losses, {name: p.grad.clone() for name, p in net.named_parameters()}, states[way])
            )
        yield found


def check(net, film):
    rounding = ROUNDING[film.dtype]
    clipped = 0
    for (losses, gradient, state), (same_losses, same_gradient, same_state) in both_ways(net, film):
        torch.testing.assert_close(same_losses, losses, rtol=rounding, atol=0)
        for name, expected in gradient.items():
            off = (same_gradient[name] - expected).norm() / expected.norm()
            assert off < rounding, f"{name}: {off:.1e}"
        for layer, same in zip(state, same_state, strict=True):
            for expected, tensor in zip(layer, same, strict=True):
                torch.testing.assert_close(tensor, expected, rtol=rounding, atol=10 * rounding)
        clipped += int((state[0].p == 1).sum())
    assert clipped, "no prediction was clipped, so that its gradient was not tried"


@pytest.mark.parametrize(
    "setting", ["cpu:threads=1", "cpu:threads=2", pytest.param("cuda:tf32=off", marks=needs_cuda)]
)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("truncation", SUPPORTED_TRUNCATIONS)
@pytest.mark.parametrize("batch", [1, 2])
def test_prednet_windows_and_peepholes_have_losses_gradients_and_state_of_autograd(
    batch, truncation, dtype, setting
):
    film = torch.rand(19, batch, 3, 16, 24, dtype=dtype).to(setting.partition(":")[0])
    with gl.setting(setting):
        check(unlike_fresh(dtype, film.device, truncation=truncation), film)


def test_prednet_windows_overwritten_frames_spoil_the_gradient_as_under_autograd():
    film, states = (
        np.random.default_rng(0).integers(0, 256, (19, 3, 16, 24), np.uint8),
        [None, None],
    )
    loader, net, windows = (
        Loader("imitated", Setting.parse("cpu:precision=float64")),
        unlike_fresh(),
        None,
    )
    for start in (0, 6, 12):
        part = film[start : start + 7]
        net.zero_grad()
        objective, losses, states[0] = net.training_loss(loader.feed(part), states[0])
        objective.backward()
        spoilt = {name: p.grad.clone() for name, p in net.named_parameters()}
        frames = loader.window(part)[:, None]
        windows = windows or WindowGradients(net, frames, frames_share_memory=True)
        same_losses, states[1] = windows(frames, states[1])
        # A feed divides in float32.
        torch.testing.assert_close(same_losses, losses, rtol=1e-7, atol=0)
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(
                parameter.grad, spoilt[name], rtol=1e-6, atol=1e-7 * spoilt[name].abs().max()
            )


@pytest.mark.parametrize("truncation", SUPPORTED_TRUNCATIONS)
@pytest.mark.parametrize("batch", [1, 2])
def test_prednet_windows_with_channels_last_and_padded_channels_are_those_of_autograd(
    monkeypatch, batch, truncation
):
    monkeypatch.setattr(prednet_windows, "uses_tf32", lambda like: like.is_floating_point())
    net = unlike_fresh(truncation=truncation)  # 3 channels, padded to 4
    check(net, torch.rand(19, batch, 3, 16, 24, dtype=torch.float64))
    lowest = prednet_windows.WindowGradients(
        net, torch.rand(7, batch, 3, 16, 24, dtype=torch.float64)
    ).layers[0]
    assert lowest.padded_channels == 4
    assert lowest.inputs.shape[2] % 16 == 0


def test_uses_tf32_only_on_a_gpu_in_float32_where_tf32_is_allowed():
    on_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.float32)
    for allowed in (False, True):
        with restore_tf32_on_exit():
            switch_tf32(allowed)
            assert uses_tf32(on_gpu) is allowed
            assert not uses_tf32(torch.zeros(1)), "a CPU has no TF32"
            assert not uses_tf32(types.SimpleNamespace(is_cuda=True, dtype=torch.float64))


def test_prednet_windows_gradient_of_one_layer_is_that_of_autograd():
    net = PredNet((3,), (4, 6)).double()
    for (_, gradient, _), (_, same, _) in both_ways(
        net, torch.rand(13, 1, 3, 4, 6, dtype=torch.float64)
    ):
        for name, expected in gradient.items():
            torch.testing.assert_close(same[name], expected)


CHANGES = {
    "a hook": lambda net: net.lstm[0].register_forward_hook(lambda *_: None),
    "a hook on a weight": lambda net: net.conv_p[0].weight.register_hook(
        lambda gradient: 2 * gradient
    ),
    "weights that are shared": lambda net: setattr(net.lstm[1], "peep_i", net.lstm[1].peep_f),
    "another layer": lambda net: net.conv_a.insert(
        0, torch.nn.utils.parametrizations.weight_norm(net.conv_a.pop(0))
    ),
    "another forward": lambda net: setattr(net.conv_p[0], "forward", lambda x: 0 * x),
}


needs_newer_torch = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this torch cannot tell whether a guard looks on, so that every gradient is autograd's",
)


@needs_newer_torch
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_prednet_windows_leave_a_network_of_other_formulas_to_autograd(change):
    net = PredNet((3, 4), (8, 8))
    assert WindowGradients.supports(net)
    change(net)
    assert not WindowGradients.supports(net)
    for other in (type("Other", (PredNet,), {})((3, 4), (8, 8)), gl.models.Autoencoder()):
        assert not WindowGradients.supports(other), "its formulas may be others"


@needs_newer_torch
def test_train_records_how_its_gradients_were_computed():
    usual = {"profile": "smoke", "frames": 60, "progress": False}
    others = [{"fast": False}, {"loader": "reused"}, {"setting": "cpu:emulate=tf32"}]
    assert gl.train("prednet", **usual).record["gradients"] == "written out"
    assert [gl.train("prednet", **usual, **other).record["gradients"] for other in others] == 3 * [
        "autograd"
    ]
    with gl.guard():
        assert gl.train("prednet", **usual).record["gradients"] == "autograd"
