"""Frames and images to learn from, who decodes them, and how they reach the device."""

from gpulab.data.datasets import load
from gpulab.data.jpeg import available_decoders, compare_decoders, decode_jpeg, encode_jpeg

__all__ = ["available_decoders", "compare_decoders", "decode_jpeg", "encode_jpeg", "load"]
