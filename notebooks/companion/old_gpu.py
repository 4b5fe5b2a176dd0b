"""Notebook 09: what runs of the whitener, an audit and verdicts say of an old and a new card."""

from __future__ import annotations

import pandas as pd

import gpulab as gl
from companion.findings import SUMMARY, CheckedSentences, Part, finding, setting_in_text
from gpulab.audits import Audit
from gpulab.stats import Verdict
from gpulab.store.recorded import recorded_table

OLD, NEW = "cuda:tf32=off", "cuda:tf32=on"  # settings of the recorded runs
MARGINS = ("1sd", "0.25sd")  # that of notebook 09, which gives the reason, and the usual one


def cards_finding(
    runs: pd.DataFrame,
    report: Audit,
    cured: Verdict,
    retuned: Verdict,
    conversions: pd.DataFrame,
    kernels: Verdict | None = None,
) -> CheckedSentences:
    """Why the whitener becomes NaN on the new card, what mends it, and what that costs.

    Args:
        runs: Of the whitener, those made here and the recorded ones.
        report: The audit of its first step.
        cured: The verdict on changes of the arithmetic that were tried here.
        retuned: The verdict on changes of the training that were tried here.
        conversions: How many bytes come back, in each way, format and machine.
        kernels: The verdict on other kernels and strides of a convolutional version.
    """
    first = report.findings[0]
    counts = []
    one_pass = runs[runs.covariance == "one-pass"]
    for (recorded, machine, setting), rows in one_pass.groupby(
        ["recorded", "machine", "setting"], sort=False
    ):
        origin = f"recorded on {machine}" if recorded else "here"
        lost = (rows.status == "diverged").sum()
        counts.append(
            f"{lost} of {rows.seed.nunique()} seeds became NaN under {setting_in_text(setting)},"
            f" {origin}."
        )
    verdicts = [_verdict_on_cures(runs[runs.recorded], margin) for margin in MARGINS]
    sections: dict[str, Part] = {
        SUMMARY: [
            (
                f"The first NaN goes back to a line that is computed with {first.kind}:"
                f" {first.line}."
            ),
            *counts,
            f"Of {len(retuned.table)} retunings of the training {_outcomes(retuned)}.",
            *_describe_kernels(kernels),
            f"Of {len(cured.table)} changes of the arithmetic {_outcomes(cured)}.",
        ],
        "Why it becomes NaN": (
            f"A line is computed with {first.kind}, and the first NaN goes back to it: {first.line}"
            f" ({first.operation}, {first.phase})."
        ),
        "The cures, on the recorded seeds": verdicts[0],
        "The same at a quarter of that margin": verdicts[1],
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
        "Within one standard deviation between seeds: somebody who wants his old result back would"
        " also accept that of another seed. The other notebooks take a quarter of it."
    )
    sections["Was it the images"] = [
        (
            f"All 256 bytes return as they were in {unchanged:.0%} of the ways, formats and devices"
            " tried."
        ),
        *(
            f"x / 255 on {row.machine}: {row.as_division} of 256 numbers have the bits of a"
            " division on this CPU."
            for row in divided.itertuples()
        ),
    ]
    return finding(sections, [line for judged in verdicts for line in str(judged).splitlines()])


def _verdict_on_cures(recorded: pd.DataFrame, margin: str) -> Verdict:
    """The recorded cures under TF32 against one pass in float32."""
    usual = (recorded.setting == OLD) & (recorded.covariance == "one-pass")
    cures = recorded[usual | ((recorded.setting == NEW) & (recorded.covariance != "one-pass"))]
    way = cures.covariance + " on " + cures.setting.map(setting_in_text)
    reference = f"one-pass on {setting_in_text(OLD)}"
    return gl.verdict(cures.assign(way=way), factor="way", margin=margin, reference=reference)


def _describe_kernels(kernels: Verdict | None) -> list[str]:
    """How many kernels and strides restored the old losses, and how many runs became NaN."""
    if kernels is None:
        return []
    table = kernels.table
    lost = int(table.diverged.sum())
    runs = lost + int(table.seeds.sum())  # the column counts the seeds that lasted
    return [
        f"Of {len(table)} kernels and strides of a convolutional version {_outcomes(kernels)};"
        f" {lost} of {runs} runs became NaN."
    ]


def _outcomes(judged: Verdict) -> str:
    """How many changes restored the old losses, how many did not, and how many are undecided."""
    decisions = judged.table.decision
    matches, rejected = (
        decisions.isin(["equivalent", "different but negligible"]),
        decisions == "different",
    )
    counts = {
        "gave the old losses back": matches,
        "did not": rejected,
        "left it open": ~matches & ~rejected,
    }
    return ", ".join(f"{count.sum()} {words}" for words, count in counts.items())
