"""Changes that few seeds left undecided, with the seeds that were added under later plans."""

from __future__ import annotations

import pandas as pd

import gpulab as gl
from companion.changes import REFERENCE, judge_changes, name_changes
from companion.paired_analyses import compare_pairs, trimmed_mean_decision

# The comparisons of the plan `more-seeds-at-published-size`: what changes, the setting without the
# change, and the setting with it.
COMPARISONS = {
    "deterministic": ("cuda:tf32=off", "cuda:tf32=off,deterministic=on"),
    "TF32": ("cuda:tf32=off,deterministic=on", "cuda:tf32=on,deterministic=on"),
}
LOOKS = 2  # the first twelve seeds had been looked at
ALPHA = 0.05
FIRST_MARGIN = 0.00025  # the margin of the first twelve seeds, a loss


def determinism_runs() -> pd.DataFrame:
    """Return PredNet's runs at the published size that differ in determinism or TF32 alone.

    Twelve seeds come from the study `changes`, and the others were added under a registration.

    Returns:
        The columns of `gpulab.runs`, `comparison` (a key of `COMPARISONS`), `change` ("nothing" or
        the comparison), and `added`, whether the seed was added. The deterministic runs without
        TF32 appear twice, because they belong to both comparisons. Only seeds that have ended under
        all three settings are included.

    Examples:
        >>> runs = determinism_runs()
        >>> sorted(runs.comparison.unique())
        ['TF32', 'deterministic']
    """
    first = gl.recorded_runs("changes").query("profile == 'paper' and rerun == 0")
    added = gl.recorded_runs("determinism")
    runs = pd.concat([first.assign(added=False), added.assign(added=True)], ignore_index=True)
    settings = {setting for pair in COMPARISONS.values() for setting in pair}
    runs = runs[runs.setting.isin(settings)]
    finished = runs[runs.status == "finished"].groupby("seed").setting.nunique()
    runs = runs[runs.seed.isin(finished.index[finished == len(settings)])]
    tables = []
    for comparison, (reference, changed) in COMPARISONS.items():
        names = {reference: "nothing", changed: comparison}
        table = runs[runs.setting.isin(names)]
        tables.append(table.assign(comparison=comparison, change=table.setting.map(names)))
    return pd.concat(tables, ignore_index=True)


def compare_determinism(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare deterministic algorithms, and TF32, with runs without them, as registered.

    Args:
        runs: The result of `determinism_runs`.

    Returns:
        For each comparison, the rows of `companion.paired_analyses.compare_pairs` for all seeds and
        for the added ones, and how many seeds move by more than the margin (`beyond_margin`) and by
        more than the margin of the first twelve seeds (`beyond_first`). Each verdict has half of
        the level of significance, because there are two comparisons. With all seeds, it is also
        corrected for two looks.
    """
    tables = []
    for comparison, of_both in runs.groupby("comparison", sort=False):
        for seeds, subset in {"all": of_both, "added": of_both[of_both.added]}.items():
            table = compare_pairs(
                subset,
                "change",
                reference="nothing",
                looks=LOOKS if seeds == "all" else 1,
                alpha=ALPHA / len(COMPARISONS),
            )
            losses = subset.pivot(index="seed", columns="change", values="final_loss")
            moves = (losses[comparison] - losses["nothing"]).abs()
            margin = table.margin.iloc[0] * losses["nothing"].mean()
            table = table.assign(
                beyond_margin=int((moves > margin).sum()),
                beyond_first=int((moves > FIRST_MARGIN).sum()),
            )
            tables.append(table.assign(change=comparison, seeds=seeds))
    table = pd.concat(tables, ignore_index=True)
    columns = ["change", "seeds", "pairs", "analysis", "difference", "low", "high", "margin"]
    return table[[*columns, "beyond_margin", "beyond_first", "decision"]]


# The changes of the plan `more-seeds-of-undecided-changes`, of each network and machine.
UNDECIDED = {
    ("autoencoder", "NVIDIA H200"): ["mixed precision"],
    ("prednet", "NVIDIA H200"): ["mixed precision"],
    ("autoencoder", "Intel(R) Xeon(R) Processor"): ["mixed precision", "TF32, emulated"],
    ("prednet", "Intel(R) Xeon(R) Processor"): ["mixed precision"],
}


def compare_undecided() -> pd.DataFrame:
    """Compare mixed precision and emulated TF32 with the reference, as registered.

    Returns:
        For each network, machine and change: the number of `pairs` and, in standard deviations
        between the seeds of the reference, the `margin`, and the `difference`, the interval from
        `low` to `high` that decides about equivalence, and the `decision`, by the mean and by the
        20 % trimmed mean (`analysis`). `beyond_margin` counts the seeds that move by more than the
        margin. The verdicts of the means are those of `companion.judge_changes`: they are corrected
        for all changes of a network and a machine, and for two looks.
    """
    runs = gl.recorded_runs("changes")
    runs = name_changes(runs[runs.profile != "paper"])
    rows = []
    for (network, machine), changes in UNDECIDED.items():
        group = runs[(runs.experiment == network) & (runs.machine == machine)]
        table, _ = judge_changes(group)
        losses = group.pivot_table(index="seed", columns="change", values="final_loss")
        scale = losses[REFERENCE].std()
        for found in table[table.change.isin(changes)].itertuples():
            differences = ((losses[found.change] - losses[REFERENCE]) / scale).dropna()
            shared = {
                "network": network,
                "machine": machine,
                "change": found.change,
                "pairs": len(differences),
                "margin": found.margin,
                "beyond_margin": int((differences.abs() > found.margin).sum()),
            }
            mean = {
                "analysis": "mean",
                "difference": found.mean,
                "low": found.equivalent_low / scale,
                "high": found.equivalent_high / scale,
                "decision": found.decision,
            }
            robust = trimmed_mean_decision(differences.to_numpy(), found.margin)
            rows += [shared | mean, shared | {"analysis": "trimmed mean"} | robust]
    return pd.DataFrame(rows)
