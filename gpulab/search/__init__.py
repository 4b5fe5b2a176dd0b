"""Searching: the smallest change of a training after which an old result comes back."""

from gpulab._lazy import attach

NAMES = {"Reproduction": "reproduction", "reproduce": "reproduction"}

__all__ = [*NAMES]

__getattr__ = attach(__name__, NAMES)
