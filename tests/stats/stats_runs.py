"""Tables of runs for tests of what compares them."""

import pandas as pd


def runs_of(losses, **columns):
    """Runs from a list of losses per setting, seeds counted from 0."""
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
