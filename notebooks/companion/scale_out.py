"""Notebook 08, many devices: what starts its programs, and its finding."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

import gpulab as gl
from companion.findings import span
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
    ends: pd.DataFrame, scaling: pd.DataFrame, descents: pd.DataFrame, found: pd.DataFrame
) -> str:
    """Sentences on what was measured here and recorded elsewhere; `found` are fits of tables."""
    most = ends[~ends.recorded].groupby("precision").weights.max()
    lines = [
        (
            f"Training on {span(ends[~ends.recorded].devices)} devices ends where it does on one:"
            f" no weight is off by more than {most.float32:.1e} in float32 and {most.float64:.1e}"
            " in float64."
        ),
        *(f"Here, {line}" for line in _scaling_sentences(scaling[~scaling.recorded])),
    ]
    mean = descents.groupby("way")[["updates_per_second", "age", "lost_share"]].mean()
    synchronous, free = mean.loc["synchronous"], mean.loc["lock-free"]
    lines.append(
        "Without a lock, workers make"
        f" {free.updates_per_second / synchronous.updates_per_second:.2f} times as many updates a"
        f" second as workers that wait for each other. A gradient is {free.age:.2f} updates old"
        f" when it is applied; of all changes a share of {free.lost_share:.1e} was lost (with the"
        f" lock, {synchronous.lost_share:.1e}, which is rounding)."
    )
    middle = found.median()
    lines.append(
        f"By the law, a batch of {middle.critical_batch:.0f} images takes twice the fewest updates"
        f" ({middle.fewest_updates:.0f}). The law misses a measured number by up to"
        f" {found.law_off.max():.0%}. The gradient's noise scale is {middle.noise_at_first:.0f} at"
        f" first, and {middle.noise_at_target:.0f} at the target."
    )
    for (machine, setting), rows in scaling[scaling.recorded].groupby(
        ["machine", "setting"], sort=False
    ):
        lines += [
            f"Recorded on {machine}, {setting_words(setting)}: {line}"
            for line in _scaling_sentences(rows)
        ]
    return "\n".join(lines)


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
