"""Figures, one visual language for all notebooks: from finished results only.

`style` holds that language, `names` the words for settings; `runs`, `decisions`, `instruments`, `curvature`, `costs`,
`escapes` and `pictures` draw what their names say.
"""

from gpulab.plots import decisions as decisions
from gpulab.plots import instruments as instruments
from gpulab.plots.costs import roofline
from gpulab.plots.curvature import curvature_over_time, index_against_loss, landscape_slice, saddle_surface, spectra
from gpulab.plots.escapes import escape_law, escape_paths, escape_phases
from gpulab.plots.pictures import frames, predictions, reconstructions, sample
from gpulab.plots.runs import curves, differences, losses
from gpulab.plots.style import colour
from gpulab.report import Picture

__all__ = [
    "Picture",
    "colour",
    "curvature_over_time",
    "curves",
    "differences",
    "escape_law",
    "escape_paths",
    "escape_phases",
    "frames",
    "index_against_loss",
    "landscape_slice",
    "losses",
    "predictions",
    "reconstructions",
    "roofline",
    "saddle_surface",
    "sample",
    "spectra",
]
