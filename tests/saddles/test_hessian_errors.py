"""What has no Hessian and what cannot be is refused by name, in one line; asymmetry is told from
rounding.
"""

import copy
import math
from dataclasses import replace

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
    """With a derivative of the derivative."""

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


def looked_up(**options):
    return lambda: (nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 2)), TOKENS)


def in_training(layer):
    return lambda: (nn.Sequential(nn.Linear(3, 3), copy.deepcopy(layer)).train(), rand(2, 3, 3))


OWN = torch.Generator().manual_seed(0)
REFUSED = {
    r"the loss is [\d.]+ at first and [\d.]+ then: .* call model.eval\(\), or draw them": of_layer(
        lambda s, x: s.layer(x) + torch.randn(5, 4, generator=OWN)
    ),
    "1.running_mean changes each time that the loss is computed: call model.eval": in_training(
        nn.InstanceNorm1d(3, track_running_stats=True)
    ),
    r"1 \(Dropout\) is in training mode: call model.eval": in_training(nn.Dropout(0.5)),
    r"1 \(BatchNorm1d\) is in training mode: call model.eval": in_training(nn.BatchNorm1d(3)),
    r"0 shortens its own weights .* \(max_norm=0.1\): shorten them once": looked_up(max_norm=0.1),
    "sparse gradients: .* sparse=False": looked_up(sparse=True),
    "OnceBackward has no second derivatives: it is marked": of_layer(
        lambda s, x: Once.apply(s.layer(x))
    ),
    "modified by an inplace operation": of_layer(lambda s, x: s.layer(x).exp().add_(1)),
    "does not depend on the parameters": of_layer(lambda s, x: s.layer(x).detach()),
}
NO_GRADIENT = {
    "what torch computes as the gradient is not that of the loss": looked_up(
        scale_grad_by_freq=True
    ),
    "values that are not finite: .* or has no derivative here": lambda: on_rows(
        lambda s, x: (x * s.w).square().sum().sqrt(), w=torch.zeros(3)
    ),
    "the loss is nan": of_layer(lambda s, x: s.layer(x * torch.nan)),
    "w has 3 values that are not finite": lambda: on_rows(
        lambda s, x: x * s.w, w=torch.full((3,), torch.nan)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [FORWARD, REVERSE])
@pytest.mark.parametrize("message", REFUSED | NO_GRADIENT)
def test_hessian_names_what_it_cannot_differentiate_twice(message, method, dtype):
    make, error = (REFUSED | NO_GRADIENT)[message], UsageError if message in REFUSED else DataError
    torch.manual_seed(0)
    model, x = make()
    model, x = model.to(dtype), x.to(dtype) if x.is_floating_point() else x
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        hessian_by(method, model, lambda: loss_of(model, x))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", [FORWARD, REVERSE])
def test_hessian_refuses_parameters_that_the_loss_holds_itself(method):
    model, x = nn.Linear(3, 2).double(), rand(5, 3)
    held = list(model.parameters())
    with pytest.raises(
        UsageError, match=r"the loss holds weight itself: ask the model for it each time"
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


search, MSE = gl.saddles.find_critical_point, nn.functional.mse_loss
saddle_of = gl.saddles.linear_autoencoder_saddle


REQUESTS = {
    "batch_size=101: expected a whole number from 1 to 100": lambda: escape(batch_size=101),
    "perturbation=nan: expected a distance": lambda: escape(perturbation=math.nan),
    "a learning rate of 0: expected a number above 0": lambda: escape(rate=0),
    "component=6: expected a whole number from 0 to 5": lambda: saddle_of(SIX_SCALES, [6]),
    "each can be held once": lambda: saddle_of(SIX_SCALES, [1, 1]),
    "hidden=1: expected a whole number from 2": lambda: saddle_of(SIX_SCALES, [1, 2], hidden=1),
    "no direction leads down": lambda: escape(saddle_of(SIX_SCALES, [0, 1])),
    "the least curvature is .*landscape": lambda: gl.saddles.surface(saddle_of(SIX_SCALES, [0, 1])),
    "5,100 parameters: .* at most 5,000": lambda: search(
        nn.Linear(50, 100), MSE, (SIX_SCALES, SIX_SCALES)
    ),
    "a copy of the model: give a batch": lambda: search(
        nn.Linear(2, 1), lambda: torch.ones(()), None
    ),
    "this is no critical point: the components held": lambda: escape(replace(SADDLE, found=False)),
    "no pair of tensors": lambda: escape(
        replace(SADDLE, objective=replace(SADDLE.objective, batches=[SIX_SCALES]))
    ),
    "'lion': expected sgd, momentum, rmsprop, adam, or a function": lambda: escape(
        optimizer="lion"
    ),
    "expected a torch.optim.Optimizer that uses": lambda: escape(
        optimizer=lambda weights, **_: weights
    ),
    "the learning rate it is given": lambda: escape(
        optimizer=lambda w, lr: torch.optim.SGD(
            [{"params": w[:1], "lr": 1e-9}, {"params": w[1:]}], lr
        )
    ),
}
DATA = {
    "H @ v has values that are not finite": lambda: gl.saddles.spectral_density(
        torch.eye(4) * math.nan, probes=1
    ),
    "not symmetric": lambda: gl.saddles.extreme_eigenpairs(torch.ones(90, 90).triu()),
    "the operator is not symmetric": lambda: gl.saddles.index(torch.ones(9, 9).triu()),
    "2 of 4 values are not finite": lambda: saddle_of(
        torch.tensor([[1.0, math.nan], [math.inf, 0.0]]), [0]
    ),
    "weights are not finite; learning_rate=1e": lambda: escape(rate=1e200, perturbation=1e-2),
    "a slope needs 3": lambda: gl.saddles.escape_table(
        SADDLE, ["cpu"], steps=3, progress=False
    ).slope(),
}


@pytest.mark.parametrize("words", REQUESTS | DATA)
def test_saddles_functions_refuse_invalid_requests_in_one_line(words):
    with pytest.raises(gl.UsageError if words in REQUESTS else gl.DataError, match=words) as error:
        (REQUESTS | DATA)[words]()
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
