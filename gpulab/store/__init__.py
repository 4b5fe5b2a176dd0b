"""Where runs are kept, and how they are read again: one format, one reader, one writer."""

from gpulab._lazy import attach

NAMES = {
    "history": "runs",
    "pack": "runs",
    "recorded_runs": "runs",
    "write_run": "runs",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
