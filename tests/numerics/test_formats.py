import numpy as np
import pytest
import torch
from exact_numbers import draw

import gpulab as gl
from gpulab.numerics.formats import round_to, rounded_format

# What a format keeps: (bits of the significand after the leading one, smallest exponent, largest finite number).
FORMATS = {
    "float32": (23, -126, (2 - 2.0**-23) * 2.0**127),
    "tf32": (10, -126, (2 - 2.0**-10) * 2.0**127),
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "float16": (10, -14, 65504.0),
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e5m2": (2, -14, 57344.0),
}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0]
# The largest numbers, what still rounds to them, and the first that does not.
SPECIAL += [65504.0, 65519.99, 65520.0, -65520.0, 448.0, 463.9, 464.0, 464.1, -480.0, 57344.0, 61439.9, 61440.0]
SPECIAL += [3.4028235e38, -3.4028235e38]
ROUND = {
    "nearest": np.rint,  # ties to even
    "away": lambda steps: np.trunc(steps + np.copysign(0.5, steps)),
    "truncate": np.trunc,
}


def rounded(x, name, mode):
    """The format's numbers for float32 ones, in float64, where each operation here is exact."""
    bits, smallest, largest = FORMATS[name]
    x = x.astype(np.float64)
    step = 2.0 ** (np.maximum(np.frexp(x)[1] - 1, smallest) - bits)
    steps = np.divide(x, step, where=np.isfinite(x), out=np.zeros_like(x))
    infinite = largest if name == "float8_e4m3fn" else np.inf
    result = np.where(np.isinf(x), infinite, np.abs(ROUND[mode](steps) * step))
    result = np.where(np.isfinite(x) & (result > largest), largest if mode == "truncate" else infinite, result)
    return np.copysign(result, x).astype(np.float32)


def bit_patterns():
    """Float32 numbers of every exponent, ties of every format, subnormals and special values."""
    generator = np.random.default_rng(0)
    exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
    ends = [0, 1, 0x7FFFFF, 0x7FFFFE]
    for bit in (12, 13, 15, 16, 19, 20, 21):  # halfway between two numbers, and one bit to either side
        ends += [1 << bit, (1 << bit) - 1, (1 << bit) + 1, 3 << bit, 0x7FFFFF & ~((1 << bit) - 1)]
    significands = np.concatenate([np.array(ends, np.uint32), generator.integers(0, 1 << 23, 200, dtype=np.uint32)])
    positive = (exponents | significands[None]).ravel()
    patterns = np.concatenate([positive, positive | np.uint32(1 << 31)])
    return np.concatenate([patterns.view(np.float32), np.array(SPECIAL, np.float32)])


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_that_of_exact_arithmetic_bit_for_bit(name, mode):
    given = bit_patterns()
    result = round_to(torch.from_numpy(given), name, mode).numpy()
    nan = np.isnan(given)
    assert np.isnan(result[nan]).all()
    assert (result[~nan].view(np.uint32) == rounded(given[~nan], name, mode).view(np.uint32)).all()


def test_flushing_takes_subnormal_numbers_for_zero_and_no_others():
    given = bit_patterns()
    made = round_to(torch.from_numpy(given), "float32_ftz").numpy()
    subnormal = np.abs(given) < 2.0**-126
    assert (made[subnormal] == 0).all()
    assert (np.signbit(made[subnormal]) == np.signbit(given[subnormal])).all()
    assert (made[~subnormal].view(np.uint32) == given[~subnormal].view(np.uint32)).all()
    assert np.count_nonzero(subnormal) > 100


@pytest.mark.parametrize("name", FORMATS)
def test_shape_and_strides_of_any_tensor_and_the_argument_stays(name):
    given = draw(4, 6)
    before = given.clone()
    for view in (lambda x: x.T, lambda x: x[:, ::2], lambda x: x[0, 0], lambda x: x[:0]):
        assert torch.equal(round_to(view(given), name), view(round_to(given, name)))
    assert torch.equal(given, before)
    zeros = torch._efficientzerotensor(3)  # as forward mode has them
    assert torch.equal(round_to(zeros, name).clone(), torch.zeros(3))


