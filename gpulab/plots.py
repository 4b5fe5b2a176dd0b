"""Figures, one visual language for all notebooks: drawn from data frames and runs only.

A setting has the same colour everywhere, CPU settings in one family and GPU settings in another.
Runs made here are filled, recorded ones hollow. Every seed is a point.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gpulab.speed import bounds
from gpulab.store import history
from gpulab.verdicts import Verdict, check_one_protocol, verdict

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes

    from gpulab.audits import Audit
    from gpulab.datasets import Data
    from gpulab.training import Run

DPI = 100
# Okabe and Ito's palette, safe for colour-blind readers: blues and greens compute on CPUs.
CPU_COLOURS = {
    "cpu": "#0072B2",
    "cpu:threads=1": "#56B4E9",
    "cpu:isa=avx2": "#009E73",
    "cpu:precision=float64": "#332288",
}
GPU_COLOURS = {
    "cuda:tf32=off": "#D55E00",
    "cuda:tf32=on": "#E69F00",
    "cuda:cudnn=off": "#CC79A7",
    "cuda:deterministic=on": "#882255",
}
OTHER_CPU, OTHER_GPU = ("#44AA99", "#117733", "#88CCEE"), ("#AA4499", "#DDCC77", "#CC6677")
SPEED_COLOURS = ("#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#222222")
INK, FAINT = "#222222", "#999999"
LEFT_OUT_BITS = 1e-12  # where a difference of exactly nothing is drawn on a logarithmic axis


class Picture:
    """A figure with its text alternative; a notebook shows it, `save` writes it."""

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure, self.alt = figure, alt

    def png(self) -> bytes:
        """The figure as PNG, in 256 colours of its own, which keeps notebooks small."""
        from PIL import Image

        drawn, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, format="png", dpi=DPI, bbox_inches="tight", facecolor="white")
        picture = Image.open(drawn).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
        return small.getvalue()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"image/png": self.png(), "text/plain": self.alt}, {"image/png": {"alt": self.alt}}


def save(picture: Picture, file: str | Path) -> None:
    """Write a picture to a PNG file."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_bytes(picture.png())


def colour(setting: str) -> str:
    """The colour that a setting has in every figure."""
    known = CPU_COLOURS | GPU_COLOURS
    if setting in known:
        return known[setting]
    others = OTHER_CPU if setting.startswith("cpu") else OTHER_GPU
    return others[zlib.crc32(setting.encode()) % len(others)]


# --- runs --------------------------------------------------------------------------------------------


def losses(frame: pd.DataFrame, metric: str = "final_loss", title: str | None = None) -> Picture:
    """Each seed's loss under each setting, the same seeds joined by thin lines.

    `frame` is one from `gpulab.runs` or `gpulab.recorded_runs`, of one experiment and profile.
    """
    check_one_protocol(frame)
    frame = frame[frame.rerun == 0]
    order = _order(frame)
    figure, (axes,) = _canvas(1, height=3.6)
    for _, seed in frame.drop_duplicates(["setting", "seed"]).groupby("seed"):
        places = [order.index(setting) for setting in seed.setting]
        in_order = np.argsort(places)
        axes.plot(np.array(places)[in_order], seed[metric].to_numpy(float)[in_order], color=FAINT, lw=0.7, zorder=1)
    for (setting, recorded), group in frame.groupby(["setting", "recorded"]):
        values = group[metric].astype(float)
        place = order.index(setting) + (0.15 if recorded and not frame.recorded.all() else 0.0)
        _points(axes, np.full(len(values), place), values, setting, bool(recorded))
        diverged = int((group.status == "diverged").sum())
        if diverged:
            axes.annotate(
                f"{diverged} diverged", (place, 0.98), xycoords=("data", "axes fraction"), ha="center", va="top"
            )
    _loss_scale(axes)
    axes.set_xticks(range(len(order)), [re.sub("[:=,]", "\n", setting) for setting in order], fontsize=8)
    axes.set_xlim(-0.6, len(order) - 0.4)
    axes.set_ylabel(_metric_label(metric))
    spread = frame.groupby("setting")[metric].agg(["min", "max"]).astype(float)
    times = (spread["max"] / spread["min"]).max()
    headline = f"From seed to seed the loss varies up to {times:.1f}-fold"
    figure.suptitle(title or headline + ("; along a line it hardly moves" if _flat(frame, metric) else ""), fontsize=10)
    _key(figure, frame)
    return Picture(figure, f"{metric} of each seed under {', '.join(order)}; the same seeds joined by lines.")


