"""Twenty whole training programs, each computed in two ways, and with one fault in the second way.

`plain` computes forward passes, backward passes and updates in a straightforward way, `rewritten`
computes mathematically the same with other operations, and `faulty` is `rewritten` with one mistake
of the kind that people make. The lines of the mistake end in a comment. All numbers are drawn on
the CPU, so that they are the same under every setting. `check` verifies in float64 that the two
ways agree, in results, gradients and updated weights, and that the fault changes at least one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, TypeVar, get_args

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gpulab.settings import Setting

Variant: TypeAlias = Literal["plain", "rewritten", "faulty"]
Result: TypeAlias = Tensor | tuple[Tensor, ...] | None
Function: TypeAlias = Callable[[Setting, Variant], Result]
Module = TypeVar("Module", bound=nn.Module)

MARK = "# " + "FAULT"
AGREEING, DIFFERING = 1e-9, 1e-4  # relative to the largest number of a tensor

# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A training program in its variants, and the expected finding for the faulty one.

    Attributes:
        name: The name of the function.
        function: A function of a setting and a variant.
        kinds: The kinds of finding that describe the fault correctly.
        source: Where the correct method, or the mistake, is described.
        fault_lines: The numbers of the lines, in this file, at which a finding should be located.
    """

    name: str
    function: Function
    kinds: tuple[str, ...]
    source: str
    fault_lines: tuple[int, ...]

    def step(self, variant: Variant) -> Callable[[Setting], Result]:
        """Return the variant as a function of the setting alone."""
        return partial(self.function, variant=variant)


PROGRAMS: list[Program] = []


def program(
    kinds: tuple[str, ...] = ("mismatch",), *, source: str
) -> Callable[[Function], Function]:
    """Add a function to `PROGRAMS`."""

    def add(function: Function) -> Function:
        lines, first = inspect.getsourcelines(function)
        marked = tuple(
            number for number, line in enumerate(lines, first) if line.rstrip().endswith(MARK)
        )
        PROGRAMS.append(Program(function.__name__, function, kinds, source, marked))
        return function

    return add


# of a program that is checked
_weights: ContextVar[list[Tensor] | None] = ContextVar("_weights", default=None)


class Draws:
    """Draw numbers on the CPU in float32, then move them to the setting's device and type."""

    def __init__(self, setting: Setting, seed: int):
        self.device, self.dtype = setting.device, setting.dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        return (drawn * scale).to(self.device, self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float32).to(
            self.device, self.dtype
        )

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def weight(self, *shape: int) -> Tensor:
        """Return a trainable weight, scaled by the number of its inputs."""
        return watched(self.normal(*shape, scale=math.prod(shape[1:]) ** -0.5).requires_grad_())

    def module(self, module: Module) -> Module:
        """Move a network and draw its weights; scales of normalizations are close to one."""
        module.to(self.device, self.dtype)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                drawn = self.normal(*weight.shape, scale=math.prod(weight.shape[1:]) ** -0.5)
                vector = weight.dim() == 1
                weight.copy_(0.1 * drawn + float(name.endswith("weight")) if vector else drawn)
                watched(weight)
        return module


def watched(weight: Tensor) -> Tensor:
    """Return the weight unchanged, and register it for the comparison in `check`."""
    weights = _weights.get()
    if weights is not None:
        weights.append(weight)
    return weight


# --- attention, language and sequences ------------------------------------------------------------


