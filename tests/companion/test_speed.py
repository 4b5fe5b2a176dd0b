import math

import pandas as pd
import pytest
import torch

import companion
from companion import speed, workloads
from companion.benchmarks import benchmark
from gpulab.store.recorded import read_measured, recorded_table
from gpulab.wording import setting_words

boosted_trees, texts = benchmark("speed/boosted_trees"), benchmark("speed/text_classifier")
CPU = "cpu:threads=1"
TREES = "gradient-boosted trees are faster on GPUs"
GPU = {"setting": "cuda:tf32=off", "machine": "a GPU", "recorded": True}
HERE = {"setting": "cpu", "machine": "this machine", "recorded": False}


def rows(part, values, unit="s", size="quick", note="", **where):
    """Make a table with a row for each way and value; a list has one value per seed."""
    found = []
    for way, some in values.items():
        for seed, value in enumerate(some) if isinstance(some, list) else [(None, some)]:
            row = {
                "part": part,
                "way": way,
                "value": value,
                "unit": unit,
                "seed": seed,
                "note": note,
                "size": size,
            }
            found.append(row | where | {"where": where["machine"]})
    return pd.DataFrame(found)


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.slow("trains networks, also in other libraries")
@pytest.mark.parametrize("part", workloads.PARTS)
def test_measure_speed_gives_numbers_or_says_why_not(part):
    # JAX chooses its number of threads once per process, and other tests share this process.
    setting = "cpu" if part == "libraries" else "cpu:threads=2"
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    frame = companion.measure_speed(part, [setting], "smoke")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert set(frame.setting) == {setting}
    assert (frame.value.notna() ^ frame.note.ne("")).all()
    assert not frame.note.str.contains("failed").any()


def test_texts_split_holds_texts_out_and_numbers_words_whatever_their_case():
    whole, packages = texts.docstrings()
    assert set(packages) == set(texts.PACKAGES)
    words, labels, held_words, held_labels = texts.split(400)
    assert len(words) + len(held_words) == len(whole)
    assert len(held_words) == len(held_labels) == math.ceil(len(whole) / 5)
    assert labels.unique().tolist() == list(range(len(texts.PACKAGES)))
    numbers = texts.as_words(["Return THE value", "return the value, the", ""], 3)
    assert torch.equal(numbers[0], numbers[1])
    assert (numbers[:, 0] > 0).all()
    assert numbers[2, 1:].tolist() == [0, 0], "an empty text counts as one word"


# --- what is concluded from it --------------------------------------------------------------------


def test_speed_claims_are_ratios_of_medians_here_before_recorded():
    frame = pd.concat(
        [
            rows("text", {"float32": [10.0, 30.0, 20.0, 20.0, 20.0, 20.0]}, **HERE),
            rows("text", {"float32": 999.0}, **{**HERE, "recorded": True}),
            rows(
                "text",
                {"float32": [1.0, 3.0, 2.0, 2.0, 2.0, 2.0], "float32, compiled": [0.1]},
                **GPU,
            ),
            rows("text", {"bfloat16": [1.0, 1.0, 1.0, 1.0, 1.0, 3.0]}, **GPU),
            rows("inference", {"1 core": 50.0, "2 cores": 80.0}, unit="images/s", **HERE),
            rows("inference", {"1 device": 800.0, "2 devices": 1600.0}, unit="images/s", **GPU),
            rows("trees", {"": math.nan}, unit="", note="XGBoost is not installed", **GPU),
        ]
    )
    table = companion.claims_table(frame).set_index("claim")
    said = table.measured + ": " + table.answer
    assert said["text classification is faster on a GPU"] == "10× (in 6 of 6 seeds): yes"
    assert said["GPUs serve faster"] == "20×: yes"
    assert (
        said["tensor cores train faster in mixed precision"] == "2× (in 4 of 6 seeds): not decided"
    )
    compiled = table.loc["compilation makes training faster"]
    assert compiled.answer == "not decided"
    assert compiled.measured.startswith("20× (1 of the 6 seeds")
    trees = table.loc[TREES]
    assert trees.answer == "not measured"
    assert (trees["from"], trees.to) == (
        "not measured on a CPU",
        "not measured on a GPU: XGBoost is not installed",
    )
    assert len(companion.claims_table(frame, "paper")) == len(speed.CLAIMS)


