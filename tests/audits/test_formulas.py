"""Formulas for kernels without a float64 version agree with autograd on other operations."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpulab._torch_internals import named_arguments
from gpulab.audits._formulas import FORMULAS, attend
from tests.audits._helpers import drawn

aten = torch.ops.aten
PREFIX = "_scaled_dot_product_"


def called(name, *args, **kwargs):
    """Apply the formula of an operation to the arguments of a call."""
    operation = getattr(aten, name).default
    return FORMULAS[name](named_arguments(operation, args, kwargs))


def assert_close(found, expected):
    assert (found is None) == (expected is None)
    if expected is not None:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- attention ------------------------------------------------------------------------------------


def random_call(seed, causal=False, shared=False, mask=None):
    """Draw a query, key, value, mask and gradient of the result, of random sizes."""
    draws = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (6,), generator=draws).tolist()
    batch, heads, queries, keys, width, width_of_values = sizes
    shapes = [
        (3 * heads if shared else heads, queries, width),
        (heads, keys, width),
        (heads, keys, width_of_values),
    ]
    q, k, v = (
        drawn(batch, *shape, seed=seed + n).double().requires_grad_()
        for n, shape in enumerate(shapes)
    )
    scores = batch, shapes[0][0], queries, keys
    masks = {
        None: lambda: None,
        "truth values": lambda: torch.rand(scores, generator=draws) < 0.6,
        "one for all heads": lambda: torch.rand(scores[2:], generator=draws) < 0.6,
        "numbers": lambda: torch.randn(scores, generator=draws).double(),
        "numbers and infinity": lambda: torch.where(
            torch.rand(scores, generator=draws) < 0.4, -math.inf, 0.3
        ).double(),
        "nothing to be seen": lambda: torch.zeros(scores, dtype=torch.bool),
    }
    gradient = drawn(batch, scores[1], queries, width_of_values, seed=seed + 9).double()
    return q, k, v, masks[mask](), gradient, {"is_causal": causal, "scale": [None, 0.3][seed % 2]}


def by_autograd(q, k, v, mask, gradient, options):
    """Compute the result, and the gradients of query, key and value, by elementary torch
    operations.
    """
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1], **options
        )
    return y.detach(), *torch.autograd.grad(y, (q, k, v), gradient)


def without_graph(*tensors):
    return [t.detach() if isinstance(t, torch.Tensor) else t for t in tensors]


def forward_call(kernel, q, k, v, mask, causal, scale):
    """Return the arguments of a kernel."""
    q, k, v = without_graph(q, k, v)
    if kernel in ("efficient_attention", "cudnn_attention"):
        return (q, k, v, mask, True, 0.0, causal), {"scale": scale}
    options = {"attn_mask": mask} if kernel == "flash_attention_for_cpu" else {}
    return (q, k, v, 0.0, causal), {"scale": scale, **options}


def backward_call(kernel, gradient, q, k, v, mask, causal, scale, asked=False):
    """Return the arguments of the backward pass of a kernel.

    NaN replaces the values saved by the forward pass, so that a formula cannot use them.
    """
    q, k, v = without_graph(q, k, v)
    out, note = torch.full_like(gradient, math.nan), torch.full((), math.nan)
    if kernel == "flash_attention_for_cpu":
        return (gradient, q, k, v, out, note, 0.0, causal), {"attn_mask": mask, "scale": scale}
    if kernel == "efficient_attention":
        wanted = [True, True, True, asked]
        return (gradient, q, k, v, mask, out, note, note, note, 0.0, wanted, causal), {
            "scale": scale
        }
    lengths = None, None, q.shape[2], k.shape[2]
    if kernel == "flash_attention":
        return (gradient, q, k, v, out, note, *lengths, 0.0, causal, note, note), {"scale": scale}
    return (gradient, q, k, v, out, note, note, note, mask, *lengths, 0.0, causal), {"scale": scale}


KERNELS = "efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu"
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "shared heads": {"shared": True},
    "causal with shared heads": {"causal": True, "shared": True},
    **{
        f"mask of {mask}": {"mask": mask}
        for mask in (
            "truth values",
            "one for all heads",
            "numbers",
            "numbers and infinity",
            "nothing to be seen",
        )
    },
}


TAKEN = [
    (kernel, call)
    for kernel in KERNELS
    for call in CALLS
    if "mask" not in call or kernel != "flash_attention"
]


@pytest.mark.parametrize(("kernel", "call"), TAKEN)
def test_formulas_of_attention_are_right_forwards_and_backwards(kernel, call):
    for seed in range(8):
        q, k, v, mask, gradient, options = random_call(seed, **CALLS[call])
        expected, *gradients = by_autograd(q, k, v, mask, gradient, options)
        args, kwargs = forward_call(kernel, q, k, v, mask, options["is_causal"], options["scale"])
        (found,) = called(f"{PREFIX}{kernel}", *args, **kwargs)
        assert_close(found, expected)
        args, kwargs = backward_call(
            kernel, gradient, q, k, v, mask, options["is_causal"], options["scale"]
        )
        of_query, of_key, of_value, of_mask = called(f"{PREFIX}{kernel}_backward", *args, **kwargs)
        for found, right in zip((of_query, of_key, of_value), gradients, strict=True):
            assert_close(found, right)
        assert of_mask is None


@pytest.mark.parametrize("shape", [(2, 2, 3, 4), (1, 1, 3, 4), (3, 4), (2, 1, 1, 4)])
def test_attention_formula_gives_the_gradient_of_an_additive_mask_of_any_shape(shape):
    q, k, v = (
        drawn(2, 2, n, 5, seed=seed).double().requires_grad_() for seed, n in enumerate((3, 4, 4))
    )
    mask, gradient = (
        drawn(*shape, seed=3).double().requires_grad_(),
        drawn(2, 2, 3, 5, seed=4).double(),
    )
    (expected,) = torch.autograd.grad(
        (q @ k.mT / math.sqrt(5) + mask).softmax(-1) @ v, mask, gradient
    )
    args, kwargs = backward_call(
        "efficient_attention", gradient, q, k, v, mask.detach(), False, None, asked=True
    )
    assert_close(called(f"{PREFIX}efficient_attention_backward", *args, **kwargs)[3], expected)


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_formula_with_causal_mask_aligns_first_query_and_key_like_the_cpu_kernel(
    lengths, dtype
):
    queries, keys = lengths
    q, k, v = (
        drawn(1, 1, n, 4, seed=seed).to(dtype) for seed, n in enumerate((queries, keys, keys))
    )
    kernel = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    found = attend({"query": q.double(), "key": k.double(), "value": v.double(), "is_causal": True})
    torch.testing.assert_close(
        found, kernel.double(), rtol=0, atol=1e-6 if dtype == torch.float32 else 0.02
    )
    assert_close(found[:, :, 0], v[:, :, 0].double())


def test_attention_formula_leaves_fully_masked_rows_zero_like_the_cpu_kernel():
    q, k, v = (drawn(1, 1, 3, 4, seed=seed) for seed in range(3))
    mask = torch.zeros(3, 3).masked_fill(torch.tensor([[False], [True], [False]]), -math.inf)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)[
        0
    ]
    found = attend(
        {"query": q.double(), "key": k.double(), "value": v.double(), "attn_mask": mask.double()}
    )
    assert not found[0, 0, 1].any()
    torch.testing.assert_close(found.float(), kernel)


def test_attention_formula_refuses_dropout():
    x = torch.ones(1, 1, 2, 2).double()
    with pytest.raises(NotImplementedError):
        attend({"query": x, "key": x, "value": x, "dropout_p": 0.1})


# --- LSTM -----------------------------------------------------------------------------------------

TIMES, BATCH, INPUTS, WIDTH = 4, 3, 2, 5
LSTM = 2


def lstm_call(seed, has_biases):
    """Draw the input, weights, biases and states of a float64 layer, as leaves."""
    weights = [drawn(4 * WIDTH, n, seed=seed + n).double() for n in (INPUTS, WIDTH)]
    biases = [
        drawn(4 * WIDTH, seed=seed + n).double() if has_biases else torch.zeros(4 * WIDTH).double()
        for n in (7, 8)
    ]
    x = drawn(TIMES, BATCH, INPUTS, seed=seed).double()
    states = [drawn(BATCH, WIDTH, seed=seed + n).double() for n in (10, 11)]
    return [t.requires_grad_() for t in (x, *weights, *biases, *states)]


def by_cells(x, *others, reverse):
    """Compute the outputs and the last states with one cell for each time step."""
    *weights, hidden, cell = others
    layer = nn.LSTMCell(INPUTS, WIDTH, dtype=torch.float64)
    names = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
    outputs = {}
    for time in reversed(range(TIMES)) if reverse else range(TIMES):
        given = x[time], (hidden, cell)
        hidden, cell = torch.func.functional_call(
            layer, dict(zip(names, weights, strict=True)), given
        )
        outputs[time] = hidden
    return torch.stack([outputs[time] for time in range(TIMES)]), hidden, cell


def options(has_biases):
    """Return mode, width, number of layers, and whether there are biases and another direction."""
    return LSTM, WIDTH, 1, has_biases, True


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
def test_lstm_formula_is_right_forwards(reverse, has_biases):
    for seed in range(3):
        tensors = lstm_call(seed, has_biases)
        expected = by_cells(*tensors, reverse=reverse)
        args = *without_graph(*tensors), reverse, [], *options(has_biases), False, True
        *found, notes = called("mkldnn_rnn_layer", *args)
        assert notes is None
        for one, right in zip(found, expected, strict=True):
            assert_close(one, right.detach())


GIVEN = [given for given in itertools.product([True, False], repeat=3) if any(given)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_lstm_formula_is_right_backwards_whichever_gradients_there_are(reverse, given):
    tensors = lstm_call(1, True)
    x, *weights, hidden, cell = tensors
    results = by_cells(*tensors, reverse=reverse)
    gradients = [
        drawn(*t.shape, seed=20 + n).double() if given[n] else None for n, t in enumerate(results)
    ]
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, gradients, strict=True)
        if gradient is not None
    ]
    expected = torch.autograd.grad(
        [result for result, _ in pairs], tensors, [gradient for _, gradient in pairs]
    )
    kept = [torch.full_like(t, math.nan) for t in results]
    args = (
        x,
        *weights,
        hidden,
        cell,
        *kept,
        *gradients,
        reverse,
        *options(True)[:4],
        True,
        False,
        [],
        False,
    )
    found = called(
        "mkldnn_rnn_layer_backward", *without_graph(*args), torch.zeros(1, dtype=torch.uint8)
    )
    for one, right in zip(found, expected, strict=True):
        assert_close(one, right)


def test_lstm_formula_is_right_backwards_without_biases():
    """Without biases, torch passes the weights in their place."""
    tensors = lstm_call(1, False)
    x, first, second, *_, hidden, cell = tensors
    results = by_cells(*tensors, reverse=False)
    gradients = [drawn(*t.shape, seed=20 + n).double() for n, t in enumerate(results)]
    expected = torch.autograd.grad(results, (x, first, second, hidden, cell), gradients)
    args = (x, first, second, first, second, hidden, cell, *results, *gradients)
    rest = False, *options(False)[:4], True, False, [], False, torch.zeros(1, dtype=torch.uint8)
    found = called("mkldnn_rnn_layer_backward", *without_graph(*args), *rest)
    for one, right in zip((*found[:3], *found[5:]), expected, strict=True):
        assert_close(one, right)


@pytest.mark.parametrize(
    ("mode", "lengths"), [(3, []), (LSTM, [2, 1])], ids=["a GRU", "packed sequences"]
)
def test_lstm_formula_refuses_lengths_and_modes_that_it_does_not_know(mode, lengths):
    tensors = without_graph(*lstm_call(0, True))
    with pytest.raises(NotImplementedError):
        called("mkldnn_rnn_layer", *tensors, False, lengths, mode, *options(True)[1:], False, True)
