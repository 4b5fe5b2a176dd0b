"""Formulas for operations that have no float64 kernel on some device.

Each function takes the arguments of a call by their names in torch's schema, in float64, and
returns the results in the order of the schema. None replaces auxiliary outputs, such as the data
that a kernel saves for its backward pass. The backward passes recompute everything from the inputs,
because the saved data are in the kernel's own format.

A function raises `NotImplementedError` for a call that its formula does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpulab._torch_internals import Nested

Arguments = dict[str, Nested]
Outputs = tuple[Nested, ...]


# --- attention ------------------------------------------------------------------------------------


def _repeat_heads(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value; repeat heads of key and value that several queries share.

    Raises:
        NotImplementedError: For attention with dropout.
    """
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if arguments.get("dropout_p"):
        raise NotImplementedError("the random numbers of the kernel are not available")
    # Dimension 1 of tensors (batch, heads, positions, features).
    if query.dim() == 4 and key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    return query, key, value


def _scale(arguments: Arguments) -> float:
    """Return the factor of the scores; by default, one over the root of the head size."""
    scale = arguments.get("scale")
    return 1 / math.sqrt(arguments["query"].shape[-1]) if scale is None else float(scale)


def _attention_weights(arguments: Arguments, query: Tensor, key: Tensor) -> Tensor:
    """Compute the softmax of the scores, with the mask applied.

    A fully masked row is zero, as in torch's kernels, because the softmax would be NaN.
    """
    scores = _scale(arguments) * query @ key.mT
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if arguments.get("is_causal"):
        # A causal mask: each position sees itself and the positions before it.
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)


def attend(arguments: Arguments) -> Tensor:
    """Compute scaled dot-product attention.

    >>> x = torch.eye(3, dtype=torch.float64)[None, None]
    >>> expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(attend({"query": x, "key": x, "value": x, "is_causal": True}), expected)
    True
    """
    query, key, value = _repeat_heads(arguments)
    return _attention_weights(arguments, query, key) @ value


def _attention(arguments: Arguments) -> Outputs:
    """Compute attention as the only output, without the data that a kernel saves."""
    return (attend(arguments),)


def _attention_backward(arguments: Arguments) -> Outputs:
    """Compute the gradients of query, key, value and, if requested, the additive mask."""
    query, key, value = _repeat_heads(arguments)
    # The schemas of the kernels have two names for the gradient of the output.
    gradient = arguments["grad_out"] if "grad_out" in arguments else arguments["grad_out_"]
    weights = _attention_weights(arguments, query, key)
    weights_gradient = gradient @ value.mT
    # The derivative of the softmax.
    scores_gradient = weights * (
        weights_gradient - (weights_gradient * weights).sum(-1, keepdim=True)
    )
    query_gradient = _scale(arguments) * scores_gradient @ key
    key_gradient = _sum_shared_heads(
        _scale(arguments) * scores_gradient.mT @ query, arguments["key"]
    )
    value_gradient = _sum_shared_heads(weights.mT @ gradient, arguments["value"])
    # The mask says which gradients are requested. That of the bias is the last one.
    *_, is_bias_requested = arguments.get("grad_input_mask", [False] * 4)
    bias = arguments.get("attn_bias")
    bias_gradient = (
        scores_gradient.sum_to_size(bias.shape)
        if is_bias_requested and isinstance(bias, Tensor)
        else None
    )
    return query_gradient, key_gradient, value_gradient, bias_gradient


