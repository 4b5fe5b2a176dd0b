"""What runs on the same seeds allow one to say."""

from gpulab.stats.verdicts import Verdict, verdict

__all__ = ["Verdict", "verdict"]
