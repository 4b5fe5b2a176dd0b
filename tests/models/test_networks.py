"""Properties of all networks: arguments that they reject, options that make different runs, and
flipped bits.
"""

import math
import re

import pytest
import torch

import gpulab as gl
from gpulab.models._chainer import chainer_views
from gpulab.models.prednet import TRUNCATIONS
from gpulab.training._planning import plan_run
from tests.models._helpers import drawn, weights

SMALL = {"setting": "cpu:threads=1", "profile": "smoke", "progress": False}
REFUSED = {
    gl.models.PredNet: {"channels": [(), (3, 0)], "truncation": ["none"]},
    gl.models.Autoencoder: {"hidden": [(), (8, -1)], "batch_size": [0, 2.0]},
    gl.models.Whitener: {
        "hidden": [-1],
        "code": [0],
        "batch_size": [24],
        "covariance": ["two-pass"],
    },
}


@pytest.mark.parametrize(
    ("network", "option", "value"),
    [
        (network, option, value)
        for network, of in REFUSED.items()
        for option in of
        for value in of[option]
    ],
)
def test_network_refuses_an_invalid_option_with_its_value(network, option, value):
    with pytest.raises(gl.UsageError) as error:
        network(**{option: value})
    assert f"{option}={value!r}" in str(error.value)


def test_prednet_refuses_a_size_that_does_not_halve_and_names_sizes_that_do():
    with pytest.raises(gl.UsageError, match=r"size=\(30, 41\).*\(28, 40\).*\(32, 44\)"):
        gl.models.PredNet(3 * (3,), (30, 41))
    for size in ((0, 48), (48, 48, 48)):
        with pytest.raises(gl.UsageError, match=re.escape(f"size={size}")):
            gl.models.PredNet((3,), size)


SHAPES = {
    "(B, 1, 28, 28)": (gl.models.Autoencoder(), [(1, 28, 28), (2, 1, 28, 27), (2, 784)]),
    "(T, B, 3, 8, 12)": (gl.models.PredNet((3,), (8, 12)), [(5, 1, 1, 8, 12), (3, 8, 12)]),
}


@pytest.mark.parametrize("expected", SHAPES)
def test_network_refuses_frames_of_another_shape_with_the_shape_expected(expected):
    net, shapes = SHAPES[expected]
    for shape in shapes:
        with pytest.raises(
            gl.UsageError, match=re.escape(f"of shape {shape}: expected {expected}")
        ):
            net(torch.zeros(shape))


def test_run_identity_differs_between_networks_that_differ_in_one_option():
    nets = [gl.models.PredNet((3, 4), (12, 16), truncation=how) for how in TRUNCATIONS]
    nets += [gl.models.Autoencoder((8,), batch_size=size) for size in (1, 4)]
    assert len({plan_run(net, profile="smoke").identity(gl.passport()).id for net in nets}) == len(
        nets
    )


