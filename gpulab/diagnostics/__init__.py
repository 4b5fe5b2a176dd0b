"""Instruments for one training step, and for the device that does it."""

from gpulab.diagnostics.audits import Audit, audit
from gpulab.diagnostics.guards import Guard, Overwritten, guard
from gpulab.diagnostics.memory import MemoryWatch, memory_watch
from gpulab.diagnostics.operations import byte_round_trip, fused_operations, repeatability
from gpulab.diagnostics.placements import Placement, place
from gpulab.diagnostics.products import compare_products, summarize_products
from gpulab.diagnostics.rooflines import bounds, recorded_rooflines, roofline
from gpulab.diagnostics.steps import Step
from gpulab.diagnostics.traces import Trace, record

__all__ = [
    "Audit",
    "Guard",
    "MemoryWatch",
    "Overwritten",
    "Placement",
    "Step",
    "Trace",
    "audit",
    "bounds",
    "byte_round_trip",
    "compare_products",
    "fused_operations",
    "guard",
    "memory_watch",
    "place",
    "record",
    "recorded_rooflines",
    "repeatability",
    "roofline",
    "summarize_products",
]
