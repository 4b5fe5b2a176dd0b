"""Start the programs of notebook 08, and state its finding."""

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
        GpulabError: If the program fails, with its error output.
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
    """State in sentences what was measured here and what was recorded elsewhere.

    Args:
        ends: How far the weights of divided training runs differ from those of one device.
        scaling: How fast several devices trained.
        descents: Lock-free and synchronous runs, with the number of their `repetition`.
        verdicts: The verdicts on the loss of lock-free training, one for each repetition.
    """
    most = ends[~ends.recorded].groupby("precision").weights.max()
    lines = [
        (
            f"Training on {span(ends[~ends.recorded].devices)} devices ends with the same weights"
            f" as on one, to within {most.float32:.1e} in float32 and {most.float64:.1e} in"
            " float64."
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
    """State what training without a lock gained and cost, with the spread over repetitions.

    Args:
        descents: As for `scale_finding`.
        verdicts: As for `scale_finding`.
    """
    means = descents.groupby(["way", "repetition"])[["updates_per_second", "age", "lost_share"]]
    synchronous, free = (means.mean().loc[way] for way in ("synchronous", "lock-free"))
    ratio = free.updates_per_second / synchronous.updates_per_second
    counts = Counter(verdict.table.decision.iloc[0] for verdict in verdicts)
    decisions = ", ".join(
        f"{decision} in {count} of {len(verdicts)} repetitions"
        for decision, count in counts.items()
    )
    return [
        f"Workers without a lock make {span(ratio, '.2f')} times as many updates per second as"
        f" workers that wait for each other (in {len(verdicts)} repetitions). A gradient is"
        f" {span(free.age, '.2f')} updates old when it is applied. The share of changes that were"
        f" lost is {span(free.lost_share, '.1e')} (with the lock at most"
        f" {synchronous.lost_share.max():.1e}, from rounding). Verdicts on the loss:"
        f" {decisions}."
    ]


def _scaling_sentences(scaling: pd.DataFrame) -> list[str]:
    """State how fast several devices train, in one or two sentences for each size."""
    lines = []
    for size, rows in scaling[scaling.devices > 1].groupby("size", sort=False):
        strong, weak = (rows[rows.scaling == kind] for kind in ("strong", "weak"))
        waiting = (1 - strong.compute / strong.seconds).clip(lower=0)
        lines.append(
            f"{span(rows.devices)} devices train PredNet (size {size})"
            f" {span(strong.speedup, '.2f')} times as fast as one if they divide a batch of"
            f" {span(strong.batch)}, and {span(weak.speedup, '.2f')} times as fast if each gets"
            f" a whole batch. Waiting and communication take {span(waiting, '.0%')} of a"
            " divided update."
        )
    return lines
