r"""Whole training programs computed in two ways: does an audit find faults and clear correct ones?

    python benchmarks/correctness/compare_programs.py --write benchmarks/results/programs.md
    python benchmarks/correctness/compare_programs.py --write benchmarks/results/programs.md \
        --setting cuda:tf32=off --part cuda

The programs are in `whole_programs.py` and `other_programs.py`. Both sets were written before the
audit was run on them; the second by an author who had not seen the audit. A fault is located if the
first finding names a line, of either side, at most two lines from a line that is marked as the
fault. It is located exactly if the finding names that line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from tqdm.auto import tqdm

import gpulab as gl
from benchmarks.correctness import other_programs, whole_programs
from benchmarks.measuring import made_by, markdown, run, show

NEAR = 2  # the largest distance from the fault, in lines
# What an audit of a correct program may report. On a GPU, atomic additions are not deterministic.
CLEARED = {"rounding", "nondeterminism"}
SETS = {"first": whole_programs, "second": other_programs}


def scores(setting: str) -> pd.DataFrame:
    """Return a row for each program."""
    rows = []
    for name, module in SETS.items():
        file = Path(module.__file__ or "").name
        for program in tqdm(module.PROGRAMS, leave=False, disable=None):
            right = gl.audit(
                program.step("plain"), program.step("rewritten"), setting=setting, progress=False
            )
            faulty = gl.audit(
                program.step("plain"), program.step("faulty"), setting=setting, progress=False
            )
            first = faulty.findings[0]
            named = [
                int(line)
                for line in re.findall(rf"{re.escape(file)}:(\d+)", f"{first.line} {first.detail}")
            ]
            apart = [abs(line - fault) for line in named for fault in program.fault_lines]
            rows.append(
                {
                    "set": name,
                    "program": program.name,
                    "right": right.kind in CLEARED and not right.faulty,
                    "found": faulty.kind not in CLEARED,
                    "said": faulty.kind,
                    "placed": min(apart, default=NEAR + 1) <= NEAR,
                    "exactly": 0 in apart,
                }
            )
    return pd.DataFrame(rows)


def main(
    write: Annotated[Path | None, typer.Option(help="page of Markdown, between its marks")] = None,
    setting: Annotated[str, typer.Option(help="the setting of both programs")] = "cpu:threads=1",
    part: Annotated[str, typer.Option(help="the part of the page to write")] = "measured",
) -> None:
    """Audit each program against another way to compute the same, with and without a fault."""
    torch.set_num_threads(1)
    rows = scores(setting)
    counts = rows.groupby("set")[["right", "found", "placed", "exactly"]].sum()
    counts.insert(0, "programs", rows.groupby("set").size())
    misplaced = ", ".join(rows.program[rows.found & ~rows.placed])
    shown = (
        f"{markdown(counts.reset_index())}\n\nFound, but located elsewhere:"
        f" {misplaced}.\n\n{made_by()}"
    )
    show("Programs computed in two ways", write, **{part: shown})


if __name__ == "__main__":
    run(lambda: typer.run(main))
