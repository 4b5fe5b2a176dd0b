"""What runs on the same seeds allow one to say."""

from gpulab.stats.power import seeds_needed
from gpulab.stats.variance import VarianceComponents, variance_components
from gpulab.stats.verdicts import Verdict, verdict

__all__ = ["VarianceComponents", "Verdict", "seeds_needed", "variance_components", "verdict"]
