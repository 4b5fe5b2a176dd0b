import copy
import functools

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpulab as gl
from gpulab.errors import DataError, UsageError
from gpulab.models import Autoencoder, PredNet
from gpulab.saddles.hessians import FORWARD, METHODS, REVERSE

DOUBLE = torch.float64


def dense(model, loss):
    """Every second derivative, by autograd's own double backward pass, a hundred rows at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True, materialize_grads=True)
        flat = torch.cat([g.reshape(-1) for g in gradients])
        rows = [
            torch.autograd.grad(
                flat, parameters, some, retain_graph=True, materialize_grads=True, is_grads_batched=True
            )
            for some in torch.eye(len(flat), dtype=flat.dtype).split(100)
        ]
    return torch.cat([torch.cat([part.flatten(1) for part in row], 1) for row in rows])


def vectors(H, k=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = H.shape[:1] if k is None else (H.shape[0], k)
    return torch.randn(shape, generator=generator, dtype=H.dtype)


def autoencoder():
    torch.manual_seed(0)
    model = Autoencoder(hidden=(5, 3), size=(4, 4)).double()
    images = torch.rand(6, 1, 4, 4, dtype=DOUBLE)
    return model, lambda: (model(images) - images).square().mean()


def prednet(variant="published"):
    torch.manual_seed(0)
    model = PredNet(channels=(1, 2), size=(4, 4), variant=variant, layer_weights=(1, 0.1)).double()
    frames = torch.rand(3, 1, 1, 4, 4, dtype=DOUBLE)
    return model, lambda: model.training_loss(frames, None)[0]


def of(make):
    """A module's output squared and summed, so that its own curvature and the loss's both count."""
    torch.manual_seed(0)
    module, inputs = make()
    module = module.double().eval()
    return module, lambda: (torch.tanh(module(inputs)) ** 2).mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 3, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class InPlace(nn.Module):
    """What torchvision's networks do: overwrite, and add to what was overwritten."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x):
        x = F.relu_(self.norm(self.first(x)))
        y = self.second(x)
        y += x[:, :, 1:-1, 1:-1]
        return F.silu(y, inplace=True)  # hardswish has a constant in single precision on a GPU


