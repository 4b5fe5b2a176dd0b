"""Saddles: what is measured of a Hessian, the loss around a network's weights, and the ways out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from gpulab.errors import UsageError
from gpulab.plots import style
from gpulab.plots.names import optimizer_words
from gpulab.plots.style import BESIDE, FAINT, INK, ON_CPU, ON_GPU, Look
from gpulab.report import Picture, draw
from gpulab.saddles.curvature import row_spectra
from gpulab.saddles.escapes import EscapeTable
from gpulab.saddles.landscapes import Landscape, Surface
from gpulab.saddles.spectrum import ZERO, SpectralDensity
from gpulab.settings import Setting
from gpulab.stats.pairs import check_one_protocol

DOWN, UP = ON_GPU, ON_CPU  # directions of negative and of positive curvature
DEVICES = {"on a CPU": ON_CPU, "on a GPU": ON_GPU}
HERE: Look = {"marker": "o", "ms": 7, "color": "white", "markeredgecolor": INK}  # where a network is
FLOOR = 1e-17  # displacements that a logarithmic axis can do without
# What takes a network off a saddle: how it is drawn, and how large.
PUSHES = {"pushed off": ("o", 14), "emulated": ("^", 40), "minibatches": ("s", 14), "rounding alone": ("o", 40)}


# --- curvature along trainings ---------------------------------------------------------------------------


@style.themed
def index_against_loss(frame: pd.DataFrame) -> Picture:
    """Draw the share of directions in which the loss curves down against the loss, at each moment of each training.

    Points are single trainings, blue on a CPU, orange on a GPU. Lines join the medians of a network and profile over
    seeds and settings, from a cross, which is the beginning.

    Args:
        frame: From `gpulab.saddles.curvature_along` or `gpulab.saddles.recorded_curvature`, with the columns
            `experiment`, `profile`, `setting`, `recorded`, `step`, `final`, `size`, `loss` and `index_fraction`, and
            `machine` where there is one.

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
    with_any = measured.index_fraction > 0
    floor = 0.5 * measured.index_fraction[with_any].min()  # where those without a way down stand
    shown = measured.assign(height=measured.index_fraction.where(with_any, floor))
    figure, (axes,) = style.canvas(height=4.4)
    style.points(axes, shown.loss, shown.height, shown.device.map(DEVICES), shown.recorded, s=11, alpha=0.5)
    for (network, profile), runs in shown.groupby(["experiment", "profile"]):
        middle = runs.groupby("step")[["loss", "height"]].median()
        axes.plot(middle.loss, middle.height, color=INK, marker="o", ms=3.5, zorder=4)
        axes.scatter(*middle.iloc[0], marker="x", s=60, color=INK, zorder=5)
        near: Look = {"xytext": (-7, 3), "textcoords": "offset points", "ha": "right", "zorder": 7}
        axes.annotate(f"{network}, {profile}", middle.iloc[-1], weight="bold", **near)
    for axis in (axes.xaxis, axes.yaxis):
        style.log_scale(axis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.set(xlabel=style.metric_label("loss", measured.experiment), ylabel="share of directions that lead down")
    axes.margins(x=0.12)
    correlations = [
        f"{rows.loss.corr(rows.index_fraction, method='spearman'):+.2f} ({network})"
        for network, rows in measured.groupby("experiment")
    ]
    headline = f"Rank correlation of the loss with the share of ways down, over all steps: {', '.join(correlations)}"
    alt = "The share of negative curvature directions against the loss, all steps of trainings together."
    keys = [*_device_keys(measured), *style.origin_keys(measured)]
    keys.append(style.key("median, from the beginning (cross)", color=INK, marker="o", ms=3.5))
    return style.finished(figure, headline, alt, keys)


@style.themed
def curvature_over_time(frame: pd.DataFrame) -> Picture:
    """Draw the steepest ways up and down along trainings: the largest and the most negative eigenvalue of the Hessian.

    At each moment the settings stand beside each other, each with the median over the seeds, their range as a bar, and
    a small point for each seed. The title says how many trainings diverged.

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
    measured, tints = style.named(measured)
    dodge = 0.8 * (1 - 1 / len(tints)) or False  # as far as a strip of points does
    interval: Look = {"estimator": "median", "errorbar": ("pi", 100), "dodge": dodge, "linestyle": "none"}
    figure, panels = style.canvas(2, height=3.9)
    sides = (("largest", 1, "largest eigenvalue"), ("smallest", -1, "most negative eigenvalue (−λ)"))
    for axes, (column, sign, label) in zip(panels, sides, strict=True):
        values = (sign * measured[column]).where(sign * measured[column] > 0)
        look: Look = {"data": measured.assign(value=values), "x": "step", "y": "value", "hue": "name", "ax": axes}
        look |= {"hue_order": [*tints], "palette": tints}
        sns.pointplot(**look, **interval, markersize=4, err_kws={"lw": 0.9})
        sns.stripplot(**look, dodge=True, jitter=False, size=2.5, alpha=0.5, legend=False)
        style.log_scale(axes.yaxis)
        axes.set(xlabel="updates", ylabel=label)
    first, last = measured[measured.step == measured.step.min()], measured[measured.final]
    ratio = (-last.smallest / last.largest).median() / (-first.smallest / first.largest).median()
    headline = (
        f"{measured.experiment.iloc[0]}: the steepest way down, relative to the steepest way up, "
        f"ends at {ratio:.2g} times where it began"
    )
    if diverged := (frame.status == "diverged").sum():
        headline += f"; {diverged} diverged"
    keys = [*style.origin_keys(measured), style.key("median and range of the seeds", color=INK, lw=0.9)]
    alt = "Largest and most negative eigenvalue of the Hessian over updates."
    return style.finished(figure, headline, alt, keys, columns=3)


@style.themed
def spectra(frame: pd.DataFrame) -> Picture:
    """Draw histograms of the Hessian's eigenvalues at the beginning, in the middle and at the end of trainings.

    Lines are means over the trainings. Both axes are logarithmic, that of the eigenvalues linear around zero; in the
    grey band, eigenvalues are too close to zero to tell their signs.

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
        Histograms of the eigenvalues of the Hessian along trainings

    References:
        Ghorbani, Krishnan, Xiao 2019 (arXiv 1901.10159), who follow spectra of networks through training.
    """
    measured = _measured(frame)
    check_one_protocol(measured)
    zero = ZERO * float(np.median(np.maximum(measured.largest, -measured.smallest)))
    steps = sorted(measured.step.unique())
    tints = dict(zip(sorted({0, len(steps) // 2, len(steps) - 1}), (FAINT, ON_CPU, ON_GPU), strict=False))
    tints = {f"after {steps[number]:,} updates": tint for number, tint in tints.items()}
    nodes = pd.concat(
        _nodes(density).assign(name=f"after {row.step:,} updates", trainings=(measured.step == row.step).sum())
        for row, density in row_spectra(measured)
    )
    figure, (axes,) = style.canvas(height=3.6)
    _histogram(axes, nodes[nodes.name.isin(tints)], zero, tints)
    seeds, end = measured.seed.nunique(), measured[measured.final].zero_fraction.mean()
    headline = (
        f"{measured.experiment.iloc[0]}, {seeds} seed{'s' if seeds > 1 else ''}: "
        f"at the end {100 * (1 - end):.2g} % of the eigenvalues stand out from zero"
    )
    alt = "Histograms of the eigenvalues of the Hessian along trainings."
    return style.finished(figure, headline, alt, style.origin_keys(measured))


@style.themed
def spectrum(density: SpectralDensity) -> Picture:
    """Draw how an operator's eigenvalues are distributed, as a histogram.

    Both axes are logarithmic, that of the eigenvalues linear around zero: in the grey band, closer to zero than a
    hundredth of the largest eigenvalue, they are too close to tell their signs.

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
    low, high = density.extremes
    zero = ZERO * max(-low, high)
    figure, (axes,) = style.canvas(height=3.4)
    _histogram(axes, _nodes(density).assign(name="all", trainings=1), zero, {"all": ON_CPU})
    below, above = density.mass_below(-zero), 1 - density.mass_below(zero).value
    headline = f"{density.size:,} eigenvalues from {low:.3g} to {high:.3g}"
    headline += f": {below.value:.2%} stand out below zero, {above:.2%} above"
    return style.finished(figure, headline, "A histogram of eigenvalues.")


def _nodes(density: SpectralDensity) -> pd.DataFrame:
    """Each node of a density, and for how many eigenvalues it stands."""
    counts = density.weights * density.size / len(density.nodes)
    return pd.DataFrame({"eigenvalue": density.nodes.ravel(), "count": counts.ravel()})


def _histogram(axes: Axes, nodes: pd.DataFrame, zero: float, tints: dict[str, str]) -> None:
    """How many eigenvalues there are in each of 70 bins, a line for each `name`, the mean of its `trainings`."""
    axes.set_xscale("symlog", linthresh=zero)
    nodes = nodes.assign(count=nodes["count"] / nodes.trainings).reset_index()
    line: Look = {"bins": 70, "element": "step", "fill": False, "legend": len(tints) > 1, "lw": 1.1}
    sns.histplot(nodes, x="eigenvalue", weights="count", hue="name", palette=tints, ax=axes, **line)
    axes.axvspan(-zero, zero, color=FAINT, alpha=0.2, lw=0, label="too close to zero to tell the sign")
    axes.set(yscale="log", xlabel="eigenvalue", ylabel="eigenvalues in a bin")
    axes.set_ylim(bottom=0.3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(style.power_of_ten)


def _measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that have numbers, with the device of each in words."""
    if not (frame["size"] > 0).any():
        raise UsageError("there is no row with numbers to draw")
    return _on_devices(frame[frame["size"] > 0].reset_index(drop=True))


def _on_devices(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(device=np.where(frame.setting.str.startswith("cpu"), *DEVICES))


def _device_keys(frame: pd.DataFrame) -> list[Any]:
    drawn = set(frame.device)
    return [style.key(name, color=tint, lw=2) for name, tint in DEVICES.items() if name in drawn]


# --- the loss around a network ---------------------------------------------------------------------------


@draw.register
@style.themed
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
    figure, (left, right) = style.canvas(2, height=3.9)
    quantiles = np.unique(np.quantile(losses, np.linspace(0.02, 0.98, 13)))
    filled = left.contourf(along, across, losses, levels=quantiles, cmap="cividis", extend="both")
    left.contour(along, across, losses, levels=[loss], colors="white", linewidths=1.2)
    left.plot(0, 0, **HERE)
    left.axhline(0, color=DOWN, lw=1.4)
    left.axvline(0, color=UP, lw=1.4)
    left.set(xlabel="along the least curvature (distance of the weights)", ylabel="along the greatest curvature")
    figure.colorbar(filled, ax=left, label="loss", format=lambda value, _: f"{value:.3g}", shrink=0.85)
    least, greatest = losses[len(across) // 2], losses[:, len(along) // 2]
    slices = (along, least, DOWN, "least"), (across, greatest, UP, "greatest")
    for (positions, values, tint, name), curvature in zip(slices, surface.curvatures, strict=True):
        right.plot(positions, values, color=tint, lw=1.6, label=f"along the {name} curvature, {curvature:.2g}")
        right.plot(positions, loss + curvature * positions**2 / 2, color=tint, lw=0.9, ls="--")
    right.plot(0, loss, zorder=5, **HERE)
    low, high = losses.min(), max(least.max(), greatest.max())
    right.set_ylim(low - 0.08 * (high - low), high + 0.05 * (high - low))
    right.set(xlabel="distance of the weights from the saddle", ylabel="loss")
    alt = f"{surface}. Left, contours of the loss; right, the loss along two directions."
    keys = [style.key("of the curvature alone", color=INK, lw=0.9, ls="--")]
    return style.finished(figure, str(surface), alt, keys, columns=3)


@style.themed
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
    figure, (axes,) = style.canvas()
    axes.plot(line.distance, line.loss, color=DOWN if curvature < 0 else UP, lw=1.8, label="loss")
    axes.plot(line.distance, line.quadratic, color=INK, lw=0.9, ls="--", label="slope and curvature alone")
    axes.plot(0, landscape.loss, ls="", label="the network", zorder=5, **HERE)
    low, high = min(line.loss.min(), landscape.loss), line.loss.max()
    axes.set_ylim(low - 0.25 * (high - low), high + 0.1 * (high - low))
    axes.set(xlabel="distance of the weights from the network's", ylabel="loss")
    gain = 1 - line.loss.min() / landscape.loss
    headline = f"At {angle:g}° the curvature is {curvature:.2g}; the lowest loss on the line is {gain:.1%} lower"
    return style.finished(figure, headline, "The loss along a line through the weights.", columns=3)


# --- ways out of a saddle --------------------------------------------------------------------------------


@draw.register
def _(escapes: EscapeTable) -> Picture:
    if escapes.table.expected_rate.isna().all():  # no law to draw
        return escape_paths(escapes.paths, escapes.table.radius.iloc[0])
    return escape_law(escapes.table)


@style.themed
def escape_law(table: pd.DataFrame) -> Picture:
    """Draw how long each escape from a saddle took, against the displacement with which it began.

    The steps are multiplied by ln(1 + ηλ), or by ln ρ with momentum, the growth of the displacement's logarithm in one
    step. So every learning rate and every saddle has the same line, ln(r/δ) (see `gpulab.saddles.escape`). A cross is
    an escape that never came; it stands where theory expects it. Optimisers that scale their steps, such as Adam, have
    no such law, and are left out.

    Args:
        table: From `gpulab.saddles.escape_table` (its `table`) or `gpulab.saddles.recorded_escapes`, with the columns
            `setting`, `steps`, `left`, `start`, `radius`, `expected`, `expected_rate`, `batch_size`, `perturbation`,
            `emulated` and `recorded`, and `machine` where there is one.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: Where no escape is by an optimiser that has such a law.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.escape_law(gl.saddles.recorded_escapes())
        >>> print(picture.alt.partition(". ")[0])
        Escape times against the initial displacement, with the line ln(r/δ)
    """
    table = table[table.expected_rate.notna()]
    if table.empty:
        raise UsageError("no escape by sgd or momentum, the only ones with a law to draw: see plots.escape_phases")
    kinds = [table.batch_size > 0, table.emulated.astype(bool), table.perturbation > 0]
    shown = _on_devices(table).assign(
        x=(table.start / table.radius).clip(lower=FLOOR),
        time=table.steps.where(table.left, table.expected) * table.expected_rate,
        kind=np.select(kinds, ["minibatches", "emulated", "pushed off"], "rounding alone"),
    )
    low = min(1e-8, shown.x.min() / 5)
    figure, (axes,) = style.canvas(height=4.4)
    axes.plot([low, 1], [np.log(1 / low), 0], color=INK, lw=1, zorder=1)
    axes.annotate("theory: ln(r/δ)  ", (low**0.7, np.log(low**-0.7)), ha="right", va="top")
    for (kind, device, recorded, left), rows in shown.groupby(["kind", "device", "recorded", "left"]):
        marker, size = PUSHES[kind]
        tint, words = DEVICES[device], f"{kind}, {device}" + " (recorded)" * bool(recorded)
        look: Look = {"marker": marker, "s": size + 40 * recorded, "label": words}  # a ring around what was made here
        if not left:
            look = {"marker": "x", "s": size, "label": "never left, at its expected time"}
        axes.scatter(rows.x, rows.time, facecolors="none" if recorded and left else tint, edgecolors=tint, **look)
    style.log_scale(axes.xaxis)
    axes.set(xlim=(low, 3), xlabel="displacement at the start, relative to the radius (δ/r)")
    axes.set(ylim=(-1, np.log(1 / low) * 1.05), ylabel="steps until it left × ln(1 + ηλ)")
    alone = shown[(shown.perturbation == 0) & (shown.batch_size == 0) & np.isfinite(shown.time)]
    for name, group in alone.groupby(alone.setting.map(_arithmetic)):  # what rounded it off the saddle
        above = (group.x.median(), group.time.quantile(0.9))
        axes.annotate(name, above, xytext=(6, 10), textcoords="offset points", zorder=5)
    timed = table[table.left & (table.expected > 1)]
    ratio = (timed.steps / timed.expected).median()
    words = [f"{len(timed)} escapes took {ratio:.2f} times what theory expects (median)"] if len(timed) else []
    if not table.left.all():
        words.append(f"{(~table.left).sum()} never left")
    alt = "Escape times against the initial displacement, with the line ln(r/δ)."
    return style.finished(figure, "; ".join(words), alt, columns=3)


def _arithmetic(setting: str) -> str:
    """The numbers that a setting computes with."""
    parsed = Setting.parse(setting)
    products = parsed.emulate or ("tf32" if parsed.tf32 else "")
    return parsed.precision or (f"{products} products" if products else "float32")


@style.themed
def escape_paths(paths: pd.DataFrame, radius: float) -> Picture:
    """Draw the way out of the saddle, step by step: a line for each escape, a panel for each optimiser.

    Upwards is the displacement along the directions that lead down; its logarithm grows by ln(1 + ηλ) in a step of
    gradient descent. Lines are dashed where the arithmetic is emulated, black where the weights are kept in
    float64. Those of minibatches show the running median.

    Args:
        paths: The `paths` of `gpulab.saddles.escape_table`: `step`, `unstable`, and the columns that tell escapes
            apart, `setting`, `optimizer`, `master_weights`, `batch_size`, `learning_rate`, `perturbation` and `seed`.
        radius: The displacement at which a network has left; a line marks it.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> saddle = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([3.0, 2.0, 1.0])), [1])
        >>> escapes = gl.saddles.escape_table(saddle, ["cpu"], perturbations=[1e-3, 1e-4], progress=False)
        >>> gl.plots.escape_paths(escapes.paths, radius=0.1).alt
        'Displacement against steps, logarithmic: 2 of 2 trainings leave the saddle.'
    """
    by = ["optimizer", "setting", "master_weights", "batch_size", "learning_rate", "perturbation", "seed"]
    paths, tints = style.named(paths)
    master = paths.master_weights.astype(bool)
    paths["name"] += master.map({True: ", weights kept in float64", False: ""})
    tints |= dict.fromkeys(paths.name[master], INK)
    paths["path"] = paths.groupby(by).ngroup()
    smooth = paths.groupby("path").unstable.transform(
        lambda path: path.rolling(len(path) // 20 + 1, center=True, min_periods=1).median()
    )
    paths["shown"] = paths.unstable.where(paths.batch_size == 0, smooth).clip(lower=FLOOR)
    widths = dict(zip(tints, np.linspace(3, 1.2, len(tints)), strict=True))  # lines that coincide are seen
    dashes = {name: (4, 1.5) if "emulating" in name else "" for name in tints}
    look: Look = {"hue": "name", "palette": tints, "style": "name", "dashes": dashes, "size": "name", "sizes": widths}
    optimizers = list(paths.optimizer.unique())
    figure, panels = style.canvas(len(optimizers), height=3.9, sharey=True)
    for axes, optimizer in zip(panels, optimizers, strict=True):
        own = paths[paths.optimizer == optimizer]
        sns.lineplot(own, x="step", y="shown", units="path", estimator=None, ax=axes, alpha=0.8, **look)
        rates = ", ".join(f"{rate:.3g}" for rate in own.learning_rate.unique())
        axes.axhline(radius, color=FAINT, lw=0.9)
        style.log_scale(axes.yaxis)
        axes.set(title=f"{optimizer_words(optimizer)}, learning rate {rates}", xlabel="steps of the optimiser")
        axes.set_ylabel("displacement along the ways down" + ", running median" * bool((paths.batch_size > 0).all()))
    panels[-1].annotate(" left", (1, radius), **BESIDE)
    left = (paths.groupby("path").unstable.last() > radius).sum()
    headline = f"{left} of {paths.path.nunique()} trainings leave the saddle"
    return style.finished(figure, headline, f"Displacement against steps, logarithmic: {headline}.")


@style.themed
def escape_phases(table: pd.DataFrame) -> Picture:
    """Draw which optimiser leaves a saddle in which arithmetic, and what should decide it.

    There is a row for each optimiser and a colour for each arithmetic, with all learning rates together. To the right
    is the length of the step that a training settles to at the saddle, relative to half of what separates the weights
    from the next numbers of their format. Left of the line at 1, steps are rounded away. A training that left is a
    point, one that never did a cross.

    Args:
        table: From `gpulab.saddles.escape_table` (its `table`) or `gpulab.saddles.recorded_escapes`, with the columns
            `setting`, `optimizer`, `learning_rate`, `step_ratio`, `left`, `batch_size`, `perturbation` and
            `master_weights`, and `recorded` and `machine` where there are any. Drawn are trainings without a
            perturbation, by whole batches, with weights in the setting's format, whose `step_ratio` is above zero.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: Where there is no such training.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.escape_phases(gl.saddles.recorded_escapes())
        >>> print(picture.alt.partition(",")[0])
        Steps relative to half a last place
    """
    alone = (table.batch_size == 0) & (table.perturbation == 0) & ~table.master_weights.astype(bool)
    shown = table[alone & (table.step_ratio > 0)]
    if shown.empty:
        raise UsageError("no training without a push, without minibatches and with a measured step_ratio to draw")
    shown = shown.assign(numbers=shown.setting.map(_arithmetic), who=shown.optimizer.map(optimizer_words))
    arithmetic = shown.drop_duplicates("numbers").set_index("numbers").setting.map(style.colour)
    look: Look = {"x": "step_ratio", "y": "who", "order": shown.who.unique(), "dodge": True, "jitter": False}
    look |= {"hue": "numbers", "palette": arithmetic.to_dict(), "hue_order": [*arithmetic.index]}
    figure, (axes,) = style.canvas(height=1.6 + 0.6 * shown.who.nunique())
    sns.stripplot(shown[shown.left], ax=axes, size=4.5, linewidth=0, alpha=0.7, **look)
    sns.stripplot(shown[~shown.left], ax=axes, size=6, marker="x", linewidth=1.5, legend=False, **look)
    style.log_scale(axes.xaxis)
    axes.axvspan(axes.get_xlim()[0], 1, color=FAINT, alpha=0.2, lw=0, zorder=0, label="steps are rounded away")
    axes.axvline(1, color=INK, lw=1)
    axes.set(xlabel="length of a step, relative to half of what separates the weights from the next numbers", ylabel="")
    right = int((shown.left == (shown.step_ratio > 1)).sum())
    headline = f"{right} of {len(shown)} trainings follow the criterion: steps above 1 leave, those below stay"
    keys = [style.key("never left", ls="", marker="x", color=INK)]
    alt = f"Steps relative to half a last place, for {', '.join(shown.who.unique())}."
    return style.finished(figure, headline, alt, keys, columns=3)
