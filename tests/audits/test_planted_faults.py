"""Audits find planted faults and raise no false alarms.

The tests cover a part of the sweep over planted faults, and the public cases of
`benchmarks/correctness/public_cases.py`.
"""

import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gpulab as gl
from benchmarks.correctness import compiled_cases, public_cases
from tests.audits._fault_catalogue import faults
from tests.audits._fault_sweep import right_steps, sweep
from tests.audits._faulty_kernels import under_b
from tests.audits._helpers import NETWORKS, audited, drawn

pytestmark = pytest.mark.usefixtures("two_threads")
FAULTS = faults()


def test_audit_calls_a_fault_whose_cause_is_not_found_a_fault():
    """Two results are swapped, so both sides compute the same values."""

    def step(setting):
        x = drawn(8, 3).to(setting.dtype).requires_grad_()
        results = x.sin().sum(), x.square().sum()
        sum(results).backward()
        return results[::-1] if under_b() else results

    report = audited(step)
    assert (report.kind, report.faulty) == ("cause not found", True)


@pytest.mark.parametrize(
    "start", [3, pytest.param(8, marks=pytest.mark.slow("an audit for each of thirty faults"))]
)
def test_audit_finds_names_and_places_planted_faults(start):
    """Check a sixth of the benchmark's table, in two parts.

    The kernels in this sixth are wrong in six different ways.
    """
    table = sweep(FAULTS[start::11])
    assert table[["detected", "kind", "place"]].all(axis=None), table.to_string()


@pytest.mark.parametrize("network", NETWORKS)
def test_audit_does_not_suspect_a_right_step(network):
    table = right_steps(network, range(2))
    assert set(table.kind) == {"rounding"}, table[table.kind != "rounding"].report.tolist()


LARGE = {"convolution_and_batch_norm", "convolution_on_an_rtx_3090"}
ON_A_CPU = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow("a large step")] * (one.name in LARGE))
    for one in public_cases.CASES
    if one.pairs[1]
]


# Cases whose bounds depend on the processor's kernels, because rounding errors are magnified, or
# because the result with the largest error varies.
LOOSE = {
    "one_row_alone_minus_the_same_in_a_batch",
    "batch_norm_of_two",
    "decoder_in_another_environment",
    "fused_adam",
}
# Cases whose findings depend on them as well, because different numbers are drawn each time, or
# because shares are nearly equal.
ELSEWHERE = {
    "noise_of_numpy",
    "decoder_in_bfloat16",
    "attention_of_a_tutorial",
    "small_gpt",
    *LARGE,
}


DIFFERENCE = re.compile(
    r"(?P<sentence>.*? differs by (?P<size>\S+) \(relative\)); rounding alone explains"
    r" (?P<explained>\S+)\. "
)


def independent_of_the_processor(line):
    """Return the first line of a report without rounding errors of this processor's kernels.

    They decide how much rounding alone explains. If a difference is no larger than that, they also
    decide whether results differ at all, and in which result the difference is largest.
    """
    found = DIFFERENCE.match(line)
    if found is None:
        return line
    rest = line[found.end() :]
    if float(found["size"]) <= float(found["explained"]):
        return rest
    return f"{found['sentence']}. {rest}"


@pytest.mark.parametrize("one", ON_A_CPU)
def test_audit_of_a_public_case_names_the_cause_and_is_as_recorded(one, as_recorded):
    report = gl.audit(one.step(), *one.pairs[1], progress=False)
    first = report.findings[0]
    assert first.kind == one.kind, report
    assert re.search(one.operation, first.operation), report
    lines = [independent_of_the_processor(str(report).partition("\n")[0].partition(". ")[2])]
    lines += [
        f"{found.kind}: {found.operation} ({found.phase}) in {found.module}, share"
        f" {found.share:.2g}; {found.detail}"
        for found in report.findings
        if found.kind != "rounding"
    ]
    said = "{0.operation} ({0.phase}): {0.kind}" + " {0.bound_a:.4g} {0.bound_b:.4g}" * (
        one.name not in LOOSE
    )
    lines += [said.format(row) for row in report.table.itertuples()]
    # the processor's kernels decide which valid answer is found
    if one.name not in ELSEWHERE and one.kind != "another valid answer":
        as_recorded(one.name, lines, "torch", rtol=0.05)


# --- programs that are drawn, and changed in one place --------------------------------------------

OPERATIONS = {
    "t": lambda x, y: x.t(),  # noqa: ARG005
    "flip": lambda x, y: x.flip(0),  # noqa: ARG005
    "tanh": lambda x, y: x.tanh(),  # noqa: ARG005
    "softmax": lambda x, y: x.softmax(-1),  # noqa: ARG005
    "layer_norm": lambda x, y: torch.nn.functional.layer_norm(x, y.shape[1:]),
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "mm": torch.mm,
    "exchanged": lambda x, y: y @ x,
}
NAMES = st.sampled_from([*OPERATIONS])


def run_program(program, setting):
    x, y = (drawn(8, 8, seed=seed).to(setting.dtype).requires_grad_() for seed in range(2))
    for name in program:
        x = OPERATIONS[name](x, y)
    loss = x.square().mean()
    loss.backward()
    return loss


def audit_of_changed_program(program, changed):
    return audited(lambda setting: run_program(changed if under_b() else program, setting))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(NAMES, min_size=3, max_size=9), st.integers(0, 8), NAMES)
def test_audit_never_calls_a_program_right_that_computes_something_else(program, place, other):
    changed = [*program]
    changed[place % len(program)] = other
    exact = gl.Setting.parse("cpu:precision=float64")
    before, after = (float(run_program(p, exact).detach()) for p in (program, changed))
    assume(abs(after - before) > 1e-3 * abs(before))
    assert audit_of_changed_program(program, changed).faulty


def test_audit_never_calls_a_program_right_that_normalizes_twice():
    assert audit_of_changed_program(
        ["t", "layer_norm", "tanh"], ["t", "layer_norm", "layer_norm"]
    ).faulty


def test_audit_is_not_misled_by_a_value_that_is_computed_again_later():
    """A weight that is transposed twice is recreated by an operation after the one that used it."""
    (case,) = (one for one in compiled_cases.CASES if one.name == "weights_read_as_if_contiguous")
    assert gl.audit(case.step(), *case.pairs[1], progress=False).faulty
