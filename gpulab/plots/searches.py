"""What a search for the smallest change tried: how large each change was, and what difference it left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gpulab.plots.style import FAINT, INK, Picture, canvas
from gpulab.report import draw
from gpulab.training.reproduction import WITHIN, Reproduction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEN, RED = "#117733", "#CC3311"  # of no setting: colours here say how a change was judged
# how a trial is drawn: colour, marker, size
LOOKS: dict[str, tuple[str, str, float]] = {
    "confirmed on fresh seeds": (GREEN, "*", 190),
    "equivalent, not confirmed": (GREEN, "o", 42),
    "inconclusive": (FAINT, "s", 30),
    "different": (RED, "D", 30),
    "pruned": (RED, "v", 24),
    "diverged": (RED, "x", 40),
    "failed": (INK, "+", 50),
}


@draw.register
def changes(found: Reproduction) -> Picture:
    """Each change by its distance from the original, and the difference from the target that it left.

    Differences are in margins, linear inside the margin (the band) and logarithmic far outside, with
    their intervals. Trials without any difference, because the runs diverged or failed, stand at the top.
    """
    table = found.table.assign(look=[_look(row) for row in found.table.to_dict("records")])
    table["place"] = table.distance + _aside(table.distance)
    figure, (axes,) = canvas(1, height=3.9)
    axes.axhspan(-1, 1, color=FAINT, alpha=0.18, lw=0, zorder=0)
    axes.axhline(0, color=INK, lw=0.8, zorder=1)
    gone = table.difference.isna() | table.look.isin(["diverged", "failed"])
    for row in table[~gone].to_dict("records"):
        tint = LOOKS[row["look"]][0]
        axes.plot([row["place"]] * 2, np.array([row["low"], row["high"]]) / found.margin, color=tint, lw=1.2, zorder=2)
    for look, some in table.groupby("look"):
        tint, marker, size = LOOKS[str(look)]
        here = some[~gone[some.index]]
        axes.scatter(here.place, here.difference / found.margin, c=tint, marker=marker, s=size, zorder=3)
        away = some[gone[some.index]]
        top = axes.get_xaxis_transform()
        axes.scatter(away.place, np.full(len(away), 0.97), c=tint, marker=marker, s=size, transform=top, zorder=3)
    _scale(axes, table[~gone], found.margin)
    _name(axes, found, table)
    widest = max(1.0, table.distance.max())
    axes.set_xticks(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0, widest))
    axes.set_xlim(-0.12 * widest, 1.15 * widest)
    axes.set_xlabel("distance of the change from the original (0: nothing changed)", fontsize=9)
    axes.set_ylabel("difference from the target, in margins", fontsize=9)
    headline = _headline(found)
    figure.suptitle(headline, fontsize=10)
    _key(figure, table, found)
    return Picture(
        figure,
        f"Distance of {len(table)} changes from the original against the difference in {found.metric} from "
        f"{found.target} that each left under {found.setting}, with the margin as a band. {headline}.",
    )


def _look(row: dict[str, Any]) -> str:
    if row["state"] == "failed":
        return "failed"
    if row["diverged"]:
        return "diverged"
    if row["confirmed"]:
        return "confirmed on fresh seeds"
    if row["state"] == "pruned":
        return "pruned"
    return "equivalent, not confirmed" if row["decision"] in WITHIN else row["decision"]


def _aside(distances: pd.Series) -> pd.Series:
    """Changes of one distance stand beside each other."""
    groups = distances.round(2).groupby(distances.round(2))
    middle = (groups.transform("size") - 1) / 2
    return 0.02 * max(1.0, distances.max()) * (groups.cumcount() - middle)


def _scale(axes: Axes, drawn: pd.DataFrame, margin: float) -> None:
    ends = drawn[["low", "high", "difference"]].to_numpy(float) / margin
    widest = max(1.0, np.nanmax(np.abs(ends), initial=0.0))
    if widest > 4:
        axes.set_yscale("symlog", linthresh=1.0, linscale=0.8)
        axes.set_ylim(-3 * widest, 3 * widest)
        decades = [10.0**n for n in range(int(np.ceil(np.log10(3 * widest))))][-3:]
        axes.set_yticks([*(-d for d in reversed(decades)), 0, *decades])
    else:
        axes.set_ylim(-1.3 * widest, 1.4 * widest)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    axes.minorticks_off()


def _name(axes: Axes, found: Reproduction, table: pd.DataFrame) -> None:
    """Words beside the unchanged trial and the answer."""
    for place in {*table.index[table.distance == 0], *([] if found.chosen is None else [found.chosen])}:
        row = table.loc[place]
        words = row.changes if row.distance else "nothing changed"
        left = row.distance > table.distance.max() / 2
        lost = row["look"] in ("diverged", "failed")
        at = (row.place, 0.97 if lost else row.difference / found.margin)
        axes.annotate(
            words,
            at,
            (-8 if left else 8, -12 if lost else 9),
            xycoords=axes.get_xaxis_transform() if lost else "data",
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=8,
            zorder=5,
        )


def _headline(found: Reproduction) -> str:
    tried = f"{len(found.table)} tried"
    if found.best is None:
        return f"No change gives the old losses again ({tried})"
    words = found.table.changes[found.chosen]
    if not found.best:
        words = "Nothing changed"
    doubt = "" if found.confirmed else ", but fresh seeds do not confirm it"
    return f"{words}: the old losses again{doubt} ({tried})"


def _key(figure: Figure, table: pd.DataFrame, found: Reproduction) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for look, (tint, marker, size) in LOOKS.items():
        if count := int((table.look == look).sum()):
            label = f"{look} ({count})"
            handles.append(Line2D([], [], ls="", color=tint, marker=marker, ms=size**0.5 * 0.9, label=label))
    handles.append(Patch(color=FAINT, alpha=0.3, lw=0, label=f"margin, ±{found.margin:.2g}"))
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=4)
