import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.numerics._formats import round_to, rounded_format
from tests.numerics._helpers import draw

# Each format: (bits of the significand after the leading one, smallest exponent, largest finite
# number).
FORMATS = {
    "float32": (23, -126, (2 - 2.0**-23) * 2.0**127),
    "tf32": (10, -126, (2 - 2.0**-10) * 2.0**127),
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "float16": (10, -14, 65504.0),
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e5m2": (2, -14, 57344.0),
}
# The largest numbers, numbers that still round to them, and the first that do not.
SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    65504.0,
    65519.99,
    65520.0,
    -65520.0,
    448.0,
    463.9,
    464.0,
    464.1,
]
SPECIAL += [57344.0, 61439.9, 61440.0, 3.4028235e38, -3.4028235e38]
ROUND = {
    "nearest": np.rint,  # ties to even
    "away": lambda steps: np.trunc(steps + np.copysign(0.5, steps)),
    "truncate": np.trunc,
}
MODES = [(name, "nearest") for name in FORMATS]
MODES += [(name, mode) for name in ("float32", "tf32", "bfloat16") for mode in ("away", "truncate")]


def rounded(x, name, mode):
    """Round float32 numbers to the format, in float64, where each operation used is exact."""
    bits, smallest, largest = FORMATS[name]
    x = x.astype(np.float64)
    step = 2.0 ** (np.maximum(np.frexp(x)[1] - 1, smallest) - bits)
    steps = np.divide(x, step, where=np.isfinite(x), out=np.zeros_like(x))
    infinite = largest if name == "float8_e4m3fn" else np.inf
    result = np.where(np.isinf(x), infinite, np.abs(ROUND[mode](steps) * step))
    result = np.where(
        np.isfinite(x) & (result > largest), largest if mode == "truncate" else infinite, result
    )
    return np.copysign(result, x).astype(np.float32)


def bit_patterns():
    """Return numbers of every exponent, ties of every format, subnormals and special values."""
    generator = np.random.default_rng(0)
    exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
    ends = [0, 1, 0x7FFFFF, 0x7FFFFE]
    # halfway between two numbers, and one bit to either side
    for bit in (
        12,
        13,
        15,
        16,
        19,
        20,
        21,
    ):
        ends += [1 << bit, (1 << bit) - 1, (1 << bit) + 1, 3 << bit, 0x7FFFFF & ~((1 << bit) - 1)]
    significands = np.concatenate(
        [np.array(ends, np.uint32), generator.integers(0, 1 << 23, 200, dtype=np.uint32)]
    )
    positive = (exponents | significands[None]).ravel()
    patterns = np.concatenate([positive, positive | np.uint32(1 << 31)])
    return np.concatenate([patterns.view(np.float32), np.array(SPECIAL, np.float32)])


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_round_to_is_exact_arithmetic_bit_for_bit(name, mode):
    given = bit_patterns()
    result = round_to(torch.from_numpy(given), name, mode).numpy()
    nan = np.isnan(given)
    assert np.isnan(result[nan]).all()
    assert (result[~nan].view(np.uint32) == rounded(given[~nan], name, mode).view(np.uint32)).all()


def test_round_to_refuses_other_formats_modes_and_types():
    one, double = (torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.float64))
    for arguments, words in (
        ((one, "tf16", "nearest"), "format 'tf16', mode 'nearest'"),
        (
            (one, "float16", "truncate"),
            "mode 'truncate': float16 .* 'nearest'",
        ),
        ((double, "tf32"), "expected .* float32 .*, got float64"),
    ):
        with pytest.raises(gl.UsageError, match=words):
            round_to(*arguments)


@pytest.mark.parametrize("count", [1, 3, 4, 16, 64, 1000, 100_000])
def test_rounded_format_names_rounded_numbers_and_no_full_ones(count):
    for seed in range(max(1, min(300, 5000 // count))):
        x = draw(count, seed=seed) * 10.0 ** (seed % 5 * 15 - 30)
        assert rounded_format(x) is None
        assert rounded_format(x.relu()) is None
        if count >= 64:
            assert rounded_format(round_to(x, "tf32", "truncate")) == "tf32"
            assert rounded_format(round_to(x, "bfloat16")) == "bfloat16"
    unusual = torch.tensor([np.inf, -np.inf, np.nan, 0.0, 1e-42])  # these do not hide rounding
    assert rounded_format(torch.cat([round_to(draw(100), "tf32"), unusual])) == "tf32"


def test_rounded_format_of_what_cancellation_leaves_is_none():
    """The gradient of an angle between nearly parallel vectors has few significant bits."""
    for seed in range(20):
        vectors = draw(256, seed=seed).view(32, 8).requires_grad_()
        cosine = torch.nn.functional.cosine_similarity(vectors, vectors * 1.5 + 1e-3)
        torch.acos(cosine.clamp(max=1 - 2.0**-22)).mean().backward()
        assert rounded_format(vectors.grad) is None


@pytest.mark.parametrize("count", [10, 5000])
def test_rounded_format_of_what_is_short_by_nature_is_none(count):
    whole = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0)).float()
    powers, steps = 2.0 ** (whole % 40 - 20), torch.linspace(0, 1, count)
    for numbers in (
        whole,
        whole / 255,
        whole / 10,
        torch.eye(count)[0],
        powers,
        (whole % 2) / 0.9,
        steps,
        whole[:0],
    ):
        assert rounded_format(numbers) is None
