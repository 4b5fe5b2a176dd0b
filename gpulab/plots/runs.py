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
    """Draw the final loss of each seed under each setting; thin lines join the same seed.

    Filled points were made here, hollow ones recorded. How many runs of a setting diverged stands above it. Runs that
    repeat another one (`rerun` above 0) are left out.

    Args:
        frame: Runs of one experiment, profile and protocol from `gpulab.runs` or `gpulab.recorded_runs`, with the
            columns `experiment`, `setting`, `seed`, `rerun`, `status`, `final_loss` and `recorded`, and `profile`,
            `frames`, `protocol`, `options` and `machine` where there are any.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: Where the frame mixes experiments, profiles or protocols.

    Examples:
        >>> import gpulab as gl
        >>> runs = gl.recorded_runs()
        >>> shown = runs[(runs.experiment == "autoencoder") & (runs.profile == "quick") & (runs.loader == "window")]
        >>> picture = gl.plots.losses(shown)
        >>> print(picture.alt.partition(". ")[0])
        The final loss of each seed: CPU; CPU, one thread; GPU, no TF32; GPU, TF32; GPU, no cuDNN; GPU, deterministic
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
        position = runs.place.iloc[0] + (0.15 if recorded and not frame.recorded.all() else 0.0)
        style.points(axes, np.full(len(runs), position), runs.final_loss, style.colour(setting), recorded, alpha=0.9)
        if diverged := int((runs.status == "diverged").sum()):
            top = (position, 0.98)
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
    """Draw how far each level of a verdict, such as each setting, moves each seed's loss, and how far seeds are apart.

    A row for each level has the differences of the same seed from the reference; the largest stands beside the row. The
    last row has the differences between seeds under the reference. All are on one linear scale, with the margin as a
    band. Runs of the reference that were repeated have a row of their own.

    Args:
        verdict: From `gpulab.verdict`.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> cpu = pd.DataFrame({"setting": "cpu", "seed": range(6), "final_loss": [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]})
        >>> cuda = cpu.assign(setting="cuda", final_loss=cpu.final_loss + 0.01)
        >>> picture = gl.plots.differences(gl.verdict(pd.concat([cpu, cuda])))
        >>> print(picture.alt.partition(". ")[0])
        Change of final_loss against CPU: GPU; and between seeds
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
        note = f"largest {largest:.2g}" if largest > 0 else "exactly the same" if largest == 0 else "no pair"
        rows.append(style.Row(called[level], shown, tints.get(level, tints[reference]), hollow, note))
    levels = [row.name for row in rows]
    reference_name = called[reference]
    rows.append(style.Row("one seed against another", (), INK, words=f"standard deviation {verdict.between_seeds:.2g}"))
    unit = style.metric_label(metric, verdict.runs.get("experiment", ()))
    label = f"change of the same seed against {reference_name}: {unit}"
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
    alt = f"Change of {metric} against {reference_name}: {'; '.join(levels)}; and between seeds."
    return style.finished(figure, headline, alt, keys)


def curves(
    histories: pd.DataFrame, baseline: float | None = None, baseline_label: str = "", factor: str = "setting"
) -> Picture:
    """Draw the loss of every run while it learns, a thin line each, and as a thick line the median over the seeds.

    The lines are smoothed: each point is the mean of the last sixtieth of the run's windows up to there. Runs that
    repeat another one (`rerun` above 0) are left out.

    Args:
        histories: From `gpulab.store.history`, of one experiment, with the columns `id`, `experiment`, `seed`, `rerun`,
            `frames_seen`, `loss` and the factor's.
        baseline: A loss to compare with, drawn as a dotted line; None for none.
        baseline_label: What to call it.
        factor: The column that the colours stand for: `setting`, or another one such as `loader`.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import gpulab as gl
        >>> runs = gl.recorded_runs()
        >>> shown = runs[(runs.experiment == "autoencoder") & (runs.profile == "quick") & (runs.loader == "window")]
        >>> picture = gl.plots.curves(gl.store.history(shown))
        >>> print(picture.alt.partition(". ")[0])
        Loss against frames seen, one line for each of 60 runs, coloured by setting
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
    x_label = "frames seen" if histories.experiment.iloc[0] == "prednet" else "images seen"
    axes.set(xlabel=x_label, ylabel=style.metric_label("loss", histories.experiment))
    last = histories.groupby("id").loss.last()
    counts = f"{len(levels)} {factor}{'s' if len(levels) > 1 else ''} × {histories.seed.nunique()} seeds"
    headline = f"{counts}: the runs end {last.max() / last.min():.1f}-fold apart"
    if len(levels) == 2 and middle.min() > 0:  # neither diverged
        low, high = sorted(levels, key=middle.get)
        times = middle[high] / middle[low]
        headline = f"The median curve ends {times:.2g} times as high for {called[high]} as for {called[low]}"
    alt = f"Loss against frames seen, one line for each of {len(last)} runs, coloured by {factor}."
    return style.finished(figure, headline, alt)
