"""Weights as two GPUs would draw them from one seed."""

import pytest
import torch

import gpulab as gl
from gpulab.companion.draws import drawn_autoencoder, runs_drawn_by, shared_draws
from gpulab.numerics.cuda_random import cuda_threads, same_draws


def test_the_shares_are_those_that_the_threads_explain():
    table = shared_draws((128, 784))
    for card in table:
        assert table.loc[card, card] == 1
        assert table.loc["T4", card] == pytest.approx(same_draws("T4", card, 128 * 784) / (128 * 784), abs=1e-5)


def test_two_cards_draw_the_layers_alike_that_are_small_enough():
    one, other = drawn_autoencoder("T4", 3), drawn_autoencoder("H100", 3)
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs) == (mine.numel() <= cuda_threads("T4")), name
    first = one.layers[0].weight
    assert first.var().item() == pytest.approx(1 / 784, rel=0.02)
    assert not torch.equal(first, drawn_autoencoder("T4", 4).layers[0].weight)


def test_their_trainings_are_pairs_for_a_verdict(tmp_path):
    runs = runs_drawn_by(tmp_path, ("T4", "H100"), seeds=2, frames=40, progress=False)
    verdict = gl.verdict(runs, factor="card")
    assert (verdict.reference, verdict.table.card.tolist(), verdict.table.seeds.tolist()) == ("T4", ["H100"], [2])
    assert verdict.table.same_bits.item() == 0
    alike = runs_drawn_by(tmp_path, ("H100", "H200"), seeds=2, frames=40, progress=False)
    assert gl.verdict(alike, factor="card").table.same_bits.item() == 2, "as many threads, the same weights"
