"""What has no Hessian is refused by name, and asymmetry is told from rounding."""

import copy

import pytest
import torch
from saddle_problems import DOUBLE, TOKENS, hessian_by, loss_of, of_layer, on_rows, rand, symmetric
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import gpulab as gl
from gpulab.errors import DataError, UsageError
from gpulab.saddles.hessians import FORWARD, REVERSE
from gpulab.saddles.operators import check_symmetric


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


class Rolled(Cubed):
    """With a backward function that is the gradient of nothing."""

    @staticmethod
    def backward(context, gradient):
        return gradient * 2 * context.saved_tensors[0].roll(1, -1)


def test_a_function_of_ones_own_is_differentiated_by_its_own_rules():
    model, x = nn.Linear(3, 1, bias=False).double(), rand(5, 3)
    H = gl.hessian(model, lambda: Cubed.apply(model(x)).mean())
    assert H.method == REVERSE
    torch.testing.assert_close(H.dense(), 6 / 5 * (x * model(x)).T @ x, rtol=0, atol=1e-12)


def looked_up(**options):
    return lambda: (nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 2)), TOKENS)


def in_training(layer):
    return lambda: (nn.Sequential(nn.Linear(3, 3), layer).train(), rand(5, 3))


OWN = torch.Generator().manual_seed(0)
ASYMMETRIC = r"not symmetric: uᵀAv and vᵀAu differ by .*: what torch computes as the gradient is not that of the loss"
NORMALIZED = nn.Sequential(nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, track_running_stats=True))
REFUSED = {
    r"the loss is [\d.]+ at first and [\d.]+ then: it draws random numbers; call model.eval": of_layer(
        lambda s, x: F.dropout(s.layer(x), 0.5)
    ),
    "or draw them beforehand": of_layer(lambda s, x: s.layer(x) + torch.randn(5, 4, generator=OWN)),
    "1.running_mean changes each time that the loss is computed: call model.eval": lambda: (
        copy.deepcopy(NORMALIZED),
        rand(2, 3, 5),
    ),
    r"1 \(Dropout\) is in training mode: call model.eval": in_training(nn.Dropout(0.5)),
    r"1 \(BatchNorm1d\) is in training mode: call model.eval": in_training(nn.BatchNorm1d(3)),
    r"0 shortens its own weights each time .* \(max_norm=0.1\): shorten them once": looked_up(max_norm=0.1),
    "sparse gradients: .* sparse=False": looked_up(sparse=True),
    "OnceBackward has no second derivatives: it is marked once_differentiable": of_layer(
        lambda s, x: Once.apply(s.layer(x))
    ),
    "modified by an inplace operation": of_layer(lambda s, x: s.layer(x).exp().add_(1)),
    "does not depend on the parameters": of_layer(lambda s, x: s.layer(x).detach()),
}
NO_GRADIENT = {
    ASYMMETRIC: looked_up(scale_grad_by_freq=True),
    "not symmetric: .* backward functions of your own": of_layer(lambda s, x: Rolled.apply(s.layer(x))),
    "values that are not finite: .* or has no derivative here": lambda: on_rows(
        lambda s, x: (x * s.w).square().sum().sqrt(), w=torch.zeros(3)
    ),
    "the loss is nan": of_layer(lambda s, x: s.layer(x * torch.nan)),
    "w has 3 values that are not finite": lambda: on_rows(lambda s, x: x * s.w, w=torch.full((3,), torch.nan)),
}


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("method", [FORWARD, REVERSE])
@pytest.mark.parametrize("message", REFUSED | NO_GRADIENT)
def test_what_has_no_hessian_is_refused_by_name(message, method, dtype):
    make, error = (REFUSED | NO_GRADIENT)[message], UsageError if message in REFUSED else DataError
    torch.manual_seed(0)
    model, x = make()
    model, x = model.to(dtype), x.to(dtype) if x.is_floating_point() else x
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        hessian_by(method, model, lambda: loss_of(model, x))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0, equal_nan=True)


def test_cure_of_refused_embedding_max_norm_works():
    table, head = nn.Embedding(7, 4, max_norm=0.5).double(), nn.Linear(4, 2).double()
    model = nn.Sequential(table, head)
    with pytest.raises(UsageError, match=r"weight.data.renorm_\(norm_type, 0, max_norm\), and set max_norm = None"):
        gl.hessian(model.eval(), lambda: loss_of(model, TOKENS))
    table.weight.data.renorm_(table.norm_type, 0, table.max_norm)
    table.max_norm = None
    assert table.weight.norm(dim=1).max() < 0.5 + 1e-6
    H = gl.hessian(model, lambda: loss_of(model, TOKENS))
    assert (H @ rand(H.shape[0])).norm() > 0


@pytest.mark.parametrize("method", [FORWARD, REVERSE])
def test_parameters_that_the_loss_holds_itself_are_refused(method):
    model, x = nn.Linear(3, 2).double(), rand(5, 3)
    held = list(model.parameters())
    with pytest.raises(UsageError, match=r"the loss holds weight itself: ask the model for it each time"):
        hessian_by(method, model, lambda: model(x).square().mean() + sum(p.pow(4).sum() for p in held))
    H = gl.hessian(model, lambda: model(x).square().mean() + sum(p.pow(4).sum() for p in model.parameters()))
    plain = gl.hessian(model, lambda: model(x).square().mean())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(H.dense(), plain.dense() + torch.diag(12 * weights**2), rtol=0, atol=1e-12)


SPREAD = torch.linspace(-20, 20, 200)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-200])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_asymmetry_is_told_from_rounding(dtype, scale):
    A, vectors = (scale * symmetric(SPREAD)).to(dtype), rand(200, 2).to(dtype)
    check_symmetric(A, vectors, A @ vectors)
    if not A.any():  # too small for the type
        return
    A[:, 7] *= 1.2
    with pytest.raises(DataError, match="not symmetric"):
        check_symmetric(A, vectors, A @ vectors)
