"""Hessians of typical models: both methods agree with each other and with finite differences."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import gpulab as gl
from gpulab.models import Autoencoder, PredNet
from gpulab.saddles._hessian import FORWARD, REVERSE
from tests.saddles._helpers import (
    DOUBLE,
    TOKENS,
    Model,
    hessian_by,
    language_model,
    loss_of,
    of_layer,
    on_rows,
    problem,
    rand,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
both_ways = pytest.mark.parametrize("method", [FORWARD, REVERSE])


def check_products(H, model, loss, step=1e-5):
    """Assert that each product is the change of the gradient along the vector."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    point, V = parameters_to_vector(parameters).detach(), rand(H.shape[0], 2)

    def gradient(place):
        vector_to_parameters(place, parameters)
        return parameters_to_vector(torch.autograd.grad(loss(), parameters, materialize_grads=True))

    columns = [(gradient(point + step * v) - gradient(point - step * v)) / (2 * step) for v in V.T]
    vector_to_parameters(point, parameters)
    expected = torch.stack(columns, 1)
    assert expected.norm() > 1e-3
    assert (H @ V - expected).norm() < 1e-6 * expected.norm()


def recurrent(layer, tied=False):
    if tied:
        layer.weight_ih_l1 = layer.weight_ih_l0
    return Model(lambda s, x: s.layer(x)[0], layer=layer), rand(2, 5, 3)


def two_layers(first, second, **parts):
    return on_rows(lambda s, x: F.linear(torch.tanh(F.linear(x, first(s))), second(s)), **parts)


def of_matrix(function):
    return of_layer(lambda s, x: function(s.layer(x).T @ s.layer(x) + torch.eye(4, dtype=DOUBLE)))


def by_expert(s, x):
    weights, places = s.router(x).softmax(-1).topk(2, -1)
    y = torch.zeros(5, 3, dtype=DOUBLE)
    for number, expert in enumerate(s.experts):
        rows, k = (places == number).nonzero(as_tuple=True)
        y.index_add_(0, rows, torch.tanh(expert(x[rows])) * weights[rows, k, None])
    return y


def checkpointed(s, x):
    return checkpoint(
        lambda h: torch.tanh(s.layer(h)).square(), x * s.layer(x).sum(), use_reentrant=False
    )


