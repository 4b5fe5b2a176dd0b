"""Losses without a Hessian raise an error of one line that names the cause.

Asymmetry is distinguished from rounding.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import gpulab as gl
from gpulab.errors import DataError, UsageError
from gpulab.saddles._hessian import FORWARD, REVERSE
from gpulab.saddles._operators import check_symmetric
from tests.saddles._helpers import (
    SADDLE,
    SIX_SCALES,
    TOKENS,
    escape,
    hessian_by,
    loss_of,
    of_layer,
    on_rows,
    rand,
    symmetric,
)


class Cubed(torch.autograd.Function):
    """A function whose backward can be differentiated again."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context, gradient):
        return gradient * 3 * context.saved_tensors[0] ** 2


class Once(Cubed):
    backward = staticmethod(once_differentiable(Cubed.backward))


def test_hessian_differentiates_a_custom_function_by_its_own_rules():
    model, x = nn.Linear(3, 1, bias=False).double(), rand(5, 3)
    H = gl.hessian(model, lambda: Cubed.apply(model(x)).mean())
    torch.testing.assert_close(H.dense(), 6 / 5 * (x * model(x)).T @ x, rtol=0, atol=1e-12)


class RefusedModel(NamedTuple):
    """A model whose loss has no Hessian, and a pattern of the error message."""

    id: str
    make: Callable
    message: str
    error: type[Exception] = UsageError


def embedding_model(**options):
    """Return a function that makes a model with an embedding of tokens."""

    def make():
        return nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 2)), TOKENS

    return make


def model_in_training(layer):
    """Return a function that makes a model in training mode with a copy of the layer."""

    def make():
        model = nn.Sequential(nn.Linear(3, 3), copy.deepcopy(layer))
        return model.train(), rand(2, 3, 3)

    return make


GENERATOR = torch.Generator().manual_seed(0)


def add_random_numbers(model, x):
    return model.layer(x) + torch.randn(5, 4, generator=GENERATOR)


def call_once_differentiable(model, x):
    return Once.apply(model.layer(x))


def modify_saved_result(model, x):
    return model.layer(x).exp().add_(1)


def detach_result(model, x):
    return model.layer(x).detach()


def multiply_by_nan(model, x):
    return model.layer(x * torch.nan)


def root_of_squares(model, x):
    return (x * model.w).square().sum().sqrt()


def scale_by_weights(model, x):
    return x * model.w


def model_with_root_at_zero():
    return on_rows(root_of_squares, w=torch.zeros(3))


def model_with_nan_weights():
    return on_rows(scale_by_weights, w=torch.full((3,), torch.nan))


