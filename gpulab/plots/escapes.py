"""The way out of a saddle: against the law, as training goes on, and which optimiser finds it in which arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from gpulab.errors import UsageError
from gpulab.plots.style import (
    BESIDE,
    FAINT,
    INK,
    ON_CPU,
    ON_GPU,
    Look,
    canvas,
    colour,
    dashes,
    decades,
    finished,
    is_recorded,
    key,
    number_format,
    origin_keys,
    point_key,
    points,
    setting_keys,
    shape,
)
from gpulab.report import Picture, draw
from gpulab.saddles.escapes import EscapeTable

FLOOR = 1e-17  # displacements that a logarithmic axis can do without
BELOW: Look = {"ha": "right", "va": "top", "fontsize": 7.5}
MASTER = "-."  # the line of weights that are kept in float64


@draw.register
def _(escapes: EscapeTable) -> Picture:
    if escapes.table.expected_rate.isna().all():  # no law to draw
        return escape_paths(escapes.paths, escapes.table.radius.iloc[0])
    return escape_law(escapes.table)


def escape_law(table: pd.DataFrame) -> Picture:
    """How long each escape took against the displacement it began with.

    Steps are counted in units of 1/ln(1 + ηλ), or of 1/ln ρ with momentum, so that every learning rate and every
    saddle has the same line, ln(r/δ). A cross never left, and stands where theory expects it to have done so.
    Optimisers that scale their steps have no such law, and are left out.

    Args:
        table: The `table` of `gpulab.saddles.escape_table`, or `gpulab.saddles.recorded_escapes`.

    Raises:
        UsageError: Where no escape has that law.
    """
    table = table[table.expected_rate.notna()]
    if table.empty:
        raise UsageError("no escape by sgd or momentum, the only ones with a law to draw: see plots.escape_phases")
    shown = table.assign(
        x=(table.start / table.radius).clip(lower=FLOOR),
        time=table.steps.where(table.left, table.expected) * table.expected_rate,
        tint=table.setting.map(lambda setting: ON_CPU if setting.startswith("cpu") else ON_GPU),
    )
    low, high = min(1e-8, shown.x.min() / 5), 3.0
    line = np.geomspace(low, 1, 50)
    figure, (axes,) = canvas(1, height=4.2)
    axes.plot(line, np.log(1 / line), color=INK, lw=1, zorder=1)
    axes.annotate("theory: ln(r/δ)  ", (low**0.7, np.log(low**-0.7)), ha="right", va="top", fontsize=8)
    for row in shown[shown.left].itertuples():
        marker = "s" if row.batch_size else "^" if row.emulated else "o"
        size = (16 if row.perturbation else 46) + 40 * row.recorded  # a ring around what was made here
        look: Look = {"color": "none" if row.recorded else row.tint, "linewidths": 1.1}
        points(axes, row.x, row.time, row.tint, marker=marker, s=size, **look)
    for row in shown[~shown.left].itertuples():
        size = 5 if row.perturbation else 8
        axes.plot(row.x, row.time, marker="x", ms=size, mew=size / 4.5, color=row.tint, zorder=4)
    decades(axes.xaxis)
    axes.set(xlim=(low, high), ylim=(-1, np.log(1 / low) * 1.05))
    axes.set(xlabel="displacement at the start, relative to the radius (δ/r)")
    axes.set(ylabel="steps until it left × ln(1 + ηλ)")
    alone = shown[(shown.perturbation == 0) & (shown.batch_size == 0) & np.isfinite(shown.time)]
    for name, some in alone.groupby(alone.setting.map(number_format)):  # which arithmetic rounded it off the saddle
        above = (some.x.median(), some.time.quantile(0.9))
        axes.annotate(name, above, xytext=(6, 10), textcoords="offset points", fontsize=8, zorder=5)
    pushed = ~table.emulated.astype(bool) & (table.batch_size == 0) & (table.perturbation > 0)
    machines = ", ".join(sorted(set(table.machine[table.recorded.astype(bool)])))
    cross = key("never left, at its expected time", ls="", marker="x", ms=7, mew=1.6, color=INK)
    marks = (
        ((shown.tint == ON_CPU).any(), key("on a CPU", ls="", marker="o", ms=6, color=ON_CPU)),
        ((shown.tint == ON_GPU).any(), key("on a GPU", ls="", marker="o", ms=6, color=ON_GPU)),
        (pushed.any(), point_key("pushed off (small)", ms=4)),
        (table.emulated.any(), point_key("emulated", marker="^", ms=5.5)),
        ((table.batch_size > 0).any(), point_key("minibatches", marker="s", ms=5.5)),
        (not table.left.all(), cross),
        (table.recorded.any(), point_key(f"recorded on {machines}", hollow=True, ms=5.5)),
    )
    keys = [mark for drawn, mark in marks if drawn]
    timed = table[table.left & (table.expected > 1)]
    ratio = (timed.steps / timed.expected).median()
    words = [f"{len(timed)} escapes took {ratio:.2f} times what theory expects (median)"] if len(timed) else []
    if not table.left.all():
        words.append(f"{int((~table.left).sum())} never left")
    headline = "; ".join(words)
    alt = f"Escape times against the initial displacement, with the line ln(r/δ). {headline}."
    return finished(figure, headline, alt, keys, columns=3, size=7.5)


def escape_paths(paths: pd.DataFrame, radius: float | None = None) -> Picture:
    """The way out of the saddle as training goes on, a line for each escape and a panel for each optimiser.

    Drawn is the displacement along the directions that lead down, whose logarithm grows by ln(1 + ηλ) a step of
    gradient descent. Dashed where the arithmetic is emulated, dotted (their running median) for minibatches beside
    others, dashed and dotted where the weights are kept in float64.

    Args:
        paths: The `paths` of `gpulab.saddles.escape_table`.
        radius: The distance at which a network has left, as a line.
    """
    settings, optimizers = list(paths.setting.unique()), list(paths.optimizer.unique())
    batches, master = paths.batch_size > 0, paths.master_weights.astype(bool)
    batch_line = "-" if batches.all() else ":"
    rows = math.ceil(len(optimizers) / 2)
    figure, panels = canvas(min(2, len(optimizers)), height=1.2 + 2.7 * rows, share_rows=True, rows=rows)
    ends = []
    for (optimizer, rate, setting, kept, batch_size, _, _), path in paths.groupby(
        ["optimizer", "learning_rate", "setting", "master_weights", "batch_size", "perturbation", "seed"], sort=False
    ):
        axes = panels[optimizers.index(optimizer)]
        axes.set_title(f"{optimizer}, learning rate {rate:.3g}" if len(optimizers) > 1 else "", fontsize=9)
        ends.append((path.unstable.iloc[0], path.unstable.iloc[-1]))
        path = path[path.unstable > FLOOR]
        height, width, line = path.unstable, 1.2, MASTER if kept else dashes(setting)
        if batch_size:
            height = height.rolling(len(path) // 40 + 1, center=True, min_periods=1).median()
            width, line = 4.5 / (1 + settings.index(setting)), batch_line
        axes.plot(path.step, height, color=colour(setting), lw=width, ls=line, alpha=0.9)
    for axes in panels[: len(optimizers)]:
        if radius:
            axes.axhline(radius, color=FAINT, lw=0.9)
        decades(axes.yaxis)
        axes.set(xlabel="steps" if len(optimizers) > 1 else "steps of the optimiser")
    if radius:
        panels[min(2, len(optimizers)) - 1].annotate(" left", (1, radius), fontsize=8, **BESIDE)
    for axes in panels[:: min(2, len(optimizers))]:
        axes.set_ylabel("displacement along the ways down", fontsize=9)
    left = sum(last > (radius or 10 * max(first, FLOOR)) for first, last in ends)
    headline = f"{left} of {len(ends)} trainings leave the saddle"
    look: Look = {"ls": "-"} if batches.all() else {}
    keys = setting_keys(paths, **look)
    for mark in keys:
        if mark.get_linestyle() == "--":
            mark.set_label(f"{mark.get_label()} (emulated)")
    if batches.any():
        keys.append(key("minibatches, running median", color=INK, ls=batch_line))
    if master.any():
        keys.append(key("weights kept in float64", color=INK, ls=MASTER))
    return finished(figure, headline, f"Displacement against steps, logarithmic: {headline}.", keys)


def escape_phases(table: pd.DataFrame) -> Picture:
    """Which optimiser leaves in which arithmetic at which learning rate, and the criterion that should decide it.

    A panel for each optimiser. Upwards, the length of the step that it settles to at the saddle, relative to half of
    what separates the weights from the next numbers of their format: below the line, steps are rounded away. A disc
    left, a cross never did; lines join learning rates, dashed where the arithmetic is emulated.

    Args:
        table: The `table` of `gpulab.saddles.escape_table`, or `gpulab.saddles.recorded_escapes`; only those that
            nothing pushed, no minibatch either, and whose step was measured.

    Raises:
        UsageError: Where there is none.
    """
    alone = (table.batch_size == 0) & (table.perturbation == 0) & ~table.master_weights.astype(bool)
    shown = table[alone & (table.step_ratio > 0)]
    if shown.empty:
        raise UsageError("no training without a push, without minibatches and with a measured step_ratio to draw")
    optimizers = list(shown.optimizer.unique())
    rows = math.ceil(len(optimizers) / 2)
    figure, panels = canvas(min(2, len(optimizers)), height=1.3 + 2.5 * rows, share_rows=True, rows=rows)
    low, high = shown.step_ratio.min() / 4, shown.step_ratio.max() * 4
    for axes, optimizer in zip(panels, optimizers, strict=False):
        own = shown[shown.optimizer == optimizer]
        axes.axhspan(low, 1, color=FAINT, alpha=0.2, lw=0, zorder=0)
        axes.axhline(1, color=INK, lw=1)
        for setting, part in own.groupby("setting", sort=False):
            tint = colour(setting)
            middle = part.groupby("learning_rate").step_ratio.median()
            axes.plot(middle.index, middle, color=tint, lw=0.9, ls=dashes(setting), zorder=2)
            out = part[part.left]
            for hollow in (True, False):  # a ring around what was made here
                group, size = out[is_recorded(out) == hollow], 46 if hollow else 14
                points(axes, group.learning_rate, group.step_ratio, tint, hollow, marker=shape(setting), s=size)
            stay = part[~part.left]
            axes.scatter(stay.learning_rate, stay.step_ratio, marker="x", s=38, linewidths=1.6, color=tint, zorder=4)
        decades(axes.yaxis, 6)
        decades(axes.xaxis, 6)
        rates = own.learning_rate
        axes.set(xlim=(rates.min() / 4, rates.max() * 4), ylim=(min(low, 0.1), max(high, 10)))
        axes.set_title(optimizer, fontsize=9)
        axes.set_xlabel("learning rate", fontsize=8)
    for axes in panels[:: min(2, len(optimizers))]:
        axes.set_ylabel("step / half a last place", fontsize=8)
    for axes in panels[len(optimizers) :]:
        axes.set_axis_off()
    panels[0].text(0.98, 1 / 1.3, "rounded away", transform=panels[0].get_yaxis_transform(), **BELOW)
    right = int((shown.left == (shown.step_ratio > 1)).sum())
    headline = f"{right} of {len(shown)} trainings follow the criterion: steps above the line leave, those below stay"
    keys = [*setting_keys(shown, shapes=True, ms=5), *origin_keys(shown, ms=5.5)]
    if not shown.left.all():
        keys.append(key("never left", ls="", marker="x", ms=6, mew=1.6, color=INK))
    alt = f"Steps relative to half a last place against the learning rate, for {', '.join(optimizers)}. {headline}."
    return finished(figure, headline, alt, keys, size=7.5)
