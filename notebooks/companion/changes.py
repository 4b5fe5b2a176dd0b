"""Single changes of arithmetic, library or device, and their effect on networks that learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

import gpulab as gl
from companion.findings import listed
from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.settings import Setting
from gpulab.stats import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCE = "nothing"
AGAIN = "nothing (a second run)"
DRAWN = "weights drawn by the GPU"
DEVICE = "a CPU (one thread)"
# Rows of a figure that are not counted as changes: one changes nothing, and the other draws other
# weights, as another seed would.
YARDSTICKS = (AGAIN, DRAWN)
# The name of a change, by the part of a setting that differs from the reference.
_PARTS = {
    "deterministic=on": "deterministic",
    "cudnn=off": "without cuDNN",
    "autocast=bfloat16": "mixed precision",
    "precision=float64": "float64",
    "compile=inductor": "compilation",
    "emulate=tf32": "TF32, emulated",
    "order=split-4": "sums in four parts, emulated",
    "isa=avx2": "older instructions",
}
# The logarithmic axis of movements, in standard deviations between seeds, begins here, or at a
# smaller power of ten if a seed moves less.
SMALLEST_MOVE = 1e-5
_MOVE_TICKS = {1e-7: "$10^{-7}$", 1e-5: "$10^{-5}$", 1e-3: "0.001", 1e-1: "0.1", 1: "1"}
COLUMNS = ["experiment", "profile", "machine", "change", "decision"]
MIN_SEEDS = 6  # fewer pairs cannot show a difference at 5 %


def name_changes(runs: pd.DataFrame) -> pd.DataFrame:
    """Name what each run changes compared with the reference of its device.

    The references are `cuda:tf32=off` and `cpu:threads=1`.

    Args:
        runs: A table of `gpulab.runs` or `gpulab.recorded_runs`.

    Returns:
        A copy with the column `change`. It is "nothing" for the reference.

    Examples:
        >>> import gpulab as gl
        >>> runs = gl.recorded_runs("changes")
        >>> "TF32" in set(name_changes(runs).change)
        True
    """
    runs = runs.copy()
    runs["change"] = [_describe_setting(setting) for setting in runs.setting]
    again = (runs.change == REFERENCE) & (runs.rerun > 0)
    runs.loc[again, "change"] = AGAIN
    runs.loc[runs["flip"].notna(), "change"] = "one bit of one weight"
    runs.loc[runs.draws == "device", "change"] = DRAWN
    return runs


def add_device(runs: pd.DataFrame) -> pd.DataFrame:
    """Add the device itself to the changes of a GPU.

    Args:
        runs: The result of `name_changes` with runs on one kind of GPU and one kind of CPU.

    Returns:
        The runs, and once more the runs under the reference of the CPU, as a change of the GPU:
        with the change "a CPU (one thread)" and in the group of the GPU's machine, where
        `judge_changes` compares them with the reference of the GPU. Networks that have no runs on
        the CPU are unchanged.

    Examples:
        >>> import gpulab as gl
        >>> runs = gl.recorded_runs("changes")
        >>> runs = add_device(name_changes(runs[~runs.machine.str.contains("EPYC")]))
        >>> runs[runs.change == "a CPU (one thread)"].machine.unique().tolist()
        ['NVIDIA H200']
    """
    (gpu,) = runs.machine[runs.device == "cuda"].unique()
    on_cpu = runs[(runs.device == "cpu") & (runs.change == REFERENCE)]
    return pd.concat([runs, on_cpu.assign(change=DEVICE, machine=gpu)], ignore_index=True)


def _describe_setting(text: str) -> str:
    """Name the parts in which a setting differs from the reference of its device."""
    kind, _, options = str(Setting.parse(text)).partition(":")
    parts = [part for part in options.split(",") if part]
    changes = [words for part, words in _PARTS.items() if part in parts]
    if kind == "cuda" and "tf32=on" in parts:
        changes.insert(0, "TF32")
    if kind == "cpu" and "threads=1" not in parts:
        changes.insert(0, "more threads")
    return " + ".join(changes) or REFERENCE


def judge_changes(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compare each change with the reference on the same seeds, for each network and machine.

    Changes with fewer than six seeds are left out, because they cannot show a difference. Seeds
    that are missing for one change are left out for this change alone. If seeds were added under a
    second plan, the comparison is corrected for two looks at them.

    Args:
        runs: The result of `name_changes`, with the column `registered`, the plan of each run.

    Returns:
        A table with a row for each change, in which `mean`, `low`, `high` and `margin` are in
        standard deviations between the seeds of the reference, as are `median_move` and
        `largest_move` of single seeds; and a table with a row for each seed, whose `move` is the
        size of its change. Both have the columns `experiment`, `profile`, `machine` and `change`.
    """
    tables = []
    seeds = []
    for names, group in runs.groupby(["experiment", "profile", "machine"], sort=False):
        counts = group.groupby("change").seed.nunique()
        compared = group[group.change.isin(counts.index[counts >= MIN_SEEDS])]
        if compared.change.nunique() < 2 or REFERENCE not in set(compared.change):
            continue
        # Each plan was written after the runs of the one before it had been looked at.
        plans = max(1, compared.registered.nunique())
        verdict = compare_changes(compared, looks=plans)
        scale = verdict.between_seeds
        labels = dict(zip(("experiment", "profile", "machine"), names, strict=True))
        pairs = verdict.pairs.assign(move=verdict.pairs.difference.abs() / scale, **labels)
        moves = pairs.groupby("change").move.agg(median_move="median", largest_move="max")
        table = verdict.table.set_index("change").join(moves).reset_index().assign(**labels)
        table[["mean", "low", "high", "margin"]] = (
            table[["difference", "low", "high", "margin"]] / scale
        )
        tables.append(table)
        seeds.append(pairs)
    if not tables:
        return pd.DataFrame(columns=COLUMNS), pd.DataFrame(columns=[*COLUMNS, "move"])
    return pd.concat(tables, ignore_index=True), pd.concat(seeds, ignore_index=True)


