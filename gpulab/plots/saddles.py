"""Saddles: what is measured of a Hessian, the loss around a network's weights, and the ways out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from gpulab.errors import UsageError
from gpulab.plots import style
from gpulab.plots.names import optimizer_words
from gpulab.plots.style import FAINT, INK, ON_CPU, ON_GPU, Look
from gpulab.report import Picture, draw
from gpulab.saddles.curvature import row_spectra
from gpulab.saddles.escapes import EscapeTable
from gpulab.saddles.landscapes import Surface
from gpulab.saddles.spectrum import ZERO, SpectralDensity
from gpulab.settings import Setting
from gpulab.stats.pairs import check_one_protocol

DEVICES = {"on a CPU": ON_CPU, "on a GPU": ON_GPU}
# What takes a network off a saddle: how it is drawn, and how large.
PUSHES = {"pushed off": ("o", 4), "emulated": ("^", 6), "minibatches": ("s", 4), "rounding alone": ("o", 6)}


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
    floor = 0.5 * measured.index_fraction[measured.index_fraction > 0].min()  # where those without a way down stand
    measured["height"] = 100 * measured.index_fraction.clip(lower=floor)
    figure, (axes,) = style.canvas(height=4.4)
    for (device, recorded), rows in measured.groupby(["device", "recorded"]):
        label = f"{device}, {'recorded' if recorded else 'here'}"
        style.points(axes, rows.loss, rows.height, DEVICES[device], recorded, s=11, alpha=0.5, label=label)
    for (network, profile), runs in measured.groupby(["experiment", "profile"]):
        middle = runs.groupby("step")[["loss", "height"]].median()
        axes.plot(middle.loss, middle.height, "o-", color=INK, ms=3.5, label="median")
        axes.plot(*middle.iloc[0], "x", color=INK, ms=8, label="before training")
        axes.annotate(f"{network}, {profile}  ", middle.iloc[-1], ha="right", weight="bold")
    style.log_scales(axes)
    axes.set(xlabel=style.metric_label("loss", measured.experiment), ylabel="share of directions that lead down (%)")
    axes.margins(x=0.12)
    ranks = {network: rows.loss.corr(rows.height, "spearman") for network, rows in measured.groupby("experiment")}
    numbers = ", ".join(f"{rank:+.2f} ({network})" for network, rank in ranks.items())
    headline = f"Rank correlation of the loss with the share of ways down, over all steps: {numbers}"
    alt = "The share of negative curvature directions against the loss, all steps of trainings together."
    return style.finished(figure, headline, alt, columns=4)


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
        Histograms of the Hessian's eigenvalues along trainings; seeds: 6

    References:
        Ghorbani, Krishnan, Xiao 2019 (arXiv 1901.10159), who follow spectra of networks through training.
    """
    measured = _measured(frame)
    check_one_protocol(measured)
    zero = ZERO * float(np.median(np.maximum(measured.largest, -measured.smallest)))
    steps = np.quantile(measured.step.unique(), [0, 0.5, 1], method="nearest")
    tints = dict(zip((f"after {step:,.0f} updates" for step in steps), (FAINT, ON_CPU, ON_GPU), strict=True))
    nodes = pd.concat(
        _nodes(density, (measured.step == row.step).sum()).assign(name=f"after {row.step:,} updates")
        for row, density in row_spectra(measured)
    )
    figure, (axes,) = style.canvas()
    _histogram(axes, nodes[nodes.name.isin(tints)], zero, tints)
    above = 100 * (1 - measured[measured.final].zero_fraction.mean())
    headline = f"{measured.experiment.iloc[0]}: at the end {above:.2g} % of the eigenvalues stand out from zero"
    alt = f"Histograms of the Hessian's eigenvalues along trainings; seeds: {measured.seed.nunique()}."
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
    zero = ZERO * max(map(abs, density.extremes))
    figure, (axes,) = style.canvas(height=3.4)
    _histogram(axes, _nodes(density, 1).assign(name="all"), zero, {"all": ON_CPU})
    below, above = density.mass_below(-zero), 1 - density.mass_below(zero).value
    headline = f"Of {density.size:,} eigenvalues {below.value:.2%} stand out below zero, {above:.2%} above"
    return style.finished(figure, headline, "A histogram of eigenvalues.")


