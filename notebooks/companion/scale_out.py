"""Notebook 08, many devices: what starts its programs, and its finding."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import gpulab as gl
from companion.findings import span
from gpulab.stats import Verdict
from gpulab.store.recorded import read_document
from gpulab.wording import setting_words

PROGRAMS = Path(__file__).parents[1] / "programs"


def run_program(name: str, *arguments: object) -> dict[str, pd.DataFrame]:
    """Run `programs/NAME.py` with arguments, print its output, and return its recorded tables.

    Raises:
        GpulabError: With what the program says, where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [
            sys.executable,
            str(PROGRAMS / f"{name}.py"),
            *map(str, arguments),
            "--record",
            str(record),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=dict(os.environ)
        )
        if done.returncode:
            raise gl.GpulabError(
                f"{name}.py {' '.join(map(str, arguments))}: {done.stderr.strip()}"
            )
        print(done.stdout.strip())
        document = read_document(record)
    tables = {
        key: pd.DataFrame(value) for key, value in document.items() if isinstance(value, list)
    }
    return {
        key: table.assign(machine="this machine", recorded=False) for key, table in tables.items()
    }


def scale_finding(
    ends: pd.DataFrame,
    scaling: pd.DataFrame,
    descents: pd.DataFrame,
    verdicts: Sequence[Verdict],
) -> str:
    """Sentences on what was measured here and recorded elsewhere.

    Args:
        ends: How far the weights of divided trainings differ from those of one device.
        scaling: How fast several devices trained.
        descents: Lock-free and synchronous descents, with the number of their `repetition`.
        verdicts: On the loss of the lock-free ones, one for each repetition.
    """
    most = ends[~ends.recorded].groupby("precision").weights.max()
    lines = [
        (
            f"Training on {span(ends[~ends.recorded].devices)} devices ends where it does on one:"
            f" no weight is off by more than {most.float32:.1e} in float32 and {most.float64:.1e}"
            " in float64."
        ),
        *(f"Here, {line}" for line in _scaling_sentences(scaling[~scaling.recorded])),
    ]
    lines += describe_lock_free(descents, verdicts)
    for (machine, setting), rows in scaling[scaling.recorded].groupby(
        ["machine", "setting"], sort=False
    ):
        lines += [
            f"Recorded on {machine}, {setting_words(setting)}: {line}"
            for line in _scaling_sentences(rows)
        ]
    return "\n".join(lines)


def describe_lock_free(descents: pd.DataFrame, verdicts: Sequence[Verdict]) -> list[str]:
    """What going without a lock brought and cost, with the spread over repetitions.

    Args:
        descents: As for `scale_finding`.
        verdicts: As for `scale_finding`.
    """
    means = descents.groupby(["way", "repetition"])[["updates_per_second", "age", "lost_share"]]
    synchronous, free = (means.mean().loc[way] for way in ("synchronous", "lock-free"))
    ratio = free.updates_per_second / synchronous.updates_per_second
    counts = Counter(verdict.table.decision.iloc[0] for verdict in verdicts)
    decisions = ", ".join(f"{count} {decision}" for decision, count in counts.items())
    return [
        f"Without a lock, in {len(verdicts)} repetitions: workers make {span(ratio, '.2f')} times"
        " as many updates a second as workers that wait for each other. A gradient is"
        f" {span(free.age, '.2f')} updates old when it is applied. Of all changes a share of"
        f" {span(free.lost_share, '.1e')} was lost (with the lock at most"
        f" {synchronous.lost_share.max():.1e}, which is rounding). Verdicts on the loss:"
        f" {decisions}."
    ]


def _scaling_sentences(scaling: pd.DataFrame) -> list[str]:
    """What the most devices bring, a sentence a size."""
    lines = []
    for size, rows in scaling[scaling.devices > 1].groupby("size", sort=False):
        strong, weak = (rows[rows.scaling == kind] for kind in ("strong", "weak"))
        waiting = (1 - strong.compute / strong.seconds).clip(lower=0)
        lines.append(
            f"{span(rows.devices)} devices train a {size} PredNet {span(strong.speedup, '.2f')}"
            f" times as fast as one where they divide a batch of {span(strong.batch)},"
            f" {span(weak.speedup, '.2f')} times where each has as large a batch. Of a divided"
            f" update {span(waiting, '.0%')} is waiting and communication."
        )
    return lines
