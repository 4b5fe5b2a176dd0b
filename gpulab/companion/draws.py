"""One seed on two GPUs: the numbers that both draw, and what becomes of a network that begins with either's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from gpulab.models.autoencoders import Autoencoder
from gpulab.numerics.cuda_random import cuda_uniform
from gpulab.progress import Progress
from gpulab.training import store as stores
from gpulab.training.run import train

CARDS = ("T4", "V100", "RTX 4090", "A100", "H100")


def shared_draws(shape: Sequence[int], cards: Sequence[str] = CARDS, seed: int = 0) -> pd.DataFrame:
    """The share of the numbers of one seeded draw that two GPUs have in common, drawn here as each of them would.

    Examples:
        >>> shared_draws((1000, 1000), ("T4", "H100")).round(2).loc["T4", "H100"].item()
        0.04
    """
    drawn = {card: cuda_uniform(seed, shape, card) for card in cards}
    shares = [[(drawn[card] == drawn[other]).double().mean().item() for other in cards] for card in cards]
    return pd.DataFrame(shares, index=cards, columns=cards)


def drawn_autoencoder(card: str, seed: int) -> Autoencoder:
    """An autoencoder whose weights a card has drawn, each layer's from a seed of its own; biases are zero.

    Uniform, with a variance of 1 / inputs as LeCun's: a GPU's uniform numbers are known to the last bit, its normal
    ones come through a logarithm and a sine of its own.
    """
    net = Autoencoder()
    state = net.state_dict()
    for number, (name, tensor) in enumerate(state.items()):
        if name.endswith("weight"):
            drawn = cuda_uniform(1000 * seed + number, tensor.shape, card)
            state[name] = (2 * drawn - 1) * math.sqrt(3 / tensor.shape[1])
        else:
            state[name] = torch.zeros_like(tensor)
    net.load_state_dict(state)
    return net


def runs_drawn_by(
    store: str | Path,
    cards: Sequence[str] = ("T4", "H100"),
    seeds: int = 6,
    profile: str = "smoke",
    frames: int = 400,
    progress: bool = True,
) -> pd.DataFrame:
    """Trainings on this CPU from the weights that each card would draw.

    Args:
        store: Where the runs are kept and resumed from.
        cards: As for `gpulab.numerics.cuda_uniform`.
        seeds: How many trainings for each card.
        profile: Of the protocol.
        frames: How many images to train on.
        progress: Show a bar.

    Returns:
        The runs, as `gpulab.runs` has them, with a column `card` for a verdict.
    """
    jobs = [(card, seed) for card in cards for seed in range(seeds)]
    made = []
    for card, seed in Progress(jobs, unit="run", leave=False, disable=not progress):
        run = train(
            drawn_autoencoder(card, seed),
            "digits",
            setting="cpu:threads=1",
            seed=seed,
            profile=profile,
            frames=frames,
            store=store,
            progress=False,
        )
        made.append({"card": card, "id": run.record["id"]})
    kept = stores.runs(store).drop(columns="protocol")  # which tells initial weights apart, and with them the cards
    return pd.DataFrame(made).merge(kept, on="id")
