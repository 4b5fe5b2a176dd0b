"""What all networks have in common: what they refuse, and that an option of theirs makes another run."""

import pytest
import torch

import gpulab as gl

REFUSED = {
    gl.models.PredNet: {
        "channels": [(), (3, 0)],
        "kernel_size": [0, 2, 11, 3.5, "3"],
        "truncation": ["", "none"],
        "batch_size": [0],
    },
    gl.models.Autoencoder: {"hidden": [(), (8, -1)], "batch_size": [0, -1, 2.0, "4"]},
    gl.models.Whitener: {"hidden": [-1], "code": [0], "batch_size": [24], "covariance": ["two-pass"]},
}


@pytest.mark.parametrize(
    ("network", "option", "value"),
    [(network, option, value) for network, of in REFUSED.items() for option in of for value in of[option]],
)
def test_an_option_that_makes_no_sense_is_refused_with_its_value(network, option, value):
    with pytest.raises(gl.UsageError) as error:
        network(**{option: value})
    assert f"{option}={value!r}" in str(error.value)


def test_a_size_that_does_not_halve_is_refused_with_sizes_that_do():
    for layers, size, *offered in (
        (3, (30, 41), "(28, 40)", "(32, 44)", "multiples of 4"),
        (4, (1, 1), "(8, 8)", "multiples of 8"),
        (1, (0, 4), "(1, 4)"),
        (2, (-4, 4), "(2, 4)"),
    ):
        with pytest.raises(gl.UsageError) as error:
            gl.models.PredNet(layers * (3,), size)
        assert [word for word in (f"size={size}", *offered) if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("make", "shapes", "expected"),
    [
        (gl.models.Autoencoder, [(1, 28, 28), (2, 3, 28, 28), (2, 1, 28, 27), (2, 784)], "(B, 1, 28, 28)"),
        (
            lambda: gl.models.PredNet((3,), (8, 12)),
            [(5, 1, 1, 8, 12), (5, 1, 3, 12, 8), (3, 8, 12)],
            "(T, B, 3, 8, 12)",
        ),
    ],
)
def test_frames_of_another_shape_are_refused_with_the_shape_expected(make, shapes, expected):
    for shape in shapes:
        with pytest.raises(gl.UsageError) as error:
            make()(torch.zeros(shape))
        assert f"of shape {shape}: expected {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("network", "options"),
    [
        (gl.models.PredNet, [{"channels": (3, 4), "size": (12, 16), "truncation": how} for how in ("loss", "state")]),
        (gl.models.Autoencoder, [{"hidden": (8,), "batch_size": size} for size in (1, 4)]),
    ],
)
def test_networks_that_differ_in_one_option_are_other_runs(network, options):
    one, other = (gl.train(network(**of), profile="smoke", frames=20, progress=False) for of in options)
    assert one.record["id"] != other.record["id"]
