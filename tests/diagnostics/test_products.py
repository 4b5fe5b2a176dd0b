"""The emulation against what an NVIDIA H200 computed."""

import json
from dataclasses import replace

import pytest
import torch

import gpulab as gl
from gpulab.diagnostics import products
from gpulab.diagnostics.products import FORWARD, INPUTS, MATRIX, TO_INPUT, TO_WEIGHT, Case, cases, compare_products
from gpulab.numerics.arithmetic import CHIPS, PRECISIONS, arithmetic_of
from gpulab.numerics.emulation import emulate

SAMPLES, NOTES = products.recorded_products()


def assert_bit_for_bit(case, how):
    """In one channel of a convolution, and eight rows of a matrix product unless a tensor has one scale for all."""
    first, second = case.crop(*case.operands)
    whole = {MATRIX: len(first), TO_WEIGHT: first.shape[1], FORWARD: len(second), TO_INPUT: second.shape[1]}
    some = {MATRIX: len(first) if "float8" in case.format else 8}.get(case.operation, 1)
    first = {MATRIX: first[:some], TO_WEIGHT: first[:, :some]}.get(case.operation, first)
    second = {FORWARD: second[:some], TO_INPUT: second[:, :some]}.get(case.operation, second)
    with emulate(how):
        product = case.compute(first, second).flatten()
    sample = SAMPLES[str(case)]
    places = torch.linspace(0, len(product) // some * whole[case.operation] - 1, len(sample)).long()
    inside = places < len(product)
    assert inside.sum() >= 49
    assert torch.equal(product[places[inside]], sample[inside])


def test_every_case_is_recorded_with_the_kernel_that_made_it():
    assert set(SAMPLES) == set(map(str, cases())) == set(NOTES["kernels"])
    assert "H200" in NOTES["passport"]["gpus"][0]["name"]
    assert "compare_products.py" in NOTES["command"]
    assert sum(bool(name) for name in NOTES["kernels"].values()) > 0.9 * len(SAMPLES)


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
HOPPER, AMPERE = (
    replace(CHIPS["hopper"], order="tensor-core"),
    replace(CHIPS["hopper"], order="tensor-core", tile=None),
)
AMPERE = replace(AMPERE, roundings=CHIPS["ampere"].roundings)
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
    Case(FORWARD, 3, "positive", "bfloat16", "bfloat16", True): replace(
        PRECISIONS["bfloat16"], order="tensor-core", tile=32
    ),
    Case(TO_INPUT, 2, "positive", "bfloat16", "bfloat16", True): replace(
        PRECISIONS["bfloat16"], order="tensor-core", tile=32
    ),
}


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions_of_an_h200_are_reproduced_bit_for_bit(case):
    assert_bit_for_bit(case, CONVOLUTIONS[case])


@pytest.fixture(scope="module")
def frame():
    return compare_products(inputs=("normal", "badly scaled"), exact=False, progress=False)


def test_the_formats_alone_explain_what_tf32_and_bfloat16_do_to_numbers_of_both_signs(frame):
    short = frame[frame.used.isin(("tf32", "bfloat16"))]
    assert len(short) > 80
    assert (short.explained >= 0.99).all(), short[short.explained < 0.99].to_string()
    assert set(short[short.operation == TO_WEIGHT].rounding) == {"nearest", "away", "truncate"}
    assert set(short[short.operation == MATRIX].rounding) == {"nearest"}


@pytest.mark.parametrize("channels_last", [False, True])
def test_numbers_of_one_sign_drift_as_they_are_summed_which_only_the_sums_explain(channels_last):
    """Here the arithmetic is searched for, on normal numbers, and held against positive ones."""
    both = [str(Case(FORWARD, 2, inputs, "tf32", channels_last=channels_last)) for inputs in ("normal", "positive")]
    (row,) = compare_products({name: SAMPLES[name] for name in both}, inputs=["positive"], progress=False).itertuples()
    assert row.used == "tf32"
    assert row.explained < 0.99
    assert row.equal_exact == 1


def test_tf32_that_is_allowed_is_not_always_used(frame):
    asked = frame[(frame.asked == "tf32") & (frame.inputs == "normal")]
    assert set(asked[asked.operation == MATRIX].used) == {"tf32"}
    assert set(asked[asked.operation != MATRIX].used) == {"tf32", "float32"}
    assert (asked[asked.used == "float32"].error < 1e-5).all()
    assert (asked[asked.used == "tf32"].error > 1e-4).all()
    assert products.summarize_products(frame)["cases"].sum() == len(frame)


def test_the_slices_of_a_sum_are_searched_for():
    case = Case(MATRIX, 0, "normal", "tf32")
    (row,) = compare_products({str(case): SAMPLES[str(case)]}, progress=False).itertuples()
    assert (row.used, row.slices, row.equal_exact) == ("tf32", SLICES["tf32"][0], 1)


def test_a_comparison_can_tell_a_wrong_emulation():
    case = Case(MATRIX, 1, "normal", "tf32")
    wrong = replace(PRECISIONS["tf32"], roundings=("truncate",) * 3)
    sample = SAMPLES[str(case)].double()
    assert products._explained(sample, case.emulated(wrong), case.exact()) < 0
    assert not torch.equal(case.emulated(arithmetic_of("tf32", "tensor-core")), sample), "one sum, not 14"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to record")
def test_recording_without_a_gpu_says_so(tmp_path):
    with pytest.raises(gl.GpulabError, match="recorded on an NVIDIA GPU"):
        products.record_products(tmp_path / "made", "command")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "another format", "no json"])
def test_damaged_recordings_are_refused_by_name(damage, tmp_path, monkeypatch):
    folder = tmp_path / "gpu_products"
    folder.mkdir()
    monkeypatch.setattr("gpulab.records.DATA", tmp_path)
    source = products.__file__.replace("gpulab/diagnostics/products.py", "data/gpu_products")
    if damage != "missing":
        for name in ("products.json", "products.safetensors", "found.json"):
            content = open(f"{source}/{name}", "rb").read()  # noqa: SIM115
            (folder / name).write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    if damage == "another format":
        (folder / "products.json").write_text(json.dumps(NOTES | {"format": 99}), encoding="utf-8")
    if damage == "no json":
        (folder / "products.json").write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(gl.DataError, match="gpu_products"):
        products.recorded_products()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("case", [c for c in cases() if c.inputs == "normal" and c.operation == MATRIX], ids=str)
def test_this_gpu_computes_what_was_recorded_or_another_chip_is_at_work(case):
    if torch.cuda.get_device_name() != NOTES["passport"]["gpus"][0]["name"]:
        pytest.skip("another chip")
    assert torch.equal(case.sample(products.real(case)).cpu(), SAMPLES[str(case)])
