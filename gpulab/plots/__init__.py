"""Figures, one visual language for all notebooks: from finished results only.

`style` holds that language; `runs`, `decisions`, `instruments`, `costs`, `escapes` and `pictures` draw what their names
say.
"""

from gpulab.plots.costs import placement, roofline
from gpulab.plots.decisions import changes, estimation
from gpulab.plots.escapes import escape_law, escape_paths, escape_phases
from gpulab.plots.instruments import (
    audit,
    bits,
    curvature_over_time,
    index_against_loss,
    landscape_slice,
    saddle_surface,
    spectra,
    sums,
)
from gpulab.plots.pictures import frames, predictions, reconstructions, sample
from gpulab.plots.runs import curves, differences, losses
from gpulab.plots.style import colour, save
from gpulab.report import Picture

__all__ = [
    "Picture",
    "audit",
    "bits",
    "changes",
    "colour",
    "curvature_over_time",
    "curves",
    "differences",
    "escape_law",
    "escape_paths",
    "escape_phases",
    "estimation",
    "frames",
    "index_against_loss",
    "landscape_slice",
    "losses",
    "placement",
    "predictions",
    "reconstructions",
    "roofline",
    "saddle_surface",
    "sample",
    "save",
    "spectra",
    "sums",
]
