"""What a device does: how fast it is, and where a training step stands under that."""

from gpulab.device.placements import Placement, place
from gpulab.device.rooflines import bounds, recorded_rooflines, roofline

__all__ = ["Placement", "bounds", "place", "recorded_rooflines", "roofline"]
