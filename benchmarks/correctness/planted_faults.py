"""How many planted faults an audit detects and locates, and how many false alarms it raises.

    python benchmarks/correctness/planted_faults.py --write benchmarks/results/planted_faults.md

The faults and the sweep are helpers of the tests in `tests/audits`; `test_planted_faults.py` in
that folder runs a part of the sweep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer

from benchmarks.measuring import made_by, run, show
from tests.audits._fault_catalogue import faults
from tests.audits._fault_sweep import rates, right_steps, sweep
from tests.audits._helpers import NETWORKS


def main(
    write: Annotated[Path | None, typer.Option(help="page of Markdown, between its marks")] = None,
    seeds: Annotated[
        int, typer.Option(help="seeds of each network for the steps without a fault")
    ] = 50,
) -> None:
    """Audit each planted fault, and steps without a fault, on two threads against one."""
    torch.set_num_threads(2)
    detected = rates(sweep(faults())).to_string(float_format="{:.0%}".format)
    correct_steps = pd.concat([right_steps(network, range(seeds)) for network in NETWORKS])
    false_alarms = (correct_steps.kind != "rounding").sum()
    counts = f"{false_alarms} false alarms in {len(correct_steps)} correct steps"
    show("Planted faults", write, measured=f"```\n{detected}\n{counts}\n```\n\n{made_by()}")


if __name__ == "__main__":
    run(lambda: typer.run(main))