def compare_changes(runs: pd.DataFrame, looks: int = 1) -> Verdict:
    """Compare the changes of one network and machine with the reference by `gpulab.verdict`.

    `gpulab.verdict` averages repeated runs of a seed. Here the second run of the reference is a
    separate level, so that it can be compared with the first.
    """
    columns = ["change", "seed", "status", "final_loss", "weights"]
    return gl.verdict(runs[columns], factor="change", reference=REFERENCE, looks=looks)


def count_within(table: pd.DataFrame) -> tuple[int, int]:
    """Count the changes that are shown to move the mean by less than the margin, and all changes.

    Args:
        table: The first result of `judge_changes`. Its `YARDSTICKS` are not counted.
    """
    changed = table[~table.change.isin(YARDSTICKS)]
    within = changed.decision.isin(["equivalent", "different but negligible"])
    return int(within.sum()), len(changed)


def draw_changes(table: pd.DataFrame, seeds: pd.DataFrame, titles: dict[str, str]) -> Picture:
    """Draw the mean and the single seeds of each change side by side, a row for each profile.

    Args:
        table, seeds: The results of `judge_changes` for one network and one kind of machine.
        titles: The titles of the profiles, in the order of the rows.

    Returns:
        A picture with alternative text. `title_of_changes` writes its title.
    """
    import matplotlib.pyplot as plt

    counts = [int((table.profile == profile).sum()) for profile in titles]
    figure, axes = plt.subplots(
        len(titles),
        2,
        figsize=(7.2, 1.0 + 0.75 * len(titles) + 0.27 * sum(counts)),
        squeeze=False,
        sharex="col",
        sharey="row",
        layout="constrained",
        height_ratios=[count + 0.6 for count in counts],
        width_ratios=[1, 1.2],
    )
    colour = theme.colour("cuda:tf32=off" if "NVIDIA" in table.machine.iloc[0] else "cpu")
    smallest = _smallest_decade(seeds.move[seeds.profile.isin(titles)])
    for (profile, title), (left, right) in zip(titles.items(), axes, strict=True):
        rows = table[table.profile == profile].sort_values("median_move", kind="stable")
        positions = {change: row for row, change in enumerate(rows.change)}
        _draw_means(left, rows, positions, colour)
        _draw_seeds(right, seeds[seeds.profile == profile], positions, colour, smallest)
        margin = float(rows.margin.max())
        left.axvspan(-margin, margin, color="0.92", zorder=0)
        right.axvline(margin, color="0.5", linestyle=":", zorder=0)
        left.set_title(title, fontsize="small", loc="left")
    axes[0, 1].set_title("dotted: margin; dashed: 1 sd", fontsize="x-small", color="0.35")
    axes[-1, 0].set_xlabel("mean over the seeds\n(grey: margin)", fontsize="small")
    axes[-1, 1].set_xlabel("movement of each seed", fontsize="small")
    figure.supxlabel(
        "change of the final loss, in standard deviations (sd) between seeds", fontsize="small"
    )
    title = title_of_changes(table, seeds, titles)
    figure.suptitle(title, fontsize="medium", x=0.01, ha="left")
    return Picture(figure, f"Change of the final loss by each factor. {title}.")


