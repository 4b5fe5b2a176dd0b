import math

import pytest
import torch
from networks_drawn import drawn

import gpulab as gl


def small():
    net = gl.models.PredNet((3, 4, 5), (8, 12)).double()
    net.draw_weights(torch.Generator().manual_seed(1))
    return net


def video(count, batch=1, size=(8, 12), channels=3, dtype=torch.float64):
    return torch.rand(count, batch, channels, *size, generator=torch.Generator().manual_seed(2), dtype=dtype)


@torch.no_grad()
def test_a_batch_is_its_members_one_by_one():
    net, frames = small(), video(5, batch=2)
    alone = [net(member)[0] for member in frames.split(1, dim=1)]
    torch.testing.assert_close(net(frames)[0], torch.cat(alone, dim=1), rtol=0, atol=1e-12)


def groups(net):
    """The weights by the convolution that they would be in the authors' code, and how many numbers each reads."""
    if isinstance(net, gl.models.Autoencoder):
        yield from ((layer.weight, layer.in_features) for layer in net.layers if isinstance(layer, torch.nn.Linear))
        return
    for conv in (*net.conv_a, *net.conv_p):
        yield conv.weight, conv.in_channels * 9
    for cell in net.lstm:
        for group in cell.gates.weight.split(cell.groups, dim=1):
            if group.numel():
                yield group, group.shape[1] * 9
        for name in ("peep_i", "peep_f", "peep_o"):
            yield getattr(cell, name), getattr(cell, name).numel()


@pytest.mark.parametrize("net", [gl.models.PredNet((3, 48, 96), (64, 96)), gl.models.Autoencoder((500, 200))])
def test_published_weights_are_lecun_normal_and_biases_zero(net):
    scaled = []
    for weight, fan_in in groups(net):
        values = weight.detach().flatten() * math.sqrt(fan_in)
        scaled.append(values)
        count = len(values)  # mean and standard deviation within five standard errors
        assert abs(values.mean()) < 5 / math.sqrt(count)
        assert abs(values.std() - 1) < 5 / math.sqrt(2 * count)
    everything = torch.cat(scaled)
    inside = [(everything.abs() < bound).double().mean().item() for bound in (1, 2, 3)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=2e-3)  # a normal distribution
    assert all((parameter == 0).all() for name, parameter in net.named_parameters() if "bias" in name)


@pytest.mark.parametrize("make", [lambda: gl.models.PredNet((3, 4), (8, 12)), lambda: gl.models.Autoencoder((6, 3))])
def test_the_drawn_weights_depend_on_the_generator_alone(make):
    plain = make()
    reference = drawn(plain)
    torch.manual_seed(123)
    with gl.setting("cpu:precision=float64,threads=1"):
        made_inside = make()
        assert next(made_inside.parameters()).dtype == torch.float64
        assert (drawn(made_inside) == reference).all()
    assert (drawn(plain.to(torch.float64)) == reference).all()
    assert (drawn(plain.to(torch.bfloat16)) == reference.to(torch.bfloat16)).all()
    assert not (drawn(make(), seed=6) == reference).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
def test_a_gpu_gets_the_weights_that_a_cpu_gets_and_predicts_the_same():
    host = gl.models.PredNet((3, 8, 16), (24, 32))
    device = gl.models.PredNet((3, 8, 16), (24, 32)).to("cuda")
    assert (drawn(host) == drawn(device).cpu()).all()
    frames = video(6, 1, (24, 32), dtype=torch.float32)
    with torch.no_grad(), gl.setting("cuda:tf32=off"):
        torch.testing.assert_close(device(frames.cuda())[0].cpu(), host(frames)[0], rtol=0, atol=1e-5)
