import math

import pytest
import torch
from networks_drawn import drawn

import gpulab as gl
from gpulab.models.chainer import chainer_views


@torch.no_grad()
def test_a_batch_is_its_members_one_by_one():
    net, frames = gl.models.PredNet((3, 4, 5), (8, 12)).double(), torch.rand(5, 2, 3, 8, 12).double()
    alone = [net(member)[0] for member in frames.split(1, dim=1)]
    torch.testing.assert_close(net(frames)[0], torch.cat(alone, dim=1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("net", [gl.models.PredNet((3, 48, 96), (64, 96)), gl.models.Autoencoder((500, 200))])
def test_published_weights_are_lecun_normal_and_biases_zero(net):
    """Those of each convolution of the authors' code, by how many numbers it reads."""
    of_prednet, scaled = isinstance(net, gl.models.PredNet), []
    named = chainer_views(net, lambda parameter: parameter) if of_prednet else dict(net.named_parameters())
    for weight in (weight for name, weight in named.items() if name.endswith(("W", "weight"))):
        values = weight.detach().flatten() * math.sqrt(weight[0].numel())
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
    frames = torch.rand(6, 1, 3, 24, 32)
    with torch.no_grad(), gl.setting("cuda:tf32=off"):
        torch.testing.assert_close(device(frames.cuda())[0].cpu(), host(frames)[0], rtol=0, atol=1e-5)
