"""Faults planted in training steps for audits to find; `faults()` lists all of them.

Each fault is planted under one of two equivalent settings, or under both settings but only in
float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpulab as gl
from tests.audits._faulty_kernels import WRONG, Kernels, one_number, short_products, under_b
from tests.audits._helpers import NETWORKS, drawn

FEW = slice(0, 1)


@dataclass
class Case:
    """A step with one fault; the weights and data are drawn from `seed`."""

    network: str = "layers"
    seed: int = 0
    model: Callable[[nn.Module], Any] = lambda model: None
    batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y)
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    after_backward: Callable[[nn.Module], Any] = lambda model: None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    def __call__(self, setting: gl.Setting) -> Tensor:
        """Execute the step."""
        make, data = NETWORKS[self.network]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = make()
        model = model.to(setting.dtype)
        x, y = data(self.seed)
        x = x.to(setting.dtype) if x.is_floating_point() else x
        self.model(model)
        optimizer = self.optimizer(model.parameters()) if self.optimizer else None
        x, y = self.batch(x, y)
        loss = self.loss(self.call(model, x), y)
        loss.backward()
        self.after_backward(model)
        if optimizer:
            optimizer.step()
        return loss.detach()


@dataclass
class Fault:
    """A planted fault, the kinds of findings that are correct for it, and words that name its
    place.
    """

    group: str
    what: str
    step: Callable[[gl.Setting], Any]
    place: tuple[str, ...]
    kinds: tuple[str, ...] = ("mismatch",)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


# --- kernels --------------------------------------------------------------------------------------

KERNELS = {
    "layers": (
        "addmm native_layer_norm tanh sigmoid _log_softmax nll_loss_forward mm sigmoid_backward"
        " tanh_backward native_layer_norm_backward _log_softmax_backward_data"
    ),
    "convolutions": (
        "convolution native_batch_norm relu max_pool2d_with_indices silu convolution_backward"
        " silu_backward max_pool2d_with_indices_backward threshold_backward"
        " native_batch_norm_backward"
    ),
    "attention": (
        "embedding add gelu gelu_backward embedding_dense_backward "
        "_scaled_dot_product_flash_attention_for_cpu"
    ),
    "recurrence": "addmm mul_ sigmoid_ tanh_",
}


def kernels() -> Iterator[Fault]:
    for network, names in KERNELS.items():
        for number, name in enumerate(names.split()):
            for what, wrong in WRONG.items():
                always = (number + len(what)) % 3 == 0
                group = f"kernels, {'both sides' if always else 'one side'}"
                around = partial(Kernels, name, wrong, always)
                place = (name.rstrip("_"),)
                kinds = ("mismatch", "not finite") if always and what == "NaN" else ("mismatch",)
                yield Fault(
                    group, f"{name} in {network}: {what}", Case(network), place, kinds, around
                )
    for network, name in (
        ("layers", "addmm"),
        ("layers", "mm"),
        ("convolutions", "convolution"),
        ("attention", "mm"),
    ):
        kinds, around = ("reduced precision",), partial(Kernels, name, short_products, False)
        yield Fault(
            "short products", f"{name} of {network} in TF32", Case(network), (name,), kinds, around
        )


def over(
    group: str,
    changes: dict[str, Any],
    networks: Iterable[str],
    step: Callable[[str, Any], Case],
    place: tuple[str, ...],
    kinds: tuple[str, ...] = ("mismatch",),
    **more: Any,
) -> Iterator[Fault]:
    """Yield a fault for each change in each network."""
    for what, change in changes.items():
        for network in networks:
            yield Fault(group, f"{what} in {network}", step(network, change), place, kinds, **more)


@contextlib.contextmanager
def library() -> Iterator[None]:
    """Define custom operations whose kernels are wrong under B in every precision."""
    with torch.library._scoped_library("planted", "FRAGMENT") as lib:
        lib.define("softer(Tensor x) -> Tensor")
        lib.impl(
            "softer", lambda x: x.tanh() * (1.02 if under_b() else 1.0), "CompositeExplicitAutograd"
        )
        lib.define("scaled(Tensor x, float by) -> Tensor")
        lib.impl(
            "scaled",
            lambda x, by: x * by * (1.001 if under_b() else 1.0),
            "CompositeExplicitAutograd",
        )
        lib.define("written_(Tensor(a!) x) -> Tensor(a!)")
        lib.impl(
            "written_", lambda x: x.mul_(1.01 if under_b() else 1.0), "CompositeExplicitAutograd"
        )
        yield


class Through(torch.autograd.Function):
    """Call a custom operation; its gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        return call(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def custom() -> Iterator[Fault]:
    calls = {
        "softer": lambda x: torch.ops.planted.softer(x),
        "scaled": lambda x: torch.ops.planted.scaled(x, 2.0),
        "written": lambda x: torch.ops.planted.written_(x.clone()),
    }

    def step(network: str, call: Any) -> Case:
        return Case(network, call=lambda model, x: Through.apply(model(x), call))

    networks = ("layers", "convolutions", "recurrence")
    for name, call in calls.items():
        place = (name, "tanh", "mul", "add")
        yield from over("torch.library", {name: call}, networks, step, place, around=library)


# --- the user's code ------------------------------------------------------------------------------


# Gradients of the square that are wrong under B.
GRADIENTS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "nine per cent": lambda g, x, size, wrong: g * x * (2.18 if wrong else 2.0),
    "other tensor": lambda g, x, size, wrong: 2 * g * (size if wrong else x),
    "forgotten factor": lambda g, x, size, wrong: g * x if wrong else 2 * (g * x),
    "NumPy": lambda g, x, size, wrong: torch.from_numpy(
        2 * g.numpy() * x.detach().numpy() * (1.05 if wrong else 1.0)
    ),
    "transposed": lambda g, x, size, wrong: (2 * g * x).flip(0) if wrong else 2 * g * x,
    "zero": lambda g, x, size, wrong: 2 * g * x * (0 if wrong else 1),
}


