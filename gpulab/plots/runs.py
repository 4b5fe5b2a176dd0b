"""Runs under several settings: their losses, how they came about, and what a setting changed."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.ticker import MaxNLocator

from gpulab.plots import style
from gpulab.plots.names import AGAIN, names
from gpulab.plots.style import FAINT, INK, Look
from gpulab.report import Picture
from gpulab.stats.pairs import check_one_protocol
from gpulab.stats.verdicts import Verdict

SMALL = 0.01  # a share below which one counts in parts


def losses(frame: pd.DataFrame) -> Picture:
    """Each seed's loss under each setting, the same seeds joined by thin lines.

    The frame is from `gpulab.runs` or `gpulab.recorded_runs`; `UsageError` where it mixes experiments, profiles or
    protocols.
    """
    check_one_protocol(frame)
    frame = frame[frame.rerun == 0].astype({"final_loss": float})
    order = style.setting_order(frame)
    called = names(order)
    frame["place"] = frame.setting.map(order.index)
    figure, (axes,) = style.canvas(1, height=3.6)
    for _, seed in frame.drop_duplicates(["setting", "seed"]).sort_values("place").groupby("seed"):
        axes.plot(seed.place, seed.final_loss, color=FAINT, lw=0.7, zorder=1)
    for (setting, recorded), runs in frame.groupby(["setting", "recorded"]):
        place = runs.place.iloc[0] + (0.15 if recorded and not frame.recorded.all() else 0.0)
        style.points(axes, np.full(len(runs), place), runs.final_loss, style.colour(setting), recorded, alpha=0.9)
        if diverged := int((runs.status == "diverged").sum()):
            top = (place, 0.98)
            axes.annotate(f"{diverged} diverged", top, xycoords=("data", "axes fraction"), ha="center", va="top")
    style.loss_scale(axes)
    axes.set_xticks(range(len(order)), [words.replace(", ", "\n") for words in called.values()], fontsize=8)
    axes.set(xlim=(-0.6, len(order) - 0.4), ylabel=style.metric_label("final_loss", frame.experiment))
    by_setting = frame.groupby("setting").final_loss
    headline = f"From seed to seed the loss varies up to {(by_setting.max() / by_setting.min()).max():.1f}-fold"
    wide = frame.pivot_table(index="seed", columns="setting", values="final_loss")
    along_lines, between_seeds = (wide.max(axis=axis) - wide.min(axis=axis) for axis in (1, 0))
    if len(wide) > 1 and along_lines.max() < 0.1 * between_seeds.max():
        headline += "; along a line it hardly moves"
    alt = f"The final loss of each seed: {'; '.join(called.values())}. The same seeds joined by lines."
    return style.finished(figure, headline, alt, style.origin_keys(frame), columns=1)


def differences(verdict: Verdict) -> Picture:
    """How far each level of a verdict, such as each setting, moves each seed's loss, beside how far seeds are apart.

    On one linear scale, with the margin as a band. The largest change stands beside its row.
    """
    factor, metric, reference = verdict.factor, verdict.metric, verdict.reference
    again = verdict.reruns.assign(**{factor: f"{reference}{AGAIN}"})
    pairs = pd.concat([verdict.pairs, again], ignore_index=True)
    tints = style.level_colours(factor, [reference, *verdict.table[factor]])
    called = names([reference, *verdict.table[factor], *again[factor].unique()], factor)
    hollow = bool(style.is_recorded(verdict.runs).all())
    rows = []
    for level in [*verdict.table[factor], *again[factor].unique()]:
        shown = pairs.difference[pairs[factor] == level].dropna().astype(float)
        largest = shown.abs().max()
        said = f"largest {largest:.2g}" if largest > 0 else "exactly the same" if largest == 0 else "no pair"
        rows.append(style.Row(called[level], shown, tints.get(level, tints[reference]), hollow, said))
    levels = [row.name for row in rows]
    usual = called[reference]
    rows.append(style.Row("one seed against another", (), INK, words=f"standard deviation {verdict.between_seeds:.2g}"))
    unit = style.metric_label(metric, verdict.runs.get("experiment", ()))
    label = f"change of the same seed against {usual}: {unit}"
    figure, axes = style.rows_of_points(rows, label, reference=0)
    base = verdict.runs[verdict.runs[factor] == reference][metric].to_numpy(float)
    between = (base[:, None] - base)[~np.eye(len(base), dtype=bool)]
    axes.scatter(between, np.full(len(between), len(levels)), color=INK, s=40, alpha=0.5, marker="|", zorder=3)
    keys: list[Artist] = [*style.origin_keys(verdict.runs)]
    margin = verdict.table.margin.max()
    if margin > 0:
        keys.append(style.margin_band(axes, margin))
    axes.xaxis.set_major_locator(MaxNLocator(6, symmetric=True))
    headline = f"The {factor} moves a seed by up to {verdict.ratio:.2g} times the spread between seeds"
    if verdict.ratio == 0:
        headline = f"The {factor} moves no seed by a digit"
    elif verdict.ratio < SMALL:
        headline = (
            f"The {factor} moves a seed by at most one part in {1 / verdict.ratio:,.0f} of the spread between seeds"
        )
    if np.isnan(verdict.ratio):
        headline = "One seed has no spread to compare with"
    alt = f"Change of {metric} against {usual}: {'; '.join(levels)}; and between seeds."
    return style.finished(figure, headline, alt, keys)


def curves(
    histories: pd.DataFrame, baseline: float | None = None, baseline_label: str = "", factor: str = "setting"
) -> Picture:
    """The loss of every run while it learns, a thin line each, and the median over seeds; reruns are left out.

    The histories of one experiment are from `gpulab.store.history`. A `baseline` is a loss that is drawn as a dotted
    line, with its label. Colours stand for a `factor`: `setting` or `loader`.
    """
    histories = histories[histories.rerun == 0]
    figure, (axes,) = style.canvas(1, height=3.6)
    levels = style.setting_order(histories) if factor == "setting" else list(histories[factor].unique())
    tints = style.level_colours(factor, levels)

    def smooth(losses: pd.Series) -> pd.Series:
        return losses.rolling(max(1, len(losses) // 60), min_periods=1).mean()

    medians = histories.groupby([factor, "frames_seen"], as_index=False).loss.median()
    medians["loss"] = medians.groupby(factor).loss.transform(smooth)
    runs = histories.assign(loss=histories.groupby("id").loss.transform(smooth))
    style.run_lines(axes, runs, "frames_seen", "loss", [factor, "id"], tints, lw=0.6, alpha=0.5)
    style.run_lines(axes, medians, "frames_seen", "loss", [factor], tints, lw=2)
    middle = medians.groupby(factor).loss.last()
    called = names(levels, factor)
    ends: list[tuple[str, float, Look]] = []
    for level, loss in middle.items():
        ends.append((called[level], loss, {"color": tints[level], "lw": 2}))
    if baseline is not None:
        axes.axhline(baseline, color=INK, lw=1, ls=":")
        ends.append((baseline_label, baseline, {"color": INK, "lw": 1, "ls": ":"}))
    style.loss_scale(axes)
    style.end_labels(axes, ends)
    seen = "frames seen" if histories.experiment.iloc[0] == "prednet" else "images seen"
    axes.set(xlabel=seen, ylabel=style.metric_label("loss", histories.experiment))
    last = histories.groupby("id").loss.last()
    counts = f"{len(levels)} {factor}{'s' if len(levels) > 1 else ''} × {histories.seed.nunique()} seeds"
    headline = f"{counts}: the runs end {last.max() / last.min():.1f}-fold apart"
    if len(levels) == 2 and middle.min() > 0:  # neither diverged
        low, high = sorted(levels, key=middle.get)
        times = middle[high] / middle[low]
        headline = f"The median curve ends {times:.2g} times as high for {called[high]} as for {called[low]}"
    alt = f"Loss against frames seen, one line for each of {len(last)} runs, coloured by {factor}."
    return style.finished(figure, headline, alt)
