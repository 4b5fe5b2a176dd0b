"""The emulation compared with an NVIDIA H200, by `benchmarks/correctness/compare_products.py`."""

from dataclasses import replace

import pytest
import torch

from benchmarks.correctness import compare_products as products
from gpulab.numerics._emulation import CHIPS, PRECISIONS, emulate, find_arithmetic

FORWARD, TO_INPUT, TO_WEIGHT, MATRIX = (
    products.FORWARD,
    products.TO_INPUT,
    products.TO_WEIGHT,
    products.MATRIX,
)
INPUTS, Case = products.INPUTS, products.Case
SAMPLES = products.recorded_samples()


def assert_bit_for_bit(case, how):
    """Assert equal bits in one channel of a convolution, or in eight rows of a matrix product.

    If a tensor has one scale for all numbers, the whole product is compared.
    """
    first, second = case.crop(*case.operands)
    whole = {
        MATRIX: len(first),
        TO_WEIGHT: first.shape[1],
        FORWARD: len(second),
        TO_INPUT: second.shape[1],
    }
    some = {MATRIX: len(first) if "float8" in case.format else 8}.get(case.operation, 1)
    first = {MATRIX: first[:some], TO_WEIGHT: first[:, :some]}.get(case.operation, first)
    second = {FORWARD: second[:some], TO_INPUT: second[:, :some]}.get(case.operation, second)
    with emulate(how):
        product = case.compute(first, second).flatten()
    sample = SAMPLES[case]
    places = torch.linspace(0, len(product) // some * whole[case.operation] - 1, len(sample)).long()
    inside = places < len(product)
    assert inside.sum() >= 49
    assert torch.equal(product[places[inside]].double(), sample[inside])


# The library chooses the number of slices of a sum for each shape. These were found by trying.
SLICES = {
    "tf32": (2, 14, 16, 52),
    "bfloat16": (1, 1, 1, 6),
    "float16": (1, 1, 1, 6),
    "float8_e4m3fn": (1, 1, 1, 3),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("name", SLICES)
def test_emulated_matrix_products_of_an_h200_are_reproduced_bit_for_bit(name, shape, inputs):
    case = Case(MATRIX, shape, inputs, name)
    how = replace(
        find_arithmetic(name, f"tensor-core+split-{SLICES[name][shape]}"), result="float32"
    )
    assert_bit_for_bit(case, how)


# cuDNN's kernels for Hopper process 32 channels at a time. Those for Ampere round ties away from
# zero, and some process all channels at a time.
HOPPER = replace(CHIPS["hopper"], order="tensor-core")
AMPERE = replace(HOPPER, channel_tile=None, roundings=CHIPS["ampere"].roundings)
BFLOAT16 = replace(PRECISIONS["bfloat16"], order="tensor-core", channel_tile=32)
CONVOLUTIONS = {
    Case(FORWARD, 1, "normal", "tf32"): HOPPER,
    Case(FORWARD, 2, "normal", "tf32"): AMPERE,
    Case(FORWARD, 4, "badly scaled", "tf32"): replace(AMPERE, channel_tile=32),
    Case(FORWARD, 2, "positive", "tf32", channels_last=True): HOPPER,
    Case(TO_INPUT, 1, "badly scaled", "tf32"): HOPPER,
    Case(TO_INPUT, 4, "positive", "tf32"): HOPPER,
    Case(TO_INPUT, 0, "normal", "tf32", channels_last=True): HOPPER,
    Case(TO_WEIGHT, 3, "normal", "tf32", channels_last=True): HOPPER,
    Case(TO_WEIGHT, 3, "positive", "tf32", channels_last=True): HOPPER,
    Case(FORWARD, 3, "positive", "bfloat16", "bfloat16", True): BFLOAT16,
    Case(TO_INPUT, 2, "positive", "bfloat16", "bfloat16", True): BFLOAT16,
}


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_emulated_convolutions_of_an_h200_are_reproduced_bit_for_bit(case):
    assert_bit_for_bit(case, CONVOLUTIONS[case])