def differences(frame: pd.DataFrame, reference: str | None = None, metric: str = "final_loss") -> Picture:
    """How far each setting moves each seed's loss, beside how far the seeds are apart.

    The axis is logarithmic; a difference of exactly nothing is drawn at the left edge.
    """
    seen = verdict(frame, metric, reference=reference)
    base = seen.runs[seen.runs.setting == seen.reference].set_index("seed")[metric]
    again = seen.reruns.assign(setting=f"{seen.reference} again")
    moved = pd.concat([seen.pairs, again], ignore_index=True)
    rows = [*seen.table.setting, *again.setting.unique()]
    figure, (axes,) = _canvas(1, height=1.3 + 0.42 * (len(rows) + 1))
    floor = _floor(moved)
    for place, setting in enumerate(rows):
        values = moved[moved.setting == setting].difference.abs().to_numpy(float)
        shown = np.where(values > 0, values, floor)
        _points(axes, shown, np.full(len(shown), place), setting.removesuffix(" again"), bool(frame.recorded.all()))
    between = np.abs(base.to_numpy()[:, None] - base.to_numpy()[None, :])[np.triu_indices(len(base), 1)]
    axes.scatter(between, np.full(len(between), len(rows)), color=INK, s=14, alpha=0.5, marker="|", zorder=3)
    axes.axvline(seen.between_seeds, color=INK, lw=1, ls="--", zorder=1)
    axes.annotate(
        "standard deviation\nbetween seeds ",
        (seen.between_seeds, -0.55),
        ha="right",
        va="center",
        fontsize=8,
        annotation_clip=False,
    )
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows) + 1), [*rows, "one seed against another"])
    axes.set_ylim(len(rows) + 0.6, -0.9)
    if (moved.difference == 0).any():
        axes.axvline(floor, color=FAINT, lw=0.8)
        axes.annotate(" exactly the same", (floor, -0.55), va="center", fontsize=8, color=INK)
    axes.set_xlabel(f"change of {metric.replace('_', ' ')} against {seen.reference}, same seed (mean squared error)")
    known = f"The largest change of setting is {seen.ratio:.2g} of the spread between seeds"
    figure.suptitle("One seed has no spread to compare with" if np.isnan(seen.ratio) else known, fontsize=10)
    _key(figure, frame)
    return Picture(
        figure,
        f"Change of {metric} against {seen.reference} for {', '.join(rows)}, and between seeds, on a logarithmic axis.",
    )


def estimation(seen: Verdict) -> Picture:
    """An estimation plot (Gardner and Altman 1986): every seed, and beside it the paired differences.

    Left, the metric of each seed under each level, the same seed joined by a thin line; diverged runs
    are crosses at the right edge. Right, the differences from the reference in standard deviations
    between seeds (in the metric's units where there is no such spread), their mean with its BCa
    interval, and the margin as a band; the axis is linear around zero and logarithmic outside where
    the differences are much smaller than the margin.
    """
    levels = [seen.reference, *seen.table[seen.factor]]
    figure, (left, right) = _canvas(2, height=1.9 + 0.4 * len(levels), share_rows=True)
    tints = _level_colours(seen.factor, levels)
    _draw_seeds(left, seen, levels, tints)
    _draw_differences(right, seen, levels, tints)
    left.set_yticks(range(len(levels)), [_broken(str(level)) for level in levels], fontsize=8)
    left.set_ylim(len(levels) - 0.5, -0.5)
    right.tick_params(axis="y", left=False)
    right.spines["left"].set_visible(False)
    headline = _decided(seen)
    figure.suptitle(headline, fontsize=10)
    _estimation_key(figure, seen)
    return Picture(
        figure,
        f"{seen.metric} of each {seen.block} under {', '.join(map(str, levels))}, and the differences from "
        f"{seen.reference} with intervals and the margin. {headline}.",
    )


