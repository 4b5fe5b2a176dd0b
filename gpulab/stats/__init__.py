"""What runs on the same seeds allow one to say."""

from gpulab.stats.verdicts import VarianceComponents, Verdict, seeds_needed, variance_components, verdict

__all__ = [
    "VarianceComponents",
    "Verdict",
    "seeds_needed",
    "variance_components",
    "verdict",
]
