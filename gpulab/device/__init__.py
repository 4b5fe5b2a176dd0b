"""What a device does: how fast it is, where a training step stands under that, and what holds its memory."""

from gpulab.device.memory import MemoryWatch, memory_watch
from gpulab.device.operations import fused_operations, repeatability
from gpulab.device.placements import Placement, place
from gpulab.device.rooflines import bounds, recorded_rooflines, roofline

__all__ = [
    "MemoryWatch",
    "Placement",
    "bounds",
    "fused_operations",
    "memory_watch",
    "place",
    "recorded_rooflines",
    "repeatability",
    "roofline",
]