class WrongGradient(torch.autograd.Function):
    """The square, with a gradient that is wrong under B in one of several ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.save_for_backward(x, x.abs())
        ctx.how = how
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return GRADIENTS[ctx.how](g, *ctx.saved_tensors, under_b()), None


def if_b(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies a change only under B."""
    return lambda *args: change(*args) if under_b() else None


def with_b(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, y: change(x, y) if under_b() else (x, y)


def transposed_parts(h: Tensor) -> Tensor:
    return h.view(-1, 2, 4).transpose(1, 2).reshape(h.shape)


def dilated(model: nn.Module) -> None:
    model[0].dilation, model[0].padding = 2, 2


def untied(model: nn.Module) -> None:
    model.last.weight = nn.Parameter(model.words.weight.detach().clone())


def other_gelu(h: Tensor) -> Tensor:
    return F.gelu(h, approximate="tanh")


def forward_faults() -> Iterator[Fault]:
    def middle(change: Callable[[Tensor], Tensor]) -> Case:
        def call(model: nn.Module, x: Tensor) -> Tensor:
            h = model[:3](x)
            return model[3:](change(h) if under_b() else h)

        return Case("layers", call=call)

    changes: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
        "twice the activation": (torch.tanh, ("tanh",)),
        "one per cent more": (lambda h: 1.01 * h, ("mul",)),
        "an offset": (lambda h: h + 0.01, ("add",)),
        "flipped": (lambda h: h.flip(0), ("flip",)),
        "rolled": (lambda h: h.roll(1, 1), ("roll",)),
        "transposed parts": (transposed_parts, ("transpose", "view", "clone")),
        "in half precision": (lambda h: h.half().to(h.dtype), ("_to_copy",)),
        "clipped": (lambda h: h.clamp(-0.5, 0.5), ("clamp",)),
        "no gradient": (lambda h: h.detach() + 0 * h, ("mul", "add")),
        "some set to zero": (lambda h: h * (torch.arange(h.shape[1]) > 1), ("mul",)),
        "through NumPy": (
            lambda h: h + torch.from_numpy(np.float32(1e-2) * h.detach().numpy()).to(h.dtype),
            ("add",),
        ),
        "negative": (torch.neg, ("neg",)),
    }
    for what, (change, place) in changes.items():
        others = {"in half precision": ("reduced precision",), "through NumPy": ("other data",)}
        kinds = ("mismatch", *others.get(what, ()))
        yield Fault("forward code", what, middle(change), place, kinds)

    def weight(model: nn.Module, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        h = model[:3](x)
        w = model[3].weight
        return model[4:](F.linear(h, change(w) if under_b() else w, model[3].bias))

    for what, change, place in (
        ("a transposed weight", torch.t, ("t", "addmm")),
        ("a shuffled weight", lambda w: w[torch.arange(7, -1, -1)], ("index", "t", "addmm")),
        ("a scaled weight", lambda w: w * 1.001, ("mul",)),
        ("the other layer's weight", lambda w: w.flip(0), ("flip",)),
    ):
        yield Fault(
            "forward code",
            what,
            Case(call=lambda model, x, change=change: weight(model, x, change)),
            place,
        )
    shared = lambda model, x: model[3:](model[2](model[1](model[3 if under_b() else 0](x))))  # noqa: E731
    yield Fault("forward code", "another layer's weight", Case(call=shared), ("addmm", "t"))
    for what, loss, place in (
        (
            "sum for mean",
            lambda o, y: F.cross_entropy(o, y, reduction="sum" if under_b() else "mean"),
            ("nll_loss",),
        ),
        (
            "smoothed labels",
            lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1 if under_b() else 0),
            (),
        ),
        (
            "another axis",
            lambda o, y: F.nll_loss(o.log_softmax(0 if under_b() else 1), y),
            ("_log_softmax",),
        ),
        (
            "a temperature",
            lambda o, y: F.cross_entropy(o / (1.01 if under_b() else 1.0), y),
            ("div",),
        ),
        (
            "a class ignored",
            lambda o, y: F.cross_entropy(o, y, ignore_index=1 if under_b() else -100),
            ("nll_loss",),
        ),
    ):
        for network in ("layers", "convolutions"):
            yield Fault("forward code", f"{what} in {network}", Case(network, loss=loss), place)
    layer_options = {
        "eps": ("layers", if_b(lambda m: setattr(m[1], "eps", 1e-2)), ("native_layer_norm",)),
        "momentum": (
            "convolutions",
            if_b(lambda m: setattr(m[1], "momentum", 0.3)),
            ("native_batch_norm",),
        ),
        "evaluated": ("convolutions", if_b(lambda m: m.eval()), ("native_batch_norm",)),
        "dilation": ("convolutions", if_b(dilated), ("convolution",)),
        "exact gelu": (
            "attention",
            if_b(lambda m: setattr(m.block, "activation", other_gelu)),
            ("gelu",),
        ),
        "norm first": ("attention", if_b(lambda m: setattr(m.block, "norm_first", True)), ()),
        "padding": (
            "attention",
            if_b(lambda m: setattr(m.words, "padding_idx", 3)),
            ("embedding",),
        ),
        "untied": (
            "attention",
            if_b(untied),
            ("gradient", "result", "last.weight", "words.weight"),
        ),
    }
    for what, (network, change, place) in layer_options.items():
        yield Fault("forward code", what, Case(network, model=change), place)
    for what, mask in (("no mask", 8), ("a mask one too far", 2)):

        def call(model: nn.Module, x: Tensor, mask: int = mask) -> Tensor:
            keep = torch.ones(7, 7, dtype=torch.bool).triu(mask if under_b() else 1)
            h = model.words(x) + model.places(torch.arange(7))
            return model.last(model.block(h, src_mask=keep.fill_diagonal_(False))).transpose(1, 2)

        yield Fault("forward code", what, Case("attention", call=call), ("triu",))


