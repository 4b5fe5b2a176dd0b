"""Hessians of models as other people write them: against autograd's dense matrix and differences of gradients."""

import copy
import functools

import pytest
import torch
from saddle_problems import DOUBLE, TOKENS, Model, hessian_by, language_model, loss_of, of_layer, on_rows, problem, rand
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import gpulab as gl
from gpulab.models import Autoencoder, PredNet
from gpulab.saddles.hessians import FORWARD, REVERSE

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
both_ways = pytest.mark.parametrize("method", [FORWARD, REVERSE])


def dense(model, loss):
    """Every second derivative, by autograd's own double backward pass, many rows at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True, materialize_grads=True)
        flat = torch.cat([g.reshape(-1) for g in gradients])
        rows = [
            torch.autograd.grad(
                flat, parameters, some, retain_graph=True, materialize_grads=True, is_grads_batched=True
            )
            for some in torch.eye(len(flat), dtype=flat.dtype).split(500)
        ]
    return torch.cat([torch.cat([part.flatten(1) for part in row], 1) for row in rows])


def products_by_differences(model, loss, vectors, step=1e-5):
    """What the gradient changes by along each vector, where that lies in the parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    point = parameters_to_vector(parameters).detach()

    def gradient(place):
        vector_to_parameters(place, parameters)
        gradients = torch.autograd.grad(loss(), parameters, materialize_grads=True)
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    columns = [(gradient(point + step * v) - gradient(point - step * v)) / (2 * step) for v in vectors.T]
    vector_to_parameters(point, parameters)
    return torch.stack(columns, 1)


def check_products(H, model, loss):
    V = rand(H.shape[0], 2)
    expected = products_by_differences(model, loss, V)
    assert expected.norm() > 1e-3
    assert (H @ V - expected).norm() < 1e-6 * expected.norm()


def in_place(s, x):
    """What torchvision's networks do: overwrite, and add to what was overwritten."""
    x = F.relu_(s.norm(s.first(x)))
    y = s.second(x)
    y += x[:, :, 1:-1, 1:-1]
    return F.silu(y, inplace=True)  # hardswish has a constant in single precision on a GPU


def often(s, x):
    """One layer, more often than goes into one batch."""
    for _ in range(10):
        x = torch.tanh(s.layer(x))
    return x


def stopped(s, x):
    """Half of what it computes is taken for a constant."""
    y = torch.tanh(s.layer(x))
    with torch.no_grad():
        scale = y.exp().mean()
    return y * y.detach() + y.cos() * scale


def residual():
    norm = nn.BatchNorm2d(4)
    nn.init.normal_(norm.running_mean)
    return Model(in_place, first=nn.Conv2d(2, 4, 3, padding=1), norm=norm, second=nn.Conv2d(4, 4, 3))


def recurrent(layer):
    return Model(lambda s, x: s.layer(x)[0], layer=layer)


chain, average = nn.Sequential, functools.partial(nn.AdaptiveAvgPool2d, 1)
convolution_1x1 = functools.partial(nn.Conv2d, kernel_size=1, bias=False)
MODULES = {
    "autoencoder": lambda: (
        Model(lambda s, x: s.net(x) - x, net=Autoencoder(hidden=(5, 3), size=(4, 4))),
        torch.rand(6, 1, 4, 4, dtype=DOUBLE),
    ),
    "prednet": lambda: (
        Model(lambda s, x: s.net.training_loss(x, None)[0], net=PredNet(channels=(1, 2), size=(4, 4))),
        torch.rand(3, 1, 1, 4, 4, dtype=DOUBLE),
    ),
    "gelu, softmax": lambda: (chain(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3), nn.Softmax(-1)), rand(6, 4)),
    "normed": lambda: (chain(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 2)), rand(5, 4)),
    "strided": lambda: (chain(nn.Conv2d(2, 3, 3, 2, 1), nn.Sigmoid(), nn.Conv2d(3, 2, 2)), rand(2, 2, 7, 6)),
    "dilated": lambda: (chain(nn.Conv2d(2, 3, 3, dilation=2), nn.Tanh(), convolution_1x1(3, 2)), rand(2, 2, 7, 6)),
    "one dimension": lambda: (chain(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 2, padding=1)), rand(2, 2, 9)),
    "groups": lambda: (chain(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 2, 1)), rand(2, 4, 5, 5)),
    "transposed": lambda: (chain(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh()), rand(2, 2, 4, 3)),
    "pooled": lambda: (chain(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Tanh(), average()), rand(2, 2, 8, 8)),
    "in place": lambda: (residual(), rand(2, 2, 6, 6)),
    "often": lambda: (Model(often, layer=nn.Conv1d(2, 2, 3, padding=1)), rand(2, 2, 4)),
    "attention": lambda: (nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True), rand(2, 3, 4)),
    "lstm": lambda: (recurrent(nn.LSTM(4, 3, batch_first=True)), rand(2, 5, 4)),
    "gru": lambda: (recurrent(nn.GRU(4, 3, batch_first=True)), rand(2, 5, 4)),
    "stopped gradients": lambda: (Model(stopped, layer=nn.Linear(3, 4)), rand(5, 3)),
    "hard": lambda: (chain(nn.Linear(4, 5), nn.Hardtanh(), nn.Linear(5, 2), nn.LeakyReLU()), rand(6, 4)),
    "embedding": lambda: (chain(nn.Embedding(7, 3), nn.Linear(3, 2)), TOKENS),
}


