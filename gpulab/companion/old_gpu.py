"""An old card and a new one: why a covariance fails in TF32, what the cure costs, and what one may say of it.

The network is `gpulab.Whitener`. What an H200 did with it is kept in `data/runs` and `data/precision`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import FuncFormatter

from gpulab.diagnostics.audits import Audit, audit
from gpulab.models.autoencoders import COVARIANCES, EPSILON, Whitener, covariance
from gpulab.plots.style import FAINT, INK, canvas, colour, loss_scale, metric_label
from gpulab.records import recorded_folder
from gpulab.report import Picture
from gpulab.settings import Setting
from gpulab.stats.verdicts import verdict
from gpulab.training.step import FirstWindow
from gpulab.training.store import history

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpulab.training.reproduction import Reproduction

MARGINS = ("0.25sd", "0.5sd")
ARITHMETIC = ("emulate", "order", "tf32", "precision", "covariance")  # what changes how a search's trial computes


def covariance_spectrum(
    settings: Iterable[str], seeds: Iterable[int] = range(10), profile: str = "quick", ways: Iterable[str] = COVARIANCES
) -> pd.DataFrame:
    """The eigenvalues of the covariance that the whitener computes from its first batch, before any training.

    Columns: `setting`, `covariance` (one of `ways`), `seed`, `rank` (1 for the largest) and `eigenvalue`. The
    covariance is computed under the setting, and its eigenvalues in float64.

    >>> seen = covariance_spectrum(["cpu", "cpu:emulate=tf32"], seeds=[7], ways=["one-pass"])
    >>> (seen.eigenvalue < 0).groupby(seen.setting).any().tolist()
    [False, True]
    """
    parts = []
    for setting in settings:
        for seed in seeds:
            step = FirstWindow("whitener", seed=seed, profile=profile)
            for way, values in _eigenvalues(step, Setting.parse(setting), ways).items():
                ranks = range(1, len(values) + 1)
                part = pd.DataFrame({"rank": ranks, "eigenvalue": values})
                parts.append(part.assign(setting=setting, covariance=way, seed=seed))
    columns = ["setting", "covariance", "seed", "rank", "eigenvalue"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


@torch.no_grad()
def _eigenvalues(step: FirstWindow, setting: Setting, ways: Iterable[str]) -> dict[str, list[float]]:
    net = step.plan.model
    assert isinstance(net, Whitener)
    images = torch.from_numpy(step.frames[: net.batch_size]).float().div(255)
    with setting.apply():
        there = images.to(setting.device, setting.dtype)
        codes = net.to(setting.device, setting.dtype).codes(there)
        made = {way: covariance(codes, way).double().cpu() for way in ways}
    return {way: torch.linalg.eigvalsh(matrix).flip(0).tolist() for way, matrix in made.items()}


def recorded_prices() -> pd.DataFrame:
    """What a step of a large whitener cost on the machines that recorded it: a row for each way.

    Columns: `machine`, `setting`, `covariance`, `ms` (median milliseconds a step), the quartiles `ms_low` and
    `ms_high`, `rounds` (times that were measured) and `batch_size`.

    >>> bool((recorded_prices().ms > 0).all())
    True
    """
    parts = []
    for file in sorted(_kept().glob("*.json")):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        machine = ", ".join(gpu["name"] for gpu in record["passport"]["gpus"]) or record["passport"]["cpu"]["model"]
        keys = {key: record[key] for key in ("rounds", "batch_size")}
        parts.append(pd.DataFrame(record["ways"]).assign(machine=machine, **keys))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def recorded_cards_audit() -> Audit:
    """The audit of the whitener's first step on an H200, in float32 against TF32, from the recorded traces.

    >>> recorded_cards_audit().kind
    'reduced precision'
    """
    return audit(_kept() / "whitener-cuda-tf32-off.trace", _kept() / "whitener-cuda-tf32-on.trace")


def _kept() -> Path:
    return recorded_folder("precision")


def cards_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How many runs became NaN, for each setting and covariance in a frame of runs; here and recorded apart.

    Columns: `machine`, `recorded`, `setting`, `covariance`, `seeds`, `diverged`, `updates` (the median update at
    which they did) and `final_loss` (the mean of the others).
    """
    groups = frame.groupby(["recorded", "machine", "setting", "covariance"], sort=False)
    table = groups.agg(
        seeds=("seed", "nunique"),
        diverged=("status", lambda status: int((status == "diverged").sum())),
        updates=("diverged_at", "median"),
        final_loss=("final_loss", "mean"),
    )
    return table.reset_index()


def cards_finding(runs: pd.DataFrame, report: Audit, found: Reproduction) -> str:
    """What runs of the whitener, an audit, a search and the recorded prices allow one to say, in sentences.

    `runs` are those made here and the recorded ones. The verdicts are those on the recorded runs.
    """
    lines = [_counted(row) for row in cards_table(runs[runs.covariance == "one-pass"]).itertuples()]
    first = report.findings[0]
    lines.append(f"The audit blames {first.operation} ({first.phase}), {first.kind}, at {first.line}.")
    lines += _cures(runs[runs.recorded], MARGINS)
    lines += _prices()
    lines.append(_retuned(found))
    return "\n".join(lines)


