"""Operations that have no kernel for float64 on some device, written down as formulas.

Each function takes the arguments of a call by their names in torch's schema, in float64, and returns the results in
the order of the schema. None stands for what is no number of the network, such as a kernel's notes for its backward
pass. The backward passes compute everything again from the inputs, because a kernel's notes exist in its own format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gpulab._torch_internals import Nested

Arguments = dict[str, Nested]
Results = tuple[Nested, ...]


# --- attention ----------------------------------------------------------------------------------------------------


def _heads(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, with the heads of key and value repeated where several queries share one."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if arguments.get("dropout_p"):
        raise NotImplementedError("the kernel keeps its random numbers to itself")
    if query.dim() == 4 and key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    return query, key, value


def _scale(arguments: Arguments) -> float:
    scale = arguments.get("scale")
    return 1 / math.sqrt(arguments["query"].shape[-1]) if scale is None else float(scale)


def _weights(arguments: Arguments, query: Tensor, key: Tensor) -> Tensor:
    """The softmax of the scores; a row that is masked out entirely is zero, as in torch's kernels."""
    scores = _scale(arguments) * query @ key.mT
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if arguments.get("is_causal"):
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~past, -math.inf)
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)


def attend(arguments: Arguments) -> Tensor:
    """Scaled dot-product attention.

    >>> x = torch.eye(3, dtype=torch.float64)[None, None]
    >>> expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(attend({"query": x, "key": x, "value": x, "is_causal": True}), expected)
    True
    """
    query, key, value = _heads(arguments)
    return _weights(arguments, query, key) @ value


def _attention(arguments: Arguments) -> Results:
    return (attend(arguments),)


def _attention_backward(arguments: Arguments) -> Results:
    """The gradients of query, key, value and, where it is asked for, the additive mask."""
    query, key, value = _heads(arguments)
    gradient = arguments["grad_out"] if "grad_out" in arguments else arguments["grad_out_"]
    weights = _weights(arguments, query, key)
    of_weights = gradient @ value.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_query = _scale(arguments) * of_scores @ key
    of_key = _summed(_scale(arguments) * of_scores.mT @ query, arguments["key"])
    of_value = _summed(weights.mT @ gradient, arguments["value"])
    asked, bias = arguments.get("grad_input_mask", [False] * 4), arguments.get("attn_bias")
    of_bias = of_scores.sum_to_size(bias.shape) if asked[3] and isinstance(bias, Tensor) else None
    return of_query, of_key, of_value, of_bias


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient summed over the queries that share one head."""
    if gradient.shape == like.shape:
        return gradient
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


# --- oneDNN's LSTM ------------------------------------------------------------------------------------------------

_LSTM = 2  # torch's number of the kind of recurrent network


def _lstm(arguments: Arguments, weights: list[Tensor]) -> list[tuple[Nested, ...]]:
    """For each time, in the order of computation: the time, the state before, the gates, the cell and the hidden state.

    One layer in one direction: the kernel is called for each direction by itself.
    """
    if arguments["mode"] != _LSTM or arguments["batch_sizes"]:
        raise NotImplementedError("only an LSTM without packed sequences has a formula")
    x, hidden, cell = arguments["input"], arguments["hx_"], arguments.get("cx_", arguments.get("cx_tmp"))
    input_weight, hidden_weight, *biases = weights
    steps = []
    times = range(len(x) - 1, -1, -1) if arguments["reverse"] else range(len(x))
    for time in times:
        gates = x[time] @ input_weight.T + hidden @ hidden_weight.T
        gates = gates + sum(biases) if arguments["has_biases"] else gates
        i, f, g, o = gates.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        before = hidden, cell
        cell = f * cell + i * g
        hidden = o * cell.tanh()
        steps.append((time, *before, i, f, g, o, cell, hidden))
    return steps


def _lstm_layer(arguments: Arguments) -> Results:
    steps = _lstm(arguments, [arguments[f"weight{number}"] for number in range(4)])
    states = sorted(((step[0], step[-1]) for step in steps), key=lambda pair: pair[0])
    return torch.stack([hidden for _, hidden in states]), steps[-1][-1], steps[-1][-2], None


def _lstm_layer_backward(arguments: Arguments) -> Results:
    """Backpropagation through time. Without biases, the kernel is given the weights in their place."""
    weights = [arguments[f"weight{number}"] for number in range(1, 5)]
    input_weight, hidden_weight = weights[:2]
    x, steps = arguments["input"], _lstm(arguments, weights)
    of_output, of_hidden, of_cell = (arguments[name] for name in ("grad_output", "grad_hy", "grad_cy"))
    of_hidden = torch.zeros_like(steps[-1][-1]) if of_hidden is None else of_hidden
    of_cell = torch.zeros_like(steps[-1][-2]) if of_cell is None else of_cell
    of_input, of_weights = torch.zeros_like(x), [torch.zeros_like(weight) for weight in weights[:2]]
    of_weights += [x.new_zeros(len(input_weight)) for _ in range(2)]
    for time, hidden_before, cell_before, i, f, g, o, cell, _ in reversed(steps):
        of_hidden = of_hidden if of_output is None else of_hidden + of_output[time]
        squashed = cell.tanh()
        of_cell = of_cell + of_hidden * o * (1 - squashed.square())
        parts = (
            of_cell * g * i * (1 - i),
            of_cell * cell_before * f * (1 - f),
            of_cell * i * (1 - g.square()),
            of_hidden * squashed * o * (1 - o),
        )
        of_gates = torch.cat(parts, -1)
        of_input[time] = of_gates @ input_weight
        of_weights[0] += of_gates.T @ x[time]
        of_weights[1] += of_gates.T @ hidden_before
        for of_bias in of_weights[2:]:
            of_bias += of_gates.sum(0)
        of_hidden, of_cell = of_gates @ hidden_weight, of_cell * f
    return of_input, *of_weights, of_hidden, of_cell


# --- cuDNN's recurrent layers -------------------------------------------------------------------------------------

_LAYERS: dict[int, Callable[..., Nested]] = {0: torch.rnn_relu, 1: torch.rnn_tanh, 2: torch.lstm, 3: torch.gru}


def _recurrent(arguments: Arguments, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """All hidden states, and the last states, by torch's own layers: `leaves` are the input, states and weights."""
    if arguments["proj_size"] or (arguments["dropout"] and arguments["train"]):
        raise NotImplementedError("projections, and dropout between layers, have no formula")
    has_cell = arguments["cx"] is not None
    x, hidden, *rest = leaves
    states = [hidden, rest.pop(0)] if has_cell else hidden
    options = (
        arguments["weight_stride0"] == 4,
        arguments["num_layers"],
        0.0,
        arguments["train"],
        arguments["bidirectional"],
    )
    layer = _LAYERS[arguments["mode"]]
    if arguments["batch_sizes"]:
        made = layer(x, torch.tensor(arguments["batch_sizes"]), states, rest, *options)
    else:
        made = layer(x, states, rest, *options, arguments["batch_first"])
    return tuple(made)