def title_of_changes(table: pd.DataFrame, seeds: pd.DataFrame, titles: dict[str, str]) -> str:
    """Count changes whose mean stays within the margin, and seeds that move beyond it.

    The `YARDSTICKS` are not counted. A seed is counted once for each change.

    Args:
        table, seeds: The results of `judge_changes` for one network and one kind of machine.
        titles: The titles of the profiles. The part before the first comma tells them apart.

    >>> table = pd.DataFrame(
    ...     {"change": ["TF32"], "profile": ["a"], "decision": ["different"], "margin": [0.25]}
    ... )
    >>> seeds = pd.DataFrame({"change": ["TF32", "TF32"], "profile": ["a", "a"], "move": [0.1, 2]})
    >>> print(title_of_changes(table, seeds, {"a": "150 updates"}))
    The mean is shown to stay within the margin for 0 of 1 changes
    The mean moves beyond it for TF32
    Single seeds move beyond it in 1 of 2 pairs of a seed and a change
    """
    counts: list[str] = []
    for profile, title in titles.items():
        within, changes = count_within(table[table.profile == profile])
        words = f"{within} of {changes}{'' if counts else ' changes'}"
        if len(titles) > 1:
            words += f" ({title.partition(',')[0]})"
        counts.append(words)
    text = f"The mean is shown to stay within the margin for {listed(counts)}"
    changed = table[~table.change.isin(YARDSTICKS)]
    moved = changed.change[changed.decision == "different"]
    if len(moved):
        text += f"\nThe mean moves beyond it for {listed(dict.fromkeys(moved))}"
    pairs = seeds[seeds.change.isin(changed.change)]
    margins = table.groupby("profile").margin.max()
    beyond = int((pairs.move > pairs.profile.map(margins)).sum())
    single = f"Single seeds move beyond it in {beyond} of {len(pairs)} pairs of a seed and a change"
    return f"{text}\n{single}"


def _draw_means(axes: Axes, rows: pd.DataFrame, positions: dict[str, int], colour: str) -> None:
    """Draw the mean difference of each change with its interval."""
    errors = np.stack([rows["mean"] - rows.low, rows.high - rows["mean"]])
    axes.axvline(0, color="0.7", linewidth=0.8)
    axes.errorbar(
        rows["mean"],
        rows.change.map(positions),
        xerr=errors,
        fmt="o",
        color=colour,
        markerfacecolor="white",
        markersize=5,
    )
    axes.set_yticks(list(positions.values()), list(positions), fontsize="small")
    axes.set_ylim(len(positions) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _smallest_decade(moves: pd.Series) -> float:
    """Return the power of ten below which no seed moves, except seeds that do not move at all.

    >>> f"{_smallest_decade(pd.Series([0.0, 3e-7, 0.2])):.0e}"
    '1e-07'
    """
    smallest = moves[moves > 0].min()  # NaN if no seed moves
    return float(np.fmin(SMALLEST_MOVE, 10 ** np.floor(np.log10(smallest))))


def _draw_seeds(
    axes: Axes, seeds: pd.DataFrame, positions: dict[str, int], colour: str, smallest: float
) -> None:
    """Draw how far each seed moves, on a logarithmic axis that has seeds of unchanged loss left."""
    unmoved = smallest / 10
    axes.set_xscale("log")
    axes.scatter(
        seeds.move.where(seeds.move > 0, unmoved),
        seeds.change.map(positions),
        s=20,
        facecolors="none",
        edgecolors=colour,
        linewidths=0.9,
    )
    axes.axvline(1, color="0.3", linestyle="--", zorder=0)
    axes.axvline(smallest / 10**0.5, color="0.85", linewidth=0.8, zorder=0)
    axes.set_xlim(unmoved / 10**0.5, 10)
    # The labels of powers of ten near `unmoved` would touch "same loss".
    ticks = {tick: label for tick, label in _MOVE_TICKS.items() if tick > 50 * unmoved}
    axes.set_xticks([unmoved, *ticks], ["same\nloss", *ticks.values()])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def describe_changes(table: pd.DataFrame, seeds: pd.DataFrame) -> str:
    """Describe how changes move the mean, and how far the seed that moves most.

    Distances are in standard deviations (sd) between the seeds of the reference.

    Args:
        table, seeds: The results of `judge_changes` for one network and profile.
    """
    if table.empty:
        return f"Fewer than {MIN_SEEDS} seeds cannot show a difference."
    changed = table[~table.change.isin(YARDSTICKS)]
    within, changes = count_within(table)
    text = f"Mean within the margin for {within} of {changes} changes"
    for decision in ("different", "inconclusive"):
        names = changed.change[changed.decision == decision]
        if 1 < len(names) == changes:
            text += f" (all {decision})"
        elif len(names):
            text += f" ({decision}: {', '.join(names)})"
    moves = seeds[seeds.change.isin(table.change) & (seeds.change != DRAWN)]
    if moves.move.max() == 0:
        return f"{text}. No seed's loss changes."
    furthest = moves.loc[moves.move.idxmax()]
    text += f". Furthest seed: {furthest.move:.2g} sd ({furthest.change})"
    again = seeds.move[seeds.change == AGAIN]
    if len(again):
        text += f"; second run: {again.max():.2g} sd"
    return f"{text}."
