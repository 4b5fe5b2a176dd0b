"""The audit: one training step under two settings, compared operation by operation, and explained."""

from gpulab.audits.audits import Audit, audit
from gpulab.audits.compiled import CompiledAudit
from gpulab.audits.recording import record
from gpulab.audits.traces import Trace
from gpulab.steps import Step

__all__ = ["Audit", "CompiledAudit", "Step", "Trace", "audit", "record"]
