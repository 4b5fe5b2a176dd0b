"""The finding of notebook 09: why the whitener fails on a new card, and what restores it."""

from __future__ import annotations

import pandas as pd

import gpulab as gl
from companion.findings import SUMMARY, CheckedSentences, Part, finding, setting_in_text
from gpulab.audits import Audit
from gpulab.stats import Verdict
from gpulab.store.recorded import recorded_table

OLD, NEW = "cuda:tf32=off", "cuda:tf32=on"  # settings of the recorded runs
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
            f"The first NaN can be traced back to {first.kind} at {first.line}.",
            *(f"Seeds with NaN, {origin}: {', '.join(words)}." for origin, words in counts.items()),
            f"Old losses restored by: {'; '.join(restored)}.",
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


def _describe_kernels(kernels: Verdict | None) -> list[str]:
    """Count the kernels and strides that restored the old losses, and the runs that became NaN."""
    if kernels is None:
        return []
    table = kernels.table
    lost = int(table.diverged.sum())
    runs = lost + int(table.seeds.sum())  # the column counts the seeds that lasted
    restored = _outcomes(
        kernels,
        "combinations of kernel and stride in a convolutional version, the original one included",
    )
    return [f"{restored}, where {lost} of {runs} runs became NaN"]


def _outcomes(judged: Verdict, changes: str) -> str:
    """Count the changes that restored the old losses, out of how many, and the undecided ones."""
    decisions = judged.table.decision
    matches = decisions.isin(["equivalent", "different but negligible"])
    undecided = int((~matches & (decisions != "different")).sum())
    return f"{matches.sum()} of {len(decisions)} {changes} ({undecided} undecided)"
