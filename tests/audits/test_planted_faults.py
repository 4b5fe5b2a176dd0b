"""An audit never says that all is well of a step that is not, nor the other way round.

Here are a part of the sweep of `benchmarks/plant_faults.py` and the cases of `benchmarks/public_cases.py`.
"""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytestmark = pytest.mark.usefixtures("two_threads")
plant_faults, public_cases = map(importlib.import_module, ("plant_faults", "public_cases"))
FAULTS = plant_faults.faults()
SAMPLE = {
    "tanh in layers: NaN",
    "mm of layers in TF32",
    "softer in layers",
    "a temperature in layers",
    "other tensor in layers",
    "a bias without gradient in layers",
    "of a module, backward in layers",
    "one number in layers",
    "reversed labels in layers",
    "running mean",
}


def test_a_fault_whose_cause_is_not_found_is_a_fault():
    report = plant_faults.examined(next(fault for fault in FAULTS if fault.what == "forgotten factor in layers"))
    assert report.kind == "cause not found"
    assert report.faulty


def test_planted_faults_of_ten_kinds_are_found_named_and_placed():
    table = plant_faults.sweep([fault for fault in FAULTS if fault.what in SAMPLE])
    assert set(table.what) == SAMPLE
    assert table[["detected", "kind", "place"]].all(axis=None), table.to_string()


@pytest.mark.slow("an audit for each of some forty faults")
def test_every_planted_fault_is_found_and_nearly_all_are_named_and_placed():
    """Of the benchmark's table a sixth, with each group; its kernels are wrong in six ways, each in another one."""
    some = [fault for number, fault in enumerate(FAULTS) if (number + number // 6) % 6 == 3]
    assert {fault.group for fault in some} == {fault.group for fault in FAULTS}
    assert {fault.what.rpartition(": ")[2] for fault in some} >= set(plant_faults.WRONG)
    table = plant_faults.sweep(some)
    print(plant_faults.rates(table).to_string(float_format="{:.0%}".format))
    missed = table[~table.detected]
    assert missed.empty, f"{missed.what.tolist()}: {missed.report.tolist()}"
    assert table.kind.mean() > 0.95, table[~table.kind].what.tolist()
    assert table.place.mean() > 0.95, table[~table.place].what.tolist()


@pytest.mark.parametrize("network", plant_faults.NETWORKS)
def test_a_right_step_is_never_suspected(network):
    table = plant_faults.right_steps(network, range(2))
    assert set(table.kind) == {"rounding"}, table[table.kind != "rounding"].report.tolist()


LARGE = {"convolution_and_batch_norm", "convolution_on_an_rtx_3090"}
ON_A_CPU = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow("a large step")] * (one.name in LARGE))
    for one in public_cases.CASES
    if one.pairs[1]
]


@pytest.mark.parametrize("one", ON_A_CPU)
def test_the_first_line_answers_what_people_asked(one):
    row = public_cases.examined(one, one.pairs[1])
    assert row["right"], row["text"]