def test_other_formats_modes_and_types_are_refused():
    one, double, half = (torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float16))
    for call, arguments, words in (
        (round_to, (one, "tf16", "nearest"), "format 'tf16', mode 'nearest'"),
        (round_to, (one, "tf32", "up"), "format 'tf32', mode 'up'"),
        (round_to, (double, "tf32"), "must be float32, and these are float64"),
        (gl.numerics.ulp_distance, (one, half), "these are float32 and float16"),
        (gl.numerics.ulp_distance, (double, double), "these are float64 and float64"),
    ):
        with pytest.raises(gl.UsageError, match=words):
            call(*arguments)


def test_a_distance_counts_the_numbers_between_special_values_among_them():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        at = torch.tensor([1.0, -3.5, 1e-3, 0.0, torch.finfo(dtype).max / 2], dtype=dtype)
        up = at
        for steps in range(1, 6):
            up = torch.nextafter(up, torch.full_like(up, torch.inf))
            assert gl.numerics.ulp_distance(at, up).tolist() == [steps] * 5
            assert gl.numerics.ulp_distance(up, at).tolist() == [steps] * 5
    smallest, nan, inf = torch.tensor(2.0**-149), torch.tensor(torch.nan), torch.tensor(torch.inf)
    most = torch.iinfo(torch.int64).max
    distances = [(-smallest, smallest, 2), (0 * smallest, -0 * smallest, 0), (-smallest, 0 * smallest, 1)]
    distances += [(nan, nan, 0), (nan, smallest, most), (inf, nan, most), (inf, torch.tensor(3.4028234663852886e38), 1)]
    for a, b, distance in distances:
        assert gl.numerics.ulp_distance(a, b) == distance
    assert gl.numerics.ulp_distance(torch.ones(3, 1), torch.ones(4)).shape == (3, 4)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16, 32, 64, 100, 1000, 100_000])
def test_rounded_numbers_are_told_from_full_ones_and_few_give_no_false_alarm(count):
    for seed in range(max(1, min(300, 5000 // count))):
        x = draw(count, seed=seed) * 10.0 ** (seed % 5 * 15 - 30)
        assert rounded_format(x) is None
        assert rounded_format(x.relu()) is None
        if count >= 64:
            assert rounded_format(round_to(x, "tf32")) == "tf32"
            assert rounded_format(round_to(x, "tf32", "truncate")) == "tf32"
            assert rounded_format(round_to(x, "bfloat16")) == "bfloat16"
    unusual = torch.tensor([np.inf, -np.inf, np.nan, 0.0, 1e-42])  # which hide no rounding
    assert rounded_format(torch.cat([round_to(draw(100), "tf32"), unusual])) == "tf32"
    assert rounded_format(round_to(draw(100), "float16")) == "tf32", "which has as many bits"


SHORT_BY_NATURE = {
    "an image": lambda k: k / 255,
    "whole numbers": lambda k: k,
    "tenths": lambda k: k / 10,
    "a one-hot vector": lambda k: torch.eye(len(k))[0],
    "a constant": lambda k: torch.full_like(k, 0.3),
    "powers of two": lambda k: 2.0 ** (k % 40 - 20),
    "a mask of dropout": lambda k: (k % 2) / 0.9,
    "steps from 0 to 1": lambda k: torch.linspace(0, 1, len(k)),
    "nothing": lambda k: k[:0],
}


@pytest.mark.parametrize("name", SHORT_BY_NATURE)
def test_what_is_short_by_nature_was_not_rounded(name):
    for count in (10, 100, 5000):
        whole = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0)).float()
        assert rounded_format(SHORT_BY_NATURE[name](whole)) is None
