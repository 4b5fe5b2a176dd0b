import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.checkpoint import checkpoint

import gpulab as gl
from gpulab.audits._comparison import differing_arguments as differing
from gpulab.audits._count_sketch import BLOCK_SIZE, shrinking_factors, sketch
from gpulab.audits._tracer import _is_random
from gpulab.audits._traces import RESULT, Operation, align_operations
from tests.audits._helpers import Own, drawn, recorded, seeded


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2)

    def forward(self, x):
        y = self.first(x)
        return torch.relu(y)  # the line


def tiny_step():
    return gl.Step(seeded(Tiny), (drawn(4, 3), drawn(4, 2)), F.mse_loss)


def operation_phrase(trace, name, phase="forward"):
    return [op for op in trace.operations if (op.name, op.phase) == (name, phase)]


def values(trace, name):
    return trace.values[name].sketch


# --- what is noted --------------------------------------------------------------------------------


def test_record_of_a_tiny_step_is_as_computed_by_hand():
    step = tiny_step()
    trace = recorded(step)
    (inputs, targets), weight, bias = (
        step.batch,
        step.model.first.weight.detach(),
        step.model.first.bias.detach(),
    )
    (linear,), (relu,), (loss,) = (
        operation_phrase(trace, "addmm"),
        operation_phrase(trace, "relu"),
        operation_phrase(trace, "mse_loss"),
    )
    before = inputs @ weight.T + bias
    after = before.relu()
    for op, expected in [
        (linear, before),
        (relu, after),
        (loss, (after - targets).square().mean()),
    ]:
        np.testing.assert_allclose(
            values(trace, op.outputs[0]), expected.double().ravel(), rtol=1e-6, atol=1e-7
        )
        assert (op.phase, op.dtype, op.shape) == ("forward", "float32", list(expected.shape))
        assert op.repeats
        assert op.ratio <= 1
    assert [op.module for op in (linear, relu, loss)] == ["first", "Tiny", ""]
    assert (
        relu.line
        == f"test_traces.py:{Tiny.forward.__code__.co_firstlineno + 2}: return torch.relu(y)  # the"
        " line"
    )
    assert relu.inputs == linear.outputs
    (mse_backward,) = operation_phrase(trace, "mse_loss_backward", "backward")
    (relu_backward,) = operation_phrase(trace, "threshold_backward", "backward")
    gradient = 2 * (after - targets) / after.numel()
    np.testing.assert_allclose(
        values(trace, mse_backward.outputs[0]), gradient.double().ravel(), rtol=1e-5
    )
    assert relu_backward.module == "Tiny"
    assert relu_backward.line == relu.line, "of the forward pass, which the user wrote"


# --- kinds of steps -------------------------------------------------------------------------------


def two_backwards(setting):
    y = seeded(lambda: nn.Linear(4, 2)).to(setting.dtype)(drawn(3, 4).to(setting.dtype))
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()


def no_backward(setting):
    with torch.no_grad():
        seeded(lambda: nn.Linear(4, 2)).to(setting.dtype)(drawn(3, 4).to(setting.dtype))


def with_checkpoint(setting):
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh())).to(
        setting.dtype
    )
    x = drawn(3, 4).to(setting.dtype).requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("step", [two_backwards, no_backward, with_checkpoint])
def test_record_takes_any_function_of_one_step(step):
    trace = recorded(step)
    assert all(op.repeats is not False for op in trace.operations)
    assert [op.name for op in trace.operations if op.ratio is not None and not op.ratio <= 1] == []
    assert ("backward" in {op.phase for op in trace.operations}) is (step is not no_backward)
    assert trace.without_reference == {}
    assert all(value.exact and value.reference is not None for value in trace.values.values())
    assert step is not two_backwards or len(operation_phrase(trace, "mm", "backward")) == 2


