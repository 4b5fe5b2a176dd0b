"""Hessians of models as other people write them, against finite differences of gradients; or refused by name."""

import copy

import pytest
import torch
from saddle_problems import DOUBLE, TOKENS, Model, rand, symmetric
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gpulab as gl
from gpulab.errors import DataError, UnsupportedError, UsageError
from gpulab.saddles.hessians import FORWARD, METHODS, REVERSE
from gpulab.saddles.operators import check_symmetric


def on_rows(function, **parts):
    return Model(function, **parts), rand(5, 3)


def two_layers(first, second, **parts):
    return on_rows(lambda s, x: F.linear(torch.tanh(F.linear(x, first(s))), second(s)), **parts)


def language_model(padding=None):
    table, head = nn.Embedding(7, 4, padding_idx=padding), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, nn.Linear(4, 4), nn.Tanh(), head), TOKENS


def recurrent():
    def function(s, x):
        h = x.new_zeros(len(x), 4)
        for _ in range(5):
            h = torch.tanh(F.linear(x, s.w) + F.linear(h, s.u))
        return h

    return on_rows(function, w=rand(4, 3), u=rand(4, 4, seed=2))


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


def joined(*parts):
    """Of no numbers, as caches begin, and of some."""
    return on_rows(lambda s, x: torch.cat([part(torch.tanh(F.linear(x, s.w))) for part in parts]), w=rand(4, 3))


def empty(*shape):
    return lambda h: torch.zeros(shape, dtype=h.dtype)


def cached(s, x):
    cache = torch.zeros(5, 4, dtype=DOUBLE)
    cache.copy_(torch.sin(s.layer(x))[:1])
    return cache * s.layer(x)


def cached_in_parts(s, x):
    cache = torch.zeros(2, 5, 4, dtype=DOUBLE)
    cache[0].copy_(s.layer(x))
    cache[1].copy_(torch.sin(s.layer(x)))
    return cache.prod(0)


def of_layer(function):
    return lambda: on_rows(function, layer=nn.Linear(3, 4))


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


