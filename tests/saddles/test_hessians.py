import copy
import functools
from pathlib import Path

import pytest
import torch
from saddle_problems import DOUBLE, TOKENS, Model, rand
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpulab as gl
from gpulab.errors import DataError, UsageError
from gpulab.models import Autoencoder, PredNet
from gpulab.saddles.hessians import FORWARD, METHODS, REVERSE

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
    "linear": lambda: (chain(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), rand(6, 4)),
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
NAMES = ["autoencoder", "prednet", *MODULES]


def problem(name):
    """A model, what goes into it, and the loss of the two."""
    torch.manual_seed(0)
    if name == "autoencoder":
        model, inputs = Autoencoder(hidden=(5, 3), size=(4, 4)), torch.rand(6, 1, 4, 4, dtype=DOUBLE)
        return model.double(), inputs, lambda model, images: (model(images) - images).square().mean()
    if name == "prednet":
        model = PredNet(channels=(1, 2), size=(4, 4)).double()
        inputs = torch.rand(3, 1, 1, 4, 4, dtype=DOUBLE)
        return model, inputs, lambda model, frames: model.training_loss(frames, None)[0]
    model, inputs = MODULES[name]()
    # Squared and summed, so that the model's own curvature and the loss's both count.
    return model.double().eval(), inputs, lambda model, inputs: (torch.tanh(model(inputs)) ** 2).mean()


def model_and_loss(name="autoencoder"):
    model, inputs, function = problem(name)
    return model, lambda: function(model, inputs)


@functools.cache
def with_dense(name):
    model, loss = model_and_loss(name)
    return model, loss, dense(model, loss)


@both_ways
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_dense_matrix(name, method):
    model, loss, exact = with_dense(name)
    H = gl.hessian(model, loss, method=method)
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


def test_the_engine_has_one_door():
    files = [file for file in Path(gl.__file__).parent.rglob("*.py") if file.parent.name != "_forward"]
    lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    imports = {line for line in lines if "_forward" in line and "import" in line}
    assert imports == {"from gpulab.saddles._forward import linearize_gradient"}


