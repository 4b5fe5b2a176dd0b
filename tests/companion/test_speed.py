import math
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pandas as pd
import pytest
import torch

import companion
import gpulab as gl
from companion import speed, workloads
from companion.benchmarks import benchmark
from gpulab.errors import GpulabError, UsageError
from gpulab.store import records

boosted_trees, texts = benchmark("boosted_trees"), benchmark("text_classifier")
CPU = "cpu:threads=1"
SETTINGS = [CPU, *(each for each in gl.available_settings() if each in ("cuda:tf32=off", "mps", "xpu"))]
ROOT = Path(__file__).parents[2]
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
    return {part: companion.measure_speed(part, [CPU], "smoke") for part in ("step", "memory", "text")}


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
    parts = measured["memory"].pivot_table("value", "way", "unit")
    assert parts.MB["4 parts"] < parts.MB["2 parts"] < parts.MB["1 part"]
    assert parts["off the gradient"].max() < 1e-5
    judged = companion.precision_verdict(measured["text"])
    assert judged.reference == "float32"
    assert (judged.table.seeds == texts.SEEDS).all()


def test_the_classifier_learns_and_a_seed_repeats_itself():
    setting, some = gl.Setting.parse(CPU), texts.split("docstrings", 16)

    def training(seed, precision="float32"):
        return {unit: value for value, unit in texts.trained(setting, "smoke", some, precision, seed)}

    with setting.apply():
        once, again, other, rounded = training(0), training(0), training(1), training(0, "bfloat16")
    assert once["loss"] == again["loss"]
    assert once["loss"] not in (other["loss"], rounded["loss"])
    assert rounded["loss"] == pytest.approx(once["loss"], rel=1e-2)
    assert once["accuracy"] > 1.2 * float((some[3] == some[1].mode().values).float().mean())


def test_texts_held_out_are_not_trained_on_and_words_are_numbered_alike_whatever_their_case():
    whole, packages = texts.docstrings()
    assert len(whole) > 1000
    assert set(packages) == set(texts.PACKAGES)
    words, labels, held_words, held_labels = texts.split("docstrings", 400)
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


def test_what_cannot_be_had_here_is_said_in_a_sentence(monkeypatch):
    import sklearn.datasets

    def offline(**_):
        raise URLError("no route to host")

    monkeypatch.setattr(sklearn.datasets, "fetch_20newsgroups", offline)
    with pytest.raises(GpulabError, match="20 Newsgroups cannot be had here"):
        texts.newsgroups()
    monkeypatch.setitem(sys.modules, "xgboost", None)
    (row,) = boosted_trees.trees(gl.Setting.parse(CPU), "smoke")
    assert row.value is None
    assert "gpulab[trees]" in row.note
    seconds = iter([1.0, 1.5, 50.0])
    monkeypatch.setattr(texts, "timed", lambda *_: (next(seconds), 0.0))
    found = texts.precisions(gl.Setting.parse(CPU))
    assert found["bfloat16"] == ""
    assert "50 times" in found["float16"], "a format that the device is slow in"
    assert "Ampere" in found["tf32"]
    for asked, named in (
        (lambda: companion.measure_speed("flops"), "'flops', 'quick': expected one of step"),
        (lambda: companion.measure_speed("step", size="huge"), "'huge'"),
        (lambda: companion.workload("VGG"), "'VGG'"),
        (lambda: companion.cost_table(pd.DataFrame(), {"cpu": 0.1, "gpu": 0}), "expected a price above 0"),
    ):
        with pytest.raises(UsageError, match=named):
            asked()


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


