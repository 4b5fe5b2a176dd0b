"""Figures of saddles: spectra of Hessians, the loss around a saddle, and escapes from it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpulab.errors import UsageError
from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.plots._drawing import draw_registered
from gpulab.plots.theme import FAINT, INK, ON_CPU, ON_GPU, Style
from gpulab.saddles._escapes import EscapeTable
from gpulab.saddles._landscapes import Surface
from gpulab.saddles._spectrum import ZERO_SHARE, SpectralDensity
from gpulab.settings import TF32_CARDS, Setting
from gpulab.wording import EMULATED

DEVICES = {"on a CPU": ON_CPU, "on a GPU": ON_GPU}
# The colours of the two directions in a surface. They have nothing to do with devices.
LEAST_CURVATURE_COLOUR = ON_GPU
GREATEST_CURVATURE_COLOUR = ON_CPU
NEVER_LEFT_HEIGHT = 0.97  # the height, as a share of the axes, of networks that never left
# The marker of each kind of displacement that moves a network away from a saddle.
PERTURBATION_MARKERS = {"pushed off": "o", "minibatches": "s", "rounding alone": "^"}


# --- the spectrum of a Hessian --------------------------------------------------------------------


@theme.with_theme
def spectrum(density: SpectralDensity) -> Picture:
    """Draw the distribution of an operator's eigenvalues as a histogram.

    Both axes are logarithmic, but the axis of eigenvalues is linear around zero. In the grey band,
    |λ| is less than a hundredth of the largest |λ|. Such eigenvalues are too close to zero for
    their sign to be determined.

    Args:
        density: From `gpulab.saddles.spectral_density`.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> density = gl.saddles.spectral_density(torch.diag(torch.linspace(-1, 3, 50)), steps=20)
        >>> picture = gl.plots.spectrum(density)
        >>> print(picture.alt.partition(". ")[0])
        A histogram of eigenvalues
    """
    zero = ZERO_SHARE * max(map(abs, density.extremes))
    figure, (axes,) = theme.canvas(height=3.4)
    axes.set_xscale("symlog", linthresh=zero)
    # The number of eigenvalues that each node represents. The density is the mean over the probes.
    counts = density.weights * density.size / len(density.nodes)
    sns.histplot(x=density.nodes.ravel(), weights=counts.ravel(), bins=40, color=ON_CPU, ax=axes)
    axes.axvspan(
        -zero, zero, color=FAINT, alpha=0.2, lw=0, label="too close to zero to tell the sign"
    )
    axes.set(yscale="log", ylim=(0.3, None), xlabel="eigenvalue", ylabel="eigenvalues in a bin")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(theme.power_of_ten)
    negative_share = density.mass_below(-zero).value
    positive_share = 1 - density.mass_below(zero).value
    headline = (
        f"{negative_share:.2%} of {density.size:,} eigenvalues are clearly below zero,"
        f" {positive_share:.2%} clearly above"
    )
    return theme.finish_figure(figure, headline, "A histogram of eigenvalues.")


# --- the loss around a network --------------------------------------------------------------------


@draw_registered.register
@theme.with_theme
def saddle_surface(surface: Surface) -> Picture:
    """Draw the loss around a saddle in the plane of its least and its greatest curvature.

    The left panel shows contours of the loss in this plane; a white line joins the points with the
    loss of the saddle. The right panel shows the loss along each of the two directions. Dashed
    lines show the loss predicted from the curvature at the saddle alone.

    Args:
        surface: From `gpulab.saddles.surface`.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(
        ...     torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1]
        ... )
        >>> picture = gl.plots.saddle_surface(gl.saddles.surface(saddle, places=3))
        >>> print(picture.alt.partition(". ")[0])
        A saddle at loss 2.222: 1 of 6 directions lead down
    """
    along = surface.along
    across = surface.across
    losses = surface.losses
    loss = surface.loss
    figure, (left, right) = theme.canvas(2, height=3.9)
    # The loss grows quickly towards the edges. The equally spaced levels therefore end at the 85 %
    # quantile of the losses, so that they show the shape of the loss near the saddle.
    levels = MaxNLocator(12, steps=[1, 2, 5, 10]).tick_values(
        losses.min(), np.quantile(losses, 0.85)
    )
    contours = left.contourf(along, across, losses, levels=levels, cmap="cividis", extend="max")
    left.contour(along, across, losses, levels=[loss], colors="white", linewidths=1.2)
    left.axhline(0, color=LEAST_CURVATURE_COLOUR)
    left.axvline(0, color=GREATEST_CURVATURE_COLOUR)
    left.set(
        xlabel="along the least curvature (distance of the weights)",
        ylabel="along the greatest curvature",
    )
    figure.colorbar(contours, ax=left, format="{x:.5g}", ticks=levels[::2], shrink=0.85)
    # The saddle is in the middle row and the middle column of the grid.
    along_least = losses[len(across) // 2]
    along_greatest = losses[:, len(along) // 2]
    slices = (
        (along, along_least, LEAST_CURVATURE_COLOUR, "least"),
        (across, along_greatest, GREATEST_CURVATURE_COLOUR, "greatest"),
    )
    for (positions, values, tint, name), curvature in zip(slices, surface.curvatures, strict=True):
        right.plot(
            positions, values, color=tint, label=f"along the {name} curvature, {curvature:.2g}"
        )
        right.plot(positions, loss + curvature * positions**2 / 2, color=tint, lw=0.9, ls="--")
    right.set_ylim(
        losses.min() - 0.1 * np.ptp(along_least), max(along_least.max(), along_greatest.max())
    )
    left.set_title("loss (colour)", fontsize="medium")
    right.set(xlabel="distance of the weights from the saddle")
    right.set_title("loss along the two directions", fontsize="medium")
    for axes, height in ((left, 0), (right, loss)):
        axes.plot(0, height, "o", ms=7, color="white", mec=INK)
    alt = f"{surface}. Left, contours of the loss; right, the loss along two directions."
    return theme.finish_figure(
        figure,
        str(surface),
        alt,
        keys=[theme.legend_key("from the curvature alone", color=INK, lw=0.9, ls="--")],
        columns=3,
    )


# --- escapes from a saddle ------------------------------------------------------------------------


@draw_registered.register
def _(escapes: EscapeTable) -> Picture:
    """Draw a table of escapes."""
    return escape_law(escapes.table)


@theme.with_theme
def escape_law(table: pd.DataFrame) -> Picture:
    """Draw how long each escape from a saddle took, against the displacement at its start.

    The number of steps is multiplied by the rate at which the logarithm of the displacement grows
    in each step: ln(1 + ηλ), or ln ρ with momentum. The theory is therefore the same line, ln(r/δ),
    for all learning rates and saddles (see `gpulab.saddles.EscapeTable`).

    Colours show the device, and shapes the kind of displacement. Recorded escapes are hollow. A
    network that never left has no escape time and is drawn as a cross at the upper edge. Optimisers
    that scale their steps, such as Adam, do not follow this law and are left out.

    Args:
        table: From `gpulab.saddles.escape_table` (its `table`) or
            `gpulab.saddles.recorded_escapes`, with the columns `setting`, `steps`, `escaped`,
            `start`, `radius`, `expected_steps`, `expected_rate`, `batch_size`, `perturbation` and
            `recorded`.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: If the table has no escapes by an optimiser that follows this law.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.escape_law(gl.saddles.recorded_escapes())
        >>> print(picture.alt.partition(". ")[0])
        Escape times against the initial displacement, with the line ln(r/δ)
    """
    table = table[table.expected_rate.notna()]
    if table.empty:
        raise UsageError(
            "the table has no escapes by sgd or momentum, the only optimisers that follow this law;"
            " for other optimisers draw the `paths` of `escape_table`"
        )
    on_cpu, on_gpu = DEVICES
    shown = table.assign(
        device=np.where(table.setting.str.startswith("cpu"), on_cpu, on_gpu),
        x=(table.start / table.radius).clip(lower=1e-17),  # a logarithmic axis has no zero
        time=table.steps.where(table.escaped) * table.expected_rate,
        # Minibatches take precedence over a perturbation.
        kind=np.select(
            [table.batch_size > 0, table.perturbation > 0],
            ["minibatches", "pushed off"],
            "rounding alone",
        ),
    )
    low = min(1e-8, shown.x.min())
    figure, (axes,) = theme.canvas(height=4.4)
    axes.plot([low, 1], [np.log(1 / low), 0], color=INK, lw=1, label="theory: ln(r/δ)")
    # Each colour, each shape and the hollow marker has one entry in the legend.
    keys: dict[str, Style] = {}
    for (kind, device, recorded), rows in shown[shown.escaped].groupby(
        ["kind", "device", "recorded"]
    ):
        colour = DEVICES[device]
        face_colour = "none" if recorded else None
        axes.plot(
            rows.x,
            rows.time,
            PERTURBATION_MARKERS[kind],
            color=colour,
            mfc=face_colour,
            ms=8 if recorded else 5,
        )
        keys |= {
            kind: {"marker": PERTURBATION_MARKERS[kind], "color": INK},
            device: {"marker": "D", "color": colour},
        }
        if recorded:
            keys["recorded"] = {"marker": "o", "color": INK, "mfc": "none", "ms": 8}
    theme.log_scale(axes.xaxis)
    axes.set(
        xlabel="displacement at the start, relative to the radius (δ/r)",
        ylabel="steps × ln(1 + ηλ)",
    )
    never_left = shown[~shown.escaped]
    if len(never_left):
        axes.set_ylim(top=1.25 * axes.dataLim.ymax)
        axes.scatter(
            never_left.x,
            np.full(len(never_left), NEVER_LEFT_HEIGHT),
            c=never_left.device.map(DEVICES),
            marker="x",
            label="never left",
            transform=axes.get_xaxis_transform(),
        )
    by_rounding = shown[(shown.perturbation == 0) & (shown.batch_size == 0)]
    for name, group in by_rounding.groupby(by_rounding.setting.map(_arithmetic_label)):
        _name_arithmetic(axes, name, group)
    predictable = table[table.escaped & (table.expected_steps > 1)]
    headline = f"{len(never_left)} never left"
    if len(predictable):
        ratio = (predictable.steps / predictable.expected_steps).median()
        headline = (
            f"{len(predictable)} escapes took {ratio:.2f} times the expected steps (median);"
            f" {headline}"
        )
    alt = (
        "Escape times against the initial displacement, with the line ln(r/δ). Networks that never"
        " left are crosses at the upper edge."
    )
    return theme.finish_figure(
        figure,
        headline,
        alt,
        keys=[theme.legend_key(name, ls="", **style) for name, style in keys.items()],
        columns=4,
    )


def _name_arithmetic(axes: Axes, name: str, group: pd.DataFrame) -> None:
    """Write the name of an arithmetic next to its escapes, and to its networks that never left."""
    escaped = group[group.escaped & np.isfinite(group.time)]
    held = group[~group.escaped]
    offset: Style = {"textcoords": "offset points"}
    if len(escaped):
        place = (escaped.x.median(), escaped.time.max())
        axes.annotate(name, place, xytext=(6, 10), **offset)
    if len(held):
        upper_edge = axes.get_xaxis_transform()
        place = (held.x.median(), NEVER_LEFT_HEIGHT)
        axes.annotate(
            name, place, xycoords=upper_edge, xytext=(0, -8), ha="center", va="top", **offset
        )


def _arithmetic_label(setting: str) -> str:
    """Return the arithmetic of a setting in words, such as `float64` or `TF32 products`."""
    parsed = Setting.parse(setting)
    # The arithmetic of products, which TF32 determines on a GPU and an emulation elsewhere.
    products = parsed.emulate or ("tf32" if parsed.tf32 else "")
    if products in TF32_CARDS:
        return f"products of {EMULATED[products]}"
    if parsed.precision:
        return parsed.precision
    return f"{EMULATED.get(products, products)} products" if products else "float32"
