"""Where runs are kept, and how they are read again: one format, one reader, one writer."""

from gpulab._lazy import attach

NAMES = {
    "history": "tables",
    "pack": "tables",
    "recorded_runs": "tables",
    "write_run": "runs",
}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
