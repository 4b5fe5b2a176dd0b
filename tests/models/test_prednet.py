import itertools
import math

import pytest
import torch

import gpulab as gl


def small():
    net = gl.models.PredNet((3, 4, 5), (8, 12)).double()
    net.draw_weights(torch.Generator().manual_seed(1))
    return net


def video(count, batch=1, size=(8, 12), channels=3, dtype=torch.float64):
    return torch.rand(count, batch, channels, *size, generator=torch.Generator().manual_seed(2), dtype=dtype)


def equal(states, others, tolerance=0.0):
    for one, other in zip(itertools.chain(*states), itertools.chain(*others), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


# --- shapes and states -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "size", "kernel_size"),
    [((3,), (5, 7), 3), ((1, 2), (6, 10), 5), ((3, 4, 5), (8, 12), 1), ((3, 6, 12, 24), (16, 24), 3)],
)
@torch.no_grad()
def test_there_is_a_prediction_in_0_to_1_after_every_frame(channels, size, kernel_size):
    net = gl.models.PredNet(channels, size, kernel_size)
    assert {conv.kernel_size for conv in net.modules() if isinstance(conv, torch.nn.Conv2d)} == {2 * (kernel_size,)}
    predictions, state = net(video(4, 2, size, channels[0], torch.float32))
    assert predictions.shape == (4, 2, channels[0], *size)
    assert predictions.min() >= 0
    assert predictions.max() <= 1
    for layer, (count, remembered) in enumerate(zip(channels, state, strict=True)):
        assert all(part.shape == (2, count, size[0] >> layer, size[1] >> layer) for part in remembered)
    assert (state[0].p == predictions[-1]).all()


@torch.no_grad()
def test_frames_in_pieces_with_the_state_carried_are_frames_at_once():
    net, frames = small(), video(6)
    whole, after = net(frames)
    first, state = net(frames[:3])
    second, state = net(frames[3:], state)
    assert (torch.cat([first, second]) == whole).all()
    equal(state, after)
    assert not torch.allclose(net(frames[3:])[0], second), "without the state it is another prediction"


@torch.no_grad()
def test_a_batch_is_its_members_one_by_one():
    net, frames = small(), video(5, batch=2)
    together, _ = net(frames)
    for member in range(2):
        alone, _ = net(frames[:, member : member + 1])
        torch.testing.assert_close(together[:, member : member + 1], alone, rtol=0, atol=1e-12)


def test_the_loss_is_carried_from_window_to_window_with_the_state():
    net, frames = small(), video(9)
    _, whole, after = net.training_loss(frames, None)
    _, first, state = net.training_loss(frames[:5], None)
    _, second, state = net.training_loss(frames[4:], state)
    assert (torch.cat([first, second]) == whole).all()
    equal(state, after)
    assert not any(part.requires_grad for part in [whole, *itertools.chain(*state)]), "they are cut off from the graph"


# --- loss ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_published_loss_is_the_sum_of_the_squared_errors_of_the_next_frame():
    net, frames = small(), video(5)
    predictions, _ = net(frames)
    objective, per_frame, _ = net.training_loss(frames, None)
    expected = (predictions[:-1] - frames[1:]).square().mean((1, 2, 3, 4))
    torch.testing.assert_close(per_frame, expected, rtol=1e-12, atol=0)
    assert objective.item() == pytest.approx(expected.sum().item(), rel=1e-12)


def test_the_gradient_is_that_of_finite_differences():
    net, frames = small(), video(4)
    parameters = list(net.parameters())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # peepholes and biases that matter
        for parameter in parameters:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    net.training_loss(frames, None)[0].backward()
    for _ in range(3):
        directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True)).item()
        losses = []
        with torch.no_grad():
            for move in (1e-6, -2e-6, 1e-6):
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter += move * direction
                losses.append(net.training_loss(frames, None)[0].item())
        assert slope == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


# --- initial weights -------------------------------------------------------------------------------------


def groups(net, area):
    """The weights by the convolution that they would be in the authors' code, and how many numbers each reads."""
    for conv in (*net.conv_a, *net.conv_p):
        yield conv.weight, conv.in_channels * area
    for cell in net.lstm:
        for group in cell.gates.weight.split(cell.groups, dim=1):
            if group.numel():
                yield group, group.shape[1] * area
        for name in ("peep_i", "peep_f", "peep_o"):
            yield getattr(cell, name), getattr(cell, name).numel()