def _draw_seeds(axes: Axes, seen: Verdict, levels: list[Any], tints: dict[Any, str]) -> None:
    runs = seen.runs.assign(place=seen.runs[seen.factor].map({level: row for row, level in enumerate(levels)}))
    aside = _aside(seen)
    finished = runs[runs.status != "diverged"]
    if len(finished):
        low, high = finished[seen.metric].min(), finished[seen.metric].max()
        _plain_scale(axes, low, high)
    for block, some in finished.sort_values("place").groupby(seen.block):
        axes.plot(some[seen.metric], some.place + aside[block], color=FAINT, lw=0.5, alpha=0.7, zorder=1)
    for row in runs.to_dict("records"):
        level, height = row[seen.factor], row["place"] + aside[row[seen.block]]
        if row["status"] == "diverged":
            axes.scatter(
                0.97, height, marker="x", s=24, color=tints[level], transform=axes.get_yaxis_transform(), zorder=4
            )
    for (level, recorded), some in finished.assign(recorded=_recorded(finished)).groupby([seen.factor, "recorded"]):
        _marks(axes, some[seen.metric], some.place + some[seen.block].map(aside), tints[level], recorded, len(aside))
    if len(finished) < len(runs):
        axes.margins(x=0.12)  # room for the crosses
    axes.set_xlabel(_metric_label(seen.metric), fontsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _draw_differences(axes: Axes, seen: Verdict, levels: list[Any], tints: dict[Any, str]) -> None:
    in_sd = seen.between_seeds > 0
    unit = seen.between_seeds if in_sd else 1.0
    aside = _aside(seen)
    recorded = dict(zip(seen.runs[seen.factor], _recorded(seen.runs), strict=True))
    margin = float(seen.table.margin.iloc[0]) / unit if len(seen.table) else np.nan
    if margin == margin:
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.18, lw=0, zorder=0)
    axes.axvline(0, color=INK, lw=0.8, zorder=1)
    for row in seen.table.to_dict("records"):
        level = row[seen.factor]
        some = seen.pairs[(seen.pairs[seen.factor] == level) & seen.pairs.difference.notna()]
        place = levels.index(level)
        heights = place - 0.08 + 0.8 * some[seen.block].map(aside)
        _marks(axes, some.difference / unit, heights, tints[level], recorded[level], len(aside))
        below = place + 0.33
        axes.plot([row["low"] / unit, row["high"] / unit], [below, below], color=INK, lw=1.8, zorder=4)
        axes.plot([row["difference"] / unit], [below], marker="D", ms=4, color=INK, zorder=5)
    _difference_scale(axes, np.abs(seen.pairs.difference.dropna().to_numpy(float)) / unit, margin)
    name = f"sd between {seen.block}s" if in_sd else _metric_label(seen.metric)
    axes.set_xlabel(f"difference from {seen.reference} ({name})", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _difference_scale(axes: Axes, sizes: np.ndarray, margin: float) -> None:
    """Linear; where the typical difference is under a hundredth of the widest thing shown, symlog."""
    widest = np.nanmax([*sizes, margin, 0.0])
    moved = sizes[sizes > 0]
    if not widest > 0:
        return
    axes.set_xlim(-1.15 * widest, 1.15 * widest)
    if not len(moved) or np.median(moved) > 0.01 * widest:
        axes.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
        return
    first = int(np.floor(np.log10(np.quantile(moved, 0.25))))
    last = int(np.floor(np.log10(widest)))
    axes.set_xscale("symlog", linthresh=10.0**first, linscale=0.5 + 0.3 * (last - first))
    axes.set_xlim(-2 * widest, 2 * widest)
    decades = np.unique([last, first])
    labels = [f"$10^{{{decade}}}$" for decade in decades]
    axes.set_xticks([*-(10.0**decades), 0, *10.0**decades], [*(f"−{label}" for label in labels), "0", *labels])
    axes.minorticks_off()


def _plain_scale(axes: Axes, low: float, high: float) -> None:
    """The horizontal axis logarithmic where it spans a factor of four or more, with plain numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(4))
    if (low, high) == (0, 1):
        axes.set_xticks([0, 1])
    if not low > 0 or high / low < 4:
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0) if high / low < 30 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def _aside(seen: Verdict) -> dict[Any, float]:
    """How far above or below its row a seed is drawn, the same in every row."""
    blocks = sorted(seen.runs[seen.block].unique())
    return dict(zip(blocks, np.linspace(-0.2, 0.2, len(blocks)) if len(blocks) > 1 else [0.0], strict=True))


def _marks(axes: Axes, x: Any, y: Any, tint: str, recorded: bool, count: int) -> None:
    size = 20 if count <= 40 else 5
    face = "white" if recorded else tint
    axes.scatter(x, y, s=size, color=face, edgecolors=tint, linewidths=1.0, zorder=3, alpha=0.9)


def _recorded(runs: pd.DataFrame) -> np.ndarray:
    return runs.recorded.to_numpy(bool) if "recorded" in runs else np.zeros(len(runs), bool)


def _level_colours(factor: str, levels: list[Any]) -> dict[Any, str]:
    if factor == "setting":
        return {level: colour(str(level)) for level in levels}
    palette = [*CPU_COLOURS.values(), *GPU_COLOURS.values(), *OTHER_CPU, *OTHER_GPU]
    order = [palette[0], palette[4], *palette[1:4], *palette[5:]]
    return {level: order[place % len(order)] for place, level in enumerate(levels)}


def _broken(label: str, width: int = 18) -> str:
    """A long level on two lines, broken after a colon or comma."""
    if len(label) <= width:
        return label
    return re.sub(r"^([^:]*:|.{1,18}[,\s])", r"\1\n", label, count=1)


def _decided(seen: Verdict) -> str:
    """The title: how many levels came to which decision."""
    decisions = seen.decisions
    if not decisions:
        return f"Only {seen.reference}: nothing to compare with"
    if len(decisions) == 1:
        ((level, decision),) = decisions.items()
        return f"{level} against {seen.reference}: {decision}"
    counts = pd.Series(list(decisions.values())).value_counts()
    return f"Against {seen.reference}: " + ", ".join(f"{n} {what}" for what, n in counts.items())


def _estimation_key(figure: Figure, seen: Verdict) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dot: dict[str, Any] = {"ls": "", "marker": "o", "markeredgecolor": INK, "ms": 5}
    recorded = _recorded(seen.runs)
    handles: list[Any] = []
    for flag in sorted(set(recorded)):
        machines = sorted(set(seen.runs.machine[recorded == flag].astype(str))) if "machine" in seen.runs else []
        where = f" on {', '.join(machines)}" if machines else ""
        label = f"a {seen.block}, {'recorded' if flag else 'made here'}{where}"
        handles.append(Line2D([], [], markerfacecolor="white" if flag else FAINT, label=label, **dot))
    if (seen.runs.status == "diverged").any():
        handles.append(Line2D([], [], ls="", marker="x", color=INK, ms=5, label="diverged"))
    handles.append(Line2D([], [], color=INK, marker="D", ms=4, lw=1.8, label=f"mean, {1 - seen.alpha:.0%} interval"))
    if len(seen.table):
        handles.append(Patch(color=FAINT, alpha=0.3, lw=0, label=f"margin, ±{seen.table.margin.iloc[0]:.2g}"))
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=2)


def curves(frame: pd.DataFrame, baseline: float | None = None, baseline_label: str = "") -> Picture:
    """The loss of every run while it learns, a thin line each; a `baseline` as a reference line."""
    told = history(frame[frame.rerun == 0])
    per_window = {row.id: row.frames_per_window for row in _window_lengths(frame).itertuples()}
    figure, (axes,) = _canvas(1, height=3.6)
    for name, run in told.groupby("id"):
        smooth = run.loss.rolling(max(1, len(run) // 60), min_periods=1).mean()
        frames_seen = (run.window + 1) * per_window[name]
        axes.plot(frames_seen, smooth, color=colour(run.setting.iloc[0]), lw=0.9, alpha=0.7)
    if baseline is not None:
        axes.axhline(baseline, color=INK, lw=1, ls=":")
        axes.annotate(baseline_label, (0.01, baseline), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    _loss_scale(axes)
    axes.set_xlabel("frames seen" if told.experiment.iloc[0] == "prednet" else "images seen")
    axes.set_ylabel(_metric_label("loss"))
    seeds = told.seed.nunique()
    apart = told.groupby("id").loss.last()
    figure.suptitle(
        f"{told.setting.nunique()} settings × {seeds} seeds: the runs end {apart.max() / apart.min():.1f}-fold apart",
        fontsize=10,
    )
    _key(figure, frame, line=True)
    return Picture(
        figure, f"Loss against frames seen, one line for each of {told.id.nunique()} runs, coloured by setting."
    )


def shared_memory(frame: pd.DataFrame) -> Picture:
    """Each seed's loss with shared memory against its loss with copied frames, by size and speed of motion.

    `frame` holds runs with the loader `copied` and with `reused` or `imitated`. Above the diagonal,
    sharing was worse.
    """
    groups = list(frame.groupby(["profile", "device"], sort=False))[:2]
    figure, panels = _canvas(len(groups), height=3.7)
    markers = dict(zip(sorted(frame.speed.dropna().unique()), "os^Dv", strict=False))
    above = total = 0
    for axes, ((profile, device), runs) in zip(panels, groups, strict=True):
        wide = runs.pivot_table(index=["speed", "seed", "setting", "recorded"], columns="loader", values="final_loss")
        other = next(name for name in wide.columns if name != "copied")
        for (speed, recorded), pairs in wide.dropna().groupby(["speed", "recorded"]):
            tint = SPEED_COLOURS[list(markers).index(speed) % len(SPEED_COLOURS)]
            axes.scatter(
                pairs["copied"],
                pairs[other],
                marker=markers[speed],
                s=24,
                color="white" if recorded else tint,
                edgecolors=tint,
                label=f"speed {speed:g}",
                zorder=3,
            )
            above += int((pairs[other] > pairs["copied"]).sum())
            total += len(pairs)
        ends = [runs.final_loss.min() * 0.8, runs.final_loss.max() * 1.25]
        axes.plot(ends, ends, color=INK, lw=0.8, ls="--", zorder=1)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{profile} size, {device}: {other} against copied", fontsize=9)
        axes.set_xlabel("final loss, frames copied")
        axes.set_ylabel(f"final loss, buffer {other}")
    panels[-1].legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle(f"Sharing memory gave the higher loss in {above} of {total} pairs of the same seed", fontsize=10)
    _key(figure, frame)
    return Picture(figure, "Final loss with shared memory against final loss with copied frames, one point a seed.")


def audit(report: Audit) -> Picture:
    """The error of each operation's result, all that came before it included, along a training step.

    Lines are the two settings against float64; the dots, what each operation's own rounding may
    explain; a cross marks a finding.
    """
    table = report.table.reset_index(names="place")
    figure, (axes,) = _canvas(1, height=3.8)
    for side, trace in (("a", report.a), ("b", report.b)):
        own = table[f"bound_{side}"].replace(0, np.nan)
        axes.scatter(table.place, own, s=4, color=FAINT, zorder=1, label="rounding explains" if side == "a" else None)
        so_far = table[f"so_far_{side}"].replace(0, np.nan)
        style = {"lw": 1.4, "alpha": 0.9} if side == "a" else {"lw": 1.0, "alpha": 0.9, "ls": "--"}
        axes.plot(table.place, so_far, color=_side_colour(report, side), label=f"{trace.title}, so far", **style)
    marked = table.kind != "rounding"
    heights = table[["so_far_a", "so_far_b"]].max(axis=1).bfill().ffill()  # what ran on one side has no height
    axes.scatter(
        table.place[marked],
        heights[marked],
        marker="x",
        s=26,
        color=INK,
        zorder=4,
        label="finding" if marked.any() else None,
    )
    backward = table.index[table.phase == "backward"]
    if len(backward):
        axes.axvline(backward[0] - 0.5, color=FAINT, lw=0.8)
        axes.annotate(" backward", (backward[0], 0.98), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set_yscale("log")
    drawn = table[["so_far_a", "so_far_b"]].replace(0, np.nan)
    if drawn.notna().any(axis=None):  # a bound far outside says nothing here
        axes.set_ylim(max(1e-17, drawn.min(axis=None) / 30), max(1e-4, drawn.max(axis=None) * 30))
    axes.set_xlabel("operation, in the order of the step")
    axes.set_ylabel("error against float64, relative")
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=4)
    end = table[["so_far_a", "so_far_b"]].max(axis=1).max()
    figure.suptitle(f"Worst finding: {report.kind}; the largest error against float64 is {end:.1e}", fontsize=10)
    settings = f"{report.a.title} and {report.b.title}"
    return Picture(figure, f"Relative error against float64 along the operations of a step, under {settings}.")


def _side_colour(report: Audit, side: str) -> str:
    trace, other = (report.a, report.b) if side == "a" else (report.b, report.a)
    same = colour(trace.setting) == colour(other.setting)
    return INK if same and side == "b" else colour(trace.setting)


# --- pictures ----------------------------------------------------------------------------------------


def predictions(run: Run, moments: int = 5, skip: int = 10) -> Picture:
    """What a trained PredNet saw coming: frame, next frame, prediction and difference, in rows.

    The frames are held-out ones, after `skip` frames for the state to settle.
    """
    coming, predicted = (tensor[:, 0] for tensor in run.predict())
    skip = min(skip, len(coming) // 2)
    chosen = np.linspace(skip, len(coming) - 1, moments).astype(int)
    seen, following, guess = coming[chosen - 1], coming[chosen], predicted[chosen]
    error = (guess - following).square().mean().item()
    still = (seen - following).square().mean().item()
    rows = {"frame t": seen, "frame t + 1": following, "predicted": guess, "difference": (guess - following).abs()}
    return _picture_rows(
        rows,
        [f"t = {t}" for t in chosen],
        f"Mean squared error of these predictions {error:.4f}; of repeating frame t {still:.4f}",
    )


def reconstructions(run: Run, count: int = 8) -> Picture:
    """What a trained autoencoder makes of held-out images: image, reconstruction, difference."""
    images, made = (tensor[:count] for tensor in run.predict())
    error = (made - images).square().mean().item()
    rows = {"image": images, "reconstructed": made, "difference": (made - images).abs()}
    return _picture_rows(rows, [""] * count, f"Mean squared error of these {len(images)} images: {error:.4f}")


def sample(run: Run) -> Picture:
    """What a run's trained network makes of the held-out part of its data."""
    return predictions(run) if run.data.sequential else reconstructions(run)


def frames(data: Data, count: int = 10, every: int = 30) -> Picture:
    """Frames of a data set in two rows, `every` so many frames."""
    import torch

    stream = next(iter(data.windows(count * every))).frames[::every][:count]
    pictures = torch.from_numpy(stream).float().div(255)
    half = (count + 1) // 2
    rows = {"": pictures[:half], " ": pictures[half:]}
    return _picture_rows(rows, [], f"{data.name}: every {every}th frame")


# --- devices -----------------------------------------------------------------------------------------


def roofline(frame: pd.DataFrame) -> Picture:
    """Measured rates against arithmetic intensity, under each device's measured ceilings.

    `frame` is from `gpulab.roofline`, or `gpulab.recorded_rooflines` with the column `machine`.
    """
    figure, (axes,) = _canvas(1, height=4.4)
    frame = frame.assign(machine=frame.get("machine", pd.Series("", frame.index)).fillna(""))
    intensities = np.logspace(-1.5, 3.5, 200)
    for (machine, setting), device in frame.groupby(["machine", "setting"], sort=False):
        tint, recorded = colour(setting), bool(machine)
        bandwidth = device[device.kind == "memory"].gigabytes_per_second.max()
        peak = device.gflops.max()
        label = f"{setting}, {machine} (recorded)" if recorded else f"{setting} (this machine)"
        axes.plot(intensities, np.minimum(bandwidth * intensities, peak), color=tint, lw=1.5, label=label)
        for kind, marker in (("matrix", "o"), ("network", "D"), ("memory", "s")):
            some = device[(device.kind == kind) & (device.flop > 0)]
            axes.scatter(
                some.intensity,
                some.gflops,
                marker=marker,
                s=28,
                color="white" if recorded else tint,
                edgecolors=tint,
                zorder=3,
            )
    for row in frame[frame.kind == "network"].drop_duplicates("operation").itertuples():
        axes.axvline(row.intensity, color=FAINT, lw=0.6, ls=":", zorder=0)
        axes.annotate(
            row.operation,
            (row.intensity, 0.01),
            xycoords=("data", "axes fraction"),
            rotation=90,
            fontsize=7,
            va="bottom",
            ha="right",
            color=INK,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity (flop per byte moved)")
    axes.set_ylabel("rate (Gflop/s)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    least = bounds(frame.assign(setting=frame.machine + frame.setting)).sort_values("reached").iloc[0]
    figure.suptitle(f"The least used: {least.operation} reaches {least.reached:.1%} of its ceiling", fontsize=10)
    return Picture(
        figure, "Roofline: measured rate against arithmetic intensity, with the ceilings of bandwidth and arithmetic."
    )


# --- the pieces --------------------------------------------------------------------------------------


def _canvas(panels: int, height: float, share_rows: bool = False) -> tuple[Figure, Sequence[Axes]]:
    with sns.axes_style("ticks"):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False, sharey=share_rows)[0]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _points(axes: Axes, x: Any, y: Any, setting: str, recorded: bool) -> None:
    tint = colour(setting)
    face = "white" if recorded else tint
    axes.scatter(x, y, s=30, color=face, edgecolors=tint, linewidths=1.2, zorder=3, alpha=0.9)


def _key(figure: Figure, frame: pd.DataFrame, line: bool = False) -> None:
    """A legend below the panels: what is hollow, or which colour is which setting."""
    from matplotlib.lines import Line2D

    if line:
        handles = [Line2D([], [], color=colour(setting), label=setting) for setting in _order(frame)]
    else:
        handles = []
        for recorded in sorted(frame.recorded.unique()):
            machines = ", ".join(sorted(frame[frame.recorded == recorded].machine.unique()))
            label = f"recorded on {machines}" if recorded else f"made here, on {machines}"
            face = "white" if recorded else FAINT
            handles.append(Line2D([], [], ls="", marker="o", markeredgecolor=INK, markerfacecolor=face, label=label))
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=4 if line else 1)


def _picture_rows(rows: dict[str, torch.Tensor], titles: Sequence[str], headline: str) -> Picture:
    count = max(len(pictures) for pictures in rows.values())
    height, width = next(iter(rows.values())).shape[-2:]
    cell = 7.2 / count
    figure = Figure(figsize=(7.2, cell * height / width * len(rows) + 0.6), layout="constrained")
    grid = figure.subplots(len(rows), count, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for (name, pictures), line in zip(rows.items(), grid, strict=True):
        for place, picture in enumerate(pictures):
            pixels = picture.permute(1, 2, 0).clamp(0, 1).numpy()
            line[place].imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
        line[0].text(-0.06, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    for axes, title in zip(grid[0], titles, strict=False):
        axes.set_title(title, fontsize=8)
    figure.suptitle(headline, fontsize=10)
    return Picture(figure, f"Rows of pictures: {', '.join(name.strip() or 'frames' for name in rows)}. {headline}.")


def _order(frame: pd.DataFrame) -> list[str]:
    """The settings of a frame, in the order of the palette, the unknown ones last."""
    known = [*CPU_COLOURS, *GPU_COLOURS]
    return sorted(frame.setting.unique(), key=lambda s: (known.index(s) if s in known else len(known), s))


def _metric_label(metric: str) -> str:
    names = {
        "final_loss": "final loss (mean squared error per frame)",
        "heldout_loss": "held-out loss (mean squared error per frame)",
        "loss": "loss (mean squared error per frame)",
    }
    return names.get(metric, metric)


def _loss_scale(axes: Axes) -> None:
    """Logarithmic where the losses span a factor of two or more, with plain numbers at the ticks."""
    low, high = axes.dataLim.intervaly
    if not low > 0 or high / low < 2:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if high / low < 30:
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if _leads(value) else ""))
    axes.tick_params(axis="y", which="minor", labelsize=8)


def _leads(value: float) -> bool:
    return f"{value:.0e}"[0] in "25"


def _floor(moved: pd.DataFrame) -> float:
    sizes = moved.difference.abs()
    smallest = sizes[sizes > 0].min()
    return float(smallest) / 10 if smallest == smallest else LEFT_OUT_BITS


def _flat(frame: pd.DataFrame, metric: str) -> bool:
    """Whether the spread along seeds' lines is under a tenth of the spread between seeds."""
    table = frame.pivot_table(index="seed", columns="setting", values=metric).astype(float)
    along = (table.max(axis=1) - table.min(axis=1)).max()
    return len(table) > 1 and bool(along < 0.1 * (table.max(axis=0) - table.min(axis=0)).max())


def _window_lengths(frame: pd.DataFrame) -> pd.DataFrame:
    from gpulab.store import read_record

    rows = [(row.id, read_record(Path(row.path))["configuration"]["window"]) for row in frame.itertuples()]
    return pd.DataFrame(rows, columns=["id", "frames_per_window"])
