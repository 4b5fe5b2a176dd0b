"""Match values of two executions: equal, transposed, permuted, or parts of each other."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpulab as gl
from gpulab.audits._comparison import Comparison
from gpulab.audits._graphs import Graph
from gpulab.audits._matching import Matches, PartSearch, is_same_value, is_transposed, tolerance_of
from gpulab.audits._traces import Operation, Trace
from gpulab.audits._values import Slabs, Value
from tests.audits._helpers import drawn, labels, recorded, seeded


def value_of(tensor):
    """Return the value of exact numbers, which are their own reference."""
    return Value.of(tensor.float(), tensor, exact=True)


def exactly(value):  # noqa: ARG001
    return 1e-10


def numbers(*shape, seed=0):
    return drawn(*shape, seed=seed).double()


# --- the same -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (7, 9), (200, 300)])
def test_is_same_value_compares_to_ten_digits(shape):
    x = numbers(*shape)
    value = value_of(x)
    assert is_same_value(value, value_of(x * (1 + 1e-12)), exactly)
    assert is_same_value(value, value_of(x.view(-1)), exactly), "another shape"
    assert not is_same_value(value, value_of(x * (1 + 1e-8)), exactly)
    assert not is_same_value(value, value_of(x.flip(0)), exactly)
    one_apart = x.clone()
    one_apart.view(-1)[1] += 1e-3
    assert not is_same_value(value, value_of(one_apart), exactly)


def test_is_same_value_refuses_other_sizes():
    """The sketches of the values have the same size."""
    assert not is_same_value(
        value_of(torch.zeros(100).double()), value_of(torch.zeros(101).double()), exactly
    )
    assert not is_same_value(
        value_of(torch.ones(3).double()), value_of(torch.ones(1).double()), exactly
    )


def test_is_same_value_is_false_without_a_reference():
    value = Value.as_recorded(torch.ones(3), stands_in=False, slabs=Slabs())
    assert not is_same_value(value, value, exactly)


@pytest.mark.parametrize("count", [10, 5000])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_is_same_value_accepts_nan_and_infinity_in_the_same_places(count, special):
    x = numbers(count)
    x[3] = special
    assert is_same_value(value_of(x), value_of(x.clone()), exactly)
    other = x.clone()
    other[5] += 1
    assert not is_same_value(value_of(x), value_of(other), exactly)


@pytest.mark.parametrize(
    ("here", "there"),
    [(math.inf, -math.inf), (math.nan, math.inf), (math.inf, 1.0), (math.nan, 1.0)],
)
def test_is_same_value_refuses_other_nonfinite_numbers(here, there):
    x, y = numbers(10), numbers(10)
    x[3], y[3] = here, there
    assert not is_same_value(value_of(x), value_of(y), exactly)


@pytest.mark.parametrize("size", [1e-40, 1e-150, 1e150])
def test_is_same_value_compares_very_small_and_very_large_values_by_their_size(size):
    x = numbers(7)
    assert is_same_value(value_of(x * size), value_of(x * size), exactly)
    assert not is_same_value(value_of(x * size), value_of(1.001 * x * size), exactly)


# --- in another order -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_is_transposed_recognizes_dimensions_in_another_order(order):
    x = numbers(5, 6, 7)
    assert is_transposed(value_of(x), value_of(x.permute(order).contiguous()), exactly) is True
    assert is_transposed(value_of(x), value_of(x.flip(1).permute(order)), exactly) is False


def test_is_transposed_refuses_rows_in_another_order():
    x = numbers(5, 6)
    assert is_transposed(value_of(x), value_of(x[[1, 0, 2, 3, 4]]), exactly) is False


def test_is_transposed_is_unknown_without_a_common_dimension():
    x = numbers(6)
    assert is_transposed(value_of(x), value_of(x.view(2, 3)), exactly) is None


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_part_search_contains_slices_and_no_other_numbers(dim):
    x = numbers(5, 6, 7)
    part = x.narrow(dim, 1, 3)
    assert PartSearch([value_of(x)], exactly).contains(value_of(part))
    assert PartSearch([value_of(x)], exactly).contains(value_of(x.select(dim, 4)))
    assert not PartSearch([value_of(x)], exactly).contains(value_of(1.001 * part))
    assert not PartSearch([value_of(x)], exactly).contains(value_of(x)), "the whole is not a part"
    assert not PartSearch([value_of(x)], exactly).contains(value_of(numbers(*part.shape, seed=1)))


def test_part_search_covers_a_value_if_no_slice_is_missing():
    x = numbers(6, 8)
    parts = [value_of(part) for part in (x[:2], x[2:3], x[3:])]
    assert PartSearch(parts, exactly).covers(value_of(x))
    assert PartSearch([value_of(part) for part in x.split(3, 1)], exactly).covers(value_of(x))
    assert not PartSearch(parts[1:], exactly).covers(value_of(x))
    assert not PartSearch([*parts[1:], value_of(1.001 * x[:2])], exactly).covers(value_of(x))


def test_part_search_needs_no_cover_for_zeros():
    x = numbers(6, 8)
    x[4:] = 0
    assert PartSearch([value_of(x[:4])], exactly).covers(value_of(x))


def test_part_search_covers_nothing_by_constants():
    """Many slices have the same sum as a few equal numbers."""
    x = torch.ones(6, 8).double()
    assert not PartSearch([value_of(x[:3])], exactly).covers(value_of(x))


# --- what a value says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "says_little"),
    [
        (torch.ones(5), True),
        (torch.zeros(5), True),
        (torch.tensor(3.0), True),
        (torch.tensor(math.inf), True),
        (torch.tensor(0.3), False),
        (drawn(5), False),
        (torch.arange(5.0), False),
        (torch.ones(5, dtype=torch.bool), True),
        (torch.tensor([True, False, True]), True),
    ],
)
def test_value_is_uninformative_if_constant(tensor, says_little):
    value = Value.of(tensor, tensor.double() if tensor.is_floating_point() else tensor, exact=True)
    assert value.is_uninformative == says_little


def test_value_is_uninformative_if_it_consists_of_roundings():
    value = Value.of(drawn(5).mul(1e-8), drawn(5, seed=1).double().mul(1e-17), exact=True)
    assert value.is_pure_rounding
    assert value.is_uninformative


# --- two executions -------------------------------------------------------------------------------


def trace_of(*tensors):
    """Return a trace of consecutive operations, each of which uses the previous result."""
    values = {str(number): value_of(tensor) for number, tensor in enumerate(tensors)}
    names = list(values)
    operations = [
        Operation("exp", "forward", "", "", [given], [made], values[made].shape, "float32")
        for given, made in itertools.pairwise(names)
    ]
    return Trace("cpu", operations, values)


def matched(first, second):
    graphs = Graph(trace_of(*first)), Graph(trace_of(*second))
    return graphs, Matches(graphs, exactly)


def test_matches_find_equal_transposed_and_rearranged_values():
    x, y, z = numbers(4, 5), numbers(6, 7, seed=1), numbers(8, 9, seed=2)
    graphs, matches = matched([x, y, z], [z.flip(0), y.T.contiguous(), x])
    (x_a, y_a, z_a), (z_b, y_b, x_b) = ([*graph.trace.values.values()] for graph in graphs)
    assert matches.equal == {x_a: [x_b], x_b: [x_a]}
    assert matches.matched_values == {x_a, x_b, y_a, y_b}
    assert matches.permuted_values == {z_a, z_b}


def test_matches_find_parts_when_they_are_asked_to():
    x, y = numbers(8, 5), numbers(3, 3, seed=1)
    graphs, matches = matched([x, y], [x[:3], x[3:], numbers(3, 3, seed=2)])
    assert not matches.matched_values
    matches.match_parts()
    (x_a, _), (upper, lower, _) = ([*graph.trace.values.values()] for graph in graphs)
    assert matches.matched_values == {x_a, upper, lower}


def test_matches_find_several_values_that_are_one():
    x = numbers(4, 5)
    graphs, matches = matched([x, x + 1, x], [x, numbers(2)])
    x_a, _, again = graphs[0].trace.values.values()
    x_b, _ = graphs[1].trace.values.values()
    assert matches.equal[x_b] == [x_a, again]


def test_tolerance_of_a_difference_follows_the_digits_that_subtraction_left():
    """Two computations of the same value also differ in float64, by more than ten digits allow."""

    def near(setting):
        x = drawn(4, 5).to(setting.dtype)
        return {
            "one way": (x + 1e7) - 1e7,
            "another way": (x - 1e8) + 1e8,
            "a third way": 1.001 * ((x - 1e7) + 1e7),
        }

    trace = recorded(near)
    third, second, first = (
        trace.values[op.outputs[0]] for op in trace.operations if op.phase == "result"
    )
    tolerance = tolerance_of(Graph(trace), {})
    assert is_same_value(first, second, tolerance)
    assert not is_same_value(first, second, exactly)
    assert not is_same_value(first, third, tolerance)


# --- gradients that are zero but for rounding -----------------------------------------------------

LAYERS = seeded(
    lambda: nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Tanh(), nn.Linear(8, 3)
    )
)


def before_normalisation(has_bias, wrong=0.0):
    """Return a step with or without a bias before a normalisation.

    The bias has no effect: its gradient consists of rounding errors, or does not exist.
    """

    def step(setting):
        model, x = copy.deepcopy(LAYERS).to(setting.dtype), drawn(12, 6).to(setting.dtype)
        first = model[0]
        h = first(x) if has_bias else x @ first.weight.T
        loss = F.cross_entropy(model[1:](h + wrong * x.sum(1, keepdim=True)), labels(12))
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("setting", ["cpu", "cpu:emulate=tf32", "cpu:precision=bfloat16"])
def test_audit_accepts_a_missing_bias_before_a_normalization(setting):
    report = gl.audit(
        before_normalisation(True), before_normalisation(False), setting=setting, progress=False
    )
    assert "mismatch" not in {finding.kind for finding in report.findings}, str(report)
    assert not report.faulty


def test_audit_accepts_other_roundings_in_a_gradient_that_is_zero():
    """A normalisation by a kernel and by a formula; the gradient of the preceding bias is zero."""

    def by_formula(setting):
        model, x = copy.deepcopy(LAYERS).to(setting.dtype), drawn(12, 6).to(setting.dtype)
        h = model[0](x)
        h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt() * model[1].weight + model[
            1
        ].bias
        loss = F.cross_entropy(model[2:](h), labels(12))
        loss.backward()
        return loss.detach()

    report = gl.audit(before_normalisation(True), by_formula, setting="cpu", progress=False)
    gradients = [r for r in report.comparison.results if r.group == "gradient"]
    (of_bias,) = (r for r in gradients if report.comparison.values(r.a)[0].is_pure_rounding)
    assert of_bias.gap > 1e-3, "the rounding errors differ"
    assert of_bias.agrees
    assert report.kind == "rounding", str(report)


def test_audit_finds_a_wrong_layer_before_a_normalization():
    report = gl.audit(
        before_normalisation(True), before_normalisation(False, 0.1), setting="cpu", progress=False
    )
    assert report.faulty


def zeros_or_roundings(zeros):
    """Return a step with a gradient that is exactly zero or consists of rounding errors."""

    def step(setting):
        x, w = drawn(5, 7).to(setting.dtype), drawn(7, seed=1).to(setting.dtype).requires_grad_()
        y = (x * w).softmax(1).sum()
        loss = (0 * w.sum() + 5.0 if zeros else y) + (x @ w.detach()).sum()
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("setting", ["cpu", "cpu:precision=bfloat16"])
def test_comparison_accepts_zero_gradients_beside_gradients_of_roundings(setting):
    traces = [recorded(zeros_or_roundings(zeros), setting) for zeros in (True, False)]
    (gradient,) = (result for result in Comparison(*traces).results if result.group == "gradient")
    assert gradient.agrees
    assert not gl.audit(*traces).faulty


def test_comparison_refuses_zero_gradients_beside_small_ones():
    def small(setting):
        x, w = drawn(5, 7).to(setting.dtype), drawn(7, seed=1).to(setting.dtype).requires_grad_()
        loss = 1e-6 * (x * w).square().sum() + (x @ w.detach()).sum()
        loss.backward()
        return loss.detach()

    report = gl.audit(zeros_or_roundings(True), small, setting="cpu", progress=False)
    assert "gradient" in {result.group for result in report.comparison.differing_results}
    assert report.faulty


def test_comparison_of_two_orders_of_one_program_agrees_to_ten_digits():
    """In float32 the recorded numbers differ a million times as much."""

    def step(setting):
        model, x = copy.deepcopy(LAYERS).to(setting.dtype), drawn(12, 6).to(setting.dtype)
        model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    comparison = Comparison(recorded(step), recorded(step, "cpu:emulate=tf32"))
    gradients = [r for r in comparison.results if r.group == "gradient"]
    sound = [r for r in gradients if not comparison.values(r.a)[0].is_pure_rounding]
    assert len(sound) == 5
    assert all(r.agrees and r.gap < 1e-12 < 1e-6 < comparison.recorded_gap(r) for r in sound)
    assert np.isfinite([r.gap for r in sound]).all()