@functools.cache
def with_dense(name):
    model, loss = model_and_loss(MODULES[name])
    return model, loss, dense(model, loss)


def model_and_loss(make=MODULES["autoencoder"]):
    model, inputs = problem(make)
    return model, lambda: loss_of(model, inputs)


@both_ways
@pytest.mark.parametrize("name", MODULES)
def test_products_are_those_of_the_dense_matrix(name, method):
    model, loss, exact = with_dense(name)
    H = hessian_by(method, model, loss)
    assert H.method == method
    scale = exact.norm()
    assert scale > 0.01
    for k in [(), (1,), (13,)] if method == FORWARD else [(), (2,)]:
        V = rand(H.shape[0], *k)
        torch.testing.assert_close(H @ V / scale, exact @ V / scale, rtol=0, atol=1e-10)
    if method == FORWARD:
        H.at_once = 100  # to be done sooner
        D = H.dense()
        torch.testing.assert_close(D / scale, exact / scale, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.linalg.eigvalsh(D), torch.linalg.eigvalsh(exact), rtol=0, atol=1e-8)


def two_layers(first, second, **parts):
    return on_rows(lambda s, x: F.linear(torch.tanh(F.linear(x, first(s))), second(s)), **parts)


def tied_recurrent():
    layer = nn.GRU(3, 3, 2)
    layer.weight_ih_l1 = layer.weight_ih_l0
    return Model(lambda s, x: s.layer(x)[0], layer=layer), rand(4, 2, 3)


def overlapping():
    """Two parameters in one storage: autograd differentiates by each of them all the same."""
    storage = rand(21) / 2
    w, v = nn.Parameter(storage[:12].view(4, 3)), nn.Parameter(storage[8:16].view(2, 4))
    return two_layers(lambda s: s.w, lambda s: s.v, w=w, v=v)