@pytest.mark.parametrize("size", ["quick", "paper"])
def test_claim_about_trees_is_answered_from_records_at_both_sizes(size):
    """A note in an older record that XGBoost was not installed hides no later measurement."""
    frame = recorded_table("speed")
    frame = frame.assign(where=frame.machine + ", " + frame.setting)
    timed = frame[(frame.part == "trees") & frame.value.notna() & (frame["size"] == size)]
    on_gpu = speed.on_gpu(timed)
    cpu, gpu = (timed[side].sort_values("value").iloc[0] for side in (~on_gpu, on_gpu))
    assert timed[on_gpu].groupby("where").size().tolist() == [1], "no measurement is shown twice"
    assert (frame.machine[frame.part == "trees"] == gpu.machine).sum() > 2, "with older records"
    trees = companion.claims_table(frame, size).set_index("claim").loc[TREES]
    assert trees.answer == ("yes" if gpu.value < cpu.value else "no")
    assert trees.measured == f"{cpu.value / gpu.value:.3g}×"
    assert trees["from"].endswith(f"fifty trees: {cpu['where']}")
    assert trees.to.endswith(f"fifty trees: {gpu['where']}")
    assert "16" in cpu.setting, "the fastest CPU is the one with 16 threads"


def test_claimed_costs_repeat_the_claimed_numbers_and_their_ratio():
    costs = speed.claimed_costs()
    on_gpu = costs[costs.setting == "gpu"].set_index("where")
    assert len(on_gpu) == sum("×" in claim.claimed for claim in speed.CLAIMS)
    timed = on_gpu.dropna()
    on_cpu = costs[costs.setting == "cpu"]["time, s"]
    ratios = on_cpu.to_numpy() / timed["time, s"]
    assert ratios.tolist() == pytest.approx(timed["breaks even at"].tolist(), rel=1e-3)


def test_recorded_conditions_state_load_and_disagreeing_rounds(monkeypatch):
    cpu = {"cpu": {"logical_cores": 4}}
    timings = [
        {"part": part, "value": value, "spread": spread, "size": "quick", "setting": "cpu"}
        for part, value, spread in [("step", 1.0, 0.3), ("trees", 2.0, 0.1), ("transfer", None, 0)]
    ]
    # No other program ran during `transfer`, but nothing was measured there.
    loads = {"quick step": 3.3, "quick trees": 1.4, "quick transfer": 0.0}
    rates = [{"setting": "cpu", "per_second": 10.0, "quartiles": [9.0, 12.0]}]
    documents = {
        "speed": [{"machine": "M", "passport": cpu, "cores_of_others": loads, "rows": timings}],
        "autoencoder": [{"machine": "M", "passport": cpu, "rows": rates}],
        "kernels": [
            {
                "machine": "M",
                "passport": cpu,
                "rows": [{"setting": "cuda", "size": "kitti", "ms": 1}],
            }
        ],
    }
    monkeypatch.setattr(speed, "read_measured", lambda kind: documents.get(kind, []))
    table = speed.recorded_conditions()
    assert table.to_numpy().tolist() == [
        ["step, trees", "1.4 to 3.3 of 4", "1 of 2"],
        ["autoencoder", "not recorded", "1 of 1"],
        ["kernels", "not recorded", "not recorded"],
    ]


def test_recorded_conditions_list_trees_and_the_strongest_implementations():
    table = speed.recorded_conditions()["what was measured"]
    for part, documents in (
        ("peers", read_measured("peers")),
        (
            "trees",
            [d for d in read_measured("speed") if {r["part"] for r in d["rows"]} == {"trees"}],
        ),
    ):
        for document in documents:
            for row in document["rows"]:
                where = f"{document['machine']}, {setting_words(row['setting'])} (recorded)"
                listed = table.loc[[(where, row.get("size", "quick"))]]
                assert listed.str.contains(rf"\b{part}\b").any()


@pytest.mark.parametrize(("seconds", "words"), [(2.0, "in 2 s here"), (math.nan, "too busy")])
def test_speed_finding_says_so_if_the_training_time_was_withheld(seconds, words):
    steps = pd.DataFrame([{"what": "LSTM", "forward": 1.0, "backward": 1.0, "update": 2.0} | HERE])
    updates = pd.DataFrame([{"width": 16, "seconds": 1.0} | HERE])
    text = [
        rows("text", {"float32": seconds}, **HERE),
        rows("text", {"float32": 0.9, "most frequent class": 0.2}, unit="accuracy", **HERE),
    ]
    found = speed.speed_finding(steps, updates, pd.concat(text))
    assert words in " ".join(found.numbers)
    assert "90%" in " ".join(found.numbers)