MODELS = {
    "tied language model": language_model,
    "transposed": lambda: two_layers(lambda s: s.w, lambda s: s.w.t(), w=rand(4, 3)),
    "partly tied": lambda: two_layers(lambda s: s.w, lambda s: torch.cat([s.w[1:], s.v]), w=rand(3, 3), v=rand(2, 3)),
    "slices": lambda: two_layers(lambda s: s.w[:3], lambda s: s.w[2:], w=rand(6, 3)),
    "transposed convolution": lambda: (
        Model(lambda s, x: F.conv_transpose2d(torch.tanh(F.conv2d(x, s.w)), s.w), w=rand(3, 2, 2, 2)),
        rand(2, 2, 3, 3),
    ),
    "over time": recurrent,
    "tied recurrent layers": tied_recurrent,
    "one layer three times": lambda: (
        nn.Sequential(layer := nn.Linear(3, 3), nn.Tanh(), layer, nn.ELU(), layer),
        rand(5, 3),
    ),
    "overlapping views": overlapping,
    "frozen, tied": frozen,
    "unused": lambda: on_rows(lambda s, x: torch.tanh(F.linear(x, s.w)), w=rand(4, 3), z=rand(2, 2)),
    "empty parameter": lambda: on_rows(
        lambda s, x: torch.tanh(F.linear(x, s.w)) * (1 + s.z.sum()), w=rand(4, 3), z=rand(0, 3)
    ),
    "empty constant": lambda: joined(empty(0), lambda h: h),
    "empty rows": lambda: joined(lambda h: h[:0], empty(0), lambda h: h**2, lambda h: h[:0].flatten()),
    "cached": of_layer(cached),
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
LEFT_TO_AUTOGRAD = {
    "complex": of_layer(lambda s, x: torch.fft.fft(torch.tanh(s.layer(x))).abs()),
    "in parts": of_layer(cached_in_parts),
}


def problem(make):
    torch.manual_seed(0)
    model, inputs = make()
    model = model.double().eval()
    return model, lambda: (torch.tanh(model(inputs)) ** 2).mean()


def products_by_differences(model, loss, vectors, step=1e-5):
    """What the gradient changes by along each vector, where that lies in the parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before, columns = [p.detach().clone() for p in parameters], []
    for vector in vectors.T:
        ends = []
        for way in (step, -step):
            pieces = vector.split([p.numel() for p in parameters])
            for p, point, piece in zip(parameters, before, pieces, strict=True):
                p.data = point + way * piece.view_as(point)
            gradients = torch.autograd.grad(loss(), parameters, materialize_grads=True)
            ends.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        columns.append((ends[0] - ends[1]) / (2 * step))
    for p, point in zip(parameters, before, strict=True):
        p.data = point
    return torch.stack(columns, 1)


def check_products(H, model, loss):
    V = rand(H.shape[0], 2)
    expected = products_by_differences(model, loss, V)
    assert expected.norm() > 1e-3
    assert (H @ V - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("method", [FORWARD, REVERSE])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_differences_of_gradients(name, method):
    model, loss = problem(MODELS[name])
    check_products(gl.hessian(model, loss, method=method), model, loss)


@pytest.mark.parametrize("name", LEFT_TO_AUTOGRAD)
def test_what_cannot_be_followed_is_left_to_autograd(name):
    model, loss = problem(LEFT_TO_AUTOGRAD[name])
    H = gl.hessian(model, loss)
    assert H.method == REVERSE
    check_products(H, model, loss)
    with pytest.raises((UnsupportedError, DataError)):
        gl.hessian(model, loss, method=FORWARD)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_what_stands_for_padding_is_a_constant(tied, method):
    model, _ = language_model(padding=1)
    if not tied:
        model[3].weight = nn.Parameter(rand(7, 4))
    model = model.double()
    H = gl.hessian(model, lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), (TOKENS, TOKENS), method=method)
    padding = model[0].weight[1].detach().clone()  # as autograd has what is looked up for it

    def loss():
        found = torch.where((TOKENS == 1)[..., None], padding, F.embedding(TOKENS, model[0].weight))
        return F.cross_entropy(model[1:](found).flatten(0, 1), TOKENS.flatten())

    check_products(H, model, loss)


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_model_is_differentiated_as_written(method):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), rand(5, 3)
    compiled = torch.compile(model, backend="eager")
    H = gl.hessian(model, lambda: compiled(x).square().mean(), method=method)
    expected = gl.hessian(model, lambda: model(x).square().mean())
    torch.testing.assert_close(H.dense(), expected.dense(), rtol=0, atol=1e-12)


class Rolled(torch.autograd.Function):
    """With a backward function that is the gradient of nothing."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2 * context.saved_tensors[0].roll(1, -1)


def hooked(h):
    if h.requires_grad:
        h.register_hook(lambda gradient: 2 * gradient)
    return h


OWN = torch.Generator().manual_seed(0)


def looked_up(**options):
    return lambda: (nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 2)), TOKENS)


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
    "0.weight changes each time": looked_up(max_norm=0.1),
    "sparse gradients: .* sparse=False": looked_up(sparse=True),
}
NO_GRADIENT = {
    ASYMMETRIC: looked_up(scale_grad_by_freq=True),
    "not symmetric: .* backward functions of your own": of_layer(lambda s, x: Rolled.apply(s.layer(x))),
    "values that are not finite: .* or has no derivative here": lambda: on_rows(
        lambda s, x: (x * s.w).square().sum().sqrt(), w=torch.zeros(3)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("method", ["auto", REVERSE])
@pytest.mark.parametrize("message", REFUSED | NO_GRADIENT)
def test_what_has_no_hessian_is_refused_by_name(message, method, dtype):
    make, error = (REFUSED | NO_GRADIENT)[message], UsageError if message in REFUSED else DataError
    torch.manual_seed(0)
    model, x = make()
    model, x = model.to(dtype), x.to(dtype) if x.is_floating_point() else x
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        gl.hessian(model, lambda: (torch.tanh(model(x)) ** 2).mean(), method=method)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_hook_that_changes_gradients_is_found_out():
    model, loss = problem(of_layer(lambda s, x: F.linear(hooked(torch.tanh(s.layer(x))), s.layer.weight.T)))
    with pytest.raises(DataError, match="hooks on tensors"):
        gl.hessian(model, loss, method=FORWARD)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_the_loss_holds_itself_are_refused(method):
    model, x = nn.Linear(3, 2).double(), rand(5, 3)
    held = list(model.parameters())
    with pytest.raises(UsageError, match=r"the loss holds weight itself: ask the model for it each time"):
        gl.hessian(model, lambda: model(x).square().mean() + sum(p.pow(4).sum() for p in held), method=method)
    H = gl.hessian(model, lambda: model(x).square().mean() + sum(p.pow(4).sum() for p in model.parameters()))
    plain = gl.hessian(model, lambda: model(x).square().mean())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(H.dense(), plain.dense() + torch.diag(12 * weights**2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_the_operator_stays_where_it_was_made_and_the_model_as_it_was(method):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x, state = rand(5, 3), copy.deepcopy(model.state_dict())

    def loss():
        return checkpoint(model, x, use_reentrant=False).square().mean()

    H = gl.hessian(model, loss, parameters="0", method=method)
    before = H @ rand(16)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    assert torch.equal(H @ rand(16), before)
    assert not torch.allclose(gl.hessian(model, loss, parameters="0", method=method) @ rand(16), before)


def test_tied_parameters_go_by_any_of_their_names():
    model, tokens = language_model()
    H = gl.hessian(model.double(), lambda: model(tokens).square().mean(), parameters="3")
    assert list(H.parameters) == ["0.weight"]
    assert H.shape == (28, 28)


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


def test_products_that_are_nothing_but_rounding_are_symmetric():
    A, B = symmetric(SPREAD).float(), symmetric(SPREAD, 1).float() * 3

    class Cancelling:
        """A (B + C) v − (A B v + A C v), which is zero."""

        def __matmul__(self, v):
            return A @ (B @ v + v / 7) - (A @ (B @ v) + A @ (v / 7))

    vectors = rand(200, 2).float()
    assert (Cancelling() @ vectors).any()
    check_symmetric(Cancelling(), vectors, Cancelling() @ vectors)
