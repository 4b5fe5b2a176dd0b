"""The guard: refuses tensors that something overwrites before autograd uses them. It needs torch alone."""

from gpulab.guards.findings import Overwritten
from gpulab.guards.guards import Guard, guard

__all__ = ["Guard", "Overwritten", "guard"]
