"""Saddle points: Hessians as linear operators, their spectra, critical points, and ways out of them."""

from gpulab.saddles.critical import CriticalPoint, find_critical_point
from gpulab.saddles.curvature import curvature_along, recorded_curvature
from gpulab.saddles.eigenpairs import extreme_eigenpairs
from gpulab.saddles.escapes import EscapeTable, escape_table, recorded_escapes
from gpulab.saddles.hessians import Hessian, hessian
from gpulab.saddles.landscapes import Landscape, Surface, landscape, surface
from gpulab.saddles.spectrum import SpectralDensity, index, spectral_density
from gpulab.saddles.theory import LinearAutoencoderSaddle, linear_autoencoder_saddle

__all__ = [
    "CriticalPoint",
    "EscapeTable",
    "Hessian",
    "Landscape",
    "LinearAutoencoderSaddle",
    "SpectralDensity",
    "Surface",
    "curvature_along",
    "escape_table",
    "extreme_eigenpairs",
    "find_critical_point",
    "hessian",
    "index",
    "landscape",
    "linear_autoencoder_saddle",
    "recorded_curvature",
    "recorded_escapes",
    "spectral_density",
    "surface",
]