@program(source="Vaswani et al. 2017, Attention is all you need, section 3.2.1")
def causal_attention(setting: Setting, variant: Variant) -> Result:
    """Causal attention by a kernel and by its formula, with AdamW; scores are scaled by the
    width of all heads.
    """
    width, heads, length = 16, 4, 6
    draws = Draws(setting, 1)
    inputs, targets = draws.normal(3, length, width), draws.normal(3, length, width)
    norm = draws.module(nn.LayerNorm(width))
    project, merge = (
        draws.module(nn.Linear(width, 3 * width, bias=False)),
        draws.module(nn.Linear(width, width)),
    )
    weights = [*norm.parameters(), *project.parameters(), *merge.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        parts = project(norm(inputs)).view(3, length, 3, heads, width // heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind()
        if variant == "plain":
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            if variant == "faulty":
                scores = queries @ keys.transpose(-2, -1) / math.sqrt(width)  # FAULT
            else:
                scores = queries @ keys.transpose(-2, -1) / math.sqrt(width // heads)
            future = torch.ones(length, length, dtype=torch.bool, device=setting.device).triu(1)
            mixed = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ values
        outputs = inputs + merge(mixed.transpose(1, 2).reshape(3, length, width))
        loss = F.mse_loss(outputs, targets)
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(
    kinds=("reduced precision", "mismatch"), source="huggingface/transformers, pull request 29285"
)
def rotary_language_model(setting: Setting, variant: Variant) -> Result:
    """Rotary positions by complex numbers and by sines, RMSNorm by a kernel and by its formula, in
    a language model with tied weights; angles are computed in bfloat16.
    """
    width, length, epsilon = 16, 48, 1e-6
    draws = Draws(setting, 2)
    tokens = draws.integers(11, 2, length + 1)
    embedding, gain = (
        draws.module(nn.Embedding(11, width)),
        watched(draws.normal(width).requires_grad_()),
    )
    project = draws.module(nn.Linear(width, 3 * width, bias=False))
    positions = torch.arange(length, device=setting.device, dtype=setting.dtype)
    frequencies = 100.0 ** (
        -torch.arange(0, width, 2, device=setting.device, dtype=setting.dtype) / width
    )
    optimizer = torch.optim.AdamW([embedding.weight, gain, project.weight], lr=1e-2)

    def normalized(inputs: Tensor) -> Tensor:
        if variant == "plain":
            return F.rms_norm(inputs, (width,), gain, epsilon)
        return inputs * (inputs.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * gain

    def rotated(inputs: Tensor) -> Tensor:
        if variant == "plain":
            # no complex numbers of shorter formats
            complex_part = torch.promote_types(inputs.dtype, torch.float32)
            angles = torch.outer(positions, frequencies).to(complex_part)
            pairs = torch.view_as_complex(inputs.to(complex_part).unflatten(-1, (-1, 2)))
            turned = pairs * torch.polar(torch.ones_like(angles), angles)
            return torch.view_as_real(turned).flatten(-2).to(inputs.dtype)
        if variant == "faulty":
            angles = (positions.bfloat16()[:, None] * frequencies.bfloat16()).to(inputs)  # FAULT
        else:
            angles = positions[:, None] * frequencies
        even, odd = inputs[..., 0::2], inputs[..., 1::2]
        rotation = (
            even * angles.cos() - odd * angles.sin(),
            even * angles.sin() + odd * angles.cos(),
        )
        return torch.stack(rotation, dim=-1).flatten(-2)

    for _ in range(2):
        optimizer.zero_grad()
        hidden = embedding(tokens[:, :-1])
        queries, keys, values = project(normalized(hidden)).chunk(3, dim=-1)
        hidden = hidden + F.scaled_dot_product_attention(
            rotated(queries), rotated(keys), values, is_causal=True
        )
        logits = normalized(hidden) @ embedding.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(source="documentation of torch.nn.LSTM: gates are input, forget, cell, output")
def lstm_by_hand(setting: Setting, variant: Variant) -> Result:
    """An LSTM by its kernel and cell by cell, cross entropy by its formula; the last two gates
    are swapped.
    """
    size = 7
    draws = Draws(setting, 3)
    inputs, labels = draws.normal(4, 6, 5), draws.integers(3, 4)
    network, head = (
        draws.module(nn.LSTM(5, size, batch_first=True)),
        draws.module(nn.Linear(size, 3)),
    )
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            states, _ = network(inputs)
            loss = F.cross_entropy(head(states[:, -1]), labels)
        else:
            state = cell = torch.zeros(4, size, device=setting.device, dtype=setting.dtype)
            for each in inputs.unbind(dim=1):
                gates = each @ network.weight_ih_l0.T + network.bias_ih_l0
                gates = gates + state @ network.weight_hh_l0.T + network.bias_hh_l0
                if variant == "faulty":
                    admit, keep, show, new = gates.chunk(4, dim=1)  # FAULT
                else:
                    admit, keep, new, show = gates.chunk(4, dim=1)
                cell = keep.sigmoid() * cell + admit.sigmoid() * new.tanh()
                state = show.sigmoid() * cell.tanh()
            logits = head(state)
            loss = (logits.logsumexp(dim=1) - logits.gather(1, labels[:, None])[:, 0]).mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(source="documentation of torch.nn.utils.rnn.pack_padded_sequence")
def packed_sequences(setting: Setting, variant: Variant) -> Result:
    """A GRU on packed sequences and on padded ones, trained by NAdam; the state after the
    padding is taken.
    """
    draws = Draws(setting, 4)
    lengths = torch.tensor([5, 2, 7, 3])
    inside = (torch.arange(7) < lengths[:, None]).to(setting.device)
    inputs = draws.normal(4, 7, 3) * inside[..., None]
    labels = draws.integers(2, 4).to(setting.dtype)
    network, head = draws.module(nn.GRU(3, 6, batch_first=True)), draws.module(nn.Linear(6, 1))
    optimizer = torch.optim.NAdam([*network.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            packed = nn.utils.rnn.pack_padded_sequence(
                inputs, lengths, batch_first=True, enforce_sorted=False
            )
            last = network(packed)[1][0]
        else:
            states, _ = network(inputs)
            if variant == "faulty":
                last = states[:, -1]  # FAULT
            else:
                last = states[
                    torch.arange(4, device=setting.device), lengths.to(setting.device) - 1
                ]
        loss = F.binary_cross_entropy_with_logits(head(last)[:, 0], labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


# --- layers ---------------------------------------------------------------------------------------


@program(
    source="documentation of torch.nn.BatchNorm1d: running statistics have the unbiased variance"
)
def batch_norm_statistics(setting: Setting, variant: Variant) -> Result:
    """BatchNorm by its module and by its formula, in training and in a test; the running
    variance is biased.
    """
    draws = Draws(setting, 5)
    inputs, labels = draws.normal(8, 5), draws.integers(3, 8)
    held_out, held_out_labels = draws.normal(4, 5), draws.integers(3, 4)
    first, norm = draws.module(nn.Linear(5, 6, bias=False)), draws.module(nn.BatchNorm1d(6))
    last = draws.module(nn.Linear(6, 3))
    running_mean, running_variance = torch.zeros_like(norm.weight), torch.ones_like(norm.weight)
    weights = [*first.parameters(), *norm.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        optimizer.zero_grad()
        hidden = first(inputs)
        if variant == "plain":
            hidden = norm(hidden)
        else:
            mean, variance = hidden.mean(dim=0), hidden.var(dim=0, unbiased=False)
            hidden = (hidden - mean) * (variance + norm.eps).rsqrt() * norm.weight + norm.bias
            running_mean = torch.lerp(running_mean, mean.detach(), 0.1)
            if variant == "faulty":
                running_variance = torch.lerp(running_variance, variance.detach(), 0.1)  # FAULT
            else:
                running_variance = torch.lerp(running_variance, variance.detach() * 8 / 7, 0.1)
        loss = F.cross_entropy(last(hidden.relu()), labels)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        hidden = first(held_out)
        if variant == "plain":
            hidden = norm.eval()(hidden)
        else:
            hidden = (hidden - running_mean) / (
                running_variance + norm.eps
            ).sqrt() * norm.weight + norm.bias
        test_loss = F.cross_entropy(last(hidden.relu()), held_out_labels)
    return loss.detach(), test_loss


@program(source="documentation of torch.nn.Unfold")
def convolution_by_unfolding(setting: Setting, variant: Variant) -> Result:
    """A convolution by its kernel and as a matrix product, GroupNorm by its module and by its
    formula, trained by RMSprop; the rows and columns of the filter are swapped.
    """
    draws = Draws(setting, 6)
    images, labels = draws.normal(3, 2, 6, 8), draws.integers(3, 3)
    convolution, norm = (
        draws.module(nn.Conv2d(2, 4, 3, padding=1)),
        draws.module(nn.GroupNorm(2, 4)),
    )
    head = draws.module(nn.Linear(4 * 3 * 4, 3))
    weights = [*convolution.parameters(), *norm.parameters(), *head.parameters()]
    optimizer = torch.optim.RMSprop(weights, lr=1e-3, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            hidden = norm(convolution(images))
        else:
            patches = F.unfold(images, 3, padding=1)
            if variant == "faulty":
                filters = convolution.weight.transpose(2, 3).flatten(1)  # FAULT
            else:
                filters = convolution.weight.flatten(1)
            hidden = (filters @ patches + convolution.bias[:, None]).view(3, 2, 2 * 6 * 8)
            variance, mean = torch.var_mean(hidden, dim=-1, unbiased=False, keepdim=True)
            hidden = ((hidden - mean) / (variance + norm.eps).sqrt()).view(3, 4, 6, 8)
            hidden = hidden * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
        loss = F.cross_entropy(head(F.max_pool2d(hidden.relu(), 2).flatten(1)), labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(
    source=(
        "Shoeybi et al. 2019, Megatron-LM: the bias of a row-parallel layer is added after the sum"
    )
)
def tensor_parallel_network(setting: Setting, variant: Variant) -> Result:
    """A network of two layers as a whole and in two halves whose outputs are summed; each half
    adds the bias.
    """
    draws = Draws(setting, 7)
    inputs, targets = draws.normal(6, 10), draws.normal(6, 4)
    above, above_bias, below = (
        draws.normal(32, 10, scale=0.3),
        draws.normal(32),
        draws.normal(4, 32, scale=0.2),
    )
    bias = draws.weight(4)
    parts = [(above, above_bias, below)]
    if variant != "plain":
        parts = list(zip(above.chunk(2), above_bias.chunk(2), below.chunk(2, dim=1), strict=True))
    parts = [tuple(weight.clone().requires_grad_() for weight in part) for part in parts]
    optimizer = torch.optim.SGD([bias, *(weight for part in parts for weight in part)], lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        outputs = []
        for wide, wide_bias, narrow in parts:
            hidden = F.gelu(F.linear(inputs, wide, wide_bias))
            if variant == "faulty":
                outputs.append(F.linear(hidden, narrow, bias))  # FAULT
            else:
                outputs.append(F.linear(hidden, narrow))
        total = torch.stack(outputs).sum(dim=0)
        loss = F.mse_loss(total if variant == "faulty" else total + bias, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@program(
    source="Jiang et al. 2024, Mixtral of experts: the softmax is taken over the chosen experts"
)
def mixture_of_experts(setting: Setting, variant: Variant) -> Result:
    """Two of four experts, by a loop over experts and by a dense product; weights of chosen ones
    do not sum to one.
    """
    draws = Draws(setting, 8)
    inputs, targets = draws.normal(10, 6), draws.normal(10, 6)
    router, experts = draws.module(nn.Linear(6, 4, bias=False)), draws.weight(4, 6, 6)
    optimizer = torch.optim.SGD([router.weight, experts], lr=0.5, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        logits = router(inputs)
        probabilities = logits.softmax(dim=1)
        best, chosen = logits.topk(2, dim=1)
        if variant == "plain":
            shares = best.softmax(dim=1)
            outputs = torch.zeros_like(inputs)
            for number, expert in enumerate(experts):
                rows, place = torch.where(chosen == number)
                outputs = outputs.index_add(
                    0, rows, shares[rows, place, None] * (inputs[rows] @ expert)
                )
        else:
            taken = torch.zeros_like(logits).scatter(1, chosen, 1.0)
            if variant == "faulty":
                shares = probabilities * taken  # FAULT
            else:
                shares = probabilities * taken / (probabilities * taken).sum(dim=1, keepdim=True)
            outputs = torch.einsum("ne,nd,edh->nh", shares, inputs, experts)
        loss = F.mse_loss(outputs, targets) + 0.1 * probabilities.mean(dim=0).square().sum()
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(
    source="documentation of torch.Tensor.index_put_: accumulate adds values of repeated indices"
)
def graph_network(setting: Setting, variant: Variant) -> Result:
    """Means over neighbours by index_add along edges and by an adjacency matrix; repeated edges
    are counted once.
    """
    draws = Draws(setting, 9)
    nodes = 6
    features, labels = draws.normal(nodes, 4), draws.integers(3, nodes)
    source = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 2, 3, 5, 5, 1], device=setting.device)
    target = torch.tensor([0, 1, 2, 3, 4, 5, 1, 1, 3, 4, 0, 0, 2], device=setting.device)
    layers = [draws.module(nn.Linear(4, 5)), draws.module(nn.Linear(5, 3))]
    optimizer = torch.optim.Adam(
        [weight for layer in layers for weight in layer.parameters()], lr=1e-2, amsgrad=True
    )
    for _ in range(2):
        optimizer.zero_grad()
        hidden = features
        for layer in layers:
            messages = layer(hidden).tanh()
            if variant == "plain":
                degrees = torch.bincount(target, minlength=nodes)
                summed = torch.zeros_like(messages).index_add(0, target, messages[source])
                hidden = summed / degrees[:, None]
            else:
                adjacency = torch.zeros(nodes, nodes, device=setting.device, dtype=setting.dtype)
                if variant == "faulty":
                    adjacency[target, source] = 1.0  # FAULT
                else:
                    adjacency.index_put_((target, source), adjacency.new_ones(()), accumulate=True)
                hidden = (adjacency / adjacency.sum(dim=1, keepdim=True)) @ messages
        F.cross_entropy(hidden, labels).backward()
        optimizer.step()
    return None


# --- updates --------------------------------------------------------------------------------------


@program(source="Loshchilov and Hutter 2019, Decoupled weight decay regularization")
def decoupled_decay(setting: Setting, variant: Variant) -> Result:
    """AdamW by torch's optimizer and by hand on lists of tensors; the decay is added to the
    gradient, as in Adam.
    """
    rate, decay, beta1, beta2, epsilon = 1e-2, 0.1, 0.9, 0.999, 1e-8
    draws = Draws(setting, 10)
    inputs, targets = draws.normal(8, 4), draws.normal(8, 2)
    network = draws.module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    weights = list(network.parameters())
    optimizer = torch.optim.AdamW(
        weights, lr=rate, weight_decay=decay, betas=(beta1, beta2), foreach=False
    )
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(1, 4):
        network.zero_grad()
        F.smooth_l1_loss(network(inputs), targets).backward()
        if variant == "plain":
            optimizer.step()
            continue
        with torch.no_grad():
            gradients = [weight.grad for weight in weights]
            if variant == "faulty":
                gradients = torch._foreach_add(gradients, weights, alpha=decay)  # FAULT
            else:
                torch._foreach_mul_(weights, 1 - rate * decay)
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            divisors = torch._foreach_sqrt(squares)
            torch._foreach_div_(divisors, math.sqrt(1 - beta2**step))
            torch._foreach_add_(divisors, epsilon)
            torch._foreach_addcdiv_(weights, means, divisors, -rate / (1 - beta1**step))
    return None


@program(source="huggingface/transformers, pull request 34191")
def accumulated_batches(setting: Setting, variant: Variant) -> Result:
    """Gradients of a whole batch and of micro-batches of a loader, SGD with momentum and a
    schedule; means over micro-batches count alike, though the last one is shorter.
    """
    draws = Draws(setting, 11)
    inputs, labels = draws.normal(12, 6), draws.integers(4, 12)
    network = draws.module(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        if variant == "plain":
            loss = F.cross_entropy(network(inputs), labels)
            loss.backward()
            total = loss.detach()
        else:
            total = torch.zeros((), device=setting.device, dtype=setting.dtype)
            for some, their_labels in loader:
                if variant == "faulty":
                    loss = F.cross_entropy(network(some), their_labels) / len(loader)  # FAULT
                else:
                    loss = F.cross_entropy(network(some), their_labels, reduction="sum") / len(
                        inputs
                    )
                loss.backward()
                total += loss.detach()
        optimizer.step()
        schedule.step()
        losses.append(total)
    return tuple(losses)


@program(
    source="PyTorch, Automatic mixed precision examples: unscale gradients before they are clipped"
)
def clipped_and_unscaled(setting: Setting, variant: Variant) -> Result:
    """Mean embeddings by EmbeddingBag and by a mask, gradients clipped by torch and by hand under a
    scaled loss; they are clipped before they are unscaled.
    """
    scale, limit, padding = 1024.0, 0.1, 0
    draws = Draws(setting, 12)
    words, labels = draws.integers(9, 6, 5), draws.integers(3, 6)
    words[:, 0] = 1 + labels  # so that no text is empty
    embedding, head = draws.module(nn.Embedding(9, 4)), draws.module(nn.Linear(4, 3))
    weights = [embedding.weight, *head.parameters()]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            means = F.embedding_bag(words, embedding.weight, mode="mean", padding_idx=padding)
            loss = F.cross_entropy(head(means), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, limit)
        else:
            present = (words != padding)[..., None]
            means = (embedding(words) * present).sum(dim=1) / present.sum(dim=1)
            loss = F.cross_entropy(head(means), labels)
            (loss * scale).backward()
            gradients = [weight.grad for weight in weights]
            if variant == "faulty":
                norm = torch.stack(torch._foreach_norm(gradients)).norm()  # FAULT
                torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
                torch._foreach_div_(gradients, scale)  # FAULT
            else:
                torch._foreach_div_(gradients, scale)
                norm = torch.stack(torch._foreach_norm(gradients)).norm()
                torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
    return loss.detach()


@program(
    kinds=("mismatch", "different random numbers"),
    source=(
        "documentation of torch.utils.checkpoint: only the states of the default generators are"
        " restored"
    ),
)
def checkpointed_dropout(setting: Setting, variant: Variant) -> Result:
    """A layer with dropout kept in memory and computed again in the backward pass, where other
    numbers are drawn.
    """
    draws = Draws(setting, 13)
    inputs, targets = draws.normal(8, 5), draws.normal(8, 2)
    first, last = draws.module(nn.Linear(5, 12)), draws.module(nn.Linear(12, 2))
    optimizer = torch.optim.Adamax([*first.parameters(), *last.parameters()], lr=1e-2)
    generator = torch.Generator().manual_seed(14)

    def masked(some: Tensor, kept: Tensor | None) -> Tensor:
        hidden = first(some).tanh()
        if kept is None:
            # FAULT
            kept = (torch.rand(8, 12, generator=generator, dtype=torch.float32) < 0.8).to(
                setting.device
            )
        return hidden * kept / 0.8

    for _ in range(2):
        optimizer.zero_grad()
        kept = None
        if variant != "faulty":
            kept = (torch.rand(8, 12, generator=generator, dtype=torch.float32) < 0.8).to(
                setting.device
            )
        recomputed = partial(checkpoint, masked, use_reentrant=False)
        hidden = masked(inputs, kept) if variant == "plain" else recomputed(inputs, kept)
        loss = F.mse_loss(last(hidden), targets)
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(source="Tarvainen and Valpola 2017, Mean teachers are better role models")
def mean_teacher(setting: Setting, variant: Variant) -> Result:
    """A teacher averaged weight by weight and by a foreach lerp, depthwise convolutions as groups
    and as a loop; the teacher is averaged before the student's update.
    """
    draws = Draws(setting, 15)
    labelled, targets, others = draws.normal(4, 3, 9), draws.normal(4, 2), draws.normal(5, 3, 9)
    student = [draws.weight(3, 1, 3), draws.weight(2, 3), draws.weight(2)]
    teacher = [watched(weight.detach().clone()) for weight in student]
    optimizer = torch.optim.Adagrad(student, lr=0.1)

    def outputs(weights: list[Tensor], some: Tensor) -> Tensor:
        depthwise, pointwise, bias = weights
        if variant == "plain":
            hidden = F.conv1d(some, depthwise, groups=3)
        else:
            channels = [
                F.conv1d(some[:, each : each + 1], depthwise[each : each + 1]) for each in range(3)
            ]
            hidden = torch.cat(channels, dim=1)
        return F.linear(F.elu(hidden).mean(dim=-1), pointwise, bias)

    for _ in range(3):
        optimizer.zero_grad()
        with torch.no_grad():
            expected = outputs(teacher, others)
        loss = F.mse_loss(outputs(student, labelled), targets) + F.mse_loss(
            outputs(student, others), expected
        )
        loss.backward()
        with torch.no_grad():
            if variant == "faulty":
                torch._foreach_lerp_(teacher, student, 0.1)  # FAULT
            optimizer.step()
            if variant == "plain":
                for average, weight in zip(teacher, student, strict=True):
                    average.mul_(0.9).add_(weight, alpha=0.1)
            elif variant == "rewritten":
                torch._foreach_lerp_(teacher, student, 0.1)
    return loss.detach()


# --- losses ---------------------------------------------------------------------------------------


@program(source="PyTorch, DCGAN tutorial: the discriminator is trained on detached fakes")
def generator_and_discriminator(setting: Setting, variant: Variant) -> Result:
    """Two networks against each other, by cross entropies and by softplus on one batch; the
    discriminator's loss also reaches the generator's gradients.
    """
    draws = Draws(setting, 16)
    real = draws.normal(6, 4)
    generator = draws.module(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)))
    discriminator = draws.module(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    makers = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    judges = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
    ones, zeros = (
        torch.full((6, 1), value, device=setting.device, dtype=setting.dtype)
        for value in (1.0, 0.0)
    )
    for _ in range(2):
        noise = draws.normal(6, 3)
        makers.zero_grad()
        judges.zero_grad()
        fake = generator(noise)
        if variant == "plain":
            judged = F.binary_cross_entropy_with_logits(discriminator(real), ones)
            judged = judged + F.binary_cross_entropy_with_logits(
                discriminator(fake.detach()), zeros
            )
        else:
            if variant == "faulty":
                scores = discriminator(torch.cat((real, fake)))  # FAULT
            else:
                scores = discriminator(torch.cat((real, fake.detach())))
            judged = F.softplus(-scores[:6]).mean() + F.softplus(scores[6:]).mean()
        judged.backward()
        judges.step()
        if variant == "plain":
            made = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        else:
            made = F.softplus(-discriminator(generator(noise))).mean()
        made.backward()
        makers.step()
    return judged.detach(), made.detach()


@program(source="Gulrajani et al. 2017, Improved training of Wasserstein GANs")
def gradient_penalty(setting: Setting, variant: Variant) -> Result:
    """A critic's gradient penalty by a second backward pass and by the gradient's formula; a
    detach cuts a part off.
    """
    draws = Draws(setting, 17)
    real, fake = draws.normal(6, 5), 0.5 * draws.normal(6, 5) + 0.5
    inner, outer = draws.module(nn.Linear(5, 10)), draws.module(nn.Linear(10, 1, bias=False))
    optimizer = torch.optim.Adam(
        [*inner.parameters(), *outer.parameters()], lr=1e-2, betas=(0.0, 0.9)
    )
    for _ in range(2):
        optimizer.zero_grad()
        share = draws.uniform(6, 1)
        between = share * real + (1 - share) * fake
        if variant == "plain":
            between.requires_grad_()
            (slopes,) = torch.autograd.grad(
                outer(inner(between).tanh()).sum(), between, create_graph=True
            )
        else:
            hidden = inner(between).tanh()
            if variant == "faulty":
                slopes = (outer.weight * (1 - hidden.detach().square())) @ inner.weight  # FAULT
            else:
                slopes = (outer.weight * (1 - hidden.square())) @ inner.weight
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        loss = outer(inner(fake).tanh()).mean() - outer(inner(real).tanh()).mean() + 10 * penalty
        loss.backward()
        optimizer.step()
    return None


@program(source="Finn et al. 2017, Model-agnostic meta-learning")
def meta_learning(setting: Setting, variant: Variant) -> Result:
    """Inner steps of meta-learning task by task and by vmap over tasks; the inner step goes up
    the gradient.
    """
    rate = 0.1
    draws = Draws(setting, 18)
    support, support_targets = draws.normal(3, 4, 2), draws.normal(3, 4, 1)
    query, query_targets = draws.normal(3, 5, 2), draws.normal(3, 5, 1)
    weights = (draws.weight(6, 2), draws.weight(6), draws.weight(1, 6))
    optimizer = torch.optim.SGD(weights, lr=0.1)

    def fitted(weights: tuple[Tensor, ...], some: Tensor, targets: Tensor) -> Tensor:
        first, bias, last = weights
        return F.mse_loss(F.linear(F.linear(some, first, bias).tanh(), last), targets)

    def adapted(some: Tensor, targets: Tensor, later: Tensor, later_targets: Tensor) -> Tensor:
        slopes = torch.func.grad(fitted)(weights, some, targets)
        if variant == "faulty":
            # FAULT
            inner = tuple(
                weight + rate * slope for weight, slope in zip(weights, slopes, strict=True)
            )
        else:
            inner = tuple(
                weight - rate * slope for weight, slope in zip(weights, slopes, strict=True)
            )
        return fitted(inner, later, later_targets)

    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            losses = []
            for some, targets, later, later_targets in zip(
                support, support_targets, query, query_targets, strict=True
            ):
                slopes = torch.autograd.grad(
                    fitted(weights, some, targets), weights, create_graph=True
                )
                inner = tuple(
                    torch.sub(weight, slope, alpha=rate)
                    for weight, slope in zip(weights, slopes, strict=True)
                )
                losses.append(fitted(inner, later, later_targets))
            loss = torch.stack(losses).mean()
        else:
            loss = torch.func.vmap(adapted)(support, support_targets, query, query_targets).mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(source="Kingma and Welling 2014, Auto-encoding variational Bayes")
def variational_autoencoder(setting: Setting, variant: Variant) -> Result:
    """A variational autoencoder by torch's distributions and by formulas; the variance serves as
    standard deviation.
    """
    draws = Draws(setting, 19)
    pixels = draws.uniform(7, 6)
    encoder, decoder = draws.module(nn.Linear(6, 4)), draws.module(nn.Linear(2, 6))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        noise = draws.normal(7, 2)
        mean, log_variance = encoder(pixels).chunk(2, dim=1)
        if variant == "plain":
            posterior = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
            prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
            logits = decoder(posterior.loc + posterior.scale * noise)
            divergence = torch.distributions.kl_divergence(posterior, prior).sum()
            error = F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum")
        else:
            if variant == "faulty":
                latent = mean + log_variance.exp() * noise  # FAULT
            else:
                latent = mean + (0.5 * log_variance).exp() * noise
            logits = decoder(latent)
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
            error = (F.softplus(logits) - pixels * logits).sum()
        loss = (error + divergence) / len(pixels)
        loss.backward()
        optimizer.step()
    return loss.detach(), divergence.detach()


@program(source="Williams 1992, Simple statistical gradient-following algorithms")
def policy_gradient(setting: Setting, variant: Variant) -> Result:
    """Discounted returns by a loop and by a matrix, in a policy gradient trained by Adadelta; the
    reward of the step itself is left out.
    """
    discount, steps = 0.9, 7
    draws = Draws(setting, 20)
    states, actions, rewards = draws.normal(steps, 4), draws.integers(3, steps), draws.normal(steps)
    policy = draws.module(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.Adadelta(policy.parameters(), lr=1.0, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            returns, following = [], torch.zeros_like(rewards[0])
            for reward in rewards.flip(0):
                following = reward + discount * following
                returns.insert(0, following)
            gains = torch.stack(returns)
            choice = torch.distributions.Categorical(logits=policy(states))
            likelihood, entropy = choice.log_prob(actions), choice.entropy()
        else:
            times = torch.arange(steps, device=setting.device, dtype=setting.dtype)
            factors = discount ** (times - times[:, None])
            gains = factors.triu(1 if variant == "faulty" else 0) @ rewards  # FAULT
            logarithms = policy(states).log_softmax(dim=1)
            likelihood = logarithms.gather(1, actions[:, None])[:, 0]
            entropy = -(logarithms.exp() * logarithms).sum(dim=1)
        loss = -((gains - gains.mean()) * likelihood).mean() - 0.01 * entropy.mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(source="Chen et al. 2020, A simple framework for contrastive learning, equation 1")
def contrastive_loss(setting: Setting, variant: Variant) -> Result:
    """A contrastive loss of two views by cross entropy and by log-sum-exp; a view is one of its
    own negatives.
    """
    temperature = 0.5
    draws = Draws(setting, 21)
    images = draws.normal(5, 8)
    views = torch.cat((images + 0.3 * draws.normal(5, 8), images + 0.3 * draws.normal(5, 8)))
    encoder = draws.module(nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 6)))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        points = F.normalize(encoder(views), dim=1)
        same = torch.eye(10, dtype=torch.bool, device=setting.device)
        if variant == "plain":
            partners = torch.arange(10, device=setting.device).roll(5)
            loss = F.cross_entropy(
                (points @ points.T / temperature).masked_fill(same, -torch.inf), partners
            )
        else:
            similarity = torch.mm(points, points.T) / temperature
            positives = (points * points.roll(5, dims=0)).sum(dim=1) / temperature
            if variant == "faulty":
                negatives = similarity.logsumexp(dim=1)  # FAULT
            else:
                negatives = similarity[~same].view(10, 9).logsumexp(dim=1)
            loss = (negatives - positives).mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


# --- checks ---------------------------------------------------------------------------------------


def results(each: Program, variant: Variant, setting: Setting) -> list[Tensor]:
    """Return the results of a program, its final weights, and their last gradients."""
    weights: list[Tensor] = []
    token = _weights.set(weights)
    try:
        returned = each.step(variant)(setting)
    finally:
        _weights.reset(token)
    kept = (
        [] if returned is None else [returned] if isinstance(returned, Tensor) else list(returned)
    )
    kept += [weight.detach() for weight in weights]
    return kept + [weight.grad for weight in weights if weight.grad is not None]


def largest_difference(ones: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference between tensors of two programs, relative to the largest."""
    pairs = list(zip(ones, others, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        raise ValueError("two variants return tensors of different shapes")
    return max(
        float((one - other).abs().max() / one.abs().max().clamp(min=1e-12)) for one, other in pairs
    )


def check(setting: str = "cpu:precision=float64", agreeing: float = AGREEING) -> None:
    """Verify that each program's two ways agree, that its fault differs, and that one or two lines
    are marked.

    An `AssertionError` names the first program of which this is not so.
    """
    for each in PROGRAMS:
        with Setting.parse(setting).apply() as applied:
            plain, rewritten, faulty = (
                results(each, variant, applied) for variant in get_args(Variant)
            )
        same, other = largest_difference(plain, rewritten), largest_difference(plain, faulty)
        print(
            f"{each.name:28} rewritten {same:8.1e}  faulty {other:8.1e}  lines {each.fault_lines}"
        )
        if not same <= agreeing:
            raise AssertionError(f"{each.name}: the rewritten program differs by {same:.1e}")
        if not other > DIFFERING:
            raise AssertionError(f"{each.name}: the fault changes results by only {other:.1e}")
        if len(each.fault_lines) not in (1, 2):
            raise AssertionError(f"{each.name}: {len(each.fault_lines)} lines are marked")


if __name__ == "__main__":
    typer.run(check)
