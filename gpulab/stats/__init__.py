"""What runs on the same seeds allow one to say."""

from gpulab.stats.power import seeds_needed
from gpulab.stats.verdicts import Verdict, verdict

__all__ = ["Verdict", "seeds_needed", "verdict"]
