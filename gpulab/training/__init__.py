"""Training: a single run, and runs from many seeds."""

from gpulab._lazy import attach

NAMES = {
    "Experiment": "experiment",
    "Run": "run",
    "descend": "asynchronous",
    "fit_law": "batches",
    "memory_per_part": "model_parallel",
    "noise_scale": "batches",
    "profile": "protocol",
    "seed_runs": "seeds",
    "split": "model_parallel",
    "steps_to_target": "batches",
    "train": "request",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
