"""The figures of notebook 08, and its finding: scaling, an update's time, descents, and the limit of batches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from companion.findings import span
from companion.scale_out import descent_curves
from gpulab.plots.style import (
    FAINT,
    INK,
    Look,
    canvas,
    finished,
    is_recorded,
    key,
    log_scale,
    points,
    setting_line,
    stacked_shares,
)
from gpulab.report import Picture

MARKERS = {"small": "o", "quick": "s", "paper": "D"}  # of PredNet's sizes
DOES = {"compute": "#56B4E9", "wait": "#E69F00", "communicate": "#D55E00"}  # a device during an update
TINTS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # of ways to descend
PLACE = ["recorded", "machine", "setting", "size"]


def scaling_lines(frame: pd.DataFrame) -> Picture:
    """How many times as much several devices do, against the ideal line: strong scaling beside weak.

    The frame is from `companion.scaling_table` and `recorded_scale_out`.
    """
    figure, panels = canvas(2, height=4.0, share_rows=True)
    most = int(frame.devices.max())
    low = min(1.0, frame.speedup.min())
    titles = {"strong": "strong: one batch, divided", "weak": "weak: a batch for each"}
    for axes, (scaling, title) in zip(panels, titles.items(), strict=True):
        for (recorded, machine, setting, size), rows in frame[frame.scaling == scaling].groupby(PLACE, sort=False):
            where = f"{machine}{' (recorded)' if recorded else ', here'}"
            label = f"PredNet {size}, {setting}, {where}"
            setting_line(axes, rows.devices, rows.speedup, setting, label, recorded, MARKERS[size])
        axes.plot([1, most], [1, most], color=FAINT, lw=1, ls="--", zorder=1, label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = sorted({1, *frame.devices})
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_xlabel("devices")
        axes.set_title(title, fontsize=9)
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].set_ylim(0.85 * low, 1.15 * most)
    panels[0].set_ylabel("speedup over one device")
    headline = f"{most} devices do {_span(frame[frame.devices == most].speedup, '.2f')} times what one does"
    alt = f"Speedup against the number of devices, strong and weak scaling, beside the ideal line. {headline}."
    keys, _ = panels[0].get_legend_handles_labels()
    return finished(figure, headline, alt, keys, columns=1 if len(keys) < 5 else 2, size=7.5)


def update_shares(frame: pd.DataFrame) -> Picture:
    """What share of an update several devices compute, wait and communicate; of the same frame."""
    table = frame[frame.devices > 1].sort_values([*PLACE, "scaling", "devices"], kind="stable", ignore_index=True)
    where = (table.machine + ", recorded").where(table.recorded, "here")
    names = (
        table["size"] + ", " + table.scaling + ", " + table.devices.map("{} × ".format) + table.setting + ", " + where
    )
    parts = table[[*DOES]].set_axis(names)
    computing = (parts.compute / parts.sum(axis=1)).tolist()
    headline = f"Devices compute {_span(computing, '.0%')} of an update, and wait or communicate the rest"
    alt = f"Shares of computing, waiting, communicating. {headline}."
    label = "share of an update (right: a whole one, unobserved)"
    return stacked_shares(parts, table.seconds, DOES, label, headline, alt)


def descent_losses(histories: pd.DataFrame) -> Picture:
    """The loss per update and per second of each way in `descent_runs`: a thin line a seed, a thick one their mean."""
    figure, panels = canvas(2, height=3.6, share_rows=True)
    tints = dict(zip(dict.fromkeys(histories.way), TINTS, strict=False))
    mean = descent_curves(histories)
    curves: list[tuple[pd.DataFrame, Look]] = [
        (descent_curves(rows), {"lw": 0.5, "alpha": 0.4}) for _, rows in histories.groupby("seed")
    ]
    for axes, column in zip(panels, ("step", "seconds"), strict=True):
        for curve, look in [*curves, (mean, {"lw": 1.8})]:
            for way, rows in curve.groupby("way"):
                axes.plot(rows[column], rows.loss, color=tints[way], **look)
        axes.set(xlabel="updates of all workers" if column == "step" else "seconds", xlim=(0, None))
    panels[0].set_ylabel("loss of a batch (mean squared error)")
    log_scale(panels[0].yaxis, mean.loss.min(), mean.loss.max())
    seconds = histories.groupby(["way", "seed"]).seconds.max().groupby("way").mean()
    first = f"{seconds.idxmin()} is done first, in {seconds.min():.2g} s"
    headline = f"As many updates: {first}, the last in {seconds.max():.2g} s"
    alt = f"Loss per update and per second of {', '.join(tints)} gradient descent. {headline}."
    return finished(figure, headline, alt, [key(way, color=tint, lw=1.8) for way, tint in tints.items()], 3)


def batch_law(table: pd.DataFrame, found: pd.DataFrame) -> Picture:
    """Updates to a target against the batch size, and what they cost in examples, with the law and the noise scale.

    The frames are those from `companion.large_batches`.
    """
    figure, panels = canvas(2, height=3.8)
    sizes = np.geomspace(table.batch_size.min(), table.batch_size.max(), 100)
    middle = found.median()
    marks = {
        "noise at first": (middle.noise_begin, ":"),
        "noise at the target": (middle.noise_target, "--"),
        "critical batch": (middle.critical_batch, "-"),
    }
    for axes, column, tint in zip(panels, ("steps", "examples"), ("#0072B2", "#D55E00"), strict=True):
        for row in found.itertuples():
            steps = row.least_steps * (1 + row.critical_batch / sizes)
            axes.plot(sizes, steps if column == "steps" else steps * sizes, color=tint, lw=1.2)
        points(axes, table.batch_size, table[column], tint)
        for size, style in marks.values():
            if np.isfinite(size):
                axes.axvline(size, color=INK, lw=0.9, ls=style, zorder=1)
        axes.set(xscale="log", yscale="log", xlabel="batch size")
        axes.set_ylabel(f"{'updates' if column == 'steps' else column} to the target")
        axes.xaxis.set_major_formatter("{x:,g}")
        log_scale(axes.yaxis, table[column].min(), table[column].max())
    panels[0].axhline(middle.least_steps, color=FAINT, lw=0.9, ls=":")
    fewest = f"fewest: {middle.least_steps:.0f}"
    panels[0].annotate(fewest, (sizes[0], middle.least_steps), va="bottom", fontsize=8, color=INK)
    seen = {
        name: (f"{size:,.0f}" if np.isfinite(size) else "none seen", style) for name, (size, style) in marks.items()
    }
    keys = [key(f"{name}: {size}", color=INK, ls=style, lw=0.9) for name, (size, style) in seen.items()]
    critical = middle.critical_batch
    headline = f"A batch of {critical:.0f} takes twice the fewest updates, and twice the fewest examples"
    alt = f"Updates and examples to a target loss against the batch size, with the fitted law. {headline}."
    return finished(figure, headline, alt, keys, 3)


def scale_finding(ends: pd.DataFrame, scaling: pd.DataFrame, summaries: pd.DataFrame, found: pd.DataFrame) -> str:
    """What was measured here, then what was recorded, in sentences.

    From `same_end`, `scaling_table` and `recorded_scale_out`, the summaries of `descent_runs`, and the second frame of
    `large_batches`.
    """
    apart = ends.groupby("precision").weights.max()
    lines = [
        f"Training on {span(ends.devices)} devices ends where it does on one: no weight is off by more than "
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


def _span(values: Iterable[float], form: str) -> str:
    """The least to the most, or the one that there is."""
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
