"""The float64 reference of each value is the result of the same step in float64.

The oracle is the same program, called with torch.float64 and without a tracer. Tensors are small,
so that traces keep all of their numbers.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpulab as gl
from gpulab._torch_internals import storage_identity
from tests.audits._helpers import labels, recorded, seeded

CLOSE = 1e-12  # relative to the largest number of a tensor


def drawn(*shape, seed=0):
    """Draw the same numbers for any default type of torch."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def flat(tensor):
    """Return the numbers of a tensor as a flat array, with alternating real and imaginary parts."""
    tensor = tensor.detach()
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return numbers.double().reshape(-1).numpy()


def results_of(program, setting="cpu"):
    """Record a program under a setting; return the values of its results by name."""
    trace = recorded(lambda where: program(where.dtype) | {"more": torch.ones(1)}, setting)
    returned = [
        op for op in trace.operations if op.phase == "result" and op.name.startswith("result")
    ]
    values = {
        op.name.removeprefix("result ['").removesuffix("']"): trace.values[op.outputs[0]]
        for op in returned
    }
    del values["more"]
    return values


def check(program, setting="cpu", exact=True):
    """Compare the references of a program's results with the results of the program in float64.

    Args:
        program: A function of a type that returns a dictionary of tensors.
        setting: The setting of the recording. The recorded numbers must differ from the references.
        exact: Whether the references must be marked as computed entirely in float64.
    """
    values = results_of(program, setting)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        expected = program(torch.float64)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        tensor = expected[name]
        assert tensor.numel() <= 64, f"{name} is too large to be recorded completely"
        assert value.exact or not exact, f"{name} is not exact"
        size = np.abs(flat(tensor)).max()
        np.testing.assert_allclose(
            value.reference, flat(tensor), rtol=CLOSE, atol=CLOSE * size, err_msg=name
        )
    assert max(value.deviation for value in values.values()) > 1e-9, (
        "the recorded numbers equal those of float64"
    )


# --- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": lambda parameters, **form: torch.optim.AdamW(
        parameters, lr=0.01, weight_decay=0.1, **form
    ),
    "SGD": lambda parameters, **form: torch.optim.SGD(
        parameters, 0.1, 0.9, weight_decay=0.01, nesterov=True, **form
    ),
    "RMSprop": lambda parameters, **form: torch.optim.RMSprop(
        parameters, lr=0.01, momentum=0.5, centered=True, **form
    ),
    "Adagrad": lambda parameters, **form: torch.optim.Adagrad(
        parameters, lr=0.1, lr_decay=0.1, **form
    ),
}
FORMS = {
    "one by one": {"foreach": False},
    "in lists": {"foreach": True},
    "in one kernel": {"fused": True},
}


PERCEPTRON = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
CONVOLUTIONS = seeded(
    lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.GELU(), nn.Flatten(), nn.Linear(32, 2)
    )
)
NORMALISED = seeded(
    lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
)
LSTMS = {
    "of one layer": seeded(lambda: nn.LSTM(2, 3)),
    "of two layers": seeded(lambda: nn.LSTM(2, 3, 2)),
    "of two directions": seeded(lambda: nn.LSTM(2, 3, bidirectional=True)),
    "without biases": seeded(lambda: nn.LSTM(2, 3, bias=False)),
    "with the batch first": seeded(lambda: nn.LSTM(2, 3, batch_first=True)),
}


def moved(model, dtype):
    return copy.deepcopy(model).to(dtype)


def trained(model, loss, optimizer=None, updates=3):
    """Return the tensors of a model and its optimizer after some updates."""
    optimizer = (
        torch.optim.SGD(model.parameters(), 0.1)
        if optimizer is None
        else optimizer(model.parameters())
    )
    for _ in range(updates):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
    held = {
        "loss": value.detach(),
        **{name: tensor.detach() for name, tensor in model.state_dict().items()},
    }
    for number, state in enumerate(optimizer.state.values()):
        held |= {
            f"{key} of {number}": tensor
            for key, tensor in state.items()
            if isinstance(tensor, torch.Tensor)
        }
    return held


UPDATES = [
    (name, form)
    for name in OPTIMIZERS
    for form in FORMS
    if (name, form) != ("RMSprop", "in one kernel")
]


@pytest.mark.parametrize(("name", "form"), UPDATES)
def test_references_follow_an_optimizer_over_three_updates(name, form):
    def program(dtype):
        model = moved(PERCEPTRON, dtype)

        def loss(net):
            return F.cross_entropy(net(drawn(5, 4).to(dtype)), labels(5))

        return trained(model, loss, lambda parameters: OPTIMIZERS[name](parameters, **FORMS[form]))

    check(program)