REFUSED_MODELS = [
    RefusedModel(
        "random numbers",
        of_layer(add_random_numbers),
        r"the loss is [\d.]+ at .* [\d.]+ at .* call model.eval\(\), or draw the numbers",
    ),
    RefusedModel(
        "running statistics",
        model_in_training(nn.InstanceNorm1d(3, track_running_stats=True)),
        "1.running_mean changes .*: call model.eval",
    ),
    RefusedModel(
        "dropout",
        model_in_training(nn.Dropout(0.5)),
        r"1 \(Dropout\) is in training mode: call model.eval",
    ),
    RefusedModel(
        "batch norm",
        model_in_training(nn.BatchNorm1d(3)),
        r"1 \(BatchNorm1d\) is in training mode: call model.eval",
    ),
    RefusedModel(
        "max_norm",
        embedding_model(max_norm=0.1),
        r"0 rescales its own weights .* \(max_norm=0.1\): rescale them once",
    ),
    RefusedModel(
        "sparse gradients", embedding_model(sparse=True), "sparse gradients: .* sparse=False"
    ),
    RefusedModel(
        "once differentiable",
        of_layer(call_once_differentiable),
        "OnceBackward has no second derivatives: it is marked",
    ),
    RefusedModel(
        "in-place operation", of_layer(modify_saved_result), "modified by an inplace operation"
    ),
    RefusedModel("detached", of_layer(detach_result), "does not depend on the parameters"),
    RefusedModel(
        "scaled gradient",
        embedding_model(scale_grad_by_freq=True),
        "the gradient that torch computes is not that of the loss",
        DataError,
    ),
    RefusedModel(
        "root at zero",
        model_with_root_at_zero,
        "values that are not finite: .* cannot be differentiated",
        DataError,
    ),
    RefusedModel("nan loss", of_layer(multiply_by_nan), "the loss is nan", DataError),
    RefusedModel(
        "nan weights", model_with_nan_weights, "w has 3 values that are not finite", DataError
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [FORWARD, REVERSE])
@pytest.mark.parametrize("case", REFUSED_MODELS, ids=lambda case: case.id)
def test_hessian_names_what_it_cannot_differentiate_twice(case, method, dtype):
    torch.manual_seed(0)
    model, x = case.make()
    model = model.to(dtype)
    if x.is_floating_point():
        x = x.to(dtype)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(case.error, match=case.message):
        hessian_by(method, model, lambda: loss_of(model, x))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", [FORWARD, REVERSE])
def test_hessian_refuses_parameters_that_the_loss_holds_itself(method):
    model, x = nn.Linear(3, 2).double(), rand(5, 3)
    held = list(model.parameters())
    with pytest.raises(
        UsageError, match=r"the loss refers to weight directly: get it from the model"
    ):
        hessian_by(
            method, model, lambda: model(x).square().mean() + sum(p.pow(4).sum() for p in held)
        )
    H = hessian_by(method, model, lambda: sum(p.pow(4).sum() for p in model.parameters()))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(H.dense(), torch.diag(12 * weights**2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float32, 1e-30), (torch.float64, 1e-200)]
)
def test_check_symmetric_tells_asymmetry_from_rounding(dtype, scale):
    A, vectors = (scale * symmetric(torch.linspace(-20, 20, 200))).to(dtype), rand(200, 2).to(dtype)
    check_symmetric(A, vectors, A @ vectors)
    A[:, 7] *= 1.2
    with pytest.raises(DataError, match="not symmetric"):
        check_symmetric(A, vectors, A @ vectors)


class RefusedRequest(NamedTuple):
    """A call of a function of `gl.saddles` that raises an error, and a pattern of the message."""

    id: str
    request: Callable
    message: str
    error: type[Exception] = UsageError


saddle_of = partial(gl.saddles.linear_autoencoder_saddle, SIX_SCALES)


def escape_from_a_minimum():
    escape(saddle_of([0, 1]))


def surface_around_a_minimum():
    gl.saddles.surface(saddle_of([0, 1]))


def search_with_many_parameters():
    data = (SIX_SCALES, SIX_SCALES)
    gl.saddles.find_critical_point(nn.Linear(50, 100), nn.functional.mse_loss, data)


def constant_loss():
    return torch.ones(())


def escape_from_no_critical_point():
    escape(replace(SADDLE, found=False))


def escape_with_a_batch_that_is_no_pair():
    objective = replace(SADDLE.objective, batches=[SIX_SCALES])
    escape(replace(SADDLE, objective=objective))


def make_no_optimizer(weights, **_):
    return weights


def make_optimizer_of_two_rates(weights, lr):
    groups = [{"params": weights[:1], "lr": 1e-9}, {"params": weights[1:]}]
    return torch.optim.SGD(groups, lr)


def saddle_of_nonfinite_data():
    data = torch.tensor([[1.0, math.nan], [math.inf, 0.0]])
    gl.saddles.linear_autoencoder_saddle(data, [0])


def slope_of_one_perturbation():
    gl.saddles.escape_table(SADDLE, ["cpu"], steps=3, progress=False).slope()