def _nodes(density: SpectralDensity, trainings: int) -> pd.DataFrame:
    """Each node of a density, and for how many eigenvalues it stands in the mean over so many trainings."""
    counts = density.weights * density.size / len(density.nodes) / trainings
    return pd.DataFrame({"eigenvalue": density.nodes.ravel(), "count": counts.ravel()})


def _histogram(axes: Axes, nodes: pd.DataFrame, zero: float, tints: dict[str, str]) -> None:
    """How many eigenvalues there are in each of 70 bins, a line for each `name`."""
    axes.set_xscale("symlog", linthresh=zero)
    line: Look = {"bins": 70, "element": "step", "fill": False, "legend": len(tints) > 1, "lw": 1.1}
    sns.histplot(nodes.reset_index(), x="eigenvalue", weights="count", hue="name", palette=tints, ax=axes, **line)
    axes.axvspan(-zero, zero, color=FAINT, alpha=0.2, lw=0, label="too close to zero to tell the sign")
    axes.set(yscale="log", ylim=(0.3, None), xlabel="eigenvalue", ylabel="eigenvalues in a bin")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(style.power_of_ten)


def _measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that have numbers, with the device of each in words."""
    if not (frame["size"] > 0).any():
        raise UsageError("there is no row with numbers to draw")
    return _on_devices(frame[frame["size"] > 0])


def _on_devices(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(device=np.where(frame.setting.str.startswith("cpu"), *DEVICES))


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
    left.axhline(0, color=ON_GPU)
    left.axvline(0, color=ON_CPU)
    left.set(xlabel="along the least curvature (distance of the weights)", ylabel="along the greatest curvature")
    figure.colorbar(filled, ax=left, label="loss", format=lambda value, _: f"{value:.3g}", shrink=0.85)
    least, greatest = losses[len(across) // 2], losses[:, len(along) // 2]
    slices = (along, least, ON_GPU, "least"), (across, greatest, ON_CPU, "greatest")
    for (positions, values, tint, name), curvature in zip(slices, surface.curvatures, strict=True):
        right.plot(positions, values, color=tint, label=f"along the {name} curvature, {curvature:.2g}")
        right.plot(positions, loss + curvature * positions**2 / 2, color=tint, lw=0.9, ls="--")
    right.set_ylim(losses.min() - 0.1 * np.ptp(least), max(least.max(), greatest.max()))
    right.set(xlabel="distance of the weights from the saddle", ylabel="loss")
    for axes, height in ((left, 0), (right, loss)):
        axes.plot(0, height, "o", ms=7, color="white", mec=INK)
    alt = f"{surface}. Left, contours of the loss; right, the loss along two directions."
    return style.finished(
        figure, str(surface), alt, [style.key("of the curvature alone", color=INK, lw=0.9, ls="--")], 3
    )


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
    step. So every learning rate and every saddle has the same line, ln(r/δ) (see `gpulab.saddles.EscapeTable`). A
    cross is an escape that never came; it stands where theory expects it. Optimisers that scale their steps, such as
    Adam, have no such law, and are left out.

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
        x=(table.start / table.radius).clip(lower=1e-17),
        time=table.steps.where(table.left, table.expected) * table.expected_rate,
        kind=np.select(kinds, ["minibatches", "emulated", "pushed off"], "rounding alone"),
    )
    low = min(1e-8, shown.x.min())
    figure, (axes,) = style.canvas(height=4.4)
    axes.plot([low, 1], [np.log(1 / low), 0], color=INK, lw=1, label="theory: ln(r/δ)")
    for (kind, device, recorded), rows in shown[shown.left].groupby(["kind", "device", "recorded"]):
        marker, size = PUSHES[kind]
        look: Look = {"ms": size, "label": f"{kind}, {device}"}
        if recorded:  # a ring around what was made here
            look = {"ms": size + 3, "mfc": "none", "label": f"{kind}, {device}, recorded"}
        axes.plot(rows.x, rows.time, marker, color=DEVICES[device], **look)
    stayed = shown[~shown.left]
    axes.scatter(stayed.x, stayed.time, c=stayed.device.map(DEVICES), marker="x", label="never left: expected time")
    style.log_scale(axes.xaxis)
    axes.set(xlabel="displacement at the start, relative to the radius (δ/r)", ylabel="steps × ln(1 + ηλ)")
    alone = shown[(shown.perturbation == 0) & (shown.batch_size == 0) & np.isfinite(shown.time)]
    for name, group in alone.groupby(alone.setting.map(_arithmetic)):  # what rounded it off the saddle
        axes.annotate(name, (group.x.median(), group.time.max()), xytext=(6, 10), textcoords="offset points")
    timed = table[table.left & (table.expected > 1)]
    headline = f"{len(stayed)} never left"
    if len(timed):
        ratio = (timed.steps / timed.expected).median()
        headline = f"{len(timed)} escapes took {ratio:.2f} times what theory expects (median); {headline}"
    alt = "Escape times against the initial displacement, with the line ln(r/δ)."
    return style.finished(figure, headline, alt, columns=3)


def _arithmetic(setting: str) -> str:
    """The numbers that a setting computes with."""
    parsed = Setting.parse(setting)
    return parsed.precision or (f"{parsed.emulate or 'tf32'} products" if parsed.emulate or parsed.tf32 else "float32")


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
    paths["name"] += paths.master_weights.astype(bool).map({True: ", weights kept in float64", False: ""})
    tints = {name: tints.get(name, INK) for name in paths.name.unique()}
    escapes = paths.groupby(by).unstable
    paths["path"] = escapes.ngroup()
    smooth = escapes.transform(lambda path: path.rolling(len(path) // 20 + 1, center=True, min_periods=1).median())
    paths["shown"] = paths.unstable.where(paths.batch_size == 0, smooth).clip(lower=1e-17)
    look: Look = {"hue": "name", "palette": tints, "units": "path", "estimator": None, "alpha": 0.8}
    look |= {"size": "name", "sizes": dict(zip(tints, np.linspace(3, 1.2, len(tints)), strict=True))}  # all are seen
    look |= {"style": "name", "dashes": {name: (4, 1.5) if "emulating" in name else "" for name in tints}}
    optimizers = list(paths.optimizer.unique())
    figure, panels = style.canvas(len(optimizers), height=3.9, sharey=True)
    for axes, optimizer in zip(panels, optimizers, strict=True):
        own = paths[paths.optimizer == optimizer]
        sns.lineplot(own, x="step", y="shown", ax=axes, **look)
        axes.axhline(radius, color=FAINT, lw=0.9, label="from here on it has left")
        style.log_scale(axes.yaxis)
        rates = ", ".join(f"{rate:.3g}" for rate in own.learning_rate.unique())
        axes.set(title=f"{optimizer_words(optimizer)}, learning rate {rates}", xlabel="steps of the optimiser")
        axes.set_ylabel("displacement along the ways down" + ", running median" * bool((paths.batch_size > 0).all()))
    headline = f"{(escapes.last() > radius).sum()} of {escapes.ngroups} trainings leave the saddle"
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
    optimizers = shown.who.unique()
    tints = shown.drop_duplicates("numbers").set_index("numbers").setting.map(style.colour)
    figure, (axes,) = style.canvas(height=1.6 + 0.6 * len(optimizers))
    look: Look = {"x": "step_ratio", "y": "who", "order": optimizers, "ax": axes, "dodge": True, "jitter": False}
    look |= {"hue": "numbers", "palette": tints.to_dict(), "hue_order": tints.index}
    sns.stripplot(shown[shown.left], size=4.5, alpha=0.7, **look)
    sns.stripplot(shown[~shown.left], size=6, marker="x", linewidth=1.5, legend=False, **look)
    style.log_scale(axes.xaxis)
    axes.axvspan(axes.get_xlim()[0], 1, color=FAINT, alpha=0.2, lw=0, label="steps are rounded away")
    axes.set(xlabel="length of a step, relative to half of what separates the weights from the next numbers", ylabel="")
    right = int((shown.left == (shown.step_ratio > 1)).sum())
    headline = f"{right} of {len(shown)} trainings follow the criterion: steps above 1 leave, those below stay"
    alt = f"Steps relative to half a last place, for {', '.join(optimizers)}."
    keys = [style.key("never left", ls="", marker="x", color=INK)]
    return style.finished(figure, headline, alt, keys, columns=3)
