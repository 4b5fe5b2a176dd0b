"""Figures of measurements: rounding along a step, and a step under a device's roofline."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd

from gpulab.audits._audit import Audit
from gpulab.device._roofline import ROOFLINE_KINDS, Placement, bounds
from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.plots._drawing import draw_registered
from gpulab.plots.theme import FAINT, INK
from gpulab.wording import setting_words

MAX_LEGEND_CHARACTERS = 40  # characters in a line of a legend
MIN_INTENSITY = 0.03  # flop per byte: the left end of a drawn roof
FASTER_MARKER = "^"  # of layers that are faster than the ceilings
ROOFLINE_MARKERS = {
    "matrix": ("o", "matrix products"),
    "network": ("D", "layers of networks"),
    "memory": ("s", "memory alone"),
}


@draw_registered.register
@theme.with_theme
def audit(report: Audit, width: float = theme.PAGE) -> Picture:
    """Draw the error of each operation of a training step against float64 on the same inputs.

    Grey dots are the largest errors that rounding explains. Crosses mark findings. An operation
    without an error has no dot.
    """
    table = report.table.reset_index(drop=True)
    errors = table[["error_a", "error_b"]]
    drawn_errors = errors.replace(0, np.nan)  # a logarithmic axis has no zero
    colour_a = theme.colour(report.a.setting)
    colour_b = theme.colour(report.b.setting)
    is_narrow = width < theme.PAGE
    figure, (axes,) = theme.canvas(height=3.8 if is_narrow else 3.4, width=width)
    largest_bounds = table[["bound_a", "bound_b"]].max(axis=1).replace(0, np.nan)
    axes.plot(table.index, largest_bounds, ".", color=FAINT, ms=3, label="explained by rounding")
    for side, trace, tint in (
        ("a", report.a, colour_a),
        ("b", report.b, colour_b if colour_b != colour_a else INK),
    ):
        words = trace.title.replace(trace.setting, setting_words(trace.setting))
        size = 6 if side == "a" else 3.5  # Both stay visible if their errors are equal.
        label = textwrap.fill(words, MAX_LEGEND_CHARACTERS)
        axes.plot(
            table.index, drawn_errors[f"error_{side}"], "o", ms=size, mew=0, color=tint, label=label
        )
    # Operations without an error have no height, so their crosses take the height of a neighbour.
    heights = drawn_errors.max(axis=1).bfill().ffill()[table.kind != "rounding"]
    axes.plot(heights.index, heights, "x", color=INK, label="finding" if len(heights) else None)
    backward_operations = table.index[table.phase == "backward"]
    if len(backward_operations):
        first_backward = backward_operations[0]
        axes.axvline(first_backward - 0.5, color=FAINT, lw=0.8)
        axes.annotate(
            " backward", (first_backward, 0.98), xycoords=("data", "axes fraction"), va="top"
        )
    if drawn_errors.notna().any(axis=None):  # The errors alone determine the range, not the bounds.
        lower_limit = max(1e-17, drawn_errors.min(axis=None) / 30)
        upper_limit = max(1e-4, drawn_errors.max(axis=None) * 30)
        axes.set(yscale="log", ylim=(lower_limit, upper_limit))
        axes.yaxis.set_major_formatter(theme.power_of_ten)
    axes.set(xlabel="operation, in the order of the step", ylabel="relative error against float64")
    largest = f"the largest error of one operation is {errors.max(axis=None):.1e}"
    headline = largest.capitalize()
    if report.kind != "rounding":
        separator = "\n" if is_narrow else " "
        headline = f"First finding: {report.kind};{separator}{largest}"
    alt = (
        f"Relative error of each operation of a step against float64, under {report.a.title} and"
        f" {report.b.title}."
    )
    return theme.finish_figure(figure, headline, alt, columns=1 if is_narrow else 4)


@theme.with_theme
def roofline(frame: pd.DataFrame) -> Picture:
    """Draw a device's roofline: measured rates against arithmetic intensity, and the ceilings.

    The ceilings are the highest bandwidth and the highest rate that were measured. There is a line
    for each machine and setting. Filled points were measured on this machine, hollow points were
    recorded. A layer that is faster than the ceilings is drawn as a triangle at its ceiling: it
    reads its numbers from a cache, takes fewer operations than are counted, or is faster than the
    largest product measured. The title names the layer that reaches the smallest share of its
    ceiling.

    Args:
        frame: From `gpulab.roofline` or `gpulab.device.recorded_rooflines`. Rows of the kinds
            `memory`, `matrix` and `network` are drawn. They need the columns `setting`,
            `operation`, `intensity` (flop per byte moved), `gflops`, `gigabytes_per_second` and
            `flop`; a column `machine` is optional.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.roofline(gl.device.recorded_rooflines())
        >>> print(picture.alt.partition(",")[0])
        Roofline: measured rate against arithmetic intensity

    References:
        Williams, Waterman, Patterson 2009, *Roofline: an insightful visual performance model for
        multicore architectures* (Communications of the ACM 52:4).
    """
    figure, (axes,) = theme.canvas(height=4.4)
    has_faster_layers = False
    frame = frame[frame.kind.isin(ROOFLINE_KINDS)]
    frame = frame.assign(machine=frame.get("machine", pd.Series("", frame.index)).fillna(""))
    for (machine, setting), device in frame.groupby(["machine", "setting"], sort=False):
        machine_name = f"{machine} (recorded)" if machine else "this machine"
        label = f"{setting_words(setting)}, {machine_name}"
        tint = theme.colour(setting)
        peak = device[device.kind == "matrix"].gflops.max()
        _roof(axes, device, peak, max_intensity=3000.0, color=tint, lw=1.5, label=label)
        bandwidth = device[device.kind == "memory"].gigabytes_per_second.max()
        is_recorded = bool(machine)
        for kind, rows in device[device.flop > 0].groupby("kind"):
            marker, _name = ROOFLINE_MARKERS[kind]
            ceilings = np.minimum(bandwidth * rows.intensity, peak)
            is_above = (rows.kind == "network") & (rows.gflops > ceilings)
            points = rows[~is_above]
            theme.draw_points(
                axes, points.intensity, points.gflops, tint, is_hollow=is_recorded, marker=marker
            )
            if is_above.any():  # a triangle at the ceiling
                has_faster_layers = True
                theme.draw_points(
                    axes,
                    rows.intensity[is_above],
                    ceilings[is_above],
                    tint,
                    is_hollow=is_recorded,
                    marker=FASTER_MARKER,
                )
    # Machines and settings are joined to one name, because `bounds` knows only settings. Layers
    # that are faster than their ceiling, for which `reached` is NaN, come last.
    layers = bounds(frame.assign(setting=frame.machine + frame.setting)).sort_values("reached")
    bottom_of_axes = axes.get_xaxis_transform()  # y is a share of the axes' height
    distinct_layers = layers.drop_duplicates("operation").sort_values("intensity")
    for row, layer in enumerate(distinct_layers.itertuples()):
        axes.axvline(layer.intensity, color=FAINT, lw=0.6, ls=":", zorder=0)
        axes.text(
            layer.intensity,
            0.02 + 0.06 * row,
            f"{layer.operation} ",
            ha="right",
            transform=bottom_of_axes,
        )
    axes.set(xlabel="arithmetic intensity (flop per byte moved)", ylabel="rate (Gflop/s)")
    theme.log_scales(axes)
    least = layers.iloc[0]
    if np.isnan(least.reached):
        title = "Every layer is faster than the measured ceilings"
    else:
        others = "all layers" if layers.reached.notna().all() else "the layers below their ceilings"
        title = (
            f"{least.operation}: {least.reached:.1%} of its ceiling, the smallest share of {others}"
        )
    alt = (
        "Roofline: measured rate against arithmetic intensity, with the ceilings of bandwidth and"
        " arithmetic."
    )
    if layers.reached.isna().any():
        alt += (
            " A layer that is faster than a ceiling reads its numbers from a cache, takes fewer"
            " operations than are counted, or is faster than the largest product measured."
        )
    keys = [
        theme.legend_key(name, ls="", marker=marker, color=FAINT)
        for marker, name in ROOFLINE_MARKERS.values()
    ]
    if has_faster_layers:
        key = theme.legend_key(
            "layer, faster than the ceilings", ls="", marker=FASTER_MARKER, color=FAINT
        )
        keys.append(key)
    return theme.finish_figure(figure, title, alt, keys)


def _roof(
    axes: theme.Axes, device: pd.DataFrame, peak: float, max_intensity: float, **line_style: Any
) -> None:
    """Draw the ceilings of bandwidth and of the rate `peak`, up to an intensity.

    The line has three points. From the first to the second, the rate is the bandwidth times the
    intensity; from there on it is `peak`.
    """
    bandwidth = device[device.kind == "memory"].gigabytes_per_second.max()
    ridge = peak / bandwidth
    intensities = [MIN_INTENSITY, ridge, max_intensity]
    axes.plot(intensities, [MIN_INTENSITY * bandwidth, peak, peak], **line_style)


@draw_registered.register
@theme.with_theme
def placement(step: Placement) -> Picture:
    """Draw a step under the ceilings of its device, and lower bounds on the times of its parts.

    The parts are moving its bytes, computing its FLOP and launching its kernels.
    """
    frame = step.roofline
    tint = theme.colour(step.setting)
    figure, (left, right) = theme.canvas(2, height=3.4)
    peaks = frame[frame.precision != ""].groupby("precision").gflops.max().sort_values()
    max_intensity = 30 * max(step.intensity, 30.0)
    label_height = 0.0
    for precision, peak in peaks.items():
        shade = tint if precision in step.flop else FAINT
        _roof(left, frame, peak, max_intensity, color=shade)
        label_height = max(peak, 1.5 * label_height)  # Labels must not overlap.
        left.annotate(
            precision,
            (max_intensity, label_height),
            ha="right",
            va="bottom",
            fontsize=7,
            color=shade,
        )
    if step.flop:
        theme.draw_points(left, [step.intensity], [step.gflops], INK, marker="*", s=110)
        # A vertical line from the step to the roof.
        left.plot(
            [step.intensity] * 2,
            [step.gflops, step.gflops / step.reached],
            color=INK,
            lw=0.8,
            ls=":",
        )
    left.set(xlabel="flop per byte moved (star: the step)", ylabel="rate (Gflop/s)")
    theme.log_scales(left)
    milliseconds = 1e3 * np.array([step.seconds, *step.at_least.values()])
    bars = right.barh(
        ["measured", *step.at_least], milliseconds, color=[INK, *[tint] * 3], height=0.6
    )
    right.bar_label(bars, [f" {value:.3g}" for value in milliseconds])
    right.invert_yaxis()
    right.set(
        xlim=(0, 1.2 * milliseconds.max()), xlabel="ms for one step, and lower bounds of its parts"
    )
    headline = (
        f"Bound by {step.bound}: {step.reached_words}, launches {step.launch_share:.0%} of the time"
    )
    alt = (
        f"A step under the roofline of {setting_words(step.setting)}, and the time of its parts at"
        " their ceilings."
    )
    return theme.finish_figure(figure, headline, alt)