def test_record_refuses_what_is_no_step():
    for wrong in (None, 3, "step", nn.Linear(2, 2).weight):
        with pytest.raises(gl.UsageError, match="a function that performs one step"):
            recorded(wrong)
    for without_numbers in (lambda: None, lambda: torch.arange(3) + 1, lambda: torch.empty(0) + 1):
        with pytest.raises(gl.UsageError, match="nothing to compare"):
            recorded(without_numbers)


# --- nothing is left behind -----------------------------------------------------------------------


def state():
    return (
        _len_torch_dispatch_stack(),
        len(hooks._global_forward_hooks),
        len(hooks._global_forward_pre_hooks),
        torch.get_num_threads(),
        hash(torch.get_rng_state().numpy().tobytes()),
    )


def test_record_passes_on_an_error_of_the_step_and_leaves_nothing_behind():
    def break_off(x):
        raise ValueError(f"in the middle of {x.sum()}")

    step = gl.Step(nn.Sequential(Own(break_off)), torch.ones(1, 2))
    before = state()
    with pytest.raises(ValueError, match="in the middle"):
        recorded(step, "cpu:threads=1")
    assert state() == before
    trace = recorded(tiny_step(), "cpu:threads=1,precision=float64")
    assert [op.module for op in operation_phrase(trace, "addmm")] == ["first"]


# --- what the step is for -------------------------------------------------------------------------


def results(trace):
    return {
        (op.name, op.module): values(trace, op.outputs[0])
        for op in trace.operations
        if op.phase == RESULT
    }


