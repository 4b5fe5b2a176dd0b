import itertools
import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from exact_numbers import draw, float32_of

import gpulab as gl
from gpulab.numerics.sums import bit_of


def test_the_first_bit_is_the_one_that_was_changed():
    for bit in range(23):
        changed = torch.tensor([1.0]).view(torch.int32) ^ 1 << bit
        assert gl.numerics.first_bit(1.0, changed.view(torch.float32)) == 23 - bit
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
    assert gl.numerics.first_bit(2.0, below) == 23, "a carry does not hide that two numbers are neighbours"
    assert gl.numerics.first_bit(1.0, -1.0) == 0
    assert gl.numerics.first_bit(0.1, 0.1) is None
    assert all(bit_of(size * 2.0**-power) == power for power in (1, 10, 23, 30) for size in (1, 1.5))
    assert bit_of(3.0) == 0


def test_each_order_is_the_order_that_it_says():
    x = draw(1000)
    table = gl.numerics.summation(x).set_index("order")
    assert table.loc["sequential", "sum"] == np.add.accumulate(x.numpy())[-1]
    assert table.loc["backwards", "sum"] == np.add.accumulate(x.numpy()[::-1])[-1]
    assert table.loc["exact", "sum"] == np.float32(float(sum(Fraction(value) for value in x.tolist())))
    assert table.loc["exact", "ulps"] == 0
    assert table.loc["sequential", "ulps"] > 0, "otherwise the example shows nothing"
    for row in table.itertuples():
        bit = gl.numerics.first_bit(row.sum, table.loc["exact", "sum"])
        assert pd.isna(row.first_bit) if bit is None else row.first_bit == bit


def test_random_orders_differ_and_repeat_and_whole_numbers_have_one_sum_in_all():
    x = torch.arange(1000, dtype=torch.float32)
    assert (gl.numerics.summation(x).ulps == 0).all()
    y = draw(1000)
    sums = gl.numerics.shuffled_sums(y, 50)
    assert len(sums.unique()) > 1
    assert (sums == gl.numerics.shuffled_sums(y, 50)).all()
    assert (sums.double() - math.fsum(y.tolist())).abs().max() < 1e-3
    assert gl.numerics.shuffled_sums(x, 20).unique().tolist() == [499500.0]
    for other in (torch.zeros(2, 2), torch.zeros(0), x.double()):
        with pytest.raises(gl.UsageError, match="expected float32 in one row"):
            gl.numerics.summation(other)


def rounded_once(a, b, c):
    return float32_of(Fraction(a) * Fraction(b) + Fraction(c))


def test_fma_rounds_once():
    a, b, c = (draw(2000, seed=seed) for seed in (1, 2, 3))
    made = gl.numerics.fma(a, b, c)
    expected = [rounded_once(*triple) for triple in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert made.tolist() == expected
    assert (made != a * b + c).any()


def test_fma_where_rounding_twice_in_float64_would_err():
    """Cancellation and halfway cases: a sum in float64, rounded to float32, would be wrong here."""
    tiny, one, half = 2.0**-100, 1.0, 2.0**-24
    cases = [(one, one + 2.0**-23, half * tiny), (one, half, one), (one + 2.0**-12, one - 2.0**-12, -one)]
    # just above halfway, where the sum's last place in float64 is odd: one step down is halfway, which rounds to even
    cases.append((81_285.0, 422_707 * 2.0**-59, one))
    for sign in (1, -1):
        cases += [(one + 2.0**-23, half, sign * tiny), (half, one, one + sign * 2.0**-23)]
        # (1 + 2^-24) exactly between two float32 numbers, and a third term far below float64's last place
        cases.append((1 + 2.0**-12, 2.0**-12, sign * tiny))
    for a, b, c in cases:
        for signs in itertools.product((1, -1), repeat=2):
            triple = [a * signs[0], b, c * signs[1]]
            made = gl.numerics.fma(*(torch.tensor(x, dtype=torch.float32) for x in triple)).item()
            assert made == rounded_once(*(float(np.float32(x)) for x in triple)), triple


def test_fma_keeps_infinities_and_nans():
    inf, nan, one = torch.tensor(math.inf), torch.tensor(math.nan), torch.tensor(1.0)
    assert gl.numerics.fma(inf, one, one) == inf
    assert gl.numerics.fma(inf, one, -inf).isnan()
    assert gl.numerics.fma(nan, one, one).isnan()
    with pytest.raises(gl.UsageError, match="float64"):
        gl.numerics.fma(one.double(), one, one)
