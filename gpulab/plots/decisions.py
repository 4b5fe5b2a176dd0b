"""What was decided: every seed and difference behind a verdict."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from gpulab.plots import style
from gpulab.plots.names import names
from gpulab.plots.style import BESIDE, FAINT, INK, Look
from gpulab.report import Picture, draw
from gpulab.stats.verdicts import Verdict

BROKEN = r"^(?=.{19})(.{1,18}[,\s])"  # where a level that is longer goes on in a second line


@draw.register
def estimation(verdict: Verdict) -> Picture:
    """An estimation plot: every seed, and beside it the paired differences.

    Left, the metric of each seed under each level, the same seed joined by a thin line; diverged runs
    are crosses at the right edge. Right, the differences from the reference in standard deviations
    between seeds (in the metric's units where there is no such spread), their mean with its
    interval, as a thicker line the one that equivalence is decided by, and the margin as a band.
    Source: Gardner, Altman 1986, *Confidence intervals rather than P values* (BMJ 292).
    """
    factor, block, table = verdict.factor, verdict.block, verdict.table
    levels = [verdict.reference, *table[factor]]
    rows = {level: row for row, level in enumerate(levels)}
    called = names(levels, factor)
    tints = style.level_colours(factor, levels)
    blocks = sorted(verdict.runs[block].unique())
    # How far from its row a seed is drawn, the same in every row.
    offsets = dict(zip(blocks, style.spread(len(blocks), 0.2), strict=True))
    dots: Look = {"s": 20 if len(blocks) <= 40 else 5, "linewidths": 1.0, "alpha": 0.9}
    figure, (left, right) = style.canvas(2, height=1.9 + 0.4 * len(levels), share_rows=True)

    runs = verdict.runs.assign(recorded=style.is_recorded(verdict.runs))
    experiments = runs.get("experiment", ())
    runs["height"] = runs[factor].map(rows) + runs[block].map(offsets)
    diverged = runs.status == "diverged"
    metric = runs[verdict.metric]
    if not diverged.all():
        low, high = metric[~diverged].min(), metric[~diverged].max()
        left.xaxis.set_major_locator(MaxNLocator(4))
        if (low, high) == (0, 1):
            left.set_xticks([0, 1])
        style.log_scale(left.xaxis, low, high, fine=30, numbers="{x:g}")
    joined = runs[~diverged].sort_values([block, "height"])
    gaps = np.flatnonzero(joined[block] != joined[block].shift())  # one line for all: of thousands, each takes its time
    line = np.insert(joined[[verdict.metric, "height"]].to_numpy(float), gaps, np.nan, axis=0)
    left.plot(*line.T, color=FAINT, lw=0.5, alpha=0.7, zorder=1)
    for (level, recorded), group in runs[~diverged].groupby([factor, "recorded"]):
        style.points(left, group[verdict.metric], group.height, tints[level], recorded, **dots)
    for level, group in runs[diverged].groupby(factor):
        edge: Look = {"marker": "x", "s": 24, "transform": left.get_yaxis_transform(), "zorder": 4}
        left.scatter(np.full(len(group), 0.97), group.height, color=tints[level], **edge)
    if diverged.any():
        left.margins(x=0.12)  # room for the crosses
    left.set_yticks(range(len(levels)), [re.sub(BROKEN, r"\1\n", words, count=1) for words in called.values()])
    left.set(ylim=(len(levels) - 0.5, -0.5), xlabel=style.metric_label(verdict.metric, experiments))

    unit = verdict.between_seeds if verdict.between_seeds > 0 else 1.0
    margin = float(table.margin.iloc[0]) if len(table) else np.nan
    right.axvline(0, color=INK, lw=0.8, zorder=1)
    hollow = dict(zip(runs[factor], runs.recorded, strict=True))
    pairs = verdict.pairs[verdict.pairs.difference.notna()]
    for row in table.to_dict("records"):
        level = row[factor]
        group, row_height = pairs[pairs[factor] == level], rows[level]
        heights = row_height - 0.08 + 0.8 * group[block].map(offsets)
        style.points(right, group.difference / unit, heights, tints[level], hollow[level], **dots)
        largest = f"largest {row['largest_difference'] / unit:.2g}" if row["largest_difference"] else "exactly the same"
        if np.isnan(row["largest_difference"]):
            largest = "no pair finished"
        right.annotate(f" {row['decision']}\n {largest}", (1.0, row_height), fontsize=7, **BESIDE)
    below = table[factor].map(rows).astype(float) + 0.33
    for low, high, width in (("low", "high", 1.0), ("equivalent_low", "equivalent_high", 3.2)):
        right.hlines(below, table[low] / unit, table[high] / unit, color=INK, lw=width, zorder=4)
    right.plot(table.difference / unit, below, ls="", marker="D", ms=4, color=INK, mec="white", mew=0.5, zorder=5)
    right.margins(x=0.08)
    bands = []
    if margin == margin:  # a margin is the message: it is seen whole, and what lies around it
        bands.append(style.margin_band(right, margin, unit, "" if unit == 1 else "sd"))
        reach = max(*np.abs(right.get_xlim()), 1.6 * margin / unit)
        right.set_xlim(-reach, reach)
    right.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    unit_name = f"sd between {block}s" if verdict.between_seeds > 0 else style.metric_label(verdict.metric, experiments)
    right.set_xlabel(f"difference ({unit_name})")
    right.tick_params(axis="y", left=False)
    right.spines["left"].set_visible(False)

    on = " on " if "machine" in runs else ""
    keys: list[Any] = [*style.origin_keys(runs, f"a {block}, made here{on}", f"a {block}, recorded{on}", ms=5)]
    if diverged.any():
        keys.append(style.key("diverged", ls="", marker="x", color=INK, ms=5))
    confidence = table.confidence.iloc[0] if len(table) else 1 - verdict.alpha
    some_intervals = bool(table.low.notna().any())  # few seeds have none
    mean = f"mean, {100 * confidence:.3g}% interval" if some_intervals else "mean; so few seeds have no interval"
    keys.append(style.key(mean, color=INK, marker="D", ms=4, lw=1.0 if some_intervals else 0))
    if table.equivalent_low.notna().any():
        inside = f"{100 * table.equivalent_confidence.iloc[0]:.3g}% interval: for equivalent, within the margin"
        keys.append(style.key(inside, color=INK, lw=3.2))
    differences = f"the differences from {called[verdict.reference]} with intervals and the margin"
    alt = f"{verdict.metric} of each {block} under {'; '.join(called.values())}; and {differences}."
    return style.finished(figure, decided(verdict), alt, [*keys, *bands])


def decided(verdict: Verdict) -> str:
    """The title: how many levels came to which decision."""
    decisions = verdict.decisions
    called = names([verdict.reference, *decisions], verdict.factor)
    reference_name = called[verdict.reference]
    if not decisions:
        return f"Only {reference_name}: nothing to compare with"
    if len(decisions) == 1:
        ((level, decision),) = decisions.items()
        return f"{called[level]}, against {reference_name}: {decision}"
    counts = verdict.table.decision.value_counts()
    return f"Against {reference_name}: " + ", ".join(f"{n} {decision}" for decision, n in counts.items())
