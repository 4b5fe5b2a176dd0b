"""Figures, one visual language for all notebooks: drawn from data frames, reports and runs only.

`style` holds that language; each of the other files draws one kind of thing.
"""

from gpulab.plots.comparisons import curves, differences, losses
from gpulab.plots.curvature import curvature_over_time, index_against_loss, spectra
from gpulab.plots.devices import roofline
from gpulab.plots.estimates import estimation
from gpulab.plots.floating import bits, growth, sums
from gpulab.plots.pictures import frames, predictions, reconstructions, sample
from gpulab.plots.saddles import escape_law, escape_paths, landscape_slice, saddle_surface
from gpulab.plots.searches import changes
from gpulab.plots.steps import audit
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
    "estimation",
    "frames",
    "growth",
    "index_against_loss",
    "landscape_slice",
    "losses",
    "predictions",
    "reconstructions",
    "roofline",
    "saddle_surface",
    "sample",
    "save",
    "spectra",
    "sums",
]
