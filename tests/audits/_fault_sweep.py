"""Count the planted faults that an audit detects, names and locates, and its false alarms.

`tests/audits/test_planted_faults.py` runs a part of the sweep, and
`benchmarks/correctness/planted_faults.py` runs all of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm

import gpulab as gl
from tests.audits._fault_catalogue import Case, Fault

A, B = "cpu:threads=2", "cpu:threads=1"


def examined(fault: Fault, number: int = 0) -> gl.audits.Audit:
    """Audit a step with a fault.

    Every second audit compares B with A instead of A with B, and every fourth reads its traces from
    files.
    """
    sides = (B, A) if number % 2 else (A, B)
    with fault.around():
        first = gl.record(fault.step, sides[0], progress=False)
        second = gl.record(fault.step, sides[1], progress=False)
    if number % 8 in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            files = [
                trace.save(Path(folder) / f"{n}.trace") for n, trace in enumerate((first, second))
            ]
            return gl.audit(*files)
    return gl.audit(first, second)


def sweep(planted: list[Fault]) -> pd.DataFrame:
    """Return a row for each fault: whether it was `detected`, and its `kind` and `place` were
    correct.
    """
    rows = []
    for number, fault in enumerate(tqdm(planted, leave=False, disable=None)):
        try:
            report, text = examined(fault, number), ""
        except gl.DataError as error:
            # Faults also count as detected if the traces are refused as traces of different steps.
            report, text = None, str(error)
        row = {
            "group": fault.group,
            "what": fault.what,
            "detected": True,
            "kind": True,
            "place": True,
            "report": text,
        }
        if report is not None:
            worst, found = report.findings[0], report.kind != "rounding"
            text = f"{worst.operation} {worst.module} {worst.line} {worst.detail}"
            place = any(word in text for word in fault.place) if fault.place else found
            row |= {
                "detected": found,
                "kind": report.kind in fault.kinds,
                "place": place,
                "report": str(report),
            }
        rows.append(row)
    return pd.DataFrame(rows)


def right_steps(network: str, seeds: Iterable[int]) -> pd.DataFrame:
    """Audit steps without a fault; return network, seed and the kind of the first finding."""
    rows = []
    for seed in seeds:
        for optimizer in (None, lambda p: torch.optim.Adam(p, 1e-2)):
            report = examined(Fault("", "", Case(network, seed, optimizer=optimizer), ()))
            rows.append(
                {"network": network, "seed": seed, "kind": report.kind, "report": str(report)}
            )
    return pd.DataFrame(rows)


def rates(table: pd.DataFrame) -> pd.DataFrame:
    """Return the number of faults of each group, and the shares with correct detection, kind and
    place.
    """
    found = table.groupby("group", sort=False)[["detected", "kind", "place"]].mean()
    found.insert(0, "faults", table.groupby("group", sort=False).size())
    found.loc["all"] = [len(table), *table[["detected", "kind", "place"]].mean()]
    return found.astype({"faults": int})
