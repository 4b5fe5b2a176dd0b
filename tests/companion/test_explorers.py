"""The widgets: moving a control changes the text and the drawing."""

import math
import re

import numpy as np
import pandas as pd
import pytest
import torch

import companion
import gpulab as gl
from companion import explorers
from companion.widgets import format_bits

LOSS = torch.nn.functional.mse_loss


def changes(explorer, control, value, part="image"):
    """Whether a widget shows something different after a control is set to a value."""
    before = getattr(explorer, part).value
    control.value = value
    return getattr(explorer, part).value != before


# --- the bits of a number -------------------------------------------------------------------------


def pattern(explorer):
    return "".join(bit.description for bit in explorer.bits)


@pytest.mark.parametrize("bit", [0, 8, 31])
def test_bit_explorer_changes_the_number_and_nothing_else_when_a_bit_is_clicked(bit):
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


def test_bit_explorer_does_not_send_nan_to_the_page():
    explorer = companion.bit_explorer(1.5)
    for bit in explorer.bits[1:9]:
        if bit.description == "0":
            bit.click()  # exponent all ones, fraction not zero
    assert math.isnan(explorer.x)
    assert math.isfinite(explorer.number.value)
    assert "nan" in explorer.answer.value


FORMATS = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}
FORMATS |= {"float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}


@pytest.mark.parametrize("name", FORMATS)
def test_format_bits_gives_the_bits_that_torch_stores_and_tf32_lacks_the_last(name):
    dtype = getattr(torch, name)
    for x in (-0.1, 1e-7):
        stored = torch.tensor([x]).to(dtype)
        parts = format_bits(x, name)
        width = 8 * stored.element_size()
        assert "".join(parts) == f"{int(stored.view(FORMATS[name])) & (1 << width) - 1:0{width}b}"
        assert len(parts[0]) == 1
        assert len(parts[2]) == -round(math.log2(torch.finfo(dtype).eps))
    sign, exponent, fraction = format_bits(1 / 3, "tf32")
    assert (sign, exponent, len(fraction)) == (*format_bits(1 / 3)[:2], 10)


# --- a ball on a saddle ---------------------------------------------------------------------------


MOVES = {
    "turn": 30,
    "tilt": 60,
    "step": 25,
    "optimizer": "rmsprop",
    "format": "float64",
    "rate": 0.1,
    "push": 0.1,
}


def test_saddle_and_slice_explorers_redraw_for_every_control():
    saddle, step = companion.saddle_explorer(), (torch.eye(2), torch.ones(2, 1))
    for name, value in MOVES.items():
        assert changes(saddle, getattr(saddle, name), value), name
    assert 'alt="The loss around a saddle' in saddle.image.value
    cut = companion.slice_explorer(gl.saddles.landscape(torch.nn.Linear(2, 1), LOSS, step))
    assert changes(cut, cut.angle, 45)
    assert changes(cut, cut.reach, 0.1)


@pytest.mark.parametrize("optimizer", ["momentum", "rmsprop"])
def test_saddle_explorer_shows_all_of_its_title(optimizer):
    saddle = companion.saddle_explorer()
    saddle.optimizer.value, saddle.format.value = optimizer, "bfloat16"
    saddle.push.value, saddle.step.value = 1e-3, 200
    figure = saddle.picture().figure
    figure.canvas.draw()
    title = figure._suptitle
    box = title.get_window_extent()
    assert 0 < box.x0 < box.x1 < figure.bbox.x1
    assert 0 < box.y0 < box.y1 < figure.bbox.y1
    assert title.get_text().startswith(f"{saddle.optimizer.label}, bfloat16, rate 0.01, a push")
    assert "at a loss of" in title.get_text()


def test_trajectory_is_that_of_the_escape_and_ends_where_numbers_become_infinite():
    saddle = explorers.small_saddle()
    options = {"optimizers": {"momentum": [0.05]}, "perturbations": [1e-3], "progress": False}
    path = explorers.trajectory(
        saddle, "cpu:precision=float64", optimizer="momentum", rate=0.05, push=1e-3
    )
    history = gl.saddles.escape_table(saddle, ["cpu:precision=float64"], **options).paths
    same = path[: len(history)]
    np.testing.assert_allclose(np.hypot(same.along, same.across), history.distance, rtol=1e-12)
    np.testing.assert_allclose(same.loss, history.loss, rtol=1e-12)
    path = explorers.trajectory(saddle, "cpu", optimizer="sgd", rate=10.0, push=0.1)
    assert 1 < len(path) < 100
    assert np.isfinite(path).all(axis=None)


# --- seed by seed ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeds():
    return companion.seeds_explorer()


@pytest.mark.parametrize("name", explorers.COMPARISONS)
def test_seed_explorer_has_the_verdict_of_all_runs_for_every_comparison(seeds, name):
    query, factor, levels = explorers.COMPARISONS[name]
    runs = gl.recorded_runs().query(query)
    runs = runs[runs[factor].isin(levels) & (runs.rerun == 0)]
    seeds.which.value = name
    seeds.seeds.value = seeds.seeds.max
    whole = gl.verdict(runs, factor=factor, reference=levels[0])
    assert seeds.verdicts[seeds.seeds.max].table.equals(whole.table)


@pytest.mark.parametrize(
    ("shift", "words"),
    [(0.0, "the means agree to within the margin"), (0.5, "the means differ")],
)
def test_seed_by_seed_has_a_title_with_the_latest_verdict(shift, words):
    seeds = np.arange(12)
    cpu = pd.DataFrame({"setting": "cpu", "seed": seeds, "final_loss": 1 + 0.1 * np.sin(seeds)})
    gpu = cpu.assign(setting="cuda", final_loss=cpu.final_loss + shift + 1e-5 * np.cos(seeds))
    runs = pd.concat([cpu, gpu])
    verdicts = {count: gl.verdict(runs[runs.seed < count]) for count in (6, 12)}
    title = explorers.seed_by_seed(verdicts).figure.get_suptitle()
    assert title == f"After 12 seeds: GPU, against CPU: {words}"


@pytest.mark.parametrize(("curvature", "is_lower"), [(-1.0, True), (1.0, False)])
def test_slice_explorer_has_a_title_that_says_whether_a_loss_is_lower(curvature, is_lower):
    def loss(output, _):
        return 5 + 0.5 * curvature * (output**2).sum() + 0.01 * (output**4).sum()

    network = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(network.weight)
    torch.nn.init.zeros_(network.bias)
    cut = companion.slice_explorer(
        gl.saddles.landscape(network, loss, (torch.eye(2), torch.zeros(2, 1)))
    )
    title = cut.picture().figure.get_suptitle()
    assert ("no loss on the line is below" in title) == (not is_lower)
    assert ("% below the network's" in title) == is_lower
    stated = float(re.search(r"curvature is (\S+);", title)[1])
    assert (stated < 0) == is_lower


# --- the buffer that is overwritten ---------------------------------------------------------------


def test_buffer_explorer_shows_which_number_the_gradient_finds():
    buffer = companion.buffer_explorer()
    assert changes(buffer, buffer.numbers, "4, 5 7")
    assert buffer.seen()["loss when it came"].tolist() == [16, 25, 49]
    assert buffer.seen()["the gradient finds"].tolist() == [7, 7, 7]
    assert changes(buffer, buffer.copy, True)
    assert buffer.seen()["the gradient finds"].tolist() == [4, 5, 7]
    buffer.numbers.value = "4 and"
    assert "numbers" in buffer.image.value
    assert "<table" not in buffer.image.value
