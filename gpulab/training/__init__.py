"""Training: a single run, and runs from many seeds."""

from gpulab._lazy import attach

NAMES = {
    "Experiment": "experiment",
    "Run": "run",
    "profile": "profiles",
    "seed_runs": "experiment",
    "train": "run",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
