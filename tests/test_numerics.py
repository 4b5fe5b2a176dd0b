import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.numerics import round_to, rounded_format

# What float32 keeps: (bits of the significand after the leading one, smallest exponent, largest exponent).
FORMATS = {"tf32": (10, -126, 127), "bfloat16": (7, -126, 127), "float16": (10, -14, 15)}
SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1.0,
    -1.0,
    65504.0,
    65519.99,
    65520.0,
    -65520.0,
    3.4028235e38,
    -3.4028235e38,
]


def nearest(value, name):
    """The format's number nearest to a float32 one, ties to even, in exact arithmetic."""
    bits, smallest, largest = FORMATS[name]
    if not np.isfinite(value) or value == 0:
        return value
    _, exponent = np.frexp(value)
    step = 2.0 ** (max(int(exponent) - 1, smallest) - bits)
    rounded = np.rint(float(value) / step) * step  # both are exact in float64, and rint breaks ties to even
    if abs(rounded) >= 2.0 ** (largest + 1):
        return np.copysign(np.inf, value)
    return np.copysign(rounded, value)


def bit_patterns():
    """Float32 numbers of every exponent, ties of every format, subnormals and special values."""
    generator = np.random.default_rng(0)
    exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
    ends = [0, 1, 0x7FFFFF, 0x7FFFFE]
    for bit in (12, 13, 15, 16):  # halfway between two numbers, and one bit to either side
        ends += [1 << bit, (1 << bit) - 1, (1 << bit) + 1, 3 << bit, 0x7FFFFF & ~((1 << bit) - 1)]
    significands = np.concatenate([np.array(ends, np.uint32), generator.integers(0, 1 << 23, 200, dtype=np.uint32)])
    positive = (exponents | significands[None]).ravel()
    patterns = np.concatenate([positive, positive | np.uint32(1 << 31)])
    return np.concatenate([patterns.view(np.float32), np.array(SPECIAL, np.float32)])


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_to_the_nearest_number_of_the_format_bit_for_bit(name):
    given = bit_patterns()
    made = round_to(torch.from_numpy(given), name).numpy()
    expected = np.array([nearest(value, name) for value in given], np.float32)
    nan = np.isnan(given)
    assert np.isnan(made[nan]).all()
    assert (made[~nan].view(np.uint32) == expected[~nan].view(np.uint32)).all()


def test_truncation_drops_the_end_and_leaves_special_values_alone():
    given = bit_patterns()
    made = round_to(torch.from_numpy(given), "tf32", "truncate").numpy()
    finite = np.isfinite(given)
    expected = (given.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    assert (made[finite].view(np.uint32) == expected[finite].view(np.uint32)).all()
    assert (made[~finite].view(np.uint32) == given[~finite].view(np.uint32)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_twice_changes_nothing_more_and_the_argument_stays(name):
    given = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = given.clone()
    once = round_to(given, name)
    assert torch.equal(round_to(once, name), once)
    assert torch.equal(given, before)
    assert not torch.equal(once, given)


@pytest.mark.parametrize("name", FORMATS)
def test_shape_and_strides_of_any_tensor(name):
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_to(given.T, name), round_to(given, name).T)
    assert torch.equal(round_to(given[:, ::2], name), round_to(given, name)[:, ::2])
    assert round_to(given[0, 0], name).shape == ()
    assert round_to(given[:0], name).shape == (0, 6)
    assert round_to(given, name).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "mode"), [("tf16", "nearest"), ("", "nearest"), ("float64", "nearest"), ("tf32", "up")]
)
def test_another_format_or_mode_is_refused_by_name(name, mode):
    with pytest.raises(gl.UsageError, match=f"format '{name}', mode '{mode}'"):
        round_to(torch.ones(3), name, mode)


# --- telling that numbers were rounded --------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8, 1e30], ids=str)
@pytest.mark.parametrize("count", [64, 100, 1000, 100_000])
def test_rounded_numbers_are_told_from_full_ones(count, scale):
    for seed in range(5 if count < 10_000 else 1):
        x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
        assert rounded_format(x) is None
        assert rounded_format(x.relu()) is None
        assert rounded_format(round_to(x, "tf32")) == "tf32"
        assert rounded_format(round_to(x, "tf32", "truncate")) == "tf32"
        assert rounded_format(round_to(x, "bfloat16")) == "bfloat16"
        if scale == 1.0:
            assert rounded_format(round_to(x, "float16")) == "tf32", "which has as many bits"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16, 32])
def test_few_numbers_give_no_false_alarm(count):
    generator = torch.Generator().manual_seed(0)
    seen = {rounded_format(torch.randn(count, generator=generator)) for _ in range(300)}
    assert seen == {None}


def test_infinities_and_nan_do_not_hide_a_rounding():
    x = round_to(torch.randn(100, generator=torch.Generator().manual_seed(0)), "tf32")
    assert rounded_format(torch.cat([x, torch.tensor([np.inf, -np.inf, np.nan, 0.0, 1e-42])])) == "tf32"


SHORT_BY_NATURE = {
    "an image": lambda k: k / 255,
    "whole numbers": lambda k: k,
    "whole numbers below nothing": lambda k: k - 128,
    "squares": lambda k: k**2,
    "eighths": lambda k: k / 8,
    "tenths": lambda k: k / 10,
    "a one-hot vector": lambda k: torch.eye(len(k))[0],
    "a constant": lambda k: torch.full_like(k, 0.3),
    "a short constant": lambda k: torch.full_like(k, 0.375),
    "powers of two": lambda k: 2.0 ** (k % 40 - 20),
    "a mask of dropout": lambda k: (k % 2) / 0.9,
    "a mask of half of it": lambda k: (k % 2) / 0.5,
    "zeros": lambda k: 0 * k,
    "steps from 0 to 1": lambda k: torch.linspace(0, 1, len(k)),
    "nothing": lambda k: k[:0],
}


@pytest.mark.parametrize("name", SHORT_BY_NATURE)
@pytest.mark.parametrize("count", [10, 100, 5000])
def test_what_is_short_by_nature_was_not_rounded(name, count):
    whole = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0)).float()
    assert rounded_format(SHORT_BY_NATURE[name](whole)) is None
