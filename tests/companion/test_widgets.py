import math

import pytest
import torch

import gpulab as gl


def pattern(explorer):
    return "".join("1" if bit.value else "0" for bit in explorer.bits)


@pytest.mark.parametrize("x", [1.0, -0.1, 0.0, 1e-45, 3e38, math.pi])
def test_a_typed_number_is_shown_with_its_bits(x):
    explorer = gl.bit_explorer(1.0)
    explorer.number.value = x
    stored = torch.tensor([x], dtype=torch.float32)
    assert pattern(explorer) == f"{int(stored.view(torch.int32)) & 0xFFFFFFFF:032b}"
    assert f"{stored.item():.12g}" in explorer.answer.value


@pytest.mark.parametrize("place", [0, 1, 8, 9, 31])
def test_a_clicked_bit_changes_the_number_and_nothing_else(place):
    explorer = gl.bit_explorer(0.75)
    before = pattern(explorer)
    explorer.bits[place].value = not explorer.bits[place].value
    after = pattern(explorer)
    assert [n for n in range(32) if before[n] != after[n]] == [place]
    stored = torch.tensor([explorer.x], dtype=torch.float32).view(torch.int32)
    assert f"{int(stored) & 0xFFFFFFFF:032b}" == after
    assert explorer.number.value == explorer.x
    explorer.bits[place].value = before[place] == "1"
    assert explorer.number.value == 0.75


def test_what_is_no_number_is_not_sent_to_the_page():
    explorer = gl.bit_explorer(1.5)
    for bit in explorer.bits[1:9]:
        bit.value = True  # exponent all ones, fraction not zero
    assert math.isnan(explorer.x)
    assert math.isfinite(explorer.number.value)
    assert "nan" in explorer.answer.value


@pytest.mark.parametrize("name", ["tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_the_answer_is_the_rounded_number(name):
    explorer = gl.bit_explorer(1 / 3, name)
    rounded = gl.round_to(torch.tensor([1 / 3]), name).item()
    assert f"<b>{rounded:.12g}</b>" in explorer.answer.value
    explorer.rounding.value = "truncate"
    assert f"<b>{gl.round_to(torch.tensor([1 / 3]), name, 'truncate').item():.12g}</b>" in explorer.answer.value


def test_without_a_kernel_there_is_the_still_picture():
    data, metadata = gl.bit_explorer(0.1)._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    assert "application/vnd.jupyter.widget-view+json" in data
    assert metadata["image/png"]["alt"].startswith("Bits of 0.1")


def test_an_unknown_format_is_refused():
    with pytest.raises(gl.UsageError, match="'float4': expected one of float32"):
        gl.bit_explorer(1.0, "float4")
    with pytest.raises(gl.UsageError, match="'float4': expected one of float32"):
        gl.plots.bits(1.0, ["float4"])


@pytest.mark.parametrize(
    ("name", "dtype", "whole"),
    [
        ("float32", torch.float32, torch.int32),
        ("float16", torch.float16, torch.int16),
        ("bfloat16", torch.bfloat16, torch.int16),
        ("float8_e4m3fn", torch.float8_e4m3fn, torch.uint8),
        ("float8_e5m2", torch.float8_e5m2, torch.uint8),
    ],
)
@pytest.mark.parametrize("x", [0.1, -3.0, 1e-7, 440.0])
def test_the_bits_are_those_that_torch_stores(name, dtype, whole, x):
    stored = torch.tensor([x]).to(dtype)
    width = 8 * stored.element_size()
    parts = gl.format_bits(x, name)
    assert "".join(parts) == f"{int(stored.view(whole)) & (1 << width) - 1:0{width}b}"
    assert len(parts[0]) == 1
    assert len(parts[2]) == -round(math.log2(torch.finfo(dtype).eps))


def test_tf32_is_float32_without_its_last_bits():
    sign, exponent, fraction = gl.format_bits(1 / 3, "tf32")
    assert (sign, exponent, len(fraction)) == (*gl.format_bits(1 / 3)[:2], 10)
