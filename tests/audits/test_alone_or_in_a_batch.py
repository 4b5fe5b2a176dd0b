"""Does a sample's result depend on the other samples of its batch by rounding, or by a fault?

Two comparisons distinguish the causes: padded samples one by one and together, and one sample with
and without padding.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab.testing import assert_same
from tests.audits._helpers import seeded

PADDING = 0
TEXTS = [
    torch.randint(1, 30, (length,), generator=torch.Generator().manual_seed(length))
    for length in (5, 9, 7)
]
# The texts are padded on the left, as for a generative model.
BATCH = torch.stack([nn.functional.pad(text, (9 - len(text), 0)) for text in TEXTS])


class Block(nn.Module):
    """An attention block; some faults replace its normalisation or routing."""

    def __init__(self, width, fault):
        super().__init__()
        self.fault = fault
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if fault == "batch_statistics" else nn.LayerNorm(width)
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, h, is_word):
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.fault != "no_mask":
            scores = scores.masked_fill(~is_word[:, None, None, :], -math.inf)
        h = h + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        h = self.norm(h.mT).mT if self.fault == "batch_statistics" else self.norm(h)
        return h + self.routed(h)

    def routed(self, h):
        """Apply one of two experts to each word; a faulty router limits the words per expert."""
        flat = h.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if self.fault == "routing_capacity":
                capacity = 4
                rows = rows.flip(0)[:capacity]
            out = out.index_add(0, rows, expert(flat[rows]) * scores[rows, number, None])
        return out.view_as(h)


class Transformer(nn.Module):
    """A typical classifier of padded texts; `fault` is one of the faults below."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.words, self.places = nn.Embedding(30, 16), nn.Embedding(16, 16)
        self.blocks = nn.ModuleList([Block(16, fault) for _ in range(2)])
        self.head = nn.Linear(16, 3)

    def forward(self, batch):
        is_word = batch != PADDING
        places = is_word.cumsum(1) - 1
        if self.fault == "positions_of_padding":
            places = torch.arange(batch.shape[1]).expand_as(batch)
        h = self.words(batch) + self.places(places.clamp(min=0))
        for block in self.blocks:
            h = block(h, is_word)
        if self.fault == "mean_over_padding":
            return self.head(h.mean(1))
        weights = is_word.unsqueeze(-1).to(h.dtype)
        return self.head((h * weights).sum(1) / weights.sum(1))


# Faults that depend on the other samples, and faults that depend on the padding, with their lines.
FAULTS_OF_COMPANY = {
    "batch_statistics": "h = self.norm(h.mT).mT",
    "routing_capacity": "out = out.index_add(",
}
FAULTS_OF_PADDING = {
    "no_mask": "scores = q @ k.mT",
    "mean_over_padding": "",
    "positions_of_padding": "h = self.words(batch) + self.places(places.clamp(min=0))",
}


def network(fault, setting):
    return seeded(lambda: Transformer(fault)).to(setting.device, setting.dtype)


def one_by_one(setting, fault=""):
    net = network(fault, setting)
    return torch.cat([net(sample) for sample in BATCH.split(1)])


def together(setting, fault=""):
    return network(fault, setting)(BATCH)


def without_padding(setting, fault=""):
    return network(fault, setting)(TEXTS[0][None])


def with_padding(setting, fault=""):
    return network(fault, setting)(BATCH[:1])


@pytest.mark.parametrize("setting", ["cpu", "cpu:emulate=tf32"])
@pytest.mark.parametrize("fault", ["", *FAULTS_OF_PADDING])
def test_batched_sample_is_that_alone(fault, setting):
    """Padding faults have the same effect on a padded sample alone and in a batch."""
    assert_same(partial(one_by_one, fault=fault), partial(together, fault=fault), setting=setting)


@pytest.mark.parametrize("fault", FAULTS_OF_COMPANY)
def test_batched_sample_that_depends_on_others_is_found_at_the_line(fault):
    report = gl.audit(
        partial(one_by_one, fault=fault),
        partial(together, fault=fault),
        setting="cpu",
        progress=False,
    )
    assert report.faulty
    assert FAULTS_OF_COMPANY[fault] in report.findings[0].line


@pytest.mark.parametrize("fault", ["", "routing_capacity"])
def test_padded_sample_is_that_without_padding(fault):
    assert_same(partial(without_padding, fault=fault), partial(with_padding, fault=fault))


@pytest.mark.parametrize("fault", FAULTS_OF_PADDING)
def test_padded_sample_that_depends_on_its_padding_is_found(fault):
    """The first findings include the line at which the padding affects the words."""
    report = gl.audit(
        partial(without_padding, fault=fault),
        partial(with_padding, fault=fault),
        setting="cpu",
        progress=False,
    )
    assert report.faulty
    assert any(FAULTS_OF_PADDING[fault] in finding.line for finding in report.findings[:3])
