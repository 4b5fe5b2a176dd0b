"""Training programs computed in two ways, and a third time with one realistic fault.

Every program is a function of a setting and a variant. The variant `plain` trains in a
straightforward way, `rewritten` computes mathematically the same results by other operations, and
`faulty` is `rewritten` with one bug, on the lines that end in the comment FAULT. All numbers are
drawn on the CPU in float64 from a fixed seed and then moved, so that they are the same under every
setting.

`python benchmarks/correctness/other_programs.py` verifies this in float64.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import typer
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from gpulab.settings import Setting

VARIANTS = ("plain", "rewritten", "faulty")
MARK = "# FAULT"


@dataclass(frozen=True)
class Program:
    """A training program in three variants.

    Attributes:
        name: The name of the function.
        function: A function of a setting and one of `VARIANTS`.
        kinds: The kinds of finding that describe the fault correctly.
        source: Where the computation comes from.
    """

    name: str
    function: Callable[[Setting, str], Any]
    kinds: tuple[str, ...]
    source: str

    def step(self, variant: str) -> Callable[[Setting], Any]:
        """Return the program in this variant, as a function of the setting."""
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r}: expected one of {', '.join(VARIANTS)}")
        return partial(self.function, variant=variant)

    @property
    def fault_lines(self) -> tuple[int, ...]:
        """Return the numbers, in this file, of the lines with the fault."""
        lines, first = inspect.getsourcelines(self.function)
        return tuple(
            first + number for number, line in enumerate(lines) if line.rstrip().endswith(MARK)
        )


PROGRAMS: list[Program] = []
Function = Callable[[Setting, str], Any]


def program(
    kinds: tuple[str, ...] = ("mismatch",), source: str = ""
) -> Callable[[Function], Function]:
    """Append the decorated function to `PROGRAMS`."""

    def register(function: Function) -> Function:
        PROGRAMS.append(Program(function.__name__, function, kinds, source))
        return function

    return register


class Draw:
    """Random numbers from a seeded CPU generator, moved to a setting's device and type."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal numbers with mean zero."""
        numbers = scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return numbers.to(self.setting.device, self.setting.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draw numbers uniformly distributed between two bounds."""
        numbers = low + (high - low) * torch.rand(
            shape, generator=self.generator, dtype=torch.float64
        )
        return numbers.to(self.setting.device, self.setting.dtype)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        """Draw integers from `low` to `high - 1`."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.setting.device)

    def weight(self, *shape: int, scale: float | None = None) -> Tensor:
        """Draw normal numbers that require a gradient, by default scaled by the first dimension."""
        return self.normal(
            *shape, scale=shape[0] ** -0.5 if scale is None else scale
        ).requires_grad_()

    def module(self, module: nn.Module) -> nn.Module:
        """Draw new parameters for a module, and move it to the setting's device and type."""
        module = module.to(self.setting.device, self.setting.dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                wide = parameter.dim() > 1
                parameter.copy_(
                    self.normal(
                        *parameter.shape, scale=parameter.shape[-1] ** -0.5 if wide else 0.1
                    )
                )
        return module


# --- language models ------------------------------------------------------------------------------


@program(source="sequence packing, as in TRL and Megatron-LM")
def packed_documents(setting: Setting, variant: str) -> Tensor:
    """Causal attention document by document, or on packed documents; the fault lets positions
    run on in the pack.
    """
    draw = Draw(setting, 11)
    width, vocabulary, lengths = 16, 23, (5, 3, 7, 4)
    embedding, positions = (
        draw.weight(vocabulary, width, scale=1.0),
        draw.weight(32, width, scale=1.0),
    )
    query, key, value = (draw.weight(width, width) for _ in range(3))
    head = draw.weight(width, vocabulary)
    documents = [draw.integers(vocabulary, length + 1) for length in lengths]
    optimizer = torch.optim.SGD(
        [embedding, positions, query, key, value, head], lr=0.1, momentum=0.9
    )
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            total = torch.zeros((), device=setting.device, dtype=setting.dtype)
            for document in documents:
                tokens, targets = document[:-1], document[1:]
                x = embedding[tokens] + positions[: len(tokens)]
                scores = (x @ query) @ (x @ key).T / math.sqrt(width)
                future = torch.ones_like(scores, dtype=torch.bool).triu(1)
                mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ (x @ value)
                total = total + F.cross_entropy((x + mixed) @ head, targets, reduction="sum")
            loss = total / sum(lengths)
        else:
            tokens = torch.cat([document[:-1] for document in documents])
            targets = torch.cat([document[1:] for document in documents])
            count = torch.tensor(lengths, device=setting.device)
            owner = torch.repeat_interleave(
                torch.arange(len(lengths), device=setting.device), count
            )
            place = torch.arange(len(tokens), device=setting.device)
            allowed = (owner[:, None] == owner) & (place[:, None] >= place)
            if variant == "faulty":
                x = F.embedding(tokens, embedding) + F.embedding(place, positions)  # FAULT
            else:
                start = count.cumsum(0) - count
                x = F.embedding(tokens, embedding) + F.embedding(place - start[owner], positions)
            heads = [(x @ weight)[None, None] for weight in (query, key, value)]
            mixed = F.scaled_dot_product_attention(*heads, attn_mask=allowed)[0, 0]
            loss = F.cross_entropy((x + mixed) @ head, targets)
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(
    kinds=("mismatch", "reduced precision"),
    source="policy gradient on generated text, with a KV cache",
)
def cached_policy(setting: Setting, variant: str) -> dict[str, Tensor]:
    """Log-probabilities of sampled tokens by one forward pass or with a KV cache; the fault
    caches in bfloat16.
    """
    draw = Draw(setting, 12)
    batch, prompt, generated, vocabulary = 3, 4, 5, 19
    heads, shared, size = 4, 2, 8
    width, length = heads * size, prompt + generated - 1
    embedding = draw.weight(vocabulary, width, scale=1.0)
    query, key, value = (
        draw.weight(width, width),
        *(draw.weight(width, shared * size) for _ in range(2)),
    )
    gain, output = (
        draw.uniform(width, low=0.5, high=1.5).requires_grad_(),
        draw.weight(width, vocabulary),
    )
    tokens, advantage = draw.integers(vocabulary, batch, prompt + generated), draw.normal(batch)
    frequency = 100.0 ** (
        -torch.arange(size // 2, device=setting.device, dtype=setting.dtype) / (size // 2)
    )
    optimizer = torch.optim.Adam([embedding, query, key, value, gain, output], lr=0.01)

    def rotate(x: Tensor, place: Tensor) -> Tensor:  # x: batch, time, heads, size
        angle = place.to(setting.dtype)[:, None, None] * frequency
        first, second = x.chunk(2, -1)
        cosine, sine = angle.cos(), angle.sin()
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)

    for _ in range(2):
        optimizer.zero_grad()
        place = torch.arange(length, device=setting.device)
        if variant == "plain":
            x = embedding[tokens[:, :-1]]
            normal = gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            q = rotate((normal @ query).view(batch, length, heads, size), place).transpose(1, 2)
            k = rotate((normal @ key).view(batch, length, shared, size), place).transpose(1, 2)
            v = (normal @ value).view(batch, length, shared, size).transpose(1, 2)
            k, v = (each.repeat_interleave(heads // shared, dim=1) for each in (k, v))
            future = torch.ones(length, length, dtype=torch.bool, device=setting.device).triu(1)
            scores = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(future, float("-inf"))
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
            logits = (x + mixed) @ output
        else:
            keys, values, steps = [], [], []
            for time in range(length):
                x = F.embedding(tokens[:, time], embedding)
                normal = F.rms_norm(x, (width,), gain, eps=1e-6)
                q = rotate((normal @ query).view(batch, 1, heads, size), place[time : time + 1])
                k = rotate((normal @ key).view(batch, 1, shared, size), place[time : time + 1])
                v = (normal @ value).view(batch, 1, shared, size)
                if variant == "faulty":
                    k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)  # FAULT
                keys.append(k.to(setting.dtype))
                values.append(v.to(setting.dtype))
                grouped = q.view(batch, shared, heads // shared, size)
                scores = torch.einsum("bsgd,btsd->bsgt", grouped, torch.cat(keys, 1)) * size**-0.5
                mixed = torch.einsum("bsgt,btsd->bsgd", scores.softmax(-1), torch.cat(values, 1))
                steps.append(F.linear(x + mixed.reshape(batch, width), output.T))
            logits = torch.stack(steps, 1)
        answers = tokens[:, prompt:, None]
        chosen = logits[:, prompt - 1 :].log_softmax(-1).gather(-1, answers).squeeze(-1)
        loss = -(advantage * chosen.sum(1)).mean()
        loss.backward()
        optimizer.step()
    return {"loss": loss.detach(), "log_probabilities": chosen.detach()}


@program(
    source=(
        "gradient accumulation on sequences of unequal length, as in Hugging Face Transformers in"
        " 2024"
    )
)
def accumulated_gradients(setting: Setting, variant: str) -> Tensor:
    """A language model on a batch at once or in micro-batches; the fault averages the means of
    the micro-batches.
    """
    draw = Draw(setting, 13)
    batch, length, width, vocabulary, taps = 6, 10, 12, 17, 3
    embedding = draw.weight(vocabulary, width, scale=0.5)
    kernel, hidden = draw.weight(width, width, taps, scale=0.2), draw.weight(width, width)
    tokens = draw.integers(vocabulary, batch, length + 1)
    targets = tokens[:, 1:].clone()
    for row, real in enumerate((10, 9, 3, 2, 6, 5)):
        targets[row, real:] = -100
    weights = [embedding, kernel, hidden]
    optimizer = torch.optim.AdamW(weights, lr=0.02, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            x = embedding[tokens[:, :-1]]
            mixed = F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), kernel).transpose(1, 2)
            logits = torch.tanh(mixed @ hidden) @ embedding.T
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            loss.backward()
            loss = loss.detach()
        else:
            real = (targets != -100).sum()
            loss = torch.zeros((), device=setting.device, dtype=setting.dtype)
            for part, wanted in zip(tokens.split(2), targets.split(2), strict=True):
                padded = F.pad(F.embedding(part[:, :-1], embedding), (0, 0, taps - 1, 0))
                windows = padded.unfold(1, taps, 1)
                mixed = torch.einsum("btik,oik->bto", windows, kernel)
                logits = F.linear(torch.tanh(mixed @ hidden), embedding).transpose(1, 2)
                if variant == "faulty":
                    share = F.cross_entropy(logits, wanted) / (batch // 2)  # FAULT
                else:
                    share = F.cross_entropy(logits, wanted, reduction="sum") / real
                share.backward()
                loss += share.detach()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return loss


@program(source="Hu et al., 2021, LoRA: low-rank adaptation")
def merged_adapters(setting: Setting, variant: str) -> dict[str, Tensor | list[Tensor]]:
    """Low-rank adapters beside frozen weights or merged into them; the fault validates on
    weights merged in place.
    """
    draw = Draw(setting, 14)
    width, hidden, rank = 10, 14, 3
    scale = 6 / rank
    frozen = [draw.normal(hidden, width, scale=0.3), draw.normal(4, hidden, scale=0.3)]
    down = [draw.weight(rank, width, scale=0.3), draw.weight(rank, hidden, scale=0.3)]
    up = [draw.weight(hidden, rank, scale=0.1), draw.weight(4, rank, scale=0.1)]
    data = [(draw.normal(8, width), draw.integers(4, 8)) for _ in range(2)]
    held_out, answers = draw.normal(8, width), draw.integers(4, 8)
    optimizer = torch.optim.AdamW([*down, *up], lr=0.01)

    def beside(x: Tensor) -> Tensor:
        first, second = ((weight, a, b) for weight, a, b in zip(frozen, down, up, strict=True))
        x = F.gelu(x @ first[0].T + scale * (x @ first[1].T) @ first[2].T)
        return x @ second[0].T + scale * (x @ second[1].T) @ second[2].T

    def merged(x: Tensor) -> Tensor:
        first, second = (
            torch.addmm(w, b, a, alpha=scale) for w, a, b in zip(frozen, down, up, strict=True)
        )
        return F.linear(F.gelu(F.linear(x, first)), second)

    history = []
    for x, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(beside(x) if variant == "plain" else merged(x), labels)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if variant == "plain":
                predicted = beside(held_out)
            else:
                whole = []
                for weight, a, b in zip(frozen, down, up, strict=True):
                    if variant == "faulty":
                        whole.append(weight.add_(b @ a, alpha=scale))  # FAULT
                    else:
                        whole.append(weight.add(b @ a, alpha=scale))
                predicted = F.linear(F.gelu(F.linear(held_out, whole[0])), whole[1])
            history.append(F.cross_entropy(predicted, answers))
    return {"loss": loss.detach(), "validation": history}


@program(source="Shazeer et al., 2017; Mixtral's routing to two experts with SwiGLU")
def mixture_of_experts(setting: Setting, variant: str) -> tuple[Tensor, Tensor]:
    """All experts on all tokens or dispatch to two of them; the fault overwrites what the first
    expert wrote.
    """
    draw = Draw(setting, 15)
    tokens, width, hidden, experts, chosen = 14, 8, 12, 4, 2
    router = draw.weight(width, experts)
    gate, up = (
        draw.weight(experts, width, hidden, scale=0.4),
        draw.weight(experts, width, hidden, scale=0.4),
    )
    down = draw.weight(experts, hidden, width, scale=0.3)
    x, target = draw.normal(tokens, width), draw.normal(tokens, width)
    optimizer = torch.optim.Adam([router, gate, up, down], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        probability = (x @ router).softmax(-1)
        if variant == "plain":
            best = probability.topk(chosen, -1).indices
            selected = torch.zeros_like(probability).scatter(1, best, 1.0)
            share = probability * selected
            share = share / share.sum(-1, keepdim=True)
            every = torch.stack(
                [(F.silu(x @ gate[e]) * (x @ up[e])) @ down[e] for e in range(experts)], 1
            )
            mixed = (share[..., None] * every).sum(1)
            balance = experts * sum(
                selected[:, e].mean() / chosen * probability[:, e].mean() for e in range(experts)
            )
        else:
            values, best = probability.topk(chosen, -1)
            values = values / values.sum(-1, keepdim=True)
            mixed = torch.zeros_like(x)
            for expert in range(experts):
                rows, slot = torch.where(best == expert)
                inner = F.silu(x[rows] @ gate[expert]) * (x[rows] @ up[expert])
                share = values[rows, slot, None] * (inner @ down[expert])
                if variant == "faulty":
                    mixed[rows] = share  # FAULT
                else:
                    mixed.index_add_(0, rows, share)
            load = (
                torch.bincount(best.flatten(), minlength=experts).to(setting.dtype) / best.numel()
            )
            balance = experts * torch.dot(load, probability.mean(0))
        loss = F.mse_loss(x + mixed, target)
        (loss + 0.01 * balance).backward()
        optimizer.step()
    return loss.detach(), balance.detach()


@program(source="Gu and Dao, 2023, Mamba; Dao and Gu, 2024, the scan in chunks")
def selective_scan(setting: Setting, variant: str) -> Tensor:
    """A selective state-space layer by a loop or in chunks; the fault decays the carried state a
    step too little.
    """
    draw = Draw(setting, 16)
    batch, length, channels, states, chunk = 2, 12, 4, 3, 4
    to_step, log_rate = draw.weight(channels, channels), draw.weight(channels, states, scale=0.3)
    to_input, to_output = draw.weight(channels, states), draw.weight(channels, states)
    skip, head = draw.weight(channels, scale=1.0), draw.weight(channels, channels)
    x, target = draw.normal(batch, length, channels), draw.normal(batch, length, channels)
    optimizer = torch.optim.SGD(
        [to_step, log_rate, to_input, to_output, skip, head], 0.05, momentum=0.9, nesterov=True
    )
    for _ in range(2):
        optimizer.zero_grad()
        step = F.softplus(x @ to_step)
        entering, leaving = x @ to_input, x @ to_output
        state = torch.zeros(batch, channels, states, device=setting.device, dtype=setting.dtype)
        if variant == "plain":
            outputs = []
            for time in range(length):
                decay = torch.exp(-step[:, time, :, None] * log_rate.exp())
                state = (
                    decay * state
                    + (step[:, time] * x[:, time])[..., None] * entering[:, time, None]
                )
                outputs.append((state * leaving[:, time, None]).sum(-1))
            y = torch.stack(outputs, 1)
        else:
            log_decay = -torch.einsum("btc,cn->btcn", step, log_rate.exp())
            driven = torch.einsum("btc,btn->btcn", step * x, entering)
            pieces = []
            later = torch.ones(chunk, chunk, dtype=torch.bool, device=setting.device).triu(1)[
                ..., None, None
            ]
            for logs, inputs in zip(log_decay.split(chunk, 1), driven.split(chunk, 1), strict=True):
                total = logs.cumsum(1)
                between = (
                    (total[:, :, None] - total[:, None]).masked_fill(later, float("-inf")).exp()
                )
                inside = torch.einsum("bijcn,bjcn->bicn", between, inputs)
                if variant == "faulty":
                    carried = torch.exp(total - logs) * state[:, None]  # FAULT
                else:
                    carried = torch.exp(total) * state[:, None]
                states_here = inside + carried
                state = states_here[:, -1]
                pieces.append(states_here)
            y = torch.einsum("btcn,btn->btc", torch.cat(pieces, 1), leaving)
        loss = F.mse_loss((F.silu(x) * (y + skip * x)) @ head, target)
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(
    kinds=("mismatch", "different random numbers"),
    source="activation checkpointing of blocks with dropout",
)
def checkpointed_dropout(setting: Setting, variant: str) -> Tensor:
    """Residual blocks with dropout, kept or computed again; the fault draws other masks in the
    second computation.
    """
    draw = Draw(setting, 17)
    width, hidden, depth = 8, 16, 3
    blocks = [
        draw.module(
            nn.ModuleList([nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)])
        )
        for _ in range(depth)
    ]
    x, target = draw.normal(6, width), draw.normal(6, width)
    parameters = list(itertools.chain.from_iterable(block.parameters() for block in blocks))
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    torch.manual_seed(18)

    def block_output(x: Tensor, norm: nn.Module, first: nn.Module, second: nn.Module) -> Tensor:
        inner = F.gelu(first(norm(x)))
        kept = torch.rand(inner.shape, dtype=torch.float64).to(setting.device) < 0.8
        return x + second(inner * kept / 0.8)

    for _ in range(2):
        optimizer.zero_grad()
        y = x
        for block in blocks:
            if variant == "plain":
                y = block_output(y, *block)
            elif variant == "rewritten":
                y = checkpoint(block_output, y, *block, use_reentrant=False)
            else:
                # FAULT
                y = checkpoint(
                    block_output, y, *block, use_reentrant=False, preserve_rng_state=False
                )
        loss = (y - target).square().mean() if variant == "plain" else F.mse_loss(y, target)
        loss.backward()
        optimizer.step()
    return loss.detach()


# --- generative models ----------------------------------------------------------------------------


@program(source="Ho et al., 2020; Salimans and Ho, 2022: v-prediction, with averaged weights")
def diffusion(setting: Setting, variant: str) -> dict[str, Tensor | list[Tensor]]:
    """Denoising of points, sample by sample or vectorised; the fault takes the noise level of
    the step before.
    """
    draw = Draw(setting, 21)
    batch, steps, width = 8, 50, 16
    model = draw.module(
        nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
    )
    last = draw.module(nn.Linear(width, 2))
    weights = [*model.parameters(), *last.parameters()]
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    betas = torch.linspace(1e-3, 0.1, steps, dtype=torch.float64).to(setting.device, setting.dtype)
    for _ in range(2):
        clean, noise, when = (
            draw.normal(batch, 2),
            draw.normal(batch, 2),
            draw.integers(steps, batch),
        )
        optimizer.zero_grad()
        if variant == "plain":
            losses = []
            for sample in range(batch):
                kept = torch.ones((), device=setting.device, dtype=setting.dtype)
                for beta in betas[: int(when[sample]) + 1]:
                    kept = kept * (1 - beta)
                noisy = kept.sqrt() * clean[sample] + (1 - kept).sqrt() * noise[sample]
                phase = when[sample] / steps * torch.pi
                time = torch.stack([phase.sin(), phase.cos(), (2 * phase).sin(), (2 * phase).cos()])
                predicted = last(model(torch.cat([noisy, time.to(setting.dtype)])))
                velocity = kept.sqrt() * noise[sample] - (1 - kept).sqrt() * clean[sample]
                losses.append((predicted - velocity).square().sum())
            loss = sum(losses) / (2 * batch)
        else:
            level = F.pad(torch.cumprod(1 - betas, 0), (1, 0), value=1.0)
            if variant == "faulty":
                kept = level[when][:, None]  # FAULT
            else:
                after = when + 1
                kept = level[after][:, None]
            signal, spread = kept.sqrt(), (1 - kept).sqrt()
            noisy = signal * clean + spread * noise
            phase = when[:, None] / steps * torch.pi
            time = torch.cat([phase.sin(), phase.cos(), (2 * phase).sin(), (2 * phase).cos()], 1)
            predicted = last(model(torch.cat([noisy, time.to(setting.dtype)], 1)))
            loss = F.mse_loss(predicted, signal * noise - spread * clean)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if variant == "plain":
                averages = [
                    0.9 * mean + 0.1 * weight
                    for mean, weight in zip(averages, weights, strict=True)
                ]
            else:
                torch._foreach_lerp_(averages, weights, 0.1)
    return {"loss": loss.detach(), "averages": averages}


@program(source="Dinh et al., 2016, RealNVP, with the sigmoid scale of Glow")
def coupling_flow(setting: Setting, variant: str) -> Tensor:
    """A flow's log-determinant from its Jacobian or from its scales; the fault adds raw outputs,
    not log-scales.
    """
    draw = Draw(setting, 22)
    size, hidden = 4, 10
    nets = [
        draw.module(nn.Sequential(nn.Linear(size // 2, hidden), nn.Tanh(), nn.Linear(hidden, size)))
        for _ in range(2)
    ]
    log_gain, shift = draw.weight(size, scale=0.2), draw.weight(size, scale=0.2)
    data = draw.normal(6, size) * 1.5 + 0.3
    optimizer = torch.optim.Adam(
        [log_gain, shift, *nets[0].parameters(), *nets[1].parameters()], lr=0.01
    )

    def transform(x: Tensor) -> Tensor:
        z = (x + shift) * log_gain.exp()
        for net in nets:
            fixed, moved = z[: size // 2], z[size // 2 :]
            raw, offset = net(fixed).chunk(2, -1)
            z = torch.cat([(moved + offset) / (1 + torch.exp(-raw - 2)), fixed])
        return z

    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            z = torch.stack([transform(x) for x in data])
            log_determinant = torch.linalg.slogdet(vmap(jacrev(transform))(data)).logabsdet
            density = -0.5 * (z**2 + math.log(2 * math.pi)).sum(-1) + log_determinant
        else:
            z = torch.exp(log_gain) * (data + shift)
            log_determinant = log_gain.sum().expand(len(data))
            for net in nets:
                fixed, moved = z.split(size // 2, -1)
                raw, offset = net(fixed).split(size // 2, -1)
                z = torch.cat([(moved + offset) * torch.sigmoid(raw + 2), fixed], -1)
                if variant == "faulty":
                    log_determinant = log_determinant + raw.sum(-1)  # FAULT
                else:
                    log_determinant = log_determinant + F.logsigmoid(raw + 2).sum(-1)
            density = (
                -0.5 * z.square().sum(-1) - 0.5 * size * math.log(2 * math.pi) + log_determinant
            )
        loss = -density.mean() / (size * math.log(2))
        loss.backward()
        optimizer.step()
    return loss.detach()


# --- vision, speech, recommendation ---------------------------------------------------------------


@program(source="Lin et al., 2017, focal loss; Rezatofighi et al., 2019, generalised IoU")
def detection(setting: Setting, variant: str) -> dict[str, Tensor]:
    """Focal and box losses anchor by anchor or vectorised; the fault lets a negative overlap of
    boxes pass.
    """
    draw = Draw(setting, 31)
    channels, grid, classes, alpha, gamma = 6, 4, 3, 0.25, 2.0
    stem, to_class = (
        draw.weight(channels, 3, 3, 3, scale=0.3),
        draw.weight(classes, channels, scale=0.3),
    )
    to_box = draw.weight(4, channels, scale=0.3)
    image = draw.normal(1, 3, 2 * grid, 2 * grid)
    labels = draw.integers(classes + 1, grid * grid)  # zero is background
    corner, extent = (
        draw.uniform(grid * grid, 2, high=3.0),
        draw.uniform(grid * grid, 2, low=0.5, high=1.5),
    )
    wanted = torch.cat([corner, corner + extent], 1)
    cells = (
        torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).to(
            setting.device, setting.dtype
        )
        + 0.5
    )
    optimizer = torch.optim.SGD([stem, to_class, to_box], lr=0.05, momentum=0.9, weight_decay=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            features = F.silu(F.conv2d(image, stem, stride=2, padding=1)).flatten(2)[0].T
        else:
            features = F.silu(F.unfold(image, 3, stride=2, padding=1)[0].T @ stem.flatten(1).T)
        scores, deltas = features @ to_class.T, features @ to_box.T
        centre, half = cells + deltas[:, :2], deltas[:, 2:].exp() / 2
        boxes = torch.cat([centre - half, centre + half], 1)
        positive = labels > 0
        if variant == "plain":
            focal, regression = 0.0, 0.0
            for anchor in range(grid * grid):
                for kind in range(classes):
                    p = torch.sigmoid(scores[anchor, kind])
                    if labels[anchor] == kind + 1:
                        focal = focal - alpha * (1 - p) ** gamma * torch.log(p)
                    else:
                        focal = focal - (1 - alpha) * p**gamma * torch.log(1 - p)
                if positive[anchor]:
                    a, b = boxes[anchor], wanted[anchor]
                    across = torch.minimum(a[2], b[2]) - torch.maximum(a[0], b[0])
                    along = torch.minimum(a[3], b[3]) - torch.maximum(a[1], b[1])
                    overlap = torch.relu(across) * torch.relu(along)
                    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap
                    broad = torch.maximum(a[2], b[2]) - torch.minimum(a[0], b[0])
                    hull = broad * (torch.maximum(a[3], b[3]) - torch.minimum(a[1], b[1]))
                    regression = regression + 1 - overlap / union + (hull - union) / hull
        else:
            truth = F.one_hot(labels, classes + 1)[:, 1:].to(setting.dtype)
            entropy = F.binary_cross_entropy_with_logits(scores, truth, reduction="none")
            factor = torch.where(truth == 1, alpha, 1 - alpha)
            focal = (factor * (1 - torch.exp(-entropy)).pow(gamma) * entropy).sum()
            a, b = boxes[positive], wanted[positive]
            areas = [(box[:, 2:] - box[:, :2]).prod(1) for box in (a, b)]
            sides = torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])
            if variant == "faulty":
                overlap = sides[:, 0] * sides[:, 1]  # FAULT
            else:
                overlap = sides.clamp(min=0)[:, 0] * sides.clamp(min=0)[:, 1]
            union = areas[0] + areas[1] - overlap
            span = torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])
            hull = span[:, 0] * span[:, 1]
            regression = (1 - overlap / union + 1 - union / hull).sum()
        count = positive.sum().clamp(min=1)
        loss = (focal + regression) / count
        loss.backward()
        optimizer.step()
    return {"focal": (focal / count).detach(), "boxes": (regression / count).detach()}


@program(source="Graves et al., 2006, connectionist temporal classification")
def speech_ctc(setting: Setting, variant: str) -> Tensor:
    """CTC by its forward recursion or by the library; the fault counts the padded frames as
    speech.
    """
    draw = Draw(setting, 32)
    symbols, features, hidden = 6, 5, 10
    frames, spoken = (9, 7, 8), ((1, 3, 3), (2, 5), (4, 1, 2, 5))
    encoder = draw.module(nn.GRU(features, hidden, batch_first=True))
    head = draw.module(nn.Linear(hidden, symbols))
    sound = [draw.normal(count, features) for count in frames]
    targets = [torch.tensor(each, device=setting.device) for each in spoken]
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            losses = []
            for wave, target in zip(sound, spoken, strict=True):
                scores = head(encoder(wave[None])[0][0])
                logs = scores - scores.logsumexp(-1, keepdim=True)
                extended = [0]
                for symbol in target:
                    extended += [symbol, 0]
                never = torch.full((), -1e30, device=setting.device, dtype=setting.dtype)
                forward = [logs[0, 0], logs[0, extended[1]]] + [never] * (len(extended) - 2)
                for time in range(1, len(wave)):
                    before, forward = forward, []
                    for place, symbol in enumerate(extended):
                        ways = [before[place]] + ([before[place - 1]] if place else [])
                        if place > 1 and symbol not in (0, extended[place - 2]):
                            ways.append(before[place - 2])
                        forward.append(torch.stack(ways).logsumexp(0) + logs[time, symbol])
                losses.append(-torch.logaddexp(forward[-1], forward[-2]) / len(target))
            loss = torch.stack(losses).mean()
        else:
            padded = pad_sequence(sound, batch_first=True)
            logs = head(encoder(padded)[0]).log_softmax(-1).transpose(0, 1)
            lengths = torch.tensor([len(each) for each in spoken])
            if variant == "faulty":
                heard = torch.full((len(frames),), logs.shape[0])  # FAULT
            else:
                heard = torch.tensor([len(wave) for wave in sound])
            loss = F.ctc_loss(logs, pad_sequence(targets, batch_first=True), heard, lengths)
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(
    source="two-tower retrieval with in-batch negatives; Chen et al., 2023, the Lion optimizer"
)
def recommendation(setting: Setting, variant: str) -> list[Tensor]:
    """A user's mean of past items, one by one or on a padded batch; the fault counts the padding
    in the mean.
    """
    draw = Draw(setting, 33)
    items, width, users = 15, 8, 8
    catalogue = draw.weight(items, width, scale=0.7)
    user_tower, item_tower = draw.weight(width, width), draw.weight(width, width)
    popularity = draw.uniform(items, low=0.1)
    lengths = (4, 1, 6, 2, 3, 5, 2, 1)
    rows = [
        (draw.integers(items, lengths[user], low=1), draw.integers(items, 1, low=1))
        for user in range(users)
    ]
    weights = [catalogue, user_tower, item_tower]
    moments = [torch.zeros_like(weight) for weight in weights]

    def collate(batch: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        histories = [history for history, _ in batch]
        mask = pad_sequence([torch.ones_like(history) for history in histories], batch_first=True)
        return (
            histories,
            pad_sequence(histories, batch_first=True),
            mask,
            torch.cat([item for _, item in batch]),
        )

    losses = []
    for histories, padded, mask, bought in DataLoader(rows, batch_size=4, collate_fn=collate):
        if variant == "plain":
            pooled = torch.stack(
                [catalogue[history].sum(0) / len(history) for history in histories]
            )
            person = torch.relu(pooled @ user_tower)
            scores = person @ (catalogue[bought] @ item_tower).T - popularity[bought].log()
            loss = -(scores.diagonal() - scores.exp().sum(1).log()).mean()
        else:
            past = F.embedding(padded, catalogue)
            if variant == "faulty":
                pooled = past.mean(dim=1)  # FAULT
            else:
                real = mask.to(setting.dtype)
                pooled = torch.einsum("bt,btd->bd", real, past) / real.sum(1, keepdim=True)
            person = F.relu(F.linear(pooled, user_tower.T))
            goods = F.linear(F.embedding(bought, catalogue), item_tower.T)
            scores = torch.einsum("ud,id->ui", person, goods) - popularity.log().index_select(
                0, bought
            )
            loss = F.cross_entropy(scores, torch.arange(len(bought), device=setting.device))
        for weight in weights:
            weight.grad = None
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for weight, moment in zip(weights, moments, strict=True):
                if variant == "plain":
                    direction = torch.sign(0.9 * moment + 0.1 * weight.grad)
                    weight -= 0.01 * (direction + 0.1 * weight)
                    moment.copy_(0.99 * moment + 0.01 * weight.grad)
                else:
                    direction = torch.lerp(moment, weight.grad, 0.1).sign()
                    weight.mul_(1 - 0.01 * 0.1).add_(direction, alpha=-0.01)
                    moment.lerp_(weight.grad, 0.01)
    return losses


@program(source="Chen et al., 2020, SimCLR; Foret et al., 2020, sharpness-aware minimisation")
def sharpness_aware_contrast(setting: Setting, variant: str) -> Tensor:
    """Contrastive learning with sharpness-aware steps, by loops or by matrices; the fault scales
    each tensor alone.
    """
    draw = Draw(setting, 34)
    pairs, size, hidden, width, temperature, radius = 5, 6, 12, 8, 0.5, 0.1
    weights = [
        draw.weight(size, hidden),
        draw.weight(hidden, scale=0.1),
        draw.weight(hidden, width),
    ]
    first, second = draw.normal(pairs, size), draw.normal(pairs, size)

    def loss_of(parameters: list[Tensor]) -> Tensor:
        x = torch.tanh(torch.cat([first, second]) @ parameters[0] + parameters[1]) @ parameters[2]
        if variant == "plain":
            z = x / x.norm(dim=1, keepdim=True)
            terms = []
            for row in range(2 * pairs):
                others = [
                    torch.dot(z[row], z[k]) / temperature for k in range(2 * pairs) if k != row
                ]
                match = torch.dot(z[row], z[(row + pairs) % (2 * pairs)]) / temperature
                terms.append(torch.logsumexp(torch.stack(others), 0) - match)
            return torch.stack(terms).mean()
        z = F.normalize(x)
        itself = torch.eye(2 * pairs, dtype=torch.bool, device=setting.device)
        scores = (z @ z.T / temperature).masked_fill(itself, float("-inf"))
        return F.cross_entropy(scores, torch.arange(2 * pairs, device=setting.device).roll(pairs))

    for _ in range(2):
        gradients = torch.autograd.grad(loss_of(weights), weights)
        if variant == "plain":
            size_of_all = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            climb = [radius * gradient / size_of_all for gradient in gradients]
        else:
            norms = torch.stack(torch._foreach_norm(gradients))
            if variant == "faulty":
                # FAULT
                climb = [
                    each * (radius / norm) for each, norm in zip(gradients, norms, strict=True)
                ]
            else:
                climb = torch._foreach_mul(gradients, radius / torch.linalg.vector_norm(norms))
        with torch.no_grad():
            for weight, step in zip(weights, climb, strict=True):
                weight.add_(step)
                weight.grad = None
        loss = loss_of(weights)
        loss.backward()
        with torch.no_grad():
            for weight, step in zip(weights, climb, strict=True):
                weight.sub_(step).sub_(weight.grad, alpha=0.2)
    return loss.detach()


# --- smaller and cheaper networks -----------------------------------------------------------------


@program(source="Hinton et al., 2015, distillation, with label smoothing")
def distillation(setting: Setting, variant: str) -> tuple[Tensor, Tensor]:
    """Divergence from a teacher by its formula or by the library; the fault divides it by the
    classes too.
    """
    draw = Draw(setting, 41)
    batch, size, hidden, classes, temperature, smoothing = 8, 6, 10, 5, 3.0, 0.1
    teacher = draw.module(nn.Sequential(nn.Linear(size, 20), nn.GELU(), nn.Linear(20, classes)))
    first, last = draw.weight(size, hidden), draw.module(nn.Linear(hidden, classes))
    norm = draw.module(nn.BatchNorm1d(hidden))
    x, labels = 2 * draw.normal(batch, size), draw.integers(classes, batch)
    optimizer = torch.optim.SGD(
        [first, *norm.parameters(), *last.parameters()], lr=0.1, momentum=0.9
    )
    for _ in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            guide = teacher(x)
        inner = x @ first
        if variant == "plain":
            centred = inner - inner.mean(0)
            normal = (
                centred / (centred.square().mean(0) + norm.eps).sqrt() * norm.weight + norm.bias
            )
            logits = last(torch.relu(normal))
            target = torch.full(
                (batch, classes), smoothing / classes, device=setting.device, dtype=setting.dtype
            )
            target[torch.arange(batch), labels] += 1 - smoothing
            hard = -(target * logits.log_softmax(-1)).sum(-1).mean()
            p = (guide / temperature).softmax(-1)
            soft = (
                (p * (p.log() - (logits / temperature).log_softmax(-1))).sum()
                / batch
                * temperature**2
            )
        else:
            logits = last(F.relu(norm(inner)))
            hard = F.cross_entropy(logits, labels, label_smoothing=smoothing)
            student, p = (
                F.log_softmax(logits / temperature, -1),
                F.log_softmax(guide / temperature, -1),
            )
            if variant == "faulty":
                # FAULT
                soft = (
                    F.kl_div(student, p, reduction="none", log_target=True).mean() * temperature**2
                )
            else:
                soft = F.kl_div(student, p, reduction="batchmean", log_target=True) * temperature**2
        (0.3 * hard + 0.7 * soft).backward()
        optimizer.step()
    return hard.detach(), soft.detach()


@program(
    source="quantisation-aware training with the straight-through estimator; Bengio et al., 2013"
)
def quantised_training(setting: Setting, variant: str) -> dict[str, Tensor]:
    """Four-bit weights with a written backward or by detaching; the fault passes gradients of
    clipped weights.
    """
    draw = Draw(setting, 42)
    size, hidden, classes = 8, 12, 4
    weights = [draw.weight(hidden, size), draw.weight(classes, hidden)]
    bias = draw.weight(hidden, scale=0.2)
    x, labels = draw.normal(10, size), draw.integers(classes, 10)
    optimizer = torch.optim.Adam([*weights, bias], lr=0.01)

    class Quantise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward((weight / scale >= -8) & (weight / scale <= 7))
            return torch.clamp(torch.round(weight / scale), -8, 7) * scale

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient * ctx.saved_tensors[0], None

    for _ in range(2):
        optimizer.zero_grad()
        short = []
        for weight in weights:
            scale = 0.6 * weight.detach().abs().amax(1, keepdim=True) / 7
            if variant == "plain":
                short.append(Quantise.apply(weight, scale))
            elif variant == "rewritten":
                inside = torch.clamp(weight / scale, -8, 7)
                short.append((inside + (inside.round() - inside).detach()) * scale)
            else:
                inside = weight / scale
                # FAULT
                short.append((inside + (inside.clamp(-8, 7).round() - inside).detach()) * scale)
        if variant == "plain":
            logits = torch.relu(x @ short[0].T + bias) @ short[1].T
        else:
            logits = F.linear(F.linear(x, short[0], bias).relu(), short[1])
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
    return {"loss": loss.detach(), "logits": logits.detach()}


# --- optimizers, meta learning, reinforcement learning --------------------------------------------


@program(source="Jordan et al., 2024, Muon: momentum made orthogonal by Newton-Schulz iterations")
def orthogonal_momentum(setting: Setting, variant: str) -> None:
    """Newton-Schulz steps matrix by matrix or on a stack; the fault swaps the weights of
    momentum and gradient.
    """
    draw = Draw(setting, 51)
    size, hidden, rate, inertia = 8, 16, 0.03, 0.9
    weights = [draw.weight(*shape, scale=0.3) for shape in 2 * ((size, hidden), (hidden, size))]
    x, target = draw.normal(20, size), draw.normal(20, size)
    averages = [torch.zeros_like(weight) for weight in weights]
    stacked = torch.zeros(len(weights), size, hidden, device=setting.device, dtype=setting.dtype)
    for _ in range(3):
        for weight in weights:
            weight.grad = None
        y = x
        for up, down in (weights[:2], weights[2:]):
            y = y + F.gelu(y @ up) @ down
        loss = (y - target).square().mean()
        loss.backward()
        with torch.no_grad():
            if variant == "plain":
                for index, weight in enumerate(weights):
                    averages[index] = inertia * averages[index] + (1 - inertia) * weight.grad
                    update = inertia * averages[index] + (1 - inertia) * weight.grad
                    wide = update if update.shape[0] <= update.shape[1] else update.T
                    wide = wide / (wide.norm() + 1e-7)
                    for _ in range(5):
                        square = wide @ wide.T
                        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
                    update = wide if update.shape[0] <= update.shape[1] else wide.T
                    weight -= rate * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5 * update
            else:
                gradients = torch.stack(
                    [w.grad if w.shape[0] == size else w.grad.T for w in weights]
                )
                if variant == "faulty":
                    stacked.lerp_(gradients, inertia)  # FAULT
                else:
                    stacked.lerp_(gradients, 1 - inertia)
                wide = torch.lerp(gradients, stacked, inertia)
                wide = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
                for _ in range(5):
                    square = torch.bmm(wide, wide.mT)
                    mixed = torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315)
                    wide = torch.baddbmm(wide, mixed, wide, beta=3.4445)
                for weight, update in zip(weights, wide.unbind(), strict=True):
                    if weight.shape[0] == size:
                        weight.sub_(update, alpha=rate)
                    else:
                        weight.sub_(update.T, alpha=rate * math.sqrt(hidden / size))


@program(source="Finn et al., 2017, model-agnostic meta-learning")
def meta_learning(setting: Setting, variant: str) -> Tensor:
    """Second-order meta-gradients by a loop or by mapped functions; the fault detaches the inner
    gradients.
    """
    draw = Draw(setting, 52)
    tasks, shots, hidden, rate = 4, 6, 10, 0.1
    model = draw.module(nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)))
    height, phase = (
        draw.uniform(tasks, 1, 1, low=0.5, high=2.0),
        draw.uniform(tasks, 1, 1, high=3.0),
    )
    x = draw.uniform(tasks, 2 * shots, 1, low=-3.0, high=3.0)
    y = height * torch.sin(x + phase)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def error(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    def adapted_error(x: Tensor, y: Tensor) -> Tensor:
        fast = dict(model.named_parameters())
        for _ in range(2):
            slopes = grad(error)(fast, x[:shots], y[:shots])
            if variant == "faulty":
                fast = {name: fast[name] - rate * slopes[name].detach() for name in fast}  # FAULT
            else:
                fast = {name: fast[name] - rate * slopes[name] for name in fast}
        return error(fast, x[shots:], y[shots:])

    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            losses = []
            for task in range(tasks):
                first, offset, second, end = model.parameters()
                for _ in range(2):
                    inner = torch.tanh(x[task, :shots] @ first.T + offset) @ second.T + end
                    support = (inner - y[task, :shots]).square().mean()
                    slopes = torch.autograd.grad(
                        support, (first, offset, second, end), create_graph=True
                    )
                    moved = zip((first, offset, second, end), slopes, strict=True)
                    first, offset, second, end = (weight - rate * slope for weight, slope in moved)
                outer = torch.tanh(x[task, shots:] @ first.T + offset) @ second.T + end
                losses.append((outer - y[task, shots:]).square().mean())
            loss = sum(losses) / tasks
        else:
            loss = vmap(adapted_error)(x, y).mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


@program(source="Schulman et al., 2016 and 2017: generalised advantages and PPO")
def clipped_policy(setting: Setting, variant: str) -> dict[str, Tensor]:
    """Generalised advantages by a backward loop or by a matrix; the fault lets them leak between
    episodes.
    """
    draw = Draw(setting, 53)
    length, games, size, actions, discount, trace = 9, 3, 5, 4, 0.97, 0.9
    trunk = draw.module(nn.Sequential(nn.Linear(size, 12), nn.Tanh()))
    actor, critic = draw.module(nn.Linear(12, actions)), draw.module(nn.Linear(12, 1))
    seen, taken = draw.normal(length + 1, games, size), draw.integers(actions, length, games)
    reward = draw.normal(length, games)
    done = (draw.uniform(length, games) < 0.25).to(setting.dtype)
    optimizer = torch.optim.Adam(
        [*trunk.parameters(), *actor.parameters(), *critic.parameters()], lr=0.02
    )
    with torch.no_grad():
        inner = trunk(seen)
        values = critic(inner).squeeze(-1)
        old = actor(inner[:-1]).log_softmax(-1).gather(-1, taken[..., None]).squeeze(-1)
        if variant == "plain":
            advantage, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
            for time in reversed(range(length)):
                surprise = (
                    reward[time] + discount * values[time + 1] * (1 - done[time]) - values[time]
                )
                running = surprise + discount * trace * (1 - done[time]) * running
                advantage[time] = running
        else:
            surprise = torch.addcmul(reward - values[:-1], values[1:], 1 - done, value=discount)
            steps = torch.arange(length, device=setting.device)
            power = torch.triu(
                (discount * trace) ** (steps - steps[:, None]).clamp(min=0).to(setting.dtype)
            )
            if variant == "faulty":
                advantage = power @ surprise  # FAULT
            else:
                episode = done.cumsum(0) - done
                same = (episode[:, None] == episode).to(setting.dtype)
                advantage = torch.einsum("ts,tsg,sg->tg", power, same, surprise)
        target = advantage + values[:-1]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(2):
        optimizer.zero_grad()
        inner = trunk(seen[:-1])
        if variant == "plain":
            policy = torch.distributions.Categorical(logits=actor(inner))
            ratio = torch.exp(policy.log_prob(taken) - old)
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = policy.entropy().mean()
            mistake = (critic(inner).squeeze(-1) - target).square().mean() / 2
        else:
            logs = F.log_softmax(actor(inner), -1)
            ratio = (logs.gather(-1, taken[..., None])[..., 0] - old).exp()
            bounded = torch.where(advantage > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
            gain = (bounded * advantage).sum() / advantage.numel()
            entropy = -(logs.exp() * logs).sum(-1).mean()
            mistake = 0.5 * F.mse_loss(critic(inner)[..., 0], target)
        loss = -gain + 0.5 * mistake - 0.01 * entropy
        loss.backward()
        nn.utils.clip_grad_norm_(
            [*trunk.parameters(), *actor.parameters(), *critic.parameters()], 0.5
        )
        optimizer.step()
    return {"loss": loss.detach(), "entropy": entropy.detach()}


# --- graphs and physics ---------------------------------------------------------------------------


@program(source="Velickovic et al., 2018, graph attention networks")
def graph_attention(setting: Setting, variant: str) -> None:
    """Attention on a dense adjacency matrix or edge by edge; the fault normalises over the edges
    that leave a node.
    """
    draw = Draw(setting, 61)
    nodes, size, heads, width, classes = 10, 6, 2, 4, 3
    project = draw.weight(size, heads * width)
    from_source, to_target = (
        draw.weight(heads, width, scale=0.5),
        draw.weight(heads, width, scale=0.5),
    )
    head = draw.weight(heads * width, classes)
    x, labels = draw.normal(nodes, size), draw.integers(classes, nodes)
    linked = (draw.uniform(nodes, nodes) < 0.3) | torch.eye(
        nodes, dtype=torch.bool, device=setting.device
    )
    known = torch.arange(0, nodes, 2, device=setting.device)
    optimizer = torch.optim.SGD([project, from_source, to_target, head], lr=0.2)
    for _ in range(2):
        optimizer.zero_grad()
        h = (x @ project).view(nodes, heads, width)
        out, into = (h * from_source).sum(-1), (h * to_target).sum(-1)
        if variant == "plain":
            scores = F.leaky_relu(into[:, None] + out[None], 0.2)  # target, source, head
            share = scores.masked_fill(~linked[..., None], float("-inf")).softmax(1)
            mixed = torch.einsum("tsh,shw->thw", share, h)
        else:
            target, source = linked.nonzero(as_tuple=True)
            scores = F.leaky_relu(into[target] + out[source], 0.2)
            raised = torch.exp(scores - scores.detach().max())
            total = torch.zeros(nodes, heads, device=setting.device, dtype=setting.dtype)
            if variant == "faulty":
                share = raised / total.index_add(0, source, raised)[source]  # FAULT
            else:
                share = raised / total.index_add(0, target, raised)[target]
            mixed = torch.zeros_like(h).index_add(0, target, share[..., None] * h[source])
        logits = F.elu(mixed).flatten(1) @ head
        F.cross_entropy(logits[known], labels[known]).backward()
        optimizer.step()


@program(source="Raissi et al., 2019, physics-informed networks: Burgers' equation")
def physics_informed(setting: Setting, variant: str) -> tuple[Tensor, Tensor]:
    """Derivatives in space and time by autograd or carried forward; the fault drops a term of
    the second derivative.
    """
    draw = Draw(setting, 62)
    widths, viscosity = (2, 10, 10, 1), 0.05
    weights = [draw.weight(a, b) for a, b in itertools.pairwise(widths)]
    biases = [draw.weight(b, scale=0.2) for b in widths[1:]]
    points = draw.uniform(12, 2, low=-1.0)
    start = torch.cat(
        [draw.uniform(6, 1, low=-1.0), torch.zeros(6, 1).to(setting.device, setting.dtype)], 1
    )
    optimizer = torch.optim.Adam([*weights, *biases], lr=0.01)

    def network(x: Tensor) -> Tensor:
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            x = torch.tanh(x @ weight + bias)
        return x @ weights[-1] + biases[-1]

    for _ in range(2):
        optimizer.zero_grad()
        if variant == "plain":
            place, time = (points[:, k : k + 1].clone().requires_grad_() for k in range(2))
            u = network(torch.cat([place, time], 1))
            u_x, u_t = torch.autograd.grad(u.sum(), (place, time), create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), place, create_graph=True)
        else:
            u = points
            u_x, u_t = (
                torch.eye(2, device=setting.device, dtype=setting.dtype)
                .unsqueeze(1)
                .expand(2, len(points), 2)
            )
            u_xx = torch.zeros_like(points)
            for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
                u = torch.tanh(torch.addmm(bias, u, weight))
                u_x, u_t, u_xx = u_x @ weight, u_t @ weight, u_xx @ weight
                slope = 1 - u.square()
                if variant == "faulty":
                    u_xx = -2 * u * slope * u_x.square()  # FAULT
                else:
                    bent = u_xx - 2 * u * u_x.square()
                    u_xx = slope * bent
                u_x, u_t = slope * u_x, slope * u_t
            u = torch.addmm(biases[-1], u, weights[-1])
            u_x, u_t, u_xx = u_x @ weights[-1], u_t @ weights[-1], u_xx @ weights[-1]
        residual = (u_t + u * u_x - viscosity * u_xx).square().mean()
        initial = (network(start) + torch.sin(torch.pi * start[:, :1])).square().mean()
        (residual + initial).backward()
        optimizer.step()
    return residual.detach(), initial.detach()


# --- check ----------------------------------------------------------------------------------------


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value, with names that describe their positions."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{part}", tensor) for part, tensor in value.named_parameters())
    elif isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for part, inner in parts:
            yield from _tensors(f"{name}[{part}]", inner)


def results(each: Program, variant: str, setting: Setting) -> dict[str, Tensor]:
    """Return a program's results, and the final weights in its variables, with their gradients."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()

    def at_return(frame: FrameType, event: str, _: Any) -> None:
        if event != "return" or frame.f_code is not each.function.__code__:
            return
        named = (_tensors(variable, value) for variable, value in frame.f_locals.items())
        for name, tensor in itertools.chain.from_iterable(named):
            if tensor.is_leaf and tensor.requires_grad and id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor.detach().clone()
                if tensor.grad is not None:
                    found[f"gradient of {name}"] = tensor.grad.clone()

    sys.setprofile(at_return)
    try:
        returned = each.step(variant)(setting)
    finally:
        sys.setprofile(None)
    return found | dict(_tensors("returned", returned))


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference between results of one name, relative to the largest number."""
    largest = 0.0
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].double(), theirs[name].double()
        largest = max(largest, float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)))
    return largest


def check() -> None:
    """Raise `AssertionError` unless, in float64, rewritten programs agree with plain ones and
    faulty ones do not.
    """
    setting = Setting("cpu", precision="float64")
    for each in PROGRAMS:
        with setting.apply():
            plain, rewritten, faulty = (results(each, variant, setting) for variant in VARIANTS)
        assert any(name.startswith("gradient") for name in plain.keys() & rewritten.keys()), (
            f"{each.name}: no weights"
        )
        assert all(
            tensor.isfinite().all()
            for found in (plain, rewritten, faulty)
            for tensor in found.values()
        )
        same, other = difference(rewritten, plain), difference(faulty, plain)
        assert same < 1e-9, f"{each.name}: rewritten differs by {same:.1e}"
        assert other > 1e-4, f"{each.name}: faulty differs by only {other:.1e}"
        assert 1 <= len(each.fault_lines) <= 2, (
            f"{each.name}: {len(each.fault_lines)} lines are marked"
        )
    print(f"{len(PROGRAMS)} programs: rewritten agrees with plain, faulty does not")


if __name__ == "__main__":
    typer.run(check)
