"""Instruments for one training step."""

from gpulab.diagnostics.audits import Audit, audit
from gpulab.diagnostics.guard_findings import Overwritten
from gpulab.diagnostics.guards import Guard, guard
from gpulab.diagnostics.steps import Step
from gpulab.diagnostics.traces import Trace, record

__all__ = [
    "Audit",
    "Guard",
    "Overwritten",
    "Step",
    "Trace",
    "audit",
    "guard",
    "record",
]
