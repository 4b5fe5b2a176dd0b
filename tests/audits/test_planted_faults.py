"""An audit never says that all is well of a step that is not, nor the other way round.

Here are a part of the sweep of `benchmarks/plant_faults.py` and the cases of `benchmarks/public_cases.py`.
"""

import contextlib
import importlib
import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import gpulab as gl

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytestmark = pytest.mark.usefixtures("two_threads")
MODULES = ("plant_faults", "public_cases", "compiled_cases")
plant_faults, public_cases, compiled_cases = map(importlib.import_module, MODULES)
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


# --- programs that are drawn, and changed in one place ------------------------------------------------------

OF_ONE = {
    "t": torch.t,
    "flip": lambda x: x.flip(0),
    "neg": torch.neg,
    "tanh": torch.tanh,
    "clone": torch.clone,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (8,)),
}
OF_TWO = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "mm": torch.mm}


def drawn_program(rng):
    """Operations by name, each with the numbers of the values that it is given."""
    program = []
    for count in range(2, 2 + rng.randint(3, 9)):
        name = rng.choice([*OF_ONE, *OF_TWO])
        program.append((name, *(rng.randrange(count) for _ in range(1 + (name in OF_TWO)))))
    return program


def changed(rng, program):
    """The program with one operation that is another, is left out, has its inputs exchanged, or is transposed."""
    place = rng.randrange(len(program))
    name, *inputs = program[place]
    other = rng.choice([*(OF_TWO if name in OF_TWO else OF_ONE)])
    choices = [(other, *inputs), ("same", inputs[0]), (name, *reversed(inputs)), (f"{name} transposed", *inputs)]
    return [*program[:place], rng.choice(choices), *program[place + 1 :]]


def run_program(program, setting):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(8, 8, generator=generator).to(setting.dtype).requires_grad_() for _ in range(2)]
    for text, *inputs in program:
        name, _, transposed = text.partition(" ")
        given = [values[number] for number in inputs]
        value = given[0] if name == "same" else (OF_ONE | OF_TWO)[name](*given)
        values.append(value.t() if transposed else value)
    loss = values[-1].square().mean()
    if loss.requires_grad:
        loss.backward()
    return loss


def test_program_that_computes_something_else_is_never_called_right():
    audited = 0
    for seed in range(120):
        rng = random.Random(seed)
        program = drawn_program(rng)
        other = changed(rng, program)
        exact = gl.Setting.parse("cpu:precision=float64")
        before, after = (float(run_program(p, exact).detach()) for p in (program, other))
        if abs(after - before) <= 1e-3 * abs(before):
            continue
        step = partial(
            lambda one, two, setting: run_program(two if setting.threads == 1 else one, setting), program, other
        )
        with contextlib.suppress(gl.DataError):  # of different steps, which is an answer, too
            audited += 1
            assert gl.audit(step, "cpu:threads=2", "cpu:threads=1", progress=False).faulty, (program, other)
    assert audited > 25


def test_value_that_is_made_again_later_explains_nothing():
    """Transposed twice, a weight is made anew by an operation after the one that was given it."""
    (case,) = (one for one in compiled_cases.CASES if one.name == "weights_read_as_if_contiguous")
    assert gl.audit(case.step(), *case.pairs[1], progress=False).faulty
