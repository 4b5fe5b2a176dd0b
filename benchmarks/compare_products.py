"""Emulated products beside an NVIDIA GPU's: record the GPU's, compare, write the table.

python benchmarks/compare_products.py --record data/gpu_products    # on a machine with an NVIDIA GPU
python benchmarks/compare_products.py --write benchmarks/products.md    # anywhere, against what is recorded
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from gpulab.diagnostics.products import (
    compare_products,
    find_kernels,
    record_products,
    recorded_products,
    summarize_products,
)

READING = """
`explained` is the share of the GPU's squared deviation from the exact result that the emulation makes as well, with
sums as the CPU's libraries make them; `equal` the share of elements with the same bits. With the `tensor core's sums`
the sums are made in the order found for the kernel. `used` is what the kernel multiplied in: a library that may use
TF32 leaves it unused in many convolutions. Where all numbers are positive, or the factors are short already, rounding
the factors does little, and what deviates is how the sum drifts when a tensor core cuts it: the formats cannot explain
that, its sums do. What is not the same bits is split over the chip in a way that was not found: gradients of weights,
convolutions over few places, a product of 8192 terms returned in bfloat16.
"""


def main(
    record: Annotated[Path | None, typer.Option(help="record this machine's GPU into this folder")] = None,
    find: Annotated[
        Path | None, typer.Option(help="search for the recorded kernels' arithmetic, into this folder")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="write the table to this file")] = None,
    exact: Annotated[bool, typer.Option(help="also sum in the tensor core's order")] = True,
) -> None:
    """Record, or compare what is recorded."""
    if record is not None:
        record_products(record, shlex.join(["python", *sys.argv]))
        return
    if find is not None:
        find_kernels(find)
        return
    _, notes = recorded_products()
    frame = compare_products(exact=exact)
    gpu = notes["passport"]["gpus"][0]["name"]
    tables = {"In short": summarize_products(frame)}
    if exact:
        tables["Not bit for bit"] = frame[(frame.used != "float32") & (frame.equal_exact < 1)]
    text = f"# Emulated products beside those of an {gpu}\n\n"
    text += f"Recorded by `{notes['command']}`, compared by `python benchmarks/compare_products.py`.\n"
    text += READING
    for title, table in tables.items():
        text += f"\n## {title}\n{_markdown(table)}\n"
    print(text)
    if write is not None:
        write.write_text(text, encoding="utf-8")


def _markdown(frame: pd.DataFrame) -> str:
    def shown(value: object) -> str:
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.to_numpy(dtype=object).tolist()]
    return "\n".join(f"| {' | '.join(map(shown, row))} |" for row in rows)


if __name__ == "__main__":
    typer.run(main)