def test_record_results_are_loss_gradients_and_what_was_updated():
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.BatchNorm1d(3)))
    x = drawn(8, 4)

    def step(setting):
        model = copy.deepcopy(net).to(setting.dtype)
        optimizer = torch.optim.SGD(model[:1].parameters(), lr=0.1)
        loss = model(x.to(setting.dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item()}

    seen = results(recorded(step))
    model = copy.deepcopy(net)
    loss = model(x).square().mean()
    loss.backward()
    assert seen["loss", ""] == pytest.approx(loss.item())
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(
            seen["gradient", name], parameter.grad.double().ravel(), rtol=1e-4, atol=1e-7
        )
    updated = (model[0].weight - 0.1 * model[0].weight.grad).detach().double().ravel()
    np.testing.assert_allclose(seen["updated", "0.weight"], updated, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        seen["updated", "2.running_mean"], model[2].running_mean.double(), rtol=1e-5
    )
    names = {name for kind, name in seen if kind == "updated"}
    assert names == {
        "0.weight",
        "0.bias",
        "2.running_mean",
        "2.running_var",
        "2.num_batches_tracked",
    }


def test_record_seeds_and_restores_the_generators_of_numpy_and_python():
    before = np.random.get_state()[1].tolist(), random.getstate()

    def step(setting):
        noise = torch.from_numpy(np.random.standard_normal(4)) + random.random()
        return noise.to(setting.dtype).exp()

    assert {op.repeats for op in recorded(step).operations if op.phase != RESULT} == {True}
    assert before == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_is_random_holds_for_cudnn_lstm_and_attention_with_dropout_alone(dropout):
    aten = torch.ops.aten
    assert _is_random(aten._cudnn_rnn.default, {"dropout": dropout}) == (dropout > 0)
    assert _is_random(
        aten._scaled_dot_product_efficient_attention.default, {"dropout_p": dropout}
    ) == (dropout > 0)


# --- sketches -------------------------------------------------------------------------------------


def test_sketch_of_a_small_tensor_is_the_tensor():
    x = drawn(8, 8)
    assert (sketch(x) == x.double().ravel().numpy()).all()
    assert sketch(torch.tensor(2.5)).tolist() == [2.5]
    assert np.isfinite(sketch(drawn(500).index_fill(0, torch.tensor(3), math.nan))).all()


def test_sketch_distances_are_those_between_tensors():
    ratios = []
    for seed in range(200):
        x, error = drawn(2000, seed=seed), 1e-3 * drawn(2000, seed=seed + 1000)
        told = np.linalg.norm(sketch(x + error) - sketch(x))
        ratios.append(told / float((x + error - x).norm()))
    assert np.mean(np.square(ratios)) == pytest.approx(1, abs=0.06), "unbiased"
    assert np.std(ratios) < 0.15, "right to about a fifth"
    assert 0.6 < min(ratios) < max(ratios) < 1.4


@pytest.mark.parametrize("count", [100_000, BLOCK_SIZE + 9])
def test_sketch_shows_one_wrong_number_among_many_in_full(count):
    x = drawn(count)
    wrong = x.clone()
    wrong[-3] += 5
    assert np.linalg.norm(sketch(wrong) - sketch(x)) == pytest.approx(5, rel=1e-6)
    assert shrinking_factors(x, 3, 0.25).unique().tolist() == [0.5, 1.0]
    assert shrinking_factors(x, 3, 0.25).shape == x.shape


# --- aligning -------------------------------------------------------------------------------------


def operations(*names):
    return [Operation(name, "forward", "", "", [], [], [], "float32") for name in names]


def test_align_operations_keeps_the_order_and_shows_gaps():
    first, second = operations("a", "b", "c", "d"), operations("a", "x", "c", "d", "e")
    pairs = [
        (one and one.name, other and other.name) for one, other in align_operations(first, second)
    ]
    assert pairs == [("a", "a"), ("b", None), (None, "x"), ("c", "c"), ("d", "d"), (None, "e")]
    assert align_operations([], []) == []
    (both,) = align_operations(operations("native_batch_norm"), operations("cudnn_batch_norm"))
    assert None not in both


# --- comparing arguments --------------------------------------------------------------------------

FUSED, ON_CPU = (
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
T = "Tensor"


def called(name, arguments, defaults=None):
    return Operation(name, "forward", "", "", [], [], [], "float32", (defaults or {}) | arguments)


def texts(a, b):
    return {name: tuple(map(repr, values)) for name, values in differing(a, b).items()}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (({"self": T}, {"x": "none"}), ({"self": T, "x": "tanh"},), {"x": ("'none'", "'tanh'")}),
        (({"self": T, "alpha": 2},), ({"self": T}, {"alpha": 1}), {"alpha": ("2", "1")}),
        (({"self": T, "x": True},), ({"self": T, "x": 1},), {"x": ("True", "1")}),
        (
            ({"self": T, "x": None},),
            ({"self": T, "x": [1, math.inf]},),
            {"x": ("None", "[1, inf]")},
        ),
        (({"self": T, "non_blocking": True},), ({"self": T}, {"non_blocking": False}), {}),
        (({"self": T, "other": T},), ({"self": T, "other": 0.5},), {}),
        (({"self": T, "value": math.nan},), ({"self": T, "value": math.nan},), {}),
        (({"self": T}, {"new_in_this_torch": 3}), ({"self": T},), {}),
    ],
    ids=str,
)
def test_differing_arguments_are_named_and_shown_with_defaults(a, b, expected):
    assert texts(called("gelu", *a), called("gelu", *b)) == expected
    back = {name: both[::-1] for name, both in expected.items()}
    assert texts(called("gelu", *b), called("gelu", *a)) == back


def test_differing_arguments_of_kernels_of_two_devices_are_those_they_share():
    defaults = {"is_causal": False, "scale": None}
    plain = called(ON_CPU, {"query": T}, defaults)
    assert texts(plain, called(FUSED, {"query": T, "compute_log_sumexp": True}, defaults)) == {}
    causal = called(FUSED, {"query": T, "is_causal": True, "scale": 0.125}, {"dropout_p": 0.0})
    assert texts(plain, causal) == {"is_causal": ("False", "True")}
    norms = (
        called("native_batch_norm", {"training": True, "eps": 1e-5}),
        called("cudnn_batch_norm", {"epsilon": 1e-3}),
    )
    assert texts(*norms) == {"eps": ("1e-05", "0.001")}