def backward_faults() -> Iterator[Fault]:
    group = "backward code"
    place = ("WrongGradient", "mul", "abs", "flip", "_fault_catalogue.py", "_helpers.py")

    def wrong(network: str, how: str) -> Case:
        return Case(network, call=lambda model, x: WrongGradient.apply(model(x), how))

    kinds = ("mismatch", "other data")  # The results of NumPy are data.
    networks = ("layers", "convolutions", "recurrence")
    yield from over(group, {how: how for how in GRADIENTS}, networks, wrong, place, kinds)
    lost = {
        "a bias without gradient": if_b(lambda m: m[0].bias.requires_grad_(False)),
        "a weight without gradient": if_b(lambda m: m[0].weight.requires_grad_(False)),
    }
    yield from over(group, lost, ("layers", "convolutions"), of_the_model, ("0.bias", "0.weight"))
    gradients = {
        "gradient doubled": lambda p: p.grad.mul_(2),
        "gradient clipped": lambda p: p.grad.clamp_(-1e-3, 1e-3),
        "gradient one zero": lambda p: p.grad.view(-1)[FEW].zero_(),
        "gradient None": lambda p: setattr(p, "grad", None),
    }

    def updated(network: str, change: Callable[[Any], Any]) -> Case:
        after = if_b(lambda m: change(next(m.parameters())))
        return Case(network, after_backward=after, optimizer=lambda p: torch.optim.SGD(p, 0.1))

    place = ("mul", "clamp", "zero", "updated", "_foreach_add")
    yield from over(group, gradients, ("layers", "recurrence"), updated, place)


def of_the_model(network: str, change: Callable[[nn.Module], Any]) -> Case:
    """Return a step of a model that is changed first."""
    return Case(network, model=change)