@pytest.mark.parametrize("foreach", [False, True])
def test_references_follow_the_clipping_of_gradients(foreach):
    def program(dtype):
        model = moved(PERCEPTRON, dtype)
        F.cross_entropy(model(drawn(5, 4).to(dtype)), labels(5)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
        return {"norm": norm} | {
            name: parameter.grad for name, parameter in model.named_parameters()
        }

    check(program)


@pytest.mark.parametrize("in_lists", [False, True])
def test_references_follow_averaged_weights(in_lists):
    def program(dtype):
        weights = [drawn(3, 4, seed=seed).to(dtype) for seed in range(3)]
        averages = [torch.zeros_like(weight) for weight in weights]
        for _ in range(3):
            for weight in weights:
                weight.mul_(1.1)
            if in_lists:
                torch._foreach_lerp_(averages, weights, 0.3)
            else:
                for average, weight in zip(averages, weights, strict=True):
                    average.lerp_(weight, 0.3)
        return {str(number): average for number, average in enumerate(averages)}

    check(program)


# --- settings that round --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", ["cpu:precision=bfloat16", "cpu:autocast=bfloat16", "cpu:emulate=tf32"]
)
def test_references_do_not_depend_on_what_a_setting_rounds(setting):
    """The references are the results in float64 from float32 weights."""

    def program(dtype):
        model = moved(CONVOLUTIONS, dtype)
        model(drawn(3, 1, 4, 4).to(dtype)).square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    check(program, setting)
    deviations = [value.deviation for value in results_of(program, setting).values()]
    assert max(deviations) > 1e-5, "the setting rounded nothing"


def test_references_of_a_step_are_those_of_the_float32_weights():
    """A Step is moved to the setting before it begins; its references start from the unmoved
    weights.
    """
    model, x = PERCEPTRON, drawn(5, 4)
    traces = [
        recorded(gl.Step(model, x), setting)
        for setting in ("cpu:precision=float64", "cpu:precision=bfloat16")
    ]
    exact, short = (
        {op.name + op.module: op for op in t.operations if op.phase == "result"} for t in traces
    )
    assert len(exact) == 5
    assert exact.keys() == short.keys()
    for name, op in exact.items():
        values = [
            trace.values[one.outputs[0]]
            for trace, one in zip(traces, (op, short[name]), strict=True)
        ]
        np.testing.assert_allclose(values[1].reference, values[0].sketch, rtol=CLOSE, atol=CLOSE)
        assert values[1].deviation > 1e-4


# --- layers ---------------------------------------------------------------------------------------


def test_references_follow_running_statistics():
    def program(dtype):
        x = drawn(6, 3).to(dtype)
        model = moved(NORMALISED, dtype)
        model(x + 1)
        return trained(model, lambda net: net(x).square().mean()) | {"evaluated": model.eval()(x)}

    check(program)


