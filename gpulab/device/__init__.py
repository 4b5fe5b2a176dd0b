"""What a device does: how fast it is, and where a training step stands under that."""

from gpulab.device.rooflines import Placement, bounds, place, recorded_rooflines, roofline

__all__ = ["Placement", "bounds", "place", "recorded_rooflines", "roofline"]
