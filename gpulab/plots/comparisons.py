"""Runs under several settings: their losses, how they came about, and what a setting changed."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from gpulab.plots.style import FAINT, INK, Picture, canvas, colour, key, loss_scale, metric_label, points, setting_order
from gpulab.stats.verdicts import check_one_protocol, verdict
from gpulab.training.store import history

LEFT_OUT_BITS = 1e-12  # where a difference of exactly nothing is drawn on a logarithmic axis


def losses(frame: pd.DataFrame, metric: str = "final_loss", title: str | None = None) -> Picture:
    """Each seed's loss under each setting, the same seeds joined by thin lines.

    `frame` is one from `gpulab.runs` or `gpulab.recorded_runs`, of one experiment and profile.
    """
    check_one_protocol(frame)
    frame = frame[frame.rerun == 0]
    order = setting_order(frame)
    figure, (axes,) = canvas(1, height=3.6)
    for _, seed in frame.drop_duplicates(["setting", "seed"]).groupby("seed"):
        places = [order.index(setting) for setting in seed.setting]
        in_order = np.argsort(places)
        axes.plot(np.array(places)[in_order], seed[metric].to_numpy(float)[in_order], color=FAINT, lw=0.7, zorder=1)
    for (setting, recorded), group in frame.groupby(["setting", "recorded"]):
        values = group[metric].astype(float)
        place = order.index(setting) + (0.15 if recorded and not frame.recorded.all() else 0.0)
        points(axes, np.full(len(values), place), values, setting, bool(recorded))
        diverged = int((group.status == "diverged").sum())
        if diverged:
            axes.annotate(
                f"{diverged} diverged", (place, 0.98), xycoords=("data", "axes fraction"), ha="center", va="top"
            )
    loss_scale(axes)
    axes.set_xticks(range(len(order)), [re.sub("[:=,]", "\n", setting) for setting in order], fontsize=8)
    axes.set_xlim(-0.6, len(order) - 0.4)
    axes.set_ylabel(metric_label(metric))
    spread = frame.groupby("setting")[metric].agg(["min", "max"]).astype(float)
    times = (spread["max"] / spread["min"]).max()
    headline = f"From seed to seed the loss varies up to {times:.1f}-fold"
    figure.suptitle(title or headline + ("; along a line it hardly moves" if _flat(frame, metric) else ""), fontsize=10)
    key(figure, frame)
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
    figure, (axes,) = canvas(1, height=1.3 + 0.42 * (len(rows) + 1))
    floor = _floor(moved)
    for place, setting in enumerate(rows):
        values = moved[moved.setting == setting].difference.abs().to_numpy(float)
        shown = np.where(values > 0, values, floor)
        points(axes, shown, np.full(len(shown), place), setting.removesuffix(" again"), bool(frame.recorded.all()))
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
    key(figure, frame)
    return Picture(
        figure,
        f"Change of {metric} against {seen.reference} for {', '.join(rows)}, and between seeds, on a logarithmic axis.",
    )


def curves(frame: pd.DataFrame, baseline: float | None = None, baseline_label: str = "") -> Picture:
    """The loss of every run while it learns, a thin line each; a `baseline` as a reference line."""
    told = history(frame[frame.rerun == 0])
    per_window = {row.id: row.frames_per_window for row in _window_lengths(frame).itertuples()}
    figure, (axes,) = canvas(1, height=3.6)
    for name, run in told.groupby("id"):
        smooth = run.loss.rolling(max(1, len(run) // 60), min_periods=1).mean()
        frames_seen = (run.window + 1) * per_window[name]
        axes.plot(frames_seen, smooth, color=colour(run.setting.iloc[0]), lw=0.9, alpha=0.7)
    if baseline is not None:
        axes.axhline(baseline, color=INK, lw=1, ls=":")
        axes.annotate(baseline_label, (0.01, baseline), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    loss_scale(axes)
    axes.set_xlabel("frames seen" if told.experiment.iloc[0] == "prednet" else "images seen")
    axes.set_ylabel(metric_label("loss"))
    seeds = told.seed.nunique()
    apart = told.groupby("id").loss.last()
    figure.suptitle(
        f"{told.setting.nunique()} settings × {seeds} seeds: the runs end {apart.max() / apart.min():.1f}-fold apart",
        fontsize=10,
    )
    key(figure, frame, line=True)
    return Picture(
        figure, f"Loss against frames seen, one line for each of {told.id.nunique()} runs, coloured by setting."
    )


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
    from gpulab.training.store import record_of

    rows = [(row.id, record_of(row)["configuration"]["window"]) for row in frame.itertuples()]
    return pd.DataFrame(rows, columns=["id", "frames_per_window"])