DROPOUTS = {
    "of numbers": lambda x: F.dropout(x, 0.3),
    "of channels": lambda x: F.dropout1d(x, 0.3),
    "in evaluation": lambda x: F.dropout(x, 0.3, training=False),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_references_drop_the_same_numbers(name):
    """The masks are read from the recorded numbers, because float64 would draw different ones."""
    masks = []

    def program(dtype):
        given = iter(masks[-2:])  # masks of the last execution

        def drop(x):
            if dtype == torch.float64:
                return x * next(given)
            y = DROPOUTS[name](x)
            masks.append((y.detach() != 0).double() / (1.0 if name == "in evaluation" else 0.7))
            return y

        x = drawn(6, 5).to(dtype).requires_grad_()
        y = drop(drop(x.sin()).exp())
        y.square().sum().backward()
        return {"y": y.detach(), "gradient": x.grad}

    check(program)


def test_references_follow_what_checkpointing_computes_again():
    def program(dtype):
        model = moved(PERCEPTRON, dtype)

        def loss(net):
            return (
                checkpoint(net, drawn(5, 4).to(dtype).requires_grad_(), use_reentrant=False)
                .square()
                .mean()
            )

        return trained(model, loss)

    check(program)


@pytest.mark.parametrize("name", LSTMS)
def test_references_follow_an_lstm(name):
    """The oneDNN kernel has no float64 version."""

    def program(dtype):
        lstm = moved(LSTMS[name], dtype)
        x = drawn(4, 2, 2).to(dtype).requires_grad_()
        outputs, (hidden, cell) = lstm(x)
        (outputs.square().sum() + hidden.sum() + cell.sin().sum()).backward()
        gradients = {name: parameter.grad for name, parameter in lstm.named_parameters()}
        return {"outputs": outputs.detach(), "cell": cell.detach(), "x": x.grad} | gradients

    check(program)
    trace = recorded(lambda where: program(where.dtype))
    names = {op.name for op in trace.operations}
    assert {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"} <= names
    assert not trace.without_reference


def attention(query_heads=2, heads=2, queries=3, keys=3, **options):
    """Return a program with scaled dot-product attention and the mask that the options name."""
    mask = options.pop("mask", None)

    def program(dtype):
        shapes = (query_heads, queries), (heads, keys), (heads, keys)
        q, k, v = (
            drawn(1, h, n, 4, seed=s).to(dtype).requires_grad_() for s, (h, n) in enumerate(shapes)
        )
        given = options | (
            {}
            if mask is None
            else {"attn_mask": mask if mask.dtype == torch.bool else mask.to(dtype)}
        )
        y = F.scaled_dot_product_attention(q, k, v, **given)
        y.backward(drawn(*y.shape, seed=3).to(dtype))
        return {"y": y.detach(), "q": q.grad, "k": k.grad, "v": v.grad}

    return program


SEEN = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
ATTENTIONS = {
    "plain": attention(),
    "causal": attention(is_causal=True),
    "causal of more keys": attention(keys=5, is_causal=True),
    "scaled": attention(scale=0.3),
    "with a mask of truth values": attention(mask=SEEN),
    "with an additive mask": attention(mask=drawn(3, 3)),
    "with a mask for each head": attention(mask=drawn(1, 2, 3, 3)),
    "with shared heads": attention(query_heads=4, enable_gqa=True),
    "causal with shared heads": attention(query_heads=4, is_causal=True, enable_gqa=True),
}


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("setting", ["cpu", "cpu:precision=bfloat16"])
def test_references_follow_attention(name, setting):
    check(ATTENTIONS[name], setting)


def test_references_follow_an_additive_mask_that_is_learnt():
    def program(dtype):
        q, k, v = (drawn(1, 2, 3, 4, seed=seed).to(dtype).requires_grad_() for seed in range(3))
        mask = drawn(3, 3, seed=3).to(dtype).requires_grad_()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y.backward(drawn(*y.shape, seed=4).to(dtype))
        return {"y": y.detach(), "mask": mask.grad, "q": q.grad}

    check(program)


# --- memory ---------------------------------------------------------------------------------------


def into_a_slice(x):
    buffer = torch.zeros_like(x)
    buffer[1:] += x[1:] / 3
    buffer[:, 0] = x[:, 1] / 7
    return buffer


def into_the_whole(x):
    h = x / 3
    h.mul_(h.sin()).add_(x, alpha=0.1).clamp_(min=0.0)
    return h


def by_scattering(x):
    places = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(4, 6)
    return (x / 3).scatter_(1, places, x / 7).scatter_add_(0, places % 4, x.exp())


def by_indices(x):
    h = x / 3
    h.index_put_((torch.tensor([0, 2, 2]), torch.tensor([1, 3, 3])), x[0, :3] / 7, accumulate=True)
    h[torch.tensor([3, 1])] = x[:2].exp()
    h[h > 1] = 0.1
    return h.index_add_(0, torch.tensor([0, 0, 1]), x[1:] / 9)


def through_views_of_views(x):
    h = x / 3
    whole = h.view(2, 12)
    part = whole.T[2:].unflatten(0, (2, 5))[1]
    part.mul_(1 / 7)
    whole.diagonal().sub_(0.1)
    return h


def transposed(x):
    h = (x / 3).T
    h.add_(x.T.contiguous().sin())
    return h.flip(0).T @ h.contiguous()


def expanded(x):
    row = (x[0] / 3).expand(4, 6)
    return row * x + row.sum(0) + x[:, :1].expand_as(x).clone().mul_(0.1)


def of_complex_numbers(x):
    z = torch.complex(x / 3, x / 7)
    z.imag.mul_(0.1)
    turned = torch.polar(torch.ones(4, 6, dtype=x.dtype), x / 9)
    z[1:] *= turned[1:]
    return torch.view_as_real(torch.fft.fft(z @ z.mH))


def conjugated_and_negated(x):
    z = torch.complex(x / 3, x / 7)
    return (z.conj() * z).real + z.conj().imag * 0.1 - (z.mH.imag + 0.1).T


def by_setting_data(x):
    h = x / 3
    h.data = x.sin() / 7
    return h * 0.1


def by_results_written_to(x):
    out = torch.empty_like(x)
    torch.mul(x, 1 / 3, out=out)
    return torch.sub(out, x.sin(), out=out)


def by_looking_at_real_parts(x):
    pairs = (x / 3).view(4, 3, 2)
    z = torch.view_as_complex(pairs)
    z.mul_(0.1 + 0.2j)
    return pairs


MEMORY = (
    *(
        into_a_slice,
        into_the_whole,
        by_scattering,
        by_indices,
        through_views_of_views,
        transposed,
        expanded,
    ),
    *(
        of_complex_numbers,
        conjugated_and_negated,
        by_setting_data,
        by_results_written_to,
        by_looking_at_real_parts,
    ),
)


@pytest.mark.parametrize("function", MEMORY, ids=lambda function: function.__name__)
def test_references_follow_in_place_writes(function):
    check(lambda dtype: {"y": function(drawn(4, 6).to(dtype))})


@pytest.mark.parametrize(
    "function", [into_a_slice, by_scattering, by_indices, expanded, of_complex_numbers]
)
def test_references_follow_the_backward_pass_of_in_place_writes(function):
    def program(dtype):
        x = drawn(4, 6).to(dtype).requires_grad_()
        function(x).square().sum().backward()
        return {"gradient": x.grad}

    check(program)


def test_references_follow_numbers_that_the_program_reads():
    def program(dtype):
        x = drawn(4, 6).to(dtype)
        mean = (x / 3).mean().item()
        return {"product": x * mean, "number": torch.full((2,), mean, dtype=dtype)}

    check(program)


@pytest.mark.xfail(
    strict=True,
    reason="a constant that equals a number that was read gets the reference of that number",
)
def test_references_leave_constants_as_they_are():
    """The program reads a bfloat16 mean of 0.5, whose reference is a different number, and halves a
    value.
    """

    def program(dtype):
        x = torch.full((4,), 0.5013, dtype=torch.float32).to(dtype)
        mean = x.mean().item()
        return {"half": drawn(6).to(dtype) * 0.5, "mean": torch.full((2,), mean, dtype=dtype)}

    check(program, "cpu:precision=bfloat16")


def test_references_are_read_again_where_numpy_has_written():
    """NumPy writes float32 numbers in the middle of a step."""

    def program(dtype):
        memory = torch.zeros(6, dtype=dtype)
        before = (memory + 1) / 3
        memory.numpy()[:] = drawn(6).numpy()
        after = memory / 3
        memory.numpy()[2:4] = 5.0
        return {"before": before, "after": after, "later": memory / 7}

    check(program, exact=False)


def test_references_of_other_views_are_read_again_where_numpy_has_written():
    """The view that is used first covers only a part of the written memory."""

    def program(dtype):
        memory = drawn(6).to(dtype)
        part = memory[2:]
        before = part / 3 + memory[:4] / 3
        memory.numpy()[:] = drawn(6, seed=1).numpy()
        return {"before": before, "part": part / 7, "whole": memory / 7}

    check(program, exact=False)


def test_references_of_a_storage_are_not_those_of_one_before_at_its_address():
    storages = []

    def program(dtype):
        total = torch.zeros(16, dtype=dtype)
        for number in range(200):
            part = torch.full((16,), number + 0.5, dtype=dtype) / 3
            storages.append(storage_identity(part.untyped_storage()))
            total += part.sin_()
            del part
            other = torch.from_numpy(
                np.full(16, number / 8, dtype=str(dtype).removeprefix("torch."))
            )
            storages.append(storage_identity(other.untyped_storage()))
            total += other * 0.1
            del other
        return {"total": total}

    check(program)
    assert len(set(storages)) < len(storages), "no address was reused"


@pytest.mark.parametrize("fill", ["normal_", "uniform_"])
@pytest.mark.parametrize("count", [3, 64])
def test_references_of_random_fills_in_bfloat16_are_the_float32_draws(fill, count):
    """A bfloat16 model draws the same numbers as a float32 model, rounded."""

    def program(dtype):
        h = torch.empty(count, dtype=dtype if dtype == torch.bfloat16 else torch.float32)
        return {"h": getattr(h, fill)().to(dtype) / 3}

    check(program, "cpu:precision=bfloat16")
