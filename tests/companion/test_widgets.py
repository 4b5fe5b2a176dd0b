import base64
import io
import math
import re

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image
from torch.nn.functional import mse_loss

import companion
import gpulab as gl
from gpulab.plots.instruments import EXPONENT, FRACTION, SIGN


def pattern(explorer):
    return "".join(bit.description for bit in explorer.bits)


@pytest.mark.parametrize("x", [-0.1, 0.0, 1e-45, 3e38])
def test_a_typed_number_is_shown_with_its_bits(x):
    explorer = companion.bit_explorer(1.0)
    explorer.number.value = x
    stored = torch.tensor([x], dtype=torch.float32)
    assert pattern(explorer) == f"{int(stored.view(torch.int32)) & 0xFFFFFFFF:032b}"
    assert f"{stored.item():.12g}" in explorer.answer.value


@pytest.mark.parametrize("bit", [0, 8, 31])
def test_a_clicked_bit_changes_the_number_and_nothing_else(bit):
    explorer = companion.bit_explorer(0.75)
    before = pattern(explorer)
    explorer.bits[bit].click()
    after = pattern(explorer)
    assert [n for n in range(32) if before[n] != after[n]] == [bit]
    assert explorer.number.value == explorer.x
    stored = torch.tensor([explorer.x], dtype=torch.float32).view(torch.int32)
    assert f"{int(stored) & 0xFFFFFFFF:032b}" == after
    explorer.bits[bit].click()
    assert explorer.number.value == 0.75


def test_what_is_no_number_is_not_sent_to_the_page():
    explorer = companion.bit_explorer(1.5)
    for bit in explorer.bits[1:9]:
        if bit.description == "0":
            bit.click()  # exponent all ones, fraction not zero
    assert math.isnan(explorer.x)
    assert math.isfinite(explorer.number.value)
    assert "nan" in explorer.answer.value


def test_the_answer_is_the_rounded_number():
    explorer = companion.bit_explorer(1 / 3)
    explorer.format.value = "float8_e5m2"
    for mode in ("nearest", "truncate"):
        explorer.rounding.value = mode
        rounded = gl.numerics.round_to(torch.tensor([1 / 3]), "float8_e5m2", mode).item()
        assert f"<b>{rounded:.12g}</b>" in explorer.answer.value


def luminance(colour):
    """The relative luminance of a CSS colour, as the Web Content Accessibility Guidelines 2 define it."""
    parts = np.array(to_rgb(colour))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_every_bit_has_its_colour_and_can_be_read():
    explorer = companion.bit_explorer(-math.pi)
    colours = [bit.style.get_state()["button_color"] for bit in explorer.bits]  # which is what the page is sent
    ones = [colour for colour, bit in zip(colours, explorer.bits, strict=True) if bit.description == "1"]
    assert set(ones) == {SIGN, EXPONENT, FRACTION}
    for bit in explorer.bits:
        light, dark = sorted(map(luminance, (bit.style.button_color, bit.style.text_color)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize("x", [-0.1, 0.0, 1e-45, -3e38])
def test_the_meaning_of_the_bits_multiplies_to_the_number(x):
    sign, power, fraction = (meaning.value.partition("</span> ")[2] for meaning in companion.bit_explorer(x).meanings)
    exponent = float(power.removeprefix("× 2").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
    assert float(torch.tensor({"+": 1, "−": -1}[sign] * float(fraction) * 2**exponent)) == pytest.approx(x, rel=1e-7)


def test_the_slice_is_shown_at_its_own_size_with_words():
    explorer = companion.slice_explorer(
        gl.saddles.landscape(torch.nn.Linear(2, 1), mse_loss, (torch.eye(2), torch.ones(2, 1)))
    )
    element = r'<img alt="The loss along .+?" src="data:image/png;base64,(.+?)" width="(\d+)"'
    png, width = re.match(element, explorer.image.value).groups()
    assert Image.open(io.BytesIO(base64.b64decode(png))).width == int(width)


def test_without_a_kernel_there_is_the_still_picture(outputs_of):
    figure, fold = outputs_of(companion.bit_explorer(0.1))
    assert set(figure.data) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert fold.data["text/plain"].startswith("In words, before anything is moved: Bits of 0.1")


def test_an_unknown_format_is_refused():
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
@pytest.mark.parametrize("x", [-0.1, 1e-7])
def test_the_bits_are_those_that_torch_stores(name, dtype, whole, x):
    stored = torch.tensor([x]).to(dtype)
    width = 8 * stored.element_size()
    parts = gl.numerics.format_bits(x, name)
    assert "".join(parts) == f"{int(stored.view(whole)) & (1 << width) - 1:0{width}b}"
    assert len(parts[0]) == 1
    assert len(parts[2]) == -round(math.log2(torch.finfo(dtype).eps))


def test_tf32_is_float32_without_its_last_bits():
    sign, exponent, fraction = gl.numerics.format_bits(1 / 3, "tf32")
    assert (sign, exponent, len(fraction)) == (*gl.numerics.format_bits(1 / 3)[:2], 10)