chain, images = nn.Sequential, functools.partial(rand, 2, 2)
LAYERS = {
    "autoencoder": lambda: (Autoencoder(hidden=(5, 3), size=(4, 4)), rand(6, 1, 4, 4).sigmoid()),
    "prednet": lambda: (
        Model(
            lambda s, x: s.net.training_loss(x, None)[0], net=PredNet(channels=(1, 2), size=(4, 4))
        ),
        rand(3, 1, 1, 4, 4).sigmoid(),
    ),
    "gelu, softmax": lambda: (
        chain(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3), nn.Softmax(-1)),
        rand(6, 4),
    ),
    "normed": lambda: (
        chain(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 2)),
        rand(5, 4),
    ),
    "strided": lambda: (
        chain(nn.Conv2d(2, 3, 3, 2, 1), nn.Sigmoid(), nn.Conv2d(3, 2, 2)),
        images(7, 6),
    ),
    "dilated": lambda: (
        chain(nn.Conv2d(2, 3, 3, dilation=2), nn.Tanh(), nn.Conv2d(3, 2, 1, bias=False)),
        images(7, 6),
    ),
    "one dimension": lambda: (
        chain(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 2, padding=1)),
        images(9),
    ),
    "groups": lambda: (
        chain(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 2, 1)),
        rand(2, 4, 5, 5),
    ),
    "upwards": lambda: (chain(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh()), images(4, 3)),
    "pooled": lambda: (
        chain(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Tanh(), nn.AdaptiveAvgPool2d(1)),
        images(8, 8),
    ),
    "in place": lambda: (
        chain(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 2, 2),
            nn.SiLU(inplace=True),
        ),
        images(6, 6),
    ),
    "one layer more often than goes into one batch": lambda: (
        chain(*10 * [nn.Conv1d(2, 2, 3, padding=1), nn.ELU()]),
        images(4),
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True),
        images(4),
    ),
    "lstm": lambda: recurrent(nn.LSTM(3, 3, batch_first=True)),
    "gru": lambda: recurrent(nn.GRU(3, 3, batch_first=True)),
    "stopped gradients": of_layer(lambda s, x: s.layer(x).tanh() * s.layer(x).exp().detach()),
    "hard": lambda: (
        chain(nn.Linear(4, 5), nn.Hardtanh(), nn.Linear(5, 2), nn.LeakyReLU()),
        rand(6, 4),
    ),
}
PROBLEMS = LAYERS | {
    "tied language model": language_model,
    "transposed": lambda: two_layers(lambda s: s.w, lambda s: s.w.t(), w=rand(4, 3)),
    "slices": lambda: two_layers(lambda s: s.w[:3], lambda s: s.w[2:], w=rand(6, 3)),
    "convolution and transposed": lambda: (
        Model(
            lambda s, x: F.conv_transpose2d(torch.tanh(F.conv2d(x, s.w)), s.w), w=rand(3, 2, 2, 2)
        ),
        images(3, 3),
    ),
    "tied recurrent layers": lambda: recurrent(nn.GRU(3, 3, 2), tied=True),
    "frozen": lambda: (
        chain(nn.Linear(3, 3).requires_grad_(False), nn.Tanh(), nn.Linear(3, 3)),
        rand(5, 3),
    ),
    "noise from a seed of its own": of_layer(lambda s, x: s.layer(x + rand(5, 3, seed=3)).tanh()),
    "experts": lambda: on_rows(
        by_expert, router=nn.Linear(3, 3), experts=nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    ),
    "checkpointed": of_layer(checkpointed),
    "weight norm": lambda: (
        chain(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh()),
        rand(5, 3),
    ),
    "weight norm over a named dimension": lambda: (
        Model(
            lambda s, x: torch.tanh(x @ torch._weight_norm(s.v, s.g, dim=1)),
            v=rand(3, 4),
            g=rand(1, 4, seed=1),
        ),
        rand(5, 3),
    ),
    "spectral norm": lambda: (
        chain(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh()),
        rand(5, 3),
    ),
    # The backward pass uses by-products of these operations, such as the factors of a matrix.
    "solved": of_matrix(lambda A: torch.linalg.solve(A, torch.ones(4, 2, dtype=DOUBLE))),
    "determinant": of_matrix(lambda A: torch.linalg.det(A) / 9),
    "log determinant": of_matrix(torch.logdet),
    "trace": of_matrix(lambda A: A.trace() * A.diagonal() / 90),
    "cannot be followed": of_layer(lambda s, x: torch.fft.fft(torch.tanh(s.layer(x))).abs()),
}


CASES = [(name, "cpu") for name in PROBLEMS] + [
    pytest.param(name, "cuda", marks=needs_cuda) for name in LAYERS
]


@pytest.mark.parametrize(("name", "device"), CASES)
def test_hessian_products_by_both_methods_agree_with_differences_of_gradients(name, device):
    model, inputs = problem(PROBLEMS[name])
    there, inputs_there = copy.deepcopy(model).to(device), inputs.to(device)
    H = gl.hessian(there, lambda: loss_of(there, inputs_there))
    reverse = hessian_by(REVERSE, model, lambda: loss_of(model, inputs))
    needs_reverse = name in ("trace", "cannot be followed") or (
        # Torch has no forward derivative of the fused cells that it uses on a GPU.
        device == "cuda" and name in ("lstm", "gru")
    )
    assert H.method == (REVERSE if needs_reverse else FORWARD)
    assert reverse.method == REVERSE
    if name != "stopped gradients":  # which change, too
        check_products(reverse, model, lambda: loss_of(model, inputs))
    for k in [(), (1,), (13,), (13,)]:  # on a GPU, the first call captures a graph
        V = rand(H.shape[0], *k)
        expected = reverse @ V
        found = (H @ V.to(device)).cpu()
        torch.testing.assert_close(
            found / expected.norm(), expected / expected.norm(), rtol=0, atol=1e-10
        )


def overwritten_through_a_view(y):
    y[:, :2].mul_(2)
    return y**3


def view_of_an_overwritten_tensor(y):
    view = y[:, :2]
    y.mul_(2)
    return view**2


def copy_into_a_view(y):
    z = torch.zeros_like(y)
    z[:, :2].copy_(y[:, :2])
    return z**3


def overwritten_without_autograd(y):
    with torch.no_grad():
        y.mul_(2)
    return y.sin()


def overwritten_argument_of_a_rule(y):
    """The rule for `rsqrt` uses its argument, while autograd uses its result."""
    y.add_(2)
    z = y.rsqrt()
    y.add_(1)
    return z + y**2


