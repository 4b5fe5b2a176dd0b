"""Frames and images to learn from, and how they reach the device."""

from gpulab.data.datasets import load

__all__ = ["load"]
