"""Tables and folders as loggers write them."""

import io

import numpy as np
import pandas as pd

FLOORS = {"adam": 0.30, "sgd": 0.25}


def metrics(optimizer, seed, epochs=6, blank=True):
    """The text of Lightning's `metrics.csv`: training and validation have rows of their own.

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
    """One table of the logs of all runs."""
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
