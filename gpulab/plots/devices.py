"""What a device is able to do, and what a network uses of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter

from gpulab.diagnostics.rooflines import bounds
from gpulab.plots.style import FAINT, INK, Picture, canvas, colour


def roofline(frame: pd.DataFrame) -> Picture:
    """Measured rates against arithmetic intensity, under each device's measured ceilings.

    `frame` is from `gpulab.roofline`, or `gpulab.recorded_rooflines` with the column `machine`.
    """
    figure, (axes,) = canvas(1, height=4.4)
    frame = frame.assign(machine=frame.get("machine", pd.Series("", frame.index)).fillna(""))
    intensities = np.logspace(-1.5, 3.5, 200)
    for (machine, setting), device in frame.groupby(["machine", "setting"], sort=False):
        tint, recorded = colour(setting), bool(machine)
        bandwidth = device[device.kind == "memory"].gigabytes_per_second.max()
        peak = device.gflops.max()
        label = f"{setting}, {machine} (recorded)" if recorded else f"{setting} (this machine)"
        axes.plot(intensities, np.minimum(bandwidth * intensities, peak), color=tint, lw=1.5, label=label)
        for kind, marker in (("matrix", "o"), ("network", "D"), ("memory", "s")):
            some = device[(device.kind == kind) & (device.flop > 0)]
            axes.scatter(
                some.intensity,
                some.gflops,
                marker=marker,
                s=28,
                color="white" if recorded else tint,
                edgecolors=tint,
                zorder=3,
            )
    for row in frame[frame.kind == "network"].drop_duplicates("operation").itertuples():
        axes.axvline(row.intensity, color=FAINT, lw=0.6, ls=":", zorder=0)
        axes.annotate(
            row.operation,
            (row.intensity, 0.01),
            xycoords=("data", "axes fraction"),
            rotation=90,
            fontsize=7,
            va="bottom",
            ha="right",
            color=INK,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity (flop per byte moved)")
    axes.set_ylabel("rate (Gflop/s)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    least = bounds(frame.assign(setting=frame.machine + frame.setting)).sort_values("reached").iloc[0]
    figure.suptitle(f"The least used: {least.operation} reaches {least.reached:.1%} of its ceiling", fontsize=10)
    return Picture(
        figure, "Roofline: measured rate against arithmetic intensity, with the ceilings of bandwidth and arithmetic."
    )