def _sum_shared_heads(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over the query heads that share a head of `like`, the key or the value."""
    if gradient.shape == like.shape:
        return gradient
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


# --- oneDNN's LSTM --------------------------------------------------------------------------------

_LSTM_MODE = 2  # torch's number for an LSTM, among the types of recurrent networks


class _LSTMStep(NamedTuple):
    """All values of one time step of an LSTM.

    Attributes:
        time: The index of the step in the input.
        previous_hidden: The hidden state before the step.
        previous_cell: The cell state before the step.
        i: The input gate.
        f: The forget gate.
        g: The candidate for the cell state.
        o: The output gate.
        cell: The new cell state.
        hidden: The new hidden state.
    """

    time: int
    previous_hidden: Tensor
    previous_cell: Tensor
    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    cell: Tensor
    hidden: Tensor


def _lstm(arguments: Arguments, weights: list[Tensor]) -> list[_LSTMStep]:
    """Run one layer in one direction, and return the values of each time step.

    The steps are in the order of computation. torch calls the kernel separately for each layer and
    direction.

    Args:
        arguments: The arguments of the call.
        weights: The weights of the input and of the hidden state, followed by their biases.

    Raises:
        NotImplementedError: For packed sequences, and for recurrent layers other than an LSTM.
    """
    if arguments["mode"] != _LSTM_MODE or arguments["batch_sizes"]:
        raise NotImplementedError("only an LSTM without packed sequences has a formula")
    x = arguments["input"]
    hidden = arguments["hx_"]
    cell: Nested = arguments.get("cx_", arguments.get("cx_tmp"))
    input_weight, hidden_weight, *biases = weights
    steps = []
    times = range(len(x) - 1, -1, -1) if arguments["reverse"] else range(len(x))
    for time in times:
        gates = x[time] @ input_weight.T + hidden @ hidden_weight.T
        gates = gates + sum(biases) if arguments["has_biases"] else gates
        # The input gate, the forget gate, the candidate for the cell, and the output gate.
        i, f, g, o = gates.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        new_cell = f * cell + i * g
        new_hidden = o * new_cell.tanh()
        steps.append(_LSTMStep(time, hidden, cell, i, f, g, o, new_cell, new_hidden))
        cell = new_cell
        hidden = new_hidden
    return steps


def _lstm_layer(arguments: Arguments) -> Outputs:
    """Compute the hidden states of all times, and the final hidden and cell state."""
    steps = _lstm(arguments, [arguments[f"weight{number}"] for number in range(4)])
    hidden_states = [step.hidden for step in sorted(steps, key=lambda step: step.time)]
    final = steps[-1]
    return torch.stack(hidden_states), final.hidden, final.cell, None


def _lstm_layer_backward(arguments: Arguments) -> Outputs:
    """Compute the gradients of input, weights, biases and states by backpropagation through time.

    A call without biases passes the weights in place of the biases.
    """
    weights = [arguments[f"weight{number}"] for number in range(1, 5)]
    input_weight, hidden_weight = weights[:2]
    x = arguments["input"]
    steps = _lstm(arguments, weights)
    output_gradient, hidden_gradient, cell_gradient = (
        arguments[name] for name in ("grad_output", "grad_hy", "grad_cy")
    )
    final = steps[-1]
    if hidden_gradient is None:
        hidden_gradient = torch.zeros_like(final.hidden)
    if cell_gradient is None:
        cell_gradient = torch.zeros_like(final.cell)
    input_gradient = torch.zeros_like(x)
    weights_gradient = [torch.zeros_like(weight) for weight in weights[:2]]
    weights_gradient += [x.new_zeros(len(input_weight)) for _ in range(2)]
    for time, hidden_before, cell_before, i, f, g, o, cell, _ in reversed(steps):
        hidden_gradient = (
            hidden_gradient if output_gradient is None else hidden_gradient + output_gradient[time]
        )
        cell_tanh = cell.tanh()
        cell_gradient = cell_gradient + hidden_gradient * o * (1 - cell_tanh.square())
        # The gradients of the four gates before their sigmoid or tanh.
        parts = (
            cell_gradient * g * i * (1 - i),
            cell_gradient * cell_before * f * (1 - f),
            cell_gradient * i * (1 - g.square()),
            hidden_gradient * cell_tanh * o * (1 - o),
        )
        gates_gradient = torch.cat(parts, -1)
        input_gradient[time] = gates_gradient @ input_weight
        weights_gradient[0] += gates_gradient.T @ x[time]
        weights_gradient[1] += gates_gradient.T @ hidden_before
        for bias_gradient in weights_gradient[2:]:
            bias_gradient += gates_gradient.sum(0)
        # The gradients of the states before this step.
        hidden_gradient = gates_gradient @ hidden_weight
        cell_gradient = cell_gradient * f
    return input_gradient, *weights_gradient, hidden_gradient, cell_gradient


# --- cuDNN's recurrent layers ---------------------------------------------------------------------

# torch's public functions, by the number of the layer type in the argument `mode` of the kernels.
_LAYER_FUNCTIONS: dict[int, Callable[..., Nested]] = {
    0: torch.rnn_relu,
    1: torch.rnn_tanh,
    2: torch.lstm,
    3: torch.gru,
}
_N_CUDNN_OUTPUTS = 5  # the hidden states, two final states, and two auxiliary outputs


class _LayerInputs(NamedTuple):
    """The tensors that recurrent layers compute with.

    Attributes:
        x: The input at all times.
        states: The initial hidden state, followed by the initial cell state of an LSTM.
        weights: The weights of all layers and directions, in the order of cuDNN's argument
            `weight`, which is also that of torch's public functions.
    """

    x: Tensor
    states: list[Tensor]
    weights: list[Tensor]


def _copy_inputs(arguments: Arguments) -> _LayerInputs:
    """Copy input, states and weights to the CPU, without their history in autograd."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().clone()

    states = [arguments["hx"]]
    if arguments["cx"] is not None:
        states.append(arguments["cx"])
    return _LayerInputs(
        x=copy(arguments["input"]),
        states=list(map(copy, states)),
        weights=list(map(copy, arguments["weight"])),
    )


def _run_layers(arguments: Arguments, inputs: _LayerInputs) -> tuple[Tensor, ...]:
    """Run recurrent layers with torch's public function for their type.

    Args:
        arguments: The arguments of the call of cuDNN's kernel. Its tensors are not read.
        inputs: The tensors to compute with.

    Returns:
        The hidden states of the last layer at all times, followed by the final states, in the order
        of `inputs.states`.

    Raises:
        NotImplementedError: For projections, and for dropout between layers during training.
    """
    has_active_dropout = arguments["dropout"] and arguments["train"]
    if arguments["proj_size"] or has_active_dropout:
        raise NotImplementedError("projections, and dropout between layers, have no formula")
    run = _LAYER_FUNCTIONS[arguments["mode"]]
    # torch.lstm takes a list of two states. The other functions take the hidden state itself.
    has_cell_state = len(inputs.states) == 2
    initial_state = inputs.states if has_cell_state else inputs.states[0]
    options = {
        # The stride is the number of tensors for one layer in one direction: two weights, and two
        # biases if the layer has them.
        "has_biases": arguments["weight_stride0"] == 4,
        "num_layers": arguments["num_layers"],
        "dropout": 0.0,
        "train": arguments["train"],
        "bidirectional": arguments["bidirectional"],
    }
    if arguments["batch_sizes"]:  # the input is a packed sequence
        batch_sizes = torch.tensor(arguments["batch_sizes"])
        outputs = run(inputs.x, batch_sizes, initial_state, inputs.weights, **options)
    else:
        options["batch_first"] = arguments["batch_first"]
        outputs = run(inputs.x, initial_state, inputs.weights, **options)
    return tuple(outputs)


def _run_in_thread(function: Callable[[], Nested]) -> Nested:
    """Run a function in a separate thread, where autograd is available without restrictions.

    The function must compute on the CPU, because the waiting thread may be the one in which
    autograd runs the backward pass on a GPU.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _cudnn_rnn(arguments: Arguments) -> Outputs:
    """Compute all hidden states and the final states on the CPU; the other outputs are None."""
    device = arguments["input"].device
    cpu_outputs = _run_in_thread(lambda: _run_layers(arguments, _copy_inputs(arguments)))
    outputs = [output.detach().to(device) for output in cpu_outputs]
    missing_outputs = [None] * (_N_CUDNN_OUTPUTS - len(outputs))
    return (*outputs, *missing_outputs)


def _cudnn_rnn_backward(arguments: Arguments) -> Outputs:
    """Compute the gradients of input, states and weights by autograd on the CPU."""
    device = arguments["input"].device
    output_gradients = [arguments[name] for name in ("grad_output", "grad_hy", "grad_cy")]

    def differentiate() -> Nested:
        """Compute the gradients of the input, the states and the weights on the CPU."""
        inputs = _copy_inputs(arguments)
        leaves = [inputs.x, *inputs.states, *inputs.weights]
        for leaf in leaves:
            leaf.requires_grad_()
        layer_outputs = _run_layers(arguments, inputs)
        # Only an LSTM has a third output, to which the gradient `grad_cy` belongs. The gradient of
        # an output that the loss does not depend on is None.
        pairs = [
            (output, gradient.detach().cpu())
            for output, gradient in zip(layer_outputs, output_gradients, strict=False)
            if gradient is not None
        ]
        outputs = [output for output, _ in pairs]
        gradients = [gradient for _, gradient in pairs]
        return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)

    x_gradient, hidden_gradient, *other_gradients = (
        gradient if gradient is None else gradient.to(device)
        for gradient in _run_in_thread(differentiate)
    )
    cell_gradient = None
    weight_gradients = other_gradients
    if arguments["cx"] is not None:
        cell_gradient, *weight_gradients = other_gradients
    return x_gradient, hidden_gradient, cell_gradient, weight_gradients


# --- fused optimizers -----------------------------------------------------------------------------


def _fused_adam(arguments: Arguments, decoupled: bool = False) -> Outputs:
    """Update parameters and states by Adam or AdamW in place, as in `torch.optim`.

    torch's fused kernels are not used, because some of them compute 1 - beta in float32.

    Args:
        arguments: The arguments of the call.
        decoupled: Whether the weight decay is that of AdamW, separate from the gradient.

    Raises:
        NotImplementedError: If the optimizer also divides the gradients by a loss scale.
    """
    if arguments.get("grad_scale") is not None or arguments.get("found_inf") is not None:
        raise NotImplementedError("a fused optimizer that unscales its gradients has no formula")
    names = ("self", "grads", "exp_avgs", "exp_avg_sqs", "state_steps")
    rate, beta1, beta2 = (float(arguments[name]) for name in ("lr", "beta1", "beta2"))
    decay = arguments["weight_decay"]
    eps = arguments["eps"]
    max_squares = [None] * len(arguments["self"])
    if arguments["amsgrad"]:
        max_squares = arguments["max_exp_avg_sqs"]
    columns = [arguments[name] for name in names]
    for *tensors, max_square in zip(*columns, max_squares, strict=True):
        weight, gradient, mean, square, step = tensors
        gradient = -gradient if arguments["maximize"] else gradient
        if decoupled:
            weight.mul_(1 - rate * decay)
        else:
            gradient = gradient + decay * weight
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if max_square is not None:
            square = torch.maximum(max_square, square, out=max_square)
        mean_correction = 1 - beta1 ** float(step)
        square_correction = math.sqrt(1 - beta2 ** float(step))
        denominator = square.sqrt() / square_correction + eps
        weight.addcdiv_(mean, denominator, value=-rate / mean_correction)
    return ()


FORMULAS: dict[str, Callable[[Arguments], Outputs]] = {
    "_fused_adam": _fused_adam,
    "_fused_adamw": partial(_fused_adam, decoupled=True),
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "mkldnn_rnn_layer": _lstm_layer,
    "mkldnn_rnn_layer_backward": _lstm_layer_backward,
}
for _kernel in (
    "efficient_attention",
    "flash_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
):
    FORMULAS[f"_scaled_dot_product_{_kernel}"] = _attention
    FORMULAS[f"_scaled_dot_product_{_kernel}_backward"] = _attention_backward
