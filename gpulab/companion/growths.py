"""How fast a small difference grows while training: two trainings that begin one bit apart.

Source: Summers, Dinneen 2021, *Nondeterminism and instability in neural network optimization* (arXiv
2103.04514): one changed bit in the initial weights makes as much variability as any other source.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.numerics.formats import ulp_distance
from gpulab.plots.style import BESIDE, FAINT, canvas, decades, finished, key
from gpulab.progress import Progress
from gpulab.report import Picture
from gpulab.training.plan import plan_run
from gpulab.training.protocol import protocol
from gpulab.training.run import train

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 40  # moments of a training at which it is compared
SETTING = "cpu:threads=1"
# Where a bit is flipped. Many of an autoencoder's first weights see black pixels only.
FLIPPED = {"prednet": "conv_a.0.weight", "autoencoder": "layers.2.weight"}
OTHER_SEED = "another seed"
CHANGE_COLOURS = ("#0072B2", "#E69F00", "#222222", "#CC79A7", "#009E73")


def growth(
    net: str = "prednet",
    seeds: int = 3,
    profile: str = "quick",
    frames: int | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """The distance between two trainings of the same seed, one of them changed a little, as they go on.

    `changes` names options of `gpulab.train` that one of the two has. Without it they are the last bit of
    one initial weight, and float64, which differs from float32 by every rounding of the training. The
    distance between one seed and the next is there for scale. A row per change, seed and moment, the
    beginning included: `network`, `change`, `seed`, `step` (updates so far), `distance` of all weights
    (Euclidean, relative), `changed` (the share of weights with other bits), `ulps` (the median over the
    weights of the float32 numbers between the two). All are computed under `cpu:threads=1`.

    >>> table = growth("autoencoder", seeds=1, profile="smoke", frames=40, progress=False)
    >>> one_bit = table[table.change == "one bit of one weight"]
    >>> bool(0 < one_bit.distance.iloc[0] < one_bit.distance.iloc[-1])
    True
    """
    import pandas as pd

    if changes is None:
        changes = {
            "one bit of one weight": {"flip": flipped(net, profile)},
            "float64": {"setting": "cpu:precision=float64"},
        }
    if seeds < 1:
        raise UsageError(f"seeds={seeds!r}: expected one or more")
    plan = protocol(net, profile)
    windows = (frames or plan.frames) // plan.window
    moments = set((np.geomspace(1, windows + 1, SHOWN).astype(int) - 1).tolist())
    shared = {"profile": profile, "frames": frames, "setting": SETTING, "progress": False}
    bases, rows = [], []
    with Progress(total=seeds * (1 + len(changes)), unit="training", leave=False, disable=not progress) as bar:
        for seed in range(seeds):
            bases.append(_snapshots(net, moments, {**shared, "seed": seed}))
            bar.update()
            for name, change in changes.items():
                other = _snapshots(net, moments, {**shared, "seed": seed, **change})
                rows += _rows(net, name, seed, bases[-1], other)
                bar.update()
    for seed in range(seeds - 1):
        rows += _rows(net, OTHER_SEED, seed, bases[seed], bases[seed + 1])
    return pd.DataFrame(rows)


def growth_figure(frame: pd.DataFrame) -> Picture:
    """The distance between two trainings as they go on, a line for each seed.

    Args:
        frame: From `growth`, one network or two below each other.
    """
    networks = list(frame.network.unique())[:2]
    tints = dict(zip(frame.change.unique(), CHANGE_COLOURS, strict=False))
    figure, panels = canvas(len(networks), height=3.6, share_rows=True)
    for axes, network in zip(panels, networks, strict=True):
        for (change, _), line in frame[frame.network == network].groupby(["change", "seed"], sort=False):
            shown = line[line.distance > 0]
            axes.plot(shown.step, shown.distance, color=tints[change], lw=1.1, alpha=0.85)
        axes.axhline(2.0**-24, color=FAINT, lw=0.8, ls=":")
        decades(axes.yaxis, 8)
        axes.set_title(network, fontsize=9)
        axes.set_xlabel("updates of the weights")
    panels[0].set_ylabel("distance of the weights, relative")
    panels[-1].annotate(" one\n rounding", (1, 2.0**-24), fontsize=7, **BESIDE)
    first = frame.change.iloc[0]
    grown = []
    for network, some in frame[frame.change == first].sort_values("step").groupby("network", sort=False):
        ends = some.groupby("seed").distance.agg(["first", "last"])
        times = (ends["last"] / ends["first"]).median()
        grown.append(f"{network} {times:,.0f}-fold" if times >= 2 else f"{network} not")
    keys = [key(change, color=tint) for change, tint in tints.items()]
    keys[0].set_label(f"{first} (a line for each of {frame.seed.nunique()} seeds)")
    alt = f"Relative distance of the weights of two trainings against updates, for {', '.join(tints)}."
    headline = f"{first[0].upper()}{first[1:]}: the difference grew in {', in '.join(grown)}"
    return finished(figure, headline, alt, keys, columns=3)


def flipped(net: str, profile: str) -> int:
    """The number of the weight whose last bit is changed: the first of the layer in `FLIPPED`.

    >>> flipped("prednet", "smoke")
    0
    """
    with torch.random.fork_rng(devices=[]):
        model = plan_run(net, profile=profile).model
    before = itertools.takewhile(lambda named: named[0] != FLIPPED[net], model.named_parameters())
    return sum(parameter.numel() for _, parameter in before)


def _rows(net: str, change: str, seed: int, base: dict[int, Tensor], other: dict[int, Tensor]) -> list[dict[str, Any]]:
    rows = []
    for step, weights in other.items():
        before, ulps = base[step].double(), ulp_distance(base[step], weights)
        row: dict[str, Any] = {"network": net, "change": change, "seed": seed, "step": step}
        row["distance"] = float((before - weights.double()).norm() / before.norm())
        row["changed"] = float((ulps > 0).double().mean())
        row["ulps"] = float(ulps.double().median())
        rows.append(row)
    return rows


def _snapshots(net: str, moments: set[int], options: dict[str, Any]) -> dict[int, Tensor]:
    """All weights of a training in one row, by the number of updates, at those windows."""
    snapshots: dict[int, Tensor] = {}
    windows = itertools.count()

    def watch(model: Trainable, step: int) -> None:
        if next(windows) in moments:
            snapshots[step] = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu().float()

    train(net, watch=watch, **options)
    return snapshots