@pytest.mark.parametrize(
    ("hidden", "size"), [((128, 32), (28, 28)), ((5,), (4, 5)), ([64, 16, 8], (6, 10))]
)
@torch.no_grad()
def test_autoencoder_layers_are_those_of_the_docstring_written_out(hidden, size):
    net, pictures = gl.models.Autoencoder(hidden, size), torch.rand(3, 1, *size)
    layers = [layer for layer in net.layers if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [
        *hidden,
        *reversed(hidden[:-1]),
        size[0] * size[1],
    ]
    code = pictures.flatten(1)
    for layer in layers:
        layer.bias += 0.1
        before = code @ layer.weight.T + 0.1
        code = before.clamp(min=0)
    expected = 1 / (1 + torch.exp(-before))
    torch.testing.assert_close(net(pictures), expected.view_as(pictures), rtol=0, atol=1e-6)


def test_autoencoder_batch_size_says_how_many_images_an_update_sees():
    window = torch.rand(20, 1, 28, 28)
    batches = list(gl.models.Autoencoder(batch_size=8).batches(window))
    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert (torch.cat(batches) == window).all()
    net = gl.models.Autoencoder(batch_size=8)
    loss, each, _ = net.training_loss(window[:8], None)
    assert each.tolist() == 8 * [loss.item()]
    assert loss.item() == pytest.approx(
        (net(window[:8]) - window[:8]).square().mean().item(), rel=1e-6
    )
    run = gl.train(
        "autoencoder", profile="smoke", frames=40, model_options={"batch_size": 8}, progress=False
    )
    assert run.history.step.iloc[-1] == 6  # two windows of three updates


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("weight", [0, 5, 7, 13])
def test_flip_bit_changes_the_last_bit_of_one_weight_and_changes_it_back(weight):
    model = two_layers()
    before = weights(model).view(torch.int32)
    gl.models.flip_bit(model, weight)
    apart = (weights(model).view(torch.int32) ^ before).to(torch.int64) & 0xFFFFFFFF
    assert apart.tolist() == [1 if number == weight else 0 for number in range(len(before))]
    assert (weights(gl.models.flip_bit(model, weight)).view(torch.int32) == before).all()


def test_flip_and_draws_refuse_values_that_do_not_exist():
    for call, words in (
        (lambda: gl.models.flip_bit(two_layers(), 14), "flip 14: .* from 0 to 13"),
        (
            lambda: gl.train("autoencoder", flip=999_999_999, **SMALL),
            "flip 999999999: expected the number of a weight",
        ),
        (
            lambda: gl.train("autoencoder", draws="dice", **SMALL),
            "draws 'dice': expected one of cpu, device",
        ),
    ):
        with pytest.raises(gl.UsageError, match=words):
            call()


def test_runs_table_says_what_was_flipped_and_which_device_drew(tmp_path):
    """A CPU draws as a device does."""
    for draws in ("cpu", "device"):
        gl.train("autoencoder", frames=40, flip=2, draws=draws, store=tmp_path, **SMALL)
    frame = gl.runs(tmp_path)
    assert (frame.flip.tolist(), sorted(frame.draws)) == ([2, 2], ["cpu", "device"])
    assert frame.weights.nunique() == 1


# --- batches; drawn weights -----------------------------------------------------------------------


@torch.no_grad()
def test_prednet_batch_is_its_members_one_by_one():
    net, frames = (
        gl.models.PredNet((3, 4, 5), (8, 12)).double(),
        torch.rand(5, 2, 3, 8, 12).double(),
    )
    alone = [net(member)[0] for member in frames.split(1, dim=1)]
    torch.testing.assert_close(net(frames)[0], torch.cat(alone, dim=1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "net", [gl.models.PredNet((3, 48, 96), (64, 96)), gl.models.Autoencoder((500, 200))]
)
def test_draw_weights_gives_lecun_normal_weights_and_zero_biases(net):
    """The variance is 1 / fan-in for each convolution of the authors' code."""
    of_prednet, scaled = isinstance(net, gl.models.PredNet), []
    named = (
        chainer_views(net, lambda parameter: parameter)
        if of_prednet
        else dict(net.named_parameters())
    )
    for weight in (weight for name, weight in named.items() if name.endswith(("W", "weight"))):
        values = weight.detach().flatten() * math.sqrt(weight[0].numel())
        scaled.append(values)
        count = len(values)  # mean and standard deviation within five standard errors
        assert abs(values.mean()) < 5 / math.sqrt(count)
        assert abs(values.std() - 1) < 5 / math.sqrt(2 * count)
    everything = torch.cat(scaled)
    inside = [(everything.abs() < bound).double().mean().item() for bound in (1, 2, 3)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=2e-3)  # a normal distribution
    assert all(
        (parameter == 0).all() for name, parameter in net.named_parameters() if "bias" in name
    )


@pytest.mark.parametrize(
    "make", [lambda: gl.models.PredNet((3, 4), (8, 12)), lambda: gl.models.Autoencoder((6, 3))]
)
def test_draw_weights_depends_on_the_generator_alone(make):
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
