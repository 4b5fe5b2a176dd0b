"""Networks and data sets reject arguments of the wrong type, length or sign with a clear error."""

import functools

import numpy as np
import pytest
import torch

import gpulab as gl

NO_WIDTHS = [
    (3.0, 4),
    (True, 4),
    ("3", 4),
    "34",
    3,
    (),
    None,
    (-1, 3),
    (0, 3),
    {3: 4},
    {3, 4},
    np.array(3),
    [[3], 4],
]
NO_SIZES = [
    (12,),
    12,
    (12, 16, 3),
    (12.0, 16),
    (0, 16),
    (-12, 16),
    "12x16",
    None,
    (True, 16),
    (float("nan"), 16),
]
NO_COUNTS = [1.0, 0, -3, True, "5", None, (3,)]
SIZED = {
    "prednet": functools.partial(gl.models.PredNet, (3, 4)),
    "autoencoder": functools.partial(gl.models.Autoencoder, (4,)),
    "whitener": functools.partial(gl.models.Whitener, 4, 3, 10),
    "walk": functools.partial(gl.load, "walk"),
    "moving digits": functools.partial(gl.load, "moving-digits"),
    "images": functools.partial(gl.load, "digits"),
}
COUNTED = {
    "autoencoder's batch": lambda count: gl.models.Autoencoder((4,), batch_size=count),
    "whitener's batch": lambda count: gl.models.Whitener(batch_size=count),
    "whitener's layer": lambda count: gl.models.Whitener(hidden=count),
    "whitener's code": lambda count: gl.models.Whitener(code=count),
    "features": lambda count: gl.models.LinearAutoencoder(count, 2),
    "hidden": lambda count: gl.models.LinearAutoencoder(3, count),
}


@pytest.mark.parametrize("given", NO_WIDTHS, ids=repr)
@pytest.mark.parametrize(
    ("make", "name"), [(gl.models.PredNet, "channels"), (gl.models.Autoencoder, "hidden")]
)
def test_widths_of_networks_refuse_what_is_no_whole_number(make, name, given):
    with pytest.raises(
        gl.UsageError, match=rf"^{name}=.*: expected one or more whole numbers from 1$"
    ):
        make(given)


@pytest.mark.parametrize("given", NO_SIZES, ids=repr)
@pytest.mark.parametrize("kind", SIZED)
def test_size_refuses_what_is_no_height_and_width(kind, given):
    with pytest.raises(
        gl.UsageError,
        match=(
            r"size=.*: expected \(height, width\), whole numbers from 1(, got (height|width)=.*)?$"
        ),
    ):
        SIZED[kind](size=given)


@pytest.mark.parametrize("given", [[12, 16], torch.Size([12, 16]), np.array([12, 16])], ids=repr)
@pytest.mark.parametrize("kind", SIZED)
def test_size_takes_any_sequence_of_whole_numbers(kind, given):
    assert SIZED[kind](size=given).size == ((28, 28) if kind == "images" else (12, 16))


@pytest.mark.parametrize("given", NO_COUNTS, ids=repr)
@pytest.mark.parametrize("kind", COUNTED)
def test_counts_of_networks_and_data_refuse_what_is_no_whole_number(kind, given):
    with pytest.raises(gl.UsageError, match=r"expected a whole number from 1$"):
        COUNTED[kind](given)


@pytest.mark.parametrize("speed", ["fast", True, 0, -1, float("nan"), float("inf"), None, [1]])
def test_speed_refuses_what_is_no_number_above_zero(speed):
    with pytest.raises(gl.UsageError, match=r"speed=.*: expected a number above 0$"):
        gl.load("walk", speed=speed)


@pytest.mark.parametrize("grey", ["no", 1, None])
def test_grey_refuses_what_is_not_true_or_false(grey, tmp_path):
    with pytest.raises(gl.UsageError, match=r"grey=.*: expected True or False$"):
        gl.load(f"frames:{tmp_path}", grey=grey)
