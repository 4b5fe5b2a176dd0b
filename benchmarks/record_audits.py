"""Audit the networks of `networks.py` between two settings on this machine; keep traces and a summary.

python benchmarks/record_audits.py cpu cuda:tf32=off --output data

With --recorded, the settings but the first are not run but read from traces that another machine kept.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import networks
import typer

import gpulab as gl
from gpulab.diagnostics.audits import Audit
from gpulab.passports import Passport
from gpulab.store import records


def main(
    settings: Annotated[list[str], typer.Argument(help="the first against each of the others")],
    output: Path = Path("data"),
    only: Annotated[str, typer.Option(help="networks, separated by commas")] = ",".join(networks.NETWORKS),
    keep: Annotated[str, typer.Option(help="settings whose traces are kept, separated by semicolons")] = "",
    recorded: Annotated[Path | None, typer.Option(help="a folder with traces NETWORK-SETTING.trace")] = None,
) -> None:
    """Write OUTPUT/measured/audits-here.json, and OUTPUT/traces/NETWORK-SETTING.trace for what is to be kept."""
    reference, *others = settings
    rows = []
    for name in only.split(","):
        step = networks.NETWORKS[name]()
        first = gl.record(step, reference, progress=False)
        for setting in others:
            started = time.perf_counter()
            file = re.sub(r"[^\w.]+", "-", f"{name}-{setting}.trace")
            if recorded is None:
                second = gl.record(step, setting, reference=first, progress=False)
            else:
                second = gl.diagnostics.Trace.load(recorded / file)
            rows.append(_row(name, gl.audit(first, second), time.perf_counter() - started))
            print(json.dumps(rows[-1])[:400], flush=True)
            if setting in keep.split(";"):
                second.save(output / "traces" / file)
    kinds = {gl.Setting.parse(setting).kind for setting in settings}
    document = records.measured("cpu" if kinds == {"cpu"} else "cuda", rows=rows)
    records.write_json(output / "measured" / "audits-here.json", document)


def _row(name: str, report: Audit, seconds: float) -> dict[str, object]:
    table = report.table
    return {
        "network": name,
        "a": report.a.setting,
        "b": report.b.setting,
        "machine_a": Passport(report.a.passport).summary(),
        "machine_b": Passport(report.b.passport).summary(),
        "operations": len(table),
        "matched": int((table.difference.notna() & table.error_a.notna()).sum()),
        "checked": int(table.ratio_a.notna().sum() + table.ratio_b.notna().sum()),
        "findings": dict(Counter(finding.kind for finding in report.findings)),
        "largest_ratio": float(table[["ratio_a", "ratio_b"]].max().max()),
        "largest_so_far": float(table[["so_far_a", "so_far_b"]].max().max()),
        "worst": [str(finding) for finding in report.findings[:3]],
        "seconds": seconds,
    }


if __name__ == "__main__":
    typer.run(main)