REFUSED_REQUESTS = [
    RefusedRequest(
        "batch size",
        partial(escape, batch_size=101),
        "batch_size=101: expected a whole number from 1 to 100",
    ),
    RefusedRequest(
        "perturbation",
        partial(escape, perturbation=math.nan),
        "perturbation=nan: expected a finite distance",
    ),
    RefusedRequest(
        "learning rate",
        partial(escape, rate=0),
        "learning rate 0: expected a number above 0",
    ),
    RefusedRequest(
        "component", partial(saddle_of, [6]), "component=6: expected a whole number from 0 to 5"
    ),
    RefusedRequest("component twice", partial(saddle_of, [1, 1]), "each component at most once"),
    RefusedRequest(
        "hidden units",
        partial(saddle_of, [1, 2], hidden=1),
        "hidden=1: expected a whole number from 2",
    ),
    RefusedRequest("escape from a minimum", escape_from_a_minimum, "no direction leads down"),
    RefusedRequest(
        "surface around a minimum",
        surface_around_a_minimum,
        "the least curvature is .*landscape",
    ),
    RefusedRequest(
        "many parameters", search_with_many_parameters, "5,100 parameters: .* at most 5,000"
    ),
    RefusedRequest(
        "no batch",
        partial(gl.saddles.find_critical_point, nn.Linear(2, 1), constant_loss, None),
        "a copy of the model: expected a batch",
    ),
    RefusedRequest(
        "no critical point",
        escape_from_no_critical_point,
        "this is not a critical point: the components held",
    ),
    RefusedRequest("no pair", escape_with_a_batch_that_is_no_pair, "not a pair of tensors"),
    RefusedRequest(
        "unknown optimizer",
        partial(escape, optimizer="lion"),
        "'lion': expected sgd, momentum, rmsprop, adam, or a function",
    ),
    RefusedRequest(
        "no optimizer",
        partial(escape, optimizer=make_no_optimizer),
        "expected a torch.optim.Optimizer that uses",
    ),
    RefusedRequest(
        "two learning rates",
        partial(escape, optimizer=make_optimizer_of_two_rates),
        "the learning rate it is given",
    ),
    RefusedRequest(
        "nan operator",
        partial(gl.saddles.spectral_density, torch.eye(4) * math.nan, probes=1),
        "H @ v has values that are not finite",
        DataError,
    ),
    RefusedRequest(
        "asymmetric matrix",
        partial(gl.saddles.extreme_eigenpairs, torch.ones(90, 90).triu()),
        "not symmetric",
        DataError,
    ),
    RefusedRequest(
        "asymmetric small matrix",
        partial(gl.saddles.index, torch.ones(9, 9).triu()),
        "the operator is not symmetric",
        DataError,
    ),
    RefusedRequest(
        "nonfinite data", saddle_of_nonfinite_data, "2 of 4 values are not finite", DataError
    ),
    RefusedRequest(
        "divergence",
        partial(escape, rate=1e200, perturbation=1e-2),
        "weights are not finite; learning_rate=1e",
        DataError,
    ),
    RefusedRequest("slope", slope_of_one_perturbation, "a slope needs at least 3", DataError),
]


@pytest.mark.parametrize("case", REFUSED_REQUESTS, ids=lambda case: case.id)
def test_saddles_functions_refuse_invalid_requests_in_one_line(case):
    with pytest.raises(case.error, match=case.message) as error:
        case.request()
    assert "\n" not in str(error.value)


class SquareOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


class Layered(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x):
        return self.function(self.layer(x))


def once(x):
    return SquareOnce.apply(x)  # refused


def largest_in_bags(x):
    return nn.functional.embedding_bag(torch.tensor([[0, 1], [2, 3]]), x, mode="max")  # refused


def ctc(x):
    scores = x[:, None].log_softmax(-1)
    lengths = torch.tensor([6]), torch.tensor([2])
    return nn.functional.ctc_loss(scores, torch.tensor([[1, 2]]), *lengths)  # refused


@pytest.mark.parametrize("function", [once, largest_in_bags, ctc])
def test_hessian_refusal_inside_a_module_names_the_line(function):
    with pytest.raises(
        gl.UsageError,
        match=r"no second derivatives.*\(at test_hessian_errors\.py:\d+: return .*  # refused\)$",
    ):
        gl.hessian(
            Layered(function),
            lambda output, _: output.square().mean(),
            (torch.ones(6, 6), torch.zeros(1)),
        )