OVERWRITING = {  # of what each does, the last counts
    "by a view": (REVERSE, lambda y: (y[:, :2].mul_(2), y**3)),
    "under a view": (REVERSE, lambda y: (v := y[:, :2], y.mul_(2), v**2)),
    "into a view": (REVERSE, lambda y: (z := torch.zeros_like(y), z[:, :2].copy_(y[:, :2]), z**3)),
    "unseen by autograd": (REVERSE, lambda y: (torch.no_grad()(y.mul_)(2), y.sin())),
    # The derivative of rsqrt is taken by its argument here, by its result in autograd.
    "what a rule needs": (FORWARD, lambda y: (y.add_(2), z := y.rsqrt(), y.add_(1), z + y**2)),
    "in parts": (FORWARD, lambda y: (ab := y.unsafe_chunk(2, 1), ab[0].sigmoid_() * ab[1].tanh_())),
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
def test_loss_and_gradient_are_the_models(method):
    model, loss = model_and_loss()
    H = gl.hessian(model, loss, method=method, at_once=2)
    assert H.at_once == 2
    assert H.loss == loss().item()
    gradients = torch.autograd.grad(loss(), list(model.parameters()))
    torch.testing.assert_close(H.gradient, torch.cat([g.flatten() for g in gradients]), rtol=0, atol=1e-15)
    assert repr(H).startswith(f"Hessian of {H.shape[0]:,} parameters, torch.float64 on cpu")


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


@both_ways
def test_some_parameters_alone_are_a_block_of_the_whole(method):
    model, loss = model_and_loss()
    whole = gl.hessian(model, loss)
    H = gl.hessian(model, loss, parameters=["layers.2", "layers.0.bias"], method=method)
    assert list(H.parameters) == ["layers.0.bias", "layers.2.weight", "layers.2.bias"]
    inside = torch.cat([torch.full((t.numel(),), name in H.parameters) for name, t in whole.parameters.items()])
    torch.testing.assert_close(H.dense(), whole.dense()[inside][:, inside], rtol=0, atol=1e-14)
    assert list(gl.hessian(model, loss, parameters="layers.0").parameters) == list(whole.parameters)[:2]


@pytest.mark.parametrize("method", METHODS)
def test_a_linear_loss_has_no_curvature(method):
    model, x = nn.Linear(3, 2).double(), rand(4, 3)
    H = gl.hessian(model, lambda: model(x).sum(), method=method)
    assert (H @ rand(H.shape[0]) == 0).all()


class Cubed(torch.autograd.Function):
    """With a derivative of the derivative."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient * 3 * x**2


class Once(Cubed):
    backward = staticmethod(once_differentiable(Cubed.backward))


def test_a_function_of_ones_own_is_differentiated_by_its_own_rules():
    model, x = nn.Linear(3, 1, bias=False).double(), rand(5, 3)
    H = gl.hessian(model, lambda: Cubed.apply(model(x)).mean())
    assert H.method == REVERSE
    torch.testing.assert_close(H.dense(), dense(model, lambda: (model(x) ** 3).mean()), rtol=0, atol=1e-12)


def test_a_loss_that_is_no_scalar_or_has_no_second_derivatives_is_refused():
    model, x = nn.Linear(3, 2).double(), rand(5, 3)
    for loss, message in (
        (lambda y: Once.apply(y).mean(), "OnceBackward has no second derivatives: it is marked once_differentiable"),
        (lambda y: y.exp().add_(1).mean(), "modified by an inplace operation"),
        (lambda y: y.detach().mean(), "does not depend on the parameters"),
        (lambda y: torch.ones(len(y)).mean(), "does not depend on the parameters"),
        (lambda y: y, r"the loss is torch.Size\(\[5, 2\]\)"),
        (lambda y: y.mean().item(), "the loss is float"),
    ):
        with pytest.raises(UsageError, match=message):
            gl.hessian(model, lambda: loss(model(x)))  # noqa: B023


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_a_model_in_training_mode_is_refused(layer):
    model, x = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 1)), torch.randn(5, 3)
    with pytest.raises(UsageError, match=rf"1 \({type(layer).__name__}\) is in training mode: call model.eval"):
        gl.hessian(model, lambda: model(x).mean())
    H = gl.hessian(model.eval(), lambda: model(x).pow(2).mean())
    assert H.shape == (sum(p.numel() for p in model.parameters()),) * 2


def test_numbers_that_are_not_finite_are_refused():
    model, x = nn.Linear(3, 2).double(), rand(5, 3)
    with pytest.raises(DataError, match="the loss is nan"):
        gl.hessian(model, lambda: model(x * torch.nan).mean())
    nn.init.constant_(model.bias, torch.nan)
    with pytest.raises(DataError, match="bias has 2 values that are not finite"):
        gl.hessian(model, lambda: model(x).mean())


def test_unknown_parameters_and_methods_are_refused():
    for model, options, message in (
        (nn.Linear(2, 2), {"parameters": "layers.9"}, r"parameters='layers.9': expected one of weight, bias"),
        (nn.Linear(2, 2), {"method": "fast"}, r"method='fast': expected one of auto"),
        (nn.Linear(2, 2), {"at_once": 0}, "at_once=0: expected a whole number"),
        (nn.Linear(2, 2).half(), {}, "float16"),
        (nn.ReLU(), {}, "no parameters"),
    ):
        with pytest.raises(UsageError, match=message):
            gl.hessian(model, lambda: torch.zeros(()), **options)


def test_vectors_that_do_not_fit_are_refused():
    H = gl.hessian(*model_and_loss())
    n = H.shape[0]
    with pytest.raises(UsageError, match=rf"H @ \(3,\): expected a tensor of shape \({n},\)"):
        H @ torch.ones(3, dtype=DOUBLE)
    with pytest.raises(UsageError, match="expected a tensor"):
        H @ [1.0] * n
    with pytest.raises(UsageError, match=r"v is torch.float32 on cpu, H torch.float64"):
        H @ torch.ones(n)
    assert (H @ torch.empty(n, 0, dtype=DOUBLE)).shape == (n, 0)


@needs_cuda
@pytest.mark.parametrize("name", NAMES)
def test_products_on_a_gpu_are_those_of_the_cpu(name):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model, inputs, function = problem(name)
    here = gl.hessian(model, lambda: function(model, inputs))
    on_gpu, inputs_on_gpu = copy.deepcopy(model).cuda(), inputs.cuda()
    there = gl.hessian(on_gpu, lambda: function(on_gpu, inputs_on_gpu))
    for k in (1, 3):
        V = rand(here.shape[0], k)
        expected = here @ V
        for _ in range(3):  # captured at the first
            found = (there @ V.cuda()).cpu() / expected.norm()
            torch.testing.assert_close(found, expected / expected.norm(), rtol=0, atol=1e-10)
