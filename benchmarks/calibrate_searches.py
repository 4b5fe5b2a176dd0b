"""How often `gpulab.reproduce` calls a change equivalent that is not: by luck on its seeds, and confirmed.

Simulated searches without any right answer: the true difference of every change is exactly the margin, a
quarter of the standard deviation between seeds. 20 seeds, ten of them fresh. `noise` is the standard
deviation of the paired differences over that between seeds. Prints a table; ten minutes.
"""

from __future__ import annotations

import tempfile
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from tqdm.auto import tqdm

import gpulab as gl
from gpulab.search.trials import WITHIN

MARGIN = 0.25  # in standard deviations between seeds, which is 1


def main(
    searches: Annotated[int, typer.Option(help="simulated searches")] = 150,
) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for changes, noise in ((3, 0.15), (10, 0.05), (10, 0.15)):
            found = [
                search(changes, noise, seed, f"{folder}/{changes}-{noise}-{seed}") for seed in tqdm(range(searches))
            ]
            lucky, confirmed = np.mean(found, axis=0)
            rows.append(f"| {changes} | {noise} | {lucky:.1%} | {confirmed:.1%} |")
    print("| changes | noise (sd) | one equivalent on the seeds of the search | one confirmed on fresh seeds |")
    print("| --- | --- | --- | --- |", *rows, sep="\n")


def search(changes: int, noise: float, seed: int, store: str) -> tuple[bool, bool]:
    """(some change looked equivalent on the seeds of the search, one was confirmed on fresh seeds)."""
    generator = np.random.default_rng(seed)
    old = pd.DataFrame({"seed": range(20), "final_loss": generator.normal(size=20)})
    off = MARGIN + noise * generator.normal(size=(changes + 1, 20))

    def train(setting: Any, seed: int, change: int = 0) -> float:  # noqa: ARG001
        return float(old.final_loss[seed] + off[change, seed])

    space = {"change": range(1, changes + 1)}
    found = gl.reproduce(old, space, "cpu", train, margin=MARGIN, store=store, progress=False)
    return bool(found.table.decision.isin(WITHIN).any()), found.confirmed


if __name__ == "__main__":
    typer.run(main)
