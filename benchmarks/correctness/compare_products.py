"""Products of a real GPU compared with emulated ones: how much of the chip is emulated?

A case is one matrix product or convolution on inputs that any machine can reproduce from a seed.
The results of a GPU are stored in `data/measured/products-*`, so that every machine can compare.

    python benchmarks/correctness/compare_products.py --write    # on any machine: compare with what
    is recorded

The version of this script at commit 6aece191 also records a GPU's products (`--record`), and
searches for the arithmetic that fits the records (`--find`, stored in
`data/measured/products-found.json`), which takes minutes. `--write` writes
`benchmarks/results/products.md`, and for notebook 02 `data/measured/products-comparison.json`.

References:
    The method of Fasi, Higham, Mikaitis, Pranesh 2021 (PeerJ Computer Science 7:e330).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from benchmarks.measuring import RESULTS, keep, markdown, run, show
from gpulab.numerics import emulate, round_to
from gpulab.numerics._emulation import PRECISIONS, Arithmetic
from gpulab.report import Progress
from gpulab.store.recorded import read_document, recorded_folder

RECORDED = recorded_folder("measured") / "products-nvidia-h200.json"
SAMPLE = 1024  # the number of elements of each result that are compared
# (rows, summed, columns) of a matrix product; (images, channels, height, width) and (channels,
# size, stride) of a convolution: two of PredNet's, one of its published size, and three of a
# residual network's.
MATRICES = ((64, 64, 64), (48, 112, 80), (128, 1024, 64), (32, 8192, 32))
CONVOLUTIONS = (
    ((1, 16, 48, 64), (32, 3, 1)),
    ((1, 96, 60, 80), (192, 3, 1)),
    ((4, 64, 28, 28), (64, 3, 1)),
    ((2, 512, 7, 7), (512, 3, 1)),
    ((16, 64, 28, 28), (128, 3, 2)),
    ((2, 64, 20, 24), (48, 1, 1)),
)
INPUTS = ("normal", "positive", "badly scaled", "already rounded")
MATRIX, FORWARD = "matrix product", "convolution"
TO_INPUT, TO_WEIGHT = "gradient of the input", "gradient of the weight"
OPERATIONS = (MATRIX, FORWARD, TO_INPUT, TO_WEIGHT)


@dataclass(frozen=True)
class Case:
    """One product: its operation and shape, the requested format, and its inputs."""

    operation: str
    shape: int
    inputs: str
    format: str
    result: str = "float32"
    channels_last: bool = False

    def __str__(self) -> str:
        layout = ", channels last" if self.channels_last else ""
        return (
            f"{self.operation} {self.shape}, {self.inputs}, {self.format} to {self.result}{layout}"
        )

    @property
    def size(self) -> str:
        """Return the shape in words."""
        if self.operation == MATRIX:
            return "×".join(map(str, MATRICES[self.shape]))
        x, (channels, size, stride) = CONVOLUTIONS[self.shape]
        return f"{'×'.join(map(str, x))} to {channels}, {size}×{size}" + (
            f", stride {stride}" if stride > 1 else ""
        )

    @cached_property
    def operands(self) -> tuple[Tensor, Tensor]:
        """Return two float32 factors: matrices, or a convolution's input, weight or gradient."""
        generator = np.random.default_rng(
            [INPUTS.index(self.inputs), self.shape, OPERATIONS.index(self.operation)]
        )
        if self.operation == MATRIX:
            rows, inner, columns = MATRICES[self.shape]
            return self._draw(generator, (rows, inner)), self._draw(generator, (inner, columns))
        x, (channels, size, stride) = CONVOLUTIONS[self.shape]
        weight, out = (
            (channels, x[1], size, size),
            (x[0], channels, *((n - 1) // stride + 1 for n in x[2:])),
        )
        first, second = {FORWARD: (x, weight), TO_INPUT: (out, weight), TO_WEIGHT: (out, x)}[
            self.operation
        ]
        return self._draw(generator, first), self._draw(generator, second)

    def _draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
        if self.inputs == "positive":
            return torch.from_numpy(generator.random(shape, dtype=np.float32))
        x = generator.standard_normal(shape, dtype=np.float32)
        if self.inputs == "badly scaled":
            x = np.ldexp(x, generator.integers(-10, 11, shape)).astype(np.float32)
        return round_to(
            torch.from_numpy(x), self.format if self.inputs == "already rounded" else "float32"
        )

    def compute(self, first: Tensor, second: Tensor) -> Tensor:
        """Compute the product in the factors' own type, on their device."""
        if self.operation == MATRIX:
            return first @ second
        x, (_, size, stride) = CONVOLUTIONS[self.shape]
        options: Any = {"stride": stride, "padding": size // 2}
        if self.operation == FORWARD:
            return F.conv2d(first, second, **options)
        if self.operation == TO_INPUT:
            return conv2d_input((len(first), second.shape[1], *x[2:]), second, first, **options)
        return conv2d_weight(second, (first.shape[1], x[1], size, size), first, **options)

    def crop(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Crop the factors to the part from which the elements of a sample are computed."""
        parts = {
            FORWARD: (first[:1], second[:8]),
            TO_INPUT: (first[:1], second[:, :8]),
            TO_WEIGHT: (first[:, :8], second),
        }
        return parts.get(self.operation, (first, second))

    def sample(self, product: Tensor) -> Tensor:
        """Return up to `SAMPLE` elements of a product, of the whole or of the cropped factors."""
        if self.operation != MATRIX:
            product = product[:8] if self.operation == TO_WEIGHT else product[:1, :8]
        flat = product.reshape(-1)
        return flat[
            torch.linspace(0, flat.numel() - 1, min(SAMPLE, flat.numel())).long().to(flat.device)
        ]

    def exact(self) -> Tensor:
        """Compute the sample in float64."""
        return self.sample(self.compute(*(x.double() for x in self.crop(*self.operands))))

    def emulated(self, how: Arithmetic) -> Tensor:
        """Compute the sample in an arithmetic; return it as float64."""
        with emulate(how):
            return self.sample(self.compute(*self.crop(*self.operands))).double()


def cases() -> list[Case]:
    """Return every recorded case."""
    formats = [
        ("float32", "float32"),
        ("tf32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
    ]
    formats += [("float16", "float16"), ("float16", "float32"), ("float8_e4m3fn", "float32")]
    layouts = (
        ("tf32", "float32", False),
        ("tf32", "float32", True),
        ("bfloat16", "bfloat16", True),
    )
    matrices = itertools.product(formats, range(len(MATRICES)), INPUTS)
    convolutions = itertools.product(layouts, OPERATIONS[1:], range(len(CONVOLUTIONS)), INPUTS[:3])
    return [
        Case(MATRIX, shape, inputs, *types)
        for types, shape, inputs in matrices
        if types[0] != "float32" or inputs != "already rounded"
    ] + [
        Case(operation, shape, inputs, *layout) for layout, operation, shape, inputs in convolutions
    ]


def recorded_samples() -> dict[Case, Tensor]:
    """Return the results of the GPU: a sample of every case, as float64."""
    samples = load_file(RECORDED.with_suffix(".safetensors"))
    return {case: samples[str(case)].double() for case in cases()}


# --- the comparison -------------------------------------------------------------------------------


def found_arithmetic() -> dict[Case, Arithmetic]:
    """Return the arithmetic of each case, with the rounding, tile and slices closest to its result.

    A library chooses its kernel by the shape, not by the numbers, so the choices found for normally
    distributed numbers are used for all.
    """
    found = {
        fit.pop("case"): fit
        for fit in read_document(RECORDED.with_name("products-found.json"))["found"]
    }
    arithmetic = {}
    for case in cases():
        fit = dict(found[str(replace(case, inputs=INPUTS[0]))])
        roundings = 3 * (fit.pop("rounding"),)
        fit["channel_tile"] = fit.pop("tile")
        arithmetic[case] = replace(
            PRECISIONS[fit["format"]], result=case.result, roundings=roundings, **fit
        )
    return arithmetic


def compare_products(
    results: Mapping[Case, Tensor], arithmetic: Mapping[Case, Arithmetic]
) -> pd.DataFrame:
    """Compare samples of a GPU's products, as float64, with emulated ones: a row for each case.

    `used` is the format in which the kernel multiplied; it is `float32` if the library did not use
    TF32. `error` is the GPU's relative distance from the exact result. `explained` is the share of
    its squared deviation that the emulation reproduces, and `equal` the share of elements with the
    same bits, both with sums in this machine's order. `explained_exact` and `equal_exact` are the
    same with sums in the tensor core's order.
    """
    return pd.DataFrame(
        compared(case, result, arithmetic[case]) for case, result in Progress(results.items())
    )


def compared(case: Case, result: Tensor, how: Arithmetic) -> dict[str, Any]:
    """Return a row of `compare_products`."""
    truth = case.exact()
    emulated = case.emulated(replace(how, order=None, slices=1))
    row: dict[str, Any] = {
        "operation": case.operation,
        "size": case.size,
        "layout": "channels last" if case.channels_last else "",
        "inputs": case.inputs,
        "asked": case.format,
        "result": case.result,
        "used": how.format,
        "rounding": "" if how.format == "float32" else how.roundings[0],
        "error": finite_norm(result - truth) / finite_norm(truth),
        "explained": explained(result, emulated, truth),
        "equal": share_equal(emulated, result),
    }
    if how.order is not None:
        emulated = case.emulated(how)
        row |= {"tile": how.channel_tile, "slices": how.slices}
        row |= {
            "explained_exact": explained(result, emulated, truth),
            "equal_exact": share_equal(emulated, result),
        }
    return row


def explained(result: Tensor, emulated: Tensor, exact: Tensor) -> float:
    """Return the share of a result's squared deviation from the exact one that is explained."""
    deviation = finite_norm(result - exact)
    return 1 - (finite_norm(result - emulated) / deviation) ** 2 if deviation else float("nan")


def share_equal(emulated: Tensor, result: Tensor) -> float:
    """Return the share of equal elements; NaN equals NaN."""
    return float(((emulated == result) | (emulated.isnan() & result.isnan())).double().mean())


def finite_norm(x: Tensor) -> float:
    """Return the norm of the finite elements.

    Formats of 16 bits overflow. If they do so differently in the two results, `equal` shows it.
    """
    return float(x[x.isfinite()].norm())


def summarize(frame: pd.DataFrame) -> pd.DataFrame:
    """Summarise `compare_products`: a row for each operation, requested format and used format.

    `bit for bit` counts the cases in which every element is the same.
    """
    # If factors are already rounded, only the sums deviate, which is a separate question.
    inputs = frame.inputs.where(frame.inputs == "already rounded", "to be rounded")
    groups = frame.assign(inputs=inputs, same_bits=frame.equal_exact == 1).groupby(
        ["operation", "asked", "result", "used", "rounding", "inputs"], sort=False
    )
    columns = {
        "cases": ("error", "size"),
        "median error": ("error", "median"),
        "least explained": ("explained", "min"),
        "median explained": ("explained", "median"),
        "median equal": ("equal", "median"),
        "least explained, tensor core's sums": ("explained_exact", "min"),
        "median equal, tensor core's sums": ("equal_exact", "median"),
        "bit for bit, tensor core's sums": ("same_bits", "sum"),
    }
    return groups.agg(**columns).astype(float).reset_index()


def main(
    write: Annotated[bool, typer.Option("--write", help="write the tables")] = False,
) -> None:
    """Compare the recorded products with emulated ones."""
    frame = compare_products(recorded_samples(), found_arithmetic())

    def shown(table: pd.DataFrame) -> str:
        return markdown(
            table.map(lambda value: f"{value:.6g}" if isinstance(value, float) else str(value))
        )

    differ = frame[(frame.used != "float32") & (frame.equal_exact < 1)]
    page = RESULTS / "products.md" if write else None
    show(
        "Emulated products compared with those of a GPU",
        page,
        short=shown(summarize(frame)),
        differ=shown(differ),
    )
    if write:
        rows = json.loads(summarize(frame[frame.inputs == INPUTS[0]]).to_json(orient="records"))
        gpu = read_document(RECORDED)["passport"]["gpus"][0]["name"]
        keep(
            RECORDED.with_name("products-comparison.json"),
            "cpu",
            gpu=gpu,
            inputs=INPUTS[0],
            comparison=rows,
        )


if __name__ == "__main__":
    run(lambda: typer.run(main))