def overwritten_parts(y):
    left, right = y.unsafe_chunk(2, 1)
    return left.sigmoid_() * right.tanh_()


def copy_into_a_tensor(y):
    z = torch.zeros_like(y)
    z.copy_(torch.sin(y)[:1])
    return z * y


def overwritten_constants(y):
    z = torch.zeros(5, 4, dtype=DOUBLE)
    z[0].add_(1)
    z[:, 1].add_(2)
    return y * z


# Functions with in-place operations, and the method that computes their Hessian.
OVERWRITING = {
    overwritten_through_a_view: REVERSE,
    view_of_an_overwritten_tensor: REVERSE,
    copy_into_a_view: REVERSE,
    overwritten_without_autograd: REVERSE,
    overwritten_argument_of_a_rule: FORWARD,
    overwritten_parts: FORWARD,
    copy_into_a_tensor: FORWARD,
    overwritten_constants: FORWARD,
}


@pytest.mark.parametrize(
    ("function", "method"),
    OVERWRITING.items(),
    ids=[function.__name__ for function in OVERWRITING],
)
def test_hessian_follows_in_place_operations_or_leaves_them_to_autograd(function, method):
    model, x = problem(of_layer(lambda s, x: function(torch.tanh(s.layer(x)) + 0)))
    H = gl.hessian(model, lambda: loss_of(model, x))
    reverse = hessian_by(REVERSE, model, lambda: loss_of(model, x))
    assert H.method == method
    torch.testing.assert_close(H.dense(), reverse.dense(), rtol=0, atol=1e-12)


@both_ways
def test_hessian_of_a_tied_embedding_treats_padding_as_a_constant(method):
    model, _ = language_model(padding=1)
    model = model.double()
    H = hessian_by(
        method, model, lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), (TOKENS, TOKENS)
    )
    padding = model[0].weight[1].detach().clone()  # as autograd has what is looked up for it

    def loss():
        found = torch.where((TOKENS == 1)[..., None], padding, F.embedding(TOKENS, model[0].weight))
        return F.cross_entropy(model[1:](found).flatten(0, 1), TOKENS.flatten())

    check_products(H, model, loss)


@both_ways
def test_hessian_of_a_compiled_model_is_that_of_the_model_as_written(method):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), rand(5, 3)
    compiled = torch.compile(model, backend="eager")
    H = hessian_by(method, model, lambda: compiled(x).square().mean())
    check_products(H, model, lambda: model(x).square().mean())


@both_ways
def test_hessian_has_the_loss_and_gradient_of_the_model_and_blocks_of_parameters(method):
    model, inputs = problem(PROBLEMS["autoencoder"])
    loss = functools.partial(loss_of, model, inputs)
    H = hessian_by(method, model, loss)
    assert H.loss == loss().item()
    gradients = torch.autograd.grad(loss(), list(model.parameters()))
    torch.testing.assert_close(H.gradient, parameters_to_vector(gradients), rtol=0, atol=1e-15)
    with pytest.raises(gl.UsageError, match=r"H @ \(\d+, 1, 1\): expected"):
        H @ H.gradient[:, None, None]
    block = hessian_by(method, model, loss, parameters=["layers.2", "layers.0.bias"])
    assert list(block.parameters) == ["layers.0.bias", "layers.2.weight", "layers.2.bias"]
    inside = torch.cat(
        [torch.full((t.numel(),), name in block.parameters) for name, t in H.parameters.items()]
    )
    torch.testing.assert_close(block.dense(), H.dense()[inside][:, inside], rtol=0, atol=1e-14)


@both_ways
def test_hessian_stays_where_it_was_made_and_leaves_the_model_alone(method):
    model = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        .double()
        .eval()
    )
    x, state = rand(5, 3), copy.deepcopy(model.state_dict())
    loss = functools.partial(lambda x: checkpoint(model, x, use_reentrant=False).square().mean(), x)
    operator = functools.partial(hessian_by, method, model, loss, parameters="0")
    H = operator()
    before = H @ rand(16)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    for tensor in model.state_dict().values():
        tensor.add_(1)
    assert torch.equal(H @ rand(16), before)
    assert not torch.allclose(operator() @ rand(16), before)


@both_ways
def test_hessian_of_a_linear_loss_is_zero(method):
    model, x = nn.Linear(3, 2).double(), rand(4, 3)
    assert (hessian_by(method, model, lambda: model(x).sum()) @ rand(8) == 0).all()