def test_backends_are_told_apart_by_the_passport():
    card = {"kind": "cuda", "name": "a card", "compute_capability": "9.0"}
    software = {"cuda": "13.0", "rocm": None}
    found = companion.backends({"gpus": [card], "software": software}).set_index("backend").devices
    assert found.to_dict() == dict.fromkeys(["ROCm", "Metal", "XPU"], "none here") | {"CUDA": "a card, capability 9.0"}
    amd = {"gpus": [card, {"kind": "xpu", "name": "another"}], "software": {"cuda": None, "rocm": "6.4"}}
    found = companion.backends(amd).set_index("backend").devices
    assert found["CUDA"] == "none here"
    assert (found["ROCm"], found["XPU"]) == ("a card, capability 9.0", "another")


def test_the_finding_names_what_was_recorded_and_what_was_claimed(measured):
    here = pd.concat(measured.values())
    ((place, _),) = alone = companion.speed_finding(here).sentences()
    assert place == "On this CPU"
    assert companion.speed_finding(here.assign(setting="mps")).parts[0][0] == "On this GPU"
    recorded = rows("text", {"float32": 100.0}, **{**HERE, "recorded": True})
    both = companion.speed_finding(pd.concat([here, recorded, rows("text", {"float32": 20.0}, **GPU)]))
    assert both.sentences()[:1] == alone
    (claim,) = dict(both.sentences())["What was claimed, recorded on a GPU"]
    assert claim.startswith("Text classification is faster on a GPU: yes, 5× (quick size). Claimed: 198.2 s")


def test_figures_say_the_numbers_of_their_tables(monkeypatch):
    times = [{"setting": "cuda", "size": "paper", "what": "convolutions", "ms": 3}]
    times.append(times[0] | {"what": "copies", "ms": 1})
    with monkeypatch.context() as patch:
        patch.setattr(records, "read_measured", lambda _: [{"machine": "a GPU", "rows": times}])
        picture = companion.kernels()
    assert "75% to 75%" in picture.alt
    assert {text.get_text() for text in picture.figure.axes[0].texts} == {"75%", "25%", "4 ms"}
    phases = rows("step", {"forward": 1.0, "backward": 2.0, "update": 1.0}, **HERE)
    assert "Backpropagation takes 50% to 50% of a step" in companion.shares(phases).alt
    trained = rows("text", {"float32": [2.0, 2.0], "bfloat16": 1.0}, **GPU)
    assert "The most gained: bfloat16 on a GPU, 2.00 times as fast" in companion.ladder(trained).alt
    widths = {"16": 1.0, "64": 2.0, "256": 4.0}
    small = pd.concat([rows("small", widths, **HERE), rows("small", dict.fromkeys(widths, 2.0), **GPU)])
    assert "up to a width of about 64" in companion.small_work(small).alt
    on_gpu = gl.device.recorded_rooflines().query("setting == 'cuda:tf32=off'")
    on_cpu = on_gpu.assign(setting="cpu", gflops=on_gpu.gflops / 2)
    assert "At an edge of 16 a GPU has overtaken the CPU" in companion.scaling(pd.concat([on_cpu, on_gpu])).alt


@pytest.mark.slow("starts a process that measures")
def test_a_recording_is_read_as_it_was_measured(tmp_path, monkeypatch):
    file = tmp_path / "measured" / "speed-here.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "record.py"), "speed", CPU, "--sizes", "smoke"]
    done = subprocess.run(
        [*script, "--parts", "small", "--parts", "transfer", "--write", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(records, "DATA", tmp_path)
    found = companion.recorded_speed()
    assert found.recorded.all()
    assert found.way[found.part == "small"].tolist() == list(map(str, workloads.WIDTHS["smoke"]))
    assert (found.value[found.part == "small"] > 0).all()
    assert found.note[found.part == "transfer"].str.contains("nothing to move").all()
    assert records.read_json(file)["cores_of_others"].keys() == {"smoke small", "smoke transfer"}


def test_what_is_recorded_is_whole():
    found = companion.recorded_speed()
    assert (found.value.notna() | found.note.fillna("").ne("")).all()
    assert set(found.part) <= set(workloads.PARTS)
    assert not found.duplicated(["part", "what", "way", "unit", "seed", "size", "setting", "machine"]).any()
