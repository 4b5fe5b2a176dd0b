"""Training: a single run, runs from many seeds, and batches or networks that several devices share."""

from gpulab._lazy import attach

NAMES = {
    "Experiment": "experiment",
    "Run": "run",
    "descend": "asynchronous",
    "fit_law": "batches",
    "memory_per_part": "model_parallel",
    "noise_scale": "batches",
    "predict": "data_parallel",
    "profile": "protocol",
    "seed_runs": "seeds",
    "slurm_script": "cluster",
    "split": "model_parallel",
    "steps_to_target": "batches",
    "train": "request",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
