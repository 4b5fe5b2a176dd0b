"""The figures of notebook 02: what decoders make of one file, and each factor changed alone."""

from __future__ import annotations

import functools
import re
import textwrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gpulab.companion.floating_point import RECORDED, FactorTable
from gpulab.data.jpeg import available_decoders, decode_jpeg, encode_jpeg
from gpulab.plots.style import (
    BESIDE,
    FAINT,
    INK,
    ON_CPU,
    ON_GPU,
    Look,
    canvas,
    decades,
    finished,
    grid,
    key,
    point_key,
    points,
    power_of_ten,
)
from gpulab.report import Picture, draw

SAME_STEP, SAME_LOSS = 3e-11, 1e-8  # where what keeps its bits is drawn: a gradient, a seed's final loss in sd


def decoded(
    frame: np.ndarray, decoders: tuple[str, ...] | None = None, quality: int = 75, subsampling: str = "4:2:0"
) -> Picture:
    """One frame as each decoder makes it of the same JPEG file, and how far it is from the first.

    Args:
        frame: The picture (3, H, W) in bytes.
        decoders: By default all that are here.
        quality: Of the file, 1 to 100.
        subsampling: Of the file's colours, such as `4:4:4`.
    """
    names = available_decoders() if decoders is None else decoders
    file = encode_jpeg(frame, quality, subsampling)
    pictures = [decode_jpeg(file, name) for name in names]
    differences = [np.abs(picture.astype(int) - pictures[0]) for picture in pictures]
    largest = max(1, *(difference.max() for difference in differences))
    height, width = frame.shape[1:]
    figure, places = grid(2, len(names), height=2 * 7.2 / len(names) * height / width + 0.8)
    for (above, below), name, picture, apart in zip(places.T, names, pictures, differences, strict=True):
        above.imshow(picture.transpose(1, 2, 0), interpolation="nearest")
        above.set_title(name, fontsize=8)
        below.imshow(apart.max(0), cmap="magma", vmin=0, vmax=largest, interpolation="nearest")
        below.set_title(f"{(apart > 0).mean():.0%} of the values differ, by up to {apart.max()}", fontsize=8)
    headline = f"One JPEG file, {len(names)} decoders; below, the difference from {names[0]}'s pixels"
    return finished(figure, headline, f"A frame decoded by {', '.join(names)}, and the differences between them.")


