"""Where runs are kept, and how they are read again: one format, one reader, one writer."""

from gpulab._lazy import attach

NAMES = {
    "history": "listing",
    "pack": "listing",
    "recorded_runs": "listing",
    "runs": "listing",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
