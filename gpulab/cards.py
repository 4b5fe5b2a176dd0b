"""An old card and a new one: why a covariance fails in TF32, what the cure costs, and what one may say of it.

The network is `gpulab.Whitener`. What an H200 did with it is kept in `data/runs` and `data/precision`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpulab.anomaly import FirstWindow
from gpulab.audits import Audit, audit
from gpulab.models.whitener import COVARIANCES, Whitener, covariance
from gpulab.settings import Setting
from gpulab.store import recorded_store
from gpulab.verdicts import verdict

if TYPE_CHECKING:
    import pandas as pd

    from gpulab.reproduction import Reproduction

MARGINS = ("0.25sd", "0.5sd")
ARITHMETIC = ("emulate", "order", "tf32", "precision", "covariance")  # what changes how a search's trial computes


def covariance_spectrum(
    settings: Iterable[str], seeds: Iterable[int] = range(10), profile: str = "quick", ways: Iterable[str] = COVARIANCES
) -> pd.DataFrame:
    """The eigenvalues of the covariance that the whitener computes from its first batch, before any training.

    Columns: `setting`, `covariance` (one of `ways`), `seed`, `rank` (1 for the largest) and `eigenvalue`. The
    covariance is computed under the setting, and its eigenvalues in float64.

    >>> seen = covariance_spectrum(["cpu", "cpu:emulate=tf32"], seeds=[7], ways=["one-pass"])
    >>> (seen.eigenvalue < 0).groupby(seen.setting).any().tolist()
    [False, True]
    """
    import pandas as pd

    parts = []
    for setting in settings:
        for seed in seeds:
            step = FirstWindow("whitener", seed=seed, profile=profile)
            for way, values in _eigenvalues(step, Setting.parse(setting), ways).items():
                ranks = range(1, len(values) + 1)
                part = pd.DataFrame({"rank": ranks, "eigenvalue": values})
                parts.append(part.assign(setting=setting, covariance=way, seed=seed))
    columns = ["setting", "covariance", "seed", "rank", "eigenvalue"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


@torch.no_grad()
def _eigenvalues(step: FirstWindow, setting: Setting, ways: Iterable[str]) -> dict[str, list[float]]:
    net = step.plan.model
    assert isinstance(net, Whitener)
    images = torch.from_numpy(step.frames[: net.batch_size]).float().div(255)
    with setting.apply():
        there = images.to(setting.device, setting.dtype)
        codes = net.to(setting.device, setting.dtype).codes(there)
        made = {way: covariance(codes, way).double().cpu() for way in ways}
    return {way: torch.linalg.eigvalsh(matrix).flip(0).tolist() for way, matrix in made.items()}


def recorded_prices() -> pd.DataFrame:
    """What a step of a large whitener cost on the machines that recorded it: a row for each way.

    Columns: `machine`, `setting`, `covariance`, `ms` (median milliseconds a step), the quartiles `ms_low` and
    `ms_high`, `rounds` (times that were measured) and `batch_size`.

    >>> bool((recorded_prices().ms > 0).all())
    True
    """
    import pandas as pd

    parts = []
    for file in sorted(_kept().glob("*.json")):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        machine = ", ".join(gpu["name"] for gpu in record["passport"]["gpus"]) or record["passport"]["cpu"]["model"]
        keys = {key: record[key] for key in ("rounds", "batch_size")}
        parts.append(pd.DataFrame(record["ways"]).assign(machine=machine, **keys))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def recorded_cards_audit() -> Audit:
    """The audit of the whitener's first step on an H200, in float32 against TF32, from the recorded traces.

    >>> recorded_cards_audit().kind
    'reduced precision'
    """
    return audit(_kept() / "whitener-cuda-tf32-off.trace", _kept() / "whitener-cuda-tf32-on.trace")


def _kept() -> Path:
    return recorded_store().parent / "precision"


def cards_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How many runs became NaN, for each setting and covariance in a frame of runs; here and recorded apart.

    Columns: `machine`, `recorded`, `setting`, `covariance`, `seeds`, `diverged`, `updates` (the median update at
    which they did) and `final_loss` (the mean of the others).
    """
    groups = frame.groupby(["recorded", "machine", "setting", "covariance"], sort=False)
    table = groups.agg(
        seeds=("seed", "nunique"),
        diverged=("status", lambda status: int((status == "diverged").sum())),
        updates=("diverged_at", "median"),
        final_loss=("final_loss", "mean"),
    )
    return table.reset_index()


def cards_finding(runs: pd.DataFrame, report: Audit, found: Reproduction) -> str:
    """What runs of the whitener, an audit, a search and the recorded prices allow one to say, in sentences.

    `runs` are those made here and the recorded ones. The verdicts are those on the recorded runs.
    """
    lines = [_counted(row) for row in cards_table(runs[runs.covariance == "one-pass"]).itertuples()]
    first = report.findings[0]
    lines.append(f"The audit blames {first.operation} ({first.phase}), {first.kind}, at {first.line}.")
    lines += _cures(runs[runs.recorded], MARGINS)
    lines += _prices()
    lines.append(_retuned(found))
    return "\n".join(lines)


def _counted(row: Any) -> str:
    where = f"recorded on {row.machine}" if row.recorded else "here"
    return f"One-pass covariance under {row.setting}, {where}: {row.diverged} of {row.seeds} seeds became NaN."


def _cures(recorded: pd.DataFrame, margins: Iterable[str | float]) -> list[str]:
    """The verdict on each cure in TF32 against one pass in float32."""
    named = recorded.assign(way=recorded.covariance + " under " + recorded.setting)
    reference = "one-pass under cuda:tf32=off"
    cured = named[(named.way == reference) | ((named.setting == "cuda:tf32=on") & (named.covariance != "one-pass"))]
    if reference not in set(cured.way):
        return []
    seen = [verdict(cured, factor="way", margin=margin, reference=reference) for margin in margins]
    return [
        f"{way} against {reference}: {seen[0].table.seeds[place]} seeds, {seen[0].table.diverged[place]} became NaN; "
        + ", ".join(f"within {one.margin} {one.decisions[way]}" for one in seen)
        + "."
        for place, way in enumerate(seen[0].table.way)
    ]


def _prices() -> list[str]:
    lines = []
    for machine, rows in recorded_prices().groupby("machine"):
        ms = rows.set_index(["setting", "covariance"]).ms.to_dict()
        lines.append(
            f"A step of a large one on {machine}: {ms['cuda:tf32=off', 'one-pass']:.1f} ms in float32; in TF32 "
            f"{ms['cuda:tf32=on', 'centred']:.1f} ms centred, and {ms['cuda:tf32=on', 'float32']:.1f} ms with the one "
            "product kept in float32."
        )
    return lines


def _retuned(found: Reproduction) -> str:
    """How many of the changes that were tried gave the old losses back, by what they change."""
    names = [name for name in found.original if name in ARITHMETIC]
    tried = found.table[found.table.distance > 0]
    of_arithmetic = [any(str(row[name]) != str(found.original[name]) for name in names) for _, row in tried.iterrows()]
    arithmetic, retuned = tried[of_arithmetic], tried[[not some for some in of_arithmetic]]
    return (
        f"Of {len(retuned)} retunings of the training {int(retuned.confirmed.sum())} gave the old losses back, and of "
        f"{len(arithmetic)} changes of the arithmetic {int(arithmetic.confirmed.sum())} (margin {found.margin_asked})."
    )
