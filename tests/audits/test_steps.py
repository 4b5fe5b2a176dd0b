import copy
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

import gpulab as gl
from tests.audits._helpers import Own, audited, drawn, labels, seeded

SETTINGS = ["cpu", "cpu:precision=float64"]
X, Y = drawn(5, 4), torch.tensor([0, 1, 1, 0, 1])


def plain():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))


def performed(step, setting="cpu"):
    """Execute a step; return the loss and the gradients, after checking that the model is
    unchanged.
    """
    parsed = gl.Setting.parse(setting)
    before = everything(step.model)
    with parsed.apply(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        prepared = step.prepared(parsed)
        assert everything(step.model) == before
        with prepared as once:
            loss = once()
            gradients = {name: parameter.grad for name, parameter in once.model.named_parameters()}
    assert everything(step.model) == before
    return loss, gradients


def by_hand(model, loss, setting="cpu"):
    """Return the same from a copy that is moved explicitly; `loss` is a function of the model."""
    parsed = gl.Setting.parse(setting)
    with parsed.apply(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        there = copy.deepcopy(model).to(parsed.device, parsed.dtype)
        there.zero_grad()
        value = loss(there)
        value.backward()
    return value.detach(), {name: parameter.grad for name, parameter in there.named_parameters()}


def same_bits(one, other):
    """Assert that losses and gradients have the same bits."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def everything(model):
    """Return the state of a model: the identities of its shared objects and the bits of its
    tensors.
    """
    held = []
    for module in model.modules():
        for name, value in vars(module).items():
            held.append((name, id(value)))
            if isinstance(value, dict):
                held.append([(key, id(each)) for key, each in value.items()])
            elif isinstance(value, list):
                held.append([id(each) for each in value])
    for tensor in [*model.parameters(), *model.buffers()]:
        bits = tensor.detach().contiguous().cpu().numpy().tobytes()
        gradient = (
            None if tensor.grad is None else (id(tensor.grad), tensor.grad.cpu().numpy().tobytes())
        )
        held.append(
            (
                id(tensor),
                tensor.data_ptr(),
                tensor.dtype,
                tensor.device,
                tensor.requires_grad,
                bits,
                gradient,
            )
        )
    return held


# --- the model is left as it was ------------------------------------------------------------------


class Remembers(nn.Module):
    """A network with tied weights, and with counters, lists and attributes that the forward pass
    changes.
    """

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.out.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))
        self.seen, self.last, self.cache = [], None, {}

    def forward(self, x):
        self.count += 1
        self.last = self.embedding(x)
        self.seen.append(self.last)
        self.cache[len(self.cache)] = x
        self.late = nn.Parameter(torch.ones(1))
        self.eval()
        return self.out(self.last) * self.count


def with_gradients():
    model = plain()
    model(X).sum().backward()
    model[0].weight.requires_grad_(False)
    return model


def mixed():
    model = nn.Sequential(
        nn.Linear(4, 4).half(), nn.BatchNorm1d(4).double(), nn.Dropout(), nn.Linear(4, 2)
    )
    model[3].bias.requires_grad_(False)
    return model


MODELS = {
    "plain": (plain, X),
    "with gradients": (with_gradients, X),
    "of several types": (mixed, X),
    "that remembers": (Remembers, Y),
    "an LSTM": (lambda: nn.LSTM(4, 3, 2), X[:, None]),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 2))), X),
    "compiled": (lambda: torch.compile(plain(), backend="eager"), X),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_step_gives_the_bits_of_a_moved_copy_and_leaves_the_model(name, setting):
    make, batch = MODELS[name]
    model, dtype = make(), gl.Setting.parse(setting).dtype
    inputs = batch.to(dtype) if batch.is_floating_point() else batch

    def loss(there):
        output = there(inputs)
        return (output[0] if isinstance(output, tuple) else output).square().mean()

    same_bits(performed(gl.Step(model, batch), setting), by_hand(model, loss, setting))


@pytest.mark.parametrize(
    ("precision", "rel"), [("float32", 1e-6), ("float64", 1e-13), ("bfloat16", 1e-2)]
)
def test_step_keeps_complex_parameters_complex(precision, rel):
    model = Own(lambda x: (x[:, :2] * model.turn).abs())
    model.turn = nn.Parameter(torch.tensor([0.5 + 2j, 1 - 1j]))
    loss, _ = performed(gl.Step(model, X), f"cpu:precision={precision}")
    wanted = (X[:, :2].double() * model.turn.to(torch.complex128)).abs().square().mean()
    assert loss.item() == pytest.approx(wanted.item(), rel=rel)


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_step_leaves_the_model_as_it_was_after_an_error(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(X).sum().backward()

    def fail(*_):
        raise KeyboardInterrupt

    if where == "forward":
        model[1].register_forward_hook(fail)
    elif where == "backward":
        model[0].weight.register_hook(fail)
    step, before = (
        gl.Step(model, (X, X), fail if where == "loss" else F.mse_loss),
        everything(model),
    )
    with pytest.raises(KeyboardInterrupt):
        step(gl.Setting.parse("cpu:precision=float64"))
    assert everything(model) == before


# --- hooks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [*SETTINGS, "cpu:precision=bfloat16"])
def test_step_keeps_hooks_on_parameters_active(setting):
    def clear(parameter):
        seen.append(parameter)
        parameter.grad.zero_()

    model, seen = plain(), []
    bare = performed(gl.Step(plain(), (X, Y), F.cross_entropy), setting)[1]
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    model[2].bias.register_post_accumulate_grad_hook(clear)
    for _ in range(2):  # the hooks remain
        hooked = performed(gl.Step(model, (X, Y), F.cross_entropy), setting)[1]
    wanted = bare | {"0.weight": 2 * bare["0.weight"], "2.bias": torch.zeros_like(bare["2.bias"])}
    assert all(torch.equal(hooked[name], gradient) for name, gradient in wanted.items())
    assert [parameter is model[2].bias for parameter in seen] == [True, True], (
        "the parameter itself, not a copy"
    )


# --- batches and losses of every form -------------------------------------------------------------


class Classifier(nn.Module):
    """A model that takes labels and returns an object, a dictionary, a tuple or only the loss."""

    def __init__(self, form="object"):
        super().__init__()
        self.net, self.form = seeded(lambda: nn.Linear(4, 3)), form

    def forward(self, values, labels=None):
        logits = self.net(values)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        named = {"logits": logits, "loss": loss}
        forms = {"object": SimpleNamespace(**named), "dict": named, "tuple": (loss, logits)}
        return forms.get(self.form, loss)


class Whole(Classifier):
    """A model that takes a dictionary as its only argument."""

    def forward(self, batch):
        return self.net(batch["nested"]["values"][0])


def of_all(out, batch):
    return F.cross_entropy(getattr(out, "logits", out), batch["classes"])


RIGHT = {
    "keywords, a dict": (Classifier("dict"), {"values": X, "labels": Y}, None),
    "keywords, a tuple": (Classifier("tuple"), {"values": X, "labels": Y}, None),
    "keywords, the loss alone": (Classifier("alone"), {"values": X, "labels": Y}, None),
    "keywords of a tokenizer": (Classifier(), UserDict(values=X, labels=Y), None),
    "the loss gets all of the batch": (Classifier(), {"values": X, "classes": Y, "id": 7}, of_all),
    "keywords and labels": (
        Classifier(),
        ({"values": X}, Y),
        lambda out, labels: F.cross_entropy(out.logits, labels),
    ),
    "a dict as one argument": (Whole(), {"nested": {"values": [X]}, "classes": Y}, of_all),
}


@pytest.mark.parametrize("name", RIGHT)
def test_step_takes_batches_and_losses_of_every_form(name):
    model, batch, loss = RIGHT[name]
    wanted = by_hand(model, lambda there: F.cross_entropy(there.net(X), Y))
    same_bits(performed(gl.Step(model, batch, loss)), wanted)


class Detector(nn.Linear):
    def forward(self, x):
        return {"classes": super().forward(x).mean(), "boxes": super().forward(x).square().mean()}


WRONG = {
    "losses of several names": (
        Detector(4, 2),
        X,
        None,
        r"loss of Detector is unclear: it returned a dict with \['classes'",
    ),
    "an object without a loss": (
        Classifier(),
        {"values": X},
        None,
        "Classifier is unclear.* loss=",
    ),
    "keywords unknown": (
        Classifier(),
        {"values": X, "classes": Y},
        None,
        r"expected .* of Classifier \(.*, got classes",
    ),
    "a pair without a loss": (plain(), (X, Y), None, r"received a pair .* pass loss="),
    "a tensor with a loss": (
        plain(),
        X,
        F.mse_loss,
        r"expected \(inputs, targets\) .* got a Tensor",
    ),
    "three with a loss": (plain(), (X, X, X), F.mse_loss, "a tuple of 3"),
    "a loader": (
        plain(),
        DataLoader(TensorDataset(X, Y)),
        F.cross_entropy,
        "DataLoader; pass its first batch",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_step_refuses_batches_and_losses_that_do_not_fit(name):
    model, batch, loss, words = WRONG[name]
    before = everything(model)
    with pytest.raises(gl.UsageError, match=words):
        gl.Step(model, batch, loss)(gl.Setting.parse("cpu"))
    assert everything(model) == before


class LossWithWeights(nn.Module):
    """A loss with a layer of its own, as in metric learning."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, output, target):
        return F.cross_entropy(self.layer(output), target)


@pytest.mark.parametrize("b", ["cpu:threads=1", "cpu:precision=float64"])
def test_audit_accepts_a_loss_with_weights_and_restores_them(b):
    loss = seeded(LossWithWeights)
    before = loss.layer.weight.detach().clone()
    step = gl.Step(seeded(lambda: nn.Linear(8, 8)), (drawn(16, 8), labels(16)), loss)
    report = audited(step, b=b)
    assert (report.kind, report.faulty) == ("rounding", False), str(report)
    assert loss.layer.weight.grad is None
    assert loss.layer.weight.equal(before)


@pytest.mark.parametrize("b", ["cpu:threads=1", "cpu:precision=float64"])
def test_audit_accepts_a_batch_that_requires_a_gradient_and_leaves_it(b):
    inputs = drawn(16, 8).requires_grad_()
    step = gl.Step(seeded(lambda: nn.Linear(8, 4)), (inputs, labels(16)), F.cross_entropy)
    report = audited(step, b=b)
    assert (report.kind, report.faulty) == ("rounding", False), str(report)
    assert inputs.grad is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_step_moves_the_model_to_the_gpu_and_back():
    for make, batch in (MODELS["that remembers"], MODELS["an LSTM"], MODELS["of several types"]):
        for here, setting in (
            ("cpu", "cuda:tf32=off"),
            ("cuda", "cpu"),
            ("cuda", "cuda:precision=float64"),
        ):
            model = make().to(here)
            loss, gradients = performed(gl.Step(model, batch.to(here)), setting)
            kinds = {
                gradient.device.type for gradient in gradients.values() if gradient is not None
            }
            assert {loss.device.type} == kinds == {setting.partition(":")[0]}


@pytest.mark.parametrize("setting", ["cpu:precision=float64", "cpu:precision=bfloat16"])
def test_step_function_draws_the_same_weights_with_and_without_an_audit(setting):
    drawn_types = set()

    def step(setting):
        layer = nn.Linear(4, 2)
        drawn_types.add((layer.weight.dtype, torch.get_default_dtype()))
        layer.to(setting.device, setting.dtype)(X.to(setting.dtype)).sum().backward()

    report = gl.audit(step, "cpu", setting, progress=False)
    assert drawn_types == {(torch.float32, torch.float32)}
    assert "different random numbers" not in {finding.kind for finding in report.findings}
    assert not report.faulty


def test_step_function_without_setting_gets_its_precision_as_default_dtype():
    types = set()

    def step():
        x = torch.ones(3, requires_grad=True)
        types.add(x.dtype)
        x.exp().sum().backward()

    gl.audit(step, "cpu", "cpu:precision=float64", progress=False)
    assert types == {torch.float32, torch.float64}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("setting", ["cpu:precision=float64", "cpu:precision=bfloat16"])
def test_step_function_that_a_setting_does_not_fit_is_refused_with_the_line(setting):
    def step(setting):
        weight = torch.ones(4, 2, requires_grad=True)
        (X.to(setting.dtype) @ weight).sum().backward()

    with pytest.raises(
        gl.errors.UsageError, match=r"\(at test_steps\.py:\d+: \(X\.to\(setting\.dtype\) @ weight\)"
    ):
        gl.record(step, setting, progress=False)
