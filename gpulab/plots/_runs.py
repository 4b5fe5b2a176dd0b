"""Figures of runs under several settings: final losses, learning curves, and the verdict."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Hashable, Iterable

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.plots._drawing import draw_registered
from gpulab.plots.theme import FAINT, INK, RIGHT_OF_AXES, Style
from gpulab.stats._pairs import check_one_protocol
from gpulab.stats._verdict import Verdict
from gpulab.training._profiles import FINAL_LOSS_DIVISOR
from gpulab.wording import RERUN_SUFFIX, Level, TextByLevel, label_levels, metric_label

BETWEEN_SEEDS_LABEL = "one seed against another"
# The words for each decision of a verdict in a title.
TITLE_WORDS = {
    "different": "the means differ",
    "different but negligible": "the means differ by less than the margin",
    "equivalent": "no difference beyond the margin",
    "inconclusive": "too few seeds to decide",
}
MARGIN_STYLE: Style = {"color": FAINT, "alpha": 0.22, "lw": 0, "zorder": 0}  # the band of a margin
# How far the intervals of a level are drawn below its row; rows have the distance 1.
INTERVAL_OFFSET = 0.33


@theme.with_theme
def losses(frame: pd.DataFrame) -> Picture:
    """Draw the final loss of each seed under each setting; thin lines join points of the same seed.

    Filled points are runs made on this machine, and hollow points are recorded runs. Diverged runs
    are drawn as crosses at the right edge. Runs that repeat another run (`rerun` above 0) are left
    out.

    Args:
        frame: Runs of one experiment, profile and protocol from `gpulab.runs` or
            `gpulab.recorded_runs`. Required columns are `experiment`, `setting`, `seed`, `rerun`,
            `status`, `final_loss` and `recorded`. The columns `profile`, `frames`, `protocol`,
            `options` and `machine` are used if they exist.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: If the frame mixes experiments, profiles or protocols.

    Examples:
        >>> import gpulab as gl
        >>> runs = gl.recorded_runs()
        >>> shown = runs[
        ...     (runs.experiment == "autoencoder")
        ...     & (runs.profile == "quick")
        ...     & (runs.loader == "window")
        ... ]
        >>> picture = gl.plots.losses(shown)
        >>> print(picture.alt.partition(". ")[0])
        The final loss of each seed: CPU; CPU, one thread; GPU, no TF32; ...
    """
    check_one_protocol(frame)
    frame, tints = theme.name_levels(frame[frame.rerun == 0].astype({"final_loss": float}))
    figure, (axes,) = theme.canvas(height=1.6 + 0.4 * len(tints))
    _draw_seeds(axes, frame, metric="final_loss", factor="name", block="seed", tints=tints)
    # The largest loss divided by the smallest: under one setting, and for one seed.
    losses_by_setting = frame.groupby("setting").final_loss
    losses_by_seed = frame.groupby("seed").final_loss
    ratio_between_seeds = (losses_by_setting.max() / losses_by_setting.min()).max()
    ratio_between_settings = (losses_by_seed.max() / losses_by_seed.min()).max()
    headline = f"The loss varies up to {ratio_between_seeds:.1f}-fold between seeds"
    headline += f", and by at most {100 * (ratio_between_settings - 1):.2g} % between settings"
    alt = f"The final loss of each seed: {'; '.join(tints)}. The same seeds joined by lines."
    return theme.finish_figure(figure, headline, alt, theme.origin_keys(frame))


@theme.with_theme
def curves(
    histories: pd.DataFrame,
    baseline: float | None = None,
    baseline_label: str = "",
    factor: str = "setting",
) -> Picture:
    """Draw the loss of every run as a thin line, and the median over the seeds as a thick one.

    The lines are smoothed: each point is a moving mean over a sixtieth of the run's windows. Two
    levels share a panel; three or more have a panel each. Runs that repeat another run (`rerun`
    above 0) are left out. The title compares final losses, which are means over the last fifth of a
    run, as in `gpulab.train`.

    Args:
        histories: A data frame from `gpulab.store.history`, of one experiment. Required columns are
            `id`, `experiment`, `seed`, `rerun`, `frames_seen`, `loss` and the factor.
        baseline: A loss to compare with, drawn as a dotted line; None for no line.
        baseline_label: The name of the baseline in the legend.
        factor: The column that determines the colours: `setting`, or another one such as `loader`.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import gpulab as gl
        >>> runs = gl.recorded_runs()
        >>> shown = runs[
        ...     (runs.experiment == "autoencoder")
        ...     & (runs.profile == "quick")
        ...     & (runs.loader == "window")
        ... ]
        >>> picture = gl.plots.curves(gl.store.history(shown))
        >>> print(picture.alt.partition(". ")[0])
        Loss against frames seen, one line for each of 60 runs, coloured by setting
    """
    histories, tints = theme.name_levels(histories[histories.rerun == 0], factor)
    smooth = histories.groupby("id").loss.transform(
        lambda losses: losses.rolling(max(1, len(losses) // 60), min_periods=1).mean()
    )
    panels = [[name] for name in tints] if len(tints) > 2 else [[*tints]]  # the levels in each
    rows = -(-len(panels) // 2)  # two panels in a row; the division rounds up
    figure, panel_axes = theme.canvas(
        min(2, len(panels)), height=1.0 + 2.4 * rows, rows=rows, sharex=True, sharey=True
    )
    # An odd number of panels leaves one place empty. The panel above it shows tick labels instead.
    for axes in panel_axes[len(panels) :]:
        axes.remove()
    for axes, panel_names in zip(panel_axes, panels, strict=False):
        style: Style = {
            "x": "frames_seen",
            "y": "loss",
            "hue": "name",
            "palette": tints,
            "errorbar": None,
            "ax": axes,
        }
        lines = histories.assign(loss=smooth)[histories.name.isin(panel_names)]
        sns.lineplot(lines, units="id", estimator=None, lw=0.6, alpha=0.5, legend=False, **style)
        sns.lineplot(lines, estimator="median", lw=2, **style)
        if baseline is not None:
            axes.axhline(baseline, color=INK, lw=1, ls=":", label=baseline_label)
        theme.log_scale(axes.yaxis)
        axes.xaxis.set_major_formatter("{x:,g}")
        x_label = "frames seen" if histories.experiment.iloc[0] == "prednet" else "images seen"
        axes.set(xlabel=x_label, ylabel=metric_label("loss", histories.experiment))
        axes.label_outer()
    has_empty_place = len(panels) > 1 and len(panels) % 2 == 1
    if has_empty_place:
        axes_above = panel_axes[len(panels) - 2]
        axes_above.xaxis.set_tick_params(labelbottom=True)
        axes_above.set_xlabel(x_label)
        axes_above.xaxis.label.set_visible(True)
    # The final loss of each run, and the mean over the seeds for each level.
    final = histories.groupby(["name", "id"]).loss.agg(
        lambda losses: losses.tail(max(1, len(losses) // FINAL_LOSS_DIVISOR)).mean()
    )
    means = final.groupby("name").mean().sort_values()
    headline = (
        f"{histories.seed.nunique()} seeds: final losses differ up to"
        f" {final.max() / final.min():.1f}-fold"
    )
    if len(tints) == 2 and means.min() > 0:
        times = means.iloc[1] / means.iloc[0]
        low, high = means.index
        headline = (
            f"On average, the final loss is {times:.3g} times as high for {high} as for {low}"
        )
    alt = f"Loss against frames seen, one line for each of {len(final)} runs, coloured by {factor}."
    return theme.finish_figure(figure, headline, alt, columns=3)


@draw_registered.register
@theme.with_theme
def estimation(verdict: Verdict, width: float = theme.PAGE) -> Picture:
    """Draw an estimation plot of a verdict: every seed, and the paired differences.

    The left panel shows the metric of each seed under each level. Thin lines join the same seed,
    and diverged runs are crosses at the right edge. The right panel shows the differences from the
    reference, in standard deviations between seeds (in the metric's units if there is no such
    spread). It also shows their mean with its interval, the interval that decides equivalence as a
    thicker line, and the margin as a band. In a narrow figure the second panel is below the first.
    Source: Gardner, Altman 1986, *Confidence intervals rather than P values* (BMJ 292).
    """
    factor = verdict.factor
    metric = verdict.metric
    table = verdict.table
    levels = [verdict.reference, *table[factor]]
    level_names = label_levels(levels, factor)
    tints = theme.level_colours(factor, levels)
    is_narrow = width < theme.PAGE
    if is_narrow:
        figure, (left, right) = theme.canvas(
            1, height=3.4 + 0.9 * len(levels), rows=2, width=width, sharey=True
        )
    else:
        figure, (left, right) = theme.canvas(2, height=1.9 + 0.4 * len(levels), sharey=True)
    _draw_seeds(left, verdict.runs, metric, factor, verdict.block, tints)
    unit = verdict.between_seeds if verdict.between_seeds > 0 else 1.0
    is_in_sds = unit != 1
    _draw_differences(right, verdict, verdict.pairs, tints, unit)
    _draw_intervals(right, verdict, unit)
    margin = table.margin.max()
    if not math.isnan(margin):  # The axis is widened so that the whole margin is visible.
        sd = f"±{margin / unit:.2g} sd, " if is_in_sds else ""
        right.axvspan(
            -margin / unit, margin / unit, label=f"margin, {sd}±{margin:.2g}", **MARGIN_STYLE
        )
        half_range = max(*np.abs(right.get_xlim()), 1.6 * margin / unit)
        right.set_xlim(-half_range, half_range)
    right.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    unit_words = f"sd between {verdict.block}s" if is_in_sds else left.get_xlabel()
    right.set_xlabel(f"difference ({unit_words})")
    alt = f"{metric} of each {verdict.block} under {'; '.join(level_names.values())}"
    alt += (
        f"; and the differences from {level_names[verdict.reference]} with intervals and the"
        " margin."
    )
    title = textwrap.fill(verdict_title(verdict), 46 if is_narrow else 200)
    keys = theme.origin_keys(verdict.runs)
    return theme.finish_figure(figure, title, alt, keys, columns=1 if is_narrow else 2)


def verdict_title(verdict: Verdict) -> str:
    """Return the title of a verdict: the decision, or for how many levels each decision holds.

    >>> losses = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5]
    >>> runs = pd.DataFrame(
    ...     {"setting": ["cpu"] * 6 + ["cuda"] * 6, "seed": [*range(6)] * 2, "final_loss": losses}
    ... )
    >>> from gpulab.stats import verdict
    >>> verdict_title(verdict(runs))
    'GPU, against CPU: the means differ'
    """
    reference, *levels = label_levels(
        [verdict.reference, *verdict.decisions], verdict.factor
    ).values()
    if not levels:
        return f"Against {reference}: nothing to compare with"
    if len(levels) == 1:
        return f"{levels[0]}, against {reference}: {TITLE_WORDS[verdict.decision]}"
    decided = verdict.table.decision.value_counts()
    clauses = [
        f"{words} for {decided[decision]} of {len(levels)}"
        for decision, words in TITLE_WORDS.items()
        if decision in decided
    ]
    return f"Against {reference}: {', '.join(clauses)}"


def name_same_bits(verdict: Verdict) -> dict[Level, str]:
    """Return a name for each level; levels that give every seed the same bits share a name.

    >>> runs = pd.DataFrame(
    ...     {
    ...         "setting": ["cpu"] * 2 + ["cuda:tf32=off"] * 2 + ["cuda:tf32=on"] * 2,
    ...         "seed": [0, 1] * 3,
    ...         "final_loss": [1.0, 2.0, 1.1, 2.1, 1.1, 2.1],
    ...         "weights": ["a", "b", "c", "d", "c", "d"],
    ...     }
    ... )
    >>> from gpulab.stats import verdict
    >>> name_same_bits(verdict(runs, reference="cpu"))
    {'cuda:tf32=off': 'GPU: no TF32 / TF32'}
    """
    factor = verdict.factor
    names = label_levels(verdict.table[factor], factor)
    groups: dict[Hashable, list[Level]] = {}
    for level in names:
        runs = verdict.runs[verdict.runs[factor] == level].sort_values(verdict.block)
        has_weights = "weights" in runs and runs.weights.notna().all()
        # Levels with the same digests of weights have the same key. A level without weights has a
        # key of its own.
        groups.setdefault(tuple(runs.weights) if has_weights else level, []).append(level)
    return {
        levels[0]: _join_names([names[level] for level in levels]) for levels in groups.values()
    }


def _join_names(names: list[str]) -> str:
    """Join the names of settings, writing a device that they share only once."""
    devices = {name.partition(", ")[0] for name in names}
    if len(names) == 1 or len(devices) > 1 or not all(", " in name for name in names):
        return " / ".join(names)
    (device,) = devices
    return f"{device}: {' / '.join(name.partition(', ')[2] for name in names)}"


@theme.with_theme
def differences(verdict: Verdict) -> Picture:
    """Draw how far each level changes the loss of a seed, compared with the spread between seeds.

    Each level has a row with the absolute differences of each seed from the reference; the largest
    difference is written next to the row. Levels that give every seed the same bits share a row.
    The last row shows the differences between seeds under the reference. All rows share a
    logarithmic scale that includes zero. Differences within the margin, the grey band, are
    negligible. Repeated runs of the reference have their own row.

    Args:
        verdict: From `gpulab.verdict`.

    Returns:
        A `gpulab.plots.Picture`.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> cpu = pd.DataFrame(
        ...     {"setting": "cpu", "seed": range(6), "final_loss": [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]}
        ... )
        >>> cuda = cpu.assign(setting="cuda", final_loss=cpu.final_loss + 0.01)
        >>> picture = gl.plots.differences(gl.verdict(pd.concat([cpu, cuda])))
        >>> print(picture.alt.partition(". ")[0])
        Change of final_loss against CPU: GPU; and between seeds
    """
    factor = verdict.factor
    metric = verdict.metric
    reference = verdict.reference
    reruns = verdict.reruns.assign(**{factor: f"{reference}{RERUN_SUFFIX}"})
    base = verdict.runs[verdict.runs[factor] == reference][metric].dropna().to_numpy(float)
    # The entries above the diagonal of all differences: each pair of seeds once.
    seed_differences = (base[:, None] - base)[np.triu_indices(len(base), 1)]
    blocks = range(len(seed_differences))
    seeds = pd.DataFrame(
        {factor: BETWEEN_SEEDS_LABEL, verdict.block: blocks, "difference": seed_differences}
    )
    changes = pd.concat([verdict.pairs, reruns, seeds], ignore_index=True)
    changes["difference"] = changes.difference.abs()
    shared_rows = name_same_bits(verdict)
    levels = [*shared_rows, *reruns[factor].unique(), BETWEEN_SEEDS_LABEL]
    changes = changes[changes[factor].isin(levels)]
    level_names = label_levels([reference, *levels], factor) | shared_rows
    figure, (axes,) = theme.canvas(height=1.7 + 0.4 * len(levels))
    tints = theme.level_colours(factor, levels) | {BETWEEN_SEEDS_LABEL: INK}
    _draw_differences(axes, verdict, changes, tints)
    smallest = changes.difference[changes.difference > 0].min()
    if smallest > 0:
        # The scale is linear below the power of ten under the smallest difference.
        axes.set_xscale("symlog", linthresh=10 ** np.floor(np.log10(smallest)))
        axes.xaxis.set_major_formatter(theme.power_of_ten)
    margin = verdict.table.margin.max()
    if margin > 0:
        axes.axvspan(0, margin, label=f"margin: up to ±{margin:.2g} is negligible", **MARGIN_STYLE)
    names_of_rows = [textwrap.fill(level_names[level], 34) for level in levels]
    axes.set_yticks(range(len(levels)), names_of_rows)
    unit = metric_label(metric, verdict.runs.get("experiment", ()))
    axes.set(
        ylim=(len(levels) - 0.4, -0.6),
        xlabel=f"change of the same seed against {level_names[reference]}: {unit}",
    )
    ratio = verdict.table.largest_difference.max() / (verdict.between_seeds or np.nan)
    headline = (
        f"The {factor} changes a seed's result by up to {ratio:.2g} times the spread between seeds"
    )
    if np.isnan(ratio):
        headline = "One seed has no spread to compare with"
    _reference, *compared, _between_seeds = level_names.values()
    alt = (
        f"Change of {metric} against {level_names[reference]}: {'; '.join(compared)}; and between"
        " seeds."
    )
    return theme.finish_figure(figure, headline, alt, theme.origin_keys(verdict.runs))


def _heights(frame: pd.DataFrame, factor: str, block: str, levels: Iterable[Level]) -> pd.Series:
    """Compute the height of each seed's point so that the seeds of a level spread over its row.

    A level has its position in `levels` as its height. Its seeds are spread evenly, in their order,
    over a band of 0.4 around this height.
    """
    seeds = frame.groupby(factor)[block]
    offset_in_row = (seeds.rank() - 0.5) / seeds.transform("size") - 0.5
    return frame[factor].map([*levels].index).astype(float) + 0.4 * offset_in_row


def _point_size(seeds: pd.Series) -> int:
    """Return the area of a point, which is smaller if there are more than 40 seeds."""
    return 20 if seeds.nunique() <= 40 else 5


def _draw_seeds(
    axes: Axes, runs: pd.DataFrame, metric: str, factor: str, block: str, tints: TextByLevel
) -> None:
    """Draw a row of seeds for each level, with thin lines that join the same seed.

    Diverged runs are crosses at the right edge.
    """
    runs = runs.assign(height=_heights(runs, factor, block, tints), tint=runs[factor].map(tints))
    diverged = runs.status == "diverged"
    converged = runs[~diverged]
    lines: Style = {
        "units": block,
        "estimator": None,
        "orient": "y",
        "color": FAINT,
        "lw": 0.5,
        "zorder": 1,
    }
    sns.lineplot(converged, x=metric, y="height", ax=axes, **lines)
    theme.draw_points(
        axes,
        converged[metric],
        converged.height,
        converged.tint,
        theme.is_recorded(converged),
        s=_point_size(runs[block]),
    )
    if diverged.any():
        cross_style: Style = {
            "transform": axes.get_yaxis_transform(),  # x is a share of the axes' width
            "label": "diverged",
            "marker": "x",
            "zorder": 4,
        }
        axes.scatter(
            [0.97] * sum(diverged), runs.height[diverged], color=runs.tint[diverged], **cross_style
        )
        axes.margins(x=0.12)  # room for the crosses
    # A metric with only the values 0 and 1 has ticks at integers.
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=set(converged[metric]) == {0, 1}))
    theme.log_scale(axes.xaxis, least=4)
    axes.set_yticks(
        range(len(tints)),
        [textwrap.fill(words, 22) for words in label_levels(tints, factor).values()],
    )
    axes.set(
        ylim=(len(tints) - 0.5, -0.5),
        xlabel=metric_label(metric, runs.get("experiment", ())),
        ylabel="",
    )


def _draw_differences(
    axes: Axes, verdict: Verdict, pairs: pd.DataFrame, tints: TextByLevel, unit: float = 1.0
) -> None:
    """Draw a row of differences for each level; write its decision and its largest difference.

    Differences are divided by `unit`. The text is to the right of the axes; the reference has none.
    """
    factor = verdict.factor
    pairs = pairs[pairs.difference.notna()]
    heights = _heights(pairs, factor, verdict.block, tints)
    is_hollow = theme.is_recorded(verdict.runs).all()
    axes.axvline(0, color=INK, lw=0.8, zorder=1)
    theme.draw_points(
        axes,
        pairs.difference / unit,
        heights,
        pairs[factor].map(tints),
        is_hollow,
        s=_point_size(pairs[verdict.block]),
    )
    for row, level in enumerate(tints):
        largest = (pairs.difference[pairs[factor] == level] / unit).abs().max()
        words = [
            verdict.decisions.get(level),
            f"largest {largest:.2g}" if largest else "exactly the same",
        ]
        if level != verdict.reference:
            axes.annotate(
                "\n".join(f" {word}" for word in words if word),
                (1, row),  # the right edge, at the height of the row
                fontsize=7,
                **RIGHT_OF_AXES,
            )


def _draw_intervals(axes: Axes, verdict: Verdict, unit: float) -> None:
    """Draw the mean difference of each level and its two intervals, below the level's row.

    A thin line shows the interval of the difference, and a thick line the interval of the test of
    equivalence. Means and intervals are divided by `unit`.
    """
    table = verdict.table
    rows = 1 + np.arange(len(table))  # row 0 belongs to the reference
    heights = rows + INTERVAL_OFFSET  # the axis points down
    equivalence_label = ""
    mean_label = "mean; too few seeds for an interval"
    if table.equivalent_low.notna().any():
        equivalence_label = (
            f"{100 * table.equivalent_confidence.iloc[0]:.3g}% interval: equivalent if within the"
            " margin"
        )
    if table.low.notna().any():
        mean_label = f"mean, {100 * table.confidence.iloc[0]:.3g}% interval"
    low = table.equivalent_low / unit
    high = table.equivalent_high / unit
    axes.hlines(heights, low, high, INK, lw=3.2, zorder=4, label=equivalence_label)
    # The interval need not be symmetric: its parts below and above the mean.
    half_widths = np.stack([table.difference - table.low, table.high - table.difference]) / unit
    style: Style = {
        "fmt": "D",
        "ms": 4,
        "color": INK,
        "mec": "white",
        "mew": 0.5,
        "elinewidth": 1,
        "zorder": 5,
    }
    axes.errorbar(table.difference / unit, heights, xerr=half_widths, label=mean_label, **style)
    axes.margins(x=0.08)