@pytest.mark.parametrize("kernel_size", [3, 5])
def test_published_weights_are_lecun_normal_and_biases_zero(kernel_size):
    net = gl.models.PredNet((3, 48, 96), (64, 96), kernel_size=kernel_size)
    scaled = []
    for weight, fan_in in groups(net, kernel_size**2):
        values = weight.detach().flatten() * math.sqrt(fan_in)
        scaled.append(values)
        count = len(values)  # mean and standard deviation within five standard errors
        assert abs(values.mean()) < 5 / math.sqrt(count)
        assert abs(values.std() - 1) < 5 / math.sqrt(2 * count)
    everything = torch.cat(scaled)
    assert len(everything) == sum(parameter.numel() for name, parameter in net.named_parameters() if "bias" not in name)
    inside = [(everything.abs() < bound).double().mean().item() for bound in (1, 2, 3)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=2e-3)  # a normal distribution
    assert all((parameter == 0).all() for name, parameter in net.named_parameters() if "bias" in name)


def test_the_drawn_weights_depend_on_the_generator_alone():
    def drawn(net, seed=5):
        net.draw_weights(torch.Generator().manual_seed(seed))
        return torch.cat([parameter.detach().float().flatten() for parameter in net.parameters()])

    plain = gl.models.PredNet((3, 4), (8, 12))
    reference = drawn(plain)
    torch.manual_seed(123)
    with gl.setting("cpu:precision=float64,threads=1"):
        made_inside = gl.models.PredNet((3, 4), (8, 12))
        assert next(made_inside.parameters()).dtype == torch.float64
        assert (drawn(made_inside) == reference).all()
    assert (drawn(plain.to(torch.float64)) == reference).all()
    assert (drawn(plain.to(torch.bfloat16)) == reference.to(torch.bfloat16)).all()
    assert not (drawn(plain, seed=6) == reference).all()
    fresh = [torch.cat([p.detach().flatten() for p in gl.models.PredNet((3, 4), (8, 12)).parameters()]) for _ in "ab"]
    assert (fresh[0] == fresh[1]).all(), "a network is the same whenever it is made"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
def test_a_gpu_gets_the_weights_that_a_cpu_gets_and_predicts_the_same():
    host, device = (
        gl.models.PredNet((3, 8, 16), (24, 32)),
        gl.models.PredNet((3, 8, 16), (24, 32)).to("cuda"),
    )
    for net in (host, device):
        net.draw_weights(torch.Generator().manual_seed(5))
    for one, other in zip(host.parameters(), device.parameters(), strict=True):
        assert (one == other.cpu()).all()
    frames = video(6, 1, (24, 32), dtype=torch.float32)
    with torch.no_grad(), gl.setting("cuda:tf32=off"):
        torch.testing.assert_close(device(frames.cuda())[0].cpu(), host(frames)[0], rtol=0, atol=1e-5)


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "size", "offered"),
    [
        ((3, 4, 5), (30, 41), ["(28, 40)", "(32, 44)", "multiples of 4"]),
        ((3, 4), (7, 8), ["(6, 8)", "(8, 8)", "multiples of 2"]),
        ((3, 4, 5, 6), (1, 1), ["(8, 8)", "multiples of 8"]),
        ((3,), (0, 4), ["(1, 4)"]),
        ((3, 4), (-4, 4), ["(2, 4)"]),
    ],
)
def test_a_size_that_does_not_halve_is_refused_with_sizes_that_do(channels, size, offered):
    with pytest.raises(gl.UsageError) as error:
        gl.models.PredNet(channels, size)
    assert [word for word in (f"size={size}", *offered) if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"truncation": ""}, "''.*'loss' or 'state'"),
        ({"truncation": "none"}, "'none'.*'loss' or 'state'"),
        ({"channels": ()}, "channels"),
        ({"channels": (3, 0)}, r"\(3, 0\)"),
        *(({"kernel_size": wrong}, "kernel_size=") for wrong in (0, 2, 11, 3.5, "3")),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_other_nonsense_is_refused(options, named):
    with pytest.raises(gl.UsageError, match=named):
        gl.models.PredNet(**{"channels": (3, 4), "size": (8, 8), **options})


@pytest.mark.parametrize("shape", [(5, 1, 1, 8, 12), (5, 1, 3, 12, 8), (3, 8, 12)])
def test_frames_of_another_shape_are_refused_with_the_shape_expected(shape):
    with pytest.raises(gl.UsageError, match=r"expected \(T, B, 3, 8, 12\)") as error:
        small()(torch.zeros(shape, dtype=torch.float64))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize(
    "networks",
    [
        [gl.models.PredNet((3, 4), (12, 16), truncation=truncation) for truncation in ("loss", "state")],
        [gl.models.Autoencoder((8,), batch_size=size) for size in (1, 4)],
    ],
    ids=["truncation", "batch_size"],
)
def test_networks_that_differ_in_one_option_are_other_runs(networks):
    ids = {gl.train(net, profile="smoke", frames=20, progress=False).record["id"] for net in networks}
    assert len(ids) == 2