def frozen():
    """Tied, too."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    return model, rand(5, 3)


def of_matrix(function):
    return of_layer(lambda s, x: function(s.layer(x).T @ s.layer(x) + torch.eye(4, dtype=DOUBLE)))


def by_expert():
    def function(s, x):
        weights, places = s.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros(5, 3, dtype=DOUBLE)
        for number, expert in enumerate(s.experts):
            rows, k = (places == number).nonzero(as_tuple=True)
            y.index_add_(0, rows, torch.tanh(expert(x[rows])) * weights[rows, k, None])
        return y

    return on_rows(function, router=nn.Linear(3, 3), experts=nn.ModuleList(nn.Linear(3, 3) for _ in range(3)))


def checkpointed(s, x):
    return checkpoint(lambda h: torch.tanh(s.layer(h)).square(), x * s.layer(x).sum(), use_reentrant=False)


def normed(norm):
    return lambda: (nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh()), rand(5, 3))


def seeded_noise(s, x):
    return torch.tanh(s.layer(x + torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)))


FOREIGN = {
    "tied language model": language_model,
    "transposed": lambda: two_layers(lambda s: s.w, lambda s: s.w.t(), w=rand(4, 3)),
    "slices": lambda: two_layers(lambda s: s.w[:3], lambda s: s.w[2:], w=rand(6, 3)),
    "transposed convolution": lambda: (
        Model(lambda s, x: F.conv_transpose2d(torch.tanh(F.conv2d(x, s.w)), s.w), w=rand(3, 2, 2, 2)),
        rand(2, 2, 3, 3),
    ),
    "tied recurrent layers": tied_recurrent,
    "one layer three times": lambda: (
        nn.Sequential(layer := nn.Linear(3, 3), nn.Tanh(), layer, nn.ELU(), layer),
        rand(5, 3),
    ),
    "overlapping views": overlapping,
    "frozen, tied": frozen,
    "empty parameter": lambda: on_rows(
        lambda s, x: torch.tanh(F.linear(x, s.w)) * (1 + s.z.sum()), w=rand(4, 3), z=rand(0, 3)
    ),
    "noise from a seed of its own": of_layer(seeded_noise),
    "experts": by_expert,
    "checkpointed": of_layer(checkpointed),
    "weight norm": normed(parametrizations.weight_norm),
    "spectral norm": normed(parametrizations.spectral_norm),
    # By-products of these, a matrix's factors, serve the backward pass.
    "solved": of_matrix(lambda A: torch.linalg.solve(A, torch.ones(4, 2, dtype=DOUBLE))),
    "determinant": of_matrix(lambda A: torch.linalg.det(A) / 9),
    "log determinant": of_matrix(torch.logdet),
    "trace": of_matrix(lambda A: A.trace() * A.diagonal() / 90),
}


@both_ways
@pytest.mark.parametrize("name", FOREIGN)
def test_products_are_differences_of_gradients(name, method):
    model, loss = model_and_loss(FOREIGN[name])
    check_products(hessian_by(method, model, loss), model, loss)


def test_what_cannot_be_followed_is_left_to_autograd():
    model, loss = model_and_loss(of_layer(lambda s, x: torch.fft.fft(torch.tanh(s.layer(x))).abs()))
    H = gl.hessian(model, loss)
    assert H.method == REVERSE
    check_products(H, model, loss)


OVERWRITING = {  # of what each does, the last counts
    "by a view": (REVERSE, lambda y: (y[:, :2].mul_(2), y**3)),
    "under a view": (REVERSE, lambda y: (v := y[:, :2], y.mul_(2), v**2)),
    "into a view": (REVERSE, lambda y: (z := torch.zeros_like(y), z[:, :2].copy_(y[:, :2]), z**3)),
    "unseen by autograd": (REVERSE, lambda y: (torch.no_grad()(y.mul_)(2), y.sin())),
    # The derivative of rsqrt is taken by its argument here, by its result in autograd.
    "what a rule needs": (FORWARD, lambda y: (y.add_(2), z := y.rsqrt(), y.add_(1), z + y**2)),
    "in parts": (FORWARD, lambda y: (ab := y.unsafe_chunk(2, 1), ab[0].sigmoid_() * ab[1].tanh_())),
    "copied": (FORWARD, lambda y: (z := torch.zeros_like(y), z.copy_(torch.sin(y)[:1]), z * y)),
    "constants": (FORWARD, lambda y: (z := torch.zeros(5, 4, dtype=DOUBLE), z[0].add_(1), z[:, 1].add_(2), y * z)),
}


@pytest.mark.parametrize("name", OVERWRITING)
def test_what_is_overwritten_is_followed_or_left_to_autograd(name):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4).double(), rand(5, 3)
    method, function = OVERWRITING[name]

    def loss():
        return function(torch.tanh(model(x)) + 0)[-1].square().mean()

    H = gl.hessian(model, loss)
    assert H.method == method
    torch.testing.assert_close(H.dense(), dense(model, loss), rtol=0, atol=1e-12)


@both_ways
@pytest.mark.parametrize("tied", [False, True])
def test_what_stands_for_padding_is_a_constant(tied, method):
    model, _ = language_model(padding=1)
    if not tied:
        model[3].weight = nn.Parameter(rand(7, 4))
    model = model.double()
    H = hessian_by(method, model, lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), (TOKENS, TOKENS))
    padding = model[0].weight[1].detach().clone()  # as autograd has what is looked up for it

    def loss():
        found = torch.where((TOKENS == 1)[..., None], padding, F.embedding(TOKENS, model[0].weight))
        return F.cross_entropy(model[1:](found).flatten(0, 1), TOKENS.flatten())

    check_products(H, model, loss)


@both_ways
def test_a_compiled_model_is_differentiated_as_written(method):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), rand(5, 3)
    compiled = torch.compile(model, backend="eager")
    H = hessian_by(method, model, lambda: compiled(x).square().mean())
    expected = gl.hessian(model, lambda: model(x).square().mean())
    torch.testing.assert_close(H.dense(), expected.dense(), rtol=0, atol=1e-12)


@both_ways
def test_loss_and_gradient_are_the_models_and_some_parameters_alone_are_a_block_of_the_whole(method):
    model, loss = model_and_loss()
    H = hessian_by(method, model, loss)
    assert H.loss == loss().item()
    gradients = torch.autograd.grad(loss(), list(model.parameters()))
    torch.testing.assert_close(H.gradient, torch.cat([g.flatten() for g in gradients]), rtol=0, atol=1e-15)
    assert repr(H).startswith(f"Hessian of {H.shape[0]:,} parameters, torch.float64 on cpu")
    block = hessian_by(method, model, loss, parameters=["net.layers.2", "net.layers.0.bias"])
    assert list(block.parameters) == ["net.layers.0.bias", "net.layers.2.weight", "net.layers.2.bias"]
    inside = torch.cat([torch.full((t.numel(),), name in block.parameters) for name, t in H.parameters.items()])
    torch.testing.assert_close(block.dense(), H.dense()[inside][:, inside], rtol=0, atol=1e-14)


@both_ways
def test_the_operator_stays_where_it_was_made_and_the_model_as_it_was(method):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x, state = rand(5, 3), copy.deepcopy(model.state_dict())

    def loss():
        return checkpoint(model, x, use_reentrant=False).square().mean()

    H = hessian_by(method, model, loss, parameters="0")
    before = H @ rand(16)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    assert torch.equal(H @ rand(16), before)
    assert not torch.allclose(hessian_by(method, model, loss, parameters="0") @ rand(16), before)


@both_ways
def test_a_linear_loss_has_no_curvature(method):
    model, x = nn.Linear(3, 2).double(), rand(4, 3)
    H = hessian_by(method, model, lambda: model(x).sum())
    assert (H @ rand(H.shape[0]) == 0).all()


@needs_cuda
@pytest.mark.parametrize("name", MODULES)
def test_products_on_a_gpu_are_those_of_the_cpu(name):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model, inputs = problem(MODULES[name])
    here = gl.hessian(model, lambda: loss_of(model, inputs))
    on_gpu, inputs_on_gpu = copy.deepcopy(model).cuda(), inputs.cuda()
    there = gl.hessian(on_gpu, lambda: loss_of(on_gpu, inputs_on_gpu))
    for k in (1, 3):
        V = rand(here.shape[0], k)
        expected = here @ V
        for _ in range(3):  # captured at the first
            found = (there @ V.cuda()).cpu() / expected.norm()
            torch.testing.assert_close(found, expected / expected.norm(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("setting", ["cpu", pytest.param("cuda:tf32=off", marks=needs_cuda)])
def test_products_in_float32_have_its_accuracy(setting):
    torch.manual_seed(0)
    model, frames = PredNet(channels=(3, 8, 16), size=(24, 32)), torch.rand(6, 1, 3, 24, 32)
    exact = copy.deepcopy(model).double()
    H = gl.hessian(exact, lambda: exact.training_loss(frames.double(), None)[0])
    v = rand(H.shape[0])
    with gl.setting(setting) as chosen:
        model, frames = model.to(chosen.device), frames.to(chosen.device)
        single = gl.hessian(model, lambda: model.training_loss(frames, None)[0])
        product = single @ v.float().to(chosen.device)
    assert single.dtype == torch.float32
    assert (product.double().cpu() - H @ v).norm() < 1e-5 * (H @ v).norm()