def _counted(row: Any) -> str:
    where = f"recorded on {row.machine}" if row.recorded else "here"
    return f"One-pass covariance under {row.setting}, {where}: {row.diverged} of {row.seeds} seeds became NaN."


def _cures(recorded: pd.DataFrame, margins: Iterable[str | float]) -> list[str]:
    """The verdict on each cure in TF32 against one pass in float32."""
    named = recorded.assign(way=recorded.covariance + " under " + recorded.setting)
    reference = "one-pass under cuda:tf32=off"
    cured = named[(named.way == reference) | ((named.setting == "cuda:tf32=on") & (named.covariance != "one-pass"))]
    if reference not in set(cured.way):
        return []
    seen = [verdict(cured, factor="way", margin=margin, reference=reference) for margin in margins]
    return [
        f"{way} against {reference}: {seen[0].table.seeds[place]} seeds, {seen[0].table.diverged[place]} became NaN; "
        + ", ".join(f"within {one.margin} {one.decisions[way]}" for one in seen)
        + "."
        for place, way in enumerate(seen[0].table.way)
    ]


def _prices() -> list[str]:
    lines = []
    for machine, rows in recorded_prices().groupby("machine"):
        ms = rows.set_index(["setting", "covariance"]).ms.to_dict()
        lines.append(
            f"A step of a large one on {machine}: {ms['cuda:tf32=off', 'one-pass']:.1f} ms in float32; in TF32 "
            f"{ms['cuda:tf32=on', 'centred']:.1f} ms centred, and {ms['cuda:tf32=on', 'float32']:.1f} ms with the one "
            "product kept in float32."
        )
    return lines


def _retuned(found: Reproduction) -> str:
    """How many of the changes that were tried gave the old losses back, by what they change."""
    names = [name for name in found.original if name in ARITHMETIC]
    tried = found.table[found.table.distance > 0]
    of_arithmetic = [any(str(row[name]) != str(found.original[name]) for name in names) for _, row in tried.iterrows()]
    arithmetic, retuned = tried[of_arithmetic], tried[[not some for some in of_arithmetic]]
    return (
        f"Of {len(retuned)} retunings of the training {int(retuned.confirmed.sum())} gave the old losses back, and of "
        f"{len(arithmetic)} changes of the arithmetic {int(arithmetic.confirmed.sum())} (margin {found.margin_asked})."
    )


# --- figures ---------------------------------------------------------------------------------------------

WAY_COLOURS = {"one-pass": "#D55E00", "float32": "#0072B2", "centred": "#009E73"}


def divergence(old: pd.DataFrame, new: pd.DataFrame) -> Picture:
    """Every run's loss while it learns, the old card's left and the new one's right; a cross where it became NaN.

    Frames as from `gpulab.runs`. Emulated runs are dashed, recorded ones thin, their crosses hollow.
    """
    figure, panels = canvas(2, height=3.9, share_rows=True)
    for axes, frame, name in zip(panels, (old, new), ("old card", "new card"), strict=True):
        for setting, runs in frame.groupby("setting", sort=False):
            _draw_runs(axes, str(setting), runs)
        lost = int((frame.status == "diverged").sum())
        axes.set_title(f"{name}: {lost} of {len(frame)} runs became NaN", fontsize=9)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("updates")
        axes.margins(y=0.3)
        loss_scale(axes)
        axes.legend(fontsize=7, frameon=False, loc="lower left")
    last = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_xlim(0.8, last)
    crosses = "a cross: a run that\nbecame NaN at this\nupdate (hollow:\nrecorded)"
    if (new.status == "diverged").any():
        panels[1].annotate(crosses, (0.99, 0.75), xycoords="axes fraction", ha="right", va="center", fontsize=7)
    panels[0].set_ylabel(metric_label("loss").replace("frame", "image"), fontsize=9)
    counts = [f"{int((frame.status == 'diverged').sum())} of {len(frame)}" for frame in (old, new)]
    figure.suptitle("One network, one seed after another, on two cards' arithmetic", fontsize=10)
    return Picture(
        figure,
        f"Loss against updates, a line for each run. Of the old card's runs {counts[0]} became NaN, of the new "
        f"card's {counts[1]}, each marked by a cross at the update where it did.",
    )


def _draw_runs(axes: Axes, setting: str, runs: pd.DataFrame) -> None:
    recorded, tint = bool(runs.recorded.iloc[0]), colour(setting)
    emulated = Setting.parse(setting).emulated
    style: Any = {"color": tint, "lw": 0.6 if recorded else 1.0, "ls": "--" if emulated else "-", "alpha": 0.7}
    for _, run in history(runs).groupby("id"):
        shown = run[np.isfinite(run.loss)]
        axes.plot(shown.step, shown.loss, **style)
    lost = runs[runs.status == "diverged"]
    heights = np.linspace(0.84, 0.98, max(2, len(lost)))[: len(lost)]  # many become NaN at the same update
    face = "white" if recorded else tint
    axes.scatter(
        lost.diverged_at.astype(float),
        heights,
        marker="X",
        s=26,
        color=face,
        edgecolors=tint,
        linewidths=0.8,
        transform=axes.get_xaxis_transform(),
        zorder=4,
    )
    where = f", recorded on {runs.machine.iloc[0]}" if recorded else ", emulated here" if emulated else ", here"
    axes.plot([], [], label=f"{setting}{where}", **style)