class Stopped(nn.Module):
    """Half of what it computes is taken for a constant."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        with torch.no_grad():
            scale = y.exp().mean()
        return y * y.detach() + y.cos() * scale


def rand(*shape):
    return torch.rand(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)) - 0.3


MODULES = {
    "linear": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), rand(6, 4)),
    "gelu, softmax": lambda: (nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3), nn.Softmax(-1)), rand(6, 4)),
    "normed": lambda: (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 2)), rand(5, 4)),
    "strided": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Sigmoid(), nn.Conv2d(3, 2, 2)),
        rand(2, 2, 7, 6),
    ),
    "dilated": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3, dilation=2), nn.Tanh(), nn.Conv2d(3, 2, 1, bias=False)),
        rand(2, 2, 7, 6),
    ),
    "one dimension": lambda: (
        nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 2, padding=1)),
        rand(2, 2, 9),
    ),
    "groups": lambda: (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 2, 1)), rand(2, 4, 5, 5)),
    "transposed": lambda: (nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh()), rand(2, 2, 4, 3)),
    "pooled": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Tanh(), nn.AdaptiveAvgPool2d(1)),
        rand(2, 2, 8, 8),
    ),
    "in place": lambda: (InPlace(), rand(2, 2, 6, 6)),
    "attention": lambda: (Attention(), rand(2, 5, 8)),
    "lstm": lambda: (Recurrent(nn.LSTM), rand(2, 5, 4)),
    "gru": lambda: (Recurrent(nn.GRU), rand(2, 5, 4)),
    "stopped gradients": lambda: (Stopped(), rand(5, 3)),
    "hard": lambda: (
        nn.Sequential(nn.Linear(4, 5), nn.Hardtanh(), nn.Linear(5, 5), nn.LeakyReLU(), nn.Linear(5, 2)),
        rand(6, 4),
    ),
    "embedding": lambda: (nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), torch.tensor([[1, 2, 2], [0, 6, 1]])),
}
PROBLEMS = {
    "autoencoder": autoencoder,
    "prednet": prednet,
    "prednet lotter": lambda: prednet("lotter"),
    **{name: lambda make=make: of(make) for name, make in MODULES.items()},
}


@functools.cache
def problem(name):
    model, loss = PROBLEMS[name]()
    return model, loss, dense(model, loss)


@pytest.mark.parametrize("method", [FORWARD, REVERSE])
@pytest.mark.parametrize("name", PROBLEMS)
def test_products_are_those_of_the_dense_matrix(name, method):
    model, loss, exact = problem(name)
    H = gl.hessian(model, loss, method=method)
    assert H.method == method
    assert H.shape == exact.shape
    scale = exact.norm()
    assert scale > 0.01
    for k in (1, 3, 13) if method == FORWARD else (2,):
        V = vectors(H, k)
        torch.testing.assert_close(H @ V / scale, exact @ V / scale, rtol=0, atol=1e-10)
    v = vectors(H)
    torch.testing.assert_close(H @ v / scale, exact @ v / scale, rtol=0, atol=1e-10)
    if method == FORWARD:
        torch.testing.assert_close(H.dense() / scale, exact / scale, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["autoencoder", "prednet"])
def test_eigenvalues_are_those_of_the_dense_matrix(name):
    model, loss, exact = problem(name)
    found = torch.linalg.eigvalsh(gl.hessian(model, loss).dense())
    torch.testing.assert_close(found, torch.linalg.eigvalsh(exact), rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", [FORWARD, REVERSE])
def test_loss_and_gradient_are_the_models(method):
    model, loss = autoencoder()
    H = gl.hessian(model, loss, method=method)
    gradients = torch.autograd.grad(loss(), list(model.parameters()))
    assert H.loss == loss().item()
    torch.testing.assert_close(H.gradient, H.flatten(gradients), rtol=0, atol=1e-15)


def test_products_in_float32_have_its_accuracy():
    model, loss = prednet()
    exact = gl.hessian(model, loss)
    v = vectors(exact)
    single = copy.deepcopy(model).float()
    (frames,) = [c.cell_contents for c in loss.__closure__ if isinstance(c.cell_contents, torch.Tensor)]
    H = gl.hessian(single, lambda: single.training_loss(frames.float(), None)[0])
    assert H.dtype == torch.float32
    reference = exact @ v
    assert (H @ v.float() - reference).norm() < 1e-5 * reference.norm()


def test_a_batch_goes_through_model_and_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, targets = rand(7, 4), torch.arange(7) % 3
    H = gl.hessian(model, F.cross_entropy, (inputs, targets))
    exact = dense(model, lambda: F.cross_entropy(model(inputs), targets))
    torch.testing.assert_close(H.dense(), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [FORWARD, REVERSE])
def test_some_parameters_alone_are_a_block_of_the_whole(method):
    model, loss = autoencoder()
    whole = gl.hessian(model, loss)
    names = list(whole.parameters)
    H = gl.hessian(model, loss, parameters=["layers.2", "layers.0.bias"], method=method)
    assert list(H.parameters) == ["layers.0.bias", "layers.2.weight", "layers.2.bias"]
    inside = torch.cat([torch.full((t.numel(),), name in H.parameters) for name, t in whole.parameters.items()])
    torch.testing.assert_close(H.dense(), whole.dense()[inside][:, inside], rtol=0, atol=1e-14)
    assert list(gl.hessian(model, loss, parameters="layers.0").parameters) == names[:2]


def test_frozen_parameters_are_constants():
    model, loss = autoencoder()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    assert not [name for name in gl.hessian(model, loss).parameters if name.startswith("layers.0")]


def test_a_parameter_that_the_loss_does_not_see_has_zeros():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(2, 2)}).double()
    x = rand(4, 3)
    for method in (FORWARD, REVERSE):
        H = gl.hessian(model, lambda: model["used"](x).pow(3).mean(), method=method)
        D = H.dense()
        assert (D[8:] == 0).all()
        assert (D[:, 8:] == 0).all()
        assert D[:8, :8].abs().max() > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_linear_loss_has_no_curvature(method):
    model = nn.Linear(3, 2).double()
    x = rand(4, 3)
    H = gl.hessian(model, lambda: model(x).sum(), method=method)
    assert (H @ vectors(H) == 0).all()


def test_repeated_and_zero_eigenvalues():
    model = nn.Linear(4, 1, bias=False).double()
    scale = torch.tensor([2.0, 2.0, 0.0, -3.0], dtype=DOUBLE)
    H = gl.hessian(model, lambda: 0.5 * (scale * model.weight.square()).sum())
    torch.testing.assert_close(H.dense(), scale.diag(), rtol=0, atol=1e-15)


def test_the_operator_stays_where_it_was_made():
    model, loss = autoencoder()
    for method in (FORWARD, REVERSE):
        H = gl.hessian(model, loss, method=method)
        v = vectors(H)
        before = H @ v
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        assert torch.equal(H @ v, before)
        assert not torch.allclose(gl.hessian(model, loss, method=method) @ v, before)


def test_the_model_is_left_as_it_was():
    model, loss = autoencoder()
    before = copy.deepcopy(model.state_dict())
    gl.hessian(model, loss) @ vectors(gl.hessian(model, loss))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_vectors_go_through_a_few_at_a_time():
    model, loss = autoencoder()
    V = vectors(gl.hessian(model, loss), 7)
    together = gl.hessian(model, loss, at_once=10) @ V
    torch.testing.assert_close(gl.hessian(model, loss, at_once=2) @ V, together, rtol=0, atol=1e-15)
    assert gl.hessian(model, loss).at_once >= 1


def test_parts_and_whole():
    model, loss = autoencoder()
    H = gl.hessian(model, loss)
    v = vectors(H)
    parts = H.split(v)
    assert {name: t.shape for name, t in parts.items()} == {n: t.shape for n, t in H.parameters.items()}
    assert torch.equal(H.flatten(parts.values()), v)
    assert "float64" in repr(H)
    assert f"{H.shape[0]:,}" in repr(H)


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
    @staticmethod
    @once_differentiable
    def backward(context, gradient):
        return Cubed.backward(context, gradient)


def test_a_function_of_ones_own_is_differentiated_by_its_own_rules():
    model = nn.Linear(3, 1, bias=False).double()
    x = rand(5, 3)
    H = gl.hessian(model, lambda: Cubed.apply(model(x)).mean())
    assert H.method == REVERSE
    torch.testing.assert_close(H.dense(), dense(model, lambda: (model(x) ** 3).mean()), rtol=0, atol=1e-12)


def test_a_loss_without_second_derivatives_is_refused():
    model = nn.Linear(3, 1).double()
    x = rand(5, 3)
    with pytest.raises(UsageError, match="OnceBackward has no second derivatives: it is marked once_differentiable"):
        gl.hessian(model, lambda: Once.apply(model(x)).mean())
    with pytest.raises(UsageError, match="does not depend on the parameters"):
        gl.hessian(model, lambda: model(x).detach().mean())
    with pytest.raises(UsageError, match="does not depend on the parameters"):
        gl.hessian(model, lambda: torch.ones((), requires_grad=False))


def test_what_is_not_a_scalar_is_refused():
    model = nn.Linear(3, 2).double()
    x = rand(5, 3)
    with pytest.raises(UsageError, match=r"the loss is torch.Size\(\[5, 2\]\)"):
        gl.hessian(model, lambda: model(x))
    with pytest.raises(UsageError, match="the loss is float"):
        gl.hessian(model, lambda: model(x).mean().item())


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_a_model_in_training_mode_is_refused(layer):
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 1))
    x = torch.randn(5, 3)
    with pytest.raises(UsageError, match=rf"1 \({type(layer).__name__}\) is in training mode: call model.eval"):
        gl.hessian(model, lambda: model(x).mean())
    assert (
        gl.hessian(model.eval(), lambda: model(x).pow(2).mean()).shape
        == (model[0].weight.numel() + 7 + 6 * isinstance(layer, nn.BatchNorm1d),) * 2
    )


def test_numbers_that_are_not_finite_are_refused():
    model, loss = autoencoder()
    with torch.no_grad():
        model.layers[2].bias[1] = torch.nan
    with pytest.raises(DataError, match=r"layers.2.bias has 1 values that are not finite"):
        gl.hessian(model, loss)
    good, _ = autoencoder()
    with pytest.raises(DataError, match="the loss is nan"):
        gl.hessian(good, lambda: good(torch.full((1, 1, 4, 4), torch.nan, dtype=DOUBLE)).mean())


def test_unknown_parameters_and_methods_are_refused():
    model, loss = autoencoder()
    with pytest.raises(UsageError, match=r"parameters='layers.9': expected one of layers.0.weight"):
        gl.hessian(model, loss, parameters="layers.9")
    with pytest.raises(UsageError, match=r"method='fast': expected one of auto"):
        gl.hessian(model, loss, method="fast")
    with pytest.raises(UsageError, match="at_once=0: expected a whole number"):
        gl.hessian(model, loss, at_once=0)
    with pytest.raises(UsageError, match="float16"):
        gl.hessian(nn.Linear(2, 2).half(), lambda: torch.zeros(()))
    with pytest.raises(UsageError, match="no parameters"):
        gl.hessian(nn.ReLU(), lambda: torch.zeros(()))


def test_vectors_that_do_not_fit_are_refused():
    model, loss = autoencoder()
    H = gl.hessian(model, loss)
    n = H.shape[0]
    with pytest.raises(UsageError, match=rf"H @ \(3,\): expected a tensor of shape \({n},\)"):
        H @ torch.ones(3, dtype=DOUBLE)
    with pytest.raises(UsageError, match="expected a tensor"):
        H @ [1.0] * n
    with pytest.raises(UsageError, match=r"v is torch.float32 on cpu, H torch.float64"):
        H @ torch.ones(n)


def test_no_product_comes_of_a_matrix_of_no_vectors():
    model, loss = autoencoder()
    H = gl.hessian(model, loss)
    assert (H @ torch.empty(H.shape[0], 0, dtype=DOUBLE)).shape == (H.shape[0], 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_products_are_those_of_the_cpu(self, name):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        model, loss = PROBLEMS[name]()
        here = gl.hessian(model, loss)
        cells = {c.cell_contents: c for c in loss.__closure__ if isinstance(c.cell_contents, torch.Tensor)}
        for tensor, cell in cells.items():
            cell.cell_contents = tensor.cuda()
        there = gl.hessian(model.cuda(), loss)
        for k in (1, 3):
            V = vectors(here, k)
            expected = here @ V
            for _ in range(3):  # captured at the first
                torch.testing.assert_close(
                    (there @ V.cuda()).cpu() / expected.norm(), expected / expected.norm(), rtol=0, atol=1e-10
                )

    def test_float32_keeps_its_accuracy(self):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.manual_seed(0)
        model = PredNet(channels=(3, 8, 16), size=(24, 32))
        frames = torch.rand(6, 1, 3, 24, 32)
        exact = copy.deepcopy(model).double()
        H = gl.hessian(exact, lambda: exact.training_loss(frames.double(), None)[0])
        v = vectors(H)
        model, frames = model.cuda(), frames.cuda()
        found = gl.hessian(model, lambda: model.training_loss(frames, None)[0]) @ v.float().cuda()
        assert (found.double().cpu() - H @ v).norm() < 1e-5 * (H @ v).norm()
