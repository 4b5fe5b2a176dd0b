"""The emulation against what an NVIDIA H200 computed, by `benchmarks/compare_products.py`."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import companion
import gpulab as gl
from gpulab.numerics.arithmetic import CHIPS, PRECISIONS, arithmetic_of
from gpulab.numerics.emulation import emulate
from gpulab.store.records import read_json

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
products = importlib.import_module("compare_products")
FORWARD, TO_INPUT, TO_WEIGHT, MATRIX = products.FORWARD, products.TO_INPUT, products.TO_WEIGHT, products.MATRIX
INPUTS, Case, cases, compare_products = products.INPUTS, products.Case, products.cases, products.compare_products
SAMPLES, ARITHMETIC = products.recorded_samples(), products.found_arithmetic()
NOTES = read_json(products.RECORDED)


def assert_bit_for_bit(case, how):
    """In one channel of a convolution, and eight rows of a matrix product unless a tensor has one scale for all."""
    first, second = case.crop(*case.operands)
    whole = {MATRIX: len(first), TO_WEIGHT: first.shape[1], FORWARD: len(second), TO_INPUT: second.shape[1]}
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


def test_every_case_is_recorded_with_the_kernel_that_made_it():
    kept = load_file(products.RECORDED.with_suffix(".safetensors"))
    assert set(map(str, SAMPLES)) == set(NOTES["kernels"]["case"]) == set(kept)
    assert "H200" in NOTES["passport"]["gpus"][0]["name"]
    assert "compare_products.py" in NOTES["command"]
    assert sum(bool(name) for name in NOTES["kernels"]["kernel"]) > 0.9 * len(SAMPLES)


@pytest.mark.parametrize("case", cases()[::9], ids=str)
def test_cropped_factors_make_the_elements_of_the_sample(case):
    whole = case.sample(case.compute(*(x.double() for x in case.operands)))
    assert torch.allclose(case.exact(), whole, atol=1e-12)


# In how many slices the library split the sum is its choice for each shape, found by trying.
SLICES = {"tf32": (2, 14, 16, 52), "bfloat16": (1, 1, 1, 6), "float16": (1, 1, 1, 6), "float8_e4m3fn": (1, 1, 1, 3)}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("name", SLICES)
def test_matrix_products_of_an_h200_are_reproduced_bit_for_bit(name, shape, inputs):
    case = Case(MATRIX, shape, inputs, name)
    how = replace(arithmetic_of(name, f"tensor-core+split-{SLICES[name][shape]}"), result="float32")
    assert_bit_for_bit(case, how)


# cuDNN's kernels for Hopper run through 32 channels at a time; those for Ampere, some through all, round ties away.
HOPPER = replace(CHIPS["hopper"], order="tensor-core")
AMPERE = replace(HOPPER, tile=None, roundings=CHIPS["ampere"].roundings)
BFLOAT16 = replace(PRECISIONS["bfloat16"], order="tensor-core", tile=32)
CONVOLUTIONS = {
    Case(FORWARD, 1, "normal", "tf32"): HOPPER,
    Case(FORWARD, 2, "normal", "tf32"): AMPERE,
    Case(FORWARD, 4, "badly scaled", "tf32"): replace(AMPERE, tile=32),
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
def test_convolutions_of_an_h200_are_reproduced_bit_for_bit(case):
    assert_bit_for_bit(case, CONVOLUTIONS[case])


def test_the_formats_alone_explain_what_tf32_and_bfloat16_do_and_tf32_that_is_allowed_is_not_always_used():
    recorded = companion.recorded_products()
    short = recorded[recorded.used.isin(("tf32", "bfloat16"))]
    assert (short["least explained"] >= 0.99).all(), short.to_string()
    assert set(short[short.operation == "gradient of the weight"].rounding) == {"nearest", "away", "truncate"}
    assert set(short[short.operation == "matrix product"].rounding) == {"nearest"}
    asked = recorded[recorded.asked == "tf32"]
    assert set(asked[asked.operation == "matrix product"].used) == {"tf32"}
    assert set(asked[asked.operation != "matrix product"].used) == {"tf32", "float32"}
    assert (asked[asked.used == "float32"]["median error"] < 1e-5).all()
    assert (asked[asked.used == "tf32"]["median error"] > 1e-4).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_numbers_of_one_sign_drift_as_they_are_summed_which_only_the_sums_explain(channels_last):
    """Here the arithmetic is searched for, on normal numbers, and held against positive ones."""
    normal, positive = (Case(FORWARD, 2, kind, "tf32", channels_last=channels_last) for kind in ("normal", "positive"))
    found = products.closest_arithmetic(normal, SAMPLES[normal])
    (row,) = compare_products({positive: SAMPLES[positive]}, {positive: found}).itertuples()
    assert row.used == "tf32"
    assert row.explained < 0.99
    assert row.equal_exact == 1


def test_the_slices_of_a_sum_are_searched_for_and_a_comparison_can_tell_a_wrong_emulation():
    case = Case(MATRIX, 0, "normal", "tf32")
    found = products.closest_arithmetic(case, SAMPLES[case])
    assert (found.format, found.slices) == ("tf32", SLICES["tf32"][0])
    assert products.share_equal(case.emulated(found), SAMPLES[case]) == 1
    case = Case(MATRIX, 1, "normal", "tf32")
    wrong, sample = replace(PRECISIONS["tf32"], roundings=("truncate",) * 3), SAMPLES[case]
    assert products.explained(sample, case.emulated(wrong), case.exact()) < 0
    assert not torch.equal(case.emulated(arithmetic_of("tf32", "tensor-core")), sample), "one sum, not 14"


def test_the_tables_are_those_of_the_recorded_products():
    """The notebook shows what the comparison finds here and now, in a few kernels; sums may differ by the library."""
    recorded = companion.recorded_products().set_index(["operation", "asked", "result", "used", "rounding"])
    normal = {case: SAMPLES[case] for case in cases() if case.operation == MATRIX and case.inputs == "normal"}
    made = products.summarize(compare_products(normal, ARITHMETIC)).set_index(recorded.index.names)
    shown = ["cases", "median error", "bit for bit, tensor core's sums"]
    assert len(made) == 7
    recorded_here = recorded.loc[made.index]
    np.testing.assert_allclose(made[shown], recorded_here[shown], rtol=0.05)
    deviates = recorded_here["least explained"] > 0  # below it is the order of sums alone, which is the library's
    assert deviates.sum() >= 3
    np.testing.assert_allclose(made["least explained"][deviates], recorded_here["least explained"][deviates], rtol=0.05)
    assert recorded.cases.sum() == sum(case.inputs == "normal" for case in cases())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to record")
def test_recording_without_a_gpu_says_so(tmp_path):
    with pytest.raises(gl.GpulabError, match="recorded on an NVIDIA GPU"):
        products.record_products(tmp_path / "made.json")
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("case", [c for c in cases() if c.inputs == "normal" and c.operation == MATRIX], ids=str)
def test_this_gpu_computes_what_was_recorded_or_another_chip_is_at_work(case):
    if torch.cuda.get_device_name() != NOTES["passport"]["gpus"][0]["name"]:
        pytest.skip("another chip")
    assert torch.equal(case.sample(products.on_this_gpu(case)).cpu().double(), SAMPLES[case])