def hook_faults() -> Iterator[Fault]:
    tensors = {
        "of a parameter, scaled": lambda g: g * 1.1 if under_b() else None,
        "of a parameter, zero": lambda g: torch.zeros_like(g) if under_b() else None,
        "of a parameter, noise": lambda g: (
            g + 1e-3 * drawn(*g.shape).to(g.dtype) if under_b() else None
        ),
    }

    def hooked(network: str, hook: Any) -> Case:
        return Case(network, model=lambda m: next(m.parameters()).register_hook(hook))

    place, kinds = (
        ("mul", "zeros_like", "add", "randn", "gradient"),
        ("mismatch", "different random numbers"),
    )
    yield from over("hooks", tensors, NETWORKS, hooked, place, kinds)
    outputs = {
        "of a module, forward": lambda m: m[2].register_forward_hook(
            lambda mod, i, o: o * 1.01 if under_b() else None
        ),
        "of a module, before": if_b(
            lambda m: m[2].register_forward_pre_hook(lambda mod, i: (i[0] * 1.01,))
        ),
        "of a module, backward": if_b(
            lambda m: m[2].register_full_backward_hook(lambda mod, gi, go: (gi[0] * 1.01,))
        ),
    }
    yield from over("hooks", outputs, ("layers", "convolutions"), of_the_model, ("mul",))


def data_faults() -> Iterator[Fault]:
    changes = {
        "flipped": lambda x: x.flip(-1),
        "brighter": lambda x: x * 1.02,
        "one number": one_number,
        "eight bits": lambda x: (x * 64).round() / 64,
        "another batch": lambda x: drawn(*x.shape, seed=9).to(x.dtype),
        "first item twice": lambda x: torch.cat([x[:1], x[:1], x[2:]]),
    }

    def of_inputs(network: str, change: Callable[[Tensor], Tensor]) -> Case:
        return Case(network, batch=with_b(lambda x, y: (change(x), y)))

    kinds = ("mismatch", "different random numbers", "other data")
    yield from over("data", changes, ("layers", "convolutions", "recurrence"), of_inputs, (), kinds)
    for network in NETWORKS:
        shifted = Case(network, batch=with_b(lambda x, y: (x, y.roll(1, 0))))
        yield Fault("data", f"shifted labels in {network}", shifted, ("roll", "nll_loss"))
        reversed_ = Case(
            network, batch=with_b(lambda x, y: (x, torch.from_numpy(y.numpy()[::-1].copy())))
        )
        yield Fault(
            "data",
            f"reversed labels in {network}",
            reversed_,
            ("nll_loss",),
            ("mismatch", "other data"),
        )
    other_words = with_b(lambda x, y: (torch.from_numpy(np.where(x.numpy() == 3, 4, x.numpy())), y))
    other = Case("attention", batch=other_words)
    yield Fault("data", "one word for another", other, ("embedding",), ("mismatch", "other data"))


def state_faults() -> Iterator[Fault]:
    def first(model: nn.Module) -> Tensor:
        return next(model.parameters())

    def changed(network: str, change: Callable[[nn.Module], Any]) -> Case:
        return Case(network, model=if_b(torch.no_grad()(change)))

    changes = {
        "a weight a tenth off": lambda m: first(m).view(-1)[-1:].mul_(1.1),
        "another seed": lambda m: first(m).copy_(drawn(*first(m).shape, seed=3)),
        "weights in bfloat16": lambda m: first(m).copy_(first(m).bfloat16()),
        "a missing layer": lambda m: first(m).zero_(),
    }
    kinds = ("mismatch", "reduced precision", "different random numbers")
    yield from over("state", changes, NETWORKS, changed, (), kinds)
    running = changed("convolutions", lambda m: m[1].running_mean.add_(0.1))
    yield Fault("state", "running mean", running, ("native_batch_norm", "updated", "add"))
    optimizers = {
        "learning rate": lambda p: torch.optim.SGD(p, 0.11 if under_b() else 0.1),
        "momentum": lambda p: torch.optim.Adam(p, 1e-2, betas=(0.8 if under_b() else 0.9, 0.99)),
        "weight decay": lambda p: torch.optim.AdamW(
            p, 1e-2, weight_decay=0.1 if under_b() else 0.0
        ),
        "eps": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3 if under_b() else 1e-8),
        "amsgrad": lambda p: torch.optim.RMSprop(p, 1e-2, alpha=0.9 if under_b() else 0.99),
    }
    named = {f"optimizer: {what}": optimizer for what, optimizer in optimizers.items()}
    place = ("updated", "_foreach", "add", "mul", "addcdiv", "lerp")
    yield from over(
        "state", named, ("layers", "attention"), lambda net, made: Case(net, optimizer=made), place
    )


def faults() -> list[Fault]:
    """Return all faults."""
    groups = (
        kernels,
        custom,
        forward_faults,
        backward_faults,
        hook_faults,
        data_faults,
        state_faults,
    )
    return [fault for group in groups for fault in group()]
