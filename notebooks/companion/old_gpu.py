"""The finding of notebook 09: why the whitener fails on a new card, and what restores it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

import gpulab as gl
from companion.findings import SUMMARY, CheckedSentences, Part, finding, setting_in_text
from gpulab.audits import Audit
from gpulab.stats import Verdict
from gpulab.store.recorded import recorded_table
from gpulab.training._profiles import protocol

OLD, NEW = "cuda:tf32=off", "cuda:tf32=on"  # settings of the recorded runs
FEW = protocol("whitener", "quick").seeds  # as many as notebook 09 trains
RESTORED = ("equivalent", "different but negligible")  # decisions for which the old loss is back
CURES = {"centred": "centred", "float32": "product in float32"}  # in words
MARGINS = ("1sd", "0.25sd")  # that of notebook 09, explained there, and the usual one


def cards_finding(
    runs: pd.DataFrame,
    report: Audit,
    cured: Verdict,
    retuned: Verdict,
    conversions: pd.DataFrame,
    kernels: Verdict | None = None,
) -> CheckedSentences:
    """State why the whitener becomes NaN on the new card, what prevents it, and what that costs.

    Args:
        runs: The runs of the whitener, those made here and the recorded ones.
        report: The audit of the whitener's first step.
        cured: The verdict on changes to the arithmetic that were tried here.
        retuned: The verdict on changes to the hyperparameters that were tried here.
        conversions: How many bytes return unchanged, for each way, format and machine.
        kernels: The verdict on other kernels and strides of a convolutional version.
    """
    first = report.findings[0]
    counts: dict[str, list[str]] = {}
    one_pass = runs[runs.covariance == "one-pass"]
    for (recorded, machine, setting), rows in one_pass.groupby(
        ["recorded", "machine", "setting"], sort=False
    ):
        origin = f"recorded on {machine}" if recorded else "here"
        lost = (rows.status == "diverged").sum()
        counts.setdefault(origin, []).append(
            f"{lost} of {rows.seed.nunique()} under {setting_in_text(setting)}"
        )
    restored = [
        _outcomes(retuned, "retunings"),
        *_describe_kernels(kernels),
        _outcomes(cured, "changes to the arithmetic"),
    ]
    verdicts = [_verdict_on_cures(runs[runs.recorded], margin) for margin in MARGINS]
    sections: dict[str, Part] = {
        SUMMARY: [
            f"The first NaN comes from {first.kind} at {first.line}.",
            *(f"Seeds with NaN, {origin}: {', '.join(words)}." for origin, words in counts.items()),
            f"Old losses restored by: {'; '.join(restored)}.",
            *_describe_repetitions(runs[runs.recorded]),
        ],
        "Why it becomes NaN": (
            f"The first NaN can be traced back to a line computed with {first.kind}: {first.line}"
            f" ({first.operation}, {first.phase})."
        ),
        "The recorded cures": verdicts[0],
        "At a quarter of that margin": verdicts[1],
    }
    for machine, rows in recorded_table("precision").groupby("machine"):
        ms = rows.set_index(["setting", "covariance"]).ms
        sections[f"The price, on {machine}"] = (
            f"A step of a large network takes {ms[OLD, 'one-pass']:.1f} ms in float32; in TF32 it"
            f" takes {ms[NEW, 'centred']:.1f} ms centred, and {ms[NEW, 'float32']:.1f} ms with one"
            " product kept in float32."
        )
    unchanged = (conversions.returned == 256).mean()
    divided = conversions.query("machine != 'here' and way == 'x / 255' and format == 'float32'")
    sections["When a loss counts as the old one"] = (
        "A loss counts as the old one if the two differ by less than one standard deviation between"
        " seeds, because somebody who wants an old result back would also accept the result of"
        " another seed. The other notebooks use a quarter of that margin."
    )
    sections["Was it the images"] = [
        (
            f"All 256 bytes return unchanged in {unchanged:.0%} of the combinations of way, format"
            " and device that were tried."
        ),
        *(
            f"x / 255 on {row.machine}: {row.as_division} of 256 numbers have the same bits as a"
            " division on this CPU."
            for row in divided.itertuples()
        ),
    ]
    return finding(sections, [line for judged in verdicts for line in str(judged).splitlines()])


def _verdict_on_cures(recorded: pd.DataFrame, margin: str) -> Verdict:
    """Compare the recorded cures under TF32 with one pass in float32."""
    usual = (recorded.setting == OLD) & (recorded.covariance == "one-pass")
    cures = recorded[usual | ((recorded.setting == NEW) & (recorded.covariance != "one-pass"))]
    way = cures.covariance + " on " + cures.setting.map(setting_in_text)
    reference = f"one-pass on {setting_in_text(OLD)}"
    return gl.verdict(cures.assign(way=way), factor="way", margin=margin, reference=reference)


def repeat_cures(
    recorded: pd.DataFrame, sizes: Sequence[int] = (8, 13, 20, 40), margin: str = "1sd"
) -> pd.DataFrame:
    """Judge the recorded cures again and again, on groups of seeds that have none in common.

    Args:
        recorded: The recorded runs of the whitener.
        sizes: How many seeds a group has. Seeds that do not fill a last group are left out.
        margin: As for `gpulab.verdict`.

    Returns:
        A table with a row for each cure (`cure`) and size of the groups (`seeds`): how many
        `verdicts` there are; how many of them say that the old losses are `restored`, say that they
        are `different`, or are `undecided`; and the `lowest` and the `highest` mean difference from
        the old losses among the groups, in percent.

    Raises:
        UsageError: If there are fewer recorded seeds than a group has.

    Examples:
        >>> runs = gl.recorded_runs().query("experiment == 'whitener'")
        >>> repeat_cures(runs, [20]).verdicts.to_dict()
        {('centred', 20): 2, ('product in float32', 20): 2}
    """
    seeds, rows = sorted(recorded.seed.unique()), []
    for size in sizes:
        if not 2 <= size <= len(seeds):
            raise gl.UsageError(f"groups of {size} seeds: expected 2 to {len(seeds)}, the recorded")
        for first in range(0, len(seeds) - size + 1, size):
            group = recorded[recorded.seed.isin(seeds[first : first + size])]
            table = _verdict_on_cures(group, margin).table
            old = group[(group.setting == OLD) & (group.covariance == "one-pass")].final_loss
            rows.append(table.assign(size=size, percent=100 * table.difference / old.mean()))
    judged = pd.concat(rows)
    judged = judged.assign(
        restored=judged.decision.isin(RESTORED), different=judged.decision == "different"
    )
    judged["undecided"] = ~judged.restored & ~judged.different
    judged["cure"] = judged.way.map(lambda way: CURES[way.partition(" on ")[0]])
    outcomes = ["restored", "different", "undecided"]
    return (
        judged.rename(columns={"size": "seeds", "seeds": "pairs"})
        .groupby(["cure", "seeds"])
        .agg(
            verdicts=("decision", "size"),
            **{outcome: (outcome, "sum") for outcome in outcomes},
            lowest=("percent", "min"),
            highest=("percent", "max"),
        )
    )


def _describe_repetitions(recorded: pd.DataFrame) -> list[str]:
    """Count the verdicts that restore the old losses, on as many seeds as here and on all seeds."""
    most = recorded.seed.nunique()
    table = repeat_cures(recorded, (FEW, most)).groupby("seeds")[["restored", "verdicts"]].sum()
    few, all_seeds = table.loc[FEW], table.loc[most]
    return [
        f"Recorded changes to the arithmetic restore them in {few.restored} of {few.verdicts}"
        f" verdicts on {FEW} seeds, {all_seeds.restored} of {all_seeds.verdicts} on {most}."
    ]


def _describe_kernels(kernels: Verdict | None) -> list[str]:
    """Count the kernels and strides that restored the old losses, and the runs that became NaN."""
    if kernels is None:
        return []
    table = kernels.table
    lost = int(table.diverged.sum())
    runs = lost + int(table.seeds.sum())  # the column counts the seeds that lasted
    restored = _outcomes(
        kernels,
        "kernels and strides of a convolutional version",
    )
    return [f"{restored}, NaN in {lost} of {runs} runs"]


def _outcomes(judged: Verdict, changes: str) -> str:
    """Count the changes that restored the old losses, out of how many, and the undecided ones."""
    decisions = judged.table.decision
    matches = decisions.isin(RESTORED)
    undecided = int((~matches & (decisions != "different")).sum())
    return f"{matches.sum()} of {len(decisions)} {changes} ({undecided} undecided)"
