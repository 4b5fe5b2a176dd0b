"""The figures of notebook 08, and its finding: scaling, an update's time, descents, and the limit of batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from gpulab.companion.scale_out import descent_curves
from gpulab.plots.style import (
    FAINT,
    INK,
    canvas,
    colour,
    finished,
    is_recorded,
    key,
    log_scale,
    points,
    stacked_shares,
)
from gpulab.report import Picture

MARKERS = {"small": "o", "quick": "s", "paper": "D"}  # of PredNet's sizes
DOES = {"compute": "#56B4E9", "wait": "#E69F00", "communicate": "#D55E00"}  # a device during an update
TINTS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # of ways to descend
PLACE = ["recorded", "machine", "setting", "size"]


def scaling_lines(frame: pd.DataFrame) -> Picture:
    """How many times as much several devices do, against the ideal line: strong scaling beside weak.

    Args:
        frame: From `gpulab.companion.scaling_table` and `recorded_scale_out`.
    """
    figure, panels = canvas(2, height=4.0, share_rows=True)
    most, keys = int(frame.devices.max()), {}
    titles = {"strong": "strong: one batch, divided", "weak": "weak: a batch for each"}
    for axes, (scaling, title) in zip(panels, titles.items(), strict=True):
        axes.plot([1, most], [1, most], color=FAINT, lw=1, ls="--", zorder=1)
        for (recorded, machine, setting, size), rows in frame[frame.scaling == scaling].groupby(PLACE, sort=False):
            look: dict[str, Any] = {"marker": MARKERS[size], "hollow": recorded}
            axes.plot(rows.devices, rows.speedup, color=colour(setting), lw=1.2)
            points(axes, rows.devices, rows.speedup, colour(setting), **look)
            where = f"{machine}{' (recorded)' if recorded else ', here'}"
            face = "white" if recorded else colour(setting)
            keys[recorded, machine, setting, size] = key(
                f"PredNet {size}, {setting}, {where}", color=colour(setting), marker=MARKERS[size], mfc=face, lw=1.2
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = sorted({1, *frame.devices})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("devices")
        axes.set_title(title, fontsize=9)
    low = min(1.0, frame.speedup.min())
    ticks = [2.0**power for power in range(int(np.floor(np.log2(low))), int(np.ceil(np.log2(most))) + 1)]
    panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0].set_ylim(0.85 * low, 1.15 * most)
    panels[0].set_ylabel("speedup over one device")
    last = frame[frame.devices == most].speedup
    headline = f"{most} devices do {_span(last, '.2f')} times what one does"
    alt = f"Speedup against the number of devices, strong and weak scaling, beside the ideal line. {headline}."
    ideal = key("ideal", color=FAINT, ls="--", lw=1)
    return finished(figure, headline, alt, [*keys.values(), ideal], columns=1 if len(keys) < 4 else 2, size=7.5)


def update_shares(frame: pd.DataFrame) -> Picture:
    """What share of an update several devices compute, wait and communicate.

    Args:
        frame: From `gpulab.companion.scaling_table` and `recorded_scale_out`.
    """
    table = frame[frame.devices > 1].sort_values([*PLACE, "scaling", "devices"], kind="stable", ignore_index=True)
    names = []
    for row in table.itertuples():
        where = f"{row.machine}, recorded" if row.recorded else "here"
        names.append(f"{row.size}, {row.scaling}, {row.devices} × {row.setting}, {where}")
    parts = table[[*DOES]].set_axis(names)
    computing = (parts.compute / parts.sum(axis=1)).tolist()
    headline = f"Devices compute {_span(computing, '.0%')} of an update, and wait or communicate the rest"
    alt = f"Shares of computing, waiting, communicating. {headline}."
    label = "share of an update (right: a whole one, unobserved)"
    return stacked_shares(parts, table.seconds, DOES, label, headline, alt)


def descent_losses(histories: pd.DataFrame) -> Picture:
    """The loss per update and per second of each way to descend: a thin line a seed, a thick one their mean.

    Args:
        histories: The second frame from `gpulab.companion.descent_runs`.
    """
    figure, panels = canvas(2, height=3.6, share_rows=True)
    ways = list(dict.fromkeys(histories.way))
    tints = dict(zip(ways, itertools.cycle(TINTS), strict=False))
    curves = {seed: descent_curves(rows) for seed, rows in histories.groupby("seed")}
    mean = descent_curves(histories)
    for axes, (column, label) in zip(
        panels, {"step": "updates of all workers", "seconds": "seconds"}.items(), strict=True
    ):
        for way in ways:
            for curve in curves.values():
                one = curve[curve.way == way]
                axes.plot(one[column], one.loss, color=tints[way], lw=0.5, alpha=0.4)
            middle = mean[mean.way == way]
            axes.plot(middle[column], middle.loss, color=tints[way], lw=1.8)
        axes.set_xlabel(label)
        axes.set_xlim(0)
    panels[0].set_ylabel("loss of a batch (mean squared error)")
    log_scale(panels[0].yaxis, mean.loss.min(), mean.loss.max())
    seconds = histories.groupby(["way", "seed"]).seconds.max().groupby("way").mean()
    fastest = seconds.idxmin()
    headline = f"As many updates: {fastest} is done first, in {seconds.min():.2g} s, the last in {seconds.max():.2g} s"
    alt = f"Loss per update and per second of {', '.join(ways)} gradient descent. {headline}."
    return finished(figure, headline, alt, [key(way, color=tints[way], lw=1.8) for way in ways], 3)


def batch_law(table: pd.DataFrame, found: pd.DataFrame) -> Picture:
    """Updates to a target against the batch size, and what they cost in examples, with the law and the noise scale.

    Args:
        table: The first frame from `gpulab.companion.large_batches`.
        found: The second.
    """
    figure, (left, right) = canvas(2, height=3.8)
    sizes = np.geomspace(table.batch_size.min(), table.batch_size.max(), 100)
    law, work = "#0072B2", "#D55E00"
    for row in found.itertuples():
        steps = row.least_steps * (1 + row.critical_batch / sizes)
        left.plot(sizes, steps, color=law, lw=1.2)
        right.plot(sizes, steps * sizes, color=work, lw=1.2)
    points(left, table.batch_size, table.steps, law)
    points(right, table.batch_size, table.examples, work)
    critical, least = found.critical_batch.median(), found.least_steps.median()
    left.axhline(least, color=FAINT, lw=0.9, ls=":")
    left.annotate(f"fewest: {least:.0f}", (sizes[0], least), va="bottom", fontsize=8, color=INK)
    marks = {"noise at the target": found.noise_target.median(), "critical batch": critical}
    marks = {"noise at first": found.noise_begin.median()} | marks
    for axes in (left, right):
        for style, size in zip((":", "--", "-"), marks.values(), strict=True):
            if np.isfinite(size):
                axes.axvline(size, color=INK, lw=0.9, ls=style, zorder=1)
        axes.set(xscale="log", yscale="log", xlabel="batch size")
        axes.xaxis.set_major_formatter("{x:,g}")
    log_scale(left.yaxis, *table.steps.agg(["min", "max"]))
    log_scale(right.yaxis, *table.examples.agg(["min", "max"]))
    left.set_ylabel("updates to the target")
    right.set_ylabel("examples to the target")
    keys = [
        key(f"{name}: {size:,.0f}" if np.isfinite(size) else f"{name}: none seen", color=INK, ls=style, lw=0.9)
        for style, (name, size) in zip((":", "--", "-"), marks.items(), strict=True)
    ]
    headline = f"A batch of {critical:.0f} takes twice the fewest updates, and twice the fewest examples"
    alt = f"Updates and examples to a target loss against the batch size, with the fitted law. {headline}."
    return finished(figure, headline, alt, keys, 3)


def scale_finding(ends: pd.DataFrame, scaling: pd.DataFrame, summaries: pd.DataFrame, found: pd.DataFrame) -> str:
    """What was measured here, then what was recorded, in sentences.

    Args:
        ends: From `gpulab.companion.same_end`.
        scaling: From `scaling_table` and `recorded_scale_out`.
        summaries: The first frame from `descent_runs`.
        found: The second frame from `large_batches`.
    """
    apart = ends.groupby("precision").weights.max()
    lines = [
        f"Training on {_span(ends.devices, 'd')} devices ends where it does on one: no weight is off by more than "
        f"{apart.float32:.1e} in float32 and {apart.float64:.1e} in float64."
    ]
    recorded = is_recorded(scaling)
    lines += [f"Here, {line}" for line in _scaling_sentences(scaling[~recorded])]
    mean = summaries.groupby("way")[["updates_per_second", "staleness", "lost_share", "lost"]].mean()
    for way in mean.index.drop("synchronous"):
        row, usual = mean.loc[way], mean.loc["synchronous"]
        lines.append(
            f"Descent {way}: {row.updates_per_second / usual.updates_per_second:.2f} times the synchronous updates a "
            f"second; a gradient is {row.staleness:.2f} updates old when it is applied, and of a weight's updates "
            f"{row.lost_share:.1%} are overwritten by another worker's."
        )
    middle = found.median()
    lines.append(
        f"A batch of {middle.critical_batch:.0f} images takes twice the fewest updates ({middle.least_steps:.0f}) "
        f"by the law, which misses a measured number by up to {found.law_off.max():.0%}; "
        f"the gradient's noise scale is {middle.noise_begin:.0f} at first, and {middle.noise_target:.0f} at the target."
    )
    for (machine, setting), rows in scaling[recorded].groupby(["machine", "setting"], sort=False):
        lines += [f"Recorded on {machine}, {setting}: {line}" for line in _scaling_sentences(rows)]
    return "\n".join(lines)


def _scaling_sentences(scaling: pd.DataFrame) -> list[str]:
    """What the most devices bring, a sentence a size."""
    lines = []
    for size, rows in scaling.groupby("size", sort=False):
        last = rows[rows.devices == rows.devices.max()].set_index("scaling")
        strong, weak = last.loc["strong"], last.loc["weak"]
        total = strong[[*DOES]].sum()
        lines.append(
            f"{strong.devices} devices train a {size} PredNet on {strong.speedup:.2f} times the frames a second of one "
            f"where they divide a batch of {strong.batch}, {weak.speedup:.2f} times where each has as large a batch. "
            f"Of an update of a divided batch {strong.wait / total:.0%} is waiting and "
            f"{strong.communicate / total:.0%} communication."
        )
    return lines


def _span(values: Any, form: str) -> str:
    """The least to the most, or the one that there is."""
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
