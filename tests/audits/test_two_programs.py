"""Two programs agree in all results if, and only if, they compute the same function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpulab as gl
from benchmarks.correctness import other_programs, whole_programs
from gpulab.settings import Setting
from tests.audits._helpers import drawn, labels, recorded, seeded

SLOW = pytest.mark.slow("an audit of a whole program")
# The longer programs that are not marked as slow.
DAILY = {
    "accumulated_gradients",
    "distillation",
    "graph_attention",
    "merged_adapters",
    "quantised_training",
}
LONGEST = {"generator_and_discriminator", "meta_learning", "packed_sequences"}
PROGRAMS = [
    *(
        pytest.param(p, id=p.name, marks=[SLOW] * (p.name in LONGEST))
        for p in whole_programs.PROGRAMS
    ),
    *(
        pytest.param(p, id=f"other {p.name}", marks=[SLOW] * (p.name not in DAILY))
        for p in other_programs.PROGRAMS
    ),
]


def of_two(step_a, step_b, setting="cpu"):
    return gl.audit(step_a, step_b, setting=setting, progress=False)


def assert_one_function(report):
    assert report.kind == "rounding", str(report)
    assert not report.faulty
    assert not report.comparison.differing_results
    assert not report.comparison.unpaired_results


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_programs_audit_accepts_a_rewritten_program_and_no_faulty_one(program):
    plain, rewritten, faulty = (
        recorded(program.step(variant)) for variant in ("plain", "rewritten", "faulty")
    )
    right, wrong = gl.audit(plain, rewritten), gl.audit(plain, faulty)
    assert (right.kind, right.faulty) == ("rounding", False), str(right)
    assert "results agree in float64" in right.headline
    assert not right.comparison.differing_results
    assert wrong.kind != "rounding"
    assert wrong.comparison.differing_results or wrong.kind == "reduced precision"


def test_two_programs_audit_is_that_of_their_traces():
    program = next(p for p in whole_programs.PROGRAMS if p.name == "tensor_parallel_network")
    steps = [program.step(variant) for variant in ("plain", "faulty")]
    here, there = of_two(*steps), gl.audit(*map(recorded, steps))
    assert [(f.kind, f.operation, f.line) for f in here.findings] == [
        (f.kind, f.operation, f.line) for f in there.findings
    ]
    assert here.titles == tuple(
        f"cpu (tensor_parallel_network(variant={name}))" for name in ("plain", "faulty")
    )


@pytest.mark.parametrize(
    "setting", ["cpu:emulate=tf32", "cpu:precision=bfloat16", "cpu:autocast=bfloat16"]
)
def test_two_programs_audit_accepts_a_rewritten_program_where_the_setting_rounds(setting):
    program = next(p for p in whole_programs.PROGRAMS if p.name == "decoupled_decay")
    right, wrong = (
        of_two(program.step("plain"), program.step(variant), setting)
        for variant in ("rewritten", "faulty")
    )
    assert (right.kind, right.faulty) == ("reduced precision", False), str(right)
    assert not right.comparison.differing_results
    assert wrong.faulty


# --- small programs -------------------------------------------------------------------------------

MODEL = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
X = drawn(5, 6)


def moved(setting):
    return copy.deepcopy(MODEL).to(setting.device, setting.dtype), X.to(
        setting.device, setting.dtype
    )


def whole(setting: Setting):
    model, x = moved(setting)
    loss = F.cross_entropy(model(x), labels(5))
    loss.backward()
    return loss.detach()


def again(setting: Setting):
    return whole(setting)


@pytest.mark.parametrize("other", [whole, again])
def test_two_programs_audit_of_one_program_twice_is_identical(other):
    report = of_two(whole, other)
    assert_one_function(report)
    assert ": identical to the last bit." in report.headline
    assert "All 5 results agree in float64" in report.headline


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_programs_audit_accepts_checkpointing(use_reentrant):
    def checkpointed(setting):
        model, x = moved(setting)
        first = checkpoint(model[:2], x.requires_grad_(), use_reentrant=use_reentrant)
        loss = F.cross_entropy(model[2](first), labels(5))
        loss.backward()
        return loss.detach()

    def plain(setting):
        model, x = moved(setting)
        loss = F.cross_entropy(model(x.requires_grad_()), labels(5))
        loss.backward()
        return loss.detach()

    report = of_two(plain, checkpointed)
    assert report.kind == "rounding", str(report)
    assert not report.comparison.differing_results
    assert len([result for result in report.comparison.results if result.agrees]) == 6


def in_halves(wrong=1.0):
    """Compute the hidden layer as two layers of half the width, each with its own weights."""

    def step(setting):
        model, x = moved(setting)
        first, last = model[0], model[2]
        weights = [
            [t.detach()[rows].clone().requires_grad_() for t in (first.weight, first.bias)]
            for rows in HALVES
        ]
        columns = [last.weight.detach()[:, rows].clone().requires_grad_() for rows in HALVES]
        parts = [
            torch.tanh(F.linear(x, *of_half)) @ c.T
            for of_half, c in zip(weights, columns, strict=True)
        ]
        loss = F.cross_entropy(parts[0] + wrong * parts[1] + last.bias, labels(5))
        loss.backward()
        return loss.detach()

    return step


HALVES = slice(4), slice(4, 8)


def test_two_programs_audit_accepts_a_layer_computed_in_halves():
    assert_one_function(of_two(whole, in_halves()))


@pytest.mark.parametrize("wrong", [0.5, 1.001])
def test_two_programs_audit_finds_a_half_of_a_layer_that_counts_otherwise(wrong):
    report = of_two(whole, in_halves(wrong))
    assert report.faulty
    assert "loss" in {result.group for result in report.comparison.differing_results}


def prediction(rows, after, normalised=False):
    """Return a step that predicts one sample, which is alone or selected from a batch."""

    def step(setting):
        model, x = moved(setting)
        layer = (
            nn.BatchNorm1d(6, device=setting.device, dtype=setting.dtype)
            if normalised
            else nn.Identity()
        )
        return model(layer(x[rows]))[after].softmax(-1)

    return step


def test_two_programs_audit_accepts_a_sample_alone_beside_a_batch():
    assert_one_function(of_two(prediction(slice(5), 2), prediction(slice(2, 3), 0)))


def test_two_programs_audit_finds_another_sample_of_the_batch():
    assert of_two(prediction(slice(5), 2), prediction(slice(3, 4), 0)).kind != "rounding"


def test_two_programs_audit_finds_a_sample_that_is_normalized_with_fewer_others():
    pair = prediction(slice(5), 2, normalised=True), prediction(slice(2, 4), 0, normalised=True)
    assert of_two(*pair).faulty


def mean_of(weights):
    """Return a step whose gradient is a weighted sum over parts of the batch."""

    def step(setting):
        model, x = moved(setting)
        for rows, weight in weights:
            (weight * F.cross_entropy(model(x[rows]), labels(5)[rows])).backward()

    return step


def test_two_programs_audit_accepts_a_gradient_summed_over_parts_of_a_batch():
    whole_batch = mean_of([(slice(5), 1.0)])
    assert_one_function(of_two(whole_batch, mean_of([(slice(2), 0.4), (slice(2, 5), 0.6)])))
    assert of_two(whole_batch, mean_of([(slice(2), 0.5), (slice(2, 5), 0.5)])).faulty


def test_two_programs_audit_pairs_parameters_of_other_names():
    """One program uses a network, and the other plain tensors in a different order."""

    def by_hand(setting):
        model, x = moved(setting)
        last, first = (
            [t.detach().clone().requires_grad_() for t in model[n].parameters()] for n in (2, 0)
        )
        hidden = torch.tanh(torch.einsum("nk,hk->nh", x, first[0]) + first[1])
        scores = torch.addmm(last[1], hidden, last[0].T)
        loss = scores.logsumexp(1).mean() - scores.gather(1, labels(5)[:, None]).mean()
        loss.backward()
        return loss.detach()

    assert_one_function(of_two(whole, by_hand))


def test_two_programs_audit_names_a_result_that_one_program_alone_returns():
    def with_more(setting, more):
        loss = whole(setting)
        return {"loss": loss, "double": 2 * loss} | (
            {"norm": X.to(setting.dtype).norm()} if more else {}
        )

    report = of_two(
        lambda setting: with_more(setting, False), lambda setting: with_more(setting, True)
    )
    assert not report.faulty
    assert (
        "1 result has no counterpart to be compared with: the result ['norm']." in report.headline
    )


def scaled_by(number):
    def step(setting):
        model, x = moved(setting)
        loss = (model(x) * number).square().mean()
        loss.backward()
        return loss.detach()

    return step


def test_two_programs_audit_accepts_a_constant_that_is_rounded_to_float32():
    rounded = torch.tensor(0.1, dtype=torch.float32)
    assert_one_function(of_two(scaled_by(0.1), scaled_by(rounded)))
    assert of_two(scaled_by(0.1), scaled_by(1.0001 * rounded)).faulty
