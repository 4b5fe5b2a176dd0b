"""What is measured of a Hessian, and of the loss around a network's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from gpulab.errors import UsageError
from gpulab.plots import style
from gpulab.plots.style import FAINT, INK, ON_CPU, ON_GPU, Look
from gpulab.report import Picture, draw
from gpulab.saddles.curvature import row_spectra
from gpulab.saddles.landscapes import Landscape, Surface
from gpulab.saddles.spectrum import ZERO
from gpulab.stats.pairs import check_one_protocol

DOWN, UP = ON_GPU, ON_CPU  # directions of negative and of positive curvature
NEAR: Look = {"textcoords": "offset points", "va": "center", "fontsize": 8, "zorder": 7}
KERNEL = 0.05  # width of a node in a ridgeline, in decades
ROOM = 0.75  # how far apart ridgelines stand, in heights of the tallest
HERE: Look = {"marker": "o", "ms": 7, "color": "white", "markeredgecolor": INK}  # where a network is


def index_against_loss(frame: pd.DataFrame) -> Picture:
    """Draw the share of directions in which the loss curves down against the loss, at each moment of each training.

    Small points are single trainings. Lines join the medians over the seeds, from a cross, which is the beginning.

    Args:
        frame: From `gpulab.saddles.curvature_along` or `gpulab.saddles.recorded_curvature`, with the columns
            `experiment`, `profile`, `setting`, `recorded`, `step`, `final`, `size`, `loss` and `index_fraction`, and
            `machine` where there is one. Each network has a panel; of more than two, the first two are drawn.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: Where no row has numbers.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.index_against_loss(gl.saddles.recorded_curvature())
        >>> print(picture.alt.partition(". ")[0])
        The share of negative curvature directions against the loss, all steps of trainings together

    References:
        Dauphin, Pascanu, Gulcehre, Cho, Ganguli, Bengio 2014, *Identifying and attacking the saddle point problem*
        (arXiv 1406.2572).
    """
    measured = _measured(frame)
    networks, correlations = list(measured.experiment.unique())[:2], []
    figure, panels = style.canvas(len(networks), height=3.7)
    for axes, network in zip(panels, networks, strict=True):
        rows = measured[measured.experiment == network]
        floor = 0.5 * rows.index_fraction[rows.index_fraction > 0].min()  # where those without a way down stand
        shown = rows.assign(height=rows.index_fraction.clip(lower=floor))
        for (setting, recorded, _), runs in shown.groupby(["setting", "recorded", "profile"]):
            tint, look = style.colour(setting), {"hollow": recorded, "marker": style.shape(setting)}
            style.points(axes, runs.loss, runs.height, tint, s=7, alpha=0.45, **(look | {"linewidths": 0.7}))
            middle = runs.groupby("step")[["loss", "height"]].median()
            axes.plot(middle.loss, middle.height, color=tint, ls=style.dashes(setting), lw=1.3, zorder=4)
            style.points(axes, middle.loss, middle.height, tint, s=34, zorder=5, **look)
            axes.scatter(middle.loss.iloc[0], middle.height.iloc[0], marker="x", s=30, color=INK, lw=1, zorder=6)
        for profile, runs in shown.groupby("profile") if shown.profile.nunique() > 1 else ():
            last = runs[runs.final]
            axes.annotate(profile, (last.loss.median(), last.height.median()), ha="right", xytext=(-7, 0), **NEAR)
        style.log_scale(axes.xaxis, rows.loss.min(), rows.loss.max())
        style.decades(axes.yaxis, 6)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.set_xlabel(f"{network}: {style.metric_label('loss', [network])}")
        correlation = rows.loss.corr(rows.index_fraction, method="spearman")
        correlations.append(correlation)
    panels[0].set_ylabel("directions that lead down\n(share of all)")
    numbers = " and ".join(f"{correlation:+.2f}" for correlation in correlations)
    headline = f"Loss and share of ways down: rank correlation over all steps {numbers}"
    if min(correlations) > 0:
        headline = f"A lower loss goes with fewer ways down (rank correlation over all steps {numbers})"
    alt = "The share of negative curvature directions against the loss, all steps of trainings together."
    keys = [*style.setting_keys(measured, shapes=True), *style.origin_keys(measured)]
    keys.append(style.key("before training (of the medians)", ls="", marker="x", color=INK))
    return style.finished(figure, headline, alt, keys, columns=3)


def curvature_over_time(frame: pd.DataFrame) -> Picture:
    """Draw the steepest ways up and down along trainings: the largest and the most negative eigenvalue of the Hessian.

    At each moment the settings stand beside each other, each with the median over the seeds, their range as a bar, and
    a small point for each seed. A cross marks where a training diverged.

    Args:
        frame: From `gpulab.saddles.curvature_along` or `gpulab.saddles.recorded_curvature`, of one network and profile,
            with the columns `experiment`, `profile`, `frames`, `setting`, `recorded`, `seed`, `step`, `final`,
            `status`, `size`, `smallest` and `largest`, and `machine` where there is one.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: Where no row has numbers, and where the frame mixes networks, profiles or lengths.

    Examples:
        >>> import gpulab as gl
        >>> frame = gl.saddles.recorded_curvature()
        >>> picture = gl.plots.curvature_over_time(frame[frame.experiment == "autoencoder"])
        >>> print(picture.alt.partition(". ")[0])
        Largest and most negative eigenvalue of the Hessian over updates
    """
    measured = _measured(frame)
    check_one_protocol(measured)
    groups = list(measured.assign(updates=measured.step + 1).groupby(["setting", "recorded"]))
    snapshots = np.log((measured.step + 1).unique())
    gap = np.diff(np.sort(snapshots)).min(initial=np.inf)
    room = 0.6 * gap / len(groups) if np.isfinite(gap) else 0.0  # for one of them, on the logarithmic axis
    figure, panels = style.canvas(2, height=3.7)
    sides = (("largest", 1, "largest eigenvalue"), ("smallest", -1, "most negative eigenvalue (−λ)"))
    for axes, (column, sign, label) in zip(panels, sides, strict=True):
        values = sign * measured[column]
        for number, ((setting, recorded), runs) in enumerate(groups):
            tint, look = style.colour(setting), {"hollow": recorded, "marker": style.shape(setting)}
            runs = runs.assign(value=values.where(values > 0), at=0.0)
            runs["at"] = runs.updates * np.exp(room * (number - (len(groups) - 1) / 2))
            seeds = runs.groupby("at").value.agg(["min", "median", "max"])
            axes.plot(seeds.index, seeds["median"], color=tint, ls=style.dashes(setting), lw=1, zorder=3)
            axes.plot([seeds.index] * 2, [seeds["min"], seeds["max"]], color=tint, lw=0.9, zorder=2)
            style.points(axes, runs["at"], runs.value, tint, s=5, alpha=0.6, zorder=3, **(look | {"linewidths": 0.6}))
            style.points(axes, seeds.index, seeds["median"], tint, s=30, zorder=4, **look)
            lost = runs[runs.status == "diverged"].sort_values("updates").drop_duplicates("seed", keep="last")
            axes.plot(lost["at"], lost.value, ls="", marker="X", ms=8, color=INK, zorder=5)
        style.log_scale(axes.xaxis, 1, measured.step.max() + 1)
        style.log_scale(axes.yaxis, values[values > 0].min(), values[values > 0].max())
        axes.set(xlabel="updates + 1", ylabel=label)
    first, last = measured[measured.step == measured.step.min()], measured[measured.final]
    ratio = (-last.smallest / last.largest).median() / (-first.smallest / first.largest).median()
    headline = (
        f"{measured.experiment.iloc[0]}: the steepest way down, relative to the steepest way up, "
        f"ends at {ratio:.2g} times where it began"
    )
    keys = [*style.setting_keys(measured, shapes=True), *style.origin_keys(measured)]
    keys.append(style.key("median and range of the seeds", color=INK, lw=0.9))
    if (measured.status == "diverged").any():
        keys.append(style.key("diverged", ls="", marker="X", color=INK))
    alt = "Largest and most negative eigenvalue of the Hessian over updates."
    return style.finished(figure, headline, alt, keys, columns=3)


def spectra(frame: pd.DataFrame) -> Picture:
    """Draw the Hessian's spectrum at each moment of trainings, one ridge above the other.

    The axis of the eigenvalues is linear around zero and logarithmic beyond. In the grey band, eigenvalues are too
    close to zero to tell their signs. A ridge's height is the logarithm of how many eigenvalues there are, from one up;
    the bar at the right is a factor of a hundred. Thin lines are seeds, thick ones their mean.

    Args:
        frame: From `gpulab.saddles.curvature_along` or `gpulab.saddles.recorded_curvature`, of one network and profile,
            with the columns `experiment`, `profile`, `frames`, `setting`, `seed`, `step`, `final`, `size`, `smallest`,
            `largest`, `zero_fraction`, `nodes` and `node_weights`, and `recorded` and `machine` where there are any.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: Where no row has numbers, and where the frame mixes networks, profiles or lengths.

    Examples:
        >>> import gpulab as gl
        >>> frame = gl.saddles.recorded_curvature()
        >>> picture = gl.plots.spectra(frame[(frame.experiment == "autoencoder") & (frame.setting == "cpu")])
        >>> print(picture.alt.partition(". ")[0])
        Spectra of the Hessian along trainings, as ridgelines over updates

    References:
        Ghorbani, Krishnan, Xiao 2019 (arXiv 1901.10159), who follow spectra of networks through training.
    """
    measured = _measured(frame)
    check_one_protocol(measured)
    low, high = measured.smallest.min(), measured.largest.max()
    grey = ZERO * float(np.median(np.maximum(measured.largest, -measured.smallest)))
    band = grey / 3  # where the axis turns from linear to logarithmic

    def place(value: Any) -> Any:  # of an eigenvalue, on the axis
        return np.sign(value) * np.log10(1 + np.abs(value) / band)

    axis = np.linspace(-place(-low) - 0.3, place(high) + 0.3, 600)
    ridges = {}
    for row, density in row_spectra(measured):
        kernels = np.exp(-0.5 * ((axis[:, None] - place(density.nodes).ravel()) / KERNEL) ** 2)
        per_decade = (kernels / (KERNEL * np.sqrt(2 * np.pi)) * density.weights.ravel()).sum(1) / len(density.nodes)
        ridges[row.setting, row.seed, row.step] = np.log10(1 + density.size * per_decade)
    tallest = max(ridge.max() for ridge in ridges.values())
    steps = sorted(measured.step.unique())
    figure, (axes,) = style.canvas(1, height=1.5 + 0.62 * len(steps))
    for row, step in enumerate(steps):
        base = -row * ROOM
        axes.axhline(base, color=FAINT, lw=0.5, zorder=-row)
        for number, setting in enumerate(style.setting_order(measured)):
            tint = style.colour(setting)
            seeds = [base + ridge / tallest for (s, _, t), ridge in ridges.items() if (s, t) == (setting, step)]
            if not seeds:
                continue
            axes.plot(axis, np.transpose(seeds), color=tint, lw=0.4, alpha=0.5, zorder=row)
            mean = np.mean(seeds, 0)
            if number == 0:
                axes.fill_between(axis, base, mean, color=tint, alpha=0.15, lw=0, zorder=row)
            axes.plot(axis, mean, color=tint, ls=style.dashes(setting), lw=1.3, zorder=row)
    axes.plot([axis[-1]] * 2, [0.3, 0.3 + 2 / tallest], color=INK, lw=1.2)
    axes.annotate(" × 100", (axis[-1], 0.3 + 1 / tallest), fontsize=7.5, va="center", annotation_clip=False)
    axes.axvspan(-place(grey), place(grey), color=FAINT, alpha=0.15, lw=0, zorder=-99)
    axes.set_yticks([-row * ROOM for row in range(len(steps))], [f"{step:,}" for step in steps])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    powers = 10.0 ** np.arange(np.ceil(np.log10(band)), np.floor(np.log10(max(high, -low))) + 1)
    ticks = np.array([*-powers[powers <= -low][::-1], 0.0, *powers[powers <= high]])
    axes.set_xticks(place(ticks), [f"{tick:g}".replace("-", "−") for tick in ticks])
    axes.set(xlabel="eigenvalue (grey: too close to zero to tell its sign)", ylabel="updates")
    seeds, zero = measured.seed.nunique(), measured[measured.final].zero_fraction.mean()
    headline = (
        f"{measured.experiment.iloc[0]}, {seeds} seed{'s' if seeds > 1 else ''}: "
        f"at the end {100 * (1 - zero):.2g} % of the eigenvalues stand out from zero"
    )
    keys = [*style.setting_keys(measured), *style.origin_keys(measured, marker="")]
    return style.finished(figure, headline, "Spectra of the Hessian along trainings, as ridgelines over updates.", keys)


def _measured(frame: pd.DataFrame) -> pd.DataFrame:
    if not (frame["size"] > 0).any():
        raise UsageError("there is no row with numbers to draw")
    return frame[frame["size"] > 0].reset_index(drop=True)


@draw.register
def saddle_surface(surface: Surface) -> Picture:
    """Draw the loss around a saddle, over the directions of the least and of the greatest curvature.

    On the left, contours of the loss in their plane. On the right, the loss along each of the two; dashed, what the
    curvature at the saddle alone would make of it.

    Args:
        surface: From `gpulab.saddles.surface`.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([4.0, 3.0, 2.0])), [1])
        >>> picture = gl.plots.saddle_surface(gl.saddles.surface(saddle, places=3))
        >>> print(picture.alt.partition(". ")[0])
        A saddle at loss 2.222: 1 of 6 directions lead down
    """
    along, across, losses, loss = surface.along, surface.across, surface.losses, surface.loss
    figure, (left, right) = style.canvas(2, height=3.7)
    quantiles = np.unique(np.quantile(losses, np.linspace(0.02, 0.98, 13)))
    filled = left.contourf(along, across, losses, levels=quantiles, cmap="cividis", extend="both")
    left.contour(along, across, losses, levels=[loss], colors="white", linewidths=1.2)
    left.plot(0, 0, **HERE)
    left.axhline(0, color=DOWN, lw=1.4)
    left.axvline(0, color=UP, lw=1.4)
    left.set(xlabel="along the least curvature (distance of the weights)", ylabel="along the greatest curvature")
    bar = figure.colorbar(filled, ax=left, label="loss", format=lambda value, _: f"{value:.3g}", shrink=0.85)
    bar.ax.tick_params(labelsize=7)
    least, greatest = losses[len(across) // 2], losses[:, len(along) // 2]
    slices = (along, least, DOWN, "least"), (across, greatest, UP, "greatest")
    for (positions, values, tint, name), curvature in zip(slices, surface.curvatures, strict=True):
        right.plot(positions, values, color=tint, lw=1.6, label=f"along the {name}: {curvature:.2g}")
        right.plot(positions, loss + curvature * positions**2 / 2, color=tint, lw=0.9, ls="--")
    right.plot(0, loss, zorder=5, **HERE)
    low, high = losses.min(), max(least.max(), greatest.max())
    right.set_ylim(low - 0.08 * (high - low), high + 0.25 * (high - low))
    right.set(xlabel="distance of the weights from the saddle", ylabel="loss")
    title = "curvature (dashed: it alone)"
    right.legend(fontsize=7.5, frameon=False, loc="upper center", title=title, title_fontsize=7.5)
    alt = f"{surface}. Left, contours of the loss; right, the loss along two directions."
    return style.finished(figure, str(surface), alt)


def landscape_slice(landscape: Landscape, line: pd.DataFrame, angle: float = 0.0) -> Picture:
    """Draw the loss along a line through a network's weights, beside what slope and curvature there would make of it.

    Args:
        landscape: From `gpulab.saddles.landscape`.
        line: The landscape's `slice` at the same angle: `distance`, `loss` and `quadratic`.
        angle: The line's direction in degrees: 0 is the steepest way down, 90 the steepest way up.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> layer = torch.nn.Linear(2, 1, bias=False).double()
        >>> loss = lambda: (layer.weight[0, 0] * layer.weight[0, 1] - 1) ** 2
        >>> around = gl.saddles.landscape(layer, loss)
        >>> picture = gl.plots.landscape_slice(around, around.slice(90, extent=0.1), 90)
        >>> print(picture.alt.partition(". ")[0])
        The loss along a line through the weights
    """
    curvature = landscape.curvature(angle)
    figure, (axes,) = style.canvas(1, height=3.6)
    axes.plot(line.distance, line.loss, color=DOWN if curvature < 0 else UP, lw=1.8, label="loss")
    axes.plot(line.distance, line.quadratic, color=INK, lw=0.9, ls="--", label="slope and curvature alone")
    axes.plot(0, landscape.loss, label="the network", zorder=5, **HERE)
    low, high = min(line.loss.min(), landscape.loss), line.loss.max()
    axes.set_ylim(low - 0.25 * (high - low), high + 0.1 * (high - low))
    axes.set(xlabel="distance of the weights from the network's", ylabel="loss")
    axes.legend(fontsize=8, frameon=False)
    gain = 1 - line.loss.min() / landscape.loss
    headline = f"At {angle:g}° the curvature is {curvature:.2g}; the lowest loss on the line is {gain:.1%} lower"
    return style.finished(figure, headline, "The loss along a line through the weights.")