def _leaves_of(arguments: Arguments) -> list[Tensor]:
    states = [arguments["hx"], *([arguments["cx"]] if arguments["cx"] is not None else [])]
    return [t.detach().cpu().clone() for t in (arguments["input"], *states, *arguments["weight"])]


def _outside_of_dispatch(function: Callable[[], Nested]) -> Nested:
    """What a function returns in a thread of its own, where autograd works as usual.

    It computes on the CPU alone, because the thread that waits may be the one that serves autograd on a GPU.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _cudnn_rnn(arguments: Arguments) -> Results:
    device = arguments["input"].device
    made = _outside_of_dispatch(lambda: _recurrent(arguments, _leaves_of(arguments)))
    states = [t.detach().to(device) for t in made]
    return (*states, *[None] * (5 - len(states)))


def _cudnn_rnn_backward(arguments: Arguments) -> Results:
    """The gradients of input, states and weights."""
    device, has_cell = arguments["input"].device, arguments["cx"] is not None
    wanted = [arguments[name] for name in ("grad_output", "grad_hy", "grad_cy")]

    def differentiate() -> Nested:
        leaves = [leaf.requires_grad_() for leaf in _leaves_of(arguments)]
        made = _recurrent(arguments, leaves)
        pairs = [(t, g.detach().cpu()) for t, g in zip(made, wanted, strict=False) if g is not None]
        outputs, gradients = ([pair[place] for pair in pairs] for place in (0, 1))
        return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)

    x, hidden, *rest = (t if t is None else t.to(device) for t in _outside_of_dispatch(differentiate))
    cell = rest.pop(0) if has_cell else None
    return x, hidden, cell, rest


# --- fused optimizers -------------------------------------------------------------------------------------------


def _fused_adam(arguments: Arguments, decoupled: bool = False) -> Results:
    """An update by Adam or AdamW, in place, as in torch.optim; some kernels take 1 - beta in float32."""
    if arguments.get("grad_scale") is not None or arguments.get("found_inf") is not None:
        raise NotImplementedError("a fused optimizer that unscales its gradients has no formula")
    names = ("self", "grads", "exp_avgs", "exp_avg_sqs", "state_steps")
    rate, beta1, beta2 = (float(arguments[name]) for name in ("lr", "beta1", "beta2"))
    decay, eps = arguments["weight_decay"], arguments["eps"]
    largest = arguments["max_exp_avg_sqs"] if arguments["amsgrad"] else [None] * len(arguments["self"])
    for *tensors, most in zip(*(arguments[name] for name in names), largest, strict=True):
        weight, gradient, mean, square, step = tensors
        gradient = -gradient if arguments["maximize"] else gradient
        if decoupled:
            weight.mul_(1 - rate * decay)
        else:
            gradient = gradient + decay * weight
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if most is not None:
            torch.maximum(most, square, out=most)
        corrected = (square if most is None else most).sqrt() / math.sqrt(1 - beta2 ** float(step)) + eps
        weight.addcdiv_(mean, corrected, value=-rate / (1 - beta1 ** float(step)))
    return ()


FORMULAS: dict[str, Callable[[Arguments], Results]] = {
    "_fused_adam": _fused_adam,
    "_fused_adamw": lambda arguments: _fused_adam(arguments, decoupled=True),
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "mkldnn_rnn_layer": _lstm_layer,
    "mkldnn_rnn_layer_backward": _lstm_layer_backward,
}
for _kernel in ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu"):
    FORMULAS[f"_scaled_dot_product_{_kernel}"] = _attention
    FORMULAS[f"_scaled_dot_product_{_kernel}_backward"] = _attention_backward
