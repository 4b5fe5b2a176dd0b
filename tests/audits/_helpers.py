"""Small networks, steps and audits for the tests of audits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gpulab as gl
from gpulab._torch_internals import operation_name
from gpulab.audits._rounding import forward_error

A, B = "cpu", "cpu:threads=1"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Attends(nn.Module):
    """A network with word embeddings, causal attention, and a last layer with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16, padding_idx=0), nn.Embedding(9, 16)
        self.block = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, activation="gelu", batch_first=True
        )
        self.last = nn.Linear(16, 20, bias=False)
        self.last.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        mask = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        h = self.words(words) + self.places(torch.arange(words.shape[1]))
        return self.last(self.block(h, src_mask=mask)).transpose(1, 2)


class Recurs(nn.Module):
    """A recurrent cell that is applied step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        for part in x.unbind(1):
            h = self.cell(part, h)
        return self.last(h)


def words(seed: int) -> Tensor:
    return torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(seed))


def labels(count: int, of: int = 3) -> Tensor:
    return torch.arange(count) % of


def convolutions() -> nn.Module:
    below = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*below, nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(32, 3))


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "layers": (layers, lambda seed: (drawn(6, 8, seed=seed), labels(6))),
    "convolutions": (convolutions, lambda seed: (drawn(5, 3, 8, 8, seed=seed), labels(5))),
    "attention": (Attends, lambda seed: (words(seed), words(seed + 1))),
    "recurrence": (Recurs, lambda seed: (drawn(4, 3, 6, seed=seed), labels(4))),
}


class Own(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def seeded(make):
    torch.manual_seed(0)
    return make()


def with_a_function(function):
    """Return a step of a network with the function between two layers."""
    return gl.Step(
        seeded(lambda: nn.Sequential(nn.Linear(20, 30), Own(function), nn.Linear(30, 5))),
        drawn(8, 20),
    )


def recorded(step, setting=A):
    return gl.record(step, setting, progress=False)


def audited(step, a=A, b=B, **options):
    return gl.audit(step, a, b, progress=False, **options)


def faults(report):
    return [finding for finding in report.findings if finding.kind != "rounding"]


def compared(operation, args, out, **kwargs):
    """Compare the results of an operation with float64."""
    return forward_error(operation, operation_name(operation), args, kwargs, out)


def ratio(seen):
    """Return an error in units of what rounding explains."""
    return seen.error / seen.bound if seen.bound else math.inf if seen.error else 0.0
