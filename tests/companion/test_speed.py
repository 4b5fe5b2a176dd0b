import math

import numpy as np
import pandas as pd
import pytest
import torch

import companion
import gpulab as gl
from companion import speed, workloads
from companion.benchmarks import benchmark

boosted_trees, texts = benchmark("boosted_trees"), benchmark("text_classifier")
CPU = "cpu:threads=1"
SETTINGS = [CPU, *(each for each in gl.available_settings() if each in ("cuda:tf32=off", "mps", "xpu"))]
GPU = {"setting": "cuda:tf32=off", "machine": "a GPU", "recorded": True}
HERE = {"setting": "cpu", "machine": "a CPU", "recorded": False}


def rows(part, values, unit="s", what="work", size="quick", note="", **where):
    """A row for each way and value; a list of values is a row a seed."""
    found = []
    for way, some in values.items():
        for seed, value in enumerate(some if isinstance(some, list) else [some]):
            row = {"part": part, "what": what, "way": way, "value": value, "unit": unit, "spread": 0.0, "seed": seed}
            found.append(row | {"note": note, "size": size} | where)
    return pd.DataFrame(found)


@pytest.fixture(scope="module")
def measured():
    """Some sections on the CPU, small."""
    return {part: companion.measure_speed(part, [CPU], "smoke") for part in ("step", "text")}


# --- what is measured ------------------------------------------------------------------------------------


@pytest.mark.slow("measures every section")
@pytest.mark.parametrize("part", workloads.PARTS)
def test_every_section_gives_numbers_or_says_why_not_on_all_there_is(part):
    # JAX chooses its threads once in a process, which other tests share.
    settings = ["cpu" if part == "libraries" and setting == CPU else setting for setting in SETTINGS]
    frame = companion.measure_speed(part, settings, "smoke")
    assert set(frame.setting) == set(settings)
    assert (frame.value.notna() ^ frame.note.ne("")).all()
    assert np.isfinite(frame.value.dropna()).all()
    assert not frame.note.str.contains("failed").any()
    assert not frame.recorded.any()


def test_what_was_measured_is_what_was_asked_for(measured):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    companion.measure_speed("small", ["cpu:threads=2"], "smoke")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    seconds = measured["step"].pivot_table("value", "what", "way")
    assert (seconds > 0).all(axis=None)
    assert set(seconds.columns) == set(speed.PHASES)
    assert set(seconds.index) == set(workloads.NETWORKS)
    judged = companion.precision_verdict(measured["text"])
    assert judged.reference == "float32"
    assert (judged.table.seeds == texts.SEEDS).all()


def test_texts_held_out_are_not_trained_on_and_words_are_numbered_alike_whatever_their_case():
    whole, packages = texts.docstrings()
    assert set(packages) == set(texts.PACKAGES)
    words, labels, held_words, held_labels = texts.split(400)
    assert len(words) + len(held_words) == len(whole)
    assert len(held_words) == len(held_labels) == math.ceil(len(whole) / 5)
    assert labels.unique().tolist() == list(range(len(texts.PACKAGES)))
    numbers = texts.as_words(["Return THE value", "return the value, the", ""], 3)
    assert torch.equal(numbers[0], numbers[1])
    assert (numbers[:, 0] > 0).all()
    assert numbers[2, 1:].tolist() == [0, 0], "an empty text is one word"


@pytest.mark.parametrize("kind", ["LSTM", "Transformer"])
def test_places_without_a_word_do_not_count(kind):
    net = workloads.TextNet(kind, classes=3, width=8).eval()
    short, long = torch.tensor([[5, 7, 9]]), torch.tensor([[5, 7, 9, 0, 0]])
    torch.testing.assert_close(net(short), net(long))
    assert not torch.allclose(net(short), net(torch.tensor([[5, 7, 8]])))


# --- what is made of it ----------------------------------------------------------------------------------


def test_a_claim_is_a_ratio_of_medians_here_before_recorded():
    frame = pd.concat(
        [
            rows("text", {"float32": [10.0, 30.0, 20.0]}, **HERE),
            rows("text", {"float32": 999.0}, **{**HERE, "recorded": True}),
            rows("text", {"float32": [1.0, 2.0, 3.0], "bfloat16": 1.0}, **GPU),
            rows("text", {"float32": 7.0}, unit="J", **GPU),
            rows("text", {"float32, compiled": math.nan}, unit="", note="cannot be compiled here", **GPU),
            rows("inference", {"1 core": 50.0, "2 cores": 80.0}, unit="images/s", **HERE),
            rows("inference", {"1 device": 800.0, "2 devices": 1600.0}, unit="images/s", **GPU),
        ]
    )
    table = companion.claims_table(frame).set_index("claim")
    assert table.times["text classification is faster on a GPU"] == 10
    assert table.measured["text classification is faster on a GPU"] == "10×"
    assert "(recorded)" in table.to["text classification is faster on a GPU"]
    assert "(recorded)" not in table["from"]["text classification is faster on a GPU"]
    assert table.times["GPUs serve faster"] == 20
    assert table.times["tensor cores train faster in mixed precision"] == 2
    assert table.measured["compilation makes training faster"] == "not measured on a GPU: cannot be compiled here"
    assert "not measured on a CPU; not measured on a GPU" in table.measured["gradient-boosted trees are faster on GPUs"]
    assert len(companion.claims_table(frame, "paper")) == len(speed.CLAIMS)


def test_the_crossover_lies_where_the_lines_meet():
    widths = (16, 64, 256, 1024)
    cpu = rows("small", {str(width): width / 1e6 for width in widths}, **HERE)
    gpu = rows("small", {str(width): 100 / 1e6 for width in widths}, **GPU)
    assert companion.crossover(pd.concat([cpu, gpu])) == pytest.approx(100)
    assert math.isnan(companion.crossover(cpu))
    assert math.isnan(companion.crossover(pd.concat([cpu, gpu.assign(value=1e-9)])))
    assert math.isnan(companion.crossover(pd.concat([cpu, gpu.assign(value=1.0)])))


def test_the_cost_is_time_by_price_and_breaks_even_at_the_speedup():
    frame = pd.concat(
        [
            rows("text", {"float32": [36.0, 36.0]}, **HERE),
            rows("text", {"float32": 3.6}, **GPU),
            rows("text", {"float32": 3600.0}, unit="J", **GPU),
        ]
    )
    table = companion.cost_table(frame, {"cpu": 0.1, "gpu": 1.0}).set_index("setting")
    assert table.per_thousand.to_dict() == pytest.approx({"cpu": 1.0, "cuda:tf32=off": 1.0})
    assert table.breaks_even["cuda:tf32=off"] == pytest.approx(10)
    assert table.watt_hours["cuda:tf32=off"] == 1
    assert math.isnan(table.watt_hours["cpu"])
