"""Instruments for one training step, and for the device that does it."""

from gpulab.diagnostics.audits import Audit, audit
from gpulab.diagnostics.guards import Guard, Overwritten, guard
from gpulab.diagnostics.operations import conversion_check, fused_operations, repeatability
from gpulab.diagnostics.products import compare_products, summarize_products
from gpulab.diagnostics.rooflines import bounds, recorded_rooflines, roofline
from gpulab.diagnostics.traces import Step, Trace, record

__all__ = [
    "Audit",
    "Guard",
    "Overwritten",
    "Step",
    "Trace",
    "audit",
    "bounds",
    "compare_products",
    "conversion_check",
    "fused_operations",
    "guard",
    "record",
    "recorded_rooflines",
    "repeatability",
    "roofline",
    "summarize_products",
]
