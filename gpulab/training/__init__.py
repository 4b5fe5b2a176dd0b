"""Training: a single run, runs from many seeds, and batches in parts."""

from gpulab._lazy import attach

NAMES = {
    "Experiment": "experiment",
    "GradientAccumulation": "accumulation",
    "Run": "run",
    "predict": "data_parallel",
    "profile": "protocol",
    "seed_runs": "seeds",
    "slurm_script": "cluster",
    "train": "request",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
