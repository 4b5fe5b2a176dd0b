"""Tables of runs, and logs in the formats of other libraries."""

import io

import numpy as np
import pandas as pd


def runs_of(losses, **columns):
    """Make runs from a list of losses for each setting; seeds are counted from 0."""
    rows = [(name, seed, loss) for name, some in losses.items() for seed, loss in enumerate(some)]
    return pd.DataFrame(rows, columns=["setting", "seed", "final_loss"]).assign(**columns)


BASE = [0.31, 0.12, 0.22, 0.54, 0.43, 0.65, 0.17, 0.28, 0.39, 0.58]
TINY = [1e-6, -2e-6, 3e-6, -1e-6, 2e-6, -3e-6, 1.5e-6, 0.0, -0.5e-6, 1e-6]
WIDE = [0.3, -0.3, 0.2, -0.1, 0.4, -0.5, 0.1, 0.2, -0.2, 0.0]


def shifted(by, base=BASE):
    return [
        loss + change
        for loss, change in zip(base, by if isinstance(by, list) else [by] * len(base), strict=True)
    ]


FLOORS = {"adam": 0.30, "sgd": 0.25}


def metrics(optimizer, seed, epochs=6, blank=True):
    """The text of Lightning's `metrics.csv`: training and validation have separate rows.

    `sgd` starts worse and ends better than `adam`.
    """
    noise = np.random.default_rng(seed).standard_normal(epochs)
    lines = ["epoch,step,train_loss,val_loss"]
    for epoch in range(epochs):
        slow = 3 * 0.3**epoch if optimizer == "sgd" else 0.3**epoch
        loss = FLOORS[optimizer] + 0.01 * noise[epoch] + slow
        lines.append(f"{epoch},{10 * epoch + 4},{loss + 0.2:.4f},")
        lines.append(
            f"{epoch},{10 * epoch + 9},{loss + 0.1:.4f},"
            if blank
            else f"{epoch},{10 * epoch + 9},,"
        )
        lines.append(f"{epoch},{10 * epoch + 9},,{loss:.4f}")
    return "\n".join(lines) + "\n"


def logged(seeds=6, read=pd.read_csv, **options):
    """One table with the logs of all runs."""
    tables = [
        read(io.StringIO(metrics(optimizer, seed, **options))).assign(
            optimizer=optimizer, seed=seed
        )
        for optimizer in FLOORS
        for seed in range(seeds)
    ]
    return pd.concat(tables, ignore_index=True)


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
