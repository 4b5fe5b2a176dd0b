"""What was decided: every seed and difference behind a verdict, and what a search for the smallest change tried."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from gpulab.plots import style
from gpulab.plots.names import names
from gpulab.plots.style import BESIDE, FAINT, INK, Look
from gpulab.report import Picture, draw
from gpulab.search.reproduction import Reproduction
from gpulab.search.trials import WITHIN
from gpulab.stats.verdicts import Verdict

GREEN, RED = "#117733", "#CC3311"  # of no setting: colours here say how a change was judged
BROKEN = r"^(?=.{19})(.{1,18}[,\s])"  # where a level that is longer goes on in a second line
ROWS = 24  # of a search, more than which nobody reads
FAR = 12  # margins
LOOKS: dict[str, tuple[str, str, float]] = {  # of a trial: colour, marker, size
    "confirmed on fresh seeds": (GREEN, "*", 190),
    "equivalent, not confirmed": (GREEN, "o", 42),
    "inconclusive": (FAINT, "s", 30),
    "different": (RED, "D", 30),
    "pruned": (RED, "v", 24),
    "diverged": (RED, "x", 40),
    "failed": (INK, "+", 50),
}


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


@draw.register
def changes(reproduction: Reproduction) -> Picture:
    """Each change that a search tried, a row each, and the difference that it left.

    The least change stands at the top. Differences are from the target and in margins, with their intervals; trials
    without any, because the runs diverged or failed, stand at the right edge. Of a long search, the changes that came
    closest and those without a difference that are least.
    """
    table = reproduction.table
    looks = table.decision.astype(object).mask(table.decision.isin(WITHIN), "equivalent, not confirmed")
    looks = looks.mask(table.state == "pruned", "pruned").mask(table.confirmed.astype(bool), "confirmed on fresh seeds")
    looks = looks.mask(table.diverged.astype(bool), "diverged").mask(table.state == "failed", "failed")
    table = table.assign(look=looks)
    measures = ["difference", "low", "high"]
    table[measures] = table[measures].astype(float) / reproduction.margin
    table["lost"] = table.difference.isna() | table.look.isin(["diverged", "failed"])
    first = table.index.isin([reproduction.chosen]) | (table.distance == 0)
    ranks = table.assign(first=~first, off=table.difference.abs()).sort_values(["first", "lost", "off", "distance"])
    shown = table.loc[ranks.index[:ROWS]].sort_values("distance", kind="stable")
    rows = dict(zip(shown.index, range(len(shown)), strict=True))

    figure, (axes,) = style.canvas(1, height=1.6 + 0.26 * len(shown))
    band = style.margin_band(axes, reproduction.margin, reproduction.margin)
    axes.axvline(0, color=INK, lw=0.8, zorder=1)
    for look, group in shown.groupby("look"):
        tint, marker, size = LOOKS[str(look)]
        dots: Look = {"c": tint, "marker": marker, "s": size, "zorder": 3}
        drawn, edge = group[~group.lost], group[group.lost]
        axes.plot([drawn.low, drawn.high], [drawn.index.map(rows)] * 2, color=tint, lw=1.2, zorder=2)
        axes.scatter(drawn.difference, drawn.index.map(rows), **dots)
        axes.scatter(np.full(len(edge), 0.98), edge.index.map(rows), transform=axes.get_yaxis_transform(), **dots)
    widest = max(1.0, np.nanmax(np.abs(shown.loc[~shown.lost, measures].to_numpy()), initial=0.0))
    axes.set_xlim(-1.3 * widest, 1.3 * widest)
    if widest > FAR:  # linear inside one margin, and logarithmic beyond
        axes.set_xscale("symlog", linthresh=1.0, linscale=0.8)
        axes.set_xlim(-3 * widest, 3 * widest)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    names = shown.changes.where(shown.distance > 0, "nothing changed")
    axes.set_yticks(range(len(shown)), [textwrap.fill(name, 44) for name in names], fontsize=7)
    label = "difference from the target, in margins (rows: the least change first)"
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlabel=label)

    if reproduction.best is None:
        headline = "No change gives the old losses again"
    else:
        words = table.changes[reproduction.chosen] if reproduction.best else "Nothing changed"
        doubt = "" if reproduction.confirmed else ", but fresh seeds do not confirm it"
        headline = f"{words}: the old losses again{doubt}"
    headline += f" ({len(table)} tried)"
    alt = (
        f"The difference in {reproduction.metric} from {reproduction.target} that each of {len(shown)} changes left "
        f"under {reproduction.setting}, the least change first, with the margin as a band."
    )
    keys = [
        style.key(f"{look} ({count})", ls="", color=tint, marker=marker, ms=size**0.5 * 0.9)
        for look, (tint, marker, size) in LOOKS.items()
        if (count := int((shown.look == look).sum()))
    ]
    return style.finished(figure, headline, alt, [*keys, band], columns=4)
