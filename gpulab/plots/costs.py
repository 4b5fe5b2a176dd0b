"""The roofline of a device, and where a training step stands under it."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gpulab.device.placements import Placement
from gpulab.device.rooflines import UNDER_THE_ROOF, bounds
from gpulab.plots import style
from gpulab.plots.names import setting_words
from gpulab.plots.style import FAINT, INK, ON_GPU, Look
from gpulab.report import Picture, draw

ROOFED = {"matrix": ("o", "matrix products"), "network": ("D", "layers of networks"), "memory": ("s", "memory alone")}


def roofline(frame: pd.DataFrame) -> Picture:
    """Draw a device's roofline: measured rates against arithmetic intensity, under the measured ceilings.

    The ceilings are the highest bandwidth and the highest rate that were measured. There is a line for each machine and
    setting; filled points were measured here, hollow ones recorded. The title names the layer that reaches least.

    Args:
        frame: From `gpulab.roofline` or `gpulab.device.recorded_rooflines`. Drawn are its rows of the kinds `memory`,
            `matrix` and `network`, by the columns `setting`, `operation`, `intensity` (flop per byte moved), `gflops`,
            `gigabytes_per_second`, `flop`, and `machine` where there is one.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.roofline(gl.device.recorded_rooflines())
        >>> print(picture.alt.partition(". ")[0])
        Roofline: measured rate against arithmetic intensity, with the ceilings of bandwidth and arithmetic

    References:
        Williams, Waterman, Patterson 2009, *Roofline: an insightful visual performance model for multicore
        architectures* (Communications of the ACM 52:4).
    """
    figure, (axes,) = style.canvas(1, height=4.4)
    frame = frame[frame.kind.isin(UNDER_THE_ROOF)]
    frame = frame.assign(machine=frame.get("machine", pd.Series("", frame.index)).fillna(""))
    intensities = np.logspace(-1.5, 3.5, 200)
    for (machine, setting), device in frame.groupby(["machine", "setting"], sort=False):
        bandwidth, peak = device[device.kind == "memory"].gigabytes_per_second.max(), device.gflops.max()
        words = setting_words(setting)
        label = f"{words}, {machine} (recorded)" if machine else f"{words} (this machine)"
        tint, ceiling = style.colour(setting), np.minimum(bandwidth * intensities, peak)
        axes.plot(intensities, ceiling, color=tint, lw=1.5, label=label)
        for kind, (marker, _) in ROOFED.items():
            of_kind = device[(device.kind == kind) & (device.flop > 0)]
            style.points(
                axes, of_kind.intensity, of_kind.gflops, tint, bool(machine), marker=marker, s=28, linewidths=None
            )
    layers = bounds(frame.assign(setting=frame.machine + frame.setting))
    below: Look = {"xycoords": ("data", "axes fraction"), "va": "bottom", "ha": "right", "fontsize": 8}
    named = layers.drop_duplicates("operation").sort_values("intensity")
    for index, row in enumerate(named.itertuples()):
        axes.axvline(row.intensity, color=FAINT, lw=0.6, ls=":", zorder=0)
        axes.annotate(f"{row.operation} ", (row.intensity, 0.02 + 0.06 * index), color=INK, **below)
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (flop per byte moved)", ylabel="rate (Gflop/s)")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    least = layers.sort_values("reached").iloc[0]
    alt = "Roofline: measured rate against arithmetic intensity, with the ceilings of bandwidth and arithmetic."
    keys = [style.point_key(name, marker=marker, ms=5) for marker, name in ROOFED.values()]
    title = f"The least used operation: {least.operation} reaches {least.reached:.1%} of its ceiling"
    return style.finished(figure, title, alt, keys, columns=3)


@draw.register
def placement(step: Placement) -> Picture:
    """A step under the roofs of its device, and beside it what its bytes, FLOP and launches take at their ceilings."""
    frame, tint = step.roofline, style.colour(step.setting)
    figure, (left, right) = style.canvas(2, height=3.4)
    bandwidth = frame[frame.kind == "memory"].gigabytes_per_second.max()
    peaks = frame[frame.precision != ""].groupby("precision").gflops.max().sort_values()
    middle = max(step.intensity, 1e-3)
    intensities = np.geomspace(min(middle, 0.1) / 3, max(middle, peaks.max() / bandwidth) * 10, 200)
    above = 0.0
    for precision, peak in peaks.items():
        look: Look = {"color": tint, "lw": 1.6} if precision in step.flop else {"color": FAINT, "lw": 0.8}
        left.plot(intensities, np.minimum(bandwidth * intensities, peak), **look)
        above = max(peak, 1.5 * above)  # where labels would lie on each other
        left.annotate(precision, (intensities[-1], above), ha="right", va="bottom", fontsize=7, color=look["color"])
    if step.flop:
        style.points(left, [step.intensity], [step.gflops], ON_GPU if tint == INK else INK, marker="*", s=110)
        left.plot([step.intensity] * 2, [step.gflops, step.gflops / step.reached], color=INK, lw=0.8, ls=":")
    left.set(xscale="log", yscale="log", xlabel="flop per byte moved (star: the step)", ylabel="rate (Gflop/s)")
    milliseconds = 1e3 * np.array([step.seconds, *step.at_least.values()])
    bars = right.barh(["measured", *step.at_least], milliseconds, color=[INK, *[tint] * 3], height=0.6)
    right.bar_label(bars, [f" {value:.3g}" for value in milliseconds], fontsize=8)
    right.invert_yaxis()
    right.set(xlim=(0, 1.2 * milliseconds.max()), xlabel="ms for one step; below, at least, each alone")
    headline = f"Bound by {step.bound}: {step.reached:.0%} of the roof, launches {step.launch_share:.0%} of the time"
    alt = f"A step under the roofline of {setting_words(step.setting)}, and the time of its parts at their ceilings."
    return style.finished(figure, headline, alt)
