"""One run, many runs, and where they are kept."""

from gpulab._lazy import attach

NAMES = {
    "Experiment": "experiment",
    "FirstWindow": "step",
    "GradientAccumulation": "accumulation",
    "Reproduction": "reproduction",
    "Run": "run",
    "growth": "growths",
    "history": "store",
    "profile": "protocol",
    "protocol": "protocol",
    "recorded_runs": "store",
    "reproduce": "reproduction",
    "runs": "store",
    "seed_runs": "objective",
    "train": "run",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