def spectrum(frame: pd.DataFrame) -> Picture:
    """The eigenvalues of one seed's covariance, and the smallest of each seed's, from `gpulab.covariance_spectrum`.

    Below −ε, the dotted line, a covariance has no Cholesky factor.
    """
    figure, (left, right) = canvas(2, height=3.8, share_rows=True)
    frame = frame.reset_index(drop=True)
    ways = list(frame[["setting", "covariance"]].drop_duplicates().itertuples(index=False, name=None))
    smallest = frame.loc[frame.groupby(["setting", "covariance", "seed"]).eigenvalue.idxmin()]
    worst = smallest.loc[smallest.eigenvalue.idxmin()].seed
    for place, (setting, way) in enumerate(ways):
        rows = frame[(frame.setting == setting) & (frame.covariance == way)]
        emulated, tint = Setting.parse(setting).emulated, WAY_COLOURS[way]
        one = rows[rows.seed == worst]
        style: Any = {"ls": "--" if emulated else "-", "lw": 1.2, "color": tint if emulated else INK}
        left.plot(one["rank"], one.eigenvalue, label=f"{way}, {setting}", **style)
        low = smallest[(smallest.setting == setting) & (smallest.covariance == way)]
        aside = place + np.linspace(-0.2, 0.2, len(low)) if len(low) > 1 else np.full(len(low), float(place))
        right.scatter(aside, low.eigenvalue, s=20, color=tint if emulated else INK, zorder=3)
    for axes in (left, right):
        axes.axhline(-EPSILON, color=INK, lw=0.9, ls=":")
        axes.axhline(0, color=FAINT, lw=0.8)
        axes.set_yscale("symlog", linthresh=1e-5)
    lost = int((smallest[smallest.covariance == "one-pass"].eigenvalue < -EPSILON).sum())
    below = {"xytext": (0, -3), "textcoords": "offset points", "va": "top", "fontsize": 8}
    left.annotate("no Cholesky factor below", (1, -EPSILON), **below)  # type: ignore[arg-type]
    left.set_xlabel(f"rank of the eigenvalue (seed {worst}, first batch)")
    left.set_ylabel("eigenvalue of the covariance")
    kinds = ["emulated" if Setting.parse(setting).emulated else "float32" for setting, _ in ways]
    right.set_xticks(
        range(len(ways)), [f"{way}\n{kind}" for (_, way), kind in zip(ways, kinds, strict=True)], fontsize=7
    )
    right.set_xlabel("smallest eigenvalue, a point a seed")
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    seeds = frame.seed.nunique()
    headline = f"First batch: in one pass {lost} of {seeds} covariances have an eigenvalue too negative for a factor"
    figure.suptitle(headline, fontsize=10)
    return Picture(
        figure,
        f"Eigenvalues of the covariance of one batch by rank, and the smallest one for each of "
        f"{seeds} seeds, by setting and way of computing; below minus {EPSILON:g} there is no factor.",
    )


def prices(frame: pd.DataFrame) -> Picture:
    """The time of a step in float32, and in TF32 with either cure, from `gpulab.recorded_prices`."""
    figure, (axes,) = canvas(1, height=1.2 + 0.45 * len(frame))
    slowest = frame.ms.max()
    for place, row in enumerate(frame.itertuples()):
        tint = colour(row.setting)
        axes.plot([row.ms_low, row.ms_high], [place, place], color=INK, lw=2, zorder=2)
        axes.scatter([row.ms], [place], s=42, color="white", edgecolors=tint, linewidths=1.6, zorder=3)
        axes.annotate(
            f"{row.ms:.1f} ms, {slowest / row.ms:.2f}×", (row.ms, place), xytext=(9, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(frame)), [f"{row.setting}, {row.covariance}" for row in frame.itertuples()], fontsize=8)
    axes.set_ylim(len(frame) - 0.5, -0.5)
    axes.set_xlim(0, 1.25 * slowest)
    axes.set_xlabel(f"milliseconds a step (median and quartiles), batches of {frame.batch_size.iloc[0]:,} images")
    machines = ", ".join(sorted(frame.machine.unique()))
    times = slowest / frame[frame.ms < slowest].ms
    headline = f"{times.min():.2g} to {times.max():.2g} times as fast as the slowest" if len(times) else "One way alone"
    figure.suptitle(f"{headline}, recorded on {machines}", fontsize=10)
    return Picture(figure, f"Milliseconds a step on {machines} for float32 and for TF32 with either cure.")