@draw.register
def factor_effects(report: FactorTable) -> Picture:
    """Each factor changed alone, a row each: what it does to one step, and to each seed's final loss.

    In a row stand the places where it was measured. Left, how far the gradient of the first step moves; a tick marks
    what rounding alone does to it. Right, how far the final loss of each seed moves, in standard deviations between
    seeds. What keeps its bits stands at the left edge.

    Args:
        report: From `gpulab.companion.factor_table`.
    """
    table = report.table.reset_index(drop=True)
    factors = list(table.factor.unique())
    figure, (left, right) = canvas(2, height=1.9 + 0.55 * len(factors), share_rows=True)
    for place, factor in enumerate(factors):
        rows = table[table.factor == factor].to_dict("records")
        for row, aside in zip(
            rows, (np.arange(len(rows)) - (len(rows) - 1) / 2) * min(0.28, 0.8 / len(rows)), strict=True
        ):
            _draw_factor(left, right, report, row, place + aside)
        if place % 2:
            for axes in (left, right):
                axes.axhspan(place - 0.5, place + 0.5, color=FAINT, alpha=0.12, lw=0, zorder=0)
    above: Look = {"va": "center", "fontsize": 8, "annotation_clip": False}
    for axes, edge in ((left, SAME_STEP), (right, SAME_LOSS)):
        decades(axes.xaxis, 7)
        axes.xaxis.set_major_formatter(functools.partial(_power, edge=edge))
        axes.annotate("same bits", (edge, -0.7), ha="left", **above)
        axes.tick_params(axis="x", labelsize=8)
    left.set_xlim(1e-11, 30)
    left.set_xlabel("change of one step's gradient (relative)", fontsize=8)
    changed = [", ".join(dict.fromkeys(map(_changed, table[table.factor == f].to_dict("records")))) for f in factors]
    left.set_yticks(
        range(len(factors)), [f"{f}\n{textwrap.fill(c, 24)}" for f, c in zip(factors, changed, strict=True)]
    )
    left.tick_params(axis="y", labelsize=8)
    left.set_ylim(len(factors) - 0.4, -0.55)
    right.set_xlim(SAME_LOSS / 3, 100)
    right.axvline(0.25, color=FAINT, lw=0.9, ls=":")
    right.axvline(1, color=INK, lw=0.9, ls="--")
    right.annotate("margin ", (0.25, -0.7), ha="right", **above)
    right.annotate(" sd between seeds", (1, -0.7), ha="left", **above)
    right.set_xlabel("change of a seed's final loss (sd)", fontsize=8)
    right.tick_params(axis="y", left=False)

    keys = [key("rounding alone: distance of the base from float64", ls="", marker="|", color=FAINT, ms=8)]
    keys.append(point_key("made here", ms=5))
    if machines := ", ".join(sorted(set(table.machine[table.source == RECORDED]))):
        keys.append(point_key(f"recorded on {machines}", hollow=True, ms=5))
    if table.emulated.fillna(False).any():
        keys.append(point_key("emulated", marker="^", ms=5))
    for kind in sorted({str(base).partition(":")[0] for base in table.base}):
        label = "changed on a CPU" if kind == "cpu" else "changed on a GPU"
        keys.append(key(label, ls="", marker="s", ms=5, color=_tint(kind)))
    counts = table[table.seeds.fillna(0) > 0].decision.value_counts()
    decided = ", ".join(f"{count} {decision}" for decision, count in counts.items())
    headline = f"Each factor alone, effect on the final loss: {decided}"
    alt = f"For each of {table.factor.nunique()} factors, how far one step and the final losses move. {headline}."
    return finished(figure, headline, alt, keys, size=7.5)


def _draw_factor(left: Axes, right: Axes, report: FactorTable, row: dict[str, Any], height: float) -> None:
    """One place where a factor was changed."""
    tint = _tint(row["base"])
    look: Look = {"marker": "^" if row["emulated"] else "o", "hollow": row["source"] == RECORDED}
    if pd.notna(row["step_moved"]):
        left.scatter(row["base_error"], height, marker="|", s=50, color=FAINT, zorder=2)
        points(left, max(row["step_moved"], SAME_STEP), height, tint, s=26, **look)
    right.annotate(f" {row['decision']}", (1.0, height), fontsize=7, color=tint, **BESIDE)
    verdict = report.verdicts.get((row["source"], row["base"]))
    if verdict is not None and row["seeds"]:
        moved = verdict.pairs[verdict.pairs.change == row["change"]].difference.dropna().abs().to_numpy(float)
        in_sd = np.maximum(moved / (verdict.between_seeds or np.nan), SAME_LOSS)
        points(right, in_sd, np.full(len(moved), height), tint, s=14, linewidths=0.9, **look)


def _power(value: float, _: Any, edge: float) -> str:
    return "" if value <= edge else power_of_ten(round(np.log10(value)))


def _changed(row: dict[str, Any]) -> str:
    """What is changed, without what stays: of `cpu:threads=1,isa=avx2` against `cpu:threads=1`, `isa=avx2`."""
    base, change = (re.split(r"[:,] ?", str(row[side])) for side in ("base", "change"))
    if base[0] != change[0]:
        return str(row["change"])
    return ", ".join(part for part in change[1:] if part not in base) or f"without {', '.join(base[1:])}"


def _tint(base: str) -> str:
    return ON_GPU if base.startswith("cuda") else ON_CPU
