"""The way out of a saddle: against the law, as training goes on, and which optimiser finds it in which arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpulab.errors import UsageError
from gpulab.plots import style
from gpulab.plots.names import optimizer_words
from gpulab.plots.style import BESIDE, FAINT, INK, ON_CPU, ON_GPU, Look
from gpulab.report import Picture, draw
from gpulab.saddles.escapes import EscapeTable
from gpulab.settings import Setting

FLOOR = 1e-17  # displacements that a logarithmic axis can do without
CROSS: Look = {"ls": "", "marker": "x", "ms": 6, "mew": 1.6, "color": INK}  # of one that never left
MASTER = "-."  # the line of weights that are kept in float64


@draw.register
def _(escapes: EscapeTable) -> Picture:
    if escapes.table.expected_rate.isna().all():  # no law to draw
        return escape_paths(escapes.paths, escapes.table.radius.iloc[0])
    return escape_law(escapes.table)


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
    on_cpu = table.setting.str.startswith("cpu")
    shown = table.assign(
        x=(table.start / table.radius).clip(lower=FLOOR),
        time=table.steps.where(table.left, table.expected) * table.expected_rate,
        tint=on_cpu.map({True: ON_CPU, False: ON_GPU}),
    )
    low, high = min(1e-8, shown.x.min() / 5), 3.0
    figure, (axes,) = style.canvas(1, height=4.2)
    axes.plot([low, 1], [np.log(1 / low), 0], color=INK, lw=1, zorder=1)
    axes.annotate("theory: ln(r/δ)  ", (low**0.7, np.log(low**-0.7)), ha="right", va="top", fontsize=8)
    for row in shown[shown.left].itertuples():
        marker = "s" if row.batch_size else "^" if row.emulated else "o"
        size = (16 if row.perturbation else 46) + 40 * row.recorded  # a ring around what was made here
        look: Look = {"color": "none" if row.recorded else row.tint, "linewidths": 1.1}
        style.points(axes, row.x, row.time, row.tint, marker=marker, s=size, **look)
    for row in shown[~shown.left].itertuples():
        size = 5 if row.perturbation else 8
        axes.plot(row.x, row.time, marker="x", ms=size, mew=size / 4.5, color=row.tint, zorder=4)
    style.decades(axes.xaxis)
    axes.set(xlim=(low, high), xlabel="displacement at the start, relative to the radius (δ/r)")
    axes.set(ylim=(-1, np.log(1 / low) * 1.05), ylabel="steps until it left × ln(1 + ηλ)")
    alone = shown[(shown.perturbation == 0) & (shown.batch_size == 0) & np.isfinite(shown.time)]
    parsed = map(Setting.parse, alone.setting)
    numbers = [
        parsed_setting.precision or parsed_setting.emulate or ("tf32" if parsed_setting.tf32 else "float32")
        for parsed_setting in parsed
    ]
    for name, group in alone.groupby(numbers):  # which arithmetic rounded it off the saddle
        above = (group.x.median(), group.time.quantile(0.9))
        axes.annotate(name, above, xytext=(6, 10), textcoords="offset points", fontsize=8, zorder=5)
    pushed = ~table.emulated.astype(bool) & (table.batch_size == 0) & (table.perturbation > 0)
    dot: Look = {"ls": "", "marker": "o", "ms": 6}
    marks = (
        (on_cpu.any(), style.key("on a CPU", color=ON_CPU, **dot)),
        (not on_cpu.all(), style.key("on a GPU", color=ON_GPU, **dot)),
        (pushed.any(), style.point_key("pushed off (small)", ms=4)),
        (table.emulated.any(), style.point_key("emulated", marker="^", ms=5.5)),
        ((table.batch_size > 0).any(), style.point_key("minibatches", marker="s", ms=5.5)),
        (not table.left.all(), style.key("never left, at its expected time", **(CROSS | {"ms": 7}))),
    )
    keys = [mark for drawn, mark in marks if drawn]
    keys += style.origin_keys(table[table.recorded.astype(bool)], ms=5.5)
    timed = table[table.left & (table.expected > 1)]
    ratio = (timed.steps / timed.expected).median()
    words = [f"{len(timed)} escapes took {ratio:.2f} times what theory expects (median)"] if len(timed) else []
    if not table.left.all():
        words.append(f"{int((~table.left).sum())} never left")
    alt = "Escape times against the initial displacement, with the line ln(r/δ)."
    return style.finished(figure, "; ".join(words), alt, keys, columns=3, size=7.5)


def escape_paths(paths: pd.DataFrame, radius: float) -> Picture:
    """Draw the way out of the saddle, step by step: a line for each escape, a panel for each optimiser.

    Upwards is the displacement along the directions that lead down; its logarithm grows by ln(1 + ηλ) in a step of
    gradient descent. Lines are dashed where the arithmetic is emulated, dashed and dotted where the weights are kept in
    float64. Those of minibatches show the running median, and are dotted where whole batches are drawn beside them.

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
    settings = list(paths.setting.unique())
    batches, master = paths.batch_size > 0, paths.master_weights.astype(bool)
    batch_line = "-" if batches.all() else ":"
    figure, panels = _panel_each(paths.optimizer.unique(), "displacement along the ways down")
    by = ["optimizer", "setting", "master_weights", "batch_size", "learning_rate", "perturbation", "seed"]
    escapes = paths.groupby(by, sort=False)
    for (optimizer, setting, master_weights, batch_size, *_), path in escapes:
        path = path[path.unstable > FLOOR]
        height, width, line = path.unstable, 1.2, MASTER if master_weights else style.dashes(setting)
        if batch_size:
            height = height.rolling(len(path) // 40 + 1, center=True, min_periods=1).median()
            width, line = 4.5 / (1 + settings.index(setting)), batch_line
        panels[optimizer].plot(path.step, height, color=style.colour(setting), lw=width, ls=line, alpha=0.9)
    for optimizer, axes in panels.items():
        rates = ", ".join(f"{rate:.3g}" for rate in paths.learning_rate[paths.optimizer == optimizer].unique())
        axes.axhline(radius, color=FAINT, lw=0.9)
        style.decades(axes.yaxis)
        axes.set(title=f"{optimizer_words(optimizer)}, learning rate {rates}", xlabel="steps of the optimiser")
    [*panels.values()][:2][-1].annotate(" left", (1, radius), fontsize=8, **BESIDE)
    left_count = (escapes.tail(1).unstable > radius).sum()
    headline = f"{left_count} of {escapes.ngroups} trainings leave the saddle"
    look: Look = {"ls": "-"} if batches.all() else {}
    keys = style.setting_keys(paths, **look)
    if batches.any():
        keys.append(style.key("minibatches, running median", color=INK, ls=batch_line))
    if master.any():
        keys.append(style.key("weights kept in float64", color=INK, ls=MASTER))
    return style.finished(figure, headline, f"Displacement against steps, logarithmic: {headline}.", keys)


def escape_phases(table: pd.DataFrame) -> Picture:
    """Draw which optimiser leaves a saddle in which arithmetic at which learning rate, and what should decide it.

    There is a panel for each optimiser. Upwards is the length of the step that it settles to at the saddle, relative to
    half of what separates the weights from the next numbers of their format. Below the line at 1, steps are rounded
    away. A training that left is a point in the colour and shape of its setting, one that never did a cross. Lines join
    the medians at each learning rate; they are dashed where the arithmetic is emulated.

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
        Steps relative to half a last place against the learning rate
    """
    alone = (table.batch_size == 0) & (table.perturbation == 0) & ~table.master_weights.astype(bool)
    shown = table[alone & (table.step_ratio > 0)]
    if shown.empty:
        raise UsageError("no training without a push, without minibatches and with a measured step_ratio to draw")
    figure, panels = _panel_each(shown.optimizer.unique(), "step / half a last place")
    low, high = shown.step_ratio.min() / 4, shown.step_ratio.max() * 4
    for optimizer, axes in panels.items():
        own = shown[shown.optimizer == optimizer]
        axes.axhspan(low, 1, color=FAINT, alpha=0.2, lw=0, zorder=0)
        axes.axhline(1, color=INK, lw=1)
        for setting, of_setting in own.groupby("setting", sort=False):
            tint = style.colour(setting)
            middle = of_setting.groupby("learning_rate").step_ratio.median()
            axes.plot(middle.index, middle, color=tint, lw=0.9, ls=style.dashes(setting), zorder=2)
            out, stay = of_setting[of_setting.left], of_setting[~of_setting.left]
            for hollow in (True, False):  # a ring around what was made here
                group, size = out[style.is_recorded(out) == hollow], 46 if hollow else 14
                look: Look = {"marker": style.shape(setting), "s": size}
                style.points(axes, group.learning_rate, group.step_ratio, tint, hollow, **look)
            axes.scatter(stay.learning_rate, stay.step_ratio, marker="x", s=38, linewidths=1.6, color=tint, zorder=4)
        style.decades(axes.yaxis, 6)
        style.decades(axes.xaxis, 6)
        rates = own.learning_rate
        axes.set(xlim=(rates.min() / 4, rates.max() * 4), ylim=(min(low, 0.1), max(high, 10)))
        axes.set(title=optimizer_words(optimizer), xlabel="learning rate")
    below: Look = BESIDE | {"ha": "right", "va": "top", "fontsize": 7.5}
    next(iter(panels.values())).annotate("rounded away", (0.98, 1 / 1.3), **below)
    right = int((shown.left == (shown.step_ratio > 1)).sum())
    headline = f"{right} of {len(shown)} trainings follow the criterion: steps above the line leave, those below stay"
    keys = [*style.setting_keys(shown, shapes=True, ms=5), *style.origin_keys(shown, ms=5.5)]
    if not shown.left.all():
        keys.append(style.key("never left", **CROSS))
    alt = f"Steps relative to half a last place against the learning rate, for {', '.join(panels)}."
    return style.finished(figure, headline, alt, keys, size=7.5)


def _panel_each(optimizers: Iterable[str], label: str) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each optimiser, in two columns."""
    names = list(optimizers)
    rows = math.ceil(len(names) / 2)
    figure, panels = style.canvas(min(2, len(names)), height=1.3 + 2.6 * rows, share_rows=True, rows=rows)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    for axes in panels[::2]:
        axes.set_ylabel(label)
    return figure, dict(zip(names, panels, strict=False))
